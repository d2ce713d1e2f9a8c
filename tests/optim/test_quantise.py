"""Moments in 8 bits: the paper's code, its error, and trainings that it does not change much."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron import Mesh, P, optim, shard_map, tree
from functron.optim.low_precision import values
from functron.spmd.params import Normal, ParamDef, abstract_params


def paper_values(signed):
    """Dettmers et al. 2022, section 2.1 and figure 2: 8 bits, of which one signs.

    A number is a run of zero bits that gives the exponent, a 1, and a fraction in what bits are
    left, linear between 0.1 and 1.
    """
    found = {0.0, 1.0}
    bits = 7 if signed else 8
    for zeros in range(7):
        count = 2 ** (bits - 1 - zeros)  # fractions after `zeros` zeros and the indicator
        edges = np.linspace(0.1, 1, count + 1)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0**-zeros
        found |= set(means) | (set(-means) if signed else set())
    return sorted(found)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_the_papers(signed):
    want = paper_values(signed)
    assert len(want) == 256
    np.testing.assert_allclose(values(signed), want, rtol=1e-12)


@given(seed=st.integers(0, 1000), signed=st.booleans(), log_scale=st.floats(-20, 10))
def test_every_element_is_the_nearest_value_times_its_blocks_largest(seed, signed, log_scale):
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(seed)) * 10**log_scale
    x = x if signed else x.square()
    q = optim.quantise(x, signed=signed)
    assert q.codes.dtype == torch.uint8
    assert q.codes.shape == x.shape
    assert q.scales.shape == (3, 2)
    got = optim.dequantise(q, signed=signed)
    table = np.array(paper_values(signed))
    for row, block in np.ndindex(3, 2):
        part = slice(64 * block, 64 * block + 64)
        scale = x[row, part].abs().max().item()
        unit = x[row, part].double().numpy() / scale
        nearest = np.abs(unit[:, None] - table).min(1)
        error = np.abs(unit - got[row, part].double().numpy() / scale)
        np.testing.assert_allclose(error, nearest, atol=1e-6)


def test_zeros_and_the_largest_are_exact():
    x = torch.tensor([0.0, 3.0, 3.0, 0.0] * 16)
    assert torch.equal(optim.dequantise(optim.quantise(x, signed=True), signed=True), x)
    zeros = torch.zeros(2, 64)
    assert torch.equal(optim.dequantise(optim.quantise(zeros, signed=False), signed=False), zeros)


DEFS = {
    "large": ParamDef((2, 64, 128), ("layers", None, None), Normal(1.0)),
    "ragged": ParamDef((100, 100), (None, None), Normal(1.0)),
    "small": ParamDef((64, 32, 64), ("layers", None, None), Normal(1.0)),
    "norm": ParamDef((100, 1024), ("layers", None), Normal(1.0)),
}


def test_which_leaves_are_quantised_depends_on_global_shapes():
    chosen = {"large": True, "ragged": False, "small": False, "norm": False}
    assert optim.quantisable(DEFS) == chosen
    optimizer = optim.scale_by_adam(mu_dtype="int8", nu_dtype="int8", quantised=chosen)
    state = optimizer.init(abstract_params(DEFS))
    kinds = {name: isinstance(leaf, optim.QuantisedMoment) for name, leaf in state.mu.items()}
    assert kinds == chosen
    assert state.nu["small"].dtype == torch.float32


def test_a_shard_that_ends_within_a_block_is_refused():
    specs = {"large": P(None, None, "dp"), "ragged": P("dp"), "small": P(), "norm": P()}
    optim.check_blocks(DEFS, specs, Mesh(dp=2))
    with pytest.raises(ValueError, match="cannot be sharded") as caught:
        optim.check_blocks(DEFS, specs, Mesh(dp=4))
    assert "large: got shards of 32 along the last dim" in str(caught.value)
    optimizer = optim.scale_by_adam(mu_dtype="int8", quantised=optim.quantisable(DEFS))
    with pytest.raises(ValueError, match="large: got a shard of shape"):
        optimizer.init({name: torch.ones(2, 64, 32) for name in DEFS})


def least_squares(optimizer, steps=60):
    """The loss before and after training a linear map."""
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(256, n, generator=generator) for n in (64, 128))
    params = {"w": torch.zeros(64, 128)}
    state = optimizer.init(params)
    for _ in range(steps):
        grads = {"w": x.T @ (x @ params["w"] - target) / len(x)}
        params, state = optimizer.step_(grads, state, params)
    return (x @ params["w"] - target).square().mean().item(), state


@pytest.mark.parametrize(
    ("dtypes", "bytes_per_parameter", "tolerance"),
    [
        ({"mu_dtype": torch.bfloat16, "nu_dtype": torch.bfloat16}, 4, 2e-3),
        ({"mu_dtype": torch.bfloat16, "nu_dtype": torch.float32}, 6, 2e-3),
        ({"mu_dtype": "int8", "nu_dtype": "int8"}, 2 * (1 + 4 / 64), 1e-2),
        ({"mu_dtype": "int8", "nu_dtype": torch.float32}, 5 + 4 / 64, 1e-2),
        ({"mu_dtype": "fp8", "nu_dtype": "fp8"}, 2 * (1 + 4 / 64), 1e-2),
        ({"mu_dtype": "fp8", "nu_dtype": "int8"}, 2 * (1 + 4 / 64), 1e-2),
    ],
)
def test_training_is_that_of_float32_moments(dtypes, bytes_per_parameter, tolerance):
    """Relative to the loss: rounding errors of 2^-9, and of 1/2 in 64 a decade or of 2^-4, average
    out."""
    want, _ = least_squares(optim.adamw(1e-2))
    got, state = least_squares(optim.adamw(1e-2, **dtypes))
    assert got == pytest.approx(want, rel=tolerance)
    assert got != want
    moments = tree.nbytes((state[0].mu, state[0].nu))
    assert moments == bytes_per_parameter * 64 * 128


def decoded(moment, signed):
    """The values of the 8-bit codes in float64, by the paper's table or that of ml_dtypes."""
    scales = np.repeat(moment.scales.double().numpy(), 64, -1)
    if moment.codes.dtype == torch.uint8:
        return np.array(paper_values(signed))[moment.codes.numpy()] * scales
    codes = moment.codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    found = codes.astype(np.float64) / 448 * scales
    return found if signed else found**2


