"""``functron sample``: text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from functron import checkpoint, corpus, launch, lora, objective, random, run_folder, tree
from functron.commands.device import device_type
from functron.config import TrainConfig, load
from functron.data import Tokenizer
from functron.data.text_tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer
from functron.errors import Problem, raise_problems
from functron.models import bert, t5
from functron.read_out import read_params
from functron.restore import Sentinels, respond
from functron.sample import Draw, generate


@dataclass(frozen=True)
class SampleOptions:
    """Continue a prompt with a trained model.

    Attributes:
        run: the run folder that training left.
        prompt: the text to continue; a T5's has <extra_id_0>, <extra_id_1> and so on for what is
            missing.
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
        tokenizer = _tokenizer(options, config)
        model = config.architecture
        if isinstance(model, t5.T5Config):
            print(_restored(options, config, model, tokenizer, device))
            return 0
        if isinstance(model, bert.BertConfig):
            fix = "fill in what is masked with bert.forward, as examples/pretrain_bert.py does"
            problem = Problem(str(options.run), "a run of a BERT", "one that continues text", fix)
            raise_problems("cannot sample", [problem])
            raise AssertionError("unreachable")
        ids = _encoded(options, tokenizer)
        tokens = generate(
            _params(options, config, device),
            model,
            torch.tensor([ids], dtype=torch.int64, device=device),
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=random.key(options.seed).to(device),
            stop=tokenizer.stops,
        )
    said = tokens[0, len(ids) :] if options.chat else tokens[0]
    print(tokenizer.decode(said.tolist()))
    return 0


def _params(options: SampleOptions, config: TrainConfig, device: str) -> dict:
    """The parameters of the newest checkpoint."""
    stored = checkpoint.Checkpoint(checkpoint.latest(options.run / run_folder.CHECKPOINTS))
    defs = lora.defs_in(config.family.defs(config.architecture), config.lora, stored)
    found = read_params(stored, defs, averaged=options.averaged)
    return tree.map(lambda leaf: leaf.to(device), lora.merge(found))


def _restored(
    options: SampleOptions,
    config: TrainConfig,
    model: t5.T5Config,
    tokenizer: TextTokenizer,
    device: str,
) -> str:
    """What a T5 says to a prompt whose missing spans have the names of sentinels."""
    if options.chat:
        problem = Problem("chat", "a run of a T5", "a model that converses", "leave it out")
        raise_problems("cannot write a conversation", [problem])
    reader = corpus.reader_of(replace(config, out=str(options.run)))
    first, _ = objective.sentinels(config, reader)
    count, end = objective.spans_in(config).count, objective.end_of(config, reader)
    spans = Sentinels(first, count, end)
    ids = spans.read(options.prompt, tokenizer)
    said = respond(
        _params(options, config, device),
        model,
        torch.tensor([ids], dtype=torch.int64, device=device),
        options.tokens,
        draw=Draw(options.temperature, options.top_k, options.top_p),
        key=random.key(options.seed).to(device),
        stop={end},
    )
    return spans.written(said[0].tolist(), tokenizer)


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
