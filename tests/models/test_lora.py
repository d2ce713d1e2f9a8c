"""Low-rank adapters: the dense W + s A B, on every mesh; frozen leaves stay; merged at the end."""

import functools
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, checkpoint, gpt, hub, lora, optim, random, tree
from functron.cli import evaluate
from functron.cli.main import main
from functron.models.lora import LoRA
from functron.nn.packed import PackedMatrix
from functron.optim import OptimizerConfig
from functron.spmd.params import abstract_params
from functron.training.config import TrainConfig, configure, dump, load
from functron.training.convert import convert
from functron.training.records import read
from functron.training.run import prepare, programs
from functron.training.setup import RunSetup, make_setup
from functron.training.train import train
from tests.models.test_moe_composition import DEEPSEEK, MIXTRAL
from tests.training.test_rooms import CONFIG as EXPERT_RUN
from tests.training.test_rooms import assert_equal as assert_same_step
from tests.training.test_rooms import biased, draw_batch

CONFIG = gpt.GPTConfig(
    vocab_size=256, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
    max_seq=12, init_stddev=0.2, dtype="float64", vocab_multiple=8,
)  # fmt: skip
RANK, ALPHA = 3, 7.0
RUN = configure(
    gpt=CONFIG, seq=12, global_batch=4, lora_rank=RANK, lora_alpha=ALPHA,
    optimizer=OptimizerConfig(clip_norm=0.5, weight_decay=0.1),
)  # fmt: skip
DEFS = make_setup(RUN, Mesh()).whole_defs
# the subscripts of x W for each matrix of a layer, with r for the rank
PRODUCTS = {
    ("attention", "q"): "lir,lrhd->lihd",
    ("attention", "k"): "lir,lrhd->lihd",
    ("attention", "v"): "lir,lrhd->lihd",
    ("attention", "out"): "lhdr,lro->lhdo",
    ("mlp", "up"): "lir,lro->lio",
    ("mlp", "gate"): "lir,lro->lio",
    ("mlp", "down"): "lir,lro->lio",
}


