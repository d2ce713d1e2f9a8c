"""Embedders of texts: vectors, losses and gradients, runs on files of pairs, and files back.

The oracle is transformers' own model on each text without padding, under torch's autograd in
float64, with pooling and losses written here as sentence-transformers documents them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import DATA_AXES, Mesh, P
from functron.apps.zoo import embedders
from functron.apps.zoo.embedders import (
    ComparedTexts,
    EmbedderConfig,
    build_embedder,
    embed,
    read_layout,
)
from functron.apps.zoo.modules import flatten, nest
from functron.checkpoint import read_params
from functron.cli.main import main
from functron.core import random
from functron.data.tokenizer import ByteTokenizer
from functron.models.family import list_presets
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, load
from functron.training.convert import newest_params
from functron.training.evaluation import rank_correlation
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
KINDS = {
    "bert": ("BertConfig", "BertModel", {}, "mean_tokens"),
    "roberta": ("RobertaConfig", "RobertaModel", {"pad_token_id": 1}, "cls_token"),
    "qwen3": ("Qwen3Config", "Qwen3Model", {"num_key_value_heads": 2, "head_dim": 8}, "lasttoken"),
}
ROWS, SEQ = 4, 12


def write_layout(folder: Path, mode: str, *, model: str = "", **whole: Any) -> None:
    """The files beside a model's, as sentence-transformers 3 to 5 write them."""
    kinds = (("Transformer", model), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    rows = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {f"pooling_mode_{x}": x == mode for x in modes}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **pooling})
    )
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    (folder / "config_sentence_transformers.json").write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def origin_of(tmp_path_factory):
    """The origin of a tiny model of a kind with weights, in sentence-transformers' layout."""

    @functools.cache
    def find(kind: str) -> str:
        config, model, more, mode = KINDS[kind]
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        getattr(transformers, model)(
            getattr(transformers, config)(**{**SIZES, **more})
        ).save_pretrained(folder)
        write_layout(folder, mode, prompts={"query": "q: "})
        return f"hf-embedder:{folder}"

    return find


def find_vectors(module: Any, mode: str, texts: list[torch.Tensor]) -> torch.Tensor:
    """Each text alone, without padding."""
    found = []
    for text in texts:
        hidden = module(input_ids=text[None]).last_hidden_state[0]
        chosen = {"cls_token": hidden[0], "lasttoken": hidden[-1], "mean_tokens": hidden.mean(0)}
        found.append(F.normalize(chosen[mode], dim=-1))
    return torch.stack(found)


def make_batch(parts: int) -> dict[str, torch.Tensor]:
    count = torch.arange(ROWS * parts * SEQ)
    tokens = (count * count * 7 + count * 3).reshape(ROWS * parts, SEQ) % 251 + 1
    lengths = torch.arange(ROWS * parts).reshape(-1, 1) * 5 % SEQ + 1
    tokens = tokens.where(torch.arange(SEQ) < lengths, -1).reshape(ROWS, parts * SEQ)
    return {"tokens": tokens}


