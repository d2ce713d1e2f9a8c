"""Tokenizers of any kind: the protocol that they share, and `open_tokenizer`, which finds the kind.

Here are bytes, tiktoken's rank files, and SentencePiece models; Hugging Face's are in
`functron.data.tokenizer`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from functron.core.errors import Problem, nearest, on_hub, raise_problems, refuse
from functron.data.tokenizer import CANNOT, TOKENIZER, Tokenizer

BYTES = "bytes"
SNIFFED = 256


@runtime_checkable
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
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of bytes; those that are no UTF-8 give the replacement character."""
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        return text + "<|endoftext|>" * (special and 256 in tokens)


END = "<|endoftext|>"


@dataclass(frozen=True)
class Scheme:
    """How an encoding splits text before merging, and its special tokens.

    Attributes:
        pattern: a regular expression whose matches are merged each by itself.
        special: ids of special tokens.
    """

    pattern: str
    special: Mapping[str, int] = field(default_factory=dict)


_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_LLAMA3 = ("begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4)))
_LLAMA3 += ("start_header_id", "end_header_id", "reserved_special_token_4", "eot_id")
_LLAMA3 += tuple(f"reserved_special_token_{i}" for i in range(5, 251))

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "gpt2": Scheme(
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+" + rf"|{_MARKS}|\s+(?!\S)|\s+",
            {END: 50256},
        ),
        "cl100k": Scheme(
            rf"{_SHORT}|{_LETTER}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}",
            {
                END: 100257,
                "<|fim_prefix|>": 100258,
                "<|fim_middle|>": 100259,
                "<|fim_suffix|>": 100260,
                "<|endofprompt|>": 100276,
            },
        ),
        "o200k": Scheme(
            rf"{_LETTER}[{_UPPER}]*[{_LOWER}]+{_SHORT}?|{_LETTER}[{_UPPER}]+[{_LOWER}]*{_SHORT}?"
            rf"|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}",
            {END: 199999, "<|endofprompt|>": 200018},
        ),
        "llama3": Scheme(
            rf"{_SHORT}|{_LETTER}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}",
            {f"<|{name}|>": 128000 + index for index, name in enumerate(_LLAMA3)},
        ),
    }
)
"""Published encodings. Sources: tiktoken's ``openai_public``, and llama3's ``tokenizer.py``."""

STEMS = MappingProxyType(
    {"r50k_base": "gpt2", "p50k_base": "gpt2", "cl100k_base": "cl100k", "o200k_base": "o200k"}
)
"""The encodings of files that are called what OpenAI calls them."""


