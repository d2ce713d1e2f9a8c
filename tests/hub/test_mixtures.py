"""Models with layers of experts as transformers stores them: there, back, and what is refused.

That they compute what transformers computes is tests/models/test_hugging_face_moe.py.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import gpt, hub, optim, tree
from functron.hub.files import open_folder
from functron.hub.format import layouts_of, tensors
from functron.hub.mixtures import DECODERS
from functron.hub.reader import config_problems, differences, parse
from functron.nn.moe import MoEConfig
from tests.hub import tiny
from tests.hub.test_refusals import named, rewrite

layers = pytest.importorskip("transformers.modeling_layers")


@pytest.fixture(params=list(tiny.MIXTURES))
def stored(request, tmp_path):
    """A model of transformers and the folder that it is stored in, in several files."""
    model = tiny.make(request.param)
    path = tiny.store(model, tmp_path / "model", files=3)
    assert (path / "model.safetensors.index.json").is_file()
    return model, path


def config_of(path, **changes) -> gpt.GPTConfig:
    return replace(hub.read_config(path), vocab_multiple=tiny.VOCAB_MULTIPLE, **changes)


def assert_same_weights(model, other) -> None:
    theirs, found = model.state_dict(), other.state_dict()
    assert theirs.keys() == found.keys()
    for name, value in theirs.items():
        assert torch.equal(found[name], value), name


def test_what_is_exported_is_what_was_imported(stored, tmp_path):
    model, path = stored
    config = config_of(path)
    out = tmp_path / "out"
    hub.save(out, config, hub.load(path, config), like=path, max_shard_bytes=30_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert open_folder(out).shapes() == open_folder(path).shapes()
    back = tiny.read_back(out)
    assert_same_weights(model, back)
    joined = replace(config, fused_projections=True)
    named = hub.to_tensors(joined, hub.load(path, joined), model.config.model_type)
    files = hub.to_tensors(config, hub.load(path, config), model.config.model_type)
    assert named.keys() == files.keys()
    assert all(torch.equal(named[key], value) for key, value in files.items())
    assert torch.equal(back(tiny.tokens()).logits, model(tiny.tokens()).logits)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text()) == json.loads((path / name).read_text())


def test_an_export_without_the_original_is_the_same_model(stored, tmp_path):
    model, path = stored
    config = config_of(path)
    hub.save(tmp_path / "out", config, hub.load(path, config), model_type=model.config.model_type)
    back = tiny.read_back(tmp_path / "out")
    assert torch.equal(back(tiny.tokens()).logits, model(tiny.tokens()).logits)
    assert not differences(hub.read_config(tmp_path / "out"), hub.read_config(path))


def test_names_of_files_and_of_models_in_memory_are_read(stored):
    model, path = stored
    config = config_of(path)
    one = hub.load(path, config)
    two = hub.from_tensors(model.config.model_type, config, model.state_dict())
    assert tree.paths(one) == tree.paths(two)
    assert all(map(torch.equal, tree.leaves(one), tree.leaves(two)))


def test_a_step_of_training_comes_back(stored, tmp_path):
    """One step of SGD here, exported, is one step of SGD there; but for what balances routers."""
    model, path = stored
    config, tokens = config_of(path), tiny.tokens()
    weights = hub.load(path, config)
    targets = F.pad(tokens[:, 1:], (0, 1), value=ft.nn.IGNORE_INDEX)
    batch = {"tokens": tokens, "targets": targets, "rows": torch.arange(len(tokens))}
    step = ft.make_step(
        ft.mean_gradients(
            lambda params, data, key: gpt.loss(config, params, data),
            gpt.num_targets,
            checks_sum=False,
        ),
        optim.sgd(0.5),
        ft.Mesh(),
        ft.P(),
    )
    start = ft.State(
        torch.zeros((), dtype=torch.int64), weights, optim.sgd(0.5).init(weights), ft.random.key(0)
    )
    state, _ = step(start, batch)
    hub.save(tmp_path / "out", config, state.params, like=path)
    back, before = tiny.read_back(tmp_path / "out").state_dict(), model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    model(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    for name, value in model.named_parameters():
        if not value.requires_grad:  # what balances ERNIE's routers
            continue
        assert (value - before[name]).abs().max() > 1e-4, name
        torch.testing.assert_close(back[name], value.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_bfloat16(name, tmp_path):
    """Routers' biases are stored and read in float32 all the same, as transformers has it."""
    model = tiny.make(name).bfloat16()
    path = tiny.store(model, tmp_path / "model")
    config = config_of(path)
    assert config.dtype == "bfloat16"
    weights = hub.load(path, config)
    for leaf in tree.paths(weights):
        value = dict(zip(tree.paths(weights), tree.leaves(weights), strict=True))[leaf]
        assert value.dtype == (torch.float32 if leaf.endswith("balance") else torch.bfloat16)
    hub.save(tmp_path / "out", config, weights, like=path)
    found = open_folder(tmp_path / "out").shapes()
    for tensor, (_, dtype) in found.items():
        wide = tensor.endswith("e_score_correction_bias")
        assert dtype == (torch.float32 if wide else torch.bfloat16)
    assert_same_weights(model, tiny.read_back(tmp_path / "out"))