def batch(step: int) -> dict:
    tokens = torch.randint(0, 256, (4, 13), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def begun(defs=DEFS) -> dict:
    """Parameters as if trained for a while: with B that is not zero."""
    source = torch.Generator().manual_seed(5)

    def one(path: str, leaf: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(leaf.shape, generator=source, dtype=torch.float64)
        return (0.3 * drawn).to(leaf.dtype) if path.endswith("lora/b") else leaf

    return tree.map_with_path(one, ft.init_params(random.key(0), defs))


def dense(params: dict) -> dict:
    """The model's own parameters with W + s A B, written out per matrix."""
    made = lora.plain(params)
    for (group, name), product in PRODUCTS.items():
        layer = params["blocks"][group][name]
        added = torch.einsum(product, layer["lora"].a, layer["lora"].b)
        made["blocks"][group][name]["w"] = layer["w"] + ALPHA / RANK * added
    return made


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_the_model_begins_as_it_was():
    plain = ft.init_params(random.key(0), gpt.defs(CONFIG))
    adapted = ft.init_params(random.key(0), DEFS)
    assert all(map(torch.equal, tree.leaves(lora.plain(adapted)), tree.leaves(plain)))
    tokens = batch(0)["tokens"]
    logits = [gpt.forward(CONFIG, params, tokens) for params in (plain, adapted)]
    assert torch.equal(*logits)
    a = adapted["blocks"]["mlp"]["down"]["lora"].a
    assert a.shape == (2, 24, RANK)
    assert 0.7 < a.std() * math.sqrt(24) < 1.3


def test_logits_and_gradients_are_those_of_the_dense_sum():
    params, data = begun(), batch(0)
    chosen, frozen = tree.partition(params, lora.trainable(params))

    def mine(chosen):
        return gpt.loss(CONFIG, tree.join(chosen, frozen), data)

    leaves, structure = tree.flatten(chosen)

    def reference(leaves):
        full = tree.join(tree.unflatten(structure, leaves), frozen)
        return gpt.loss(CONFIG, dense(full), data)

    close(mine(chosen), reference(leaves))
    want = torch.func.grad(reference)(leaves)
    assert len(want) == 2 * len(PRODUCTS)
    assert all(grad.abs().max() > 1e-3 for grad in want)
    for got, grad in zip(tree.leaves(ft.grad(mine)(chosen)), want, strict=True):
        close(got, grad)


def test_merged_parameters_give_the_same_logits():
    params, tokens = begun(), batch(0)["tokens"]
    merged = lora.merge(params)
    assert tree.paths(merged) == tree.paths(gpt.defs(CONFIG))
    close(gpt.forward(CONFIG, merged, tokens), gpt.forward(CONFIG, params, tokens))
    for got, want in zip(tree.leaves(merged), tree.leaves(dense(params)), strict=True):
        close(got, want)
    assert lora.merge(merged)["blocks"]["mlp"]["up"]["w"] is merged["blocks"]["mlp"]["up"]["w"]


def test_low_precision_is_merged_in_float32():
    params = begun(
        make_setup(configure(RUN, gpt=replace(CONFIG, dtype="bfloat16")), Mesh()).whole_defs
    )
    layer = params["blocks"]["mlp"]["up"]
    assert layer["lora"].scale.dtype == torch.float32
    wide = dense(tree.map(torch.Tensor.double, params))["blocks"]["mlp"]["up"]["w"]
    # rounded once: nothing is nearer among the numbers of bfloat16
    assert torch.equal(lora.merge(params)["blocks"]["mlp"]["up"]["w"], wide.bfloat16())


STEPS = 2


def taken(config: TrainConfig, defs=DEFS, start=None):
    mesh = Mesh.parse(config.parallelism.mesh)
    made = make_setup(config, mesh)
    state = made.init(random.key(1), begun(defs) if start is None else start)
    history = []
    for index in range(STEPS):
        state, metrics = made.step(state, batch(index))
        history.append(torch.stack([metrics["loss"], metrics["grad_norm"]]))
    return state, torch.stack(history)


@pytest.fixture(scope="module")
def alone():
    return taken(RUN)


def test_steps_are_those_of_torch_optim(alone):
    """AdamW on A and B of the dense sum, clipped: nothing else moves or counts in the norm."""
    params = begun()
    chosen, frozen = tree.partition(params, lora.trainable(params))
    leaves, structure = tree.flatten(chosen)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    settings = RUN.optimizer
    adamw = torch.optim.AdamW(
        leaves, betas=(settings.b1, settings.b2), eps=settings.eps, weight_decay=0.1
    )
    rate = optim.make_schedule(RUN.rate_schedule)
    history = []
    for index in range(STEPS):
        data = batch(index)
        adamw.param_groups[0]["lr"] = float(rate(torch.tensor(index)))
        full = tree.join(tree.unflatten(structure, leaves), frozen)
        value = gpt.loss(CONFIG, dense(full), data) / 48
        adamw.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, settings.clip_norm)
        adamw.step()
        history.append(torch.stack([value.detach(), norm]))
    state, got = alone
    close(got, torch.stack(history), 1e-6)  # learning rates are float32, rounded differently
    found = tree.leaves(tree.partition(state.params, lora.trainable(params))[0])
    for leaf, want in zip(found, leaves, strict=True):
        close(leaf, want.detach(), 1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mesh": "dp=2", "microbatches": 2}, marks=pytest.mark.full),
        pytest.param({"mesh": "tp=2"}, marks=pytest.mark.full),
        {"mesh": "dp=2,tp=2", "sequence_parallel": True, "remat": "full"},
        pytest.param({"mesh": "fsdp=2", "microbatches": 2}, marks=pytest.mark.full),
        {"mesh": "fsdp=2,tp=2", "remat": "full"},
        {"mesh": "fsdp=2", "gather": "step", "microbatches": 2},
        {"mesh": "dp=2", "zero": 1},
        pytest.param({"mesh": "dp=2", "zero": 2, "microbatches": 2}, marks=pytest.mark.full),
        {"mesh": "dp=2,tp=2", "zero": 2, "remat": "dots"},
        {"mesh": "dp=2", "zero": 3},
        {"mesh": "pp=2", "microbatches": 2},
        {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 2, "layout": "E|ttL"},
        {"mesh": "pp=2", "microbatches": 4, "schedule": "zb-h1"},
        {"mesh": "pp=2,fsdp=2", "microbatches": 2, "gather": "step"},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_mesh_trains_the_same_adapters(changes, alone):
    state, history = taken(configure(RUN, **changes))
    close(history, alone[1])
    rows = zip(
        tree.leaves(state.params),
        tree.leaves(alone[0].params),
        tree.leaves(begun()),
        tree.leaves(lora.trainable(DEFS)),
        strict=True,
    )
    for got, want, before, trains in rows:
        close(got, want)
        assert torch.equal(got, before) != trains


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "dp=2,tp=2", "sequence_parallel": True, "remat": "full", "zero": 1},
        {"mesh": "pp=2,fsdp=2", "microbatches": 2},
        pytest.param({"mesh": "fsdp=2,tp=2", "remat": "full"}, marks=pytest.mark.full),
        pytest.param({"mesh": "tp=2", "compile": True}, marks=pytest.mark.full),
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_mesh_trains_the_same_lengths(changes):
    """DoRA: that its steps are PEFT's is tests/hub/test_adapters.py."""
    run = configure(RUN, lora_dora=True)
    defs = lora.lora_defs(gpt.defs(RUN.gpt), run.lora.adapters)
    want, history = taken(run, defs)
    got, again = taken(configure(run, **changes), defs)
    close(again, history)
    rows = zip(tree.paths(defs), tree.leaves(got.params), tree.leaves(want.params), strict=True)
    for path, one, two in rows:
        close(one, two)
        assert "magnitude" not in path or two.abs().max() > 0


PACKED_RUN = configure(
    RUN, gpt=replace(CONFIG, embed_dim=64, head_dim=32, num_heads=2, mlp_dim=64, tied=True),
    lora_base="mxfp4",
)  # fmt: skip


def unpacked(params):
    """The same parameters with the numbers of packed matrices, found by the format's definition."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat([numbers, -numbers])

    def one(node):
        if not isinstance(node, PackedMatrix):
            return node
        codes = torch.stack([node.values & 15, node.values >> 4], -1).flatten(-2)
        scales = 2.0 ** (node.scales.double() - 127)
        return numbers[codes.long()] * scales.repeat_interleave(32, -1)

    return tree.map(one, params, is_leaf=lambda node: isinstance(node, PackedMatrix))


def test_a_base_in_four_bits_is_lora_on_its_numbers():
    """Loss and gradients, the merged model, and the bytes; numbers are the nearest of the format."""
    adapters = PACKED_RUN.lora.adapters
    plain = begun(lora.lora_defs(gpt.defs(PACKED_RUN.gpt), replace(adapters, base="plain")))
    packed = lora.pack(plain)
    assert tree.paths(packed) == tree.paths(lora.lora_defs(gpt.defs(PACKED_RUN.gpt), adapters))
    whole = unpacked(packed)
    w, near = plain["blocks"]["mlp"]["up"]["w"], whole["blocks"]["mlp"]["up"]["w"]
    largest = w.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    assert ((near - w).abs() <= largest / 3).all()  # half a step of the largest binade, doubled
    assert (near - w).norm() < 0.15 * w.norm()
    layer = packed["blocks"]["mlp"]["up"]["w"]
    assert sum(x.nbytes for x in layer) == w.numel() * 4.25 / 8

    def loss(own, params):
        weights = tree.join(lora.split(params)[0], own)
        return gpt.loss(PACKED_RUN.gpt, weights, batch(0))

    both = [ft.value_and_grad(loss)(lora.split(x)[1], x) for x in (packed, whole)]
    close(both[0][0], both[1][0], 1e-12)
    for got, want in zip(*(tree.leaves(grads) for _, grads in both), strict=True):
        close(got, want, 1e-10)
    for got, want in zip(*(tree.leaves(lora.merge(x)) for x in (packed, whole)), strict=True):
        close(got, want, 1e-12)


def test_the_numbers_of_a_base_in_four_bits_are_made_where_they_are_multiplied():
    """At the peak there is one matrix of them: activations are those of LoRA, layers however many."""
    run = configure(PACKED_RUN, gpt__num_layers=6)
    both = [configure(run, lora_base=base) for base in ("plain", "mxfp4")]
    plain, packed = (make_setup(each, Mesh()).program().memory() for each in both)
    assert packed.at_peak["activations"] <= plain.at_peak["activations"]
    weights = 6 * (4 * 64 * 64 + 3 * 64 * 64)
    saved = plain.at_rest["parameters"] - packed.at_rest["parameters"]
    assert saved == weights * 8 - weights * 4.25 / 8
    assert packed.at_peak["workspace"] - plain.at_peak["workspace"] < 5 * 64 * 64 * 8


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "fsdp=2,tp=2", "remat": "full"},
        {"mesh": "pp=2,dp=2", "microbatches": 2, "zero": 2, "lora_dora": True},
        pytest.param({"mesh": "tp=2", "compile": True}, marks=pytest.mark.full),
        pytest.param({"mesh": "fsdp=2", "gather": "step"}, marks=pytest.mark.full),
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_mesh_trains_on_a_base_in_four_bits(changes):
    run = configure(PACKED_RUN, lora_dora=changes.get("lora_dora", False))
    adapters = run.lora.adapters
    plain = begun(lora.lora_defs(gpt.defs(run.gpt), replace(adapters, base="plain")))
    start = lora.pack(plain)
    copies = [tree.map(torch.clone, start) for _ in range(2)]  # steps take them
    want, history = taken(run, start=copies[0])
    close(history, taken(configure(run, lora_base="plain"), start=unpacked(start))[1])
    got, same = taken(configure(run, **changes), start=copies[1])
    close(same, history)
    rows = zip(tree.paths(start), *map(tree.leaves, (got.params, want.params, start)), strict=True)
    for path, one, two, before in rows:
        assert path.endswith(("/values", "/scales")) == (two.dtype == torch.uint8)
        if two.dtype == torch.uint8:
            assert torch.equal(one, before)
        else:
            close(one, two)


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_other_optimizers(name):
    config = configure(RUN, optimizer=OptimizerConfig(name=name))
    state, _ = taken(config)
    rows = zip(tree.leaves(state.params), tree.leaves(begun()), strict=True)
    moved = [not torch.equal(got, before) for got, before in rows]
    assert moved == tree.leaves(lora.trainable(DEFS))


def traffic(program, op: str, phase: str = "backward") -> int:
    found = program.cost().collectives
    return sum(t.payload_bytes for t in found if t.op == op and t.phase == phase)


def test_frozen_parameters_cost_no_gradients():
    """Read in the traced programs: reductions, FLOPs and the optimizer's state."""
    chosen = tree.partition(DEFS, lora.trainable(DEFS))[0]
    trained = ft.num_params(chosen)
    frozen = make_setup(configure(RUN, mesh="dp=2"), Mesh(dp=2)).program()
    # the adapters' gradients once, and two numbers: the loss's cotangent and a count
    assert trained * 8 <= traffic(frozen, "psum") <= trained * 8 + 16

    split = sum(math.prod(d.shape) for d in tree.leaves(chosen) if "embed" in d.axes)
    program = make_setup(configure(RUN, mesh="fsdp=2", microbatches=2), Mesh(fsdp=2)).program()
    assert traffic(program, "psum_scatter") == 2 * 8 * split
    everything = sum(math.prod(d.shape) for d in tree.leaves(lora.plain(DEFS)) if "embed" in d.axes)
    assert everything > 3 * split > 0  # what the gradients of all would be

    # of 6 FLOPs per frozen weight and token, the 2 of its gradient are not computed
    full = make_setup(configure(RUN, lora_rank=0), Mesh()).program().cost().hardware_flops
    tokens = RUN.data.global_batch * RUN.data.seq
    matrices = sum(math.prod(d.shape) for d in tree.leaves(lora.plain(DEFS)) if len(d.shape) > 1)
    saved = 2 * tokens * (matrices - 256 * 16 - 2 * 2 * 16)  # no product: look-up, scales of norms
    added = 6 * tokens * trained
    assert make_setup(RUN, Mesh()).program().cost().hardware_flops <= full - saved + added

    state = make_setup(RUN, Mesh()).init(random.key(0), begun())
    counters = 2
    assert tree.size(state.opt_state) <= 2 * trained + counters


@pytest.fixture
def finished(tmp_path):
    """A run of adapters that began with a plain checkpoint; its folder and the plain one's."""
    model = replace(CONFIG, dtype="float32")
    config = configure(RUN, gpt=model, steps=1, data=__file__)
    base = ft.init_params(random.key(3), gpt.defs(model))
    checkpoint.save(tmp_path / "base" / "0", {"params": base}, {"step": 0})
    run = prepare(config, Mesh(), begin_from=tmp_path / "base" / "0")
    drawn = ft.init_params(
        random.split(random.key(config.seed))[0], make_setup(config, Mesh()).whole_defs
    )
    for got, want in zip(tree.leaves(lora.plain(run.state.params)), tree.leaves(base), strict=True):
        assert torch.equal(got, want)
    fresh = (tree.leaves(lora.split(value)[1]) for value in (run.state.params, drawn))
    assert all(map(torch.equal, *fresh))
    assert run.start == 0
    train(run, tmp_path / "run")
    return config, base, tmp_path / "run"


def test_a_run_from_a_plain_checkpoint_and_its_export(finished, tmp_path, capsys):
    config, base, folder = finished
    path = checkpoint.latest(folder / "checkpoints")
    like = {"params": abstract_params(make_setup(config, Mesh()).whole_defs)}
    params = checkpoint.restore(path, like)["params"]
    for got, want in zip(tree.leaves(lora.plain(params)), tree.leaves(base), strict=True):
        assert torch.equal(got, want)
    assert params["blocks"]["mlp"]["up"]["lora"].b.abs().max() > 0

    again = prepare(configure(config, mesh="fsdp=2"), Mesh(fsdp=2), begin_from=path)
    assert again.start == 1
    assert all(map(torch.equal, tree.leaves(again.state.params), tree.leaves(params)))

    convert(f"run:{folder}", f"hf:{tmp_path / 'hf'}")
    hub.save(tmp_path / "direct", config.gpt, params)
    for out in ("hf", "direct"):
        loaded = hub.load(tmp_path / out, config.gpt)
        for got, want in zip(tree.leaves(loaded), tree.leaves(lora.merge(params)), strict=True):
            # a product of one layer, or of all at once, whose sums processors take as they like
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)

    told = {}
    for name, settings in {"run": config, "merged": configure(config, lora_rank=0)}.items():
        if name == "merged":
            there = tmp_path / name
            checkpoint.save(there / "checkpoints" / "0", {"params": lora.merge(params)}, {})
            (there / "config.toml").write_text(dump(settings))
        where = ["--prompt", "def ", "--tokens", "8", "--temperature", "0", "--device", "cpu"]
        assert evaluate.sample([str(tmp_path / name), *where]) == 0
        told[name] = capsys.readouterr().out
    assert told["run"] == told["merged"]


