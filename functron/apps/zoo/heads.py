"""Classifiers of texts: encoders and decoders of transformers with a head, as a family of models.

``--model hf-classifier:PATH`` is the model of a folder (BertModel, LlamaForCausalLM, any
...ForSequenceClassification) as transformers' AutoModelForSequenceClassification reads it; a head
that the folder lacks is random. It is traced as it is and partitioned (`functron.partition`), and
learns from JSONL files whose lines have a ``text`` and a ``label``; its dropout draws from the
step's key. ``functron convert run:RUN hf-classifier:OUT`` writes its own files.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from functron import partitioning
from functron.apps.zoo.module_trial import drops_out, try_training
from functron.apps.zoo.modules import (
    OwnWeights,
    drop_weights,
    dropout_inputs,
    fixed_problems,
    flatten,
    nest,
    place_buffers,
    read_rules,
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
from functron.models.options import DEFAULTS, Batch, ModelOptions, num_targets, require
from functron.program.recorder import aside
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, Rules
from functron.spmd.axes import Scope, enter, scope
from functron.spmd.params import ParamDef

if TYPE_CHECKING:  # it reads the families
    from functron.training.config import TrainConfig

SCHEME = "hf-classifier"
"""The scheme of their names: a folder of transformers."""

_USUAL = r"""
    \b(query|key|value|[qkv]_proj|gate_proj|up_proj|intermediate\.dense|fc1)\.(weight|bias)$ = tp
    \b(o_proj|out_proj|down_proj|output\.dense|fc2)\.weight$ = -,tp
