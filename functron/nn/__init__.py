"""Layers: pure functions of this rank's parameters and activations, with explicit collectives."""

from functron.nn.attention import AttentionConfig, attention_defs, causal_attention, self_attention
from functron.nn.context import context_attention
from functron.nn.dropout import dropout
from functron.nn.embedding import add_positions, embed_tokens, stream_positions
from functron.nn.linear import (
    Adapter,
    column_parallel,
    gather_sequence,
    linear_defs,
    reduce_partial,
    row_parallel,
)
from functron.nn.loss import IGNORE_INDEX, cross_entropy, linear_cross_entropy, log_softmax
from functron.nn.mla import Latents, MLAConfig, mla, mla_absorbed, mla_cache, mla_defs
from functron.nn.mlp import ACTIVATIONS, Activation, mlp, mlp_defs
from functron.nn.multi_token import Predictions, ahead, multi_token, multi_token_defs, shifted
from functron.nn.norm import NormKind, add_norm, layer_norm, norm, norm_defs, rms_norm
from functron.nn.rope import RopeScaling, apply_rope, rope_table

__all__ = [
    "ACTIVATIONS",
    "IGNORE_INDEX",
    "Activation",
    "Adapter",
    "AttentionConfig",
    "Latents",
    "MLAConfig",
    "NormKind",
    "Predictions",
    "RopeScaling",
    "add_norm",
    "add_positions",
    "ahead",
    "apply_rope",
    "attention_defs",
    "causal_attention",
    "column_parallel",
    "context_attention",
    "cross_entropy",
    "dropout",
    "embed_tokens",
    "gather_sequence",
    "layer_norm",
    "linear_cross_entropy",
    "linear_defs",
    "log_softmax",
    "mla",
    "mla_absorbed",
    "mla_cache",
    "mla_defs",
    "mlp",
    "mlp_defs",
    "multi_token",
    "multi_token_defs",
    "norm",
    "norm_defs",
    "reduce_partial",
    "rms_norm",
    "rope_table",
    "row_parallel",
    "self_attention",
    "shifted",
    "stream_positions",
]
