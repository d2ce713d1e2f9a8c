"""Launch lines of Megatron-LM as configurations.

Expected sizes are published: of papers, model cards and reports. Expected settings are worked out
by hand from what Megatron-LM's arguments mean.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from functron.apps.megatron import Migration, architecture, migrate, training_settings
from functron.apps.megatron import arguments as megatron
from functron.apps.megatron.architecture import parse_pattern
from functron.apps.megatron.launches import LaunchLine, read_script, record_script, show_open
from functron.core.settings import value_at
from functron.data import preprocess
from functron.models.config import PRESETS
from functron.models.family import GPT
from functron.optim.config import make_schedule
from functron.spmd import Mesh
from functron.spmd.params import num_params
from functron.training.config import TrainConfig, load
from functron.training.data import open_samples
from functron.training.setup import make_setup

LAUNCHES = Path(__file__).parent / "launches"
ZOO = {
    "TP": "2", "PP": "4", "EP": "8", "CP": "1", "MBS": "1", "GBS": "8192", "SEQ_LEN": "4096",
    "DATA_PATH": "/data/text", "OUTPUT_PATH": "/runs/zoo", "MOE_GROUPED_GEMM": "true",
    "MOE_TOKEN_DISPATCHER": "alltoall",
}  # fmt: skip
SAVED = {"CHECKPOINT_SAVE_PATH": "/ck", "CHECKPOINT_LOAD_PATH": "/ck", "DATA_BLEND": "/data/text"}
ENDS = "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 7"
LEAST = "--train-iters 1000 --lr 1e-4 --mock-data"  # what those of Megatron-LM's modelopt leave to others

PUBLIC = {
    # the parameters that are published, and to how many digits; the mesh, worked out by hand
    "gpt3_175b.sh": (175e9, 3, "pp=16,tp=8", {"1": "/ck", "5": "/data/text"}, {}),
    "llama3_8b.sh": (8.03e9, 3, "dp=8", {}, {"run": True}),
    "llama3_70b.yaml": (70.6e9, 3, "pp=4,dp=2,cp=2,tp=4", {}, {"processes": 64}),
    "mixtral_8x7b.sh": (
        46.7e9, 3, "pp=4,ep=8", {"NNODES": "4", "1": "/ck", "2": "/model", "3": "/text"},
        {"run": True},
    ),
    "mixtral_8x22b.yaml": (
        141e9, 3, "pp=4,dp=4,ep=4,tp=2", {**ZOO, "GBS": "256"}, {"processes": 128},
    ),
    "deepseek_v3.yaml": (
        671e9, 3, "pp=8,ep=16,tp=2", {**ZOO, "PP": "8", "EP": "32"},
        {"processes": 256, "extra": f"--vocab-size 129280 {ENDS}"},
    ),
    "qwen3_8b.sh": (8.2e9, 2, "", {}, {"run": True, "extra": f"--vocab-size 151936 {LEAST}"}),
    "qwen3_30b_a3b.yaml": (
        30.5e9, 3, "ep=8", {**ZOO, "TP": "1", "PP": "1", "LAYERS_PER_VP": "48"},
        {"processes": 8, "extra": "--vocab-size 151936"},
    ),
    "nemotron4_15b.yaml": (
        15.6e9, 3, "dp=8,tp=8", SAVED, {"processes": 64, "extra": "--vocab-size 256000"},
    ),
    "nemotron_mini_4b.sh": (
        4.2e9, 2, "", {}, {"run": True, "extra": f"--vocab-size 256000 {LEAST}"},
    ),
    "bert_340m.sh": (0.34e9, 2, "tp=8", {"1": "/ck", "4": "/text"}, {"closest": True}),
    "t5_220m.sh": (0.22e9, 2, "dp=8", {"1": "/ck", "4": "/text"}, {"closest": True}),
}  # fmt: skip


def digits(value: float, count: int) -> float:
    return float(f"{value:.{count - 1}e}")


@pytest.fixture(scope="module")
def made() -> dict[str, Migration]:
    return {
        name: migrate(LAUNCHES / name, variables=variables, **more)
        for name, (_, _, _, variables, more) in PUBLIC.items()
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_public_lines_migrate_whole(made, name, tmp_path):
    """No argument is left unexplained, sizes are the published ones, and the file reads back."""
    published, count, mesh, variables, _ = PUBLIC[name]
    one = made[name]
    config = one.config
    total = num_params(config.family.defs(config.architecture))
    assert digits(total, count) == digits(published, count)
    assert config.parallelism.mesh == mesh
    given = spelled_in(LAUNCHES / name, variables, tmp_path)
    assert len(given) > 20
    given -= {"random_seed"}  # a second name of seed, which has the row
    assert not given - {row.name.rpartition(".")[2] for row in one.rows}, "arguments without a row"
    assert all(row.ours or row.why for row in one.rows)
    (tmp_path / "config.toml").write_text(one.toml())
    assert load(tmp_path / "config.toml") == config


def spelled_in(path: Path, variables: dict[str, str], folder: Path) -> set[str]:
    """The arguments that a public line gives, as bash or a reader of YAML has them."""
    text = path.read_text()
    if path.suffix == ".yaml":
        mapping = yaml.safe_load(text)
        options = mapping.get("MODEL_ARGS")
        return {name for name, value in options.items() if value} if options else leaves(mapping)
    (folder / "pretrain_gpt.py").touch()
    text = text.replace("torchrun ", "printf '%s\\n' ")
    places = [variables.get(str(n), "") for n in range(1, 6)]
    env = {"PATH": os.environ["PATH"], **{k: v for k, v in variables.items() if not k.isdigit()}}
    command = ["bash", "-c", text, "bash", *places]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=True)
    words = done.stdout.split("pretrain_")[-1].split("\n")
    # of torchrun's words the ones before the program are its own
    return {word for line in words for word in line.split() if word.startswith("--")}


def leaves(mapping: dict) -> set[str]:
    found: set[str] = set()
    for key, value in mapping.items():
        inner = isinstance(value, dict) and "_target_" not in value
        if inner or key == "model":
            found |= leaves(value)
        elif not key.startswith("_") and value not in (None, False):
            found.add(key)
    return found


def test_architectures_are_those_of_the_presets(made):
    """A public line describes the model that a preset of another source has."""

    def same(name, preset, **changes):
        mine, theirs = made[name].config.gpt, PRESETS[preset]
        free = ("vocab_size", "vocab_multiple", "max_seq", "dtype", "dropout", "init_stddev")
        plain = {field: getattr(mine, field) for field in free}
        assert mine == replace(theirs, **plain, **changes)

    same("gpt3_175b.sh", "gpt3-175b")
    same("llama3_70b.yaml", "llama3-70b", num_kv_heads=8)
    theirs = PRESETS["deepseek-v3"]
    moe = replace(theirs.moe, dispatch="gather")  # Megatron-LM's default
    same("deepseek_v3.yaml", "deepseek-v3", moe=moe, mtp_depth=0)
    # a softmax over the chosen experts is a softmax over all that is divided by their sum
    moe = replace(PRESETS["qwen3-30b-a3b"].moe, normalise="after", renormalise=False, aux_loss=1e-3)
    same("qwen3_30b_a3b.yaml", "qwen3-30b-a3b", moe=moe)


def test_what_lines_say_is_there(made):
    """Settings of several lines, worked out by hand."""
    gpt3, llama = made["gpt3_175b.sh"].config, made["llama3_8b.sh"].config
    assert (gpt3.data.ramp_up, gpt3.parallelism.microbatches, gpt3.steps) == (
        "16 16 5859375",
        16,
        500000,
    )
    assert gpt3.learning_rate.warmup_steps == 430
    assert (gpt3.precision.name, gpt3.optimizer.loss_scale.initial) == ("fp16", 2.0**32)
    assert gpt3.gpt.activation == "gelu_tanh"
    assert (gpt3.gpt.vocab_size, gpt3.gpt.padded_vocab) == (50257, 51200)  # 128 x tp
    assert (gpt3.resume, gpt3.out, gpt3.logging.names) == ("auto", "/ck", "megatron")
    assert (gpt3.seed, gpt3.optimizer.eps, gpt3.gpt.dropout) == (1234, 1e-8, 0.1)
    assert llama.steps == 1953125000 // 128
    # not of whole steps of 128
    assert (llama.rate_unit, llama.learning_rate.total_steps) == ("samples", 1949218748)
    assert (llama.precision.name, llama.parallelism.zero, llama.restarts.exit_after) == (
        "fp8-delayed",
        1,
        "235m",
    )
    assert llama.optimizer.grad_dtype == llama.optimizer.reduce_dtype == "bfloat16"
    assert llama.optimizer.groups == "embed lr=3.33333; unembed lr=3.33333"
    assert (llama.data.format, llama.data.split, llama.watchdog.timeout_seconds) == (
        "mock",
        "99,1,0",
        3600.0,
    )
    big = made["llama3_70b.yaml"].config
    assert (
        big.parallelism.schedule,
        big.parallelism.chunks,
        big.parallelism.sequence_parallel,
    ) == ("interleaved", 5, True)
    assert big.parallelism.microbatches == 512 // 2
    assert made["mixtral_8x22b.yaml"].config.parallelism.expert_axes == "ep,tp"  # experts are whole
    assert made["deepseek_v3.yaml"].config.parallelism.layout == "first=6,last=7"
    nemotron = made["nemotron4_15b.yaml"].config
    assert (
        nemotron.data.ramp_up,
        nemotron.checkpoint.keep_every,
        nemotron.checkpoint.keep_last,
    ) == (
        "384 384 97656250",
        5000,
        1,
    )
    assert (nemotron.gpt.activation, nemotron.gpt.mlp_dim) == ("relu2", 4 * 6144)
    assert made["t5_220m.sh"].config.data.end_token == 28997  # after 28996 words and [BOS]


def test_what_is_not_supported_is_said(made):
    rows = {row.name: row for row in made["gpt3_175b.sh"].rows_of("not supported")}
    assert list(rows) == ["attention-dropout"]  # a default that the line does not even have
    text = made["gpt3_175b.sh"].toml()
    assert text.splitlines()[1].startswith("# not supported: attention-dropout 0.1: attention prob")
    said = {row.name for row in made["t5_220m.sh"].rows_of("not supported")}
    assert {"normalization", "add-bias-linear", "position-embedding-type"} <= said
    taken = {row.name: row.ours for row in made["llama3_8b.sh"].rows_of("taken")}
    assert taken["--hidden-size"] == "gpt.embed_dim = 4096"
    same = {row.name for row in made["llama3_8b.sh"].rows_of("same")}
    assert {"--clip-grad", "--rotary-percent", "--log-throughput"} <= same
    defaults = {row.name: row.ours for row in made["llama3_8b.sh"].rows_of("default")}
    assert defaults["normalization"] == "gpt.norm = layer"


# --- arguments one by one

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 "
    "--vocab-size 255 --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 "
)
SAMPLE = {
    "int": "2",
    "float": "0.5",
    "str": "x",
    "flag": "",
    "ints": "2",
    "floats": "0.5",
    "strs": "x",
}


@pytest.fixture
def line(tmp_path):
    """A function of arguments to what a short launch line with them becomes."""

    def of(arguments: str = "", program: str = "pretrain_gpt.py", **more) -> Migration:
        file = tmp_path / "launch.sh"
        file.write_text(f"python {program} {BASE} {arguments}\n")
        return migrate(file, **more)

    return of


def test_every_argument_is_explained_or_refused(line, monkeypatch):
    """Each has a row, or a problem, beside those that a line needs; configurations are not checked."""
    monkeypatch.setattr(sys.modules[migrate.__module__], "validate", lambda config: None)
    arguments = megatron.load_table().arguments.values()
    assert len(arguments) > 600
    refused = []
    for argument in arguments:
        option = argument.options[0]
        if argument.fate != "take":
            continue
        try:
            assert f"--{option}" in {row.name for row in line(written(argument)).rows}, option
        except ValueError:
            refused.append(option)
    assert len(refused) < 45  # nonsense such as --optimizer x, and models that functron has not
    modules = (architecture, training_settings, sys.modules[migrate.__module__])
    text = "".join(Path(str(module.__file__)).read_text() for module in modules)
    taken = {one.name for one in arguments if one.fate == "take"} - {
        "lr_warmup_iters"
    }  # f"{stem}_iters"
    assert not [name for name in taken if f'"{name}"' not in text], "arguments that nothing reads"
    others = [one for one in arguments if one.fate != "take"]
    names = {row.name: row.kind for row in line(" ".join(map(written, others))).rows}
    for one in others:
        if one.fate != "lack":
            assert names[f"--{one.options[0]}"] == {"same": "same", "need": "not needed"}[one.fate]


def written(argument: megatron.MegatronArgument) -> str:
    return f"--{argument.options[0]} {SAMPLE[argument.kind]}"


def test_recipes_of_eight_bits(line, monkeypatch):
    monkeypatch.setattr(sys.modules[migrate.__module__], "validate", lambda config: None)
    for recipe, named in (
        ("delayed", "fp8-delayed"),
        ("tensorwise", "fp8-tensor"),
        ("mxfp8", "mxfp8"),
    ):
        config = config_of(line, f"--bf16 --fp8-format hybrid --fp8-recipe {recipe}")
        assert config.precision.name == config.precision.products == named
    arguments = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16"
    assert config_of(line, arguments).precision.products == "fp8-block first=1 last=1"
    four = config_of(line, "--bf16 --fp4-format e2m1 --no-fp8-wgrad")
    assert (four.precision.name, four.precision.products) == ("nvfp4", "nvfp4 wgrad=high last=0")


def config_of(line, arguments, **more) -> TrainConfig:
    return line(arguments, **more).config


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("--swiglu", {"gpt.mlp_dim": 128, "gpt.activation": "silu", "gpt.gated": True}),  # int(8/3 h / 64) 64
        ("--disable-bias-linear", {"gpt.bias": False, "gpt.activation": "gelu"}),
        ("--no-bias-gelu-fusion", {"gpt.activation": "gelu"}),
        ("--position-embedding-type rope --rotary-interleaved", {"gpt.rope_pairs": "neighbours"}),
        ("--use-rotary-position-embeddings --rotary-percent 0.5", {"gpt.rope_fraction": 0.5}),
        ("--position-embedding-type rope --no-rope-freq '([0]*1+[1]*1)*2'", {"gpt.nope_every": 2}),
        ("--window-size 31,0 --window-attn-skip-freq 2", {"gpt.window": 32, "gpt.global_every": 2}),
        ("--group-query-attention --num-query-groups 2", {"gpt.num_kv_heads": 2}),
        ("--optimizer sgd --sgd-momentum 0.8", {"optimizer.name": "sgd", "optimizer.momentum": 0.8}),
        ("--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1",
         {"optimizer.end_weight_decay": 0.1}),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
         {"optimizer.mu_dtype": "bfloat16", "optimizer.nu_dtype": "fp8"}),
        ("--fp16 --loss-scale 1024", {"optimizer.loss_scale.growth_interval": 0}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", {"remat": "full"}),
        ("--recompute-activations", {"remat": "selective"}),
        ("--iterations-to-skip 2 3 5", {"anomalies.skipped_samples": "8:24 32:40"}),
        ("--eval-iters 0", {"eval_every": 0}),
        ("--split 100,0,0", {"eval_every": 0}),
        ("--num-experts 4 --moe-layer-freq 2", {"gpt.dense_layers": 0, "gpt.dense_at": (1, 3)}),
        ("--num-experts 4 --moe-layer-freq [0]*1+[1]*3", {"gpt.dense_layers": 1, "gpt.moe.top_k": 2}),
        ("--num-experts 4 --moe-expert-capacity-factor 1.5",
         {"gpt.moe.drop": "probability", "gpt.moe.capacity_over": "sequence"}),
        ("--num-experts 4 --moe-expert-capacity-factor 1.5 --micro-batch-size 2",
         {"gpt.moe.capacity_factor": 1.5, "gpt.moe.capacity_over": "batch"}),
        ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1", {"gpt.moe.aux_loss": 0.0}),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3",
         {"gpt.moe.aux": "global", "gpt.moe.aux_loss": 1e-3}),
        ("--num-experts 4 --moe-router-load-balancing-type quantile_balancing "
         "--moe-router-quantile-balancing-ema 0.5",
         {"gpt.moe.balance_by": "quantile", "gpt.moe.balance_decay": 0.5, "gpt.moe.aux_loss": 0.0}),
        ("--mtp-num-layers 2 --mtp-use-repeated-layer --mtp-detach-heads",
         {"gpt.mtp_depth": 2, "gpt.mtp_repeated": True, "gpt.mtp_detached": True}),
        ("--log-straggler --tensorboard-dir x", {"stragglers_every": 5, "tensorboard": True}),
    ],
)  # fmt: skip
def test_values_mean_the_same(line, arguments, settings):
    config = config_of(line, arguments)
    for path, wanted in settings.items():
        assert value_at(config, path) == wanted, path


@pytest.mark.parametrize(
    ("arguments", "processes", "mesh", "settings"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 8, "dp=4,tp=2", {"sequence_parallel": True}),
        ("--context-parallel-size 2", 4, "dp=2,cp=2", {"context": "ring"}),
        ("--context-parallel-size 2 --cp-comm-type allgather", 4, "dp=2,cp=2", {"context": "gather"}),
        ("--context-parallel-size 2 --cp-comm-type a2a", 4, "dp=2,ulysses=2", {"context": "ring"}),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
         4, "cp=2,ulysses=2", {}),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2, "pp=2",
         {"schedule": "interleaved", "chunks": 2}),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|ttt,L'", 2, "pp=2",
         {"layout": "Et|ttt,L"}),
        ("--pipeline-model-parallel-size 3 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", 3, "pp=3", {"layout": "Et|tt|tL"}),
        ("--num-experts 4 --expert-model-parallel-size 2", 4, "dp=2,ep=2", {"expert_axes": "ep"}),
        # each expert's matrices are divided over tp, as Megatron-LM has it by default
        ("--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2", 4, "ep=2,tp=2",
         {"expert_axes": "ep"}),
        # experts are whole: two ranks of tp and two of ep have one each
        ("--num-experts 4 --expert-model-parallel-size 4 --tensor-model-parallel-size 2 "
         "--expert-tensor-parallel-size 1 --sequence-parallel", 8, "dp=2,ep=2,tp=2", {"expert_axes": "ep,tp"}),
        # experts are folded over cp where data-parallel ranks are too few
        ("--num-experts 4 --expert-model-parallel-size 4 --context-parallel-size 2", 4, "ep=2,cp=2",
         {"expert_axes": "ep,cp"}),
        ("--use-distributed-optimizer", 4, "dp=4", {"zero": 1}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 4, "dp=4", {"zero": 2}),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 4, "dp=4", {"zero": 3, "gather": "keep"}),
    ],
)  # fmt: skip
def test_meshes(line, arguments, processes, mesh, settings):
    config = config_of(line, arguments, processes=processes)
    assert config.parallelism.mesh == mesh
    for name, wanted in settings.items():
        assert value_at(config, name) == wanted, name


@pytest.mark.parametrize(
    ("arguments", "processes", "words"),
    [
        ("--num-laers 4 --hiden-size 8", 1, ["--num-laers", "'num-layers'", "--hiden-size", "'hidden-size'"]),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2", 12, ["12 ranks", "--processes 16"]),
        ("--global-batch-size 6", 4, ["a multiple of 4", "--with global-batch-size=8"]),
        ("--num-experts 4 --expert-model-parallel-size 4", 2, ["4 of 2 data-parallel", "--processes 4"]),
        ("--pipeline-model-parallel-size 3", 3, ["4 layers in 3 stages", "--with decoder-last-pipeline-num-layers=N"]),
        ("--moe-layer-freq [1]*3 --num-experts 4", 1, ["0 or 1 for each of 4 layers"]),
        ("--num-experts 4 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2", 2, ["got 1; wanted 2, or"]),
        ("--qk-l2-norm --softmax-type off-by-one", 1, ["--qk-l2-norm", "--softmax-type"]),
        ("--lr-decay-style WSD", 1, ["--lr-wsd-decay-iters"]),
        ("--num-layers x", 1, ["a whole number"]),
        ("--lr", 1, ["--lr: got nothing"]),
        ("--lr 1e-3 stray", 1, ["a value of no option"]),
        ("--data-path $DATA", 1, ["${DATA}", "--env DATA=VALUE"]),
        ("--hidden-size $H", 1, ["${H}", "--env H=VALUE"]),
        ("--optimizer muon", 1, ["spectral with 0.2"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_fix(line, arguments, processes, words):
    with pytest.raises(ValueError, match="cannot migrate") as error:
        line(arguments, processes=processes)
    for word in words:
        assert word in str(error.value)


def test_arguments_may_be_added_and_left_out(line):
    made = line("--a-forks-own 3", extra="hidden-size=32 seed=7", without=["a-forks-own"])
    assert (made.config.gpt.embed_dim, made.config.seed) == (32, 7)
    with pytest.raises(ValueError, match="got nothing-such"):
        line(without=["nothing-such"])


def test_other_models_are_refused_or_the_closest(line):
    arguments = "--swiglu --disable-bias-linear"
    with pytest.raises(ValueError, match="--closest") as error:
        line(arguments, program="pretrain_t5.py")
    assert "--normalization" in str(error.value)
    assert "--position-embedding-type" in str(error.value)
    assert line(arguments, program="pretrain_t5.py", closest=True).config.t5.gated
    hybrid = "--hybrid-override-pattern M*-M --position-embedding-type none --normalization RMSNorm"
    config = config_of(line, f"{hybrid} --mamba-num-groups 2", program="pretrain_mamba.py")
    assert (config.mamba.pattern, config.mamba.num_heads) == ("M*-M", 2)


def test_a_family_that_was_left_out_is_refused(line, monkeypatch):
    monkeypatch.setattr(architecture, "families", lambda: {"gpt": GPT})
    wanted = "launch line\n  - model: got bert; wanted a family of this installation: gpt"
    with pytest.raises(ValueError, match=wanted):
        config_of(line, "", program="pretrain_bert.py")
    assert config_of(line, "").family is GPT


def test_tokens_that_are_here_are_looked_into(line, tmp_path, monkeypatch):
    """Documents of bytes: of two files with weights, and one held out, too short for long samples."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.txt").write_text("some words of a text " * 60)
        settings = preprocess.PreprocessSettings((f"{name}.txt",), "bytes", name, workers=1)
        preprocess.preprocess(settings, lambda progress: None)
    text = BASE.replace(
        "--mock-data", "--train-data-path 0.3 a 0.7 b --valid-data-path b --eval-iters 1"
    )
    Path("args.txt").write_text(text)
    made = migrate("args.txt")
    assert (made.config.data.path, made.config.evaluation.data, made.absent) == (
        "0.3 a 0.7 b",
        "b=b",
        (),
    )
    with pytest.raises(ValueError, match="cannot train with this configuration"):
        migrate("args.txt", extra="seq-length=4096 max-position-embeddings=4096")


