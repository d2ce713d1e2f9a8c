"""What is wrong with a table: all that keeps it from being a training step that ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from functron.errors import Problem
from functron.pipeline.action import KINDS, Action, Cell, Kind, Product
from functron.pipeline.place import cell_text, earliest_ticks

if TYPE_CHECKING:
    from functron.pipeline.schedule import Schedule


class Spot(NamedTuple):
    """Where in the table an action stands.

    Attributes:
        tick: its row.
        rank: its column.
        index: its position in the cell.
    """

    tick: int
    rank: int
    index: int


Spots = dict[tuple[int, Action], list[Spot]]  # by (rank, action)


def problems(schedule: Schedule, max_live: int | Sequence[int] | None = None) -> list[Problem]:
    """Everything that `Schedule.validate` complains about."""
    shape = [*_pipes(schedule)] or [*_rows(schedule)]
    if shape:  # nothing else can be said of a table whose ranks are not known
        return shape
    spots, found = _spots(schedule)
    counts = [*_counts(schedule, spots)]
    late = [*_order(schedule, spots)]
    # in columns that lack actions every rank would wait, which says nothing new
    circles = [] if found or counts else earliest_ticks(schedule, _columns(schedule))[1]
    bound = [] if max_live is None else [*_live_bound(schedule, max_live)]
    return [*found, *counts, *late, *circles, *bound]


def live(schedule: Schedule, rank: int) -> list[int]:
    """How many activations a rank holds while it does each of its cells; empty without backward."""
    if not schedule.has_backward:
        return []
    counts, now = [], 0
    for cell in schedule.cells(rank):
        now += sum(a.kind == "F" for a in cell)
        counts.append(now)
        now -= sum(a.kind in "BW" for a in cell)
    return counts


def _pipes(schedule: Schedule) -> Iterable[Problem]:
    """What is wrong with the pipes and the number of microbatches."""
    if not schedule.pipes or not all(schedule.pipes):
        fix = "name the rank of each stage, such as ((0, 0), (1, 0))"
        yield Problem("pipes", "a pipe without stages", "a stage or more", fix)
        return
    lengths = {len(pipe) for pipe in schedule.pipes}
    if len(lengths) > 1:
        wanted = "pipes through as many stages each, as they are the same model's"
        yield Problem("pipes", f"{sorted(lengths)} stages", wanted)
    held = [at for pipe in schedule.pipes for at in pipe]
    for at in sorted({at for at in held if held.count(at) > 1}):
        wanted = "one: chunks are numbered per rank"
        yield Problem(f"pipes: chunk {at[1]} of rank {at[0]}", "two stages", wanted)
    chunks: dict[int, set[int]] = defaultdict(set)
    for rank, chunk in held:
        chunks[rank].add(chunk)
    for what, numbers in [
        ("ranks", set(chunks)),
        *((f"chunks of rank {r}", chunks[r]) for r in chunks),
    ]:
        if numbers != set(range(len(numbers))):
            wanted = f"{what} numbered from 0 without gaps"
            yield Problem("pipes", f"{what} {sorted(numbers)}", wanted)
    if schedule.num_microbatches < 1:
        yield Problem("num_microbatches", str(schedule.num_microbatches), "1 or more")


def _rows(schedule: Schedule) -> Iterable[Problem]:
    """Rows that do not have a cell per rank."""
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_ranks:
            wanted = f"{schedule.num_ranks}, one per rank"
            yield Problem(f"tick {tick}", f"{len(row)} cells", wanted, "leave idle cells empty")


def _columns(schedule: Schedule) -> list[list[Cell]]:
    return [schedule.cells(rank) for rank in range(schedule.num_ranks)]


def _spots(schedule: Schedule) -> tuple[Spots, list[Problem]]:
    """Where each (rank, action) stands, and the problems of those that no table may have there."""
    spots: Spots = defaultdict(list)
    found = []
    for tick, row in enumerate(schedule.table):
        for rank, cell in enumerate(row):
            if len(cell) > 2:
                path, got = f"tick {tick}, rank {rank}, {cell_text(cell)}", f"{len(cell)} actions"
                found.append(Problem(path, got, "two at most", "use more ticks"))
            for index, action in enumerate(cell):
                spot = Spot(tick, rank, index)
                problem = _misplaced(schedule, spot, action)
                if problem is None:
                    spots[rank, action].append(spot)
                else:
                    found.append(problem)
    return spots, found


def _misplaced(schedule: Schedule, spot: Spot, action: Action) -> Problem | None:
    path = _path(spot, action)
    if action.kind not in KINDS:
        return Problem(path, f"kind {action.kind!r}", "F, B, I or W")
    if not 0 <= action.microbatch < schedule.num_microbatches:
        wanted = f"0 to {schedule.num_microbatches - 1}"
        return Problem(path, f"microbatch {action.microbatch}", wanted, "correct one of the counts")
    pipe = schedule.pipe_of(action.microbatch)
    chunks = [chunk for rank, chunk in schedule.pipes[pipe] if rank == spot.rank]
    if action.chunk in chunks:
        return None
    held = f"chunk {' or '.join(map(str, sorted(chunks)))}" if chunks else "another rank"
    return Problem(
        path,
        f"chunk {action.chunk} of rank {spot.rank}, no stage of pipe {pipe}",
        f"{held}, where microbatch {action.microbatch} passes",
        "move it to the rank and chunk that hold the stage",
    )


def _path(spot: Spot, action: object) -> str:
    return f"tick {spot.tick}, rank {spot.rank}, {action}"


def _counts(schedule: Schedule, spots: Spots) -> Iterable[Problem]:
    """Actions that are missing, twice in the table, or of both kinds of backward."""
    missing: dict[tuple[int, int, Kind], list[int]] = defaultdict(list)
    for m in range(schedule.num_microbatches):
        for rank, chunk in schedule.pipes[schedule.pipe_of(m)]:
            found: dict[Kind, list[Spot]] = {
                k: spots.get((rank, Action(k, m, chunk)), []) for k in KINDS
            }
            split = bool(found["I"] or found["W"])
            backward = ("I", "W") if split else ("B",) if schedule.has_backward else ()
            wanted: tuple[Kind, ...] = ("F", *backward)
            for kind, at in found.items():
                action = Action(kind, m, chunk)
                if kind in wanted and not at:
                    missing[rank, chunk, kind].append(m)
                for spot in at[1:]:
                    first = f"a second one, after the one of tick {at[0].tick}"
                    yield Problem(_path(spot, action), first, "one", "delete it")
            if split and found["B"]:
                path, got = (
                    _path(found["B"][0], Action("B", m, chunk)),
                    "B besides its parts I or W",
                )
                yield Problem(path, got, "one backward", "keep B, or I and W")
    for (rank, chunk, kind), microbatches in missing.items():
        actions = " ".join(str(Action(kind, m, chunk)) for m in microbatches)
        fix = f"add {'them' if len(microbatches) > 1 else 'it'}"
        yield Problem(f"rank {rank}", f"no {actions}", "one of each", fix)


def _order(schedule: Schedule, spots: Spots) -> Iterable[Problem]:
    """Actions that come too early, and ranks that wait for one another."""
    made: dict[Product, Spot] = {}
    for (rank, action), at in spots.items():
        product = schedule.makes(rank, action)
        made[product] = min(at[0], made.get(product, at[0]))
    for (rank, action), at in spots.items():
        for need in schedule.needs(rank, action):
            source = made.get(need)  # none: it is missing, which was said
            if source is None or _before(source, at[0]):
                continue
            wanted = f"it after that, at tick {source.tick + 1} or later"
            got = f"it needs the {need.what} that rank {source.rank} makes at tick {source.tick}"
            yield Problem(
                _path(at[0], action), got, wanted, f"move it down to tick {source.tick + 1}"
            )


def _before(source: Spot, user: Spot) -> bool:
    """Whether what is made at `source` can be used at `user`."""
    same_cell = source[:2] == user[:2] and source.index < user.index
    return source.tick < user.tick or same_cell


def _live_bound(schedule: Schedule, max_live: int | Sequence[int]) -> Iterable[Problem]:
    for rank in range(schedule.num_ranks):
        bound = max_live if isinstance(max_live, int) else max_live[rank]
        counts = live(schedule, rank)
        if max(counts, default=0) > bound:
            first = next(index for index, count in enumerate(counts) if count > bound)
            cell = cell_text(schedule.cells(rank)[first])
            got = f"{max(counts)} live activations, over {bound} from {cell} on"
            fix = f"move backwards before {cell}"
            yield Problem(f"rank {rank}", got, f"at most {bound}", fix)
