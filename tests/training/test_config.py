"""Training configurations: TOML there and back, precedence, and every mistake at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w
import yaml

from functron import Mesh
from functron.core.errors import Problem
from functron.core.settings import hints_of, path_of, setting, settings_of, value_at, with_sections
from functron.models import gpt
from functron.models.gpt import GPTConfig
from functron.nn import RopeScaling
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.training import RunSetup, make_setup
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, load, with_model
from functron.training.run import prepare
from functron.training.train import train


def problems(config, **kwargs) -> str:
    with pytest.raises(ValueError, match="cannot train with this configuration") as caught:
        validate(config, **kwargs)
    return str(caught.value)


def test_a_setting_of_a_section_is_named_with_its_place():
    """As a field, an argument, or in dataclasses.replace, where they all were in functron 0.1."""
    message = r"no field 'save_every', .* fix: config.checkpoint.save_every, or configure\(config, "
    with pytest.raises(TypeError, match=message):
        TrainConfig(save_every=3)  # type: ignore[call-arg]  # the mistake
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(TrainConfig(), save_every=3)  # type: ignore[call-arg]  # again
    with pytest.raises(AttributeError, match=message):
        getattr(TrainConfig(), "save_" + "every")
    with pytest.raises(AttributeError, match=r"no field 'step'; fix: did you mean 'steps'"):
        getattr(TrainConfig(), "st" + "ep")


@pytest.mark.parametrize("model", list(gpt.PRESETS))
def test_toml_there_and_back(tmp_path, model):
    config = with_model(configure(data="x", mesh="dp=2", nproc=2, seed=7, out="o"), model)
    path = tmp_path / "config.toml"
    path.write_text(dump(config))
    assert load(path) == config


def test_a_dump_is_complete(tmp_path):
    changed = configure(
        gpt=dataclasses.replace(gpt.PRESETS["llama3-405b"], rope_scaling=None, num_layers=3),
        model="llama3-405b",
        optimizer=OptimizerConfig(name="sgd", b1=0.5),
        learning_rate=ScheduleConfig(name="wsd", peak=1.0),
    )
    table = tomllib.loads(dump(changed))
    assert set(table) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(table["gpt"]) == {f.name for f in dataclasses.fields(GPTConfig)}
    path = tmp_path / "config.toml"
    path.write_text(dump(changed))
    # also where the preset says otherwise: this one has a rope_scaling that was switched off
    assert load(path) == changed


def test_a_file_overrides_its_preset_and_that_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "gpt2"\nsteps = 7\n[gpt]\nnum_layers = 2\nnorm_eps = 1\n[learning_rate]\npeak = 1e-2\n'
    )
    config = load(path)
    gpt2 = dataclasses.replace(gpt.PRESETS["gpt2"], num_layers=2, norm_eps=1.0)
    rate = dataclasses.replace(TrainConfig().learning_rate, peak=1e-2)
    assert config == configure(model="gpt2", gpt=gpt2, steps=7, learning_rate=rate)
    assert isinstance(config.gpt.norm_eps, float)
    assert load(path, model="llama3-8b").gpt == gpt.PRESETS["llama3-8b"]
    assert load(path, model="llama3-8b").steps == 7


T5 = pytest.param("t5-small", marks=pytest.mark.applications("zoo"))


@pytest.mark.parametrize("model", ["tiny", "llama3-8b", "mixtral-tiny", T5])
def test_yaml_there_and_back(tmp_path, model):
    config = with_model(configure(data="x: 1", mesh="dp=2", seed=7, split="969,30,1"), model)
    rate = ScheduleConfig(peak=1e-05, end_fraction=0.0)
    config = configure(config, learning_rate=rate, resume="auto", schedule="off")
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(tomllib.loads(dump(config)), sort_keys=False))
    assert load(path) == config


def test_yaml_reads_as_people_mean_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama3-8b\nsteps: 1_000\nschedule: off\nout: 12:30\ndata: 2026-11-23\n"
        "compile: true\nlearning_rate:\n  peak: 1e-3\n  end: .5\n"
        "gpt: {rope_scaling: null, norm_eps: 1}\n"
    )
    config = load(path)
    gpt8 = dataclasses.replace(gpt.PRESETS["llama3-8b"], rope_scaling=None, norm_eps=1.0)
    rate = dataclasses.replace(TrainConfig().learning_rate, peak=1e-3, end=0.5)
    assert config == configure(
        model="llama3-8b", gpt=gpt8, steps=1000, schedule="off", out="12:30", data="2026-11-23",
        compile=True, learning_rate=rate,
    )  # fmt: skip
    path.write_text("base: &b {peak: 2}\nlearning_rate: {<<: *b, end: 1}\n")
    with pytest.raises(ValueError, match="cannot use the configuration") as caught:
        load(path)
    assert str(caught.value).count("  - ") == 1  # base, and nothing in learning_rate
    path.write_text("# nothing yet\n")
    assert load(path) == TrainConfig()


def test_mistakes_in_yaml_are_those_of_toml(tmp_path):
    texts = {
        ".toml": 'stepz = 3\nseq = "long"\ncompile = "yes"\n[gpt]\nnum_layer = 2\nembed_dim = true\n',
        ".yaml": "stepz: 3\nseq: long\ncompile: yes\ngpt:\n  num_layer: 2\n  embed_dim: true\n",
    }
    messages = []
    for suffix, text in texts.items():
        path = (tmp_path / "run").with_suffix(suffix)
        path.write_text(text)
        with pytest.raises(ValueError, match="cannot use the configuration") as caught:
            load(path)
        messages.append(str(caught.value).replace(str(path), "PATH"))
    assert messages[0] == messages[1]
    assert messages[0].count("  - ") == 5


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("steps: 3\nsteps: 4\n", "got steps twice in the mapping of line 1"),
        ("gpt:\n  bias: true\n  bias: false\n", "got bias twice in the mapping of line 2"),
        ("- steps\n", "got a list, where keys and values should be"),
        ("steps: [1\n", "got while parsing a flow sequence"),
        ("mesh: !!python/name:os.system x\n", "could not determine a constructor"),
    ],
)
def test_what_is_no_configuration_in_yaml_is_named(tmp_path, text, got):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="wanted a readable YAML file") as caught:
        load(path)
    assert got in str(caught.value)


def test_yaml_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "yaml" else find(name)
    )
    (tmp_path / "run.yaml").write_text("steps: 3\n")
    with pytest.raises(ValueError, match=r"pip install 'functron\[yaml\]', or write it as TOML"):
        load(tmp_path / "run.yaml")
    with pytest.raises(ValueError, match="got No such file"):
        load(tmp_path / "none.yaml")


def test_nested_optional_tables(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "llama3-8b"\n[gpt.rope_scaling]\nfactor = 4\n')
    assert load(path).gpt.rope_scaling == RopeScaling(factor=4.0)


def test_all_unknown_keys_and_wrong_kinds_are_listed(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'stepz = 3\nseq = "long"\nmodel = "tinny"\ntensorboard = 1\nremat = "some"\n'
        "[gpt]\nnum_layer = 2\nembed_dim = true\n[learning_rate]\npeek = 1\n"
    )
    with pytest.raises(ValueError, match="cannot use the configuration") as caught:
        load(path)
    for line in (
        "stepz: got an unknown key; wanted a known one; fix: did you mean 'steps'?",
        "seq: got 'long'; wanted a whole number",
        "model: got 'tinny'; wanted a preset; fix: did you mean 'tiny'?",
        "tensorboard: got 1; wanted true or false",
        "remat: got 'some'; wanted one of 'none', 'full', 'selective', 'dots'",
        "gpt.num_layer: got an unknown key; wanted a known one; fix: did you mean 'num_layers'?",
        "gpt.embed_dim: got True; wanted a whole number",
        "learning_rate.peek: got an unknown key; wanted a known one; fix: did you mean 'peak'?",
    ):
        assert line in str(caught.value)


ORIGINS = [
    "hf:/models/x", "hf:gone", "run:r", "megatron:ckpt", "megatron:x/llama.sh", "words",
    "megatron:llama-3.1-8b", "megatron:iter_0.5", "megatron:model.pt",
]  # fmt: skip


@pytest.mark.parametrize("source", ORIGINS)
def test_what_a_run_records_of_its_origin_loads_no_model(tmp_path, source):
    """A file may have it, as a run's own does; a run with random parameters is none of that model."""
    path = tmp_path / "run.toml"
    path.write_text(f'model = "qwen3"\nsource = "{source}"\n')
    config = load(path)
    for begins in (config, configure(config, out=str(tmp_path / "new"))):
        text = problems(begins)
        assert f"source: got {source!r}; wanted no source for a run that begins" in text
        assert "functron convert hf:PATH run:RUN" in text
    with pytest.raises(ValueError, match="functron convert hf:PATH run:RUN"):
        train(prepare(configure(config, steps=1, seq=16), Mesh()), None)
    lines = ("launch:pretrain.sh", "launch:llama-3.1", "megatron:pretrain.sh", "megatron:a.yaml")
    for line in lines:  # the architecture alone
        validate(configure(config, source=line))


