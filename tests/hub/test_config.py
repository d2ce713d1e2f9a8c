"""config.json and GPTConfig: published models, transformers' defaults, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from dataclasses import replace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import functron as ft
from functron import gpt, hub, nn
from functron.hub.decoders import LACKING
from functron.hub.format import config_problems
from functron.hub.mixtures import DECODERS
from functron.hub.reader import FORMATS, differences, parse
from functron.models.family import GPT
from tests.hub import tiny

# As published; the numbers of parameters are those that the files have.
PUBLISHED = {
    "Llama-3.1-8B": (
        8_030_261_248,
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
        },
    ),
    "SmolLM2-135M": (
        134_515_008,
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
            "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
            "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
            "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
            "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
            "vocab_size": 49152,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
            "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
            "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
            "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        {
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
        },
    ),
    "gemma-2b": (
        2_506_172_416,
        {
            "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
            "hidden_activation": None, "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
            "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
            "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0,
            "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0", "use_cache": True,
            "vocab_size": 256000,
        },
    ),
    "gpt2": (
        124_439_808,
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
            "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
            "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
    ),
}  # fmt: skip


# entries that say nothing about the model, or say by null what others say by a number
SILENT = {
    "architectures", "dtype", "task_specific_params", "transformers_version", "summary_type",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "n_ctx", "n_inner",
    "is_llama_config", "rope_interleaved", "use_mrope", "sliding_window", "max_window_layers",
    "hidden_activation", "mlp_bias", "attention_bias", "head_dim", "type",
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_models(name):
    count, table = PUBLISHED[name]
    config = parse(table)
    rows = (config.padded_vocab - config.vocab_size) * (1 if config.tied else 2)
    assert ft.num_params(gpt.defs(config)) == count + rows * config.embed_dim
    assert config.dtype == ("float32" if name == "gpt2" else "bfloat16")
    # what transformers makes of what is written is what it makes of what was published
    theirs = settings_of(copy.deepcopy(table))
    ours = settings_of(hub.write_config(config, DECODERS[table["model_type"]]))
    assert {k: v for k, v in ours.items() if k not in SILENT} == {
        k: v for k, v in theirs.items() if k not in SILENT
    }


def settings_of(table) -> dict:
    """Every entry that transformers makes of a config.json, with those of rope beside them."""
    made = tiny.transformers.AutoConfig.for_model(**table)
    found = json.loads(made.to_json_string(use_diff=False))
    found |= found.pop("rope_parameters", None) or {}
    return {name: value for name, value in found.items() if value is not None}


def test_llama_31():
    config = parse(PUBLISHED["Llama-3.1-8B"][1])
    assert config == replace(
        gpt.PRESETS["llama3-8b"],
        rope_scaling=nn.RopeScaling(),
        max_seq=131072,
        dtype="bfloat16",
    )


def test_gpt2():
    assert parse(PUBLISHED["gpt2"][1]) == gpt.PRESETS["gpt2"]


def test_mistrals_window():
    table = {**PUBLISHED["Mistral-7B-v0.3"][1], "sliding_window": 4096}
    config = parse(table)
    assert (config.window, config.global_every, config.max_seq) == (4096, 0, 32768)
    assert hub.write_config(config, DECODERS["mistral"])["sliding_window"] == 4096
    assert parse(PUBLISHED["Mistral-7B-v0.3"][1]).window == 0
    del table["sliding_window"]  # then transformers takes 4096
    assert parse(table).window == 4096
    with pytest.raises(ValueError, match="sliding_window: got '4096'"):
        parse({**table, "sliding_window": "4096"})


def test_qwens_windows():
    table = PUBLISHED["Qwen2.5-0.5B"][1]
    used = {**table, "use_sliding_window": True, "sliding_window": 4096}
    assert parse(table).window == 0
    # as transformers has it, layers from max_window_layers on have the window: here none
    assert parse(used).window == 0
    everywhere = parse({**used, "max_window_layers": 0})
    assert (everywhere.window, everywhere.global_every) == (4096, 0)
    full, sliding = "full_attention", "sliding_attention"
    assert parse({**used, "layer_types": [full] * 24}).window == 0
    third = parse({**used, "layer_types": [sliding, sliding, full] * 8})
    assert (third.window, third.global_every) == (4096, 3)
    written = hub.write_config(third, DECODERS["qwen2"])
    assert not differences(parse(written), third)
    assert written["layer_types"] == [sliding, sliding, full] * 8
    with pytest.raises(ValueError, match=r"sliding_window: got 4096 in layers 22, 23; .*=4096"):
        parse({**used, "max_window_layers": 22})
    assert parse({**used, "max_window_layers": 22}, max_seq=4096).window == 0
    with pytest.raises(ValueError, match="layer_types: got chunked_attention"):
        parse({**table, "layer_types": ["chunked_attention"] * 24})
    with pytest.raises(ValueError, match="layer_types: got 3 of them; wanted 24 of"):
        parse({**table, "layer_types": [full] * 3})


def test_windows_of_families_that_have_them_in_all_layers():
    config = gpt.GPTConfig(window=8, global_every=2)
    assert {p.path for p in config_problems(config, DECODERS["mistral"])} == {"global_every"}
    assert {p.path for p in config_problems(config, DECODERS["llama"])} == {
        "window", "global_every",
    }  # fmt: skip
    assert hub.format_for(replace(config, global_every=0)).model_type == "mistral"


_COUNTS = {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1}
NEEDED = {"glm4_moe": {"head_dim": 128}, "dots1": _COUNTS, "deepseek_v2": _COUNTS}
"""Entries without which there is no model, by transformers' own defaults."""


