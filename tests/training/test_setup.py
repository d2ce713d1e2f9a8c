"""The plan of a run: each thing about it is derived once."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from functron import checkpoint, random, tree
from functron.data import tokenizer
from functron.models import gpt
from functron.nn.moe import MoEConfig
from functron.optim import OptimizerConfig
from functron.optim import config as optim_config
from functron.spmd import BoundMesh, Mesh, P, Uneven
from functron.spmd.params import joined_params
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, with_model
from functron.training.resume import restore_state
from functron.training.run import prepare
from functron.training.setup import _balance_rule, make_setup
from tests.data.chats import make_tokenizer

COUNTED = {
    (gpt.__file__, "defs"),
    (optim_config.__file__, "make_optimizer"),
    (tokenizer.__file__, "open_tokenizer"),
}


def calls(function) -> Counter:
    """How often the functions of `COUNTED` are called, whoever has imported them."""
    found = Counter()

    def note(frame, event, _):
        place = (frame.f_code.co_filename, frame.f_code.co_name)
        if event == "call" and place in COUNTED:
            found[place[1]] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [("", {}), ("dp=2,tp=2", {"zero": 1}), ("pp=2,tp=2", {"schedule": "zb-h1"})],
    ids=["one", "zero", "pipeline"],
)
def test_preparing_a_run_derives_nothing_twice(mesh, settings, tmp_path):
    """With held-out sets, and the layout of checkpoints, of a tokenizer's tokens."""
    make_tokenizer(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("one two three four five " * 60)
    config = configure(
        gpt=replace(gpt.PRESETS["llama3-tiny"], vocab_size=512), data=str(text),
        tokenizer=str(tmp_path / "tokenizer"), mesh=mesh, seq=8, global_batch=4, microbatches=2,
        eval_every=1, eval_data=f"again={text}", **settings,
    )  # fmt: skip

    def whole():
        run = prepare(config, Mesh.parse(mesh))
        assert run.held_out
        assert run.setup.placement.leaves

    assert calls(whole) == {"defs": 1, "make_optimizer": 1, "open_tokenizer": 1}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "soap"])
@pytest.mark.parametrize("mesh", ["dp=3", "dp=2,tp=2", "fsdp=2", "pp=2,dp=2"])
def test_the_layout_of_a_state_is_that_of_the_state(mesh, name):
    """The placement has the shapes of the state on one rank, without ZeRO's padding."""
    zero = 0 if "fsdp" in mesh else 1
    base = configure(with_model(TrainConfig(), "llama3-tiny"), optimizer=OptimizerConfig(name))
    config = configure(base, mesh=mesh, zero=zero, global_batch=12, microbatches=2)
    made = make_setup(config, Mesh.parse(mesh))
    alone = make_setup(base, Mesh()).init(random.key(0).to("meta"))
    rows = zip(tree.paths(alone), tree.leaves(alone), strict=True)
    wanted = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in rows}
    assert {x.path: (tuple(x.shape), x.dtype) for x in made.placement.leaves} == wanted


def test_a_plan_of_another_mesh_has_the_same_definitions():
    config = configure(with_model(TrainConfig(), "llama3-tiny"), mesh="pp=2", microbatches=2)
    made = make_setup(config, Mesh(pp=2))
    assert made.without_pipeline.whole_defs is made.whole_defs
    assert not made.without_pipeline.is_pipelined


