"""The training step: equal to a hand-written loop with torch.optim, on every mesh, in place."""

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import functron as ft
from functron import Mesh, P, checkpoint, gpt, lax, optim, random, tree
from functron.spmd.donation import Donated
from functron.spmd.params import Normal, ParamDef
from functron.spmd.spec import unpad
from functron.training.config import configure, with_model
from functron.training.run import prepare
from functron.training.setup import make_setup
from functron.training.step import grad_norm_of
from tests.spmd.gloo_ragged import counted

CONFIG = gpt.GPTConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=12,
    init_stddev=0.2, dtype="float64",
)  # fmt: skip
STEPS = 2


def batch(step: int) -> dict:
    tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def run(mesh, *, stream=gpt.STREAM, num_microbatches=1):
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    adam = optim.adamw(optim.linear(1e-2, 10), weight_decay=0.1, mask=ft.params.decay_mask(defs))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5, specs), adam)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    first = tree.map(lambda leaf: leaf.data_ptr(), state)

    def loss(params, data, key):
        return gpt.loss(CONFIG, params, data, ft.ModelOptions(stream=stream), key=key)

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), num_microbatches),
        optimizer,
        mesh,
        specs,
    )
    history = []
    for index in range(STEPS):
        state, metrics = step(state, batch(index))
        history.append([metrics["loss"].item(), metrics["grad_norm"].item()])
    return first, state, history


@functools.cache
def by_hand():
    """The same training with autograd, clip_grad_norm_ and torch.optim.AdamW."""
    init_key = random.split(random.key(1))[0]
    params = tree.map(
        lambda leaf: leaf.clone().requires_grad_(), ft.init_params(init_key, gpt.defs(CONFIG))
    )
    decayed = [d.decay for d in tree.leaves(gpt.defs(CONFIG))]
    leaves = tree.leaves(params)
    groups = [
        {"params": [x for x, d in zip(leaves, decayed, strict=True) if d], "weight_decay": 0.1},
        {"params": [x for x, d in zip(leaves, decayed, strict=True) if not d], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8)
    history = []
    for index in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = float(torch.tensor(1e-2) * (1 - index / 10))
        data = batch(index)
        value = gpt.loss(CONFIG, params, data) / data["targets"].numel()
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        optimizer.step()
        history.append([value.item(), norm.item()])
    return params, history


@pytest.mark.pairwise(
    of=lambda mesh, stream: [{"mesh": mesh}, {"stream": stream, "tp": mesh["tp"] > 1}]
)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(dp=4, tp=2)], ids=str)
@pytest.mark.parametrize("stream", [gpt.STREAM, gpt.SEQUENCE_PARALLEL_STREAM], ids=["", "sp"])
def test_equals_a_loop_written_by_hand(mesh, stream):
    _, state, history = run(mesh, stream=stream)
    params, want = by_hand()
    torch.testing.assert_close(torch.tensor(history), torch.tensor(want), rtol=1e-6, atol=0)
    for got, leaf in zip(tree.leaves(state.params), tree.leaves(params), strict=True):
        # learning rates are float32 in both, rounded differently
        torch.testing.assert_close(got, leaf.detach(), rtol=1e-5, atol=1e-8)
    assert state.step == STEPS


def test_microbatches_do_not_change_the_numbers():
    want = torch.tensor(run(Mesh())[2], dtype=torch.float64)
    got = torch.tensor(run(Mesh(dp=2), num_microbatches=2)[2], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=0)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
def test_the_state_is_updated_in_place(mesh):
    first, last, _ = run(mesh)
    paths = tree.paths(first.params)
    for path, before, after in zip(
        paths, tree.leaves(first.params), tree.leaves(last.params), strict=True
    ):
        assert before == after.data_ptr(), path
    for before, after in zip(
        tree.leaves(first.opt_state), tree.leaves(last.opt_state), strict=True
    ):
        if after.dim():
            assert before == after.data_ptr()


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("gpt2-tiny", {"mesh": "dp=2,tp=2", "zero": 1}),
        pytest.param("mamba2-hybrid-tiny", {}, marks=pytest.mark.applications("zoo")),
    ],
    ids=["gpt2", "hybrid"],
)
def test_the_host_reads_no_number_of_a_step(model, given):
    """It would wait for a GPU. What exchanges of experts read is in tests/spmd."""
    config = configure(format="mock", end_token=0, seq=16, global_batch=4, microbatches=2)
    config = with_model(configure(config, **given), model)
    run, reads = prepare(config, Mesh.parse(config.parallelism.mesh)), []
    _, metrics = counted(reads)(run.step)(run.state, run.batch(0))
    counted(reads)(float)(metrics["loss"])
    assert reads == [0, 1]