class RankFile:
    """Text to token ids and back, by byte-pair encoding with the ranks of a ``.tiktoken`` file.

    Every line has a token's bytes in base64 and its rank, which is its id. How text is split
    before, and which ids are special, is not in the file.

    Args:
        path: the file.
        pattern: one of `SCHEMES`, or a regular expression, with which ``<|endoftext|>`` follows the
            last rank; empty: by the file's name (`STEMS`).

    Attributes:
        file: the file.
        path: the folder it lies in.
        vocab_size: ids are below it.
        num_ordinary: how many of them are not special.
        special_tokens: ids of special tokens.

    Raises:
        ValueError: the package tiktoken is missing, the file has another format (with the lines at
            fault), or the pattern is none, or not known.
    """

    def __init__(self, path: str | Path, pattern: str = ""):
        self.file = Path(path)
        self.path = self.file.parent
        if find_spec("tiktoken") is None:
            fix = "pip install tiktoken, or functron[tiktoken]"
            refuse(CANNOT, "tiktoken", "no such package", f"it, to read {path}", fix)
        import tiktoken

        scheme = _scheme(self.file, pattern)
        ranks = _ranks(self.file)
        last = max(ranks.values())
        fits = scheme.special and last >= min(scheme.special.values()) - 2
        self.special_tokens = dict(scheme.special) if fits else {END: last + 1}
        try:
            self._encoding = tiktoken.Encoding(
                self.file.stem,
                pat_str=scheme.pattern,
                mergeable_ranks=ranks,
                special_tokens=self.special_tokens,
            )
        except (ValueError, AssertionError) as error:
            got = f"{pattern or scheme.pattern!r} ({error})"
            refuse(CANNOT, "pattern", got, "a regular expression", "check it")
        self._known = {*ranks.values(), *self.special_tokens.values()}
        self.vocab_size: int = max(self._known) + 1
        self.num_ordinary: int = last + 1

    @property
    def end_of_text(self) -> int | None:
        return self.special_tokens.get(END, self.special_tokens.get("<|end_of_text|>"))

    @property
    def stops(self) -> frozenset[int]:
        found = (self.end_of_text, self.special_tokens.get("<|eot_id|>"))
        return frozenset(token for token in found if token is not None)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, in which names of special tokens are text.

        `special`: begin with ``<|begin_of_text|>``, if there is one.
        """
        ids = self._encoding.encode_ordinary(text)
        begin = self.special_tokens.get("<|begin_of_text|>")
        return [begin, *ids] if special and begin is not None else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; those that no token has give nothing."""
        left_out = set() if special else set(self.special_tokens.values())
        ids = [int(t) for t in tokens]
        return self._encoding.decode([t for t in ids if t in self._known and t not in left_out])


def _scheme(file: Path, pattern: str) -> Scheme:
    name = pattern or STEMS.get(file.stem, "")
    if name in SCHEMES:
        return SCHEMES[name]
    known = ", ".join(SCHEMES)
    if not name:
        wanted = f"how it splits text: {known}, or a regular expression"
        fix = "add --pattern (functron train: --tokenizer-pattern)"
        refuse(CANNOT, "pattern", f"none for {file.name}", wanted, fix)
    if name.replace("_", "").replace("-", "").isalnum():
        wanted = f"one of {known}, or a regular expression"
        refuse(CANNOT, "pattern", repr(name), wanted, nearest(name, SCHEMES))
    return Scheme(name)


def _ranks(file: Path) -> dict[bytes, int]:
    """Ranks by the bytes of their tokens."""
    found: dict[bytes, int] = {}
    problems: list[Problem] = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        refuse(CANNOT, str(file), error.strerror or str(error), "a rank file")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            shown = line[:40].decode(errors="replace")
            wanted = "a token in base64, and its rank"
            problems.append(Problem(f"{file}:{number}", repr(shown), wanted))
    if not found and not problems:
        problems.append(Problem(str(file), "no ranks", "a token in base64, and its rank, a line"))
    missing = [byte for byte in range(256) if bytes([byte]) not in found]
    if missing and not problems:
        got = f"no rank for {len(missing)} bytes, such as {missing[0]:#04x}"
        problems.append(Problem(str(file), got, "one for each", "copy or download it again"))
    raise_problems(CANNOT, problems[:20])
    return found


