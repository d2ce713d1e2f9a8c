"""``functron sample``: text from a trained model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from functron import checkpoint
from functron.checkpoint.restore import read_params
from functron.cli.launch import RunOptions, device_type, join, launch, leave
from functron.cli.options import parse
from functron.cli.process import Process, current, mistakes
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.data import Tokenizer
from functron.data.tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer
from functron.models import bert, generation, gpt, lora, mamba, t5
from functron.models.generation import Draw, generate
from functron.models.t5 import Sentinels, respond
from functron.spmd import DATA_AXES, BoundMesh, Mesh
from functron.training import data, run_folder
from functron.training.config import TrainConfig, load

Program = Callable[[dict, Mesh | BoundMesh, torch.device], str]
"""``(params, mesh, device)`` to the text."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(RunOptions):
    """Continue a prompt with a trained model.

    Attributes:
        prompt: the text to continue; a T5's has <extra_id_0>, <extra_id_1> and so on for what is
            missing.
        tokens: how many tokens (bytes, where the run has no tokenizer) to add at most.
        tokenizer: what makes tokens of the prompt, a path or bytes; empty: the run's own.
        chat: take the prompt for a message of the user, and print the answer alone.
        temperature: 1 samples from the model's distribution, below 1 from its likelier part, 0
            takes the likeliest.
        top_k: sample among so many likeliest tokens; 0: among all.
        top_p: sample among the fewest tokens that together have this probability; 1: among all.
        seed: of the draws.
        mesh: axes and sizes, such as tp=4 or fsdp=2,tp=2, over which a model is split that is too
            large for one rank; the text is the same. Ranks of data axes read copies of the prompt.
            Empty: one rank.
    """

    prompt: str
    tokens: int = 200
    tokenizer: str = ""
    chat: bool = False
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def run(arguments: Sequence[str]) -> int:
    """Print the continued prompt, or the answer to it."""
    options = parse(SampleOptions, arguments, "sample")
    here = current()
    with mistakes():
        mesh = Mesh.parse(options.mesh)
        config = load(options.run / run_folder.CONFIG)
        _check(options, config, mesh, here)
        kind = device_type(options.device, options.nproc)
        tokenizer = _tokenizer(options, config)
        restores = isinstance(config.architecture, t5.T5Config)
        complete = _restored if restores else _continued
        program = complete(options, config, tokenizer)
    if here is None and options.nproc:
        return launch(options.nproc, ["-m", "functron", "sample", *arguments])
    if here is None and mesh.size > 1:
        note = f"mesh   {options.mesh}: {mesh.size} ranks simulated in this process"
        print(f"{note} (--nproc {mesh.size} starts processes)", file=sys.stderr)
    with mistakes():
        bound, device = join(mesh, here, kind) if here else (mesh, torch.device(kind))
        text = program(_params(options, config, bound, device), bound, device)
    leave()
    if here is None or here.rank == 0:
        print(text, flush=True)
    return 0


def _check(options: SampleOptions, config: TrainConfig, mesh: Mesh, here: Process | None) -> None:
    """Refuse what cannot be sampled from, or not on this mesh."""
    model, found = config.architecture, []
    if isinstance(model, bert.BertConfig):
        fix = "fill in what is masked with bert.forward, as examples/pretrain_bert.py does"
        found.append(Problem(str(options.run), "a run of a BERT", "one that continues text", fix))
    if isinstance(model, mamba.MambaConfig) and mesh.size > 1:
        wanted = "one rank with a Mamba-2 model"
        found.append(Problem("mesh", options.mesh, wanted, "leave it out"))
    if isinstance(model, t5.T5Config) and options.chat:
        got, wanted = "a run of a T5", "a model that converses"
        found.append(Problem("chat", got, wanted, "leave it out"))
    raise_problems("cannot sample", [*found, *options.problems(mesh, here)])
    if isinstance(model, gpt.GPTConfig) and mesh.size > 1:
        generation.check(model, mesh)
    config.family.rules(model, mesh)