def test_placement_knows_adapters():
    """Ranks of a pipeline hold rows of their own layers, optimizer state included."""
    config = configure(RUN, mesh="pp=2", microbatches=2)
    where = make_setup(config, Mesh(pp=2)).pipeline_placement
    shapes = {leaf.path: where.local_shape(leaf, 1) for leaf in where.leaves}
    assert shapes["params/blocks/mlp/up/lora/a"] == (1, 16, RANK)
    moments = [path for path in shapes if path.startswith("opt_state/") and path.endswith("/a")]
    assert len(moments) == 2 * len(PRODUCTS)
    assert not [path for path in shapes if "opt_state" in path and path.endswith("/w")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (LoRA(rank=0), "lora_rank: got 0; wanted at least 1"),
        (LoRA(alpha=0.0), "lora_alpha: got 0.0; wanted a positive number"),
        (LoRA(targets=()), "lora_targets: got nothing"),
        (LoRA(targets=("blocks/atention/q",)), "did you mean 'blocks/attention/q'"),
        (LoRA(targets=("embed",)), "lora_targets: got 'embed'; wanted a linear layer"),
    ],
)
def test_refusals(wrong, said):
    with pytest.raises(ValueError, match=said):
        lora.lora_defs(gpt.defs(CONFIG), wrong)


