"""Where results lie, by functron's rules and by those of torch's DTensor, for one mesh axis.

DTensor runs each operation on ranks that are fakes. What differs is listed with the reason.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import functron as ft
from functron import P

# an operation, the shapes of its operands (of one dim and first: indices), and their split dims
CASES = {
    "column-parallel product": (torch.mm, [(8, 16), (16, 8)], [None, 1]),
    "row-parallel product": (torch.mm, [(8, 16), (16, 8)], [1, 0]),
    "product of a split batch": (torch.mm, [(8, 16), (16, 8)], [0, None]),
    "batched product": (torch.bmm, [(4, 8, 16), (4, 16, 8)], [0, 0]),
    "sum of replicated and split": (torch.add, [(8, 16), (16,)], [1, None]),
    "gelu": (F.gelu, [(8, 16)], [1]),
    "sum over what is split": (lambda x: x.sum(1), [(8, 16)], [1]),
    "sum over what is not": (lambda x: x.sum(1), [(8, 16)], [0]),
    "softmax over what is not": (lambda x: x.softmax(1), [(8, 16)], [0]),
    "softmax over what is split": (lambda x: x.softmax(1), [(8, 16)], [1]),
    "layer norm of split rows": (lambda x: F.layer_norm(x, (16,)), [(8, 16)], [0]),
    "heads": (lambda x: x.view(8, 4, 4), [(8, 16)], [1]),
    "rows and heads": (lambda x: x.view(2, 4, 16), [(8, 16)], [0]),
    "transpose": (lambda x: x.t(), [(8, 16)], [1]),
    "vocabulary-parallel embedding": (F.embedding, [(8,), (16, 8)], [None, 0]),
    "embedding of split features": (F.embedding, [(8,), (16, 8)], [None, 1]),
    "concatenation": (lambda x, y: torch.cat([x, y], 1), [(8, 16), (8, 16)], [0, 0]),
    "largest of what is split": (lambda x: x.amax(1), [(8, 16)], [1]),
    "sort": (lambda x: x.sort(1).values, [(8, 16)], [0]),
}  # fmt: skip
DIFFERENT = {
    # DTensor gathers the dim; here the largest and the sum of exponentials are combined over ranks
    "softmax over what is split": ("whole", "split in 1"),
    # of a rank's largest alone it is not known how many elements share the cotangent: combined here
    "largest of what is split": ("partial max", "whole"),
}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def operand(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(8) if number == 0 and len(shape) == 1 else torch.randn(shape)


def dtensor_says(mesh, fn, shapes, dims) -> str:
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    args = [
        distribute_tensor(operand(i, shape), mesh, [placement])
        for i, (shape, placement) in enumerate(zip(shapes, placements, strict=True))
    ]
    (placement,) = fn(*args).placements
    if placement.is_partial():
        return f"partial {placement.reduce_op}"
    return "whole" if placement.is_replicate() else f"split in {placement.dim}"


def functron_says(fn, shapes, dims) -> str:
    """Of the last operation's result, before it is brought to where results are returned."""
    specs = tuple(P() if dim is None else P(*[None] * dim, "tp") for dim in dims)
    mapped = ft.partition(fn, ft.Mesh(tp=2), specs)
    lines = mapped.explain(*(operand(i, shape) for i, shape in enumerate(shapes))).splitlines()
    made = next(line for line in reversed(lines) if " = " in line).partition(" = ")[0]
    if partial := re.search(r"partial (\w+) over", made):
        return f"partial {partial[1]}"
    spec = re.search(r"P\((.*?)\)", made)
    assert spec is not None
    entries = spec[1].split(", ")
    return f"split in {entries.index(repr('tp'))}" if repr("tp") in entries else "whole"


@pytest.mark.parametrize("name", CASES)
def test_results_lie_where_dtensor_has_them(mesh, name):
    theirs, ours = dtensor_says(mesh, *CASES[name]), functron_says(*CASES[name])
    assert (theirs, ours) == DIFFERENT.get(name, (theirs, theirs))