class SentencePiece:
    """Text to token ids and back, by a ``.model`` file (Kudo and Richardson 2018).

    Args:
        path: the file.

    Attributes:
        file: likewise.
        path: the folder it lies in.
        vocab_size: ids are below it.
        num_ordinary: all of them, as those of control symbols are among those of text.
        special_tokens: the ids of control symbols and of the unknown token, by their names.

    Raises:
        ValueError: the package sentencepiece is missing, or the file is none of its models.
    """

    def __init__(self, path: str | Path):
        self.file = Path(path)
        self.path = self.file.parent
        if find_spec("sentencepiece") is None:
            fix = "pip install sentencepiece, or functron[sentencepiece]"
            refuse(
                CANNOT,
                "sentencepiece",
                "no such package",
                f"it, to read {path}",
                fix,
            )
        import sentencepiece

        try:
            data = self.file.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            got = getattr(error, "strerror", None) or str(error) or "something else"
            wanted = "a model of SentencePiece"
            refuse(CANNOT, str(path), got, wanted, "copy or download it again")
        model, size = self._model, self._model.get_piece_size()
        self.vocab_size: int = size
        self.num_ordinary: int = size
        ids = (i for i in range(size) if model.is_control(i) or model.is_unknown(i))
        self.special_tokens: Mapping[str, int] = {model.id_to_piece(i): i for i in ids}

    @property
    def end_of_text(self) -> int | None:
        found = self._model.eos_id()
        return found if found >= 0 else None

    @property
    def stops(self) -> frozenset[int]:
        return frozenset() if self.end_of_text is None else frozenset({self.end_of_text})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; `special`: begin with the model's ``<s>``, if it has one."""
        ids = self._model.encode(text, out_type=int)
        begin = self._model.bos_id()
        return [begin, *ids] if special and begin >= 0 else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; those that no token has give nothing."""
        ids = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        if not special:
            return self._model.decode(ids)
        return "".join(self._pieces(ids))

    def _pieces(self, ids: Sequence[int]) -> Iterator[str]:
        for control, run in groupby(ids, self._model.is_control):
            if control:
                yield from map(self._model.id_to_piece, run)
            else:
                yield self._model.decode(list(run))


def open_tokenizer(path: str | Path, *, pattern: str = "") -> TextTokenizer:
    """Open a tokenizer of whatever kind.

    Args:
        path: ``bytes``; a file: Hugging Face's tokenizer.json, a SentencePiece ``.model``, or a
            rank file of tiktoken (``.tiktoken``; Llama 3's is called tokenizer.model); or a folder
            with one of these.
        pattern: how a rank file's tokenizer splits text (see `RankFile`).

    Raises:
        ValueError: there is none, its package is missing, or it cannot be read.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = _file_of(Path(path))
    kind = kind_of(file)
    if pattern and kind is not RankFile:
        refuse(
            CANNOT,
            "pattern",
            repr(pattern),
            f"none: {file} splits text by itself",
        )
    return RankFile(file, pattern) if kind is RankFile else kind(file)


def end_of_text(tokenizer: TextTokenizer, name: str = "") -> int:
    """The id that ends a document: of the special token `name`, or the tokenizer's own.

    Raises:
        ValueError: there is no such token.
    """
    known = tokenizer.special_tokens
    found = known.get(name) if name else tokenizer.end_of_text
    if found is None:
        got = f"{name!r}, no special token of it" if name else "no token that ends a text"
        fix = f"name one of {', '.join(known)}" if known else "do not ask for one"
        fix = nearest(name, known) if name else fix
        refuse("unknown special token", str(tokenizer.file or BYTES), got, "one", fix)
    return found


def tokenizers_in(folder: Path) -> list[Path]:
    """The files in a folder that may be a tokenizer: tokenizer.json, or else all of other kinds."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    return sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = tokenizers_in(path)
    if len(found) != 1:
        got = ", ".join(file.name for file in found) or "a folder with none"
        wanted = "one of tokenizer.json, a .model or a .tiktoken"
        fix = "name the file" if found else "check the path"
        refuse(CANNOT, str(path), got, wanted, fix)
    return found[0]


def kind_of(file: Path) -> type[Tokenizer] | type[SentencePiece] | type[RankFile]:
    """The class that reads a file, by its beginning: SentencePiece is binary, a rank file base64.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            head = stream.read(SNIFFED)
    except OSError as error:
        fix = on_hub(file) or "check the path; bytes needs no file: --tokenizer bytes"
        refuse(CANNOT, str(file), error.strerror or str(error), "a tokenizer", fix)
    if file.suffix == ".json" or head.lstrip()[:1] == b"{":
        return Tokenizer
    words = head.split(b"\n")[0].split()
    ranks = len(words) == 2 and words[1].isdigit() and words[0].isascii()
    return RankFile if file.suffix == ".tiktoken" or ranks else SentencePiece