# --- schedules, against Megatron-LM's formulas

ANNEALED = {
    # coefficient of max_lr - min_lr at a share of the annealing, from OptimizerParamScheduler
    "exponential": lambda x: 2 * 0.5**x - 1,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1),
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@pytest.mark.parametrize("style", ANNEALED)
def test_wsd_anneals_as_megatron(line, style):
    arguments = f"--lr-decay-style WSD --lr-wsd-decay-style {style} --lr-wsd-decay-iters 8"
    config = config_of(line, f"{arguments} --train-iters 20 --lr-warmup-iters 2 --min-lr 1e-4")
    rate = make_schedule(config.rate_schedule)
    for step in range(20):
        share = max(step - 12, 0) / 8
        wanted = 1e-3 * step / 2 if step < 2 else 1e-4 + 9e-4 * ANNEALED[style](share)
        assert float(rate(step)) == pytest.approx(wanted, rel=1e-5), step


def test_samples_of_a_ramp_are_counted(line, tmp_path):
    """2 + 2 steps of 4 and 6 samples, then of 8: 40 samples are 2 x 4 + 2 x 6 + 2.5 x 8."""
    text = BASE.replace("--train-iters 10", "--train-samples 40")
    file = tmp_path / "args.txt"
    file.write_text(f"{text}\n--rampup-batch-size 4 2 16\n--lr-warmup-samples 10\n")
    config = migrate(file).config
    rate = config.learning_rate
    assert (config.steps, config.rate_unit) == (6, "samples")
    assert (rate.warmup_steps, rate.total_steps) == (10, 40)  # of the whole run, by default
    assert config.parallelism.microbatches == 2  # divides 4, 6 and 8
    # the first samples of the steps, of a warm-up over 10
    found = [float(make_setup(config, Mesh()).learning_rate(step)) for step in range(3)]
    assert found == pytest.approx([0.0, 4e-4, 8e-4])
    # without the ramp: samples of whole steps are steps, and others are not
    file.write_text(f"{text}\n--lr-warmup-samples 16")
    config = migrate(file).config
    assert (config.rate_unit, config.learning_rate.warmup_steps) == ("steps", 2)
    file.write_text(f"{text}\n--lr-warmup-samples 12")
    config = migrate(file).config
    assert (config.rate_unit, config.learning_rate.warmup_steps) == ("samples", 12)


