"""Models beside decoders against transformers: from a folder, back, and onto meshes; and refused.

Transformers converts to float32 in norms, the state space and softmax even in a float64 model;
`Float64` makes these float64, so that agreement can be asked to 1e-10.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers.activations import ACT2FN

import functron as ft
from functron import BoundMesh, Mesh, hub, tree
from functron.apps.zoo.formats import _ACTIVATIONS, _FORWARD_NAMES
from functron.hub import files, reader
from functron.hub.mixtures import DECODERS
from functron.spmd.spec import shard
from functron.training import config as run_config
from functron.training import convert
from tests.apps.zoo import tiny_others
from tests.hub import tiny
from tests.models.float64_models import Float64

TOLERANCE = 1e-10
TYPES = {
    "mamba2": ft.mamba.MambaConfig,
    "nemotron-h": ft.mamba.MambaConfig,
    "bert": ft.bert.BertConfig,
    "t5-1.0": ft.t5.T5Config,
    "vit": ft.vit.ViTConfig,
    "llava": ft.llava.LlavaConfig,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every model in its folder, and its logits, made when it is asked for."""
    made = {}

    def get(name):
        if name not in made:
            path = tmp_path_factory.mktemp("models") / name
            model = tiny_others.make(name)
            model.save_pretrained(path, max_shard_size="40KB")
            made[name] = path, model, tiny_others.theirs(name, model)
        return made[name]

    return get


def assert_logits(got: torch.Tensor, expected: torch.Tensor) -> None:
    top = expected.abs().max()
    assert expected.dtype == torch.float64
    assert top > 0.3
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE * top)


def stored(path) -> dict[str, torch.Tensor]:
    found = files.open_folder(path)
    return {
        name: found.read(name, tuple(slice(0, n) for n in shape))
        for name, (shape, _) in found.shapes().items()
    }


