"""The training step: loss, gradients, their reduction and the update, as one per-rank program.

`make_step` is meant to be read, copied into a notebook, and changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functron import optim
from functron.compiler.jit import jit
from functron.core import random, tree
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.ops import AUTO, Kernels
from functron.params import ParamDef, init_params
from functron.pipeline.execute import Pipeline
from functron.spmd import DATA_AXES, FSDP_AXES, BoundMesh, Mesh, P, shard_map
from functron.spmd.axes import AxisNames
from functron.spmd.shard_map import refuse_idle, unsplit_axes
from functron.spmd.shards import cut_tree, join, whole_over
from functron.transforms import accumulate, sync_gradients, value_and_grad
from functron.transforms.scattered import scattered, stand_ins

_SAMPLES = P(DATA_AXES)


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

    Args:
        key: a key of `functron.random`; the state lives on its device.
        defs: the parameters' `ParamDef`s.
        specs: their specs, one per parameter.
        optimizer: the gradient transformation that will update them.
        mesh: simulated (global values) or bound (this rank's shards).
        params: to begin with; None: random ones.
        masters: what the parameters are rounded from, for an optimizer that keeps float32 masters
            of those in low precision (``optim.with_fp32_masters(inner, dtypes)``, or
            `optim.make_optimizer` with `defs`): without, masters begin with rounded values. A tree
            like the parameters, such as a pretrained model in float32, in place of `params`; True:
            random ones, drawn in float32.

    Raises:
        ValueError: masters for an optimizer that keeps none; or `params` and masters.
    """
    init_key, step_key = random.split(key).unbind(0)
    optimizer = optimizer.bind(specs)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    # every rank makes its own part; axes of a pipeline are as good as any others for that
    init = shard_map(optimizer.init, mesh, (specs,), optimizer.specs(specs), check=False)
    if masters is False:
        weights = init_params(init_key, defs, specs, mesh) if params is None else params
        return State(zero, weights, init(weights), step_key)
    if params is not None:
        problem = Problem("params", "given beside masters", "None: they are the rounded masters")
        raise_problems("two sets of initial values", [problem])
    if masters is True:
        masters = init_params(init_key, tree.map(_wide, defs), specs, mesh)
    weights = tree.map(lambda master, d: master.to(d.dtype), masters, defs)
    _check_masters(init(_abstract(masters)), init(_abstract(weights)))
    return State(zero, weights, init(masters), step_key)


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
        raise_problems("cannot begin with masters", [Problem("masters", got, wanted_text, fix)])


