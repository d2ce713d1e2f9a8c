"""Preprocessing: tokens on disk of files of text, by several processes, to be killed at any time.

`preprocess` cuts the text into chunks; workers make a part of each (`Encoder`), finished or not
there; the files are assembled of the parts. `PreprocessSettings` are its options, `Summary` is its
result. Worker processes take tasks from one parent, and end when it does, however it ends.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import filelock
import numpy as np
from numpy.lib.format import open_memmap

from functron.core.errors import Problem, local_path, raise_problems, refuse
from functron.core.settings import Need, Needs
from functron.data.indexed import IndexedFile, IndexedWriter
from functron.data.mapped_files import (
    MAX_LISTED,
    OLD_RULES,
    RULES,
    SpecialTokens,
    TextRules,
    TextTokenizer,
    check_dtype,
    fitting_dtype,
)
from functron.data.shards import RULE_KEYS, read_object, with_checksums
from functron.data.text_files import (
    DocumentText,
    TextChunk,
    cut,
    find_files,
    kind_of,
    read,
    replace_text,
)
from functron.data.tokenizer import end_of_text, open_tokenizer

Empty = Literal["refuse", "drop", "keep"]
StoredFormat = Literal["indexed", "npy"]
StoredDtype = Literal["auto", "uint8", "uint16", "int32"]


@dataclass(frozen=True)
class PreprocessSettings:
    """The options of preprocessing.

    Attributes:
        inputs: files and folders (see `functron.data.text_files.find_files`). A document is encoded
            in one call, for which Hugging Face's tokenizers take some 130 bytes of memory per byte:
            cut files of plain text that have hundreds of MB.
        tokenizer: a path, or ``bytes`` (see `functron.data.tokenizer.open_tokenizer`).
        out: where to, without the endings that the format has.
        key: of the text in JSONL objects; the column of Parquet files.
        append_eod: end every document with the token that ends a text.
        prepend_bos: begin every document with what the tokenizer puts before a text, if anything.
        special_tokens: what names of special tokens in the text are: ``text``, or ``parse``: their
            ids (see `functron.data.mapped_files.TextRules`).
        end_of_text: the name of that special token; empty: the tokenizer's own.
        pattern: how a tiktoken file's tokenizer splits text.
        format: ``indexed``: OUT.bin and OUT.idx, as Megatron-LM has them; ``npy``: OUT.npy, and
            OUT.documents.npy with where documents begin.
        dtype: of the tokens; ``auto``: uint16 below 65,500 ids, or int32, as in Megatron-LM.
        empty: what becomes of documents without tokens: ``refuse`` them all, ``drop`` them, or
            ``keep`` them as documents that begin where they end, as Megatron-LM does.
        workers: processes; 0: as many as this one may use processors.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    out: str
    key: str = "text"
    append_eod: bool = True
    prepend_bos: bool = True
    special_tokens: SpecialTokens = "text"
    end_of_text: str = ""
    pattern: str = ""
    format: StoredFormat = "indexed"
    dtype: StoredDtype = "auto"
    empty: Empty = "refuse"
    workers: int = 0

    @property
    def num_workers(self) -> int:
        """How many processes that is."""
        if self.workers:
            return self.workers
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @property
    def rules(self) -> TextRules:
        """The rules by which text becomes tokens."""
        return TextRules(self.special_tokens, self.prepend_bos)

    @property
    def targets(self) -> tuple[Path, Path]:
        """The files to make; without the second, the first is of no use."""
        endings = (".bin", ".idx") if self.format == "indexed" else (".documents.npy", ".npy")
        return Path(self.out + endings[0]), Path(self.out + endings[1])

    @property
    def record(self) -> Path:
        """The file with how they were made; it is written when they are complete."""
        return Path(self.out + ".json")

    @property
    def parts(self) -> Path:
        """The folder of finished parts, until then."""
        return Path(self.out + ".parts")


SETTINGS_NEEDS: Needs = MappingProxyType(
    {
        "key": Need(
            lambda c: any(kind_of(file) != "text" for file in find_files(c.inputs)),
            "JSONL or Parquet, whose texts have a name",
            "give a file of these: text as it is has none",
        ),
    }
)
"""Needs of fields of `PreprocessSettings`; others have an effect on any text, or are refused."""


