"""Runs whose documents are dealt to ranks: the numbers of every document by itself, on any mesh."""

from __future__ import annotations

import functools
import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from functron import random, tree
from functron.cli.main import main
from functron.compiler.jit import jit
from functron.data import IndexedWriter
from functron.models import gpt
from functron.nn import IGNORE_INDEX
from functron.nn.moe.config import MoEConfig
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.spmd import Mesh
from functron.spmd.params import init_params
from functron.training import run as runs
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure
from functron.training.data import open_samples
from functron.training.dealing import PLACES, by_signature
from functron.training.run import prepare
from functron.training.train import train
from tests.data.chats import corpus, make_tokenizer, write_lines
from tests.training.packed_steps import TOLERANCE, check_step

SEQ, BATCH = 32, 4
MODEL = gpt.GPTConfig(
    vocab_size=300, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
    max_seq=SEQ, init_stddev=0.3, dtype="float64",
)  # fmt: skip
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_dim=8, aux_loss=0.02, aux="batch", z_loss=1e-3)
MODELS = {
    "rope": MODEL,
    "learned positions": replace(MODEL, positions="learned", tied=True, norm="layer"),
    "window": replace(MODEL, window=7),
    "ahead": replace(MODEL, mtp_depth=2),
    "latent": replace(
        MODEL, num_kv_heads=0, head_dim=8, kv_rank=12, q_rank=8, rope_head_dim=4, v_head_dim=6
    ),
}
DYNAMIC = {"context": "dynamic"}


def long_tailed(folder) -> str:
    """The prefix of a file of documents, most of which are short."""
    drawn = np.random.default_rng(3)
    with IndexedWriter(folder / "text", np.uint16) as writer:
        for size in np.clip(drawn.lognormal(math.log(4), 1.5, 200), 2, 60).astype(int):
            writer.add(drawn.integers(0, 300, size))
    return str(folder / "text")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    # so that what a step subtracts from the parameters is their gradient
    plain = OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    return configure(
        gpt=MODEL,
        data=long_tailed(tmp_path_factory.mktemp("data")),
        pack="best-fit",
        seq=SEQ,
        global_batch=BATCH,
        steps=3,
        optimizer=plain,
        learning_rate=ScheduleConfig(name="constant", peak=1.0),
    )


@functools.cache
def one_by_one(config: TrainConfig):
    """The mean loss over the targets of the first step, of each document by itself, on one rank."""
    batch = open_samples(config).batch(0, config.data.global_batch)
    init_key, _ = random.split(random.key(config.seed)).unbind(0)
    weights = init_params(init_key, gpt.defs(config.gpt))
    total = (batch["targets"] != IGNORE_INDEX).sum()

    def mean(weights):
        losses = []
        for row in range(config.data.global_batch):
            segments = batch["segments"][row]
            for number in segments.unique():
                chosen = {n: batch[n][row][segments == number][None] for n in ("tokens", "targets")}
                losses.append(gpt.loss(config.gpt, weights, chosen))
        return sum(losses) / total

    grads, value = torch.func.grad_and_value(mean)(weights)
    return weights, value, grads


CONTEXTS = {
    "ring": {},
    "gather": {"context": "gather"},
    "contiguous": {"zigzag": False},
    "dynamic": DYNAMIC,
    "dynamic gather": {"context": "dynamic-gather"},
}
RANKS = [
    ("cp=4", {}),
    ("cp=4,tp=2", {"sequence_parallel": True, "microbatches": 2}),
    ("cp=4,pp=2", {"microbatches": 4}),
]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("mesh", "options"), RANKS, ids=str)
def test_packed_documents_have_the_same_gradients_in_every_context(config, mesh, options, context):
    check_step(config, mesh, one_by_one(config), **options, **CONTEXTS[context])