def _params(
    options: SampleOptions,
    config: TrainConfig,
    mesh: Mesh | BoundMesh,
    device: torch.device,
) -> dict:
    """The parameters of the newest checkpoint, as the mesh splits them."""
    stored = checkpoint.Checkpoint(checkpoint.latest(options.run / run_folder.CHECKPOINTS))
    defs = lora.defs_in(config.family.defs(config.architecture), config.lora, stored)
    rules = config.family.rules(config.architecture, mesh)
    found = read_params(stored, defs, averaged=options.averaged, rules=rules, mesh=mesh)
    return tree.map(lambda leaf: leaf.to(device), lora.merge(found))


def _continued(options: SampleOptions, config: TrainConfig, tokenizer: TextTokenizer) -> Program:
    """The prompt continued by a model, or its answer alone."""
    ids, model = _encoded(options, tokenizer), config.architecture
    assert isinstance(model, gpt.GPTConfig | mamba.MambaConfig)

    def program(params: dict, mesh: Mesh | BoundMesh, device: torch.device) -> str:
        tokens = generate(
            params,
            model,
            _rows(ids, mesh, device),
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=random.key(options.seed).to(device),
            stop=tokenizer.stops,
            mesh=mesh if mesh.size > 1 else None,
        )
        new = _ended(tokens[0, len(ids) :].tolist(), tokenizer.stops)
        return tokenizer.decode(new if options.chat else ids + new)

    return program


def _restored(options: SampleOptions, config: TrainConfig, tokenizer: TextTokenizer) -> Program:
    """The spans that a T5 restores in a prompt which has sentinels in their places."""
    model = config.architecture
    assert isinstance(model, t5.T5Config)
    reader = data.reader_of(replace(config, out=str(options.run)))
    first, _ = data.sentinels(config, reader)
    count, end = data.spans_in(config).count, data.end_of(config, reader)
    spans = Sentinels(first, count, end)
    ids = spans.read(options.prompt, tokenizer)

    def program(params: dict, mesh: Mesh | BoundMesh, device: torch.device) -> str:
        tokens = respond(
            params,
            model,
            _rows(ids, mesh, device),
            options.tokens,
            draw=Draw(options.temperature, options.top_k, options.top_p),
            key=random.key(options.seed).to(device),
            stop={end},
            mesh=mesh,
        )
        return spans.written(_ended(tokens[0].tolist(), {end}), tokenizer)

    return program


def _rows(ids: list[int], mesh: Mesh | BoundMesh, device: torch.device) -> torch.Tensor:
    """The prompt, once for every data rank: this process's rows."""
    simulated = () if isinstance(mesh, BoundMesh) else DATA_AXES
    copies = math.prod(mesh[axis] for axis in simulated)
    return torch.tensor([ids] * copies, dtype=torch.int64, device=device)


def _ended(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Tokens up to the first stop: a row that has ended repeats it while others go on."""
    ends = (index for index, token in enumerate(tokens) if token in stops)
    return tokens[: next(ends, len(tokens)) + 1]


def _tokenizer(options: SampleOptions, config: TrainConfig) -> TextTokenizer:
    if options.tokenizer:
        return open_tokenizer(options.tokenizer, pattern=config.tokenizer_pattern)
    found = data.tokenizer_of(replace(config, out=str(options.run)))
    if found is None and data.is_on_disk(config):
        got = "a run on tokens that does not say what made them"
        fix = "name it: --tokenizer FILE, or --tokenizer bytes"
        refuse("cannot read", "tokenizer", got, "their tokenizer", fix)
    return found or ByteTokenizer()


def _encoded(options: SampleOptions, tokenizer: TextTokenizer) -> list[int]:
    """The prompt's tokens."""
    if options.chat:
        if not isinstance(tokenizer, Tokenizer):
            got = "a run on bytes" if tokenizer.file is None else str(tokenizer.file)
            fix = "leave it out, or train with --tokenizer"
            wanted = "one with a tokenizer's template"
            refuse("cannot write a conversation", "chat", got, wanted, fix)
        messages = [{"role": "user", "content": options.prompt}]
        text = tokenizer.render(messages, add_generation_prompt=True)
        return tokenizer.encode(text, special=False)
    return tokenizer.encode(options.prompt)
