"""The linear primitives under every collective: one autograd Function each, over one mesh axis.

A primitive acts on untiled values: where ranks are told apart (gather, scatter, all-to-all) there
is a fresh leading dim of the axis' size, and the public collectives reshape around it. Each is a
Function of ``(x, token, call)`` with

* forward: the collective on this process's value (the axis is bound to a process group);
* vmap: in simulation the token is batched at the axis' own level and at no other. Batched token:
  "my level", so act across the batch dim. Unbatched token: some other vmap's level, so batch
  through;
* backward and jvp: the transpose and the same primitive, again through `apply`, so that every order
  of every torch.func transform works.

`torch.library.custom_op` is not used: its ``register_autograd`` does not compose with vmap of grad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functron.core.functions import Function
from functron.spmd.axes import OPS, Axis, BoundAxis, SimulatedAxis, scope
from functron.spmd.flight import SourceLine


@dataclass(frozen=True)
class Dtypes:
    """The dtypes on the way of a value through `AllGatherAs`, and of its cotangent on the way back.

    Attributes:
        operand: of x, and of its cotangent.
        sent: of what ranks exchange.
        result: of what is returned.
        summed: in which the result's cotangents are added.
    """

    operand: torch.dtype
    sent: torch.dtype
    result: torch.dtype
    summed: torch.dtype


@dataclass(frozen=True, eq=False)
class PrimitiveCall:
    """The static operands of a primitive; opaque to functorch, which flattens containers.

    Attributes:
        perm: pairs of source and destination, of `Ppermute`.
        must_vary: a checked program wrote this reduction, so its operand must vary over the axis.
        summed: the names of the axes over which a share will be summed, of `RequireShare`.
        equal: the cotangents of a `Psum`'s result are equal on all ranks.
        source: whose value `Broadcast` sends.
        wait: for the result of `Ppermute`; otherwise it may still be on its way, and only
            `functron.spmd.ragged.wait_for_rows` may touch it.
        line: of the program, while collectives are recorded.
        backward: this is the transpose of what is written there.
    """

    axis: Axis
    perm: tuple[tuple[int, int], ...] = ()
    must_vary: bool = False
    dtypes: Dtypes | None = None
    summed: tuple[str, ...] = ()
    equal: bool = False
    source: int = 0
    wait: bool = True
    line: SourceLine | None = None
    backward: bool = False


class Annotate(Function):
    """y = op(x, *rest) has the numbers of x; its cotangent and tangent are those of x.

    The operation runs on plain tensors, below all transforms.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(op, x, *rest):
        return op(x, *rest)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.num_rest = len(inputs) - 2
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        return None, cotangents[0], *[None] * ctx.num_rest

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        tangent = tangents[1]  # None where it is of the rest that some have
        return None if tangent is None else tangent.view_as(tangent)

    @staticmethod
    def vmap(info, in_dims, op, x, *rest):
        return Annotate.apply(op, x, *rest), in_dims[1]


def refuse_escaped(axis: Axis) -> None:
    """Raise ValueError for a value of a simulated axis that reaches a collective outside of it."""
    if isinstance(axis, SimulatedAxis):
        raise ValueError(
            f"a value of the simulated axis {axis.name!r} was used after its shard_map "
            "returned; return it from the mapped function instead of keeping it"
        )


