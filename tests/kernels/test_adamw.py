"""AdamW in one pass: the emulated kernel against torch.optim in float64, and roundings bit for bit."""

from __future__ import annotations

import functools
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from functron import random
from functron.ops import adamw
from functron.ops.adamw import (
    AdamwNumbers,
    Stochastic,
    adamw_,
    place_of,
    random_bits,
    stochastic_round,
)
from tests.kernels.emulator import Emulator, emulated

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
B1, B2, EPS, DECAY, RATE = 0.9, 0.95, 1e-8, 0.1, 1e-2


def normal(size, seed, dtype=F32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(size, generator=generator)).to(dtype)


def scalar(value, dtype=F32):
    return torch.tensor(value, dtype=dtype)


def step(
    launch, param, master, mu, nu, grad, count, *, rate=RATE, clip=None, found_inf=None,
    rounding=None, decay=DECAY, b1=B1, b2=B2, eps=EPS,
):  # fmt: skip
    """One launch; `launch` None: the reference."""
    key, salt, place = rounding or (None, 0, ())
    as_scalar = lambda value: None if value is None else scalar(value)
    args = (
        param, master, mu, nu, grad, scalar(rate), as_scalar(clip), as_scalar(found_inf),
        scalar(count, torch.int64), key, b1, b2, eps, decay, salt, list(place or adamw._WHOLE),
    )  # fmt: skip
    if launch is None:
        adamw.ADAMW_.raw(*args)
    else:
        adamw._kernel(launch, *args)


def copies(*tensors):
    return [None if x is None else x.clone() for x in tensors]


def state(size, param=F32, mu=F32, nu=F32, master=False, seed=0):
    """Parameter, master, moments: those of training that has begun."""
    own = normal(size, seed)
    return (
        own.to(param),
        own if master else None,
        normal(size, seed + 1, mu, 1e-2),
        normal(size, seed + 2).square().mul(1e-3).to(nu),
    )


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("launch", [None, Emulator(0)], ids=["reference", "kernel"])
def test_twenty_steps_of_torch_in_float64(launch, master):
    """From zero moments, where bias corrections matter, with a schedule and a clip coefficient."""
    start = normal(1500, 0)
    wanted = start.double().requires_grad_()
    torch_adamw = torch.optim.AdamW([wanted], RATE, (B1, B2), EPS, DECAY)
    param, own = (start.to(BF16), start.clone()) if master else (start.clone(), None)
    mu, nu = torch.zeros(1500), torch.zeros(1500)
    for count in range(1, 21):
        grad, clip, rate = normal(1500, count), 0.5 + 0.02 * count, RATE / count
        torch_adamw.param_groups[0]["lr"] = rate
        wanted.grad = grad.double() * clip
        torch_adamw.step()
        step(launch, param, own, mu, nu, grad, count, rate=rate, clip=clip)
    got = own if master else param
    ulps = 2**-24 * wanted.detach().abs().clamp(
        min=1
    )  # half of one, rounded up; each step may add it
    assert ((got.double() - wanted.detach()).abs() <= 20 * ulps).all()
    inner = torch_adamw.state[wanted]
    assert torch.allclose(mu.double(), inner["exp_avg"], rtol=1e-5, atol=1e-7)
    assert torch.allclose(nu.double(), inner["exp_avg_sq"], rtol=1e-5)
    if master:
        assert torch.equal(param, own.to(BF16))


# others cost a compilation each; other tests have these as well
BY_DEFAULT = [
    (F32, F32, F32, F32, False),
    (BF16, BF16, BF16, F32, True),
    (BF16, F32, F32, F32, False),
    (F16, F32, F32, F32, True),
]
KINDS = [
    pytest.param(*kind, marks=() if kind in BY_DEFAULT else pytest.mark.full)
    for kind in itertools.product(
        (F32, BF16, F16), (F32, BF16, F16), (F32, BF16), (F32, BF16), (False, True)
    )
    if not (kind[-1] and kind[0] == F32)
]


@pytest.mark.parametrize(("param", "grad", "mu", "nu", "master"), KINDS, ids=str)
def test_every_combination_of_types_is_its_reference(param, grad, mu, nu, master):
    """Float32 arithmetic fused differently: what is stored in 16 bits is at most a neighbour."""
    size = 1029
    before, g = state(size, param, mu, nu, master), normal(size, 9, grad)

    def run(launch):
        now = copies(*before)
        step(launch, *now, g, 3, clip=0.7)
        return [x for x in now if x is not None]

    for got, want in zip(emulated(run, seeds=(0, 1)), run(None), strict=True):
        precision = {F32: 1e-6, BF16: 2**-7, F16: 2**-10}[got.dtype]
        assert torch.allclose(got.float(), want.float(), rtol=precision, atol=1e-7)
        assert (got != want).float().mean() < (1 if got.dtype == F32 else 0.01)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 3 * 3 * 1024 + 7])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("random_", [False, True])