def test_unreadable_files_are_taught(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory; wanted a readable TOML file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ValueError, match="at line 1, column 9"):
        load(tmp_path / "bad.toml")


def test_the_defaults_and_meshes_are_valid(tmp_path):
    validate(TrainConfig())
    validate(configure(mesh="dp=2,tp=4", sequence_parallel=True, microbatches=2))
    validate(configure(mesh="dp=2,tp=2", nproc=4, out=str(tmp_path / "new" / "run")))
    validate(configure(mesh="dp=2"), processes=2)


def test_every_problem_is_reported_at_once(tmp_path):
    config = configure(
        gpt=GPTConfig(
            num_heads=8, num_kv_heads=8, mlp_dim=100, vocab_size=128, max_seq=64, logit_cap=30.0
        ),
        loss_chunk_tokens=4,
        data=str(tmp_path / "nowhere"),
        mesh="dp=3,tp=8,pp=2",
        nproc=5,
        sequence_parallel=True,
        seq=67,
        microbatches=2,
        optimizer=OptimizerConfig(name="adamw2"),
        learning_rate=ScheduleConfig(name="cosin"),
        save_every=-1,
        cuda_graph=True,
    )
    before = dataclasses.asdict(config)
    text = problems(config)
    for line in (
        "mlp_dim: got 100; wanted a multiple of tp=8",
        "global_batch: got 8; wanted a multiple of 6: data-parallel ranks 3 x microbatches 2; fix: set it to 12",
        "seq: got 67; wanted a multiple of 8: tp=8 under sequence_parallel; fix: set it to 72",
        "seq: got 67; wanted at most gpt.max_seq=64",
        "loss_chunk_tokens: got 4 with gpt.logit_cap; wanted 0: capped logits are made at once",
        "nproc: got 5 for a mesh of 48; wanted one process per rank; fix: set nproc=48",
        "gpt.vocab_size: got 128 token ids; wanted at least 256",
        "nowhere: got nothing there",
        "optimizer.name: got 'adamw2'; wanted an optimizer; fix: did you mean 'adamw'?",
        "learning_rate.name: got 'cosin'; wanted a learning-rate schedule; fix: did you mean 'cosine'?",
        "save_every: got -1; wanted at least 0",
        "cuda_graph: got true with pp=2 on processes; wanted a step that is one program",
        "cuda_graph: got true without compile on a GPU; wanted a compiled step of a CUDA GPU",
    ):
        assert line in text
    assert dataclasses.asdict(config) == before


