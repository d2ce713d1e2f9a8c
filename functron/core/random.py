"""Random numbers that are a pure function of a key and a position, with the bits of `jax.random`.

A key is two 32-bit words. Element `i` of an array drawn with a key is Threefry-2x32 of the key and
the 64-bit counter `i`, where `i` is the row-major position in the *global* array. So a rank can
draw exactly its own shard, the numbers do not depend on the mesh, and nothing is ever consumed:
one key gives one set of numbers, and `split` or `fold_in` make fresh keys.

    root = random.key(0)
    init_key, dropout_key = random.split(root)
    w = random.normal(init_key, (1024, 4096))
    mine = random.normal(init_key, (1024, 4096), index=(None, columns))   # == w[:, columns]

Every sampler takes the GLOBAL `shape` and an optional `index`: a sequence with one entry per
dim, either None (the whole dim) or a 1-D integer tensor of global positions along that dim. The
result then has the local shape and equals `full[np.ix_(*index)]`, computed from those positions
only. Positions are not checked against the shape, which would read them back from the device.

All samplers run under `torch.func.vmap` (with batched keys and batched indices), inside
`torch.func.grad`, on fake and meta tensors, under tracing, and on the device of the key.

What equals `jax.random` with ``jax_threefry_partitionable`` (JAX's default): keys, `split`,
`fold_in`, `bits`, `randint`, `uniform` and `bernoulli`, bit for bit (a float64 `uniform` with
other bounds than 0 and 1 may differ in its last bit, as XLA fuses the scaling). `normal` and
`truncated_normal` follow JAX's formula with torch's erfinv, so they agree to 1e-12 in float64 and
to 3e-6 in float32, where torch's is the more exact. As in JAX, float16 draws 16 bits and bfloat16
only 8 (7 of them used), which is coarse: draw in float32 and convert where the tails matter.

Words are int32 tensors, which wrap like uint32, for which torch has no kernels.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", and JAX's PRNG design.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functron.core import compat
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.scopes import set_during

Index = Sequence[Tensor | None] | None

WORD = 0xFFFFFFFF
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """The key of a seed: int64 [2] that holds the seed's high and low 32-bit words.

    Equal to `jax.random.key_data(jax.random.key(seed))` (with x64 enabled for seeds past 2^31).

    Args:
        seed: an int, 0 <= seed < 2^64; ValueError of others.
        device: where the key, and all that is drawn with it, lives. The CPU by default.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        wanted, fix = "an int in [0, 2**64)", "take abs(seed) or seed % 2**64"
        refuse("random.key", "seed", repr(seed), wanted, fix)
    return torch.tensor([seed >> 32, seed & WORD], dtype=torch.int64, device=device)


def split(key: Tensor, num: int = 2) -> Tensor:
    """`num` fresh keys: int64 [num, 2]; unpack or index them. Equal to `jax.random.split`.

    Key `i` does not depend on `num`.
    """
    bad = [] if _is_size(num) else [Problem("num", repr(num), "an int >= 0")]
    _check("split", key, () if bad else (num,), None, bad)
    return _split(key, num)


