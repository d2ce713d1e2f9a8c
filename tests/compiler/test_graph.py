"""Programs as CUDA graphs: on a CPU by a recorder that keeps a graph's rules, and on a GPU."""

import re

import pytest
import torch

import functron as ft
from functron.compiler import executable
from functron.compiler.executable import WARM_UP_CALLS
from functron.compiler.executable import compile as compile_program
from functron.ops.grouped_matmul import grouped_matmul
from functron.program.parse import parse
from tests.compiler.test_compile_steps import batch_of, training

CALLS = WARM_UP_CALLS + 4


def step(state, scale, batch):
    """A sum that decays, its norm, and how many there were; one leaf comes back untouched."""
    m = state["m"] * scale + batch
    state = {"m": m, "num": state["num"] + 1, "kept": state["kept"]}
    return state, {"norm": m.square().sum(), "num": state["num"] * 2}


def fresh(device="cpu"):
    made = {"m": torch.ones(2, 3), "num": torch.zeros(1), "kept": torch.full((2,), 7.0)}
    return {name: leaf.to(device) for name, leaf in made.items()}


def batch(index, device="cpu"):
    """Its columns are contiguous."""
    return (torch.arange(6.0).reshape(3, 2).T + index).to(device)


def agree(compiled, device="cpu", calls=CALLS):
    """Take steps, and compare all that they returned after the last one."""
    scale = torch.tensor(0.5, device=device)
    state, dense = fresh(device), fresh(device)
    found, wanted = [], []
    for index in range(calls):
        state, numbers = compiled(state, scale, batch(index, device))
        dense, expected = step(dense, scale, batch(index, device))
        found.append(numbers)
        wanted.append(expected)
    torch.testing.assert_close((state, found), (dense, wanted), rtol=0, atol=0)
    return state, dense, scale


@pytest.fixture
def recorded(monkeypatch):
    """A recorder for CPUs: nothing is computed at first, and later always in the same memory."""
    inputs, flat = [], executable._flat_memory

    def record(run, tensors):
        before = [flat(tensor).clone() for tensor in tensors]
        results = run(list(tensors))
        for tensor, numbers in zip(tensors, before, strict=True):
            flat(tensor).copy_(numbers)
        for result in results:
            if all(result.data_ptr() != tensor.data_ptr() for tensor in tensors):
                blank = torch.nan if result.is_floating_point() else -1
                flat(result).fill_(blank)
        inputs.append(list(tensors))

        def launch():
            for known, new in zip(results, run(list(tensors)), strict=True):
                flat(known).copy_(flat(new))

        return results, launch

    monkeypatch.setattr(executable, "record", record)
    monkeypatch.setattr(executable, "graph_problems", lambda program: ())
    return inputs


def jitted():
    return ft.jit(step, donate=0, graph=True, backend="eager")


def test_a_graph_computes_what_the_program_does(recorded):
    compiled = jitted()
    state, _, scale = agree(compiled)
    (inputs,) = recorded
    addresses = [tensor.data_ptr() for tensor in inputs]
    assert all(leaf.data_ptr() in addresses for leaf in state.values())
    assert scale.data_ptr() in addresses


def test_arguments_may_move(recorded):
    compiled = jitted()
    state, dense, scale = agree(compiled)
    for move in (False, True, True):
        scale = scale.clone() if move else scale
        state, numbers = compiled(state, scale, batch(9))
        dense, wanted = step(dense, scale, batch(9))
        torch.testing.assert_close((state, numbers), (dense, wanted), rtol=0, atol=0)
    assert len(recorded) == 2  # one more: from then on the scale is copied


def test_a_state_that_is_kept_stays_as_it_is(recorded):
    compiled = jitted()
    state, dense, scale = agree(compiled)
    other, _ = compiled(fresh(), scale, batch(0))
    torch.testing.assert_close(state, dense, rtol=0, atol=0)
    torch.testing.assert_close(other, step(fresh(), scale, batch(0))[0], rtol=0, atol=0)


