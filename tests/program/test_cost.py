"""Costs: FLOPs against torch's counter on eager runs, bytes and collectives by hand."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random
from functron.program.cost import (
    FLOP_FORMULAS,
    cost,
    measure_flops,
    peak_flops,
    peak_memory_bytes,
)
from functron.program.timeline import Rates
from functron.program.trace import trace
from functron.training.config import TrainConfig, configure, with_model
from functron.training.setup import make_setup
from tests.transforms.flow_programs import loop, switch

BATCH, SEQ = 4, 32
CONFIG = {
    "vocab_size": 384, "num_layers": 3, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64,
    "max_seq": SEQ,
}  # fmt: skip


def training(mesh=None, *, remat="none", num_microbatches=1, **changes):
    """A training step of a small decoder, its state, batch and config."""
    mesh = mesh or Mesh()
    config = gpt.GPTConfig(**{**CONFIG, **changes})
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    optimizer = optim.adamw(1e-2)

    def loss(params, batch, key):
        return gpt.loss(config, params, batch, ft.ModelOptions(remat=remat), key=key)

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), num_microbatches),
        optimizer,
        mesh,
        specs,
    )
    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)
    tokens = torch.randint(0, 384, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(BATCH)}
    return step, state, batch, config


def counted(fn, *args) -> int:
    """The FLOPs that torch counts while `fn` runs eagerly."""
    with FlopCounterMode(display=False, custom_mapping=dict(FLOP_FORMULAS)) as counter:
        fn(*args)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "norm": "layer", "bias": True, "positions": "learned", "gated": False},
        {"num_kv_heads": 2, "qk_norm": True, "dropout": 0.1},
        {"num_microbatches": 2},
        {"num_microbatches": 4, "num_layers": 1},
    ],
    ids=["llama", "gpt2", "grouped", "microbatches", "shallow"],
)
def test_flops_equal_those_torch_counts_on_the_eager_step(changes):
    step, state, batch, config = training(**changes)
    found = cost(trace(step, donate=0)(state, batch))
    assert found.hardware_flops == counted(step, state, batch) > 0
    # torch counts 2.5 forwards in backward of attention, whose scores are computed again
    product = 2 * config.num_layers * config.num_heads * BATCH * SEQ**2 * config.head_size
    assert found.model_flops_whole == found.hardware_flops - product
    assert found.model_flops == found.model_flops_whole - 6 * product // 2


def test_flops_of_convolutions_and_batched_products():
    def f(x, w, a):
        return torch.conv2d(x, w, padding=1).relu().flatten(2) @ a

    def both(x, w, a):
        return ft.value_and_grad(lambda x, w, a: f(x, w, a).square().sum(), (0, 1, 2))(x, w, a)

    args = torch.randn(2, 3, 8, 8), torch.randn(5, 3, 3, 3), torch.randn(2, 64, 7)
    assert cost(trace(both)(*args)).hardware_flops == counted(both, *args) > 0


def test_recomputation_costs_hardware_flops_only():
    """A whole block again, but its last product, whose result backward does not need."""
    plain, state, batch, config = training()
    again, *_ = training(remat="full")
    before, after = (cost(trace(step)(state, batch)) for step in (plain, again))
    down = 2 * BATCH * SEQ * config.mlp_dim * config.embed_dim
    assert after.hardware_flops == counted(again, state, batch) - config.num_layers * down
    assert after.hardware_flops > before.hardware_flops
    assert after.model_flops == before.model_flops < before.hardware_flops
    assert after.model_flops_whole == before.model_flops_whole < before.hardware_flops


@pytest.mark.parametrize("backward", [False, True])
def test_cpu_attention_counts_as_torchs_flash_attention(backward):
    aten = torch.ops.aten
    q, k, v = (torch.empty(2, 4, n, 16, device="meta") for n in (8, 24, 24))
    packet = aten._scaled_dot_product_flash_attention
    mine = aten._scaled_dot_product_flash_attention_for_cpu
    first: tuple = ()
    if backward:
        packet = aten._scaled_dot_product_flash_attention_backward
        mine = aten._scaled_dot_product_flash_attention_for_cpu_backward
        first = (q,)
    want = flop_registry[packet](*first, q, k, v, out_val=q)
    shapes = [tuple(x.shape) for x in (*first, q, k, v)]
    assert FLOP_FORMULAS[mine](*shapes, 0.0, True) == want > 0


@pytest.mark.parametrize("remat", ["none", "full"])
def test_flops_of_a_preset_are_those_of_the_formula(remat):
    """Llama 3 8B at its 8192 tokens: traced, and 6 N + 6 (or 12) L H Q T by hand, without norms."""
    config = with_model(TrainConfig(), "llama3-8b")
    config = configure(config, seq=8192, global_batch=1, format="mock", remat=remat)
    found = make_setup(config, Mesh()).program().cost()
    embed, heads, layers, vocab = 4096, 32, 32, 128256
    block = 2 * embed * 4096 + 2 * embed * 1024 + 3 * embed * 14336
    matrices = 6 * (layers * block + vocab * embed)
    attention = 12 * layers * heads * 128 * 8192
    assert found.model_flops_whole == 8192 * (matrices + attention)
    assert found.model_flops == 8192 * (matrices + attention // 2)
    norms = 6 * (2 * layers + 1) * embed
    for whole, total in ((False, found.model_flops), (True, found.model_flops_whole)):
        assert gpt.flops_per_token(config.gpt, 8192, whole=whole) == total // 8192 + norms
    text = str(found)
    for said in (
        f"{found.model_flops:,}; causal attention as half",
        f"{found.model_flops_whole:,}",
    ):
        assert said in text


def test_flops_split_over_tensor_parallel_ranks():
    def flops(mesh):
        step, state, batch, _ = training(mesh)
        return cost(trace(step, donate=0)(state, batch)).hardware_flops

    assert flops(Mesh(tp=2)) == flops(Mesh(dp=2)) == flops(Mesh()) // 2


# --- bytes


def test_bytes_by_hand():
    def f(w, x, row, table, ids):
        y = (x @ w).t()  # reads 4x8 and 8x16, writes 4x16; the transpose moves nothing
        z = y + row.expand(16, 4)  # reads 64 and the 4 that are expanded, writes 64
        return z, torch.nn.functional.embedding(ids, table)  # reads 3 ids and 3 rows of 5

    shapes = (8, 16), (4, 8), (4,), (1000, 5)
    args = [torch.randn(shape) for shape in shapes]
    found = cost(trace(f)(*args, torch.tensor([1, 2, 3])))
    products = 4 * (32 + 128 + 64)
    sums = 4 * (64 + 4 + 64)
    lookups = 3 * 8 + 2 * 4 * 15
    assert found.bytes_accessed == products + sums + lookups
    assert found.hardware_flops == 2 * 4 * 8 * 16
    assert found.arithmetic_intensity == pytest.approx(1024 / (products + sums + lookups))
    assert dict(found.flops_by_op) == {"mm": 1024}


def test_scans_count_every_iteration():
    def f(w, x):
        def body(x, w):
            return torch.tanh(x @ w), None

        return ft.scan(body, x, w)[0]

    one, many = (cost(trace(f)(torch.randn(n, 8, 8), torch.randn(4, 8))) for n in (1, 7))
    assert many.hardware_flops == 7 * one.hardware_flops == 7 * 2 * 4 * 8 * 8
    assert many.bytes_accessed == 7 * one.bytes_accessed == 7 * 4 * (32 + 64 + 32 + 32 + 32)


def halve(x):
    return x / 2


def routed(i, w, x):
    return loop(lambda x: x.sum() > 1, halve, switch(i, [lambda x: x @ w @ w, torch.sin], x))


def test_switches_count_the_dearest_branch_and_loops_one_iteration():
    program = trace(routed)(torch.tensor(0), torch.ones(8, 8), torch.ones(4, 8))
    found, one = cost(program), 4 * 32
    assert found.hardware_flops == found.model_flops == 2 * 2 * 4 * 8 * 8
    condition = 2 * (one + 4 + 4 + 1)  # a sum and a comparison, before and after the iteration
    products = 2 * (one + 4 * 64 + one)
    assert found.bytes_accessed == products + condition + 2 * one
    assert found.once[0].startswith("halve at flow_programs.py:")
    assert "counted as one iteration; see Program.assume_runs: halve at" in str(found)
    assert "halve at" in found._repr_html_()


def test_weights_and_iterations_that_are_given_count():
    program = trace(routed)(torch.tensor(0), torch.ones(8, 8), torch.ones(4, 8))
    (name,) = {e.op.name for e in program.block.equations if e.name == "switch"}
    given = program.assume_runs({"halve": 12, name: (0.25, 0.75)})
    found, one = given.cost(), 4 * 32
    assert found.hardware_flops == 2 * 2 * 4 * 8 * 8 / 4
    sums = 13 * (one + 4 + 4 + 1)
    branches = 2 * (one + 4 * 64 + one) / 4 + 2 * one * 3 / 4
    assert found.bytes_accessed == branches + sums + 12 * 2 * one
    assert not found.once
    rates = Rates(flops=1e30, memory=1.0, links=1.0)
    assert given.timeline(rates).total == pytest.approx(found.bytes_accessed)
    assert program.timeline(rates).total == pytest.approx(program.cost().bytes_accessed)
    assert "weights=(0.25, 0.75)" in str(given)
    assert given(torch.tensor(1), torch.ones(8, 8), torch.ones(4, 8)).sum() <= 1


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({"halv": 1}, "got 'halv'; wanted the name of a switch or a while loop; fix: did you mean"),
        ({"halve": -1}, r"runs\['halve'\]: got -1; wanted how many iterations"),
        ({"halve": (0.5, 0.5)}, r"runs\['halve'\]: got \(0.5, 0.5\)"),
        ({"<lambda>/sin": 2}, r"got 2; wanted 2 weights, one for each branch"),
        ({"<lambda>/sin": (1.0,)}, r"got \(1.0,\); wanted 2 weights"),
        ({"<lambda>/sin": (1.0, 1.0)}, r"got \(1.0, 1.0\); wanted parts of 1"),
    ],
)
def test_runs_that_cannot_be_are_named(runs, message):
    program = trace(routed)(torch.tensor(0), torch.ones(8, 8), torch.ones(4, 8))
    with pytest.raises(ValueError, match=f"routed cannot run so\n  - .*{message}"):
        program.assume_runs(runs)


def test_bounds_of_communication_are_those_of_each_axis():
    """One branch sends more over tp, the other over dp: neither number is below what is sent."""

    def f(i, x):
        branches = [
            lambda x: lax.psum(x, "tp") + lax.psum(x[:, :1], "dp"),
            lambda x: lax.psum(x, "dp"),
        ]
        return switch(i, branches, x)

    mapped = ft.shard_map(f, Mesh(dp=2, tp=2), (P(), P(("dp", "tp"))), P(("dp", "tp")), check=False)
    found = cost(trace(mapped)(torch.tensor(0), torch.ones(4, 6)))
    assert (found.sent_bytes("tp"), found.sent_bytes("dp")) == (24, 24)


# --- collectives


def test_ring_formulas_by_hand():
    """f32[6] over 3 ranks: payloads of 24 bytes, of all_gather the 72 of its result."""

    def f(x):
        a = lax.psum(x, "tp") + lax.pmax(x, "tp") + lax.pmin(x, "tp")
        b = lax.all_gather(x, "tp").sum(0) + lax.all_to_all(x, "tp", 0, 0, tiled=True)
        c = lax.psum_scatter(x, "tp", tiled=True)
        d = lax.ppermute(x, "tp", [(0, 1), (1, 2)]) + lax.pbroadcast(x, "tp", 1)
        return lax.psum(a.sum() + b.sum() + c.sum() + d.sum(), "tp")

    mapped = ft.shard_map(f, Mesh(tp=3), P("tp"), P())
    found = cost(trace(mapped)(torch.randn(18)))
    rows = {row.op: (row.count, row.payload_bytes, row.sent_bytes) for row in found.collectives}
    assert rows == {
        "psum": (2, 24 + 4, round((24 + 4) * 4 / 3)),
        "pmax": (1, 24, 32),
        "pmin": (1, 24, 32),
        "all_gather": (1, 72, 48),
        "psum_scatter": (1, 24, 16),
        "all_to_all": (1, 24, 16),
        "ppermute": (1, 24, 24),
        "pbroadcast": (1, 24, 16),
    }
    assert {(row.axis, row.phase) for row in found.collectives} == {("tp", "forward")}
    assert found.sent_bytes("tp") == sum(sent for _, _, sent in rows.values())
    assert found.sent_bytes("dp") == 0


def test_collectives_of_a_tensor_parallel_step_by_phase():
    """Two all-reduces of the stream per layer forward and two backward, and one of the embedding."""
    mesh = Mesh(dp=2, tp=2)
    step, state, batch, config = training(mesh)
    found = cost(trace(step, donate=0)(state, batch))
    rows = {(row.axis, row.op, row.phase): row for row in found.collectives}
    stream = BATCH // 2 * SEQ * config.embed_dim * 4
    forward, backward = (rows["tp", "psum", phase] for phase in ("forward", "backward"))
    scalars = 3 * BATCH // 2 * SEQ * 4  # of the vocabulary-parallel loss, per token
    streams = (2 * config.num_layers + 1) * stream
    assert 0 <= forward.payload_bytes - streams <= scalars
    # backward: two per layer, the input of the unembedding, and gradients of replicated norms
    norms = (2 * config.num_layers + 1) * config.embed_dim * 4
    assert 0 <= backward.payload_bytes - (streams + norms) <= scalars
    # one per gradient, and the loss's own
    gradients = rows["dp", "psum", "backward"]
    assert gradients.count == len(ft.tree.leaves(state.params)) + 1
    local = trace(step, donate=0)(state, batch)
    want = sum(i.var.nbytes for i in local.inputs if i.path.startswith("0/params")) + 4
    assert gradients.payload_bytes == gradients.sent_bytes == want  # 2 (n - 1) / n is 1 for n = 2


def test_cost_shows_as_text_and_html():
    step, state, batch, _ = training(Mesh(dp=2, tp=2))
    found = cost(trace(step, donate=0)(state, batch))
    text, page = str(found), found._repr_html_()
    for shown in (text, page):
        for piece in ("model FLOPs", f"{found.model_flops:,}", "psum", "backward", "sent per rank"):
            assert piece in shown
    assert page.count("<table>") == page.count("</table>") == 2
    alone = cost(trace(lambda x: x + 1)(torch.zeros(3)))
    assert "collective" not in str(alone)
    assert alone.arithmetic_intensity == 0


def test_collectives_that_differ():
    """Tensor parallelism as an all-reduce, and as a reduce-scatter and a gather around a norm."""
    mesh, x = Mesh(dp=2, tp=4), torch.ones(8, 16)
    w = {"up": torch.ones(16, 32), "down": torch.ones(32, 16)}
    specs = {"up": P(None, "tp"), "down": P("tp")}

    def reduced(w, x):
        with ft.named_scope("mlp"):
            y = lax.psum(torch.relu(x @ w["up"]) @ w["down"], "tp")
        return lax.psum((y * y).sum(), "dp")

    def scattered(w, x):
        with ft.named_scope("mlp"):
            y = torch.relu(x @ w["up"]) @ w["down"]
            y = lax.all_gather(lax.psum_scatter(y, "tp", tiled=True), "tp", tiled=True)
        return lax.psum((y * y).sum(), "dp")

    a, b = (trace(ft.shard_map(f, mesh, (specs, P("dp")), P()))(w, x) for f in (reduced, scattered))
    # y is [4, 16] float32 on a rank: 256 bytes, of which 3/4 are sent, twice in an all-reduce
    table = [re.split(r"  +", line.strip()) for line in a.diff(b, by="collectives").splitlines()]
    assert table == [
        ["collectives of reduced (this) and of scattered (other), per rank"],
        ["axis", "collective", "phase", "payload of each", "this", "other", "sent", "where"],
        ["tp", "all_gather", "forward", "256 B", "0", "1", "+192 B", "mlp"],
        ["tp", "psum", "forward", "256 B", "1", "0", "-384 B", "mlp"],
        ["tp", "psum_scatter", "forward", "256 B", "0", "1", "+192 B", "mlp"],
        ["in all", "388 B", "388 B", "+0 B"],
    ]
    assert a.diff(a, by="collectives") == ""
    with pytest.raises(ValueError, match=r"other: got the text of one.*compare by='equations'"):
        a.diff(str(b), by="collectives")


def test_peak_rates_and_memory(monkeypatch):
    rate = measure_flops("cpu", torch.float32, size=256)
    assert 1e7 < rate < 1e14
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_flops("cuda", torch.bfloat16) == 756e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert peak_flops("cuda", torch.float32) == 19.5e12
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops("cuda", torch.float32) == 156e12  # the data sheet's TF32
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GB200")
    assert peak_flops("cuda", torch.bfloat16) == 2500e12  # and not the 2250 of a B200
    before = peak_memory_bytes("cpu")
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert before > 50 << 20
    assert peak_memory_bytes("cpu") >= max(before, block.numel())
