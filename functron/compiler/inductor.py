"""Inductor: graphs in, machine code out, kept on disk. Its private names, in one place.

Checked on torch 2.11 and 2.13. AOTAutograd normalises the graph; what Inductor makes of it is then
called directly, without AOTAutograd's wrappers, as it neither adds nor drops operands or results.

What is kept depends on a GPU's name, capability and sizes, and not on which one of its machine it
is: the number of the device that was compiled for stands in the code, and is another one's when
that loads it. So ranks share their work, and a folder can be taken to another machine.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import json
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock  # whose patches torch's compiler uses as well

import torch
import torch._guards as guards
from filelock import FileLock, Timeout
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config, cpu_vec_isa, ir, lowering
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.dependencies import Dep, StarDep, WeakDep
from torch._inductor.fx_passes import reinplace
from torch._inductor.loop_body import LoopBody
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet
from torch.utils._triton import has_triton_package

from functron.compiler.lower import MM_WIDE
from functron.core import compat
from functron.program.equations import Var, overlaps

Options = Mapping[str, Any]


@lowering.register_lowering(MM_WIDE, type_promotion_kind=None)
def _lower_wide(a: Any, b: Any) -> Any:
    """oneDNN's operation itself, so that a kernel calls it without passing through Python."""
    call = lowering.fallback_handler(compat.wide_operation(), add_to_fallback_set=False)
    turned = lowering.lowerings[torch.ops.aten.permute.default](b, [1, 0])
    return call(ir.ExternKernel.require_contiguous(a), turned, None, "none", [], "")


def known_options() -> set[str]:
    """The names of Inductor's options."""
    return set(config.get_config_copy())


@contextlib.contextmanager
def directory(path: Path | None) -> Iterator[Path]:
    """Where artefacts are kept inside this with block; None: where torch.compile keeps its own."""
    if path is not None and not torch.cuda.is_available():
        # what compilers can do is found by compiling, which would be repeated in each new directory
        with config.patch(_vector_options()):
            cpu_vec_isa.valid_vec_isa_list()
    chosen = {} if path is None else {"TORCHINDUCTOR_CACHE_DIR": str(Path(path).absolute())}
    with mock.patch.dict(os.environ, chosen):
        # each device has a directory of Triton's own, unless it is told of one
        triton = Path(triton_cache_dir(0))
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(triton)):
            if Path(cache_dir()) in triton.parents:
                _move_in(triton)
            yield Path(cache_dir()) / "functron"