def moves(compiled, scale):
    for _ in range(6):
        compiled(fresh(), scale, batch(0))


def test_states_that_always_move_are_told_of(recorded):
    compiled = jitted()
    _, _, scale = agree(compiled)
    with pytest.warns(UserWarning, match="step: got donated arguments in other memory") as told:
        moves(compiled, scale)
    assert len(told) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_training_step(request, device):
    """With dropout, so that every step draws other numbers."""
    if device == "cpu":
        request.getfixturevalue("recorded")
    found = []
    for graphed in (False, True):
        step, state = training(ft.Mesh(dp=2), dropout=0.1)
        compiled = ft.jit(step, donate=0, backend="eager", graph=graphed)
        state, given = on(device, state), []
        for index in range(WARM_UP_CALLS + 2):
            state, numbers = compiled(state, on(device, batch_of(index)))
            given.append(numbers)
        found.append((state, given))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def on(device, values):
    return ft.tree.map(lambda leaf: leaf.to(device), values)


def test_a_donated_argument_that_no_result_takes_is_copied(recorded):
    compiled = ft.jit(lambda x, y: x.sum() + y, donate=0, graph=True, backend="eager")
    with pytest.warns(UserWarning, match="no result can take"):
        found = [compiled(torch.full((3,), float(i)), torch.ones(())) for i in range(CALLS)]
    assert [float(x) for x in found] == [3.0 * i + 1 for i in range(CALLS)]
    assert len(recorded) == 2


def on_cuda(fn, *args):
    """The program of a GPU, which this machine may not have."""
    text = str(ft.trace(fn)(*args))
    text = re.sub(r"(f32\[[\d,]*\]|bool\[[\d,]*\]|i64\[[\d,]*\])", r"\1@cuda:0", text)
    return parse(text.replace("device=cpu", "device=cuda:0"))


def refused(program, *words):
    with pytest.raises(ValueError, match="cannot be recorded as a CUDA graph") as caught:
        compile_program(program, graph=True, backend="eager")
    for word in words:
        assert word in str(caught.value)


def test_programs_that_wait_for_the_host_are_refused():
    x = torch.ones(4, 8)
    sizes = torch.tensor([1, 3])

    def grouped(x, w, sizes):
        return grouped_matmul(x, w, sizes)

    def prints(x):
        ft.debug.print("{}", x.sum())
        ft.debug.callback(print, x)
        ft.debug.check(x > 0, "got {}", x)
        return x * 2

    refused(ft.trace(lambda x: x * 2)(x), "argument 0", "cpu", "CUDA GPU")
    effects = ("debug_print at", "debug_callback at", "debug_check at")
    refused(on_cuda(prints, x), *effects, "the host reads", "test_graph.py")
    refused(on_cuda(grouped, x, torch.ones(2, 8, 8), sizes), "grouped_matmul at", "bfloat16")
    assert not list(executable.graph_problems(on_cuda(lambda x: x * 2, x)))


@pytest.mark.parametrize("room", [0, 4])
def test_exchanges_of_as_many_rows_as_there_are_are_refused(room):
    def exchange(x, sizes):
        return ft.lax.ragged_all_to_all(x, sizes, "ep", capacity=8, room=room)

    mapped = ft.shard_map(exchange, ft.Mesh(ep=2), (ft.P("ep"), ft.P("ep")), ft.P("ep"))
    program = on_cuda(mapped, torch.ones(8, 3), torch.ones(4, dtype=torch.int64))
    found = list(executable.graph_problems(program))
    assert len(found) == (0 if room else 1)
    assert all("as many rows as there are" in problem.got for problem in found)


def test_graphs_of_inductor_are_refused():
    with pytest.raises(ValueError, match="graph=True"):
        ft.jit(step, options={"triton.cudagraphs": True})(fresh(), torch.ones(()), batch(0))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_on_a_gpu(backend):
    agree(ft.jit(step, donate=0, graph=True, backend=backend), "cuda")