@public
def make_step(
    loss: Callable,
    num_targets: Callable,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    *,
    num_microbatches: int = 1,
    scatter: bool = False,
    hoist: bool = False,
    grad_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    trainable: tree.Tree = True,
    batch_specs: tree.Tree = _SAMPLES,
    normed: tree.Tree = True,
    has_aux: bool = False,
    layers: optim.Layers | None = None,
    kernels: Kernels = AUTO,
    replicated_over: AxisNames = (),
    check: bool = True,
) -> Callable:
    """The function ``(state, batch) -> (state, metrics)`` that takes one optimization step.

    Donates the state: its tensors are updated in place and returned, and the old ones are gone:
    using them raises. On a bound mesh state and batch are this rank's shards, on a simulated one
    global values.

    Args:
        loss: ``(params, batch, key)`` to the *sum* of the losses over the batch of all ranks.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        optimizer: the gradient transformation.
        mesh: the ranks; the batch is split over its data axes.
        specs: the parameters' specs, one per parameter.
        num_microbatches: parts that each rank's batch is dealt into to save activation memory, as
            `accumulate` does. With `batch_specs` every rank holds a contiguous part of the samples,
            so microbatch m is samples m, m + num_microbatches, ... of the batch on every mesh.
        scatter: reduce gradients to what the optimizer wants of each rank (`optim.zero`, or fully
            sharded parameters) in backward, layer by layer and microbatch by microbatch, so that
            only these parts are kept: ZeRO stage 2. Otherwise once, at the end.
        hoist: gather parameters whose specs mention data axes once, before the microbatches, which
            keeps them whole during a step; `loss` is then given whole ones. Otherwise it gathers
            them where it uses them (`functron.fsdp`), in every microbatch.
        grad_dtype: add up gradients of microbatches in this dtype, such as torch.float32 for
            bfloat16 parameters; None: the parameters' own.
        reduce_dtype: sum gradients over ranks in this dtype; None: their own. See `sync_gradients`.
        trainable: which parameters are differentiated, a tree or prefix tree of bools; the others
            cost no gradients, no reductions and, with ``optim.only(optimizer, trainable)``, which
            is then to be passed as `optimizer`, no state.
        batch_specs: how the batch is split, a spec or a tree of them, such as ``gpt.batch_specs()``
            where axes split sequences as well.
        normed: whose gradients make up ``grad_norm``, a tree or prefix tree of bools, such as
            `weight_mask`; False: nobody's, and the norm is not in the metrics, nor computed unless
            `optimizer` clips by it.
        has_aux: `loss` returns ``(sum, aux)``, where aux is a tree of sums that are replicated; the
            sums over microbatches are then in the metrics, as ``aux``.
        layers: of the parameters that are trained and `normed`: the norms of these, before the
            update, and of their gradients are in the metrics too; see `update`.
        kernels: of ``"global_norm"``; see `functron.ops.use`.
        replicated_over: axes whose ranks are all meant to do the same work. Any other axis with
            more than one rank must split parameters, the optimizer's state or the batch.
        check: after the first step, see that `loss` is a sum and no mean: of one sample of each
            rank and of the same sample twice, without gradients, once.

    Returns:
        The step. Its metrics are float scalars ``loss`` (mean over targets) and ``grad_norm``
        (before clipping; of the same gradients as an `optim.clip_by_global_norm` at the head of
        `optimizer`, it is computed once for both). Raises ValueError where the batch does not
        divide, or `loss` is a mean.

    Raises:
        ValueError: an axis of the mesh splits nothing.
    """

    optimizer = optimizer.bind(specs)
    layout = state_specs(specs, optimizer)
    _check_work("make_step", mesh, (layout, batch_specs), replicated_over)
    _check_normed(normed, layers)
    used = whole_over(specs, FSDP_AXES) if hoist else specs
    wanted = optimizer.grad_specs(specs)
    both = functools.partial(value_and_grad, has_aux=has_aux)

    def gradients(params, batch, key, total):
        def mean_loss(chosen, microbatch):
            out = loss(tree.join(chosen, frozen), microbatch, key)
            return (out[0] / total, out[1]) if has_aux else out / total

        whole, frozen = tree.partition(gathered(params, specs, used), trainable)
        if not scatter:
            summed = accumulate(both(mean_loss), num_microbatches, dtype=grad_dtype)
            return summed(whole, batch)

        def loss_of_parts(parts, microbatch):
            with scattered(parts, whole, used, wanted, dtype=reduce_dtype) as chosen:
                return mean_loss(chosen, microbatch)

        parts = stand_ins(whole, used, wanted, dtype=grad_dtype)
        return accumulate(both(loss_of_parts), num_microbatches)(parts, batch)

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        key = random.fold_in(state.key, state.step)
        value, grads = gradients(state.params, batch, key, num_targets(batch))
        how = {"arrived": wanted if scatter else used, "dtype": reduce_dtype, "normed": normed}
        how |= {"layers": layers, "kernels": kernels}
        state, norms = update(state, grads, optimizer, specs, **how)
        return state, _metrics(value, norms)

    def total(params, batch, key):
        out = loss(gathered(params, specs, used), batch, key)
        return out[0] if has_aux else out

    how = {"donate": 0, "replicated_over": replicated_over}
    mapped = shard_map(step, mesh, (layout, batch_specs), (layout, P()), **how)
    if check:
        look = _sum_check(total, num_targets, mesh, specs, batch_specs, num_microbatches)
        mapped.observe = lambda args, out: look(out[0], args[1])
    return mapped


def _check_work(
    what: str, mesh: Mesh | BoundMesh, specs: tree.Tree, meant: AxisNames, stages: str = ""
) -> None:
    known = {stages, *((meant,) if isinstance(meant, str) else meant)}
    idle = [name for name in unsplit_axes(mesh, specs) if name not in known]
    refuse_idle(f"{what} on Mesh({mesh})", mesh, idle)


