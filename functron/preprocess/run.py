"""The whole of preprocessing: parts that are still to be made, then the files made of them."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from functron.data.sources import Chunk, cut, find_files
from functron.data.text_tokenizer import TextTokenizer, end_of_text, open_tokenizer
from functron.data.token_file import check_dtype, fitting_dtype
from functron.errors import Problem, raise_problems
from functron.preprocess import assemble, workers
from functron.preprocess.encode import Counts, Encoder, Plan, Task, read_mark, write_json
from functron.preprocess.settings import Progress, Settings, Summary

CHUNK_BYTES = 1 << 22
MAX_LISTED = 20
MANIFEST = "manifest.json"
_CANNOT = "cannot preprocess"


def preprocess(
    settings: Settings,
    report: Callable[[Progress], None] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Summary:
    """Make tokens on disk of text: documents in the order of the files, whatever the workers.

    The text is cut into chunks, of which workers make parts in the folder OUT.parts, each finished
    or not there. When all are, OUT is made of them and gets its name, and the folder goes. So this
    can be killed at any point and called again: what is finished is not made again, and the files
    are the same, byte for byte. That needs room for the tokens twice.

    OUT.json says in the end what was made of what; with it, another call finds nothing to do.

    Args:
        settings: what and how.
        report: called whenever a part is finished, and once before.
        chunk_bytes: of the text, in a chunk; the result does not depend on it.

    Raises:
        ValueError: what was asked for is not possible, text cannot be read (the first 20 places,
            each with file and line or row), OUT exists, or its parts are of other settings.
    """
    tokenizer = _open(settings)
    plan = _plan(settings, tokenizer)
    files = find_files(settings.inputs)
    chunks = cut(files, settings.key, chunk_bytes)
    stats = {file: _stat(file) for file in files}
    tasks = [Task(chunk, settings.parts / _name(chunk, stats)) for chunk in chunks]
    manifest = _manifest(settings, plan, tasks)
    size = sum(length for length, _ in stats.values())
    summary = functools.partial(Summary, settings, len(files), size, dtype=plan.dtype)
    complete = _complete(settings, manifest)
    if complete is not None:
        shutil.rmtree(settings.parts, ignore_errors=True)  # ended while it went
        return summary(**asdict(complete), progress=None)
    with _lock(settings):
        _check_parts(settings, manifest)
        # tokenizers are large to send, and some cannot be
        here = tokenizer if settings.num_workers == 1 else None
        progress = _make_parts(settings, functools.partial(Encoder, plan, here), tasks, report)
        changed = [str(file) for file in files if _stat(file) != stats[file]]
        got, fix = "text that changed while it was read", "start again"
        raise_problems(_CANNOT, [Problem(name, got, "the same", fix) for name in changed])
        counts = _total(_marks(tasks))
        if not counts.documents:
            got = f"no documents with tokens in {len(files)} files"
            raise_problems(_CANNOT, [Problem(str(settings.inputs), got, "at least one")])
        assemble.assemble(settings, plan.dtype, [task.part for task in tasks], counts)
        record = settings.parts / "record.json"
        write_json(record, {**manifest, **asdict(counts)})
        record.replace(settings.record)
        shutil.rmtree(settings.parts, ignore_errors=True)
    return summary(**asdict(counts), progress=progress)


def _open(settings: Settings) -> TextTokenizer:
    if settings.workers < 0:
        raise_problems(_CANNOT, [Problem("workers", str(settings.workers), "at least 0")])
    return open_tokenizer(settings.tokenizer, pattern=settings.pattern)


def _plan(settings: Settings, tokenizer: TextTokenizer) -> Plan:
    if settings.end_of_text and not settings.append_eod:
        problem = Problem("end_of_text", repr(settings.end_of_text), "none, with --no-append-eod")
        raise_problems(_CANNOT, [problem])
    end = end_of_text(tokenizer, settings.end_of_text) if settings.append_eod else None
    auto = settings.dtype == "auto"
    dtype = fitting_dtype(tokenizer.vocab_size) if auto else np.dtype(settings.dtype)
    check_dtype("dtype", dtype, tokenizer.vocab_size)
    # folders may be named relative to this process's, which workers need not share
    path = settings.tokenizer if tokenizer.file is None else str(tokenizer.file.absolute())
    return Plan(path, settings.pattern, end, dtype.name, settings.key, settings.empty)


def _manifest(settings: Settings, plan: Plan, tasks: Sequence[Task]) -> dict[str, Any]:
    """What decides the bytes of the result; two runs that agree in it make the same."""
    file = Path(plan.tokenizer)
    tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else plan.tokenizer
    names = json.dumps([task.part.name for task in tasks]).encode()
    return {
        "inputs": list(settings.inputs),
        "text": hashlib.sha256(names).hexdigest(),
        "tokenizer": plan.tokenizer,
        "tokenizer_sha256": tokenizer,
        "pattern": plan.pattern,
        "end_of_text": plan.end,
        "dtype": plan.dtype,
        "key": plan.key,
        "empty_documents": plan.empty,
        "format": settings.format,
    }


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Where two manifests differ in what their parts have in them."""
    ignored = {"inputs", "tokenizer", "text", "format"}
    return [key for key in wanted if key not in ignored and found.get(key) != wanted[key]]


