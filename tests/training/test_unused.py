"""Options that somebody set and that have no effect are refused: all of them, by one table."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from dataclasses import replace

import pytest
import torch

from functron import optim, random, tree
from functron.cli.main import main
from functron.cli.train import _parse
from functron.core.settings import fields_under, follow, path_of, settings_of, value_at
from functron.models import gpt
from functron.models.family import trained_families
from functron.nn import RopeScaling
from functron.nn.moe import MoEConfig
from functron.optim.config import OPTIMIZER_NEEDS, OPTIMIZERS, SCHEDULE_NEEDS, SCHEDULES
from functron.spmd import Mesh
from functron.spmd.params import Normal, ParamDef
from functron.training.checks import PRECISION_NEEDS, TOLD_NEEDS, TRAIN_NEEDS, unused, validate
from functron.training.config import TrainConfig, configure, load, with_model
from functron.training.setup import make_setup

MEGATRON, ZOO = map(pytest.mark.applications, ("megatron", "zoo"))
ALWAYS = [
    "model",
    "module",  # the options of its table are checked where it is opened
    "classifier",
    "embedder",
    "data",
    "tokenizer",
    "format",
    "metrics",
    "eval_every",
    "eval_tasks",
    "eval_core",
    "prefetch",
    "mesh",
    "nproc",
    "steps",
    "seq",
    "global_batch",
    "ramp_up",
    "earlier_batches",
    "microbatches",
    "zero",
    "gather_as",
    "lora_rank",
    "precision",
    "products",
    "float32_matmul",
    "remat",
    "kernels",
    "loss_chunk_tokens",
    "compile",
    "deterministic",
    "seed",
    "out",
    "resume",
    "save_every",
    "keep_last",
    "max_restarts",
    "elastic",
    "memory_save_every",
    "exit_after",
    "device",
    "log_layers_every",
    "tensorboard",
    "wandb",
    "rate_unit",
    "order",
    "anomalies.on_nonfinite",
    "anomalies.on_spike",
    "anomalies.window",
    "anomalies.minimum",
    "anomalies.threshold",
    "anomalies.attribute",
    "anomalies.skipped_samples",
    "anomalies.rate_factors",
    "optimizer.name",
    "optimizer.clip_norm",
    "optimizer.offload",
    "optimizer.groups",
    "optimizer.ema_decay",
    "optimizer.skip_nonfinite",
    "optimizer.loss_scale.initial",
    "optimizer.weight_decay_incr_style",
    "gpt.vocab_size",
    "gpt.num_layers",
    "gpt.embed_dim",
    "gpt.num_heads",
    "gpt.num_kv_heads",
    "gpt.head_dim",
    "gpt.max_seq",
    "gpt.norm",
    "gpt.sublayer_norms",
    "gpt.parallel_residual",
    "gpt.qk_norm_last",
    "gpt.qk_norm_kind",
    "gpt.temperature",
    "gpt.unembed_bias",
    "gpt.residual_scale",
    "gpt.logit_scale",
    "gpt.norm_eps",
    "gpt.activation",
    "gpt.gated",
    "gpt.bias",
    "gpt.qk_norm",
    "gpt.zero_centered_norm",
    "gpt.positions",
    "gpt.window",
    "gpt.sinks",
    "gpt.attention_scale",
    "gpt.attention_gate",
    "gpt.score_cap",
    "gpt.logit_cap",
    "gpt.kv_rank",
    "gpt.dense_layers",
    "gpt.dense_at",
    "gpt.mtp_depth",
    "gpt.fused_projections",
    "gpt.tied",
    "gpt.embed_scale",
    "gpt.dropout",
    "gpt.z_loss",
    "gpt.init_stddev",
    "gpt.mup_base_dim",
    "gpt.vocab_multiple",
    "gpt.dtype",
    "gpt.qkv_clip",
    "gpt.moe.num_experts",
    "gpt.moe.top_k",
    "gpt.moe.expert_dim",
    "gpt.moe.score",
    "gpt.moe.normalise",
    "gpt.moe.renormalise",
    "gpt.moe.scale",
    "gpt.moe.num_groups",
    "gpt.moe.routing",
    "gpt.moe.router_bias",
    "gpt.moe.balance_bias",
    "gpt.moe.jitter",
    "gpt.moe.capacity_factor",
    "gpt.moe.aux_loss",
    "gpt.moe.z_loss",
    "gpt.moe.shared_dim",
    "gpt.moe.latent_dim",
    "gpt.moe.expert_bias",
    "gpt.moe.router_dtype",
    "mamba.pattern",
    "mamba.vocab_size",
    "mamba.embed_dim",
    "mamba.bias",
    "mamba.norm_eps",
    "mamba.tied",
    "mamba.dropout",
    "mamba.init_stddev",
    "mamba.vocab_multiple",
    "mamba.dtype",
    "bert.vocab_size",
    "bert.num_layers",
    "bert.embed_dim",
    "bert.num_heads",
    "bert.mlp_dim",
    "bert.max_seq",
    "bert.num_types",
    "bert.activation",
    "bert.norm_eps",
    "bert.dropout",
    "bert.init_stddev",
    "bert.vocab_multiple",
    "bert.dtype",
    "t5.vocab_size",
    "t5.num_layers",
    "t5.decoder_layers",
    "t5.embed_dim",
    "t5.num_heads",
    "t5.head_dim",
    "t5.mlp_dim",
    "t5.num_buckets",
    "t5.max_distance",
    "t5.activation",
    "t5.gated",
    "t5.tied",
    "t5.start_id",
    "t5.norm_eps",
    "t5.dropout",
    "t5.init_factor",
    "t5.vocab_multiple",
    "t5.dtype",
]
"""What has an effect in every run (where it is not what it is anyway), or is asked for by name."""

ELSEWHERE = [
    "cuda_graph",
    "special_tokens",
    "slots",
    "prepend_bos",
    "text_rules",
    "optimizer.master_bits",
    "optimizer.start_weight_decay",
    "optimizer.end_weight_decay",
    "gpt.qk_norm_across",
    "gpt.local_rope_theta",
    "gpt.rope_fraction",
    "gpt.rope_pairs",
    "gpt.rope_sections",
    "gpt.nope_every",
    "gpt.global_every",
    "gpt.q_rank",
    "gpt.rope_head_dim",
    "gpt.v_head_dim",
    "gpt.mup_base_head_dim",
    "gpt.moe.capacity_over",
    "gpt.moe.shared_gate",
]
"""What the checks of a section refuse where it has no effect."""

FAMILIES = trained_families()


def under(path, names):
    return any(path == name or path.startswith(f"{name}.") for name in names)


@pytest.mark.applications("guard", "zoo")
def test_every_option_is_in_a_table_or_always_has_an_effect():
    own = {name: FAMILIES[name].config() for name in ("mamba", "bert", "t5")}
    decoder = gpt.GPTConfig(moe=MoEConfig(), rope_scaling=RopeScaling())
    whole = configure(gpt=decoder, **own)
    fields = {*fields_under(whole)} - {x.name for x in settings_of(TrainConfig) if x.mark.instead}
    for name in (*ALWAYS, *ELSEWHERE, *TRAIN_NEEDS, *TOLD_NEEDS, *PRECISION_NEEDS):
        assert any(under(path, [name]) for path in fields), f"{name} is no option"
    shared = {"learning_rate.name", "learning_rate.peak", "learning_rate.warmup_steps"}
    shared |= {"learning_rate.warmup_ratio", "learning_rate.rewarm_steps"}
    # of what is under these each field is looked for by itself
    tables = [name for name in TRAIN_NEEDS if name != "learning_rate"]
    told = [name for name in (*TOLD_NEEDS, *PRECISION_NEEDS) if name != "gpt"]
    missing = [
        path
        for path in sorted(fields - shared)
        if not under(path, [*tables, *told, *ALWAYS, *ELSEWHERE])
    ]
    assert not missing, f"say in a table what these need, or in ALWAYS that they do not: {missing}"
    twice = [path for path in fields if under(path, tables) and path in ALWAYS]
    assert not twice


def kind_of(config, path):
    above, _, last = path_of(type(config), path).rpartition(".")
    return typing.get_type_hints(type(follow(config, above)))[last]


def others(config, path):
    """Other values than a field has."""
    value, kind = value_at(config, path), kind_of(config, path)
    if typing.get_origin(kind) is typing.Literal:
        return [x for x in typing.get_args(kind) if x != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [0.25 if value != 0.25 else 0.5]
    return ["x y z"]


def changed(config, path, value):
    return configure(config, **{path: value})


PLAIN = configure(
    gpt=gpt.GPTConfig(num_layers=2, moe=MoEConfig(), positions="learned"),
    learning_rate=optim.ScheduleConfig("constant", total_steps=0),
)
DENSE = TrainConfig()
ROPE = configure(DENSE, gpt=gpt.GPTConfig(rope_scaling=RopeScaling(kind="linear")))
LATENT = with_model(TrainConfig(), "deepseek-v3-tiny")
RELATIVE = configure(
    DENSE,
    optimizer=optim.OptimizerConfig("adafactor", adafactor=optim.AdafactorConfig(relative_step=True)),
)  # fmt: skip
BASES = [PLAIN, DENSE, ROPE, LATENT, RELATIVE]
if "mamba" in FAMILIES:  # all attention and feed-forward, or all state spaces
    Mamba = FAMILIES["mamba"].config
    BASES += [configure(DENSE, mamba=Mamba(pattern=pattern)) for pattern in ("*-", "MM")]


@pytest.mark.parametrize("name", TRAIN_NEEDS)
def test_each_is_refused_where_it_has_no_effect_and_taken_where_it_has(name):
    need = TRAIN_NEEDS[name]
    bases = [base for base in BASES if not need.holds(base)]
    if name.startswith("gpt.rope_scaling"):
        bases = [ROPE] if name != "gpt.rope_scaling" and not need.holds(ROPE) else []
    if name.startswith("optimizer.") and not bases:  # of the default optimizer
        bases = [configure(DENSE, optimizer=replace(DENSE.optimizer, name="sgd"))]
    if name in ("schedule", "context", "expert_axes", "gather"):  # but for their usual words
        bases = [DENSE]
    if name == "gpt.rope_scaling.original_max_seq":
        assert bases
    tried = 0
    for base in bases:
        for path in fields_under(base, name):
            if value_at(base, path.rpartition(".")[0]) is None or value_at(base, path) is None:
                continue
            for value in others(base, path):
                tried += 1
                try:
                    other = changed(base, path, value)
                except ValueError:  # its section refuses it
                    continue
                assert need.holds(other) or path in [p.path for p in unused(other)]
    assert tried or name in ("gpt.rope_scaling", *(n for n in TRAIN_NEEDS if "rope_scaling." in n))


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("learning_rate.end_fraction", "--learning-rate.end 0 --learning-rate.end-fraction 0.05"),
        ("learning_rate.end_fraction", "--learning_rate.end 1e-5 --learning_rate.end_fraction=0.1"),
        ("learning_rate.power", "--learning-rate.power 2.0"),
        ("learning_rate.init", "--learning-rate.init 1e-5"),
        ("optimizer.momentum", "--optimizer.momentum 0.9"),
        ("optimizer.b2", "--optimizer.name sgd --optimizer.b2 0.95"),
        ("optimizer.muon.nesterov", "--optimizer.muon.no-nesterov"),
        ("optimizer.loss_scale.hysteresis", "--optimizer.loss-scale.hysteresis 2"),
        ("mask_rate", "--mask-rate 0.15"),
        ("extra_token", "--extra-token"),
        ("zigzag", "--mesh dp=2 --no-zigzag"),
        ("sequence_parallel", "--mesh dp=2 --sequence-parallel"),
        ("gpt.mlp_dim", "--model mixtral-tiny --gpt.mlp-dim 1024"),
        ("gpt.moe.aux", "--model mixtral-tiny --gpt.moe.aux-loss 0 --gpt.moe.aux batch"),
        ("gpt.rope_theta", "--model gpt2-tiny --gpt.rope-theta 10000.0"),
        ("memory_folder", "--memory-folder /dev/shm"),
        pytest.param("log_names", "--log-names megatron", marks=MEGATRON),
        ("optimizer.fp32_masters", "--device cpu --optimizer.fp32-masters"),
        ("optimizer.stochastic_rounding", "--gpt.dtype float64 --optimizer.stochastic-rounding"),
        ("optimizer.grad_dtype", "--precision float32 --optimizer.grad-dtype float32"),
        ("optimizer.reduce_dtype", "--precision float32 --optimizer.reduce_dtype=float32"),
        pytest.param(
            "optimizer.mu_dtype",
            "--device cpu --model t5-tiny --optimizer.mu-dtype float32",
            marks=ZOO,
        ),
        ("gpt.fp32_residual", "--device cpu --gpt.fp32-residual"),
        pytest.param("gpt.num_layers", "--model bert-tiny --gpt.num-layers 4", marks=ZOO),
        pytest.param("gpt.norm", "--model t5-tiny --gpt.norm rms", marks=ZOO),
        pytest.param("gpt.mlp_dim", "--model mamba2-tiny --gpt.mlp-dim 1024", marks=ZOO),
    ],
)
def test_an_option_that_is_named_has_an_effect_whatever_its_value(path, options, capsys):
    assert main(["train", *options.split(), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"{path}: got " in said
    assert "which has no effect; wanted " in said
    assert f"fix: leave --{path.replace('_', '-')} out, or " in said


SMALL = [
    "--data", argparse.__file__, "--seq", "8", "--global-batch", "4", "--gpt.num-layers", "1",
    "--gpt.embed-dim", "16", "--gpt.num-heads", "2", "--gpt.mlp-dim", "16", "--prefetch", "0",
]  # fmt: skip


def test_saying_that_there_is_nothing_is_no_mistake(capsys):
    options = "--eval-batches 0 --chunks 0 --no-sequence-parallel --zero 0 --lora-rank 0 --out= "
    options += "--schedule 1f1b --context ring --gather use --keep-every 0 --optimizer.no-nesterov --layout= --no-mask-documents --mesh="
    assert main(["train", *options.split(), "--model", "gpt2-tiny", "--dry-run"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        "--precision bf16 --optimizer.fp32-masters --gpt.fp32-residual --optimizer.mu-dtype float32",
        "--precision bf16 --gpt.dtype float32",  # whose masters the policy set
        "--precision bf16-pure --optimizer.stochastic-rounding --optimizer.grad-dtype float32",
        "--gpt.dtype float64 --optimizer.mu-dtype float32 --optimizer.no-fp32-masters",
        "--optimizer.grad-dtype bfloat16 --optimizer.reduce-dtype bfloat16",
        "--optimizer.grad-dtype= --optimizer.reduce-dtype= --gpt.no-fp32-residual",
        "--mesh fsdp=2 --gather-as bfloat16 --gpt.fp32-residual --optimizer.reduce-dtype float32",
    ],
)
def test_precision_that_changes_something_is_taken(options):
    config, given = _parse([*options.split(), "--device", "cpu"])
    assert not [*unused(config.options, given=given)]


def test_a_file_may_have_precision_that_changes_nothing(tmp_path):
    """As those of earlier runs do, which load and go on."""
    path = tmp_path / "run.toml"
    path.write_text(
        "[gpt]\nfp32_residual = true\n[optimizer]\nfp32_masters = true\n"
        'grad_dtype = "float32"\nmu_dtype = "float32"\n'
    )
    validate(load(path))
    config, given = _parse(["--config", str(path), "--device", "cpu", "--gpt.fp32-residual"])
    assert [p.path for p in unused(config.options, given=given)] == ["gpt.fp32_residual"]
    run = ["train", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*run, *SMALL, "--steps", "1", "--config", str(path)]) == 0
    assert "fp32_masters = true" in (tmp_path / "run" / "config.toml").read_text()
    assert main([*run, "--resume", "--steps", "2"]) == 0


def test_a_file_is_told_as_well(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[learning_rate]\nend = 0.0\nend_fraction = 0.1\n[optimizer.soap]\nfrequency = 3\n"
    )
    with pytest.raises(ValueError, match=r"end_fraction: got 0\.1, which has no effect") as caught:
        validate(load(path))
    assert "optimizer.soap.frequency: got 3, which has no effect" in str(caught.value)


def test_a_run_goes_on_with_what_it_began_with(tmp_path, capsys):
    """Its config.toml says all, and may be of before anybody looked; new options are looked at."""
    run = tmp_path / "run"
    assert main(["train", *SMALL, "--steps", "1", "--out", str(run)]) == 0
    config = run / "config.toml"
    validate(load(config))
    text = config.read_text()
    for before, now in (("power = 2.0", "power = 3.0"), ("\nend = -1.0", "\nend = 0.0"),
                        ("end_fraction = 0.05", "end_fraction = 0.1")):  # fmt: skip
        assert before in text
        text = text.replace(before, now)
    config.write_text(text)
    resume = ["train", "--out", str(run), "--resume"]
    assert main([*resume, "--steps", "2"]) == 0
    capsys.readouterr()
    assert main([*resume, "--steps", "3", "--learning-rate.end-fraction", "0.2"]) == 2
    assert "learning_rate.end_fraction: got 0.2, which has no effect" in capsys.readouterr().err
    assert main([*resume, "--steps", "3", "--learning-rate.end-fraction", "0.1"]) == 2
    set_back = ["--learning-rate.end-fraction", "0.05", "--learning-rate.power", "2.0"]
    assert main([*resume, "--steps", "3", *set_back]) == 0


# --- that the tables are right: by what a change does to numbers


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(optim.ScheduleConfig)][1:])
@pytest.mark.parametrize("name", SCHEDULES)
def test_fields_of_schedules_change_rates_where_the_table_says_so(name, field):
    need = SCHEDULE_NEEDS.get(field)
    for more in ({}, {"warmup_steps": 5, "init": 0.1}, {"rewarm_steps": 4}, {"warmup_ratio": 0.1}):
        end = 0.1 if field != "end_fraction" else -1.0
        for given in ({"end": end}, {"end": 0.2}):
            config = optim.ScheduleConfig(
                name, 1.0, total_steps=40, decay_steps=20, end_fraction=0.1, **{**given, **more}
            )
            if optim.schedule_problems(config):
                continue
            value = getattr(config, field)
            new = "cosine" if field == "decay" else value + (2 if isinstance(value, int) else 0.05)
            new = 0.15 if field == "warmup_ratio" else new
            other = replace(config, **{field: new})
            if optim.schedule_problems(other):
                continue
            a, b = (optim.make_schedule(c) for c in (config, other))
            differs = any(float(a(count)) != float(b(count)) for count in range(60))
            if need is not None and not need.holds(config):
                assert not differs, (config, field)
            elif need is not None and (config.rewarm_steps or not field.startswith("rewarm")):
                assert differs or field == "total_steps", (config, field)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fields_of_optimizers_change_updates_where_the_table_says_so(name):
    defs = {"blocks": {"w": ParamDef((4, 8), ("embed", "mlp"), Normal(1.0))}}
    generator = torch.Generator().manual_seed(0)
    params = {"blocks": {"w": torch.randn(4, 8, generator=generator, dtype=torch.float64)}}
    grads = [
        {"blocks": {"w": torch.randn(4, 8, generator=generator, dtype=torch.float64)}}
        for _ in range(3)
    ]

    def trained(config):
        made = optim.make_optimizer(config, 0.1, specs=None, mask=True, defs=defs)
        state, now = made.init(params), params
        for each in grads:
            updates, state = made.update(each, state, now)
            now = optim.apply_updates(now, updates)
        return torch.cat([leaf.flatten() for leaf in tree.leaves(now)])

    base = optim.OptimizerConfig(name, clip_norm=0.0)
    for field, new in (("b1", 0.5), ("b2", 0.5), ("eps", 0.1), ("weight_decay", 0.5),
                       ("momentum", 0.5), ("nesterov", True), ("muon.momentum", 0.5),
                       ("adafactor.decay_rate", 0.3), ("adafactor.clip", 0.1), ("soap.decay", 0.1)):  # fmt: skip
        need = OPTIMIZER_NEEDS[field if field in OPTIMIZER_NEEDS else field.partition(".")[0]]
        differs = not torch.equal(trained(base), trained(changed(base, field, new)))
        if field not in ("muon.momentum", "soap.decay"):  # of stacked matrices alone
            assert differs == need.holds(base), field
        else:
            assert not differs or need.holds(base), field


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", PRECISION_NEEDS)
def test_precision_changes_numbers_or_states_where_the_table_says_so(path, dtype):
    model = gpt.GPTConfig(
        vocab_size=16, num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, vocab_multiple=16,
        init_stddev=0.5, dtype=dtype,
    )  # fmt: skip
    base = configure(gpt=model, seq=8, global_batch=4, microbatches=2)
    other = changed(base, path, True if isinstance(value_at(base, path), bool) else "float32")
    tokens = torch.arange(32).reshape(4, 8) % 11
    batch = {"tokens": tokens, "targets": tokens.flip(0), "rows": torch.arange(4)}

    def outcome(config):
        """Parameters and losses of two steps, and the dtypes of the state."""
        made = make_setup(config, Mesh())
        state, losses = made.init(random.key(0)), []
        for _ in range(2):
            state, metrics = made.step(state, batch)
            losses.append(metrics["loss"].item())
        kinds = sorted(str(leaf.dtype) for leaf in tree.leaves(state) if leaf.is_floating_point())
        return [leaf.tolist() for leaf in tree.leaves(state.params)], losses, kinds

    assert PRECISION_NEEDS[path].holds(other) == (dtype == "bfloat16")
    assert (outcome(base) != outcome(other)) == (dtype == "bfloat16")
