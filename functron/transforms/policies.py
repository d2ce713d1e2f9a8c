"""Policies of `remat`: which values are kept between forward and backward.

| policy             | is kept                                         | is computed again      |
|--------------------|-------------------------------------------------|------------------------|
| `everything`       | what backward reads, as without remat           | nothing                |
| `nothing`          | the function's arguments                        | all of it              |
| `dots`             | results of matrix products and of attention     | all but these          |
| `names("a", "b")`  | values marked by ``checkpoint_name(x, "a")``    | all but what made them |
| `offload("a")`     | the same, in host memory                        | all but what made them |

``names("a") | offload("b")`` keeps what either keeps. As `jax.checkpoint_policies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from functron.core import compat
from functron.core.errors import Problem, public, raise_problems
from functron.core.tables import shows_differences
from functron.core.typing import Tensor
from functron.spmd.primitives import Annotate
from functron.transforms.capture import name_value

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("checkpoint_name(Tensor(a) x, str name) -> Tensor(a)")
_LIBRARY.impl("checkpoint_name", lambda x, name: compat.alias(x), "CompositeExplicitAutograd")

CHECKPOINT_NAME = torch.ops.functron.checkpoint_name.default

torch.library.register_vmap(
    "functron::checkpoint_name",
    lambda info, in_dims, x, name: (CHECKPOINT_NAME(x, name), in_dims[0]),
    lib=_LIBRARY,
)

_WITHOUT_FORMULA = frozenset(
    f"aten::{name}"
    for name in (
        "addbmm", "mv", "addmv", "dot", "vdot", "linear", "_grouped_mm", "_scaled_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)  # fmt: skip


def is_product(op: torch._ops.OpOverload) -> bool:
    """Whether an operation is a matrix product, a convolution or an attention kernel.

    It declares so by its formula of FLOPs, `torch.utils.flop_counter.register_flop_formula`, by
    which it is counted, too; torch lacks that of a few.
    """
    return op.overloadpacket in flop_registry or op._schema.name in _WITHOUT_FORMULA


@shows_differences
@dataclass(frozen=True)
class RematPolicy:
    """The values that `remat` keeps, made by the names of this module; ``|`` is their union.

    Attributes:
        keep_all: everything that backward reads; nothing is computed again.
        keep_dots: results of matrix products.
        on_device: names of values that stay where they are.
        on_host: names of values that wait in host memory.
    """

    keep_all: bool = False
    keep_dots: bool = False
    on_device: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()

    def __or__(self, other: RematPolicy) -> RematPolicy:
        return RematPolicy(
            self.keep_all or other.keep_all,
            self.keep_dots or other.keep_dots,
            self.on_device | other.on_device,
            (self.on_host | other.on_host) - (self.on_device | other.on_device),
        )

    @property
    def names(self) -> frozenset[str]:
        """All names that it keeps, wherever."""
        return self.on_device | self.on_host

    @property
    def is_partial(self) -> bool:
        """Whether some values are kept and others are not."""
        return not self.keep_all and (self.keep_dots or bool(self.names))


everything = RematPolicy(keep_all=True)
"""Keep what backward reads: the function as it is."""

nothing = RematPolicy()
"""Keep the arguments only, and compute everything again: the least memory, one more forward."""

dots = RematPolicy(keep_dots=True)
"""Keep the results of matrix products, and compute again what lies between them.

These are mm, bmm, addmm, baddbmm and their kin, into which matmul, einsum and linear fall apart,
those in low precision, and the results of attention kernels (which are two products, and as small
as one of their operands): all that `is_product`. Where attention is written out as a formula, its
scores ``[batch, heads, seq, seq]`` are the result of a product and are kept: use `names` there.
"""


def names(*names: str) -> RematPolicy:
    """Keep the values that `checkpoint_name` gives one of these names.

    The operation that made such a value does not run again: a matrix product is not multiplied
    again, a collective does not communicate again. Views and copies in another layout do run again.
    An operation with several results keeps all.

    Raises:
        ValueError: no names, or one that is not a string.
    """
    return RematPolicy(on_device=_check_names("names", names))


def offload(*names: str) -> RematPolicy:
    """As `names`, with the values in host memory from forward until backward needs them.

    On CUDA they are copied to pinned memory and back on the current stream, in order with the
    kernels around them. On the CPU nothing is copied.

    Raises:
        ValueError: no names, or one that is not a string.
    """
    return RematPolicy(on_host=_check_names("offload", names))


def _check_names(what: str, names: tuple) -> frozenset[str]:
    if not names:
        raise ValueError(f'{what}: got no names; wanted some, as in {what}("attention", "mlp")')
    problems = [
        Problem(f"argument {i}", repr(name), "the name given to checkpoint_name")
        for i, name in enumerate(names)
        if not isinstance(name, str)
    ]
    raise_problems(f"policy {what}", problems)
    return frozenset(names)


@public
def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """`x`, under a name by which a `remat` policy around it can keep it. As JAX's.

    By the name, after those of its named scopes, `functron.capture` and `functron.intervene` find
    it as well. Where nothing asks for names this returns `x` itself. Works under every torch.func
    transform.

    >>> keep = ft.policies.names("hidden")
    >>> block = ft.remat(lambda w, x: ft.checkpoint_name(x @ w, "hidden").relu(), policy=keep)

    Raises:
        ValueError: the name is empty or no string.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"checkpoint_name: got {name!r}; wanted a name that is not empty")
    x = name_value(x, name)
    if not compat.dispatch_modes_active():
        return x  # only remat and tracing, which are modes, read names
    out: Any = Annotate.apply(CHECKPOINT_NAME, x, name)
    return out