class _Primitive(Function):
    """A primitive; subclasses give what differs of `send`, `across`, `replicated`, `transpose`.

    Without them it sends the operation `op`, is the identity on replicated values, and is its own
    transpose.
    """

    generate_vmap_rule = False
    batch_dim_in = 0  # where another level's batch dim goes: past a leading rank dim, if any
    batch_dim_out = 0
    communicates = True  # forward does
    op = ""  # as functron.lax names it
    across: Callable[..., tuple[torch.Tensor, int | None]]
    transposed: type[_Primitive] | None = None

    @classmethod
    def call(cls, x: torch.Tensor, axis: Axis, **options: Any) -> torch.Tensor:
        """Apply this primitive to `x` over `axis`; options are fields of `PrimitiveCall`."""
        if cls.communicates and (look := scope().uneven.get(axis.name)) is not None:
            look(cls.op, axis.name)
        line = axis.find_line() if isinstance(axis, BoundAxis) else None
        call = PrimitiveCall(axis, line=line, **options)
        if torch._C._len_torch_function_stack():  # of which one may ask for lines
            return torch.overrides.handle_torch_function(cls.apply, (x,), x, axis.token, call)
        out: Any = cls.apply(x, axis.token, call)
        return out

    @classmethod
    def send(cls, x, axis, call):
        """The collective on this process, or in a program that is being traced."""
        return axis.send(cls.op, x, **({"must_vary": True} if call.must_vary else {}))

    @staticmethod
    def replicated(x, size, call):
        """The result on `size` simulated ranks that all have x, and its dim of ranks, if any."""
        return x, None

    @classmethod
    def transpose(cls, cotangent, token, call):
        """The cotangent of the operand."""
        return (cls.transposed or cls).apply(cotangent, token, call)

    @classmethod
    def forward(cls, x, token, call):
        refuse_escaped(call.axis)
        if call.line is not None and cls.communicates:
            call.axis.set_line(call.line, call.backward)
        sent = x.to(torch.uint8) if x.dtype == torch.bool else x  # which every backend can send
        return cls.send(sent.contiguous(), call.axis, call).to(x.dtype)

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        ctx.op, (_, ctx.token, ctx.call) = cls.op, inputs
        ctx.set_materialize_grads(False)

    @classmethod
    def backward(cls, ctx, cotangent):
        if cotangent is None:
            return None, None, None
        # the user did not write the transpose
        call = replace(ctx.call, must_vary=False, backward=True)
        return cls.transpose(cotangent, ctx.token, call), None, None

    @classmethod
    def jvp(cls, ctx, tangent, *_):
        return None if tangent is None else cls.apply(tangent, ctx.token, ctx.call)

    @classmethod
    def vmap(cls, info, in_dims, x, token, call):
        x_dim, token_dim, _ = in_dims
        if token_dim is None:
            return cls.apply(x.movedim(x_dim, cls.batch_dim_in), token, call), cls.batch_dim_out
        if x_dim is None:
            return cls.replicated(x, call.axis.size, call)
        return cls.across(x.movedim(x_dim, 0), call)


class Psum(_Primitive):
    """y = sum over ranks of x; the same on every rank. Self-transpose."""

    op = "psum"

    @staticmethod
    def across(x, call):
        return x.sum(0, dtype=x.dtype), None

    @staticmethod
    def replicated(x, size, call):
        return x * size, None

    @staticmethod
    def transpose(cotangent, token, call):
        return (PsumOfEqual if call.equal else Psum).apply(cotangent, token, call)


def describe_redundant(op: str, axis: str, size: int, shape: Sequence[int]) -> tuple[str, str, str]:
    """(got, wanted, fix) of a reduction of a value that all ranks have."""
    return (
        f"a value of shape {tuple(shape)} that is already replicated over {axis!r}",
        f"one that varies over it. It would be counted {size} times",
        f"drop {axis!r} from this {op}, or multiply by lax.axis_size(...) if that is what is meant "
        "(pass check=False to shard_map to allow this)",
    )


class PsumOfEqual(_Primitive):
    """y = n x: the sum over ranks of an x that all have. Nothing is sent. Self-transpose."""

    communicates = False

    @staticmethod
    def send(x, axis, call):
        return axis.mark(x, "require_replicated") * axis.size

    @staticmethod
    def across(x, call):
        raise ValueError(
            f"psum over {call.axis.name!r} with equal_cotangents=True: got a cotangent of shape "
            f"{tuple(x.shape[1:])} that varies over {call.axis.name!r}; wanted one that all its "
            "ranks have; fix: leave equal_cotangents out, and they are summed"
        )

    @staticmethod
    def replicated(x, size, call):
        return x * size, None


class Broadcast(Psum):
    """y = x of one rank, on every rank; what the others have must be zeros.

    So it is their sum, at half of its bytes, and its transpose is that of `Psum`.
    """

    op = "pbroadcast"

    @classmethod
    def send(cls, x, axis, call):
        return axis.send(cls.op, x, call.source)

    @staticmethod
    def across(x, call):
        return x.select(0, call.source), None

    @staticmethod
    def replicated(x, size, call):
        return x, None


