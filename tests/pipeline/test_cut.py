"""Cutting programs into pieces, and evaluating blocks: against whole programs and torch autograd."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functron as ft
from functron import Mesh, P, gpt, lax, random, tree
from functron.compiler import compile as compile_program
from functron.pipeline.cut import bytes_held, cut_program, is_effect, join_programs
from functron.pipeline.partition import Part, layout_of
from functron.pipeline.stage_backward import (
    CutStages,
    Pullbacks,
    StageCall,
    finish_steps,
    trace_stage,
)
from functron.program.equations import Scan, Var
from functron.program.interpreter import ambient_inputs, run_block, run_in_lockstep
from functron.program.trace import trace
from functron.transforms.gradient import vjp
from tests.program.measured_memory import measured_peak


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def joint_of(stage):
    """``(params, x, cotangent) -> (y, dx, dparams)``."""

    def joint(params, x, cotangent):
        y, pullback = vjp(stage, params, x)
        dparams, dx = pullback(cotangent)
        return y, dx, dparams

    return joint


def fiw(program):
    """The outputs of F, I and W of a joint function, by the positions in its result."""
    first = [output.path.partition("/")[0] for output in program.outputs]
    return [[p for p, at in enumerate(first) if at == group] for group in "012"]


def environment(program, args):
    leaves = program.flatten(args)
    return {i.var: leaves[i.var] for i in program.inputs if i.role == "argument"}


def run(program, pieces, args, step=None, hidden=None):
    """The program's result, piece by piece, checking that nothing which is kept shares memory."""
    plain = not torch._C._are_functorch_transforms_active()
    values = environment(program, args) | (
        ambient_inputs(program.inputs) if hidden is None else hidden
    )
    found, inputs = {}, {*memory(values.values())} if plain else {}
    for number, piece in enumerate(pieces):
        given = {value: values[value] for value in piece.block.inputs}
        out = run_block(piece.block, given) if step is None else step(number, piece, given)
        found.update(zip(piece.outputs, out, strict=False))
        values.update(zip(piece.keeps, out[len(piece.outputs) :], strict=True))
        if plain:
            fresh = memory([values[value] for value in piece.keeps])
            assert len(set(fresh)) == len(fresh)
            assert not inputs & {*fresh}
        for value in piece.spends:
            del values[value]
    left = {value for value in values if isinstance(value, Var)}
    assert left == {given.var for given in program.inputs}
    return tree.unflatten(program.out_structure, [found[p] for p in range(len(found))])


def memory(tensors):
    return [x.untyped_storage().data_ptr() for x in tensors if x.numel()]


def assert_same(got, want, tolerance=0.0):
    assert tree.flatten(got)[1] == tree.flatten(want)[1]
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a == b


def work(*blocks):
    """How often each operation runs that is no view or cast and has operands."""
    counts = Counter()
    for block in blocks:
        for equation, times in block.walk():
            if isinstance(equation.op, Scan) or is_effect(equation):
                continue
            if equation.operands and not equation.aliases and equation.name != "_to_copy":
                counts[equation.name] += times
    return counts


def products(block):
    return sum(count for name, count in work(block).items() if name in ("mm", "bmm", "addmm"))


def check(joint, *args, early=True):
    """Cut a joint function in F, I and W; they compute what it computes, with the same work."""
    program = trace(joint)(*args)
    pieces = cut_program(program, fiw(program), early=early)
    assert work(*(piece.block for piece in pieces)) == work(program.block)
    for piece in pieces:
        made = {value for e in piece.block.equations for value in e.results}
        assert {v for e in piece.block.equations for v in e.operands} <= made | {
            *piece.block.inputs
        }
    assert bytes_held(pieces)[-1] == 0
    got = run(program, pieces, args)
    assert_same(got, run_in_lockstep(program, *args))
    assert_same(got, joint(*args))
    return program, pieces


# --- layers whose products can be counted by hand


def layer(x, w):
    return torch.tanh(x @ w["w"] + w["b"])


def mlp(params, x):
    for w in params:
        x = layer(x, w)
    return x


