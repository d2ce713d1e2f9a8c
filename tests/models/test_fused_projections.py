"""One matrix for queries, keys and values, and one for gate and up: the model that has them apart.

What is apart is the oracle: here the joined leaves are cut by slices that are written out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import functron as ft
from functron import Mesh, checkpoint, gpt, lora, ops, random, tree
from functron.checkpoint.memory import slice_values
from functron.checkpoint.placement import Division
from functron.models import mup
from functron.models.lora import LoRA
from functron.nn.moe import MoEConfig
from functron.optim import compact
from functron.pipeline import Partition, even_layout, make
from functron.program.equations import Scan
from functron.spmd.params import Normal, ParamDef, init_params
from functron.training.config import configure
from functron.training.convert import upcycle
from functron.training.run import prepare
from functron.training.setup import make_setup
from tests.spmd.test_params import bound

TOLERANCE = 1e-10
GROUP = 2
APART = gpt.GPTConfig(
    vocab_size=50, num_layers=2, embed_dim=24, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=48,
    max_seq=16, init_stddev=0.3, dtype="float64",
)  # fmt: skip
CASES = {
    "qwen3": replace(APART, qk_norm=True, qkv_bias=True, attention_gate=True),
    "olmo": replace(APART, bias=True, qkv_clip=0.4, qk_norm=True, qk_norm_across=True),
    "gpt-oss": replace(
        APART, window=5, global_every=2, sinks=True, bias=True, activation="clamped_swiglu",
        moe=MoEConfig(4, 2, 16, normalise="after", expert_bias=True),
    ),
    "deepseek": replace(
        APART, num_kv_heads=0, kv_rank=8, rope_head_dim=4, v_head_dim=4, dense_layers=1,
        mtp_depth=1, moe=MoEConfig(4, 2, 16, shared_dim=16),
    ),
    "glm": replace(APART, num_kv_heads=8, rope_pairs="neighbours", rope_fraction=0.5),
}  # fmt: skip


def fused(config):
    return replace(config, fused_projections=True)


def batch() -> dict:
    tokens = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def apart(params, group=GROUP):
    """The parameters, joined ones cut."""
    if not isinstance(params, dict):
        return params
    made = {}
    for name, layer in params.items():
        if name == "qkv":
            made["q"] = {key: x[..., :group, :].flatten(-3, -2) for key, x in layer.items()}
            made["k"] = {key: x[..., group, :] for key, x in layer.items()}
            made["v"] = {key: x[..., group + 1, :] for key, x in layer.items()}
        elif name == "gate_up":
            made["gate"] = {key: x[..., 0, :] for key, x in layer.items()}
            made["up"] = {key: x[..., 1, :] for key, x in layer.items()}
        else:
            made[name] = apart(layer, group)
    return made


def close(got, want):
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.shape == b.shape, path
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max().clamp(min=1e-3), path


def drawn(config):
    """Parameters of which none are special."""
    generator = torch.Generator().manual_seed(1)
    noise = lambda x: x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return tree.map(noise, init_params(random.key(0), gpt.defs(config)))


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("name", CASES)
def test_it_begins_and_computes_as_apart(name, choice):
    plain, config, group = CASES[name], fused(CASES[name]), 1 if name == "glm" else GROUP
    begun = [init_params(random.key(0), gpt.defs(c)) for c in (plain, config)]
    torch.testing.assert_close(apart(begun[1], group), begun[0], rtol=0, atol=0)
    assert len(tree.leaves(begun[1])) < len(tree.leaves(begun[0]))
    assert gpt.flops_per_token(config, 16) == gpt.flops_per_token(plain, 16)

    options, params = ft.ModelOptions(kernels=ops.use(choice)), drawn(config)
    loss = lambda config, w: gpt.loss(config, w, batch(), options)
    value, grads = ft.value_and_grad(partial(loss, config))(params)
    want, want_grads = ft.value_and_grad(partial(loss, plain))(apart(params, group))
    torch.testing.assert_close(value, want, rtol=1e-12, atol=0)
    close(apart(grads, group), want_grads)


def test_a_shard_or_a_stage_begins_as_the_whole():
    """Megatron's interleaving: a rank's part of the joined leaf is its part of each piece."""
    config, mesh = fused(CASES["qwen3"]), Mesh(fsdp=2, tp=2)
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    whole = apart(init_params(random.key(0), defs))["blocks"]["attention"]
    mine = apart(init_params(random.key(0), defs, specs, bound(mesh, 3)))["blocks"]["attention"]
    for name, heads in (("q", 8), ("k", 4), ("v", 4)):
        want = whole[name]["w"][:, 12:, heads // 2 :]
        assert torch.equal(mine[name]["w"], want)
        assert want.shape[1:3] == (12, heads // 2)
    partition = Partition(even_layout(2, 2), make("1f1b", 2, 2).pipes, gpt.uses(config))
    later = apart(init_params(random.key(0), partition.local_defs(defs, 1)))["blocks"]
    assert torch.equal(later["attention"]["q"]["w"], whole["q"]["w"][1:])


def traced(config, options=None):
    params = ft.abstract_params(gpt.defs(config))
    options = options or ft.ModelOptions()
    return ft.trace(ft.grad(lambda w, b: gpt.loss(config, w, b, options)))(params, batch())


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("choice", ["reference", "kernel"])
def test_it_keeps_no_more_for_backward(choice, qk_norm):
    config, options = replace(APART, qk_norm=qk_norm), ft.ModelOptions(kernels=ops.use(choice))
    plain, joined = traced(config, options), traced(fused(config), options)
    if not any("flash" in equation.name for equation, _ in plain.block.walk()):
        pytest.skip("attention keeps a copy of values, and those that are views are kept as well")
    assert joined.memory().peak_bytes <= plain.memory().peak_bytes


def test_a_layer_has_fewer_products():
    """Forward 7 become 4, backward 14 become 8; see `test_launches_of_a_layer` for the rest."""

    def count(config):
        scans = [e.op for e, _ in traced(config).block.walk() if isinstance(e.op, Scan)]
        return [sum(e.name == "mm" for e, _ in scan.body.walk()) for scan in scans]

    assert (count(APART), count(fused(APART))) == ([7, 14], [4, 8])


def test_adapters_of_joined_matrices():
    """x W + s (x A) B on all of the joined columns, and merged the same."""
    config = fused(CASES["qwen3"])
    adapters = LoRA(rank=3, targets=("blocks/attention/qkv", "blocks/mlp/gate_up"))
    defs = lora.lora_defs(gpt.defs(config), adapters)
    params = init_params(random.key(0), defs)
    for group, name in (("attention", "qkv"), ("mlp", "gate_up")):
        layer = params["blocks"][group][name]
        layer["lora"] = layer["lora"]._replace(b=torch.randn_like(layer["lora"].b))
    got = gpt.loss(config, params, batch())
    merged = lora.merge(params)
    torch.testing.assert_close(got, gpt.loss(config, merged, batch()), rtol=1e-12, atol=0)
    assert abs(got - gpt.loss(config, lora.plain(params), batch())) > 1e-2
    with pytest.raises(ValueError, match=r"attention/q'.*linear layer.*blocks/attention/qkv"):
        lora.lora_defs(gpt.defs(config), LoRA(targets=("blocks/attention/q",)))


def test_widths_of_mup():
    config = replace(APART, mup_base_dim=12, mup_base_head_dim=2, qkv_bias=True)
    for layer, piece in (("attention/qkv", "attention/q"), ("mlp/gate_up", "mlp/up")):
        got, want = (
            dict(zip(tree.paths(defs), tree.leaves(defs), strict=True))[f"blocks/{name}/w"]
            for defs, name in ((gpt.defs(fused(config)), layer), (gpt.defs(config), piece))
        )
        assert (got.width, got.init) == (want.width, want.init)
        assert got.width.inputs == 2
    params = drawn(fused(config))
    plain, folded = mup.folded(fused(config), params)
    got = gpt.forward(plain, folded, batch()["tokens"])
    want = gpt.forward(fused(config), params, batch()["tokens"])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_made_of_a_joined_layer(bias):
    dense, moe = fused(replace(APART, bias=bias)), MoEConfig(8, 4, 24, renormalise=True)
    params = drawn(dense)
    made, config = upcycle(params, dense, replace(moe, expert_bias=bias))
    wanted = gpt.defs(config)
    assert tree.paths(made) == tree.paths(wanted)
    assert [x.shape for x in tree.leaves(made)] == [d.shape for d in tree.leaves(wanted)]
    tokens = batch()["tokens"]
    got, want = gpt.forward(config, made, tokens), gpt.forward(dense, params, tokens)
    assert (got - want).abs().max() < 1e-12 * want.abs().max()


def test_what_cannot_be_is_refused():
    config = fused(APART)
    with pytest.raises(ValueError, match=r"fused_projections: got True with 4 key heads on tp=8"):
        gpt.rules(config, Mesh(tp=8))
    gpt.rules(APART, Mesh(tp=8))
    with pytest.raises(ValueError, match=r"fused_projections: .*latent attention"):
        replace(CASES["deepseek"], moe=None, dense_layers=0, gated=False, fused_projections=True)
    with pytest.raises(ValueError, match=r"qkv/w: got queries, keys.*fused_projections=False"):
        compact.blocks(gpt.defs(config))
    with pytest.raises(ValueError, match=r"pieces .* wanted as many entries"):
        ParamDef((4, 3, 2), ("embed", None, None), Normal(1.0), pieces=(("q", 1), ("k", 1)))


# Checkpoints


def run_config(fused, **options):
    config = replace(APART, vocab_size=256, bias=True, fused_projections=fused)
    return configure(gpt=config, seq=16, global_batch=4, steps=6, **options)


def train_in_turns(folder, turns, mesh, **options):
    """The checkpoint of a run that is resumed with these layouts, each for so many steps."""
    start, step = None, 0
    for fused, count in turns:
        config = run_config(fused, mesh=mesh, **options)
        run = prepare(config, Mesh.parse(mesh), begin_from=start)
        state = run.state
        for _ in range(count):
            state, _ = run.step(state, run.batch(step))
            step += 1
        start = folder / f"{len(turns)}-{step}"
        checkpoint.save(start, state, placement=run.setup.placement)
    assert start is not None
    return checkpoint.restore(start)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp=2", {}),
        ("fsdp=2", {}),
        ("dp=4,tp=2", {"zero": 1}),
        ("pp=2", {"microbatches": 2}),
        ("tp=2", {"optimizer__name": "muon"}),
        ("", {"precision": "bf16", "optimizer__mu_dtype": "int8", "optimizer__nu_dtype": "int8"}),
    ],
    ids=["tp", "fsdp", "zero", "pp", "muon", "8 bits"],
)
def test_a_run_goes_on_in_the_other_layout(mesh, options, tmp_path):
    """The same leaves; and the numbers of a run that nobody interrupted, up to rounding."""
    want = train_in_turns(tmp_path, [(False, 6)], mesh, **options)
    got = train_in_turns(tmp_path, [(True, 2), (False, 2), (True, 2)], mesh, **options)
    assert tree.paths(got) == tree.paths(want)
    for path, x, y in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert x.shape == y.shape, path
        if "precision" not in options:
            assert (x - y).abs().max() < TOLERANCE, path


@pytest.mark.parametrize("averaged", [False, True])
def test_what_a_run_stored_joined_is_read_apart(averaged, tmp_path):
    """As runs with fused projections once did; and joined again, also where it is indexed."""
    own = {"optimizer__ema_decay": 0.5, "steps": 2}
    run = prepare(run_config(True) if not averaged else configure(run_config(True), **own), Mesh())
    state, _ = run.step(run.state, run.batch(0))
    checkpoint.save(tmp_path / "old", state)
    checkpoint.save(tmp_path / "new", state, placement=run.setup.placement)
    names = {name: list(checkpoint.Checkpoint(tmp_path / name)) for name in ("old", "new")}
    found = {key: {name for x in paths for name in x.split("/")} for key, paths in names.items()}
    assert {"qkv", "gate_up"} <= found["old"]
    assert not {"qkv", "gate_up"} & found["new"]

    read_average = run.setup.averaged
    want = state.params if read_average is None else read_average(state)
    for folder in ("old", "new"):
        for joined, values in ((False, apart(want)), (True, want)):
            defs = gpt.defs(run_config(joined).gpt)
            stored = checkpoint.Checkpoint(tmp_path / folder)
            read = checkpoint.read_params(stored, defs, averaged=averaged)
            assert tree.paths(read) == tree.paths(values)
            assert all(map(torch.equal, tree.leaves(read), tree.leaves(values)))
            lazy = checkpoint.stored_params(stored, defs, averaged=averaged)
            for x, y in zip(tree.leaves(lazy), tree.leaves(values), strict=True):
                last = (*(0 for _ in y.shape[:-2]), slice(1, None, 2), slice(0, 3))
                for where in (..., 1, slice(0, 1), last if y.dim() > 1 else 0, (..., -1)):
                    assert torch.equal(x[where], y[where])
        other = prepare(configure(run_config(False), **(own if averaged else {})), Mesh(),
                        begin_from=tmp_path / folder)  # fmt: skip
        assert all(
            map(torch.equal, tree.leaves(other.state.params), tree.leaves(apart(state.params)))
        )


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(dp=4)], ids=str)
def test_ranks_write_and_read_the_pieces_of_their_shards(mesh, tmp_path):
    """Each by itself, in chunks that are smaller than a row of heads."""
    zero = {"zero": 1} if mesh["dp"] > 1 else {}
    setup = make_setup(run_config(True, mesh=str(mesh), **zero), mesh)
    whole = setup.init(random.key(1))
    counts = {path: torch.arange(x.numel()).reshape(x.shape) for path, x in tree.items(whole)}
    values = {
        path: n.to(x.dtype) for (path, x), n in zip(tree.items(whole), counts.values(), strict=True)
    }
    alone = setup.placement
    want = {leaf.path: leaf.view(values[leaf.held.path]) for leaf in alone.leaves}
    want = {
        path: x.reshape(leaf.shape)
        for (path, x), leaf in zip(want.items(), alone.leaves, strict=True)
    }
    made = {path: torch.full_like(x, -1) for path, x in want.items()}
    checkpoint.save(tmp_path / "0", want)
    for rank in range(mesh.size):
        placed = replace(alone, rank=rank)
        own = {}
        for leaf in {leaf.held.path: leaf.held for leaf in alone.leaves}.values():
            shape = placed.local_shape(leaf, rank)
            assert shape is not None
            own[leaf.path] = torch.zeros(shape, dtype=leaf.dtype)
            for box in placed.boxes(leaf, rank):
                rows = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
                local = tuple(slice(a, a + n) for a, n in zip(box.local, box.size, strict=True))
                own[leaf.path][local] = values[leaf.path][rows]
        division = Division(placed, chunk_bytes=64)
        tensors = [placed.separate(own).get(leaf.path) for leaf in placed.leaves]
        for index, (leaf, pieces) in enumerate(zip(placed.leaves, division.pieces, strict=True)):
            for piece in pieces:
                part = slice_values(tensors, index, piece).reshape(piece.size)
                made[leaf.path][piece.region()] = part
        read = checkpoint.restore(tmp_path / "0", own, placement=placed)
        assert all(torch.equal(read[path], own[path]) for path in own)
    assert all(torch.equal(made[path], want[path]) for path in want)


def test_state_without_pieces_is_refused():
    with pytest.raises(ValueError, match=r"qkv/w: got .*; wanted whole pieces.*fused_projections"):
        _ = make_setup(run_config(True, optimizer__name="soap"), Mesh()).placement
