"""Adapters of PEFT: products by hand from its two tensors, and its own models where it is there."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import functron as ft
from functron import gpt, hub, lora, tree
from functron.cli.main import main
from functron.hub import adapters
from tests.hub import tiny

RANK = 3
TARGETS = {
    "llama": r".*(q_proj|o_proj|gate_proj|down_proj)",
    "gpt2": r".*(c_attn|c_fc|mlp.c_proj)",
    "phi3": r".*(qkv_proj|gate_up_proj|down_proj)",
}


def write_adapter(folder, named, targets, seed=0, **settings):
    """An adapter of PEFT's layout of the matrices that match, and what each adds to its matrix."""
    draw, found, added = torch.Generator().manual_seed(seed), {}, {}
    conv = settings.get("fan_in_fan_out", False)
    for name, w in named.items():
        if not name.endswith(".weight") or not re.fullmatch(targets, name[: -len(".weight")]):
            continue
        out, size = reversed(w.shape) if conv else w.shape
        a, b = (torch.randn(n, generator=draw) for n in ((RANK, size), (out, RANK)))
        stem = f"base_model.model.{name[: -len('.weight')]}"
        found |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        added[name] = (b.double() @ a.double()).T if conv else b.double() @ a.double()
    folder.mkdir(exist_ok=True)
    save_file(found, folder / "adapter_model.safetensors")
    table = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": targets, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(table))
    return added


@pytest.fixture
def stored(request, tmp_path):
    """A tiny model in a folder, its config and float32 parameters, and its tensors by name."""
    path = tiny.store(tiny.make(request.param), tmp_path / "base")
    found = hub.read_config(path)
    params = hub.load(path, found)
    return path, found, params, hub.to_tensors(found, params, model_type=request.param)


