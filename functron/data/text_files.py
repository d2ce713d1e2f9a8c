"""The settings of a run's data, and files of text of any kind, cut into chunks to be read alone.

JSONL has one JSON object a line, whose key has a document; compressed files too. Parquet has a
column with a document in every row. Other files are one document of plain text each.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from functron.core.errors import Problem, find_plugin, load_plugin, local_path, nearest, refuse
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences
from functron.data.blend import NEWEST, BlendOrder
from functron.data.mapped_files import SpecialTokens, TextRules, find, is_text, require_package
from functron.data.sampling import ARITHMETIC, ORDERS, RampUp, SampleOrder, parse_ramp_up

_MIDDLE = Need(lambda data: data.fim_rate > 0, "filling in the middle", "set fim_rate")


@shows_differences
@dataclass(frozen=True)
class DataConfig:
    """The samples of a run, and how many of them each step has.

    Attributes:
        path: a text file or a folder of them, tokens on disk, or conversations (see `format`);
            empty: the English and code of this Python. Several files of tokens in proportions, as
            Megatron-LM writes them: "0.3 PREFIX1 0.7 PREFIX2"; or all of each, every sample once an
            epoch: "all PREFIX1 all PREFIX2".
        tokenizer: tokenizer file or folder: tokenizer.json, a SentencePiece .model, a .tiktoken
            file, or a folder with one of these, which the run folder then keeps a copy of; bytes:
            text is read as bytes; empty: the tokenizer in the run folder `out` (of a converted
            model), the one that functron preprocess used, or else bytes.
        tokenizer_pattern: how the tokenizer splits text, where it is a .tiktoken file that has not
            one of the usual names: gpt2, cl100k, o200k, llama3 or a regular expression.
        special_tokens: how names of special tokens inside of text and messages are read, such as
            <|endoftext|> on a page about it: text: as ordinary text; parse: as the special tokens,
            as in what a template of conversations writes. Tokens on disk keep how they were made.
        prepend_bos: documents, prompts and texts to evaluate begin with what the tokenizer puts
            before a text (BOS), if anything; see functron.data.mapped_files.TextRules.
        text_rules: version of these rules. 1 is for runs that began before there was a 2, which
            keep it: documents without BOS, names of special tokens as
            the kind of tokenizer has it, and targets of conversations by tokens' first characters.
        format: how `data` is read: text; chat: JSONL files of conversations, of which the model
            learns the tokens of the assistant; tokens: files of functron preprocess or Megatron-LM,
            a prefix of .bin and .idx, or shards; mock: random tokens, without any file; auto: chat
            where it ends in .jsonl, and tokens where there is such a file.
        overlong: conversations longer than seq tokens are refused (an error), cut at their end, or
            dropped.
        split: which documents of tokens on disk are for training, validation and test, such as
            969,30,1: training has the first of these parts; empty: all of them.
        order: arithmetic: every epoch shuffled by itself, without tables; or the order of an
            application by its name, of .bin and .idx files, with its rule for `split`; or that of
            your own function, package.module:function, which returns a
            functron.data.sampling.SampleOrder.
        order_samples: of how many samples an application makes its order; 0: those of `steps`.
        order_cache: a folder for the tables of that order, which all processes of a machine map;
            empty: each process makes them, and keeps them in memory.
        blend_surplus: the share of samples by which the sources of a blend have more in that order
            than the blend takes.
        blend_order: the version of the order in which the sources of a blend take turns, which a
            run keeps as it began: 2: of the first samples, however many, each has its share to
            within 2; 1: that of runs before it, blocks of 2^16 samples that repeat, whose shares
            are multiples of 2^-16.
        extra_token: samples of tokens on disk have a target for their last token, which is read
            beyond them; otherwise it predicts nothing, as with Megatron-LM's
            add_extra_token_to_sequence=False.
        mask_documents: tokens on disk attend to those of their own document only, and positions
            count from 0 in each.
        fim_rate: the share of documents of tokens on disk that are rearranged, so that the model
            learns to fill in the middle; 0: none.
        fim_spm_rate: the share of these whose suffix comes first.
        fim_tokens: the ids of the tokens before prefix, middle and suffix, and of the one that ends
            a document, if there is one: such as 50257,50258,50259,50256.
        pack: best-fit: documents of tokens on disk are put together so that few are cut, and see
            none but themselves, as with mask_documents; conversations share samples, whole and
            without seeing one another; empty: documents as they follow one another, and one
            conversation a sample.
        mask_rate: share of tokens that a BERT predicts, or a T5 restores.
        mask_token: the id that hides them, or the first of a T5's sentinels, from which others go
            down; -1: the tokenizer's [MASK], <mask> or <extra_id_0>, or else the last of the
            vocabulary.
        mean_span: mean length in tokens of the spans that a T5 restores.
        end_token: the id that ends what a T5 reads and writes; -1: the tokenizer's end of text.
        prefetch: number of batches that a background thread prepares ahead; 0: none.
        seq: tokens per sample.
        global_batch: samples per step, over all ranks and microbatches.
        ramp_up: begin with fewer samples per step: "START INCREMENT SAMPLES", as Megatron-LM has
            it: from START to global_batch in steps of INCREMENT, each for the same number of
            samples, SAMPLES for all of them together. Empty: global_batch from the first step on.
        earlier_batches: batches of other sizes that the run began with, before those of
            global_batch and ramp_up: "6x4 10x8" are 6 steps of 4 samples and 10 of 8. A run that
            changes its batches notes them here.
    """

    path: str = setting("", "common path samples", short="data")
    tokenizer: str = setting("", "common path samples")
    tokenizer_pattern: str = setting("", "samples")
    special_tokens: SpecialTokens = setting("text", "kept samples")
    prepend_bos: bool = setting(True, "kept samples")
    text_rules: Literal[1, 2] = setting(2, "kept samples")
    format: Literal["auto", "text", "chat", "tokens", "mock"] = setting("auto", "common samples")
    overlong: Literal["refuse", "cut", "drop"] = setting("refuse", "samples")
    split: str = setting("", "samples")
    order: str = setting(ARITHMETIC, "samples")
    order_samples: int = 0
    order_cache: str = setting("", "path")
    blend_surplus: float = setting(0.005, "samples")
    blend_order: BlendOrder = setting(NEWEST, "kept samples")
    extra_token: bool = setting(True, "samples")
    mask_documents: bool = setting(False, "samples step")
    fim_rate: float = setting(0.0, "samples")
    fim_spm_rate: float = setting(0.5, "samples", need=_MIDDLE)
    fim_tokens: str = setting("", "samples", need=_MIDDLE)
    pack: Literal["", "best-fit"] = setting("", "samples step")
    mask_rate: float = setting(0.15, "objective samples step")
    mask_token: int = setting(-1, "objective samples")
    mean_span: float = setting(3.0, "objective samples step")
    end_token: int = setting(-1, "objective samples")
    prefetch: int = setting(2, least=0)
    seq: int = setting(128, "common samples step", least=1)
    global_batch: int = setting(8, "common samples step", least=1)
    ramp_up: str = setting("", "samples step")
    earlier_batches: str = setting("", "kept samples step")

    def __post_init__(self):
        if self.order != ARITHMETIC:
            find_plugin(ORDERS, self.order, "order", [ARITHMETIC])

    @property
    def batches(self) -> RampUp:
        """How many samples each step has, and which one is its first; ValueError where it is not
        clear.
        """
        return parse_ramp_up(self.ramp_up, self.global_batch, self.earlier_batches)

    @property
    def rules(self) -> TextRules:
        """The rules by which text becomes tokens."""
        return TextRules(self.special_tokens, self.prepend_bos, self.text_rules)

    @property
    def sample_order(self) -> SampleOrder | None:
        """The order of an application; None: the arithmetic one.

        ValueError where there is no such function.
        """
        if self.order == ARITHMETIC:
            return None
        return load_plugin(ORDERS, self.order, "order", [ARITHMETIC])()

    @property
    def packed(self) -> bool:
        """Whether batches say which tokens are of the same document, which alone they attend to."""
        return self.mask_documents or bool(self.pack)


class DocumentText(NamedTuple):
    """One document of a file: its text, and what gives the user's name of its place, the file and
    line or row; or the problem why it cannot be read.
    """

    text: str
    where: Callable[[], str] = str
    problem: Problem | None = None


def json_kind(value: object) -> str:
    """The user's word for the kind of a JSON value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED = tuple(stem + suffix for stem in (*SUFFIXES, ".json") for suffix in (".gz", ".zst"))
