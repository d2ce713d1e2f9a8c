"""Starting to train takes as long for 10^9 documents as for some: nothing reads the corpus."""

from __future__ import annotations

import struct
import time
import tracemalloc

import numpy as np
import pytest
import torch

from functron.data import Blend, FillInTheMiddle, IndexedFile, MockTokens, TokenWindows, split
from functron.data.indexed import IndexLayout

DOCUMENTS, LENGTH, SEQ = 10**9, 1000, 64


def simulated(prefix) -> None:
    """An index of 20 GB and tokens of 2 TB, of which only the edges are there."""
    layout = IndexLayout(np.dtype(np.uint16), DOCUMENTS, DOCUMENTS)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(layout.header())
        last = DOCUMENTS - 1
        edges = (
            (layout.pointers - 4, "<i", LENGTH),
            (layout.documents - 8, "<q", 2 * LENGTH * last),
            (layout.modes - 8, "<q", DOCUMENTS),
        )
        for offset, kind, value in edges:
            stream.seek(offset)
            stream.write(struct.pack(kind, value))
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * LENGTH * DOCUMENTS)


def test_a_file_of_1e9_documents(tmp_path):
    try:
        simulated(tmp_path / "huge")
    except OSError as error:
        pytest.skip(f"no files of 2 TB with holes here: {error}")
    assert (tmp_path / "huge.idx").stat().st_size > 2 * 10**10
    tracemalloc.start()
    begun = time.perf_counter()
    file = IndexedFile(tmp_path / "huge")
    windows = TokenWindows(file, SEQ, seed=3, vocab_size=50)
    blend = Blend([windows, TokenWindows(file, SEQ)], [0.25, 0.75])
    batch = blend.batch(10**6, 8, (1, 2))
    seconds, (_, most) = time.perf_counter() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert windows.num_samples == (DOCUMENTS * LENGTH - 1) // SEQ
    assert batch["tokens"].shape == (4, SEQ)
    assert seconds < 10  # reading the index would take as long, if nobody else used the disk
    assert most < 2**23  # a blend's block has 2^16 entries; the index, 2 10^10 bytes


def test_every_feature_at_1e9_documents():
    tracemalloc.start()
    file = MockTokens(DOCUMENTS * LENGTH, 50, document=LENGTH)
    part = split(file, "969,30,1")["validation"]
    assert part.documents == range(969_000_000, 999_000_000)
    fill = FillInTheMiddle(50, 51, 52, 0.5)
    windows = TokenWindows(part, SEQ, mask_documents=True, middle=fill)
    blend = Blend([windows, windows], [1, 3])
    whole = blend.batch(10**9, 8)
    parts = [blend.batch(10**9, 8, (index, 4)) for index in range(4)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(torch.equal(torch.cat([x[name] for x in parts]), whole[name]) for name in whole)
    assert most < 2**23
