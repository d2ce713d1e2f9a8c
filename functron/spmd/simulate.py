"""The simulator: a per-rank program on every rank of a mesh, in one process, by nested vmaps.

Every axis larger than 1 is one vmap level, in mesh order. A sharded value is reshaped so that its
mesh axes lead and is batched at exactly their levels; a replicated value is not batched, so it is
held once and computed with once. In and out are views where strides allow, so a program that
updates its arguments in place updates the caller's global tensors.

An output declared replicated must not vary. A value varies over an axis exactly when it is batched
at that axis' vmap level, so the check is exact, static and free, also on fake tensors. Reductions
of values that are already replicated are flagged where they are written, in `collectives`.

Whether a value is a rank's share of a gradient is such a type too: shares, and what is computed
from them, are batched at a level of their own, of size 1. Only they may be summed as gradients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from functron.core import compat, tree
from functron.core.errors import (
    ORPHAN,
    ORPHAN_PATTERN,
    Problem,
    in_library,
    is_of_interrupt,
    raise_problems,
)
from functron.core.functions import Function
from functron.spmd.axes import SimulatedAxis, TracedAxis, bind, scope, source_line, user_line
from functron.spmd.mesh import Mesh
from functron.spmd.primitives import (
    AssumeShare,
    OutputReplicated,
    RequireShare,
    call_unmentioned,
)
from functron.spmd.spec import P, dim_axes, pad_uneven, spec_axes, trim_uneven


def run_ranks(
    program: Callable[[list], tuple[list, list[P | None], tree.Structure]],
    mesh: Mesh,
    values: Sequence[Any],
    specs: Sequence[P | None],
    *,
    check: bool,
    shares: bool = True,
) -> tree.Tree:
    """`program` on all ranks of `mesh`: global values in, a tree of global values out.

    Args:
        program: from this rank's flat values to its flat outputs, their specs and structure.
        values: global values; tensors are split by their spec, everything else is passed on.
        specs: one spec per value, None for static values.
        check: whether reductions inside are checked for redundancy.
        shares: whether it is checked too that only shares are synchronised, which costs an
            interpreted program a quarter of its time.
    """
    sizes = {name: size for name, size in mesh.axes if size > 1}
    absent = [name for name, size in mesh.axes if size == 1]
    split = [
        _lead_with_axes(value, spec, sizes) if spec is not None and _is_tensor(value) else value
        for value, spec in zip(values, specs, strict=True)
    ]
    mapped = [i for i, value in enumerate(values) if specs[i] is not None and _is_tensor(value)]
    mentions = [set(spec_axes(specs[i] or P())) for i in mapped]
    device = next((split[i].device for i in mapped), None)
    made: Any = None

    def rank(axes: list[SimulatedAxis], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal made
        local = list(split)
        for i, tensor in zip(mapped, tensors, strict=True):
            local[i] = tensor
        own = axes[len(sizes) :]  # the level of shares is the innermost, where it costs least
        with bind(axes[: len(sizes)], absent=absent, check=check, shares=own[0] if own else None):
            made = program(local)
            return tuple(
                _mark_replicated(value, spec, axes[: len(sizes)])
                for value, spec in zip(*made[:2], strict=True)
                if spec is not None and _is_tensor(value)
            )

    level = rank
    if check and shares and sizes and scope().shares is None:
        level = _without_dim(_add_level(level, "shares", 1, [set() for _ in mapped], device))
    for name in reversed(sizes):
        level = _add_level(level, name, sizes[name], mentions, device)
    tensors = iter(level([], *(split[i] for i in mapped)))
    outputs, out_specs, structure = made
    joined = [
        _join_axes(next(tensors), spec, sizes) if spec is not None and _is_tensor(value) else value
        for value, spec in zip(outputs, out_specs, strict=True)
    ]
    return tree.unflatten(structure, joined)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _add_level(inner: Callable, name: str, size: int, mentions: list[set[str]], device) -> Callable:
    in_dims = tuple(0 if name in axes else None for axes in mentions)

    def level(axes: list[SimulatedAxis], *tensors: torch.Tensor):
        def body(token, *rest):
            return inner([*axes, SimulatedAxis(name, size, token)], *rest)

        token = torch.arange(size, device=device)
        # torch's own random numbers would differ from mesh to mesh, so they are an error
        return torch.func.vmap(body, in_dims=(0, *in_dims), randomness="error")(token, *tensors)

    return level


def _without_dim(level: Callable) -> Callable:
    return lambda axes, *tensors: tuple(value.select(0, 0) for value in level(axes, *tensors))


def _mark_replicated(value: torch.Tensor, spec: P, axes: list[SimulatedAxis]) -> torch.Tensor:
    tracked = compat.differentiating() or compat.requires_grad(value)
    return call_unmentioned(OutputReplicated, value, spec_axes(spec), axes) if tracked else value


def _lead_with_axes(value: torch.Tensor, spec: P, sizes: dict[str, int]) -> torch.Tensor:
    """A view of the global value with the dims of its mesh axes first, in mesh order."""
    if not sizes:
        return value
    value = pad_uneven(value, spec, sizes)
    shape: list[int] = []
    names: list[str | None] = []
    for size, axes in zip(value.shape, dim_axes(spec, value.dim()), strict=True):
        axes = [name for name in axes if name in sizes]
        shape += [*(sizes[name] for name in axes), size // math.prod(sizes[a] for a in axes)]
        names += [*axes, None]
    if len(shape) == value.dim():
        return value
    leading = [names.index(name) for name in sizes if name in names]
    rest = [position for position, name in enumerate(names) if name is None]
    return value.reshape(shape).permute(leading + rest)


def _join_axes(value: torch.Tensor, spec: P, sizes: dict[str, int]) -> torch.Tensor:
    """The global value from one that leads with a dim for every simulated axis."""
    if not sizes:
        return value
    mentioned = spec_axes(spec)
    for position in reversed(range(len(sizes))):
        if list(sizes)[position] not in mentioned:
            value = value.select(position, 0)
    leading = [name for name in sizes if name in mentioned]
    if not leading:
        return value
    num_dims = value.dim() - len(leading)
    order: list[int] = []
    shape: list[int] = []
    for dim, axes in enumerate(dim_axes(spec, num_dims)):
        axes = [name for name in axes if name in sizes]
        position = len(leading) + dim
        order += [*(leading.index(name) for name in axes), position]
        shape.append(value.shape[position] * math.prod(sizes[name] for name in axes))
    return trim_uneven(value.permute(order).reshape(shape), spec, sizes)


# --- products of ranks


class _Product(Function):
    """x w of matrices, each level of vmap a leading dim of both: of size 1 where it does not vary.

    torch's rule takes the ranks of two axes, of which one splits x and the other w, for a batch of
    products, of which it makes the operands: each as often as there are ranks.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x, w):
        return _product(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        (dy,), (x, w) = cotangents, ctx.saved_tensors
        dx = _Product.apply(dy, w.mT) if ctx.needs_input_grad[0] else None
        dw = _Product.apply(x.mT, dy) if ctx.needs_input_grad[1] else None
        return _sum_like(dx, x), _sum_like(dw, w)

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        parts = [] if dx is None else [_Product.apply(dx, w)]
        parts += [] if dw is None else [_Product.apply(x, dw)]
        return sum(parts[1:], parts[0])

    @staticmethod
    def vmap(info, in_dims, x, w):
        rows = zip((x, w), in_dims, strict=True)
        x, w = (v.unsqueeze(0) if dim is None else v.movedim(dim, 0) for v, dim in rows)
        return _Product.apply(x, w), 0


class _WideProduct(torch.autograd.Function):
    """x w of matrices that oneDNN multiplies faster than MKL, for torch's tape."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return compat.wide_product(x, w)

    @staticmethod
    def backward(ctx, *cotangents):
        (dy,), (x, w) = cotangents, ctx.saved_tensors
        graphs = torch.is_grad_enabled()
        if not graphs and compat.unseen(dy):
            return compat.wide_cotangents(dy, x, w, ctx.needs_input_grad)
        again = product if graphs else torch.matmul
        dx = again(dy, w.mT) if ctx.needs_input_grad[0] else None
        dw = again(x.mT, dy) if ctx.needs_input_grad[1] else None
        return dx, dw


def _sum_like(grad: Any, like: torch.Tensor) -> Any:
    """The cotangent of what was one matrix for many."""
    return grad if grad is None or grad.shape == like.shape else grad.sum_to_size(like.shape)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w`` of ``[*ranks, n, k]`` and ``[*ranks, k, m]``, sizes 1 where one does not vary."""
    dims = range(x.dim() - 2)
    batch = [d for d in dims if x.shape[d] > 1 < w.shape[d]]
    rows = [d for d in dims if w.shape[d] == 1]  # they share w: more rows of one product
    columns = [d for d in dims if x.shape[d] == 1 < w.shape[d]]  # they share x
    order, lead = [*columns, *batch, *rows], [*x.shape[:-2]]
    count, many = (math.prod(w.shape[d] for d in some) for some in (columns, batch))
    n, k, m = *x.shape[-2:], w.shape[-1]
    a = x.permute(*order, -2, -1).reshape(many, -1, k)
    b = w.permute(*order, -2, -1).reshape(count, many, k, m)
    if many == 1:
        y = (
            torch.bmm(a.expand(count, -1, -1), b.squeeze(1))
            if count > 1
            else _multiply(a[0], b[0, 0])
        )
    elif count == 1:
        y = torch.bmm(a, b[0])
    elif compat.dispatch_modes_active():  # which have no operations that write into others
        y = torch.stack([torch.bmm(a, each) for each in b])
    else:
        y = a.new_empty(count, *a.shape[:-1], m)
        for each, out in zip(b, y, strict=True):
            torch.bmm(a, each, out=out)
    sizes = [max(lead[d], w.shape[d]) for d in order]
    y = y.view(*sizes, n, m)
    back = sorted(range(len(order)), key=order.__getitem__)
    return y.permute(*back, -2, -1)


def _multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x w, without a derivative."""
    wide = compat.is_wide(x, w) and compat.unseen(x, w)
    return compat.wide_product(x, w) if wide else x @ w


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w`` of a matrix w; of simulated ranks with as few products and copies as there can be.

    Args:
        x: ``[..., inputs]``.
        w: ``[inputs, outputs]``.
    """
    if not _is_simulating():
        if compat.unseen(x, w):
            rows = x.view(-1, x.shape[-1]) if x.is_contiguous() else x
            if compat.is_wide(rows, w):
                wide: Any = _WideProduct.apply(rows, w)
                return wide.view(*x.shape[:-1], w.shape[-1])
        return x @ w
    made: Any = _Product.apply(x.reshape(-1, x.shape[-1]), w)
    return made.view(*x.shape[:-1], w.shape[-1])


# --- explanations of what programs must not do, simulated or traced (`functron.program.recorder`)

DRAWS = (
    "draws torch's own random numbers{op}, a hidden side effect; wanted a function of its "
    "arguments; fix: draw from a key with functron.random"
)
READS = (
    "asks for the number in a tensor{op}, as a Python if, int(), item(), a mask and nonzero "
    "do, which is not known before it runs and may differ by rank; wanted control flow and "
    "shapes that do not depend on data or on lax.axis_index, so that every rank issues the same "
    "collectives; fix: lax.cond or lax.while_loop, torch.where on both results, or pass the number "
    "as a static argument"
)
_WRITES = (
    "writes values of its own rank into a tensor that all ranks share{op}, such as fresh zeros; "
    "wanted operations out of place, or a tensor made of the rank's own; fix: "
    "torch.zeros_like(x), or x.new_zeros(...) + 0 * x, or torch.cat and torch.stack of the parts"
)
_UNKNOWN = (
    "calls an operation for which torch has no rule under vmap{op}, by which ranks are simulated; "
    "wanted operations that have one; fix: write it with others, or run it on processes "
    "(mesh.bind(), with check=False)"
)


BRANCHES = (
    "calls an operation of torch that takes functions{op}, such as torch.cond, while_loop or scan, "
    "which run some of them by numbers that are not known before; wanted operations of tensors, "
    "the same on every rank; fix: lax.cond, lax.while_loop or functron.scan, or a Python if or for "
    "on static values"
)


def explain(words: str, op: object = "") -> str:
    """`DRAWS`, `READS` or `BRANCHES`, of a program that does this by the operation `op`."""
    return words.format(op=f" ({op})" if op else "")


_RAW: Mapping[str, str] = MappingProxyType(
    {
        ORPHAN_PATTERN: ORPHAN,
        r"igher.order op|HigherOrderOperator|_higher_order_ops": BRANCHES,
        r"randomness error mode|aten::rrelu": DRAWS,
        r"calling \.item\(\)|data-dependent control flow|dynamic shape|differently shaped Tensor"
        r"|aten::equal|torch\.allclose|data pointer of Tensor that doesn't have storage": READS,
        r"inplace arithmetic|in-?place .*vmap|vmap.* in-?place": _WRITES,
        r"(?P<message>output with shape .* doesn't match the broadcast shape.*)": _WRITES,
        r"Batching rule not implemented|we do not yet support aten::|isn't supported yet": _UNKNOWN,
    }
)
"""Patterns of torch's messages under vmap, by what a program does."""


def explain_error(error: RuntimeError | KeyError) -> str | None:
    """The meaning of `error`, raised by a program under vmap; None where torch says it well."""
    if is_of_interrupt(error):
        return None
    raw = str(error)
    if isinstance(error, KeyError):  # of an operation of functions, by the transform that it lacks
        words = BRANCHES if error.args and "TransformType.Vmap" in repr(error.args[0]) else None
        by: Any = ""
    else:
        rows = ((re.search(pattern, raw), words) for pattern, words in _RAW.items())
        found, words = next(((found, words) for found, words in rows if found), (None, None))
        op = re.search(r"aten::\w+|torch\.\w+(?=\()", raw)
        by = (found and found.groupdict().get("message")) or (op[0] if op else "")
    if words is None:
        return None
    line = _users_line(error.__traceback__)
    return f"shard_map: {f'at {line} ' if line else ''}the program {explain(words, by)}"


def _users_line(traceback: TracebackType | None) -> str:
    """``file:line: source`` of the user's innermost line that an error passed through."""
    line = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not in_library(traceback.tb_frame):
            line = source_line(code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


LOSS_FIX = (
    "return lax.psum(loss, ...) of the ranks' parts of the loss, or lax.pmean(loss, ...) of their "
    "means, and differentiate that with ft.grad, whose results sync_gradients adds up"
)


def share_problem(over: Sequence[str], made: bool) -> tuple[str, str, str]:
    """(got, wanted, fix) of a gradient that must not be synchronised.

    Args:
        over: the axes over which it would be summed and does not vary.
        made: whether it is a share.
    """
    got = "a gradient that is no rank's share: ft.grad did not make it, or it is synchronised"
    if over:
        got = f"a gradient that is already summed over {', '.join(map(repr, over))}"
    once = "call sync_gradients once, and do not psum gradients before it"
    other = (
        f"{once}; differentiate with ft.grad, not torch.func.grad, which counts the loss once per "
        "rank; or declare shares that you made otherwise with ft.assume_shares"
    )
    return got, "every rank's own share of it, as ft.grad returns it", once if made else other


class VaryingOutputError(ValueError):
    """Outputs that vary over axes their specs do not mention."""


class LineRecorder(TorchFunctionMode):
    """Remembers which line of the user's program made each tensor, and since which it varies."""

    def __init__(self):
        super().__init__()
        self._made: dict[int, tuple[torch.Tensor, str, dict[str, str]]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        line, of = user_line(), [id(x) for x in tree.leaves((args, kwargs))]
        before = [self._made[key][2] for key in of if key in self._made]
        for leaf in tree.leaves(out):
            if isinstance(leaf, torch.Tensor):
                since = {
                    axis: next((known[axis] for known in before if axis in known), line)
                    for axis in varying_axes(leaf)
                }
                # holding the tensor keeps its id from being given to another
                self._made[id(leaf)] = (leaf, line, since)
        return out

    def lines(self, value: torch.Tensor, axis: str) -> str:
        """Words for the lines that made `value`, and since which it varies over the axis."""
        if id(value) not in self._made:
            return ""
        _, made, since = self._made[id(value)]
        began = since.get(axis, made)
        return f", made at {made}" + (f"; it varies since {began}" if began != made else "")


def unreduced_problems(rows: Iterable[tuple[str, str, P, str]]) -> list[Problem]:
    """The problems of outputs that vary where their specs say that they do not, one for each cause.

    Args:
        rows: path, axis, spec, and words for where the value comes from.
    """
    causes: dict[tuple[str, str], list[tuple[str, P]]] = {}
    for path, axis, spec, lines in rows:
        causes.setdefault((axis, lines), []).append((path, spec))
    problems = []
    for (axis, lines), found in causes.items():
        (path, spec), others = found[0], [path for path, _ in found[1:]]
        named = ", ".join(others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
        more = f", and {len(others)} more ({named})" if others else ""
        problems.append(
            Problem(
                (f"output {path}" if path else "output") + more,
                f"a value that varies over {axis!r}{lines}",
                f"one replicated over {axis!r}, as its out_spec {spec} declares",
                f"reduce it with lax.psum(..., {axis!r}) (or pmean, all_gather) before returning "
                f"it; if it is a gradient, call sync_gradients; or put {axis!r} in its out_spec",
            )
        )
    return problems


_NAMED = 3


def varying_axes(value: Any) -> tuple[str, ...]:
    """The simulated axes over which `value` differs between ranks."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(
        name
        for name, axis in scope().axes.items()
        if isinstance(axis, SimulatedAxis) and axis.varies(value)
    )


def as_share(value: torch.Tensor) -> torch.Tensor:
    """`value`, declared a rank's share of a gradient where a program is checked."""
    axis = _share_axis()
    return value if axis is None or not lacks_share(value) else AssumeShare.call(value, axis)


def lacks_share(value: torch.Tensor) -> bool:
    """Whether the check knows that `value` is no share; a trace's own check finds out later."""
    axis = _share_axis()
    return axis is not None and not (isinstance(axis, SimulatedAxis) and axis.varies(value))


def no_share(value: torch.Tensor, summed: Sequence[str] | None = None) -> torch.Tensor:
    """`value` without the type of a share; with `summed`, a trace keeps that it had to have it."""
    axis = _share_axis()
    if isinstance(axis, SimulatedAxis):
        return RequireShare.call(value, axis) if axis.varies(value) else value
    if axis is None or summed is None:
        return value
    return RequireShare.call(value, axis, summed=tuple(summed))


def _share_axis() -> SimulatedAxis | TracedAxis | None:
    """The mark of shares: a simulation's level of shares, or any traced axis."""
    if scope().shares is not None or not scope().check:
        return scope().shares
    return next((axis for axis in scope().axes.values() if isinstance(axis, TracedAxis)), None)


def check_outputs(
    outputs: Sequence[Any],
    specs: Sequence[P | None],
    paths: Sequence[str],
    axes: Sequence[str],
    where: str,
    recorder: LineRecorder | None,
) -> None:
    """Check that no output varies over one of `axes` that its spec does not mention.

    Raises:
        VaryingOutputError: with the path, the axis, the line and the fix of every offender.
    """
    problems = unreduced_problems(
        (path, axis, spec, recorder.lines(value, axis) if recorder else "")
        for value, spec, path in zip(outputs, specs, paths, strict=True)
        if spec is not None
        for axis in varying_axes(value)
        if axis in axes and axis not in spec_axes(spec)
    )
    raise_problems(f"{where} returns values that vary where out_specs say they do not", problems,
                   VaryingOutputError)  # fmt: skip


def _is_simulating() -> bool:
    return any(isinstance(axis, SimulatedAxis) for axis in scope().axes.values())


compat.guard_functions_under_vmap(_is_simulating)


def runs_transform() -> bool:
    """Whether a torch.func transform runs here beside those that simulate a mesh.

    What belongs to its caller is not to be overwritten then: the caller gave up something else, if
    anything, than the batched or differentiated values that are seen here.
    """
    levels = compat.transform_levels()
    if not levels:
        return False
    own = (*scope().axes.values(), scope().shares)
    return bool(levels - {axis.level for axis in own if isinstance(axis, SimulatedAxis)})