# As published, without what says that numbers are quantised

PUBLISHED = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
        "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
        "use_cache": True, "vocab_size": 201088,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_models_are_our_presets(name):
    """Every field; every tensor and its shape is what transformers builds of config.json."""
    table = PUBLISHED[name]
    config = parse(table)
    assert differences(config, gpt.PRESETS[name]) == []
    family = DECODERS[table["model_type"]]
    again = parse(hub.write_config(config, family))
    assert differences(again, config) == []
    made = tiny.transformers.AutoConfig.for_model(**copy.deepcopy(table))
    with torch.device("meta"):
        model = tiny.transformers.AutoModelForCausalLM.from_config(made)
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = layouts_of(family, replace(config, mtp_depth=0), family.in_memory or family.rules)
    assert {layout.name(i): layout.shape for layout, i in tensors(found)} == theirs
    # and of what we write it builds the same
    settings = tiny.transformers.AutoConfig.for_model(**hub.write_config(config, family))
    for entry, value in made.to_dict().items():
        if entry in SAME | set(table) - SILENT:
            assert getattr(settings, entry) == value, entry


SILENT = {
    "architectures", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id",
    "pad_token_id", "initializer_range", "router_aux_loss_coef", "rope_scaling", "ep_size",
    "moe_layer_freq", "scoring_func", "topk_method", "initial_context_length",
    "experts_per_token", "max_window_layers", "rope_theta", "dtype", "num_experts_per_token",
}  # fmt: skip
SAME = {"layer_types", "sliding_window", "num_local_experts", "mlp_only_layers", "num_mtp_layers"}


# What is refused


