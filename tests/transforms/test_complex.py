"""Complex numbers: derivatives through them are JAX's, of them torch's; constants are kept."""

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

import functron as ft
from functron import Mesh, P, lax
from functron.program.parse import parse
from tests.transforms.lives import LIVES

X = np.random.default_rng(0).normal(size=4)
A = 0.5 + 2j


PARTS = {
    "plain": lambda z: z * z,
    "remat": ft.remat(lambda z: z * z),
    "remat-dots": ft.remat(lambda z: z * z, policy=ft.policies.dots),
    "custom_vjp": ft.custom_vjp(
        lambda z: z * z, lambda z: (z * z, z), lambda z, c: (c * 2 * z.conj(),)
    ),
    "custom_jvp": ft.custom_jvp(
        lambda z: z * z, lambda args, ts: (args[0] * args[0], 2 * args[0] * ts[0])
    ),
    "vjp": lambda z: ft.vjp(lambda z: z * z * z / 3, z)[1](torch.ones_like(z))[0].conj(),
    "scan": lambda z: ft.scan(lambda c, z: (c, z * z), z.sum(), z)[1],
    "cond": lambda z: lax.cond(z.real.sum() > -99, lambda z: z * z, lambda z: z, z),
}
MODES = {
    "grad": (
        lambda f: lambda x: ft.sync_gradients(ft.grad(f)(x), P("dp")),
        lambda f: jax.grad(f),
    ),
    "jvp": (
        lambda f: lambda x: ft.jvp(f, (x,), (x,))[1] * x,
        lambda f: lambda x: jax.jvp(f, (x,), (x,))[1] * x,
    ),
    "hvp": (
        lambda f: lambda x: ft.sync_gradients(ft.jvp(ft.grad(f), (x,), (x,))[1], P("dp")),
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
    ),
}


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize(("part", "mode"), [
    *((part, "grad") for part in PARTS), ("remat", "jvp"), ("custom_vjp", "hvp"),
    ("custom_jvp", "jvp"), ("custom_vjp", "jvp"), ("remat", "hvp"), ("scan", "jvp"),
])  # fmt: skip
def test_derivatives_through_complex_numbers_are_jaxs(part, mode, life):
    def loss(x):
        return lax.psum((PARTS[part](x * A) * (1 - 2j)).real.sum(), "dp")

    ours, theirs = MODES[mode]
    with jax.enable_x64(True):
        want = theirs(lambda x: ((x * A) ** 2 * (1 - 2j)).real.sum())(jnp.asarray(X))
    run = ft.shard_map(ours(loss), Mesh(dp=2), P("dp"), P("dp"))
    got = LIVES[life](run)(torch.from_numpy(X))
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_cotangents_of_complex_primals_are_torchs():
    """Of the modulus squared 2 z, which JAX has conjugated; replicated ones count once."""
    z = torch.tensor([1 + 2j, 3 - 1j])
    modulus = lambda z: (z * z.conj()).real.sum()
    for f in (modulus, ft.remat(modulus)):
        torch.testing.assert_close(ft.vjp(f, z)[1](torch.ones(()))[0], 2 * z)
        torch.testing.assert_close(torch.func.grad(f)(z), 2 * z)
    torch.testing.assert_close(ft.vjp(lambda z: A * z, z)[1](z)[0], z * np.conj(A))
    mapped = ft.shard_map(
        lambda z, x: lax.psum((x * z.abs().square().sum()).sum(), "dp"),
        Mesh(dp=2), (P(), P("dp")), P(),
    )  # fmt: skip
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(torch.func.grad(mapped)(z, x), 6 * z)


def test_tangents_of_complex_primals():
    z, t = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([2j, 1 + 1j])
    for push in (lambda f: ft.jvp(f, (z,), (t,))[1], lambda f: ft.linearize(f, z)[1](t)):
        torch.testing.assert_close(push(lambda z: z * z), 2 * z * t)
        torch.testing.assert_close(push(lambda z: z.abs().square()), 2 * (z.conj() * t).real)
    x = torch.tensor([1.0, 2.0])
    out = ft.jvp(lambda x: x[0] * (1 + 2j), (x,), (x,))
    assert [y.dtype for y in out] == [torch.complex64] * 2
    torch.testing.assert_close(ft.jacfwd(lambda x: x * 1j)(x), torch.eye(2) * 1j)


def test_what_has_no_one_convention_is_refused():
    with pytest.raises(TypeError, match=r"got torch.complex64; wanted a floating-point tensor"):
        ft.grad(lambda z: z.abs().sum())(torch.tensor([1j]))
    with pytest.raises(
        TypeError, match=r"got torch.complex64; wanted .* return torch.view_as_real"
    ):
        ft.jacrev(lambda x: x * 1j)(torch.ones(2))


@pytest.mark.parametrize("number", [1 - 2j, 1j, complex(-0.0, -0.0), complex("nan"), 1e-300j])
def test_constants_are_parsed_as_they_were_printed(number):
    program = ft.trace(lambda x: x * number + torch.full((2,), number))(torch.ones(2))
    again = parse(str(program))
    assert str(again) == str(program)
    got, want = again(torch.ones(2)), torch.ones(2) * number + torch.full((2,), number)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_other_notations_of_complex_numbers_are_refused():
    text = str(ft.trace(lambda x: x * 1j)(torch.ones(2)))
    with pytest.raises(ValueError, match="two floats"):
        parse(text.replace("complex(0.0, 1.0)", "complex(0.0)"))
