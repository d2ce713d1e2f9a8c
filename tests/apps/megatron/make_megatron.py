"""Checkpoints of megatron-core, in both of its layouts, and what it computes with them afterwards.

    python -m venv oracle && echo torch==2.13.0 > pins
    oracle/bin/pip install -c pins torch==2.13.0 numpy einops packaging psutil
    oracle/bin/pip install --no-deps megatron-core==0.16.1
    oracle/bin/python tests/apps/megatron/make_megatron.py make tests/apps/megatron/checkpoints
    oracle/bin/python tests/apps/megatron/make_megatron.py go-on FIXTURE CHECKPOINT OUT  # from there on
    oracle/bin/python tests/apps/megatron/make_megatron.py shared-step  # a defect that `Loader` repairs

megatron-core trains tiny models for 5 steps on a CPU (gloo, its local layers: Transformer Engine and
Apex are absent) and writes them; then it makes logits, and takes 5 further steps. `torch_dist` is
written by its own `dist_checkpointing.save`. The wheel has no `megatron.training`, whose
`save_checkpoint` writes the legacy layout: that one (``mp_rank_XX_YYY/model_optim_rng.pt`` and
``distrib_optim.pt``) is our writing of it, from the state dicts that its models and optimizers
return. So is the Namespace of arguments in both.

megatron-core names its devices "cuda" in its source. `Loader` reads the same source with "cpu".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import queue
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

STEPS, SEQ, BATCH, VOCAB = 5, 12, 4, 29
MESHES = {
    "tp2": {"tp": 2, "world": 2},
    "pp2": {"pp": 2, "world": 4, "distributed": "fully_reshardable"},
    "tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2, "world": 4},
    "ep2": {"ep": 2, "world": 2, "distributed": "fully_reshardable"},
    # the optimizer's state by buckets, as Megatron-LM writes it by default
    "tp2dp2": {"tp": 2, "world": 4, "distributed": "dp_reshardable"},
    "ep2dp2": {"ep": 2, "world": 2, "distributed": "dp_reshardable"},
}
COMMON = {
    "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
    "max_position_embeddings": 16, "init_method_std": 0.2,
}  # fmt: skip
LLAMA = {
    **COMMON, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 4,
    "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8,
    "moe_shared_expert_intermediate_size": 8, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-2,
    "moe_router_topk_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "group_query_attention": False, "num_query_groups": 4, "multi_latent_attention": True,
    "rope_type": "rope", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "norm_epsilon": 1e-6, "qk_layernorm": True,
}  # fmt: skip
AHEAD = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
KINDS = {
    "llama": LLAMA,
    "gpt2": {**COMMON, "position_embedding_type": "learned_absolute"},
    "moe": {**LLAMA, **EXPERTS},
    "mla": {**LLAMA, **EXPERTS, **LATENT, "moe_layer_freq": [0, 1, 1, 1]},
    "mtp": {**LLAMA, **AHEAD},
    # smaller ones, each for what the others have not
    "moes": {**LLAMA, **EXPERTS, "num_layers": 2},
    "bf16": {**LLAMA, "num_layers": 2, "bf16": True, "params_dtype": torch.bfloat16},
    "latent": {**LLAMA, **LATENT, "num_layers": 2},
    "aheads": {**LLAMA, **EXPERTS, **AHEAD, "num_layers": 2},
}  # fmt: skip

FIXTURES = {
    "llama": ("tp2", "pp2", "tp2pp2vpp2"),
    "gpt2": ("pp2", "tp2pp2vpp2"),
    "moe": ("tp2", "ep2", "tp2pp2vpp2"),
    "mla": ("pp2", "ep2"),
    "mtp": ("tp2",),
    "moes": ("ep2dp2",),
    "bf16": ("tp2", "tp2dp2"),
    "latent": ("tp2",),
    "aheads": ("ep2",),
}
"""Those that are made: all of them together would be large.