def scanned_mlp(params, x):
    return ft.scan(lambda x, w: (layer(x, w), None), x, params)[0]


def mlp_weights(num_layers, size=6):
    w = {"w": randn(num_layers, size, size) / 2, "b": randn(num_layers, size, seed=1)}
    return w, rows_of(w, num_layers)


def rows_of(stacked, length):
    return [tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(length)]


@pytest.mark.parametrize("scanned", [False, True])
def test_an_mlp_has_one_product_per_layer_in_each_piece(scanned):
    stacked, listed = mlp_weights(4)
    stage, weights = (scanned_mlp, stacked) if scanned else (mlp, listed)
    x, ct = randn(5, 6, seed=2), randn(5, 6, seed=3)
    _, pieces = check(joint_of(stage), weights, x, ct)
    assert [products(piece.block) for piece in pieces] == [4, 4, 4]
    assert work(pieces[2].block) == Counter(mm=4, sum=4)
    # F keeps every layer's input but the stage's, and every layer's output for tanh', once (a scan
    # stacks both); I keeps the cotangents of the pre-activations
    rows = 5 * 6 * 8
    assert pieces[0].kept_bytes == (8 if scanned else 4) * rows
    assert pieces[1].kept_bytes == 4 * rows
    # W reads the inputs of layers: outputs of the layers before, and the argument
    assert bytes_held(pieces)[1] == (8 if scanned else 7) * rows


@pytest.mark.parametrize("scanned", [False, True])
def test_gradients_are_those_of_torch(scanned):
    stacked, listed = mlp_weights(3)
    stage, weights = (scanned_mlp, stacked) if scanned else (mlp, listed)
    x, ct = randn(5, 6, seed=2), randn(5, 6, seed=3)
    program = trace(joint_of(stage))(weights, x, ct)
    y, dx, dweights = run(program, cut_program(program, fiw(program)), (weights, x, ct))
    leaves = [leaf.clone().requires_grad_() for leaf in tree.leaves(weights)]
    at = x.clone().requires_grad_()
    rows = tree.unflatten(tree.structure(weights), leaves)
    if scanned:
        rows = rows_of(rows, 3)
    want = mlp(rows, at)
    grads = torch.autograd.grad(want, [at, *leaves], ct)
    assert_same([y, dx, *tree.leaves(dweights)], [want.detach(), *grads], 1e-14)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_first_stage_keeps_its_chain_of_cotangents_in_the_middle(scanned):
    stacked, listed = mlp_weights(4)
    stage, weights = (scanned_mlp, stacked) if scanned else (mlp, listed)
    joint = joint_of(stage)

    def first(weights, x, ct):
        y, _, dweights = joint(weights, x, ct)
        return y, None, dweights

    args = (weights, randn(5, 6, seed=2), randn(5, 6, seed=3))
    _, pieces = check(first, *args)
    # the chain ends at the first layer; a scan's last iteration computes dx all the same
    assert [products(piece.block) for piece in pieces] == [4, 4 if scanned else 3, 4]
    _, pieces = check(first, *args, early=False)
    assert [products(piece.block) for piece in pieces] == [4, 0, 8 if scanned else 7]
    assert not pieces[1].block.equations


def test_a_scan_with_one_weight_keeps_its_chain_in_the_middle():
    def first(w, x, ct):
        y, pullback = vjp(lambda w: ft.scan(lambda x, w: (torch.tanh(x @ w), None), x, w)[0], w)
        return y, None, pullback(ct)[0]

    _, pieces = check(first, randn(3, 6, 6), randn(5, 6, seed=2), randn(5, 6, seed=3))
    assert [products(piece.block) for piece in pieces] == [3, 3, 3]


def test_a_weight_that_iterations_share_is_summed_up_late():
    def stage(w, x):
        return ft.scan(lambda x, _: (torch.tanh(x @ w), None), x, None, length=3)[0]

    _, pieces = check(joint_of(stage), randn(6, 6), randn(5, 6, seed=2), randn(5, 6, seed=3))
    assert [products(piece.block) for piece in pieces] == [3, 3, 3]
    late = pieces[2].block.equations[-1].op
    assert isinstance(late, Scan)
    assert (late.num_carry, late.reverse) == (1, True)


