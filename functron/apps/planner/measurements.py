"""Benchmarks of machines, and expected against measured steps of runs.

`measure` benchmarks matrix products, memory and disks of each rank, and collectives over each axis.
Its result names what is slower than the rest, and is saved as JSON, and as a machine to plan for.
`estimate_run` estimates the step of one configuration on a machine, and `report_comparison`
compares it with the steps of the run.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from functron.apps.planner.estimates import Estimate, PlannedStep, estimate, estimate_step
from functron.apps.planner.machines import (
    Domain,
    Hardware,
    Network,
    RankPlacement,
    count_steps,
    find_hardware,
    hardware,
    read_dataclass,
    to_tables,
    write_whole,
)
from functron.apps.planner.rates import time_program
from functron.apps.planner.search import count_state_bytes, trace_run
from functron.apps.planner.software import FUNCTRON, UNCOMPILED, Software
from functron.core import random, tree
from functron.core.chart import line_chart
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.tables import bytes_text, table
from functron.models import gpt
from functron.program import cost
from functron.program.trace import trace
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, shard_map
from functron.spmd import collectives as lax
from functron.spmd.params import init_params
from functron.training.records import Record
from functron.training.setup import RunSetup
from functron.transforms import value_and_grad


def measure_operations(
    device: torch.device | str, *, together: Callable[[], None] | None = None
) -> float:
    """Kernels per second that an uncompiled step launches.

    Of the gradients of a tiny model, counted as by `time_program`; the time includes views and
    Python. The fastest of five steps, or of half a second, counts, as for `measure_flops`.
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
    base = find_hardware("cpu")
    program = trace(step)(params, batch)
    kernels = time_program(program, base, RankPlacement.on(Mesh(), base), UNCOMPILED).kernels
    step(params, batch)
    return kernels / cost.measure_seconds(lambda: step(params, batch), device, together)


# --- the results


@dataclass(frozen=True)
class RankRates:
    """The rates of one rank, measured while all ranks were measuring.

    Attributes:
        rank: its number.
        host: name of its machine.
        device: name of its GPU, or "cpu".
        rates: by name: ``"float32 matmul"`` and so on in FLOP/s; ``"memory"`` (copies on the
            device, reads and writes), ``"to device"``, ``"from device"`` (of a GPU, pinned),
            ``"disk write"`` (with fsync) and ``"disk read"`` in bytes/s; on a CPU ``"operations"``
            per second (`measure_operations`).
    """

    rank: int
    host: str
    device: str
    rates: Mapping[str, float]


