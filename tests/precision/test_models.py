"""Training by quantised products: on every mesh the numbers of one device, to float32 rounding."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from functron import Mesh, P, gpt, nn, random, tree
from functron.models import generation
from functron.nn import layers
from functron.nn.moe import MoEConfig
from functron.ops.norms import LEAN_RMS_NORM
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.pipeline.partition import Part
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, with_model, with_precision
from functron.training.evaluation import loss_program
from functron.training.setup import make_setup

BATCH, SEQ, VOCAB = 2, 256, 32
DENSE = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=128,
    max_seq=SEQ, mlp_dim=256, vocab_multiple=VOCAB, dtype="float64",
)  # fmt: skip
SMALL = replace(DENSE, embed_dim=32, head_dim=16, mlp_dim=64)  # for scales of whole tensors
MODELS = {
    "dense": DENSE,
    "small": SMALL,
    "wide stream": replace(SMALL, dtype="bfloat16", fp32_residual=True),
    "deep": replace(DENSE, num_layers=4),
    "shared keys": replace(DENSE, num_kv_heads=1, num_heads=2),  # which both ranks of tp have
    "fused": replace(DENSE, fused_projections=True),
    "experts": replace(
        DENSE, num_layers=1,
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=256, shared_dim=256),
    ),
    "latent": gpt.GPTConfig(
        vocab_size=VOCAB, num_layers=1, embed_dim=128, num_heads=4, kv_rank=96, q_rank=128,
        head_dim=64, rope_head_dim=32, v_head_dim=64, max_seq=SEQ, mlp_dim=256,
        vocab_multiple=VOCAB, num_kv_heads=0, dtype="float64",
    ),
    "odd": gpt.GPTConfig(  # latents, and a stream, that blocks of 128 do not divide
        vocab_size=VOCAB, num_layers=2, embed_dim=160, num_heads=4, kv_rank=144, q_rank=96,
        head_dim=64, rope_head_dim=64, v_head_dim=64, max_seq=SEQ, mlp_dim=256,
        vocab_multiple=VOCAB, num_kv_heads=0, dtype="float64",
    ),
}  # fmt: skip
CONFIG = configure(
    seq=SEQ,
    global_batch=BATCH,
    optimizer=OptimizerConfig(name="sgd", momentum=0.0, clip_norm=0.0),
    learning_rate=ScheduleConfig(name="constant", peak=0.1),
)
SPLIT = {"sequence_parallel": True}
HALF = "fprop=e4m3@row*e4m3@row dgrad=high wgrad=high"
PIPED = {"microbatches": 2}  # of which numbers by tokens depend, and delayed ones do not


def batch() -> dict:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(BATCH)}


def taken(model: str, recipe: str, mesh: str, **fields) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and gradient norms of two steps, and the parameters after them."""
    config = configure(CONFIG, gpt=MODELS[model], mesh=mesh, products=recipe, **fields)
    made = make_setup(config, Mesh.parse(mesh))
    state, found = made.init(random.key(0)), []
    for _ in range(2):
        state, metrics = made.step(state, batch())
        found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return found, tree.leaves(state.params)


@pytest.fixture(scope="module")
def alone():
    """Of a model and a recipe, `taken` on one device."""
    return functools.cache(lambda model, recipe: taken(model, recipe, ""))


