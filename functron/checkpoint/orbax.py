"""Saving and restoring through Orbax, in the format that every Orbax reader opens.

Only here, and only inside these functions, are Orbax and JAX imported: that takes longer than
importing torch. Trees are stored as nested dicts of arrays: a leaf at ``opt_state/1/mu`` has the
keys "opt_state", "1" and "mu". Arrays are written from NumPy, so int64 stays int64, which JAX
arrays would truncate; bfloat16 and float8 go through ml_dtypes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from functron import tree
from functron.checkpoint.folder import is_complete
from functron.errors import Problem, nearest, raise_problems

# torch dtypes that NumPy lacks: the integers of their size, and ml_dtypes' name for them
_FOREIGN = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def save(path: str | Path, value: tree.Tree, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a tree of global tensors as the checkpoint `path`.

    It appears under its name only when it is complete: a process that dies meanwhile leaves a
    folder with "orbax-checkpoint-tmp" in its name, which readers ignore.

    On a bound mesh, gather the tree on all ranks (`functron.gather`), save on rank 0 only, and
    let the others wait for it.

    Args:
        path: a folder that does not exist; its parents are made.
        value: a tree of tensors, each with at least one element; keys without ``/`` or ``.``.
        metadata: anything JSON can hold, to be read with `metadata`.

    Raises:
        ValueError: something lies at `path`, or the tree cannot be stored; all offenders listed.
    """
    target = Path(path).absolute()
    problems = _unstorable(value)
    if target.exists():
        problems.append(Problem(str(path), "an existing path", "a new one", "choose another"))
    raise_problems("cannot save the checkpoint", problems)
    nested: dict[str, Any] = {}
    for place, leaf in zip(tree.paths(value), tree.leaves(value), strict=True):
        *above, name = place.split("/")
        node = nested
        for key in above:
            node = node.setdefault(key, {})
        node[name] = _to_numpy(leaf)
    ocp = _import_orbax()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _checkpointer(ocp) as checkpointer:
        arguments = ocp.args.PyTreeSave(nested)
        checkpointer.save(target, args=arguments, custom_metadata=dict(metadata or {}))


def restore(path: str | Path, like: tree.Tree | None = None) -> tree.Tree:
    """Read a checkpoint.

    Args:
        path: a complete checkpoint.
        like: a tree of tensors, meta tensors for instance, whose structure, shapes and dtypes are
            wanted; leaves of the checkpoint that it lacks are not read. None reads everything.

    Returns:
        Tensors on the CPU: in the structure of `like`, or nested dicts.

    Raises:
        ValueError: nothing is there, it is incomplete, or leaves are missing or have another shape
            or dtype; all offenders are listed.
    """
    source = _existing(path)
    ocp = _import_orbax()
    with _checkpointer(ocp) as checkpointer:
        stored = checkpointer.metadata(source).item_metadata.tree
        wanted = stored if like is None else _matching(path, stored, like)
        read = checkpointer.restore(
            source,
            args=ocp.args.PyTreeRestore(
                wanted,
                restore_args=tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted),
                partial_restore=True,
            ),
        )
    if like is None:
        return tree.map(_from_numpy, read)
    found = dict(zip(tree.paths(read), tree.leaves(read), strict=True))
    return tree.map_with_path(lambda place, _: _from_numpy(found[place]), like)


def metadata(path: str | Path) -> dict[str, Any]:
    """What was passed to `save` as metadata.

    Raises:
        ValueError: nothing is there, or it is incomplete.
    """
    source = _existing(path)
    with _checkpointer(_import_orbax()) as checkpointer:
        return dict(checkpointer.metadata(source).custom_metadata or {})


def _existing(path: str | Path) -> Path:
    source = Path(path).absolute()
    if not is_complete(source):
        got = "an incomplete checkpoint" if source.is_dir() else "nothing there"
        problem = Problem(
            str(path), got, "a complete checkpoint", "see which there are: ls RUN/checkpoints"
        )
        raise_problems("cannot read the checkpoint", [problem])
    return source


def _matching(path: str | Path, stored: tree.Tree, like: tree.Tree) -> dict:
    """The part of `stored` that `like` asks for, as nested dicts."""
    held = dict(zip(tree.paths(stored), tree.leaves(stored), strict=True))
    problems, wanted = [], {}
    for place, leaf in zip(tree.paths(like), tree.leaves(like), strict=True):
        if place not in held:
            problems.append(Problem(place, "nothing", "a leaf", nearest(place, held)))
            continue
        got = (tuple(held[place].shape), np.dtype(held[place].dtype).name)
        want = (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        if got != want:
            problems.append(Problem(place, f"{got[1]} {got[0]}", f"{want[1]} {want[0]}"))
        *above, name = place.split("/")
        node = wanted
        for key in above:
            node = node.setdefault(key, {})
        node[name] = held[place]
    raise_problems(f"the checkpoint {path} does not hold what is asked for", problems)
    return wanted


def _unstorable(value: tree.Tree) -> list[Problem]:
    problems = []
    if tree.is_leaf(value) or not tree.leaves(value):
        problems.append(Problem("(root)", type(value).__name__, "a container with tensors"))
    for place, leaf in zip(tree.paths(value), tree.leaves(value), strict=True):
        if not isinstance(leaf, torch.Tensor):
            problems.append(Problem(place, type(leaf).__name__, "a tensor", "use torch.tensor"))
        elif not leaf.numel():
            problems.append(Problem(place, f"shape {tuple(leaf.shape)}", "at least one element"))
        elif leaf.is_meta:
            problems.append(Problem(place, "a meta tensor", "a tensor with values"))
        if "." in place or "//" in place:
            problems.append(Problem(place, "a key with a dot, or empty", "other characters"))
    places = tree.paths(value)
    if len(set(places)) != len(places):
        twice = sorted({place for place in places if places.count(place) > 1})
        problems += [Problem(place, "two leaves", "one", "no / in keys") for place in twice]
    return problems


def _to_numpy(leaf: torch.Tensor) -> np.ndarray:
    plain = leaf.detach().cpu().contiguous()
    if plain.dtype in _FOREIGN:
        bits, name = _FOREIGN[plain.dtype]
        return plain.view(bits).numpy().view(name)
    return plain.numpy()


def _from_numpy(array: Any) -> torch.Tensor:
    array = np.array(array)  # owned and writable
    for dtype, (bits, name) in _FOREIGN.items():
        if array.dtype == name:
            plain = array.view(np.int16 if bits is torch.int16 else np.uint8)
            return torch.from_numpy(plain).view(dtype)
    return torch.from_numpy(array)


def _import_orbax() -> Any:
    if "jax" not in sys.modules:
        import jax

        # no GPU memory and no search for accelerators: arrays never become JAX arrays here
        jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)
    import orbax.checkpoint as ocp

    return ocp


def _checkpointer(ocp: Any) -> Any:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True))
