"""The cost of a program: floating-point operations, bytes moved, and bytes sent over each axis.

**Model FLOPs** are the multiplications and additions that a model's mathematics needs, forward and
backward: two for every product of a weight and an activation, twice as many in backward, and
nothing for what is computed again. Causal attention counts as half, since a token attends to half
of the others on average; that of a window w over T tokens as w T - w^2 / 2 pairs. MFU is of these
(`tokens_attended` is the definition that models count by). Published tables use the other
convention as well, *whole attention* (Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T per
token), which is given beside it.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from functron.core.scopes import Phase
from functron.core.tables import align_columns, bytes_text, count_text, html_table
from functron.program.equations import Block, Code, ControlFlow, Equation, Switch, Var, While
from functron.program.text import axis_of, dtype_text, expected_rows, payload_bytes, short_line

_aten = torch.ops.aten


def tokens_attended(seq: int, window: int = 0, *, whole: bool = False) -> float:
    """The mean number of tokens that a token attends to, as model FLOPs count: half of `seq`.

    Args:
        seq: tokens of a sequence.
        window: the number of tokens that a token sees, itself included; 0: all up to itself.
        whole: count all tokens, or the window, without halving for causality.
    """
    seen = min(window, seq) if window else seq
    return seen if whole else seen - seen * seen / (2 * seq)


def _sent_share(op: str, ranks: int) -> float:
    """The bytes that each rank sends in a ring per byte of a collective's payload."""
    if op == "ppermute":
        return 1.0
    return (2 if op in ("psum", "pmax", "pmin") else 1) * (ranks - 1) / ranks


def _attention_flops(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(q, *_expand_heads(q, k, v))


def _attention_backward_flops(grad_out, q, k, v, *args, out_shape=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad_out, q, *_expand_heads(q, k, v))


def _expand_heads(q, k, v) -> list[tuple[int, ...]]:
    """The shapes of keys and values were there as many of their heads as of queries."""
    return [(x[0], q[1], *x[2:]) for x in (k, v)]


FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        _aten._scaled_dot_product_flash_attention: _attention_flops,
        _aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
        _aten._scaled_dot_product_cudnn_attention: _attention_flops,
        _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
    }
)
"""Formulas on shapes that torch's counter lacks, or has (2.11) for as many heads of keys as of
queries; pass them on as ``FlopCounterMode(custom_mapping=dict(FLOP_FORMULAS))``. Like torch's for
its other attention kernels, they ignore causality."""

_GROUPED = frozenset(
    f"{kind}grouped_{op}"
    for kind in ("", "scaled_")
    for op in ("matmul", "matmul_weight", "weight")
)
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})
"""Operations that read of their first operand no more than they return."""


@dataclass(frozen=True)
class Traffic:
    """The traffic of one kind of collective over one axis in one phase.

    Attributes:
        count: how many run.
        payload_bytes: the bytes of the operands (of an all_gather: of the results), per rank.
        sent_bytes: the bytes that each rank sends, by ring algorithms over n ranks: 2(n-1)/n of the
            payload for reductions, (n-1)/n for pbroadcast, all_gather, psum_scatter and all_to_all
            (of a ragged one the payload is the smaller of operand and result, which ranks do not
            exceed on average), all of it for ppermute.
    """

    axis: str
    op: str
    phase: Phase
    count: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, repr=False)
