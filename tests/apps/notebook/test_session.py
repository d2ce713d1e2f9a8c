"""Meshes whose ranks are processes that a notebook calls: the numbers of simulated ones, to the bit
of torchrun's; what is refused; and what is left when ranks are interrupted, fail or die."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import functron as ft
from functron import P, gpt, lax, optim, training
from functron.apps.notebook import RankError
from functron.apps.notebook.shipping import LeafReader
from functron.compiler import compile as compile_program
from functron.core import tree
from functron.models.config import GPTConfig

pytestmark = [pytest.mark.applications("notebook"), pytest.mark.filterwarnings("error")]

CONFIG = GPTConfig(
    vocab_size=61, max_seq=16, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, dtype="float64"
)
MESH = ft.Mesh(dp=2)


@pytest.fixture(scope="module")
def ranks():
    with MESH.start("cpu") as started:
        yield started


def batch_at(step):
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, 61, (4, 17), generator=generator)
    return {"tokens": text[:, :-1], "targets": text[:, 1:], "rows": torch.arange(4)}


def test_uneven_parts_go_there_and_come_back(ranks):
    """5 over 2 ranks: 3, and 2 with padding, which no handle shows."""
    x, spec = torch.arange(1.0, 6.0), P(ft.Uneven("dp", 5))
    held = ft.shard({"x": x}, spec, ranks)["x"]
    assert held.shape == (5,)
    f = ft.shard_map(lambda x: (2 * x, lax.psum(x.square().sum(), "dp")), ranks, spec, (spec, P()))
    doubled, total = f(held)
    assert torch.equal(ft.gather(held, spec, ranks), x)
    assert torch.equal(ft.gather(doubled, spec, ranks), 2 * x)
    assert float(total) == 55


def setup(mesh, *, jit=False):
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9))

    def loss(params, batch, key):
        return gpt.loss(CONFIG, params, batch)

    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, mesh, specs)
    state = ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh)
    return ft.jit(step, donate=0) if jit else step, state


def train(mesh, batches=batch_at, **kwargs):
    step, state = setup(mesh, **kwargs)
    losses = []
    for index in range(3):
        state, metrics = step(state, batches(index))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def simulated():
    return train(MESH)


def assert_equal(got, want, mesh, tolerance=1e-12):
    pairs = zip(ft.tree.leaves(ft.gather(got, None, mesh)), ft.tree.leaves(want), strict=True)
    assert all((a - b).abs().max() < tolerance for a, b in pairs)


def test_a_step_is_that_of_the_simulated_mesh(ranks, simulated):
    losses, state = train(ranks)
    assert losses == pytest.approx(simulated[0], abs=1e-12)
    assert_equal(state.params, simulated[1].params, ranks)
    assert_equal(state.opt_state, simulated[1].opt_state, ranks)


def test_a_compiled_step(ranks, simulated):
    losses, state = train(ranks, jit=True)
    assert losses == pytest.approx(simulated[0], abs=1e-10)
    assert_equal(state.params, simulated[1].params, ranks, 1e-9)


def test_a_loop_with_batches_that_the_ranks_make(ranks, simulated):
    step, state = setup(ranks)
    found = []
    for now, record in training.loop(step, state, ranks.batches(batch_at), steps=3):
        found.append(record["loss"])
        last = now
    assert found == pytest.approx(simulated[0], abs=1e-12)
    assert_equal(last.params, simulated[1].params, ranks)


UNDER_TORCHRUN = """
import torch.distributed as dist
import functron as ft
from tests.apps.notebook.test_session import MESH, batch_at, train
dist.init_process_group("gloo")
mesh = MESH.bind()
losses, state = train(mesh, lambda step: ft.shard(batch_at(step), ft.P(ft.DATA_AXES), mesh))
if dist.get_rank() == 0:
    print(*[loss.hex() for loss in losses], *[x.sum().item().hex() for x in ft.tree.leaves(state.params)])
dist.destroy_process_group()
"""


def test_the_bits_are_those_of_torchrun(ranks, torchrun):
    losses, state = train(ranks)
    sums = [x.sum().item().hex() for x in ft.tree.leaves(ft.gather(state.params, None, ranks))]
    want = torchrun(UNDER_TORCHRUN, 2).stdout.split()
    assert [*(loss.hex() for loss in losses), *sums] == want


def test_a_state_of_given_parameters(ranks):
    """Whole ones are given, here or on the ranks, and masters in their place."""
    defs = {"w": ft.ParamDef((4, 3), (None, None), ft.params.Normal(1.0), torch.bfloat16)}
    specs, whole = {"w": P("dp")}, {"w": torch.arange(12.0).reshape(4, 3)}
    optimizer = optim.with_fp32_masters(optim.sgd(0.1, momentum=0.9), {"w": torch.bfloat16})
    given = ft.random.key(0), defs, specs, optimizer
    want = ft.init_state(*given, MESH, masters=whole)
    for masters in (whole, ft.shard(whole, P(), ranks), ft.shard(whole, specs, ranks)):
        state = ft.init_state(*given, ranks, masters=masters)
        assert [h.spec for h in ft.tree.leaves(state.params)] == [P("dp")]
        assert_equal(state, want, ranks)
    rounded = {"w": whole["w"].bfloat16()}
    assert_equal(ft.init_state(*given, ranks, rounded).params, rounded, ranks)


def test_a_program_is_traced_here(ranks):
    both = setup(ranks), setup(MESH)
    there, here = (str(ft.trace(step)(state, batch_at(0))) for step, state in both)
    assert there == here


def test_a_program_runs_on_the_ranks(ranks):
    """A program that was traced here is compiled there, over whole values and handles."""
    added = torch.tensor([1.0, 2.0])

    def program(x, given):
        total = given["total"] * given["by"]
        return {"sum": lax.psum(x.sum(), "dp") * total, "rows": (x * 2, x + added[1])}

    specs = {"in_specs": (P("dp"), P()), "out_specs": {"sum": P(), "rows": P("dp")}}
    f, x = ft.shard_map(program, ranks, **specs), torch.arange(8.0)
    given = lambda: {"total": torch.tensor(3.0), "by": 2}
    g = compile_program(ft.trace(f)(x, given()), ranks)
    for out in (g(x, given()), g(ft.shard(x, P("dp"), ranks), given())):
        assert float(out["sum"]) == 28 * 6
        assert torch.equal(out["rows"][0].gather(), x * 2)
        assert torch.equal(out["rows"][1].gather(), x + 2)
    with pytest.raises(ValueError, match=r"argument 1/by: got 4; wanted 2"):
        g(x, {"total": torch.tensor(3.0), "by": 4})
    f = ft.shard_map(lambda x: x.mul_(2), ranks, P("dp"), P("dp"), donate=0)
    g, handle = compile_program(ft.trace(f, donate=0)(x), ranks), ft.shard(x, P("dp"), ranks)
    assert torch.equal(g(handle).gather(), x * 2)
    with pytest.raises(ValueError, match=r"was donated to <lambda>"):
        g(handle)


def test_programs_that_cannot_be_sent_are_refused(ranks):
    x = torch.ones(4)
    f = ft.shard_map(lambda x: (ft.debug.callback(print, x), x)[1], MESH, P("dp"), P("dp"))
    with pytest.raises(ValueError, match=r"program: got calls of Python.*fix: jit the function"):
        compile_program(ft.trace(f)(x), ranks)
    with pytest.raises(ValueError, match=r"mesh: got Mesh\(\)[^?]*result: got a value of no spec"):
        compile_program(ft.trace(lambda x: x * 2)(x), ranks)


def test_a_partitioned_function(ranks):
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    f = ft.partition(lambda x, w: (x @ w).tanh().sum(), ranks, (P("dp"), P()))
    assert float(f(x, w)) == pytest.approx((x @ w).tanh().sum().item(), abs=1e-12)


def test_results_of_other_arguments_are_split_otherwise(ranks):
    """Their specs are found by tracing, for each kind of arguments."""
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    f = ft.partition(lambda given: given["x"] @ given["y"], ranks, (P(),))
    g = ft.partition(lambda given: given["x"] @ given["y"], MESH, (P(),))
    halves = ft.partition(lambda x: x.T if len(x) == 4 else x * 2, ranks, (P("dp"),))
    assert torch.equal(halves(x).gather(), x.T)
    assert torch.equal(halves(x[:2]).gather(), x[:2] * 2)
    assert torch.equal(f({"x": x, "y": y}).gather(), g({"x": x, "y": y}))


def test_a_pipeline(simulated):
    """Ranks hold different parts: what is made of a rank's place is built there."""
    schedule = ft.pipeline.make("1f1b", 2, 2)
    uses = gpt.uses(CONFIG)
    partition = ft.pipeline.Partition(ft.pipeline.even_layout(2, 2), schedule.pipes, uses)

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(CONFIG, part, params, x, batch, key=key)
        return y / total if part.loss else y

    stages = ft.pipeline.pipelined(stage, partition, schedule)

    def parts(mesh):
        defs = partition.local_defs(gpt.defs(CONFIG), mesh.coordinate["pp"])
        specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh.mesh))
        return (
            defs,
            specs,
            optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9)),
        )

    def begin(mesh):
        defs, specs, optimizer = parts(mesh)
        return ft.init_state(ft.random.key(0), defs, specs, optimizer, mesh)

    def build(mesh):
        _, specs, optimizer = parts(mesh)
        return ft.make_step(ft.pipeline.gradients(stages, gpt.num_targets), optimizer, mesh, specs)

    def whole(mesh, params, like):
        return ft.pipeline.collect(params, like, partition, mesh)

    with ft.Mesh(pp=2).start("cpu") as mine:
        state = mine.run(begin, mine, stages="pp")
        given = {"in_specs": (P(), P(ft.DATA_AXES)), "out_specs": P(), "stages": "pp"}
        step = mine.build(build, mine, **given)
        losses = []
        for index in range(3):
            state, metrics = step(state, batch_at(index))
            losses.append(float(metrics["loss"]))
        assert losses == pytest.approx(simulated[0], abs=1e-12)
        like = ft.abstract_params(gpt.defs(CONFIG))
        params = mine.run(whole, mine, state.params, like, stages="pp")
        assert_equal(params, simulated[1].params, mine)


