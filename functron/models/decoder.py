"""A decoder as a per-rank program, stage by stage: embedding, stacks of blocks, logits and loss.

Besides the loss of the next token it computes those of multi-token prediction (the modules of
DeepSeek-V3, each around a block of the model), and with `ModelOptions.watch` the size of the
residual stream after the embedding and after every layer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from functron import nn
from functron.core import compat, random, tree
from functron.core.errors import refuse
from functron.core.scopes import named_scope
from functron.core.tree import Tree
from functron.core.typing import Float, Key, Scalar, Tensor
from functron.models.config import GPTConfig
from functron.models.options import (
    DEFAULTS,
    LOAD,
    SAMPLE_AXES,
    Batch,
    ModelOptions,
    Sequence,
    check_gathered,
    check_length,
    check_positions,
    own_attention,
    own_block,
    refuse_mixing,
    takes_layer,
)
from functron.nn import context
from functron.nn.layers import name_columns, sequence_axes, uneven_length
from functron.nn.moe import FilledSums, RouterSums, moe, moe_defs
from functron.pipeline.partition import Part
from functron.precision import history_def
from functron.spmd import CONTEXT_AXES, P, params
from functron.spmd import collectives as lax
from functron.spmd.spec import spec_axes
from functron.transforms import Gather, policies
from functron.transforms import remat as rematerialise
from functron.transforms.capture import name_value, watched_scope
from functron.transforms.parameter_gather import without_codes
from functron.transforms.scan import ScanTurn, scan_in_turn

Rope = tuple[Tensor, Tensor]


class Auxiliary(NamedTuple):
    """The auxiliary loss and the statistics of layers of experts.

    Attributes:
        loss: a scalar whose psum over data and context axes is their auxiliary loss.
        sums: this rank's statistics; of several layers, with a leading dim of them.
    """

    loss: Scalar
    sums: RouterSums | FilledSums


def add_auxiliary(before: Auxiliary | None, new: Auxiliary, start: int, total: int) -> Auxiliary:
    """The sum of both, with a row of statistics for each of all `total` layers of experts.

    `new` has rows for some of them, of which the first is layer `start`.
    """
    mine = Auxiliary(new.loss, tree.map(lambda rows: _pad_rows(rows, start, total), new.sums))
    return mine if before is None else tree.map(torch.add, before, mine)


def _pad_rows(rows: Tensor, start: int, total: int) -> Tensor:
    """`total` rows, zeros but for these from `start` on."""
    if rows.shape[0] == total:
        return rows
    after = rows.new_zeros(total - start - rows.shape[0], *rows.shape[1:])
    return torch.cat([rows.new_zeros(start, *rows.shape[1:]), rows, after])


# --- parameters


def block_defs(config: GPTConfig, *, experts: bool, options: ModelOptions = DEFAULTS) -> dict:
    """Defs ``{"attention_norm", "attention", "mlp_norm", "mlp"}``, or "moe" for the last.

    Norms after sublayers are "attention_out_norm" and "mlp_out_norm", beside those or in their
    place; those without parameters are left out. Hooks with defs of their own have these instead.
    """
    c, dtype = config, config.torch_dtype
    if own := _own_defs(config, options, "block"):
        return own
    out_stddev = c.init_stddev / math.sqrt(2 * c.num_layers)
    stddevs = {"stddev": c.init_stddev, "out_stddev": out_stddev, "dtype": dtype}
    norm = norm_defs(config, options)
    block: dict = {name: norm for name in norm_names(config) if norm}
    block["attention"] = nn.mla_defs(c, **stddevs) if c.kv_rank else nn.attention_defs(c, **stddevs)
    if own := _own_defs(config, options, "attention"):
        block["attention"]["core"] = own
    if experts:
        assert c.moe is not None
        router = _own_defs(config, options, "router")
        kind = {"gated": c.gated, "fused": c.fused_projections is True, **stddevs}
        block["moe"] = moe_defs(c.moe, c.embed_dim, router=router, **kind)
        return block
    own = _own_defs(config, options, "mlp")
    kind = {"gated": c.gated, "fused": c.fused_projections is True, **stddevs}
    mlp = nn.mlp_defs(c.embed_dim, c.mlp_dim, bias=c.bias or c.mlp_bias, **kind)
    if c.activation == "xielu":
        mlp["activation"] = nn.xielu_defs(dtype)
    return block | {"mlp": own or mlp}


HISTORIES = "histories"
"""The entry of a block's parameters that has the histories of its quantised products."""


def with_histories(config: GPTConfig, defs: dict) -> dict:
    """`defs` with the histories of quantised products with ``scaling=delayed``, in every block.

    ``{"histories": {"attention": {"q", ...}, "mlp"?: {...}, "experts"?: {...}}}``, beside the other
    parameters of a block; see `functron.precision.history_def`. All else is the same.
    """
    made = {name: {**defs[name], HISTORIES: _histories(defs[name])} for name in config.stacks}
    if config.mtp_depth:
        block = defs["mtp"]["block"]
        made["mtp"] = {**defs["mtp"], "block": {**block, HISTORIES: _histories(block)}}
    return {**defs, **made}


