"""``functron plan`` and ``functron recipe``, and what runs say before they begin."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from functron.apps import planner
from functron.apps.planner.estimates import estimate_step
from functron.apps.planner.machines import hardware
from functron.apps.planner.measurements import compare_records, estimate_run
from functron.apps.planner.recipes import (
    RECIPES,
    load_recipe,
    make_job_script,
    read_recipe,
    shrink_run,
)
from functron.apps.planner.search import (
    Choices,
)
from functron.apps.planner.space import (
    AXES,
    CHOSEN,
    count_rows,
    mesh_of,
)
from functron.cli.main import main
from functron.cli.train import own_machine
from functron.core.settings import value_at
from functron.spmd import DATA_AXES, Mesh
from functron.training import run_folder
from functron.training.config import TrainConfig, configure, load, with_model
from functron.training.setup import make_setup
from tests.fuzz import TOLERANCES, differences, records

SMALL = [
    "plan", "--model", "llama3-tiny", "--gpt.num-layers", "4", "--seq", "64", "--gpus", "8",
    "--global-batch", "16", "--fix", "remat=none,rows=1,fsdp=1,pp=1", "--at-least", "tp=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The folder that a search writes into, and its arguments."""
    folder = tmp_path_factory.mktemp("planned")
    files = {"--out": "best.toml", "--picture": "front.svg", "--timeline": "time.json"}
    given = [word for option, name in files.items() for word in (option, str(folder / name))]
    return folder, [*SMALL, *given, "--explain", "--why", "pp=2,tp=2", "--tokens", "1e9"]


