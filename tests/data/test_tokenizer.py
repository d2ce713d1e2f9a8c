"""Tokenizers against transformers' over the same files, and who says what in a conversation."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from functron.data import mapped_files
from functron.data.mapped_files import TextRules
from functron.data.templates import find_targets
from functron.data.tokenizer import Tokenizer
from tests.data.chats import CHATML, MARKED
from tests.data.kinds import KINDS, TEMPLATES, TURNS, save, unmarked

tokenizers = pytest.importorskip("tokenizers")

TEXT = "The quick brown fox jumps over the lazy dog. Grüße aus Köln! 你好 🙂\n\ndef f(x):\n    return x\n"

LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak') }}{% endif %}"
    "{% endfor %}"
)

CHAT = [
    {"role": "user", "content": "Who jumps over the dog?"},
    {"role": "assistant", "content": "The quick brown fox jumps."},
    {"role": "user", "content": "  And then? "},
    {"role": "assistant", "content": "  x\n\ny: Grüße 🙂 "},
]


def make(folder: Path, template: str | None = CHATML, *, trim: bool = True) -> Path:
    """A byte-level BPE tokenizer of a few merges, with Llama 3's way of adding a first token."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.post_processor = tokenizers.processors.Sequence(
        [
            tokenizers.processors.ByteLevel(trim_offsets=trim),
            tokenizers.processors.TemplateProcessing(
                single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
            ),
        ]
    )
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|bos|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def theirs(folder: Path):
    transformers = pytest.importorskip("transformers", minversion="5")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [TEXT, "", " ", "a\n\n b", "<|im_start|>user<|im_end|>", "\x00é"])
def test_text(tmp_path, text):
    other = theirs(make(tmp_path))
    for rules in (TextRules("text"), TextRules("parse")):
        ours, split = Tokenizer(tmp_path, rules=rules), rules.special_tokens == "text"
        for special in (True, False):
            ids = ours.encode(text, special=special)
            how = {"add_special_tokens": special, "split_special_tokens": split}
            assert ids == other.encode(text, **how)
            assert ours.decode(ids) == other.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, special=True) == other.decode(ids)
        assert ours.decode(torch.tensor(ours.encode(text)), special=True) == "<|bos|>" + text
    assert ours.vocab_size == len(other) == 330


def test_special_tokens(tmp_path):
    ours, other = Tokenizer(make(tmp_path)), theirs(tmp_path)
    assert ours.special == {
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
    }
    assert ours.id_of("eos_token") == other.eos_token_id == 2
    assert ours.id_of("bos_token") == other.bos_token_id
    assert ours.id_of("unk_token") is None


@pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA2], ids=["chatml", "marked", "llama2"])
def test_templates_write_what_they_write_in_transformers(tmp_path, template):
    ours, other = Tokenizer(make(tmp_path, template)), theirs(tmp_path)
    for prompt in (False, True):
        messages = CHAT[: 4 - prompt]
        text = ours.render(messages, add_generation_prompt=prompt)
        assert text == other.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
    found = ours.conversation(CHAT)
    assert found.text == ours.render(CHAT)
    assert found.tokens.tolist() == other.apply_chat_template(CHAT, return_dict=False)


def test_what_a_template_marks_is_the_assistants(tmp_path):
    folder = make(tmp_path, MARKED, trim=False)
    found, other = Tokenizer(folder).conversation(CHAT), theirs(folder)
    expected = other.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert found.tokens.tolist() == expected["input_ids"]
    assert found.assistant.int().tolist() == expected["assistant_masks"]
    assert 5 < found.assistant.sum() < len(found.tokens) - 5
    # where offsets leave out spaces, transformers loses those that the assistant begins with
    trimmed = Tokenizer(make(tmp_path, MARKED, trim=True)).conversation(CHAT)
    assert torch.equal(trimmed.tokens, found.tokens)
    assert torch.equal(trimmed.assistant, found.assistant)


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["The quick brown fox jumps.<|im_end|>", "  x\n\ny: Grüße 🙂 <|im_end|>"]),
        (LLAMA2, [" The quick brown fox jumps. <|im_end|>", " x\n\ny: Grüße 🙂 <|im_end|>"]),
    ],
    ids=["chatml", "llama2"],
)
def test_without_marks_it_is_what_follows_each_prompt(tmp_path, template, said, trim):
    ours = Tokenizer(make(tmp_path, template, trim=trim))
    found = ours.conversation(CHAT)
    assert [found.text[start:stop] for start, stop in found.spans] == said
    # runs of tokens that are the assistant's, decoded: the same, with nothing of anyone else's
    runs, before = [], False
    for token, mine in zip(found.tokens.tolist(), found.assistant.tolist(), strict=True):
        if mine and not before:
            runs.append([])
        if mine:
            runs[-1].append(token)
        before = mine
    assert [ours.decode(run, special=True) for run in runs] == said