@pytest.mark.parametrize("name", list(DECODERS))
def test_defaults_are_those_of_transformers(name):
    """Entries that are not in config.json have transformers' defaults."""
    given = NEEDED.get(name, {})
    theirs = tiny.transformers.AutoConfig.for_model(name, **given)
    table = json.loads(theirs.to_json_string(use_diff=False))
    assert not differences(parse({"model_type": name, **given}), parse(table))


@pytest.mark.parametrize("name", list(DECODERS))
def test_every_field_of_ours_is_accounted_for(name):
    """A field that is added to GPTConfig must be mapped, or be refused where it is not default."""
    form, free = DECODERS[name], GPT.free
    covered = [field for entry in form.entries for field in entry.ours]
    assert len(covered) == len(set(covered))
    assert not set(covered) & set(free)
    config = parse({"model_type": name, **NEEDED.get(name, {})})
    assert not config_problems(config, form)
    for field in dataclasses.fields(gpt.GPTConfig):
        if field.name not in (*covered, *free):
            changed = copy.copy(config)
            object.__setattr__(changed, field.name, 7.5)
            assert field.name in {p.path for p in config_problems(changed, form)}, field.name


def test_an_exact_gelu_is_not_written_under_the_name_of_its_approximation():
    """Gemma's config.json has "gelu" for the tanh approximation: it read back as another model."""
    config = parse({"model_type": "gemma"})
    assert hub.write_config(config, DECODERS["gemma"])["hidden_act"] == "gelu_pytorch_tanh"
    exact = replace(config, activation="gelu")
    assert {p.path for p in config_problems(exact, DECODERS["gemma"])} == {"activation"}


def test_the_family_that_a_model_fits():
    kinds = {
        "gpt2": "gpt2", "gpt3": "gpt2", "gpt-1t": "gpt2", "gpt-oss": "gpt_oss", "mixtral": "mixtral",
        "qwen3-moe": "qwen3_moe", "qwen3-30b": "qwen3_moe", "qwen3-235b": "qwen3_moe",
        "deepseek-v3": "deepseek_v3", "mistral": "mistral", "qwen2.5": "qwen2", "qwen3": "qwen3",
        "gemma-": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo2": "olmo2",
        "nemotron": "nemotron", "phi3": "mistral", "olmo-": "olmo", "glm": "glm",
    }  # fmt: skip
    for name, config in gpt.PRESETS.items():
        wanted = [kind for start, kind in kinds.items() if name.startswith(start)]
        assert hub.format_for(config).model_type == (wanted or ["llama"])[0], name
    assert hub.format_for(gpt.GPTConfig(qkv_bias=True)).model_type == "qwen2"
    assert hub.format_for(gpt.GPTConfig(qk_norm=True)).model_type == "qwen3"
    # heads that do not divide the embedding: Llama's config refuses them, Mistral's does not
    assert hub.format_for(gpt.GPTConfig(num_heads=6, head_dim=16)).model_type == "mistral"


