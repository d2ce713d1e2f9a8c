"""The private torch names that functron relies on. Checked on torch 2.11 and 2.13.

Those of autograd Functions are in `functron.core.functions`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch._C._functorch as functorch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d

# Its functions have the default group as a default argument. Imported once there is one (by dynamo,
# say) they keep it for good, and a thread of it that frees a tensor while Python exits aborts the
# process (2.11 to 2.13).
import torch.distributed.nn.functional
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode

c10d: Any = _c10d  # new versions have a type of their own for the names of groups


def leading(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """`x` with its mapped dim first, as a vmap rule gets it; expanded where it has none."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


no_overrides = torch._C.DisableTorchFunctionSubclass
"""A with block in which subclasses of tensors do not see what is done with them."""
transforms_active = torch._C._are_functorch_transforms_active
"""``transforms_active()``: whether any torch.func transform is running."""
level_of = functorch.maybe_get_level
"""``level_of(tensor)``: the torch.func level of a wrapped tensor; -1 for a plain one."""
is_wrapped = functorch.is_functorch_wrapped_tensor
"""``is_wrapped(tensor)``: whether it is a tensor of some torch.func level."""
unwrap_if_dead = functorch.unwrap_if_dead
"""``unwrap_if_dead(tensor)``: without the wrappers of transforms that have returned."""
no_transforms = temporarily_clear_interpreter_stack
"""A with block that runs as if no torch.func transform were running."""
with_transforms = temporarily_restore_interpreter_stack
"""A with block inside of `no_transforms` that runs as if these transforms were running."""
no_dispatch_modes = _disable_current_modes
"""A with block that runs as if no TorchDispatchMode were active."""
default_store = c10d._get_default_store
"""``default_store()``: where the processes of the default process group met."""


def guard_functions_under_vmap(refused: Callable[[], bool]) -> None:
    """Let torch's higher-order operations fail under vmap wherever `refused()` is true.

    `refused` is called before each of them runs under vmap. torch has rules under vmap for ``cond``
    and ``scan``; that of ``cond`` takes a value that is batched at any level for one that is
    batched at the innermost, so that under nested vmaps it silently reads a branch and operands of
    other places.
    """
    vmap = TransformType.Vmap
    for operation in torch._ops._higher_order_ops.values():
        table = operation.functorch_table
        if operation is not custom_function_call and vmap in table:  # which is `Function`'s
            table[vmap] = _guard_rule(operation, table[vmap], refused)
            # dynamo, which runs these operations, is not to compile the guard
            after_dynamo(lambda at=table: at.update({vmap: torch._dynamo.disable(at[vmap])}))


@contextlib.contextmanager
def applying_functions_by(call: Callable[..., Any]) -> Iterator[None]:
    """Let ``call(cls, apply, operands, named)`` be what autograd Functions do in this with block.

    `apply` is what torch does. No mode of torch sees such a call, only what forward computes.
    """
    kept = vars(torch.autograd.Function)["apply"]

    def applied(cls, *operands: Any, **named: Any) -> Any:
        return call(cls, functools.partial(kept.__func__, cls), operands, named)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        torch.autograd.Function.apply = kept


def _guard_rule(operation: Any, rule: Callable, refused: Callable[[], bool]) -> Callable:
    @functools.wraps(rule)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if refused():
            raise RuntimeError(f"the higher order op {operation.name()} is refused under vmap")
        return rule(*args, **kwargs)

    return guarded


def dispatch_modes_active() -> bool:
    """Whether a TorchDispatchMode (fake tensors, tracing) sees every operation."""
    return torch._C._len_torch_dispatch_stack() > 0


