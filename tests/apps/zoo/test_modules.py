"""Modules as they are in training: losses, gradients, runs, files, and what is refused.

The oracle is the module itself under torch's autograd, in float64. transformers computes some norms
and rotations in float32 whatever the dtype, so that the order of sums shows at 1e-7.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functron as ft
from functron import Mesh, checkpoint, random
from functron.apps.zoo import modules
from functron.apps.zoo.modules import ModuleConfig, build_module, flatten
from functron.cli.main import main
from functron.compiler import executable
from functron.models.family import list_presets
from functron.spmd.params import init_params
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, load
from functron.training.convert import convert
from functron.training.run import prepare
from functron.training.setup import make_setup
from functron.training.train import train
from tests.apps.zoo.tiny_modules import (
    FAMILIES,
    MESHES,
    REFUSED,
    dense,
    largest_error,
    partitioned,
    staged,
    write_folder,
)

pytest.importorskip("transformers")
FAST = ("cohere2", "glm", "gpt2", "llama", "mixtral", "opt")


@pytest.fixture(scope="module")
def origin_of(tmp_path_factory):
    """The origin of a tiny module of a model type."""

    @functools.cache
    def find(kind: str, **changes) -> str:
        return write_folder(kind, tmp_path_factory.mktemp("module"), **changes)

    return find


@functools.lru_cache(4)
def opened(origin: str, microbatches: int = 1) -> tuple:
    found = list_presets()[origin]
    assert isinstance(found, ModuleConfig)
    config = replace(found, dtype="float64", dropouts="off")  # phimoe's router draws
    return config, *dense(config, microbatches)


def check(origin: str, mesh: str) -> None:
    config, params, total, grads = opened(origin)
    value, found = partitioned(config, params, **MESHES[mesh])
    torch.testing.assert_close(value, total, rtol=1e-6, atol=0)
    assert largest_error(found, grads) < 5e-6
    assert sorted(found) == sorted(grads)


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("kind", FAST)
def test_losses_and_gradients_are_the_module_s(origin_of, kind, mesh):
    check(origin_of(kind), mesh)


@pytest.mark.full  # a minute; docs/modules.md lists them
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_nobody_wrote_a_line_for(origin_of, kind):
    for mesh in MESHES:
        check(origin_of(kind), mesh)


def check_stages(origin: str, mesh: str, schedule: str = "1f1b") -> None:
    """Losses of routers are of each microbatch, also where the module computes them at its end."""
    config, params, total, grads = opened(origin, microbatches=2)
    value, found = staged(config, params, mesh, schedule)
    torch.testing.assert_close(value, total, rtol=1e-6, atol=0)
    assert largest_error(found, grads) < 5e-6
    assert sorted(found) == sorted(grads)


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.7, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "mesh", "schedule"),
    [
        ("gpt2", {}, "pp=2,fsdp=2", "gpipe"),  # tied
        ("llama", {}, "pp=2,tp=2", "zb-h1"),
        ("mixtral", ROUTED, "pp=2,dp=2", "interleaved"),  # values of all layers cross
    ],
)
def test_stages_of_pipelines_have_the_module_s_gradients(origin_of, kind, changes, mesh, schedule):
    check_stages(origin_of(kind, **changes), mesh, schedule)


@pytest.mark.full  # two minutes
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_cut_into_stages(origin_of, kind):
    for mesh in ("pp=2", "pp=2,dp=2", "pp=2,tp=2"):
        check_stages(origin_of(kind), mesh)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "why"), REFUSED.items())
def test_families_that_do_not_train_say_why(origin_of, kind, why):
    with pytest.raises(Exception, match=why):
        check(origin_of(kind), "dp=2")


def run_config(origin: str, **settings) -> TrainConfig:
    usual = {"seq": 16, "global_batch": 4, "format": "mock", "steps": 3, "module__dtype": "float64"}
    usual["module__check"] = "off"  # test_module_check.py has it
    return configure(model=origin, **{**usual, **settings})


def losses(config: TrainConfig) -> list[float]:
    validate(config)
    run = prepare(config, Mesh.parse(config.parallelism.mesh))
    return [record["loss"] for record in train(run, None).history]


@functools.lru_cache(1)
def usual_losses(origin: str) -> tuple[float, ...]:
    return tuple(losses(run_config(origin)))


SETTINGS = {
    "zero 1": {"mesh": "dp=2", "zero": 1},
    "zero 2": {"mesh": "dp=2", "zero": 2, "microbatches": 2},
    "zero 3": {"mesh": "dp=2", "zero": 3, "gather": "keep"},
    "step": {"mesh": "fsdp=2,tp=2", "gather": "step"},
    "use": {"mesh": "fsdp=2,tp=2", "remat": "full"},
    "sequence": {"mesh": "dp=2,tp=2", "sequence_parallel": True, "remat": "dots"},
    "stages": {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 1, "remat": "full"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_runs_are_the_same_on_all_meshes(origin_of, name):
    origin = origin_of("cohere2")
    found = losses(run_config(origin, **SETTINGS[name]))
    assert found == pytest.approx(usual_losses(origin), rel=1e-7)
    assert found[0] != found[2]


def normalise_wide(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Llama's norm, which is in float32 in transformers: Adam makes 1e-5 of such a rounding."""
    return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