Latent attention is divided by tp with its sequence: otherwise megatron-core 0.16.1 adds up gradients
of `q_layernorm` that are whole on every rank, as it has to of those by head.
"""


class Loader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds megatron-core's modules, and reads their source with CPUs in the place of GPUs."""

    RULES = (
        (r"torch\.cuda\.current_device\(\)", "'cpu'"),
        (r"torch\.cuda\.(Float|Half|BFloat16)Tensor", r"torch.\1Tensor"),
        (r"device=(['\"])cuda\1", "device='cpu'"),
        (r"\.cuda\([^()]*\)", ".cpu()"),
        (r"torch\.cuda\.(empty_cache|synchronize)\(\)", "None"),
        # torch's Adam has steps among its state, which loading a checkpoint forgets
        (r"(dst_tensors\[key\]\.copy_\(tensors\[key\]\))", r"key == 'step' or \1"),
        # and gives all parameters as one tensor: each adds 1 to it in every step (see `shared_step`)
        (r"s\[\"step\"\] = step\b", 's["step"] = step.clone()'),
        # of latent attention's one rotated key a rank of tp has the gradient of its own heads: with
        # Transformer Engine's layers gathering sums them up, with local ones nothing does
        (
            r"\n( +)(if self\.config\.sequence_parallel:\n +# kv_compressed:\[s / TP, b, kv_lora_rank\])",
            r"\n\1k_pos_emb = copy_to_tensor_model_parallel_region(k_pos_emb)\n\1\2",
        ),
        (
            r"    (scatter_to_sequence_parallel_region,)\n\)",
            r"    \1\n    copy_to_tensor_model_parallel_region,\n)",
        ),
        # its norms need nothing for split sequences but the flag that `build` gives them
        (r"assert not config\.sequence_parallel, f.*", "pass"),
    )

    def __init__(self, name="", path=""):
        importlib.machinery.SourceFileLoader.__init__(self, name, path)

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("megatron.core") or ".fsdp" in name or path is None:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and isinstance(found.loader, importlib.machinery.SourceFileLoader):
            found.loader = Loader(name, found.loader.path)
        return found

    def get_code(self, fullname):
        text = Path(self.path).read_text(encoding="utf-8")
        for pattern, new in self.RULES:
            text = re.sub(pattern, new, text)
        return compile(text, self.path, "exec")


def arguments(kind: str, mesh: str, iteration: int) -> argparse.Namespace:
    """The arguments that Megatron-LM would have had, under its names."""
    from megatron.core.transformer.enums import AttnBackend

    given, shape = KINDS[kind], MESHES[mesh]
    table = {
        "num_layers": 4, "norm_epsilon": 1e-5, "normalization": "LayerNorm", "swiglu": False,
        "add_bias_linear": True, "add_qkv_bias": False, "untie_embeddings_and_output_weights": False,
        "group_query_attention": False, "num_query_groups": None, "kv_channels": 4,
        "rotary_base": 10000, "rotary_percent": 1.0, "use_rope_scaling": False,
        "rotary_interleaved": False, "qk_layernorm": False, "apply_layernorm_1p": False,
        "openai_gelu": False, "squared_relu": False, "bias_gelu_fusion": True,
        "bias_swiglu_fusion": True, "num_experts": None, "multi_latent_attention": False,
        "moe_layer_freq": 1, "mtp_num_layers": None, "vocab_size": VOCAB, "padded_vocab_size": 32,
        "make_vocab_size_divisible_by": 8, "seq_length": SEQ, "micro_batch_size": 1,
        "global_batch_size": BATCH, "rampup_batch_size": None, "train_iters": 20, "lr": 1e-2,
        "min_lr": 1e-3, "lr_decay_style": "cosine", "lr_decay_iters": 20, "lr_warmup_iters": 2,
        "lr_warmup_init": 0.0, "lr_warmup_fraction": None, "weight_decay": 0.1,
        "start_weight_decay": 0.1, "end_weight_decay": 0.1, "weight_decay_incr_style": "constant",
        "optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8,
        "clip_grad": 1.0, "seed": 1234, "bf16": False, "fp16": False,
        "params_dtype": torch.float32, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "attention_backend": AttnBackend.auto, "iteration": iteration,
        "consumed_train_samples": iteration * BATCH, "consumed_valid_samples": 0,
        "tensor_model_parallel_size": shape.get("tp", 1),
        "pipeline_model_parallel_size": shape.get("pp", 1),
        "virtual_pipeline_model_parallel_size": shape.get("vpp"),
        "expert_model_parallel_size": shape.get("ep", 1),
        "use_distributed_optimizer": "distributed" in shape,
        "ckpt_format": "torch_dist", "moe_router_pre_softmax": False, "transformer_impl": "local",
    }  # fmt: skip
    return argparse.Namespace(**table | given)


