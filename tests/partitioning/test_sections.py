"""Plans cut at layers: sections together are the function, and read what they should."""

from __future__ import annotations

import pytest
import torch

import functron as ft
from functron import Mesh, P
from functron.partitioning import cut_layers

LAYERS = r"(?:^|/)blocks\.(\d+)$"
WIDTH, ROWS = 4, 6
SPECS = {"embed": P(), "up": P(None, None, "tp"), "down": P(None, "tp"), "shared": P(), "out": P()}


def model(params, x):
    """Layers that share a parameter; the first one's result is read again at the end."""
    angles = torch.arange(len(x), dtype=x.dtype)[:, None].cos() * x.sum()  # follows from data alone
    scale = params["out"].exp()  # from parameters alone
    h = x @ params["embed"] * scale
    kept = x
    for at in range(3):
        with ft.named_scope(f"blocks.{at}"):
            inner = torch.tanh(h @ params["up"][at]) @ params["down"][at] * params["shared"]
            h = h + inner + angles
        kept = h if at == 0 else kept
    return (h * scale).sum() + (kept * kept).sum()


def arguments():
    torch.manual_seed(0)
    sizes = {"embed": (4, WIDTH), "up": (3, WIDTH, 8), "down": (3, 8, WIDTH), "out": (WIDTH,)}
    params = {name: torch.randn(size, dtype=torch.float64) / 2 for name, size in sizes.items()}
    params["shared"] = torch.tensor(0.7, dtype=torch.float64)
    return params, torch.randn(ROWS, 4, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("stages", [(5,), (2, 3), (1, 1, 1, 1, 1), (3, 0, 2)])
def test_sections_are_the_function(sizes, stages):
    params, x = arguments()
    mesh = Mesh(**sizes)
    rows = P("dp") if "dp" in sizes else P()
    mapped = ft.partition(model, mesh, (SPECS, rows), P(), pick="cheapest")
    cut = cut_layers(mapped, LAYERS, (1,), params, x)
    assert cut.num_layers == 3

    def run(params, x):
        values, start = [], 0
        for count in stages:
            sections = range(start, start + count)
            data = cut.prepare(sections, {"1": x})
            for at in sections:
                given = {path: params[path[2:]] for path in cut.params[at]}
                values = cut.run(at, given, data, values)
            start += count
        return values[0]

    def step(params, x):
        value, grads = ft.value_and_grad(run)(params, x)
        return value, ft.sync_gradients(grads, SPECS)

    value, grads = ft.shard_map(step, mesh, (SPECS, rows), (P(), SPECS))(params, x)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    wanted = model(leaves, x)
    torch.testing.assert_close(value, wanted)
    found = dict(zip(leaves, torch.autograd.grad(wanted, [*leaves.values()]), strict=True))
    torch.testing.assert_close(grads, found)


def test_sections_read_what_they_compute_with():
    """Values of parameters alone are made again where they are read, and do not cross."""
    params, x = arguments()
    cut = cut_layers(ft.partition(model, Mesh(), (P(), P()), P()), LAYERS, (1,), params, x)
    layer = ("0/down", "0/shared", "0/up")
    read = [tuple(sorted(paths)) for paths in cut.params]
    assert read == [("0/embed", "0/out"), layer, layer, layer, ("0/out",)]
    data = cut.prepare(range(5), {"1": x})
    values: list = []
    counts = []
    for at in range(4):
        values = cut.run(at, {path: params[path[2:]] for path in cut.params[at]}, data, values)
        counts.append(len(values))
    assert counts == [1, 2, 2, 2]  # the stream, and what the end adds of the first layer: a sum


def test_what_cannot_be_cut():
    params, x = arguments()

    def skips(params, x):
        with ft.named_scope("blocks.1"):
            return (x @ params["embed"]).sum()

    for fn, said in (
        (lambda params, x: (x @ params["embed"]).sum(), "wanted layers of a torch.nn.ModuleList"),
        (skips, "layer 0: got nothing that the result follows from"),
    ):
        with pytest.raises(ValueError, match=said):
            cut_layers(ft.partition(fn, Mesh(), (P(), P()), P()), LAYERS, (1,), params, x)