def rotate_wide(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple:
    """Llama's rotations, likewise."""
    half = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
    angles = torch.cat([half, half], -1)
    return angles.cos(), angles.sin()


@pytest.mark.full  # each compiles for one to two minutes of CPU time
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gpt2", {"mesh": "dp=2,tp=2"}),
        ("gpt2", {"mesh": "fsdp=2,tp=2", "lora_rank": 2}),
        ("llama", {"mesh": "dp=2,tp=2"}),
    ],
)
def test_simulated_ranks_compile_to_the_same_numbers(origin_of, kind, settings, monkeypatch):
    """Backward adds to zeros that ranks of two simulated axes share (`functron.compiler`)."""
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", normalise_wide)
    monkeypatch.setattr(llama.LlamaRotaryEmbedding, "forward", rotate_wide)
    one = {name: x for name, x in settings.items() if name != "mesh"}
    origin = origin_of(kind, bos_token_id=3)  # a folder of its own, as modules are opened once
    found = losses(run_config(origin, **settings, compile=True))
    assert found == pytest.approx(losses(run_config(origin, **one)), rel=1e-7)


@pytest.mark.parametrize("kind", ["diffllama", "doge"])
def test_families_that_nobody_looked_at_train(origin_of, kind):
    origin = origin_of(kind)
    found = losses(run_config(origin, mesh="dp=2,tp=2"))
    assert found == pytest.approx(losses(run_config(origin)), rel=1e-6)


def test_layers_that_are_alike_are_compiled_once(origin_of, monkeypatch):
    """Graphs that the compiler gets, by how often; its disk has one artefact for each of them."""
    found: list[Counter] = []

    def count(graphs, *args):
        found.append(Counter(graph.code for graph in graphs.values()))
        return {kernel: (lambda x, g=graph: g(*x), "") for kernel, graph in graphs.items()}

    monkeypatch.setattr(executable, "_compile_kernels", count)
    for layers in (6, 7):
        origin = origin_of("llama", num_hidden_layers=layers)
        executable.compile(make_setup(run_config(origin), Mesh()).program())
    for each, layers in zip(found, (6, 7), strict=True):
        forward_and_backward = [n for code, n in each.items() if code.count("\n") > 100]
        assert sorted(forward_and_backward)[-2:] == [layers, layers]
    # nor do the norm of all gradients, and the updates, have longer code in deeper modules
    lines = [sum(code.count("\n") for code in each) for each in found]
    assert lines[0] == lines[1]