# --- data, against samples that Megatron-Core drew (tests/data/make_megatron.py)

ORDERED = Path(__file__).parents[2] / "data" / "megatron"


@pytest.mark.parametrize(
    ("case", "arguments", "settings"),
    [
        ("case39", "--data-path 1 {a} 1 {b} 1 {c} --split 4,1,1 --train-iters 5",
         {"order_samples": 40, "split": "4,1,1", "seed": 1234}),  # 5 x 8
        ("case30", "--train-data-path 30 {a} 70 {b} --train-samples 333", {"order_samples": 333, "split": ""}),
        ("case45", "--train-data-path {a} {b} {c} --train-iters 5", {"order_samples": 40, "extra_token": True}),
        ("case53", "--train-data-path 1 {a} 3 {c} --train-samples 50 --seed 1 --mid-level-dataset-surplus .5",
         {"blend_surplus": 0.5}),
        ("case18", "--data-path {b} --train-samples 70 --seed 11 --seq-length 8 --data-cache-path tables",
         {"split": "969,30,1", "order_cache": "tables", "format": "tokens"}),
        ("case55", "--train-data-path {a} --train-iters 5 --seed 6 --seq-length 24 --eod-mask-loss "
         "--reset-position-ids --reset-attention-mask", {"mask_documents": True}),
    ],
)  # fmt: skip
def test_samples_are_those_of_megatron(case, arguments, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {name: str(ORDERED / name) for name in "abc"}
    text = BASE.replace("--mock-data", "").replace("--train-iters 10", "--seq-length 12")
    file = tmp_path / "args.txt"
    file.write_text(f"{text} --eval-iters 0 --vocab-size 65000 {arguments.format_map(paths)}")
    made = migrate(file)
    config = made.config
    assert {name: value_at(config, name) for name in settings} == settings
    assert (config.data.order, made.absent) == ("megatron", ())
    with np.load(ORDERED / "samples.npz") as arrays:
        tokens, targets = arrays[f"{case}/train"]
    drawn = open_samples(config).draw(np.arange(config.steps * 8))
    np.testing.assert_array_equal(drawn["tokens"], tokens[: config.steps * 8])
    np.testing.assert_array_equal(drawn["targets"], targets[: config.steps * 8])


def test_samples_in_another_order_are_said(line):
    def rows(arguments: str) -> dict[str, tuple[str, str]]:
        file_data = line(f"{arguments} --data-path x", without=["mock-data"])
        assert file_data.absent == ("x",)
        found = {row.name: (row.kind, row.why) for row in file_data.rows}
        return found | {"order": (file_data.config.data.order, "")}

    found = rows("--dataloader-type cyclic")
    assert (found["order"][0], found["--dataloader-type"][0]) == ("arithmetic", "not supported")
    found = rows("--eod-mask-loss")  # has no equal without the other two
    assert (found["order"][0], found["--eod-mask-loss"][0]) == ("megatron", "not supported")
    found = rows("--reset-position-ids --reset-attention-mask")
    assert found["--reset-position-ids"][1].endswith("as with --eod-mask-loss")
    assert "order = megatron, of 80 samples" in found["--data-path"][1]
    bert = line("--data-path x", program="pretrain_bert.py", closest=True, without=["mock-data"])
    assert (bert.config.data.order, bert.config.data.split) == ("arithmetic", "969,30,1")


# --- scripts

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
A=1; B="two words"; C=(x "y z")
C+=(w)
D=${UNSET:-"fall back"}
E=$(( (A + 3) * 2 ))
F=${B// /_}; G=${B%% *}; H=${#C[@]}
if [ "$A" -eq 1 ] && [[ $B == two* ]]; then I=yes; elif true; then I=no; else I=never; fi
case $I in n*) J=1 ;; y*|z*) J=2 ;; *) J=3 ;; esac
f() { local K=$1; L="$K$2"; }
f 5 6
[ -n "$A" ] && M=set || M=unset
cat <<END > file
--num-layers 77
END
torchrun --nproc_per_node=8 --nnodes $E pretrain_gpt.py \\
    --load "$B" --save ${C[1]} --wandb-project "${C[@]}" --tokenizer-type $D --split $E \\
    --spec $F $G $H $I $J $L $M '$A' "\\$A" # $A
