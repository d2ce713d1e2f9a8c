"""Meshes, specs, collectives and shard_map: per-rank programs, simulated or distributed."""

from functron.spmd import collectives
from functron.spmd.distributed import gather, shard
from functron.spmd.mesh import CONTEXT_AXES, DATA_AXES, FSDP_AXES, STANDARD_AXES, BoundMesh, Mesh
from functron.spmd.shard_map import shard_map
from functron.spmd.spec import P, Rules, local_shape, offsets, spec_axes

__all__ = [
    "CONTEXT_AXES",
    "DATA_AXES",
    "FSDP_AXES",
    "STANDARD_AXES",
    "BoundMesh",
    "Mesh",
    "P",
    "Rules",
    "collectives",
    "gather",
    "local_shape",
    "offsets",
    "shard",
    "shard_map",
    "spec_axes",
]
