"""Losses of held-out sets: a mean by hand, on every mesh; training does not notice."""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import signal
import time
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from functron import checkpoint, tree
from functron.cli import evaluate as evaluate_command
from functron.cli.main import main
from functron.compiler.jit import jit as jit_of
from functron.data import Chat, IndexedWriter
from functron.models import gpt
from functron.nn import IGNORE_INDEX
from functron.spmd import Mesh
from functron.training import evaluation, run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, load
from functron.training.data import open_samples
from functron.training.evaluation import EvaluationHook, loss_memory_bytes, open_sets
from functron.training.loop import FiniteHook, loop, stop_on_signals
from functron.training.run import prepare
from tests.data.chats import corpus, make_tokenizer, write_lines
from tests.models.test_moe_composition import DEEPSEEK, MIXTRAL

MODEL = gpt.GPTConfig(
    vocab_size=256,
    num_layers=4,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    max_seq=32,
    dtype="float64",
    dropout=0.1,
    z_loss=1e-2,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two small texts: 13 and 5 samples of 16 tokens, so that the last batch of 8 is not full."""
    folder = tmp_path_factory.mktemp("texts")
    words = np.random.default_rng(0).integers(97, 123, 500).astype(np.uint8).tobytes()
    for name, size in (("a b.txt", 13 * 16 + 1), ("c.txt", 5 * 16 + 4)):
        (folder / name).write_bytes(words[:size])
        words = words[size:]
    return folder


@pytest.fixture(scope="module")
def config(texts):
    return configure(
        gpt=MODEL,
        data=argparse.__file__,
        seq=16,
        global_batch=8,
        microbatches=2,
        steps=2,
        eval_every=1,
        eval_data=f"one='{texts}/a b.txt' two={texts}/c.txt",
    )


def by_hand(model: gpt.GPTConfig, params: tree.Tree, tokens, targets) -> dict[str, float]:
    """The mean over targets of the losses that torch makes of the logits of one device."""
    with torch.no_grad():
        logits = gpt.forward(model, params, tokens)[..., : model.vocab_size]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    count = int((targets != IGNORE_INDEX).sum())
    loss = float(losses.sum()) / count
    return {"loss": loss, "perplexity": math.exp(loss), "tokens": count}


def windows(data: bytes, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of all whole windows, in order."""
    ids = torch.tensor(list(data))
    count = (len(ids) - 1) // seq
    return ids[: count * seq].view(count, seq), ids[1 : count * seq + 1].view(count, seq)


def close(got: dict, want: dict, tolerance: float = 1e-10) -> None:
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        assert abs(a - b) <= tolerance * max(abs(b), 1), (path, a, b)


def evaluated(config: TrainConfig, mesh: str, **fields) -> dict:
    config = configure(config, mesh=mesh, **fields)
    validate(config)
    run = prepare(config, Mesh.parse(mesh))
    before = tree.map(torch.clone, run.state)
    found = run.evaluate(run.state)
    for a, b in zip(tree.leaves(run.state), tree.leaves(before), strict=True):
        assert torch.equal(a, b)
    return found


@pytest.fixture(scope="module")
def dense(config, texts):
    """The losses by hand with the initial parameters, of a model."""

    @functools.cache
    def found(model: gpt.GPTConfig) -> dict:
        params = prepare(replace(config, gpt=model), Mesh()).state.params
        return {
            set_: by_hand(model, params, *windows((texts / file).read_bytes(), 16))
            for set_, file in (("one", "a b.txt"), ("two", "c.txt"))
        }

    return found


EXPERTS = replace(
    MIXTRAL, num_layers=4, vocab_size=256, dtype="float64", max_seq=32,
    mlp_dim=gpt.GPTConfig.mlp_dim,  # none of its layers has one
)  # fmt: skip
AHEAD = replace(DEEPSEEK, num_layers=4, vocab_size=256, dtype="float64", max_seq=32)
MODELS = {"dense": MODEL, "tied": replace(MODEL, tied=True), "experts": EXPERTS, "ahead": AHEAD}
"""Terms that training adds to the loss of the next token are in none of the numbers."""
SPLIT = {"sequence_parallel": True}
ROWS = [
    ("dense", "", {}),
    ("dense", "", {"remat": "full", "microbatches": 1, "loss_chunk_tokens": 5}),
    ("dense", "dp=2", {"zero": 2}),
    ("dense", "dp=2,tp=2", SPLIT),
    ("dense", "cp=2", {}),
    ("dense", "ulysses=2,cp=2", {"context": "gather"}),
    ("dense", "fsdp=2", {}),
    ("dense", "dp=2,fsdp=2", {"gather": "step"}),
    ("dense", "dp=2,tp=2", {"zero": 3}),
    ("dense", "pp=2,cp=2", {"schedule": "zb-h1"}),
    ("dense", "pp=2", {"schedule": "interleaved"}),
    ("dense", "pp=2", {"schedule": "zbv"}),
    ("dense", "pp=2", {"schedule": "dualpipev", "microbatches": 4}),
    ("dense", "pp=2,tp=2,dp=2", {**SPLIT, "zero": 3}),
    ("dense", "pp=2,fsdp=2", {"gather": "step"}),
    ("tied", "pp=2", {"vocab_over_pp": True}),
    ("tied", "pp=4,dp=2", {"microbatches": 4}),
    ("dense", "pp=2", {"lora_rank": 2}),
    ("experts", "ep=2", {}),
    ("experts", "pp=2,ep=2", {}),
    ("ahead", "pp=2,dp=2", {}),
]


def factors(name, mesh, fields):
    """Each model with each axis, and each option."""
    options = [{"option": option} for option in fields.items()]
    return [*({"name": name, "axis": axis} for axis in mesh.split(",")), *options]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("name", "mesh", "fields"), ROWS, ids=str)
