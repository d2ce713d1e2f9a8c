"""Optimizers that keep less than Adam: Adafactor, Adam-mini, Lion and SGD.

| optimizer | keeps of a matrix ``[n, m]``, besides the mean of its gradients |
|-----------|-----------------------------------------------------------------|
| Adafactor | ``n + m`` second moments, of rows and columns; the mean is optional |
| Adam-mini | one second moment a block: a head, an output neuron, a row of the vocabulary |
| Lion, SGD | nothing; SGD without momentum not even that mean |

Adafactor (Shazeer and Stern 2018), "Adaptive Learning Rates with Sublinear Memory Cost",
https://arxiv.org/abs/1804.04235, as separate transformations, like Optax's. Layers of a stack and
experts are parameters of their own. Means over sharded dims are all-reductions.

Adam-mini (Zhang et al. 2024), "Use Fewer Learning Rates To Gain More",
https://arxiv.org/abs/2406.16793: the Hessian of a transformer is nearly block-diagonal, with
similar curvature within a block: a token of an embedding, a head of queries or keys, an output
neuron of any other matrix. Each block has one second moment, the mean of its squared gradients.

Lion (Chen et al. 2023), "Symbolic Discovery of Optimization Algorithms",
https://arxiv.org/abs/2302.06675: the sign of a momentum, its only state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.ops.foreach import foreach_
from functron.optim.average import ema
from functron.optim.masking import Mask, add_decayed_weights, decoupled
from functron.optim.schedules import (
    LearningRate,
    increment_,
    new_count,
    rate_and_count,
    scale_by_learning_rate,
)
from functron.optim.transformation import (
    GradientTransformation,
    bindable,
    chain,
    identity,
    map_to_trees,
    need_params,
    scale,
    stateless,
    transformation,
    with_step,
)
from functron.optim.zero import (
    WholeLeaf,
    flat_specs,
    mean,
    num_stacked,
    root_mean_square,
    unpadded,
    wholes,
    without,
)
from functron.spmd.spec import P, is_spec


class FactoredState(NamedTuple):
    """The second moments of `scale_by_factored_rms`.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        v_row: means over the larger of two dims, of the parameters that are factored; else None.
        v_col: means over the smaller.
        v: of the parameters that are not factored, like them; else None.
    """

    count: Any
    v_row: tree.Tree
    v_col: tree.Tree
    v: tree.Tree


def factored_dims(leaf: WholeLeaf, min_dim_size: int = 128) -> tuple[int, int] | None:
    """The second largest dim of a parameter and the largest; None where that is too small.

    Stacked dims do not count. Of dims with equal sizes the later one counts as larger.
    """
    dims = sorted(leaf.own, key=lambda dim: leaf.shape[dim])
    if len(dims) < 2 or leaf.shape[dims[-2]] < min_dim_size:
        return None
    return dims[-2], dims[-1]


@public
@bindable
def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
    *,
    defs: tree.Tree = None,
    specs: tree.Tree = None,
) -> GradientTransformation:
    """Updates ``g / sqrt(V)``, where V is the outer product of row and column means of ``g^2``.

    ``r = b r + (1 - b) mean(g^2 + epsilon)`` over the columns, c likewise over the rows, ``V = r c
    / mean(r)``, with ``b = 1 - t^-decay_rate`` at update t: section 4 of the paper, and Optax's
    `scale_by_factored_rms`. Float32 at least.

    Collectives: three all-reductions for each factored leaf that is sharded (rows, columns, and one
    number per stacked matrix), over the axes that split the dims in question.

    Args:
        factored: False: no parameter is factored.
        decay_rate: the exponent by which the decay approaches 1.
        step_offset: the count at which the decay begins.
        min_dim_size_to_factor: parameters whose second largest dim is smaller have a full V.
        epsilon: added to squared gradients.
        defs: the parameters' `ParamDef`s, for global sizes and stacked dims; None: the sizes seen,
            where nothing is sharded or stacked.
        specs: how the leaves are sharded, a prefix tree; None: from `bind`.

    Raises:
        ValueError: (when called) parameters do not fit `defs` and `specs`.
    """

    def dims_of(leaf: WholeLeaf) -> tuple[int, int] | None:
        return factored_dims(leaf, min_dim_size_to_factor) if factored else None

    def init(params):
        leaves = wholes(params, defs, specs)
        parts = map_to_trees(3, _zeros, params, leaves, map(dims_of, leaves))
        return FactoredState(new_count(params), *parts)

    def update(updates, state, params=None):
        # float64, as the decay is near 1 and 1 minus it is what matters
        step = state.count.to(torch.float64) - step_offset + 1
        decay = 1 - step ** (-decay_rate)
        leaves = wholes(updates, defs, specs)
        parts = (tree.same_structure(updates, part) for part in state[1:])
        fn = functools.partial(_update_factored, decay=decay, epsilon=epsilon)
        out, *new = map_to_trees(4, fn, updates, *parts, leaves, map(dims_of, leaves))
        return out, FactoredState(state.count + 1, *new)

    def state_specs(param_specs):
        if defs is None:
            return FactoredState(P(), *[_replicate_state(param_specs)] * 3)
        leaves = [WholeLeaf(p, tuple(d.shape), num_stacked(d)) for p, d in tree.items(defs)]
        flat = flat_specs(param_specs, defs)
        parts = map_to_trees(3, _specs, defs, flat, map(dims_of, leaves))
        return FactoredState(P(), *parts)

    return transformation(init, update, state_specs)


def _replicate_state(param_specs: tree.Tree) -> tree.Tree:
    sharded = [s for s in tree.leaves(param_specs, is_spec) if any(s)]
    if sharded:
        wanted = f"the parameters' defs, for specs such as {sharded[0]}"
        refuse("adafactor cannot tell how its state is sharded", "defs", "None", wanted)
    return tree.map(lambda _: P(), param_specs, is_leaf=is_spec)


def _specs(_: Any, spec: P | None, dims: tuple[int, int] | None) -> tuple:
    if dims is None or spec is None:
        return None, None, spec
    return without(spec, [dims[1]]), without(spec, [dims[0]]), None


def _zeros(param: torch.Tensor, leaf: WholeLeaf, dims: tuple[int, int] | None) -> tuple:
    zeros = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
    if dims is None:
        return None, None, zeros
    low, high = dims  # means, as only these are the same on ranks that have parts of what is gone
    return mean(zeros, [high], leaf).squeeze(high), mean(zeros, [low], leaf).squeeze(low), None


def _update_factored(
    g: torch.Tensor, row, col, full, leaf: WholeLeaf, dims: tuple[int, int] | None, decay, epsilon
) -> tuple:
    """The update of a leaf, and its state afterwards."""
    wide = torch.promote_types(g.dtype, torch.float32)
    g32, decay = g.to(wide), decay.to(wide)
    square = g32.square()
    if dims is None:
        full = decay * full + (1 - decay) * (square + epsilon)
        return (g32 * full**-0.5).to(g.dtype), None, None, full
    low, high = dims

    def averaged(before, dim):
        now = mean(square, [dim], leaf) + epsilon
        return decay * before.unsqueeze(dim) + (1 - decay) * now

    rows, cols = averaged(row, high), averaged(col, low)
    middle = mean(unpadded(rows, low, leaf), [low], leaf)
    out = g32 * (rows / middle) ** -0.5 * cols**-0.5
    return out.to(g.dtype), rows.squeeze(high), cols.squeeze(low), None


@public
@bindable
def clip_by_block_rms(
    threshold: float, *, defs: tree.Tree = None, specs: tree.Tree = None
) -> GradientTransformation:
    """Updates ``u / max(1, rms(u) / threshold)``, parameter by parameter; Optax's.

    One all-reduce of a number per stacked matrix for every leaf that is sharded.

    Args:
        threshold: the largest root mean square.
        defs, specs: see `scale_by_factored_rms`.
    """

    def one(u: torch.Tensor, leaf: WholeLeaf) -> torch.Tensor:
        wide = u.to(torch.promote_types(u.dtype, torch.float32))
        return (wide / (root_mean_square(wide, leaf) / threshold).clamp(min=1)).to(u.dtype)

    return stateless(lambda updates, params: _map_wholes(one, defs, specs, updates))


@public
@bindable
def scale_by_param_block_rms(
    min_scale: float = 1e-3, *, defs: tree.Tree = None, specs: tree.Tree = None
) -> GradientTransformation:
    """Updates ``u max(min_scale, rms(parameter))``, parameter by parameter; Optax's.

    One all-reduce of a number per stacked matrix for every leaf that is sharded.

    Args:
        min_scale: for parameters that begin at 0.
        defs, specs: see `scale_by_factored_rms`.

    Raises:
        ValueError: (when called) no parameters given.
    """

    def one(u: torch.Tensor, p: torch.Tensor, leaf: WholeLeaf) -> torch.Tensor:
        wide = p.to(torch.promote_types(p.dtype, torch.float32))
        return (u * root_mean_square(wide, leaf).clamp(min=min_scale)).to(u.dtype)

    def run(updates, params):
        need_params("scale_by_param_block_rms", params, "whose size scales their updates")
        return _map_wholes(one, defs, specs, updates, params)

    return stateless(run)


def _map_wholes(fn, defs: tree.Tree, specs: tree.Tree, updates: tree.Tree, *rest: tree.Tree):
    """The tree of ``fn(update, ..., whole)``, with the `WholeLeaf` of each."""
    columns = (tree.same_structure(updates, part) for part in rest)
    return tree.map_columns(fn, updates, *columns, wholes(updates, defs, specs))


@public
def adafactor(
    learning_rate: LearningRate | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    *,
    weight_decay_rate: LearningRate | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask = None,
    momentum_dtype: torch.dtype = torch.float32,
    defs: tree.Tree = None,
    specs: tree.Tree = None,
) -> GradientTransformation:
    """Adafactor, with Optax's arguments and order: of matrices only row and column means are kept.

    `scale_by_factored_rms`, `clip_by_block_rms`, the learning rate, `scale_by_param_block_rms`, a
    mean of updates, and decay. Pass `relative_step` as the learning rate for the paper's.
    Collectives are those of the parts.

    Args:
        learning_rate: a number, a schedule, or None: 1.
        min_dim_size_to_factor, decay_rate, eps, factored, defs, specs: see `scale_by_factored_rms`.
        decay_offset: its `step_offset`.
        multiply_by_parameter_scale: whether the learning rate is relative to the parameter's size.
        clipping_threshold: largest root mean square of an update before the learning rate; None: no
            clipping.
        momentum: decay of a mean of the updates; None: no mean, and no memory for it.
        weight_decay_rate: a number or a schedule, times the parameters; not multiplied by the
            learning rate. None: no decay.
        weight_decay_mask: see `add_decayed_weights`.
        momentum_dtype: how the mean of updates is stored.
    """
    where = {"defs": defs, "specs": specs}
    parts = [
        scale_by_factored_rms(
            factored, decay_rate, decay_offset, min_dim_size_to_factor, eps, **where
        )
    ]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold, **where))
    if learning_rate is not None:
        parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms(**where))
    if momentum is not None:
        parts.append(ema(momentum, debias=False, dtype=momentum_dtype))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1.0))


@dataclass(frozen=True)
class MomentBlock:
    """The dims of a parameter that lie within one block.

    Attributes:
        dims: that a block spans; there is one block for each position in the others.
    """

    dims: tuple[int, ...]


def blocks(defs: tree.Tree) -> tree.Tree:
    """The `MomentBlock` of every parameter, by its logical axes: algorithm 3 of the paper.

    Tables outside of layers (embedding, unembedding, positions) have a block per row of the
    vocabulary or position; queries and keys (q or k in the path) one per head; other matrices one
    per output; parameters that do not decay (norms and biases) are one block. Layers and experts of
    a stack have blocks of their own.

    Raises:
        ValueError: queries and keys are joined with values in one parameter, whose blocks differ.
    """
    fix = "set fused_projections=False, or use another optimizer"
    raise_problems(
        "Adam-mini has no blocks for these parameters",
        [
            Problem(path, "queries, keys and values joined", "each a parameter", fix)
            for path, d in tree.items(defs)
            if not {"q", "k"}.isdisjoint(name for name, _ in d.pieces)
        ],
    )
    return tree.map_with_path(_block, defs)


def _block(path: str, d: Any) -> MomentBlock:
    first = num_stacked(d)
    own = range(first, len(d.shape))
    names = d.axes[first:]
    if not d.decay or len(own) < 2:
        kept = []
    elif "vocab" in names:
        kept = [first + names.index("vocab")]
    elif not first and names[-1] == "embed":
        kept = [0]
    elif not {"q", "k"}.isdisjoint(path.split("/")) and (heads := _heads(names)) is not None:
        kept = [first + heads]
    elif names[-1] == "embed" and names[0] != "embed":
        kept = [own[-1]]
    else:
        kept = list(own[1:])
    return MomentBlock(tuple(dim for dim in own if dim not in kept))


def _heads(names: tuple) -> int | None:
    return next((i for i, name in enumerate(names) if name in ("heads", "kv_heads")), None)


class ScaleByAdamMiniState(NamedTuple):
    """Adam-mini's moments.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients, like the parameters.
        nu: running mean of their squares' means over blocks: the parameters' dims without those.
    """

    count: Any
    mu: tree.Tree
    nu: tree.Tree


@public
@bindable
def scale_by_adam_mini(
    blocks: tree.Tree,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    mu_dtype: torch.dtype | None = None,
    defs: tree.Tree = None,
    specs: tree.Tree = None,
) -> GradientTransformation:
    """Updates ``mu_hat / (sqrt(nu_hat) + eps)``, with ``nu = b2 nu + (1 - b2) mean(g^2)`` by block.

    Algorithm 1 of the paper: Adam's bias corrections; eps after the root. nu is float32 at least.

    Collectives: one all-reduce of nu for each leaf whose blocks are sharded, over those axes.

    Args:
        blocks: a `MomentBlock` for every leaf, a prefix tree; see `blocks`.
        b1, b2, eps: as in `scale_by_adam`.
        mu_dtype: how mu is stored; None: as the parameter is.
        defs, specs: as in `scale_by_factored_rms`.

    Raises:
        ValueError: (when called) parameters do not fit `defs` and `specs`.
    """

    def blocks_of(value: tree.Tree) -> list[MomentBlock]:
        return tree.broadcast_prefix(blocks, value, what="blocks", wanted="a Block")

    def init(params):
        def start(p: torch.Tensor, block: MomentBlock, leaf: WholeLeaf) -> torch.Tensor:
            # means, as only these are the same on ranks that have parts of a block
            return _first(mean(torch.zeros_like(p, dtype=_wide(p)), block.dims, leaf), block.dims)

        nu = tree.map_columns(start, params, blocks_of(params), wholes(params, defs, specs))
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        return ScaleByAdamMiniState(new_count(params), mu, nu)

    def update(updates, state, params=None):
        count = state.count + 1
        steps = count.to(torch.float64)  # for 1 - b2 loses digits, as in scale_by_adam
        bias1, bias2 = 1 - b1**steps, 1 - b2**steps

        def one(g, mu, nu, block: MomentBlock, leaf: WholeLeaf):
            g32 = g.to(_wide(g))
            m = b1 * mu.to(g32.dtype) + (1 - b1) * g32
            now = mean(g32.square(), block.dims, leaf)
            v = b2 * nu.reshape(now.shape) + (1 - b2) * now
            out = (m / bias1.to(m.dtype)) / ((v / bias2.to(v.dtype)).sqrt() + eps)
            return out.to(g.dtype), m.to(mu.dtype), _first(v, block.dims)

        parts = (tree.same_structure(updates, part) for part in (state.mu, state.nu))
        facts = blocks_of(updates), wholes(updates, defs, specs)
        out, mu, nu = map_to_trees(3, one, updates, *parts, *facts)
        return out, ScaleByAdamMiniState(count, mu, nu)

    def state_specs(param_specs):
        def of_means(block: MomentBlock, spec: P | None) -> P | None:
            return None if spec is None else without(spec, block.dims)

        nu = tree.map_columns(of_means, blocks, flat_specs(param_specs, blocks))
        return ScaleByAdamMiniState(P(), param_specs, nu)

    return transformation(init, update, state_specs)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _first(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """x without these dims: what is at their first position."""
    for dim in sorted(dims, reverse=True):
        x = x.select(dim, 0)
    return x.clone() if dims else x


@public
def adam_mini(
    learning_rate: LearningRate,
    blocks: tree.Tree,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Mask = None,
    *,
    mu_dtype: torch.dtype | None = None,
    defs: tree.Tree = None,
    specs: tree.Tree = None,
) -> GradientTransformation:
    """Adam-mini with decoupled weight decay: AdamW's rates and decays at half of its memory.

    Args:
        learning_rate, weight_decay, mask: as of `adamw`.
        blocks, b1, b2, eps, mu_dtype, defs, specs: see `scale_by_adam_mini`.
    """
    direction = scale_by_adam_mini(blocks, b1, b2, eps, mu_dtype=mu_dtype, defs=defs, specs=specs)
    return decoupled(direction, learning_rate, weight_decay, mask)


class ScaleByLionState(NamedTuple):
    """Lion's momentum.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients, like the parameters.
    """

    count: Any
    mu: tree.Tree


@public
def scale_by_lion(
    b1: float = 0.9, b2: float = 0.99, *, mu_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Updates ``sign(b1 mu + (1 - b1) g)``, and then ``mu = b2 mu + (1 - b2) g``.

    Algorithm 2 of the paper; Optax's `scale_by_lion`. With donated updates it needs no more memory
    than gradients and momentum. Elementwise, so no collectives.

    Args:
        b1: weight of the momentum in the update.
        b2: decay of the momentum, per update.
        mu_dtype: how it is stored; None: as the parameter is.
    """

    def init(params):
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        return ScaleByLionState(new_count(params), mu)

    def combine_(momenta: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        ahead = torch._foreach_mul(gradients, 1 - b1)
        torch._foreach_add_(ahead, torch._foreach_mul(momenta, b1))
        torch._foreach_mul_(momenta, b2)
        torch._foreach_mul_(gradients, 1 - b2)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_copy_(gradients, torch._foreach_sign(ahead))

    def update(updates, state, params=None, *, donated=False):
        momenta = tree.same_structure(updates, state.mu, names=("updates", "the state's mu"))
        gradients = tree.leaves(updates)
        if donated and all(g.dtype == m.dtype for g, m in zip(gradients, momenta, strict=True)):
            columns = {"momenta": momenta, "gradients": gradients}
            foreach_(combine_, columns, paths=lambda: tree.paths(updates))
            increment_([state.count])
            return updates, state
        out = tree.map(lambda g, m: ((1 - b1) * g + b1 * m).sign().to(g.dtype), updates, state.mu)
        mu = tree.map(lambda g, m: ((1 - b2) * g + b2 * m).to(m.dtype), updates, state.mu)
        return out, ScaleByLionState(state.count + 1, mu)

    return transformation(
        init,
        update,
        specs=lambda param_specs: ScaleByLionState(P(), param_specs),
        elementwise=True,
    )


@public
def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 1e-3,
    mask: Mask = None,
    mu_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay, with Optax's argument names, defaults and state layout.

    Half of AdamW's memory. The authors use a learning rate 3 to 10 times smaller than AdamW's, and
    a weight decay larger by the same factor.

    Args:
        learning_rate, weight_decay, mask: as of `adamw`.
        b1, b2, mu_dtype: see `scale_by_lion`.
    """
    direction = scale_by_lion(b1, b2, mu_dtype=mu_dtype)
    return decoupled(direction, learning_rate, weight_decay, mask)


class TraceState(NamedTuple):
    """Accumulated momentum.

    Attributes:
        trace: ``g + decay * previous trace``, like the parameters.
    """

    trace: tree.Tree


@public
def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Momentum: the updates become ``t = g + decay * t``, or ``g + decay * t`` of that (Nesterov).

    Optax's `trace`; torch's momentum without dampening.
    """

    def update(updates, state, params=None):
        new = tree.map(lambda g, t: g + decay * t, updates, state.trace)
        out = tree.map(lambda g, t: g + decay * t, updates, new) if nesterov else new
        return out, TraceState(new)

    return transformation(
        init=lambda params: TraceState(tree.map(torch.zeros_like, params)),
        update=update,
        specs=lambda param_specs: TraceState(param_specs),
        elementwise=True,
    )


@public
def sgd(
    learning_rate: LearningRate, momentum: float | None = None, nesterov: bool = False
) -> GradientTransformation:
    """SGD: ``chain(trace(momentum, nesterov), scale_by_learning_rate(learning_rate))``, as Optax's.

    `step_` is a few multi-tensor kernels in place, with the gradients as scratch. (Not
    `torch._fused_sgd_`: its CPU kernel gives wrong values in bfloat16 on torch 2.13.) No
    collectives.

    Args:
        learning_rate: a number, or a schedule: a function of the count of updates so far.
        momentum: decay of the trace; None: no momentum and no state for it.
        nesterov: look ahead by one more momentum step.

    Raises:
        ValueError: `nesterov` without momentum.
    """
    if nesterov and not momentum:
        refuse("sgd", "nesterov", "True with momentum=None", "a momentum", "pass momentum=0.9")
    first = identity() if momentum is None else trace(momentum, nesterov)
    plain = chain(first, scale_by_learning_rate(learning_rate))

    def step_(grads, state, params):
        momentum_state, schedule = state
        rate, count = rate_and_count(learning_rate, schedule)
        if isinstance(rate, torch.Tensor) and compat.is_wrapped(rate):
            return plain.step_(grads, state, params)
        traces = momentum_state.trace if momentum is not None else None
        _descend_(grads, traces, params, rate, momentum, nesterov)
        increment_([] if count is None else [count])
        return params, (momentum_state, schedule)

    return with_step(plain, step_)


@public
def sign_sgd(learning_rate: float) -> GradientTransformation:
    """``params - learning_rate sign(gradient)``: every element moves by the same length.

    Bernstein et al. 2018; Optax's `sign_sgd`. The biases that balance the load of experts without a
    loss are updated so (DeepSeek-V3, section 2.1.2). For small tensors: nothing is fused.
    """
    return stateless(
        lambda updates, params: tree.map(lambda g: -learning_rate * g.sign(), updates),
        elementwise=True,
    )


def _descend_(grads, traces, params, rate, momentum, nesterov) -> None:
    def descend(ps, gs):
        factor = -rate.to(gs[0].device) if isinstance(rate, torch.Tensor) else -rate
        torch._foreach_mul_(gs, factor)
        torch._foreach_add_(ps, gs)

    def with_momentum(ps, gs, ts):
        torch._foreach_mul_(ts, momentum)
        torch._foreach_add_(ts, gs)
        if nesterov:
            torch._foreach_add_(gs, ts, alpha=momentum)
        else:
            torch._foreach_copy_(gs, ts)
        descend(ps, gs)

    columns = {
        "parameters": tree.leaves(params),
        "gradients": tree.same_structure(params, grads, names=("params", "grads")),
    }
    if traces is None:
        foreach_(descend, columns, paths=lambda: tree.paths(params))
        return
    columns["traces"] = tree.same_structure(params, traces, names=("params", "the state's trace"))
    foreach_(with_momentum, columns, paths=lambda: tree.paths(params))
