"""State in host memory: the numbers of the optimizer itself, one group of parameters at a time."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, optim, shard_map, tree
from functron.spmd import spec_axes

SHAPES = {"a": (8, 6), "blocks": {"norm": (3, 4), "up": (3, 4, 128)}, "z": (5,)}
SPECS = {"a": P("tp"), "blocks": {"norm": P(), "up": P(None, "tp")}, "z": P()}


def values(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes, structure = tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return tree.unflatten(structure, leaves)


RATE = optim.linear(0.1, 10)
MASK = {"a": True, "blocks": {"norm": False, "up": True}, "z": False}
MATRICES = {
    "a": optim.Matrix(0, 1, 8, 6),
    "blocks": {"norm": False, "up": optim.Matrix(1, 1, 4, 128)},
    "z": False,
}
OPTIMIZERS = {
    "adamw": optim.adamw(RATE, weight_decay=0.1, mask=MASK),
    "masters": optim.with_fp32_masters(optim.adamw(RATE, mask=optim.not_norm_or_bias)),
    "int8": optim.adamw(RATE, mu_dtype="int8", nu_dtype="int8", quantised={
        "a": False, "blocks": {"norm": False, "up": True}, "z": False}),
    "momentum": optim.sgd(RATE, 0.9),
    "muon": optim.muon(RATE, MATRICES),
}  # fmt: skip


def train(optimizer, params):
    grads = [tree.map(lambda p, g: g.to(p.dtype), params, values(10 + step)) for step in range(3)]
    state = optimizer.init(params)
    for grad in grads:
        params, state = optimizer.step_(grad, state, params)
    return params, state


@pytest.mark.parametrize("group_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_and_structure_are_the_optimizers(name, dtype, group_bytes):
    inner = OPTIMIZERS[name]
    want = train(inner, values(0, dtype))
    got = train(optim.offload(inner, group_bytes=group_bytes), values(0, dtype))
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        # a group without any 8-bit moments runs fused, which rounds float32 in another order
        rtol = 1e-6 if name == "int8" and dtype == torch.float32 else 0
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, msg=lambda m, at=path: at + m)


def test_pure_updates():
    inner = OPTIMIZERS["masters"]
    params, grads = values(0, torch.bfloat16), values(1, torch.bfloat16)
    wanted = inner.update(grads, inner.init(params), params)
    outer = optim.offload(inner)
    got = outer.update(grads, outer.init(params), params)
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=3, tp=2)], ids=str)
def test_under_zero_on_a_mesh(mesh):
    inner = OPTIMIZERS["masters"]
    want, _ = train(inner, values(0, torch.bfloat16))
    shards = optim.shard_specs(values(0), SPECS, mesh)
    optimizer = optim.zero(optim.offload(inner, group_bytes=1), SPECS, shards)

    def program(params, grads):
        shares = tree.map(_share, grads, SPECS)
        grads = ft.sync_gradients(ft.assume_shares(shares), SPECS, optimizer.grad_specs(SPECS))
        return optimizer.step_(grads, optimizer.init(params), params)[0]

    params = values(0, torch.bfloat16)
    grads = values(10, torch.bfloat16)
    got = shard_map(program, mesh, (SPECS, SPECS), SPECS, donate=0)(params, grads)
    want, _ = inner.step_(grads, inner.init(values(0, torch.bfloat16)), values(0, torch.bfloat16))
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path


def _share(grad, spec):
    """This rank's share of a gradient that some ranks have: all of it on the first of them."""
    index = ft.lax.axis_index("dp") + (0 if "tp" in spec_axes(spec) else ft.lax.axis_index("tp"))
    return torch.where(torch.as_tensor(index == 0), grad, torch.zeros_like(grad))


@pytest.mark.gpu
def test_the_device_holds_no_state():
    params = tree.map(torch.Tensor.cuda, values(0, torch.bfloat16))
    inner = OPTIMIZERS["masters"]
    optimizer = optim.offload(inner, group_bytes=1)
    got, state = train(optimizer, params)
    assert all(
        leaf.device.type == "cpu" and leaf.is_pinned() for leaf in tree.leaves(state) if leaf.dim()
    )
    want, _ = train(inner, tree.map(torch.Tensor.cuda, values(0, torch.bfloat16)))
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path
