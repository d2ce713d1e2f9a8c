"""ZeRO: every stage on every mesh gives the dense numbers, with each rank holding its part only."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, optim, random, tree
from functron.nn import IGNORE_INDEX
from functron.optim.transformation import ask, refuse_parts
from functron.pipeline import Partition, even_layout, make, pipelined
from functron.program.equations import Scan
from functron.spmd.params import Normal
from functron.spmd.spec import is_spec, spec_axes, unpad
from functron.transforms import Gather

TOLERANCE = 1e-10
STEPS, BATCH, SEQ, VOCAB = 2, 24, 6, 20

CONFIG = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=14, num_heads=4, head_dim=4, mlp_dim=24, max_seq=SEQ,
    init_stddev=0.3, dtype="float64",
)  # fmt: skip

TENSOR = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp"}
RULES = {**TENSOR, "embed": "fsdp"}


def batch(step: int) -> dict:
    """Samples of which every one has another number of targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(BATCH):
        targets[row, : row % SEQ] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


def adamw(specs, copies=1, wrap=lambda t: t):
    """Clipping, and AdamW that decays all but norms with `wrap` around it."""
    rate = optim.linear(1e-2, 10)
    inner = wrap(optim.adamw(rate, weight_decay=0.1, mask=optim.not_norm_or_bias))
    return optim.chain(optim.clip_by_global_norm(0.05, specs, copies), inner)


def muon(specs, copies=1, wrap=lambda t: t):
    return wrap(optim.muon(1e-2, optim.matrices(gpt.defs(CONFIG)), specs=specs, distributed=True))


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def sharded(name, defs, specs, mesh, copies=1):
    """The optimizer under ZeRO, and the specs of parts."""
    shards = optim.shard_specs(defs, specs, mesh)
    wrap = lambda inner: optim.zero(inner, specs, shards)
    return OPTIMIZERS[name](shards, copies=copies, wrap=wrap), shards


def run(step, state, steps=STEPS):
    history = []
    for index in range(steps):
        state, metrics = step(state, batch(index))
        history.append([metrics["loss"].item(), metrics["grad_norm"].item()])
    return state, torch.tensor(history, dtype=torch.float64)


def wrap(gradients, *, scatter=False, hoist=False):
    gradients = ft.scattered(gradients) if scatter else gradients
    return ft.gathered_once(gradients) if hoist else gradients


def step_of(
    optimizer,
    mesh,
    specs,
    *,
    config=CONFIG,
    options=None,
    num_microbatches=1,
    dtype=None,
    reduce_dtype=None,
    **how,
):
    """A training step of the decoder, whose gradients are wrapped as `how` says."""
    options = options or ft.ModelOptions()

    def loss(params, batch, key):
        return gpt.loss(config, params, batch, options)

    mean = ft.mean_gradients(loss, gpt.num_targets, reduce_dtype=reduce_dtype)
    gradients = ft.accumulated(mean, num_microbatches, dtype=dtype)
    return ft.make_step(wrap(gradients, **how), optimizer, mesh, specs)


@functools.cache
def dense(name):
    """One rank, one microbatch, nothing sharded."""
    optimizer = OPTIMIZERS[name](P())
    state = ft.init_state(random.key(1), gpt.defs(CONFIG), P(), optimizer, Mesh())
    step = step_of(optimizer, Mesh(), P())
    return run(step, state)


def close(got, want, tolerance=TOLERANCE):
    rows = zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True)
    for path, a, b in rows:
        assert a.shape == b.shape, path
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{path}: {error}"


def unpadded(state, like, specs, mesh):
    """A state of a simulated mesh in its canonical form."""
    flat = tree.broadcast_prefix(specs, like, is_leaf=is_spec)
    rows = zip(tree.leaves(state), tree.leaves(like), flat, strict=True)
    leaves = [unpad(a, b.shape, spec, mesh) for a, b, spec in rows]
    return tree.unflatten(tree.structure(like), leaves)


