"""How a model is run, beside its architecture: one value for the functions of every family.

`ModelOptions` says how parameters are gathered, how sequences and experts are divided, activation
checkpointing and kernels; and it holds hooks: functions of the user's own in place of a decoder's
attention, router, feed-forward layer, norm or whole block.

`Context` and `Sequence` say which rank has which tokens of a batch, and what attention may see.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from functron import nn
from functron.core import tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.settings import choice_problems
from functron.core.tables import shows_differences
from functron.core.typing import Int, Tensor
from functron.models.config import GPTConfig
from functron.nn.context import (
    ContextKind,
    context_attention,
    own_part,
    own_positions,
    to_balanced,
)
from functron.nn.layers import SEQ_DIM, sequence_axes, uneven_length
from functron.nn.moe.room import room_problems
from functron.nn.multi_token import SequenceOrder
from functron.ops import AUTO, Kernels
from functron.program.recorder import aside
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.spmd import collectives as lax
from functron.spmd.axes import Scope, enter, scope
from functron.spmd.params import ParamDef
from functron.spmd.spec import entry_axes, is_uneven
from functron.transforms import Gather
from functron.transforms.capture import is_watched, unwatched

Batch = Mapping[str, Tensor]
"""``tokens`` and ``targets`` int64 [B, T], and ``rows`` int64 [B], indices in the global batch; of
packed documents also ``positions`` and ``segments`` int64 [B, T], see `Sequence`; where tokens have
several positions (`functron.gpt.GPTConfig.rope_sections`) ``positions`` [B, T, their number]."""

SAMPLE_AXES = (*DATA_AXES, *CONTEXT_AXES)
"""The axes over which losses are summed: those that split the batch, by samples and by tokens."""


@shows_differences
@dataclass(frozen=True)
class Context:
    """How attention reaches across the ranks that split sequences, ``cp`` and ``ulysses``.

    Attributes:
        kind: what ranks of ``cp`` do: ``"ring"``: keys and values go round, one rank at a time (Liu
            et al. 2023); ``"gather"``: every rank gathers all of them (Llama 3, section 3.3.2).
            Ranks of ``ulysses`` exchange heads for sequence in either case.
        order: ``"zigzag"``: ranks exchange tokens at the start, after which each has an early and a
            late part of every sequence, so that causal attention costs all the same; the numbers
            are those of ``"contiguous"``, which leaves tokens where they are. ``"balanced"``: the
            batch has been arranged, document by document (`functron.data.packing`).
        ring_size: keys and values go round, or are gathered, among so many neighbouring ranks of cp
            only, where no document of the batch lies on more; 0: among all.
        exchange_size: heads are exchanged among so many neighbouring ranks of ulysses only, where
            no document lies on more, with `ring_size` 1; 0: among all.

    Raises:
        ValueError: a value is none of these.
    """

    kind: ContextKind = "ring"
    order: SequenceOrder = "zigzag"
    ring_size: int = 0
    exchange_size: int = 0

    def __post_init__(self):
        found = choice_problems(self)
        for name in ("ring_size", "exchange_size"):
            size = getattr(self, name)
            if size < 0 or (size and self.order != "balanced"):
                got = f"{size} with order={self.order!r}"
                wanted = 'at least 0, and 0 unless order="balanced"'
                found.append(Problem(name, got, wanted, "leave it out"))
        raise_problems("invalid Context", found)

    @property
    def halves(self) -> bool:
        """Whether each rank of cp holds an early and a late half."""
        return self.order != "contiguous"

    @property
    def runs(self) -> int:
        """The number of runs of consecutive tokens, of equal length, in a rank's part of a sample.

        Under "balanced", where it is not known, 1.
        """
        split = self.order == "zigzag" and lax.axis_size("cp") > 1
        return 2 if split and lax.axis_size("ulysses") % 2 else 1


LOAD = "router_load"
"""The entry of a batch with the `Sequence.load` of the whole one, repeated for each sample."""


class Sequence(NamedTuple):
    """A rank's tokens in the order in which it computes: T of them, whole over tp.

    Attributes:
        tokens: int64 ``[B, T]``.
        targets: int64 ``[B, T]``; None: without a loss.
        rows: int64 ``[B]``, the samples' indices in the global batch.
        slots: int64 ``[T]``, the tokens' places in their samples (as the batch has them).
        positions: int64 ``[T]`` or ``[B, T]``, their places in their documents; ``[B, T, S]``:
            the S positions of each, by which parts of a head's dims are rotated.
        segments: int64 ``[B, T]``, the numbers of their documents; None: each sample is one.
        places: int64 ``[B, T]``, of tokens that were dealt to ranks, their places in all samples of
            the step, one after the other, from which numbers are drawn; None: by rows and slots.
        attend: ``(q, k, v, *, window, sinks, cap) -> out`` in place of attention among these
            tokens: with cached keys, for example.
        load: int64 ``[routers, experts]``, the assignments of the whole batch to the experts of
            each layer; None: they were not counted. See `functron.models.decoder.tell_load`.
    """

    tokens: Tensor
    targets: Tensor | None
    rows: Tensor
    slots: Tensor
    positions: Tensor
    segments: Tensor | None
    attend: Callable | None = None
    places: Tensor | None = None
    load: Tensor | None = None

    def core(
        self,
        context: Context,
        window: int | Tensor = 0,
        kernels: Kernels = AUTO,
        cap: float = 0.0,
    ) -> Callable:
        """The core of `nn.self_attention`: attention to all that these tokens may see."""
        if self.attend is not None:
            return functools.partial(self.attend, window=window, cap=cap)
        return functools.partial(
            context_attention,
            positions=self.positions if context.order == "balanced" else None,
            segments=self.segments,
            window=window,
            kind=context.kind,
            balanced=context.halves,
            ring_size=context.ring_size or None,
            exchange_size=context.exchange_size or None,
            cap=cap,
            kernels=kernels,
        )


_ELSEWHERE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "tokens": ("int64 [batch, seq]", "input_ids"),
        "targets": ("int64: of each place what is to be predicted there", "labels"),
        "images": ("a tensor of images", "pixel_values"),
    }
)
"""Entries of a batch: what they hold, and their names in transformers."""


def require(batch: Batch, *names: str) -> None:
    """Check that a batch has these entries.

    Raises:
        ValueError: some are missing, or a spec cuts them into parts with padding (`Uneven`), which
            would count; all are listed.
        TypeError: it is not a mapping.
    """
    if not isinstance(batch, Mapping):
        wanted = f"a dict with {' and '.join(map(repr, names))}"
        got = type(batch).__name__
        refuse("the batch cannot be used", "batch", got, wanted, error=TypeError)
    found = []
    for name, value in batch.items():
        spec = next((spec for given, spec in scope().given if given is value), None)
        if is_uneven(spec):
            fix = "pad the batch itself, with targets nn.IGNORE_INDEX, which do not count"
            wanted = "samples and tokens that their ranks divide"
            found.append(Problem(name, f"parts with padding, {spec}", wanted, fix))
    for name in names:
        if name not in batch:
            wanted, other = _ELSEWHERE[name]
            fix = f"put it into the batch as {name!r}"
            if other in batch:
                fix = f"call {other!r} so"
                # transformers shifts labels inside of the model
                fix += ", one place to the left: labels[:, 1:] of tokens[:, :-1]" * (
                    other == "labels"
                )
            has = ", ".join(map(str, batch)) or "nothing"
            found.append(Problem(name, f"a batch with {has}", wanted, fix))
    raise_problems("the batch cannot be used", found)


@public
def num_targets(batch: Batch, axes: tuple[str, ...] = SAMPLE_AXES) -> Int[Tensor, ""]:
    """The number of targets in the batch of all ranks, without those of `nn.IGNORE_INDEX`: int64.

    `axes` are those of the loss's `ModelOptions`. Collectives: one all-reduce.
    """
    require(batch, "targets")
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), axes)


def arranged(batch: Batch, context: Context) -> Sequence:
    """This rank's tokens as `context` orders them.

    Collectives: none, except that under zigzag every entry of the batch with a sequence is
    exchanged along cp (`nn.context.to_balanced`).

    Raises:
        ValueError: the sequence does not divide.
    """

    require(batch, "tokens")
    tokens, rows, zigzag = batch["tokens"], batch.get("rows"), context.order == "zigzag"
    if rows is None:
        rows = lax.global_index(tokens.shape[0], DATA_AXES, device=tokens.device)
    order = "zigzag" if zigzag else "contiguous"
    slots = own_positions(tokens.shape[1], order, device=tokens.device)
    if is_watched() and zigzag and lax.axis_size("cp") > 1:
        got, wanted = "zigzag", "'contiguous' or 'balanced': ranks of cp in the order of the tokens"
        fix = 'context=ft.gpt.Context(order="contiguous")'
        refuse("capture cannot put zigzag sequences together", "context.order", got, wanted, fix)
    names = ("positions", "tokens", "targets", "segments")
    given = {name: batch[name] for name in names if batch.get(name) is not None}
    if zigzag:
        given = {name: to_balanced(x, 1) for name, x in given.items()}
    return Sequence(
        tokens=given["tokens"],
        targets=given.get("targets"),
        rows=rows,
        slots=slots,
        positions=given.get("positions", slots),
        segments=given.get("segments"),
        places=batch.get("places"),
        load=batch[LOAD][0] if LOAD in batch else None,
    )


def check_positions(sequence: Sequence, sections: tuple[int, ...], context: Context) -> None:
    """Raise ValueError unless each token has one position, or one for each of the sections.

    Sections are those of `functron.gpt.GPTConfig.rope_sections`.
    """
    shape, tokens = tuple(sequence.positions.shape), tuple(sequence.tokens.shape)
    several = (*tokens, len(sections))
    if shape == tokens[1:] or shape == tokens:
        return
    wanted = f"{tokens}, or {several}" if sections else f"{tokens}, one for each token"
    if len(shape) == len(several) and not sections:
        fix = "set rope_sections, if dims of a head are to be rotated by different positions"
    elif shape == several and context.order == "balanced":
        wanted, fix = f'{tokens} with order="balanced"', 'use order="zigzag"'
    elif shape == several:
        return
    else:
        fix = "transformers' [sections, batch, seq] is positions.permute(1, 2, 0) here"
    refuse("the batch cannot be used", "positions", shape, wanted, fix)


def check_length(seq: int, max_seq: int | None, stream: P) -> None:
    """Raise ValueError unless samples, of which ranks hold `seq` tokens each, are short enough.

    Args:
        max_seq: of a whole sample; None: no limit, as each is several documents.
        stream: the spec of the residual stream, by which tp may split a rank's tokens again.
    """
    split = lax.axis_size(tuple(a for a in sequence_axes(stream) if a not in CONTEXT_AXES))
    whole = seq * lax.axis_size(CONTEXT_AXES)
    if max_seq is not None and whole > max_seq:
        raise ValueError(
            f"forward: got {whole} tokens per sample; wanted at most max_seq={max_seq}; "
            "shorten the samples or raise max_seq"
        )
    length = uneven_length(stream)
    if length is None and seq % split:
        axes = ", ".join(map(repr, sequence_axes(stream)))
        raise ValueError(
            f"forward: got {whole} tokens per sample; wanted a multiple of {split * whole // seq}, "
            "the ranks that split the sequence; change its length, or pad their parts: "
            f"ModelOptions(stream=P(..., Uneven(({axes}), {whole})))"
        )
    if length not in (None, whole):
        raise ValueError(
            f"forward: got {whole} tokens per sample; wanted {length}, as the stream {stream} "
            "says, which context axes (cp, ulysses) divide; change one of them"
        )


STREAM = P(DATA_AXES, CONTEXT_AXES)
"""The residual stream ``[batch, seq, embed]`` split by batch, and by the axes of long contexts."""
SEQUENCE_PARALLEL_STREAM = P(DATA_AXES, (*CONTEXT_AXES, "tp"))
"""The residual stream with its sequence split over the tensor-parallel ranks as well."""

WHOLE = Gather()
"""Parameters that no data axis splits: there is nothing to gather."""

RING = Context()
"""Keys and values pass around a ring, with tokens in zig-zag order."""

Remat = Literal["none", "full", "selective", "dots"]
"""Activation checkpointing, by what backward computes again: nothing; each block from its input;
the attention core softmax(q k^T) v alone (Korthikanti et al. 2022, section 5); all but matrix
products and attention."""

HOOKS = ("attention", "router", "mlp", "norm", "block")
"""The fields of `ModelOptions` that hold functions."""


@dataclass(frozen=True, eq=False)
class Hook:
    """A function for `ModelOptions`, with parameters of its own or a form for generation.

    >>> def twice(x, config, name):
    ...     return 2 * x
    >>> ft.ModelOptions(norm=ft.Hook(twice, defs=lambda config: {})).norm.apply is twice
    True

    Attributes:
        apply: the function, as `ModelOptions` describes it.
        defs: ``(config) -> defs``, the parameters of one layer: of "mlp", "norm", "router" and
            "block" in place of those of what is replaced; of "attention" beside the projections,
            and `apply` and `cached` then take them as their first argument, dims of the logical
            axes "heads" and "kv_heads" split as the heads are. Logical axes that the rules do not
            name stay whole on every rank. None: the parameters are those of what is replaced.
        cached: of "attention": ``(q, cache, places, ...) -> out`` as
            `nn.attention.cached_attention`, of new queries and the keys kept so far, theirs
            included; keywords as for `apply`. None: generation reads the text again for every
            token.
    """

    apply: Callable
    defs: Callable[[Any], dict] | None = None
    cached: Callable | None = None

    def __post_init__(self):
        found = [
            Problem(field.name, repr(value), "a function")
            for field in fields(self)
            if not callable(value := getattr(self, field.name))
            and (value is not None or field.name == "apply")
        ]
        raise_problems("not a hook", found, TypeError)


@shows_differences
@dataclass(frozen=True, eq=False)
class ModelOptions:
    """How a model is run; ``ModelOptions()`` is for one device, and any mesh without fsdp.

    >>> options = ft.ModelOptions(stream=gpt.SEQUENCE_PARALLEL_STREAM, remat="selective")
    >>> config = gpt.GPTConfig(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16)
    >>> params = ft.init_params(ft.random.key(0), gpt.defs(config))
    >>> tokens = torch.ones(2, 8, dtype=torch.int64)
    >>> batch = {"tokens": tokens, "targets": tokens, "rows": torch.arange(2)}
    >>> gpt.loss(config, params, batch, options).shape
    torch.Size([])

    **Hooks** are plain functions, or a `Hook` where they have parameters of their own: then pass
    the same options to `gpt.defs` and `gpt.uses`. They see this rank's part of everything, as
    functions of `functron.nn` do, and are differentiated, rematerialised, scanned, traced and
    compiled with the model; collectives are theirs to issue. Decoders (`gpt`, and the text of
    `llava`) have a place for them.

    * ``attention(q, k, v, ...) -> out``: from queries ``[batch, seq, heads, head_dim]``, keys and
      values ``[batch, seq, kv_heads, ...]`` of this rank's heads, already normed and rotated, to
      ``[batch, seq, heads, v's last dim]``; causal. It is passed those of the keywords ``window``,
      ``cap``, ``segments``, ``positions``, ``sinks``, ``context`` and ``kernels`` that it has
      parameters for (see `nn.context_attention`; ``segments`` is None without packed documents),
      and ``layer``, the number of its layer, int64, if it has a parameter of that name; a
      run that needs another is refused. Where axes of the mesh split sequences, ranks exchange
      heads for sequence before and after it (Ulysses), so that it sees whole samples in order: four
      all-to-alls, if the heads divide over these ranks; with a parameter ``context`` it gets this
      rank's tokens instead, and communicates itself.
    * ``router(params, inputs) -> nn.moe.RouterOutput``: the experts of tokens, and a term of the
      loss; see `nn.moe.Router`.
    * ``mlp(params, x, *, activation, stream, kernels) -> y``: as `nn.mlp`, of layers without
      experts; x and y have spec `stream`. With a parameter ``layer`` it gets that number.
    * ``norm(params, x, *, eps, zero_centered, kernels) -> y``: as `nn.norm`, of the stream; norms
      of queries and keys are part of attention's projections and stay.
    * ``block(layer, params, x) -> x``, or ``(x, auxiliary)`` where there are experts: a whole
      block, in the place of `functron.models.decoder.transformer_block`, whose ten lines are made
      of the same methods of `layer` (`functron.models.decoder.Layer`): ``layer.norm``,
      ``layer.attention``, ``layer.feed_forward``, ``layer.drop``; ``layer.index`` is its number.
      Where axes of the mesh split
      sequences x has this rank's tokens, and a block that mixes or chooses tokens by anything but
      these methods is refused; with a parameter ``context`` it reaches across ranks itself.

    Attributes:
        stream: `gpt.STREAM` or `gpt.SEQUENCE_PARALLEL_STREAM`; or for sequences that tp need not
            divide, of 197 tokens say, ``P(DATA_AXES, Uneven((*CONTEXT_AXES, "tp"), 197))``.
        remat: activation checkpointing; see `Remat`.
        gather: how parameters that data axes split are gathered where they are used, block by
            block, and again in backward: with the specs of all parameters,
            ``param_specs(defs(config), rules(config, mesh))``.
        context: how attention reaches across the ranks that split sequences.
        expert_axes: the axes that experts are divided over; see `gpt.rules`.
        expert_room: for how many rows a rank's experts have room, as a multiple of balanced ones,
            of `functron.nn.moe.room.ROOMS`; 0 and None: for the worst case. Details of the loss say
            whether it was enough (`functron.nn.moe.room.overflowed`), unless it is None; where it
            was not, loss and gradients are of no use: compute them again with more.
        kernels: which operations CUDA kernels of functron compute; see `functron.ops.use`.
        matmul: the matrix products of attention's projections, feed-forward layers and experts:
            quantised ones are made by `functron.precision.quantised`.
        loss_chunk_tokens: compute the logits of so many of a rank's tokens at a time, and again in
            backward, to save memory; 0: of all, once.
        axes: the axes over which losses are summed; without one that splits samples, each rank
            along it has a loss of its own. Pass the same to `num_targets`, `value_and_grad` and,
            with those that split parameters, `sync_gradients`.
        adapters: the `functron.lora.LoRA` of the whole model, for stages of modules as they are.
        watch: measure the residual stream after every layer: ``stream`` of `Details`.
        attention, router, mlp, norm, block: see above; None: the model's own.

    Raises:
        ValueError: an unknown name of `remat`.
        TypeError: a hook is not a function.
    """

    stream: P = STREAM
    remat: Remat = "none"
    gather: Gather = WHOLE
    context: Context = RING
    expert_axes: tuple[str, ...] = ("ep",)
    expert_room: float | None = None
    kernels: Kernels = AUTO
    matmul: nn.Matmul = nn.MATMUL
    loss_chunk_tokens: int = 0
    axes: tuple[str, ...] = SAMPLE_AXES
    adapters: Any = None
    watch: bool = False
    attention: Callable | Hook | None = None
    router: Callable | Hook | None = None
    mlp: Callable | Hook | None = None
    norm: Callable | Hook | None = None
    block: Callable | Hook | None = None

    def __post_init__(self):
        found = [*choice_problems(self), *room_problems(self.expert_room)]
        if self.watch and uneven_length(self.stream) is not None:
            wanted = f"False with {self.stream}: padding would be measured too"
            found.append(Problem("watch", "True", wanted, "choose a length that ranks divide"))
        raise_problems("ModelOptions", found)
        for name in HOOKS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Hook) and not callable(value):
                found.append(Problem(name, repr(value), "a function, ft.Hook or None"))
            elif name != "attention" and isinstance(value, Hook) and value.cached is not None:
                fix = "leave it out: only attention keeps something between tokens"
                found.append(Problem(f"{name}.cached", "a function", "None", fix))
        raise_problems("ModelOptions", found, TypeError)

    @cached_property
    def seen_hooks(self) -> set[tuple]:
        """Hooks that were seen to mix nothing by themselves; see `refuse_mixing`."""
        return set()

    def hook(self, name: str) -> Hook | None:
        """The hook of this name, as a `Hook`; None where there is none."""
        value = getattr(self, name)
        return value if value is None or isinstance(value, Hook) else Hook(value)

    def require_only(self, family: str, *names: str) -> None:
        """Refuse options that a family does not read: all but the fields of these names.

        Raises:
            ValueError: a field that is none of these is not at its default; all are listed.
        """
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in names and value != field.default:
                fix = f"leave {field.name} out: {family} has no place for it"
                got = getattr(value, "__name__", None) or repr(value)
                found.append(Problem(f"options.{field.name}", got, "the default", fix))
        raise_problems(f"{family} cannot be run with these options", found)


DEFAULTS = ModelOptions()
"""Every option at its default."""


def keywords_of(function: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `offered` keywords that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in offered.items() if name in named}


def takes_layer(hook: Hook | None) -> bool:
    """Whether a hook has a parameter for the number of its layer."""
    return hook is not None and "layer" in inspect.signature(hook.apply).parameters


def check_gathered(name: str, size: int, wanted: int) -> None:
    """Raise ValueError where a parameter's dim of `size` has not been gathered to `wanted`."""
    if size != wanted:
        raise ValueError(
            f"forward: got parameters with {size} of {name}={wanted} on this rank; wanted all of "
            "them where they are used; fix: pass ft.ModelOptions(gather=ft.Gather(specs)), with "
            "the specs by which they are split"
        )


# --- functions of the user's own, where axes split sequences


def attention_keywords(function: Callable, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the user's attention is called with.

    Raises:
        ValueError: it has no parameter for one that this run needs; all are listed.
    """
    taken = keywords_of(function, given)
    found = []
    for name, none in (("window", 0), ("cap", 0), ("segments", None), ("sinks", None)):
        value = given.get(name, none)
        if name not in taken and (isinstance(value, Tensor) or value != none):
            got = f"a function without a parameter {name}, which this run needs"
            fix = f"let it take {name}, as nn.context_attention does"
            found.append(Problem("options.attention", got, f"{name} among them", fix))
    raise_problems("this attention cannot compute the model", found)
    return taken


def _select_own_rank(x: Tensor, dim: int) -> Tensor:
    """The rank's part of a dim of heads that are exchanged for sequence."""
    for axis in CONTEXT_AXES:
        x = own_part(x, x.shape[dim] // lax.axis_size(axis), dim, axis)
    return x


def _select_own_heads(repeats: int, x: Tensor, d: ParamDef) -> Tensor:
    """The part of a parameter that belongs to the heads that a rank has after the exchange."""
    for dim, axis in enumerate(d.axes):
        if axis == "kv_heads" and repeats > 1:
            x = x.repeat_interleave(repeats, dim)
        x = _select_own_rank(x, dim) if axis in ("heads", "kv_heads") else x
    return x


def own_attention(
    config: GPTConfig,
    hook: Hook,
    options: ModelOptions,
    params: tuple,
    given: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """The core of attention that a hook computes, of whole sequences unless it has ``context``.

    Raises:
        ValueError: the run needs a keyword that it has not, or heads do not divide over the ranks
            that split sequences.
    """
    given = {**given, "sinks": sinks, "context": options.context}
    taken = attention_keywords(hook.apply, given)
    ranks = lax.axis_size(CONTEXT_AXES)
    if "context" in taken or ranks == 1:
        return hook.apply(*params, q, k, v, **taken)
    if q.shape[2] % ranks:
        got = f"{q.shape[2]} heads on each rank"
        wanted = f"a multiple of the {ranks} ranks that split sequences"
        fix = "use fewer ranks of cp, or let it take context and reach across them itself"
        refuse("this attention cannot compute the model", "options.attention", got, wanted, fix)
    repeats = ranks // math.gcd(ranks, k.shape[2])  # just enough for every rank to have one
    k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
    q, k, v = (lax.all_to_all(x, CONTEXT_AXES, 2, 1, tiled=True) for x in (q, k, v))
    for name in ("segments", "positions"):
        if taken.get(name) is not None:
            dim = 0 if taken[name].dim() == 1 else 1
            taken[name] = lax.all_gather(taken[name], CONTEXT_AXES, axis=dim, tiled=True)
    if taken.get("sinks") is not None:
        taken["sinks"] = _select_own_rank(taken["sinks"], 0)
    if hook.defs is not None:
        params = (
            tree.map(functools.partial(_select_own_heads, repeats), *params, hook.defs(config)),
        )
    out = hook.apply(*params, q, k, v, **taken)
    return lax.all_to_all(out, CONTEXT_AXES, 1, 2, tiled=True)


def own_block(hook: Hook, options: ModelOptions) -> Callable:
    """The user's block as a function ``(layer, weights, x) -> (x, auxiliary or None)``.

    Where ranks have parts of the sequences, or of the batch, it is checked first: it may mix tokens
    only by the methods of its layer, depend on no token's place among a rank's, and mix no samples.
    With a parameter ``context``, for `ModelOptions.context`, it communicates itself, and nothing is
    checked.

    Raises:
        ValueError: (when called) it fails the check; or returns no auxiliary loss of its
            experts, or one where there are none.
    """
    given = keywords_of(hook.apply, {"context": options.context})
    apply = functools.partial(hook.apply, **given)

    def body(layer: Any, weights: dict, x: Tensor) -> tuple[Tensor, Any]:
        if not given:
            lengths: set[int] = set()

            def run(own: dict, tokens: Tensor) -> Tensor:
                out = apply(_OfEachToken.of(layer, lengths), own, tokens)
                return out[0] if isinstance(out, tuple) else out

            refuse_mixing("block", run, weights, x, options, lengths=lengths)
        out = apply(layer, weights, x)
        y, auxiliary = out if isinstance(out, tuple) else (out, None)
        if ("moe" in weights) != (auxiliary is not None):
            got = "no auxiliary loss" if auxiliary is None else "an auxiliary loss"
            wanted = "(x, auxiliary) of a block with experts, x of another"
            fix = "return what layer.feed_forward returns beside its result"
            refuse("the block of these options", "options.block", got, wanted, fix)
        return y, auxiliary

    return body


class _OfEachToken:
    """Methods of a layer as functions of each token alone, which record the number of tokens."""

    lengths: set[int]

    @classmethod
    def of(cls, layer: Any, lengths: set[int]) -> Any:
        """`layer`, with these methods in place of its own, which add to `lengths`."""
        made = object.__new__(type(cls.__name__, (cls, type(layer)), {}))
        made.__dict__.update(vars(layer), lengths=lengths, index=torch.tensor(0))
        return made

    def norm(self, weights: dict, name: str, x: Tensor) -> Tensor:
        return x / (1 + x.square().mean(-1, keepdim=True)).sqrt()

    def add_norm(self, weights: dict, name: str, x: Tensor, residual: Tensor) -> tuple:
        return self.norm(weights, name, x + residual), x + residual

    def attention(self, weights: dict, x: Tensor) -> Tensor:
        self.lengths.add(x.shape[SEQ_DIM])
        return x.tanh()

    def feed_forward(self, weights: dict, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.lengths.add(x.shape[SEQ_DIM])
        return x.tanh(), x.new_zeros(()) if "moe" in weights else None

    def drop(self, x: Tensor, which: int) -> Tensor:
        return x


def refuse_mixing(
    name: str,
    run: Callable[[tree.Tree, Tensor], Tensor],
    weights: tree.Tree,
    x: Tensor,
    options: ModelOptions,
    *,
    gathers: bool = False,
    lengths: Collection[int] = (),
) -> None:
    """Raise for a hook that mixes tokens or samples of which ranks have parts; once per shape.

    It is run on made-up numbers, so that nothing depends on data.

    Args:
        name: of the hook.
        run: ``(weights, tokens)`` to its results, of each token and sample alone.
        weights, x: its arguments.
        gathers: it gathers sequences that tp splits itself.
        lengths: of the sequences that it passed to methods of its layer.

    Raises:
        ValueError: a token's result depends on others, on its place among those of its rank, or on
            other samples.
    """
    splits = _OptionSplits.of(options.stream, gathers)
    if not any(splits) or (name, x.shape, splits) in options.seen_hooks:
        return
    seq = x.shape[SEQ_DIM]
    with aside(), enter(Scope()), torch.no_grad(), unwatched():
        own = tree.map(
            lambda leaf: _make_waves(leaf.shape[-1:], leaf.dtype).expand(leaf.shape), weights
        )
        first, one = _make_waves(x.shape[1:], x.dtype).expand(x.shape), functools.partial(run, own)
        alone = _passes(lambda: not splits.sequences or _is_alone(one, first))
        alone = alone and set(lengths) <= {seq}
        anywhere = _passes(lambda: not splits.sequences or _is_alike_anywhere(one, first))
        apart = _passes(lambda: not splits.samples or _is_apart(one, first))
    by_attention = "one of that token alone"
    if name == "block":
        by_attention = "one that depends on others by layer.attention alone"
    rows = [
        (alone, "choose or mix tokens among those of its own rank", "sequence", by_attention,
         f"a result of a token that depends on others, of which a rank has {seq}"),
        (anywhere, "go by the place of a token among those of its own rank", "sequence",
         "one that is the same at any place, in sequences of any length",
         f"a result of a token that depends on its place among the {seq} of a rank, or on that "
         "number"),
        (apart, "choose or mix samples among those of its own rank", "batch",
         "one that is of each sample alone",
         f"a result of a sample that depends on others, of which a rank has {x.shape[0]}"),
    ]  # fmt: skip
    for fine, does, what, wanted, got in rows:
        if fine:
            continue
        axes = splits.sequences if what == "sequence" else splits.samples
        named = " and ".join(map(repr, axes))
        leave = "cp, or sequence parallelism over tp," if what == "sequence" else named
        refuse(
            f"this {name} would {does}",
            f"options.{name}",
            f"{got}: {named} split the {what}",
            wanted,
            f"leave {leave} out; or let {'it' if name == 'block' else 'a block'} take context, and "
            f"bring together the {'tokens' if what == 'sequence' else 'samples'} of all ranks "
            "itself (lax.all_gather), or learn the places of its own (nn.context.own_positions)",
        )
    options.seen_hooks.add((name, x.shape, splits))


class _OptionSplits(NamedTuple):
    """The axes of several ranks that split sequences, and those that split samples."""

    sequences: tuple[str, ...]
    samples: tuple[str, ...]

    @classmethod
    def of(cls, stream: P, gathers: bool) -> _OptionSplits:
        """Those by which a stream is split here; of one that is gathered over tp the others."""
        both = sequence_axes(stream), entry_axes(stream[0]) if len(stream) else ()
        both = [a for a in both[0] if not (gathers and a == "tp")], both[1]
        return cls(*(tuple(a for a in axes if lax.axis_size(a) > 1) for axes in both))


def _passes(found: Callable[[], bool]) -> bool:
    """`found()`; True if it raises, as hooks may that do not take these numbers."""
    try:
        return found()
    except Exception:
        return True


def _is_alone(run: Callable[[Tensor], Tensor], first: Tensor) -> bool:
    """Whether tokens have the same results beside any others."""
    half = (torch.arange(first.shape[SEQ_DIM]) < first.shape[SEQ_DIM] // 2).view(-1, 1)
    # others with all scores above, all below, and all between those of what stays
    others = [factor * first[:, :1] for factor in (50.0, -50.0, 0.01)]
    for stays in (half, ~half):
        seen = [torch.where(stays, run(torch.where(stays, first, other)), 0) for other in others]
        if not all(_is_close(a, b) for a, b in itertools.pairwise(seen)):
            return False
    return True


def _is_alike_anywhere(run: Callable[[Tensor], Tensor], first: Tensor) -> bool:
    """Whether tokens have the same results in the second half of a sequence of twice the length."""
    one = first[:1]
    return _is_close(run(torch.cat([one, one], SEQ_DIM)), torch.cat([run(one)] * 2, SEQ_DIM))


def _is_apart(run: Callable[[Tensor], Tensor], first: Tensor) -> bool:
    """Whether a sample has the same results beside any other."""
    one = first[:1]
    beside = [run(torch.cat([one, factor * one.flip(SEQ_DIM)]))[:1] for factor in (50.0, 0.01)]
    return all(_is_close(run(one), out) for out in beside)


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, equal_nan=True)


def _make_waves(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Different numbers between -1 and 1, without random ones; zeros of other dtypes."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    steps = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.7 * steps * steps + steps).sin().view(shape).to(dtype)
