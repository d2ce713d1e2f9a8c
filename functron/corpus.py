"""What a run trains on: bytes, tokens of text, tokens on disk or none at all, or conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from functron import run_folder
from functron.config import TrainConfig
from functron.data import (
    Blend,
    ByteText,
    Chat,
    FillInTheMiddle,
    MockTokens,
    PackedChat,
    PackedTokens,
    Samples,
    Tokenizer,
    TokenText,
    TokenWindows,
    open_tokens,
    split,
    text_tokenizer,
)
from functron.data.blend import ALL, parse_blend
from functron.data.conversations import chat_files
from functron.data.documents import find
from functron.data.provenance import provenance
from functron.data.shards import is_tokens
from functron.data.sliding import Conversations, Documents, StoredTokens, Texts
from functron.data.splits import PARTS
from functron.data.text_tokenizer import BYTES, ByteTokenizer, TextTokenizer
from functron.data.token_file import TokenFile
from functron.data.token_text import check_vocabulary
from functron.errors import Problem, raise_problems
from functron.objective import Objective, objective_of

_MOCK_TOKENS = 1 << 50
_ANY_LENGTH = 1 << 40


def is_chat(config: TrainConfig) -> bool:
    """Whether `data` is read as conversations: by `format`, or by the ending ``.jsonl``."""
    return config.format == "chat" or (config.format == "auto" and config.data.endswith(".jsonl"))


def is_on_disk(config: TrainConfig) -> bool:
    """Whether `data` has been tokenised: by `format`, or by the names of files; blends have.

    Raises:
        ValueError: it is a blend that is written wrongly.
    """
    if config.format != "auto":
        return config.format in ("tokens", "mock")
    if not config.data or is_chat(config):
        return False
    return _is_one(config.data) or parse_blend(config.data) is not None


def sources_of(config: TrainConfig) -> list[str]:
    """The files of tokens that `data` names: several of a blend.

    Raises:
        ValueError: it is a blend that is written wrongly.
    """
    blend = _blend_of(config)
    return [config.data] if blend is None else [path for _, path in blend]


def _blend_of(config: TrainConfig) -> list[tuple[str, str]] | None:
    return None if _is_one(config.data) else parse_blend(config.data)


def _is_one(data: str) -> bool:
    """Whether `data` names one file of tokens, or folder of them, even if it reads as a blend."""
    try:
        return is_tokens(data)
    except OSError:  # longer than names of files can be
        return False


def open_tokenizer(config: TrainConfig) -> TextTokenizer | None:
    """The run's tokenizer; None where it reads text as bytes, or its tokens' maker is not known.

    Raises:
        ValueError: it cannot be read.
    """
    path = run_folder.tokenizer_path(config)
    if path is None and config.tokenizer == BYTES and is_on_disk(config):
        path = BYTES
    pattern = config.tokenizer_pattern
    return None if path is None else text_tokenizer.open_tokenizer(path, pattern=pattern)


def with_tokenizer(config: TrainConfig) -> TrainConfig:
    """`config` with the tokenizer that its tokens on disk were made with.

    It is unchanged where it names one or its run folder has one, and where nothing says what made
    the tokens, or the tokenizer's file has changed since then.

    Raises:
        ValueError: `data` is a blend of tokens of different tokenizers, or is written wrongly.
    """
    if not config.data or not is_on_disk(config) or config.format == "mock":
        return config
    if config.tokenizer or run_folder.tokenizer_path(config) is not None:
        return config
    made = provenance(sources_of(config))
    if made is None or not made.is_there:
        return config
    pattern = config.tokenizer_pattern or made.pattern
    return dataclasses.replace(config, tokenizer=made.tokenizer, tokenizer_pattern=pattern)


def open_samples(config: TrainConfig, part: str = PARTS[0]) -> Samples:
    """What the run draws its batches from; all of text with a tokenizer is read and tokenised.

    Args:
        config: what is to be run.
        part: of tokens that `split` divides: train, validation or test.

    Raises:
        ValueError: it cannot be read, does not fit the model, or has no such part.
    """
    raise_problems("cannot train on this", problems_of(config))
    if is_on_disk(config):
        return _token_samples(config, part)
    tokenizer, seed = open_tokenizer(config), config.seed
    learnt = _objective_of(config)
    if tokenizer is None:
        return learnt.over(ByteText(config.data or None, learnt.length, seed=seed), seed)
    settings = {"seed": seed, "vocab_size": learnt.vocab_size}
    if is_chat(config):
        reader, overlong = _with_template(tokenizer), config.overlong
        chat = Chat(config.data, reader, config.seq, overlong=overlong, **settings)
        return PackedChat(chat) if config.pack else chat
    text = TokenText(config.data or None, tokenizer, learnt.length, **settings)
    return learnt.over(text, seed)


def open_texts(config: TrainConfig, part: str = PARTS[0]) -> Texts:
    """The same data, to be scored text by text: see `functron.data.sliding`.

    Files of text are texts, and conversations; tokens on disk are one text, or each document is one
    where the run keeps them apart (`mask_documents`, `pack`). Nothing is rearranged or cut off.

    Args:
        config: what is to be run, on one source of data.
        part: of tokens that `split` divides: train, validation or test.

    Raises:
        ValueError: it cannot be read, does not fit the model, or has no such part.
    """
    raise_problems("cannot evaluate on this", problems_of(config))
    size = config.architecture.vocab_size
    if config.format == "mock":
        mock = MockTokens(_MOCK_TOKENS, size, seed=config.seed)
        return StoredTokens(_part_of(config, mock, part), size)
    if is_on_disk(config):
        file = _part_of(config, open_tokens(config.data), part)
        return StoredTokens(file, size, by_document=config.packed)
    tokenizer = open_tokenizer(config)
    if tokenizer is not None and is_chat(config):
        reader = _with_template(tokenizer)
        return Conversations(Chat(config.data, reader, _ANY_LENGTH, vocab_size=size))
    return Documents(config.data, tokenizer, size)


def reader_of(config: TrainConfig) -> TextTokenizer | None:
    """What makes the run's tokens, be it of bytes; None: tokens on disk whose maker is not known.

    Raises:
        ValueError: it cannot be read.
    """
    found = open_tokenizer(config)
    return found if found is not None or is_on_disk(config) else ByteTokenizer()


def _objective_of(config: TrainConfig) -> Objective:
    return objective_of(config, reader_of(config))


def _token_samples(config: TrainConfig, part: str) -> Samples:
    """Samples of tokens on disk, or of a blend of them."""
    learnt = _objective_of(config)
    if config.format == "mock":
        file = MockTokens(_MOCK_TOKENS, learnt.vocab_size, seed=config.seed)
        return _samples(config, learnt, file, part)
    blend = _blend_of(config)
    if blend is None:
        return _samples(config, learnt, open_tokens(config.data), part)
    weights, paths = zip(*blend, strict=True)
    sources: list[Any] = [
        _samples(config, learnt, open_tokens(x), part, index) for index, x in enumerate(paths)
    ]
    return Blend(sources, None if weights[0] == ALL else weights, paths)


def _samples(
    config: TrainConfig, learnt: Objective, file: TokenFile, part: str, index: int = 0
) -> Samples:
    """Samples of a part of one file, the blend's source `index`."""
    file = _part_of(config, file, part)
    seed = config.seed + (index << 32)  # sources of one size have orders of their own
    if config.pack:
        return PackedTokens(file, config.seq, seed=seed, vocab_size=learnt.vocab_size)
    windows = TokenWindows(
        file,
        learnt.length,
        seed=seed,
        vocab_size=learnt.vocab_size,
        mask_documents=config.mask_documents,
        middle=_middle(config),
        extra_token=config.extra_token,
    )
    return learnt.over(windows, seed)


