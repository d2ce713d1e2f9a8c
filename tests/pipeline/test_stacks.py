"""Models with several stacks of layers, divided among the ranks of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import Mesh, P, checkpoint, lax, random, tree
from functron.pipeline import Partition, make, pipelined
from functron.pipeline.partition import layout_of
from functron.spmd import BoundMesh
from functron.spmd.params import Normal, ParamDef

DENSE_FIRST = {"embed": "EL", "dense": range(3), "blocks": range(3, 7), "norm": "L"}
ONE, VEE, LOOP, BOTH_ENDS = (
    (((0, 0), (1, 0), (2, 0)),),
    (((0, 0), (1, 0), (1, 1), (0, 1)),),
    (((0, 0), (1, 0), (0, 1), (1, 1)),),
    (((0, 0), (1, 0), (2, 0), (3, 0)), ((3, 1), (2, 1), (1, 1), (0, 1))),
)
# Written out: pipes, layers per stage, and per rank what it holds and its rows of both stacks.
HELD = {
    "one": (
        ONE,
        [2, 2, 3],
        [
            (["embed", "dense"], [0, 1], []),
            (["dense", "blocks"], [2], [0]),
            (["embed", "blocks", "norm"], [], [1, 2, 3]),
        ],
    ),
    "vee": (
        VEE,
        [2, 2, 1, 2],
        [
            (["embed", "dense", "blocks", "norm"], [0, 1], [2, 3]),
            (["dense", "blocks"], [2], [0, 1]),
        ],
    ),
    "loop": (
        LOOP,
        [1, 1, 2, 3],
        [
            (["embed", "dense", "blocks"], [0, 2], [0]),
            (["embed", "dense", "blocks", "norm"], [1], [1, 2, 3]),
        ],
    ),
    "both ends": (
        BOTH_ENDS,
        [3, 1, 1, 2],
        [
            (["embed", "dense", "blocks", "norm"], [0, 1, 2], [2, 3]),
            (["blocks"], [], [0, 1]),
            (["blocks"], [], [1, 0]),
            (["embed", "dense", "blocks", "norm"], [0, 1, 2], [2, 3]),
        ],
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_who_holds_what(name):
    pipes, layers, ranks = HELD[name]
    part = Partition(layout_of(layers), pipes, DENSE_FIRST)
    for rank, (names, dense, blocks) in enumerate(ranks):
        assert part.held(rank) == names
        assert part.rows("dense", rank) == dense
        assert part.rows("blocks", rank) == blocks
    assert part.rows("dense", None) == [0, 1, 2]
    assert part.rows("blocks", None) == [0, 1, 2, 3]
    assert (part.stack("dense"), part.stack("embed")) == (range(3), None)


def test_names_kinds_and_copies():
    one = Partition(layout_of([2, 2, 3]), ONE, DENSE_FIRST)
    assert [one.names(s) for s in range(3)] == [names for names, _, _ in HELD["one"][2]]
    assert one.copies(1) == {"dense": 1, "blocks": 1}
    even = Partition(layout_of([1, 2, 2, 2]), BOTH_ENDS, DENSE_FIRST)
    assert [even.kind(s) for s in range(4)] == [
        (True, False, (("dense", 1),), ()),
        (False, False, (("dense", 2),), ()),
        (False, False, (("blocks", 2),), ()),
        (False, True, (("blocks", 2),), ()),
    ]
    assert even.copies(0) == {"embed": 2, "dense": 2, "blocks": 2, "norm": 2}
    assert even.copies(1) == {"dense": 2, "blocks": 2}


def test_stacks_are_counted_by_themselves():
    """Rank 0 alone holds stage 0, of the one stack; stage 1, of the other, rank 1 holds as well."""
    pipes = (((0, 0), (1, 0)), ((0, 1), (0, 2)))
    uses = {"dense": range(1), "blocks": range(1, 3)}
    part = Partition(layout_of([1, 2]), pipes, uses)
    assert part.copies(0) == {"dense": 1, "blocks": 2}
    assert part.copies(1) == {"blocks": 2}
    with pytest.raises(ValueError, match=r"stages \[0\] with 1 and \[1\] with 2 copies") as caught:
        Partition(layout_of([2, 1]), pipes, {**uses, "all": "t"}).copies(0)
    assert str(caught.value).count("\n") == 1  # once for both stacks


# --- any stacks on any pipes

ANY_PIPES = [
    make(name, ranks, 2 * ranks, *chunks).pipes
    for name, ranks, *chunks in (
        ("1f1b", 1), ("1f1b", 3), ("interleaved", 2, 2), ("interleaved", 2, 3), ("zbv", 3),
        ("dualpipe", 2), ("dualpipe", 4),
    )
]  # fmt: skip


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Any layout; stacks that follow each other, leave layers out, share them, and alternate."""
    pipes = draw(st.sampled_from(ANY_PIPES))
    counts = draw(st.lists(st.integers(0, 3), min_size=len(pipes[0]), max_size=len(pipes[0])))
    counts[draw(st.integers(0, len(counts) - 1))] += 1
    total = sum(counts)
    uses = {"embed": "EL", "head": "L", "all": "t", "spread": "E"}
    cut = draw(st.integers(0, total))
    uses |= {"first": range(cut)} if cut else {}
    uses |= {"rest": range(cut, total)} if cut < total else {}
    start = draw(st.integers(0, total - 1))
    stop = draw(st.integers(start + 1, total))
    uses["some"] = range(start, stop, draw(st.integers(1, 3)))
    return Partition(layout_of(counts), pipes, uses, {"spread": 0})