def taped_alone(value: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether torch's tape, and nothing else, sees what is computed of tensors of a CPU."""
    taped = torch.is_grad_enabled() and value.requires_grad and value.is_cpu
    return taped and unseen(value, *others)


def unseen(*values: torch.Tensor) -> bool:
    """Whether nothing but torch's tape sees what is computed of tensors.

    No transform, dispatch mode, compiler or autocast, and no subclass of tensors.
    """
    return not (
        transforms_active()
        or dispatch_modes_active()
        or torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or torch.overrides.has_torch_function(values)
    )


def keeps_graph() -> bool:
    """Whether the backward pass of torch's tape that runs here may be run again."""
    engine: Any = torch._C
    return engine._autograd._get_current_graph_task_keep_graph()


def transform_levels() -> set[int]:
    """The levels of the torch.func transforms that are running."""
    return {interpreter.level() for interpreter in retrieve_all_functorch_interpreters()}


def transform_names() -> list[str]:
    """The torch.func transforms that are running, from the outermost: vmap, grad or jvp."""
    return [level.key().name.lower() for level in retrieve_all_functorch_interpreters()]


def leave_transforms(value: torch.Tensor, depth: int) -> torch.Tensor:
    """`value` as all running transforms but the outermost `depth` return it: batch dims first."""
    with contextlib.ExitStack() as lowered:
        running: list[Any] = retrieve_all_functorch_interpreters()[depth:]
        for each in reversed(running):
            value, level, dim = unwrap_if_dead(value), each.level(), None
            if mapped := each.key() == TransformType.Vmap:
                value, dim = functorch._unwrap_batched(value, level)
            else:
                value = functorch._unwrap_for_grad(value, level)
            lowered.enter_context(each.lower())
            value = leading(value, dim, each.batch_size()) if mapped else value
    return value


def differentiating() -> bool:
    """Whether any torch.func grad or jvp level is running."""
    return not {"grad", "jvp"}.isdisjoint(transform_names())


def pushing_forward() -> bool:
    """Whether any torch.func jvp level, or a level of torch's dual numbers, is running."""
    return forward_ad._current_level >= 0 or "jvp" in transform_names()


def innermost_is_grad() -> bool:
    """Whether the innermost torch.func transform that is running is a derivative in reverse."""
    return transform_names()[-1:] == ["grad"]


def proxies_active() -> bool:
    """Whether another tracer (make_fx, as of torch.func.linearize) wants to see operations."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def unobserved() -> bool:
    """Whether no transform, mode or tape sees what is computed here, so that it may be in place."""
    return not (transforms_active() or dispatch_modes_active() or torch.is_grad_enabled())


def constant(value: Any, device: torch.device | str) -> torch.Tensor:
    """`torch.tensor(value, device=device)` for which neither the host nor the device waits.

    torch copies numbers from memory that the system may move, for which the host waits until all
    that it launched before has run.

    Args:
        value: a number, numbers in lists, or a 0-dim tensor, such as a traced program's place on an
            axis, of any device.
        device: where it is wanted.
    """
    device = torch.device(device)
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value
        nothing = torch.zeros((), dtype=value.dtype, device=device)
        return nothing | value if value.dtype == torch.bool else nothing + value
    if not isinstance(value, (list, tuple)):
        return torch.full((), value, device=device)
    if device.type != "cuda" or dispatch_modes_active():
        return torch.tensor(value, device=device)
    return torch.tensor(value).pin_memory().to(device, non_blocking=True)


def _wrappers(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of torch.func levels around a plain tensor, from the outermost."""
    while is_wrapped(value):
        yield value
        value = functorch.get_unwrapped(value)


def is_batched_at(value: torch.Tensor, level: int) -> bool:
    """Whether the vmap at `level` batches `value`."""
    return any(functorch.is_batchedtensor(x) and level_of(x) == level for x in _wrappers(value))


def is_batched(value: torch.Tensor) -> bool:
    """Whether any vmap batches `value`."""
    return any(map(functorch.is_batchedtensor, _wrappers(value)))


def batch_level_of(value: torch.Tensor) -> int:
    """The level of the outermost vmap that batches `value`, also inside of levels of grad."""
    return next((level_of(x) for x in _wrappers(value) if functorch.is_batchedtensor(x)), -1)


def read_number(value: torch.Tensor) -> bool | int | float:
    """The number in a 0-dim tensor that no vmap batches, read below all transforms."""
    if not transforms_active():
        return value.item()
    with no_transforms():
        return plain(value).item()


def read_any(value: torch.Tensor) -> bool:
    """Whether a bool tensor is true anywhere, in the rows of all vmaps, read below them."""
    with no_transforms():
        return bool(plain(value).any())


def is_orphan(value: torch.Tensor) -> bool:
    """Whether `value` is a tensor of a vmap that is not running any more.

    torch numbers levels by their depth, so that a later vmap takes it for one of its own; it is
    told apart by the kind of the level and by its size.
    """
    batched = [x for x in _wrappers(value) if functorch.is_batchedtensor(x)]
    running: Any = {x.level(): x for x in retrieve_all_functorch_interpreters()} if batched else {}
    for x in batched:
        own = running.get(level_of(x))
        size = functorch.get_unwrapped(x).shape[functorch.maybe_get_bdim(x)]
        if own is None or own.key() != TransformType.Vmap or own.batch_size() != size:
            return True
    return False


def is_tracked(
    value: torch.Tensor, levels: Collection[int] | None = None, *, mapped: bool = True
) -> bool:
    """Whether something differentiates or maps `value`: torch's tape, dual numbers or torch.func.

    A tensor that was made under a transform of torch.func is wrapped by its level, but not tracked.

    Args:
        value: any tensor.
        levels: of torch.func, which alone are asked, without the tape; None: everything.
        mapped: whether vmap counts.
    """
    with contextlib.ExitStack() as lowered:
        while is_wrapped(value):
            level, inside = level_of(value), functorch.get_unwrapped(value)
            if transforms_active():
                running: Any = retrieve_current_functorch_interpreter()
                if running.level() != level:
                    lowered.enter_context(running.lower())
                    continue
            if levels is None or level in levels:
                batched = functorch.is_batchedtensor(value)
                if mapped if batched else _is_differentiated(value):
                    return True
            value = inside
        while levels is None and transforms_active():
            running = retrieve_current_functorch_interpreter()
            lowered.enter_context(running.lower())
        return levels is None and _is_differentiated(value)


def _is_differentiated(value: torch.Tensor) -> bool:
    """Whether the tape or the dual numbers of the current level are about `value`."""
    if torch.is_grad_enabled() and value.requires_grad:
        return True
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(value).tangent is not None


class Ambient(NamedTuple):
    """The state that torch keeps of the with blocks around a program.

    Attributes:
        levels: of torch.func transforms.
        grad: whether a tape is on.
        functions, dispatches: how many modes see functions, and operations.
        subclasses: whether subclasses of tensors see functions.
    """

    levels: int
    grad: bool
    functions: int
    dispatches: int
    subclasses: bool

    @classmethod
    def here(cls) -> Ambient:
        """That of the caller."""
        modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        levels, grad = functorch.get_dynamic_layer_stack_depth(), torch.is_grad_enabled()
        return cls(levels, grad, *modes, torch._C._is_torch_function_enabled())

    def put_back(self) -> None:
        """Leave what was entered since, where an interrupt came between entering and noting it."""
        if functorch.get_dynamic_layer_stack_depth() > self.levels:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(self.levels)
        while torch._C._len_torch_dispatch_stack() > self.dispatches:
            _pop_mode()
        while torch._C._len_torch_function_stack() > self.functions:
            torch._C._pop_torch_function_stack()
        if self.subclasses and not torch._C._is_torch_function_enabled():
            left: Any = torch._C.DisableTorchFunctionSubclass()
            left.__exit__(None, None, None)  # of one that was never entered: they see them
        torch.set_grad_enabled(self.grad)


def running_transforms() -> list[Any]:
    """The torch.func transforms that are running, for `with_transforms`."""
    with temporarily_clear_interpreter_stack() as found:
        return found


Physical = tuple[torch.Tensor, dict[int, int], list[int]]


def physical(value: torch.Tensor) -> Physical:
    """The plain tensor under transforms, as (tensor, batch dim of each vmap, own dims in order).

    ``maybe_get_bdim`` counts in the dims of the next tensor inside, which hides its own batch dim;
    so the wrappers are peeled outside in and their dims resolved inside out.
    """
    batched = [x for x in _wrappers(value) if functorch.is_batchedtensor(x)]
    peeled = [(level_of(x), functorch.maybe_get_bdim(x)) for x in batched]
    value = plain(value)
    own = list(range(value.dim()))
    return value, {level: own.pop(dim) for level, dim in reversed(peeled)}, own


def requires_grad(value: torch.Tensor) -> bool:
    """Whether torch's tape records the plain tensor under `value`'s wrappers."""
    return plain(value).requires_grad


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether an operation is made of others, so that it may show its operand's memory or not."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit)


def fake(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """A fake tensor of memory of its own, made inside of a dispatch mode."""
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


def fake_view(mode: FakeTensorMode, func: Callable, args: Sequence, kwargs: Mapping) -> Any:
    """The view, or the views, that `func` takes of the fake tensor ``args[0]``."""
    with in_kernel_invocation_manager(mode):
        meta = func(*args, **kwargs)
    device = args[0].fake_device
    if isinstance(meta, torch.Tensor):
        return FakeTensor(mode, meta, device)
    return type(meta)(FakeTensor(mode, x, device) for x in meta)


def current_autograd_node() -> torch.autograd.graph.Node | None:
    """The node of the tape that backward is executing; None outside of backward."""
    return torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None


def autograd_sequence_number() -> int:
    """The number of the node that the tape made for the operation that is being dispatched."""
    return torch.autograd._get_sequence_nr() - 1


def flash_attention_traces(dtype: torch.dtype) -> bool:
    """Whether fake tensors know the dtypes of CPU flash attention's results.

    Before torch 2.13 they take its logsumexp to be float32 also where it is float64.
    """
    return dtype != torch.float64 or torch.__version__ >= "2.13"


def plain(value: torch.Tensor) -> torch.Tensor:
    """The tensor under all wrappers of torch.func transforms."""
    while is_wrapped(value):
        value = functorch.get_unwrapped(value)
    return value


def alias(value: torch.Tensor) -> torch.Tensor:
    """Another tensor object for `value`, from inside a dispatch mode, that counts its versions.

    Autograd will hang its graph on `value` itself; who keeps the alias does not keep that.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def group(name: str) -> dist.ProcessGroup:
    """The process group of that name, as the functions of torch.distributed take it.

    They know groups that torch made. One in Python, which only functional collectives find by its
    name, has what it stands before as `whole`.
    """
    found: Any = find_group(name)
    return getattr(found, "whole", found)


def find_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives find by that name."""
    return c10d._resolve_process_group(name)


def name_group(name: str, group: dist.ProcessGroup) -> None:
    """Give a process group another name, by which functional collectives find it."""
    c10d._unregister_process_group(name)  # an earlier one of these ranks
    c10d._register_process_group(name, group)


def keep_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group written in Python, never freed: torch's registry of names does not keep it.

    It keeps what is in C++ alone, which then finds no methods.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


def close_group(name: str, device_type: str) -> None:
    """Leave the process group of that name, for good: ranks that wait in it get an error.

    The default group stays: processes may make new ones in it. Its own collectives are given up,
    where it is NCCL's.
    """
    try:
        known: Any = find_group(name)
    except RuntimeError:  # closed before
        return
    whole = getattr(known, "whole", known)
    c10d._unregister_process_group(name)
    if hasattr(known, "close"):  # its ranks share memory
        known.close()
    if dist.get_backend(whole) == "nccl":
        whole._get_backend(torch.device(device_type)).abort()
    if whole is not dist.group.WORLD:
        dist.destroy_process_group(whole)


_ORDERED_GLOO = "gloo_in_order"


def mesh_backend(device_type: str) -> str | None:
    """The backend for groups of many collectives at once; None where it is torch's own choice.

    It is gloo with one thread per group, for collectives in the order in which they start. torch
    gives a group two, and each writes the name of the work that it ended into the same string,
    without a lock. Where two end at once and a name is longer than a string holds in itself (as of
    functional all-gathers), freed memory is written to, or freed again (2.13).
    """
    if device_type != "cpu":
        return None
    parts = (part.partition(":") for part in dist.get_backend_config().split(","))
    if {device: backend for device, _, backend in parts}.get("cpu") != "gloo":
        return None
    dist.Backend.register_backend(_ORDERED_GLOO, _make_ordered_gloo, devices=["cpu"])
    return _ORDERED_GLOO


def _make_ordered_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    default = _options(c10d._get_default_group())
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = default._devices
    options._timeout = default._timeout
    options._threads = 1
    return gloo(store, rank, size, options)


def _options(group: dist.ProcessGroup, device_type: str = "cpu") -> Any:
    backend: Any = group._get_backend(torch.device(device_type))
    while hasattr(backend, "wrapped_pg"):  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend.options


def runs_gloo(group: dist.ProcessGroup) -> bool:
    """Whether a process group sends tensors of CPUs by gloo."""
    return dist.get_backend(group) in ("gloo", _ORDERED_GLOO)


def set_group_timeout(group: dist.ProcessGroup | None, seconds: float) -> None:
    """Have a group's collectives give up after so long; None: the default group's.

    New groups do not take it from others.
    """
    c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def timeout_seconds(group: dist.ProcessGroup, device_type: str = "cpu") -> float:
    """After how long the collectives of a group give up."""
    return _options(group, device_type)._timeout.total_seconds()


def nccl_trace() -> list[dict[str, Any]] | None:
    """The collectives that have not ended, by NCCL's flight recorder; None where there is none.

    The last twenty of them. Its buffer is there unless the environment says otherwise.
    """
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return None
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True))["entries"]
    except (RuntimeError, TypeError, ValueError, KeyError):
        return None
    return entries[-20:]


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt(3)