class Cost:
    """The work of one rank in one run of a program; `cost` makes it.

    Attributes:
        model_flops: multiplications and additions of matrix products, convolutions and attention,
            without recomputation. Causal attention counts as half where it is one operation; of
            blocks written in matrix products what is computed counts. Of products of experts' rows
            that were exchanged, which have room for more, as many count as come on average.
        model_flops_whole: the same with causal attention counted as whole.
        hardware_flops: what is computed, by torch's formulas: with all that backward computes
            again, of attention too, which they count as whole.
        bytes_accessed: read and written by all equations that are no views, were each to run by
            itself; fused, they move less.
        flops_by_op: the hardware FLOPs of each operation, most first.
        collectives: by axis, operation and phase.
        flops_by_dtype: the hardware FLOPs of operations on each dtype, of an operation with several
            the first operand's, most first.
        once: loops that run while something holds and count as one iteration.
    """

    name: str
    model_flops: int
    model_flops_whole: int
    hardware_flops: int
    bytes_accessed: int
    flops_by_op: Mapping[str, int]
    collectives: tuple[Traffic, ...]
    flops_by_dtype: Mapping[torch.dtype, int]
    once: tuple[str, ...] = ()

    @property
    def arithmetic_intensity(self) -> float:
        """Hardware FLOPs per byte accessed; 0 where no byte is."""
        return self.hardware_flops / self.bytes_accessed if self.bytes_accessed else 0.0

    def sent_bytes(self, axis: str) -> int:
        """The bytes that each rank sends over an axis."""
        return sum(row.sent_bytes for row in self.collectives if row.axis == axis)

    def rows(self) -> list[list[str]]:
        """Labels, values and remarks, as text."""
        largest = [(op, count) for op, count in self.flops_by_op.items() if count][:3]
        share = [f"{op} {count / self.hardware_flops:.0%}" for op, count in largest]
        kinds = [
            [f"of {dtype_text(dtype)}", count_text(count), f"{count / self.hardware_flops:.0%}"]
            for dtype, count in self.flops_by_dtype.items()
        ]
        return [
            ["model FLOPs", count_text(self.model_flops),
             f"{self.model_flops:,}; causal attention as half"],
            ["with whole attention", count_text(self.model_flops_whole),
             f"{self.model_flops_whole:,}; for tables that count it so"],
            ["hardware FLOPs", count_text(self.hardware_flops), ", ".join(share)],
            *(kinds if len(kinds) > 1 else []),
            ["bytes accessed", bytes_text(self.bytes_accessed), "unfused"],
            ["arithmetic intensity", f"{self.arithmetic_intensity:.1f}", "FLOPs per byte"],
        ]  # fmt: skip

    def collective_rows(self) -> list[list[str]]:
        """The collectives as a table of text, headings first."""
        head = ["axis", "collective", "phase", "count", "payload", "sent per rank"]
        return [
            head,
            *(
                [row.axis, row.op, row.phase, str(row.count), bytes_text(row.payload_bytes),
                 bytes_text(row.sent_bytes)]
                for row in self.collectives
            ),
        ]  # fmt: skip

    def __str__(self) -> str:
        lines = [f"cost of {self.name}, per rank", *(f"  {x}" for x in align_columns(self.rows()))]
        if self.collectives:
            lines += ["", *(f"  {x}" for x in align_columns(self.collective_rows()))]
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        known = "counted as one iteration; see Program.assume_runs"
        return [f"  loops {known}: {', '.join(self.once)}"] if self.once else []

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = html_table(self.rows())
        if self.collectives:
            tables += html_table(self.collective_rows(), heading=True)
        notes = "".join(f"<p>{escape(note.strip())}</p>" for note in self._notes())
        return f"<div><b>cost of {escape(self.name)}, per rank</b>{tables}{notes}</div>"


def dearest_runs(
    op: ControlFlow, measure: Callable[[Equation], float]
) -> Sequence[tuple[Block, float]]:
    """Blocks of an operation that run, with how often they do.

    Of a switch these are the branches by their weights, or the one of which `measure` sums up to
    the most; of a loop, its blocks as often as `Block.walk` counts them.
    """
    if not isinstance(op, Switch):
        return op.runs
    if op.weights:
        return list(zip(op.branches, op.weights, strict=True))
    sums = [sum(times * measure(e) for e, times in walk_dearest(b, measure)) for b in op.branches]
    return [(op.branches[sums.index(max(sums))], 1)]


def walk_dearest(
    block: Block, measure: Callable[[Equation], float]
) -> Iterator[tuple[Equation, float]]:
    """Every equation that has no blocks with how often it runs, as `dearest_runs` counts them.

    Args:
        measure: what an equation costs.
    """
    for equation in block.equations:
        if not isinstance(equation.op, ControlFlow):
            yield equation, 1
            continue
        for inner, count in dearest_runs(equation.op, measure):
            yield from ((each, times * count) for each, times in walk_dearest(inner, measure))


