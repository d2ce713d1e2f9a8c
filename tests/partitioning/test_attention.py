"""Attention of split sequences by annotation: against dense attention, its claims, and messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import P, optim
from tests.partitioning.test_partition import sent_by

MESHES = {
    "cp=2": P(None, None, "cp"),
    "cp=4": P(None, None, "cp"),
    "cp=2,tp=2": P(None, "tp", "cp"),
    "dp=2,cp=2": P("dp", None, "cp"),
}
BOTH = P(None, None, ("cp", "ulysses"))


def draw(heads: int = 4, kv_heads: int = 2, seq: int = 8, dtype=torch.float64):
    """Queries, keys and values."""
    torch.manual_seed(0)
    shapes = (2, heads, seq, 4), (2, kv_heads, seq, 4), (2, kv_heads, seq, 4)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def attend(causal: bool):
    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return fn


def energy(causal: bool):
    """Of which every gradient differs."""

    def fn(q, k, v):
        out = attend(causal)(q, k, v)
        return (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()

    return fn


def check(mesh: ft.Mesh, spec: P, causal: bool, travel: dict[str, Any], heads: int = 4) -> None:
    """Values, gradients from inside and outside, and that no axis gathers queries."""
    args = draw(heads)
    specs = (spec,) * 3
    mapped = ft.partition(attend(causal), mesh, specs, attention=travel)
    close(mapped(*args), attend(causal)(*args))
    assert mapped.out_specs == spec
    wanted = torch.func.grad(energy(causal), (0, 1, 2))(*args)
    outside = ft.partition(energy(causal), mesh, specs, attention=travel)
    close(torch.func.grad(outside, (0, 1, 2))(*args), wanted)
    inside = ft.partition(ft.grad(energy(causal), (0, 1, 2)), mesh, specs, specs, attention=travel)
    close(inside(*args), wanted)
    # what a rank sends is what the rule says, which the explanation shows
    forward = Counter()
    for (axis, _, _), size in sent_by(ft.trace(mapped)(*args)).items():
        forward[axis] += size
    text = mapped.explain(*args)
    assert all(f"sends {size:,} bytes over {axis!r}" in text for axis, size in forward.items())
    assert text.count("sends") == len(forward) == len(travel)


@pytest.mark.pairwise
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["ring", "zigzag", "gather", "exchange"])
def test_a_split_sequence(mesh, causal, kind):
    check(ft.Mesh.parse(mesh), MESHES[mesh], causal, {"cp": kind}, heads=8)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_of_exchanges(causal):
    check(ft.Mesh(cp=2, ulysses=2), BOTH, causal, {"cp": "ring", "ulysses": "exchange"})


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("ring", {"ppermute": 3}, {"ppermute": 6}),
        ("gather", {"all_gather": 3}, {"psum_scatter": 3}),
    ],
)
def test_bytes(kind, forward, backward):
    """In multiples of a rank's keys and values: around a ring of 4 they are sent three times."""
    args = draw(seq=16)
    step = ft.grad(energy(True), (0, 1, 2))
    spec = MESHES["cp=4"]
    mapped = ft.partition(step, ft.Mesh(cp=4), (spec,) * 3, (spec,) * 3, attention={"cp": kind})
    own = (args[1].nbytes + args[2].nbytes) // 4
    rows = sent_by(ft.trace(mapped)(*args))
    found = {key: size for key, size in rows.items() if key[1] != "psum"}
    assert found == {
        ("cp", op, phase): count * own
        for phase, row in (("forward", forward), ("backward", backward))
        for op, count in row.items()
    }


def test_nothing_is_gathered_but_in_turn():
    """The ring is the one that is written by hand."""

    def by_hand(q, k, v):
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        return ft.nn.context_attention(*rows).transpose(1, 2)

    args, mesh, spec = draw(), ft.Mesh(dp=2, cp=2), MESHES["dp=2,cp=2"]
    ours = ft.partition(attend(True), mesh, (spec,) * 3, attention={"cp": "ring"})
    hand = ft.shard_map(by_hand, mesh, (spec,) * 3, spec)
    names = [[e.name for e in ft.trace(f)(*args).block.equations] for f in (ours, hand)]
    assert names[0] == names[1]
    assert "ppermute" in names[0]


PARAMS = {
    name: torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 4
    for seed, (name, shape) in enumerate(
        {"q": (16, 16), "k": (16, 8), "v": (16, 8), "o": (16, 16), "embed": (32, 16)}.items()
    )
}
SPECS = {"q": P(None, "tp"), "k": P(None, "tp"), "v": P(None, "tp"), "o": P("tp"), "embed": P()}
TOKENS = torch.arange(32).reshape(4, 8) * 5 % 32


