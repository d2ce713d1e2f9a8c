"""Low-rank additions to modules: numbers, frozen weights, and files that PEFT reads.

The oracle is PEFT's own model of the exported adapter, and of its layers torch's autograd.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from functron import lora, random, tree
from functron.apps.zoo.module_files import make_format
from functron.apps.zoo.modules import build_module, flatten
from functron.checkpoint import Checkpoint
from functron.cli.main import main
from functron.models.lora import LoRA
from functron.spmd.params import init_params
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.convert import convert
from tests.apps.zoo.test_module_trial import find_config
from tests.apps.zoo.test_modules import losses, run_config
from tests.apps.zoo.tiny_modules import (
    MESHES,
    adapted_defs,
    batch,
    largest_error,
    partitioned,
    write_folder,
)

pytest.importorskip("transformers")
WEIGHTS = "model.safetensors"
FORMATS = {"hf-module": make_format()}


def save_module(kind: str, folder: Path) -> str:
    """The origin of a tiny module with weights."""
    # a method of transformers
    module: Any = build_module(write_folder(kind, folder / "config", vocab_size=256))
    module.save_pretrained(folder / "base")
    return f"hf-module:{folder / 'base'}"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_additions_are_those_of_matrices(tmp_path, kind):
    """The loss is that of the module with the sums, and gradients those of the sums' by hand."""
    config = find_config(write_folder(kind, tmp_path))
    added = adapted_defs(config, LoRA(3, 6.0))
    names = [path for path in tree.paths(added) if path.endswith("lora/a")]
    assert len(names) >= 8
    assert not any("head" in name for name in names)
    key = random.key(3)
    begun = flatten(init_params(key, added))
    params = {
        name: random.normal(random.fold_in(key, i), tuple(x.shape), x.dtype) * 0.1
        if ".lora." in name and not name.endswith("scale")
        else x
        for i, (name, x) in enumerate(begun.items())
    }
    module: Any = build_module(config.origin, seed=0).double()
    given, own = batch(config.vocab_size), dict(module.named_parameters())
    sums, leaves = {}, {}
    for name in own:
        sums[name] = params[name]
        if (start := name.removesuffix("weight") + "lora.") + "a" in params:
            a, b = (params[start + part].clone().requires_grad_() for part in "ab")
            leaves |= {start + "a": a, start + "b": b}
            sums[name] = params[name] + 2 * a @ b
    call = torch.func.functional_call
    logits = call(module, sums, (given["tokens"],), {"use_cache": False}).logits
    total = F.cross_entropy(logits.mT, given["targets"], reduction="sum")
    grads = dict(zip(leaves, torch.autograd.grad(total, [*leaves.values()]), strict=True))
    for sizes in ({}, MESHES["dp=2,tp=2"]):
        value, found = partitioned(config, params, adapters=LoRA(3, 6.0), **sizes)
        torch.testing.assert_close(value, total.detach(), rtol=1e-6, atol=0)
        assert largest_error({name: found[name] for name in grads}, grads) < 5e-6
    whole = tree.unflatten(tree.structure(added), [params[name] for name in flatten(added)])
    merged = flatten(lora.merge(whole))
    assert merged.keys() == own.keys()
    for name, value in merged.items():
        torch.testing.assert_close(value, sums[name].detach())


def arguments(origin: str, out: Path, *more) -> list[str]:
    text = str(Path(__file__))
    return list(map(str, [
        "train", "--model", origin, "--data", text, "--seq", 16, "--global-batch", 4, "--out", out,
        "--learning-rate.total-steps", 9, "--lora-rank", 4, *more,
    ]))  # fmt: skip


