"""Gradient functions: the gradients of a mean loss on every rank, and what is wrapped around them.

A step is made of one: `mean_gradients` of a loss, or `functron.pipeline.gradients` of a pipeline's
stages. All else is a wrapper around it, which a step that does not want it never meets:

    g = mean_gradients(loss, num_targets)
    g = scattered(gathered_once(accumulated(g, 4)))      # refused: see `NESTINGS`
    g = gathered_once(scattered(accumulated(g, 4)))
    step = make_step(g, optimizer, mesh, specs)

A wrapper changes what is differentiated: it is a `View` of the parameters. `nesting_table` says
which wrapper may stand around which, and why not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch

from functron.core import tree
from functron.core.chart import table
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.program.recorder import active, readable
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.simulate import runs_transform
from functron.spmd.spec import cut_tree, join, without_axes
from functron.transforms.gradient import value_and_grad
from functron.transforms.parameter_gather import (
    Gather,
    attach_codes,
    detach_codes,
    scatter_gradients,
    stand_ins,
    without_codes,
)
from functron.transforms.scan import accumulate

Targets = Literal["read", "some", "none"]

Aside = Mapping[str, tree.Tree]
"""Trees that views have put aside, by the names of these: differentiation does not see them."""


@dataclass(frozen=True)
class View:
    """A way to see the parameters while a loss of them is differentiated.

    `split` comes once in a step, before its microbatches; `join` within what is differentiated, in
    every microbatch, and on a pipeline in every stage, for the parameters of that stage alone.

    Attributes:
        name: of the wrapper that adds it, and of what it puts aside.
        specs: ``(specs, into) -> specs``: those of what `split` gives, from those of what it is
            given and those that gradients are wanted with.
        split: ``(params, aside, specs, into) -> (params, aside)``: what is differentiated, and
            `aside` with more in it.
        join: ``(params, aside, specs, into)`` to a context manager of the parameters as the loss
            wants them.
    """

    name: str
    specs: Callable[[tree.Tree, tree.Tree], tree.Tree]
    split: Callable[[tree.Tree, Aside, tree.Tree, tree.Tree], tuple[tree.Tree, Aside]]
    join: Callable[[tree.Tree, Aside, tree.Tree, tree.Tree], AbstractContextManager[tree.Tree]]


@dataclass(frozen=True)
class BoundGradients:
    """A gradient function on a mesh, for parameters with known specs: what a step calls.

    Attributes:
        of: ``(params, batch, key, divisor) -> ((loss, found), grads)``: the sum of the losses over
            `divisor` (a number or 0-dim), the same on all ranks; ``{"aux": sums}`` where the loss
            says more, else {}; and this rank's shares of the gradients, for `sync_gradients`. A
            per-rank program.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        specs: with which the gradients arrive.
        total: ``(params, batch, key)`` to the sum of the losses, without gradients.
        targets: whether batches have any. "read": their number is read on the host in every step,
            which waits for a GPU; "some" and "none": the caller knows, and nothing waits.
        num_microbatches: parts that each rank's batch is dealt into.
        reduce_dtype: to sum gradients over ranks in; None: their own.
        checks_sum: whether a step sees, once, that the loss is a sum and no mean.
        copies: how many ranks of a pipeline hold each parameter.
        stages: the axis of a pipeline's ranks; None: there is no pipeline.
        compile: settings of the compiled programs that a pipeline on processes is made of; None:
            there are none.
    """

    of: Callable[..., tuple[tuple[Any, Mapping[str, Any]], tree.Tree]]
    num_targets: Callable[[tree.Tree], Any]
    specs: tree.Tree
    total: Callable[..., Any]
    targets: Targets = "read"
    num_microbatches: int = 1
    reduce_dtype: torch.dtype | None = None
    checks_sum: bool = True
    copies: tree.Tree = 1
    stages: str | None = None
    compile: Mapping[str, Any] | None = None

    def __call__(
        self,
        params: tree.Tree,
        batch: tree.Tree,
        key: Any,
        num_targets: Any,
        scale: torch.Tensor | None = None,
    ) -> tuple[dict[str, Any], tree.Tree]:
        """The mean loss of a batch, and this rank's shares of its gradients.

        Args:
            params: with the specs that this is bound to.
            batch: this rank's.
            key: of the step's random numbers.
            num_targets: how many targets the batch has, over all ranks.
            scale: that the loss is multiplied by, for gradients in float16; None: 1.

        Returns:
            ``({"loss": ...}, grads)``: the loss without its scale, with ``aux`` beside it where
            there is one, and gradients of the loss times its scale. Of a batch without targets both
            are 0, and ``targets`` is there, which is 0 too.
        """
        by = num_targets if self.targets == "some" else _at_least_one(num_targets)
        (loss, found), grads = self.of(params, batch, key, by if scale is None else by / scale)
        found = {"loss": loss if scale is None else loss / scale, **found}
        if self.lacks_targets(num_targets) is True:
            zero, grads = torch.zeros_like(found["loss"]), tree.map(torch.zeros_like, grads)
            found |= {"loss": zero, "targets": zero.to(torch.int64)}
        return found, grads

    def lacks_targets(self, num_targets: Any) -> bool | torch.Tensor:
        """Whether a batch has none: read on the host, which waits for a GPU, unless that is known.

        Under a transform of torch.func, where it cannot be read, a bool tensor; and in a program
        that is traced False, as such a program is for batches with targets.
        """
        if self.targets != "read" or num_targets is None:
            return self.targets == "none"
        if not isinstance(num_targets, torch.Tensor) or readable(num_targets):
            return bool(num_targets == 0)
        return num_targets == 0 if runs_transform() else False


def _at_least_one(count: Any) -> Any:
    """1 in place of 0; a traced program is for batches with targets, and has no operation more."""
    if not isinstance(count, torch.Tensor):
        return count or 1
    return torch.where(count == 0, 1, count) if active() is None else count


class Differentiated(Protocol):
    """The base of gradient functions: a loss, or a pipeline's stages."""

    def bind(
        self, views: Views, mesh: Mesh | BoundMesh, specs: tree.Tree, wanted: tree.Tree
    ) -> BoundGradients:
        """The gradients of parameters that are seen through `views`."""
        ...


