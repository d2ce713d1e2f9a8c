"""Evaluation on held-out sets during a run: their samples, each once, and the loss on its mesh.

Their batches have the size of the training batches, so that they fit into the same memory.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from functron.compiler.jit import jit
from functron.core import tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.data.blend import PARTS
from functron.data.chat import IGNORED
from functron.data.sampling import ARITHMETIC, Samples
from functron.data.shards import provenance
from functron.data.token_datasets import Sliding, Texts
from functron.models import gpt
from functron.pipeline.execute import pipelined
from functron.program.trace import trace
from functron.spmd import BoundMesh, P, shard_map
from functron.spmd.params import abstract_params
from functron.training import data
from functron.training.config import TrainConfig, configure
from functron.training.loop import RESHAPE, At, LoopHook
from functron.training.records import EVAL
from functron.training.rooms import LearnedRoom, find_fill, with_rooms
from functron.training.setup import RunSetup
from functron.transforms import accumulate
from functron.transforms.gradient_functions import gather_parameters

VALIDATION = PARTS[1]
_NAME = re.compile(r"[\w.-]+")
_FIX = 'write --eval-data "NAME=PATH", several separated by spaces, paths with spaces in quotes'


class Epoch(Samples, Protocol):
    """Samples with epochs: all of `functron.data` except blends.

    Attributes:
        num_samples: samples in an epoch.
    """

    num_samples: int


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A set of held-out samples, in batches.

    Attributes:
        name: of the set, in records.
        samples: one epoch is evaluated.
        global_batch: rows of a batch, over all ranks; the last batch is filled up with rows of the
            next epoch, without targets.
        num_batches: in the set.
    """

    name: str
    samples: Epoch | Sliding
    global_batch: int
    num_batches: int

    def batch(self, index: int, part: tuple[int, int] = (0, 1)) -> dict[str, torch.Tensor]:
        """This part's rows of batch `index`, which is the same for any number of parts.

        Args:
            index: from 0, below `num_batches`.
            part: ``(index, count)``: which of how many contiguous parts.

        Raises:
            ValueError: `count` does not divide the batch, or no such part.
        """
        batch = self.samples.batch(index, self.global_batch, part)
        again = index * self.global_batch + batch["rows"] >= self.samples.num_samples
        targets = batch["targets"].masked_fill(again[:, None], IGNORED)
        return {**batch, "targets": targets}


