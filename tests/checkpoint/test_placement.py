"""Placements and divisions: boxes by hand, and against the shards that the rest of functron cuts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron import Mesh, P, tree
from functron.checkpoint.placement import Box, Division, Leaf, Placement, chunk_shape, grid
from functron.pipeline.partition import Partition, layout_of
from functron.spmd import BoundMesh
from functron.spmd.spec import pad, shard


def on(mesh: Mesh, rank: int) -> BoundMesh:
    return BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def boxes(like: torch.Tensor, spec: P, mesh: Mesh, **settings) -> list[tuple[Box, ...]]:
    placement = Placement.of({"x": like}, {"x": spec}, on(mesh, 0), **settings)
    return [placement.boxes(placement.leaves[0], rank) for rank in range(mesh.size)]


# --- by hand


def test_even_shards():
    assert boxes(meta(4, 6), P("dp", "tp"), Mesh(dp=2, tp=2)) == [
        (Box((0, 0), (2, 3), (0, 0)),),
        (Box((0, 3), (2, 3), (0, 0)),),
        (Box((2, 0), (2, 3), (0, 0)),),
        (Box((2, 3), (2, 3), (0, 0)),),
    ]


def test_padding_is_no_part_of_a_box():
    # 5 over 4 ranks: parts of 2, of which the third has 1 and the fourth nothing
    assert boxes(meta(5), P("dp"), Mesh(dp=4)) == [
        (Box((0,), (2,), (0,)),),
        (Box((2,), (2,), (0,)),),
        (Box((4,), (1,), (0,)),),
        (),
    ]
    placement = Placement.of({"x": meta(5)}, {"x": P("dp")}, on(Mesh(dp=4), 3))
    assert placement.local_shape(placement.leaves[0], 3) == (2,)


def test_a_simulated_mesh_has_the_padding_of_every_part():
    # 6 over tp=2, then 3 over dp=2: parts of 2, 2 | 2, 2 of which 3, 3 are values
    placement = Placement.of({"x": meta(6)}, {"x": P(("tp", "dp"))}, Mesh(dp=2, tp=2))
    (leaf,) = placement.leaves
    assert placement.num_ranks == 1
    assert placement.local_shape(leaf, 0) == (8,)
    assert placement.boxes(leaf, 0) == (Box((0,), (3,), (0,)), Box((3,), (3,), (4,)))


def test_rows_of_a_pipeline():
    # stages of 1, 2, 1 and 1 layers on ranks 0, 1, 0 and 1
    pipes = (((0, 0), (1, 0), (0, 1), (1, 1)),)
    partition = Partition(layout_of([1, 2, 1, 1]), pipes, {"e": "E", "b": "t", "n": "L"})
    like = {"e": meta(4), "b": {"w": meta(5, 3)}, "n": meta(3), "step": meta()}
    specs = {"e": P(), "b": P(None, "tp"), "n": P("tp"), "step": P()}
    mesh = Mesh(pp=2, tp=1)
    placement = Placement.of(like, specs, on(mesh, 0), partition)
    found = {
        leaf.path: [placement.boxes(leaf, rank) for rank in range(2)] for leaf in placement.leaves
    }
    assert found == {
        "e": [(Box((0,), (4,), (0,)),), ()],
        "b/w": [
            (Box((0, 0), (1, 3), (0, 0)), Box((3, 0), (1, 3), (1, 0))),
            (Box((1, 0), (2, 3), (0, 0)), Box((4, 0), (1, 3), (2, 0))),
        ],
        "n": [(), (Box((0,), (3,), (0,)),)],
        "step": [(Box((), (), ()),), (Box((), (), ()),)],
    }
    by_path = {leaf.path: leaf for leaf in placement.leaves}
    assert placement.local_shape(by_path["b/w"], 1) == (3, 3)
    assert placement.local_shape(by_path["e"], 1) is None


def test_every_leaf_that_cannot_be_placed_is_named():
    with pytest.raises(ValueError, match="cannot place") as caught:
        Placement.of(
            {"a": meta(2), "b": meta(2), "c": 3}, {"a": P("up"), "b": P(None, "tp"), "c": P()}
        )
    text = str(caught.value)
    assert "a: got P('up'); wanted axes of the mesh" in text
    assert "b: got P(None, 'tp') for shape (2,); wanted at most 1 entries" in text
    assert "c: got int; wanted a tensor" in text


def test_what_a_process_holds_is_checked_against_its_placement():
    like = {"a": meta(4, 2), "b": meta(3), "c": meta(2)}
    placement = Placement.of(like, {"a": P("tp"), "b": P(), "c": P()}, on(Mesh(tp=2), 1))
    assert set(placement.check({**like, "a": meta(2, 2)}, what="no")) == {"a", "b", "c"}
    with pytest.raises(ValueError, match="no") as caught:
        placement.check({"a": meta(4, 2), "b": meta(3).half(), "d": meta(1)}, what="no")
    text = str(caught.value)
    assert (
        "a: got torch.float32 (4, 2); wanted torch.float32 (2, 2), this process's part of (4, 2)"
        in text
    )
    assert "b: got torch.float16 (3,); wanted torch.float32 (3,)" in text
    assert "c: got nothing; wanted torch.float32 (2,)" in text
    assert "d: got a leaf; wanted a leaf of the placement; fix: use one of: a, b, c" in text


# --- against the shards that spmd cuts

MESHES = [Mesh(), Mesh(tp=3), Mesh(dp=2, tp=2), Mesh(tp=2, dp=4), Mesh(dp=2, fsdp=2, tp=2)]
ENTRIES = [
    None,
    "dp",
    "tp",
    "fsdp",
    ("tp", "dp"),
    ("fsdp", "tp"),
    ("dp", "fsdp"),
    ("tp", "fsdp", "dp"),
]


@st.composite
def cases(draw):
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    entries: list = []
    for _ in shape:
        used = {name for e in entries for name in (e if isinstance(e, tuple) else (e,))}
        free = [
            e for e in ENTRIES if used.isdisjoint(e if isinstance(e, tuple) else (e,)) or e is None
        ]
        entries.append(draw(st.sampled_from(free)))
    return mesh, shape, P(*entries)


@given(cases())
def test_boxes_are_the_shards_of_the_padded_value(case):
    mesh, shape, spec = case
    whole = 1 + torch.arange(math.prod(shape)).view(shape)
    padded = pad(whole, spec, mesh)
    simulated = Placement.of({"x": whole}, {"x": spec}, mesh)
    for rank in range(mesh.size):
        placement = Placement.of({"x": whole}, {"x": spec}, on(mesh, rank))
        want = shard(padded, spec, mesh, mesh.coordinate(rank))
        assert filled(placement, whole, rank).tolist() == want.tolist()
    assert filled(simulated, whole, 0).tolist() == padded.tolist()


def filled(placement, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """A process's part, zeros for padding, from its boxes of the whole."""
    (leaf,) = placement.leaves
    shape = placement.local_shape(leaf, rank)
    assert shape is not None
    out = torch.zeros(shape, dtype=whole.dtype)
    for box in placement.boxes(leaf, rank):
        local = tuple(slice(a, a + n) for a, n in zip(box.local, box.size, strict=True))
        region = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
        out[local] = whole[region]
    return out