def _histories(block: dict) -> dict:
    experts = block.get("moe", {})
    mlp = block.get("mlp", experts.get("shared"))
    parts = {"attention": block["attention"], "mlp": mlp, "experts": experts.get("experts")}
    found: dict = {}
    for part, layers in parts.items():
        for name, layer in (layers or {}).items():
            if isinstance(layer, dict) and "w" in layer:
                count, each, *_ = layer["w"].shape
                own = history_def(count, experts=each if part == "experts" else None)
                names = params.JOINED.get(name, (name,))
                found.setdefault(part, {}).update(dict.fromkeys(names, own))
    return found


def _own_defs(config: GPTConfig, options: ModelOptions, name: str) -> dict | None:
    hook = options.hook(name)
    return None if hook is None or hook.defs is None else hook.defs(config)


def norm_names(config: GPTConfig) -> tuple[str, ...]:
    """The names of a block's norms in its parameters, which not all kinds of norms have."""
    if config.sublayer_norms == "shared":
        return ("attention_norm",)
    places = {"before": ("",), "after": ("_out",), "both": ("", "_out")}[config.sublayer_norms]
    return tuple(f"{name}{place}_norm" for name in ("attention", "mlp") for place in places)


def norm_defs(config: GPTConfig, options: ModelOptions = DEFAULTS) -> dict:
    """Defs of a norm of the stream; empty where it has no parameters."""
    hook = options.hook("norm")
    if hook is not None and hook.defs is not None:
        return hook.defs(config)
    c, zero_centered = config, config.zero_centered_norm
    return nn.norm_defs(
        c.embed_dim, c.norm, axis="embed", dtype=c.torch_dtype, zero_centered=zero_centered
    )


def own_norm(config: GPTConfig, options: ModelOptions, weights: dict, name: str) -> dict:
    """The parameters of a norm; ``{}`` for kinds that have none."""
    return weights[name] if norm_defs(config, options) else {}


def norm(config: GPTConfig, options: ModelOptions, weights: dict, x: Tensor) -> Tensor:
    """A norm of the stream, in the dtype that sublayers compute in."""
    hook = options.hook("norm")
    apply = nn.norm if hook is None else hook.apply
    if config.fp32_residual:
        weights = tree.map(lambda w: w.to(x.dtype), weights)
    given = _norm_options(config, options)
    if hook is not None:
        refuse_mixing("norm", functools.partial(apply, **given), weights, x, options)
    y = apply(weights, x, **given)
    return y.to(options.gather.compute_dtype or config.torch_dtype) if config.fp32_residual else y


