"""One decoder, driven by its config: GPT-2, GPT-3 and Llama 3 are presets of it.

`defs` makes the parameters, `rules` splits them over a mesh, and `forward` and `loss` are per-rank
programs: pure functions of this rank's parameters and batch, run as `ModelOptions` has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.core.typing import Float, Int, Key, Scalar, Tensor
from functron.models import decoder, mup
from functron.models.config import PRESETS, GPTConfig
from functron.models.decoder import (
    Details,
    StageOutput,
    ahead_defs,
    block_defs,
    norm_defs,
    watched_names,
)
from functron.models.mup import folded
from functron.models.options import (
    DEFAULTS,
    SAMPLE_AXES,
    SEQUENCE_PARALLEL_STREAM,
    STREAM,
    WHOLE,
    Batch,
    Context,
    Hook,
    ModelOptions,
    Remat,
    arranged,
    keywords_of,
    num_targets,
    require,
)
from functron.nn import moe
from functron.pipeline.partition import Part, Use, whole
from functron.program.cost import tokens_attended
from functron.spmd import CONTEXT_AXES, DATA_AXES, P, params
from functron.spmd import collectives as lax
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.params import Normal, ParamDef, zeros
from functron.spmd.spec import Rules, SpecEntry, Uneven, as_entry, part_length

__all__ = [
    "PRESETS",
    "SAMPLE_AXES",
    "SEQUENCE_PARALLEL_STREAM",
    "STREAM",
    "WHOLE",
    "Context",
    "Details",
    "GPTConfig",
    "Hook",
    "ModelOptions",
    "Remat",
    "batch_specs",
    "defs",
    "flops_per_token",
    "folded",
    "forward",
    "loss",
    "loss_and_details",
    "num_targets",
    "rules",
    "stage",
    "stage_loss",
    "summary",
    "uses",
    "watched_names",
]


_TOKENS = ("ep_node", "ep", *CONTEXT_AXES, "tp")


@public
def rules(
    config: GPTConfig,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    expert_axes: tuple[str, ...] = ("ep",),
    uneven: tuple[str, ...] = (),
) -> Rules:
    """Megatron's tensor parallelism, and fully sharded data parallelism, for this model and mesh.

    Heads, feed-forward features and vocabulary split over ``tp``. With fewer key/value heads than
    tensor-parallel ranks these heads are replicated and each rank uses those of its queries.
    Parameters with an "embed" dim, all matrices among them, split that dim over the axes `fsdp`;
    biases of heads and features, and scales of single heads, are not split by these. Experts split
    over the axes `expert_axes`, and the hidden features of each over ``tp`` where that is none of
    these.

    Args:
        fsdp: the data axes that parameters are split over, to be gathered where they are used
            (`functron.Gather`): ``("fsdp",)``, beside which dp replicates; ``("dp", "fsdp")``
            for ZeRO-3 over all data ranks; ``()`` where fsdp splits nothing but the batch.
        expert_axes: the axes that experts are divided over, all of which split tokens:
            ``("ep",)``; ``("ep", "tp")`` under sequence parallelism, which is Megatron's folding
            with expert-tensor-parallel size 1; with ``"cp"`` and ``"ulysses"`` where these exist;
            ``("ep_node", "ep")`` over nodes and within them, for ``dispatch="two-hop"``.
            Pass the same in `ModelOptions`.
        uneven: logical axes that what splits them need not divide (`functron.Uneven`): some of
            ``"vocab"``, ``"heads"``, ``"mlp"``, ``"embed"`` and ``"expert"``. Key heads that tp
            does not divide are then replicated where several query heads share one.

    Raises:
        ValueError: tp, fsdp or expert_axes does not divide what it splits, and `uneven` does not
            say so, or the mesh has an axis this model does not use; all offenders are listed.
    """
    tp, moe = mesh["tp"], config.moe
    found = uneven_problems(uneven, ("vocab", "heads", "mlp", "embed", "expert"))
    shared = config.kv_heads < tp and tp % config.kv_heads == 0
    grouped = config.kv_heads < config.num_heads and "heads" in uneven
    replicate_kv = shared or (grouped and config.kv_heads % tp > 0)
    wanted = {} if "heads" in uneven else {"num_heads": config.num_heads}
    if not (replicate_kv or "heads" in uneven):
        wanted["num_kv_heads"] = config.kv_heads
    if ("dense" in config.stacks or moe is None) and "mlp" not in uneven:
        wanted["mlp_dim"] = config.mlp_dim
    if moe is not None and "mlp" not in uneven:
        wanted["moe.shared_dim"] = moe.shared_dim
        wanted |= {} if "tp" in expert_axes else {"moe.expert_dim": moe.expert_dim}
    found += tp_problems(wanted, tp)
    found += _head_problems(config, mesh, uneven)
    if config.padded_vocab % tp and "vocab" not in uneven:
        own, fix = (
            config.vocab_multiple,
            f"set vocab_multiple={math.lcm(config.vocab_multiple, tp)}",
        )
        found.append(Problem("vocab_multiple", str(own), f"a multiple of tp={tp}", fix))
    if replicate_kv and config.fused_projections is True and not config.kv_rank:
        fix = f"set fused_projections=False, or tp={config.kv_heads}"
        got = f"True with {config.kv_heads} key heads on tp={tp}"
        wanted = "False: ranks that share key heads cannot have their matrix with their queries'"
        found.append(Problem("fused_projections", got, wanted, fix))
    found += _expert_problems(config, mesh, expert_axes, "expert" in uneven)
    embed = {"embed_dim": config.embed_dim}
    if moe is not None and moe.latent_dim:
        embed["moe.latent_dim"] = moe.latent_dim
    found += fsdp_problems({} if "embed" in uneven else embed, mesh, fsdp)
    raise_problems("this model cannot run on this mesh", found)
    rules = {
        "vocab": "tp",
        "heads": "tp",
        "kv_heads": None if replicate_kv else "tp",
        "mlp": "tp",
        "expert": as_entry([axis for axis in expert_axes if mesh[axis] > 1]),
        "expert_mlp": None if "tp" in expert_axes else "tp",
        **embed_rules(mesh, fsdp),
    }
    return uneven_rules(rules, uneven)


def uneven_problems(uneven: Sequence[str], known: Sequence[str]) -> list[Problem]:
    """A problem for each logical axis in `uneven` that is none of these."""
    wanted = f"logical axes of this model that can be uneven: {', '.join(known)}"
    return [
        Problem("uneven", repr(name), wanted, nearest(name, known))
        for name in uneven
        if name not in known
    ]


_TOGETHER = MappingProxyType({"kv_heads": "heads", "expert_mlp": "mlp"})


def uneven_rules(rules: Mapping[str, SpecEntry], uneven: Sequence[str]) -> Rules:
    """The rules, of which those of logical axes in `uneven` split them unevenly."""
    return Rules(
        {
            name: Uneven(entry) if entry and _TOGETHER.get(name, name) in uneven else entry
            for name, entry in rules.items()
        }
    )


def _head_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, uneven: Sequence[str]
) -> Iterator[Problem]:
    """Heads that tp and ulysses together do not divide; a single one that tp has to split."""
    tp, ulysses, count = mesh["tp"], mesh["ulysses"], config.num_heads
    if "heads" in uneven and count == 1 < tp:
        yield Problem("num_heads", "1", f"at least 2 for tp={tp}", "use tp=1")
    if (part_length(count, [tp]) % ulysses) and ("heads" in uneven or not count % tp):
        each = f"a multiple of tp={tp} x ulysses={ulysses}"
        each = f"with padding {each}" if "heads" in uneven else each
        yield Problem("num_heads", str(count), each, "use fewer, and cp for the others")


def _expert_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, expert_axes: tuple[str, ...], uneven: bool
) -> list[Problem]:
    if config.moe is None:
        wanted, fix = "ep=1: this decoder has no experts", "put those ranks on dp, fsdp or tp"
        sizes = {axis: mesh[axis] for axis in ("ep_node", "ep") if mesh[axis] > 1}
        got = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        return [Problem("mesh", got, wanted, fix)] if sizes else []
    if set(expert_axes) - set(_TOKENS) or len(set(expert_axes)) < len(expert_axes):
        fix = "for more ranks of data, use ep: it splits the batch as dp does"
        return [Problem("expert_axes", repr(expert_axes), f"some of {_TOKENS}, each once", fix)]
    found, count = [], config.moe.num_experts
    ranks = math.prod(mesh[axis] for axis in expert_axes)
    split = [axis for axis in expert_axes if mesh[axis] > 1]
    if count % ranks and not uneven:
        each = " x ".join(f"{axis}={mesh[axis]}" for axis in split)
        fix = f"divide them among {math.gcd(count, ranks)} ranks, or unevenly: uneven expert"
        found.append(Problem("moe.num_experts", str(count), f"a multiple of {each}", fix))
    if config.moe.dispatch == "two-hop" and len(expert_axes) == 1 and ranks > 1:
        got, wanted = f"'two-hop' over {expert_axes}", "several axes, the first of them the nodes"
        fix = "use expert_axes=ep_node,ep (or ep,tp) with ranks on both, or dispatch='alltoall'"
        found.append(Problem("moe.dispatch", got, wanted, fix))
    for axis in ("ep_node", "ep"):
        if axis not in expert_axes and mesh[axis] > 1:
            wanted, fix = f"{axis} among the axes of experts, or {axis}=1", "use dp for those ranks"
            found.append(
                Problem("expert_axes", f"{expert_axes} on {axis}={mesh[axis]}", wanted, fix)
            )
    return found


@public
def defs(config: GPTConfig, options: ModelOptions = DEFAULTS) -> dict:
    """The parameters: ``{"embed", "positions"?, "dense"?, "blocks", "norm"?, "unembed"?, "mtp"?}``.

    Those of all blocks are stacked on a leading "layers" dim; where some blocks are dense and the
    others have experts, the former are in "dense". With `GPTConfig.unembed_bias` there is
    "unembed_bias" as well. With a base width (`mup`) initial values are scaled. Of `options`, hooks
    with parameters of their own matter.
    """
    _check_hooks(config, options)
    model, m = _standard_defs(config, options), config.mup_width
    if m == 1:
        return model
    return mup.parametrize(model, _standard_defs(mup.wider(config), options), m)


def _standard_defs(config: GPTConfig, options: ModelOptions) -> dict:
    """The parameters in the standard parametrization."""
    c, dtype = config, config.torch_dtype
    normal = Normal(c.init_stddev)
    table = c.padded_vocab, c.embed_dim
    model: dict = {"embed": ParamDef(table, ("vocab", "embed"), normal, dtype)}
    if norm := norm_defs(c, options):
        model["norm"] = norm
    for name, layers in c.stacks.items():
        experts = c.moe is not None and name == "blocks"
        model[name] = params.stack(block_defs(c, experts=experts, options=options), len(layers))
    if c.mtp_depth:
        model["mtp"] = ahead_defs(c, options)
    if c.positions == "learned":
        model["positions"] = ParamDef((c.max_seq, c.embed_dim), (None, "embed"), normal, dtype)
    if not c.tied:
        model["unembed"] = ParamDef(table[::-1], ("embed", "vocab"), normal, dtype)
    if c.unembed_bias:
        model["unembed_bias"] = ParamDef(table[:1], ("vocab",), zeros, dtype, decay=False)
    return model


def _check_hooks(config: GPTConfig, options: ModelOptions) -> None:
    """Refuse hooks that this architecture has no place for."""
    found = []
    if options.router is not None and config.moe is None:
        wanted, fix = "None without experts", "set moe in the config, or leave it out"
        found.append(Problem("options.router", "a function", wanted, fix))
    if options.mlp is not None and config.moe is not None and "dense" not in config.stacks:
        wanted, fix = "None where every layer has experts", "use router or block instead"
        found.append(Problem("options.mlp", "a function", wanted, fix))
    if options.norm is not None and config.mtp_depth:
        wanted, fix = "None with mtp_depth, whose modules have norms of their own", "leave one out"
        found.append(Problem("options.norm", "a function", wanted, fix))
    raise_problems("the hooks of these options have no place", found)


def ready(config: GPTConfig, options: ModelOptions) -> ModelOptions:
    """The options, checked, with sequences in order for an attention that sees whole ones."""
    _check_hooks(config, options)
    hook = options.hook("attention")
    if hook is None or keywords_of(hook.apply, {"context": None}):
        return options
    if options.context.order == "balanced":
        fix = "let attention take context, or use another order"
        wanted = "attention with a parameter context"
        refuse("the options do not fit", "options.context", 'order="balanced"', wanted, fix)
    return replace(options, context=Context("ring", "contiguous"))


@public
def forward(
    config: GPTConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    options: ModelOptions = DEFAULTS,
    *,
    rows: Int[Tensor, " batch"] | None = None,
    positions: Int[Tensor, "batch seq *several"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        weights: this rank's part of the parameters.
        tokens: int64, this rank's samples; where axes of the mesh split sequences (`CONTEXT_AXES`),
            its part of each, in order.
        rows: int64, the samples' indices in the global batch, for dropout; None where each data
            rank's tokens are its whole part of that batch, in order.
        positions: int64 ``[batch, seq]`` or, for `GPTConfig.rope_sections`, ``[batch, seq,
            sections]``; None: the places of the tokens in their samples.
        key: of dropout's masks; None switches dropout off.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per block: see `nn.self_attention`, `nn.context_attention`, `nn.mlp`
        and `transforms.fsdp`.

    Raises:
        ValueError: the sequence is longer than `max_seq`, or does not divide over the axes that
            split it; or options that this model has no place for.
    """
    given = {"tokens": tokens, "rows": rows, "positions": positions}
    batch = {name: value for name, value in given.items() if value is not None}
    logits: Any = stage(config, whole(config.num_layers), weights, None, batch, options, key=key)
    return logits