def update(
    state: State,
    grads: tree.Tree,
    optimizer: optim.GradientTransformation,
    specs: tree.Tree,
    copies: tree.Tree = 1,
    *,
    arrived: tree.Tree = None,
    dtype: torch.dtype | None = None,
    normed: tree.Tree = True,
    layers: optim.Layers | None = None,
    kernels: Kernels = AUTO,
) -> tuple[State, dict]:
    """The state after a step, from every rank's shares of the gradients, and norms.

    Donates `state` and `grads`. Collectives: those of `sync_gradients`, the optimizer, with
    `layers` `optim.norms_by_layer`, and `optim.global_norm` where the optimizer does not clip by
    the same norm.

    Args:
        state: before the step.
        grads: as `value_and_grad` returns them.
        optimizer: the gradient transformation.
        specs: the parameters' specs.
        copies: how many ranks of a pipeline hold each parameter.
        arrived: the specs with which the gradients come; None: the parameters'.
        dtype: sum gradients over ranks in this dtype; None: their own.
        normed, kernels: whose gradients the norm is of (False: no norm), and what sums it; as in
            `make_step`.
        layers: whose norms are wanted, each by itself; None: no more than that of all gradients.

    Returns:
        The state, and ``{"grad_norm"?, "layers"?}``: the norm of all gradients that count; and
        ``param_norm`` (before the update) and ``grad_norm`` of `layers`, in their order.
    """
    wanted = optimizer.grad_specs(specs)
    with named_scope("sync"):
        grads = sync_gradients(grads, specs if arrived is None else arrived, wanted, dtype=dtype)
    with named_scope("update"):
        counted = tree.partition(grads, normed)[0]
        norms: dict[str, Any] = {}
        shared = {}
        clipped = optimizer.norm if normed is not False else None
        if clipped is not None and _same_leaves(clipped.of(grads), counted):
            norms["grad_norm"] = shared["norm"] = clipped.value(grads)
        elif normed is not False:
            norms["grad_norm"] = optim.global_norm(counted, wanted, copies, kernels=kernels)
        if layers is not None:
            own = _like(state.params, counted)
            both = {"param_norm": (own, specs), "grad_norm": (counted, wanted)}
            norms["layers"] = optim.norms_by_layer(both, layers, copies)
        params, opt_state = optimizer.step_(grads, state.opt_state, state.params, **shared)
    return State(state.step + 1, params, opt_state, state.key), norms


def _check_normed(normed: tree.Tree, layers: optim.Layers | None) -> None:
    if normed is False and layers is not None:
        problem = Problem("layers", "layers, with normed=False", "None", "say whose norms they are")
        raise_problems("norms by layer are of the gradients that are normed", [problem])


def _same_leaves(a: tree.Tree, b: tree.Tree) -> bool:
    """Whether two trees hold just the same tensors."""
    return list(map(id, tree.leaves(a))) == list(map(id, tree.leaves(b)))


def _like(params: tree.Tree, some: tree.Tree) -> tree.Tree:
    """The parameters where `some` has a leaf; None elsewhere."""
    present = set(tree.paths(some))
    return tree.map_with_path(lambda path, leaf: leaf if path in present else None, params)


def gathered(params: tree.Tree, specs: tree.Tree, into: tree.Tree) -> tree.Tree:
    """The parameters gathered over the axes that `specs` mention and `into` does not."""
    leaves, structure = tree.flatten(params)
    with named_scope("gather"):
        rows = zip(leaves, cut_tree(into, specs, params), strict=True)
        return tree.unflatten(structure, [join(leaf, cuts) for leaf, cuts in rows])


