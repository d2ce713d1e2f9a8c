"""Optimizer state in host memory, brought to the device a few parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import public
from functron.optim.transformation import GradientTransformation, bindable
from functron.program.recorder import active
from functron.spmd.spec import P, is_spec

_GROUP_BYTES = 64 << 20


@public
@bindable
def offload(
    inner: GradientTransformation, *, group_bytes: int = _GROUP_BYTES
) -> GradientTransformation:
    """`inner`, with its state in host memory (ZeRO-Offload's placement, computed on the device).

    The state is made, and updated by `step_`, for a group of parameters at a time: what belongs to
    them is copied to their device, used, and copied back. So the device needs memory for the state
    of one group, and every step moves all of it twice: with AdamW on masters 24 bytes per parameter
    over the bus. Where parameters are on the CPU themselves nothing moves. Counters stay with the
    parameters. On CUDA the host's memory is pinned, and `step_` returns when it has the new state.

    The structure, specs and numbers of the state are `inner`'s, and so is what a checkpoint holds;
    only the device differs. A state that was restored to another device is used where it is. Under
    `zero` put this inside: ``zero(offload(with_fp32_masters(adamw(...))), ...)``.

    Args:
        inner: what it does to a parameter depends on no other one (not `clip_by_global_norm`: chain
            that before).
        group_bytes: the bytes of parameters, and at least one, whose state is there at a time.

    Raises:
        ValueError: (when called) in a program that is traced or compiled, whose tensors are on one
            device, with state on another.
    """

    def marked(params: tree.Tree) -> tuple[list[int | None], tree.Structure]:
        """Of every part of a state the parameter that it belongs to (None: a counter).

        A part is what stands where the state's specs have one: a tensor, None, or a few tensors.
        It belongs to parameter i if a state of some of the parameters has it just when i is among
        them; made of those with each bit of their numbers, there are few to look at.
        """
        leaves, structure = tree.flatten(params)
        like = [torch.empty_like(leaf, device="meta") for leaf in leaves]
        _, parts = tree.flatten(inner.specs(tree.unflatten(structure, [P()] * len(like))), is_spec)

        def has(group: list[int]) -> list[bool]:
            state = inner.init(_only(structure, like, group))
            return [bool(tree.leaves(part)) for part in parts.flatten_up_to(state)]

        owners: list[int | None] = [None if always else 0 for always in has([])]
        for bit in range(len(like).bit_length()):
            here = has([i for i in range(len(like)) if i >> bit & 1])
            owners = [
                None if i is None else i | (on << bit) for i, on in zip(owners, here, strict=True)
            ]
        return owners, parts

    def init(params):
        leaves, structure = tree.flatten(params)
        owners, parts = marked(params)
        found: list[Any] = [None] * len(owners)
        for group in _groups(leaves, group_bytes):
            made = parts.flatten_up_to(inner.init(_only(structure, leaves, group)))
            for position, i in enumerate(owners):
                if i is None:
                    found[position] = made[position]
                elif i in group:
                    found[position] = tree.map(_host, made[position])
        return tree.unflatten(parts, found)

    def whole(method, updates, state, params):
        """`method` with all of the state on the device of the updates."""
        device = tree.leaves(updates)[0].device
        updates, new = method(updates, tree.map(lambda x: x.to(device), state), params)
        return updates, tree.map(lambda old, new: new.to(old.device), state, new)

    def update(updates, state, params=None):
        _refuse_traced(state, updates)
        return whole(inner.update, updates, state, params)

    def step_(grads, state, params):
        if active() is not None:
            _refuse_traced(state, params)
            return inner.step_(grads, state, params)
        leaves, structure = tree.flatten(params)
        gradients = tree.same_structure(params, grads, names=("params", "grads"))
        owners, parts = marked(params)
        before = parts.flatten_up_to(state)
        after = list(before)
        for group in _groups(leaves, group_bytes):
            near = [_near(part, leaves, i, group) for part, i in zip(before, owners, strict=True)]
            _, new = inner.step_(
                _only(structure, gradients, group),
                tree.unflatten(parts, near),
                _only(structure, leaves, group),
            )
            for position, result in enumerate(parts.flatten_up_to(new)):
                if owners[position] is None:
                    after[position] = result
                elif owners[position] in group:
                    after[position] = tree.map(_back, before[position], result)
        if any(leaf.is_cuda for leaf in leaves):
            torch.cuda.current_stream().synchronize()
        return params, tree.unflatten(parts, after)

    return GradientTransformation(
        init,
        update,
        inner.specs,
        lambda updates, state, params=None: update(updates, state, params),
        step_,
        inner.grad_specs,
    )


def _groups(leaves: Sequence[torch.Tensor], group_bytes: int) -> list[list[int]]:
    """Consecutive leaves of so many bytes together, or of one that is larger."""
    groups: list[list[int]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        if not groups or size + leaf.nbytes > group_bytes:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += leaf.nbytes
    return groups


def _only(structure: tree.Structure, leaves: Sequence[Any], group: Sequence[int]) -> tree.Tree:
    chosen = set(group)
    return tree.unflatten(structure, [x if i in chosen else None for i, x in enumerate(leaves)])


def _near(part: tree.Tree, params: Sequence[torch.Tensor], owner: int | None, group) -> tree.Tree:
    """A part of the state where its parameter is, if that is in `group`; of a counter a copy."""
    if owner is None:
        return tree.map(torch.Tensor.clone, part)
    if owner not in group:
        return None
    return tree.map(lambda x: x.to(params[owner].device, non_blocking=True), part)


def _host(leaf: torch.Tensor) -> torch.Tensor:
    if not leaf.is_cuda:
        return leaf
    return torch.empty_like(leaf, device="cpu", pin_memory=True).copy_(leaf)


def _back(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`after` where `before` is, in its memory if that is another device's."""
    if before.device == after.device:
        return after
    return before.copy_(after, non_blocking=True)


def _refuse_traced(state: tree.Tree, near: tree.Tree) -> None:
    devices = {leaf.device for leaf in tree.leaves(state)} - {tree.leaves(near)[0].device}
    if active() is not None and devices:
        raise ValueError(
            f"offload: got a program to trace or compile with state on {sorted(map(str, devices))};"
            " wanted it on one device; fix: run the update uncompiled, or leave offload out"
        )