@pytest.mark.parametrize("context", [{}, DYNAMIC, {"context": "dynamic-gather"}], ids=str)
@pytest.mark.parametrize("ranks", ["ulysses=4", "cp=2,ulysses=2"])
@pytest.mark.parametrize(("mesh", "options"), RANKS, ids=str)
@pytest.mark.pairwise
def test_so_they_have_where_heads_are_exchanged(config, mesh, options, ranks, context):
    if context.get("context") == "dynamic-gather" and "cp" not in ranks:
        context = DYNAMIC  # there are no keys to gather
    model = replace(MODEL, num_heads=8, num_kv_heads=2)  # with tp=2, keys are sent four times
    config = replace(config, gpt=model)
    mesh = mesh.replace("cp=4", ranks)
    check_step(config, mesh, one_by_one(config), **options, **context)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_may_be_dealt(config, model):
    config = replace(config, gpt=MODELS[model])
    for mesh in ("dp=2,cp=4", "dp=2,ulysses=4"):
        check_step(config, mesh, one_by_one(config), microbatches=2, **DYNAMIC)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("cp=4", {"microbatches": 2}),
        ("cp=2,tp=2", {"sequence_parallel": True}),
        ("ulysses=2,pp=2", {"microbatches": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "draws",
    [{"dropout": 0.2}, {"dropout": 0.2, "mtp_depth": 1}, {"moe": replace(EXPERTS, jitter=0.1)}],
    ids=str,
)
@pytest.mark.pairwise
def test_what_is_drawn_goes_by_the_places_of_tokens_in_their_samples(config, mesh, options, draws):
    if "moe" in draws:
        draws = {"moe": replace(draws["moe"], aux_loss=0.0)}  # which microbatches change
    config = replace(config, gpt=replace(MODEL, **draws))
    (before, alone, loss), (_, dealt, found) = (
        first_step(configure(config, **given))
        for given in ({}, {"mesh": mesh, **options, **DYNAMIC})
    )
    assert found == pytest.approx(loss, rel=TOLERANCE)
    for path, old, one, other in zip(
        tree.paths(before), *map(tree.leaves, (before, alone, dealt)), strict=True
    ):
        assert (one - other).abs().max() <= TOLERANCE * (one - old).abs().max(), path
    # with the numbers of another seed it is another step
    assert first_step(configure(config, seed=1))[2] != pytest.approx(loss, rel=TOLERANCE)


def first_step(config: TrainConfig):
    """Parameters before and after it, and its loss."""
    mesh = config.parallelism.mesh
    run = prepare(config, Mesh.parse(mesh))
    before, batch = tree.map(torch.clone, run.state.params), run.batch(0)
    assert (PLACES in batch) == bool(mesh)
    state, metrics = run.step(run.state, batch)
    return before, state.params, float(metrics["loss"])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=2,cp=4", {"zero": 1}),
        ("fsdp=2,cp=2,ulysses=2", {}),
        ("ulysses=3", {"seq": 33, "num_heads": 6, "head_dim": 4}),
        ("cp=3", {"seq": 36}),
        ("dp=2,cp=4", {"zero": 2, "microbatches": 2}),
    ],
    ids=str,
)
def test_so_has_every_mesh(config, mesh, options):
    if "seq" in options:
        more = {name: x for name, x in options.items() if name != "seq"}
        model = replace(MODEL, max_seq=options["seq"], **more)
        config, options = configure(config, seq=options["seq"], gpt=model), {}
    check_step(config, mesh, one_by_one(config), **options, **DYNAMIC)


@pytest.mark.parametrize(
    ("mesh", "aux", "microbatches"),
    [("ep=2,cp=4", "batch", 1), ("ep=2,cp=2,tp=2", "batch", 1), ("ep=2,ulysses=4", "global", 2)],
)
def test_experts_are_balanced_by_the_same_tokens(config, mesh, aux, microbatches):
    # a loss over all tokens of a batch: the numbers of a rank that has all of them
    config = replace(config, gpt=replace(MODEL, moe=replace(EXPERTS, aux=aux)))
    options = {"sequence_parallel": True} if "tp" in mesh else {}
    options |= {"mesh": mesh, "microbatches": microbatches, **DYNAMIC}
    (alone,), (dealt,) = (
        train(prepare(one, Mesh.parse(one.parallelism.mesh)), None).history
        for one in (configure(config, steps=1), configure(config, steps=1, **options))
    )
    assert dealt["context"]["ring_size"] in (1, 2, 4)
    for name in ("loss", "grad_norm"):
        assert dealt[name] == pytest.approx(alone[name], rel=TOLERANCE)


def test_conversations_are_dealt_without_their_padding(config, tmp_path):
    folder = make_tokenizer(tmp_path / "tokenizer")
    file = write_lines(tmp_path / "chat.jsonl", corpus(24))
    model = replace(MODEL, max_seq=96)
    chat = configure(config, gpt=model, data=str(file), tokenizer=str(folder), seq=96)
    check_step(chat, "cp=4", one_by_one(chat), microbatches=2, **DYNAMIC)


def command(*options: object) -> int:
    small = ["--gpt.num-layers", "1", "--gpt.embed-dim", "16", "--gpt.num-heads", "2"]
    small += ["--gpt.mlp-dim", "24", "--gpt.vocab-size", "300"]
    run = ["train", *small, "--pack", "best-fit", "--seq", "32", "--global-batch", "4"]
    return main([*run, *map(str, options)])


