"""Tokens on disk as batches: the same tokens as in memory, on any number of parts, and in a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from functron.cli import main
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
    assert main.main([*made, "--no-append-eod"]) == 0
    run = ["train", "--steps", "3", "--seq", "32", "--out"]
    assert main.main([*run, str(tmp_path / "one"), "--data", str(text)]) == 0
    assert main.main([*run, str(tmp_path / "two"), "--data", prefix, "--mesh", "dp=2"]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    missing = [*run, str(tmp_path / "three"), "--format", "tokens", "--data", str(tmp_path / "no")]
    assert main.main(missing) == 2


def test_documents_are_masked_from_one_another(tokens):
    path, row = tokens
    file = open_tokens(path)
    windows = TokenWindows(file, SEQ, seed=3, mask_documents=True)
    plain = TokenWindows(file, SEQ, seed=3)
    batch, other = windows.batch(0, windows.num_samples), plain.batch(0, windows.num_samples)
    assert torch.equal(batch["tokens"], other["tokens"])
    owners = file.documents_of(np.arange(len(row)))
    starts = {row[i * SEQ : i * SEQ + SEQ].tobytes(): i * SEQ for i in range(windows.num_samples)}
    for index in range(windows.num_samples):
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


@pytest.mark.parametrize("masked", [False, True])
def test_without_an_extra_token_samples_share_none(tmp_path, masked):
    """As Megatron-LM without it: labels are the tokens shifted by one, and the last has none."""
    row = np.arange(1, 25, dtype=np.uint16)
    with IndexedWriter(tmp_path / "t", np.uint16) as writer:
        for document in np.split(row, [7, 12]):
            writer.add(document)
    file = open_tokens(tmp_path / "t")
    samples = TokenWindows(file, 6, extra_token=False, mask_documents=masked)
    assert samples.num_samples == 4  # 3 where the last one's last target must be there
    drawn = samples.draw(np.arange(4))
    assert sorted(drawn["tokens"].flatten().tolist()) == row.tolist()
    for tokens, targets in zip(drawn["tokens"].tolist(), drawn["targets"].tolist(), strict=True):
        wanted = [*tokens[1:], -100]
        if masked:
            wanted = [-100 if a in (7, 12) else b for a, b in zip(tokens, wanted, strict=True)]
        assert targets == wanted
    if masked:
        whole = TokenWindows(file, 6, mask_documents=True).draw(np.arange(3))
        by_first = {int(t[0]): i for i, t in enumerate(drawn["tokens"])}
        for i, tokens in enumerate(whole["tokens"]):
            same = by_first[int(tokens[0])]
            for name in ("positions", "segments"):
                assert torch.equal(whole[name][i], drawn[name][same])


def test_every_sample_of_two_files_once_from_the_command_line(tmp_path, capsys):
    for name, size in (("a", 50), ("b", 26)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add(np.arange(size, dtype=np.uint16))
    out = tmp_path / "run"
    data = f"all {tmp_path / 'a'} all {tmp_path / 'b'}"
    small = ["--model", "llama3-tiny", "--seq", "8", "--global-batch", "3", "--steps", "3"]
    options = [*small, "--data", data, "--no-extra-token", "--out", str(out)]
    assert main.main(["train", *options]) == 0
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    seen = {name[-1]: entry for name, entry in last["sources"].items()}
    assert seen == {"a": {"samples": 6, "epochs": 1.0}, "b": {"samples": 3, "epochs": 1.0}}
    assert main.main(["train", *small, "--no-extra-token", "--out", str(tmp_path / "x")]) == 2
    assert (
        "extra_token: got False, which has no effect; wanted tokens on disk"
        in capsys.readouterr().err
    )
