"""Documents dealt to the ranks of cp by their cost, anew in every step: ``--context dynamic``.

Which ranks have which documents follows from the lengths of all documents of a step
(`functron.data.deal`), so that every process knows it without asking; each reads the whole batch
for it, and keeps its part. How many ranks share documents, the degree, differs between steps, and
with it the program: a batch says it in a leaf of its own, and `by_signature` takes the step that
was made for it. There are few such programs, as shapes are few, and where steps are compiled all
are compiled before the first.

Ranks share documents as they share samples without it: keys go round among ranks of cp, or are
gathered (``dynamic-gather``), and ranks of ulysses exchange heads; with both in the mesh, documents
go to some ranks of ulysses, to all, or to all of several ranks of cp.

The numbers of a step are those of the same samples without it, to rounding: what documents hold
and predict stays, and only the order of tokens changes. What is drawn at random goes by the place
of a token in its sample, which the batch brings. What depends on that order is refused
(`deal_problems`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    list_degrees,
)
from functron.models.options import Batch
from functron.spmd import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh
from functron.training.loop import At, LoopHook

DEGREE = "degree"
"""The leaf of a dealt batch that says how many ranks share documents: int64 ``[rows]``, all equal.

They are ``exchange_size * ring_size`` ranks of ulysses and cp (`split_degree`)."""

PLACES = "places"
"""The leaf that says where tokens were in the samples, where numbers are drawn by it."""

CHECKSUM = "checksum"
"""The leaf that says what was dealt: int64 ``[rows]``, whose sum is the checksum of the samples."""

HOST_LEAVES = (DEGREE, CHECKSUM)
"""Leaves of a dealt batch that the host reads, and steps do not get."""

DYNAMIC = ("dynamic", "dynamic-gather")
"""The words of `functron.training.config.ParallelismConfig.context` for all of this."""


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


def take_degree(batch: Batch) -> tuple[int, Batch]:
    """The degree of a dealt batch, and the rest of it; 0 of one whose samples are as drawn."""
    if DEGREE not in batch:
        return 0, batch
    rest = {name: leaf for name, leaf in batch.items() if name not in HOST_LEAVES}
    return int(batch[DEGREE][0]), rest


def split_degree(degree: int, mesh: Mesh | BoundMesh) -> tuple[int, int]:
    """Of so many ranks, how many of cp exchange keys, and how many of ulysses heads."""
    exchange = min(degree, mesh["ulysses"])
    return degree // exchange, exchange


@dataclass(frozen=True)
class Dealer:
    """Deals the documents of a run's batches.

    Attributes:
        cp, ulysses: ranks that share documents, by their keys and by their heads.
        parts: ranks that split batches by samples.
        microbatches: of each of these.
        stages: of the pipeline.
        multiple: a rank's tokens are divided by so many other ranks.
        seq: tokens of a sample.
        costs: of documents.
        sizes: of what ranks send for a token.
        draws: whether steps draw random numbers for tokens, by their places in samples.
        notes: of steps whose batches were made, what their records will say.
    """

    cp: int
    ulysses: int
    parts: int
    microbatches: int
    stages: int
    multiple: int
    seq: int
    costs: ContextCosts
    sizes: _TokenBytes
    draws: bool
    notes: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)

    def deal(self, step: int, batch: Batch, checksum: int) -> dict[str, torch.Tensor]:
        """The whole batch of a step, dealt, with `HOST_LEAVES`.

        Args:
            step: from 0.
            batch: as drawn.
            checksum: of that, of 64 bits: what was learned from does not depend on the deal.
        """
        shape = {**self._shape, "stages": self.stages, "costs": self.costs}
        made = deal(batch, self.cp, **shape)
        self.notes[step] = self._describe(made)
        degree, sums = (torch.zeros_like(made.batch["rows"]) for _ in HOST_LEAVES)
        degree += made.ring_size * made.exchange_size
        sums[0] = checksum - 2**64 if checksum >= 2**63 else checksum
        places = {PLACES: made.places} if self.draws else {}
        return {**made.batch, **places, DEGREE: degree, CHECKSUM: sums}

    @property
    def _shape(self) -> dict[str, Any]:
        shared = {"parts": self.parts, "microbatches": self.microbatches}
        return {**shared, "ulysses": self.ulysses, "multiple": self.multiple}

    def _describe(self, made: ContextDeal) -> dict[str, Any]:
        sent = self.sizes.of_step(made.sent, made.exchanged, made.exchange_size)
        static = self.sizes.of_step(made.static_sent, made.static_exchanged, self.ulysses)
        return {
            "ring_size": made.ring_size,
            **({"exchange_size": made.exchange_size} if self.ulysses > 1 else {}),
            "tokens_per_rank": made.tokens_per_rank,
            "padding": round(made.padding, 6),
            "idle": round(made.idle, 6),
            "static_idle": round(made.static_idle, 6),
            "sent_bytes": sent,
            "static_sent_bytes": static,
        }

    def list_programs(self, global_batch: int) -> list[tuple[int, int]]:
        """Every degree, and every number of a rank's tokens in a row, of such batches."""
        found = list_deals(self.cp, self.seq, global_batch, **self._shape)
        return [(ring * exchange, tokens) for ring, exchange, tokens in found]


@dataclass(frozen=True)
class _TokenBytes:
    """Bytes that ranks of a model send for tokens in a step, without what is computed again.

    Attributes:
        keys: bytes of a token's keys and values in all layers of a rank, with all of its heads.
        others: of its queries and results.
        kv_heads: of a rank, in a layer.
        back: bytes that go back, and round a second time, for each of keys that went round.
    """

    keys: float
    others: float
    kv_heads: int
    back: float

    def copies(self, exchange: int) -> int:
        """How often keys are sent, so that each of so many ranks has a head."""
        return exchange // math.gcd(exchange, self.kv_heads)

    def of_step(self, sent: float, exchanged: float, exchange: int) -> int:
        """Bytes, of tokens whose keys travel, and of those whose heads are sent to others."""
        keys = self.keys * self.copies(exchange)
        return round(
            sent * keys / exchange * (1 + self.back) + exchanged * (keys + self.others) * 2
        )