"""Files that can be read from their beginning only."""

BLOCK = 1 << 17
_AGAIN = "copy or download it again"


def read_jsonl(
    file: Path, key: str = "text", start: int = 0, stop: int | None = None
) -> Iterator[DocumentText]:
    """The texts of the lines that begin at bytes `start` to `stop`; blank lines are passed over.

    So the ranges of a file that is cut anywhere have each line once. A line that cannot be read
    comes with its problem; a compressed file that cannot be read any further ends with one.

    Args:
        file: JSONL in UTF-8; by the end of its name, as gzip (``.gz``) or Zstandard (``.zst``).
        key: of the text in every line's object.
        start: of a file that is not compressed.
        stop: likewise; None: the end.

    Raises:
        ValueError: the package zstandard is missing.
        OSError: the file cannot be opened.
    """
    place = start
    try:
        for place, line in _lines(file, start):
            if stop is not None and place >= stop:
                return
            if line.strip():
                yield _read_line(file, key, place, line)
            place += len(line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        got = f"{error or 'the end'} after {place} bytes of text"
        at = where_in_jsonl(file, place)
        yield DocumentText("", problem=Problem(at, got, "the rest of the file", _AGAIN))


def where_in_jsonl(file: Path, place: int) -> str:
    """``FILE:LINE`` of the line at byte `place` of the text; reads the file up to it."""
    number = 1
    try:
        for begin, line in _lines(file, 0):
            if begin + len(line) > place:
                break
            number += line.endswith(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        pass  # it is the line at which reading ended
    return f"{file}:{number}"


def _lines(file: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Where lines begin, and they, from the first that begins at `start` or after."""
    if file.suffix == ".gz":
        with gzip.open(file, "rb") as stream:
            yield from _number_lines(stream, 0)
    elif file.suffix == ".zst":
        yield from _number_lines(_split_lines(_decompress(file)), 0)
    else:
        with file.open("rb") as stream:
            if start:
                stream.seek(start - 1)
                start += len(stream.readline()) - 1  # the rest of a line that began before
            yield from _number_lines(stream, start)


def _number_lines(lines: Any, place: int) -> Iterator[tuple[int, bytes]]:
    for line in lines:
        yield place, line
        place += len(line)


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        *whole, last = block.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if last := b"".join(rest):
        yield last


def _decompress(file: Path) -> Iterator[bytes]:
    """The bytes in a Zstandard file, frame after frame.

    Raises:
        EOFError: it is cut off (the package's own stream ends there as if it were whole), or
            damaged.
    """
    require_package("zstandard", "zstd", "cannot read compressed text", f"it, to read {file}")
    import zstandard

    frame, begun = None, False
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            while block:
                # windows of up to 2 GiB: what zstd --long writes
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise EOFError(f"damaged data ({error})") from error
                begun = not frame.eof
                block = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if begun:
        raise EOFError("the end of the file in the middle of a frame")


def _read_line(file: Path, key: str, place: int, line: bytes) -> DocumentText:
    found, problem = parse_json_line(line)
    if problem is None and not isinstance(found, dict):
        problem = json_kind(found), f"an object with {key!r}", ""
    elif problem is None and key not in found:
        fix = f"--key: {nearest(key, found) if found else ''}"
        problem = f"an object without {key!r}", "one with it", fix
    elif problem is None and not isinstance(found[key], str):
        problem = f"{json_kind(found[key])} as {key!r}", "text", ""
    elif problem is None and (got := describe_surrogate(found[key])):
        problem = got, "text", ""
    if problem is None:
        return DocumentText(found[key], partial(where_in_jsonl, file, place))
    return DocumentText("", problem=Problem(where_in_jsonl(file, place), *problem))


def parse_json_line(line: bytes) -> tuple[Any, tuple[str, str, str] | None]:
    """The value in a line of JSON and None, or None and the problem's ``(got, wanted, fix)``."""
    try:
        return json.loads(line.rstrip().decode("utf-8-sig")), None
    except UnicodeDecodeError as error:
        got = f"byte {line[error.start]:#04x} at offset {error.start} of the line"
        return None, (got, "UTF-8", "")
    except json.JSONDecodeError as error:
        return None, (f"{error.msg} at column {error.colno}", "one JSON object a line", "")
    except RecursionError:
        return None, ("JSON too deep to read", "an object", "")


def describe_surrogate(text: str) -> str:
    """The first lone surrogate of a text, which JSON can write and no encoding can; else empty."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair at character {error.start}"
    return ""


ROWS = 256
_NOT_PARQUET = "cannot read Parquet"


def read_parquet(
    file: Path, key: str = "text", start: int = 0, stop: int | None = None
) -> Iterator[DocumentText]:
    """The texts of row groups `start` to `stop`, some rows at a time.

    A row that has none (null: None or NaN in pandas) comes with its problem, and a damaged row
    group ends with one.

    Raises:
        ValueError: the package pyarrow is missing, the file is damaged, or no column of text is
            called `key`.
    """
    import pyarrow

    opened = _open_parquet(file, key)
    last = opened.metadata.num_row_groups if stop is None else stop
    row = sum(opened.metadata.row_group(group).num_rows for group in range(start))
    for group in range(start, last):
        end = row + opened.metadata.row_group(group).num_rows
        try:
            for batch in opened.iter_batches(ROWS, row_groups=[group], columns=[key]):
                yield from _read_column(file, key, row, batch.column(0), opened)
                row += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            got = f"damaged data ({str(error).splitlines()[0]})"
            place = f"{where_in_parquet(file, row, opened)} or after"
            yield DocumentText("", problem=Problem(place, got, "rows of text", _AGAIN))
        row = end


def where_in_parquet(file: Path, place: int, opened: Any) -> str:
    """``FILE, row group G, row R``, both from 0, of a row of the file."""
    metadata = opened.metadata
    for group in range(metadata.num_row_groups):
        if place < (count := metadata.row_group(group).num_rows):
            break
        place -= count
    return f"{file}, row group {group}, row {place}"


def _read_column(
    file: Path, key: str, row: int, column: Any, opened: Any
) -> Iterator[DocumentText]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} in column {key!r}"
        place = f"{where_in_parquet(file, row, opened)} or one of the {len(column) - 1} after it"
        yield DocumentText("", problem=Problem(place, got, "UTF-8"))
        return
    for place, text in enumerate(values, row):
        at = partial(where_in_parquet, file, place, opened)
        if text is None:
            fix = "leave such rows out when writing the file"
            got = f"null (None or NaN) in column {key!r}"
            yield DocumentText("", problem=Problem(at(), got, "text", fix))
        else:
            yield DocumentText(text, at)


def _open_parquet(file: Path, key: str) -> Any:
    require_package("pyarrow", "parquet", _NOT_PARQUET, f"it, to read {file}")
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names in no UTF-8
        got = str(error).splitlines()[0]
        refuse(_NOT_PARQUET, str(file), got, "a Parquet file", _AGAIN)
    schema = opened.schema_arrow
    if key not in schema.names:
        got = f"no column {key!r}"
        fix = f"--key: {nearest(key, schema.names)}"
        refuse(_NOT_PARQUET, str(file), got, "a column of text", fix)
    kind = schema.field(key).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        fix = "write it as text; a column that is NaN in every row becomes one of numbers"
        refuse(_NOT_PARQUET, f"{file}, column {key!r}", kind, "strings", fix)
    return opened


TextKind = Literal["jsonl", "parquet", "text"]
_CANNOT = "cannot read the text"


@dataclass(frozen=True)
class TextChunk:
    """A part of the text that one process reads at a time.

    Attributes:
        kind: of its files.
        files: one; or several of plain text, each of which is a document.
        start: the first byte (of JSONL) or row group (of Parquet) of the file that is in it.
        stop: the first that is not; None: the end of the file.
        size: its bytes, roughly.
    """

    kind: TextKind
    files: tuple[Path, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files of text that `inputs` name, in order.

    The kind of a file follows from its name: ``.jsonl``, ``.ndjson``, ``.json`` (perhaps with
    ``.gz`` or ``.zst`` after it), ``.parquet``, or else one document of plain text. Of a folder,
    its JSONL and Parquet files at any depth, if it has any; else its text files (see
    `functron.data.mapped_files.find`).

    Raises:
        ValueError: nothing is there, or nothing to read. All inputs at fault are named.
    """
    found: list[Path] = []
    mistakes: list[str] = []
    for given in inputs:
        local_path(given, "inputs")
        try:
            found += find(given, (_is_structured, is_text))[0]
        except ValueError as error:
            mistakes += str(error).splitlines()[1:]
    if not inputs:
        refuse(_CANNOT, "inputs", "none", "at least one file or folder")
    _raise_mistakes(mistakes)
    return found


def _is_structured(file: Path) -> bool:
    # a .json by itself is more likely settings than text
    return kind_of(file) != "text" and file.suffix != ".json"


def _raise_mistakes(mistakes: Sequence[str]) -> None:
    """Raise the mistakes that others' errors listed as one error."""
    if mistakes:
        raise ValueError("\n".join([_CANNOT, *mistakes]))


def kind_of(file: Path) -> TextKind:
    """The kind of a file, by its name."""
    if file.suffix == ".parquet":
        return "parquet"
    return "jsonl" if file.name.endswith((*SUFFIXES, *COMPRESSED, ".json")) else "text"


def cut(files: Sequence[Path], key: str, chunk_bytes: int) -> list[TextChunk]:
    """Chunks of about `chunk_bytes` each, in order, that have every document once.

    JSONL is cut anywhere, between lines; Parquet between row groups; compressed files, which can
    be read from the beginning only, and files of plain text are not cut.

    Raises:
        ValueError: a Parquet file cannot be read, or lacks the column `key`. All such are named.
    """
    chunks: list[TextChunk] = []
    mistakes: list[str] = []
    for kind, group in groupby(files, kind_of):
        if kind == "text":
            chunks += _chunk_plain(list(group), chunk_bytes)
            continue
        for file in group:
            try:
                chunks += _chunk_file(file, kind, key, chunk_bytes)
            except ValueError as error:
                mistakes += str(error).splitlines()[1:]
    _raise_mistakes(mistakes)
    return chunks


def _chunk_plain(files: Sequence[Path], chunk_bytes: int) -> Iterator[TextChunk]:
    """Files of plain text, several to a chunk."""
    taken: list[Path] = []
    size = 0
    for file in files:
        taken.append(file)
        size += file.stat().st_size
        if size >= chunk_bytes:
            yield TextChunk("text", tuple(taken), size=size)
            taken, size = [], 0
    if taken:
        yield TextChunk("text", tuple(taken), size=size)


def _chunk_file(file: Path, kind: TextKind, key: str, chunk_bytes: int) -> Iterator[TextChunk]:
    if kind == "jsonl":
        size = file.stat().st_size
        if file.name.endswith(COMPRESSED):
            yield TextChunk(kind, (file,), size=size)
            return
        for start in range(0, size, chunk_bytes):
            stop = min(start + chunk_bytes, size)
            yield TextChunk(kind, (file,), start, stop, stop - start)
        return
    start = total = 0
    metadata = _open_parquet(file, key).metadata
    for group in range(1, metadata.num_row_groups + 1):
        total += metadata.row_group(group - 1).total_byte_size
        if total >= chunk_bytes or group == metadata.num_row_groups:
            yield TextChunk(kind, (file,), start, group, total)
            start, total = group, 0


def read(chunk: TextChunk, key: str = "text") -> Iterator[DocumentText]:
    """The documents of a chunk, right or wrong."""
    if chunk.kind == "jsonl":
        return read_jsonl(chunk.files[0], key, chunk.start, chunk.stop)
    if chunk.kind == "parquet":
        return read_parquet(chunk.files[0], key, chunk.start, chunk.stop)
    return read_plain(chunk.files)


def read_plain(
    files: Iterable[Path | bytes], fix: str = "convert it, or leave it out"
) -> Iterator[DocumentText]:
    """The text of each file, or the problem with it, which `fix` mends where it is not UTF-8."""
    for file in files:
        try:
            data = file if isinstance(file, bytes) else file.read_bytes()
            yield DocumentText(data.decode("utf-8"), partial(str, file))
        except UnicodeDecodeError as error:
            got = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            yield DocumentText("", problem=Problem(str(file), got, "UTF-8", fix))
        except OSError as error:
            problem = Problem(str(file), error.strerror or str(error), "a readable file")
            yield DocumentText("", problem=problem)


def replace_text(file: Path, text: str) -> None:
    """Write a file so that it has at any moment its old content, if any, or the new one."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.new")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)
