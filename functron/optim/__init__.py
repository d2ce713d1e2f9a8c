"""Optimizers as Optax-style gradient transformations, updating real tensors fused and in place."""

from functron.optim.adam import ScaleByAdamState, adam, adamw, scale_by_adam
from functron.optim.clip import clip, clip_by_global_norm, global_norm, norm_scale
from functron.optim.config import (
    OptimizerConfig,
    ScheduleConfig,
    make_optimizer,
    make_schedule,
    optimizer_problems,
    schedule_problems,
)
from functron.optim.learning_rate import ScaleByScheduleState, scale_by_learning_rate
from functron.optim.mask import add_decayed_weights, mask_leaves, not_norm_or_bias
from functron.optim.masters import MastersState, with_fp32_masters
from functron.optim.schedules import (
    constant,
    cosine_decay,
    inverse_square_root,
    join,
    linear,
    wsd,
)
from functron.optim.sgd import TraceState, sgd, trace
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
from functron.optim.zero import padded_shapes, shard_specs, zero

__all__ = [
    "GradientTransformation",
    "MastersState",
    "OptimizerConfig",
    "ScaleByAdamState",
    "ScaleByScheduleState",
    "ScheduleConfig",
    "TraceState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "apply_updates_",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "global_norm",
    "identity",
    "inverse_square_root",
    "join",
    "linear",
    "make_optimizer",
    "make_schedule",
    "mask_leaves",
    "norm_scale",
    "not_norm_or_bias",
    "optimizer_problems",
    "padded_shapes",
    "scale",
    "scale_",
    "scale_by_adam",
    "scale_by_learning_rate",
    "schedule_problems",
    "sgd",
    "shard_specs",
    "stateless",
    "trace",
    "transformation",
    "with_fp32_masters",
    "wsd",
    "zero",
]