@public
def stage(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: StageOutput | None,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Key | None = None,
) -> StageOutput:
    """One stage of a pipeline: the residual stream after its layers.

    Args:
        config: the architecture of the whole model.
        part: the layers of the stage, and whether it has the embedding or the loss.
        weights: this rank's part of the stage's parameters: those that `uses` lists, of stacked
            ones the rows of its layers.
        x: the result of the stage before; None for the stage with the embedding.
        batch: ``tokens``, whose values the stage with the embedding reads, and ``rows``, without
            which each data rank's samples are taken to be its whole part of the batch.
        options: as in `forward`; ``gather`` with the specs of the whole model's parameters.

    Returns:
        The residual stream with spec ``options.stream``, with layers of experts up to here in a
        pair with their auxiliary loss and statistics; at the last stage the logits of `forward`.
    """
    options = ready(config, options)
    sequence = arranged(batch, options.context)
    x, beside = decoder.stream(config, part, weights, x, sequence, options, key)
    if part.loss:
        return decoder.logits(config, weights, x, options)
    return x if beside is None else (x, beside)


def batch_specs(*, packed: bool = False, placed: bool = False, dealt: bool = False) -> dict[str, P]:
    """The specs of the entries of a batch.

    Args:
        packed: it has positions and segments of packed documents.
        placed: it has positions, also without documents (`GPTConfig.rope_sections`).
        dealt: it has the places of tokens in the samples that were dealt to ranks.
    """
    names = ["tokens", "targets"]
    names += ["positions"] if packed or placed else []
    names += ["segments"] if packed else []
    names += ["places"] if dealt else []
    return {**dict.fromkeys(names, P(DATA_AXES, CONTEXT_AXES)), "rows": P(DATA_AXES)}