ROWS = [
    ("dense", "fp8-tensor logits=low", "dp=2,tp=2", SPLIT),
    ("dense", "nvfp4", "cp=2", {}),
    ("dense", "mxfp8", "fsdp=2", {"remat": "full"}),
    ("dense", "fp8-block first=1", "pp=2,tp=2", {"schedule": "zb-h1"}),
    ("shared keys", "fp8-tensor", "tp=2", {}),
    ("small", "fp8-delayed first=1", "pp=2", PIPED | {"schedule": "zb-h1", "remat": "full"}),
    ("small", "fp8-delayed", "dp=2,tp=2", SPLIT | {"zero": 2}),
    ("fused", "nvfp4", "tp=2", SPLIT),  # columns of gate and up that a rank has are no run of all
    ("experts", "fp8-delayed", "ep=2,tp=2", {}),
    ("latent", "fp8-tensor", "tp=2", {}),
    ("odd", "fp8-block", "tp=2", SPLIT),
    *(
        pytest.param(*row, marks=pytest.mark.full)
        for row in (
            ("dense", "fp8-block", "tp=2", {}),
            ("shared keys", "fp8-delayed", "tp=2", {}),
            ("fused", "fp8-delayed", "dp=2,tp=2", SPLIT | {"zero": 2}),
            ("experts", "fp8-tensor", "ep=2,tp=2", {}),
            ("dense", "fp8-delayed", "cp=2", {"microbatches": 2}),
            ("dense", "fp8-delayed", "fsdp=2", {"remat": "full"}),
            ("dense", "fp8-delayed", "dp=2", {"zero": 3}),
            ("dense", "fp8-delayed", "pp=2,tp=2", PIPED | SPLIT | {"schedule": "1f1b"}),
            ("deep", "fp8-delayed", "pp=2", PIPED | {"schedule": "interleaved", "chunks": 2}),
            ("experts", "fp8-delayed", "ep=2,tp=2", SPLIT | {"expert_axes": "ep,tp"}),
            ("latent", "fp8-delayed", "dp=2,tp=2", SPLIT),
            ("deep", "fp8-tensor first=1 last=1", "dp=2", {"zero": 2, "remat": "full"}),
            ("deep", "fp8-row first=1 last=1", "pp=2", {"schedule": "zbv"}),
            ("dense", "mxfp8 logits=low", "cp=2", {}),
            ("dense", "fp8-block", "cp=2", {"zigzag": False}),
            ("dense", "mxfp8", "cp=2", {}),
            ("dense", "nvfp4", "ulysses=2,cp=2", {}),
            ("dense", "fp8-row", "cp=2", {}),
            ("dense", "nvfp4", "dp=2,tp=2", SPLIT),
            ("dense", "nvfp4", "pp=2", {"schedule": "zb-h1"}),
            ("dense", "fp8-tensor", "pp=2,dp=2", {"schedule": "1f1b"}),
            ("dense", "mxfp8", "dp=2", {"zero": 2}),
            ("fused", "fp8-block", "tp=2", SPLIT),
            ("experts", "fp8-block", "ep=2", {}),
            ("experts", "mxfp8", "ep=2,tp=2", SPLIT | {"expert_axes": "ep,tp"}),
            ("experts", "nvfp4", "ep=2", {}),
            ("latent", "mxfp8", "dp=2,tp=2", SPLIT),
            ("odd", "fp8-block", "dp=2,tp=2", {}),
            ("odd", "fp8-block", "fsdp=2", {"remat": "full"}),
            ("odd", "fp8-block logits=low", "dp=2", {"zero": 3}),
            ("odd", "fp8-block", "pp=2", {"schedule": "zb-h1"}),
            ("odd", "fp8-block", "cp=2", {"zigzag": False}),
        )
    ),
]


