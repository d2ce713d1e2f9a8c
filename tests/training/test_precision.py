"""Policies of precision: what they set, what is refused, and float16 with its loss scale on meshes."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import functron as ft
from functron import Mesh, P, checkpoint, gpt, optim, random, tree
from functron.cli.train import parse_train
from functron.optim import LossScale, OptimizerConfig
from functron.precision import POLICIES
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, load, with_model, with_precision
from functron.training.run import prepare
from functron.training.setup import make_setup
from functron.training.train import train as train_run
from tests.training.test_resume import losses, train
from tests.training.test_watch import CONFIG, MODELS, batch_of

SPLIT = {"sequence_parallel": True}
ROWS = [
    ("dense", "dp=2,tp=2", SPLIT | {"zero": 1}),
    ("dense", "fsdp=2", {"remat": "full", "zero": 2}),
    ("dense", "cp=2", {}),
    ("deepseek", "ep=2", {}),
    ("dense", "pp=2,tp=2", {"schedule": "zb-h1"}),
    ("tied", "pp=2,dp=2", {"vocab_over_pp": True}),
]


def taken(config: TrainConfig, steps: int, change=lambda state: state) -> tuple[list, dict]:
    """The metrics of some steps on the same batch, and the state after them."""
    made = make_setup(config, Mesh.parse(config.parallelism.mesh))
    state, found = made.init(random.key(0)), []
    for _ in range(steps):
        state, metrics = made.step(change(state), batch_of())
        found.append({name: float(metrics[name]) for name in metrics if name != "aux"})
    return found, state._asdict()


@pytest.mark.parametrize(("name", "mesh", "fields"), ROWS)
def test_a_scaled_loss_has_the_same_numbers(name, mesh, fields):
    """Factors of two round nothing: to the bit, in float64, where nothing overflows."""
    own = OptimizerConfig(clip_norm=0.5)
    config = configure(CONFIG, gpt=MODELS[name], mesh=mesh, log_layers_every=0, **fields)
    want, before = taken(configure(config, optimizer=own), 2)
    scaled = replace(own, loss_scale=LossScale(2.0**12))
    got, after = taken(configure(config, optimizer=scaled), 2)
    assert [x.pop("loss_scale") for x in got] == [4096.0] * 2
    assert [x.pop("stuck") for x in got] == [0] * 2
    assert got == want
    assert tree.paths(after["params"]) == tree.paths(before["params"])
    for a, b in zip(*(tree.leaves(x["params"]) for x in (after, before)), strict=True):
        assert torch.equal(a, b)


BF16 = configure(CONFIG, gpt=MODELS["dense"], log_layers_every=0, microbatches=1)
BF16 = with_precision(configure(BF16, optimizer=OptimizerConfig(clip_norm=0.01)), "bf16")
KINDS = []


def kinds(seen):
    """The dtypes of the gradients that a metric sees."""
    KINDS.append({leaf.dtype for leaf in tree.leaves(seen.grads)})
    return {"number": torch.ones(())}


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("", {}),
        ("", {"log_layers_every": 1}),
        ("", {"optimizer": replace(BF16.optimizer, skip_nonfinite=2)}),
        ("", {"optimizer": replace(BF16.optimizer, reduce_dtype="", name="sgd")}),
        ("", {"optimizer": replace(BF16.optimizer, grad_dtype="")}),
        ("", {"microbatches": 2}),
        ("dp=2", {"zero": 1}),
        ("dp=2", {"zero": 2}),
        ("fsdp=2", {}),
        ("tp=2", SPLIT),
    ],
)
def test_gradients_that_stay_narrow_give_the_bits_of_float32_copies(mesh, fields):
    """A metric of one's own is given float32 gradients; the steps are the same, to the bit."""
    config, found = configure(BF16, mesh=mesh, **fields), []
    for own in ("", f"{__name__}:kinds"):
        KINDS.clear()
        metrics, state = taken(configure(config, metrics=own), 2)
        found.append(([{**x, "number": 1.0} for x in metrics], state))
    assert KINDS == [{torch.float32}] * len(KINDS) != []
    (narrow, before), (wide, after) = found
    assert narrow == wide
    for a, b in zip(*map(tree.leaves, (before, after)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_gradients_that_nothing_is_added_to_have_no_float32_copies(mesh):
    """By hand: 2 + 4 + 4 + 4 bytes of parameter, master and moments, and 2 of the gradient.

    What is made of a leaf for a moment is less than another byte; copies are four more.
    """
    model = replace(MODELS["dense"], embed_dim=256, mlp_dim=2048, vocab_size=256)
    config = configure(BF16, gpt=replace(model, dtype="bfloat16"), seq=8, global_batch=2)
    made = make_setup(configure(config, mesh=mesh), Mesh.parse(mesh))
    memory = made.program().memory()
    count = memory.at_rest["parameters"] / 2
    assert memory.at_rest["optimizer"] == pytest.approx(12 * count, rel=1e-3)
    assert memory.peak_bytes <= 17 * count


STEPS, START = 7, 21
HALF = with_precision(
    configure(CONFIG, gpt=replace(MODELS["dense"], init_stddev=0.05), log_layers_every=0), "fp16"
)
HALF = configure(
    HALF, optimizer=replace(HALF.optimizer, loss_scale=LossScale(2.0**START, hysteresis=1))
)


@pytest.fixture(scope="module")
def wide():
    """The losses of the steps of float32."""
    metrics, _ = taken(with_precision(HALF, "float32"), STEPS)
    return [x["loss"] for x in metrics]


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param("", {}, marks=pytest.mark.full),
        ("dp=2,tp=2", SPLIT),
        ("fsdp=2", {"zero": 2}),
        ("pp=2", {"schedule": "zb-h1"}),
    ],
)
def test_float16_leaves_out_what_overflows_and_trains(wide, mesh, fields):
    """As in float32, but for the first steps; a state that ranks disagree on is refused."""
    metrics, state = taken(configure(HALF, mesh=mesh, **fields), STEPS)
    went = [math.isfinite(x["grad_norm"]) for x in metrics]
    assert not went[0]
    assert sum(went) >= 3
    scale = 2.0**START
    for applied, step, following in zip(went, metrics, [*metrics[1:], None], strict=True):
        scale = scale if applied else scale / 2
        assert step["loss_scale"] == scale
        assert applied or following is None or following["loss"] == step["loss"]  # nothing moved
    got = [x["loss"] for x, applied in zip(metrics, went, strict=True) if applied]
    assert got == pytest.approx(wide[: len(got)], rel=2e-3)
    masters = state["opt_state"].inner_state[1].masters
    for leaf, master in zip(*map(tree.leaves, (state["params"], masters)), strict=True):
        assert leaf.dtype == torch.float16
        assert torch.equal(leaf, master.half())