"""
_HEADS = re.compile(r"^(classifier|pre_classifier|score|pooler|head)\.|\.pooler\.")
"""Names of what a model without a head for labels lacks."""


@shows_differences
@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(TextConfig):
    """A model of transformers with a head for labels.

    Attributes:
        origin: hf-classifier:PATH, a folder with config.json, and weights unless it is to begin
            with random ones. It is read whenever the run begins or goes on.
        labels: their names, separated by commas, in the order of their numbers; empty: those of
            config.json.
        rules: how tp splits parameters, as of a module; empty: queries, keys, values and what leads
            up by rows, and what leads back by columns, where tp divides them.
        max_seq: the longest sequence that it takes, in tokens.
        dropouts: on: in training the model runs in training mode, and its dropout draws from the
            step's key, the same numbers on every mesh; off: it runs as in evaluation, without.
    """

    vocab_multiple: int = 1
    origin: str = setting("", instead="name it as the model: --model hf-classifier:PATH")
    labels: str = ""
    rules: str = ""
    max_seq: int = 2**31 - 1
    dropouts: Literal["on", "off"] = "on"

    def __post_init__(self):
        found = [*fixed_problems(self, "classifier", "model")]
        names = self.label_names
        if self.labels and (len({*names}) < max(len(names), 2) or "" in names):
            wanted = "two names or more, each once, separated by commas"
            found.append(Problem("classifier.labels", repr(self.labels), wanted))
        found += [*choice_problems(self), *rule_problems(self.rules, "classifier.rules")]
        raise_problems("invalid ClassifierConfig", found)

    @property
    def label_names(self) -> list[str]:
        """The names that `labels` has."""
        return [name.strip() for name in self.labels.split(",")] if self.labels else []


# --- the model


class OpenedClassifier(NamedTuple):
    """A model of a folder, with abstract parameters.

    Attributes:
        call: ``(params, tokens, mask)`` to the logits of labels.
        train: the same in training mode, with ``key`` and ``rows``.
        params: by name.
        labels: their names, by number.
        pad: the id of tokens that pad a text.
        vocab_size, max_seq: of its config.json.
        dropouts: whether it makes other logits in training.
        undrawn: why its training cannot be drawn from a key; empty: it can.
    """

    call: Callable[..., Tensor]
    train: Callable[..., Tensor]
    params: Mapping[str, Tensor]
    labels: tuple[str, ...]
    pad: int
    vocab_size: int
    max_seq: int | None
    dropouts: bool
    undrawn: str


def build_classifier(config: ClassifierConfig, seed: int = 0) -> Any:
    """The model of a config, with its weights; those that the folder lacks follow from the seed.

    Raises:
        ValueError: there is no such folder, weights of more than a head are missing, it has no
            labels to choose one of, or no token that can pad texts.
    """
    path = Path(config.origin.partition(":")[2])
    if not (path / "config.json").is_file():
        wanted = "a folder with config.json, as transformers' save_pretrained writes it"
        refuse("no model to train", "model", f"{SCHEME}:{path}", wanted, on_hub(path))
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        fix = 'pip install "functron[transformers]"'
        raise ModuleNotFoundError(f"{SCHEME}:{path} needs transformers; fix: {fix}") from error
    own = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    if config.labels:
        own.id2label = dict(enumerate(config.label_names))
        own.label2id = {name: number for number, name in own.id2label.items()}
    raise_problems("no model to train", [*_list_gaps(own, path)])
    own.problem_type = "single_label_classification"
    own.pad_token_id = choose_pad(own)
    kind = transformers.AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
                return kind.from_config(own).eval()
            given = {"config": own, "dtype": "auto", "local_files_only": True}
            made, read = kind.from_pretrained(path, output_loading_info=True, **given)
        except (ValueError, RuntimeError) as error:  # the latter of shapes
            raise ValueError(f"no model to train\n  - model: {SCHEME}:{path}: {error}") from error
    missing = [name for name in read.get("missing_keys", ()) if not _HEADS.search(name)]
    missing += [row[0] for row in read.get("mismatched_keys", ())]
    if missing:
        got = f"no weights of this name and shape for {', '.join(sorted(missing)[:3])}"
        wanted = "all of the model's but a head's: the others would be random"
        refuse("no model to train", f"{SCHEME}:{path}", got, wanted, "complete the files")
    return made.eval()


def choose_pad(own: Any) -> int | None:
    """The token that pads texts, by which transformers finds the last one of a text."""
    end = own.eos_token_id
    tried = own.pad_token_id, *(end if isinstance(end, list) else [end])
    return next((x for x in tried if x is not None and 0 <= x < own.vocab_size), None)


def _list_gaps(own: Any, path: Path) -> Iterator[Problem]:
    """The problems of a config.json for texts that have one label each."""
    name = f"{SCHEME}:{path}"
    if own.num_labels < 2:
        fix = "name them in order: --classifier.labels A,B"
        yield Problem(name, f"{own.num_labels} label", "two or more to choose one of", fix)
    if own.problem_type not in (None, "single_label_classification"):
        wanted, fix = "single_label_classification", "leave it out of config.json"
        yield Problem(name, f"problem_type {own.problem_type}", wanted, fix)
    if choose_pad(own) is None:
        wanted = f"the id of a token that pads texts, below {own.vocab_size}"
        fix = "write it into config.json"
        yield Problem(name, f"pad_token_id {own.pad_token_id}", wanted, fix)


def open_classifier(config: ClassifierConfig, device: str = "cpu") -> OpenedClassifier:
    """The model of a config, with abstract parameters, and buffers on a device.

    It is built once in a process.

    Raises:
        ValueError: as of `build_classifier`; or its training draws numbers in other ways than by
            dropout.
    """
    opened = _open_on(config.origin, config.labels, config.torch_dtype, device)
    if opened.undrawn and config.dropouts == "on":
        wanted = "dropout of samples alone, which draws from the step's key"
        fix = "set its rates to 0, or run it as in evaluation: --classifier.dropouts off"
        refuse(f"cannot train {config.origin}", "model", opened.undrawn, wanted, fix)
    return opened


@functools.lru_cache(4)
def _open_on(origin: str, labels: str, dtype: torch.dtype, device: str) -> OpenedClassifier:
    with aside(), enter(Scope()), torch.enable_grad():
        module = _build_named(origin, labels, 0)
        differs, undrawn = try_training(module, _call_plainly, lambda x: module(input_ids=x).logits)
        drop_weights(module)
        place_buffers(module, dtype, device)
        (fn, params), (train, _) = (
            partitioning.from_module(module, train=x) for x in (False, True)
        )
        own = module.config
        names = tuple(str(own.id2label[number]) for number in range(own.num_labels))
        one, other = (functools.partial(_call_masked, each) for each in (fn, train))
        most = count_positions(module)
        drops = differs or any(map(drops_out, module.modules()))
        return OpenedClassifier(
            one, other, params, names, own.pad_token_id, own.vocab_size, most, drops,
            undrawn if drops else "",
        )  # fmt: skip


def count_positions(module: Any) -> int | None:
    """The longest text of a model of transformers, in tokens; None: it has no such number.

    RoBERTa's first positions stand for padding.
    """
    for name, inner in module.named_modules():
        if name.endswith("position_embeddings") and getattr(inner, "padding_idx", None) is not None:
            return inner.num_embeddings - inner.padding_idx - 1
    return getattr(module.config, "max_position_embeddings", None)


def _call_masked(fn: Callable, params, tokens: Tensor, mask: Tensor, **more: Tensor) -> Tensor:
    return fn(params, input_ids=tokens, attention_mask=mask, **more).logits


def _call_plainly(fn: Callable, params, tokens: Tensor, *, router: bool, **more: Tensor) -> tuple:
    """As `functron.apps.zoo.module_trial.try_module` calls modules."""
    return fn(params, input_ids=tokens, **more).logits, None


# --- the parameters


def _build_named(origin: str, labels: str, seed: int) -> Any:
    return build_classifier(ClassifierConfig(origin=origin, labels=labels), seed)


def defs(config: ClassifierConfig) -> dict:
    """The parameters by the model's own names, whose parts are levels; each dim has an axis."""
    given = (config.origin, config.labels)
    return define_params(
        open_classifier(config).params,
        config.torch_dtype,
        functools.partial(OwnWeights, _build_named, given),
    )


