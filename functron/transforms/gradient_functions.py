"""Gradient functions: the gradients of a mean loss on every rank, and wrappers of them.

A training step has one: `mean_gradients` of a loss, or `functron.pipeline.gradients` of a
pipeline's stages. Each other feature is a wrapper:

    g = mean_gradients(loss, num_targets)
    g = scattered(gathered_once(accumulated(g, 4)))      # refused: see `NESTINGS`
    g = gathered_once(scattered(accumulated(g, 4)))
    step = make_step(g, optimizer, mesh, specs)

Most wrappers are a `View` of the parameters: they change what is differentiated. `nesting_table`
says which wrapper may stand around which, and why not.
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
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.scopes import named_scope
from functron.core.tables import table
from functron.program.recorder import active, readable
from functron.spmd.mesh import FSDP_AXES, BoundMesh, Mesh
from functron.spmd.simulate import runs_transform
from functron.spmd.spec import P, cut_tree, is_spec, join_parts, without_axes
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
"""Trees that are not differentiated, by the name of the view that put them aside."""


@dataclass(frozen=True)
class View:
    """A differentiated tree in place of the parameters, and how it becomes parameters again.

    `split` runs once in a step, before its microbatches; `join` inside the differentiated function,
    in every microbatch, and on a pipeline in every stage, for the parameters of that stage alone.

    Attributes:
        name: of the wrapper that adds it; also its key in `Aside`.
        specs: ``(specs, into) -> specs``: of the result of `split`, from those of its argument and
            those that gradients are wanted with.
        split: ``(params, aside, specs, into) -> (params, aside)``: what is differentiated, and
            `aside` with its own entry added.
        join: ``(params, aside, specs, into)`` to a context manager of the parameters that the loss
            takes.
    """

    name: str
    specs: Callable[[tree.Tree, tree.Tree], tree.Tree]
    split: Callable[[tree.Tree, Aside, tree.Tree, tree.Tree], tuple[tree.Tree, Aside]]
    join: Callable[[tree.Tree, Aside, tree.Tree, tree.Tree], AbstractContextManager[tree.Tree]]


@dataclass(frozen=True)
class BoundGradients:
    """A gradient function on a mesh, for parameters with known specs: what a step calls.

    Attributes:
        compute: the per-rank program ``(params, batch, key, divisor) -> ((loss, found), grads)``:
            the sum of the losses over `divisor` (a number or 0-dim), the same on all ranks;
            ``{"aux": sums}`` of a loss with auxiliary values, else {}; and this rank's shares of
            the gradients, for `sync_gradients`.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        specs: of the gradients.
        total: ``(params, batch, key)`` to the sum of the losses, without gradients.
        survey: ``(params, batch, key)`` to the auxiliary values alone, summed over microbatches,
            without gradients; None where the loss has none.
        targets: whether batches have any. "read": their number is read on the host in every step,
            which waits for a GPU; "some" and "none": the caller knows, and nothing waits.
        num_microbatches: number of parts of each rank's batch.
        reduce_dtype: to sum gradients over ranks in; None: their own.
        dtype: that gradients have where they are added up or computed with. Those of `compute` may
            be narrower, if it adds nothing up. None: that of `compute`'s.
        checks_sum: whether a step checks, once, that the loss is a sum and not a mean.
        draws: whether the loss draws random numbers; otherwise its key is None.
        copies: how many ranks of a pipeline hold each parameter.
        stages: the axis of a pipeline's ranks; None: there is no pipeline.
        compile: settings of the compiled programs of a step of several: of a pipeline on processes,
            and of `retaken` gradients; None: they are not compiled.
        is_useless: as of `retaken`; None: gradients are always of use.
    """

    compute: Callable[..., tuple[tuple[Any, Mapping[str, Any]], tree.Tree]]
    num_targets: Callable[[tree.Tree], Any]
    specs: tree.Tree
    total: Callable[..., Any]
    survey: Callable[..., tree.Tree] | None = None
    targets: Targets = "read"
    num_microbatches: int = 1
    reduce_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None
    checks_sum: bool = True
    draws: bool = True
    copies: tree.Tree = 1
    stages: str | None = None
    compile: Mapping[str, Any] | None = None
    is_useless: Callable[[Mapping[str, Any]], torch.Tensor] | None = None

    def __call__(
        self,
        params: tree.Tree,
        batch: tree.Tree,
        key: Any,
        num_targets: Any,
        scale: torch.Tensor | None = None,
        *,
        widen: bool = True,
    ) -> tuple[dict[str, Any], tree.Tree]:
        """The mean loss of a batch, and this rank's shares of its gradients.

        Args:
            params: with the specs that this is bound to.
            batch: this rank's.
            key: of the step's random numbers; None: there are none.
            num_targets: of the batch, over all ranks.
            scale: factor of the loss, for gradients in float16; None: 1.
            widen: return gradients in `dtype`; False: for a caller who sees to it.

        Returns:
            ``({"loss": ..., "aux"?: ...}, grads)``: the loss without `scale`, and gradients with
            it. For a batch without targets both are 0, and so is ``"targets"`` beside the loss.
        """
        by = num_targets if self.targets == "some" else _at_least_one(num_targets)
        compute = self.widened.compute if widen else self.compute
        (loss, found), grads = compute(params, batch, key, by if scale is None else by / scale)
        found = {"loss": loss if scale is None else loss / scale, **found}
        if self.lacks_targets(num_targets) is True:
            zero, grads = torch.zeros_like(found["loss"]), tree.map(torch.zeros_like, grads)
            found |= {"loss": zero, "targets": zero.to(torch.int64)}
        return found, grads

    @property
    def widened(self) -> BoundGradients:
        """The same with gradients of `compute` in `dtype`."""
        if self.dtype is None:
            return self

        def compute(*args):
            found, grads = self.compute(*args)
            return found, tree.map(lambda leaf: leaf.to(self.dtype), grads)

        return replace(self, compute=compute, dtype=None)

    @property
    def sums_in(self) -> torch.dtype | None:
        """The dtype to sum gradients over ranks in; None: their own."""
        return self.reduce_dtype or self.dtype

    def found_useless(self, found: Mapping[str, Any]) -> bool:
        """Whether these gradients are to be thrown away: read on the host, which waits for a GPU.

        Args:
            found: the loss and the auxiliary values beside them.

        Raises:
            ValueError: it cannot be read, in a program that is traced, compiled or transformed.
        """
        if self.is_useless is None:
            return False
        useless = self.is_useless(found)
        if not readable(useless):
            got, wanted = "it in a program that is traced or transformed", "it read by the host"
            fix = "retaken(g, is_useless, settings={}), whose step is two compiled programs"
            refuse("a step that may be taken again", "retaken", got, wanted, fix)
        return bool(useless)

    def lacks_targets(self, num_targets: Any) -> bool | torch.Tensor:
        """Whether a batch has none: read on the host, which waits for a GPU, unless it is known.

        Under torch.func transforms, where it cannot be read, a bool tensor; in a traced program,
        which is for batches with targets, False.
        """
        if self.targets != "read" or num_targets is None:
            return self.targets == "none"
        if not isinstance(num_targets, torch.Tensor) or readable(num_targets):
            return bool(num_targets == 0)
        return num_targets == 0 if runs_transform() else False


def _at_least_one(count: Any) -> Any:
    """1 in place of 0; a traced program, which is for batches with targets, has no such step."""
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
    """A gradient function without a mesh; made by `mean_gradients` and its wrappers.

    Attributes:
        base: what is differentiated.
        names: of the wrappers, outermost first, and of the base.
        views: of the parameters, outermost first.
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
        """The gradients on a simulated or bound mesh of the parameters that this process holds.

        `wanted` are the specs of the summed gradients that an optimizer takes
        (`optim.GradientTransformation.grad_specs`); None: those of the parameters, `specs`.
        """
        return self.base.bind(Views(self.views), mesh, specs, specs if wanted is None else wanted)

    def __str__(self) -> str:
        return "(".join(self.names) + ")" * (len(self.names) - 1)

    __repr__ = __str__


