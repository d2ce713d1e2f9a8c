"""Gradient functions and their wrappers: every legal nesting gives the dense gradients, float64."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, optim, random, tree
from functron.nn import IGNORE_INDEX
from functron.pipeline import Partition, even_layout, make, pipelined
from functron.training import step as steps
from functron.transforms import (
    NESTINGS,
    BoundGradients,
    GradientFunction,
    View,
    informed,
    nesting_table,
    with_view,
    without_targets,
    wrap_gradients,
)

TOLERANCE = 1e-10
BATCH, SEQ, VOCAB = 8, 6, 20
CONFIG = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=24, max_seq=SEQ,
    init_stddev=0.3, dtype="float64", tied=True,
)  # fmt: skip
MESHES = [
    Mesh(),
    Mesh(dp=2, tp=2),
    Mesh(fsdp=2, tp=2),
    Mesh(dp=2, fsdp=2),
    Mesh(pp=2),
    Mesh(pp=2, fsdp=2),
    Mesh(dp=2, pp=2, tp=2),
]
SETS = [
    chosen
    for count in range(6)
    for chosen in itertools.combinations(
        ("encoded", "gathered_once", "frozen", "scattered", "accumulated"), count
    )
]


def batch() -> dict:
    """Samples of which every one has another number of targets, and so has every microbatch."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for row in range(BATCH):
        targets[row, : row % SEQ] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


def start() -> dict:
    return ft.init_params(random.key(3), gpt.defs(CONFIG), P(), Mesh())


@functools.cache
def dense():
    """The mean loss and its gradients by torch's tape, on one device."""
    params = tree.map(lambda x: x.clone().requires_grad_(), start())
    data = batch()
    count = (data["targets"] != IGNORE_INDEX).sum()
    loss = gpt.loss(CONFIG, params, data) / count
    grads = torch.autograd.grad(loss, tree.leaves(params))
    return loss.item(), tree.unflatten(tree.structure(params), list(grads))


def base_of(mesh, options):
    def loss(params, data, key):
        return gpt.loss(CONFIG, params, data, options)

    def stage(part, params, x, data, key, total):
        y = gpt.stage_loss(CONFIG, part, params, x, data, options)
        return y / total if part.loss else y

    if mesh["pp"] == 1:
        return ft.mean_gradients(loss, gpt.num_targets)
    table = make("1f1b", mesh["pp"], 2)
    layout = even_layout(table.num_stages, CONFIG.num_layers)
    stages = pipelined(stage, Partition(layout, table.pipes, gpt.uses(CONFIG)), table)
    return ft.pipeline.gradients(stages, gpt.num_targets)


TRAINABLE = {"embed": True, "blocks": False, "norm": True}


def wrap(g, name):
    if name == "accumulated":
        return g if "pipeline.gradients" in g.names else ft.accumulated(g, 2)
    if name == "frozen":
        return ft.frozen(g, TRAINABLE)
    if name == "encoded":  # the codes of no parameter: those of products are in tests/precision
        return ft.encoded(g, lambda params, specs: tree.map(lambda leaf: None, params))
    return getattr(ft, name)(g)


@pytest.mark.pairwise(
    of=lambda mesh, chosen: {
        "mesh": mesh, **{name: name in chosen for name in SETS[-1]}
    }
)  # fmt: skip
@pytest.mark.parametrize("chosen", SETS, ids="-".join)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_legal_nesting_has_the_dense_gradients(mesh, chosen):
    """By a step of gradient descent, whose parameters move by the gradients."""
    rules = {**gpt.rules(CONFIG, mesh), "embed": "fsdp"} if mesh["fsdp"] > 1 else {}
    specs = ft.param_specs(gpt.defs(CONFIG), ft.Rules(rules) if rules else gpt.rules(CONFIG, mesh))
    gather = ft.Gather() if "gathered_once" in chosen else ft.Gather(specs)
    g = base_of(mesh, ft.ModelOptions(gather=gather))
    for name in reversed(chosen):
        g = wrap(g, name)
    optimizer = optim.sgd(1.0)
    if "frozen" in chosen:
        optimizer = optim.only(optimizer, TRAINABLE)
    elif "scattered" in chosen:
        shards = optim.shard_specs(gpt.defs(CONFIG), specs, mesh)
        optimizer = optim.zero(optimizer, shards=shards)
    step = ft.make_step(g, optimizer, mesh, specs)
    state = ft.init_state(random.key(0), gpt.defs(CONFIG), specs, optimizer, mesh, start())
    state, metrics = step(state, batch())
    loss, grads = dense()
    assert metrics["loss"].item() == pytest.approx(loss, rel=TOLERANCE)
    if "frozen" in chosen:
        grads = {n: g if TRAINABLE[n] else tree.map(torch.zeros_like, g) for n, g in grads.items()}
    wanted = tree.map(lambda p, g: p - g, start(), grads)
    torch.testing.assert_close(state.params, wanted, rtol=0, atol=TOLERANCE)
    norm = sum(float(g.square().sum()) for g in tree.leaves(grads)) ** 0.5
    assert metrics["grad_norm"].item() == pytest.approx(norm, rel=TOLERANCE)


