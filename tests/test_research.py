"""The prototypes of examples/research: short, on a mesh of one line, and the same without ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import functron as ft
from functron import gpt, tree

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "research"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
ALONE = {"diloco_int8": "ft.Mesh(island=2)"}
"""The mesh without the axes that only divide work; else there is one rank."""


def run(name: str, mesh: str = "") -> dict[str, Any]:
    """The names of a script once it has run, on its own mesh or another; and what it printed."""
    path = FOLDER / f"{name}.py"
    source = path.read_text()
    if mesh:
        source, count = re.subn(r"^mesh = .*$", f"mesh = {mesh}", source, flags=re.MULTILINE)
        assert count == 1
    names: dict[str, Any] = {"__name__": name}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(path), "exec"), names)
    return {**names, "printed": printed.getvalue()}


@pytest.fixture(scope="module")
def on_mesh():
    """The names of a script on its own mesh, which is run once."""
    known: dict[str, dict] = {}

    def get(name: str) -> dict:
        if name not in known:
            known[name] = run(name)
        return known[name]

    return get


def close(a, b, tolerance=1e-12):
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        x, y = (torch.as_tensor(v, dtype=torch.double) for v in (x, y))
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=path)


def test_all_of_them_are_there():
    assert len(NAMES) == 11


@pytest.mark.parametrize("name", NAMES)
def test_is_short_and_says_on_which_ranks_it_runs(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 45
    code = [line for line in lines if line and not line.startswith(("import", "from", '"""'))]
    assert code[0].startswith("mesh = ft.Mesh(")


LONG = "dit"
"""Trains for seconds: with ``--full`` alone."""


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.full) if x == LONG else x for x in NAMES]
)
def test_equals_the_same_without_ranks(name, on_mesh):
    there = on_mesh(name)
    assert re.search(r"\d\.\d", there["printed"])
    alone = run(name, ALONE.get(name, "ft.Mesh()"))
    close(there["result"], alone["result"])


@pytest.mark.parametrize(
    "name",
    [
        "differential_attention",
        "mixture_of_depths",
        pytest.param(LONG, marks=pytest.mark.full),
    ],
)
def test_learns(name, on_mesh):
    losses = on_mesh(name)["result"]
    assert losses[-1] < 0.8 * losses[0]


def test_own_schedule_gives_the_gradients_of_a_dense_loss(on_mesh):
    names = on_mesh("own_schedule")
    config, batch = names["config"], names["batch"]
    weights = ft.init_params(ft.random.key(0), names["defs"])
    grads, value = torch.func.grad_and_value(lambda w: gpt.loss(config, w, batch))(weights)
    count = batch["targets"].numel()
    close(names["result"], (value / count, grads))


def test_newton_schulz_makes_singular_values_one(on_mesh):
    losses, _, change = on_mesh("newton_schulz")["result"]
    values = torch.linalg.svdvals(change)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-6, atol=1e-6)
    assert losses[-1] < losses[0]


def test_gauss_newton_has_the_eigenvalues_of_the_whole_matrix(on_mesh):
    names = on_mesh("gauss_newton")
    w, x = names["w"], names["x"]
    flat, structure = tree.flatten(w)

    def model(*leaves):
        w = tree.unflatten(structure, leaves)
        return ((x @ w["up"]).tanh() @ w["down"]).flatten()

    parts = torch.func.jacrev(model, argnums=(0, 1))(*flat)
    jacobian = torch.cat([part.flatten(1) for part in parts], 1)
    wanted = torch.linalg.eigvalsh(2 / len(jacobian) * jacobian.mT @ jacobian).flip(0)[:3]
    torch.testing.assert_close(names["result"][0], wanted[0], rtol=1e-8, atol=0)
    torch.testing.assert_close(names["result"], wanted, rtol=1e-3, atol=0)