@dataclass(frozen=True)
class Views:
    """The views of a gradient function, outermost first, applied together."""

    views: tuple[View, ...] = ()

    def levels(
        self, specs: tree.Tree, into: Callable[[tree.Tree], tree.Tree]
    ) -> list[tuple[tree.Tree, tree.Tree]]:
        """The specs of every view's argument, with those that its gradients are wanted with.

        One pair more than views: the last is of what is differentiated.
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
        """The parameters that the loss takes, in a with block around what uses them."""
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
    draws: bool
    num_microbatches: int = 1
    dtype: torch.dtype | None = None

    def _losses(self, params: tree.Tree, batch: tree.Tree, key: Any) -> tuple[Any, tree.Tree]:
        """The sum of the losses, and the auxiliary values, None where there are none."""
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
        later = dtype if self.num_microbatches == 1 and dtype == torch.float32 else None
        own = dtype if later is None else None
        both = functools.partial(value_and_grad, has_aux=has_aux)

        def compute(params, batch, key, divisor):
            chosen, aside = views.split(params, levels)

            def mean_loss(chosen, microbatch):
                with views.joined(chosen, aside, levels) as given:
                    value, found = self._losses(given, microbatch, key)
                    return (value / divisor, found) if has_aux else value / divisor

            shares = accumulate(both(mean_loss), self.num_microbatches, dtype=own)
            value, grads = shares(chosen, batch)
            if later is not None:
                value = tree.map(lambda x: x.to(later) if tree.is_float(x) else x, value)
            return (value[0], {"aux": value[1]}) if has_aux else (value, {}), grads

        def total(params, batch, key):
            with views.joined(*views.split(params, levels), levels) as given:
                return self._losses(given, batch, key)[0]

        def survey(params, batch, key):
            def found(given, microbatch):
                return self._losses(given, microbatch, key)[1]

            with torch.no_grad(), views.joined(*views.split(params, levels), levels) as given:
                return accumulate(found, self.num_microbatches)(given, batch)

        return BoundGradients(
            compute,
            self.num_targets,
            levels[-1][0],
            total,
            survey if has_aux else None,
            num_microbatches=self.num_microbatches,
            reduce_dtype=self.reduce_dtype,
            dtype=later,
            checks_sum=self.checks_sum,
            draws=self.draws,
        )


@public
def mean_gradients(
    loss: Callable,
    num_targets: Callable,
    *,
    has_aux: bool = False,
    reduce_dtype: torch.dtype | None = None,
    checks_sum: bool = True,
    draws: bool = True,
) -> GradientFunction:
    """The gradients of a mean loss: of ``loss(params, batch, key) / num_targets(batch)``.

    `functron.make_step` counts the targets of the whole batch and passes the divisor, so that
    microbatches and ranks with unequal numbers of targets are weighted right.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> mean
    mean_gradients

    Args:
        loss: ``(params, batch, key)`` to the *sum* of the losses over the batch of all ranks.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        has_aux: `loss` returns ``(sum, aux)``, where aux is a tree of replicated sums; their sums
            over microbatches are then in a step's metrics, as ``aux``.
        reduce_dtype: sum gradients over ranks in this dtype; None: their own. See
            `sync_gradients`.
        checks_sum: `functron.make_step` checks after its first step that the loss is a sum, on one
            sample of each rank, and on that sample twice; False: it does not.
        draws: `loss` draws random numbers; False: its key is None, and a step makes none.

    Collectives: those of the loss, forward and backward.
    """
    base = _MeanLoss(loss, num_targets, has_aux, reduce_dtype, checks_sum, draws)
    return GradientFunction(base, ("mean_gradients",), reduce_dtype=reduce_dtype)


@public
def accumulated(
    g: GradientFunction, num_microbatches: int, *, dtype: torch.dtype | None = None
) -> GradientFunction:
    """`g`, added up over microbatches, to save activation memory.

    Microbatch m is samples m, m + num_microbatches, ... of the batch on every mesh, as of
    `accumulate`, also for `dtype`.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> ft.accumulated(mean, num_microbatches=4)
    accumulated(mean_gradients)

    Raises:
        ValueError: `g` is not of `mean_gradients`: see `nesting_table`.
    """
    check_nesting("accumulated", g)
    assert isinstance(g.base, _MeanLoss)
    base = replace(g.base, num_microbatches=num_microbatches, dtype=dtype)
    return replace(g, base=base, names=("accumulated", *g.names), dtype=dtype)


@public
def gathered_once(g: GradientFunction) -> GradientFunction:
    """`g`, of parameters that are gathered once, before the microbatches.

    Without it, the loss gathers parameters that data axes split where it uses them
    (`functron.fsdp`), in every microbatch.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> ft.gathered_once(ft.accumulated(mean, 4))
    gathered_once(accumulated(mean_gradients))

    Collectives: one all-gather per leaf and data axis that splits it; its gradient is summed, and
    scattered, at the end (`sync_gradients`).
    """

    def split(params, aside, specs, into):
        if (codes := aside.get("encoded")) is None:
            return gather_parameters(params, specs, without_axes(specs, FSDP_AXES)), aside
        whole = Gather(specs)(attach_codes(params, codes))
        return without_codes(whole), {**aside, "encoded": detach_codes(whole)}

    return _with_view(
        g,
        View(
            "gathered_once",
            specs=lambda specs, into: without_axes(specs, FSDP_AXES),
            split=split,
            join=lambda params, aside, specs, into: contextlib.nullcontext(params),
        ),
    )


@public
def frozen(g: GradientFunction, trainable: tree.Tree) -> GradientFunction:
    """`g` with respect to some parameters; the others cost no gradients and no reductions.

    `trainable` is a tree or prefix tree of bools, of the parameters that this process holds. Use
    ``optim.only(optimizer, trainable)`` with it, so that the others have no optimizer state.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> ft.frozen(mean, {"embed": False, "blocks": True})
    frozen(mean_gradients)
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
    Without it they are reduced once, at the end, as are those of parameters that a pipeline spreads
    over its ranks in any case.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> ft.scattered(ft.accumulated(mean, 4))
    scattered(accumulated(mean_gradients))

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

    `encode` makes codes of this rank's parameters (see `functron.precision.encoder`); the codes are
    what is gathered, and the loss gets parameters with them.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> ft.encoded(mean, lambda params: {})
    encoded(mean_gradients)
    """

    def split(params, aside, specs, into):
        with named_scope("encode"):
            return params, {**aside, "encoded": encode(params, specs)}

    def attach(params, aside, specs, into):
        return contextlib.nullcontext(attach_codes(params, aside["encoded"]))

    return _with_view(g, View("encoded", lambda specs, into: specs, split, attach))


@public
def with_view(g: GradientFunction, view: View) -> GradientFunction:
    """`g` with a `View` of your own; `scattered` and `encoded` must be inside of it.

    Raises:
        ValueError: the view has the name of one that `g` has.
    """
    if view.name in (*_ORDER, *_WHOLE, *g.names):
        got, fix = f"{view.name!r}, which another wrapper has", "give the view a name of its own"
        raise_problems(f"cannot wrap {g}", [Problem("view.name", got, "a new name", fix)])
    return _with_view(g, view)


@public
def wrap_gradients(g: GradientFunction, wrap: Callable[[Callable], Callable]) -> GradientFunction:
    """`g`, with ``wrap(compute)`` in place of its per-rank program, `BoundGradients.compute`.

    For changes to a rank's shares of the gradients before ranks sum them, such as noise of its own.
    It is around all views of `g`, wherever it is written.
    """

    def change(bound: BoundGradients) -> BoundGradients:
        whole = bound.widened
        return replace(whole, compute=wrap(whole.compute))

    return _with_change(g, "wrap_gradients", change)


@public
def with_targets(g: GradientFunction) -> GradientFunction:
    """`g`, for batches that are known to have targets: a step does not read their number.

    The loss of a batch without any is then NaN, or infinite.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> ft.with_targets(mean)
    with_targets(mean_gradients)
    """
    return _with_change(g, "with_targets", lambda bound: replace(bound, targets="some"))


@public
def without_targets(g: GradientFunction) -> GradientFunction:
    """`g`, for batches that are known to have no targets, which a step skips."""

    def change(bound: BoundGradients) -> BoundGradients:
        return replace(bound, num_targets=lambda batch: 0, targets="none")

    return _with_change(g, "without_targets", change)


@public
def retaken(
    g: GradientFunction,
    is_useless: Callable[[Mapping[str, Any]], torch.Tensor],
    *,
    settings: Mapping[str, Any] | None = None,
) -> GradientFunction:
    """`g`, whose step leaves the state as it is where gradients are useless, to be taken again.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> retaken(mean, lambda found: found["loss"].isnan())
    retaken(mean_gradients)

    Args:
        is_useless: of the mean ``loss`` and ``aux``, whether something had not enough room: a bool,
            0-dim, the same on all ranks. The host reads it in every step, before the update.
        settings: of `functron.jit`, for a step of two compiled programs, with that in between;
            None: as `g` has them, which without a pipeline is not compiled, nor to be.
    """

    def change(bound: BoundGradients) -> BoundGradients:
        own = bound.compile if settings is None else settings
        return replace(bound, is_useless=is_useless, compile=own)

    return _with_change(g, "retaken", change)


@public
def informed(
    g: GradientFunction, inform: Callable[[tree.Tree, tree.Tree], tree.Tree]
) -> GradientFunction:
    """`g`, whose microbatches know what a first pass over all of them found: one more forward.

    >>> mean = ft.mean_gradients(lambda w, x, key: (w * x).sum(), torch.count_nonzero)
    >>> informed(ft.accumulated(mean, 2), lambda batch, found: {**batch, "largest": found})
    informed(accumulated(mean_gradients))

    Args:
        inform: ``(batch, aux) -> batch``, of this rank's batch and the auxiliary values summed over
            all microbatches, those of a step's metrics. What it adds has a leading dim of samples,
            as all entries of a batch.

    Collectives: those of the loss, forward, once more.
    """

    def change(bound: BoundGradients) -> BoundGradients:
        survey = bound.survey
        if survey is None:
            fix = "return (sum, aux), with has_aux=True"
            refuse("nothing is found to inform by", "informed", "a sum alone", "aux values", fix)

        def compute(params, batch, key, divisor):
            with named_scope("survey"):
                found = survey(params, batch, key)
            return bound.compute(params, inform(batch, found), key, divisor)

        return replace(bound, compute=compute)

    return _with_change(g, "informed", change)


def gather_parameters(params: tree.Tree, specs: tree.Tree, into: tree.Tree) -> tree.Tree:
    """The parameters gathered over the axes that `specs` mention and `into` does not.

    Collectives: one all-gather per leaf and axis.
    """
    flat = tree.broadcast_prefix(specs, params, is_leaf=is_spec, what="specs", wanted="a P")
    flat = [spec or P() for spec in flat]
    with named_scope("gather"):
        return tree.map_columns(join_parts, params, cut_tree(into, specs, params), flat)


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


def _with_view(g: GradientFunction, view: View) -> GradientFunction:
    check_nesting(view.name, g)
    return replace(g, names=(view.name, *g.names), views=(view, *g.views))


_ORDER = ("encoded", "gathered_once", "frozen", "scattered", "accumulated")
"""The wrappers, in the order in which they stand around one another, outermost first."""

_WHOLE = ("wrap_gradients", "with_targets", "without_targets", "retaken", "informed")
"""Those that change what is bound, in any order."""

_REASONS: Mapping[str, str] = MappingProxyType({
    "encoded": "codes are made of a rank's own parts, and are what is gathered: nothing that "
    "changes the parameters comes before",
    "gathered_once": "all parameters are gathered, frozen ones too, and codes with them; and what "
    "is scattered are the gradients of whole ones",
    "frozen": "frozen parameters are put aside before gradients are scattered, since they have "
    "none",
    "scattered": "what every microbatch adds up are a rank's parts of gradients",
})  # fmt: skip
"""Why a wrapper stands outside of those after it."""


def _explain_refusal(outer: str, inner: str) -> str:
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
    return f"{_REASONS[inner]}: put {inner} around {outer}"


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
    (outer, inner): _explain_refusal(outer, inner)
    for outer in (*_ORDER, *_WHOLE)
    for inner in (*_ORDER, *_WHOLE, "mean_gradients", "pipeline.gradients")
    if not outer == inner == "wrap_gradients"
})  # fmt: skip
"""By outer and inner wrapper why one may not stand around the other; "" where it may."""


def nesting_table() -> str:
    """Which wrapper may stand around which, as a table, with reasons where it may not."""
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
    """Raise ValueError if this wrapper may not stand around `g`; all reasons are listed."""
    raise_problems(
        f"cannot put {name} around {g}",
        [
            Problem(inner, f"it inside of {name}", f"another order, as {why}", fix)
            for inner in g.names
            if (reason := NESTINGS.get((name, inner), "") or _refuse_view(name, inner, g))
            for why, _, fix in [reason.rpartition(": ")]
        ],
    )