def rewrite(path, tensors: dict, **entries) -> None:
    """Store other tensors, in one file, and other entries of config.json, in the folder."""
    for file in path.glob("model*"):
        file.unlink()
    listed = [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    files.write_files(path, files.plan(listed, 10**9), tensors.items())
    config = json.loads((path / "config.json").read_text()) | entries
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def copy(models, tmp_path):
    """A model's folder to be spoilt."""

    def get(name):
        path = tmp_path / "copy"
        path.mkdir()
        source = models(name)[0]
        (path / "config.json").write_bytes((source / "config.json").read_bytes())
        rewrite(path, stored(source))
        return path

    return get


@pytest.mark.parametrize("name", tiny_others.CASES)
def test_logits_and_the_way_back(models, tmp_path, name):
    """With the folder that it came from, and from the config alone."""
    path, model, expected = models(name)
    assert len(list(path.glob("*.safetensors"))) > 1
    config, params = hub.load_model(path)
    assert isinstance(config, TYPES.get(name, object))
    assert config == hub.read_config(path)
    assert_logits(tiny_others.ours(name, config, params), expected)
    for out, like in (("with", path), ("without", None)):
        hub.save(tmp_path / out, config, params, like=like, max_shard_bytes=40_000)
        back = tiny_others.read_back(name, tmp_path / out)
        assert_logits(tiny_others.theirs(name, back), expected)
        for key, value in back.state_dict().items():
            assert out == "without" or torch.equal(value, model.state_dict()[key]), key
        again, same = hub.load_model(tmp_path / out)
        assert not hub.reader.differences(again, config)
        assert all(map(torch.equal, tree.leaves(same), tree.leaves(params)))
        # what is exported of that is the same to the last byte of every file
        hub.save(tmp_path / "2", again, same, like=like and tmp_path / out, max_shard_bytes=40_000)
        first = {file.name: file.read_bytes() for file in (tmp_path / out).iterdir()}
        assert {f.name: f.read_bytes() for f in (tmp_path / "2").iterdir()} == first
        (tmp_path / "2").rename(tmp_path / f"{out}2")
    written = json.loads((tmp_path / "with" / "config.json").read_text())
    assert written == json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("name", ["mamba2", "nemotron-h", "bert", "t5-1.1", "vit", "llava"])
def test_names_in_memory(models, name):
    """State dicts of transformers' models."""
    _, model, _ = models(name)
    config, params = hub.load_model(models(name)[0])
    kind = json.loads((models(name)[0] / "config.json").read_text())["model_type"]
    named = hub.from_tensors(kind, config, model.state_dict())
    assert tree.paths(named) == tree.paths(params)
    assert all(map(torch.equal, tree.leaves(named), tree.leaves(params)))


class Counting:
    """A source that keeps count of what is read from it."""

    def __init__(self, source):
        self.source, self.read_bytes = source, 0

    def shapes(self):
        return self.source.shapes()

    def read(self, name, slices):
        piece = self.source.read(name, slices)
        self.read_bytes += piece.nbytes
        return piece


@pytest.mark.parametrize("name", TYPES)
def test_each_rank_reads_its_shards(models, name):
    path, mesh = models(name)[0], Mesh(fsdp=2, tp=2)
    config, whole = hub.load_model(path)
    kind = hub.family_of(config)
    specs = ft.param_specs(kind.defs(config), kind.rules(config, mesh))
    total = sum(leaf.nbytes for leaf in tree.leaves(whole))
    for rank in range(mesh.size):
        # a rank without its process groups: reading issues no collectives
        bound = BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")
        params = hub.load(path, config, specs=specs, mesh=bound)
        rows = zip(tree.leaves(params), tree.leaves(whole), tree.leaves(specs), strict=True)
        for got, want, spec in rows:
            assert torch.equal(got, shard(want, spec, mesh, mesh.coordinate(rank)))
        source = Counting(files.open_folder(path))
        family = hub.reader.format_of(hub.reader.read_table(path))
        reader.read_params(family, config, source, reader.local_on_mesh(config, specs, bound))
        assert 0 < source.read_bytes <= sum(leaf.nbytes for leaf in tree.leaves(params)) < total


@pytest.mark.parametrize("name", ["mamba2", "bert", "t5-1.0", "vit", "llava"])
def test_simulated_ranks_give_the_same_logits(models, name):
    path, _, expected = models(name)
    mesh = Mesh(fsdp=2, tp=2)
    config, params = hub.load_model(path, mesh=mesh)
    kind = hub.family_of(config)
    rules = kind.rules(config, Mesh(tp=2))
    specs = ft.param_specs(kind.defs(config), rules)
    given = tiny_others.CASES[name].inputs()
    asked = lambda w: tiny_others.CASES[name].ours(config, w, given)
    run = lambda w: ft.lax.all_gather(asked(w), "tp", axis=-1, tiled=True)
    with Float64(), torch.no_grad():
        got = ft.shard_map(run, mesh, (specs,), ft.P(), check=False)(params)
    assert_logits(got[..., : expected.shape[-1]], expected)


def test_load_model_divides_as_the_kind_does(models):
    path, mesh = models("bert")[0], Mesh(tp=2)
    bound = BoundMesh(mesh, 1, mesh.coordinate(1), {}, "cpu")
    config, params = hub.load_model(path, mesh=bound)
    specs = ft.param_specs(ft.bert.defs(config), ft.bert.rules(config, mesh))
    same = hub.load(path, config, specs=specs, mesh=bound)
    assert params["embed"].shape[0] == config.padded_vocab // 2
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(same)))


def test_names_of_older_files(copy):
    """Of BERT's norms, of LLaVA's tower, and tensors that were stored twice or have no use."""
    path = copy("bert")
    config, params = hub.load_model(path)
    named = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): value
        for key, value in stored(path).items()
    }
    named["cls.predictions.decoder.weight"] = named["bert.embeddings.word_embeddings.weight"]
    named["cls.predictions.decoder.bias"] = named["cls.predictions.bias"]
    named["bert.pooler.dense.weight"] = torch.ones(32, 32)
    named["cls.seq_relationship.bias"] = torch.ones(2)
    rewrite(path, named)
    assert all(map(torch.equal, tree.leaves(hub.load(path, config)), tree.leaves(params)))
    named["cls.predictions.decoder.bias"] = named["cls.predictions.bias"] + 1
    rewrite(path, named)
    with pytest.raises(ValueError, match=r"decoder.bias: got other numbers than the head/bias"):
        hub.load(path)


