"""Experts with a bounded room: every step has the numbers of one with room for all tokens.

Dense is one rank without a mesh, whose experts have all tokens. Rooms begin at that of balanced
rows, so that routing that is drawn or made uneven goes over it, on all ranks or on some.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, random, tree
from functron.nn.moe.room import ROOMS, room_at_least
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.training import evaluation, run
from functron.training import rooms as rooms_module
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure
from functron.training.costs import check_room, peak_bytes_with, step_peak_bytes
from functron.training.loop import loop
from functron.training.rooms import LearnedRoom, with_rooms
from functron.training.run import programs
from functron.training.setup import RunSetup, make_setup
from tests.compiler.test_graph import recorded  # noqa: F401
from tests.models.test_moe_composition import DEEPSEEK, MIXTRAL, VOCAB

SEQ, BATCH, STEPS, TOLERANCE = 16, 8, 3, 1e-10
FULL = 30.0  # a bias in a router that no score reaches


def biased(**changes) -> gpt.GPTConfig:
    assert MIXTRAL.moe is not None
    return replace(MIXTRAL, moe=replace(MIXTRAL.moe, router_bias=True, **changes))


MODELS = {
    "top-2": biased(),
    "top-8 of 64": biased(num_experts=64, top_k=8, expert_dim=4, aux_loss=0.0, z_loss=0.0),
    "group-limited, sigmoid and bias, shared": DEEPSEEK,
    "capacity, shared, latent": biased(
        capacity_factor=1.75, shared_dim=8, shared_gate=True, latent_dim=12, renormalise=False
    ),
    "gather": biased(dispatch="gather"),
    "global": biased(aux="global"),
    "quantile": biased(balance_bias=True, balance_by="quantile", balance_decay=0.25),
}
FOLDED = {"sequence_parallel": True, "expert_axes": "ep,tp"}
ROWS = [
    ("ep=4", {}),
    ("dp=2,ep=2", {"zero": 2}),
    ("ep=2,tp=2", FOLDED),
    ("ep=2,tp=2", {"sequence_parallel": True, "remat": "full"}),
    ("dp=2,cp=2,ep=2", {"expert_axes": "ep,cp"}),
    ("fsdp=2,ep=2", {"gather": "use"}),
    ("pp=2,ep=2", {"schedule": "1f1b"}),
    ("pp=2,ep=2", {"schedule": "zb-h1"}),
    ("pp=2,ep=2", {"schedule": "combined-1f1b", "chunks": 2, "num_layers": 4}),
]
# in two hops, of which each has its own bound
TWO_HOP = ("two-hop top-2", "two-hop top-8, limited")
MODELS |= {
    TWO_HOP[0]: biased(num_experts=8, dispatch="two-hop"),
    TWO_HOP[1]: replace(
        DEEPSEEK,
        moe=replace(DEEPSEEK.moe, num_experts=32, top_k=8, expert_dim=2, dispatch="two-hop"),
    ),
}
NODES = {"expert_axes": "ep_node,ep"}
TWO_HOP_ROWS = [
    ("ep_node=2,ep=2", NODES),
    ("ep_node=2,ep=2", NODES | {"remat": "full", "zero": 1}),
    ("ep=2,tp=2", FOLDED),
    ("fsdp=2,ep=2,tp=2", FOLDED | {"gather": "use"}),
    ("ep_node=2,ep=2,tp=2", NODES | {"sequence_parallel": True}),
    ("pp=2,ep_node=2,ep=2", NODES | {"schedule": "zb-h1"}),
    ("pp=2,ep_node=2,ep=2", NODES | {"schedule": "combined-1f1b", "chunks": 2, "num_layers": 4}),
]
CONFIG = configure(
    seq=SEQ,
    global_batch=BATCH,
    microbatches=2,
    optimizer=OptimizerConfig(name="sgd", clip_norm=0.0),
    learning_rate=ScheduleConfig(name="constant", peak=1.0),
)
SKEWS = ("even", "half", "one rank", "some samples")


def begin(made: RunSetup, skew: str):
    """A state whose routers send everything to few experts, or half of it to one."""
    state = made.init(random.key(0))
    moe = made.config.gpt.moe
    assert moe is not None
    few = {"half": 1, "one rank": max(moe.top_k, moe.num_experts // 4)}.get(skew, 0)
    router = state.params["blocks"]["moe"]["router"]
    (router["balance"] if "balance" in router else router["b"])[:, :few] = FULL
    return state


def draw_batch(skew: str, index: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens; or in some samples, of one data rank, the same everywhere."""
    generator = torch.Generator().manual_seed(1 + index)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    if skew == "some samples":
        tokens[: BATCH // 2] = 3
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(BATCH)}