@pytest.mark.parametrize(
    ("settings", "compiled", "why"),
    [
        ({}, True, "to hide what ranks send over NCCL"),
        ({"compile": False}, False, "as compile=false says"),
        ({"compile": True, "optimizer__name": "soap"}, True, "as compile=true says"),
        ({"optimizer__offload": True}, False, "leave optimizer.offload out"),
        ({"optimizer__name": "soap"}, False, "SOAP"),
        ({"model": "mixtral-tiny"}, True, "NCCL"),
        ({"model": "mixtral-tiny", "mesh": "ep=2"}, False, "set expert_room or gpt.moe.capacity"),
        ({"model": "mixtral-tiny", "mesh": "ep=2", "expert_room": 1.25}, True, "NCCL"),
        ({"model": "mixtral-tiny", "mesh": "ep=2", "gpt__moe__capacity_factor": 2.0}, True, "NCCL"),
        ({"mesh": ""}, False, "nothing over NCCL (on: --compile)"),
    ],
)  # fmt: skip
def test_steps_are_compiled_where_ranks_talk_over_nccl(settings, compiled, why, monkeypatch):
    install(monkeypatch, triton=True, compiler=True)
    named = with_model(TrainConfig(), settings.get("model", "llama3-tiny"))
    rest = {name: value for name, value in settings.items() if name != "model"}
    config = configure(named, **{"mesh": "dp=2", **rest})
    mesh = Mesh.parse(config.parallelism.mesh)
    on_gpu, on_cpu = (BoundMesh(mesh, 0, mesh.coordinate(0), {}, kind) for kind in ("cuda", "cpu"))
    found, text = make_setup(config, on_gpu).choose_compiled()
    assert found == compiled == text.startswith("compiled")
    assert why in text
    asked = config.compute.compile is True
    assert make_setup(config, on_cpu).is_compiled == make_setup(config, mesh).is_compiled == asked
    assert make_setup(config, mesh).choose_compiled(on_gpus=True) == (found, text)


@pytest.mark.parametrize(
    ("settings", "fused", "why"),
    [
        ({}, True, "for fewer launches on a GPU (off: --gpt.no-fused-projections)"),
        ({"gpt__fused_projections": False}, False, "as gpt.fused_projections=false says"),
        ({"gpt__fused_projections": True, "optimizer__name": "soap"}, True, "projections=true says"),
        ({"mesh": "tp=8"}, False, "ranks of tp share key heads"),
        ({"mesh": "tp=3", "uneven": "heads,mlp"}, False, "ranks of tp share key heads"),
        ({"model": "deepseek-v3-tiny"}, True, "launches"),
        ({"products": "fp8-tensor"}, False, "quantised products scale each"),
        ({"lora_rank": 2}, False, "low-rank additions"),
        ({"optimizer__name": "muon"}, True, "launches"),
        ({"optimizer__name": "adafactor"}, False, "the optimizer does not treat one of several"),
        ({"optimizer__name": "functron.optim:sgd"}, False, "the optimizer"),
        ({"optimizer__groups": "blocks/*/w lr=0.5"}, True, "launches"),
        ({"optimizer__groups": "*/q/w lr=0.5"}, False, "the optimizer"),
        # blocks of 64 divide rows of both; of keys alone there are too few for 8 bits
        ({"optimizer__mu_dtype": "int8", "gpt__head_dim": 64}, True, "launches"),
        (
            {"optimizer__mu_dtype": "int8", "gpt__head_dim": 64, "gpt__embed_dim": 16,
             "gpt__num_kv_heads": 1, "gpt__num_heads": 8},
            False, "the optimizer",
        ),
    ],
)  # fmt: skip
def test_projections_are_fused_on_gpus_where_nothing_tells_them_apart(settings, fused, why):
    named = with_model(TrainConfig(), settings.get("model", "llama3-tiny"))
    rest = {name: value for name, value in settings.items() if name != "model"}
    config = configure(named, **rest)
    mesh = Mesh.parse(config.parallelism.mesh)
    made = make_setup(config, mesh, "cuda")
    found, text = made.choose_fused("cuda")
    assert (found, why in text) == (fused, True), text
    names = {part for path in tree.paths(made.whole_defs) for part in path.split("/")}
    assert bool({"qkv", "gate_up"} & names) == fused
    on_gpu, on_cpu = (BoundMesh(mesh, 0, mesh.coordinate(0), {}, kind) for kind in ("cuda", "cpu"))
    assert make_setup(config, on_gpu).whole_defs == made.whole_defs
    explicit = config.gpt.fused_projections is True
    for plain in (make_setup(config, on_cpu), make_setup(config, mesh)):
        assert bool(joined_params(plain.whole_defs)) == plain.choose_fused("cpu")[0] == explicit
    # the file and the checkpoints say what was asked for, and not what a device made of it
    assert made.config == config
    if not settings:
        assert 'fused_projections = "auto"' in dump(config)
        assert "no projections: this is no GPU" in plain.choose_fused("cpu")[1]