def test_published_names_of_a_llava(copy):
    path = copy("llava")
    config, params = hub.load_model(path)
    assert config.vision.num_layers == 2  # of three: the features before the last block
    named = stored(path)
    assert "vision_tower.encoder.layers.2.mlp.fc1.bias" in named
    put = ("vision_tower.", "vision_tower.vision_model.")
    rewrite(path, {key.replace(*put): value for key, value in named.items()})
    assert all(map(torch.equal, tree.leaves(hub.load(path, config)), tree.leaves(params)))


# What is refused


def refusal(path, **options) -> str:
    with pytest.raises(ValueError, match="got") as caught:
        hub.load_model(path, **options)
    return str(caught.value)


MISSING = {
    "mamba2": ("backbone.layers.0.mixer.in_proj.weight", "backbone.layers.1.mixer.D"),
    "bert": ("cls.predictions.bias", "bert.encoder.layer.1.output.dense.weight"),
    "t5-1.1": ("shared.weight", "decoder.block.2.layer.1.EncDecAttention.q.weight"),
    "vit": ("vit.embeddings.cls_token", "classifier.weight"),
    "llava": ("multi_modal_projector.linear_2.bias", "language_model.model.norm.weight"),
}


@pytest.mark.parametrize("name", MISSING)
def test_tensors_that_do_not_fit_are_all_named(copy, name):
    path = copy(name)
    tensors, (gone, changed) = stored(path), MISSING[name]
    shape = list(tensors.pop(gone).shape)
    tensors[f"{gone}x"] = torch.zeros(3)
    was = list(tensors[changed].shape)
    tensors[changed] = torch.zeros(*was, 2)
    rewrite(path, tensors)
    text = refusal(path)
    gone = gone.replace("vision_tower.", "vision_tower.vision_model.")
    for line in (
        f"{gone}: got no such tensor; wanted one of shape {shape}",
        f"{gone}x: got a tensor; wanted none of this name",
        f"{changed}: got {[*was, 2]}; wanted {was}",
    ):
        assert f"\n  - {line}" in text, (line, text)
    assert text.count("\n  - ") == 3


def test_a_file_that_is_cut_off(copy):
    path = copy("vit")
    file = path / files.SINGLE
    file.write_bytes(file.read_bytes()[:-5])
    assert "it is cut off; wanted" in refusal(path)


