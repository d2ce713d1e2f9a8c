"""The grouped matrix product against a loop over groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.func import jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import functron as ft
from functron import P
from functron.ops import grouped_matmul as grouped
from functron.ops.grouped_matmul import grouped_matmul, grouped_matmul_weight

ROWS, INNER, OUTER = 7, 3, 5
SIZES = {"some": [2, 0, 4], "all": [3, 2, 2], "one": [0, 7, 0], "none": [0, 0, 0]}


def dense(x, w, sizes):
    """Every row's product with the weights that a mask chooses: no loop, no order assumed."""
    ends = sizes.cumsum(0)
    at = torch.arange(x.shape[0])
    mask = (at[:, None] < ends) & (at[:, None] >= ends - sizes)
    return torch.einsum("rg,rd,gdf->rf", mask.to(x.dtype), x, w)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture(params=list(SIZES))
def sizes(request):
    return torch.tensor(SIZES[request.param])


def test_value_and_gradients(randn, sizes):
    x, w, dy = randn(ROWS, INNER), randn(3, INNER, OUTER), randn(ROWS, OUTER)
    expected, pullback = vjp(lambda x, w: dense(x, w, sizes), x, w)
    actual, pull = vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    close(actual, expected)
    close(pull(dy), pullback(dy))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    close(torch.autograd.grad(grouped_matmul(*leaves, sizes), leaves, dy), pullback(dy))


def test_transposed_weights(randn):
    sizes = torch.tensor(SIZES["some"])
    x, w = randn(ROWS, INNER), randn(3, OUTER, INNER).mT
    close(grouped_matmul(x, w, sizes), dense(x, w, sizes))


def test_of_weight(randn, sizes):
    x, y = randn(ROWS, INNER), randn(ROWS, OUTER)
    _, pullback = vjp(lambda w: dense(x, w, sizes), randn(3, INNER, OUTER))
    close(grouped_matmul_weight(x, y, sizes, 3), pullback(y)[0])


def test_derivatives_of_derivatives(randn, sizes):
    x, w = randn(4, 2), randn(3, 2, 3)
    sizes = sizes.clamp(max=2) if sizes.sum() < 7 else torch.tensor([1, 2, 1])
    leaves = x.requires_grad_(), w.requires_grad_()
    function = lambda x, w: grouped_matmul(x, w, sizes).sin()
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    x, w = x.detach(), w.detach()
    ours = lambda x, w: (grouped_matmul(x, w, sizes).sin() ** 2).sum()
    theirs = lambda x, w: (dense(x, w, sizes).sin() ** 2).sum()
    for outer in (jacfwd, jacrev):
        close(
            outer(jacrev(ours, (0, 1)), (0, 1))(x, w), outer(jacrev(theirs, (0, 1)), (0, 1))(x, w)
        )
    third = lambda f: jacrev(jacrev(jacrev(f, 1), 0), 1)(x, w)
    close(third(ours), third(theirs))


def test_forward_mode(randn, sizes):
    primals = randn(ROWS, INNER), randn(3, INNER, OUTER)
    tangents = randn(ROWS, INNER), randn(3, INNER, OUTER)
    close(
        jvp(lambda x, w: grouped_matmul(x, w, sizes), primals, tangents),
        jvp(lambda x, w: dense(x, w, sizes), primals, tangents),
    )