def parse_sets(text: str) -> dict[str, str]:
    """Names and paths of ``"wiki=PREFIX1 code=PREFIX2"``, in order.

    Paths with spaces are quoted as in a shell.

    Raises:
        ValueError: a word is not NAME=PATH, or a name comes twice; all such are listed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        refuse("cannot name sets", "eval_data", repr(text), str(error), _FIX)
    found: dict[str, str] = {}
    problems = []
    for word in words:
        name, _, path = word.partition("=")
        if not path or not _NAME.fullmatch(name):
            wanted = "a name of letters, digits, dots and dashes, = and a path"
            problems.append(Problem("eval_data", repr(word), wanted, _FIX))
        elif name in found:
            problems.append(Problem("eval_data", f"two sets {name!r}", "a name for each", _FIX))
        found[name] = path
    raise_problems("cannot name sets", problems)
    return found


def sets_of(config: TrainConfig) -> dict[str, TrainConfig]:
    """The sets that a run evaluates, each as the configuration of a run on its data.

    They are the sets of `eval_data`; or else the validation part of `split`, of every source of a
    blend separately. Only an application's order of samples depends on the run's seed.

    Raises:
        ValueError: `eval_data` or a blend has a syntax error.
    """
    seed = 0 if config.data.order == ARITHMETIC else config.seed
    if config.evaluation.data:
        kind = "tokens" if data.is_on_disk(config) else "text"
        kind = "chat" if data.is_chat(config) else kind
        like = configure(config, seed=seed, split="", format=kind)
        named = parse_sets(config.evaluation.data).items()
        return {name: configure(like, data=path) for name, path in named}
    if not config.data.split or not data.is_on_disk(config):
        return {}
    if config.data.format == "mock":
        return {VALIDATION: config}  # whose tokens follow from the seed
    like = configure(config, seed=seed)
    sources = list(dict.fromkeys(data.sources_of(config)))
    if len(sources) < 2:
        return {VALIDATION: configure(like, data="".join(sources))}
    short = [Path(path).name for path in sources]
    names = short if len(set(short)) == len(short) else sources
    rows = zip(names, sources, strict=True)
    return {f"{VALIDATION}/{name}": configure(like, data=path) for name, path in rows}


def problems_of(config: TrainConfig) -> Iterator[Problem]:
    """Settings of evaluation and data that do not fit together; no data is read.

    Raises:
        ValueError: what `sets_of` raises.
    """
    if config.evaluation.every < 1:
        return
    if config.evaluation.averaged and not config.optimizer.ema_decay:
        fix = "add --optimizer.ema-decay 0.999, or leave it out"
        yield Problem("eval_averaged", "True", "a run that keeps averages", fix)
    if config.data.format == "mock" and config.evaluation.data:
        fix = "leave it out, and add --split 99,1"
        yield Problem("eval_data", repr(config.evaluation.data), "nothing with random tokens", fix)
        return
    sets = sets_of(config)
    if not sets:
        got, fix = f"{config.evaluation.every} without a set", 'add --eval-data "NAME=PATH"'
        fix += ", or --split 99,1" if data.is_on_disk(config) else ""
        yield Problem("eval_every", got, "held-out data", fix)
    elif config.data.format == "mock" and not config.evaluation.batches:
        got, fix = "0, for all of 10^15 random tokens", "add --eval-batches 8"
        yield Problem("eval_batches", got, "at least 1", fix)
    for name, one in sets.items() if config.evaluation.data else ():
        if one.data.format == "tokens" and len(data.sources_of(one)) > 1:
            fix = "name each of its files"
            yield Problem("eval_data", f"a blend as {name!r}", "one file or folder of tokens", fix)


def check(config: TrainConfig, *, reader: data.Reader = data.reader_of) -> None:
    """Check the sets as far as is cheap, such as that their files exist.

    Raises:
        ValueError: a set is missing, or has tokens of another tokenizer than `data`; all such are
            listed.
    """
    messages = []
    sets = sets_of(config) if config.evaluation.every > 0 else {}
    is_named = config.evaluation.data and config.data.path
    if is_named and config.data.format != "mock" and data.is_on_disk(config):
        # tokens of another tokenizer would give a perplexity that means nothing
        provenance([*data.sources_of(config), *(one.data.path for one in sets.values())])
    for name, one in sets.items():
        try:
            data.check(one, VALIDATION, reader=reader)
        except ValueError as error:
            messages.append(f"held-out set {name!r}: {error}")
    if messages:
        raise ValueError("\n".join(messages))


def open_sets(config: TrainConfig, *, reader: data.Reader = data.reader_of) -> list[HeldOut]:
    """The sets that a run evaluates, with a `reader` of its tokenizer: none without `eval_every`.

    Raises:
        ValueError: one cannot be read, does not fit the model, or is shorter than a sample.
    """
    raise_problems("cannot evaluate on this", problems_of(config))
    found = []
    for name, one in sets_of(config).items() if config.evaluation.every else ():
        with _name_set(name):
            samples: Any = data.open_samples(one, VALIDATION, reader=reader)
        found.append(_make_held_out(name, samples, config))
    return found


def _make_held_out(name: str, samples: Epoch | Sliding, config: TrainConfig) -> HeldOut:
    """A set in batches. ValueError where none has a target; usually only the first is read."""
    size, most = config.data.global_batch, config.evaluation.batches
    count = -(-samples.num_samples // size)
    found = HeldOut(name, samples, size, min(count, most or count))
    batches = map(found.batch, range(found.num_batches))
    if not any(bool((batch["targets"] != IGNORED).any()) for batch in batches):
        got = f"{found.num_batches} batches without any target"
        fix = "evaluate on longer documents, on more batches, or with a higher mask_rate"
        title, wanted = "cannot evaluate on this", "at least one target"
        refuse(title, f"held-out set {name!r}", got, wanted, fix)
    return found


@contextmanager
def _name_set(name: str) -> Iterator[None]:
    """Name a set in the messages of ValueErrors of this with block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"held-out set {name!r}: {error}") from error


def open_texts(config: TrainConfig, *, reader: data.Reader = data.reader_of) -> dict[str, Texts]:
    """The sets of `open_sets` as texts to be scored; see `functron.data.token_datasets`.

    Raises:
        ValueError: one cannot be read, or does not fit the model.
    """
    raise_problems("cannot evaluate on this", problems_of(config))
    found = {}
    for name, one in sets_of(config).items():
        with _name_set(name):
            found[name] = data.open_texts(one, VALIDATION, reader=reader)
    return found


def slide(
    name: str, texts: Texts, config: TrainConfig, stride: int, *, multiple: int, exact: bool
) -> HeldOut:
    """A set in windows of `seq` tokens that slide over its texts, in batches of `global_batch`.

    Args:
        name, texts: of the set.
        config: the run, with the seq, global_batch and eval_batches to use.
        stride: tokens from the beginning of a window to that of the next.
        multiple, exact: see `functron.data.token_datasets.Sliding`.

    Raises:
        ValueError: what `Sliding` raises, or no batch has a target.
    """
    size = config.data.global_batch
    with _name_set(name):
        samples = Sliding(texts, config.data.seq, stride, size, multiple=multiple, exact=exact)
    return _make_held_out(name, samples, config)