def small_step(mesh, **how):
    """A step of two parameters, its state, a batch, and the state after one step."""
    specs = {"w": ft.P(), "b": ft.P()}
    defs = {
        "w": ft.ParamDef((3, 2), (None, None), ft.params.ones),
        "b": ft.ParamDef((2,), (None,), ft.params.zeros),
    }

    def loss(params, data, key):
        return lax.psum((data @ params["w"] + params["b"]).square().sum(), "dp")

    optimizer = optim.sgd(0.125)
    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
    count = lambda data: lax.psum(data.shape[0], "dp")
    step = ft.make_step(ft.mean_gradients(loss, count), optimizer, mesh, specs, **how)
    return step, state, torch.ones(4, 3)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_a_state_is_gone_once_a_step_has_updated_it(mesh):
    step, state, data = small_step(mesh)
    new, _ = step(state, data)
    # loss (3 w + b)^2 for each of 2 columns: dw = 2 * 3 = 6 each, and 1 - 0.125 * 6 = 0.25
    assert torch.equal(new.params["w"], torch.full((3, 2), 0.25))
    message = "argument 0/step: got a tensor that was donated to step.*use the result in its place"
    for again in (step, ft.jit(step, donate=0, backend="eager")):
        with pytest.raises(ValueError, match=message):
            again(state, data)
    with pytest.raises(ValueError, match="donated to step as argument 0/params/w"):
        state.params["w"].sum()
    last, _ = step(new, data)
    assert last.step == 2


@pytest.mark.parametrize(("axis", "fix"), [("dpp", "did you mean '[dp]p'"), ("tp", "say repl")])
def test_an_axis_that_splits_nothing_is_refused(axis, fix):
    mesh = Mesh(dp=2, **{axis: 2})
    with pytest.raises(ValueError, match=f"(?s)make_step on Mesh.*axis '{axis}'.*{fix}"):
        small_step(mesh)
    step, state, data = small_step(mesh, replicated_over=axis)
    assert torch.equal(step(state, data)[0].params["w"], torch.full((3, 2), 0.25))


def test_a_donated_state_keeps_no_memory():
    step, state, data = small_step(Mesh())
    new, _ = step(state, data)
    with torch._C.DisableTorchFunctionSubclass():
        assert isinstance(state.params["w"], Donated)
        assert state.params["w"].untyped_storage().nbytes() == 0
    assert new.params["w"].untyped_storage().nbytes() == 24


def test_init_is_bitwise_the_same_on_every_mesh():
    defs = gpt.defs(CONFIG)
    reference = ft.init_params(random.key(0), defs)
    for mesh in (Mesh(dp=2, tp=2), Mesh(tp=4)):
        specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
        got = ft.init_params(random.key(0), defs, specs, mesh)
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(reference), strict=True)
        )


def test_a_batch_that_does_not_divide_is_refused():
    mesh = Mesh(dp=3)
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    optimizer = optim.adamw(1e-3)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_step(
        ft.mean_gradients(lambda p, b, k: gpt.loss(CONFIG, p, b), gpt.num_targets),
        optimizer,
        mesh,
        specs,
    )
    with pytest.raises(ValueError, match=r"tokens: got dim 0 .*wanted a multiple of 3"):
        step(state, batch(0))
    step = ft.make_step(
        ft.accumulated(
            ft.mean_gradients(lambda p, b, k: gpt.loss(CONFIG, p, b), gpt.num_targets), 3
        ),
        optimizer,
        Mesh(),
        specs,
    )
    with pytest.raises(ValueError, match="multiple of 3"):
        step(state, batch(0))


def norms_in(optimizer, specs, metrics=(ft.grad_norm,), trainable=True):
    """The metrics of a traced step, and the all-reductions of norms' single float64 numbers."""
    mesh = Mesh(dp=2, tp=2)
    params = {"w": torch.ones(4, 6), "v": torch.ones(6), "frozen": torch.ones(2)}

    def loss(params, batch, key):
        x = batch["x"] @ params["w"] * params["v"]
        return lax.psum(x.square().sum() + 0 * params["frozen"].sum(), ("dp", "tp"))

    data = {"x": torch.ones(8, 4)}
    state = ft.init_state(random.key(0), params, specs, optimizer, mesh, params)
    count = lambda batch: 8
    made = ft.frozen(ft.mean_gradients(loss, count), trainable)
    step = ft.make_step(made, optimizer, mesh, specs, batch_specs=P("dp"), metrics=metrics)
    program = ft.trace(step)(state, data)
    found = [
        equation.args[1]
        for equation, _ in program.block.walk()
        if equation.name == "psum"
        and (equation.results[0].dtype, equation.results[0].shape) == (torch.float64, ())
    ]
    return set(step(state, data)[1]), found