def define_params(
    params: Mapping[str, Tensor], dtype: torch.dtype, init: Callable[[str], OwnWeights]
) -> dict:
    """Definitions of parameters by name, with an axis ``NAME:DIM`` for each dim.

    Weight decay applies to those of two dims or more.
    """
    found = {}
    for name, value in params.items():
        axes = tuple(f"{name}:{dim}" for dim in range(value.dim()))
        found[name] = ParamDef(tuple(value.shape), axes, init(name), dtype, value.dim() > 1)
    return nest(found)


def rules(
    config: ClassifierConfig, mesh: Mesh | BoundMesh, *, fsdp: tuple[str, ...] = ("fsdp",)
) -> Rules:
    """How a mesh splits the parameters: by `ClassifierConfig.rules` over tp, and over axes `fsdp`.

    These split, of each parameter, the largest dim that they divide and tp does not split.

    Raises:
        ValueError: the mesh has ranks on other axes than dp, fsdp and tp; or tp does not divide a
            dim of a rule that was given.
    """
    return split_params(
        open_classifier(config).params, config.rules, mesh, fsdp, "classifier.rules"
    )


def split_params(
    params: Mapping[str, Tensor],
    given: str,
    mesh: Mesh | BoundMesh,
    fsdp: tuple[str, ...],
    setting_name: str,
) -> Rules:
    """How a mesh splits parameters that have a logical axis ``NAME:DIM`` for each dim.

    Args:
        params: by name.
        given: rules for tp; empty: the usual ones, where tp divides dims.
        mesh, fsdp: as of `rules`, and so are errors.
        setting_name: of `given`, in messages.
    """
    others = [name for name in mesh.axis_names if name not in ("dp", "fsdp", "tp")]
    wanted, fix = "ranks on dp, fsdp and tp for this model", "put those ranks on dp, fsdp or tp"
    found = [Problem("mesh", f"{x}={mesh[x]}", wanted, fix) for x in others if mesh[x] > 1]
    raise_problems("this mesh cannot run the model", found)
    ranks = mesh["tp"]
    split = _split_over_tp(params, given, ranks, setting_name) if ranks > 1 else {}
    fully = tuple(axis for axis in fsdp if mesh[axis] > 1)
    count = math.prod(mesh[axis] for axis in fully)
    made: dict[str, str | tuple[str, ...]] = {}
    for name, value in params.items():
        own = split.get(name)
        if own is not None:
            made[f"{name}:{own}"] = "tp"
        free = [(size, -dim) for dim, size in enumerate(value.shape)
                if dim != own and size % count == 0]  # fmt: skip
        if free and count > 1:
            made[f"{name}:{-max(free)[1]}"] = fully if fully[1:] else fully[0]
    return Rules(made)


