"""States in host memory: kept for a neighbour, given back by it, and told from damaged ones."""

from __future__ import annotations

import os

import pytest

from functron.checkpoint import memory
from functron.checkpoint.memory import Header, neighbours
from functron.spmd import Mesh


def test_neighbours_are_on_other_machines():
    assert neighbours(Mesh(dp=4), "aaaa") == [1, 2, 3, 0]
    assert neighbours(Mesh(dp=4), "aabb") == [2, 3, 0, 1]
    assert neighbours(Mesh(dp=2, tp=2), "aabb") == [2, 3, 0, 1]
    assert neighbours(Mesh(tp=2, dp=2), "abab") == [1, 0, 3, 2]
    assert neighbours(Mesh(pp=2, fsdp=3), "aaabbb") == [1, 2, 0, 4, 5, 3]
    assert neighbours(Mesh(dp=2, fsdp=2), "abcd") == [2, 3, 0, 1]
    with pytest.raises(ValueError, match="mesh: got tp=2; wanted several dp or fsdp ranks"):
        neighbours(Mesh(tp=2), "ab")


def test_a_file_that_is_no_state(tmp_path):
    header = Header(3, 1, "d", (4,), (0,))
    assert Header.decode(header.encode()) == header
    for data in (b"", b"{}", b"[]", b"null", b'{"step": "x"}', header.encode()[:-1]):
        with pytest.raises(ValueError, match="no header of a state"):
            Header.decode(data)
    negative = header.encode().replace(b"[4]", b"[-4]")
    with pytest.raises(ValueError, match="as many checksums as sizes"):
        Header.decode(negative)
    file = tmp_path / "3-of-1"
    for data in (
        b"",
        b"\xff" * 8,
        (10**15).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"{}",
    ):
        file.write_bytes(data)
        assert memory._read_file(file, 3, 1, "d") is None
    encoded = Header(3, 1, "d", (10**15,), (0,)).encode()  # says that it is larger than it is
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    assert memory._read_file(file, 3, 1, "d") is None


def test_the_folder_of_a_run():
    one, other = (memory.folder_of("/dev/shm", name) for name in ("runs/a", "runs/b"))
    assert one != other
    assert one == memory.folder_of("/dev/shm", os.path.abspath("runs/a"))
    assert one.parent.as_posix() == "/dev/shm"


KEEP = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from functron import Mesh, tree
from functron.checkpoint import memory as room
from tests.damage import flip_bit

dist.init_process_group("gloo")
mesh = Mesh(dp=2, tp=2).bind()
rank = mesh.rank
machines = [Path(sys.argv[1]) / f"machine-{r}" for r in range(4)]

def state(step, rank=rank):
    x = torch.arange(3000.0 + 100 * rank).view(-1, 20) + 1000 * step + 100_000 * rank
    halves = {"bf": x.to(torch.bfloat16), "f8": x.to(torch.float8_e4m3fn), "n": torch.tensor(step)}
    return {"x": x, "empty": torch.empty(0, 3), "many": halves}

def begin(about=""):
    like = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), state(0))
    return room.Memory(machines[rank], mesh, like, about)

def check(there, step):
    found = there.newest(at_least=1)
    assert found is not None and found[0] == step, (rank, found and found[0], step)
    for path, a, b in zip(tree.paths(found[1]), tree.leaves(found[1]), tree.leaves(state(step)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), path

kept = begin()
assert kept.newest(at_least=1) is None
for step in (2, 4, 6):
    now = state(step)
    kept.save(step, now)
    now["x"].zero_()  # it may change at once
kept.wait()
assert kept._to == [2, 3, 0, 1]
names = sorted(path.name for path in machines[rank].glob("*/*"))
assert names == sorted([f"6-of-{rank}", f"6-of-{(rank + 2) % 4}"]), names
check(begin(), 6)
assert begin().newest(at_least=7) is None
assert begin("another seed").newest(at_least=1) is None
dist.barrier()

# one machine is lost, with all that it had
if rank == 1:
    import shutil
    shutil.rmtree(machines[1])
dist.barrier()
there = begin()
check(there, 6)
there.save(8, state(8))
there.wait()
dist.barrier()

# one bit of a rank's own state: the neighbour's copy is taken
if rank == 2:
    flip_bit(machines[2] / "rank-2" / "8-of-2", 5000, 3)
dist.barrier()
check(begin(), 8)
# and of that too: there is nothing to go on from
if rank == 0:
    flip_bit(machines[0] / "rank-0" / "8-of-2", 700, 1)
dist.barrier()
assert begin().newest(at_least=1) is None
there.forget()
dist.barrier()
assert not machines[rank].exists()
if rank == 0:
    print("kept and given back")
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_lost_machine_is_made_good_by_neighbours(torchrun, tmp_path):
    assert torchrun(KEEP, 4, tmp_path).stdout == "kept and given back\n"