def _split(key: Tensor, num: int) -> Tensor:
    if is_abstract(key):
        return key.new_empty(num, 2)
    counters = torch.arange(num, dtype=torch.int32, device=key.device)
    return _join(*threefry(key, 0, counters))


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A fresh key, int64 [2], that depends on `key` and `data`. Equal to `jax.random.fold_in`.

    Args:
        key: int64 [2].
        data: a number in [0, 2^32), such as a layer or step: an int or a 0-dim integer tensor
            (which may be batched by vmap; its high bits are dropped). ValueError of others.
    """
    bad = []
    if isinstance(data, Tensor):
        if data.ndim or data.is_floating_point() or data.is_complex():
            got = f"a {data.dtype} tensor of shape {tuple(data.shape)}"
            fix = "torch.func.vmap(fold_in, in_dims=(None, 0))(key, data) folds in many"
            bad.append(Problem("data", got, "a 0-dim integer tensor", fix))
    elif not _is_size(data) or data > WORD:
        bad.append(Problem("data", repr(data), "an int in [0, 2**32)", "fold in data % 2**32"))
    _check("fold_in", key, (), None, bad)
    if is_abstract(key) and not (isinstance(data, Tensor) and compat.is_wrapped(data)):
        return key.new_empty(2)
    if not isinstance(data, Tensor):
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return _join(*threefry(key, 0, data.to(key.device, torch.int32)))


def bits(key: Tensor, shape: Sequence[int], *, index: Index = None, bit_width: int = 32) -> Tensor:
    """Uniform random bits, as uint8, uint16, uint32 or uint64. Equal to `jax.random.bits`.

    Torch computes little on its wider unsigned types: `.view(torch.int32)` has the same bits, and
    `.to(torch.int64)` the same values.

    Args:
        key: int64 [2].
        shape: the global shape.
        index: which part of it; see the module.
        bit_width: 8, 16, 32 or 64.

    Raises:
        ValueError: a bad key, shape, index or width; all are listed.
    """
    known = bit_width in (8, 16, 32, 64)
    bad = [] if known else [Problem("bit_width", repr(bit_width), "8, 16, 32 or 64")]
    _check("bits", key, shape, index, bad)
    return sample(key, shape, index, lambda hi, lo: unsigned(hi, lo, bit_width))


def uniform(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
    *,
    index: Index = None,
) -> Tensor:
    """Uniform floats in [minval, maxval). Equal to `jax.random.uniform`.

    Args:
        key: int64 [2].
        shape: the global shape.
        dtype: float32, float64, float16 or bfloat16.
        minval: lower bound: a number, or a tensor that broadcasts to the (local) result.
        maxval: upper bound, likewise.
        index: which part of the global array; see the module.

    Raises:
        ValueError: a bad key, shape, index, dtype or bound; all are listed.
    """
    _check("uniform", key, shape, index, _floating(dtype), minval=minval, maxval=maxval)
    numbers = not isinstance(minval, Tensor) and not isinstance(maxval, Tensor)
    if numbers and (minval, maxval) == (0, 1):
        return sample(key, shape, index, lambda hi, lo: unit_floats(hi, lo, dtype))
    return _draw(key, shape, index, dtype, _scale, minval, maxval)


def normal(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    index: Index = None,
) -> Tensor:
    """Standard normal floats, by inversion. Equal to `jax.random.normal` up to erfinv's rounding.

    Args and errors are those of `uniform`.
    """
    _check("normal", key, shape, index, _floating(dtype))
    low = torch.finfo(dtype).eps / 2 - 1  # the float after -1, as erfinv(-1) is infinite

    def finish(hi: Tensor, lo: Tensor) -> Tensor:
        # 2 is what 1 - low rounds to: the product is exact
        return torch.erfinv(unit_floats(hi, lo, dtype) * 2 + low) * _root2(dtype)

    return sample(key, shape, index, finish)


def truncated_normal(
    key: Tensor,
    lower: float | Tensor,
    upper: float | Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    index: Index = None,
) -> Tensor:
    """Standard normal floats conditioned to lie in (lower, upper), by inversion.

    Equal to `jax.random.truncated_normal` up to the rounding of erf and erfinv. The standard
    deviation is below 1: 0.8796 for (-2, 2). Args and errors are those of `uniform`.
    """
    _check("truncated_normal", key, shape, index, _floating(dtype), lower=lower, upper=upper)
    return _draw(key, shape, index, dtype, _sample_truncated, lower, upper)


def bernoulli(
    key: Tensor, p: float | Tensor, shape: Sequence[int], *, index: Index = None
) -> Tensor:
    """True with probability `p`: bool. Equal to `jax.random.bernoulli` (mode "low").

    Args:
        key, shape, index: as of `uniform`, and so are errors.
        p: a number in [0, 1], or a floating tensor that broadcasts to the (local) result. The
            draw is in the tensor's dtype, or float32 for a number; its resolution is 2^-23 there.
    """
    dtype = p.dtype if isinstance(p, Tensor) else torch.float32
    bad = _floating(dtype, "p's dtype")
    if isinstance(p, float | int) and not 0 <= p <= 1:
        bad.append(Problem("p", repr(p), "a probability in [0, 1]"))
    _check("bernoulli", key, shape, index, bad, p=p)
    return _draw(key, shape, index, dtype, torch.lt, p)


def randint(
    key: Tensor,
    shape: Sequence[int],
    minval: int,
    maxval: int,
    dtype: torch.dtype = torch.int64,
    *,
    index: Index = None,
) -> Tensor:
    """Uniform integers in [minval, maxval). Equal to `jax.random.randint`.

    Two draws of 32 bits, or 64 for int64, are combined modulo the span, which is JAX's method and
    slightly biased when the span is no power of 2. The default dtype is JAX's with x64 enabled.

    Args:
        key, shape, index: as of `uniform`.
        minval: lower bound, included.
        maxval: upper bound, excluded; at most one more than the dtype holds.
        dtype: int64, int32, int16, int8 or uint8.

    Raises:
        ValueError: a bad key, shape, index, dtype, or an empty or unrepresentable range.
    """
    _check("randint", key, shape, index, _integer_range(minval, maxval, dtype))
    width = max(32, torch.iinfo(dtype).bits)
    span = maxval - minval
    # 2^width modulo the span, by squaring 2^(width / 2), which wraps to 0 at large spans: as JAX.
    factor = (2 ** (width // 2) % span) ** 2 % 2**width % span
    high, low = (
        sample(part, shape, index, lambda hi, lo: residue(integer(hi, lo, width), span, width))
        for part in _split(key, 2).unbind()
    )
    offset = residue(high * signed(factor, 64) + low, span, width)
    return (offset + minval).to(dtype)


_watch: contextvars.ContextVar[Callable[..., None] | None] = contextvars.ContextVar(
    "functron_key_uses", default=None
)

watching_keys = functools.partial(set_during, _watch)
"""``watching_keys(see)``: a with block in which ``see(name, key, shape, index)`` is called wherever
a key is used: by a sampler, or by `split`."""


def is_abstract(key: Tensor) -> bool:
    """Whether a key is on the device meta, so that what is drawn with it is a shape and a dtype.

    Nothing is computed for such draws: torch's rules for shapes would import its compiler, in 1 s.
    """
    return key.device.type == "meta" and not compat.is_wrapped(key) and _eager()


# Checks


def _is_size(value: Any) -> bool:
    integer = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    return integer and value >= 0


def _check(
    what: str, key: Any, shape: Any, index: Any, problems: list[Problem], **bounds: Any
) -> None:
    """Raise every problem of a call at once; `bounds` must broadcast to the local result."""
    found = []
    if not isinstance(key, Tensor) or key.shape != (2,) or key.dtype != torch.int64:
        fix = "make one with random.key(seed); use torch.func.vmap for a batch of keys"
        found.append(Problem("key", _describe(key), "an int64 tensor of shape (2,)", fix))
    if not isinstance(shape, Sequence) or not all(_is_size(size) for size in shape):
        fix = "give the global shape, as in (4, 8)"
        place = [Problem("shape", repr(shape), "a tuple of ints >= 0", fix)]
    elif math.prod(shape) > 2**63:
        place = [Problem("shape", repr(tuple(shape)), "at most 2**63 elements")]
    else:
        place = list(_check_index(key, shape, index))
    if not place:
        place = list(_check_bounds(local_shape(shape, index), bounds))
    raise_problems(f"random.{what}", found + place + problems)
    if (watch := _watch.get()) is not None and what != "fold_in":
        watch(what, key, shape, index)


def _check_index(key: Any, shape: Sequence[int], index: Any) -> Iterator[Problem]:
    if index is None:
        return
    fix = "give None for a whole dim, else a 1-D tensor of global positions"
    if not isinstance(index, Sequence) or len(index) != len(shape):
        got = f"{len(index)} entries" if isinstance(index, Sequence) else _describe(index)
        yield Problem("index", got, f"one entry for each of the {len(shape)} dims of shape", fix)
        return
    for dim, at in enumerate(index):
        if at is None:
            continue
        if not isinstance(at, Tensor) or at.dtype not in _INTEGERS or at.ndim != 1:
            yield Problem(f"index[{dim}]", _describe(at), "None or a 1-D integer tensor", fix)
        elif isinstance(key, Tensor) and at.device != key.device:
            yield Problem(f"index[{dim}]", str(at.device), f"the key's device, {key.device}")


def _check_bounds(local: tuple, bounds: dict[str, Any]) -> Iterator[Problem]:
    for name, value in bounds.items():
        if not isinstance(value, float | int | Tensor):
            yield Problem(name, _describe(value), "a number or a tensor")
        elif isinstance(value, Tensor) and not _broadcasts(tuple(value.shape), local):
            fix = "shape it like the result, which index makes local"
            wanted = f"a shape that broadcasts to {local}"
            yield Problem(name, f"shape {tuple(value.shape)}", wanted, fix)


def _floating(dtype: Any, name: str = "dtype") -> list[Problem]:
    if dtype in _FLOATS:
        return []
    return [Problem(name, repr(dtype), f"one of {', '.join(map(str, _FLOATS))}")]


def _broadcasts(shape: tuple, to: tuple) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(mine in (1, size) for mine, size in pairs)


def _integer_range(minval: Any, maxval: Any, dtype: Any) -> list[Problem]:
    if dtype not in _INTEGERS:
        return [Problem("dtype", repr(dtype), f"one of {', '.join(map(str, _INTEGERS))}")]
    if not isinstance(minval, int) or not isinstance(maxval, int):
        got = f"({_describe(minval)}, {_describe(maxval)})"
        return [Problem("(minval, maxval)", got, "two ints", "scale `uniform` by tensors instead")]
    if minval >= maxval:
        return [Problem("maxval", str(maxval), f"an int above minval, {minval}")]
    info = torch.iinfo(dtype)
    if minval < info.min or maxval > info.max + 1:
        wanted = f"within [{info.min}, {info.max + 1}], which {dtype} holds"
        return [Problem("(minval, maxval)", f"({minval}, {maxval})", wanted, "widen the dtype")]
    return []


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


# From words to values


def _join(hi: Tensor, lo: Tensor) -> Tensor:
    return torch.stack([hi, lo], dim=-1).to(torch.int64) & WORD


def _draw(
    key: Tensor,
    shape: Sequence[int],
    index: Index,
    dtype: torch.dtype,
    transform: Callable[..., Tensor],
    *operands: float | Tensor,
) -> Tensor:
    """`transform(unit, *operands)` of unit floats, block by block if every operand is a scalar."""
    where = {"dtype": dtype, "device": key.device}
    values = [
        value.to(**where) if isinstance(value, Tensor) else torch.full((), value, **where)
        for value in operands
    ]
    if all(value.ndim == 0 for value in values):
        return sample(key, shape, index, lambda x, y: transform(unit_floats(x, y, dtype), *values))
    return transform(sample(key, shape, index, lambda x, y: unit_floats(x, y, dtype)), *values)


def _scale(unit: Tensor, low: Tensor, high: Tensor) -> Tensor:
    span = high - low
    if unit.dtype == torch.float32:
        # One rounding, as a fused multiply-add has, on every device and at every array size.
        wide = unit.to(torch.float64) * span.to(torch.float64) + low.to(torch.float64)
        return torch.maximum(low, wide.to(torch.float32))
    return torch.maximum(low, unit * span + low)


def _sample_truncated(unit: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    root2 = _root2(unit.dtype)
    low, high = torch.erf(lower / root2), torch.erf(upper / root2)
    out = torch.erfinv(_scale(unit, low, high)) * root2
    # Rounding must not reach the bounds: stay one float inside them.
    least = torch.nextafter(lower.detach(), torch.full_like(lower, math.inf))
    return out.clamp(least, torch.nextafter(upper.detach(), torch.full_like(upper, -math.inf)))


def _root2(dtype: torch.dtype) -> float:
    """The square root of 2, rounded to the dtype, which Python numbers are not."""
    return 1.4140625 if dtype in (torch.float16, torch.bfloat16) else math.sqrt(2)


# --- Threefry-2x32 over the positions of an array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # Skein's key-schedule constant, truncated to 32 bits


def sample(
    key: Tensor, shape: Sequence[int], index: Index, finish: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`finish(hi, lo)` of the two words of every wanted position, shaped like the local array.

    Works in blocks that stay in the cache, so `finish` must be elementwise.

    Args:
        key: int64 [2], the high and the low word; may be batched by vmap.
        shape: the global shape.
        index: None, or for each dim None or the 1-D global positions along it.
        finish: takes two int32 tensors [n], gives one tensor [n].
    """
    local = local_shape(shape, index)
    blocks = (finish(*threefry(key, hi, lo)) for hi, lo in _counters(key, shape, index))
    first = next(blocks)
    size = math.prod(local)
    if first.numel() == size:
        return first.reshape(local)
    out = first.new_empty((size,))  # batched at the levels of `first`, so blocks can be written
    out[: len(first)] = first
    start = len(first)
    for block in blocks:
        out[start : start + len(block)] = block
        start += len(block)
    return out.reshape(local)


