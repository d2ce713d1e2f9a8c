"""Rematerialisation: keep a function's inputs instead of its intermediates, and run it again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". `torch.utils.checkpoint` fails
under torch.func transforms; this is one autograd Function that re-runs the program with its mesh
axes as explicit operands, so it composes with vmap, grad, jvp, higher orders and collectives.

A policy (`functron.transforms.policies`) may keep some intermediates, which are then not computed
again. Both runs happen under a dispatch mode, below every transform, where operations act on plain
tensors. The first remembers the results that the policy chooses, by their place in the sequence of
operations; the second returns them in that place instead of running the operation. Everything above
the mode (the tape, torch.func levels) sees an operation as any other, so derivatives of every order
are those of the function. This is the idea of torch's selective activation checkpointing.

In a traced program the second run of a function has the same equations on the same values as the
first, and compilers merge equal ones: the intermediates would live until backward. A barrier makes
a value depend on the cotangent that backward starts from. It costs a copy of that value, so only
those operands get one that make large intermediates distinct.

An autograd Function runs forward and backward under other vmap levels than its call. So all that
the function needs goes in as operands: the tokens of simulated mesh axes, which name the level of
each, the tensors it closes over, and its arguments. `CallSite` collects these and puts them back in
force; `map_level` runs a function of operands under one vmap level.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functron.core import compat, tree
from functron.core.closure import hoist, note_writes, refuse_holders
from functron.core.errors import nearest, public
from functron.core.functions import Function
from functron.core.scopes import in_phase, in_scopes, scope_names
from functron.program.recorder import active, keeper
from functron.spmd.axes import SimulatedAxis, enter, scope, user_line
from functron.spmd.primitives import Annotate
from functron.transforms.capture import Relay, unwatched
from functron.transforms.gradient import TensorSlots, replace_at, rule_vjp, split_tensors
from functron.transforms.policies import CHECKPOINT_NAME, RematPolicy, is_product, nothing


class CallSite:
    """A call of a function without its operands, and the mesh axes and named scopes in force.

    Tapes hold it until the whole backward pass is over, and so not the operands: torch frees those
    it saved after the step that reads them.

    Attributes:
        num_tokens: how many operands are tokens.
        first_argument: the operand at which the tensors among its arguments begin.
        arguments: these without their tensors.
    """

    @classmethod
    def of(cls, function: Callable, arguments: tree.Tree) -> tuple[CallSite, list[torch.Tensor]]:
        """The site of a call, and its operands.

        These are tensors: a token per simulated axis, what the function closes over, and the
        tensors among its arguments.
        """
        hidden, close = hoist(function)
        tensors, rest = split_tensors(arguments)
        site = cls(close, len(hidden), rest)
        tokens = [axis.token for axis in site._simulated]
        return site, [*tokens, *hidden, *tensors]

    def __init__(self, close: Callable, num_hidden: int, arguments: TensorSlots):
        self._close, self.arguments = close, arguments
        self._scope, self._names = scope(), scope_names()
        self._simulated = [x for x in self._scope.axes.values() if isinstance(x, SimulatedAxis)]
        if self._scope.shares is not None:
            self._simulated.append(self._scope.shares)
        self.num_tokens = len(self._simulated)
        self.first_argument = self.num_tokens + num_hidden

    @contextlib.contextmanager
    def entered(
        self, operands: Sequence[torch.Tensor], *, check: bool = True
    ) -> Iterator[tuple[Callable, tree.Tree]]:
        """The function and its arguments from these operands, with its axes in force.

        Axes are rebound to the tokens, at whatever vmap level. Without `check`, replicated values
        may be reduced, as in transposes.
        """
        bound = [
            replace(axis, token=token)
            for axis, token in zip(self._simulated, operands[: self.num_tokens], strict=True)
        ]
        shares = bound.pop() if self._scope.shares is not None else None
        axes = {axis.name: axis for axis in bound}
        function = self._close(list(operands[self.num_tokens : self.first_argument]))
        arguments = self.arguments.fill(operands[self.first_argument :])
        inside = replace(
            self._scope,
            axes={**self._scope.axes, **axes},
            check=check and self._scope.check,
            shares=shares,
        )
        # those named scopes too that backward, which runs elsewhere, is not in
        here = scope_names()
        same = len([*itertools.takewhile(bool, map(operator.eq, here, self._names))])
        with enter(inside), in_scopes((*here, *self._names[same:])):
            yield function, arguments


def will_be_differentiated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether backward will run through results of these."""
    taped = torch.is_grad_enabled() and any(compat.requires_grad(x) for x in tensors)
    return taped or compat.differentiating()