def test_a_model_that_no_family_fits():
    with pytest.raises(ValueError, match="no Hugging Face family has models like this") as caught:
        hub.format_for(gpt.GPTConfig(positions="none", embed_scale=3.0))
    for name in DECODERS:
        assert f"\n  - {name}: " in str(caught.value)
    assert "llama: positions: got 'none'; wanted 'rope' in this family" in str(caught.value)


# Refusals


LLAMA = {"model_type": "llama", **tiny.LLAMA}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": 16,
}


def refusal(table, **options) -> str:
    with pytest.raises(ValueError, match=r"cannot use config\.json") as caught:
        parse(table, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "silo"}, "hidden_act: got 'silo'; wanted an activation.*did you mean 'silu'"),
        ({"attention_bias": "yes"}, "attention_bias: got 'yes'; wanted true or false"),
        ({"hidden_size": "32"}, "hidden_size: got '32'; wanted a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers: got None; wanted a whole number"),
        ({"rms_norm_eps": True}, "rms_norm_eps: got True; wanted a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: got 1; wanted true or false"),
        ({"head_dim": 8.0}, "head_dim: got 8.0; wanted a whole number or null"),
        ({"rope_theta": -1}, "rope_theta: got -1; wanted a positive number"),
        ({"rope_interleaved": True}, "rope_interleaved: got True; wanted False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; wanted 1"),
        ({"rope_scaling": 3}, "rope_scaling: got 3; wanted an object or null"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 9.0}}, "rope_scaling.alpha: got 9.0"),
        ({"rope_scaling": LONG_ROPE}, "rope_scaling.long_factor: got two sets.*pass max_seq=16 .*, or 24"),
        ({"rope_scaling": {**LONG_ROPE, "original_max_position_embeddings": 99, "short_factor": 2}}, "short_factor: got 2"),
        ({"use_qk_norm": True}, "use_qk_norm: got True; wanted an entry that is known.*--ignore use_qk"),
        ({"logits_scaling": 8.0}, "logits_scaling: got 8.0; wanted an entry that is known"),
        ({"max_window_layers": 2, "use_sliding_window": True}, "max_window_layers: got 2"),
        ({"kv_channels": 16}, "kv_channels: got 16"),
        ({"auto_map": {"AutoModelForCausalLM": "code.OtherForCausalLM"}, "architectures": ["LlamaForCausalLM"]}, "auto_map: got"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, "rope_scaling.truncate: got 1"),
        ({"rope_scaling": {"type": "linaer", "factor": 4.0}}, "did you mean 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: got None; wanted a positive"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast: got 3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention: got"),
        ({"logit_scale": 0.5}, r"logit_scale: got 0\.5; wanted an entry that is known.*ignore=\['log"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got.*dequantize=True, then save_pre"),
        ({"auto_map": {"AutoModel": "code.py"}}, "auto_map: got"),
    ],
)  # fmt: skip
def test_settings_that_change_the_model_are_refused(changes, reason):
    assert re.search(reason, refusal({**LLAMA, **changes}))


def test_all_offenders_at_once():
    text = refusal({**LLAMA, "hidden_act": "x", "hidden_size": "y", "rope_theta": 0, "z": 1})
    assert text.count("\n  - ") == 4


def test_entries_that_change_nothing():
    extra = {
        "torch_dtype": "float16",
        "_name_or_path": "x",
        "attention_dropout": 0.5,
        "other": None,
    }
    assert parse({**LLAMA, **extra}) == parse(LLAMA)
    assert parse({**LLAMA, "mine": 3}, ignore=["mine"]) == parse(LLAMA)


