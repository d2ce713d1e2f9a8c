"""Decoders with layers of experts against transformers' own, weights copied, in float64.

Transformers keeps norms, rotary tables, the softmax of attention and (but for GPT-OSS) of routers in
float32 even in a float64 model, so they agree to 1e-5.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, P, gpt, hub, tree
from tests.hub import tiny

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=list(tiny.MIXTURES))
def case(request):
    """A model of transformers in float64, ours of it, and its weights."""
    model = tiny.make(request.param).double()
    # as it is stored it is float32 whatever the model is
    config = hub.reader.parse(model.config.to_dict(), dtype="float64")
    config = replace(config, vocab_multiple=tiny.VOCAB_MULTIPLE)
    named = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return model, config, hub.from_tensors(model.config.model_type, config, named)


def batch() -> dict:
    tokens = tiny.tokens()
    targets = F.pad(tokens[:, 1:], (0, 1), value=ft.nn.IGNORE_INDEX)
    return {"tokens": tokens, "targets": targets, "rows": torch.arange(len(tokens))}


def mean_loss(config, weights, data, stream=gpt.STREAM, experts=("ep",)):
    total = gpt.loss(config, weights, data, ft.ModelOptions(stream=stream, expert_axes=experts))
    return total / gpt.num_targets(data)


def expected(model, config) -> tuple[torch.Tensor, dict]:
    """Transformers' loss, and its gradients in our layout.

    What balances routers has none there; with us it is the load, which has tests of its own.
    """
    tokens = tiny.tokens()
    loss = model(tokens, labels=tokens).loss
    trained = ((name, value) for name, value in model.named_parameters() if value.requires_grad)
    names, leaves = zip(*trained, strict=True)
    named = dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))
    bias = "e_score_correction_bias"
    named |= {k: torch.zeros_like(v) for k, v in model.state_dict().items() if k.endswith(bias)}
    return loss.detach(), hub.from_tensors(model.config.model_type, config, named)


def assert_close(actual: dict, expected: dict, tolerance: float = TOLERANCE) -> None:
    """Every leaf within `tolerance` of its largest entry, or of a thousandth of the tree's."""
    assert tree.paths(actual) == tree.paths(expected)
    floor = 1e-3 * max(leaf.abs().max().item() for leaf in tree.leaves(expected))
    rows = zip(tree.paths(actual), tree.leaves(actual), tree.leaves(expected), strict=True)
    for path, got, want in rows:
        assert got.shape == want.shape, path
        if path.endswith("balance"):
            continue
        assert want.abs().max() > 0, path
        error = ((got - want).abs().max() / want.abs().max().clamp(min=floor)).item()
        assert error < tolerance, (path, error)


def test_every_weight_is_mapped(case):
    model, config, weights = case
    defs = gpt.defs(config)
    assert tree.paths(weights) == tree.paths(defs)
    assert [w.shape for w in tree.leaves(weights)] == [d.shape for d in tree.leaves(defs)]
    padding = (config.padded_vocab - tiny.VOCAB) * tiny.EMBED * (1 if config.tied else 2)
    theirs = sum(p.numel() for p in model.parameters())
    theirs += sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias"))
    assert ft.num_params(defs) == theirs + padding


def test_logits(case):
    model, config, weights = case
    ours = gpt.forward(config, weights, tiny.tokens())[..., : tiny.VOCAB]
    theirs = model(tiny.tokens()).logits.detach()
    assert theirs.abs().max() > 0.5
    bound = TOLERANCE * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=bound)


def test_loss_and_gradients(case):
    model, config, weights = case
    loss, grads = expected(model, config)
    value, got = ft.value_and_grad(partial(mean_loss, config))(weights, batch())
    torch.testing.assert_close(value, loss.double(), rtol=1e-6, atol=0)
    assert_close(got, grads)


MESHES = {
    "ep": (ft.Mesh(ep=2), gpt.STREAM, ("ep",)),
    "dp,tp": (ft.Mesh(dp=2, tp=2), gpt.STREAM, ("ep",)),
    "folded": (ft.Mesh(tp=2), gpt.SEQUENCE_PARALLEL_STREAM, ("ep", "tp")),
}


@pytest.mark.pairwise(of=lambda case, name: [{"case": case}, {"name": name}])
@pytest.mark.parametrize("name", list(MESHES))
def test_loss_and_gradients_on_a_mesh(case, name):
    model, config, weights = case
    mesh, stream, axes = MESHES[name]
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh, expert_axes=axes))

    def step(weights, data):
        loss = partial(mean_loss, config, stream=stream, experts=axes)
        value, grads = ft.value_and_grad(loss)(weights, data)
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(step, mesh, (specs, P(DATA_AXES)), (P(), specs))
    value, got = mapped(weights, batch())
    loss, grads = expected(model, config)
    torch.testing.assert_close(value, loss.double(), rtol=1e-6, atol=0)
    assert_close(got, grads)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_the_balance_loss_of_one_layer(name):
    """Transformers' coefficient times top_k; it counts every token, so here each has a target."""
    coefficient = 0.3
    window = {"layer_types": ["full_attention"]} if name == "gpt-oss" else {}
    model = tiny.make(
        name, num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=coefficient,
        **window,
    ).double()  # fmt: skip
    config = hub.reader.parse(model.config.to_dict(), dtype="float64")
    config = replace(config, vocab_multiple=tiny.VOCAB_MULTIPLE)
    moe = replace(config.moe, aux="batch", aux_loss=coefficient * config.moe.top_k)
    tokens = tiny.tokens()
    data = {"tokens": tokens, "targets": tokens.roll(-1, 1), "rows": torch.arange(len(tokens))}
    out = model(tokens, labels=tokens, shift_labels=data["targets"])
    names, leaves = zip(*model.named_parameters(), strict=True)
    grads = dict(zip(names, torch.autograd.grad(out.loss, leaves), strict=True))
    kind = model.config.model_type
    weights = hub.from_tensors(kind, config, dict(model.named_parameters()))
    ours = replace(config, moe=moe)
    value, got = ft.value_and_grad(partial(mean_loss, ours))(weights, data)
    assert out.aux_loss > 1
    torch.testing.assert_close(value, out.loss.detach().double(), rtol=1e-6, atol=0)
    assert_close(got, hub.from_tensors(kind, config, grads))