@given(cases(), st.sampled_from([16, 100, 1 << 20]))
def test_every_element_is_written_once(case, limit):
    mesh, shape, spec = case
    counts = torch.zeros(shape, dtype=torch.int64)
    digests = set()
    for rank in range(mesh.size):
        placement = Placement.of({"x": meta(*shape)}, {"x": spec}, on(mesh, rank))
        division = Division(placement, limit)
        digests.add(division.digest)
        (held,) = [placement.boxes(leaf, rank) for leaf in placement.leaves]
        for piece in division.pieces[0]:
            counts[piece.region()] += 1
            inside = [
                all(
                    b <= p and p + n <= b + m
                    for b, p, n, m in zip(box.start, piece.start, piece.size, box.size, strict=True)
                )
                for box in held
            ]
            assert sum(inside) == 1
    assert (counts == 1).all()
    assert len(digests) == 1


# --- chunks


def chunk(shape, held, *, copies=1, limit=8 << 20, dtype=torch.float32):
    leaf = Leaf("x", shape, dtype, P())
    return chunk_shape(leaf, [tuple(held)], copies, limit)


def box(start, size) -> Box:
    return Box(start, size, (0,) * len(size))


def test_chunks_have_lines_where_boxes_have_edges():
    assert chunk((12, 8), [box((0, 0), (12, 8))]) == (12, 8)
    assert chunk((12, 8), [box((4, 0), (4, 8)), box((6, 0), (6, 8))]) == (2, 8)
    assert chunk((12, 8), [box((0, 0), (12, 4))]) == (12, 4)
    assert chunk((0, 3), []) == (1, 3)
    assert chunk((), [Box((), (), ())]) == ()


def test_large_leaves_are_cut():
    # 4 KiB rows, free to be cut anywhere: 256 rows are 1 MiB
    assert chunk((1000, 1024), [box((0, 0), (1000, 1024))], limit=1 << 20) == (250, 1024)
    # rows of a shard, 500 of them: 250 is the largest divisor that fits
    assert chunk((1000, 1024), [box((0, 0), (500, 1024))], limit=1 << 20) == (250, 1024)
    # 499 is prime, so that its rows cannot be divided but one by one: the columns are
    assert chunk((998, 1024), [box((0, 0), (499, 1024))], limit=1 << 20) == (499, 512)
    # replicas get a chunk each
    assert chunk((1024, 1024), [box((0, 0), (1024, 1024))], copies=4) == (256, 1024)
    # a row that is too large itself
    assert chunk((4, 1 << 20), [box((0, 0), (2, 1 << 20))], limit=1 << 20) == (1, 1 << 18)


def test_replicas_share_the_work():
    like = {"a": meta(512, 1024), "b": meta(1024, 512), **{f"c{i}": meta(8) for i in range(8)}}
    mesh = Mesh(dp=4)
    written = []
    for rank in range(4):
        division = Division(Placement.of(like, P(), on(mesh, rank)))
        written.append(sum(math.prod(p.size) for p in itertools.chain(*division.pieces)))
    assert sum(written) == tree.size(like)
    assert max(written) - min(written) <= 2 * 512 * 512


def test_a_part_that_no_process_holds_is_named():
    partition = Partition(layout_of([1, 1]), (((0, 0), (1, 0)),), {"b": "t"})
    placement = Placement.of({"b": meta(3, 2)}, P(), on(Mesh(pp=2), 0), partition)
    with pytest.raises(ValueError, match=r"b: got no process that holds the chunk at \(2, 0\)"):
        _ = Division(placement).pieces


def test_the_grid_covers_what_does_not_divide():
    assert list(grid((5, 2), (2, 2))) == [(0, 0), (1, 0), (2, 0)]
    assert list(grid((), ())) == [()]
    assert list(grid((0, 2), (1, 2))) == []
