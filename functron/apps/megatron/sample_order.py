"""Samples in Megatron-LM's order: its shuffles, blends and splits, to continue its runs.

Elsewhere in `functron.data` the order of samples is arithmetic. Megatron-LM shuffles tables for the
number of samples of the whole run, with numpy's MT19937 (`numpy.random.RandomState`):

1. The sequences of the corpus are repeated for the required number of epochs, and shuffled. The
   last epoch is shuffled separately if less than 0.8 of it is needed.
2. Their concatenated tokens are cut into samples, which may span epochs.
3. The samples are shuffled, those of the last epoch separately if its sequences were.

So the order depends on the seed, on ``num_samples`` and on ``seq``: another number of samples may
change it from the first sample on. The sources of a blend are shuffled with the same seed. Sample n
of the blend comes from the source with the largest deficit ``w_i max(n, 1) - count_i``, in float64,
the first of equal ones.

| table              | bytes                                                                   |
|--------------------|-------------------------------------------------------------------------|
| shuffled samples   | 4 per sample (8 where there are 2^32)                                   |
| shuffled sequences | 4 per sequence and epoch, and 1/8 for where every 64th one begins       |
| sources of a blend | 2 per sample, and 8 per source for 4,096 samples                        |

Megatron-LM has 12 per sample, 4 per sequence and epoch, and 10 per sample of a blend: here there
is no table of places of samples, which are found by adding the lengths of at most 64 sequences.
Each process makes its tables, in about 50 ns per entry; with a `cache` folder they are files, which
all processes of a machine map and share.

The samples of a step are the same, but ranks have contiguous rows; those of Megatron-LM's sampler
are interleaved by microbatch. Padding tokens, which it replaces by 0 without a loss, are kept.

Source: ``megatron/core/datasets`` of Megatron-Core 0.16.1: ``gpt_dataset.py``,
``blended_dataset.py``, ``blended_megatron_dataset_builder.py`` and ``helpers.cpp``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from functron.core.errors import Problem, raise_problems, refuse
from functron.data.blend import PARTS, Blend
from functron.data.indexed import IndexedFile
from functron.data.mapped_files import check_ids
from functron.data.sampling import IGNORED, SampleOrder, Samples
from functron.data.token_datasets import mark_documents

SURPLUS = 0.005
"""The fraction of additional samples of a blend's sources: mid_level_dataset_surplus."""

_APART = 0.8
_TOGETHER = 64
_SCANNED = 1 << 20
_BLOCK = 1 << 12
_SEEDS = 1 << 32
_CANNOT = "cannot order samples as Megatron-LM does"


