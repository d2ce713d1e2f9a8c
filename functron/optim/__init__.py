"""Optimizers as Optax-style gradient transformations, updating real tensors fused and in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.optim.adam import ScaleByAdamState, adam, adamw, scale_by_adam
    from functron.optim.average import AverageState, EmaState, averaged, ema, with_average
    from functron.optim.compact import (
        FactoredState,
        MomentBlock,
        ScaleByAdamMiniState,
        ScaleByLionState,
        TraceState,
        adafactor,
        adam_mini,
        blocks,
        clip_by_block_rms,
        lion,
        scale_by_adam_mini,
        scale_by_factored_rms,
        scale_by_lion,
        scale_by_param_block_rms,
        sgd,
        sign_sgd,
        trace,
    )
    from functron.optim.config import (
        AdafactorConfig,
        MuonConfig,
        OptimizerConfig,
        ScheduleConfig,
        SoapConfig,
        make_optimizer,
        make_schedule,
        optimizer_problems,
        schedule_problems,
        torch_dtype,
        width_multiples,
        width_problems,
    )
    from functron.optim.loss_scaling import (
        ApplyIfFiniteState,
        LimitState,
        LossScale,
        LossScaleState,
        all_finite,
        apply_if_finite,
        loss_scale,
        scaling_metrics,
        set_limit_,
        step_unless,
        unscale,
        with_limit,
        with_loss_scale,
        zero_nans,
    )
    from functron.optim.low_precision import (
        LOW_PRECISION,
        MastersState,
        QuantisedMoment,
        StochasticState,
        check_blocks,
        dequantise,
        quantisable,
        quantise,
        with_fp32_masters,
        with_stochastic_rounding,
    )
    from functron.optim.masking import (
        MultiTransformState,
        ParameterGroup,
        WhereState,
        add_decayed_weights,
        by_group,
        group_labels,
        group_problems,
        mask_leaves,
        multi_transform,
        not_norm_or_bias,
        only,
        parse_groups,
        where,
    )
    from functron.optim.muon import (
        Matrix,
        ScaleByMuonState,
        matrices,
        muon,
        newton_schulz,
        scale_by_muon,
    )
    from functron.optim.norms import (
        Layers,
        clip,
        clip_by_global_norm,
        global_norm,
        layers_of,
        norm,
        norm_scale,
        norms_by_layer,
        set_to_zero,
    )
    from functron.optim.offload import offload
    from functron.optim.schedules import (
        InjectHyperparamsState,
        RateSchedule,
        ScaleByScheduleState,
        by_samples,
        constant,
        cosine_decay,
        exponential,
        inject_hyperparams,
        inverse_square_root,
        join,
        linear,
        polynomial_decay,
        relative_step,
        rewarm,
        scale_by_learning_rate,
        weight_decay_increase,
        wsd,
    )
    from functron.optim.soap import ScaleBySoapState, scale_by_soap, soap
    from functron.optim.transformation import (
        GradientTransformation,
        Norm,
        apply_updates,
        apply_updates_,
        chain,
        identity,
        scale,
        stateless,
        transformation,
    )
    from functron.optim.zero import padded_shapes, shard_specs, zero

import_lazily(__name__)
