"""State in host memory: the numbers of the optimizer itself, one group of parameters at a time."""

import itertools

import pytest
import torch

import functron as ft
from functron import Mesh, P, optim, shard_map, tree
from functron.spmd import spec_axes
from tests.streams import RecordedStreams

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
    grads = [tree.map(lambda p, g: g.to(p), params, values(10 + step)) for step in range(3)]
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


CUT = {
    "adamw": (4, OPTIMIZERS["adamw"]),
    "masters": (12, OPTIMIZERS["masters"]),
    "momentum": (2, OPTIMIZERS["momentum"]),
    "lion": (8, optim.with_fp32_masters(optim.lion(RATE, mask=MASK))),
    "chain": (4, optim.chain(
        optim.zero_nans(), optim.clip(0.5), optim.ema(0.9), optim.add_decayed_weights(RATE),
        optim.sgd(RATE, 0.9, nesterov=True))),
    "average": (6, optim.with_average(optim.chain(optim.trace(0.9), optim.sign_sgd(0.1)), 0.9)),
    "groups": (4, optim.where(tree.map(lambda _: True, MASK), optim.adam(RATE), optim.scale(1))),
    "injected": (4, optim.inject_hyperparams(optim.adamw, "mask")(
        RATE, mask=optim.not_norm_or_bias)),
}  # fmt: skip
"""And the bytes of state of a bfloat16 parameter."""
WHOLE = {
    "int8": OPTIMIZERS["int8"],
    "muon": OPTIMIZERS["muon"],
    "soap": optim.soap(RATE, MATRICES, frequency=2),
    "adafactor": optim.adafactor(0.1, 4, momentum=0.9),
    "adam-mini": optim.adam_mini(RATE, tree.map(lambda m: optim.MomentBlock((0,)), MASK)),
    "stochastic": optim.with_stochastic_rounding(optim.adamw(RATE)),
    "any mask": optim.adamw(RATE, mask=lambda params: tree.map(lambda p: len(p) > 3, params)),
    "state of other shapes": optim.adafactor(0.1, 4)._replace(elementwise=True),
}


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_by_streams_in_pieces(name):
    """Bit for bit the inner one's; nothing is overwritten early; two pieces' state at most."""
    size, inner = CUT.get(name) or (None, WHOLE[name])
    dtype, group = torch.bfloat16, 1024
    want = train(inner, values(0, dtype))
    streams = RecordedStreams()
    with streams.watching():
        got = train(optim.offload(inner, group_bytes=group, streams=streams), values(0, dtype))
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path
    for path, leaf in zip(tree.paths(got[1]), tree.leaves(got[1]), strict=True):
        assert not leaf.dim() or "key" in path or not streams.on_device(leaf)
        streams.read_by_host(leaf)
    if size is None:  # one buffer a step, for the leaf of 3 KiB
        assert len(streams.near) == 3
        return
    assert [x.numel() for x in streams.near] == [group // 2 * size] * 2 * 3
    num_params = sum(p.numel() for p in tree.leaves(values(0)))
    assert sum(x.numel() for x in streams.far) == num_params * size
    # copies in, updates and copies back overlap, each with each
    lanes = [[op for op in streams.log if op.stream == lane] for lane in ("1", "compute", "2")]
    for these, those in itertools.combinations(lanes, 2):
        assert any(not (a.after(b) or b.after(a)) for a in these for b in those)


def test_buffers_of_a_step_that_fails_are_free_when_the_copies_are_over():
    inner, streams = OPTIMIZERS["adamw"], RecordedStreams()

    def fails(grads, state, params):
        raise FloatingPointError

    params = values(0)
    state = optim.offload(inner, group_bytes=1024, streams=streams).init(params)
    failing = optim.offload(inner._replace(step_=fails), group_bytes=1024, streams=streams)
    with pytest.raises(FloatingPointError):
        failing.step_(values(1), state, params)
    streams.run(streams.current(torch.device("cpu")), "what has the memory next", [], streams.near)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_step_under_a_transform_is_refused_with_its_state_elsewhere(transform):
    """The meta device stands for the host's memory of a GPU; with all on one device it is taken."""
    optimizer = optim.offload(OPTIMIZERS["adamw"])
    params, grads = (tree.map(lambda x: torch.stack([x, 2 * x]), values(n)) for n in (0, 1))
    state = torch.func.vmap(optimizer.init)(params)

    def step(grads, state, params):
        return optimizer.step_(grads, state, params)[0]

    def taken(state):
        if transform == "vmap":
            return torch.func.vmap(step)(grads, state, params)
        one = [tree.map(lambda x: x[0], each) for each in (grads, state, params)]
        total = lambda *each: sum(x.square().sum() for x in tree.leaves(step(*each)))
        return torch.func.grad(total, argnums=2)(*one)

    assert not tree.leaves(taken(state))[0].is_meta
    away = tree.map(lambda x: x.to("meta") if x.dim() > 1 else x, state)
    with pytest.raises(ValueError, match=rf"got a step under torch.func.{transform} with state on"):
        taken(away)


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
