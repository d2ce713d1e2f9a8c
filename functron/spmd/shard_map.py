"""shard_map: one per-rank program, mapped over a mesh.

A program runs on the simulator, or in this process with its axes bound to process groups.
"""

from __future__ import annotations

import copy
import functools
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from functron.core import compat, tree
from functron.core.closure import call_on_tape, find_orphans, find_tensors, hoist, refuse_holders
from functron.core.errors import ORPHAN, Problem, dataclass_fix, nearest, public, raise_problems
from functron.core.tables import Table, shows_table
from functron.spmd import spec as sharding
from functron.spmd.axes import (
    AxisNames,
    BoundAxis,
    Scope,
    StageAxis,
    TracedAxis,
    bind,
    enter,
    raise_lost,
    scope,
    source_line,
    unwinding,
    user_line,
)
from functron.spmd.collectives import all_gather
from functron.spmd.donation import Donation, check_consumable, refuse_donated
from functron.spmd.mesh import STANDARD_AXES, BoundMesh, JointCall, Mesh
from functron.spmd.primitives import InputReplicated, OutputReplicated, call_unmentioned
from functron.spmd.simulate import (
    LineRecorder,
    VaryingOutputError,
    check_outputs,
    explain_error,
    run_ranks,
)
from functron.spmd.spec import P, dim_axes, is_spec, is_uneven, spec_axes, validate
from functron.spmd.spec import shard as shard_one


def bound_axes(mesh: BoundMesh) -> tuple[list[BoundAxis], list[str]]:
    """The axes of `mesh` that communicate, and the names of those of size 1."""
    told = mesh.recorder, mesh.membership
    axes = [
        BoundAxis(name, size, mesh.coordinate[name], mesh.groups[name], None, *told)
        for name, size in mesh.shape.items()
        if size > 1
    ]
    return axes, [name for name, size in mesh.shape.items() if size == 1]