def split_texts(tokens: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [row[row >= 0] for row in tokens.reshape(-1, tokens.shape[1] // parts)]


def sum_pairs(vectors: torch.Tensor, scale: float, counted: list[int]) -> torch.Tensor:
    """MultipleNegativesRankingLoss of sentence-transformers, as a sum, of the rows that count."""
    anchors, rest = vectors[counted, 0], vectors[counted, 1:].transpose(0, 1).flatten(0, 1)
    return F.cross_entropy(anchors @ rest.T * scale, torch.arange(len(counted)), reduction="sum")


CASES = [
    ("bert", "dp=2,tp=2", 0), ("qwen3", "fsdp=2", 1), ("roberta", "dp=2", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "mesh", "negatives"),
    [*CASES, *(pytest.param(*row, marks=pytest.mark.full) for row in (
        ("bert", "fsdp=2", 2), ("qwen3", "dp=2,tp=2", 0), ("roberta", "dp=2,tp=2", 1),
        ("bert", "dp=2", 0), ("qwen3", "dp=2", 0)))],
)  # fmt: skip
def test_pairs_are_told_from_all_of_the_batch_of_all_ranks(origin_of, kind, mesh, negatives):
    found: Any = list_presets()[origin_of(kind)]
    config = replace(found, dtype="float64", negatives=negatives)
    parts = 2 + negatives
    given = make_batch(parts)
    given["targets"] = torch.arange(ROWS * (parts - 1)).reshape(ROWS, -1)
    given["targets"][2] = -100  # fills the batch
    module = build_embedder(config).double()
    own = {name: x for name, x in module.named_parameters() if x.requires_grad}
    assert not any("pooler" in name for name in own)
    texts = split_texts(given["tokens"], parts)
    vectors = find_vectors(module, KINDS[kind][3], texts).unflatten(0, (ROWS, parts))
    total = sum_pairs(vectors, config.scale, [0, 1, 3])
    near = (vectors[:, 0] @ vectors[[0, 1, 3], 1:].transpose(0, 1).flatten(0, 1).T).argmax(1)
    right = sum(int(near[row]) == n for n, row in enumerate([0, 1, 3]))
    check_on_mesh(config, MESHES[mesh], given, own, total, right)


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.full)])
def test_scores_of_pairs_are_cosines(origin_of, mesh):
    found: Any = list_presets()[origin_of("bert")]
    config = replace(found, dtype="float64", learns="scores")
    scores = torch.tensor([0.5, -0.25, 1.0, 0.0], dtype=torch.float64)
    given = make_batch(2)
    given["targets"] = ((1 + scores) * 2**30).long()[:, None]
    given["targets"][1] = -100
    module = build_embedder(config).double()
    own = {name: x for name, x in module.named_parameters() if x.requires_grad}
    vectors = find_vectors(module, "mean_tokens", split_texts(given["tokens"], 2))
    cosines = (vectors[::2] * vectors[1::2]).sum(-1)
    total = F.mse_loss(cosines[[0, 2, 3]], scores[[0, 2, 3]], reduction="sum")
    wanted = torch.stack([cosines, scores], 1).detach()
    wanted[1] = torch.nan
    check_on_mesh(config, MESHES[mesh], given, own, total, wanted)


def check_on_mesh(config, sizes, given, own, total, measured):
    """The loss, its gradients and the measure of a batch on a mesh are those wanted."""
    wanted = dict(zip(own, torch.autograd.grad(total, [*own.values()]), strict=True))
    family, on = embedders.make_family(), Mesh(**sizes)
    specs = ft.param_specs(family.defs(config), family.rules(config, on))
    options = ft.ModelOptions(gather=Gather(specs))
    (measure,) = family.measures(config).values()

    def step(params, batch):
        value, grads = ft.value_and_grad(lambda p: family.loss(config, p, batch, options))(params)
        found = measure(config, params, batch, options)
        return value, ft.sync_gradients(grads, specs), found, family.num_targets(batch)

    mapped = ft.shard_map(step, on, (specs, P(DATA_AXES)), (P(), specs, P(), P()))
    params = {name: x.detach() for name, x in own.items()}
    value, grads, found, count = mapped(nest(params), given)
    torch.testing.assert_close(value, total.detach(), rtol=1e-6, atol=0)
    assert largest_error(flatten(grads), wanted) < 5e-6
    torch.testing.assert_close(
        found.double(), torch.as_tensor(measured).double(), rtol=1e-6, atol=1e-6, equal_nan=True
    )
    assert int(count) == 3


