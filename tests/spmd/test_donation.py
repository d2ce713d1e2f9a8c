"""Donated arguments of a call that does not end are whole, or gone together."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P, optim
from functron.spmd.donation import Donated, Donation
from functron.spmd.mesh import JointCall

MESHES = [Mesh(), Mesh(dp=2), Mesh(dp=2, tp=2)]


def state():
    return {"a": torch.arange(8.0), "b": torch.ones(8), "count": torch.zeros((), dtype=torch.int64)}


def mapped(body, mesh):
    specs = {"a": P(ft.DATA_AXES), "b": P("tp"), "count": P()}
    return ft.shard_map(body, mesh, (specs, P()), specs, donate=0, check=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_nothing_was_written_of_is_whole(mesh, error):
    def body(s, x):
        y = s["a"] + x
        raise error(y.shape)

    given, f = state(), mapped(body, mesh)
    addresses = [leaf.data_ptr() for leaf in given.values()]
    with pytest.raises(error):
        f(given, torch.ones(()))
    for leaf, want, address in zip(given.values(), state().values(), addresses, strict=True):
        assert type(leaf) is torch.Tensor
        assert torch.equal(leaf, want)
        assert leaf.data_ptr() == address
    again = mapped(lambda s, x: {**s, "a": s["a"] + x}, mesh)(given, torch.ones(()))
    assert torch.equal(again["a"], torch.arange(8.0) + 1)


WRITES = {
    "in place": lambda s: s["a"].add_(1),
    "through a view": lambda s: s["a"].view(-1)[:1].zero_(),
    "the counter": lambda s: s["count"].add_(1),
    "by an update": lambda s: optim.apply_updates_(s["a"], torch.ones_like(s["a"])),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_was_written_is_gone_with_all_else(mesh, write):
    def body(s, x):
        write(s)
        raise KeyboardInterrupt

    given, f = state(), mapped(body, mesh)
    with pytest.raises(KeyboardInterrupt) as told:
        f(given, torch.ones(()))
    assert "newest checkpoint" in " ".join(told.value.__notes__)
    assert all(type(leaf) is Donated for leaf in given.values())
    words = (
        r"was being updated when body was interrupted \(KeyboardInterrupt\); fix: go on from the"
    )
    with pytest.raises(
        ValueError, match=f"argument 0/a: got a tensor that {words}.*2 more like it"
    ):
        f(given, torch.ones(()))
    with pytest.raises(ValueError, match=words):
        given["b"] + 1
    assert "was being updated" in repr(given["b"])


def test_a_fused_update_counts_before_it_writes(monkeypatch):
    params, grads = {"w": torch.ones(4)}, {"w": torch.ones(4)}
    adam = optim.adamw(0.1)

    def half(p, *columns, **options):
        p[0].data.fill_(7.0)  # as a kernel, which tells nobody
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_fused_adamw_", half)

    def body(s, g):
        return adam.step_(g, s[1], s[0])

    given = (params, adam.init(params))
    with pytest.raises(KeyboardInterrupt):
        ft.shard_map(body, Mesh(), P(), P(), donate=0)(given, grads)
    assert type(params["w"]) is Donated


def test_a_compiled_update_counts_before_it_writes(monkeypatch):
    from functron.compiler import executable

    def body(s, x):
        y = ft.scan(lambda c, w: (torch.tanh(c @ w), None), x, s["w"])[0]
        return {"w": s["w"] + y.sum()}

    made = executable._run_eagerly

    def failing(*args, **named):
        run = made(*args, **named)

        def kernel(operands):
            out = run(list(operands))
            if not kernel.broken:
                return out
            raise KeyboardInterrupt

        kernel.broken = False
        kernels.append(kernel)
        return kernel

    kernels = []
    monkeypatch.setattr(executable, "_run_eagerly", failing)
    f = ft.jit(body, donate=0, backend="eager")
    x = torch.ones(2, 2)
    want = f({"w": torch.ones(3, 2, 2)}, x)["w"]
    assert len(kernels) > 1
    fates = []
    for kernel in kernels:
        kernel.broken, given = True, {"w": torch.ones(3, 2, 2)}
        with pytest.raises(KeyboardInterrupt):
            f(given, x)
        kernel.broken = False
        fates.append(type(given["w"]))
        if type(given["w"]) is torch.Tensor:
            assert torch.equal(f(given, x)["w"], want)
    assert set(fates) == {torch.Tensor, Donated}


def test_interrupted_twice():
    """Where nothing of a call is left to tell, its tensors still know whether they are whole."""
    tensors = [torch.ones(3), torch.ones(3)]
    given = Donation(JointCall("step", None, alike=True))
    taken = given.take("0", tensors[0])
    assert torch.equal(taken, torch.ones(3))
    assert type(tensors[0]) is Donated
    # interrupted here, and again before the with block could end
    assert torch.equal(tensors[0] + tensors[1], torch.full((3,), 2.0))
    assert type(tensors[0]) is torch.Tensor

    given = Donation(JointCall("step", None, alike=True))
    for path, tensor in enumerate(tensors):
        given.take(str(path), tensor)
    given.start()
    for tensor in tensors:
        with pytest.raises(ValueError, match="a tensor that step is updating as argument"):
            tensor + 1


def test_a_tensor_that_a_tape_tracks_goes_with_the_others():
    given = {"w": torch.nn.Parameter(torch.ones(3)), "b": torch.ones(3)}

    def body(s, x):
        with torch.no_grad():
            s["w"].add_(x)
        raise KeyboardInterrupt

    f = ft.shard_map(body, Mesh(), P(), P(), donate=0)
    with pytest.raises(KeyboardInterrupt):
        f(given, torch.ones(3))
    assert torch.equal(given["w"], torch.ones(3))  # the tape tracks it: nothing is donated
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        f(given, torch.ones(3))
    assert type(given["w"]) is type(given["b"]) is Donated
    with pytest.raises(ValueError, match="was being updated"):
        given["w"] + 1


def test_what_a_call_put_around_a_program_is_taken_away(monkeypatch):
    """An interrupt between entering and noting it leaves no axis bound, and no level of vmap."""
    from functron.core import compat
    from functron.spmd import axes

    def body(x):
        axes._scope.set(axes.Scope({"dp": None}))
        torch._C._functorch._vmap_increment_nesting(2, "error")
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.shard_map(body, Mesh(), P(), P())(torch.ones(2))
    assert not compat.transforms_active()
    assert torch.is_grad_enabled()
    assert not axes.scope().axes


ALIKE = """
import os, time
import pytest, torch, torch.distributed as dist
import functron as ft
from functron import P, lax
from functron.spmd import mesh as meshes

