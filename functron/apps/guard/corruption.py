"""Silent corruption: replicas of the state that are not equal to the bit.

Parts of the state that several ranks hold have the same bits on all of them, at any time: they are
computed of the same numbers by the same program. A bit that flips in one of them is found by a
64-bit hash of the raw bits, compared over the axes that a leaf's spec does not mention.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist

from functron.apps.guard.watchdog import ON_PROCESSES
from functron.core import tree
from functron.core.errors import Problem
from functron.core.settings import Mark, Need, setting
from functron.core.tables import shows_differences
from functron.spmd import BoundMesh, collectives, shard_map
from functron.spmd.spec import P, is_spec, spec_axes
from functron.training.loop import At, LoopHook

if TYPE_CHECKING:
    from functron.training.run import Job, Run, Session

COLUMNS = 512
"""Words of 4 bytes in a row of those that are hashed."""
ROWS = 1 << 13
"""Rows that are hashed at a time: 16 MiB, for which a check needs twice as much memory."""
SMALL = 1 << 16
"""Leaves of at most so many bytes are hashed together."""


_COMPARED = Need(
    lambda config: config.parallelism.nproc > 0 and config.replicas.every > 0,
    "processes whose replicas are compared",
    "set nproc and check_replicas_every",
    whole=True,
)


@shows_differences
@dataclass(frozen=True)
class ReplicasConfig:
    """How ranks that hold the same part of a state are compared.

    Attributes:
        every: see after every so many steps, and before every save, that ranks which hold the same
            part of the state have the same bits, by 64-bit hashes; 0: never. What fsdp and ZeRO
            divide no other rank has, unless another axis replicates it, and on a simulated mesh
            there is one of each.
        on_corruption: repair: ranks that differ from most get the bits of the others; stop. Where
            there is no majority the run stops.
    """

    MARK: ClassVar[Mark] = Mark(box="resilience")

    every: int = setting(200, short="check_replicas_every", least=0, need=ON_PROCESSES)
    on_corruption: Literal["repair", "stop"] = setting(
        "repair", short="on_corruption", need=_COMPARED
    )

    def hook(self, session: Session) -> ReplicaHook | None:
        """Compares the replicas of the state; None: there are none, or nobody asks."""
        replicas = replicas_of(session.run, session.job) if self.every else None
        if replicas is None:
            return None
        repairs, saves = self.on_corruption == "repair", session.run.config.saves_after
        return ReplicaHook(replicas, session.write, self.every, repairs=repairs, saves=saves)

    def introduce(self, run: Run) -> Iterator[str]:
        """How much of the state is compared, among the first lines of a run."""
        if self.every and (replicas := replicas_of(run, None)) is not None:
            share = replicas.covered(run.state)
            rest = "" if share == 1 else "; no other rank has the rest"
            every = f"every {self.every} steps"
            yield f"checks replicas of {share:.0%} of the state's bytes, {every}{rest}"


class CorruptionError(OSError):
    """Replicas of the state differ, and are not to be, or cannot be, repaired."""


# --- hashes


def _odd(count: int, key: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """Odd factors by position, int64 ``[count]``, the same on every device: SplitMix64."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return _mix(x + key * 0x9E3779B97F4A7C15 % 2**63) | 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 in which all bits depend on all; products wrap around."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def _right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift that fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _raw(leaf: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in row-major order."""
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)


def _hash_bytes(raw: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of bytes: int64, 0-dim.

    The sum over rows, times an odd factor by their position each, of the mixed sum over columns of
    words of 4 bytes times an odd factor. Integers of 64 bits wrap around, so that the order of sums
    does not matter and every device has the same; one word that changes always changes the hash.
    """
    device, width = raw.device, 4 * COLUMNS
    full = raw.numel() // width
    columns = _odd(COLUMNS, 1, device)
    total = torch.full((), raw.numel(), dtype=torch.int64, device=device)
    head = raw[: full * width]
    if head.storage_offset() % 4:
        head = head.clone()
    table = head.view(torch.int32).view(full, COLUMNS)
    for first in range(0, full, ROWS):
        part = table[first : first + ROWS]
        sums = _mix((part * columns).sum(1))
        total = total + (sums * _odd(len(part), 2, device, first)).sum()
    rest = raw[full * width :]
    if rest.numel():
        padded = torch.zeros(width, dtype=torch.uint8, device=device)
        padded[: rest.numel()] = rest
        last = _mix((padded.view(torch.int32) * columns).sum())
        total = total + last * _odd(1, 2, device, full)[0]
    return _mix(total)


def leaf_hash(leaf: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of the raw bits of a tensor and their positions: int64, 0-dim, on its device.

    Equal for equal bits on every device; different where one word of 4 bytes differs, and
    otherwise but for one in 2^64. NaNs count as the bits they are.
    """
    return _hash_bytes(_raw(leaf))


def _group_hash(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """One hash of several leaves: small ones of a dtype and device are hashed as one."""
    large = [leaf for leaf in leaves if leaf.nbytes > SMALL]
    small: dict[Any, list[torch.Tensor]] = {}
    for leaf in leaves:
        if leaf.nbytes <= SMALL and leaf.numel():
            small.setdefault((leaf.dtype, str(leaf.device)), []).append(leaf.detach())
    parts = [_hash_bytes(_raw(leaf)) for leaf in large]
    parts += [
        _hash_bytes(_raw(torch.cat([x.reshape(-1) for x in some]))) for some in small.values()
    ]
    if not parts:
        return torch.zeros((), dtype=torch.int64)
    each = torch.stack([part.to(parts[0].device) for part in parts])
    return (each * _odd(len(parts), 3, each.device)).sum()


# --- replicas


class Finding(NamedTuple):
    """A leaf whose replicas differ.

    Attributes:
        leaf: its path in the state.
        ranks: that differ from most others; where there is no majority, all that hold it.
        replicas: how many there are.
        known: whether most agree, so that the others are wrong.
    """

    leaf: str
    ranks: tuple[int, ...]
    replicas: int
    known: bool


@dataclass(frozen=True)
class _Group:
    """The leaves that the same axes replicate, by position in the state."""

    axes: tuple[str, ...]
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class Replicas:
    """Which parts of a state other ranks hold as well, and whether they have the same bits.

    Over the ranks of a pipeline nothing is compared: they hold other parts.

    Attributes:
        mesh: the ranks, which are processes.
        specs: of the state.
        stages: the axis of a pipeline's ranks; None: there is none.
        job: their processes, which compare what they found; None: `covered` alone is asked for.
    """

    mesh: BoundMesh
    specs: tree.Tree
    stages: str | None
    job: Job | None

    def groups(self, state: tree.Tree) -> list[_Group]:
        """The leaves of a state by the axes that replicate them; without those that none does."""
        specs = tree.broadcast_prefix(self.specs, state, is_leaf=is_spec, what="specs")
        found: dict[tuple[str, ...], list[int]] = {}
        for number, spec in enumerate(specs):
            split = {*spec_axes(spec), self.stages}
            axes = tuple(a for a in self.mesh.axis_names if self.mesh[a] > 1 and a not in split)
            if axes:
                found.setdefault(axes, []).append(number)
        return [_Group(axes, tuple(numbers)) for axes, numbers in found.items()]

    def covered(self, state: tree.Tree) -> float:
        """The share of the bytes of this rank's state that another rank holds as well."""
        leaves = tree.leaves(state)
        held = sum(leaves[i].nbytes for group in self.groups(state) for i in group.leaves)
        return held / max(tree.nbytes(state), 1)

    def check(self, state: tree.Tree) -> list[Finding]:
        """The leaves whose replicas differ, the same list on every rank.

        Collectives: for every set of axes that replicates leaves an all-gather of 8 bytes, and an
        all-reduce of a number; where replicas differ, 8 bytes for each leaf.
        """
        groups = self.groups(state)
        if not groups and not self.stages:
            return []

        def hashes(state: tree.Tree) -> list[torch.Tensor]:
            leaves = tree.leaves(state)
            each = [_group_hash([leaves[i] for i in group.leaves]) for group in groups]
            return [self._across(x, g.axes) for x, g in zip(each, groups, strict=True)]

        found = self._run(hashes, state)
        differs = any(bool((column != column[0]).any()) for column in found)
        assert self.job is not None
        if not self.job.across(int(differs), dist.ReduceOp.MAX):
            return []
        return self._findings(state, groups)

    def _across(self, value: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        return collectives.all_gather(value.to(self.mesh.device_type), axes)

    def _run(self, f: Callable, state: tree.Tree) -> Any:
        """The result of a per-rank program on this rank's state."""
        # each rank sees what it holds, whatever that is of: specs of storage are no program's
        mapped = shard_map(f, self.mesh, (P(),), P(), check=False, stages=self.stages)
        with torch.no_grad():
            return mapped(state)

    def _columns(self, state: tree.Tree, groups: Sequence[_Group]) -> list[torch.Tensor]:
        """The hashes of leaves on all ranks that hold them: ``[ranks, leaves]`` by group."""

        def hashes(state: tree.Tree) -> list[torch.Tensor]:
            leaves = tree.leaves(state)
            each = [torch.stack([leaf_hash(leaves[i]).cpu() for i in g.leaves]) for g in groups]
            return [self._across(x, g.axes) for x, g in zip(each, groups, strict=True)]

        return [column.cpu() for column in self._run(hashes, state)]

    def _findings(self, state: tree.Tree, groups: Sequence[_Group]) -> list[Finding]:
        paths, own = tree.paths(state), []
        for group, columns in zip(groups, self._columns(state, groups), strict=True):
            ranks = self._ranks(group.axes)
            for number, column in zip(group.leaves, columns.T.tolist(), strict=True):
                wrong, known = _minority(column)
                if wrong:
                    held = tuple(ranks[i] for i in wrong)
                    own.append(Finding(paths[number], held, len(ranks), known))
        assert self.job is not None
        return sorted({*itertools.chain.from_iterable(self.job.gather(own))})

    def _ranks(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks that share this one's place on all other axes, in the order of a gather."""
        own, found = self.mesh.coordinate, []
        for place in itertools.product(*(range(self.mesh[axis]) for axis in axes)):
            at, rank = {**own, **dict(zip(axes, place, strict=True))}, 0
            for axis in self.mesh.axis_names:
                rank = rank * self.mesh[axis] + at[axis]
            found.append(rank)
        return found

    def repair_(self, state: tree.Tree, findings: Sequence[Finding]) -> None:
        """Give the ranks that are wrong the bits of one that is right, in place.

        Collectives: of every leaf an all-reduce over the axes that replicate it.

        Raises:
            CorruptionError: replicas differ afterwards, still or again.
        """
        groups, paths = self.groups(state), tree.paths(state)
        wanted = {finding.leaf for finding in findings}
        chosen = [
            _Group(group.axes, numbers)
            for group in groups
            if (numbers := tuple(i for i in group.leaves if paths[i] in wanted))
        ]
        sources = {}
        for group, columns in zip(chosen, self._columns(state, chosen), strict=True):
            ranks = self._ranks(group.axes)
            for number, column in zip(group.leaves, columns.T.tolist(), strict=True):
                wrong, _ = _minority(column)
                good = next(i for i in range(len(ranks)) if i not in wrong)
                sources[number] = ranks[good] == self.mesh.rank

        def spread(state: tree.Tree) -> list[torch.Tensor]:
            leaves, out = tree.leaves(state), []
            for group in chosen:
                for number in group.leaves:
                    raw = _raw(leaves[number]).to(self.mesh.device_type)
                    sent = raw if sources[number] else torch.zeros_like(raw)
                    out.append(collectives.psum(sent, group.axes))
            return out

        rows = [number for group in chosen for number in group.leaves]
        leaves = tree.leaves(state)
        for number, raw in zip(rows, self._run(spread, state), strict=True):
            leaf = leaves[number].detach()
            leaf.copy_(raw.to(leaf.device).view(leaf.dtype).view(leaf.shape))
        left = self.check(state)
        if left:
            raise CorruptionError(words(left, "what was just repaired differs again"))


def replicas_of(run: Run, job: Job | None) -> Replicas | None:
    """The replicas of the state of `run`; None where this process has all of it."""
    if not isinstance(run.mesh, BoundMesh):
        return None
    stages = "pp" if run.setup.is_pipelined else None
    return Replicas(run.mesh, run.setup.state_specs, stages, job)


class ReplicaHook(LoopHook):
    """Compares the replicas of the state every so many steps, and before what is saved.

    Collective. It raises CorruptionError where they differ and are not repaired.

    Args:
        replicas: of the state.
        write: an event, as `functron.training.records.event_log` yields it.
        every: after multiples of so many steps.
        repairs: whether those that differ from most are repaired, in place.
        saves: whether a checkpoint is saved after so many steps.
    """

    judges = True

    def __init__(
        self,
        replicas: Replicas,
        write: Callable[..., None],
        every: int,
        *,
        repairs: bool,
        saves: Callable[[int], bool] = lambda step: False,
    ):
        self._replicas, self._write, self._repairs = replicas, write, repairs
        self._every, self._saves = every, saves

    def due(self, step: int) -> bool:
        """Whether replicas are compared after so many steps."""
        return step % self._every == 0 or self._saves(step)

    def after(self, at: At) -> None:
        """Compare them where it is due, and at the last step."""
        if at.last or self.due(at.step):
            self.check(at.state, at.step)

    def repair(self, at: At) -> bool:
        """Whether replicas of the newest state differed, and were repaired."""
        return self.check(at.newest.state, at.newest.step)

    def check(self, state: tree.Tree, step: int) -> bool:
        """Whether replicas of a state differed, and were repaired."""
        findings = self._replicas.check(state)
        if not findings:
            return False
        ranks = sorted({rank for finding in findings for rank in finding.ranks})
        one = ranks[0] if len(ranks) == 1 else None
        found = [finding._asdict() for finding in findings]
        self._write("corruption", step, rank=one, found=found)
        if not (self._repairs and all(finding.known for finding in findings)):
            title = f"step {step}: the state was corrupted in memory"
            raise CorruptionError(words(findings, title))
        self._replicas.repair_(state, findings)
        leaves = [finding.leaf for finding in findings]
        self._write("repair", step, rank=one, ranks=ranks, leaves=leaves)
        return True


def _minority(column: Sequence[int]) -> tuple[list[int], bool]:
    """The places of those unlike most, and whether there are such; all, where there is no most."""
    (value, count), *others = Counter(column).most_common()
    if not others:
        return [], True
    if 2 * count > len(column):
        return [place for place, each in enumerate(column) if each != value], True
    return list(range(len(column))), False


def words(findings: Sequence[Finding], title: str) -> str:
    """Findings as a message: which ranks, which leaves, and what to do."""
    lines = []
    for ranks, known, replicas in dict.fromkeys((x.ranks, x.known, x.replicas) for x in findings):
        leaves = [x.leaf for x in findings if (x.ranks, x.known) == (ranks, known)]
        listed = ", ".join(leaves[:4]) + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")
        who = ", ".join(map(str, ranks))
        got = f"bits on rank {who} unlike those of the others of {replicas}"
        fix = "look at its memory and processor; then go on with --resume"
        if not known:
            got = f"replicas on ranks {who} that differ, and no majority"
            fix = f"one of them is wrong; {fix}: checkpoints saved before are good"
        lines.append(str(Problem(listed, got, "the same bits on all", fix)))
    return "\n".join([title, *(f"  - {line}" for line in lines)])