def test_scans_in_scans():
    def inner(x, w):
        return ft.scan(lambda x, w: (layer(x, w), x.sum()), x, w)

    def stage(params, x):
        def outer(x, w):
            x, sums = inner(x, w)
            return torch.sin(x) + sums.sum(), sums

        x, sums = ft.scan(outer, x, params)
        return x * sums.mean()

    weights = {"w": randn(2, 3, 6, 6) / 2, "b": randn(2, 3, 6, seed=1)}
    _, pieces = check(joint_of(stage), weights, randn(5, 6, seed=2), randn(5, 6, seed=3))
    assert [products(piece.block) for piece in pieces] == [6, 6, 6]


def test_scans_over_nothing():
    stacked, _ = mlp_weights(4)
    none = tree.map(lambda leaf: leaf[:0], stacked)
    joint, args = joint_of(scanned_mlp), (none, randn(5, 6), randn(5, 6, seed=3))
    program = trace(joint)(*args)
    assert_same(run(program, cut_program(program, fiw(program)), args), joint(*args))


# --- what is kept


def test_sums_over_tokens_run_where_their_operands_are():
    def stage(w, x):
        return torch.nn.functional.rms_norm(x, (6,), w["scale"]) @ w["w"]

    w = {"scale": randn(6), "w": randn(6, 6)}
    _, pieces = check(joint_of(stage), w, randn(50, 6, seed=2), randn(50, 6, seed=3))
    assert [products(piece.block) for piece in pieces] == [1, 1, 1]
    assert work(pieces[2].block) == Counter(mm=1)
    # I keeps the scale's gradient alone: W reads the normed x of F, and the argument ct
    assert pieces[1].kept_bytes == 6 * 8


def test_masks_are_kept_instead_of_what_they_are_made_of():
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mask = x > 0
            return x * 2

        @staticmethod
        def backward(ctx, *cotangents):
            return cotangents[0] * ctx.mask

    def stage(w, x):
        return Relu.apply(x @ w)

    _, pieces = check(
        lambda w, x, ct: joint_like(stage, w, x, ct), randn(6, 6), randn(5, 6), randn(5, 6)
    )
    assert pieces[0].kept_bytes == 5 * 6  # bool


def joint_like(stage, w, x, ct):
    leaves = [w.detach().requires_grad_(), x.detach().requires_grad_()]
    with torch.enable_grad():
        y = stage(*leaves)
    dw, dx = torch.autograd.grad(y, leaves, ct)
    return y.detach(), dx, dw


def test_accumulators_are_read_by_the_last_piece_alone():
    def joint(w, x, ct, sums):
        y, dx, dw = joint_of(mlp)(w, x, ct)
        return y, dx, tree.map(torch.add, sums, dw)

    _, weights = mlp_weights(3)
    sums = tree.map(torch.randn_like, weights)
    args = (weights, randn(5, 6, seed=2), randn(5, 6, seed=3), sums)
    program, pieces = check(joint, *args)
    mine = {given.var for given in program.inputs if given.path.startswith("3/")}
    assert mine & {*pieces[2].block.inputs} == mine
    assert not mine & {*pieces[0].block.inputs, *pieces[1].block.inputs}


def test_casts_are_made_again():
    def stage(w, x):
        y = (x @ w.to(torch.bfloat16)).to(torch.float32)
        return (torch.tanh(y) * y).to(torch.bfloat16)

    x, ct = (randn(5, 6, seed=i, dtype=torch.bfloat16) for i in range(2))
    program = trace(joint_of(stage))(randn(6, 6, dtype=torch.float32), x, ct)
    pieces = cut_program(program, fiw(program))
    kept = [(value.shape, value.dtype) for value in pieces[0].keeps]
    # neither the weight in bfloat16 nor the product in float32
    assert sorted(map(str, kept)) == sorted(
        map(str, [((5, 6), torch.bfloat16), ((5, 6), torch.float32)])
    )
    args = (randn(6, 6, dtype=torch.float32), x, ct)
    assert_same(run(program, pieces, args), joint_of(stage)(*args))


