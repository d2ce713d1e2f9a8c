"""Checkpoints that go on in another precision: the state is what converting it by hand makes."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from functron import BoundMesh, Mesh, checkpoint, optim, random, tree
from functron.optim import LossScale, OptimizerConfig
from functron.optim.loss_scaling import LossScaleState
from functron.optim.low_precision import MastersState, StochasticState
from functron.spmd.spec import shard
from functron.training import run_folder
from functron.training.config import configure, with_precision
from functron.training.resume import restore_state
from functron.training.setup import make_setup
from functron.training.step import State
from tests.training.test_watch import CONFIG, MODELS, batch_of

POLICIES = ("float32", "bf16", "bf16 of 16", "bf16-pure", "fp16", "fp8-delayed")
SMALL = replace(MODELS["dense"], num_layers=2, init_stddev=0.05)
PLAIN = configure(CONFIG, gpt=SMALL, log_layers_every=0, microbatches=1,
                optimizer=OptimizerConfig(ema_decay=0.9))  # fmt: skip
CPU = torch.device("cpu")
STEPPED = [{"float32", "bf16"}, {"bf16", "bf16-pure"}, {"float32", "fp16"}]
"""Pairs whose next step is taken, too: what is equal has equal losses."""


def config_of(precision: str, **fields):
    name, _, bits = precision.partition(" of ")
    config = with_precision(configure(PLAIN, **fields), name)
    config = configure(config, optimizer=replace(config.optimizer, master_bits=int(bits or 32)))
    scale = config.optimizer.loss_scale
    if scale.initial:
        config = configure(config, optimizer=replace(config.optimizer, loss_scale=LossScale(256.0)))
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By policy the folder of a checkpoint after a step, its state, and the loss with it."""
    found = {}
    for name in POLICIES:
        config, path = config_of(name), tmp_path_factory.mktemp("runs") / name
        made = make_setup(config, Mesh())
        state = made.init(random.key(0))
        state, _ = made.step(state, batch_of())
        checkpoint.save(path, state, {"step": 1, "config": run_folder.settings(config)})
        loss = 0.0
        if any(name in pair for pair in STEPPED):
            loss = float(made.step(copied(state), batch_of())[1]["loss"])
        found[name] = path, state, loss
    return found