def _split_over_tp(
    params: Mapping[str, Tensor], given: str, ranks: int, setting_name: str
) -> dict[str, int]:
    """The dim that tp splits, by parameter.

    Raises:
        ValueError: it does not divide one of a rule that was given, or one is found in no name.
    """
    problems, found = [], {}
    lines = [(pattern, row.index("tp")) for _, pattern, row in read_rules(given or _USUAL)
             if "tp" in row]  # fmt: skip
    unused = {pattern for pattern, _ in lines}
    for name, value in params.items():
        hit = next(((p, dim) for p, dim in lines if re.search(p, name)), None)
        if hit is None or hit[1] >= value.dim():
            continue
        unused.discard(hit[0])
        if value.shape[hit[1]] % ranks == 0:
            found[name] = hit[1]
        elif given:
            got, wanted = f"{value.shape[hit[1]]} entries on tp={ranks}", f"a multiple of {ranks}"
            problems.append(Problem(name, got, wanted, "leave it out of the rules"))
    if given:
        problems += [Problem(setting_name, repr(p), "part of a parameter's name")
                     for p in sorted(unused)]  # fmt: skip
    raise_problems("tp cannot split these parameters", problems)
    return found


# --- the loss


def loss(
    config: ClassifierConfig,
    params: tree.Tree,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Tensor | None = None,
) -> Tensor:
    """The sum of the cross-entropies of labels over the batch of all ranks, replicated.

    With a `key`, a model that drops out runs in training mode.

    Args:
        batch: this rank's ``tokens`` int64 ``[batch, seq]``, below 0 at padding, and ``targets``
            int64 ``[batch, 1]``, the numbers of labels, or `functron.nn.IGNORE_INDEX`.

    Collectives: of `ModelOptions.gather`, and those that `functron.partition` derives.
    """
    more = dropout_inputs(batch, key) if draws(config) else {}
    return _sum_over_texts(config, params, batch, options, "loss", more)


def draws(config: ClassifierConfig, options: ModelOptions = DEFAULTS) -> bool:
    """Whether its loss draws random numbers, of dropout."""
    return config.dropouts == "on" and open_classifier(config).dropouts


def count_right(
    config: ClassifierConfig, params: tree.Tree, batch: Batch, options: ModelOptions = DEFAULTS
) -> Tensor:
    """How many texts of the batch of all ranks have their label, in float; as `loss`."""
    return _sum_over_texts(config, params, batch, options, "accuracy", {})


def _sum_over_texts(
    config: ClassifierConfig,
    params: tree.Tree,
    batch: Batch,
    options: ModelOptions,
    kind: str,
    more: Mapping[str, Tensor],
) -> Tensor:
    place = functools.partial(_partition_sum, config)
    return sum_over_batch(place, params, batch, options, kind, more)


def sum_over_batch(
    place: Callable[[Mesh, str, str, bool], partitioning.Partitioned],
    params: tree.Tree,
    batch: Batch,
    options: ModelOptions,
    kind: str,
    more: Mapping[str, Tensor],
) -> Tensor:
    """The value of a partitioned function of whole batches, of this rank's part; replicated.

    Args:
        place: ``(mesh, device, kind, train)`` to the function of parameters, tokens, targets and
            `more`.
        params, batch, options: as of a family's loss.
        kind: of the sum.
        more: the inputs of dropout; empty: as in evaluation.

    Collectives: of `ModelOptions.gather`, and those that `functron.partition` derives.
    """
    require(batch, "tokens", "targets")
    sizes = {name: axis.size for name, axis in scope().axes.items() if axis is not None}
    mapped = place(Mesh(**sizes), batch["tokens"].device.type, kind, bool(more))

    def run(whole: tree.Tree) -> Tensor:
        return mapped.local(flatten(whole), batch["tokens"], batch["targets"], more)

    return options.gather.around(run)(params)


