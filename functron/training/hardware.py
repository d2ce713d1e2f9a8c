"""Rates of machines: of products, memory and disks on each rank, and of collectives on each axis.

`measure` finds them before a run, names what is slower than the rest, and what it returns is kept
as JSON, and as the file of a machine that `functron.plan` plans for. Data sheets have the rates of
the products of some GPUs, which are the 100% of MFU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from functron.core import random, tree
from functron.core.chart import line_chart, table
from functron.core.errors import Problem, raise_problems, refuse
from functron.models import gpt
from functron.plan.hardware import (
    Domain,
    Hardware,
    Network,
    Placement,
    hardware_of,
    is_known,
    num_steps,
)
from functron.plan.rates import FUNCTRON, program_times
from functron.program.trace import trace
from functron.spmd import BoundMesh, Mesh, P, shard_map
from functron.spmd import collectives as lax
from functron.spmd.params import init_params
from functron.transforms import value_and_grad

_PEAKS: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {  # by a part of the driver's name: bfloat16, float32, float64
        "H100 PCIe": (756e12, 51e12, 51e12),
        "L40S": (362e12, 91.6e12, 1.4e12),
        "L4": (121e12, 30.3e12, 0.5e12),
        "A10G": (70e12, 35e12, 0.5e12),
        "RTX 4090": (165e12, 82.6e12, 1.3e12),
        "RTX 3090": (71e12, 35.6e12, 0.6e12),
    }
)
"""FLOP/s of GPUs that `functron.plan` has no machine of, from the vendor's data sheets.