"""


def words_of(text: str, **variables: str) -> list[str]:
    line = read_script(text, megatron.load_table().options, variables)
    return [show_open(word) for word in line.words]


@pytest.fixture
def recorded(tmp_path):
    """A function of a script and variables to the launch line that its run records."""

    def of(text: str, **variables: str) -> LaunchLine:
        (tmp_path / "run.sh").write_text(text)
        return record_script(tmp_path / "run.sh", megatron.load_table().options, variables)

    return of


def test_scripts_are_run_as_bash_does(recorded):
    """Compared with bash itself, which prints the same command."""
    printed = SCRIPT.replace("torchrun", "printf '%s\\n' torchrun").replace("> file", "> /dev/null")
    bash = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True)
    _, _, *wanted = bash.stdout.splitlines()
    mine = recorded(SCRIPT)
    assert mine.program == "pretrain_gpt.py"
    assert list(mine.words) == wanted[wanted.index("pretrain_gpt.py") + 1 :]
    assert mine.processes == 64


def test_kinds_of_scripts():
    assert words_of("--num-layers 4\n# none\n--bf16\n") == ["--num-layers", "4", "--bf16"]
    quoted = "--lr 'a b' # (none)\n  # |\n--save \"$X c\" \\\n$X"
    assert words_of(quoted, X="1  2") == ["--lr", "a b", "--save", "1  2 c", "1", "2"]
    nested = 'X="pretrain_gpt.py --lr $LR --bf16"\nsrun -n 16 bash -c "cd /x; python -u $X"\n'
    assert words_of(nested, LR="1") == ["--lr", "1", "--bf16"]
    assert read_script(nested, megatron.load_table().options).processes == 16
    assert words_of("python a.py --lr $1 --bf16", **{"1": "3"}) == ["--lr", "3", "--bf16"]
    assert words_of("python a.py --lr $LR --save $(pwd)/x") == [
        "--lr",
        "${LR}",
        "--save",
        "${(pwd)}/x",
    ]
    assert words_of("python a.py --lr $(a b) --bf16") == ["--lr", "${(a b)}", "--bf16"]
    batch = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python pretrain_gpt.py --bf16\n"
    assert read_script(batch, megatron.load_table().options).processes == 8


RUN = "fix: functron migrate FILE --run"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("for x in 1 2; do python a.py --bf16; done", ["line 1: got for x in 1 2;", RUN]),
        (
            "A=1\nif [ -f x ]; then A=--bf16; fi\npython a.py --bf16 $A",
            ["line 2: got if [ -f", RUN],
        ),
        ("A=1\n[ -f x ] &&\n  A=--bf16\npython a.py --bf16 $A", ["line 3: got A=--bf16", RUN]),
        ("A='--bf16\npython a.py", ["line 1: got '--bf16; wanted closed quotes", RUN]),
        ("f() { python a.py --bf16; }\nf", ["line 1: got () {", "function", RUN]),
        ("cat <<END > x\n--num-layers 77\nEND\npython a.py --bf16", ["line 1: got <<END > x", RUN]),
        ("A=(1)\nB=1 A[0]=2\npython a.py --lr $A", ["line 2: got B=1 A[0]=2", RUN]),
        (
            "echo $#\nA=(--bf16)\npython a.py ${A[0]} --lr $#",
            ["line 3: got ${A[0]}", "got ${#}", RUN],
        ),
        ("A='x y'\npython a.py --bf16 ${A%% *} ${B:+x}", ["line 2: got ${A%% *}", "${B:+x}", RUN]),
        ("A=$(a $(b $(c (d))))\npython a.py --bf16 $A", ["line 1: got $(a $(b", RUN]),
        ("python a.py --x ([0]*3) --bf16", ["line 1: got ([0]*3) --bf16; wanted closed", RUN]),
        ("--bf16\n--layout Et|tL", ["line 2: got |tL; wanted", "put such values in quotes"]),
        ("shift 2\npython a.py --bf16 $1", ["line 1: got shift 2", RUN]),
        ("srun bash -c 'if x; then python a.py --bf16; fi'", ["got if x", "without bash -c"]),
        ("A=xx\n" + "A=$A$A\n" * 40 + "python a.py --bf16 $A", ["${A}", "at most 1000000"]),
        ("ARGS='--num-layers 4'\nMORE=(--bf16)\n", ["sets variables needs a launch", RUN]),
        ("#" * 100_001, ["100001 characters; wanted at most 100000"]),
        ("echo hello", ["no command with options"]),
        ("", ["no command with options"]),
    ],
)
def test_scripts_that_cannot_be_read(text, words):
    with pytest.raises(ValueError, match="cannot read the launch line") as error:
        words_of(text)
    for word in words:
        assert word in str(error.value)


PLAIN = """
A=1; export B="two words" C='$A' D=(x "y z")  # don't
D+=(w)  D=("${D[@]}" '#') # a comment
E="$A" E+=5; G=("$B"); G+=' c' G+=("" $B)
H=1; export H=2 I=$H; J=(a b); J=c; K=""; K+=(d)
X=5; X=3 Y=4 true; if=$(uname "$(pwd)")  # neither is needed
F=" --bf16 \\
  --fp16 "