def make_dealer(config: Any, mesh: Mesh | BoundMesh) -> Dealer | None:
    """The dealer of a run; None where its samples stay as they are drawn.

    Raises:
        ValueError: what `deal_problems` finds.
    """
    ranks = config.parallelism
    if not _is_dealt(config, mesh):
        return None
    raise_problems("documents cannot be dealt to ranks", deal_problems(config, mesh))
    sizes, group = _measure_tokens(config, mesh), mesh["ulysses"]
    keys = sizes.keys * sizes.copies(group)
    flops = config.family.flops_per_token(config.architecture, 1)
    of_pairs = config.family.flops_per_token(config.architecture, config.data.seq) - flops
    usual, pairs = ContextCosts(), max((config.data.seq - 1) / 2, 1)
    # of the layer that the usual costs are of: 4 KiB are sent while 436 MFLOP take 1 / exchange
    of_byte = usual.exchange * (mesh["tp"] / 4096) / (flops / 3 / 436e6)
    return Dealer(
        cp=mesh["cp"],
        ulysses=group,
        parts=math.prod(mesh[axis] for axis in DATA_AXES),
        microbatches=ranks.microbatches,
        stages=mesh["pp"],
        multiple=mesh["tp"] if ranks.sequence_parallel else 1,
        seq=config.data.seq,
        costs=ContextCosts(
            1.0, of_pairs / pairs / flops, of_byte * keys, of_byte * (keys + sizes.others)
        ),
        sizes=sizes,
        draws=config.gpt.random,
    )


def _measure_tokens(config: Any, mesh: Mesh | BoundMesh) -> _TokenBytes:
    model, tp = config.gpt, mesh["tp"]
    heads, kv_heads, q, k, v = (
        model.num_heads // tp,
        max(model.kv_heads // tp, 1),
        *[model.head_size] * 3,
    )
    if model.kv_rank:
        kv_heads, q, v = heads, model.head_size + model.rope_head_dim, model.v_head_dim
        k = q
    size = model.torch_dtype.itemsize
    of_layers = size * (model.num_layers + model.mtp_depth) / mesh["pp"]
    # keys that go round do so again in backward, with cotangents, which are float32 at least;
    # those that were gathered are kept
    back = 1.0 if config.parallelism.context == "dynamic-gather" else 1 + max(1.0, 4 / size)
    return _TokenBytes(of_layers * kv_heads * (k + v), of_layers * heads * (q + v), kv_heads, back)


def _is_dealt(config: Any, mesh: Mesh | BoundMesh) -> bool:
    return config.parallelism.context in DYNAMIC and mesh["cp"] * mesh["ulysses"] > 1


def deal_problems(config: Any, mesh: Mesh | BoundMesh) -> Iterator[Problem]:
    """Settings that do not go with documents that are dealt to ranks."""
    if not _is_dealt(config, mesh):  # which is said elsewhere
        return
    path, got = "context", config.parallelism.context
    if not config.data.packed:
        fix = "add --pack best-fit, or --mask-documents"
        yield Problem(path, f"{got} without packing", "samples of several documents", fix)
    if not config.parallelism.zigzag and mesh["cp"] > 1:
        wanted = "an early and a late part of every document on each of its ranks"
        yield Problem("zigzag", f"false with context={got}", wanted, "leave it out")
    if config.compute.cuda_graph:
        wanted = "one program, whose memory the state stays in"
        yield Problem("cuda_graph", f"true with context={got}", wanted, "leave it out")
    moe = config.gpt.moe
    if moe is None:
        return
    few = config.parallelism.microbatches == 1
    for name, wrong, fix in (
        ("capacity_factor", moe.capacity_factor > 0, "set it to 0, which drops no token"),
        ("routing", moe.routing != "top_k", "choose top_k"),
        ("balance_by", moe.balance_bias and moe.balance_by == "quantile", "choose sign"),
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
        for degree, tokens in dealer.list_programs(size):
            made = step.of(degree)
            if isinstance(made, Jitted):
                columns = tokens * (dealer.cp * dealer.ulysses if whole else 1)
                like = take_degree(batch)[1]
                names = replace(run.setup, degree=degree).batch_specs
                shapes = {n: like.get(n, like["tokens"]) for n in names}
                made.compile(state, {
                    name: leaf.new_zeros((rows, columns)[: leaf.dim()])
                    for name, leaf in shapes.items()
                })  # fmt: skip


def introduce_deals(run: Any) -> Sequence[str]:
    """Lines on how a run deals documents."""
    dealer = run.setup.dealer
    if dealer is None:
        return ()
    degrees = [ring * exchange for ring, exchange in list_degrees(dealer.cp, dealer.ulysses)]
    axes = ((axis, run.mesh[axis]) for axis in CONTEXT_AXES)
    ranks = ",".join(f"{axis}={size}" for axis, size in axes if size > 1)
    count = len({x for size in run.batches.sizes for x in dealer.list_programs(size)})
    when = "made as they are first needed"
    if run.setup.is_compiled and run.setup.rank is None:
        when = "all compiled before the first step"
    return [
        f"deal   documents go to {', '.join(map(str, degrees))} of {ranks} ranks by their "
        f"cost, padded by at most {SLACK[-1]:.1%} of a row: up to {count} programs, {when}"
    ]