@dataclass(frozen=True)
class GradientFunction:
    """A gradient function, before it knows a mesh; made by `mean_gradients` and its wrappers.

    Attributes:
        base: what is differentiated.
        names: of the wrappers, outermost first, and of the base.
        views: through which parameters are seen, outermost first.
        dtype: in which gradients of microbatches are added up; None: the parameters' own.
        reduce_dtype: as of `BoundGradients`.
    """

    base: Differentiated
    names: tuple[str, ...]
    views: tuple[View, ...] = ()
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def bind(
        self, mesh: Mesh | BoundMesh, specs: tree.Tree, wanted: tree.Tree | None = None
    ) -> BoundGradients:
        """The gradients on `mesh` of parameters with `specs`.

        Args:
            mesh: simulated, or bound to processes.
            specs: one per parameter that this process holds.
            wanted: the specs of the gradients that an optimizer wants, once they are summed
                (`optim.GradientTransformation.grad_specs`); None: those of the parameters.
        """
        return self.base.bind(Views(self.views), mesh, specs, specs if wanted is None else wanted)

    def __str__(self) -> str:
        return "(".join(self.names) + ")" * (len(self.names) - 1)


@dataclass(frozen=True)
class Views:
    """The views of a gradient function, outermost first, and what all of them do together."""

    views: tuple[View, ...] = ()

    def levels(
        self, specs: tree.Tree, into: Callable[[tree.Tree], tree.Tree]
    ) -> list[tuple[tree.Tree, tree.Tree]]:
        """The specs of what every view is given, and those that gradients are wanted with.

        One more than there are views: the last are of what is differentiated.
        """
        found = [(specs, into(specs))]
        for view in self.views:
            given = view.specs(*found[-1])
            found.append((given, into(given)))
        return found

    def split(self, params: tree.Tree, levels: Sequence[tuple]) -> tuple[tree.Tree, Aside]:
        """The parameters that are differentiated, and what views put aside."""
        aside: Aside = {}
        for view, (specs, into) in zip(self.views, levels, strict=False):
            params, aside = view.split(params, aside, specs, into)
        return params, aside

    @contextlib.contextmanager
    def joined(
        self, params: tree.Tree, aside: Aside, levels: Sequence[tuple]
    ) -> Iterator[tree.Tree]:
        """The parameters as the loss wants them, in a with block around what uses them."""
        with contextlib.ExitStack() as stack:
            for view, (specs, into) in reversed([*zip(self.views, levels, strict=False)]):
                params = stack.enter_context(view.join(params, aside, specs, into))
            yield params