def count_in_store(key: str) -> int:
    """How often the processes of the default group have counted `key`, this time included.

    1 where they have a store that counts nothing, as fake process groups do.
    """
    try:
        return default_store().add(key, 1)
    except RuntimeError:
        return 1


def keep_freed_memory() -> None:
    """Have the allocator keep host memory that is freed, for what is allocated next.

    glibc gives what is free at the end of the heap back to the system, which clears each page when
    it is used again: of a step on CPUs that frees 80 MB of activations a tenth of the time. It then
    keeps up to 2 GiB there, and still gives back single blocks of 32 MiB and more. New threads
    share two heaps, and find there what others freed, in place of up to eight heaps for each
    processor. Does nothing where the C library has no such choice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_ARENA_MAX, 2)


_WIDE_FLOPS = 1 << 26  # from which a product gains more than calling another library costs
_COPIED_COLUMNS = 1280  # from which it gains more than a copy of the first factor costs


def is_wide(a: Any, b: Any) -> bool:
    """Whether `wide_product` is faster for two matrices, tensors or what has their properties.

    MKL keeps to vectors of 256 bits on AMD's processors. oneDNN takes 512 wherever there are any,
    and is 5% to 20% faster, if the first factor lies row by row or the second has many columns.
    """
    if a.dtype != torch.float32 or len(a.shape) != 2 or len(b.shape) != 2:
        return False
    (rows, inner), columns = a.shape, b.shape[1]
    if 2 * rows * inner * columns < _WIDE_FLOPS or a.device.type != "cpu" or not _has_wide():
        return False
    along, across = _strides(a), _strides(b)
    in_rows = along == (inner, 1) or (columns >= _COPIED_COLUMNS and along == (1, rows))
    return in_rows and across in ((columns, 1), (1, inner))


def _strides(value: Any) -> tuple[int, ...]:
    return tuple(value.stride()) if isinstance(value, torch.Tensor) else tuple(value.stride)


@functools.cache
def _has_wide() -> bool:
    has = torch.backends.mkldnn.is_available()
    return has and "AVX512" in torch.backends.cpu.get_cpu_capability()


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of float32 matrices by oneDNN, which takes b as it lies; without a derivative."""
    return wide_operation()(a.contiguous(), b.t(), None, "none", [], "")


