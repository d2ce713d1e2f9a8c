"""Inputs of modules besides tokens: keys of dropout, and the places of packed documents."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from functron import Mesh, random
from functron.apps.zoo import modules
from functron.apps.zoo.modules import ModuleConfig, build_module, flatten
from functron.cli.main import main
from functron.data import pack
from functron.data.indexed import IndexedWriter
from functron.models.family import list_presets
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.run import prepare
from functron.training.train import train
from tests.apps.zoo.test_modules import losses, run_config
from tests.apps.zoo.tiny_modules import (
    FAMILIES,
    MESHES,
    batch,
    largest_error,
    partitioned,
    write_folder,
)

pytest.importorskip("transformers")

RATES: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1},
    "mixtral": {"attention_dropout": 0.2},
    "falcon": {"hidden_dropout": 0.3},
}


def find_config(origin: str) -> ModuleConfig:
    found = list_presets()[origin]
    assert isinstance(found, ModuleConfig)
    return replace(found, dtype="float64")


# --- dropout


class MaskedDropout(TorchFunctionMode):
    """Dropout by the masks of the whole batch, each of its own key."""

    def __init__(self, key):
        super().__init__()
        self.key, self.count = key, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given: dict[str, Any] = dict(zip(("input", "p", "training"), args, strict=False))
        given |= kwargs or {}
        x, p = given["input"], given.get("p", 0.5)
        if not p or not given.get("training", True):
            return x
        self.count += 1
        mask = random.bernoulli(random.fold_in(self.key, self.count), 1 - p, tuple(x.shape))
        return x * mask / (1 - p)


@pytest.mark.parametrize("mesh", [pytest.param("tp=2", marks=pytest.mark.full), "dp=2,tp=2"])
def test_dropout_is_that_of_the_module_with_the_same_masks(tmp_path, mesh):
    """The module computes attention one operation after another, as dropout in the fused one."""
    config = find_config(write_folder("gpt2", tmp_path, **RATES["gpt2"]))
    key = random.key(7)
    module: Any = build_module(config.origin).double().train()
    module.set_attn_implementation("eager")
    given = batch(config.vocab_size)
    own = dict(module.named_parameters())
    masks = MaskedDropout(key)
    with masks:
        logits = module(input_ids=given["tokens"], use_cache=False).logits
    assert masks.count == 7  # the embedding's, and three in each layer
    total = F.cross_entropy(logits.mT, given["targets"], reduction="sum")
    grads = dict(zip(own, torch.autograd.grad(total, [*own.values()]), strict=True))
    params = {name: x.detach() for name, x in own.items()}
    value, found = partitioned(config, params, key=key, **MESHES[mesh])
    torch.testing.assert_close(value, total.detach(), rtol=1e-12, atol=0)
    assert largest_error(found, grads) < 1e-12
    without, _ = partitioned(config, params, **MESHES[mesh])
    assert abs(without / total - 1) > 0.01


@functools.lru_cache(1)
def dropped_losses(origin: str) -> list[float]:
    return losses(run_config(origin, global_batch=8))


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(x, marks=pytest.mark.full) for x in RATES if x != "gpt2")]
)
def test_runs_with_dropout_are_the_same_on_all_meshes(tmp_path, kind):
    origin = write_folder(kind, tmp_path, **RATES[kind])
    usual = dropped_losses(origin)
    settings = {"mesh": "dp=2,fsdp=2,tp=2", "microbatches": 2, "remat": "full"}
    assert losses(run_config(origin, **{**settings, "global_batch": 8})) == pytest.approx(
        usual, rel=1e-7
    )
    without = losses(run_config(origin, global_batch=8, module__dropouts="off"))
    assert without != pytest.approx(usual, rel=1e-3)


# --- packing

LENGTHS = (9, 5, 12, 4, 2, 16, 1, 14)


def check_packing(config: ModuleConfig, **sizes: int) -> None:
    """The loss and gradients of packed documents are the sums of those of each alone."""
    documents = [np.arange(n) * (7 + i) % 61 + 1 for i, n in enumerate(LENGTHS)]
    packed = pack(documents, 16)
    assert len(packed["tokens"]) == 4
    module: Any = build_module(config.origin).double()
    fixed = {"use_cache": False} if hasattr(module, "config") else {}
    total = torch.zeros((), dtype=torch.float64)
    for one in documents:
        tokens = torch.from_numpy(one).unsqueeze(0)
        out = module(tokens, **fixed)
        logits = getattr(out, "logits", out)
        total = total + F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
    own = dict(module.named_parameters())
    grads = torch.autograd.grad(total, [*own.values()], allow_unused=True)
    pairs = zip(own.items(), grads, strict=True)
    wanted = {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}
    params = {name: x.detach() for name, x in own.items()}
    value, found = partitioned(config, params, packed, **sizes)
    torch.testing.assert_close(value, total.detach(), rtol=1e-7, atol=0)
    assert largest_error(found, wanted) < 5e-6


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        ("llama", "positions"),
        ("cohere2", "positions"),
        ("opt", "mask"),
        ("mpt", "bias"),
        ("gpt_oss", "biases"),
    ],
)
def test_packed_documents_have_the_losses_that_they_have_alone(tmp_path, kind, packing):
    """Also where layers have windows, as those of Cohere 2 and gpt-oss, whose sinks stay."""
    config = replace(find_config(write_folder(kind, tmp_path)), dropouts="off")
    assert modules.open_module(config).packing == packing
    check_packing(config, dp=2, tp=2)


UNPACKED = ("bamba", "bloom", "falcon_h1", "minimax", "openai-gpt")
"""States of recurrences go on through a sample; or masks are of padding alone."""


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_are_packed(tmp_path, kind):
    config = replace(find_config(write_folder(kind, tmp_path)), dropouts="off")
    if kind in UNPACKED:
        assert not modules.open_module(config).packing
        return
    check_packing(config, dp=2)


def write_tokens(path: Path) -> str:
    """A file of documents of many lengths."""
    with IndexedWriter(path, np.uint16) as writer:
        for size in (30, 50, 70, 11, 23, 8):
            writer.add(np.arange(size) % 61)
    return str(path)


def test_steps_are_those_of_torch_s_adamw(tmp_path):
    """Of three steps, whose microbatches and ranks have other numbers of targets."""
    origin = write_folder("llama", tmp_path / "model")
    config = run_config(
        origin, data=write_tokens(tmp_path / "tokens"), pack="best-fit", format="tokens",
        seq=32, mesh="dp=2", microbatches=2, zero=1,
    )  # fmt: skip
    run = prepare(config, Mesh(dp=2))
    module: Any = build_module(origin).double()
    with torch.no_grad():
        for name, x in module.named_parameters():
            x.copy_(flatten(run.state.params)[name])
    batches = [run.host_batch(step) for step in range(3)]
    counts = [(x["targets"] != -100).view(4, -1).sum(1).tolist() for x in batches]
    assert any(len({*each}) > 1 for each in counts)
    own = config.optimizer
    groups = [
        {"params": [x for x in module.parameters() if (x.dim() > 1) == decays],
         "weight_decay": own.weight_decay * decays} for decays in (True, False)
    ]  # fmt: skip
    adam = torch.optim.AdamW(groups, betas=(own.b1, own.b2), eps=own.eps)
    done = train(run, None)
    for drawn, record in zip(batches, done.history, strict=True):
        logits = module(drawn["tokens"], position_ids=drawn["positions"], use_cache=False).logits
        loss = F.cross_entropy(logits.mT, drawn["targets"])
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-7)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), own.clip_norm)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        for group in adam.param_groups:
            group["lr"] = record["lr"]
        adam.step()
    found = flatten(done.state.params)
    for name, x in module.named_parameters():
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-6, atol=1e-9)


def test_a_run_is_packed(tmp_path):
    origin = write_folder("llama", tmp_path / "model")
    write_tokens(tmp_path / "tokens")
    options = [
        "train", "--model", origin, "--data", str(tmp_path / "tokens"), "--pack", "best-fit",
        "--seq", "32", "--global-batch", "4", "--steps", "2", "--learning-rate.total-steps", "2",
    ]  # fmt: skip
    rows = {}
    for mesh in ("dp=1", "fsdp=2,tp=2"):
        out = tmp_path / mesh
        assert main([*options, "--mesh", mesh, "--out", str(out)]) == 0
        rows[mesh] = [row["loss"] for row in run_folder.records(out) if "loss" in row]
    assert rows["dp=1"] == pytest.approx(rows["fsdp=2,tp=2"], rel=1e-5)
    assert len(rows["dp=1"]) == 2
    for kind in ("tests.apps.zoo.test_modules.Words", "falcon_h1"):
        other = f"module:{kind}" if "." in kind else write_folder(kind, tmp_path / kind)
        given = {"data": str(tmp_path / "tokens"), "pack": "best-fit", "format": "tokens"}
        with pytest.raises(ValueError, match="no place for packed documents; wanted position_ids"):
            validate(run_config(other, **given))