def test_is_the_mean_by_hand_on_every_mesh(config, dense, name, mesh, fields):
    layers = 4 if "pp=4" in mesh or fields.keys() & {"schedule"} else 2
    model = replace(MODELS[name], num_layers=layers)
    close(evaluated(replace(config, gpt=model), mesh, **fields), dense(model))


SMALL = [
    "--data", argparse.__file__, "--seq", "16", "--global-batch", "8", "--microbatches", "2", "--gpt.num-layers", "4",
    "--gpt.embed-dim", "16", "--gpt.num-heads", "4", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "24",
    "--gpt.dtype", "float64", "--gpt.tied", "--learning-rate.total-steps", "4",
]  # fmt: skip


def train(*arguments: object) -> int:
    return main(["train", *SMALL, *map(str, arguments)])


def evals(run) -> dict[int, dict]:
    return {r["step"]: r["eval"] for r in run_folder.records(run) if "eval" in r}


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """A run that evaluates after steps 2 and 3."""
    run = tmp_path_factory.mktemp("whole") / "run"
    sets = ["--eval-every", 2, "--eval-data", f"one='{texts}/a b.txt' two={texts}/c.txt"]
    assert train("--steps", 3, "--save-every", 1, "--out", run, *sets) == 0
    assert list(evals(run)) == [2, 3]
    return run


def test_training_does_not_notice(whole, tmp_path):
    assert train("--steps", 3, "--out", tmp_path / "run") == 0
    same = [[r["loss"] for r in run_folder.records(run)] for run in (whole, tmp_path / "run")]
    assert same[0] == same[1]
    assert evals(tmp_path / "run") == {}


