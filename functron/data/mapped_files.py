"""Files mapped into memory: as rows of numbers, read as if they stood one after another.

Reads see that the files are still as long as they were. And the files of text in a folder. All
kinds of files of tokens share one protocol, and its checks; so do all tokenizers (`TextTokenizer`).
By what rules a document of text becomes tokens is in one place: `TextRules`.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from functron.core.errors import Problem, local_path, on_hub, raise_problems, refuse

SpecialTokens = Literal["text", "parse"]
"""The meaning of names of special tokens in a text; see `TextRules`."""


@dataclass(frozen=True)
class TextRules:
    """The rules by which text becomes tokens: where it begins and ends, and what special tokens
    are.

    BOS are the ids that the tokenizer itself puts before a text (`TextTokenizer.begin`): ``<s>``,
    ``<|begin_of_text|>``, ``[CLS]``, or none. EOS is its end of text. What it puts after a text by
    itself is never added: a prompt goes on, and a document has its EOS once.

    | text | begins with | ends with |
    |---|---|---|
    | documents to train on: of files, of ``functron preprocess`` | BOS | EOS |
    | the same, packed, cut or rearranged | as they were made | as they were made |
    | held-out sets of a run, during training | BOS | EOS |
    | prompts of ``functron sample`` | BOS | |
    | texts of ``functron evaluate`` | BOS, which is no target | |
    | conversations, to train on or as a prompt | what the template writes | what it writes |
    | text that a T5 restores | | its end_token |
    | requests to `functron.models.scoring` | EOS where a text is empty | |
    | text as bytes, without a tokenizer | | |

    Names of special tokens inside of text, such as ``<|endoftext|>`` in a web page about tokenizers
    or ``<|im_end|>`` in a message of a user, are text like any other (``special_tokens="text"``),
    or become their ids (``"parse"``), as with transformers' tokenizers, unless these have
    ``split_special_tokens=True``. What a template of conversations writes itself is always parsed.
    Added tokens that are not special, such as GPT-NeoX's runs of spaces, are pieces of text.

    Attributes:
        special_tokens: ``text`` or ``parse``.
        prepend_bos: False: without the BOS, everywhere.
        version: 2. Runs and data from before it keep version 1: documents have no BOS, names of
            special tokens are parsed by a tokenizer.json, and by no other kind, and a token is the
            assistant's by its first character alone.
    """

    special_tokens: SpecialTokens = "text"
    prepend_bos: bool = True
    version: Literal[1, 2] = 2

    def begin_document(self, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """The ids that a document to train on begins with."""
        return () if self.version == 1 else self.begin_prompt(tokenizer)

    def begin_prompt(self, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """The ids that a prompt begins with, or a text that is evaluated."""
        return tokenizer.begin if self.prepend_bos else ()

    def describe(self, tokenizer: TextTokenizer | None, end: int | None) -> str:
        """The rules in words, with the names of tokens.

        Args:
            tokenizer: None: text is read as bytes.
            end: the id that ends documents; None: none does.
        """
        if tokenizer is None:
            return "bytes of text, with nothing before or after it"
        ends = () if end is None else (end,)
        before, after = (
            _names(tokenizer, self.begin_document(tokenizer)),
            _names(tokenizer, ends),
        )
        document = " ".join([*before, "text", *after])
        return f"documents: {document}; {self.describe_prompts(tokenizer)}"

    def describe_prompts(self, tokenizer: TextTokenizer) -> str:
        """As `describe`, without the documents to train on."""
        prompt = (*_names(tokenizer, self.begin_prompt(tokenizer)), "text")
        said = f"prompts and texts to evaluate: {' '.join(prompt)}"
        return f"{said}; conversations: as the template writes them"

    def describe_names(self, count: int) -> str:
        """How many names of special tokens there were in text, and what they became, in words."""
        names = f"{count or 'no'} {'name' if count == 1 else 'names'} of special tokens in the text"
        if self.version == 1:
            return f"{names}, which a tokenizer.json parses" if count else names
        if self.special_tokens == "parse":
            return f"{names}, parsed (--special-tokens text keeps them)" if count else names
        return f"{names}, kept as text (--special-tokens parse makes them ids)" if count else names


def _names(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """The names of special tokens."""
    names = {index: name for name, index in tokenizer.special_tokens.items()}
    return [names.get(index, f"token {index}") for index in ids]


RULES = TextRules()
"""The rules of what begins now."""

OLD_RULES = TextRules(version=1)
"""The rules of what began before rules were recorded."""


class SpecialNames:
    """The names of special tokens, with their ids, found in text: the longest one where several
    begin.
    """

    def __init__(self, ids: Mapping[str, int]):
        self.ids = {name: index for name, index in ids.items() if name}
        longest = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest))) if longest else None

    def count(self, text: str) -> int:
        """How many names there are in a text."""
        return 0 if self.pattern is None else len(self.pattern.findall(text))

    def parse(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text in which names stand for their tokens, and `encode` takes the rest."""
        found, end = [], 0
        for match in () if self.pattern is None else self.pattern.finditer(text):
            found += encode(text[end : match.start()]) if match.start() > end else []
            found.append(self.ids[match[0]])
            end = match.end()
        return found + (encode(text[end:]) if end < len(text) or not found else [])