@pytest.mark.parametrize(("kind", "target"), [("llama", "q_proj,down_proj"), ("gpt2", "c_fc")])
def test_an_adapter_is_read_by_peft(tmp_path, kind, target):
    """A run that goes on elsewhere; its adapter beside the base, and its files with the sums."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    origin, run = save_module(kind, tmp_path), tmp_path / "run"
    more = ["--lora-targets", target, "--learning-rate.peak", "0.05"]
    assert main(arguments(origin, run, *more, "--mesh", "dp=2", "--steps", 2)) == 0
    goes_on = ["--resume", "--mesh", "fsdp=2,tp=2", "--steps", 4]
    assert main(arguments(origin, run, *more, *goes_on)) == 0
    whole = tmp_path / "whole"
    assert main(arguments(origin, whole, *more, "--steps", 4)) == 0
    both = [[r["loss"] for r in run_folder.records(path) if "loss" in r] for path in (run, whole)]
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    convert(f"run:{run}", f"hf-module:{tmp_path / 'adapter'}", formats=FORMATS, adapter=True)
    convert(f"run:{run}", f"hf-module:{tmp_path / 'sums'}", formats=FORMATS)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(24).reshape(2, 12) * 7 % 250
    before = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    logits = adapted(ids).logits
    merged: Any = build_module(f"hf-module:{tmp_path / 'sums'}")
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-5, atol=1e-5)
    assert (logits - before).abs().max() > 1e-2
    own, module = dict(merged.named_parameters()), build_module(origin)
    ends = tuple(f"{x}.weight" for x in target.split(","))
    for name, value in module.named_parameters():
        assert torch.equal(own[name], value) != name.endswith(ends)
    newest = run_folder.newest(run)
    assert newest is not None
    stored = Checkpoint(newest)
    for name, value in module.named_parameters():  # the base is as it was
        assert torch.equal(stored[f"params/{name.replace('.', '/')}"][:], value)


def save_peft(kind: str, base: Path, folder: Path) -> Any:
    """PEFT's own model of an adapter with several ranks and factors, all of it random, saved."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    names, small = {
        "llama": (["q_proj", "down_proj"], "down_proj"),
        "gpt2": (["attn.c_proj", "c_fc"], "c_fc"),
    }[kind]
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=names, use_rslora=kind == "llama", task_type="CAUSAL_LM",
        rank_pattern={small: 2}, alpha_pattern={f"1.*{small}": 3}, fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip
    made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    made.save_pretrained(folder)
    return made


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return pytest.importorskip("safetensors.torch").load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_an_adapter_of_peft_goes_on_training(tmp_path, kind):
    """Read and written it is the same to the bit; trained on any mesh, PEFT reads it."""
    save_module(kind, tmp_path)
    given, base = tmp_path / "given", tmp_path / "base"
    ids = torch.arange(24).reshape(2, 12) * 7 % 250
    before = save_peft(kind, base, given)(ids).logits
    runs = [tmp_path / "one", tmp_path / "other"]
    for run, mesh in zip(runs, ([], ["--mesh", "fsdp=2,tp=2"]), strict=True):
        convert(f"hf-module:{given}", f"run:{run}", formats=FORMATS)
        if run is runs[0]:
            convert(f"run:{run}", f"hf-module:{tmp_path / 'same'}", formats=FORMATS, adapter=True)
            convert(f"run:{run}", f"hf-module:{tmp_path / 'begun'}", formats=FORMATS)
        args = [
            "train", "--resume", "--out", str(run), "--data", __file__, "--seq", "16", "--steps",
            "2", "--global-batch", "4", "--learning-rate.peak", "0.05", *mesh,
        ]  # fmt: skip
        assert main(args) == 0
    one, other = read_tensors(given), read_tensors(tmp_path / "same")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    begun: Any = build_module(f"hf-module:{tmp_path / 'begun'}")
    torch.testing.assert_close(begun(ids).logits, before, rtol=1e-5, atol=1e-5)
    both = [[r["loss"] for r in run_folder.records(path) if "loss" in r] for path in runs]
    assert both[0] == pytest.approx(both[1], rel=1e-5)
    convert(f"run:{runs[1]}", f"hf-module:{tmp_path / 'adapter'}", formats=FORMATS, adapter=True)
    convert(f"run:{runs[1]}", f"hf-module:{tmp_path / 'sums'}", formats=FORMATS)
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    for folder, logits in (("same", before), ("adapter", None)):
        own = transformers.AutoModelForCausalLM.from_pretrained(base)
        found = peft.PeftModel.from_pretrained(own, tmp_path / folder)(ids).logits
        if logits is None:
            merged: Any = build_module(f"hf-module:{tmp_path / 'sums'}")
            logits = merged(ids).logits
            assert (logits - before).abs().max() > 1e-2
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_adapters_that_are_not_read_say_why(tmp_path):
    save_module("llama", tmp_path)
    given, base = tmp_path / "given", tmp_path / "base"
    save_peft("llama", base, given)
    settings = json.loads((given / "adapter_config.json").read_text())
    for changes, said in (
        ({"use_dora": True}, "use_dora: got true; wanted LoRA, for a module as it is"),
        ({"bias": "all"}, "bias: got 'all'"),
        (
            {"rank_pattern": {}},
            r"down_proj.lora_A.weight: got \[2, 48\]; wanted \[4, 48\]",
        ),
        ({"base_model_name_or_path": str(given)}, "wanted a base in a folder of this machine"),
    ):
        (given / "adapter_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ValueError, match=said):
            convert(f"hf-module:{given}", f"run:{tmp_path / 'run'}", formats=FORMATS)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (base / name).write_bytes((given / name).read_bytes())
    with pytest.raises(ValueError, match="the adapter and its base in one folder"):
        convert(f"hf-module:{base}", f"run:{tmp_path / 'run'}", formats=FORMATS)


def test_what_is_no_layer_is_refused(tmp_path):
    origin = write_folder("llama", tmp_path)
    for settings, said in (
        ({"lora_targets": "q_pro"}, "'q_pro'; wanted a linear layer; fix: .*q_proj"),
        ({"lora_targets": "embed_tokens"}, "wanted a linear layer"),
        ({"lora_targets": "input_layernorm"}, "wanted a linear layer"),
    ):
        with pytest.raises(ValueError, match=said):
            validate(run_config(origin, lora_rank=2, **settings))
    usual = losses(run_config(origin, lora_rank=2))
    found = losses(run_config(origin, lora_rank=2, mesh="dp=2,tp=2", zero=1, microbatches=2))
    assert found == pytest.approx(usual, rel=1e-7)
    assert usual != pytest.approx(losses(run_config(origin)), rel=1e-7)
    full = tmp_path / "run"
    assert main(["train", "--model", origin, "--steps", "1", "--seq", "16", "--format", "mock",
                 "--out", str(full)]) == 0  # fmt: skip
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"with an adapter in it; .*merge_and_unload"):
        build_module(origin)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="a run that trains all parameters; wanted one with lora"):
        convert(f"run:{full}", f"hf-module:{tmp_path / 'no'}", formats=FORMATS, adapter=True)


def test_stages_plan_with_the_additions_of_all(tmp_path):
    """The values that cross to a stage depend on the additions there, which the one before has to know."""
    origin = write_folder("cohere", tmp_path)
    given: dict[str, Any] = {"lora_rank": 3, "microbatches": 2, "learning_rate__peak": 0.05}
    cut: dict[str, Any] = {"mesh": "pp=2,tp=2", "sequence_parallel": True}
    found = losses(run_config(origin, **given, **cut))
    assert found == pytest.approx(losses(run_config(origin, **given)), rel=1e-6)
    assert found[0] != found[2]