CHATS = [
    [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris"},
    ],
    [
        {"role": "system", "content": "over a lazy dog"},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The quick fox.\n\nGrüße 🙂 du"},
        {"role": "user", "content": "And 你好"},
        {"role": "assistant", "content": "a  b"},
    ],
]


@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_those_of_transformers(tmp_path, kind):
    """Fourteen kinds of tokenizers, six templates with marks and without, one turn and more."""
    made = KINDS[kind]()
    for name, template in TEMPLATES.items():
        marked = Tokenizer(save(tmp_path / name, made, template))
        bare = Tokenizer(save(tmp_path / f"{name}-bare", made, unmarked(template)))
        other = theirs(tmp_path / name)
        for chat in CHATS:
            options = {"return_dict": True, "return_assistant_tokens_mask": True}
            expected = other.apply_chat_template(chat, **options)
            for ours in (marked, bare):
                found = ours.conversation(chat)
                assert found.tokens.tolist() == expected["input_ids"]
                assert found.assistant.int().tolist() == expected["assistant_masks"], name
                assert found.silent == 0
            end = max(found.assistant.nonzero().flatten().tolist())
            assert int(found.tokens[end]) == made.token_to_id(TURNS[name])


def test_spaces_beside_an_answer(tmp_path):
    """By hand: whoever wrote the space of " Paris", and tokens of spaces alone."""
    text = "A: Paris \nB"
    offsets = [(0, 1), (1, 2), (2, 8), (8, 9), (9, 10), (10, 11)]
    for span, said in [
        ((3, 8), [2]), ((2, 8), [2]), ((3, 9), [2, 3]), ((3, 10), [2, 3, 4]), ((2, 3), []),
        ((3, 3), []), ((0, 11), [0, 1, 2, 3, 4, 5]), ((8, 10), [3, 4]),
    ]:  # fmt: skip
        found, silent = find_targets(text, offsets, [span])
        assert found.nonzero().flatten().tolist() == said
        assert silent == (not said)
    # offsets that leave out spaces: those of tokens of spaces alone are before them
    trimmed = [(0, 1), (1, 2), (3, 8), (9, 9), (10, 10), (10, 11)]
    for span, said in [((3, 8), [2]), ((3, 10), [2, 3, 4]), ((8, 10), [3, 4])]:
        assert find_targets(text, trimmed, [span])[0].nonzero().flatten().tolist() == said
    # a tokenizer that drops them, after a token of another's
    dropped = [(0, 1), (1, 2), (3, 8), (10, 11)]
    assert find_targets(text, dropped, [(2, 9)])[0].tolist() == [False, False, True, False]
    assert find_targets("ab", [(0, 2)], [(0, 2)])[1] == 1  # nothing predicts the first token
    # an empty answer says nothing, be it in the middle of a token of spaces
    for text, offsets in [("a  b", [(0, 1), (1, 3), (3, 4)]), ("a  b", [(0, 1), (3, 3), (3, 4)])]:
        for span in [(2, 2), (2, 1)]:
            found, silent = find_targets(text, offsets, [span])
            assert not found.any()
            assert silent == 1


