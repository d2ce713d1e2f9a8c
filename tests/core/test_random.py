"""functron.random against jax.random, and against itself where only a part is drawn."""

from __future__ import annotations

import itertools
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from functron import random
from functron.core import random as threefry

SHAPE = (37, 5, 3)
SEED = 20240229


@pytest.fixture
def keys():
    return random.key(SEED), jax.random.key(SEED)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield jax.random.key(SEED)


def same(ours: torch.Tensor, theirs) -> None:
    theirs = np.asarray(theirs)
    assert ours.numpy().dtype == theirs.dtype
    np.testing.assert_array_equal(ours.numpy(), theirs)


def words(jax_key) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax_key)).astype(np.int64)


def as64(values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.double().numpy()
    return np.asarray(values, dtype=np.float64)


def each(**given) -> list[dict]:
    """Factors of a product of which each value is drawn, not each pair: JAX compiles each case."""
    return [{name: value} for name, value in given.items()]


# Keys


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1])
def test_key_of_small_seeds(seed):
    same(random.key(seed), words(jax.random.key(seed)))


@pytest.mark.parametrize("seed", [2**31, 2**32 + 5, 2**63 - 1])
def test_key_of_large_seeds(x64, seed):
    same(random.key(seed), words(jax.random.key(seed)))


@pytest.mark.parametrize("num", [0, 1, 2, 7])
def test_split(keys, num):
    ours, theirs = keys
    same(random.split(ours, num), words(jax.random.split(theirs, num)).reshape(num, 2))


@pytest.mark.parametrize("data", [0, 1, 12345, 2**31, 2**32 - 1])
def test_fold_in(keys, data):
    ours, theirs = keys
    expected = words(jax.random.fold_in(theirs, np.uint32(data)))
    same(random.fold_in(ours, data), expected)
    same(random.fold_in(ours, torch.tensor(data)), expected)


@given(seed=st.integers(0, 2**31 - 1), path=st.lists(st.integers(0, 2**32 - 1), max_size=3))
def test_derived_keys(seed, path):
    ours, theirs = random.key(seed), jax.random.key(seed)
    for data in path:
        ours, theirs = random.fold_in(ours, data), jax.random.fold_in(theirs, np.uint32(data))
        ours, theirs = random.split(ours)[1], jax.random.split(theirs)[1]
    same(random.bits(ours, (3,)), jax.random.bits(theirs, (3,)))


# Samplers


@pytest.mark.pairwise(of=each)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 0, 2), SHAPE])
@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits(keys, shape, width):
    ours, theirs = keys
    expected = jax.random.bits(theirs, shape, dtype=f"uint{width}")
    same(random.bits(ours, shape, bit_width=width), expected)


def test_bits_64(keys, x64):
    same(random.bits(keys[0], SHAPE, bit_width=64), jax.random.bits(x64, SHAPE, jnp.uint64))


@pytest.mark.pairwise(of=each)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-3.0, 2.7), (0.1, 0.7), (-0.02, 0.02), (5, 9)])
def test_uniform(keys, dtype, bounds):
    ours, theirs = keys
    got = random.uniform(ours, SHAPE, getattr(torch, dtype), *bounds)
    assert got.dtype == getattr(torch, dtype)
    # not as one program: a processor with float16 of its own fuses product and sum, and rounds once
    with jax.disable_jit(dtype == "float16"):
        expected = jax.random.uniform(theirs, SHAPE, dtype, *bounds)
    np.testing.assert_array_equal(as64(got), as64(expected))


def test_uniform_64(keys, x64):
    same(random.uniform(keys[0], SHAPE, torch.float64), jax.random.uniform(x64, SHAPE, jnp.float64))
    got = random.uniform(keys[0], SHAPE, torch.float64, -3.0, 2.7)
    expected = jax.random.uniform(x64, SHAPE, jnp.float64, -3.0, 2.7)
    np.testing.assert_allclose(got.numpy(), np.asarray(expected), rtol=0, atol=5e-16)


def test_uniform_with_tensor_bounds(keys):
    ours, theirs = keys
    low, high = np.linspace(-2, -1, 3, dtype=np.float32), np.full((5, 1), 0.3, np.float32)
    got = random.uniform(ours, SHAPE, minval=torch.tensor(low), maxval=torch.tensor(high))
    same(got, jax.random.uniform(theirs, SHAPE, minval=low, maxval=high))