@dataclass(frozen=True)
class LinkTimes:
    """The times of one collective over one axis.

    Attributes:
        axis: the mesh axis.
        op: "psum", "all_gather", "psum_scatter", "all_to_all" or "ppermute" (to the next rank).
        groups: the ranks of each group.
        bytes: sizes of the operand (of the result of all_gather).
        seconds: by group and size: the median of the group's slowest rank.
    """

    axis: str
    op: str
    groups: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @property
    def latency_seconds(self) -> float:
        """The time of the smallest message, of the median group."""
        return statistics.median(row[0] for row in self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """Bytes that a rank sends per second, for the largest message, of the median group.

        A ring of n ranks sends (n-1)/n of a message, for psum twice that, and ppermute all of it:
        the bus bandwidth of nccl-tests.
        """
        return self.rate(-1)

    def rate(self, index: int) -> float:
        """`bytes_per_second` of the message `index`."""
        n = len(self.groups[0])
        share = {"psum": 2 * (n - 1) / n, "ppermute": 1.0}.get(self.op, (n - 1) / n)
        return share * self.bytes[index] / statistics.median(row[index] for row in self.seconds)


FORMAT = 1
SLOW = 0.8
"""A rank or group below this fraction of the median is slow."""
_LEAST = 3  # ranks or groups to compare: of two, one is always slower


@dataclass(frozen=True)
class Measurement:
    """The rates of the ranks of a mesh, and of the collectives among them.

    Attributes:
        mesh: axes and sizes, such as ``"dp=2,tp=4"``.
        ranks: in order.
        links: by axis and collective; none for axes of size 1.
        versions: of torch and Python.
        time: when it was measured, Unix seconds.
    """

    mesh: str
    ranks: tuple[RankRates, ...]
    links: tuple[LinkTimes, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0

    def save(self, path: str | Path) -> None:
        """Write it as JSON; the file has its old or its new content at any time."""
        write_whole(Path(path), json.dumps({"format": FORMAT, **to_tables(self)}, indent=1))

    @staticmethod
    def load(path: str | Path) -> Measurement:
        """The measurement that `save` wrote.

        Raises:
            ValueError: it is not such a file; entries that are wrong are listed.
        """
        title, fix = "cannot read the rates of machines", "functron doctor --mesh MESH writes it"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            got = getattr(error, "strerror", None) or str(error)
            refuse(title, str(path), got, "a file of JSON", fix)
        kind = found.pop("format", None) if isinstance(found, dict) else None
        if kind != FORMAT:
            refuse(title, str(path), f"format {kind!r:.60}", f"format {FORMAT}", fix)
        problems: list[Problem] = []
        made = read_dataclass(Measurement, found, problems)
        raise_problems(title, problems)
        for link in made.links:
            fits = link.groups and link.bytes and all(link.groups)
            counts = [len(times) for times in link.seconds]
            if not fits or counts != [len(link.bytes)] * len(link.groups):
                refuse(title, str(path), f"times of {link.op}", "one per group and size", fix)
        return made

    def slow(self) -> list[str]:
        """Ranks and groups that are slower than the rest, of at least three, in words.

        Below `SLOW` of the median: of ranks with the same device, of hosts' disks, of groups of the
        same axis at the largest message.
        """
        return [*self._find_slow_ranks(), *self._find_slow_groups()]

    def _find_slow_ranks(self) -> Iterator[str]:
        for device in dict.fromkeys(one.device for one in self.ranks):
            alike = [one for one in self.ranks if one.device == device]
            for name in [x for x in alike[0].rates if x not in _DISK]:
                rates = {
                    f"rank {one.rank} on {one.host}": one.rates.get(name, 0.0) for one in alike
                }
                yield from _find_slow(rates, name)
        for name in _DISK:  # ranks of a host share one
            hosts: dict[str, float] = {}
            for one in self.ranks:
                hosts[one.host] = hosts.get(one.host, 0.0) + one.rates.get(name, 0.0)
            yield from _find_slow(hosts, name)

    def _find_slow_groups(self) -> Iterator[str]:
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
        """The measurements as a machine for the planner.

        The known machine with the device, with the measured median rates of products, memory and
        host, and of collectives within one host for its domain and across hosts for its network:
        bandwidth by the largest message, latency by the smallest.

        Raises:
            ValueError: no machine is known with this GPU.
        """
        base = find_hardware(self.ranks[0].device)
        rates = {
            name: statistics.median(one.rates[name] for one in self.ranks if name in one.rates)
            for name in self.ranks[0].rates
        }
        hosts = [one.host for one in self.ranks]
        made = _replace_rates(base, rates)
        domain = replace(made.domain, gpus=max(map(hosts.count, hosts)))
        domain, network = self._replace_links(domain, made.network)
        unseen = replace(base.calibration, rows=0, software="", kin="")
        measured = f"{base.name}, measured on {len({*hosts})} x {hosts.count(hosts[0])}"
        return replace(made, name=measured, domain=domain, network=network, calibration=unseen)

    def _replace_links(self, domain: Domain, network: Network) -> tuple[Domain, Network]:
        """Both with the rates of the links that were measured within them."""
        hosts = [one.host for one in self.ranks]
        near: dict[int, list[LinkTimes]] = {}
        for link in self.links:  # by the number of a group's ranks on one host; 0: all
            shares = [hosts[rank] for rank in link.groups[0]]
            count = max(map(shares.count, shares))
            near.setdefault(0 if count == len(shares) else count, []).append(link)
        if inside := near.pop(0, []):
            domain = replace(domain, efficiency=1.0, **_find_link_rates(inside, 1))
        if near:
            count, outside = min(near.items())
            network = replace(network, efficiency=1.0, **_find_link_rates(outside, count))
        return domain, network

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for one in self.ranks for name in one.rates))
        head = ["rank", "host", "device", *names]
        rows = [
            [
                str(r.rank),
                r.host,
                r.device,
                *(_format_rate(name, r.rates.get(name)) for name in names),
            ]
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
                    _format_rate("", link.bytes_per_second),
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
        """Bytes per second of collectives over the size of messages, as an SVG document."""
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


def _find_link_rates(links: Sequence[LinkTimes], share: int) -> dict[str, Any]:
    """Median rates and latencies of links, `share` of which send at a time.

    Over reductions, gathers and scatters together, and by collective.
    """
    rings = [link for link in links if link.op in ("psum", "all_gather", "psum_scatter")]
    ops = dict.fromkeys(link.op for link in links)
    measured = {
        op: _summarise_links([link for link in links if link.op == op], share) for op in ops
    }
    return {**_summarise_links(rings or links, share), "measured": MappingProxyType(measured)}


def _summarise_links(links: Sequence[LinkTimes], share: int) -> dict[str, float]:
    rate = statistics.median(link.bytes_per_second for link in links) / share
    steps = [link.latency_seconds / count_steps(link.op, len(link.groups[0])) for link in links]
    return {"bytes_per_second": rate, "latency_seconds": statistics.median(steps)}


def _replace_rates(base: Hardware, rates: Mapping[str, float]) -> Hardware:
    peaks, matmul, kernel_seconds = dict(base.peak_flops), base.matmul, base.kernel_seconds
    found = {n: rates[f"{n} matmul"] for n in peaks if f"{n} matmul" in rates}
    if base.name == find_hardware("cpu").name:  # whose peak is unknown
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


def _find_slow(rates: Mapping[str, float], name: str) -> Iterator[str]:
    median = statistics.median(rates.values()) if rates else 0.0
    for who, rate in rates.items():
        if len(rates) >= _LEAST and rate < SLOW * median:
            yield f"{who}: {name} {rate / median:.2f} of the median of {len(rates)}"


def _format_rate(name: str, rate: float | None) -> str:
    if rate is None:
        return ""
    if name == "operations":
        return f"{rate:,.0f} /s"
    if "matmul" in name:
        return f"{rate / 1e12:,.2f} TFLOP/s"
    # networks of 1 Gbit/s and less are told apart too
    return f"{rate / 1e9:,.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:,.2f} MB/s"


# --- measuring

_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
_LARGEST_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
_SMALLEST_BYTES = 1 << 10
_DISK_BYTES = 1 << 26
_MESSAGES = 15  # repetitions: times of messages vary more than those of products


def measure(
    mesh: BoundMesh,
    device: torch.device | str,
    folder: str | Path = ".",
    *,
    largest_bytes: int = 0,
) -> Measurement:
    """Benchmark all ranks of a mesh, and their collectives; the result is the same on every rank.

    Every rank calls it. All ranks measure products, memory and disk at the same time, as they share
    them in a run; then each collective over each axis, all groups at the same time.

    Collectives: psum, all_gather, psum_scatter, all_to_all and ppermute over each axis, 17 times
    for each size from 1 KiB, times 4, to `largest_bytes`; gathers of the results.

    Args:
        mesh: bound to processes.
        folder: on the disk to measure; a file of 64 MiB is written and removed.
        largest_bytes: of a message; 0: 4 MiB on CPUs, 256 MiB on GPUs.

    Raises:
        ValueError: `largest_bytes` is below 1 KiB, or `folder` cannot be written to.
    """
    device = torch.device(device)
    largest = largest_bytes or _LARGEST_BYTES[device.type]
    found = []
    if largest < _SMALLEST_BYTES:
        found.append(Problem("largest_bytes", str(largest), f"at least {_SMALLEST_BYTES}"))
    if not os.access(folder, os.W_OK):
        found.append(Problem("folder", str(folder), "a folder that can be written to"))
    raise_problems("cannot measure this machine", found)
    wait = _make_barrier(mesh, device)
    wait()
    rates = _measure_rates(device, Path(folder), wait)
    here = RankRates(mesh.rank, socket.gethostname(), _find_device_name(device), rates)
    ranks = sorted(_gather_values(mesh, here), key=lambda one: one.rank)
    links = []
    for axis, size in mesh.mesh.axes:
        if size == 1:
            continue
        mine = _measure_times(mesh, axis, device, largest, wait)
        told = {one["rank"]: one for one in _gather_values(mesh, {"rank": mesh.rank, **mine})}
        groups = _list_groups(mesh, axis)
        for op in _OPS:
            rows = [[max(x) for x in zip(*(told[r][op] for r in g), strict=True)] for g in groups]
            sizes = tuple(_list_sizes(largest, size))
            links.append(LinkTimes(axis, op, groups, sizes, tuple(map(tuple, rows))))
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    text = ",".join(f"{name}={size}" for name, size in mesh.mesh.axes)
    return Measurement(text, tuple(ranks), tuple(links), versions, time.time())


def _find_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _make_barrier(mesh: BoundMesh, device: torch.device) -> Callable[[], None]:
    """A function that waits for all ranks and their collectives."""
    one = torch.ones((), device=device)

    def wait() -> None:
        if mesh.size > 1:
            dist.all_reduce(one)
        cost.synchronize(device)

    return wait


def _gather_values(mesh: BoundMesh, value: Any) -> list[Any]:
    found: list[Any] = [None] * mesh.size
    if mesh.size == 1:
        return [value]
    dist.all_gather_object(found, value)
    return found


def _list_groups(mesh: BoundMesh, axis: str) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple, list[int]] = {}
    for rank in range(mesh.size):
        others = {k: v for k, v in mesh.mesh.coordinate(rank).items() if k != axis}
        found.setdefault(tuple(others.items()), []).append(rank)
    return tuple(map(tuple, found.values()))