@pytest.mark.parametrize("mapped", itertools.product((None, 0, 1), (None, 0, 2), (None, 0)))
def test_vmap(randn, mapped):
    if mapped == (None, None, None):
        pytest.skip("nothing is mapped")
    x, w, sizes = randn(ROWS, INNER), randn(3, INNER, OUTER), torch.tensor([2, 0, 4])
    if mapped[0] is not None:
        x = torch.stack([x, x.flip(0)], mapped[0])
    if mapped[1] is not None:
        w = torch.stack([w, -w.flip(0)], mapped[1])
    if mapped[2] is not None:
        sizes = torch.tensor([[2, 0, 4], [0, 7, 0]])

    def both(f):
        def gradients(x, w, sizes):
            y, pull = vjp(lambda x, w: f(x, w, sizes), x, w)
            return y, *pull(y.cos())

        return vmap(gradients, in_dims=mapped)(x, w, sizes)

    close(both(grouped_matmul), both(dense))

    def outside(f):
        y, pull = vjp(lambda x, w: vmap(f, in_dims=mapped)(x, w, sizes), x, w)
        return pull(y.cos())

    close(outside(grouped_matmul), outside(dense))


@pytest.mark.parametrize("inner", [(0, None, 0), (0, 0, 0), (None, 0, None), (0, None, None)])
@pytest.mark.parametrize("outer", [(0, None, 0), (0, 0, 0), (None, 0, None), (None, 0, 0)])
def test_nested_vmaps(randn, outer, inner):
    counts = torch.tensor([[[2, 0, 4], [0, 7, 0]], [[1, 2, 3], [0, 0, 0]], [[3, 3, 1], [1, 1, 1]]])
    shapes = (ROWS, INNER), (3, INNER, OUTER), (3,)
    args = []
    for index, shape in enumerate(shapes):
        lead = tuple(n for n, dims in ((3, outer), (2, inner)) if dims[index] is not None)
        if index < 2:
            args.append(randn(*lead, *shape))
        else:
            spare = counts if outer[2] is not None else counts[0]
            args.append(spare if inner[2] is not None else spare.select(-2, 0))

    def run(f):
        def gradients(x, w, sizes):
            y, pull = vjp(lambda x, w: f(x, w, sizes), x, w)
            return y, *pull(y.cos())

        return vmap(vmap(gradients, in_dims=inner), in_dims=outer)(*args)

    close(run(grouped_matmul), run(dense))


def test_low_precision(randn):
    sizes = torch.tensor(SIZES["some"])
    x, w = randn(ROWS, INNER).bfloat16(), randn(3, INNER, OUTER).bfloat16()
    y = grouped_matmul(x, w, sizes)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, dense(x.double(), w.double(), sizes).bfloat16())


