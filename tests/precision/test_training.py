"""Training steps with quantised linear layers: every mesh and schedule is the run of one device.

What layers compute products with is replaced here, in all of them: forward and both gradients.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from functron import Mesh, gpt, random, tree
from functron.nn import layers
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.precision import RECIPES, product
from functron.training.config import TrainConfig
from functron.training.plan import plan

STEPS, SEQ, BATCH, VOCAB = 2, 128, 8, 50
MODEL = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32,
    mlp_dim=64, max_seq=SEQ, init_stddev=0.1, dtype="float64",
)  # fmt: skip
CONFIG = TrainConfig(
    seq=SEQ,
    global_batch=BATCH,
    microbatches=2,
    steps=STEPS,
    optimizer=OptimizerConfig(name="sgd", clip_norm=0.5),
    learning_rate=ScheduleConfig(name="constant", peak=0.1),
)
ROWS = {
    "dp=2,tp=2": {"sequence_parallel": True, "zero": 1},
    "dp=2": {"zero": 2},
    "fsdp=2": {"gather": "keep", "remat": "full"},
    "cp=2": {"remat": "selective"},
    "tp=2,cp=2": {"context": "gather"},
    "pp=2": {"schedule": "1f1b"},
    "pp=2,tp=2": {"schedule": "zb-h1", "sequence_parallel": True},
    "pp=2,fsdp=2": {"schedule": "interleaved", "zero": 2},
}


def trained(recipe: str, mesh: str, **fields) -> tuple[list[dict], dict]:
    """The metrics of some steps, and the parameters after them."""

    def quantised(x, w, lora):
        assert lora is None
        return product(RECIPES[recipe])(x, w)

    config = replace(CONFIG, gpt=MODEL, mesh=mesh, **fields)
    with pytest.MonkeyPatch.context() as patch:
        if recipe:
            patch.setattr(layers, "_product", quantised)
        made = plan(config, Mesh.parse(mesh))
        state, history = made.init(random.key(0)), []
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
            batch = {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "rows": torch.arange(BATCH),
            }
            state, metrics = made.step(state, batch)
            history.append({k: tree.map(lambda x: x.clone(), v) for k, v in metrics.items()})
    return history, state.params


alone = functools.cache(lambda recipe: trained(recipe, ""))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ROWS)
@pytest.mark.parametrize("recipe", ["fp8-tensor", "mxfp8"])
def test_every_mesh_trains_as_one_device_does(recipe, mesh):
    """Losses, norms and parameters after two steps, in float64's rounding."""
    history, params = trained(recipe, mesh, **ROWS[mesh])
    want_history, want_params = alone(recipe)
    for got, want in zip(history, want_history, strict=True):
        for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
            assert (a.double() - b.double()).abs().max() <= 1e-9 * b.abs().max().clamp(min=1), path
    rows = zip(tree.paths(params), tree.leaves(params), tree.leaves(want_params), strict=True)
    for path, got, want in rows:
        assert (got - want).abs().max() <= 1e-9 * want.abs().max().clamp(min=1e-2), path


@pytest.mark.full
def test_quantised_steps_are_near_those_that_are_not():
    """By the first loss; and they are not those."""
    (first, *_), _ = trained("", "")
    (quantised, *_), _ = alone("mxfp8")
    off = abs(quantised["loss"] - first["loss"]) / first["loss"]
    assert 1e-6 < off < 1e-2
