"""Adam and AdamW, in Optax's terms; their `step_` runs fused over all leaves.

The kernel is torch's, or on a GPU that of `functron.ops.adamw` (`fused_adamw_`): one pass over
memory, one operation per leaf in a traced program. `in_one_pass` lets that pass also compute
clipping, ZeRO, and masters or stochastic rounding, as `make_optimizer` chains them around AdamW,
with the same state and numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems
from functron.ops.adamw import AdamwNumbers, adamw_
from functron.ops.adamw import adamw as adamw_op
from functron.ops.foreach import foreach_
from functron.ops.operations import AUTO, Kernels
from functron.optim.low_precision import (
    BLOCK,
    Coding,
    MastersState,
    QuantisedMoment,
    StochasticState,
    coding_of,
    dequantise,
    is_low,
    kernel_roundings,
    quantisable,
    quantise,
)
from functron.optim.masking import Mask, decoupled, mask_leaves
from functron.optim.norms import find_norm, norm_scale
from functron.optim.schedules import (
    LearningRate,
    ScaleByScheduleState,
    increment_,
    incremented,
    new_count,
    rate_and_count,
)
from functron.optim.transformation import (
    GradientTransformation,
    Norm,
    keep_dtypes,
    keep_specs,
    map_to_trees,
    purely,
    transformation,
    with_step,
)
from functron.optim.zero import join_parts_, take_parts
from functron.spmd.spec import P

MomentDtype = torch.dtype | Coding | None
"""How a moment is stored: None as the parameter is, "int8" and "fp8" in blocks of 8 bits."""

_FUSABLE = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


class ScaleByAdamState(NamedTuple):
    """Adam's moments.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients, like the parameters; of those that are quantised a
            `QuantisedMoment` each.
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
        b1, b2: decays of the means of gradients and of squared gradients, per update.
        eps: added to the root, as in torch; Optax's `eps`, not its ``eps_root``.
        mu_dtype, nu_dtype: how `mu` and `nu` are stored: torch.float32, torch.bfloat16, "int8" or
            "fp8" (`quantise`), or None: in each parameter's dtype. The arithmetic is float32 at
            least; the state is rounded once per update, after its use.
        quantised: the leaves that "int8" and "fp8" apply to, a mask such as `quantisable(defs)`
            gives from global shapes; other leaves are float32. None: by the shapes seen, on one
            rank; needed on any other mesh.

    Raises:
        ValueError: (when called) a shard of a quantised leaf ends within a block.
    """

    def init(params):
        flags = _quantised_leaves(quantised, params, (mu_dtype, nu_dtype))

        def zeros(dtype: MomentDtype, *, signed: bool):
            make = functools.partial(_zeros, dtype=dtype, signed=signed)
            return tree.map_columns(make, params, flags)

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

        parts = (tree.same_structure(updates, part) for part in (state.mu, state.nu))
        out, mu, nu = map_to_trees(3, one, updates, *parts)
        return out, ScaleByAdamState(count, mu, nu)

    return transformation(
        init,
        update,
        specs=lambda param_specs: ScaleByAdamState(P(), param_specs, param_specs),
        elementwise=not _any_coded(mu_dtype, nu_dtype),
    )._replace(bind=keep_specs)  # blocks of 8-bit moments are a shard's own: see check_blocks


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

    ``chain(scale_by_adam(...), add_decayed_weights(...), scale_by_learning_rate(...))``. On a GPU
    `step_` is one pass of functron's kernel (`functron.ops.adamw`) for all dtypes but 8-bit
    moments, also in traced and compiled programs. Elsewhere it is `torch._fused_adamw_` in place,
    one call for all leaves of a dtype (two when `mask` splits them), or, where dtypes differ or a
    vmap batches the learning rate, `update` and `apply_updates_`. No collectives.

    Args:
        learning_rate: a number, or a schedule: a function of the count of updates so far.
        b1, b2, eps, mu_dtype, nu_dtype, quantised: see `scale_by_adam`.
        weight_decay, mask: see `add_decayed_weights`; the decay is multiplied by the learning rate.
        kernels: whether the kernel of "adamw" is used; see `functron.ops.use`.
    """
    how: Any = {"mu_dtype": mu_dtype, "nu_dtype": nu_dtype, "quantised": quantised}
    direction = scale_by_adam(b1, b2, eps, **how)
    plain = decoupled(direction, learning_rate, weight_decay, mask)

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
            fused = _make_fused_step(steps, rate, b1, b2, eps, weight_decay if decayed else 0.0)
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

    rule = AdamwRule(learning_rate, b1, b2, eps, weight_decay, mask, kernels)
    return in_one_pass(with_step(plain, step_), rule)._replace(bind=keep_specs)