class MegatronWindows(Samples):
    """A file's samples as GPTDataset draws them, token for token.

    Args:
        file: of tokens, whose sequences are shuffled, one per document unless sentences are split.
        seq: tokens per sample, at least 2.
        num_samples: the least number of the run, which determines the order; None: one epoch, which
            is repeated in the same order (validation with ``--full-validation``).
        seed: of the shuffles, 0 to 2^32 - 1 (``--seed``).
        sequences: to use (see `divide_sequences`); None: all.
        vocab_size: of the model; None: any.
        extra_token: as of `TokenWindows`; False is ``add_extra_token_to_sequence=False``, whose
            last label has no loss.
        drop_last: drop incomplete last samples. False: they are padded with zeros, without targets
            (``drop_last_partial_validation_sequence=False``).
        mask_documents: as of `TokenWindows`: ``--reset-position-ids --reset-attention-mask
            --eod-mask-loss`` if every document ends with the end-of-document token.
        cache: a folder for tables; None: they are in memory.

    Attributes:
        seq, mask_documents: as given.
        num_samples: samples per epoch.
        num_ordered: samples in all.
        num_epochs: epochs in all.
        num_tokens: per epoch.
        vocab_size: of the model; 0: unknown.

    Raises:
        ValueError: a size or seed is out of range, or there are too few tokens for a sample.
    """

    def __init__(
        self,
        file: IndexedFile,
        seq: int,
        num_samples: int | None = None,
        *,
        seed: int = 0,
        sequences: range | None = None,
        vocab_size: int | None = None,
        extra_token: bool = True,
        drop_last: bool = True,
        mask_documents: bool = False,
        cache: Path | None = None,
    ):
        self._file, self.seq, self.seed, self._wanted = file, seq, seed, num_samples
        self._sequences = range(file.num_sequences) if sequences is None else sequences
        self._extra, self._drop_last, self._most = int(extra_token), drop_last, vocab_size
        self.mask_documents, self._cache, self.vocab_size = mask_documents, cache, vocab_size or 0
        self.num_tokens = 0
        raise_problems(_CANNOT, [*self._find_problems(), *self._count_tokens()])
        needed = self._extra + (num_samples or 0) * seq
        self.num_epochs = max(-(-needed // self.num_tokens), 1)
        per_epoch = self._count(1)
        self.num_ordered = self._count(self.num_epochs)
        self.num_samples = self.num_ordered if num_samples is None else per_epoch
        if not self.num_ordered:
            got = f"{self.num_tokens} tokens"
            wanted, fix = f"at least {seq + self._extra}", "use a smaller seq, or more text"
            refuse("cannot cut the text into samples", f"data {file.path}", got, wanted, fix)

    def _find_problems(self) -> Iterator[Problem]:
        if self.seq < 2:
            yield Problem("seq", str(self.seq), "at least 2, as Megatron-LM wants")
        if not 0 <= self.seed < _SEEDS:
            yield Problem("seed", str(self.seed), f"0 to {_SEEDS - 1}, as numpy's RandomState has")
        if self._wanted is not None and self._wanted < 1:
            yield Problem("num_samples", str(self._wanted), "at least 1")

    def _count_tokens(self) -> Iterator[Problem]:
        """Count the tokens of an epoch; yields problems of lengths."""
        where, again = f"data {self._file.path}", "copy or write it again"
        for begin in range(self._sequences.start, self._sequences.stop, _SCANNED):
            some = np.arange(begin, min(begin + _SCANNED, self._sequences.stop))
            _, lengths = self._file.spans(some)
            self.num_tokens += int(lengths.sum())
            if lengths.min() < 0:
                got = f"length {lengths.min()} of sequence {some[lengths.argmin()]}"
                yield Problem(where, got, "at least 0", again)
                return
        if not self.num_tokens:
            yield Problem(where, f"no tokens in {len(self._sequences)} sequences", "at least one")

    def _count(self, epochs: int) -> int:
        """The number of samples of some epochs."""
        tokens = max(epochs * self.num_tokens - self._extra, 0)
        if self._drop_last:
            return tokens // self.seq
        return math.ceil(np.float32(tokens) / np.float32(self.seq))  # as Megatron-LM counts them

    @functools.cached_property
    def _num_first(self) -> int:
        """The number of samples shuffled together: all, or those before a separate last epoch."""
        if self._wanted is None or self.num_epochs == 1:
            return self.num_ordered
        tokens = (self.num_epochs - 1) * self.num_tokens
        before = (tokens - self._extra) // self.seq
        per_epoch = (self.num_tokens - self._extra) // self.seq
        apart = self._wanted - before < int(_APART * per_epoch)
        return before if apart else self.num_ordered

    @functools.cached_property
    def _tables(self) -> Mapping[str, np.ndarray]:
        """``sequences`` and ``samples`` in order, and where every 64th sequence ``begins``."""
        idx = self._file.idx_path.stat()
        about = {"file": str(self._file.idx_path.resolve()), "bytes": idx.st_size}
        about |= {"modified": idx.st_mtime_ns, "tokens": self.num_tokens, "seed": self.seed}
        about |= {"sequences": [self._sequences.start, self._sequences.stop], "seq": self.seq}
        about |= {"epochs": self.num_epochs, "first": self._num_first, "all": self.num_ordered}
        total = self.num_epochs * len(self._sequences)
        kinds = {"sequences": ("int32", (total,)), "samples": _describe_samples(self.num_ordered)}
        kinds["begins"] = ("int64", (-(-total // _TOGETHER) + 1,))
        return _load_or_make(self._cache, about, kinds, self._shuffle)

    def _shuffle(self) -> dict[str, np.ndarray]:
        numbers = np.random.RandomState(self.seed)
        apart = self._num_first < self.num_ordered
        epochs = [self.num_epochs - 1, 1] if apart else [self.num_epochs]
        once = np.arange(self._sequences.start, self._sequences.stop, dtype=np.int32)
        sequences = [np.tile(once, count) for count in epochs]
        bounds = sorted({0, self._num_first, self.num_ordered})
        kind, _ = _describe_samples(self.num_ordered)
        samples = [np.arange(*pair, dtype=kind) for pair in itertools.pairwise(bounds)]
        for each in (*sequences, *samples):
            numbers.shuffle(each)
        order = np.concatenate(sequences)
        sums = [np.zeros(1, np.int64)]
        for begin in range(0, len(order), _SCANNED):
            _, lengths = self._file.spans(order[begin : begin + _SCANNED])
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), _TOGETHER)))
        begins = np.cumsum(np.concatenate(sums))
        return {"sequences": order, "samples": np.concatenate(samples), "begins": begins}

    def build(self) -> None:
        """Make the tables, or map them from the cache, before the first batch."""
        assert self._tables

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples `numbers` of the order, as `functron.data.TokenWindows.draw`.

        Raises:
            ValueError: the order has fewer samples, or an id is not in the vocabulary.
        """
        numbers = np.asarray(numbers, np.int64)
        if self._wanted is None:
            numbers = numbers % self.num_ordered
        _check_end(numbers, self.num_ordered)
        names = ("tokens", "targets", *(("positions", "segments") if self.mask_documents else ()))
        leaves = {name: np.zeros((len(numbers), self.seq), np.int64) for name in names}
        leaves["targets"].fill(IGNORED)
        for row, sample in enumerate(self._tables["samples"][numbers].tolist()):
            text, begins = self.sample(sample)
            leaves["tokens"][row, : len(text)] = text[: self.seq]
            leaves["targets"][row, : len(text) - 1] = text[1:]
            if self.mask_documents:
                mark_documents(leaves, row, begins)
        return {name: torch.from_numpy(leaf) for name, leaf in leaves.items()}

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of sample `index` of the shuffled sequences, and where documents begin.

        Returns:
            int64 ``[seq]``, one more with the extra token, fewer in an incomplete last sample; and
            int64, increasing from 0, the beginnings of documents.
        """
        total = self.num_epochs * self.num_tokens
        start = min(index * self.seq, total - self._extra)
        stop = min(start + self.seq + self._extra, total)
        pieces, begins, length = [], [np.zeros(1, np.int64)], 0
        for sequences, first, final in self._find_spans(start, stop):
            places, _ = self._file.spans(sequences)
            spans = zip((places + first).tolist(), (final - first).tolist(), strict=True)
            for place, count in spans:
                piece = self._file.read(place, count)
                check_ids(self._file.path, piece, place, self._most)
                pieces.append(piece)
            ends = length + np.cumsum(final - first)
            length = int(ends[-1]) if len(ends) else length
            if self.mask_documents:
                begins.append(ends[self._file.end_documents(sequences)])
        found = np.concatenate(begins)
        # the last document may end with the sample
        return np.concatenate(pieces).astype(np.int64), found[found < length]

    def _find_spans(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, ...]]:
        """The sequences with tokens `start` to `stop`, and their first and last such tokens."""
        begins, order = self._tables["begins"], self._tables["sequences"]
        block = int(np.searchsorted(begins, start, side="right")) - 1
        while begins[block] < stop:
            sequences = np.asarray(order[block * _TOGETHER : (block + 1) * _TOGETHER])
            _, lengths = self._file.spans(sequences)
            ends = begins[block] + np.cumsum(lengths)
            first = np.maximum(start - (ends - lengths), 0)
            final = lengths - np.maximum(ends - stop, 0)
            taken = final > first
            yield sequences[taken], first[taken], final[taken]
            block += 1

    def summary(self) -> str:
        """A description for the user."""
        what = f"{self.num_tokens:,} tokens in {len(self._sequences):,} sequences, on disk"
        return f"{what}, in Megatron-LM's order of {self.num_ordered:,} samples"