def local_shape(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """The shape of the part of an array of this shape that `index` selects."""
    if index is None:
        return tuple(shape)
    return tuple(n if at is None else at.shape[0] for n, at in zip(shape, index, strict=True))


def threefry(key: Tensor, hi: int | Tensor, lo: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds: two int32 words for each counter (hi, lo).

    In place where operations run at once, which is 2.5 times faster; what is traced stays free of
    mutation. The first sum is out of place, so that both words are batched at every vmap level
    that the key or the counter is.
    """
    if lo.numel() <= _FEW and isinstance(hi, int) and _can_be_read(key) and _can_be_read(lo):
        return _of_numbers(key, hi, lo)
    k0, k1 = key.to(torch.int32).unbind()
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    mix = _mix_ if _eager() else _mix
    y = lo + k1
    x = (k0 + hi) + y  # the first key addition and the first sum of the first round
    if x.device.type == "meta" and _eager():
        return x, x + y  # the other rounds would say no more of the shapes
    for block in range(5):
        for turn, rotation in enumerate(_ROTATIONS[block % 2]):
            x, y = mix(x, y, rotation, add=block + turn > 0)
        x = x + keys[(block + 1) % 3]
        y = y + (keys[(block + 2) % 3] + (block + 1))
    return x, y


_FEW = 8


def _can_be_read(x: Tensor) -> bool:
    """Whether the numbers of a tensor are here and now, and the same in every lane of a vmap."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not compat.is_wrapped(x)
    return plain and _eager()


def _of_numbers(key: Tensor, hi: int, lo: Tensor) -> tuple[Tensor, Tensor]:
    """`threefry` in Python's integers, 20 times faster for one counter: a key of a key has few."""
    k0, k1 = (word & WORD for word in key.tolist())
    keys, made = (k0, k1, k0 ^ k1 ^ _PARITY), []
    for counter in lo.reshape(-1).tolist():
        x, y = (k0 + hi) & WORD, (k1 + counter) & WORD
        for block in range(5):
            for rotation in _ROTATIONS[block % 2]:
                x = (x + y) & WORD
                y = (y << rotation & WORD | y >> 32 - rotation) ^ x
            x = (x + keys[(block + 1) % 3]) & WORD
            y = (y + keys[(block + 2) % 3] + block + 1) & WORD
        made.append((x, y))
    words = torch.tensor(made, dtype=torch.int64, device=key.device).view(-1, 2).to(torch.int32)
    return words[:, 0].reshape(lo.shape), words[:, 1].reshape(lo.shape)


def _mix(x: Tensor, y: Tensor, rotation: int, add: bool) -> tuple[Tensor, Tensor]:
    x = x + y if add else x
    # The right shift keeps the sign, so its copies are masked away.
    low = torch.bitwise_right_shift(y, 32 - rotation) & ((1 << rotation) - 1)
    return x, (torch.bitwise_left_shift(y, rotation) | low) ^ x


def _mix_(x: Tensor, y: Tensor, rotation: int, add: bool) -> tuple[Tensor, Tensor]:
    x = x.add_(y) if add else x
    low = torch.bitwise_right_shift(y, 32 - rotation).bitwise_and_((1 << rotation) - 1)
    return x, y.bitwise_left_shift_(rotation).bitwise_or_(low).bitwise_xor_(x)


def _eager() -> bool:
    """Whether operations run now, rather than being recorded or faked."""
    return not torch.compiler.is_compiling() and not compat.dispatch_modes_active()


def _block_size(device: torch.device) -> int:
    """Positions to make at once, a power of two: what fits a CPU's cache, or bounds memory.

    Where nothing is computed now, all of them, so that a trace does not grow with the array.
    """
    if not _eager() or device.type == "meta":
        return 1 << 63
    if device.type != "cpu":
        return 1 << 24
    return 1 << 17 + min(torch.get_num_threads(), 16).bit_length()


def _counters(
    key: Tensor, shape: Sequence[int], index: Index
) -> Iterator[tuple[int | Tensor, Tensor]]:
    """The wanted positions, flat and in order, as blocks of high and low words. At least one."""
    limit, size = _block_size(key.device), math.prod(shape)
    parts = [None] * len(shape) if index is None else index
    in_words = min(size, limit) < 2**31  # a block of consecutive positions has one high word
    if not in_words or any(at is not None for at in parts):
        yield from _counters_at(key, shape, parts, limit)
        return
    base = torch.arange(min(size, limit), dtype=torch.int32, device=key.device)
    for start in range(0, max(size, 1), limit):
        block = base if size - start >= limit else base[: size - start]
        yield start >> 32, block + signed(start & WORD) if start else block


def _counters_at(
    key: Tensor, shape: Sequence[int], index: Sequence[Tensor | None], limit: int
) -> Iterator[tuple[Tensor, Tensor]]:
    local = local_shape(shape, index)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    terms = [
        (torch.arange(n, device=key.device) if at is None else at.to(torch.int64)) * stride
        for n, at, stride in zip(shape, index, strides, strict=True)
    ]
    cut = len(local)  # the dims from here on make one row, which fits into a block
    while cut and math.prod(local[cut - 1 :]) <= limit:
        cut -= 1
    zero = torch.zeros(1, dtype=torch.int64, device=key.device)
    rows, columns = _outer_sum(terms[:cut], zero), _outer_sum(terms[cut:], zero)
    step = max(1, limit // max(1, len(columns)))
    for start in range(0, max(len(rows), 1), step):
        place = (rows[start : start + step, None] + columns).reshape(-1)
        yield (place >> 32).to(torch.int32), place.to(torch.int32)


def _outer_sum(terms: Sequence[Tensor], total: Tensor) -> Tensor:
    for term in terms:
        total = (total[:, None] + term).reshape(-1)
    return total


def signed(value: int, width: int = 32) -> int:
    """The two's complement number that has the bits of an unsigned one."""
    return value - 2**width if value >= 2 ** (width - 1) else value


def integer(hi: Tensor, lo: Tensor, width: int) -> Tensor:
    """`width` random bits of two words, as int64: not negative, but for width 64."""
    if width == 64:
        return torch.bitwise_left_shift(hi.to(torch.int64), 32) | (lo.to(torch.int64) & WORD)
    return (hi ^ lo).to(torch.int64) & ((1 << width) - 1)


def unsigned(hi: Tensor, lo: Tensor, width: int) -> Tensor:
    """`width` random bits of two words, in torch's unsigned dtype of that width."""
    if width == 64:
        return integer(hi, lo, 64).to(torch.uint64)
    word = hi ^ lo
    if width == 32:
        return word.to(torch.uint32)
    return word.to(torch.uint8) if width == 8 else word.to(torch.int16).to(torch.uint16)


def unit_floats(hi: Tensor, lo: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in [0, 1): a multiple of 2^-mantissa, from the top bits of the dtype's width."""
    if dtype == torch.float64:
        top = torch.bitwise_right_shift(integer(hi, lo, 64), 12) & ((1 << 52) - 1)
        return top.to(dtype) * 2.0**-52
    drop, mantissa = {torch.float32: (9, 23), torch.float16: (6, 10), torch.bfloat16: (1, 7)}[dtype]
    top = torch.bitwise_right_shift(hi ^ lo, drop) & ((1 << mantissa) - 1)
    return top.to(dtype) * 2.0**-mantissa


def residue(value: Tensor, span: int, width: int) -> Tensor:
    """The `width`-bit unsigned integer in int64 `value`, modulo `span`; span 2^width keeps it."""
    if width < 64:
        value = value & ((1 << width) - 1)
        return value if span == 1 << width else value % span
    if span == 1 << 64:
        return value
    if span > 1 << 63:  # at most one subtraction; compare as unsigned by flipping the sign bit
        flip = -(1 << 63)
        return torch.where(
            (value ^ flip) < (signed(span, 64) ^ flip), value, value - signed(span, 64)
        )
    if span == 1 << 63:
        return value & ((1 << 63) - 1)
    rest = value % span  # torch's % is never negative; a set sign bit stands for 2^64 more
    extra = (1 << 64) % span
    return torch.where(value < 0, (rest - (span - extra)) % span, rest)
