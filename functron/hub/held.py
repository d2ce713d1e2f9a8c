"""Which part of the parameters a process holds, and so reads."""

from __future__ import annotations

from dataclasses import dataclass

from functron import tree
from functron.checkpoint import Placement
from functron.errors import Problem, raise_problems
from functron.hub.kinds import Config, kind_of
from functron.params import abstract_params
from functron.spmd import BoundMesh, Mesh, P
from functron.spmd.spec import is_spec, local_shape, offsets, validate


@dataclass(frozen=True)
class Held:
    """What this process holds of a leaf.

    Attributes:
        shape: of its tensor.
        boxes: start in the whole leaf, size, and start in the tensor, of each part of it.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]


def held_on_mesh(
    config: Config, specs: tree.Tree | None, mesh: Mesh | BoundMesh | None
) -> dict[str, Held]:
    """What this process holds of parameters with these specs: all, or one box of each leaf."""
    like = abstract_params(kind_of(config).defs(config))
    shapes = {
        path: tuple(leaf.shape)
        for path, leaf in zip(tree.paths(like), tree.leaves(like), strict=True)
    }
    if mesh is not None and specs is not None:
        validate(like, specs, mesh, what="params")
    if not isinstance(mesh, BoundMesh):
        return {path: _one_box((0,) * len(shape), shape) for path, shape in shapes.items()}
    if specs is None:
        problem = Problem("specs", "None", "the parameters' specs", "pass param_specs(defs, rules)")
        raise_problems("cannot load onto a bound mesh", [problem])
    flat = tree.broadcast_prefix(specs, like, is_leaf=is_spec, what="specs")
    found = {}
    for (path, shape), spec in zip(shapes.items(), flat, strict=True):
        spec = spec if spec is not None else P()
        start = offsets(shape, spec, mesh, mesh.coordinate)
        found[path] = _one_box(start, local_shape(shape, spec, mesh))
    return found


def _one_box(start: tuple[int, ...], size: tuple[int, ...]) -> Held:
    return Held(size, ((start, size, (0,) * len(size)),))


def held_by_placement(placement: Placement, at: str) -> dict[str, Held]:
    """What this process holds of the leaves of a state that stand under `at`."""
    found = {}
    for leaf in placement.leaves:
        shape = placement.local_shape(leaf, placement.here)
        path = leaf.path.removeprefix(f"{at}/") if at else leaf.path
        if shape is not None and (not at or path != leaf.path):
            found[path] = Held(shape, placement.boxes(leaf, placement.here))
    return found
