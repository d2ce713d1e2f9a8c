"""Schedules against Optax's, and against the formulas of their papers."""

import math
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron
from functron import optim

COUNTS = [0, 1, 2, 5, 9, 10, 11, 50, 99, 100, 101, 1000]


def check(ours, theirs, counts=COUNTS):
    for count in counts:
        want = float(theirs(jnp.asarray(count)))
        assert float(ours(count)) == pytest.approx(want, rel=1e-6, abs=1e-10)
        assert float(ours(torch.tensor(count))) == float(ours(count))


def test_constant():
    check(optim.constant(0.3), optax.constant_schedule(0.3))
    check(optim.constant(0.3, warmup_steps=10), optax.warmup_constant_schedule(0.0, 0.3, 10))


@given(warmup=st.integers(0, 40), rest=st.integers(1, 60), end=st.sampled_from([0.0, 0.1, 2.0]))
def test_linear_and_cosine(warmup, rest, end):
    total = warmup + rest
    down = optax.linear_schedule(1.5, end, rest)
    theirs = optax.join_schedules([optax.linear_schedule(0.0, 1.5, warmup), down], [warmup])
    counts = [0, warmup, warmup + 1, (warmup + total) // 2, total, total + 5]
    check(optim.linear(1.5, total, warmup_steps=warmup, end=end), theirs, counts)
    cosine = optax.warmup_cosine_decay_schedule(0.0, 1.5, warmup, total, end)
    check(optim.cosine_decay(1.5, total, warmup_steps=warmup, end=end), cosine, counts)


def test_wsd_linear_and_exponential_against_optax():
    def theirs(decay):
        parts = [optax.linear_schedule(0, 1.0, 10), optax.constant_schedule(1.0), decay]
        return optax.join_schedules(parts, [10, 60])

    ours = optim.wsd(1.0, 100, 40, warmup_steps=10, end=0.2)
    check(ours, theirs(optax.linear_schedule(1.0, 0.2, 40)))
    ours = optim.wsd(1.0, 100, 40, warmup_steps=10, end=0.2, decay="cosine")
    check(ours, theirs(optax.cosine_decay_schedule(1.0, 40, 0.2)))
    ours = optim.wsd(1.0, 100, 40, warmup_steps=10, end=0.2, decay="exponential")
    check(ours, theirs(optax.exponential_decay(1.0, 40, 0.2, end_value=0.2)))


def test_wsd_sqrt_is_hagele_et_al():
    ours = optim.wsd(2.0, 100, 40, decay="sqrt")
    for count in (60, 64, 81, 99, 100):
        assert float(ours(count)) == pytest.approx(2 * (1 - math.sqrt((count - 60) / 40)), abs=1e-6)
    assert float(ours(30)) == 2.0


def test_inverse_square_root_is_vaswani_et_al():
    """peak * min(count / warmup, sqrt(warmup / count)), as in section 5.3 up to the constant."""
    ours = optim.inverse_square_root(0.5, warmup_steps=16, end=0.01)
    for count in (1, 8, 16, 17, 64, 400):
        want = 0.5 * min(count / 16, math.sqrt(16 / count))
        assert float(ours(count)) == pytest.approx(want, rel=1e-6)
    assert float(ours(10**6)) == pytest.approx(0.01)
    assert float(optim.inverse_square_root(0.5)(4)) == pytest.approx(0.25)


def test_exponential_and_polynomial_against_optax():
    ours = optim.exponential(2.0, 100, warmup_steps=10, end=0.1, init=0.5)
    warm = optax.linear_schedule(0.5, 2.0, 10)
    down = optax.exponential_decay(2.0, 90, 0.05, end_value=0.1)
    check(ours, optax.join_schedules([warm, down], [10]))
    for power in (0.5, 1.0, 3.0):
        ours = optim.polynomial_decay(2.0, 100, power=power, warmup_steps=10, end=0.1)
        warm, down = (
            optax.linear_schedule(0, 2.0, 10),
            optax.polynomial_schedule(2.0, 0.1, power, 90),
        )
        check(ours, optax.join_schedules([warm, down], [10]))
    with pytest.raises(ValueError, match=r"end: got 0\.0"):
        optim.exponential(1.0, 10, end=0.0)
    with pytest.raises(ValueError, match="power: got 0"):
        optim.polynomial_decay(1.0, 10, power=0)


def megatron(style, step, *, peak=3e-3, end=2e-4, init=1e-4, warmup=8, total=40, decay=10):
    """OptimizerParamScheduler.get_lr of Megatron-LM (core 0.16), its terms in its order."""
    if warmup > 0 and step <= warmup:
        return init + (peak - init) * step / warmup
    if style == "constant":
        return peak
    if step > total:
        return end
    if style == "inverse-square-root":
        return max(end, peak * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    ratio = (step - warmup) / (total - warmup)
    if style == "linear":
        share = 1.0 - ratio
    elif style == "cosine":
        share = 0.5 * (math.cos(math.pi * ratio) + 1.0)
    else:
        begun = step - (total - decay)
        within = begun / decay
        shape = {"linear": 1 - within, "cosine": 0.5 * (math.cos(math.pi * within) + 1.0)}
        shape["minus_sqrt"] = 1 - math.sqrt(max(within, 0))
        share = 1.0 if begun <= 0 else shape[style.removeprefix("WSD-")]
    return end + share * (peak - end)


@pytest.mark.parametrize(
    ("style", "name", "more"),
    [
        ("constant", "constant", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("inverse-square-root", "inverse_square_root", {}),
        ("WSD-linear", "wsd", {}),
        ("WSD-cosine", "wsd", {"decay": "cosine"}),
        ("WSD-minus_sqrt", "wsd", {"decay": "sqrt"}),
    ],
)
def test_configs_against_megatron(style, name, more):
    config = optim.ScheduleConfig(
        name, 3e-3, 8, 40, end=2e-4, init=1e-4, decay_steps=10, **more
    )  # fmt: skip
    ours = optim.make_schedule(config)
    for step in range(60):
        assert float(ours(step)) == pytest.approx(megatron(style, step), rel=1e-6)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay_against_megatron(style):
    ours = optim.weight_decay_increase(0.01, 0.2, 30, style)
    for step in range(40):
        ratio = min(step / 30, 1.0)  # get_wd: the end after wd_incr_steps, which constant is
        share = {"linear": ratio, "cosine": 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)}
        want = 0.01 + share.get(style, 1.0) * (0.2 - 0.01)
        assert float(ours(step)) == pytest.approx(want, rel=1e-6)
    with pytest.raises(ValueError, match=r"start: got -1.*\n.*style: got 'cosin'.*'cosine'"):
        optim.weight_decay_increase(-1, 0.1, 10, "cosin")


def test_join():
    ours = optim.join([optim.constant(0.1), optim.linear(1.0, 50), optim.constant(0.0)], [10, 60])
    parts = [optax.constant_schedule(0.1), optax.linear_schedule(1.0, 0.0, 50)]
    check(ours, optax.join_schedules([*parts, optax.constant_schedule(0.0)], [10, 60]))
    with pytest.raises(ValueError, match="0 for 2 schedules; wanted 1") as caught:
        optim.join([optim.constant(1.0)] * 2, [])
    assert "cannot join schedules" in str(caught.value)
    with pytest.raises(ValueError, match=r"\[5, 5\]; wanted increasing"):
        optim.join([optim.constant(1.0)] * 3, [5, 5])


def test_schedules_work_under_vmap_and_take_gradients_through_the_count():
    counts = torch.tensor(COUNTS)
    for name in ("constant", "linear", "cosine", "wsd", "inverse_square_root"):
        config = optim.ScheduleConfig(name, 1.0, 10, 1000, 0.1, 100)
        schedule = optim.make_schedule(config)
        want = torch.stack([schedule(count) for count in COUNTS])
        torch.testing.assert_close(torch.func.vmap(schedule)(counts), want, rtol=0, atol=0)
        assert want.dtype == torch.float32


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match="cosine_decay schedule") as caught:
        optim.cosine_decay(-1.0, 0, warmup_steps=-3, end=float("nan"))
    message = str(caught.value)
    for part in (
        "peak: got -1.0; wanted a finite rate of at least 0",
        "end: got nan",
        "warmup_steps: got -3; wanted a whole number of at least 0",
        "total_steps: got 0; wanted a whole number of at least 1",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.linear(1.0, 10, warmup_steps=10),
            "10 for 10 of warm-up; wanted at least 11",
        ),
        (lambda: optim.wsd(1.0, 10, 8, warmup_steps=3), "wanted at least 11; fix: shorten"),
        (lambda: optim.wsd(1.0, 10, 8, decay="consine"), "did you mean 'cosine'"),
        (lambda: optim.wsd(1.0, 10, 8, decay="exponential"), "end: got 0.0; wanted more than 0"),
        (lambda: optim.constant(float("inf")), "peak: got inf"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rewarming_is_a_line_from_one_rate_to_the_schedule():
    """By hand, along a straight line, which a line to it stays only in its last point."""
    whole = optim.linear(1.0, 100)
    made = optim.rewarm(whole, 40, 10, init=0.1)
    for count in range(100):
        value = 1 - count / 100
        climbed = 0.1 + (value - 0.1) * (count - 40) / 10
        assert float(made(count)) == pytest.approx(climbed if 40 <= count < 50 else value, abs=1e-6)
    batched = torch.func.vmap(made)(torch.arange(100))
    torch.testing.assert_close(batched, torch.stack([made(count) for count in range(100)]))
    config = optim.ScheduleConfig(
        "linear", 1.0, total_steps=100, rewarm_steps=10, rewarm_at=40, rewarm_init=0.1
    )
    assert float(optim.make_schedule(config)(45)) == float(made(45))
    down = optim.ScheduleConfig("constant", 1.0, rewarm_at=4, rewarm_steps=2, rewarm_init=2.0)
    assert [float(optim.make_schedule(down)(n)) for n in (3, 4, 5, 6)] == [1.0, 2.0, 1.5, 1.0]
    for wrong in (-0.5, math.inf, math.nan):
        wanted = rf"rewarm_init: got {wrong}; wanted a finite number .*; fix: set it to 0"
        with pytest.raises(ValueError, match=wanted):
            optim.make_schedule(replace(down, rewarm_init=wrong))
    with pytest.raises(
        ValueError, match=r"at: got -1(.|\n)*steps: got 0(.|\n)*init: got inf"
    ) as caught:
        optim.rewarm(whole, -1, 0, init=math.inf)
    assert str(caught.value).count("; fix: ") == 3


FAR = 2**26 + 1  # which float32 does not have, nor most of what follows
LATE = {  # by the formulas in whole numbers and float64: the schedule, and pairs of count and rate
    "rewarm": (
        lambda: optim.rewarm(optim.constant(1.0), FAR, 100),
        [(-1, 1.0), (0, 0.0), (1, 0.01), (51, 0.51), (99, 0.99), (100, 1.0)],
    ),
    "rewarm-fraction": (
        lambda: optim.rewarm(optim.constant(1.0), FAR + 0.5, 100),
        [(0, 1.0), (1, 0.005), (51, 0.505), (101, 1.0)],
    ),
    "linear": (
        lambda: optim.linear(1.0, FAR + 100, warmup_steps=FAR),
        [(0, 1.0), (1, 0.99), (51, 0.49), (99, 0.01), (100, 0.0)],
    ),
    "cosine": (
        lambda: optim.cosine_decay(1.0, FAR + 100, warmup_steps=FAR),
        [(k, 0.5 * (1 + math.cos(math.pi * k / 100))) for k in (0, 1, 51, 99, 100)],
    ),
    "polynomial": (
        lambda: optim.polynomial_decay(1.0, FAR + 100, power=3.0, warmup_steps=FAR),
        [(k, (1 - k / 100) ** 3) for k in (0, 1, 51, 100)],
    ),
    "exponential": (
        lambda: optim.exponential(1.0, FAR + 100, end=0.1, warmup_steps=FAR),
        [(k, 0.1 ** (k / 100)) for k in (0, 1, 51, 100)],
    ),
    "wsd": (
        lambda: optim.wsd(1.0, FAR + 100, 100, decay="sqrt"),
        [(k, 1 - math.sqrt(k / 100)) for k in (0, 1, 51, 100)] + [(-1, 1.0)],
    ),
    "join": (
        lambda: optim.join([optim.constant(1.0), optim.linear(0.5, 100)], [FAR]),
        [(-1, 1.0), (0, 0.5), (1, 0.495), (51, 0.245)],
    ),
    "inverse_square_root": (
        lambda: optim.inverse_square_root(1.0, FAR, warmup_steps=FAR - 1),
        [(-1, 1.0), (0, 1.0), (1, 0.0)],
    ),
    "by_samples": (
        lambda: optim.by_samples(optim.linear(1.0, 3 * FAR + 300, warmup_steps=3 * FAR), [0], [3]),
        [(0, 1.0), (1, 0.99), (51, 0.49), (100, 0.0)],
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_late_counts_are_exact(name):
    """Counts of samples pass 2^24, from where on float32 has not all whole numbers."""
    make, wanted = LATE[name]
    schedule = make()
    counts = torch.tensor([FAR + after for after, _ in wanted])
    rates = torch.tensor([rate for _, rate in wanted])
    for found in (
        torch.stack([schedule(int(count)) for count in counts]),
        torch.stack([schedule(count) for count in counts]),
        torch.func.vmap(schedule)(counts),
    ):
        torch.testing.assert_close(found, rates, rtol=1e-6, atol=1e-6)


def test_late_counts_are_exact_where_compiled():
    schedule = optim.rewarm(optim.linear(1.0, 2 * FAR, warmup_steps=FAR), FAR, 100)
    compiled = functron.jit(schedule)
    for after, rate in ((-1, 1.0), (0, 0.0), (51, 0.51), (100, 1.0)):
        assert float(compiled(torch.tensor(FAR + after))) == pytest.approx(rate, abs=1e-5)
