"""Traced programs, run on all ranks in lockstep, against the eager program they were traced from."""

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.program.interpreter import run_in_lockstep
from functron.program.trace import trace


def gpt_step(mesh, *, sequence_parallel=False, remat="none", num_microbatches=1, **changes):
    config = gpt.GPTConfig(
        vocab_size=40, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, max_seq=16,
        init_stddev=0.2, dtype="float64", **changes,
    )  # fmt: skip
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), optim.adamw(1e-2))
    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
    stream = gpt.SEQUENCE_PARALLEL_STREAM if sequence_parallel else gpt.STREAM

    def loss(params, batch, key):
        key = key if config.dropout else None
        return gpt.loss(config, params, batch, ft.ModelOptions(stream=stream, remat=remat), key=key)

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), num_microbatches),
        optimizer,
        mesh,
        specs,
    )
    tokens = torch.randint(0, 40, (8, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}
    return step, state, batch


def assert_equal_trees(got, want):
    assert tree.flatten(got)[1] == tree.flatten(want)[1]
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# what an option adds to a trace meets each way of splitting the stream
@pytest.mark.pairwise(
    of=lambda mesh, options: [
        {"options": options},
        {"mesh": mesh, "split": "sequence_parallel" in options},
        {"tp": mesh["tp"] > 1, "remat": options.get("remat")},
    ]
)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sequence_parallel": True, "remat": "full"},
        {"dropout": 0.1, "sequence_parallel": True, "remat": "dots"},
        {"remat": "selective"},
        {"tied": True, "num_kv_heads": 2, "num_microbatches": 2},
        {"num_kv_heads": 2, "qk_norm": True, "z_loss": 1e-3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_traced_step_is_the_eager_step(mesh, options):
    step, state, batch = gpt_step(mesh, **options)
    program = trace(step, donate=0)(state, batch)
    got = run_in_lockstep(program, state, batch)
    assert_equal_trees(got, step(tree.map(torch.clone, state), batch))


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, ("dp", "tp")),
    "pmean": lambda x: lax.pmean(x, "tp"),
    "pmax": lambda x: lax.pmax(x, "tp"),
    "pmin": lambda x: lax.pmin(x, ("tp", "dp")),
    "all_gather": lambda x: lax.all_gather(x, ("dp", "tp"), axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]),
    "ppermute_open": lambda x: lax.ppermute(x, "dp", [(0, 1)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, ("dp", "tp"), 2),
    "ragged_all_to_all": lambda x: lax.ragged_all_to_all(
        x, torch.arange(2) + lax.axis_index("tp"), "tp", capacity=8
    )[0],
    "axis_index": lambda x: x * (1 + lax.axis_index(("dp", "tp"))),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_mean_what_the_simulator_says(name):
    mesh = Mesh(dp=2, tp=2)

    def program(x):
        return COLLECTIVES[name](torch.sin(x))

    f = ft.shard_map(program, mesh, P("dp", "tp"), P("dp", "tp"))
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8)
    assert_equal_trees(run_in_lockstep(trace(f)(x), x), f(x))


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n not in ("pmax", "pmin")])
def test_gradients_inside_and_outside_mean_what_the_simulator_says(name):
    mesh = Mesh(dp=2, tp=2)

    def loss(x):
        return lax.psum((COLLECTIVES[name](torch.sin(x)) ** 2).sum(), ("dp", "tp"))

    inside = ft.shard_map(
        lambda x: ft.grad(loss)(x), mesh, P("dp", "tp"), P("dp", "tp"), check=False
    )
    unchecked = ft.shard_map(loss, mesh, P("dp", "tp"), P(), check=False)
    x = torch.arange(64, dtype=torch.float64).reshape(8, 8) / 7
    assert_equal_trees(run_in_lockstep(trace(inside)(x), x), inside(x))
    outside = trace(ft.grad(unchecked), mesh=mesh, in_specs=(P("dp", "tp"),))(x)
    got = run_in_lockstep(outside, x)  # without out_specs it gives the first rank's part
    torch.testing.assert_close(got, ft.grad(unchecked)(x)[:4, :4])


WRONG = {
    "a value that varies over 'dp'": lambda w, x: (w * x).sum(),
    "a loss that varies over 'dp'": lambda w, x: ft.grad(lambda w: (w * x).sum())(w).sum(),
    "already replicated over 'dp'": lambda w, x: lax.psum(lax.psum((w * x).sum(), "dp"), "dp"),
    "that is no rank's share": lambda w, x: ft.sync_gradients(
        torch.func.grad(lambda w: lax.psum((w * x).sum(), "dp"))(w), P()
    ).sum(),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_simulation_refuses_is_refused_by_the_same_words(words):
    given = torch.ones(2), torch.arange(4.0)
    wrong = ft.shard_map(WRONG[words], Mesh(dp=2), (P(), P("dp")), P())
    for run in (wrong, lambda *args: trace(wrong)(*args)(*args), ft.debug.nans(wrong)):
        with pytest.raises(ValueError, match=words):
            run(*given)


def test_what_simulation_need_not_check_runs():
    """A sum of the first rank's part, as simulation gives it without its check."""
    first = ft.shard_map(lambda x: x.sum(), Mesh(dp=2), P("dp"), P(), check=False)
    x = torch.arange(4.0)
    assert first(x) == trace(first)(x)(x) == ft.debug.nans(first)(x) == 1.0