def test_parts_are_cut_where_sizes_divide_and_never_between_layers():
    """By hand; 14 is no multiple of 3 or 4, and 4 heads are a multiple of 4."""
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(RULES))
    parts = optim.shard_specs(defs, specs, Mesh(dp=4, tp=2))
    assert parts["embed"] == P(("tp", "dp"), "fsdp")
    assert parts["blocks"]["attention"]["q"]["w"] == P(None, "fsdp", "tp", "dp")
    assert parts["blocks"]["mlp"]["down"]["w"] == P(None, ("tp", "dp"), "fsdp")
    assert parts["blocks"]["mlp_norm"]["scale"] == P(None, ("fsdp", "dp"))
    shapes = optim.padded_shapes(defs, parts, Mesh(dp=4, tp=2))
    assert shapes["blocks"]["mlp_norm"]["scale"] == (2, 16)
    assert shapes["blocks"]["mlp"]["down"]["w"] == (2, 24, 14)
    assert shapes["embed"] == defs["embed"].shape  # padded for other reasons already
    parts = optim.shard_specs(defs, specs, Mesh(dp=3, fsdp=2))
    assert parts["norm"]["scale"] == P(("fsdp", "dp"))
    assert optim.padded_shapes(defs, parts, Mesh(dp=3, fsdp=2))["norm"]["scale"] == (18,)
    assert optim.shard_specs({"x": torch.ones(())}, P(), Mesh(dp=2)) == {"x": P()}


CASES = [
    (Mesh(dp=2), gpt.STREAM),
    (Mesh(dp=4), gpt.STREAM),
    (Mesh(dp=3), gpt.STREAM),
    (Mesh(dp=2, tp=2), gpt.STREAM),
    (Mesh(dp=2, tp=2), gpt.SEQUENCE_PARALLEL_STREAM),
    (Mesh(tp=2, dp=3), gpt.STREAM),
    (Mesh(dp=2, fsdp=2), gpt.STREAM),
]


@pytest.mark.pairwise
@pytest.mark.parametrize(("stage", "num_microbatches"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize(("mesh", "stream"), CASES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_are_the_dense_training(name, mesh, stream, stage, num_microbatches):
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(TENSOR))
    optimizer, _ = sharded(name, defs, specs, mesh)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = step_of(
        optimizer,
        mesh,
        specs,
        options=ft.ModelOptions(stream=stream),
        num_microbatches=num_microbatches,
        scatter=stage == 2,
    )
    state, history = run(step, state)
    want, want_history = dense(name)
    close(history, want_history)
    close(state.params, want.params)
    specs_of_state = ft.state_specs(specs, optimizer).opt_state
    close(unpadded(state.opt_state, want.opt_state, specs_of_state, mesh), want.opt_state)


FULLY = [
    (hoist, zero, scatter, count)
    for hoist, zero in [(True, False), (True, True), (False, True)]
    for scatter, count in [(False, 2), (True, 1), (True, 2)]
]  # without ZeRO, what is gathered at use scatters by itself: test_fsdp_composition.py


@pytest.mark.pairwise
@pytest.mark.parametrize(("hoist", "zero", "scatter", "num_microbatches"), FULLY)
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(dp=2, fsdp=2), Mesh(fsdp=2, dp=3)], ids=str)
def test_fully_sharded_parameters(mesh, hoist, zero, scatter, num_microbatches):
    """ZeRO-3, gathered once per step or at use; hybrid with dp, over which ZeRO may cut as well."""
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(RULES))
    if zero:
        optimizer, _ = sharded("adamw", defs, specs, mesh)
    else:
        optimizer = OPTIMIZERS["adamw"](specs)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    gather = Gather() if hoist else Gather(specs)
    step = step_of(
        optimizer,
        mesh,
        specs,
        options=ft.ModelOptions(gather=gather),
        num_microbatches=num_microbatches,
        scatter=scatter,
        hoist=hoist,
    )
    state, history = run(step, state)
    want, want_history = dense("adamw")
    close(history, want_history)
    close(state.params, want.params)


ALL = ("vocab", "heads", "mlp", "embed")
UNEVEN = [  # of an embed_dim of 14, 4 heads, and 24 features
    ("adamw", Mesh(fsdp=4), {}),
    ("adamw", Mesh(fsdp=3, tp=3), {"hoist": True}),
    ("adamw", Mesh(dp=2, fsdp=3), {"zero": True, "scatter": True, "num_microbatches": 2}),
    ("muon", Mesh(dp=2, tp=3), {"zero": True}),
    ("muon", Mesh(dp=2, fsdp=4), {"zero": True, "hoist": True, "scatter": True}),
]


