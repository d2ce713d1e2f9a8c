"""Gradient transformations, after Optax: pure functions, and their donating twins that end in `_`.

A transformation is six functions. `init` and `update` are Optax's pair. `specs` says how the state
is sharded, given how the parameters are, and `grad_specs` how gradients must be. `update_` and
`step_` are `update` alone and `update` followed by `apply_updates`, for a caller who gives up the
arguments: they reuse memory, run fused, and are what a training step calls. The pure pair is for
everything else: differentiating through an optimizer, vmapping over hyperparameters, and reading
what `step_` is supposed to compute.

Where a result depends on all shards of a leaf (a norm, a mean of rows, a whole matrix), the
transformation must know how parameters are sharded. ``optimizer.bind(specs)`` tells it, once, and
all that it is made of; `functron.init_state` and `functron.make_step` call it.

Two further functions, which few have, let one kernel compute what several transformations do around
each other in one pass over memory: `factor` and `one_pass`. One that clips by a norm has it as
`norm`, so that whoever reports that norm too need not compute it again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, cast

import torch

from functron.core import compat, tree
from functron.core.closure import refuse_holders, refuse_orphans
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.ops.foreach import foreach_
from functron.program.recorder import active
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.simulate import transformed
from functron.spmd.spec import P, is_spec, spec_axes

Updates = tree.Tree
State = tree.Tree
Params = tree.Tree


class Fusion(NamedTuple):
    """The work of the transformations around one, for it to do in its own pass over memory.

    Attributes:
        factor: what gradients are multiplied by first, 0-dim; None: nothing.
        masters: float32 copies that are updated in place of low-precision parameters, which then
            are these rounded; None, as a whole or in places, where there is none.
        rounding: of parameters, an `ops.adamw.Stochastic` each; None: to nearest.
    """

    factor: torch.Tensor | None = None
    masters: tree.Tree = None
    rounding: tree.Tree = None


class Norm(NamedTuple):
    """The norm that a transformation clips by.

    Attributes:
        of: ``of(updates)``: those that it is the norm of, with None in the places of others.
        value: ``value(updates)``: the norm itself, 0-dim; it issues the norm's collectives.
    """

    of: Callable[[Updates], Updates]
    value: Callable[[Updates], torch.Tensor]


class Scaling(NamedTuple):
    """The factor of a loss, as `with_loss_scale` keeps it.

    Attributes:
        scale: what the loss is to be multiplied by, and gradients divided by before they are
            updates; float32, 0-dim.
        stuck: steps in a row that overflowed where it could not fall; int64, 0-dim.
    """

    scale: torch.Tensor
    stuck: torch.Tensor


OnePass = Callable[
    [Updates, State, Params, Fusion], Callable[[], tuple[Params, State, Params]] | None
]
"""``(grads, state, params, fusion)`` to what computes the step; None: another way must. That gives
the new parameters, state and masters: those that it was given, overwritten, unless `purely`."""


class GradientTransformation(NamedTuple):
    """Six functions over trees of tensors; all work under torch.func.vmap, so in simulation.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(updates, state, params=None) -> (updates, state)``. Pure.
        specs: ``specs(param_specs) -> state_specs``: the sharding of the state, from that of the
            parameters (a tree or prefix tree of `P`). Counters are ``P()``.
        update_: `update`, but free to overwrite `updates` and `state`. What it returns as updates
            shares no memory with the state that it returns, nor with `params`.
        step_: ``step_(grads, state, params) -> (params, state)``: overwrites `params` in place, may
            overwrite `state`, and may use `grads` as scratch; use what it returns.
        grad_specs: ``grad_specs(param_specs) -> specs``: how `update` and `step_` want gradients to
            be sharded, once reduced (`functron.sync_gradients`). As the parameters are, except
            under `zero`.
        norm: of the updates, where `update` clips by one; None: it does not. Where there is one,
            `update`, `update_` and `step_` take its value as the keyword argument `norm`, and
            compute it only if they are not given it.
        elementwise: whether an element of a parameter, of its update and of its state depends on
            that element, its gradient and its state alone, besides counters and the leaf's path:
            parts of leaves give parts of the results. False: it does not, or nobody says.
        whole: whether its results are those of whole leaves though it sees shards: it is given
            their specs, by its maker or by `bind`. See `takes_shards`.
        divides: whether it, or one inside, gives others parts of what ranks hold, as `zero` does.
        loss_scale: ``loss_scale(state)``: the `Scaling` of the next step. None: there is none. Only
            the outermost transformation has one (see `with_loss_scale`).
        name: what made it, and where, for messages; "": unknown.
        inside: ``inside(param_specs)``: those that it is made of, each with the specs of what it is
            given, None for the leaves that it is not. None: it is made of none.
        with_specs: ``with_specs(param_specs, copies)``: the same for parameters with these specs;
            None: it needs none, or has them. Call `bind`.
    """

    init: Callable[[Params], State]
    update: Callable[..., tuple[Updates, State]]
    specs: Callable[[tree.Tree], tree.Tree]
    update_: Callable[..., tuple[Updates, State]]
    step_: Callable[[Updates, State, Params], tuple[Params, State]]
    grad_specs: Callable[[tree.Tree], tree.Tree] = lambda param_specs: param_specs
    factor: Callable[..., torch.Tensor] | None = None
    one_pass: OnePass | None = None
    norm: Norm | None = None
    elementwise: bool = False
    loss_scale: Callable[[State], Scaling] | None = None
    with_specs: Callable[[tree.Tree, tree.Tree], GradientTransformation] | None = None
    whole: bool = False
    divides: bool = False
    name: str = ""
    inside: Callable[[tree.Tree], Sequence[tuple[GradientTransformation, tree.Tree]]] | None = None

    @property
    def takes_shards(self) -> bool:
        """Whether shards of leaves give shards of its results: `elementwise`, or `whole`."""
        return self.elementwise or self.whole

    def bind(self, specs: tree.Tree, copies: tree.Tree = 1) -> GradientTransformation:
        """The same transformation, for parameters that are sharded like this.

        What has been given specs of its own keeps them; binding twice changes nothing.

        Args:
            specs: the parameters' specs, a tree or prefix tree of `P`.
            copies: how many ranks of a pipeline hold each parameter, as
                `pipeline.Partition.copies` says; for norms.
        """
        return self if self.with_specs is None else self.with_specs(specs, copies)


Make = ParamSpec("Make")


def bindable(
    make: Callable[Make, GradientTransformation],
) -> Callable[Make, GradientTransformation]:
    """`make`, whose results `bind` makes again, with the specs that they were not given.

    These are its argument `specs`, and `copies` if it has that; a transformation that it is given
    as `inner` is bound too.
    """
    signature = inspect.signature(make)
    names, again = signature.parameters, cast(Callable[..., GradientTransformation], make)

    @functools.wraps(make)
    def made(*args: Make.args, **kwargs: Make.kwargs) -> GradientTransformation:
        given = signature.bind(*args, **kwargs).arguments
        inner, missing = given.get("inner"), "specs" in names and given.get("specs") is None

        def with_specs(specs: tree.Tree, copies: tree.Tree) -> GradientTransformation:
            found = dict(given)
            if missing:
                found["specs"] = specs
                if "copies" in names:
                    found.setdefault("copies", copies)
            if inner is not None:
                found["inner"] = inner.bind(specs, copies)
            return _of_shards(again(**found), found.get("inner"), "specs" in names)

        unbound = missing or (inner is not None and inner.with_specs is not None)
        built = make(*args, **kwargs)
        if inner is not None and built.loss_scale is None:
            refuse_scaled(make.__name__, "inner", [inner])
        built = _of_shards(built, inner, "specs" in names)
        return built._replace(with_specs=with_specs if unbound else None)

    return made


def _of_shards(
    built: GradientTransformation, inner: GradientTransformation | None, takes_specs: bool
) -> GradientTransformation:
    """`built`, which takes shards if the one inside does, or else if it has an argument `specs`."""
    if inner is None:
        return built._replace(whole=takes_specs, divides=False)
    inside = built.inside or (lambda param_specs: [(inner, param_specs)])
    return built._replace(whole=inner.takes_shards, divides=inner.divides, inside=inside)


def refuse_scaled(title: str, path: str, inner: Iterable[GradientTransformation]) -> None:
    """Raise ValueError for transformations whose loss is scaled inside of one that hides it."""
    if any(each.loss_scale is not None for each in inner):
        wanted = "no scale of the loss inside, where the training step would not find it"
        refuse(title, path, "with_loss_scale(...)", wanted, "put with_loss_scale around it all")


_DECLARE = (
    "say optim.transformation(..., elementwise=True) where each element's update depends on that "
    "element alone, or give it bind=: a function of the specs to the transformation for these"
)


def refuse_shards(title: str, path: str, inner: Iterable[GradientTransformation]) -> None:
    """Raise ValueError for transformations that would take parts of leaves for whole ones."""
    if not all(each.takes_shards for each in inner):
        refuse(
            title,
            path,
            "a transformation that is not elementwise, and that cannot be told how leaves are "
            "sharded: of its part of a leaf every rank would compute another number",
            "one whose results for parts of leaves are parts of its results",
            _DECLARE,
        )


def refuse_parts(
    title: str,
    optimizer: GradientTransformation,
    specs: tree.Tree,
    mesh: Mesh | BoundMesh,
    pipeline: str | None = None,
) -> None:
    """Raise ValueError for transformations that would take a rank's parts for whole parameters.

    Args:
        title: of the message.
        optimizer: bound to the specs.
        specs: the parameters' specs.
        mesh: the ranks.
        pipeline: the axis whose ranks have other layers.
    """
    problems = []
    for each, own in _without_shards(optimizer, specs):
        found = _first_split(own, mesh) or _first_split(each.grad_specs(own), mesh)
        if found is None and pipeline is not None and mesh[pipeline] > 1:
            found = "parameters", pipeline
        if found is not None:
            path, axis = found
            got = f"a transformation that is not elementwise and has no bind, and {path} split "
            got += f"over {mesh[axis]} ranks of {axis!r}, of each of which it would give others"
            wanted = "one whose results for parts of parameters are parts of its results"
            problems.append(Problem(each.name or "optimizer", got, wanted, _DECLARE))
    raise_problems(title, problems)


def _without_shards(
    optimizer: GradientTransformation, specs: tree.Tree
) -> list[tuple[GradientTransformation, tree.Tree]]:
    """Those inside of it that take no shards, each with the specs of what it is given."""
    if optimizer.takes_shards:
        return []
    if optimizer.inside is None:
        return [(optimizer, specs)]
    return [row for each, own in optimizer.inside(specs) for row in _without_shards(each, own)]


def _first_split(specs: tree.Tree, mesh: Mesh | BoundMesh) -> tuple[str, str] | None:
    """The first parameter that ranks have parts of, and the axis."""
    paths, leaves = tree.paths(specs, is_spec), tree.leaves(specs, is_spec)
    for path, spec in zip(paths, leaves, strict=True):
        axis = next((name for name in spec_axes(spec or P()) if mesh[name] > 1), None)
        if axis is not None:
            return path or "parameters", axis
    return None


def _named(fn: Callable) -> str:
    """The function that made this one, and its place: ``clip_rows (file.py:12)``."""
    fn = inspect.unwrap(fn)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", type(fn).__name__).split(".<locals>")[0]
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


Bind = Callable[..., GradientTransformation]


@public
def transformation(
    init: Callable[[Params], State],
    update: Callable[..., tuple[Updates, State]],
    specs: Callable[[tree.Tree], tree.Tree],
    *,
    update_: Callable[..., tuple[Updates, State]] | None = None,
    step_: Callable[[Updates, State, Params], tuple[Params, State]] | None = None,
    grad_specs: Callable[[tree.Tree], tree.Tree] | None = None,
    elementwise: bool = False,
    bind: Bind | None = None,
) -> GradientTransformation:
    """A transformation from the functions that its author cares about; the rest follow.

    Whatever dtype an update computes in, the state that it returns has the dtypes of the state that
    it was given, those of `init`: checkpoints, donated memory and compiled steps rely on that.

    `update_` defaults to `update` (with leaves copied that are at once an update and state),
    `step_` to `update_` followed by `apply_updates_`, and `grad_specs` to the parameters' specs.
    Say `elementwise` where it is (see `GradientTransformation`). Where it is not, results depend on
    more of a leaf than a rank may have of it. Give `bind` then: ``bind(specs)``, or ``bind(specs,
    copies)``, is the same transformation for parameters with these specs, as
    `GradientTransformation.bind` has it; it sums over the axes that split a leaf:

        def normalised(specs=None):
            def unit(u, spec):
                return u / lax.psum(u.square().sum(), tuple(spec_axes(spec))).sqrt()

            def update(updates, state, params=None):
                known = P() if specs is None else specs
                flat = tree.broadcast_prefix(known, updates, is_leaf=is_spec)
                new = [unit(*row) for row in zip(tree.leaves(updates), flat, strict=True)]
                return tree.unflatten(tree.structure(updates), new), state

            return optim.transformation(
                lambda params: (), update, lambda param_specs: (), bind=normalised
            )

    `bind` is called by whatever knows the specs: `make_step`, and `zero`, with those of the parts.
    They refuse what has neither, wherever ranks have parts of what it is given: it would take each
    for a whole leaf.
    """

    def pure(updates, state, params=None, **norm):
        updates, new = update(updates, state, params, **norm)
        return updates, _with_dtypes(new, state)

    def unshared(updates, state, params=None, **norm):
        updates, state = pure(updates, state, params, **norm)
        kept = {id(leaf) for leaf in tree.leaves(state)}
        return tree.map(lambda u: u.clone() if id(u) in kept else u, updates), state

    def donating(updates, state, params=None, **norm):
        # a traced program is pure: what takes whose memory is for its compiler to decide
        if purely() or update_ is None:
            return (pure if purely() else unshared)(updates, state, params, **norm)
        updates, new = update_(updates, state, params, **norm)
        return updates, _with_dtypes(new, state)

    def update_and_apply(grads, state, params, **norm):
        updates, state = donating(grads, state, params, **norm)
        return apply_updates_(params, updates), state

    plain = GradientTransformation(
        _of_tensors(init),
        pure,
        specs,
        donating,
        update_and_apply,
        elementwise=elementwise,
        name=_named(update),
    )
    if grad_specs is not None:
        plain = plain._replace(grad_specs=grad_specs)
    made = with_step(plain, step_ or update_and_apply)
    return made if bind is None else made._replace(with_specs=_binding(bind), whole=True)


def _of_tensors(init: Callable[[Params], State]) -> Callable[[Params], State]:
    """`init`, which refuses objects with tensors that trees take for one leaf."""

    @functools.wraps(init)
    def init_state(params: Params) -> State:
        refuse_orphans("the optimizer's init", tree.leaves(params))
        title = "no optimizer's state can be made for these parameters"
        refuse_holders(title, "params", params)
        return init(params)

    return init_state


def _binding(bind: Bind) -> Callable[[tree.Tree, tree.Tree], GradientTransformation]:
    """`GradientTransformation.with_specs` of an author's `bind`; what it makes has its specs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(bind).parameters.values()
    places = [p for p in parameters if p.kind in kinds]
    both = any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        len(places) > 1 and (places[1].name == "copies" or places[1].default is places[1].empty)
    )

    def with_specs(specs: tree.Tree, copies: tree.Tree) -> GradientTransformation:
        found = bind(specs, copies) if both else bind(specs)
        if not isinstance(found, GradientTransformation):
            got, wanted = type(found).__name__, "a transformation"
            refuse("cannot bind this", "bind", got, wanted, "return optim.transformation(...)")
        return found._replace(with_specs=None, whole=True)

    return with_specs