@runtime_checkable
class TextTokenizer(Protocol):
    """Text to token ids and back, of every kind (see `functron.data.tokenizer`).

    Attributes:
        file: what was read; None: nothing.
        vocab_size: ids are below it.
        num_ordinary: how many ids there are without tokens that were added for special purposes.
        rules: by which text becomes tokens.
        begin: the ids that the model expects before a text.
        names: those of special tokens, as they are found in text.
    """

    @property
    def file(self) -> Path | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_ordinary(self) -> int: ...
    @property
    def rules(self) -> TextRules: ...
    @property
    def begin(self) -> tuple[int, ...]: ...
    @property
    def names(self) -> SpecialNames: ...

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


def encode_prompt(tokenizer: TextTokenizer, text: str) -> list[int]:
    """The tokens of a text that a model goes on with, or is evaluated on; see `TextRules`."""
    return [*tokenizer.rules.begin_prompt(tokenizer), *tokenizer.encode(text, special=False)]


class MappedRows:
    """Numbers in a file, read where they are needed.

    The system ends a process that touches a part of a map which its file has lost (SIGBUS), so
    `values` looks at the file's length each time that it is asked for: a microsecond. A file that
    is cut between that and the use of what came of it can still end the process.

    Args:
        path: the file.
        dtype: of the numbers.
        offset: where they begin, in bytes.
        count: how many there are; at least 1.

    Raises:
        OSError: the file is gone, cannot be read, or is shorter.
    """

    def __init__(self, path: Path, dtype: np.dtype | type, offset: int, count: int):
        self._path, self._needed = path, offset + count * np.dtype(dtype).itemsize
        with path.open("rb") as stream:
            self._check(stream.seek(0, 2))
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._values = np.frombuffer(self._map, dtype, count, offset)

    @property
    def values(self) -> np.ndarray:
        """All of the numbers, ``[count]``, read-only; OSError where the file was cut short."""
        self._check(self._map.size())
        return self._values

    def _check(self, size: int) -> None:
        if size < self._needed:
            got = f"{size} bytes: it was cut short while it was being read"
            wanted = f"{self._needed} bytes, as when it was opened"
            fix = (
                f"copy it again ({self._needed - size} bytes are missing) and go on with --resume; "
                "write new data beside the old, and rename it"
            )
            refuse("the data changed", f"data {self._path}", got, wanted, fix, error=OSError)


MAX_LISTED = 20
SNIFFED_BYTES = 1 << 16
MAX_OPEN_FILES = 128
_CANNOT = "cannot read the training text"


