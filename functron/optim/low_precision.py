"""Parameters and moments in few bits: float32 masters, stochastic rounding, and 8-bit moments.

Low-precision parameters have float32 master copies, or are rounded stochastically. Moments in 8
bits are quantised blockwise: each block of consecutive elements along the last dim is divided by
its largest magnitude, and each element is stored as

- ``"int8"``: the nearest of 256 values that are dense near 0: from 1 down to about 5e-7, with about
as many values in each decade as its share of a byte's bits allows (Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861);
- ``"fp8"``: the nearest of float8_e4m3fn, times 448, its largest: off by at most 1/16 of itself
down to 3.5e-5, below by 2.2e-6 of the block's largest (Peng et al. 2023, "FP8-LM: Training FP8
Large Language Models", https://arxiv.org/abs/2310.18313, whose mean of gradients is this, with one
scale a tensor). Of squares the roots are stored, as the squares span twice as many decades, more
than the format has. (FP8-LM has the squares in float16.)

Codes have the parameter's shape and spec, so they are sharded and saved like it; scales have the
same dims, the last one divided by the block. Which parameters are quantised depends on their global
shapes only, so that the state has the same leaves on every mesh.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from functron.core import compat, random, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.ops.adamw import (
    Stochastic,
    halves,
    joined,
    place_of,
    random_bits,
    remainder,
    stochastic_round,
)
from functron.ops.foreach import foreach_
from functron.optim.schedules import increment_, new_count
from functron.optim.transformation import (
    GradientTransformation,
    bindable,
    map_to_trees,
    need_params,
    transformation,
)
from functron.optim.zero import flat_specs, leaf_specs
from functron.program.recorder import active
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import DimCut, P, dim_axes, padded_part_shape, take

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""The dtypes whose parameters have masters."""

MasterBits = Literal[16, 32]
"""The bits that are kept of a bfloat16 parameter's master."""


class MastersState(NamedTuple):
    """The state of `with_fp32_masters`.

    Attributes:
        masters: float32 copies of the bfloat16 and float16 parameters, or the int16 remainders of
            bfloat16 ones; None for parameters in higher precision.
        inner: the state of the wrapped transformation.
    """

    masters: tree.Tree
    inner: tree.Tree


@public
@bindable
def with_fp32_masters(
    inner: GradientTransformation, dtypes: tree.Tree = None, *, bits: MasterBits = 32
) -> GradientTransformation:
    """`inner`, run in float32 on master copies of the low-precision parameters.

    The parameters are the rounded masters, so that updates smaller than their last bit add up
    instead of being lost. The state holds 4 bytes more per low-precision parameter, the moments of
    `inner` become float32, and `step_` makes float32 copies of those gradients. float32 and float64
    parameters are updated by `inner` directly.

    `update` returns, in float32, the difference between the new rounded masters and `params`.
    Adding it with `apply_updates` gives the rounded masters exactly when the parameter moves by
    fewer than 16 binary orders of magnitude (Sterbenz); beyond that it is off by at most 2^-24 of
    the larger of the two, until the next update, which starts from the masters. `step_` is always
    exact, and where `inner` is `adamw` and its kernel is used, one pass over memory, without
    float32 copies of gradients.

    With ``bits=16`` the state holds 2 bytes per bfloat16 parameter instead of 4: the lower half of
    the master, whose upper half is the parameter (Transformer Engine's param remainders). Masters
    have the same bits, but exist as a whole only during a step, which no kernel computes in one
    pass. Masters midway between two bfloat16 numbers have the parameter of larger magnitude, not
    the even one, so that every master has a pair of its own; one that begins there may begin a last
    bit off (`functron.ops.adamw.remainder`).

    No collectives beyond `inner`'s.

    Args:
        inner: updates the masters.
        dtypes: of the parameters, a prefix tree: then `init` may be given the unrounded parameters,
            for masters: see ``functron.init_state(..., masters=)``. None: masters begin as the
            parameters.
        bits: number of bits stored of the masters of bfloat16 parameters; 32 for those of float16.

    Raises:
        ValueError: `bits` is neither 16 nor 32.
    """
    if bits not in (16, 32):
        refuse("with_fp32_masters", "bits", str(bits), "16 or 32")

    def init(params):
        own = [leaf.dtype for leaf in tree.leaves(params)]
        kinds = own if dtypes is None else tree.broadcast_prefix(dtypes, params, what="dtypes")
        masters = tree.map_columns(functools.partial(_master, bits=bits), params, kinds)
        return MastersState(masters, inner.init(_effective(params, masters)))

    def update(updates, state, params=None, **extra):
        need_params("with_fp32_masters", params, "that the masters round to")
        effective = _effective(params, state.masters)
        wide = widen(updates, params)
        updates, inner_state = inner.update(wide, state.inner, effective, **extra)

        new = tree.map(lambda now, u: now + u, effective, updates)
        rounded, masters = _split_masters(params, new, bits)
        out = tree.map(
            lambda p, u, own: u if own is None else own.to(p.dtype).float() - p.float(),
            params,
            updates,
            rounded,
        )
        return out, MastersState(masters, inner_state)

    def step_(grads, state, params, **extra):
        effective = _effective(params, state.masters)
        wide = widen(grads, params)
        effective, inner_state = inner.step_(wide, state.inner, effective, **extra)
        rounded, masters = _split_masters(params, effective, bits)
        foreach_(
            torch._foreach_copy_,
            {"params": [param for param in tree.leaves(params) if is_low(param)]},
            {"masters": tree.leaves(rounded)},
        )
        return params, MastersState(masters, inner_state)

    return transformation(
        init,
        update,
        specs=lambda param_specs: MastersState(param_specs, inner.specs(param_specs)),
        step_=step_,
        grad_specs=inner.grad_specs,
        elementwise=inner.elementwise,
    )


