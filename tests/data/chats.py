"""A small tokenizer trained here, and conversations, for tests of fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
WORDS = "the quick brown fox jumps over a lazy dog and who are you I am here Grüße 🙂 to help "

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{% endfor %}" + CHATML
)
MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, template: str | None = CHATML, **settings: Any) -> Path:
    """A byte-level BPE tokenizer of 300 ids, whose texts end with one and turns with another."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS, "user assistant system\n"] * 3, trainer)
    folder.mkdir(exist_ok=True, parents=True)
    made.save(str(folder / "tokenizer.json"))
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    } | settings
    if template is not None:
        table["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder


def messages(*said: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(said)
    ]


def write_lines(file: Path, lines: Sequence[Any]) -> Path:
    """A JSONL file; lines that are text already are written as they are."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(line + "\n" for line in text))
    return file


def corpus(count: int) -> list[dict[str, Any]]:
    """Conversations of different lengths, of which the assistant has uneven parts."""
    words = WORDS.split()
    return [
        {
            "messages": messages(
                *(
                    " ".join(words[(7 * index + 3 * turn + k) % len(words)] for k in range(size))
                    for turn, size in enumerate([1 + index % 3, 1 + index % 6] * (1 + index % 2))
                )
            )
        }
        for index in range(count)
    ]