def test_outputs_may_be_inputs_constants_views_and_each_other():
    def joint(w, x, ct):
        y = x @ w
        return y, y.t(), {"same": y, "input": x, "view": x[:1], "number": 3, "sum": x.sum()}

    _, pieces = check(joint, randn(6, 6), randn(5, 6), randn(5, 6))
    assert [len(work(piece.block)) for piece in pieces] == [1, 0, 1]


def test_groups_may_come_in_any_number_and_order():
    _, weights = mlp_weights(3)
    args = (weights, randn(5, 6, seed=2), randn(5, 6, seed=3))
    program = trace(joint_of(mlp))(*args)
    want = run_in_lockstep(program, *args)
    count = len(program.outputs)
    for groups in (
        [[*range(count)]],
        [[i] for i in range(count)],
        [[i] for i in range(count)][::-1],
    ):
        pieces = cut_program(program, groups)
        assert work(*(piece.block for piece in pieces)) == work(program.block)
        assert_same(run(program, pieces, args), want)


def test_groups_must_hold_every_output_once():
    program = trace(lambda x: (x + 1, x + 2, x + 3))(randn(2))
    with pytest.raises(
        ValueError, match=r"output 1: got in 0 groups; wanted in one group"
    ) as error:
        cut_program(program, [[0], [2, 2], [5]])
    assert "output 2: got in 2 groups" in str(error.value)
    assert "output 5: got in 1 groups; wanted outputs 0 to 2" in str(error.value)


def test_side_effects_run_once_and_as_soon_as_they_can(capsys):
    def stage(w, x):
        ft.debug.print("start")

        def body(x, w):
            x = layer(x, w)
            ft.debug.print("layer {:.3f}", x.mean())
            return x, None

        return ft.scan(body, x, w)[0]

    stacked, _ = mlp_weights(2)
    args = (stacked, randn(5, 6, seed=2), randn(5, 6, seed=3))
    program = trace(joint_of(stage))(*args)
    pieces = cut_program(program, fiw(program))
    run_in_lockstep(program, *args)
    want = capsys.readouterr().out
    run(program, pieces, args)
    assert capsys.readouterr().out == want
    assert want.count("layer") == 2
    effects = [sum(is_effect(e) for e, _ in piece.block.walk()) for piece in pieces]
    assert effects == [2, 0, 0]


def test_ordered_effects_keep_their_order_or_are_refused(capsys):
    def joint(seen):
        def f(w, x, ct):
            y, pullback = vjp(lambda w, x: torch.tanh(x @ w), w, x)
            dw, dx = pullback(ct)
            values = {"y": y, "dx": dx, "dw": dw}
            for name in seen:
                ft.debug.print(f"{name} {{:.3f}}", values[name].sum(), ordered=True)
            return y, dx, dw

        return f

    args = randn(6, 6), randn(5, 6, seed=2), randn(5, 6, seed=3)
    program = trace(joint(["y", "dx", "dw"]))(*args)
    run_in_lockstep(program, *args)
    want = capsys.readouterr().out
    run(program, cut_program(program, fiw(program)), args)
    assert capsys.readouterr().out == want
    backwards = trace(joint(["dx", "y"]))(*args)
    with pytest.raises(
        ValueError, match=r"ordered=True at .*test_cut.py.*; fix: leave ordered out"
    ):
        cut_program(backwards, fiw(backwards))


# --- random programs


@st.composite
def programs(draw):
    """A function of three matrices with scans in it, and groups of its outputs."""
    steps = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99), st.integers(0, 99)),
                          min_size=3, max_size=14))  # fmt: skip
    outputs = draw(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), min_size=2, max_size=7)
    )
    return steps, outputs