def test_a_compiled_step_on_a_gpu_does_not_reach_state_in_host_memory():
    config = configure(compile=True, optimizer__offload=True, global_batch=2, seq=16, format="mock")
    says = r"compile: got true with optimizer\.offload on a GPU; .* fix: --compile auto, or no"
    with pytest.raises(ValueError, match=says):
        validate(configure(config, device="cuda"))
    with pytest.raises(ValueError, match=says):  # of auto, which finds one
        prepare(config, Mesh(), "cuda")
    validate(configure(config, device="cpu"))


def test_experts_and_long_contexts_that_cannot_be():
    text = problems(configure(mesh="ep=2"))
    assert "mesh: got ep=2; wanted ep=1: this decoder has no experts" in text
    assert "put those ranks on dp, fsdp or tp" in text
    text = problems(configure(mesh="cp=4,ulysses=3", seq=100, context="gather"))
    assert "seq: got 100; wanted a multiple of 24: cp=4 x ulysses=3 x 2 for zigzag" in text
    assert "num_heads: got 8; wanted a multiple of tp=1 x ulysses=3" in text
    assert "context: got 'gather'" in problems(configure(context="gather"))
    mixtral = with_model(TrainConfig(), "mixtral-tiny")
    text = problems(configure(mixtral, mesh="ep=3,tp=2", expert_axes="ep,tp"))
    assert "moe.num_experts: got 8; wanted a multiple of ep=3 x tp=2" in text
    assert "expert_axes: got 'ep,tp'; wanted tokens that tp splits" in text
    text = problems(configure(mixtral, mesh="dp=2", expert_axes="dp"))
    assert "expert_axes: got ('dp',); wanted some of ('ep_node', 'ep', 'cp'" in text


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"zero": 1},
            "zero: got 1 on one rank; wanted several dp, ep_node, ep, cp or ulysses ranks",
        ),
        ({"zero": 2, "mesh": "fsdp=2"}, "zero: got 2 on fsdp=2; wanted several dp, ep_node"),
        ({"zero": 3, "mesh": "tp=2"}, "zero: got 3 on tp=2; wanted several dp or fsdp ranks"),
        (
            {"gather": "step", "mesh": "dp=2"},
            "gather: got 'step', which has no effect; wanted ranks that hold",
        ),
        ({"mesh": "fsdp=5", "global_batch": 5}, "embed_dim: got 256; wanted a multiple of fsdp=5"),
    ],
)
def test_divisions_among_data_parallel_ranks_that_cannot_be(fields, line):
    assert line in problems(configure(**fields))


