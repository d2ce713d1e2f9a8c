"""``functron sample``: text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from functron import checkpoint, launch, random, run_folder, tree
from functron.commands.device import device_type
from functron.config import load
from functron.models import gpt
from functron.params import abstract_params
from functron.sample import generate


@dataclass(frozen=True)
class SampleOptions:
    """Continue a prompt with a trained model.

    Attributes:
        run: the run folder that training left.
        prompt: the text to continue.
        tokens: how many tokens (bytes) to add.
        temperature: 1 samples from the model's distribution, below 1 from its likelier part, 0
            takes the likeliest.
        seed: of the draws.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Path]
    prompt: str
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"


def run(arguments: Sequence[str]) -> int:
    """Print the continued prompt."""
    options = tyro.cli(SampleOptions, args=arguments, prog="functron sample")
    with launch.mistakes():
        device = device_type(options.device)
        config = load(options.run / run_folder.CONFIG)
        path = checkpoint.latest(options.run / run_folder.CHECKPOINTS)
        like = {"params": abstract_params(gpt.defs(config.gpt))}
        params = tree.map(lambda leaf: leaf.to(device), checkpoint.restore(path, like)["params"])
        prompt = torch.tensor([list(options.prompt.encode())], dtype=torch.int64, device=device)
        key = random.key(options.seed).to(device)
        tokens = generate(
            params, config.gpt, prompt, options.tokens, temperature=options.temperature, key=key
        )
    # a model may have more ids than there are bytes
    print(bytes(t for t in tokens[0].tolist() if t < 256).decode(errors="replace"))
    return 0