def defs_for(part: Partition) -> dict:
    """Parameters of some layers each, of two leaves."""
    out = {}
    for name in part.uses:
        stack = part.stack(name)
        depth, axes = ((len(stack),), ("layers",)) if stack is not None else ((), ())
        out[name] = {
            "w": ParamDef((*depth, 2, 3), (*axes, None, None), Normal(1.0), torch.float64),
            "b": ParamDef((*depth, 12), (*axes, None), Normal(1.0), torch.float64),
        }
    return out


def same(got, want):
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path


@given(partitions())
def test_ranks_hold_the_whole_between_them(part):
    """Every row is on as many ranks as its stage, with the numbers of the whole model."""
    defs = defs_for(part)
    whole = ft.init_params(random.key(3), defs)
    counted: dict[str, Counter] = {name: Counter() for name in part.uses}
    for rank in range(part.num_ranks):
        mine = ft.init_params(random.key(3), part.local_defs(defs, rank))
        assert list(mine) == part.held(rank)
        for name, entry in mine.items():
            rows = part.rows(name, rank) if part.stack(name) is not None else slice(None)
            counted[name].update(rows if isinstance(rows, list) else [0])
            same(entry, tree.map(lambda leaf, rows=rows: leaf[rows], whole[name]))
    of_layer = {
        layer: len(part.holders(stage))
        for stage, each in enumerate(part.layout)
        for layer in each.layers
    }
    for name in part.uses:
        stack = part.stack(name)
        if stack is not None:
            assert counted[name] == {row: of_layer[layer] for row, layer in enumerate(stack)}


@given(partitions())
def test_stages_have_their_layers_and_join_again(part):
    defs = defs_for(part)
    whole = ft.init_params(random.key(3), defs)
    for rank in (None, *range(part.num_ranks)):
        held = ft.init_params(random.key(3), part.local_defs(defs, rank))
        stages = {s: part.stage_params(held, s, rank) for s in part.stages(rank)}
        for number, params in stages.items():
            layers = part.layout[number].layers
            for name, entry in params.items():
                stack = part.stack(name)
                rows = (
                    slice(None)
                    if stack is None
                    else [i for i, n in enumerate(stack) if n in layers]
                )
                same(entry, tree.map(lambda leaf, rows=rows: leaf[rows], whole[name]))
                own = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(held[name])}
                assert own >= {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(entry)}
        joined = part.join(stages, rank)
        for name, entry in held.items():
            if name in joined:
                times = sum(name in params for params in stages.values())
                times = times if part.stack(name) is None else 1
                same(joined[name], tree.map(lambda leaf, times=times: times * leaf, entry))
            else:
                assert name in part.spread


@given(partitions())
def test_checkpoints_have_every_element_of_every_rank(part):
    """The boxes of a rank are its rows, in its order; together they are the whole."""
    mesh = Mesh(pp=part.num_ranks)
    whole = ft.init_params(random.key(3), defs_for(part))
    state = {"params": whole, "moments": {"mu": whole}, "step": torch.zeros(())}
    params = part.storage_specs(dict.fromkeys(whole, P()))
    if len(whole["spread"]["b"]) % mesh.size or len(whole["spread"]["w"]) % mesh.size:
        params["spread"] = P()  # here nothing is padded
    specs = {"params": params, "moments": {"mu": params}, "step": P()}
    bound = [BoundMesh(mesh, r, mesh.coordinate(r), {}, "cpu") for r in range(mesh.size)]
    placements = [checkpoint.Placement.of(state, specs, each, part) for each in bound]
    for leaf, value in zip(placements[0].leaves, tree.leaves(state), strict=True):
        covered = torch.zeros(value.shape, dtype=torch.int64)
        for rank, placement in enumerate(placements):
            boxes = placement.boxes(leaf, rank)
            name = leaf.path.split("/")[-2] if leaf.path != "step" else ""
            if not boxes:
                assert name not in part.held(rank)
                continue
            for box in boxes:
                covered[
                    tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
                ] += 1
            if name and part.stack(name) is not None:
                rows = [box.start[0] + i for box in boxes for i in range(box.size[0])]
                assert rows == part.rows(name, rank)
                assert placement.local_shape(leaf, rank) == (len(rows), *value.shape[1:])
        assert (covered > 0).all(), leaf.path