Dense tensor-core rates without sparsity, and the float32 and float64 rates that torch uses by
default (no TF32)."""


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The FLOP/s that count as 100% of a device for products of `dtype`.

    For GPUs of `functron.plan.MACHINES` and a few others the data sheet's rate. For a CPU, whose
    rate depends on its clock and on the threads this process has, and for any other GPU, what a
    large matrix product reaches here (`measured_flops`).
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = max((part for part in _PEAKS if part in name), key=len, default="")
        if found:
            bf16, fp32, fp64 = _PEAKS[found]
            return {torch.float32: fp32, torch.float64: fp64}.get(dtype, bf16)
        if is_known(name):
            return hardware_of(name).peak(dtype)
    return measured_flops(device, dtype)


_ENOUGH_SECONDS = 0.001


def measured_flops(
    device: torch.device | str,
    dtype: torch.dtype,
    size: int = 1024,
    *,
    together: Callable[[], None] | None = None,
) -> float:
    """The rate of the fastest of five products of square matrices, in FLOP/s.

    The matrices have 128 rows, 256 and so on, up to `size`, until a product takes a millisecond,
    beside which what the clock misses and the start of threads are small. Takes some 0.03 seconds
    on a CPU.

    Args:
        device: that computes them.
        dtype: of the matrices.
        size: of the largest matrices.
        together: waits for all ranks. Then it is the rate of half a second of products of the
            largest size: what a processor keeps up that ranks share, or that its power limits.
    """
    device = torch.device(device)
    rows = min(size, 128) if together is None else size
    while True:
        a = torch.ones(rows, rows, dtype=dtype, device=device)
        seconds = _taken(functools.partial(torch.mm, a, a), device, together)
        if seconds > _ENOUGH_SECONDS or rows == size:
            return 2 * rows**3 / seconds
        rows = min(2 * rows, size)


def measured_bandwidth(
    device: torch.device | str, *, together: Callable[[], None] | None = None
) -> float:
    """The bytes per second that copies on a device read and write together.

    Of the fastest of five, or of half a second, as of `measured_flops`.
    """
    device = torch.device(device)
    a = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    b = torch.ones_like(a)
    return 2 * len(a) / _taken(lambda: b.copy_(a), device, together)


def measured_operations(
    device: torch.device | str, *, together: Callable[[], None] | None = None
) -> float:
    """The kernels per second that a step without a compiler launches, one after another.

    Those of the gradients of a tiny model, counted as `functron.plan` counts them; views, and what
    Python does in between, are in their time. Of the fastest of five steps, or of half a second,
    as of `measured_flops`.
    """
    device = torch.device(device)
    model = gpt.GPTConfig(
        vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, vocab_multiple=64
    )
    ones = torch.ones(2, 8, dtype=torch.int64, device=device)
    batch = {"tokens": ones, "targets": ones, "rows": ones[:, 0]}

    def grads(params: tree.Tree, batch: dict[str, torch.Tensor]) -> tree.Tree:
        return value_and_grad(lambda p: gpt.loss(model, p, batch))(params)[1]

    step = shard_map(grads, Mesh(), (P(), P()), P())
    params = init_params(random.key(0, device=device), gpt.defs(model))
    alone = replace(FUNCTRON, fusion="none", sums_in_products=False, overlap=False)
    base = hardware_of("cpu")
    program = trace(step)(params, batch)
    kernels = program_times(program, base, Placement.on(Mesh(), base), alone).kernels
    step(params, batch)
    return kernels / _taken(lambda: step(params, batch), device, together)


def peak_memory_bytes(device: torch.device | str) -> int:
    """The most memory used so far: torch's allocations on a GPU, the resident process on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # unlike ru_maxrss, VmHWM does not start from what the parent process had used
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def free_memory_bytes(device: torch.device | str) -> int:
    """The memory that a process could still take: of a GPU, or of the machine without swapping."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    about = Path("/proc/meminfo")
    if about.exists():
        fields = dict(line.split(":", 1) for line in about.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_LASTING_SECONDS = 0.5


def _taken(
    call: Callable[[], object], device: torch.device, together: Callable[[], None] | None
) -> float:
    """The seconds of the fastest of five calls, or the mean of half a second of them together."""
    if together is None:
        return min(_seconds(call, device, _REPEATS))
    _seconds(call, device, 1)  # what is only there once
    together()
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < _LASTING_SECONDS or not count:
        count += 1
        call()
        _synchronize(device)
    return passed / count


def _seconds(
    call: Callable[[], object],
    device: torch.device,
    count: int,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """The seconds of each of `count` calls, `before` which something else is waited for."""
    found = []
    for _ in range(count):
        if before is not None:
            before()
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return found


# --- what is kept


@dataclass(frozen=True)
class Rank:
    """The rates of one rank, measured while all ranks were measuring theirs.

    Attributes:
        rank: its number.
        host: the name of its machine.
        device: the name of its GPU, or "cpu".
        rates: by name: ``"float32 matmul"`` and so on in FLOP/s; ``"memory"`` (copies on the
            device, read and written), ``"to device"``, ``"from device"`` (a GPU's, pinned),
            ``"disk write"`` (to the medium) and ``"disk read"`` in bytes/s; of a CPU
            ``"operations"`` per second (`measured_operations`).
    """

    rank: int
    host: str
    device: str
    rates: Mapping[str, float]


@dataclass(frozen=True)
class Link:
    """The times of one collective over one axis.

    Attributes:
        axis: the mesh axis.
        op: "psum", "all_gather", "psum_scatter", "all_to_all" or "ppermute" (to the next rank).
        groups: the ranks that communicate with each other, each group over this axis.
        bytes: the sizes that were measured: of the operand of psum, psum_scatter, all_to_all and
            ppermute, of the result of all_gather.
        seconds: of each group, for each size: the median of the group's slowest rank.
    """

    axis: str
    op: str
    groups: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @property
    def latency_seconds(self) -> float:
        """The time of the smallest message, in the median group."""
        return statistics.median(row[0] for row in self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """The bytes a rank sends per second, of the largest message, in the median group.

        The bytes that a ring sends: of n ranks (n-1)/n of a message, of psum twice that, of
        ppermute all. As NCCL's tests count bus bandwidth.
        """
        return self.rate(-1)

    def rate(self, index: int) -> float:
        """`bytes_per_second` of the message `index`."""
        n = len(self.groups[0])
        share = {"psum": 2 * (n - 1) / n, "ppermute": 1.0}.get(self.op, (n - 1) / n)
        return share * self.bytes[index] / statistics.median(row[index] for row in self.seconds)


FORMAT = 1
SLOW = 0.8
"""A rank or group that reaches less than this part of the median is slow."""
_LEAST = 3  # of two one is always the slower one, and which is wrong cannot be told


@dataclass(frozen=True)
class Measurement:
    """The rates of the ranks of a mesh, and of the collectives among them.

    Attributes:
        mesh: axes and sizes, such as ``"dp=2,tp=4"``.
        ranks: in their order.
        links: by axis and operation; none for axes of size 1.
        versions: of torch and Python.
        time: when it was measured, Unix seconds.
    """

    mesh: str
    ranks: tuple[Rank, ...]
    links: tuple[Link, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0

    def save(self, path: str | Path) -> None:
        """Write it as JSON; the file has its old or its new content at any time."""
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @staticmethod
    def load(path: str | Path) -> Measurement:
        """The measurement that `save` wrote.

        Raises:
            ValueError: it is no such file; the first entry that is wrong is named.
        """
        title, fix = "cannot read the rates of machines", "functron doctor --mesh MESH writes it"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            got = getattr(error, "strerror", None) or str(error)
            refuse(title, str(path), got, "a file of JSON", fix)
        kind = found.get("format") if isinstance(found, dict) else None
        if kind != FORMAT:
            refuse(title, str(path), f"format {kind!r:.60}", f"format {FORMAT}", fix)
        try:
            made = Measurement(
                _text(found["mesh"]),
                tuple(_rank(row) for row in found["ranks"]),
                tuple(_link(row) for row in found["links"]),
                {_text(k): _text(v) for k, v in found["versions"].items()},
                _number(found["time"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            got = f"entries that are wrong ({type(error).__name__}: {error!s:.100})"
            refuse(title, str(path), got, "what functron doctor has written", fix)
        return made

    def slow(self) -> list[str]:
        """The ranks and groups that are slower than the rest of at least three, in words.

        Less than `SLOW` of the median: of the ranks with the same device, of the disks of hosts, of
        the groups of the same axis at the largest message.
        """
        return [*self._slow_ranks(), *self._slow_groups()]

    def _slow_ranks(self) -> Iterator[str]:
        for device in dict.fromkeys(one.device for one in self.ranks):
            alike = [one for one in self.ranks if one.device == device]
            for name in [x for x in alike[0].rates if x not in _DISK]:
                rates = {
                    f"rank {one.rank} on {one.host}": one.rates.get(name, 0.0) for one in alike
                }
                yield from _below(rates, name)
        for name in _DISK:  # ranks of a host share one
            hosts: dict[str, float] = {}
            for one in self.ranks:
                hosts[one.host] = hosts.get(one.host, 0.0) + one.rates.get(name, 0.0)
            yield from _below(hosts, name)

    def _slow_groups(self) -> Iterator[str]:
        hosts = {one.rank: one.host for one in self.ranks}
        for link in self.links:
            ends = [row[-1] for row in link.seconds]
            median = statistics.median(ends)
            for group, seconds in zip(link.groups, ends, strict=True):
                if len(ends) >= _LEAST and median < SLOW * seconds:
                    where = ", ".join(dict.fromkeys(hosts[rank] for rank in group))
                    share = f"{median / seconds:.2f} of the median of {len(ends)} groups"
                    yield (
                        f"ranks {', '.join(map(str, group))} on {where}: {link.op} over "
                        f"{link.axis} {share}"
                    )

    def machine(self) -> Hardware:
        """The measurements as a machine that `functron.plan` plans for: `Hardware.to_toml`.

        The machine that is known by its device, with the median rates of products, memory and
        host; of collectives in groups within one host for its domain, and across hosts for its
        network, of the largest message, and the latency of the smallest.

        Raises:
            ValueError: no machine is known with this GPU; what could not be measured is its own.
        """
        base = hardware_of(self.ranks[0].device)
        rates = {
            name: statistics.median(one.rates[name] for one in self.ranks if name in one.rates)
            for name in self.ranks[0].rates
        }
        hosts = [one.host for one in self.ranks]
        made = _with_rates(base, rates)
        domain = replace(made.domain, gpus=max(map(hosts.count, hosts)))
        domain, network = self._connections(domain, made.network)
        unseen = replace(base.calibration, rows=0, software="", kin="")
        measured = f"{base.name}, measured on {len({*hosts})} x {hosts.count(hosts[0])}"
        return replace(made, name=measured, domain=domain, network=network, calibration=unseen)

    def _connections(self, domain: Domain, network: Network) -> tuple[Domain, Network]:
        """Both with the rates of the links that were measured within them."""
        hosts = [one.host for one in self.ranks]
        near: dict[int, list[Link]] = {}
        for link in self.links:  # by how many ranks of a group share a host; 0: all
            shares = [hosts[rank] for rank in link.groups[0]]
            count = max(map(shares.count, shares))
            near.setdefault(0 if count == len(shares) else count, []).append(link)
        if inside := near.pop(0, []):
            domain = replace(domain, efficiency=1.0, **_rates_of(inside, 1))
        if near:
            count, outside = min(near.items())
            network = replace(network, efficiency=1.0, **_rates_of(outside, count))
        return domain, network

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for one in self.ranks for name in one.rates))
        head = ["rank", "host", "device", *names]
        rows = [
            [str(r.rank), r.host, r.device, *(_rate(name, r.rates.get(name)) for name in names)]
            for r in self.ranks
        ]
        lines = [table([head, *rows], left=3)]
        if self.links:
            about = [
                [
                    link.axis,
                    link.op,
                    str(len(link.groups)),
                    str(len(link.groups[0])),
                    f"{link.latency_seconds * 1e6:,.0f} us",
                    f"{link.bytes_per_second / 1e9:,.2f} GB/s",
                ]
                for link in self.links
            ]
            head = ["axis", "collective", "groups", "ranks", "smallest", "largest"]
            lines += ["", table([head, *about], left=2)]
        found = self.slow()
        return "\n".join(
            [*lines, "", *([f"slow: {text}" for text in found] or ["no rank is slow"])]
        )

    def picture(self) -> str:
        """The bytes that collectives send in a second over their sizes, as an SVG document."""
        curves = {
            f"{link.op} over {link.axis}": [
                (math.log2(size), link.rate(i) / 1e9) for i, size in enumerate(link.bytes)
            ]
            for link in self.links
        }
        (name, first), *others = curves.items() if curves else [("nothing", [(0.0, 0.0)])]
        return line_chart(
            [x for x, _ in first],
            [y for _, y in first],
            title=f"{name}, and others" if others else name,
            x_label="bytes of a message, as powers of 2",
            y_label="GB/s that a rank sends",
            others=dict(others),
        )


def _rates_of(links: Sequence[Link], share: int) -> dict[str, Any]:
    """The rates of these links, of which `share` ranks have one each, and their latencies.

    The medians of those of reductions, gathers and scatters, and the median of every operation.
    """
    rings = [link for link in links if link.op in ("psum", "all_gather", "psum_scatter")]
    ops = dict.fromkeys(link.op for link in links)
    measured = {op: _median([link for link in links if link.op == op], share) for op in ops}
    return {**_median(rings or links, share), "measured": MappingProxyType(measured)}


def _median(links: Sequence[Link], share: int) -> dict[str, float]:
    rate = statistics.median(link.bytes_per_second for link in links) / share
    steps = [link.latency_seconds / num_steps(link.op, len(link.groups[0])) for link in links]
    return {"bytes_per_second": rate, "latency_seconds": statistics.median(steps)}


def _with_rates(base: Hardware, rates: Mapping[str, float]) -> Hardware:
    """A machine with measured rates of products, memory and host in the place of its own."""
    peaks, matmul, kernel_seconds = dict(base.peak_flops), base.matmul, base.kernel_seconds
    found = {n: rates[f"{n} matmul"] for n in peaks if f"{n} matmul" in rates}
    if base.name == hardware_of("cpu").name:  # whose peak nobody knows
        peaks |= {name: rate / matmul.efficiency for name, rate in found.items()}
        if "operations" in rates:
            kernel_seconds = 1 / rates["operations"]
    elif "bfloat16" in found:
        size = _ROWS["cuda"]
        whole = matmul.utilisation(size, size, size) / matmul.efficiency
        matmul = replace(matmul, efficiency=min(1.0, found["bfloat16"] / peaks["bfloat16"] / whole))
    memory = base.memory
    if "memory" in rates:
        memory = replace(memory, bytes_per_second=rates["memory"] / memory.efficiency)
    sent = rates.get("to device", base.host.bytes_per_second)
    host = replace(base.host, bytes_per_second=sent)
    return replace(
        base, peak_flops=peaks, matmul=matmul, memory=memory, host=host,
        kernel_seconds=kernel_seconds,
    )  # fmt: skip


_DISK = ("disk write", "disk read")


def _below(rates: Mapping[str, float], name: str) -> Iterator[str]:
    """Those of at least three that are slower than the rest, in words."""
    median = statistics.median(rates.values()) if rates else 0.0
    for who, rate in rates.items():
        if len(rates) >= _LEAST and rate < SLOW * median:
            yield f"{who}: {name} {rate / median:.2f} of the median of {len(rates)}"


def _rate(name: str, rate: float | None) -> str:
    if rate is None:
        return ""
    if name == "operations":
        return f"{rate:,.0f} /s"
    return f"{rate / 1e12:,.2f} TFLOP/s" if "matmul" in name else f"{rate / 1e9:,.2f} GB/s"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} for a text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise TypeError(f"{value!r:.60} for a number of at least 0")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r:.60} for a count")
    return value


def _rank(row: Any) -> Rank:
    rates = {_text(name): float(_number(rate)) for name, rate in row["rates"].items()}
    return Rank(_whole(row["rank"]), _text(row["host"]), _text(row["device"]), rates)


def _link(row: Any) -> Link:
    groups = tuple(tuple(map(_whole, group)) for group in row["groups"])
    seconds = tuple(tuple(map(_number, times)) for times in row["seconds"])
    sizes = tuple(map(_whole, row["bytes"]))
    fits = groups and len(groups) == len(seconds) and sizes and all(groups)
    if not fits or any(len(times) != len(sizes) for times in seconds):
        raise ValueError("times that are not those of each group and size")
    return Link(_text(row["axis"]), _text(row["op"]), groups, sizes, seconds)


# --- measuring

_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
_LARGEST_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
_SMALLEST_BYTES = 1 << 10
_DISK_BYTES = 1 << 26
_REPEATS = 5
_MESSAGES = 15  # what a message takes differs more from one to the next than what a product does


def measure(
    mesh: BoundMesh,
    device: torch.device | str,
    folder: str | Path = ".",
    *,
    largest_bytes: int = 0,
) -> Measurement:
    """The rates of all ranks of a mesh and of their collectives, the same on every rank.

    Every rank calls it. All measure their products, memory and disk at the same time, as they will
    work in a run; then axis after axis, and operation after operation, all groups at the same time.

    Collectives: psum, all_gather, psum_scatter, all_to_all and ppermute over each axis, 17 times
    for each size from 1 KiB by fours to `largest_bytes`; gathers of the numbers.

    Args:
        mesh: bound to processes.
        device: of this rank.
        folder: on the disk to be measured; a file of 64 MiB is written and removed.
        largest_bytes: of a message; 0: 4 MiB on CPUs, 256 MiB on GPUs.

    Raises:
        ValueError: `largest_bytes` is less than 1 KiB, or a file cannot be written in `folder`.
    """
    device = torch.device(device)
    largest = largest_bytes or _LARGEST_BYTES[device.type]
    found = []
    if largest < _SMALLEST_BYTES:
        found.append(Problem("largest_bytes", str(largest), f"at least {_SMALLEST_BYTES}"))
    if not os.access(folder, os.W_OK):
        found.append(Problem("folder", str(folder), "a folder that can be written to"))
    raise_problems("cannot measure this machine", found)
    wait = _barrier(mesh, device)
    wait()
    rates = _rates(device, Path(folder), wait)
    here = Rank(mesh.rank, socket.gethostname(), _device_name(device), rates)
    ranks = sorted(_gathered(mesh, here), key=lambda one: one.rank)
    links = []
    for axis, size in mesh.mesh.axes:
        if size == 1:
            continue
        mine = _times(mesh, axis, device, largest, wait)
        told = {one["rank"]: one for one in _gathered(mesh, {"rank": mesh.rank, **mine})}
        groups = _groups(mesh, axis)
        for op in _OPS:
            rows = [[max(x) for x in zip(*(told[r][op] for r in g), strict=True)] for g in groups]
            sizes = tuple(_sizes(largest, size))
            links.append(Link(axis, op, groups, sizes, tuple(map(tuple, rows))))
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    text = ",".join(f"{name}={size}" for name, size in mesh.mesh.axes)
    return Measurement(text, tuple(ranks), tuple(links), versions, time.time())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _barrier(mesh: BoundMesh, device: torch.device) -> Callable[[], None]:
    """Waits for all ranks: for their collectives, which take the GPU's time, too."""
    one = torch.ones((), device=device)

    def wait() -> None:
        if mesh.size > 1:
            dist.all_reduce(one)
        _synchronize(device)

    return wait


def _gathered(mesh: BoundMesh, value: Any) -> list[Any]:
    found: list[Any] = [None] * mesh.size
    if mesh.size == 1:
        return [value]
    dist.all_gather_object(found, value)
    return found


def _groups(mesh: BoundMesh, axis: str) -> tuple[tuple[int, ...], ...]:
    """The ranks that share all coordinates but that of `axis`."""
    found: dict[tuple, list[int]] = {}
    for rank in range(mesh.size):
        others = {k: v for k, v in mesh.mesh.coordinate(rank).items() if k != axis}
        found.setdefault(tuple(others.items()), []).append(rank)
    return tuple(map(tuple, found.values()))


def _rates(device: torch.device, folder: Path, wait: Callable[[], None]) -> dict[str, float]:
    """Of this rank; all ranks measure the same at a time, as they share processors and memory."""
    found = {
        f"{name} matmul": measured_flops(
            device, getattr(torch, name), _ROWS[device.type], together=wait
        )
        for name in _DTYPES[device.type]
    }
    found["memory"] = measured_bandwidth(device, together=wait)
    if device.type == "cpu":  # whose kernels are the operations
        found["operations"] = measured_operations(device, together=wait)
    if device.type == "cuda":
        host = torch.zeros(_COPY_BYTES["cpu"], dtype=torch.uint8).pin_memory()
        there = torch.zeros(len(host), dtype=torch.uint8, device=device)
        found["to device"] = len(host) / min(_seconds(lambda: there.copy_(host), device, _REPEATS))
        found["from device"] = len(host) / min(
            _seconds(lambda: host.copy_(there), device, _REPEATS)
        )
    wait()
    return found | _disk(folder)


_ROWS = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}


