"""AdamW on one leaf in one pass over memory, with a float32 master or stochastic rounding.

One launch per leaf: functron stacks the parameters of all layers, so a model has a dozen leaves of
up to gigabytes, and a table of pointers for many leaves in one launch would save 0.1 ms of a step.
It would cost a copy to the device in every step, as gradients move, which a captured graph replays
stale; element types and the decay of every leaf in the table; and tensors behind integers, hidden
from checks of bounds, aliasing and lifetimes.

Stochastic rounding picks one of the two neighbours, so that the mean is the number itself. So
updates far below a parameter's last bit add up on average, as in a float32 master, which costs 4
bytes per parameter; rounded to nearest they would all be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from functron.core.errors import Problem, raise_problems
from functron.core.functions import Function
from functron.core.random import Index, fold_in, sample, threefry
from functron.ops.foreach import laid_out
from functron.ops.operations import PACK_BYTES, Launch, define, leading, map_one_by_one, type_name

_SMALLEST_NORMAL = 2.0**-14  # of float16
_STEP = 2.0**-24  # between its subnormal numbers


def random_bits(key: torch.Tensor, shape: Sequence[int], index: Index = None) -> torch.Tensor:
    """16 random bits for each element, int32: the values of ``random.bits(..., bit_width=16)``.

    Args:
        key: a key of `functron.random`.
        shape: the global shape.
        index: which part of it, as there.
    """
    return sample(key, shape, index, lambda hi, lo: (hi ^ lo) & 0xFFFF)


def stochastic_round(x: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`, rounded away from 0 with the probability that makes the mean x.

    That probability is exact to 2^-16. Beyond the largest number it rounds to that or to infinity;
    infinities and NaN stay. No derivative: it is piecewise constant.

    Args:
        x: float32.
        bits: 16 random bits for each element, int32, as `random_bits` makes them.
        dtype: bfloat16 or float16; float32 stays as it is.

    Raises:
        TypeError: another dtype.
    """
    if dtype == torch.float32:
        return x
    if dtype not in (torch.bfloat16, torch.float16) or x.dtype != torch.float32:
        raise TypeError(
            f"stochastic_round: got {x.dtype} to {dtype}; wanted float32 to bfloat16 or float16"
        )
    drop = 16 if dtype == torch.bfloat16 else 13
    mask = (1 << drop) - 1
    rounded = _Bits.apply((_Bits.apply(x, torch.int32) + (bits & mask)) & ~mask, torch.float32)
    if dtype == torch.float16:  # below its normal numbers the grid is even
        steps = (x.abs() * (2**16 / _STEP)).to(torch.int32) + bits
        small = (torch.bitwise_right_shift(steps, 16) * _STEP).copysign(x)
        rounded = torch.where(x.abs() < _SMALLEST_NORMAL, small, rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in bfloat16, and the int16 remainder with which `joined` restores x, to the bit.

    Rounded to nearest, ties away from 0: then exactly 2^16 numbers of float32 go to each one of
    bfloat16, which 16 bits can tell apart. (With ties to even it would be 2^16 + 1 and 2^16 - 1.)
    NaN stays NaN, with other bits. No derivative.

    Args:
        x: float32.
    """
    bits = _Bits.apply(x, torch.int32)
    high = torch.bitwise_right_shift(bits + 0x8000, 16)
    low, nan = (bits - high * 0x10000).to(torch.int16), x.isnan()
    number = _Bits.apply(high.to(torch.int16), torch.bfloat16)
    return torch.where(nan, x.to(torch.bfloat16), number), torch.where(nan, 0, low)


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of `halves`."""
    bits = _Bits.apply(high, torch.int16).to(torch.int32) * 0x10000 + low.to(torch.int32)
    return _Bits.apply(bits, torch.float32)


def remainder(x: torch.Tensor) -> torch.Tensor:
    """The int16 remainder of x in bfloat16, rounded to even, for `joined`.

    Ties that were rounded towards 0 need one bit more than int16 has: they move one last bit nearer
    to 0. NaN has remainder 0.

    Args:
        x: float32.
    """
    high = _Bits.apply(x.to(torch.bfloat16), torch.int16).to(torch.int32)
    low = (_Bits.apply(x, torch.int32) - high * 0x10000).clamp(-0x8000, 0x7FFF)
    return torch.where(x.isnan(), 0, low).to(torch.int16)


class _Bits(Function):
    """The bits of x as another dtype of that width: torch 2.11 cannot vmap ``x.view(dtype)``."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # a Function whose results are views is treated as one in place
        return x.view(dtype).clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, grad):
        return None, None

    @staticmethod
    def vmap(info, in_dims, x: torch.Tensor, dtype: torch.dtype) -> tuple:
        return _Bits.apply(x, dtype), in_dims[0]


_THREADS = 256
# per processor, as many as kernels/adamw.cu bounds registers for, so scalars are worked out once
_BLOCKS, _STOCHASTIC_BLOCKS = 3, 2
_WHOLE = (0, 1 << 62, 0, 1, 0, 1, 0)
_LEVELS = 4


class Stochastic(NamedTuple):
    """How a parameter is rounded: stochastically, by bits that belong to its elements.

    Element i of the whole parameter gets ``random.bits(k, shape, bit_width=16)[i]`` with
    ``k = fold_in(fold_in(key, count), salt)``: the same bits on every mesh.

    Attributes:
        key: of `functron.random`, on the parameter's device.
        salt: in [0, 2^32); tells this leaf from others.
        place: where the elements lie in the whole parameter, as `place_of` says; empty: they are
            all of it.
    """

    key: torch.Tensor
    salt: int
    place: tuple[int, ...] = ()


def place_of(
    shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...] | None:
    """Where the elements of a part of an array lie, for `Stochastic`; None if it is too irregular.

    Args:
        shape: of the whole array.
        starts, sizes: of the part, per dim. At most three sizes after the first that is not 1 may
            be smaller than the array's.
    """
    pitch, offset = 1, 0
    digits: list[list[int]] = []  # [count, pitch], the innermost first
    for whole, start, size in zip(reversed(shape), reversed(starts), reversed(sizes), strict=True):
        offset += start * pitch
        if digits and digits[-1][0] * digits[-1][1] == pitch:  # what is inside is whole
            digits[-1][0] *= size
        elif size != 1:
            digits.append([size, pitch])
        pitch *= whole
    if len(digits) > _LEVELS:
        return None
    if digits and digits[0][1] != 1:
        digits.insert(0, [1, 1])
    digits += [[1, 0]] * (_LEVELS - len(digits))
    if len(digits) > _LEVELS:
        return None
    (n0, _), (n1, p1), (n2, p2), (_, p3) = digits
    return (offset, n0, p1, n1, p2, n2, p3)


class AdamwNumbers(NamedTuple):
    """The numbers of an update that all leaves share.

    Attributes:
        count: of updates, this one included; int64, 0-dim.
        rate: the learning rate; float32, 0-dim.
        b1, b2, eps: as in `functron.optim.adamw`.
        clip: what gradients are multiplied by; float32, 0-dim. None: 1.
    """

    count: torch.Tensor
    rate: torch.Tensor
    b1: float
    b2: float
    eps: float
    clip: torch.Tensor | None = None


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    numbers: AdamwNumbers,
    weight_decay: float,
    *,
    master: torch.Tensor | None = None,
    rounding: Stochastic | None = None,
) -> None:
    """One step of AdamW on one leaf, in place; nothing is read back to the host.

    `adamw` is the pure function, which traced programs have: compiled, it is in place as well.

    ``mu = b1 mu + (1 - b1) g``, ``nu = b2 nu + (1 - b2) g^2`` with ``g = clip * grad``, and ``p = p
    - rate (mu / (1 - b1^count) / (sqrt(nu / (1 - b2^count)) + eps) + weight_decay p)``, in float32
    (float64 where param is), with each moment rounded to its dtype after its use. p is `master`
    where there is one, else `param`, which is overwritten with p rounded to its dtype.

    Reads and writes every operand once: 28 bytes per element with bfloat16 gradient and parameter,
    float32 moments and master; 16 without master and with moments in bfloat16 as well. No
    collectives.

    Args:
        param: bfloat16, float16 or float32, of any shape that is dense.
        grad, mu, nu: of the same shape and strides; each of any of these dtypes.
        numbers: count, rate and the like; on param's device.
        weight_decay: as in `functron.optim.adamw`.
        master: float32, shaped like param.
        rounding: stochastic; None: to nearest.

    Raises:
        ValueError: shapes, strides, dtypes or devices differ from these; all are listed.
    """
    operands = {"grad": grad, "mu": mu, "nu": nu, "master": master}
    count, rate, *_, clip = numbers
    scalars = {"count": count, "rate": rate, "clip": clip}
    _check(param, operands, scalars, rounding)
    ADAMW_(param, master, mu, nu, grad, *_order(numbers, weight_decay, rounding))


def _order(numbers: AdamwNumbers, weight_decay: float, rounding: Stochastic | None) -> tuple:
    """The arguments of both ops after the tensors of a leaf."""
    count, rate, b1, b2, eps, clip = numbers
    key, salt, place = rounding or (None, 0, ())
    place = list(place or _WHOLE)
    return rate, clip, None, count, key, b1, b2, eps, weight_decay, salt, place


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    numbers: AdamwNumbers,
    weight_decay: float,
    *,
    master: torch.Tensor | None = None,
    rounding: Stochastic | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The parameter, master, mu and nu that `adamw_` would leave, as new tensors.

    Arguments are those of `adamw_`, in any layout, also where vmap batches them; one operation of a
    traced program. No derivative, no collectives.
    """
    order = sorted(range(param.dim()), key=param.stride, reverse=True)
    straight = order == sorted(order)

    def dense(x: torch.Tensor | None) -> Any:
        return x if x is None else (x if straight else x.permute(order)).contiguous()

    leaves = map(dense, (param, master, mu, nu, grad))
    out = ADAMW(*leaves, *_order(numbers, weight_decay, rounding))
    back = [order.index(dim) for dim in range(len(order))]

    def like(x: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return laid_out(x if straight else x.permute(back), old)

    new_master = None if master is None else like(out[1], master)
    return like(out[0], param), new_master, like(out[2], mu), like(out[3], nu)


def _check(param: torch.Tensor, operands: dict, scalars: dict, rounding: Stochastic | None) -> None:
    found = []
    if not _dense(param):
        got = f"shape {tuple(param.shape)} with strides {param.stride()}"
        found.append(Problem("param", got, "a tensor without gaps", "use .contiguous()"))
    if rounding is not None and not param.is_contiguous():
        found.append(Problem("param", f"strides {param.stride()}", "a contiguous one, to round it"))
    layout = (tuple(param.shape), _strides(param), param.device)
    for name, x in operands.items():
        if x is not None and (tuple(x.shape), _strides(x), x.device) != layout:
            got = f"shape {tuple(x.shape)} with strides {x.stride()} on {x.device}"
            wanted = f"{layout[0]} with strides {param.stride()} on {param.device}, as param"
            found.append(Problem(name, got, wanted, "copy it into torch.empty_like(param)"))
    real = torch.float64 if param.dtype == torch.float64 else torch.float32
    for name, x in scalars.items():
        dtype = torch.int64 if name == "count" else real
        if x is not None and (x.dim() or x.dtype != dtype or x.device != param.device):
            got = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"
            found.append(Problem(name, got, f"a 0-dim {dtype} on {param.device}"))
    master = operands["master"]
    if master is not None and master.dtype != torch.float32:
        found.append(Problem("master", str(master.dtype), "torch.float32"))
    raise_problems("adamw_", found)


def _strides(x: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _dense(x: torch.Tensor) -> bool:
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return not x.numel() or x.permute(order).is_contiguous()


def _kernel(
    launch: Launch, param, master, mu, nu, grad, rate, clip, found_inf, count, key,
    b1, b2, eps, decay, salt, place,
) -> None:  # fmt: skip
    size = param.numel()
    if not size:
        return
    operands = {"PARAM": param, "GRAD": grad, "MU": mu, "NU": nu}
    defines = {name: type_name(x, "adamw_") for name, x in operands.items()}
    packed = all(
        x.data_ptr() % PACK_BYTES == 0 for x in (*operands.values(), master) if x is not None
    )
    lot = PACK_BYTES // min(x.element_size() for x in operands.values())  # elements of a thread
    resident = _BLOCKS if key is None else _STOCHASTIC_BLOCKS
    blocks = min(-(-size // (_THREADS * lot)), launch.processors(param.device) * resident)
    launch(
        "adamw", "adamw" if key is None else "adamw_stochastic", blocks, _THREADS,
        param, master, mu, nu, grad, size, int(packed),
        rate, clip, found_inf, count, 1 - b1, 1 - b2, float(eps), float(decay),
        *(() if key is None else (key, salt, *place)),
        defines={**defines, "MASTER": str(int(master is not None))},
    )  # fmt: skip


def _reference(
    param, master, mu, nu, grad, rate, clip, found_inf, count, key,
    b1, b2, eps, decay, salt, place,
) -> None:  # fmt: skip
    own = param if master is None else master
    wide = torch.promote_types(own.dtype, torch.float32)
    g = grad.to(wide) if clip is None else grad.to(wide) * clip.to(wide)
    steps = count.to(torch.float64)
    bias1, bias2 = (1 - b**steps for b in (b1, b2))
    mean = b1 * mu.to(wide) + (1 - b1) * g
    square = b2 * nu.to(wide) + (1 - b2) * g * g
    update = mean / bias1.to(wide) / ((square / bias2.to(wide)).sqrt() + eps)
    p = own.to(wide)
    value = p - rate.to(wide) * (update + decay * p)
    if key is None:
        rounded = value.to(param.dtype)
    else:
        leaf_key = fold_in(fold_in(key, count), salt)
        position = _positions(param.numel(), place, param.device)
        hi, lo = threefry(leaf_key, (position >> 32).to(torch.int32), position.to(torch.int32))
        bits = ((hi ^ lo) & 0xFFFF).reshape(param.shape)
        rounded = stochastic_round(value, bits, param.dtype)
    for target, new in ((param, rounded), (master, value), (mu, mean), (nu, square)):
        if target is not None:
            new = new.to(target.dtype)
            target.copy_(new if found_inf is None else torch.where(found_inf != 0, target, new))


def _positions(size: int, place: Sequence[int], device: torch.device) -> torch.Tensor:
    offset, n0, p1, n1, p2, n2, p3 = place
    i = torch.arange(size, device=device)
    i, total = i // n0, offset + i % n0
    for count, pitch in ((n1, p1), (n2, p2)):
        i, total = i // count, total + i % count * pitch
    return total + i * p3


def _made(update: Callable, param, master, mu, nu, *rest) -> tuple:
    """The results of `update`, which is in place, on copies; an empty one without a master."""
    new = [None if x is None else x.clone() for x in (param, master, mu, nu)]
    update(*new, *rest)
    return _with_master(*new)


def _with_master(param, master, mu, nu) -> tuple:
    return param, param.new_empty(0) if master is None else master, mu, nu


def _fake(*args) -> tuple:
    return _with_master(*[None if x is None else torch.empty_like(x) for x in args[:4]])


def _batch(size: int, in_dims: Sequence, args: Sequence, op: Callable) -> tuple[Any, Any]:
    """One step of all that is mapped, unless what it shares is mapped, or bits go by positions."""
    if any(dim is not None for dim in in_dims[5:10]) or args[9] is not None:
        return map_one_by_one(size, (*in_dims[:10], *[None] * len(args[10:])), args, op)
    rows = zip(args[:5], in_dims[:5], strict=True)
    leaves = [None if x is None else leading(x, dim, size).contiguous() for x, dim in rows]
    return op(*leaves, *args[5:]), (0, None if args[1] is None else 0, 0, 0)


_REST = """Tensor grad, Tensor rate, Tensor? clip, Tensor? found_inf, Tensor count, Tensor? key,
    float b1, float b2, float eps, float decay, int salt, int[] place"""

ADAMW_ = define(
    f"adamw_(Tensor(a!) param, Tensor(b!)? master, Tensor(c!) mu, Tensor(d!) nu, {_REST}) -> ()",
    kernel=_kernel,
    reference=_reference,
)
"""`adamw_` without its checks. `place` is that of `place_of`, or (0, 2^62, 0, 1, 0, 1, 0). Where
`found_inf` (float32, 0-dim, or None) is not 0, nothing is changed; the caller keeps its count."""

ADAMW = define(
    f"adamw(Tensor param, Tensor? master, Tensor mu, Tensor nu, {_REST}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    kernel=lambda launch, *args: _made(functools.partial(_kernel, launch), *args),
    reference=functools.partial(_made, _reference),
    fake=_fake,
    batch=_batch,
)
"""The first four operands of `ADAMW_` as it leaves them, in new tensors; empty for no master."""
