"""Meshes: named axes of ranks, simulated by default and bound to process groups on request."""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from functron.core import compat
from functron.core.errors import Problem, load_plugin, nearest, public, raise_problems, refuse
from functron.core.tables import Table
from functron.spmd.flight import EVERYWHERE, DisagreementError, FlightRecorder, RecordedGroup
from functron.spmd.shared_memory import HostGroups

STANDARD_AXES = ("pp", "dp", "fsdp", "cp", "ulysses", "ep_node", "ep", "tp")
"""The axes that layers may name on any mesh; where a mesh lacks one, it has size 1."""

DATA_AXES = ("dp", "fsdp", "ep_node", "ep")
"""The axes that split the batch, major to minor; ``ep`` is a data axis for all but the experts, and
so is ``ep_node``, the nodes over which ``ep`` goes on where experts are on several."""

FSDP_AXES = ("dp", "fsdp")
"""Of these, those that parameters may be split over, to be gathered where they are used."""

CONTEXT_AXES = ("cp", "ulysses")
"""The axes that split every sequence, major to minor: attention passes keys and values along ``cp``
(Liu et al. 2023), and exchanges heads for sequence along ``ulysses`` (Jacobs et al. 2023)."""


REBIND = "start all processes again from the newest checkpoint, or call mesh.bind() on all ranks"
VOTE_SECONDS = 5.0
"""How long a rank that failed waits for the others to fail alike before it closes the groups."""