@pytest.mark.parametrize(("name", "mesh", "how"), UNEVEN, ids=lambda value: str(value))
def test_uneven_splits(name, mesh, how):
    """Parameters that ranks do not divide; their padding stays zero, also between the steps."""
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh, uneven=ALL))
    how = dict(how)
    zero = how.pop("zero", False)
    optimizer = sharded(name, defs, specs, mesh)[0] if zero else OPTIMIZERS[name](specs)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    assert tree.map(lambda x: x.shape, state.params) == tree.map(lambda d: d.shape, defs)
    options = ft.ModelOptions(gather=Gather() if how.get("hoist") else Gather(specs))
    step = step_of(optimizer, mesh, specs, options=options, **how)
    state, history = run(step, state)
    want, want_history = dense(name)
    close(history, want_history)
    close(state.params, want.params)
    specs_of_state = ft.state_specs(specs, optimizer).opt_state
    close(unpadded(state.opt_state, want.opt_state, specs_of_state, mesh), want.opt_state)


@pytest.mark.pairwise(
    of=lambda schedule, stage, hoist: [{"schedule": schedule}, {"stage": stage}, {"hoist": hoist}]
)
@pytest.mark.parametrize("hoist", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(schedule, stage, hoist):
    mesh = Mesh(pp=2, dp=2, fsdp=2 if hoist else 1)
    table = make(schedule, 2, 3)
    partition = Partition(even_layout(2, CONFIG.num_layers), table.pipes, gpt.uses(CONFIG))

    def stage_of(part, params, x, data, key, total):
        y = gpt.stage_loss(CONFIG, part, params, x, data)
        return y / total if part.loss else y

    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(RULES if hoist else {}))
    shards = optim.shard_specs(defs, specs, mesh)
    optimizer = adamw(
        None, wrap=lambda inner: optim.zero(inner, shards=shards)
    )  # bound by the step
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    gradients = ft.pipeline.gradients(pipelined(stage_of, partition, table), gpt.num_targets)
    wrapped = wrap(gradients, scatter=stage == 2, hoist=hoist)
    step = ft.make_step(wrapped, optimizer, mesh, specs)
    state, history = run(step, state)
    want, want_history = dense("adamw")
    close(history, want_history)
    close(state.params, want.params)


@pytest.mark.pairwise(of=lambda mesh, stage: [{"mesh": mesh}, {"stage": stage}])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=3)], ids=str)
def test_compiled_and_traced(mesh, stage):
    """The program of the step, evaluated (backend eager): simulated ranks of one process."""
    defs = gpt.defs(CONFIG)
    optimizer, _ = sharded("adamw", defs, P(), mesh)
    state = ft.init_state(random.key(1), defs, P(), optimizer, mesh)
    step = step_of(optimizer, mesh, P(), num_microbatches=2, scatter=stage == 2)
    state, history = run(ft.jit(step, donate=0, backend="eager"), state)
    want, want_history = dense("adamw")
    close(history, want_history)
    close(state.params, want.params)


def counts(program):
    """Collectives by name, those of a scan once per iteration."""
    found = Counter()

    def add(block, times):
        for equation in block.equations:
            if isinstance(equation.op, Scan):
                add(equation.op.body, times * equation.op.length)
            else:
                found[equation.name] += times

    add(program.block, 1)
    return found


def traced(stage, num_microbatches):
    mesh = Mesh(dp=2)
    defs = gpt.defs(CONFIG)
    optimizer, _ = sharded("adamw", defs, P(), mesh)
    state = ft.init_state(random.key(1).to("meta"), defs, P(), optimizer, mesh)
    step = step_of(optimizer, mesh, P(), num_microbatches=num_microbatches, scatter=stage == 2)
    data = tree.map(lambda x: x.to("meta"), batch(0))
    return ft.trace(step, donate=0)(state, data)


def test_stage_2_scatters_in_every_layer_and_microbatch_and_keeps_parts_only():
    """12 parameters, of which 9 are of 2 stacked layers."""
    defs = gpt.defs(CONFIG)
    stacked, single = len(tree.leaves(defs["blocks"])), 3
    assert (stacked, len(tree.leaves(defs))) == (9, 12)
    first, second = (traced(stage, 3) for stage in (1, 2))
    assert counts(first)["psum_scatter"] == 12
    assert counts(second)["psum_scatter"] == 3 * (2 * stacked + single)
    assert counts(first)["all_gather"] == counts(second)["all_gather"] == 12
    less = first.memory().peak_bytes - second.memory().peak_bytes
    assert less > 0.4 * 8 * ft.num_params(defs)  # half of the gradients, and some padding


DTYPES = {
    "own": {},
    "float32": {"dtype": torch.float32, "reduce_dtype": torch.float32},
    "float32 sent as bfloat16": {"dtype": torch.float32, "reduce_dtype": torch.bfloat16},
}


