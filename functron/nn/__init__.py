"""Layers: pure functions of this rank's parameters and activations, with explicit collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.nn.attention import (
        AttentionConfig,
        RopeScaling,
        apply_rope,
        attention_defs,
        causal_attention,
        rope_table,
        self_attention,
    )
    from functron.nn.context import context_attention
    from functron.nn.layers import (
        ACTIVATIONS,
        MATMUL,
        Activation,
        Adapter,
        Matmul,
        NormKind,
        add_norm,
        add_positions,
        column_parallel,
        dropout,
        embed_tokens,
        gather_sequence,
        layer_norm,
        linear_defs,
        mlp,
        mlp_defs,
        norm,
        norm_defs,
        reduce_partial,
        rms_norm,
        row_parallel,
        stream_positions,
        xielu_defs,
    )
    from functron.nn.loss import IGNORE_INDEX, cross_entropy, linear_cross_entropy, log_softmax
    from functron.nn.mla import Latents, MLAConfig, mla, mla_absorbed, mla_cache, mla_defs
    from functron.nn.multi_token import Predictions, ahead, multi_token, multi_token_defs, shifted

import_lazily(__name__)