def test_values_go_and_come(ranks):
    x = torch.arange(12.0).reshape(4, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        value = x.to(dtype)
        for spec in (P(), P("dp")):
            handle = ft.shard({"x": value}, spec, ranks)["x"]
            assert (handle.shape, handle.dtype, handle.spec) == (value.shape, dtype, spec)
            back = handle.gather()
            assert back.dtype == dtype
            assert torch.equal(back.float(), value.float())
    for value in (
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.ones(0, 3),
        x.T,
        x.to(torch.uint16),
    ):
        assert torch.equal(ft.shard(value, P(), ranks).gather(), value)
    handle: Any = ft.shard(x, P("dp"), ranks)
    assert handle.clone().tolist() == handle.numpy().tolist() == x.tolist()
    copied: Any = torch.clone(handle)
    assert copied.spec == P("dp")
    moved = ft.shard({"x": handle, "y": x}, {"x": P(), "y": P("dp")}, ranks)
    assert [(m.spec, m.tolist()) for m in moved.values()] == [
        (P(), x.tolist()),
        (P("dp"), x.tolist()),
    ]
    with pytest.raises(ValueError, match="got dim 0 of shape"):
        ft.shard(torch.ones(3), P("dp"), ranks)


def test_treescope_shows_numbers_and_parts(ranks):
    treescope = pytest.importorskip("treescope")
    whole = torch.arange(60.0).reshape(6, 10)
    handle = ft.shard(whole, P(None, "dp"), ranks)
    adapter = treescope.type_registries.lookup_ndarray_adapter(handle)
    shown, mask = adapter.get_array_data_with_truncation(handle, None, (None, 2))
    assert (shown[:, mask[0]] == whole[:, [0, 1, 8, 9]].numpy()).all()
    sharding = adapter.get_sharding_info_for_array_data(handle)
    assert sharding.shard_shape == (6, 5)
    assert not sharding.fully_replicated
    parts = sharding.device_index_to_shard_slices
    assert torch.equal(torch.cat([whole[parts[rank]] for rank in (0, 1)], 1), whole)
    assert "ArrayvizRendering" in repr(treescope.render_array(handle))
    assert "digitbox" in repr(treescope.render_array_sharding(handle)).lower()


def test_a_handle_that_is_split_otherwise_is_moved(ranks):
    x = torch.arange(8.0)
    whole, parts = ft.shard(x, P(), ranks), ft.shard(x, P("dp"), ranks)
    add = ft.shard_map(lambda a, b: a + b, ranks, (P("dp"), P("dp")), P("dp"))
    assert add(whole, parts).tolist() == add(x, x).tolist() == (2 * x).tolist()


def test_handles_refuse_what_is_not_theirs(ranks):
    x = ft.shard(torch.arange(4.0), P("dp"), ranks)
    for use in (lambda: x + 1, lambda: torch.ones(4) * x, lambda: torch.sum(x), lambda: x == x):
        with pytest.raises(TypeError, match=r"fix: compute it in a function .* handle.gather"):
            use()
    with pytest.raises(AttributeError, match=r"\.sum: got a Handle"):
        x.sum()
    assert not hasattr(x, "nothing")
    assert repr(x).startswith("Handle([4], float32, P('dp'), tensor(")
    double = ft.shard_map(lambda x: 2 * x, ranks, P("dp"), P("dp"))
    with pytest.raises(ValueError, match=r"under a transform of torch\.func"):
        torch.func.grad(lambda x: double(x))(torch.ones(4))
    with pytest.raises(TypeError, match="grad cannot transform a function on a started mesh"):
        ft.grad(double)
    with pytest.raises(ValueError, match="requires gradients"):
        double(torch.ones(4, requires_grad=True))


def test_what_was_donated_is_gone(ranks):
    step, state = setup(ranks)
    step(state, batch_at(0))
    with pytest.raises(ValueError, match=r"argument 0/\S+: got a value that was donated to step"):
        step(state, batch_at(0))
    with pytest.raises(ValueError, match="was donated to step"):
        state.step.gather()


def test_no_value_is_a_view_of_another(ranks):
    """A donated value overwrites itself alone: results get memory of their own."""
    x, closed, spec = torch.arange(8.0), torch.zeros(8), P("dp")
    same = ft.shard_map(lambda x: x * 1, ranks, spec, spec)
    write = ft.shard_map(lambda x: x.add_(100), ranks, spec, spec, donate=0)
    views = (lambda x: x[:2], lambda x: x.view(2, 2), lambda x: x.detach(), lambda x: x)
    for view in views:
        given = same(x)
        made = ft.shard_map(view, ranks, spec, spec)(given)
        before = made.tolist()
        write(given)
        assert made.tolist() == before

    def several(x):
        y = x * 1
        return y, y, y[:2], y[2:]

    first, *rest = ft.shard_map(several, ranks, spec, spec)(x)
    before = [each.tolist() for each in rest]
    write(first)
    assert [each.tolist() for each in rest] == before
    part = ft.shard_map(lambda x: closed[: len(x)], ranks, spec, spec)
    write(part(x))
    assert part(x).tolist() == [0.0] * 8
    kept = ranks.memory()[0]["held_bytes"]
    given = same(x)
    given = write(given)  # the very memory that was given up: no copy
    assert ranks.memory()[0]["held_bytes"] == kept + 16


def test_a_late_view_of_a_value_is_no_view(ranks):
    """Also of calls like those before, whose results are kept after the answer."""
    calls, spec = [], P("dp")

    def copy_or_show(x):
        calls.append(0)
        return {"same": x.detach() if len(calls) > 4 else x * 1, "more": x + 1}

    f = ft.shard_map(copy_or_show, ranks, spec, spec)
    write = ft.shard_map(lambda x: x.add_(100), ranks, spec, spec, donate=0)
    given, large = ft.shard(torch.arange(4.0), spec, ranks), torch.arange(1 << 20)
    for _ in range(6):
        out = f(given)
    write(given)
    assert out["same"].tolist() == [0, 1, 2, 3]
    assert out["more"].tolist() == [1, 2, 3, 4]
    assert torch.equal(ft.gather(ft.shard(large, spec, ranks), spec, ranks), large)  # 4 MiB each


@tree.register_static
@dataclass(frozen=True)
class Fixed:
    by: int


def test_leaves_are_those_of_flatten():
    """Of trees of one structure; of others there is nothing, or something in a leaf's place."""
    own: Any = Own
    pair = own(1, [2, (3, None)])
    same = {"b": pair, "a": {"x": 4}, "c": ()}, []
    others = (
        {"b": tuple(pair), "a": {"x": 4}, "c": ()},
        {"b": own(1, [2, (3, None, 4)]), "a": {"x": 4}, "c": ()},
        {"b": own(1, (2, (3, None))), "a": {"x": 4}, "c": ()},
        {"b": own(1, [2, (3, 0)]), "a": {"x": 4}, "c": ()},
        {"b": pair, "a": {"y": 4}, "c": ()},
        {"b": pair, "a": {"x": 4, "y": 5}, "c": ()},
        {"b": pair, "a": {"x": 4}, "c": None},
        {"b": pair, "a": None, "c": ()},
        None,
    )
    reader = LeafReader(tree.structure(same))
    swapped = dict(reversed(same[0].items())), []
    assert reader.read(same) == reader.read(swapped) == tree.leaves(same) == [4, 1, 2, 3]
    assert [reader.read((other, [])) for other in others] == [None] * len(others)
    assert LeafReader(tree.structure((1, Fixed(2)))).read((1, Fixed(3))) is None
    assert LeafReader(tree.structure(1)).read(2) == [2]


def test_copies_of_handles(ranks):
    handle: Any = ft.shard(torch.arange(4.0), P("dp"), ranks)
    shallow = copy.copy({"x": handle})
    again, deep = copy.copy(handle), copy.deepcopy({"x": handle})
    del again
    ranks.run(lambda: None)
    ft.shard_map(lambda x: x.add_(1), ranks, P("dp"), P("dp"), donate=0)(handle)
    assert deep["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="was donated"):
        shallow["x"].gather()
    with pytest.raises(TypeError, match=r"cannot be pickled.*ft\.gather"):
        pickle.dumps(deep)
    number: Any = ft.shard(torch.tensor(1.26), P(), ranks)
    assert (round(number), round(number, 1)) == (1, 1.3)
    with pytest.raises(TypeError, match=r"no bfloat16; fix: handle\.gather"):
        ft.shard(torch.ones(2, dtype=torch.bfloat16), P(), ranks).numpy()
    x = torch.tensor([1 + 2j, 3 - 1j])
    f = ft.shard_map(lambda x: (x.conj(), x.conj().imag), ranks, P(), P(), replicated_over="dp")
    for whole, want in zip(f(x.conj()), (x, x.imag), strict=True):
        assert torch.equal(whole.gather(), want)
    with pytest.raises(ValueError, match=r"one of layout sparse_coo; wanted a dense one"):
        ft.shard(torch.eye(2).to_sparse(), P(), ranks)


def test_values_nobody_refers_to_are_freed(ranks):
    x, whole = ft.shard(torch.ones(1 << 18), P("dp"), ranks), ft.shard(torch.ones(2), P(), ranks)
    held = [each["held_bytes"] for each in ranks.memory()]
    del x
    whole.gather()  # which asks one rank alone
    assert [each["held_bytes"] for each in ranks.memory()] == [each - (1 << 19) for each in held]


scale = 2.0


def test_globals_are_the_newest(ranks, tmp_path, monkeypatch):
    """Of this module, and of a file of the user's that changed and was loaded again."""
    global scale
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("def more(x):\n    return x + 1\n")
    mine = importlib.import_module("mine")
    f = ft.shard_map(lambda x: scale * mine.more(x), ranks, P(), P(), replicated_over="dp")
    x = torch.ones(2)
    assert f(x).tolist() == [4.0, 4.0]
    scale = 3.0
    assert f(x).tolist() == [6.0, 6.0]
    (tmp_path / "mine.py").write_text("def more(x):\n    return x + 10\n")
    sys.modules.pop("mine")
    importlib.invalidate_caches()
    mine = importlib.import_module("mine")
    assert f(x).tolist() == [33.0, 33.0]
    table = {"add": 1.0}
    g = ft.shard_map(lambda x: x + table["add"], ranks, P(), P(), replicated_over="dp")
    assert g(x).tolist() == [2.0, 2.0]
    table["add"] = 5.0
    assert g(x).tolist() == [6.0, 6.0]
    scale = 2.0


class Settings:
    add = 1.0

    def __init__(self):
        self.scale, self.nothing = 2.0, lambda: None  # which pickle refuses


def more(x):
    return x + 1


@dataclass(frozen=True)
class Frozen:
    table: dict


def test_what_changes_in_place_is_the_newest(ranks):
    """Also in a function that is compiled; code, as autoreload does; classes; modules."""
    global scale
    x, settings, net = torch.ones(2), Settings(), torch.nn.Linear(200, 200)
    f = ft.shard_map(lambda x: scale * x, ranks, P("dp"), P("dp"))
    compiled = ft.jit(f)
    assert compiled(x).tolist() == [2.0, 2.0]
    scale = 3.0
    assert compiled(x).tolist() == [3.0, 3.0]
    scale = 2.0
    f = ft.shard_map(lambda x: more(x), ranks, P("dp"), P("dp"))
    assert f(x).tolist() == [2.0, 2.0]
    before, more.__code__ = more.__code__, (lambda x: x + 10).__code__
    assert f(x).tolist() == [11.0, 11.0]
    more.__code__ = before
    f = ft.shard_map(lambda x: settings.scale * x + settings.add, ranks, P("dp"), P("dp"))
    assert f(x).tolist() == [3.0, 3.0]
    settings.scale, Settings.add = 3.0, 2.0
    assert f(x).tolist() == [5.0, 5.0]
    Settings.add = 1.0
    f = ft.shard_map(lambda x: 0 * x + net.weight.sum(), ranks, P("dp"), P("dp"))
    f(x)
    torch.nn.init.zeros_(net.weight)
    assert f(x).tolist() == [0.0, 0.0]
    held, row = Frozen({"scale": 2.0}), (1.0, [3.0])
    f = ft.shard_map(lambda x: held.table["scale"] * x, ranks, P("dp"), P("dp"))
    g = ft.shard_map(lambda x: x + row[1][0], ranks, P("dp"), P("dp"))
    assert f(x).tolist() + g(x).tolist() == [2.0, 2.0, 4.0, 4.0]
    held.table["scale"] = row[1][0] = 5.0
    assert f(x).tolist() + g(x).tolist() == [5.0, 5.0, 6.0, 6.0]


def test_what_is_traced_is_traced_again(ranks):
    """The specs of results that tracing finds; specs that are changed later change nothing."""
    specs, x = {"w": P()}, torch.arange(8.0)
    f = ft.partition(lambda x: ft.constrain(x * 2, specs["w"]), ranks, (P("dp"),))
    compiled = ft.jit(f)
    for spec in (P(), P("dp"), P()):
        specs["w"] = spec
        for out in (f(x), compiled(x)):
            assert (out.spec, out.tolist()) == (spec, (2 * x).tolist())
    f = ft.partition(
        lambda x, by: ft.constrain(x * by, P() if by > 2 else P("dp")), ranks, (P("dp"), None)
    )
    assert [f(x, by).tolist() for by in (2, 3)] == [(2 * x).tolist(), (3 * x).tolist()]
    for mesh in (ranks, MESH):
        given, made = {"x": P("dp")}, {"x": P("dp")}
        f = ft.shard_map(lambda t: {"x": t["x"] + len(t["x"])}, mesh, (given,), made)
        given["x"] = made["x"] = P()
        assert ft.gather(f({"x": x}), None, mesh)["x"].tolist() == (x + 4).tolist()


class Scale:
    _add = 0.0

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * x + self._add

    def at(self, step):
        return torch.full((2,), self.by + step)


def later(x):
    return max(2.0, 1.0) * x


def find_changes():
    """Names, functions of ones, twice what they are given, and what makes them thrice that."""
    table, numbers, small = {"by": 2.0}, np.full(20000, 2.0), np.full(1, 2.0, np.float32)
    many, tensor, shared = [2.0] * 9000, torch.full((), 2.0), torch.from_numpy(small)
    proxy, scale, bound = MappingProxyType(table), Scale(2.0), Scale(2.0)
    with torch.inference_mode():
        inferred = torch.full((), 2.0)

    def write_inferred():
        with torch.inference_mode():
            inferred.fill_(3.0)

    def default(x, given={"by": 2.0}, *, also={"by": 1.0}):  # noqa: B006
        return given["by"] * also["by"] * x

    def keyword(x, *, by=2.0):
        return by * x

    def attribute(x):
        return attribute.by * x

    attribute.by = 2.0
    parts: Any = default, keyword
    given: Any = functools.partial(lambda table, x: table["by"] * x, {"by": 2.0})
    yield "partial", given, lambda: given.args[0].update(by=3.0)
    yield "object", scale, lambda: setattr(scale, "by", 3.0)
    yield "method", bound.__call__, lambda: setattr(bound, "by", 3.0)
    yield "default", default, lambda: parts[0].__defaults__[0].update(by=3.0)
    yield "keyword", keyword, lambda: parts[1].__kwdefaults__.update(by=3.0)
    yield "attribute", attribute, lambda: setattr(attribute, "by", 3.0)
    yield "data", lambda x: tensor * x, lambda: tensor.data.fill_(3.0)
    yield "from_numpy", lambda x: shared * x, lambda: small.fill(3.0)
    yield "inferred", lambda x: inferred * x, write_inferred
    yield "numpy", lambda x: float(numbers[-1]) * x, lambda: numbers.fill(3.0)
    yield "list", lambda x: many[-1] * x, lambda: many.__setitem__(-1, 3.0)
    yield "proxy", lambda x: proxy["by"] * x, lambda: table.update(by=3.0)
    yield "private", lambda x: Scale(2.0)(x), lambda: setattr(Scale, "_add", 1.0)
    yield "added", lambda x: getattr(Scale, "new", 2.0) * x, lambda: setattr(Scale, "new", 3.0)
    yield "builtin", later, lambda: globals().update(max=lambda *given: 3.0)


def test_no_change_in_place_is_missed(ranks):
    x, found = torch.ones(2), {}
    try:
        for name, f, change in find_changes():
            f = ft.shard_map(f, ranks, P("dp"), P("dp"))
            before = f(x).tolist()
            change()
            found[name] = before + f(x).tolist()
    finally:
        globals().pop("max", None)
        Scale._add = 0.0
        delattr(Scale, "new")
    assert found == {name: [2.0, 2.0, 3.0, 3.0] for name in found}
    scale, table = Scale(2.0), {"by": 2.0}
    batches = ranks.batches(scale.at)
    specs = {"in_specs": (P("dp"),), "out_specs": P("dp")}
    built = ranks.build(lambda table: lambda x: table["by"] * x, table, **specs)
    f = ft.shard_map(lambda x: x, ranks, P("dp"), P("dp"))
    assert f(batches(0)).tolist() + built(x).tolist() == [2.0] * 4
    scale.by = table["by"] = 3.0
    assert f(batches(0)).tolist() + built(x).tolist() == [3.0] * 4


def test_the_default_dtype_is_the_newest(ranks):
    f = ft.shard_map(lambda x: x * torch.tensor(1.0).element_size(), ranks, P("dp"), P("dp"))
    assert f(torch.ones(2)).tolist() == [4.0, 4.0]
    torch.set_default_dtype(torch.float64)
    try:
        assert f(torch.ones(2)).tolist() == [8.0, 8.0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert f(torch.ones(2)).tolist() == [4.0, 4.0]


def test_modules_that_functions_import_are_the_newest(ranks, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    for name in ("lazy", "pack/inner"):
        (tmp_path / f"{name}.py").write_text("def scale(x):\n    return 2 * x\n")

    text = "def f(x):\n    import lazy\n    import pack.inner\n\n"
    text += "    return lazy.scale(pack.inner.scale(x))\n"
    (tmp_path / "using.py").write_text(text)
    f = importlib.import_module("using").f
    assert f(torch.ones(2)).tolist() == [4.0, 4.0]  # which imports them here
    mapped, x = ft.shard_map(f, ranks, P("dp"), P("dp")), torch.ones(2)
    assert mapped(x).tolist() == f(x).tolist() == [4.0, 4.0]
    for name, want in (("lazy", 20.0), ("pack.inner", 100.0)):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.write_text("def scale(x):\n    return 5 * 2 * x\n")
        importlib.reload(sys.modules[name])
        assert mapped(x).tolist() == f(x).tolist() == [want, want]
    for name in ("using", "lazy", "pack", "pack.inner"):
        sys.modules.pop(name)


def test_functions_that_are_no_more_are_forgotten(ranks):
    def count():
        ranks.run(lambda: None)
        return len(ranks._blobs), ranks.run(lambda: len(gc.get_objects()) and 0)

    before = count()
    for number in range(3):
        f = ft.shard_map(lambda x, n=number: x + n, ranks, P("dp"), P("dp"))
        assert f(torch.zeros(2)).tolist() == [number, number]
    del f
    assert count() == before


def test_what_cannot_be_sent_is_named(ranks):
    lock = threading.Lock()

    def inner():
        return lock.locked()

    for use in (lambda: inner(), functools.partial(inner)):
        with pytest.raises(TypeError, match=r"lock.*cannot pickle '_thread.lock' object"):
            ranks.run(use)
    with pytest.raises(TypeError, match="the notebook cannot have the results"):
        ranks.run(lambda: threading.Lock())
    handle: Any = ft.shard(torch.ones(2), P("dp"), ranks)
    f = ft.shard_map(lambda x: x + handle, ranks, P("dp"), P("dp"))
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]
    ft.shard_map(lambda x: x.mul_(2), ranks, P("dp"), P("dp"), donate=0)(handle)
    with pytest.raises(ValueError, match="a value that was donated to <lambda>"):
        f(torch.ones(2))


def test_a_function_with_a_cache_is_sent(ranks):
    @functools.lru_cache(maxsize=3)
    def double(x):
        return 2 * x

    assert ranks.run(lambda: (double(2), double.cache_parameters()["maxsize"])) == (4, 3)


def test_threads_take_turns(ranks):
    double, found = ft.shard_map(lambda x: 2 * x, ranks, P("dp"), P("dp")), []

    def use(number):
        for _ in range(5):
            found.append(double(torch.full((2,), float(number))).tolist() == [2.0 * number] * 2)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 15


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_notebook_is_refused(ranks, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, where other tests have used it
        child = os.fork()
    if child == 0:
        try:
            assert_works(ranks)
        except BaseException as error:
            (tmp_path / "error").write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    assert "in a process that was forked" in (tmp_path / "error").read_text()
    assert_works(ranks)


class Own(NamedTuple):
    a: torch.Tensor
    b: dict


def test_trees_of_classes_of_ones_own(ranks):
    f = ft.shard_map(lambda t: Own(t.a + 1, {"x": t.a}), ranks, P("dp"), P("dp"))
    out = f(Own(torch.zeros(2), {}))
    assert isinstance(out, Own)
    assert out.a.tolist() == [1.0, 1.0]
    assert f(Own(out.a, {})).a.tolist() == [2.0, 2.0]


def test_what_ranks_say_comes_here(ranks, capsys):
    def speak(mesh):
        print("all")
        if mesh.rank == 1:
            print("one")
        warnings.warn("careful", stacklevel=1)

    with pytest.warns(UserWarning, match="^careful$"):
        ranks.run(speak, ranks)
    assert capsys.readouterr().out == "all\n[rank 1] one\n"


def test_ranks_that_return_different_values_say_so(ranks):
    with pytest.raises(ValueError, match=r"result x: got other numbers on rank 1 than on rank 0"):
        ranks.run(lambda mesh: {"x": torch.full((3,), mesh.rank)}, ranks)
    parts = ranks.run(lambda mesh: torch.full((1,), mesh.rank), ranks, specs=P("dp"))
    assert parts.tolist() == [0, 1]


def test_other_values_that_differ_say_so(ranks):
    """Numbers, text, arrays and shapes that ranks should have in common, and parts of no tensor."""
    for make, got in (
        (lambda mesh: {"n": mesh.rank}, "result n: got 1 on rank 1, 0 on rank 0"),
        (lambda mesh: [f"r{mesh.rank}"], "result 0: got 'r1' on rank 1, 'r0' on rank 0"),
        (lambda mesh: np.full(2, mesh.rank), "got array"),
        (lambda mesh: {"a": 1} if mesh.rank else {"b": 1}, "result b: got 'nothing' on rank 1"),
        (lambda mesh: torch.ones(1 + mesh.rank), r"got float32\[2\] on rank 1, float32\[1\]"),
    ):
        with pytest.raises(ValueError, match=f"different values[^?]*{got}"):
            ranks.run(make, ranks)
    assert ranks.run(lambda: {"a": {"x", "y"}, "b": float("nan"), "c": np.ones(2)})["a"] == {*"xy"}
    with pytest.raises(ValueError, match=r"result: got 3 with the spec P\('dp'\); wanted a tensor"):
        ranks.run(lambda: 3, specs=P("dp"))


def test_a_rank_that_waits_in_a_collective_of_torch_is_let_go(ranks):
    def fail(mesh):
        if mesh.rank:
            raise ValueError("alone")
        torch.distributed.all_reduce(torch.ones(1))

    began = time.monotonic()
    with pytest.raises(ValueError, match="alone"):
        ranks.run(fail, ranks)
    assert time.monotonic() - began < 60  # of the 300 s that a collective may take
    assert ranks.run(lambda: 3) == 3


def test_writes_to_what_a_function_closes_over_are_told(ranks):
    total = torch.zeros(())
    f = ft.shard_map(lambda x: x + total.add_(1), ranks, P("dp"), P("dp"))
    with pytest.warns(
        UserWarning, match=r"modified a tensor of shape \(\) in place that it closes"
    ):
        f(torch.ones(2))


def test_results_may_hold_other_values(ranks):
    f = ft.shard_map(lambda x: {"x": x, "name": "a"}, ranks, P("dp"), {"x": P("dp"), "name": None})
    for _ in range(2):
        out = f(torch.ones(2))
        assert out["name"] == "a"
        assert out["x"].tolist() == [1.0, 1.0]


def test_lines_bars_and_much_output(ranks, capsys):
    def speak(mesh):
        print("a\n\nb")
        for number in range(3):
            print(f"\r{number}|", end="", flush=True)
        print()
        for number in range(4000):
            print(mesh.rank, number)

    begin = time.monotonic()
    ranks.run(speak, ranks)
    found = capsys.readouterr().out.split("\n")
    assert time.monotonic() - begin < 3.0
    assert (
        re.sub(r"[\r\d|]", "", "\n".join(found[:3])).strip() == "a\n\nb"
    )  # bars are drawn as they come
    assert sorted(found[-8001:-1])[:2] == ["[rank 0] 0 0", "[rank 0] 0 1"]
    assert len(found) == 3 + 1 + 8000 + 1


def test_errors_name_the_users_lines_and_all_ranks(ranks):
    def differ(mesh):
        raise ValueError(f"of {mesh.rank}")

    with pytest.raises(ValueError, match="of 0") as caught:
        ranks.run(differ, ranks)
    assert "rank 1 raised ValueError: of 1" in caught.value.__notes__
    wrong = ft.shard_map(lambda x: 2 * x, ranks, P("dp"), P())
    with pytest.raises(ValueError, match="vary where out_specs say they do not") as caught:
        wrong(torch.ones(2))
    assert not any("worker.py" in note for note in caught.value.__notes__)


def test_errors_of_all_and_of_one(ranks):
    def fail(mesh, who):
        if who in (None, mesh.rank):
            raise KeyError("no such thing")
        lax.psum(torch.ones(1), "dp")

    with pytest.raises(KeyError, match="no such thing") as caught:
        ranks.run(fail, ranks, None)
    assert "raised on all ranks in fail" in caught.value.__notes__
    assert any(
        f"{__file__}:" in note and "raise KeyError" in note for note in caught.value.__notes__
    )
    begin = time.monotonic()
    alone = ft.shard_map(lambda x: fail_on_one(x), ranks, P("dp"), P(), check=False)
    with pytest.raises(KeyError) as caught:
        alone(torch.ones(2))
    assert "raised on rank 1 in <lambda>" in caught.value.__notes__
    assert time.monotonic() - begin < 10
    assert_works(ranks)


def fail_on_one(x):
    if torch.distributed.get_rank() == 1:
        raise KeyError("only here")
    return lax.psum(x, "dp")


def assert_works(ranks):
    total = ft.shard_map(lambda x: lax.psum(x.sum(), "dp"), ranks, P("dp"), P())
    assert [float(total(torch.ones(4))) for _ in range(3)] == [4.0] * 3


@contextlib.contextmanager
def interrupting(seconds):
    """Ctrl-C, so many seconds from now."""
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def wait_long(x):
    time.sleep(60)
    return x


def wait_for_one(x):
    if torch.distributed.get_rank() == 1:
        time.sleep(60)
    return lax.psum(x, "dp")


@pytest.mark.parametrize("program", [wait_long, wait_for_one])
def test_ctrl_c_interrupts_all_ranks(ranks, program):
    x = ft.shard(torch.ones(2), P("dp"), ranks)
    f = ft.shard_map(program, ranks, P("dp"), P("dp"), check=False)
    begin = time.monotonic()
    with interrupting(0.7), pytest.raises(KeyboardInterrupt):
        f(x)
    assert time.monotonic() - begin < 0.7 + 2.0
    assert_works(ranks)
    assert x.tolist() == [1.0, 1.0]


def write_and_wait(x):
    x.add_(1)
    time.sleep(60)
    return x


def test_a_state_is_whole_or_gone_after_ctrl_c(ranks):
    before = ft.shard(torch.ones(2), P("dp"), ranks)
    f = ft.shard_map(wait_long, ranks, P("dp"), P("dp"), check=False, donate=0)
    with interrupting(0.5), pytest.raises(KeyboardInterrupt):
        f(before)
    assert before.tolist() == [1.0, 1.0]
    f = ft.shard_map(write_and_wait, ranks, P("dp"), P("dp"), check=False, donate=0)
    with interrupting(0.5), pytest.raises(KeyboardInterrupt):
        f(before)
    with pytest.raises(
        ValueError, match=r"was being updated when write_and_wait was ended by Ctrl"
    ):
        before.gather()


def add_slowly(x):
    time.sleep(0.1)
    return x.add_(1)


def test_a_loop_that_ctrl_c_ends_has_its_last_state(ranks):
    f = ft.shard_map(add_slowly, ranks, P("dp"), P("dp"), check=False, donate=0)
    f(ft.shard(torch.zeros(2), P("dp"), ranks))  # the first call takes longer
    state, number = ft.shard(torch.zeros(2), P("dp"), ranks), 0

    def go_on():
        nonlocal state
        while True:
            state = f(state)

    for seconds in (0.31, 0.35, 0.4):
        with interrupting(seconds), pytest.raises(KeyboardInterrupt):
            go_on()
        number, before = int(state.numpy()[0]), number
        assert before + 2 <= number <= before + 5
        assert state.tolist() == [number, number]


def test_ctrl_c_leaves_no_half_of_a_request(ranks):
    """In the fetching and sending of values, which it does not interrupt."""
    x, ones = ft.shard(torch.arange(1 << 20), P("dp"), ranks), torch.ones(1 << 20)

    def go_on():
        while True:
            x.gather()
            ft.shard(ones, P(), ranks)

    for number in range(6):
        with interrupting(0.05 + 0.013 * number), pytest.raises(KeyboardInterrupt):
            go_on()
        assert int(x.gather().sum()) == (1 << 19) * ((1 << 20) - 1)
    assert_works(ranks)


def hold(x):
    ctypes.PyDLL(None).usleep(3_500_000)  # does not let other threads run
    return x


def test_ctrl_c_gives_up_what_cannot_be_interrupted(ranks):
    f = ft.shard_map(hold, ranks, P("dp"), P("dp"), check=False)
    begin = time.monotonic()
    with interrupting(0.5), pytest.raises(KeyboardInterrupt, match="could not be interrupted"):
        f(torch.ones(2))
    assert time.monotonic() - begin < 0.5 + 2.0
    with interrupting(0.1), pytest.raises(KeyboardInterrupt):
        assert_works(ranks)
    assert_works(ranks)


def die_on_one(x):
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lax.psum(x, "dp")


def test_a_rank_that_dies_is_named_and_comes_back(capsys):
    with MESH.start("cpu") as mine:
        same, parts = torch.arange(3.0), torch.arange(4.0)
        kept, lost = ft.shard(same, P(), mine), ft.shard(parts, P("dp"), mine)
        f = ft.shard_map(die_on_one, mine, P("dp"), P(), check=False)
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 died \(killed by SIGKILL\) in die_on_one"):
            f(torch.ones(2))
        assert time.monotonic() - begin < 10
        with pytest.raises(RankError, match=r"fix: ranks.restart\(\)"):
            f(torch.ones(2))
        assert repr(lost) == "Handle([4], float32, P('dp'))"  # it raises nothing
        with interrupting(0.5), pytest.raises(KeyboardInterrupt):
            mine.restart()
        assert kept.tolist() == [0.0, 1.0, 2.0]
        assert mine.restart() == [lost]
        assert "died with 1 values" in capsys.readouterr().err
        with pytest.raises(ValueError, match="died with rank 1; fix: make it again"):
            lost.gather()
        assert_works(mine)
        doubled = ft.shard_map(lambda x: 2 * x, mine, P(), P(), replicated_over="dp")(kept)
        assert doubled.tolist() == [0.0, 2.0, 4.0]
        on_one = mine.run(lambda mesh, x: x * mesh.rank, mine, kept, specs=P("dp"))
        assert on_one.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]


def hang_on_one(x):
    if torch.distributed.get_rank() == 1:
        while True:
            time.sleep(0.01)
    return lax.psum(x, "dp")


def test_a_rank_that_the_others_wait_for_is_named(ranks, capsys):
    f = ft.shard_map(hang_on_one, ranks, P("dp"), P(), check=False)
    with interrupting(10.5), pytest.raises(KeyboardInterrupt):
        f(torch.ones(2))
    text = capsys.readouterr().err
    assert f"rank 1 is at {__file__}:" in text
    assert "in hang_on_one, while rank 0 waits for it in psum over 'dp', 4 bytes" in text


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_no_process_is_left():
    with MESH.start("cpu") as mine:
        pids = mine.pids
        assert [is_running(pid) for pid in pids] == [True, True]
    assert not any(map(is_running, pids))
    with pytest.raises(RankError, match="it was closed"):
        assert_works(mine)


@pytest.mark.full
def test_ranks_import_what_the_notebook_imports(ranks, tmp_path):
    """Not what lies in the folder that they begin in."""
    (tmp_path / "functron").mkdir()
    (tmp_path / "functron" / "__init__.py").write_text("raise ImportError('another one')\n")
    paths = [path or os.getcwd() for path in sys.path]
    program = f"import sys; sys.path[:] = {paths!r}\n"
    program += "import functron as ft, torch\nmesh = ft.Mesh().start('cpu')\nprint(mesh.size)\n"
    program += "f = ft.shard_map(lambda x: (print(float(x)), x + 1)[1], mesh, ft.P(), ft.P())\n"
    program += "x = torch.zeros(())\nfor _ in range(4): x = f(x)\n"  # the last, when it ends
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "1\n0.0\n1.0\n2.0\n3.0\n", done.stderr


NOTEBOOK = """
import functron as ft
mesh = ft.Mesh(dp=2).start("cpu")
print(*mesh.pids, flush=True)
mesh.run(lambda: __import__("time").sleep(100))
"""


def find_children(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


@pytest.mark.full
def test_no_process_is_left_when_the_notebook_is_killed_as_it_starts():
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdout=subprocess.DEVNULL)
    while len(pids := find_children(notebook.pid)) < 2:
        assert notebook.poll() is None
        time.sleep(0.05)
    notebook.kill()
    notebook.wait()
    wait_until_gone(pids)


def test_no_process_is_left_when_the_notebook_is_killed(tmp_path):
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdout=subprocess.PIPE, text=True)
    assert notebook.stdout is not None
    pids = [int(pid) for pid in notebook.stdout.readline().split()]
    assert [is_running(pid) for pid in pids] == [True, True]
    time.sleep(1.0)
    notebook.kill()
    notebook.wait()
    notebook.stdout.close()
    wait_until_gone(pids)


def test_what_cannot_be_started_is_refused():
    with pytest.raises(ValueError, match='device: got \'gpu\'; wanted "auto", "cpu" or "cuda"'):
        MESH.start("gpu")
    with pytest.raises(ValueError, match=r"num_local: got 1 of 2 ranks here.*wanted an address"):
        MESH.start("cpu", num_local=1)
    with pytest.raises(ValueError, match=r"backend: got 'processe'.*processes"):
        MESH.start("cpu", backend="processe")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="got cuda for 2 ranks on a machine with 0 GPUs"):
            MESH.start("cuda")


# --- callbacks, checks and the search for faults


def test_what_ranks_call_and_check_comes_to_the_cell(ranks, capsys):
    factor = 3.0

    def draw(x, coordinate):  # goes by value, with what it closes over
        print("drawn", coordinate, (x * factor).tolist())

    def program(x, key):
        ft.debug.callback(draw, x, coordinate=True)
        ft.debug.check(x < 5, "got {x}", x=x)
        noise = ft.random.normal(key, (1,), torch.float64)
        return lax.psum(x.sqrt().sum() + 0 * noise.sum(), "dp")

    f, key = ft.shard_map(program, ranks, (P("dp"), P()), P(), donate=0), ft.random.key(0)
    x = torch.tensor([1.0, 4.0], dtype=torch.float64)
    for run in (f, ft.jit(f, backend="eager"), ft.debug.nans(f)):
        assert run(x, key).item() == 3.0
        shown = capsys.readouterr().out.splitlines()
        assert sorted(shown) == [
            "[rank 0] drawn {'dp': 0} [3.0]",
            "[rank 1] drawn {'dp': 1} [12.0]",
        ]
    ft.debug.check_key_reuse(f)(x, key)
    with pytest.raises(ValueError, match=r"got tensor\(\[7\.\]") as caught:
        f(torch.tensor([1.0, 7.0], dtype=torch.float64), key).item()  # a call may be ahead
    assert "[dp=1]" in str(caught.value)
    handle = ft.shard(torch.tensor([1.0, -4.0], dtype=torch.float64), P("dp"), ranks)
    with pytest.raises(ValueError, match=r"sqrt \(forward\) makes the first .*, on rank dp=1"):
        ft.debug.nans(f)(handle, key).item()
    assert handle.gather().tolist() == [1.0, -4.0]  # not consumed


# --- calls that are not waited for


def call_ahead(f, *args):
    """Call a function so often that its results are known; its results."""
    for _ in range(2):
        out = f(*args)
    return out


def add_or_fail(x):
    """One more; an error where there are three already."""
    if float(x.max()) == 3:
        raise ValueError("three")
    return x.add_(1)


def test_a_call_is_not_waited_for_until_it_is_looked_at(ranks):
    f = ft.shard_map(lambda x: x + 1, ranks, P("dp"), P("dp"))
    total = ft.shard_map(lambda x: lax.psum(x.sum(), "dp"), ranks, P("dp"), P())
    x = f(torch.zeros(4))
    looks = {
        "number": lambda: float(call_ahead(total, x)) == 4,
        "value": lambda: f(x).tolist() == [2.0] * 4,
        "shape": lambda: f(x).shape == (4,),
        "text": lambda: repr(f(x)).endswith("tensor([2., 2., 2., 2.]))"),
        "memory": lambda: (f(x), ranks.memory())[1],
        "other": lambda: (f(x), ranks.run(lambda: 3))[1] == 3,
        "sent": lambda: (f(x), ft.shard(torch.ones(2), P(), ranks).tolist())[1] == [1.0, 1.0],
        "wait": lambda: (f(x), ranks.block_until_ready())[1],
    }
    f(x)
    for name, look in looks.items():
        f(x)
        assert ranks._late is not None, name
        assert look(), name
        assert ranks._late is None, name
    for _ in range(5):
        x = f(x)
    assert x.tolist() == [6.0] * 4


def test_long_calls_are_waited_for(ranks):
    f = ft.shard_map(lambda x: add_slowly(x * 1), ranks, P("dp"), P("dp"))
    call_ahead(f, torch.zeros(2))
    assert ranks._late is None


def test_results_of_other_kinds_than_before(ranks):
    """Calls sent after them are done again; other trees are refused, once."""
    some = ft.shard_map(lambda x: x[x > 0], ranks, P("dp"), P("dp"), check=False)
    add = ft.shard_map(lambda x, y: x.sum() + y, ranks, (P("dp"), P("dp")), P("dp"), donate=1)
    whole, half = torch.ones(4), torch.tensor([1.0, -1.0, 1.0, -1.0])
    for _ in range(2):
        add(some(whole), ft.shard(torch.ones(4), P("dp"), ranks))
    given = ft.shard(torch.ones(4), P("dp"), ranks)
    y = some(half)
    z = add(y, given)
    assert z.tolist() == [2.0] * 4
    assert (y.shape, y.tolist()) == ((2,), [1.0, 1.0])
    assert (some(whole).tolist(), some(half).tolist()) == ([1.0] * 4, [1.0, 1.0])
    tree = ft.shard_map(
        lambda x: {"a": x, **({"b": x} if x.max() > 1 else {})}, ranks, P("dp"), P("dp"),
        check=False,
    )  # fmt: skip
    call_ahead(tree, whole)
    late = tree(whole * 2)["a"]
    with pytest.raises(ValueError, match="returned what was not expected"):
        late.gather()
    assert late.tolist() == [2.0] * 4
    assert sorted(tree(whole * 2)) == ["a", "b"]


def test_a_state_is_kept_where_metrics_are_others_than_before(ranks):
    """Also with a call behind it, which is not begun; what only the calls before had is refused."""

    def count(state):
        name = "other" if float(state.max()) == 3 else "one"
        return state.add_(1), {name: state.sum()}

    for behind in (True, False):
        state = ft.shard(torch.zeros(2), P("dp"), ranks)
        f = ft.shard_map(count, ranks, P("dp"), (P("dp"), P()), check=False, donate=0)
        for number in range(4):
            state, metrics = f(state)
            assert (ranks._late is None) == (number == 0)
        with pytest.raises(ValueError, match="returned what was not expected") as caught:
            f(state) if behind else ranks.block_until_ready()
        assert any("called at" in note for note in caught.value.__notes__)
        assert state.tolist() == [4.0, 4.0]
        with pytest.raises(ValueError, match="was not made: count returned other results"):
            metrics["one"].gather()
        assert f(state)[0].tolist() == [5.0, 5.0]


def test_warnings_that_are_errors_lose_no_state(ranks):
    """They come before the next call is sent, or at a look: here all warnings are errors."""

    def add(x):
        if float(x.max()) == 3:
            warnings.warn("three", stacklevel=1)
        return x.add_(1)

    for look in (True, False):
        state = ft.shard(torch.zeros(2), P("dp"), ranks)
        f = ft.shard_map(add, ranks, P("dp"), P("dp"), check=False, donate=0)
        for _ in range(4 if look else 5):
            state = f(state)
        with pytest.raises(UserWarning, match="three"):
            ranks.block_until_ready() if look else f(state)
        assert state.tolist() == [4.0 if look else 5.0] * 2
        assert f(state).tolist() == [5.0 if look else 6.0] * 2


def test_a_change_between_two_calls_is_of_the_second(ranks):
    table = {"by": 2.0}
    f = ft.shard_map(lambda x: (time.sleep(0.02), table["by"] * x)[1], ranks, P("dp"), P("dp"))
    first = call_ahead(f, torch.ones(2))
    table["by"] = 3.0
    second = f(first)
    table["by"] = 5.0
    third = f(second)
    assert [x.tolist() for x in (first, second, third)] == [[2.0] * 2, [6.0] * 2, [30.0] * 2]


def count_values(ranks):
    gc.collect()  # tracebacks hold frames, and these handles
    return ranks.memory()[0]["num_values"]


def test_late_errors_name_the_call(ranks):
    """At the next call, at a look, and at the end of a cell; what was donated is whole."""
    f = ft.shard_map(add_or_fail, ranks, P("dp"), P("dp"), check=False, donate=0)
    before = count_values(ranks)

    def look(x):
        float(ft.shard_map(lambda x: lax.psum(x.sum(), "dp"), ranks, P("dp"), P())(x))

    for use in (f, look, lambda x: x.shape, repr, lambda x: ranks.block_until_ready()):
        x = ft.shard(torch.zeros(2), P("dp"), ranks)
        for _ in range(4):
            line, x = sys._getframe().f_lineno, f(x)
        with pytest.raises(ValueError, match="three") as caught:
            use(x)
        notes = caught.value.__notes__
        assert f"called at {__file__}:{line}, and not waited for there" in notes
        assert "raised on all ranks in add_or_fail" in notes
        with pytest.raises(ValueError, match=r"was not made: add_or_fail .*whole: mesh\.given"):
            x.gather()
        assert ranks.given is not None
        assert ranks.given[0].tolist() == [3.0, 3.0]
    del caught, x
    assert_works(ranks)  # which forgets what was given
    assert ranks.given is None
    assert count_values(ranks) == before


def fail_at_three(x):
    if float(x.max()) == 3 and torch.distributed.get_rank() == 1:
        raise KeyError("on one")
    lax.psum(x, "dp")
    return x.add_(1)


def test_a_late_error_of_one_rank_ends_the_call_behind_it(ranks):
    f = ft.shard_map(fail_at_three, ranks, P("dp"), P("dp"), check=False, donate=0)
    x, begin = ft.shard(torch.zeros(2), P("dp"), ranks), time.monotonic()

    def go_on():
        nonlocal x
        while True:
            x = f(x)

    with pytest.raises(KeyError, match="on one"):
        go_on()
    assert time.monotonic() - begin < 10
    with pytest.raises(ValueError, match="was not made: fail_at_three was ended by an error"):
        x.gather()
    assert_works(ranks)


def test_late_errors_come_at_the_end_of_a_cell(ranks, monkeypatch):
    events = pytest.importorskip("IPython.core.events")
    from functron.apps.notebook.remote_functions import wait_after_cells

    shown: list[Any] = []
    manager = events.EventManager(None, events.available_events)
    shell = SimpleNamespace(events=manager, showtraceback=lambda: shown.append(sys.exc_info()[1]))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    end = wait_after_cells(ranks)
    f = ft.shard_map(add_or_fail, ranks, P("dp"), P("dp"), check=False, donate=0)
    x = ft.shard(torch.zeros(2), P("dp"), ranks)
    for _ in range(4):
        x = f(x)
    manager.trigger("post_run_cell", None)
    assert [str(error) for error in shown] == ["three"]
    end()
    end()
    assert not manager.callbacks["post_run_cell"]


def hang_at_three(x):
    if float(x.max()) == 3:
        time.sleep(60)
    return x.add_(1)


def add_quickly(x):
    time.sleep(0.02)
    return x.add_(1)


def test_ctrl_c_with_a_call_that_is_not_waited_for(ranks):
    """It ends by itself, or is interrupted, and the one behind it is not begun."""
    f = ft.shard_map(add_quickly, ranks, P("dp"), P("dp"), check=False, donate=0)
    f(ft.shard(torch.zeros(2), P("dp"), ranks))
    state, number = ft.shard(torch.zeros(2), P("dp"), ranks), 0

    def go_on():
        nonlocal state, number
        while True:
            state = f(state)
            number += 1

    for seconds in (0.31, 0.35, 0.4):
        with interrupting(seconds), pytest.raises(KeyboardInterrupt):
            go_on()
        first, second = state.tolist()
        assert first == second
        assert first - number in (0, 1)  # Ctrl-C may come before it is counted
        number = int(first)
        assert number > 3
    f = ft.shard_map(hang_at_three, ranks, P("dp"), P("dp"), check=False, donate=0)
    f(ft.shard(torch.zeros(2), P("dp"), ranks))
    for behind in (True, False):
        state = ft.shard(torch.zeros(2), P("dp"), ranks)
        for _ in range(4):
            state = f(state)
        assert ranks._late is not None
        begin = time.monotonic()
        with interrupting(0.5), pytest.raises(KeyboardInterrupt, match="hang_at_three was inter"):
            f(state) if behind else ranks.block_until_ready()
        assert time.monotonic() - begin < 0.5 + 2.0
        with pytest.raises(ValueError, match=r"was not made: hang_at_three was ended by Ctrl-C"):
            state.gather()
        assert ranks.given is not None
        assert ranks.given[0].tolist() == [3.0, 3.0]
        assert_works(ranks)


def die_at_three(x):
    if float(x.max()) == 3 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lax.psum(x, "dp") * 0 + x + 1


@pytest.mark.full
def test_a_rank_that_dies_in_a_call_that_is_not_waited_for():
    with MESH.start("cpu") as mine:
        f = ft.shard_map(die_at_three, mine, P("dp"), P("dp"), check=False)
        for sleeps in (0.0, 1.0):
            x, begin = ft.shard(torch.zeros(2), P("dp"), mine), time.monotonic()
            for _ in range(4):
                x = f(x)
            assert mine._late is not None
            time.sleep(sleeps)
            with pytest.raises(RankError, match=r"rank 1 died \(killed by SIGKILL\) in die_at"):
                f(x)
            assert time.monotonic() - begin < 10
            mine.restart()
            with pytest.raises(ValueError, match="was not made: die_at_three"):
                x.gather()
            assert_works(mine)
        f = ft.shard_map(add_or_fail, mine, P("dp"), P("dp"), check=False, donate=0)
        x = ft.shard(torch.zeros(2), P("dp"), mine)
        for _ in range(4):
            x = f(x)
        with pytest.raises(ValueError, match="three"):
            mine.close()
    assert not any(map(is_running, mine.pids))