def test_blocks_of_a_base_in_four_bits_are_whole():
    run = configure(PACKED_RUN, gpt__mlp_dim=96)
    with pytest.raises(ValueError, match=r"mlp/up/w: got 3 blocks of 32 on tp = 2 ranks; wanted"):
        make_setup(run, Mesh(tp=2))
    narrow, targets = gpt.defs(replace(CONFIG, mlp_dim=48)), ("blocks/mlp/up",)
    with pytest.raises(ValueError, match=r"mxfp4 of blocks/mlp/up, whose last dim is 48; wanted"):
        lora.lora_defs(narrow, LoRA(targets=targets, base="mxfp4"))
    joined = gpt.defs(replace(PACKED_RUN.gpt, fused_projections=True))
    with pytest.raises(ValueError, match=r"mxfp4 of blocks/attention/qkv, which is joined; wanted"):
        lora.lora_defs(joined, LoRA(targets=("blocks/attention/*",), base="mxfp4"))
    model, targets = gpt.PRESETS["mixtral-tiny"], ("blocks/moe/experts/*",)
    with pytest.raises(ValueError, match="wanted no experts with a base in 4 bits"):
        lora.lora_defs(gpt.defs(model), LoRA(targets=targets, base="mxfp4"))


def test_a_run_from_nothing_packs_its_first_numbers():
    state = make_setup(PACKED_RUN, Mesh()).init(random.key(1))
    whole = make_setup(configure(PACKED_RUN, lora_base="plain"), Mesh()).init(random.key(1))
    packed = lora.pack(whole.params)
    for got, want in zip(tree.leaves(state.params), tree.leaves(packed), strict=True):
        assert torch.equal(got, want)