def test_the_norm_of_gradients_is_computed_once_or_not_at_all():
    """One all-reduce over tp, of what is split, is a norm: for the metric, clipping, or both."""
    specs = {"w": P(None, "tp"), "v": P("tp"), "frozen": P()}
    mask = {"w": True, "v": True, "frozen": False}
    clip, sgd = optim.clip_by_global_norm(0.5, specs), optim.sgd(0.1)
    clipped = optim.chain(clip, optim.zero(optim.adamw(0.1), specs, specs))
    both = {"loss", "grad_norm"}
    assert norms_in(clipped, specs) == (both, ["tp"])
    assert norms_in(clipped, specs, ()) == ({"loss"}, ["tp"])
    assert norms_in(sgd, specs, ()) == ({"loss"}, [])
    wrapped = optim.where(mask, optim.apply_if_finite(clipped, 3, specs=specs), sgd)
    assert norms_in(wrapped, specs, [grad_norm_of(mask)]) == (both, ["tp"])
    limited = optim.with_limit(wrapped, of=mask)
    assert norms_in(limited, specs, [grad_norm_of(mask)]) == (both, ["tp"])
    assert norms_in(limited, specs, ()) == ({"loss"}, ["tp"])
    masked = optim.only(clipped, mask)
    assert norms_in(masked, specs, [grad_norm_of(mask)], mask) == (both, ["tp"])
    # other gradients than those that are clipped have another norm
    assert norms_in(clipped, specs, [grad_norm_of(mask)]) == (both, ["tp", "tp"])


ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)


def summed(params, batch, key):
    return gpt.loss(ONE_LAYER, params, batch)


def mean(params, batch, key):
    return gpt.loss(ONE_LAYER, params, batch) / gpt.num_targets(batch)


def one(batch):
    return torch.ones(())


def take(loss, mesh, jit=False, count=gpt.num_targets, check=True, hoist=False, num_microbatches=1):
    """Two steps on this loss."""
    defs = gpt.defs(ONE_LAYER)
    specs = ft.param_specs(defs, gpt.rules(ONE_LAYER, mesh))
    optimizer = optim.sgd(1e-3)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    made = ft.mean_gradients(loss, count, checks_sum=check)
    made = ft.accumulated(made, num_microbatches) if num_microbatches > 1 else made
    made = ft.gathered_once(made) if hoist else made
    step = ft.make_step(made, optimizer, mesh, specs)
    step = ft.jit(step, donate=0, backend="eager") if jit else step
    for index in range(2):
        state, _ = step(state, batch(index))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh(), {}),
        (Mesh(), {"jit": True}),
        (Mesh(dp=2, tp=2), {"num_microbatches": 2}),
        (Mesh(fsdp=2), {"hoist": True}),
        (Mesh(), {"count": one, "num_microbatches": 2}),
    ],
    ids=("plain", "jit", "dp-tp", "hoist", "one-term"),
)
def test_a_mean_is_refused(mesh, options):
    take(summed, mesh, **options)
    with pytest.raises(ValueError, match=r"loss: got .* for each sample twice: a mean; wanted the"):
        take(mean, mesh, **options)
    take(mean, mesh, **{**options, "check": False})


def test_a_mean_of_one_term_is_a_sum():
    take(mean, Mesh(dp=2), count=one)


def test_a_loss_of_whole_batches_is_told_how():
    def loss(params, batch, key):
        return summed(params, tree.map(lambda x: x.unflatten(0, (4, 1))[:, 0], batch), key)

    with pytest.raises(RuntimeError) as caught:
        take(loss, Mesh())
    assert (
        "fix: pass checks_sum=False to mean_gradients where it needs whole batches"
        in caught.value.__notes__[0]
    )
    take(loss, Mesh(), check=False)


# --- local steps


def replicas_by_hand(rounds, local):
    """DiLoCo (Douillard et al. 2023) on one device: two replicas, one after the other."""
    params = ft.init_params(random.key(2), gpt.defs(CONFIG))
    velocity = tree.map(torch.zeros_like, params)
    losses = []
    for index in range(rounds):
        ends = []
        for replica in range(2):
            own = tree.map(lambda x: x.clone().requires_grad_(), params)
            inner = torch.optim.SGD(tree.leaves(own), lr=0.5, momentum=0.9)
            for step in range(local):
                data = tree.map(lambda x, r=replica: x[2 * r : 2 * r + 2], batch(index * 10 + step))
                value = gpt.loss(CONFIG, own, data) / data["targets"].numel()
                inner.zero_grad()
                value.backward()
                inner.step()
            losses.append(value.item())
            ends.append(own)
        change = tree.map(lambda x, a, b: x - (a + b).detach() / 2, params, *ends)
        velocity = tree.map(lambda v, d: 0.9 * v + d, velocity, change)
        params = tree.map(lambda x, v, d: x - 0.7 * (d + 0.9 * v), params, velocity, change)
    return params, losses


