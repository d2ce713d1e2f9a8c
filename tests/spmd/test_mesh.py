"""Meshes: sizes, rank order, parsing, and what is wrong with a bad one."""

import numpy as np
import pytest

from functron import DATA_AXES, Mesh
from functron.spmd import FSDP_AXES


def test_sizes_and_absent_axes():
    mesh = Mesh(dp=2, tp=4)
    assert mesh.size == 8
    assert mesh.axis_names == ("dp", "tp")
    assert mesh["tp"] == 4
    assert mesh["pp"] == 1
    assert Mesh().size == 1


def test_rank_order_is_row_major():
    mesh = Mesh(pp=2, dp=3, tp=4)
    for rank in range(mesh.size):
        want = np.unravel_index(rank, (2, 3, 4))
        assert tuple(mesh.coordinate(rank).values()) == tuple(int(i) for i in want)


def test_meshes_are_values():
    assert Mesh(dp=2, tp=4) == Mesh(dp=2, tp=4)
    assert Mesh(dp=2, tp=4) != Mesh(tp=4, dp=2)
    assert len({Mesh(dp=2), Mesh(dp=2)}) == 1


def test_parse_round_trips():
    assert Mesh.parse("dp=2, tp=4") == Mesh(dp=2, tp=4)
    assert Mesh.parse("") == Mesh()
    assert str(Mesh.parse("pp=2,tp=8")) == "pp=2,tp=8"


def test_parse_reports_every_problem():
    with pytest.raises(ValueError, match=r"(?s)'dpp'.*did you mean 'd?p?p'.*'tp=x'.*'tp' twice"):
        Mesh.parse("dpp=2,tp=x,tp=2,tp=4")


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
def test_sizes_must_be_positive_integers(size):
    with pytest.raises(ValueError, match=r"Mesh\.tp: got .* wanted an integer of at least 1"):
        Mesh(dp=2, tp=size)


def test_bind_without_processes_says_how():
    with pytest.raises(ValueError, match=r"(?s)no process group.*torchrun --nproc-per-node 4"):
        Mesh(dp=4).bind()


def test_axes_that_shard_parameters_split_the_batch():
    assert set(FSDP_AXES) < set(DATA_AXES)
