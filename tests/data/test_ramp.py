"""Growing batches: Megatron's counter, stepped through, and arithmetic instead of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron.data import TextWindows
from functron.data.sampling import RampUp, drawn, earlier_text, parse_earlier, parse_ramp_up

TEXT = TextWindows(None, 8, seed=1)


def stepped(start, increment, samples, final, steps):
    """Megatron's RampupBatchsizeNumMicroBatchesCalculator, updated before every step."""
    increments = (final - start) // increment
    consumed, rows = 0, []
    for _ in range(steps):
        done = consumed >= samples or not increments
        size = final if done else start + increment * (consumed * increments // samples)
        rows.append((size, consumed))
        consumed += size
    return rows


@given(
    start=st.integers(1, 20), increment=st.integers(1, 20), increments=st.integers(0, 12),
    per_increment=st.integers(1, 60), extra=st.integers(0, 11),
)  # fmt: skip
def test_every_step_is_the_counters(start, increment, increments, per_increment, extra):
    final = start + increment * increments
    samples = per_increment * max(increments, 1) + extra
    ramp = RampUp(start, increment, samples, final)
    rows = stepped(start, increment, samples, final, 80)
    assert [(ramp.batch_size(i), ramp.first_sample(i)) for i in range(80)] == rows
    for step, (size, first) in enumerate(rows):
        assert ramp.step_of(first) == ramp.step_of(first + size - 1) == step
    assert {size for size, _ in rows} <= set(ramp.sizes)
    assert ramp.sizes[-1] == final


EARLIER = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=4)


@given(
    earlier=EARLIER, start=st.integers(1, 8), increments=st.integers(0, 5), cut=st.integers(0, 20)
)
def test_earlier_batches_come_first_and_their_samples_count(earlier, start, increments, cut):
    ramp = RampUp(start, 3, 40, start + 3 * increments, tuple(earlier))
    rows, consumed = [], 0
    for size in [size for steps, size in earlier for _ in range(steps)]:
        rows.append((size, consumed))
        consumed += size
    for _ in range(30):  # by Megatron's calculator, from the samples of all steps
        size = start + 3 * (consumed * increments // 40) if consumed < 40 else ramp.final
        rows.append((size, consumed))
        consumed += size
    steps = range(len(rows))
    assert [(ramp.batch_size(i), ramp.first_sample(i)) for i in steps] == rows
    for step, (size, first) in enumerate(rows):
        assert ramp.step_of(first) == ramp.step_of(first + size - 1) == step
    # cut after those, anywhere, and put together again it is the same
    cut += sum(n for n, _ in earlier)
    again = RampUp(start, 3, 40, ramp.final, ramp.until(cut))
    assert [(again.batch_size(i), again.first_sample(i)) for i in steps] == rows
    assert sum(n for n, _ in ramp.until(cut)) == cut
    assert set(ramp.sizes_from(cut)) == {size for size, _ in rows[cut:]} | {ramp.final}
    assert parse_earlier(earlier_text(ramp.until(cut))) == ramp.until(cut)


def test_earlier_batches_as_they_are_written():
    ramp = parse_ramp_up("", 8, "6x4, 2x16")
    assert ramp.earlier == ((6, 4), (2, 16))
    assert (ramp.sizes, ramp.first_steps, ramp.first_sample(8)) == ((4, 16, 8), (0, 6, 8), 56)
    assert ramp.until(7) == ((6, 4), (1, 16))
    assert ramp.until(0) == ()
    for text in ("6", "0x4", "4x0", "6x4x2", "-1x4"):
        with pytest.raises(ValueError, match="such as 6x4 10x8"):
            parse_earlier(text)
    with pytest.raises(ValueError, match="batch sizes cannot grow like this") as caught:
        RampUp(8, 1, 1, 8, ((6, 4), (1, 0), (0, 4)))
    for place in ("earlier[1]: got 1 steps of 0 samples", "earlier[2]: got 0 steps of 4 samples"):
        said = f"{place}; wanted at least 1 step of at least 1 sample; fix: leave out sizes"
        assert said in str(caught.value)


def test_the_example_of_megatrons_help():
    """--rampup-batch-size 16 8 300000 with --global-batch-size 1024: 126 increments of 2,381."""
    ramp = RampUp(16, 8, 300_000, 1024)
    assert ramp.batch_size(0) == 16
    assert ramp.batch_size(148) == 16  # 148 * 16 = 2,368 < 300,000 / 126
    assert ramp.batch_size(149) == 24
    assert ramp.first_sample(149) == 149 * 16
    assert ramp.batch_size(10**9) == 1024
    assert ramp.first_sample(10**9) > 10**11


def test_impossible_ramps():
    with pytest.raises(ValueError, match="final: got 30; wanted 16 and a multiple of 8") as caught:
        RampUp(16, 8, 1000, 30)
    assert "set it to 32" in str(caught.value)
    with pytest.raises(ValueError, match="start: got 0") as caught:
        RampUp(0, 8, -1, 32)
    assert "samples: got -1" in str(caught.value)
    with pytest.raises(ValueError, match="samples: got 1; wanted at least the 2 increments"):
        RampUp(16, 8, 1, 32)


@given(first=st.integers(0, 10**6), sizes=st.lists(st.sampled_from([4, 8, 12]), max_size=4))
def test_batches_of_any_sizes_are_one_row_of_samples(first, sizes):
    total, pieces, at = sum(sizes) + 12, [], first
    whole = drawn(TEXT, first, total)
    for size in [*sizes, 12]:
        found = [drawn(TEXT, at, size, (index, 4)) for index in range(4)]
        assert [row for piece in found for row in piece["rows"].tolist()] == list(range(size))
        pieces += found
        at += size
    for name in ("tokens", "targets"):
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), whole[name])


def test_three_numbers_or_nothing():
    assert parse_ramp_up("", 6).sizes == (6,)
    assert parse_ramp_up(" 2  2 40 ", 6) == RampUp(2, 2, 40, 6)
    assert parse_ramp_up("", 6).first_sample(7) == 42


def test_sizes_by_samples_are_those_of_megatrons_calculator():
    """``start + int(consumed / (samples / increments)) * increment``, and `final` at the end."""
    ramp = RampUp(16, 8, 2000, 64)
    per_increment = 2000 / ((64 - 16) / 8)
    for step in range(80):
        consumed = ramp.first_sample(step)
        wanted = 64 if consumed >= 2000 else 16 + int(consumed / per_increment) * 8
        assert ramp.batch_size(step) == wanted
    assert parse_ramp_up("", 8).batch_size(0) == 8