@dataclass(frozen=True)
class _MeanLoss:
    """The base of `mean_gradients`."""

    loss: Callable
    num_targets: Callable
    has_aux: bool
    reduce_dtype: torch.dtype | None
    checks_sum: bool
    num_microbatches: int = 1
    dtype: torch.dtype | None = None

    def _losses(self, params: tree.Tree, batch: tree.Tree, key: Any) -> tuple[Any, tree.Tree]:
        """The sum of the losses, and what else the loss returns, None where it has no aux."""
        out = self.loss(params, batch, key)
        if isinstance(out, tuple) != self.has_aux or (self.has_aux and len(out) != 2):
            got = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
            wanted = "a pair (sum, aux), for has_aux=True" if self.has_aux else "the sum alone"
            fix = "leave has_aux out" if self.has_aux else "mean_gradients(..., has_aux=True)"
            raise TypeError(f"the loss returns {got}; wanted {wanted}; fix: {fix}")
        return out if self.has_aux else (out, None)

    def bind(
        self, views: Views, mesh: Mesh | BoundMesh, specs: tree.Tree, wanted: tree.Tree
    ) -> BoundGradients:
        levels, has_aux = views.levels(specs, lambda _: wanted), self.has_aux
        # the stand-ins of what is scattered have the dtype of the sums
        dtype = None if any(view.name == "scattered" for view in views.views) else self.dtype
        both = functools.partial(value_and_grad, has_aux=has_aux)

        def of(params, batch, key, divisor):
            chosen, aside = views.split(params, levels)

            def mean_loss(chosen, microbatch):
                with views.joined(chosen, aside, levels) as given:
                    value, found = self._losses(given, microbatch, key)
                    return (value / divisor, found) if has_aux else value / divisor

            shares = accumulate(both(mean_loss), self.num_microbatches, dtype=dtype)
            value, grads = shares(chosen, batch)
            return (value[0], {"aux": value[1]}) if has_aux else (value, {}), grads

        def total(params, batch, key):
            with views.joined(*views.split(params, levels), levels) as given:
                return self._losses(given, batch, key)[0]

        return BoundGradients(
            of,
            self.num_targets,
            levels[-1][0],
            total,
            num_microbatches=self.num_microbatches,
            reduce_dtype=self.reduce_dtype,
            checks_sum=self.checks_sum,
        )


@public
def mean_gradients(
    loss: Callable,
    num_targets: Callable,
    *,
    has_aux: bool = False,
    reduce_dtype: torch.dtype | None = None,
    checks_sum: bool = True,
) -> GradientFunction:
    """The gradients of a mean loss: of ``loss(params, batch, key) / num_targets(batch)``.

    A per-rank program that is given the divisor: the outermost caller, `functron.make_step`,
    counts the targets of the whole batch, so that microbatches and ranks with unequal numbers of
    them have their right weights.

    Args:
        loss: ``(params, batch, key)`` to the *sum* of the losses over the batch of all ranks.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        has_aux: `loss` returns ``(sum, aux)``, where aux is a tree of sums that are replicated; the
            sums over microbatches are then in a step's metrics, as ``aux``.
        reduce_dtype: sum gradients over ranks in this dtype; None: their own. See
            `sync_gradients`.
        checks_sum: after its first step `functron.make_step` sees that the loss is a sum and no
            mean, on one sample of each rank, and on the same sample twice; False: it does not.

    Collectives: those of the loss, forward and backward.
    """
    base = _MeanLoss(loss, num_targets, has_aux, reduce_dtype, checks_sum)
    return GradientFunction(base, ("mean_gradients",), reduce_dtype=reduce_dtype)


