"""``functron convert``: a Hugging Face model into a run folder, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from functron import launch
from functron.commands.parsing import parse
from functron.hub import convert


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a Hugging Face model into a run folder, or the newest checkpoint of a run back.

    Attributes:
        source: hf:PATH, a folder with config.json and safetensors, or run:PATH, a run folder.
        target: the other of them, which must not exist.
        dtype: of the parameters in the target; empty: as they are.
        averaged: export the average of the parameters that the run keeps (--optimizer.ema-decay).
        max_seq: the longest sequence, where the model could take longer ones; 0: what it takes.
    """

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SOURCE")]]
    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    averaged: bool = False
    max_seq: int = 0


def run(arguments: Sequence[str]) -> int:
    """Convert, and print what became of it."""
    options = parse(ConvertOptions, arguments, "convert")
    with launch.mistakes():
        done = convert.convert(
            options.source,
            options.target,
            dtype=options.dtype or None,
            averaged=options.averaged,
            max_seq=options.max_seq or None,
        )
        print(done)
        if done.recipe:
            print(done.recipe)
    return 0
