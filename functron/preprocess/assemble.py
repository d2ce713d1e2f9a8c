"""The files that preprocessing makes, of its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from functron.data.indexed import IndexedFile
from functron.data.indexed_writer import IndexedWriter
from functron.preprocess.encode import Counts
from functron.preprocess.settings import Settings

BLOCK = 1 << 20


def assemble(settings: Settings, dtype: str, parts: Sequence[Path], counts: Counts) -> None:
    """Make the targets of `settings` of parts, one after another; nothing grows in memory.

    They are written in the folder of parts, so that nothing is left elsewhere of what is killed.
    """
    whole = replace(settings, out=str(settings.parts / "whole"))
    if settings.format == "indexed":
        with IndexedWriter(whole.out, np.dtype(dtype), overwrite=True) as writer:
            for part in parts:
                writer.append(IndexedFile(part))
    else:
        documents, tokens = whole.targets
        with tokens.open("wb") as token_stream, documents.open("wb") as document_stream:
            _header(token_stream, np.dtype(dtype), counts.tokens)
            _header(document_stream, np.dtype(np.int64), counts.documents + 1)
            _copy(parts, token_stream, document_stream)
            for stream in (token_stream, document_stream):
                stream.flush()
                os.fsync(stream.fileno())
    settings.targets[1].unlink(missing_ok=True)
    for made, target in zip(whole.targets, settings.targets, strict=True):
        made.replace(target)


def _header(stream: IO[bytes], dtype: np.dtype, count: int) -> None:
    description = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, description)


def _copy(parts: Sequence[Path], tokens: IO[bytes], documents: IO[bytes]) -> None:
    written = 0
    documents.write(np.zeros(1, "<i8").tobytes())
    for part in parts:
        file = IndexedFile(part)
        for begin in range(0, file.num_tokens, BLOCK):
            tokens.write(file.read(begin, min(BLOCK, file.num_tokens - begin)).tobytes())
        ends = file.starts(np.arange(1, file.num_documents + 1)) + written
        documents.write(ends.astype("<i8").tobytes())
        written += file.num_tokens
