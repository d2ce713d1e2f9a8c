"""Modules: Hugging Face models as they are, partitioned by a few specs, against themselves.

Every model runs on tp=2, also with its sequence split, on dp=2,tp=2 and on fsdp=2: its loss, logits
and all gradients are those of the dense module. transformers computes norms and losses in float32 whatever the model's dtype, so that
the order of sums shows at 1e-6.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functron as ft
from functron import P
from functron.nn import moe

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {
    r"(q|k|v|gate|up)_proj": P("tp"),
    r"(o|down)_proj": P(None, "tp"),
    r"embed_tokens|lm_head": P("tp"),
}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, LLAMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8}, LLAMA),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4},
        {
            r"(q|k|v)_proj": P("tp"),
            r"o_proj": P(None, "tp"),
            r"experts": P("tp"),
            r"embed_tokens|lm_head": P("tp"),
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "bos_token_id": 0, "eos_token_id": 0},
        {
            r"(c_attn|c_fc).weight": P(None, "tp"),
            r"(c_attn|c_fc).bias": P("tp"),
            r"c_proj.weight": P("tp"),
            r"wte": P("tp"),
        },
    ),
    "bert": (
        "BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 64},
        {
            r"query|key|value|intermediate.dense": P("tp"),
            r"output.dense.weight": P(None, "tp"),
            r"word_embeddings|predictions.bias": P("tp"),
        },
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8,
         "decoder_start_token_id": 0, "pad_token_id": 0},
        {
            r"\.(q|k|v|wi)\.": P("tp"),
            r"\.(o|wo)\.": P(None, "tp"),
            r"shared": P("tp"),
            r"relative_attention_bias": P(None, "tp"),
        },
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {**SIZES, "image_size": 12, "patch_size": 4},  # and one more token: 10
        {r"query|key|value|q_proj|k_proj|v_proj|fc1|intermediate": P("tp"),
         r"(o_proj|fc2|output.dense).weight": P(None, "tp")},
    ),
}  # fmt: skip
# one more line splits the residual stream over its sequence where it leaves these modules, and with
# two layers so many sums become reduce-scatters: of the embedding, and of each half of a layer
SEQUENCE = {
    "llama": (r"embed_tokens$|layers.\d+$", 5),
    "qwen3": (r"embed_tokens$|layers.\d+$", 5),
    "gemma3": (r"embed_tokens$|layers.\d+$", 5),
    "mixtral": (r"embed_tokens$|layers.\d+$", 3),  # experts are gathered to each rank's tokens
    "gpt2": (r"wte$|h.\d+$", 5),
    "bert": (r"LayerNorm$", 5),
    "t5": (r"shared$|layer.\d+$", 12),  # encoder and decoder, whose layers have three parts
    "vit": (r"embeddings$|layers.\d+$", 4),  # its embedding is not split
}
LAYOUTS = {
    "tp=2": ({"tp": 2}, False),
    "tp=2 and sequence": ({"tp": 2}, True),
    "dp=2,tp=2": ({"dp": 2, "tp": 2}, False),
    "fsdp=2": ({"fsdp": 2}, False),
}
ALWAYS = {("llama", "dp=2,tp=2"), ("gpt2", "fsdp=2"), ("t5", "tp=2")}
ROWS = [
    pytest.param(
        n, layout, marks=[] if LAYOUTS[layout][1] or (n, layout) in ALWAYS else [pytest.mark.full]
    )
    for n in MODELS
    for layout in LAYOUTS
]


def model(name: str, attention: str = "", **more: int) -> nn.Module:
    cls, config, sizes, _ = MODELS[name]
    made = getattr(transformers, config)(**{**sizes, **more})
    made._attn_implementation = attention or ("eager" if name in ("gpt2", "qwen3") else "sdpa")
    if name == "mixtral":
        made._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    return getattr(transformers, cls)(made).double()


def specs_of(name: str, params: dict, sizes: dict[str, int]) -> tuple[dict, P]:
    if "fsdp" in sizes:
        return {k: P("fsdp") if v.shape[0] % 2 == 0 else P() for k, v in params.items()}, P("fsdp")
    return ft.Rules(MODELS[name][3]).specs(params), P("dp")


@functools.cache
def dense(name: str, attention: str = ""):
    """A step, its arguments, and what it returns on one device."""
    fn, params = ft.from_module(model(name, attention))
    if name == "vit":
        pixels = torch.randn(4, 3, 12, 12, dtype=torch.float64)
        batch, named = pixels, "pixel_values"
    else:
        batch, named = torch.arange(64).reshape(4, 16) * 7 % 60 + 1, "input_ids"

    def step(params, batch):
        def loss(params):
            options = {"labels": batch} if name != "vit" else {}
            out = fn(params, **{named: batch}, **options)
            return (out.loss if options else out.logits.square().sum()), out.logits

        return ft.value_and_grad(loss, has_aux=True)(params)

    return step, params, batch, step(params, batch)


@pytest.mark.parametrize(("name", "layout"), ROWS)
def test_models_as_they_are(name, layout):
    step, params, batch, wanted = dense(name)
    sizes, sequence = LAYOUTS[layout]
    pattern, num_scattered = SEQUENCE[name]
    line = {pattern: P(None, "tp")} if sequence else {}
    assert len(MODELS[name][3]) + len(line) <= 5
    specs, data = specs_of(name, params, sizes)
    mapped = ft.partition(step, ft.Mesh(**sizes), (specs, data), constraints=line)
    torch.testing.assert_close(mapped(params, batch), wanted, rtol=1e-5, atol=2e-6)
    assert any(p != P() for p in ft.tree.leaves(mapped.out_specs[1], lambda x: isinstance(x, P)))
    if sequence:
        program = ft.trace(mapped)(params, batch)
        program.check()
        stream = 4 * (10 if name == "vit" else 16) * 32 * 8
        sent = [(e.name, e.operands[0].nbytes) for e in program.block.equations
                if e.where.phase == "forward" and e.name.startswith("psum")]  # fmt: skip
        assert sent.count(("psum_scatter", stream)) == num_scattered
        assert ("psum", stream) not in sent
        gathered = [e for e in program.block.equations if e.where.phase == "forward"
                    and e.name == "all_gather" and e.results[0].nbytes == stream]  # fmt: skip
        # before each half of a layer, and the head; ViT's reads one token, which one rank has
        assert len(gathered) == num_scattered + (name == "vit")


RING: dict[str, Any] = {
    "attention": {"cp": "ring"}
}  # one line more, beside P(None, "cp") for the tokens


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"cp": 2, "tp": 2}),
        pytest.param("llama", {"dp": 2, "cp": 2}, marks=pytest.mark.full),
        pytest.param("llama", {"cp": 4}, marks=pytest.mark.full),
        pytest.param("qwen3", {"cp": 2}, marks=pytest.mark.full),
        pytest.param("gemma3", {"cp": 2}, marks=pytest.mark.full),  # with masks of windows
        pytest.param("bert", {"cp": 2, "tp": 2}, marks=pytest.mark.full),
    ],
)
def test_sequences_that_stay_split(name, sizes):
    """Around a ring, of causal attention and of BERT's, every value but integers as tokens are."""
    step, params, batch, wanted = dense(name, "sdpa")
    specs, mesh = ft.Rules(MODELS[name][3]).specs(params), ft.Mesh(**sizes)
    assert len(MODELS[name][3]) + len(RING) + 1 <= 5
    mapped = ft.partition(step, mesh, (specs, P("dp", "cp")), **RING)
    torch.testing.assert_close(mapped(params, batch), wanted, rtol=1e-5, atol=2e-6)
    logits = mapped.out_specs[0][1]
    assert logits[1] == "cp"
    program = ft.trace(mapped)(params, batch)
    program.check()
    over = [row for row in program.cost().collectives if row.axis == "cp"]
    gathered = sum(row.payload_bytes for row in over if "all" in row.op)
    assert gathered <= batch.nbytes  # labels, which are shifted
    hops = {row.phase: row.count for row in over if row.op == "ppermute"}
    steps = 2 * 2 * (sizes["cp"] - 1)  # keys and values of two layers
    assert hops == {"forward": steps, "backward": 2 * steps}