# --- a model of one's own: tanh layers, then gated ones, with a last one of both

LAYERS = 7
STACKS = {"dense": range(3), "gated": range(3, LAYERS), "odd": range(1, LAYERS, 2)}
USES = {"start": "E", **STACKS, "scale": "t", "end": "L"}


def parameters() -> dict:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    return {
        "start": randn(5, 6),
        "dense": {"w": randn(3, 6, 6)},
        "gated": {"w": randn(4, 6, 6), "gate": randn(4, 6, 6)},
        "odd": randn(3, 6),
        "scale": randn(LAYERS, 6),
        "end": randn(6),
    }


def data(num_rows: int) -> dict:
    x = torch.randn(num_rows, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"x": x, "y": x[:, 0]}


def layer(number: int, row: Mapping, h: torch.Tensor) -> torch.Tensor:
    """One layer of the model from its rows of all stacks that it has rows of."""
    if "dense" in row:
        h = h + torch.tanh(h @ row["dense"]["w"])
    else:
        gated = row["gated"]
        h = h + torch.sigmoid(h @ gated["gate"]) * torch.tanh(h @ gated["w"])
    if "odd" in row:
        h = h * row["odd"].cos()
    return h * (1 + row["scale"] / (1 + number))


def stage(part, params, x, batch):
    """The result of one stage's layers on h."""
    h = batch["x"] @ params["start"] if part.embed else x
    for number in part.layers:
        row = {}
        for name, stack in {**STACKS, "scale": range(LAYERS)}.items():
            if number in stack:
                at = [n for n in part.layers if n in stack].index(number)
                row[name] = tree.map(lambda leaf, at=at: leaf[at], params[name])
        h = layer(number, row, h)
    if not part.loss:
        return h
    return lax.psum((h @ params["end"] - batch["y"]).square().sum(), ft.DATA_AXES)


def dense_value_and_grads(params: dict, batch: dict):
    """The same layer after layer, by numbers written out."""

    def loss(params):
        h = batch["x"] @ params["start"]
        for number in range(LAYERS):
            row = {"scale": params["scale"][number]}
            if number < 3:
                row["dense"] = {"w": params["dense"]["w"][number]}
            else:
                row["gated"] = {k: v[number - 3] for k, v in params["gated"].items()}
            if number in (1, 3, 5):
                row["odd"] = params["odd"][number // 2]
            h = layer(number, row, h)
        return (h @ params["end"] - batch["y"]).square().sum()

    grads, value = torch.func.grad_and_value(loss)(params)
    return value, grads


COMPOSITIONS = [
    ("gpipe", 2, 1, (2, 5)),
    ("1f1b", 4, 1, (0, 4, 1, 2)),
    ("interleaved", 2, 2, (1, 3, 0, 3)),
    ("interleaved", 2, 3, (1, 1, 2, 1, 1, 1)),
    ("zb-h1", 3, 1, (3, 1, 3)),
    ("zbv", 2, 2, (1, 3, 2, 1)),
    ("dualpipev", 2, 2, (2, 2, 3, 0)),
    ("dualpipe", 2, 2, (4, 3)),
    ("dualpipe", 4, 2, (1, 1, 2, 3)),
]


def layout_and_schedule(name: str, ranks: int, chunks: int, layers: tuple[int, ...]):
    one = chunks == 1 or name == "dualpipe"
    return layout_of(layers), make(name, ranks, 4 if ranks == 2 else 8, None if one else chunks)


@pytest.mark.pairwise(of=lambda dp, **case: [{"dp": dp}, {"case": tuple(case.values())}])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("name", "ranks", "chunks", "layers"), COMPOSITIONS)
def test_the_dense_gradients(name, ranks, chunks, layers, dp):
    layout, schedule = layout_and_schedule(name, ranks, chunks, layers)
    pipeline = pipelined(stage, Partition(layout, schedule.pipes, USES), schedule)
    params, batch = parameters(), data(16)

    def program(params, batch):
        value, grads = pipeline.value_and_grad(params, batch)
        return value, ft.sync_gradients(grads, P())

    mesh = Mesh(pp=ranks, dp=dp)
    got = ft.shard_map(program, mesh, (P(), P(ft.DATA_AXES)), P(), stages="pp")(params, batch)
    torch.testing.assert_close(got, dense_value_and_grads(params, batch), rtol=1e-10, atol=1e-10)