def _cast_to_stream(config: GPTConfig, x: Tensor) -> Tensor:
    """x in the dtype of the residual stream."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if config.fp32_residual else x


def _norm_options(config: GPTConfig, options: ModelOptions) -> dict:
    zero_centered = config.zero_centered_norm
    return {"eps": config.norm_eps, "zero_centered": zero_centered, "kernels": options.kernels}


# --- the program


def dropout(
    config: GPTConfig, sequence: Sequence, options: ModelOptions, x: Tensor, key: Tensor | None
) -> Tensor:
    """Dropout on the stream or on what is added to it; none without a key."""
    where = {"rows": sequence.rows, "stream": options.stream, "positions": sequence.slots}
    return nn.dropout(x, key, rate=config.dropout, places=sequence.places, **where)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a decoder, for its block; methods take the parameters of the whole block.

    Attributes:
        config: the architecture.
        options: of the model.
        sequence: this rank's tokens.
        rope: tables of this layer's rotary positions; None: it has none.
        window: how many keys a query sees; 0: all before it; an int64 scalar where layers differ.
        keys: four, of dropout after attention and after the feed-forward layer, of jitter, and of
            products that draw random numbers.
        index: the number of the layer in the model, int64; None where no hook asks for it.
        load: the row of `Sequence.load` of a layer of experts; None: there is none.
    """

    config: GPTConfig
    options: ModelOptions
    sequence: Sequence
    rope: Rope | None
    window: int | Tensor
    keys: tuple[Tensor | None, ...]
    index: Tensor | None = None
    load: Tensor | None = None

    def norm(self, weights: dict, name: str, x: Tensor) -> Tensor:
        """The norm of that name, of `norm_names`; x itself where the architecture has none."""
        if name not in norm_names(self.config):
            return x
        own = own_norm(self.config, self.options, weights, name)
        return norm(self.config, self.options, own, x)

    def add_norm(self, weights: dict, name: str, x: Tensor, residual: Tensor) -> tuple:
        """``(norm(x + residual), x + residual)``, by kernels in one pass."""
        apart = self.options.norm is not None or self.config.fp32_residual
        if name not in norm_names(self.config) or apart:
            total = residual + x
            return self.norm(weights, name, total), total
        own = own_norm(self.config, self.options, weights, name)
        return nn.add_norm(own, x, residual, **_norm_options(self.config, self.options))

    def attention(self, weights: dict, x: Tensor) -> Tensor:
        """Attention of the normed stream: projections, rotary positions, core."""
        config, options, matmul = self.config, self.options, self.matmul(weights)
        weights = weights["attention"]
        check_gathered("embed_dim", weights["out"]["w"].shape[-1], config.embed_dim)
        core = self._make_core(weights)
        core = rematerialise(core) if options.remat == "selective" else core
        given = {"stream": options.stream, "core": self._temper(core), "kernels": options.kernels}
        given["matmul"] = matmul
        if not config.kv_rank:
            return nn.self_attention(weights, x, config, rope=self.rope, **given)
        assert self.rope is not None
        return nn.mla(weights, x, config, rope=self.rope, **given)

    def matmul(self, weights: dict) -> nn.Matmul:
        """The functions that compute this layer's products."""
        made, lead = _with_runs(self.options.matmul, self.options), self.options.stream
        if made.draws:
            over = tuple(a for a in sequence_axes(lead) if a in CONTEXT_AXES)
            index = (self.sequence.rows, self.sequence.slots)
            own = {"key": self.keys[3], "rows": P(lead[0], over), "index": index}
            return made._replace(linear=functools.partial(made.linear, **own))
        if made.remembers and HISTORIES in weights:
            parts = weights[HISTORIES].items()
            known = {f"{part}/{name}": x for part, layers in parts for name, x in layers.items()}
            both = (functools.partial(f, histories=known) for f in (made.linear, made.grouped))
            return made._replace(**dict(zip(("linear", "grouped"), both, strict=True)))
        return made

    def _temper(self, core: Callable) -> Callable:
        """`core` of queries times their `GPTConfig.temperature`."""
        config, places = self.config, self.sequence.positions
        if not config.temperature:
            return core
        grown = torch.log1p(torch.floor(places / config.temperature_seq))
        factor = (1 + config.temperature * grown)[..., None, None]

        def tempered(q: Tensor, *rest: Tensor, **how: Any) -> Tensor:
            return core(q * factor.to(q.dtype), *rest, **how)

        return tempered

    def _make_core(self, weights: dict) -> Callable:
        hook, sequence, options = self.options.hook("attention"), self.sequence, self.options
        window, cap = self.window, self.config.score_cap
        params = () if hook is None or hook.defs is None else (weights["core"],)
        own = {"layer": self.index} if takes_layer(hook) else {}
        if sequence.attend is not None:
            return functools.partial(sequence.attend, *params, window=window, cap=cap, **own)
        if hook is None:
            return sequence.core(options.context, window, options.kernels, cap)
        given = {"window": window, "cap": cap, "kernels": options.kernels}
        given |= {"positions": sequence.positions, "segments": sequence.segments, **own}
        return functools.partial(own_attention, self.config, hook, options, params, given)

    def feed_forward(self, weights: dict, x: Tensor) -> tuple[Tensor, Auxiliary | None]:
        """The feed-forward layer of the normed stream, or experts where `weights` have "moe"."""
        options = self.options
        if "moe" in weights:
            own = (self.options, self.keys[2], self.matmul(weights), self.load)
            return _run_experts(self.config, weights["moe"], x, self.sequence, *own)
        hook, activation = options.hook("mlp"), self.config.activation
        given = {"stream": options.stream, "kernels": options.kernels}
        if hook is not None:
            given["activation"], numbered = activation, takes_layer(hook)
            alone = {**given, "stream": P()} | ({"layer": torch.tensor(0)} if numbered else {})
            whole = functools.partial(hook.apply, **alone)
            refuse_mixing("mlp", whole, weights["mlp"], x, options, gathers=True)
            own = {"layer": self.index} if numbered else {}
            return hook.apply(weights["mlp"], x, **given, **own), None
        assert activation != "clamped_swiglu"  # of experts alone
        given["matmul"] = self.matmul(weights)
        return nn.mlp(weights["mlp"], x, activation=activation, **given), None

    def drop(self, x: Tensor, which: int) -> Tensor:
        """The summand of the stream: `residual_scale` times x, with dropout.

        `which` is 0 after attention, 1 after the feed-forward layer.
        """
        x = x * self.config.residual_scale if self.config.residual_scale != 1 else x
        return dropout(self.config, self.sequence, self.options, x, self.keys[which])


def _with_runs(matmul: nn.Matmul, options: ModelOptions) -> nn.Matmul:
    """These products, told how many runs of consecutive tokens a rank has."""
    runs = options.context.runs
    if matmul is nn.MATMUL or runs == 1:
        return matmul
    return matmul._replace(linear=functools.partial(matmul.linear, runs=runs))


