"""The parameters that a checkpoint holds, or their averages, to sample, export and upcycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from functron import checkpoint
from functron.checkpoint import Checkpoint
from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.params import abstract_params, param_specs
from functron.spmd import BoundMesh, Mesh, P, Rules
from functron.spmd.spec import local_shape, offsets

_STATE = "opt_state/"


def stored_params(stored: Checkpoint, defs: tree.Tree, *, averaged: bool = False) -> tree.Tree:
    """A checkpoint's parameters as leaves that are read where they are indexed.

    With `averaged` they are the means that `optim.with_average` keeps (``optimizer.ema_decay``),
    ``sum_t w_t params_t / sum_t w_t`` as `optim.averaged` reads them, in the parameters' dtypes:
    of a checkpoint made on any mesh, pipeline or ZeRO stage, without the optimizer. Parameters
    that no mean is kept of, such as those that LoRA leaves alone, are as they are; all are before
    the first update. Adapters are averaged by themselves, before they are merged.

    Args:
        stored: a checkpoint of a run.
        defs: of the parameters that it holds; see `functron.lora.defs_in`.
        averaged: read the means.

    Returns:
        Leaves with shape and dtype whose slices are tensors, in the structure of `defs`.

    Raises:
        ValueError: parameters are missing, or have other shapes than the defs (all are listed); or
            it keeps no average, or several.
    """
    _check(stored, defs)
    found = tree.map_with_path(lambda path, _: stored[f"params/{path}"], defs)
    if not averaged:
        return found
    place = _place_of_average(stored)
    weight = stored[f"{place}weight"][...]
    if not weight > 0:  # of no parameters yet
        return found

    def one(path: str, now: Any) -> Any:
        name = f"{place}average/{path}"
        return AveragedRows(stored[name], weight, now.dtype) if name in stored else now

    return tree.map_with_path(one, found)


def read_params(
    stored: Checkpoint,
    defs: tree.Tree,
    *,
    averaged: bool = False,
    rules: Rules | None = None,
    mesh: Mesh | BoundMesh | None = None,
) -> tree.Tree:
    """`stored_params` as tensors in host memory.

    Args:
        stored, defs, averaged: as in `stored_params`.
        rules: how a mesh splits the parameters; None: not at all.
        mesh: on a bound one this rank's shards are read, and nothing else; otherwise whole leaves.

    Raises:
        ValueError: what `stored_params` raises, or values are damaged.
    """
    found = stored_params(stored, defs, averaged=averaged)
    if rules is not None and isinstance(mesh, BoundMesh):
        specs = param_specs(defs, rules)
        return tree.map(lambda leaf, spec: leaf[_own(leaf.shape, spec, mesh)], found, specs)
    if averaged:
        return tree.map(lambda leaf: leaf[...], found)
    return checkpoint.restore(stored.path, {"params": abstract_params(defs)})["params"]


def _own(shape: tuple[int, ...], spec: P, mesh: BoundMesh) -> tuple[slice, ...]:
    """Where this rank's shard of a leaf is."""
    starts = offsets(shape, spec, mesh, mesh.coordinate)
    sizes = local_shape(shape, spec, mesh)
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))


@dataclass(frozen=True, eq=False)
class AveragedRows:
    """A mean of parameters on disk: each part of it computed when it is asked for.

    Attributes:
        total: the weighted sum; something whose slices are tensors.
        weight: what the weights sum to; float64, 0-dim.
        dtype: of the parameter, which the mean is rounded to.
    """

    total: Any
    weight: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return tuple(self.total.shape)

    def __getitem__(self, where: Any) -> torch.Tensor:
        total = self.total[where]
        return (total / self.weight.to(total.dtype)).to(self.dtype)


def _check(stored: Checkpoint, defs: tree.Tree) -> None:
    """Raise where the parameters are not those of `defs`."""
    wanted = {
        f"params/{path}": list(d.shape)
        for path, d in zip(tree.paths(defs), tree.leaves(defs), strict=True)
    }
    stored.open([path for path in wanted if path in stored])
    problems = [
        Problem(path, "no such leaf", "a parameter, as config.toml says")
        if path not in stored
        else Problem(path, str(list(stored[path].shape)), f"{shape}, as the config says")
        for path, shape in wanted.items()
        if path not in stored or list(stored[path].shape) != shape
    ]
    raise_problems(f"{stored.path} is no checkpoint of this run's model", problems)


def _place_of_average(stored: Checkpoint) -> str:
    """Where in the optimizer's state its `AverageState` is: a prefix of paths."""
    ends = "weight"
    heads = [x[: -len(ends)] for x in stored if x.startswith(_STATE) and x.endswith(f"/{ends}")]
    kept = [
        head
        for head in heads
        if f"{head}count" in stored and any(x.startswith(f"{head}average/") for x in stored)
    ]
    if len(kept) != 1:
        fix = "leave --averaged out, or train with --optimizer.ema-decay 0.999"
        got = f"a checkpoint with {len(kept) or 'no'} averages"
        problem = Problem("averaged", got, "the averages that a run keeps", fix)
        raise_problems(f"cannot read averages from {stored.path}", [problem])
    return kept[0]
