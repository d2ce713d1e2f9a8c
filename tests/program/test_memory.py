"""Memory: timelines by hand, and predicted peaks against measured ones of eager runs."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax, optim, random
from functron.core.tree import nbytes
from functron.program import memory as allocation
from functron.program.memory import CATEGORIES, memory
from functron.program.trace import trace
from functron.training.step import State
from tests.program.measured_memory import (
    decoder_step,
    measured_peak,
    predicted_and_measured,
)
from tests.transforms.flow_programs import loop, switch


def totals(found) -> list[tuple[str, int]]:
    return [(moment.equation, moment.total) for moment in found.timeline]


def zeros(*shape):
    return torch.zeros(shape)


# --- by hand


def test_operands_are_live_while_results_are_made_and_views_are_free():
    def f(x):  # 100 floats
        y = torch.exp(x)
        return (y.view(10, 10).t() * 2).sum()

    found = memory(trace(f)(zeros(100)))
    assert totals(found) == [("exp", 800), ("mul", 1200), ("sum", 804)]
    assert found.peak_bytes == 1200
    assert found.peak.equation == "mul"
    assert dict(found.at_peak) == {
        "parameters": 0, "optimizer": 0, "gradients": 0, "activations": 0, "workspace": 800,
        "inputs": 400,
    }  # fmt: skip


def test_a_switch_needs_what_its_largest_branch_needs():
    def f(i, x):  # 100 floats and an index
        y = switch(i, [lambda x: x.exp().sin().sum(), lambda x: x.sum()], x)
        return y + 1

    found = memory(trace(f)(torch.tensor(0), zeros(100)))
    assert totals(found) == [("exp", 808), ("sin", 1208), ("sum", 812), ("add", 416)]
    swapped = memory(trace(lambda i, x: f(1 - i, x))(torch.tensor(0), zeros(100)))
    assert swapped.peak_bytes == 1208 + 8  # the other index


def test_a_loop_needs_its_first_carry_and_two_iterations():
    def f(x):  # 100 floats
        return loop(lambda x: x.sum() > 1, lambda x: (x * 2).sin(), x)

    found = memory(trace(f)(zeros(100)))
    assert totals(found) == [
        ("sum", 404), ("gt", 405), ("mul", 800), ("sin", 1200),
        ("sum", 804), ("gt", 805), ("mul", 1200), ("sin", 1600),
    ]  # fmt: skip


def test_a_view_keeps_its_whole_memory():
    def f(x):
        part = torch.exp(x)[:1]
        return torch.cos(x), part

    assert totals(memory(trace(f)(zeros(100)))) == [("exp", 800), ("cos", 1200)]


def test_saved_activations_and_gradients():
    def f(w, x):
        return ft.value_and_grad(lambda w: torch.exp(torch.exp(x * w)).sum())(w)

    found = memory(trace(f)(zeros(100), zeros(100)))
    rows = {(m.equation, m.where.phase): dict(zip(CATEGORIES, m.live, strict=True))
            for m in found.timeline}  # fmt: skip
    # both exponentials are saved, the product is not
    assert rows["sum", "forward"]["activations"] == 800
    assert rows["sum", "forward"]["workspace"] == 4
    last = found.timeline[-1]
    assert (last.equation, last.where.phase) == ("mul", "backward")
    assert dict(zip(CATEGORIES, last.live, strict=True))["gradients"] == 400
    assert dict(zip(CATEGORIES, last.live, strict=True))["activations"] == 0


def donating(x):
    return {"x": x["x"] * 2 + 1}


def test_donated_arguments_are_updated_in_place():
    x = {"x": zeros(100)}

    def step(x):
        return donating(x)

    kept = memory(trace(step)(x))
    given = memory(trace(lambda state: (donating(state),), donate=0)(x))
    assert kept.peak_bytes == 1200
    assert given.peak_bytes == 400
    assert totals(given)[-1] == ("add", 400)


def test_a_donated_argument_that_is_read_later_is_not_overwritten():
    def f(x):
        new = {"x": x["x"] + 1}
        return new, x["x"].sum()

    assert memory(trace(f, donate=0)({"x": zeros(100)})).peak_bytes == 800 + 4


def test_donated_arguments_die_after_their_last_use():
    def f(x):
        return torch.exp(torch.exp(x).sum())

    x = zeros(100)
    assert totals(memory(trace(f, donate=0)(x))) == [("exp", 800), ("sum", 404), ("exp", 8)]
    assert totals(memory(trace(f)(x))) == [("exp", 800), ("sum", 804), ("exp", 408)]


def deep(length: int, width: int = 8, rows: int = 4):
    """Gradients of a scan of tanh(x @ w) and its arguments."""

    def loss(w, x):
        def body(x, w):
            return torch.tanh(x @ w), None

        return ft.scan(body, x, w)[0].sum()

    return ft.value_and_grad(loss), (zeros(length, width, width), zeros(rows, width))


def test_what_scans_save_lives_from_its_iteration_to_the_same_one_backward():
    """Layer l saves its tanh, which is the next layer's input; backward frees one after another."""
    length, w, x = 4, 8 * 8 * 4, 4 * 8 * 4
    fn, args = deep(length)
    found = memory(trace(fn)(*args))
    base = length * w + x
    forward = [m for m in found.timeline if m.equation == "mm" and m.where.phase == "forward"]
    # at the product of iteration i: the results of i layers, and the product
    assert [m.total - base for m in forward] == [(i + 1) * x for i in range(length)]
    assert [m.iteration for m in forward] == [(i,) for i in range(length)]
    rest = [m for m in found.timeline if m.iteration and m.where.phase == "backward"]
    last = [max(m.total for m in rest if m.iteration == (i,)) for i in range(length)]
    # per iteration one gradient more and one activation less; the first also has the loss's
    assert last[2] - last[1] == w - x
    stack = found.timeline[-1]
    assert stack.equation == "scan"
    # all slices' gradients, their stack, and the first layer's cotangent
    assert stack.total - base <= 2 * length * w + 2 * x
    assert stack.total - base >= 2 * length * w