def _describe_samples(count: int) -> tuple[str, tuple[int]]:
    return ("uint32" if count < 2**32 - 1 else "int64"), (count,)


def _check_end(numbers: np.ndarray, count: int) -> None:
    if numbers.size and int(numbers.max()) >= count:
        fix = "take fewer steps; more samples would change the order from the first one on"
        refuse("the order has no more samples", "sample", numbers.max(), f"below {count}", fix)


class MegatronMixture:
    """The source of each sample of a blend, as in BlendedDataset; see the module.

    The rule is sequential. Here chunks of samples are computed in parallel from guessed counts, and
    again where the chunk before ends with other counts. Few are: from counts near their shares the
    rule soon arrives at the same ones. The result is bitwise the sequential one.

    Args:
        size: samples of the blend; None: of each source its weight, an integer
            (``build_exhaustive_blending_indices``).
        limits: samples of each source.
        cache: as of `MegatronWindows`.

    Attributes:
        weights: float64 ``[k]``, of sum 1.
        size: samples of the blend.

    Raises:
        ValueError: weights are not finite or not above 0.
    """

    def __init__(
        self,
        weights: Sequence[float],
        size: int | None,
        limits: Sequence[int],
        *,
        cache: Path | None = None,
    ):
        found = np.array(weights, np.float64)
        self.weights = np.array(_normalise_weights(weights))
        self._spent = None if size is not None else found
        self.size = int(found.sum()) if size is None else size
        self._limits, self._cache = np.array(limits), cache

    @functools.cached_property
    def _tables(self) -> Mapping[str, np.ndarray]:
        """``sources`` of all samples, and ``counts`` by source before every block of samples."""
        about = {
            "weights": self.weights.tolist(),
            "size": self.size,
            "all": self._spent is not None,
        }
        shape = (-(-self.size // _BLOCK) + 1, len(self.weights))
        kinds = {"sources": ("int16", (self.size,)), "counts": ("int64", shape)}
        found = _load_or_make(self._cache, about, kinds, self._make_tables)
        totals = found["counts"][-1]
        raise_problems("the blend takes more of its sources than Megatron-LM gives them", [
            Problem(f"source {i}", f"{totals[i]} samples of it", f"at most {self._limits[i]}",
                    "raise blend_surplus (mid_level_dataset_surplus), as Megatron-LM would ask")
            for i in np.flatnonzero(totals > self._limits)
        ])  # fmt: skip
        return found

    def _make_tables(self) -> dict[str, np.ndarray]:
        sources = _choose_by_deficit(self.weights, self.size, self._spent)
        blocks = range(0, self.size, _BLOCK)
        rows = [np.bincount(sources[i : i + _BLOCK], minlength=len(self.weights)) for i in blocks]
        counts = np.cumsum([np.zeros(len(self.weights), np.int64), *rows], axis=0)
        return {"sources": sources, "counts": counts}

    def build(self) -> None:
        """As `MegatronWindows.build`.

        Raises:
            ValueError: a source has too few samples.
        """
        assert self._tables

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `functron.data.Mixture.at`.

        Raises:
            ValueError: the blend has fewer samples.
        """
        numbers = np.asarray(numbers, np.int64)
        _check_end(numbers, self.size)
        sources, own = np.empty_like(numbers), np.empty_like(numbers)
        blocks, within = np.divmod(numbers, _BLOCK)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            order = self._tables["sources"][block * _BLOCK : (block + 1) * _BLOCK]
            totals = np.bincount(order, minlength=len(self.weights))
            rank, by = np.empty(len(order), np.int64), np.argsort(order, kind="stable")
            rank[by] = np.arange(len(order)) - (np.cumsum(totals) - totals)[order[by]]
            sources[chosen] = order[within[chosen]]
            own[chosen] = self._tables["counts"][block][sources[chosen]] + rank[within[chosen]]
        return sources, own

    def positions(self, samples: int) -> np.ndarray:
        """As `functron.data.Mixture.positions`."""
        block, within = divmod(samples, _BLOCK)
        order = self._tables["sources"][block * _BLOCK :][:within]
        counts = self._tables["counts"][min(block, len(self._tables["counts"]) - 1)]
        return counts + np.bincount(order, minlength=len(self.weights))


def _normalise_weights(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in float64.

    Raises:
        ValueError: they are not finite or not above 0.
    """
    found = np.array(weights, np.float64)
    raise_problems("cannot blend", [
        Problem(f"weights[{i}]", f"{x:g}", "a finite number above 0", "leave it out")
        for i, x in enumerate(found.tolist()) if not 0 < x < math.inf
    ])  # fmt: skip
    return (found / found.sum()).tolist()


_STRETCH = 1 << 11
_PASSES = 6


def _choose_by_deficit(
    weights: np.ndarray, size: int, limits: np.ndarray | None = None
) -> np.ndarray:
    """The source of each sample, int16 ``[size]``; sources at their limits drop out.

    As Megatron-LM on x86-64: products are rounded to float64 before subtraction, without fused
    multiply-add.
    """
    step = max(_STRETCH, math.isqrt(size))
    begins = np.arange(0, size, step)
    starts = _guess_counts(weights, begins, limits)
    order, ends = np.empty((len(begins), step), np.int16), np.empty_like(starts)
    some, passes = np.arange(len(begins)), 0
    while some.size:
        order[some], ends[some] = _choose_sources(weights, begins[some], starts[some], step, limits)
        some, passes = np.flatnonzero((starts[1:] != ends[:-1]).any(1)) + 1, passes + 1
        # if guesses stay wrong, go sequentially
        some = some if passes < _PASSES else some[:1]
        starts[some] = ends[some - 1]
    return order.reshape(-1)[:size]


def _guess_counts(weights: np.ndarray, totals: np.ndarray, limits: np.ndarray | None) -> np.ndarray:
    """Counts near the sources' shares: whole numbers as float64 ``[n, k]``."""
    shares = totals[:, None] * weights
    found = np.floor(shares)
    missing = totals - found.sum(1)
    rank = np.argsort(np.argsort(found - shares, axis=1, kind="stable"), axis=1)
    found += rank < missing[:, None]
    return found if limits is None else np.minimum(found, limits)


def _choose_sources(
    weights: np.ndarray,
    begins: np.ndarray,
    starts: np.ndarray,
    step: int,
    limits: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The sources of `step` samples from each of `begins` on, and the counts after them."""
    counts, rows = starts.copy(), np.arange(len(begins))
    order = np.empty((step, len(begins)), np.int16)
    for index in range(step):
        deficits = np.maximum(begins + index, 1).astype(np.float64)[:, None] * weights
        deficits -= counts
        if limits is not None:
            deficits[counts >= limits] = -np.inf
        chosen = deficits.argmax(1)
        order[index] = chosen
        counts[rows, chosen] += 1
    return order.T, counts


def divide_sequences(weights: str, num_sequences: int) -> dict[str, range]:
    """The sequences of the parts of ``--split``, rounded as in Megatron-LM, in float64.

    Args:
        weights: of `functron.data.blend.PARTS`, such as ``"969, 30, 1"``; their sum is arbitrary.

    Returns:
        The sequences of each of `PARTS` with a weight above 0, perhaps none.

    Raises:
        ValueError: the text is invalid.
    """
    words = [word.strip() for word in weights.split(",")]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    good = 0 < len(numbers) <= len(PARTS) and all(0 <= x < math.inf for x in numbers)
    if not good or not sum(numbers):
        wanted = "one to three numbers of at least 0, separated by commas, and not all 0"
        refuse("cannot split", "split", repr(weights), wanted, "write --split 969,30,1")
    shares = np.array(numbers + [0.0] * (len(PARTS) - len(numbers)))
    shares = (shares / shares.sum()).tolist()
    bounds = [round(x * float(num_sequences)) for x in itertools.accumulate(shares, initial=0)]
    pairs = zip(PARTS, shares, itertools.pairwise(bounds), strict=True)
    return {name: range(*pair) for name, share, pair in pairs if share}


def make_samples(
    files: Sequence[IndexedFile],
    seq: int,
    num_samples: int | None,
    *,
    weights: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    split: str = "",
    part: str = PARTS[0],
    surplus: float = SURPLUS,
    cache: Path | None = None,
    build: bool = True,
    **options: Any,
) -> Samples:
    """The samples that Megatron-LM's dataset builder makes of files.

    Without `split` as for ``--train-data-path``, where one file needs no weight; with it as for
    ``--data-path``, where one file with a weight is a blend.

    Args:
        seq: tokens per sample.
        num_samples: of the run (``--train-samples``, or iterations times batch); None: every sample
            once.
        weights: of the files; None: all samples of each, at most `num_samples` in all.
        names: of the files, for the user; None: their numbers.
        split: the weights of training, validation and test; see `divide_sequences`.
        surplus: ``mid_level_dataset_surplus``.
        cache: as of `MegatronWindows`.
        build: make the tables now, rather than with the first batch.
        options: of `MegatronWindows`: seed, vocab_size, extra_token, drop_last, mask_documents.

    Returns:
        A `MegatronWindows`, or a `Blend` of them with a `MegatronMixture`.

    Raises:
        ValueError: as these, or weights without a number of samples, or an empty part.
    """

    def windows(file: IndexedFile, count: int | None) -> MegatronWindows:
        count_all = file.num_sequences
        parts = {part: range(count_all)} if not split else divide_sequences(split, count_all)
        if not parts.get(part):
            got = f"{split or 'empty'}: none of {count_all} sequences of {file.path} for {part}"
            fix = "give it a larger weight in --split"
            refuse("cannot split", "split", got, "at least 1 sequence", fix)
        return MegatronWindows(file, seq, count, sequences=parts[part], cache=cache, **options)

    if len(files) == 1 and (weights is None or not split):
        only = windows(files[0], num_samples)
        if build:
            only.build()
        return only
    if weights is None:
        sources = [windows(file, None) for file in files]
        sizes = [source.num_ordered for source in sources]
        size = None if num_samples is None else min(num_samples, sum(sizes))
        mixture = MegatronMixture(sizes, size, sizes, cache=cache)
    elif num_samples is None:
        refuse(_CANNOT, "num_samples", "None with weights", "how many samples the blend has")
    else:
        normal = _normalise_weights(weights)
        taken = [math.ceil(num_samples * share) for share in normal]
        rows = zip(files, taken, strict=True)
        sources = [windows(file, math.ceil(count * (1 + surplus))) for file, count in rows]
        limits = [source.num_ordered for source in sources]
        mixture = MegatronMixture(normal, sum(taken), limits, cache=cache)
    for each in (*sources, mixture) if build else ():
        each.build()
    return Blend(sources, mixture, names)


def count_samples(samples: Samples) -> int:
    """The number of samples of an order of `make_samples`."""
    if isinstance(samples, MegatronWindows):
        return samples.num_ordered
    assert isinstance(samples, Blend)
    assert isinstance(samples.mixture, MegatronMixture)
    return samples.mixture.size


def make_order() -> SampleOrder:
    """This order, for the setting ``order = "megatron"``."""
    return SampleOrder(make_samples, count_samples, divide_sequences, _SEEDS)


def _load_or_make(
    folder: Path | None,
    about: Mapping[str, Any],
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    make: Callable[[], Mapping[str, np.ndarray]],
) -> Mapping[str, np.ndarray]:
    """Tables by name, from files of a folder, which are made if they are missing.

    Several processes may do so: files are renamed once complete, and all write the same.

    Args:
        folder: None: tables are in memory.
        about: everything that they depend on.

    Raises:
        ValueError: the folder cannot be written to.
    """
    if folder is None:
        return make()
    mark = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    files = {name: folder / f"{mark}.{name}.npy" for name in kinds}
    found = {name: _map_table(files[name], *kind) for name, kind in kinds.items()}
    if all(table is not None for table in found.values()):
        return found  # type: ignore[return-value]  (none is None)
    made = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in made.items():
            partial = folder / f".{mark}.{name}.{uuid.uuid4().hex[:8]}"
            try:
                with partial.open("wb") as stream:
                    np.save(stream, table)
                    stream.flush()
                    os.fsync(stream.fileno())
                partial.replace(files[name])
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        got = error.strerror or str(error)
        refuse("cannot keep the order of samples", f"order_cache {folder}", got, "a place to write")
    return {name: np.load(file, mmap_mode="r") for name, file in files.items()}


def _map_table(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The table in a file; None: it is missing or incomplete."""
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if found.dtype == dtype and found.shape == shape else None