@public
def accumulated(
    g: GradientFunction, num_microbatches: int, *, dtype: torch.dtype | None = None
) -> GradientFunction:
    """`g`, added up over microbatches, to save activation memory; as `accumulate` does.

    With a batch split over its samples every rank holds a contiguous part of them, so microbatch m
    is samples m, m + num_microbatches, ... of the batch on every mesh.

    Args:
        g: of `mean_gradients`.
        num_microbatches: parts that each rank's batch is dealt into.
        dtype: add gradients up in this dtype, such as torch.float32 for bfloat16 parameters; None:
            the parameters' own.

    Raises:
        ValueError: `g` is something else: see `nesting_table`.
    """
    check_nesting("accumulated", g)
    assert isinstance(g.base, _MeanLoss)
    base = replace(g.base, num_microbatches=num_microbatches, dtype=dtype)
    return replace(g, base=base, names=("accumulated", *g.names), dtype=dtype)


@public
def gathered_once(g: GradientFunction) -> GradientFunction:
    """`g`, of parameters that are gathered once, before the microbatches.

    Those whose specs mention data axes are whole for the rest of a step, and the loss is given
    whole ones. Otherwise it gathers them where it uses them (`functron.fsdp`), in every microbatch.

    Collectives: one all-gather per leaf and data axis that splits it; its gradient is summed, and
    scattered, at the end (`sync_gradients`).
    """

    def split(params, aside, specs, into):
        if (codes := aside.get("encoded")) is None:
            return gather_parameters(params, specs, without_axes(specs, FSDP_AXES)), aside
        whole = Gather(specs)(attach_codes(params, codes))
        return without_codes(whole), {**aside, "encoded": detach_codes(whole)}

    def specs_of(specs, into):
        return without_axes(specs, FSDP_AXES)

    return _with_view(g, View("gathered_once", specs_of, split, _as_it_is))


@public
def frozen(g: GradientFunction, trainable: tree.Tree) -> GradientFunction:
    """`g` with respect to some parameters; the others cost no gradients and no reductions.

    With ``optim.only(optimizer, trainable)``, which is then the optimizer, they have no state.

    Args:
        g: the gradients of all.
        trainable: which parameters are differentiated, a tree or prefix tree of bools, of what
            this process holds.
    """

    def split(params, aside, specs, into):
        chosen, rest = tree.partition(params, trainable)
        return chosen, {**aside, "frozen": rest}

    def join_frozen(params, aside, specs, into):
        return contextlib.nullcontext(tree.join(params, aside["frozen"]))

    return _with_view(g, View("frozen", lambda specs, into: specs, split, join_frozen))


@public
def scattered(g: GradientFunction) -> GradientFunction:
    """`g`, with gradients scattered to the parts that each rank's optimizer updates: ZeRO stage 2.

    With `optim.zero`, or fully sharded parameters, every rank updates a part. Gradients are reduced
    to these parts in backward, layer by layer and microbatch by microbatch, and no rank keeps more.
    Otherwise they are reduced once, at the end. Parameters that a pipeline spreads over its ranks
    are reduced at the end in any case.

    Collectives: one reduce-scatter per use of a leaf and axis, in backward, in g's reduce_dtype.
    """
    kept = None if "pipeline.gradients" in g.names else g.dtype

    def split(params, aside, specs, into):
        return stand_ins(params, specs, into, dtype=kept), {**aside, "scattered": params}

    def join_parts(params, aside, specs, into):
        whole = aside["scattered"]
        return scatter_gradients(params, whole, specs, into, dtype=g.reduce_dtype)

    return _with_view(g, View("scattered", lambda specs, into: into, split, join_parts))