def test_iterations_that_are_not_simulated_follow_from_those_that_are(monkeypatch):
    def recurrent(w, x):  # saves its carry before and after, and returns ys
        def body(h, w):
            h = torch.tanh(h @ w)
            return h, torch.exp(h)

        h, ys = ft.scan(body, x, w)
        return h.sum() + ys.sum()

    programs = [trace(deep(9)[0])(*deep(9)[1])]
    programs += [trace(ft.value_and_grad(recurrent))(*deep(9)[1])]
    step, state, batch = decoder_step(Mesh(), num_layers=9, num_microbatches=4, remat="full", seq=8)
    programs += [trace(step, donate=0)(state, batch)]
    short = [memory(program) for program in programs]
    monkeypatch.setattr(allocation, "_DIRECT", 100)
    for program, found in zip(programs, short, strict=True):
        whole = memory(program)
        assert found.peak == whole.peak
        assert len(found.timeline) < len(whole.timeline)
        assert set(found.timeline) <= set(whole.timeline)
        assert found.timeline[-1] == whole.timeline[-1]


def test_the_timeline_of_a_long_scan_is_short():
    one, two = (memory(trace(fn)(*args)) for fn, args in (deep(10), deep(1000)))
    assert len(two.timeline) == len(one.timeline) + 2 * 990


def test_categories_of_a_training_step():
    step, state, batch = decoder_step(Mesh())
    found = memory(trace(step, donate=0)(state, batch))
    assert found.at_rest["parameters"] == nbytes(state.params)
    assert found.at_rest["optimizer"] == nbytes(state.opt_state)
    rest = nbytes(batch) + nbytes((state.step, state.key))
    assert found.at_rest["inputs"] == rest
    index = CATEGORIES.index
    # after backward all gradients are there and no activations; the update takes no more memory
    update = next(m for m in found.timeline if m.equation == "linalg_vector_norm")
    assert update.live[index("gradients")] == nbytes(state.params)
    assert update.live[index("activations")] < 1000
    after = found.timeline[found.timeline.index(update) :]
    assert max(m.total for m in after) <= update.total + 2000
    assert {m.live[index("parameters")] for m in found.timeline} == {nbytes(state.params)}
    assert sum(found.at_peak.values()) == found.peak_bytes


