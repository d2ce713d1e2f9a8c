"""Functions with a derivative of their own, in which ranks may communicate as in forward.

JAX's `custom_vjp` and `custom_jvp`, for per-rank programs: an autograd Function whose forward and
backward run with the mesh axes rebound at whatever vmap level they are at
(`functron.transforms.remat`), so that `functron.lax` works in both. For derivatives that are
cheaper than those of the operations, such as a ring that computes scores again instead of keeping
those of every step.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import note_writes, refuse_holders
from functron.core.errors import public, refuse
from functron.core.scopes import in_phase, set_during
from functron.program.recorder import keeper
from functron.spmd.axes import user_line
from functron.transforms.capture import unwatched
from functron.transforms.gradient import replace_at, rule_vjp
from functron.transforms.linearity import LinearityCheck, key_of, name_rule
from functron.transforms.remat import (
    CallSite,
    LevelFunction,
    map_level,
    pull_back,
    push_forward,
    view_operands,
    will_be_differentiated,
)
from functron.transforms.rule_arguments import (
    SplitArguments,
    check_rules,
    find_positions,
    name_of,
    place_arguments,
    refuse_missing_rules,
    sum_tangents,
)

_Tensors = Sequence[torch.Tensor]

_seen: contextvars.ContextVar[list | None] = contextvars.ContextVar("functron_rules", default=None)


@contextlib.contextmanager
def finding_rules() -> Iterator[list[Callable]]:
    """The functions with a derivative of their own that are differentiated in this with block."""
    found: list[Callable] = []
    with set_during(_seen, found):
        yield found


@public
def custom_vjp(
    f: Callable,
    forward: Callable | None = None,
    backward: Callable | None = None,
    jvp: Callable | None = None,
    *,
    nondiff_argnums: int | Sequence[int] = (),
) -> Any:
    """The function that computes `f` and is differentiated by `forward` and `backward`.

    ``forward(*args)`` returns ``(f(*args), residuals)`` with any tree of residuals, and
    ``backward(residuals, cotangents)`` returns one tree of cotangents per argument, with None for
    an argument or leaf that is neither floating point nor complex, or does not matter. All three
    are per-rank programs: every collective of `functron.lax` may be used in each. `backward` gets
    every rank's own cotangent of a replicated output (their sum is its cotangent), must be linear
    in cotangents, and returns every rank's own share, as `functron.grad` does. Cotangents of
    complex values are torch's (`functron.vjp`).

    Only arguments and residuals are kept between forward and backward. Residuals that are arguments
    or outputs cost nothing more. Where nothing is differentiated `f` itself runs.

    Derivatives of derivatives, in either mode, differentiate the operations of `forward` and
    `backward`. In forward mode, for which JAX has no rule, `backward` is transposed, which costs
    about as much as two of it; give `jvp` where that is dear, or where `backward` is not linear, as
    the one below that clips. `functron.capture` does not see into them.

    >>> def clipped(residuals, cotangent):
    ...     return (cotangent.clamp(-1, 1),)
    >>> f = ft.custom_vjp(lambda x: 2 * x, lambda x: (2 * x, None), clipped)
    >>> ft.grad(lambda x: 5 * f(x))(torch.tensor(3.0))
    tensor(1.)

    As in JAX it is a decorator, too: ``f.defvjp(forward, backward)`` gives the rules later. Calls
    of such a function take keywords and defaults. With `nondiff_argnums` the decorator is
    ``@functools.partial(ft.custom_vjp, nondiff_argnums=(0,))``.

    >>> clip = ft.custom_vjp(lambda limit, x: x, nondiff_argnums=(0,))
    >>> clip.defvjp(lambda limit, x: (x, None), lambda limit, _, ct: (ct.clamp(-limit, limit),))
    >>> ft.grad(lambda x: 5 * clip(2.0, x))(torch.tensor(3.0))
    tensor(2.)

    Args:
        f: takes trees with tensors, positional arguments. Returns a tree of tensors.
        forward, backward: as above; both, or none, where ``defvjp`` gives them.
        jvp: ``(args, tangents) -> (f(*args), tangent)``, as of `custom_jvp`; linear in tangents.
            ``functools.partial(ft.jvp, f)`` is that of `f`'s operations, which is cheaper.
        nondiff_argnums: positions of arguments without derivatives, such as functions and numbers:
            ``forward`` takes them in their places, ``backward(*them, residuals, cotangents)`` and
            ``jvp(*them, args, tangents)`` in front of the others, of which alone there are
            cotangents and tangents.

    Raises:
        ValueError: a function closes over a tensor that is being differentiated (make it an
            argument), or one at `nondiff_argnums` is; `backward` returned another number of
            cotangents than there are arguments, or is not linear in them, in forward mode without
            `jvp`; `jvp` no pair of trees alike; a call before ``defvjp``.
        TypeError: a leaf of `forward`'s output is no tensor, or a rule is no function.
    """
    positions = find_positions("custom_vjp", f, nondiff_argnums)
    if forward is None and backward is None and jvp is None:
        return _await_vjp(f, positions)
    rules = {"forward": forward, "backward": backward} | ({} if jvp is None else {"jvp": jvp})
    check_rules("custom_vjp", f, rules)
    made: Any = (forward, backward, jvp)
    if positions:
        return _await_vjp(f, positions, *made)
    return _bind_vjp("custom_vjp", f, *made)


def _bind_vjp(
    word: str, f: Callable, forward: Callable, backward: Callable, jvp: Callable | None
) -> Callable:
    @functools.wraps(f)
    def wrapped(*args):
        with unwatched():  # what it computes is known to its own backward alone
            return call(*args)

    def call(*args):
        refuse_holders(f"{word} cannot see into these", "argument", args, tracked=True)
        if (keep := keeper()) is not None:
            return keep.custom_vjp(f, forward, backward, args)

        def functions():
            return forward, backward, jvp

        site, operands = CallSite.of(functions, args)
        if not will_be_differentiated(operands[site.num_tokens :]):
            check_writes = note_writes(f"{word}: the function", operands[site.num_tokens :])
            out = f(*args)
            check_writes()
            return out
        if (seen := _seen.get()) is not None:
            seen.append(f)
        rule = _Rule(word, site, operands, (forward, backward), jvp is not None)
        made: Any = _CustomVjp.apply(_Level.of(rule), *operands)
        return tree.unflatten(rule.out_structure, made[: rule.num_outputs])

    return wrapped


@contextlib.contextmanager
def _entering(calls: list[bool]) -> Iterator[None]:
    calls.append(True)
    try:
        yield
    finally:
        calls.pop()


def _await_vjp(f: Callable, positions: tuple[int, ...], *given: Callable | None) -> Any:
    """`f` with rules that are given, or will be, and arguments without derivatives."""
    rules: list[Any] = [*given]
    inside: list[bool] = []  # a program in global view has one level of rules

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        if not rules:
            refuse_missing_rules("custom_vjp", f, "defvjp(forward, backward)")
        forward, backward, jvp = rules
        args = place_arguments("custom_vjp", f, args, kwargs)
        if keeper() is not None and inside:
            return f(*args)
        with _entering(inside):
            return call(forward, backward, jvp, args)

    def call(forward, backward, jvp, args):
        if not positions:
            return _bind_vjp("custom_vjp", f, forward, backward, jvp)(*args)
        split = SplitArguments("custom_vjp", f, args, positions)
        own, ahead = (split.in_place(each, positions) for each in (f, forward))
        push = None if jvp is None else split.in_front(jvp)
        return _bind_vjp("custom_vjp", own, ahead, split.in_front(backward), push)(*split.rest)

    def defvjp(forward: Callable, backward: Callable, jvp: Callable | None = None) -> None:
        """Give the rules; of several calls the last counts."""
        named = {"forward": forward, "backward": backward} | ({} if jvp is None else {"jvp": jvp})
        check_rules("custom_vjp", f, named)
        rules[:] = forward, backward, jvp

    made: Any = wrapped
    made.defvjp = defvjp
    return made


@public
def custom_jvp(
    f: Callable, jvp: Callable | None = None, *, nondiff_argnums: int | Sequence[int] = ()
) -> Any:
    """The function that computes `f` and is differentiated by its rule of forward mode, `jvp`.

    ``jvp(args, tangents)`` returns ``(f(*args), tangent)``, both trees alike; `args` and `tangents`
    are tuples with one tree per argument, with None in `tangents` for leaves that are neither
    floating point nor complex. It must be linear in tangents: reverse mode is its transpose, taken
    in backward of the arguments, which alone are kept; a rule that is not linear is refused there.
    It is a per-rank program, as `f` is: `functron.lax` may be used in both. Derivatives of
    derivatives differentiate the operations of `jvp`.

    >>> def rule(args, tangents):
    ...     (x,), (t,) = args, tangents
    ...     return x.sqrt(), t * torch.where(x > 0, 0.5 / x.sqrt(), 0.0)
    >>> safe_sqrt = ft.custom_jvp(torch.sqrt, rule)
    >>> ft.grad(safe_sqrt)(torch.tensor(4.0)), ft.grad(safe_sqrt)(torch.tensor(0.0))
    (tensor(0.2500), tensor(0.))
    >>> ft.jvp(safe_sqrt, (torch.tensor(4.0),), (torch.tensor(2.0),))[1]
    tensor(0.5000)

    As in JAX it is a decorator, too: ``f.defjvp(jvp)`` gives the rule later, or
    ``f.defjvps(*jvps)`` one for each argument, ``(tangent, out, *args) -> tangent of out``, or None
    where it is zero; `f` in a rule has the rule in its turn. Calls take keywords and defaults.

    >>> @ft.custom_jvp
    ... def log1pexp(x):
    ...     return torch.log1p(torch.exp(x))
    >>> log1pexp.defjvps(lambda t, out, x: t * torch.sigmoid(x))
    >>> ft.grad(log1pexp)(torch.tensor(100.0))
    tensor(1.)

    Args:
        f: takes trees with tensors, positional arguments. Returns a tree of tensors.
        jvp: as above; None, where ``defjvp`` or ``defjvps`` gives it.
        nondiff_argnums: positions of arguments without derivatives, such as functions and numbers:
            the rule is ``jvp(*them, args, tangents)``, of the others alone.

    Raises:
        ValueError: `jvp` closes over a tensor that is being differentiated (make it an argument),
            or one at `nondiff_argnums` is; it returned no pair of trees alike, or, in reverse mode,
            is not linear in tangents; a call before ``defjvp``.
        TypeError: a leaf of `f`'s result is no tensor, a rule is no function, or ``defjvps`` is
            called with `nondiff_argnums`.
    """
    positions = find_positions("custom_jvp", f, nondiff_argnums)
    if jvp is not None:
        check_rules("custom_jvp", f, {"jvp": jvp})
        if not positions:
            return _bind_jvp(f, jvp)
    return _await_jvp(f, positions, [] if jvp is None else [jvp])


def _await_jvp(f: Callable, positions: tuple[int, ...], rules: list[Callable]) -> Any:
    """`f` with a rule that is given, or will be, and arguments without derivatives."""

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        if not rules:
            refuse_missing_rules("custom_jvp", f, "defjvp(jvp)")
        args = place_arguments("custom_jvp", f, args, kwargs)
        if not positions:
            return _bind_jvp(f, rules[0])(*args)
        split = SplitArguments("custom_jvp", f, args, positions)
        return _bind_jvp(split.in_place(f, positions), split.in_front(rules[0]))(*split.rest)

    def defjvp(jvp: Callable) -> Callable:
        """Give the rule, which is returned; of several calls the last counts."""
        check_rules("custom_jvp", f, {"jvp": jvp})
        rules[:] = [jvp]
        return jvp

    def defjvps(*jvps: Callable | None) -> None:
        """Give a rule for each argument."""
        if positions:
            got, fix = f"nondiff_argnums={positions}", "defjvp, or None for those arguments"
            wanted = "a rule for each argument"
            refuse(f"defjvps of {name_of(f)}", "nondiff_argnums", got, wanted, fix, TypeError)
        check_rules("custom_jvp", f, {f"jvps[{i}]": x for i, x in enumerate(jvps) if x is not None})
        rules[:] = [sum_tangents(wrapped, jvps)]

    made: Any = wrapped
    made.defjvp, made.defjvps = defjvp, defjvps
    return made


def _bind_jvp(f: Callable, jvp: Callable) -> Callable:
    def forward(*args):
        return f(*args), args

    def backward(args, cotangents):
        zeros = tree.map(lambda x: torch.zeros_like(x) if tree.is_inexact(x) else None, args)

        def linear(tangents):
            made = jvp(args, tangents)
            moved = tree.unflatten(tree.structure(made[0]), _check_pushed(made))
            check.note(moved)
            return moved

        floats = [x for x in tree.leaves(zeros) if isinstance(x, torch.Tensor)]
        check = LinearityCheck(
            f"custom_jvp, differentiated in reverse: the tangent by the rule {name_rule(jvp)}",
            "compute what multiplies tangents from args alone, or take custom_vjp, whose backward "
            "is given",
            floats,
        )
        with check.following(key_of(jvp, args)) as finish:
            moved = rule_vjp(linear, zeros)[1](cotangents)[0]
            finish(moved)
        return moved

    return _bind_vjp("custom_jvp", f, forward, backward, jvp)


class _Rule:
    """Forward and backward as functions of flat operands.

    Attributes:
        word: the name of what it was made by.
        site: of the call.
        line: of the call, where functions close over tensors.
        has_jvp: whether tangents have a rule of their own.
        moving: the operands that have cotangents.
        num_outputs: the number of outputs. Other tensors that forward makes are those residuals
            that are neither operands nor outputs.
        floats: the outputs that have cotangents.
        out_structure: of the outputs.
    """

    def __init__(
        self,
        word: str,
        site: CallSite,
        operands: _Tensors,
        functions: tuple[Callable, ...],
        has_jvp: bool,
    ):
        self.word, self.site, self.has_jvp = word, site, has_jvp
        self._functions = functions
        first = site.first_argument
        self.line = user_line() if first > site.num_tokens else ""
        self.moving = [i for i, x in enumerate(operands) if i >= first and tree.is_inexact(x)]
        self.num_outputs = 0
        self.floats: list[int] = []
        self.out_structure: Any = None
        self._kept_structure: Any = None
        self._recipe: list[tuple[str, Any]] = []

    @property
    def name(self) -> str:
        """That of backward, with its place."""
        return name_rule(self._functions[1])

    def key(self, operands: _Tensors) -> Hashable:
        """A key for forward and backward of such operands."""
        return key_of(self._functions, self.site.arguments.leaves, operands)

    @property
    def read(self) -> set[int]:
        """The tensors that forward makes which are residuals."""
        return {at for pool, at in self._recipe if pool == "made"}

    def _note_writes(self, rule: str, operands: _Tensors, *more: _Tensors) -> Callable[[], None]:
        """A check that a rule has written to none of these; what it keeps for itself it may."""
        return note_writes(f"{self.word}: {rule}", operands[self.site.num_tokens :], more)

    def forward(self, operands: _Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs, then the other tensors that backward needs."""
        check_writes = self._note_writes("forward", operands)
        with unwatched(), self.site.entered(operands) as (functions, args):
            out, residuals = functions()[0](*args)
        check_writes()
        outputs, self.out_structure = tree.flatten(out)
        for leaf in outputs:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"{self.word} at {user_line()}: the function returned {type(leaf).__name__} in "
                    "its output; wanted a tree of tensors; fix: return what is static outside"
                )
        self.num_outputs = len(outputs)
        self.floats = [i for i, leaf in enumerate(outputs) if tree.is_inexact(leaf)]
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
        check_writes = self._note_writes("backward", operands, cotangents)
        with unwatched(), self.site.entered(operands, check=False) as (functions, args):
            grads = functions()[1](residuals, tree.unflatten(self.out_structure, given))
        check_writes()
        leaves = leaves_like(args, grads)
        first = self.site.first_argument
        flat = [leaves[self.site.arguments.positions[i - first]] for i in self.moving]
        return tuple(
            torch.zeros_like(operands[i]) if grad is None else grad
            for i, grad in zip(self.moving, flat, strict=True)
        )

    def push(self, operands: _Tensors, tangents: _Tensors) -> tuple[torch.Tensor, ...]:
        """By the rule of its own: the tangents of the outputs, from those of `moving`."""
        first, slots = self.site.first_argument, self.site.arguments
        given = replace_at(
            [None] * len(slots.positions), [i - first for i in self.moving], tangents
        )
        empty = slots._replace(leaves=[None] * len(slots.leaves))
        check_writes = self._note_writes("jvp", operands, tangents)
        with unwatched(), self.site.entered(operands) as (functions, args):
            moved = _check_pushed(functions()[2](args, empty.fill(given)))
        check_writes()
        return tuple(moved[i] for i in self.floats)