def raise_listed(title: str, problems: Sequence[Problem]) -> None:
    """Raise a ValueError that lists the first `MAX_LISTED` problems, if there are any."""
    count = len(problems)
    more = f": the first {MAX_LISTED} of {count} mistakes" if count > MAX_LISTED else ""
    raise_problems(title + more, problems[:MAX_LISTED])


def require_package(package: str, extra: str, title: str, wanted: str) -> None:
    """Raise ValueError unless the package is there, which functron[extra] installs."""
    if find_spec(package) is None:
        fix = f"pip install {package}, or functron[{extra}]"
        refuse(title, package, "no such package", wanted, fix)


class FilePart(NamedTuple):
    """`count` numbers in a file, from byte `offset` on."""

    path: Path
    dtype: np.dtype
    offset: int
    count: int


class Concatenated:
    """Files of numbers, read as if concatenated: a `TokenFile`, of which each part is a document.

    Files are memory-mapped when first read, and at most `MAX_OPEN_FILES` stay mapped, so there may
    be more of them than a process may open. Only what is read is copied into memory.

    Args:
        parts: of files, or arrays that lie in none; all of one dtype, at least one.
        path: the user's name for all of them.

    Attributes:
        ends: int64 ``[parts]``: where each part ends in the whole.
    """

    def __init__(self, parts: Sequence[FilePart | np.ndarray], path: Path):
        self._parts = list(parts)
        self.path, self.dtype = path, self._parts[0].dtype
        sizes = [len(p) if isinstance(p, np.ndarray) else p.count for p in self._parts]
        self.ends = np.cumsum(np.asarray(sizes, np.int64))
        self.num_tokens = int(self.ends[-1])
        self._open: OrderedDict[int, MappedRows] = OrderedDict()

    @property
    def edges(self) -> np.ndarray:
        """Where documents begin, and `num_tokens`: int64 ``[documents + 1]``."""
        return np.append(0, self.ends)

    @property
    def num_documents(self) -> int:
        return len(self.edges) - 1

    def starts(self, documents: np.ndarray) -> np.ndarray:
        return self.edges[np.asarray(documents, np.int64)]

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        wanted = checked_offsets(self.path, offsets, self.num_tokens)
        return np.searchsorted(self.edges, wanted, side="right") - 1

    def read(self, start: int, length: int) -> np.ndarray:
        """The numbers from `start` on, ``[length]``; a view where they lie in one part."""
        check_range(self.path, start, length, self.num_tokens)
        index = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while length > 0:
            begin = start - (int(self.ends[index - 1]) if index else 0)
            piece = self._part(index)[begin : begin + length]
            pieces.append(piece)
            start, length, index = start + len(piece), length - len(piece), index + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, self.dtype)

    def _part(self, index: int) -> np.ndarray:
        part = self._parts[index]
        if isinstance(part, np.ndarray):
            return part
        if index in self._open:
            self._open.move_to_end(index)
        else:
            self._open[index] = MappedRows(*part)
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[index].values


def byte_parts(files: Iterable[Path | bytes]) -> list[FilePart | np.ndarray]:
    """The bytes of files, and byte strings, for `Concatenated`."""
    kind = np.dtype(np.uint8)
    return [
        np.frombuffer(x, kind) if isinstance(x, bytes) else FilePart(x, kind, 0, x.stat().st_size)
        for x in files
    ]


def is_text(file: Path) -> bool:
    """Whether a file is not empty and looks like UTF-8 text in its first 64 KiB."""
    with file.open("rb") as stream:
        head = stream.read(SNIFFED_BYTES)
    if not head or b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # a character cut in two at the end of what was read is fine
        return len(head) == SNIFFED_BYTES and error.start >= len(head) - 3
    return True


