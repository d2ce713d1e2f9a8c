"""Functions with a backward of their own, in which ranks may communicate as in forward.

JAX's `custom_vjp`, for per-rank programs: an autograd Function whose forward and backward run with
the mesh axes rebound at whatever vmap level they are at (`functron.transforms.remat`), so that
`functron.lax` works in both. For derivatives that are cheaper than those of the operations, such as
a ring that computes scores again instead of keeping those of every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import refuse_holders
from functron.core.errors import public
from functron.core.scopes import in_phase
from functron.program.recorder import keeper
from functron.spmd.axes import user_line
from functron.transforms.capture import unwatched
from functron.transforms.gradient import replace_at
from functron.transforms.remat import (
    CallSite,
    LevelFunction,
    map_level,
    pull_back,
    view_operands,
    will_be_differentiated,
)

_Tensors = Sequence[torch.Tensor]


@public
def custom_vjp(f: Callable, forward: Callable, backward: Callable) -> Callable:
    """The function that computes `f` and is differentiated by `forward` and `backward`.

    ``forward(*args)`` returns ``(f(*args), residuals)`` with any tree of residuals, and
    ``backward(residuals, cotangents)`` returns one tree of cotangents per argument, with None for
    an argument or leaf that is not floating point or does not matter. All three are per-rank
    programs: every collective of `functron.lax` may be used in each. `backward` gets every rank's
    own cotangent of a replicated output (their sum is its cotangent), must be linear in
    cotangents, and returns every rank's own share, as `functron.grad` does.

    Only arguments and residuals are kept between forward and backward. Residuals that are arguments
    or outputs cost nothing more. Where nothing is differentiated `f` itself runs.

    Derivatives of derivatives, in reverse mode, differentiate the operations of `forward` and
    `backward`, as in JAX. `functron.capture` does not see into them.

    >>> def clipped(residuals, cotangent):
    ...     return (cotangent.clamp(-1, 1),)
    >>> f = ft.custom_vjp(lambda x: 2 * x, lambda x: (2 * x, None), clipped)
    >>> ft.grad(lambda x: 5 * f(x))(torch.tensor(3.0))
    tensor(1.)

    Args:
        f: takes trees with tensors; positional arguments only. Returns a tree of tensors.
        forward, backward: as above.

    Raises:
        ValueError: a function closes over a tensor that is being differentiated (make it an
            argument); `backward` returned another number of cotangents than there are arguments;
            or in forward-mode differentiation.
        TypeError: a leaf of `forward`'s output is no tensor.
    """

    @functools.wraps(f)
    def wrapped(*args):
        with unwatched():  # what it computes is known to its own backward alone
            return call(*args)

    def call(*args):
        refuse_holders("custom_vjp cannot see into these", "argument", args, tracked=True)
        if (keep := keeper()) is not None:
            return keep.custom_vjp(f, forward, backward, args)

        def functions():
            return forward, backward

        site, operands = CallSite.of(functions, args)
        if not will_be_differentiated(operands[site.num_tokens :]):
            return f(*args)
        rule = _Rule(site, operands)
        made: Any = _CustomVjp.apply(_Level(rule, rule.forward, rule.backward), *operands)
        return tree.unflatten(rule.out_structure, made[: rule.num_outputs])

    return wrapped


class _Rule:
    """Forward and backward as functions of flat operands.

    Attributes:
        site: of the call.
        moving: the operands that have cotangents.
        num_outputs: the number of outputs. Other tensors that forward makes are those residuals
            that are neither operands nor outputs.
        floats: the outputs that have cotangents.
        out_structure: of the outputs.
    """

    def __init__(self, site: CallSite, operands: _Tensors):
        self.site = site
        first = site.first_argument
        self.moving = [i for i, x in enumerate(operands) if i >= first and x.is_floating_point()]
        self.num_outputs = 0
        self.floats: list[int] = []
        self.out_structure: Any = None
        self._kept_structure: Any = None
        self._recipe: list[tuple[str, Any]] = []

    @property
    def read(self) -> set[int]:
        """The tensors that forward makes which are residuals."""
        return {at for pool, at in self._recipe if pool == "made"}

    def forward(self, operands: _Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs, then the other tensors that backward needs."""
        with unwatched(), self.site.entered(operands) as (functions, args):
            out, residuals = functions()[0](*args)
        outputs, self.out_structure = tree.flatten(out)
        for leaf in outputs:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"custom_vjp at {user_line()}: forward returned {type(leaf).__name__} in its "
                    "output; wanted a tree of tensors; fix: return what is static outside"
                )
        self.num_outputs = len(outputs)
        self.floats = [i for i, leaf in enumerate(outputs) if leaf.is_floating_point()]
        kept, self._kept_structure = tree.flatten(residuals)
        made = list(outputs)
        self._recipe = [_source(leaf, operands, made) for leaf in kept]
        return tuple(made)

    def backward(
        self, operands: _Tensors, made: _Tensors, cotangents: _Tensors
    ) -> tuple[torch.Tensor, ...]:
        """The cotangents of the operands `moving`, from those of the outputs `floats`."""
        pools = {"operand": operands, "made": made}
        kept = [pools[pool][at] if pool in pools else at for pool, at in self._recipe]
        residuals = tree.unflatten(self._kept_structure, kept)
        given = replace_at([None] * self.num_outputs, self.floats, cotangents)
        with unwatched(), self.site.entered(operands, check=False) as (functions, args):
            grads = functions()[1](residuals, tree.unflatten(self.out_structure, given))
        leaves = leaves_like(args, grads)
        first = self.site.first_argument
        flat = [leaves[self.site.arguments.positions[i - first]] for i in self.moving]
        return tuple(
            torch.zeros_like(operands[i]) if grad is None else grad
            for i, grad in zip(self.moving, flat, strict=True)
        )


