"""One decoder, driven by its config: GPT-2, GPT-3 and Llama 3 are presets of it.

`defs` says what the parameters are, `rules` how a mesh splits them, and `forward` and `loss` are
per-rank programs: pure functions of this rank's parameters and batch.

Which mesh axes split a decoder's parameters.
"""

from __future__ import annotations

import math
from typing import Any

from functron import nn, params
from functron.core.errors import Problem, public, raise_problems
from functron.core.typing import Float, Int, Key, Scalar, Tensor
from functron.models import decoder, mup
from functron.models.block import (
    RING,
    SEQUENCE_PARALLEL_STREAM,
    STREAM,
    WHOLE,
    Details,
    How,
    Passed,
    Remat,
    block_defs,
    norm_defs,
)
from functron.models.config import GPTConfig
from functron.models.decoder import ahead_defs, watched_names
from functron.models.mup import folded
from functron.models.presets import PRESETS
from functron.models.sequence import SAMPLE_AXES, Batch, Context, arranged, require
from functron.nn import moe
from functron.ops import AUTO, Kernels
from functron.params import Normal, ParamDef
from functron.pipeline.layout import Part, whole
from functron.program.cost import attended
from functron.spmd import CONTEXT_AXES, DATA_AXES, P
from functron.spmd import collectives as lax
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.shards import as_entry
from functron.spmd.spec import Rules
from functron.transforms import Gather

__all__ = [
    "PRESETS",
    "SAMPLE_AXES",
    "SEQUENCE_PARALLEL_STREAM",
    "STREAM",
    "WHOLE",
    "Context",
    "Details",
    "GPTConfig",
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


_TOKENS = ("ep", *CONTEXT_AXES, "tp")


@public
def rules(
    config: GPTConfig,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    experts: tuple[str, ...] = ("ep",),
) -> Rules:
    """Megatron's tensor parallelism, and fully sharded data parallelism, for this model and mesh.

    Heads, feed-forward features and vocabulary split over ``tp``. With fewer key/value heads than
    tensor-parallel ranks these heads are replicated and each rank uses those of its queries. What
    has an "embed" dim, all matrices among it, splits that dim over the axes `fsdp`; biases of heads
    and features, and scales of single heads, are whole there. Experts split over the axes
    `experts`, and the hidden features of each over ``tp`` where that is none of these.

    Args:
        config: the architecture.
        mesh: the ranks.
        fsdp: the data axes that parameters are split over, to be gathered where they are used
            (`functron.Gather`): ``("fsdp",)``, beside which dp replicates; ``("dp", "fsdp")``
            for ZeRO-3 over all data ranks; ``()`` where fsdp splits nothing but the batch.
        experts: the axes that experts are divided over, all of which split tokens: ``("ep",)``;
            ``("ep", "tp")`` under sequence parallelism, which is Megatron's folding with
            expert-tensor-parallel size 1; with ``"cp"`` and ``"ulysses"`` where these exist. Pass
            the same to `gpt.loss`.

    Raises:
        ValueError: tp, fsdp or experts does not divide what it splits, or the mesh has an axis this
            model does not use; all offenders are listed.
    """
    tp, moe = mesh["tp"], config.moe
    replicate_kv = config.kv_heads < tp and tp % config.kv_heads == 0
    wanted = {"num_heads": config.num_heads}
    if not replicate_kv:
        wanted["num_kv_heads"] = config.kv_heads
    if "dense" in config.stacks or moe is None:
        wanted["mlp_dim"] = config.mlp_dim
    if moe is not None:
        wanted["moe.shared_dim"] = moe.shared_dim
        wanted |= {} if "tp" in experts else {"moe.expert_dim": moe.expert_dim}
    found = [
        Problem(name, str(size), f"a multiple of tp={tp}", "choose a tp that divides it")
        for name, size in wanted.items()
        if size % tp
    ]
    if config.num_heads % (tp * mesh["ulysses"]) and not config.num_heads % tp:
        fix = "use fewer, and cp for the others"
        each = f"a multiple of tp={tp} x ulysses={mesh['ulysses']}"
        found.append(Problem("num_heads", str(config.num_heads), each, fix))
    if config.padded_vocab % tp:
        found.append(
            Problem(
                "vocab_multiple",
                str(config.vocab_multiple),
                f"a multiple of tp={tp}",
                f"set vocab_multiple={math.lcm(config.vocab_multiple, tp)}",
            )
        )
    found += _expert_problems(config, mesh, experts)
    found += _fsdp_problems(config, mesh, fsdp)
    raise_problems("this model cannot run on this mesh", found)
    split = tuple(axis for axis in fsdp if mesh[axis] > 1)
    embed = {"embed": split[0] if len(split) == 1 else split} if split else {}
    return Rules(
        {
            "vocab": "tp",
            "heads": "tp",
            "kv_heads": None if replicate_kv else "tp",
            "mlp": "tp",
            "expert": as_entry([axis for axis in experts if mesh[axis] > 1]),
            "expert_mlp": None if "tp" in experts else "tp",
            **embed,
        }
    )


def _expert_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, experts: tuple[str, ...]
) -> list[Problem]:
    if config.moe is None:
        wanted, fix = "ep=1: this decoder has no experts", "put those ranks on dp, fsdp or tp"
        return [Problem("mesh", f"ep={mesh['ep']}", wanted, fix)] if mesh["ep"] > 1 else []
    if set(experts) - set(_TOKENS) or len(set(experts)) < len(experts):
        fix = "for more ranks of data, use ep: it splits the batch as dp does"
        return [Problem("experts", repr(experts), f"some of {_TOKENS}, each once", fix)]
    found, count = [], config.moe.num_experts
    ranks = math.prod(mesh[axis] for axis in experts)
    if count % ranks:
        each = " x ".join(f"{axis}={mesh[axis]}" for axis in experts if mesh[axis] > 1)
        fix = f"divide them among {math.gcd(count, ranks)} ranks"
        found.append(Problem("moe.num_experts", str(count), f"a multiple of {each}", fix))
    if "ep" not in experts and mesh["ep"] > 1:
        wanted, fix = "ep among the axes of experts, or ep=1", "use dp for those ranks"
        found.append(Problem("experts", f"{experts} on ep={mesh['ep']}", wanted, fix))
    return found


