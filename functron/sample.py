"""Sampling: tokens drawn one after another from a model's next-token distribution."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functron import random, tree
from functron.errors import Problem, public, raise_problems
from functron.models import generation, gpt, mamba
from functron.models.block import How
from functron.params import param_specs
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, shard_map
from functron.spmd import collectives as lax
from functron.transforms import Gather

Logits = Callable[[tree.Tree, Tensor], Tensor]
Steps = Generator[Tensor, Tensor, None]
"""Gives the logits of the next token, is sent what was drawn, and goes on."""


@dataclass(frozen=True)
class Draw:
    """How a token is drawn from logits: the filters of transformers, in their order.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among so many likeliest tokens (Fan et al. 2018); 0: all.
        top_p: draw among the fewest tokens that together have this probability (Holtzman et al.
            2020); 1: all.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        checks = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0: all)"),
            "top_p": (0 < self.top_p <= 1, "above 0, and at most 1 (all)"),
        }
        problems = [
            Problem(name, str(getattr(self, name)), wanted)
            for name, (good, wanted) in checks.items()
            if not good
        ]
        raise_problems("cannot sample", problems)

    def __call__(self, logits: Tensor, key: Tensor | None, rows: Tensor) -> Tensor:
        """A token for each row of ``[batch, vocab]`` logits: int64 ``[batch]``.

        Args:
            logits: of the next token.
            key: of the draws; None where the temperature is 0.
            rows: int64 ``[batch]``, the rows' indices in the whole batch: draws are the same
                however it is split.
        """
        if self.temperature == 0 or key is None:
            return logits.argmax(-1)
        logits = self.filtered(logits / self.temperature)
        # the argmax of logits plus Gumbel noise is a draw from their softmax
        noise = random.uniform(key, logits.shape, minval=1e-20, index=(rows, None))
        return (logits - (-noise.log()).log()).argmax(-1)

    def filtered(self, logits: Tensor) -> Tensor:
        """The logits, with -inf for tokens that are not drawn."""
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = torch.sort(logits, stable=True, dim=-1, descending=True)
            p = ordered.softmax(-1)
            before = p.cumsum(-1) - p  # of likelier ones; so that the likeliest always stays
            hidden = torch.zeros_like(before, dtype=torch.bool).scatter(
                -1, order, before >= self.top_p
            )
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits


@public
@torch.no_grad()
def generate(
    params: tree.Tree,
    config: gpt.GPTConfig | mamba.MambaConfig,
    tokens: Tensor,
    num_tokens: int,
    *,
    lengths: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    key: Tensor | None = None,
    stop: Collection[int] = (),
    mesh: Mesh | BoundMesh | None = None,
    how: How | None = None,
    logits: Logits | None = None,
) -> Tensor:
    """Continue each row of `tokens` by `num_tokens` draws from softmax(logits / temperature).

    Keys and values of what was read are kept (`functron.models.generation`), so that each new
    token is read once. Where that cannot be, as the text becomes longer than `max_seq`, or on one
    rank tokens of a sequence compete for experts or `logits` is given, the last `max_seq` tokens
    are read again for every new one. A Mamba-2 model reads token by token, however many, and takes
    as long for each.

    Args:
        params: the parameters of `gpt.defs(config)` or `mamba.defs(config)`, as `mesh` splits them;
            or what `logits` takes.
        config: the architecture.
        tokens: int64 ``[batch, seq]``, at least one token each; on a bound mesh, those of this
            rank's data-parallel part.
        num_tokens: how many to add.
        lengths: int64 ``[batch]``, of prompts of different lengths, which are padded at the end;
            None: all have `seq` tokens.
        temperature, top_k, top_p: see `Draw`.
        key: the key of the draws; temperature 0 needs none.
        stop: tokens after which a row has ended: it repeats that token while others go on, and
            when all rows have ended no more are drawn.
        mesh: data, expert and tensor-parallel ranks that do it together, simulated or bound; None:
            one. Parameters lie on it as ``gpt.rules(config, mesh)`` has it.
        how: where parameters are gathered and experts are, and the kernels; see `gpt.forward`.
        logits: ``(params, tokens)`` to the logits of every next token, ``[batch, seq, vocab]``; the
            same on all ranks. One through a `pipeline.Pipeline` runs on the ranks of a pipeline.

    Returns:
        int64 ``[batch, seq + num_tokens]``, or shorter where all rows have ended. Each row's new
        tokens follow its prompt directly; where prompts are shorter, the end is padded with the
        last token.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, values out of range, a missing
            key, a mesh that cannot generate, lengths with what has no cache, or either with a
            Mamba-2 model.
    """
    draw = Draw(temperature, top_k, top_p)
    check_prompt(config, tokens, num_tokens, draw, key, lengths)
    if isinstance(config, mamba.MambaConfig):
        others = {"lengths": lengths, "mesh": mesh, "how": how, "logits": logits}
        _require_alone(others)
        steps = _recurrent(params, config, tokens, num_tokens)
        return drawn(steps, draw, tokens, num_tokens, key, stop)
    total = tokens.shape[1] + num_tokens
    with_cache = logits is None and total <= config.max_seq
    on_mesh = mesh is not None or how is not None
    if on_mesh or lengths is not None:
        _require_cache(config, mesh, logits is None, total if lengths is not None else 0)
    elif with_cache:
        with_cache = _cacheable(config)
    if with_cache:
        steps = _cached(params, config, tokens, lengths, num_tokens, mesh, how)
    else:
        read = logits or (_reader(config, mesh, how) if on_mesh else partial(_dense, config))
        steps = _reread(params, config, tokens, num_tokens, read)
    return drawn(steps, draw, tokens, num_tokens, key, stop, lengths=lengths, mesh=mesh)


