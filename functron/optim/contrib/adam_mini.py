"""Adam-mini (Zhang et al. 2024): Adam with one second moment for many parameters.

"Adam-mini: Use Fewer Learning Rates To Gain More", https://arxiv.org/abs/2406.16793. The Hessian of
a transformer is near block-diagonal, with blocks of about one size of curvature: a token of an
embedding, a head of queries or keys, an output neuron of any other matrix. Each has one second
moment, the mean of its squared gradients, which is half of Adam's memory saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, public, raise_problems
from functron.optim.mask import Mask, add_decayed_weights
from functron.optim.schedules import LearningRate, new_count, scale_by_learning_rate
from functron.optim.transformation import GradientTransformation, bindable, chain, transformation
from functron.optim.zero import Whole, flat_specs, mean, num_stacked, wholes, without
from functron.spmd.spec import P


@dataclass(frozen=True)
class Block:
    """Which dims of a parameter are within a block, and which number blocks.

    Attributes:
        dims: that a block has whole; there is a block for every position in the others.
    """

    dims: tuple[int, ...]


def blocks(defs: tree.Tree) -> tree.Tree:
    """Of every parameter the `Block` that algorithm 3 of the paper gives it, of its logical axes.

    Tables outside of layers (embedding, unembedding, positions) have a block per row of the
    vocabulary or position; queries and keys (parts of a path called q or k) one per head; other
    matrices one per output, whatever dims these are stored in; what does not decay (norms and
    biases) is one block. Every layer and expert of a stack has its own.

    Raises:
        ValueError: queries and keys are joined in one parameter with values, whose blocks are
            others.
    """
    fix = "set fused_projections=False, or use another optimizer"
    raise_problems(
        "Adam-mini has no blocks for these parameters",
        [
            Problem(path, "queries, keys and values joined", "each a parameter", fix)
            for path, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)
            if not {"q", "k"}.isdisjoint(name for name, _ in d.pieces)
        ],
    )
    return tree.map_with_path(_block, defs)


def _block(path: str, d: Any) -> Block:
    first = num_stacked(d)
    own = range(first, len(d.shape))
    names = d.axes[first:]
    if not d.decay or len(own) < 2:
        kept = []
    elif "vocab" in names:
        kept = [first + names.index("vocab")]
    elif not first and names[-1] == "embed":
        kept = [0]
    elif not {"q", "k"}.isdisjoint(path.split("/")) and (heads := _heads(names)) is not None:
        kept = [first + heads]
    elif names[-1] == "embed" and names[0] != "embed":
        kept = [own[-1]]
    else:
        kept = list(own[1:])
    return Block(tuple(dim for dim in own if dim not in kept))


def _heads(names: tuple) -> int | None:
    return next((i for i, name in enumerate(names) if name in ("heads", "kv_heads")), None)


class ScaleByAdamMiniState(NamedTuple):
    """Adam-mini's moments.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        mu: running mean of the gradients, like the parameters.
        nu: running mean of their squares' means over blocks: the parameters' dims without those.
    """

    count: Any
    mu: tree.Tree
    nu: tree.Tree


@public
@bindable
def scale_by_adam_mini(
    blocks: tree.Tree,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    mu_dtype: torch.dtype | None = None,
    defs: tree.Tree = None,
    specs: tree.Tree = None,
) -> GradientTransformation:
    """Updates ``mu_hat / (sqrt(nu_hat) + eps)``, with ``nu = b2 nu + (1 - b2) mean(g^2)`` by block.

    Algorithm 1 of the paper: Adam's corrections of the bias; eps after the root. nu is float32 at
    least.

    Collectives: of every leaf whose blocks ranks divide one all-reduce of nu, over these ranks.

    Args:
        blocks: a `Block` for every leaf that this sees, a prefix tree, as `blocks` gives them.
        b1: decay of the mean of gradients, per update.
        b2: decay of the mean of squared gradients, per update.
        eps: added to the root.
        mu_dtype: how mu is stored; None: as the parameter is.
        defs: the parameters' `ParamDef`s, for global sizes; None: the sizes seen, where nothing is
            sharded.
        specs: how the leaves are sharded, a prefix tree; None: as `bind` says.

    Raises:
        ValueError: (when called) parameters are not what `defs` and `specs` say.
    """

    def blocks_of(value: tree.Tree) -> list[Block]:
        return tree.broadcast_prefix(blocks, value, what="blocks", wanted="a Block")

    def init(params):
        leaves, structure = tree.flatten(params)
        rows = zip(leaves, blocks_of(params), wholes(params, defs, specs), strict=True)
        nu = [  # means, as only these are the same on ranks that have parts of a block
            _first(mean(torch.zeros_like(p, dtype=_wide(p)), b.dims, leaf), b.dims)
            for p, b, leaf in rows
        ]
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype), params)
        return ScaleByAdamMiniState(new_count(params), mu, tree.unflatten(structure, nu))

    def update(updates, state, params=None):
        count = state.count + 1
        steps = count.to(torch.float64)  # for 1 - b2 loses digits, as in scale_by_adam
        bias1, bias2 = 1 - b1**steps, 1 - b2**steps

        def one(g, mu, nu, block: Block, leaf: Whole):
            g32 = g.to(_wide(g))
            m = b1 * mu.to(g32.dtype) + (1 - b1) * g32
            now = mean(g32.square(), block.dims, leaf)
            v = b2 * nu.reshape(now.shape) + (1 - b2) * now
            out = (m / bias1.to(m.dtype)) / ((v / bias2.to(v.dtype)).sqrt() + eps)
            return out.to(g.dtype), m.to(mu.dtype), _first(v, block.dims)

        flat, structure = tree.flatten(updates)
        parts = (tree.same_structure(updates, part) for part in (state.mu, state.nu))
        rows = zip(flat, *parts, blocks_of(updates), wholes(updates, defs, specs), strict=True)
        done = [one(*row) for row in rows]
        out, mu, nu = (tree.unflatten(structure, [row[i] for row in done]) for i in range(3))
        return out, ScaleByAdamMiniState(count, mu, nu)

    def state_specs(param_specs):
        flat = flat_specs(param_specs, blocks)
        rows = zip(tree.leaves(blocks), flat, strict=True)
        nu = [None if spec is None else without(spec, block.dims) for block, spec in rows]
        return ScaleByAdamMiniState(P(), param_specs, tree.unflatten(tree.structure(blocks), nu))

    return transformation(init, update, state_specs)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _first(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """x without these dims: what is at their first position."""
    for dim in sorted(dims, reverse=True):
        x = x.select(dim, 0)
    return x.clone() if dims else x


@public
def adam_mini(
    learning_rate: LearningRate,
    blocks: tree.Tree,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Mask = None,
    *,
    mu_dtype: torch.dtype | None = None,
    defs: tree.Tree = None,
    specs: tree.Tree = None,
) -> GradientTransformation:
    """Adam-mini with decoupled weight decay: AdamW's rates and decays at half of its memory.

    ``chain(scale_by_adam_mini(...), add_decayed_weights(...), scale_by_learning_rate(...))``.

    Args:
        learning_rate: a number, or a schedule: a function of the count of updates so far.
        blocks, b1, b2, eps, mu_dtype, defs, specs: see `scale_by_adam_mini`.
        weight_decay, mask: see `add_decayed_weights`; the decay is multiplied by the learning rate.
    """
    return chain(
        scale_by_adam_mini(blocks, b1, b2, eps, mu_dtype=mu_dtype, defs=defs, specs=specs),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