def _move_in(triton: Path) -> None:
    """Have Triton find its files where their directory now is: it lists them by absolute paths."""
    mark, here = triton / "moved_to", str(triton.absolute())
    if not triton.is_dir() or (mark.is_file() and mark.read_text() == here):
        return
    # what cannot be read or written is compiled again
    with contextlib.suppress(OSError), FileLock(triton / "moved_to.lock"):
        for group in triton.glob("*/__grp__*.json"):
            with contextlib.suppress(ValueError, KeyError):
                listed = json.loads(group.read_text())["child_paths"]
                found = {name: str(group.parent.absolute() / name) for name in listed}
                _replace(group, json.dumps({"child_paths": found}).encode())
        _replace(mark, here.encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file that others may be reading."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def _vector_options() -> dict[str, Any]:
    """Options by which Inductor believes that vectors of this processor, an x86, can be compiled.

    It would compile and run three small programs to see, in 7 seconds, in each new directory. It
    looks at the processor's flags all the same, and any compiler of C++20, which it needs, has
    them. What the user has set (``TORCHINDUCTOR_VEC_ISA_OK``) stays.
    """
    known = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return {"cpp.vec_isa_ok": True} if known and config.cpp.vec_isa_ok is None else {}


def compile_graph(
    graph: fx.GraphModule,
    operands: Sequence[Var],
    options: Options,
    folder: Path,
    *,
    wait: bool = True,
) -> tuple[Callable[[list], Sequence], str] | None:
    """The function that a graph compiles to, and its code; read from `folder` where it is there.

    Of the processes that want the same graph at the same time one compiles it, and the others wait.
    The lock is the operating system's: it ends with the process that holds it. What another user
    has put there is not read: code would run.

    Args:
        graph: of ATen operations, with writes to operands at its end only.
        folder: of artefacts; made where it is missing.
        wait: for another process that compiles the graph; else the result is None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    devices = GraphDevices.of(graph, operands)
    chosen = {**(_vector_options() if devices.on_cpu else {}), **options}
    with config.patch(chosen):
        name = _key(devices, options)
        path = folder / f"{name}.kernel"
        try:
            held = FileLock(folder / f"{name}.lock").acquire(timeout=-1 if wait else 0)
        except Timeout:
            return None
        with held:
            if path.exists() and _is_own(path):
                return _load(path, operands, devices)
            return _compile(graph, operands, path, devices)


@contextlib.contextmanager
def compile_in_background() -> Iterator[None]:
    """Compile the C++ of graphs in the background of this with block; wait for it at the end.

    Inductor starts compilers beside it, but waits for those of a graph before it begins with the
    next one, which takes Python as long again. What a compiler raises is raised at the end.
    """
    here, begun = threading.get_ident(), []
    wait = AsyncCompile.wait

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            begun.append((self, scope))
        else:
            wait(self, scope)

    with mock.patch.object(AsyncCompile, "wait", later):
        yield
    for made, scope in begun:
        wait(made, scope)


def _is_own(path: Path) -> bool:
    return not hasattr(os, "getuid") or path.stat().st_uid in (os.getuid(), 0)


class GraphDevices(NamedTuple):
    """The devices that a graph computes on.

    Attributes:
        on_cpu: whether one is the CPU.
        gpus: the numbers of those that are GPUs.
        text: the graph, and those that it calls, without a number where there is one GPU.
    """

    on_cpu: bool
    gpus: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, graph: fx.GraphModule, operands: Sequence[Var]) -> GraphDevices:
        """Those of a graph of operands."""
        shown = [(v.shape, v.stride, str(v.dtype), v.device) for v in operands]
        # what higher-order operations call has no text in the graph's own
        parts = [part.graph for part in graph.children() if isinstance(part, fx.GraphModule)]
        text = "\n".join(map(str, (graph.graph, *parts, shown)))
        gpus = {int(number) for _, number in _NUMBER.findall(text)}
        gpus |= {torch.cuda.current_device()} if "type='cuda')" in text else set()
        on_cpu = not gpus or bool(re.search(r"\bcpu\b", text))
        return cls(on_cpu, tuple(sorted(gpus)), _renumber(text, 0) if len(gpus) == 1 else text)


_NUMBER = re.compile(
    r"(\bcuda:|\btype='(?:cuda|hip)', index=|\b_DeviceGuard\(|\bset_device\(|\bget_raw_stream\()"
    r"(\d+)\b"
)
"""Where the number of a GPU stands in graphs and in Inductor's code."""


def _renumber(text: str, number: int) -> str:
    """A text that names one GPU, of another one."""
    return _NUMBER.sub(rf"\g<1>{number}", text)


def describe_gpu(properties: Any) -> tuple:
    """The facts of a GPU that code generation reads; they are the same of all of its kind."""
    return tuple(getattr(properties, name, None) for name in _READ_OF_GPU)


_READ_OF_GPU = (
    "name", "major", "minor", "multi_processor_count", "warp_size", "regs_per_multiprocessor",
    "max_threads_per_multi_processor", "max_threads_per_block", "shared_memory_per_block",
    "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "L2_cache_size",
)  # fmt: skip


def _key(devices: GraphDevices, options: Options) -> str:
    """A hash over all that decides what a graph compiles to."""
    settings = config.save_config_portable(ignore_private_configs=False)
    facts = [
        torch.__version__, torch.version.git_version, _digest_of_source(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        sorted((k, getattr(v, "__qualname__", repr(v))) for k, v in options.items()),
        devices.text,
    ]  # fmt: skip
    if devices.on_cpu:
        facts += [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]
    else:
        settings = {k: v for k, v in settings.items() if not k.startswith("cpp.")}
    if devices.gpus:
        facts += [describe_gpu(torch.cuda.get_device_properties(gpu)) for gpu in devices.gpus]
        facts += [torch.backends.cuda.matmul.fp32_precision, _triton_version()]
    facts.append(sorted((k, v) for k, v in settings.items() if _is_plain(v)))
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _triton_version() -> str | None:
    return importlib.import_module("triton").__version__ if has_triton_package() else None


@functools.cache
def _digest_of_source() -> str:
    """A hash over the rooms that Inductor is called from, and calls back into."""
    made, house = hashlib.sha256(), Path(__file__).parents[1]
    for room in ("compiler", "core", "ops", "program", "spmd"):
        for path in sorted((house / room).glob("*.py")):
            made.update(f"{room}/{path.name}".encode() + path.read_bytes())
    return made.hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _make_fakes(operands: Sequence[Var]) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    mode = FakeTensorMode()
    with mode:
        return mode, [
            torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=v.device) for v in operands
        ]


def _compile(graph: fx.GraphModule, operands: Sequence[Var], path: Path, devices: GraphDevices):
    made: list[tuple[Any, fx.GraphModule]] = []

    def inner(normalised: fx.GraphModule, inputs: Sequence, **kwargs: Any):
        made.append((inductor.compile_fx_inner(normalised, inputs, **kwargs), normalised))
        return made[0][0]

    mode, fakes = _make_fakes(operands)
    results = _num_results(graph)
    with (
        compat.no_dispatch_modes(),
        compat.no_transforms(),
        torch.no_grad(),
        guards.tracing(guards.TracingContext(mode)),
        _keep_order(),
        _allow_no_reads(),
        _keep_expanded_apart(),
    ):
        wrapped: Any = inductor.compile_fx(graph, fakes, inner_compile=inner)
    code, normalised = made[0]
    inputs = len(normalised.graph.find_nodes(op="placeholder"))
    same = (inputs, _num_results(normalised)) == (len(operands), results)
    if not (same and isinstance(code, CompiledFxGraph)):
        return (lambda operands: wrapped(*operands)), ""
    function, text = code.current_callable, code.source_code
    assert function is not None
    if not any(constant.is_cuda for constant in (code.constants or {}).values()):
        stored = copy.copy(code)
        stored.prepare_for_serialization()
        _replace(path, pickle.dumps((devices.gpus, stored)))
    return function, text


@contextlib.contextmanager
def _keep_order() -> Iterator[None]:
    """Inductor orders reads of memory and writes to it, inside this with block.

    When it aligns loops to fuse them, which it does on CPUs, torch 2.13 forgets that a read has to
    follow a write, or the wait of a collective (pytorch#185509), and torch 2.11 also that a write
    has to follow a read (pytorch#177631). Kernels then read what is not there, or not any more.
    """
    original = SchedulerNode.recompute_size_and_body

    def keeping(self: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        known = self.read_writes.reads
        added = OrderedSet[Dep](dep for dep in known if isinstance(dep, (StarDep, WeakDep)))
        original(self, *args, **kwargs)
        found = self.read_writes.with_read(added)
        self.set_read_writes(found.rename(self.mutation_renames))

    with mock.patch.object(SchedulerNode, "recompute_size_and_body", keeping):
        yield


@contextlib.contextmanager
def _allow_no_reads() -> Iterator[None]:
    """Inductor's loops may follow a buffer without reading it, inside this with block.

    Where it looks for buffers that one loop keeps to itself, it asks all that follow a buffer where
    they read it, and one that only waits for its turn to overwrite memory raises KeyError (2.11,
    2.13). None is no index: such a buffer is not kept to the loop.
    """
    original = LoopBody.get_read_expr

    def reading(self: LoopBody, buffer_name: str) -> Any:
        try:
            return original(self, buffer_name)
        except KeyError:
            return None

    with mock.patch.object(LoopBody, "get_read_expr", reading):
        yield


@contextlib.contextmanager
def _keep_expanded_apart() -> Iterator[None]:
    """Inductor writes to no memory in which entries of a tensor coincide, inside this with block.

    torch 2.11 and 2.13 turn ``index_put(x, ...)``, which index_add and index_copy are made of, to a
    write to x where nothing else reads x, also where x is expanded: what is written to one of its
    entries then shows in all that share its memory (pytorch#183986). A backward pass under two
    levels of vmap, which simulates two mesh axes, adds to expanded zeros.
    """

    def keeping(entry: reinplace.InplaceableOp) -> reinplace.InplaceableOp:
        written = entry.mutated_arg
        positions = (written,) if isinstance(written, int) else written

        def may_write(node: fx.Node) -> bool:
            return entry.extra_check(node) and not any(_overlaps(node.args[n]) for n in positions)

        return replace(entry, extra_check=may_write)

    known = reinplace.inplaceable_ops
    with mock.patch.dict(known, {op: keeping(entry) for op, entry in known.items()}):
        yield


def _overlaps(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and overlaps(value.shape, value.stride())


def _num_results(graph: fx.GraphModule) -> int:
    results: Any = graph.graph.output_node().args[0]
    return len(results)


def _load(path: Path, operands: Sequence[Var], devices: GraphDevices):
    code: CompiledFxGraph
    gpus, code = pickle.loads(path.read_bytes())
    if gpus != devices.gpus:  # it was compiled for another GPU of the same kind
        code.source_code = _renumber(code.source_code, *devices.gpus)
        code.cache_key, _ = PyCodeCache.write(code.source_code)
        code.device_idxs = OrderedSet(devices.gpus)
    constants = CompiledFxGraphConstants()
    code.after_deserialization(constants)
    mode, fakes = _make_fakes(operands)
    settings: Any = {
        "cudagraphs": BoxedBool(config.triton.cudagraphs),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
        "is_backward": False,
        "is_inference": True,
    }
    with guards.tracing(guards.TracingContext(mode)):
        code.post_compile(fakes, constants, settings)
    function = code.current_callable
    assert function is not None
    return function, code.source_code
