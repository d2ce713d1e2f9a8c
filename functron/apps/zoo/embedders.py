"""Embedders of texts: encoders and decoders of transformers that make a vector of each text.

``--model hf-embedder:PATH`` is the model of a folder as sentence-transformers lays it out
(modules.json, 1_Pooling/config.json), or of transformers alone, whose pooling is then a setting.
It is partitioned as `functron.apps.zoo.heads`' classifiers are, and learns from JSONL lines: each
text is to find its own among those of the whole batch of all ranks, or pairs have scores.
``functron convert run:RUN hf-embedder:OUT`` writes the same layout.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from functron import partitioning
from functron.apps.zoo.heads import (
    choose_pad,
    count_positions,
    cut_text,
    define_params,
    empty_problems,
    partition_batch,
    setting_problems,
    split_params,
    sum_over_batch,
)
from functron.apps.zoo.module_trial import drops_out, try_training
from functron.apps.zoo.modules import (
    OwnWeights,
    drop_weights,
    dropout_inputs,
    fixed_problems,
    flatten,
    place_buffers,
    rule_problems,
)
from functron.core import tree
from functron.core.errors import Problem, on_hub, raise_problems, refuse
from functron.core.settings import choice_problems, setting
from functron.core.tables import shows_differences
from functron.core.typing import Tensor
from functron.data.mapped_files import TextTokenizer
from functron.data.sampling import IGNORED, SampleMaker, Samples, shuffled
from functron.models.config import TextConfig
from functron.models.family import Family, Objective
from functron.models.options import DEFAULTS, Batch, ModelOptions, num_targets
from functron.program.recorder import aside
from functron.spmd import BoundMesh, Mesh, Rules
from functron.spmd.axes import Scope, enter

if TYPE_CHECKING:  # it reads the families
    from functron.training.config import TrainConfig

SCHEME = "hf-embedder"
"""The scheme of their names: a folder of transformers or sentence-transformers."""

_MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
"""Of each pooling, the end of its name in 1_Pooling/config.json."""
_SCORE = 2**30
"""Targets of scored pairs are whole: ``(1 + score) * 2^30``."""
_NEVER = -1e30
"""The score of what is no candidate; finite, as gradients of sums of exponentials need it."""


@shows_differences
@dataclass(frozen=True, kw_only=True)
class EmbedderConfig(TextConfig):
    """A model of transformers whose tokens are pooled to a vector, and what it learns.

    A sample is a line of a file with all of its texts: each has ``seq / texts`` tokens.

    Attributes:
        origin: hf-embedder:PATH, a folder with modules.json or config.json, and weights unless it
            is to begin with random ones. It is read whenever the run begins or goes on.
        pooling: the vector is that of the first token (cls), the mean over all, or that of the
            last; folder: as 1_Pooling/config.json has it.
        learns: pairs: lines of an ``anchor`` and a ``positive``, which it is to find among those of
            the whole batch (the cross-entropy of ``scale * cosine``, InfoNCE); scores: lines of
            ``sentence1``, ``sentence2`` and a ``score`` from -1 to 1, which is to be their cosine
            (squared errors).
        scale: of cosines, in learning pairs: the inverse of a temperature.
        negatives: how many texts ``negative`` (``negative_1``, ...) a line has besides, which are
            candidates for all anchors; of pairs.
        rules: how tp splits parameters, as of a classifier.
        max_seq: the longest sample that it takes, in tokens of all of its texts.
        dropouts: on: in training the model runs in training mode, and its dropout draws from the
            step's key, the same numbers on every mesh; off: it runs as in evaluation, without.
    """

    vocab_multiple: int = 1
    origin: str = setting("", instead="name it as the model: --model hf-embedder:PATH")
    pooling: Literal["folder", "cls", "mean", "last"] = "folder"
    learns: Literal["pairs", "scores"] = "pairs"
    scale: float = 20.0
    negatives: int = 0
    rules: str = ""
    max_seq: int = 2**31 - 1
    dropouts: Literal["on", "off"] = "on"

    def __post_init__(self):
        found = [*fixed_problems(self, "embedder", "model"), *choice_problems(self)]
        if not 0 < self.scale < math.inf:
            found.append(Problem("embedder.scale", str(self.scale), "above 0", "20 is usual"))
        most = 0 if self.learns == "scores" else 64
        if not 0 <= self.negatives <= most:
            wanted = f"0 to {most}" if most else "0 in learning scores of pairs"
            found.append(Problem("embedder.negatives", str(self.negatives), wanted))
        found += rule_problems(self.rules, "embedder.rules")
        raise_problems("invalid EmbedderConfig", found)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the texts of a line."""
        if self.learns == "scores":
            return "sentence1", "sentence2"
        more = ["negative"] if self.negatives == 1 else [
            f"negative_{n}" for n in range(1, self.negatives + 1)
        ]  # fmt: skip
        return "anchor", "positive", *more