def refusal(name: str, **changes) -> str:
    family, settings = tiny.MIXTURES[name]
    kind = getattr(tiny.transformers, f"{family}Config").model_type
    with pytest.raises(ValueError, match="wanted") as caught:
        parse({"model_type": kind, **settings, **changes})
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts: got '8'; wanted a whole number"),
        ("mixtral", {"num_experts_per_tok": 7}, "top_k: got 7; wanted at most num_experts=6"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob: got 1; wanted true or false"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "got 0 and []; wanted a whole number and a list"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias: got True; wanted False"),
        ("deepseek-v3", {"n_shared_experts": None}, "n_shared_experts: got None; wanted at least 1"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method: got 'greedy'; wanted 'noaux_tc'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: got 'softmax'; wanted 'sigmoid'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: got 2; wanted 1"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_kv_heads"),
        ("gpt-oss", {"quantization_config": {"quant_method": "gptq"}}, "transformers cannot make one of gptq"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit: got 5.0; wanted 7.0"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha: got 1.0; wanted 1.702"),
        ("gpt-oss", {"attention_bias": False}, "attention_bias: got False; wanted True"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act: got 'gelu'; wanted 'silu'"),
        ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
         "sliding_window: got 4 in layers 1, 2; wanted every layer, or all but every n-th"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(name, changes, reason):
    assert reason in refusal(name, **changes)


def test_dense_layers_of_qwen():
    kind, (_, settings) = {"model_type": "qwen3_moe"}, tiny.MIXTURES["qwen3-moe"]
    assert parse({**kind, **settings}).dense_layers == 0
    first = parse({**kind, **settings, "mlp_only_layers": [1, 0]})
    assert first.dense_layers == 2
    written = hub.write_config(first, DECODERS["qwen3_moe"])
    assert (written["mlp_only_layers"], written["decoder_sparse_step"]) == ([0, 1], 1)
    # of three layers only the last has experts: the first two are dense after all
    assert parse({**kind, **settings, "decoder_sparse_step": 3}).dense_layers == 2
    alternating = parse({**kind, **settings, "num_hidden_layers": 8, "decoder_sparse_step": 2})
    assert (alternating.dense_layers, alternating.dense_at) == (1, (2, 4, 6))
    written = hub.write_config(alternating, DECODERS["qwen3_moe"])
    assert (written["mlp_only_layers"], written["decoder_sparse_step"]) == ([0, 2, 4, 6], 1)


def test_dense_layers_of_ernie():
    kind, (_, settings) = {"model_type": "ernie4_5_moe"}, tiny.MIXTURES["ernie-moe"]
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    for places, sparse in {
        (3, 8, 3): [5, 8],
        (0, -1, 2): [1, 3, 5, 7, 9],
        (4, 6, 1): [4, 5, 6],
    }.items():
        own = dict(zip(names, places, strict=True))
        config = parse({**kind, **settings, "num_hidden_layers": 10, **own})
        assert [*config.stacks["blocks"]] == sparse
        written = hub.write_config(config, DECODERS["ernie4_5_moe"])
        assert parse(written).stacks == config.stacks
    odd = replace(config, dense_layers=0, dense_at=(1, 5))
    (problem,) = config_problems(odd, DECODERS["ernie4_5_moe"])
    assert (problem.path, problem.got) == ("dense_at", "(1, 5)")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"capacity_factor": 1.25}, "moe.capacity_factor"),
        ({"shared_dim": 8}, "moe.shared_dim"),
        ({"score": "sigmoid"}, "moe.score"),
        ({"renormalise": False}, "moe.renormalise"),
        ({"routing": "sinkhorn"}, "moe.routing"),
        ({"latent_dim": 8}, "moe.latent_dim"),
        ({"router_bias": True}, "moe.router_bias"),
    ],
)
def test_layers_of_experts_that_a_family_does_not_have(changes, path):
    config = gpt.GPTConfig(moe=MoEConfig(renormalise=True))
    assert not config_problems(config, DECODERS["mixtral"])
    other = replace(config, moe=replace(config.moe, **changes))
    assert path in {p.path for p in config_problems(other, DECODERS["mixtral"])}


def test_training_is_not_the_models():
    """Balance losses, jitter and how tokens travel are the run's; the same weights another way."""
    config = gpt.GPTConfig(moe=MoEConfig(renormalise=True))
    moe = replace(config.moe, aux_loss=0.1, jitter=0.1, z_loss=1.0, dispatch="gather")
    assert not config_problems(replace(config, moe=moe), DECODERS["mixtral"])
    assert not differences(replace(config, moe=moe), config)
    after = replace(config.moe, renormalise=False, normalise="after")
    assert not config_problems(replace(config, moe=after), DECODERS["mixtral"])
    assert not differences(replace(config, moe=after), config)
    # a run may drop tokens of a model that does not, but what comes of it has no such model
    dropping = replace(config, moe=replace(config.moe, capacity_factor=2.0))
    assert not differences(dropping, config)


