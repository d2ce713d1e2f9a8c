"""The training step: loss, gradients, their reduction and the update, as one per-rank program.

`gradients` and `pipelined_gradients` make gradients of a loss; `make_step` takes either, and is
meant to be read, copied into a notebook, and changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from functron import optim
from functron.compiler.jit import jit
from functron.core import compat, random, tree
from functron.core.errors import public, refuse
from functron.core.scopes import named_scope
from functron.ops import AUTO, Kernels
from functron.optim.schedules import advance_schedules
from functron.optim.transformation import multiplied, readable, refuse_parts
from functron.pipeline.execute import Pipeline
from functron.program.recorder import active
from functron.spmd import DATA_AXES, FSDP_AXES, BoundMesh, Mesh, P, shard_map
from functron.spmd.axes import AxisNames
from functron.spmd.mesh import Call
from functron.spmd.params import ParamDef, init_params
from functron.spmd.shard_map import refuse_idle, unsplit_axes
from functron.spmd.simulate import transformed
from functron.spmd.spec import cut_tree, join, whole_over
from functron.transforms import Gather, accumulate, sync_gradients, value_and_grad
from functron.transforms.fsdp import attached, detached, plain, scattered, stand_ins

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


class Shares(NamedTuple):
    """A rank's gradients, before they are summed over ranks, and the facts that this needs.

    Attributes:
        of: ``(params, batch, key, divisor) -> (value, grads)``: the sum of the losses, or a pair of
            it and sums beside it, and this rank's shares of its gradients; losses are divided by
            `divisor`, a number or 0-dim. A per-rank program.
        specs: with which these arrive.
        total: ``(params, batch, key)`` to the sum of the losses.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        num_microbatches: parts that each rank's batch is cut into.
        dtype: the one to sum them over ranks in; None: their own.
        copies: how many ranks of a pipeline hold each parameter.
        axis: of a pipeline's ranks.
        compile: where they are computed by compiled programs of their own, the settings of these.
    """

    of: Callable
    specs: tree.Tree
    total: Callable
    num_targets: Callable
    num_microbatches: int
    dtype: torch.dtype | None = None
    copies: tree.Tree = 1
    axis: str | None = None
    compile: Mapping[str, Any] | None = None


Sharing = Callable[[Mesh | BoundMesh, tree.Tree, tree.Tree], Shares]
"""``(mesh, specs, wanted) -> Shares``: of parameters with these specs, for an optimizer that wants
gradients with others. `gradients` and `pipelined_gradients` return it."""


@public
def gradients(
    loss: Callable,
    num_targets: Callable,
    *,
    num_microbatches: int = 1,
    has_aux: bool = False,
    trainable: tree.Tree = True,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    hoist: bool = False,
    scatter: bool = False,
    encode: Encode | None = None,
) -> Sharing:
    """The gradients of a mean loss, on every rank: for `make_step`.

    Args:
        loss: ``(params, batch, key)`` to the *sum* of the losses over the batch of all ranks.
        num_targets: ``batch`` to the number of terms in that sum, over all ranks.
        num_microbatches: parts that each rank's batch is dealt into to save activation memory, as
            `accumulate` does. With a batch split over its samples every rank holds a contiguous
            part of them, so microbatch m is samples m, m + num_microbatches, ... of the batch on
            every mesh.
        has_aux: `loss` returns ``(sum, aux)``, where aux is a tree of sums that are replicated; the
            sums over microbatches are then in the metrics, as ``aux``.
        trainable: which parameters are differentiated, a tree or prefix tree of bools; the others
            cost no gradients, no reductions and, with ``optim.only(optimizer, trainable)``, which
            is then the optimizer, no state.
        dtype: add up gradients of microbatches in this dtype, such as torch.float32 for bfloat16
            parameters; None: the parameters' own.
        reduce_dtype: sum gradients over ranks in this dtype; None: their own. See `sync_gradients`.
        hoist: gather parameters whose specs mention data axes once, before the microbatches, which
            keeps them whole during a step; `loss` is then given whole ones. Otherwise it gathers
            them where it uses them (`functron.fsdp`), in every microbatch.
        scatter: reduce gradients to what the optimizer wants of each rank (`optim.zero`, or fully
            sharded parameters) in backward, layer by layer and microbatch by microbatch, so that
            only these parts are kept: ZeRO stage 2. Otherwise once, at the end.
        encode: ``(params, specs) -> codes``, once, before the microbatches: `loss` is then given
            parameters with these (`functron.precision.encoder`), and they are what is gathered.
    """
    both = functools.partial(value_and_grad, has_aux=has_aux)

    def shares(mesh: Mesh | BoundMesh, specs: tree.Tree, wanted: tree.Tree) -> Shares:
        used = whole_over(specs, FSDP_AXES) if hoist else specs

        def of(params, batch, key, divisor):
            given, codes = _given(params, specs, used, encode)
            whole, frozen = tree.partition(given, trainable)

            def mean_loss(chosen, microbatch):
                joined = tree.join(chosen, frozen)
                joined = joined if codes is None else attached(joined, codes)
                out = loss(joined, microbatch, key)
                return (out[0] / divisor, out[1]) if has_aux else out / divisor

            if not scatter:
                return accumulate(both(mean_loss), num_microbatches, dtype=dtype)(whole, batch)

            def loss_of_parts(parts, microbatch):
                with scattered(parts, whole, used, wanted, dtype=reduce_dtype) as chosen:
                    return mean_loss(chosen, microbatch)

            parts = stand_ins(whole, used, wanted, dtype=dtype)
            return accumulate(both(loss_of_parts), num_microbatches)(parts, batch)

        def total(params, batch, key):
            out = loss(gathered(params, specs, used), batch, key)
            return out[0] if has_aux else out

        arrived = wanted if scatter else used
        return Shares(of, arrived, total, num_targets, num_microbatches, reduce_dtype)

    return shares


Encode = Callable[[tree.Tree, tree.Tree], tree.Tree]


def _given(
    params: tree.Tree, specs: tree.Tree, used: tree.Tree, encode: Encode | None
) -> tuple[tree.Tree, tree.Tree]:
    """The parameters that microbatches are given, with the specs `used`, and codes or None."""
    if encode is None:
        return gathered(params, specs, used), None
    with named_scope("encode"):
        codes = encode(params, specs)
    if used is specs:
        return params, codes
    whole = Gather(specs)(attached(params, codes))
    return plain(whole), detached(whole)


def _divisor(num_targets: Any, scale: torch.Tensor | None) -> Any:
    """The divisor of sums of losses, such that their mean is times `scale`."""
    return num_targets if scale is None else num_targets / scale


def _unless_none(count: torch.Tensor, before: State, after: State) -> State:
    """The state after a step, or, where the batch has no target, the state before it.

    For programs under a transform, in which `count`, the number of targets, cannot be read: both
    states are there, and one is chosen. Schedules have seen the batch in either.
    """

    def chosen(new: Any, old: Any) -> Any:
        return torch.where(count == 0, old, new)

    params = tree.map(chosen, after.params, before.params)
    left = advance_schedules(before.opt_state)
    return after._replace(params=params, opt_state=tree.map(chosen, after.opt_state, left))


def _at_least_one(count: Any) -> Any:
    """1 in place of 0; a traced program is for batches with targets, and has no operation more."""
    if not isinstance(count, torch.Tensor):
        return count or 1
    return torch.where(count == 0, 1, count) if active() is None else count


Targets = Literal["read", "some", "none"]


def _without_targets(targets: Targets, count: Any) -> bool:
    """Whether a batch has none, of which `count` says how many it has where that can be read."""
    if targets != "read" or (isinstance(count, torch.Tensor) and not readable(count)):
        return targets == "none"
    return bool(count == 0)


@public
def pipelined_gradients(
    stages: Pipeline,
    num_targets: Callable,
    *,
    trainable: tree.Tree = True,
    reduce_dtype: torch.dtype | None = None,
    hoist: bool = False,
    scatter: bool = False,
    encode: Encode | None = None,
    axis: str = "pp",
) -> Sharing:
    """`gradients` of a model whose stages are divided among the ranks of `axis`.

    On a bound mesh the state is that of the parameters that
    `functron.pipeline.Partition.local_defs` says this rank holds, and the optimizer's gradient norm
    must know `functron.pipeline.Partition.copies`. The dtype in which gradients are added up is
    that of `stages`; where these are compiled on a bound mesh, the update is too. Of a simulated
    mesh, `jit` compiles the whole step instead.

    Args:
        stages: the stages under a schedule, which cuts the batch; they share ``(key, total)``: the
            step's key, and the number of targets by which the last stage divides its loss. Metrics
            have ``aux`` where it returns a pair with that.
        num_targets, reduce_dtype, hoist, scatter, encode: as in `gradients`. Parameters that
            `functron.pipeline.Partition.spread` divides among the ranks of `axis` are reduced at
            the end in any case.
        trainable: as in `gradients`, of what this process holds; all, where something is spread.
        axis: the mesh axis of the pipeline's ranks.

    Raises:
        ValueError: parameters are frozen, and others spread among the pipeline's ranks.
    """
    partition, schedule, partly = stages.partition, stages.schedule, trainable is not True
    if partly and partition.spread:
        got = f"{', '.join(partition.spread)} spread over the pipeline's ranks, and frozen ones"
        title = "cannot train a part of these parameters"
        refuse(title, "trainable", got, "True", "train all, or spread nothing")

    def shares(mesh: Mesh | BoundMesh, specs: dict, wanted: dict) -> Shares:
        rank = mesh.coordinate[axis] if isinstance(mesh, BoundMesh) and mesh[axis] > 1 else None
        used = arrived = whole_over(specs, FSDP_AXES) if hoist else specs
        parts = _with_frozen(stages, rank) if partly else stages
        parts = parts if encode is None else _with_codes(parts, rank)
        if scatter:
            spread = partition.spread
            arrived = {name: (used if name in spread else wanted)[name] for name in used}
            parts = _scattering(parts, used, arrived, rank, reduce_dtype)

        def of(params, batch, key, divisor):
            given, codes = _given(params, specs, used, encode)
            whole, frozen = tree.partition(given, trainable)
            before = () if codes is None else (codes,)
            shared = (*before, *((frozen,) if partly else ()), key, divisor)
            if not scatter:
                return parts.value_and_grad(whole, batch, *shared)
            return parts.value_and_grad(stand_ins(whole, used, arrived), batch, whole, *shared)

        def total(params, batch, key):
            whole, one = gathered(params, specs, used), torch.ones((), device=key.device)
            found = stages.forward(whole, batch, key, one)
            return sum(x[0] if isinstance(x, tuple) else x for x in found)

        facts = (num_targets, schedule.num_microbatches, reduce_dtype, partition.copies(rank), axis)
        return Shares(of, arrived, total, *facts, stages.compile)

    return shares


@dataclass(frozen=True, eq=False)
class Norms:
    """The norms that a step measures: of all gradients, and layer by layer.

    Attributes:
        of: whose gradients make up ``grad_norm``, a tree or prefix tree of bools, such as
            `weight_mask`.
        layers: of the parameters that are trained and counted: the norms of these before the
            update, and of their gradients, are in the metrics too; None: ``grad_norm`` alone.
        kernels: of ``"global_norm"``; see `functron.ops.use`.
    """

    of: tree.Tree = True
    layers: optim.Layers | None = None
    kernels: Kernels = AUTO


_ALL = Norms()


@public
def make_step(
    gradients: Sharing,
    optimizer: optim.GradientTransformation,
    mesh: Mesh | BoundMesh,
    specs: tree.Tree,
    *,
    batch_specs: tree.Tree = _SAMPLES,
    norms: Norms | None = _ALL,
    replicated_over: AxisNames = (),
    targets: Targets = "read",
    check: bool = True,
) -> Callable:
    """The function ``(state, batch) -> (state, metrics)`` that takes one optimization step.

    Donates the state: its tensors are updated in place and returned, and the old ones are gone:
    using them raises. Under a transform of torch.func, and where torch's tape tracks the state, the
    batch or what the loss closes over (so within `functron.grad`), it is pure, and nothing is gone:
    derivatives have all terms, and a ``vmap(step)`` of stacked states and batches trains an
    ensemble. On a bound mesh state and batch
    are this rank's shards, on a simulated one global values. From here on the C library keeps the
    memory that this process frees, up to 2 GiB.

    Args:
        gradients: of `gradients`, or of `pipelined_gradients`.
        optimizer: the gradient transformation. A batch without any target changes neither
            parameters nor its state, but for the counts of schedules, which go by batches seen.
        mesh: the ranks; the batch is split over its data axes.
        specs: the specs of the parameters that this process holds, one per parameter.
        batch_specs: how the batch is split, a spec or a tree of them, such as ``gpt.batch_specs()``
            where axes split sequences as well.
        norms: the norms to measure; None: ``grad_norm`` is not in the metrics, nor computed unless
            `optimizer` clips by it.
        replicated_over: axes whose ranks are all meant to do the same work. Any other axis with
            more than one rank must split parameters, the optimizer's state, the batch or stages.
        targets: whether batches have any. ``"read"``: their number is read on the host in every
            step (by `jit` before it runs what it compiled), which waits for a GPU. ``"some"``: the
            caller knows that they do, and nothing waits. ``"none"``: that they have none.
        check: after the first step, see that the loss is a sum and no mean: of one sample of each
            rank and microbatch of a pipeline, and of the same sample twice, without gradients,
            once.

    Returns:
        The step. Its metrics are float scalars ``loss`` (mean over targets) and ``grad_norm``
        (before clipping; of the same gradients as an `optim.clip_by_global_norm` at the head of
        `optimizer`, it is computed once for both). With `optim.with_loss_scale` these are of the
        loss without its scale, and there are ``loss_scale`` and ``stuck``, the `Scaling` of the
        next step. Of a batch without any target both are 0, as are ``targets``, which no other has.
        (A program of `functron.trace` is for batches with targets: others have a loss of NaN.)
        Raises ValueError where the batch does not divide, or the loss is a mean.
        Collectives: those of the gradients, `sync_gradients`, the optimizer and the norms.

    Raises:
        ValueError: an axis of the mesh splits nothing; or parameters are split, and `optimizer` is
            neither elementwise nor told how (`optim.transformation`).
    """
    compat.keep_freed_memory()
    wanted = optimizer.bind(specs).grad_specs(specs)
    shares = gradients(mesh, specs, wanted)
    optimizer, axis = optimizer.bind(specs, shares.copies), shares.axis
    refuse_parts(
        "make_step: the optimizer takes parts for whole ones", optimizer, specs, mesh, axis
    )
    layout = state_specs(specs, optimizer)
    _check_work(mesh, (layout, batch_specs), replicated_over, axis)

    def first(state: State, batch: tree.Tree) -> tuple[Any, tree.Tree, Any]:
        key = random.fold_in(state.key, state.step)
        scaling, count = optimizer.loss_scale, shares.num_targets(batch)
        scale = None if scaling is None else scaling(state.opt_state).scale
        divisor = _divisor(count if targets == "some" else _at_least_one(count), scale)
        value, grads = shares.of(state.params, batch, key, divisor)
        if scale is not None:
            loss, *aux = value if isinstance(value, tuple) else (value,)
            value = (loss / scale, *aux) if aux else loss / scale
        return value, grads, count

    def second(state: State, grads: tree.Tree, idle: bool = False) -> tuple[State, dict]:
        with named_scope("sync"):
            grads = sync_gradients(grads, shares.specs, wanted, dtype=shares.dtype)
        with named_scope("update"), _marking(mesh, "update"):
            if optimizer.loss_scale is not None:
                grads = _unscaled(grads, optimizer.loss_scale(state.opt_state).scale)
            grads = tree.map(torch.zeros_like, grads) if idle else grads
            found, known = _measured(norms, grads, state.params, optimizer, specs, shares.copies)
            params, opt_state = state.params, state.opt_state
            if idle:
                opt_state = advance_schedules(opt_state)
            else:
                params, opt_state = optimizer.step_(grads, opt_state, params, **known)
            if optimizer.loss_scale is not None:
                scaling = optimizer.loss_scale(opt_state)
                found |= {"loss_scale": scaling.scale, "stuck": scaling.stuck}
        return State(state.step + 1, params, opt_state, state.key), found

    def step(state: State, batch: tree.Tree) -> tuple[State, dict]:
        value, grads, count = first(state, batch)
        idle = _without_targets(targets, count)
        after, found = second(state, grads, idle)
        if targets == "read" and isinstance(count, torch.Tensor) and transformed():
            after = _unless_none(count, state, after)
        return after, _metrics(value, found, idle)

    look = _sum_check(shares, mesh, specs, batch_specs) if check else None
    if shares.compile is None or not isinstance(mesh, BoundMesh):
        mapped = shard_map(
            step,
            mesh,
            (layout, batch_specs),
            (layout, P()),
            stages=axis,
            donate=0,
            replicated_over=replicated_over,
        )
        if look is not None:
            mapped.observe = lambda args, out: look(out[0], args[1])
        if targets == "read":
            counted = functools.partial(shard_map, mesh=mesh, stages=axis, check=False)
            count = counted(shares.num_targets, in_specs=(batch_specs,), out_specs=P())
            mapped.aside = lambda args: _without_targets(targets, count(args[1]))
        return mapped
    # every rank's own shares leave the first program as they are, and enter the second
    split = functools.partial(shard_map, mesh=mesh, stages=axis, check=False)
    made = split(first, in_specs=(layout, batch_specs), out_specs=P())
    rest = split(second, in_specs=(layout, shares.specs), out_specs=(layout, P()))
    taken = jit(rest, donate=0, **shares.compile)
    nothing = functools.partial(second, idle=True)
    left = split(nothing, in_specs=(layout, shares.specs), out_specs=(layout, P()), donate=0)

    def two_programs(state: State, batch: tree.Tree) -> tuple[State, dict]:
        with Call("step", mesh, alike=False):  # no rank is left between the two
            value, grads, count = made(state, batch)
            idle = _without_targets(targets, count)
            state, found = (left if idle else taken)(state, grads)
            if look is not None:
                look(state, batch)
        return state, _metrics(value, found, idle)

    return two_programs


def _marking(mesh: Mesh | BoundMesh, section: str) -> AbstractContextManager[None]:
    """A with block whose time is that of a section of the step, where somebody records it."""
    recorder = mesh.recorder if isinstance(mesh, BoundMesh) else None
    return nullcontext() if recorder is None else recorder.marking(section)


def _check_work(
    mesh: Mesh | BoundMesh, specs: tree.Tree, meant: AxisNames, stages: str | None
) -> None:
    known = {stages, *((meant,) if isinstance(meant, str) else meant)}
    idle = [name for name in unsplit_axes(mesh, specs) if name not in known]
    refuse_idle(f"make_step on Mesh({mesh})", mesh, idle)


def _unscaled(grads: tree.Tree, scale: torch.Tensor) -> tree.Tree:
    """The gradients of the loss without its scale; those in low precision in float32."""
    low = optim.LOW_PRECISION
    return multiplied(tree.map(lambda g: g.float() if g.dtype in low else g, grads), 1 / scale)


def _measured(
    norms: Norms | None,
    grads: tree.Tree,
    params: tree.Tree,
    optimizer: optim.GradientTransformation,
    specs: tree.Tree,
    copies: tree.Tree,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The norms for the metrics, and what ``optimizer.step_`` need not compute again."""
    if norms is None:
        return {}, {}
    wanted, counted = optimizer.grad_specs(specs), tree.partition(grads, norms.of)[0]
    clipped, known = optimizer.norm, {}
    if clipped is not None and _same_leaves(clipped.of(grads), counted):
        norm = known["norm"] = clipped.value(grads)
    else:
        norm = optim.global_norm(counted, wanted, copies, kernels=norms.kernels)
    found: dict[str, Any] = {"grad_norm": norm}
    if norms.layers is not None:
        both = {"param_norm": (_like(params, counted), specs), "grad_norm": (counted, wanted)}
        found["layers"] = optim.norms_by_layer(both, norms.layers, copies)
    return found, known


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