# --- folders


class EmbedderLayout(NamedTuple):
    """The statements of a folder on an embedder beside its model.

    Attributes:
        model: the folder of transformers' files, and of the tokenizer.
        pooling: how tokens are pooled; empty: it does not say.
        normalises: whether vectors have length 1.
        max_text: the longest text, in tokens; None: it does not say.
    """

    model: Path
    pooling: str = ""
    normalises: bool = True
    max_text: int | None = None


def read_layout(path: Path) -> EmbedderLayout:
    """The layout of a folder of sentence-transformers, or of transformers alone.

    Raises:
        ValueError: there is no such folder, or it has parts or settings that would give other
            vectors; all are listed.
    """
    if not (path / "modules.json").is_file():
        if not (path / "config.json").is_file():
            wanted = "a folder with modules.json or config.json"
            refuse("no model to train", "model", f"{SCHEME}:{path}", wanted, on_hub(path))
        return EmbedderLayout(path)
    problems, model, pooling, kinds = [], path, "", []
    for row in _read_json(path / "modules.json"):
        kind, folder = str(row.get("type", "")).rpartition(".")[2], path / str(row.get("path", ""))
        kinds.append(kind)
        if kind == "Transformer":
            model = folder
        elif kind == "Pooling":
            pooling = _read_pooling(folder / "config.json", problems)
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        wanted = "Transformer, Pooling and, at most, Normalize"
        fix = "functron train has no other layers: choose a model without them"
        problems.append(Problem(str(path / "modules.json"), ", ".join(kinds), wanted, fix))
    found = [x for x in (model, path) if (x / "sentence_bert_config.json").is_file()]
    own = _read_json(found[0] / "sentence_bert_config.json") if found else {}
    if own.get("do_lower_case"):
        fix = "set it to false, and write texts in lower case"
        problems.append(Problem(str(found[0]), "do_lower_case", "texts as they are", fix))
    file = path / "config_sentence_transformers.json"
    whole = _read_json(file) if file.is_file() else {}
    if name := whole.get("default_prompt_name"):
        fix = "set it to null, and write the prompt into texts"
        problems.append(Problem(str(file), f"default_prompt_name {name}", "none", fix))
    if whole.get("similarity_fn_name") not in (None, "cosine"):
        got = f"similarity_fn_name {whole['similarity_fn_name']}"
        problems.append(
            Problem(str(file), got, "cosine, which is what is learnt", "set it to that")
        )
    raise_problems("no model to train", problems)
    return EmbedderLayout(model, pooling, "Normalize" in kinds, own.get("max_seq_length"))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"no model to train\n  - {file}: {error}") from error


def _read_pooling(file: Path, problems: list[Problem]) -> str:
    own = _read_json(file)
    named = own.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [*(named or ())]
    modes += [name.removeprefix("pooling_mode_") for name, used in own.items()
              if name.startswith("pooling_mode_") and used]  # fmt: skip
    found = [x for x in _MODES if modes in ([x], [_MODES[x]], [f"{x}_token"])]
    if not found:
        got, wanted = (
            " and ".join(map(str, modes)) or "none",
            f"one of {', '.join(_MODES.values())}",
        )
        problems.append(Problem(str(file), got, wanted, "choose a model that pools so"))
    return found[0] if found else ""


