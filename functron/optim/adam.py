"""Adam and AdamW, in Optax's terms; their `step_` runs fused over all leaves.

By torch's kernel; or, on a GPU, by that of `functron.ops.adamw`, in one pass over memory with what
the transformations around it do (`Fusion`), which a traced program has as one operation per leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems
from functron.ops.adamw import adamw as adamw_op
from functron.ops.adamw import adamw_
from functron.ops.define import AUTO, Kernels
from functron.ops.foreach import foreach_
from functron.optim.low_precision import (
    BLOCK,
    Coding,
    Quantised,
    coding_of,
    dequantise,
    quantisable,
    quantise,
)
from functron.optim.mask import Mask, add_decayed_weights, mask_leaves
from functron.optim.schedules import (
    LearningRate,
    increment_,
    incremented,
    new_count,
    rate_and_count,
    scale_by_learning_rate,
)
from functron.optim.transformation import (
    Fusion,
    GradientTransformation,
    chain,
    purely,
    transformation,
    with_one_pass,
    with_step,
)
from functron.spmd.spec import P

MomentDtype = torch.dtype | Coding | None
"""How a moment is stored: None as the parameter is, "int8" and "fp8" in blocks of 8 bits."""

_FUSABLE = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


class ScaleByAdamState(NamedTuple):
    """Adam's moments.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients, like the parameters; of those that are quantised a
            `Quantised` each.
        nu: running mean of their squares, likewise.
    """

    count: Any
    mu: tree.Tree
    nu: tree.Tree


@public
def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    mu_dtype: MomentDtype = None,
    nu_dtype: MomentDtype = None,
    quantised: Mask = None,
) -> GradientTransformation:
    """Updates divided by their running root mean square: ``mu_hat / (sqrt(nu_hat) + eps)``.

    Args:
        b1: decay of the mean of gradients, per update.
        b2: decay of the mean of squared gradients, per update.
        eps: added to the root, as in Optax's `eps` (not its `eps_root`) and in torch.
        mu_dtype, nu_dtype: how `mu` and `nu` are stored: torch.float32, torch.bfloat16, "int8" or
            "fp8" (`quantise`), or None: in each parameter's own. The arithmetic is float32 at
            least, and the state is rounded once per update, after its use.
        quantised: with "int8" or "fp8", which leaves are: a mask such as `quantisable(defs)` gives
            (its rule is for global shapes, which shards do not show). The others are float32. None:
            by the shapes seen, on one rank; on a mesh of more it is needed.

    Raises:
        ValueError: (when called) a shard of a quantised leaf ends within a block.
    """

    def init(params):
        flags = _quantised_leaves(quantised, params, (mu_dtype, nu_dtype))

        def zeros(dtype: MomentDtype, *, signed: bool):
            leaves, structure = tree.flatten(params)
            rows = zip(leaves, flags, strict=True)
            return tree.unflatten(structure, [_zeros(p, flag, dtype, signed) for p, flag in rows])

        return ScaleByAdamState(
            new_count(params), zeros(mu_dtype, signed=True), zeros(nu_dtype, signed=False)
        )

    def update(updates, state, params=None):
        count = state.count + 1
        # In float64, for 1 - b2 loses digits: 6e-5 of the first update in float32.
        steps = count.to(torch.float64)
        bias1, bias2 = 1 - b1**steps, 1 - b2**steps

        def one(g, mu, nu):
            wide = torch.promote_types(g.dtype, torch.float32)
            g32 = g.to(wide)
            mean = b1 * _read(mu, wide, signed=True) + (1 - b1) * g32
            square = b2 * _read(nu, wide, signed=False) + (1 - b2) * g32 * g32
            out = (mean / bias1.to(wide)) / ((square / bias2.to(wide)).sqrt() + eps)
            return out.to(g.dtype), _like(mean, mu, signed=True), _like(square, nu, signed=False)

        flat, shape = tree.flatten(updates)
        rest = (tree.same_structure(updates, part) for part in (state.mu, state.nu))
        rows = [one(*row) for row in zip(flat, *rest, strict=True)]
        parts = [tree.unflatten(shape, [row[i] for row in rows]) for i in range(3)]
        return parts[0], ScaleByAdamState(count, parts[1], parts[2])

    return transformation(
        init,
        update,
        specs=lambda param_specs: ScaleByAdamState(P(), param_specs, param_specs),
        elementwise=not _any_coded(mu_dtype, nu_dtype),
    )._replace(whole=True)  # blocks of 8-bit moments are a shard's own: see check_blocks


@public
def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 1e-4,
    mask: Mask = None,
    mu_dtype: MomentDtype = None,
    nu_dtype: MomentDtype = None,
    quantised: Mask = None,
    kernels: Kernels = AUTO,
) -> GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), with Optax's argument names, defaults and state layout.

    ``chain(scale_by_adam(...), add_decayed_weights(...), scale_by_learning_rate(...))``. `step_` is
    `torch._fused_adamw_` in place, one kernel sequence for all leaves of a dtype (two when `mask`
    splits them); where that cannot be used (moments of another dtype than the gradients, or a
    learning rate that a vmap batches) it is `update` and `apply_updates_`. On a GPU it is one pass
    of functron's kernel instead (`functron.ops.adamw`), which has every combination of dtypes but
    moments in 8 bits, and does the clipping before it and the masters around it in the same pass;
    in traced and compiled programs too. No collectives.

    Args:
        learning_rate: a number, or a schedule: a function of the count of updates so far.
        b1, b2, eps, mu_dtype, nu_dtype, quantised: see `scale_by_adam`.
        weight_decay, mask: see `add_decayed_weights`; the decay is multiplied by the learning rate.
        kernels: whether the kernel of "adamw" is used; see `functron.ops.use`.
    """
    plain = chain(
        scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype, nu_dtype=nu_dtype, quantised=quantised),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )

    def one_pass(grads, state, params, fusion):
        adam, _, schedule = state
        columns = _columns(grads, adam, params)
        if not _one_pass(kernels, columns):
            return None
        rate, count = rate_and_count(learning_rate, schedule)
        if _batched(adam.count, rate, fusion.factor) or _differentiated(columns):
            return None
        counts = [adam.count] if count is None else [adam.count, count]
        decays = [weight_decay if flag else 0.0 for flag in mask_leaves(mask, params)]

        def run():
            steps, *scheduled = incremented(counts)
            numbers = {"b1": b1, "b2": b2, "eps": eps}
            by_kernel = _by_kernel if purely() else _by_kernel_
            new, mu, nu, masters = by_kernel(
                params, adam, columns, decays, fusion, steps, rate, numbers
            )
            later = schedule._replace(count=scheduled[0]) if scheduled else schedule
            return new, (ScaleByAdamState(steps, mu, nu), state[1], later), masters

        return run

    def step_(grads, state, params):
        adam, decay, schedule = state
        rate, count = rate_and_count(learning_rate, schedule)
        columns = _columns(grads, adam, params)
        if not _fusable(columns, adam.count, rate):
            return plain.step_(grads, state, params)
        increment_([adam.count] if count is None else [adam.count, count])
        decays = mask_leaves(mask, params) if weight_decay else [False] * len(columns[0])
        steps = adam.count.to(torch.float32)  # what the kernels read; exact up to 2^24 updates
        for decayed in set(decays):
            fused = _fused(steps, rate, b1, b2, eps, weight_decay if decayed else 0.0)
            chosen = [flag is decayed for flag in decays]
            ps, gs, mu, nu = ([*compress(column, chosen)] for column in columns)
            foreach_(
                fused,
                {"parameters": ps, "first moments": mu, "second moments": nu},
                {"gradients": gs},
                paths=lambda chosen=chosen: [*compress(tree.paths(params), chosen)],
                dense=True,
            )
        return params, (adam, decay, schedule)

    return with_one_pass(with_step(plain, step_), one_pass)


