"""Conversations to fine-tune on, several of them in a sample and none of them cut for it."""

from __future__ import annotations

import numpy as np
import torch

from functron.data.best_fit import best_fit
from functron.data.chat import IGNORED, Chat
from functron.data.order import drawn, shuffled
from functron.data.packing import LEAVES


class PackedChat:
    """Conversations packed best-fit into samples, which every epoch shuffles anew.

    All of them are packed once, longest first, each into the sample with the least room that it
    fits into: which ones share a sample is the same in every epoch. Attention sees a token's own
    conversation alone and positions count from 0 in each, so that every target has the loss that it
    has in a sample of its own. A step has as many more targets as its samples have more
    conversations; losses are means over targets. What couples the tokens of a sequence, such as
    balance losses of experts, couples those of a sample. Padding continues the last conversation
    of a sample, which does not see what comes after it.

    Args:
        chat: the conversations, all in memory; what is too long has been cut or dropped there.

    Attributes:
        seq: tokens per sample.
        num_samples: samples in an epoch.
        num_conversations: in all of them together.
        num_tokens: in all samples, without padding.
        vocab_size: one more than the largest id that occurs.
    """

    def __init__(self, chat: Chat):
        self._chat, self.seq, self.seed = chat, chat.seq, chat.seed
        self.vocab_size, self.num_conversations = chat.vocab_size, chat.num_samples
        lengths = chat.lengths
        self.num_tokens = int(lengths.sum())
        samples = best_fit(lengths.tolist(), chat.seq)
        self.num_samples = len(samples)
        self._members = np.concatenate([np.array(x, np.int64) for x in samples])
        self._first = np.cumsum([0, *map(len, samples)])

    def conversations(self, index: int) -> np.ndarray:
        """Which conversations sample `index` has, in their order there: int64.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index}: wanted 0 to {self.num_samples - 1}")
        return self._members[self._first[index] : self._first[index + 1]]

    def sample(self, index: int) -> np.ndarray:
        """The tokens, targets, positions and segments of sample `index`: int64 ``[4, seq]``.

        Raises:
            IndexError: there is no such sample.
        """
        out = np.empty((len(LEAVES), self.seq), np.int64)
        tokens, targets, positions, segments = out
        tokens[:], targets[:] = self._chat.pad, IGNORED
        at = 0
        for number, conversation in enumerate(self.conversations(index).tolist()):
            ids, wanted = self._chat.conversation(conversation)
            end = at + len(ids)
            tokens[at:end], targets[at:end] = ids, wanted
            # to the end of the sample, for the padding after the last
            positions[at:], segments[at:] = np.arange(self.seq - at), number
            at = end
        return out

    def batch(
        self, step: int, global_batch: int, part: tuple[int, int] = (0, 1)
    ) -> dict[str, torch.Tensor]:
        """This part's rows of the batch of `step`: the same samples however many parts there are.

        Row r of step s is sample number ``s * global_batch + r``; an epoch is `num_samples` of
        them, in an order of its own.

        Args:
            step: from 0.
            global_batch: rows of all parts together.
            part: ``(index, count)``: which of how many contiguous parts.

        Returns:
            What `draw` returns, and ``rows`` int64 ``[rows]``, the rows' indices in the global
            batch.

        Raises:
            ValueError: `count` does not divide `global_batch`, or no such part.
        """
        return drawn(self, step * global_batch, global_batch, part)

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """The samples that come as `numbers`, counted from the beginning of a run.

        Args:
            numbers: int64 ``[rows]``, from 0; number n is in epoch ``n // num_samples``.

        Returns:
            ``tokens``, ``targets``, ``positions`` and ``segments``, the numbers of conversations in
            the sample from 0: int64 ``[rows, seq]`` each.
        """
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self.seed)
        stacked = np.stack([self.sample(index) for index in order.tolist()], 1)
        return {name: torch.from_numpy(x) for name, x in zip(LEAVES, stacked, strict=True)}

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        share = self.num_tokens / (self.num_samples * self.seq)
        packed = f"packed into {self.num_samples:,} samples, {share:.0%} full"
        return f"{self._chat.summary()}, {packed}"