dist.init_process_group("gloo")
rank = dist.get_rank()
meshes.VOTE_SECONDS = 1.0
mesh = ft.Mesh(dp=2).bind()
mode = ["alike"]


def step(state, x):
    total = lax.psum(x.sum(), "dp")
    if mode[0] == "alike" or (mode[0] == "alone" and rank == 1):
        raise ValueError("a mistake")
    state["w"].add_(total)
    if mode[0] == "late":
        raise ValueError("a mistake")
    return state


f = ft.shard_map(step, mesh, (P(), P("dp")), P(), donate=0, check=False)
state = {"w": torch.zeros(2)}
x = torch.ones(1)
with pytest.raises(ValueError, match="a mistake"):  # on all ranks: nothing is closed
    f(state, x)
mode[0] = ""
state = f(state, x)
assert state["w"].tolist() == [2.0, 2.0]
mode[0] = "late"  # on all ranks, which all lose their state
lost = {"w": state["w"].clone()}
with pytest.raises(ValueError, match="a mistake"):
    f(lost, x)
with pytest.raises(ValueError, match="was being updated"):
    lost["w"] + 1
mode[0] = "alone"
began = time.monotonic()
if rank == 1:
    with pytest.raises(ValueError, match="a mistake") as told:
        f(state, x)
    assert "process groups of Mesh(dp=2) are closed" in told.value.__notes__[-1], told.value
    assert state["w"].tolist() == [2.0, 2.0]