def _cacheable(config: gpt.GPTConfig) -> bool:
    try:
        generation.check(config)
    except ValueError:
        return False
    return True


def _require_cache(config, mesh, by_model: bool, total: int) -> None:
    """Refuse what needs a cache, of `total` tokens, where there is none."""
    generation.check(config, mesh)
    found = []
    if not by_model:
        wanted, fix = "None with mesh, lengths or how", "leave it out, or those"
        found.append(Problem("logits", "a function", wanted, fix))
    if total > config.max_seq:
        wanted = f"at most max_seq={config.max_seq} with lengths"
        fix = "generate fewer, or give prompts of one length"
        found.append(Problem("num_tokens", f"{total} tokens in all", wanted, fix))
    raise_problems("cannot generate with a cache", found)


def _require_alone(others: dict) -> None:
    """Refuse what a recurrence does not do."""
    wanted, fix = (
        "None with a Mamba-2 model",
        "one rank, prompts of one length; or step by mamba.step",
    )
    given = [Problem(name, "a value", wanted, fix) for name, x in others.items() if x is not None]
    raise_problems("cannot sample", given)


def drawn(
    steps: Steps,
    draw: Draw,
    tokens: Tensor,
    num_tokens: int,
    key: Tensor | None,
    stop: Collection[int],
    *,
    lengths: Tensor | None = None,
    mesh: Mesh | BoundMesh | None = None,
) -> Tensor:
    """The prompts and what is drawn from the logits of `steps`, which is sent every draw.

    The arguments and the result are those of `generate`.
    """
    stops = torch.tensor(sorted(stop), dtype=tokens.dtype, device=tokens.device)
    ended = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    rows = torch.arange(tokens.shape[0], device=tokens.device) + _first_row(tokens, mesh)
    ends = torch.full_like(tokens[:, 0], tokens.shape[1]) if lengths is None else lengths
    last = tokens.gather(1, (ends - 1).unsqueeze(1)).squeeze(1)
    found = []
    for index in range(num_tokens):
        logits = next(steps) if index == 0 else steps.send(last)
        chosen = draw(logits, None if key is None else random.fold_in(key, index), rows)
        last = torch.where(ended, last, chosen)
        found.append(last)
        if stop:
            ended = torch.isin(last, stops)
            if _everywhere(ended, mesh):
                break
    if lengths is None or not found:
        return torch.cat([tokens, *(x.unsqueeze(1) for x in found)], dim=1)
    new = torch.stack(found, 1)
    out = torch.cat([tokens, new[:, -1:].expand_as(new)], dim=1)
    places = torch.arange(out.shape[1], device=out.device)
    out = torch.where(places < ends.unsqueeze(1), out, new[:, -1:])
    at = ends.unsqueeze(1) + torch.arange(new.shape[1], device=out.device)
    return out.scatter(1, at, new)


def _first_row(tokens: Tensor, mesh: Mesh | BoundMesh | None) -> int:
    if not isinstance(mesh, BoundMesh):
        return 0
    index = 0
    for axis in DATA_AXES:
        index = index * mesh[axis] + mesh.coordinate.get(axis, 0)
    return index * tokens.shape[0]


def _everywhere(ended: Tensor, mesh: Mesh | BoundMesh | None) -> bool:
    """Whether all rows have ended, those of other data ranks too, which go on together."""
    if isinstance(mesh, BoundMesh):
        least = shard_map(lambda x: lax.pmin(x, DATA_AXES), mesh, P(DATA_AXES), P())
        ended = least(ended.all()[None].to(torch.int64))
    return bool(ended.all())


def _dense(config: gpt.GPTConfig, params, tokens: Tensor) -> Tensor:
    return gpt.forward(config, params, tokens)


