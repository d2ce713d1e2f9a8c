"""Operands of kernels, who else computes the same, and how long calls take on one device."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Program = Callable[[], Any]
WARM_UP = 3
L2_BYTES, COPY_BYTES = 256 * 2**20, 2**30
SLEEP_CYCLES = 2_000_000
"""About a millisecond: the time to enqueue a call while the GPU waits."""


@dataclass(frozen=True)
class Sizes:
    """How large the operands are.

    Attributes:
        tokens: rows of activations.
        dim: their width.
        logit_rows: tokens whose logits exist.
        vocab: logits of a token.
        experts: of a mixture.
        top_k: experts of a token.
        heads: of attention.
        head_dim: the size of one.
        numel: elements of a flat parameter.
    """

    tokens: int = 16384
    dim: int = 8192
    logit_rows: int = 4096
    vocab: int = 131072
    experts: int = 256
    top_k: int = 8
    heads: int = 32
    head_dim: int = 128
    numel: int = 2**28


FULL = Sizes()
TINY = Sizes(32, 256, 8, 512, 32, 4, 4, 64, 4096)
ODD = Sizes(37, 203, 5, 1003, 48, 3, 3, 34, 4099)
"""Sizes at which nothing is aligned."""


class Operation(Protocol):
    """An op of functron, or what is called as one."""

    @property
    def name(self) -> str:
        """As it is registered; it ends in ``_`` where operands are written to."""
        ...

    @property
    def raw(self) -> Callable[..., Any]:
        """Computes it by kernels on CUDA tensors."""
        ...

    @property
    def reference(self) -> Callable[..., Any]:
        """Computes it in torch's operations."""
        ...


@dataclass(frozen=True, eq=False, repr=False)  # a failing test would print its tensors
class Case:
    """An op, its operands, and who else computes the same.

    Attributes:
        op: the op; where its name ends in ``_``, it writes to its operands.
        args: its arguments.
        shape: as shown.
        floor: bytes that must be read and written.
        builtin: what torch has for it.
        liger: what Liger-Kernel has for it.
        compared: the outputs that say whether kernel and reference agree; None: all.
    """

    op: Operation
    args: tuple
    shape: str
    floor: int
    builtin: Program | None = None
    liger: Program | None = None
    compared: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Given:
    """The parts of a case.

    Attributes:
        sizes: of the operands.
        dtype: of activations.
        device: where they are.
    """

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers: the same at every call with this shape on this kind of device."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        made = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return made.to(dtype or self.dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Integers from 0 to `below` - 1."""
        generator = torch.Generator(self.device).manual_seed(sum(shape) + below)
        return torch.randint(below, shape, generator=generator, device=self.device)

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A 0-dim tensor."""
        return torch.tensor(value, dtype=dtype, device=self.device)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of all elements."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def shape_of(x: torch.Tensor) -> str:
    """``"2 x 3"``."""
    return " x ".join(map(str, x.shape))


def liger(name: str, *args: Any) -> Callable[..., Any] | None:
    """A function of ``liger_kernel.transformers.functional``; None where it is not installed."""
    try:
        functional = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    function: Any = getattr(functional, name, None)
    return None if function is None else functools.partial(function, *args)


def backward_of(
    function: Callable | None, cotangent: torch.Tensor, *operands: torch.Tensor
) -> Program | None:
    """The backward alone of ``function(*operands)``; its forward is computed when first called."""
    if function is None:
        return None
    kept: list[Any] = []

    def run() -> Any:
        if not kept:
            leaves = [x.detach().clone().requires_grad_() for x in operands]
            out = function(*leaves)
            kept.extend([out[0] if isinstance(out, tuple) else out, leaves])
        # Liger's backward may overwrite the cotangent: its numbers are not looked at
        return torch.autograd.grad(kept[0], kept[1], cotangent, retain_graph=True)

    return run


def difference(case: Case) -> float:
    """The norm of kernel - reference over that of the reference, of what they return or write.

    The largest of all outputs; NaN where there is nothing to compare, or not the same.
    """

    def results(function: Callable) -> Sequence[Any]:
        args = [x.clone() if isinstance(x, torch.Tensor) else x for x in case.args]
        out = function(*args)
        if case.op.name.endswith("_"):
            return [args[i] for i in range(len(args)) if _changed(args[i], case.args[i])]
        out = out if isinstance(out, tuple) else (out,)
        return out if case.compared is None else [out[i] for i in case.compared]

    got, want = results(case.op.raw), results(case.op.reference)
    if not want or len(got) != len(want):
        return float("nan")
    pairs = [(a.float(), b.float()) for a, b in zip(got, want, strict=True) if b.numel()]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


def _changed(now: Any, before: Any) -> bool:
    return isinstance(now, torch.Tensor) and not torch.equal(now, before)


class Clock:
    """Times calls on one device.

    Attributes:
        device: the device.
        repeats: calls of which the median is taken.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        size = L2_BYTES if device.type == "cuda" else 1
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def median(self, run: Program) -> float:
        """Seconds of a call, alone on the device and with cold caches."""
        for _ in range(WARM_UP if self.device.type == "cuda" else 1):
            run()
        if self.device.type != "cuda":
            return statistics.median(self._host(run) for _ in range(self.repeats))
        pairs = [self._events(run) for _ in range(self.repeats)]
        torch.cuda.synchronize()
        return statistics.median(begun.elapsed_time(done) / 1e3 for begun, done in pairs)

    def _events(self, run: Program) -> tuple[Any, Any]:
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        begun.record()
        run()
        done.record()
        return begun, done

    def _host(self, run: Program) -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun


def bandwidth(clock: Clock, tiny: bool) -> float:
    """Bytes per second that a copy reads and writes."""
    x = torch.empty(2**20 if tiny else COPY_BYTES, dtype=torch.int8, device=clock.device)
    y = torch.empty_like(x)
    return 2 * x.numel() / clock.median(lambda: y.copy_(x))