def with_step(plain: GradientTransformation, step_: Callable) -> GradientTransformation:
    """`plain` with another `step_`, in place of which `purely` its pure meaning is computed."""

    def step(grads, state, params, **norm):
        if not purely():
            params, new = step_(grads, state, params, **norm)
            return params, _with_dtypes(new, state)
        updates, state = plain.update(grads, state, params, **norm)
        return apply_updates(params, updates), state

    return plain._replace(step_=step)


def with_one_pass(plain: GradientTransformation, one_pass: OnePass) -> GradientTransformation:
    """`plain`, whose `step_` is one pass where that can be, in a traced program too."""

    def step_(grads, state, params):
        together = one_pass(grads, state, params, Fusion())
        if together is None:
            return plain.step_(grads, state, params)
        params, new, _ = together()
        return params, _with_dtypes(new, state)

    return plain._replace(step_=step_, one_pass=one_pass)


def _with_dtypes(new: State, state: State) -> State:
    """`new` in the dtypes of `state`, whose leaves `new` may have for its own."""
    before, after = tree.leaves(state), tree.leaves(new)
    kept = [
        a.to(b.dtype) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a
        for a, b in zip(after, before, strict=True)
    ]
    return tree.unflatten(tree.structure(new), kept)


@public
def stateless(
    fn: Callable[[Updates, Params | None], Updates],
    fn_: Callable[[Updates, Params | None], Updates] | None = None,
    *,
    elementwise: bool = False,
) -> GradientTransformation:
    """The transformation whose updates are ``fn(updates, params)`` and whose state is ``()``.

    Args:
        fn: pure.
        fn_: the same function, free to overwrite `updates`.
        elementwise: see `GradientTransformation`.
    """
    return transformation(
        init=lambda params: (),
        update=lambda updates, state, params=None: (fn(updates, params), ()),
        specs=lambda param_specs: (),
        update_=None
        if fn_ is None
        else lambda updates, state, params=None: (fn_(updates, params), ()),
        elementwise=elementwise,
    )._replace(name=_named(fn))