def step(kind, a, b, inside):
    if kind == 0:
        return [torch.tanh(a @ b) / 2]
    if kind == 1:
        return [a.t(), b[:1].expand(3, 3)]
    if kind == 2:
        return [a.sum(0, keepdim=True) + b]
    if kind == 3:
        return [torch.cat([a, b]).split([1, 3, 2], 0)[1].cos()]
    if kind in (4, 5) and not inside:
        rows = torch.stack([a, b, a * b])

        def body(carry, x):
            (p, q), r = carry, x
            for inner in (0, 2, kind):
                p, q = step(inner % 4, p, q + r, True)[0] / 2, p
            return (p, q), (p * r if kind == 4 else r.t(), q)

        (p, q), (y, z) = ft.scan(body, (a, b), rows)
        return [p, q, y[0], z.sum(0) / 3]
    return [a - b]


@given(programs(), st.booleans())
@settings(max_examples=25)
def test_random_programs(drawn, early):
    steps, outputs = drawn

    def f(*inputs):
        values = list(inputs)
        for kind, i, j in steps:
            values += step(kind, values[i % len(values)], values[j % len(values)], False)
        return [values[-1 - i % len(values)] for i, _ in outputs]

    args = tuple(randn(3, 3, seed=seed) for seed in range(3))
    program = trace(f)(*args)
    groups = [[p for p, (_, g) in enumerate(outputs) if g == group] for group in range(3)]
    pieces = cut_program(program, groups, early=early)
    # the program's scans may compute what nothing needs
    assert work(*(piece.block for piece in pieces)) <= work(program.block)
    assert_same(run(program, pieces, args), run_in_lockstep(program, *args))
    compiled = run(program, pieces, args, compiled_step(program))
    assert_same(compiled, run_in_lockstep(program, *args))


def compiled_step(program, **options):
    def step(number, piece, given):
        part = piece.program(program, donate=piece.spends)
        made = compile_program(part, **options or {"backend": "eager"})
        wanted = [i.var for i in made.program.inputs if i.role == "argument"]
        return made.run([given[value].clone() for value in wanted])

    return step


# --- gpt, in simulation

PARTS = {
    "first": Part(embed=True, layers=range(2)),
    "middle": Part(layers=range(1, 3)),
    "last": Part(layers=range(1, 3), loss=True),
    "whole": Part(embed=True, layers=range(3), loss=True),
}


def gpt_stage(name, mesh, *, sequence_parallel=False, remat="none", dtype="float64", **changes):
    """The joint function of a stage on a mesh, and arguments for it."""
    config = gpt.GPTConfig(
        vocab_size=40, num_layers=3, embed_dim=32, num_heads=4, mlp_dim=48, max_seq=16,
        init_stddev=0.2, dtype=dtype, **changes,
    )  # fmt: skip
    part, defs = PARTS[name], gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    params = ft.init_params(random.key(0), defs, specs, mesh)
    params["blocks"] = tree.map(
        lambda leaf: leaf[part.layers.start : part.layers.stop], params["blocks"]
    )
    stream = gpt.SEQUENCE_PARALLEL_STREAM if sequence_parallel else gpt.STREAM
    key = random.key(1) if config.dropout else None

    def stage(params, x, batch):
        return gpt.stage_loss(
            config, part, params, x, batch, ft.ModelOptions(stream=stream, remat=remat), key=key
        )

    def joint(params, x, batch, ct):
        y, pullback = vjp(lambda params, x: stage(params, x, batch), params, x)
        dparams, dx = pullback(ct)
        return y, [] if dx is None else [dx], dparams

    tokens = torch.randint(0, 40, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}
    float_dtype = config.torch_dtype
    x = None if part.embed else randn(4, 16, 32, dtype=float_dtype)
    ct = (
        randn(seed=1, dtype=float_dtype)
        if part.loss
        else randn(4, 16, 32, seed=1, dtype=float_dtype)
    )
    places = (specs, stream, P(("dp",)), P() if part.loss else stream)
    out = (P() if part.loss else stream, stream, specs)
    return ft.shard_map(joint, mesh, places, out, check=False), (params, x, batch, ct), out, places