def configured(name: str, mesh: str, num_layers: int = 2, **fields) -> TrainConfig:
    model = MODELS[name]
    model = replace(model, num_layers=model.dense_layers + num_layers)
    return configure(CONFIG, gpt=model, mesh=mesh, **fields)


def take_steps(name: str, skew: str, mesh: str, *layers: int, steps: int = STEPS, **fields):
    """The change of the parameters, and the metrics of each step; the first one has the skew."""
    made = make_setup(configured(name, mesh, *layers, **fields), Mesh.parse(mesh))
    state, (step, _) = begin(made, skew), programs(made)
    before, history = tree.map(torch.clone, state.params), []
    for index in range(steps):
        state, metrics = step(state, draw_batch("even" if index else skew, index))
        history.append(tree.map(lambda x: x.clone() if torch.is_tensor(x) else x, metrics))
    assert int(state.step) == steps
    return tree.map(torch.sub, state.params, before), history


@functools.cache
def dense(name: str, skew: str, num_layers: int = 2, steps: int = 1):
    return take_steps(name, skew, "", num_layers, steps=steps)


def assert_equal(got, want):
    (moved, history), (moved_wanted, history_wanted) = got, want
    for metrics, wanted in zip(history, history_wanted, strict=True):
        assert abs(metrics["loss"] - wanted["loss"]) <= TOLERANCE * abs(wanted["loss"])
        routers = metrics["aux"]["routers"]
        for name in ("load", "assignments", "dropped", "tokens"):
            assert torch.equal(getattr(routers, name), getattr(wanted["aux"]["routers"], name))
    for path, a, b in zip(tree.paths(moved), *map(tree.leaves, (moved, moved_wanted)), strict=True):
        error = (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        limit = TOLERANCE if b.dtype == torch.float64 else 1e-6  # the balance is float32 always
        assert error <= limit, f"{path}: {error}"


def factors(name, row, skew):
    return [{"name": name, "skew": skew}, {"row": row, "half": skew in SKEWS[:2]}]


def check_step(name, row, skew, rows=ROWS, **more):
    mesh, fields = rows[row]
    layers = fields.get("num_layers", 2)
    fields = {key: value for key, value in fields.items() if key != "num_layers"}
    got = take_steps(name, skew, mesh, layers, steps=1, expert_room=1.0, **more, **fields)
    assert_equal(got, dense(name, skew, layers))
    assert got[1][0]["reruns"] > 0
    assert got[1][0]["expert_room"] > 1


@pytest.fixture
def quick(monkeypatch):
    """Programs are traced as compiled ones are, and run without a compiler."""
    settings = property(lambda self: {"backend": "eager"})
    monkeypatch.setattr(RunSetup, "jit_settings", settings)
    monkeypatch.setattr(evaluation, "jit", functools.partial(evaluation.jit, backend="eager"))


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda row: f"{row}-{ROWS[row][0]}")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in TWO_HOP])
def test_steps_are_those_of_all_tokens(name, row, skew):
    check_step(name, row, skew)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_loss_over_the_global_batch(microbatches):
    """However many microbatches there are, the load is that of one of all tokens."""
    given = take_steps("global", "even", "", steps=1, microbatches=microbatches)
    made = make_setup(configured("top-2", "", microbatches=1), Mesh())
    state, (step, _) = begin(made, "even"), programs(made)
    before = tree.map(torch.clone, state.params)
    state, metrics = step(state, draw_batch("even"))
    assert_equal(given, (tree.map(torch.sub, state.params, before), [metrics]))
    if microbatches > 1:
        apart = take_steps("top-2", "even", "", steps=1, microbatches=microbatches)
        assert abs(apart[1][0]["loss"] / metrics["loss"] - 1) > 1e-6


def test_one_rank_alone_is_too_full():
    """The experts of the others have no rows at all, and these take the step again with it."""
    moved, history = take_steps("top-8 of 64", "one rank", "ep=4", steps=1, expert_room=1.0)
    fill = history[0]["aux"]["routers"].fill[0]  # of the ranks of a layer, in both microbatches
    assert fill[0] == 2 * 3
    assert fill.sum() == 2 * 4
    assert history[0]["reruns"] > 0
    assert_equal((moved, history), dense("top-8 of 64", "one rank"))