cd x && torchrun --nproc_per_node=$A${E} pretrain_gpt.py --load "$B" --save $B --spec "${D[@]}" \\
    --split ${D[*]} ${NONE:-"fall  back"} ${NONE-of $B} "${B[*]}" ${A:-unset}$X "${NONE:-"$B c"}" "${G[@]}" $H$I "${J[@]}" "${K[@]}" "\\$A"'\\$A' $F"$C" >log 2>&1 | tee x
"""


def test_plain_scripts_are_read_as_bash_does():
    """Without running anything: what it simply sets, and the command; compared with bash."""
    printed = PLAIN.replace("torchrun", "printf '%s\\n' torchrun").replace(">log 2>&1 | tee x", "")
    printed = printed.replace("cd x", "true")
    bash = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True)
    _, _, _, *wanted = bash.stdout.splitlines()
    mine = read_script(PLAIN, megatron.load_table().options)
    assert (mine.program, mine.processes, list(mine.words)) == ("pretrain_gpt.py", 115, wanted)


def test_the_output_of_a_command_is_no_argument(line):
    """Nothing is known of it; a variable that nothing sets is nothing, as in a shell."""
    assert "--with" not in {row.name for row in line("$MORE").rows}
    for text in ("$(cat more.txt)", "--seed $(date +%s)"):
        with pytest.raises(ValueError, match=r"wanted a value without command substitution.*--run"):
            line(text)


def test_nothing_but_recorders_is_started(recorded, tmp_path):
    """Launchers, commands by their place, and what is not there: none of them writes the file."""
    made = tmp_path / "made"
    text = f"""