def configuration(args: argparse.Namespace):
    """megatron-core's configuration of these arguments."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    made = {
        name: getattr(args, name)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
                     "init_method_std", "normalization", "add_bias_linear", "kv_channels",
                     "num_query_groups", "qk_layernorm", "hidden_dropout", "attention_dropout",
                     "tensor_model_parallel_size", "pipeline_model_parallel_size",
                     "virtual_pipeline_model_parallel_size", "expert_model_parallel_size")
    }  # fmt: skip
    made |= {
        "layernorm_epsilon": args.norm_epsilon, "gated_linear_unit": args.swiglu,
        "activation_func": F.silu if args.swiglu else F.gelu,
        "bias_activation_fusion": args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        "use_cpu_initialization": True, "params_dtype": args.params_dtype,
        "pipeline_dtype": args.params_dtype, "bf16": args.bf16, "gradient_accumulation_fusion": False,
        "sequence_parallel": args.tensor_model_parallel_size > 1
        and bool(args.num_experts or args.multi_latent_attention),
    }  # fmt: skip
    if args.virtual_pipeline_model_parallel_size:  # of two ranks: as Megatron-LM asks for
        made |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if args.num_experts:
        made |= {name: getattr(args, name) for name in EXPERTS if name != "num_experts"}
        made |= {"num_moe_experts": args.num_experts, "moe_layer_freq": args.moe_layer_freq}
        made |= {"moe_token_dispatcher_type": "allgather"}
    if args.mtp_num_layers:
        made |= {
            name: getattr(args, name) for name in ("mtp_num_layers", "mtp_loss_scaling_factor")
        }
    if not args.multi_latent_attention:
        return TransformerConfig(**made)
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    own = {name: getattr(args, name) for name in names}
    return MLATransformerConfig(
        **made, **own, multi_latent_attention=True, rope_type="rope", apply_rope_fusion=False
    )


def attention_core():
    """softmax(q k^T scale) v: the wheel's own, for CPUs, takes no heads of two widths."""

    class Core(torch.nn.Module):
        def __init__(self, config, layer_number, softmax_scale, **kwargs):
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query, key, value, attention_mask, **kwargs):
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    return Core


def build(args: argparse.Namespace) -> list:
    """This rank's chunks of the model, wrapped as Megatron-LM wraps them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.module import Float16Module

    config, chunks = configuration(args), []
    count = args.virtual_pipeline_model_parallel_size or 1
    for stage in range(count):
        number = stage if count > 1 else None
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization,
            multi_latent_attention=args.multi_latent_attention,
        )  # fmt: skip
        if args.num_experts:
            spec = get_gpt_decoder_block_spec(
                config, False, normalization=args.normalization, vp_stage=number
            )
        if args.multi_latent_attention:
            for layer in getattr(spec, "layer_specs", [spec]):
                layer.submodules.self_attention.submodules.core_attention = attention_core()
        mtp = None
        if args.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, False, vp_stage=number)
        ends = (
            parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        )
        model = GPTModel(
            config, spec, args.padded_vocab_size, args.max_position_embeddings,
            pre_process=ends[0], post_process=ends[1], parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base, mtp_block_spec=mtp, vp_stage=number,
        )  # fmt: skip
        for name, parameter in model.named_parameters():
            if config.sequence_parallel and "norm." in name:
                parameter.sequence_parallel = True  # gradients are summed over tensor parallelism
        chunks.append(Float16Module(config, model) if args.bf16 else model)
    own = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=args.bf16
    )
    return [
        DistributedDataParallel(config, own, model, disable_bucketing=number > 0)
        for number, model in enumerate(chunks)
    ]


def optimizer_of(args: argparse.Namespace, chunks: list):
    """The optimizer, and the scheduler of its learning rate."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    names = ("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps",
             "clip_grad", "use_distributed_optimizer", "bf16", "params_dtype")  # fmt: skip
    own = OptimizerConfig(**{name: getattr(args, name) for name in names})
    made = get_megatron_optimizer(own, chunks)
    rows = args.global_batch_size
    schedule = OptimizerParamScheduler(
        made, init_lr=args.lr_warmup_init, max_lr=args.lr, min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * rows, lr_decay_steps=args.lr_decay_iters * rows,
        lr_decay_style=args.lr_decay_style, start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay, wd_incr_steps=args.train_iters * rows,
        wd_incr_style=args.weight_decay_incr_style,
    )  # fmt: skip
    return made, schedule


