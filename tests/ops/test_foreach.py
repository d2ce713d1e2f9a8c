"""foreach_: the same numbers as a loop over ranks, through views, on any nesting of vmaps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functron.ops.foreach import foreach_
from functron.spmd import Mesh, P, shard_map

vmap = torch.func.vmap


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def add_(params, updates, paths=None, dense=False):
    foreach_(
        torch._foreach_add_, {"params": params}, {"updates": updates}, paths=paths, dense=dense
    )


def test_plain_tensors_are_updated_in_place_in_groups_of_one_dtype():
    params = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.full((2,), 2.0)]
    seen = []

    def record(ps, us):
        seen.append({p.dtype for p in ps})
        torch._foreach_add_(ps, us)

    foreach_(record, {"params": params}, {"updates": [torch.ones_like(p) for p in params]})
    assert [p.tolist() for p in params] == [[2, 2], [2, 2, 2], [3, 3]]
    assert sorted(map(len, seen)) == [1, 1]


def test_parameters_that_require_grad_are_updated_outside_the_tape():
    param = torch.ones(2, requires_grad=True)
    add_([param], [torch.ones(2)])
    assert param.tolist() == [2, 2]
    assert param.grad_fn is None


def test_no_rows_calls_nothing():
    foreach_(lambda *columns: pytest.fail("called"), {"params": []}, {"updates": []})


@given(
    depth=st.integers(1, 3),
    in_dim=st.integers(0, 2),
    skip=st.sets(st.integers(0, 2)),
    dense=st.booleans(),
)
def test_nested_vmaps_equal_broadcast_addition(depth, in_dim, skip, dense):
    """The update is unbatched at the levels in `skip`; both have own dims [2, 3]."""
    sizes = [4, 5, 6][:depth]
    skip = {level for level in skip if level < depth}
    param = random(*sizes, 2, 3)
    update = random(*[size for i, size in enumerate(sizes) if i not in skip], 2, 3, seed=1)
    wide = update
    for level in sorted(skip):
        wide = wide.unsqueeze(level)
    expected = param + wide

    # The outermost level's batch dim sits at `in_dim` of what it maps, and so on inwards.
    def body(p, u):
        add_([p], [u], dense=dense)
        return p.new_zeros(())

    fn = body
    view_p, view_u = param, update
    for level in reversed(range(depth)):
        fn = vmap(fn, in_dims=(in_dim, None if level in skip else in_dim))
    # Batch dim of each level must be at in_dim of the tensor the level sees: build from inside out.
    own_p, own_u = list(range(depth, depth + 2)), list(range(update.dim() - 2, update.dim()))
    for level in reversed(range(depth)):
        own_p.insert(in_dim, level)
        if level not in skip:
            own_u.insert(in_dim, level - len([s for s in skip if s < level]))
    fn(view_p.permute(own_p), view_u.permute(own_u))
    torch.testing.assert_close(param, expected, rtol=0, atol=0)


@pytest.mark.parametrize("transposed", ["params", "updates", "both", "rows"])
def test_dense_functions_see_one_layout(transposed):
    """The CPU fused kernels ignore strides: `dense` must hide them. Oracle: contiguous AdamW."""

    def tensors():
        return [random(5, 7, seed=i).abs() for i in range(4)]

    def adam_(p, m, v, g):
        torch._fused_adamw_(
            p, g, m, v, [], [torch.tensor(3.0)], lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    expected = tensors()
    adam_(*[[x] for x in expected])

    p, m, v, g = tensors()
    turn = lambda x: x.t().contiguous().t()
    if transposed in ("params", "both"):
        p = turn(p)
    if transposed in ("updates", "both"):
        g = turn(g)
    if transposed == "rows":
        p = torch.stack([p, p], 1)[:, 0]
    foreach_(adam_, {"p": [p], "m": [m], "v": [v]}, {"g": [g]}, dense=True)
    for got, want in zip((p, m, v), expected, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-15, atol=0)


def test_shards_of_a_global_tensor_are_updated_through_shard_map():
    """[D, 4D] split over its second dim, as an up projection is; and a leaf replicated over tp."""
    mesh = Mesh(dp=2, tp=4)
    up, scale = random(3, 16), random(3)
    changes = random(3, 16, seed=1), random(3, seed=2)
    expected = up + changes[0], scale + changes[1]

    def step(params, updates):
        add_(params, updates)
        return params

    specs, memory = [P(None, "tp"), P()], [up.data_ptr(), scale.data_ptr()]
    mapped = shard_map(step, mesh, (specs, specs), specs, donate=0)
    up, scale = mapped([up, scale], list(changes))
    assert [up.data_ptr(), scale.data_ptr()] == memory
    torch.testing.assert_close(up, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(scale, expected[1], rtol=0, atol=0)


def test_gradients_that_were_never_synchronised_are_all_named():
    def step(params, updates):
        add_(params, updates, paths=lambda: ["blocks/up", "head", "norm"])
        return torch.zeros(())

    params, updates = [random(2, 4), random(2), random(3)], [random(4, 4), random(2), random(6)]
    specs = [P(None, "tp"), P("tp"), P()], [P("dp", "tp"), P("tp"), P("dp")]
    with pytest.raises(ValueError, match="cannot update params in place") as caught:
        shard_map(step, Mesh(dp=2, tp=2), specs, P())(params, updates)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip(" -") for line in lines] == ["blocks/up", "norm"]
    for line in lines:
        assert "updates that vary over mesh axis 'dp', over which params are replicated" in line
        assert "never synchronised" in line
        assert "call sync_gradients(grads, specs)" in line


def test_a_second_mutated_column_must_vary_where_the_first_does():
    def body(p, m):
        foreach_(lambda ps, ms: None, {"params": [p], "moments": [m]})
        return p

    with pytest.raises(ValueError, match="moments that are replicated over the vmap at level 1"):
        vmap(body, in_dims=(0, None))(random(2, 3), random(3))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap of grad"])
def test_differentiation_is_refused(transform):
    def loss(p):
        add_([p], [p])
        return p.sum()

    calls = {
        "grad": lambda: torch.func.grad(loss)(random(3)),
        "jvp": lambda: torch.func.jvp(loss, (random(3),), (random(3),)),
        "vmap of grad": lambda: vmap(torch.func.grad(loss))(random(2, 3)),
    }
    with pytest.raises(ValueError, match="use the pure `update`"):
        calls[transform]()


def test_columns_must_match():
    with pytest.raises(ValueError, match=r"lengths \{'params': 2, 'updates': 1\}"):
        add_([random(2), random(2)], [random(2)])
    with pytest.raises(ValueError, match=r"w: got updates of shape \(3,\); wanted shape \(2,\)"):
        add_([random(2)], [random(3)], paths=lambda: ["w"])


def test_overlapping_memory_is_refused():
    param = torch.zeros(3).expand(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        add_([param], [torch.ones(2, 3)], dense=True)


def test_traces_to_one_graph_with_the_update_in_place():
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(p, u):
        vmap(lambda a, b: (add_([a], [b]), a.sum())[1], in_dims=(1, 0))(p, u)
        return p

    param, update = random(3, 2), random(2, 3)
    graph = make_fx(step, tracing_mode="fake")(param, update)
    expected = param + update.t()
    torch.testing.assert_close(graph(param, update), expected, rtol=0, atol=0)
    torch.testing.assert_close(param, expected, rtol=0, atol=0)


def test_what_a_tape_would_miss_is_refused():
    w = torch.ones(3, requires_grad=True)
    params, updates = {"params": [2 * w]}, {"updates": [torch.ones(3)]}
    for mutated, read in ((params, updates), ({"params": [torch.ones(3)]}, {"updates": [2 * w]})):
        with pytest.raises(ValueError, match=r"tape records .* derivative would be lost; fix"):
            foreach_(torch._foreach_add_, mutated, read)
    with torch.no_grad():
        foreach_(torch._foreach_add_, params, updates)
    assert params["params"][0].tolist() == [3, 3, 3]