def test_experts_have_no_dora():
    model, targets = gpt.PRESETS["mixtral-tiny"], ("blocks/moe/experts/*", "blocks/attention/*")
    with pytest.raises(
        ValueError, match=r"names blocks/moe/experts/.*; wanted no experts with DoRA"
    ):
        lora.lora_defs(gpt.defs(model), LoRA(targets=targets, dora=True))


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ValueError, match=r"(?s)lora_rank.*lora_alpha.*blocks/foo"):
        lora.lora_defs(gpt.defs(CONFIG), LoRA(-1, -1.0, ("blocks/foo",)))


def test_only_targets_are_adapted():
    defs = lora.lora_defs(gpt.defs(CONFIG), LoRA(targets=("blocks/*/q", "blocks/mlp/up")))
    found = {path.split("/lora/")[0] for path in tree.paths(defs) if "/lora/" in path}
    assert found == {"blocks/attention/q", "blocks/mlp/up"}


def test_of_layers_of_experts_those_and_the_shared_one_are_adapted():
    model = gpt.PRESETS["deepseek-v3-tiny"]
    layers = ("blocks/moe/experts/*", "blocks/moe/shared/*")
    targets = ("blocks/attention/*", *layers, "mtp/proj")
    defs = lora.lora_defs(gpt.defs(model), lora.LoRA(4, targets=targets))
    adapted = {path.split("/lora/")[0] for path in tree.paths(defs) if "/lora/" in path}
    own = {layer.replace("*", name) for layer in layers for name in ("up", "gate", "down")}
    attention = {f"blocks/attention/{name}" for name in ("q_down", "kv_down", "out")}
    assert adapted == own | attention | {"mtp/proj"}
    left = lora.unadapted(gpt.defs(model), lora.LoRA(4, targets=targets))
    assert left == ["blocks/attention/q_up", "blocks/attention/kv_up"]


