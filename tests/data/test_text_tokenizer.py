"""Tokenizers of every kind against their own packages, and what is refused."""

from __future__ import annotations

import base64
import io

import pytest
import torch

from functron.data import mapped_files, tokenizer
from functron.data.tokenizer import (
    SCHEMES,
    ByteTokenizer,
    RankFile,
    SentencePiece,
    Tokenizer,
    end_of_text,
    open_tokenizer,
)
from tests.data.chats import WORDS, make_tokenizer

TEXTS = [
    WORDS,
    "",
    " ",
    "I'LL don't\r\n\n  x  12345 <|endoftext|> f(x):\n\treturn 'é'/\n//",
    "你好 🙂 Grüße\u00a0ÄÖ McDonald's camelCase",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    package = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS, *TEXTS[3:]] * 5),
        model_writer=made,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    file = tmp_path_factory.mktemp("model") / "tokenizer.model"
    file.write_bytes(made.getvalue())
    return file


def write_ranks(file, merges=(b"th", b"the", b" q", b"''", b"12", b"Mc", b"\n\n", b"  ", b"ll")):
    """Bytes, and a few merges."""
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    lines = [b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return file


def test_sentence_piece(model):
    package = pytest.importorskip("sentencepiece")
    ours = open_tokenizer(model)
    theirs = package.SentencePieceProcessor(model_file=str(model))
    assert isinstance(ours, SentencePiece)
    assert ours.vocab_size == theirs.get_piece_size() == 330
    assert ours.end_of_text == theirs.eos_id() == 2
    assert ours.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text, special=False) == ids
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        assert ours.decode([1, *ids, 2, 999]) == theirs.decode(ids) == text
        assert ours.decode([1, *ids, 2], special=True) == f"<s>{text}</s>"
    assert ours.encode_batch(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert open_tokenizer(model.parent).file == model


def test_rank_files(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    file = write_ranks(tmp_path / "mine.tiktoken")
    pattern = r"\p{L}+|[^\p{L}]+"
    ours = open_tokenizer(file, pattern=pattern)
    ranks = {base64.b64decode(a): int(b) for a, b in map(bytes.split, file.open("rb"))}
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert isinstance(ours, RankFile)
    assert ours.vocab_size == 256 + 9 + 1
    assert ours.end_of_text == 265
    assert end_of_text(ours, "<|endoftext|>") == 265
    for text in TEXTS:
        ids = theirs.encode_ordinary(text)
        assert ours.encode(text) == ids
        assert ours.decode([*ids, 265, 999]) == text
        assert ours.decode([*ids, 265], special=True) == text + "<|endoftext|>"
    assert ours.encode_batch(TEXTS) == [theirs.encode_ordinary(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_published_schemes(tmp_path, monkeypatch, name):
    """They split text as those that come with tiktoken, which would download their ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    # long merges show where text is split
    file = write_ranks(tmp_path / f"{name}.tiktoken", [text.encode() for text in (
        "do", "n'", "don", "n't", "'t", "12", "123", "1234", "/\n", "\n/", "\r\n", "\n ", " x", "x ",
        "cC", "Ca", "d'", "d's", "'s", "I'", "'L", "LL", "'LL", "):", "):\n", " {", "\n\t", "mC",
    )])  # fmt: skip
    ranks = {base64.b64decode(a): int(b) for a, b in map(bytes.split, file.open("rb"))}
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    published = getattr(public, name)()
    theirs = tiktoken.Encoding(
        name, pat_str=published["pat_str"], mergeable_ranks=ranks, special_tokens={}
    )
    ours = open_tokenizer(file)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode_ordinary(text)
    _, special = SCHEMES[tokenizer.STEMS[name]]
    assert special == published["special_tokens"]


def test_llama3(tmp_path):
    pytest.importorskip("tiktoken")
    # 128,000 ranks, as many as Meta's file has, which is called tokenizer.model
    merges = [b"\xff" + index.to_bytes(3, "big") for index in range(128000 - 256)]
    file = write_ranks(tmp_path / "tokenizer.model", merges)
    ours = open_tokenizer(tmp_path, pattern="llama3")
    assert isinstance(ours, RankFile)
    assert ours.file == file
    assert ours.vocab_size == 128256
    known = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009}
    known |= {"<|start_header_id|>": 128006, "<|reserved_special_token_250|>": 128255}
    assert known.items() <= ours.special_tokens.items()
    assert ours.end_of_text == 128001
    assert ours.encode("the") == [128000, *b"the"]
    assert ours.encode_batch(["the"]) == [list(b"the")]


@pytest.mark.parametrize(("tokens", "plain", "named"), [
    ([104, 256, 105, 256, 256], "hi", "h<|endoftext|>i<|endoftext|><|endoftext|>"),
    ([256, 0xC3, 0xA9], "é", "<|endoftext|>é"),
    ([0xC3, 256, 0xA9], "\ufffd\ufffd", "\ufffd<|endoftext|>\ufffd"),  # of two texts, no character
    ([0xC3, 300, -1, 0xA9], "é", "é"),
    ([], "", ""),
])  # fmt: skip
def test_ends_of_texts_are_written_where_they_stand(tokens, plain, named):
    ours = ByteTokenizer()
    for ids in (tokens, torch.tensor(tokens, dtype=torch.int64)):
        assert ours.decode(ids) == plain
        assert ours.decode(ids, special=True) == named


def test_bytes_and_hugging_face(tmp_path):
    ours = open_tokenizer("bytes")
    assert isinstance(ours, ByteTokenizer)
    for text in TEXTS:
        assert ours.encode(text) == list(text.encode())
        assert ours.decode([*text.encode(), 256]) == text
        assert ours.decode([*text.encode(), 256], special=True) == text + "<|endoftext|>"
    assert ours.encode_batch(["é"]) == [[0xC3, 0xA9]]
    assert end_of_text(ours) == ours.vocab_size - 1 == 256
    folder = make_tokenizer(tmp_path)
    for path in (folder, folder / "tokenizer.json"):
        found = open_tokenizer(path)
        assert isinstance(found, Tokenizer)
        assert found.encode_batch(TEXTS) == [found.encode(text, special=False) for text in TEXTS]
        assert found.special_tokens["<|im_end|>"] == 2
        assert end_of_text(found) == 0
        assert end_of_text(found, "<|im_end|>") == 2


def test_what_is_refused(tmp_path, model, monkeypatch):
    pytest.importorskip("tiktoken")
    folder = make_tokenizer(tmp_path / "hf")
    ours = open_tokenizer(folder)
    with pytest.raises(ValueError, match="unknown special token") as caught:
        end_of_text(ours, "<|im_stop|>")
    assert "tokenizer.json: got '<|im_stop|>', no special token of it" in str(caught.value)
    assert "did you mean '<|im_start|>'?" in str(caught.value)
    with pytest.raises(ValueError, match="got No such file or directory; wanted a tokenizer"):
        open_tokenizer(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"got a folder with none; wanted one of tokenizer\.json"):
        open_tokenizer(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"pattern: got 'gpt2'; wanted none: .* by itself"):
        open_tokenizer(folder, pattern="gpt2")
    file = write_ranks(tmp_path / "empty" / "mine.tiktoken")
    with pytest.raises(ValueError, match=r"pattern: got none for mine\.tiktoken; .*add --pattern"):
        open_tokenizer(file)
    with pytest.raises(ValueError, match=r"'cl10k'; .*did you mean 'cl100k'"):
        open_tokenizer(file, pattern="cl10k")
    with pytest.raises(ValueError, match="wanted a regular expression"):
        open_tokenizer(file, pattern="(")
    (tmp_path / "empty" / "other.model").write_bytes(b"\0\1")
    with pytest.raises(
        ValueError, match=r"got mine\.tiktoken, other\.model|got other\.model, mine"
    ):
        open_tokenizer(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"other\.model: got .*; wanted a model of SentencePiece"):
        open_tokenizer(tmp_path / "empty" / "other.model")
    lines = file.read_bytes().splitlines()
    for changed, said in [
        ([*lines[:3], b"no base64", *lines[3:]], r"mine\.tiktoken:4: got 'no base64'; wanted a token"),
        ([*lines[:5], b"%%%% 7"], r"mine\.tiktoken:6: got '%%%% 7'"),
        (lines[1:], "got no rank for 1 bytes, such as 0x00; wanted one for each"),
        ([], "got no ranks"),
    ]:  # fmt: skip
        file.write_bytes(b"\n".join(changed))
        with pytest.raises(ValueError, match=said):
            open_tokenizer(file, pattern="gpt2")
    monkeypatch.setattr(mapped_files, "find_spec", lambda name: None)
    for path in (file, model):
        with pytest.raises(ValueError, match=r"got no such package; .*pip install"):
            open_tokenizer(path)
