"""Stand-ins in Python: of Triton's compiler, cuDNN's attention, and transfers of pickled objects.

`install` is called in each process before functron is imported (site/sitecustomize.py).
"""

from __future__ import annotations

import collections
import ctypes
import functools
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_runtime = ctypes.CDLL(None)
KERNELS = Path(__file__).parents[2] / "kernels"


class _Size(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def launch(name: str, stream: int = 0) -> None:
    """Count a kernel, as the driver does those that it launches."""
    one = _Size(1, 1, 1)
    stream = stream or torch.cuda.current_stream().cuda_stream
    _runtime.fake_launch(
        name.encode(), one, one, ctypes.c_size_t(0), ctypes.c_void_p(stream or None)
    )


def counts() -> dict[str, int]:
    """How often each kernel was launched and each call made since `forget`."""
    into = ctypes.create_string_buffer(1 << 20)
    _runtime.fake_read_counts.restype = ctypes.c_size_t
    size = _runtime.fake_read_counts(into, ctypes.c_size_t(len(into)))
    lines = into.raw[:size].decode().splitlines()
    return {name: int(number) for number, name in (line.split(" ", 1) for line in lines)}


def forget() -> None:
    """Begin to count again."""
    _runtime.fake_forget_counts()


class _Driver:
    """Triton's driver, which is asked for the card that it compiles for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


class _Kernel:
    """A Triton kernel of Inductor's, which is launched and computes nothing.

    What it reads and writes is told to the log: Inductor's names of arguments say which is which.
    """

    inductor_meta: ClassVar[dict] = {}

    def __init__(self, name: str, source: str):
        self.name = name
        found = re.search(r"def \w+\(([^)]*)\):", source)
        names = [
            each.strip().partition(" ")[0].rstrip(":")
            for each in (found[1] if found else "").split(",")
        ]
        self.writes = [name.startswith(("out", "in_out", "ws")) for name in names]

    def run(self, *args: Any, stream: int = 0, **given: Any) -> None:
        launch(f"triton: {self.name}", stream)
        _tell_uses(self.name, stream, zip(args, self.writes, strict=False))


def _span(value: torch.Tensor) -> list[int]:
    """The first byte of a tensor, and how many bytes reach to its last one."""
    steps = ((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return [value.data_ptr(), (sum(steps) + 1) * value.element_size()]


def _tell_uses(kernel: str, stream: int, args: Iterable[tuple[Any, bool]]) -> None:
    """Log the memory that a kernel reads and writes, of its arguments and whether it writes them."""
    spans: dict[bool, list] = {False: [], True: []}
    for value, writes in args:
        if isinstance(value, torch.Tensor) and value.numel():
            spans[writes].append(_span(value))
    text = f'"op": "uses", "kernel": "{kernel}", "stream": {_name_stream(stream)}, '
    _runtime.fake_print(f'{text}"reads": {spans[False]}, "writes": {spans[True]}'.encode())


def _name_stream(stream: int) -> int:
    found = ctypes.c_ulonglong()
    _runtime.cudaStreamGetId(ctypes.c_void_p(stream or None), ctypes.byref(found))
    return found.value


def _compile(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> _Kernel:
    return _Kernel(kernel_name, source_code)


# --- functron's own kernels: what they are given is held against what they are declared to take


@functools.cache
def read_parameters(source: str, kernel: str) -> tuple[str, ...]:
    """What each parameter of a kernel is: "reads" or "writes" of a pointer, "integer", "number"."""
    text = (KERNELS / f"{source}.cu").read_text()
    found = re.search(rf"__global__ void __launch_bounds__\(.*\)\s+{kernel}\(([^)]*)\)", text)
    assert found is not None, f"{kernel} is not in {source}.cu"
    return tuple(_classify(each) for each in found[1].split(","))


def _classify(parameter: str) -> str:
    if "*" in parameter:
        return "reads" if parameter.split()[0] == "const" else "writes"
    return "number" if parameter.split()[-2] == "float" else "integer"


def find_misfits(parameters: Sequence[str], args: Sequence[Any]) -> list[str]:
    """Arguments that a kernel would take for something else, or that lie on no GPU's memory."""
    if len(parameters) != len(args):
        return [f"{len(args)} arguments of {len(parameters)}"]
    misfits = []
    for position, (wanted, arg) in enumerate(zip(parameters, args, strict=True)):
        kind = (
            "integer" if isinstance(arg, int) else "number" if isinstance(arg, float) else "pointer"
        )
        if kind != wanted and not (kind == "pointer" and wanted in ("reads", "writes")):
            misfits.append(f"argument {position}: {kind}, wanted {wanted}")
        elif isinstance(arg, torch.Tensor) and arg.numel():
            start, num_bytes = _span(arg)
            place = _runtime.fake_find(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))
            if place < 0 or place != arg.get_device():
                misfits.append(f"argument {position}: {num_bytes} bytes of no memory of its GPU")
    return misfits