@pytest.mark.parametrize(("model", "recipe", "mesh", "fields"), ROWS)
def test_every_mesh_trains_to_the_same_numbers(alone, model, recipe, mesh, fields):
    """In float64, where sums in another order round no element of a product to another number.

    A difference of 1e-16 in an operand changes what it is rounded to with a probability of about
    1e-16 over the spacing of eight-bit numbers, 2^-4; and the products are of a million elements.
    """
    want, leaves = alone(model, recipe)
    got, found = taken(model, recipe, mesh, **fields)
    assert got == pytest.approx(want, rel=1e-12)
    for a, b in zip(found, leaves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_held_out_losses_draw_nothing():
    made = make_setup(configure(CONFIG, gpt=DENSE, products="nvfp4"), Mesh())
    state = made.init(random.key(0))
    total, count = loss_program(made)(state.params, batch())
    _, metrics = made.step(state, batch())
    assert float(total) / int(count) == pytest.approx(float(metrics["loss"]), rel=1e-12)


def test_joined_matrices_have_scales_of_their_own(alone):
    (want, _), (got, _) = alone("dense", "nvfp4"), alone("fused", "nvfp4")
    assert got == pytest.approx(want, rel=1e-12)


def test_every_product_of_a_layer_is_quantised_in_the_program():
    """Seven linear layers, three products each; the loss's products are not."""
    config = configure(
        CONFIG, gpt=replace(DENSE, dtype="float32"), mesh="tp=2", products="fp8-block"
    )
    text = str(make_setup(config, Mesh.parse("tp=2")).program())
    assert text.count(" scaled_matmul(") == 21
    plain = str(make_setup(configure(config, products=""), Mesh.parse("tp=2")).program())
    assert "scaled_matmul(" not in plain


# --- weights in codes, made once per step

NARROW = replace(
    DENSE, num_layers=1, embed_dim=64, num_kv_heads=2, head_dim=32, max_seq=32, mlp_dim=128
)
TINY = {
    "dense": NARROW,
    "deep": replace(NARROW, num_layers=2),
    "wide": replace(NARROW, embed_dim=256, num_heads=4, head_dim=64, mlp_dim=128, max_seq=128),
    "experts": replace(
        NARROW,
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=128, shared_dim=128),
    ),
    "latent": replace(
        MODELS["latent"], embed_dim=64, num_heads=2, kv_rank=32, q_rank=64, max_seq=32, mlp_dim=128
    ),
    "odd": replace(  # 320 outputs of kv_down
        MODELS["odd"], num_layers=1, embed_dim=256, kv_rank=256, q_rank=128, max_seq=128
    ),
}  # fmt: skip


def tiny(model: str, recipe: str, mesh: str, **fields) -> TrainConfig:
    sizes = {"global_batch": 4, "seq": TINY[model].max_seq, "gpt": TINY[model]}
    return configure(CONFIG, **{**sizes, "mesh": mesh, "products": recipe, **fields})