class _Underivable(Function):
    """An operation of which derivatives are refused; its context knows the `op` and the `call`."""

    @staticmethod
    def backward(ctx, *cotangents):
        if cotangents[0] is not None:
            raise ValueError(
                f"{ctx.op} over {ctx.call.axis.name!r} has no derivative: write "
                f"{ctx.op}(lax.stop_gradient(x), ...) where it must not be differentiated"
            )
        return None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        return None if tangents[0] is None else _Underivable.backward(ctx, *tangents)


class _Extremum(_Underivable, _Primitive):
    """pmax or pmin: no derivative, and the same value if all ranks have the same."""

    @classmethod
    def across(cls, x, call):
        return _ExtremumOfRanks.apply(x, cls.op, call), None


class _ExtremumOfRanks(_Underivable):
    """The extremum over dim 0, the simulated ranks, which refuses a derivative from outside too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, op, call):
        return x.amax(0) if op == "pmax" else x.amin(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.op, ctx.call = inputs
        ctx.set_materialize_grads(False)


class Pmax(_Extremum):
    """y = the maximum over ranks of x; the same on every rank. No derivative."""

    op = "pmax"


class Pmin(_Extremum):
    """y = the minimum over ranks of x; the same on every rank. No derivative."""

    op = "pmin"


class AllGather(_Primitive):
    """[...] -> [n, ...]: every rank's x, in rank order, on every rank. Transpose: PsumScatter."""

    op = "all_gather"
    batch_dim_out = 1

    @staticmethod
    def across(x, call):
        return x, None

    @staticmethod
    def replicated(x, size, call):
        return x.unsqueeze(0).expand(size, *x.shape), None


class AllGatherAs(AllGather):
    """`AllGather` that sends one dtype and whose transpose adds up in another; see `Dtypes`.

    Casts around an `AllGather` cannot say this: a tape casts every cotangent to the dtype of what
    it belongs to, so that the sum over ranks would be rounded to the dtype that was sent.
    """

    @classmethod
    def forward(cls, x, token, call):
        return super().forward(x.to(call.dtypes.sent), token, call).to(call.dtypes.result)

    @staticmethod
    def across(x, call):
        return AllGather.across(x.to(call.dtypes.sent).to(call.dtypes.result), call)

    @staticmethod
    def replicated(x, size, call):
        return AllGather.replicated(x.to(call.dtypes.sent).to(call.dtypes.result), size, call)

    @staticmethod
    def transpose(cotangent, token, call):
        total = PsumScatter.apply(cotangent.to(call.dtypes.summed), token, call)
        return total.to(call.dtypes.operand)


class GatherUnsent(AllGatherAs):
    """[...] -> [n, ...]: NaN, one in memory and none sent; the transpose is `AllGatherAs`'s.

    Stands for a parameter that is sent in another form, so that its cotangent has an operand. It is
    NaN so that reading it is noticed.
    """

    communicates = False

    @classmethod
    def forward(cls, x, token, call):
        if isinstance(call.axis, SimulatedAxis):
            return super().forward(x, token, call)  # refuses
        return _nan(x, call).expand(call.axis.size, *x.shape)

    @staticmethod
    def across(x, call):
        return _nan(x[0], call).expand(x.shape), None

    @staticmethod
    def replicated(x, size, call):
        return _nan(x, call).expand(size, *x.shape), None

    @classmethod
    def jvp(cls, ctx, *tangents):
        raise ValueError("forward-mode differentiation (jvp, jacfwd) of parameters sent as codes")


def _nan(x: torch.Tensor, call: PrimitiveCall) -> torch.Tensor:
    """A 0-dim NaN that varies over the axes, of other vmap levels, that x does."""
    assert call.dtypes is not None
    return torch.full_like(x[(0,) * x.dim()], torch.nan, dtype=call.dtypes.result)


class PsumScatter(_Primitive):
    """[n, ...] -> [...]: rank r keeps row r of the sum over ranks. Transpose: AllGather."""

    op = "psum_scatter"
    batch_dim_in = 1
    transposed = AllGather

    @staticmethod
    def across(x, call):
        return x.sum(0, dtype=x.dtype), 0

    @staticmethod
    def replicated(x, size, call):
        return x * size, 0


