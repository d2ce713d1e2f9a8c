"""One of three processes that always makes the same mistake, and samples that are bad everywhere.

And one that is asked to stop.

Started by test_replay.py, with a folder for runs.
"""

import argparse
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from functron.apps.guard.anomalies import AnomalyConfig
from functron.apps.guard.faults import Corrupt, inject
from functron.models.gpt import GPTConfig
from functron.spmd import Mesh
from functron.training.config import configure
from functron.training.loop import Request, StopHook, every, loop
from functron.training.records import EVENTS, read
from functron.training.run import Job, prepare
from functron.training.train import train

FOLDER = Path(sys.argv[1])
dist.init_process_group("gloo")
RANK = dist.get_rank()
GPT = GPTConfig(vocab_size=256, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=16)
CONFIG = configure(
    gpt=GPT, data=argparse.__file__, mesh="dp=3", seq=16, global_batch=6, steps=6, save_every=2,
    anomalies=AnomalyConfig(attribute=True),
)  # fmt: skip
BOUND = Mesh(dp=3).bind()
FAULT = Corrupt(step=4, leaf="params/blocks/mlp/up/w", element=None, rank=1, times=None)


def ended(name: str, fault: Corrupt) -> tuple[str, dict]:
    """The end of a run with a fault, and what was found when its step was taken again."""
    around = partial(inject, faults=[fault], rank=RANK)
    try:
        train(prepare(CONFIG, BOUND, around=around), FOLDER / name)
    except (OSError, FloatingPointError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    dist.barrier()
    found = {event["kind"]: event for event in read(FOLDER / name / EVENTS)}
    return said, found["rerun"]


# one of three is asked to stop, alone: all end after the same step, and save it
request, saved = Request(), []


def ask_one(at) -> None:
    if (RANK, at.step) == (2, 2):
        request.signal = signal.SIGUSR1


run, job = prepare(CONFIG, BOUND), Job(True, RANK == 0)
stop, save = StopHook(request), every(4, lambda at: saved.append((at.step, int(at.state.step))))
taken = [
    record["step"]
    for _, record in loop(
        run.step, run.state, run.batch, steps=9, hooks=[ask_one, stop, save], ahead=1,
        agree=lambda number: int(job.across(number, dist.ReduceOp.MAX)),
    )
]  # fmt: skip
assert (taken, saved, stop.stopped_by) == ([1, 2, 3, 4], [(4, 4)], signal.SIGUSR1), (taken, saved)

said, found = ended("persistent", FAULT)
assert (found["class"], found["ranks"], found["compared"]) == ("persistent", [1], 3), found
assert "ranks 1 of 3 compute other numbers" in said, said
assert not (FOLDER / "persistent" / "again").exists()

said, found = ended("data", replace(FAULT, rank=None))
assert (found["class"], found["compared"], found["layer"]) == (
    "data", 3, "blocks/0, its activations",
), found  # fmt: skip
assert "step 5: got loss nan" in said, said
dist.destroy_process_group()
