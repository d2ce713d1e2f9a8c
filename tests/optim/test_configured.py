"""Optimizers by name in whole training steps: on every mesh the numbers of one rank."""

import dataclasses
import functools
import sys

import pytest
import torch

from functron import Mesh, optim, random, tree
from functron.models import gpt
from functron.spmd.params import decay_mask
from functron.spmd.spec import is_spec, unpad
from functron.training.config import configure
from functron.training.setup import make_setup

STEPS, VOCAB, SEQ = 2, 20, 6
MODEL = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=14, num_heads=4, head_dim=4, mlp_dim=24, max_seq=SEQ,
    init_stddev=0.3, dtype="float64",
)  # fmt: skip
COMMON = {"clip_norm": 0.5, "weight_decay": 0.1, "skip_nonfinite": 3}
OPTIMIZERS = {
    "lion": optim.OptimizerConfig("lion", b2=0.99, ema_decay=0.5, **COMMON),
    "adafactor": optim.OptimizerConfig(
        "adafactor", adafactor=optim.AdafactorConfig(min_dim=8, momentum=0.5), **COMMON
    ),
    "adam_mini": optim.OptimizerConfig("adam_mini", groups="embed lr=0.5; *norm* lr=2", **COMMON),
    "soap": optim.OptimizerConfig("soap", soap=optim.SoapConfig(frequency=1, max_dim=20), **COMMON),
    "groups": optim.OptimizerConfig("muon", groups="*/q/* lr=0.1 decay=0", ema_decay=0.9, **COMMON),
}
MESHES = [("dp=2,tp=2", 2), ("pp=2,fsdp=2", 1)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (24, SEQ + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(24)}


def config_of(name, mesh, zero):
    return configure(
        gpt=MODEL, mesh=mesh, zero=zero, microbatches=2, global_batch=24, seq=SEQ,
        optimizer=dataclasses.replace(OPTIMIZERS[name], muon=optim.MuonConfig(dtype="")),
        learning_rate=optim.ScheduleConfig("constant", 1e-2), steps=STEPS,
    )  # fmt: skip


def train(name, mesh, zero):
    ranks = Mesh.parse(mesh)
    made = make_setup(config_of(name, mesh, zero), ranks)
    state = made.init(random.key(1))
    losses = []
    for step in range(STEPS):
        state, metrics = made.step(state, batch(step))
        losses.append(metrics["loss"].item())
    return state, losses, made.state_specs


def compare(got, want, specs, mesh):
    flat = tree.broadcast_prefix(specs, want, is_leaf=is_spec)
    rows = zip(tree.paths(want), tree.leaves(got), tree.leaves(want), flat, strict=True)
    for path, a, b, spec in rows:
        if "basis" in path:
            continue  # up to signs of columns
        whole, b = unpad(a, b.shape, spec, mesh).double(), b.double()
        error = (whole - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= 1e-8, f"{path}: {error}"


@functools.cache
def dense(name):
    return train(name, "", 0)


@pytest.mark.pairwise(of=lambda name, mesh, zero: [{"name": name}, {"mesh": mesh}])
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_one_rank(name, mesh, zero):
    want, losses, _ = dense(name)
    got, found, specs = train(name, mesh, zero)
    assert found == pytest.approx(losses, rel=1e-9)
    compare(got, want, specs, Mesh.parse(mesh))


OWN = """
from functron import optim, tree


def descent(learning_rate, weight_decay=0.0, momentum=0.9, mask=None):
    return optim.chain(
        optim.trace(momentum), optim.add_decayed_weights(weight_decay, mask), optim.scale_by_learning_rate(learning_rate)
    )


def nothing(learning_rate):
    return None


def needy(learning_rate, betas):
    return descent(learning_rate)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_optimizers", raising=False)
    return "own_optimizers:descent"


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2", "pp=2"])
def test_an_optimizer_of_ones_own_by_its_name(own, mesh):
    """Its options are those that it names: descent with momentum and decay, as by hand."""
    chosen = optim.OptimizerConfig(own, momentum=0.5, weight_decay=0.1, clip_norm=0.0)
    config = configure(
        gpt=MODEL, mesh=mesh, microbatches=2, global_batch=24, seq=SEQ, optimizer=chosen,
        learning_rate=optim.ScheduleConfig("constant", 1e-2), steps=STEPS,
    )  # fmt: skip
    made = make_setup(config, Mesh.parse(mesh))
    state = made.init(random.key(1))
    for index in range(STEPS):
        state, _ = made.step(state, batch(index))
    params = make_setup(configure(config, mesh=""), Mesh()).init(random.key(1)).params
    params = tree.map(lambda x: x.clone().requires_grad_(), params)
    sums = tree.map(torch.zeros_like, params)
    mask, rate = tree.leaves(decay_mask(gpt.defs(MODEL))), float(config.rate(0))  # of float32
    for index in range(STEPS):
        data = batch(index)
        loss = gpt.loss(MODEL, params, data) / data["targets"].numel()
        grads = torch.autograd.grad(loss, tree.leaves(params))
        with torch.no_grad():
            for p, s, g, decays in zip(
                tree.leaves(params), tree.leaves(sums), grads, mask, strict=True
            ):
                s.mul_(0.5).add_(g)
                p.sub_(rate * (s + 0.1 * decays * p))
    for got, wanted in zip(tree.leaves(state.params), tree.leaves(params), strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=1e-12)


def test_an_optimizer_of_ones_own_is_refused_with_the_reason(own):
    def problems(name, **options):
        config = optim.OptimizerConfig(name, **options)
        with pytest.raises(ValueError, match="optimizer") as caught:
            optim.make_optimizer(config, 0.1)
        return str(caught.value)

    assert "did you mean 'descent'?" in problems("own_optimizers:descend")
    assert "a module that Python finds" in problems("no_such_file:descent")
    assert "an argument 'betas'" in problems("own_optimizers:needy")
    assert "return optim.chain(...)" in problems("own_optimizers:nothing")
    assert "chooses by itself" in problems(own, mu_dtype="bfloat16")
    needs = optim.config.OPTIMIZER_NEEDS
    chosen = optim.OptimizerConfig(own)
    assert needs["momentum"].holds(chosen)
    assert needs["weight_decay"].holds(chosen)
    assert not needs["b1"].holds(chosen)