def compiled_factors(name, row, skew):
    return [{"name": name}, {"row": row}, {"skew": skew}]


FEW = (1, 8)
"""The rows that are compiled without --full: tracing takes seconds."""


@pytest.mark.pairwise(of=compiled_factors)
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(i, marks=() if i in FEW else pytest.mark.full, id=f"{i}-{mesh}")
        for i, (mesh, _) in enumerate(ROWS)
    ],
)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in TWO_HOP])
def test_compiled_steps_are_those_of_all_tokens(quick, name, row, skew):
    check_step(name, row, skew, compile=True)


@pytest.mark.pairwise(of=compiled_factors)
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("row", range(len(TWO_HOP_ROWS)))
@pytest.mark.parametrize("name", TWO_HOP)
def test_two_hops_are_those_of_all_tokens(name, row, skew):
    check_step(name, row, skew, TWO_HOP_ROWS)


@pytest.mark.parametrize("row", [0, pytest.param(5, marks=pytest.mark.full)])
def test_compiled_two_hops_are_those_of_all_tokens(quick, row):
    check_step(TWO_HOP[0], row, "some samples", TWO_HOP_ROWS, compile=True)


@pytest.fixture
def made_for(monkeypatch):
    """The rooms of evaluating programs that were made, each once, in order."""
    rooms, make = [], evaluation._make_loss

    def make_loss(setup, room):
        rooms.append(room)
        return make(setup, room)

    monkeypatch.setattr(evaluation, "_make_loss", make_loss)
    return rooms


@pytest.mark.parametrize(
    ("name", "row", "skew"),
    [
        ("top-2", 0, "half"),
        ("gather", 7, "even"),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("top-8 of 64", 1, "some samples"),
                ("group-limited, sigmoid and bias, shared", 2, "one rank"),
                ("capacity, shared, latent", 4, "some samples"),
                ("top-2", 8, "one rank"),
            )
        ),
    ],
)
def test_compiled_evaluation_is_that_of_all_tokens(quick, made_for, name, row, skew):
    mesh, fields = ROWS[row]
    fields = dict(fields)
    layers = fields.pop("num_layers", 2)
    config = configured(name, mesh, layers, expert_room=1.0, compile=True, **fields)
    made = make_setup(config, Mesh.parse(mesh))
    params, program = begin(made, skew).params, evaluation.loss_program(made)
    before = tree.map(torch.clone, params)
    batch = draw_batch(skew)
    total, count = program(params, batch)
    plain = replace(config.gpt, z_loss=0.0, mtp_depth=0)
    _, details = gpt.loss_and_details(plain, params, batch)
    assert abs(total - details["next_token"]) <= TOLERANCE * details["next_token"]
    assert count == batch["targets"].numel()
    assert made_for[0] == 1.0
    assert len(made_for) > 1  # it was taken again
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(before)))
    made_for.clear()
    program(params, batch)
    assert made_for == []  # there is room now


def test_evaluation_beyond_all_rooms_is_not_compiled(quick, made_for, monkeypatch):
    made = make_setup(configured("top-2", "ep=2", expert_room=1.0, compile=True), Mesh(ep=2))
    params, batch = begin(made, "one rank").params, draw_batch("one rank")
    want, _ = evaluation.loss_program(make_setup(configured("top-2", ""), Mesh()))(params, batch)
    monkeypatch.setattr(LearnedRoom, "enlarge", lambda self, needed: setattr(self, "room", 0.0))
    monkeypatch.setattr(evaluation, "jit", lambda f: calls.append(f) or f)
    calls = []
    total, _ = evaluation.loss_program(made)(params, batch)
    assert abs(total - want) <= TOLERANCE * want
    assert made_for[1:] == [1.0, 0.0]
    assert len(calls) == 1