# JAX's float32 erfinv is a polynomial, good to 3e-6 in the tails. The others: one step near 3.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2**-6, "float16": 2**-9}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_normal(keys, dtype):
    ours, theirs = keys
    got = random.normal(ours, (300, 50), getattr(torch, dtype))
    assert got.dtype == getattr(torch, dtype)
    expected = jax.random.normal(theirs, (300, 50), dtype)
    error = np.abs(as64(got) - as64(expected)) / np.maximum(1, np.abs(as64(expected)))
    assert error.max() <= TOLERANCE[dtype]


def test_normal_against_the_exact_inverse(keys):
    low = np.nextafter(np.float32(-1), np.float32(0))
    u = np.asarray(jax.random.uniform(keys[1], (1000, 200), minval=low, maxval=1.0))
    exact = [NormalDist().inv_cdf((1 + x) / 2) for x in u.astype(np.float64).ravel()]
    got = as64(random.normal(keys[0], (1000, 200))).ravel()
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.pairwise(of=each)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (0.5, 0.75), (0.0, 1.0), (-9.0, -1.0)])
def test_truncated_normal(keys, dtype, bounds):
    ours, theirs = keys
    got = random.truncated_normal(ours, *bounds, (300, 50), getattr(torch, dtype))
    assert got.dtype == getattr(torch, dtype)
    assert (as64(got) > bounds[0]).all()
    assert (as64(got) < bounds[1]).all()
    expected = as64(jax.random.truncated_normal(theirs, *bounds, (300, 50), dtype))
    # In the tail, erfinv's slope amplifies the last bit of erf: by 1 / density.
    slope = np.maximum(1.0, np.exp(expected**2 / 2)) if dtype == "float32" else 1.0
    if dtype == "float32" or bounds != (-9.0, -1.0):
        assert (np.abs(as64(got) - expected) <= TOLERANCE[dtype] * slope).all()


def test_normals_64(keys, x64):
    got = random.normal(keys[0], SHAPE, torch.float64)
    expected = np.asarray(jax.random.normal(x64, SHAPE, jnp.float64))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)
    got = random.truncated_normal(keys[0], -2.0, 2.0, SHAPE, torch.float64)
    expected = np.asarray(jax.random.truncated_normal(x64, -2.0, 2.0, SHAPE, jnp.float64))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli(keys, p):
    same(random.bernoulli(keys[0], p, SHAPE), jax.random.bernoulli(keys[1], p, SHAPE))