class AdamwRule(NamedTuple):
    """The numbers of an AdamW, arguments of `adamw`."""

    learning_rate: LearningRate
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Mask
    kernels: Kernels


def in_one_pass(
    composed: GradientTransformation,
    rule: AdamwRule,
    *,
    max_norm: float = 0.0,
    specs: tree.Tree = None,
    copies: tree.Tree = 1,
    shards: tree.Tree = None,
    defs: tree.Tree = None,
    widens: bool = False,
) -> GradientTransformation:
    """AdamW and the transformations around it, whose `step_` is one pass over memory by the kernel.

    ``chain(clip_by_global_norm(max_norm), zero(with_fp32_masters(adamw(...))))``, or stochastic
    rounding in place of masters, or parts of that. Where the kernel cannot compute it (on CPUs, or
    if a vmap batches learning rates or counts), `step_` is that of `composed`. No collectives
    beyond those of clipping and `zero`.

    Args:
        composed: the transformations themselves, in this order; the state is theirs.
        rule: the hyperparameters of AdamW.
        max_norm: that of clipping; 0: `composed` does not clip.
        specs, copies: as in `clip_by_global_norm`; None: from `bind`.
        shards: as in `zero`; None: without it.
        defs: as in `with_stochastic_rounding`.
        widens: `composed` as well is to take gradients in low precision for float32 ones, as the
            kernel does.
    """
    seen = specs if shards is None else shards

    def wide(grads, extra):
        """Float32 gradients, and their norm, if it is known of these."""
        if not widens or not any(map(is_low, tree.leaves(grads))):
            return grads, extra
        norm, own = extra.get("norm"), tree.map(lambda g: g.float() if is_low(g) else g, grads)
        known = norm.known_of(grads) if isinstance(norm, Norm) else norm
        return own, extra | ({"norm": Norm.taken(known, own)} if known is not None else {})

    @functools.wraps(composed.update)
    def update(updates, state, params=None, **extra):
        updates, extra = wide(updates, extra)
        return composed.update(updates, state, params, **extra)

    def by_parts(grads, state, params, extra):
        grads, extra = wide(grads, extra)
        return composed.step_(grads, state, params, **extra)

    def step_(grads, state, params, **extra):
        if max_norm and len(state) != 2:
            return by_parts(grads, state, params, extra)  # which says what is wrong
        *before, around = state if max_norm else (state,)
        rounds = isinstance(around, StochasticState)
        adam, decay, schedule = getattr(around, "inner", around)
        if not _takes(rule.kernels, _columns(grads, adam, params)):
            return by_parts(grads, state, params, extra)
        factor = rounding = None
        if max_norm:
            norm = find_norm(grads, extra.get("norm"), seen, copies, kernels=rule.kernels)
            extra["norm"], factor = norm, norm_scale(norm, max_norm)
        mine = params if shards is None else take_parts(params, specs, shards)
        if rounds:
            rounding = kernel_roundings(around.key, mine, defs, seen)
        rate, count = rate_and_count(rule.learning_rate, schedule)
        cannot = _is_differentiated(_columns(grads, adam, mine)) or (rounds and rounding is None)
        if cannot or _is_batched(adam.count, rate, factor):
            return by_parts(grads, state, params, extra)
        decays = [rule.weight_decay if flag else 0.0 for flag in mask_leaves(rule.mask, mine)]
        steps, *later = incremented([adam.count] if count is None else [adam.count, count])
        mine, mu, nu, masters = fused_adamw_(
            mine, grads, adam.mu, adam.nu, count=steps, rate=rate, rule=rule, decays=decays,
            factor=factor, masters=around.masters if isinstance(around, MastersState) else None,
            rounding=rounding,
        )  # fmt: skip
        schedule = ScaleByScheduleState(*later) if later else schedule
        new: Any = (ScaleByAdamState(steps, mu, nu), decay, schedule)
        if rounds:
            new = StochasticState(around.key, incremented([around.count])[0], new)
        elif isinstance(around, MastersState):
            new = MastersState(masters, new)
        params = mine if shards is None else join_parts_(mine, params, specs, shards)
        return params, keep_dtypes((*before, new) if before else new, state)

    def bind(known, counts):
        bound = composed.bind(known, counts)
        if bound is composed and specs is not None:
            return None
        given = (known, counts) if specs is None else (specs, copies)
        return in_one_pass(
            bound, rule, max_norm=max_norm, specs=given[0], copies=given[1], shards=shards,
            defs=defs, widens=widens,
        )  # fmt: skip

    return composed._replace(update=update, step_=step_, bind=bind, widens=widens)


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
    if isinstance(moment, QuantisedMoment):
        return dequantise(moment, signed=signed, dtype=dtype)
    return moment.to(dtype)