def e4m3_values(signed):
    """All numbers of the format over the largest."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.unique(every[np.isfinite(every) & ((every >= 0) | signed)]) / 448


@given(seed=st.integers(0, 1000), signed=st.booleans(), log_scale=st.floats(-15, 8))
def test_numbers_and_roots_of_squares_are_the_nearest_of_fp8(seed, signed, log_scale):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 128, generator=draw) * torch.rand(3, 128, generator=draw) ** 6
    x = x * 10**log_scale
    x = x if signed else x.square()
    q = optim.quantise(x, signed=signed, coding="fp8")
    assert q.codes.dtype == torch.float8_e4m3fn
    assert q.scales.dtype == torch.float32
    kept = x.double().numpy() if signed else np.sqrt(x.double().numpy())
    got = decoded(q, signed) if signed else np.sqrt(decoded(q, signed))
    scales = np.repeat(np.abs(kept).reshape(3, 2, 64).max(-1), 64, -1)
    unit = kept / scales
    nearest = np.abs(unit[..., None] - e4m3_values(signed)).min(-1)
    np.testing.assert_allclose(np.abs(unit - got / scales), nearest, atol=1e-7)
    assert (np.abs(unit - got / scales) <= np.maximum(np.abs(unit) / 16, 2.2e-6)).all()
    np.testing.assert_allclose(optim.dequantise(q, signed=signed), decoded(q, signed), rtol=1e-6)


def test_fp8_keeps_nan_and_infinity():
    """Which 8-bit integers have no code for."""
    x = torch.ones(64)
    x[3] = torch.nan
    assert optim.dequantise(optim.quantise(x, signed=True, coding="fp8"), signed=True).isnan().all()


@pytest.mark.parametrize("coding", ["int8", "fp8"])
def test_every_one_of_20_steps_is_the_papers(coding):
    """Section 2: moments are read from 8 bits, updated, used in full precision, and stored again.

    Each step in float64 from what the one before has stored: else one code that a rounding error
    decides otherwise would be another training.
    """
    rate, b1, b2, eps, decay = 0.01, 0.9, 0.95, 1e-8, 0.1
    optimizer = optim.adamw(
        rate,
        b1,
        b2,
        eps,
        weight_decay=decay,
        mu_dtype=coding,
        nu_dtype=coding,
        quantised={"w": True},
    )
    source = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(8, 128, generator=source)}
    state = optimizer.init(params)
    for count in range(1, 21):
        grad = torch.randn(8, 128, generator=source) * torch.rand(8, 1, generator=source) ** 4
        g, p = (x.double().numpy().copy() for x in (grad, params["w"]))
        moments = state[0].mu["w"], state[0].nu["w"]
        m, v = (decoded(x, signed) for x, signed in zip(moments, (True, False), strict=True))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        update = m / (1 - b1**count) / (np.sqrt(v / (1 - b2**count)) + eps)
        params, state = optimizer.step_({"w": grad}, state, params)
        wanted = p - rate * (update + decay * p)
        np.testing.assert_allclose(params["w"].double().numpy(), wanted, rtol=1e-5, atol=1e-6)
        for name, x, signed in (("mu", m, True), ("nu", v, False)):
            got = decoded(getattr(state[0], name)["w"], signed)
            if coding == "fp8" and not signed:
                x, got = np.sqrt(x), np.sqrt(got)
            scales = np.repeat(np.abs(x).reshape(8, 2, 64).max(-1), 64, -1)
            table = np.array(paper_values(signed)) if coding == "int8" else e4m3_values(signed)
            unit, got = x / scales, got / scales
            nearest = np.abs(unit[..., None] - table).min(-1)
            np.testing.assert_allclose(np.abs(unit - got), nearest, atol=1e-6)


@pytest.mark.parametrize("coding", ["int8", "fp8"])
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=2, tp=2)], ids=str)
def test_shards_have_the_codes_of_the_whole(mesh, coding):
    """Blocks do not cross shards, so on every mesh the same numbers are rounded in the same way."""
    specs = {"w": P(None, "tp"), "b": P("tp")}
    params = {
        "w": torch.randn(64, 256, generator=torch.Generator().manual_seed(0)),
        "b": torch.ones(256),
    }
    optimizer = optim.adamw(
        0.1, mu_dtype=coding, nu_dtype=coding, quantised={"w": True, "b": False}
    )

    def train(params):
        state = optimizer.init(params)
        for _ in range(3):
            params, state = optimizer.step_(tree.map(torch.cos, params), state, params)
        return params, state

    want = train(tree.map(torch.clone, params))
    shards = optim.shard_specs(params, specs, mesh)
    assert shards == {"w": P("dp", "tp"), "b": P(("tp", "dp"))}
    got = shard_map(train, mesh, (shards,), (shards, optimizer.specs(shards)), donate=0)(params)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        assert torch.equal(a.float(), b.float()), path