@pytest.fixture(scope="module")
def output(planned):
    """The text that the search prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert main(planned[1]) == 0
    return said.getvalue()


def test_the_table_has_the_best_first(output):
    rows = [line.split() for line in output.splitlines() if re.match(r"\d+ +\w+=", line)]
    assert [row[0] for row in rows] == [str(n) for n in range(1, len(rows) + 1)]
    seconds = [float(re.search(r"float32|bf16 +(\S+)", " ".join(row))[1]) for row in rows]
    assert seconds == sorted(seconds)
    for row in rows:
        mesh = Mesh.parse(row[1])
        assert mesh.size == 8
        assert mesh["tp"] >= 2


def test_plans_say_how_even_routing_is_assumed_to_be(tmp_path, capsys):
    given = ["plan", "--model", "mixtral-tiny", "--gpus", "8", "--seq", "64", "--global-batch", "16",
             "--fix", "ep=8,rows=2,remat=none,zero=0", "--explain"]  # fmt: skip
    held = {}
    for room, said in {
        "1.25": "room for 1.25 times as many (expert_room)",
        "0": "room for all rows of all ranks",
    }.items():
        more = [] if room == "1.25" else ["--expert-room", room]
        assert main([*given, *more, "--out", str(tmp_path / f"{room}.toml")]) == 0
        out = capsys.readouterr().out
        loaded = "the fullest rank's experts are assumed to have 1.18 times the balanced rows"
        assert f"{loaded}, which take its time, and memory to have {said}" in out
        config = load(tmp_path / f"{room}.toml")
        assert config.compute.expert_room == float(room)
        made = make_setup(config, Mesh.parse(config.parallelism.mesh))
        held[room] = sum(estimate_run(made, hardware("h100")).memory.values())
    sizes = [*held.values()]
    assert sizes == sorted(set(sizes))
    assert main(["plan", "--model", "llama3-tiny", "--expert-room", "2"]) == 2
    assert "expert_room" in capsys.readouterr().err


def test_explained_parts_add_up_to_the_step(output):
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("part "))
    end = next(i for i, line in enumerate(lines) if i > start and line.startswith("all "))
    parts = [float(re.split(r"  +", line)[1]) for line in lines[start + 1 : end]]
    total = float(re.search(r"step (\S+) s", output)[1])
    assert sum(parts) == pytest.approx(total, rel=0.01)
    assert "why not pp=2,tp=2" in output
    assert "GPU hours" in output


def test_what_is_written_is_a_run(planned, output, capsys):
    folder = planned[0]
    made = load(folder / "best.toml")
    text = (folder / "best.toml").read_text()
    assert text.startswith("# functron plan --model llama3-tiny")
    assert Mesh.parse(made.parallelism.mesh).size == 8
    assert made.compute.compile
    assert main(["train", "--config", str(folder / "best.toml"), "--dry-run", "--hardware", "h100",
                 "--format", "mock"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "one of 8 ranks" in said
    assert "expected on NVIDIA H100" in said
    assert "with a process for each rank" in said
    assert "steps are compiled, as compile=true says" in said
    common = ["--format", "mock", "--mesh", "dp=2", "--global-batch", "8", "--dry-run"]
    assert main(["train", *common, "--hardware", "h100"]) == 0
    assert "steps are compiled, to hide what ranks send over NCCL" in capsys.readouterr().out
    assert main(["train", *common, "--device", "cpu"]) == 0
    assert "steps are not compiled: ranks send nothing over NCCL" in capsys.readouterr().out
    best = re.search(r"bf16 +(\S+)", output)[1]
    assert f"{best} s a step" in said  # as of the search
    root = ElementTree.parse(folder / "front.svg").getroot()
    assert root.tag.endswith("svg")
    events = json.loads((folder / "time.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)


def losses_of(words: list[str], *more: object) -> list[float]:
    """The losses of two steps in float32 that a command trains with these options added."""
    given = [*words, "--precision", "float32", "--no-compile", "--format", "mock",
             "--steps", "2", "--learning-rate.warmup-steps", "0", *more]  # fmt: skip
    assert main([str(word) for word in given]) == 0
    return [record["loss"] for record in run_folder.records(Path(given[-1]))]


ALONE = [
    "--mesh", "", "--layout", "", "--schedule", "1f1b", "--chunks", "0", "--uneven", "", "--zero",
    "0", "--gather", "use", "--microbatches", "1", "--no-sequence-parallel", "--device", "cpu",
]  # fmt: skip


@pytest.mark.parametrize(
    ("fixed", "layout"),
    [
        # 4 layers on 6 stages; and a head of 8,192 x 64 products on 2, which takes 13 layers
        ("pp=2,dp=2,schedule=interleaved,chunks=3", "first=0,last=0"),
        ("pp=2,dp=2,schedule=1f1b,layout=last=0", "last=0"),
    ],
)
def test_the_command_of_a_plan_with_lighter_ends_trains_as_one_rank(
    fixed, layout, tmp_path, capsys
):
    sizes = ["--gpt.num-layers", "4", "--gpt.embed-dim", "64", "--gpt.num-heads", "4",
             "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "96", "--gpt.vocab-size", "8192"]  # fmt: skip
    given = ["plan", "--model", "llama3-tiny", *sizes, "--seq", "32", "--global-batch", "8",
             "--gpus", "4", "--fix", f"{fixed},rows=1,remat=none", "--out", tmp_path / "run.toml"]  # fmt: skip
    assert main([str(word) for word in given]) == 0
    said = capsys.readouterr().out
    assert f" {layout} " in said
    command = shlex.split(re.search(r"functron (train --config \S+)", said)[1])
    assert load(command[2]).parallelism.layout == layout
    got = losses_of(command, "--device", "cpu", "--out", tmp_path / "got")
    want = losses_of(command, *ALONE, "--out", tmp_path / "want")
    assert got == pytest.approx(want, rel=1e-5)
    assert want[0] != want[1]


def test_the_command_of_a_plan_that_pads_trains_as_one_rank(tmp_path, capsys):
    """64 embedded dims on 3 ranks."""
    given = ["plan", "--model", "llama3-tiny", "--gpt.num-layers", "1", "--gpt.embed-dim", "64",
             "--seq", "32", "--global-batch", "6", "--gpus", "3", "--cpu-seconds", "2",
             "--fix", "fsdp=3,rows=1,remat=none", "--out", str(tmp_path / "run.toml")]  # fmt: skip
    assert main(given) == 0
    command = shlex.split(re.search(r"functron (train --config \S+)", capsys.readouterr().out)[1])
    assert load(command[2]).parallelism.uneven == "embed"
    got = losses_of(command, "--device", "cpu", "--out", tmp_path / "got")
    want = losses_of(command, *ALONE, "--out", tmp_path / "want")
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--hardware", "h10"], "did you mean 'h100'?"),
        (["--gpus", "7", "--fix", "tp=2"], "a multiple of 2"),
        (["--fix", "tp=16"], "wanted a multiple of tp=16"),
        (["--gpus", "0"], "gpus: got 0; wanted at least 1"),
        (["--seq", "100000"], "at most gpt.max_seq=256"),
        (["--why", "tpp=2"], "did you mean 'tp'?"),
        (["--timeline", "x.png"], "ends in .svg or .json"),
        (["--precision", "bf17"], "did you mean 'bf16'?"),
        (["--precisions", "bf16,bf17"], "got 'bf17'"),
        (["--nodes", "3x8"], "gpus: got 16 with --nodes 3x8; wanted 24, as the nodes have"),
        (["--hardware", "h100,a100"], "plan for the slowest kind alone"),
    ],
)
def test_mistakes_are_messages(more, said, capsys):
    arguments = ["plan", "--model", "llama3-tiny", "--gpus", "16", "--global-batch", "16", *more]
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_nodes_set_the_gpus_and_what_tp_may_span(capsys):
    given = ["plan", "--model", "llama3-tiny", "--gpt.num-layers", "1", "--seq", "64",
             "--global-batch", "16", "--fix", "rows=1,remat=none,dp=4,tp=2,zero=1", "--nodes", "4x2",
             "--gpus", "8", "--cpu-seconds", "1"]  # fmt: skip
    assert main(given) == 0
    assert "on 8 x NVIDIA H100 80GB SXM in nodes of 2 (" in capsys.readouterr().out
    gpus, machine = planner.divide_nodes("4x2", hardware("h100"))
    space = Choices(with_model(configure(global_batch=8), "llama3-tiny"), machine).space(gpus)
    assert {mesh_of(c)["tp"] for c in space.candidates()} == {1, 2}


@pytest.mark.applications("zoo")
def test_models_that_are_no_gpts_are_refused(capsys):
    assert main(["plan", "--model", "mamba2-130m"]) == 2
    assert "wanted a GPT; fix: estimate one mesh" in capsys.readouterr().err


def test_a_model_that_fits_on_no_mesh(capsys):
    """405 billion parameters of 2 + 4 + 12 bytes on 8 GPUs of 78 GiB."""
    arguments = ["plan", "--model", "llama3-405b", "--gpus", "8", "--global-batch", "8",
                 "--fix", "tp=8,remat=full,rows=1"]  # fmt: skip
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "nothing fits: tp=8" in said
    assert "GiB too much" in said
    times = int(re.search(r"about (\d+) times as many GPUs", said)[1])
    assert times == pytest.approx(405.9e9 * (2 + 4 + 12) / 8 / (78 * 2**30), abs=1.5)


def test_help_names_what_can_be_asked(capsys):
    assert main(["plan", "--help"]) == 0
    said = capsys.readouterr().out
    for option in ("--gpus", "--hardware", "--fix", "--at-least", "--why", "--explain", "--out"):
        assert option in said
    assert main(["recipe", "--help"]) == 0
    assert "--sbatch" in capsys.readouterr().out


# --- runs


def test_a_run_says_what_was_expected_of_it(tmp_path, capsys):
    arguments = [
        "train", "--model", "llama3-tiny", "--gpt.num-layers", "1", "--gpt.embed-dim", "32",
        "--gpt.num-heads", "2", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "32", "--seq", "8",
        "--global-batch", "2", "--format", "mock", "--steps", "21", "--device", "cpu",
        "--hardware", "cpu", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    (line,) = (x for x in said.splitlines() if x.startswith("expect "))
    assert "s a step" in line
    assert "of the fullest rank, on CPU" in line
    assert len(re.findall(r"measured .* the median of steps 5 to 20", said)) == 1


def test_what_is_expected_of_a_run_on_this_machine_is_told_before_any_step(capsys):
    options = ["--model", "llama3-tiny", "--seq", "32", "--lora-rank", "3", "--format", "mock"]
    assert main(["train", *options, "--device", "cpu", "--dry-run"]) == 0
    _, _, expected = capsys.readouterr().out.partition("\n\nexpected on ")
    assert "s a step" in expected


def test_a_gpu_that_is_known_needs_no_name(monkeypatch):
    config, name = with_model(TrainConfig(), "llama3-tiny"), "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: name)
    machine = own_machine(config, "cuda")
    assert machine is not None
    assert machine.name == "NVIDIA H100 80GB SXM"
    assert own_machine(config, "cpu") is None  # which would have to be measured
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "NVIDIA H100 PCIe")
    assert own_machine(config, "cuda") is None


def test_products_as_tf32_are_foreseen():
    """By hand: a step with no other work than products, at the rates of the data sheet."""
    config = with_model(configure(seq=2048, global_batch=2, format="mock"), "llama3-tiny")
    sizes = {"num_layers": 1, "embed_dim": 4096, "mlp_dim": 16384, "max_seq": 2048}
    config = configure(config, gpt=replace(config.gpt, **sizes), compile=True)
    machine = hardware("h100")
    parts = []
    for chosen in ("highest", "high"):
        made = make_setup(configure(config, float32_matmul=chosen), Mesh())
        parts.append(planner.estimate_run(made, machine).parts)
    rates = machine.peak_flops
    ratio = rates["tf32"] / rates["float32"]
    assert parts[0]["products"] / parts[1]["products"] == pytest.approx(ratio, rel=0.02)
    choices = Choices(configure(config, float32_matmul="high"), machine)
    assert choices.machine.peak(torch.float32) == rates["tf32"]


@pytest.mark.applications("zoo")
def test_the_machine_of_a_model_that_is_no_gpt_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "NVIDIA H100 80GB HBM3")
    assert own_machine(with_model(TrainConfig(), "mamba2-130m"), "cuda") is None


def test_expected_and_measured_part_where_ranks_wait():
    config = with_model(configure(mesh="dp=2", seq=64), "llama3-tiny")
    made = make_setup(configure(config, gpt=replace(config.gpt, num_layers=1)), Mesh(dp=2))
    foreseen = estimate_run(made, hardware("h100"))
    seconds = 2 * foreseen.step_seconds
    ranks = {"0": {"compute": foreseen.step_seconds / 2, "wait/dp": 1.5 * foreseen.step_seconds}}
    rows = [
        {"step": n, "step_seconds": 9.0 if n < 5 else seconds, "ranks": ranks,
         "peak_memory_bytes": 2**30}
        for n in range(1, 21)
    ]  # fmt: skip
    text = compare_records(foreseen, rows)
    assert "steps 5 to 20: +100%" in text
    said = []
    with planner.report_comparison(foreseen, said.append) as write:
        for row in rows:
            write(row)
    assert said == [text]
    expected = planner.describe_estimate(foreseen)
    assert expected.startswith(f"{foreseen.step_seconds:.3g} s a step")
    assert f"MFU {foreseen.mfu:.1%}" in expected
    lines = text.splitlines()
    assert lines[1].split()[0] == "wait/dp"  # where they part most
    assert "measured 1.00 GiB" in lines[-1]


# --- recipes, which have sections of the guard


@pytest.mark.applications("guard")
def test_recipes_are_listed_and_shown(capsys):
    assert main(["recipe", "ls"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in RECIPES)
    assert said.rstrip() == planner.list_recipes().rstrip()
    assert main(["recipe", "show", "llama3-405b-16384"]) == 0
    shown = capsys.readouterr().out
    assert 'model = "llama3-405b"' in shown
    assert shown.startswith("# functron plan --model llama3-405b --gpus 16384 --hardware h100")
    assert main(["recipe", "show", "llama3-405b-1638"]) == 2
    assert "did you mean 'llama3-405b-16384'?" in capsys.readouterr().err
    assert main(["recipe", "show"]) == 2
    assert "wanted one of" in capsys.readouterr().err


@pytest.mark.applications("guard")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_runs_that_fit(name):
    """On their mesh, by what its ranks hold of the state; all they hold is for --full."""
    config = load_recipe(name)
    mesh = Mesh.parse(config.parallelism.mesh)
    made = make_setup(config, mesh)
    assert name.endswith(f"-{mesh.size}")
    assert (
        config.data.global_batch
        % (config.parallelism.microbatches * math.prod(mesh[a] for a in DATA_AXES))
        == 0
    )
    if made.is_pipelined:
        assert made.partition.layout
    choices = Choices(config, hardware(machine_of(name)))
    assert choices.problems(config) == []
    assert choices.state_bytes(config) < choices.capacity_bytes
    chosen = {name: value_at(config, path) for name, path in CHOSEN.items()}
    chosen |= {axis: mesh[axis] for axis in AXES} | {"rows": count_rows(config)}
    assert [*choices.space(mesh.size, fixed=chosen).candidates()] == [config]


SEEDS = {
    "llama3-8b-cp2-8": {"dp": 4, "cp": 2},
    "llama3-70b-64": {"dp": 2, "tp": 4, "pp": 4, "cp": 2},
    "llama3-405b-1024": {"dp": 8, "tp": 8, "pp": 8, "cp": 2},
    "gpt3-175b-128": {"dp": 4, "tp": 4, "pp": 8},
    "gpt3-175b-512": {"dp": 16, "tp": 4, "pp": 8},
}
"""Layouts of NVIDIA's recipes: dp by hand, the GPUs divided by the other axes."""


