"""Interrupts a training step anywhere, as Ctrl-C does, and looks at the state that is left.

``python -m tests.training.interrupts WAY COUNT`` tries more points. In two processes (`ranks`), rank
1 is interrupted, or both are, at different places.
"""

from __future__ import annotations

import contextvars
import random as numbers
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import functron as ft
from functron import BoundMesh, Mesh, P, gpt, optim, random, tree
from functron.pipeline import make
from functron.spmd.donation import Donated
from functron.spmd.mesh import LostRanksError
from tests.pipeline.test_composition import CONFIG, batch, decoder, layout_of

WAYS = {
    "eager": Mesh(),
    "simulated": Mesh(dp=2, tp=2),
    "compiled": Mesh(dp=2),
    "pipeline": Mesh(pp=2),
}
ON_RANKS = {"rank": Mesh(dp=2), "compiled rank": Mesh(dp=2), "stage": Mesh(pp=2), "two": Mesh(pp=2)}
"""Each rank's own program, compiled, stages of a pipeline, and these as two compiled programs."""

SMALL = replace(CONFIG, num_layers=2, dropout=0.0)


def prepared(way: str, mesh: Mesh | BoundMesh) -> tuple[Callable, Callable[[], Any], Any]:
    """A step, what makes its state anew (the same every time), and its batch."""
    defs, stages, rank = gpt.defs(SMALL), None, None
    if mesh["pp"] > 1:
        options = {"compile": {"backend": "eager"}} if way == "two" else {}
        schedule = make("1f1b", mesh["pp"], 2)
        stages = decoder(SMALL, schedule, layout_of((1, 1)), **options)
        if isinstance(mesh, BoundMesh):
            rank = mesh.coordinate["pp"]
            defs = stages.partition.local_defs(defs, rank)
    specs = ft.param_specs(defs, gpt.rules(SMALL, WAYS.get(way) or ON_RANKS[way]))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))

    def loss(params, data, key):
        return gpt.loss(SMALL, params, data, key=key)

    gradients = (
        ft.mean_gradients(loss, gpt.num_targets)
        if stages is None
        else ft.pipeline.gradients(stages, gpt.num_targets)
    )
    step = ft.make_step(gradients, optimizer, mesh, specs)
    if way.startswith("compiled"):
        step = ft.jit(step, donate=0, backend="eager")
    data = ft.shard(batch(4), P(ft.DATA_AXES), mesh)
    first = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    return step, lambda: tree.map(torch.clone, first), data


@contextmanager
def interrupted(at: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[list[int]]:
    """Raises at the line of Python with that number, of all in a with block, and counts them."""
    seen = [0]

    def look(frame: FrameType, event: str, argument: object) -> Any:
        # a step that has ended is lost where what returns its results is interrupted
        if not frame.f_code.co_filename.endswith(("interrupts.py", "core/errors.py")):
            seen[0] += 1
            if seen[0] == at:
                raise error
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield seen
    finally:
        sys.settrace(before)


def num_lines(step: Callable, fresh: Callable[[], Any], data: Any) -> int:
    """How many lines of Python a step runs at least: the first ones also check annotations."""
    found = []
    for _ in range(3):
        state = fresh()
        with interrupted(-1) as seen:
            step(state, data)
        found.append(seen[0])
    return min(found)


def look_at(state: Any, before: Any) -> str:
    """ "whole" or "gone": the only two that a state may be."""
    leaves = [leaf for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)]
    if all(type(leaf) is torch.Tensor for leaf in leaves):
        rows = zip(tree.paths(before), leaves, tree.leaves(before), strict=True)
        changed = [path for path, a, b in rows if not torch.equal(a, b)]
        assert not changed, f"changed, and taken as it was: {changed}"
        return "whole"
    kept = [
        p for p, leaf in zip(tree.paths(state), leaves, strict=True) if type(leaf) is not Donated
    ]
    assert not kept, f"of a state that is gone there is left {kept}"
    return "gone"


def refused(step: Callable, state: Any, data: Any) -> str:
    """The words with which a step refuses a state that is gone."""
    try:
        step(state, data)
    except ValueError as error:
        return str(error)
    raise AssertionError("a state that is gone was taken")


def check(way: str, count: int, seed: int = 0) -> dict[str, int]:
    """Interrupts `count` steps in this process, each somewhere; how often the state was what."""
    step, fresh, data = prepared(way, WAYS[way])
    want, _ = step(fresh(), data)
    lines, draw = num_lines(step, fresh, data), numbers.Random(seed)
    found = {"whole": 0, "gone": 0, "done": 0}
    # the update is a small part of all lines, and the most dangerous one
    points = [draw.randrange(lines) for _ in range(count // 2)]
    points += [lines - draw.randrange(lines // 8) for _ in range(count - len(points))]
    for point in points:
        state = fresh()
        try:  # in a context of its own: the outermost scope has no scope around it that ends it
            with interrupted(point):
                contextvars.copy_context().run(step, state, data)
        except KeyboardInterrupt:
            what = look_at(state, fresh())
        else:  # it came where torch asks from C++, and swallows what Python raises
            what = "done"
        found[what] += 1
        if what == "gone":
            said = refused(step, state, data)
            assert "was being updated when" in said or "was donated" in said, said
        again, _ = step(state if what == "whole" else fresh(), data)
        for path, a, b in zip(tree.paths(want), tree.leaves(again), tree.leaves(want), strict=True):
            assert torch.equal(a, b), f"{path} differs after the interrupt at {point} of {lines}"
    return found


def check_ranks(way: str, count: int, seed: int) -> None:
    """Interrupts one rank, or both, somewhere: no rank goes on with the other, from other states."""
    me, draw = dist.get_rank(), numbers.Random(seed)
    lines = 0
    for turn in range(count):
        mesh = ON_RANKS[way].bind()
        step, fresh, data = prepared(way, mesh)
        step(fresh(), data)
        if not lines:
            lines = num_lines(step, fresh, data)
        each = [int(draw.random() * lines) for _ in range(2)]  # lines differ where ranks wait
        hit = [bool(turn % 2), True]
        state, error, began = fresh(), None, time.monotonic()
        try:
            with interrupted(each[me] if hit[me] else -1):
                after, _ = step(state, data)
        except (KeyboardInterrupt, RuntimeError) as caught:
            error = caught
        words = str(error)
        assert type(error) is not RuntimeError, error
        assert not isinstance(error, LostRanksError) or "lost the" in words or "closed" in words
        what = "done" if error is None else look_at(state, fresh())
        assert time.monotonic() - began < 30, f"waited for {time.monotonic() - began} s"
        # whoever has a state goes on, to the same step: a rank that had sent nothing takes that in
        # which it was interrupted once more, beside one that waited for it there and is ahead by it
        taken, words = int(what == "done"), ""
        try:
            while taken < 3:
                state, _ = step(after if what == "done" and taken == 1 else state, data)
                taken += 1
        except (ValueError, LostRanksError) as refusal:
            words = str(refusal)
        assert not words or "closed" in words or "lost the" in words or what == "gone", words
        went_on: list[Any] = [None, None]
        dist.all_gather_object(went_on, (what, taken, not words))
        together = went_on[0][1] == went_on[1][1]
        assert together or not (went_on[0][2] or went_on[1][2]), went_on
        del step, state, error
    print(f"rank {me}: {way} ends", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        dist.init_process_group("gloo")
        for name in sys.argv[4:] or ON_RANKS:
            check_ranks(name, int(sys.argv[2]), int(sys.argv[3]))
        dist.destroy_process_group()
    else:
        print(check(sys.argv[1], int(sys.argv[2])))