@pytest.mark.parametrize("stored", ["llama", "gpt2", "phi3"], indirect=True)
@pytest.mark.parametrize("stabilised", [False, True])
def test_products_are_added_to_matrices(stored, stabilised, tmp_path):
    path, config, params, named = stored
    kind = json.loads((path / "config.json").read_text())["model_type"]
    settings = {"use_rslora": stabilised, "fan_in_fan_out": kind == "gpt2"}
    added = write_adapter(tmp_path / "adapter", named, TARGETS[kind], **settings)
    assert len(added) >= 2 * config.num_layers
    made, found = adapters.load_adapter(tmp_path / "adapter", config, model_type=kind)
    both = lora.attach(params, found)
    merged = hub.to_tensors(config, lora.merge(both), model_type=kind)
    scale = 6 / RANK**0.5 if stabilised else 6 / RANK
    for name, w in named.items():
        want = w.double() + scale * added[name] if name in added else w.double()
        torch.testing.assert_close(merged[name].double(), want, rtol=1e-5, atol=1e-5)
    tokens = torch.arange(12)[None] % config.vocab_size
    torch.testing.assert_close(
        gpt.forward(config, both, tokens),
        gpt.forward(config, lora.merge(both), tokens),
        rtol=1e-3,
        atol=1e-3,
    )
    assert both.keys() == tree.map(lambda d: d, lora.lora_defs(gpt.defs(config), made)).keys()

    # and back: those that transformers fuses need one `a`, which trained ones do not have
    if kind != "llama":
        with pytest.raises(
            ValueError, match=r"lora_A.weight: got one of .*/lora/a; wanted matrices that"
        ):
            adapters.save_adapter(tmp_path / "out", config, both, model_type=kind)
        return
    adapters.save_adapter(tmp_path / "out", config, both, model_type=kind, base=str(path))
    before, after = (load_file(tmp_path / x / adapters.WEIGHTS) for x in ("adapter", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    table = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert table["lora_alpha"] / table["r"] == pytest.approx(scale)
    assert table["target_modules"] == ["down_proj", "gate_proj", "o_proj", "q_proj"]


@pytest.mark.parametrize("stored", ["llama"], indirect=True)
def test_several_adapters(stored, tmp_path):
    """One after another, and a weighted sum of two that are of different layers and scales."""
    _, config, params, named = stored
    first = write_adapter(tmp_path / "one", named, ".*(q_proj|up_proj)", seed=1)
    second = write_adapter(tmp_path / "two", named, ".*(q_proj|v_proj)", seed=2, lora_alpha=3)
    trees = [adapters.load_adapter(tmp_path / x, config)[1] for x in ("one", "two")]
    whole = lora.merge(lora.attach(params, lora.combine(zip(trees, (0.5, -2.0), strict=True))))
    merged = hub.to_tensors(config, whole, model_type="llama")
    for name, w in named.items():
        want = w.double() + 0.5 * 2 * first.get(name, 0) - 2.0 * second.get(name, 0)
        torch.testing.assert_close(merged[name].double(), want, rtol=1e-5, atol=1e-5)
    switched = lora.attach(lora.attach(params, trees[0]), trees[1])
    assert ft.tree.paths(switched) == ft.tree.paths(lora.attach(params, trees[1]))


@pytest.mark.parametrize("stored", ["mixtral"], indirect=True)
def test_adapters_of_experts_stay_here(stored, tmp_path):
    """PEFT's layout has no name for them; those of other layers of such models are exact."""
    _, config, params, named = stored
    write_adapter(tmp_path / "own", named, ".*(q_proj|o_proj)")
    found = adapters.load_adapter(tmp_path / "own", config)[1]
    adapters.save_adapter(tmp_path / "out", config, lora.attach(params, found))
    before, after = (load_file(tmp_path / x / adapters.WEIGHTS) for x in ("own", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    defs = lora.lora_defs(gpt.defs(config), lora.LoRA(2, 2.0, ("blocks/moe/experts/*",)))
    both = ft.init_params(ft.random.key(0), defs)
    with pytest.raises(ValueError, match="blocks/moe/experts/up: got adapters of experts"):
        adapters.save_adapter(tmp_path / "experts", config, both)


@pytest.mark.parametrize("stored", ["llama"], indirect=True)
def test_a_folder_with_base_and_adapter_is_both(stored, tmp_path):
    path, config, params, named = stored
    write_adapter(path, named, TARGETS["llama"])
    found, both, made = adapters.load_with_adapter(path)
    assert found == config
    assert made.rank == RANK
    assert {"blocks/attention/q", "blocks/mlp/down"} <= {*made.targets}
    write_adapter(
        tmp_path / "alone", named, TARGETS["llama"], base_model_name_or_path=str(tmp_path / "none")
    )
    with pytest.raises(ValueError, match=r"got an adapter of .*none; wanted a base in a folder"):
        adapters.load_with_adapter(tmp_path / "alone")
    assert all(map(torch.equal, tree.leaves(lora.plain(both)), tree.leaves(params)))


@pytest.mark.parametrize("stored", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "drop", "message"),
    [
        ({"use_dora": True}, "", "lora_magnitude_vector: got no such tensor"),
        ({"use_dora": True}, "", "base: got None, for an adapter of DoRA; wanted the parameters"),
        ({"rank_pattern": {"q_proj": 0}}, "", "rank_pattern: got {'q_proj': 0}; wanted patterns"),
        ({"alpha_pattern": {"(": 2}}, "", r"alpha_pattern: got {'\(': 2}; wanted patterns of"),
        (
            {"target_parameters": ["x"]},
            "",
            r"target_parameters: got \['x'\]; wanted None; fix: merge",
        ),
        ({"peft_type": "IA3"}, "", "peft_type: got 'IA3'; wanted 'LORA'"),
        ({"rank_pattern": {"q_proj": 2}}, "", r"lora_A.weight: got \[3, 32\]; wanted \[2, 32\]"),
        ({"r": 4}, "", r"lora_A.weight: got \[3, 32\]; wanted \[4, 32\]"),
        (
            {},
            "layers.1",
            "layers.1.self_attn.q_proj.lora_A.weight: got no such tensor; wanted one in",
        ),
        ({}, "names", "got a tensor; wanted adapters of linear layers of blocks"),
    ],
)
def test_what_is_not_read(stored, settings, drop, message, tmp_path):
    _, config, _, named = stored
    named = {name: w for name, w in named.items() if not drop or drop not in name}
    if drop == "names":
        named = {"lm_head.weight": torch.zeros(61, 32)}
    targets = ".*(q_proj|lm_head)" if drop != "names" else "lm_head"
    write_adapter(
        tmp_path / "adapter", named, ".*q_proj" if drop != "names" else targets, **settings
    )
    with pytest.raises(ValueError, match=message):
        adapters.load_adapter(tmp_path / "adapter", config)


@pytest.mark.parametrize("stored", ["llama"], indirect=True)
def test_peft_computes_the_same(stored, tmp_path):
    """Logits of an adapter that it made, and of one that it reads."""
    peft = pytest.importorskip("peft")
    path, config, params, _ = stored
    tokens = torch.arange(12)[None] * 5 % config.vocab_size

    def logits(model):
        with torch.no_grad():
            return model(tokens).logits

    base = tiny.transformers.AutoModelForCausalLM.from_pretrained(path)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=True,
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(base, settings)
    want = logits(model)
    model.save_pretrained(tmp_path / "theirs")
    _, found = adapters.load_adapter(tmp_path / "theirs", config)
    both = lora.attach(params, found)
    got = gpt.forward(config, both, tokens)[..., : config.vocab_size]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(gpt.forward(config, params, tokens)[..., : config.vocab_size], want)
    adapters.save_adapter(tmp_path / "ours", config, both, base=str(path))
    base = tiny.transformers.AutoModelForCausalLM.from_pretrained(path)
    again = logits(peft.PeftModel.from_pretrained(base, tmp_path / "ours"))
    torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["llama"], indirect=True)
def test_dora_goes_on_in_a_run(stored, tmp_path):
    """To its folder again, and merged, as peft merges it; and not without its matrices."""
    path, config, params, _ = stored
    peft = pytest.importorskip("peft")
    folder, run = tmp_path / "adapter", tmp_path / "run"
    model = make_peft(path, **DORA, **PATTERNS, target_modules=["q_proj", "o_proj", "up_proj"])
    model.save_pretrained(folder)
    assert main(["convert", f"hf:{folder}", f"run:{run}"]) == 0
    train = ["train", "--resume", "--out", str(run), "--steps", "2", "--seq", "8"]
    train += ["--format", "mock", "--mesh", "tp=2", "--global-batch", "4"]
    assert main([*train, "--learning-rate.warmup-ratio", "0"]) == 0
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'after'}", "--adapter"]) == 0
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'merged'}"]) == 0
    before, after = (load_file(at / adapters.WEIGHTS) for at in (folder, tmp_path / "after"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    base = tiny.transformers.AutoModelForCausalLM.from_pretrained(path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "after").merge_and_unload()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, w in theirs.state_dict().items():
        torch.testing.assert_close(merged[name], w, rtol=1e-4, atol=1e-5)

    found = adapters.load_adapter(folder, config, base=params)[1]
    with pytest.raises(ValueError, match="params: got adapters alone; wanted the parameters with"):
        adapters.save_adapter(tmp_path / "x", config, found)
    both = lora.attach(params, found)
    with pytest.raises(ValueError, match=r"lora/magnitude: got a rank's shards; wanted whole"):
        lora.merge(both, split=True)
    with pytest.raises(ValueError, match="adapters: got DoRA; wanted LoRA, which can be summed"):
        lora.combine([(found, 1.0)])


@pytest.mark.parametrize("stored", ["llama"], indirect=True)
def test_an_adapter_goes_on_in_a_run_and_comes_back(stored, tmp_path):
    """Its folder as a run, which trains it alone; and what it became, as PEFT has it."""
    path, _, _, named = stored
    folder, run = tmp_path / "adapter", tmp_path / "run"
    write_adapter(folder, named, TARGETS["llama"], base_model_name_or_path=str(path))
    assert main(["convert", f"hf:{folder}", f"run:{run}"]) == 0
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'same'}", "--adapter"]) == 0
    about = json.loads((tmp_path / "same" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(path)
    before, same = (load_file(at / adapters.WEIGHTS) for at in (folder, tmp_path / "same"))
    assert before.keys() == same.keys()
    assert all(torch.equal(before[name], same[name]) for name in before)
    train = ["train", "--resume", "--out", str(run), "--steps", "2", "--seq", "8"]
    train += ["--format", "mock", "--mesh", "fsdp=2,tp=2", "--global-batch", "4"]
    assert main([*train, "--learning-rate.warmup-ratio", "0"]) == 0
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'after'}", "--adapter"]) == 0
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'merged'}"]) == 0
    after = load_file(tmp_path / "after" / adapters.WEIGHTS)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, w in named.items():
        a, b = (
            after.get(f"base_model.model.{name[: -len('weight')]}lora_{x}.weight") for x in "AB"
        )
        want = w if a is None or b is None else w + 6 / RANK * b @ a
        torch.testing.assert_close(merged[name], want, rtol=1e-4, atol=1e-4)
    assert main(
        ["convert", f"run:{run}", f"hf:{tmp_path / 'x'}", "--adapter", "--dtype", "bfloat16"]
    )


DORA = {"r": RANK, "lora_alpha": 5, "use_dora": True, "init_lora_weights": False}
PATTERNS = {
    "rank_pattern": {"up_proj": 2, r"layers\.1\.self_attn\.q_proj": 5},
    "alpha_pattern": {"down_proj": 9, "layers.0.self_attn.v_proj": 3},
}


def make_peft(path, seed=0, **settings):
    """A model of peft in float64 with an adapter whose magnitudes are not the lengths."""
    peft = pytest.importorskip("peft")
    base = tiny.transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "magnitude" in name:
                value.mul_(1 + 0.3 * torch.rand_like(value))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {**DORA, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
        {**DORA, **PATTERNS, "use_dora": False, "target_modules": "all-linear"},
        {**DORA, **PATTERNS, "use_rslora": True, "target_modules": "all-linear"},
    ],
    ids=["dora", "patterns", "dora-patterns"],
)
@pytest.mark.parametrize("stored", ["llama"], indirect=True)
def test_peft_learns_the_same(stored, settings, tmp_path):
    """Logits, gradients of the adapter, the merged model and the way back, with DoRA and patterns."""
    path, config, params, _ = stored
    model = make_peft(path, **settings)
    model.save_pretrained(tmp_path / "theirs")
    made, found = adapters.load_adapter(tmp_path / "theirs", config, base=params)
    both = lora.attach(params, found)
    tokens = tiny.tokens()
    want = model(tokens).logits
    got = gpt.forward(config, both, tokens)[..., : config.vocab_size]
    close = {"rtol": 1e-4, "atol": 1e-4 * want.abs().max().item()}
    torch.testing.assert_close(got, want.detach(), **close)
    merged = gpt.forward(config, lora.merge(both), tokens)[..., : config.vocab_size]
    torch.testing.assert_close(merged, want.detach(), **close)
    adapters.save_adapter(tmp_path / "ours", config, both, base=str(path))
    before, after = (load_file(tmp_path / x / adapters.WEIGHTS) for x in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, value in before.items():  # lengths are kept as differences
        limit = 1e-6 * value.abs().max().item() if "magnitude" in name else 0
        torch.testing.assert_close(after[name], value, rtol=0, atol=limit)
    peft = pytest.importorskip("peft")
    base = tiny.transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")(tokens).logits
    torch.testing.assert_close(again, want.detach(), **close)

    # gradients, on one rank and on meshes that split matrices either way
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    loss = model(tokens, labels=tokens).loss
    theirs = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    theirs = {k.replace(".default", "").removesuffix(".weight"): g for k, g in theirs.items()}
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=ft.nn.IGNORE_INDEX)
    batch = {"tokens": tokens, "targets": targets, "rows": torch.arange(len(tokens))}
    defs = lora.lora_defs(gpt.defs(config), made)
    for mesh in (ft.Mesh(), ft.Mesh(fsdp=2, tp=2)):
        specs = ft.param_specs(defs, gpt.rules(config, mesh))
        options = ft.ModelOptions(gather=ft.Gather(specs))

        def step(weights, data, specs=specs, options=options):
            frozen, own = lora.split(weights)

            def mean_loss(own):
                weights = tree.join(frozen, own)
                return gpt.loss(config, weights, data, options) / gpt.num_targets(data)

            return ft.sync_gradients(ft.grad(mean_loss)(own), lora.split(specs)[1])

        mapped = ft.shard_map(step, mesh, (specs, ft.P(ft.DATA_AXES)), lora.split(specs)[1])
        grads = mapped(both, batch)
        layouts = adapters._find_layouts(
            hub.FORMATS["llama"], config, hub.FORMATS["llama"].rules, defs
        )
        leaves = dict(zip(tree.paths(grads), tree.leaves(grads), strict=True))
        for layout, index in adapters.tensors(layouts):
            name = layout.name(index)
            want = theirs["base_model.model." + name.removesuffix(".weight")]
            got = layout.to_theirs([leaves[layout.parts[0].path][index]])
            got = got[tuple(map(slice, want.shape))]
            limit = 2e-4 * max(want.abs().max().item(), 1e-3)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=limit)


