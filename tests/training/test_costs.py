"""Costs of pipelines against those of the same step without one, and against its state."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from functron import random, tree
from functron.cli.main import main
from functron.core.tables import bytes_text
from functron.models import gpt
from functron.pipeline.partition import Part
from functron.spmd import Mesh
from functron.training import costs
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, with_model
from functron.training.costs import bubble_note, check_expert_memory, pipeline_cost
from functron.training.run import prepare
from functron.training.setup import make_setup

CONFIG = configure(
    gpt=replace(gpt.PRESETS["tiny"], num_layers=8), global_batch=16, microbatches=8, seq=64
)


@pytest.mark.pairwise(of=lambda schedule, remat: [{"schedule": schedule}, {"remat": remat}])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_stages_compute_what_the_step_without_a_pipeline_does(schedule, remat):
    config = configure(CONFIG, schedule=schedule, remat=remat)
    found = pipeline_cost(make_setup(config, Mesh(pp=4, dp=2)))
    total = 8 * sum(sum(stage.flops) for stage in found.stages)
    assert total == _hardware_flops(remat)


@functools.cache
def _hardware_flops(remat: str) -> float:
    """Of the step without a pipeline, on which no schedule has a say."""
    return make_setup(configure(CONFIG, remat=remat), Mesh(dp=2)).program().cost().hardware_flops


def test_ranks_hold_the_whole_state_between_them():
    found = pipeline_cost(make_setup(CONFIG, Mesh(pp=4, tp=2)))
    made = make_setup(CONFIG, Mesh())
    state = made.init(random.key(0).to("meta"))
    norms = [leaf for path, leaf in _leaves(state.params) if "norm" in path]
    split = tree.nbytes(state.params) - sum(leaf.nbytes for leaf in norms)
    # parameters, their sums of gradients, and Adam's two moments
    params = 4 * (split // 2 + sum(leaf.nbytes for leaf in norms))
    others = sum(rank.state_bytes for rank in found.ranks) - params
    assert 0 <= others <= 4 * 64  # step, key and Adam's count, on each rank


def _leaves(params):
    return zip(tree.paths(params), tree.leaves(params), strict=True)


def test_activations_are_held_as_the_table_says():
    """During B of 1F1B there is a cotangent, but on the last rank, and room for the next F's input."""
    found = pipeline_cost(make_setup(configure(CONFIG, schedule="1f1b"), Mesh(pp=4)))
    sent = found.stages[0].sent_bytes
    for number, rank in enumerate(found.ranks):
        live, received = min(8, 4 - number), (number < 3) + (number > 0)
        held = live * found.stages[number].held_bytes[0]
        assert rank.activation_bytes == held + received * sent


def test_trace_shows_pipelines(capsys):
    arguments = ["trace", "--mesh", "pp=2,dp=2", "--microbatches", "4", "--schedule", "zb-h1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "zb-h1: 4 microbatches" in printed
    assert "embed+" in printed
    assert main([*arguments, "--program"]) == 2
    assert "leave --program out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "gather"),
    [
        pytest.param("tiny", "step", marks=pytest.mark.full),
        ("tiny", "use"),
        pytest.param("mixtral-tiny", "use", marks=pytest.mark.full),
        pytest.param("deepseek-v3-tiny", "step", marks=pytest.mark.full),
    ],
)
def test_layouts_by_cost_count_all_that_stages_compute(model, gather):
    """Also where they hand on what routers said, and where parameters are gathered for the step."""
    config = configure(with_model(TrainConfig(), model), layout="cost", seq=32, microbatches=2)
    assert config.gpt is not None
    mesh, two = Mesh(pp=2, fsdp=2), replace(config.gpt, num_layers=2)
    config = configure(config, gpt=two, mesh=str(mesh), gather=gather, format="mock")
    validate(config)
    ends = (Part(range(0), embed=True), Part(range(0), loss=True))
    layers = [Part(range(i, i + 1)) for i in range(config.gpt.num_layers)]
    made = make_setup(config, mesh)
    total = 2 * sum(made.stage_flops(part) for part in (*ends, *layers))
    assert total == make_setup(config, Mesh(fsdp=2)).program().cost().hardware_flops
    assert total == 2 * sum(sum(stage.flops) for stage in pipeline_cost(made).stages)