def find(
    path: str | Path, kinds: Sequence[Callable[[Path], bool]] = (is_text,), what: str = "text"
) -> tuple[list[Path], int]:
    """The text files at `path`, and how many files there were left out.

    A file is taken as it is, whatever its bytes. Of a folder, the regular files of a kind at any
    depth, in sorted order, except those that are hidden or lie in a hidden folder.

    Args:
        path: a file or a folder.
        kinds: of files; those of the first are taken of which there are any.
        what: the user's word for them.

    Raises:
        ValueError: nothing is there, it cannot be read, or it holds no such file.
    """
    root = local_path(path, "data")
    try:
        if root.is_dir():
            found = sorted(_walk(root))
            taken = next(filter(None, (list(filter(kind, found)) for kind in kinds)), [])
        elif root.is_file():
            with root.open("rb"):
                found = taken = [root] if root.stat().st_size else []
        else:
            fix = on_hub(path, "dataset") or "check the spelling"
            refuse(_CANNOT, f"data {path}", "nothing there", "a file or a folder", fix)
    except OSError as error:
        where, got = error.filename or path, error.strerror or str(error)
        refuse(_CANNOT, f"data {where}", got, "something readable")
    if not taken:
        got = f"a folder with no {what} ({len(found)} files)"
        got = "an empty file" if root.is_file() else got
        refuse(_CANNOT, f"data {path}", got, "at least one file with text")
    return taken, len(found) - len(taken)


@functools.cache  # a run asks for it several times, and to find it takes a tenth of a second
def python_text() -> tuple[Path | bytes, ...]:
    """The English and code that every Python installation carries: some 10 MB, the same each time.

    The language reference's help topics, then the sources of the standard library in sorted order,
    without tests, generated tables and installed packages.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
    files = [
        file
        for file in sorted(_walk(library, skipped))
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata") and is_text(file)
    ]
    english = "\n\n".join(topics[name] for name in sorted(topics))
    return (english.encode(), *files)


def _walk(root: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    """Regular files under `root`, except hidden ones and those under folders named in `skipped`."""

    def fail(error: OSError) -> None:
        raise error

    for folder, below, names in os.walk(root, onerror=fail):
        below[:] = [name for name in below if name[0] != "." and name not in skipped]
        found = (Path(folder, name) for name in names if name[0] != ".")
        yield from (file for file in found if file.is_file())


class TokenFile(Protocol):
    """Documents of tokens, one after another in a row, mapped into memory.

    Attributes:
        path: as the user wrote it.
        dtype: of the tokens.
        num_tokens: in all documents together.
        num_documents: how many there are.
    """

    @property
    def path(self) -> Path: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_documents(self) -> int: ...

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``, across documents; a view where it can be one.

        Raises:
            IndexError: there are not as many.
        """
        ...

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in the row of all tokens: int64, the shape of `documents`.

        `num_documents` is a document too: it begins where the last one ends.
        """
        ...

    def documents_of(self, offsets: np.ndarray) -> np.ndarray:
        """The documents that tokens are in: int64, the shape of `offsets`.

        Raises:
            IndexError: there are no such tokens.
        """
        ...


def describe_file(file: TokenFile) -> str:
    """Its tokens and documents, in a few words for the user."""
    return f"{file.num_tokens:,} tokens in {file.num_documents:,} documents"


def check_range(path: Path, start: int, length: int, num_tokens: int) -> None:
    """Raise IndexError unless there are `length` tokens from `start` on."""
    if not 0 <= start <= start + length <= num_tokens:
        raise IndexError(
            f"{path}: got tokens {start} to {start + length}; wanted a part of 0 to {num_tokens}"
        )


def checked_offsets(path: Path, offsets: np.ndarray, num_tokens: int) -> np.ndarray:
    """`offsets` as int64; raise IndexError unless there is a token at each."""
    wanted = np.asarray(offsets, np.int64)
    if wanted.size:
        check_range(path, int(wanted.min()), 1, num_tokens)
        check_range(path, int(wanted.max()), 1, num_tokens)
    return wanted


def refuse_order(path: Path, start: int, stop: int) -> NoReturn:
    """Raise ValueError for documents that do not follow one another between two tokens."""
    got = f"documents that do not begin one after another, between tokens {start} and {stop}"
    fix = "copy it or make it again; functron.data.verify lists the mistakes in an index"
    refuse(
        "a damaged index of documents",
        f"data {path}",
        got,
        "documents in the order of their tokens",
        fix,
    )


def check_ids(path: Path, tokens: np.ndarray, start: int, vocab_size: int | None) -> None:
    """Raise ValueError unless `tokens`, those from `start` on, are ids below `vocab_size` (None:
    any).
    """
    if vocab_size is None or not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocab_size:
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    got = f"id {int(tokens[at])} at token {start + at}"
    fix = f"choose a model with gpt.vocab_size > {int(tokens.max())}, or preprocess again"
    wanted = f"ids from 0 to {vocab_size - 1}"
    refuse("tokens outside the vocabulary", f"data {path}", got, wanted, fix)


def last_not_after(
    begins: Callable[[np.ndarray], np.ndarray], count: int, offsets: np.ndarray
) -> np.ndarray:
    """The last i in ``range(count)`` with ``begins(i) <= offset``, for each of `offsets`.

    Bisection, all offsets at once, that looks at no more than ``log2(count)`` values for each:
    `numpy.searchsorted` would copy a table that is not aligned, such as those of an index file.

    Args:
        begins: nondecreasing, of an int64 array; ``begins(0)`` is no more than any offset.
        count: at least 1.
        offsets: integers.
    """
    low = np.zeros(np.shape(offsets), np.int64)
    high = np.full(np.shape(offsets), count, np.int64)
    for _ in range(int(count).bit_length()):
        middle = (low + high) // 2
        here = begins(middle) <= offsets
        low, high = np.where(here, middle, low), np.where(here, high, np.maximum(middle, low + 1))
    return low


def fitting_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron-LM stores ids below `vocab_size`: uint16 below 65,500, or int32.

    Source: ``DType.optimal_dtype`` in ``megatron/core/datasets/indexed_dataset.py``.
    """
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def dtype_problems(where: str, dtype: np.dtype, vocab_size: int | None) -> Iterator[Problem]:
    """The problem of `dtype` for ids below `vocab_size` (None: any)."""
    if vocab_size is None:
        return
    wanted = f"a dtype that holds ids up to {vocab_size - 1}"
    fix = f"write the tokens as {fitting_dtype(vocab_size).name}"
    if dtype.kind not in "iu":
        yield Problem(where, f"{dtype.name}, which is for no token ids", wanted, fix)
    elif (largest := int(np.iinfo(dtype).max)) < vocab_size - 1:
        yield Problem(where, f"{dtype.name}, whose largest id is {largest}", wanted, fix)