def test_full_remat_keeps_one_residual_per_layer():
    def activations(remat):
        step, state, batch = decoder_step(Mesh(), num_layers=8, remat=remat)
        found = memory(trace(step, donate=0)(state, batch))
        return max(m.live[CATEGORIES.index("activations")] for m in found.timeline
                   if m.where.phase == "forward")  # fmt: skip

    stream = 4 * 64 * 64 * 4
    # the inputs of 8 layers, the last one's output, and the loss's few rows of the vocabulary
    assert 9 * stream <= activations("full") <= (9 + 2 + 384 / 64 + 1) * stream
    assert activations("none") > 8 * 15 * stream


# --- measured

SETTINGS = {
    "llama": {},
    "llama remat": {"remat": "full"},
    "remat of many layers": {"remat": "full", "samples": 16, "num_layers": 8},
    "gpt2 tied": {"tied": True, "norm": "layer", "bias": True, "positions": "learned",
                  "gated": False, "activation": "gelu"},
    "microbatches": {"num_microbatches": 2},
    "grouped heads": {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.1},
    "large vocabulary": {"vocab_size": 3840},
    "padded vocabulary": {"vocab_size": 3000, "tied": True},
    "little data": {"samples": 1, "seq": 16, "num_layers": 8},
    "remat and microbatches": {"remat": "full", "num_microbatches": 2, "num_layers": 2},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_predicted_peak_of_a_decoder_is_the_measured_one(settings):
    found, measured = predicted_and_measured(*decoder_step(Mesh(), **settings))
    assert found.peak_bytes == pytest.approx(measured, rel=0.05)


LAYER = {  # in units of a bfloat16 stream; the feed-forward layer is three times as wide
    "llama": ({}, 20),  # stream, normed, q, k, v, attended; sum, normed, gate, up, silu, product
    "gpt2": ({"norm": "layer", "gated": False, "activation": "gelu"}, 14),
    "zero-centred": ({"zero_centered_norm": True}, 20),
    "zero-centred layer": ({"norm": "layer", "zero_centered_norm": True}, 20),
    "heads": ({"qk_norm": True}, 22),  # q and k before their norms
    "across": ({"qk_norm": True, "qk_norm_across": True}, 22),
    "wide stream": ({"fp32_residual": True}, 22),
}


@pytest.mark.parametrize("name", LAYER)
def test_a_layer_keeps_what_a_count_by_hand_says(name):
    """Norms keep what they read, as it is, and rows' statistics: no float32 copies."""
    changes, units = LAYER[name]
    sizes = {"embed_dim": 128, "mlp_dim": 384, "num_heads": 1, "dtype": "bfloat16"}

    def activations(num_layers: int) -> int:
        step, state, batch = decoder_step(Mesh(), num_layers=num_layers, **sizes, **changes)
        moments = memory(trace(step, donate=0)(state, batch)).timeline
        return max(moment.live[CATEGORIES.index("activations")] for moment in moments)

    stream = 4 * 64 * 128 * 2
    kept = (activations(9) - activations(5)) / 4 / stream
    assert units <= kept < units + 0.2  # statistics: some float32 numbers of a row of 128


def perceptron_step(samples: int, optimizer, num_microbatches: int = 1, dtype=torch.float32):
    """A training step of a multi-layer perceptron without scans, with its state and batch."""
    sizes = (32, 256, 256, 8)
    generator = torch.Generator().manual_seed(0)
    params = {
        str(i): {"w": torch.randn(a, b, generator=generator) / a**0.5, "b": torch.zeros(b)}
        for i, (a, b) in enumerate(pairwise(sizes))
    }

    params = ft.tree.map(lambda leaf: leaf.to(dtype), params)

    def loss(params, batch, key):
        x = batch["x"].to(dtype)
        for layer in params.values():
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return lax.psum((x - batch["y"].to(dtype)).square().sum(), ft.DATA_AXES)

    def num_targets(batch):
        return lax.psum((batch["y"] == batch["y"]).sum(), ft.DATA_AXES)

    specs = ft.tree.map(lambda _: P(), params)
    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, num_targets), num_microbatches),
        optimizer,
        Mesh(),
        specs,
    )
    state = State(torch.tensor(0), params, optimizer.init(params), random.key(0))
    return step, state, {"x": torch.randn(samples, 32), "y": torch.randn(samples, 8)}