def watch_launches(launcher: type) -> None:
    """Have functron's launcher say what each kernel uses, and whether its arguments fit."""
    run = launcher.__call__

    def run_and_tell(self, source, kernel, grid, block, *args, **given):
        parameters = read_parameters(source, kernel)
        for misfit in find_misfits(parameters, args):
            _runtime.fake_print(
                f'"op": "refused", "kernel": "{kernel}", "why": "{misfit}"'.encode()
            )
        run(self, source, kernel, grid, block, *args, **given)
        stream = torch.cuda.current_stream().cuda_stream
        _tell_uses(
            kernel, stream, ((x, p == "writes") for x, p in zip(args, parameters, strict=False))
        )

    launcher.__call__ = run_and_tell


def _attend(q, k, v, bias, lse, p=0.0, causal=False, debug=False, *, scale=None):
    launch("cudnn attention")
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    sums = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device=q.device)
    empty = torch.empty(0, device=q.device)
    return torch.empty_like(q), sums, None, None, q.shape[2], k.shape[2], zero, zero, empty


def _attend_backward(grad, q, k, v, out, lse, *rest, **given):
    launch("cudnn attention backward")
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _embed_backward(grad, indices, num_weights, padding, scale):
    launch("embedding_dense_backward")
    return torch.empty(num_weights, grad.shape[-1], dtype=grad.dtype, device=grad.device)


def _erfinv(x, *args, **given):
    launch("erfinv")  # which torch compiles at run time
    return torch.zeros_like(x)


# --- objects that processes send one another: over the store, as NCCL's bytes are not moved

_numbers: collections.Counter = collections.Counter()


def _describe(group: Any) -> tuple[Any, list[int], str]:
    ranks = dist.get_process_group_ranks(group or c10d._get_default_group())
    return c10d._get_default_store(), ranks, ",".join(map(str, ranks))


def _next_key(kind: str) -> str:
    _numbers[kind] += 1
    return f"fake/{kind}/{_numbers[kind]}"


def _broadcast_objects(objects, src=None, group=None, device=None, group_src=None):
    store, ranks, name = _describe(group)
    root = ranks[group_src] if group_src is not None else (src or 0)
    key = _next_key(f"broadcast/{name}")
    if dist.get_rank() == root:
        store.set(key, pickle.dumps(list(objects)))
    else:
        objects[:] = pickle.loads(store.get(key))


def _gather_objects(into, value, group=None):
    store, ranks, name = _describe(group)
    key = _next_key(f"gather/{name}")
    store.set(f"{key}/{dist.get_rank()}", pickle.dumps(value))
    into[:] = [pickle.loads(store.get(f"{key}/{rank}")) for rank in ranks]


def _send_objects(objects, dst=None, group=None, device=None, group_dst=None, **given):
    store, ranks, name = _describe(group)
    to = ranks[group_dst] if group_dst is not None else dst
    store.set(_next_key(f"send/{name}/{dist.get_rank()}-{to}"), pickle.dumps(list(objects)))


def _receive_objects(objects, src=None, group=None, device=None, group_src=None, **given):
    store, ranks, name = _describe(group)
    sender = ranks[group_src] if group_src is not None else src
    objects[:] = pickle.loads(store.get(_next_key(f"send/{name}/{sender}-{dist.get_rank()}")))
    return sender


def _eigh(matrix, uplo="L", vectors=True):
    launch("eigh")
    return torch.empty_like(matrix[..., 0]), torch.empty_like(matrix if vectors else matrix[:0])


def _qr(matrix, mode="reduced"):
    launch("qr")
    rows, columns = matrix.shape[-2:]
    least = rows if mode == "complete" else min(rows, columns)
    shapes = (rows, least), (least, columns)
    return tuple(matrix.new_empty((*matrix.shape[:-2], *shape)) for shape in shapes)


_library: Any = None


def install() -> None:
    """Replace all of it, once a process."""
    global _library
    import triton
    from torch._inductor import async_compile

    triton.runtime.driver.set_active(_Driver())
    async_compile.AsyncCompile.triton = _compile
    async_compile.AsyncCompile.wait = lambda self, scope: None
    _library = torch.library.Library("aten", "IMPL")
    for name, fn in (
        ("_scaled_dot_product_cudnn_attention", _attend),
        ("_scaled_dot_product_cudnn_attention_backward", _attend_backward),
        ("embedding_dense_backward", _embed_backward),
        ("erfinv", _erfinv),
        ("_linalg_eigh", _eigh),
        ("linalg_qr", _qr),
    ):
        _library.impl(name, fn, "CUDA")
    for module in (dist, c10d):
        module.broadcast_object_list, module.all_gather_object = _broadcast_objects, _gather_objects
        module.send_object_list, module.recv_object_list = _send_objects, _receive_objects
