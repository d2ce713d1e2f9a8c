"""``functron sample``: text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from functron import checkpoint, corpus, launch, lora, random, run_folder, tree
from functron.commands.device import device_type
from functron.config import load
from functron.data import Tokenizer
from functron.errors import Problem, raise_problems
from functron.models import gpt
from functron.params import abstract_params
from functron.sample import generate


@dataclass(frozen=True)
class SampleOptions:
    """Continue a prompt with a trained model.

    Attributes:
        run: the run folder that training left.
        prompt: the text to continue.
        tokens: how many tokens (bytes, where the run has no tokenizer) to add at most.
        chat: take the prompt for what a user says, and print the answer alone.
        temperature: 1 samples from the model's distribution, below 1 from its likelier part, 0
            takes the likeliest.
        top_k: sample among so many likeliest tokens; 0: among all.
        top_p: sample among the fewest tokens that together have this probability; 1: among all.
        seed: of the draws.
        device: cpu, cuda, or auto: cuda where there is one.
    """

    run: tyro.conf.Positional[Path]
    prompt: str
    tokens: int = 200
    chat: bool = False
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"


def run(arguments: Sequence[str]) -> int:
    """Print the continued prompt, or the answer to it."""
    options = tyro.cli(SampleOptions, args=arguments, prog="functron sample")
    with launch.mistakes():
        device = device_type(options.device)
        config = load(options.run / run_folder.CONFIG)
        tokenizer = corpus.open_tokenizer(replace(config, out=str(options.run)))
        ids = _encoded(options, tokenizer)
        path = checkpoint.latest(options.run / run_folder.CHECKPOINTS)
        defs = lora.defs_in(gpt.defs(config.gpt), config.lora, checkpoint.Checkpoint(path))
        found = checkpoint.restore(path, {"params": abstract_params(defs)})["params"]
        params = tree.map(lambda leaf: leaf.to(device), lora.merge(found))
        prompt = torch.tensor([ids], dtype=torch.int64, device=device)
        key = random.key(options.seed).to(device)
        tokens = generate(
            params,
            config.gpt,
            prompt,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=key,
            stop=tokenizer.stops if tokenizer else (),
        )
    said = tokens[0, len(ids) :] if options.chat else tokens[0]
    print(_decoded(said.tolist(), tokenizer))
    return 0


def _encoded(options: SampleOptions, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's tokens."""
    if options.chat:
        if tokenizer is None:
            fix = "leave it out, or train with --tokenizer"
            problem = Problem("chat", "a run on bytes", "one with a tokenizer's template", fix)
            raise_problems("cannot write a conversation", [problem])
            raise AssertionError("unreachable")
        messages = [{"role": "user", "content": options.prompt}]
        text = tokenizer.render(messages, add_generation_prompt=True)
        return tokenizer.encode(text, special=False)
    return list(options.prompt.encode()) if tokenizer is None else tokenizer.encode(options.prompt)


def _decoded(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is not None:
        return tokenizer.decode(tokens)
    # a model may have more ids than there are bytes
    return bytes(t for t in tokens if t < 256).decode(errors="replace")