@pytest.mark.parametrize("samples", [1, 64, 2048])
@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(1e-2),
        optim.sgd(1e-2, 0.9, nesterov=True),
        optim.chain(optim.clip(1.0), optim.adam(1e-2)),
        optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1e-2)),
    ],
    ids=["adamw", "nesterov", "clipped adam", "clipped sgd"],
)
def test_predicted_peak_of_a_perceptron_is_the_measured_one(samples, optimizer):
    found, measured = predicted_and_measured(*perceptron_step(samples, optimizer))
    assert found.peak_bytes == pytest.approx(measured, rel=0.01)


def scanned_squares():
    w, x = torch.randn(6, 64, 64), torch.randn(512, 64)

    def loss(w, x):
        y, _ = ft.scan(lambda x, w: (torch.tanh(x @ w), None), x, w)
        return y.square().sum()

    return memory(trace(ft.value_and_grad(loss, (0, 1)))(w, x)), measured_peak(
        ft.value_and_grad(loss, (0, 1)), w, x
    )


def scanned_sum():
    fn, args = deep(6, width=64, rows=512)
    return memory(trace(fn)(*args)), measured_peak(fn, *args)


# What `memory` is known to get wrong by more than 5%. Who repairs one moves it up.
MISSES = {
    "temporaries of one C++ expression in backward": scanned_squares,
    "an expanded cotangent is copied at a traced scan, not eagerly": scanned_sum,
    "eager accumulate keeps the last gradients, and all sums while it adds": lambda: (
        predicted_and_measured(*decoder_step(Mesh(), samples=4, seq=8, num_microbatches=4))
    ),
    "with_fp32_masters widens all gradients at once": lambda: (
        predicted_and_measured(
            *perceptron_step(1, optim.with_fp32_masters(optim.adamw(1e-2)), dtype=torch.bfloat16)
        )
    ),
    "random numbers are drawn by another algorithm while tracing": lambda: (
        predicted_and_measured(
            *decoder_step(
                Mesh(), samples=8, seq=128, num_layers=1, embed_dim=256, num_heads=8,
                num_kv_heads=4, mlp_dim=64, norm="layer", activation="relu2", dropout=0.1,
                num_microbatches=2,
            )
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", MISSES.values(), ids=MISSES)
# eager execution does other work than the program says, see `memory`; strict: a repair must show
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="known limits, see the names")
def test_peaks_that_are_known_to_be_missed(run):
    found, measured = run()
    assert abs(found.peak_bytes / measured - 1) <= 0.05, f"{found.peak_bytes} for {measured}"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names",
    [
        ("dp microbatches", "tp sequence"),
        # less of the same axes
        pytest.param(("dp", "tp", "tp tied"), marks=pytest.mark.full),
    ],
    ids=",".join,
)
def test_predicted_peak_of_a_rank_is_the_measured_one(torchrun, names):
    done = torchrun(Path(__file__).with_name("measured_memory.py"), 2, *names, timeout=180)
    rows = dict(line.split(": ") for line in done.stdout.splitlines() if ": " in line)
    assert set(names) <= rows.keys()
    for name in names:
        predicted, measured = map(int, rows[name].split())
        assert predicted == pytest.approx(measured, rel=0.05), name


# --- shown


def test_memory_shows_as_text_and_html():
    step, state, batch = decoder_step(Mesh())
    found = memory(trace(step, donate=0)(state, batch))
    text, page = str(found), found._repr_html_()
    for piece in ("parameters", "activations", "at the peak", found.peak.equation, "MiB"):
        assert piece in text
        assert piece in page
    assert repr(found) == text
