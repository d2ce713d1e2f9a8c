"""A layer of experts: router, dispatch, experts, and an expert of all tokens.

Tokens and experts are split over `axes`. What the tensor-parallel axis does is then decided:

| tp is         | stream                | experts      | what happens                            |
|---------------|-----------------------|--------------|-----------------------------------------|
| not in `axes` | the same on its ranks | hidden split | each sends all tokens; one all-reduce   |
| not in `axes` | sequence split by it  | hidden split | all-gather before, reduce-scatter after |
| in `axes`     | sequence split by it  | whole        | each sends its own tokens               |

The last is Megatron's parallel folding (Liu et al. 2025): more experts apart, and no collectives
but the dispatch's. Routing is of each rank's own part of the stream in every case.
The shared expert is computed while rows are on their way to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from functron.errors import Problem, raise_problems
from functron.nn.linear import (
    SEQ_DIM,
    gather_sequence,
    linear_defs,
    reduce_partial,
    sequence_axes,
)
from functron.nn.mlp import ACTIVATIONS, Activation, mlp, mlp_defs
from functron.nn.moe.balance import auxiliary
from functron.nn.moe.capacity import capacity
from functron.nn.moe.config import MoEConfig
from functron.nn.moe.dispatch import dispatched
from functron.nn.moe.experts import ExpertActivation, expert_defs, experts
from functron.nn.moe.router import Routing, route, router_defs
from functron.nn.moe.statistics import RouterSums, statistics
from functron.ops.kernels import AUTO, Kernels
from functron.spmd import collectives as lax
from functron.spmd.spec import P, spec_axes
from functron.typing import Bool, Float, Int, Key, Scalar, Tensor


def moe_defs(
    config: MoEConfig,
    embed_dim: int,
    *,
    gated: bool,
    stddev: float,
    out_stddev: float,
    dtype: torch.dtype,
) -> dict:
    """Defs ``{"router", "experts", "shared"?, "shared_gate"?, "latent"?}`` of a layer of experts.

    Args:
        config: what kind of layer.
        embed_dim: width of the stream.
        gated: experts, and the shared one, multiply by an activated gate.
        stddev: of weights that read the stream.
        out_stddev: of weights that write to it.
        dtype: of all parameters but the router's balancing bias.
    """
    c, width = config, config.latent_dim or embed_dim
    stddevs = {"stddev": stddev, "out_stddev": out_stddev, "dtype": dtype}
    kind = {"gated": gated, "bias": c.expert_bias, **stddevs}
    defs = {
        "router": router_defs(c, embed_dim, stddev=stddev, dtype=dtype),
        "experts": expert_defs(c.num_experts, width, c.expert_dim, **kind),
    }
    if c.shared_dim:
        defs["shared"] = mlp_defs(embed_dim, c.shared_dim, **kind)
    if c.shared_gate:
        defs["shared_gate"] = linear_defs(
            (embed_dim, 1), ("embed", None), stddev=stddev, dtype=dtype
        )
    if c.latent_dim:
        down, up = (embed_dim, width), (width, embed_dim)
        defs["latent"] = {
            "down": linear_defs(down, ("embed", None), stddev=stddev, dtype=dtype),
            "up": linear_defs(up, (None, "embed"), stddev=out_stddev, dtype=dtype),
        }
    return defs


def moe(
    params: dict,
    x: Float[Tensor, "batch seq embed"],
    config: MoEConfig,
    *,
    activation: ExpertActivation,
    stream: P,
    rows: Int[Tensor, " batch"],
    positions: Int[Tensor, "batch seq"],
    counted: Bool[Tensor, "batch seq"],
    axes: tuple[str, ...] = ("ep",),
    key: Key | None = None,
    axis: str = "tp",
    kernels: Kernels = AUTO,
) -> tuple[Float[Tensor, "batch seq embed"], Scalar, RouterSums]:
    """y = sum over a token's experts of weight times expert of x, plus the shared expert of x.

    Args:
        params: this rank's part of `moe_defs`, with the logical axis "expert" split by `axes` and
            "expert_mlp" by `axis` where that is not one of them.
        x: ``[batch, seq, embed]`` with spec `stream`.
        config: what kind of layer.
        activation: see `experts`; the shared expert takes those of `nn.mlp`.
        stream: the spec of the residual stream.
        rows: int64 ``[batch]``, indices of samples in the global batch; see `route`.
        positions: int64 ``[batch, seq]``, of x's tokens; see `route`.
        counted: bool ``[batch, seq]``, x's tokens with a target; see `auxiliary`.
        axes: the mesh axes that split experts; tokens are split by each of them as well.
        key: of the router's jitter; None for none.
        axis: the tensor-parallel axis.
        kernels: those of `route`, `dispatched`, `experts` and `nn.mlp`.

    Returns:
        y: ``[batch, seq, embed]`` with spec `stream`.
        share: this rank's share of auxiliary losses; see `auxiliary`.
        sums: what routing did; see `statistics`.
        Collectives: those of `route`, `dispatched` and `auxiliary`; over `axis` those in the table
        of the module, of rows as wide as the experts' input; those of `nn.mlp` for the shared one.

    Raises:
        ValueError: an expert axis does not split tokens, or the parameters are split otherwise.
    """
    _check(params, config, stream, axes, axis)
    routing = route(
        params["router"], x, config, stream=stream, rows=rows, positions=positions, key=key,
        kernels=kernels,
    )  # fmt: skip
    narrow = x @ params["latent"]["down"]["w"] if config.latent_dim else x
    shared: list[Tensor] = []

    def meanwhile() -> None:
        if config.shared_dim:
            shared.append(_shared(params, x, activation, stream, axis, kernels))

    y = _routed(
        params["experts"], narrow, routing, config, activation, stream, axes, axis, meanwhile,
        kernels,
    )  # fmt: skip
    if config.latent_dim:
        y = y @ params["latent"]["up"]["w"]
    y = sum(shared, y)
    share = auxiliary(
        params["router"], routing, config, counted=counted, stream=stream, kernels=kernels
    )
    return y, share, statistics(routing, config, counted=counted, stream=stream)


def _routed(
    params: dict,
    x: Tensor,
    routing: Routing,
    config: MoEConfig,
    activation: ExpertActivation,
    stream: P,
    axes: tuple[str, ...],
    axis: str,
    meanwhile: Callable[[], None],
    kernels: Kernels,
) -> Tensor:
    """What the experts of each token add, weighted; with spec `stream`."""
    parts = 1 if axis in axes else lax.axis_size(axis)
    chosen = (routing.experts, routing.weights, routing.kept)
    if parts > 1:
        x = gather_sequence(x, stream, axis)
        if axis in sequence_axes(stream):
            chosen = lax.all_gather(chosen, axis, axis=SEQ_DIM, tiled=True)
    batch, seq = x.shape[:2]
    most = None
    if config.capacity_factor:
        whole = routing.experts.shape[SEQ_DIM] * lax.axis_size(sequence_axes(stream))
        most = batch * min(capacity(config, whole), seq)

    def compute(rows: Tensor, sizes: Tensor) -> Tensor:
        return experts(params, rows, sizes, activation=activation, parts=parts, kernels=kernels)

    y = dispatched(
        x.flatten(0, 1),
        *[value.flatten(0, 1) for value in chosen],
        compute=compute,
        num_experts=config.num_experts,
        axes=axes,
        kind=config.dispatch,
        per_expert=most,
        meanwhile=meanwhile,
        kernels=kernels,
    ).unflatten(0, (batch, seq))
    return reduce_partial(y, stream, axis) if parts > 1 else y


def _shared(
    params: dict, x: Tensor, activation: ExpertActivation, stream: P, axis: str, kernels: Kernels
) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"moe: got activation {activation!r} with a shared expert, which nn.mlp computes; "
            f"wanted one of {', '.join(ACTIVATIONS)}"
        )
    known = cast(Activation, activation)
    y = mlp(params["shared"], x, activation=known, stream=stream, axis=axis, kernels=kernels)
    if "shared_gate" in params:
        y = y * (x @ params["shared_gate"]["w"]).sigmoid()
    return y


def _check(params: dict, config: MoEConfig, stream: P, axes: tuple[str, ...], axis: str) -> None:
    problems = []
    for name in axes:
        if lax.axis_size(name) > 1 and name not in spec_axes(stream):
            sequence = "run with sequence parallelism" if name == axis else "split the batch by it"
            fix = f'{sequence}, or give the rule "expert" other axes'
            wanted = f"axes that split tokens; the stream is {stream}"
            problems.append(Problem("axes", repr(name), wanted, fix))
    ranks = lax.axis_size(axes)
    parts = 1 if axis in axes else lax.axis_size(axis)
    have = tuple(params["experts"]["down"]["w"].shape[:2])
    wanted = (config.num_experts // ranks, config.expert_dim // parts)
    if have != wanted and not problems:
        split = f"{wanted[0]} and {wanted[1]}: {config.num_experts} over {axes}"
        split += f", {config.expert_dim} over {(axis,) if parts > 1 else ()}"
        fix = 'let the rules split "expert" by these axes, and "expert_mlp" by '
        fix += f"{axis!r} if that is none of them"
        got = f"{have[0]} experts of width {have[1]} on this rank"
        problems.append(Problem("params/experts/down", got, split, fix))
    raise_problems("a layer of experts", problems)
