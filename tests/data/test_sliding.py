"""Windows that slide: every target once, from where it may see, in batches of any kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from functron.data import Chat, MockTokens, Tokenizer, open_tokenizer
from functron.data.chat import IGNORED, Conversations
from functron.data.token_datasets import Documents, Sliding, StoredTokens
from tests.data.chats import corpus, make_tokenizer, write_lines


class Numbered:
    """Texts whose tokens say which text and place they are of: 1000 * text + place + 1."""

    num_bytes = None

    def __init__(self, *lengths: int):
        self.lengths = np.array(lengths, np.int64)

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        assert 0 <= start < start + length <= self.lengths[text]
        tokens = np.arange(start, start + length) + 1000 * text + 1
        return tokens, tokens + 1

    def summary(self) -> str:
        return ""


TEXTS = (Numbered(37), Numbered(5, 0, 8, 21, 1, 8, 90, 13), Numbered(8, 8), Numbered(3, 2))


@pytest.mark.parametrize("texts", TEXTS, ids=lambda texts: str(texts.lengths))
@pytest.mark.parametrize(("seq", "stride"), [(8, 8), (8, 3), (8, 1), (5, 4), (128, 128)])
@pytest.mark.parametrize(("multiple", "exact"), [(1, False), (1, True), (4, False)])
def test_every_target_counts_once(texts, seq, stride, multiple, exact):
    rows, found = 3, {}
    made = Sliding(texts, seq, stride, rows, multiple=multiple, exact=exact)
    assert made.num_samples % rows == 0
    for step in range(made.num_samples // rows):
        batch = made.batch(step, rows)
        parts = [made.batch(step, rows, (i, rows)) for i in range(rows)]
        for name, leaf in batch.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), leaf)
        tokens, targets = batch["tokens"], batch["targets"]
        assert tokens.shape[1] % multiple == 0
        assert tokens.shape[1] <= made.longest
        lengths = [int((row > 0).sum()) for row in tokens]
        if exact:
            assert len({length for length in lengths if length}) == 1
        for row, length in zip(range(rows), lengths, strict=True):
            assert (targets[row, length:] == IGNORED).all()
            for place in range(length):
                target = int(targets[row, place])
                if target == IGNORED:
                    continue
                assert target == int(tokens[row, place]) + 1
                assert target not in found
                found[target] = place + 1  # tokens that it is predicted from
    # by the rule: targets 1 to seq from the beginning, others from the first window that has them
    want = {}
    for text, length in enumerate(texts.lengths.tolist()):
        for target in range(1, length + 1):
            begin = max(-(-(target - seq) // stride), 0) * stride
            want[1000 * text + target + 1] = target - begin
    assert found == want
    assert min(want.values()) >= 1


def test_texts_of_every_kind(tmp_path):
    """Their tokens, and the bytes that all but the first of them stand for."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    tokenizer = open_tokenizer(folder)
    assert isinstance(tokenizer, Tokenizer)
    said = ["the fox \u00e9 sees", "\u4f60 the end", "x"]
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(said):
        (tmp_path / "texts" / f"{index}.txt").write_text(text, encoding="utf-8")
    ids = [tokenizer.encode(text, special=False) for text in said]
    texts = Documents(tmp_path / "texts", tokenizer, 300)
    assert texts.lengths.tolist() == [len(x) - 1 for x in ids]
    assert [texts.piece(1, 0, len(ids[1]) - 1)[i].tolist() for i in (0, 1)] == [
        ids[1][:-1],
        ids[1][1:],
    ]
    # the first token of the second is one of the three bytes of a character
    first = len(tokenizer.decode(ids[0][:1]).encode())
    assert tokenizer.decode(ids[1][:1]) == "\ufffd"
    assert texts.num_bytes == sum(len(x.encode()) for x in said) - first - 1 - 1
    bare = Documents(tmp_path / "texts", None, 256)
    assert bare.num_bytes == int(bare.lengths.sum()) == sum(len(x.encode()) for x in said) - 3
    with pytest.raises(ValueError, match="tokens outside the vocabulary"):
        Documents(tmp_path / "texts", tokenizer, 40)

    chat = Chat(write_lines(tmp_path / "chat.jsonl", corpus(7)), tokenizer, 1 << 40)
    made = Sliding(Conversations(chat), 9, 4, 2)
    targets = torch.cat(
        [made.batch(i, 2)["targets"].flatten() for i in range(made.num_samples // 2)]
    )
    assert int((targets != IGNORED).sum()) == chat.num_targets

    mock = Sliding(StoredTokens(MockTokens(1 << 50, 60), 60), 1 << 10, 1 << 10, 4)
    assert mock.batch(1 << 30, 4)["tokens"].shape == (4, 1 << 10)
    with pytest.raises(ValueError, match=r"id \d+ at token"):
        Sliding(StoredTokens(MockTokens(1 << 50, 60), 5), 64, 64, 4).batch(0, 4)


def test_what_cannot_slide():
    with pytest.raises(ValueError, match="stride: got 9; wanted from 1 to seq=8"):
        Sliding(Numbered(9), 8, 9, 2)
    with pytest.raises(ValueError, match="2 texts, none with two tokens"):
        Sliding(Numbered(0, 0), 8, 8, 2)
