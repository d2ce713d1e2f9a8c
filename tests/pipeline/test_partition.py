"""Partitions: who holds what, the same initial numbers everywhere, and taught errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, random, tree
from functron.pipeline import Partition, even_layout, make
from functron.pipeline.partition import layout_of
from functron.spmd import spec as sharding
from functron.spmd.mesh import BoundMesh
from functron.spmd.params import Normal, ParamDef

UNTIED = {"embed": "E", "positions": "E", "blocks": "t", "norm": "L", "unembed": "L"}
TIED = {"embed": "EL", "positions": "E", "blocks": "t", "norm": "L"}

# Written out: per schedule its microbatches, pipes, layers per stage, and per rank the stages, the
# layers, and the entries that it holds, untied.
FIRST, MIDDLE, LAST = ["embed", "positions", "blocks"], ["blocks"], ["blocks", "norm", "unembed"]
BOTH = ["embed", "positions", "blocks", "norm", "unembed"]
HELD = {
    "1f1b": (
        4,
        (((0, 0), (1, 0), (2, 0)),),
        [2, 1, 1],
        [((0,), [0, 1], FIRST), ((1,), [2], MIDDLE), ((2,), [3], LAST)],
    ),
    "gpipe": (
        1,
        (((0, 0), (1, 0), (2, 0)),),
        [0, 3, 0],
        [((0,), [], ["embed", "positions"]), ((1,), [0, 1, 2], MIDDLE), ((2,), [], ["norm", "unembed"])],
    ),
    "interleaved": (
        2,
        (((0, 0), (1, 0), (0, 1), (1, 1)),),
        [1, 2, 2, 1],
        [((0, 2), [0, 3, 4], FIRST), ((1, 3), [1, 2, 5], LAST)],
    ),
    "zbv": (
        2,
        (((0, 0), (1, 0), (1, 1), (0, 1)),),
        [1, 1, 2, 1],
        [((0, 3), [0, 4], BOTH), ((1, 2), [1, 2, 3], MIDDLE)],
    ),
    "dualpipe": (
        8,
        (((0, 0), (1, 0), (2, 0), (3, 0)), ((3, 1), (2, 1), (1, 1), (0, 1))),
        [1, 2, 1, 1],
        [
            ((0, 3), [0, 4], BOTH),
            ((1, 2), [1, 2, 3], MIDDLE),
            ((2, 1), [3, 1, 2], MIDDLE),
            ((3, 0), [4, 0], BOTH),
        ],
    ),
}  # fmt: skip


def partition(name: str, uses: dict[str, str]) -> Partition:
    _, pipes, layers, _ = HELD[name]
    return Partition(layout_of(layers), pipes, uses)


@pytest.mark.parametrize("name", HELD)
def test_the_schedules_have_these_pipes(name):
    num_microbatches, pipes, _, ranks = HELD[name]
    assert make(name, len(ranks), num_microbatches).pipes == pipes


@pytest.mark.parametrize("name", HELD)
def test_who_holds_what(name):
    _, _, layers, ranks = HELD[name]
    part = partition(name, UNTIED)
    assert part.num_ranks == len(ranks)
    assert part.num_stages == len(layers)
    for rank, (stages, rows, names) in enumerate(ranks):
        assert part.stages(rank) == stages
        assert part.layers(rank) == rows
        assert list(part.local(UNTIED, rank)) == names
    assert part.stages(None) == tuple(range(len(layers)))
    assert part.layers(None) == list(range(sum(layers)))
    assert part.local(UNTIED, None) == UNTIED


@pytest.mark.parametrize(("uses", "name"), itertools.product([UNTIED, TIED], HELD))
def test_no_rank_holds_what_it_does_not_use(uses, name):
    """A rank holds the parameters that its stages use and no others, and each is somewhere."""
    part, ranks = partition(name, uses), HELD[name][3]
    for rank, (stages, rows, _) in enumerate(ranks):
        parts = [part.layout[stage] for stage in stages]
        does = {
            "E": any(p.embed for p in parts),
            "t": bool(rows),
            "L": any(p.loss for p in parts),
        }
        wanted = {entry for entry, letters in uses.items() if any(does[x] for x in letters)}
        assert set(part.local(uses, rank)) == wanted
        assert {entry for stage in stages for entry in part.names(stage)} == wanted
    assert {n for rank in range(len(ranks)) for n in part.local(uses, rank)} == set(uses)


def test_holders_sharers_and_copies():
    one = partition("1f1b", TIED)
    assert [one.holders(stage) for stage in range(3)] == [(0,), (1,), (2,)]
    assert one.sharers("embed") == (0, 2)
    assert one.sharers("positions") == (0,)
    assert one.copies(0) == {"embed": 2, "positions": 1, "blocks": 1}
    assert one.copies(1) == {"blocks": 1}
    assert one.copies(2) == {"embed": 2, "blocks": 1, "norm": 1}
    assert one.copies(None) == 1
    vee = partition("zbv", TIED)
    assert vee.sharers("embed") == (0,)
    assert vee.copies(0) == {"embed": 1, "positions": 1, "blocks": 1, "norm": 1}
    dual = partition("dualpipe", TIED)
    assert [dual.holders(stage) for stage in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert dual.sharers("embed") == dual.sharers("norm") == (0, 3)
    assert dual.copies(3) == {"embed": 2, "positions": 2, "blocks": 2, "norm": 2}
    assert dual.copies(1) == {"blocks": 2}


def test_copies_where_pipes_meet_on_a_rank():
    """Three ranks fed from both ends: both pipes go through the one copy in the middle."""
    pipes = (((0, 0), (1, 0), (2, 0)), ((2, 1), (1, 1), (0, 1)))
    part = Partition(layout_of([1, 1, 1]), pipes, UNTIED)
    assert part.stages(1) == (1,)
    assert [part.holders(stage) for stage in range(3)] == [(0, 2), (1,), (0, 2)]
    assert part.copies(0) == dict.fromkeys(UNTIED, 2)
    assert part.copies(1) == {"blocks": 1}
    # two pipes through the same ranks are one copy of everything
    part = Partition(layout_of([1, 1]), (((0, 0), (1, 0)), ((0, 1), (1, 1))), UNTIED)
    assert part.copies(0) == {"embed": 1, "positions": 1, "blocks": 1}
    assert part.copies(1) == {"blocks": 1, "norm": 1, "unembed": 1}


def test_layers_that_are_copied_differently_have_no_norm():
    """Rank 0 alone holds stage 0, and stage 1 as rank 1 does: one number cannot count both."""
    pipes = (((0, 0), (1, 0)), ((0, 1), (0, 2)))
    part = Partition(layout_of([1, 1]), pipes, UNTIED)
    assert part.stages(0) == (0, 1)
    assert list(part.local(UNTIED, 0)) == BOTH
    assert part.copies(1) == {"blocks": 2, "norm": 2, "unembed": 2}
    with pytest.raises(ValueError, match="the norm of gradients") as caught:
        part.copies(0)
    assert "pipes, rank 0: got stages [0] with 1 and [1] with 2 copies; wanted as many" in str(
        caught.value
    )


# --- parameters

CONFIG = gpt.GPTConfig(
    vocab_size=12, num_layers=6, embed_dim=8, num_heads=2, mlp_dim=12, max_seq=4,
    positions="learned", norm="layer", bias=True, dtype="float64",
)  # fmt: skip


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_says_who_uses_every_parameter(positions, tied):
    config = replace(CONFIG, positions=positions, tied=tied)
    assert set(gpt.uses(config)) == set(gpt.defs(config))
    assert gpt.uses(config)["embed"] == ("EL" if tied else "E")


def decoder(name: str, tied: bool) -> tuple[dict, Partition]:
    """The definitions of a decoder and its partition."""
    config = replace(CONFIG, num_layers=sum(HELD[name][2]), tied=tied)
    return gpt.defs(config), partition(name, gpt.uses(config))


def assert_bitwise(got, want):
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_ranks_start_with_their_rows_of_the_whole_model(name, tied):
    defs, part = decoder(name, tied)
    whole = ft.init_params(random.key(3), defs)
    assert_bitwise(ft.init_params(random.key(3), part.local_defs(defs, None)), whole)
    for rank, (_, rows, _) in enumerate(HELD[name][3]):
        mine = part.local_defs(defs, rank)
        got = ft.init_params(random.key(3), mine)
        want = {entry: whole[entry] for entry in whole if entry in part.local(defs, rank)}
        if rows:
            want["blocks"] = tree.map(lambda leaf, rows=rows: leaf[rows], whole["blocks"])
        assert_bitwise(got, want)
        shapes = [d.shape for d in tree.leaves(mine)]
        assert shapes == [tuple(leaf.shape) for leaf in tree.leaves(want)]


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_shards_of_ranks_start_with_their_part_of_the_whole_model(name):
    """Both cut at once: by layers over pp, and by heads, features and vocabulary over tp."""
    defs, part = decoder(name, tied=False)
    config = replace(CONFIG, num_layers=sum(HELD[name][2]))
    mesh = Mesh(pp=2, tp=2)
    whole = ft.init_params(random.key(3), defs)
    for index in range(mesh.size):
        at = mesh.coordinate(index)
        bound = BoundMesh(mesh, index, at, {}, "cpu")
        mine = part.local_defs(defs, at["pp"])
        specs = ft.param_specs(mine, gpt.rules(config, mesh))
        assert any(sharding.spec_axes(s) for s in tree.leaves(specs, sharding.is_spec))
        got = ft.init_params(random.key(3), mine, specs, bound)
        rows = HELD[name][3][at["pp"]][1]
        held = {entry: whole[entry] for entry in mine}
        held["blocks"] = tree.map(lambda leaf, rows=rows: leaf[rows], whole["blocks"])
        flat = tree.broadcast_prefix(specs, held, is_leaf=sharding.is_spec)
        leaves = zip(tree.leaves(held), flat, strict=True)
        wanted = [sharding.shard(leaf, spec, mesh, at) for leaf, spec in leaves]
        assert_bitwise(got, tree.unflatten(tree.structure(held), wanted))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_stages_join_to_what_the_rank_holds(name, tied):
    defs, part = decoder(name, tied)
    whole = ft.init_params(random.key(3), defs)
    for rank in (None, *range(part.num_ranks)):
        held = ft.init_params(random.key(3), part.local_defs(defs, rank))
        stages = {s: part.stage_params(held, s, rank) for s in part.stages(rank)}
        for stage, params in stages.items():
            layers = part.layout[stage].layers
            assert list(params) == part.names(stage)
            for entry, value in params.items():
                rows = [*layers] if entry == "blocks" else slice(None)
                assert_bitwise(value, tree.map(lambda leaf, r=rows: leaf[r], whole[entry]))
                for view, leaf in zip(tree.leaves(value), tree.leaves(held[entry]), strict=True):
                    assert view.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
        # a tied embedding is used twice by a rank with both ends, whose uses add up
        twice = tied and {0, part.num_stages - 1} <= set(stages)
        want = {**held, "embed": 2 * held["embed"]} if twice else held
        assert_bitwise(part.join(stages, rank), want)


# --- errors


def test_wrong_partitions_are_taught():
    with pytest.raises(ValueError, match="cannot divide a model among the ranks") as caught:
        Partition(
            layout_of([2, 1]),
            (((0, 0), (1, 0), (2, 0)),),
            {"a": "", "b": "x", "c": "tE", "d": "t", "e": "LE", "f": "L", "g": "EtL"},
        )
    message = str(caught.value)
    for name, letters in (("a", ""), ("b", "x"), ("c", "tE"), ("g", "EtL")):
        assert f"uses/{name}: got {letters!r}; wanted t alone, or E, L or both" in message
    assert "layout: got 2 stages, Ett|tL; wanted 3, as the schedule has" in message
    assert message.count("\n") == 5


def test_ranks_without_parameters_are_taught():
    """They would miss the sums over all ranks."""
    layout, pipes = layout_of([1, 0, 2, 0]), (((0, 0), (1, 0), (2, 0), (3, 0)),)
    assert Partition(layout_of([1, 1, 2, 0]), pipes, UNTIED).held(3) == ["norm", "unembed"]
    with pytest.raises(ValueError, match="cannot divide a model") as caught:
        Partition(layout, pipes, UNTIED)
    assert (
        "layout Et||tt|L: got no parameters on rank 1; wanted some on every rank: a rank without "
        "takes part in nothing; fix: give one of its stages a layer, or use fewer ranks"
    ) in str(caught.value)
    assert str(caught.value).count("\n") == 1
    with pytest.raises(ValueError, match=r"on rank 1; (?s:.*)on rank 3; "):
        Partition(layout, pipes, {**UNTIED, "norm": "E", "unembed": "E"})
    assert Partition(layout, pipes, UNTIED, {"embed": 0}).held(1) == ["embed"]


def test_letters_may_come_in_any_order():
    pipes = (((0, 0), (1, 0)),)
    rows = {"embed": ParamDef((2, 2), (None, None), Normal(1.0))}
    for letters in ("EL", "LE"):
        part = Partition(even_layout(2, 2), pipes, {"embed": letters})
        assert part.sharers("embed") == (0, 1)
        assert set(part.local_defs(rows, 1)) == {"embed"}


def test_other_parameters_are_taught():
    part = partition("1f1b", UNTIED)
    with pytest.raises(ValueError, match="the partition and the parameters differ") as caught:
        part.local({"embed": 0, "blocks": 0, "norm": 0, "unembed": 0, "router": 0}, 1)
    message = str(caught.value)
    assert "router: got a parameter; wanted an entry in uses, which says who needs it" in message
    assert "uses/positions: got an entry; wanted a parameter of that name" in message


def test_stacks_of_other_depths_are_taught():
    defs, part = decoder("1f1b", tied=False)
    narrow = ParamDef((3, 5), ("layers", None), Normal(1.0))
    alone = ParamDef((), (), Normal(1.0))
    for rank in (None, 1):
        with pytest.raises(ValueError, match="cannot divide these parameters by layer") as caught:
            part.local_defs({**defs, "blocks": {"up": narrow, "scale": alone}}, rank)
        message = str(caught.value)
        assert "blocks/up: got shape (3, 5); wanted (4, ...), a row per layer" in message
        assert "blocks/scale: got shape (); wanted (4, ...), a row per layer" in message


def test_entries_are_found_by_path():
    """Layers that are no rows of a stack, and parameters that several of them share."""
    uses = {
        "model/embed": frozenset({"E", "L"}),
        "model/layers/0": frozenset({0}),
        "model/layers/1": frozenset({1}),
        "model/layers/2": frozenset({2}),
        "model/common": frozenset({0, 2}),
        "head": "L",
    }
    partition = Partition(layout_of([2, 1]), make("1f1b", 2, 2).pipes, uses)
    one = torch.ones(2)
    layers = {str(at): {"w": one * at} for at in range(3)}
    params = {"model": {"embed": one, "layers": layers, "common": one}, "head": {"w": one}}
    held = [partition.local(params, rank) for rank in (0, 1)]
    assert [tree.paths(each) for each in held] == [
        ["model/common", "model/embed", "model/layers/0/w", "model/layers/1/w"],
        ["head/w", "model/common", "model/embed", "model/layers/2/w"],
    ]
    assert tree.paths(partition.local(params, None)) == tree.paths(params)
    assert partition.copies(0) == {
        "model": {"embed": 2, "layers": {"0": 1, "1": 1}, "common": 2},
    }
    # gradients of copies are added
    stages = {s: partition.stage_params(params, s, None) for s in (0, 1)}
    joined = partition.join(stages, None)
    assert tree.structure(joined) == tree.structure(params)
    assert torch.equal(joined["model"]["embed"], 2 * one)
    assert torch.equal(joined["model"]["layers"]["2"]["w"], 2 * one)
    assert partition.name_in("opt_state/0/mu/model/layers/1/w") == "model/layers/1"
    assert partition.name_in("opt_state/0/count") is None
    with pytest.raises(
        ValueError, match=r"model/extra: got a parameter.*\n.*uses/head: got an entry"
    ):
        partition.local({"model": {**params["model"], "extra": one}}, 0)
    with pytest.raises(ValueError, match=r"uses/head: got frozenset.*wanted E, L and"):
        Partition(partition.layout, partition.pipes, {**uses, "head": frozenset({"t"})})