def copied(state: State) -> State:
    """A state that a step may use up."""
    return tree.map(torch.clone, state)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bits of float32."""
    return x.view(torch.int32)


def master_of(param: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """A master in float32, from 32 bits or from the 16 that bfloat16 lacks."""
    if kept.dtype == torch.float32:
        return kept
    return ((param.view(torch.int16).to(torch.int32) << 16) + kept).view(torch.float32)


def taken_apart(state: State) -> tuple:
    """Parameters in as much precision as there is, and the state of the optimizer proper."""
    opt_state, params = state.opt_state, state.params
    if isinstance(opt_state, LossScaleState):
        opt_state = opt_state.inner_state
    clip, inner = opt_state
    if isinstance(inner, MastersState):
        params = tree.map(lambda p, m: p if m is None else master_of(p, m), params, inner.masters)
    if isinstance(inner, MastersState | StochasticState):
        inner = inner.inner
    return state.step, params, clip, inner


def put_together(fresh: State, step, params, clip, inner) -> State:
    """The state of another policy, by hand; `fresh` is how one begins."""
    weights = tree.map(lambda p, like: p.to(like.dtype), params, fresh.params)
    around = fresh.opt_state
    middle = around.inner_state if isinstance(around, LossScaleState) else around
    own = middle[1]
    like = own.inner if isinstance(own, MastersState | StochasticState) else own
    inner = tree.map(lambda x, y: x.to(y.dtype), inner, like)
    if isinstance(own, MastersState):
        masters = tree.map(lambda p, m: None if m is None else p.float(), params, own.masters)
        if any(m.dtype == torch.int16 for m in tree.leaves(own.masters)):
            # the upper halves after rounding away from zero, and what is left
            upper = tree.map(lambda m: (bits_of(m) + 0x8000) >> 16, masters)
            low = tree.map(lambda m, up: (bits_of(m) - (up << 16)).to(torch.int16), masters, upper)
            weights = tree.map(lambda up: up.to(torch.int16).view(torch.bfloat16), upper)
            masters = low
        inner = MastersState(masters, inner)
    elif isinstance(own, StochasticState):
        inner = own._replace(inner=inner)
    both = (clip, inner)
    if isinstance(around, LossScaleState):
        both = around._replace(inner_state=both)
    return State(step, weights, both, fresh.key)


def without_histories(value):
    """A tree without what delayed scaling remembers, whose leaves are no weights."""
    if isinstance(value, dict):
        return {k: without_histories(x) for k, x in value.items() if k != "histories"}
    if isinstance(value, tuple):
        parts = [without_histories(x) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def assert_same(got: State, want: State) -> None:
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path


SLOW = ("fp16", "fp8-delayed")
ROWS = [pytest.param(x, marks=pytest.mark.full) if x in SLOW else x for x in POLICIES]


@pytest.mark.parametrize("after", ROWS)
def test_every_policy_goes_on_as_every_other(after, runs):
    made = make_setup(config_of(after), Mesh())
    fresh = made.init(random.key(0))
    for before, (path, state, loss) in runs.items():
        got, words = restore_state(path, made, random.key(0), CPU, recast=True)
        if before == after:
            assert not words
            assert_same(got, state)
            continue
        want = put_together(without_histories(fresh), *taken_apart(without_histories(state)))
        assert_same(without_histories(got), want)
        empty = got.params["blocks"].get("histories", {})
        assert bool(tree.leaves(empty)) == (after == "fp8-delayed")
        assert all(leaf.eq(0).all() for leaf in tree.leaves(empty))
        assert ("begin empty" in words[-1]) == (after == "fp8-delayed")
        said = "; ".join(words)
        assert ("products" in said) == ("fp8-delayed" in (before, after))
        assert ("masters made" in said) == (before in ("float32", "bf16-pure")
                                            and after not in ("float32", "bf16-pure"))  # fmt: skip
        assert ("loss scale" in said) == ("fp16" in (before, after))
        assert ("optimizer's state from" in said) == ("bf16-pure" in (before, after))
        if {before, after} in STEPPED:
            _, metrics = made.step(got, batch_of())
            assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-3)
    with pytest.raises(ValueError, match=r"NAME .or --products. beside --resume says so"):
        restore_state(path if after != "fp8-delayed" else runs["bf16"][0], made, random.key(0), CPU)


def test_float32_comes_back_as_it_was(runs, tmp_path):
    path, state, _ = runs["float32"]
    low = make_setup(
        config_of("bf16"), Mesh()
    ).defs  # a run that has not saved since it went on as bf16
    read = checkpoint.read_params(checkpoint.Checkpoint(path), low)
    for a, b in zip(tree.leaves(read), tree.leaves(state.params), strict=True):
        assert torch.equal(a, b.bfloat16())
    checkpoint.save(tmp_path / "0", {"params": state.params}, {"step": 0})
    for name in ("bf16-pure", "fp16"):  # of parameters alone
        made = make_setup(config_of(name), Mesh())
        begun, _ = restore_state(tmp_path / "0", made, random.key(0), CPU, recast=True)
        low = tree.map(lambda p, d: p.to(d.dtype), state.params, made.defs)
        wanted = made.init(random.key(0), state.params if name == "fp16" else low)
        assert_same(begun, wanted)
        with pytest.raises(ValueError, match="is of another precision"):
            restore_state(
                tmp_path / "0", make_setup(config_of("bf16-pure"), Mesh()), random.key(0), CPU
            )
    for name in ("bf16", "fp16"):
        between, _ = restore_state(
            path, make_setup(config_of(name), Mesh()), random.key(0), CPU, recast=True
        )
        path = tmp_path / name
        checkpoint.save(path, between, {"step": 2})
    back, words = restore_state(
        path, make_setup(config_of("float32"), Mesh()), random.key(0), CPU, recast=True
    )
    assert_same(back, state)
    assert "parameters from float16 to float32 by their masters" in words


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": "dp=2,tp=2", "zero": 1},
        pytest.param({"mesh": "fsdp=2"}, marks=pytest.mark.full),
        pytest.param({"mesh": "pp=2", "microbatches": 2}, marks=pytest.mark.full),
    ],
    ids=lambda fields: fields["mesh"],
)
def test_each_rank_reads_its_part(fields, runs):
    """Without communication: masters of parameters, and parameters of masters."""
    for before, after in (("bf16-pure", "fp16"), ("fp8-delayed", "float32")):
        path, *_ = runs[before]
        whole, _ = restore_state(
            path, make_setup(config_of(after), Mesh()), random.key(0), CPU, recast=True
        )
        config = config_of(after, **fields)
        mesh = Mesh.parse(config.parallelism.mesh)
        rank = mesh.size - 1
        groups = dict.fromkeys(mesh.axis_names)
        last = make_setup(config, BoundMesh(mesh, rank, mesh.coordinate(rank), groups, "cpu"))
        got, _ = restore_state(path, last, random.key(0), CPU, recast=True)
        known = dict(zip(tree.paths(whole), tree.leaves(whole), strict=True))
        specs = {leaf.path: leaf.spec for leaf in last.placement.leaves}
        for name, leaf in zip(tree.paths(got), tree.leaves(got), strict=True):
            want = shard(known[name], specs[name], mesh, mesh.coordinate(rank))
            if mesh["pp"] > 1 and "blocks" in name:
                want = want[len(want) // 2 :]
            assert torch.equal(leaf, want), name
            assert leaf.dtype == want.dtype


@pytest.mark.parametrize(("coding", "title"), [("int8", "8 bits"), ("fp8", "fp8")])
def test_moments_in_8_bits_and_out_of_them(tmp_path, monkeypatch, coding, title):
    """As the optimizer reads and stores them, on a rank as on one device; squares have no signs."""
    module = sys.modules["functron.checkpoint.restore"]
    monkeypatch.setattr(module, "_ELEMENTS", 5000)  # so that parts are computed
    eight = config_of("bf16")
    eight = configure(eight, gpt=replace(eight.gpt, vocab_size=128, embed_dim=128), optimizer=replace(
        eight.optimizer, mu_dtype=coding, nu_dtype=coding))  # fmt: skip
    plain = configure(eight, optimizer=replace(eight.optimizer, mu_dtype="", nu_dtype=""))
    low, wide = make_setup(eight, Mesh()), make_setup(plain, Mesh())
    draw = torch.Generator().manual_seed(0)

    def drawn(path, x):
        numbers = torch.randn(x.shape, generator=draw) if x.is_floating_point() else x
        return (numbers.abs() if "/nu/" in path else numbers).to(x.dtype)

    state = tree.map_with_path(drawn, wide.init(random.key(0)))
    checkpoint.save(tmp_path / "32", state, {"step": 1})
    got, words = restore_state(tmp_path / "32", low, random.key(0), CPU, recast=True)
    assert words == (f"the optimizer's state from float32 to {title}",)
    before, after = (dict(zip(tree.paths(x), tree.leaves(x), strict=True)) for x in (state, got))
    coded = [name.removesuffix("/codes") for name in after if name.endswith("/codes")]
    assert len(coded) == 4  # embedding and output, of means and of squares
    for name in coded:
        made = optim.quantise(before[name], signed="/mu/" in name, coding=coding)
        assert torch.equal(made.codes, after[f"{name}/codes"])
        assert torch.equal(made.scales, after[f"{name}/scales"])
    checkpoint.save(tmp_path / "8", got, {"step": 1})
    back, words = restore_state(tmp_path / "8", wide, random.key(0), CPU, recast=True)
    assert words == (f"the optimizer's state from {title} to float32",)
    known = dict(zip(tree.paths(back), tree.leaves(back), strict=True))
    for name in coded:
        made = optim.QuantisedMoment(after[f"{name}/codes"], after[f"{name}/scales"])
        assert torch.equal(known[name], optim.dequantise(made, signed="/mu/" in name))
    mesh = Mesh(fsdp=2)
    last = BoundMesh(mesh, 1, mesh.coordinate(1), {"fsdp": None}, "cpu")
    for path, made in ((tmp_path / "32", low), (tmp_path / "8", wide)):
        part = make_setup(configure(made.config, mesh="fsdp=2"), last)
        mine, _ = restore_state(path, part, random.key(0), CPU, recast=True)
        whole = after if made is low else known
        specs = {leaf.path: leaf.spec for leaf in part.placement.leaves}
        for name, leaf in zip(tree.paths(mine), tree.leaves(mine), strict=True):
            assert torch.equal(leaf, shard(whole[name], specs[name], mesh, mesh.coordinate(1))), (
                name
            )


@pytest.mark.parametrize(("before", "after"), [("int8", "fp8"), ("fp8", "int8")])
def test_moments_from_8_bits_to_other_8_bits(tmp_path, before, after):
    small = config_of("float32")
    small = configure(small, gpt=replace(small.gpt, vocab_size=128, embed_dim=128))

    def run(coding):
        own = replace(small.optimizer, mu_dtype=coding, nu_dtype=coding)
        return make_setup(configure(small, optimizer=own), Mesh())

    draw = torch.Generator().manual_seed(0)
    state = run(before).init(random.key(0))
    adam = state.opt_state
    named = dict(zip(tree.paths(adam), tree.leaves(adam), strict=True))
    means = [x.removesuffix("/codes") for x in named if x.endswith("/codes")]
    assert len(means) == 4
    for name in means:  # numbers that are not 0
        signed = "/mu/" in name or name.startswith("mu/")
        dense = torch.randn(named[f"{name}/codes"].shape, generator=draw)
        made = optim.quantise(dense if signed else dense**2, signed=signed, coding=before)
        named[f"{name}/codes"].copy_(made.codes)
        named[f"{name}/scales"].copy_(made.scales)
    checkpoint.save(tmp_path / "one", state, {"step": 1})
    got, words = restore_state(tmp_path / "one", run(after), random.key(0), CPU, recast=True)
    titles = {"int8": "8 bits", "fp8": "fp8"}
    assert words == (f"the optimizer's state from {titles[before]} to {titles[after]}",)
    found = dict(zip(tree.paths(got.opt_state), tree.leaves(got.opt_state), strict=True))
    for name in means:
        signed = "/mu/" in name or name.startswith("mu/")
        held = optim.QuantisedMoment(named[f"{name}/codes"], named[f"{name}/scales"])
        made = optim.quantise(optim.dequantise(held, signed=signed), signed=signed, coding=after)
        assert torch.equal(found[f"{name}/codes"].float(), made.codes.float())
        assert torch.equal(found[f"{name}/scales"], made.scales)


def test_weights_that_do_not_fit(runs, tmp_path):
    state = runs["bf16"][1]
    params = tree.map(lambda leaf: leaf.float() * 1e8, state.params)
    wide = make_setup(config_of("float32"), Mesh()).init(random.key(0), params)
    checkpoint.save(tmp_path / "wide", wide, {"step": 1})
    half = make_setup(config_of("fp16"), Mesh())
    with pytest.raises(ValueError, match="params/embed: got values too large for float16"):
        restore_state(tmp_path / "wide", half, random.key(0), CPU, recast=True)