def data(seq: int) -> dict:
    tokens = torch.randint(0, VOCAB, (4, seq + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(4)}


def after_two_steps(config: TrainConfig) -> list[torch.Tensor]:
    made = make_setup(config, Mesh.parse(config.parallelism.mesh))
    state, found = made.init(random.key(0)), []
    for _ in range(2):
        state, metrics = made.step(state, data(config.data.seq))
        found += [metrics["loss"], metrics["grad_norm"]]
    return found + tree.leaves(state.params)


CODED = [
    ("dense", "fp8-tensor", "fsdp=2,tp=2", {**SPLIT, "remat": "full"}),
    ("dense", "fp8-tensor", "fsdp=2", {"gather": "step", "microbatches": 2}),
    ("odd", "fp8-block", "fsdp=2", {}),
    *(
        pytest.param(*row, marks=pytest.mark.full)
        for row in (
            ("deep", "fp8-tensor last=1", "fsdp=2,tp=2", {}),
            ("dense", "nvfp4", "fsdp=2", {"microbatches": 2}),
            ("deep", "mxfp8", "pp=2,fsdp=2", {"schedule": "1f1b", "microbatches": 2}),
            ("wide", "fp8-block", "fsdp=2", {}),
            ("experts", "fp8-row", "ep=2,fsdp=2", {}),
            ("dense", "fp8-tensor", "dp=2", {"zero": 3}),
            ("dense", "fp8-tensor", "dp=2,tp=2", {"zero": 2}),
            ("dense", "fp8-row", "fsdp=2,tp=2", {"gather": "keep"}),
            ("dense", "fp8-tensor scaling=local", "fsdp=2,tp=2", {}),
            ("dense", "fp8-tensor logits=low", "fsdp=2,tp=2", {}),
            ("deep", "nvfp4", "pp=2,fsdp=2", {"schedule": "zb-h1", "gather": "step"}),
            ("dense", "nvfp4", "cp=2,fsdp=2", {"zigzag": False}),
            ("experts", "nvfp4", "ep=2,tp=2", {}),
            ("experts", "fp8-tensor", "ep=2,fsdp=2", {"gather": "step"}),
            ("latent", "fp8-tensor", "fsdp=2,tp=2", SPLIT),
            ("odd", "fp8-block", "fsdp=2,tp=2", {}),
            ("odd", "fp8-block", "dp=2", {"zero": 3}),
        )
    ),
]


@pytest.mark.parametrize(("model", "recipe", "mesh", "fields"), CODED)
def test_weights_in_codes_are_the_same_numbers(model, recipe, mesh, fields):
    """Bit for bit those of weights that are gathered as they are, and quantised by products."""
    config = tiny(model, recipe, mesh, **fields)
    want = after_two_steps(config)
    got = after_two_steps(configure(config, gather_as="quantised"))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("recipe", "gather_as", "each"),
    [
        ("fp8-tensor", "quantised", 1.0),
        pytest.param("fp8-tensor", "", 2.0, marks=pytest.mark.full),
        pytest.param("nvfp4", "quantised", 0.5 + 1 / 256, marks=pytest.mark.full),
        pytest.param("mxfp8", "quantised", 1 + 1 / 32, marks=pytest.mark.full),
    ],
)
def test_codes_are_what_is_sent_and_made_once(recipe, gather_as, each):
    """Only x and dy are quantised in every microbatch; of two codes each is sent where it is read."""
    model = replace(TINY["deep"], dtype="bfloat16")
    config, layers = tiny("deep", recipe, "fsdp=2", gpt=model, microbatches=2), model.num_layers
    made = make_setup(configure(config, gather_as=gather_as), Mesh.parse("fsdp=2"))
    weights = [(d.matrix, math.prod(d.shape)) for d in tree.leaves(made.defs["blocks"])]
    matrices = sum(size for matrix, size in weights if matrix)
    norms = sum(size for matrix, size in weights if not matrix)
    rest = sum(math.prod(d.shape) for d in tree.leaves(made.defs)) - matrices - norms
    assert matrices > 100 * norms > 0
    program = made.program()
    rows = [row for row in program.cost().collectives if row.op == "all_gather"]
    sent = {row.phase: row.payload_bytes / 2 for row in rows}  # of a microbatch
    assert sent.pop("forward") == matrices * each + 2 * norms + 2 * rest
    assert sum(sent.values()) == matrices * each + 2 * norms  # recompute, and backward
    # x twice and dy twice; w in forward and backward of every microbatch, or all layers' at once
    of_w = 1 + (recipe == "mxfp8") if gather_as else 2 * 2 * layers
    counted = sum(times for e, times in program.block.walk() if e.name == "quantise")
    assert counted == 7 * (2 * 4 * layers + of_w)


def test_parameters_in_float32_are_gathered_and_computed_with_in_bfloat16():
    """As plain autograd has it, of a model in bfloat16 made of the rounded parameters."""
    model = replace(NARROW, dtype="float32")
    config = tiny("dense", "", "", gpt=model, gather_as="bfloat16", steps=1)
    made = make_setup(config, Mesh())
    params = made.init(random.key(0)).params
    low = tree.map(lambda x: x.bfloat16().requires_grad_(), params)
    loss = gpt.loss(replace(model, dtype="bfloat16"), low, data(32)) / (4 * 32)
    grads = torch.autograd.grad(loss, tree.leaves(low))
    state, metrics = made.step(made.init(random.key(0)), data(32))
    assert float(metrics["loss"]) == float(loss)
    for new, old, grad in zip(*map(tree.leaves, (state.params, params)), grads, strict=True):
        assert new.dtype == torch.float32
        torch.testing.assert_close(new, old - 0.1 * grad.float(), rtol=1e-6, atol=1e-8)
    split = make_setup(configure(config, mesh="fsdp=2"), Mesh.parse("fsdp=2"))
    rows = split.program().cost().collectives
    sent = {row.phase: row.payload_bytes for row in rows if row.op == "all_gather"}
    sizes = {name: sum(leaf.numel() for leaf in tree.leaves(params[name])) for name in params}
    assert sent == {"forward": 2 * sum(sizes.values()), "recompute": 2 * sizes["blocks"]}