def records(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run) -> list[tuple]:
    names = ("step", "loss", "grad_norm", "batch", "context")
    return [tuple(record[name] for name in names) for record in records(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("runs")
    given = ["--data", config.data.path, "--mesh", "cp=4", "--context", "dynamic", "--steps", "6"]
    given += ["--save-every", "3"]
    assert command(*given, "--out", folder / "whole") == 0
    return folder, given


def cut_in_half(run, copy) -> None:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "6")


def test_runs_go_on_to_the_bit_and_on_another_mesh(whole, tmp_path, capsys):
    folder, given = whole
    for name, mesh in (("same", "cp=4"), ("other", "dp=2,cp=2")):
        cut_in_half(folder / "whole", tmp_path / name)
        assert main(["train", "--resume", "--out", str(tmp_path / name), "--mesh", mesh]) == 0
    assert numbers(tmp_path / "same") == numbers(folder / "whole")
    given = [x for x in given if x not in ("--context", "dynamic", "--mesh", "cp=4")]
    assert command(*given, "--out", tmp_path / "alone") == 0
    for name in ("other", "alone"):
        for found, wanted in zip(records(tmp_path / name), records(folder / "whole"), strict=True):
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert found["batch"] == wanted["batch"]  # of the samples, however they are dealt
    said = capsys.readouterr().out
    assert "deal   documents go to 1, 2, 4 of cp=4 ranks by their cost" in said
    assert "deal   documents go to 1, 2 of cp=2 ranks by their cost" in said


def test_a_dry_run_shows_the_step(whole, capsys):
    assert command(*whole[1], "--dry-run") == 0
    assert "one of 4 ranks (cp=4), 4 samples of 32 tokens per step" in capsys.readouterr().out


def test_records_say_what_it_saves(whole):
    found = [record["context"] for record in records(whole[0] / "whole")]
    assert {x["ring_size"] for x in found} <= {1, 2, 4}
    for x in found:
        assert 0 <= x["idle"] <= 1
        # one layer, 2 heads of 8 numbers, keys and values, of 4 bytes: there twice, and gradients
        assert x["sent_bytes"] == x["tokens_per_rank"] * (x["ring_size"] - 1) * 2 * 2 * 8 * 4 * 3
        assert x["static_sent_bytes"] == 32 * 3 * 2 * 2 * 8 * 4 * 3
    assert sum(x["sent_bytes"] for x in found) < sum(x["static_sent_bytes"] for x in found)


def test_processes_compute_the_same(whole, tmp_path, in_processes):
    folder, _ = whole
    for name in ("here", "there"):
        cut_in_half(folder / "whole", tmp_path / name)
    other = ["--mesh", "cp=2,ulysses=2", "--context", "dynamic-gather"]
    assert main(["train", "--resume", "--out", str(tmp_path / "here"), *other]) == 0
    in_processes(4, "train", "--resume", "--out", tmp_path / "there", *other)
    runs = (records(run) for run in (tmp_path / "there", tmp_path / "here", folder / "whole"))
    for found, here, wanted in zip(*runs, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert here["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert (found["batch"], found["context"]) == (wanted["batch"], here["context"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pack": ""}, "context: got dynamic without packing; wanted samples of several documents"),
        ({"zigzag": False}, "zigzag: got false with context=dynamic"),
        ({"mesh": "ulysses=4", "context": "dynamic-gather"}, "no effect; wanted cp in the mesh"),
        (
            {"gpt": replace(MODEL, moe=replace(EXPERTS, aux="sequence"))},
            "gpt.moe.aux: got sequence with context=dynamic",
        ),
        (
            {"gpt": replace(MODEL, moe=EXPERTS), "microbatches": 2},
            "gpt.moe.aux: got batch with context=dynamic and microbatches",
        ),
        ({"gpt": replace(MODEL, moe=replace(EXPERTS, capacity_factor=2.0))}, "capacity_factor"),
        (
            {"gpt": replace(MODEL, moe=replace(EXPERTS, balance_bias=True, balance_by="quantile"))},
            "gpt.moe.balance_by: got quantile with context=dynamic",
        ),
        ({"mesh": "dp=4"}, "context: got 'dynamic', which has no effect; wanted cp in the mesh"),
        ({"seq": 28}, "seq: got 28; wanted a multiple of 8: cp=4 x 2 for zigzag"),
        ({"mesh": "cp=2,ulysses=8"}, "num_heads: got 4; wanted a multiple of tp=1 x ulysses=8"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(config, changes, said):
    wrong = configure(config, **{"mesh": "cp=4", **DYNAMIC, **changes})
    with pytest.raises(ValueError, match=said):
        validate(wrong)


def test_steps_are_made_once_for_each_signature():
    made = []

    def make(size):
        made.append(size)
        return lambda state, batch: (state + size, batch)

    step = by_signature(make, lambda batch: (batch[0], batch[1:]))
    assert [step(10, (size, "rest")) for size in (1, 2, 1)] == [
        (11, ("rest",)), (12, ("rest",)), (11, ("rest",)),
    ]  # fmt: skip
    assert made == [1, 2]


def test_all_programs_are_compiled_before_the_first_step(config, monkeypatch):
    monkeypatch.setattr(runs, "jit", functools.partial(jit, backend="eager"))
    config = configure(config, gpt=replace(MODEL, num_layers=1))
    alone = train(prepare(config, Mesh()), None)
    config = configure(config, mesh="cp=2", compile=True, **DYNAMIC)
    run = prepare(config, Mesh.parse("cp=2"))
    assert run.setup.dealer is not None
    programs = set(run.setup.dealer.list_programs(BATCH))
    counts = []

    def look(at):
        counts.append(
            sum(len(made) for size in (1, 2) for made in run.step.of(size)._made.values())
        )

    history = train(run, None, also=lambda: nullcontext(lambda record: look(record))).history
    assert counts == [len(programs)] * 3  # those of the first step, and no more
    for found, wanted in zip(history, alone.history, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
