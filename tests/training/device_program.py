"""Traces of training on a device that is not there: nothing of a step may be made elsewhere.

A CPU build of torch has no memory of GPUs. This process gets a device of its own, which has no
operations either; shapes, dtypes and devices of all that a step computes are known without.
"""

import sys
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

import functron as ft
from functron import tree
from functron.optim.config import OptimizerConfig
from functron.program.equations import Equation, Scan
from functron.training.config import configure, with_model
from functron.training.run import prepare

backend_registration._setup_privateuseone_for_python_backend("elsewhere")
DEVICE = torch.device("elsewhere:0")
SMALL = OptimizerConfig(mu_dtype="int8", nu_dtype="int8")
MUON = OptimizerConfig(name="muon")
LIBRARY = torch.library.Library("aten", "IMPL")


@torch.library.impl(LIBRARY, "empty_strided", "PrivateUse1")
def _empty(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    """Memory that cannot be read, for numbers that a program closes over."""
    return torch._C._acc.create_empty_tensor(size, dtype)


@torch.library.impl(LIBRARY, "_copy_from", "PrivateUse1")
def _copy_from(x, target, non_blocking=False):
    return target


def elsewhere(mode: FakeTensorMode, leaf: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=DEVICE)


def strays(equation: Equation) -> Iterator[str]:
    """The results of an equation on a CPU, but of a rank's place on an axis."""
    there = [value.device == DEVICE for value in equation.operands]
    for value in equation.results:
        from_here = bool(there) and not any(there)
        if value.device != DEVICE and (value.shape or not from_here):
            yield f"{equation.name} {tuple(value.shape)} on a CPU at {equation.where.line}"
        if value.device == DEVICE and equation.name == "_to_copy" and from_here:
            yield f"a copy from a CPU at {equation.where.line}"


CASES = {
    "llama3-tiny": [
        {"mesh": "dp=2,tp=2", "zero": 1, "log_layers_every": 1},
        {"mesh": "cp=2,fsdp=2"},
    ],
    "qwen3-moe-tiny": [{"mesh": "pp=2,ep=2", "schedule": "zb-h1"}],
    "mixtral-tiny": [{"mesh": "ep=2,tp=2", "zero": 3, "remat": "full"}],
    "deepseek-v3-tiny": [{"mesh": "ep=2"}],
    "gpt-oss-tiny": [{"mesh": "cp=2", "zigzag": False, "optimizer": SMALL}],
    "gemma2-tiny": [{"mesh": "cp=2,tp=2", "context": "gather"}],
    "gpt2-tiny": [{"mesh": "pp=2,tp=2", "loss_chunk_tokens": 8, "optimizer": MUON}],
    "mamba2-hybrid-tiny": [{"mesh": "tp=2"}],
    "bert-tiny": [{"mesh": "dp=2"}],
    "t5-tiny": [{"mesh": "tp=2"}],
}


def check(model: str, settings: dict) -> list[str]:
    """The strays of a run's steps."""
    config = configure(format="mock", end_token=0, seq=32, global_batch=4, microbatches=2)
    config = with_model(configure(config, **settings), model)
    run = prepare(config, ft.Mesh.parse(config.parallelism.mesh))
    mode = FakeTensorMode()
    state, batch = tree.map(lambda leaf: elsewhere(mode, leaf), (run.state, run.batch(0)))
    found: list[str] = []
    for step in (run.step, *(() if run.watch is None else (run.watch.step,))):
        program = ft.trace(step, donate=0)(state, batch)
        found += [
            f"a constant of shape {tuple(given.var.shape)} on a CPU"
            for given in program.inputs
            if given.role == "constant" and given.var.device != DEVICE and given.var.shape
        ]
        for equation, _ in program.block.walk():
            if not isinstance(equation.op, Scan):
                found += strays(equation)
    return found


def planted(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(3).sum()


def main(models: list[str]) -> int:
    """Print the strays of these models' cases, or of all."""
    with FakeTensorMode():
        known = ft.trace(planted)(torch.empty(3, device=DEVICE))
    assert any(stray for equation in known.block.equations for stray in strays(equation))
    cases = [(model, settings) for model in models or CASES for settings in CASES[model]]
    for model, settings in cases:
        for stray in dict.fromkeys(check(model, settings)):
            print(model, settings.get("mesh", ""), stray)
    print(f"traced {len(cases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
