"""One pre-norm transformer block: its parameters, and the per-rank program that `scan` runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from functron import nn
from functron.core import random, tree
from functron.core.errors import nearest
from functron.core.scopes import named_scope
from functron.core.typing import Key, Scalar, Tensor
from functron.models.config import GPTConfig
from functron.models.sequence import SAMPLE_AXES, Context, Sequence
from functron.nn.moe import RouterSums, moe, moe_defs
from functron.ops import AUTO, Kernels
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.transforms import Gather, policies
from functron.transforms import remat as rematerialise

Rope = tuple[Tensor, Tensor]

STREAM = P(DATA_AXES, CONTEXT_AXES)
"""The residual stream ``[batch, seq, embed]`` split by batch, and by the axes of long contexts."""
SEQUENCE_PARALLEL_STREAM = P(DATA_AXES, (*CONTEXT_AXES, "tp"))
"""The residual stream with its sequence split over the tensor-parallel ranks as well."""

WHOLE = Gather()
"""Parameters that no data axis splits: there is nothing to gather."""

RING = Context()
"""Keys and values go round, among tokens in zig-zag order."""

Remat = Literal["none", "full", "selective", "dots"]
"""What backward computes again: nothing; each block from its input; the attention core
softmax(q k^T) v alone (Korthikanti et al. 2022, section 5); all but matrix products and attention.
"""


@dataclass(frozen=True, eq=False)
class How:
    """How a decoder is run; see `gpt.forward`, `gpt.loss` and, for the last, `loss_and_details`."""

    key: Key | None = None
    stream: P = STREAM
    remat: Remat = "none"
    gather: Gather = WHOLE
    context: Context = RING
    experts: tuple[str, ...] = ("ep",)
    kernels: Kernels = AUTO
    loss_chunk_tokens: int = 0
    watch: bool = False
    axes: tuple[str, ...] = SAMPLE_AXES

    def drop(self, config: GPTConfig, sequence: Sequence, x: Tensor, key: Tensor | None) -> Tensor:
        """Dropout on the stream or on what is added to it."""
        return nn.dropout(
            x,
            key,
            rate=config.dropout,
            rows=sequence.rows,
            stream=self.stream,
            positions=sequence.slots,
        )


Details = dict[str, Any]
"""The terms of a loss, and what made them: sums over the batch of all ranks.

* ``targets``: int64, how many count;
* ``next_token``: the sum of their losses;
* ``ahead``: ``[depth]``, the sums of the losses of tokens further ahead, if any are predicted;
* ``routers``: `nn.moe.RouterSums`, a row for each layer of experts, if there are any;
* ``stream``: ``squares``, the sums over all tokens of the mean square of the residual stream after
  the embedding and after each layer, and ``count``, the number of tokens; if they were asked for.
