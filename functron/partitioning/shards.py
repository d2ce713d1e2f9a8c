"""Operations on shards: what a rank computes where an operation is more than itself on its part.

Views have sizes of their own on every rank. A mean divides by the global count. What is computed
along a split dim, such as a softmax or a lookup in a split vocabulary, needs statistics of all of
it, a maximum and a sum, never the values. All are plain functions on `functron.lax`, so that they
are simulated, differentiated and traced like everything else in a per-rank program.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.nn import functional as F

from functron.core import compat, tree
from functron.core.functions import Function
from functron.nn import context
from functron.ops import Op
from functron.ops import attention as attention_ops
from functron.ops.cross_entropy import check_ids
from functron.ops.glu import GLU, GLU_PACKED
from functron.ops.moe import look_up
from functron.ops.norms import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from functron.partitioning.placement import Digits, Sizes
from functron.program.callbacks import repeat_effect
from functron.program.equations import Equation, Var
from functron.program.recorder import map_only
from functron.spmd import collectives as lax
from functron.spmd.mesh import STANDARD_AXES
from functron.spmd.spec import P
from functron.transforms.gradient import rule_vjp
from functron.transforms.policies import checkpoint_name

_aten = torch.ops.aten


@dataclass(frozen=True)
class EquationSite:
    """Where a rank runs an equation.

    Attributes:
        equation: in global view.
        operands: the letters of every operand's dims.
        letters: the axes that split each letter; letters that none splits are missing.
        sizes: of the letters, globally.
        shapes: of this rank's part of every result.
        axes: sizes of the mesh axes.
        equal: those over which the cotangents of results are equal on all ranks.
    """

    equation: Equation
    operands: Sequence[Any]
    letters: Mapping[str, Digits]
    sizes: Mapping[str, int]
    shapes: Sequence[tuple[int, ...]]
    axes: Sizes
    equal: frozenset[str] = frozenset()

    @property
    def op(self) -> Any:
        """The operation itself, for letters that are not split."""
        return self.equation.op

    def held(self, letter: str) -> int:
        """The size of this rank's part of a letter."""
        return self.sizes[letter] // math.prod(self.axes[axis] for axis in self.names(letter))

    def held_bytes(self, operand: int) -> int:
        """The bytes of this rank's part of an operand."""
        letters = [letter for dim in self.operands[operand] for letter in dim]
        itemsize = self.equation.operands[operand].dtype.itemsize
        return math.prod(map(self.held, letters)) * itemsize

    def names(self, letters: Sequence[str]) -> list[str]:
        """The axes that split these letters."""
        return [d.axis for letter in letters for d in self.letters.get(letter, ())]

    def split(self, operand: int, dim: int) -> list[str]:
        """The axes that split a dim of an operand."""
        return self.names(self.operands[operand][dim])

    def local(self, ids: torch.Tensor, letter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where global indices are in this rank's part of a letter, and whether they are there."""
        size, here = self.sizes[letter], torch.ones_like(ids, dtype=torch.bool)
        for outer, axis in reversed(self.letters.get(letter, ())):
            n = self.axes[axis]
            block = size // (outer * n)
            here = here & (ids // block % n == lax.axis_index(axis))
            ids = ids // (block * n) * block + ids % block
            size //= n
        return ids, here


RunShard = Callable[..., Any]
"""The computation of a rank: ``(site, *args, **kwargs)`` on its shards to the results."""


def name_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of an operation's schema, with its defaults."""
    found = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds up numbers of this one."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _total(x: torch.Tensor, axes: Sequence[str], equal: Collection[str] = ()) -> torch.Tensor:
    for axis in axes:
        x = lax.psum(x, axis, equal_cotangents=axis in equal)
    return x


def same(site: EquationSite, x, *args, **kwargs):
    """x itself."""
    return x


_OWN: Mapping[str, Op] = MappingProxyType(
    {op.name: op for op in (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM, GLU, GLU_PACKED)}
)


def run_own_op(site: EquationSite, *args):
    """An op of functron, with its derivative; of all rows, as a count is of those of all ranks."""
    counts = [isinstance(x, torch.Tensor) and not x.is_floating_point() for x in args]
    return _OWN[site.equation.name](*itertools.compress(args, map(operator.not_, counts)))


def run_registered(site: EquationSite, *args):
    """An operation that users registered, with its derivative."""
    op: Any = site.equation.op
    return op.functron_own.op(*args)


def name(site: EquationSite, x, name):
    """x, marked by a name for the policies of remat."""
    return checkpoint_name(x, name)


def effect(site: EquationSite, *args, **kwargs):
    """An effect on whole values, on every rank."""
    repeat_effect(site.equation, *args, **kwargs)
    return []


def overwritten(site: EquationSite, before, after):
    """`after`, whose cotangent is that of `before`."""
    return _Overwritten.apply(before, after)


class _Overwritten(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(before, after):
        return after.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return cotangents[0], None


def fresh(site: EquationSite, x, *args, **kwargs):
    """A new tensor like x in kind alone, the same on all ranks however x differs."""
    return site.op(torch.empty(0, dtype=x.dtype, device=x.device), *args, **kwargs)


def fill(site: EquationSite, x, value):
    """A number in the shape and dtype of x, whose numbers do not matter."""
    if not isinstance(value, torch.Tensor):
        return torch.full_like(x, value)
    return torch.zeros_like(x) + value.to(x.dtype)  # on each rank its own, as x is


def reshape(site: EquationSite, x, *args, **kwargs):
    """x in the shape that this rank's part of the result has."""
    return x.reshape(site.shapes[0])


def reinterpret(site: EquationSite, x, dtype):
    """The bits of x as numbers of another dtype."""
    return x.contiguous().view(dtype)


def expand(site: EquationSite, x, *args, **kwargs):
    """x expanded to this rank's part of the result."""
    return x.expand(site.shapes[0])


def cut_parts(site: EquationSite, x, *args, **kwargs):
    """Parts of x of the sizes of this rank's parts."""
    operand, (dim,) = site.equation.operands[0], dims_of(site.equation)
    results = site.equation.results
    if sum(value.shape[dim] for value in results) != operand.shape[dim]:
        return site.op(x, *args, **kwargs)
    return x.split([shape[dim] for shape in site.shapes], dim)


def dims_of(equation: Equation, name: str = "dim") -> list[int]:
    """The dims of the first operand that an operation is along.

    Those that an argument of this name gives, or that it normalises; all where it gives none.
    """
    named = name_arguments(equation.op, equation.args, equation.kwargs)
    given, count = named.get(name), len(equation.operands[0].shape)
    if "normalized_shape" in named:
        return list(range(count - len(named["normalized_shape"]), count))
    if given is None or given == []:
        return list(range(count))
    return [dim % max(count, 1) for dim in (given if isinstance(given, (list, tuple)) else [given])]


def _along_split(run: Callable) -> RunShard:
    """`run`, also given the dims and the axes that split them; the operation where none does."""

    @functools.wraps(run)
    def on_shard(site: EquationSite, x, *args, **kwargs):
        dims = dims_of(site.equation)
        axes = [name for dim in dims for name in site.split(0, dim)]
        return run(site, x, dims, axes, *args, **kwargs) if axes else site.op(x, *args, **kwargs)

    return on_shard


@_along_split
def mean(site: EquationSite, x, dims, axes, *args, **kwargs):
    """This rank's part of the mean: its sum, divided by the global count."""
    shape = site.equation.operands[0].shape
    count = math.prod(shape[dim] for dim in dims)
    (result,) = site.equation.results
    keep = len(result.shape) == len(shape)
    # as torch adds them up: a sum of halves may overflow
    summed = x.sum(dims, keepdim=keep, dtype=wide_dtype(result.dtype))
    return (summed / count).to(result.dtype)


@_along_split
def softmax(site: EquationSite, x, dims, axes, dim, half_to_float=False):
    """Softmax along a dim that may be split: two reductions of one number per row."""
    x = x.float() if half_to_float else x
    e = (x - _largest(x, dims, axes)).exp()
    return e / _total(e.sum(dims, keepdim=True), axes)


@_along_split
def safe_softmax(site: EquationSite, x, dims, axes, dim, dtype=None):
    """`softmax`, with zeros where all of the dim is minus infinity."""
    x = x if dtype is None else x.to(dtype)
    e = (x - _largest(x, dims, axes)).exp()
    total = _total(e.sum(dims, keepdim=True), axes)
    return e / torch.where(total == 0, 1, total)


@_along_split
def log_softmax(site: EquationSite, x, dims, axes, dim, half_to_float=False):
    """The logarithm of `softmax`."""
    x = x.float() if half_to_float else x
    x = x - _largest(x, dims, axes)
    return x - _total(x.exp().sum(dims, keepdim=True), axes).log()


def _largest(x: torch.Tensor, dims: Sequence[int], axes: Sequence[str]) -> torch.Tensor:
    """The maximum over dims and ranks, with no derivative; 0 where it is infinite."""
    most = lax.pmax(lax.stop_gradient(x).amax(dims, keepdim=True), axes)
    return torch.where(most.abs() == math.inf, torch.zeros_like(most), most)


@_along_split
def extremum(site: EquationSite, x, dims, axes, *args, **kwargs):
    """The largest, or for amin the smallest, over dims that may be split."""
    largest = site.equation.name == "amax"
    return _extremum(x, dims, axes, site.equal, largest).reshape(site.shapes[0])


def _extremum(x: torch.Tensor, dims, axes: Sequence[str], equal, largest: bool) -> torch.Tensor:
    """The maximum or minimum over dims and ranks, kept as dims of size 1.

    Its cotangent is shared evenly among the elements that are it, of all ranks, as torch does.
    """
    still = lax.stop_gradient(x)
    if largest:
        found = lax.pmax(still.amax(dims, keepdim=True), axes)
    else:
        found = lax.pmin(still.amin(dims, keepdim=True), axes)
    tracked = compat.differentiating() or compat.requires_grad(x)
    if not (tracked and x.is_floating_point()):
        return found
    here = still == found
    count = _total(here.sum(dims, keepdim=True), axes)
    mean = _total(_mask_rows(x, here).sum(dims, keepdim=True) / count, axes, equal)
    return _Overwritten.apply(mean, found)  # of which the numbers are exact


@_along_split
def logsumexp(site: EquationSite, x, dims, axes, *args, **kwargs):
    """log sum exp over dims that may be split."""
    most = _largest(x, dims, axes)
    total = _total((x - most).exp().sum(dims, keepdim=True), axes, site.equal)
    out = total.log() + most
    return out.reshape(site.shapes[0])


@_along_split
def norm(site: EquationSite, x, dims, axes, ord=2, *args, **kwargs):  # noqa: A002
    """The vector norm over dims that may be split."""
    x = x.to(kwargs.get("dtype") or x.dtype).abs()
    if ord in (math.inf, -math.inf):
        return _extremum(x, dims, axes, site.equal, largest=ord > 0).reshape(site.shapes[0])
    if ord == 0:
        return _total((x != 0).to(x.dtype).sum(dims), axes).reshape(site.shapes[0])
    total = _total((x**ord).sum(dims), axes, site.equal)
    some = total != 0  # of zeros the derivative is 0
    root = torch.where(some, total, 1) ** (1 / ord)
    return torch.where(some, root, 0).reshape(site.shapes[0])


@_along_split
def layer_norm(site: EquationSite, x, dims, axes, normalized_shape, weight, bias, eps):
    """Layer normalisation of dims that may be split: the mean, then the variance, are summed."""
    count = math.prod(normalized_shape)
    mean = _total(x.sum(dims, keepdim=True), axes) / count
    variance = _total((x - mean).square().sum(dims, keepdim=True), axes) / count
    scale = (variance + eps).rsqrt()
    y = (x - mean) * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, scale


@_along_split
def rms_norm(site: EquationSite, x, dims, axes, normalized_shape, weight=None, eps=None):
    """Root-mean-square normalisation of dims that may be split."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    total = _total(x.square().sum(dims, keepdim=True), axes)
    scale = (total / math.prod(normalized_shape) + eps).rsqrt()
    return (x * scale if weight is None else x * scale * weight), scale


def layer_norm_backward(site: EquationSite, grad, x, shape, mean, scale, weight, bias, wanted):
    """The gradients of `layer_norm`; those of vectors are of this rank's rows."""
    dims = dims_of(site.equation)
    axes = [name for dim in dims for name in site.split(0, dim)]
    if not axes and not compat.transforms_active():  # whose rules of it take moments as given
        return site.op(grad, x, shape, mean, scale, weight, bias, wanted)
    kind, count, rows = x.dtype, math.prod(shape), list(range(dims[0]))
    grad, x = (value.to(wide_dtype(kind)) for value in (grad, x))
    # of x once more: torch's forward leaves moments that do not depend on x for derivatives
    y = x - _total(x.sum(dims, keepdim=True), axes) / count
    scale = _rescale(scale, _total(y.square().sum(dims, keepdim=True), axes) / count)
    y = y * scale
    moved = grad if weight is None else grad * weight
    sums = torch.stack([moved.sum(dims, keepdim=True), (moved * y).sum(dims, keepdim=True)])
    means = _total(sums, axes) / count
    into_weight, into_bias = (v.sum(rows) if rows else v for v in (grad * y, grad))
    moved = (scale * (moved - means[0] - y * means[1])).to(kind)
    vector = kind if weight is None else weight.dtype
    return moved, into_weight.to(vector), into_bias.to(vector)


def _rescale(scale: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """The scale of a norm as it depends on the variance, by what was added to that."""
    return (lax.stop_gradient(scale**-2 - variance) + variance).rsqrt()


def rms_norm_backward(site: EquationSite, grad, x, shape, scale, weight, wanted):
    """The gradients of `rms_norm`; that of the vector is of this rank's rows."""
    dims = dims_of(site.equation)
    axes = [name for dim in dims for name in site.split(0, dim)]
    if not axes and not compat.transforms_active():
        return site.op(grad, x, shape, scale, weight, wanted)
    kind, count, rows = x.dtype, math.prod(shape), list(range(dims[0]))
    grad, x = (value.to(wide_dtype(kind)) for value in (grad, x))
    scale = _rescale(scale, _total(x.square().sum(dims, keepdim=True), axes) / count)
    y = x * scale
    moved = grad if weight is None else grad * weight
    mean = _total((moved * y).sum(dims, keepdim=True), axes) / count
    into_weight = (grad * y).sum(rows) if rows else grad * y
    vector = kind if weight is None else weight.dtype
    return (scale * (moved - y * mean)).to(kind), into_weight.to(vector)


@_along_split
def softmax_backward(site: EquationSite, grad, dims, axes, output, dim, input_dtype):
    """The gradient of `softmax` along a dim that may be split."""
    total = _total((grad * output).sum(dims, keepdim=True), axes)
    return (output * (grad - total)).to(input_dtype)


@_along_split
def log_softmax_backward(site: EquationSite, grad, dims, axes, output, dim, input_dtype):
    """The gradient of `log_softmax` along a dim that may be split."""
    return (grad - output.exp() * _total(grad.sum(dims, keepdim=True), axes)).to(input_dtype)


def put_in_zeros(site: EquationSite, grad, sizes, *args, **kwargs):
    """The cotangent of a part of a value, where it was, among zeros of the shape of this rank's."""
    return site.op(grad, site.shapes[0], *args, **kwargs)


def convolution_backward(site: EquationSite, grad, x, weight, bias_sizes, *args):
    """The gradients of a convolution: of this rank's samples, and of its channels.

    That of the bias is by itself: it is the same on ranks that have other channels of x.
    """
    *options, wanted = args
    sizes = bias_sizes and [grad.shape[1]]
    into_x, into_weight, _ = site.op(grad, x, weight, sizes, *options, [*wanted[:2], False])
    rows = [0, *range(2, grad.dim())]
    return into_x, into_weight, grad.sum(rows) if wanted[2] else None


def pull_back(run: RunShard, op: Any, site: EquationSite, cotangent, *operands):
    """The cotangents of the first operands of what `run` computes, which is computed again.

    Args:
        op: a `functron.partitioning.backward.Pullback`.
    """
    forward, count = op.forward, op.num_moving
    shapes = [tuple(cotangent.shape)]
    inner = replace(site, equation=forward, operands=site.operands[1:], shapes=shapes)

    def again(*moving):
        values = iter((*moving, *operands[count:]))
        given = forward.args, dict(forward.kwargs)
        args, kwargs = map_only(Var, lambda _: next(values), given)
        return run(inner, *args, **kwargs)[0]

    _, pull = rule_vjp(again, *operands[:count])
    return pull(cotangent)


def _mask_rows(values: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    return torch.where(here, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _look_up(site: EquationSite, letter: str, ids, read: Callable, *, after: int = 0):
    """``read(ids)`` of this rank's part of a letter; zeros where an id is in another rank's.

    Args:
        letter: that `ids` are places in.
        after: the dims of results after those of `ids`.

    Raises:
        ValueError: an id is in no rank's; see `check_ids`.
    """
    check_ids(ids, f"indices of {site.equation.name}", site.sizes[letter])
    local, here = site.local(ids, letter)
    return _mask_rows(read(torch.where(here, local, 0)), here.reshape(*here.shape, *(1,) * after))


def embedding(site: EquationSite, weight, ids, padding_idx=-1, *args, **kwargs):
    """Rows of a table; zeros for those that are in another rank's part of it.

    Counts of ids are those of all ranks where gradients are scaled by them: then nothing is split.
    """
    letters = site.operands[0][0]
    if any((*args, *kwargs.values())):
        return site.op(weight, ids, padding_idx, *args, **kwargs)
    if not site.names(letters):
        rows = look_up(weight, ids, whole=True)
    else:
        check_ids(ids, "indices of embedding", site.sizes[letters[0]])  # a rank has zeros for them
        local, here = site.local(ids, letters[0])
        rows = look_up(weight, torch.where(here, local, -1))
    if padding_idx < 0:
        return rows
    return torch.where((ids == padding_idx).unsqueeze(-1), lax.stop_gradient(rows), rows)


def embedding_backward(site: EquationSite, grad, ids, num_weights, padding_idx, scale_grad_by_freq):
    """The gradient of this rank's part of a table, from its ids."""
    if not site.names(["v0"]):
        return site.op(grad, ids, num_weights, padding_idx, scale_grad_by_freq)
    local, here = site.local(ids, "v0")
    here = here & (ids != padding_idx)
    rows = _mask_rows(grad, here.unsqueeze(-1)).flatten(0, -2)
    table = grad.new_zeros(site.shapes[0])
    return table.index_add(0, torch.where(here, local, 0).flatten(), rows)


def gather(site: EquationSite, x, dim, index, **kwargs):
    """Elements along a dim; zeros for those that are in another rank's part of it."""
    labels: Any = site.operands[0]
    letters: list[str] = [*labels[dim]] if labels else []
    if not site.names(letters):
        return torch.gather(x, dim, index)
    return _look_up(site, letters[0], index, lambda here: torch.gather(x, dim, here))


def index(site: EquationSite, x, *args: Any, **kwargs):
    """Rows along one dim; zeros for those that are in another rank's part of it."""
    if site.equation.name == "index_select":
        dim, ids = args[0] % max(x.dim(), 1), args[1]
    else:
        dim, ids = next((i, ids) for i, ids in enumerate(args[0]) if ids is not None)
    letters = site.operands[0][dim]
    if not site.names(letters):
        return site.op(x, *args, **kwargs)
    ids = torch.where(ids < 0, ids + site.sizes[letters[0]], ids)
    before, after = (slice(None),) * dim, x.dim() - 1 - dim
    return _look_up(site, letters[0], ids, lambda here: x[(*before, here)], after=after)


def index_add_rows(site: EquationSite, x, indices, values, accumulate):
    """x with values added at indices, of which ranks may have parts: x itself counts once."""
    letters = [letter for row in site.operands[1:] for dim in row for letter in dim]
    axes = dict.fromkeys(site.names([each for each in letters if each.startswith("i")]))
    for axis in axes:
        x = _mask_rows(x, torch.as_tensor(lax.axis_index(axis) == 0, device=x.device))
    return site.op(x, indices, values, accumulate)


def mask_put(site: EquationSite, x, indices, values, accumulate=False):
    """x with values, which broadcast, where a mask of some of its dims is true."""
    start = next(i for i, index in enumerate(indices) if index is not None)
    mask = indices[start].bool()
    after = x.dim() - start - mask.dim()
    place = values.dim() - 1 - after
    if place >= 0:  # of one dim for all of the mask's
        ones = (1,) * mask.dim()
        values = values.reshape(*values.shape[:place], *ones, *values.shape[place + 1 :])
    mask = mask.reshape(*mask.shape, *(1,) * after)
    return torch.where(mask, x + values if accumulate else values, x)


def select_scatter(site: EquationSite, x, source, dim, index):
    """x with other numbers at one place of a dim, as a range of it.

    Of select_scatter itself torch differentiates the rule under vmap to wrong numbers (2.13).
    """
    dim = dim % x.dim()
    index = index % x.shape[dim]
    return x.slice_scatter(source.unsqueeze(dim), dim, index, index + 1)


def index_fill(site: EquationSite, x, dim, index, value):
    """x with a number at places of a dim; torch's derivative of it has a shape by the index."""
    mask = x.new_zeros(x.shape[dim], dtype=torch.bool).index_fill(0, index, True)
    mask = mask.reshape(*mask.shape, *(1,) * (x.dim() - 1 - dim % x.dim()))
    return torch.where(mask, value, x)


_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define(
    "cross_entropy_loss(Tensor self, Tensor target, Tensor? weight, int reduction, "
    "SymInt ignore_index, bool half_to_float) -> (Tensor, Tensor)"
)


def cross_entropy_loss(
    site: EquationSite, x, target, weight, reduction, ignore_index, half_to_float
):
    """`nll_loss` of log_softmax(x): over a split vocabulary of logits and the log of their sum.

    The two together, since that sum's cotangent is then one number per token that all ranks have.
    Of log_softmax alone it is a sum over the vocabulary of what only its target's rank knows.
    """
    x, names = x.float() if half_to_float else x, site.names(site.operands[0][-1])
    if not names:
        return nll_loss(site, x.log_softmax(-1), target, weight, reduction, ignore_index)
    most = _largest(x, [-1], names)
    total = _total((x - most).exp().sum(-1, keepdim=True), names, site.equal)
    return nll_loss(site, x, target, weight, reduction, ignore_index, total.log() + most)


def nll_loss(site: EquationSite, x, target, weight, reduction, ignore_index, lse=None):
    """The negative log likelihoods of targets, and how many count, over a split vocabulary.

    With `lse`, of likelihoods ``x - lse``.
    """
    labels = site.operands[0]
    if weight is not None and not site.names([letter for row in labels for letter in row]):
        return _aten.nll_loss_forward(x, target, weight, reduction, ignore_index)
    counts = target != ignore_index
    ids = torch.where(counts, target, 0).unsqueeze(-1)
    letters = labels[-1]
    if site.names(letters):
        picked = _look_up(site, letters[0], ids, lambda here: x.gather(-1, here))
        picked = _total(picked, site.names(letters), site.equal)
        picked = (picked if lse is None else picked - lse).squeeze(-1)
    else:
        picked = x.gather(-1, ids).squeeze(-1)
    weights = counts.to(x.dtype)
    if weight is not None:
        weights = weights * weight[ids.squeeze(-1)]
    losses = torch.where(counts, -picked, torch.zeros_like(picked))
    losses = losses if weight is None else losses * weights
    if reduction == 0:
        return losses, weights.new_zeros(())
    axes = site.names([letter for row in labels[:-1] for letter in row])
    total, count = _total(losses.sum(), axes, site.equal), _total(weights.sum(), axes)
    return (total / count if reduction == 1 else total), count


def nll_loss_backward(
    site: EquationSite, grad, x, target, weight, reduction, ignore_index, total_weight
):
    """The gradient of `nll_loss`, at targets that are in this rank's part of a vocabulary."""
    letters = site.operands[1][-1]
    if not site.names(letters):
        return site.op(grad, x, target, weight, reduction, ignore_index, total_weight)
    counts = target != ignore_index
    local, here = site.local(torch.where(counts, target, 0).unsqueeze(-1), letters[0])
    here = here & counts.unsqueeze(-1)
    share = grad / total_weight if reduction == 1 else grad
    share = share.unsqueeze(-1).expand(here.shape)
    return torch.zeros_like(x).scatter(-1, torch.where(here, local, 0), _mask_rows(-share, here))


def attention(site: EquationSite, *args, **kwargs):
    """softmax(scale q k^T + mask) v of this rank's samples and heads."""
    given = name_arguments(site.equation.op, args, kwargs)
    q, k, v = given["query"], given["key"], given["value"]
    mask = given.get("attn_mask", given.get("attn_bias"))
    scale, causal = given.get("scale"), bool(given.get("is_causal"))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    rest = [None] * (len(site.equation.outputs) - 2)
    if mask is None:
        out, lse = attention_ops.block(q, k, v, causal=causal, scale=scale)
        return out, lse, *rest
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if not compat.transforms_active():
        return (
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale),
            None,
            *rest,
        )
    scores = q @ k.transpose(-1, -2) * scale
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    else:
        scores = scores + mask
    return scores.softmax(-1) @ v, None, *rest


def dispatch_tokens(site: EquationSite, *operands):
    """The experts' results of this rank's tokens, which axes that split experts send to them.

    Collectives: those of `functron.nn.moe.layer.dispatched`. Over an axis that splits the experts'
    hidden dim results are parts of a sum.
    """
    op, axes = site.op, tuple(site.names("e"))
    count = len(operands) - 4
    hidden = site.names("f")
    if len(hidden) > 1:
        raise ValueError(
            f"partition: at {site.equation.where.line} the hidden dim of experts is split by "
            f"{' and '.join(hidden)}; wanted one axis; fix: split experts by the others"
        )
    alone = next(axis for axis in STANDARD_AXES if axis not in site.axes)
    params = tree.unflatten(op.structure, operands[:count])
    return op.run(params, *operands[count:], axes=axes or (alone,), axis=(hidden or [alone])[0])


Travel = Literal["ring", "zigzag", "gather", "exchange"]
"""The way in which keys and values of a split sequence reach its queries."""


def context_attention(travel: Mapping[str, Travel], site: EquationSite, *args, **kwargs):
    """`attention` of a sequence that axes may split, by `functron.nn.context_attention`."""
    if not site.names("s"):
        return attention(site, *args, **kwargs)
    around, exchange = _sequence_axes(travel, site)
    kind, given = travel.get(around), name_arguments(site.equation.op, args, kwargs)
    q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    causal, mask = bool(given.get("is_causal")), given.get("attn_mask", given.get("attn_bias"))
    if mask is not None:
        others = [axis for axis in site.names("s") if travel[axis] in ("zigzag", "exchange")]
        _refuse_masks(travel, site, others)
        mask = mask.expand(*mask.shape[:-2], q.shape[1], site.sizes["s"])
        mask = mask.reshape(-1, *mask.shape[-2:])
    balanced = kind == "zigzag" and causal
    if balanced:
        q, k, v = (context.to_balanced(x, 1, around, exchange) for x in (q, k, v))
    out = context.context_attention(
        q, k, v, kind="gather" if kind == "gather" else "ring", causal=causal, balanced=balanced,
        pairs=mask, scale=given.get("scale"), axis=around, ulysses=exchange,
    )  # fmt: skip
    out = context.to_contiguous(out, 1, around, exchange) if balanced else out
    return out.transpose(1, 2), *[None] * (len(site.equation.outputs) - 1)


def context_attention_sent(travel: Mapping[str, Travel], site: EquationSite) -> dict[str, int]:
    """The bytes that a rank sends in `context_attention`, forward, by axis."""
    if not site.names("s"):
        return {}
    around, exchange = _sequence_axes(travel, site)
    n, u = (site.axes.get(axis, 1) for axis in (around, exchange))
    q, k, v = map(site.held_bytes, range(3))
    out = math.prod(site.shapes[0]) * site.equation.results[0].dtype.itemsize
    kv_heads = site.held("h")
    repeats = u // math.gcd(u, kv_heads)
    keys = repeats * (k + v)
    found = {around: (n - 1) * keys, exchange: (q + keys + out) * (u - 1) // u}
    given = name_arguments(site.op, site.equation.args, site.equation.kwargs)
    if travel.get(around) == "zigzag" and given["is_causal"]:
        found[around] += q + k + v + out
    return {axis: sent for axis, sent in found.items() if sent}


def masked_attention(travel: Mapping[str, Travel], site: EquationSite, *args, **kwargs):
    """`attention` of queries that axes may split, with all keys."""
    others = [axis for axis in site.names("s") if travel.get(axis, "gather") != "gather"]
    _refuse_masks(travel, site, others if len(site.equation.operands) > 3 else [])
    return attention(site, *args, **kwargs)


def _refuse_masks(travel: Mapping[str, Travel], site: EquationSite, axes: Sequence[str]) -> None:
    for axis in axes:
        bias = "" if travel[axis] != "ring" else ", of numbers or of heads"
        raise ValueError(
            f"partition: at {site.equation.where.line} attention of a sequence that {axis!r} "
            f"splits has a mask{bias}, which attention={{{axis!r}: {travel[axis]!r}}} does not "
            "take; fix: is_causal=True in its place where it is causal, or "
            f'attention={{{axis!r}: "gather"}}, with which ranks have all keys'
        )


def _sequence_axes(travel: Mapping[str, Travel], site: EquationSite) -> tuple[str, str]:
    """The axis around which keys travel, and that of exchanges; of one rank where there is none."""
    digits, outer = site.letters["s"], 1
    ordered = sorted(digits, key=lambda digit: travel[digit.axis] == "exchange")
    for blocks, axis in ordered:
        if blocks != outer:
            names = tuple(name for _, name in ordered)
            raise ValueError(
                f"partition: at {site.equation.where.line} attention gets a sequence that "
                f"{' and '.join(axis for _, axis in digits)} split in another way than {P(names)}; "
                "wanted consecutive parts, of exchanges inside of others; fix: split it so, in "
                "in_specs or by functron.constrain"
            )
        outer *= site.axes[axis]
    found = {travel[axis] == "exchange": axis for _, axis in ordered}
    alone = next(axis for axis in STANDARD_AXES if axis not in site.axes)
    return found.get(False, alone), found.get(True, alone)