def uses(config: GPTConfig, options: ModelOptions = DEFAULTS) -> dict[str, Use]:
    """Which stages of a pipeline use each entry of `defs`, for `pipeline.Partition`."""
    embed = "EL" if config.tied or config.mtp_depth else "E"
    table: dict[str, Use] = {"embed": embed, **config.stacks}
    if norm_defs(config, options):
        table["norm"] = "L"
    if config.positions == "learned":
        table["positions"] = "E"
    if not config.tied:
        table["unembed"] = "L"
    if config.unembed_bias:
        table["unembed_bias"] = "L"
    if config.mtp_depth:
        table["mtp"] = "L"
    return table


@public
def loss(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Key | None = None,
) -> Scalar:
    """The sum of all tokens' losses over the batch of all ranks; replicated over the mesh.

    Divide it by `num_targets` for the mean. Sums, unlike means, add up over ranks and microbatches
    also when these hold different numbers of tokens. The batch has this rank's samples; targets of
    `nn.IGNORE_INDEX` do not count. Other arguments are those of `forward`.

    Returns:
        A scalar in float32 at least. Collectives: those of `forward` and `nn.cross_entropy`, and
        one all-reduce of a scalar.

    Raises:
        ValueError: what `forward` raises, or ranks along an axis that is none of ``options.axes``
            compute one loss together: they split sequences, or their tokens share experts.
    """
    if options.watch:
        fix = "call gpt.loss_and_details, or leave it out"
        refuse("gpt.loss returns the loss alone", "options.watch", "True", "False", fix)
    require(batch, "tokens", "targets")
    every = whole(config.num_layers)
    out: Any = stage_loss(config, every, weights, None, batch, options, key=key)
    return out[0] if config.has_details else out


@public
def loss_and_details(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Key | None = None,
) -> tuple[Scalar, Details]:
    """`loss` and its terms, where there are several (`GPTConfig.has_details`, ``options.watch``).

    For `make_step` with ``has_aux=True``. Collectives: one more all-reduce of a few numbers, per
    expert and layer if there are experts; and one of a number per layer with ``options.watch``.
    """
    require(batch, "tokens", "targets")
    return stage_loss(config, whole(config.num_layers), weights, None, batch, options, key=key)


@public
def stage_loss(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: StageOutput | None,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Key | None = None,
) -> Any:
    """Like `stage`; the last stage returns its part of the loss.

    That is the result of `loss`, or of `loss_and_details` where there are several terms; with
    ``options.watch`` stages also pass on the size of the stream. The last stage, and those with
    layers of experts, need ``targets`` in the batch too.
    """
    _check_axes(config, options.axes)
    options = ready(config, options)
    sequence = arranged(batch, options.context)
    return decoder.loss(config, part, weights, x, sequence, options, key)


def summary(details: Details) -> dict[str, float]:
    """`Details` as numbers on the host: ``next_token_loss``; ``ahead_loss_1``, ...; and
    ``router_load_ratio`` and so on, of `nn.moe.summary`.
    """
    count = details["targets"].double().clamp_min(1)
    out = {"next_token_loss": float(details["next_token"] / count)}
    if "ahead" in details:
        losses = (details["ahead"] / count).tolist()
        out |= {f"ahead_loss_{depth}": loss for depth, loss in enumerate(losses, 1)}
    if "routers" in details:
        sums = tuple(details["routers"])
        kind = moe.RouterSums if len(sums) == len(moe.RouterSums._fields) else moe.FilledSums
        routers = moe.summary(kind(*sums))
        out |= {f"router_{name}": value for name, value in routers.items()}
    return out