def transformer_block(layer: Layer, weights: dict, x: Tensor) -> tuple[Tensor, Auxiliary | None]:
    """The stream after attention and a feed-forward layer, or experts, each with its residual.

    With `GPTConfig.parallel_residual` both read the stream before the block. Norms are before or
    after these as `GPTConfig.sublayer_norms` has it; `ModelOptions.block` takes a function of the
    same arguments.

    Names of values, for `functron.capture`, with the stack and the row before them, as
    ``blocks/3/attention/out``: ``attention/q``, ``k``, ``v`` and ``heads`` (which the last
    projection takes), ``attention/out`` and ``mlp/out`` or ``moe/out`` (which are added to the
    stream), ``mlp/hidden``, and the stream after the block, ``out``. Around the blocks there are
    ``embed/out``, ``norm/out`` and the logits, ``unembed/out``.
    """
    stream = layer.options.stream
    with named_scope("attention"):
        normed = layer.norm(weights, "attention_norm", x)
        y = layer.attention(weights, normed)
        y = layer.drop(layer.norm(weights, "attention_out_norm", y), 0)
        y = name_value(y, "out", stream)
    with named_scope("moe" if "moe" in weights else "mlp"):
        if layer.config.parallel_residual:
            shared = layer.config.sublayer_norms == "shared"
            y, x = normed if shared else layer.norm(weights, "mlp_norm", x), x + y
        else:
            y, x = layer.add_norm(weights, "mlp_norm", y, x)
        y, auxiliary = layer.feed_forward(weights, y)
        y = layer.norm(weights, "mlp_out_norm", y)
        return x + name_value(layer.drop(y, 1), "out", stream), auxiliary


def block(config: GPTConfig, sequence: Sequence, options: ModelOptions, gather: Gather) -> Callable:
    """``(x, (parameters, key, own)) -> (x, Auxiliary or None)``: one block, for `scan`.

    Of `patterns`, "own" is the row of that layer.

    Args:
        config: the architecture; a block whose parameters have "moe" is one of experts.
        sequence: the rank's tokens.
        options: of the whole model.
        gather: of one block's parameters.
    """
    window = 0 if config.global_every else config.window  # else each row has its own
    ropes = _make_ropes(config, sequence, gather.compute_dtype or config.torch_dtype)
    hook = options.hook("block")
    body = transformer_block if hook is None else own_block(hook, options)

    def once(weights: dict, x: Tensor, key: Tensor | None, own: dict) -> Any:
        keys: tuple[Tensor | None, ...] = (None,) * 4
        if key is not None:
            drawn = random.fold_in(key, 3) if options.matmul.draws else None
            keys = (*random.split(key, 3).unbind(0), drawn)
        reach, rope = own.get("window", window), _select_rope(ropes, own)
        rest = (own.get("layer"), own.get("load"))
        return body(Layer(config, options, sequence, rope, reach, keys, *rest), weights, x)

    gathered = run_gathered(once, options, gather)

    def step(x: Tensor, row: tuple) -> tuple[Tensor, Auxiliary | None]:
        # torch's products read no codes
        weights = without_codes(row[0]) if options.matmul is nn.MATMUL else row[0]
        x, auxiliary = gathered(weights, x, *row[1:])
        return name_value(x, "out", options.stream), auxiliary

    return step


def _run_experts(
    config: GPTConfig,
    weights: dict,
    x: Tensor,
    sequence: Sequence,
    options: ModelOptions,
    key: Tensor | None,
    matmul: nn.Matmul,
    load: Tensor | None,
) -> tuple[Tensor, Auxiliary]:
    assert config.moe is not None
    assert config.activation != "xielu"
    tokens, targets, hook = sequence.tokens, sequence.targets, options.hook("router")
    counted = torch.ones_like(tokens) if targets is None else (targets != nn.IGNORE_INDEX).long()
    places, rows = sequence.slots.expand_as(tokens), sequence.rows
    if sequence.places is not None:  # in all samples
        places, rows = sequence.places, torch.zeros_like(rows)
    counted, places = (nn.stream_positions(x, options.stream, each) for each in (counted, places))
    y, share, sums = moe(
        weights,
        x,
        config.moe,
        activation=config.activation,
        stream=options.stream,
        axes=options.expert_axes,
        room=options.expert_room,
        key=key,
        rows=rows,
        positions=places,
        counted=counted != 0,
        kernels=options.kernels,
        matmul=matmul,
        router=None if hook is None else hook.apply,
        load=load,
    )
    return y, Auxiliary(share, sums)


def tell_load(batch: Batch, found: Details) -> Batch:
    """`batch` with the load of its experts, as a first pass over all microbatches `found` it.

    For `functron.transforms.informed`, under `nn.moe.MoEConfig.aux` "global".
    """
    load = found["routers"].load
    return {**batch, LOAD: load.expand(batch["tokens"].shape[0], *load.shape)}


def patterns(config: GPTConfig, device: torch.device, options: ModelOptions) -> dict[str, Tensor]:
    """Differences between layers of one stack, beside parameters.

    Returns:
        "layer", int64 ``[num_layers]``, their numbers, if a hook asks for them;
        "window", int64 ``[num_layers]``, if some have one and others not; "unrotated", bool
        ``[num_layers]``, if some have no rotary positions.
    """
    found = {}
    if config.global_every:
        found["window"] = compat.constant(config.windows, device)
    if config.nope_every:
        found["unrotated"] = compat.constant(config.unrotated, device)
    if _numbers_layers(options):
        found["layer"] = torch.arange(config.num_layers, device=device)
    return found