def test_small_gradients_do_not_vanish():
    """2^-26 is below the least number of float16, 2^-24, and 2^10 times it is not."""

    def loss(params, batch, key):
        return (params["w"] * batch["x"]).float().sum()

    def moved(scale: float) -> float:
        inner = optim.with_fp32_masters(optim.sgd(1.0))
        rules = LossScale(scale)
        optimizer = optim.with_loss_scale(inner, rules) if scale else inner
        weights = {"w": torch.zeros(1, dtype=torch.float16)}
        grads = ft.mean_gradients(loss, lambda batch: 64, checks_sum=False)
        step = ft.make_step(grads, optimizer, Mesh(), {"w": P()}, batch_specs=P())
        state = ft.State(
            torch.zeros((), dtype=torch.int64), weights, optimizer.init(weights), random.key(0)
        )
        batch = {"x": torch.full((1,), 2.0**-20, dtype=torch.float16)}
        state, _ = step(state, batch)
        kept = state.opt_state.inner_state if scale else state.opt_state
        return float(kept.masters["w"])

    assert moved(0.0) == 0.0
    assert moved(2.0**10) == -(2.0**-26)


FEW = ["--data", __file__, "--seq", 8, "--gpt.embed-dim", 8, "--gpt.num-heads", 2]
FEW += ["--gpt.num-kv-heads", 1, "--gpt.mlp-dim", 8]


