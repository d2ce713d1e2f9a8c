"""Shapes without numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from functron import compat, tree
from functron.errors import public
from functron.program.recorder import Recorder, active
from functron.spmd.axes import enter, scope


@public
def eval_shape(fn: Callable) -> Callable[..., tree.Tree]:
    """The function that gives the shapes and dtypes of what `fn` returns, computing nothing.

    As `jax.eval_shape`. Arguments are trees of tensors, of which only shape, dtype and device are
    used (so they may be on the meta device), and of static values. Results are contiguous tensors
    on the meta device in the place of `fn`'s tensors; other leaves stay what they are. Over a
    `Mesh` they are global values, as in simulation; over a `BoundMesh` this rank's shards, without
    communication. Works inside programs, also while they are traced.

    ``eval_shape(lambda key: ft.init_params(key, defs))(ft.random.key(0))`` describes parameters of
    any size without memory for them.

    Raises:
        ValueError: as `functron.trace`: shapes must not depend on the numbers in tensors, random
            numbers come from keys, and tensors that `fn` closes over are not modified.
    """

    @public
    def shaped(*args, **kwargs) -> tree.Tree:
        outer = active()
        recorder = Recorder() if outer is None else outer
        place = _alone(recorder) if outer is None else recorder.frame()  # which is thrown away
        # stand-ins vary over no axis, whatever the arguments do
        with enter(replace(scope(), check=False)), place:
            args, kwargs = tree.map(lambda leaf: _fake(recorder, leaf), (args, kwargs))
            out = fn(*args, **kwargs)
        return tree.map(_abstract, out)

    return shaped


@contextlib.contextmanager
def _alone(recorder: Recorder) -> Iterator[None]:
    """Record out of sight of outer modes."""
    with compat.no_dispatch_modes(), recorder.recording():
        yield


def _fake(recorder: Recorder, leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    device = torch.device("cpu") if leaf.device.type == "meta" else leaf.device
    made = recorder.empty(leaf.shape, leaf.stride(), leaf.dtype, device)
    recorder.input(made, "argument")
    taped = leaf.requires_grad and not compat.transforms_active()  # under which torch refuses it
    return made.requires_grad_() if taped else made


def _abstract(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with compat.no_dispatch_modes():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
