"""The decoder against Hugging Face transformers' Llama and GPT-2, weights copied, in float64.

Transformers keeps RMSNorm, the RoPE tables and its loss in float32 even in a float64 model, so
Llama agrees to 1e-5; GPT-2 with a float64 loss agrees to 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import transformers
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, P, gpt, nn, tree

VOCAB, LAYERS, EMBED, HEADS, MLP, MAX_SEQ = 61, 3, 32, 4, 48, 24
HEAD_DIM = EMBED // HEADS
BATCH, SEQ = 4, 12

LLAMA = gpt.GPTConfig(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    embed_dim=EMBED,
    num_heads=HEADS,
    num_kv_heads=2,
    mlp_dim=MLP,
    max_seq=MAX_SEQ,
    vocab_multiple=8,
    dtype="float64",
)
# wavelengths of the four pairs of dims are 6, 63, 628 and 6283: kept, blended, and stretched
SCALING = nn.RopeScaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=128)
GPT2 = replace(
    LLAMA, num_kv_heads=0, norm="layer", activation="gelu_tanh", gated=False, bias=True,
    positions="learned", tied=True,
)  # fmt: skip


def hf_llama(config: gpt.GPTConfig) -> torch.nn.Module:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq,
        }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=MAX_SEQ,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tied,
            attn_implementation="eager",
        )
    )


def hf_gpt2(config: gpt.GPTConfig) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=EMBED,
            n_inner=MLP,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=MAX_SEQ,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )


@dataclass(frozen=True)
class Layout:
    """Our tree from tensors by their Hugging Face names: of weights, or of gradients."""

    config: gpt.GPTConfig
    tensors: dict[str, torch.Tensor]
    padding: float

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Vocabulary rows with those of padding after them."""
        missing = self.config.padded_vocab - VOCAB
        assert missing == 3
        return torch.cat([rows, torch.full((missing, EMBED), self.padding, dtype=rows.dtype)])

    def stack(self, name: str, change=lambda x: x) -> torch.Tensor:
        return torch.stack([change(self.tensors[name.format(i)]) for i in range(LAYERS)])

    def llama(self) -> dict:
        block = "model.layers.{}."

        def heads(name):  # [heads * head_dim, embed]
            return {"w": self.stack(block + name, lambda x: x.T.reshape(EMBED, -1, HEAD_DIM))}

        def linear(name):
            return {"w": self.stack(f"{block}mlp.{name}.weight", lambda x: x.T)}

        out = self.stack(
            block + "self_attn.o_proj.weight", lambda x: x.T.reshape(HEADS, HEAD_DIM, EMBED)
        )
        weights = {
            "embed": self.pad(self.tensors["model.embed_tokens.weight"]),
            "blocks": {
                "attention_norm": {"scale": self.stack(block + "input_layernorm.weight")},
                "attention": {
                    "q": heads("self_attn.q_proj.weight"),
                    "k": heads("self_attn.k_proj.weight"),
                    "v": heads("self_attn.v_proj.weight"),
                    "out": {"w": out},
                },
                "mlp_norm": {"scale": self.stack(block + "post_attention_layernorm.weight")},
                "mlp": {
                    "gate": linear("gate_proj"),
                    "up": linear("up_proj"),
                    "down": linear("down_proj"),
                },
            },
            "norm": {"scale": self.tensors["model.norm.weight"]},
        }
        if not self.config.tied:
            weights["unembed"] = self.pad(self.tensors["lm_head.weight"]).T
        return weights

    def gpt2(self) -> dict:
        block = "transformer.h.{}."

        def norm(name):
            return {
                "scale": self.stack(f"{block}{name}.weight"),
                "bias": self.stack(f"{block}{name}.bias"),
            }

        def part(index):  # Conv1D is [in, out], and q, k and v are its thirds
            name = block + "attn.c_attn."
            return {
                "w": self.stack(
                    name + "weight",
                    lambda x: x.chunk(3, 1)[index].reshape(EMBED, HEADS, HEAD_DIM),
                ),
                "b": self.stack(
                    name + "bias", lambda x: x.chunk(3)[index].reshape(HEADS, HEAD_DIM)
                ),
            }

        def linear(name, change=lambda x: x):
            return {
                "w": self.stack(f"{block}{name}.weight", change),
                "b": self.stack(f"{block}{name}.bias"),
            }

        return {
            "embed": self.pad(self.tensors["transformer.wte.weight"]),
            "positions": self.tensors["transformer.wpe.weight"],
            "blocks": {
                "attention_norm": norm("ln_1"),
                "attention": {
                    **{name: part(index) for index, name in enumerate("qkv")},
                    "out": linear("attn.c_proj", lambda x: x.reshape(HEADS, HEAD_DIM, EMBED)),
                },
                "mlp_norm": norm("ln_2"),
                "mlp": {"up": linear("mlp.c_fc"), "down": linear("mlp.c_proj")},
            },
            "norm": {
                "scale": self.tensors["transformer.ln_f.weight"],
                "bias": self.tensors["transformer.ln_f.bias"],
            },
        }

    def tree(self) -> dict:
        return self.gpt2() if self.config.norm == "layer" else self.llama()


