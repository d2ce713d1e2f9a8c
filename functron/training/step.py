"""The training step: loss, gradients, their reduction and the update, as one per-rank program.

`make_step` fits on a screen, and is meant to be read, copied into a notebook, and changed: all that
it calls is public. What makes gradients is a gradient function (`functron.mean_gradients` and its
wrappers), and what is measured are plain functions, a `Metric` each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron import optim
from functron.compiler.jit import jit
from functron.core import compat, random, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.scopes import named_scope
from functron.ops import AUTO, Kernels
from functron.optim.transformation import purely, refuse_parts
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


class State(NamedTuple):
    """Everything a step reads and replaces.

    Attributes:
        step: int64 scalar, the number of steps taken.
        params: the parameters.
        opt_state: what the optimizer remembers.
        key: the key that every step's randomness is derived from.
    """

    step: Any
    params: tree.Tree
    opt_state: tree.Tree
    key: Any


@public
def state_specs(specs: tree.Tree, optimizer: optim.GradientTransformation) -> State:
    """The specs of a `State` whose parameters have these specs."""
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

    Its parameters are not those of ``init_params(key, defs)``: one half of the key makes them,
    ``init_params(random.split(key)[0], defs)``, and the other is the state's, for its steps.

    Args:
        key: a key of `functron.random`; the state lives on its device.
        defs: the parameters' `ParamDef`s.
        specs: their specs, one per parameter.
        optimizer: the gradient transformation that will update them.
        mesh: simulated (global values) or bound (this rank's shards).
        params: to begin with; None: random ones. Those of a module (`torch.nn.Parameter`) are
            trained in the module's own memory, and torch's tape sees nothing of that.
        masters: what the parameters are rounded from, for an optimizer that keeps float32 masters
            of those in low precision (``optim.with_fp32_masters(inner, dtypes)``, or
            `optim.make_optimizer` with `defs`): without, masters begin with rounded values. A tree
            like the parameters, such as a pretrained model in float32, in place of `params`; True:
            random ones, drawn in float32.

    Raises:
        ValueError: masters for an optimizer that keeps none; `params` and masters; or an optimizer
            that would take parts of parameters for whole ones (`optim.transformation`).
    """
    init_key, step_key = random.split(key).unbind(0)
    optimizer = optimizer.bind(specs)
    refuse_parts("init_state: the optimizer takes parts for whole ones", optimizer, specs, mesh)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    # every rank makes its own part; axes of a pipeline are as good as any others for that
    init = shard_map(optimizer.init, mesh, (specs,), optimizer.specs(specs), check=False)
    if masters is False:
        given = tree.map(_off_tape, params)
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


def _off_tape(leaf: Any) -> Any:
    """A module's parameter without its tape, which would keep every step that is taken from it."""
    return leaf.detach() if isinstance(leaf, torch.nn.Parameter) else leaf


def _wide(d: ParamDef) -> ParamDef:
    """A definition in the dtype of its master."""
    return replace(d, dtype=torch.float32) if d.dtype in optim.LOW_PRECISION else d


def _abstract(value: tree.Tree) -> tree.Tree:
    return tree.map(lambda leaf: leaf.detach().to("meta"), value)


def _check_masters(made: tree.Tree, wanted: tree.Tree) -> None:
    """Check that an optimizer made the same kind of state of masters as of parameters.

    Raises:
        ValueError: it keeps no masters, so that their dtypes went into its moments.
    """
    layouts = [[(leaf.dtype, leaf.shape) for leaf in tree.leaves(x)] for x in (made, wanted)]
    if layouts[0] != layouts[1]:
        got = "an optimizer that keeps no masters, or was not told the parameters' dtypes"
        fix = "optim.with_fp32_masters(inner, dtypes), or leave masters out"
        wanted_text = "one that keeps float32 masters"
        refuse("cannot begin with masters", "masters", got, wanted_text, fix)


class Seen(NamedTuple):
    """A step as its metrics see it, before the update overwrites it.

    Attributes:
        state: before the step.
        grads: the gradients, summed over ranks, and without the loss's scale.
        specs: of the parameters.
        grad_specs: of the gradients.
        copies: how many ranks of a pipeline hold each parameter.
        found: the mean ``loss``, and what was found beside it; empty where a pipeline's stages are
            compiled on processes, whose update is a program of its own.
    """

    state: State
    grads: tree.Tree
    specs: tree.Tree
    grad_specs: tree.Tree
    copies: tree.Tree = 1
    found: Mapping[str, Any] = MappingProxyType({})


Metric = Callable[[Seen], Mapping[str, Any]]
"""``metric(seen) -> {name: value}``: numbers of a step, the same on all ranks: a per-rank program.

A value may be a tree of tensors; a part of a parameter or gradient is copied. One that is an
`optim.Norm` is given to the optimizer as well, which need not compute it again.
"""


@public
def grad_norm(seen: Seen) -> Mapping[str, Any]:
    """``grad_norm``, the 2-norm of all gradients together, before clipping: `optim.global_norm`."""
    return grad_norm_of()(seen)


