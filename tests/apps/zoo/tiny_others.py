"""Tiny models beside decoders, made by transformers, and what they and ours give for one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functron import bert, hub, llava, mamba, t5, vit
from tests.hub import tiny
from tests.models.float64_models import Float64

transformers = tiny.transformers
VOCAB, EMBED, HEADS, MLP, BATCH, SEQ = 61, 32, 4, 48, 2, 12
SIZES = {
    "hidden_size": EMBED,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
}


@dataclass(frozen=True)
class Case:
    """A model of transformers, and how to ask both for logits.

    Attributes:
        model: transformers' class.
        settings: makes its config.
        inputs: its inputs.
        ours: ``(config, parameters, inputs) ->`` logits, with their padding.
    """

    model: str
    settings: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    ours: Callable[[Any, dict, dict[str, torch.Tensor]], torch.Tensor]


def _tokens(*shape: int, first: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(first, VOCAB, shape or (BATCH, SEQ), generator=generator)


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 3, 8, 8, generator=torch.Generator().manual_seed(2)).double()


def _mamba2(**changes: Any):
    settings = {
        "vocab_size": VOCAB, "hidden_size": EMBED, "n_groups": 2, "num_heads": 8, "head_dim": 8,
        "state_size": 6, "num_hidden_layers": 2, "chunk_size": 5, "tie_word_embeddings": True,
    }  # fmt: skip
    return transformers.Mamba2Config(**settings | changes)


def _nemotron_h(**changes: Any):
    settings = {
        "vocab_size": VOCAB, "hidden_size": EMBED, "n_groups": 2, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 6, "num_attention_heads": HEADS,
        "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": MLP, "chunk_size": 5,
        "hybrid_override_pattern": "M-M*-M", "time_step_min": 0.5,
    }  # fmt: skip
    return transformers.NemotronHConfig(**settings | changes)


def _t5(**changes: Any):
    settings = {
        "vocab_size": VOCAB, "d_model": EMBED, "d_kv": 6, "d_ff": MLP, "num_layers": 2,
        "num_decoder_layers": 3, "num_heads": HEADS, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10, "decoder_start_token_id": 3,
    }  # fmt: skip
    return transformers.T5Config(**settings | changes)


def _llava(text: str, **changes: Any):
    vision = transformers.CLIPVisionConfig(
        **SIZES | {"num_hidden_layers": 3}, image_size=8, patch_size=2
    )
    sizes = SIZES | tiny.TOKENS | {"vocab_size": VOCAB, "num_key_value_heads": 2}
    decoder = getattr(transformers, f"{text}Config")(
        **{**sizes, **changes, "max_position_embeddings": 64}
    )
    return transformers.LlavaConfig(
        vision_config=vision, text_config=decoder, image_token_index=7, image_seq_length=16
    )


def _seen() -> dict[str, torch.Tensor]:
    mask = torch.arange(SEQ) < torch.tensor([[12], [7]])
    return {"input_ids": _tokens(), "attention_mask": mask.long()}


def _of_t5() -> dict[str, torch.Tensor]:
    return _seen() | {"labels": _tokens(BATCH, 9)}


def _of_llava() -> dict[str, torch.Tensor]:
    tokens = _tokens(BATCH, 24, first=8)
    tokens[:, 3:19] = 7
    return {"input_ids": tokens, "pixel_values": _images(BATCH)}


def _ask_bert(config, params, given) -> torch.Tensor:
    mask = given["attention_mask"].bool()
    types = given["token_type_ids"]
    return bert.forward(config, params, given["input_ids"], types=types, mask=mask)


def _ask_t5(config, params, given) -> torch.Tensor:
    start, mask = t5.shift_right(given["labels"], config.start_id), given["attention_mask"].bool()
    return t5.forward(config, params, given["input_ids"], start, mask=mask)


def _ask_mamba(config, params, given) -> torch.Tensor:
    return mamba.forward(config, params, given["input_ids"])


def _ask_llava(config, params, given) -> torch.Tensor:
    images = given["pixel_values"].unsqueeze(1)
    return llava.forward(config, params, given["input_ids"], images)


def _of_bert() -> dict[str, torch.Tensor]:
    types = (torch.arange(SEQ) > 4).long().expand(BATCH, SEQ)
    return _seen() | {"token_type_ids": types}


def _words() -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens()}


def _of(family: str, make: Callable[..., Any], **changes: Any) -> Case:
    inputs, ask = {
        "Mamba2ForCausalLM": (_words, _ask_mamba),
        "NemotronHForCausalLM": (_words, _ask_mamba),
        "BertForMaskedLM": (_of_bert, _ask_bert),
        "T5ForConditionalGeneration": (_of_t5, _ask_t5),
        "ViTForImageClassification": (
            lambda: {"pixel_values": _images(BATCH)},
            lambda c, w, given: vit.forward(c, w, given["pixel_values"]),
        ),
        "LlavaForConditionalGeneration": (_of_llava, _ask_llava),
    }[family]
    return Case(family, lambda: make(**changes), inputs, ask)


_MAMBA2, _T5 = "Mamba2ForCausalLM", "T5ForConditionalGeneration"
_LLAVA = "LlavaForConditionalGeneration"
CASES: dict[str, Case] = {
    "mamba2": _of(_MAMBA2, _mamba2),
    "mamba2-other": _of(
        _MAMBA2, _mamba2, tie_word_embeddings=False, use_bias=True, use_conv_bias=False,
        n_groups=1, time_step_limit=(0.3, float("inf")),
    ),
    "nemotron-h": _of("NemotronHForCausalLM", _nemotron_h),
    "bert": _of(
        "BertForMaskedLM",
        lambda: transformers.BertConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=24),
    ),
    "t5-1.0": _of(_T5, _t5),
    "t5-1.1": _of(_T5, _t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "vit": _of(
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(**SIZES, image_size=8, patch_size=2, num_labels=5),
    ),
    "llava": _of(_LLAVA, lambda: _llava("Llama")),
    "llava-phi3": _of(_LLAVA, lambda: _llava("Phi3")),
    "llava-qwen2": _of(_LLAVA, lambda: _llava("Qwen2", tie_word_embeddings=True)),
}  # fmt: skip


def make(name: str) -> torch.nn.Module:
    """A random model in float64, in which no parameter is special: no norm is 1, no bias 0."""
    case = CASES[name]
    return _make(case.model, case.settings(), untied=name == "t5-1.1")


def make_tied_t5() -> torch.nn.Module:
    """A T5 whose output is not divided, with one matrix, as transformers 5 makes and stores it."""
    return _make(_T5, _t5(tie_word_embeddings=False))


def make_llava(text: str, settings: dict[str, Any]) -> torch.nn.Module:
    """The same of a LLaVA with a decoder of this family."""
    text = "Gemma3Text" if text == "Gemma3" else text
    return _make(_LLAVA, _llava(text, **settings | tiny.TOKENS))


def _make(model_class: str, config: Any, *, untied: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    with Float64():
        model = getattr(transformers, model_class)(config).double().eval()
        if untied:  # transformers ties a T5's in any case, but not in files
            model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, EMBED).double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def theirs(name: str, model: torch.nn.Module) -> torch.Tensor:
    """Transformers' logits."""
    with Float64(), torch.no_grad():
        return model(**CASES[name].inputs()).logits


def ours(name: str, config: Any, params: dict) -> torch.Tensor:
    """Our logits."""
    with Float64(), torch.no_grad():
        logits = CASES[name].ours(config, params, CASES[name].inputs())
    return logits[..., : hub.family_of(config).vocab_size(config)]


def read_back(name: str, path) -> torch.nn.Module:
    """The model in a folder, by transformers, with nothing missing, too much or of another shape."""
    with Float64():
        model, info = getattr(transformers, CASES[name].model).from_pretrained(
            path, dtype="auto", attn_implementation="eager", output_loading_info=True
        )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(info[kind] for kind in kinds), info
    return model.eval()
