"""Faults that are put into tensors, files and steps on purpose."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from functron.testing.faults import Corrupt, flip_, flip_file, injected


class Held(NamedTuple):
    step: Any
    params: Any


def held(step: int) -> Held:
    return Held(torch.tensor(step), {"w": torch.ones(2, 3), "b": torch.zeros(4)})


def taken(state, batch):
    return Held(state.step + 1, state.params), {"loss": state.params["w"].sum()}


def test_a_flipped_sign_bit_is_a_sign():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    flip_(x, 2, 31)
    assert x.tolist() == [[1.0, 2.0], [-3.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_flipping_twice_is_nothing(dtype):
    x = torch.arange(6).to(dtype)
    before = x.clone()
    last = 8 * x.element_size() - 1
    flip_(x, 5, last)
    assert not torch.equal(x, before)
    flip_(x, 5, last)
    assert torch.equal(x, before)


def test_what_is_not_there_is_not_flipped(tmp_path):
    with pytest.raises(ValueError, match="bit 32 of element 0"):
        flip_(torch.zeros(2), 0, 32)
    (tmp_path / "x").write_bytes(b"ab")
    with pytest.raises(ValueError, match="byte 2"):
        flip_file(tmp_path / "x", 2, 0)
    flip_file(tmp_path / "x", 1, 0)
    assert (tmp_path / "x").read_bytes() == b"ac"


def test_a_fault_happens_at_its_step_and_rank_as_often_as_it_says():
    fault = Corrupt(step=1, leaf="params/w", rank=2)
    step = injected(taken, [fault], rank=2)
    assert step(held(0), None)[1]["loss"] == 6
    assert math.isnan(step(held(1), None)[1]["loss"])
    assert step(held(1), None)[1]["loss"] == 6
    assert injected(taken, [fault], rank=1)(held(1), None)[1]["loss"] == 6


def test_a_persistent_fault_stays_and_may_scale_a_whole_leaf():
    fault = Corrupt(step=0, leaf="params/w", element=None, value=10.0, scale=True, times=None)
    step = injected(taken, [fault], rank=7)
    assert [float(step(held(0), None)[1]["loss"]) for _ in range(2)] == [60, 60]


def test_an_unknown_leaf_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="params/w"):
        injected(taken, [Corrupt(step=0, leaf="params/v")])(held(0), None)