def grad_norm_of(mask: tree.Tree = True, kernels: Kernels = AUTO) -> Metric:
    """The metric ``grad_norm`` of some gradients.

    Args:
        mask: whose, a tree or prefix tree of bools, such as `weight_mask`.
        kernels: of "global_norm"; see `functron.ops.use`.
    """

    def metric(seen: Seen) -> Mapping[str, Any]:
        counted = seen.grads if mask is True else tree.partition(seen.grads, mask)[0]
        norm = optim.global_norm(counted, seen.grad_specs, seen.copies, kernels=kernels)
        return {"grad_norm": optim.Norm.taken(norm, counted)}

    return metric


def layer_norms(layers: optim.Layers, mask: tree.Tree = True) -> Metric:
    """The metric ``layers``: layer by layer the norms of parameters and of their gradients.

    Args:
        layers: of the parameters that train and count.
        mask: these, a tree or prefix tree of bools.
    """

    def metric(seen: Seen) -> Mapping[str, Any]:
        counted = tree.partition(seen.grads, mask)[0]
        present = set(tree.paths(counted))
        params = tree.map_with_path(
            lambda path, leaf: leaf if path in present else None, seen.state.params
        )
        both = {"param_norm": (params, seen.specs), "grad_norm": (counted, seen.grad_specs)}
        return {"layers": optim.norms_by_layer(both, layers, seen.copies)}

    return metric


def _check_tensors(of: str, given: Any) -> None:
    """Raise TypeError unless these are tensors by name, which ranks are seen to agree on."""
    named = given if isinstance(given, Mapping) else {}
    fix = "return a dict of tensors: torch.tensor(number)"
    wanted = "a tensor, which is seen to be the same on all ranks"
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
    """A copy of what shares memory with a state or gradients, which the update overwrites."""
    if isinstance(value, torch.Tensor) and storage_key(compat.plain(value)) in kept:
        return value.clone()
    return value


class Measured(NamedTuple):
    """The numbers that metrics give of a step.

    Attributes:
        record: their numbers, for the step's metrics.
        extra: arguments for the optimizer: ``norm`` where one of them is an `optim.Norm`, and
            ``value``, the loss, where it is known.
    """

    record: dict[str, Any]
    extra: dict[str, Any]


_TAKEN = frozenset({
    "loss", "aux", "targets", "loss_scale", "stuck", "updates", "step", "lr", "tokens",
    "tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes", "samples", "sources", "batch",
    "eval",
})  # fmt: skip
"""Names that a step itself has in its metrics, or a run in its records."""


def measure(metrics: Sequence[Metric], seen: Seen) -> Measured:
    """The numbers of all metrics.

    Raises:
        ValueError: two of them, or one and the step itself, have numbers of the same name.
        TypeError: a metric returns something else than tensors by name.
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
    return Measured(record, extra)


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

    Donates the state: its tensors are updated in place and returned, and the old ones are gone:
    using them raises. Under a transform of torch.func, and where torch's tape tracks the state, the
    batch or what the loss closes over (so within `functron.grad`), it is pure, and nothing is gone:
    derivatives have all terms, and a ``vmap(step)`` of stacked states and batches trains an
    ensemble. On a bound mesh state and batch are this rank's shards, on a simulated one global
    values. From here on the C library keeps the memory that this process frees, up to 2 GiB.

    Args:
        gradients: of `mean_gradients` or `pipeline.gradients`, and their wrappers. Of
            `with_targets` and `without_targets` nothing waits for the number of a batch's targets;
            otherwise it is read on the host in every step (by `jit` before it runs what it
            compiled).
        optimizer: the gradient transformation. A batch without any target changes neither
            parameters nor its state, but for the counts of schedules, which go by batches seen.
        mesh: the ranks; the batch is split over its data axes.
        specs: the specs of the parameters that this process holds, one per parameter.
        batch_specs: how the batch is split, a spec or a tree of them, such as ``gpt.batch_specs()``
            where axes split sequences as well.
        metrics: what is measured of a step, before the update; see `Metric`. (): nothing is.
        replicated_over: axes whose ranks are all meant to do the same work. Any other axis with
            more than one rank must split parameters, the optimizer's state, the batch or stages.

    Returns:
        The step. Its metrics are float scalars ``loss`` (mean over targets) and those of `metrics`;
        with `optim.with_loss_scale` these are of the loss without its scale, and there are
        ``loss_scale`` and ``stuck``, of the next step. Of a batch without any target
        loss and gradients are 0, as are ``targets``, which no other has.
        (A program of `functron.trace` is for batches with targets: others have a loss of NaN.)
        Raises ValueError where the batch does not divide, or the loss is a mean (`check_sum`).
        Collectives: those of the gradients, `sync_gradients`, the optimizer and the metrics.

    Raises:
        ValueError: an axis of the mesh splits nothing; or parameters are split, and `optimizer` is
            neither elementwise nor told how (`optim.transformation`).
    """
    wanted = optimizer.bind(specs).grad_specs(specs)
    g = gradients.bind(mesh, specs, wanted)
    optimizer = optimizer.bind(specs, g.copies)
    layout = state_specs(specs, optimizer)
    check_layout(mesh, optimizer, layout, batch_specs, g.stages, replicated_over)

    def compute(state: State, batch: tree.Tree) -> tuple[dict, tree.Tree, Any]:
        key, scale = random.fold_in(state.key, state.step), optim.loss_scale(state.opt_state)
        num_targets = g.num_targets(batch)
        return *g(state.params, batch, key, num_targets, scale), num_targets

    def update(state: State, found: dict, grads: tree.Tree, num_targets: Any) -> tuple[State, dict]:
        with named_scope("sync"):
            grads = sync_gradients(grads, g.specs, wanted, dtype=g.reduce_dtype)
        with section("update"):
            grads = optim.unscale(grads, optim.loss_scale(state.opt_state))
            seen = measure(metrics, Seen(state, grads, specs, wanted, g.copies, found))
            step_ = optim.step_unless(g.lacks_targets(num_targets), optimizer)
            params, opt_state = step_(grads, state.opt_state, state.params, **seen.extra)
        found = {**found, **seen.record, **optim.scaling_metrics(opt_state)}
        return State(state.step + 1, params, opt_state, state.key), found

    return map_step(compute, update, g, mesh, specs, layout, batch_specs, replicated_over)