def cost(program: Code) -> Cost:
    """FLOPs, bytes and communication of one run of `program` on one rank.

    Bodies of scans count once per iteration. Of a switch counts, for each number, the branch that
    has most of it: the numbers are bounds. Where its branches have weights, or the iterations of a
    loop that runs while something holds are known, these count (`Program.assume_runs`); else such a
    loop counts as one iteration, and the cost says so.

    Operations without a formula (elementwise ones, reductions, look-ups) count no FLOPs, as in
    `torch.utils.flop_counter.FlopCounterMode`, whose total on an eager run of the same function the
    hardware FLOPs equal.
    """
    total: Any = Counter()  # with parts of runs where branches have weights
    by_dtype: Any = Counter()
    model = whole = 0
    filled = find_filled(program)
    for equation, times in walk_dearest(program.block, equation_flops):
        found = equation_flops(equation)
        if found:
            total[equation.name] += found * times
            by_dtype[equation.operands[0].dtype] += found * times
            if equation.where.phase != "recompute":
                half, needed = _model_flops(equation, found)
                times *= filled.get(equation, 1)
                model, whole = model + half * times, whole + needed * times
    accessed = sum(moved_bytes(e) * times for e, times in walk_dearest(program.block, moved_bytes))
    traffic: dict[tuple[str, str, Phase], tuple[float, float]] = {}
    for (axis, op, phase, payload), (_, times, _) in _group_by_payload(program).items():
        count, before = traffic.get((axis, op, phase), (0, 0))
        traffic[axis, op, phase] = count + times, before + payload * times
    return Cost(
        program.name,
        round(model),
        round(whole),
        round(sum(total.values())),
        round(accessed),
        MappingProxyType({name: round(count) for name, count in total.most_common()}),
        tuple(
            Traffic(
                axis,
                op,
                phase,
                round(count),
                round(payload),
                round(payload * _sent_share(op, program.mesh.shape[axis])),
            )
            for (axis, op, phase), (count, payload) in sorted(traffic.items())
        ),
        MappingProxyType({dtype: round(count) for dtype, count in by_dtype.most_common()}),
        tuple(dict.fromkeys(_describe_loops(program))),
    )


def find_rooms(program: Code) -> dict[int, float]:
    """By numbers of rows that ragged exchanges have room for, the fraction that comes on average.

    As many as were sent, or as the exchange expects.
    """
    rooms = {}
    for equation, _ in program.block.walk():
        if equation.name == "ragged_all_to_all":
            sent, room = equation.operands[0].shape[0], equation.results[0].shape[0]
            sent = expected_rows(equation) or sent
            if sent < room:
                rooms[room] = sent / room
    return rooms


def find_filled(program: Code, rooms: Mapping[int, float] | None = None) -> dict[Equation, float]:
    """By product of experts, the average fraction of its rows that have tokens.

    Args:
        rooms: those of a program that this is a part of, such as gradients of weights alone, whose
            rows another part exchanged; None: the program's own.
    """
    rooms = find_rooms(program) if rooms is None else rooms
    return {
        equation: rooms[rows]
        for equation, _ in program.block.walk()
        if equation.name in _GROUPED and (rows := equation.operands[0].shape[0]) in rooms
    }


def moved_bytes(equation: Equation) -> int:
    """The bytes that one run of an equation reads and writes; a view none."""
    return 0 if equation.aliases else equation_bytes(equation)


def _describe_loops(program: Code) -> Iterator[str]:
    """Loops of which it is not known how often they run."""
    for equation, _ in program.block.walk():
        if isinstance(equation.op, While) and equation.op.trip_count is None:
            place = short_line(equation.where.line)
            yield f"{equation.op.name}{f' at {place}' if place else ''}"


