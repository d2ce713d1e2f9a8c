"""Shapes without numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from functron import tree
from functron.program.recorder import Recorder


def eval_shape(fn: Callable) -> Callable[..., tree.Tree]:
    """The function that gives the shapes and dtypes of what `fn` returns, computing nothing.

    As `jax.eval_shape`. Arguments are tensors (also on the meta device) and static values; results
    are tensors on the meta device in the place of `fn`'s. Over a `Mesh` they are global values, as
    in simulation.

    ``eval_shape(lambda key: ft.init_params(key, defs))(ft.random.key(0))`` describes parameters of
    any size without memory for them.

    Raises:
        ValueError: as `functron.trace`: shapes must not depend on the numbers in tensors.
    """

    def shaped(*args, **kwargs) -> tree.Tree:
        recorder = Recorder()

        def fake(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            device = torch.device("cpu") if leaf.device.type == "meta" else leaf.device
            made = recorder.empty(leaf.shape, leaf.stride(), leaf.dtype, device)
            recorder.input(made, "argument")
            return made

        args, kwargs = tree.map(fake, (args, kwargs))
        with recorder.recording():
            out = fn(*args, **kwargs)
        return tree.map(_abstract, out)

    return shaped


def _abstract(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