Encode = Callable[[tree.Tree, tree.Tree], tree.Tree]
"""``(params, specs) -> codes`` of parameters; see `functron.precision.encoder`."""


@public
def encoded(g: GradientFunction, encode: Encode) -> GradientFunction:
    """`g` of parameters with quantised codes, which are made once, before the microbatches.

    The loss is given parameters with these, and they are what is gathered.

    Args:
        g: the gradients of parameters with codes.
        encode: makes them of this rank's parameters; `functron.precision.encoder` returns it.
    """

    def split(params, aside, specs, into):
        with named_scope("encode"):
            return params, {**aside, "encoded": encode(params, specs)}

    def attach(params, aside, specs, into):
        return contextlib.nullcontext(attach_codes(params, aside["encoded"]))

    return _with_view(g, View("encoded", lambda specs, into: specs, split, attach))


@public
def with_view(g: GradientFunction, view: View) -> GradientFunction:
    """`g` with a `View` of your own of the parameters, around all that `g` is wrapped in.

    `scattered` and `encoded` stand inside of it.

    Raises:
        ValueError: the view has the name of one that `g` has.
    """
    if view.name in (*_ORDER, *_WHOLE, *g.names):
        got, fix = f"{view.name!r}, which another wrapper has", "give the view a name of its own"
        raise_problems(f"cannot wrap {g}", [Problem("view.name", got, "a new name", fix)])
    return _with_view(g, view)


@public
def wrap_gradients(g: GradientFunction, wrap: Callable[[Callable], Callable]) -> GradientFunction:
    """`g`, with ``wrap(of)`` in place of the function that it binds to (`BoundGradients.of`).

    For what is done to a rank's shares of the gradients before ranks sum them, such as noise of its
    own. It is around all views of `g`, wherever it is written.

    Args:
        g: any gradient function.
        wrap: the function ``(params, batch, key, divisor) -> ((loss, found), grads)`` to another.
    """
    return _with_change(g, "wrap_gradients", lambda bound: replace(bound, of=wrap(bound.of)))


@public
def with_targets(g: GradientFunction) -> GradientFunction:
    """`g`, for batches that are known to have targets: a step does not read how many on the host.

    Of a batch without any the loss is then NaN, or infinite.
    """
    return _with_change(g, "with_targets", lambda bound: replace(bound, targets="some"))


@public
def without_targets(g: GradientFunction) -> GradientFunction:
    """`g`, for batches that are known to have none, which a step leaves out."""

    def change(bound: BoundGradients) -> BoundGradients:
        return replace(bound, num_targets=lambda batch: 0, targets="none")

    return _with_change(g, "without_targets", change)


def gather_parameters(params: tree.Tree, specs: tree.Tree, into: tree.Tree) -> tree.Tree:
    """The parameters gathered over the axes that `specs` mention and `into` does not.

    Collectives: one all-gather per leaf and axis.
    """
    leaves, structure = tree.flatten(params)
    with named_scope("gather"):
        rows = zip(leaves, cut_tree(into, specs, params), strict=True)
        return tree.unflatten(structure, [join(leaf, cuts) for leaf, cuts in rows])


@dataclass(frozen=True)
class _Changed:
    """A base whose bound gradients are changed."""

    base: Differentiated
    change: Callable[[BoundGradients], BoundGradients]

    def bind(self, views: Views, mesh, specs: tree.Tree, wanted: tree.Tree) -> BoundGradients:
        return self.change(self.base.bind(views, mesh, specs, wanted))


def _with_change(
    g: GradientFunction, name: str, change: Callable[[BoundGradients], BoundGradients]
) -> GradientFunction:
    check_nesting(name, g)
    return replace(g, base=_Changed(g.base, change), names=(name, *g.names))


def _as_it_is(params, aside, specs, into) -> AbstractContextManager[tree.Tree]:
    return contextlib.nullcontext(params)


def _with_view(g: GradientFunction, view: View) -> GradientFunction:
    check_nesting(view.name, g)
    return replace(g, names=(view.name, *g.names), views=(view, *g.views))


