"""Gradient transformations, after Optax: pure functions, and what sharding and memory need.

`transformation` makes a `GradientTransformation` of the functions that its author cares about,
`chain` one of several. A training step calls `step_`; the pure pair `init` and `update` is for
everything else, such as differentiating through an optimizer, and defines what `step_` computes.

Where a result depends on all shards of a leaf (a norm, a mean of rows, a whole matrix), the
transformation must know the parameters' specs: ``optimizer.bind(specs)`` passes them to it and to
all that it is made of. `functron.init_state` and `functron.make_step` call it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, NamedTuple, ParamSpec, cast

import torch

from functron.core import compat, tree
from functron.core.closure import refuse_holders, refuse_orphans
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.ops.foreach import foreach_
from functron.program.recorder import active
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.simulate import runs_transform
from functron.spmd.spec import P, is_spec, spec_axes

Updates = tree.Tree
State = tree.Tree
Params = tree.Tree


class Norm(NamedTuple):
    """A precomputed norm, passed to transformations that clip as the extra argument ``norm=``.

    Attributes:
        value: the 2-norm, 0-dim.
        of: the updates that have this norm, these very tensors; None for leaves that do not count.
        versions: their version counters when the norm was computed; None: not known.
    """

    value: torch.Tensor
    of: tree.Tree
    versions: list[int] | None = None

    @classmethod
    def taken(cls, value: torch.Tensor, of: tree.Tree) -> Norm:
        """The norm of these updates as they are now; invalid once they are edited in place."""
        return cls(value, of, _versions(tree.leaves(of)))

    def known_of(self, updates: Updates) -> torch.Tensor | None:
        """The norm, if it is that of exactly these tensors, unedited; else None."""
        leaves = tree.leaves(updates)
        same = list(map(id, tree.leaves(self.of))) == list(map(id, leaves))
        edited = same and self.versions is not None and self.versions != _versions(leaves)
        return self.value if same and not edited else None


def _versions(leaves: Sequence[torch.Tensor]) -> list[int] | None:
    try:
        return [compat.plain(leaf)._version for leaf in leaves]
    except RuntimeError:  # of inference tensors, which count no edits
        return None


def name_norm(extra: dict[str, Any], updates: Updates) -> dict[str, Any]:
    """The extra arguments for transformations that see a part of `updates`: the norm names its
    updates.
    """
    norm = extra.get("norm")
    if norm is None or isinstance(norm, Norm):
        return extra
    return {**extra, "norm": Norm(norm, updates)}


class _Functions(NamedTuple):
    init: Callable[[Params], State]
    update: Callable[..., tuple[Updates, State]]
    step_: Callable[..., tuple[Params, State]]
    specs: Callable[[tree.Tree], tree.Tree]
    grad_specs: Callable[[tree.Tree], tree.Tree] = lambda param_specs: param_specs
    bind: Callable[..., GradientTransformation | None] | None = None
    elementwise: bool = False
    widens: bool = False


class GradientTransformation(_Functions):
    """Functions over trees of tensors; all work under torch.func.vmap, so in simulation.

    Extra arguments are Optax's: keyword arguments that every transformation takes, uses or passes
    on, such as ``value=`` the loss. Two are defined here: ``norm=``, a `Norm` (or a tensor: the
    norm of all updates), which only the first of a chain is given; and ``donated=``.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(updates, state, params=None, **extra) -> (updates, state)``. Pure; with
            ``donated=True`` it may overwrite `updates` and `state`, and returns updates that share
            no memory with its state or with `params`.
        step_: ``step_(grads, state, params, **extra) -> (params, state)``: `update` followed by
            `apply_updates`, for a caller who gives up all three: it overwrites `params`, and may
            overwrite `state` and `grads`. Use what it returns.
        specs: ``specs(param_specs) -> state_specs``: the sharding of the state, from that of the
            parameters (a tree or prefix tree of `P`). Counters are ``P()``.
        grad_specs: ``grad_specs(param_specs) -> specs``: the sharding of the reduced gradients that
            `update` and `step_` take (`functron.sync_gradients`). That of the parameters, except
            under `zero`.
        bind: ``bind(specs, copies=1)``: the same transformation for parameters with these specs. As
            a field: a function that returns it, or None where all specs give the same
            (`keep_specs`). Without one, a transformation that is not `elementwise` is refused where
            leaves are sharded.
        elementwise: whether each element of the update and of the state depends only on the same
            element of parameter, gradient and state, besides counters and the leaf's path. Then
            shards of leaves give shards of the results. False: it does not, or it is not known.
        widens: whether gradients in low precision have the effect of their float32 copies, which a
            caller then need not make.
    """

    __slots__ = ()

    def bind(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, specs: tree.Tree, copies: tree.Tree = 1
    ) -> GradientTransformation:
        """The same transformation, for parameters that are sharded like this.

        Specs that a transformation was given explicitly are kept; binding twice changes nothing.

        Args:
            specs: the parameters' specs, a tree or prefix tree of `P`.
            copies: number of pipeline ranks that hold each parameter, as
                `pipeline.Partition.copies` gives it; for norms.
        """
        make = cast("Callable[..., GradientTransformation | None] | None", self[_BIND])
        if make is None and not self.elementwise and (answers := find_answers(specs)) is not None:
            answers.unfit.append((self, specs))
        found = None if make is None else make(specs, copies)
        return self if found is None else found

    def __repr__(self) -> str:
        return "\n".join(_describe(self))


_BIND = GradientTransformation._fields.index("bind")


def keep_specs(specs: tree.Tree, copies: tree.Tree = 1) -> None:
    """The `bind` of transformations that need no specs, or have them already."""


@dataclass
class Answers:
    """The answers of a transformation, and of all that it is made of, to `ask`.

    Attributes:
        unfit: transformations that would take a shard for a whole leaf, each with the specs that it
            is given (None for leaves that it is not given).
        scales: number of transformations that scale the loss.
        divides: whether one divides leaves among ranks, as `zero` does.
    """

    unfit: list[tuple[GradientTransformation, tree.Tree]] = field(default_factory=list)
    scales: int = 0
    divides: bool = False


class Question(P):
    """A spec that carries a question: transformations that are bound to it answer, and pass it on.

    So wrappers have nothing to implement but `bind`.
    """

    answers: Answers


def ask(optimizer: GradientTransformation, specs: tree.Tree = P()) -> Answers:  # noqa: B008
    """Asks a transformation what it is made of, for parameters with these specs."""
    answers = Answers()
    optimizer.bind(_pose_question(specs, answers))
    return answers


def _pose_question(specs: tree.Tree, answers: Answers) -> tree.Tree:
    def question(spec: P | None) -> P | None:
        if not isinstance(spec, P):
            return spec
        made = Question(*spec)
        made.answers = answers
        return made

    return question(specs) if is_spec(specs) else tree.map(question, specs, is_leaf=is_spec)


def find_answers(specs: tree.Tree) -> Answers | None:
    """Where to answer, if these are specs that ask."""
    leaves = (specs,) if is_spec(specs) else tree.leaves(specs, is_spec)
    return next((leaf.answers for leaf in leaves if isinstance(leaf, Question)), None)


Make = ParamSpec("Make")


def bindable(
    make: Callable[Make, GradientTransformation],
) -> Callable[Make, GradientTransformation]:
    """`make`, whose results are made again by `bind`, with the specs that they were not given.

    These are its argument `specs`, and `copies` if it has that. A transformation passed as `inner`
    is bound too, and must not scale the loss.
    """
    signature = inspect.signature(make)
    names, again = signature.parameters, cast(Callable[..., GradientTransformation], make)

    def with_bind(given: dict[str, Any]) -> GradientTransformation:
        missing = "specs" in names and given.get("specs") is None

        def bind(specs: tree.Tree, copies: tree.Tree) -> GradientTransformation | None:
            found = dict(given)
            if missing:
                found["specs"] = specs
                if "copies" in names:
                    found.setdefault("copies", copies)
            if "inner" in given:
                found["inner"] = given["inner"].bind(specs, copies)
            same = not missing and found.get("inner") is given.get("inner")
            return None if same else with_bind(found)

        return again(**given)._replace(bind=bind)

    @functools.wraps(make)
    def made(*args: Make.args, **kwargs: Make.kwargs) -> GradientTransformation:
        given = signature.bind(*args, **kwargs).arguments
        built = with_bind(given)
        if "inner" in given:
            refuse_scaled(make.__name__, "inner", ask(given["inner"]))
        return built

    return made


def refuse_scaled(title: str, path: str, *inside: Answers) -> None:
    """Raise ValueError for transformations whose loss is scaled inside of one that is not so."""
    if any(answers.scales for answers in inside):
        wanted = "no scale of the loss inside, where steps that overflow are left out in part"
        refuse(title, path, "with_loss_scale(...)", wanted, "put with_loss_scale around it all")


_DECLARE = (
    "say optim.transformation(..., elementwise=True) where each element's update depends on that "
    "element alone, or give it bind=: a function of the specs to the transformation for these"
)


def refuse_shards(title: str, path: str, *inside: Answers) -> None:
    """Raise ValueError for transformations that would take parts of leaves for whole ones."""
    names = [_name_maker(each) for answers in inside for each, _ in answers.unfit]
    if names:
        refuse(
            title,
            path,
            f"{', '.join(names)}, a transformation that is not elementwise, and that cannot be "
            "told how leaves are sharded: of its part of a leaf every rank would compute another "
            "number",
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
    """Raise ValueError for transformations that would take a rank's shards for whole parameters.

    Args:
        title: of the message.
        optimizer: bound to the specs, or not.
        specs: the parameters' specs.
        mesh: the ranks.
        pipeline: the axis whose ranks hold different layers.
    """
    problems = []
    for each, own in ask(optimizer, specs).unfit:
        found = _first_split(own, mesh) or _first_split(each.grad_specs(own), mesh)
        if found is None and pipeline is not None and mesh[pipeline] > 1:
            found = "parameters", pipeline
        if found is not None:
            path, axis = found
            got = f"a transformation that is not elementwise and has no bind, and {path} split "
            got += f"over {mesh[axis]} ranks of {axis!r}, of each of which it would give others"
            wanted = "one whose results for parts of parameters are parts of its results"
            problems.append(Problem(_name_maker(each), got, wanted, _DECLARE))
    raise_problems(title, problems)


def _first_split(specs: tree.Tree, mesh: Mesh | BoundMesh) -> tuple[str, str] | None:
    """The first parameter that ranks have parts of, and the axis."""
    for path, spec in tree.items(specs, is_spec):
        axis = next((name for name in spec_axes(spec or P()) if mesh[name] > 1), None)
        if axis is not None:
            return path or "parameters", axis
    return None


def _name_maker(optimizer: GradientTransformation) -> str:
    """The function that made a transformation, and its place: ``clip_rows (file.py:12)``."""
    fn = inspect.unwrap(optimizer.update)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", type(fn).__name__).split(".<locals>")[0]
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _describe(optimizer: GradientTransformation) -> list[str]:
    """The call that made a transformation, as far as its `update` tells, in lines.

    Arguments are those that the function closes over: numbers that differ from their defaults, and
    the transformations that it is made of.
    """
    name, found = _find_call(optimizer.update)
    parts: dict[int, tuple[str, GradientTransformation]] = {}
    for value in found.values():
        labelled = isinstance(value, Mapping)
        whole = isinstance(value, GradientTransformation) or not isinstance(value, tuple | list)
        for key, each in value.items() if labelled else enumerate([value] if whole else value):
            if isinstance(each, GradientTransformation) and (labelled or id(each) not in parts):
                parts[id(each)] = f"{key}: " if labelled else "", each
    if not parts:
        return [_call_text(name, found)]
    call = _call_text(name, found).removesuffix(")")
    lines = [call if call.endswith("(") else f"{call},"]
    for label, part in parts.values():
        first, *rest = _describe(part)
        lines += [f"    {label}{first}", *(f"    {line}" for line in rest)]
        lines[-1] += ","
    return [*lines, ")"]


def _find_call(fn: Any) -> tuple[str, dict[str, Any]]:
    """The name of the function that made this one, and the values that it closes over by name."""
    fn = inspect.unwrap(fn)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(fn, "__qualname__", type(fn).__name__).partition(".<locals>")[0]
    if isinstance(owner := getattr(fn, "__self__", None), tuple):  # a method of a named tuple
        return type(owner).__name__.lstrip("_"), {**cast(Any, owner)._asdict(), "": type(owner)}
    names, found = getattr(getattr(fn, "__code__", None), "co_freevars", ()), {}
    for key, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        value = found[key] = _contents(cell)
        if key in _AUTHORS and callable(value):
            other, more = _find_call(value)
            found, name = more | found, other if name.startswith("_") or key == "fn" else name
    return name.lstrip("_"), found | {"": getattr(fn, "__globals__", {}).get(name.lstrip("_"))}


def _call_text(name: str, found: dict[str, Any]) -> str:
    """``scale_by_adam(b2=0.95)``, of what `_find_call` found."""
    maker, shown = found.get(""), []
    known = inspect.signature(maker).parameters if isinstance(maker, FunctionType | type) else {}
    for key, value in found.items():
        if callable(value) and key in ("learning_rate", "schedule", "step_size"):
            numbers = (x for x in _find_call(value)[1].items() if isinstance(x[1], int | float))
            shown.append(f"schedule({', '.join(f'{name}={number}' for name, number in numbers)})")
        elif isinstance(value, int | float | str | torch.dtype) and key in known:
            shown += [f"{key}={value}"] if value != known[key].default else []
    return f"{name}({', '.join(shown)})"


_AUTHORS = ("fn", "judge", "labels_of", "run", "split")
"""Names of functions that a maker is given, which close over what its caller was given."""


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


Bind = Callable[..., GradientTransformation]


@public
def transformation(
    init: Callable[[Params], State],
    update: Callable[..., tuple[Updates, State]],
    specs: Callable[[tree.Tree], tree.Tree],
    *,
    step_: Callable[..., tuple[Params, State]] | None = None,
    grad_specs: Callable[[tree.Tree], tree.Tree] | None = None,
    elementwise: bool = False,
    bind: Bind | None = None,
) -> GradientTransformation:
    """A transformation from the functions that its author cares about; the rest follow.

    The returned state has the dtypes of the given state, those of `init`, whatever dtype an update
    computes in: checkpoints, donated memory and compiled steps rely on that.

    `update` and `step_` are passed the extra arguments that they name, all if they have
    ``**extra``: ``def update(updates, state, params=None, *, value)`` needs the loss. One that
    names `donated` learns that it may overwrite `updates` and `state`, which saves memory in large
    updates.

    `step_` defaults to `update` followed by `apply_updates_`, and `grad_specs` to the parameters'
    specs. Pass ``elementwise=True`` where it holds (see `GradientTransformation`), else `bind`:
    ``bind(specs)``, or ``bind(specs, copies)``, returns the same transformation for parameters with
    these specs, which sums over the axes that split a leaf:

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

    `make_step` calls `bind`, and `zero` with the specs of the shards. Where leaves are sharded they
    refuse transformations that have neither.
    """
    call = _filter_extra(update)

    @functools.wraps(update)
    def update_typed(updates, state, params=None, *, donated=False, **extra):
        # a traced program is pure: what takes whose memory is for its compiler to decide
        donated = donated and not purely()
        updates, new = call(updates, state, params, donated=donated, **extra)
        new = keep_dtypes(new, state)
        if donated:
            kept = {id(leaf) for leaf in tree.leaves(new)}
            updates = tree.map(lambda u: u.clone() if id(u) in kept else u, updates)
        return updates, new

    def update_and_apply(grads, state, params, **extra):
        updates, state = update_typed(grads, state, params, donated=True, **extra)
        return apply_updates_(params, updates), state

    plain = GradientTransformation(
        _of_tensors(init),
        update_typed,
        update_and_apply,
        specs,
        bind=None if bind is None else _wrap_bind(bind),
        elementwise=elementwise,
    )
    if grad_specs is not None:
        plain = plain._replace(grad_specs=grad_specs)
    return with_step(plain, step_ or update_and_apply)


def _filter_extra(fn: Callable) -> Callable:
    """`fn`, given only those of its keyword arguments that it names, or all if it takes any."""
    parameters = list(inspect.signature(fn, follow_wrapped=False).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return fn
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    named += [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][3:]
    return lambda *args, **extra: fn(*args, **{k: v for k, v in extra.items() if k in named})


def map_to_trees(count: int, fn: Callable, like: tree.Tree, *columns: Iterable) -> list[tree.Tree]:
    """`count` trees: of the tuples that `fn` gives, as `tree.map_columns` calls it."""
    leaves, structure = tree.flatten(like)
    rows = [fn(*row) for row in zip(leaves, *columns, strict=True)]
    return [tree.unflatten(structure, [row[i] for row in rows]) for i in range(count)]


def _of_tensors(init: Callable[[Params], State]) -> Callable[[Params], State]:
    """`init`, which refuses objects with tensors that trees take for one leaf."""

    @functools.wraps(init)
    def init_state(params: Params) -> State:
        refuse_orphans("the optimizer's init", tree.leaves(params))
        title = "no optimizer's state can be made for these parameters"
        refuse_holders(title, "params", params)
        return init(params)

    return init_state


def _wrap_bind(bind: Bind) -> Callable[[tree.Tree, tree.Tree], GradientTransformation | None]:
    """`GradientTransformation.bind` of an author's `bind`; what it makes has its specs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(bind).parameters.values()
    places = [p for p in parameters if p.kind in kinds]
    both = any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        len(places) > 1 and (places[1].name == "copies" or places[1].default is places[1].empty)
    )

    def with_specs(specs: tree.Tree, copies: tree.Tree) -> GradientTransformation | None:
        if specs == P() and isinstance(specs, Question):  # of no parameters
            return None
        found = bind(specs, copies) if both else bind(specs)
        if not isinstance(found, GradientTransformation):
            got, wanted = type(found).__name__, "a transformation"
            refuse("cannot bind this", "bind", got, wanted, "return optim.transformation(...)")
        return found._replace(bind=functools.partial(_pass_question, found))

    return with_specs


