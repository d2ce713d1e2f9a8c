"""Column- and row-parallel linear layers against matrix products."""

from __future__ import annotations

import pytest
import torch

from functron import DATA_AXES, Mesh, P, nn

BATCH, SEQ, EMBED = 4, 8, 6


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", [(8,), (4, 3)], ids=["features", "heads"])
def test_column_parallel(agrees, randn, mesh, stream, features, bias):
    letters = "fg"[: len(features)]
    weights = {"w": randn(EMBED, *features)}
    specs = {"w": P(None, "tp")}
    if bias:
        weights["b"], specs["b"] = randn(*features), P("tp")

    def layer(params, x):
        whole = nn.gather_sequence(x, stream)
        return nn.column_parallel(whole, params["w"], params.get("b"))

    def dense(params, x):
        y = torch.einsum(f"bse,e{letters}->bs{letters}", x, params["w"])
        return y + params["b"] if bias else y

    x = randn(BATCH, SEQ, EMBED)
    agrees(layer, dense, (weights, x), mesh, (specs, stream), P(DATA_AXES, None, "tp"))


@pytest.mark.pairwise
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", [(8,), (4, 3)], ids=["features", "heads"])
def test_row_parallel(agrees, randn, mesh, stream, features, bias):
    letters = "fg"[: len(features)]
    weights = {"w": randn(*features, EMBED)}
    specs = {"w": P("tp")}
    if bias:
        weights["b"], specs["b"] = randn(EMBED), P()

    def layer(params, x):
        return nn.row_parallel(x, params["w"], params.get("b"), stream=stream)

    def dense(params, x):
        y = torch.einsum(f"bs{letters},{letters}e->bse", x, params["w"])
        return y + params["b"] if bias else y

    x = randn(BATCH, SEQ, *features)
    split = P(DATA_AXES, None, "tp")
    agrees(layer, dense, (weights, x), mesh, (specs, split), stream)


def test_another_axis(agrees, randn):
    """The axis that splits features is an argument, and the stream may be split by it too."""
    stream = P(DATA_AXES, "cp")

    def layer(weights, x):
        whole = nn.gather_sequence(x, stream, "cp")
        hidden = nn.column_parallel(whole, weights["up"])
        return nn.row_parallel(hidden, weights["down"], stream=stream, axis="cp")

    def dense(weights, x):
        return x @ weights["up"] @ weights["down"]

    weights = {"up": randn(EMBED, 8), "down": randn(8, EMBED)}
    specs = {"up": P(None, "cp"), "down": P("cp")}
    x = randn(BATCH, SEQ, EMBED)
    agrees(layer, dense, (weights, x), Mesh(dp=2, cp=2), (specs, stream), stream)


def test_defs():
    defs = nn.linear_defs(
        (6, 4, 3), ("embed", "heads", None), stddev=0.1, bias=(4, 3), bias_axes=("heads", None),
        dtype=torch.float64,
    )  # fmt: skip
    assert {name: (d.shape, d.axes, d.decay) for name, d in defs.items()} == {
        "w": ((6, 4, 3), ("embed", "heads", None), True),
        "b": ((4, 3), ("heads", None), False),
    }
    assert {d.dtype for d in defs.values()} == {torch.float64}
    assert set(nn.linear_defs((6, 4), (None, None), stddev=0.1, dtype=torch.float32)) == {"w"}