def pull_back(
    f: Callable, operands: Sequence, moving: Sequence[int]
) -> tuple[tree.Tree, Callable[[tree.Tree], list]]:
    """``f(operands)``, and its pullback to those at the positions `moving`; None for the others."""
    chosen = [operands[i] for i in moving]
    out, pullback = rule_vjp(lambda *values: f(replace_at(operands, moving, values)), *chosen)
    return out, lambda cotangent: replace_at([None] * len(operands), moving, pullback(cotangent))


def map_level(
    f: Callable[[Sequence], Sequence[torch.Tensor]], size: int, in_dims: Sequence[int | None]
) -> tuple[Callable[[Sequence], tuple[torch.Tensor, ...]], list[bool]]:
    """`f` under one vmap over `in_dims`, and, once it has run, which results are batched.

    Batched results have their batch dim first. vmap gives every result one; it is removed from
    those that do not vary, which would otherwise no longer count as replicated.
    """
    varying: list[bool] = []

    def rows(token, *rest):
        outputs = f(rest)
        level = compat.level_of(token)
        varying[:] = [compat.is_batched_at(value, level) for value in outputs]
        return tuple(outputs)

    def mapped(values: Sequence) -> tuple[torch.Tensor, ...]:
        run: Any = torch.func.vmap(rows, in_dims=(0, *in_dims), randomness="error")
        outputs = zip(run(torch.arange(size), *values), varying, strict=True)
        return tuple(value if batched else value.select(0, 0) for value, batched in outputs)

    return mapped, varying


def view_operands(outputs: Sequence[torch.Tensor], operands: Sequence) -> tuple[torch.Tensor, ...]:
    """The outputs, with views of operands: these would be taken for modified in place."""
    return tuple(
        value.view_as(value) if any(value is operand for operand in operands) else value
        for value in outputs
    )


class LevelFunction(Function):
    """A function of a program, which is opaque to functorch, and of tensors.

    At a level of vmap it is that of ``program.over(size, in_dims)``: the program under this vmap
    and, once it has run, which results are batched.
    """

    generate_vmap_rule = False

    @staticmethod
    def jvp(ctx, *tangents) -> Any:
        """Torch's own dual numbers; levels of torch.func `push`."""
        raise ValueError(
            "got torch.autograd.forward_ad through remat or custom_vjp, whose tangents it switches "
            "off; wanted a transform; fix: functron.jvp or torch.func.jvp"
        )

    @classmethod
    def vmap(cls, info, in_dims, program, *operands) -> Any:
        outer, varying = program.over(info.batch_size, in_dims[1:])
        outputs = cls.apply(outer, *operands)
        return outputs, tuple(0 if batched else None for batched in varying)