def _sum_check(
    shares: Shares, mesh: Mesh | BoundMesh, specs: tree.Tree, batch_specs: tree.Tree
) -> Callable[[State, tree.Tree], None]:
    """``(state, batch)``: raises, once, where the loss is a mean: the same for a batch twice.

    Exact but for what samples do to one another (dropout without ``rows``, experts' capacities),
    so a mean is told from a sum in the middle between 1 and 2. A mean of one target by declaration
    (`num_targets` is the same for the batch twice) is a sum, unless microbatches add it up.
    """
    stages, num_microbatches = shares.axis, shares.num_microbatches

    def twice(leaf: torch.Tensor, count: int) -> torch.Tensor:
        """`count` times the first sample of every microbatch."""
        parts = num_microbatches if stages is not None else 1
        rows = leaf.unflatten(0, (parts, -1))[:, :1]
        return rows.expand(parts, count, *leaf.shape[1:]).flatten(0, 1)

    def numbers(params, batch, key):
        each = [tree.map(lambda leaf, n=n: twice(leaf, n), batch) for n in (1, 2)]
        total = functools.partial(shares.total, params, key=key)
        return [f(x) for x in each for f in (total, shares.num_targets)]

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
        refuse("cannot train on this loss", "loss", got, wanted, fix)

    return look