@pytest.mark.full
def test_halves_of_masters_go_on_with_a_run(tmp_path):
    """To the bit, with and without ZeRO."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    few = [*FEW, "--gpt.num-layers", 1, "--global-batch", 2, "--save-every", 1, "--steps", 2]
    few += ["--precision", "bf16", "--optimizer.master-bits", 16, "--mesh", "dp=2"]
    assert train(*few, "--zero", 1, "--out", whole) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "2")
    assert train("--out", cut, "--resume", "--zero", 0) == 0
    ends = [checkpoint.restore(run / "checkpoints" / "2") for run in (whole, cut)]
    assert any(leaf.dtype == torch.int16 for leaf in tree.leaves(ends[0]))
    for path, a, b in zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True):
        assert torch.equal(a, b), path


def test_a_run_goes_on_to_the_bit(tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    few = [*FEW, "--gpt.num-layers", 1, "--global-batch", 1]
    few += ["--save-every", 2, "--steps", 4, "--precision", "fp16"]
    few += ["--optimizer.loss-scale.initial", 2.0**26, "--optimizer.loss-scale.hysteresis", 1]
    assert train(*few, "--out", whole) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "4")
    assert train("--out", cut, "--resume") == 0
    assert losses(cut) == losses(whole)
    scales = [[x["loss_scale"] for x in run_folder.records(run)] for run in (whole, cut)]
    assert scales[0] == scales[1]
    assert scales[0][1] < scales[0][0] < 2.0**26
    ends = [checkpoint.restore(run / "checkpoints" / "4") for run in (whole, cut)]
    for path, a, b in zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True):
        assert torch.equal(a, b), path
    capsys.readouterr()
    # in another precision where that is said, and not otherwise
    other = tmp_path / "other.toml"
    other.write_text(dump(with_precision(configure(load(cut / "config.toml"), steps=6), "fp8-row")))
    assert train("--out", cut, "--resume", "--config", other) == 2
    said = capsys.readouterr().err
    for line in (
        "precision, params: got 'bfloat16'; wanted 'float16', as in the run; fix: --precision fp8-r",
        "precision, products: got 'fp8-row'; wanted '', as in the run",
        "precision, loss_scale: got 0.0; wanted 67108864.0, as in the run",
    ):
        assert line in said
    assert train("--out", cut, "--resume", "--steps", 6, "--precision", "fp8-row") == 0
    assert (
        "recast products from plain to fp8-row; parameters from float16 to bfloat16 by their "
        "masters; without the loss scale"
    ) in capsys.readouterr().out
    assert losses(cut)[4] == pytest.approx(losses(cut)[3], rel=0.02)
    assert load(cut / "config.toml").precision.name == "fp8-row"


def test_histories_go_on_with_a_run(tmp_path, capsys):
    """To the bit, on another mesh as well; a run that has had none begins with empty ones."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    few = [*FEW, "--gpt.num-layers", 2, "--global-batch", 2, "--gpt.dtype", "float64"]
    assert train(*few, "--steps", 1, "--out", whole) == 0
    delayed = ["--precision", "float32", "--gpt.dtype", "float64", "--products", "fp8-delayed"]
    delayed += ["--optimizer.grad-dtype=", "--optimizer.reduce-dtype=", "--save-every", 3]
    assert train("--out", whole, "--resume", *delayed, "--steps", 4) == 0
    assert "histories of quantised products begin empty" in capsys.readouterr().out
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "4")
    assert train("--out", cut, "--resume", "--mesh", "pp=2,dp=2", "--zero", 1) == 0
    assert "begin empty" not in capsys.readouterr().out
    ends = [checkpoint.restore(run / "checkpoints" / "4") for run in (whole, cut)]
    found = ends[0]["params"]["blocks"]["histories"]["mlp"]["up"]
    assert (found[..., -3:] > 0).all()
    assert (found[..., :-3] == 0).all()
    for path, a, b in zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True):
        exact = "histories" in path
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-11, atol=0 if exact else 1e-14)


def test_a_run_that_overflows_without_end_stops(tmp_path):
    rules = LossScale(2.0**60, minimum=2.0**60, hysteresis=1, patience=2)
    model = replace(HALF.gpt, vocab_size=256, embed_dim=8, num_layers=1, mlp_dim=8)
    config = configure(HALF, gpt=model, steps=5, seq=8, global_batch=2, microbatches=1)
    config = configure(config, optimizer=replace(config.optimizer, loss_scale=rules))
    run = prepare(config, Mesh(), "cpu")
    with pytest.raises(
        FloatingPointError, match=r"not finite in 2 steps in a row, in embed, .*fix"
    ):
        train_run(run, tmp_path / "run")
    assert len(run_folder.records(tmp_path / "run")) == 2


ZOO = pytest.mark.applications("zoo")


@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, "tiny") for name in POLICIES), pytest.param("bf16", "bert-tiny", marks=ZOO)],
)
def test_a_policy_fills_the_options(name, model, tmp_path):
    config = with_precision(with_model(TrainConfig(), model), name)
    assert config.policy == POLICIES[name]
    assert config.precision.name == name
    sgd = configure(TrainConfig(), optimizer=OptimizerConfig("sgd", weight_decay=0.0))
    assert not optim.optimizer_problems(with_precision(sgd, name).optimizer)
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{model}"\nprecision = "{name}"')
    assert load(file) == config
    file.write_text(f'precision = "{name}"\n[optimizer]\nnu_dtype = "bfloat16"')
    assert load(file).policy == replace(POLICIES[name], nu="bfloat16")
    assert parse_train(["--model", model, "--precision", name]) == config
    validate(config)