def test_diloco_is_that_of_islands_one_after_the_other(on_mesh):
    names = on_mesh("diloco_int8")
    config, batch = names["config"], names["batch"]
    inner, outer = names["inner"], names["outer"]
    want = ft.init_params(ft.random.key(0), names["defs"])
    state = outer.init(want)

    def rounded(x):
        largest = x.abs().max()
        return (x / largest * 127).round(), largest

    for _ in range(3):
        ends = []
        for half in (slice(0, 4), slice(4, 8)):
            own, local = want, inner.init(want)
            part = {name: x[half] for name, x in batch.items()}
            for _ in range(4):
                grads = torch.func.grad(
                    lambda w, part=part: gpt.loss(config, w, part) / part["targets"].numel()
                )(own)
                updates, local = inner.update(grads, local, own)
                own = ft.optim.apply_updates(own, updates)
            ends.append(own)

        def mean(w, a, b):
            largest = torch.maximum((w - a).abs().max(), (w - b).abs().max())
            steps = [((w - v) / largest * 127).round() for v in (a, b)]
            return sum(steps) / 2 * largest / 127

        updates, state = outer.update(tree.map(mean, want, *ends), state, want)
        want = ft.optim.apply_updates(want, updates)
    close(names["result"][0], want, 1e-10)


def test_rewards_rise_and_the_student_comes_near(on_mesh):
    rewards = [reward for reward, _ in on_mesh("grpo")["result"]]
    assert rewards[-1] > rewards[0] + 0.05
    distances = on_mesh("distillation")["result"]
    assert distances[-1] < distances[0]


def test_a_sweep_is_eight_runs(on_mesh):
    names = on_mesh("sweep")
    config, batch, result = names["config"], names["batch"], names["result"]
    weights = ft.init_params(ft.random.key(0), names["defs"])
    for row, rate in ((0, names["rates"][0]), (5, names["rates"][5])):
        w, losses = weights, []
        optimizer = ft.optim.adam(rate.item())
        state = optimizer.init(w)
        for _ in range(names["STEPS"]):
            grads, value = torch.func.grad_and_value(
                lambda w: gpt.loss(config, w, batch) / batch["targets"].numel()
            )(w)
            norm = sum(leaf.square().sum() for leaf in tree.leaves(grads)).sqrt()
            grads = tree.map(lambda g, norm=norm: g / norm.clamp_min(1), grads)
            updates, state = optimizer.update(grads, state, w)
            w = ft.optim.apply_updates(w, updates)
            losses.append(value)
        torch.testing.assert_close(result[row], torch.stack(losses), rtol=1e-9, atol=1e-9)


def test_patching_tells_where_a_difference_is(on_mesh):
    """Tokens before the one that differs are the same; the last place after all layers is all."""
    names = on_mesh("activation_patching")
    result, place = names["result"], names["PLACE"]
    unpatched = (names["mapped"](names["weights"], names["corrupted"]) - names["wanted"]).norm()
    for row in result:
        torch.testing.assert_close(row[:place], unpatched.expand(place))
    torch.testing.assert_close(result[-1, :-1], unpatched.expand(names["SEQ"] - 1))
    assert result[-1, -1] == 0
    assert result[0].min() < unpatched


STARTED = {name: "ft.Mesh(dp=2)" for name in NAMES if name != "own_schedule"}
STARTED |= {"diloco_int8": "ft.Mesh(island=2, dp=2)", "newton_schulz": "ft.Mesh(tp=2)"}
"""Meshes of few ranks; parts of a pipeline's state are made on each rank (`StartedMesh.build`)."""
FAST = ("activation_patching", "newton_schulz")


@pytest.mark.applications("notebook")
@pytest.mark.parametrize("name", STARTED)
def test_the_same_on_a_started_mesh(name, request):
    """Two of them; with ``--full`` all."""
    if name not in FAST and not request.config.getoption("--full"):
        pytest.skip("with --full")
    mesh = STARTED[name]
    want = run(name, mesh)
    got = run(name, f'{mesh}.start("cpu")')
    try:
        close(ft.gather(got["result"], None, got["mesh"]), want["result"], 1e-9)
    finally:
        got["mesh"].close()
