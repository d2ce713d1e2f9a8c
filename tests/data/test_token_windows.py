"""Tokens on disk as batches: the same tokens as in memory, on any number of parts, and in a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from functron import cli
from functron.data import IndexedWriter, TokenWindows, open_tokens

SEQ = 16


@pytest.fixture
def tokens(tmp_path):
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(0, 200, size) for size in (40, 1, 300, 77, 12)]
    with IndexedWriter(tmp_path / "text", np.uint16) as writer:
        for document in documents:
            writer.add(document)
    return tmp_path / "text", np.concatenate(documents)


def test_every_epoch_has_every_window_once(tokens):
    path, row = tokens
    windows = TokenWindows(open_tokens(path), SEQ, seed=3)
    assert (windows.num_tokens, windows.num_documents) == (430, 5)
    number = (430 - 1) // SEQ
    wanted = sorted(row[i * SEQ : i * SEQ + SEQ + 1].tolist() for i in range(number))
    for epoch in range(2):
        found = []
        for step in range(epoch * number, (epoch + 1) * number):
            batch = windows.batch(step, 1)
            found.append([*batch["tokens"][0].tolist(), int(batch["targets"][0, -1])])
            assert torch.equal(batch["tokens"][0, 1:], batch["targets"][0, :-1])
        assert sorted(found) == wanted


def test_parts_are_parts_of_one_batch(tokens):
    windows = TokenWindows(open_tokens(tokens[0]), SEQ)
    whole = windows.batch(5, 8)
    parts = [windows.batch(5, 8, (index, 4)) for index in range(4)]
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)


def test_ids_that_the_model_lacks_are_named(tokens):
    path, row = tokens
    windows = TokenWindows(open_tokens(path), SEQ, vocab_size=100)
    first = int(np.flatnonzero(row >= 100)[0])
    message = f"text: got id {row[first]} at token {first}; wanted ids from 0 to 99; fix: choose"
    with pytest.raises(ValueError, match=message):
        windows.sample(first // SEQ)


def test_too_short_for_a_sample(tokens):
    with pytest.raises(ValueError, match="text: got 430 tokens; wanted at least seq"):
        TokenWindows(open_tokens(tokens[0]), 430)


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_training_on_them_is_training_on_the_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(np.random.default_rng(1).integers(32, 127, 5000).astype(np.uint8)))
    prefix = str(tmp_path / "tokens")
    made = ["preprocess", str(text), "--tokenizer", "bytes", "--out", prefix, "--workers", "1"]
    assert cli.main([*made, "--no-append-eod"]) == 0
    run = ["train", "--steps", "3", "--seq", "32", "--out"]
    assert cli.main([*run, str(tmp_path / "one"), "--data", str(text)]) == 0
    assert cli.main([*run, str(tmp_path / "two"), "--data", prefix, "--mesh", "dp=2"]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    missing = [*run, str(tmp_path / "three"), "--format", "tokens", "--data", str(tmp_path / "no")]
    assert cli.main(missing) == 2


def test_documents_are_masked_from_one_another(tokens):
    path, row = tokens
    file = open_tokens(path)
    windows = TokenWindows(file, SEQ, seed=3, mask_documents=True)
    plain = TokenWindows(file, SEQ, seed=3)
    batch, other = windows.batch(0, windows.num_windows), plain.batch(0, windows.num_windows)
    assert torch.equal(batch["tokens"], other["tokens"])
    owners = file.documents_of(np.arange(len(row)))
    starts = {row[i * SEQ : i * SEQ + SEQ].tobytes(): i * SEQ for i in range(windows.num_windows)}
    for index in range(windows.num_windows):
        tokens_here, targets, positions, segments = (
            batch[name][index].tolist() for name in ("tokens", "targets", "positions", "segments")
        )
        start = starts[np.array(tokens_here, row.dtype).tobytes()]
        for t in range(SEQ):
            same = [owners[start + t] == owners[start + u] for u in range(SEQ)]
            assert same == [segments[t] == segments[u] for u in range(SEQ)]
            assert positions[t] == sum(same[:t])
            inside = owners[start + t + 1] == owners[start + t]
            assert targets[t] == (row[start + t + 1] if inside else -100)