@pytest.mark.parametrize(
    ("mesh", "replica"),
    [
        (Mesh(replica=2, dp=2, tp=2), "replica"),
        pytest.param(Mesh(replica=2), "replica", marks=pytest.mark.full),
        (Mesh(dp=2), "dp"),
    ],
    ids=str,
)
def test_local_steps(mesh, replica):
    """Along an axis of one's own, or along one that the loss is told to leave out."""
    specs = ft.param_specs(gpt.defs(CONFIG), gpt.rules(CONFIG, mesh))
    inner, outer = optim.sgd(0.5, momentum=0.9), optim.sgd(0.7, momentum=0.9, nesterov=True)
    samples = tuple(axis for axis in gpt.SAMPLE_AXES if axis != replica)
    together = (*samples, "tp")

    def mean_loss(params, data):
        return gpt.loss(CONFIG, params, data, ft.ModelOptions(axes=samples)) / gpt.num_targets(
            data, samples
        )

    def meet(params, state, batches):
        own, local = params, inner.init(params)
        for data in batches:
            value, grads = ft.value_and_grad(mean_loss, axes=together)(own, data)
            grads = ft.sync_gradients(grads, specs, axes=together)
            updates, local = inner.update(grads, local, own)
            own = optim.apply_updates(own, updates)
        change = tree.map(lambda x, y: ft.lax.pmean(x - y, replica), params, own)
        updates, state = outer.update(change, state, params)
        return optim.apply_updates(params, updates), state, value[None]

    kept = outer.specs(specs)
    rows = P((replica, *(axis for axis in ft.DATA_AXES if axis != replica)))
    step = ft.shard_map(meet, mesh, (specs, kept, rows), (specs, kept, P(replica)))
    params = ft.init_params(random.key(2), gpt.defs(CONFIG))
    state, losses = outer.init(params), []
    for index in range(2):
        batches = [batch(index * 10 + local) for local in range(2)]
        params, state, values = step(params, state, batches)
        losses += values.tolist()
    want, by_hand_losses = replicas_by_hand(2, 2)
    assert losses == pytest.approx(by_hand_losses, rel=1e-10)
    for got, leaf in zip(tree.leaves(params), tree.leaves(want), strict=True):
        torch.testing.assert_close(got, leaf, rtol=1e-10, atol=1e-12)
    ft.trace(step)(params, state, batches).check()


def test_axes_of_local_steps_that_do_not_fit():
    mesh, params = Mesh(dp=2, cp=2), ft.init_params(random.key(2), gpt.defs(CONFIG))
    data = {name: x for name, x in batch(0).items() if name != "rows"}

    def take(loss, axes, **options):
        def grads(params, data):
            made = ft.grad(loss, axes=axes)(params, data)
            return tree.map(lambda x: x[None], ft.sync_gradients(made, P(), axes=axes, **options))

        ft.shard_map(grads, mesh, (P(), P("dp", "cp")), P("dp"))(params, data)

    def own(params, data):
        return gpt.loss(CONFIG, params, data, ft.ModelOptions(axes=("cp",)))

    take(own, ("cp",))
    with pytest.raises(ValueError, match=r"the same along 'dp'(.|\n)*do not reduce it over"):
        take(lambda params, data: gpt.loss(CONFIG, params, data), ("cp",))
    with pytest.raises(ValueError, match="a loss that varies over 'dp'"):
        take(own, None)
    with pytest.raises(ValueError, match=r"axes: got \('dp',\); wanted 'cp' among them"):
        take(
            lambda params, data: gpt.loss(CONFIG, params, data, ft.ModelOptions(axes=("dp",))),
            ("dp",),
        )
    with pytest.raises(ValueError, match=r"into/embed: got .* scatters over 'dp'"):
        take(own, ("cp",), into=P("dp"))


# --- float32 masters

LOW = gpt.GPTConfig(
    vocab_size=24, num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32, max_seq=8,
    dtype="bfloat16",
)  # fmt: skip


def low_recipe(mesh, zero=0, **settings):
    chosen = optim.OptimizerConfig("sgd", momentum=0.9, clip_norm=0, fp32_masters=True, **settings)
    config = configure(gpt=LOW, mesh=mesh, zero=zero, seq=8, global_batch=4, optimizer=chosen)
    return config, make_setup(config, Mesh.parse(mesh))


def masters_of(state, specs, mesh):
    """The masters that a state holds and their specs, as leaves without ZeRO's padding."""
    chosen = lambda value: next(
        x for x in tree.leaves(value, lambda x: isinstance(x, optim.MastersState))
        if isinstance(x, optim.MastersState)
    ).masters  # fmt: skip
    rows = zip(
        tree.leaves(chosen(state.opt_state)), tree.leaves(chosen(specs.opt_state)), strict=True
    )
    flat = zip(rows, tree.leaves(state.params), strict=True)
    return [unpad(leaf, p.shape, spec, mesh) for (leaf, spec), p in flat]