def check_shapes(name: str, mesh: BoundMesh, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Check that all ranks of `mesh` call a program with shards of the same shapes and dtypes.

    Collectives: an all-reduce of 16 bytes per axis, and an all-gather of the shapes where they
    differ. Without it gloo would end a process in the first collective that they enter.

    Raises:
        ValueError: (on every rank) they do not; with the arguments that differ, and where.
    """
    rows = zip(paths, leaves, strict=True)
    mine = {
        path: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for path, leaf in rows
        if isinstance(leaf, torch.Tensor)
    }
    number = zlib.crc32(repr(mine).encode())
    with compat.no_transforms(), compat.no_dispatch_modes():
        highest, lowest = _find_max(mesh, number, -number)
        if highest == -lowest:
            return
        everywhere: Any = [(mesh.coordinate, mine)]
        for axis in bound_axes(mesh)[0]:
            parts: list = [None] * axis.size
            dist.all_gather_object(parts, everywhere, compat.group(axis.group))
            everywhere = [row for part in parts for row in part]
    found = []
    for path in dict.fromkeys(path for _, shapes in everywhere for path in shapes):
        by_shape: dict[str, str] = {}
        for at, shapes in everywhere:
            where = ",".join(f"{axis}={index}" for axis, index in at.items())
            by_shape.setdefault(shapes.get(path, "nothing"), where)
        if len(by_shape) > 1:
            got = ", ".join(f"{shape} on rank {where}" for shape, where in by_shape.items())
            fix = "cut global values with functron.shard, which gives every rank the same shapes"
            found.append(Problem(f"argument {path}", got, "one shape on all ranks", fix))
    raise_problems(f"{name} at {user_line()}: ranks disagree about its arguments", found)


def _find_max(mesh: BoundMesh, *numbers: int) -> list[int]:
    """The largest of all ranks' numbers, by an all-reduce per axis."""
    found = torch.tensor(numbers, device=mesh.device_type)
    for axis in bound_axes(mesh)[0]:
        found = axis.send("pmax", found)
    return found.tolist()


def check_on_first(mesh: BoundMesh, check: Callable[[], Exception | None]) -> Exception | None:
    """The error that `check()` finds on the first rank; where it finds one, each rank's own.

    For a check that simulates all ranks: each would do the same work, and those that share a
    machine would be in each other's way. Collectives: an all-reduce of 8 bytes per axis.
    """
    found = check() if mesh.rank == 0 else None
    with compat.no_transforms(), compat.no_dispatch_modes():
        (any_found,) = _find_max(mesh, int(found is not None))
    return check() if any_found and mesh.rank != 0 else found


def _call_at_boundary(primitive: type, axes: Sequence, value: Any, spec: P | None) -> Any:
    tracked = isinstance(value, torch.Tensor) and (value.requires_grad or compat.is_wrapped(value))
    if spec is not None and tracked and tree.is_inexact(value):
        return call_unmentioned(primitive, value, spec_axes(spec), axes)
    return value


@public
def shard(value: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh) -> tree.Tree:
    """This process's shards of a tree of global values.

    On a bound mesh, copies of this rank's shards; on a mesh that is simulated, the global values
    themselves.

    >>> ft.shard({"w": torch.ones(4)}, P("tp"), ft.Mesh(tp=2))  # simulated
    {'w': tensor([1., 1., 1., 1.])}

    Raises:
        ValueError: a leaf cannot be split as its spec says; all offenders are listed.
    """
    flat = validate(value, specs, mesh)
    if not isinstance(mesh, BoundMesh):
        return value
    leaves, structure = tree.flatten(value)
    return tree.unflatten(
        structure,
        [
            leaf if spec is None else shard_one(leaf, spec, mesh, mesh.coordinate).clone()
            for leaf, spec in zip(leaves, flat, strict=True)
        ],
    )


@public
def gather(value: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh) -> tree.Tree:
    """The tree of global values, on every rank, from every rank's shards.

    One all-gather per sharded leaf and axis; on a mesh that is simulated, the values themselves.

    >>> ft.gather({"w": torch.ones(4)}, P("tp"), ft.Mesh(tp=2))  # simulated
    {'w': tensor([1., 1., 1., 1.])}
    """
    if not isinstance(mesh, BoundMesh):
        return value
    leaves, structure = tree.flatten(value)
    flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="specs")
    axes, absent = bound_axes(mesh)
    rows = zip(tree.paths(value), leaves, flat, strict=True)
    parts = [(path or "value", leaf.shape, spec) for path, leaf, spec in rows if is_uneven(spec)]
    raise_problems(
        "gather: these are no parts of values with these specs",
        [each for part in parts for each in sharding.part_problems(*part, mesh)],
    )
    out = []
    with bind(axes, absent=absent), torch.no_grad():
        for leaf, spec in zip(leaves, flat, strict=True):
            if isinstance(leaf, torch.Tensor) and spec is not None:
                for dim, names in enumerate(dim_axes(spec, leaf.dim())):
                    leaf = all_gather(leaf, names, axis=dim, tiled=True) if names else leaf
                leaf = sharding.trim_uneven(leaf, spec, mesh.shape)
            out.append(leaf)
    return tree.unflatten(structure, out)