def plain():
    return ft.mean_gradients(lambda p, b, key: p["w"].sum(), lambda b: 1)


def test_illegal_nestings_are_refused_with_the_reason_and_the_order():
    refused = 0
    for (outer, inner), reason in NESTINGS.items():
        if outer not in SETS[-1] or inner not in SETS[-1]:
            continue
        inside = wrap(plain(), inner)
        if not reason:
            assert wrap(inside, outer).names == (outer, inner, "mean_gradients")
            continue
        refused += 1
        with pytest.raises(ValueError, match=f"cannot put {outer} around {inner}") as caught:
            wrap(inside, outer)
        assert reason.rpartition(": ")[2] in str(caught.value)
    assert refused == 15  # the pairs of five in one of two orders, and each twice
    everything = functools.reduce(wrap, reversed(SETS[-1]), plain())
    with pytest.raises(ValueError, match="cannot put accumulated around") as caught:
        ft.accumulated(everything, 2)
    assert str(caught.value).count("fix: ") == 5  # all at once


def test_a_pipeline_deals_its_own_microbatches():
    with pytest.raises(ValueError, match="give it their number"):
        ft.accumulated(base_of(Mesh(pp=2), ft.ModelOptions()), 2)


def test_the_table_of_nestings_has_every_pair_and_reason():
    text = nesting_table()
    for outer, inner in NESTINGS:
        assert outer in text
        assert inner in text
    assert all(reason in text for reason in NESTINGS.values())


def test_batches_have_targets_or_none():
    with pytest.raises(ValueError, match="make a step for each"):
        without_targets(ft.with_targets(plain()))


def one_parameter(g, metrics=(ft.grad_norm,), mesh=Mesh()):  # noqa: B008
    defs = {"w": ft.ParamDef((3,), (None,), ft.params.ones, torch.float64)}
    optimizer, specs = optim.sgd(1.0), {"w": P()}
    step = ft.make_step(g, optimizer, mesh, specs, metrics=metrics)
    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
    data = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    return step(state, data)


def squares(params, data, key):
    return ft.lax.psum((data @ params["w"]).square().sum(), "dp")


def rows(data):
    return ft.lax.psum(len(data), "dp")


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_a_view_of_ones_own_is_differentiated_through_the_others(mesh):
    """The loss is of exp(w) where w is trained: the chain rule by hand."""
    view = View(
        "logarithms",
        specs=lambda specs, into: specs,
        split=lambda params, aside, specs, into: (tree.map(torch.log, params), aside),
        join=lambda params, aside, specs, into: contextlib.nullcontext(tree.map(torch.exp, params)),
    )
    g = with_view(ft.scattered(ft.accumulated(ft.mean_gradients(squares, rows), 2)), view)
    assert str(g) == "logarithms(scattered(accumulated(mean_gradients)))"
    state, _ = one_parameter(g, mesh=mesh)
    data = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    w = torch.ones(3, dtype=torch.float64)
    wanted = w - 2 * data.T @ (data @ w) / 4 * w  # d/dlog w = w d/dw
    torch.testing.assert_close(state.params["w"], wanted)
    with pytest.raises(ValueError, match="give the view a name of its own"):
        with_view(g, view)
    inside = with_view(ft.mean_gradients(squares, rows), view)
    with pytest.raises(ValueError, match="put the view around scattered"):
        ft.scattered(inside)
    with pytest.raises(ValueError, match="put the view around encoded"):
        ft.encoded(inside, lambda params, specs: None)


def test_shares_can_be_changed_before_ranks_sum_them():
    def doubled(of):
        def changed(params, data, key, divisor):
            value, grads = of(params, data, key, divisor)
            return value, tree.map(lambda g: 2 * g, grads)

        return changed

    g = ft.mean_gradients(squares, rows)
    once = one_parameter(g, mesh=Mesh(dp=2))[1]["grad_norm"]
    twice = one_parameter(wrap_gradients(g, doubled), mesh=Mesh(dp=2))[1]["grad_norm"]
    torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_microbatches_are_informed_by_a_pass_over_all(mesh):
    """Each microbatch's loss is multiplied by the sum of all the data, 66: gradients by hand."""

    def weighed(params, data, key):
        weight = data[:, 3].sqrt() if data.shape[1] > 3 else torch.ones_like(data[:, 0])
        found = ft.lax.psum(data[:, :3].sum(), "dp")
        return squares(params, weight[:, None] * data[:, :3], key), found

    def inform(data, found):
        return torch.cat([data, found.expand(len(data), 1)], 1)

    g = ft.accumulated(ft.mean_gradients(weighed, rows, has_aux=True), 2)
    state, _ = one_parameter(informed(g, inform), mesh=mesh)
    data = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    w = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(state.params["w"], w - 66 * 2 * data.T @ (data @ w) / 4)
    alone = ft.mean_gradients(squares, rows)
    with pytest.raises(ValueError, match="informed: got a sum alone; wanted aux values"):
        one_parameter(informed(alone, inform), mesh=mesh)


