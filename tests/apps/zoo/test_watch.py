"""Norms by layer of another family than GPT, against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from functron import Mesh, mamba, random, tree
from functron.spmd.params import init_params
from functron.training.config import configure
from functron.training.setup import make_setup
from tests.training.test_watch import BATCH, CONFIG, SEQ, VOCAB, batch_of

MAMBA = mamba.MambaConfig(
    pattern="MM*", vocab_size=VOCAB, embed_dim=12, num_heads=4, head_dim=3, state_dim=2, chunk=4,
    attention_heads=2, vocab_multiple=8, init_stddev=0.5, dtype="float64",
)  # fmt: skip


def test_other_families_have_norms():
    config = configure(CONFIG, model="mamba2-tiny", mamba=MAMBA, mesh="dp=2,tp=2")
    made = make_setup(config, Mesh(dp=2, tp=2))
    assert made.watch is not None
    _, metrics = made.watch.step(made.init(random.key(0)), batch_of())
    got = made.watch.layers(metrics)
    weights = init_params(random.split(random.key(0))[0], mamba.defs(MAMBA))
    flat = [leaf.requires_grad_() for leaf in tree.leaves(weights)]
    loss = mamba.loss(MAMBA, weights, batch_of()) / (BATCH * SEQ)
    grads = tree.unflatten(tree.structure(weights), torch.autograd.grad(loss, flat))
    assert set(got) == {"embed", "norm", "mamba/0", "mamba/1", "attention/0"}
    for name, entry in got.items():
        stack, *row = name.split("/")
        for what, value in (("param_norm", weights), ("grad_norm", grads)):
            leaves = [x[int(row[0])] if row else x for x in tree.leaves(value[stack])]
            want = torch.cat([x.flatten() for x in leaves]).norm().item()
            assert entry[what] == pytest.approx(want, rel=1e-10)