def exchanged(self, hidden, index, weights):
    """Experts as transformers calls them, with tokens sent to the ranks that have theirs."""
    wide = self.gate_up_proj.unflatten(1, (2, -1)).permute(0, 3, 1, 2)
    params = {"gate_up": {"w": wide}, "down": {"w": self.down_proj.mT}}
    kept = torch.ones_like(index, dtype=torch.bool)
    options = {"activation": "silu", "num_experts": self.num_experts}
    return moe.mixture(params, hidden, index, weights, kept, **options)


def test_experts_stay_where_they_are():
    """By one function, which transformers lets one register: not parameters move, but tokens."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("functron", exchanged)
    step, params, batch, wanted = dense("mixtral")
    module: Any = model("mixtral")
    module.config._experts_implementation = "functron"
    fn, _ = ft.from_module(module)
    line = {SEQUENCE["mixtral"][0]: P(None, "tp")}

    def own(params, batch):
        def loss(params):
            out = fn(params, input_ids=batch, labels=batch)
            return out.loss, out.logits

        return ft.value_and_grad(loss, has_aux=True)(params)

    specs, data = specs_of("mixtral", params, {"tp": 2})
    found = []
    for each in (step, own):
        mapped = ft.partition(each, ft.Mesh(tp=2), (specs, data), constraints=line)
        torch.testing.assert_close(mapped(params, batch), wanted, rtol=1e-5, atol=2e-6)
        program = ft.trace(mapped)(params, batch)
        program.check()
        rows = [e for e in program.block.equations if e.operands]
        found.append({(e.name, e.results[0].nbytes) for e in rows if e.results})
    whole = {("all_gather", 4 * width * 32 * 8) for width in (96, 48)}
    assert whole <= found[0]
    assert not whole & found[1]
    assert any(name == "ragged_all_to_all" for name, _ in found[1])


@pytest.mark.parametrize("kind", [None, "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_experts_are_refused_with_those_that_work(kind, dtype):
    """The test of all models has batched_mm, and the one above tokens that are sent."""
    module: Any = model("mixtral").to(dtype)
    module.config._experts_implementation = (
        kind
        or transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**MODELS["mixtral"][2])
        ).config._experts_implementation
    )
    fn, params = ft.from_module(module)

    def loss(params, tokens):
        return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    mapped = ft.partition(ft.grad(loss), ft.Mesh(), (P(), P()))
    with pytest.raises(ValueError, match=r'fix: .*_experts_implementation = "batched_mm"'):
        mapped(params, torch.ones(1, 4, dtype=torch.int64))


PADDED = {
    "bert": ("BertForMaskedLM", "BertConfig", 0),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", 1),
}


@pytest.mark.parametrize("name", PADDED)
def test_rows_of_padding_have_the_gradients_that_transformers_gives_them(name):
    """Those of the tied output alone: the embedding's own stops there, also where it is split."""
    cls, config, pad = PADDED[name]
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 64, "pad_token_id": pad}
    module = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).double().eval()
    tokens = torch.arange(32).reshape(4, 8) * 7 % 64
    tokens[:, 5:] = pad
    named = {"attention_mask": (tokens != pad).long(), "labels": tokens}
    fn, params = ft.from_module(module)
    own = dict(module.named_parameters())
    total = module(input_ids=tokens, **named).loss
    found = torch.autograd.grad(total, [*own.values()], allow_unused=True)
    wanted = {k: torch.zeros_like(own[k]) if g is None else g
              for k, g in zip(own, found, strict=True)}  # fmt: skip
    specs = ft.Rules(MODELS["bert"][3]).specs(params)
    loss = ft.grad(lambda p: fn(p, input_ids=tokens, **named).loss)
    got = ft.partition(loss, ft.Mesh(tp=2), (specs,), specs)(params)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)
    row = next(key for key in wanted if key.endswith("word_embeddings.weight"))
    assert wanted[row][pad].abs().max() > 0.1