def test_what_is_scattered_has_no_shares_to_change():
    for wrapped in (
        lambda g: ft.scattered(wrap_gradients(g, lambda of: of)),
        lambda g: wrap_gradients(ft.scattered(g), lambda of: of),
    ):
        with pytest.raises(ValueError, match="of which no rank has shares"):
            wrapped(ft.mean_gradients(squares, rows))


def test_metrics_are_tensors_by_names_of_their_own():
    g = ft.mean_gradients(squares, rows)
    for metric, error, text in (
        (lambda seen: {"n": 3}, TypeError, "'n': int"),
        (lambda seen: None, TypeError, "got NoneType; wanted numbers by name"),
        (lambda seen: {"lr": seen.grads["w"][0]}, ValueError, "'lr'"),
    ):
        with pytest.raises(error, match=text):
            one_parameter(g, (metric,))


def test_a_count_of_a_ranks_own_samples_is_refused():
    """It would make loss and gradients grow with the number of ranks."""
    g = ft.mean_gradients(squares, len)
    one_parameter(g)
    with pytest.raises(ValueError, match=r"num_targets: got 2 on Mesh\(dp=2\), and 4 of the whole"):
        one_parameter(g, mesh=Mesh(dp=2))


@pytest.mark.parametrize(
    ("has_aux", "message"),
    [
        (
            False,
            r"returns a tuple of 2; wanted the sum alone; fix: mean_gradients\(..., has_aux=True",
        ),
        (True, r"returns Tensor; wanted a pair \(sum, aux\), for has_aux=True; fix: leave has_aux"),
    ],
)
def test_a_loss_that_returns_something_else_than_was_said_is_refused(has_aux, message):
    def loss(params, batch, key):
        value = squares(params, batch, key)
        return value if has_aux else (value, {"sum": value})

    with pytest.raises(TypeError, match=message):
        one_parameter(ft.mean_gradients(loss, lambda batch: 4, has_aux=has_aux))


def test_the_loss_reaches_an_optimizer_that_names_it():
    def by_loss(updates, state, params=None, *, value):
        return tree.map(lambda u: u * value, updates), state

    by_value = optim.transformation(lambda p: (), by_loss, lambda s: (), elementwise=True)
    optimizer = optim.chain(by_value, optim.sgd(1.0))
    defs = {"w": ft.ParamDef((3,), (None,), ft.params.ones, torch.float64)}
    step = ft.make_step(ft.mean_gradients(squares, rows), optimizer, Mesh(), {"w": P()})
    state = ft.init_state(random.key(0), defs, {"w": P()}, optimizer, Mesh())
    data, w = torch.arange(12.0, dtype=torch.float64).view(4, 3), torch.ones(3, dtype=torch.float64)
    state, _ = step(state, data)
    loss, grad = (data @ w).square().sum() / 4, 2 * data.T @ (data @ w) / 4
    torch.testing.assert_close(state.params["w"], w - loss * grad)


def test_a_metric_is_a_function_of_what_a_step_sees_before_the_update():
    def largest(seen):
        return {"largest": seen.grads["w"].abs().max(), "first": seen.state.params["w"][0]}

    state, metrics = one_parameter(ft.mean_gradients(squares, rows), (ft.grad_norm, largest))
    data, w = torch.arange(12.0, dtype=torch.float64).view(4, 3), torch.ones(3, dtype=torch.float64)
    grad = 2 * data.T @ (data @ w) / 4
    torch.testing.assert_close(metrics["largest"], grad.abs().max())
    assert metrics["first"].item() == 1.0
    assert state.params["w"][0].item() != 1.0
    assert set(metrics) == {"loss", "grad_norm", "largest", "first"}
    assert set(one_parameter(ft.mean_gradients(squares, rows), ())[1]) == {"loss"}


def code_lines(fn) -> int:
    """Lines of code of a function, without its docstring."""
    source, doc = inspect.getsource(fn), inspect.getdoc(fn)
    lines = [line for line in source.splitlines() if line.strip() and "@public" not in line]
    return len(lines) - sum(bool(line.strip()) for line in (doc or "").splitlines())


def test_make_step_fits_on_a_screen_and_calls_public_names_alone():
    source = inspect.getsource(ft.make_step)
    assert code_lines(ft.make_step) <= 32  # two of which are the quotes of the docstring
    body = source.rpartition('"""')[2]
    called = {name for name in vars(steps) if name.startswith("_") and f"{name}(" in body}
    assert called == set()


def test_gradient_functions_say_what_they_are_made_of():
    g = ft.gathered_once(ft.scattered(ft.accumulated(plain(), 4)))
    assert isinstance(g, GradientFunction)
    bound = g.bind(Mesh(dp=2), {"w": P()}, {"w": P("dp")})
    assert isinstance(bound, BoundGradients)
    assert bound.specs == {"w": P("dp")}
    assert bound.num_microbatches == 4
    assert str(g) == "gathered_once(scattered(accumulated(mean_gradients)))"