@pytest.mark.parametrize(
    ("mesh", "zero"), [("", 0), ("dp=2,tp=2", 1), ("fsdp=2", 0), ("pp=2,dp=2", 2)]
)
def test_masters_begin_before_rounding(mesh, zero):
    """Random parameters are float32 numbers rounded: the masters are these, on every mesh."""
    _, made = low_recipe(mesh, zero, ema_decay=0.5)
    ranks = Mesh.parse(mesh)
    state = made.init(random.key(1))
    wide = tree.map(lambda d: dataclasses.replace(d, dtype=torch.float32), gpt.defs(LOW))
    exact = tree.leaves(ft.init_params(random.split(random.key(1))[0], wide))
    specs = made.state_specs
    for p, master, x in zip(
        tree.leaves(state.params), masters_of(state, specs, ranks), exact, strict=True
    ):
        assert torch.equal(master, x)
        assert torch.equal(p, x.bfloat16())
    assert any((x.bfloat16().float() != x).any() for x in exact)
    tokens = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(0))
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}
    grads = torch.func.grad(
        lambda p: gpt.loss(LOW, p, data) / 32
    )(tree.map(torch.clone, state.params))  # fmt: skip
    rate = 2e-3  # of the first update
    state, _ = made.step(state, data)
    for master, x, g in zip(
        masters_of(state, specs, ranks), exact, tree.leaves(grads), strict=True
    ):
        error = (master - (x - rate * g.float())).abs().max()
        assert error <= 0.03 * rate * g.float().abs().max() + 1e-7  # of bfloat16 gradients


def test_masters_of_a_pretrained_model_in_float32(tmp_path):
    config, made = low_recipe("dp=2", 1)
    wide = tree.map(lambda d: dataclasses.replace(d, dtype=torch.float32), gpt.defs(LOW))
    params = ft.init_params(random.key(5), wide)
    checkpoint.save(tmp_path / "0", {"params": params}, {"step": 0})
    mesh = Mesh(dp=2)
    state = prepare(configure(config, format="mock"), mesh, begin_from=tmp_path / "0").state
    specs = made.state_specs
    for p, master, x in zip(
        tree.leaves(state.params), masters_of(state, specs, mesh), tree.leaves(params), strict=True
    ):
        assert torch.equal(master, x)
        assert torch.equal(p, x.bfloat16())


def test_masters_for_an_optimizer_without_any_are_refused():
    defs = gpt.defs(LOW)
    specs = ft.param_specs(defs, gpt.rules(LOW, Mesh()))
    for optimizer in (optim.adamw(1e-3), optim.with_fp32_masters(optim.adamw(1e-3))):
        with pytest.raises(ValueError, match="masters: got an optimizer that keeps no masters"):
            ft.init_state(random.key(0), defs, specs, optimizer, Mesh(), masters=True)
    told = optim.with_fp32_masters(optim.adamw(1e-3), torch.bfloat16)
    params = ft.init_params(random.key(0), defs)
    with pytest.raises(ValueError, match="params: got given beside masters"):
        ft.init_state(random.key(0), defs, specs, told, Mesh(), params, masters=True)


def untargeted() -> dict:
    made = batch(7)
    made["targets"].fill_(ft.nn.IGNORE_INDEX)  # a view of the tokens; they are at another place
    return {**made, "tokens": batch(7)["tokens"]}


IDLE = {
    "adamw": lambda: optim.adamw(1e-2, weight_decay=0.1),
    "clipped": lambda: optim.chain(
        optim.clip_by_global_norm(0.5), optim.adamw(optim.linear(1e-2, 10), weight_decay=0.1)
    ),
    "momentum": lambda: optim.sgd(1e-2, momentum=0.9),
    "lion": lambda: optim.lion(1e-3, weight_decay=0.1),
    "zero": lambda: optim.adamw(1e-2, weight_decay=0.1),
    "skips": lambda: optim.with_limit(optim.adamw(1e-2, weight_decay=0.1)),
    "if finite": lambda: optim.apply_if_finite(optim.adamw(1e-2, weight_decay=0.1), 3),
    "loss scale": lambda: optim.with_loss_scale(
        optim.adamw(1e-2, weight_decay=0.1), optim.LossScale(8.0, growth_interval=2)
    ),
}
IDLE_CASES = [
    *((name, "eager", "") for name in IDLE if name not in ("adamw", "zero")),
    ("clipped", "compiled", ""),
    ("loss scale", "compiled", ""),
    ("adamw", "microbatches", "dp=2,tp=2"),
    ("zero", "eager", "dp=2"),
    ("clipped", "microbatches", "fsdp=2"),
]


