"""The tokenizers of runs, of every kind: found, kept in the run folder, and sampled with."""

from __future__ import annotations

import json

import pytest

from functron.cli import main
from functron.data.shards import provenance
from functron.data.tokenizer import ByteTokenizer, RankFile, SentencePiece
from functron.training import run_folder
from functron.training.config import configure, load
from functron.training.data import tokenizer_of, with_tokenizer
from tests.data.chats import WORDS, make_tokenizer
from tests.data.test_text_tokenizer import model, write_ranks  # noqa: F401  (a fixture)

TRAIN = ["train", "--steps", "2", "--seq", "16", "--global-batch", "2", "--gpt.vocab-size", "512"]
PATTERN = r"\p{L}+|[^\p{L}]+"


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(f"{WORDS}\n" * 20)
    return file


def preprocess(text, tokenizer, out, *options):
    options = ["--tokenizer", str(tokenizer), "--out", str(out), "--workers", "1", *options]
    assert main.main(["preprocess", str(text), *options]) == 0
    return str(out)


def sampled(run, capsys, *options) -> str:
    capsys.readouterr()
    options = ("--prompt", "the quick", "--tokens", "3", *options)
    assert main.main(["sample", str(run), *options]) == 0
    return capsys.readouterr().out


def test_sentence_piece_from_text_to_sample(model, text, tmp_path, capsys):  # noqa: F811
    source, run = tmp_path / "spm.model", tmp_path / "run"
    source.write_bytes(model.read_bytes())
    options = ["--data", str(text), "--tokenizer", str(source), "--out", str(run)]
    assert main.main([*TRAIN, *options]) == 0
    assert (run / "hub" / "spm.model").read_bytes() == model.read_bytes()
    source.unlink()  # the run has its own
    assert sampled(run, capsys).startswith("the quick")
    assert main.main(["train", "--resume", "--out", str(run), "--steps", "3"]) == 0


def test_tokens_on_disk_say_what_made_them(text, tmp_path, capsys):
    pytest.importorskip("tiktoken")
    file, run = write_ranks(tmp_path / "mine.tiktoken"), tmp_path / "run"
    data = preprocess(text, file, tmp_path / "tokens", "--pattern", PATTERN)
    config = configure(data=data)
    found = with_tokenizer(config)
    assert (found.data.tokenizer, found.data.tokenizer_pattern) == (str(file), PATTERN)
    assert with_tokenizer(configure(config, data=f"1 {data}")).data.tokenizer == str(file)
    assert with_tokenizer(configure(config, tokenizer="bytes")).data.tokenizer == "bytes"

    assert main.main([*TRAIN, "--data", data, "--out", str(run)]) == 0
    assert f"tokens {file}" in capsys.readouterr().out
    file.unlink()
    kept = configure(load(run / run_folder.CONFIG), out=str(run))
    reader = tokenizer_of(kept)
    assert isinstance(reader, RankFile)
    assert reader.decode(reader.encode("the quick 12")) == "the quick 12"
    assert sampled(run, capsys).startswith("the quick")
    assert main.main(["train", "--resume", "--out", str(run), "--steps", "3"]) == 0

    # a new run cannot find it, and says so when text is asked for
    other = tmp_path / "other"
    assert with_tokenizer(config) == config
    assert main.main([*TRAIN, "--data", data, "--out", str(other)]) == 0
    assert main.main(["sample", str(other), "--prompt", "a"]) == 2
    assert "does not say what made them; wanted their tokenizer" in capsys.readouterr().err
    assert sampled(other, capsys, "--tokenizer", "bytes").startswith("the quick")


def test_bytes_made_them(text, tmp_path, capsys):
    data, run = preprocess(text, "bytes", tmp_path / "tokens", "--format", "npy"), tmp_path / "run"
    assert provenance([f"{data}.npy", f"{data}.documents.npy"]) == provenance([data])
    assert main.main([*TRAIN, "--data", f"{data}.npy", "--out", str(run)]) == 0
    found = load(run / run_folder.CONFIG)
    assert found.data.tokenizer == "bytes"
    assert isinstance(tokenizer_of(found), ByteTokenizer)
    assert sampled(run, capsys).startswith("the quick")


def test_tokens_of_two_tokenizers_do_not_blend(text, tmp_path, capsys):
    one = preprocess(text, "bytes", tmp_path / "one")
    two = preprocess(text, make_tokenizer(tmp_path / "bpe", None), tmp_path / "two")
    blend = f"1 {one} 1 {two}"
    with pytest.raises(
        ValueError, match=r"two: got tokens of .*bpe.*; wanted tokens of bytes, as in .*one"
    ):
        with_tokenizer(configure(data=blend))
    assert main.main([*TRAIN, "--data", blend, "--out", str(tmp_path / "run")]) == 2
    # where one does not say it, nothing is known of both
    (tmp_path / "two.json").write_text(json.dumps({"tokenizer": 3}))
    assert with_tokenizer(configure(data=blend)).data.tokenizer == ""


def test_another_kind_takes_the_place_of_a_kept_one(model, tmp_path):  # noqa: F811
    run, before = tmp_path / "run", make_tokenizer(tmp_path / "before", None)
    run.mkdir()
    run_folder.keep_tokenizer(run, configure(tokenizer=str(before)))
    run_folder.keep_tokenizer(run, configure(tokenizer=str(model)))
    assert [file.name for file in (run / "hub").iterdir()] == ["tokenizer.model"]
    config = configure(tokenizer=str(model), out=str(run))
    run_folder.write_config(run, config)
    assert run_folder.tokenizer_path(config) == run / "hub"
    assert isinstance(tokenizer_of(config), SentencePiece)
    run_folder.keep_tokenizer(run, configure(tokenizer=str(before)))
    assert not list((run / "hub").glob("*.model"))


def test_conversations_need_a_template(model, tmp_path):  # noqa: F811
    data = tmp_path / "talk.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    options = ["--data", str(data), "--tokenizer", str(model), "--out", str(tmp_path / "run")]
    assert main.main([*TRAIN, *options]) == 2