@public
def make_pipelined_step(
    stages: Pipeline,
    num_targets: Callable,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    *,
    axis: str = "pp",
    compile: bool = False,  # noqa: A002  (as the function that it is for)
    scatter: bool = False,
    hoist: bool = False,
    reduce_dtype: torch.dtype | None = None,
    trainable: tree.Tree = True,
    batch_specs: tree.Tree = _SAMPLES,
    normed: tree.Tree = True,
    layers: optim.Layers | None = None,
    kernels: Kernels = AUTO,
    replicated_over: AxisNames = (),
    check: bool = True,
) -> Callable:
    """`make_step` for a model whose stages are divided among the ranks of `axis`.

    State and batch are those of `make_step`; on a bound mesh the state is that of the parameters
    that `Partition.local_defs` says this rank holds, and the optimizer's gradient norm must know
    `Partition.copies`.

    Args:
        stages: the stages under a schedule, which cuts the batch; they share ``(key, total)``: the
            step's key, and the number of targets by which the last stage divides its loss.
        num_targets, optimizer, mesh: as in `make_step`.
        specs: the specs of the parameters that this process holds.
        axis: the mesh axis of the pipeline's ranks.
        compile: compile the update, on a bound mesh, as `pipelined` compiles the stages. Of a
            simulated mesh, `jit` compiles the whole step instead.
        scatter, hoist, reduce_dtype: as in `make_step`. What `Partition.spread` divides among the
            pipeline's ranks is reduced at the end in any case. The dtype in which gradients are
            added up is that of `stages`.
        trainable: as in `make_step`, of what this process holds; all, where something is spread.
        batch_specs, normed, layers, kernels, replicated_over: as in `make_step`; `normed` of what
            this process holds.
        check: as in `make_step`, of one sample of each microbatch, and of what the last stage
            returns for a number of targets of 1.

    Returns:
        The step; see `make_step`. Its metrics have ``aux`` too where the last stage returns that.

    Raises:
        ValueError: parameters are frozen, and others spread among the pipeline's ranks; an axis of
            the mesh splits nothing.
    """
    _check_normed(normed, layers)
    rank = mesh.coordinate[axis] if isinstance(mesh, BoundMesh) and mesh[axis] > 1 else None
    copies = stages.partition.copies(rank)
    plain = stages

    optimizer = optimizer.bind(specs, copies)
    layout = state_specs(specs, optimizer)
    _check_work("make_pipelined_step", mesh, (layout, batch_specs), replicated_over, axis)
    used = whole_over(specs, FSDP_AXES) if hoist else specs
    arrived, partly = used, trainable is not True
    if partly:
        stages = _with_frozen(stages, rank)
    if scatter:
        spread = stages.partition.spread
        wanted = optimizer.grad_specs(specs)
        arrived = {name: (used if name in spread else wanted)[name] for name in used}
        stages = _scattering(stages, used, arrived, rank, reduce_dtype)

    def gradients(state: State, batch: tree.Tree) -> tuple[Any, tree.Tree]:
        key = random.fold_in(state.key, state.step)
        whole, frozen = tree.partition(gathered(state.params, specs, used), trainable)
        shared = (*((frozen,) if partly else ()), key, num_targets(batch))
        if not scatter:
            return stages.value_and_grad(whole, batch, *shared)
        parts = stand_ins(whole, used, arrived)
        return stages.value_and_grad(parts, batch, whole, *shared)

    def updated(state: State, grads: tree.Tree) -> tuple[State, dict]:
        how = {"arrived": arrived, "dtype": reduce_dtype, "normed": normed, "kernels": kernels}
        return update(state, grads, optimizer, specs, copies, layers=layers, **how)

    if compile and isinstance(mesh, BoundMesh):
        # every rank's own shares leave the first program as they are, and enter the second
        first = shard_map(gradients, mesh, (layout, batch_specs), P(), stages=axis, check=False)
        last = shard_map(updated, mesh, (layout, arrived), (layout, P()), stages=axis, check=False)
        second = jit(last, donate=0)
    else:
        first, second = gradients, updated

    def total(params, batch, key):
        whole, one = gathered(params, specs, used), torch.ones((), device=key.device)
        return sum(
            x[0] if isinstance(x, tuple) else x for x in plain.forward(whole, batch, key, one)
        )

    count = plain.schedule.num_microbatches
    look = _sum_check(total, num_targets, mesh, specs, batch_specs, count, axis) if check else None

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        value, grads = first(state, batch)
        state, norms = second(state, grads)
        if look is not None and first is not gradients:
            look(state, batch)
        return state, _metrics(value, norms)

    if first is not gradients:
        return step
    how = {"stages": axis, "donate": 0, "replicated_over": replicated_over}
    mapped = shard_map(step, mesh, (layout, batch_specs), (layout, P()), **how)
    if look is not None:
        mapped.observe = lambda args, out: look(out[0], args[1])
    return mapped


