"""The next token's logits, with keys and values that are kept: per-rank programs for generation.

`prefill` reads prompts, `extend` one token more of each. Both are pure: a cache goes in, and
another one comes out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functron import tree
from functron.errors import Problem, raise_problems
from functron.models import decoder
from functron.models.block import STREAM, How, block, patterns
from functron.models.config import GPTConfig
from functron.models.sequence import Context, Sequence, check_positions
from functron.nn.context import context_attention
from functron.nn.kv_cache import KVCache, cached_attention, empty_cache, written
from functron.spmd import CONTEXT_AXES, DATA_AXES, Mesh, P
from functron.spmd import collectives as lax
from functron.spmd.mesh import BoundMesh
from functron.typing import Float, Int, Tensor

_IN_ORDER = Context("ring", "contiguous")


class Cache(NamedTuple):
    """What is kept of the tokens read: by stack, the keys and values of its layers.

    Attributes:
        layers: ``{"blocks": KVCache, "dense"?: KVCache}``, each with a leading dim of layers.
    """

    layers: dict[str, KVCache]


def cache_specs(config: GPTConfig) -> Cache:
    """How a cache is split: samples over data axes, heads over tp.

    With fewer key heads than tp ranks each rank keeps the one that it uses: the dim of heads is
    then as long as there are ranks.
    """
    row: Any = P(None, DATA_AXES, None, "tp")
    return Cache({name: KVCache(row, row) for name in config.stacks})


def check(config: GPTConfig, mesh: Mesh | BoundMesh | None = None) -> None:
    """Refuse what cannot be generated with a cache.

    Raises:
        ValueError: experts for which tokens compete, or axes that split sequences or layers.
    """
    problems = []
    moe, fix = config.moe, "generate without a cache: one rank, prompts of one length"
    if moe is not None and (moe.routing == "expert_choice" or moe.capacity_factor):
        got = "tokens that compete for experts"
        problems.append(Problem("gpt.moe", got, "routing of each token by itself", fix))
    if moe is not None and moe.routing == "sinkhorn":
        got = "routing of whole sequences"
        problems.append(Problem("gpt.moe.routing", got, "routing of each token by itself", fix))
    for axis in ("pp", *CONTEXT_AXES):
        if mesh is not None and mesh[axis] > 1:
            wanted = "data, expert and tensor-parallel axes"
            problems.append(Problem("mesh", f"{axis}={mesh[axis]}", wanted, "leave it out"))
    raise_problems("cannot generate with a cache", problems)


def prefill(
    config: GPTConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    lengths: Int[Tensor, " batch"],
    *,
    room: int,
    positions: Int[Tensor, "batch seq *several"] | None = None,
    how: How | None = None,
) -> tuple[Float[Tensor, "batch vocab"], Cache]:
    """The logits of the token after each prompt, and a cache of the prompts.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, prompts, each followed by anything where it is shorter.
        lengths: int64 ``[batch]``, their tokens, at least one.
        room: for how many tokens, prompts and what follows them, the cache has room.
        positions: as in `gpt.forward`.
        how: see `gpt.forward`: gather, experts and kernels.

    Returns:
        ``[batch, vocab_size]`` in float32 at least, the same on all ranks of tp, and the cache.
        Collectives: those of `gpt.forward`, and one all-gather of the logits over tp.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    sequence = _sequence(tokens, places, positions)
    return _advance(config, weights, None, sequence, places, lengths - 1, room, how)


def extend(
    config: GPTConfig,
    weights: dict,
    cache: Cache,
    tokens: Int[Tensor, " batch"],
    places: Int[Tensor, " batch"],
    *,
    positions: Int[Tensor, "batch *several"] | None = None,
    how: How | None = None,
) -> tuple[Float[Tensor, "batch vocab"], Cache]:
    """The logits of the token after these ones, and the cache with these ones in it.

    Args:
        config, weights, how: as in `prefill`.
        cache: of the tokens before.
        tokens: int64 ``[batch]``.
        places: int64 ``[batch]``, how many tokens came before each.
        positions: int64 ``[batch]`` or ``[batch, sections]``, where they are not the places.

    Returns:
        What `prefill` returns.
    """
    last = torch.zeros_like(places)
    positions = None if positions is None else positions[:, None]
    sequence = _sequence(tokens[:, None], places[:, None], positions)
    return _advance(config, weights, cache, sequence, places[:, None], last, 0, how)


def _advance(
    config: GPTConfig,
    weights: dict,
    cache: Cache | None,
    whole: Sequence,
    places: Tensor,
    last: Tensor,
    room: int,
    how: How | None,
) -> tuple[Tensor, Cache]:
    how = replace(how or How(), key=None, stream=STREAM, remat="none", context=_IN_ORDER)
    check_positions(whole, config.rope_sections, how.context)
    x = decoder.embedded(config, weights, whole, how)
    differing = patterns(config, x.device)
    kept: dict[str, KVCache] = {}
    for name, layers in config.stacks.items():
        gather = how.gather.at(name).rows()
        rows = []
        for row in range(len(layers)):
            before = None if cache is None else tree.map(lambda c, r=row: c[r], cache.layers[name])
            attend = _Attend(before, places, room)
            sequence = whole._replace(attend=attend)
            which = {what: of[layers.start + row] for what, of in differing.items()}
            own = tree.map(lambda w, r=row: w[r], weights[name])
            x, _ = block(config, sequence, how, gather)(x, (own, None, which))
            assert attend.after is not None
            rows.append(attend.after)
        kept[name] = tree.map(lambda *each: torch.stack(each), *rows)
    at = last[:, None, None].expand(-1, 1, x.shape[-1])
    logits = decoder.logits(config, weights, x.gather(1, at), how).squeeze(1)
    logits = lax.all_gather(logits, "tp", axis=-1, tiled=True)[:, : config.vocab_size]
    return logits if logits.dtype == torch.float64 else logits.float(), Cache(kept)


def _sequence(tokens: Tensor, places: Tensor, positions: Tensor | None) -> Sequence:
    rows = lax.global_index(tokens.shape[0], DATA_AXES, device=tokens.device)
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    return Sequence(tokens, None, rows, slots, places if positions is None else positions, None)


class _Attend:
    """Attention of one layer that reads and writes a cache.

    Attributes:
        after: the cache with the new tokens in it, once it has been called.
    """

    def __init__(self, cache: KVCache | None, places: Tensor, room: int):
        self._cache, self._places, self._room = cache, places, room
        self.after: KVCache | None = None

    def __call__(self, q, k, v, *, window=0, sinks=None, cap=0.0) -> Tensor:
        if self._cache is not None:
            self.after = written(self._cache, k, v, self._places)
            settings = {"window": window, "sinks": sinks, "cap": cap}
            return cached_attention(q, self.after, self._places, **settings)
        # prompts begin with nothing kept, so they see themselves alone
        self.after = written(empty_cache(k, v, self._room), k, v, self._places)
        return context_attention(q, k, v, window=window, sinks=sinks, cap=cap)