def test_bernoulli_with_tensor_p(keys, x64):
    p = np.linspace(0, 1, 3, dtype=np.float32)
    for dtype in (np.float32, np.float64):
        expected = jax.random.bernoulli(x64, p.astype(dtype), SHAPE)
        same(random.bernoulli(keys[0], torch.tensor(p.astype(dtype)), SHAPE), expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_randint(keys, dtype):
    info = np.iinfo(dtype)
    for low, high in [(0, 1), (0, 10), (3, 100), (info.min, info.max), (0, info.max)]:
        got = random.randint(keys[0], SHAPE, low, high, getattr(torch, dtype))
        same(got, jax.random.randint(keys[1], SHAPE, low, high, dtype))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_randint_over_the_whole_dtype(keys, x64, dtype):
    info = np.iinfo(dtype)
    got = random.randint(keys[0], SHAPE, int(info.min), int(info.max) + 1, getattr(torch, dtype))
    same(got, jax.random.randint(x64, SHAPE, int(info.min), int(info.max) + 1, dtype))


WIDE = [(0, 10), (-5, 10**12), (0, 2**62 + 12345), (0, 2**63 - 1), (-(2**63), 2**63 - 1)]
WIDE += [(-(2**63), 0), (-(2**62), 2**62), (-(2**62) - 5, 2**62 + 7), (0, 3 * 2**61 + 1)]


@pytest.mark.parametrize(("low", "high"), WIDE)
def test_randint_64(keys, x64, low, high):
    got = random.randint(keys[0], SHAPE, low, high)
    same(got, jax.random.randint(x64, SHAPE, low, high, jnp.int64))


def test_randint_over_all_of_int64(keys):
    low = random.randint(keys[0], SHAPE, -(2**63), 2**63)
    # With the full span the high draw counts for nothing: what remains is the second key's bits.
    raw = random.bits(random.split(keys[0])[1], SHAPE, bit_width=64).view(torch.int64)
    assert torch.equal(low, raw + -(2**63))


# Parts of arrays

SAMPLERS = {
    "bits": lambda key, shape, index=None: random.bits(key, shape, index=index),
    "bits64": lambda key, shape, index=None: random.bits(key, shape, index=index, bit_width=64),
    "uniform": lambda key, shape, index=None: random.uniform(
        key, shape, torch.float32, -1.0, 3.3, index=index
    ),
    "normal": lambda key, shape, index=None: random.normal(key, shape, index=index),
    "normal64": lambda key, shape, index=None: random.normal(
        key, shape, torch.float64, index=index
    ),
    "truncated": lambda key, shape, index=None: random.truncated_normal(
        key, -1.0, 2.0, shape, index=index
    ),
    "bernoulli": lambda key, shape, index=None: random.bernoulli(key, 0.3, shape, index=index),
    "randint": lambda key, shape, index=None: random.randint(key, shape, 0, 1000, index=index),
}


@pytest.mark.parametrize("name", SAMPLERS)
@given(data=st.data())
def test_index_gives_that_part(name, data):
    shape = data.draw(st.lists(st.integers(1, 9), max_size=4).map(tuple))
    entries = [
        data.draw(st.none() | st.lists(st.integers(0, size - 1), max_size=12)) for size in shape
    ]
    index = [None if entry is None else torch.tensor(entry).long() for entry in entries]
    key = random.key(data.draw(st.integers(0, 2**32)))
    picks = [range(n) if entry is None else entry for n, entry in zip(shape, entries, strict=True)]
    full = SAMPLERS[name](key, shape).numpy()
    expected = full[np.ix_(*[np.asarray(pick, dtype=int) for pick in picks])] if shape else full
    got = SAMPLERS[name](key, shape, index=index)
    np.testing.assert_array_equal(got.numpy(), expected)  # to the last bit, floats too


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_index_dtypes(keys, dtype):
    index = (torch.tensor([3, 1], dtype=dtype), None, None)
    assert torch.equal(
        random.normal(keys[0], SHAPE, index=index), random.normal(keys[0], SHAPE)[[3, 1]]
    )


def hash_by_hand(key: list[int], counter: int) -> int:
    """hi ^ lo of Threefry-2x32-20 as printed in Salmon et al. 2011, on Python integers."""
    word = 0xFFFFFFFF
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (counter >> 32) + key[0] & word, (counter & word) + key[1] & word
    rotations = itertools.cycle([13, 15, 26, 6, 17, 29, 16, 24])
    for done, r in zip(range(1, 21), rotations, strict=False):
        x = x + y & word
        y = (y << r | y >> 32 - r) & word ^ x
        if done % 4 == 0:
            s = done // 4
            x, y = x + schedule[s % 3] & word, y + schedule[(s + 1) % 3] + s & word
    return x ^ y


def test_positions_past_32_bits():
    shape = (2**20, 2**21)
    rows, columns = [0, 1, 2047, 2048, 2**20 - 1], [0, 5, 2**21 - 1]
    key = random.split(random.key(7))[0]
    got = random.bits(key, shape, index=(torch.tensor(rows), torch.tensor(columns)))
    expected = [[hash_by_hand(key.tolist(), r * shape[1] + c) for c in columns] for r in rows]
    assert got.tolist() == expected


def test_hash_by_hand_is_jax():
    expected = jax.random.bits(jax.random.wrap_key_data(np.array([3, 9], np.uint32)), (5,))
    assert [hash_by_hand([3, 9], i) for i in range(5)] == np.asarray(expected).tolist()


def test_blocks_past_32_bits(monkeypatch):
    monkeypatch.setattr(threefry, "_block_size", lambda device: 1 << 30)  # nothing is computed
    blocks = threefry._counters(random.key(0).to("meta"), (2**33,), None)
    assert [(hi, lo.shape[0]) for hi, lo in blocks] == [(n // 4, 2**30) for n in range(8)]


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize("index", [None, (torch.arange(0, 37, 2), None, torch.tensor([2, 0]))])
def test_blocks_do_not_show(keys, monkeypatch, block, index):
    expected = np.asarray(jax.random.bits(keys[1], SHAPE))
    expected = expected if index is None else expected[::2][:, :, [2, 0]]
    monkeypatch.setattr(threefry, "_block_size", lambda device: block)
    same(random.bits(keys[0], SHAPE, index=index), expected)
    columns = torch.func.vmap(
        lambda at: random.bits(keys[0], SHAPE, index=(index and index[0], None, at)), out_dims=2
    )(torch.tensor([[2], [0]]) if index else torch.arange(3)[:, None])
    same(columns.squeeze(3), expected)


def test_large_array_in_its_own_blocks(keys):
    size = 3 * threefry._block_size(torch.device("cpu")) + 11
    same(random.bits(keys[0], (size,)), jax.random.bits(keys[1], (size,)))


# Transforms, fakes and traces


def test_vmap_over_keys_and_positions(keys):
    batch = random.split(keys[0], 3)
    expected = torch.stack([random.normal(key, (6, 4)) for key in batch])
    assert torch.equal(torch.func.vmap(lambda key: random.normal(key, (6, 4)))(batch), expected)

    def part(key, rows):
        return random.normal(key, (6, 4), index=(rows, None))

    both = torch.func.vmap(torch.func.vmap(part, (None, 0)), (0, None))
    assert torch.equal(both(batch, torch.arange(6).reshape(2, 3)).reshape(3, 6, 4), expected)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_under_vmap(keys, name):
    rows = torch.arange(6).reshape(3, 2)
    got = torch.func.vmap(lambda at: SAMPLERS[name](keys[0], (6, 4), index=(at, None)))(rows)
    assert torch.equal(got.reshape(6, 4), SAMPLERS[name](keys[0], (6, 4)))


def test_keys_under_vmap(keys):
    folded = torch.func.vmap(lambda step: random.fold_in(keys[0], step))(torch.arange(4))
    theirs = jax.vmap(lambda step: jax.random.fold_in(keys[1], step))(jnp.arange(4))
    same(folded, words(theirs))
    assert torch.equal(torch.func.vmap(random.split)(folded)[2], random.split(folded[2]))


def test_inside_gradients(keys):
    x = torch.linspace(-1, 1, 12)

    def loss(x, key):
        return (x**2 * random.bernoulli(key, 0.5, x.shape)).sum()

    mask = random.bernoulli(keys[0], 0.5, (12,))
    assert torch.equal(torch.func.grad(loss)(x, keys[0]), 2 * x * mask)
    batch = random.split(keys[0], 3)
    masks = torch.stack([random.bernoulli(key, 0.5, (12,)) for key in batch])
    per_key = torch.func.vmap(torch.func.grad(loss), (None, 0))(x, batch)
    assert torch.equal(per_key, 2 * x * masks)
    assert torch.equal(torch.func.hessian(loss)(x, keys[0]), torch.diag(2.0 * mask))


def test_gradient_of_bounds(keys):
    def draw(high):
        return random.uniform(keys[0], (5,), maxval=high)

    _, tangent = torch.func.jvp(draw, (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert torch.equal(tangent, random.uniform(keys[0], (5,)))


def test_meta_and_fake_tensors(keys):
    huge = (10**6, 10**6)
    assert random.normal(keys[0].to("meta"), huge).shape == huge
    with FakeTensorMode():
        key = random.key(0)
        assert random.truncated_normal(key, -2.0, 2.0, huge).shape == huge
        assert random.randint(random.fold_in(key, 3), (4,), 0, 9).dtype == torch.int64
        local = torch.func.vmap(lambda at: random.uniform(key, huge, index=(None, at)))
        assert local(torch.arange(6).reshape(2, 3)).shape == (2, 10**6, 3)


def test_traces_are_pure_and_equal(keys):
    def draw(key):
        return random.normal(key, (600, 1000))

    graph = make_fx(draw, tracing_mode="fake")(keys[0])
    names = [str(node.target) for node in graph.graph.nodes if "aten" in str(node.target)]
    assert not [name for name in names if name.split(".")[1].endswith("_")]
    assert len(names) < 200  # one block, whatever the size
    assert torch.equal(graph(keys[0]), draw(keys[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLERS)
def test_on_cuda(keys, name):
    ours = SAMPLERS[name](keys[0].cuda(), (1000, 77))
    assert ours.device.type == "cuda"
    expected = SAMPLERS[name](keys[0], (1000, 77))
    exact = name in ("bits", "bits64", "uniform", "bernoulli", "randint")
    if exact:
        assert torch.equal(ours.cpu(), expected)
    else:
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5, atol=1e-6)


# Errors

BAD = {
    "key, float": lambda k: random.bits(torch.zeros(2), (3,)),
    "key, shape": lambda k: random.bits(random.split(k), (3,)),
    "key, int": lambda k: random.split(0),
    "seed": lambda k: random.key(-1),
    "seed, bool": lambda k: random.key(True),
    "num": lambda k: random.split(k, -1),
    "data, range": lambda k: random.fold_in(k, 2**32),
    "data, float": lambda k: random.fold_in(k, torch.tensor(1.0)),
    "data, shape": lambda k: random.fold_in(k, torch.arange(2)),
    "shape, int": lambda k: random.bits(k, 3),
    "shape, negative": lambda k: random.bits(k, (3, -1)),
    "shape, huge": lambda k: random.bits(k, (2**40, 2**40)),
    "bit_width": lambda k: random.bits(k, (3,), bit_width=12),
    "index, length": lambda k: random.bits(k, (3, 4), index=[None]),
    "index, kind": lambda k: random.bits(k, (3, 4), index=torch.arange(2)),
    "index[1], 2-D": lambda k: random.bits(k, (3, 4), index=[None, torch.zeros(2, 2).long()]),
    "index[0], float": lambda k: random.bits(k, (3, 4), index=[torch.zeros(2), None]),
    "index[0], list": lambda k: random.bits(k, (3, 4), index=[[0, 1], None]),
    "index[0], device": lambda k: random.bits(
        k, (3,), index=[torch.zeros(2, device="meta").long()]
    ),
    "dtype, uniform": lambda k: random.uniform(k, (3,), torch.int32),
    "dtype, normal": lambda k: random.normal(k, (3,), torch.complex64),
    "minval, kind": lambda k: random.uniform(k, (3,), minval="0"),
    "maxval, shape": lambda k: random.uniform(k, (3,), maxval=torch.ones(2)),
    "upper, shape": lambda k: random.truncated_normal(k, 0.0, torch.ones(2, 3), (3,)),
    "p, range": lambda k: random.bernoulli(k, 1.5, (3,)),
    "p, nan": lambda k: random.bernoulli(k, float("nan"), (3,)),
    "p, shape": lambda k: random.bernoulli(k, torch.ones(4), (3,)),
    "p, global shape": lambda k: random.bernoulli(k, torch.ones(4), (4,), index=[torch.arange(2)]),
    "p's dtype": lambda k: random.bernoulli(k, torch.tensor(1), (3,)),
    "maxval, empty": lambda k: random.randint(k, (3,), 5, 5),
    "(minval, maxval), range": lambda k: random.randint(k, (3,), 0, 257, torch.uint8),
    "(minval, maxval), low": lambda k: random.randint(k, (3,), -1, 2, torch.uint8),
    "(minval, maxval), kind": lambda k: random.randint(k, (3,), 0, torch.tensor(3)),
    "dtype, randint": lambda k: random.randint(k, (3,), 0, 3, torch.float32),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_teach(keys, case):
    with pytest.raises(ValueError, match=r"^random\.\w+\n  - .*: got .*; wanted ") as caught:
        BAD[case](keys[0])
    problems = str(caught.value).splitlines()[1:]
    at_fault = case.split(",")[0] if not case.startswith("(") else "(minval, maxval)"
    assert [problem.split(": got")[0] for problem in problems] == [f"  - {at_fault}"]


def test_all_problems_are_listed():
    with pytest.raises(ValueError, match=r"random\.bernoulli") as caught:
        random.bernoulli(torch.zeros(2), 2.0, (3, 4), index=[None])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  - key",
        "  - index",
        "  - p",
    ]