def _numbers_layers(options: ModelOptions) -> bool:
    return options.block is not None or any(
        takes_layer(options.hook(x)) for x in ("attention", "mlp")
    )


def _make_ropes(config: GPTConfig, sequence: Sequence, dtype: torch.dtype) -> tuple[Rope, ...]:
    """The tables of layers, and those of layers with a window if they differ."""
    if config.positions != "rope":
        return ()
    scaling, positions = config.rope_scaling, sequence.positions
    size = config.rope_head_dim if config.kv_rank else config.rotated_dims
    sections = config.rope_sections
    tables = (nn.rope_table(positions, size, config.rope_theta, scaling, dtype, sections),)
    if not config.local_rope_theta:
        return tables
    local = nn.rope_table(positions, size, config.local_rope_theta, None, dtype, sections)
    return (*tables, local) if config.global_every else (local,)


def _select_rope(ropes: tuple[Rope, ...], own: dict) -> Rope | None:
    """The tables of a layer, by its row of `patterns`."""
    if not ropes:
        return None
    cos, sin = ropes[0]
    if len(ropes) > 1 and "window" in own:
        everywhere = own["window"] == 0
        cos, sin = (torch.where(everywhere, *both) for both in zip(*ropes, strict=True))
    if "unrotated" in own:  # by no angle
        cos, sin = torch.where(own["unrotated"], 1, cos), torch.where(own["unrotated"], 0, sin)
    return cos, sin


Details = dict[str, Any]
"""The terms of a loss: sums over the batch of all ranks.

* ``targets``: int64, how many count;
* ``next_token``: the sum of their losses;
* ``ahead``: ``[depth]``, the sums of the losses of tokens further ahead, if any are predicted;
* ``routers``: `nn.moe.RouterSums`, a row for each layer of experts, if there are any; or
  `nn.moe.FilledSums`;
* ``stream``: ``squares``, the sums over all tokens of the mean square of the residual stream after
  the embedding and after each layer, and ``count``, the number of tokens; if they were asked for.
"""


class Activations(NamedTuple):
    """The results of layers beside the stream, where its size is measured.

    Attributes:
        auxiliary: of experts, if there are any.
        squares: sums over this rank's tokens of the mean square of the stream: after the embedding,
            and after each of all layers, 0 for later ones.
    """

    auxiliary: Auxiliary | None
    squares: Tensor


StageOutput = Tensor | tuple[Tensor, Auxiliary | Activations]
"""The result of a stage of a pipeline: the stream, or a pair of it and auxiliary results."""


def draws(config: GPTConfig, options: ModelOptions) -> bool:
    """Whether the model, or a hook, may draw random numbers."""
    own = any(options.hook(name) is not None for name in ("block", "router"))
    return config.random or own or options.matmul.draws


def drawing_key(config: GPTConfig, options: ModelOptions, key: Key | None) -> Key | None:
    """`key` if the model, or a hook, may draw random numbers; else None."""
    return key if draws(config, options) else None


def stream(
    config: GPTConfig,
    part: Part,
    weights: dict,
    received: StageOutput | None,
    sequence: Sequence,
    options: ModelOptions,
    key: Key | None,
) -> tuple[Tensor, Auxiliary | Activations | None]:
    """The residual stream after the layers of `part`, and the auxiliary results so far."""
    longest = config.max_seq if sequence.segments is None else None
    check_length(sequence.tokens.shape[1], longest, options.stream)
    _check_uneven(config, options)
    check_positions(sequence, config.rope_sections, options.context)
    x, beside = received if isinstance(received, tuple) else (received, None)
    auxiliary, squares = beside if isinstance(beside, Activations) else (beside, None)
    key = drawing_key(config, options, key)
    keys = None if key is None else random.split(key, config.num_layers + 1)
    if part.embed:
        with named_scope("embed"):
            x = embedded(config, weights, sequence, options, None if keys is None else keys[-1])
            x = name_value(x, "out", options.stream)
        if options.watch:
            squares = _pad_rows(_squares(x).reshape(1), 0, 1 + config.num_layers)
    assert x is not None
    x, found = _run_layers(config, part, weights, x, sequence, options, keys)
    for name, (rows, new) in found.items():
        if options.watch:
            new, sizes = new
            sizes = _put_rows(sizes, [1 + at for at in rows], 1 + config.num_layers)
            squares = sizes if squares is None else squares + sizes
        if new is not None:
            new = Auxiliary(new.loss.sum(), new.sums)
            first = config.stacks[name].index(rows[0])
            auxiliary = add_auxiliary(auxiliary, new, first, config.num_routers)
    return x, auxiliary if squares is None else Activations(auxiliary, squares)


