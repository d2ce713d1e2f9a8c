"""tiktoken's rank files: text to token ids and back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from functron.errors import Problem, nearest, raise_problems

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


_LETTER, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
    r"\p{Ll}\p{Lm}\p{Lo}\p{M}",
)
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
            problem = Problem("tiktoken", "no such package", f"it, to read {path}", fix)
            raise_problems("cannot read a tokenizer", [problem])
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
            problem = Problem("pattern", got, "a regular expression", "check it")
            raise_problems("cannot read a tokenizer", [problem])
        self._known = {*ranks.values(), *self.special_tokens.values()}
        self.vocab_size: int = max(self._known) + 1
        self.num_ordinary: int = last + 1

    @property
    def end_of_text(self) -> int | None:
        """The id that stands between documents."""
        return self.special_tokens.get(END, self.special_tokens.get("<|end_of_text|>"))

    @property
    def stops(self) -> frozenset[int]:
        """The ids after which a model has finished: of a text, and of its turn to speak."""
        found = (self.end_of_text, self.special_tokens.get("<|eot_id|>"))
        return frozenset(token for token in found if token is not None)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; names of special tokens in it are text.

        Args:
            text: any.
            special: begin with ``<|begin_of_text|>``, if there is one.
        """
        ids = self._encoding.encode_ordinary(text)
        begin = self.special_tokens.get("<|begin_of_text|>")
        return [begin, *ids] if special and begin is not None else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts, with nothing around them."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; those that no token has give nothing.

        Args:
            tokens: ids.
            special: write the names of special tokens too.
        """
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
        problem = Problem("pattern", f"none for {file.name}", wanted, fix)
        raise_problems("cannot read a tokenizer", [problem])
    if name.replace("_", "").replace("-", "").isalnum():
        wanted = f"one of {known}, or a regular expression"
        problem = Problem("pattern", repr(name), wanted, nearest(name, SCHEMES))
        raise_problems("cannot read a tokenizer", [problem])
    return Scheme(name)


def _ranks(file: Path) -> dict[bytes, int]:
    """Ranks by the bytes of their tokens."""
    found: dict[bytes, int] = {}
    problems: list[Problem] = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        problem = Problem(str(file), error.strerror or str(error), "a rank file")
        raise_problems("cannot read a tokenizer", [problem])
        raise AssertionError("unreachable") from error
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
    raise_problems("cannot read a tokenizer", problems[:20])
    return found
