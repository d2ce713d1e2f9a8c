"""Quantised weights of Hugging Face's files: read as the numbers they stand for, and written.

The oracles are transformers, which dequantises on CPUs, and ml_dtypes with numpy's float32.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import functron as ft
from functron import Mesh, Rules, gpt, hub, tree
from functron.hub import files, reader
from functron.hub.reader import parse
from functron.spmd.spec import shard
from tests.hub import tiny
from tests.hub.test_refusals import named, rewrite
from tests.hub.test_shards import MEGATRON, Counting, bound

ml_dtypes = pytest.importorskip("ml_dtypes")

LINEAR = re.compile(r".*(_proj|_proj_with_mqa)\.weight")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
GROUP = {"targets": ["Linear"], "input_activations": {"num_bits": 8, "dynamic": True}}


def compressed(strategy: str, **weights) -> dict:
    """As llm-compressor writes it."""
    own = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True,
           "dynamic": False, "group_size": None, **weights}  # fmt: skip
    group = {**GROUP, "weights": own}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group}}  # fmt: skip


def fp8(tensors: dict, block, end: str = "_scale_inv") -> tuple[dict, dict]:
    """Tensors whose linear weights are FP8 with scales of blocks, and what they stand for.

    A block of (1, 0) is a row; None is everything.
    """
    out, plain = {}, {}
    for name, value in tensors.items():
        plain[name] = out[name] = value
        if not LINEAR.fullmatch(name):
            continue
        rows, cols = value.shape
        height, width = (rows, cols) if block is None else (block[0], block[1] or cols)
        tall, wide = -(-rows // height), -(-cols // width)
        scales = np.random.default_rng(len(name)).uniform(0.001, 0.01, (tall, wide))
        scales = scales.astype(np.float32)
        spread = np.kron(scales, np.ones((height, width), np.float32))[:rows, :cols]
        codes = (value.numpy() / spread).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        plain[name] = torch.from_numpy(codes.astype(np.float32) * spread)
        out[name] = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(scales)
        out[f"{name}{end}"] = scales.reshape(()) if block is None else scales
    return out, plain


def assert_equal(one: dict, two: dict) -> None:
    assert tree.paths(one) == tree.paths(two)
    rows = zip(tree.paths(one), tree.leaves(one), tree.leaves(two), strict=True)
    for path, a, b in rows:
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path


@pytest.mark.parametrize(
    ("block", "end", "entry"),
    [
        ((16, 16), "_scale_inv", {**FP8, "weight_block_size": [16, 16]}),
        (None, "_scale_inv", {**FP8, "weight_block_size": None}),
        ((1, 0), "_scale", compressed("channel")),
        pytest.param(None, "_scale", compressed("tensor"), marks=pytest.mark.full),
        ((16, 16), "_scale", compressed("block", block_structure=[16, 16])),
    ],
    ids=["blocks", "one", "rows", "one-compressed", "blocks-compressed"],
)
def test_fp8_is_values_times_scales(block, end, entry, tmp_path, monkeypatch):
    """Blocks at the edges are smaller: 16 divides hardly a side of this model."""
    path = tiny.store(tiny.make("deepseek-v3"), tmp_path / "model")
    stored, plain = fp8(named(path), block, end)
    stored["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)  # of activations
    rewrite(path, stored, quantization_config={**entry, "modules_to_not_convert": ["lm_head"]}
            if entry["quant_method"] == "fp8" else entry)  # fmt: skip
    config = hub.read_config(path)
    expected = hub.from_tensors("deepseek_v3", config, plain)
    monkeypatch.setattr(reader, "MOST_ELEMENTS", 300)  # so that tensors are read in parts
    assert_equal(hub.load(path), expected)
    low = replace(config, dtype="bfloat16")
    rounded = tree.map(
        lambda leaf, d: leaf.to(d.dtype), expected, gpt.defs(low)
    )  # once: from float32
    assert_equal(hub.load(path, low), rounded)


def test_a_rank_reads_the_blocks_that_it_needs(tmp_path):
    settings = {**tiny.LLAMA, "intermediate_size": 64}
    torch.manual_seed(0)
    model = tiny.transformers.LlamaForCausalLM(tiny.transformers.LlamaConfig(**settings))
    path = tiny.store(model, tmp_path / "model")
    stored, _ = fp8(named(path), (16, 16))
    rewrite(path, stored, quantization_config={**FP8, "weight_block_size": [16, 16]})
    config, mesh = hub.read_config(path), Mesh(tp=2)
    specs = ft.param_specs(gpt.defs(config), Rules(MEGATRON))
    whole, table = hub.load(path, config), json.loads((path / "config.json").read_text())
    for rank in range(2):
        source = Counting(files.open_folder(path))
        held = reader.local_on_mesh(config, specs, bound(mesh, rank))
        decoded = files.decode(source, table, "config.json")
        got = reader.read_params(hub.FORMATS["llama"], config, decoded, held)
        place = mesh.coordinate(rank)
        assert_equal(got, tree.map(lambda x, s, at=place: shard(x, s, mesh, at), whole, specs))
        # of each layer half of 16-wide blocks: codes, and 4 bytes for 256 of them
        matrices = sum(
            leaf.numel()
            for name, leaf in zip(tree.paths(got), tree.leaves(got), strict=True)
            if re.fullmatch(r"blocks/(attention|mlp)/\w+/w", name)
        )
        others = sum(leaf.numel() for leaf in tree.leaves(got)) - matrices
        assert sum(source.sizes) <= matrices + matrices // 64 + 4 * others


def mxfp4(path, settings: dict) -> None:
    """The experts of a stored GPT-OSS as random codes."""
    draw = torch.Generator().manual_seed(0)
    tensors = {k: v for k, v in named(path).items() if not re.search(r"experts\.\w+_proj\Z", k)}
    hidden, inner, count = (
        settings[key] for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    for layer in range(tiny.LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        for name, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            shape = (count, outputs, inputs // 32)
            codes = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(118, 124, shape, generator=draw, dtype=torch.uint8)
            tensors |= {f"{at}.{name}_proj_blocks": codes, f"{at}.{name}_proj_scales": scales}
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    rewrite(path, tensors, quantization_config=entry)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path, without_accelerate):
    """Whole, and divided over experts and their widths, where gates and ups take turns."""
    settings = {**tiny.GPT_OSS, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    torch.manual_seed(0)
    family = tiny.transformers.GptOssForCausalLM
    model = family(tiny.transformers.GptOssConfig(**settings))
    path = tiny.store(model, tmp_path / "model")
    mxfp4(path, settings)
    theirs = tiny.read_back(path, torch.float32)
    config = hub.read_config(path)
    got = hub.load(path, config)
    assert_equal(got, hub.from_tensors("gpt_oss", config, theirs.state_dict()))
    table = json.loads((path / "config.json").read_text())
    rules = {**MEGATRON, "expert": "ep", "embed": "fsdp"}
    mesh = Mesh(ep=2, tp=2, fsdp=2)
    specs = ft.param_specs(gpt.defs(config), Rules(rules))
    for rank in (0, 7):
        held = reader.local_on_mesh(config, specs, bound(mesh, rank))
        source = Counting(files.open_folder(path))
        decoded = files.decode(source, table, "config.json")
        part = reader.read_params(hub.FORMATS["gpt_oss"], config, decoded, held)
        place = mesh.coordinate(rank)
        expected = tree.map(lambda x, s, at=place: shard(x, s, mesh, at), got, specs)
        assert_equal(part, expected)
        biggest = part["blocks"]["moe"]["experts"]["gate"]["w"][0]
        assert max(source.sizes) <= max(biggest.numel(), 4 * tiny.VOCAB * 64)
    tensors = named(path)
    tensors["model.layers.1.mlp.experts.down_proj_scales"].view(-1)[5] = 255  # NaN
    rewrite(path, tensors)
    with pytest.raises(ValueError, match=r"down_proj_scales: got infinite ones or NaN"):
        hub.load(path, config)


@pytest.fixture
def without_accelerate(monkeypatch):
    """Transformers asks for a package to read these, which it does not use on one device."""
    for method in ("finegrained_fp8", "mxfp4"):
        module = pytest.importorskip(f"transformers.quantizers.quantizer_{method}")
        monkeypatch.setattr(module, "is_accelerate_available", lambda: True)


WIDE = {**tiny.LLAMA, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
        "num_hidden_layers": 2, "num_key_value_heads": 4}  # fmt: skip
EXPORTS = {
    "llama": ("Llama", WIDE),
    "phi3": ("Phi3", {**WIDE, **tiny.TOKENS}),
    "mixtral": ("Mixtral", {**WIDE, "num_local_experts": 2, **tiny.TOKENS}),
    "qwen3_moe": ("Qwen3Moe", {**tiny.QWEN3_MOE, **WIDE, "moe_intermediate_size": 128,
                               "num_experts": 4, "mlp_only_layers": [0]}),
}  # fmt: skip


def wide(kind: str, **changes) -> tuple[gpt.GPTConfig, dict]:
    family, settings = EXPORTS[kind]
    theirs = getattr(tiny.transformers, f"{family}Config")(**{**settings, **changes})
    config = parse({**theirs.to_dict(), "architectures": None, "model_type": kind, "dtype": None})
    return config, ft.init_params(ft.random.key(0), gpt.defs(config))


@pytest.mark.parametrize("kind", list(EXPORTS))
def test_fp8_by_blocks_is_loaded_by_transformers(kind, tmp_path, without_accelerate):
    """We read what it dequantises; and it is the quantised weight of the format's definition."""
    config, params = wide(kind)
    hub.save(tmp_path / "out", config, params, model_type=kind, quantise="fp8-block",
             max_shard_bytes=300_000)  # fmt: skip
    back = hub.load(tmp_path / "out")
    theirs = tiny.read_back(tmp_path / "out", torch.float32)
    assert_equal(
        back, hub.from_tensors(kind, hub.read_config(tmp_path / "out"), theirs.state_dict())
    )
    tokens = tiny.tokens()
    logits = gpt.forward(config, back, tokens)[..., : tiny.VOCAB]
    torch.testing.assert_close(theirs(tokens).logits.detach(), logits, rtol=1e-5, atol=1e-4)
    name = "model.layers.1.self_attn.o_proj.weight"
    table, matrix = named(tmp_path / "out"), hub.to_tensors(config, params, kind)[name].numpy()
    scale = np.abs(matrix).max() / np.float32(448)
    codes = (matrix * (np.float32(448) / np.abs(matrix).max())).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(table[name].view(torch.uint8).numpy(), codes.view(np.uint8))
    np.testing.assert_allclose(table[f"{name}_scale_inv"].numpy(), [[scale]], rtol=1.2e-7)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    kept = {"lm_head", "model.embed_tokens", "model.norm", "model.layers.1.input_layernorm"}
    assert kept <= set(entry["modules_to_not_convert"])
    plain = [name for name, value in table.items() if value.dtype != torch.float8_e4m3fn]
    assert not any("proj.weight" in name for name in plain if not name.endswith("_scale_inv"))


