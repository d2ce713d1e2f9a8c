"""Layers of experts by registered operations: what they are by torch's, on meshes too."""

from __future__ import annotations

import pytest
import torch

from functron import DATA_AXES, Mesh, P
from functron.nn.moe import route
from functron.nn.moe.layer import dispatched
from functron.ops import use
from functron.ops.grouped_matmul import grouped_matmul

KERNELS = use("kernel")
BATCH, SEQ, EMBED, EXPERTS = 2, 8, 5, 8


def test_route(params, randn, config):
    """The same choices, weights and scores, and the same gradients."""
    weights, x = params(config), randn(BATCH, SEQ, EMBED)
    others = {"rows": torch.arange(BATCH), "positions": torch.arange(SEQ).expand(BATCH, SEQ)}

    def run(kernels):
        leaves = [x, *weights.values()]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        named = dict(zip(weights, leaves[1:], strict=True))
        got = route(named, leaves[0], config, stream=P(DATA_AXES), kernels=kernels, **others)
        total = (got.weights * got.weights.cos()).sum() + (got.scores * got.scores.sin()).sum()
        return got, torch.autograd.grad(total, leaves, allow_unused=True)

    (got, grads), (wanted, wanted_grads) = run(KERNELS), run(use("reference"))
    assert torch.equal(got.experts, wanted.experts)
    assert torch.equal(got.kept, wanted.kept)
    torch.testing.assert_close((got.weights, got.scores), (wanted.weights, wanted.scores))
    for a, b in zip(grads, wanted_grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["alltoall", "gather"])
@pytest.mark.parametrize("where", ["", "ep=2", "dp=2,ep=2"])
def test_dispatched(agrees, randn, where, kind):
    """Values and gradients on the tape and of torch.func, with dropped tokens and without."""
    mesh = Mesh.parse(where)
    axes, tokens = mesh.axis_names or ("ep",), 3 * mesh.size
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :3]
    kept = torch.rand(tokens, 3, generator=generator) < 0.7

    def layer(kernels):
        def run(x, weights, w, experts, kept):
            def compute(rows, sizes):
                return grouped_matmul(rows, w, sizes).tanh()

            return dispatched(
                x, experts, weights, kept, compute,
                num_experts=EXPERTS, axes=axes, kind=kind, kernels=kernels,
            )  # fmt: skip

        return run

    def dense(x, weights, w, experts, kept):
        each = 0
        for choice in range(3):
            y = torch.einsum("nd,ndo->no", x, w[experts[:, choice]]).tanh()
            each = each + torch.where(kept[:, choice, None], weights[:, choice, None] * y, 0)
        return each

    args = randn(tokens, EMBED), randn(tokens, 3), randn(EXPERTS, EMBED, 4)
    specs, split = (P(axes), P(axes), P(axes)), P(axes)
    agrees(layer(KERNELS), dense, args, mesh, specs, split, (experts, kept), (split, split))
