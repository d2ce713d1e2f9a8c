"""Generation: tokens drawn one after another from a model's next-token distribution.

`generate` draws. `prefill` and `extend` are its per-rank programs: they read prompts, and one token
more of each, into a cache of keys and values. Both are pure: they return a new cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from functron.core import random, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.typing import Float, Int, Tensor
from functron.models import decoder, gpt
from functron.models.config import GPTConfig, TextConfig
from functron.models.decoder import block, patterns
from functron.models.family import family_of
from functron.models.options import (
    DEFAULTS,
    STREAM,
    WHOLE,
    Context,
    ModelOptions,
    Sequence,
    attention_keywords,
    check_positions,
    own_attention,
)
from functron.nn.attention import KVCache, cached_attention, empty_cache, write_cache
from functron.nn.context import context_attention
from functron.spmd import CONTEXT_AXES, DATA_AXES, BoundMesh, Mesh, P, shard_map
from functron.spmd import collectives as lax
from functron.spmd.params import param_specs
from functron.spmd.spec import is_spec
from functron.transforms import Gather

_IN_ORDER = Context("ring", "contiguous")


class KeyCache(NamedTuple):
    """Keys and values of the tokens read, by stack of layers.

    Attributes:
        layers: ``{"blocks": KVCache, "dense"?: KVCache}``, each with a leading dim of layers.
    """

    layers: dict[str, KVCache]


def cache_specs(config: GPTConfig) -> KeyCache:
    """How a cache is split: samples over data axes, heads over tp.

    With fewer key heads than tp ranks each rank keeps the one that it uses: the dim of heads is
    then as long as there are ranks.
    """
    row: Any = P(None, DATA_AXES, None, "tp")
    return KeyCache({name: KVCache(row, row) for name in config.stacks})


def check(
    config: GPTConfig,
    mesh: Mesh | BoundMesh | None = None,
    options: ModelOptions | None = None,
) -> None:
    """Refuse a model or mesh that cannot generate with a cache.

    Raises:
        ValueError: experts for which tokens compete, an attention without a form for caches, or
            axes that split sequences or layers.
    """
    problems = cache_problems(config, mesh, options)
    raise_problems("cannot generate with a cache", problems)


def cache_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh | None = None, options: ModelOptions | None = None
) -> list[Problem]:
    """The problems that `check` raises."""
    problems = []
    moe, fix = config.moe, "generate without a cache: one rank, prompts of one length"
    if moe is not None and (moe.routing == "expert_choice" or moe.capacity_factor):
        got = "tokens that compete for experts"
        problems.append(Problem("gpt.moe", got, "routing of each token by itself", fix))
    if moe is not None and moe.routing == "sinkhorn":
        got = "routing of whole sequences"
        problems.append(Problem("gpt.moe.routing", got, "routing of each token by itself", fix))
    if _lacks_cache(options):
        fix = "pass ft.Hook(apply, cached=...), or prompts of one length"
        got = "a function of whole sequences"
        problems.append(Problem("options.attention", got, "one for kept keys too", fix))
    return [*problems, *_axis_problems(mesh)]


def _lacks_cache(options: ModelOptions | None) -> bool:
    """Whether the user's attention has no form for cached keys."""
    hook = None if options is None else options.hook("attention")
    return hook is not None and hook.cached is None


def _axis_problems(mesh: Mesh | BoundMesh | None) -> list[Problem]:
    wanted = "data, expert and tensor-parallel axes"
    return [
        Problem("mesh", f"{axis}={mesh[axis]}", wanted, "leave it out")
        for axis in ("pp", *CONTEXT_AXES)
        if mesh is not None and mesh[axis] > 1
    ]