def test_copies_of_a_text_are_not_told_from_it(origin_of):
    """Two lines with one positive: neither has the other's as a wrong answer."""
    found: Any = list_presets()[origin_of("bert")]
    config = replace(found, dtype="float64")
    given = make_batch(2)
    given["tokens"][3, SEQ:] = given["tokens"][0, SEQ:]
    given["targets"] = torch.tensor([[7], [1], [2], [7]])
    module = build_embedder(config).double()
    vectors = find_vectors(module, "mean_tokens", split_texts(given["tokens"], 2))
    scores = vectors[::2] @ vectors[1::2].T * 20
    scores[0, 3] = scores[3, 0] = -torch.inf
    wanted = F.cross_entropy(scores, torch.arange(4), reduction="sum")
    params = nest({name: x.detach() for name, x in module.named_parameters() if x.requires_grad})
    torch.testing.assert_close(
        embedders.loss(config, params, given), wanted.detach(), rtol=1e-6, atol=0
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Words and their copies with something around them, and pairs with scores."""
    folder = tmp_path_factory.mktemp("pairs")
    words = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ij"]
    rows = {
        "pairs": [{"anchor": w, "positive": f"<{w.upper()}>"} for w in words],
        "scores": [
            {"sentence1": w, "sentence2": words[n * 5 % 32],
             "score": sum(x == y for x, y in zip(w, words[n * 5 % 32], strict=True)) / 3}
            for n, w in enumerate(words)
        ],
    }  # fmt: skip
    found = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in found.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return found


def run_config(origin: str, files: dict[str, Path], **settings) -> TrainConfig:
    kind = settings.get("embedder__learns", "pairs")
    usual = {
        "seq": 16, "global_batch": 8, "format": "text", "data": str(files[kind]), "steps": 3,
        "eval_every": 3, "eval_data": f"own={files[kind]}", "embedder__dtype": "float64",
        "learning_rate__peak": 3e-3,
    }  # fmt: skip
    return configure(**{"model": origin, **usual, **settings})


def run(config: TrainConfig) -> list[dict]:
    validate(config)
    return train(prepare(config, Mesh.parse(config.parallelism.mesh)), None).history


@pytest.mark.full
@pytest.mark.parametrize("learns", ["pairs", "scores"])
def test_runs_are_the_same_on_all_meshes_with_dropout(origin_of, files, learns):
    origin = origin_of("bert")
    wanted = run(run_config(origin, files, embedder__learns=learns))
    plain = run(run_config(origin, files, embedder__learns=learns, embedder__dropouts="off"))
    assert wanted[0]["loss"] != pytest.approx(plain[0]["loss"], rel=1e-4)
    for settings in ({"mesh": "dp=2,tp=2", "zero": 1}, {"mesh": "fsdp=2"}):
        found = run(run_config(origin, files, embedder__learns=learns, **settings))
        for one, other in zip(found, wanted, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert found[-1]["eval"]["own"] == pytest.approx(wanted[-1]["eval"]["own"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "learns"),
    [("qwen3", "pairs"), pytest.param("bert", "scores", marks=pytest.mark.full)],
)
def test_a_run_learns_and_goes_back_to_its_files(origin_of, files, tmp_path, capsys, kind, learns):
    out, exported = tmp_path / "run", tmp_path / "exported"
    told = main([
        "train", "--model", origin_of(kind), "--format", "text", "--data", str(files[learns]),
        "--eval-data", f"own={files[learns]}", "--eval-every", "48", "--embedder.learns", learns,
        "--seq", "16", "--global-batch", "16", "--steps", "48", "--learning-rate.peak", "3e-3",
        "--out", str(out),
    ])  # fmt: skip
    assert told == 0
    capsys.readouterr()
    found = {}
    for mesh in ([], ["--mesh", "dp=2,tp=2"]):
        assert main(["evaluate", str(out), *mesh, "--json"]) == 0
        found[bool(mesh)] = json.loads(capsys.readouterr().out)["own"]
    name = "accuracy" if learns == "pairs" else "spearman"
    for each in ("loss", name, "tokens"):
        assert found[True][each] == pytest.approx(found[False][each], rel=1e-5)
    assert found[False]["tokens"] == 32
    assert found[False][name] > 0.9
    assert main(["convert", f"run:{out}", f"hf-embedder:{exported}"]) == 0
    assert read_layout(exported) == read_layout(Path(origin_of(kind).partition(":")[2]))._replace(
        model=exported
    )
    prompts = json.loads((exported / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {"query": "q: "}
    again = transformers.AutoModel.from_pretrained(exported)
    config = load(out / "config.toml")
    model: Any = config.architecture
    params = newest_params(out, config, averaged=False, read=read_params)
    texts = [[*b"abc"], [*b"a longer text"], [*b"x"]]
    got = embed(model, params, texts)
    wanted = find_vectors(again, KINDS[kind][3], [torch.tensor(x) for x in texts])
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-5)


def test_rank_correlations_are_scipys():
    stats: Any = pytest.importorskip("scipy.stats")
    one, other = np.array([0.1, 0.5, 0.5, -2.0, 3.0, 0.5]), np.array([1.0, 1.0, 0.0, 0.0, 2.0, 5.0])
    wanted = stats.spearmanr(one, other).statistic
    assert rank_correlation(one, other) == pytest.approx(wanted, rel=1e-12)
    with_gap = rank_correlation(np.append(one, np.nan), np.append(other, 0.0))
    assert with_gap == pytest.approx(wanted, rel=1e-12)


def test_lines_that_do_not_fit_are_listed(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"anchor": "a", "positive": "b"}\n{"anchor": "a"}\n'
                    '{"anchor": "a", "positive": "b", "negative": "c"}\nx\n')  # fmt: skip
    told = r"jsonl:2: got no text positive.*\n.*:3: got negative besides.*\n.*:4: got no JSON"
    with pytest.raises(ValueError, match=told):
        ComparedTexts(str(file), ByteTokenizer(), EmbedderConfig(), 16, 0)
    file.write_text('{"sentence1": "a", "sentence2": "b", "score": 4.5}\n')
    with pytest.raises(ValueError, match=r"score 4\.5.*divide scores"):
        ComparedTexts(str(file), ByteTokenizer(), EmbedderConfig(learns="scores"), 16, 0)


def test_settings_that_an_embedder_lacks_are_refused(origin_of, files, tmp_path):
    plain = tmp_path / "plain"
    transformers.BertConfig(**SIZES).save_pretrained(plain)
    for settings, told in (
        ({"microbatches": 2}, "microbatches.*--mesh dp=N"),
        ({"format": "auto"}, "--format text"),
        ({"remat": "full"}, "remat"),
        ({"mesh": "pp=2"}, "dp, fsdp and tp"),
        ({"lora_rank": 2}, "lora_rank"),
        ({"pack": True}, "pack"),
        ({"seq": 66}, "at most 2 times 32"),
        ({"seq": 15}, "multiple of 2"),
        ({"global_batch": 1}, "global_batch"),
        ({"ramp_up": "1 1 8"}, "ramp_up.*begin with 2"),
        ({"embedder__scale": 0.0}, "above 0"),
        ({"embedder__learns": "scores", "embedder__negatives": 1}, "negatives"),
        ({"model": f"hf-embedder:{plain}"}, "--embedder.pooling"),
        ({"model": "hf-embedder:nowhere"}, "modules.json or config.json"),
    ):
        with pytest.raises(ValueError, match=told):
            run(run_config(origin_of("bert"), files, **settings))


@pytest.mark.applications("guard")
def test_a_smaller_mesh_keeps_all_samples_that_are_compared_in_one_microbatch(origin_of, files):
    from functron.apps.guard.restarts import resize

    for learns, wanted in (("pairs", 1), ("scores", 4)):
        config = run_config(origin_of("bert"), files, embedder__learns=learns, mesh="dp=4")
        found = resize(config, "dp", 1)
        assert found is not None
        assert found.parallelism.microbatches == wanted
        validate(found)
    assert resize(run_config(origin_of("bert"), files, mesh="dp=4"), "dp", 3) is None


def test_folders_whose_vectors_would_be_others_are_refused(tmp_path):
    for mode, whole, more, told in (
        ("max_tokens", {}, {}, "max_tokens.*lasttoken"),
        ("cls_token", {"default_prompt_name": "query"}, {}, "default_prompt_name"),
        ("cls_token", {"similarity_fn_name": "dot"}, {}, "cosine"),
        ("cls_token", {}, {"do_lower_case": True}, "do_lower_case"),
    ):
        folder = tmp_path / f"{mode}{len([*tmp_path.iterdir()])}"
        folder.mkdir()
        write_layout(folder, mode, **whole)
        if more:
            (folder / "sentence_bert_config.json").write_text(json.dumps(more))
        with pytest.raises(ValueError, match=told):
            read_layout(folder)
    rows = json.loads((folder / "modules.json").read_text())
    dense = {**rows[1], "type": "sentence_transformers.models.Dense"}
    (folder / "modules.json").write_text(json.dumps([*rows[:2], dense]))
    with pytest.raises(ValueError, match="Dense"):
        read_layout(folder)


def test_a_run_begins_with_the_weights_of_the_folder(origin_of, tmp_path):
    """A pooler, which no vector reads, is not trained; others are the file's."""
    model: Any = list_presets()[origin_of("bert")]
    own = dict(build_embedder(model).named_parameters())
    made = flatten(ft.init_params(random.key(0), embedders.defs(model)))
    assert {name for name in own if name not in made} == {
        "pooler.dense.weight", "pooler.dense.bias",
    }  # fmt: skip
    assert all(torch.equal(x, own[name]) for name, x in made.items())