def loss_program(setup: RunSetup) -> Callable:
    """The function ``(params, batch) -> (sum, count)`` of a batch, replicated.

    ``sum = sum of -log p(target)`` over the targets of all ranks, in float32 at least; ``count``,
    int64, is their number. It is the next-token cross-entropy alone: no dropout, jitter, z-loss,
    router losses or multi-token prediction.

    Parameters and batches are split, and cut into microbatches, as in the training step. It is
    compiled where that is, but for stages on processes: of a pipeline the forwards of its schedule
    run. Where compiled experts have a bounded room, a batch whose routing needs more is taken again
    with more, as steps are, with a room that is learned of its own; where there is none that is
    enough, it is not compiled, and processes have room for the rows that came.

    Collectives: those of the model's forward and of gathering parameters.
    """
    room = _find_room(setup)
    run = _make_loss(setup, None) if room is None else _fit_loss(setup, room)

    def without_gradients(params: tree.Tree, batch: gpt.Batch) -> tuple:
        with torch.no_grad():
            (total, *_), count = run(params, batch)
        return total, count

    return without_gradients


def measure_programs(setup: RunSetup) -> dict[str, Callable]:
    """By name the functions of the family's measures, as `loss_program`: ``(params, batch)`` to a
    sum, or to pairs.

    They are not compiled; a model in stages has none.
    """
    specs = setup.specs

    def make(measure: Callable) -> Callable:
        def microbatch(params: tree.Tree, batch: gpt.Batch) -> torch.Tensor:
            return measure(setup.model, params, batch, setup.options)

        def summed(params: tree.Tree, batch: gpt.Batch) -> torch.Tensor:
            whole = gather_parameters(params, specs, setup.used(specs))
            return accumulate(microbatch, setup.config.parallelism.microbatches)(whole, batch)

        mapped = shard_map(summed, setup.mesh, (specs, setup.batch_specs), P())
        return torch.no_grad()(mapped)

    return {name: make(measure) for name, measure in setup.family.measures(setup.model).items()}


def _find_room(setup: RunSetup) -> float | None:
    """The room for rows of experts at first; None: for the worst case, or what rows came."""
    return setup.room or None if setup.is_compiled and setup.rank is None else None


def _make_loss(setup: RunSetup, room: float | None) -> Callable:
    """``(params, batch) -> ((sum,), count)`` over a mesh; with a room ``((sum, fill), count)``."""
    program, specs = (_of_stages if setup.is_pipelined else _of_all)(setup, room), setup.specs

    def counted(params: tree.Tree, batch: gpt.Batch) -> tuple:
        whole = gather_parameters(params, specs, setup.used(specs))
        return program(whole, batch), setup.family.num_targets(batch)

    stages = "pp" if setup.is_pipelined else None
    mapped = shard_map(counted, setup.mesh, (specs, setup.batch_specs), (P(), P()), stages=stages)
    compiles = setup.is_compiled and setup.rank is None and room != 0
    return jit(mapped) if compiles else mapped


def _fit_loss(setup: RunSetup, room: float) -> Callable:
    """`_make_loss` with as much room as each batch needs, first this much."""

    def make(room: float) -> Callable:
        mapped = _make_loss(setup, room)

        def step(params: tree.Tree, batch: gpt.Batch) -> tuple[tree.Tree, dict]:
            (total, fill), count = mapped(params, batch)
            return params, {"found": ((total,), count), "aux": {"routers": (fill,)}}

        return step

    fitted = with_rooms(make, LearnedRoom(room))
    return lambda params, batch: fitted(params, batch)[1]["found"]


