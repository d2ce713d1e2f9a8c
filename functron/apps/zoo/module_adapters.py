"""Low-rank additions to linear layers of modules (`functron.lora`).

A layer adds ``scale (x b^T) a^T`` to its result, in a module that has `a`, `b` and `scale` as the
parameters of a module inside, ``lora``; the sum of its matrix and ``scale a b`` is never formed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn as torch_nn

from functron.core.typing import Tensor
from functron.models import lora
from functron.spmd import P, Rules
from functron.spmd.params import ParamDef

_INPUTS = {"Linear": 1, "Conv1D": 0}
"""The dim of a matrix that its inputs are in, of torch's layer and of that of GPT-2."""


def find_linears(module: torch_nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """The linear layers that can be adapted, by name, with the dim of their matrices' inputs.

    Their own forward is called, so that additions to its result count, and nothing else has their
    matrix, so that a sum may take its place. Other classes compute with a matrix in other ways.

    Args:
        run: runs the module.
    """
    held = (weight for inner in module.modules() for weight in inner._parameters.values())
    owners = Counter(weight for weight in held if weight is not None)
    found, called, hooks = {}, set(), []
    for name, inner in module.named_modules():
        dim = _INPUTS.get(type(inner).__name__)
        own = type(inner) is torch_nn.Linear or type(inner).__module__.startswith("transformers.")
        weight = getattr(inner, "weight", None)
        if dim is None or not own or weight is None or owners[weight] > 1:
            continue
        found[name] = dim
        note = inner.register_forward_hook(
            lambda inner, x, y, name=name: called.add(name if x else "")
        )
        hooks.append(note)
    try:
        with torch.no_grad():
            run()
    except Exception:  # said elsewhere
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return {name: dim for name, dim in found.items() if name in called}


def attach_adapters(module: torch_nn.Module, linears: Mapping[str, int]) -> None:
    """Give linear layers of a module parameters for low-rank additions, and have them add these."""
    for name, dim in linears.items():
        inner = module.get_submodule(name)
        held, one = torch_nn.Module(), torch.empty(1, device="meta")
        for part in ("a", "b", "scale"):
            held.register_parameter(part, torch_nn.Parameter(one.clone()))
        inner.add_module(lora.LORA, held)
        inner.register_forward_hook(_Addition(dim))


class _Addition:
    """A hook of a linear layer, without a closure to be searched for tensors."""

    def __init__(self, dim: int):
        self.dim = dim

    def __call__(self, inner: torch_nn.Module, args: tuple, out: Tensor) -> Tensor:
        held: Any = inner.get_submodule(lora.LORA)
        first, second = (held.a, held.b) if self.dim == 0 else (held.b.T, held.a.T)
        narrow = args[0] @ first
        return out + (narrow * held.scale.to(narrow.dtype)) @ second


def list_adapted(names: Iterable[str]) -> tuple[str, ...]:
    """The layers that have additions, by the names of parameters."""
    end = f".{lora.LORA}.a"
    return tuple(name.removesuffix(end) for name in names if name.endswith(end))


def shape_adapters(
    names: Iterable[str], shapes: Mapping[str, Sequence[int]], rank: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the additions to layers, of a rank, by those of their matrices."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        first, second = shapes[f"{name}.weight"]
        rows: dict[str, tuple[int, ...]] = {"a": (first, rank), "b": (rank, second), "scale": ()}
        found |= {f"{name}.{lora.LORA}.{part}": shape for part, shape in rows.items()}
    return found


def split_adapters(
    names: Iterable[str], defs: Mapping[str, ParamDef], rules: Rules
) -> dict[str, P]:
    """The specs of the additions to layers: split as their matrices are."""
    found = {}
    for name in names:
        first, second = defs[f"{name}.weight"].axes
        found[f"{name}.{lora.LORA}.a"] = rules.spec((first, None))
        found[f"{name}.{lora.LORA}.b"] = rules.spec((None, second))
        found[f"{name}.{lora.LORA}.scale"] = P()
    return found