def test_unknown_axes_and_wrong_process_counts():
    assert "did you mean 'tp'?" in problems(configure(mesh="tpp=2"))
    assert "mesh: got 3 processes for a mesh of 2" in problems(configure(mesh="dp=2"), processes=3)


@pytest.mark.parametrize("name", ["steps", "seq", "global_batch", "microbatches"])
def test_counts_are_positive(name):
    text = problems(configure(TrainConfig(), **{name: 0}))
    assert f"{name}: got 0; wanted at least 1" in text


def test_run_folders_are_not_overwritten(tmp_path):
    (tmp_path / "run").mkdir()
    validate(configure(out=str(tmp_path / "run")))
    (tmp_path / "run" / "metrics.jsonl").touch()
    text = problems(configure(out=str(tmp_path / "run")))
    assert "a folder with files; wanted a new or empty folder; fix: choose another folder" in text
    assert "a file" in problems(configure(out=str(tmp_path / "run" / "metrics.jsonl")))
    below = str(tmp_path / "run" / "metrics.jsonl" / "deeper")
    assert "a place to write" in problems(configure(out=below))


def test_extras_that_are_missing_are_taught(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = problems(configure(tensorboard=True, wandb=True))
    assert "pip install 'functron[tensorboard]'" in text
    assert "pip install 'functron[wandb]'" in text


def test_the_schedule_ends_with_the_run_unless_told_otherwise():
    assert configure(steps=77).rate_schedule.total_steps == 77
    rate = ScheduleConfig(total_steps=500)
    assert configure(steps=77, learning_rate=rate).rate_schedule.total_steps == 500


# --- pipelines


def pipeline(**fields) -> TrainConfig:
    """A run of the preset with 4 layers on two ranks."""
    return configure(configure(mesh="pp=2", microbatches=2), **fields)


def test_pipelines_are_valid(tmp_path):
    for fields in (
        {},
        {"schedule": "interleaved"},
        {"schedule": "breadth-first", "chunks": 2, "layout": "E|t|tt|tL"},
        {"schedule": "zbv", "layout": "cost", "mesh": "dp=2,pp=2,tp=2", "sequence_parallel": True},
        {"schedule": "dualpipe", "microbatches": 4, "layout": "first=1"},
        {"mesh": "pp=3", "layout": "first=1, last=0"},
        {"mesh": "pp=4", "layout": "Et|t*2|t,|L", "nproc": 4},
    ):
        validate(pipeline(**fields))
    text = "microbatches: 2\n F0 .\n F1 F0\n . B0\n B0 F1\n . B1\n B1 .\n"
    (tmp_path / "own.txt").write_text(text)
    validate(pipeline(schedule=str(tmp_path / "own.txt")))
    with pytest.raises(ValueError, match="num_microbatches: got 4; wanted 2, as in the schedule"):
        validate(pipeline(schedule=str(tmp_path / "own.txt"), microbatches=4))


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"schedule": "zbh1"}, ["name: got 'zbh1'; wanted a schedule; fix: did you mean 'zb-h1'?"]),
        ({"schedule": "duelpipe"}, ["did you mean 'dualpipe'?"]),
        ({"schedule": "a/table.txt"}, ["name: got 'a/table.txt'; wanted a schedule", "or the path of a table"]),
        ({"schedule": "forward"}, ["schedule: got forward, forwards only; wanted one that trains"]),
        ({"schedule": "interleaved", "microbatches": 3, "global_batch": 6}, ["num_microbatches: got 3; wanted a multiple of the group size, 2; fix: take 2 or 4"]),
        ({"schedule": "dualpipe"}, ["num_microbatches: got 2; wanted an even number, at least twice the 2 ranks; fix: use 4"]),
        ({"schedule": "dualpipe", "mesh": "pp=3", "microbatches": 8}, ["num_ranks: got 3; wanted an even number, at least 2; fix: use 2 or 4"]),
        ({"schedule": "dualpipev"}, ["num_microbatches: got 2; wanted at least twice the 2 ranks; fix: use 4"]),
        ({"schedule": "zbv", "chunks": 3}, ["num_chunks: got 3; wanted 2, as in the schedule; fix: give 2"]),
        ({"chunks": 2}, ["schedule 1f1b", "num_chunks: got 2; wanted 1, as in the schedule; fix: give 1"]),
        ({"schedule": "interleaved", "chunks": 1}, ["num_chunks: got 1; wanted 2 or more; fix: or take 1f1b"]),
        ({"chunks": -1}, ["chunks: got -1; wanted at least 0"]),
        ({"mesh": "pp=8"}, ["layout: got 4 layers for 8 stages; wanted a layer for every stage; fix: use at most 4 stages"]),
        ({"schedule": "interleaved", "chunks": 3}, ["layout: got 4 layers for 6 stages", "use at most 4 stages"]),
        ({"mesh": "pp=8", "layout": "cost"}, ["layout: got 4 layers; wanted at least 8; fix: use at most 4 stages"]),
        ({"layout": "Ett|ttt"}, ["cannot use the layout 'Ett|ttt'", "layout: got 5 layers (t); wanted 4", "wanted one L, at the very end"]),
        ({"layout": "Ett|t|tL"}, ["layout: got 3 stages (separated by |); wanted 2: pipeline ranks x chunks"]),
        ({"layout": "evn"}, ["layout column 1: got 'e'; wanted one of E t L | ( ) *N ,"]),
        ({"layout": "Ettm|ttL"}, ["layout column 4: got 'm', a multi-token prediction layer"]),
        ({"mesh": "pp=4", "layout": "Ett||tt|L"}, ["layout Ett||tt|L: got no parameters on rank 1; wanted some on every rank"]),
        ({"layout": "first=5"}, ["first: got 5; wanted from 0 to 4"]),
        ({"layout": "first=1,last=1"}, ["layout: got 4 layers for 2 stages with first=1 and last=1; wanted ends that add up to 4 layers"]),
        ({"layout": "cost", "seq": 0}, ["seq: got 0; wanted at least 1"]),
        ({"layout": "cost", "global_batch": 0}, ["global_batch: got 0; wanted at least 1"]),
        ({"mesh": "", "schedule": "gpipe", "layout": "Et|tL", "chunks": 2}, [
            "schedule: got 'gpipe', which has no effect; wanted pp in the mesh; fix: leave --schedule out, or add pp=N",
            "layout: got 'Et|tL', which has no effect; wanted pp in the mesh; fix: leave --layout out, or add pp=N",
            "chunks: got 2, which has no effect; wanted pp in the mesh; fix: leave --chunks out, or add pp=N",
        ]),
    ],
)  # fmt: skip
def test_pipelines_that_cannot_be(fields, lines):
    text = problems(pipeline(**fields))
    for line in lines:
        assert line in text


