"""Bits that flip in the state of one of four processes: found, named, and repaired or refused.

Started by test_corruption.py. The first argument is a folder for runs, the second the data.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from functron import tree
from functron.apps.guard.corruption import CorruptionError, replicas_of
from functron.apps.guard.faults import Corrupt, inject
from functron.models.gpt import GPTConfig
from functron.spmd import Mesh
from functron.training.config import configure
from functron.training.records import EVENTS, read
from functron.training.run import Job, own_hash, prepare
from functron.training.train import train

FOLDER, DATA = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
RANK = dist.get_rank()
GPT = GPTConfig(vocab_size=256, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=16)
BASE = configure(
    gpt=GPT, data=DATA, seq=16, global_batch=8, steps=4, check_replicas_every=2, save_every=0
)


def taken(name: str, mesh: str, fault: Corrupt | None = None, **changes):
    """The events of a run with a fault, its history and what it raised."""
    config = configure(BASE, mesh=mesh, **changes)
    run = prepare(config, BOUND[mesh])
    if fault is not None:
        run = replace(run, step=inject(run.step, [fault], RANK))
    out, error, history = FOLDER / name, "", []
    try:
        outcome = train(run, out)
    except CorruptionError as raised:
        error = str(raised)
    else:
        history = outcome.history
        same(run, outcome.state)
    dist.barrier()
    return read(out / EVENTS), history, error


def same(run, state) -> None:
    """See that replicas of the state are equal, by all of their bits on all ranks."""
    found = replicas_of(run, Job.of(run))
    assert found is not None
    rows = zip(tree.paths(state), tree.leaves(state), strict=True)
    own = {path: leaf.detach().contiguous().numpy().tobytes() for path, leaf in rows}
    said = [own] * 4
    dist.all_gather_object(said, own)
    paths = tree.paths(state)
    for group in found.groups(state):
        for path in (paths[number] for number in group.leaves):
            assert all(said[rank][path] == own[path] for rank in found._ranks(group.axes)), path


BOUND = {
    mesh: Mesh.parse(mesh).bind() for mesh in ("dp=4", "dp=2,tp=2", "pp=2,dp=2", "dp=2,fsdp=2")
}

# no false alarm, whatever divides the state
for mesh, more in (
    ("dp=2,tp=2", {"sequence_parallel": True, "zero": 1}),
    ("pp=2,dp=2", {"microbatches": 2, "vocab_over_pp": True}),
):
    events, history, error = taken(f"quiet-{mesh}", mesh, **more)
    assert (events, error) == ([], ""), (mesh, events, error)
    assert len(history) == 4

# one of four is wrong: its bits are those of the others again
fault = Corrupt(step=2, leaf="params/blocks/mlp/down/w", rank=2, element=5, bit=20)
events, history, error = taken("repaired", "dp=4", fault)
assert not error, error
assert [(e["kind"], e["step"], e["rank"]) for e in events] == [
    ("corruption", 4, 2),
    ("repair", 4, 2),
]
assert "params/blocks/mlp/down/w" in events[1]["leaves"]
assert all(row["ranks"] == [2] and row["replicas"] == 4 for row in events[0]["found"])

# as it would be asked for
events, _, error = taken("stopped", "dp=4", replace(fault, rank=3), on_corruption="stop")
assert "bits on rank 3 unlike those of the others of 4" in error, error
assert [e["kind"] for e in events] == ["corruption"]

# two that differ: nobody knows which is right; a leaf of which there are four is repaired
events, _, error = taken("two", "dp=2,tp=2", replace(fault, rank=1))
assert "replicas on ranks 1, 3 that differ, and no majority" in error, error
norm = Corrupt(step=2, leaf="params/norm/scale", rank=1, element=3, bit=21)
events, _, error = taken("four", "dp=2,tp=2", norm)
assert not error, error
assert {row["leaf"]: row["ranks"] for row in events[0]["found"]}["params/norm/scale"] == [1]

# what makes the loss infinite is found at once, and the update that it led to was left out
huge = Corrupt(step=2, leaf="params/blocks/mlp/down/w", rank=0, element=5, value=float("inf"))
optimizer = replace(BASE.optimizer, skip_nonfinite=3)
events, history, error = taken("huge", "dp=4", huge, check_replicas_every=100, optimizer=optimizer)
assert [(e["kind"], e["step"], e["rank"]) for e in events] == [
    ("corruption", 3, 0),
    ("repair", 3, 0),
]
assert len(history) == 4

# the sum of the ranks' checksums is that of the batch, however it is divided
config = configure(BASE, steps=1)
whole = own_hash(Mesh(), prepare(config, Mesh()).host_batch(0))
for mesh in (*BOUND, "fsdp=2,cp=2"):
    bound = BOUND.get(mesh) or Mesh.parse(mesh).bind()
    run = prepare(configure(config, mesh=mesh), bound)
    assert Job.of(run).start_sum(own_hash(bound, run.host_batch(0)))() == [whole], mesh

dist.destroy_process_group()