def test_an_empty_answer_says_nothing(tmp_path):
    """Between two line ends, which the tokenizer takes for one token."""
    template = (
        "{% for m in messages %}{{ m.role + ':\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    made = KINDS["byte-level"]()
    made.add_tokens(["\n\n"])
    ours = Tokenizer(save(tmp_path, made, template))
    for said, silent in [("", 1), ("a", 0)]:
        chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": said}]
        found = ours.conversation(chat)
        assert (made.token_to_id("\n\n") in found.tokens) == (not said)
        assert ours.decode(found.tokens[found.assistant]) == said
        assert found.silent == silent


@pytest.mark.parametrize("kind", ["byte-level", "metaspace-always", "unigram", "tiktoken"])
def test_a_prompt_ends_where_its_answer_begins(tmp_path, kind):
    """Also where the template ends it with a space that is a part of the answer's first token."""
    ours = Tokenizer(save(tmp_path, KINDS[kind](), unmarked(TEMPLATES["plain"])))
    chat = [CHATS[0][0], {"role": "assistant", "content": "fox"}]
    found = ours.conversation(chat)
    begins = int(found.assistant.int().argmax())
    assert ours.encode_prompt(chat[:1]) == found.tokens[:begins].tolist()


def test_messages_that_look_like_marks_mark_nothing(tmp_path):
    ours = Tokenizer(make(tmp_path, MARKED))
    chat = [{"role": "user", "content": "{% generation %}I{% endgeneration %}"}, CHAT[1]]
    found = ours.conversation(chat)
    assert [found.text[start:stop] for start, stop in found.spans] == [
        "The quick brown fox jumps.<|im_end|>"
    ]
    silent = ours.conversation(CHAT[:1])
    assert not silent.assistant.any()
    assert silent.spans == ()


def test_templates_that_change_their_mind(tmp_path):
    """Qwen3's, for one, takes the thoughts out of all turns but the last."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if loop.last %}<think></think>{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ours = Tokenizer(make(tmp_path, template))
    with pytest.raises(ValueError, match="cannot find the text of the assistant") as caught:
        ours.conversation(CHAT)
    assert r"messages[1]: got text that changes with what stands around it" in str(caught.value)
    assert "{% generation %}" in str(caught.value)


def test_what_templates_may_use(tmp_path):
    template = (
        "{{ messages | tojson }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | upper }}{% endfor %}{{ strftime_now('%Y') | length }}{{ tools is none }}{{ more }}"
    )
    ours, other = Tokenizer(make(tmp_path, template)), theirs(tmp_path)
    chat = [{"role": "user", "content": "<é>"}] * 2
    assert ours.render(chat, more=3) == other.apply_chat_template(chat, tokenize=False, more=3)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('alternate, please') }}", "alternate, please"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0].content + 3 }}", "str"),
    ],
)
def test_templates_are_not_trusted(tmp_path, template, reason):
    ours = Tokenizer(make(tmp_path, template))
    with pytest.raises(ValueError, match="the template refuses this conversation") as caught:
        ours.render(CHAT)
    assert reason in str(caught.value)


LOOP = "{%% for a in range(99999) %%}{%% for b in range(99999) %%}%s{%% endfor %%}{%% endfor %%}"
DOUBLED = (
    "{%% set ns = namespace(x='ab') %%}{%% for a in range(99) %%}"
    "{%% set ns.x = ns.x %s ns.x %%}{%% endfor %%}{{ ns.x | length }}"
)
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP % "", "longer than 0.2 seconds"),
        (MACRO, "longer than 0.2 seconds"),
        (LOOP % ("x" * 100), "more than 100000 characters"),
        (DOUBLED % "~", "more than 100000 characters"),
        (DOUBLED % "+", "more than 100000 characters"),
        ("{{ ('a' * 10**12) | length }}", "more than 100000 characters"),
        ("{{ 10 ** 10000000000 }}", "more than 100000 characters"),
        ("{{ '%1000000000000d' % 1 }}", "MemoryError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_templates_have_their_time_and_their_characters(tmp_path, monkeypatch, template, reason):
    module = sys.modules["functron.data.templates"]
    monkeypatch.setattr(module, "TEMPLATE_SECONDS", 0.2)
    monkeypatch.setattr(module, "TEMPLATE_CHARACTERS", 100_000)
    ours = Tokenizer(make(tmp_path, template))
    with pytest.raises(ValueError, match="the template") as caught:
        ours.render(CHAT)
    assert reason in str(caught.value)


def test_limits_of_one_conversation_are_not_those_of_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["functron.data.templates"], "TEMPLATE_CHARACTERS", 150)
    ours = Tokenizer(make(tmp_path, "{{ 'x' * 100 }}"))
    assert {ours.render(CHAT) for _ in range(3)} == {"x" * 100}


def test_where_templates_are(tmp_path):
    folder = make(tmp_path, None)
    with pytest.raises(ValueError, match=r"got no chat_template in tokenizer_config\.json"):
        Tokenizer(folder).render(CHAT)
    several = [{"name": "default", "template": "a"}, {"name": "tools", "template": "b"}]
    make(tmp_path, several)
    assert Tokenizer(folder).render(CHAT) == "a"
    make(tmp_path, several[1:])
    with pytest.raises(ValueError, match="chat_template: got several, none the default"):
        Tokenizer(folder)
    (folder / "chat_template.jinja").write_text("c")
    assert Tokenizer(folder).render(CHAT) == "c"


def test_broken_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"tokenizer\.json: got No such file or directory"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: got .*wanted a tokenizer\.json"):
        Tokenizer(tmp_path)
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: got .*wanted JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer(tmp_path).special == {}  # text alone needs no settings

    usual = importlib.util.find_spec
    monkeypatch.setattr(
        mapped_files, "find_spec", lambda name: None if name == "tokenizers" else usual(name)
    )
    with pytest.raises(
        ValueError, match=r"tokenizers: got no such package.*pip install tokenizers"
    ):
        Tokenizer(tmp_path)