def write_layout(folder: Path, config: EmbedderConfig) -> None:
    """Write what sentence-transformers reads beside a model's own files in this folder."""
    opened, own = open_embedder(config), read_layout(_path_of(config))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if own.normalises else [])]
    rows = []
    for number, kind in enumerate(kinds):
        at = f"{number}_{kind}" if number else ""
        made = f"sentence_transformers.models.{kind}"
        rows.append({"idx": number, "name": str(number), "path": at, "type": made})
        (folder / at).mkdir(exist_ok=True)
    modes = (*_MODES.values(), "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
    pooling = {f"pooling_mode_{x}": x == _MODES[opened.pooling] for x in modes}
    pooling = {"word_embedding_dimension": opened.width, **pooling, "include_prompt": True}
    whole = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    given = _path_of(config) / "config_sentence_transformers.json"
    whole |= _read_json(given) if given.is_file() else {}
    for name, value in (
        ("modules.json", rows),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": opened.max_text, "do_lower_case": False}),
        ("config_sentence_transformers.json", whole),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _path_of(config: EmbedderConfig) -> Path:
    return Path(config.origin.partition(":")[2])


# --- the model


class OpenedEmbedder(NamedTuple):
    """A model of a folder, with abstract parameters.

    Attributes:
        call: ``(params, tokens, mask)`` to the vectors of texts ``[rows, width]``, of length 1.
        train: the same in training mode, with ``key`` and ``rows``.
        params: by name.
        pooling: of its tokens.
        pad: the id at padding, which no text sees.
        width: of vectors.
        vocab_size, max_text: of its config.json; the latter may be None.
        dropouts: whether it makes other vectors in training.
        undrawn: why its training cannot be drawn from a key; empty: it can.
    """

    call: Callable[..., Tensor]
    train: Callable[..., Tensor]
    params: Mapping[str, Tensor]
    pooling: str
    pad: int
    width: int
    vocab_size: int
    max_text: int | None
    dropouts: bool
    undrawn: str


def build_embedder(config: EmbedderConfig, seed: int = 0) -> Any:
    """transformers' model of a config, with its weights; a pooler, which nothing reads, is kept.

    Raises:
        ValueError: there is no such folder, or weights are missing.
    """
    path = read_layout(_path_of(config)).model
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        fix = 'pip install "functron[transformers]"'
        raise ModuleNotFoundError(f"{SCHEME}:{path} needs transformers; fix: {fix}") from error
    own = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    kind = transformers.AutoModel
    missing: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
                made = kind.from_config(own)
            else:
                given = {"config": own, "dtype": "auto", "local_files_only": True}
                made, read = kind.from_pretrained(path, output_loading_info=True, **given)
                missing = [*read.get("missing_keys", ())]
                missing += [row[0] for row in read.get("mismatched_keys", ())]
        except (ValueError, RuntimeError) as error:  # the latter of shapes
            raise ValueError(f"no model to train\n  - model: {SCHEME}:{path}: {error}") from error
    missing = [name for name in missing if not name.startswith("pooler.")]
    if missing:
        got = f"no weights of this name and shape for {', '.join(sorted(missing)[:3])}"
        wanted = "all of the model's: the others would be random"
        refuse("no model to train", f"{SCHEME}:{path}", got, wanted, "complete the files")
    for name, weight in made.named_parameters():
        if name.startswith("pooler."):  # decay would change what no text sees
            weight.requires_grad_(False)
    return made.eval()


def open_embedder(config: EmbedderConfig, device: str = "cpu") -> OpenedEmbedder:
    """The model of a config, with abstract parameters, and buffers on a device.

    It is built once in a process.

    Raises:
        ValueError: as of `build_embedder`; or its folder does not say how tokens are pooled; or its
            training draws numbers in other ways than by dropout.
    """
    opened = _open_on(config.origin, config.pooling, config.torch_dtype, device)
    if not opened.pooling:
        got, wanted = "no 1_Pooling/config.json", "how tokens become a vector"
        fix = "--embedder.pooling cls, mean or last"
        refuse(f"cannot train {config.origin}", "model", got, wanted, fix)
    if opened.undrawn and config.dropouts == "on":
        wanted = "dropout of samples alone, which draws from the step's key"
        fix = "set its rates to 0, or run it as in evaluation: --embedder.dropouts off"
        refuse(f"cannot train {config.origin}", "model", opened.undrawn, wanted, fix)
    return opened


@functools.lru_cache(4)
def _open_on(origin: str, pooling: str, dtype: torch.dtype, device: str) -> OpenedEmbedder:
    config = EmbedderConfig(origin=origin)
    layout = read_layout(_path_of(config))
    chosen = layout.pooling if pooling == "folder" else pooling
    with aside(), enter(Scope()), torch.enable_grad():
        module = build_embedder(config)
        differs, undrawn = try_training(
            module, _call_plainly, lambda x: module(input_ids=x).last_hidden_state
        )
        drop_weights(module)
        place_buffers(module, dtype, device)
        (fn, params), (train, _) = (
            partitioning.from_module(module, train=x) for x in (False, True)
        )
        own = module.config
        drops = differs or any(map(drops_out, module.modules()))
        one, other = (functools.partial(_find_vectors, each, chosen) for each in (fn, train))
        limits = layout.max_text, count_positions(module)
        return OpenedEmbedder(
            one, other, params, chosen, choose_pad(own) or 0, own.hidden_size, own.vocab_size,
            min(filter(None, limits), default=None), drops, undrawn if drops else "",
        )  # fmt: skip


def _call_plainly(fn: Callable, params, tokens: Tensor, *, router: bool, **more: Tensor) -> tuple:
    """As `functron.apps.zoo.module_trial.try_module` calls modules."""
    return fn(params, input_ids=tokens, **more).last_hidden_state, None


def _find_vectors(
    fn: Callable, pooling: str, params, tokens: Tensor, mask: Tensor, **more: Tensor
) -> Tensor:
    """Vectors of length 1, of texts ``[rows, seq]`` that are padded at their ends."""
    hidden = fn(params, input_ids=tokens, attention_mask=mask, **more).last_hidden_state
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if pooling == "cls":
        found = hidden[:, 0]
    else:
        count = mask.sum(1, keepdim=True)
        kept = mask
        if pooling == "last":
            kept = (torch.arange(mask.shape[1], device=mask.device) == count - 1).long()
            count = count.clamp(max=1)
        found = (hidden * kept.to(hidden.dtype).unsqueeze(-1)).sum(1) / count.clamp(min=1)
    length = found.square().sum(-1, keepdim=True).sqrt()
    return found / length.clamp(min=1e-12)


def embed(config: EmbedderConfig, params: tree.Tree, texts: Sequence[Sequence[int]]) -> Tensor:
    """The vectors of texts, in evaluation, by whole parameters: ``[texts, width]``, of length 1.

    Args:
        config: of the model.
        params: whole, on one device; `functron.apps.zoo.embedders.defs` describes them.
        texts: tokens of each, with what the model expects around them
            (`functron.data.tokenizer.open_tokenizer`); none is empty.

    Raises:
        ValueError: a text is empty, or longer than the model reads.
    """
    leaves = flatten(params)
    device = next(iter(leaves.values())).device
    opened = open_embedder(config, device.type)
    longest, most = max(map(len, texts), default=0), opened.max_text or 2**31 - 1
    if not all(texts) or longest > most:
        got = f"a text of {longest if all(texts) else 0} tokens"
        refuse("cannot embed", "texts", got, f"1 to {most}", "cut it, or leave it out")
    mask = torch.arange(longest) < torch.tensor([[len(x)] for x in texts]).reshape(-1, 1)
    tokens = torch.full((len(texts), longest), opened.pad)
    tokens[mask] = torch.tensor([x for text in texts for x in text], dtype=torch.int64)
    with torch.no_grad():
        return opened.call(leaves, tokens.to(device), mask.long().to(device))


# --- the parameters


def _build_named(origin: str, seed: int) -> Any:
    return build_embedder(EmbedderConfig(origin=origin), seed)


def defs(config: EmbedderConfig) -> dict:
    """The parameters by the model's own names, whose parts are levels; each dim has an axis."""
    init = functools.partial(OwnWeights, _build_named, (config.origin,))
    return define_params(open_embedder(config).params, config.torch_dtype, init)


def rules(
    config: EmbedderConfig, mesh: Mesh | BoundMesh, *, fsdp: tuple[str, ...] = ("fsdp",)
) -> Rules:
    """How a mesh splits the parameters, as of a classifier.

    Raises:
        ValueError: as there.
    """
    return split_params(open_embedder(config).params, config.rules, mesh, fsdp, "embedder.rules")


# --- the loss


def loss(
    config: EmbedderConfig,
    params: tree.Tree,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Tensor | None = None,
) -> Tensor:
    """The sum of the losses of lines over the batch of all ranks, replicated.

    Of pairs it is the cross-entropy of an anchor's own text among all candidates of the batch of
    all ranks (InfoNCE; van den Oord, Li and Vinyals 2018): the other lines' texts and negatives,
    without copies of its own. Of scores it is the squared error of the cosine. With a `key`, a
    model that drops out runs in training mode.

    Args:
        batch: this rank's ``tokens`` int64 ``[batch, texts * seq]``, below 0 at padding, and
            ``targets`` int64: of pairs ``[batch, texts - 1]``, a number for each text but the
            anchor, the same for equal ones; of scores ``[batch, 1]``, ``(1 + score) 2^30``;
            or `functron.nn.IGNORE_INDEX`, of a line that does not count.

    Collectives: of `ModelOptions.gather`, and those that `functron.partition` derives: of pairs,
    vectors are gathered along the data axes.
    """
    more = dropout_inputs(batch, key) if draws(config) else {}
    place = functools.partial(_partition_sum, config)
    return sum_over_batch(place, params, batch, options, "loss", more)


def draws(config: EmbedderConfig, options: ModelOptions = DEFAULTS) -> bool:
    """Whether its loss draws random numbers, of dropout."""
    return config.dropouts == "on" and open_embedder(config).dropouts


def measure_batch(
    kind: str,
    config: EmbedderConfig,
    params: tree.Tree,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
) -> Tensor:
    """Of ``accuracy``, how many anchors have their own text nearest; of ``spearman``, pairs.

    These are cosines and scores ``[batch of all ranks, 2]``, NaN in lines that do not count.
    """
    place = functools.partial(_partition_sum, config)
    return sum_over_batch(place, params, batch, options, kind, {})


def list_measures(config: EmbedderConfig) -> dict[str, Callable]:
    """The measures of a model that learns pairs, or scores, by name."""
    name = "accuracy" if config.learns == "pairs" else "spearman"
    return {name: functools.partial(measure_batch, name)}


@functools.lru_cache(64)
def _partition_sum(
    config: EmbedderConfig, mesh: Mesh, device: str, kind: str, train: bool
) -> partitioning.Partitioned:
    """The sum of losses, or a measure, on a mesh, of parameters split over tp alone."""
    opened, parts = open_embedder(config, device), len(config.columns)
    call = opened.train if train else opened.call

    def summed(params, tokens, targets, more):
        rows, seq = tokens.shape[0], tokens.shape[1] // parts
        texts = tokens.reshape(rows, parts, seq).reshape(rows * parts, seq)
        mask = texts >= 0
        if train:  # each text draws numbers of its own
            numbers = more["rows"].unsqueeze(1) * parts
            numbers = numbers + torch.arange(parts, device=tokens.device)
            more = {**more, "rows": numbers.reshape(rows * parts)}
        vectors = call(params, torch.where(mask, texts, opened.pad), mask.long(), **more)
        vectors = vectors.reshape(rows, parts, vectors.shape[1])
        if config.learns == "scores":
            return _compare_scores(vectors, targets[:, 0], kind)
        return _compare_rows(vectors, targets[:, : parts - 1], config.scale, kind)

    return partition_batch(summed, defs(config), rules(config, mesh, fsdp=()), mesh, train)


def _compare_scores(vectors: Tensor, targets: Tensor, kind: str) -> Tensor:
    cosines, counts = (vectors[:, 0] * vectors[:, 1]).sum(-1), targets != IGNORED
    scores = targets.to(torch.float64) / _SCORE - 1
    if kind == "spearman":
        both = torch.stack([cosines.to(torch.float64), scores], 1)
        return torch.where(counts.unsqueeze(1), both, math.nan)
    errors = (cosines - scores.to(cosines.dtype)).square()
    return torch.where(counts, errors, 0.0).sum()


def _compare_rows(vectors: Tensor, targets: Tensor, scale: float, kind: str) -> Tensor:
    """The loss or accuracy of all rows; candidates of each are those of the whole batch."""
    counts = targets[:, 0] != IGNORED
    own = (vectors[:, 0] * vectors[:, 1]).sum(-1) * scale
    others = []
    for part in range(1, vectors.shape[1]):
        numbers = targets[:, part - 1]
        found = vectors[:, 0] @ vectors[:, part].T * scale
        # its own text, wherever it comes, and what fills a batch are no other candidates
        barred = (targets[:, :1] == numbers.unsqueeze(0)) | (numbers == IGNORED).unsqueeze(0)
        others.append(torch.where(barred, _NEVER, found))
    candidates = torch.cat(others, 1)
    if kind == "accuracy":
        return ((own > candidates.amax(1)) & counts).to(own.dtype).sum()
    losses = F.softplus(torch.logsumexp(candidates, 1) - own)
    return torch.where(counts, losses, 0.0).sum()


def count_lines(batch: Batch) -> Tensor:
    """How many lines of the batch of all ranks count, int64."""
    return num_targets({**batch, "targets": batch["targets"][:, :1]})


@functools.lru_cache(32)
def flops_per_token(config: EmbedderConfig, seq: int, num_targets: int = 1) -> int:
    """FLOPs of the products of a token of the traced model, forward and backward."""
    opened, seq = open_embedder(config), max(seq // len(config.columns), 1)
    tokens = torch.zeros(1, seq, dtype=torch.int64, device="meta")
    trace = importlib.import_module("functron.program.trace").trace
    made = trace(opened.call)(dict(opened.params), tokens, torch.ones_like(tokens))
    return 3 * made.cost().model_flops // seq


# --- lines of texts


class ComparedTexts(Samples):
    """The lines of a JSONL file, each an object with the texts of `EmbedderConfig.columns`.

    Args:
        path: of the file.
        tokenizer: makes tokens of texts, with what the model expects around one.
        config: of the model: the names of a line's texts, and whether it has a score.
        seq: tokens of a sample; each text has an equal share, and longer ones are cut, before what
            ends them.
        seed: selects the order of the samples, another one in each epoch.

    Raises:
        ValueError: the file is empty, or lines lack a text or score; some are listed.
    """

    def __init__(
        self, path: str, tokenizer: TextTokenizer, config: EmbedderConfig, seq: int, seed: int
    ):
        self._seq, self._seed, self._config = seq // len(config.columns), seed, config
        rows, problems = [], []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                found = _read_line(line, config, f"{path}:{number}")
                (problems if isinstance(found, Problem) else rows).append(found)
        if not rows and not problems:
            problems.append(Problem(path, "no lines", f"lines of {', '.join(config.columns)}"))
        raise_problems("cannot read texts to compare", problems[:8])
        numbers: dict[str, int] = {}
        for texts, _ in rows:
            for text in texts:
                numbers.setdefault(text, len(numbers))
        self._texts = [cut_text(tokenizer.encode(x), self._seq, tokenizer) for x in numbers]
        raise_problems("cannot read texts to compare", [*empty_problems(self._texts, path)])
        self._lines = np.array([[numbers[x] for x in texts] for texts, _ in rows], np.int64)
        scores = [[round((1 + score) * _SCORE)] for _, score in rows]
        self._targets = np.array(scores) if config.learns == "scores" else self._lines[:, 1:]
        self.num_samples = len(rows)
        self.vocab_size = 1 + max(max(tokens) for tokens in self._texts)

    def draw(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """``tokens`` int64 ``[rows, texts * seq]``, -1 at padding, and ``targets`` as of `loss`."""
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self._seed)
        tokens = torch.full((len(order), self._lines.shape[1], self._seq), -1)
        for row, index in enumerate(order.tolist()):
            for part, text in enumerate(self._lines[index]):
                own = torch.tensor(self._texts[text], dtype=torch.int64)
                tokens[row, part, : len(own)] = own
        return {"tokens": tokens.flatten(1), "targets": torch.from_numpy(self._targets[order])}

    def summary(self) -> str:
        return f"{self.num_samples:,} lines of {', '.join(self._config.columns)}"


def _read_line(line: str, config: EmbedderConfig, where: str) -> tuple[list[str], float] | Problem:
    wanted = "an object with " + ", ".join(f'"{name}"' for name in config.columns)
    try:
        row = json.loads(line)
    except ValueError as error:
        return Problem(where, f"no JSON: {error}", wanted)
    texts: list[Any] = [row.get(x) if isinstance(row, dict) else None for x in config.columns]
    lacking = [name for name, text in zip(config.columns, texts, strict=True)
               if not isinstance(text, str) or not text]  # fmt: skip
    if lacking:
        return Problem(where, f"no text {', '.join(lacking)}", wanted)
    if config.learns == "pairs":
        unread = [
            name for name in row if name.startswith("negative") and name not in config.columns
        ]
        if unread or "score" in row:
            got = f"{', '.join(unread) or 'score'} besides"
            fix = "--embedder.negatives N, or --embedder.learns scores"
            return Problem(where, got, wanted, fix)
        return texts, 0.0
    score = row.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not -1 <= score <= 1:
        fix = "divide scores by the largest"
        return Problem(where, f"score {score!r}", "a cosine, from -1 to 1", fix)
    return texts, float(score)


# --- the family


def _open_config(origin: str) -> EmbedderConfig:
    config = EmbedderConfig(origin=origin)
    opened = _open_on(origin, "folder", config.torch_dtype, "cpu")
    return EmbedderConfig(origin=origin, vocab_size=opened.vocab_size)


def _plan_samples(config: TrainConfig, tokenizer: TextTokenizer | None) -> SampleMaker:
    model: Any = config.architecture

    def open_file(part: str) -> Samples:
        assert tokenizer is not None
        return ComparedTexts(config.data.path, tokenizer, model, config.data.seq, config.seed)

    return SampleMaker(config.data.seq, model.vocab_size, open=open_file)


def _find_problems(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    model: Any = config.architecture
    names = ", ".join(model.columns)
    folder = read_layout(_path_of(model)).model
    yield from setting_problems(config, folder, f"a JSONL file of {names}", "an embedder")
    opened, parts, seq = open_embedder(model), len(model.columns), config.data.seq
    if seq % parts:
        wanted = f"a multiple of {parts}: {names} have an equal share each"
        yield Problem("seq", str(seq), wanted, f"set it to {-(-seq // parts) * parts}")
    if opened.max_text is not None and seq > parts * opened.max_text:
        wanted = f"at most {parts} times {opened.max_text}, the longest text"
        yield Problem("seq", str(seq), wanted, f"set it to {parts * opened.max_text}")
    if model.learns == "pairs" and not model.negatives and config.data.global_batch >= 1:
        wanted = "2 or more: other lines of a batch are what a text is told from"
        if config.data.global_batch < 2:
            yield Problem("global_batch", str(config.data.global_batch), wanted, "raise it")
        elif min(config.data.batches.sizes) < 2:
            got = f"{config.data.ramp_up!r}: batches of 1 sample"
            yield Problem("ramp_up", got, wanted, "begin with 2 or more")


def make_family() -> Family:
    """The family of embedders of texts."""
    given = (EmbedderConfig, {}, defs, rules, loss, count_lines, flops_per_token)
    objective = Objective(
        _plan_samples, count_targets=lambda config: len(config.architecture.columns) - 1,
        find_problems=_find_problems, prompt=None,
        compares_rows=lambda config: config.architecture.learns == "pairs",
    )  # fmt: skip
    return Family(
        "embedder", "an embedder of texts", *given, objective=objective, draws=draws,
        free=("dtype", "rules", "dropouts", "learns", "scale", "negatives"),
        measures=list_measures, schemes={SCHEME: _open_config},
    )  # fmt: skip