def _check_axes(config: GPTConfig, axes: tuple[str, ...]) -> None:
    """Refuse a loss per rank where ranks compute one together."""
    together = SAMPLE_AXES if config.moe is not None else CONTEXT_AXES
    left_out = [name for name in together if name not in axes and lax.axis_size(name) > 1]
    why = "whose ranks' tokens share experts" if config.moe is not None else "which split sequences"
    fix = "add them; replicas that step alone want an axis of their own, Mesh(replica=2, ...)"
    wanted = f"{', '.join(map(repr, left_out))} among them, {why}"
    found = [Problem("axes", f"{axes}", wanted, fix)] if left_out else []
    raise_problems("the loss cannot be of each rank's own", found)


def flops_per_token(config: GPTConfig, seq: int, *, whole: bool = False) -> int:
    """Model FLOPs of forward and backward per token: 6 N + 6 L H D T.

    N counts the parameters that multiply a token's activations: embedding look-ups do not, and of
    the experts those that it chooses. The second term is causal attention over `seq` tokens, or
    over a window, counted as half, as `functron.program.cost` defines.

    With `whole`, attention is not halved: 6 N + 12 L H D T (Chowdhery et al. 2022, appendix B).
    """
    model = defs(config)
    total = params.num_params(model)
    if config.mtp_modules < config.mtp_depth:  # one that is repeated
        total += (config.mtp_depth - 1) * params.num_params(model["mtp"])
    total -= 0 if config.tied else config.padded_vocab * config.embed_dim
    if config.positions == "learned":
        total -= config.max_seq * config.embed_dim
    if config.moe is not None:
        m, width = config.moe, config.moe.latent_dim or config.embed_dim
        matrices = (3 if config.gated else 2) * width * m.expert_dim
        total -= config.num_routers * (m.num_experts - m.top_k) * matrices
    total += config.mtp_depth * config.padded_vocab * config.embed_dim  # each unembeds once more
    qk, v = config.head_size, config.head_size
    if config.kv_rank:
        qk, v = config.head_size + config.rope_head_dim, config.v_head_dim
    windows = [*config.windows, *[0] * config.mtp_depth]
    seen = sum(tokens_attended(seq, window, whole=whole) for window in windows)
    return round(6 * total + 6 * config.num_heads * (qk + v) * seen)


