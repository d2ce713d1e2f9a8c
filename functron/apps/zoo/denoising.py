"""Denoising objectives: masked tokens for BERT, missing spans for T5, and their settings.

Spans of text to be restored, for encoders with decoders: each span that is taken out of a text
leaves one sentinel in it; the targets are every sentinel, and the tokens that it stands for (Raffel
et al. 2020, section 3.1.4). Which spans these are is a function of the seed and a sample's number:
the same on every mesh, in batches of any size.

    text      Thank you for inviting me to your party last week.
    tokens    Thank you <X> me to your party <Y> week. </s>
    targets   <X> for inviting <Y> last </s>

Masked batches, for models that predict tokens from both sides (Devlin et al. 2019, section 3.1):
which tokens are masked, and by what, is a function of the seed, the step, and each sample's index
in the global batch: the same on every mesh, in every process, and of each sample by itself.

`MASKED_TOKENS` and `MISSING_SPANS` are what the library asks of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from functron.core import random
from functron.core.errors import Problem, raise_problems, refuse
from functron.data.mapped_files import TextTokenizer
from functron.data.sampling import IGNORED, SampleMaker, Samples, Transformed
from functron.models.family import Objective
from functron.spmd import Mesh

if TYPE_CHECKING:  # it reads the families, whose objectives are here
    from functron.training.config import TrainConfig


@dataclass(frozen=True)
class Spans:
    """How many tokens and spans are taken out of every sample: the same numbers of each.

    They are those of T5's code (``random_spans_helper`` and ``random_spans_noise_mask``): of the
    `length` tokens of a sample ``round(length * rate)`` are `hidden`, in ``round(hidden / mean)``
    spans (`count`).
    """

    length: int
    hidden: int
    count: int

    @property
    def inputs(self) -> int:
        """Tokens that the encoder reads: what stays, the sentinels, and the end."""
        return self.length - self.hidden + self.count + 1

    @property
    def targets(self) -> int:
        """Tokens of the decoder's targets: the sentinels, what was taken out, and the end."""
        return self.hidden + self.count + 1


def spans_of(inputs: int, rate: float = 0.15, mean: float = 3.0) -> Spans:
    """The spans of the longest text of which the encoder reads `inputs` tokens.

    A token more of text is one more that stays, or one more that is taken out and at most one span;
    so there is text of which the encoder reads just as many.

    Args:
        inputs: tokens that the encoder reads, with sentinels and the end.
        rate: the share of tokens that are taken out.
        mean: tokens of a span, in the mean.

    Raises:
        ValueError: values out of range, or no room for a span and a token before each.
    """
    found = []
    if not 0 < rate < 1:
        found.append(Problem("rate", str(rate), "above 0 and below 1", "such as 0.15"))
    if not mean >= 1:
        found.append(Problem("mean", str(mean), "at least 1", "such as 3"))
    elif not found and rate > mean / (1 + mean):
        most = f"at most {mean / (1 + mean):.3g}: a token stays before each span"
        found.append(Problem("rate", str(rate), most, "lower it, or take longer spans"))
    raise_problems("cannot take spans out of text", found)
    made = _spans(1, rate, mean)
    while (longer := _spans(made.length + 1, rate, mean)).inputs <= inputs:
        made = longer
    if made.inputs != inputs or made.length - made.hidden < made.count:
        got = f"{inputs} tokens, {rate} of the text taken out in spans of {mean}"
        fix = "read more tokens, take out fewer, or in longer spans"
        wanted = "room for spans with a token before each"
        refuse("cannot take spans out of text", "inputs", got, wanted, fix)
    return made


def _spans(length: int, rate: float, mean: float) -> Spans:
    hidden = min(max(round(length * rate), 1), max(length - 1, 1))
    return Spans(length, hidden, max(round(hidden / mean), 1))


