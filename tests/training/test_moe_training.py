"""Training steps of mixtures of experts: every mesh, schedule and ZeRO stage is the dense run."""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import replace

import pytest
import torch

from functron import Mesh, gpt, random, tree
from functron.cli import main
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.training.config import configure
from functron.training.setup import make_setup
from tests.models.test_moe_composition import DEEPSEEK, MIXTRAL, VOCAB

STEPS, SEQ, BATCH = 2, 16, 8
DEEP = replace(DEEPSEEK, num_layers=4)
COUPLED = replace(MIXTRAL, num_layers=4)  # samples of a microbatch, by their balance loss
assert COUPLED.moe is not None
assert COUPLED.moe.aux == "batch"
CONFIG = configure(
    seq=SEQ,
    global_batch=BATCH,
    microbatches=2,
    steps=STEPS,
    optimizer=OptimizerConfig(name="sgd", clip_norm=0.5),
    learning_rate=ScheduleConfig(name="constant", peak=0.1),
)


def trained(model: gpt.GPTConfig, mesh: str, **fields) -> tuple[list[dict], dict]:
    """The metrics of some steps, and the parameters after them."""
    config = configure(CONFIG, gpt=model, mesh=mesh, **fields)
    made = make_setup(config, Mesh.parse(mesh))
    state, history = made.init(random.key(0)), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(BATCH)}
        state, metrics = made.step(state, batch)
        history.append({k: tree.map(lambda x: x.clone(), v) for k, v in metrics.items()})
    return history, state.params


@functools.cache
def dense(name: str, layers: int) -> tuple[list[dict], dict]:
    return trained(replace(MODELS[name], num_layers=layers), "")


MODELS = {"deepseek": DEEP, "mixtral": COUPLED}
FOLDED = {"sequence_parallel": True, "expert_axes": "ep,tp"}
ROWS = [
    ("ep=2", {}),
    ("dp=2,ep=2", {"zero": 1}),
    ("dp=2,ep=2", {"zero": 2}),
    ("dp=2,ep=2,tp=2", {"zero": 3, "gather": "step"}),
    ("fsdp=2,ep=2", {"gather": "keep", "remat": "full"}),
    ("ep=2,tp=2", FOLDED),
    ("ep=2,cp=2", {"expert_axes": "ep,cp", "context": "gather"}),
    ("pp=2", {}),
    ("pp=2,ep=2,tp=2", FOLDED),
    ("pp=2,cp=2", {"layout": "first=1,last=3"}),
    ("pp=2,ep=2", {"schedule": "interleaved", "zero": 2}),
    ("pp=2,fsdp=2", {"schedule": "zb-h1"}),
    ("pp=4,ep=2", {"schedule": "1f1b"}),
]


def factors(name, row):
    """Each row, and each axis with each model."""
    mesh, _ = ROWS[row]
    return [{"row": row}, *({"model": name, "axis": axis[:-2]} for axis in mesh.split(","))]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda row: f"{ROWS[row][0]}-{ROWS[row][1]}")
@pytest.mark.parametrize("name", MODELS)
def test_every_mesh_trains_as_one_device_does(name, row):
    mesh, fields = ROWS[row]
    layers = 4 if "pp" in mesh else 2
    history, params = trained(replace(MODELS[name], num_layers=layers), mesh, **fields)
    want_history, want_params = dense(name, layers)
    for got, want in zip(history, want_history, strict=True):
        assert tree.paths(got) == tree.paths(want)
        for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
            assert (a.double() - b.double()).abs().max() <= 1e-9 * b.abs().max().clamp(min=1), path
    for path, got, want in zip(
        tree.paths(params), tree.leaves(params), tree.leaves(want_params), strict=True
    ):
        limit = 1e-9 if want.dtype == torch.float64 else 1e-6
        assert (got - want).abs().max() <= limit * want.abs().max().clamp(min=1e-2), path


