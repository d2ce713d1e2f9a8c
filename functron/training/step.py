"""The training step: loss, gradients, their reduction and the update, as one per-rank program.

`make_step` fits on a screen, and is meant to be read, copied into a notebook, and changed: all that
it calls is public. Its gradients come from a gradient function (`functron.mean_gradients` and its
wrappers); each measurement is a plain function, a `Metric`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron import optim
from functron.compiler.jit import jit
from functron.core import compat, random, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.scopes import named_scope
from functron.core.tables import Table, shows_table
from functron.ops import AUTO, Kernels
from functron.optim.transformation import purely, refuse_parts
from functron.program.displays import tree_table
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, shard_map
from functron.spmd.axes import AxisNames, section
from functron.spmd.mesh import JointCall
from functron.spmd.params import ParamDef, init_params
from functron.spmd.shard_map import refuse_idle, unsplit_axes
from functron.transforms import sync_gradients
from functron.transforms.gradient_functions import BoundGradients, GradientFunction
from functron.transforms.remat import storage_key

SAMPLES = P(DATA_AXES)
"""The spec of a batch that is split by its samples alone."""


@shows_table
class State(NamedTuple):
    """Everything a step reads and replaces.

    >>> ft.State(torch.tensor(0), {"w": torch.zeros(2, 3)}, (), ft.random.key(0))
    State
    path      shape   dtype    numbers  bytes
    step      ()      int64          1      8
    params/w  (2, 3)  float32        6     24
    key       (2,)    int64          2     16
    3 tensors, 9 numbers, 48 bytes

    Attributes:
        step: int64 scalar, the number of steps taken.
        params: the parameters.
        opt_state: the optimizer's state.
        key: the key that every step's randomness is derived from.
    """

    step: Any
    params: tree.Tree
    opt_state: tree.Tree
    key: Any

    def _table(self) -> Table:
        return tree_table(self, title="State")


@public
def state_specs(specs: tree.Tree, optimizer: optim.GradientTransformation) -> State:
    """The specs of a `State` whose parameters have these specs.

    >>> ft.state_specs({"w": P("tp")}, optim.sgd(0.1, momentum=0.9)).opt_state
    (TraceState(trace={'w': P('tp')}), ())
    """
    return State(P(), specs, optimizer.bind(specs).specs(specs), P())


@public
def init_state(
    key: torch.Tensor,
    defs: tree.Tree,
    specs: tree.Tree,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    params: tree.Tree = None,
    *,
    masters: tree.Tree | bool = False,
) -> State:
    """The state before the first step: the same numbers on every mesh.

    The key is split: parameters are ``init_params(random.split(key)[0], defs)``, and the second
    half is the key of the steps.

    >>> defs = {"w": ft.ParamDef((8, 4), ("mlp", "embed"), ft.params.Normal(0.02))}
    >>> mesh, optimizer = ft.Mesh(dp=2), optim.sgd(0.1)
    >>> state = ft.init_state(ft.random.key(0), defs, {"w": P()}, optimizer, mesh)
    >>> state.params["w"].shape
    torch.Size([8, 4])

    Args:
        key: a key of `functron.random`; the state lives on its device.
        defs: the parameters' `ParamDef`s.
        specs: their specs, one per parameter.
        optimizer: the gradient transformation that will update them.
        mesh: simulated (global values) or bound (this rank's shards).
        params: initial values; None: random ones. Those of a module (`torch.nn.Parameter`) are
            updated in the module's own memory, without torch's autograd.
        masters: initial float32 masters, for an optimizer that keeps them
            (``optim.with_fp32_masters(inner, dtypes)``, or `optim.make_optimizer` with `defs`); the
            parameters are their rounded values. A tree like the parameters, such as a pretrained
            model in float32, in place of `params`; True: random ones, drawn in float32; False: the
            masters begin as the parameters.

    Raises:
        ValueError: masters for an optimizer that keeps none; `params` and masters; or an optimizer
            that would take parts of parameters for whole ones (`optim.transformation`).
    """
    init_key, step_key = random.split(key).unbind(0)
    optimizer = optimizer.bind(specs)
    refuse_parts("init_state: the optimizer takes parts for whole ones", optimizer, specs, mesh)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    # every rank makes its own part, over pipeline axes as over any other
    init = shard_map(optimizer.init, mesh, (specs,), optimizer.specs(specs), check=False)
    if masters is False:
        given = tree.map(_detach_parameter, params)
        weights = init_params(init_key, defs, specs, mesh) if params is None else given
        return State(zero, weights, init(weights), step_key)
    if params is not None:
        title, got = "two sets of initial values", "given beside masters"
        refuse(title, "params", got, "None: they are the rounded masters")
    if masters is True:
        masters = init_params(init_key, tree.map(_wide, defs), specs, mesh)
    weights = tree.map(lambda master, d: master.to(d.dtype), masters, defs)
    _check_masters(init(_abstract(masters)), init(_abstract(weights)))
    return State(zero, weights, init(masters), step_key)


def _detach_parameter(leaf: Any) -> Any:
    """A module's parameter without its tape, which would keep all later steps alive."""
    return leaf.detach() if isinstance(leaf, torch.nn.Parameter) else leaf


def _wide(d: ParamDef) -> ParamDef:
    """A definition in the dtype of its master."""
    return replace(d, dtype=torch.float32) if d.dtype in optim.LOW_PRECISION else d


def _abstract(value: tree.Tree) -> tree.Tree:
    return tree.map(lambda leaf: leaf.detach().to("meta"), value)


def _check_masters(made: tree.Tree, wanted: tree.Tree) -> None:
    """Check that masters and parameters lead to states of the same dtypes and shapes.

    Raises:
        ValueError: the optimizer keeps no masters: its moments took their dtypes.
    """
    layouts = [[(leaf.dtype, leaf.shape) for leaf in tree.leaves(x)] for x in (made, wanted)]
    if layouts[0] != layouts[1]:
        got = "an optimizer that keeps no masters, or was not told the parameters' dtypes"
        fix = "optim.with_fp32_masters(inner, dtypes), or leave masters out"
        wanted_text = "one that keeps float32 masters"
        refuse("cannot begin with masters", "masters", got, wanted_text, fix)


class Seen(NamedTuple):
    """The arguments of a metric: a step before its update.

    Attributes:
        state: before the step.
        grads: the gradients, summed over ranks, and without the loss's scale.
        specs: of the parameters.
        grad_specs: of the gradients.
        copies: the number of pipeline ranks that hold each parameter.
        found: the mean ``loss`` and ``aux``; empty where a pipeline's stages are compiled on
            processes, since the update is a separate program there.
    """

    state: State
    grads: tree.Tree
    specs: tree.Tree
    grad_specs: tree.Tree
    copies: tree.Tree = 1
    found: Mapping[str, Any] = MappingProxyType({})


Metric = Callable[[Seen], Mapping[str, Any]]
"""``metric(seen) -> {name: value}``: a per-rank program whose values are equal on all ranks.

A value may be a tree of tensors; a part of a parameter or gradient is copied. An `optim.Norm` is
also given to the optimizer, which then does not compute it again.
"""


class _NormMetric(NamedTuple):
    """A metric of norms, which gradients in low precision have in common with float32 copies."""

    measure: Metric

    def __call__(self, seen: Seen) -> Mapping[str, Any]:
        return self.measure(seen)


@public
def grad_norm(seen: Seen) -> Mapping[str, Any]:
    """``grad_norm``, the 2-norm of all gradients together, before clipping: `optim.global_norm`.

    >>> from functron.training.step import Seen
    >>> grads = torch.tensor([3.0, 4.0])
    >>> ft.grad_norm(Seen(state=None, grads=grads, specs=P(), grad_specs=P()))["grad_norm"].value
    tensor(5.)
    """
    return grad_norm_of()(seen)


def grad_norm_of(mask: tree.Tree = True, kernels: Kernels = AUTO) -> Metric:
    """The metric ``grad_norm`` of some gradients.

    Args:
        mask: the gradients that count, a tree or prefix tree of bools, such as `weight_mask`.
        kernels: of "global_norm"; see `functron.ops.use`.
    """

    def metric(seen: Seen) -> Mapping[str, Any]:
        counted = seen.grads if mask is True else tree.partition(seen.grads, mask)[0]
        norm = optim.global_norm(counted, seen.grad_specs, seen.copies, kernels=kernels)
        return {"grad_norm": optim.Norm.taken(norm, counted)}

    return _NormMetric(metric)


def layer_norms(layers: optim.Layers, mask: tree.Tree = True) -> Metric:
    """The metric ``layers``: norms of parameters and of their gradients by layer.

    Args:
        layers: the layers of the parameters that count.
        mask: the parameters that count, a tree or prefix tree of bools.
    """

    def metric(seen: Seen) -> Mapping[str, Any]:
        counted = tree.partition(seen.grads, mask)[0]
        present = set(tree.paths(counted))
        params = tree.map_with_path(
            lambda path, leaf: leaf if path in present else None, seen.state.params
        )
        both = {"param_norm": (params, seen.specs), "grad_norm": (counted, seen.grad_specs)}
        return {"layers": optim.norms_by_layer(both, layers, seen.copies)}

    return _NormMetric(metric)


@dataclass(frozen=True)
class Watch:
    """A training step that also measures layers, and how often it replaces the usual step.

    It is a program of its own, so the other steps cost nothing more.

    Attributes:
        step: ``(state, batch) -> (state, metrics)``; metrics have ``layers``, norms by layer
            (see `make_step`), and of a GPT ``aux`` with ``stream`` of `gpt.Details`.
        every: it is taken at the first step, and at multiples of this one.
        names: the layers of the norms, in order.
        stream: the layers of the residual stream's sizes, in order; empty: not measured.
    """

    step: Callable
    every: int
    names: Sequence[str]
    stream: Sequence[str] = ()

    def due(self, index: int) -> bool:
        """Whether step `index` (from 0) is measured."""
        return index == 0 or (index + 1) % self.every == 0

    def layers(self, metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """The measurements of a step by layer, as Python numbers.

        Returns:
            For each layer of a stack (``blocks/3``) and each other entry of the parameters
            (``embed``): ``param_norm``, the 2-norm of its parameters before the update;
            ``grad_norm``, that of their gradients before clipping; and ``activation_rms``, the root
            mean square over the batch of the residual stream after the layer, or after the
            embedding. What does not exist is left out.
        """
        found: dict[str, dict[str, float]] = {name: {} for name in (*self.names, *self.stream)}
        for what, values in metrics["layers"].items():
            for name, value in zip(self.names, values.tolist(), strict=True):
                found[name][what] = value
        if self.stream:
            said = metrics["aux"]["stream"]
            squares = (said["squares"].double() / said["count"]).tolist()
            for name, value in zip(self.stream, squares, strict=True):
                found[name]["activation_rms"] = math.sqrt(value)
        return found


def _check_tensors(of: str, given: Any) -> None:
    """Raise TypeError unless these are tensors by name, whose replication can be checked."""
    named = given if isinstance(given, Mapping) else {}
    fix = "return a dict of tensors: torch.tensor(number)"
    wanted = "a tensor, which is checked to be the same on all ranks"
    problems = [
        Problem(f"metric {of}", f"{name!r}: {type(leaf).__name__}", wanted, fix)
        for name, value in named.items()
        for leaf in (() if isinstance(value, optim.Norm) else tree.leaves(value))
        if not isinstance(leaf, torch.Tensor)
    ]
    if named is not given:
        problems = [Problem(f"metric {of}", type(given).__name__, "numbers by name", fix)]
    raise_problems("metrics cannot be recorded", problems, TypeError)


def _copy_part(value: Any, kept: Collection[Any]) -> Any:
    """`value`, copied where the update would overwrite its memory."""
    if isinstance(value, torch.Tensor) and storage_key(compat.plain(value)) in kept:
        return value.clone()
    return value


_TAKEN = frozenset({
    "loss", "aux", "targets", "loss_scale", "stuck", "updates", "step", "lr", "tokens",
    "tokens_per_second", "expert_room", "reruns", "step_seconds", "mfu", "peak_memory_bytes",
    "samples", "sources", "batch", "eval",
})  # fmt: skip
"""Names that steps use in their metrics, or runs in their records."""


def measure(metrics: Sequence[Metric], seen: Seen) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all metrics.

    Returns:
        Those for the metrics of the step; and extra arguments of the optimizer: ``norm`` where a
        value is an `optim.Norm`, and ``value``, the loss, where it is known.

    Raises:
        ValueError: two metrics, or a metric and the step, have values of the same name.
        TypeError: a metric returns anything but tensors by name.
    """
    found: dict[str, Any] = {}
    problems = []
    for metric in metrics:
        given = metric(seen)
        wanted, fix = "a name that no other has", "rename it"
        of = getattr(metric, "__name__", type(metric).__name__)
        _check_tensors(of, given)
        taken = [name for name in given if name in found or name in _TAKEN]
        problems += [Problem(f"metric {of}", repr(name), wanted, fix) for name in taken]
        found |= given
    raise_problems("metrics have numbers of the same name", problems)
    norms = [value for value in found.values() if isinstance(value, optim.Norm)]
    record = {n: v.value if isinstance(v, optim.Norm) else v for n, v in found.items()}
    if len(norms) < len(found) and not purely():
        parts = tree.leaves((seen.state, seen.grads))
        kept = {storage_key(compat.plain(x)) for x in parts if isinstance(x, torch.Tensor)}
        record = tree.map(lambda x: _copy_part(x, kept), record)
    extra = {"norm": norms[0]} if norms else {}
    extra |= {"value": seen.found["loss"]} if "loss" in seen.found else {}
    return record, extra


@public
def make_step(
    gradients: GradientFunction,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    *,
    batch_specs: tree.Tree = SAMPLES,
    metrics: Sequence[Metric] = (grad_norm,),
    replicated_over: AxisNames = (),
) -> Callable:
    """The function ``(state, batch) -> (state, metrics)`` that takes one optimization step.

    Donates the state: its tensors are updated in place and returned, and using the old ones raises.
    Under a transform of torch.func, and where autograd tracks the state, the batch or what the loss
    closes over (as within `functron.grad`), the step is pure instead: it can be differentiated, and
    ``vmap(step)`` of stacked states and batches trains an ensemble. On a bound mesh state and batch
    are this rank's shards, on a simulated one global values. From the first call on the C library
    keeps up to 2 GiB of memory that this process frees.

    >>> mesh, optimizer, specs = ft.Mesh(dp=2), optim.sgd(0.5), {"w": P()}
    >>> def loss(params, batch, key):
    ...     return lax.psum((params["w"] - batch).square().sum(), "dp") / 2
    >>> def num_targets(batch):
    ...     return lax.psum(torch.ones_like(batch).sum(), "dp")
    >>> step = ft.make_step(ft.mean_gradients(loss, num_targets), optimizer, mesh, specs)
    >>> params = {"w": torch.zeros(())}
    >>> state = ft.State(torch.tensor(0), params, optimizer.init(params), ft.random.key(0))
    >>> state, metrics = step(state, torch.tensor([1.0, 3.0]))
    >>> state.params["w"], metrics["loss"]
    (tensor(1.), tensor(2.5000))

    Args:
        gradients: `mean_gradients` or `pipeline.gradients`, perhaps in wrappers. The number of
            targets is read on the host in every step (by `jit` before it runs the compiled
            program), unless `with_targets` or `without_targets` is the outermost wrapper.
        optimizer: the gradient transformation. A batch without targets changes neither parameters
            nor its state, except for the counts of schedules, which count batches.
        mesh: the ranks; the batch is split over its data axes.
        specs: the specs of the parameters that this process holds, one per parameter.
        batch_specs: a spec or tree of specs, such as ``gpt.batch_specs()`` where axes split
            sequences as well.
        metrics: measurements before the update; see `Metric`.
        replicated_over: axes whose ranks may all do the same work. Any other axis with more than
            one rank must split parameters, the optimizer's state, the batch or stages.

    Returns:
        The step. Its metrics are float scalars ``loss`` (mean over targets) and those of `metrics`;
        with `optim.with_loss_scale` these are of the unscaled loss, and ``loss_scale`` and
        ``stuck`` of the next step are added. For a batch without targets loss and gradients are 0,
        and so is ``targets``, which other steps do not have. (A program of `functron.trace` is for
        batches with targets; without any its loss is NaN.)
        Raises ValueError where the batch does not divide, or the loss is a mean (`check_sum`).
        Collectives: those of the gradients, `sync_gradients`, the optimizer and the metrics.

    Raises:
        ValueError: an axis of the mesh splits nothing; or parameters are split, and `optimizer` is
            neither elementwise nor declares how it works on parts (`optim.transformation`).
    """
    wanted = optimizer.bind(specs).grad_specs(specs)
    g = gradients.bind(mesh, specs, wanted)
    optimizer = optimizer.bind(specs, g.copies)
    layout, widen = state_specs(specs, optimizer), wants_copies(g, optimizer, metrics)
    check_layout(mesh, optimizer, layout, batch_specs, g.stages, replicated_over)

    def compute(state: State, batch: tree.Tree) -> tuple[dict, tree.Tree, Any]:
        key = random.fold_in(state.key, state.step) if g.draws else None
        given = g.num_targets(batch), optim.loss_scale(state.opt_state)
        return *g(state.params, batch, key, *given, widen=widen), given[0]

    def reduce(grads: tree.Tree) -> tree.Tree:
        return sync_gradients(grads, g.specs, wanted, dtype=g.sums_in, widen=widen)

    def update(state: State, found: dict, grads: tree.Tree, num_targets: Any) -> tuple[State, dict]:
        with section("update"):
            grads = optim.unscale(grads, optim.loss_scale(state.opt_state))
            seen = Seen(state, grads, specs, wanted, g.copies, found)
            measured, extra = measure(metrics, seen)
            step_ = optim.step_unless(g.lacks_targets(num_targets), optimizer)
            params, opt_state = step_(grads, state.opt_state, state.params, **extra)
        found = {**found, **measured, **optim.scaling_metrics(opt_state)}
        return State(state.step + 1, params, opt_state, state.key), found

    return map_step(compute, reduce, update, g, mesh, specs, layout, batch_specs, replicated_over)


def wants_copies(
    g: BoundGradients, optimizer: optim.GradientTransformation, metrics: Sequence[Metric]
) -> bool:
    """Whether gradients that nothing is added to need float32 copies.

    False where all that reads them computes in float32 by itself, as it goes: `optim.global_norm`
    and what else is here, and optimizers whose field ``widens`` says so.
    """
    known = all(metric is grad_norm or isinstance(metric, _NormMetric) for metric in metrics)
    float32 = {g.dtype, g.reduce_dtype} <= {None, torch.float32}
    return not (known and float32 and optimizer.widens)


@public
def map_step(
    compute: Callable,
    reduce: Callable,
    update: Callable,
    g: BoundGradients,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    layout: State,
    batch_specs: tree.Tree = SAMPLES,
    replicated_over: AxisNames = (),
) -> Callable:
    """The step of all ranks, mapped over `mesh`: `compute`, `reduce` and `update`, one by one.

    It is one program. Where a pipeline's stages are compiled on a bound mesh it is two: `compute`
    returns every rank's own gradients, which are the inputs of `reduce` and `update`, compiled
    separately. Where gradients are `retaken` and compiled `update` alone is the second one, so that
    the first computes while ranks sum their gradients.

    Args:
        compute: ``(state, batch) -> (found, grads, num_targets)`` of a rank.
        reduce: ``grads -> grads``, summed over ranks.
        update: ``(state, found, grads, num_targets) -> (state, metrics)`` of a rank.
        g: the bound gradient function. Where it reads the number of targets on the host, `jit` does
            too, and runs the step uncompiled for a batch without targets.
        mesh: the ranks.
        specs: of the parameters.
        layout: of the state.
        batch_specs: of the batch.
        replicated_over: as of `functron.make_step`.

    Returns:
        ``(state, batch) -> (state, metrics)``; it donates the state.
    """
    compat.keep_freed_memory()
    reduce = _put_in_scope("sync", reduce)
    look = check_sum(g, mesh, specs, batch_specs) if g.checks_sum else None
    # where each rank has stages of its own
    if g.compile is not None and g.stages is not None and isinstance(mesh, BoundMesh):
        return _two_programs(compute, reduce, update, g, mesh, layout, batch_specs, look)
    if g.compile is not None and g.is_useless is not None:
        return _two_compiled(compute, reduce, update, g, mesh, layout, batch_specs, look)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        found, grads, num_targets = compute(state, batch)
        if g.found_useless(found):
            return state, found
        return update(state, found, reduce(grads), num_targets)

    over: dict[str, Any] = {"stages": g.stages, "donate": 0, "replicated_over": replicated_over}
    mapped = shard_map(step, mesh, (layout, batch_specs), (layout, P()), **over)
    if look is not None:
        mapped.observe = lambda args, out: look(out[0], args[1])
    return _set_aside_empty(mapped, g, mesh, batch_specs)


def _set_aside_empty(
    mapped: Any, g: BoundGradients, mesh: Mesh | BoundMesh, batch_specs: tree.Tree
) -> Callable:
    """A step that `jit` runs uncompiled for a batch without targets, where the host counts them."""
    if g.targets == "read":
        count = shard_map(g.num_targets, mesh, (batch_specs,), P(), stages=g.stages, check=False)
        mapped.aside = lambda args: g.lacks_targets(count(args[1])) is True
    return mapped


def _put_in_scope(scope: str, function: Callable) -> Callable:
    """A function within a named scope."""

    def call(*args: Any) -> Any:
        with named_scope(scope):
            return function(*args)

    return call


def _two_programs(
    compute: Callable,
    reduce: Callable,
    update: Callable,
    g: BoundGradients,
    mesh: BoundMesh,
    layout: State,
    batch_specs: tree.Tree,
    look: Callable | None,
) -> Callable:
    split = functools.partial(shard_map, mesh=mesh, stages=g.stages, check=False)
    made = split(compute, in_specs=(layout, batch_specs), out_specs=P())
    ends: dict[str, Any] = {"in_specs": (layout, g.specs), "out_specs": (layout, P())}
    settings: dict[str, Any] = dict(g.compile or {})

    def finish(state: State, grads: tree.Tree, num_targets: int | None = None) -> tuple:
        return update(state, {}, reduce(grads), num_targets)

    taken = jit(split(finish, **ends), donate=0, **settings)
    left = split(functools.partial(finish, num_targets=0), **ends, donate=0)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        with JointCall("step", mesh, alike=False):  # an interrupt cannot fall between the two
            found, grads, num_targets = made(state, batch)
            if g.found_useless(found):
                return state, found
            state, more = (left if g.lacks_targets(num_targets) else taken)(state, grads)
            if look is not None:
                look(state, batch)
        return state, {**found, **more}

    return step


def _two_compiled(
    compute: Callable,
    reduce: Callable,
    update: Callable,
    g: BoundGradients,
    mesh: Mesh | BoundMesh,
    layout: State,
    batch_specs: tree.Tree,
    look: Callable | None,
) -> Callable:
    """`_two_programs` where all ranks run the same, both compiled."""
    own = P(tuple(name for name in mesh.axis_names if name != g.stages))
    split = functools.partial(shard_map, mesh=mesh, stages=g.stages, check=False)
    settings: dict[str, Any] = dict(g.compile or {})

    def compute_own(state: State, batch: tree.Tree) -> tuple:
        found, grads, num_targets = compute(state, batch)
        return found, tree.map(lambda leaf: leaf.unsqueeze(0), reduce(grads)), num_targets

    def finish(
        lacks: int | None, state: State, found: dict, grads: tree.Tree
    ) -> tuple[State, dict]:
        return update(state, found, tree.map(lambda leaf: leaf.squeeze(0), grads), lacks)

    def finishing(lacks: int | None) -> Callable:
        over = (layout, P(), own)
        made = functools.partial(finish, lacks)
        return split(made, in_specs=over, out_specs=(layout, P()), donate=0)

    made = split(compute_own, in_specs=(layout, batch_specs), out_specs=(P(), own, P()))
    first = jit(_set_aside_empty(made, g, mesh, batch_specs), **settings)
    taken, left = jit(finishing(None), donate=0, **settings), finishing(0)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        with JointCall("step", mesh, alike=False):
            found, grads, num_targets = first(state, batch)
            if g.found_useless(found):
                return state, found
            state, found = (left if g.lacks_targets(num_targets) else taken)(state, found, grads)
            if look is not None:
                look(state, batch)
        return state, found

    return step


def check_layout(
    mesh: Mesh | BoundMesh,
    optimizer: optim.GradientTransformation,
    layout: State,
    batch_specs: tree.Tree,
    stages: str | None = None,
    replicated_over: AxisNames = (),
) -> None:
    """Refuse a mesh on which the step would be wrong, or ranks would repeat the same work.

    Args:
        mesh: the ranks.
        optimizer: bound to the specs of the parameters.
        layout: of the state.
        batch_specs: of the batch.
        stages: the axis of pipeline stages.
        replicated_over: axes whose ranks may do the same work.

    Raises:
        ValueError: the optimizer would treat parts of parameters as whole ones, or an axis of the
            mesh splits neither state nor batch.
    """
    title = "make_step: the optimizer takes parts for whole ones"
    refuse_parts(title, optimizer, layout.params, mesh, stages)
    meant = (replicated_over,) if isinstance(replicated_over, str) else tuple(replicated_over)
    idle = [
        name for name in unsplit_axes(mesh, (layout, batch_specs)) if name not in (stages, *meant)
    ]
    refuse_idle(f"make_step on Mesh({mesh})", mesh, idle)


def check_sum(
    g: BoundGradients, mesh: Mesh | BoundMesh, specs: tree.Tree, batch_specs: tree.Tree
) -> Callable[[State, tree.Tree], None]:
    """A check ``(state, batch)`` that raises, once, where the loss is a mean over the batch.

    A sum doubles when every sample is given twice, and a mean stays. Samples may influence one
    another a little (dropout without ``rows``, capacities of experts), so the threshold is 1.5. A
    mean is accepted where `num_targets` does not grow with the batch either, unless microbatches
    are added up.
    """
    num_microbatches = g.num_microbatches

    def twice(leaf: torch.Tensor, count: int) -> torch.Tensor:
        """`count` times the first sample of every microbatch."""
        parts = num_microbatches if g.stages is not None else 1
        rows = leaf.unflatten(0, (parts, -1))[:, :1]
        return rows.expand(parts, count, *leaf.shape[1:]).flatten(0, 1)

    def numbers(params, batch, key):
        each = [tree.map(lambda leaf, n=n: twice(leaf, n), batch) for n in (1, 2)]
        total = functools.partial(g.total, params, key=key)
        return [f(x) for x in each for f in (total, g.num_targets)]

    mapped = shard_map(numbers, mesh, (specs, batch_specs, P()), P(), check=False, stages=g.stages)
    simulated = not isinstance(mesh, BoundMesh)
    counts_of = [
        shard_map(g.num_targets, ranks, (split,), P(), check=False, stages=g.stages)
        for ranks, split in ((mesh, batch_specs), (Mesh(**dict.fromkeys(mesh.axis_names, 1)), P()))
        if simulated
    ]
    done = False

    def look(state: State, batch: tree.Tree) -> None:
        nonlocal done
        leaves = tree.leaves(batch)
        plain = all(isinstance(x, torch.Tensor) and x.dim() and not x.is_meta for x in leaves)
        if done or not plain:
            return
        try:
            with torch.no_grad():
                once, count, again, counts = map(float, mapped(state.params, batch, state.key))
        except Exception as error:
            error.add_note(
                "raised as make_step saw to the loss being a sum, on one sample of each rank; "
                "fix: pass checks_sum=False to mean_gradients where it needs whole batches"
            )
            raise
        done = count != 0  # the first samples may have no targets
        if simulated:
            ours, alone = (float(count_of(batch)) for count_of in counts_of)
            if ours != alone:
                got = f"{ours:g} on Mesh({mesh}), and {alone:g} of the whole batch on one rank"
                wanted = "the number of terms in the loss, over all ranks"
                fix = "return lax.psum(the number of this rank's, ft.DATA_AXES)"
                refuse("cannot train on this loss", "num_targets", got, wanted, fix)
        added_up = num_microbatches > 1 or counts > count
        if not once or not added_up or not again / once < 1.5:
            return
        got = f"{once:.6g} for a sample of each rank, and {again:.6g} for each sample twice: a mean"
        wanted = "the sum over the targets of all ranks, which is divided by num_targets later"
        fix = "return lax.psum(losses.sum(), ft.DATA_AXES), not a mean of the losses"
        refuse("cannot train on this loss", "loss", got, wanted, fix)

    return look
