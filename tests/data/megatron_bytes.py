"""Megatron-LM's files, spelt out with struct alone: the oracle of indexed files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

CODES = {
    "uint8": (1, "B"), "int8": (2, "b"), "int16": (3, "h"), "int32": (4, "i"),
    "int64": (5, "q"), "float64": (6, "d"), "float32": (7, "f"), "uint16": (8, "H"),
}  # fmt: skip


def expected(
    documents: Sequence[Sequence[Sequence[int]]], dtype: str, modes: Sequence[int] | None = None
) -> tuple[bytes, bytes]:
    """The bytes of .bin and .idx of documents, each a list of sequences of ids."""
    code, letter = CODES[dtype]
    size = struct.calcsize(letter)
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(struct.pack("<" + letter, token) for s in sequences for token in s)
    index = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    for sequence in sequences:
        index += struct.pack("<i", len(sequence))
    pointer = 0
    for sequence in sequences:
        index += struct.pack("<q", pointer)
        pointer += size * len(sequence)
    first = 0
    index += struct.pack("<q", 0)
    for document in documents:
        first += len(document)
        index += struct.pack("<q", first)
    for mode in modes or ():
        index += struct.pack("<b", mode)
    return data, index


def write(prefix: Path, data: bytes, index: bytes) -> Path:
    """Both files of a prefix, which is returned."""
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix
