"""Models of transformers in float64, and comparisons of ours with them.

Transformers converts to float32 in norms, the state space and softmax even in a float64 model;
`Float64` makes these conversions to float64, so that agreement can be asked to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from functron import tree

TOLERANCE = 1e-10
Tensors = dict[str, torch.Tensor]


class Float64(TorchFunctionMode):
    """Where this is in force, what is converted to float32 becomes float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 else x
        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {name: wide(x) for name, x in (kwargs or {}).items()}
        return func(*map(wide, args), **kwargs)


def drawn(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A float64 model with biases, scales and matrices all of a size that shows."""
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tensors(model: torch.nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> Tensors:
    names, leaves = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


def pad(rows: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    """Rows of a vocabulary with `count` of padding after them."""
    return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), fill)])


def stacked(layers: list) -> dict:
    return tree.map(lambda *rows: torch.stack(rows), *layers)


def assert_mapped(weights: dict, defs: dict) -> None:
    assert tree.paths(weights) == tree.paths(defs)
    assert [w.shape for w in tree.leaves(weights)] == [d.shape for d in tree.leaves(defs)]


def assert_leaves_close(actual, expected) -> None:
    """Every leaf, within the tolerance of its largest entry.

    Gradients of key biases are zero but for rounding (softmax does not see a shift of its scores),
    so entries below a thousandth of the whole tree's largest count as that.
    """
    assert tree.paths(actual) == tree.paths(expected)
    floor = 1e-3 * max(leaf.abs().max().item() for leaf in tree.leaves(expected))
    rows = zip(tree.paths(actual), tree.leaves(actual), tree.leaves(expected), strict=True)
    for path, ours, theirs in rows:
        error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=floor)).item()
        assert ours.shape == theirs.shape, path
        assert error < TOLERANCE, (path, error)


def assert_outputs_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    theirs = theirs.detach()
    top = theirs.abs().max()
    assert theirs.dtype == torch.float64
    assert top > 0.5
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * top)
