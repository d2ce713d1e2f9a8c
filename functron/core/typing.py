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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

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

__all__ = ["Bool", "Float", "Int", "Integer", "Key", "Scalar", "Shaped", "Tensor"]