def take_out(
    tokens: Tensor, numbers: Tensor, spans: Spans, seed: int, *, sentinel: int, end: int
) -> dict[str, Tensor]:
    """Samples of text with random spans taken out, and these.

    A text begins with a token that stays and ends with a span. All ways to cut its hidden tokens,
    and those that stay, into as many runs are equally likely.

    Args:
        tokens: int64 ``[rows, spans.length]``.
        numbers: int64 ``[rows]``, of the samples, counted from the beginning of a run.
        spans: how many tokens and spans.
        seed: of the run.
        sentinel: the id of the first span's sentinel; those of others go down from it by one.
        end: the id at the end of both.

    Returns:
        ``tokens`` int64 ``[rows, spans.inputs]`` and ``targets`` int64 ``[rows, spans.targets]``.
    """
    rows, count = len(tokens), spans.count
    keys = random.split(random.key(seed, device=tokens.device)).unbind(0)
    stay = _runs(keys[0], numbers, spans.length - spans.hidden, count)
    gone = _runs(keys[1], numbers, spans.hidden, count)
    ends = torch.stack([stay, gone], 2).flatten(1).cumsum(1)  # of runs, in turn
    places = torch.arange(spans.length, device=tokens.device).expand(rows, -1).contiguous()
    run = torch.searchsorted(ends, places, right=True)
    hidden = run % 2 == 1
    first = torch.ones_like(hidden)
    first[:, 1:] = run[:, 1:] != run[:, :-1]
    marks = sentinel - run // 2
    inputs = torch.where(hidden, marks, tokens)[~hidden | first].view(rows, -1)
    # each span comes after its sentinel, which stands where the run before it begins
    targets = torch.where(hidden, tokens, marks)[hidden | first].view(rows, -1)
    stop = torch.full_like(tokens[:, :1], end)
    return {"tokens": torch.cat([inputs, stop], 1), "targets": torch.cat([targets, stop], 1)}


def _runs(key: Tensor, numbers: Tensor, total: int, count: int) -> Tensor:
    """Lengths of `count` runs, at least 1 each, that sum to `total`: int64 ``[rows, count]``."""
    drawn = random.uniform(key, (len(numbers), total - 1), torch.float64, index=(numbers, None))
    cuts = drawn.argsort(dim=1, stable=True)[:, : count - 1].sort(dim=1).values + 1
    edge = cuts.new_zeros(len(numbers), 1)
    return torch.cat([edge, cuts, edge + total], 1).diff(dim=1)


def mask_tokens(
    batch: Mapping[str, Tensor],
    seed: int,
    step: int,
    *,
    mask_id: int,
    vocab_size: int,
    special: Sequence[int] = (),
    rate: float = 0.15,
    masked: float = 0.8,
    random_share: float = 0.1,
) -> dict[str, Tensor]:
    """`batch` with some tokens chosen as targets, and most of these hidden.

    Each token is chosen with probability `rate`, by itself. Of those chosen `masked` become
    `mask_id`, `random_share` any token of the vocabulary, and the others stay.

    Args:
        batch: ``tokens`` int64 ``[batch, seq]``; ``rows`` int64 ``[batch]``, the samples' indices
            in the global batch, without which they are the first; perhaps ``mask``, 0 where a token
            is padding, which is never chosen. Any rank's part of it.
        seed: of the run.
        step: which batch.
        mask_id: what chosen tokens become.
        vocab_size: tokens are replaced by one of 0 to ``vocab_size - 1``.
        special: ids that are never chosen, such as those of separators.
        rate, masked, random_share: probabilities.

    Returns:
        The batch with other ``tokens``, and ``targets``: the tokens that were chosen, and
        `nn.IGNORE_INDEX` elsewhere.

    Raises:
        ValueError: a probability is none, or an id is not of the vocabulary; all are listed.
    """
    _check(vocab_size, (mask_id, *special), rate=rate, masked=masked, random_share=random_share)
    tokens = batch["tokens"]
    rows = batch.get("rows")
    rows = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    root = random.fold_in(random.key(seed, device=tokens.device), step)
    keys, index = random.split(root, 3).unbind(0), (rows, None)
    chosen = random.uniform(keys[0], tokens.shape, index=index) < rate
    for word in special:
        chosen = chosen & (tokens != word)
    if "mask" in batch:
        chosen = chosen & (batch["mask"] != 0)
    kind = random.uniform(keys[1], tokens.shape, index=index)
    others = random.randint(keys[2], tokens.shape, 0, vocab_size, torch.int64, index=index)
    hidden = torch.where(
        kind < masked, mask_id, torch.where(kind < masked + random_share, others, tokens)
    )
    return {
        **batch,
        "tokens": torch.where(chosen, hidden, tokens),
        "targets": torch.where(chosen, tokens, IGNORED),
    }