@public
def adam(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    mu_dtype: MomentDtype = None,
    nu_dtype: MomentDtype = None,
    quantised: Mask = None,
    kernels: Kernels = AUTO,
) -> GradientTransformation:
    """Adam (Kingma and Ba 2015): `adamw` without weight decay; the same fused `step_`."""
    return adamw(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay=0.0,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        quantised=quantised,
        kernels=kernels,
    )


def _any_coded(*dtypes: MomentDtype) -> bool:
    """Whether a moment is stored in blocks of 8 bits."""
    return any(isinstance(dtype, str) for dtype in dtypes)


def _quantised_leaves(mask: Mask, params: tree.Tree, dtypes: tuple) -> list[bool]:
    """Which leaves are quantised where a moment is "int8" or "fp8".

    Raises:
        ValueError: one of them ends within a block.
    """
    if not _any_coded(*dtypes):
        return [False] * len(tree.leaves(params))
    flags = mask_leaves(quantisable if mask is None else mask, params)
    rows = zip(tree.paths(params), tree.leaves(params), flags, strict=True)
    raise_problems(
        "moments in 8 bits cannot be sharded like this",
        [
            Problem(path, f"a shard of shape {tuple(p.shape)}", f"a last dim of blocks of {BLOCK}")
            for path, p, flag in rows
            if flag and (not p.dim() or p.shape[-1] % BLOCK)
        ],
    )
    return flags


