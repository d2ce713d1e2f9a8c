"""Pictures of runs and programs: what is drawn where, and what a notebook's cell shows."""

from __future__ import annotations

import io
import json
import sys
import types

import matplotlib as mpl
import numpy as np
import pytest
import torch

import functron as ft
from functron import P, lax, training, viz
from functron.pipeline import Costs, make
from functron.training import records

mpl.use("agg")


@pytest.fixture(autouse=True)
def _closed():
    yield
    mpl.pyplot.close("all")


def history(steps: int = 12) -> list[dict]:
    return [
        {
            "step": step,
            "tokens": 64 * step,
            "loss": 8.0 / step,
            "router_load_ratio": 1.0 + step,
            **({"eval": {"val": {"loss": 9.0 / step}}} if step % 4 == 0 else {}),
            **({"layers": {n: {"grad_norm": 10.0**-k * step} for k, n in enumerate("ab")}}
               if step % 3 == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip


def curve(ax, number=0):
    return [list(map(float, xs)) for xs in ax.lines[number].get_data()]


# --- curves


def test_losses_of_a_history_a_file_and_a_folder_are_the_same(tmp_path):
    file = tmp_path / records.METRICS
    file.write_text("".join(json.dumps(record) + "\n" for record in history()))
    want = [list(range(1, 13)), [8.0 / step for step in range(1, 13)]]
    for run in (history(), file, str(tmp_path)):
        ax = viz.loss_curves(run)
        assert curve(ax) == want
        assert curve(ax, 1) == [[4, 8, 12], [9 / 4, 9 / 8, 9 / 12]]  # held out
        assert ax.get_legend_handles_labels()[1] == ["val"]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss (nats per token)")


def test_several_runs_are_named_and_numbers_alone_are_a_run():
    ax = viz.loss_curves({"one": history(), "two": [3.0, 2.0]}, by="tokens")
    assert ax.get_legend_handles_labels()[1] == ["one", "one/val", "two"]
    assert curve(ax)[0][:2] == [64, 128]
    assert curve(ax, 2) == [[0, 1], [3.0, 2.0]]


def test_a_step_that_was_taken_again_counts_once():
    ax = viz.loss_curves([*history(5), {"step": 3, "loss": 0.5}])
    assert curve(ax) == [[1, 2, 3, 4, 5], [8, 4, 0.5, 2, 1.6]]


def test_nested_numbers_and_axes_that_are_given():
    _, (_, ax) = mpl.pyplot.subplots(1, 2)
    assert viz.loss_curves(history(), name="layers/b/grad_norm", ax=ax) is ax
    xs, ys = curve(ax)
    assert xs == [3, 6, 9, 12]
    assert ys == pytest.approx([0.3, 0.6, 0.9, 1.2])


def test_a_number_that_no_record_has_is_refused():
    with pytest.raises(ValueError, match="no record of 'one' with it"):
        viz.loss_curves({"one": history()}, name="los")
    with pytest.raises(ValueError, match="log-layers-every"):
        viz.gradient_norms(history(2))


def test_a_comparison_is_drawn(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text("steps = 2\n")
        lines = [{"step": s, "loss": 2.0 / s, "tokens": 8 * s} for s in (1, 2)]
        (folder / records.METRICS).write_text("".join(json.dumps(r) + "\n" for r in lines))
    both = training.compare([tmp_path / "one", tmp_path / "two"])
    ax = viz.loss_curves(both)
    assert ax.get_legend_handles_labels()[1] == list(both.runs)
    assert curve(ax)[1] == [2.0, 1.0]


# --- heat maps


def test_router_loads_over_the_mean():
    loads = torch.tensor([[1, 3], [2, 2], [0, 4]])
    (image,) = viz.router_load(loads).images
    want = [[0.5, 1.0, 0.0], [1.5, 1.0, 2.0]]  # by expert: twice its part of all
    assert np.allclose(image.get_array(), want)
    assert curve(viz.router_load(history()))[1][:2] == [2.0, 3.0]
    (image,) = viz.router_load(torch.stack([loads, loads], 1)).images
    assert image.get_array().shape == (4, 3)


def test_norms_by_layer():
    ax = viz.gradient_norms(history())
    assert np.allclose(ax.images[0].get_array()[1], np.log10([0.3, 0.6, 0.9, 1.2]))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "6", "9", "12"]


def program(f, mesh, in_spec, out_spec, shape):
    mapped = ft.shard_map(f, mesh, in_spec, out_spec, check=False)
    return ft.trace(mapped)(torch.zeros(shape, device="meta"))


def test_who_sends_to_whom():
    """By hand: 24 bytes on each rank along pairs, a ring's 2 (n - 1) / n, and all to all."""
    mesh = ft.Mesh(dp=2, tp=3)

    def f(x):  # [3, 2] in float32: 24 bytes
        y = lax.ppermute(x, "tp", [(0, 1), (1, 2)])
        return lax.psum(lax.all_to_all(y, "tp", 0, 0, tiled=True), "dp")

    traced = program(f, mesh, P(("dp", "tp")), P("tp"), (18, 2))
    want = torch.zeros(6, 6, dtype=torch.float64)
    for dp in range(2):
        for tp in range(3):
            rank = 3 * dp + tp
            want[rank, (rank + 3) % 6] += 24  # psum over 2 ranks: 2 * 24 / 2
            for other in {0, 1, 2} - {tp}:
                want[rank, 3 * dp + other] += 8  # a third each
            if tp < 2:
                want[rank, rank + 1] += 24
    assert torch.equal(viz.communication_matrix(traced), want)
    (image,) = viz.communication(traced).images
    assert np.allclose(image.get_array() * 2**20, want)


def test_rows_add_up_to_what_costs_say():
    def f(x):
        return lax.psum(
            ft.scan(lambda c, x: (lax.all_gather(c, "tp")[0], None), x, length=5, xs=None)[0], "dp"
        )

    traced = program(f, ft.Mesh(dp=4, tp=2), P("dp"), P(), (8, 3))
    cost = traced.cost()
    sent = cost.sent_bytes("dp") + cost.sent_bytes("tp")
    assert viz.communication_matrix(traced).sum(1).tolist() == pytest.approx([sent] * 8)


# --- in time


@pytest.mark.parametrize("shown", ["schedule", "timeline", "program"])
def test_timelines_have_a_box_for_each_interval(shown):
    value: object = make("zbv", 4, 8)
    if shown == "timeline":
        value = make("zbv", 4, 8).simulate(Costs(transfer=0.5))
    if shown == "program":
        traced = program(lambda x: lax.psum(x @ x.mT, "tp"), ft.Mesh(tp=2), P(), P(), (4, 4))
        value = traced.timeline(lambda equation: 1.0)
    chart = value.bars()
    ax = viz.timeline(value)
    rows = len(chart.names)
    boxes = [path for bars in ax.collections[rows:] for path in bars.get_paths()]
    assert len(boxes) == len(chart.boxes)
    assert [label.get_text() for label in ax.get_yticklabels()] == list(chart.names)
    assert ax.get_title() == chart.title
    assert ax.get_xlim()[1] == max(box.end for box in chart.boxes)
    widths = sorted(path.get_extents().width for path in boxes)
    assert widths == pytest.approx(sorted(box.end - box.start for box in chart.boxes))


def test_memory_is_stacked_up_to_the_peak():
    def f(x):
        for _ in range(20):
            x = torch.tanh(x @ x)
        return x

    traced = ft.trace(ft.grad(lambda x: f(x).sum()))(torch.zeros(64, 64, device="meta"))
    found = traced.memory()
    ax = viz.memory(traced)
    top = max(area.get_paths()[0].get_extents().y1 for area in ax.collections)
    assert top * 1024 == pytest.approx(found.peak_bytes)
    assert "KiB" in ax.get_ylabel()
    names = [area.get_label() for area in ax.collections]
    assert names == [n for n in names if any(m.live for m in found.timeline)]
    assert "activations" in names


# --- while a loop runs


def step(state, batch):
    return state + 1, {"loss": torch.tensor(1.0) / (state + 1), "grad_norm": torch.tensor(2.0)}


class Cell:
    """Stands for the front end of a notebook: keeps what `IPython.display.display` shows."""

    def __init__(self, monkeypatch):
        self.shown: list[list[dict]] = []

        def display(content, *, raw, display_id):
            assert raw
            assert display_id
            self.shown.append([content])
            return types.SimpleNamespace(update=self.update)

        modules = {"IPython": types.ModuleType("IPython")}
        modules["IPython.display"] = types.ModuleType("IPython.display")
        modules["IPython"].get_ipython = lambda: types.SimpleNamespace(kernel=object())
        modules["IPython.display"].display = display
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def update(self, content, *, raw):
        assert raw
        self.shown[-1].append(content)


def run(steps, *hooks):
    meter = training.Meter(flops_per_token=1e3, peak_flops=1e9)
    batch = {"tokens": torch.zeros(2, 8)}
    for _ in training.loop(
        step, torch.tensor(0), lambda index: batch, steps=steps, hooks=[meter, *hooks]
    ):
        pass


def test_progress_is_one_bar_in_a_cell(monkeypatch, capsys):
    cell = Cell(monkeypatch)
    run(300, training.progress())
    assert len(cell.shown) == 1, "one bar"
    last = cell.shown[0][-1]
    assert last["text/plain"].startswith("300/300 [")
    for piece in ("loss=0.0033", "norm=2.00", "tokens/s=", "MFU=", "<00:00"):
        assert piece in last["text/plain"].replace(", ", " ")
    assert '<progress value="300" max="300">' in last["text/html"]
    assert len(cell.shown[0]) < 100, "not at every step"
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_line_elsewhere(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run(30, training.progress())
    last = stream.getvalue().replace("\r", "\n").splitlines()[-1]
    assert "30/30" in last
    assert "MFU=" in last


def test_live_curves_are_drawn_in_place(monkeypatch):
    cell = Cell(monkeypatch)
    hook = viz.live(["loss", "grad_norm"], every_seconds=0.0)
    run(5, hook)
    assert [record["step"] for record in hook.history] == [1, 2, 3, 4, 5]
    assert len(cell.shown) == 1
    assert len(cell.shown[0]) == 6  # each step, and the end
    assert hook.picture.startswith(b"\x89PNG")
    assert mpl.pyplot.get_fignums() == []


def test_live_curves_are_drawn_once_elsewhere():
    hook = viz.live()
    run(3, hook)
    assert hook.picture.startswith(b"\x89PNG")