set -e
export PATH=/usr/bin:/bin; PATH=/bin
touch {made}; /usr/bin/touch {made}; PATH=/bin touch {made}; command -p touch {made}
env -i touch {made}; ( /bin/touch {made} ); X=$(/bin/touch {made}); T=/bin/touch; $T {made}
sh -c "touch {made}"; python3 -c "open('{made}', 'w')"; exec_it() {{ exec /bin/touch {made}; }}
for n in 1 2; do torchrun --nproc-per-node 4 x.py --num-layers $n --bf16 --save "$PWD"; done
exec_it
"""
    line = recorded(text)
    assert (line.program, line.processes) == ("x.py", 4)
    assert line.words == ("--num-layers", "1", "--bf16", "--save", str(tmp_path))
    assert not made.exists()


def test_runs_without_a_launch_say_how_they_ended(recorded, monkeypatch):
    for text, words in (
        ('[ "$#" -eq 0 ] && exit 1\npython a.py --bf16', "status 1, without a launch.*--env"),
        ("echo --bf16; no_such_program --bf16", "status 0, without a launch"),
        (": ${DATA:?is not set}\npython a.py --bf16", "DATA: is not set"),
    ):
        with pytest.raises(ValueError, match=words):
            recorded(text)
    assert recorded('[ "$#" -eq 0 ] && exit 1\npython a.py --bf16', **{"2": "x"}).words
    monkeypatch.setattr(sys.modules[record_script.__module__], "_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"none after 0\.2 seconds"):
        recorded("while :; do :; done")


def test_patterns_of_layers():
    """Python's own reading of the expressions that Megatron-LM evaluates."""
    for text in ("[1]", "([0]*3+[1]*2)", "([1]*3+[0]*1)*3", "[1,1,0]*2+[0]", "[0]+([1]*2+[0])*2"):
        assert parse_pattern(text) == eval(text)
    assert (parse_pattern("4"), parse_pattern("'4'")) == (4, 4)
    for text in ("", "x", "[1]*", "([1]", "[1]*99999", "__import__('os')", "[]", "*3"):
        assert parse_pattern(text) is None


