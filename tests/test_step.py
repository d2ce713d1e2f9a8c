"""The training step: equal to a hand-written loop with torch.optim, on every mesh, in place."""

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, optim, random, tree

CONFIG = gpt.GPTConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=12,
    init_stddev=0.2, dtype="float64",
)  # fmt: skip
STEPS = 4


def batch(step: int) -> dict:
    tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def run(mesh, *, stream=gpt.STREAM, num_microbatches=1):
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    adam = optim.adamw(optim.linear(1e-2, 10), weight_decay=0.1, mask=ft.params.decay_mask(defs))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5, specs), adam)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)

    def loss(params, data, key):
        return gpt.loss(CONFIG, params, data, key=key, stream=stream)

    step = ft.make_step(
        loss, gpt.num_targets, optimizer, mesh, specs, num_microbatches=num_microbatches
    )
    first, history = state, []
    for index in range(STEPS):
        state, metrics = step(state, batch(index))
        history.append([metrics["loss"].item(), metrics["grad_norm"].item()])
    return first, state, history


def by_hand():
    """The same training with autograd, clip_grad_norm_ and torch.optim.AdamW."""
    init_key = random.split(random.key(1))[0]
    params = tree.map(
        lambda leaf: leaf.clone().requires_grad_(), ft.init_params(init_key, gpt.defs(CONFIG))
    )
    decayed = [d.decay for d in tree.leaves(gpt.defs(CONFIG))]
    leaves = tree.leaves(params)
    groups = [
        {"params": [x for x, d in zip(leaves, decayed, strict=True) if d], "weight_decay": 0.1},
        {"params": [x for x, d in zip(leaves, decayed, strict=True) if not d], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8)
    history = []
    for index in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = float(torch.tensor(1e-2) * (1 - index / 10))
        data = batch(index)
        value = gpt.loss(CONFIG, params, data) / data["targets"].numel()
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        optimizer.step()
        history.append([value.item(), norm.item()])
    return params, history


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(dp=4, tp=2)], ids=str)
@pytest.mark.parametrize("stream", [gpt.STREAM, gpt.SEQUENCE_PARALLEL_STREAM], ids=["", "sp"])
def test_equals_a_loop_written_by_hand(mesh, stream):
    _, state, history = run(mesh, stream=stream)
    params, want = by_hand()
    torch.testing.assert_close(torch.tensor(history), torch.tensor(want), rtol=1e-6, atol=0)
    for got, leaf in zip(tree.leaves(state.params), tree.leaves(params), strict=True):
        # learning rates are float32 in both, rounded differently
        torch.testing.assert_close(got, leaf.detach(), rtol=1e-5, atol=1e-8)
    assert state.step == STEPS


def test_microbatches_do_not_change_the_numbers():
    want = torch.tensor(run(Mesh())[2], dtype=torch.float64)
    got = torch.tensor(run(Mesh(dp=2), num_microbatches=2)[2], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=0)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2)], ids=str)
def test_the_state_is_updated_in_place(mesh):
    first, last, _ = run(mesh)
    paths = tree.paths(first.params)
    for path, before, after in zip(
        paths, tree.leaves(first.params), tree.leaves(last.params), strict=True
    ):
        assert before.data_ptr() == after.data_ptr(), path
    for before, after in zip(
        tree.leaves(first.opt_state), tree.leaves(last.opt_state), strict=True
    ):
        if before.dim():
            assert before.data_ptr() == after.data_ptr()


def test_init_is_bitwise_the_same_on_every_mesh():
    defs = gpt.defs(CONFIG)
    reference = ft.init_params(random.key(0), defs)
    for mesh in (Mesh(dp=2, tp=2), Mesh(tp=4)):
        specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
        got = ft.init_params(random.key(0), defs, specs, mesh)
        assert all(
            torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(reference), strict=True)
        )


def test_a_batch_that_does_not_divide_is_refused():
    mesh = Mesh(dp=3)
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    optimizer = optim.adamw(1e-3)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    step = ft.make_step(
        lambda p, b, k: gpt.loss(CONFIG, p, b), gpt.num_targets, optimizer, mesh, specs
    )
    with pytest.raises(ValueError, match=r"tokens: got dim 0 .*wanted a multiple of 3"):
        step(state, batch(0))
    step = ft.make_step(
        lambda p, b, k: gpt.loss(CONFIG, p, b), gpt.num_targets, optimizer, Mesh(), specs,
        num_microbatches=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="multiple of 3"):
        step(state, batch(0))
