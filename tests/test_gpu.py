"""The decoder's training step on a GPU: the CPU's numbers, dense and simulated."""

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, optim, random, tree

pytestmark = pytest.mark.gpu

CONFIG = gpt.GPTConfig(
    vocab_size=40, num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, max_seq=16,
    init_stddev=0.2, dropout=0.1, dtype="float64",
)  # fmt: skip


def train(device: str, mesh: Mesh, stream, remat: gpt.Remat):
    defs = gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, specs), optim.adamw(1e-2))
    state = ft.init_state(random.key(0, device=device), defs, specs, optimizer, mesh)

    def loss(params, data, key):
        return gpt.loss(CONFIG, params, data, ft.ModelOptions(stream=stream, remat=remat), key=key)

    gradients = ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), 2)
    # a step that reads whether there are targets waits for the device
    step = ft.make_step(ft.with_targets(gradients), optimizer, mesh, specs)
    tokens = torch.randint(0, 40, (8, 17), generator=torch.Generator().manual_seed(0))
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}
    data = tree.map(lambda leaf: leaf.to(device), data)
    losses = []
    for number in range(3):
        if number and device == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # the host waits for nothing
        try:
            state, metrics = step(state, data)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        losses.append(metrics["loss"].item())
    return losses, tree.map(lambda leaf: leaf.cpu(), state.params)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4)], ids=str)
@pytest.mark.parametrize("stream", [gpt.STREAM, gpt.SEQUENCE_PARALLEL_STREAM], ids=["", "sp"])
@pytest.mark.parametrize("remat", ["none", "full", "selective", "dots"])
def test_a_gpu_trains_to_the_numbers_of_the_cpu(mesh, stream, remat):
    losses, params = train("cuda", mesh, stream, remat)
    want_losses, want = train("cpu", Mesh(), gpt.STREAM, "none")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want_losses), rtol=1e-6, atol=0)
    for got, leaf in zip(tree.leaves(params), tree.leaves(want), strict=True):
        torch.testing.assert_close(got, leaf, rtol=1e-5, atol=1e-6)
