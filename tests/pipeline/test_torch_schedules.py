"""Classic schedules against the orders of torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from functron.pipeline import Schedule
from functron.pipeline.registry import breadth_first, gpipe, interleaved, one_f_one_b

COUNTS = [(p, m) for p in (1, 2, 3, 4, 5) for m in (1, 2, 3, 4, 7, 8)]


def our_order(schedule: Schedule) -> list[list[str]]:
    """Per rank what a schedule does, as "stage kind microbatch"."""
    return [
        [f"{schedule.stage_of(r, a.chunk)[1]}{a.kind}{a.microbatch}" for _, a in schedule.column(r)]
        for r in range(schedule.num_ranks)
    ]


def run_order(kind: type, p: int, m: int) -> list[list[str]]:
    """The same of what torch's schedule of one stage per rank calls, on stages that only record."""
    orders = []
    for rank in range(p):
        calls: list[str] = []

        def forward(index, *_, calls=calls, rank=rank, **__):
            calls.append(f"{rank}F{index}")

        def backward(index, *_, calls=calls, rank=rank, **__):
            calls.append(f"{rank}B{index}")

        stage = SimpleNamespace(
            stage_index=rank, forward_one_chunk=forward, backward_one_chunk=backward,
            perform_reduce_grad=lambda *_: None,
            **{f"get_{way}_{op}_ops": lambda _: [] for way in ("fwd", "bwd") for op in ("send", "recv")},
        )  # fmt: skip
        schedule = SimpleNamespace(
            _stage=stage, _num_stages=p, _n_microbatches=m, scale_grads=True,
            _check_inputs=lambda *_: ([()] * m, [{}] * m),
            **{name: lambda *_: None for name in
               ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")},
        )  # fmt: skip
        kind._step_microbatches(schedule)  # type: ignore[attr-defined]
        orders.append(calls)
    return orders


def table_order(kind: type, p: int, m: int, v: int) -> list[list[str]]:
    """The same of the table of torch's schedule of several stages per rank."""
    stages = [
        SimpleNamespace(
            group_size=p, group_rank=0, num_stages=p * v, submod=None, stage_index=c * p
        )
        for c in range(v)
    ]
    order = kind(stages, m).pipeline_order  # type: ignore[call-arg]
    return [[str(a) for a in order[rank] if a is not None] for rank in range(p)]


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_gpipe_and_1f1b_run_in_torchs_order(p, m):
    assert our_order(gpipe(p, m)) == run_order(torch_schedules.ScheduleGPipe, p, m)
    assert our_order(one_f_one_b(p, m)) == run_order(torch_schedules.Schedule1F1B, p, m)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(
    ("p", "m"), [(1, 3), (2, 2), (2, 8), (3, 6), (3, 8), (4, 8), (4, 10), (5, 15)]
)
def test_interleaved_is_torchs(p, m, v):
    group = m // max(1, m // p)  # torch makes the groups as long as will do
    ours = our_order(interleaved(p, m, v, group_size=group))
    assert ours == table_order(torch_schedules.ScheduleInterleaved1F1B, p, m, v)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (3, 5, 2), (4, 4, 3)])
def test_breadth_first_is_torchs_but_for_the_order_of_backwards_within_a_chunk(p, m, v):
    theirs = table_order(torch_schedules.ScheduleLoopedBFS, p, m, v)
    turned = [
        [f"{stage}B{m - 1 - int(index)}" if kind == "B" else f"{stage}{kind}{index}"
         for stage, kind, index in ((a[: a.index(k)], k, a[a.index(k) + 1 :])
                                    for a in order for k in "FB" if k in a)]
        for order in theirs
    ]  # fmt: skip
    assert our_order(breadth_first(p, m, v)) == turned