def _part_of(config: TrainConfig, file: TokenFile, part: str) -> TokenFile:
    """The documents of a file that `split` has for `part`; without `split` all of them."""
    if not config.split:
        return file
    parts = split(file, config.split)
    if part not in parts:
        fix = f"give it a weight in --split, such as {config.split},1"
        problem = Problem("split", f"{config.split}: nothing for {part}", "a part of it", fix)
        raise_problems("cannot split", [problem])
    return parts[part]


def _middle(config: TrainConfig) -> FillInTheMiddle | None:
    if not config.fim_rate:
        return None
    try:
        ids = [int(word) for word in config.fim_tokens.split(",")]
    except ValueError:
        ids = []
    if len(ids) not in (3, 4):
        fix = "name them: --fim-tokens PREFIX,MIDDLE,SUFFIX or PREFIX,MIDDLE,SUFFIX,END"
        problem = Problem("fim_tokens", repr(config.fim_tokens), "three or four ids", fix)
        raise_problems("cannot fill in the middle", [problem])
    prefix, middle, suffix, *end = ids
    return FillInTheMiddle(
        prefix,
        middle,
        suffix,
        config.fim_rate,
        config.fim_spm_rate,
        end[0] if end else None,
        seed=config.seed,
    )


def problems_of(config: TrainConfig) -> Iterator[Problem]:
    """What does not fit about data, tokenizer and model, as far as it can be told without reading.

    Raises:
        ValueError: the run folder's configuration cannot be read.
    """
    path = run_folder.tokenizer_path(config)
    if not is_on_disk(config):
        if not config.extra_token:
            fix = "make them with functron preprocess, or leave it out"
            yield Problem("extra_token", "False", "tokens on disk", fix)
        for name in ("split", "mask_documents", "fim_rate"):
            if getattr(config, name):
                fix = "make them with functron preprocess, or leave it out"
                yield Problem(name, str(getattr(config, name)), "tokens on disk", fix)
        if config.pack and not is_chat(config):
            fix = "make them with functron preprocess, or leave it out"
            yield Problem("pack", config.pack, "tokens on disk, or conversations", fix)
    elif config.pack and config.fim_rate:
        fix = "leave it out, or --mask-documents in place of --pack"
        wanted = "documents as long as they were packed"
        yield Problem("fim_rate", f"{config.fim_rate} with pack={config.pack}", wanted, fix)
    if not config.extra_token and is_on_disk(config):
        others = {"pack": config.pack, "fim_rate": config.fim_rate}
        others |= {"a model that restores tokens": config.family.objective in ("masked", "spans")}
        for name in filter(others.get, others):
            yield Problem("extra_token", f"False with {name}", "True", "leave one of them out")
    if config.format == "mock":
        if config.data:
            fix = "leave out --data or --format mock"
            yield Problem("data", repr(config.data), "nothing with random tokens", fix)
    elif is_on_disk(config):
        if not config.data:
            fix = "add --data PREFIX, of functron preprocess"
            yield Problem("data", "nothing", "tokens on disk", fix)
    elif is_chat(config):
        if not config.data:
            yield Problem("data", "nothing", "a JSONL file of conversations", "add --data FILE")
        if path is None:
            got = f"{config.tokenizer or 'none'} for conversations"
            fix = "name the model's: --tokenizer FOLDER; to train on the file as it is: "
            fix += "--format text"
            yield Problem("tokenizer", got, "a folder with tokenizer.json and a template", fix)
    elif path is None and config.architecture.vocab_size < ByteText.vocab_size:
        got = f"{config.architecture.vocab_size} token ids"
        wanted = f"at least {ByteText.vocab_size}: the text is read as bytes"
        yield Problem(
            f"{config.family.name}.vocab_size", got, wanted, "set it to 256 or choose a model"
        )