def _fsdp_problems(
    config: GPTConfig, mesh: Mesh | BoundMesh, fsdp: tuple[str, ...]
) -> list[Problem]:
    unknown = [axis for axis in fsdp if axis not in FSDP_AXES]
    found = [
        Problem("fsdp", repr(axis), "data axes: 'dp', 'fsdp' or both", "leave it out")
        for axis in unknown
    ]
    ranks = math.prod(mesh[axis] for axis in fsdp)
    sizes = {"embed_dim": config.embed_dim}
    if config.moe is not None and config.moe.latent_dim:
        sizes["moe.latent_dim"] = config.moe.latent_dim
    for name, size in sizes.items():
        if not unknown and size % ranks:
            named = " * ".join(f"{axis}={mesh[axis]}" for axis in fsdp if mesh[axis] > 1)
            below, above = math.gcd(size, ranks), -(-size // ranks) * ranks
            fix = f"split over {below} ranks, or set {name}={above}"
            found.append(Problem(name, str(size), f"a multiple of {named}", fix))
    return found


@public
def defs(config: GPTConfig) -> dict:
    """The parameters: ``{"embed", "positions"?, "dense"?, "blocks", "norm"?, "unembed"?, "mtp"?}``.

    Those of all blocks are stacked on a leading "layers" dim; where the first blocks are dense and
    the others have experts, these are "dense" and those "blocks". Where `config` has a base width
    they begin as `mup` says.
    """
    model, m = _standard(config), mup.width(config)
    return model if m == 1 else mup.parametrized(model, _standard(mup.wider(config)), m)


def _standard(config: GPTConfig) -> dict:
    """The parameters, whatever their width is beside others."""
    c, dtype = config, config.torch_dtype
    normal = Normal(c.init_stddev)
    model: dict = {
        "embed": ParamDef((c.padded_vocab, c.embed_dim), ("vocab", "embed"), normal, dtype)
    }
    if norm := norm_defs(c):
        model["norm"] = norm
    for name, layers in c.stacks.items():
        layer = block_defs(c, experts=c.moe is not None and name == "blocks")
        model[name] = params.stack(layer, len(layers))
    if c.mtp_depth:
        model["mtp"] = ahead_defs(c)
    if c.positions == "learned":
        model["positions"] = ParamDef((c.max_seq, c.embed_dim), (None, "embed"), normal, dtype)
    if not c.tied:
        model["unembed"] = ParamDef(
            (c.embed_dim, c.padded_vocab), ("embed", "vocab"), normal, dtype
        )
    return model


@public
def forward(
    config: GPTConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    *,
    rows: Int[Tensor, " batch"] | None = None,
    positions: Int[Tensor, "batch seq *several"] | None = None,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
    kernels: Kernels = AUTO,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, this rank's samples; where axes of the mesh split sequences
            (`CONTEXT_AXES`), its part of each, in order.
        rows: int64 ``[batch]``, the samples' indices in the global batch, for dropout; None where
            each data rank's tokens are its whole part of that batch, in order.
        positions: int64 ``[batch, seq]`` or, for `GPTConfig.rope_sections`, ``[batch, seq,
            sections]``; None: the places of the tokens in their samples.
        key: the key of dropout's masks; None switches dropout off.
        stream: `STREAM` or `SEQUENCE_PARALLEL_STREAM`.
        remat: what backward computes again; see `Remat`.
        gather: how parameters that data axes split are gathered where they are used: the specs of
            all of the model's, ``param_specs(defs(config), rules(config, mesh))``, and more; what
            each block needs by itself, and again in backward.
        context: how attention reaches across the ranks that split sequences.
        experts: the axes that experts are divided over, as the rules have it; see `rules`.
        kernels: which operations CUDA kernels of functron compute; see `functron.ops.use`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``: this rank's columns, those from ``vocab_size`` on being
        padding. Collectives per block: see `nn.self_attention`, `nn.context_attention`, `nn.mlp`
        and `transforms.fsdp`.

    Raises:
        ValueError: the sequence is longer than `max_seq`, or does not divide over the axes that
            split it.
    """
    given = {"tokens": tokens, "rows": rows, "positions": positions}
    batch = {name: value for name, value in given.items() if value is not None}
    part = whole(config.num_layers)
    how = How(key, stream, remat, gather, context, experts, kernels)
    x, _ = decoder.stream(config, part, weights, None, arranged(batch, context), how)
    return decoder.logits(config, weights, x, how)


@public
def stage(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Passed | None,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
    kernels: Kernels = AUTO,
) -> Passed:
    """What one stage of a pipeline makes of the residual stream that the stage before made.

    Args:
        config: the architecture, of the whole model.
        part: what the stage computes.
        weights: this rank's part of the stage's parameters: those that `uses` says, of stacked ones
            the rows of its layers.
        x: what the stage before returned; None for the stage with the embedding.
        batch: ``tokens``, of which the stage with the embedding needs the numbers, and ``rows``,
            without which each data rank's samples are taken to be its whole part of the batch.
        key, stream, remat, context, experts, kernels: as in `forward`.
        gather: as in `forward`, with the specs of the whole model's parameters.

    Returns:
        The residual stream with spec `stream`, in a pair with what routers have said so far where
        there are layers of experts up to here; at the stage with the loss, the logits of `forward`.
    """
    how = How(key, stream, remat, gather, context, experts, kernels)
    x, said = decoder.stream(config, part, weights, x, arranged(batch, context), how)
    if part.loss:
        return decoder.logits(config, weights, x, how)
    return x if said is None else (x, said)


def batch_specs(*, packed: bool = False, placed: bool = False) -> dict[str, P]:
    """How the entries of a batch are split: for `make_step`, and to `shard` it by.

    Args:
        packed: whether it has the positions and segments of packed documents.
        placed: whether it has positions, also without documents: `GPTConfig.rope_sections`.
    """
    names = ["tokens", "targets"]
    names += ["positions"] if packed or placed else []
    names += ["segments"] if packed else []
    return {**dict.fromkeys(names, P(DATA_AXES, CONTEXT_AXES)), "rows": P(DATA_AXES)}


def uses(config: GPTConfig) -> dict[str, str | range]:
    """Which stages of a pipeline use each entry of `defs`, as `pipeline.Partition` wants it."""
    embed = "EL" if config.tied or config.mtp_depth else "E"
    table: dict[str, str | range] = {"embed": embed, **config.stacks}
    if norm_defs(config):
        table["norm"] = "L"
    if config.positions == "learned":
        table["positions"] = "E"
    if not config.tied:
        table["unembed"] = "L"
    if config.mtp_depth:
        table["mtp"] = "L"
    return table


@public
def loss(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
    kernels: Kernels = AUTO,
    loss_chunk_tokens: int = 0,
    axes: tuple[str, ...] = SAMPLE_AXES,
) -> Scalar:
    """The sum of all tokens' losses over the batch of all ranks; replicated over the mesh.

    Divide it by `num_targets` for the mean. Sums, unlike means, add up over ranks and microbatches
    also when these hold different numbers of tokens.

    Args:
        batch: this rank's samples; targets of `nn.IGNORE_INDEX` do not count.
        loss_chunk_tokens: make logits of so many of a rank's tokens at a time, and again in
            backward: they take memory for so many tokens alone; 0: of all, once.
        axes: the axes over which the losses are summed; without one that splits samples, each rank
            along it has a loss of its own. The same are to be passed to `num_targets`,
            `value_and_grad` and, with those that split parameters, `sync_gradients`.

    Returns:
        A scalar in float32 at least. Collectives: those of `forward` and `nn.cross_entropy`, and
        one all-reduce of a scalar.

    Raises:
        ValueError: what `forward` raises, or ranks along an axis that is none of `axes` compute one
            loss together: they split sequences, or their tokens share experts.
    """
    require(batch, "tokens", "targets")
    _check_axes(config, axes)
    how = How(key, stream, remat, gather, context, experts, kernels, loss_chunk_tokens, axes=axes)
    part, sequence = whole(config.num_layers), arranged(batch, context)
    out = decoder.loss(config, part, weights, None, sequence, how)
    return out[0] if config.has_details else out


@public
def loss_and_details(
    config: GPTConfig,
    weights: dict,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
    kernels: Kernels = AUTO,
    loss_chunk_tokens: int = 0,
    watch: bool = False,
) -> tuple[Scalar, Details]:
    """`loss` where it has several terms (`GPTConfig.has_details`), and what they are made of.

    For `make_step` with ``has_aux=True``. Collectives: one more all-reduce of a few numbers, per
    expert and layer if there are experts; and one of a number per layer with `watch`.

    Args:
        watch: say how large the residual stream is after every layer: ``stream`` of `Details`.
    """
    require(batch, "tokens", "targets")
    chunk = loss_chunk_tokens
    how = How(key, stream, remat, gather, context, experts, kernels, chunk, watch)
    part, sequence = whole(config.num_layers), arranged(batch, context)
    return decoder.loss(config, part, weights, None, sequence, how)


@public
def stage_loss(
    config: GPTConfig,
    part: Part,
    weights: dict,
    x: Passed | None,
    batch: Batch,
    *,
    key: Key | None = None,
    stream: P = STREAM,
    remat: Remat = "none",
    gather: Gather = WHOLE,
    context: Context = RING,
    experts: tuple[str, ...] = ("ep",),
    kernels: Kernels = AUTO,
    loss_chunk_tokens: int = 0,
    watch: bool = False,
) -> Any:
    """`stage`, but the stage with the loss returns that: what `loss` does, for one stage.

    With terms beside the loss of the next token, or `watch`, it returns what `loss_and_details`
    does; with `watch` stages also hand on how large the stream was. Of the batch, the stage with
    the loss needs ``targets`` too, and so do those with layers of experts.
    """
    chunk = loss_chunk_tokens
    how = How(key, stream, remat, gather, context, experts, kernels, chunk, watch)
    return decoder.loss(config, part, weights, x, arranged(batch, context), how)


def summary(details: Details) -> dict[str, float]:
    """What `Details` say, in a few numbers on the host.

    Returns:
        ``next_token_loss``; ``ahead_loss_1``, ...; and ``router_load_ratio`` and so on, of
        `nn.moe.summary`.
    """
    count = details["targets"].double().clamp_min(1)
    out = {"next_token_loss": float(details["next_token"] / count)}
    if "ahead" in details:
        losses = (details["ahead"] / count).tolist()
        out |= {f"ahead_loss_{depth}": loss for depth, loss in enumerate(losses, 1)}
    if "routers" in details:
        said = moe.summary(moe.RouterSums(*details["routers"]))
        out |= {f"router_{name}": value for name, value in said.items()}
    return out


@public
def num_targets(batch: Batch, axes: tuple[str, ...] = SAMPLE_AXES) -> Int[Tensor, ""]:
    """How many targets count, over the batch of all ranks: an int64 scalar; one all-reduce.

    Args:
        batch: this rank's samples.
        axes: as in `loss`.
    """
    require(batch, "targets")
    return lax.psum((batch["targets"] != nn.IGNORE_INDEX).sum(), axes)


def _check_axes(config: GPTConfig, axes: tuple[str, ...]) -> None:
    """Refuse losses of their own for ranks that compute one together."""
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

    Args:
        config: the architecture.
        seq: tokens of a sample.
        whole: count attention as whole instead: 6 N + 12 L H D T (Chowdhery et al. 2022, appendix
            B).
    """
    total = params.num_params(defs(config))
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
    seen = sum(attended(seq, window, whole=whole) for window in windows)
    return round(6 * total + 6 * config.num_heads * (qk + v) * seen)
