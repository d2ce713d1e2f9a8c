"""Ranks of any mesh as threads of this process: they save together as processes do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from functron.spmd import BoundMesh, Mesh


@pytest.fixture
def on_ranks() -> Callable[..., list]:
    """`on_ranks(mesh, fn)`: what ``fn(bound mesh, store)`` returns on each rank of the mesh.

    The ranks are threads that share a store. Their meshes have no process groups, which saving
    and restoring must not use.
    """

    def run(mesh: Mesh, fn: Callable[[BoundMesh, dist.Store], Any]) -> list:
        store = dist.HashStore()
        bound = [BoundMesh(mesh, r, mesh.coordinate(r), {}, "cpu") for r in range(mesh.size)]
        with ThreadPoolExecutor(mesh.size) as pool:
            futures = [pool.submit(fn, one, store) for one in bound]
        return [future.result() for future in futures]

    return run