@public
def identity() -> GradientTransformation:
    """The transformation that changes nothing: plain gradient *ascent* when applied."""
    return stateless(lambda updates, params: updates, elementwise=True)


@public
def scale(step_size: float) -> GradientTransformation:
    """Updates times `step_size`; Optax's `scale`."""
    return stateless(
        lambda updates, params: multiply(updates, step_size),
        lambda updates, params: multiply_(updates, step_size),
        elementwise=True,
    )


@public
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """The transformations one after another; the state is the tuple of their states.

    `step_` runs `update_` of all but the last, which overwrites the donated gradients where it can,
    then `step_` of the last: ``chain(clip_by_global_norm(1.0), adamw(1e-3))`` clips in place, then
    runs AdamW fused; or, where AdamW has a kernel, clips in its pass.

    Gradients are wanted as the transformations together want them; before one under `zero` stand
    only some without state, which see, and are bound to, the shards that it wants.

    Raises:
        ValueError: (when called) the state is not the tuple of this chain's length; one of them
            scales the loss; or one before `zero` can take no shards (`transformation` says how).
    """
    refuse_scaled("chain", "transformations", transformations)
    last = max((i for i, t in enumerate(transformations) if t.divides), default=0)
    refuse_shards("chain", "transformations before zero", transformations[:last])

    def check(state, wanted):
        if not isinstance(state, tuple) or len(state) != len(wanted):
            got = f"{len(state)} entries" if isinstance(state, tuple) else type(state).__name__
            raise ValueError(
                f"chain of {len(wanted)} transformations: got a state of {got}; wanted the tuple "
                "that its init returns; fix: initialise the state with this same optimizer"
            )

    def run(methods, updates, state, params, **norm):
        check(state, methods)
        new_state = []
        for method, part in zip(methods, state, strict=True):
            updates, part = method(updates, part, params, **norm)
            new_state.append(part)
            norm = {}  # that of what the first one sees
        return updates, tuple(new_state)

    def update(updates, state, params=None, **norm):
        return run([t.update for t in transformations], updates, state, params, **norm)

    def update_(updates, state, params=None, **norm):
        return run([t.update_ for t in transformations], updates, state, params, **norm)

    def last_step_(updates, state, params, **norm):
        return transformations[-1].step_(updates, state, params, **norm)

    factor = transformations[-2].factor if len(transformations) > 1 else None
    one_pass = transformations[-1].one_pass if transformations else None

    def step_(grads, state, params, **norm):
        if factor is not None and one_pass is not None:
            check(state, transformations)
            before = [t.update_ for t in transformations[:-2]]
            updates, kept = run(before, grads, state[:-2], params, **norm)
            by = factor(updates, **({} if before else norm))
            together = one_pass(updates, state[-1], params, Fusion(by))
            if together is None:
                params, last = last_step_(multiplied(updates, by), state[-1], params)
            else:
                params, last, _ = together()
            return params, (*kept, state[-2], last)
        methods = [*(t.update_ for t in transformations[:-1]), last_step_]
        return run(methods, grads, state, params, **norm)

    def typed_step_(grads, state, params, **norm):
        params, new = step_(grads, state, params, **norm)
        return params, _with_dtypes(new, state)

    def grad_specs(param_specs):
        for t in reversed(transformations):
            param_specs = t.grad_specs(param_specs)
        return param_specs

    def with_specs(param_specs, copies):
        bound = []
        for t in reversed(transformations):
            bound.append(t.bind(param_specs, copies))
            param_specs = bound[-1].grad_specs(param_specs)
        return chain(*reversed(bound))

    unbound = any(t.with_specs is not None for t in transformations)
    plain = transformation(
        init=lambda params: tuple(t.init(params) for t in transformations),
        update=update,
        specs=lambda param_specs: tuple(t.specs(param_specs) for t in transformations),
        update_=update_,
        grad_specs=grad_specs,
        elementwise=all(t.elementwise for t in transformations),
    )
    return plain._replace(
        step_=typed_step_ if transformations else plain.step_,  # what it calls is pure if traced
        norm=transformations[0].norm if transformations else None,
        with_specs=with_specs if unbound else None,
        whole=all(t.takes_shards for t in transformations),
        divides=any(t.divides for t in transformations),
        inside=lambda param_specs: [(t, param_specs) for t in transformations],
    )