def test_the_balance_moves_against_the_load():
    history, params = dense("deepseek", 4)
    load = history[-1]["aux"]["routers"].load.double()
    assert load.shape == (4, 8)  # three layers of experts, and that of the module ahead
    balance = params["blocks"]["moe"]["router"]["balance"]
    steps = balance / DEEP.moe.balance_rate
    assert torch.allclose(steps, steps.round(), atol=1e-3)  # the rate is float32
    assert steps.abs().max() <= STEPS
    assert (balance != 0).any()


TIED = replace(
    MIXTRAL, num_layers=1,
    moe=MoEConfig(4, 2, 8, score="sigmoid", renormalise=True, balance_bias=True),
)  # fmt: skip


def test_the_balance_rests_where_loads_are_equal():
    """Loads are integers until their sign is taken: a quotient of them does not sum to 0."""
    rate, ties = TIED.moe.balance_rate, 0
    rows = [(seed, mesh, 1, 4) for seed in range(12) for mesh in ["ep=4"]]
    rows += [(seed, "", 1, 4) for seed in range(2)]
    rows += [(0, mesh, 3, 18) for mesh in ("ep=2,tp=2", "dp=3", "pp=2")]
    for seed, mesh, parts, size in rows:
        model = replace(TIED, num_layers=2) if "pp" in mesh else TIED
        config = configure(
            CONFIG, gpt=model, mesh=mesh, seq=3, global_batch=size, microbatches=parts
        )
        made = make_setup(config, Mesh.parse(mesh))
        state = made.init(random.key(seed))
        tokens = torch.randint(0, VOCAB, (size, 4), generator=torch.Generator().manual_seed(seed))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(size)}
        state, metrics = made.step(state, batch)
        load = metrics["aux"]["routers"].load
        want = -rate * (load * 4 - load.sum(-1, keepdim=True)).sign().float()
        assert torch.equal(state.params["blocks"]["moe"]["router"]["balance"], want), (seed, mesh)
        ties += int((want == 0).sum())
    assert ties


def test_a_run_goes_on_where_experts_lie_on_other_ranks(tmp_path, capsys):
    def losses(name: str, *meshes: tuple[int, str]) -> list[float]:
        out = tmp_path / name
        for steps, mesh in meshes:
            given = ["train", "--model", "deepseek-v3-tiny", "--seq", "16", "--global-batch", "8"]
            given += ["--gpt.num-layers", "2"]
            given += ["--data", argparse.__file__]
            given += ["--microbatches", "2", "--learning-rate.name", "constant", "--resume", "auto"]
            given += ["--steps", str(steps), "--out", str(out), "--mesh", mesh]
            assert main.main(given) == 0, capsys.readouterr().err
        rows = (out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]

    want = losses("one", (3, ""))
    got = losses("many", (1, "ep=2,tp=2"), (2, "pp=2,cp=2"), (3, "fsdp=2,ep=2"))
    assert got == pytest.approx(want, rel=2e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("deepseek-v3-tiny", "ep=2,tp=2", ["--sequence-parallel", "--expert-axes", "ep,tp"]),
        # rings of four: tests/nn/gloo_context.py
        pytest.param("llama-tiny", "cp=4", [], marks=pytest.mark.full),
        pytest.param(
            "gpt-oss-tiny", "cp=2,ulysses=2", ["--context", "gather"], marks=pytest.mark.full
        ),
        ("mixtral-tiny", "pp=2", ["--microbatches", "2"]),
        pytest.param("mixtral-tiny", "pp=2,dp=2", ["--microbatches", "2"], marks=pytest.mark.full),
    ],
)
def test_processes_train_as_their_simulation_does(tmp_path, in_processes, model, mesh, options):
    command = ["train", "--model", model, "--mesh", mesh, "--steps", "2", "--seq", "16"]
    command += ["--gpt.num-layers", "2"]
    command += ["--data", argparse.__file__, "--global-batch", "4", *options, "--out"]
    assert main.main([*command, str(tmp_path / "simulated")]) == 0
    in_processes(Mesh.parse(mesh).size, *command, tmp_path / "bound")
    losses = []
    for name in ("simulated", "bound"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        losses.append([row["loss"] for row in rows])
    for simulated, bound in zip(*losses, strict=True):
        assert abs(simulated - bound) <= 1e-5 * simulated
