"""Documents dealt to the ranks of cp by their cost, anew in every step: ``--context dynamic``.

Which ranks have which documents follows from the lengths of all documents of a step
(`functron.data.deal`), so that every process knows it without asking; each reads the whole batch
for it, and keeps its part. How many ranks exchange keys differs between steps, and with it the
program: a batch says it in a leaf of its own, and `by_signature` takes the step that was made for
it. There are few such programs, as shapes are few, and where steps are compiled all are compiled
before the first.

The numbers of a step are those of the same samples without it, to rounding: what documents hold
and predict stays, and only the order of tokens changes. What depends on that order is refused
(`deal_problems`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functron.compiler.jit import Jitted
from functron.core.errors import Problem, raise_problems
from functron.data.context_schedule import (
    SLACK,
    ContextCosts,
    ContextDeal,
    deal,
    list_deals,
    list_ring_sizes,
)
from functron.models.options import Batch
from functron.spmd import DATA_AXES, BoundMesh, Mesh
from functron.training.loop import At, LoopHook

RING_SIZE = "ring_size"
"""The leaf of a dealt batch that says how many ranks exchange keys: int64 ``[rows]``, all equal."""

CHECKSUM = "checksum"
"""The leaf that says what was dealt: int64 ``[rows]``, whose sum is the checksum of the samples."""

HOST_LEAVES = (RING_SIZE, CHECKSUM)
"""Leaves of a dealt batch that the host reads, and steps do not get."""

DYNAMIC = "dynamic"
"""The word of `functron.training.config.ParallelismConfig.context` for all of this."""


class BySignature:
    """A step that differs by a static signature of its batch; made by `by_signature`.

    Attributes:
        of: ``signature -> step``, the same one each time.
    """

    def __init__(self, make: Callable[[Any], Callable], split: Callable[[Any], tuple[Any, Any]]):
        self._make, self._split, self._made = make, split, {}

    def of(self, signature: Any) -> Callable:
        """The step of a signature; made now, if there is none yet."""
        if signature not in self._made:
            self._made[signature] = self._make(signature)
        return self._made[signature]

    def __call__(self, state: Any, batch: Any) -> Any:
        signature, rest = self._split(batch)
        return self.of(signature)(state, rest)


def by_signature(
    make: Callable[[Any], Callable], split: Callable[[Any], tuple[Any, Any]]
) -> BySignature:
    """The step ``(state, batch) -> ...`` that is another one for each signature of a batch.

    Args:
        make: ``signature -> step``; called once for each.
        split: ``batch -> (signature, rest)``: what can be hashed, and what the step takes.
    """
    return BySignature(make, split)


def map_steps(step: Callable, wrap: Callable[[Callable], Callable]) -> Callable:
    """`wrap` of a step; of one that differs by signature, around each."""
    if not isinstance(step, BySignature):
        return wrap(step)
    return BySignature(lambda signature: wrap(step.of(signature)), step._split)


def split_ring_size(batch: Batch) -> tuple[int, Batch]:
    """The ring size of a dealt batch, and the rest of it; 0 of one whose samples are as drawn."""
    if RING_SIZE not in batch:
        return 0, batch
    rest = {name: leaf for name, leaf in batch.items() if name not in HOST_LEAVES}
    return int(batch[RING_SIZE][0]), rest


@dataclass(frozen=True)
class Dealer:
    """Deals the documents of a run's batches.

    Attributes:
        cp: ranks that share documents.
        parts: ranks that split batches by samples.
        microbatches: of each of these.
        multiple: a rank's tokens are divided by so many other ranks.
        seq: tokens of a sample.
        costs: of documents.
        sent_bytes: what a rank sends in a step for each token whose keys and values it sends in a
            layer's forward.
        notes: of steps whose batches were made, what their records will say.
    """

    cp: int
    parts: int
    microbatches: int
    multiple: int
    seq: int
    costs: ContextCosts
    sent_bytes: float
    notes: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)

    def deal(self, step: int, batch: Batch, checksum: int) -> dict[str, torch.Tensor]:
        """The whole batch of a step, dealt, with `HOST_LEAVES`.

        Args:
            step: from 0.
            batch: as drawn.
            checksum: of that, of 64 bits: what was learned from does not depend on the deal.
        """
        shared = {"parts": self.parts, "microbatches": self.microbatches}
        made = deal(batch, self.cp, **shared, multiple=self.multiple, costs=self.costs)
        self.notes[step] = self._describe(made)
        ring, sums = (torch.zeros_like(made.batch["rows"]) for _ in HOST_LEAVES)
        sums[0] = checksum - 2**64 if checksum >= 2**63 else checksum
        return {**made.batch, RING_SIZE: ring + made.ring_size, CHECKSUM: sums}

    def _describe(self, made: ContextDeal) -> dict[str, Any]:
        return {
            "ring_size": made.ring_size,
            "tokens_per_rank": made.tokens_per_rank,
            "idle": round(made.idle, 6),
            "static_idle": round(made.static_idle, 6),
            "sent_bytes": round(made.sent * self.sent_bytes),
            "static_sent_bytes": round(made.static_sent * self.sent_bytes),
        }

    def list_programs(self, global_batch: int) -> list[tuple[int, int]]:
        """Every ring size, and every number of a rank's tokens in a row, of such batches."""
        shared = {"parts": self.parts, "microbatches": self.microbatches}
        return list_deals(self.cp, self.seq, global_batch, **shared, multiple=self.multiple)


