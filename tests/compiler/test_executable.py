"""Programs of ranks, which are the same though each rank has a device of its own; compilers."""

import re
import threading

import pytest
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile

import functron as ft
from functron.compiler import executable, inductor
from functron.program.parse import parse
from functron.spmd.mesh import BoundMesh

MESH = ft.Mesh(dp=2)


def on(index, shift=1.0):
    """The program of the rank of `index`, on its device: there is none on this machine."""

    def f(w, x):
        return (w * x + torch.zeros(3, device=x.device) + shift).sum()

    text = str(ft.trace(f, mesh=MESH, in_specs=(ft.P(), ft.P()))(torch.ones(3), torch.ones(3)))
    text = re.sub(r"(f32\[\d*\])", rf"\1@cuda:{index}", text)
    return parse(text.replace("device=cpu", f"device=cuda:{index}"))


def agree(monkeypatch, *programs):
    """`check_agreement` of the first rank, told what the others would tell it."""
    told = [iter((executable.digest(p), executable.without_device_numbers(p))) for p in programs]

    def all_gather_object(found, mine, group):
        found[:] = [mine, *(next(other) for other in told[1:])]

    monkeypatch.setattr(executable.dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(executable.compat, "group", lambda name: None)
    mesh = BoundMesh(MESH, 0, {"dp": 0}, {"dp": "a group"}, "cuda")
    executable.check_agreement(programs[0], mesh)


def test_devices_of_ranks_do_not_count(monkeypatch):
    assert str(on(0)) != str(on(1))
    agree(monkeypatch, on(0), on(1))


def test_only_what_differs_is_shown(monkeypatch):
    with pytest.raises(ValueError, match="one program where dp_index is 0 and another") as caught:
        agree(monkeypatch, on(0), on(1, shift=2.0))
    changes = [line for line in str(caught.value).splitlines() if line[:1] in "+-"]
    assert [line[0] for line in changes] == ["-", "+"]
    assert all("add" in line for line in changes)


def test_kernels_for_other_products_of_float32_have_another_key():
    graph, before = torch.fx.symbolic_trace(lambda x: x @ x), torch.get_float32_matmul_precision()
    devices = inductor.GraphDevices.of(graph, ())
    keys = {inductor._key(devices, {}), inductor._key(devices, {})}
    try:
        torch.set_float32_matmul_precision("high")
        keys.add(inductor._key(devices, {}))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(keys) == 2


def test_what_a_compiler_makes_is_waited_for_at_the_end_of_a_block(monkeypatch):
    """Of the thread of the block; what another one compiles is waited for at once."""
    waited = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    wait = AsyncCompile.wait
    with inductor.compile_in_background():
        AsyncCompile().wait({"ours": 1})
        other = threading.Thread(target=AsyncCompile().wait, args=({"theirs": 2},))
        other.start()
        other.join()
        assert waited == [{"theirs": 2}]
    assert waited == [{"theirs": 2}, {"ours": 1}]
    with pytest.raises(KeyError), inductor.compile_in_background():
        raise KeyError
    assert AsyncCompile.wait is wait


def test_vectors_are_what_the_user_says():
    for said in (True, False):
        with config.patch({"cpp.vec_isa_ok": said}):
            assert inductor._vector_options() == {}