def test_a_run_says_how_long_its_pipeline_waits(tmp_path, capsys):
    """1f1b leaves (p - 1) / (m + p - 1) of the time; zb-h1 works 3 of 4 F, 4 I and a W, at m = 1."""
    arguments = [
        "train", "--model", "llama3-tiny", "--gpt.num-layers", "4", "--gpt.embed-dim", "32",
        "--gpt.num-heads", "2", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "32", "--seq", "8",
        "--mesh", "pp=4", "--global-batch", "16", "--steps", "1", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    assert main(arguments) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("bubble")]
    assert len(lines) == 1
    assert "1f1b with 1 microbatch a step leaves the 4 ranks of the pipeline idle 75%" in lines[0]
    assert "less: --microbatches 16: 16%, " in lines[0]  # 3 / 19; with 8 it were 3 / 11
    assert "--schedule zb-h1: 67%" in lines[0]


def test_what_makes_a_bubble_smaller():
    few = configure(CONFIG, mesh="pp=4,dp=2", microbatches=2)
    note = bubble_note(make_setup(few, Mesh.parse(few.parallelism.mesh)))
    assert note is not None
    assert "idle 60%" in note  # 3 / 5
    assert "--microbatches 8: 27%" in note  # 3 / 11: a data rank has no more samples
    assert "dualpipe" not in note  # which holds parameters twice
    for good in (configure(few, global_batch=64, microbatches=16), configure(few, mesh="dp=2")):
        assert bubble_note(make_setup(good, Mesh.parse(good.parallelism.mesh))) is None


def test_experts_without_a_capacity_are_refused_where_the_worst_case_does_not_fit(monkeypatch):
    config = with_model(TrainConfig(), "mixtral-tiny")
    config = configure(
        config, mesh="ep=4", seq=256, global_batch=8, format="mock", compile=True,
        gpt=replace(config.gpt, num_layers=1),
    )  # fmt: skip
    mesh = Mesh(ep=4)

    def made(factor, **given):
        moe = replace(config.gpt.moe, capacity_factor=factor)
        return make_setup(configure(config, gpt=replace(config.gpt, moe=moe), **given), mesh)

    def peak_bytes(setup):  # each program is traced once
        factor = setup.config.gpt.moe.capacity_factor
        if factor not in peaks:
            peaks[factor] = setup.program().memory().peak_bytes
        return peaks[factor]

    peaks = {}
    monkeypatch.setattr(costs, "step_peak_bytes", peak_bytes)
    monkeypatch.setattr(costs, "_FACTORS", (1.0, 1.5, 2.0))
    for factor in (0.0, 1.0, 1.5, 2.0):
        peak_bytes(made(factor))
    assert peaks[1.0] < peaks[1.5] < peaks[2.0] < peaks[0.0]
    check_expert_memory(made(0.0), peaks[0.0])
    for room, factor in ((peaks[2.0] - 1, 1.5), (peaks[1.0], 1.0)):
        wanted = (
            rf"wanted at most the {re.escape(bytes_text(room))} .* capacity_factor={factor:g} of"
        )
        with pytest.raises(ValueError, match=wanted):
            check_expert_memory(made(0.0), room)
        for uncompiled in (False, "auto"):  # which makes room for what came
            check_expert_memory(made(0.0, compile=uncompiled), room)
        check_expert_memory(made(factor), room)
    few = SimpleNamespace(total_memory=peaks[1.0] - 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    with pytest.raises(ValueError, match=r"fix: more ranks for experts"):
        prepare(made(0.0).config, mesh, "cuda")