def wide_operation() -> Any:
    """The operation of oneDNN that `wide_product` calls."""
    return torch.ops.mkldnn._linear_pointwise.default


def wide_cotangents(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wants: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The cotangents of a and b of a product for which `is_wide` is true, where they are wanted.

    All three products are of as many FLOPs, so that nothing but the columns is asked again.
    """
    da = wide_product(dy, b.t()) if wants[0] else None
    if not wants[1]:
        return da, None
    many = dy.shape[1] >= _COPIED_COLUMNS
    return da, wide_product(a.t(), dy) if many else torch.mm(a.t(), dy)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def skips_hidden(q: Any, k: Any) -> bool:
    """Whether `causal_flash` is faster than the kernel alone, for tensors or what is like them.

    The kernel takes 512 keys at a time, and computes the scores of all of them, also of those that
    come after a query: of 256 queries twice as many as it needs. Threads wait for one another after
    each band, which costs what is won of fewer queries than 384.
    """
    if q.dtype not in (torch.float32, torch.float64) or q.device.type != "cpu":
        return False
    (batch, heads, seq, _), threads = q.shape, torch.get_num_threads()
    fewest = 2 * _FEWEST_ROWS if threads == 1 else 6 * _FEWEST_ROWS
    return k.shape[2] == seq and fewest <= seq <= 1024 and batch * heads >= threads


_FEWEST_ROWS = 64


class _Bands(NamedTuple):
    """The queries of causal attention, band by band.

    Attributes:
        starts: the first query of every band but the first.
        ends: the last key that each sees, and one.
        biases: -inf where a key is hidden; None: the kernel's own mask is right.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    biases: tuple[torch.Tensor | None, ...]


def _bands(q: torch.Tensor) -> _Bands:
    made = _make_bands.__wrapped__ if dispatch_modes_active() else _make_bands
    return made(q.shape[2], q.dtype, q.device)


@functools.lru_cache(8)
def _make_bands(seq: int, dtype: torch.dtype, device: torch.device) -> _Bands:
    rows = max(_FEWEST_ROWS, -(-seq // 8))
    hidden = torch.full((rows, seq), -math.inf, dtype=dtype, device=device)
    hidden = hidden.triu_(seq - rows + 1)[None, None]  # of the last ones
    starts = tuple(range(rows, seq, rows))
    ends = (*starts, seq)
    rest = (hidden[:, :, a - b :, seq - b :] for a, b in zip(starts, ends[1:], strict=True))
    return _Bands(starts, ends, (None, *rest))


def causal_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention and its logsumexp by the kernel of CPUs, for bands of queries in turn.

    The queries of a band attend to the keys up to its last one, and no score beyond is computed.
    As torch's operation, which it is in place of: q, k and v ``[batch, heads, seq, width]``, of one
    width, and as many queries as keys; k and v may have fewer heads. Without a derivative.
    """
    bands = _bands(q)
    rows = zip(q.tensor_split(bands.starts, 2), bands.ends, bands.biases, strict=True)
    made = [
        FLASH(x, k[:, :, :end], v[:, :, :end], 0.0, bias is None, attn_mask=bias, scale=scale)
        for x, end, bias in rows
    ]
    out, lse = (_join_rows(parts) for parts in zip(*made, strict=True))
    return out, lse


def causal_flash_backward(
    cotangent: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cotangents of q, k and v of `causal_flash`, from that of its first result."""
    bands = _bands(q)
    operands = (x.tensor_split(bands.starts, 2) for x in (cotangent, q, out, lse))
    queries: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    rows = list(zip(*operands, bands.ends, bands.biases, strict=True))
    for g, x, y, z, end, bias in reversed(rows):
        dx, *parts = FLASH_BACKWARD(
            g, x, k[:, :, :end], v[:, :, :end], y, z, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        queries.append(dx)
        for total, part in zip(sums, parts, strict=False):
            total[:, :, :end].add_(part)
        sums = sums or parts  # the last band sees all keys
    dk, dv = sums
    return _join_rows(queries[::-1]), dk, dv


def _join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Results ``[batch, heads, rows, ...]`` one below the other, in the kernel's own layout."""
    return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)


def faking() -> bool:
    """Whether a fake-tensor mode computes shapes instead of numbers here."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def current_raw_stream(index: int) -> int:
    """The handle of the current CUDA stream of this GPU; torch.cuda.current_stream is slower."""
    return torch._C._cuda_getCurrentRawStream(index)


_told_to_dynamo: list[Callable] = []


def allow_in_graph(fn: Callable) -> None:
    """Have dynamo keep calls of `fn` whole, without importing it now: that takes seconds.

    Dynamo knows such functions by their identity, so they are told it when it is imported.
    """
    after_dynamo(lambda: torch._dynamo.allow_in_graph(fn))


def after_dynamo(tell: Callable[[], object]) -> None:
    """Call `tell` once dynamo is imported: now, if it is."""
    if "torch._dynamo" in sys.modules:
        tell()
        return
    _told_to_dynamo.append(tell)
    if len(_told_to_dynamo) == 1:
        sys.meta_path.insert(0, _TellDynamo())


class _TellDynamo(importlib.abc.MetaPathFinder):
    """Lets dynamo be found as ever, and tells it what it has to know once it has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Only dynamo's."""
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def then_tell(module: Any) -> None:
                execute(module)
                for tell in _told_to_dynamo:
                    tell()

            loader.exec_module = then_tell
        return spec


def mark_constant(fn: Callable) -> None:
    """Have dynamo call `fn` while it traces, and keep the result as a constant.

    As torch.compiler.assume_constant_result, which imports all of dynamo.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