@pytest.mark.parametrize(
    ("name", "target", "fix"),
    [
        ("deepseek-v3-tiny", "blocks/moe/*", "write blocks/moe/experts/*,blocks/moe/shared/* for"),
        ("mixtral-tiny", "blocks/*", "write blocks/attention/*,blocks/moe/experts/* for"),
        ("mixtral-tiny", "*/router", "leave it out"),
    ],
)
def test_targets_that_name_routers_are_refused(name, target, fix):
    """They multiply their matrices themselves; every matrix that is named is told."""
    model = gpt.PRESETS[name]
    wrong = lora.LoRA(4, targets=("blocks/attention/*", target))
    with pytest.raises(ValueError, match="other than routers") as caught:
        lora.lora_defs(gpt.defs(model), wrong)
    assert "blocks/moe/router" in str(caught.value)
    assert f"fix: {fix}" in str(caught.value)


assert DEEPSEEK.moe is not None
EXPERTS = {name: biased(**more) for name, more in (("plain", {}), ("latent", {"latent_dim": 12}))}
EXPERTS["fused, shared"] = replace(
    DEEPSEEK, vocab_size=24, fused_projections=True, moe=replace(DEEPSEEK.moe, balance_bias=False)
)
# (mesh, what differs)
EXPERT_ROWS = [
    ("ep=2", {}),
    ("ep=4", {"expert_room": 1.0, "reruns": True}),
    ("ep=2,tp=2", {"sequence_parallel": True}),
    ("ep=2,tp=2", {"sequence_parallel": True, "expert_axes": "ep,tp", "expert_room": 1.0}),
    ("fsdp=2,ep=2", {"gather": "use", "remat": "full"}),
    ("dp=2,ep=2", {"zero": 2, "expert_room": 1.0}),
    ("pp=2,ep=2", {"schedule": "1f1b", "expert_room": 1.0}),
    ("pp=2,ep=2", {"schedule": "zb-h1"}),
]