def _disk(folder: Path) -> dict[str, float]:
    """Bytes per second to the medium, and from it where the system can forget what it has read."""
    path = folder / f".functron-doctor-{socket.gethostname()}-{os.getpid()}"
    data = os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(_DISK_BYTES // len(data)):
                file.write(data)
            os.fsync(file.fileno())
        found = {"disk write": _DISK_BYTES / (time.perf_counter() - start)}
        if hasattr(os, "posix_fadvise"):
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                while file.read(1 << 20):
                    pass
            found["disk read"] = _DISK_BYTES / (time.perf_counter() - start)
        return found
    finally:
        path.unlink(missing_ok=True)


def _sizes(largest: int, ranks: int) -> list[int]:
    """The bytes of messages, of float32 elements that all ranks have equally many of."""
    unit, found, size = 4 * ranks, [], _SMALLEST_BYTES
    while size <= largest:
        found.append(-(-size // unit) * unit)
        size *= 4
    return found


_OPS: Mapping[str, Callable[[torch.Tensor, str, int], torch.Tensor]] = MappingProxyType(
    {
        "psum": lambda x, axis, n: lax.psum(x, axis),
        "all_gather": lambda x, axis, n: lax.all_gather(x[: len(x) // n], axis, tiled=True),
        "psum_scatter": lambda x, axis, n: lax.psum_scatter(x, axis, tiled=True),
        "all_to_all": lambda x, axis, n: lax.all_to_all(x, axis, 0, 0, tiled=True),
        "ppermute": lambda x, axis, n: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
    }
)


def _times(
    mesh: BoundMesh, axis: str, device: torch.device, largest: int, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """This rank's median seconds of each collective over `axis`, for each size."""
    found: dict[str, list[float]] = {op: [] for op in _OPS}
    for op, call in _OPS.items():
        for size in _sizes(largest, mesh[axis]):
            x = torch.zeros(size // 4, device=device)

            def program(x: torch.Tensor, call: Callable = call, op: str = op) -> torch.Tensor:
                run = lambda: call(x, axis, mesh[axis])  # noqa: E731
                _seconds(run, device, 2)  # connections and buffers are made
                found[op].append(statistics.median(_seconds(run, device, _MESSAGES, wait)))
                return x

            shard_map(program, mesh, P(), P(), check=False)(x)
    return found