_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("barrier(Tensor x, Tensor dep) -> Tensor")
_LIBRARY.impl("barrier", lambda x, dep: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("barrier", lambda x, dep: torch.empty_like(x), "Meta")
torch.library.register_vmap(
    "functron::barrier",
    lambda info, in_dims, x, dep: (torch.ops.functron.barrier(x, dep), in_dims[0]),
    lib=_LIBRARY,
)


_barrier = torch.ops.functron.barrier.default


class _Tie(Annotate):
    @classmethod
    def push(cls, primals, tangents) -> Any:
        op, x, dep = primals
        # what is computed from tangents alone is told from what forward computed as well
        moved = None if tangents[1] is None else cls.apply(op, tangents[1], dep)
        return cls.apply(op, x, dep), moved


def tie(x: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
    """`x`, available only after `dep`; works under torch.func transforms."""
    out: Any = _Tie.apply(_barrier, x, dep)
    return out


def tie_all(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The values, each available only after all; below all transforms."""
    last = values[0]
    for x in values[1:]:
        last = _barrier(x, last)
    return (*(_barrier(x, last) for x in values[:-1]), last if values[1:] else _barrier(last, last))


class ReachMode(TorchDispatchMode):
    """Finds which operands the intermediates of a with block are computed from."""

    def __init__(self, operands: Sequence[torch.Tensor]):
        super().__init__()
        self.operands = list(operands)
        # per storage the set of operands that it depends on, as bits
        self._from: dict[int, int] = {}
        for position, operand in enumerate(self.operands):
            key = storage_key(operand)
            self._from[key] = self._from.get(key, 0) | 1 << position
        self._made: list[tuple[int, int]] = []  # dependencies and bytes of every intermediate

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        used, given = 0, _storages((args, kwargs))
        for key in given:
            used |= self._from.get(key, 0)
        for key, size in _storages(out).items():
            if key not in given:
                self._from[key] = used
                self._made.append((used, size))
        return out

    def choose(self) -> tuple[int, ...]:
        """The operands to tie: each makes more bytes distinct than its copy costs."""
        chosen: list[int] = []
        left = self._made
        while True:
            gains = [
                sum(size for used, size in left if used >> i & 1) - operand.nbytes
                for i, operand in enumerate(self.operands)
            ]
            best = max(range(len(gains)), key=gains.__getitem__, default=None)
            if best is None or gains[best] <= 0:
                return tuple(chosen)
            chosen.append(best)
            left = [(used, size) for used, size in left if not used >> best & 1]


def storage_key(value: torch.Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return value.untyped_storage()._cdata


_aten = torch.ops.aten
_EMPTIES = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_COPIES = {_aten.clone.default, _aten._to_copy.default}


class KeptValues:
    """The values that one call of a rematerialised function keeps.

    Attributes:
        policy: what to keep.
        state: "fresh" until the forward run, "kept" until the backward run, then "spent". A later
            backward run (``retain_graph=True``) computes everything again.
        steps: the operations of the forward run, as far as `counts` is true of them.
        kept: results, by step.
        tied: the positions of operands that backward ties to the cotangent, in a traced program.
        diverged: the warning if the two runs differed and kept results could not be used.
        depth: number of enclosing scans of a traced program. Bodies of scans inside the function
            are recorded apart and cannot use its values, so nothing in them is kept.
    """

    def __init__(self, policy: RematPolicy, *, needed: bool):
        self.policy = policy
        self.needed = needed
        self.state: Literal["fresh", "kept", "spent"] = (
            "fresh" if needed and policy.is_partial else "spent"
        )
        self.steps: list[tuple] = []
        self.kept: dict[int, Kept] = {}
        self.tied: tuple[int, ...] = ()
        self.depth = _depth()
        self.diverged = ""
        self._recall: Recall | None = None

    @contextlib.contextmanager
    def recalling(self, after: torch.Tensor) -> Iterator[None]:
        """Use up the kept values in this with block; the traced ones depend on `after`."""
        if self.state == "kept":
            self._recall = Recall(self, compat.plain(after))
        try:
            yield
        finally:
            self._recall, self.state = None, "spent"
            self.steps, self.kept = [], {}
        if self.diverged:
            warnings.warn(self.diverged, stacklevel=2)

    def counts(self, func) -> bool:
        """Whether `func` is a step: not a view, a query of a device, or an empty allocation.

        Rules of derivatives allocate only where a tape is kept.
        """
        other = func.is_view or func in _EMPTIES or func.namespace == "prim"
        return not other and _depth() == self.depth

    def watch(self) -> contextlib.AbstractContextManager:
        """The mode under which the function must run now."""
        if self.state == "fresh":
            return Remember(self)
        return self._recall or contextlib.nullcontext()


def _depth() -> int:
    recorder = active()
    return 0 if recorder is None else recorder.depth


@dataclass(frozen=True, eq=False)
class Kept:
    """The results of one operation.

    Attributes:
        leaves: its results, flat: tensors and numbers.
        structure: of them.
        versions: how often each tensor had been modified in place.
        home: the device to bring them back to; None if they were not moved.
    """

    leaves: list
    structure: Any
    versions: list[int]
    home: torch.device | None = None

    @classmethod
    def of(cls, out: Any) -> Kept:
        """The results `out` of an operation that was just run by a dispatch mode."""
        leaves, structure = pytree.tree_flatten(out)
        leaves = [compat.alias(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        return cls(leaves, structure, [_version(x) for x in leaves])

    @property
    def intact(self) -> bool:
        """Whether no result was modified in place since."""
        return [_version(x) for x in self.leaves] == self.versions

    def to_host(self) -> Kept:
        """A copy in host memory, pinned where it comes from CUDA."""
        home = next(x.device for x in self.leaves if isinstance(x, torch.Tensor))
        if home.type == "cpu":
            return self
        moved = [_move(x, torch.device("cpu")) for x in self.leaves]
        return Kept(moved, self.structure, [_version(x) for x in moved], home)

    def results(self, after: torch.Tensor) -> Any:
        """The operation's results, where it gave them."""
        leaves = self.leaves
        if self.home is not None:
            leaves = [_move(x, self.home) for x in leaves]
        elif active() is not None:
            # what is computed from a kept value must not be merged with what forward computed
            leaves = [_barrier(x, after) if isinstance(x, torch.Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, self.structure)


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0


def _move(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


class Remember(TorchDispatchMode):
    """The dispatch mode of the forward run: keeps the results that the policy chooses."""

    def __init__(self, memory: KeptValues):
        super().__init__()
        self.memory, self.policy = memory, memory.policy
        self.candidates: dict[int, Kept] = {}
        self.makers: dict[int, int] = {}  # storage -> the step that made what is in it
        self.marked: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is CHECKPOINT_NAME:
            self._mark(*args)
        if not self.memory.counts(func):
            return out
        memory = self.memory
        step = len(memory.steps)
        memory.steps.append(signature(func, args, kwargs))
        if self.policy.keep_dots and is_product(func):
            memory.kept[step] = Kept.of(out)
        if self.policy.names and not func._schema.is_mutable:
            self._candidate(step, func, args, kwargs, out)
        return out

    def _candidate(self, step: int, func, args, kwargs, out) -> None:
        """Remember which step made `out`, until it is known which values have a name."""
        given, made = _storages((args, kwargs)), _storages(out)
        made = {key: size for key, size in made.items() if key not in given}
        if not made:
            return  # a view, or collectives' wait
        key, size = next(iter(made.items()))
        if func in _COPIES and given[storage_key(args[0])] <= size:
            maker = self.makers.get(storage_key(args[0]))
            if maker is not None:  # keep what was copied: it costs no more, and took longer to make
                self.makers[key] = maker
                return
        self.candidates[step] = Kept.of(out)
        self.makers.update(dict.fromkeys(made, step))

    def _mark(self, x: torch.Tensor, name: str) -> None:
        self.marked.add(name)
        step = self.makers.get(storage_key(x))
        if name not in self.policy.names or step is None:
            return  # an argument, which is kept anyway, has no maker
        kept = self.candidates[step]
        if kept.intact:
            on_host = name in self.policy.on_host
            self.memory.kept.setdefault(step, kept.to_host() if on_host else kept)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.memory.state = "kept"
        missing = sorted(self.policy.names - self.marked)
        if missing and exception[0] is None:
            known = nearest(missing[0], self.marked)
            raise ValueError(
                f"remat at {user_line()}: the policy keeps {', '.join(map(repr, missing))}, which "
                f"the function never marked; wanted names that it gives with checkpoint_name: "
                f"{known}"
            )


class Recall(TorchDispatchMode):
    """The dispatch mode of the backward run: returns kept results, and runs all else."""

    def __init__(self, memory: KeptValues, after: torch.Tensor):
        super().__init__()
        self.memory, self.after = memory, after
        self.step = 0
        self.in_step = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.in_step or not self.memory.counts(func):
            return func(*args, **kwargs)
        steps, step = self.memory.steps, self.step
        self.step += 1
        self.in_step = step < len(steps) and steps[step] == signature(func, args, kwargs)
        if not self.in_step:
            self._report_divergence(func)
            return func(*args, **kwargs)
        kept = self.memory.kept.pop(step, None)
        if kept is None or not kept.intact:
            return func(*args, **kwargs)
        return kept.results(self.after)

    def _report_divergence(self, func) -> None:
        lost = len(self.memory.kept)
        self.memory.kept.clear()
        if lost:  # told later: a warning made an exception must not be raised inside an operation
            self.memory.diverged = (
                f"remat at {user_line()}: backward ran {func} where forward ran another operation, "
                f"so {lost} kept results were computed again. The function must run the same "
                "operations both times; numbers are not affected"
            )


def signature(func, args: tuple, kwargs: dict) -> tuple:
    """Equal for two runs of an operation: itself, shapes, dtypes and constants."""
    return (func, *map(_describe_argument, args), *map(_describe_argument, kwargs.values()))


def _describe_argument(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype
    if isinstance(argument, (list, tuple)):
        return tuple(map(_describe_argument, argument))
    return argument


def _storages(values: Any) -> dict[int, int]:
    """The bytes of the storages of all tensors in a tree, by `storage_key`."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    return {storage_key(x): x.untyped_storage().nbytes() for x in tensors}


@public
def remat(f: Callable | None = None, *, policy: RematPolicy = nothing) -> Callable:
    """Activation checkpointing: `f`, whose backward computes it again instead of storing it.

    Between forward and backward only its tensor arguments (tensors it closes over included) and
    the values that the policy keeps are stored, not all intermediates; the price is one more
    forward, without what was kept. Collectives inside run again too, unless their results are kept.
    Randomness inside must come from keys (`functron.random`), so that both runs agree.

    Kept values are freed as soon as backward has used them. Backward called again
    (``retain_graph=True``) computes everything again. In a program that is being traced, values
    inside a scan that `f` contains are not kept: put remat around the scanned function.

    Without `f` it is a decorator: ``@remat(policy=policies.dots)``.

    >>> f = ft.remat(lambda w, x: torch.relu(x @ w).sum())
    >>> ft.grad(f)(torch.ones(2, 1), torch.ones(3, 2))
    tensor([[3.],
            [3.]])

    Args:
        policy: of `functron.policies`: nothing, everything, dots, ``names("a", ...)``,
            ``offload("a", ...)``, or several joined by ``|``.

    Derivatives of any order and mode are those of `f`; what is differentiated in reverse of a
    `functron.jvp` of it is computed again as well, all of it: there policies keep nothing.

    Raises:
        ValueError: a name of the policy that `f` never marks with `checkpoint_name`; `f` draws
            torch's own random numbers; torch's own dual numbers (use `functron.jvp`).
        TypeError: not a policy.
    """
    if f is None:
        return functools.partial(remat, policy=policy)
    if policy.keep_all:
        return f
    function = f

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        title = "remat cannot see into these"
        refuse_holders(title, "argument", (args, kwargs) if kwargs else args, tracked=True)
        if relay := Relay():
            with unwatched():
                out, captured = remat(relay.around(function), policy=policy)(*args, **kwargs)
            relay.take(captured)
            return out
        if (keep := keeper()) is not None:
            return keep.remat(function, policy, args, kwargs)
        site, given = CallSite.of(function, (args, kwargs))
        tensors = given[site.num_tokens :]
        memory = KeptValues(policy, needed=will_be_differentiated(tensors))
        result: list[tree.Structure] = []

        def flat(operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with site.entered(operands) as (closed, arguments), memory.watch():
                new_args, new_kwargs = arguments
                out = closed(*new_args, **new_kwargs)
                outputs, out_structure = tree.flatten(out)
            refuse_holders(title, "output", out)
            result[:] = [out_structure]
            return tuple(outputs)

        program = _Program(flat, memory, compat.innermost_is_grad())
        seen = memory.needed and not compat.dispatch_modes_active()  # which refuse it themselves
        before = _random_states(tensors) if seen else []
        check_writes = note_writes("remat: the function", tensors)
        outputs = _Remat.apply(program, *given)
        check_writes()
        after = _random_states(tensors) if before else []
        if not all(map(torch.equal, before, after)):
            raise ValueError(
                f"remat at {user_line()}: the function draws torch's own random numbers, which "
                "would be others when backward computes it again; wanted a function of its "
                "arguments; fix: pass a key, and draw with functron.random"
            )
        return tree.unflatten(result[0], outputs)

    return wrapped


def _random_states(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The states of torch's generators for the devices of these tensors, in host memory."""
    devices = {value.device for value in tensors if value.is_cuda}
    if devices and torch.cuda.is_current_stream_capturing():
        return []
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, sorted(devices, key=str))]


@dataclass(frozen=True, eq=False)
class _Program:
    """A flat function, opaque to functorch.

    Attributes:
        f: of the sequence of operands; returns a tuple of tensors.
        memory: what is kept for backward, shared by all vmap levels of one call.
        tracked: whether a torch.func level will run its backward, rather than torch's tape.
    """

    f: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    memory: KeptValues
    tracked: bool

    def forward(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs; where results are kept, computed as backward will compute them.

        Kept results are found by their place among the operations, and torch takes some operations
        apart differently under differentiation.
        """
        if self.memory.state != "fresh" or active() is not None:
            return self.f(operands)
        if self.tracked:
            return _run_differentiated(self.f, operands)
        if any(value.requires_grad for value in operands):
            return rule_vjp(lambda *values: self.f(values), *operands)[0]
        return self.f(operands)

    def over(self, size: int, in_dims: Sequence[int | None]) -> tuple[_Program, list[bool]]:
        """The same with one vmap of `size` around it, and which outputs are batched."""
        batched, varying = map_level(self.forward, size, in_dims)
        return _Program(batched, self.memory, compat.innermost_is_grad()), varying


def _run_differentiated(f: Callable, operands: Sequence) -> tuple[torch.Tensor, ...]:
    floats = [i for i, value in enumerate(operands) if tree.is_inexact(value)]

    def split(*values):
        outputs = f(replace_at(operands, floats, values))
        return [x for x in outputs if tree.is_inexact(x)], outputs  # vjp refuses integers

    made: Any = torch.func.vjp(split, *(operands[i] for i in floats), has_aux=True)
    return made[2]


def push_forward(
    f: Callable[[Sequence], Sequence[torch.Tensor]], operands: Sequence, tangents: Sequence
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """``f(operands)``, and the tangents of its results: None of those that are integers.

    Args:
        f: of a sequence of operands.
        operands: tensors.
        tangents: one for each; None of those that have none.
    """
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]
    are_floats: list[bool] = []

    def split(*values: torch.Tensor) -> tuple[tuple, tuple]:
        made = f(replace_at(operands, moving, values))
        are_floats[:] = [*map(tree.is_inexact, made)]
        return (
            tuple(x for x in made if tree.is_inexact(x)),
            tuple(x for x in made if not tree.is_inexact(x)),
        )

    pushed: Any = torch.func.jvp(
        split, tuple(operands[i] for i in moving), tuple(tangents[i] for i in moving), has_aux=True
    )
    floats, moved, others = map(iter, pushed)
    out = [next(floats) if is_one else next(others) for is_one in are_floats]
    return out, [next(moved) if is_one else None for is_one in are_floats]


class _Remat(LevelFunction):
    @classmethod
    def push(cls, primals, tangents) -> Any:
        """Those of the function that computes results and tangents, computed again as well.

        Nothing is kept: torch takes operations with tangents apart in ways that differ between the
        two runs.
        """
        program, *operands = primals
        program.memory.state = "spent"
        moving = [i for i, tangent in enumerate(tangents[1:]) if tangent is not None]
        floats: list[int] = []

        def both(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            given = replace_at([None] * len(operands), moving, values[len(operands) :])
            out, moved = push_forward(program.forward, values[: len(operands)], given)
            floats[:] = [i for i, x in enumerate(moved) if x is not None]
            return *out, *(x for x in moved if x is not None)

        # of its own: it has other operands than the backward that runs above this level
        memory = KeptValues(nothing, needed=program.memory.needed)
        pushed = _Program(both, memory, compat.innermost_is_grad())
        made: Any = cls.apply(pushed, *operands, *(tangents[1 + i] for i in moving))
        places = [*range(len(operands)), *moving]
        program.memory.tied = tuple(dict.fromkeys(places[i] for i in memory.tied))
        out = made[: len(made) - len(floats)]
        return out, tuple(replace_at([None] * len(out), floats, made[len(out) :]))

    @staticmethod
    def forward(program: _Program, *operands):
        if active() is not None and program.memory.needed:
            with ReachMode(operands) as reach:
                outputs = program.forward(operands)
            program.memory.tied = reach.choose()
        else:
            outputs = program.forward(operands)
        return view_operands(outputs, operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.program = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents) -> Any:
        program: _Program = ctx.program
        operands = [compat.unwrap_if_dead(value) for value in ctx.saved_tensors]
        after = next((value for value in cotangents if value is not None), None)
        if after is None:
            return None, *(None for _ in operands)
        with in_phase("recompute"), unwatched():
            if active() is not None:
                for position in program.memory.tied:
                    operands[position] = tie(operands[position], after)
            moving = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
            with program.memory.recalling(after):
                outputs, pullback = pull_back(program.f, operands, moving)
        given = tuple(
            torch.zeros_like(out) if value is None else value
            for out, value in zip(outputs, cotangents, strict=True)
        )
        return None, *pullback(given)