@pytest.mark.pairwise(
    of=lambda part, options, mesh: [
        {"part": part, "options": options},
        {"mesh": mesh, "split": "sequence_parallel" in options},
        {"mesh": mesh, "dropout": "dropout" in options},
    ]
)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("middle", {}),
        ("first", {"sequence_parallel": True}),
        ("whole", {"remat": "full", "sequence_parallel": True}),
        ("whole", {"tied": True, "dropout": 0.1}),
        ("middle", {"remat": "selective", "num_kv_heads": 2, "qk_norm": True}),
        ("first", {"remat": "dots", "dropout": 0.1, "sequence_parallel": True}),
        (
            "last",
            {"norm": "layer", "bias": True, "positions": "learned", "gated": False}
            | {"activation": "gelu", "z_loss": 1e-3},
        ),
    ],
    ids=str,
)
def test_stages_of_gpt(part, options, mesh):
    joint, args, out_specs, in_specs = gpt_stage(part, mesh, **options)
    program = trace(joint)(*args)
    pieces = cut_program(program, fiw(program))
    assert work(*(piece.block for piece in pieces)) == work(program.block)

    def rank(*args):
        return run(program, pieces, args)

    got = ft.shard_map(rank, mesh, in_specs, out_specs, check=False)(*args)
    assert_same(got, joint(*args), 1e-12)
    assert_same(got, run_in_lockstep(program, *args), 1e-12)
    layers, loss = len(PARTS[part].layers), PARTS[part].loss
    matrices = (7 if options.get("gated", True) else 6) * layers + loss
    # a block's last product is not needed again
    again = 6 * layers if options.get("remat") == "full" else 0
    counts = [work(piece.block)["mm"] for piece in pieces]
    assert counts == [matrices, matrices + again, matrices]
    assert not {"_scaled_dot_product_flash_attention_for_cpu", "bmm"} & set(work(pieces[2].block))


# --- compiled pieces


def test_compiled_pieces_of_gpt():
    joint, args, *_ = gpt_stage("middle", Mesh(), remat="selective", dropout=0.1)
    program = trace(joint)(*args)
    pieces = cut_program(program, fiw(program))
    got = run(program, pieces, args, compiled_step(program))
    assert_same(got, run_in_lockstep(program, *args))


def test_pieces_through_inductor(tmp_path_factory):
    def stage(w, x):
        return ft.scan(lambda x, w: (torch.tanh(x * w), None), x, w)[0]

    args = (randn(3, 6), randn(5, 6, seed=2), randn(5, 6, seed=3))
    program = trace(joint_of(stage))(*args)
    pieces = cut_program(program, fiw(program))
    cache = tmp_path_factory.getbasetemp() / "kernels"
    got = run(program, pieces, args, compiled_step(program, cache=cache))
    assert_same(got, run_in_lockstep(program, *args), 1e-12)


@pytest.mark.distributed
def test_pieces_on_processes(torchrun):
    torchrun(
        textwrap.dedent(
            f"""
            import sys
            import torch
            import functron as ft
            from functron import Mesh
            from functron.compiler import compile as compile_program
            from functron.pipeline.cut import cut_program
            from functron.program.trace import trace
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from test_cut import assert_same, compiled_step, fiw, gpt_stage, run

            torch.distributed.init_process_group("gloo")
            mesh = Mesh(tp=2)
            bound = mesh.bind()
            joint, args, out_specs, in_specs = gpt_stage("first", mesh, sequence_parallel=True)
            shards = ft.shard(args, in_specs, bound)
            mapped = ft.shard_map(joint.f, bound, in_specs, out_specs, check=False)
            want = mapped(*shards)  # of norms' scales, each rank has its own part of the gradient
            program = trace(mapped)(*shards)
            pieces = cut_program(program, fiw(program))
            got = ft.shard_map(
                lambda *args: run(program, pieces, args), bound, in_specs, out_specs, check=False
            )(*shards)
            assert_same(got, want, 1e-12)
            step = compiled_step(program, backend="eager", mesh=bound)
            axes = {{i.var: torch.tensor(bound.coordinate[i.path])
                    for i in program.inputs if i.role == "axis_index"}}
            assert_same(run(program, pieces, shards, step, axes), want, 1e-12)
            torch.distributed.destroy_process_group()
            """
        ),
        2,
    )