def test_refusals_say_the_field_of_the_experts(tmp_path):
    path = tiny.store(tiny.make("mixtral"), tmp_path / "model")
    config = hub.read_config(path)
    other = replace(config, moe=replace(config.moe, top_k=3))
    with pytest.raises(ValueError, match=r"moe.top_k: got 3; wanted 2, as stored") as caught:
        hub.load(path, other)
    assert "MoEConfig" not in str(caught.value)
    wanted = r"llama: moe: got MoEConfig\(renormalise=True, latent_dim=8\); wanted None"
    none = gpt.GPTConfig(moe=MoEConfig(renormalise=True, latent_dim=8))
    with pytest.raises(ValueError, match=wanted):
        hub.format_for(none)


def test_experts_that_are_missing(tmp_path):
    path = tiny.store(tiny.make("mixtral"), tmp_path / "model")
    tensors = named(path)
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    del tensors[name.format(2)]
    tensors[name.format(6)] = torch.zeros(tiny.EMBED, tiny.MLP)
    rewrite(path, tensors)
    with pytest.raises(ValueError, match="not the weights") as caught:
        hub.load(path)
    assert f"{name.format(2)}: got no such tensor; wanted one of shape" in str(caught.value)
    assert f"{name.format(6)}: got a tensor; wanted none of this name" in str(caught.value)


# Predicting tokens further ahead


@pytest.fixture
def ahead(tmp_path):
    """A DeepSeek-V3 with a module for tokens further ahead, and its folder."""
    made = tiny.make("deepseek-v3")
    config = hub.reader.parse(made.config.to_dict() | {"num_nextn_predict_layers": 1})
    config = replace(config, vocab_multiple=tiny.VOCAB_MULTIPLE)
    params = ft.init_params(ft.random.key(0), gpt.defs(config))
    for leaf in tree.leaves(params):
        leaf.add_(0.1 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1)))
    params["embed"][tiny.VOCAB :] = 0
    params["unembed"][:, tiny.VOCAB :] = 0
    hub.save(tmp_path / "model", config, params)
    return config, params, tmp_path / "model"


def test_modules_ahead_are_the_layers_after_the_last(ahead):
    config, params, path = ahead
    layer = f"model.layers.{tiny.LAYERS}."
    tensors = named(path)
    assert torch.equal(tensors[layer + "eh_proj.weight"], params["mtp"]["proj"]["w"][0].T)
    assert torch.equal(tensors[layer + "enorm.weight"], params["mtp"]["embed_norm"]["scale"][0])
    assert torch.equal(tensors[layer + "hnorm.weight"], params["mtp"]["stream_norm"]["scale"][0])
    last = params["mtp"]["norm"]["scale"][0]
    assert torch.equal(tensors[layer + "shared_head.norm.weight"], last)
    gate = params["mtp"]["block"]["moe"]["experts"]["gate"]["w"]
    assert torch.equal(tensors[layer + "mlp.experts.4.gate_proj.weight"], gate[0, 4].T)
    assert hub.read_config(path).mtp_depth == 1
    back = hub.load(path, config)
    assert tree.paths(back) == tree.paths(params)
    assert all(map(torch.equal, tree.leaves(back), tree.leaves(params)))


def test_transformers_reads_the_model_without_them(ahead):
    config, params, path = ahead
    model, info = tiny.transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith("model.layers.3.") for name in info["unexpected_keys"])
    ours = gpt.forward(config, params, tiny.tokens())[..., : tiny.VOCAB]
    torch.testing.assert_close(model(tiny.tokens()).logits, ours, rtol=1e-4, atol=1e-4)


