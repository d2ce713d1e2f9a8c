"""Machines as data: the rates of a GPU and of what connects GPUs, and the seconds that follow.

A machine is a TOML file: `hardware` reads those of functron (`MACHINES`) and those of users, which
`functron doctor` writes too. Everything is a property of the machine; none of a model.

* **Products** of matrices (`MatmulRate`): tiles of the result are computed side by side, one per
  multiprocessor, wave after wave; the last wave takes as long as the others, and a tile that the
  matrix fills in part as long as a full one. A tile of ``m x n`` over ``k`` takes
  ``2 m n (k + k0) / rate`` of the rate that large products reach. The fastest of the machine's
  tiles counts, also with ``k`` divided over several (split-K), and memory bounds it from below.
* **Collectives** by ring algorithms: what a rank sends (`functron.program.cost.Traffic`) over the
  slowest link that its ring crosses, and a latency per step. Ranks of a group that share a domain
  of NVLink share the network of all of them, since a ring leaves a domain through each of its
  adapters.
* **Placement**: ranks lie in the order of the mesh, so many to a domain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import tomli_w
import torch

from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.spmd import Mesh

_FOLDER = Path(__file__).parent / "machine_files"
MACHINES: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of the machines that functron knows."""


@dataclass(frozen=True)
class MatmulRate:
    """The fraction of the peak that products of matrices reach, by their shapes.

    Attributes:
        efficiency: of large products with whole tiles and waves, as a part of the peak: the clock
            that the power limit leaves, and what kernels lose.
        units: processors that compute one tile each at a time.
        tiles: rows and columns of the tiles that kernels exist for, and the part of `efficiency`
            that each reaches.
        overhead_k: the time of a tile's start and end, as so many more of its inner dim.
    """

    efficiency: float
    units: int
    tiles: tuple[tuple[int, int, float], ...]
    overhead_k: float

    def utilisation(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """The part of the peak that ``batch`` products ``[m, k] x [k, n]`` reach, memory aside."""
        best = math.inf
        for rows, columns, share in self.tiles:
            count = batch * -(-m // rows) * -(-n // columns)
            for slices in (1, 2, 4, 8):
                waves = -(-count * slices // self.units)
                inner = k / slices + self.overhead_k
                best = min(best, waves * self.units * rows * columns * inner / share)
        return self.efficiency * batch * m * n * k / best


@dataclass(frozen=True)
class Domain:
    """The GPUs that NVLink connects to one another.

    Attributes:
        gpus: how many.
        bytes_per_second: of one GPU, in one direction, by the data sheet.
        efficiency: the part of it that collectives reach.
        latency_seconds: of one step of a collective.
        measured: by collective, where it was measured by itself: its own ``bytes_per_second``,
            which it reaches, and ``latency_seconds``.
    """

    gpus: int
    bytes_per_second: float
    efficiency: float
    latency_seconds: float
    measured: Mapping[str, Mapping[str, float]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )


@dataclass(frozen=True)
class Network:
    """The network that connects domains.

    Attributes:
        bytes_per_second: of one GPU, in one direction, by the data sheet.
        efficiency: the part of it that collectives reach.
        latency_seconds: of one step of a collective.
        pod_gpus: GPUs among which the network is full: below a fat tree's oversubscribed level.
        oversubscription: how many times less a GPU has across pods; 1: as much.
        measured: as of `Domain`.
    """

    bytes_per_second: float
    efficiency: float
    latency_seconds: float
    pod_gpus: int
    oversubscription: float
    measured: Mapping[str, Mapping[str, float]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )


@dataclass(frozen=True)
class MemoryRates:
    """The memory of one GPU.

    Attributes:
        num_bytes: its capacity, as much of it as programs can have.
        bytes_per_second: read and written, by the data sheet.
        efficiency: the part of it that fused elementwise kernels reach.
    """

    num_bytes: int
    bytes_per_second: float
    efficiency: float


@dataclass(frozen=True)
class HostProcessor:
    """The processor that a GPU is driven by.

    Attributes:
        bytes_per_second: to or from the GPU's memory, in one direction.
        launch_seconds: of the processor, for each kernel that it launches by itself.
        step_seconds: of a step, in which the GPU waits for it: data, norms that it reads, logs.
        computes: what ranks compute, and what they send, takes its time: ranks of a CPU, in which
            nothing runs behind anything else.
    """

    bytes_per_second: float
    launch_seconds: float
    step_seconds: float
    computes: bool = False


@dataclass(frozen=True)
class Calibration:
    """How far predictions on a machine have been from measured runs.

    Attributes:
        rows: how many runs they were compared with; 0: the rates are those of data sheets, and the
            efficiencies those of `kin`.
        spread: the standard deviation of log(measured / predicted), each of runs of model sizes
            that the fit had not seen.
        software: of these runs.
        kin: the machine that efficiencies were taken from.
    """

    rows: int
    spread: float
    software: str
    kin: str = ""


@dataclass(frozen=True)
class Hardware:
    """A cluster of one kind of GPU; `hardware` reads it.

    Attributes:
        name: of the GPU.
        peak_flops: floating-point operations per second by dtype, without sparsity.
        matmul: what products reach of it.
        attention: what fused attention kernels reach of it, by phase: "forward" and "backward".
        memory: of a GPU.
        domain: GPUs that NVLink connects.
        network: what connects domains.
        host: the processor.
        kernel_seconds: between two kernels of a GPU, and at the start of each.
        jitter: the standard deviation of a GPU's time, relative to the mean, over GPUs: the slowest
            of many sets the pace.
        power_watts: of a GPU with its share of the machine.
        calibration: against runs.
    """

    name: str
    peak_flops: Mapping[str, float]
    matmul: MatmulRate
    attention: Mapping[str, float]
    memory: MemoryRates
    domain: Domain
    network: Network
    host: HostProcessor
    kernel_seconds: float
    jitter: float
    power_watts: float
    calibration: Calibration

    def __hash__(self) -> int:
        return hash((self.name, self.matmul, self.memory, self.domain, self.network))

    @property
    def memory_bytes(self) -> int:
        """The memory of a GPU that programs can have."""
        return self.memory.num_bytes

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of products in `dtype`; of one that the machine does not name, of float32."""
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        found = self.peak_flops.get(name, self.peak_flops.get("float32"))
        return max(self.peak_flops.values()) if found is None else found

    def matmul_seconds(
        self, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> float:
        """The seconds of ``batch`` products ``[m, k] x [k, n]``, without the launch."""
        if not m * n * k * batch:
            return 0.0
        rate = self.peak(dtype) * self.matmul.utilisation(m, n, k, batch)
        moved = batch * (m * k + k * n + m * n) * dtype.itemsize
        return max(2 * batch * m * n * k / rate, self.memory_seconds(moved))

    def memory_seconds(self, num_bytes: float) -> float:
        """The seconds in which a kernel reads and writes so many bytes, without the launch."""
        return num_bytes / (self.memory.bytes_per_second * self.memory.efficiency)

    def collective_seconds(self, op: str, payload_bytes: float, reach: GroupReach) -> float:
        """The seconds of one collective, with nothing else on the wire.

        Args:
            op: ``"psum"``, ``"all_gather"`` and so on, as in `functron.lax`.
            payload_bytes: of the operand on each rank; of an all_gather, of the result.
            reach: where the ranks are.
        """
        g, near, far = reach.size, reach.per_domain, reach.num_domains
        if g == 1:
            return 0.0
        inside, inner_step = _find_link_rate(self.domain, op)
        outside, outer_step = _find_link_rate(self.network, op)
        if reach.span > self.network.pod_gpus:
            outside /= self.network.oversubscription
        steps = count_steps(op, near) * inner_step + count_steps(op, far) * outer_step
        if op in ("all_to_all", "ragged_all_to_all"):
            within, across = (near - 1) / g, (g - near) / g
            return steps + payload_bytes * max(within / inside, across / outside)
        if op == "ppermute":
            return steps + payload_bytes / (outside if far > 1 else inside)
        sent = payload_bytes * (g - 1) / g * (2 if op in _REDUCED else 1)
        return steps + sent / (min(inside, near * outside) if far > 1 else inside)

    def to_toml(self) -> str:
        """The file that `hardware` reads this machine from."""
        return tomli_w.dumps(_plain(self))


_REDUCED = frozenset({"psum", "pmax", "pmin"})
_LIKE = MappingProxyType({"pmax": "psum", "pmin": "psum", "ragged_all_to_all": "all_to_all"})
"""Collectives that take the time of another one."""


def _find_link_rate(links: Domain | Network, op: str) -> tuple[float, float]:
    """The bytes per second that a collective reaches, and the latency of one of its steps."""
    own = links.measured.get(_LIKE.get(op, op))
    if own is None:
        return links.bytes_per_second * links.efficiency, links.latency_seconds
    return own["bytes_per_second"], own["latency_seconds"]


def count_steps(op: str, n: int) -> float:
    """How many steps follow one another in a collective of n.

    NCCL's: trees for all-reduces where rings would take more, rings for gathers and scatters.
    """
    if n == 1:
        return 0.0
    if op in _REDUCED:
        return 2 * min(n - 1, math.log2(n))
    if op == "pbroadcast":
        return math.log2(n)
    return n - 1 if op in ("all_gather", "psum_scatter") else 1


# --- where ranks are


@dataclass(frozen=True)
class GroupReach:
    """Where the ranks of a group are.

    Attributes:
        size: how many there are.
        per_domain: how many of them share a domain of NVLink.
        span: from the first to the last, in GPUs: how far apart they are.
    """

    size: int
    per_domain: int
    span: int

    @property
    def num_domains(self) -> int:
        """In how many domains the group is."""
        return -(-self.size // self.per_domain)


@dataclass(frozen=True)
class RankPlacement:
    """Ranks on GPUs: in the order of the mesh, its last axis fastest, so many to a domain.

    Attributes:
        mesh: of all ranks.
        gpus_per_domain: GPUs that NVLink connects, or as many of them as a job has.
    """

    mesh: Mesh
    gpus_per_domain: int

    @staticmethod
    def on(mesh: Mesh, machine: Hardware) -> RankPlacement:
        """The ranks of `mesh` on whole domains of a machine."""
        return RankPlacement(mesh, machine.domain.gpus)

    def reach(self, axes: str | tuple[str, ...]) -> GroupReach:
        """Where the ranks are that share all coordinates but those of `axes`.

        Groups of a placement can differ where domains do not divide; this is the one of rank 0.
        """
        names = (axes,) if isinstance(axes, str) else axes
        ranks, stride = [0], 1
        for name, size in reversed(self.mesh.axes):
            if name in names:
                ranks = [rank + stride * i for i in range(size) for rank in ranks]
            stride *= size
        first = sum(rank < self.gpus_per_domain for rank in ranks)
        return GroupReach(len(ranks), first, max(ranks) + 1)

    def inside(self, axes: str | tuple[str, ...]) -> bool:
        """Whether groups over `axes` stay in one domain."""
        reach = self.reach(axes)
        return reach.size == reach.per_domain


# --- files

_HELP = (
    "write one: start from Hardware.to_toml() of a machine that is known, or measure this one with "
    "functron doctor"
)


@public
def hardware(name: str | Path) -> Hardware:
    """A machine: one of `MACHINES` by name, or of a TOML file.

    Raises:
        ValueError: there is no such machine or file (the nearest names are said), or the file has
            entries that are missing, unknown or of another kind; all of them are listed.
    """
    text = str(name)
    if text.lower() in MACHINES:
        return _read(_FOLDER / f"{text.lower()}.toml")
    path = Path(name)
    if not path.is_file():
        fix = f"{nearest(text.lower(), MACHINES)}; for another machine {_HELP}"
        refuse("cannot plan for this hardware", "hardware", repr(text), "a known machine", fix)
    return _read(path)


def find_hardware(device: str) -> Hardware:
    """The machine with this device: ``"cpu"``, or a GPU by the name that its driver gives it.

    Raises:
        ValueError: none of `MACHINES` has it.
    """
    if not is_known(device):
        fix = f"name one of {', '.join(MACHINES)}; for another {_HELP}"
        refuse("cannot plan for this hardware", "device", device, "a known GPU", fix)
    return hardware(_find_name(device))


def is_known(device: str) -> bool:
    """Whether one of `MACHINES` has this device, as `find_hardware` looks for it."""
    return bool(_find_name(device))


def _find_name(device: str) -> str:
    """The name of the machine with a device, or nothing."""
    if device == "cpu":
        return device
    given = device.upper()
    if "PCIE" in given:  # machines are those of NVLink, and of its power limits
        return ""
    known = (name for name in MACHINES if name != "cpu" and name.upper() in given)
    return max(known, key=len, default="")


def _read(path: Path) -> Hardware:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"cannot read the machine {path}", str(path), error, "a file of TOML", _HELP)
    problems: list[Problem] = []
    made = _make_dataclass(Hardware, found, "", problems)
    raise_problems(f"{path} describes no machine", problems or _limits(made))
    return made


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _make_dataclass(kind: type, found: Any, path: str, problems: list[Problem]) -> Any:
    """A dataclass of the entries of a table, and what is wrong with them."""
    if not isinstance(found, dict):
        problems.append(Problem(path or "file", repr(found), "a table"))
        return None
    known, hints = {f.name: f for f in fields(kind)}, _hints(kind)
    for name in found.keys() - known.keys():
        problems.append(Problem(path + name, "an entry", "a known one", nearest(name, known)))
    given = {}
    for name, each in known.items():
        if name in found:
            given[name] = _value(hints[name], found[name], path + name, problems)
        elif each.default is each.default_factory is dataclasses.MISSING:
            problems.append(Problem(path + name, "nothing", "a value", "add it"))
    return None if problems else kind(**given)


def _value(kind: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    if dataclasses.is_dataclass(kind):
        return _make_dataclass(kind, value, f"{path}.", problems)  # type: ignore[arg-type]  # a class
    numbers = (int, float)
    if kind in (str, bool):
        fits, wanted = isinstance(value, kind), "a text" if kind is str else "true or false"
    elif kind in numbers:
        fits, wanted = _is_positive(value), "a number of at least 0"
    elif path == "matmul.tiles":
        fits = isinstance(value, list) and bool(value) and all(map(_is_tile, value))
        value, wanted = tuple(map(tuple, value)) if fits else value, "[[rows, columns, part], ...]"
    elif path.endswith(".measured"):
        fits = isinstance(value, dict) and all(map(_link, value.values()))
        value = MappingProxyType(value) if fits else value
        wanted = f"tables by collective of {' and '.join(_LINK)}"
    else:
        fits = isinstance(value, dict) and bool(value) and all(map(_is_positive, value.values()))
        value, wanted = MappingProxyType(value) if fits else value, "numbers by name"
    if not fits:
        problems.append(Problem(path, repr(value), wanted))
    return value


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_tile(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_is_positive(x) and x for x in value)


_LINK = ("bytes_per_second", "latency_seconds")


def _link(value: Any) -> bool:
    fits = (
        isinstance(value, dict) and {*value} == {*_LINK} and all(map(_is_positive, value.values()))
    )
    return fits and value["bytes_per_second"] > 0


def _limits(machine: Hardware) -> list[Problem]:
    """Rates of 0, which would take for ever, and efficiencies above 1."""
    found = []
    for part in ("matmul", "memory", "domain", "network", "host"):
        for name, value in vars(getattr(machine, part)).items():
            free = name.endswith("seconds") or name in ("overhead_k", "computes")
            zero = value == 0 and not free
            if zero or (name == "efficiency" and value > 1):
                wanted = "above 0" + " and at most 1" * (name == "efficiency")
                found.append(Problem(f"{part}.{name}", str(value), wanted))
    found += [
        Problem(f"attention.{phase}", "nothing", "a part of the peak", "add it")
        for phase in ("forward", "backward")
        if not machine.attention.get(phase)
    ]
    return found


def _plain(value: Any) -> Any:
    """A dataclass, or a part of it, as TOML has it."""
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value
