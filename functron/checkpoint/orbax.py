"""Orbax's part of a save, on the first process: folders, tree metadata, merging and renaming.

Orbax runs as if this process were alone; what it takes for arrays are descriptions of leaves,
whose values all processes write themselves. Every stock Orbax reader opens the result.

Only here, and only inside functions, are Orbax and JAX imported: that takes longer than importing
torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from functron.checkpoint.placement import Leaf


def commit(
    target: Path,
    leaves: Sequence[Leaf],
    metadata: Mapping[str, Any],
    write: Callable[[Path], None],
    finish: Callable[[Path], None],
) -> None:
    """Make the checkpoint `target` of these leaves, which appears under its name when complete.

    Args:
        target: an absolute path where nothing is; its parents exist.
        leaves: in tree order.
        metadata: for Orbax's own readers.
        write: has all processes write their databases into the unfinished folder that it is given.
        finish: called with that folder when all but the renaming is done.
    """
    ocp = _import_orbax()
    import jax

    nested: dict[str, Any] = {}
    for leaf in leaves:
        *above, name = leaf.path.split("/")
        node = nested
        for key in above:
            node = node.setdefault(key, {})
        node[name] = leaf
    here = jax.process_index()  # not 0 where the program uses jax.distributed for its own purposes
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"functron{here}"
    )
    settings = {
        "use_ocdbt": True,
        "use_zarr3": True,
        "multiprocessing_options": alone,
        "type_handler_registry": ocp.type_handlers.create_type_handler_registry(
            (Leaf, _type_handler(ocp, write))
        ),
    }
    handler = ocp.PyTreeCheckpointHandler(handler_impl=_tree_handler(ocp, finish, settings))
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        arguments = ocp.args.PyTreeSave(nested, custom_metadata={"functron": 1})
        checkpointer.save(target, args=arguments, custom_metadata=dict(metadata))


def _type_handler(ocp: Any, write: Callable[[Path], None]) -> Any:
    """What Orbax calls to save all leaves: it has the processes write, and waits for them."""

    class LeafHandler(ocp.type_handlers.TypeHandler):
        def typestr(self) -> str:
            return "np.ndarray"  # so that every reader knows what to do

        async def serialize(self, values, infos, args=None):
            write(Path(infos[0].parent_dir))
            return []

        async def metadata(self, infos):
            raise AssertionError("leaves are only saved through this handler")

        async def deserialize(self, infos, args=None):
            raise AssertionError("leaves are only saved through this handler")

    return LeafHandler()


def _tree_handler(ocp: Any, finish: Callable[[Path], None], settings: dict[str, Any]) -> Any:
    """Orbax's handler of trees, with a last word before the checkpoint gets its name."""

    class TreeHandler(ocp.BasePyTreeCheckpointHandler):
        def finalize(self, directory):
            super().finalize(directory)
            finish(Path(directory))

    return TreeHandler(enable_pinned_host_transfer=False, **settings)


def _import_orbax() -> Any:
    if "jax" not in sys.modules:
        import jax

        # no GPU memory and no search for accelerators: arrays never become JAX arrays here
        jax.config.update("jax_platforms", "cpu")
    # what goes wrong is raised, once; Orbax's threads would log their tracebacks before
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    import orbax.checkpoint as ocp

    return ocp