def _like(value: torch.Tensor, before: Any, *, signed: bool) -> Any:
    if isinstance(before, QuantisedMoment):
        return quantise(value, signed=signed, coding=coding_of(before.codes.dtype))
    return value.to(before.dtype)


def _columns(grads, adam: ScaleByAdamState, params) -> list[list[torch.Tensor]]:
    """The leaves of params, grads, mu and nu, in the order of params."""
    rest = ((grads, "grads"), (adam.mu, "the state's mu"), (adam.nu, "the state's nu"))
    return [
        tree.leaves(params),
        *(tree.same_structure(params, part, names=("params", name)) for part, name in rest),
    ]


def _is_batched(*scalars: float | torch.Tensor | None) -> bool:
    return any(isinstance(x, torch.Tensor) and compat.is_wrapped(x) for x in scalars)


def _is_differentiated(columns: list[list]) -> bool:
    """Whether somebody differentiates through a step that overwrites nothing (`purely`).

    The kernel has no rule for that.
    """
    if not purely():
        return False
    return compat.differentiating() or any(
        compat.requires_grad(leaf) for column in columns for leaf in column
    )


def _is_quantised(columns: list[list]) -> bool:
    return any(isinstance(leaf, QuantisedMoment) for column in columns for leaf in column)


def _takes(kernels: Kernels, columns: list[list]) -> bool:
    """Whether the kernel is to compute the step of these leaves."""
    leaves = list(itertools.chain(*columns))
    return bool(leaves) and not _is_quantised(columns) and kernels.takes("adamw", *leaves)


def _fusable(columns: list[list], count: torch.Tensor, rate: float | torch.Tensor) -> bool:
    """Whether one fused call per dtype computes the step: one count, one rate, equal dtypes."""
    if _is_batched(count, rate) or _is_quantised(columns):
        return False
    dtypes = [[leaf.dtype for leaf in column] for column in columns]
    return set(dtypes[0]) <= _FUSABLE and all(column == dtypes[0] for column in dtypes)


