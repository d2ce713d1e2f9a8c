"""Ids outside of their range are refused eagerly, in traces and in compiled programs."""

import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import functron as ft
from functron import Mesh, P, gpt, random
from functron.ops.cross_entropy import check_ids
from functron.pipeline import Partition, even_layout, make, pipelined

CONFIG = gpt.GPTConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=12,
    vocab_multiple=16,
)  # fmt: skip
GOOD = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(0))
IGNORED = GOOD.index_fill(0, torch.tensor(0), -100)


def changed(value: int) -> torch.Tensor:
    ids = GOOD.clone()
    ids[3, 5] = value  # on the last ranks of a mesh
    return ids


def batch(tokens, targets):
    return {"tokens": tokens, "targets": targets, "rows": torch.arange(4)}


# 40 to 47 are rows of the padded table
BAD = [
    (batch(changed(40), GOOD), r"tokens: got one id outside, from 40 to 40; wanted 0 to 39; fix"),
    (batch(changed(-1), GOOD), r"tokens: got one id outside, from -1 to -1.*no ids below 0"),
    (batch(changed(-100), GOOD), r"tokens: got one id outside, from -100 to -100"),
    (batch(GOOD, changed(4000)), r"targets: got one id.*wanted 0 to 39, or -100, which is ignored"),
    (batch(GOOD, changed(-1)), r"targets: got one id outside.*shall not count are -100"),
]


def mapped(mesh):
    specs = ft.param_specs(gpt.defs(CONFIG), gpt.rules(CONFIG, mesh))
    params = ft.init_params(random.key(0), gpt.defs(CONFIG), specs, mesh)
    loss = lambda params, data: ft.value_and_grad(lambda p: gpt.loss(CONFIG, p, data))(params)[0]
    return ft.shard_map(loss, mesh, (specs, P(ft.DATA_AXES)), P()), params


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
def test_a_model_refuses_ids_outside_of_its_vocabulary(mesh, how):
    f, params = mapped(mesh)
    run = f if how == "eager" else ft.jit(f, backend="eager")
    assert torch.isfinite(run(params, batch(GOOD, IGNORED)))
    for data, message in BAD:
        with pytest.raises(ValueError, match=message):
            run(params, data)


def test_compiled_code_refuses_them_in_microbatches_and_cuts_no_kernel():
    table = torch.linspace(-1, 1, 80).view(40, 2)

    def loss(table, data):
        check_ids(data["tokens"], "tokens", 40)
        check_ids(data["targets"], "targets", 40, -100)
        return ((data["targets"] + 1).unsqueeze(-1) * table[data["tokens"]]).sum()

    run = ft.jit(ft.accumulate(ft.value_and_grad(loss), 2))
    value, _ = run(table, batch(GOOD, GOOD))
    torch.testing.assert_close(value, loss(table, batch(GOOD, GOOD)))
    for data, message in BAD[2:4]:
        with pytest.raises(ValueError, match=message):
            run(table, data)
    f, params = mapped(Mesh())
    program = ft.trace(f)(params, batch(GOOD, GOOD))
    named = [e for e in program.block.equations if e.name == "check_ids"]
    assert [e.args[1:] for e in named] == [("tokens", 40, None), ("targets", 40, -100)]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_pipelines_refuse_them_whole_and_cut(name):
    schedule = make(name, 2, 2)
    layout = even_layout(schedule.num_stages, CONFIG.num_layers)
    partition = Partition(layout, schedule.pipes, gpt.uses(CONFIG))

    def stage(part, params, x, data):
        return gpt.stage_loss(CONFIG, part, params, x, data)

    stages = pipelined(stage, partition, schedule)
    params = ft.init_params(random.key(0), gpt.defs(CONFIG))
    run = ft.shard_map(stages.value_and_grad, Mesh(pp=2), (P(), P()), P(), stages="pp")
    assert torch.isfinite(run(params, batch(GOOD, IGNORED))[0])
    for data, message in BAD[1:4]:
        with pytest.raises(ValueError, match=message):
            run(params, data)


def test_other_tracers_keep_an_assertion():
    def f(ids):
        check_ids(ids, "labels", 10)
        return ids + 1

    graph = make_fx(torch.func.vmap(f))(torch.zeros(2, 3, dtype=torch.int64))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert torch.equal(graph(torch.full((2, 3), 9)), torch.full((2, 3), 10))
    with pytest.raises(RuntimeError, match="labels outside of the vocabulary; wanted 0 to 9"):
        graph(torch.full((2, 3), 10))


def test_every_rank_and_every_element_of_a_vmap_is_looked_at():
    def program(ids):
        check_ids(ids, "labels", 10)
        return ids

    f = ft.shard_map(torch.func.vmap(program), Mesh(dp=2, tp=2), P("dp", "tp"), P("dp", "tp"))
    ids = torch.arange(16).view(4, 4) % 10
    assert torch.equal(f(ids), ids)
    ids[3, 3] = 10
    with pytest.raises(
        ValueError, match="labels: got one id outside, from 10 to 10; wanted 0 to 9"
    ):
        f(ids)


def test_no_numbers_are_needed_where_only_shapes_are_computed():
    f, params = mapped(Mesh(dp=2))
    meta = lambda tree: ft.tree.map(lambda leaf: leaf.to("meta"), tree)
    assert ft.eval_shape(f)(meta(params), meta(batch(GOOD, GOOD))).shape == ()


ON_A_GPU = """
import torch
from functron.ops.cross_entropy import check_ids
check_ids(torch.arange(10, device="cuda"), "labels", 10)
torch.cuda.synchronize()
check_ids(torch.arange(11, device="cuda"), "labels", 10)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_gpu_asserts_with_the_name_and_the_range():
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True)
    assert done.returncode
    assert "labels outside of the vocabulary; wanted 0 to 9" in done.stdout + done.stderr