@public
def shard_map(
    f: Callable,
    mesh: Mesh | BoundMesh,
    in_specs: tree.Tree,
    out_specs: tree.Tree,
    *,
    check: bool = True,
    stages: str | None = None,
    donate: int | Sequence[int] = (),
    replicated_over: AxisNames = (),
) -> Callable:
    """The function that runs the per-rank program `f` on every rank of `mesh`.

    On a `Mesh` it takes and returns global values and simulates all ranks in this process; on a
    `BoundMesh` it takes and returns this process's shards. `f` itself sees shards in both cases and
    communicates through `functron.lax`. Every torch.func transform works outside and inside it.

    Differentiated from outside, the cotangent of an input is summed over the axes its spec does not
    mention, and that of an output is divided among them; tensors that `f` closes over count as
    replicated inputs. This is JAX's ``shard_map(check_vma=False)``.

    >>> mean = ft.shard_map(lambda x: lax.pmean(x, "dp"), ft.Mesh(dp=2), P("dp"), P())
    >>> mean(torch.tensor([1.0, 3.0]))
    tensor([2.])

    Args:
        f: takes and returns trees of tensors; positional arguments only.
        in_specs: a prefix tree of specs for the tuple of arguments, or one spec for all of them. A
            spec of None makes an argument static: it is passed on as it is, whatever it is.
        out_specs: a prefix tree of specs for the result; None for static results.
        check: refuse programs that return a value their out_spec calls replicated when it varies,
            and reductions of values that are already replicated. Static and exact. On a bound mesh
            the program is checked once per signature, on fake tensors, before it first runs. That
            only shares are synchronised (`functron.sync_gradients`) is checked then too, and in
            simulation when a signature first runs.
        stages: the axis whose ranks run the stages of a pipeline (`functron.pipeline`), usually
            "pp". It is not mapped: specs cannot mention it. On a `Mesh` values belong to all its
            ranks together; on a `BoundMesh` they are what this rank holds, and nothing is checked,
            since other ranks run other programs: simulate the mesh to check it.
        donate: positions of arguments that `f` may modify in place, such as the state of a step
            that calls an optimizer's ``step_``. Their tensors are gone once `f` has returned, and
            using them raises. Under a transform of torch.func, and where torch's tape tracks an
            argument, nothing is: `f` is given copies, and derivatives are those of what it
            computes. Of what `trace` and `jit` make of this, these say what is donated.
        replicated_over: axes whose ranks are all meant to do the same work. Under `check`, an axis
            of a name of your own (no standard one), that has more than one rank, that no spec
            mentions and no collective or index in `f` names, is refused otherwise: it is more often
            a misspelt one. Standard axes may be idle, as a part of a step may be the same work on
            them: an update of parameters that data ranks share, say. `make_step` refuses them.

    Raises:
        ValueError: a spec does not fit its value, the check fails, `f` modified an argument in
            place that is not donated, or an argument was donated before; all offenders are listed.
        TypeError: keyword arguments, or a leaf that is no tensor and not declared static.
    """
    check_spec_trees(in_specs, out_specs, mesh, stages)
    donated = (donate,) if isinstance(donate, int) else tuple(donate)
    meant = (replicated_over,) if isinstance(replicated_over, str) else tuple(replicated_over)
    return MappedFunction(f, mesh, in_specs, out_specs, check, stages, donated, meant)


def _summarise(specs: tree.Tree) -> str:
    """Specs in a line: of many their number and the first kinds."""
    found = [str(spec) for spec in tree.leaves(specs, is_spec)]
    kinds = list(dict.fromkeys(found))
    shown = ", ".join([*kinds[:3], *["..."] * (len(kinds) > 3)])
    return shown if len(found) == 1 else f"{len(found)} specs: {shown}".removesuffix(": ")


def check_spec_trees(
    in_specs: tree.Tree, out_specs: tree.Tree, mesh: Mesh | BoundMesh, stages: str | None
) -> None:
    if not isinstance(mesh, (Mesh, BoundMesh)):
        raise TypeError(f"shard_map: got mesh {mesh!r}; wanted a functron.Mesh or BoundMesh")
    problems = []
    for what, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        rows = zip(tree.paths(specs, is_spec), tree.leaves(specs, is_spec), strict=True)
        for path, spec in rows:
            where = f"{what}/{path}" if path else what
            if not is_spec(spec):
                fix = f"write P({spec!r})" if isinstance(spec, str) else ""
                if isinstance(spec, sharding.Rules):
                    fix = "what param_specs(defs, rules) makes of rules"
                problems.append(Problem(where, repr(spec), "a P or None", fix))
            elif spec is not None:
                problems += sharding.problems(where, None, spec, mesh)
                if stages in spec_axes(spec):
                    wanted = f"axes other than {stages!r}, whose ranks are stages"
                    fix = "let a pipeline.Partition say which stage holds what"
                    problems.append(Problem(where, f"{spec}", wanted, fix))
    raise_problems("shard_map cannot use these specs", problems)