def _check(vocab_size: int, ids: Sequence[int], **shares: float) -> None:
    found = [
        Problem(name, str(share), "a probability, from 0 to 1")
        for name, share in shares.items()
        if not 0 <= share <= 1
    ]
    total = shares["masked"] + shares["random_share"]
    if not found and total > 1 + 1e-9:
        fix = "lower one: the rest stay as they are"
        found.append(Problem("masked + random_share", str(total), "at most 1", fix))
    wrong = [number for number in ids if not 0 <= number < vocab_size]
    if wrong:
        wanted = f"0 to {vocab_size - 1}"
        found.append(Problem("mask_id and special", str(wrong), wanted, "raise vocab_size"))
    raise_problems("mask_tokens cannot mask this way", found)


_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class Sentinels:
    """The ids that stand for missing spans, as text: ``<extra_id_0>``, ``<extra_id_1>``, ...

    Attributes:
        first: the id of ``<extra_id_0>``; those of others go down from it by one.
        count: how many there are.
        end: the id at the end of the encoder's and of the decoder's text.
    """

    first: int
    count: int
    end: int

    def encode(self, text: str, tokenizer: TextTokenizer) -> list[int]:
        """The ids of a text with the names of sentinels where spans are missing, and the end.

        Raises:
            ValueError: it names a sentinel that does not exist.
        """
        found: list[int] = []
        for index, piece in enumerate(_SENTINEL.split(text)):
            if index % 2:
                if int(piece) >= self.count:
                    wanted = f"<extra_id_0> to <extra_id_{self.count - 1}>, as it was trained"
                    got, fix = f"<extra_id_{int(piece)}>", "use those, in order"
                    refuse("unknown sentinel", "prompt", got, wanted, fix)
                found.append(self.first - int(piece))
            elif piece:
                found += tokenizer.encode(piece, special=False)
        return [*found, self.end]

    def decode(self, tokens: Sequence[int], tokenizer: TextTokenizer) -> str:
        """The text of ids, with the names of sentinels."""
        text, plain = "", list[int]()
        for token in tokens:
            number = self.first - token
            if 0 <= number < self.count:
                text += tokenizer.decode(plain) + f"<extra_id_{number}>"
                plain = []
            else:
                plain.append(token)
        return text + tokenizer.decode(plain)


# --- objectives of a run

_MASKS = ("[MASK]", "<mask>")
_SENTINELS = ("<extra_id_0>",)


def spans_in(config: TrainConfig) -> Spans:
    """The number and lengths of the spans that are taken out of a sample.

    Raises:
        ValueError: the sample is too short for them.
    """
    return spans_of(config.data.seq, config.data.mask_rate, config.data.mean_span)


def find_sentinels(config: TrainConfig, tokenizer: TextTokenizer | None) -> Sentinels:
    """The ids that stand for missing spans in a run of a T5.

    Raises:
        ValueError: the vocabulary has fewer free ids than a sample has spans, or none that ends a
            text.
    """
    count = spans_in(config).count
    first, _ = _find_hiding_id(config, tokenizer, _SENTINELS, count)
    return Sentinels(first, count, _find_end(config, tokenizer))


def _plan_masks(config: TrainConfig, tokenizer: TextTokenizer | None) -> SampleMaker:
    """Masked tokens are predicted from those on both sides (BERT)."""
    size = config.architecture.vocab_size
    mask, text = _find_hiding_id(config, tokenizer, _MASKS, 1)
    end = None if tokenizer is None else tokenizer.end_of_text
    special = () if end is None else (end,)
    if tokenizer is not None:
        special += config.data.rules.begin_document(tokenizer)

    def over(samples: Any, seed: int) -> Samples:
        def change(drawn: dict[str, torch.Tensor], numbers: np.ndarray) -> dict:
            # by its number a sample has the same masks in batches of any size
            named = {"tokens": drawn["tokens"], "rows": torch.from_numpy(numbers)}
            how = {"mask_id": mask, "vocab_size": size, "special": special}
            made = mask_tokens(named, seed, 0, rate=config.data.mask_rate, **how)
            return {name: made[name] for name in ("tokens", "targets")}

        return Transformed(samples, change, size)

    return SampleMaker(config.data.seq, text, over)


def _plan_spans(config: TrainConfig, tokenizer: TextTokenizer | None) -> SampleMaker:
    """Spans are replaced by sentinels in the input, and are the decoder's targets (T5)."""
    spans, size = spans_in(config), config.architecture.vocab_size
    first, text = _find_hiding_id(config, tokenizer, _SENTINELS, spans.count)
    marks = {"sentinel": first, "end": _find_end(config, tokenizer)}

    def over(samples: Any, seed: int) -> Samples:
        def change(drawn: dict[str, torch.Tensor], numbers: np.ndarray) -> dict:
            return take_out(drawn["tokens"], torch.from_numpy(numbers), spans, seed, **marks)

        return Transformed(samples, change, size)

    return SampleMaker(spans.length, text, over)


