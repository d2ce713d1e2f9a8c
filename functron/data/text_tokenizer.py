"""Tokenizers of any kind: what they have in common, bytes, and finding out which kind a path is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from functron.data.rank_file import RankFile
from functron.data.sentence_piece import SentencePiece
from functron.data.tokenizer import TOKENIZER, Tokenizer
from functron.errors import Problem, nearest, on_hub, raise_problems

BYTES = "bytes"
SNIFFED = 256


class TextTokenizer(Protocol):
    """Text to token ids and back: `Tokenizer`, `SentencePiece`, `RankFile` or `ByteTokenizer`.

    Attributes:
        file: what was read; None: nothing.
        vocab_size: ids are below it.
        num_ordinary: how many ids there are without tokens that were added for special purposes.
    """

    @property
    def file(self) -> Path | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_ordinary(self) -> int: ...

    @property
    def end_of_text(self) -> int | None:
        """The id that stands between documents; None where there is none."""
        ...

    @property
    def stops(self) -> frozenset[int]:
        """The ids after which a model has finished."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that stand for no text, by their names."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; `special`: with what the model expects around one."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts, with nothing around them."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; `special`: with the names of special tokens."""
        ...


class ByteTokenizer:
    """Text as its bytes in UTF-8, ids 0 to 255; 256 ends a text."""

    file = None
    vocab_size = 257
    num_ordinary = 256
    end_of_text = 256
    stops = frozenset({256})
    special_tokens: Mapping[str, int] = MappingProxyType({"<|endoftext|>": 256})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The bytes of texts."""
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of bytes; those that are no UTF-8 give the replacement character."""
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        return text + "<|endoftext|>" * (special and 256 in tokens)


def open_tokenizer(path: str | Path, *, pattern: str = "") -> TextTokenizer:
    """Open a tokenizer of whatever kind.

    Args:
        path: ``bytes``; a file: Hugging Face's tokenizer.json, a SentencePiece ``.model``, or a
            rank file of tiktoken (``.tiktoken``; Llama 3's is called tokenizer.model); or a folder
            with one of these.
        pattern: how a rank file's tokenizer splits text (see `functron.data.rank_file.RankFile`).

    Raises:
        ValueError: there is none, its package is missing, or it cannot be read.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = _file_of(Path(path))
    kind = kind_of(file)
    if pattern and kind is not RankFile:
        problem = Problem("pattern", repr(pattern), f"none: {file} splits text by itself")
        raise_problems("cannot read a tokenizer", [problem])
    return RankFile(file, pattern) if kind is RankFile else kind(file)


def end_of_text(tokenizer: TextTokenizer, name: str = "") -> int:
    """The id that ends a document: of the special token `name`, or the tokenizer's own.

    Raises:
        ValueError: there is no such token.
    """
    known = tokenizer.special_tokens
    where = str(tokenizer.file or BYTES)
    if name and name not in known:
        problem = Problem(where, f"{name!r}, no special token of it", "one", nearest(name, known))
    elif not name and tokenizer.end_of_text is None:
        fix = f"name one of {', '.join(known)}" if known else "do not ask for one"
        problem = Problem(where, "no token that ends a text", "one", fix)
    else:
        found = known[name] if name else tokenizer.end_of_text
        assert found is not None
        return found
    raise_problems("unknown special token", [problem])
    raise AssertionError("unreachable")


def tokenizers_in(folder: Path) -> list[Path]:
    """The files in a folder that may be a tokenizer: tokenizer.json, or else all of other kinds."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    return sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = tokenizers_in(path)
    if len(found) == 1:
        return found[0]
    got = f"{', '.join(file.name for file in found)}" if found else "a folder with none"
    wanted = "one of tokenizer.json, a .model or a .tiktoken"
    fix = "name the file" if found else "check the path"
    raise_problems("cannot read a tokenizer", [Problem(str(path), got, wanted, fix)])
    raise AssertionError("unreachable")


def kind_of(file: Path) -> type[Tokenizer] | type[SentencePiece] | type[RankFile]:
    """What reads a file, by its beginning: SentencePiece's is binary, a rank file has base64.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            head = stream.read(SNIFFED)
    except OSError as error:
        fix = on_hub(file) or "check the path; bytes needs no file: --tokenizer bytes"
        problem = Problem(str(file), error.strerror or str(error), "a tokenizer", fix)
        raise_problems("cannot read a tokenizer", [problem])
    if file.suffix == ".json" or head.lstrip()[:1] == b"{":
        return Tokenizer
    words = head.split(b"\n")[0].split()
    ranks = len(words) == 2 and words[1].isdigit() and words[0].isascii()
    return RankFile if file.suffix == ".tiktoken" or ranks else SentencePiece