def prefill(
    config: GPTConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    lengths: Int[Tensor, " batch"],
    options: ModelOptions = DEFAULTS,
    *,
    room: int,
    positions: Int[Tensor, "batch seq *several"] | None = None,
) -> tuple[Float[Tensor, "batch vocab"], KeyCache]:
    """The logits of the token after each prompt, and a cache of the prompts.

    Args:
        weights: this rank's part of the parameters.
        tokens: int64, prompts, each padded at the end where it is shorter.
        lengths: int64, the number of tokens of each, at least one.
        options: as in `gpt.forward`: gather, expert_axes, kernels and hooks; others are not read.
        room: the number of tokens, of prompts and continuations, that the cache has room for.
        positions: as in `gpt.forward`.

    Returns:
        Logits in float32 at least, the same on all ranks of tp, and the cache. Collectives: those
        of `gpt.forward`, and one all-gather of the logits over tp.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    sequence = _sequence(tokens, places, positions)
    return _advance(config, weights, None, sequence, places, lengths - 1, room, options)


def extend(
    config: GPTConfig,
    weights: dict,
    cache: KeyCache,
    tokens: Int[Tensor, " batch"],
    places: Int[Tensor, " batch"],
    options: ModelOptions = DEFAULTS,
    *,
    positions: Int[Tensor, "batch *several"] | None = None,
) -> tuple[Float[Tensor, "batch vocab"], KeyCache]:
    """The logits of the token after these ones, and the cache with these ones in it; as `prefill`.

    Args:
        cache: of the tokens before.
        tokens: int64.
        places: int64, how many tokens came before each.
        positions: int64, where they are not the places.
    """
    last = torch.zeros_like(places)
    positions = None if positions is None else positions[:, None]
    sequence = _sequence(tokens[:, None], places[:, None], positions)
    return _advance(config, weights, cache, sequence, places[:, None], last, 0, options)


def _advance(
    config: GPTConfig,
    weights: dict,
    cache: KeyCache | None,
    whole: Sequence,
    places: Tensor,
    last: Tensor,
    room: int,
    options: ModelOptions,
) -> tuple[Tensor, KeyCache]:
    options = replace(options, stream=STREAM, remat="none", context=_IN_ORDER)
    check_positions(whole, config.rope_sections, options.context)
    x = decoder.embedded(config, weights, whole, options)
    differing = patterns(config, x.device, options)
    found: dict[str, list[KVCache]] = {name: [] for name in config.stacks}
    runs = config.runs(range(config.num_layers))
    for at, name in ((at, name) for name, run in runs for at in run):
        row = len(found[name])
        before = None if cache is None else tree.map(lambda c, r=row: c[r], cache.layers[name])
        attend = _CachedAttention(before, places, room, config, options, whole.positions)
        sequence = whole._replace(attend=attend)
        which = {what: of[at] for what, of in differing.items()}
        own = tree.map(lambda w, r=row: w[r], weights[name])
        matmul = options.matmul.of_layer(at, config.num_layers)
        gather = options.gather.at(name).rows()
        layer = block(config, sequence, replace(options, matmul=matmul), gather)
        x, _ = layer(x, (own, None, which))
        if attend.after is None:
            got, wanted = "a block without layer.attention", "one whose keys can be kept"
            fix = "generate(..., logits=) with gpt.forward and these options"
            refuse("cannot generate with a cache", "options.block", got, wanted, fix)
        found[name].append(attend.after)
    kept = {name: tree.map(lambda *x: torch.stack(x), *rows) for name, rows in found.items()}
    at = last[:, None, None].expand(-1, 1, x.shape[-1])
    logits = decoder.logits(config, weights, x.gather(1, at), options).squeeze(1)
    logits = lax.all_gather(logits, "tp", axis=-1, tiled=True)[:, : config.vocab_size]
    return logits if logits.dtype == torch.float64 else logits.float(), KeyCache(kept)


def _sequence(tokens: Tensor, places: Tensor, positions: Tensor | None) -> Sequence:
    rows = lax.global_index(tokens.shape[0], DATA_AXES, device=tokens.device)
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    return Sequence(tokens, None, rows, slots, places if positions is None else positions, None)


@dataclass(eq=False)
class _CachedAttention:
    """Attention of one layer that reads and writes a cache.

    Attributes:
        after: the cache with the new tokens in it, once it has been called.
    """

    cache: KVCache | None
    places: Tensor
    room: int
    config: GPTConfig
    options: ModelOptions
    positions: Tensor
    after: KVCache | None = None

    def __call__(self, *operands, window=0, sinks=None, cap=0.0, **own) -> Tensor:
        *params, q, k, v = operands
        hook, given = self.options.hook("attention"), {"window": window, "cap": cap, **own}
        fixed = {"positions": self.positions, "segments": None, "kernels": self.options.kernels}
        if self.cache is not None:
            self.after = write_cache(self.cache, k, v, self.places)
            given |= {"sinks": sinks}
            if hook is None:
                return cached_attention(q, self.after, self.places, **given)
            assert hook.cached is not None
            given = attention_keywords(hook.cached, fixed | given)
            return hook.cached(*params, q, self.after, self.places, **given)
        # prompts begin with an empty cache: they see only themselves
        self.after = write_cache(empty_cache(k, v, self.room), k, v, self.places)
        if hook is None:
            return context_attention(q, k, v, sinks=sinks, **given)
        given = fixed | given
        return own_attention(self.config, hook, self.options, tuple(params), given, q, k, v, sinks)


Logits = Callable[[tree.Tree, Tensor], Tensor]
Steps = Generator[Tensor, Tensor, None]
"""Yields the logits of the next token, and is sent the token drawn from them."""


_COLD = 1e-3  # below it quotients may be too large for a dtype, and the temperature too small


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

    temperature: int | float = 1.0
    top_k: int = 0
    top_p: int | float = 1.0

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
        logits = self.filtered(self.scaled(logits))
        # the argmax of logits plus Gumbel noise is a draw from their softmax
        noise = random.uniform(key, logits.shape, minval=1e-20, index=(rows, None))
        return (logits - (-noise.log()).log()).argmax(-1)

    def scaled(self, logits: Tensor) -> Tensor:
        """The logits over the temperature, up to a constant, also for tiny temperatures."""
        if self.temperature >= _COLD:
            return logits / self.temperature
        # quotients beyond float32 are of tokens that are never drawn; the likeliest has 0
        below = logits.double() - logits.max(-1, keepdim=True).values.double()
        return (below / self.temperature).to(torch.promote_types(logits.dtype, torch.float32))

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
    config: TextConfig,
    tokens: Tensor,
    num_tokens: int,
    *,
    lengths: Tensor | None = None,
    temperature: int | float = 1.0,
    top_k: int = 0,
    top_p: int | float = 1.0,
    key: Tensor | None = None,
    stop: Collection[int] = (),
    mesh: Mesh | BoundMesh | None = None,
    options: ModelOptions | None = None,
    logits: Logits | None = None,
) -> Tensor:
    """Continue each row of `tokens` by `num_tokens` draws from softmax(logits / temperature).

    Keys and values of what was read are kept (`functron.models.generation`), so that each new
    token is read once. Where that cannot be, as the text becomes longer than `max_seq`, or on one
    rank tokens of a sequence compete for experts, or `logits` or an attention without a form for
    kept keys is given, the last `max_seq` tokens are read again for every new one. A model with a
    state of fixed size, such as Mamba-2, reads token by token, and takes as long for each.

    >>> config = gpt.GPTConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16)
    >>> params = ft.init_params(ft.random.key(0), gpt.defs(config))
    >>> ft.generate(params, config, torch.tensor([[1, 2, 3]]), 4, temperature=0).shape
    torch.Size([1, 7])

    Args:
        params: the parameters of `gpt.defs(config)`, or of the `defs` of another family, as `mesh`
            splits them; or what `logits` takes.
        config: of a GPT, or of a family with `iterate_logits` (`functron.models.family.Family`).
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
            one. Parameters lie on it as the specs of ``options.gather`` say, or without these as
            ``gpt.rules(config, mesh)`` has it.
        options: gather, experts, kernels and hooks of `gpt.forward`; others do not matter here.
            Parameters that data axes split are gathered without being asked for.
        logits: ``(params, tokens)`` to the logits of every next token, ``[batch, seq, vocab]``; the
            same on all ranks. One through a `pipeline.Pipeline` runs on the ranks of a pipeline.

    Returns:
        int64 ``[batch, seq + num_tokens]``, or shorter where all rows have ended. Each row's new
        tokens follow its prompt directly; where prompts are shorter, the end is padded with the
        last token.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, values out of range, a missing
            key, a mesh that cannot generate, lengths with what has no cache, or either with
            another family than GPT.
        TypeError: a model of this family does not continue texts.
    """
    draw = Draw(temperature, top_k, top_p)
    check_prompt(config, tokens, num_tokens, draw, key, lengths)
    if not isinstance(config, GPTConfig):
        others = {"lengths": lengths, "mesh": mesh, "options": options, "logits": logits}
        iterate = _find_iterator(config, others)
        return drawn(
            iterate(params, config, tokens, num_tokens), draw, tokens, num_tokens, key, stop
        )
    if logits is None:
        _check_adapters(params, mesh, options)
    total = tokens.shape[1] + num_tokens
    with_cache = logits is None and total <= config.max_seq
    on_mesh = mesh is not None or options is not None
    if lengths is None and logits is None and _lacks_cache(options):
        raise_problems("cannot generate", _axis_problems(mesh))
        with_cache = False
    elif on_mesh or lengths is not None:
        longest = total if lengths is not None else 0
        _require_cache(config, mesh, options, logits is None, longest)
    elif with_cache:
        with_cache = not cache_problems(config)
    if with_cache:
        steps = _iterate_with_cache(params, config, tokens, lengths, num_tokens, mesh, options)
    else:
        alone = partial(gpt.forward, config)
        read = logits or (_reader(config, mesh, options) if on_mesh else alone)
        steps = _reread(params, config, tokens, num_tokens, read)
    return drawn(steps, draw, tokens, num_tokens, key, stop, lengths=lengths, mesh=mesh)


def _check_adapters(params: tree.Tree, mesh, options: ModelOptions | None) -> None:
    """Refuse low-rank additions on several ranks of which nothing says how they are split."""
    told = options is not None and not is_spec(options.gather.specs)
    if told or mesh is None or mesh.size == 1:
        return
    found = [path for path in tree.paths(params) if "lora" in path.split("/")]
    if found:
        got = f"low-rank adapters ({found[0]}, ...) on {mesh.size} ranks"
        wanted = "their specs in options.gather: the model's definitions have none"
        fix = (
            "specs = ft.param_specs(lora.lora_defs(gpt.defs(config), settings), gpt.rules(config, "
            "mesh)); options=ft.ModelOptions(gather=ft.Gather(specs)); or lora.merge them first"
        )
        refuse("cannot generate", "params", got, wanted, fix)


def _require_cache(config, mesh, options, by_model: bool, total: int) -> None:
    """Refuse arguments that need a cache, of `total` tokens, where there can be none."""
    found = cache_problems(config, mesh, options)
    if not by_model:
        wanted, fix = "None with mesh, lengths or options", "leave it out, or those"
        found.append(Problem("logits", "a function", wanted, fix))
    if total > config.max_seq:
        wanted = f"at most max_seq={config.max_seq} with lengths"
        fix = "generate fewer, or give prompts of one length"
        found.append(Problem("num_tokens", f"{total} tokens in all", wanted, fix))
    raise_problems("cannot generate with a cache", found)


def _find_iterator(config: TextConfig, others: dict) -> Callable[..., Steps]:
    """The function that generates token by token in this family; refuse arguments it lacks."""
    family = family_of(config)
    if family.iterate_logits is None:
        wanted = "the config of a model that continues texts"
        refuse("cannot sample", "config", family.title, wanted, error=TypeError)
    wanted, fix = f"None with {family.title}", "one rank, prompts of one length"
    given = [Problem(name, "a value", wanted, fix) for name, x in others.items() if x is not None]
    raise_problems("cannot sample", given)
    return family.iterate_logits


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
    """The prompts and the tokens drawn from the logits of `steps`; see `generate`."""
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


def _reader(
    config: gpt.GPTConfig, mesh: Mesh | BoundMesh | None, options: ModelOptions | None
) -> Logits:
    """`gpt.forward` over a mesh, with the logits whole on every rank of tp."""
    mesh, specs, options = placed(config, mesh, options)
    options = replace(options, stream=STREAM, remat="none", context=_IN_ORDER)

    def read(params, tokens):
        found = gpt.forward(config, params, tokens, options)
        return lax.all_gather(found, "tp", axis=-1, tiled=True)

    return shard_map(read, mesh, (specs, P(DATA_AXES)), P(DATA_AXES))


def placed(
    config: gpt.GPTConfig, mesh: Mesh | BoundMesh | None, options: ModelOptions | None
) -> tuple[Mesh | BoundMesh, tree.Tree, ModelOptions]:
    """The mesh, how parameters are split on it, and the options, by which they are gathered."""
    mesh, options = Mesh() if mesh is None else mesh, options or DEFAULTS
    if not is_spec(options.gather.specs):
        return mesh, options.gather.specs, options
    if mesh.size == 1:  # whatever parameters there are, such as low-rank adapters
        gpt.rules(config, mesh)
        return mesh, P(), options
    specs = param_specs(gpt.defs(config, options), gpt.rules(config, mesh))
    gather = Gather(specs) if options.gather is WHOLE else options.gather
    return mesh, specs, replace(options, gather=gather)


def _reread(params, config, tokens: Tensor, num_tokens: int, read: Logits) -> Steps:
    for _ in range(num_tokens):
        found = read(params, tokens[:, -config.max_seq :])
        last = yield found[:, -1, : config.vocab_size].float()
        tokens = torch.cat([tokens, last.unsqueeze(1)], dim=1)


def _iterate_with_cache(
    params, config, tokens: Tensor, lengths, num_tokens: int, mesh, options
) -> Steps:
    start, step = cached(config, mesh, tokens.shape[1] + num_tokens, options)
    places = torch.full_like(tokens[:, 0], tokens.shape[1]) if lengths is None else lengths
    found, cache = start(params, tokens, places)
    for index in range(num_tokens):
        last = yield found.float()
        if index + 1 < num_tokens:
            found, cache = step(params, cache, last, places + index)


def cached(
    config: gpt.GPTConfig,
    mesh: Mesh | BoundMesh | None,
    room: int,
    options: ModelOptions | None = None,
) -> tuple[Callable, Callable]:
    """`prefill` and `extend` over a mesh: ``(start, step)``.

    ``start(params, tokens, lengths)`` and ``step(params, cache, tokens, places)`` return logits
    ``[batch, vocab_size]`` and the cache, which has room for `room` tokens.

    Raises:
        ValueError: what `check` raises.
    """
    check(config, mesh, options)
    mesh, specs, given = placed(config, mesh, options)
    rows, kept = P(DATA_AXES), cache_specs(config)

    def start(params, tokens, lengths):
        return prefill(config, params, tokens, lengths, given, room=room)

    def step(params, cache, tokens, places):
        return extend(config, params, cache, tokens, places, given)

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
    """Refuse prompts, lengths, a number or a missing key that `generate` cannot take.

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
