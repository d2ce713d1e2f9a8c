"""Packed conversations: the losses and gradients of one conversation a sample, on every mesh."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from functron import random
from functron.cli.main import main
from functron.data import Chat, PackedChat, Tokenizer
from functron.data.sampling import shuffled
from functron.models import gpt
from functron.nn import IGNORE_INDEX
from functron.optim import OptimizerConfig, ScheduleConfig
from functron.spmd.params import init_params
from functron.training import run_folder
from functron.training.config import TrainConfig, configure
from functron.training.data import open_samples
from tests.data.chats import corpus, make_tokenizer, messages, write_lines
from tests.training.packed_steps import check_step

SEQ, BATCH = 96, 4
MODEL = gpt.GPTConfig(
    vocab_size=300, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24,
    max_seq=SEQ, init_stddev=0.3, dtype="float64",
)  # fmt: skip
MODELS = {
    "rope": MODEL,
    "learned positions": replace(MODEL, positions="learned", tied=True, norm="layer"),
    "ahead": replace(MODEL, mtp_depth=1),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    file = write_lines(tmp_path_factory.mktemp("data") / "chat.jsonl", corpus(24))
    # so that what a step subtracts from the parameters is their gradient
    plain = OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0)
    return configure(
        gpt=MODEL,
        data=str(file),
        tokenizer=str(folder),
        pack="best-fit",
        seq=SEQ,
        global_batch=BATCH,
        steps=2,
        seed=3,
        optimizer=plain,
        learning_rate=ScheduleConfig(name="constant", peak=1.0),
    )


@functools.cache
def one_by_one(config: TrainConfig):
    """The mean loss over the targets of the first step, each conversation in a sample of its own."""
    chat = open_samples(configure(config, pack=""))
    packed = PackedChat(chat)
    samples = shuffled(np.arange(BATCH), packed.num_samples, packed.seed).tolist()
    members = np.concatenate([packed.conversations(index) for index in samples])
    assert len(members) > 1.5 * BATCH
    init_key, _ = random.split(random.key(config.seed)).unbind(0)
    weights = init_params(init_key, gpt.defs(config.gpt))
    pairs = [tuple(map(torch.from_numpy, chat.conversation(int(i)))) for i in members]
    total = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in pairs)

    def mean(weights):
        losses = [
            gpt.loss(config.gpt, weights, {"tokens": tokens[None], "targets": targets[None]})
            for tokens, targets in pairs
        ]
        return sum(losses) / total

    grads, value = torch.func.grad_and_value(mean)(weights)
    return weights, value, grads


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_has_the_losses_of_one_conversation_a_sample(config, model):
    config = replace(config, gpt=MODELS[model])
    check_step(config, "", one_by_one(config))


@pytest.mark.parametrize(("mesh", "options"), [
    ("dp=2,tp=2", {"sequence_parallel": True}),
    ("pp=2", {"microbatches": 2}),
    ("cp=2,tp=2", {"microbatches": 2}),
    ("", {"microbatches": 4, "loss_chunk_tokens": 32}),
], ids=str)  # fmt: skip
def test_so_has_every_mesh(config, mesh, options):
    check_step(config, mesh, one_by_one(config), **options)


def test_conversations_stay_whole_and_each_comes_once(config):
    chat, packed = open_samples(configure(config, pack="")), open_samples(config)
    assert isinstance(packed, PackedChat)
    members = [packed.conversations(i).tolist() for i in range(packed.num_samples)]
    assert Counter(itertools.chain(*members)) == Counter(range(chat.num_samples))
    assert packed.num_samples < chat.num_samples / 1.5
    assert packed.num_conversations == chat.num_samples
    for index, numbers in enumerate(members):
        tokens, targets, positions, segments = packed.sample(index)
        at = 0
        for segment, number in enumerate(numbers):
            ids, wanted = chat.conversation(number)
            here = slice(at, at + len(ids))
            assert tokens[here].tolist() == ids.tolist()
            assert targets[here].tolist() == wanted.tolist()
            assert positions[here].tolist() == list(range(len(ids)))
            assert (segments[here] == segment).all()
            at += len(ids)
        assert (tokens[at:] == chat.pad).all()
        assert (targets[at:] == IGNORE_INDEX).all()
        assert (segments[at:] == len(numbers) - 1).all()
        assert positions.max() < SEQ
    said = packed.summary()
    assert f"in {chat.num_samples} conversations, packed into {packed.num_samples} samples" in said
    with pytest.raises(IndexError, match=f"sample {packed.num_samples}: wanted 0 to"):
        packed.sample(packed.num_samples)


def test_batches_follow_from_the_step_alone(config):
    packed = open_samples(config)
    whole = packed.batch(7, 12)
    for parts in (2, 3, 4):
        again = open_samples(config)
        pieces = [again.batch(7, 12, (index, parts)) for index in range(parts)]
        for name, leaf in whole.items():
            assert leaf.dtype == torch.int64
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), leaf)
    size = packed.num_samples
    epochs = [packed.batch(step, size)["tokens"].tolist() for step in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_what_is_too_long_is_cut_or_dropped_before(config, tmp_path):
    long = {"messages": messages("who", "I am here to help " * 20)}
    file = write_lines(tmp_path / "a.jsonl", [*corpus(6), long])
    config = configure(config, data=str(file))
    with pytest.raises(ValueError, match="--overlong cut or drop"):
        open_samples(config)
    dropped, cut = (open_samples(configure(config, overlong=how)) for how in ("drop", "cut"))
    assert (dropped.num_conversations, cut.num_conversations) == (6, 7)
    assert cut.conversations(0).tolist() == [6]  # it fills a sample by itself


ANSWER = "I am here to help"


def test_a_run_learns_and_answers(config, tmp_path, capsys):
    lines = [{"messages": messages(word, ANSWER)} for word in ("fox", "who", "dog", "you")] * 8
    data = write_lines(tmp_path / "chat.jsonl", lines)
    run = tmp_path / "run"
    options = [
        "--data", data, "--tokenizer", config.data.tokenizer, "--pack", "best-fit",
        "--seq", 80, "--global-batch", 2, "--steps", 40, "--eval-every", 40,
        "--eval-data", f"seen={data}", "--gpt.vocab-size", 300,
        "--gpt.num-layers", 1, "--gpt.embed-dim", 64, "--gpt.num-heads", 2, "--gpt.num-kv-heads", 2,
        "--gpt.mlp-dim", 64, "--gpt.tied", "--learning-rate.peak", 0.02,
        "--learning-rate.warmup-steps", 2, "--learning-rate.end-fraction", 0.005,
    ]  # fmt: skip
    assert main(["train", *map(str, options), "--out", str(run)]) == 0
    assert "32 conversations, packed into" in capsys.readouterr().out
    records = run_folder.records(run)
    found = [record["loss"] for record in records]
    assert found[0] > 5  # about log 300
    assert found[-1] < 0.1
    seen = records[-1]["eval"]["seen"]
    assert seen["loss"] < 0.1
    # every target of every conversation, once
    chat = Chat(data, Tokenizer(config.data.tokenizer), 80)
    assert seen["tokens"] == chat.num_targets
    ask = ["--chat", "--prompt", "fox", "--temperature", "0", "--tokens", "30"]
    assert main(["sample", str(run), *ask]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