def run_kernels(device, sizes, rows=24, inner=16, outer=8):
    """Through torch's kernel: ours and the oracle's value and gradients."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(*shape, generator=generator).bfloat16().to(device)
        for shape in ((rows, inner), (3, inner, outer), (rows, outer))
    )
    sizes = torch.tensor(sizes, device=device)
    wide = lambda *tensors: [value.cpu().double() for value in tensors]
    expected, pullback = vjp(lambda x, w: dense(x, w, sizes.cpu()), *wide(x, w))
    actual = (
        grouped.kernel_product(x, w, sizes),
        grouped.kernel_product(dy, w.mT, sizes),
        grouped.kernel_weight_product(x, dy, sizes),
    )
    for got, want in zip(actual, (expected, *pullback(dy.cpu().double())), strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=2e-2, atol=2e-2)


KERNEL_SIZES = [[8, 0, 11], [0, 24, 0], [0, 0, 0], [5, 6, 7]]


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("sizes", KERNEL_SIZES)
def test_torch_kernel(sizes):
    """How torch's kernel is called; on the CPU it is a loop, but takes the same arguments."""
    run_kernels("cpu", sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", KERNEL_SIZES)
def test_torch_kernel_on_gpu(sizes):
    run_kernels("cuda", sizes)
    assert grouped.has_kernel(*(torch.ones(8, 8, device="cuda").bfloat16(),) * 2,
                              torch.tensor([8], device="cuda"))  # fmt: skip


def test_is_one_operation_when_traced(randn):
    sizes = torch.tensor(SIZES["some"])

    def loss(x, w, sizes):
        return (grouped_matmul(x, w, sizes) ** 2).sum()

    step = lambda x, w, sizes: ft.value_and_grad(loss, (0, 1))(x, w, sizes)
    args = randn(ROWS, INNER), randn(3, INNER, OUTER), sizes
    program = ft.trace(step)(*args)
    names = [equation.name for equation in program.block.equations]
    assert names.count("grouped_matmul") == 2
    assert names.count("grouped_matmul_weight") == 1
    assert not {"mm", "bmm"} & set(names)
    assert program.cost().model_flops == 3 * 2 * ROWS * INNER * OUTER
    with FlopCounterMode(display=False) as counter:
        expected = step(*args)
    assert counter.get_total_flops() == program.cost().model_flops
    close(program(*args), expected)
    assert not program.diff(str(program))
    close(ft.jit(step)(*args), expected)


@pytest.mark.parametrize(("policy", "again"), [("dots", 0), ("nothing", 2)])
def test_remat_keeps_it_among_the_dots(randn, policy, again):
    sizes = torch.tensor(SIZES["some"])

    def layer(x, w, v):
        return grouped_matmul(grouped_matmul(x, w, sizes).sin(), v, sizes).cos()

    def loss(x, w, v):
        return ft.remat(layer, policy=getattr(ft.policies, policy))(x, w, v).sum()

    args = randn(ROWS, INNER), randn(3, INNER, OUTER), randn(3, OUTER, INNER)
    program = ft.trace(ft.grad(loss, (0, 1, 2)))(*args)
    phases = [e.where.phase for e in program.block.equations if e.name == "grouped_matmul"]
    assert phases.count("recompute") == again
    plain = lambda x, w, v: dense(dense(x, w, sizes).sin(), v, sizes).cos().sum()
    close(ft.grad(loss, (0, 1, 2))(*args), torch.func.grad(plain, (0, 1, 2))(*args))


def test_compiled_simulation(randn):
    """Of simulated ranks, one operation for all of them."""
    mesh = ft.Mesh(dp=2, ep=2)
    sizes = torch.tensor([[2, 0, 4], [0, 7, 0], [1, 1, 1], [0, 0, 0]]).reshape(-1)
    specs = (P(("dp", "ep")), P("ep"), P(("dp", "ep")))

    def local(x, w, sizes):
        return grouped_matmul(x, w, sizes)

    f = ft.shard_map(local, mesh, specs, P(("dp", "ep")))
    args = randn(4 * ROWS, INNER), randn(6, INNER, OUTER), sizes
    step = ft.value_and_grad(lambda x, w, sizes: f(x, w, sizes).sin().sum(), (0, 1))
    blocks = zip(args[0].split(ROWS), (args[1].split(3)) * 2, sizes.split(3), strict=True)
    close(f(*args), torch.cat([dense(*block) for block in blocks]))
    close(ft.jit(step)(*args), step(*args))


def test_a_traced_gradient_is_evaluated_under_vmap(randn):
    from functron.program.interpreter import ambient_inputs, run_block

    sizes = torch.tensor(SIZES["some"])
    step = lambda x, w: ft.grad(lambda w: (grouped_matmul(x, w, sizes) ** 2).sum())(w)
    x, w = randn(2, ROWS, INNER), randn(3, INNER, OUTER)
    program = ft.trace(step)(x[0], w)

    def again(x):
        values = dict(zip(program.block.inputs, (x, w), strict=False))
        return run_block(program.block, {**ambient_inputs(program.inputs), **values})[0]

    close(vmap(again)(x), torch.stack([step(row, w) for row in x]))


def test_refusals(randn):
    x, w = randn(4, 3), randn(2, 3, 5)
    with pytest.raises(ValueError, match=r"w: got \(2, 3, 5\) torch.float32; wanted \[G, D, F\]"):
        grouped_matmul(x, w.float(), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="sum to 5 for 4 rows"):
        grouped_matmul(x, w, torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="int64"):
        grouped_matmul(x, w, torch.tensor([3, 1], dtype=torch.int32))
