"""Shapes in signatures: `Float[Tensor, "batch seq embed"]`, written for readers, checked by tests.

The names are jaxtyping's. Where jaxtyping is not installed (it belongs to the ``test`` extra) they
stand for the plain array type, at no cost; where it is, annotations alone still check nothing.
Only the test suite turns them into checks, with an import hook (see `tests/conftest.py`).

The convention:

    def attention(
        q: Float[Tensor, "batch seq heads head_dim"],
        k: Float[Tensor, "batch keys kv_heads head_dim"],
        mask: Bool[Tensor, "#batch seq keys"] | None,
    ) -> Float[Tensor, "batch seq heads head_dim"]: ...

- One word for each dim, in full; the same word is the same size within one call. A single word
  starts with a space, `Float[Tensor, " embed"]`: linters would take off its quotes as a name's.
- Sizes are those the function sees: local ones in a per-rank program, and without the dims of
  the vmaps around it.
- `"*batch seq"` is any number of leading dims, `"#batch seq"` also admits 1, `"_ seq"` is not
  compared, `""` is a scalar and `"batch seq+1"` is arithmetic.
- `Float` is any floating dtype, `Int` any signed and `Integer` any integer, `Bool` masks,
  `Shaped` anything; a module that fixes a dtype says so in its docstring.
- Trees (parameters, states, batches) are annotated `Tree`, not leaf by leaf.

How a value lies on a mesh stands behind an ``@``: ``Float[Tensor, "batch embed"] @ P("dp")``, and
`Partial` and `Varying` for what a spec cannot say. `functron.debug.typed` checks that, and dims and
dtypes where jaxtyping is installed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from torch import Tensor

from functron.core.errors import refuse


class Partial:
    """In an annotation: ranks along these axes hold values whose sum is meant.

    ``Float[Tensor, "batch embed"] @ P("dp") @ Partial("tp")``
    """

    def __init__(self, *axes: str):
        self.axes = axes

    def __rmatmul__(self, hint: Any) -> Any:
        return Annotated[hint, self]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.axes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.axes))})"


class Varying(Partial):
    """In an annotation: ranks along these axes hold different values, which no spec puts together.

    ``Float[Tensor, "tokens embed"] @ Varying("ep")``
    """


if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Integer, Shaped
    except ImportError:

        class _Unchecked:
            """`_Unchecked()[Tensor, "batch seq"]` is `Tensor`."""

            def __getitem__(self, array_and_dims: tuple[Any, str]) -> Any:
                return array_and_dims[0]

        Bool = Float = Int = Integer = Shaped = _Unchecked()

Key: TypeAlias = Int[Tensor, "2"]
"""A random key, as `functron.random.key` makes it."""

Scalar: TypeAlias = Float[Tensor, ""]
"""A loss, norm or rate: a floating tensor without dims."""

_WORD = re.compile(r"(?P<mark>[*#]*)(?P<name>[A-Za-z]\w*)?$")


def match_dims(path: str, text: str, shape: tuple[int, ...], sizes: dict[str, Any]) -> str:
    """The fix of a shape that words for its dims do not fit; "" where they fit.

    Args:
        path: of the value, for messages.
        text: the words, as in annotations.
        sizes: of words that came up before; those of these are added.

    Raises:
        ValueError: the words say no shape.
    """
    words = text.split()
    several = [i for i, w in enumerate(words) if w == "..." or re.match(r"#?\*", w)]
    if len(several) > 1:
        refuse("an annotation says no shape", path, repr(text), "one '*' or '...' at most")
    count = len(shape) - len(words) + len(several)
    if count < 0 or (not several and len(shape) != len(words)):
        return f"give it {len(words) - len(several)} dims, or annotate {len(shape)}"
    rows: list[tuple[str, Any]] = []
    place = 0
    for i, word in enumerate(words):
        size = count if i in several else 1
        rows.append((word, shape[place : place + size] if i in several else shape[place]))
        place += size
    for word, size in rows:
        if (wrong := _match_word(path, word, size, sizes)) is not None:
            return wrong
    return ""


def _match_word(path: str, word: str, size: Any, sizes: dict[str, Any]) -> str | None:
    found = _WORD.match(word.partition("=")[2] or word)
    if word in ("...", "_") or word.startswith("_"):
        return None
    if found and found["name"]:
        mark, name = found["mark"], found["name"]
        known = sizes.setdefault(f"*{name}" if "*" in mark else name, size)
        if known == size or ("#" in mark and size in (1, ())):
            return None
        return f"{name!r} is {known} elsewhere in this call, and {size} here"
    try:
        own = {k: v for k, v in sizes.items() if not k.startswith("*")}
        wanted = eval(word.partition("=")[2] or word, {"__builtins__": {}}, own)
    except (NameError, SyntaxError, TypeError) as error:
        refuse("an annotation says no shape", path, repr(word), f"a dim ({error})",
               "a word, a number, or a sum of words that stand before it")  # fmt: skip
    return None if wanted == size else f"a dim of {wanted} ({word}), not {size}"


__all__ = [
    "Bool",
    "Float",
    "Int",
    "Integer",
    "Key",
    "Partial",
    "Scalar",
    "Shaped",
    "Tensor",
    "Varying",
]