@public
def map_step(
    compute: Callable,
    update: Callable,
    g: BoundGradients,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    layout: State,
    batch_specs: tree.Tree = SAMPLES,
    replicated_over: AxisNames = (),
) -> Callable:
    """The step of all ranks: ``update(state, *compute(state, batch))``, mapped over `mesh`.

    It is one program; where a pipeline's stages are compiled on a bound mesh, two: every rank's
    shares leave the first as they are, and enter the second, which is compiled.

    Args:
        compute: ``(state, batch) -> (found, grads, num_targets)`` of a rank, before ranks talk.
        update: ``(state, found, grads, num_targets) -> (state, metrics)`` of a rank.
        g: whose gradients these are. Where it reads the number of targets on the host, so does
            `jit`, and calls the step uncompiled for a batch without any.
        mesh: the ranks.
        specs: of the parameters.
        layout: of the state.
        batch_specs: of the batch.
        replicated_over: as of `functron.make_step`.

    Returns:
        ``(state, batch) -> (state, metrics)``; it donates the state.
    """
    compat.keep_freed_memory()
    look = check_sum(g, mesh, specs, batch_specs) if g.checks_sum else None
    if g.compile is not None and isinstance(mesh, BoundMesh):
        return _two_programs(compute, update, g, mesh, layout, batch_specs, look)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        return update(state, *compute(state, batch))

    over: dict[str, Any] = {"stages": g.stages, "donate": 0, "replicated_over": replicated_over}
    mapped = shard_map(step, mesh, (layout, batch_specs), (layout, P()), **over)
    if look is not None:
        mapped.observe = lambda args, out: look(out[0], args[1])
    if g.targets == "read":
        count = shard_map(g.num_targets, mesh, (batch_specs,), P(), stages=g.stages, check=False)
        mapped.aside = lambda args: g.lacks_targets(count(args[1])) is True
    return mapped


def _two_programs(
    compute: Callable,
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
    taken = jit(split(lambda s, grads: update(s, {}, grads, None), **ends), donate=0, **settings)
    left = split(lambda s, grads: update(s, {}, grads, 0), **ends, donate=0)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        with JointCall("step", mesh, alike=False):  # no rank is left between the two
            found, grads, num_targets = made(state, batch)
            state, more = (left if g.lacks_targets(num_targets) else taken)(state, grads)
            if look is not None:
                look(state, batch)
        return state, {**found, **more}

    return step


def check_layout(
    mesh: Mesh | BoundMesh,
    optimizer: optim.GradientTransformation,
    layout: State,
    batch_specs: tree.Tree,
    stages: str | None = None,
    replicated_over: AxisNames = (),
) -> None:
    """Refuse a step that would compute other numbers on this mesh, or the same on several ranks.

    Args:
        mesh: the ranks.
        optimizer: bound to the specs of the parameters.
        layout: of the state.
        batch_specs: of the batch.
        stages: the axis of a pipeline's ranks.
        replicated_over: axes whose ranks are meant to do the same work.

    Raises:
        ValueError: the optimizer takes parts of parameters for whole ones, or an axis of the mesh
            splits neither state nor batch.
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
    """``(state, batch)``: raises, once, where the loss is a mean: the same for a batch twice.

    Exact but for what samples do to one another (dropout without ``rows``, experts' capacities),
    so a mean is told from a sum in the middle between 1 and 2. A mean of one target by declaration
    (`num_targets` is the same for the batch twice) is a sum, unless microbatches add it up.
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