def _measure_rates(
    device: torch.device, folder: Path, wait: Callable[[], None]
) -> dict[str, float]:
    """This rank's rates; all ranks measure the same at a time."""
    found = {
        f"{name} matmul": cost.measure_flops(
            device, getattr(torch, name), _ROWS[device.type], together=wait
        )
        for name in _DTYPES[device.type]
    }
    found["memory"] = cost.measure_bandwidth(device, together=wait)
    if device.type == "cpu":  # where kernels' launches count
        found["operations"] = measure_operations(device, together=wait)
    if device.type == "cuda":
        host = torch.zeros(cost.COPY_BYTES["cpu"], dtype=torch.uint8).pin_memory()
        there = torch.zeros(len(host), dtype=torch.uint8, device=device)
        found["to device"] = len(host) / min(
            cost.time_calls(lambda: there.copy_(host), device, cost.REPEATS)
        )
        found["from device"] = len(host) / min(
            cost.time_calls(lambda: host.copy_(there), device, cost.REPEATS)
        )
    wait()
    return found | _measure_disk(folder)


_ROWS = {"cpu": 1024, "cuda": 8192}


def _measure_disk(folder: Path) -> dict[str, float]:
    """Bytes per second of writes, and of reads where the page cache can be dropped."""
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


def _list_sizes(largest: int, ranks: int) -> list[int]:
    """Sizes of messages in bytes, each of as many float32 elements on every rank."""
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