def _sum_check(
    total: Callable,
    num_targets: Callable,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    batch_specs: tree.Tree,
    num_microbatches: int,
    stages: str | None = None,
) -> Callable[[State, tree.Tree], None]:
    """``(state, batch)``: raises, once, where the loss is a mean: the same for a batch twice.

    Exact but for what samples do to one another (dropout without ``rows``, experts' capacities),
    so a mean is told from a sum in the middle between 1 and 2. A mean of one target by declaration
    (`num_targets` is the same for the batch twice) is a sum, unless microbatches add it up.

    Args:
        total: ``(params, batch, key)`` to the loss.
        num_targets, mesh, specs, batch_specs, num_microbatches: of `make_step`.
        stages: the axis of a pipeline's ranks.
    """

    def twice(leaf: torch.Tensor, count: int) -> torch.Tensor:
        """`count` times the first sample of every microbatch."""
        parts = num_microbatches if stages is not None else 1
        rows = leaf.unflatten(0, (parts, -1))[:, :1]
        return rows.expand(parts, count, *leaf.shape[1:]).flatten(0, 1)

    def numbers(params, batch, key):
        each = [tree.map(lambda leaf, n=n: twice(leaf, n), batch) for n in (1, 2)]
        return [f(x) for x in each for f in (lambda b: total(params, b, key), num_targets)]

    mapped = shard_map(numbers, mesh, (specs, batch_specs, P()), P(), check=False, stages=stages)
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
                "fix: pass check=False where it needs whole batches"
            )
            raise
        done = count != 0  # the first samples may have no targets
        added_up = num_microbatches > 1 or counts > count
        if not once or not added_up or not again / once < 1.5:
            return
        got = f"{once:.6g} for a sample of each rank, and {again:.6g} for each sample twice: a mean"
        wanted = "the sum over the targets of all ranks, which is divided by num_targets later"
        fix = "return lax.psum(losses.sum(), ft.DATA_AXES), not a mean of the losses"
        raise_problems("cannot train on this loss", [Problem("loss", got, wanted, fix)])

    return look


def _with_frozen(stages: Pipeline, rank: int | None) -> Pipeline:
    """`stages` of what is differentiated; the other parameters are the first that is shared."""
    partition = stages.partition
    if partition.spread:
        got = f"{', '.join(partition.spread)} spread over the pipeline's ranks, and frozen ones"
        problem = Problem("trainable", got, "True", "train all, or spread nothing")
        raise_problems("cannot train a part of these parameters", [problem])

    def stage(part, chosen, x, batch, frozen, *shared):
        rest = partition.stage_params(frozen, partition.layout.index(part), rank)
        return stages.stage(part, tree.join(chosen, rest), x, batch, *shared)

    return Pipeline(stage, partition, stages.schedule, stages.dtype, stages.compile, stages.observe)


def _scattering(
    stages: Pipeline,
    specs: dict,
    into: dict,
    rank: int | None,
    dtype: torch.dtype | None,
) -> Pipeline:
    """`stages` of parts of the parameters; whole ones are the first of what microbatches share."""
    partition = stages.partition

    def stage(part, parts, x, batch, whole, *shared):
        number = partition.layout.index(part)
        names = partition.names(number)
        mine = partition.stage_params(whole, number, rank)
        before, after = ({name: tree_[name] for name in names} for tree_ in (specs, into))
        with scattered(parts, mine, before, after, dtype=dtype) as params:
            return stages.stage(part, params, x, batch, *shared)

    return Pipeline(stage, partition, stages.schedule, stages.dtype, stages.compile, stages.observe)


def _metrics(value: Any, norms: dict) -> dict:
    """The metrics of a step with the loss `value`, or with a pair of it and sums beside it."""
    loss, *aux = value if isinstance(value, tuple) else (value,)
    metrics = {"loss": loss, **norms}
    return {**metrics, "aux": aux[0]} if aux else metrics