def test_histories_are_what_each_step_saw():
    """Of weights to a quarter above their largest; two layers of one stack apart; norms without."""
    made = make_setup(configure(CONFIG, gpt=SMALL, products="fp8-delayed"), Mesh())
    state, seen = made.init(random.key(0)), []
    for _ in range(2):
        seen.append(state.params["blocks"]["mlp"]["down"]["w"].abs().amax((1, 2)))
        state, _ = made.step(state, batch())
    found = state.params["blocks"]["histories"]["mlp"]["down"]
    assert found.shape == (2, 3, 256)
    assert (found[..., :-2] == 0).all()
    assert (found[..., -2:] > 0).all()
    most = torch.stack(seen, -1)
    assert (found[:, 1, -2:] >= most).all()
    assert (found[:, 1, -2:] <= 1.25 * most).all()
    assert (found[0, 0, -1] != found[1, 0, -1]).all()


def test_layers_that_stay_high_have_torchs_products():
    """The last of two layers, against both computed one by one with options of their own."""
    low, made = (configure(CONFIG, gpt=DENSE, products=t) for t in ("fp8-row", "fp8-row last=1"))
    options = [make_setup(one, Mesh()).options for one in (made, low, configure(low, products=""))]
    tokens, weights = batch()["tokens"], make_setup(made, Mesh()).init(random.key(0)).params
    got = gpt.forward(DENSE, weights, tokens, options[0])
    x = None
    for layer in range(2):
        part = Part(range(layer, layer + 1), embed=layer == 0, loss=layer == 1)
        row = tree.map(lambda w, layer=layer: w[layer : layer + 1], weights["blocks"])
        own = {**weights, "blocks": row}
        x = gpt.stage(DENSE, part, own, x, {"tokens": tokens}, options[1 + layer])
    torch.testing.assert_close(got, x, rtol=0, atol=0)
    lengths = torch.full((BATCH,), SEQ)
    after, _ = generation.prefill(DENSE, weights, tokens, lengths, options[0], room=SEQ)
    torch.testing.assert_close(after, got[:, -1], rtol=1e-12, atol=0)


def test_a_float32_residual_adds_up_what_sublayers_say():
    """Written out, to the bit; and stages of a pipeline send it as it is."""
    model = MODELS["wide stream"]
    weights, tokens = (
        make_setup(configure(CONFIG, gpt=model), Mesh()).init(random.key(0)).params,
        batch()["tokens"],
    )
    positions = torch.arange(SEQ)
    rope = nn.rope_table(positions, model.head_size, model.rope_theta, None, torch.bfloat16)

    def norm(params: dict, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], params["scale"].float(), model.norm_eps)
        return y.bfloat16()

    x = weights["embed"][tokens].float()
    for row in range(model.num_layers):
        own = tree.map(lambda w, row=row: w[row], weights["blocks"])
        y = norm(own["attention_norm"], x)
        x = x + nn.self_attention(own["attention"], y, model, rope=rope, stream=P())
        y = norm(own["mlp_norm"], x)
        x = x + nn.mlp(own["mlp"], y, activation=model.activation, stream=P())
    logits = norm(weights["norm"], x) @ weights["unembed"]
    assert torch.equal(gpt.forward(model, weights, tokens), logits)
    assert not torch.equal(
        gpt.forward(replace(model, fp32_residual=False), weights, tokens), logits
    )
    as_elsewhere = lambda x, scale, eps: LEAN_RMS_NORM(x, scale, eps, False)[0]
    with mock.patch.object(layers._RMSNorm, "apply", as_elsewhere):  # which is for one tape
        (want, leaves), (got, found) = (
            taken("wide stream", "", mesh, remat="full", **own)
            for mesh, own in (("", {}), ("pp=2", {"schedule": "zb-h1"}))
        )
    assert got[::2] == want[::2]  # losses
    for a, b in zip(found, leaves, strict=True):
        assert torch.equal(a, b)