@shows_table
class MappedFunction:
    """A function mapped by `shard_map`: binds arguments to specs, then simulates or runs.

    Attributes:
        stages: the axis of a pipeline's stages, which is not mapped.
        donate: positions of arguments that are consumed.
        observe: called with the arguments and the results of calls that have computed them, by
            `jit` too; None: nothing is.
        aside: whether `jit` must call the function itself for these arguments, instead of its
            compiled program; None: never.
    """

    observe: Callable[[tuple, Any], None] | None = None
    aside: Callable[[tuple], bool] | None = None

    def __init__(
        self,
        f: Callable,
        mesh: Mesh | BoundMesh,
        in_specs: tree.Tree,
        out_specs: tree.Tree,
        check: bool,
        stages: str | None = None,
        donate: tuple[int, ...] = (),
        replicated_over: tuple[str, ...] = (),
    ):
        functools.update_wrapper(self, f)
        self.f, self.mesh, self.stages, self.donate = f, mesh, stages, donate
        self.check = check and not (isinstance(mesh, BoundMesh) and mesh[stages or ""] > 1)
        self._mapped = mesh.without(stages)
        # what stages send one another is not counted
        self._alike = None if mesh[stages or ""] == 1 else False
        # copies: a dict of specs that its maker changes later would change no plan that was made
        self.in_specs, self.out_specs = (
            tree.map(lambda spec: spec, specs, is_leaf=is_spec) for specs in (in_specs, out_specs)
        )
        meant = {*STANDARD_AXES, *replicated_over, stages}
        self._own = [n for n in unsplit_axes(mesh, in_specs, out_specs) if n not in meant]
        self.name = getattr(f, "__name__", type(f).__name__)
        self._checked: set[Any] = set()
        # of arguments that have been checked: specs and paths
        self._specs: dict[Any, tuple[list[P | None], list[str]]] = {}

    @public
    def __call__(self, *args, **kwargs) -> Any:
        if kwargs:
            raise TypeError(
                f"shard_map: {self.name} got keyword arguments {sorted(kwargs)}; wanted positional "
                "ones only, since in_specs are positional; fix: bind them with functools.partial"
            )
        again = sorted(set(self._mapped.axis_names) & scope().axes.keys())
        if again:
            raise ValueError(
                f"shard_map: axes {again} are already bound by an enclosing shard_map; "
                "map over other axes, or call the function directly"
            )
        leaves, structure, specs, paths = self._flatten(args)
        hidden = find_tensors(self.f)
        self._refuse_orphans(leaves, paths, hidden)
        if self.donate and _is_taped([*leaves, *hidden]):
            return self._call_on_tape(leaves, structure, *hoist(self.f))
        stages, named = self._stage_axis() or scope().stages, scope().named
        inner = replace(scope(), stages=stages, named=set() if named is None else named)
        with unwinding():
            if scope().axis_index is not None:
                with enter(inner):
                    return self._trace(leaves, structure, specs)
            return self._call_all(args, inner, leaves, paths, structure, specs)

    def _refuse_orphans(self, leaves: list, paths: list[str], hidden: list) -> None:
        values = [*leaves, *hidden]
        if found := find_orphans(values):
            named = [f"argument {path}" for path in paths]
            named += ["a tensor that it closes over"] * len(hidden)
            words = [f"{named[i]}, of shape {list(values[i].shape)}" for i in found]
            raise ValueError(
                f"shard_map: {self._describe_function()}, by {' and '.join(words)}, {ORPHAN}"
            )

    def _call_on_tape(self, leaves: list, structure, hidden: list, close: Callable) -> Any:
        """The results where torch's tape tracks what is given: under torch.func, without writes.

        A write would lose the derivative of what it overwrites, and change what the tape keeps.
        """
        places = [i for i, leaf in enumerate(leaves) if _is_taped([leaf])]
        count = len(places)

        def call(*tensors):
            given, again = list(leaves), copy.copy(self)
            for i, tensor in zip(places, tensors[:count], strict=True):
                given[i] = tensor
            again.f = close(list(tensors[count:]))
            return again(*_make_arguments(structure, given))

        return call_on_tape(call, [*(leaves[i] for i in places), *hidden])

    def _call_all(self, args: tuple, inner: Scope, leaves: list, paths: list, structure, specs):
        """The results of all ranks, or of this process's, which makes the call with the others."""
        modes = compat.dispatch_modes_active()
        alone = modes or compat.transforms_active()
        if isinstance(self._mapped, BoundMesh) and self.check:
            with enter(inner), JointCall(self.name, self.mesh, alike=True):
                self._check_once(self._mapped, leaves, structure, specs)
        donated = {} if alone else self._find_donated(leaves, paths)
        before = {
            i: leaf._version
            for i, leaf in enumerate(leaves)
            if _can_count_edits(leaf) and _argument(paths[i]) not in self.donate
        }
        joint = JointCall(self.name, self.mesh, alike=True if modes else self._alike)
        with joint as call, Donation(call) as donation:
            with enter(inner):
                given = list(leaves)
                for i, path in donated.items():
                    given[i] = donation.take(path, leaves[i])
                if compat.transforms_active():  # nothing is given up: what is edited are copies
                    for i, leaf in enumerate(leaves):
                        if isinstance(leaf, torch.Tensor) and _argument(paths[i]) in self.donate:
                            given[i] = leaf.clone()
                donation.start()
                compute = self._run_bound if isinstance(self._mapped, BoundMesh) else self._simulate
                out = compute(given, structure, specs)
            self._refuse_edits(leaves, paths, before)
            if self.observe is not None and not alone:
                self.observe(args, out)
            donation.finish()  # last: whatever ends the call before has what was donated restored
        return out

    def _find_donated(self, leaves: list, paths: list[str]) -> dict[int, str]:
        """The places and paths of the tensors that are consumed, each with memory of its own."""
        if not self.donate:
            return {}
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        donated = {i: paths[i] for i in tensors if _argument(paths[i]) in self.donate}
        places = {place: paths[i] for place, i in enumerate(tensors) if i in donated}
        check_consumable(list(tensors.values()), places)
        return donated

    def _refuse_edits(self, leaves: list, paths: list[str], before: dict[int, int]) -> None:
        edited: dict[int, list[str]] = {}
        for i, version in before.items():
            if leaves[i]._version != version:
                edited.setdefault(_argument(paths[i]), []).append(paths[i])
        raise_problems(
            f"{self._describe_function()} modified arguments in place, which are the caller's",
            [
                Problem(
                    f"argument {found[0]}" + (f" and {len(found) - 1} more" if found[1:] else ""),
                    "other values than the caller passed",
                    "a pure function of it",
                    "modify a clone (x = x.clone()), or, where the caller gives it up, pass "
                    f"donate={position} to shard_map",
                )
                for position, found in edited.items()
            ],
        )

    def _stage_axis(self) -> StageAxis | None:
        name, mesh = self.stages, self.mesh
        if name is None or mesh[name] == 1:
            return None
        if not isinstance(mesh, BoundMesh):
            return StageAxis(name, mesh[name])
        index, group = mesh.coordinate[name], mesh.groups[name]
        return StageAxis(name, mesh[name], index, group, mesh.recorder, mesh)

    def _flatten(self, args: tuple) -> tuple[list, tree.Structure, list[P | None], list[str]]:
        prefix = self._spec_prefix(args)
        rows = zip(args, prefix, strict=True)
        masked = tuple(_Static(arg) if _is_static(arg, spec) else arg for arg, spec in rows)
        leaves, structure = tree.flatten(masked)
        refuse_donated(leaves, lambda: tree.paths(masked), self.name)
        shapes = (leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
        key = (structure, scope().axis_index is not None, tuple(shapes))
        if key not in self._specs:
            specs = tree.broadcast_prefix(
                prefix, masked, is_leaf=is_spec, what="in_specs", wanted="a P, or containers"
            )
            paths = tree.paths(masked)
            self._check_leaves(paths, leaves, specs)
            self._specs[key] = specs, paths
        return leaves, structure, *self._specs[key]

    def _check_leaves(self, paths: list[str], leaves: list, specs: list[P | None]) -> None:
        sizes, kinds = [], []
        # a rank that is being traced sees its shards, as on a bound mesh
        bound = isinstance(self.mesh, BoundMesh) or scope().axis_index is not None
        for path, leaf, spec in zip(paths, leaves, specs, strict=True):
            where = f"{self.name}'s argument {path}"
            kind = type(leaf).__name__
            if isinstance(leaf, torch.Tensor) and spec is not None:
                find = sharding.part_problems if bound else sharding.problems
                sizes += find(where, leaf.shape, spec, self.mesh)
            elif isinstance(leaf, torch.Tensor):
                got = "a tensor with the static spec None"
                kinds.append(Problem(where, got, "P() or another P"))
            elif spec is None and (static := _fix_of_static(leaf)):
                kinds.append(Problem(where, f"{kind} with the static spec None", "a tree", static))
            elif spec is not None and (not isinstance(leaf, (bool, int, float)) or spec_axes(spec)):
                fix = dataclass_fix(leaf) or "spec None"
                kinds.append(Problem(where, f"{kind} with {spec}", "a tensor", fix))
        raise_problems(f"shard_map cannot shard the arguments of {self.name}", sizes)
        raise_problems(f"shard_map: arguments of {self.name}", kinds, TypeError)

    def _spec_prefix(self, args: tuple) -> tuple:
        if is_spec(self.in_specs):
            return (self.in_specs,) * len(args)
        if not isinstance(self.in_specs, (tuple, list)) or len(self.in_specs) != len(args):
            got = len(self.in_specs) if isinstance(self.in_specs, (tuple, list)) else "no tuple"
            raise ValueError(
                f"shard_map: {self.name} was called with {len(args)} arguments, but in_specs has "
                f"{got}; wanted one entry per argument, or a single P for all"
            )
        return tuple(self.in_specs)

    def _compute(
        self,
        f: Callable,
        structure: tree.Structure,
        recorder: LineRecorder | None,
        in_specs: list,
        values: list,
    ) -> tuple[list, list[P | None], tree.Structure]:
        """`f` of flat values: its flat outputs with their specs, checked, and their structure."""
        with enter(replace(scope(), given=tuple(zip(values, in_specs, strict=True)))):
            out = f(*_make_arguments(structure, values))
        (outputs, made), paths = tree.flatten(out), tree.paths(out)
        title = f"shard_map cannot assemble what {self.name} returns"
        refuse_holders(title, "output", out)
        specs = tree.broadcast_prefix(
            self.out_specs, out, is_leaf=is_spec, what="out_specs", wanted="a P, or containers"
        )
        if scope().check:
            idle = [name for name in self._own if name not in (scope().named or ())]
            refuse_idle(f"{self._describe_function()} on Mesh({self.mesh})", self.mesh, idle)
            mine, where = self._mapped.axis_names, self._describe_function()
            check_outputs(outputs, specs, paths, mine, where, recorder)
        rows = list(zip(outputs, specs, paths, strict=True))
        raise_problems(
            title,
            [
                Problem(
                    f"output {path}",
                    f"{type(value).__name__}"
                    + (f" with {value.dim()} dims" if isinstance(value, torch.Tensor) else ""),
                    f"a tensor with at least the {len(spec)} dims of its out_spec {spec}",
                )
                for value, spec, path in rows
                if spec is not None
                and spec_axes(spec)
                and (not isinstance(value, torch.Tensor) or value.dim() < len(spec))
            ],
        )
        uneven = [
            (f"output {path}", value.shape, spec) for value, spec, path in rows if is_uneven(spec)
        ]
        raise_problems(
            title,
            [each for row in uneven for each in sharding.part_problems(*row, self._mapped)],
        )
        return outputs, specs, made

    def _describe_function(self) -> str:
        code = getattr(self.f, "__code__", None)
        at = f" ({source_line(code.co_filename, code.co_firstlineno)})" if code else ""
        return f"{self.name}{at}"

    def _table(self) -> Table:
        one = is_spec(self.in_specs) or not isinstance(self.in_specs, (tuple, list))
        given = [("arguments", self.in_specs)] if one else []
        given += [] if one else [(f"argument {k}", specs) for k, specs in enumerate(self.in_specs)]
        rows = [[name, _summarise(specs)] for name, specs in (*given, ("result", self.out_specs))]
        notes = [f"donates {', '.join(map(str, self.donate))}"] if self.donate else []
        notes += [f"stages over {self.stages}"] if self.stages else []
        code = getattr(self.f, "__code__", None)
        at = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        title = f"shard_map({self.name}{at}) on {self.mesh!r}"
        return Table(title, [["", "specs"], *rows], left=2, notes=notes)

    def _simulate(self, leaves: list, structure, specs: list) -> Any:
        mesh, key = self._mapped.mesh, _signature(structure, leaves)
        new = self.check and (key is None or key not in self._checked)
        try:
            body = functools.partial(self._compute, self.f, structure, None, specs)
            made = run_ranks(body, mesh, leaves, specs, check=self.check, shares=new)
            self._checked.add(key)
            return made
        except VaryingOutputError as error:
            self._explain(mesh, leaves, structure, specs)
            raise ValueError(str(error)) from None
        except (RuntimeError, KeyError) as error:
            if (means := explain_error(error)) is None:
                raise
            raise ValueError(means).with_traceback(error.__traceback__) from None

    def _explain(self, mesh: Mesh, leaves: list, structure, specs: list) -> None:
        """Run again on fake tensors to name the source lines of outputs that failed the check."""
        try:
            self._check_abstractly(mesh, leaves, structure, specs)
        except VaryingOutputError as error:
            raise ValueError(str(error)) from None
        except Exception:  # the message without lines stands where this finds none
            return

    def _check_abstractly(
        self, mesh: Mesh | BoundMesh, leaves: list, structure, specs: list
    ) -> None:
        """Simulate on fake tensors of global shape; nothing is computed or allocated.

        Leaves are shards on a bound mesh, and global values otherwise.
        """
        bound, (hidden, close) = isinstance(mesh, BoundMesh), hoist(self.f)
        with (
            compat.no_transforms(),
            FakeTensorMode(allow_non_fake_inputs=True),
            LineRecorder() as r,
        ):
            empty = list(leaves)
            for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
                if isinstance(leaf, torch.Tensor) and spec is not None:
                    shape = sharding.global_shape(leaf.shape, spec, mesh) if bound else leaf.shape
                    empty[i] = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
            f = close([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in hidden])
            body = functools.partial(self._compute, f, structure, r, specs)
            run_ranks(body, mesh.mesh, empty, specs, check=True)

    def _run_bound(self, leaves: list, structure, specs: list) -> Any:
        assert isinstance(self._mapped, BoundMesh)
        try:
            return self._call_one_rank(*bound_axes(self._mapped), leaves, structure, specs)
        except RuntimeError as error:  # of the transfers of a pipeline, say
            axes = ", ".join(repr(name) for name, size in self.mesh.shape.items() if size > 1)
            raise_lost(error, f"{self.name} over {axes} at {user_line()}")
            raise

    def _trace(self, leaves: list, structure, specs: list) -> Any:
        """One rank's program on its shards, with collectives by axis name."""
        make_index = scope().axis_index
        assert make_index is not None
        sizes = self._mapped.shape
        self._check_traced({name: size for name, size in sizes.items() if size > 1})
        axes = [TracedAxis(name, size, make_index) for name, size in sizes.items() if size > 1]
        absent = [name for name, size in sizes.items() if size == 1]
        return self._call_one_rank(axes, absent, leaves, structure, specs, check=self.check)

    def _check_traced(self, sizes: Mapping[str, int]) -> None:
        """That the program is traced for the ranks that this is mapped over, and sees shards."""
        traced = scope().traced
        mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
        fix = (
            f"ft.trace(fn, mesh=Mesh({mesh}), in_specs=...), whose arguments reach {self.name} as "
            "shards; or simulate=True, for global values and all ranks in one process"
        )
        raise_problems(
            f"trace: the function calls {self.name}, which is mapped over other ranks than it is "
            "traced for",
            [
                Problem(f"axis {name!r}", f"{traced.get(name, 1)} ranks", f"{size}", fix)
                for name, size in sizes.items()
                if traced.get(name, 1) != size
            ],
        )

    def _call_one_rank(self, axes, absent, leaves, structure, specs, *, check=False) -> Any:
        """The results of one rank's shards, over `axes` and those of size 1, `absent`.

        The cotangent of an input is psummed over the axes that its spec does not mention (that of a
        tensor closed over, over all of them), and the cotangent of an output is divided by their
        sizes: JAX's convention at the boundary.
        """
        at_entry = functools.partial(_call_at_boundary, InputReplicated, axes)
        at_exit = functools.partial(_call_at_boundary, OutputReplicated, axes)
        with bind(axes, absent=absent, check=check):
            local = [at_entry(*row) for row in zip(leaves, specs, strict=True)]
            hidden, close = hoist(self.f)
            f = close([at_entry(tensor, P()) for tensor in hidden])
            outputs, out_specs, result = self._compute(f, structure, None, specs, local)
            made = [at_exit(*row) for row in zip(outputs, out_specs, strict=True)]
        return tree.unflatten(result, made)

    def _check_once(self, mesh: BoundMesh, leaves: list, structure, specs: list) -> None:
        key = _signature(structure, leaves)
        if key is not None and key in self._checked:
            return
        paths = tree.paths(tree.unflatten(structure, leaves))
        alone = compat.dispatch_modes_active()  # a recorder refuses what runs on processes
        if not alone:
            check_shapes(self.name, mesh, leaves, paths)

        def check() -> Exception | None:
            try:
                self._check_abstractly(mesh, leaves, structure, specs)
            except Exception as error:
                return error
            return None

        error = check() if alone else check_on_first(mesh, check)
        if isinstance(error, VaryingOutputError):
            raise ValueError(str(error))
        if isinstance(error, RuntimeError):
            warnings.warn(
                f"shard_map: the replication of {self.name} could not be checked without data "
                f"({explain_error(error) or error}); simulate it on a Mesh to check it, or pass "
                "check=False",
                stacklevel=4,
            )
        elif error is not None:
            raise error
        self._checked.add(key)


@dataclass(frozen=True)
class _Static:
    """A static argument, opaque to trees."""

    value: Any


def _make_arguments(structure: tree.Structure, leaves: list) -> tuple:
    """The arguments of these leaves, static ones as they were given."""
    args = tree.unflatten(structure, leaves)
    return tuple(arg.value if isinstance(arg, _Static) else arg for arg in args)


def _is_taped(values: list) -> bool:
    """Whether torch's tape tracks one of these, and no transform or trace sees them besides."""
    if not torch.is_grad_enabled() or compat.transforms_active() or compat.dispatch_modes_active():
        return False
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _fix_of_static(leaf: Any) -> str:
    """How to pass a dataclass with tensors that came as static; "" for anything else."""
    held = tree.leaves(leaf.value if isinstance(leaf, _Static) else leaf)
    return next(filter(None, map(dataclass_fix, held)), "")


def _is_static(arg: Any, spec: Any) -> bool:
    return spec is None and not any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(arg))