def _zeros(param: torch.Tensor, flag: bool, dtype: MomentDtype, signed: bool) -> Any:
    if not isinstance(dtype, str):
        if param.is_meta:  # for which zeros_like would import sympy, a third of a second
            return param.new_zeros(param.shape, dtype=dtype)
        return torch.zeros_like(param, dtype=dtype)
    wide = torch.promote_types(param.dtype, torch.float32)
    zeros = torch.zeros_like(param, dtype=wide)
    return quantise(zeros, signed=signed, coding=dtype) if flag else zeros


def _read(moment: Any, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
    if isinstance(moment, Quantised):
        return dequantise(moment, signed=signed, dtype=dtype)
    return moment.to(dtype)


def _like(value: torch.Tensor, before: Any, *, signed: bool) -> Any:
    if isinstance(before, Quantised):
        return quantise(value, signed=signed, coding=coding_of(before.codes.dtype))
    return value.to(before.dtype)


def _columns(grads, adam: ScaleByAdamState, params) -> list[list[torch.Tensor]]:
    """The leaves of params, grads, mu and nu, in the order of params."""
    rest = ((grads, "grads"), (adam.mu, "the state's mu"), (adam.nu, "the state's nu"))
    return [
        tree.leaves(params),
        *(tree.same_structure(params, part, names=("params", name)) for part, name in rest),
    ]


def _batched(*scalars: float | torch.Tensor | None) -> bool:
    return any(isinstance(x, torch.Tensor) and compat.is_wrapped(x) for x in scalars)


def _differentiated(columns: list[list]) -> bool:
    """Whether somebody differentiates through a step that overwrites nothing (`purely`).

    The kernel has no rule for that.
    """
    if not purely():
        return False
    return compat.differentiating() or any(
        compat.requires_grad(leaf) for column in columns for leaf in column
    )


def _quantised(columns: list[list]) -> bool:
    return any(isinstance(leaf, Quantised) for column in columns for leaf in column)


def _one_pass(kernels: Kernels, columns: list[list]) -> bool:
    """Whether the kernel is to compute the step of these leaves."""
    leaves = list(itertools.chain(*columns))
    return bool(leaves) and not _quantised(columns) and kernels.takes("adamw", *leaves)


def _fusable(columns: list[list], count: torch.Tensor, rate: float | torch.Tensor) -> bool:
    """Whether one fused call per dtype computes the step: one count, one rate, equal dtypes."""
    if _batched(count, rate) or _quantised(columns):
        return False
    dtypes = [[leaf.dtype for leaf in column] for column in columns]
    return set(dtypes[0]) <= _FUSABLE and all(column == dtypes[0] for column in dtypes)


def _fused(steps: torch.Tensor, rate: float | torch.Tensor, b1, b2, eps, weight_decay) -> Callable:
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        rate = rate.to(torch.float32)  # what the CUDA kernel reads

    def kernel(params, mu, nu, grads):
        local = steps.to(params[0].device)
        torch._fused_adamw_(
            params, grads, mu, nu, [], [local] * len(params), lr=rate, beta1=b1, beta2=b2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    return kernel


def _by_kernel_(
    params: tree.Tree,
    adam: ScaleByAdamState,
    columns: Sequence[Sequence[torch.Tensor]],
    decays: Sequence[float],
    fusion: Fusion,
    count: torch.Tensor,
    rate: float | torch.Tensor,
    numbers: Mapping[str, float],
) -> tuple[tree.Tree, tree.Tree, tree.Tree, tree.Tree]:
    """Overwrites parameters, moments and masters, and returns them, by `functron.ops.adamw`.

    Args:
        params: the parameters.
        adam: whose moments are theirs.
        columns: the leaves of parameters, gradients, first and second moments.
        decays: the weight decay of each leaf.
        fusion: the work of other transformations; roundings are of elements in memory's order.
        count: of updates, this one included; int64, 0-dim.
        rate: the learning rate.
        numbers: b1, b2 and eps.
    """
    paths = tree.paths(params)
    own, roundings = _beside(params, fusion)
    rows = list(zip(*columns, own, strict=True))

    def kind(i: int) -> Any:  # what one call can have
        return decays[i], own[i] is None, None if roundings[i] is None else i

    def kernel(decay: float, rounding: Any) -> Callable:
        def fn(ps, mu, nu, *rest):
            *masters, grads = rest
            device = ps[0].device
            real = torch.float64 if ps[0].dtype == torch.float64 else torch.float32
            clip = None if fusion.factor is None else _scalar(fusion.factor, real, device)
            scalars = {"count": count.to(device), "rate": _scalar(rate, real, device), "clip": clip}
            for row in zip(ps, grads, mu, nu, *masters, strict=True):
                master = row[4] if masters else None
                adamw_(
                    *row[:4], **scalars, **numbers, weight_decay=decay, master=master,
                    rounding=rounding,
                )  # fmt: skip

        return fn

    for _, group in itertools.groupby(sorted(range(len(decays)), key=lambda i: str(kind(i))), kind):
        chosen = list(group)
        ps, gs, mu, nu, ms = map(list, zip(*(rows[i] for i in chosen), strict=True))
        first = chosen[0]
        mutated = {"parameters": ps, "first moments": mu, "second moments": nu}
        if own[first] is not None:
            mutated["masters"] = ms
        foreach_(
            kernel(decays[first], roundings[first]),
            mutated,
            {"gradients": gs},
            paths=lambda chosen=chosen: [paths[i] for i in chosen],
            dense=True,
        )
    return params, adam.mu, adam.nu, fusion.masters


def _by_kernel(
    params: tree.Tree,
    adam: ScaleByAdamState,
    columns: Sequence[Sequence[torch.Tensor]],
    decays: Sequence[float],
    fusion: Fusion,
    count: torch.Tensor,
    rate: float | torch.Tensor,
    numbers: Mapping[str, Any],
) -> tuple[tree.Tree, tree.Tree, tree.Tree, tree.Tree]:
    """`_by_kernel_` of a traced program: one operation per leaf, and new values."""
    scalars: dict[tuple, dict[str, torch.Tensor | None]] = {}

    def scalars_of(leaf: torch.Tensor) -> dict[str, Any]:
        real = torch.float64 if leaf.dtype == torch.float64 else torch.float32
        if (leaf.device, real) not in scalars:
            clip = None if fusion.factor is None else _scalar(fusion.factor, real, leaf.device)
            made = {"rate": _scalar(rate, real, leaf.device), "clip": clip}
            scalars[leaf.device, real] = {"count": count.to(leaf.device), **made}
        return scalars[leaf.device, real]

    rows = zip(*columns, *_beside(params, fusion), decays, strict=True)
    found = [
        adamw_op(
            p, g, mu, nu, **scalars_of(p), **numbers, master=master, rounding=rounding,
            weight_decay=decay,
        )
        for p, g, mu, nu, master, rounding, decay in rows
    ]  # fmt: skip
    structure = tree.structure(params)
    new, masters, mu, nu = (
        tree.unflatten(structure, list(column)) for column in zip(*found, strict=True)
    )
    return new, mu, nu, masters


def _beside(params: tree.Tree, fusion: Fusion) -> tuple[list, list]:
    """Of each parameter its master and its rounding; None where there is none."""
    structure = tree.structure(params)
    none = [None] * len(tree.leaves(params))
    masters, rounding = (
        none if part is None else structure.flatten_up_to(part)
        for part in (fusion.masters, fusion.rounding)
    )
    return masters, rounding


def _scalar(value: float | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)