def collectives_diff(a: Code, b: Code) -> str:
    """The collectives of which one program runs more than another, as a table; "" for none.

    A row has an axis, an operation, a phase and the payload of one run (`Traffic`), how many of
    these `a` and `b` run, how many more bytes a rank sends in `b`, and the scopes, or else lines,
    of the program that has more of them. Its last row is that of all bytes sent.
    """
    ours, theirs = _group_by_payload(a), _group_by_payload(b)
    head = ["axis", "collective", "phase", "payload of each", "this", "other", "sent", "where"]
    rows, none = [head], ([], 0, 0.0)
    for key in sorted(ours.keys() | theirs.keys()):
        (mine, count, sent), (other, others, more) = ours.get(key, none), theirs.get(key, none)
        if count != others:
            axis, op, phase, payload = key
            wheres = dict.fromkeys(mine if count > others else other)
            shown = [*wheres][:3] + ["..."] * (len(wheres) > 3)
            counts = [f"{count:.10g}", f"{others:.10g}"]
            cells = [axis, op, phase, bytes_text(payload), *counts, _signed_bytes(more - sent)]
            rows.append([*cells, ", ".join(shown)])
    if len(rows) == 1:
        return ""
    sums = [round(sum(sent for _, _, sent in side.values())) for side in (ours, theirs)]
    rows.append(
        ["in all", "", "", "", *map(bytes_text, sums), _signed_bytes(sums[1] - sums[0]), ""]
    )
    title = f"collectives of {a.name} (this) and of {b.name} (other), per rank"
    return "\n".join([title, *(f"  {line}" for line in align_columns(rows))])


def _group_by_payload(
    program: Code,
) -> dict[tuple[str, str, Phase, int], tuple[list[str], float, float]]:
    """By axis, operation, phase and payload where they are, how many run, and what all send."""
    found: dict[tuple[str, str, Phase, int], tuple[list[str], float, float]] = {}
    used = dict.fromkeys(axis_of(equation) for equation, _ in program.block.walk())
    for axis in used:
        if axis is None:
            continue

        def sent_over(equation: Equation, axis: str = axis) -> float:
            return sent_bytes(equation) if axis_of(equation) == axis else 0

        for equation, times in walk_dearest(program.block, sent_over):
            if axis_of(equation) != axis:
                continue
            where, payload = equation.where, payload_bytes(equation)
            key = axis, equation.name, where.phase, payload
            places, count, sent = found.get(key, ([], 0, 0.0))
            place = "/".join(where.scopes) or short_line(where.line)
            sent += times * payload * _sent_share(equation.name, program.mesh.shape[axis])
            found[key] = [*places, place], count + times, sent
    return found


def _signed_bytes(num_bytes: float) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{bytes_text(round(abs(num_bytes)))}"


def equation_flops(equation: Equation) -> int:
    """The FLOPs of one run of an equation that has no blocks; 0 where there is no formula."""
    assert not isinstance(equation.op, ControlFlow)
    packet = equation.op.overloadpacket
    if packet in FLOP_FORMULAS:
        args, kwargs = pytree.tree_map_only(
            Var, lambda var: var.shape, (equation.args, dict(equation.kwargs))
        )
        return FLOP_FORMULAS[packet](*args, **kwargs)
    own = getattr(equation.op, "functron_own", None)  # of `functron.ops.register`
    if packet not in flop_registry and own is None:
        return 0
    args, kwargs, outputs = pytree.tree_map_only(
        Var, Var.meta, (equation.args, dict(equation.kwargs), list(equation.outputs))
    )
    count = own.flops if own is not None else flop_registry[packet]
    return count(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs))


def sent_bytes(equation: Equation) -> float:
    """The bytes that each rank sends in one run of a collective; see `Traffic`."""
    return payload_bytes(equation) * _sent_share(equation.name, equation.args[2])


def _model_flops(equation: Equation, computed: int) -> tuple[int, int]:
    """Of an equation's FLOPs those that the model needs, causal attention as half and as whole."""
    if "_scaled_dot_product" not in equation.name:
        return computed, computed
    assert isinstance(equation.op, torch._ops.OpOverload)
    names = (argument.name for argument in equation.op._schema.arguments)
    given = dict(zip(names, equation.args, strict=False)) | dict(equation.kwargs)
    q, k, v = (given[name].shape for name in ("query", "key", "value"))
    # backward has twice the products of forward, and computes one of these again
    needed = _attention_flops(q, k, v) * (2 if "backward" in equation.name else 1)
    return needed // 2 if given.get("is_causal") else needed, needed


