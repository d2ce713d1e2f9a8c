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
from functron.data.text_tokenizer import TextTokenizer
from functron.errors import Problem, raise_problems

_MASKS = ("[MASK]", "<mask>")


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
    made = {"next": lambda *_: plain, "masked": _masked}
    return made[config.family.objective](config, tokenizer, plain)


def problems_of(config: TrainConfig) -> Iterator[Problem]:
    """What does not fit about what is hidden of text, as far as it can be told without reading."""
    family, default = config.family, TrainConfig()
    if family.objective == "next":
        for name in ("mask_token", "mask_rate"):
            if (value := getattr(config, name)) != getattr(default, name):
                wanted = f"nothing with {family.title}, which predicts the next token"
                yield Problem(name, str(value), wanted, "leave it out")
        return
    if not 0 < config.mask_rate < 1:
        yield Problem("mask_rate", str(config.mask_rate), "above 0 and below 1", "such as 0.15")
    if config.mask_token < -1:
        yield Problem("mask_token", str(config.mask_token), "an id, or -1", "leave it out")
    if config.fim_rate:
        got, fix = f"{config.fim_rate} with {family.title}", "leave it out"
        yield Problem("fim_rate", got, "a model that predicts the next token", fix)


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
        if chosen < size:
            return chosen, size
        wanted = f"an id below {table}.vocab_size={size}"
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