def test_sizes_and_alignments_give_the_same_bits(size, shift, random_):
    """An element's result does not depend on who computes it, or how it is read."""
    rounding = Stochastic(random.key(3), 5) if random_ else None
    whole = state(3 * 3 * 1024 + 7, BF16, BF16, F32, True)
    g = normal(3 * 3 * 1024 + 7, 9, BF16)

    def run(launch, size, shift):
        now = []
        for x in (*whole, g):
            memory = torch.empty(size + shift, dtype=x.dtype)
            memory[shift:] = x[:size]
            now.append(memory[shift:])
        step(launch, *now[:4], now[4], 2, rounding=rounding)
        return now

    want = run(Emulator(0), len(g), 0)
    for got, one in zip(emulated(run, size, shift), want, strict=True):
        assert torch.equal(got, one[:size])


def test_empty():
    empty = torch.empty(0)
    step(Emulator(0), empty, None, empty.clone(), empty.clone(), empty.clone(), 1)
    numbers = AdamwNumbers(scalar(1, torch.int64), scalar(1.0), B1, B2, EPS)
    adamw_(*[torch.empty(0) for _ in range(4)], numbers, 0.0)


@pytest.mark.parametrize("launch", [None, Emulator(0)], ids=["reference", "kernel"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_found_inf_skips_and_without_it_nan_spreads(launch, bad):
    before, g = state(100, BF16, master=True), normal(100, 9)
    g[17] = bad
    now = copies(*before)
    step(launch, *now, g, 1, found_inf=1.0)
    assert all(map(torch.equal, now, before))
    step(launch, *now, g, 1, found_inf=0.0)
    for x in now:
        assert x[17].isnan() or x[17].isinf()
        assert x.isfinite().sum() == 99


def test_late_counts_and_slow_decays():
    """1 - b^t to float32, where b is close to 1 and t is 1, and where b^t has vanished."""
    for count, b2 in [(1, 0.9999), (10**12, 0.999), (2**31 + 1, 0.9999999)]:
        param, mu, nu, grad = torch.zeros(4), torch.zeros(4), torch.ones(4), torch.zeros(4)
        mu += 1
        step(Emulator(0), param, None, mu, nu, grad, count, b1=0.9, b2=b2, decay=0.0, rate=1.0)
        c2 = 1 - b2 ** float(count)
        want = -(0.9 / (1 - 0.9**count)) / (math.sqrt(b2 / c2) + EPS)
        assert param.tolist() == pytest.approx([want] * 4, rel=3e-7)


# Stochastic rounding


def neighbours(x, dtype):
    """Of float32 numbers the two of the dtype around them, by NumPy's nextafter of ml_dtypes."""
    kind = ml_dtypes.bfloat16 if dtype == BF16 else np.float16
    values = x.double().numpy()
    with np.errstate(over="ignore"):  # float16 rounds to infinity there
        near = x.numpy().astype(kind)
        other = np.nextafter(
            near, np.where(near.astype(np.float64) < values, np.inf, -np.inf).astype(kind)
        )
    low, high = np.minimum(near, other), np.maximum(near, other)
    exact = near.astype(np.float64) == values
    low, high = (np.where(exact, near, y).astype(np.float64) for y in (low, high))
    return torch.from_numpy(low), torch.from_numpy(high)


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-30,
    -3e-8,
    5e-8,
    6.1e-5,
    -6.103e-5,
    60000.3,
    65519.0,
    -1e-41,
    3.1e38,
]


@functools.cache
def samples():
    x = torch.cat(
        [
            torch.tensor(SPECIAL),
            normal(400, 0),
            normal(400, 1, scale=1e-5),
            normal(200, 2, scale=1e-7),
        ]
    )
    return x, random_bits(random.key(1), x.shape)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rounds_away_from_zero_for_as_many_bits_as_the_distance(dtype):
    """Over all 65536 random words a number rounds up as often as its mean asks for."""
    x = samples()[0]
    x = x[x.abs() < (65504 if dtype == F16 else 3.3e38)][::7]
    bits = torch.arange(1 << 16, dtype=torch.int32)
    low, high = neighbours(x, dtype)
    for value, a, b in zip(x, low, high, strict=True):
        got = stochastic_round(value.expand(1 << 16).contiguous(), bits, dtype).double()
        assert ((got == a) | (got == b)).all()
        if a != b:
            share = (value.double() - a) / (b - a)
            assert abs((got == b).double().mean() - share) <= 2**-16


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_kernel_rounds_as_the_reference_bit_for_bit(dtype):
    """Of masters that no update moves: what comes out is what went in, rounded."""
    x = samples()[0]
    x = torch.cat([x, torch.tensor([math.nan, 3.4e38, -65519.9, 65520.0])])
    key, salt, count = random.key(2**40 + 5), 77, 12
    zeros = lambda: torch.zeros(len(x))
    param = torch.empty(len(x), dtype=dtype)
    step(
        Emulator(0), param, x.clone(), zeros(), zeros(), zeros(), count, decay=0.0, eps=1.0,
        rounding=Stochastic(key, salt),
    )  # fmt: skip
    leaf_key = random.fold_in(random.fold_in(key, count), salt)
    bits = random.bits(leaf_key, x.shape, bit_width=16).to(torch.int32)
    assert torch.equal(bits, random_bits(leaf_key, x.shape))
    want = stochastic_round(x, bits, dtype)
    assert torch.equal(param.view(torch.int16)[~x.isnan()], want.view(torch.int16)[~x.isnan()])
    assert param[x.isnan()].isnan().all()


PARTS = [
    ((6, 10), (0, 0), (6, 10)),
    ((6, 10), (2, 0), (3, 10)),
    ((6, 10), (0, 5), (6, 5)),
    ((6, 10), (3, 4), (2, 6)),
    ((3, 6, 10), (0, 2, 3), (3, 4, 7)),
    ((3, 4, 6, 10), (1, 2, 0, 3), (2, 2, 6, 7)),
    ((2, 4, 6, 10), (0, 2, 3, 3), (2, 2, 2, 7)),
    ((6, 10), (0, 3), (6, 1)),
    ((5, 6, 1), (0, 2, 0), (5, 3, 1)),
    ((), (), ()),
    ((2**20, 2**21), (2**19, 2**20), (3, 7)),
]


@pytest.mark.parametrize(("shape", "starts", "sizes"), PARTS, ids=str)
def test_a_shard_is_rounded_by_the_bits_of_its_global_elements(shape, starts, sizes):
    """Among others one past 2^32 elements."""
    key = random.key(4)
    place = place_of(shape, starts, sizes)
    assert place is not None
    master = normal(sizes, 3)
    zeros = lambda: torch.zeros(sizes)
    index = [torch.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    leaf_key = random.fold_in(random.fold_in(key, 1), 9)
    want = stochastic_round(master, random_bits(leaf_key, shape, index), BF16)
    for launch in (None, Emulator(0)):
        param = torch.empty(sizes, dtype=BF16)
        step(
            launch, param, master.clone(), zeros(), zeros(), zeros(), 1, decay=0.0, eps=1.0,
            rounding=Stochastic(key, 9, place),
        )  # fmt: skip
        assert torch.equal(param, want)


def test_places_that_are_too_irregular():
    assert place_of((4,) * 5, (1,) * 5, (2,) * 5) is None
    assert place_of((4,) * 5, (0,) * 5, (4,) * 5) == (0, 4**5, 0, 1, 0, 1, 0)


def test_small_updates_add_up_without_masters():
    """An update of an eighth of the last bit: lost to nearest, kept on average."""
    size, steps = 2048, 40
    key = random.key(0)

    def train(rounding):
        param = torch.ones(size, dtype=BF16)
        mu, nu = torch.ones(size), torch.ones(size)
        for count in range(1, steps + 1):
            mu.fill_(1.0), nu.fill_(1.0)
            step(
                Emulator(0), param, None, mu, nu, torch.ones(size), count + 10**6, decay=0.0,
                rate=-(2**-10), b1=0.5, b2=0.5, rounding=rounding,
            )  # fmt: skip
        return param.float().mean().item()

    assert train(None) == 1.0
    assert train(Stochastic(key, 0)) == pytest.approx(1 + steps * 2**-10, abs=1e-3)


def test_errors():
    x = torch.ones(4, 6)
    given = AdamwNumbers(scalar(1, torch.int64), scalar(0.1), B1, B2, EPS)
    call = functools.partial(adamw_, numbers=given, weight_decay=0.0)
    with pytest.raises(
        ValueError,
        match=r"(?s)grad: got shape \(3,\).*nu: got shape \(4, 6\) with strides \(1, 4\)",
    ):
        call(x, torch.ones(3), x.clone(), torch.ones(6, 4).t())
    with pytest.raises(
        ValueError,
        match=r"param: got shape \(4, 3\) with strides \(6, 2\); wanted a tensor without gaps",
    ):
        call(*[torch.ones(4, 6)[:, ::2] for _ in range(4)])
    wrong = given._replace(rate=scalar(0.1, torch.float64))
    with pytest.raises(
        ValueError, match=r"(?s)rate: got torch.float64.*master: got torch.bfloat16"
    ):
        adamw_(x, x.clone(), x.clone(), x.clone(), wrong, 0.0, master=x.to(BF16))
    with pytest.raises(ValueError, match="a contiguous one, to round it"):
        call(*[x.t()] * 4, rounding=Stochastic(random.key(0), 0))
    with pytest.raises(
        TypeError, match=r"adamw_: got torch.float64; wanted one of torch.float32, torch.float16"
    ):
        step(Emulator(0), *state(4), torch.ones(4, dtype=torch.float64), 1)
    with pytest.raises(TypeError, match=r"stochastic_round: got torch.float64"):
        stochastic_round(
            torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32), BF16
        )