@ZOO
def test_on_a_gpu_another_model_is_bf16_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse_train(["--model", "bert-tiny"]).policy == POLICIES["bf16"]


def test_on_a_gpu_it_is_bf16_unless_something_is_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    assert parse_train([]).policy == POLICIES["float32"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse_train([]).policy == POLICIES["bf16"]
    assert parse_train(["--device", "cpu"]).policy == POLICIES["float32"]
    assert parse_train(["--precision", "float32"]).policy == POLICIES["float32"]
    assert parse_train(["--gpt.dtype", "float32"]).architecture.dtype == "float32"
    validate(parse_train(["--gpt.dtype", "float32", "--device", "auto"]))
    file.write_text(dump(TrainConfig()))  # complete: it names all dtypes
    assert parse_train(["--config", str(file)]).policy == POLICIES["float32"]
    file.write_text("seq = 64")
    assert parse_train(["--config", str(file)]).policy == POLICIES["bf16"]
    assert parse_train(["--config", str(file), "--precision", "fp16"]).policy == POLICIES["fp16"]


def test_what_contradicts_itself_is_refused():
    half = configure(TrainConfig(), gpt=replace(gpt.PRESETS["tiny"], dtype="float16"))
    for config, message in (
        (
            configure(TrainConfig(), precision="bf16"),
            "precision: got 'bf16'; wanted the dtypes that go with it; fix: with_precision",
        ),
        (half, "optimizer.fp32_masters: got none with float16; wanted true"),
        (
            configure(half, optimizer=OptimizerConfig(fp32_masters=True, master_bits=16)),
            "master_bits: got 16 with float16; wanted 32: bfloat16 alone",
        ),
        (
            configure(TrainConfig(), optimizer=OptimizerConfig(master_bits=16)),
            "master_bits: got 16 without fp32_masters",
        ),
        (half, "optimizer.loss_scale.initial: got none with float16; wanted 65536"),
        (
            configure(
                with_precision(TrainConfig(), "fp8-tensor"),
                gpt=replace(gpt.PRESETS["tiny"], dtype="float64"),
            ),
            "optimizer.grad_dtype: got float32 with float64; wanted float64, or nothing",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            validate(config)
    with pytest.raises(ValueError, match=r"got 'bf61'.*did you mean"):
        with_precision(TrainConfig(), "bf61")
    line = str(POLICIES["fp16"])
    assert line.startswith("parameters and activations float16, masters float32; ")
    assert line.endswith("loss times 65536 at first")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_compiled_steps_are_those_of_every_policy(name):
    """The compiler keeps between operations what torch rounds, so losses are close, not equal."""
    model = replace(with_model(TrainConfig(), "tiny").gpt, num_layers=2, embed_dim=128, mlp_dim=128)
    config = configure(TrainConfig(), gpt=replace(model, num_heads=2, num_kv_heads=2, head_dim=64))
    config = with_precision(configure(config, seq=128, global_batch=1), name)
    found = []
    for compiled in (False, True):
        run = prepare(configure(config, compile=compiled), Mesh(), "cpu")
        state, metrics = run.state, {}
        batch = {"tokens": torch.arange(128)[None], "targets": torch.arange(1, 129)[None]}
        for _ in range(2):
            state, metrics = run.step(state, batch | {"rows": torch.zeros(1, dtype=torch.int64)})
        found.append(float(metrics["loss"]))
    assert found[1] == pytest.approx(found[0], rel=5e-3)


def test_a_run_on_a_gpu_says_how_products_of_float32_are_computed():
    def said(device, **given):
        config = configure(**given)
        run = SimpleNamespace(config=config, device=torch.device(device))
        return config.precision.introduce(run)

    assert said("cpu") == said("cpu", float32_matmul="high") == []
    assert "not as TF32" in said("cuda")[0]
    assert said("cuda", float32_matmul="high") == [
        "matmul products of float32 are computed as TF32"
    ]
    bf16 = {"gpt__dtype": "bfloat16", "optimizer__fp32_masters": True}
    assert said("cuda", **bf16) == []
    assert said("cuda", **bf16, float32_matmul="high")


def test_tf32_is_refused_on_gpus_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    config = configure(float32_matmul="high", global_batch=2, seq=16, format="mock")
    with pytest.raises(ValueError, match=r"float32_matmul: got high on compute capability 7\.0"):
        prepare(config, Mesh(), "cuda")