def adapted_experts(name, **fields):
    return configure(
        EXPERT_RUN, gpt=EXPERTS[name], lora_rank=RANK, lora_alpha=ALPHA,
        lora_targets="blocks/attention/out,blocks/moe/experts/*", **fields,
    )  # fmt: skip


def merged_by_hand(params: dict) -> dict:
    """W + s A B of every expert, written out, with the subscripts of gate and up apart or joined."""
    made = lora.plain(params)
    block = params["blocks"]
    added = torch.einsum("lhdr,lro->lhdo", *block["attention"]["out"]["lora"][:2])
    out = block["attention"]["out"]["w"] + ALPHA / RANK * added
    made["blocks"]["attention"]["out"]["w"] = out
    for part, layer in block["moe"]["experts"].items():
        rows = []
        for a, b, w in zip(*layer["lora"][:2], layer["w"], strict=True):
            each = [x @ y.flatten(1) for x, y in zip(a, b, strict=True)]
            rows.append(w + ALPHA / RANK * torch.stack(each).view_as(w))
        made["blocks"]["moe"]["experts"][part]["w"] = torch.stack(rows)
    return made


@pytest.mark.parametrize("name", EXPERTS)
def test_adapted_experts_are_those_of_the_dense_sum(name):
    """Each expert has W + s A B of its own: values, every gradient, and what is merged."""
    config = adapted_experts(name)
    params, data = begun(make_setup(config, Mesh()).whole_defs), draw_batch("even")
    assert params["blocks"]["moe"]["experts"]["down"]["lora"].scale.dim() == 2
    chosen, frozen = tree.partition(params, lora.trainable(params))
    leaves, structure = tree.flatten(chosen)

    def mine(leaves):
        return gpt.loss(config.gpt, tree.join(tree.unflatten(structure, leaves), frozen), data)

    def reference(leaves):
        full = merged_by_hand(tree.join(tree.unflatten(structure, leaves), frozen))
        return gpt.loss(config.gpt, full, data)

    close(mine(leaves), reference(leaves))
    for got, want in zip(ft.grad(mine)(leaves), torch.func.grad(reference)(leaves), strict=True):
        assert want.abs().max() > 1e-6
        close(got, want)
    close(tree.leaves(lora.merge(params)), tree.leaves(merged_by_hand(params)))