@pytest.mark.pairwise(of=lambda mesh, dtypes: [{"mesh": mesh}, {"dtypes": dtypes}])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(dp=3)], ids=str)
def test_low_precision_with_masters(mesh, dtypes):
    """In bfloat16 the mesh decides what is rounded, so the reference is the same mesh without ZeRO.

    Stage 1 rounds in the same places; stage 2 sums ranks before microbatches: one float32 (or, where
    it is asked to, one bfloat16) rounding of a gradient, which AdamW's first steps pass on to where
    a parameter's update is below it.
    """
    config = replace(CONFIG, dtype="bfloat16")
    defs = gpt.defs(config)

    def train(stage):
        shards = optim.shard_specs(defs, P(), mesh)
        optimizer = optim.with_fp32_masters(optim.adamw(1e-2, eps=1e-3))
        optimizer = optim.zero(optimizer, P(), shards) if stage else optimizer
        state = ft.init_state(random.key(1), defs, P(), optimizer, mesh)
        step = step_of(
            optimizer,
            mesh,
            P(),
            config=config,
            num_microbatches=2,
            scatter=stage == 2,
            **DTYPES[dtypes],
        )
        state, history = run(step, state)
        return state, history, optimizer.specs(shards if not stage else P())

    want, want_history, _ = train(0)
    for stage in (1, 2):
        state, history, specs = train(stage)
        exact = stage == 1 or dtypes == "float32"
        close(history, want_history, 1e-6 if exact else 2**-7)
        masters = unpadded(state.opt_state.masters, want.opt_state.masters, specs.masters, mesh)
        close(masters, want.opt_state.masters, 1e-6 if exact else 2**-7)
        rounded = tree.map(torch.Tensor.bfloat16, masters)
        assert all(map(torch.equal, tree.leaves(state.params), tree.leaves(rounded)))


@pytest.mark.parametrize("into", [P(), P("dp")], ids=str)
@pytest.mark.parametrize(
    ("given", "dtype", "total", "result"),
    [
        (torch.bfloat16, None, 256.0, torch.bfloat16),
        (torch.bfloat16, torch.float32, 257.0, torch.float32),
        (torch.float32, torch.bfloat16, 256.0, torch.float32),
        (torch.float32, None, 257.0, torch.float32),
    ],
)
def test_the_dtype_of_the_sum_over_ranks(into, given, dtype, total, result):
    """256 + 1 needs 9 bits, and bfloat16 has 8."""
    sync = lambda g: ft.sync_gradients(ft.assume_shares(g), P(), into, dtype=dtype)
    shares = torch.tensor([256.0, 1.0]).to(given).repeat_interleave(3)
    got = ft.shard_map(sync, Mesh(dp=2), (P("dp"),), into)(shares)
    assert got.dtype == result
    assert got[:3].tolist() == [total] * 3
    assert got.shape == ((4,) if into else (3,))


def test_errors():
    with pytest.raises(ValueError, match="zero: got params=None"):
        optim.zero(optim.adamw(0.1), P(), P()).update({}, ())
    with pytest.raises(ValueError, match=r"dim 0: got P\('dp'\), from P\('tp'\); wanted the axes"):
        optim.zero(optim.adamw(0.1), P("tp"), P("dp")).init({"w": torch.ones(4)})


def unit(specs=None, copies=1, *, bind=True):
    """Updates divided by the norm of their leaf, and 1 + the largest of their sizes so far."""

    def split(spec):
        return tuple(spec_axes(spec))

    def known(tree_):
        return tree.broadcast_prefix(P() if specs is None else specs, tree_, is_leaf=is_spec)

    def update(updates, state, params=None):
        norms, largest = [], []
        rows = zip(tree.leaves(updates), tree.leaves(state), known(updates), strict=True)
        for u, top, spec in rows:
            square, size = u.square().sum(), u.abs().amax()
            if split(spec):
                square, size = ft.lax.psum(square, split(spec)), ft.lax.pmax(size, split(spec))
            largest.append(torch.maximum(top, size))
            norms.append(-0.1 * u / square.sqrt() / (1 + largest[-1]))
        shape = tree.structure(updates)
        return tree.unflatten(shape, norms), tree.unflatten(shape, largest)

    return optim.transformation(
        lambda params: tree.map(lambda p: p.new_zeros(()), params),
        update,
        lambda param_specs: tree.map(lambda spec: P(), param_specs, is_leaf=is_spec),
        bind=unit if bind else None,
    )


