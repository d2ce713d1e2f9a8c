"""Norms and activations by layer: on every mesh those of a dense model, written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from functron import Mesh, P, gpt, optim, random, tree
from functron.compiler.jit import jit
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.pipeline.partition import Part
from functron.program.trace import trace
from functron.spmd.params import init_params
from functron.training.checks import validate
from functron.training.config import configure
from functron.training.setup import make_setup
from functron.training.step import Watch
from tests.models.test_moe_composition import DEEPSEEK

BATCH, SEQ, VOCAB = 8, 16, 24
DENSE = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=4, embed_dim=16, num_heads=4, num_kv_heads=2, max_seq=SEQ,
    mlp_dim=24, init_stddev=0.4, vocab_multiple=24, dtype="float64",
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True, positions="learned", norm="layer", bias=True),
    "deepseek": replace(DEEPSEEK, num_layers=4),
}
CONFIG = configure(
    seq=SEQ,
    global_batch=BATCH,
    microbatches=2,
    log_layers_every=1,
    optimizer=OptimizerConfig(name="sgd", clip_norm=0.5),
    learning_rate=ScheduleConfig(name="constant", peak=0.1),
)


def batch_of() -> dict:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(BATCH)}


def watched(model: gpt.GPTConfig, mesh: str, **fields) -> tuple[dict, dict, tuple]:
    """The sizes of all layers in the first step; its metrics; and state and usual step."""
    config = configure(CONFIG, gpt=model, mesh=mesh, **fields)
    made = make_setup(config, Mesh.parse(mesh))
    state = made.init(random.key(0))
    assert made.watch is not None
    state, metrics = made.watch.step(state, batch_of())
    return made.watch.layers(metrics), metrics, (state, made)


def by_hand(model: gpt.GPTConfig, **fields) -> dict:
    """The same with autograd, a layer after another."""
    config = configure(CONFIG, gpt=model, **fields)
    weights = init_params(random.split(random.key(0))[0], make_setup(config, Mesh()).whole_defs)
    flat = [leaf.requires_grad_() for leaf in tree.leaves(weights)]
    batch = batch_of()
    loss = gpt.loss(model, weights, batch) / batch["targets"].numel()
    grads = torch.autograd.grad(loss, flat, allow_unused=True)
    found: dict[str, dict] = {}
    sums: dict[tuple[str, str], float] = {}
    for path, leaf, grad in zip(tree.paths(weights), flat, grads, strict=True):
        frozen = config.lora.adapters is not None and not path.endswith(("lora/a", "lora/b"))
        if path.endswith("router/balance") or frozen:
            continue
        entry = path.split("/")[0]
        stacked = entry in (*model.stacks, "mtp")
        rows = range(len(leaf)) if stacked else [...]
        for row in rows:
            name = f"{entry}/{row}" if stacked else entry
            for what, value in (("param_norm", leaf), ("grad_norm", grad)):
                key = (name, what)
                sums[key] = sums.get(key, 0.0) + value[row].detach().square().sum().item()
    for (name, what), value in sums.items():
        found.setdefault(name, {})[what] = value**0.5
    names = ["embed", *(f"{n}/{i}" for n, rows in model.stacks.items() for i in range(len(rows)))]
    for layers, name in enumerate(names):
        x = gpt.stage(
            model, Part(range(layers), embed=True), _first(model, weights, layers), None, batch
        )
        x = x[0] if isinstance(x, tuple) else x
        found.setdefault(name, {})["activation_rms"] = x.square().mean().sqrt().item()
    return found


def _first(model: gpt.GPTConfig, weights: dict, layers: int) -> dict:
    """The parameters with the rows of the first layers only."""
    out = dict(weights)
    for name, rows in model.stacks.items():
        count = max(min(layers, rows.stop) - rows.start, 0)
        out[name] = tree.map(lambda w, n=count: w[:n], weights[name])
    return out


def assert_same(got: dict, want: dict, tolerance: float = 1e-10) -> None:
    assert set(got) == set(want)
    for name in want:
        assert set(got[name]) == set(want[name]), name
        for what, value in want[name].items():
            assert got[name][what] == pytest.approx(value, rel=tolerance), (name, what)


@pytest.fixture(scope="module")
def hand():
    return {name: by_hand(model) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_one_device_says_what_autograd_says(hand, name):
    got, metrics, _ = watched(MODELS[name], "")
    assert_same(got, hand[name])
    total = sum(entry.get("grad_norm", 0) ** 2 for entry in got.values()) ** 0.5
    assert total == pytest.approx(metrics["grad_norm"].item(), rel=1e-12)
    assert list(got)[:2] == ["embed", "norm"]


SPLIT = {"sequence_parallel": True}
ROWS = [
    ("dense", "dp=2", {}),
    ("dense", "dp=2,tp=2", {}),
    ("dense", "tp=2", SPLIT),
    ("tied", "dp=2,tp=2", SPLIT),
    ("dense", "fsdp=2", {"remat": "full"}),
    ("dense", "dp=2,fsdp=2,tp=2", SPLIT | {"gather": "step"}),
    ("dense", "dp=2", {"zero": 1}),
    ("dense", "dp=4", {"zero": 2}),
    ("tied", "dp=2,tp=2", {"zero": 3}),
    ("dense", "cp=2,ulysses=2,tp=2", {"context": "gather", "zero": 1}),
    ("deepseek", "dp=2,ep=2", {}),
    ("deepseek", "ep=2,tp=2", SPLIT | {"expert_axes": "ep,tp"}),
    ("deepseek", "pp=2,ep=2", {"layout": "first=1,last=3"}),
    ("dense", "pp=2", {}),
    ("dense", "pp=2,tp=2", SPLIT | {"schedule": "interleaved", "zero": 2, "mesh": "pp=2,dp=2"}),
    ("dense", "pp=2", {"schedule": "zb-h1"}),
    ("tied", "pp=2,dp=2", {"vocab_over_pp": True}),
]


def factors(name, mesh, fields):
    """Each model with each axis, and each option."""
    axes = fields.get("mesh", mesh).split(",")
    options = [{"option": option} for option in fields.items() if option[0] != "mesh"]
    return [*({"name": name, "axis": axis} for axis in axes), *options]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("name", "mesh", "fields"), ROWS, ids=str)
def test_every_mesh_says_what_one_device_says(hand, name, mesh, fields):
    fields = dict(fields)
    assert_same(watched(MODELS[name], fields.pop("mesh", mesh), **fields)[0], hand[name])


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2"])
def test_of_adapters_only_what_trains_counts(mesh):
    fields = {"lora_rank": 2, "lora_targets": "*/q,*/up"}
    names = {path.rsplit("/", 1)[0] for path in tree.paths(gpt.defs(DENSE))}
    fields["lora_targets"] = ",".join(sorted(n for n in names if n.endswith(("/q", "/up"))))
    want = by_hand(DENSE, **fields)
    got = watched(DENSE, mesh, **fields)[0]
    assert_same(got, want)
    assert set(got["blocks/0"]) == {"param_norm", "grad_norm", "activation_rms"}
    assert set(got["embed"]) == {"activation_rms"}


def test_a_process_of_a_pipeline_must_have_something_that_trains():
    config = configure(mesh="pp=2", microbatches=2, lora_rank=2, layout="E|ttttL")
    validate(config)
    with pytest.raises(ValueError, match="no parameters that train on rank 0; wanted some in"):
        validate(configure(config, nproc=2))


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_the_step_is_a_twin(mesh):
    _, metrics, (state, made) = watched(DENSE, mesh)
    usual, plain = made.step(made.init(random.key(0)), batch_of())
    assert set(metrics) - set(plain) == {"layers", "aux"}
    for path in ("loss", "grad_norm"):
        assert torch.equal(metrics[path], plain[path])
    for a, b in zip(tree.leaves(state), tree.leaves(usual), strict=True):
        assert torch.equal(a, b)


def test_other_steps_cost_nothing_and_these_an_all_reduce_per_axis():
    mesh = Mesh(dp=2, tp=2)
    config = configure(CONFIG, gpt=DENSE, mesh="dp=2,tp=2", zero=1, microbatches=1)
    made, plain = (make_setup(configure(config, log_layers_every=n), mesh) for n in (1, 0))
    assert made.watch is not None
    assert plain.watch is None
    state = made.init(random.key(0).to("meta"))
    batch = tree.map(lambda x: x.to("meta"), batch_of())
    steps = (made.step, plain.step, made.watch.step)
    usual, without, watch = (str(trace(step, donate=0)(state, batch)) for step in steps)
    assert usual == without
    sums = [line.split("#")[0] for line in watch.splitlines() if " = psum(" in line]
    # two norms of four layers, embedding, norm and unembedding; five sizes of the stream; and of
    # the loss two terms, which the usual step does not tell apart
    assert sum("f64[2,7]" in line for line in sums) == 2
    assert sum("f64[5]" in line for line in sums) == 1
    assert len(sums) == usual.count(" = psum(") + 2 + 1 + 2


def test_compiled_steps_say_the_same(hand):
    config = configure(CONFIG, gpt=DENSE, microbatches=1)
    made = make_setup(config, Mesh(dp=2))
    state = made.init(random.key(0))
    assert made.watch is not None
    # Inductor's part in it is slow, and tested elsewhere
    step = jit(made.watch.step, donate=0, backend="eager")
    _, metrics = step(state, batch_of())
    assert_same(made.watch.layers(metrics), hand["dense"])


def test_norms_of_leaves_in_low_precision_are_added_up_in_float32():
    defs = {"a": gpt.defs(DENSE)["embed"]}
    x = torch.full((24, 16), 3e19, dtype=torch.bfloat16)[:1, :1] / 1e3
    layers = optim.layers_of(defs)
    found = optim.norms_by_layer({"norm": ({"a": x}, P())}, layers)["norm"]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(x.item(), rel=1e-6)


def test_when_it_is_due():
    watch = Watch(lambda state, batch: (state, {}), 4, ())
    assert [index + 1 for index in range(12) if watch.due(index)] == [1, 4, 8, 12]


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="log_layers_every: got -1; wanted at least 0"):
        validate(configure(log_layers_every=-1))