@pytest.mark.parametrize(
    "entries",
    [
        {"unsloth_fixed": True, "unsloth_version": "2025.3.14", "neftune_noise_alpha": 5},
        {"max_window_layers": 28, "use_sliding_window": False, "sliding_window": None},
        {"hidden_dropout": 0.0, "kv_channels": 8, "attention_bias": False, "mlp_bias": False},
        {"logits_scaling": 1, "residual_multiplier": 1.0, "use_parallel_residual": False},
        {
            "architectures": ["LlamaForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_llama.LlamaConfig",
                "AutoModelForCausalLM": "org/repo--modeling_llama.LlamaForCausalLM",
                "AutoTokenizer": ["tokens.OtherTokenizer", None],
            },
        },
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},  # up to max_seq it does nothing
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_entries_of_published_files_that_mean_nothing(entries):
    assert parse({**LLAMA, **entries}) == parse(LLAMA)


def test_kimi_k2_is_deepseek_v3():
    table = {"model_type": "deepseek_v3", **tiny.DEEPSEEK}
    config = parse({**table, "model_type": "kimi_k2"})
    assert config == parse(table)
    form = DECODERS["deepseek_v3"]
    kept = {**table, "model_type": "kimi_k2"}
    assert hub.write_config(config, form, kept=kept)["model_type"] == "kimi_k2"
    assert hub.write_config(replace(config, rope_theta=5.0), form)["model_type"] == "deepseek_v3"


def test_longropes_factors_are_those_of_the_longest_sequence():
    table = {**LLAMA, "rope_scaling": LONG_ROPE}
    short, long = parse(table, max_seq=16), parse(table, max_seq=24)
    assert short.rope_scaling is not None
    assert long.rope_scaling is not None
    assert short.rope_scaling.factors == (1.0, 1.5, 2.0, 2.5)
    assert long.rope_scaling.factors == (1.0, 3.0, 6.0, 12.0)
    for config in (short, long):
        assert hub.write_config(config, DECODERS["llama"], kept=table)["rope_scaling"] == LONG_ROPE
        assert not differences(parse(hub.write_config(config, DECODERS["llama"])), config)


def test_gemmas_settings():
    gemma = {"model_type": "gemma", **tiny.LLAMA}
    assert "use_bidirectional_attention: got True" in refusal(
        {**gemma, "use_bidirectional_attention": True}
    )
    assert parse({**gemma, "hidden_act": "gelu"}).activation == "gelu_tanh"
    for name in ("gemma2", "gemma3_text"):
        exact = parse({**gemma, "model_type": name, "hidden_activation": "gelu"})
        assert exact.activation == "gelu"
        assert hub.write_config(exact, DECODERS[name])["hidden_activation"] == "gelu"
    zero = {**gemma, "model_type": "gemma2", "attn_logit_softcapping": 0.0}
    assert "attn_logit_softcapping: got 0.0; wanted a positive number or null" in refusal(zero)
    flat = {**gemma, "model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}
    assert (
        "rope_parameters: got {'rope_type': 'default'}; wanted those of full_attention"
        in refusal(flat)
    )
    assert parse({**LLAMA, "hidden_act": "gelu"}).activation == "gelu"
    assert "hidden_activation: got 'relu'" in refusal({**gemma, "hidden_activation": "relu"})


def test_gpt2s_settings():
    table = {"model_type": "gpt2", **tiny.GPT2}
    for name, value in {"scale_attn_weights": False, "add_cross_attention": True}.items():
        assert f"{name}: got {value}" in refusal({**table, name: value})
    assert "max_seq: got 8; wanted 24: as many as there are learned positions" in refusal(
        table, max_seq=8
    )
    assert parse(table, max_seq=24).max_seq == 24


def test_sequences_may_only_be_shorter():
    assert parse(LLAMA, max_seq=tiny.MAX_SEQ).max_seq == tiny.MAX_SEQ
    for wrong in (25, 0, -1):
        assert f"max_seq: got {wrong}; wanted at most 24" in refusal(LLAMA, max_seq=wrong)


@pytest.mark.parametrize("name", list(LACKING))
def test_families_that_need_what_is_missing(name):
    text = refusal({"model_type": name})
    assert f"this decoder has no {LACKING[name]} yet" in text


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("qwen_3", "qwen3"), ("Llama", "llama"), ("mistrla", "mistral"), ("gema2", "gemma2"),
        ("deepseekv3", "deepseek_v3"), ("gpt-oss", "gpt_oss"),
        pytest.param("nemotronh", "nemotron_h", marks=pytest.mark.applications("zoo")),
    ],
)  # fmt: skip
def test_a_slip_in_a_familys_name_is_put_right(slip, meant):
    assert f"did you mean '{meant}'?" in refusal({"model_type": slip})