def test_problems_of_pipelines_come_with_the_others():
    text = problems(pipeline(schedule="dualpipe", mesh="pp=2,tp=3", global_batch=5, steps=0))
    for line in (
        "num_microbatches: got 2; wanted an even number, at least twice the 2 ranks; fix: use 4",
        "num_heads: got 8; wanted a multiple of tp=3",
        "global_batch: got 5; wanted a multiple of 2",
        "steps: got 0; wanted at least 1",
    ):
        assert text.count(line) == 1
    for layout in ("", "cost"):
        text = problems(pipeline(mesh="pp=2,tp=3", layout=layout))
        assert text.count("num_heads: got 8; wanted a multiple of tp=3") == 1


def test_a_plan_is_made_of_a_configuration_and_a_mesh():
    config = configure(mesh="dp=2")
    made = make_setup(config, Mesh.parse(config.parallelism.mesh))
    assert isinstance(made, RunSetup)
    assert made.config is config


# --- the names of functron 0.1

OF_SECTIONS = {
    "data": (
        "data=path tokenizer tokenizer_pattern special_tokens prepend_bos text_rules format "
        "overlong split order order_samples order_cache blend_surplus blend_order extra_token "
        "mask_documents fim_rate fim_spm_rate fim_tokens pack mask_rate mask_token mean_span "
        "end_token prefetch seq global_batch ramp_up earlier_batches"
    ),
    "lora": "lora_rank=rank lora_alpha=alpha lora_targets=targets",
    "parallelism": (
        "mesh nproc sequence_parallel context zigzag expert_axes microbatches schedule chunks "
        "layout vocab_over_pp zero gather"
    ),
    "watchdog": "timeout_seconds hang_after check_programs",
    "stragglers": "stragglers_every=every",
    "precision": "precision=name products gather_as",
    "compute": "remat kernels loss_chunk_tokens compile cuda_graph deterministic device",
    "checkpoint": "save_every keep_last keep_every",
    "evaluation": "eval_every=every eval_batches=batches eval_data=data eval_averaged=averaged",
    "restarts": "max_restarts restart_pause_seconds=pause_seconds elastic slots exit_after",
    "memory": "memory_save_every=save_every memory_folder=folder",
    "replicas": "check_replicas_every=every on_corruption",
    "logging": "log_layers_every=layers_every tensorboard wandb log_names=names",
}
"""By section, the names that its settings had in 0.1, which are short names now."""
PLACES = {
    name: f"{section}.{field or name}"
    for section, words in OF_SECTIONS.items()
    for name, _, field in (word.partition("=") for word in words.split())
}
AT_TOP = {
    "model", "source", "gpt", "mamba", "bert", "t5", "steps", "seed", "out", "resume",
    "change_batch", "anomalies", "optimizer", "learning_rate", "rate_unit",
}  # fmt: skip
FLAT = sorted((Path(__file__).parent / "flat").glob("*.toml"))
"""Files of configurations that functron 0.1 wrote: one of all defaults, one of none."""


