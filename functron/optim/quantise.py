"""Moments in 8 bits: blockwise dynamic quantisation (Dettmers et al. 2022).

"8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861. Every block of
consecutive elements along the last dim is divided by its largest magnitude, and every element is
then the nearest of 256 values that are dense near 0: from 1 down to about 5e-7, with about as many
values in each decade as its share of a byte's bits allows.

Codes have the parameter's shape and spec, so they are sharded and saved like it; scales have the
same dims, the last one divided by the block. Which parameters are quantised depends on their global
shapes only, so that the state has the same leaves on every mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shards import padded_shape
from functron.spmd.spec import dim_axes, is_spec, num_shards

BLOCK = 64
"""Elements that share a scale: 1/16 of a byte more per element. The paper has 2048; heads are often
64 wide, and smaller blocks are more precise."""

LEAST = 4096
"""Parameters of fewer elements (per layer) stay as they are, as in the paper: they save nothing."""


class Quantised(NamedTuple):
    """A tensor in 8 bits.

    Attributes:
        codes: uint8, indices into the table of values, with the tensor's shape.
        scales: float32, the largest magnitude in every block, [..., last / block].
    """

    codes: Any
    scales: Any


@functools.cache
def values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending, from -0.993 (unsigned: 0) to 1.

    A decade for each of 7 exponents, 10^-6 to 1, with 1, 2, 4, ... 64 values each (twice as many
    unsigned): the means of neighbours on an even grid from 0.1 to 1. And 0 and 1 themselves.
    """
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent * (1 if signed else 2)
        step = 0.9 / count
        decade = [10.0 ** (exponent - 6) * (0.1 + step * (i + 0.5)) for i in range(count)]
        found += decade + [-value for value in decade if signed]
    assert len(found) == 256
    return tuple(sorted(found))


def quantise(x: torch.Tensor, *, signed: bool, block: int = BLOCK) -> Quantised:
    """`x` in 8 bits, each element off by at most half the distance of neighbouring values.

    Args:
        x: floating point, its last dim a multiple of `block`.
        signed: whether it has negative elements.
        block: consecutive elements of the last dim that share a scale.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1)
    # all zeros: the code of 0, whatever the scale
    unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    table = torch.tensor(values(signed), device=x.device)
    codes = torch.bucketize(unit, (table[1:] + table[:-1]) / 2)
    return Quantised(codes.to(torch.uint8).flatten(-2), scales)


def dequantise(q: Quantised, *, signed: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor that `quantise` stored, in `dtype`."""
    block = q.codes.shape[-1] // q.scales.shape[-1]
    table = torch.tensor(values(signed), device=q.codes.device)
    unit = table[q.codes.to(torch.int64)].unflatten(-1, (-1, block))
    return (unit * q.scales.unsqueeze(-1)).flatten(-2).to(dtype)


def quantisable(defs: tree.Tree, block: int = BLOCK) -> tree.Tree:
    """A bool per parameter: whether its moments are quantised where 8 bits are asked for.

    True where blocks divide the last dim and there are at least `LEAST` elements, not counting a
    dim of stacked layers.

    Args:
        defs: the parameters' `ParamDef`s, or anything with *global* shapes.
        block: elements that share a scale.
    """

    def one(d: Any) -> bool:
        names = getattr(d, "axes", (None,) * len(d.shape))
        own = [size for size, name in zip(d.shape, names, strict=True) if name != "layers"]
        return bool(own) and own[-1] % block == 0 and math.prod(own) >= LEAST

    return tree.map(one, defs)


def check_blocks(
    defs: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh, block: int = BLOCK
) -> None:
    """Check that no shard of a quantised parameter ends within a block.

    Args:
        defs: the parameters' `ParamDef`s.
        specs: of the optimizer's state: the parameters', or those of `optim.shard_specs`.
        mesh: the ranks.
        block: elements that share a scale.

    Raises:
        ValueError: some shard does; all offenders are listed.
    """
    raise_problems(
        "moments in 8 bits cannot be sharded like this", _split(defs, specs, mesh, block)
    )


def _split(defs, specs, mesh, block) -> Iterator[Problem]:
    flat = tree.broadcast_prefix(specs, defs, is_leaf=is_spec, what="specs", wanted="a P")
    chosen = tree.leaves(quantisable(defs, block))
    for path, d, spec, flag in zip(tree.paths(defs), tree.leaves(defs), flat, chosen, strict=True):
        parts = num_shards(dim_axes(spec, len(d.shape))[-1], mesh) if flag else 1
        size = padded_shape(d.shape, spec, mesh)[-1] // parts if flag else 0
        if size % block:
            yield Problem(
                path,
                f"shards of {size} along the last dim of shape {tuple(d.shape)}, split by {spec}",
                f"a multiple of {block}, the elements that share a scale",
                "split it over fewer ranks, or choose moments in bfloat16",
            )
