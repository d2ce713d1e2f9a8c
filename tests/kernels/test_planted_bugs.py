"""Bugs planted in the kernels: the emulator finds each, so that tests which pass on it mean something.

A bug is found where a launch is refused, where results depend on the order of threads, or where
they are not those of the kernel as it is (which its own tests compare with float64).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from functron.ops import foreach, moe, norms, quantise
from functron.ops import moe as moe_sort
from tests.kernels.emulator import EmulationError, emulated


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unaligned(*shape: int) -> torch.Tensor:
    return draw(*shape[:-1], shape[-1] + 1)[..., 1:]


@dataclass(frozen=True)
class Run:
    """A host function and what it is called with."""

    kernel: Callable
    args: tuple


EXPERTS = torch.rand(300, 12, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :4]
KEPT = torch.ones(300, 4, dtype=torch.bool)
SOURCE, SLOTS = torch.tensor([2, 0, 1, 0, -1]), torch.tensor([[1, 3], [2, -1], [0, -1]])
ASSIGNMENT = torch.tensor([4, 0, 2, 1, -1])
SOFTMAX = (None, 3, 0, 1, 1, 1, 1)
ROUTED = (None, 3, 1, 1, 4, 2, 1)  # sigmoid, renormalised, the best two of four groups

RUNS = {
    "sort": Run(moe_sort._sort_kernel, (EXPERTS, KEPT, 12, 1200)),
    "permute": Run(moe._permute_kernel, (draw(3, 37), SOURCE, SLOTS)),
    "unpermute": Run(moe._sum_kernel, (draw(4, 37), draw(3, 2), SLOTS)),
    "unpermute, unaligned": Run(moe._sum_kernel, (unaligned(5, 64), draw(3, 2), SLOTS)),
    "unpermute backward": Run(
        moe._unpermute_backward_kernel,
        (draw(3, 1030), draw(5, 1030), draw(3, 2), ASSIGNMENT, SLOTS),
    ),
    "route": Run(moe._router_kernel, (draw(220, 36), *ROUTED)),
    "route backward": Run(
        moe._router_backward_kernel,
        (draw(220, 3), draw(220, 36), *moe._router_reference(draw(220, 36), *SOFTMAX), 0, 1),
    ),
    "layer norm": Run(
        partial(norms._kernel, "layer_norm", norms._layer_moments),
        (draw(4, 4099), None, draw(4099), draw(4099, seed=1), 1e-5, False),
    ),
    "rms norm backward": Run(
        partial(norms._backward_kernel, "rms_norm", norms._rms_moments),
        (draw(40, 64), None, draw(40, 64, seed=1), draw(64), draw(40).abs(), 1e-5, False),
    ),
    "rows of a table": Run(moe.SUM_ROWS.kernel, (draw(70, 9), torch.arange(70) // 50, 2)),
    "squares": Run(foreach._kernel, (draw(1, 70_000),)),
    "quantise": Run(
        quantise._format_kernel,
        (draw(1, 256, 140).mT, None, None, None, None, 0, "e4m3@1x128", False),
    ),
}

READ = "    __syncthreads();  // an earlier call may still be reading\n    if (lane == 0) parts[warp] = x;"
PUBLISHED = "    if (lane == 0) parts[warp] = x;\n    __syncthreads();\n    return warp_sum"
FIRST = "    const ELEMENT* row = x + blockIdx.x / chunks * stride;"
COLUMNS = (
    "    for (int i = threadIdx.x; i < own.rows * sums.size; i += blockDim.x) shared[i] = 0.f;\n"
)

BUGS = {
    # what, where, and the edit
    "counting before zeros": ("sort", "counts[i] = 0;\n    __syncthreads();", "counts[i] = 0;"),
    "writing what lanes still read": ("sort", "        __syncwarp();  // all have read\n", ""),
    "scan of half a warp": ("sort", "by < 32; by *= 2", "by < 16; by *= 2"),
    "barrier after a return": (
        "sort",
        "    __syncthreads();\n    if (warp > 0) return;",
        "    if (warp > 0) return;\n    __syncthreads();",
    ),
    "ids before all are there": (
        "rows of a table", "    __syncthreads();\n    const int at", "    const int at"
    ),
    "no part of the chunk before": ("rows of a table", "begin > 0 && ids[begin - 1]", "false && ids[0]"),
    "no padding": ("permute", "if (from < 0) return", "if (from < -1) return"),
    "writes beyond the row": ("permute", "if (at + k < dim) row", "row"),
    "reads beyond the row": ("unpermute", "at + k < dim ? row[at + k] :", "dim ? row[at + k] :"),
    "packs wherever": ("unpermute, unaligned", "if (packed) return", "if (dim) return"),
    "lanes leave a loop of the warp": (
        "unpermute",
        "int first = threadIdx.x - lane; first * Pack<T>::size",
        "int first = threadIdx.x - lane; (first + lane) * Pack<T>::size",
    ),
    "rows by 32 bits": (
        "unpermute",
        "slots += blockIdx.x * choices;",
        "slots += (int)blockIdx.x * ((1 << 30) + (int)choices);",
    ),
    "sum before all are there": (
        "unpermute backward", PUBLISHED, PUBLISHED.replace("    __syncthreads();\n", "")
    ),
    "lanes without a part": (
        "unpermute backward", "lane < (int)(blockDim.x >> 5) ? parts[lane] : 0.f", "parts[lane]"
    ),
    "shuffles within a branch": (
        "unpermute backward",
        "    dot = block_sum(dot);\n    if (threadIdx.x == 0)",
        "    if (threadIdx.x < 48) dot = block_sum(dot);\n    if (threadIdx.x == 0)",
    ),
    "the last token still read": (
        "route", "        __syncwarp();  // of `row` and `found`, the last token's have been read\n", ""
    ),
    "no initial value": (
        "route", "order[i] = NONE;\n            if (expert >= count)", "if (expert >= count)"
    ),
    "logits of no expert": ("route", "i * 32 + lane < count ? logits[", "lane < 32 ? logits["),
    "a weight too few": ("route", "j < choices; j += 32) weights", "j < choices - 1; j += 32) weights"),
    "sums before all have added": (
        "route backward", "// no expert twice\n        __syncwarp();", "// no expert twice"
    ),
    "an earlier sum still read": ("layer norm", READ, READ.split("\n")[1]),
    "sums before zeros": ("rms norm backward", COLUMNS + "    __syncthreads();\n", COLUMNS),
    "a block that gives up": ("squares", FIRST, FIRST + "\n    if (blockIdx.x == 1) return;"),
    "bytes that are still being turned": (
        "quantise", "        __syncwarp();\n        if (packed_turned)", "        if (packed_turned)"
    ),
    "columns before rows": (
        "quantise",
        "    __syncthreads();\n    if (block == TILE && threadIdx.x < num_rows)",
        "    if (block == TILE && threadIdx.x < num_rows)",
    ),
}  # fmt: skip


# of what each of these shows another bug is found by default: a barrier or a wait of the warp that is
# missing ("counting before zeros", "writing what lanes still read"), lanes that leave others waiting,
# results that nobody wrote, wrong results ("lanes without a part", "rows by 32 bits")
FULL = {
    "scan of half a warp",
    "no padding",
    "an earlier sum still read",
    "bytes that are still being turned",
    "sum before all are there",
    "shuffles within a branch",
    "the last token still read",
    "logits of no expert",
    "a weight too few",
    "sums before all have added",
    "sums before zeros",
    "columns before rows",
}


def cases(names, full) -> list:
    return [pytest.param(name, marks=pytest.mark.full if full(name) else ()) for name in names]


@pytest.fixture(scope="module")
def sound() -> Callable:
    """The results of the kernels as they are, each computed once."""
    known: dict = {}

    def results(name: str):
        if name not in known:
            known[name] = tuple(tensors(emulated(RUNS[name].kernel, *RUNS[name].args)))
        return known[name]

    return results


def tensors(result) -> list[torch.Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [x for x in results if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("run", cases(RUNS, {BUGS[bug][0] for bug in FULL}.__contains__))
def test_without_a_bug(sound, run):
    for x in sound(run):
        assert not x.is_floating_point() or x.float().isfinite().all()


@pytest.mark.parametrize("bug", cases(BUGS, FULL.__contains__))
def test_bugs_are_found(sound, bug):
    name, *edit = BUGS[bug]
    run, wanted = RUNS[name], sound(name)
    try:
        got = tensors(emulated(run.kernel, *run.args, edits=(tuple(edit),)))
    except (EmulationError, AssertionError):
        return
    same = [
        torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    ]
    assert not all(same)
