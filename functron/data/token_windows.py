"""Tokens on disk as samples: batches as a pure function of the step, read as they are needed."""

from __future__ import annotations

import numpy as np
import torch

from functron.data.middle import FillInTheMiddle
from functron.data.order import IGNORED, shuffled
from functron.data.token_file import TokenFile, check_ids, refuse_order
from functron.data.windows import Windows
from functron.errors import Problem, raise_problems


class TokenWindows(Windows):
    """A file of tokens, cut into windows of `seq` tokens and shuffled anew in every epoch.

    Nothing is read but the windows of each batch, whatever the size of the file, and no index of
    samples is made: the order is arithmetic (`functron.data.permute`). Documents follow one another
    as they lie in the file.

    Args:
        file: of `functron.data.open_tokens`.
        seq: tokens per sample.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: any.
        mask_documents: say where documents begin, so that attention sees a token's own alone:
            batches are packed ones (`functron.data.packing`), whose positions count from 0 in every
            document, or from where the window begins in it. The last token of a document predicts
            nothing.
        middle: rearranges documents to fill in their middles.
        extra_token: whether the last token of a sample has a target, which is read beyond it; see
            `Windows`.

    Attributes:
        mask_documents: as given.
        num_tokens: tokens in the whole file.
        num_documents: documents that it is made of.
        vocab_size: of the model, or 0: what ids there are is not known without reading all.

    Raises:
        ValueError: there are fewer tokens than one sample and its last target, or `middle` has ids
            that the model has not.
    """

    def __init__(
        self,
        file: TokenFile,
        seq: int,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
        mask_documents: bool = False,
        middle: FillInTheMiddle | None = None,
        extra_token: bool = True,
    ):
        self._file, self._most = file, vocab_size
        self.mask_documents, self._middle = mask_documents, middle
        if middle is not None and vocab_size is not None and max(middle.ids) >= vocab_size:
            got, wanted = f"id {max(middle.ids)}", f"ids from 0 to {vocab_size - 1}"
            raise_problems("tokens outside the vocabulary", [Problem("middle", got, wanted)])
        if middle is not None and not extra_token:
            problem = Problem("extra_token", "False with middle", "True", "leave one of them out")
            raise_problems("cannot fill in the middle", [problem])
        self.vocab_size = vocab_size or 0
        self.num_documents = file.num_documents
        what = f"data {file.path}"
        given = {"what": what, "unit": "tokens", "extra_token": extra_token}
        super().__init__(file.num_tokens, seq, seed, **given)

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, ``[length]``.

        Raises:
            ValueError: one of them is no id of the model.
        """
        tokens = self._file.read(start, length)
        check_ids(self._file.path, tokens, start, self._most)
        return tokens

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that come as `numbers`, counted from the beginning of a run.

        Args:
            numbers: int64 ``[rows]``, from 0.

        Returns:
            ``tokens`` and ``targets`` int64 ``[rows, seq]``, and with `mask_documents` so are
            ``positions`` and ``segments``, the numbers of documents in the sample.
        """
        if self._middle is None and not self.mask_documents:
            return super().draw(numbers)
        names = ("tokens", "targets", *(("positions", "segments") if self.mask_documents else ()))
        leaves = {name: np.empty((len(numbers), self.seq), np.int64) for name in names}
        order = shuffled(np.asarray(numbers, np.int64), self.num_windows, self.seed)
        rows = zip(numbers.tolist(), order.tolist(), self._begins(order), strict=True)
        for row, (number, index, begins) in enumerate(rows):
            sample = self.sample(index)
            if self._middle is not None:
                sample, begins = self._middle.rearranged(sample, begins, number)
            leaves["tokens"][row], leaves["targets"][row] = sample[:-1], sample[1:]
            if self.mask_documents:
                leaves["targets"][row, begins[1:] - 1] = IGNORED
                lengths = np.diff(begins, append=self.seq + 1)
                segments = np.repeat(np.arange(len(begins)), lengths)[: self.seq]
                leaves["segments"][row] = segments
                leaves["positions"][row] = np.arange(self.seq) - begins[segments]
        return {name: torch.from_numpy(leaf) for name, leaf in leaves.items()}

    def _begins(self, windows: np.ndarray) -> list[np.ndarray]:
        """Where documents begin in each window and its last target: 0, and increasing."""
        starts = windows * self.seq
        # all windows at once, as a look-up costs more than its bisection's arithmetic
        ends = starts + self.seq - (not self.extra_token)  # of the last token that is read
        first, last = self._file.documents_of(np.stack([starts, ends]))
        runs = [np.arange(a + 1, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        places = self._file.starts(np.concatenate([np.zeros(0, np.int64), *runs]))
        counts = last - first
        self._check_order(starts, counts, places)
        inside = np.split(places, np.cumsum(counts)[:-1])
        found = (np.append(0, x - start) for x, start in zip(inside, starts.tolist(), strict=True))
        # of documents that begin at the same token, only the last is not empty
        return [x[np.diff(x, append=self.seq + 1) > 0] for x in found]

    def _check_order(self, starts: np.ndarray, counts: np.ndarray, places: np.ndarray) -> None:
        """Check that so many documents begin in each window, one after another, at `places`.

        Raises:
            ValueError: the index is damaged.
        """
        window = np.repeat(np.arange(len(starts)), np.maximum(counts, 0))
        within = places - starts[window]
        falls = (np.diff(within) < 0) & (window[1:] == window[:-1])
        wrong = np.unique(window[(within <= 0) | (within > self.seq) | np.append(falls, False)])
        wrong = np.concatenate([np.flatnonzero(counts < 0), wrong])
        if wrong.size:
            start = int(starts[wrong[0]])
            refuse_order(self._file.path, start, start + self.seq)

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        return f"{self.num_tokens:,} tokens in {self.num_documents:,} documents, on disk"
