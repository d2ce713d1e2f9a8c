"""Tokenizers of all kinds, trained here on a little text, and templates of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
_n, _p = tokenizers.normalizers, tokenizers.pre_tokenizers

SPECIAL = (
    "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "[INST]", "[/INST]", "<|pad|>",
)  # fmt: skip
TEXT = (
    "User: What is the capital of France? Assistant: Paris, of course.\n### Response:\nThe quick "
    "brown fox jumps over a lazy dog. system user assistant Grüße aus Köln! 你好 🙂 def f(x): return x\n"
)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bpe(normalizer: Any, splitter: Any, size: int = 420, **options: Any) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = splitter
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if options.get("byte_fallback") else []
    alphabet = [] if fallback else _p.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size + len(fallback), special_tokens=[*SPECIAL, *fallback],
        initial_alphabet=alphabet, show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([TEXT] * 3, trainer)
    if fallback:  # of these only the first ones are special
        table = json.loads(made.to_str())
        table["added_tokens"] = [x for x in table["added_tokens"] if x["content"] in SPECIAL]
        made = tokenizers.Tokenizer.from_str(json.dumps(table))
    return made


def _byte_level(prefix: bool, trim: bool) -> Any:
    made = _bpe(None, _p.ByteLevel(add_prefix_space=prefix))
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
    return made


def _metaspace(scheme: str) -> Any:
    return _bpe(None, _p.Metaspace(prepend_scheme=scheme), unk_token="<unk>", byte_fallback=True)


def _legacy() -> Any:
    """Llama 2's: spaces are replaced before, and nothing is split."""
    before = _n.Sequence([_n.Prepend("▁"), _n.Replace(" ", "▁")])
    made = _bpe(before, _p.Metaspace(), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    table = json.loads(made.to_str())
    table["pre_tokenizer"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(table))


def _word_piece() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = _n.BertNormalizer(lowercase=True), _p.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), show_progress=False
    )
    made.train_from_iterator([TEXT.lower()] * 3, trainer)
    return made


def _unigram() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.normalizer, made.pre_tokenizer = _n.NFKC(), _p.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=220, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


def _of_words() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = _p.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(
        special_tokens=list(SPECIAL), show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


def _of_bytes() -> Any:
    letters = {letter: index for index, letter in enumerate(sorted(_p.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = _p.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(list(SPECIAL))
    return made


def _stripping() -> Any:
    """Special tokens that take the spaces beside them."""
    made = _byte_level(False, False)
    table = json.loads(made.to_str())
    for token in table["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|im_end|>", "</s>", "<|eot|>", "[/INST]")
        token["lstrip"] = token["content"] in ("<|im_start|>", "[INST]")
    return tokenizers.Tokenizer.from_str(json.dumps(table))


KINDS: Mapping[str, Callable[[], Any]] = MappingProxyType({
    "byte-level": lambda: _byte_level(False, False),
    "byte-level-prefix": lambda: _byte_level(True, True),
    "metaspace-always": lambda: _metaspace("always"),
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-never": lambda: _metaspace("never"),
    "legacy": _legacy,
    "word-piece": _word_piece,
    "unigram": _unigram,
    "words": _of_words,
    "lower-and-strip": lambda: _bpe(
        _n.Sequence([_n.NFD(), _n.StripAccents(), _n.Lowercase(), _n.Strip()]), _p.ByteLevel(False)
    ),
    "no-spaces": lambda: _bpe(_n.Replace(" ", ""), _p.ByteLevel(add_prefix_space=False)),
    "tiktoken": lambda: _bpe(
        None,
        _p.Sequence([
            _p.Split(tokenizers.Regex(CL100K), "isolated"),
            _p.ByteLevel(add_prefix_space=False, use_regex=False),
        ]),
        ignore_merges=True,
    ),
    "bytes": _of_bytes,
    "stripping": _stripping,
})  # fmt: skip
"""Functions that make a tokenizer of a kind, each with the tokens of `SPECIAL`."""


def _template(
    user: str, before: str, end: str, after: str, system: str = "", start: str = ""
) -> str:
    """A template: ``start``, and of each turn ``user`` or ``before``, content, ``end``, ``after``.

    ``{% generation %}`` is around the content and the end of the assistant's.
    """
    return (
        f"{{{{ {start!r} }}}}"
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        f"{{{{ {before!r} }}}}{{% generation %}}{{{{ m['content'] + {end!r} }}}}{{% endgeneration %}}"
        f"{{{{ {after!r} }}}}"
        "{% elif m['role'] == 'system' %}" + f"{{{{ {system!r} + m['content'] + {after!r} }}}}"
        "{% else %}" + f"{{{{ {user!r}.replace('%', m['content']) }}}}" + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + f"{{{{ {before!r} }}}}" + "{% endif %}"
    )


TEMPLATES: Mapping[str, str] = MappingProxyType({
    "chatml": _template(
        "<|im_start|>user\n%<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>", "\n",
        "<|im_start|>system\n",
    ),
    "plain": _template("User: %\n", "Assistant: ", "</s>", "\n"),
    "llama2": _template("[INST] % [/INST]", " ", "</s>", "", start="<s>"),
    "headers": _template("<|im_start|>user\n\n%<|eot|>", "<|im_start|>assistant\n\n", "<|eot|>", ""),
    "instruct": _template("### Instruction:\n%\n\n", "### Response:\n", "</s>", "\n\n"),
    "bare": _template("% ", "A:", "<|eot|>", " "),
})  # fmt: skip
"""Templates with marks; `unmarked` takes these out."""


TURNS: Mapping[str, str] = MappingProxyType({
    "chatml": "<|im_end|>", "plain": "</s>", "llama2": "</s>", "headers": "<|eot|>",
    "instruct": "</s>", "bare": "<|eot|>",
})  # fmt: skip
"""The tokens that end the assistant's turns in them."""


def unmarked(template: str) -> str:
    """The template without ``{% generation %}``."""
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def save(folder: Path, made: Any, template: str | None = None, **settings: Any) -> Path:
    """A folder with the tokenizer and its settings, as transformers reads it."""
    folder.mkdir(exist_ok=True, parents=True)
    made.save(str(folder / "tokenizer.json"))
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    } | settings
    if template is not None:
        table["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return folder