def test_a_run_that_goes_on_evaluates_the_same(whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in ("2", "3"):
        shutil.rmtree(run / "checkpoints" / step)
    assert train("--resume", "--out", run) == 0
    assert evals(run) == evals(whole)
    last = evals(run)[3]["one"]
    said = f"held out, one: loss {last['loss']:.3f}, perplexity {last['perplexity']:.1f}"
    out = capsys.readouterr().out
    assert said in out
    assert "eval   two: 1 x 8 samples of 84 bytes in 1 documents" in out
    # more of it, of other sets, on another mesh
    more = ["--eval-every", 1, "--eval-data", f"three={argparse.__file__}", "--eval-batches", 2]
    assert train("--resume", "--out", run, "--steps", 4, "--mesh", "dp=2,tp=2", *more) == 0
    assert evals(run)[4]["three"]["tokens"] == 2 * 8 * 16


@pytest.mark.distributed
def test_processes_of_a_pipeline_evaluate_the_same(whole, texts, in_processes, tmp_path):
    mesh = ["--mesh", "pp=2,dp=2", "--schedule", "zbv", "--vocab-over-pp", "--zero", 1]
    sets = ["--eval-every", 2, "--eval-data", f"one='{texts}/a b.txt' two={texts}/c.txt"]
    rest = ["--steps", 3, "--out", tmp_path / "run", "--device", "cpu"]
    in_processes(4, "train", *SMALL, *mesh, *sets, *rest)
    close(evals(tmp_path / "run"), evals(whole))


def test_a_number_of_batches_has_the_same_samples_whatever_the_seed(config):
    some = configure(config, eval_batches=1)
    one, two = open_sets(some)
    assert (one.num_batches, two.num_batches) == (1, 1)
    first = one.batch(0)
    assert torch.equal(first["tokens"], open_sets(replace(some, seed=7))[0].batch(0)["tokens"])
    halves = [one.batch(0, (index, 2)) for index in range(2)]
    for name, leaf in first.items():
        assert torch.equal(torch.cat([half[name] for half in halves]), leaf)
    # all of it, whatever more is asked for; every window once
    one, two = open_sets(configure(config, eval_batches=9))
    assert (one.num_batches, two.num_batches) == (2, 1)
    seen = [one.batch(index) for index in range(2)]
    rows = torch.cat([batch["tokens"][batch["targets"][:, 0] >= 0] for batch in seen])
    assert len({tuple(row) for row in rows.tolist()}) == len(rows) == 13
    with pytest.raises(ValueError, match="global_batch: got 8; wanted a positive multiple of 3"):
        one.batch(0, (0, 3))


def test_conversations_count_what_the_assistant_says(config, tmp_path):
    folder = make_tokenizer(tmp_path / "tokenizer")
    files = [write_lines(tmp_path / f"{n}.jsonl", corpus(n)) for n in (9, 5)]
    model = replace(MODEL, vocab_size=300, max_seq=96, num_layers=1)
    chat = configure(config, gpt=model, data=str(files[0]), tokenizer=str(folder), seq=96)
    chat = configure(chat, eval_data=f"said={files[1]}")
    found = evaluated(chat, "dp=2,tp=2")
    params = prepare(chat, Mesh()).state.params
    samples = open_samples(configure(chat, data=str(files[1])))
    assert isinstance(samples, Chat)
    rows = [
        torch.stack(x)
        for x in zip(*(map(torch.from_numpy, samples.sample(i)) for i in range(5)), strict=True)
    ]
    want = by_hand(model, params, *rows)
    assert want["tokens"] == samples.num_targets < 5 * 96
    close(found, {"said": want})
    # several to a sample, they have the losses that they have one by one
    close(evaluated(chat, "cp=2", pack="best-fit"), {"said": want})


def test_parts_for_validation_of_each_source(config, tmp_path):
    """Two files of 10 documents, of which the last 2 are held out, attended to one by one."""
    rng, kept, model = np.random.default_rng(1), {}, replace(MODEL, num_layers=2)
    for name in ("a", "b"):
        documents = [rng.integers(0, 256, size) for size in rng.integers(5, 20, 10)]
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for document in documents:
                writer.add(document)
        kept[f"validation/{name}"] = documents[8:]
    disk = configure(config, data=f"0.3 {tmp_path}/a 0.7 {tmp_path}/b", split="8,2", seq=8)
    disk = configure(disk, eval_data="", mask_documents=True, gpt=model)
    params = prepare(replace(config, gpt=model), Mesh()).state.params
    want = {name: apart(model, params, documents, 8) for name, documents in kept.items()}
    close(evaluated(disk, "pp=2,dp=2"), want)
    single = evaluated(configure(disk, data=f"{tmp_path}/a"), "")
    close(single, {"validation": want["validation/a"]})


def apart(
    model: gpt.GPTConfig, params: tree.Tree, documents: list[np.ndarray], seq: int
) -> dict[str, float]:
    """The mean loss in windows of `seq` tokens, one piece of a document at a time."""
    numbers = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    ids, total, count = np.concatenate(documents), 0.0, 0
    for start in range(0, (len(ids) - 1) // seq * seq, seq):
        window, places = ids[start : start + seq + 1], numbers[start : start + seq + 1]
        for document in set(places.tolist()):
            piece = torch.from_numpy(window[places == document])[None]
            if piece.shape[1] > 1:
                found = by_hand(model, params, piece[:, :-1], piece[:, 1:])
                total, count = total + found["loss"] * found["tokens"], count + found["tokens"]
    return {"loss": total / count, "perplexity": math.exp(total / count), "tokens": count}


def test_what_does_not_fit_is_said_before_the_run(config, tmp_path):
    mock = configure(config, data="", format="mock", eval_data="", split="9,1")
    tokens = configure(mock, format="tokens", data=str(tmp_path / "none"))
    short = tmp_path / "short"
    short.write_text("too short")
    for wrong, message in [
        (configure(config, eval_every=0), r"eval_data: got .*, which has no effect; wanted held-out sets"),
        (configure(config, eval_every=-1), r"eval_every: got -1; wanted at least 0"),
        (configure(config, eval_batches=-1), r"eval_batches: got -1; wanted at least 0"),
        (configure(config, eval_data=""), r"eval_every: got 1 without a set.*NAME=PATH\"$"),
        (configure(mock, split=""), r"eval_every: got 1 without a set.*or --split 99,1"),
        (mock, r"eval_batches: got 0, for all of 10\^15 random tokens; wanted at least 1"),
        (configure(mock, eval_data="a=b"), r"eval_data: got 'a=b'; wanted nothing with random"),
        (configure(mock, split="9,0,1", eval_batches=1), r"held-out set 'validation': [^:]*\n.*nothing for validation"),
        (configure(tokens, split="", eval_data="mix='1 a 2 b'"), r"eval_data: got a blend as 'mix'"),
        (configure(config, eval_data="a"), r"eval_data: got 'a'; wanted a name"),
        (configure(config, eval_data="a=x a=y"), r"eval_data: got two sets 'a'"),
        (configure(config, eval_data="'a=x"), r"eval_data: got \"'a=x\"; wanted No closing quotation"),
        (configure(config, eval_data=f"a={tmp_path}/none"), r"held-out set 'a': .*\n.*got nothing there"),
        (configure(config, eval_data=f"a={short}"), r"held-out set 'a': .*\n.*got 9 bytes; wanted at least seq"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            validate(wrong)
    validate(configure(mock, eval_batches=2))


def test_the_time_of_evaluation_is_not_that_of_a_step():
    def evaluate(at):
        time.sleep(0.3)
        return {"one": {"loss": float(at.state)}}

    def step(state, _):
        return state + 1, {"loss": torch.tensor(0.0)}

    hooks = [EvaluationHook(evaluate, 2)]
    history = [record for _, record in loop(step, 0, lambda _: None, steps=3, hooks=hooks)]
    assert [record.get("eval") for record in history] == [
        None,
        {"one": {"loss": 2.0}},
        {"one": {"loss": 3.0}},
    ]
    assert all(record["step_seconds"] < 0.2 for record in history)


def test_a_run_that_is_to_stop_does_not_evaluate():
    def step(state, _):
        signal.raise_signal(signal.SIGTERM)
        return state, {"loss": torch.tensor(0.0)}

    asked, stop = [], stop_on_signals()
    hooks = [stop, EvaluationHook(asked.append, 1)]  # pyright: ignore
    done = list(loop(step, 0, lambda _: None, steps=2, hooks=hooks))
    assert (stop.stopped_by, len(done), asked) == (signal.SIGTERM, 1, [])


def test_a_loss_that_is_not_finite_ends_the_run_at_once():
    asked = []
    with pytest.raises(FloatingPointError, match="step 1"):
        list(
            loop(
                lambda state, _: (state, {"loss": torch.tensor(math.inf)}),
                0,
                lambda _: None,
                steps=1,
                hooks=[EvaluationHook(asked.append, 1), FiniteHook()],  # pyright: ignore
            )
        )
    assert asked == []


def test_the_picture_has_a_curve_for_each_set(whole):
    svg = ET.fromstring((whole / "loss.svg").read_text())
    lines = [x for x in svg.iter() if x.tag.endswith("polyline")]
    assert len(lines) == 3
    assert {"one", "two"} <= {x.text for x in svg.iter() if x.tag.endswith("text")}
    for curve, name in zip(lines[1:], ("one", "two"), strict=True):
        heights = [float(point.split(",")[1]) for point in curve.get("points", "").split()]
        losses = [numbers[name]["loss"] for numbers in evals(whole).values()]
        assert len(heights) == 2
        assert (heights[0] < heights[1]) == (losses[0] > losses[1])  # y grows downwards


def once(model: gpt.GPTConfig, params: tree.Tree, texts: list, seq: int, stride: int) -> dict:
    """The mean loss of every token but the first of each text, each from windows of its own."""
    total, count = 0.0, 0
    for ids in map(torch.as_tensor, texts):
        for target in range(1, len(ids)):
            # the first window that has it
            begin = max(-(-(target - seq) // stride), 0) * stride
            window = ids[None, begin : target + 1]
            wanted = torch.full_like(window[:, 1:], IGNORE_INDEX)
            wanted[0, -1] = ids[target]
            total += by_hand(model, params, window[:, :-1], wanted)["loss"]
            count += 1
    return {"loss": total / count, "perplexity": math.exp(total / count), "tokens": count}


def test_a_run_is_evaluated_afterwards(whole, texts, capsys):
    """Every byte of its sets but the first once, the tail too, in windows as long as it can read."""

    def said(*options: object) -> str:
        capsys.readouterr()
        assert main(["evaluate", str(whole), *map(str, options)]) == 0
        return capsys.readouterr().out

    model = load(whole / "config.toml").gpt
    params = checkpoint.restore(run_folder.newest(whole))["params"]
    sets = {"one": "a b.txt", "two": "c.txt"}
    ids = {name: torch.tensor(list((texts / file).read_bytes())) for name, file in sets.items()}
    want = {}
    for name, text in ids.items():
        want[name] = by_hand(model, params, text[None, :-1], text[None, 1:])  # one window
        want[name]["bits_per_byte"] = want[name]["loss"] / math.log(2)
    assert want["one"]["tokens"] == 13 * 16
    close(json.loads(said("--json")), want)
    line = f"one: loss {want['one']['loss']:.4f}, perplexity {want['one']['perplexity']:.2f}, "
    line += f"{want['one']['bits_per_byte']:.4f} bits per byte, {13 * 16} tokens"
    assert said().splitlines()[0] == line
    # 83 targets in windows of 16 that begin 6 apart, of which the last has 17 - 6 tokens
    slid = once(model, params, [ids["two"]], 16, 6)
    slid["bits_per_byte"] = slid["loss"] / math.log(2)
    two = ["--data", f"two={texts}/c.txt", "--seq", 16, "--stride", 6, "--json"]
    for mesh in (["--mesh", "pp=2,dp=2", "--batch", 4], ["--mesh", "cp=2,tp=2", "--batch", 5]):
        close(json.loads(said(*two, *mesh)), {"two": slid})
    some = json.loads(said(*two, "--batches", 2, "--batch", 3))["two"]
    assert some["bits_per_byte"] is None
    assert 6 <= some["tokens"] < 83
    for options, message in [
        (
            ["--mesh", "dp=2", "--batch", 3],
            "batch: got 3; wanted a multiple of 2; fix: set it to 4",
        ),
        (["--mesh", "dp=2", "--nproc", 3], "nproc: got 3 for a mesh of 2"),
        (["--averaged"], "eval_averaged: got True; wanted a run that keeps averages"),
        (["--data", f"x={texts}/none"], "held-out set 'x'"),
        (["--data", "x"], "eval_data: got 'x'; wanted a name"),
        (["--seq", 2000], "seq: got 2000; wanted at most gpt.max_seq=1024"),
        (["--mesh", "cp=2", "--seq", 18], "seq: got 18; wanted a multiple of 4: cp=2 x 2 for zig"),
        (["--seq", 16, "--stride", 17], "stride: got 17; wanted at most seq=16"),
        (["--stride", -1], "stride: got -1; wanted at least 0"),
    ]:
        assert main(["evaluate", str(whole), *map(str, options)]) == 2
        assert message in capsys.readouterr().err


def test_windows_become_shorter_where_memory_is_scarce(whole, capsys, monkeypatch):
    """And say so: the longest text has 208 targets, and 104 of them fit."""
    needed = {}

    def measured(plan, rows, seq):
        needed[seq] = loss_memory_bytes(plan, rows, seq)
        return needed[seq]

    monkeypatch.setattr(evaluate_command, "loss_memory_bytes", measured)
    assert main(["evaluate", str(whole), "--batch", "1"]) == 0
    whole_texts = capsys.readouterr()
    assert (list(needed), whole_texts.err) == ([208], "")
    monkeypatch.setattr(evaluate_command, "free_memory_bytes", lambda device: needed[208] - 1)
    monkeypatch.setattr(evaluate_command, "_LEAST_SEQ", 16)
    assert main(["evaluate", str(whole), "--batch", "1"]) == 0
    said = capsys.readouterr()
    assert list(needed) == [208, 104]
    assert said.err.startswith("seq 104, of 1024 that the model reads: ")
    assert said.out != whole_texts.out
    assert main(["evaluate", str(whole), "--batch", "1", "--seq", "1024"]) == 0
    assert capsys.readouterr() == whole_texts


@pytest.mark.parametrize(
    "fields",
    [{}, pytest.param({"mask_documents": True}, marks=pytest.mark.full), {"pack": "best-fit"}],
    ids=str,
)
def test_tokens_on_disk_are_one_text_or_many(fields, tmp_path, capsys):
    """Documents see one another as in training."""
    rng, model = np.random.default_rng(2), replace(MODEL, num_layers=1, dropout=0.0)
    documents = [rng.integers(0, 256, size) for size in (5, 1, 23, 9, 40)]
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for document in documents:
            writer.add(document)
    disk = configure(TrainConfig(), gpt=model, seq=16, data=f"{tmp_path}/a", **fields)
    params = prepare(disk, Mesh()).state.params
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump(disk))
    checkpoint.save(tmp_path / "run" / "checkpoints" / "0", {"params": params})
    texts = documents if fields else [np.concatenate(documents)]
    want = {"x": {**once(model, params, texts, 8, 3), "bits_per_byte": None}}
    options = ["--data", f"x={tmp_path}/a", "--seq", "8", "--stride", "3", "--json"]
    assert main(["evaluate", str(tmp_path / "run"), *options]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["x"].pop("bits_per_byte") is want["x"].pop("bits_per_byte")
    close(got, want)


def test_sets_of_another_tokenizer_are_refused(config, tmp_path):
    for name, made in (("a", "one"), ("b", "two")):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add(np.arange(40))
        record = {"tokenizer": made, "pattern": "", "tokenizer_sha256": made}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    disk = configure(config, data=f"{tmp_path}/a", eval_data=f"x={tmp_path}/b")
    with pytest.raises(ValueError, match="tokens of different tokenizers"):
        validate(disk)


def test_compiled_evaluation_of_a_run(texts, tmp_path, monkeypatch, capsys):
    """Windows of all lengths are one program; experts have a room that is learned."""
    compiled = []

    def jit(f):
        compiled.append(jit_of(f, backend="eager"))
        return compiled[-1]

    monkeypatch.setattr(evaluation, "jit", jit)
    run, held_out = tmp_path / "run", ["--data", f"one='{texts}/a b.txt' two={texts}/c.txt"]
    words = ["--model", "mixtral-tiny", "--gpt.dtype", "float64", "--data", argparse.__file__]
    words += ["--seq", "16", "--global-batch", "8", "--steps", "1", "--expert-room", "1"]
    words += ["--gpt.num-layers", "1"]
    assert main(["train", *words, "--mesh", "ep=2", "--out", str(run)]) == 0
    found = []
    for more in ([], ["--mesh", "ep=4", "--compile"]):
        capsys.readouterr()
        assert main(["evaluate", str(run), *held_out, "--batch", "8", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    close(found[1], found[0])
    assert compiled
    stages = ["--mesh", "pp=2", "--nproc", "2", "--device", "cpu"]
    assert main(["evaluate", str(run), *held_out, "--compile", *stages]) == 2
    assert "compile: got true; wanted nothing with" in capsys.readouterr().err
    model = load(run / run_folder.CONFIG).gpt
    assert model.moe is not None
    limited = replace(model, moe=replace(model.moe, capacity_factor=1.0))
    (run / run_folder.CONFIG).write_text(
        dump(configure(load(run / run_folder.CONFIG), gpt=limited))
    )
    assert main(["evaluate", str(run), *held_out, "--compile"]) == 2
    assert "limited capacity" in capsys.readouterr().err