def batch_of(step: int) -> torch.Tensor:
    """The tokens of a step, and one more of each sample."""
    drawn = np.random.default_rng(step).integers(0, VOCAB, (BATCH, SEQ + 1))
    drawn[:, 1::2] = (drawn[:, 0::2][:, : drawn[:, 1::2].shape[1]] * 3 + 1) % VOCAB  # to be learnt
    return torch.from_numpy(drawn)


class Training:
    """megatron-core's training step, as Megatron-LM's `train_step` has it."""

    def __init__(self, args: argparse.Namespace):
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import finalize_model_grads

        self.args, self.chunks = args, build(args)
        self.optimizer, self.schedule = optimizer_of(args, self.chunks)
        config = self.chunks[0].module.config
        config.finalize_model_grads_func = finalize_model_grads
        self.rows = [
            row
            for row in range(BATCH)
            if row % ps.get_data_parallel_world_size() == ps.get_data_parallel_rank()
        ]

    def _run(self, tokens: torch.Tensor, *, forward_only: bool) -> list:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(iterator, model):
            row = next(iterator)[None]
            inputs, labels = row[:, :-1], row[:, 1:]
            mask = torch.ones(1, 1, SEQ, SEQ).tril() < 0.5
            where = torch.arange(SEQ)[None]
            return model(inputs, where, mask, labels=labels, loss_mask=torch.ones(1, SEQ)), _mean

        function = get_forward_backward_func()
        return function(
            forward_step_func=forward,
            data_iterator=[iter(tokens) for _ in self.chunks]
            if len(self.chunks) > 1
            else iter(tokens),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(tokens),
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def step(self, number: int) -> tuple[float, float]:
        """The loss of a step, and the norm of its gradients."""
        from megatron.core import parallel_state as ps

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run(batch_of(number)[self.rows], forward_only=False)
        _, norm, _ = self.optimizer.step()
        self.schedule.step(increment=BATCH)
        loss = torch.zeros(1)
        if ps.is_pipeline_last_stage(ignore_virtual=True):
            loss += sum(float(part["loss"]) for part in parts) / len(parts)
            dist.all_reduce(loss, group=ps.get_data_parallel_group())
            loss /= ps.get_data_parallel_world_size()
        dist.broadcast(loss, dist.get_world_size() - 1)
        return float(loss), float(norm)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of every sample, on the last rank."""
        from megatron.core import parallel_state as ps

        last, kept = self.chunks[-1].module, []
        last = getattr(last, "module", last)  # of 16 bits it is wrapped once more
        if last.post_process:  # modules of multi-token prediction come before the model itself
            last.output_layer.register_forward_hook(
                lambda *given: kept.append(given[-1][0].float().clone())
            )
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            self._run(tokens, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        if not kept:
            return torch.empty(0)
        out = torch.cat(
            kept[self.args.mtp_num_layers or 0 :: 1 + (self.args.mtp_num_layers or 0)], 1
        )
        last.output_layer._forward_hooks.clear()
        parts = [torch.empty_like(out) for _ in range(ps.get_tensor_model_parallel_world_size())]
        dist.all_gather(parts, out.contiguous(), group=ps.get_tensor_model_parallel_group())
        return torch.cat(parts, -1).transpose(0, 1)


def _mean(out):
    loss = out.mean()
    return loss, {"loss": loss.detach().clone()}  # the first is divided in place


# --- files


def metadata_of(args) -> dict:
    made = {"distrib_optim_sharding_type": MESHES[args.mesh].get("distributed")}
    made |= {"chained_optim_avoid_prefix": True, "singleton_local_shards": args.singleton}
    return made


def sharded(training: Training, args: argparse.Namespace, metadata: dict, *, loading: bool) -> dict:
    """The state dict that Megatron-LM's `generate_state_dict` makes for `dist_checkpointing`."""
    own = args if not hasattr(args, "mesh") else argparse.Namespace(
        **{k: v for k, v in vars(args).items() if k not in ("mesh", "singleton")}
    )  # fmt: skip
    table: dict = {"args": own, "checkpoint_version": 3.0, "iteration": args.iteration}
    several = len(training.chunks) > 1
    for number, chunk in enumerate(training.chunks):
        table[f"model{number}" if several else "model"] = chunk.module.sharded_state_dict(
            metadata=metadata
        )
    models = {name: part for name, part in table.items() if name.startswith("model")}
    table["optimizer"] = training.optimizer.sharded_state_dict(
        models if several else models["model"], is_loading=loading, metadata=metadata
    )
    table["opt_param_scheduler"] = training.schedule.state_dict()
    table["num_floating_point_operations_so_far"] = 0
    return table


def save_sharded(training: Training, args: argparse.Namespace, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    table = sharded(training, args, metadata_of(args), loading=False)
    table["rng_state"] = ShardedObject(
        "rng_state", [_rng()], (1,), (0,), replica_id=dist.get_rank()
    )
    dist_checkpointing.save(
        table, str(folder), ("torch_dist", 1), content_metadata=metadata_of(args)
    )
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(args.iteration))


def _rng() -> dict:
    import random

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }


def save_legacy(training: Training, args: argparse.Namespace, folder: Path) -> None:
    """The files of Megatron-LM's ``--ckpt-format torch``."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    own = argparse.Namespace(
        **{k: v for k, v in vars(args).items() if k not in ("mesh", "singleton")}
    )
    own.ckpt_format = "torch"
    table: dict = {"args": own, "checkpoint_version": 3.0, "iteration": args.iteration}
    several = len(training.chunks) > 1
    for number, chunk in enumerate(training.chunks):
        table[f"model{number}" if several else "model"] = chunk.state_dict_for_save_checkpoint()
    table["optimizer"] = training.optimizer.state_dict()
    table["opt_param_scheduler"] = training.schedule.state_dict()
    table["rng_state"] = [_rng()]
    table["num_floating_point_operations_so_far"] = 0
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    if args.use_distributed_optimizer:
        # collective: the first rank of data parallelism writes
        training.optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if args.expert_model_parallel_size > 1 or ps.get_data_parallel_rank() == 0:
        torch.save(table, place / "model_optim_rng.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(args.iteration))
    dist.barrier()


# --- processes


def start(args: argparse.Namespace) -> None:
    """Join the other processes, with seeds of this one."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as tracked
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    # dropout is off: no tracker of states of a GPU's generator is needed
    tracked.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # which 0.16.1 defines only beside Transformer Engine
    multi_latent_attention.TELinear = type("TELinear", (), {})  # likewise, a class to compare with
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
    torch.manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def _write(transforms, use_msc, rank, buckets, results) -> None:
    """The writing of files in this process: children of one with gloo's threads may hang."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    found = {}
    for number, bucket in enumerate(buckets):
        done, count = queue.Queue(), queue.Queue()
        count.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, done, count, use_fsync=False
        )
        found[number] = done.get()[1]
    results.put(found)


def work(kind: str, mesh: str, out: Path, checkpoint: str = "") -> None:
    sys.meta_path.insert(0, Loader())
    args = arguments(kind, mesh, STEPS)
    args.mesh, args.singleton = mesh, False
    start(args)
    training = Training(args)
    report: dict = {"kind": kind, "mesh": mesh}
    if checkpoint:
        load(training, args, Path(checkpoint))
        first = training.args.iteration
    else:
        report["first"] = [training.step(number) for number in range(STEPS)]
        save_sharded(training, args, out / "torch_dist" / f"iter_{STEPS:07d}")
        save_legacy(training, args, out / "torch" / f"iter_{STEPS:07d}")
        first = STEPS
    made = training.logits(batch_of(1000))
    report["next"] = [training.step(number) for number in range(first, first + 5)]
    if dist.get_rank() == dist.get_world_size() - 1:
        (out / "golden.json").write_text(json.dumps(report, indent=1))
        np.savez_compressed(out / "golden.npz", logits=made.numpy())
    dist.barrier()
    dist.destroy_process_group()


def load(training: Training, args: argparse.Namespace, folder: Path) -> None:
    """Load a `torch_dist` checkpoint as Megatron-LM does."""
    from megatron.core import dist_checkpointing

    # without Apex the distributed optimizer has no state to load into before it made a step
    training.step(0)
    training.schedule.num_steps = 0
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    table = sharded(training, args, metadata or metadata_of(args), loading=True)
    found = dist_checkpointing.load(table, str(folder))
    for number, chunk in enumerate(training.chunks):
        name = f"model{number}" if len(training.chunks) > 1 else "model"
        chunk.module.load_state_dict(found[name], strict=True)
    training.optimizer.load_state_dict(found["optimizer"])
    training.schedule.use_checkpoint_opt_param_scheduler = True
    training.schedule.load_state_dict(found["opt_param_scheduler"])
    training.args.iteration = found["iteration"]


def shared_step() -> None:
    """The steps that parameters count after a checkpoint was loaded, by megatron-core as it is.

    Without Transformer Engine and Apex, `DistributedOptimizer.load_state_dict` of 0.16.1 gives the
    states of all parameters one tensor as their "step". torch's AdamW adds 1 to it for each of
    them: the bias of its moments is corrected for as many updates as there are parameters, so that
    losses are others from the second step on. `Loader` gives each a copy.
    """
    Loader.RULES = tuple(rule for rule in Loader.RULES if ".clone()" not in rule[1])
    sys.meta_path.insert(0, Loader())
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29571",
        "WORLD_SIZE": "1",
        "RANK": "0",
    }
    MESHES["one"] = {"world": 1, "distributed": "fully_reshardable"}
    args = arguments("llama", "one", STEPS)
    args.mesh, args.singleton = "one", False
    start(args)
    training = Training(args)
    training.step(0)
    for loaded in (False, True):
        if loaded:
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.step(1)
        (own,) = training.optimizer.chained_optimizers
        steps = sorted(float(each["step"]) for each in own.optimizer.state.values())
        print("after loading:" if loaded else "before:", steps)
    dist.destroy_process_group()


def run(kind: str, mesh: str, out: Path, checkpoint: str = "") -> None:
    """Start the processes of one training."""
    world = MESHES[mesh]["world"]
    out.mkdir(parents=True, exist_ok=True)
    port = 20000 + (os.getpid() * 7 + hash((kind, mesh))) % 20000
    base = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "work", kind, mesh, str(out), checkpoint]
    made = [
        subprocess.Popen(command, env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    codes = [process.wait() for process in made]
    if any(codes):
        raise SystemExit(f"{kind} on {mesh} failed")


def make(out: Path) -> None:
    """All fixtures: an archive of each training."""
    out.mkdir(parents=True, exist_ok=True)
    for kind, meshes in FIXTURES.items():
        for mesh in meshes:
            with tempfile.TemporaryDirectory() as name:
                run(kind, mesh, Path(name))
                with tarfile.open(out / f"{kind}-{mesh}.tar.xz", "w:xz", preset=9) as archive:
                    for path in sorted(Path(name).iterdir()):
                        archive.add(path, path.name)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "make":
        make(Path(rest[0]))
    elif command == "work":
        work(rest[0], rest[1], Path(rest[2]), rest[3])
    elif command == "go-on":  # FIXTURE CHECKPOINT OUT
        kind, _, mesh = rest[0].partition("-")
        run(kind, mesh, Path(rest[2]), str(Path(rest[1]).resolve()))
        print((Path(rest[2]) / "golden.json").read_text())
    elif command == "shared-step":
        shared_step()
    else:
        raise SystemExit(__doc__)