def is_low(param: torch.Tensor) -> bool:
    """Whether a parameter is bfloat16 or float16."""
    return param.dtype in LOW_PRECISION


def _master(param: torch.Tensor, dtype: torch.dtype, bits: int) -> torch.Tensor | None:
    """The stored master of a parameter of this dtype, from its rounded or unrounded value."""
    if dtype not in LOW_PRECISION and not is_low(param):
        return None
    master = param.detach().to(torch.float32, copy=True)
    halved = bits == 16 and torch.bfloat16 in (dtype, param.dtype)
    return remainder(master) if halved else master


def _split_masters(params: tree.Tree, masters: tree.Tree, bits: int) -> tuple[tree.Tree, tree.Tree]:
    """For low-precision parameters the values to round, and the masters to store; else None."""

    def one(param: torch.Tensor, master: torch.Tensor) -> tuple:
        if not is_low(param):
            return None, None
        if bits == 16 and param.dtype == torch.bfloat16:
            return halves(master)
        return master, master

    rounded, kept = map_to_trees(2, one, params, tree.leaves(masters))
    return rounded, kept


def _effective(params: tree.Tree, masters: tree.Tree) -> tree.Tree:
    """The parameters for `inner`: the master where there is one, else the parameter."""

    def one(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
        if master is None or master.dtype != torch.int16:
            return param if master is None else master
        return joined(param.to(torch.bfloat16), master)

    return tree.map(one, params, masters)


def widen(updates: tree.Tree, params: tree.Tree) -> tree.Tree:
    """`updates`, those of parameters of low precision as float32."""
    return tree.map(lambda u, p: u.float() if is_low(p) else u, updates, params)


class StochasticState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
        key: of `functron.random`, from which all bits are drawn.
        count: number of updates so far; int64, 0-dim.
        inner: the state of the wrapped transformation.
    """

    key: Any
    count: Any
    inner: tree.Tree


@public
@bindable
def with_stochastic_rounding(
    inner: GradientTransformation, seed: int = 0, *, defs: tree.Tree = None, specs: tree.Tree = None
) -> GradientTransformation:
    """`inner`, run in float32, and low-precision parameters rounded stochastically.

    A parameter becomes one of the two numbers of its dtype around its new value, with probabilities
    that make the mean exact: updates far below the last bit add up, as with `with_fp32_masters`,
    without 4 bytes per parameter; each step adds noise of up to one last bit. Moments of `inner`
    are float32, unless it says otherwise. float32 and float64 parameters are updated by `inner`
    directly.

    The random bits depend on a parameter's path, an element's global position and the count of
    updates, so numbers are the same on every mesh, up to differences in gradients; except in
    pipelines of processes, each of which counts its layers from 0.

    `update` returns, in float32, the difference between the new parameters and `params`, which
    `apply_updates` adds as exactly as with masters. With `adamw`'s kernel `step_` is one pass over
    memory; otherwise it makes float32 copies of parameters and gradients. No collectives beyond
    `inner`'s.

    Args:
        inner: such as ``adamw(rate, mu_dtype=torch.bfloat16)``.
        seed: of the random bits; its key is part of the state.
        defs: the parameters' `ParamDef`s, or anything with global shapes; needed where they are
            sharded. None: the sizes seen.
        specs: how the leaves are sharded, a prefix tree; None: from `bind`.
    """

    def init(params):
        device = tree.leaves(params)[0].device if tree.leaves(params) else None
        key = random.key(seed, device=device)
        return StochasticState(key, new_count(params), inner.init(tree.map(_wide, params)))

    def update(updates, state, params=None, **extra):
        need_params("with_stochastic_rounding", params, "to be rounded")
        before, count = tree.map(_wide, params), state.count + 1
        wide = widen(updates, params)
        updates, inner_state = inner.update(wide, state.inner, before, **extra)

        def one(param, old, change, bits):
            if bits is None:
                return change
            return stochastic_round(old + change, bits, param.dtype).float() - old

        bits = _bits(state.key, count, params, defs, specs)
        changes = tree.map_columns(one, params, tree.leaves(before), tree.leaves(updates), bits)
        return changes, StochasticState(state.key, count, inner_state)

    def step_(grads, state, params, **extra):
        increment_([state.count])
        gradients, wide = widen(grads, params), tree.map(_wide, params)
        wide, inner_state = inner.step_(gradients, state.inner, wide, **extra)
        bits = _bits(state.key, state.count, params, defs, specs)
        rows = zip(tree.leaves(params), tree.leaves(wide), bits, tree.paths(params), strict=True)
        low = [(*row, word, path) for *row, word, path in rows if word is not None]
        old, new, words, paths = map(list, zip(*low, strict=True)) if low else ([], [], [], [])
        read = {"their new values": new, "bits": words}
        foreach_(_round_, {"params": old}, read, paths=lambda: paths)
        return params, StochasticState(state.key, state.count, inner_state)

    return transformation(
        init,
        update,
        specs=lambda param_specs: StochasticState(P(), P(), inner.specs(param_specs)),
        step_=step_,
        grad_specs=inner.grad_specs,
    )


def _wide(param: torch.Tensor) -> torch.Tensor:
    return param.detach().float() if is_low(param) else param


def _round_(params: list, values: list, bits: list) -> None:
    for param, value, word in zip(params, values, bits, strict=True):
        param.copy_(stochastic_round(value, word, param.dtype))


def _salt(path: str) -> int:
    """A number for a leaf's path, as in `functron.init_params`."""
    return zlib.crc32(path.encode())


def _whole(params: tree.Tree, defs: tree.Tree, specs: tree.Tree) -> list[tuple]:
    """The global shape of every leaf, and the axes that split its dims."""
    leaves = tree.leaves(params)
    known = leaves if defs is None else tree.broadcast_prefix(defs, params, what="the defs")
    flat = leaf_specs(specs, params, "with_stochastic_rounding")
    return [
        (tuple(d.shape), dim_axes(spec, len(d.shape))) for d, spec in zip(known, flat, strict=True)
    ]


def _index(shape: Sequence[int], split: Sequence, device: torch.device | None) -> list:
    """The global positions along every dim that this rank has; None where it has all of them.

    Those of padding are 0, or past the end: it is zero, which is rounded to zero.
    """
    return [
        take(torch.arange(size, device=device), (DimCut(-1, axes),)) if axes else None
        for size, axes in zip(shape, split, strict=True)
    ]


def _bits(
    key: torch.Tensor, count: torch.Tensor, params: tree.Tree, defs: tree.Tree, specs: tree.Tree
) -> list[torch.Tensor | None]:
    """16 bits for every element of the parameters of low precision; None for the others."""
    step_key = random.fold_in(key, count)
    rows = zip(tree.paths(params), tree.leaves(params), _whole(params, defs, specs), strict=True)
    return [
        random_bits(random.fold_in(step_key, _salt(path)), shape, _index(shape, split, key.device))
        if is_low(leaf)
        else None
        for path, leaf, (shape, split) in rows
    ]


def kernel_roundings(
    key: torch.Tensor, params: tree.Tree, defs: tree.Tree, specs: tree.Tree
) -> tree.Tree:
    """How the kernel rounds each parameter; None in simulation, and for shards in a traced program,
    where it cannot.
    """
    whole = _whole(params, defs, specs)
    if compat.transforms_active() or (active() is not None and any(any(cut) for _, cut in whole)):
        return None  # a program is the same on every rank, and does not say which part it has
    found: list[Stochastic | None] = []
    rows = zip(tree.paths(params), tree.leaves(params), whole, strict=True)
    for path, leaf, (shape, split) in rows:
        index = _index(shape, split, torch.device("cpu"))
        starts = [0 if at is None else int(at[0]) if len(at) else 0 for at in index]
        place = place_of(shape, starts, leaf.shape)
        if not is_low(leaf):
            found.append(None)
        elif place is None or not _in_order(leaf):
            return None
        else:
            found.append(Stochastic(key, _salt(path), place))
    return tree.unflatten(tree.structure(params), found)


def _in_order(leaf: torch.Tensor) -> bool:
    """Whether elements lie in memory in the order of their positions, with gaps or without."""
    strides = [n for n, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
    return strides == sorted(strides, reverse=True)


BLOCK = 64
"""Elements that share a scale: 1/16 of a byte more per element. The paper has 2048; heads are often
64 wide, and smaller blocks are more precise."""

LEAST = 4096
"""Parameters of fewer elements (per layer) stay as they are, as in the paper: they save nothing."""


Coding = Literal["int8", "fp8"]
"""The number kept of an element of a block; `functron.optim.low_precision` has the two."""

CODES: Mapping[Coding, torch.dtype] = MappingProxyType(
    {"int8": torch.uint8, "fp8": torch.float8_e4m3fn}
)
"""The dtype of the codes of each `Coding`, which tells them apart."""


class QuantisedMoment(NamedTuple):
    """A tensor in 8 bits.

    Attributes:
        codes: with the tensor's shape; of "int8" indices into the table of values, in uint8; of
            "fp8" numbers in float8_e4m3fn.
        scales: float32, the largest magnitude in every block, [..., last / block]; of "fp8" and
            squares, that of the roots.
    """

    codes: Any
    scales: Any


@functools.cache
def values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending, from -0.993 (unsigned: 0) to 1.

    7 decades, 10^-6 to 1, with 1, 2, 4, ... 64 values each (twice as many unsigned): the midpoints
    of an even grid from 0.1 to 1. And 0 and 1 themselves.
    """
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent * (1 if signed else 2)
        step = 0.9 / count
        decade = [10.0 ** (exponent - 6) * (0.1 + step * (i + 0.5)) for i in range(count)]
        found += decade + [-value for value in decade if signed]
    assert len(found) == 256
    return tuple(sorted(found))


def quantise(
    x: torch.Tensor, *, signed: bool, block: int = BLOCK, coding: Coding = "int8"
) -> QuantisedMoment:
    """`x` in 8 bits, each element off by at most half the distance of neighbouring values.

    Args:
        x: floating point, its last dim a multiple of `block`.
        signed: whether it has negative elements.
        block: number of consecutive elements of the last dim that share a scale.
        coding: how elements are stored; "fp8" stores the roots of unsigned ones.
    """
    wide = x.to(torch.float32)
    blocks = (wide if signed or coding == "int8" else wide.sqrt()).unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1)
    # all zeros: the code of 0, whatever the scale
    unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    if coding == "fp8":
        return QuantisedMoment((unit * _MOST).to(CODES["fp8"]).flatten(-2), scales)
    table = compat.constant(values(signed), x.device)
    codes = torch.bucketize(unit, (table[1:] + table[:-1]) / 2)
    return QuantisedMoment(codes.to(torch.uint8).flatten(-2), scales)


def dequantise(
    q: QuantisedMoment, *, signed: bool, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor that `quantise` stored, in `dtype`."""
    block = q.codes.shape[-1] // q.scales.shape[-1]
    if coding_of(q.codes.dtype) == "fp8":
        unit = (q.codes.to(torch.float32) / _MOST).unflatten(-1, (-1, block))
        found = (unit * q.scales.unsqueeze(-1)).flatten(-2)
        return (found if signed else found.square()).to(dtype)
    table = compat.constant(values(signed), q.codes.device)
    unit = table[q.codes.to(torch.int64)].unflatten(-1, (-1, block))
    return (unit * q.scales.unsqueeze(-1)).flatten(-2).to(dtype)


_MOST = 448.0
"""The largest number of float8_e4m3fn."""


def coding_of(codes: torch.dtype) -> Coding:
    """The `Coding` that has codes of this dtype."""
    return "fp8" if codes == CODES["fp8"] else "int8"


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
    found = []
    flat = [spec or P() for spec in flat_specs(specs, defs)]
    chosen = tree.leaves(quantisable(defs, block))
    for path, d, spec, flag in zip(tree.paths(defs), tree.leaves(defs), flat, chosen, strict=True):
        size = padded_part_shape(d.shape, spec, mesh)[-1] if flag else 0
        if size % block:
            got = f"shards of {size} along the last dim of shape {tuple(d.shape)}, split by {spec}"
            wanted = f"a multiple of {block}, the elements that share a scale"
            fix = "split it over fewer ranks, or choose moments in bfloat16"
            found.append(Problem(path, got, wanted, fix))
    raise_problems("moments in 8 bits cannot be sharded like this", found)