@pytest.mark.parametrize(("name", "way", "mesh"), IDLE_CASES)
def test_a_batch_without_targets_changes_nothing(name, way, mesh):
    """One target of two microbatches is enough, and none leave even the weight decay out."""
    mesh, defs, optimizer = Mesh.parse(mesh), gpt.defs(CONFIG), IDLE[name]()
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))

    def loss(params, data, key):
        options = ft.ModelOptions(gather=ft.Gather(specs))
        return gpt.loss(CONFIG, params, data, options, key=key)

    if name == "zero":
        optimizer = optim.zero(optimizer, shards=optim.shard_specs(defs, specs, mesh))
    parts = 2 if way == "microbatches" else 1
    of = ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), parts)
    step = ft.make_step(of, optimizer, mesh, specs)
    step = ft.jit(step, donate=0, backend="eager") if way == "compiled" else step
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    state, _ = step(state, batch(0))
    before = tree.map(torch.clone, state)
    state, metrics = step(state, untargeted())
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["targets"]) == 0
    assert state.step == 2
    if name == "clipped":  # its schedule has seen the batch
        clip, (adam, decay, schedule) = before.opt_state
        schedule = schedule._replace(count=torch.tensor(2))
        before = before._replace(opt_state=(clip, (adam, decay, schedule)))
    torch.testing.assert_close(state._replace(step=1), before._replace(step=1), rtol=0, atol=0)
    few = untargeted()
    few["targets"][0, 3] = 5
    after, metrics = step(state, few)
    assert "targets" not in metrics
    assert float(metrics["grad_norm"]) > 0
    assert not torch.equal(after.params["embed"], before.params["embed"])


ENSEMBLES = {
    **{name: IDLE[name] for name in ("adamw", "clipped", "momentum", "lion", "skips")},
    "finite": IDLE["if finite"],
    "scaled": IDLE["loss scale"],
    "averaged": lambda: optim.with_average(IDLE["clipped"](), 0.9),
    "offload": lambda: optim.offload(IDLE["adamw"]()),
    "zero": lambda: optim.zero(IDLE["adamw"](), shards={"w": P("dp"), "b": P("dp")}),
}


def wide_step(optimizer, mesh, num_microbatches=1, scatter=False, hoist=False):
    """A step of two parameters in float64, and its state."""
    defs = {
        "w": ft.ParamDef((4, 2), (None, None), ft.params.Normal(1.0), torch.float64),
        "b": ft.ParamDef((2,), (None,), ft.params.zeros, torch.float64),
    }
    specs = {"w": P(), "b": P()}

    def loss(params, data, key):
        x, mask = data[..., :4], data[..., 4]
        return lax.psum(((x @ params["w"] + params["b"]).square().sum(-1) * mask).sum(), "dp")

    count = lambda data: lax.psum(data[..., 4].sum(), "dp")
    made = ft.accumulated(ft.mean_gradients(loss, count), num_microbatches)
    made = ft.scattered(made) if scatter else made
    made = ft.gathered_once(made) if hoist else made
    step = ft.make_step(made, optimizer, mesh, specs)
    return step, ft.init_state(random.key(0), defs, specs, optimizer, mesh)


def members(state, count=3):
    """States apart from one another, and these as one."""
    found = [tree.map(torch.clone, state) for _ in range(count)]
    for number, each in enumerate(found):
        for leaf in tree.leaves(each.params):
            leaf.add_(0.1 * number)
    return found, tree.map(lambda *leaves: torch.stack(leaves), *found)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
@pytest.mark.parametrize("name", list(ENSEMBLES))
def test_vmap_trains_an_ensemble(name, mesh):
    """As a loop over its members does, one of them without targets; the stack is as it was."""
    step, state = wide_step(ENSEMBLES[name](), mesh)
    each, stacked = members(state)
    before = tree.map(torch.clone, stacked)
    data = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data[..., 4] = 1
    if name in ("adamw", "clipped", "momentum"):
        data[1, :, 4] = 0
    got, once = torch.func.vmap(step)(stacked, data)
    torch.testing.assert_close(stacked, before, rtol=0, atol=0)
    pairs = [step(one, x) for one, x in zip(each, data, strict=True)]
    wanted = tree.map(lambda *leaves: torch.stack(leaves), *(pair[0] for pair in pairs))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    losses = torch.stack([pair[1]["loss"] for pair in pairs])
    torch.testing.assert_close(once["loss"], losses, rtol=1e-12, atol=0)
    assert not torch.equal(got.params["w"], before.params["w"])


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
def test_a_step_is_differentiated_as_what_it_computes(mesh):
    """Gradient descent by hand, in reverse and forward mode; nothing of the caller's changes."""
    step, state = wide_step(optim.sgd(0.1, momentum=0.9), mesh)
    data = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data[:, 4] = 1

    def after(params):
        return step(state._replace(params=params), data)[0].params["w"].square().sum()

    def by_hand(params):
        x, n = data[:, :4], 4
        error = x @ params["w"] + params["b"]
        return (params["w"] - 0.1 * 2 * x.T @ error / n).square().sum()

    params = tree.map(torch.clone, state.params)
    wanted = torch.func.grad(by_hand)(params)
    torch.testing.assert_close(torch.func.grad(after)(state.params), wanted, rtol=1e-10, atol=0)
    tangent = tree.map(torch.ones_like, params)
    wanted = torch.func.jvp(by_hand, (params,), (tangent,))
    if mesh.size == 1:
        got = torch.func.jvp(after, (state.params,), (tangent,))
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)
    torch.testing.assert_close(state.params, params, rtol=0, atol=0)