@dataclass(frozen=True)
class Progress:
    """Bytes of text that are tokens by now, of all bytes, and how many tokens these are.

    `earlier` of the tokens were there when this process began, `seconds` ago.
    """

    done: int
    total: int
    tokens: int
    earlier: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The speed of this process and its workers."""
        return (self.tokens - self.earlier) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Summary:
    """The result of preprocessing; prints as a few lines.

    Attributes:
        settings: the options.
        files, size: how many files the text was in, and their bytes.
        documents, tokens: how many were written.
        empty: documents without tokens, left out or kept.
        names: how many names of special tokens were in the text.
        dtype: of the tokens.
        rules: by which text became tokens, in words.
        progress: of the process that finished; None: it was complete before.
    """

    settings: PreprocessSettings
    files: int
    size: int
    documents: int
    tokens: int
    empty: int
    names: int
    dtype: str
    rules: str
    progress: Progress | None

    def __str__(self) -> str:
        kept = "kept" if self.settings.empty == "keep" else "left out"
        empty = f" ({self.empty:,} without tokens {kept})" if self.empty else ""
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        names = ", ".join(str(path) for path in self.settings.targets)
        lines = [
            f"text    {files}, {self.size / 1e6:,.1f} MB",
            f"tokens  {self.tokens:,} in {documents}{empty}, {self.dtype}",
            f"rules   {self.rules}",
            f"written {names}",
        ]
        if self.progress is None:
            return "\n".join([*lines, "nothing to do: this was complete"])
        earlier = self.progress.earlier
        if earlier:
            lines.append(f"resumed {earlier:,} of the tokens were there before")
        if earlier == self.progress.tokens:
            return "\n".join(lines)
        count = self.settings.num_workers
        workers = "1 process" if count == 1 else f"{count} processes"
        speed = f"{self.progress.tokens_per_second:,.0f} tokens/s on {workers}"
        return "\n".join([*lines, f"speed   {speed}, {self.progress.seconds:,.1f} s"])


BATCH_CHARACTERS = 1 << 20
BATCH_TEXTS = 4096


@dataclass(frozen=True)
class Task:
    """A chunk of the text, and the path without endings of the part that its tokens become."""

    chunk: TextChunk
    part: Path


@dataclass(frozen=True)
class Counts:
    """Documents and tokens of a part, empty documents, and names of special tokens in its text."""

    documents: int
    tokens: int
    empty: int
    names: int = 0


class Encoder:
    """Makes the parts of tasks.

    Args:
        settings: with the path and the dtype that are meant (`_resolve_settings`).
        end: the id that ends documents; None: none.
        tokenizer: that of the settings, where it is open already.
    """

    def __init__(
        self, settings: PreprocessSettings, end: int | None, tokenizer: TextTokenizer | None = None
    ):
        self._settings, self._end = settings, end
        how = {"pattern": settings.pattern, "rules": settings.rules}
        self._tokenizer = tokenizer or open_tokenizer(settings.tokenizer, **how)
        self._begin = settings.rules.begin_document(self._tokenizer)

    def __call__(self, task: Task) -> Counts | list[Problem]:
        """Make the part of a task, or say why it cannot be made: then nothing is left of it."""
        try:
            counts = self._encode(task)
        except _UnreadableError as error:
            return list(error.args)
        except OSError as error:
            got = error.strerror or str(error)
            where = str(error.filename or task.part)
            return [Problem(where, got, "files that can be read, and room to write", "start again")]
        replace_text(counts_path(task.part), json.dumps(asdict(counts)))
        return counts

    def _encode(self, task: Task) -> Counts:
        settings, tokenizer = self._settings, self._tokenizer
        problems: list[Problem] = []
        empty = names = 0
        kept = settings.empty == "keep"
        options = {"vocab_size": tokenizer.vocab_size, "allow_empty": kept, "overwrite": True}
        with IndexedWriter(task.part, np.dtype(settings.dtype), **options) as writer:
            for batch in _read_batches(task.chunk, settings.key, problems):
                lists = tokenizer.encode_batch([text.text for text in batch])
                for text, ids in zip(batch, lists, strict=True):
                    names += tokenizer.names.count(text.text)
                    if ids:
                        ids[:0] = self._begin
                        ids += () if self._end is None else (self._end,)
                    else:
                        empty += 1
                        if settings.empty == "refuse" and len(problems) < MAX_LISTED:
                            problems.append(_explain_empty(text))
                lengths = [len(ids) for ids in lists if ids or kept]
                if lengths and not problems:
                    tokens = np.fromiter(chain.from_iterable(lists), np.int64, sum(lengths))
                    writer.extend(tokens, lengths)
            if problems:
                raise _UnreadableError(*problems)
        return Counts(writer.num_documents, writer.num_tokens, empty, names)


def _describe_task(task: Task) -> str:
    chunk, others = task.chunk, len(task.chunk.files) - 1
    stop = "the end" if chunk.stop is None else chunk.stop
    more = f" and {others} more files" if others else ""
    return f"{chunk.files[0]}{more} from {chunk.start} to {stop}"


def counts_path(part: Path) -> Path:
    """The file with the counts of a part, which is written when the part is finished."""
    return part.with_name(part.name + ".json")


def read_counts(part: Path) -> Counts | None:
    """The contents of a finished part; None where it is not finished."""
    try:
        return Counts(**(read_object(counts_path(part)) or {}))
    except TypeError:
        return None


class _UnreadableError(Exception):
    """Ends the writing of a part; its arguments are `Problem`s."""


def _explain_empty(text: DocumentText) -> Problem:
    got = "an empty text" if not text.text else f"a text without tokens: {text.text[:20]!r}"
    fix = "leave it out, or use --empty drop"
    return Problem(text.where(), got, "at least one token", fix)


def _read_batches(
    chunk: TextChunk, key: str, problems: list[Problem]
) -> Iterator[list[DocumentText]]:
    """The texts of a chunk, as many as are worth one call; mistakes go to `problems`."""
    batch: list[DocumentText] = []
    size = 0
    for text in read(chunk, key):
        if text.problem is not None:
            problems.append(text.problem)
            if len(problems) >= MAX_LISTED:
                return
            continue
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


BLOCK = 1 << 20


def assemble(
    settings: PreprocessSettings, dtype: str, parts: Sequence[Path], counts: Counts
) -> None:
    """Make the targets of `settings` of parts, one after another, in constant memory.

    They are written in the folder of parts, so that a killed process leaves nothing elsewhere.
    """
    whole = replace(settings, out=str(settings.parts / "whole"))
    if settings.format == "indexed":
        with IndexedWriter(whole.out, np.dtype(dtype), overwrite=True) as writer:
            for part in parts:
                writer.append(IndexedFile(part))
    else:
        documents, tokens = whole.targets
        kinds = {tokens: (dtype, counts.tokens), documents: ("int64", counts.documents + 1)}
        tables = [open_memmap(file, "w+", kind, (n,)) for file, (kind, n) in kinds.items()]
        _concatenate(parts, *tables)
        for file, table in zip(kinds, tables, strict=True):
            table.flush()
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    settings.targets[1].unlink(missing_ok=True)
    for made, target in zip(whole.targets, settings.targets, strict=True):
        made.replace(target)


def _concatenate(parts: Sequence[Path], tokens: np.ndarray, documents: np.ndarray) -> None:
    """Write the tokens of all parts, and where their documents begin and the last one ends."""
    written = count = documents[0] = 0
    for part in parts:
        file = IndexedFile(part)
        for begin in range(0, file.num_tokens, BLOCK):
            block = file.read(begin, min(BLOCK, file.num_tokens - begin))
            tokens[written + begin :][: len(block)] = block
        ends = file.starts(np.arange(1, file.num_documents + 1)) + written
        documents[count + 1 :][: len(ends)] = ends
        written, count = written + file.num_tokens, count + len(ends)


T = TypeVar("T")
R = TypeVar("R")

_PARALLEL = "TOKENIZERS_PARALLELISM"
"""Keeps the package tokenizers from starting threads of its own in every process."""


def run_tasks(
    count: int,
    start: Callable[[], Callable[[T], R]],
    tasks: Sequence[T],
    name: Callable[[T], str],
) -> Generator[tuple[T, R], None, None]:
    """Run tasks in `count` processes (1: this one), and yield each with its result as it ends.

    Closing the iterator ends the processes. They are forked from a server that has this package
    imported and nothing else running, where the system can; each waits at a pipe of its own, so
    that none outlives its parent by more than a task.

    Args:
        count: at least 1.
        start: called once in every process, gives the function of tasks; can be pickled.
        tasks: in the order in which they are begun.
        name: of a task, for errors when its process dies.

    Raises:
        ValueError: a process died, which is what happens when memory is short.
        RuntimeError: a task failed; with its traceback.
    """
    if count == 1 or len(tasks) <= 1:
        with _limit_threads():
            work = start() if tasks else None
            for task in tasks:
                assert work is not None
                yield task, work(task)
        return
    workers: dict[Connection, BaseProcess] = {}
    running: dict[Connection, T] = {}
    waiting = iter(tasks)
    try:
        for _ in range(min(count, len(tasks))):
            connection, process = _start_worker(start)
            workers[connection] = process
            _send_task(connection, waiting, running)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                task = running.pop(ready)
                result = _receive_result(ready, workers[ready], name(task))
                _send_task(ready, waiting, running)
                yield task, result
    finally:
        _stop_workers(workers, idle=not running)


def _start_worker(start: Callable[[], Any]) -> tuple[Connection, BaseProcess]:
    context: Any = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["functron.data.preprocess"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_tasks, args=(theirs, start), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _serve_tasks(connection: Connection, start: Callable[[], Callable[[Any], Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and decides
    os.environ[_PARALLEL] = "false"
    work = None
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            work = work or start()
            answer = work(task), ""
        except Exception:
            answer = None, traceback.format_exc()
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


def _send_task(connection: Connection, waiting: Iterator[T], running: dict[Connection, T]) -> None:
    for task in waiting:
        running[connection] = task
        # to a dead process nothing can be sent; reading from it will say so
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(task)
        return


def _receive_result(connection: Connection, process: BaseProcess, task: str) -> Any:
    try:
        result, failure = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        got = f"a process that died ({cause}) in {task}"
        fix = "start again to go on; where memory is short, with fewer --workers"
        refuse("stopped", "workers", got, "its tokens", fix)
    if failure:
        raise RuntimeError(f"a worker failed in {task}\n{failure}")
    return result


def _stop_workers(workers: dict[Connection, Any], idle: bool) -> None:
    for connection in workers:
        connection.close()
    for process in workers.values():
        if not idle:
            process.terminate()
        process.join()


@contextmanager
def _limit_threads() -> Iterator[None]:
    """Keep tokenizers to this thread: one process is one process."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_PARALLEL, None)
        else:
            os.environ[_PARALLEL] = before