def check(config: TrainConfig, part: str = PARTS[0]) -> None:
    """Check what can be known of the data at little cost, such as that it is there.

    Args:
        config: what is to be run.
        part: of tokens that `split` divides.

    Raises:
        ValueError: it is not.
    """
    if is_on_disk(config):
        if config.data or config.format == "mock":
            _token_samples(config, part)
    elif is_chat(config):
        if config.data:
            chat_files(config.data)
    elif run_folder.tokenizer_path(config) is None:
        ByteText(config.data or None, _objective_of(config).length)
    elif config.data:
        find(config.data)


def check_tokenizer(config: TrainConfig) -> None:
    """Check that the tokenizer can be read, writes conversations if need be, and suits the model.

    Raises:
        ValueError: it cannot or does not.
    """
    tokenizer = open_tokenizer(config)
    _objective_of(config)
    if tokenizer is None:
        return
    # tokens added for images and the like may lie beyond the vocabulary of a model of text
    needed = min(tokenizer.num_ordinary, tokenizer.vocab_size)
    check_vocabulary(needed, config.architecture.vocab_size)
    if is_chat(config):
        _with_template(tokenizer).require_template()


def _with_template(tokenizer: TextTokenizer) -> Tokenizer:
    """The same tokenizer, which is of the kind that has templates of conversations.

    Raises:
        ValueError: it is of another kind.
    """
    if not isinstance(tokenizer, Tokenizer):
        got = f"{tokenizer.file}, which has no template of conversations"
        fix = "name a folder with tokenizer.json and a template; transformers' save_pretrained "
        fix += "writes one"
        problem = Problem("tokenizer", got, "one that writes conversations", fix)
        raise_problems("cannot read conversations", [problem])
        raise AssertionError("unreachable")
    return tokenizer