def _find_end(config: TrainConfig, tokenizer: TextTokenizer | None) -> int:
    """The id that ends the inputs and targets of a T5.

    Raises:
        ValueError: the tokenizer has none, or it is outside the vocabulary.
    """
    size = config.architecture.vocab_size
    own = None if tokenizer is None else tokenizer.end_of_text
    end = config.data.end_token if config.data.end_token >= 0 else own
    if end is None or end >= size:
        got = "-1 for a tokenizer without one" if end is None else str(end)
        wanted = f"an id below {config.family.name}.vocab_size={size}"
        fix = "name one: --end-token ID, or name the --tokenizer"
        refuse("no token that ends a text", "end_token", got, wanted, fix)
    return end


def _find_hiding_id(
    config: TrainConfig, tokenizer: TextTokenizer | None, names: tuple[str, ...], count: int
) -> tuple[int, int]:
    """The id of the mask or first sentinel, and the bound of text ids.

    That is `mask_token`; or the tokenizer's token with one of `names`; or the last id of the
    vocabulary, in which case text has none of the last `count` ids.

    Raises:
        ValueError: there is no such id.
    """
    size, title = config.architecture.vocab_size, "no token that hides others"
    table = f"{config.family.name}.vocab_size"
    known = {} if tokenizer is None else tokenizer.special_tokens
    named = [known[name] for name in names if name in known]
    if config.data.mask_token >= 0 or named:
        chosen = config.data.mask_token if config.data.mask_token >= 0 else named[0]
        if count - 1 <= chosen < size:
            return chosen, size
        wanted = f"an id below {table}={size}"
        wanted += f", and above {count - 2}: sentinels go down from it" if count > 1 else ""
        refuse(title, "mask_token", chosen, wanted, f"raise {table}, or choose another")
    # tokens on disk whose maker is not known are checked as they are read
    taken = 1 if tokenizer is None else tokenizer.vocab_size
    if taken + count > size:
        wanted = f"at least {taken + count}: {taken} of text, and {count} that hide it"
        fix = f"set it to {taken + count}, or name one of the tokenizer's: --mask-token ID"
        refuse(title, table, f"{size} token ids", wanted, fix)
    return size - 1, size - count


def _find_mask_problems(config: TrainConfig, mesh: Mesh | None = None) -> Iterator[Problem]:
    data = config.data
    if not 0 < data.mask_rate < 1:
        yield Problem("mask_rate", str(data.mask_rate), "above 0 and below 1", "such as 0.15")
    if data.mask_token < -1:
        yield Problem("mask_token", str(data.mask_token), "an id, or -1", "leave it out")


def _find_span_problems(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """Also those of the length of the decoder's targets."""
    yield from _find_mask_problems(config)
    seq, settings = config.data.seq, (config.data.mask_rate, config.data.mean_span)
    try:
        said = spans_of(seq, *settings).targets
    except ValueError as error:
        fix = "lengthen it, or change mask_rate and mean_span"
        yield Problem("seq", str(seq), str(error).splitlines()[1].strip(" -"), fix)
        return
    parts = mesh["tp"] if mesh is not None and config.parallelism.sequence_parallel else 1
    if said % parts:
        longer = (n for n in range(seq + 1, seq + 100 * parts) if not n % parts)
        fits = (n for n in longer if not spans_of(n, *settings).targets % parts)
        got = f"{seq}, for which the decoder has {said} targets"
        wanted = f"a multiple of tp={parts} of them with sequence_parallel"
        fix = f"set it to {next(fits, 'another')}, or leave sequence_parallel out"
        yield Problem("seq", got, wanted, fix)


MASKED_TOKENS = Objective(
    _plan_masks, ("mask_rate", "mask_token"), find_problems=_find_mask_problems, prompt=None
)
"""Tokens that are hidden from a BERT."""

MISSING_SPANS = Objective(
    _plan_spans,
    ("mask_rate", "mask_token", "mean_span", "end_token"),
    count_targets=lambda config: spans_in(config).targets,
    find_problems=_find_span_problems,
    prompt="{} <extra_id_0>",
    open_prompts=find_sentinels,
)
"""Spans of text that a T5 restores."""
