"""Optimizers as Optax-style gradient transformations, updating real tensors fused and in place."""

from functron.optim.adafactor import (
    FactoredState,
    adafactor,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_param_block_rms,
)
from functron.optim.adam import ScaleByAdamState, adam, adamw, scale_by_adam
from functron.optim.adam_mini import (
    Block,
    ScaleByAdamMiniState,
    adam_mini,
    blocks,
    scale_by_adam_mini,
)
from functron.optim.average import AverageState, EmaState, averaged, ema, with_average
from functron.optim.by_layer import Layers, layers_of, norms_by_layer
from functron.optim.clip import clip, clip_by_global_norm, global_norm, norm_scale
from functron.optim.config import make_optimizer, make_schedule
from functron.optim.finite import (
    ApplyIfFiniteState,
    all_finite,
    apply_if_finite,
    set_to_zero,
    zero_nans,
)
from functron.optim.groups import Group, by_group, group_labels, group_problems, parse_groups
from functron.optim.inject import InjectHyperparamsState, inject_hyperparams
from functron.optim.learning_rate import ScaleByScheduleState, scale_by_learning_rate
from functron.optim.lion import ScaleByLionState, lion, scale_by_lion
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
    exponential_decay,
    inverse_square_root,
    join,
    linear,
    polynomial_decay,
    relative_step,
    weight_decay_increase,
    wsd,
)
from functron.optim.settings import (
    AdafactorConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    SoapConfig,
    optimizer_problems,
    schedule_problems,
    torch_dtype,
)
from functron.optim.sgd import TraceState, sgd, sign_sgd, trace
from functron.optim.soap import ScaleBySoapState, scale_by_soap, soap
from functron.optim.stochastic import StochasticState, with_stochastic_rounding
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
from functron.optim.where import MultiTransformState, WhereState, multi_transform, where
from functron.optim.widths import width_multiples, width_problems
from functron.optim.zero import padded_shapes, shard_specs, zero

__all__ = [
    "AdafactorConfig",
    "ApplyIfFiniteState",
    "AverageState",
    "Block",
    "EmaState",
    "FactoredState",
    "GradientTransformation",
    "Group",
    "InjectHyperparamsState",
    "Layers",
    "MastersState",
    "Matrix",
    "MultiTransformState",
    "MuonConfig",
    "OptimizerConfig",
    "Quantised",
    "ScaleByAdamMiniState",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByMuonState",
    "ScaleByScheduleState",
    "ScaleBySoapState",
    "ScheduleConfig",
    "SoapConfig",
    "StochasticState",
    "TraceState",
    "WhereState",
    "adafactor",
    "adam",
    "adam_mini",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_if_finite",
    "apply_updates",
    "apply_updates_",
    "averaged",
    "blocks",
    "by_group",
    "chain",
    "check_blocks",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "dequantise",
    "ema",
    "exponential_decay",
    "global_norm",
    "group_labels",
    "group_problems",
    "identity",
    "inject_hyperparams",
    "inverse_square_root",
    "join",
    "layers_of",
    "linear",
    "lion",
    "make_optimizer",
    "make_schedule",
    "mask_leaves",
    "masked",
    "matrices",
    "multi_transform",
    "muon",
    "newton_schulz",
    "norm_scale",
    "norms_by_layer",
    "not_norm_or_bias",
    "offload",
    "optimizer_problems",
    "padded_shapes",
    "parse_groups",
    "polynomial_decay",
    "quantisable",
    "quantise",
    "relative_step",
    "scale",
    "scale_",
    "scale_by_adam",
    "scale_by_adam_mini",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_param_block_rms",
    "scale_by_soap",
    "schedule_problems",
    "set_to_zero",
    "sgd",
    "shard_specs",
    "sign_sgd",
    "soap",
    "stateless",
    "torch_dtype",
    "trace",
    "transformation",
    "weight_decay_increase",
    "where",
    "width_multiples",
    "width_problems",
    "with_average",
    "with_fp32_masters",
    "with_stochastic_rounding",
    "wsd",
    "zero",
    "zero_nans",
]