def test_a_piece_takes_the_memory_that_it_is_given():
    def joint(w, x, ct, sums):
        y, dx, dw = joint_of(scanned_mlp)(w, x, ct)
        return y, dx, tree.map(torch.add, sums, dw)

    weights, _ = mlp_weights(3)
    sums = tree.map(torch.randn_like, weights)
    args = (weights, randn(5, 6, seed=2), randn(5, 6, seed=3), sums)
    program = trace(joint)(*args)
    pieces = cut_program(program, fiw(program))
    mine = {given.var: given.path for given in program.inputs if given.path.startswith("3/")}
    memory = {leaf.data_ptr() for leaf in tree.leaves(sums)}
    want = run_in_lockstep(program, *args)

    def step(number, piece, given):
        part = piece.program(program, donate={*piece.spends, *mine})
        made = compile_program(part, backend="eager")
        inputs = [i for i in part.inputs if i.role == "argument"]
        assert {i.var for i in inputs if i.donated} >= {*mine} & {*piece.block.inputs}
        out = made.run([given[i.var] for i in inputs])
        if number == 2:
            assert len(made.updated) == len(mine)
            assert {value.data_ptr() for value in out} == memory
        return out

    assert_same(run(program, pieces, args, step), want)


def test_a_piece_is_a_program():
    joint, args, *_ = gpt_stage("middle", Mesh())
    program = trace(joint)(*args)
    values = {**environment(program, args), **ambient_inputs(program.inputs)}
    for piece in cut_program(program, fiw(program)):
        part = piece.program(program)
        given = [values[i.var] for i in part.inputs if i.role == "argument"]
        arguments = tree.unflatten(part.in_structure, given)
        out = part(*arguments)
        assert_same(out, run_block(piece.block, {v: values[v] for v in piece.block.inputs}))
        assert_same(compile_program(part, backend="eager")(*arguments), out)
        values.update(zip(piece.keeps, out[len(piece.outputs) :], strict=True))
        assert part.cost().hardware_flops > 0
        assert part.memory().peak_bytes > piece.kept_bytes
        assert str(part)


def test_a_block_keeps_no_more_for_w_than_its_products_read():
    joint, args, *_ = gpt_stage("middle", Mesh())
    program = trace(joint)(*args)
    _, late, _ = pieces = cut_program(program, fiw(program))
    tokens, layers, embed, mlp, number = 4 * 16, 2, 32, 48, 8
    # operands of the products: x of q, k, v; of out; of gate and up; of down; and cotangents of
    # q, k, v, out, gate, up and down
    operands = tokens * (embed + embed + embed + mlp + 3 * embed + embed + 2 * mlp + embed)
    scales = 2 * embed
    assert bytes_held(pieces)[1] == layers * (operands + scales) * number
    assert late.kept_bytes == layers * (tokens * (5 * embed + 2 * mlp) + scales) * number


# --- two pieces as one program


def exchanging(part, params, x, batch):
    """A stage of layers that send their rows to experts on other ranks, and back."""

    def layer(x, w):
        there = lax.all_to_all(x @ w["in"], "ep", 0, 0, tiled=True)
        return x + lax.all_to_all(torch.tanh(there @ w["out"]), "ep", 0, 0, tiled=True), None

    return ft.scan(layer, batch if x is None else x, params)[0]


def test_two_pieces_beside_each_other_hide_what_each_sends():
    """A forward and the backward of another microbatch: their numbers, and less is exposed."""
    params = {"in": randn(3, 4, 4), "out": randn(3, 4, 4)}
    call = StageCall(1, layout_of((1, 1))[1], False, params, randn(2, 4), (), (), {})
    stage = trace_stage(exchanging, call, Mesh(ep=2), split=False)
    forward, backward = (stage.piece_program(index) for index in (0, 1))
    joint = join_programs(forward, backward)

    def arguments(program):
        return [randn(*i.var.shape) for i in program.inputs if i.role == "argument"]

    def computed(program, tensors):
        return program(*tree.unflatten(program.in_structure, tensors))

    one, other = arguments(forward), arguments(backward)
    want = [*computed(forward, one), *computed(backward, other)]
    for a, b in zip(computed(joint, [*one, *other]), want, strict=True):
        assert torch.equal(a, b)

    def costs(equation):
        return {"mm": 2.0, "all_to_all": 2.0}.get(equation.name, 0.0)

    # in turns: of 6 exchanges of each only the last ones have nothing beside them
    alone = [program.timeline(costs) for program in (forward, backward)]
    assert [timeline.exposed["ep"] for timeline in alone] == [12.0, 6.0]
    assert joint.timeline(costs, overlap=False).exposed == {"ep": 24.0}
    together = joint.timeline(costs)
    assert together.exposed == {"ep": 2.0}
    assert together.total == sum(t.busy["compute"] for t in alone) + 2.0


