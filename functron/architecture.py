"""What a configuration asks of an architecture that it cannot be trained with."""

from __future__ import annotations

from collections.abc import Iterator

from functron import corpus, objective
from functron.config import TrainConfig
from functron.errors import Problem
from functron.models.family import FAMILIES
from functron.spmd import Mesh

_OFF = "leave it out, or train a GPT"


def problems_of(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """What the family of `config` has no place for; what it cannot be split over, its rules say.

    Args:
        config: what is to be run.
        mesh: its mesh; None: that cannot be read.

    Raises:
        ValueError: `data` is a blend that is written wrongly.
    """
    family, architecture = config.family, config.architecture
    default = TrainConfig()
    for name in FAMILIES:
        given = getattr(config, name)
        if given is not None and given is not architecture and given != getattr(default, name):
            wanted = f"nothing beside [{family.name}]: one run trains one architecture"
            fix = f"leave it out, or name a preset that is {FAMILIES[name].title}"
            yield Problem(name, f"settings of {FAMILIES[name].title}", wanted, fix)
    yield from objective.problems_of(config, mesh)
    longest = getattr(architecture, "max_seq", None)
    if longest is not None and config.seq > longest:
        most = f"{family.name}.max_seq"
        fix = f"shorten the samples or raise {most}"
        yield Problem("seq", str(config.seq), f"at most {most}={longest}", fix)
    if config.lora_rank and not family.adapters:
        fix = "train all parameters: leave it out"
        yield Problem("lora_rank", f"{config.lora_rank} with {family.title}", "a GPT", fix)
    if config.loss_chunk_tokens and "loss_chunk_tokens" not in family.settings:
        got = f"{config.loss_chunk_tokens} with {family.title}"
        fix = "leave it out; more microbatches save as much"
        yield Problem("loss_chunk_tokens", got, "0: logits of all tokens at once", fix)
    for name in ("mask_documents", "pack") if family.name != "gpt" else ():
        if value := getattr(config, name):
            yield Problem(name, f"{value} with {family.title}", "a GPT", _OFF)
    if corpus.is_chat(config) and family.objective != "next":
        got, fix = f"conversations for {family.title}", "read them as text: --format text"
        yield Problem("data", got, "text or tokens", fix)