def test_files_have_modules_or_not(ahead, tmp_path):
    """config.json counts one in either case: transformers writes it so."""
    config, _, path = ahead
    without = replace(config, mtp_depth=0)
    fewer = hub.load(path, without)
    assert tree.paths(fewer) == tree.paths(gpt.defs(without))
    hub.save(tmp_path / "out", without, fewer, like=path)
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table["num_nextn_predict_layers"] == 0
    rewrite(tmp_path / "out", named(tmp_path / "out"), num_nextn_predict_layers=1)
    assert hub.read_config(tmp_path / "out").mtp_depth == 0
    assert tree.paths(hub.load(tmp_path / "out")) == tree.paths(fewer)
    with pytest.raises(ValueError, match=r"layers\.3\.eh_proj\.weight: got no such tensor"):
        hub.load(tmp_path / "out", config)


def test_copies_of_the_embedding_in_modules_are_compared(ahead):
    """DeepSeek's files have the embedding and unembedding twice."""
    config, params, path = ahead
    tensors = named(path)
    layer = f"model.layers.{tiny.LAYERS}."
    tensors[layer + "embed_tokens.weight"] = params["embed"][: tiny.VOCAB].clone()
    tensors[layer + "shared_head.head.weight"] = params["unembed"].T[: tiny.VOCAB].clone()
    rewrite(path, tensors)
    assert all(map(torch.equal, tree.leaves(hub.load(path, config)), tree.leaves(params)))
    tensors[layer + "shared_head.head.weight"][3, 3] += 1
    rewrite(path, tensors)
    with pytest.raises(ValueError, match=r"shared_head\.head\.weight: got other numbers than"):
        hub.load(path, config)
    hub.load(path, replace(config, mtp_depth=0))


def test_the_loss_of_modules_ahead_is_that_of_transformers(ahead):
    config, _, path = ahead
    model = tiny.read_back_main(path).double()
    config = replace(config, dtype="float64")
    weights = hub.load(path, config)
    decoder, norm = type(model.model.layers[-1]), type(model.model.norm)
    module = layers.MtpLayer(model.config, decoder, norm, tiny.LAYERS).double()
    layer, tensors = f"model.layers.{tiny.LAYERS}.", {}
    for name, value in hub.to_tensors(config, weights, "deepseek_v3").items():
        if name.startswith(layer):
            tensors[name.removeprefix(layer)] = value
    outer = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    inner = {k: v for k, v in tensors.items() if not k.startswith(outer)}
    with torch.no_grad():
        for name in ("enorm", "hnorm", "eh_proj"):
            getattr(module, name).weight.copy_(tensors[f"{name}.weight"])
        module.post_norm.weight.copy_(tensors["shared_head.norm.weight"])
        experts = [f"mlp.experts.{e}." for e in range(config.moe.num_experts)]
        for name, leaf in module.mtp_block.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                pairs = [[inner[f"{e}{p}_proj.weight"] for p in ("gate", "up")] for e in experts]
                leaf.copy_(torch.stack([torch.cat(pair) for pair in pairs]))
            elif name == "mlp.experts.down_proj":
                leaf.copy_(torch.stack([inner[f"{e}down_proj.weight"] for e in experts]))
            else:
                leaf.copy_(inner[name])
    tokens = tiny.tokens()
    seq = tokens.shape[1] - 1
    stream = model.model(tokens).last_hidden_state[:, :-1]
    places = torch.arange(seq)[None]
    y = module(
        model.model.embed_tokens(tokens[:, 1:]),
        stream,
        model.model.rotary_emb(stream, places),
        torch.full((seq, seq), -torch.inf, dtype=torch.float64).triu(1)[None, None],
        places,
        None,
    )
    logits = model.lm_head(y)[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten(), reduction="sum")
    targets = F.pad(tokens[:, 1:], (0, 1), value=ft.nn.IGNORE_INDEX)
    batch = {"tokens": tokens, "targets": targets, "rows": torch.arange(len(tokens))}
    _, details = gpt.loss_and_details(config, weights, batch)
    torch.testing.assert_close(details["ahead"][0], expected.detach(), rtol=1e-6, atol=0)