def _make_fused_step(
    steps: torch.Tensor, rate: float | torch.Tensor, b1, b2, eps, weight_decay
) -> Callable:
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        rate = rate.to(torch.float32)  # what the CUDA kernel reads

    def kernel(params, mu, nu, grads):
        local = steps.to(params[0].device)
        torch._fused_adamw_(
            params, grads, mu, nu, [], [local] * len(params), lr=rate, beta1=b1, beta2=b2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    return kernel


def fused_adamw_(
    params: tree.Tree,
    grads: tree.Tree,
    mu: tree.Tree,
    nu: tree.Tree,
    *,
    count: torch.Tensor,
    rate: float | torch.Tensor,
    rule: AdamwRule,
    decays: Sequence[float],
    factor: torch.Tensor | None = None,
    masters: tree.Tree = None,
    rounding: tree.Tree = None,
) -> tuple[tree.Tree, tree.Tree, tree.Tree, tree.Tree]:
    """Clipping, AdamW on masters and rounding, in one pass over memory: `functron.ops.adamw`.

    Overwrites parameters, moments and masters, and returns them; a traced program has one operation
    per leaf, and new values.

    Args:
        params, grads, mu, nu: of the same structure.
        count: of updates, this one included; int64, 0-dim.
        rate: the learning rate of this update.
        rule: the other hyperparameters.
        decays: the weight decay of each leaf.
        factor: gradients are multiplied by it first, 0-dim; None: 1.
        masters: float32 copies, which are updated and then rounded to the parameters; None, as a
            whole or for some leaves: there are none.
        rounding: an `ops.adamw.Stochastic` per parameter; None: to nearest.
    """
    columns = [tree.leaves(x) for x in (params, grads, mu, nu)]
    structure, none = tree.structure(params), [None] * len(columns[0])
    own, hows = (none if x is None else structure.flatten_up_to(x) for x in (masters, rounding))
    rows = list(zip(*columns, own, hows, decays, strict=True))
    known: dict[tuple, AdamwNumbers] = {}

    def numbers(leaf: torch.Tensor) -> AdamwNumbers:
        place = leaf.device, torch.float64 if leaf.dtype == torch.float64 else torch.float32
        if place not in known:
            clip = None if factor is None else _scalar(factor, *place)
            own = rule.b1, rule.b2, rule.eps, clip
            known[place] = AdamwNumbers(count.to(leaf.device), _scalar(rate, *place), *own)
        return known[place]

    if not purely():
        _by_kernel_(rows, numbers, tree.paths(params))
        return params, mu, nu, masters
    found = [
        adamw_op(*row, numbers=numbers(row[0]), weight_decay=decay, master=master, rounding=how)
        for *row, master, how, decay in rows
    ]
    new = [tree.unflatten(structure, list(column)) for column in zip(*found, strict=True)]
    return new[0], new[2], new[3], new[1]


def _by_kernel_(rows: list[tuple], numbers: Callable, paths: Sequence[str]) -> None:
    """The kernel on each row: a parameter, its gradient, moments, master, rounding and decay."""

    def kind(i: int) -> Any:  # what one call can have
        *_, master, how, decay = rows[i]
        return decay, master is None, None if how is None else i

    def kernel(decay: float, how: Any) -> Callable:
        def fn(params, mu, nu, *rest):
            *masters, grads = rest
            for row in zip(params, grads, mu, nu, *masters, strict=True):
                master = row[4] if masters else None
                how_much = {"numbers": numbers(row[0]), "weight_decay": decay}
                adamw_(*row[:4], **how_much, master=master, rounding=how)

        return fn

    for _, group in itertools.groupby(sorted(range(len(rows)), key=lambda i: str(kind(i))), kind):
        chosen = list(group)
        columns = map(list, zip(*(rows[i] for i in chosen), strict=True))
        params, grads, mu, nu, masters, hows, decays = columns
        mutated = {"parameters": params, "first moments": mu, "second moments": nu}
        if masters[0] is not None:
            mutated["masters"] = masters
        foreach_(
            kernel(decays[0], hows[0]),
            mutated,
            {"gradients": grads},
            paths=lambda chosen=chosen: [paths[i] for i in chosen],
            dense=True,
        )


def _scalar(value: float | torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)