def _with_frozen(stages: Pipeline, rank: int | None) -> Pipeline:
    """`stages` of what is differentiated; the other parameters are the first that is shared."""
    partition = stages.partition

    def stage(part, chosen, x, batch, frozen, *shared):
        rest = partition.stage_params(frozen, partition.layout.index(part), rank)
        return stages.stage(part, tree.join(chosen, rest), x, batch, *shared)

    return Pipeline(stage, partition, stages.schedule, stages.dtype, stages.compile, stages.observe)


def _with_codes(stages: Pipeline, rank: int | None) -> Pipeline:
    """`stages` of parameters with codes, which are the first of what microbatches share."""
    partition = stages.partition

    def stage(part, params, x, batch, codes, *shared):
        mine = partition.stage_params(codes, partition.layout.index(part), rank)
        return stages.stage(part, attached(params, mine), x, batch, *shared)

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


def _metrics(value: Any, norms: dict, idle: bool) -> dict:
    """The metrics of a step with the loss `value`, or with a pair of it and sums beside it."""
    loss, *aux = value if isinstance(value, tuple) else (value,)
    metrics = {"loss": loss, **norms}
    if idle:
        zero = torch.zeros_like(loss)
        metrics |= {"loss": zero, "targets": zero.to(torch.int64)}
    return {**metrics, "aux": aux[0]} if aux else metrics