def test_yaml_of_megatron_and_nemo(tmp_path):
    """Megatron-LM's --yaml-cfg, and a configuration with a trainer and a model."""
    own = tmp_path / "own.yaml"
    own.write_text(
        "language_model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, num_query_groups: 2,\n"
        "  layernorm_epsilon: 1.e-6, layernorm_zero_centered_gamma: true, add_bias_linear: false,\n"
        "  activation_func: swiglu, init_method: null, hidden_dropout: 0.0, attention_dropout: 0.0}\n"
        "model_parallel: {tensor_model_parallel_size: 2, bf16: true, params_dtype: null}\n"
        "micro_batch_size: 2\nglobal_batch_size: 8\nmax_position_embeddings: 64\nseq_length: 64\n"
        "untie_embeddings_and_output_weights: true\nposition_embedding_type: rope\nvocab_size: 256\n"
        "lr: 2.5e-4\ntrain_iters: 10\nmock_data: true\nsplit: '99,1,0'\nsave_interval: 5\n"
    )  # fmt: skip
    config = migrate(own, processes=4).config
    assert (config.parallelism.mesh, config.gpt.num_kv_heads, config.gpt.norm_eps) == (
        "dp=2,tp=2",
        2,
        1e-6,
    )
    assert (config.gpt.zero_centered_norm, config.gpt.bias, config.gpt.tied) == (True, False, False)
    assert (config.gpt.activation, config.gpt.gated, config.parallelism.microbatches) == (
        "silu",
        True,
        2,
    )
    plain = (
        own.read_text()
        .replace("swiglu", "gelu")
        .replace("add_bias_linear: false", "add_bias_linear: true")
    )
    for fused, wanted in (("true", "gelu_tanh"), ("false", "gelu")):
        own.write_text(f"{plain}bias_activation_fusion: {fused}\n")
        assert migrate(own, processes=4).config.gpt.activation == wanted
    nemo = tmp_path / "nemo.yaml"
    nemo.write_text(
        "trainer: {devices: 4, num_nodes: 2, precision: bf16, max_steps: 30, gradient_clip_val: 0.5,\n"
        "  accelerator: gpu, val_check_interval: 10, limit_val_batches: 3}\n"
        "model: {micro_batch_size: 1, global_batch_size: 8, encoder_seq_length: 64, num_layers: 2,\n"
        "  max_position_embeddings: 64, hidden_size: 64, num_attention_heads: 4, bias: false,\n"
        "  normalization: rmsnorm, activation: fast-swiglu, hidden_dropout: 0.0, attention_dropout: 0,\n"
        "  share_embeddings_and_output_weights: false, position_embedding_type: rope, vocab_size: 256,\n"
        "  rotary_percentage: 0.5, megatron_amp_O2: true, optim: {name: distributed_fused_adam, lr: 1e-3,\n"
        "  betas: [0.9, 0.98], sched: {name: CosineAnnealing, warmup_steps: 3, min_lr: 1e-4}}}\n"
    )  # fmt: skip
    config = migrate(nemo, extra="mock-data").config
    with pytest.raises(ValueError, match="--data-path: got none; wanted files of tokens"):
        migrate(nemo)
    assert (
        config.parallelism.mesh,
        config.steps,
        config.evaluation.every,
        config.evaluation.batches,
    ) == (
        "dp=8",
        30,
        10,
        3,
    )
    assert (config.gpt.norm, config.gpt.rope_fraction, config.precision.name) == (
        "rms",
        0.5,
        "bf16",
    )
    rate = config.learning_rate
    assert (rate.name, rate.warmup_steps, rate.end) == ("cosine", 3, 1e-4)
    assert (config.optimizer.b2, config.optimizer.clip_norm) == (0.98, 0.5)
    own.write_text(
        "model: {num_layers: 1, hidden_size: 64, num_attention_heads: 4, vocab_size: 256,\n"
        "  max_position_embeddings: 64}\ntrain: {train_iters: 9, global_batch_size: 4, micro_batch_size: 1}\n"
        "optimizer: {lr: 1e-3}\ndataset: {seq_length: 64, blend: [[a, b], [0.25, 0.75]], split: '9,1'}\n"
    )  # fmt: skip
    made = migrate(own)
    assert (made.config.data.path, made.absent, made.told) == ("0.25 a 0.75 b", ("a", "b"), False)
    own.write_text(
        "peft: {dim: 8}\ninprocess_restart: {enabled: true}\nlogger: {log_interval: 3}\n"
    )
    with pytest.raises(ValueError, match="low-rank adapters") as error:
        migrate(own)
    assert "inprocess" not in str(error.value)
    own.write_text("rng: {seed: 1}\ndataset: {random_seed: 2}\n")
    with pytest.raises(
        ValueError, match=r"dataset\.random_seed: got 2; wanted 1, as rng\.seed says"
    ):
        migrate(own)
    own.write_text("model: {num_layers: 2, hiden_size: 3}\n")
    with pytest.raises(ValueError, match=r"model\.hiden_size: .*'hidden_size'"):
        migrate(own)


def test_vocabularies_of_files(line, tmp_path):
    """Of a file that is here the size is counted; of a published one it is known."""
    words = tmp_path / "vocab.txt"
    words.write_text("".join(f"word{n}\n" for n in range(300)))
    text = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {words}"
    assert config_of(line, text).gpt.vocab_size == 302  # with [BOS] and [EOS]
    merges = tmp_path / "vocab.json"
    merges.write_text('{"a": 0, "b": 1, "c": 2}')
    assert (
        config_of(line, f"--tokenizer-type GPT2BPETokenizer --vocab-file {merges}").gpt.vocab_size
        == 3
    )
    assert config_of(line, "--padded-vocab-size 512").gpt.padded_vocab == 512