def rotated(x):
    """Features turned by the place in the sequence, counted over the whole of it."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def loss(params, tokens):
    x = F.embedding(tokens, params["embed"])
    q, k, v = ((x @ params[n]).unflatten(-1, (-1, 4)).transpose(1, 2) for n in "qkv")
    with ft.named_scope("attention"):
        mixed = attend(True)(rotated(q), rotated(k), v)
    x = x + mixed.transpose(1, 2).flatten(2) @ params["o"]
    return F.cross_entropy((x @ params["embed"].T).flatten(0, 1), tokens.roll(-1, 1).flatten())


OPTIMIZER = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, weight_decay=0.1))


def step(params, state, tokens):
    value, grads = ft.value_and_grad(loss)(params, tokens)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


@pytest.mark.parametrize("travel", ["ring", pytest.param("zigzag", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "again", [{}, pytest.param({"attention": ft.policies.nothing}, marks=pytest.mark.full)]
)
def test_a_training_step(travel, again):
    """Positions, the loss, clipping and updates follow from how tokens are split."""
    state, mesh = OPTIMIZER.init(PARAMS), ft.Mesh(cp=2, tp=2)
    rows = zip(ft.tree.paths(state), ft.tree.leaves(state), strict=True)
    leaves = [SPECS[path.rpartition("/")[2]] if leaf.dim() else P() for path, leaf in rows]
    states = ft.tree.unflatten(ft.tree.flatten(state)[1], leaves)
    mapped = ft.partition(
        step, mesh, (SPECS, states, P(None, "cp")), (SPECS, states, P()),
        attention={"cp": travel}, remat=again,
    )  # fmt: skip
    close(mapped(PARAMS, state, TOKENS), step(PARAMS, state, TOKENS))
    found = sent_by(ft.trace(mapped)(PARAMS, state, TOKENS))
    # the targets are rolled: whole sequences of integers, and nothing else, are gathered over cp
    assert found["cp", "all_gather", "forward"] == TOKENS.nbytes // 2
    own = 2 * 4 * 8 * 8 * 8 // 4  # keys and values of a rank
    if travel == "ring":
        assert found["cp", "ppermute", "forward"] == own
        assert found["cp", "ppermute", "backward"] == 2 * own


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_masks_of_pairs(kind):
    """Each its own of every sample, as packed documents make them; nobody gathers queries."""
    args, spec, mesh = draw(kv_heads=4), MESHES["dp=2,cp=2"], ft.Mesh(dp=2, cp=2)
    seen = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    seen = seen | torch.eye(8, dtype=torch.bool)

    def masked(*given):
        out = F.scaled_dot_product_attention(*given)
        return out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)

    def total(*args):
        return masked(*args).sum()

    specs, given = (spec, spec, spec, P("dp")), (*args, seen)
    mapped = ft.partition(masked, mesh, specs, attention={"cp": kind})
    close(mapped(*given), masked(*given))
    assert mapped.out_specs == spec
    step = ft.grad(total, (0, 1, 2))
    inside = ft.partition(step, mesh, specs, specs[:3], attention={"cp": kind})
    close(inside(*given), step(*given))
    rows = sent_by(ft.trace(mapped)(*given))
    assert sum(rows.values()) == (args[1].nbytes + args[2].nbytes) // 4
    for other in ("zigzag", "exchange"):
        with pytest.raises(ValueError, match=rf"has a mask, which attention=.*{other}.*not take"):
            ft.partition(masked, mesh, specs, attention={"cp": other})(*given)


def test_masks_of_numbers_are_gathered_for_or_refused():
    args, spec, mesh = draw(kv_heads=4), MESHES["cp=2"], ft.Mesh(cp=2)
    bias = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, bias)

    gathered = ft.partition(masked, mesh, (spec,) * 3, attention={"cp": "gather"})
    close(gathered(*args), masked(*args))
    assert gathered.out_specs == spec
    with pytest.raises(ValueError, match=r"test_attention\.py.*of numbers.*'cp': \"gather\""):
        ft.partition(masked, mesh, (spec,) * 3, attention={"cp": "ring"})(*args)


def test_without_the_annotation_queries_are_gathered_and_it_is_named():
    args, spec, mesh = draw(), MESHES["cp=2"], ft.Mesh(cp=2)
    mapped = ft.partition(attend(True), mesh, (spec,) * 3)
    close(mapped(*args), attend(True)(*args))
    assert mapped.out_specs == P()
    note = "gathers the sequence of %arg_0_0 over 'cp'; attention={'cp': \"ring\"} would leave it"
    assert note in mapped.explain(*args)


def test_mistakes_are_told():
    args, spec, mesh = draw(), MESHES["cp=2"], ft.Mesh(cp=2, tp=2)

    def partitioned(attention: Any, fn=None, spec=spec, args=args):
        return ft.partition(fn or attend(True), mesh, (spec,) * 3, attention=attention)(*args)

    for attention, message in (
        ({"context": "ring"}, "axes of the mesh"),
        ({"cp": "rings"}, "did you mean 'ring'"),
        ({"cp": "ring", "tp": "gather"}, "one axis, or two of which one exchanges"),
        ({"cp": "zigzag", "tp": "exchange"}, "one axis, or two of which one exchanges"),
        ({"tp": "ring"}, "'tp', which splits the sequence of none of the 1 calls"),
    ):
        with pytest.raises(ValueError, match=message):
            partitioned(attention)
    with pytest.raises(ValueError, match="of exchanges inside of others"):
        partitioned({"cp": "ring", "tp": "exchange"}, spec=P(None, None, ("tp", "cp")))
    with pytest.raises(ValueError, match=r'none of the 0 calls.*attn_implementation="sdpa"'):
        partitioned({"cp": "ring"}, lambda q, k, v: q * 2)
    with pytest.raises(ValueError, match="the zigzag order cannot split the sequence"):
        partitioned({"cp": "zigzag"}, args=[x[:, :, :6] for x in args])
