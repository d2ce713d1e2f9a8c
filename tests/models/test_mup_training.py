"""Training under maximal update parametrization: torch's updates, on every mesh, from any base."""

import math
import re
from dataclasses import replace

import pytest
import torch

from functron import Mesh, gpt, optim, params, random, tree
from functron.models.lora import LoRA, lora_defs
from functron.nn.moe import MoEConfig
from functron.spmd.spec import is_spec, unpad
from functron.training.checks import validate
from functron.training.config import configure
from functron.training.setup import make_setup

SEQ, VOCAB, STEPS, DECAY = 8, 32, 4, 0.3
RATE, M = 2**-7, 4  # schedules are in float32, where these and their quotient are exact
BASE = gpt.GPTConfig(
    vocab_size=VOCAB, vocab_multiple=VOCAB, num_layers=2, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=16,
    max_seq=SEQ, init_stddev=0.3, dtype="float64", mup_base_dim=8,
)  # fmt: skip
# four times as wide: twice as many heads, each twice as wide
WIDE = replace(BASE, embed_dim=32, num_heads=4, head_dim=8, mup_base_head_dim=4, mlp_dim=64)
ADAMW = optim.OptimizerConfig(
    "adamw", clip_norm=0, weight_decay=DECAY, groups="*/v/w lr=0.5 decay=2"
)
CONSTANT = optim.ScheduleConfig("constant", RATE)


def config_of(model, mesh="", optimizer=ADAMW, **more):
    return configure(
        gpt=model, mesh=mesh, seq=SEQ, global_batch=4, microbatches=2, steps=STEPS,
        optimizer=optimizer, learning_rate=CONSTANT, **more,
    )  # fmt: skip


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (4, SEQ + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def trained(config, steps=STEPS):
    mesh = Mesh.parse(config.parallelism.mesh)
    made = make_setup(config, mesh)
    state, losses = made.init(random.key(1)), []
    for step in range(steps):
        state, metrics = made.step(state, batch(step))
        losses.append(metrics["loss"].item())
    return state, losses, made.state_specs


def test_updates_are_those_of_torch_with_groups_of_parameters():
    defs = gpt.defs(WIDE)
    init_key, _ = random.split(random.key(1)).unbind(0)
    weights = params.init_params(init_key, defs)
    leaves, structure = tree.flatten(weights)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    groups = []
    for path, leaf in zip(tree.paths(weights), leaves, strict=True):
        hidden = re.fullmatch(r"blocks/(attention|mlp)/\w+/w", path) is not None
        rate, decay = (RATE / M, DECAY * M) if hidden else (RATE, DECAY)
        if "/v/" in path:
            rate, decay = rate / 2, decay * 2
        decay = 0.0 if "norm" in path else decay
        groups.append({"params": [leaf], "lr": rate, "weight_decay": decay})
    rule = torch.optim.AdamW(groups, betas=(ADAMW.b1, ADAMW.b2), eps=ADAMW.eps)
    # the forward of the standard parametrization, with the factors of muP written out
    plain = replace(WIDE, mup_base_dim=0, mup_base_head_dim=0, attention_scale=math.sqrt(4) / 8)
    for step in range(STEPS):
        data = batch(step)
        now = tree.unflatten(structure, leaves)
        now = {**now, "unembed": now["unembed"] / M}
        rule.zero_grad()
        (gpt.loss(plain, now, data) / data["targets"].numel()).backward()
        rule.step()
    state, _, _ = trained(config_of(WIDE))
    for got, want in zip(tree.leaves(state.params), leaves, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-8, atol=1e-11)


MESHES = [
    ("dp=2,tp=2", {"sequence_parallel": True, "zero": 1}),
    ("fsdp=2,tp=2", {}),
    ("pp=2,dp=2", {"zero": 2}),
    ("pp=2", {"layout": "E|ttL", "vocab_over_pp": True}),
    ("cp=2", {}),
]
EXPERTS = replace(WIDE, moe=MoEConfig(4, 2, 32, balance_bias=True), dense_layers=1, tied=True)
MUON = replace(ADAMW, name="muon", clip_norm=0.1, muon=optim.MuonConfig(dtype=""))
KINDS = {
    "adamw": (replace(WIDE, tied=True), replace(ADAMW, clip_norm=0.1)),
    "muon": (EXPERTS, MUON),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_rank(kind):
    model, optimizer = KINDS[kind]
    want, losses, _ = trained(config_of(model, optimizer=optimizer), 2)
    for mesh, options in MESHES if kind == "adamw" else [("ep=2,tp=2", {}), ("pp=2,fsdp=2", {})]:
        got, found, specs = trained(config_of(model, mesh, optimizer, **options), 2)
        assert found == pytest.approx(losses, rel=1e-9), mesh
        flat = tree.broadcast_prefix(specs, want, is_leaf=is_spec)
        rows = zip(tree.paths(want), tree.leaves(got), tree.leaves(want), flat, strict=True)
        for path, a, b, spec in rows:
            whole, b = unpad(a, b.shape, spec, Mesh.parse(mesh)).double(), b.double()
            error = (whole - b).abs().max() / b.abs().max().clamp(min=1e-3)
            assert error <= 1e-8, f"{mesh}: {path}: {error}"


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_at_the_base_width_nothing_differs(name):
    optimizer = optim.OptimizerConfig(name, groups="embed lr=0.1")
    model = replace(BASE, mup_base_head_dim=4, tied=name == "muon")
    plain = replace(model, mup_base_dim=0, mup_base_head_dim=0)
    (one, losses, _), (two, others, _) = (
        trained(config_of(each, optimizer=optimizer), 2) for each in (model, plain)
    )
    assert losses == others
    assert tree.structure(one) == tree.structure(two)
    assert all(map(torch.equal, tree.leaves(one), tree.leaves(two)))


def test_refusals(tmp_path):
    def run(model, name, lora_rank=0):
        config = config_of(model, optimizer=optim.OptimizerConfig(name))
        return configure(config, lora_rank=lora_rank, format="mock", out=str(tmp_path / "run"))

    for name in ("sgd", "adafactor", "soap"):
        wanted = f"optimizer.name: got '{name}'; wanted one with a rule for widths"
        config = run(BASE, name)
        with pytest.raises(ValueError, match=wanted):
            validate(config)
        validate(configure(config, gpt=replace(BASE, mup_base_dim=0)))
        with pytest.raises(ValueError, match=wanted):
            optim.make_optimizer(config.optimizer, RATE, defs=gpt.defs(WIDE))
    for name in ("adamw", "adam", "lion", "adam_mini", "muon"):
        validate(run(WIDE, name))
    with pytest.raises(ValueError, match="convert run:RUN hf:MODEL folds it"):
        validate(run(WIDE, "adamw", lora_rank=4))
    with pytest.raises(ValueError, match="convert run:RUN hf:MODEL folds it"):
        lora_defs(gpt.defs(WIDE), LoRA())