"""


class Routed(NamedTuple):
    """What layers of experts say beside their results.

    Attributes:
        share: a scalar whose psum over data and context axes is their auxiliary loss.
        sums: this rank's statistics; of several layers, with a leading dim of them.
    """

    share: Scalar
    sums: RouterSums


class Watched(NamedTuple):
    """What layers say beside the stream, where its size is asked for.

    Attributes:
        routed: what those of experts say, if there are any.
        squares: sums over this rank's tokens of the mean square of the stream: after the embedding,
            and after each of all layers, 0 where that was not computed yet.
    """

    routed: Routed | None
    squares: Tensor


Passed = Tensor | tuple[Tensor, Routed | Watched]
"""What a stage of a pipeline hands on: the stream, and what layers have said, if they say anything.
"""


def joined(before: Routed | None, said: Routed, start: int, total: int) -> Routed:
    """What routers have said up to here, a row for each of all `total` layers of experts.

    Args:
        before: what those of the stages before have said, in such rows.
        said: what some have said, a row for each of them.
        start: which of all layers of experts is the first of these.
    """

    def placed(rows: Tensor) -> Tensor:
        after = rows.new_zeros(total - start - rows.shape[0], *rows.shape[1:])
        return torch.cat([rows.new_zeros(start, *rows.shape[1:]), rows, after])

    sums = tree.map(placed, said.sums) if said.sums.tokens.shape[0] < total else said.sums
    mine = Routed(said.share, sums)
    return mine if before is None else tree.map(torch.add, before, mine)


def block_defs(config: GPTConfig, *, experts: bool) -> dict:
    """Defs ``{"attention_norm", "attention", "mlp_norm", "mlp"}``, or "moe" for the last.

    Norms after sublayers are "attention_out_norm" and "mlp_out_norm", beside those or in their
    place; those without parameters are left out.
    """
    c, dtype = config, config.torch_dtype
    out_stddev = c.init_stddev / math.sqrt(2 * c.num_layers)
    stddevs = {"stddev": c.init_stddev, "out_stddev": out_stddev, "dtype": dtype}
    norms = {name: norm_defs(config) for name in norm_names(config)}
    block = {
        **{name: norm for name, norm in norms.items() if norm},
        "attention": nn.attention_defs(c.attention, **stddevs)
        if c.latent is None
        else nn.mla_defs(c.latent, **stddevs),
    }
    if experts:
        assert c.moe is not None
        return block | {"moe": moe_defs(c.moe, c.embed_dim, gated=c.gated, **stddevs)}
    mlp = nn.mlp_defs(c.embed_dim, c.mlp_dim, gated=c.gated, bias=c.bias, **stddevs)
    return block | {"mlp": mlp}


def norm_names(config: GPTConfig) -> tuple[str, ...]:
    """The norms of a block, by their names in the parameters, which not all kinds have."""
    places = {"before": ("",), "after": ("_out",), "both": ("", "_out")}[config.sublayer_norms]
    return tuple(f"{name}{place}_norm" for name in ("attention", "mlp") for place in places)


def norm_defs(config: GPTConfig) -> dict:
    """Defs of a norm of the stream; empty where it has no parameters."""
    c = config
    return nn.norm_defs(
        c.embed_dim, c.norm, axis="embed", dtype=c.torch_dtype, zero_centered=c.zero_centered_norm
    )


def own_norm(config: GPTConfig, weights: dict, name: str) -> dict:
    """The parameters of a norm; ``{}`` for kinds that have none."""
    return {} if config.norm == "bare_layer" else weights[name]


def norm(config: GPTConfig, weights: dict, x: Tensor, kernels: Kernels) -> Tensor:
    """A norm of the stream."""
    return nn.norm(weights, x, **_norm_settings(config, kernels))


def _norm_settings(config: GPTConfig, kernels: Kernels) -> dict:
    return {"eps": config.norm_eps, "zero_centered": config.zero_centered_norm, "kernels": kernels}


def block(config: GPTConfig, sequence: Sequence, how: How, gather: Gather) -> Callable:
    """``(x, (parameters, key, own)) -> (x, Routed or None)``: one block, for `scan`.

    Of `patterns`, "own" is the row of that layer.

    Args:
        config: the architecture; a block whose parameters have "moe" is one of experts.
        sequence: the rank's tokens.
        how: the settings of the whole model.
        gather: of one block's parameters.
    """
    _check_remat(how.remat)
    window = 0 if config.global_every else config.window  # else each row says its own
    ropes = _ropes(config, sequence, gather.compute_dtype or config.torch_dtype)
    norms = norm_names(config)

    def normed(weights: dict, name: str, x: Tensor) -> Tensor:
        return norm(config, own_norm(config, weights, name), x, how.kernels) if name in norms else x

    def layer(weights: dict, x: Tensor, key: Tensor | None, own: dict) -> Any:
        keys = (None, None, None) if key is None else random.split(key, 3).unbind(0)
        reach = own.get("window", window)
        core = sequence.core(how.context, reach, how.kernels, config.score_cap)
        core = rematerialise(core) if how.remat == "selective" else core
        check_whole(config, weights["attention"]["out"]["w"].shape[-1])
        rope = _own_rope(ropes, own)
        with named_scope("attention"):
            y = normed(weights, "attention_norm", x)
            settings = {"rope": rope, "stream": how.stream, "core": core, "kernels": how.kernels}
            if config.latent is None:
                y = nn.self_attention(weights["attention"], y, config.attention, **settings)
            else:
                y = nn.mla(weights["attention"], y, config.latent, **settings)
            y = normed(weights, "attention_out_norm", y)
            y = how.drop(config, sequence, y, keys[0])
        with named_scope("moe" if "moe" in weights else "mlp"):
            if "mlp_norm" in norms:
                settings = _norm_settings(config, how.kernels)
                y, x = nn.add_norm(own_norm(config, weights, "mlp_norm"), y, x, **settings)
            else:
                y = x = x + y
            if "moe" in weights:
                y, routed = _moe(config, weights["moe"], y, sequence, how, keys[2])
            else:
                assert config.activation != "clamped_swiglu"
                routed, settings = None, {"stream": how.stream, "kernels": how.kernels}
                y = nn.mlp(weights["mlp"], y, activation=config.activation, **settings)
            y = normed(weights, "mlp_out_norm", y)
            return x + how.drop(config, sequence, y, keys[1]), routed

    policy = {"full": policies.nothing, "dots": policies.dots}.get(how.remat, policies.everything)
    # what is recomputed is inside what is gathered: so gathering depends on parameters alone
    gathered = gather.around(rematerialise(layer, policy=policy))

    def block(x: Tensor, row: tuple) -> tuple[Tensor, Routed | None]:
        return gathered(row[0], x, *row[1:])

    return block


def _moe(
    config: GPTConfig, weights: dict, x: Tensor, sequence: Sequence, how: How, key: Tensor | None
) -> tuple[Tensor, Routed]:
    assert config.moe is not None
    tokens, targets = sequence.tokens, sequence.targets
    counted = torch.ones_like(tokens) if targets is None else (targets != nn.IGNORE_INDEX).long()
    places = sequence.slots.expand_as(tokens)
    counted, places = (nn.stream_positions(x, how.stream, each) for each in (counted, places))
    y, share, sums = moe(
        weights,
        x,
        config.moe,
        activation=config.activation,
        stream=how.stream,
        axes=how.experts,
        key=key,
        rows=sequence.rows,
        positions=places,
        counted=counted != 0,
        kernels=how.kernels,
    )
    return y, Routed(share, sums)


def patterns(config: GPTConfig, device: torch.device) -> dict[str, Tensor]:
    """In what else layers of one stack differ, a row for each of all layers.

    Returns:
        "window", int64 ``[num_layers]``, if some have one and others not; "unrotated", bool
        ``[num_layers]``, if some have no rotary positions.
    """
    found = {}
    if config.global_every:
        found["window"] = torch.tensor(config.windows, device=device)
    if config.nope_every:
        found["unrotated"] = torch.tensor(config.unrotated, device=device)
    return found


def _ropes(config: GPTConfig, sequence: Sequence, dtype: torch.dtype) -> tuple[Rope, ...]:
    """The tables of layers, and those of layers with a window if they are others."""
    if config.positions != "rope":
        return ()
    scaling, positions = config.rope_scaling, sequence.positions
    size = config.rope_head_dim if config.kv_rank else config.rotated_dims
    sections = config.rope_sections
    tables = (nn.rope_table(positions, size, config.rope_theta, scaling, dtype, sections),)
    if not config.local_rope_theta:
        return tables
    local = nn.rope_table(positions, size, config.local_rope_theta, None, dtype, sections)
    return (*tables, local) if config.global_every else (local,)


def _own_rope(ropes: tuple[Rope, ...], own: dict) -> Rope | None:
    """The tables of a layer, by its row of `patterns`."""
    if not ropes:
        return None
    cos, sin = ropes[0]
    if len(ropes) > 1 and "window" in own:
        everywhere = own["window"] == 0
        cos, sin = (torch.where(everywhere, *both) for both in zip(*ropes, strict=True))
    if "unrotated" in own:  # by no angle
        cos, sin = torch.where(own["unrotated"], 1, cos), torch.where(own["unrotated"], 0, sin)
    return cos, sin


def check_whole(config: GPTConfig, size: int) -> None:
    """Raise ValueError where a parameter with an "embed" dim of `size` has not been gathered."""
    if size != config.embed_dim:
        raise ValueError(
            f"forward: got parameters with {size} of embed_dim={config.embed_dim} on this rank; "
            "wanted all of them where they are used; fix: pass gather=ft.Gather(specs), "
            "with the specs by which they are split"
        )


def _check_remat(remat: str) -> None:
    known = get_args(Remat)
    if remat not in known:
        raise ValueError(f"forward: got remat={remat!r}; {nearest(str(remat), known)}")