WRAPPERS = {
    "itself": lambda t: t,
    "chain": lambda t: optim.chain(optim.clip_by_global_norm(1.0), t),
    "chain, first": lambda t: optim.chain(t, optim.scale(0.5)),
    "only": lambda t: optim.only(t, True),
    "multi": lambda t: optim.multi_transform(
        {"a": t, "b": optim.sgd(0.1)}, lambda p: tree.map(lambda _: "a", p)
    ),
    "finite": lambda t: optim.apply_if_finite(t, 2),
    "limit": lambda t: optim.with_limit(t),
    "average": lambda t: optim.with_average(t, 0.9),
    "masters": lambda t: optim.with_fp32_masters(t),
    "offload": lambda t: optim.offload(t),
    "injected": lambda t: optim.inject_hyperparams(lambda a: optim.chain(t, optim.scale(-a)))(0.1),
}


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_what_knows_no_shards_is_refused(name):
    """Hidden in any other transformation; with specs to bind, or elementwise, it is not."""
    wrap, shards = WRAPPERS[name], P("dp")
    with pytest.raises(
        ValueError, match=r"zero(?s:.*)not elementwise(?s:.*)elementwise=True.*bind="
    ):
        optim.zero(wrap(unit(bind=False)), shards=shards)
    with pytest.raises(ValueError, match="before zero"):
        optim.chain(wrap(unit(bind=False)), optim.zero(optim.sgd(0.1), shards=shards))
    optim.zero(wrap(unit()), shards=shards)
    optim.chain(wrap(unit()), optim.zero(optim.sgd(0.1), shards=shards))
    optim.zero(wrap(optim.stateless(lambda u, p: u, elementwise=True)), shards=shards)


BOUND = [("dp=2,tp=2", 1), ("dp=4", 2), ("fsdp=2,tp=2", 0), ("fsdp=2,dp=2", 1), ("tp=4", 0)]


@pytest.mark.parametrize(("mesh", "stage"), BOUND)
def test_what_is_bound_to_specs_gives_the_dense_numbers(mesh, stage):
    mesh, defs = Mesh.parse(mesh), gpt.defs(CONFIG)

    def trained(mesh, stage):
        specs = ft.param_specs(defs, ft.Rules(RULES))
        optimizer = optim.chain(unit(), optim.scale(0.7))
        if stage:
            optimizer = optim.zero(optimizer, shards=optim.shard_specs(defs, specs, mesh))
        options = ft.ModelOptions(gather=Gather(specs))
        step = step_of(optimizer, mesh, specs, options=options, scatter=stage == 2)
        return run(step, ft.init_state(random.key(0), defs, specs, optimizer, mesh))

    (state, history), (dense, wanted) = trained(mesh, stage), trained(Mesh(), 0)
    torch.testing.assert_close(history, wanted, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(state.params, dense.params, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_is_bound_twice_still_takes_shards():
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), unit())
    for bound in (optim.zero(optimizer, shards=P("dp")), optimizer):
        refuse_parts("it does not", bound.bind(P("dp")).bind(P()), P("dp"), Mesh(dp=2))
        assert not ask(bound.bind(P()).bind(P())).unfit


def signs():
    """Of each element alone."""
    return optim.stateless(lambda u, p: tree.map(lambda x: -0.01 * x.sign(), u), elementwise=True)


def normed(*, elementwise=False):
    """Each tensor divided by its norm, by one who knows of no shards."""
    fn = lambda u, p: tree.map(lambda x: -0.1 * x / (x.norm() + 1e-3), u)
    return optim.stateless(fn, elementwise=elementwise)


def trained(optimizer, mesh):
    """Parameters after two steps of it alone, without ZeRO."""
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, ft.Rules(RULES))
    step = step_of(optimizer, mesh, specs, options=ft.ModelOptions(gather=Gather(specs)))
    return run(step, ft.init_state(random.key(0), defs, specs, optimizer, mesh))[0].params