def test_falcon_writes_to_its_products_in_place():
    config = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    for more in ({"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}):
        module = transformers.FalconForCausalLM(transformers.FalconConfig(**config, **more))
        module = module.double()
        fn, params = ft.from_module(module)
        tokens = torch.arange(32).reshape(4, 8) * 7 % 64
        own = dict(module.named_parameters())
        total = module(input_ids=tokens, labels=tokens, use_cache=False).loss
        found = torch.autograd.grad(total, [*own.values()])

        def loss(params, tokens, fn=fn):
            return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

        rules = {"dense_h_to_4h": P("tp"), "dense_4h_to_h": P(None, "tp"), "embeddings": P("tp")}
        specs = ft.Rules(rules).specs(params)
        mapped = ft.partition(ft.grad(loss), ft.Mesh(dp=2, tp=2), (specs, P("dp")), specs)
        got = mapped(params, tokens)
        torch.testing.assert_close([*got.values()], [*found], rtol=1e-5, atol=2e-6)


@pytest.mark.full  # notebook 12 runs one of them on processes; here Inductor compiles each
@pytest.mark.distributed
def test_models_on_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_models.py"), 2, timeout=300)
    assert done.stdout.count("equal") == 2 * 4


def test_one_line_gathers_again():
    """Fully sharded parameters, one layer's whole at a time, and no product computed twice."""
    fn, params = ft.from_module(model("llama"))
    specs = {name: P("fsdp") for name in params}
    tokens = torch.arange(64).reshape(4, 16) * 7 % 60

    def step(params, tokens):
        def loss(params):
            return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

        return ft.value_and_grad(loss)(params)

    def partitioned(**options):
        mesh, layout = ft.Mesh(fsdp=2), ((specs, P("fsdp")), (P(), specs))
        mapped = ft.partition(step, mesh, *layout, **options)
        return mapped, ft.trace(mapped)(params, tokens)

    _, kept = partitioned()
    mapped, again = partitioned(remat={r"layers\.\d+$": ft.policies.dots})
    again.check()
    torch.testing.assert_close(mapped(params, tokens), step(params, tokens), rtol=1e-5, atol=2e-6)
    rows = {(row.op, row.phase): row.sent_bytes for row in again.cost().collectives}
    halves = {name: value.nbytes // 2 for name, value in params.items()}
    layers = sum(size for name, size in halves.items() if "layers." in name)
    assert rows["all_gather", "forward"] == rows["psum_scatter", "backward"] == sum(halves.values())
    assert rows["all_gather", "recompute"] == layers
    assert again.cost().hardware_flops == kept.cost().hardware_flops
    assert again.memory().peak_bytes < kept.memory().peak_bytes - layers
    with pytest.raises(ValueError, match=r"remat of the scope 'block'.*model/layers.0"):
        partitioned(remat={"block": ft.policies.dots})


class Block(nn.Module):
    """Everything that a function must take out of a module: ties, buffers, dropout, a mode."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(16, 16, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(self.drop(self.norm(self.up(x))))


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().double()


X = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(8, 16).sin()


def test_a_function_of_what_the_module_holds(block):
    fn, params = ft.from_module(block)
    assert list(params) == ["up.weight", "norm.weight", "norm.bias"]
    torch.testing.assert_close(fn(params, X), block.eval()(X))
    halved = {name: value / 2 for name, value in params.items()}
    wanted = block.norm(X @ params["up.weight"].T / 2)  # with half the scale and half the bias
    torch.testing.assert_close(fn(halved, X), wanted / 2 @ params["up.weight"].T / 2)
    with pytest.raises(ValueError, match=r"without up\.weight and with w"):
        fn({"w": X, "norm.weight": X, "norm.bias": X}, X)


def test_training_mode_draws_from_a_key_and_returns_buffers(block):
    fn, params = ft.from_module(block, train=True, buffers=True)
    before, key = dict(block.named_buffers()), ft.random.key(1)
    out, after = fn(params, before, X, key=key)
    hidden = X @ params["up.weight"].T
    mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
    normal = (hidden - mean) / (variance + 1e-5).sqrt()
    keep = ft.random.bernoulli(ft.random.fold_in(key, 1), 0.5, (8, 16))
    torch.testing.assert_close(out, torch.where(keep, normal * 2, 0.0) @ params["up.weight"].T)
    torch.testing.assert_close(after["norm.running_mean"], 0.1 * mean)
    assert int(after["norm.num_batches_tracked"]) == 1
    assert int(before["norm.num_batches_tracked"]) == 0
    assert block.training
    with pytest.raises(ValueError, match="drops out without a key"):
        fn(params, before, X)
    with pytest.raises(ValueError, match="changed the buffers"):
        ft.from_module(block, train=True)[0](params, X, key=key)
    assert int(block.norm.num_batches_tracked) == 0


def test_dropout_of_a_module_is_the_same_on_every_mesh():
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16)).double()
    fn, params = ft.from_module(module, train=True)
    key = ft.random.key(2)
    specs = ft.Rules({r"0\.": P("tp"), r"2\.weight": P(None, "tp")}).specs(params)
    mapped = ft.partition(
        lambda p, x, key: fn(p, x, key=key), ft.Mesh(dp=2, tp=2), (specs, P("dp"), P())
    )
    torch.testing.assert_close(mapped(params, X, key), fn(params, X, key=key))


def test_numbers_of_dropout_are_those_of_samples():
    """Of a microbatch those of its rows in the batch, of heads and tokens of each sample too."""
    fn, _ = ft.from_module(nn.Dropout(0.3), train=True)
    key, ones = ft.random.key(4), torch.ones(6 * 4, 500, dtype=torch.float64)
    whole = fn({}, ones, key=key, rows=torch.arange(6))
    kept = whole != 0
    assert kept.double().mean() == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(whole[kept], torch.full_like(whole[kept], 1 / 0.7))
    assert not torch.equal(kept[:4], kept[4:8])
    torch.testing.assert_close(fn({}, ones, key=key), whole)
    part = fn({}, ones[:8], key=key, rows=torch.tensor([4, 1]))
    assert torch.equal(part, torch.cat([whole[16:20], whole[4:8]]))
    with pytest.raises(ValueError, match=r"first dim is not of 7 samples; .*train=False"):
        fn({}, ones, key=key, rows=torch.arange(7))


def test_rules_by_path():
    values = {"q_proj": {"weight": X, "bias": X[0]}, "norm": X[0]}
    specs = ft.Rules({r"q_proj": P("tp", "fsdp"), r"weight|bias": P("dp")}).specs(values)
    assert specs == {"q_proj": {"weight": P("tp", "fsdp"), "bias": P("tp")}, "norm": P()}
    with pytest.raises(ValueError, match=r"rule 'k_proj': got no path that it is found in"):
        ft.Rules({"k_proj": P("tp")}).specs(values)
    with pytest.raises(TypeError, match=r"rule 'q_proj': got 'tp'; wanted a P"):
        ft.Rules({"q_proj": "tp"}).specs(values)