@pytest.mark.applications("guard")
@pytest.mark.parametrize("name", SEEDS)
def test_seeds_have_the_layouts_of_other_libraries(name):
    mesh = Mesh.parse(load_recipe(name).parallelism.mesh)
    axes = {axis: size for axis, size in mesh.axes if size > 1}
    axes["dp"] = axes.get("dp", 1) * axes.pop("fsdp", 1)  # which the planner chooses between
    assert axes == SEEDS[name]


@pytest.mark.applications("guard")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_what_they_resemble_and_what_the_planner_would_rather_do(name):
    """The command and four lines; nothing takes longer than what the planner would rather do."""
    lines = [x.removeprefix("# ") for x in read_recipe(name).splitlines() if x.startswith("# ")]
    command, expected, resembles, choice, source = lines
    assert "GiB of the fullest rank" in expected
    low, high = re.search(r"\((\S+) to (\S+)\)", expected).groups()
    seconds = [float(re.search(r": (\S+) s a step", x)[1]) for x in (expected, choice)]
    assert float(low) < seconds[0] < float(high)
    assert seconds[1] <= seconds[0]
    fixed = " --fix " in command
    assert choice.startswith("the planner would rather: " if fixed else "the planner's choice: ")
    assert fixed or seconds[1] == seconds[0]
    assert resembles.startswith("resembles: ")
    assert source.startswith("batch and learning rate: ")