def test_fp8_by_rows_there_and_back(tmp_path):
    """As compressed-tensors; of sides that no block divides, and of a run's bfloat16."""
    config, params = wide("llama", num_key_value_heads=2, intermediate_size=200)
    low = replace(config, dtype="bfloat16")
    params = tree.map(lambda leaf: leaf.bfloat16(), params)
    hub.save(tmp_path / "out", low, params, model_type="llama", quantise="fp8-row")
    back = hub.load(tmp_path / "out", replace(config, dtype="float32"))
    tensors, before = hub.to_tensors(config, back, "llama"), hub.to_tensors(low, params, "llama")
    stored = named(tmp_path / "out")
    for name, value in before.items():
        matrix = value.float().numpy()
        if not LINEAR.fullmatch(name):
            assert torch.equal(tensors[name], value.float())
            assert stored[name].dtype == torch.bfloat16
            continue
        most = np.abs(matrix).max(1, keepdims=True)
        codes = (matrix * (np.float32(448) / most)).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(stored[name].view(torch.uint8).numpy(), codes.view(np.uint8))
        scales = stored[f"{name}_scale"].numpy()
        np.testing.assert_allclose(scales, most / 448, rtol=1.2e-7)
        assert np.array_equal(tensors[name].numpy(), codes.astype(np.float32) * scales)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in entry["ignore"]
    # by blocks: queries, keys and values stay together as they are, as others join them
    hub.save(tmp_path / "blocks", config, back, model_type="llama", quantise="fp8-block")
    kinds = {name: value.dtype for name, value in named(tmp_path / "blocks").items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        assert kinds[f"model.layers.0.self_attn.{name}.weight"] == torch.float32
    assert kinds["model.layers.0.self_attn.o_proj.weight"] == torch.float8_e4m3fn


def test_a_model_that_came_in_fp8_is_exported_as_is_asked(tmp_path):
    config, params = wide("llama")
    first, plain, again = (tmp_path / name for name in ("first", "plain", "again"))
    hub.save(first, config, params, model_type="llama", quantise="fp8-block")
    read = hub.load(first)
    hub.save(plain, config, read, like=first)
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert_equal(hub.load(plain), read)
    hub.save(again, config, read, like=first, quantise="fp8-block")
    assert (again / "config.json").read_text() == (first / "config.json").read_text()
    one, two = named(first), named(again)
    assert one.keys() == two.keys()
    for name, value in one.items():  # 448 scales, over 448, may be the next number
        if name.endswith("_scale_inv"):
            torch.testing.assert_close(two[name], value, rtol=2.4e-7, atol=0)
        else:
            assert torch.equal(two[name].view(torch.uint8), value.view(torch.uint8))


REFUSED = {
    "no method": ({"bits": 4}, "quantization_config: got.*wanted quant_method fp8, compressed"),
    "another": ({"quant_method": "awq"}, "quant_method: got 'awq'.*base_model of its card.*one of awq"),
    "bnb": ({"quant_method": "bitsandbytes"}, r"got 'bitsandbytes'.*with model\.dequantize\(\), then"),
    "packed": ({**compressed("channel"), "format": "pack-quantized"},
               "config_groups.group_0.format: got 'pack-quantized'; wanted 'float-quantized'"),
    "bits": (compressed("channel", num_bits=4), "weights.num_bits: got 4; wanted 8"),
    "groups": (compressed("group"), "strategy: got 'group'; wanted 'tensor' or 'channel' or 'block'"),
    "block": (compressed("block"), "block_structure: got 0; wanted two positive whole numbers"),
    "zero points": (compressed("channel", symmetric=False), "symmetric: got False; wanted True"),
    "rotated": ({**compressed("channel"), "transform_config": {"u": 1}}, "transform_config: got"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt: got 'e5m2'; wanted 'e4m3'"),
    "fp4 experts": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype: got 'fp4'; wanted 'fp8'"),
    "no blocks": ({**FP8, "weight_block_size": [128]}, "weight_block_size: got .128.; wanted two"),
    "unknown": ({**FP8, "rotated": True}, r"rotated: got True.*ignore=\['quantization_config.rotat"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_methods_that_are_refused(name):
    entry, reason = REFUSED[name]
    table = {"model_type": "llama", **tiny.LLAMA, "quantization_config": entry}
    with pytest.raises(ValueError, match="wanted") as caught:
        parse(table)
    assert re.search(reason, str(caught.value)), str(caught.value)
    if name == "unknown":
        assert parse(table, ignore=["quantization_config.rotated"]) == parse(
            {"model_type": "llama", **tiny.LLAMA}
        )


def test_tensors_that_are_not_as_the_method_has_them(tmp_path):
    config, params = wide("llama")
    path = tmp_path / "model"
    hub.save(path, config, params, model_type="llama", quantise="fp8-block")
    right = named(path)
    layer = "model.layers.0.mlp"
    wrong = dict(right)
    del wrong[f"{layer}.up_proj.weight_scale_inv"]
    wrong[f"{layer}.down_proj.weight_scale_inv"] = torch.ones(2, 1)
    wrong["model.layers.1.mlp.up_proj.weight"] = params["embed"][:128].new_zeros(256, 128)
    rewrite(path, wrong)
    with pytest.raises(ValueError, match="quantised weights are not as") as caught:
        hub.load(path)
    for line in (
        "up_proj.weight: got no scales; wanted model.layers.0.mlp.up_proj.weight_scale_inv beside",
        "down_proj.weight_scale_inv: got [2, 1]; wanted [1, 2], for [128, 256]",
    ):
        assert line in str(caught.value)
    rewrite(path, {**right, "model.layers.1.mlp.up_proj.weight": torch.zeros(256, 128)})
    with pytest.raises(ValueError, match=r"up_proj.weight_scale_inv: got a tensor; wanted none"):
        hub.load(path)
    entry = json.loads((path / "config.json").read_text())["quantization_config"]
    rewrite(path, right, quantization_config={**entry, "modules_to_not_convert": ["mlp.up_proj"]})
    with pytest.raises(
        ValueError, match=r"0.mlp.up_proj.weight: got a quantised tensor; wanted a p"
    ):
        hub.load(path)
    table = json.loads((path / "config.json").read_text())
    del table["quantization_config"]
    (path / "config.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="must say how: quantization_config"):
        hub.load(path)


def test_what_is_not_exported(tmp_path):
    config, params = wide("llama", hidden_size=96, intermediate_size=192, head_dim=24)

    def refusal(config, params, **options) -> str:
        with pytest.raises(ValueError, match="wanted") as caught:
            hub.save(tmp_path / "out", config, params, **options)
        assert not list(tmp_path.iterdir())
        return str(caught.value)

    assert "multiples of 128" in refusal(config, params, quantise="fp8-block")
    assert "did you mean 'fp8-row'" in refusal(config, params, quantise="fp8-rows")
    params["blocks"]["mlp"]["up"]["w"][1, 2, 3] = torch.inf
    said = refusal(config, params, quantise="fp8-row")
    assert "layers.1.mlp.up_proj.weight: got infinite elements or NaN" in said
    for kind, family in (("gpt2", "GPT2"), ("gpt_oss", "GptOss")):
        sizes = tiny.GPT2 if kind == "gpt2" else tiny.GPT_OSS
        theirs = getattr(tiny.transformers, f"{family}Config")(**sizes).to_dict()
        other = parse({**theirs, "architectures": None, "dtype": None})
        weights = ft.init_params(ft.random.key(0), gpt.defs(other))
        said = refusal(other, weights, model_type=kind, quantise="fp8-row")
        assert "wanted weights of linear layers, [outputs, inputs]" in said
