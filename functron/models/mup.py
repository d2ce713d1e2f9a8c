"""Maximal update parametrization (muP): learning rates found at one width hold at others.

"Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer" (Yang et al.
2022), https://arxiv.org/abs/2203.03466. Tune a narrow model, with `GPTConfig.mup_base_dim` its own
`embed_dim`; then widen it, and leave `mup_base_dim` and all settings of the optimizer as they were.
At the base width nothing differs from the standard parametrization, bit for bit.

With m = embed_dim / mup_base_dim, and of Adam (`optim.width_multiples` has the other optimizers):

| parameters                                   | begin with  | learning rate | forward        |
|----------------------------------------------|-------------|---------------|----------------|
| embedding, positions, norms, biases, sinks   | the base's  | 1             |                |
| matrices that read and write widths          | stddev / sqrt(m) | 1/m      |                |
| unembedding, also where it is the embedding  | the base's  | 1             | logits / m     |
| routers, the shared expert's gate            | stddev / m  | 1/m           |                |
| scores of attention                          |             |               | sqrt(B) / head_dim |

where B is the base's head_dim: 1 / sqrt(head_dim) if heads are as wide there.

Why. A number that a layer makes is a sum over n inputs of order one. Adam moves each weight by
about the learning rate, whatever the size of its gradient, with the signs of the inputs: so the sum
moves by n times the learning rate, which must fall as 1 / n. Where it begins, signs are independent
and the sum is of order sqrt(n) times the standard deviation, which must fall as 1 / sqrt(n).
Embeddings and biases sum over nothing, and stay. What few outputs sum over a width must begin even
smaller, as 1 / n: the layers before move with the signs of these very weights, so that such sums
grow as n too. The same holds for q k^T over the width of a head: its scale falls as
1 / head_dim, not as the root of that.

For unembeddings that is the paper's table 8: stddev and rate of the base, and 1/m in the forward,
as then one matrix can be embedding and unembedding, and norms of gradients, by which they are
clipped, do not grow with the width. For routers it is table 3, without a factor: x (theta W) with W
begun and moved by 1 / theta times as much is the same under Adam for any theta (lemma J.1). In that
form their gradients, and with them their part of the norm, grow as m.

Weight decay is times the learning rate here, as in torch. Where the rate is divided by m, the decay
is multiplied by it: what a step takes off a weight stays lr * decay at every width, as in the
authors' package (MuAdamW; its ``decoupled_wd`` is for decays that are not times the rate), and as
the two forms above need if they are to be the same under AdamW too.

In two commands:

    functron train --gpt.mup-base-dim 256 --learning-rate.peak ...    # the best of several rates
    functron train --gpt.mup-base-dim 256 --learning-rate.peak THAT --gpt.embed-dim 1024 \\
        --gpt.mlp-dim 4096 --gpt.num-heads 32 --gpt.mup-base-head-dim 32

Also tuned once, at the base: stddevs, `embed_scale`, schedules, batch size. Adam's eps must be
small beside the gradients of hidden matrices, which fall as 1/m.

It is taken for granted that `mlp_dim`, the ranks of latents and the widths of experts grow as
`embed_dim` does, and so do heads, by their number (with those of keys) or their width; how many
layers and experts there are, and the vocabulary, stay. These are limits of width, not of depth.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.models.config import GPTConfig
from functron.models.lora import LazyLeaf
from functron.optim.zero import num_stacked
from functron.spmd.params import Normal, ParamDef, Width


def wider(config: GPTConfig) -> GPTConfig:
    """The standard model of twice the width: of its parameters the dims that are widths differ."""
    moe = config.moe
    if moe is not None:
        sizes = ("expert_dim", "shared_dim", "latent_dim")
        moe = replace(moe, **{name: 2 * getattr(moe, name) for name in sizes})
    sizes = ("embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "kv_rank", "q_rank")
    doubled: dict[str, Any] = {name: 2 * getattr(config, name) for name in sizes}
    plain = {"head_dim": config.head_size, "mup_base_dim": 0, "mup_base_head_dim": 0}
    return replace(config, **doubled, **plain, moe=moe)


def parametrize(defs: tree.Tree, of_wider: tree.Tree, m: float) -> tree.Tree:
    """`defs` of the standard parametrization with widths and initial values of muP.

    `of_wider` are those of the model that is `wider`, and m is `GPTConfig.mup_width`.
    """
    return tree.map_with_path(lambda path, d, other: _scale_def(path, d, other, m), defs, of_wider)


def _scale_def(path: str, d: ParamDef, other: ParamDef, m: float) -> ParamDef:
    own = slice(num_stacked(d), None)
    names = d.axes[own]
    if not d.decay or len(names) < 2 or path == "unembed":
        return d  # a vector, or what `logit_scale` accounts for
    grows = [two > one for one, two in zip(d.shape[own], other.shape[own], strict=True)]
    inputs = len(names) - 1 if names[-1] == "embed" and names[0] != "embed" else 1
    size = Width(*(m if any(part) else 1.0 for part in (grows[:inputs], grows[inputs:])))
    if size.inputs == 1:
        return d
    assert isinstance(d.init, Normal)
    factor = math.sqrt(size.outputs) / size.inputs
    return replace(d, init=Normal(d.init.stddev * factor), width=size)


def folded(config: GPTConfig, params: tree.Tree) -> tuple[GPTConfig, tree.Tree]:
    """A model of the standard parametrization that computes the same, to export or adapt it.

    The factor of logits goes into the unembedding, or where that is the embedding too, into the
    scale and bias of the last norm; that of scores into the projection of queries, or into the
    scale of their norm. Computed in float32 at least, and rounded to the parameters' dtype.

    Args:
        config: with or without muP.
        params: global values or this rank's shards; or leaves that are read where they are indexed.

    Raises:
        ValueError: there is no parameter that the factor of a tied embedding could go into, or that
            of scores; all reasons are listed.
    """
    if not config.mup_base_dim:
        return config, params
    logits, scores = 1.0 / config.mup_width, config.mup_score_scale * math.sqrt(config.head_size)
    raise_problems("cannot fold muP into the parameters", _folding_problems(config, logits, scores))
    made = dict(params)
    if logits != 1 and config.tied:
        made["norm"] = _scale_norm(params["norm"], logits, config.zero_centered_norm)
    elif logits != 1:
        made["unembed"] = _scale(params["unembed"], logits)
    if scores not in (0, 1):
        for name in config.stacks:
            made[name] = _scale_queries(config, params[name], scores)
        if config.mtp_depth:
            inner = _scale_queries(config, params["mtp"]["block"], scores)
            made["mtp"] = {**params["mtp"], "block": inner}
    return replace(config, mup_base_dim=0, mup_base_head_dim=0), made


def _folding_problems(config: GPTConfig, logits: float, scores: float) -> list[Problem]:
    found = []
    if logits != 1 and config.tied:
        fix = "train with tied=False, or at the base width"
        if config.mtp_depth:  # its modules read what the last norm makes
            wanted = "0 with tied and mup_base_dim"
            found.append(Problem("mtp_depth", str(config.mtp_depth), wanted, fix))
        if config.norm == "bare_layer":
            wanted = "a norm with a scale, with tied and mup_base_dim"
            found.append(Problem("norm", repr(config.norm), wanted, fix))
    if scores not in (0, 1) and config.qkv_clip and not config.qk_norm:
        got, wanted = str(config.qkv_clip), "0 with mup_base_head_dim"
        fix = "train with heads as wide as at the base, and more of them"
        found.append(Problem("qkv_clip", got, wanted, fix))
    return found


def _scale_queries(config: GPTConfig, block: Any, factor: float) -> dict:
    """The parameters of blocks whose queries are multiplied by a factor."""
    attention = dict(block["attention"])
    if config.qk_norm:
        queries = _scale_norm(attention["q_norm"], factor, config.zero_centered_norm)
        return {**block, "attention": attention | {"q_norm": queries}}
    if "qkv" in attention:
        each = torch.ones(config.num_heads // config.kv_heads + 2, 1, dtype=torch.float64)
        each[:-2] = factor
        queries = {name: _scale(leaf, each) for name, leaf in attention["qkv"].items()}
        return {**block, "attention": attention | {"qkv": queries}}
    queries = {name: _scale(leaf, factor) for name, leaf in attention["q"].items()}
    return {**block, "attention": attention | {"q": queries}}


def _scale_norm(norm: Any, factor: float, zero_centered: bool) -> dict:
    """The parameters of a norm whose result is multiplied by a factor."""
    around = 1.0 if zero_centered else 0.0
    own = {"scale": around, "layer_scale": around}
    return {name: _scale(leaf, factor, own.get(name, 0.0)) for name, leaf in norm.items()}


def _scale(leaf: Any, factor: float | torch.Tensor, around: float = 0.0) -> Any:
    """factor (x + around) - around, of a tensor or a leaf that is read when indexed."""

    def times(x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        by = factor.to(wide) if isinstance(factor, torch.Tensor) else factor
        return ((wide + around) * by - around).to(x.dtype)

    if isinstance(leaf, torch.Tensor):
        return times(leaf)
    return LazyLeaf(leaf, lambda index: times(leaf[index]))