def _complete(settings: Settings, manifest: Mapping[str, Any]) -> Counts | None:
    """What was made earlier of the same; None: nothing is complete.

    Raises:
        ValueError: something else is where the result should go.
    """
    existing = [path for path in settings.targets if path.exists()]
    found = _load(settings.record) or {}
    fields = ("documents", "tokens", "empty")
    differ = _differences(found, manifest)
    differ += [key for key in ("text", "format") if found.get(key) != manifest[key]]
    if len(existing) == 2 and not differ and all(field in found for field in fields):
        return Counts(*(found[field] for field in fields))
    if not existing or settings.parts.exists():
        return None  # what the parts are of decides
    differ = differ if found else []
    got = (
        f"an existing file, made with another {', '.join(differ)}" if differ else "an existing file"
    )
    problems = [Problem(str(path), got, "a new one", "choose another --out") for path in existing]
    raise_problems(_CANNOT, problems)
    raise AssertionError("unreachable")


def _check_parts(settings: Settings, manifest: Mapping[str, Any]) -> None:
    """Check that the parts that are there are of these settings; write what they are of."""
    file = settings.parts / MANIFEST
    found = _load(file)
    if found is None:
        write_json(file, dict(manifest))
        return
    problems = [
        Problem(f"{settings.parts}: {key}", repr(found.get(key)), repr(manifest[key]))
        for key in _differences(found, manifest)
    ]
    title = (
        "unfinished parts of other settings are there: remove the folder, or choose another --out"
    )
    raise_problems(title, problems)


def _load(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _lock(settings: Settings) -> AbstractContextManager[Any]:
    """Keeps two processes from making the same files; the lock of a process that died is free."""
    try:
        settings.parts.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(settings.parts / "lock").acquire(timeout=0)
    except filelock.Timeout:
        got = "another process at work there"
        problem = Problem(str(settings.parts), got, "none", "wait, or choose another --out")
        raise_problems(_CANNOT, [problem])
        raise AssertionError("unreachable") from None
    except OSError as error:
        got = error.strerror or str(error)
        problem = Problem(str(error.filename or settings.parts), got, "a new folder")
        raise_problems(_CANNOT, [problem])
        raise AssertionError("unreachable") from error


def _make_parts(
    settings: Settings,
    start: Callable[[], Encoder],
    tasks: Sequence[Task],
    report: Callable[[Progress], None] | None,
) -> Progress:
    begun = time.perf_counter()
    marks = {task.part: (task, read_mark(task.part)) for task in tasks}
    missing = [task for task, mark in marks.values() if mark is None]
    total = sum(task.chunk.size for task, _ in marks.values())
    done = total - sum(task.chunk.size for task in missing)
    earlier = tokens = sum(mark.tokens for _, mark in marks.values() if mark is not None)
    progress = Progress(done, total, tokens, earlier, 0.0)
    if report is not None:
        report(progress)
    results = workers.run(settings.num_workers, start, missing, _title)
    problems: dict[Path, list[Problem]] = {}
    for task, result in _until_wrong(results, problems):
        done, tokens = done + task.chunk.size, tokens + result.tokens
        seconds = time.perf_counter() - begun
        progress = Progress(done, total, tokens, earlier, seconds)
        if report is not None:
            report(progress)
    listed = [problem for task in tasks for problem in problems.get(task.part, [])]
    more = f": the first {MAX_LISTED} places" if len(listed) >= MAX_LISTED else ""
    raise_problems("cannot read all of the text" + more, listed[:MAX_LISTED])
    return progress


def _until_wrong(
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


def _title(task: Task) -> str:
    """What to call a task."""
    chunk = task.chunk
    stop = "the end" if chunk.stop is None else chunk.stop
    first, *others = chunk.files
    more = f" and {len(others)} more files" if others else ""
    return f"{first}{more} from {chunk.start} to {stop}"


def _marks(tasks: Sequence[Task]) -> Iterator[Counts]:
    for task in tasks:
        found = read_mark(task.part)
        assert found is not None
        yield found


def _total(counts: Iterator[Counts]) -> Counts:
    documents = tokens = empty = 0
    for part in counts:
        documents, tokens = documents + part.documents, tokens + part.tokens
        empty += part.empty
    return Counts(documents, tokens, empty)


def _stat(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _name(chunk: Chunk, stats: Mapping[Path, tuple[int, int]]) -> str:
    """A part's name follows from the text in it, so that changed files are read again."""
    files = [[str(file.absolute()), *stats[file]] for file in chunk.files]
    said = json.dumps([files, chunk.start, chunk.stop])
    return hashlib.sha256(said.encode()).hexdigest()[:24]