def applying(run: Callable) -> Callable[[Any], Callable]:
    """``run(method, updates, state, params, **norm)`` as a function of a method to its wrapper.

    So that what surrounds `update` of an inner transformation also surrounds its `update_`.
    """

    def around(method: Any) -> Callable:
        def wrapper(updates, state, params=None, **norm):
            return run(method, updates, state, params, **norm)

        return wrapper

    return around


def norm_of_part(norm: Norm | None, part: Callable[[Updates], Updates]) -> Norm | None:
    """The norm of a transformation that is given a part of the updates, ``part(updates)``."""
    if norm is None:
        return None
    return Norm(lambda updates: norm.of(part(updates)), lambda updates: norm.value(part(updates)))


@public
def apply_updates(params: Params, updates: Updates) -> Params:
    """``params + updates``, leaf by leaf, in the dtypes of `params`. Pure."""
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def apply_updates_(params: Params, updates: Updates) -> Params:
    """``params += updates`` in place, multi-tensor; returns `params`.

    Under transforms of torch.func, whose tensors nobody gave up, it is `apply_updates`. A program
    that is traced has it as one operation, on parameters that it made or that are donated to it.

    Raises:
        ValueError: the structures differ, or an update varies over a mesh axis over which its
            parameter is replicated (see `functron.ops.foreach`).
    """
    rows = tree.same_structure(params, updates, names=("params", "updates"))
    if transformed():
        return apply_updates(params, updates)
    foreach_(
        torch._foreach_add_,
        {"params": tree.leaves(params)},
        {"updates": rows},
        paths=lambda: tree.paths(params),
    )
    return params