def tp_problems(sizes: Mapping[str, int], tp: int) -> list[Problem]:
    """A problem for each of these sizes, by its name, that tp does not divide."""
    return [
        Problem(name, str(size), f"a multiple of tp={tp}", "choose a tp that divides it")
        for name, size in sizes.items()
        if size % tp
    ]


def fsdp_problems(
    sizes: Mapping[str, int], mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]
) -> list[Problem]:
    """Axes that are no data axes; else sizes, by their names, that these do not divide."""
    wanted = "data axes: 'dp', 'fsdp' or both"
    found = [
        Problem("fsdp", repr(axis), wanted, "leave it out")
        for axis in fsdp
        if axis not in FSDP_AXES
    ]
    if found:
        return found
    ranks = math.prod(mesh[axis] for axis in fsdp)
    named = " * ".join(f"{axis}={mesh[axis]}" for axis in fsdp if mesh[axis] > 1)
    for name, size in sizes.items():
        if size % ranks:
            below, above = math.gcd(size, ranks), -(-size // ranks) * ranks
            fix = f"split over {below} ranks, or set {name}={above}"
            found.append(Problem(name, str(size), f"a multiple of {named}", fix))
    return found


def embed_rules(mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]) -> dict[str, SpecEntry]:
    """The rule of dims called "embed", if ranks of `fsdp` split them."""
    axes = [axis for axis in fsdp if mesh[axis] > 1]
    return {"embed": as_entry(axes)} if axes else {}
