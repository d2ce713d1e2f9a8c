"""Machines as data: rates of a GPU, its links and network, and the seconds of operations on them.

A machine is a TOML file: `hardware` reads functron's own (`MACHINES`) and those of users, which
`functron doctor` writes. All numbers are properties of the machine, none of a model.

* **Matrix products** (`MatmulRate`): tiles of the result are computed in parallel, one per
  multiprocessor, wave after wave. Incomplete waves and tiles take as long as complete ones. A tile
  of ``m x n`` over ``k`` takes ``2 m n (k + k0) / rate``, at the rate of large products. The
  fastest of the machine's tiles counts, also with split-K; memory bandwidth is a lower bound.
* **Collectives** by ring algorithms: the bytes that a rank sends (`functron.program.cost.Traffic`)
  over the slowest link of the ring, and a latency per step. A ring leaves an NVLink domain through
  the network adapters of all its GPUs.
* **Placement**: ranks are on GPUs in the order of the mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

import tomli_w
import torch

from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.spmd import Mesh

_FOLDER = Path(__file__).parent / "machine_files"
MACHINES: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of functron's own machines."""


@dataclass(frozen=True)
class MatmulRate:
    """The fraction of the peak that matrix products reach, by their shapes.

    Attributes:
        efficiency: fraction of the peak that large products with complete tiles and waves reach,
            by the clock under the power limit and the kernels' losses.
        units: multiprocessors, each of which computes one tile at a time.
        tiles: rows and columns of the kernels' tiles, and the fraction of `efficiency` that each
            reaches.
        overhead_k: the time of a tile's prologue and epilogue, in units of its inner dim.
    """

    efficiency: float
    units: int
    tiles: tuple[tuple[int, int, float], ...]
    overhead_k: float

    def utilisation(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """The fraction of the peak of ``batch`` products ``[m, k] x [k, n]``, memory aside."""
        best = math.inf
        for rows, columns, share in self.tiles:
            count = batch * -(-m // rows) * -(-n // columns)
            for slices in (1, 2, 4, 8):
                waves = -(-count * slices // self.units)
                inner = k / slices + self.overhead_k
                best = min(best, waves * self.units * rows * columns * inner / share)
        return self.efficiency * batch * m * n * k / best


@dataclass(frozen=True)
class Links:
    """Links between GPUs.

    Attributes:
        bytes_per_second: per GPU and direction, by the data sheet.
        efficiency: the fraction of it that collectives reach.
        latency_seconds: of one step of a collective.
        measured: by collective, if it was measured: its own ``bytes_per_second``, efficiency
            included, and ``latency_seconds``.
    """

    bytes_per_second: float
    efficiency: float
    latency_seconds: float
    measured: Mapping[str, Mapping[str, float]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False, kw_only=True
    )

    def rate(self, op: str) -> tuple[float, float]:
        """Bytes per second that a collective reaches, and the latency of one of its steps."""
        own = self.measured.get(_LIKE.get(op, op))
        if own is None:
            return self.bytes_per_second * self.efficiency, self.latency_seconds
        return own["bytes_per_second"], own["latency_seconds"]


@dataclass(frozen=True)
class Domain(Links):
    """GPUs that NVLink connects.

    Attributes:
        gpus: number of GPUs.
    """

    gpus: int


@dataclass(frozen=True)
class Network(Links):
    """The network between domains.

    Attributes:
        pod_gpus: GPUs within which the network has full bandwidth, below a fat tree's
            oversubscribed level.
        oversubscription: the factor by which bandwidth is smaller across pods.
    """

    pod_gpus: int
    oversubscription: float


@dataclass(frozen=True)
class MemoryRates:
    """The memory of one GPU.

    Attributes:
        num_bytes: capacity that programs can use.
        bytes_per_second: of reads and writes, by the data sheet.
        efficiency: the fraction of it that fused elementwise kernels reach.
    """

    num_bytes: int
    bytes_per_second: float
    efficiency: float


@dataclass(frozen=True)
class HostProcessor:
    """The CPU that drives a GPU.

    Attributes:
        bytes_per_second: to or from the GPU's memory, per direction.
        launch_seconds: to launch one kernel.
        step_seconds: per step in which the GPU waits for it: data, logs, norms that are read.
        computes: ranks are CPUs: computation and communication cannot overlap.
    """

    bytes_per_second: float
    launch_seconds: float
    step_seconds: float
    computes: bool = False


@dataclass(frozen=True)
class Calibration:
    """The error of predictions on a machine, by measured runs.

    Attributes:
        rows: number of these runs; 0: rates are from data sheets, and efficiencies from `kin`.
        spread: standard deviation of log(measured / predicted), over runs of model sizes that were
            held out of the fit.
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
        peak_flops: FLOP/s by dtype, without sparsity.
        matmul: the fraction of it that matrix products reach.
        attention: the fraction that fused attention reaches in long sequences, by "forward" and
            "backward"; "half_tokens", the length at which it reaches half of that, and "narrow",
            what heads of at most 64 reach of it, where these are known. Other kernels' entries
            begin with their names: "fa2_forward".
        memory: of a GPU.
        domain: GPUs that NVLink connects.
        network: between domains.
        host: the CPU.
        kernel_seconds: overhead of each kernel on the GPU.
        jitter: standard deviation of a GPU's time over GPUs, relative to the mean.
        power_watts: of a GPU and its share of the machine.
        calibration: by measured runs.
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
        """FLOP/s of products in `dtype`; for one that the machine does not list, of float32."""
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        found = self.peak_flops.get(name, self.peak_flops.get("float32"))
        return max(self.peak_flops.values()) if found is None else found

    def computing(self, float32_matmul: str) -> Hardware:
        """This machine with float32 products as `torch.set_float32_matmul_precision` names them."""
        if float32_matmul == "highest" or "tf32" not in self.peak_flops:
            return self
        peaks = {**self.peak_flops, "float32": self.peak_flops["tf32"]}
        return dataclasses.replace(self, peak_flops=peaks)

    def matmul_seconds(
        self, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> float:
        """The seconds of ``batch`` products ``[m, k] x [k, n]``, without the launch."""
        if not m * n * k * batch:
            return 0.0
        rate = self.peak(dtype) * self.matmul.utilisation(m, n, k, batch)
        moved = batch * (m * k + k * n + m * n) * dtype.itemsize
        return max(2 * batch * m * n * k / rate, self.memory_seconds(moved))

    def attention_share(self, phase: str, tokens: int = 0, head_dim: int = 0) -> float:
        """The fraction of the peak that fused attention reaches, by length and size of heads.

        Args:
            phase: "forward" or "backward".
            tokens: of the keys; 0: as of long sequences.
            head_dim: 0: as of 128.
        """
        rates = self.attention
        share = rates[phase]
        if tokens:
            share *= tokens / (tokens + rates.get("half_tokens", 0.0))
        return share * (rates.get("narrow", 1.0) if 0 < head_dim <= 64 else 1.0)

    def memory_seconds(self, num_bytes: float) -> float:
        """The seconds of a kernel that reads and writes so many bytes, without the launch."""
        return num_bytes / (self.memory.bytes_per_second * self.memory.efficiency)

    def collective_seconds(self, op: str, payload_bytes: float, reach: GroupReach) -> float:
        """The seconds of one collective, without other traffic.

        Args:
            op: ``"psum"``, ``"all_gather"`` and so on, as in `functron.lax`.
            payload_bytes: of the operand on each rank; for all_gather, of the result.
            reach: where the ranks are.
        """
        g, near, far = reach.size, reach.per_domain, reach.num_domains
        if g == 1:
            return 0.0
        inside, inner_step = self.domain.rate(op)
        outside, outer_step = self.network.rate(op)
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
        """The contents of a file that `hardware` reads this machine from."""
        return tomli_w.dumps(to_tables(self))


_REDUCED = frozenset({"psum", "pmax", "pmin"})
_LIKE = MappingProxyType({"pmax": "psum", "pmin": "psum", "ragged_all_to_all": "all_to_all"})
"""Collectives that take as long as another one."""


def count_steps(op: str, n: int) -> float:
    """The number of consecutive steps of a collective of n ranks.

    As in NCCL: trees for all-reduces where rings would take more, rings for gathers and scatters.
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
    """The placement of a group of ranks.

    Attributes:
        size: number of ranks.
        per_domain: ranks that share an NVLink domain; where that differs, the fewest, whose
            network adapters are what the group has between domains.
        span: GPUs from the first rank to the last.
        num_domains: that the group is in; 0: as many as `per_domain` says.
    """

    size: int
    per_domain: int
    span: int
    num_domains: int = 0

    def __post_init__(self):
        if not self.num_domains:
            object.__setattr__(self, "num_domains", -(-self.size // self.per_domain))

    def pair(self) -> GroupReach:
        """Two ranks of the group, in two domains if the group is in several."""
        return GroupReach(2, 1 if self.num_domains > 1 else 2, self.span)


@dataclass(frozen=True)
class RankPlacement:
    """Ranks on GPUs, in the order of the mesh, its last axis fastest.

    Attributes:
        mesh: of all ranks.
        gpus_per_domain: the job's GPUs in an NVLink domain.
    """

    mesh: Mesh
    gpus_per_domain: int

    @staticmethod
    def on(mesh: Mesh, machine: Hardware) -> RankPlacement:
        """The ranks of `mesh` on domains of a machine.

        A job leaves up to an eighth of each domain's GPUs idle if groups of ranks are then on as
        few domains as can be: 64 of 72 GPUs for ``tp=8`` and eight of the next axis.
        """
        gpus, used = machine.domain.gpus, 1
        for _, size in reversed(mesh.axes):
            part = max(n for n in range(1, size + 1) if size % n == 0 and used * n <= gpus)
            used *= part
            if part < size:
                break
        idle = mesh.size > gpus and used < gpus and _MOST_IDLE * gpus >= gpus - used
        return RankPlacement(mesh, used if idle else gpus)

    def reach(self, axes: str | tuple[str, ...]) -> GroupReach:
        """The placement of a group over `axes`, the worst one where domains cut them unevenly."""
        return _find_reach(self, (axes,) if isinstance(axes, str) else tuple(axes))


_MOST_IDLE = 1 / 8


@functools.lru_cache(maxsize=16384)
def _find_reach(placement: RankPlacement, axes: tuple[str, ...]) -> GroupReach:
    per, inside, firsts, stride = placement.gpus_per_domain, [0], [0], 1
    for name, size in reversed(placement.mesh.axes):
        if name in axes:
            inside = [rank + stride * i for i in range(size) for rank in inside]
        else:  # groups that begin at the same place of a domain are cut alike
            firsts = sorted({(first + stride * i) % per for i in range(size) for first in firsts})
        stride *= size
    shares = [Counter((first + rank) // per for rank in inside) for first in firsts]
    fewest = min(min(share.values()) for share in shares)
    return GroupReach(len(inside), fewest, max(inside) + 1, max(map(len, shares)))


# --- files

_HELP = (
    "write one, starting from Hardware.to_toml() of a known machine, or measure this one with "
    "functron doctor"
)


@public
def hardware(name: str | Path) -> Hardware:
    """A machine: one of `MACHINES` by name, or of a TOML file.

    Raises:
        ValueError: there is no such machine or file, or the file has entries that are missing,
            unknown or of another kind; all of them are listed.
    """
    text = str(name)
    if text.lower() in MACHINES:
        return _read_file(_FOLDER / f"{text.lower()}.toml")
    path = Path(name)
    if "," in text and not path.is_file():
        wanted = "one kind of GPU, of which an estimate has the rates"
        fix = "plan for the slowest kind alone, which others wait for, or for each kind by itself"
        refuse("cannot plan for this hardware", "hardware", repr(text), wanted, fix)
    if not path.is_file():
        fix = f"{nearest(text.lower(), MACHINES)}; for another machine {_HELP}"
        refuse("cannot plan for this hardware", "hardware", repr(text), "a known machine", fix)
    return _read_file(path)


_NODES = re.compile(r"([1-9]\d*)x([1-9]\d*)")


@public
def divide_nodes(nodes: str, machine: Hardware) -> tuple[int, Hardware]:
    """The GPUs of nodes such as ``"8x8"``, and the machine with domains of a node's GPUs.

    >>> gpus, machine = ft.plan.divide_nodes("8x4", ft.plan.hardware("h100"))
    >>> gpus, machine.domain.gpus
    (32, 4)

    Args:
        nodes: their number, and the GPUs of each, which NVLink connects.
        machine: whose domains have as many GPUs or more.

    Raises:
        ValueError: nodes of several sizes, of more GPUs than NVLink connects, or of none.
    """
    title, wanted = "cannot plan for these nodes", "nodes x GPUs of each, such as 8x8"
    found = [_NODES.fullmatch(part.strip().lower()) for part in nodes.split(",")]
    counts = [(int(each[1]), int(each[2])) for each in found if each]
    if len(counts) < len(found):
        refuse(title, "nodes", repr(nodes), wanted)
    if len(counts) > 1:
        least = min(gpus for _, gpus in counts)
        fewer = sum(count * (gpus // least) for count, gpus in counts)
        fix = f"plan for groups that fit into each: {fewer}x{least}"
        refuse(title, "nodes", repr(nodes), "nodes of one size", fix)
    (count, gpus), most = counts[0], machine.domain.gpus
    if gpus > most:
        fix = f"{count * gpus // math.gcd(gpus, most)}x{math.gcd(gpus, most)}, or {_HELP}"
        refuse(title, "nodes", repr(nodes), f"at most the {most} GPUs that NVLink connects", fix)
    return count * gpus, dataclasses.replace(
        machine, domain=dataclasses.replace(machine.domain, gpus=gpus)
    )


def find_hardware(device: str) -> Hardware:
    """The machine with a device: ``"cpu"``, or a GPU by its driver's name for it.

    Raises:
        ValueError: none of `MACHINES` has it.
    """
    if not is_known(device):
        fix = f"name one of {', '.join(MACHINES)}; for another {_HELP}"
        refuse("cannot plan for this hardware", "device", device, "a known GPU", fix)
    return hardware(_find_name(device))


def is_known(device: str) -> bool:
    """Whether `find_hardware` finds a machine with this device."""
    return bool(_find_name(device))


def _find_name(device: str) -> str:
    """The name of the machine with a device; empty: there is none."""
    if device == "cpu":
        return device
    given = device.upper()
    if "PCIE" in given:  # which has no NVLink, and a lower power limit
        return ""
    known = (name for name in MACHINES if name != "cpu" and name.upper() in given)
    return max(known, key=len, default="")


def _read_file(path: Path) -> Hardware:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"cannot read the machine {path}", str(path), error, "a file of TOML", _HELP)
    problems: list[Problem] = []
    made = read_dataclass(Hardware, found, problems)
    raise_problems(f"{path} describes no machine", problems or _find_limits(made))
    return made


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def read_dataclass(kind: type, found: Any, problems: list[Problem], path: str = "") -> Any:
    """A dataclass from the tables of a TOML or JSON file; numbers must be at least 0.

    Args:
        kind: its fields are texts, numbers, dataclasses, and tuples and mappings of these.
        problems: entries that are missing, unknown or of another kind are added to these, and the
            result is then undefined.
        path: of the table, ending in a dot; empty: the whole file.
    """
    if not isinstance(found, dict):
        problems.append(Problem(path.rstrip(".") or "file", f"{found!r:.60}", "a table"))
        return None
    known, hints = {f.name: f for f in fields(kind)}, _hints(kind)
    for name in found.keys() - known.keys():
        problems.append(Problem(path + name, "an entry", "a known one", nearest(name, known)))
    given = {}
    for name, each in known.items():
        if name in found:
            given[name] = _read_value(hints[name], found[name], path + name, problems)
        elif each.default is each.default_factory is dataclasses.MISSING:
            problems.append(Problem(path + name, "nothing", "a value", "add it"))
    return None if problems else kind(**given)


def _read_value(hint: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return read_dataclass(hint, value, problems, f"{path}.")
    origin, inside = get_origin(hint), get_args(hint)
    if origin is tuple:
        several = inside[-1] is ...
        if isinstance(value, list) and (several or len(value) == len(inside)):
            kinds = itertools.repeat(inside[0]) if several else inside
            rows = enumerate(zip(kinds, value, strict=False))
            return tuple(_read_value(h, x, f"{path}[{i}]", problems) for i, (h, x) in rows)
        wanted = "a list" if several else f"a list of {len(inside)}"
    elif origin is Mapping:
        if isinstance(value, dict):
            rows = value.items()
            made = {key: _read_value(inside[1], x, f"{path}.{key}", problems) for key, x in rows}
            return MappingProxyType(made)
        wanted = "a table"
    elif hint in (str, bool):
        if isinstance(value, hint):
            return value
        wanted = "a text" if hint is str else "true or false"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 <= value < math.inf and value == hint(value):
            return hint(value)
        wanted = f"a {'whole ' if hint is int else ''}number of at least 0"
    problems.append(Problem(path, f"{value!r:.60}", wanted))
    return None


_LINK = {"bytes_per_second", "latency_seconds"}


def _find_limits(machine: Hardware) -> list[Problem]:
    """Rates of 0, efficiencies above 1, and tables that lack entries."""
    found = []
    for part in ("matmul", "memory", "domain", "network", "host"):
        for name, value in vars(getattr(machine, part)).items():
            free = name.endswith("seconds") or name in ("overhead_k", "computes", "measured")
            zero = not value and not free
            if zero or (name == "efficiency" and value > 1):
                wanted = "above 0" + " and at most 1" * (name == "efficiency")
                found.append(Problem(f"{part}.{name}", str(value), wanted))
    if not all(map(all, machine.matmul.tiles)):
        found.append(Problem("matmul.tiles", str(machine.matmul.tiles), "numbers above 0"))
    for part, links in (("domain", machine.domain), ("network", machine.network)):
        for op, own in links.measured.items():
            if own.keys() != _LINK or not own["bytes_per_second"]:
                wanted = f"{' and '.join(sorted(_LINK))}, the former above 0"
                found.append(Problem(f"{part}.measured.{op}", str(dict(own)), wanted))
    found += [
        Problem(f"attention.{phase}", "nothing", "a fraction of the peak", "add it")
        for phase in ("forward", "backward")
        if not machine.attention.get(phase)
    ]
    found += [] if machine.peak_flops else [Problem("peak_flops", "nothing", "FLOP/s by dtype")]
    return found


def write_whole(path: Path, text: str) -> None:
    """Write a file, which has its old or its new content at any time."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(f"{text}\n", encoding="utf-8")
    unfinished.replace(path)


def to_tables(value: Any) -> Any:
    """A dataclass as the tables of a file: the inverse of `read_dataclass`."""
    if dataclasses.is_dataclass(value):
        return {each.name: to_tables(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_tables(x) for name, x in value.items()}
    return [to_tables(x) for x in value] if isinstance(value, tuple) else value
