"""What a run trains on: bytes, tokens of text, tokens on disk, or conversations."""

from __future__ import annotations

from collections.abc import Iterator

from functron import run_folder
from functron.config import TrainConfig
from functron.data import ByteText, Chat, Samples, Tokenizer, TokenText, TokenWindows, open_tokens
from functron.data.conversations import chat_files
from functron.data.documents import find
from functron.data.shards import is_tokens
from functron.data.token_text import check_vocabulary
from functron.errors import Problem, raise_problems


def is_chat(config: TrainConfig) -> bool:
    """Whether `data` is read as conversations: by `format`, or by the ending ``.jsonl``."""
    return config.format == "chat" or (config.format == "auto" and config.data.endswith(".jsonl"))


def is_on_disk(config: TrainConfig) -> bool:
    """Whether `data` has been tokenised: by `format`, or by the names of files."""
    if config.format != "auto":
        return config.format == "tokens"
    return bool(config.data) and not is_chat(config) and is_tokens(config.data)


def open_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """The run's tokenizer; None where it reads bytes.

    Raises:
        ValueError: it cannot be read.
    """
    path = run_folder.tokenizer_path(config)
    return None if path is None else Tokenizer(path)


def open_samples(config: TrainConfig) -> Samples:
    """What the run draws its batches from; all of text with a tokenizer is read and tokenised.

    Raises:
        ValueError: it cannot be read, or does not fit the model.
    """
    raise_problems("cannot train on this", problems_of(config))
    settings = {"seed": config.seed, "vocab_size": config.gpt.vocab_size}
    if is_on_disk(config):
        return TokenWindows(open_tokens(config.data), config.seq, **settings)
    tokenizer = open_tokenizer(config)
    if tokenizer is None:
        return ByteText(config.data or None, config.seq, seed=config.seed)
    if is_chat(config):
        overlong = config.overlong
        return Chat(config.data, tokenizer, config.seq, overlong=overlong, **settings)
    return TokenText(config.data or None, tokenizer, config.seq, **settings)


def problems_of(config: TrainConfig) -> Iterator[Problem]:
    """What does not fit about data, tokenizer and model, as far as it can be told without reading.

    Raises:
        ValueError: the run folder's configuration cannot be read.
    """
    path = run_folder.tokenizer_path(config)
    if is_on_disk(config):
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
    elif path is None and config.gpt.vocab_size < ByteText.vocab_size:
        got = f"{config.gpt.vocab_size} token ids"
        wanted = f"at least {ByteText.vocab_size}: the text is read as bytes"
        yield Problem("gpt.vocab_size", got, wanted, "set it to 256 or choose a model")


def check(config: TrainConfig) -> None:
    """Check what can be known of the data at little cost, such as that it is there.

    Raises:
        ValueError: it is not.
    """
    if is_on_disk(config):
        if config.data:
            TokenWindows(open_tokens(config.data), config.seq)
    elif is_chat(config):
        if config.data:
            chat_files(config.data)
    elif run_folder.tokenizer_path(config) is None:
        ByteText(config.data or None, config.seq)
    elif config.data:
        find(config.data)


def check_tokenizer(config: TrainConfig) -> None:
    """Check that the tokenizer can be read, writes conversations if need be, and suits the model.

    Raises:
        ValueError: it cannot or does not.
    """
    tokenizer = open_tokenizer(config)
    if tokenizer is None:
        return
    # tokens added for images and the like may lie beyond the vocabulary of a model of text
    check_vocabulary(min(tokenizer.num_ordinary, tokenizer.vocab_size), config.gpt.vocab_size)
    if is_chat(config):
        tokenizer.require_template()