class NamedAxes:
    """The names and sizes that a `Mesh` and what is made of it have in common."""

    mesh: Mesh

    @property
    def shape(self) -> dict[str, int]:
        """Axis sizes by name, in rank order."""
        return dict(self.mesh.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Axis names, the slowest-varying first."""
        return tuple(name for name, _ in self.mesh.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.mesh.axes)

    def __getitem__(self, name: str) -> int:
        """The size of axis `name`; 1 where this mesh has no such axis."""
        return self.shape.get(name, 1)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.mesh.axes)})"

    def _table(self) -> Table:
        """The ranks in a grid, the last axis across; of many the first and the last."""
        *down, (name, across) = self.mesh.axes or (("", 1),)
        places = [*itertools.product(*(range(size) for _, size in down))]
        columns, rows = _some(range(across), 8), _some(range(len(places)), 12)
        grid = [["", *(_at([(name, k)]) for k in columns)]]
        for row in rows:
            if row is None:
                grid.append(["", *["..."] * len(columns)])
                continue
            label = _at(zip((n for n, _ in down), places[row], strict=True))
            cells = ("..." if k is None else f"{row * across + k}" for k in columns)
            grid.append([label, *cells])
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        return Table(f"{self!r}, {ranks}", grid, folded=grid)

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def _at(place: Iterable[tuple[str, int | None]]) -> str:
    """``dp=0, tp=1``; "" for a place that is left out."""
    return ", ".join(f"{name}={k}" for name, k in place if name and k is not None)


def _some(places: range, most: int) -> list[int | None]:
    """These places, or of more than so many the first and the last, with None between them."""
    if len(places) <= most:
        return [*places]
    return [*places[: most - 2], None, places[-1]]


@dataclass(frozen=True, init=False, repr=False)
class Mesh(NamedAxes):
    """Names of axes and their sizes: ``Mesh(dp=2, tp=4)`` has 8 ranks.

    Ranks are ordered row-major over the axes as given, the last axis fastest. A mesh is only a
    description: programs mapped over it are simulated in this process until `bind` ties it to
    process groups.

    >>> mesh = ft.Mesh(dp=2, tp=4)
    >>> mesh, mesh.size, mesh["pp"]
    (Mesh(dp=2, tp=4), 8, 1)

    Raises:
        ValueError: a size is not a positive integer.
    """

    axes: tuple[tuple[str, int], ...]

    @public
    def __init__(self, *given: object, **axes: int):
        if given:
            text = isinstance(given[0], str)
            fix = f"Mesh.parse({given[0]!r})" if text else f"Mesh(**{given[0]!r})"
            wanted = "axes by name, as in Mesh(dp=2)"
            refuse("cannot make a mesh", "Mesh", repr(given[0]), wanted, fix, TypeError)
        raise_problems(
            "a mesh needs a positive whole number of ranks on every axis",
            [
                Problem(f"Mesh.{name}", repr(size), "an integer of at least 1")
                for name, size in axes.items()
                if not isinstance(size, int) or isinstance(size, bool) or size < 1
            ],
        )
        object.__setattr__(self, "axes", tuple(axes.items()))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh written as ``"dp=2,tp=4"``; the empty string is one rank.

        Raises:
            ValueError: an entry is not ``axis=size``, an axis is no standard axis or is repeated.
        """
        problems: list[Problem] = []
        axes: dict[str, int] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, _, size = (part.strip() for part in entry.partition("="))
            if not size.isdigit():
                problems.append(Problem("mesh", repr(entry), "axis=size, such as dp=2"))
            elif name not in STANDARD_AXES:
                problems.append(
                    Problem("mesh", repr(name), "a mesh axis", nearest(name, STANDARD_AXES))
                )
            elif name in axes:
                problems.append(Problem("mesh", f"{name!r} twice", "every axis once"))
            else:
                axes[name] = int(size)
        raise_problems(f"cannot read the mesh {text!r}", problems)
        return cls(**axes)

    @property
    def mesh(self) -> Mesh:
        """This mesh; of a `BoundMesh`, its names and sizes."""
        return self

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def without(self, name: str | None) -> Mesh:
        """The mesh of the other axes; itself where it has no such axis."""
        return Mesh(**{axis: size for axis, size in self.axes if axis != name})

    def rank_at(self, coordinate: Mapping[str, int], axes: Sequence[str] | None = None) -> int:
        """The rank at a position on every axis, or its row-major index along some axes alone.

        Axes of which `coordinate` says nothing are at 0.
        """
        rank = 0
        for name in self.axis_names if axes is None else axes:
            rank = rank * self[name] + coordinate.get(name, 0)
        return rank

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of `rank` on every axis.

        Of a bound mesh ``coordinate`` is no method: it is this dict, of this process's own rank
        (`functron.BoundMesh`).

        >>> Mesh(dp=2, tp=4).coordinate(5)
        {'dp': 1, 'tp': 1}
        """
        out = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in self.axis_names}

    @public
    def start(self, device: str = "auto", *, backend: str = "processes", **options: Any) -> Any:
        """This mesh with a process for each rank, which this process calls; for notebooks.

        In `functron.shard_map`, `functron.make_step` and others it gives functions of whole values,
        which stay on the ranks until they are looked at. Short calls are not waited for until then:
        errors come with the next call, a look, or the end of the cell, and name the call's line. A
        with block or ``close()`` ends it.

        Args:
            device: "cpu", "cuda", or "auto": cuda where there is a GPU for each rank.
            backend: of the entry points ``functron.started_meshes``, or ``package.module:function``
                of a mesh, a device and options.
            options: of the backend, by name.
        """
        return load_plugin("functron.started_meshes", backend, "backend")(self, device, **options)

    @public
    def bind(
        self,
        device_type: str = "cpu",
        timeout_seconds: float | None = None,
        recorder: FlightRecorder | None = None,
        *,
        shared_memory: bool = True,
    ) -> BoundMesh:
        """This mesh with one process per rank: process groups from torch's DeviceMesh.

        Call it in every process, after `torch.distributed.init_process_group`. Creates one group
        per axis (a collective operation). Returns a value; nothing is stored globally.

        Collectives: on every axis one all-reduce of 4 bytes. The first call on a group of NCCL's
        connects all of its ranks: if that were a send between two stages of a pipeline, these would
        wait for the others for ever. On CPUs also a broadcast and an all-gather of some hundred
        bytes.

        Args:
            device_type: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
            timeout_seconds: after which a collective over an axis gives up on ranks that do not
                come to it; None: torch's choice, whatever that of the default process group is.
            recorder: of what this process sends over the axes; None: not recorded.
            shared_memory: whether processes on CPUs of one host sum, gather, scatter and send to
                other stages through memory that they share (`functron.spmd.shared_memory`), not by
                gloo.

        Raises:
            ValueError: torch.distributed is not initialised, or its world size is not `size`.
        """
        world = dist.get_world_size() if dist.is_initialized() else None
        if world != self.size:
            refuse(
                "cannot bind the mesh to processes",
                f"Mesh({self})",
                "no process group" if world is None else f"{world} processes",
                f"{self.size} processes, one per rank",
                f"start it with torchrun --nproc-per-node {self.size} and call "
                "torch.distributed.init_process_group() first",
            )
        rank = dist.get_rank()
        if recorder is not None:
            recorder.ranks[EVERYWHERE] = tuple(range(self.size))
        if not self.axes:
            return BoundMesh(self, rank, {}, {}, device_type, recorder)
        sizes = tuple(size for _, size in self.axes)
        backend = compat.mesh_backend(device_type)
        override: Any = None if backend is None else dict.fromkeys(self.axis_names, backend)
        devices = init_device_mesh(
            device_type, sizes, mesh_dim_names=self.axis_names, backend_override=override
        )
        # of a mesh like this; every rank adds one for each
        number = (compat.count_in_store(f"functron/bound/{self}/{device_type}") - 1) // self.size
        again = [str(number)] if number else []
        groups, host = {}, HostGroups() if shared_memory and device_type == "cpu" else None
        for name in self.axis_names:
            group = devices.get_group(name)
            # torch's own names differ by rank, and compiled programs must not
            groups[name] = ":".join(["functron", device_type, str(self), name, *again])
            if timeout_seconds is not None:
                compat.set_group_timeout(group, timeout_seconds)
            dist.all_reduce(torch.zeros(1, device=device_type), group=group)
            used = group if host is None else host.group(group)
            compat.name_group(groups[name], used)
            if recorder is not None:
                recorder.ranks[name] = tuple(dist.get_process_group_ranks(group))
                recorded = RecordedGroup(used, name, recorder)
                compat.name_group(_record_group(groups[name]), compat.keep_group(recorded))
        rest = recorder, Membership(number)
        return BoundMesh(self, rank, self.coordinate(rank), groups, device_type, *rest)


def listen_for_ranks(host: str) -> tuple[dist.TCPStore, int]:
    """A store where processes meet, which listens at this address alone, and its port.

    Those that torch makes by itself listen at every address of the machine.
    """
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen(4096)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    return store, port


Link = tuple[int, int]
"""A rank of an axis that sends, and the one that receives."""


class LostRanksError(RuntimeError):
    """Another process ended, left its groups, or is in another collective."""


@dataclass(eq=False)
class Membership:
    """The part that a process takes in the groups of a bound mesh.

    Attributes:
        number: how many meshes like this one were bound before it; the same on all ranks.
        calls: of programs that this process has made over the groups.
        entered: collectives that these entered, as far as they are counted one by one.
        closed: why the process left the groups; "" while it takes part.
        links: by axis, the names of the groups that `BoundMesh.connect` made.
    """

    number: int = 0
    calls: int = 0
    entered: int = 0
    closed: str = ""
    links: dict[str, dict[Link, str]] = field(default_factory=dict)

    def list_links(self) -> set[str]:
        """The names of those groups, over all axes."""
        return {name for links in self.links.values() for name in links.values()}


@dataclass(frozen=True, repr=False)
class BoundMesh(NamedAxes):
    """A mesh whose ranks are processes; made by `Mesh.bind`.

    Attributes:
        coordinate: this process's position on every axis, ``mesh.coordinate(rank)``: a dict, where
            that of a `Mesh`, which has many ranks, is a method of a rank.
        groups: the process group of every axis, by its torch.distributed name: the same name on
            every rank.
        device_type: where the tensors of collectives live.
        recorder: of what this process sends over the axes; None: not recorded.
        membership: whether this process still takes part in the groups.
    """

    mesh: Mesh
    rank: int
    coordinate: Mapping[str, int]
    groups: Mapping[str, str]
    device_type: str
    recorder: FlightRecorder | None = field(default=None, compare=False, repr=False)
    membership: Membership = field(default_factory=Membership, compare=False, repr=False)

    def __repr__(self) -> str:
        place = _at(self.coordinate.items())
        return f"<Bound{super().__repr__()}: rank {self.rank}, {place}, {self.device_type}>"

    @property
    def compiled_groups(self) -> dict[str, str]:
        """The process groups that compiled programs name, which record where a recorder is set."""
        if self.recorder is None:
            return dict(self.groups)
        return {axis: _record_group(name) for axis, name in self.groups.items()}

    def without(self, name: str | None) -> BoundMesh:
        """The mesh of the other axes, with this process's rank among those that share `name`."""
        mesh = self.mesh.without(name)
        coordinate = {axis: self.coordinate[axis] for axis in mesh.axis_names}
        groups = {axis: self.groups[axis] for axis in mesh.axis_names}
        rest = self.device_type, self.recorder, self.membership
        return BoundMesh(mesh, mesh.rank_at(coordinate), coordinate, groups, *rest)

    def connect(self, axis: str, links: Collection[Link]) -> Mapping[Link, str]:
        """The names of process groups for transfers along links between the ranks of an axis.

        NCCL runs the operations of a group in the order in which they start. So no rank has two
        links in one group, and none of its transfers waits for another one's ranks. A pipeline
        whose ranks send to the next and to the one before takes four, or two for two ranks.

        A group is made, and what is new is connected, at the first call that needs it: all ranks
        of the axis make the same calls. Connecting a link is sending a number along it; later,
        ranks would wait for each other on the host, in the order of their own transfers.
        """
        known = self.membership.links.setdefault(axis, {})
        taken: dict[str, set[int]] = {name: set() for name in known.values()}
        for link, name in known.items():
            taken[name].update(link)
        whole = compat.group(self.groups[axis])
        new = sorted({*links} - known.keys())
        for link in new:
            name = next((n for n, ranks in taken.items() if ranks.isdisjoint(link)), None)
            if name is None:
                name = f"{self.groups[axis]}:{len(taken)}"
                compat.name_group(name, _copy_group(whole, self.device_type, name))
            taken.setdefault(name, set()).update(link)
            known[link] = name
        for link in sorted(new, key=lambda link: [*taken].index(known[link])):
            if self.coordinate[axis] in link:
                self._try_link(link, self.coordinate[axis], compat.group(known[link]))
        return known

    def _try_link(self, link: Link, me: int, group: dist.ProcessGroup) -> None:
        call, peer = (dist.isend, link[1]) if me == link[0] else (dist.irecv, link[0])
        number = torch.zeros(1, device=self.device_type)
        batch = [dist.P2POp(call, number, group=group, group_peer=peer)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    def set_timeout(self, seconds: float) -> None:
        """Have collectives over this mesh that start from now on give up after so long."""
        if self.membership.closed:
            return
        for name in (*self.membership.list_links(), *self.groups.values()):
            compat.set_group_timeout(compat.group(name), seconds)
        if self.recorder is not None and self.recorder.agreement is not None:
            self.recorder.agreement.seconds = seconds

    def leave(self, why: str) -> None:
        """Close the groups of this mesh, in this process: ranks that wait in them find out.

        Programs over the mesh are refused from then on, with the reason `why`. `Mesh.bind` makes
        new groups, on all ranks together.
        """
        self.membership.closed = why
        for name in (*self.membership.list_links(), *self.groups.values()):
            compat.close_group(name, self.device_type)


class JointCall:
    """A program that the ranks of a mesh run together, within a with block.

    Where one of them fails in it, the others may be anywhere: waiting for this one, or past their
    updates. So the groups of the mesh are closed, unless all ranks failed alike. A process that
    Ctrl-C interrupted does not ask the others.

    Args:
        mesh: the ranks; one that is simulated, or of one rank, has no others that could differ.
        alike: whether an exception is raised on all ranks, if on one; None: they tell one another,
            within `VOTE_SECONDS`. What is sent must be counted then (`Membership.entered`).

    Attributes:
        gone: whether what the program should have updated is lost.

    Raises:
        LostRanksError: this process has left the groups of the mesh.
    """

    def __init__(self, program: str, mesh: Mesh | BoundMesh | None, *, alike: bool | None):
        self.program, self.gone, self._alike = program, False, alike
        bound = isinstance(mesh, BoundMesh) and mesh.size > 1
        self._mesh = mesh if isinstance(mesh, BoundMesh) and bound else None
        self._entered = 0

    def __enter__(self) -> JointCall:
        if self._mesh is not None:
            member = self._mesh.membership
            if member.closed:
                raise LostRanksError(
                    f"{self.program}: the process groups of Mesh({self._mesh.mesh}) are closed: "
                    f"{member.closed}; fix: {REBIND}"
                )
            member.calls += 1
            self._entered = member.entered
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or self._mesh is None or self._mesh.membership.closed:
            return
        if self._alike is None and not self.gone and self._num_entered() == 0:
            return  # nothing was sent, so this call can be made again
        apart = isinstance(error, LostRanksError | DisagreementError)
        foreseen = isinstance(error, Exception) and not apart
        if foreseen and (self._all_fail() if self._alike is None else self._alike):
            return
        text = f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
        self._mesh.leave(f"rank {self._mesh.rank} was interrupted in {self.program} by {text}")
        error.add_note(
            f"other ranks may have stopped elsewhere in {self.program}: the process groups of "
            f"Mesh({self._mesh.mesh}) are closed; fix: {REBIND}"
        )

    def _num_entered(self) -> int:
        assert self._mesh is not None
        return self._mesh.membership.entered - self._entered

    def _all_fail(self) -> bool:
        """Whether all ranks fail in this call, having sent and lost as much as this one.

        They tell one another through the store where they met. Collectives: none.
        """
        assert self._mesh is not None
        mesh, member, store = self._mesh, self._mesh.membership, compat.default_store()
        prefix = f"functron/failed/{mesh.mesh}/{member.number}/{member.calls}"
        names = [f"{prefix}/{rank}" for rank in range(mesh.size)]
        mine = f"{self._num_entered()} {self.gone}"
        try:
            store.set(names[mesh.rank], mine)
            store.wait(names, timedelta(seconds=VOTE_SECONDS))
            return all(store.get(name).decode() == mine for name in names)
        except RuntimeError:  # of one that did not fail in this time, or has ended
            return False


def _copy_group(group: dist.ProcessGroup, device_type: str, name: str) -> dist.ProcessGroup:
    """Another process group of the same ranks, which call this together; connected."""
    world, timeout = dist.group.WORLD, compat.timeout_seconds(group, device_type)
    rest: Any = {"timeout": timedelta(seconds=timeout), "group_desc": name}
    if world is not None and world.bound_device_id is not None:
        # by NCCL: connected, without the memory that a first collective would take
        split: Any = dist.split_group(group, [list(range(group.size()))], **rest)
        return split
    ranks, rest["backend"] = dist.get_process_group_ranks(group), dist.get_backend(group)
    made: Any = dist.new_group(ranks, use_local_synchronization=True, **rest)
    dist.all_reduce(torch.zeros(1, device=device_type), group=made)
    return made


def _record_group(group: str) -> str:
    """The name of the process group that records what goes through another."""
    return f"{group}:recorded"
