"""Every choice of an optimizer's configuration in a compiled step: the numbers of the eager one."""

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, lax, optim, random, tree

CONFIG = gpt.GPTConfig(
    vocab_size=20, vocab_multiple=32, num_layers=2, embed_dim=64, num_heads=2, mlp_dim=128,
    max_seq=4, init_stddev=0.1,
)  # fmt: skip
CHOICES = {
    "int8": optim.OptimizerConfig(mu_dtype="int8", nu_dtype="int8"),
    "fp8": optim.OptimizerConfig(mu_dtype="fp8", nu_dtype="fp8"),
    "bfloat16 moments": optim.OptimizerConfig(mu_dtype="bfloat16", fp32_masters=True),
    "offload": optim.OptimizerConfig(offload=True),
    "muon": optim.OptimizerConfig("muon", muon=optim.MuonConfig(distributed=True, dtype="")),
    "adafactor": optim.OptimizerConfig(
        "adafactor", groups="*norm* lr=0.5", ema_decay=0.9, skip_nonfinite=1
    ),
}


def batch(step):
    tokens = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


@pytest.mark.parametrize("name", CHOICES)
def test_compiled_steps_are_eager_ones(name):
    mesh, defs = Mesh(dp=2, tp=2), gpt.defs(CONFIG)
    specs = ft.param_specs(defs, gpt.rules(CONFIG, mesh))
    shards = optim.shard_specs(defs, specs, mesh)
    optimizer = optim.make_optimizer(
        CHOICES[name], 1e-3, specs=specs, defs=defs, shards=shards, mesh=mesh
    )

    def loss(params, batch, key):
        """Of every parameter; how models are compiled is tested elsewhere."""
        scale = batch["targets"].float().sum()
        total = sum(leaf.float().sin().sum() for leaf in tree.leaves(params))
        return lax.psum(total * scale, mesh.axis_names)

    eager = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, mesh, specs)
    ends = []
    for step in (eager, ft.jit(eager, donate=0, backend="eager")):
        state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
        for index in range(2):
            state, metrics = step(state, batch(index))
        ends.append((state.params, metrics))
    rows = zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True)
    for path, want, got in rows:
        # 2 updates of about 1e-3; Adam divides by gradients whose float32 sums differ in order
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5, msg=lambda m, at=path: at + m)