def _check_pushed(made: Any) -> list:
    """The tangents, one per leaf of the results, that a rule of forward mode returned."""
    wanted = "wanted (f(*args), its tangent), trees of the same structure, shapes and dtypes"
    at = f"custom_jvp: the rule at {user_line()}"
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        got = f"{len(made)} results" if isinstance(made, (tuple, list)) else type(made).__name__
        raise ValueError(f"{at}: returned {got}; {wanted}; fix: return both")
    outputs = tree.leaves(made[0])
    moved = tree.same_structure(made[0], made[1], names=("the result", "the rule's tangent"))
    for i, (path, x, tangent) in enumerate(zip(tree.paths(made[0]), outputs, moved, strict=True)):
        if tangent is None and tree.is_inexact(x):
            moved[i] = torch.zeros_like(x)
        elif tree.is_inexact(x) and not _is_like(tangent, x):
            got: Any = tangent
            if isinstance(tangent, torch.Tensor):
                got = f"{tuple(tangent.shape)} {tangent.dtype}"
            raise ValueError(
                f"{at}: returned a tangent {got} for {path or 'the result'}, {tuple(x.shape)} "
                f"{x.dtype}; {wanted}; fix: expand or convert it"
            )
    return moved


def _is_like(tangent: Any, x: torch.Tensor) -> bool:
    return isinstance(tangent, torch.Tensor) and (tangent.shape, tangent.dtype) == (
        x.shape,
        x.dtype,
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
        push: operands and tangents (one sequence) to the tangents of the outputs that have some.
        anew: the same of a rule that has not run, which may run otherwise.
    """

    rule: _Rule
    forward: Callable[[_Tensors], tuple[torch.Tensor, ...]]
    backward: Callable[[_Tensors, _Tensors, _Tensors], tuple[torch.Tensor, ...]]
    push: Callable[[_Tensors], tuple[torch.Tensor, ...]]
    anew: Callable[[], _Level]

    @classmethod
    def of(cls, rule: _Rule) -> _Level:
        """The level of the call."""

        def push(values):
            count = len(values) - len(rule.moving)
            return rule.push(values[:count], values[count:])

        return cls(rule, rule.forward, rule.backward, push, lambda: cls.of(copy.copy(rule)))

    def again(self, operands: _Tensors, cotangents: _Tensors) -> tuple[torch.Tensor, ...]:
        """Backward after another forward, so that it is differentiated through forward."""
        level = self.anew()
        return level.backward(operands, level.forward(operands), cotangents)

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

        def push(values):
            # results that forward gave a dim have one
            dims = (*in_dims, *(in_dims[i] for i in self.rule.moving))
            run, batched = map_level(self.push, size, dims)
            rows = zip(run(values), batched, self.rule.floats, strict=True)
            return tuple(_map_tangent(x, has, varying[i], size) for x, has, i in rows)

        anew = lambda: self.anew().over(size, in_dims)[0]  # noqa: E731
        return _Level(self.rule, forward, backward, push, anew), varying


def _map_tangent(tangent: torch.Tensor, batched: bool, varies: bool, size: int) -> torch.Tensor:
    """The tangent of a result that varies over a vmap, or does not."""
    if batched and not varies:
        raise ValueError(
            "jvp rule: returned a tangent that varies over an axis (or a vmap) over which the "
            "result is the same; wanted the tangent of what the result is; fix: reduce it as the "
            "result is, such as by lax.psum"
        )
    return tangent if batched or not varies else tangent.expand(size, *tangent.shape)


def _unmap_cotangent(grad: torch.Tensor, batched: bool, dim: int | None, size: int) -> torch.Tensor:
    """The cotangent of an operand that has its batch dim at `dim`, or none and all rows use it."""
    if dim is None:
        return grad.sum(0) if batched else grad * size
    return (grad if batched else grad.expand(size, *grad.shape)).movedim(0, dim)


class _CustomVjp(LevelFunction):
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

    @classmethod
    def push(cls, primals, tangents) -> Any:
        level, *operands = primals
        made: Any = cls.apply(*primals)
        rule = level.rule
        _refuse_hidden(rule, [tangent is not None for tangent in tangents])
        given = [
            torch.zeros_like(operands[i]) if tangents[1 + i] is None else tangents[1 + i]
            for i in rule.moving
        ]
        if rule.has_jvp:
            moved = level.push([*operands, *given])
        else:
            moved = _transpose(level, operands, made, given)
        return made, tuple(replace_at([None] * len(made), rule.floats, moved))

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        level, count = ctx.level, ctx.num_operands
        saved = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        operands, made = saved[:count], saved[count:]
        _refuse_hidden(level.rule, ctx.needs_input_grad)
        floats = level.rule.floats
        if all(cotangents[i] is None for i in floats):
            return None, *(None for _ in operands)
        given = [
            torch.zeros_like(made[i]) if cotangents[i] is None else cotangents[i] for i in floats
        ]
        pull = _Pull.of(level, count, len(made))
        moved: Any = _Backward.apply(pull, *operands, *made, *given)
        return None, *replace_at([None] * count, level.rule.moving, moved)


def _refuse_hidden(rule: _Rule, moves: Sequence[bool]) -> None:
    """Raise ValueError where what the functions close over is differentiated."""
    site = rule.site
    if not any(moves[1 + site.num_tokens : 1 + site.first_argument]):
        return
    which, of = {
        "custom_vjp": ("forward or backward", "for which backward returns no cotangent"),
        "custom_jvp": ("the function or its rule", "for which the rule is given no tangent"),
    }[rule.word]
    raise ValueError(
        f"{rule.word} at {rule.line}: {which} closes over a tensor that is being differentiated, "
        f"{of}; wanted arguments alone to be differentiated; fix: make it an argument, or close "
        "over its lax.stop_gradient(x)"
    )


def _transpose(
    level: _Level, operands: _Tensors, made: _Tensors, tangents: _Tensors
) -> Sequence[torch.Tensor]:
    """The tangents of the outputs, of which backward is the transpose: it is linear."""
    outer = will_be_differentiated([*operands, *tangents])

    def pulled(*cotangents):
        if outer:
            return level.again(operands, cotangents)
        return level.backward(operands, made, cotangents)

    zeros = [
        torch.zeros(made[i].shape, dtype=made[i].dtype, device=made[i].device)
        for i in level.rule.floats
    ]
    if not zeros:
        return []
    check = LinearityCheck(
        f"custom_vjp, differentiated in forward mode: backward, {level.rule.name}",
        "give custom_vjp a rule of forward mode, jvp=",
        zeros,
    )

    def noted(*cotangents):
        found = pulled(*cotangents)
        check.note(found)
        return found

    with check.following(level.rule.key(operands)) as finish:
        transpose: Any = torch.func.vjp(noted, *zeros)[1]
        with in_phase("forward"):
            moved = transpose(tuple(tangents), retain_graph=outer, create_graph=outer)
        finish(moved)
    return moved


@dataclass(frozen=True, eq=False)
class _Pull:
    """Backward as a function of all its inputs; opaque to functorch.

    Attributes:
        run: operands, the tensors that forward made, and cotangents (one sequence) to cotangents.
        again: the same of operands and cotangents, through another forward.
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
            return level.again(values[:num_operands], values[num_operands:])

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
    @classmethod
    def push(cls, primals, tangents) -> Any:
        pull, *values = primals
        out: Any = cls.apply(*primals)
        given = pull.without_made(tangents[1:])
        if all(tangent is None for tangent in given):
            return out, (None,) * len(out)
        return out, tuple(push_forward(pull.again, pull.without_made(values), given)[1])

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