def loss_memory_bytes(setup: RunSetup, rows: int, seq: int) -> int:
    """Peak memory of `loss_program` in a process, from its traced program.

    For a pipeline it is that of a rank with all layers, an upper bound.

    Args:
        setup: of the run.
        rows: of a batch, over all ranks.
        seq: tokens of each.
    """
    bound = isinstance(setup.mesh, BoundMesh)
    one = setup.without_pipeline
    config = configure(setup.config, mesh=str(one.mesh), microbatches=1)
    one = dataclasses.replace(one, config=config)
    mapped = shard_map(_of_all(one, _find_room(one)), one.mesh, (one.specs, gpt.batch_specs()), P())
    tokens = torch.empty(rows, seq, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
    traced = trace(mapped, simulate=not bound)(abstract_params(one.defs), batch)
    return traced.memory().peak_bytes


def _of_all(setup: RunSetup, room: float | None) -> Callable:
    """The loss summed over microbatches, without pipeline stages, as of `_next_token`."""
    family, model = setup.family, setup.family.without_extras(setup.model)
    loss: Callable = gpt.loss_and_details if family.has_details(model) else family.loss
    options = dataclasses.replace(setup.options, remat="none", expert_room=room)

    def microbatch(params, batch):
        return _next_token(loss(model, params, batch, options), room)

    return accumulate(microbatch, setup.config.parallelism.microbatches)


def _of_stages(setup: RunSetup, room: float | None) -> Callable:
    """The loss summed over microbatches, in pipeline stages, as of `_next_token`."""
    model = setup.family.without_extras(setup.model)
    options = dataclasses.replace(setup.options, remat="none", expert_room=room)

    def stage(part, params, x, batch):
        y = setup.cut.loss(model, part, params, x, batch, options)
        return _next_token(y, room) if part.loss else y

    stages = pipelined(stage, setup.partition, setup.schedule.forward_only())
    return lambda params, batch: tuple(map(sum, zip(*stages.forward(params, batch), strict=True)))


def _next_token(y: Any, room: float | None) -> tuple[torch.Tensor, ...]:
    """The next-token loss out of a model's return value; with a room also how full ranks were."""
    if not isinstance(y, tuple):
        return (y,)
    return (y[1]["next_token"], *(() if room is None else (find_fill({"aux": y[1]}),)))


def evaluate(
    program: Callable,
    params: tree.Tree,
    sets: Sequence[HeldOut],
    batch: Callable[[HeldOut, int], dict[str, torch.Tensor]],
    measures: Mapping[str, Callable] = MappingProxyType({}),
) -> dict[str, dict[str, float]]:
    """The mean loss of every set, ``sum / count`` over all its batches, added up in float64.

    Args:
        program: of `loss_program`.
        params: of the run.
        sets: to evaluate.
        batch: ``(set, index)`` to this process's part of that batch, on the device of `params`.
        measures: of `measure_programs`.

    Returns:
        By name of the set ``loss`` in nats per target, ``perplexity``, its exponential, ``tokens``,
        the number of targets, and the mean of each measure, or the rank correlation of its pairs.
    """
    found = {}
    for held_out in sets:
        total = count = 0.0
        sums, pairs = dict.fromkeys(measures, 0.0), {}
        for index in range(held_out.num_batches):
            given = batch(held_out, index)
            summed, targets = program(params, given)
            total, count = total + summed.double(), count + targets
            for name, measure in measures.items():
                value = measure(params, given)
                if value.dim():
                    pairs.setdefault(name, []).append(value.double().cpu().numpy())
                else:
                    sums[name] += float(value)
        total, count = float(total), int(count)
        loss = total / count  # of at least one: a set without any was refused as it was opened
        # e^709 is the largest that a float64 holds
        perplexity = math.exp(loss) if not loss > 709 else math.inf
        found[held_out.name] = {"loss": loss, "perplexity": perplexity, "tokens": count}
        found[held_out.name] |= {name: x / count for name, x in sums.items()}
        found[held_out.name] |= {
            name: rank_correlation(*np.concatenate(x).T) for name, x in pairs.items()
        }
    return found


def rank_correlation(found: np.ndarray, wanted: np.ndarray) -> float:
    """Spearman's rank correlation of two float64 ``[n]``, in which equal values share a mean rank.

    Entries in which either is NaN are left out. Where all of one are equal it is NaN.
    """
    kept = ~(np.isnan(found) | np.isnan(wanted))

    def rank(values: np.ndarray) -> np.ndarray:
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        ranks = (ends - (counts - 1) / 2)[places]
        return ranks - ranks.mean()

    one, other = rank(found[kept]), rank(wanted[kept])
    scale = math.sqrt(float((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / scale if scale else math.nan


class EvaluationHook(LoopHook):
    """Evaluates every n steps and after the last: ``eval`` in records, of held-out sets.

    Collective. Skipped where the loop stops at once or the loss is not finite. Afterwards the loop
    looks for stop requests again. Comes before the hooks that write records.

    Args:
        evaluate: ``(At)`` to the numbers of every set, by name.
        every: n; 0: after the last.
        name: of the numbers in records.
    """

    def __init__(
        self,
        evaluate: Callable[[At], Mapping[str, Mapping[str, float]]],
        every: int,
        name: str = EVAL,
    ):
        self._evaluate, self._every, self._name = evaluate, every, name

    def due(self, step: int) -> bool:
        """Whether to evaluate after so many steps."""
        return self._every > 0 and step % self._every == 0

    def after(self, at: At) -> None:
        """Evaluate where it is due, and add the numbers to the record."""
        hurries = at.stopped_by not in (0, RESHAPE)  # RESHAPE waits for a checkpoint anyway
        finite = math.isfinite(at.record.get("loss") or 0.0)
        if hurries or not finite or not (at.last or self.due(at.step)):
            return
        at.phase("evaluate")
        at.record[self._name] = self._evaluate(at)
        at.phase("record")
        at.ask_again()