def _pass_question(found: GradientTransformation, specs: tree.Tree, copies: tree.Tree) -> None:
    """The `bind` of what an author's `bind` has made: it has its specs, and answers who asks."""
    if find_answers(specs) is not None and found[_BIND] is not None:
        found.bind(specs, copies)


def with_step(plain: GradientTransformation, step_: Callable) -> GradientTransformation:
    """`plain` with another `step_`, in place of which `purely` its pure meaning is computed."""
    call = _filter_extra(step_)

    def step(grads, state, params, **extra):
        if not purely():
            params, new = call(grads, state, params, **extra)
            return params, keep_dtypes(new, state)
        updates, state = plain.update(grads, state, params, **extra)
        return apply_updates(params, updates), state

    return plain._replace(step_=step)


def keep_dtypes(new: State, state: State) -> State:
    """`new` in the dtypes of `state`; leaves of `new` may be those of `state`.

    Raises:
        ValueError: a floating-point leaf in place of an integer one, or another number of leaves.
    """
    before, after = tree.leaves(state), tree.leaves(new)
    if len(before) != len(after):
        got, wanted = f"{len(after)} leaves", f"the {len(before)} that init made"
        refuse("an optimizer's state changed", "state", got, wanted, "return the same structure")
    kept = [
        _keep_dtype(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a
        for a, b in zip(after, before, strict=True)
    ]
    return tree.unflatten(tree.structure(new), kept)


def _keep_dtype(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    if new.dtype == old.dtype:
        return new
    if new.is_floating_point() and not old.is_floating_point():
        got, wanted = f"{new.dtype} in place of {old.dtype}", "the dtype that init gave it"
        fix = "make it a floating-point tensor in init"
        refuse("an optimizer's state changed", "state", got, wanted, fix)
    return new.to(old.dtype)


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

    @functools.wraps(fn)
    def update(updates, state, params=None, *, donated=False):
        return (fn_ if donated and fn_ is not None else fn)(updates, params), ()

    return transformation(
        lambda params: (), update, lambda param_specs: (), elementwise=elementwise
    )


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

    `step_` runs `update` with ``donated=True`` of all but the last, then `step_` of the last:
    ``chain(clip_by_global_norm(1.0), adamw(1e-3))`` scales gradients in place, then runs AdamW
    fused. So a chain costs no memory, and no pass over it, beyond its parts.

    All are passed the extra arguments, but ``norm=``, that of the gradients, goes to the first
    alone, as later ones see other updates.

    Before one under `zero` there may only be transformations without state, which are bound to, and
    see, the shards that it wants.

    Raises:
        ValueError: (when called) the state is not the tuple of this chain's length; one of them
            scales the loss; or one before `zero` cannot take shards (see `transformation`).
    """
    inside = [ask(t) for t in transformations]
    refuse_scaled("chain", "transformations", *inside)
    last = max((i for i, answers in enumerate(inside) if answers.divides), default=0)
    refuse_shards("chain", "transformations before zero", *inside[:last])
    return _chain(transformations)


def _chain(transformations: Sequence[GradientTransformation]) -> GradientTransformation:
    def run(methods, updates, state, params, **extra):
        if not isinstance(state, tuple) or len(state) != len(methods):
            got = f"{len(state)} entries" if isinstance(state, tuple) else type(state).__name__
            raise ValueError(
                f"chain of {len(methods)} transformations: got a state of {got}; wanted the tuple "
                "that its init returns; fix: initialise the state with this same optimizer"
            )
        after = []
        for method, part in zip(methods, state, strict=True):
            updates, part = method(updates, part, params, **extra)
            after.append(part)
            extra.pop("norm", None)
        return updates, tuple(after)

    def update(updates, state, params=None, **extra):
        return run([t.update for t in transformations], updates, state, params, **extra)

    def step_(grads, state, params, **extra):
        first = [functools.partial(t.update, donated=True) for t in transformations[:-1]]
        methods = [*first, transformations[-1].step_]
        params, new = run(methods, grads, state, params, **extra)
        return params, keep_dtypes(new, state)

    def grad_specs(param_specs):
        for t in reversed(transformations):
            param_specs = t.grad_specs(param_specs)
        return param_specs

    def bind(param_specs, copies):
        bound, answers = [], find_answers(param_specs)
        for t in reversed(transformations):
            bound.insert(0, t.bind(param_specs, copies))
            param_specs = bound[0].grad_specs(param_specs)
            param_specs = param_specs if answers is None else _pose_question(param_specs, answers)
        same = all(map(operator.is_, bound, transformations))
        return None if same else _chain(bound)

    plain = transformation(
        init=lambda params: tuple(t.init(params) for t in transformations),
        update=update,
        specs=lambda param_specs: tuple(t.specs(param_specs) for t in transformations),
        grad_specs=grad_specs,
        elementwise=all(t.elementwise for t in transformations),
    )._replace(bind=bind)
    # what it calls is pure if it is traced
    return plain._replace(step_=step_) if transformations else plain


@public
def apply_updates(params: Params, updates: Updates) -> Params:
    """``params + updates``, leaf by leaf, in the dtypes of `params`. Pure."""
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def apply_updates_(params: Params, updates: Updates) -> Params:
    """``params += updates`` in place, multi-tensor; returns `params`.

    Under transforms of torch.func, where nothing may be overwritten, it is `apply_updates`. In a
    traced program it is one operation, on parameters that were made there or donated.

    Raises:
        ValueError: the structures differ, or an update varies over a mesh axis over which its
            parameter is replicated (see `functron.ops.foreach`).
    """
    rows = tree.same_structure(params, updates, names=("params", "updates"))
    if runs_transform():
        return apply_updates(params, updates)
    foreach_(
        torch._foreach_add_,
        {"params": tree.leaves(params)},
        {"updates": rows},
        paths=lambda: tree.paths(params),
    )
    return params


def need_params(what: str, params: Params | None, use: str) -> None:
    """Raise ValueError where `update` of this transformation was given no parameters.

    Args:
        what: its name.
        params: what it was given.
        use: what they are wanted for.
    """
    if params is None:
        raise ValueError(
            f"{what}: got params=None; wanted the parameters {use}; fix: call "
            "update(grads, state, params)"
        )


def share_problems(shares: Mapping[str, float]) -> list[Problem]:
    """The numbers by name that are no shares, as decays of means are."""
    wanted = "at least 0 and less than 1"
    return [Problem(name, repr(x), wanted) for name, x in shares.items() if not 0 <= x < 1]


def least_problems(rows: Iterable[tuple[str, float, float]]) -> list[Problem]:
    """The numbers that are too small, of names, numbers and the least that these may be."""
    return [Problem(name, repr(x), f"at least {low}") for name, x, low in rows if not x >= low]


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
    """Whether nothing may be overwritten: in a traced program, and under torch.func transforms.

    There (vmap over states, grad through a step) the tensors are still the caller's, and
    derivatives of what is overwritten would be lost.
    """
    return active() is not None or runs_transform()