@pytest.mark.parametrize("split", [False, True])
def test_compiled_pieces_keep_slices_and_stack_none(split):
    """Values that one piece hands to scans of the next stay as its iterations made them."""

    def stage(part, params, x, batch):
        return ft.scan(lambda x, w: (x + torch.tanh(x @ w["a"]) @ w["b"], None), x, params)[0]

    params = {"a": randn(3, 4, 5), "b": randn(3, 5, 4, seed=1)}
    part, x, cotangent = layout_of((1, 1))[1], randn(2, 4, seed=2), randn(2, 4, seed=3)
    found, kept = [], {}
    for settings_ in ({"backend": "eager"}, None):
        work = CutStages(stage, split, None, settings_)
        y, residuals = finish_steps(work.forward(StageCall(1, part, False, params, x, (), (), {})))
        if settings_ is not None:
            kept = dict(residuals.values)
        sums = tree.map(torch.ones_like, params)
        found.append((y, *finish_steps(work.backward(residuals, [cotangent], sums))))
    lists = [value for value in kept.values() if isinstance(value, list)]
    assert len(lists) == 2  # the carry, and tanh
    assert {len(value) for value in lists} == {3}
    assert not [v for v in kept.values() if not isinstance(v, list) and v.shape[0] == 3
                and not any(v is leaf for leaf in tree.leaves(params))]  # fmt: skip
    for a, b in zip(tree.leaves(found[0]), tree.leaves(found[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


NUM_LAYERS, ROW_BYTES = 6, 512 * 8 * 8


def sines(part, params, x, batch):
    return ft.scan(lambda x, w: (torch.sin(x @ w), None), x, params)[0]


def call_sines(work, x, weights, sums):
    call = StageCall(1, layout_of((1, 1))[1], False, weights, x, (), (), {})
    residuals = finish_steps(work.forward(call))[1]
    return finish_steps(work.backward(residuals, [torch.ones_like(x)], sums))


def test_evaluated_pieces_free_each_layers_values_after_it():
    """Of a layer I needs the product and W the input; I leaves a cotangent in the product's place."""
    weights, x = randn(NUM_LAYERS, 8, 8), randn(512, 8)
    work = CutStages(sines, True, None, None)

    def both():
        return call_sines(work, x, weights, torch.zeros_like(weights))

    both()  # traces
    rows = measured_peak(both) / ROW_BYTES
    # two of each layer, and in I: three cotangents, a cosine and the output that nobody reads
    assert 2 * NUM_LAYERS < rows < 2 * NUM_LAYERS + 5


@pytest.mark.parametrize("work", [CutStages(sines, True, None, None), CutStages(sines, False, None, None),
                                  Pullbacks(sines)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_of_gradients_stay_where_they_are(work, dtype):
    weights, x = randn(NUM_LAYERS, 8, 8), randn(5, 8)
    sums = randn(NUM_LAYERS, 8, 8, seed=1, dtype=dtype)
    before, place = sums.clone(), sums.data_ptr()
    if isinstance(work, CutStages):
        work = CutStages(sines, work.split, dtype, None)
    _, got = call_sines(work, x, weights, sums)
    grads = torch.func.grad(lambda w: sines(None, w, x, None).sum())(weights)
    torch.testing.assert_close(got, before + grads.to(dtype), rtol=1e-6, atol=1e-6)
    assert got.dtype == dtype
    assert got.data_ptr() == place