def unsplit_axes(mesh: Mesh | BoundMesh, *specs: tree.Tree) -> list[str]:
    """The axes of `mesh` with more than one rank that none of these trees of specs mentions."""
    leaves = [leaf for specs_ in specs for leaf in tree.leaves(specs_, is_spec)]
    split = {name for leaf in leaves if isinstance(leaf, P) for name in spec_axes(leaf)}
    return [name for name, size in mesh.shape.items() if size > 1 and name not in split]


def refuse_idle(where: str, mesh: Mesh | BoundMesh, idle: Sequence[str]) -> None:
    """Raise ValueError for axes whose ranks would all do the same work."""
    problems = []
    for name in idle:
        fix = f"say replicated_over={name!r} if that is meant"
        if name not in STANDARD_AXES:
            fix = f"{nearest(name, STANDARD_AXES)}, or {fix}"
        got = f"no spec and no collective that names it: its {mesh[name]} ranks do the same work"
        wanted = "an axis that splits arguments, or that the program communicates over"
        problems.append(Problem(f"axis {name!r}", got, wanted, fix))
    raise_problems(f"{where} leaves ranks without work of their own", problems)


def _argument(path: str) -> int:
    """Of which argument a path is."""
    return int(path.split("/")[0])


def _can_count_edits(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and not compat.is_wrapped(leaf)
    return plain and not leaf.is_inference()


def _signature(structure: Any, leaves: list) -> Any:
    """The key of a check that was made; None: not hashable, so the check is repeated.

    By value: ranks must agree on whether they check, and addresses differ among them.
    """
    key = structure, tuple(_leaf_key(leaf) for leaf in leaves)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    value = leaf.value if isinstance(leaf, _Static) else leaf
    return type(value), value  # since True == 1 == 1.0