def _source(leaf: Any, operands: _Tensors, made: list) -> tuple[str, Any]:
    """Where backward finds a residual; one that is found nowhere yet is appended to `made`."""
    if not isinstance(leaf, torch.Tensor):
        return "static", leaf
    for pool, values in (("operand", operands), ("made", made)):
        for i, value in enumerate(values):
            if value is leaf:
                return pool, i
    made.append(leaf)
    return "made", len(made) - 1


def leaves_like(args: tuple, grads: Any) -> list:
    """The leaves of `grads`, one per leaf of `args`; None stands for a whole tree of None."""
    if not isinstance(grads, (tuple, list)) or len(grads) != len(args):
        got = f"{len(grads)}" if isinstance(grads, (tuple, list)) else type(grads).__name__
        raise ValueError(
            f"custom_vjp: backward returned {got} cotangents; wanted a tuple with one for each of "
            f"the {len(args)} arguments; fix: return None for those without"
        )
    leaves = []
    for arg, grad in zip(args, grads, strict=True):
        arg_leaves, structure = tree.flatten(arg)
        leaves += [None] * len(arg_leaves) if grad is None else structure.flatten_up_to(grad)
    return leaves


@dataclass(eq=False)
class _Level:
    """Forward and backward at one vmap level of the call; opaque to functorch.

    Attributes:
        rule: the same at all levels.
        forward: operands to the tensors that it makes.
        backward: operands, these tensors and cotangents to cotangents.
    """

    rule: _Rule
    forward: Callable[[_Tensors], tuple[torch.Tensor, ...]]
    backward: Callable[[_Tensors, _Tensors, _Tensors], tuple[torch.Tensor, ...]]

    def over(self, size: int, in_dims: Sequence[int | None]) -> tuple[_Level, list[bool]]:
        """The same with one vmap of `size` around it, and which tensors of forward are batched."""
        forward, varying = map_level(self.forward, size, in_dims)

        def backward(operands, made, cotangents):
            given = [
                # the ranks that hold one value hold equal shares of its cotangent
                value if varying[i] else (value / size).expand(size, *value.shape)
                for i, value in zip(self.rule.floats, cotangents, strict=True)
            ]
            made_dims = [0 if varies else None for varies in varying]
            ends = len(operands), len(operands) + len(made)

            def flat(values):
                return self.backward(
                    values[: ends[0]], values[ends[0] : ends[1]], values[ends[1] :]
                )

            dims = (*in_dims, *made_dims, *[0] * len(given))
            run, batched = map_level(flat, size, dims)
            rows = zip(run((*operands, *made, *given)), batched, self.rule.moving, strict=True)
            return tuple(_unmap_cotangent(grad, b, in_dims[i], size) for grad, b, i in rows)

        return _Level(self.rule, forward, backward), varying


def _unmap_cotangent(grad: torch.Tensor, batched: bool, dim: int | None, size: int) -> torch.Tensor:
    """The cotangent of an operand that has its batch dim at `dim`, or none and all rows use it."""
    if dim is None:
        return grad.sum(0) if batched else grad * size
    return (grad if batched else grad.expand(size, *grad.shape)).movedim(0, dim)


