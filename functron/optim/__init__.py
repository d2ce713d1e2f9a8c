"""Optimizers as Optax-style gradient transformations, updating real tensors fused and in place."""

from functron.optim.adam import ScaleByAdamState, adam, adamw, scale_by_adam
from functron.optim.clip import clip, clip_by_global_norm, global_norm, norm_scale
from functron.optim.config import (
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    make_optimizer,
    make_schedule,
    optimizer_problems,
    schedule_problems,
    torch_dtype,
)
from functron.optim.learning_rate import ScaleByScheduleState, scale_by_learning_rate
from functron.optim.mask import add_decayed_weights, mask_leaves, masked, not_norm_or_bias
from functron.optim.masters import MastersState, with_fp32_masters
from functron.optim.muon import (
    Matrix,
    ScaleByMuonState,
    matrices,
    muon,
    newton_schulz,
    scale_by_muon,
)
from functron.optim.offload import offload
from functron.optim.quantise import Quantised, check_blocks, dequantise, quantisable, quantise
from functron.optim.schedules import (
    constant,
    cosine_decay,
    inverse_square_root,
    join,
    linear,
    wsd,
)
from functron.optim.sgd import TraceState, sgd, sign_sgd, trace
from functron.optim.transformation import (
    GradientTransformation,
    apply_updates,
    apply_updates_,
    chain,
    identity,
    scale,
    scale_,
    stateless,
    transformation,
)
from functron.optim.where import WhereState, where
from functron.optim.zero import padded_shapes, shard_specs, zero

__all__ = [
    "GradientTransformation",
    "MastersState",
    "Matrix",
    "MuonConfig",
    "OptimizerConfig",
    "Quantised",
    "ScaleByAdamState",
    "ScaleByMuonState",
    "ScaleByScheduleState",
    "ScheduleConfig",
    "TraceState",
    "WhereState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "apply_updates_",
    "chain",
    "check_blocks",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "dequantise",
    "global_norm",
    "identity",
    "inverse_square_root",
    "join",
    "linear",
    "make_optimizer",
    "make_schedule",
    "mask_leaves",
    "masked",
    "matrices",
    "muon",
    "newton_schulz",
    "norm_scale",
    "not_norm_or_bias",
    "offload",
    "optimizer_problems",
    "padded_shapes",
    "quantisable",
    "quantise",
    "scale",
    "scale_",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_muon",
    "schedule_problems",
    "sgd",
    "shard_specs",
    "sign_sgd",
    "stateless",
    "torch_dtype",
    "trace",
    "transformation",
    "where",
    "with_fp32_masters",
    "wsd",
    "zero",
]