STEPS: dict[str, Any] = {"seq": 16, "global_batch": 4, "format": "mock", "steps": 2}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kinds", "meshes", "compiled"),
    [
        (("gpt2", "mixtral", "gemma2"), ("pp=2",), False),
        pytest.param(FAST, ("pp=2", "dp=2", "fsdp=2", "tp=2"), False, marks=pytest.mark.full),
        pytest.param(("gpt2",), ("pp=2", "dp=2", "tp=2"), True, marks=pytest.mark.full),
        pytest.param(("opt", "cohere2"), ("pp=2",), True, marks=pytest.mark.full),
    ],
)
def test_processes_have_the_numbers_of_one(torchrun, origin_of, kinds, meshes, compiled):
    settings = {**STEPS, "microbatches": 2, "module__dtype": "float64", "module__check": "off"}
    origins = [origin_of(kind) for kind in kinds]
    wanted = [losses(configure(model=origin, **settings)) for origin in origins]
    given = json.dumps({**settings, "compile": compiled, "device": "cpu"})
    program = Path(__file__).with_name("gloo_modules.py")
    done = torchrun(
        program, 2, given, ";".join(meshes), *origins, timeout=1200 if compiled else 120
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(meshes) * len(origins)
    for got, one in zip(found, wanted * len(meshes), strict=True):
        assert got == pytest.approx(one, rel=1e-6)


RULES = "(q|k|v|gate|up)_proj = tp; (o|down)_proj = -,tp; embed_tokens|lm_head = tp"


def test_five_lines_are_rules(origin_of, tmp_path):
    origin = origin_of("llama")
    config = run_config(origin, mesh="tp=2", module__rules=RULES)
    setup = prepare(config, Mesh(tp=2)).setup
    specs = flatten(setup.specs)
    assert str(specs["model.layers.1.self_attn.o_proj.weight"]) == "P(None, 'tp')"
    assert str(specs["model.embed_tokens.weight"]) == "P('tp', None)"
    assert losses(config) == pytest.approx(usual_losses(origin), rel=1e-6)
    file = tmp_path / "config.toml"
    lines = RULES.replace("; ", "\n")
    file.write_text(f'model = "{origin}"\n[module]\nrules = """\n{lines}"""\n')
    read = load(file).architecture
    assert isinstance(read, ModuleConfig)
    assert read.rules.strip() == lines
    file.write_text(dump(config))
    assert load(file) == config
    for text, said in (
        ("k_pro = tp; nothing = tp", "rule 'nothing': got no path"),
        ("k_proj = fsdp", "wanted PATTERN = tp or -"),
        ("(k = tp", "wanted a regular expression"),
    ):
        with pytest.raises(ValueError, match=said):
            losses(run_config(origin, mesh="tp=2", module__rules=text))
    with pytest.raises(ValueError, match="got 32 entries in dim 0 on tp=3; wanted a multiple of 3"):
        losses(run_config(origin, mesh="tp=3", module__rules=RULES))


def test_it_begins_as_the_module_does(origin_of, tmp_path):
    """With the weights of its files, or as the run's seed has it initialise itself."""
    config = ModuleConfig(origin=origin_of("llama"), vocab_size=64)
    made = [flatten(init_params(random.key(seed), modules.defs(config))) for seed in (1, 1, 2)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(made[0][name], made[1][name])
    assert not torch.equal(made[0][name], made[2][name])
    assert made[0][name].std().item() == pytest.approx(0.3, rel=0.1)  # its initializer_range
    own = build_module(config.origin, seed=5)
    # a method of transformers, which `torch.nn.Module` does not declare
    own.save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    config = replace(config, origin=f"{modules.HUB}:{tmp_path / 'weights'}")
    found = flatten(init_params(random.key(0), modules.defs(config)))
    wanted = dict(own.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[x], wanted[x]) for x in wanted)


def arguments(origin: str, out: Path, *more) -> list[str]:
    text = str(Path(__file__))
    return list(map(str, [
        "train", "--model", origin, "--data", text, "--seq", 16, "--global-batch", 4, "--out", out,
        "--eval-every", 2, "--eval-data", f"t={text}", "--eval-batches", 1,
        "--learning-rate.total-steps", 9, "--module.check", "off", *more,
    ]))  # fmt: skip


def test_a_run_goes_on_elsewhere_and_is_exported(origin_of, tmp_path, capsys):
    """Names in checkpoints and files are the module's; without a step, files are its own bits."""
    from functron.apps.zoo.module_files import make_format

    formats = {"hf-module": make_format()}
    source = tmp_path / "source"
    module = build_module(origin_of("gpt2", vocab_size=256))  # its output is tied
    # a method of transformers
    module.save_pretrained(source)  # type: ignore[operator]
    origin, run = f"hf-module:{source}", tmp_path / "run"
    convert(origin, f"run:{tmp_path / 'begun'}", formats=formats)
    convert(f"run:{tmp_path / 'begun'}", f"hf-module:{tmp_path / 'same'}", formats=formats)
    weights = "model.safetensors"
    assert (tmp_path / "same" / weights).read_bytes() == (source / weights).read_bytes()
    stages = ["--mesh", "pp=2", "--microbatches", 2]
    assert main(arguments(origin, run, *stages, "--steps", 2)) == 0
    assert main(arguments(origin, tmp_path / "whole", "--steps", 4)) == 0
    more = ["--resume", "--mesh", "fsdp=2,tp=2", "--steps", 4]
    assert main(arguments(origin, run, *more)) == 0
    both = [run_folder.records(path) for path in (run, tmp_path / "whole")]
    for name in ("loss", "eval"):
        one, other = (
            [json.dumps(r[name], default=str) for r in rows if name in r] for rows in both
        )
        assert len(one) == len(other) > 1
    assert [r["loss"] for r in both[0]] == pytest.approx([r["loss"] for r in both[1]], rel=1e-5)
    newest, config = run_folder.newest(run), load(run / "config.toml").architecture
    assert newest is not None
    assert isinstance(config, ModuleConfig)
    stored = checkpoint.Checkpoint(newest)
    names = {name for name, _ in module.named_parameters()}
    assert {f"params/{name.replace('.', '/')}" for name in names} <= {*stored}
    convert(f"run:{run}", f"hf-module:{tmp_path / 'out'}", formats=formats)
    again = build_module(f"hf-module:{tmp_path / 'out'}")
    params = checkpoint.read_params(stored, modules.defs(config))
    for name, value in flatten(params).items():
        assert torch.equal(dict(again.named_parameters())[name], value)
        assert not torch.equal(dict(module.named_parameters())[name], value)
    capsys.readouterr()
    assert (
        main(["sample", str(run), "--prompt", "def ", "--tokens", "4", "--temperature", "0"]) == 0
    )
    ids = torch.tensor([list(b"def ")])
    # a method of transformers
    greedy = again.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)  # type: ignore[operator]
    assert capsys.readouterr().out.encode("utf-8", "replace").startswith(b"def ")
    own = ft.generate(params, config, ids, 4, temperature=0)
    assert own.tolist() == greedy.tolist()