@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2"])
def test_what_knows_no_shards_is_refused_where_parameters_are_split(mesh):
    """It gave other numbers there, as one that is said to be elementwise, and is not, still does."""
    mesh, alone, defs = Mesh.parse(mesh), unit(bind=False), gpt.defs(CONFIG)
    dense, wrong = trained(normed(), Mesh()), trained(normed(elementwise=True), mesh)
    rows = zip(tree.leaves(dense), tree.leaves(wrong), strict=True)
    assert max((a - b).abs().max() for a, b in rows) > 1e-2
    torch.testing.assert_close(
        trained(normed(), Mesh(dp=2)), dense, rtol=TOLERANCE, atol=TOLERANCE
    )  # where nothing is split
    specs = ft.param_specs(defs, ft.Rules(RULES))
    axis = mesh.axis_names[0]
    told = r"takes parts for whole ones\n  - unit \(.*test_zero.py:\d+\): got .*not elementwise.*"
    told += rf"and \S+ split over 2 ranks of '{axis}'.*elementwise=True.*bind="
    for wrap in WRAPPERS.values():
        with pytest.raises(ValueError, match="make_step: .*" + told):
            step_of(wrap(alone), mesh, specs)
        with pytest.raises(ValueError, match="init_state: .*" + told):
            ft.init_state(random.key(0), defs, specs, wrap(alone), mesh)
        step_of(wrap(alone), Mesh(dp=2), specs)
    with pytest.raises(ValueError, match=r"- normed \(.*test_zero.py"):
        step_of(normed(), mesh, specs)
    for made in (unit(), signs(), optim.chain(signs(), unit(), optim.scale(0.5))):
        wanted = trained(made, Mesh())
        torch.testing.assert_close(trained(made, mesh), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_only_what_it_is_given_counts_as_split():
    defs = {name: ft.ParamDef((4,), (None,), Normal(0.1)) for name in "ab"}
    specs, mesh, t = {"a": P("ep"), "b": P()}, Mesh(ep=2), unit(bind=False)
    init = lambda optimizer: ft.init_state(random.key(0), defs, specs, optimizer, mesh)
    init(optim.only(t, {"a": False, "b": True}))
    init(optim.multi_transform({1: t, 2: signs()}, {"a": 2, "b": 1}))
    for each in (
        optim.only(t, {"a": True, "b": False}),
        optim.multi_transform({1: t, 2: signs()}, {"a": 1, "b": 2}),
    ):
        with pytest.raises(ValueError, match=r"unit .*and a split over 2 ranks of 'ep'"):
            init(each)
    some = {"in": {"a": True, "b": False}, "out": False}
    for coarse, fits in (({"in": P("ep"), "out": P()}, False), ({"in": P(), "out": P("ep")}, True)):
        found = ask(optim.only(t, some), coarse).unfit
        assert [own for _, own in found] == [coarse | {"out": None}]
        with nullcontext() if fits else pytest.raises(ValueError, match="and in split over 2"):
            refuse_parts("only", optim.only(t, some), coarse, mesh)


def doubled(t):
    """A wrapper of a user's own, which passes on what it is told."""

    def update(updates, state, params=None, **extra):
        updates, state = t.update(updates, state, params, **extra)
        return tree.map(lambda u: 2 * u, updates), state

    return optim.transformation(t.init, update, t.specs, bind=lambda s: doubled(t.bind(s)))


def test_what_knows_no_shards_is_refused_within_wrappers_of_users():
    defs = {"a": ft.ParamDef((4,), (None,), Normal(0.1))}
    zero = lambda t: optim.zero(t, shards={"a": P("dp")})
    init = lambda t, spec: ft.init_state(random.key(0), defs, {"a": spec}, t, Mesh(dp=2))
    with pytest.raises(ValueError, match=r"zero(?s:.*)unit \("):
        zero(doubled(unit(bind=False)))
    before_zero = lambda t: optim.chain(t, zero(signs()))
    for wrap, spec in ((doubled, P("dp")), (before_zero, P())):
        with pytest.raises(ValueError, match=r"unit .*and a split over 2 ranks of 'dp'"):
            init(wrap(doubled(unit(bind=False))), spec)
        init(wrap(doubled(unit())), spec)


def test_layers_of_a_pipeline_are_split_too():
    table = make("1f1b", 2, 3)
    partition = Partition(even_layout(2, CONFIG.num_layers), table.pipes, gpt.uses(CONFIG))
    stages = pipelined(lambda part, params, x, data, key, total: x, partition, table)
    made = ft.pipeline.gradients(stages, gpt.num_targets)
    with pytest.raises(ValueError, match=r"unit .*and parameters split over 2 ranks of 'pp'"):
        ft.make_step(made, unit(bind=False), Mesh(pp=2), P())
    ft.make_step(made, signs(), Mesh(pp=2), P())