LATER = {
    "metrics",
    "float32_matmul",
    "expert_room",
    "uneven",
    "eval_tasks",
    "eval_core",
    "lora_dora",
    "lora_base",
}
"""Short names that there were not in 0.1."""
LATER_PATHS = {f"tasks.{name}" for name in ("folder", "every", "shots", "limit", "batch")}
"""Settings without a short name that files of 0.1 do not have."""

ALL_SECTIONS = pytest.mark.applications("guard", "zoo")


@ALL_SECTIONS
def test_every_name_of_0_1_is_accepted():
    assert {name: path_of(TrainConfig, name) for name in PLACES} == PLACES
    short = {each.name for each in settings_of(TrainConfig) if each.name != each.path}
    assert short == {*PLACES} | LATER
    sections = {*AT_TOP, *OF_SECTIONS, "tasks", "module", "classifier", "embedder"}
    assert {field.name for field in dataclasses.fields(TrainConfig)} == sections
    for name, path in PLACES.items():
        value = value_at(TrainConfig(), name)
        section, _, field = path.rpartition(".")
        words = typing.get_args(hints_of(type(getattr(TrainConfig(), section)))[field])
        other = (
            not value if isinstance(value, bool) else 7 if isinstance(value, int | float) else "x:y"
        )
        other = next((True if word is bool else word for word in words if word != value), other)
        made = configure(**{name: other})
        assert made == configure(**{path.replace(".", "__"): other}) != TrainConfig()
        assert value_at(made, name) == other