def test_weights_that_are_missing_are_refused(origin_of, tmp_path):
    """transformers reports them, and goes on with random ones."""
    module: Any = build_module(origin_of("llama"))
    state = {name: x for name, x in module.state_dict().items() if "1.mlp.up_proj" not in name}
    module.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"no weights of .* for model\.layers\.1\.mlp\.up_proj"):
        build_module(f"hf-module:{tmp_path}")


def test_routers_losses_count_in_training_alone(origin_of):
    origin = origin_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.7)
    config, params, total, grads = opened(origin)
    value, found = partitioned(config, params, dp=2)
    torch.testing.assert_close(value, total, rtol=1e-6, atol=0)
    assert largest_error(found, grads) < 5e-6
    plain = modules.make_family().without_extras(config)
    assert abs(partitioned(plain, params)[0] - total) > 1


class Words(nn.Module):
    """A module of one's own, with a frozen table and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(300, 8), nn.Linear(8, 300)
        self.mixed = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, tokens):
        return self.out(torch.tanh(self.embed(tokens).cumsum(1) @ self.mixed * self.scale))


class Backwards(Words):
    def forward(self, tokens):
        return super().forward(tokens.flip(1)).flip(1)


class Dropping(Words):
    def forward(self, tokens):
        return super().forward(tokens)

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(8)


def make_nothing():
    pass


class Stack(Words):
    """Parameters of different shapes, whose names differ in numbers alone, and positions."""

    def __init__(self):
        super().__init__()
        self.place = nn.Embedding(16, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, tokens):
        h = self.embed(tokens).cumsum(1) + self.place(torch.arange(tokens.shape[1]))
        return self.out(h + self.mlp(h))


class Noisy(Words):
    def forward(self, tokens):
        return super().forward(tokens) + 0.1 * torch.rand(()) * self.training


class Transposed(Words):
    """Drops out of what begins with tokens, so that masks are of no sample."""

    def forward(self, tokens):
        dropped = nn.functional.dropout(self.embed(tokens).transpose(0, 1), 0.5, self.training)
        return super().forward(tokens) + self.out(dropped.transpose(0, 1))


class Shared(Words):
    """Sees a later token of both samples, or of another sample alone."""

    def forward(self, tokens):
        return super().forward(tokens) + self.embed(tokens).mean()


HERE = "module:tests.apps.zoo.test_modules"


def test_a_module_of_one_s_own():
    origin = f"{HERE}.Words"
    config = run_config(origin, mesh="dp=2")
    run = prepare(config, Mesh(dp=2))
    assert sorted(flatten(run.state.params)) == ["embed.weight", "out.bias", "out.weight"]
    assert config.architecture.vocab_size == 300
    assert losses(config) == pytest.approx(losses(run_config(origin)), rel=1e-9)


def test_parts_of_a_sequence_are_split_by_rules_of_their_own():
    origin = f"{HERE}.Stack"
    rules = "mlp.0 = tp; mlp.1 = tp; mlp.3.weight = -,tp; place = tp"
    config = run_config(origin, mesh="fsdp=2,tp=2", module__rules=rules)
    specs = flatten(prepare(config, Mesh(fsdp=2, tp=2)).setup.specs)
    assert str(specs["mlp.0.weight"]) == "P('tp', 'fsdp')"
    assert str(specs["mlp.3.weight"]) == "P('fsdp', 'tp')"
    assert losses(config) == pytest.approx(losses(run_config(origin)), rel=1e-9)
    # a lookup of split rows has zeros where one of whole rows fails
    for settings, said in (
        ({"seq": 17}, "at most module.max_seq=16"),
        ({"module__max_seq": 32}, "at most 16, the positions that it has parameters for"),
    ):
        with pytest.raises(ValueError, match=said):
            validate(run_config(origin, **settings))


def test_what_is_refused(origin_of, tmp_path):
    encoder = write_folder("bert", tmp_path / "bert")
    for origin, said in (
        (f"{HERE}.Backwards", "logits that see tokens after theirs"),
        (encoder, "logits that see tokens after theirs"),
        (f"{HERE}.Shared", "logits that see tokens after theirs"),
        (f"{HERE}.Noisy", "draws other random numbers in training than .*--module.dropouts off"),
        (f"{HERE}.Transposed", r"dropout of \[8, 5, 8\], whose first dim is not of 5 samples"),
        (f"{HERE}.Dropping", r"running statistics in norm"),
        (f"{HERE}.make_nothing", "which returns NoneType; wanted a torch.nn.Module"),
        (f"hf-module:{tmp_path}", "wanted a folder with config.json|config.json"),
        ("module:nowhere.at_all", "no such function"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            validate(run_config(origin))
    validate(run_config(f"{HERE}.Noisy", module__dropouts="off"))
    pipe: dict[str, Any] = {"mesh": "pp=2", "microbatches": 2}
    with pytest.raises(ValueError, match=r"layers in a torch\.nn\.ModuleList, that"):
        validate(run_config(f"{HERE}.Words", **pipe))
    llama = origin_of("llama")
    for settings, said in (
        ({"mesh": "pp=4", "microbatches": 2}, "2 layers for 4 stages; wanted a layer for every"),
        (
            {"mesh": "pp=2", "microbatches": 2, "layout": "cost"},
            "layout: got cost; wanted even, or",
        ),
        ({"mesh": "pp=2", "microbatches": 2, "vocab_over_pp": True}, "vocab_over_pp: got true"),
        ({"mesh": "cp=2"}, "mesh: got cp=2"),
        ({"remat": "selective"}, "remat: got selective"),
        ({"optimizer": {"name": "muon"}}, "optimizer: got muon"),
        ({"module__vocab_size": 65}, "wanted 64, the width of the module's logits"),
        ({"seq": 128}, "at most module.max_seq=64"),
        ({"lora_rank": 2, "lora_targets": "no_proj"}, "'no_proj'; wanted a linear layer"),
    ):
        with pytest.raises(ValueError, match=said):
            validate(run_config(llama, **settings))