def make_dealer(config: Any, mesh: Mesh | BoundMesh) -> Dealer | None:
    """The dealer of a run; None where its samples stay as they are drawn.

    Raises:
        ValueError: what `deal_problems` finds.
    """
    ranks = config.parallelism
    if ranks.context != DYNAMIC or mesh["cp"] == 1:
        return None
    raise_problems("documents cannot be dealt to ranks", deal_problems(config, mesh))
    split = mesh["tp"] if ranks.sequence_parallel else 1
    width = _key_bytes(config, mesh)
    flops = config.family.flops_per_token(config.architecture, 1)
    of_pairs = config.family.flops_per_token(config.architecture, config.data.seq) - flops
    usual, pairs = ContextCosts(), max((config.data.seq - 1) / 2, 1)
    # of the layer that the usual costs are of: 4 KiB are sent while 436 MFLOP take 1 / exchange
    exchange = usual.exchange * (width * mesh["tp"] / 4096) / (flops / 3 / 436e6)
    return Dealer(
        cp=mesh["cp"],
        parts=math.prod(mesh[axis] for axis in DATA_AXES),
        microbatches=ranks.microbatches,
        multiple=mesh["ulysses"] * split,
        seq=config.data.seq,
        costs=ContextCosts(1.0, of_pairs / pairs / flops, exchange),
        # keys and values twice, and their cotangents, which are float32 at least
        sent_bytes=width * (2 + max(1.0, 4 / config.architecture.torch_dtype.itemsize)),
    )