SPOILT = {
    "mamba2": (
        {
            "hidden_act": "gelu", "time_step_limit": [0.0, 4.0], "expand": 3,
            "architectures": ["Mamba2Model"], "attn_layer_idx": [1],
        },
        ("hidden_act", "time_step_limit", "expand", "architectures", "attn_layer_idx"),
    ),
    "nemotron-h": (
        {
            "layers_block_type": ["linear_attention", "moe", "mlp"], "mlp_hidden_act": "erf",
            "sliding_window": 8, "num_nextn_predict_layers": 1, "mamba_proj_bias": True,
            "time_step_limit": [0.1, {"__float__": "Infinity"}], "n_groups": 2.5,
        },
        ("layers_block_type", "mlp_hidden_act", "sliding_window", "num_nextn_predict_layers",
         "mamba_proj_bias", "time_step_limit", "n_groups"),
    ),
    "bert": (
        {
            "hidden_act": "gelu_python", "position_embedding_type": "relative_key",
            "is_decoder": True, "tie_word_embeddings": False, "embedding_size": 8,
            "architectures": ["BertForSequenceClassification"], "type_vocab_size": "2",
        },
        ("hidden_act", "position_embedding_type", "is_decoder", "tie_word_embeddings",
         "embedding_size", "architectures", "type_vocab_size"),
    ),
    "t5-1.0": (
        {
            "feed_forward_proj": "gated-erf", "is_encoder_decoder": False, "d_kv": None,
            "scale_decoder_outputs": True, "tie_word_embeddings": False, "vocab_size": 1.5,
        },
        ("feed_forward_proj", "is_encoder_decoder",
         "tie_word_embeddings and scale_decoder_outputs", "vocab_size"),
    ),
    "vit": (
        {
            "hidden_act": "relu", "image_size": [8, 16], "qkv_bias": False, "head_dim": 6,
            "num_labels": 7,
        },
        ("hidden_act", "image_size", "qkv_bias", "head_dim", "id2label"),
    ),
    "llava": (
        {
            "vision_feature_layer": [-2, -3], "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False, "projector_hidden_act": "erf",
            "image_token_id": 9, "image_newline": True,
        },
        ("vision_feature_layer", "vision_feature_select_strategy", "multimodal_projector_bias",
         "projector_hidden_act", "image_token_index and image_token_id", "image_newline"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_settings_that_we_do_not_have_are_all_named(models, name):
    table = json.loads((models(name)[0] / "config.json").read_text())
    entries, names = SPOILT[name]
    with pytest.raises(ValueError, match=r"cannot use config.json") as caught:
        hub.reader.parse(table | entries)
    text = str(caught.value)
    assert [line.split(": got")[0] for line in sorted(text.split("\n  - ")[1:])] == sorted(names)


def test_parts_of_a_llava_are_read_as_strictly(models):
    table = json.loads((models("llava")[0] / "config.json").read_text())
    table["vision_config"] |= {"hidden_act": "relu", "use_registers": 4}
    table["text_config"] |= {"hidden_act": "erf", "rope_parameters": {"rope_type": "new"}}
    with pytest.raises(ValueError, match="cannot use") as caught:
        hub.reader.parse(table)
    for name in (
        "vision_config.hidden_act", "vision_config.use_registers", "text_config.hidden_act",
        "text_config.rope_parameters.rope_type",
    ):  # fmt: skip
        assert f"\n  - {name}: got" in str(caught.value)
    table["vision_config"] = {"model_type": "siglip_vision_model"}
    table["text_config"] = {"model_type": "gpt2"}
    with pytest.raises(ValueError, match=r"vision_config.model_type: got 'siglip") as caught:
        hub.reader.parse(table)
    assert "text_config.model_type: got 'gpt2'" in str(caught.value)


def test_configs_of_another_model_or_kind(models, tmp_path):
    path = models("bert")[0]
    config, params = hub.load_model(path)
    hub.load(path, replace(config, dropout=0.1, vocab_multiple=16, dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"norm_eps: got 0.1; wanted 1e-12, as stored"):
        hub.load(path, replace(config, norm_eps=0.1))
    with pytest.raises(ValueError, match="config: got GPTConfig; wanted BertConfig"):
        hub.load(path, ft.gpt.GPTConfig())
    with pytest.raises(ValueError, match="config: got BertConfig; wanted T5Config"):
        hub.save(tmp_path / "out", config, params, model_type="t5")
    with pytest.raises(ValueError, match="max_seq: got 8; wanted 24: as many as there are learned"):
        hub.read_config(path, max_seq=8)
    with pytest.raises(ValueError, match="max_seq: got 8; wanted nothing"):
        hub.read_config(models("t5-1.0")[0], max_seq=8)
    with pytest.raises(TypeError, match="got str; wanted one of GPTConfig"):
        hub.family_of("bert")


@pytest.mark.parametrize("name", ["bert", "nemotron-h", "t5-1.1"])
def test_run_folders_and_back(models, tmp_path, name):
    path, model, _ = models(name)
    done = convert.convert(f"hf:{path}", f"run:{tmp_path / 'run'}")
    assert done.config == run_config.load(tmp_path / "run" / "config.toml").architecture
    assert "(float64)" in str(done)
    convert.convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}")
    back = tiny_others.read_back(name, tmp_path / "out").state_dict()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


def test_run_folders_of_models_that_are_not_trained(models, tmp_path):
    with pytest.raises(ValueError, match="got a vision transformer; wanted a decoder") as caught:
        convert.convert(f"hf:{models('vit')[0]}", f"run:{tmp_path / 'run'}")
    assert "hub.load_model(path)" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_architectures_that_no_family_has(models):
    hybrid = hub.read_config(models("nemotron-h")[0])
    with pytest.raises(ValueError, match="mamba2: pattern: got 'M-M") as caught:
        hub.format_for(replace(hybrid, gated=True))
    assert "nemotron_h: gated: got True" in str(caught.value)
    config = hub.read_config(models("vit")[0])
    with pytest.raises(ValueError, match="vit: pre_norm: got True; wanted False in this family"):
        hub.format_for(replace(config, pre_norm=True))
    text = hub.read_config(models("llava")[0])
    with pytest.raises(ValueError, match=r"llava: text\.norm: got 'layer'; wanted 'rms'"):
        hub.format_for(replace(text, text=replace(text.text, norm="layer", bias=True)))


def test_changed_models_are_not_written_as_what_they_came_from(models, tmp_path):
    """A LLaVA with another theta: what its features do not need is not carried along."""
    path = models("llava")[0]
    config, params = hub.load_model(path)
    other = replace(config, text=replace(config.text, rope_theta=500.0))
    hub.save(tmp_path / "out", other, params, like=path)
    assert hub.read_config(tmp_path / "out") == other
    assert not [name for name in stored(tmp_path / "out") if "encoder.layers.2" in name]
    tiny_others.read_back("llava", tmp_path / "out")


def test_decays_keep_their_width(models, tmp_path):
    path = models("mamba2")[0]
    config = hub.read_config(path, dtype="bfloat16")
    params = hub.load(path, config)
    assert params["mamba"]["mixer"]["a_log"].dtype == torch.float32
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        hub.save(tmp_path / str(dtype), config, params, dtype=dtype)
        named = stored(tmp_path / str(dtype))
        assert named["backbone.layers.0.mixer.A_log"].dtype == expected
        assert named["backbone.layers.0.mixer.in_proj.weight"].dtype == torch.bfloat16


def test_published_configs():
    """As published, and the number of parameters that their cards or papers give."""
    bert = {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
        "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
        "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    }  # fmt: skip
    assert replace(hub.reader.parse(bert), dropout=0.1) == ft.bert.PRESETS["bert-base"]
    t5 = {
        "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
        "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
        "model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6,
        "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 32128,
    }  # fmt: skip
    assert not hub.reader.differences(hub.reader.parse(t5), ft.t5.PRESETS["t5-small"])
    llava = {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100,
        "image_token_index": 32000, "model_type": "llava", "pad_token_id": 32001,
        "projector_hidden_act": "gelu", "torch_dtype": "float16", "vocab_size": 32064,
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
            "torch_dtype": "float16", "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
            "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
            "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
        },
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    }  # fmt: skip
    config = hub.reader.parse(llava)
    preset = ft.llava.PRESETS["llava-1.5-7b"]
    assert not hub.reader.differences(
        config, replace(preset, text=replace(preset.text, norm_eps=1e-5))
    )
    assert hub.write_config(config, hub.FORMATS["llava"])["torch_dtype"] == "float32"
    without = {name: value for name, value in llava.items() if name != "vision_config"}
    assert hub.reader.parse(without) == config


def test_every_field_is_spoken_for():
    """Each field of a config is read of config.json, free, or at its default."""
    for form in hub.FORMATS.values():
        if form.model_type in DECODERS:
            continue
        ours = [field for entry in form.entries for field in entry.ours]
        assert len(ours) == len(set(ours)), form.model_type
        fields = {f.name for f in form.family.config.__dataclass_fields__.values()}
        assert set(ours) <= fields
        unread = fields - set(ours) - set(form.family.free)
        allowed = {
            "mamba2": {"attention_heads", "attention_kv_heads", "attention_head_dim", "mlp_dim",
                       "activation", "gated"},
        }  # fmt: skip
        assert unread == allowed.get(form.model_type, set()), form.model_type


def test_infinity_as_older_versions_wrote_it(models):
    table = json.loads((models("mamba2")[0] / "config.json").read_text())
    config = hub.reader.parse(table | {"time_step_limit": [0.25, math.inf]})
    assert config.dt_min == 0.25


def test_a_t5_that_transformers_5_has_tied(tmp_path):
    """Its config says that the output is not divided, and its files have no head of their own."""
    model = tiny_others.make_tied_t5()
    model.save_pretrained(tmp_path / "model")
    expected = tiny_others.theirs("t5-1.0", model)
    config, params = hub.load_model(tmp_path / "model")
    assert not config.tied
    close = {"rtol": 1e-5, "atol": 1e-5 * expected.abs().max().item()}
    torch.testing.assert_close(tiny_others.ours("t5-1.0", config, params), expected, **close)
    hub.save(tmp_path / "out", config, params, like=tmp_path / "model")
    back = tiny_others.read_back("t5-1.0", tmp_path / "out")
    torch.testing.assert_close(tiny_others.theirs("t5-1.0", back), expected, **close)


DECODERS_OF_LLAVA = [
    pytest.param(name, marks=[] if name in ("gemma2", "glm", "cohere") else pytest.mark.full)
    for name in tiny.CASES
    if not name.startswith(("gpt", "falcon")) and name not in ("phi", "apertus", "granite")
]


@pytest.mark.parametrize("name", DECODERS_OF_LLAVA)
def test_every_decoder_in_a_llava(name, tmp_path):
    """No layer of what is exported is random in transformers, and no head is capped (Gemma 2)."""
    model = tiny_others.make_llava(*tiny.CASES[name])
    model.save_pretrained(tmp_path / "model")
    expected = tiny_others.theirs("llava", model)
    config, params = hub.load_model(tmp_path / "model")
    close = {"rtol": 1e-6, "atol": 1e-6 * expected.abs().max().item()}  # Gemmas' scale is float32
    torch.testing.assert_close(tiny_others.ours("llava", config, params), expected, **close)
    for out, like in (("with", tmp_path / "model"), ("without", None)):
        hub.save(tmp_path / out, config, params, like=like)
        back = tiny_others.read_back("llava", tmp_path / out)
        torch.testing.assert_close(tiny_others.theirs("llava", back), expected, **close)
    for change, got in (("logit_cap", 3.0), ("logit_scale", 0.5), ("attention_gate", True)):
        other = replace(config, text=replace(config.text, **{change: got}))
        with pytest.raises(ValueError, match=rf"text.{change}: got {got}; wanted"):
            hub.write_config(other, hub.FORMATS["llava"])


@pytest.mark.parametrize("name", ["granite", "phi", "apertus", "falcon"])
def test_decoders_that_have_no_place_in_a_llava(name):
    table = {"model_type": "llava", "text_config": {"model_type": name}, "vision_config": {}}
    with pytest.raises(ValueError, match=rf"text_config.model_type: got '{name}'; wanted a model"):
        hub.reader.parse(table)


@pytest.mark.parametrize("names", [_ACTIVATIONS, _FORWARD_NAMES], ids=["images", "t5"])
def test_activations_are_those_of_transformers(names):
    ours = {**ft.nn.layers.ACTIVATIONS, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for theirs, name in names.items():
        act = tiny.transformers.T5Config(feed_forward_proj=theirs).dense_act_fn
        made = ACT2FN[theirs if names is not _FORWARD_NAMES else act]
        torch.testing.assert_close(ours[name](x), made(x), rtol=1e-6, atol=1e-9)