@dataclass(frozen=True)
class Case:
    """A transformers model, ours with its weights, and what it computes on some tokens."""

    config: gpt.GPTConfig
    model: torch.nn.Module
    weights: dict
    tokens: torch.Tensor

    @property
    def batch(self) -> dict:
        """The tokens with targets one ahead; some are ignored, and so is the last of each row."""
        return {
            "tokens": self.tokens,
            "targets": F.pad(self.labels[:, 1:], (0, 1), value=nn.IGNORE_INDEX),
            "rows": torch.arange(BATCH),
        }

    @property
    def labels(self) -> torch.Tensor:
        """The labels for transformers, which shifts them itself."""
        labels = self.tokens.clone()
        labels[1, :7], labels[2, 4:] = -100, -100
        return labels

    def gradients(self, loss: torch.Tensor) -> dict:
        """The gradients of a loss of the transformers model, in our layout."""
        names, leaves = zip(*self.model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, leaves)
        return Layout(self.config, dict(zip(names, grads, strict=True)), 0.0).tree()


CASES = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "llama-mha": replace(LLAMA, num_kv_heads=0),
    "llama3.1-rope": replace(LLAMA, rope_scaling=SCALING),
    "gpt2": GPT2,
}


@pytest.fixture(params=list(CASES))
def case(request) -> Case:
    return make_case(CASES[request.param])


def make_case(config: gpt.GPTConfig) -> Case:
    torch.manual_seed(0)
    model = (hf_gpt2 if config.norm == "layer" else hf_llama)(config).double()
    with torch.no_grad():  # biases, scales and matrices all of a size that shows
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = Layout(config, named, 3.0).tree()  # padding rows must not matter, so they are large
    return Case(config, model, weights, torch.randint(0, VOCAB, (BATCH, SEQ)))


def assert_leaves_close(actual, expected, tolerance):
    """Every leaf, within `tolerance` of its largest entry.

    Gradients of key biases without rope are zero but for rounding (softmax does not see a shift of
    its scores), so entries below a thousandth of the whole tree's largest count as that.
    """
    assert tree.paths(actual) == tree.paths(expected)
    floor = 1e-3 * max(leaf.abs().max().item() for leaf in tree.leaves(expected))
    rows = zip(tree.paths(actual), tree.leaves(actual), tree.leaves(expected), strict=True)
    for path, ours, theirs in rows:
        error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=floor)).item()
        assert ours.shape == theirs.shape, path
        assert error < tolerance, (path, error)


def mean_loss(config, weights, batch, stream=gpt.STREAM):
    return gpt.loss(config, weights, batch, ft.ModelOptions(stream=stream)) / gpt.num_targets(batch)


def test_every_weight_is_mapped(case):
    defs = gpt.defs(case.config)
    assert tree.paths(case.weights) == tree.paths(defs)
    assert [w.shape for w in tree.leaves(case.weights)] == [d.shape for d in tree.leaves(defs)]
    padding = (case.config.padded_vocab - VOCAB) * EMBED * (1 if case.config.tied else 2)
    theirs = sum(p.numel() for p in case.model.parameters())
    assert ft.num_params(defs) == theirs + padding


def test_logits(case):
    ours = gpt.forward(case.config, case.weights, case.tokens)[..., :VOCAB]
    theirs = case.model(case.tokens).logits.detach()
    tolerance = 1e-10 if case.config is GPT2 else 1e-5
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max())


def test_loss_and_gradients(case):
    expected = case.model(case.tokens, labels=case.labels).loss
    value, grads = ft.value_and_grad(partial(mean_loss, case.config))(case.weights, case.batch)
    torch.testing.assert_close(value, expected.detach().double(), rtol=1e-6, atol=0)
    assert_leaves_close(grads, case.gradients(expected), 1e-5)


def test_loss_and_gradients_of_gpt2_in_float64():
    case = make_case(GPT2)
    logits = case.model(case.tokens).logits
    expected = F.cross_entropy(logits.mT, case.batch["targets"], ignore_index=-100)
    value, grads = ft.value_and_grad(partial(mean_loss, GPT2))(case.weights, case.batch)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    assert_leaves_close(grads, case.gradients(expected), 1e-10)


@pytest.mark.parametrize(
    "stream", [gpt.STREAM, gpt.SEQUENCE_PARALLEL_STREAM], ids=["whole", "sequence"]
)
def test_loss_and_gradients_on_a_mesh(case, stream):
    mesh = ft.Mesh(dp=2, tp=2)
    specs = ft.param_specs(gpt.defs(case.config), gpt.rules(case.config, mesh))

    def step(weights, batch):
        loss = partial(mean_loss, case.config, stream=stream)
        value, grads = ft.value_and_grad(loss)(weights, batch)
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(step, mesh, (specs, P(DATA_AXES)), (P(), specs))
    value, grads = mapped(case.weights, case.batch)
    expected = case.model(case.tokens, labels=case.labels).loss
    torch.testing.assert_close(value, expected.detach().double(), rtol=1e-6, atol=0)
    assert_leaves_close(grads, case.gradients(expected), 1e-5)


def test_greedy_generation(case):
    prompt = case.tokens[:, :5]
    theirs = case.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours = ft.generate(case.weights, case.config, prompt, 10, temperature=0)
    assert torch.equal(ours, theirs)
    assert len(set(ours[:, 5:].flatten().tolist())) > 5  # not one token over and over
