"""Splits into parts of unequal size, padded: their arithmetic, and programs that see the parts."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import Mesh, P, Rules, Uneven, lax, random
from functron.program import text
from functron.program.parse import parse
from functron.spmd import BoundMesh
from functron.spmd import spec as sharding
from functron.spmd.params import Normal, ParamDef

SEVEN = torch.arange(1.0, 8.0, dtype=torch.float64)


def test_parts_by_hand():
    """7 over 3 ranks: 3, 3, 1. 5 over 2 x 2: of 3 and 2, in parts of 2: 2, 1, 2, 0."""
    mesh = Mesh(tp=3)
    parts = [sharding.shard(SEVEN, P(Uneven("tp", 7)), mesh, {"tp": i}) for i in range(3)]
    assert [part.tolist() for part in parts] == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    mesh, spec = Mesh(dp=2, tp=2), P(Uneven(("dp", "tp"), 5))
    parts = [sharding.shard(SEVEN[:5], spec, mesh, mesh.coordinate(i)) for i in range(4)]
    assert [part.tolist() for part in parts] == [[1, 2], [3, 0], [4, 5], [0, 0]]
    assert sharding.windows((5,), spec, mesh) == (((0, 2),), ((2, 3),), ((3, 5),), ((5, 5),))
    assert sharding.local_shape((5,), spec, mesh) == (2,)
    assert sharding.global_shape((2,), spec, mesh) == (5,)
    assert sharding.count_padding((2,), spec, mesh) == 3


@given(st.integers(1, 40), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_real_entries_one_after_another_are_the_whole(size, counts):
    names = ["dp", "fsdp", "tp"][: len(counts)]
    mesh, spec = Mesh(**dict(zip(names, counts, strict=True))), P(None, Uneven(names, size))
    whole = torch.arange(2.0 * size).view(2, size)
    parts = [sharding.shard(whole, spec, mesh, mesh.coordinate(i)) for i in range(mesh.size)]
    length = size
    for count in counts:
        length = -(-length // count)
    assert all(part.shape == (2, length) for part in parts)
    spans = [row[1] for row in sharding.windows((2, size), spec, mesh)]
    assert [end - begin for begin, end in spans if end > begin]
    assert list(itertools.chain(*(range(*span) for span in spans))) == list(range(size))
    for part, (begin, end) in zip(parts, spans, strict=True):
        assert torch.equal(part[:, : end - begin], whole[:, begin:end])
        assert not part[:, end - begin :].any()
    assert torch.equal(sharding.unshard(parts, spec, mesh), whole)


def test_an_entry_is_another_than_an_even_one():
    spec = P(None, Uneven(("tp", "fsdp"), 7))
    assert repr(spec) == str(spec) == "P(None, Uneven(('tp', 'fsdp'), 7))"
    assert spec == P(None, Uneven(["tp", "fsdp"], 7)) != P(None, Uneven(("tp", "fsdp"), 8))
    assert P(Uneven("tp", 7)) != P("tp") != P(("tp",)) != P(Uneven("tp", 7))
    assert len({P(Uneven("tp", 7)), P("tp"), P(("tp",)), P(Uneven("tp", 7)), P(Uneven("tp"))}) == 4
    assert copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec)) == spec
    assert sharding.without_axes(spec, ("fsdp",)) == P(None, Uneven("tp", 7))
    assert sharding.without_axes(spec, ("fsdp", "tp")) == P(None, None)


def test_rules_take_sizes_from_parameters():
    defs = {"w": ParamDef((2, 7, 4), ("layers", "embed", "mlp"), Normal(1.0))}
    rules = Rules({"embed": Uneven(("dp", "fsdp")), "mlp": "tp"})
    assert ft.param_specs(defs, rules) == {"w": P(None, Uneven(("dp", "fsdp"), 7), "tp")}
    by_path = Rules({"w$": P(Uneven("tp"))}).specs({"w": torch.zeros(5), "b": torch.zeros(3)})
    assert by_path == {"w": P(Uneven("tp", 5)), "b": P()}


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("tp"), r"wanted a multiple of 2; fix: pad dim 0 to 8, .* write Uneven\('tp', 7\)"),
        (P(Uneven("tp", 6)), r"wanted the size 6; fix: write Uneven\('tp', 7\)"),
        (P(Uneven("tp")), r"wanted the size of the whole dim .* write Uneven\('tp', 124\)"),
        (P(Uneven(("tp", "tp"), 7)), "axis 'tp' at most once"),
    ],
)
def test_what_does_not_fit_is_refused(spec, match):
    with pytest.raises(ValueError, match=match):
        ft.shard_map(lambda x: x, Mesh(tp=2), spec, P("tp"))(SEVEN)


def test_results_must_be_parts_of_what_the_spec_says():
    f = ft.shard_map(lambda x: x, Mesh(tp=2), P(Uneven("tp", 7)), P(Uneven("tp", 9)))
    with pytest.raises(ValueError, match=r"output : got a part of shape \(4,\).*wanted \(5,\)"):
        f(SEVEN)
    for axes, size, match in [((), 3, "at least one"), (3, 3, "names"), ("tp", 0, "the number")]:
        with pytest.raises((TypeError, ValueError), match=match):
            Uneven(axes, size)


MESHES = [Mesh(tp=2), Mesh(tp=3, dp=2), Mesh(dp=4, tp=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("axes", ["tp", ("dp", "tp"), ("tp", "dp")])
def test_programs_get_parts_and_return_wholes(mesh, axes):
    """By hand: a sum of squares, and twice the value; padding is zero, masked, and trimmed."""
    x = torch.stack([SEVEN, -SEVEN.square()])
    spec = P(None, Uneven(axes, 7))

    def program(x):
        real = lax.real_entries(7, axes)
        assert real.shape == x.shape[-1:]
        count = lax.psum(real.sum(), axes)
        shifted = torch.where(real, x + 1, 0.0)  # what is not masked would count padding
        return 2 * x, lax.psum(shifted.square().sum(), axes), count

    f = ft.shard_map(program, mesh, spec, (spec, P(), P()), replicated_over="dp")
    for run in (f, ft.trace(f)(x), ft.jit(f, backend="eager")):
        doubled, total, count = run(x)
        assert torch.equal(doubled, 2 * x)
        torch.testing.assert_close(total, (x + 1).square().sum())
        assert count == 7
    grads = torch.func.grad(lambda x: f(x)[0].square().sum() + f(x)[1])(x)
    torch.testing.assert_close(grads, 8 * x + 2 * (x + 1))
    traced = ft.trace(f)(x)
    assert traced.check() is None
    again = parse(str(traced))
    assert str(again) == str(traced)
    assert torch.equal(again(x)[0], 2 * x)


def test_traces_say_the_bytes_of_padding():
    """7 of 4 bytes over 4 ranks are 8; 3 x 5 in parts of 2 x 5 are 4 x 5."""
    mesh = Mesh(tp=4, dp=2)
    specs = (P(Uneven("tp", 7)), P(Uneven("dp", 3)), P("tp"))
    f = ft.shard_map(lambda x, y, z: (x, y), mesh, specs, specs[:2])
    program = ft.trace(f)(torch.zeros(7), torch.zeros(3, 5), torch.zeros(4))
    lines = text.format(program).splitlines()
    assert lines[0].endswith("0 equations, 24 bytes of padding")
    assert [line.partition("  with ")[2] for line in lines[2:5]] == [
        "4 bytes of padding", "20 bytes of padding", ""
    ]  # fmt: skip


def test_initial_values_are_those_of_one_rank():
    defs = {"w": ParamDef((3, 7, 5), ("layers", "embed", "mlp"), Normal(1.0))}
    mesh = Mesh(fsdp=4, tp=2)
    specs = ft.param_specs(defs, Rules({"embed": Uneven("fsdp"), "mlp": Uneven("tp")}))
    whole = ft.init_params(random.key(3), defs)["w"]
    for rank in range(8):
        bound = BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")
        mine = ft.init_params(random.key(3), defs, specs, bound)["w"]
        assert torch.equal(mine, ft.shard(whole, specs["w"], bound))
        assert mine.shape == (3, 2, 3)
    assert torch.equal(ft.init_params(random.key(3), defs, specs, mesh)["w"], whole)


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("axes", ["fsdp", ("dp", "fsdp")])
def test_blocks_get_gathered_parameters_without_padding(axes, regather):
    mesh = Mesh(dp=2, fsdp=4)
    w = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 16 * 7, dtype=torch.float64).view(16, 7)
    specs = P(None, Uneven(axes, 7), Uneven("tp", 5))

    def block(w, x):
        assert w.shape[1] == 7
        return (x @ w).square().sum()

    def program(w, x):
        gathered = ft.fsdp(block, specs, axes=("dp", "fsdp"), regather=regather)
        value, grad = ft.value_and_grad(lambda w: lax.psum(gathered(w, x), ("dp", "fsdp")))(w)
        return value, ft.sync_gradients(grad, specs)

    value, grad = ft.shard_map(program, mesh, (specs, P(("dp", "fsdp"))), (P(), specs))(w, x)
    torch.testing.assert_close(value, block(w, x))
    torch.testing.assert_close(grad, torch.func.grad(block)(w, x))


def test_padding_gets_no_gradient():
    """A sum over exp of the parts counts padding, which gradients must not."""
    spec = P(Uneven("tp", 7))

    def program(x):
        share = ft.grad(lambda x: lax.psum(x.exp().sum(), "tp"))(x)
        return share, ft.sync_gradients(share, spec)

    f = ft.shard_map(program, Mesh(tp=4), spec, (P("tp"), P("tp")), check=False)
    share, synced = f(SEVEN)
    assert share.tolist() == [*SEVEN.exp().tolist(), 1.0]
    assert synced.tolist() == [*SEVEN.exp().tolist(), 0.0]


def test_drawings_show_real_entries():
    drawn = str(
        ft.visualize_sharding(torch.zeros(5, 2), P(Uneven(("dp", "tp"), 5)), Mesh(dp=2, tp=2))
    )
    assert "each rank holds (2, 2)" in drawn
    assert [line[:3] for line in drawn.splitlines() if ":" in line[:3]] == [
        "0:2", "2:3", "3:5", "5:5"
    ]  # fmt: skip