PROGRAM = """
import torch, torch.distributed as dist
import functron as ft
from functron import Mesh, P, checkpoint, optim, tree
from functron.pipeline import Partition, collect, pipelined
from tests.pipeline.test_stacks import (
    COMPOSITIONS, USES, data, dense_value_and_grads, layout_and_schedule, parameters, stage,
)

dist.init_process_group("gloo")
params, batch = parameters(), data(16)
want = dense_value_and_grads(params, batch)
want_norm = sum(leaf.square().sum() for leaf in tree.leaves(want[1])).sqrt()
for name, ranks, chunks, layers in COMPOSITIONS:
    if ranks == 3:
        continue
    bound = Mesh(pp=ranks, dp=4 // ranks).bind()
    layout, schedule = layout_and_schedule(name, ranks, chunks, layers)
    partition = Partition(layout, schedule.pipes, USES)
    rank = bound.coordinate["pp"]
    held = {
        entry: value if partition.stack(entry) is None
        else tree.map(lambda leaf: leaf[partition.rows(entry, rank)], value)
        for entry, value in params.items() if entry in partition.held(rank)
    }
    stages = pipelined(stage, partition, schedule)

    def program(params, batch):
        value, grads = stages.value_and_grad(params, batch)
        grads = ft.sync_gradients(grads, P())
        return value, grads, optim.global_norm(grads, P(), partition.copies(rank))

    mapped = ft.shard_map(program, bound, (P(), P(ft.DATA_AXES)), P(), stages="pp")
    value, grads, norm = mapped(held, ft.shard(batch, P(ft.DATA_AXES), bound))
    assert set(grads) == set(partition.held(rank)), name
    torch.testing.assert_close((value, norm), (want[0], want_norm), rtol=1e-10, atol=0)
    whole = collect(grads, params, partition, bound)
    if rank == 0:
        torch.testing.assert_close(whole, want[1], rtol=1e-10, atol=1e-10)
print("equal")
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_processes_have_the_dense_gradients(torchrun):
    assert torchrun(PROGRAM, 4, timeout=180).stdout.splitlines() == ["equal"] * 4


# --- errors


def test_wrong_stacks_are_taught():
    pipes, layout = (((0, 0), (1, 0)),), layout_of([2, 2])
    wrong = {"a": range(0), "b": range(3, 1), "c": range(3, 0, -1), "d": range(-1, 2)}
    with pytest.raises(ValueError, match="cannot divide a model among the ranks") as caught:
        Partition(layout, pipes, {**wrong, "ok": "t"})
    for name, stack in wrong.items():
        got = f"uses/{name}: got {stack}; wanted layers of the model, in order"
        assert got in str(caught.value)
    with pytest.raises(ValueError, match="wanted E, L or both"):
        Partition(layout, pipes, {"blocks": range(4)}, {"blocks": 0})
    with pytest.raises(ValueError, match="no parameters on rank 0"):
        Partition(layout, pipes, {"blocks": range(2, 4), "norm": "L"})


def test_stacks_beyond_the_layout_are_taught():
    part = Partition(
        layout_of([2, 2]), (((0, 0), (1, 0)),), {"dense": range(2), "more": range(2, 5)}
    )
    defs = {
        "dense": ParamDef((3,), ("layers",), Normal(1.0)),
        "more": ParamDef((3,), (None,), Normal(1.0)),
    }
    for rank in (None, 0, 1):
        with pytest.raises(ValueError, match="cannot divide these parameters by layer") as caught:
            part.local_defs(defs, rank)
        assert "uses/more: got range(2, 5); wanted some of the layout's 4 layers" in str(
            caught.value
        )
        named = "dense/: got shape (3,); wanted (2, ...), a row per layer" in str(caught.value)
        assert named == (rank != 1)


def test_what_is_not_stacked_has_no_rows():
    part = Partition(layout_of([2, 2]), (((0, 0), (1, 0)),), {"dense": range(4), "norm": "L"})
    with pytest.raises(ValueError, match="rows: got 'norm' with uses='L'; wanted a stack"):
        part.rows("norm", 0)
