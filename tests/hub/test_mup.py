"""Models trained under maximal update parametrization, exported: its factors are in the weights."""

from dataclasses import replace

import pytest
import torch

from functron import checkpoint, gpt, hub, params, random, tree
from functron.models import mup
from functron.training import config
from functron.training.convert import convert
from tests.hub import tiny

BASE = replace(
    gpt.PRESETS["llama3-tiny"], vocab_size=tiny.VOCAB, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, init_stddev=0.2, mup_base_dim=16, mup_base_head_dim=4, rope_scaling=None,
)  # fmt: skip
MODELS = {
    "llama": BASE,
    "llama-tied": replace(BASE, tied=True),
    "qwen3": replace(BASE, qk_norm=True),
    "fused": replace(BASE, fused_projections=True),
}


def trained(model):
    """Weights that have none of their first values."""
    weights = params.init_params(random.key(0), gpt.defs(model))
    generator = torch.Generator().manual_seed(0)
    return tree.map(lambda w: w + 0.1 * torch.randn(w.shape, generator=generator), weights)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_exported_as_a_model_that_computes_the_same(name, tmp_path):
    model, run = MODELS[name], tmp_path / "run"
    weights = trained(model)
    run.mkdir()
    (run / "config.toml").write_text(config.dump(config.configure(gpt=model)))
    checkpoint.save(run / "checkpoints" / "3", {"params": weights})
    convert(f"run:{run}", f"hf:{tmp_path / 'out'}")
    made, tokens = tiny.read_back(tmp_path / "out"), tiny.tokens()
    expected = gpt.forward(model, weights, tokens)[..., : tiny.VOCAB]
    torch.testing.assert_close(made(tokens).logits.detach(), expected, rtol=1e-4, atol=1e-5)
    plain = hub.read_config(tmp_path / "out")
    assert (plain.mup_base_dim, plain.mup_base_head_dim) == (0, 0)
    again = gpt.forward(plain, hub.load(tmp_path / "out", plain), tokens)[..., : tiny.VOCAB]
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_folded_is_refused(tmp_path):
    weights = trained(BASE)
    with pytest.raises(ValueError, match=r"mup_base_dim: got 16; .*gpt.folded"):
        hub.to_tensors(BASE, weights, "llama")
    named = hub.to_tensors(*mup.folded(BASE, weights), "llama")
    assert torch.equal(named["lm_head.weight"], weights["unembed"].mT[: tiny.VOCAB] / 2)
    hub.save(tmp_path / "out", *mup.folded(BASE, weights))
    plain = hub.read_config(tmp_path / "out")
    with pytest.raises(ValueError, match="mup_base_dim"):  # other factors than its own
        hub.load(tmp_path / "out", replace(plain, mup_base_dim=16))