_FORWARD_MODE = (
    "custom_vjp in forward-mode differentiation (jvp, jacfwd), for which it has no rule; wanted "
    "reverse mode; fix: for a Hessian-vector product take the vjp of the gradient, "
    "torch.func.vjp(torch.func.grad(f), x)[1](v)"
)


class _CustomVjp(LevelFunction):
    forward_mode = _FORWARD_MODE

    @staticmethod
    def forward(level: _Level, *operands):
        return view_operands(level.forward(operands), operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.level, ctx.num_operands = inputs[0], len(inputs) - 1
        rule = ctx.level.rule
        still = [i for i in range(rule.num_outputs) if i not in rule.floats]
        ctx.mark_non_differentiable(*(output[i] for i in still), *output[rule.num_outputs :])
        read = rule.read
        # of an output that backward does not read, the shape alone
        made = [x if i in read else x.new_empty(()).expand(x.shape) for i, x in enumerate(output)]
        ctx.save_for_backward(*inputs[1:], *made)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        level, count = ctx.level, ctx.num_operands
        saved = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        operands, made = saved[:count], saved[count:]
        site = level.rule.site
        if any(ctx.needs_input_grad[1 + site.num_tokens : 1 + site.first_argument]):
            raise ValueError(
                "custom_vjp: forward or backward closes over a tensor that is being "
                "differentiated, for which backward returns no cotangent; fix: make it an argument"
            )
        floats = level.rule.floats
        if all(cotangents[i] is None for i in floats):
            return None, *(None for _ in operands)
        given = [
            torch.zeros_like(made[i]) if cotangents[i] is None else cotangents[i] for i in floats
        ]
        pull = _Pull.of(level, count, len(made))
        moved: Any = _Backward.apply(pull, *operands, *made, *given)
        return None, *replace_at([None] * count, level.rule.moving, moved)


@dataclass(frozen=True, eq=False)
class _Pull:
    """Backward as a function of all its inputs; opaque to functorch.

    Attributes:
        run: operands, the tensors that forward made, and cotangents (one sequence) to cotangents.
        again: the same of operands and cotangents, running forward again, so that it is
            differentiated through forward.
        num_operands, num_made: how many operands, and tensors that forward made.
    """

    run: Callable[[_Tensors], tuple[torch.Tensor, ...]]
    again: Callable[[_Tensors], tuple[torch.Tensor, ...]]
    num_operands: int
    num_made: int

    @classmethod
    def of(cls, level: _Level, num_operands: int, num_made: int) -> _Pull:
        """The pullback of a `_Level`."""
        end = num_operands + num_made

        def run(values):
            return level.backward(values[:num_operands], values[num_operands:end], values[end:])

        def again(values):
            operands = values[:num_operands]
            return level.backward(operands, level.forward(operands), values[num_operands:])

        return cls(run, again, num_operands, num_made)

    def without_made(self, values: Sequence) -> list:
        """The operands of `again`, from those of `run`."""
        return [*values[: self.num_operands], *values[self.num_operands + self.num_made :]]

    def over(self, size: int, in_dims: Sequence[int | None]) -> tuple[_Pull, list[bool]]:
        """The same with one vmap around it, and (once it has run) which results are batched."""
        run, varying = map_level(self.run, size, in_dims)
        run_again, batched = map_level(self.again, size, self.without_made(in_dims))

        def again(values):
            rows = zip(run_again(values), batched, varying, strict=True)
            return tuple(
                value.expand(size, *value.shape) if wanted and not has else value
                for value, has, wanted in rows
            )

        return _Pull(run, again, self.num_operands, self.num_made), varying


class _Backward(LevelFunction):
    forward_mode = _FORWARD_MODE

    @staticmethod
    def forward(pull: _Pull, *values):
        return view_operands(pull.run(values), values)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.pull = inputs[0]
        ctx.save_for_backward(*ctx.pull.without_made(inputs[1:]))

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        pull = ctx.pull
        values = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        needed = pull.without_made(ctx.needs_input_grad[1:])
        moving = [i for i, wanted in enumerate(needed) if wanted]
        with in_phase("recompute"):
            _, pullback = pull_back(pull.again, values, moving)
        grads, count = pullback(cotangents), pull.num_operands
        return None, *grads[:count], *[None] * pull.num_made, *grads[count:]