@ALL_SECTIONS
@pytest.mark.parametrize("file", FLAT, ids=lambda file: file.stem)
def test_files_of_0_1_are_read(file, tmp_path):
    """They say the same as the same file with every setting in the table of its section."""
    old = tomllib.loads(file.read_text())
    assert {*old} - {"mamba", "bert", "t5"} == {*PLACES, *AT_TOP} - {"mamba", "bert", "t5"}
    made = load(file)
    nested = {name: value for name, value in old.items() if name in AT_TOP}
    for name, path in PLACES.items():
        assert value_at(made, name) == old[name], name
        section, field = path.split(".")
        nested.setdefault(section, {})[field] = old[name]
    rewritten = tmp_path / "nested.toml"
    rewritten.write_text(tomli_w.dumps(nested))
    assert load(rewritten) == made
    # new files are nested, and complete
    for name in LATER | LATER_PATHS:
        section, field = path_of(TrainConfig, name).split(".")
        nested.setdefault(section, {})[field] = value_at(TrainConfig(), name)
    nested |= {"module": "none", "classifier": "none", "embedder": "none"}
    assert tomllib.loads(dump(made)) == nested
    changed = load(file).parallelism.nproc > 0
    usual = configure(compile=False, gpt__fused_projections=False)  # as it was then
    assert (made == usual) == (not changed) == (file.stem == "tiny")


def test_a_setting_in_two_places_of_a_file_is_refused(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("save_every = 1\n[checkpoint]\nsave_every = 2\n")
    with pytest.raises(ValueError, match=r"save_every: got twice; wanted once: at the top"):
        load(file)


def test_mistakes_in_configure_are_named():
    with pytest.raises(TypeError, match=r"save_evry: got an unknown name.*'save_every'"):
        configure(save_evry=1)
    with pytest.raises(TypeError, match=r"gpt.dropot: got an unknown name.*'gpt.dropout'"):
        configure(gpt__dropot=0.1)


# --- sections of others


@dataclass(frozen=True)
class Profile:
    """Attributes:
    every: measure after every so many steps; 0: never.
    """

    every: int = setting(0, least=0)

    def problems(self):
        if self.every == 13:
            yield Problem("profile.every", "13", "another number", "choose one")


def test_a_section_of_others_is_one_of_ours(tmp_path):
    kind = with_sections(TrainConfig, {"profile": Profile})
    made = configure(kind(), profile__every=3, steps=2)
    file = tmp_path / "x.toml"
    file.write_text(dump(made))
    assert tomllib.loads(dump(made))["profile"] == {"every": 3}
    assert load(file, kind=kind) == made
    with pytest.raises(ValueError, match=r"profile: got an unknown key"):
        load(file)
    assert load(file, known_only=True) == configure(steps=2)
    validate(made)
    with pytest.raises(ValueError, match=r"profile.every: got 13; wanted another number"):
        validate(configure(made, profile__every=13))
    with pytest.raises(ValueError, match=r"profile.every: got -1; wanted at least 0"):
        validate(configure(made, profile__every=-1))
    assert with_model(made, "gpt2-tiny").profile == Profile(3)


def test_a_model_that_is_named_fills_its_table():
    assert configure(model="gpt2").gpt == gpt.PRESETS["gpt2"]
    with pytest.raises(ValueError, match="no such model"):
        configure(model="zzz")


def test_a_run_begins_beside_the_events_of_its_launcher(tmp_path):
    """A mesh that is smaller than asked for is an event before the first start."""
    config = configure(data="text:here", out=str(tmp_path), resume="auto")
    (tmp_path / "events.jsonl").write_text("")
    assert "a folder with files" not in problems(configure(config, steps=0))
    assert "a folder with files" in problems(configure(config, resume=False))
    (tmp_path / "notes").write_text("")
    assert "a folder with files" in problems(config)