TAPED = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.1, eps=1e-2),
    "clipped": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(lambda count: 0.1 / (count + 1), eps=1e-2)
    ),
    "zero": lambda: optim.zero(optim.adamw(0.1, eps=1e-2), shards={"w": P("dp"), "b": P("dp")}),
}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in TAPED
        for what in ("params", "opt_state", "batch")
        if (name, what) != ("sgd", "opt_state")  # which has no leaf
    ],
)
def test_a_tape_differentiates_two_steps(name, mesh, what):
    """With all terms, as finite differences say; what it tracks stays as it was."""
    step, state = wide_step(TAPED[name](), mesh)
    data = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data[:, 4] = 1
    leaves, structure = tree.flatten({"params": state.params, "opt_state": state.opt_state})
    prefix = "batch" if what == "batch" else what + "/"
    paths = [*tree.paths({"params": state.params, "opt_state": state.opt_state}), "batch"]
    values = [leaf.clone() for leaf in [*leaves, data]]
    for path, value in zip(paths, values, strict=True):
        if path.startswith("opt_state/") and tree.is_float(value):
            value.fill_(0.5)  # at 0 a root has no slope
    rows = enumerate(zip(paths, values, strict=True))
    wide = [i for i, (path, x) in rows if path.startswith(prefix) and tree.is_float(x)]
    assert wide

    def after(*chosen):
        given = [x.clone() for x in values]
        for i, x in zip(wide, chosen, strict=True):
            given[i] = x
        parts = tree.unflatten(structure, given[:-1])
        one = state._replace(**parts, step=state.step.clone(), key=state.key.clone())
        for _ in range(2):
            one, metrics = step(one, given[-1])
        return one.params["w"].square().sum() + metrics["loss"]

    chosen = [values[i].clone() for i in wide]
    generator = torch.Generator().manual_seed(1)
    along = [torch.rand(x.shape, dtype=x.dtype, generator=generator) for x in chosen]
    if what == "batch":
        along[0][:, 4] = 0  # a mask, of which targets are counted

    def dot(grads):
        return float(sum((g * a).sum() for g, a in zip(grads, along, strict=True)))

    def at(h):
        return float(after(*(x + h * a for x, a in zip(chosen, along, strict=True))))

    h = 1e-4
    wanted = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    assert abs(wanted) > 1e-4
    found = [dot(ft.grad(after, tuple(range(len(chosen))))(*chosen))]
    taped = [x.clone().requires_grad_() for x in chosen]
    found.append(dot(torch.autograd.grad(after(*taped), taped)))
    nodes = [1 * x for x in taped]
    found.append(dot(torch.autograd.grad(after(*nodes), taped)))
    for got in found:
        assert got == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    for some in (taped, nodes):
        torch.testing.assert_close([x.detach() for x in some], chosen, rtol=0, atol=0)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=str)
@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"scatter": True}, {"hoist": True}])
def test_a_tape_differentiates_microbatches_and_no_programs(mesh, options):
    """As torch.func does; what is traced or compiled says that it has no derivatives."""
    step, state = wide_step(optim.adamw(0.1, eps=1e-2), mesh, **options)
    data = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data[:, 4] = 1

    def slope(step, grad):
        def after(params):
            return step(state._replace(params=params), data)[0].params["w"].square().sum()

        return grad(after)(state.params)

    wanted = slope(step, torch.func.grad)
    torch.testing.assert_close(slope(step, ft.grad), wanted, rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match="require gradients"):
        slope(ft.jit(step, donate=0, backend="eager"), ft.grad)
    with pytest.raises(ValueError, match="requires gradients"):
        slope(ft.trace(step, donate=0)(state, data), ft.grad)


