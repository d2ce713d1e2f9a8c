"""What a model learns from text: the next token, or what is hidden of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from functron.config import TrainConfig
from functron.data import Samples
from functron.data.changed import Changed
from functron.data.masking import mask_tokens
from functron.data.spans import Spans, spans_of, take_out
from functron.data.text_tokenizer import TextTokenizer
from functron.errors import Problem, raise_problems
from functron.spmd import Mesh

_MASKS = ("[MASK]", "<mask>")
_SENTINELS = ("<extra_id_0>",)
_USELESS = {
    "next": ("mask_rate", "mask_token", "mean_span", "end_token"),
    "masked": ("mean_span", "end_token"),
    "spans": (),
}


@dataclass(frozen=True)
class Objective:
    """How samples of text become those that a model learns from.

    Attributes:
        length: tokens of text in a sample.
        vocab_size: ids of the text are below it.
        over: ``(samples, seed)`` to the samples that are made of them.
    """

    length: int
    vocab_size: int
    over: Callable[[Any, int], Samples]


def objective_of(config: TrainConfig, tokenizer: TextTokenizer | None) -> Objective:
    """What `config` makes of its text.

    Args:
        config: what is to be run.
        tokenizer: of its text; None: tokens on disk whose maker is not known.

    Raises:
        ValueError: the model has no id for what it needs beside text; all such are listed.
    """
    plain = Objective(config.seq, config.architecture.vocab_size, lambda samples, _: samples)
    made = {"next": lambda *_: plain, "masked": _masked, "spans": _spans}
    return made[config.family.objective](config, tokenizer, plain)


def target_length(config: TrainConfig) -> int:
    """How many targets a sample has: `seq`, or what the decoder says to so many tokens."""
    return spans_in(config).targets if config.family.objective == "spans" else config.seq


def flops_per_token(config: TrainConfig) -> int:
    """Model FLOPs of a step per token of `seq`, forward and backward."""
    sizes = (config.seq, target_length(config))
    if config.family.objective != "spans":
        sizes = sizes[:1]
    return config.family.flops_per_token(config.architecture, *sizes)


def spans_in(config: TrainConfig) -> Spans:
    """The spans that are taken out of a sample.

    Raises:
        ValueError: there is no room for them.
    """
    return spans_of(config.seq, config.mask_rate, config.mean_span)


def problems_of(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """What does not fit about what is hidden of text, as far as it can be told without reading."""
    family, default = config.family, TrainConfig()
    for name in _USELESS[family.objective]:
        if (value := getattr(config, name)) != getattr(default, name):
            yield Problem(name, str(value), f"nothing with {family.title}", "leave it out")
    if family.objective == "next":
        return
    if not 0 < config.mask_rate < 1:
        yield Problem("mask_rate", str(config.mask_rate), "above 0 and below 1", "such as 0.15")
    if config.mask_token < -1:
        yield Problem("mask_token", str(config.mask_token), "an id, or -1", "leave it out")
    if config.fim_rate:
        got, fix = f"{config.fim_rate} with {family.title}", "leave it out"
        yield Problem("fim_rate", got, "a model that predicts the next token", fix)
    if family.objective == "spans":
        yield from _length_problems(config, mesh)


def _length_problems(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """What is wrong about how much a decoder says."""
    try:
        said = target_length(config)
    except ValueError as error:
        fix = "lengthen it, or change mask_rate and mean_span"
        yield Problem("seq", str(config.seq), str(error).splitlines()[1].strip(" -"), fix)
        return
    parts = mesh["tp"] if mesh is not None and config.sequence_parallel else 1
    if said % parts:
        longer = range(config.seq + 1, config.seq + 100 * parts)
        fits = (
            seq
            for seq in longer
            if not seq % parts and not target_length(replace(config, seq=seq)) % parts
        )
        got = f"{config.seq}, to which the decoder says {said} tokens"
        wanted = f"a multiple of tp={parts} said under sequence_parallel"
        fix = f"set it to {next(fits, 'another')}, or leave sequence_parallel out"
        yield Problem("seq", got, wanted, fix)


def _masked(config: TrainConfig, tokenizer: TextTokenizer | None, plain: Objective) -> Objective:
    """Some tokens are to be found from those on both sides of them."""
    mask, text = _id_of(config, tokenizer, _MASKS, 1)
    end = None if tokenizer is None else tokenizer.end_of_text
    special = () if end is None else (end,)

    def over(samples: Any, seed: int) -> Samples:
        def change(drawn: dict[str, torch.Tensor], numbers: np.ndarray) -> dict:
            # by its number a sample has the same masks in batches of any size
            named = {"tokens": drawn["tokens"], "rows": torch.from_numpy(numbers)}
            how = {"mask_id": mask, "vocab_size": plain.vocab_size, "special": special}
            made = mask_tokens(named, seed, 0, rate=config.mask_rate, **how)
            return {name: made[name] for name in ("tokens", "targets")}

        return Changed(samples, change, plain.vocab_size)

    return replace(plain, vocab_size=text, over=over)


def _spans(config: TrainConfig, tokenizer: TextTokenizer | None, plain: Objective) -> Objective:
    """Spans are taken out of the text, and to be said."""
    spans, (sentinel, text) = spans_in(config), sentinels(config, tokenizer)
    end = end_of(config, tokenizer)

    def over(samples: Any, seed: int) -> Samples:
        def change(drawn: dict[str, torch.Tensor], numbers: np.ndarray) -> dict:
            tokens, which = drawn["tokens"], torch.from_numpy(numbers)
            return take_out(tokens, which, spans, seed, sentinel=sentinel, end=end)

        return Changed(samples, change, plain.vocab_size)

    return Objective(spans.length, text, over)


def sentinels(config: TrainConfig, tokenizer: TextTokenizer | None) -> tuple[int, int]:
    """The id of a T5's first sentinel, from which the others go down, and below which id text is.

    Raises:
        ValueError: there is no room for as many as a sample has spans.
    """
    return _id_of(config, tokenizer, _SENTINELS, spans_in(config).count)


def end_of(config: TrainConfig, tokenizer: TextTokenizer | None) -> int:
    """The id that ends what a T5 reads and says.

    Raises:
        ValueError: the tokenizer has none, or it is not of the vocabulary.
    """
    size = config.architecture.vocab_size
    own = None if tokenizer is None else tokenizer.end_of_text
    end = config.end_token if config.end_token >= 0 else own
    if end is not None and end < size:
        return end
    got = "-1 for a tokenizer without one" if end is None else str(end)
    wanted = f"an id below t5.vocab_size={size}"
    raise_problems("no token that ends a text", [
        Problem("end_token", got, wanted, "name one: --end-token ID, or name the --tokenizer")
    ])  # fmt: skip
    raise AssertionError("unreachable")


def _id_of(
    config: TrainConfig, tokenizer: TextTokenizer | None, names: tuple[str, ...], count: int
) -> tuple[int, int]:
    """The id of the first token that hides others, and below which id text is.

    `mask_token`, or the tokenizer's token with one of these names, or the last of the vocabulary,
    where text then has none of the last `count`.

    Raises:
        ValueError: there is none.
    """
    size, table = config.architecture.vocab_size, config.family.name
    known = {} if tokenizer is None else tokenizer.special_tokens
    named = [known[name] for name in names if name in known]
    if config.mask_token >= 0 or named:
        chosen = config.mask_token if config.mask_token >= 0 else named[0]
        if count - 1 <= chosen < size:
            return chosen, size
        wanted = f"an id below {table}.vocab_size={size}"
        wanted += f", and above {count - 2}: sentinels go down from it" if count > 1 else ""
        fix = f"raise {table}.vocab_size, or choose another"
        problem = Problem("mask_token", str(chosen), wanted, fix)
    else:
        # tokens on disk whose maker is not known are checked as they are read
        taken = 1 if tokenizer is None else tokenizer.vocab_size
        if taken + count <= size:
            return size - 1, size - count
        wanted = f"at least {taken + count}: {taken} of text, and {count} that hide it"
        fix = f"set it to {taken + count}, or name one of the tokenizer's: --mask-token ID"
        problem = Problem(f"{table}.vocab_size", f"{size} token ids", wanted, fix)
    raise_problems("no token that hides others", [problem])
    raise AssertionError("unreachable")
