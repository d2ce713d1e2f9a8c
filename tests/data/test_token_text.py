"""Text through a tokenizer: documents and what separates them, batches, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from functron.data import TextWindows, Tokenizer
from tests.data.chats import WORDS, make_tokenizer, tokenizers

END = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_text("who are you? " * 30)
    (tmp_path / "text" / "a.txt").write_text(WORDS * 4)
    (tmp_path / "text" / "picture").write_bytes(b"\x89PNG\0")
    return tmp_path / "text"


def test_documents_stand_one_after_another(files, folder):
    text = TextWindows(files, 8, Tokenizer(folder))
    reader = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = []
    for name in ("a.txt", "b.txt"):
        expected += [*reader.encode((files / name).read_text()).ids, END]
    assert text.num_tokens == len(expected)
    assert text.read(0, len(expected)).tolist() == expected
    assert (text.num_documents, text.num_skipped) == (2, 1)
    assert text.num_samples == (len(expected) - 1) // 8
    assert text.vocab_size == max(expected) + 1
    assert text.read(0, 1).dtype == np.uint16
    assert text.sample(1).tolist() == expected[8:17]
    assert "2 documents, 1 files skipped" in text.summary()


def test_batches_follow_from_the_step_alone(files, folder):
    text = TextWindows(files, 8, Tokenizer(folder), seed=3)
    whole = text.batch(5, 6)
    for parts in (1, 2, 3, 6):
        again = TextWindows(files, 8, Tokenizer(folder / "tokenizer.json"), seed=3)
        pieces = [again.batch(5, 6, (index, parts)) for index in range(parts)]
        for name, leaf in whole.items():
            assert leaf.dtype == torch.int64
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), leaf)
    assert torch.equal(whole["tokens"][:, 1:], whole["targets"][:, :-1])
    count = text.num_samples
    epochs = [text.batch(step, count)["tokens"].tolist() for step in (0, 1)]
    windows = sorted(text.sample(index)[:-1].tolist() for index in range(count))
    assert sorted(epochs[0]) == sorted(epochs[1]) == windows
    assert epochs[0] != epochs[1]


def test_a_file_of_another_name_and_ends_that_are_named_nowhere(files, folder, tmp_path):
    other = tmp_path / "my.json"
    other.write_bytes((folder / "tokenizer.json").read_bytes())
    found = Tokenizer(other)
    assert found.path == tmp_path
    assert found.end_of_text == END  # by its usual name
    assert (
        TextWindows(files, 8, found).num_tokens
        == TextWindows(files, 8, Tokenizer(folder)).num_tokens
    )


def test_what_is_refused(files, folder, tmp_path):
    tokenizer = Tokenizer(folder)
    with pytest.raises(ValueError, match=r"tokenizer: got token ids up to \d+; wanted ids below"):
        TextWindows(files, 8, tokenizer, vocab_size=200)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "late.txt").write_bytes(b"a" * (1 << 16) + b"\xff")
    (tmp_path / "x" / "later.txt").write_bytes(b"a" * (1 << 16) + b"b\xfe")
    with pytest.raises(ValueError, match="cannot read the training text") as caught:
        TextWindows(tmp_path / "x", 8, tokenizer)
    assert "late.txt: got byte 0xff at offset 65536; wanted UTF-8" in str(caught.value)
    assert "later.txt: got byte 0xfe at offset 65537" in str(caught.value)
    (tmp_path / "short.txt").write_text("the")
    with pytest.raises(ValueError, match=r"got \d tokens; wanted at least seq \+ 1 = 41"):
        TextWindows(tmp_path / "short.txt", 40, tokenizer)
    bare = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    (tmp_path / "bare").mkdir()
    bare.save(str(tmp_path / "bare" / "tokenizer.json"))
    with pytest.raises(ValueError, match="no token that ends a text; wanted one; fix: name"):
        TextWindows(files, 8, Tokenizer(tmp_path / "bare"))
