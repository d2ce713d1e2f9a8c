"""OLMo 1 and GLM against transformers to 1e-10: all that is float32 there is told to be float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import gpt, hub, nn
from tests.hub import tiny
from tests.models.float64_models import (
    Float64,
    assert_leaves_close,
    assert_outputs_close,
    drawn,
    gradients,
)


@pytest.mark.parametrize("name", ["olmo", "glm", "glm4"])
def test_logits_loss_and_gradients(name, tmp_path):
    with Float64():
        model = drawn(partial(tiny.make, name))
    config = hub.read_config(tiny.store(model, tmp_path))
    weights, tokens = hub.load(tmp_path, config), tiny.tokens()
    assert config.dtype == "float64"
    if config.qkv_clip:  # so that some are clipped, and others are not
        with Float64():
            state = F.layer_norm(model.get_input_embeddings()(tokens), (tiny.EMBED,))
            clipped = model.model.layers[0].self_attn.q_proj(state).abs() > config.qkv_clip
        assert 0.1 < clipped.double().mean() < 0.9
    with Float64():
        logits = model(tokens).logits
        assert_outputs_close(gpt.forward(config, weights, tokens)[..., : tiny.VOCAB], logits)

    targets = F.pad(tokens[:, 1:], (0, 1), value=nn.IGNORE_INDEX)
    batch = {"tokens": tokens, "targets": targets, "rows": torch.arange(len(tokens))}
    expected = F.cross_entropy(logits.mT, targets)
    with Float64():
        loss = lambda w: gpt.loss(config, w, batch) / gpt.num_targets(batch)
        value, grads = ft.value_and_grad(loss)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=0)
    named = gradients(model, expected)
    assert_leaves_close(grads, hub.from_tensors(model.config.model_type, config, named))
