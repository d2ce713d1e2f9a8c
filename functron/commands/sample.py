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
from functron.config import TrainConfig, load
from functron.data import Tokenizer
from functron.data.text_tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer
from functron.errors import Problem, raise_problems
from functron.read_out import read_params
from functron.sample import generate


@dataclass(frozen=True)
class SampleOptions:
    """Continue a prompt with a trained model.

    Attributes:
        run: the run folder that training left.
        prompt: the text to continue.
        tokens: how many tokens (bytes, where the run has no tokenizer) to add at most.
        tokenizer: what makes tokens of the prompt, a path or bytes; empty: the run's own.
        averaged: sample from the average of the parameters that the run keeps
            (--optimizer.ema-decay).
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
    tokenizer: str = ""
    averaged: bool = False
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
        _require_generator(options, config)
        tokenizer = _tokenizer(options, config)
        ids = _encoded(options, tokenizer)
        path = checkpoint.latest(options.run / run_folder.CHECKPOINTS)
        stored = checkpoint.Checkpoint(path)
        defs = lora.defs_in(config.family.defs(config.architecture), config.lora, stored)
        found = read_params(stored, defs, averaged=options.averaged)
        params = tree.map(lambda leaf: leaf.to(device), lora.merge(found))
        prompt = torch.tensor([ids], dtype=torch.int64, device=device)
        key = random.key(options.seed).to(device)
        tokens = generate(
            params,
            config.architecture,
            prompt,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=key,
            stop=tokenizer.stops,
        )
    said = tokens[0, len(ids) :] if options.chat else tokens[0]
    print(tokenizer.decode(said.tolist()))
    return 0


def _require_generator(options: SampleOptions, config: TrainConfig) -> None:
    """Refuse models that continue nothing."""
    if config.family.objective == "masked":
        fix = "fill in what is masked with bert.forward, as examples/pretrain_bert.py does"
        got, wanted = f"a run of {config.family.title}", "a model that continues text"
        raise_problems("cannot sample", [Problem(str(options.run), got, wanted, fix)])


def _tokenizer(options: SampleOptions, config: TrainConfig) -> TextTokenizer:
    if options.tokenizer:
        return open_tokenizer(options.tokenizer, pattern=config.tokenizer_pattern)
    found = corpus.open_tokenizer(replace(config, out=str(options.run)))
    if found is None and corpus.is_on_disk(config):
        got = "a run on tokens that does not say what made them"
        fix = "name it: --tokenizer FILE, or --tokenizer bytes"
        raise_problems("cannot read", [Problem("tokenizer", got, "their tokenizer", fix)])
    return found or ByteTokenizer()


def _encoded(options: SampleOptions, tokenizer: TextTokenizer) -> list[int]:
    """The prompt's tokens."""
    if options.chat:
        if not isinstance(tokenizer, Tokenizer):
            got = "a run on bytes" if tokenizer.file is None else str(tokenizer.file)
            fix = "leave it out, or train with --tokenizer"
            problem = Problem("chat", got, "one with a tokenizer's template", fix)
            raise_problems("cannot write a conversation", [problem])
            raise AssertionError("unreachable")
        messages = [{"role": "user", "content": options.prompt}]
        text = tokenizer.render(messages, add_generation_prompt=True)
        return tokenizer.encode(text, special=False)
    return tokenizer.encode(options.prompt)
