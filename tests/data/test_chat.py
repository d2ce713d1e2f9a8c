"""Conversations: their shapes, templates against transformers, masks to the token, and mistakes."""

from __future__ import annotations

import re

import pytest
import torch

from functron.data import Chat, Tokenizer, mapped_files
from functron.data.chat import IGNORED
from functron.data.mapped_files import TextRules
from functron.data.sampling import drawn
from functron.nn import IGNORE_INDEX
from tests.data.chats import CHATML, MARKED, STRICT, corpus, make_tokenizer, messages, write_lines

SEQ = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def only(chat: Chat) -> tuple[list[int], list[int]]:
    """The tokens and targets of a corpus of one sample."""
    assert chat.num_samples == 1
    tokens, targets = chat.sample(0)
    return tokens.tolist(), targets.tolist()


def test_targets_are_what_the_assistant_says(tokenizer, tmp_path):
    chat = messages("who are you", "I am here", "and who", "the quick fox", system="help")
    tokens, targets = only(Chat(write_lines(tmp_path / "a", [{"messages": chat}]), tokenizer, SEQ))
    pieces = [  # by hand: what the template writes, piece by piece, and whose it is
        ("<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\nwho are you<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("I am here<|im_end|>", True),
        ("\n<|im_start|>user\nand who<|im_end|>\n<|im_start|>assistant\n", False),
        ("the quick fox<|im_end|>", True),
        ("\n", False),
    ]
    ids, mine = [], []
    parser = Tokenizer(tokenizer.file, rules=TextRules("parse"))
    for text, assistant in pieces:
        found = parser.encode(text, special=False)
        ids += found
        mine += [assistant] * len(found)
    padding = SEQ - (len(ids) - 1)
    assert tokens == ids[:-1] + [3] * padding
    wanted = [i if m else IGNORED for i, m in zip(ids[1:], mine[1:], strict=True)]
    assert targets == wanted + [IGNORED] * padding
    assert IGNORED == IGNORE_INDEX


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_samples_are_those_of_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = make_tokenizer(tmp_path / "tokenizer", template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    # its masks need marks; both templates write the same
    marked = transformers.AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "m", MARKED))
    lines = corpus(12)
    chat = Chat(write_lines(tmp_path / "a.jsonl", lines), Tokenizer(folder), 100)
    assert chat.num_samples == 12
    total = 0
    for index, line in enumerate(lines):
        ids = theirs.apply_chat_template(line["messages"], return_dict=False)
        mask = marked.apply_chat_template(
            line["messages"], return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
        tokens, targets = chat.sample(index)
        assert tokens.tolist()[: len(ids) - 1] == ids[:-1]
        wanted = [i if m else IGNORED for i, m in zip(ids[1:], mask[1:], strict=True)]
        assert targets.tolist() == wanted + [IGNORED] * (100 - len(wanted))
        total += sum(mask)
    assert chat.num_targets == total


def test_shapes_of_lines(tokenizer, tmp_path):
    plain = [{"messages": messages("who are you", "I am", system="s")}]
    expected = only(Chat(write_lines(tmp_path / "a.jsonl", plain), tokenizer, SEQ))
    said = [("system", "s"), ("human", "who are you"), ("gpt", "I am")]
    for line in [
        {"conversations": [{"from": who, "value": what} for who, what in said]},
        {"prompt": messages("who are you", system="s"), "completion": messages("", "I am")[1:]},
        {"messages": messages("who are you", "I am", system="s"), "tools": None, "id": 7},
    ]:
        assert only(Chat(write_lines(tmp_path / "b", ["", line]), tokenizer, SEQ)) == expected
    pair = write_lines(tmp_path / "c", [{"prompt": "who are you", "completion": "I am"}])
    two = write_lines(tmp_path / "d", [{"messages": messages("who are you", "I am")}])
    assert only(Chat(pair, tokenizer, SEQ)) == only(Chat(two, tokenizer, SEQ))


def test_a_folder_is_its_jsonl_files(tokenizer, tmp_path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    write_lines(tmp_path / "d" / "e" / "1.jsonl", corpus(3))
    write_lines(tmp_path / "d" / "2.jsonl", corpus(2))
    (tmp_path / "d" / "readme.txt").write_text("no conversation")
    assert Chat(tmp_path / "d", tokenizer, 100).num_samples == 5
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"got a folder with no \.jsonl file"):
        Chat(tmp_path / "none", tokenizer, 100)


def test_batches_follow_from_the_step_alone(tokenizer, tmp_path):
    file = write_lines(tmp_path / "a.jsonl", corpus(10))
    chat = Chat(file, tokenizer, 100, seed=1)
    whole = chat.batch(7, 12)
    for parts in (2, 3, 4):
        again = Chat(file, tokenizer, 100, seed=1)
        pieces = [again.batch(7, 12, (index, parts)) for index in range(parts)]
        for name, leaf in whole.items():
            assert leaf.dtype == torch.int64
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), leaf)
    assert whole["rows"].tolist() == list(range(12))
    epochs = [chat.batch(step, 10)["tokens"].tolist() for step in (0, 1)]
    assert sorted(epochs[0]) == sorted(chat.sample(i)[0].tolist() for i in range(10))
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    grown = torch.cat([drawn(chat, first, 5 + first)["targets"] for first in (0, 5)])
    assert torch.equal(grown, chat.batch(0, 15)["targets"])
    other = Chat(file, tokenizer, 100, seed=2).batch(0, 10)["tokens"].tolist()
    assert other != epochs[0]