def check_dtype(where: str, dtype: np.dtype, vocab_size: int | None) -> None:
    """Raise ValueError unless `dtype` holds the integers below `vocab_size` (None: any)."""
    title = "dtype too small for the vocabulary"
    raise_problems(title, dtype_problems(where, dtype, vocab_size))


def ids_outside(file: TokenFile, path: Path, vocab_size: int | None) -> Iterator[Problem]:
    """Tokens that are below 0, or not below `vocab_size`, a few MB at a time.

    Args:
        file: whose tokens they are.
        path: where these begin at offset 0, which the problems name.
        vocab_size: None: any that the dtype holds.
    """
    if file.dtype.kind not in "iu":
        return
    limit = vocab_size if vocab_size is not None else int(np.iinfo(file.dtype).max) + 1
    for begin in range(0, file.num_tokens, _SCANNED):
        tokens = file.read(begin, min(_SCANNED, file.num_tokens - begin))
        if int(tokens.min()) >= 0 and int(tokens.max()) < limit:
            continue
        wide = tokens.astype(np.int64)
        for index in np.flatnonzero((wide < 0) | (wide >= limit)):
            offset = begin + int(index)
            where = f"{path}, offset {offset * file.dtype.itemsize}"
            got = f"token id {wide[index]} in document {int(file.documents_of(np.array(offset)))}"
            yield Problem(where, got, f"0 to {limit - 1}", "use the tokenizer that wrote it")


_SCANNED = 1 << 20