def test_no_name_of_a_family_is_a_mistake():
    assert "model_type: got 'None'" in refusal({})


@pytest.mark.applications("zoo")
def test_no_family_of_another_architecture_is_proposed():
    """None of all that transformers knows, nor what has another number."""
    known = {name for name in CONFIG_MAPPING_NAMES if name not in FORMATS}
    for name in sorted({*known, "deepseek_v32", "gpt_neo", "qwen4", "llama2"}):
        text = refusal({"model_type": name})
        assert "did you mean" not in text, text
        assert f"'{name}' is not supported; supported: apertus, arcee, bert, cohere, " in text
    llava = {"model_type": "llava", "text_config": {"model_type": "pixtral"}}
    llava |= {"vision_config": {"model_type": "siglip_vision_model"}}
    text = refusal(llava)
    assert "did you mean" not in text
    assert "'siglip_vision_model' is not supported; supported: clip_vision_model" in text
    assert "'pixtral' is not supported; supported: arcee, cohere, " in text


def test_files(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: got No such file"):
        hub.read_config(tmp_path)
    for wrong in ("[1]", "{", "\udc80"):
        (tmp_path / "config.json").write_bytes(wrong.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"config\.json: got"):
            hub.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert hub.read_config(tmp_path, dtype="bfloat16", max_seq=8) == replace(
        parse(LLAMA), dtype="bfloat16", max_seq=8
    )


# Writing


def test_only_what_changed_is_written_anew():
    table = {**PUBLISHED["Llama-3.1-8B"][1], "_name_or_path": "x", "mine": [1, 2]}
    config = parse(table, ignore=["mine"])
    family = DECODERS["llama"]
    assert hub.write_config(config, family, kept=table) == table
    # sequences that are shorter by choice of the run leave the model what it is
    assert hub.write_config(replace(config, max_seq=512), family, kept=table) == table
    longer = replace(config, max_seq=262144, rope_theta=1e6)
    changed = hub.write_config(longer, family, kept=table)
    assert {key for key in table if changed[key] != table[key]} == {
        "max_position_embeddings", "rope_theta", "rope_scaling",
    }  # fmt: skip
    assert changed["rope_scaling"] == {**table["rope_scaling"], "type": "llama3"}
    assert not differences(parse(changed, ignore=["mine"]), longer)


def test_a_dtype_other_than_the_configs():
    table = PUBLISHED["Llama-3.1-8B"][1]
    assert hub.write_config(parse(table), DECODERS["llama"], kept=table, dtype="float16") == {
        **table, "torch_dtype": "float16",
    }  # fmt: skip


def test_models_that_a_family_does_not_have():
    config = gpt.GPTConfig(
        qk_norm=True, bias=True, embed_scale=2.0, embed_dim=100, num_heads=3, head_dim=32
    )
    problems = {p.path for p in config_problems(config, DECODERS["llama"])}
    assert problems == {"qk_norm", "embed_scale", "embed_dim"}
    with pytest.raises(ValueError, match="this model cannot be stored as llama") as caught:
        hub.write_config(config, DECODERS["llama"])
    assert str(caught.value).count("\n  - ") == 3
    gpt2 = {
        p.path for p in config_problems(gpt.GPTConfig(num_kv_heads=4, tied=True), DECODERS["gpt2"])
    }
    assert gpt2 == {"norm", "positions", "bias", "gated", "num_kv_heads"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model_type": "falcon", "alibi": True}, "alibi: got True; wanted False; fix: our model"),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
            "got True, False and 2; wanted parallel layers in the new architecture",
        ),
        (
            {"model_type": "cohere2", "layer_types": ["full_attention"] * 40},
            "sliding_window and layer_types: got 4096, and layers of other kinds",
        ),
        (
            {"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2]},
            r"moe_topk: got [1, 2]; wanted the same for all layers",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}},
            "rope_parameters.llama_4_scaling_beta: got None; wanted a number",
        ),
    ],
)
def test_what_newer_decoders_have_and_ours_lacks(table, message):
    assert message in refusal(table)