_ORDER = ("encoded", "gathered_once", "frozen", "scattered", "accumulated")
"""The wrappers, in the order in which they stand around one another, outermost first."""

_WHOLE = ("wrap_gradients", "with_targets", "without_targets")
"""Those that change what is bound, in any order."""

_PLACED: Mapping[str, str] = MappingProxyType({
    "encoded": "codes are made of a rank's own parts, and are what is gathered: nothing that "
    "changes the parameters comes before",
    "gathered_once": "all parameters are gathered, frozen ones too, and codes with them; and what "
    "is scattered are the gradients of whole ones",
    "frozen": "frozen parameters are put aside before gradients are scattered, since they have "
    "none",
    "scattered": "what every microbatch adds up are a rank's parts of gradients",
})  # fmt: skip
"""Why a wrapper stands outside of those after it."""


def _refusal(outer: str, inner: str) -> str:
    """Why `outer` may not stand around `inner`; "" where it may."""
    if outer == inner:
        return "once is enough: put it around once"
    if outer == "accumulated" and inner == "pipeline.gradients":
        return "the schedule of a pipeline deals the batch into microbatches: give it their number"
    if outer == "accumulated" and inner in _WHOLE:
        return f"{inner} is about a whole batch: put it around accumulated"
    if {outer, inner} == {"wrap_gradients", "scattered"}:
        return (
            "scattered gradients are sums over ranks already, of which no rank has shares: leave "
            "scattered out, or change gradients by the optimizer"
        )
    if {outer, inner} == {"with_targets", "without_targets"}:
        return "batches have targets or none: make a step for each"
    if outer not in _ORDER or inner not in _ORDER or _ORDER.index(outer) < _ORDER.index(inner):
        return ""
    return f"{_PLACED[inner]}: put {inner} around {outer}"


def _refuse_view(outer: str, inner: str, g: GradientFunction) -> str:
    """Why `outer` may not stand around a view of the user's; "" where it may."""
    own = inner in {view.name for view in g.views} and inner not in _ORDER
    if own and outer in ("scattered", "encoded"):
        return (
            f"the loss is given what {outer} has put aside, which this view has not seen: put the "
            f"view around {outer}"
        )
    return ""


NESTINGS: Mapping[tuple[str, str], str] = MappingProxyType({
    (outer, inner): _refusal(outer, inner)
    for outer in (*_ORDER, *_WHOLE)
    for inner in (*_ORDER, *_WHOLE, "mean_gradients", "pipeline.gradients")
    if not outer == inner == "wrap_gradients"
})  # fmt: skip
"""By outer and inner wrapper why one may not stand around the other; "" where it may."""


def nesting_table() -> str:
    """Which wrapper may stand around which, as a table, and the reasons of those that may not."""
    outers = list(dict.fromkeys(outer for outer, _ in NESTINGS))
    inners = list(dict.fromkeys(inner for _, inner in NESTINGS))
    notes: list[str] = []
    rows: list[Sequence[str]] = [("around", *inners)]
    for outer in outers:
        row = [outer]
        for inner in inners:
            reason = NESTINGS.get((outer, inner), "")
            if reason and reason not in notes:
                notes.append(reason)
            row.append(str(notes.index(reason) + 1) if reason else "yes")
        rows.append(row)
    listed = "\n".join(f"{number}: {note}" for number, note in enumerate(notes, 1))
    return f"{table(rows, left=1 + len(inners))}\n\n{listed}"


def check_nesting(name: str, g: GradientFunction) -> None:
    """Raise ValueError where the wrapper of this name may not stand around `g`; lists all reasons.

    Raises:
        ValueError: see `nesting_table`.
    """
    raise_problems(
        f"cannot put {name} around {g}",
        [
            Problem(inner, f"it inside of {name}", f"another order, as {why}", fix)
            for inner in g.names
            if (reason := NESTINGS.get((name, inner), "") or _refuse_view(name, inner, g))
            for why, _, fix in [reason.rpartition(": ")]
        ],
    )