CHUNK_BYTES = 1 << 22
MANIFEST = "manifest.json"

_CANNOT = "cannot preprocess"


def preprocess(
    settings: PreprocessSettings,
    report: Callable[[Progress], None] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Summary:
    """Make tokens on disk of text: documents in the order of the files, whatever the workers.

    Workers make chunks of the text into parts in the folder OUT.parts, each of them whole or
    absent. When all are there, OUT is made of them, and the folder is removed. So this can be
    killed at any point and called again: what is finished is not made again, and the files are the
    same, byte for byte. That needs room for the tokens twice. In the end OUT.json records what was
    made of what; with it, another call finds nothing to do.

    Args:
        settings: what and how.
        report: called whenever a part is finished, and once before.
        chunk_bytes: of the text, in a chunk; the result does not depend on it.

    Raises:
        ValueError: what was asked for is not possible, text cannot be read (the first 20 places,
            each with file and line or row), OUT exists, or its parts are of other settings.
    """
    if settings.workers < 0:
        refuse(_CANNOT, "workers", settings.workers, "at least 0")
    local_path(settings.out, "out")
    rules = settings.rules
    tokenizer = open_tokenizer(settings.tokenizer, pattern=settings.pattern, rules=rules)
    resolved, end = _resolve_settings(settings, tokenizer)
    files = find_files(settings.inputs)
    chunks = cut(files, settings.key, chunk_bytes)
    stats = {file: _size_and_time(file) for file in files}
    tasks = [Task(chunk, settings.parts / _name_part(chunk, stats)) for chunk in chunks]
    manifest = _describe_result(resolved, end, rules.begin_document(tokenizer), tasks)
    size = sum(length for length, _ in stats.values())
    summary = functools.partial(Summary, settings, len(files), size, dtype=resolved.dtype)
    complete = _find_complete(settings, manifest, tokenizer)
    if complete is not None:
        shutil.rmtree(settings.parts, ignore_errors=True)  # ended while it went
        counts, own = complete
        return summary(
            **asdict(counts), rules=_describe_rules(own, tokenizer, end, counts), progress=None
        )
    with _lock_parts(settings):
        _check_parts(settings, manifest)
        # tokenizers are large to send, and some cannot be
        here = tokenizer if settings.num_workers == 1 else None
        start = functools.partial(Encoder, resolved, end, here)
        progress, counts = _make_parts(settings, start, tasks, report)
        changed = [str(file) for file in files if _size_and_time(file) != stats[file]]
        got, fix = "text that changed while it was read", "start again"
        raise_problems(_CANNOT, [Problem(name, got, "the same", fix) for name in changed])
        if not counts.documents:
            got = f"no documents with tokens in {len(files)} files"
            refuse(_CANNOT, str(settings.inputs), got, "at least one")
        assemble(settings, resolved.dtype, [task.part for task in tasks], counts)
        record = settings.parts / "record.json"
        content = with_checksums({**manifest, **asdict(counts)}, settings.targets)
        replace_text(record, json.dumps(content, indent=1) + "\n")
        record.replace(settings.record)
        shutil.rmtree(settings.parts, ignore_errors=True)
    said = _describe_rules(rules, tokenizer, end, counts)
    return summary(**asdict(counts), rules=said, progress=progress)


def _describe_rules(
    rules: TextRules, tokenizer: TextTokenizer, end: int | None, counts: Counts
) -> str:
    """The rules by which text became tokens, in words."""
    old = rules.version == 1
    names = "made before its rules were recorded" if old else rules.describe_names(counts.names)
    return f"{rules.describe(tokenizer, end)}; {names}"


def _resolve_settings(
    settings: PreprocessSettings, tokenizer: TextTokenizer
) -> tuple[PreprocessSettings, int | None]:
    """The settings with the path and the dtype that are meant, and the id that ends documents."""
    if settings.end_of_text and not settings.append_eod:
        refuse(_CANNOT, "end_of_text", repr(settings.end_of_text), "none, with --no-append-eod")
    end = end_of_text(tokenizer, settings.end_of_text) if settings.append_eod else None
    auto = settings.dtype == "auto"
    dtype = fitting_dtype(tokenizer.vocab_size) if auto else np.dtype(settings.dtype)
    check_dtype("dtype", dtype, tokenizer.vocab_size)
    # folders may be named relative to this process's, which workers need not share
    path = settings.tokenizer if tokenizer.file is None else str(tokenizer.file.absolute())
    return replace(settings, tokenizer=path, dtype=cast(StoredDtype, dtype.name)), end


def _describe_result(
    settings: PreprocessSettings, end: int | None, begin: Sequence[int], tasks: Sequence[Task]
) -> dict[str, Any]:
    """All that decides the bytes of the result; two runs that agree in it make the same."""
    file = Path(settings.tokenizer)
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else str(file)
    names = json.dumps([task.part.name for task in tasks]).encode()
    return {
        "inputs": list(settings.inputs),
        "text": hashlib.sha256(names).hexdigest(),
        "tokenizer": settings.tokenizer,
        "tokenizer_sha256": digest,
        "pattern": settings.pattern,
        "end_of_text": end,
        "text_rules": settings.rules.version,
        "begin_of_text": list(begin),
        "prepend_bos": settings.prepend_bos,
        "special_tokens": settings.special_tokens,
        "dtype": settings.dtype,
        "key": settings.key,
        "empty_documents": settings.empty,
        "format": settings.format,
    }


def _find_differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Where two manifests differ in what their parts have in them."""
    ignored = {"inputs", "tokenizer", "text", "format"}
    return [key for key in wanted if key not in ignored and found.get(key) != wanted[key]]


def _find_complete(
    settings: PreprocessSettings, manifest: Mapping[str, Any], tokenizer: TextTokenizer
) -> tuple[Counts, TextRules] | None:
    """The counts and the rules of an earlier, complete result of the same; None: there is none.

    A result from before rules were recorded counts as complete, too, with the rules of that time,
    if the default rules are asked for, or others that give the same tokens for any text.

    Raises:
        ValueError: something else is where the result should go.
    """
    existing = [path for path in settings.targets if path.exists()]
    found = read_object(settings.record) or {}
    fields = ("documents", "tokens", "empty")
    old = bool(found) and found.keys().isdisjoint(RULE_KEYS)
    differ = [key for key in _find_differences(found, manifest) if not (old and key in RULE_KEYS)]
    differ += [key for key in ("text", "format") if found.get(key) != manifest[key]]
    if old and settings.rules != RULES:
        differ += _differences_from_old(settings, tokenizer)
    if len(existing) == 2 and not differ and all(field in found for field in fields):
        counts = Counts(**{name: found.get(name, 0) for name in (*fields, "names")})
        return counts, OLD_RULES if old else settings.rules
    if not existing or settings.parts.exists():
        return None  # what the parts are of decides
    when = " before rules were recorded," if old and differ else ""
    differ = differ if found else []
    got = (
        f"an existing file, made{when} with another {', '.join(differ)}"
        if differ
        else "an existing file"
    )
    problems = [Problem(str(path), got, "a new one", "choose another --out") for path in existing]
    raise_problems(_CANNOT, problems)
    return None


def _differences_from_old(settings: PreprocessSettings, tokenizer: TextTokenizer) -> Iterator[str]:
    """The settings of rules by which tokens may be others than before rules were recorded."""
    if settings.rules.begin_document(tokenizer):
        yield "prepend_bos"
    before = open_tokenizer(settings.tokenizer, pattern=settings.pattern, rules=OLD_RULES)
    names = [text for name in tokenizer.names.ids for text in (name, f"a{name}b", f"a {name} b")]
    if before.encode_batch(names) != tokenizer.encode_batch(names):
        yield "special_tokens"


def _check_parts(settings: PreprocessSettings, manifest: Mapping[str, Any]) -> None:
    """Check that the parts that are there are of these settings; write down of which they are."""
    file = settings.parts / MANIFEST
    found = read_object(file)
    if found is None:
        replace_text(file, json.dumps(dict(manifest)))
        return
    problems = [
        Problem(f"{settings.parts}: {key}", repr(found.get(key)), repr(manifest[key]))
        for key in _find_differences(found, manifest)
    ]
    title = (
        "unfinished parts of other settings are there: remove the folder, or choose another --out"
    )
    raise_problems(title, problems)


def _lock_parts(settings: PreprocessSettings) -> AbstractContextManager[Any]:
    """Keeps two processes from making the same files; the lock of a process that died is free."""
    try:
        settings.parts.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(settings.parts / "lock").acquire(timeout=0)
    except filelock.Timeout:
        got = "another process at work there"
        refuse(_CANNOT, str(settings.parts), got, "none", "wait, or choose another --out")
    except OSError as error:
        got = error.strerror or str(error)
        refuse(_CANNOT, str(error.filename or settings.parts), got, "a new folder")


def _make_parts(
    settings: PreprocessSettings,
    start: Callable[[], Encoder],
    tasks: Sequence[Task],
    report: Callable[[Progress], None] | None,
) -> tuple[Progress, Counts]:
    begun = time.perf_counter()
    distinct = {task.part: task for task in tasks}
    made = {part: counts for part in distinct if (counts := read_counts(part)) is not None}
    missing = [task for part, task in distinct.items() if part not in made]
    total = sum(task.chunk.size for task in distinct.values())
    done = total - sum(task.chunk.size for task in missing)
    earlier = tokens = sum(counts.tokens for counts in made.values())
    progress = Progress(done, total, tokens, earlier, 0.0)
    if report is not None:
        report(progress)
    results = run_tasks(settings.num_workers, start, missing, _describe_task)
    problems: dict[Path, list[Problem]] = {}
    for task, result in _take_results(results, problems):
        made[task.part] = result
        done, tokens = done + task.chunk.size, tokens + result.tokens
        progress = Progress(done, total, tokens, earlier, time.perf_counter() - begun)
        if report is not None:
            report(progress)
    listed = [problem for task in tasks for problem in problems.get(task.part, [])]
    more = f": the first {MAX_LISTED} places" if len(listed) >= MAX_LISTED else ""
    raise_problems("cannot read all of the text" + more, listed[:MAX_LISTED])
    rows = [astuple(counts) for counts in (Counts(0, 0, 0), *(made[task.part] for task in tasks))]
    return progress, Counts(*map(sum, zip(*rows, strict=True)))


def _take_results(
    results: Generator[tuple[Task, Counts | list[Problem]]], problems: dict[Path, list[Problem]]
) -> Iterator[tuple[Task, Counts]]:
    """The parts that could be made; of those that could not, the first 20 problems."""
    with closing(results):
        for task, result in results:
            if isinstance(result, Counts):
                yield task, result
                continue
            problems[task.part] = result
            if sum(map(len, problems.values())) >= MAX_LISTED:
                return


def _size_and_time(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _name_part(chunk: TextChunk, stats: Mapping[Path, tuple[int, int]]) -> str:
    """A part's name follows from the text in it, so that changed files are read again."""
    files = [[str(file.absolute()), *stats[file]] for file in chunk.files]
    text = json.dumps([files, chunk.start, chunk.stop])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