def _reader(config: gpt.GPTConfig, mesh: Mesh | BoundMesh | None, how: How | None) -> Logits:
    """`gpt.forward` over a mesh, with the logits whole on every rank of tp."""
    mesh, specs, how = _parts(config, mesh, how)
    settings = {"gather": how.gather, "experts": how.experts, "kernels": how.kernels}

    def read(params, tokens):
        found = gpt.forward(config, params, tokens, **settings)
        return lax.all_gather(found, "tp", axis=-1, tiled=True)

    return shard_map(read, mesh, (specs, P(DATA_AXES)), P(DATA_AXES))


def _parts(
    config: gpt.GPTConfig, mesh: Mesh | BoundMesh | None, how: How | None
) -> tuple[Mesh | BoundMesh, tree.Tree, How]:
    """The mesh, how parameters are split on it, and how they are gathered."""
    mesh = Mesh() if mesh is None else mesh
    specs = param_specs(gpt.defs(config), gpt.rules(config, mesh))
    return mesh, specs, How(gather=Gather(specs)) if how is None else how


def _reread(params, config, tokens: Tensor, num_tokens: int, read: Logits) -> Steps:
    for _ in range(num_tokens):
        found = read(params, tokens[:, -config.max_seq :])
        last = yield found[:, -1, : config.vocab_size].float()
        tokens = torch.cat([tokens, last.unsqueeze(1)], dim=1)


def _cached(params, config, tokens: Tensor, lengths, num_tokens: int, mesh, how) -> Steps:
    start, step = cached(config, mesh, tokens.shape[1] + num_tokens, how)
    places = torch.full_like(tokens[:, 0], tokens.shape[1]) if lengths is None else lengths
    found, cache = start(params, tokens, places)
    for index in range(num_tokens):
        last = yield found.float()
        if index + 1 < num_tokens:
            found, cache = step(params, cache, last, places + index)


def _recurrent(params, config: mamba.MambaConfig, tokens: Tensor, num_tokens: int) -> Steps:
    cache = mamba.empty_cache(config, params, tokens.shape[0])
    for index in range(tokens.shape[1] - 1):
        _, cache = mamba.step(config, params, tokens[:, index], cache)
    last = tokens[:, -1]
    for _ in range(num_tokens):
        found, cache = mamba.step(config, params, last, cache)
        last = yield found[:, : config.vocab_size].float()


def cached(
    config: gpt.GPTConfig,
    mesh: Mesh | BoundMesh | None,
    room: int,
    how: How | None = None,
) -> tuple[Callable, Callable]:
    """`generation.prefill` and `generation.extend` over a mesh: ``(start, step)``.

    ``start(params, tokens, lengths)`` and ``step(params, cache, tokens, places)`` return logits
    ``[batch, vocab_size]`` and the cache, which has room for `room` tokens.

    Raises:
        ValueError: what `generation.check` raises.
    """
    generation.check(config, mesh)
    mesh, specs, how = _parts(config, mesh, how)
    rows, kept = P(DATA_AXES), generation.cache_specs(config)

    def start(params, tokens, lengths):
        return generation.prefill(config, params, tokens, lengths, room=room, how=how)

    def step(params, cache, tokens, places):
        return generation.extend(config, params, cache, tokens, places, how=how)

    both = (rows, kept)
    return (
        shard_map(start, mesh, (specs, rows, rows), both),
        shard_map(step, mesh, (specs, kept, rows, rows), both),
    )


def check_prompt(
    config: Any,
    tokens: Tensor,
    num_tokens: int,
    draw: Draw,
    key: Tensor | None,
    lengths: Tensor | None = None,
) -> None:
    """Refuse what no model with the vocabulary of `config` continues; see `generate`.

    Raises:
        ValueError: listing everything that is wrong.
    """
    found = []
    if tokens.dim() != 2 or not tokens.numel():
        got = f"shape {tuple(tokens.shape)}"
        found.append(Problem("tokens", got, "[batch, seq] with seq >= 1", "give a prompt"))
    elif int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab_size:
        got = f"ids from {int(tokens.min())} to {int(tokens.max())}"
        found.append(Problem("tokens", got, f"ids from 0 to {config.vocab_size - 1}"))
    elif lengths is not None and (
        lengths.shape != tokens.shape[:1]
        or int(lengths.min()) < 1
        or int(lengths.max()) > tokens.shape[1]
    ):
        got = f"{lengths.tolist()}"
        found.append(Problem("lengths", got, f"one per row, from 1 to {tokens.shape[1]}"))
    if num_tokens < 0:
        found.append(Problem("num_tokens", str(num_tokens), "at least 0"))
    if draw.temperature > 0 and key is None:
        found.append(Problem("key", "None", "a key", "pass random.key(seed), or temperature=0"))
    raise_problems("cannot sample", found)