@functools.lru_cache(64)
def _partition_sum(
    config: ClassifierConfig, mesh: Mesh, device: str, kind: str, train: bool
) -> partitioning.Partitioned:
    """The sum of losses, or of right answers, on a mesh, of parameters split over tp alone."""
    opened = open_classifier(config, device)
    call = opened.train if train else opened.call

    def summed(params, tokens, targets, more):
        mask, labels = tokens >= 0, targets[:, 0]
        logits = call(params, torch.where(mask, tokens, opened.pad), mask.long(), **more)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if kind == "accuracy":
            return (logits.argmax(-1) == labels).to(logits.dtype).sum()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    return partition_batch(summed, defs(config), rules(config, mesh, fsdp=()), mesh, train)


def partition_batch(
    fn: Callable, defined: dict, split: Rules, mesh: Mesh, train: bool
) -> partitioning.Partitioned:
    """A function of whole parameters, tokens, targets and inputs of dropout, on a mesh.

    Args:
        fn: it; what it returns is replicated.
        defined: of the parameters.
        split: how tp splits them.
        mesh: of the ranks; data axes split rows.
        train: whether there are inputs of dropout.
    """
    specs = {name: split.spec(d.axes) for name, d in flatten(defined).items()}
    rows = P(tuple(axis for axis in DATA_AXES if mesh[axis] > 1) or None)
    drawn = {"key": P(), "rows": rows} if train else {}
    given = specs, rows, rows, drawn
    return partitioning.partition(fn, mesh, given, P(), pick="cheapest")


@functools.lru_cache(32)
def flops_per_token(config: ClassifierConfig, seq: int, num_targets: int = 1) -> int:
    """FLOPs of the products of a token, forward and backward, of the traced model."""
    opened = open_classifier(config)
    tokens = torch.zeros(1, seq, dtype=torch.int64, device="meta")
    trace = importlib.import_module("functron.program.trace").trace
    made = trace(opened.call)(dict(opened.params), tokens, torch.ones_like(tokens))
    return 3 * made.cost().model_flops // seq


# --- labelled texts


class LabelledTexts(Samples):
    """The lines of a JSONL file, each an object with ``text`` and ``label``, as padded samples.

    Args:
        path: of the file.
        tokenizer: makes tokens of texts, with what the model expects around one.
        labels: their names, by number; a line has a name, or a number where no name is one.
        seq: tokens of a sample; longer texts are cut, before what ends them.
        seed: selects the order of the samples, another one in each epoch.

    Raises:
        ValueError: the file is empty, or lines have no text or no such label; some are listed.
    """

    def __init__(
        self,
        path: str,
        tokenizer: TextTokenizer,
        labels: Sequence[str],
        seq: int,
        seed: int,
    ):
        self._seq, self._seed = seq, seed
        rows, problems = [], []
        numbers = {name: number for number, name in enumerate(labels)}
        if not any(name.lstrip("-").isdecimal() for name in numbers):  # 1 may be a name or a number
            numbers |= {str(number): number for number in range(len(labels))}
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                found = _read_line(line, numbers, f"{path}:{number}")
                (problems if isinstance(found, Problem) else rows).append(found)
        if not rows and not problems:
            problems.append(Problem(path, "no lines", "texts with labels"))
        raise_problems("cannot read labelled texts", problems[:8])
        self._labels = np.array([label for _, label in rows], np.int64)
        self._tokens = [cut_text(tokenizer.encode(text), seq, tokenizer) for text, _ in rows]
        raise_problems("cannot read labelled texts", [*empty_problems(self._tokens, path)])
        self.num_samples = len(rows)
        self.vocab_size = 1 + max(max(tokens) for tokens in self._tokens)
        self._counts = {name: int((self._labels == n).sum()) for n, name in enumerate(labels)}

    def draw(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """``tokens`` int64 ``[rows, seq]``, -1 at padding, and ``targets`` int64 ``[rows, 1]``."""
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self._seed)
        tokens = torch.full((len(order), self._seq), -1)
        for row, index in enumerate(order.tolist()):
            own = torch.tensor(self._tokens[index], dtype=torch.int64)
            tokens[row, : len(own)] = own
        return {"tokens": tokens, "targets": torch.from_numpy(self._labels[order, None])}

    def summary(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self._counts.items())
        return f"{self.num_samples:,} texts ({counts})"


