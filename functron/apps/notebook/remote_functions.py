"""Functions over a started mesh: sent to its ranks as they are now, and how calls are planned.

What is made of a started mesh is made again on each rank, of the bound mesh there, from the same
arguments. Its twin over the simulated mesh says how arguments and results are split.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from functron.apps.notebook.handles import Deferred, Handle, Plan, abstract, list_kinds, make_slices
from functron.apps.notebook.processes import show_text
from functron.apps.notebook.shipping import (
    LeafReader,
    UsedValue,
    UsedValues,
    dump,
    dump_function,
    is_specs,
    refuse_unsendable,
)
from functron.apps.notebook.worker import ResultSlot
from functron.compiler.jit import Jitted, jit
from functron.core import tree
from functron.core.errors import is_library, public, refuse
from functron.program.faults import nans
from functron.program.key_reuse import check_key_reuse
from functron.program.trace import eval_shape, trace
from functron.spmd import P
from functron.spmd import spec as sharding
from functron.spmd.shard_map import MappedFunction
from functron.spmd.spec import is_spec
from functron.transforms import capture, intervene


class RemoteFunction:
    """A function over a started mesh: made and called on each of its ranks.

    Attributes:
        twin: the same function over the simulated mesh; None: there is none.
        in_specs, out_specs: of its arguments and results.
        donate: positions of arguments that it consumes.
        by_stage: whether results are what each rank of a pipeline holds.
        sums: whether results that ranks have in common are compared.
    """

    def __init__(
        self, ranks: Any, make: Callable, args: tuple, kwargs: Mapping[str, Any],
        *, twin: Any = None, in_specs: Any = (), out_specs: Any = None, stages: str | None = None,
    ):  # fmt: skip
        self._sent: tuple[bytes, UsedValues] | None = None
        self.ranks, self.twin, self.in_specs, self.out_specs = ranks, twin, in_specs, out_specs
        self._recipe, self._once = (make, args, dict(kwargs)), False
        self._plans: dict[Any, Plan] = {}
        self._last: tuple[LeafReader, tuple, Plan] | None = None
        self._find_mapped(stages)
        named = twin if twin is not None else args[0] if args else make
        self.__name__ = getattr(named, "__name__", "function")
        self.__doc__ = getattr(named, "__doc__", None)

    def _find_mapped(self, stages: str | None = None) -> None:
        inner, self.donate = self.twin, set()
        while isinstance(inner, Jitted):
            self.donate |= set(inner.donate)
            inner = inner.fn
        if isinstance(inner, MappedFunction):
            self.donate |= set(inner.donate)
            self.in_specs, stages = inner.in_specs, inner.stages
        self.by_stage, self.sums = self.ranks.mesh[stages or ""] > 1, False
        self._mapped = inner if isinstance(inner, MappedFunction) else None
        # of what is traced for its results' specs, values of arguments count too
        self.traces = self._mapped is not None and type(self._mapped) is not MappedFunction

    def renew(self) -> None:
        """Forget what was found by tracing: what it is made of has changed."""
        self._plans.clear()
        self._last = None
        make, args, kwargs = self._recipe
        if self.twin is None:
            return
        started = type(self.ranks)
        if make is nans:
            self.twin = args[0].twin
            return
        self.twin = make(*local(args, started), **local_dict(kwargs, started))
        self._find_mapped()

    def list_given(self) -> list[UsedValue]:
        """The values that it is made of; of one that is called once, none."""
        make, args, kwargs = self._recipe
        given = [] if self._once else [make, *args, *kwargs.values()]
        return [
            UsedValue(each)
            for each in given
            if not isinstance(each, type(self.ranks) | RemoteFunction)
            and not (self.twin is not None and is_specs(each))  # copies of our own
        ]

    def define(self) -> bytes:
        """The key of a function as it is now, which the ranks are told with the next call."""
        if self._sent is not None and not self._sent[1].changed():
            return self._sent[0]

        ranks, used = self.ranks, list[UsedValue]()

        def refer(obj: Any) -> Any:
            if obj is ranks:
                return "mesh", None
            if isinstance(obj, Handle):
                obj._check()
                return "value", obj._number
            if isinstance(obj, RemoteFunction):
                used.append(UsedValue(obj.define(), read=obj.define))
                return "function", used[-1].value
            if isinstance(obj, type(ranks)):
                raise ValueError(f"{obj!r} is used by a function on {ranks!r}; wanted one of them")
            return None

        try:
            blob, shipper = dump_function(self._recipe, refer)
        except ValueError as error:  # of `refer`
            raise error.with_traceback(None) from None
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            refuse_unsendable(self.__name__, self._recipe, refer, error)
        key = hashlib.sha256(blob).digest()[:16]
        if shipper.tensor_bytes > 1 << 20 and key not in ranks._blobs:
            size = f"{shipper.tensor_bytes / 2**20:.1f} MiB"
            show_text(
                f"{self.__name__} closes over tensors of {size}, which each rank gets\n", True
            )
        if key not in ranks._blobs:
            ranks._pending.append(("define", (key, blob)))
            ranks._blobs[key] = blob
        ranks._uses[key] += 1
        if self._sent is not None:
            ranks._unused.append(self._sent[0])
            if self._sent[0] != key:
                self.renew()
        self._sent = key, UsedValues([*used, *shipper.seen, *self.list_given()])
        return key

    def plan(self, args: tuple) -> tuple[Plan, list]:
        """How arguments like these are sent, and their leaves."""
        if self._last is not None:
            reader, kinds, plan = self._last
            leaves = reader.read(args)
            if leaves is not None and kinds == list_kinds(leaves):
                return plan, leaves
        leaves, structure = tree.flatten(args)
        kinds = list_kinds(leaves)
        key: Any = structure, kinds
        if self.traces:
            key = *key, *[x for x in leaves if not isinstance(x, Handle | torch.Tensor)]
        try:
            plan = self._plans.get(key)
        except TypeError:  # a static argument without a hash: anew every time
            key, plan = object(), None
            self._plans.clear()
        if plan is not None:
            if not self.traces:
                self._last = LeafReader(structure), kinds, plan
            return plan, leaves
        ranks = self.ranks
        if ranks.block_until_ready():  # what is known of its results may be wrong until then
            return self.plan(args)
        out_specs = self.find_out_specs(args)
        specs, paths, moves = self._bind_specs(args), tree.paths(args), {}
        for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
            if isinstance(leaf, Handle) and isinstance(spec, P) and leaf._kind.local is None:
                ndim = leaf.ndim
                if sharding.dim_axes(leaf.spec, ndim) != sharding.dim_axes(spec, ndim):
                    moves[index] = leaf.spec, spec
        consumed = [
            i
            for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
            if isinstance(leaf, Handle) and int(path.partition("/")[0]) in self.donate
        ]
        plain = all(isinstance(leaf, Handle | torch.Tensor | Deferred) for leaf in leaves)
        deferred = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Deferred)]
        windows, num_bytes = self._find_windows(leaves, specs)
        slots = tree.unflatten(structure, [ResultSlot(i) for i in range(len(leaves))])
        blob = dump(slots)[0]
        if blob not in ranks._structures:
            ranks._pending.append(("structure", (len(ranks._structures), blob)))
        number = ranks._structures.setdefault(blob, len(ranks._structures))
        plan = self._plans[key] = Plan(
            number, specs, windows, num_bytes, deferred, moves, consumed, paths, out_specs, plain
        )
        return plan, leaves

    def _find_windows(self, leaves: list, specs: list) -> tuple[dict, int]:
        """The parts of tensors that ranks are sent, where they are alike, and bytes of them all."""
        found, num_bytes = {}, 0
        for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
            if isinstance(leaf, torch.Tensor):
                num_bytes += leaf.nbytes
                if spec is not None:
                    mesh, shape = self.ranks.mesh, tuple(leaf.shape)
                    found[index] = None
                    if not sharding.is_uneven(spec):
                        parts = sharding.windows(shape, spec, mesh)
                        each = list(dict.fromkeys(parts))
                        found[index] = make_slices(each), [each.index(part) for part in parts]
        return found, num_bytes

    def _bind_specs(self, args: tuple) -> list:
        """A spec for each leaf of the arguments; for one that ranks make, its prefix tree."""
        if isinstance(self.in_specs, P):
            prefix: tuple = (self.in_specs,) * len(args)
        else:
            prefix = tuple(self.in_specs)
        if len(prefix) != len(args):
            raise ValueError(f"{self.__name__}: got {len(args)} arguments; wanted {len(prefix)}")
        specs = []
        mapped = self._mapped
        if mapped is not None and not any(isinstance(a, Deferred) for a in args):
            # sizes are checked as a simulated mesh checks them
            return list(mapped._flatten(abstract(args))[2])
        for arg, each in zip(args, prefix, strict=True):
            if isinstance(arg, Deferred):
                specs.append(each)
            else:
                specs += tree.broadcast_prefix(each, arg, is_leaf=is_spec, what="in_specs")
        return specs

    def __repr__(self) -> str:
        return f"<{self.__name__} on {self.ranks}>"

    def find_out_specs(self, args: tuple) -> tree.Tree:
        """The specs of the results of such arguments; `partition` and `capture` trace for them."""
        if self._mapped is None:
            return self.out_specs
        if self.traces:
            eval_shape(self._mapped)(*abstract(args))
        return self._mapped.out_specs

    def __del__(self) -> None:
        if self._sent is not None:
            self.ranks._unused.append(self._sent[0])

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of all ranks, as handles.

        Raises:
            ValueError: what the function itself refuses; a handle that was consumed or lost; or
                under a transform of torch.func, or with tensors that require gradients.
            RankError: a rank died; or a rank raised what cannot be raised here.
        """
        if kwargs:
            raise TypeError(f"{self.__name__}: got keyword arguments; wanted positional ones")
        return self.ranks._call(self, args)

    def __functron_call__(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of a function of the library for this one: compiled, traced, or refused."""
        started = type(self.ranks)
        if fn is nans and self.twin is not None:
            made = RemoteFunction(self.ranks, fn, args, kwargs, twin=self.twin)
            made.donate = set()
            return made
        if fn in (trace, eval_shape, check_key_reuse) and self.twin is not None:
            made = fn(*local(args, started), **local_dict(kwargs, started))
            return lambda *given, **rest: made(*abstract(given), **abstract(rest))
        if fn in _MAPPING:
            twin = fn(*local(args, started), **local_dict(kwargs, started))
            return RemoteFunction(self.ranks, fn, args, kwargs, twin=twin)
        wanted = "a function of this process"
        got = f"{self.__name__}, which runs on other processes"
        fix = "apply it inside of the mapped function, or to one over a simulated mesh"
        title = f"{getattr(fn, '__name__', 'this')} cannot transform a function on a started mesh"
        return refuse(title, "fn", got, wanted, fix, TypeError)


_MAPPING = (jit, capture, intervene)
"""Functions that return a mapped function for one."""


def local(args: Iterable[Any], started: type) -> tuple:
    """Arguments with simulated meshes, and functions over these, in place of `started` ones."""
    return tuple(
        x.mesh if isinstance(x, started) else x.twin if isinstance(x, RemoteFunction) else x
        for x in args
    )


def copy_specs(value: Any) -> Any:
    """A tree of specs of its own, which nobody changes; anything else as it is."""
    return tree.map(lambda spec: spec, value, is_leaf=is_spec) if is_specs(value) else value


def local_dict(kwargs: Mapping[str, Any], started: type) -> dict[str, Any]:
    """`local` of arguments with names."""
    return dict(zip(kwargs, local(kwargs.values(), started), strict=True))


def find_own_line() -> str:
    """A note with the line of the user's code that calls this library."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_globals):
        frame = frame.f_back
    return f"called at {frame.f_code.co_filename}:{frame.f_lineno}, and not waited for there"


def wait_after_cells(mesh: Any) -> Callable[[], None]:
    """Have IPython wait for the ranks at the end of each cell; returns what ends this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return lambda: None
    found = weakref.ref(mesh)

    def wait(*_: object) -> None:
        try:
            if (mesh := found()) is not None:
                mesh.block_until_ready()
        except (Exception, KeyboardInterrupt):
            shell.showtraceback()

    def end() -> None:
        with contextlib.suppress(ValueError):  # it was ended already
            shell.events.unregister("post_run_cell", wait)

    shell.events.register("post_run_cell", wait)
    return end