def test_files_have_the_merged_experts(tmp_path):
    model = replace(MIXTRAL, dtype="float32")
    defs = lora.lora_defs(gpt.defs(model), LoRA(RANK, ALPHA, ("blocks/moe/experts/*",)))
    params = begun(defs)
    hub.save(tmp_path / "hf", model, params)
    loaded = hub.load(tmp_path / "hf", model)
    for got, want in zip(tree.leaves(loaded), tree.leaves(lora.merge(params)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert not torch.equal(*(x["blocks"]["moe"]["experts"]["up"]["w"] for x in (loaded, params)))


@functools.cache
def dense_step(name: str):
    return step_of_experts(name, "", 2)


def step_of_experts(name, mesh, layers, **fields):
    config = adapted_experts(name, mesh=mesh, **fields)
    made = make_setup(config, Mesh.parse(mesh))
    before = begun(made.whole_defs)
    state, (step, _) = made.init(random.key(0), tree.map(torch.clone, before)), programs(made)
    state, metrics = step(state, draw_batch("even"))
    return tree.map(torch.sub, state.params, before), [metrics]


@pytest.mark.pairwise(
    of=lambda name, row, compiled: [{"row": row}, {"name": name}, {"c": compiled}]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", range(len(EXPERT_ROWS)))
@pytest.mark.parametrize("name", EXPERTS)
def test_every_mesh_trains_the_same_adapters_of_experts(name, row, compiled, monkeypatch):
    mesh, fields = EXPERT_ROWS[row]
    if compiled:  # traced as compiled ones are, and run without a compiler
        monkeypatch.setattr(RunSetup, "jit_settings", property(lambda _: {"backend": "eager"}))
    reruns = fields.get("reruns", False)
    fields = {key: value for key, value in fields.items() if key != "reruns"}
    got = step_of_experts(name, mesh, 2, compile=compiled, **fields)
    assert_same_step(got, dense_step(name))
    moved = {
        path for path, x in zip(tree.paths(got[0]), tree.leaves(got[0]), strict=True) if x.any()
    }
    assert any("experts" in path for path in moved)
    assert all("/lora/" in path for path in moved)
    assert not reruns or got[1][0]["reruns"] > 0


def test_checkpoints_whose_targets_named_experts_are_read():
    model = gpt.PRESETS["deepseek-v3-tiny"]
    old, now = (lora.LoRA(4, targets=(f"blocks/moe/{x}*",)) for x in ("", "shared/"))
    wanted = lora.lora_defs(gpt.defs(model), now)
    assert tree.paths(lora.defs_in(gpt.defs(model), old, tree.paths(wanted))) == tree.paths(wanted)


def test_a_run_whose_targets_named_experts_goes_on(tmp_path, capsys):
    """Bit for bit as the run that names the shared expert alone; a new one is refused."""
    out, old = tmp_path / "run", "blocks/attention/*,blocks/moe/*"
    now = old.replace("moe/", "moe/shared/")
    line = ["train", "--model", "deepseek-v3-tiny", "--seq", "8", "--global-batch", "2", "--data"]
    line += [__file__, "--device", "cpu", "--lora-rank", "2", "--prefetch", "0"]
    assert main([*line, "--steps", "1", "--lora-targets", now, "--out", str(out)]) == 0
    shutil.copytree(out, tmp_path / "old")
    file = tmp_path / "old" / "config.toml"
    file.write_text(file.read_text().replace(f'"{now}"', f'"{old}"'))
    assert f'"{old}"' in file.read_text()
    capsys.readouterr()
    for folder in (out, tmp_path / "old"):
        assert main(["train", "--out", str(folder), "--resume", "--steps", "2"]) == 0
        said = capsys.readouterr().out
        named = re.findall("^lora   targets .*", said, re.MULTILINE)
        assert len(named) == (folder != out)
        assert all(f"targets {old} of this run" in x and f"with {now}," in x for x in named)
    losses = [[r["loss"] for r in read(f / "metrics.jsonl")] for f in (out, tmp_path / "old")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert load(file).lora.targets == now
    line += ["--lora-targets", old, "--out", str(tmp_path / "new")]
    assert main(line) == 2
    assert (
        "write blocks/moe/experts/*,blocks/moe/shared/* for the other layers"
        in capsys.readouterr().err
    )


def test_a_checkpoint_of_adapters_without_their_rank_is_refused(finished):
    config, _, folder = finished
    (folder / "config.toml").write_text(dump(configure(config, lora_rank=0)))
    with pytest.raises(ValueError, match="lora_rank"):
        convert(f"run:{folder}", f"hf:{folder}-hf")


def test_frozen_parameters_cannot_be_spread_over_a_pipeline():
    config = configure(RUN, mesh="pp=2", microbatches=2, vocab_over_pp=True)
    with pytest.raises(ValueError, match="spread over the pipeline"):
        _ = make_setup(config, Mesh(pp=2)).step


def test_adapted_models_generate_as_merged_ones():
    """On one rank without options; on several these say how adapters are split."""
    config, settings = gpt.GPTConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16), LoRA(2)
    defs = lora.lora_defs(gpt.defs(config), settings)
    params = tree.map(lambda x: torch.randn_like(x), ft.init_params(random.key(0), defs))
    prompt, mesh = torch.tensor([[1, 2, 3]]), Mesh(tp=2)
    want = ft.generate(lora.merge(params), config, prompt, 4, temperature=0)
    assert torch.equal(ft.generate(params, config, prompt, 4, temperature=0), want)
    with pytest.raises(
        ValueError, match=r"params: got low-rank adapters .* on 2 ranks; wanted their"
    ):
        ft.generate(params, config, prompt, 4, temperature=0, mesh=mesh)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    options = ft.ModelOptions(gather=ft.Gather(specs))
    found = ft.generate(params, config, prompt, 4, temperature=0, mesh=mesh, options=options)
    assert torch.equal(found, want)