else:
    state = f(state, x)  # it needs nothing more of the other
mode[0] = ""
with pytest.raises(meshes.LostRanksError, match="closed|lost the others"):
    f({"w": torch.zeros(2)}, x)
assert time.monotonic() - began < 20
with pytest.raises(meshes.LostRanksError, match="are closed: .*fix: .*bind"):
    f({"w": torch.zeros(2)}, x)
again = ft.shard_map(step, ft.Mesh(dp=2).bind(), (P(), P("dp")), P(), donate=0, check=False)
assert again({"w": torch.zeros(2)}, x)["w"].tolist() == [2.0, 2.0]
print("ends", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ranks_that_fail_alike_stay_together_and_others_part(torchrun):
    assert torchrun(ALIKE, 2).stdout.count("ends") == 2


def doubled(mesh, spec):
    return ft.shard_map(lambda s: s.mul_(2) * s, mesh, (spec,), spec, donate=0)


@pytest.mark.parametrize("spec", [P(), P("dp")], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_under_transforms_and_on_a_tape_copies_are_edited(mesh, spec):
    """Of (2 x)^2: its values, its derivatives 8 x and 8, and the caller's tensors as they were."""
    f, x = doubled(mesh, spec), torch.arange(1.0, 5.0)
    rows = torch.stack([x, -x])
    kept = x.clone(), rows.clone()
    torch.testing.assert_close(torch.func.vmap(f)(rows), 4 * kept[1] ** 2)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).sum())(x), 8 * kept[0])
    torch.testing.assert_close(ft.grad(lambda x: f(x).sum())(x), 8 * kept[0])
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), leaf)
    torch.testing.assert_close((slope, bend), (8 * kept[0], torch.full((4,), 8.0)))
    node = 1 * leaf  # no leaf of the tape, which torch lets anybody edit
    torch.testing.assert_close(torch.autograd.grad(f(node).sum(), leaf)[0], 8 * kept[0])
    torch.testing.assert_close((x, rows, leaf.detach(), node.detach()), (*kept, kept[0], kept[0]))
    f(x)
    assert type(x) is Donated


def test_on_a_tape_what_a_program_closes_over_is_differentiated():
    scale = torch.tensor(3.0, requires_grad=True)
    count, x = torch.tensor(1), torch.ones(4)
    f = ft.shard_map(
        lambda s: (s["x"].mul_(scale), s["count"] + 1, s["rest"]), Mesh(), P(), P(), donate=0
    )
    given = {"x": x, "count": count, "rest": torch.ones(2)}
    y, after, rest = f(given)
    y.sum().backward()
    assert float(scale.grad) == 4
    assert int(after) == 2
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(rest, torch.ones(2))
    assert not given["rest"].requires_grad


def test_on_a_tape_without_any_result_to_differentiate():
    f = ft.shard_map(lambda s: s.add_(1) > 1, Mesh(), P(), P(), donate=0)
    x = torch.zeros(2, requires_grad=True)
    assert f(x).tolist() == [False, False]
    assert x.tolist() == [0, 0]


@pytest.mark.parametrize("counted", [False, True])
def test_writes_that_torch_does_not_count(counted):
    """As the module says: unknown, unless the program counts them."""

    def body(s):
        if counted:
            torch.autograd.graph.increment_version(s)
        s.data.add_(1)
        raise KeyboardInterrupt

    x = torch.zeros(2)
    with pytest.raises(KeyboardInterrupt):
        ft.shard_map(body, Mesh(), P(), P(), donate=0)(x)
    if counted:
        with pytest.raises(ValueError, match="was being updated"):
            x.tolist()
    else:
        assert x.tolist() == [1, 1]