@pytest.mark.distributed
@pytest.mark.parametrize(
    "checks",
    [
        ("compiled", "pipeline"),
        pytest.param(("memory", "more", "two-hop"), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_processes(torchrun, checks):
    done = torchrun(Path(__file__).with_name("gloo_rooms.py"), 4, *checks, timeout=400)
    for check in checks:
        assert f"{check}: ok" in done.stdout


def test_room_changes_no_bit():
    """So that a run that goes on, and learns its room anew, has the numbers that it would have."""
    (moved, history), *others = (
        take_steps("top-2", "even", "ep=2", expert_room=room) for room in (1.0, 1.5, 2.0)
    )
    assert history[0]["reruns"]
    for other, later in others:
        assert not later[0]["reruns"]
        assert [x["loss"] for x in later] == [x["loss"] for x in history]
        assert all(map(torch.equal, tree.leaves(other), tree.leaves(moved)))


@pytest.mark.full
def test_graphs_of_rooms(recorded, monkeypatch):  # noqa: F811
    """A graph of each room that held for long, whose flag is read when it was launched."""
    settings = property(lambda self: {"backend": "eager", "graph": True})
    monkeypatch.setattr(RunSetup, "jit_settings", settings)
    monkeypatch.setattr(rooms_module, "_STEPS", 3)
    even = tree.map(torch.Tensor.contiguous, draw_batch("even"))
    same = {**even, "tokens": torch.full_like(even["tokens"], 3)}  # to 2 of 4 experts, and ranks
    batches = [even] * 4 + [same] * 4 + [even] * 7
    found = []
    for mesh, fields in (("", {}), ("ep=4", {"compile": True, "cuda_graph": True})):
        rate = ScheduleConfig(name="constant", peak=0.1)  # at 1.0 rounding grows quickly
        config = configured("top-2", mesh, 1, expert_room=1.0, learning_rate=rate, **fields)
        made = make_setup(config, Mesh.parse(mesh))
        state, (step, _) = begin(made, "even"), programs(made)
        history, graphs = [], []
        for batch in batches:
            state, metrics = step(state, tree.map(torch.clone, batch))
            history.append(torch.stack([metrics["loss"], metrics["grad_norm"]]))
            graphs.append((metrics["expert_room"], metrics["reruns"], len(recorded)))
        found.append((torch.stack(history), tree.leaves(state.params)))
    for a, b in zip(*map(tree.leaves, found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    rooms = [room for room, _, _ in graphs]
    assert rooms[0] < rooms[4] > rooms[-1]  # more than at first, and less again
    assert graphs[3][2] == 2  # of gradients, and of the update
    assert graphs[4][1] > 0  # the first room's graph, launched, said that it was too full
    assert [count for _, _, count in graphs[6:11]] == [4] * 5
    assert graphs[-1][2] == 6  # a former room's are made anew
    # parameters are read where they are
    held = {leaf.data_ptr() for leaf in tree.leaves(state.params)}
    assert held <= {tensor.data_ptr() for tensor in recorded[-2]}


def test_quantised_products_with_histories():
    """A step that is taken again has not moved the scales of the next one."""
    given = {"model": "mixtral-tiny", "precision": "fp8-delayed", "mesh": "ep=4", "seq": 64}
    histories = []
    for room in (0.0, 1.0):
        made = make_setup(configure(**given, expert_room=room), Mesh(ep=4))
        state, (step, _) = made.init(random.key(0)), programs(made)
        tokens = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(1))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}
        history = []
        for _ in range(2):
            state, metrics = step(state, batch)
            history.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        histories.append((history, tree.leaves(state.params)))
        assert not room or metrics["expert_room"] > 1  # some were taken again
    (history, params), (other, others) = histories
    assert history == other
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_loop_sees_the_step_that_was_taken_again(ahead):
    made = make_setup(configured("top-2", "ep=2", expert_room=1.0), Mesh(ep=2))
    state, (step, _) = begin(made, "half"), programs(made)
    steps = loop(step, state, lambda at: draw_batch("even", at), steps=STEPS, ahead=ahead)
    records = [record for _, record in steps]
    _, dense_history = take_steps("top-2", "half", "")
    for record, wanted in zip(records, dense_history, strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"].item(), rel=TOLERANCE)
    assert records[0]["reruns"] > 0
    assert records[0]["expert_room"] > 1
    assert [record["step"] for record in records] == [1, 2, 3]


def of_step(needed: float) -> torch.Tensor:
    """The counts of a step whose fullest rank needed so much room."""
    fill = torch.zeros(3, len(ROOMS) + 1, dtype=torch.int64)
    fill[:, 0] = 4
    fill[1, ROOMS.index(needed) if needed in ROOMS else -1] = 1
    return fill


def test_room_is_learned():
    """A step is a number: what it needs; the state is the numbers of those that were taken."""
    made = []

    def make(room):
        made.append(room)

        def step(state, batch):
            seen = min(batch, room_at_least(room * 1.5)) if 0 < room < batch < 9 else batch
            fill = of_step(seen)
            found = {"aux": {"routers": (fill,)}}
            enough = room == 0 or batch <= room
            return ([*state, (batch, room)] if enough else state), found

        return step

    rooms = LearnedRoom(1.0)
    step, state = with_rooms(make, rooms), []
    for needed, room, reruns in [
        (1.0, 1.0, 0),
        (1.5, 1.625, 1),  # with a margin
        (1.625, 1.625, 0),
        (1.75, 1.875, 1),
        (8.0, 9.0, 3),  # what was cut off at first needed more than was seen
        (1e6, 0.0, 1),  # more than the largest there is
        (1.25, 0.0, 0),
    ]:
        state, metrics = step(state, needed)
        assert state[-1] == (needed, room)
        assert (metrics["expert_room"], metrics["reruns"]) == (room, reruns)
    assert len(state) == 7
    for _ in range(64):
        state, _ = step(state, 1.25)
    assert rooms.room == 1.375  # as the last ones needed, with a margin
    for needed in (1.125, 1.25) * 64:
        state, metrics = step(state, needed)
        assert metrics["reruns"] == 0
    assert rooms.room == 1.375  # a little less is not worth another program
    assert len(made) == len(set(made))  # each is made once
    assert len(state) == 7 + 64 + 128


def test_a_room_that_memory_does_not_hold(monkeypatch):
    made = make_setup(configured("top-2", "ep=4", expert_room=1.0), Mesh(ep=4))
    sizes = [peak_bytes_with(made, room) for room in (1.0, 1.25, 2.25)]
    assert sizes == sorted(set(sizes))
    check_room(made, 1.25, sizes[1])
    # before the first program with it is made
    monkeypatch.setattr(run, "check_room", functools.partial(check_room, device_bytes=sizes[1]))
    state, (step, _) = begin(made, "one rank"), programs(made)
    named = r"expert_room: got 2.25 times balanced rows.*takes up to.*wanted at most.*expert_room="
    with pytest.raises(ValueError, match=named + "1.25 fits"):
        step(state, draw_batch("one rank"))


def test_the_peak_of_a_large_mixture():
    """With routing as it was measured, at most 1.3 times that of just so many rows."""
    given = {"mesh": "dp=8,ep=8", "seq": 8192, "global_batch": 64, "precision": "bf16"}
    config = configure(model="mixtral-8x7b", **given)
    mesh, imbalance = Mesh(dp=8, ep=8), 1.3
    learned = LearnedRoom(1.0)
    learned.enlarge(room_at_least(imbalance))
    around = [1.25, 1.375, learned.room]
    peaks = [
        step_peak_bytes(make_setup(configure(config, expert_room=room), mesh)) for room in around
    ]
    just = peaks[0] + (peaks[1] - peaks[0]) * (imbalance - 1.25) / 0.125
    assert peaks[2] <= 1.3 * just
    assert peaks[2] < 0.65 * step_peak_bytes(make_setup(config, mesh))


def test_steps_cannot_be_transformed_whole():
    made = make_setup(configured("top-2", "ep=2", expert_room=1.0), Mesh(ep=2))
    with pytest.raises(ValueError, match=r"retaken\(g, is_useless, settings=\{\}\)"):
        ft.trace(made.step, donate=0)(begin(made, "even"), draw_batch("even"))
    program = made.program()  # of real shapes, for what it takes
    worst = make_setup(configured("top-2", "ep=2"), Mesh(ep=2)).program()
    assert program.memory().peak_bytes < worst.memory().peak_bytes
    assert program.cost().model_flops == worst.cost().model_flops


@pytest.mark.parametrize("room", [-1.0, 0.5, math.inf])
def test_impossible_rooms(room):
    with pytest.raises(ValueError, match=r"expert_room: got .*; wanted 0, or at least 1"):
        validate(configured("top-2", "ep=2", expert_room=room))


def test_rooms_are_of_experts():
    with pytest.raises(ValueError, match=r"expert_room.*experts"):
        validate(configure(expert_room=1.25))
