"""Predicting tokens further ahead: the modules of DeepSeek-V3 around blocks of the model."""

from __future__ import annotations

from collections.abc import Callable

from functron import nn, params, random, tree
from functron.models.block import How, Routed, block, block_defs
from functron.models.config import GPTConfig
from functron.models.sequence import Sequence
from functron.typing import Float, Tensor


def ahead_defs(config: GPTConfig) -> dict:
    """Defs of all modules, stacked: those of `nn.multi_token_defs`, and a block."""
    norms = {"kind": config.norm, "zero_centered": config.zero_centered_norm}
    stddev, dtype = config.init_stddev, config.torch_dtype
    module = nn.multi_token_defs(config.embed_dim, stddev=stddev, dtype=dtype, **norms)
    module["block"] = block_defs(config, experts=config.moe is not None)
    return params.stack(module, config.mtp_depth)


def predict_ahead(
    config: GPTConfig,
    weights: dict,
    x: Tensor,
    sequence: Sequence,
    how: How,
    *,
    embed: Callable,
    head: Callable,
) -> tuple[Float[Tensor, " depth"], list[Routed]]:
    """The sums of the losses of each module over this rank's targets, and what their routers say.

    Args:
        config: the architecture.
        weights: this rank's part of `ahead_defs`.
        x: the residual stream after all layers.
        sequence: the rank's tokens.
        how: the settings of the model.
        embed: ``tokens -> stream``: the model's embedding.
        head: ``(stream, targets) -> losses``: the model's unembedding and loss.
    """
    assert sequence.targets is not None
    gather = how.gather.at("mtp").rows()
    rows = [tree.map(lambda w, k=k: w[k], weights) for k in range(config.mtp_depth)]
    without = ("embed_norm", "stream_norm", "norm") if config.norm == "bare_layer" else ()
    outer = [
        {name: {} for name in without}
        | {name: gather.at(name)(part) for name, part in row.items() if name != "block"}
        for row in rows
    ]

    def layer(depth: int, x: Tensor, tokens: Tensor, targets: Tensor) -> tuple:
        here = sequence._replace(tokens=tokens, targets=targets)
        key = how.key
        if key is not None:
            key = random.fold_in(key, config.num_layers + 1 + depth)
        return block(config, here, how, gather.at("block"))(x, (rows[depth]["block"], key, {}))

    losses, said = nn.multi_token(
        outer,
        x,
        sequence.tokens,
        sequence.targets,
        embed=embed,
        block=layer,
        head=head,
        eps=config.norm_eps,
        zero_centered=config.zero_centered_norm,
        order=how.context.order,
        segments=sequence.segments,
        positions=sequence.positions,
        kernels=how.kernels,
    )
    return losses, [each for each in said if each is not None]
