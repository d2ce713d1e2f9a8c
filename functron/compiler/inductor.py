"""Inductor: graphs in, machine code out, kept on disk. Its private names, in one place.

Checked on torch 2.11 and 2.13. AOTAutograd normalises the graph; what Inductor makes of it is then
called directly, without AOTAutograd's wrappers, as it neither adds nor drops operands or results.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock  # whose patches torch's compiler uses as well

import torch
import torch._guards as guards
from filelock import FileLock
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config, cpu_vec_isa, ir, lowering
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.dependencies import Dep, StarDep, WeakDep
from torch._inductor.loop_body import LoopBody
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet

from functron.compiler.lower import MM_WIDE
from functron.core import compat
from functron.program.equations import Var

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
    if path is None:
        yield Path(cache_dir()) / "functron"
        return
    if not torch.cuda.is_available():
        # what compilers can do is found by compiling, which would be repeated in each new directory
        with config.patch(_vector_options()):
            cpu_vec_isa.valid_vec_isa_list()
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(Path(path).absolute())):
        yield Path(cache_dir()) / "functron"


def _vector_options() -> dict[str, Any]:
    """Options by which Inductor believes that vectors of this processor, an x86, can be compiled.

    It would compile and run three small programs to see, in 7 seconds, in each new directory. It
    looks at the processor's flags all the same, and any compiler of C++20, which it needs, has
    them. What the user has set (``TORCHINDUCTOR_VEC_ISA_OK``) stays.
    """
    known = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return {"cpp.vec_isa_ok": True} if known and config.cpp.vec_isa_ok is None else {}


def compile_graph(
    graph: fx.GraphModule, operands: Sequence[Var], options: Options, folder: Path
) -> tuple[Callable[[list], Sequence], str]:
    """The function that a graph compiles to, and its code; read from `folder` where it is there.

    Processes that want the same graph at the same time wait for the first one. What another user
    has put there is not read: code would run.

    Args:
        graph: of ATen operations, with writes to operands at its end only.
        folder: of artefacts; made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = _key(graph, operands, options)
    path = folder / f"{name}.kernel"
    with config.patch({**_vector_options(), **options}), FileLock(folder / f"{name}.lock"):
        if path.exists() and _is_own(path):
            return _load(path, operands)
        return _compile(graph, operands, path)


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


def _key(graph: fx.GraphModule, operands: Sequence[Var], options: Options) -> str:
    cuda = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    settings = {k: v for k, v in config.get_config_copy().items() if _is_plain(v)}
    facts = [
        torch.__version__, torch.version.git_version, torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(), str(cuda), sorted(settings.items()),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        sorted((k, getattr(v, "__qualname__", repr(v))) for k, v in options.items()),
        str(graph.graph),
        [(v.shape, v.stride, str(v.dtype), str(v.device)) for v in operands],
        # what higher-order operations call has no text in the graph's own
        *(str(part.graph) for part in graph.children() if isinstance(part, fx.GraphModule)),
    ]  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()


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


def _compile(graph: fx.GraphModule, operands: Sequence[Var], path: Path):
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
    ):
        wrapped: Any = inductor.compile_fx(graph, fakes, inner_compile=inner)
    code, normalised = made[0]
    inputs = len(normalised.graph.find_nodes(op="placeholder"))
    same = (inputs, _num_results(normalised)) == (len(operands), results)
    if not (same and isinstance(code, CompiledFxGraph)):
        return (lambda operands: wrapped(*operands)), ""
    function, text = code.current_callable, code.source_code
    assert function is not None
    stored = copy.copy(code)
    stored.prepare_for_serialization()
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(stored))
    part.replace(path)
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


def _num_results(graph: fx.GraphModule) -> int:
    results: Any = graph.graph.output_node().args[0]
    return len(results)


def _load(path: Path, operands: Sequence[Var]):
    code: CompiledFxGraph = pickle.loads(path.read_bytes())
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