def _measure_times(
    mesh: BoundMesh, axis: str, device: torch.device, largest: int, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """This rank's median seconds of each collective over `axis`, for each size."""
    found: dict[str, list[float]] = {op: [] for op in _OPS}
    for op, call in _OPS.items():
        for size in _list_sizes(largest, mesh[axis]):
            x = torch.zeros(size // 4, device=device)

            def program(x: torch.Tensor, call: Callable = call, op: str = op) -> torch.Tensor:
                run = lambda: call(x, axis, mesh[axis])  # noqa: E731
                cost.time_calls(run, device, 2)  # connects, and allocates buffers
                found[op].append(statistics.median(cost.time_calls(run, device, _MESSAGES, wait)))
                return x

            shard_map(program, mesh, P(), P(), check=False)(x)
    return found


# --- expected against measured


def find_this_machine(device: torch.device | str) -> Hardware:
    """The machine of this process: a known GPU, or the CPU.

    On a CPU the rates of products and memory are measured, which takes tenths of a second.

    Raises:
        ValueError: no machine is known with this GPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        base = hardware("cpu")
        names = [name for name in base.peak_flops if name in ("float32", "bfloat16")]
        found = {n: cost.measure_flops(device, getattr(torch, n)) for n in names}
        peaks = {name: rate / base.matmul.efficiency for name, rate in found.items()}
        memory = replace(
            base.memory,
            bytes_per_second=cost.measure_bandwidth(device) / base.memory.efficiency,
            num_bytes=cost.free_memory_bytes(device),
        )
        return replace(base, peak_flops={**base.peak_flops, **peaks}, memory=memory)
    return find_hardware(torch.cuda.get_device_name(device))


def estimate_run(
    made: RunSetup, machine: Hardware, *, software: Software | None = None
) -> Estimate:
    """Estimate the step of a run on a machine, with a process for each rank of its mesh.

    For a GPT the layers are traced; for other architectures, and with adapters, the whole step,
    which takes longer and supports no pipelines.

    Args:
        software: that runs the step, such as one of `OTHERS`; None: functron, compiled or not.

    Raises:
        ValueError: the model cannot run on the mesh, or the batch does not divide.
    """
    config, mesh = made.config, made.plain_mesh
    machine = machine.computing(config.precision.float32_matmul)
    if software is None:
        compiled, _ = made.choose_compiled(not machine.host.computes)
        software = FUNCTRON if compiled else UNCOMPILED
    if config.family.name != "gpt" or config.lora.adapters is not None:
        if made.is_pipelined:
            title, got = "cannot estimate this step", f"{config.title} with pp"
            refuse(title, "mesh", got, "a GPT without adapters, or no pp", "leave --hardware out")
        program = made.without_pipeline.program()
        tokens = config.data.global_batch * config.data.seq
        return estimate(program, machine, software=software, tokens=tokens)
    rows = (
        config.data.global_batch
        // config.parallelism.microbatches
        // math.prod(mesh[a] for a in DATA_AXES)
    )
    step = PlannedStep(
        trace_run(made, rows),
        mesh,
        config.parallelism.microbatches,
        config.parallelism.schedule,
        made.schedule.num_chunks if made.is_pipelined else 1,
        made.partition.layout if made.is_pipelined else None,
        config.parallelism.zero,
        count_state_bytes(config),
        config.optimizer.offload,
    )
    return estimate_step(step, machine, software=software)


def describe_estimate(estimate: Estimate) -> str:
    """The estimated time and memory of a step, in a line."""
    low, high = estimate.interval
    return (
        f"{estimate.step_seconds:.3g} s a step ({low:.3g} to {high:.3g}), "
        f"{estimate.tokens_per_second:,.0f} tokens/s, MFU {estimate.mfu:.1%}, "
        f"{bytes_text(estimate.memory_bytes)} of the fullest rank"
    )


COMPARED_STEPS = 20
"""The step after which a run compares its estimate with its measured time."""
_WARM_UP = 4


@contextmanager
def report_comparison(
    estimate: Estimate, say: Callable[[str], None]
) -> Iterator[Callable[[Record], None]]:
    """A reporter that compares expected and measured time and memory after `COMPARED_STEPS` steps.

    The median of the steps after the first four is compared, and the times of sections that ranks
    measured (--stragglers-every), if they did.

    Args:
        say: prints a text.
    """
    records: list[Record] = []

    def write(record: Record) -> None:
        if len(records) < COMPARED_STEPS:
            records.append(record)
            if len(records) == COMPARED_STEPS:
                say(compare_records(estimate, records))

    yield write


def compare_records(estimate: Estimate, records: Sequence[Record]) -> str:
    """Expected and measured time and memory, as text."""
    later = records[_WARM_UP:] or records
    measured = statistics.median(record["step_seconds"] for record in later)
    low, high = estimate.interval
    ratio = measured / estimate.step_seconds - 1
    verdict = "as expected" if low <= measured <= high else f"{ratio:+.0%}"
    lines = [
        f"expected {estimate.step_seconds:.3g} s a step ({low:.3g} to {high:.3g}), measured "
        f"{measured:.3g}, the median of steps {later[0]['step']} to {later[-1]['step']}: {verdict}"
    ]
    for name, foreseen, found in _compare_sections(estimate, later):
        lines.append(f"  {name:20} expected {foreseen:8.3g} s, measured {found:8.3g} s")
    peak = max(record.get("peak_memory_bytes") or 0 for record in later)
    if peak:
        held = bytes_text(estimate.memory_bytes)
        lines.append(f"  {'memory at its peak':20} expected {held}, measured {bytes_text(peak)}")
    return "\n".join(lines)


def _compare_sections(
    estimate: Estimate, records: Sequence[Record]
) -> Iterator[tuple[str, float, float]]:
    """Name, expected and measured seconds of sections, the largest differences first."""
    rows = [rank for record in records for rank in record.get("ranks", {}).values()]
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    measured = {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}
    waits = {f"wait/{axis}": seconds for axis, seconds in estimate.exposed.items()}
    idle = estimate.bubble_fraction * estimate.step_seconds
    own = max(estimate.step_seconds - sum(waits.values()) - idle, 0.0)
    foreseen = {"compute": own, **waits}
    found = [(name, foreseen.get(name, 0.0), seconds) for name, seconds in measured.items()]
    found.sort(key=lambda row: -abs(row[2] - row[1]))
    yield from (row for row in found if max(row[1:]) > 0.005 * estimate.step_seconds)
