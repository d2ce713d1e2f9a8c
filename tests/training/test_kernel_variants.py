"""The kernels that a run compiles beforehand are those that its step launches.

The step is traced, and the host code of its operations run on tensors without memory.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from torch.utils import _pytree as pytree

from functron import Mesh, ops
from functron.ops import nvrtc
from functron.ops.operations import Op
from functron.program.equations import Var
from functron.training.config import configure, starting_config
from functron.training.setup import RunSetup, make_setup

CASES = {
    "bf16": ("llama3-tiny", "", {}),
    "float32": ("llama3-tiny", "", {"precision": "float32"}),
    "low moments": ("llama3-tiny", "dp=2", {"optimizer.mu_dtype": "bfloat16", "zero": 1}),
    "experts": ("mixtral-tiny", "ep=2", {}),
    "context": ("llama3-tiny", "cp=2", {}),
    "fp8": ("llama3-tiny", "", {"precision": "fp8-tensor"}),
}


class Noting:
    """A `Launch` that notes what is to be compiled."""

    def __init__(self):
        self.found: set[tuple] = set()

    def __call__(self, source, kernel, grid, block, *args, defines=(), shared_bytes=0):
        self.found.add((source, *sorted(dict(defines).items())))

    def processors(self, device):
        return 132


def launched(setup: RunSetup) -> set[tuple]:
    """The sources and macros of the kernels of a step on a GPU."""
    modules = [
        importlib.import_module(f"functron.ops.{m.name}")
        for m in pkgutil.iter_modules(ops.__path__)
    ]
    every = [x for module in modules for x in vars(module).values() if isinstance(x, Op)]
    known = {x.raw: x for x in every if "matmul" not in x.name}  # torch's kernels
    noting = Noting()

    def empty(value: Var) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")

    for equation, _ in setup.program().block.walk():
        if equation.op in known:
            args = pytree.tree_map_only(Var, empty, equation.args)
            known[equation.op].kernel(noting, *args)
    return noting.found


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_launches_is_compiled_before(name):
    model, mesh, changes = CASES[name]
    config = starting_config(None, model=model, precision=changes.pop("precision", None))
    config = configure(config, kernels="kernel", seq=256, global_batch=4, **changes)
    setup = make_setup(config, Mesh.parse(mesh))
    known = {(s.name, *sorted(defines.items())) for s, defines in setup.kernel_variants}
    found = launched(setup)
    assert {source for source, *_ in found} >= {"adamw", "rms_norm", "glu", "cross_entropy"}
    assert found <= known
    every = sum(len(nvrtc.read(name).variants) for name in nvrtc.names())
    assert len(known) < every / 4