def _read_line(line: str, numbers: Mapping[str, int], where: str) -> tuple[str, int] | Problem:
    try:
        row = json.loads(line)
    except ValueError as error:
        return Problem(where, f"no JSON: {error}", 'an object with "text" and "label"')
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        return Problem(where, "no text", 'an object with "text", which is not empty, and "label"')
    label = row.get("label")
    if isinstance(label, bool) or str(label) not in numbers:
        fix = "name all of them in order: --classifier.labels A,B"
        return Problem(where, f"label {label!r}", f"one of {', '.join(numbers)}", fix)
    return text, numbers[str(label)]


def cut_text(tokens: list[int], seq: int, tokenizer: TextTokenizer) -> list[int]:
    """The first tokens of a text, and the one that ends it where the tokenizer puts one there."""
    if len(tokens) <= seq:
        return tokens
    ends = tokens[-1:] if tokens[-1] in tokenizer.special_tokens.values() else []
    return [*tokens[: seq - len(ends)], *ends]


def empty_problems(tokens: Sequence[list[int]], path: str) -> Iterator[Problem]:
    """Texts of which a tokenizer makes nothing: a model would have nothing to read."""
    empty = sum(not each for each in tokens)
    if empty:
        got, wanted = f"{empty:,} texts that the tokenizer makes no tokens of", "one each, at least"
        yield Problem(path, got, wanted, "leave those lines out")


# --- the family


def _open_config(origin: str) -> ClassifierConfig:
    opened = open_classifier(ClassifierConfig(origin=origin, dropouts="off"))
    most: dict[str, Any] = {} if opened.max_seq is None else {"max_seq": opened.max_seq}
    return ClassifierConfig(origin=origin, vocab_size=opened.vocab_size, **most)


def _plan_samples(config: TrainConfig, tokenizer: TextTokenizer | None) -> SampleMaker:
    model: Any = config.architecture

    def open_file(part: str) -> Samples:
        opened = open_classifier(model)
        assert tokenizer is not None
        given = opened.labels, config.data.seq, config.seed
        return LabelledTexts(config.data.path, tokenizer, *given)

    return SampleMaker(config.data.seq, model.vocab_size, open=open_file)


def _find_problems(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    model: Any = config.architecture
    folder = Path(model.origin.partition(":")[2])
    yield from setting_problems(config, folder, "a JSONL file of texts and labels", "a classifier")
    if config.data.seq > model.max_seq:
        yield Problem("seq", str(config.data.seq), f"at most {model.max_seq}, the longest text")


def setting_problems(config: TrainConfig, folder: Path, file: str, owner: str) -> Iterator[Problem]:
    """Settings that no model of texts that reads JSONL lines of its own has.

    Args:
        config: the run.
        folder: of the model, with its tokenizer.
        file: what its data is.
        owner: the model, with an article.
    """
    if config.data.format != "text":
        yield Problem("format", config.data.format, f"text: {file}", "--format text")
    if not config.data.path:
        yield Problem("data", "nothing", file, "--data FILE")
    if config.optimizer.name == "muon":
        fix = "--optimizer adamw"
        yield Problem("optimizer", "muon", "one that does not ask which matrices project", fix)
    if config.compute.remat != "none":
        yield Problem("remat", config.compute.remat, f"none with {owner}", "leave it out")
    if config.parallelism.sequence_parallel:
        yield Problem("sequence_parallel", "true", f"false with {owner}", "leave it out")
    if not config.data.tokenizer and (folder / "tokenizer.json").is_file():
        got = "bytes, for a model with a tokenizer of its own"
        yield Problem("tokenizer", got, str(folder), f"--tokenizer {folder}")


def make_family() -> Family:
    """The family of classifiers of texts."""
    given = (ClassifierConfig, {}, defs, rules, loss, num_targets, flops_per_token)
    objective = Objective(
        _plan_samples, count_targets=lambda config: 1, find_problems=_find_problems, prompt=None
    )
    return Family(
        "classifier", "a classifier of texts", *given, objective=objective,
        draws=draws, free=("dtype", "rules", "dropouts"),
        measures=lambda config: {"accuracy": count_right},
        schemes=MappingProxyType({SCHEME: _open_config}),
    )  # fmt: skip