def _run_layers(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Tensor,
    sequence: Sequence,
    options: ModelOptions,
    keys: Tensor | None,
) -> tuple[Tensor, dict[str, tuple[list[int], Any]]]:
    """The stream after the layers of `part`; by stack, these and what else they return, stacked."""
    differing, runs = patterns(config, x.device, options), config.runs(part.layers)
    made: dict[tuple[str, bool], Callable] = {}
    turns = []
    for name, run in runs:
        of_layers = [options.matmul.of_layer(at, config.num_layers) for at in run]
        for plain, same in itertools.groupby(of_layers, lambda matmul: matmul is nn.MATMUL):
            alike = list(same)
            if (name, plain) not in made:
                gather = options.gather.at(name).rows()
                layer = block(config, sequence, replace(options, matmul=alike[0]), gather)
                made[name, plain] = _with_stream_size(layer) if options.watch else layer
            turns.append(ScanTurn(name, len(alike), made[name, plain]))
    xs, first, rows = {}, {}, {}
    for name in dict.fromkeys(name for name, _ in runs):
        mine = [run for stack, run in runs if stack == name]
        rows[name] = [at for run in mine for at in run]
        own = {what: _take_runs(values, mine) for what, values in differing.items()}
        first[name] = config.stacks[name].index(rows[name][0])
        if sequence.load is not None and name == "blocks":
            own["load"] = sequence.load[first[name] : first[name] + len(rows[name])]
        xs[name] = (weights[name], None if keys is None else _take_runs(keys, mine), own)
    if not turns:
        return x, {}
    x, found = scan_in_turn(turns, x, xs, first)
    return x, {name: (rows[name], new) for name, new in found.items()}