def test_the_parameters_of_a_state_are_those_of_half_of_its_key():
    """As the docstrings of init_state and init_params say."""
    defs, key = {"w": ft.ParamDef((2, 3), (None, None), ft.params.Normal(1.0))}, random.key(3)
    state = ft.init_state(key, defs, {"w": P()}, optim.sgd(0.1), Mesh())
    assert torch.equal(state.params["w"], ft.init_params(random.split(key)[0], defs)["w"])
    assert not torch.equal(state.params["w"], ft.init_params(key, defs)["w"])


def test_a_function_around_a_step_is_traced_for_its_mesh_or_refused():
    """dw = 6, and 0.25 after the step, as above; traced for one rank it saw the batch as a shard."""
    step, state, data = small_step(Mesh(dp=2))
    batches = torch.stack([data, 2 * data])

    def first(state, batches):
        return step(state, batches[0])

    words = r"calls step, which is mapped.*\n.*axis 'dp': got 1 ranks; wanted 2; fix: .*simulate"
    with pytest.raises(ValueError, match=words):
        ft.trace(first)(state, batches)
    with pytest.raises(ValueError, match=words):
        ft.trace(first, mesh=Mesh(tp=2), in_specs=ft.P())(state, batches)
    split = {"mesh": Mesh(dp=2), "in_specs": (ft.P(), ft.P(None, "dp"))}
    for how in ({"simulate": True}, split):
        new, _ = ft.trace(first, **how)(state, batches)(state, batches)
        assert torch.equal(new.params["w"], torch.full((3, 2), 0.25))


def test_the_parameters_of_a_module_are_trained_where_they_are_and_no_tape_grows():
    module = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    defs = {"w": ParamDef((1, 3), (None, None), Normal(1.0), torch.float64)}
    specs, start = {"w": P()}, module.weight.detach().clone()

    def loss(params, batch, key):
        return (batch @ params["w"].T).square().sum()

    sgd = optim.sgd(0.1)
    made = ft.mean_gradients(loss, lambda batch: batch.shape[0], checks_sum=False)
    step = ft.make_step(made, sgd, Mesh(), specs, batch_specs=P())
    params = {"w": module.weight}
    state = ft.init_state(random.key(0), defs, specs, sgd, Mesh(), params)
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3) / 10
    for _ in range(2):
        state, _ = step(state, x)
        start = start - 0.1 * 2 * (start @ x.T @ x) / 4  # by hand
    assert not state.params["w"].requires_grad
    assert module.weight.requires_grad
    torch.testing.assert_close(state.params["w"], start, rtol=1e-12, atol=0)
    torch.testing.assert_close(module.weight.detach(), start, rtol=1e-12, atol=0)


class CountOps(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket._qualified_op_name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def ops_of_step(dropout: float = 0.0, mesh: str = "", **options) -> Counter:
    """The operations of an eager step of two layers, by kernels' ops where there are some."""
    config = gpt.GPTConfig(
        num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=64, vocab_multiple=64,
        max_seq=16, dropout=dropout,
    )  # fmt: skip
    given = {"gpt": config, "seq": 16, "global_batch": 4, "kernels": "kernel", "mesh": mesh}
    made = make_setup(configure(**given, **options), Mesh.parse(mesh) if mesh else Mesh())
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "targets": tokens, "rows": torch.arange(4)}
    state, _ = made.step(made.init(random.key(0)), batch)
    with CountOps() as found:
        made.step(state, batch)
    return found.counts


RANDOM = ("bitwise_xor", "bitwise_left_shift", "__lshift__", "__rshift__")


def test_an_eager_step_runs_what_a_count_by_hand_says():
    """Of two layers: each has two norms, of which one adds, and seven matrices, and one more each at
    the end; a matrix is read by one product forward and by two backward."""
    layers, matrices = 2, 2 * 7 + 1
    wanted = {
        "mm": 3 * matrices, "rms_norm": layers + 1, "add_rms_norm": layers,
        "rms_norm_backward": 2 * layers + 1, "qk_norm_rope": layers,
        "qk_norm_rope_backward": layers, "glu": layers, "glu_backward_again": layers,
        "cross_entropy": 1, "cross_entropy_backward": 1, "embedding": 1,
        "embedding_dense_backward": 0, "sum_rows": 1, "adamw_": 9 + 3, "sum_of_squares": 9 + 3,
        **dict.fromkeys(RANDOM, 0),
    }  # fmt: skip
    found = ops_of_step()
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("mesh", ["", "pp=2", "dp=2,tp=2"])
def test_only_a_step_that_drops_out_draws(mesh):
    options = {"microbatches": 2} if "pp" in mesh else {}
    assert not any(ops_of_step(mesh=mesh, **options)[name] for name in RANDOM[:2])
    assert ops_of_step(0.1, mesh=mesh, **options)["bitwise_xor"] >= 20  # rounds of Threefry