def test_conversations_that_are_too_long(tokenizer, tmp_path):
    long = messages("who", "I am here to help " * 10, "and", "the quick fox")
    lines = [{"messages": messages("who", "I am")}, {"messages": long}, {"messages": long[:2]}]
    file = write_lines(tmp_path / "a.jsonl", lines)
    sizes = [len(tokenizer.encode(tokenizer.render(line["messages"]))) for line in lines]
    assert sizes[0] <= 31 < min(sizes[1:])
    with pytest.raises(
        ValueError, match=rf"a\.jsonl:2: got {sizes[1]} tokens; wanted at most"
    ) as e:
        Chat(file, tokenizer, 30)
    assert f"a.jsonl:3: got {sizes[2]} tokens" in str(e.value)
    assert f"fix: set seq to {sizes[1] - 1} or more, or --overlong cut or drop" in str(e.value)
    dropped = Chat(file, tokenizer, 30, overlong="drop")
    assert (dropped.num_samples, dropped.num_skipped, dropped.num_cut) == (1, 2, 0)
    cut = Chat(file, tokenizer, 30, overlong="cut")
    assert (cut.num_samples, cut.num_skipped, cut.num_cut) == (3, 0, 2)
    full = Chat(file, tokenizer, max(sizes))
    for index in range(3):
        for ours, whole in zip(cut.sample(index), full.sample(index), strict=True):
            assert ours.tolist() == whole[:30].tolist()
    # exactly as long as fits: seq tokens and the last one's target
    assert Chat(file, tokenizer, max(sizes) - 1).num_samples == 3
    assert "2 cut off" in cut.summary()
    assert "2 left out" in dropped.summary()


def test_conversations_that_teach_nothing_are_left_out(tokenizer, tmp_path):
    lines = [
        {"messages": messages("who")},
        *corpus(2),
        {"messages": messages("who are " * 40, "I")},
    ]
    file = write_lines(tmp_path / "a.jsonl", lines)
    chat = Chat(file, tokenizer, 60, overlong="cut")
    assert (chat.num_samples, chat.num_skipped) == (2, 2)
    for step in range(4):
        assert (chat.batch(step, 1)["targets"] != IGNORED).any()
    nothing = write_lines(tmp_path / "b.jsonl", [lines[0], lines[0]])
    with pytest.raises(ValueError, match="got 2 conversations, none with a word of the assistant"):
        Chat(nothing, tokenizer, 60)