def test_a_base_in_four_bits_from_a_model_to_files(tmp_path):
    """A run of a folder's model that keeps its matrices in 4 bits, goes on, and is exported."""
    size = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 128}
    path, run = tiny.store(tiny.make("llama", **size), tmp_path / "base"), tmp_path / "run"
    assert main(["convert", f"hf:{path}", f"run:{run}"]) == 0
    train = ["train", "--resume", "--out", str(run), "--seq", "8", "--format", "mock"]
    train += ["--global-batch", "4", "--learning-rate.warmup-ratio", "0", "--lora-rank", "3"]
    train += ["--lora-base", "mxfp4", "--save-every", "1"]
    assert main([*train, "--steps", "1", "--mesh", "fsdp=2"]) == 0
    stored = ft.checkpoint.Checkpoint(ft.checkpoint.latest(run / "checkpoints"))
    values = stored["params/blocks/mlp/up/w/values"]
    assert (values.shape, values.dtype) == ((tiny.LAYERS, 64, 64), torch.uint8)
    assert main([*train, "--steps", "2", "--mesh", "tp=2"]) == 0
    assert main([*train[:-4], "--steps", "3", "--lora-base", "plain"]) != 0  # it has begun with it
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'adapter'}", "--adapter"]) == 0
    assert main(["convert", f"run:{run}", f"hf:{tmp_path / 'merged'}"]) == 0
    config = hub.read_config(path)
    params = hub.load(path, config)
    made, found = adapters.load_adapter(tmp_path / "adapter", config)
    packed = lora.pack(lora.attach(params, found))
    want = hub.to_tensors(config, lora.merge(packed), model_type="llama")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, w in want.items():
        torch.testing.assert_close(merged[name], w, rtol=1e-6, atol=1e-6)
    assert made.rank == 3
    up = "model.layers.0.mlp.up_proj.weight"
    assert (want[up] - load_file(path / "model.safetensors")[up]).norm() / want[up].norm() > 0.01