def machine_of(name: str) -> str:
    """That of the command that made it."""
    return re.search(r"--hardware (\w+)", read_recipe(name))[1]


@pytest.mark.applications("guard")
@pytest.mark.full  # traces of all layers
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_by_their_traces(name):
    config = load_recipe(name)
    choices = Choices(config, hardware(machine_of(name)))
    found = estimate_step(choices._make_step(config), choices.machine)
    assert found.fits
    assert found.num_gpus == Mesh.parse(config.parallelism.mesh).size


@pytest.mark.applications("guard")
@pytest.mark.parametrize(
    "name",
    [n if n == "llama3-8b-8" else pytest.param(n, marks=pytest.mark.full) for n in RECIPES],
)
def test_recipes_train_as_without_a_mesh_when_they_are_small(name):
    config = shrink_run(load_recipe(name))
    alone = configure(
        config, mesh="", schedule="1f1b", chunks=0, zero=0, sequence_parallel=False, gather="use",
    )  # fmt: skip
    for want, got in zip(records(alone), records(config), strict=True):
        assert list(differences(want, got, TOLERANCES["float32"])) == []


@pytest.mark.applications("guard")
@pytest.mark.parametrize("name", RECIPES)
def test_scripts_fit_their_recipes(name):
    text = make_job_script(name)
    nodes = int(re.search(r"--nodes=(\d+)", text)[1])
    ranks = int(re.search(r"--nproc-per-node (\d+)", text)[1])
    assert nodes * ranks == Mesh.parse(load_recipe(name).parallelism.mesh).size
    assert f"{name}.toml" in text
    assert not re.search(r"@[A-Z]+@", text)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
