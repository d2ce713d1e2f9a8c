"""Classifiers of texts: losses and gradients, runs on labelled files, accuracy, and files back.

The oracle is transformers' own model under torch's autograd, in float64.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import functron as ft
from functron import DATA_AXES, Mesh, P
from functron.apps.zoo import heads
from functron.apps.zoo.heads import ClassifierConfig, LabelledTexts, build_classifier
from functron.apps.zoo.modules import flatten, nest
from functron.checkpoint import read_params
from functron.cli.main import main
from functron.core import random
from functron.data.tokenizer import ByteTokenizer, open_tokenizer
from functron.models.family import list_presets
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, load
from functron.training.convert import newest_params
from functron.training.data import open_samples
from functron.training.run import prepare
from functron.training.train import train
from functron.transforms import Gather
from tests.apps.zoo.tiny_modules import MESHES, largest_error

transformers: Any = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 257,
    "initializer_range": 0.1,
}  # fmt: skip
LABELS = ("odd", "even")
BASES = {
    "bert": ("BertConfig", "BertModel", {}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
}


@pytest.fixture(scope="module")
def origin_of(tmp_path_factory):
    """The origin of a tiny base model of a kind, with weights but without a head for labels."""

    @functools.cache
    def find(kind: str) -> str:
        config, model, more = BASES[kind]
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        getattr(transformers, model)(
            getattr(transformers, config)(**SIZES, **more)
        ).save_pretrained(folder)
        return f"hf-classifier:{folder}"

    return find


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(4 * 12).reshape(4, 12) * 7 % 251 + 1
    mask = (torch.arange(12) < torch.tensor([[12], [5], [9], [1]])).long()
    targets = torch.tensor([[0], [2], [1], [-100]])
    return {"tokens": tokens.where(mask > 0, -1), "targets": targets}


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("bert", "fsdp=2"), ("llama", "dp=2,tp=2"), ("qwen3", "dp=2"), ("bert", "dp=2,tp=2"),
     *(pytest.param(*row, marks=pytest.mark.full) for row in (
         ("bert", "dp=2"), ("llama", "dp=2"), ("llama", "fsdp=2"), ("qwen3", "fsdp=2"),
         ("qwen3", "dp=2,tp=2")))],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_texts_one_by_one(origin_of, kind, mesh):
    """The model reads each text without padding, so that it cannot be pooled at another token."""
    found = list_presets()[origin_of(kind)]
    assert isinstance(found, ClassifierConfig)
    config = replace(found, dtype="float64", labels="bad,fair,good")
    module, given = build_classifier(config).double(), batch()
    own = dict(module.named_parameters())
    texts = [row[row >= 0][None] for row in given["tokens"]]
    logits = torch.cat([module(input_ids=text).logits for text in texts])
    total = torch.nn.functional.cross_entropy(logits[:3], given["targets"][:3, 0], reduction="sum")
    wanted = dict(zip(own, torch.autograd.grad(total, [*own.values()]), strict=True))
    sizes, family = MESHES[mesh], heads.make_family()
    on = Mesh(**sizes)
    specs = ft.param_specs(family.defs(config), family.rules(config, on))
    options = ft.ModelOptions(gather=Gather(specs))

    def step(params, batch):
        value, grads = ft.value_and_grad(lambda p: family.loss(config, p, batch, options))(params)
        right = heads.count_right(config, params, batch, options)
        return value, ft.sync_gradients(grads, specs), right

    mapped = ft.shard_map(step, on, (specs, P(DATA_AXES)), (P(), specs, P()))
    params = {name: x.detach() for name, x in own.items()}
    value, grads, right = mapped(nest(params), given)
    torch.testing.assert_close(value, total.detach(), rtol=1e-6, atol=0)
    assert largest_error(flatten(grads), wanted) < 5e-6
    assert int(right) == int((logits.argmax(-1) == given["targets"][:, 0]).sum())
    if "tp" in sizes:
        assert any("tp" in str(spec) for spec in flatten(specs).values())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """Texts of unequal lengths whose label is their first letter, to learn and held out."""
    folder = tmp_path_factory.mktemp("texts")
    for name, start, count in (("learn", 0, 64), ("held", 1, 24)):
        rows = [
            {"text": f"{'ab'[i % 2]} text {(i * 37 + start) % 101}", "label": LABELS[i % 2]}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "learn.jsonl", folder / "held.jsonl"


def run_config(origin: str, files: tuple[Path, Path], **settings) -> TrainConfig:
    usual = {
        "seq": 16, "global_batch": 8, "format": "text", "data": str(files[0]), "steps": 3,
        "eval_every": 3, "eval_data": f"learnt={files[0]} held={files[1]}",
        "classifier__labels": "odd,even", "classifier__dtype": "float64", "learning_rate__peak": 3e-3,
    }  # fmt: skip
    return configure(**{"model": origin, **usual, **settings})


def run(config: TrainConfig) -> list[dict]:
    validate(config)
    return train(prepare(config, Mesh.parse(config.parallelism.mesh)), None).history


@pytest.mark.full
def test_runs_are_the_same_on_all_meshes_with_dropout(origin_of, files):
    origin = origin_of("bert")
    wanted = run(run_config(origin, files))
    plain = run(run_config(origin, files, classifier__dropouts="off", steps=1, eval_every=1))
    assert wanted[0]["loss"] != pytest.approx(plain[0]["loss"], rel=1e-4)
    for settings in ({"mesh": "dp=2,tp=2", "zero": 1}, {"mesh": "fsdp=2", "microbatches": 2}):
        found = run(run_config(origin, files, **settings))
        for one, other in zip(found, wanted, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert found[-1]["eval"]["held"] == pytest.approx(wanted[-1]["eval"]["held"], rel=1e-6)


def test_a_run_is_that_of_transformers_and_torch(origin_of, files):
    config = run_config(origin_of("llama"), files, steps=4, eval_every=4)
    prepared = prepare(config, Mesh())
    started = flatten(prepared.setup.init(random.key(config.seed)).params)
    module, own = build_classifier(config.classifier).double(), {}
    for name, weight in module.named_parameters():
        own[name] = weight
        weight.data.copy_(started[name])
    groups = [
        {"params": [x for x in own.values() if (x.dim() > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, config.optimizer.weight_decay), (False, 0.0))
    ]
    betas = config.optimizer.b1, config.optimizer.b2
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.optimizer.eps)
    samples, history = open_samples(config), train(prepared, None).history
    for step, record in enumerate(history):
        batch = samples.batch(step, 8)
        mask = batch["tokens"] >= 0
        out = module(batch["tokens"].where(mask, 257), attention_mask=mask.long())
        loss = torch.nn.functional.cross_entropy(out.logits, batch["targets"][:, 0])
        assert record["loss"] == pytest.approx(float(loss), rel=1e-6)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own.values(), config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = record["lr"]
        optimizer.step()


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(x, marks=pytest.mark.full) for x in ("bert", "qwen3"))]
)
def test_a_run_learns_and_goes_back_to_its_files(origin_of, files, tmp_path, capsys, kind):
    out, exported = tmp_path / "run", tmp_path / "exported"
    sets = f"learnt={files[0]} held={files[1]}"
    told = main([
        "train", "--model", origin_of(kind), "--format", "text", "--data", str(files[0]),
        "--eval-data", sets, "--eval-every", "64", "--classifier.labels", "odd,even", "--seq", "16",
        "--global-batch", "8", "--steps", "64", "--learning-rate.peak", "3e-3", "--out", str(out),
    ])  # fmt: skip
    assert told == 0
    capsys.readouterr()
    found = {}
    for mesh in ([], ["--mesh", "dp=2,tp=2"]):
        assert main(["evaluate", str(out), *mesh, "--json"]) == 0
        found[bool(mesh)] = json.loads(capsys.readouterr().out)
    for name in ("loss", "accuracy", "tokens"):
        assert found[True]["held"][name] == pytest.approx(found[False]["held"][name], rel=1e-5)
    assert found[False]["held"]["tokens"] == 24
    assert found[False]["learnt"]["accuracy"] > 0.95
    assert found[False]["held"]["accuracy"] > 0.95
    assert main(["convert", f"run:{out}", f"hf-classifier:{exported}"]) == 0
    again = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    assert again.config.id2label == dict(enumerate(LABELS))
    config = load(out / "config.toml")
    params = newest_params(out, config, averaged=False, read=read_params)
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    tokens = torch.full((24, 16), -1)
    texts = [torch.tensor([*row["text"].encode()][:16]) for row in rows]
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    mask, opened = tokens >= 0, heads.open_classifier(config.classifier)
    with torch.no_grad():
        wanted = opened.call(flatten(params), tokens.where(mask, opened.pad), mask.long())
        got = torch.cat([again(input_ids=text[None]).logits for text in texts])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    right = [LABELS[y] == row["label"] for y, row in zip(got.argmax(-1), rows, strict=True)]
    assert sum(right) / 24 == pytest.approx(found[False]["held"]["accuracy"])


def test_texts_have_the_tokens_of_transformers(tmp_path):
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {name: n for n, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdef"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{x}_token": f"[{x.upper()}]" for x in ("pad", "unk", "cls", "sep")}
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    own.save_pretrained(tmp_path)
    file, texts = tmp_path / "texts.jsonl", ["a b", "a b c d e f", "c"]
    file.write_text("".join(json.dumps({"text": x, "label": 1}) + "\n" for x in texts))
    samples = LabelledTexts(str(file), open_tokenizer(str(tmp_path)), LABELS, 5, 0)
    assert samples.summary() == "3 texts (0 odd, 3 even)"
    found = {tuple(row[row >= 0].tolist()) for row in samples.batch(0, 3)["tokens"]}
    assert found == {tuple(own(x, truncation=True, max_length=5)["input_ids"]) for x in texts}


def test_lines_without_labels_are_listed(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a", "label": 1}\n\n{"text": "b", "label": "c"}\n{"label": 0}\nx\n')
    told = r"texts\.jsonl:3: got label 'c'.*\n.*texts\.jsonl:4: got no text.*\n.*5: got no JSON"
    with pytest.raises(ValueError, match=told):
        LabelledTexts(str(file), ByteTokenizer(), ("bad", "good"), 8, 0)


def test_settings_that_a_classifier_lacks_are_refused(origin_of, files):
    for settings, told in (
        ({"format": "auto"}, "--format text"),
        ({"remat": "full"}, "remat"),
        ({"mesh": "cp=2"}, "dp, fsdp and tp"),
        ({"mesh": "pp=2"}, "dp, fsdp and tp"),
        ({"lora_rank": 2}, "lora_rank"),
        ({"pack": True}, "pack"),
        ({"seq": 128}, "at most .*64"),
        ({"classifier__rules": "nothing = tp", "mesh": "tp=2"}, "part of a parameter's name"),
        ({"classifier__labels": "one"}, "two names or more"),
        ({"model": "hf-classifier:nowhere"}, "config.json"),
    ):
        with pytest.raises(ValueError, match=told):
            run(run_config(origin_of("bert"), files, **settings))


def test_folders_without_what_a_classifier_needs_are_refused(tmp_path):
    kind = transformers.BertForSequenceClassification
    for number, (fields, labels, told) in enumerate((
        ({"num_labels": 1}, "", "two or more to choose one of.*--classifier.labels"),
        ({"problem_type": "multi_label_classification"}, "", "single_label_classification"),
        ({"pad_token_id": None}, "", "pad_token_id"),
        ({"num_labels": 2}, "a,b,c", "mismatch"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        kind(transformers.BertConfig(**{**SIZES, **fields})).save_pretrained(folder)
        with pytest.raises(ValueError, match=told):
            build_classifier(ClassifierConfig(origin=f"hf-classifier:{folder}", labels=labels))