def _key_bytes(config: Any, mesh: Mesh | BoundMesh) -> float:
    """Bytes of a token's keys and values in all layers of a rank, forward."""
    model, tp, group = config.gpt, mesh["tp"], mesh["ulysses"]
    heads, width = max(model.kv_heads // tp, 1), 2 * model.head_size
    if model.kv_rank:
        heads = model.num_heads // tp
        width = model.head_size + model.rope_head_dim + model.v_head_dim
    layers = (model.num_layers + model.mtp_depth) / mesh["pp"]
    return layers * heads * width * model.torch_dtype.itemsize / math.gcd(group, heads)


def deal_problems(config: Any, mesh: Mesh | BoundMesh) -> Iterator[Problem]:
    """Settings that do not go with documents that are dealt to ranks."""
    if config.parallelism.context != DYNAMIC or mesh["cp"] == 1:  # which is said elsewhere
        return
    path, got = "context", DYNAMIC
    if not config.data.packed:
        fix = "add --pack best-fit, or --mask-documents"
        yield Problem(path, f"{got} without packing", "samples of several documents", fix)
    if not config.parallelism.zigzag:
        wanted = "an early and a late part of every document on each of its ranks"
        yield Problem("zigzag", f"false with context={got}", wanted, "leave it out")
    if config.compute.cuda_graph:
        wanted = "one program, whose memory the state stays in"
        yield Problem("cuda_graph", f"true with context={got}", wanted, "leave it out")
    model, order = config.gpt, "numbers that do not depend on the order of tokens"
    if model.dropout:
        yield Problem("gpt.dropout", f"{model.dropout:g} with context={got}", order, "set it to 0")
    moe = model.moe
    if moe is None:
        return
    few = config.parallelism.microbatches == 1
    for name, wrong, fix in (
        ("jitter", moe.jitter > 0, "set it to 0"),
        ("capacity_factor", moe.capacity_factor > 0, "set it to 0, which drops no token"),
        ("routing", moe.routing != "top_k", "choose top_k"),
        ("aux", moe.aux_loss and moe.aux == "sequence", "choose batch"),
        ("aux", moe.aux_loss and moe.aux == "batch" and not few, "set microbatches to 1"),
    ):
        if wrong:
            value = f"{getattr(moe, name)} with context={got}"
            value += " and microbatches" if value.startswith("batch") else ""
            wanted = "experts that do not depend on which documents share a row"
            yield Problem(f"gpt.moe.{name}", value, wanted, fix)


class DealHook(LoopHook):
    """Records how documents were dealt, and has all programs compiled before the first step.

    Args:
        session: of the run.
    """

    def __init__(self, session: Any):
        self._session, self._warm = session, False

    def before(self, at: At) -> None:
        """Compile, once, the steps of all signatures. Collective."""
        if not self._warm:
            self._warm = True
            compile_steps(self._session.run, at.state, at.batch)

    def after(self, at: At) -> None:
        """Record ``context``: what the batch was dealt like, beside the zig-zag of samples."""
        dealer = self._session.run.setup.dealer
        if dealer is not None and (note := dealer.notes.pop(at.index, None)) is not None:
            at.record["context"] = note


def compile_steps(run: Any, state: Any, batch: Batch) -> None:
    """Compile a run's steps for every shape that batches may have. Collective.

    Stages of a pipeline on processes compile as they first run.

    Args:
        run: a `functron.training.run.Run` that deals documents.
        state: before a step; it is left alone.
        batch: of that step, dealt or not.
    """
    step, dealer = run.step, run.setup.dealer
    if dealer is None or not isinstance(step, BySignature):
        return
    whole = not isinstance(run.mesh, BoundMesh)
    rows = dealer.microbatches * (dealer.parts if whole else 1)
    for size in dict.fromkeys(run.batches.sizes):
        for ring, tokens in dealer.list_programs(size):
            made = step.of(ring)
            if isinstance(made, Jitted):
                columns = tokens * dealer.cp if whole else tokens // run.mesh["ulysses"]
                made.compile(state, {
                    name: leaf.new_zeros((rows, columns)[: leaf.dim()])
                    for name, leaf in split_ring_size(batch)[1].items()
                })  # fmt: skip


def introduce_deals(run: Any) -> Sequence[str]:
    """Lines on how a run deals documents."""
    dealer = run.setup.dealer
    if dealer is None:
        return ()
    rings = list_ring_sizes(dealer.cp)[::-1]
    count = len({x for size in run.batches.sizes for x in dealer.list_programs(size)})
    when = "made as they are first needed"
    if run.setup.is_compiled and run.setup.rank is None:
        when = "all compiled before the first step"
    return [
        f"deal   documents go to {', '.join(map(str, rings))} of cp={dealer.cp} ranks by their "
        f"cost, padded by at most {SLACK[-1]:.1%} of a row: up to {count} programs, {when}"
    ]