def equation_bytes(equation: Equation) -> int:
    """The bytes that one run of an equation reads and writes; those of expanded dims once."""
    written = sum(_touched_bytes(value) for value in equation.results)
    operands = list(dict.fromkeys(equation.operands))
    if equation.name in _LOOKUPS and operands:
        return 2 * written + sum(_touched_bytes(value) for value in operands[1:])
    return written + sum(_touched_bytes(value) for value in operands)


def _touched_bytes(var: Var) -> int:
    sizes = zip(var.shape, var.stride, strict=True)
    return prod(size if stride or not size else 1 for size, stride in sizes) * var.dtype.itemsize


# --- rates of devices

_PEAKS: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {  # by a part of the driver's name: bfloat16, float32, float64
        "A100": (312e12, 19.5e12, 19.5e12),
        "H100": (989e12, 67e12, 67e12),
        "H200": (989e12, 67e12, 67e12),
        "B200": (2250e12, 75e12, 37e12),
        "GB200": (2500e12, 80e12, 40e12),
        "H100 PCIe": (756e12, 51e12, 51e12),
        "L40S": (362e12, 91.6e12, 1.4e12),
        "L4": (121e12, 30.3e12, 0.5e12),
        "A10G": (70e12, 35e12, 0.5e12),
        "RTX 4090": (165e12, 82.6e12, 1.3e12),
        "RTX 3090": (71e12, 35.6e12, 0.6e12),
    }
)
"""FLOP/s of GPUs, from the vendor's data sheets.

Dense tensor-core rates without sparsity, and the float32 and float64 rates that torch uses by
default (no TF32)."""
_NVLINK = ("A100", "H100", "H200", "B200", "GB200")
"""Of these the rates of the modules with NVLink; cards for PCIe have a lower power limit."""


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The FLOP/s that count as 100% of a device for products of `dtype`.

    For well-known GPUs the data sheet's rate; of float32 that of TF32, half of bfloat16's, where
    torch computes products so in this process (`torch.set_float32_matmul_precision`). For a CPU,
    whose rate depends on its clock and on the threads this process has, and for any other GPU, what
    a large matrix product reaches here (`measure_flops`).
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found = max((part for part in _PEAKS if part.upper() in name.upper()), key=len, default="")
        if found and not (found in _NVLINK and "PCIE" in name.upper()):
            bf16, fp32, fp64 = _PEAKS[found]
            if torch.get_float32_matmul_precision() != "highest":
                fp32 = max(fp32, bf16 / 2)
            return {torch.float32: fp32, torch.float64: fp64}.get(dtype, bf16)
    return measure_flops(device, dtype)


_ENOUGH_SECONDS = 0.001


def measure_flops(
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
        size: of the largest matrices.
        together: a barrier of all ranks. With it, the sustained rate of half a second of products
            of the largest size, on a processor that ranks share or that its power limits.
    """
    device = torch.device(device)
    rows = min(size, 128) if together is None else size
    while True:
        a = torch.ones(rows, rows, dtype=dtype, device=device)
        seconds = measure_seconds(functools.partial(torch.mm, a, a), device, together)
        if seconds > _ENOUGH_SECONDS or rows == size:
            return 2 * rows**3 / seconds
        rows = min(2 * rows, size)


def measure_bandwidth(
    device: torch.device | str, *, together: Callable[[], None] | None = None
) -> float:
    """The bytes per second that copies on a device read and write together.

    Of the fastest of five, or of half a second, as of `measure_flops`.
    """
    device = torch.device(device)
    a = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    b = torch.ones_like(a)
    return 2 * len(a) / measure_seconds(lambda: b.copy_(a), device, together)


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


REPEATS = 5
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}


def synchronize(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_LASTING_SECONDS = 0.5


def measure_seconds(
    call: Callable[[], object], device: torch.device, together: Callable[[], None] | None
) -> float:
    """The seconds of the fastest of five calls, or the mean of half a second of them together."""
    if together is None:
        return min(time_calls(call, device, REPEATS))
    time_calls(call, device, 1)  # warm up
    together()
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < _LASTING_SECONDS or not count:
        count += 1
        call()
        synchronize(device)
    return passed / count


def time_calls(
    call: Callable[[], object],
    device: torch.device,
    count: int,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """The seconds of each of `count` calls; `before` is called, untimed, before each of them."""
    found = []
    for _ in range(count):
        if before is not None:
            before()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return found