def multiply(updates: Updates, factor: float | torch.Tensor) -> Updates:
    """``factor * updates`` in the dtypes of `updates`. Pure; `factor` is a number or 0-dim."""
    return tree.map(lambda u: (u * factor).to(u.dtype), updates)


def multiply_(updates: Updates, factor: float | torch.Tensor) -> Updates:
    """`multiply` in place, multi-tensor, where one number is for all; returns the result."""
    if isinstance(factor, torch.Tensor) and compat.is_wrapped(factor):
        return multiply(updates, factor)

    def each_(group):
        local = factor.to(group[0].device) if isinstance(factor, torch.Tensor) else factor
        torch._foreach_mul_(group, local)

    foreach_(each_, {"updates": tree.leaves(updates)}, paths=lambda: tree.paths(updates))
    return updates


def multiplied(updates: Updates, factor: torch.Tensor) -> Updates:
    """`multiply` of updates that are given up: in place, unless `purely`."""
    return (multiply if purely() else multiply_)(updates, factor)


def purely() -> bool:
    """Whether nothing may be overwritten: in a program that is traced, and under transforms.

    Those of torch.func around a step (vmap over states, grad through it): the tensors are the
    caller's, who gave up none, and a derivative of what is overwritten would be lost.
    """
    return active() is not None or transformed()