def test_answers_without_targets_are_counted(tmp_path):
    """Empty ones, and those that nothing predicts, whether others of the conversation are learnt."""
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    bare = Tokenizer(make_tokenizer(tmp_path / "t", plain))
    lines = [
        {"messages": messages("who", "I am")},
        {"messages": messages("who", "", "who are you", "I am here")},
        {"messages": messages("who", "")},
        {"messages": messages("who")},
    ]
    chat = Chat(write_lines(tmp_path / "a.jsonl", lines), bare, 60)
    assert (chat.num_samples, chat.num_skipped, chat.num_silent) == (2, 2, 2)
    assert ", 2 left out, 2 with an answer that has no target" in chat.summary()
    # " I" is the answer's, whose space the template wrote
    assert "I am" in bare.decode([t for t in chat.sample(0)[1].tolist() if t != IGNORED])


BAD = [
    ('{"messages": [', "1: got Expecting value at column 15; wanted one JSON object a line"),
    ("[1]", "2: got a list; wanted an object with"),
    ({"text": "a"}, r"3: got an object with 'text'; .*--format text"),
    ({"messages": []}, "4: messages: got an empty list; wanted at least one message"),
    ({"messages": [{"role": "asistant", "content": "a"}]}, r"5: messages\[0\].role: got 'asistant'; .*did you mean 'assistant'"),
    ({"messages": [{"role": "user"}]}, r"6: messages\[0\].content: got no content; wanted text"),
    ({"messages": [{"content": "a"}, 3]}, r"7: messages\[0\].role: got no role"),
    ({"conversations": [{"from": "bot", "value": "a"}]}, r"8: conversations\[0\].role: got 'bot'"),
    ({"prompt": "a", "completion": 3}, "9: completion: got a number"),
    ({"messages": messages("a", "b", system="c")}, "10: messages: got no system messages"),
    ({"messages": messages("a " * 90, "b")}, r"11: got \d+ tokens; wanted at most seq"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, r"12: messages\[0\].content: got a list"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', r"13: messages\[0\].content: got half of a surrogate pair at character 0; wanted text"),
]  # fmt: skip


def test_all_mistakes_at_once(tmp_path):
    strict = Tokenizer(make_tokenizer(tmp_path / "strict", STRICT))
    file = write_lines(tmp_path / "a.jsonl", [line for line, _ in BAD] + corpus(1))
    with pytest.raises(ValueError, match="cannot use") as caught:
        Chat(file, strict, SEQ)
    for _, message in BAD:
        assert re.search(rf"a\.jsonl:{message}", str(caught.value)), message
    assert r"messages[1]: got a number" in str(caught.value)
    many = write_lines(tmp_path / "b.jsonl", ["{"] * 50)
    with pytest.raises(ValueError, match="the first 20 of 50 mistakes") as caught:
        Chat(many, strict, SEQ)
    assert str(caught.value).count("got Expecting") == 20
    (tmp_path / "c.jsonl").write_bytes(b'{"messages": \xff}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl:1: got byte 0xff at offset 13"):
        Chat(tmp_path / "c.jsonl", strict, SEQ)


def test_tokenizers_that_do_not_do(tokenizer, tmp_path, monkeypatch):
    file = write_lines(tmp_path / "a.jsonl", corpus(2))
    with pytest.raises(ValueError, match=r"got no chat_template in tokenizer_config\.json"):
        Chat(file, Tokenizer(make_tokenizer(tmp_path / "t", None)), SEQ)
    with pytest.raises(ValueError, match=r"wanted ids below gpt.vocab_size=100"):
        Chat(file, tokenizer, SEQ, vocab_size=100)
    with pytest.raises(ValueError, match="overlong: got 'trim'; wanted refuse, cut or drop"):
        Chat(file, tokenizer, SEQ, overlong="trim")
    monkeypatch.setattr(mapped_files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"jinja2: got no such package.*pip install jinja2"):
        Chat(file, tokenizer, SEQ)


def test_where_a_model_stops(tokenizer, tmp_path):
    assert tokenizer.stops == {0, 2}  # the ends of texts and of turns
    assert Tokenizer(make_tokenizer(tmp_path / "t", None)).stops == {0}
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    assert Tokenizer(make_tokenizer(tmp_path / "p", plain)).stops == {0}
