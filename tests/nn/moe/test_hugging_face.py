"""Routers against those of transformers' models, with their weights.

Transformers computes scores in float32 (GPT-OSS: in the logits' dtype), so most agree to 1e-5.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from functron import P
from functron.nn.moe import MoEConfig, route

BATCH, SEQ, EMBED, EXPERTS = 3, 6, 12, 8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

CASES = {
    "Mixtral": (
        "mixtral.MixtralTopKRouter",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_size": EMBED},
        MoEConfig(num_experts=EXPERTS, top_k=2, renormalise=True),
    ),
    "Qwen3Moe": (
        "qwen3_moe.Qwen3MoeTopKRouter",
        {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "hidden_size": EMBED,
            "norm_topk_prob": False,
        },
        MoEConfig(num_experts=EXPERTS, top_k=3),
    ),
    "Qwen3Moe-renormalised": (
        "qwen3_moe.Qwen3MoeTopKRouter",
        {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "hidden_size": EMBED,
            "norm_topk_prob": True,
        },
        MoEConfig(num_experts=EXPERTS, top_k=3, renormalise=True),
    ),
    "GptOss": (
        "gpt_oss.GptOssTopKRouter",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 4, "hidden_size": EMBED},
        MoEConfig(num_experts=EXPERTS, top_k=4, normalise="after", router_bias=True),
    ),
    "DeepseekV3": (
        "deepseek_v3.DeepseekV3TopkRouter",
        {
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "hidden_size": EMBED,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        MoEConfig(
            num_experts=EXPERTS,
            top_k=3,
            score="sigmoid",
            renormalise=True,
            scale=2.5,
            num_groups=4,
            top_groups=2,
            balance_bias=True,
        ),
    ),
    "DeepseekV2": (
        "deepseek_v2.DeepseekV2TopkRouter",
        {
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 3,
            "hidden_size": EMBED,
            "num_attention_heads": 4,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
        MoEConfig(
            num_experts=EXPERTS,
            top_k=3,
            scale=16.0,
            num_groups=4,
            top_groups=2,
            group_score="max",
        ),
    ),
}


def router(path: str, settings: dict) -> torch.nn.Module:
    """A router of transformers in float64, with weights that make experts differ."""
    family, name = path.split(".")
    models = importlib.import_module(f"transformers.models.{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_name = name.removesuffix("TopKRouter").removesuffix("TopkRouter") + "Config"
    module = getattr(modeling, name)(getattr(models, config_name)(**settings)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value.copy_(0.5 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    return module


def dense(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[N, k] weights by expert: [N, E]."""
    zero = torch.zeros(len(weights), EXPERTS, dtype=weights.dtype)
    return zero.scatter(1, experts, weights)


@pytest.mark.parametrize("name", list(CASES))
def test_router(randn, name):
    path, settings, config = CASES[name]
    module = router(path, settings)
    x, cotangent = randn(BATCH, SEQ, EMBED), randn(BATCH * SEQ, EXPERTS)
    named = dict(module.named_parameters())
    params = {"w": named["weight"].detach().T}
    if config.router_bias:
        params["b"] = named["bias"].detach()
    if config.balance_bias:
        params["balance"] = module.e_score_correction_bias
        plain = (x.flatten(0, 1) @ params["w"]).sigmoid().topk(3).indices.sort().values

    def ours(params):
        routing = route(
            params, x, config, stream=P(), rows=torch.arange(BATCH),
            positions=torch.arange(SEQ).expand(BATCH, SEQ),
        )  # fmt: skip
        weights = dense(routing.weights.flatten(0, 1), routing.experts.flatten(0, 1))
        return (weights * cotangent).sum(), (weights, routing.experts)

    grads, (weights, experts) = torch.func.grad(ours, has_aux=True)(params)
    _, their_weights, their_experts = module(x.flatten(0, 1))
    theirs = dense(their_weights.double(), their_experts)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if name == "GptOss" else TOLERANCE
    torch.testing.assert_close(weights, theirs, **tolerance)
    chosen = experts.flatten(0, 1).sort().values
    assert torch.equal(chosen, their_experts.sort().values)
    assert not config.balance_bias or not torch.equal(chosen, plain)  # the bias changes choices
    leaves = tuple(named.values())
    found = torch.autograd.grad((theirs * cotangent).sum(), leaves)
    expected = {"w": found[0].T} | ({"b": found[1]} if config.router_bias else {})
    got = {key: grads[key] for key in expected}
    if name == "DeepseekV2":  # transformers' sums in float32, rounded as their largest terms are
        largest = max(float(want.abs().max()) for want in expected.values())
        tolerance = {**tolerance, "atol": tolerance["rtol"] * largest}
    torch.testing.assert_close(got, expected, **tolerance)
    if config.balance_bias:
        assert not grads["balance"].any()