def test_a_run_goes_on_where_another_device_chooses(tmp_path):
    """Begun as on a GPU, gone on with as on a CPU: the leaves of one that never moved."""
    config = configure(with_model(TrainConfig(), "llama3-tiny"), seq=8, global_batch=2)
    begun, later = (make_setup(config, Mesh(), device) for device in ("cuda", "cpu"))
    state = begun.init(random.key(0))
    checkpoint.save(tmp_path / "0", state, placement=begun.placement)
    read, notes = restore_state(tmp_path / "0", later, random.key(0), torch.device("cpu"))
    want = later.init(random.key(0))
    assert tree.paths(read) == tree.paths(want)
    assert not notes
    assert all(map(torch.equal, tree.leaves(read), tree.leaves(want)))


def install(monkeypatch, *, triton: bool, compiler: bool) -> None:
    """Make it seem that these are there, or are not."""
    real = importlib.util.find_spec

    def find_spec(name, *args):
        return real(name, *args) if name != "triton" else object() if triton else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(shutil, "which", lambda name: name if compiler else None)


@pytest.mark.parametrize("tool", ["triton", "C compiler"])
def test_steps_are_not_compiled_where_a_compiler_is_missing(tool, monkeypatch):
    install(monkeypatch, triton=tool != "triton", compiler=tool == "triton")
    mesh = Mesh(dp=2)
    on_gpu = BoundMesh(mesh, 0, mesh.coordinate(0), {}, "cuda")
    made = make_setup(configure(with_model(TrainConfig(), "llama3-tiny"), mesh="dp=2"), on_gpu)
    compiled, why = made.choose_compiled()
    assert not compiled
    assert "Triton and a C compiler on this machine" in why


# --- uneven splits


ODD = {
    "gpt__embed_dim": 62,
    "gpt__num_heads": 2,
    "gpt__num_kv_heads": 2,
    "gpt__head_dim": 32,
    "gpt__vocab_multiple": 1,
    "global_batch": 12,
}


def test_uneven_splits_are_made_where_they_are_asked_for():
    """62 over 4 ranks: parts of 16; vocabularies of 256 are even on them."""
    config = configure(mesh="fsdp=4", uneven="embed, vocab", **ODD)
    made = make_setup(config, Mesh(fsdp=4))
    assert made.whole_specs["embed"] == P(Uneven("tp", 256), Uneven("fsdp", 62))
    validate(config)
    asked = r"embed_dim: got 62; wanted a multiple of fsdp=4"
    with pytest.raises(ValueError, match=asked):
        validate(configure(mesh="fsdp=4", **ODD))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"mesh": "dp=4", "uneven": "embed"}, "uneven(.|\n)*ranks that split parameters"),
        ({"mesh": "tp=3", "uneven": "head"}, "did you mean 'heads'"),
        ({"mesh": "tp=3", "uneven": "heads,mlp,vocab", "products": "nvfp4"}, "padding has places"),
    ],
)
def test_uneven_splits_that_do_nothing_or_cannot_be_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        validate(configure(**ODD, **settings))


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_biases_follow_quantiles(decay):
    """b becomes decay b - (1 - decay) beta, with nothing of the optimizer's own."""
    rule = _balance_rule(MoEConfig(balance_bias=True, balance_by="quantile", balance_decay=decay))
    beta, bias = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, -0.5], [2.0, 4.0]))
    updates, _ = rule.update({"b": beta}, rule.init({"b": bias}), {"b": bias})
    want = decay * bias - (1 - decay) * beta
    torch.testing.assert_close(bias + updates["b"], want, rtol=1e-15, atol=1e-15)