AllGather.transposed = PsumScatter


class AllToAll(_Primitive):
    """[n, ...] -> [n, ...]: row s on rank r is row r of rank s. Self-transpose."""

    op = "all_to_all"
    batch_dim_in = batch_dim_out = 1

    @staticmethod
    def across(x, call):
        return x.transpose(0, 1), 0

    @staticmethod
    def replicated(x, size, call):
        return x.unsqueeze(1).expand(size, size, *x.shape[1:]), 0


class Ppermute(_Primitive):
    """y on rank d is x of rank s for every (s, d) in perm, and zeros where no pair ends."""

    op = "ppermute"

    @classmethod
    def send(cls, x, axis, call):
        wait = (call.wait,) if isinstance(axis, BoundAxis) else ()
        sources, destinations = [s for s, _ in call.perm], [d for _, d in call.perm]
        return axis.send(cls.op, x, sources, destinations, *wait)

    @classmethod
    def jvp(cls, ctx, tangent, *_):
        ctx.call = replace(ctx.call, wait=True)
        return super().jvp(ctx, tangent)

    @staticmethod
    def across(x, call):
        source = {d: s for s, d in call.perm}
        rows = [x[source[rank]] if rank in source else None for rank in range(x.shape[0])]
        return torch.stack([torch.zeros_like(x[0]) if row is None else row for row in rows]), 0

    @staticmethod
    def replicated(x, size, call):
        return Ppermute.across(x.unsqueeze(0).expand(size, *x.shape), call)

    @staticmethod
    def transpose(cotangent, token, call):
        inverse = tuple((d, s) for s, d in call.perm)
        call = PrimitiveCall(call.axis, inverse, line=call.line, backward=call.backward)
        return Ppermute.apply(cotangent, token, call)


class _Statement(_Primitive):
    """y = x: what is stated is which ranks hold the same value. Transpose: identity."""

    communicates = False

    @classmethod
    def send(cls, x, axis, call):
        return axis.mark(x, cls.op) if cls.op else x.view_as(x)

    @staticmethod
    def across(x, call):
        return x.select(0, 0), None

    @staticmethod
    def transpose(cotangent, token, call):
        return cotangent


class AssumeReplicated(_Statement):
    """y = x, trusted to be equal on all ranks. Transpose: identity on every rank."""

    op = "assume_replicated"


class OutputReplicated(_Statement):
    """A shard_map output that its spec calls replicated: y = x; each rank's cotangent is 1/n of it.

    The n ranks hold one value, so the cotangent that arrives for it is dealt out in equal parts:
    differentiating the product of all ranks then counts it once.
    """

    @staticmethod
    def transpose(cotangent, token, call):
        return cotangent / call.axis.size


class InputReplicated(_Statement):
    """A shard_map input on a bound mesh that its spec calls replicated: y = x, cotangents psummed.

    In simulation vmap does this by itself: the value is unbatched, so its cotangents are summed.
    """

    @staticmethod
    def transpose(cotangent, token, call):
        return Psum.apply(cotangent, token, call)


def call_unmentioned(
    primitive: type[_Primitive], x: torch.Tensor, mentioned: Sequence[str], axes: Sequence[Axis]
) -> torch.Tensor:
    """A primitive applied to x over those axes that its spec does not mention."""
    for axis in axes:
        if axis.name not in mentioned:
            x = primitive.call(x, axis)
    return x


class Vary(_Statement):
    """y = x, held apart on every rank: the type of a value that is a rank's own share of a sum."""

    op = "vary"

    @staticmethod
    def replicated(x, size, call):
        return x.unsqueeze(0).expand(size, *x.shape), 0

    @staticmethod
    def across(x, call):
        return x, 0


class AssumeShare(Vary):
    """y = x, declared each rank's share of a gradient; at the level of shares, or in a trace."""

    @staticmethod
    def send(x, axis, call):
        return OPS.assume_share(x)


class RequireShare(_Statement):
    """y = x, which must be a share of a gradient; y is not one, since it will be summed."""

    @staticmethod
    def send(x, axis, call):
        return OPS.require_share(x, list(call.summed))