def _take_runs(values: Tensor, runs: list[range]) -> Tensor:
    """The rows of values of all layers that are of these runs of them."""
    pieces = [values[run.start : run.stop] for run in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _put_rows(values: Tensor, places: list[int], total: int) -> Tensor:
    """`total` rows, zeros but for these values at rising `places`."""
    runs = {}
    for row, place in enumerate(places):  # a piece for each run of consecutive ones
        runs.setdefault(place - row, []).append(row)
    pieces = []
    for shift, rows in runs.items():
        first, last = rows[0], rows[-1] + 1
        pieces.append(_pad_rows(values[first:last], first + shift, total))
    return functools.reduce(torch.add, pieces)


def _check_uneven(config: GPTConfig, options: ModelOptions) -> None:
    """Refuse padded parts of sequences where something counts their tokens."""
    if uneven_length(options.stream) is None:
        return
    got, fix = f"{options.stream}, with padding", "choose a length that these ranks divide"
    if config.moe is not None:
        wanted = "tokens alone, as experts are chosen for each token"
        refuse("the sequence cannot be split", "options.stream", got, wanted, fix)
    if config.kv_rank and options.matmul.linear is not nn.MATMUL.linear:
        wanted = "tokens alone, as quantised products of latents scale by the largest"
        refuse("the sequence cannot be split", "options.stream", got, wanted, fix)


def embedded(
    config: GPTConfig,
    weights: dict,
    sequence: Sequence,
    options: ModelOptions,
    key: Tensor | None = None,
) -> Tensor:
    """The residual stream before the first layer; `key` is of dropout."""
    x = embed_tokens(config, weights, sequence.tokens, options, config.embed_scale)
    return positioned(config, weights, sequence, options, x, key)


def positioned(
    config: GPTConfig,
    weights: dict,
    sequence: Sequence,
    options: ModelOptions,
    x: Tensor,
    key: Tensor | None,
) -> Tensor:
    """Embeddings with learned positions, where the model has them, and dropout."""
    if config.positions == "learned":
        table = options.gather.at("positions")(weights["positions"])
        x = nn.add_positions(x, table, stream=options.stream, positions=sequence.positions)
    return dropout(config, sequence, options, _cast_to_stream(config, x), key)


def logits(config: GPTConfig, weights: dict, x: Tensor, options: ModelOptions) -> Tensor:
    """The logits of the stream after all layers, in the order that the batch came in."""
    with named_scope("norm"):
        x = _norm_last(config, weights, x, options)
    with named_scope("unembed"):
        x = nn.gather_sequence(_scale_stream(config, x), options.stream)
        if options.context.order == "zigzag":
            x = context.to_contiguous(x, 1)
        own: Any = {"name": "unembed", "matmul": options.matmul.of_logits}
        x = nn.column_parallel(x, *_unembedding(config, weights, options), **own)
        return name_columns(_cap_logits(config, x), "out", options.stream)


def loss(
    config: GPTConfig,
    part: Part,
    weights: dict,
    received: StageOutput | None,
    sequence: Sequence,
    options: ModelOptions,
    key: Key | None,
) -> Any:
    """`stream`, and at the last stage the loss.

    Returns:
        A `StageOutput`, or at the last stage the sum of the losses over the batch of all ranks;
        with layers of experts, tokens further ahead or ``options.watch``, a pair of that and
        `Details`.
    """
    x, beside = stream(config, part, weights, received, sequence, options, key)
    if not part.loss:
        return x if beside is None else (x, beside)
    targets = sequence.targets
    if targets is None:
        fix = "put them into the batch"
        refuse("the batch has no loss", "targets", "nothing", "the next token of each", fix)
    if config.logit_cap and options.loss_chunk_tokens:
        got = f"{options.loss_chunk_tokens} with logit_cap"
        wanted = "0: capped logits are made at once"
        refuse("the loss of capped logits", "loss_chunk_tokens", got, wanted, "leave it out")
    if options.matmul.logits and options.loss_chunk_tokens:
        got = f"{options.loss_chunk_tokens} with products of logits"
        wanted = "0: the chunked loss makes logits again in blocks of columns, by torch's products"
        fix = "leave it out, or logits=low"
        refuse("the loss of quantised logits", "loss_chunk_tokens", got, wanted, fix)
    with named_scope("norm"):
        normed = _norm_last(config, weights, x, options)
    with named_scope("unembed"):
        table = _unembedding(config, weights, options)

    def losses(x: Tensor, targets: Tensor, z_loss: float = 0.0, table: _Table = table) -> Tensor:
        given = {"vocab_size": config.vocab_size, "z_loss": z_loss, "kernels": options.kernels}
        with named_scope("unembed"):
            x = nn.gather_sequence(_scale_stream(config, x), options.stream)
            if chunk := options.loss_chunk_tokens:
                x, matrix = _join_bias(x, *table)
                return nn.linear_cross_entropy(x, matrix, targets, chunk_tokens=chunk, **given)
            matmul = _with_runs(options.matmul.of_logits, options)
            out = nn.column_parallel(x, *table, name="unembed", matmul=matmul)
            out = name_columns(_cap_logits(config, out), "out", options.stream)
        with named_scope("loss"):
            return nn.cross_entropy(out, targets, **given)

    first = losses(normed, targets, config.z_loss).sum()
    if not config.has_details and not options.watch:
        with named_scope("loss"):
            return lax.psum(first, options.axes)
    auxiliary, squares = beside if isinstance(beside, Activations) else (beside, None)
    details: Details = {"targets": (targets != nn.IGNORE_INDEX).sum(), "next_token": first}
    share = first
    if config.mtp_depth:
        with named_scope("ahead"):
            head = functools.partial(losses, table=lax.stop_gradient(table))
            details["ahead"], routers = _predict_ahead(
                config, weights, normed, sequence, options, key,
                head=head if config.mtp_detached else losses,
            )  # fmt: skip
        share = share + config.mtp_weight * details["ahead"].mean()
        for depth, each in enumerate(routers, config.num_routers - config.mtp_depth):
            row = Auxiliary(each.loss, tree.map(lambda s: s[None], each.sums))
            auxiliary = add_auxiliary(auxiliary, row, depth, config.num_routers)
    if auxiliary is not None:
        share = share + auxiliary.loss
        details["routers"] = auxiliary.sums
    total = lax.psum(share, options.axes)
    details = lax.psum(lax.stop_gradient(details), options.axes)
    if squares is not None:
        details["stream"] = _sum_squares(squares, x, options)
    return total, details


def _norm_last(config: GPTConfig, weights: dict, x: Tensor, options: ModelOptions) -> Tensor:
    own = own_norm(config, options, weights, "norm")
    x = norm(config, options, options.gather.at("norm")(own) if own else own, x)
    return name_value(x, "out", options.stream)


def _scale_stream(config: GPTConfig, x: Tensor) -> Tensor:
    """The stream, times the factors of logits, muP's and that of the model."""
    factor = config.logit_scale / config.mup_width
    return x if factor == 1 else x * factor


def _cap_logits(config: GPTConfig, logits: Tensor) -> Tensor:
    """cap tanh(logits / cap), if there is a cap."""
    cap = config.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits


_Table = tuple[Tensor, Tensor | None]
"""The matrix of logits, and their bias."""


def _unembedding(config: GPTConfig, weights: dict, options: ModelOptions) -> _Table:
    matrix = gather_unembedding(weights, options.gather, tied=config.tied)
    bias = None
    if config.unembed_bias:
        bias = options.gather.at("unembed_bias")(weights["unembed_bias"])
    return matrix.mT if config.tied else matrix, bias


_WIDER = 16  # rows that keep the inner dim a multiple of what products of 16 bits want


def _join_bias(x: Tensor, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Factors whose product is x matrix + bias: the bias as a row that a one multiplies."""
    if bias is None:
        return x, matrix
    row = (torch.arange(_WIDER, device=x.device) == 0).to(x.dtype)
    ones = row.expand(*x.shape[:-1], _WIDER)
    return torch.cat([x, ones], -1), torch.cat([matrix, row.unsqueeze(-1) * bias], 0)


# --- tokens further ahead


def ahead_defs(config: GPTConfig, options: ModelOptions = DEFAULTS) -> dict:
    """Defs of all modules, stacked: those of `nn.multi_token_defs`, and a block."""
    norms = {"kind": config.norm, "zero_centered": config.zero_centered_norm}
    stddev, dtype = config.init_stddev, config.torch_dtype
    module = nn.multi_token_defs(config.embed_dim, stddev=stddev, dtype=dtype, **norms)
    module["block"] = block_defs(config, experts=config.moe is not None, options=options)
    return params.stack(module, config.mtp_modules)


def _predict_ahead(
    config: GPTConfig,
    weights: dict,
    x: Tensor,
    sequence: Sequence,
    options: ModelOptions,
    key: Key | None,
    *,
    head: Callable,
) -> tuple[Float[Tensor, " depth"], list[Auxiliary]]:
    """The sums of the losses of each module over this rank's targets, and those of its experts.

    x is the normed stream after all layers; `head` as in `nn.multi_token`.
    """
    assert sequence.targets is not None
    key = drawing_key(config, options, key)
    after = options.matmul.of_layer(config.num_layers, config.num_layers)
    inner = replace(options, matmul=after)
    gather, stacked = options.gather.at("mtp").rows(), weights["mtp"]
    rows = [tree.map(lambda w, k=k: w[k], stacked) for k in range(config.mtp_modules)]
    rows = rows * config.mtp_depth if config.mtp_repeated else rows
    detach = lax.stop_gradient if config.mtp_detached else lambda value: value
    outer = [
        {name: gather.at(name)(part) for name, part in row.items() if name != "block"}
        for row in rows
    ]

    def layer(depth: int, x: Tensor, tokens: Tensor, targets: Tensor) -> tuple:
        here = sequence._replace(tokens=tokens, targets=targets)
        own = None if key is None else random.fold_in(key, config.num_layers + 1 + depth)
        made = block(config, here, inner, gather.at("block"))
        with watched_scope(depth):
            at = config.num_layers + depth
            about = {"layer": compat.constant(at, x.device)} if _numbers_layers(options) else {}
            if sequence.load is not None:
                about["load"] = sequence.load[depth - config.mtp_depth]
            y, auxiliary = made(_cast_to_stream(config, x), (rows[depth]["block"], own, about))
        return y.to(x.dtype), auxiliary

    losses, found = nn.multi_token(
        outer,
        detach(x),
        sequence.tokens,
        sequence.targets,
        embed=lambda tokens: detach(
            embed_tokens(config, weights, tokens, options, config.embed_scale)
        ),
        block=layer,
        head=head,
        norm=functools.partial(nn.norm, **_norm_options(config, options)),
        order=options.context.order,
        segments=sequence.segments,
        positions=sequence.positions,
    )
    return losses, [each for each in found if each is not None]


# --- the size of the residual stream


def watched_names(config: GPTConfig) -> tuple[str, ...]:
    """The names of the rows of `Activations.squares`: ``embed``, ``blocks/0``, ``blocks/1``, ..."""
    runs, stacks = config.runs(range(config.num_layers)), config.stacks
    return ("embed", *(f"{name}/{stacks[name].index(at)}" for name, run in runs for at in run))


def _squares(x: Float[Tensor, "batch seq embed"]) -> Float[Tensor, ""]:
    """sum over tokens of mean(x^2), in float32 at least, without a derivative."""
    wide = lax.stop_gradient(x).to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1).sum()


def _with_stream_size(layer: Callable) -> Callable:
    """`layer`, for `scan`, which also returns the size of its stream."""

    def measured(x: Tensor, row: tuple) -> tuple[Tensor, tuple[Any, Tensor]]:
        x, auxiliary = layer(x, row)
        return x, (auxiliary, _squares(x))

    return measured


def _sum_squares(
    squares: Tensor, x: Float[Tensor, "batch seq embed"], options: ModelOptions
) -> dict[str, Tensor]:
    """The sums over all ranks' tokens, and how many tokens these are: one all-reduce."""
    alone = set(SAMPLE_AXES) - set(options.axes)
    axes = tuple(axis for axis in spec_axes(options.stream) if axis not in alone)
    tokens = x.shape[0] * x.shape[1] * lax.axis_size(axes)
    count = torch.full((), tokens, dtype=torch.int64, device=x.device)
    return {"squares": lax.psum(lax.stop_gradient(squares), axes), "count": count}


def run_gathered(layer: Callable, options: ModelOptions, gather: Gather) -> Callable:
    """A layer as it is run: parameters gathered around it, activations perhaps computed again.

    Args:
        layer: ``(parameters, *rest)``, of one layer.
        options: of the model, whose remat says what backward computes again.
        gather: of one layer's parameters.
    """
    policy = {"full": policies.nothing, "dots": policies.dots}
    # what is recomputed is inside what is gathered: so gathering depends on parameters alone
    return gather.around(
        rematerialise(layer, policy=policy.get(options.remat, policies.everything))
    )


def embed_tokens(
    config: Any, weights: Tree, tokens: Tensor, options: ModelOptions, scale: float = 1.0
) -> Tensor:
    """`nn.embed_tokens` by the table "embed" of the parameters, with spec ``options.stream``."""
    table = options.gather.at("embed")(weights["embed"])
    check_gathered("embed_dim", table.shape[1], config.embed_dim)
    given = {"scale": scale, "vocab_size": config.vocab_size}
    return nn.embed_tokens(table, tokens, stream=options.stream, **given)


def gather_unembedding(weights: Tree, gather: Gather, *, tied: bool) -> Tensor:
    """The matrix of logits: "unembed", or where they are tied "embed", which is its transpose."""
    name = "embed" if tied else "unembed"
    return gather.at(name)(weights[name])