@pytest.mark.applications("zoo")
def test_a_recipe_for_what_is_no_gpt_is_refused():
    bert = with_precision(with_model(TrainConfig(), "bert-tiny"), "bf16")
    with pytest.raises(ValueError, match="only GPTs have a place for it"):
        validate(configure(bert, products="mxfp8"))


def test_deepseek_v3_trains_in_its_own_blocks():
    """Its latents and shared keys are 576 columns of one matrix, that every rank of tp has."""
    base = with_precision(with_model(TrainConfig(), "deepseek-v3"), "fp8-block")
    assert base.gpt.kv_rank + base.gpt.rope_head_dim == 576
    run = configure(base, mesh="tp=8,ep=8", global_batch=8, seq=4096, gather_as="quantised")
    validate(run)


def test_what_no_recipe_can_do_is_refused_before_anything_starts():
    small = with_model(TrainConfig(), "llama3-tiny")
    latent = configure(small, gpt=MODELS["latent"], seq=SEQ)
    for config, message in (
        (
            configure(CONFIG, gpt=replace(DENSE, mlp_dim=400), products="fp8-block", mesh="tp=2"),
            r"mlp/up, outputs \(fprop\): got 200; wanted a multiple of 128.*over fewer ranks",
        ),
        (
            configure(CONFIG, products="fp8-block", mesh="cp=2"),
            r"tokens \(wgrad\).*multiple of 256.*zigzag",
        ),
        (configure(latent, products="nvfp4"), "wanted a recipe that draws none"),
        (configure(small, products="fp8-tensor", lora_rank=4), "with lora_rank"),
        (
            configure(
                small,
                eval_every=1,
                products="fprop=hadamard(e2m1@1x16*e2m1@1x16) dgrad=high wgrad=high",
            ),
            "an fprop that draws no numbers",
        ),
        (configure(small, products="fp8-delayed logits=low"), "logits=high: they have no history"),
        (
            configure(small, products="fp8-row first=1 last=0.5"),
            "1 first and 1 last layers of 2 high",
        ),
        (
            configure(small, products="fp8-row logits=low", loss_chunk_tokens=8),
            "wanted all logits at once: chunks make them again",
        ),
        (
            configure(small, products="nvfp4 logits=low"),
            "wanted logits=high, or a recipe that draws",
        ),
        (
            configure(CONFIG, gpt=DENSE, products="fp8-block logits=low", mesh="tp=2"),
            r"unembed, outputs \(fprop\): got 16",
        ),
        (configure(small, products="fp9"), "products: got 'fp9'; wanted a recipe"),
        (configure(small, gather_as="quantised"), "wanted it with a recipe of products"),
        (
            configure(small, gather_as="quantised", products=HALF),
            "gather_as=quantised, dgrad: got high",
        ),
        (
            configure(CONFIG, gpt=MODELS["fused"], gather_as="quantised", products="fp8-row"),
            "gate_up/w: got several matrices in one",
        ),
        (
            configure(
                CONFIG, gpt=DENSE, gather_as="quantised", products="fp8-block", mesh="fsdp=2"
            ),
            r"q/w, inputs: got 64; wanted a multiple of 128.*make it 128 .*split fsdp=2 over fewer",
        ),
        (
            configure(
                small,
                gather_as="quantised",
                products="fp8-row last=1",
                gather="step",
                mesh="fsdp=2",
            ),
            "layers that stay high; wanted weights of these gathered where they are read",
        ),
        (
            configure(small, gather_as="quantised", products="fp8-delayed"),
            "gather_as=quantised, scaling: got delayed",
        ),
        (configure(CONFIG, gpt=DENSE, gather_as="bfloat16"), "wanted parameters in float32"),
        (
            configure(small, gather_as="bfloat16", gather="step", mesh="fsdp=2"),
            "wanted parameters gathered where used",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            validate(config)
