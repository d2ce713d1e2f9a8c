"""Faults put into runs on purpose, and what becomes of the runs.

Run it as ``python benchmarks/faults.py``; ``--only`` takes names of sections. It exits with 1 where
a run does not survive what it should. Ranks are forks of this process, which has imported all that
they need, so that a restart takes seconds; they talk over gloo, as processes of torchrun do.
"""

from __future__ import annotations

import argparse
import argparse as text
import contextlib
import gc
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from functron import checkpoint, data, tree
from functron.apps.guard import faults
from functron.apps.guard.anomalies import AnomalyConfig, Guard
from functron.apps.guard.corruption import replicas_of
from functron.apps.guard.stragglers import Comparison, Stopwatch, axes_of
from functron.apps.guard.watchdog import Watchdog
from functron.checkpoint import saver
from functron.checkpoint.folder import LATER
from functron.cli import launch, process
from functron.cli import train as command
from functron.core.settings import value_at
from functron.data.preprocess import PreprocessSettings, preprocess
from functron.data.sampling import shuffled
from functron.optim import OptimizerConfig
from functron.spmd import BoundMesh, Mesh
from functron.spmd.flight import FlightRecorder
from functron.training import records, run_folder
from functron.training.config import TrainConfig, configure, load
from functron.training.run import Job, own_hash, prepare
from functron.training.train import train

RANKS = 4
TINY = [
    "--data", text.__file__, "--seq", "16", "--gpt.num-layers", "1", "--gpt.embed-dim", "32",
    "--gpt.num-heads", "4", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "48", "--device", "cpu",
    "--global-batch", "12", "--prefetch", "0", "--timeout-seconds", "60",
]  # fmt: skip


def main() -> int:
    """Run the sections; the exit code is 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), default=sorted(SECTIONS))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60, help="after which no more kills are")
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=1000, help="that flip in files")
    parser.add_argument("--numbers", type=int, default=50)
    parser.add_argument("--rollbacks", type=int, default=5)
    parser.add_argument("--hangs", type=int, default=50)
    parser.add_argument("--slow", type=int, default=10)
    parser.add_argument("--quiet", type=int, default=500, help="steps without a slow rank")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps that are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where runs lie; a temporary one by default")
    options = parser.parse_args()
    warm()
    good = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.only:
            began = time.perf_counter()
            found, fine = SECTIONS[name](Path(folder) / name, options)
            good &= fine
            seconds = time.perf_counter() - began
            print(f"{name}: {'as it should be' if fine else 'WRONG'}, in {seconds:.0f} s")
            for line in found:
                print(f"  {line}")
            sys.stdout.flush()
    return 0 if good else 1


Found = tuple[list[str], bool]
At = Callable[[str, int], None]


@dataclass
class Forks:
    """Starts ranks of ``functron train`` as forks of this process; see `launch.Start`.

    Attributes:
        log: where what they print goes.
        at: makes, by the number of the start and the rank, what they call at moments of the run.
        endings: of all starts until now.
    """

    log: Path
    at: Callable[[int, int], At] = lambda start, rank: saver.nowhere
    endings: list[launch.Ending] = field(default_factory=list)

    def __call__(self, nproc: int, arguments: Sequence[str]) -> launch.Ending:
        number, port = len(self.endings), free_port()
        pids: dict[int, int] = {}
        for rank in range(nproc):
            pid = os.fork()
            if pid == 0:
                self._be(rank, nproc, port, arguments[3:], number)
            pids[pid] = rank
        first: tuple[int, int] | None = None
        while pids:
            pid, status = os.wait()
            rank, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
            if code and first is None:
                first = rank, code
                leaves = code in (*launch.LEFT_CODES, launch.RESHAPE_CODE)
                for other in () if leaves else pids:
                    os.kill(other, signal.SIGKILL)
        self.endings.append(self._ending(first))
        return self.endings[-1]

    def _ending(self, first: tuple[int, int] | None) -> launch.Ending:
        rank, code = first or (None, 0)
        for error in sorted(self.log.parent.glob(f"{self.log.name}.error.[0-9]")):
            with self.log.open("a") as log:
                log.write(json.loads(error.read_text())["message"]["extraInfo"]["py_callstack"])
            error.unlink()
        if code in (0, *launch.LEFT_CODES, launch.RESHAPE_CODE):
            return launch.Ending(code)
        positive = code if code > 0 else 128 - code
        return launch.Ending(positive, f"rank {rank} ended with {code}", rank, final=code == 2)

    def _be(self, rank: int, nproc: int, port: int, arguments: Sequence[str], number: int) -> None:
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stderr = sys.__stderr__ or sys.stdout
        tqdm.set_lock(threading.RLock())  # its own is a semaphore that all forks would share
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": f"{process.MARK}forks",
            "TORCHELASTIC_ERROR_FILE": f"{self.log}.error.{rank}",
        }  # fmt: skip
        code = 1
        try:
            at = self.at(number, rank)
            code = process.run_guarded(lambda: command.run(arguments, at))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def warm() -> None:
    """Import all that a rank does, and what a step imports: forks then have it."""
    saver._import_orbax()
    tqdm.monitor_interval = 0  # no thread, whose locks forks would have
    torch.set_num_threads(1)
    config = command.parse_train([*TINY, "--mesh", "dp=2", "--steps", "1", "--deterministic"])
    train(prepare(config, Mesh(dp=2)), None)
    gc.collect()
    gc.freeze()  # a fork's pages stay those of this process


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def apart(compute: Callable[[], str]) -> str:
    """The text that ``compute()`` gives in a fork, whose threads this process must not have."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = compute()
        except BaseException:
            told = traceback.format_exc()
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        told = stream.read()
    os.waitpid(pid, 0)
    return told


def supervised(out: Path, arguments: Sequence[str], start: launch.Start) -> int:
    """The exit code of ``functron train`` with these arguments, whose processes `start` runs."""
    given = [*TINY, *arguments, "--nproc", str(RANKS), "--restart-pause-seconds", "0"]
    config = command.parse_train(given)
    out.mkdir(parents=True)
    with open(os.devnull, "w") as quiet:
        shown, sys.stderr = sys.stderr, quiet
        try:
            return launch.supervise(config, given, out, start)
        finally:
            sys.stderr = shown


def losses(out: Path) -> list[tuple[int, float]]:
    """The steps and losses that a run recorded."""
    return [(record["step"], record["loss"]) for record in run_folder.records(out)]


def same_bits(one: Path, other: Path) -> str:
    """The differences of two checkpoints; empty: none."""

    def compare() -> str:
        states = [checkpoint.restore(path) for path in (one, other)]
        paths = tree.paths(states[0])
        rows = zip(paths, *map(tree.leaves, states), strict=True)
        return ", ".join(path for path, a, b in rows if not torch.equal(a, b))

    return apart(compare)


# --- kills


EVERY, EVALUATED = 2, 4
MOMENTS = ("open", "restored", "step", "step", "evaluate", "save", "write", "written", "commit",
           "committed")  # fmt: skip


def plan_kill(draw: random.Random, newest: int) -> faults.Kill:
    """One kill of a run that goes on from step `newest`."""
    moment: Any = draw.choice(MOMENTS)
    rank = 0 if moment in ("commit", "committed") else draw.randrange(RANKS)
    after = draw.choice((0.0, draw.uniform(0.0, 0.1)))
    step: int | None = None
    if moment == "step":
        step = newest + draw.randrange(2 * EVERY)
    elif moment not in ("open", "restored"):
        every = EVALUATED if moment == "evaluate" else EVERY
        step = (newest // every + draw.choice((1, 1, 2))) * every
    return faults.Kill(moment, rank, step, after)


def kills(folder: Path, options: argparse.Namespace) -> Found:
    """SIGKILL of a random rank at a random moment, again and again, in one run."""
    draw = random.Random(options.seed)
    arguments = [
        "--mesh", "dp=4", "--zero", "1", "--deterministic", "--keep-last", "3",
        "--steps", str(2 * options.kills + 20), "--save-every", str(EVERY),
        "--eval-every", str(EVALUATED), "--eval-batches", "1", "--eval-data", f"t={text.__file__}",
        "--max-restarts", "100",
    ]  # fmt: skip
    folder.mkdir()
    whole, killed = folder / "whole", folder / "killed"
    codes = [supervised(whole, arguments, Forks(folder / "whole.log"))]
    newest: list[int] = [0]
    lost: list[str] = []
    wrong: list[str] = []
    planned: list[faults.Kill] = []
    seen = folder / "restored"

    def at(number: int, rank: int) -> At:
        inner = faults.moments([planned[number]] if number < len(planned) else [], rank)

        def reached(moment: str, step: int) -> None:
            if moment == "restored" and rank == 0:
                seen.write_text(str(step))
            kill = planned[number] if number < len(planned) else None
            if kill and (kill.moment, kill.rank, kill.step or step) == (moment, rank, step):
                (folder / f"kill-{number}").touch()
            inner(moment, step)

        return reached

    forks = Forks(folder / "killed.log", at)

    def start(nproc: int, given: Sequence[str]) -> launch.Ending:
        if len(planned) < options.kills and time.perf_counter() - began < 60 * options.minutes:
            planned.append(plan_kill(draw, newest[-1]))
        seen.unlink(missing_ok=True)
        ending = forks(nproc, given)
        if seen.exists() and int(seen.read_text()) != newest[-1]:
            wrong.append(f"went on from {seen.read_text()}, not from {newest[-1]}")
        saved = checkpoint.steps(killed / "checkpoints")
        if (saved or [0])[-1] < newest[-1]:
            lost.append(f"{newest[-1]} of {saved}")
        newest.append((saved or [0])[-1])
        return ending

    began = time.perf_counter()
    codes.append(supervised(killed, arguments, start))
    seconds = time.perf_counter() - began
    events = records.read(killed / records.EVENTS)
    happened = [
        kill.moment + (", later" if kill.after_seconds else "")
        for number, kill in enumerate(planned)
        if (folder / f"kill-{number}").exists()
    ]
    ends = Counter(ending.code for ending in forks.endings)
    unasked = len(events) - len(happened)
    last = Path("checkpoints") / str(2 * options.kills + 20)
    differ = same_bits(whole / last, killed / last)
    damaged = apart(lambda: "" if checkpoint.verify(killed / last) else "nothing")
    same = losses(whole) == losses(killed)
    found = [
        f"{len(happened)} kills, {len(events)} restarts, {seconds:.0f} s; exit codes {codes}",
        ", ".join(f"{moment}: {count}" for moment, count in sorted(Counter(happened).items())),
        f"exit codes of starts: {dict(ends)}, of which {unasked} without a kill",
        f"complete checkpoints lost: {len(lost)} {lost[:3]}",
        f"went on from another than the newest: {len(wrong)} {wrong[:3]}",
        f"leaves that differ from the run that nothing killed: {differ or 0}; "
        f"records of losses the same: {same}; damage: {damaged or 0}",
    ]
    # the last that was planned may have been for a moment after the end of the run
    fine = len(planned) - 1 <= len(happened) > 0 and not unasked and same
    fine &= not (any(codes) or lost or wrong or differ or damaged)
    return found, fine


# --- elastic


def elastic(folder: Path, options: argparse.Namespace) -> Found:
    """Four processes, three and four again: the losses of a run on four."""
    del options
    folder.mkdir()
    found, fine = [], True
    for dtype in ("float32", "float64"):
        slots = folder / f"slots-{dtype}"
        slots.write_text(str(RANKS))
        arguments = [
            "--mesh", f"dp={RANKS}", "--steps", "60", "--save-every", "5", "--gpt.dtype", dtype,
            "--max-restarts", "2",
        ]  # fmt: skip
        whole, changed = folder / f"whole-{dtype}", folder / f"changed-{dtype}"
        codes = [supervised(whole, arguments, Forks(folder / "whole.log"))]

        def at(number: int, rank: int, slots: Path = slots) -> At:
            inner = faults.moments([faults.Kill("step", 2, 18)] if number == 0 else [], rank)

            def reached(moment: str, step: int) -> None:
                if (moment, step, rank) in (("step", 18, 2), ("step", 33, 0)):
                    slots.write_text("3" if step == 18 else "4")
                inner(moment, step)

            return reached

        more = ["--elastic", "dp=2:4", "--slots", str(slots)]
        forks = Forks(folder / "changed.log", at)
        codes.append(supervised(changed, [*arguments, *more], forks))
        events = records.read(changed / records.EVENTS)
        one, other = (np.array(losses(out)) for out in (changed, whole))
        close = one.shape == other.shape == (60, 2)
        worst = float(np.max(np.abs(one[:, 1] / other[:, 1] - 1))) if close else float("nan")
        told = [f"{e['kind']} at {e['step']}" for e in events]
        found.append(f"{dtype}: {', '.join(told)}; exit codes {codes}; losses within {worst:.1e}")
        fine &= not any(codes) and worst <= 1e-5
        # processes beside these may make a rank slow
        kinds = [event["kind"] for event in events if event["kind"] != "straggler"]
        fine &= kinds == ["restart", "shrink", "grow"]
    return found, fine


# --- memory


def memory(folder: Path, options: argparse.Namespace) -> Found:
    """A rank dies with the memory of its machine, again and again: no disk is read."""
    draw = random.Random(options.seed)
    folder.mkdir()
    (folder / "memory").mkdir()
    arguments = [
        "--mesh", "dp=4", "--zero", "1", "--steps", "40", "--max-restarts", "9",
        "--memory-save-every", "3", "--memory-folder", str(folder / "memory"),
    ]  # fmt: skip
    whole, lost = folder / "whole", folder / "lost"
    codes = [supervised(whole, arguments, Forks(folder / "whole.log"))]
    ranks = [draw.randrange(RANKS) for _ in range(5)]
    steps = [7 * number + 5 + draw.randrange(3) for number in range(5)]

    def at(number: int, rank: int) -> At:
        kills = [faults.Kill("step", ranks[number], steps[number])] if number < 5 else []
        return faults.moments(kills, rank)

    forks, begun = Forks(folder / "lost.log", at), []

    def start(nproc: int, given: Sequence[str]) -> launch.Ending:
        number = len(forks.endings)
        if number:
            shutil.rmtree(next((folder / "memory").glob("*")) / f"rank-{ranks[number - 1]}")
        begun.append(len(checkpoint.steps(lost / "checkpoints")))
        return forks(nproc, given)

    codes.append(supervised(lost, arguments, start))
    printed = re.findall(r"after step (\d+), from memory", (folder / "lost.log").read_text())
    resumed = list(map(int, printed))
    gone = [step - at for step, at in zip(steps, resumed, strict=False)]
    differ = same_bits(whole / "checkpoints" / "40", lost / "checkpoints" / "40")
    same = losses(whole) == losses(lost)
    found = [
        f"ranks {ranks} lost at steps {steps}: went on from {resumed}; exit codes {codes}",
        f"steps lost: at most {max(gone, default=0)} of 3; checkpoints on disk then: {sum(begun)}",
        f"leaves that differ: {differ or 0}; records of losses the same: {same}",
    ]
    fine = len(resumed) == 5 and max(gone) <= 4 and not any(begun)
    return found, fine and same and not differ and not any(codes)


# --- a full disk


def full_disk(folder: Path, options: argparse.Namespace) -> Found:
    """No room for the checkpoint of a step, once: the run goes on from the one before."""
    del options
    folder.mkdir()
    arguments = ["--mesh", "dp=4", "--steps", "12", "--save-every", "3", "--max-restarts", "2"]
    out = folder / "run"

    def at(number: int, rank: int) -> At:
        return faults.moments([faults.FullDisk(rank=1, step=6)] if number == 0 else [], rank)

    forks = Forks(folder / "log", at)
    code = supervised(out, arguments, forks)
    saved = checkpoint.steps(out / "checkpoints")
    left = [path.name for path in (out / "checkpoints").iterdir() if not path.name.isdigit()]
    said = "No space left on device" in (folder / "log").read_text()
    kinds = [event["kind"] for event in records.read(out / records.EVENTS)]
    found = [f"exit code {code}, saved {saved}, unfinished {left}, said so: {said}; {kinds}"]
    fine = code == 0 and saved == [3, 6, 9, 12] and kinds == ["restart"]
    return found, fine and not left and said


# --- bits and numbers


def ranks(nproc: int, program: Callable[[int], Any], log: Path) -> list[Any]:
    """The results of ``program(rank)`` in processes that talk over gloo; ends if one fails."""
    port, pids = free_port(), {}
    log.parent.mkdir(parents=True, exist_ok=True)
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                method = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", init_method=method, rank=rank, world_size=nproc)
                told = json.dumps(program(rank))
                log.with_name(f"{log.name}.{rank}.json").write_text(told)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids[pid] = rank
    failed = [pids[pid] for pid, status in (os.wait() for _ in range(nproc)) if status]
    if failed:
        raise SystemExit(f"ranks {failed} failed:\n{log.read_text()[-4000:]}")
    return [
        json.loads(log.with_name(f"{log.name}.{rank}.json").read_text()) for rank in range(nproc)
    ]


def flips(folder: Path, options: argparse.Namespace) -> Found:
    """Bits that flip in the parameters or the optimizer's state of one of four replicas.

    Each before a step that computes with it, up to `EVERY` steps before the next check. One whose
    effect the step rounds away leaves nothing to find: that the replicas are equal after it, all
    gathered bits say.
    """
    mesh, count = Mesh(dp=RANKS), options.flips
    config = configure(
        command.parse_train([*TINY, "--mesh", "dp=4"]),
        steps=EVERY * (count + 1),
        check_replicas_every=EVERY,
        optimizer=replace(OptimizerConfig(), skip_nonfinite=1 << 30),
    )
    leaves = [
        (path, leaf.numel(), 8 * leaf.element_size())
        for path, leaf in _floats(prepare(config, mesh).state)
    ]
    rng, chosen = random.Random(options.seed), []
    for number in range(count):
        path, numel, bits = rng.choice(leaves)
        step = EVERY * (number + 1) + rng.randrange(EVERY)
        element, bit = rng.randrange(numel), rng.randrange(bits)
        chosen.append(faults.Corrupt(step, path, rng.randrange(RANKS), element, bit))
    due = {fault.step: number for number, fault in enumerate(chosen)}

    def program(rank: int) -> list[int]:
        run, healed = prepare(config, mesh.bind()), []
        plain = faults.inject(run.step, chosen, rank)

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            index = int(state.step)
            state, metrics = plain(state, batch)
            if index in due:
                own = [leaf.numpy().tobytes() for _, leaf in _floats(state)]
                digest = hashlib.sha256(b"".join(own)).hexdigest()
                said = [digest] * RANKS
                dist.all_gather_object(said, digest)
                if len({*said}) == 1:
                    healed.append(due[index])
            return state, metrics

        train(replace(run, step=step), folder)
        return healed

    healed = ranks(RANKS, program, folder.with_name("flips.log"))[0]
    found, late, wrong = {}, [], []
    for event in records.read(folder / records.EVENTS):
        if event["kind"] != "corruption":
            continue
        # a check after step n sees what was there as steps up to n began, from 0
        number = max(n for n, fault in enumerate(chosen) if fault.step < event["step"])
        fault = chosen[number]
        found[number] = event["step"] - fault.step
        if event["rank"] != fault.rank:
            wrong.append(number)
        if event["step"] - fault.step > EVERY:
            late.append(number)
    repaired = sum(e["kind"] == "repair" for e in records.read(folder / records.EVENTS))
    missed = [n for n in range(count) if n not in found and n not in healed]
    lines = [
        f"{count} flipped bits in {len(leaves)} leaves on {RANKS} replicas, checked every {EVERY} "
        f"steps: {len(found)} found, {len(found) - len(wrong)} with the right rank, {repaired} "
        f"repaired; {len(healed)} rounded away by the step itself; {len(missed)} missed",
        f"steps until they were found: {dict(sorted(Counter(found.values()).items()))}",
    ]
    return lines, not (missed or wrong or late) and len(found) + len({*healed} - {*found}) == count


def files(folder: Path, options: argparse.Namespace) -> Found:
    """Bits that flip in the files of a checkpoint, of tokens, their indexes and their record.

    What `verify` does not notice must do no harm: the same values are read. Orbax writes two files
    after the manifest, which nothing here reads.
    """
    lines, fine = json.loads(apart(lambda: json.dumps(_flipped_files(folder, options))))
    return lines, fine


def _flipped_files(folder: Path, options: argparse.Namespace) -> Found:
    folder.mkdir()
    config = command.parse_train([*TINY, "--steps", "1", "--save-every", "1"])
    run = prepare(config, Mesh())
    saved, tokens = folder / "checkpoint", folder / "tokens"
    placement = run.setup.placement
    checkpoint.save(saved, run.state, {"step": 1}, placement=placement)
    made = PreprocessSettings((text.__file__,), "bytes", str(tokens), workers=1)
    preprocess(made)

    def values() -> str:
        found = checkpoint.restore(saved, prepare(config, Mesh()).state, placement=placement)
        return hashlib.sha256(b"".join(v.numpy().tobytes() for _, v in _floats(found))).hexdigest()

    whole, draw, counts = values(), random.Random(options.seed), Counter()
    stored = sorted(path for path in saved.rglob("*") if path.is_file())
    parts = [*((path, "checkpoint") for path in stored)] * 2
    parts += [(made.targets[0], "tokens"), (made.targets[1], "index"), (made.record, "record")] * 5
    harmless, unnoticed = 0, []
    for number in range(options.bytes):
        path, kind = parts[number % len(parts)]
        if not path.stat().st_size:
            continue
        byte, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        faults.flip_file(path, byte, bit)
        counts[kind] += 1
        try:
            checkpoint.verify(saved) if kind == "checkpoint" else data.verify(tokens)
        except ValueError:
            pass
        else:
            same = kind == "checkpoint" and values() == whole
            harmless += same
            if not same:
                unnoticed.append((path, byte, bit))
        faults.flip_file(path, byte, bit)
    about = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
    return [
        f"{counts.total()} flipped bits ({about}) in {len(stored) + 3} files: "
        f"{counts.total() - harmless - len(unnoticed)} noticed, {harmless} in files that "
        f"nothing here reads ({', '.join(LATER)}), {len(unnoticed)} unnoticed",
        *map(str, unnoticed[:5]),
    ], not unnoticed


EVERY = 4
"""Steps from one comparison of replicas to the next, in the section of flipped bits."""


def _floats(state: Any) -> list[tuple[str, torch.Tensor]]:
    rows = zip(tree.paths(state), tree.leaves(state), strict=True)
    return [(path, leaf.detach()) for path, leaf in rows if leaf.is_floating_point()]


def numbers(folder: Path, options: argparse.Namespace) -> Found:
    """NaN and spikes in a step: of one rank once, of one rank each time, or of every rank."""
    nproc, count = 3, options.numbers
    mesh = Mesh(dp=nproc)
    watched = {"attribute": True, "minimum": 4, "window": 8, "on_spike": "rollback", "most": 0}
    config = configure(
        command.parse_train([*TINY, "--mesh", f"dp={nproc}"]),
        steps=10,
        save_every=4,
        anomalies=AnomalyConfig(**{**watched, "on_nonfinite": "rollback"}),
    )
    rng, chosen = random.Random(options.seed), []
    leaves = [path for path, _ in _floats(prepare(config, mesh).state.params)]
    for number in range(count):
        kind = ("transient", "persistent", "data")[number % 3]
        value: dict[str, Any] = {"value": float("nan")}
        if number % 2 == 0:
            value = {"value": 300.0, "scale": True}
        # a norm's scale times 300 is a spike, as is the last matrix; others a norm may undo
        leaf = rng.choice(leaves) if number % 2 else rng.choice(["norm/scale", "unembed"])
        rank = None if kind == "data" else rng.randrange(nproc)
        times, step = 1 if kind == "transient" else None, rng.randrange(5, 10)
        fault = faults.Corrupt(step, f"params/{leaf}", rank, element=None, times=times, **value)
        chosen.append((kind, fault))

    def program(rank: int) -> list[str]:
        bound, said = mesh.bind(), []
        for number, (kind, fault) in enumerate(chosen):
            most = 1 if kind == "transient" else 0
            own = configure(config, anomalies__most=most)
            around = partial(faults.inject, faults=[fault], rank=rank)
            try:
                outcome = train(prepare(own, bound, around=around), folder / str(number))
            except (OSError, FloatingPointError) as error:
                said.append(type(error).__name__)
            else:
                said.append([record["loss"] for record in outcome.history])
            dist.barrier()
        said.append([r["loss"] for r in train(prepare(config, bound), None).history])
        return said

    *ended, plain = ranks(nproc, program, folder.with_name("numbers.log"))[0]
    right, ranks_right, same, asked = Counter(), 0, 0, Counter(kind for kind, _ in chosen)
    for number, (kind, fault) in enumerate(chosen):
        events = records.read(folder / str(number) / records.EVENTS)
        verdict = next((e for e in events if e["kind"] == "rerun"), {"class": "not seen"})
        right[kind] += verdict["class"] == kind
        ranks_right += kind == "persistent" and verdict.get("ranks") == [fault.rank]
        same += kind == "transient" and ended[number] == plain
    lines = [f"{kind}: {right[kind]} of {asked[kind]}" for kind in asked]
    lines[1] += f", with the right rank {ranks_right}"
    lines[0] += f", and the losses of a run without it {same}"
    return [f"{count} NaN and spikes on {nproc} ranks; classes that are right:", *lines], (
        sum(right.values()) >= 0.96 * count and same == right["transient"]
    )


def rollback(folder: Path, options: argparse.Namespace) -> Found:
    """Bad samples, a rollback, and the losses of a run that never saw them."""
    cases = options.rollbacks
    equal = int(apart(lambda: str(_equal_without(folder, cases))))
    lines = [f"{cases} runs with bad samples: {equal} went back, and have the losses, bit for bit, "
             "of a run that never saw what they left out"]  # fmt: skip
    return lines, equal == cases


def _equal_without(folder: Path, cases: int) -> int:
    """How many runs that went back have the losses of those without the samples."""
    equal, steps = 0, 36
    folder.mkdir(parents=True)
    for case in range(cases):
        rng, file = random.Random(case), folder / f"{case}.txt"
        letters = [b"abcd"[i % 4] for i in range(16 * 400)]
        first = rng.randrange(26, 34) * 12
        for place in shuffled(np.arange(first, first + 4), 400, 0).tolist():
            letters[16 * place : 16 * place + 16] = [rng.randrange(256) for _ in range(16)]
        file.write_bytes(bytes(letters))
        options_of = ["--data", str(file), "--steps", str(steps), "--learning-rate.peak", "3e-2"]
        config = configure(
            command.parse_train([*TINY, *options_of, "--learning-rate.name", "constant"]),
            save_every=4,
            anomalies=AnomalyConfig("stop", "rollback", 12, 6, 6.0, most=9),
        )
        out = folder / str(case)
        seen = train(prepare(config, Mesh()), out).history
        skipped = value_at(load(out / run_folder.CONFIG), "anomalies.skipped_samples")
        never = configure(config, anomalies=AnomalyConfig(skipped_samples=skipped))
        plain = train(prepare(never, Mesh()), None).history
        equal += bool(skipped) and [r["loss"] for r in seen] == [r["loss"] for r in plain]
    return equal


def checks(folder: Path, options: argparse.Namespace) -> Found:
    """The time of a comparison of replicas, and of what watches numbers, beside that of a step."""
    mesh = Mesh(dp=2)
    sizes = ["--gpt.embed-dim", "256", "--gpt.mlp-dim", "1024", "--gpt.num-layers", "4"]
    given = [*TINY, *sizes, "--seq", "128", "--mesh", "dp=2", "--steps", "12"]
    config = command.parse_train(given)

    def program(rank: int) -> list[float]:
        run = prepare(config, mesh.bind())
        job = Job.of(run)
        replicas = replicas_of(run, job)
        assert replicas is not None
        state, batch, times = run.state, run.batch(0), ([], [], [])
        guard = Guard(value_at(config, "anomalies"), lambda *a, **k: None, run.samples_of)
        for index in range(12):
            began = time.perf_counter()
            state, metrics = run.step(state, batch)
            numbers = [float(metrics[name]) for name in ("loss", "grad_norm")]
            times[0].append(time.perf_counter() - began)
            began = time.perf_counter()
            replicas.check(state)
            times[1].append(time.perf_counter() - began)
            began = time.perf_counter()
            for again in range(50):
                guard.observe({"step": index * 50 + again + 1, "loss": numbers[0],
                               "grad_norm": numbers[1]})  # fmt: skip
            own_hash(run.mesh, run.host_batch(0))
            times[2].append((time.perf_counter() - began) / 50)
        return [sorted(each)[len(each) // 2] for each in times] + [tree.nbytes(state)]

    step, check, watch, nbytes = ranks(2, program, folder.with_name("checks.log"))[0]
    every = value_at(config, "replicas.every")
    share = check / step / every
    return [
        f"{nbytes / 2**20:.0f} MiB of state: a step takes {1e3 * step:.0f} ms, a comparison "
        f"{1e3 * check:.1f} ms ({nbytes / check / 1e9:.2f} GB/s): {share:.3%} of the steps, at one "
        f"in {every}; what watches numbers {1e6 * watch:.0f} us, "
        f"{watch / step:.3%}"
    ], share < 0.001


# --- hangs and stragglers


def endings(nproc: int, program: Callable[[int, int], None], log: Path, seconds: float) -> bool:
    """Whether the forks that run ``program(rank, port)`` have all ended in time; log is theirs."""
    port, pids = free_port(), []
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            try:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                sys.stderr = sys.__stderr__ or sys.stdout
                tqdm.set_lock(threading.RLock())
                program(rank, port)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        pids.append(pid)
    left, until = set(pids), time.monotonic() + seconds
    while left and time.monotonic() < until:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        left.discard(pid)
        if not pid:
            time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not left


def trained(
    config: TrainConfig,
    mesh: Mesh,
    rank: int,
    port: int,
    fault: Any = None,
    noted: Path | None = None,
) -> FlightRecorder:
    """Train on this process of a job, into which a fault is put; the time of it is written down."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=mesh.size
    )
    bound = mesh.bind("cpu", config.watchdog.timeout_seconds, FlightRecorder())
    run = prepare(config, bound)
    if fault is not None:
        plain = faults.hanging(run.step, [fault], bound)

        def step(state: Any, batch: Any) -> Any:
            if noted is not None and rank == fault.rank and int(state.step) == fault.step:
                noted.write_text(str(time.time()))
            return plain(state, batch)

        run = replace(run, step=step)
    train(run, Path(config.out))
    assert bound.recorder is not None
    return bound.recorder


def hangs(folder: Path, options: argparse.Namespace) -> Found:
    """Ranks that stop, branch off, or lose their network: who is named, where, and when."""
    folder.mkdir()
    mesh, draw, after = Mesh(dp=2, tp=2), random.Random(options.seed), 3.0
    config = configure(
        command.parse_train([*TINY, "--mesh", "dp=2,tp=2"]),
        steps=8, hang_after=after, stragglers_every=0, out=str(folder / "quiet"),
    )  # fmt: skip

    def quiet(rank: int, port: int) -> None:
        recorder = trained(config, mesh, rank, port)
        # of the last step but one: the last one saves, too
        rows = [[recorder.kinds[n].op, recorder.kinds[n].axis] for n in recorder.before]
        (folder / f"sequence-{rank}.json").write_text(json.dumps(rows))

    endings(RANKS, quiet, folder / "quiet.log", 120)
    wanted = json.loads((folder / "sequence-0.json").read_text())
    wrong, late, seconds, counts = [], [], [], Counter()
    for number in range(options.hangs):
        rank, step = draw.randrange(RANKS), draw.randrange(2, 6)
        # the last is over all ranks, as the detour is: that is an error of the backend, no hang
        place = draw.randrange(len(wanted) - 1)
        fault, at, kind = [
            (faults.Stop(rank, step, place), place, "stopped"),
            (faults.Detour(rank, step, place), place, "branch"),
            (faults.Cut(rank, step), 0, "network"),
        ][number % 3]
        out, noted = folder / str(number), folder / f"began-{number}"

        def program(
            rank: int, port: int, fault: Any = fault, out: Path = out, noted: Path = noted
        ) -> None:
            spared = {"spared": (port,)} if isinstance(fault, faults.Cut) else {}
            with contextlib.redirect_stdout(sys.stderr):
                trained(
                    configure(config, out=str(out)),
                    mesh,
                    rank,
                    port,
                    replace(fault, **spared),
                    noted,
                )

        ended = endings(RANKS, program, folder / f"{number}.log", 120)
        events = records.read(out / records.EVENTS)
        event = events[0] if events else {"rank": None, "time": math.inf}
        counts[kind] += 1
        took = event["time"] - float(noted.read_text())
        seconds.append(took)
        right = (event["rank"], event.get("step"), [event.get("op"), event.get("axis")]) == (
            rank, step + 1, wanted[at],
        )  # fmt: skip
        if not (right and event.get("ordinal") == at and ended):
            wrong.append((number, kind, rank, step + 1, at, wanted[at], event))
        if took > after + 15:
            late.append(number)
    return [
        f"{len(seconds)} hangs ({', '.join(f'{n} {k}' for k, n in counts.items())}) among "
        f"{len(wanted)} collectives of a step: {len(seconds) - len(wrong)} with the right rank and "
        f"collective; --hang-after {after:g} s, found after {min(seconds):.1f} to "
        f"{max(seconds):.1f} s, {len(late)} later than {after + 15:g} s",
        *map(str, wrong[:5]),
    ], not (wrong or late)


def slow(folder: Path, options: argparse.Namespace) -> Found:
    """A rank that computes a fifth longer, and none that does."""
    folder.mkdir()
    mesh, draw = Mesh(dp=4), random.Random(options.seed)
    sizes = [
        "--gpt.embed-dim",
        "128",
        "--gpt.mlp-dim",
        "256",
        "--gpt.num-layers",
        "2",
        "--seq",
        "64",
    ]
    config = configure(command.parse_train([*TINY, *sizes, "--mesh", "dp=4"]), steps=45)
    named, wrong = [], []
    for number in range(options.slow):
        fault = faults.Slow(draw.randrange(RANKS), 0.2, draw.randrange(8, 20))
        out = folder / str(number)

        def program(rank: int, port: int, fault: Any = fault, out: Path = out) -> None:
            trained(configure(config, out=str(out)), mesh, rank, port, fault)

        endings(RANKS, program, folder / f"{number}.log", 300)
        events = [e for e in records.read(out / records.EVENTS) if e["kind"] == "straggler"]
        if not events or (events[0]["rank"], events[0]["what"]) != (fault.rank, "compute"):
            wrong.append((fault, events[:1]))
        else:
            named.append(events[0]["step"] - fault.step)
        wrong += [(fault, event) for event in events[1:] if event["rank"] != fault.rank]
    out = folder / "quiet"

    def still(rank: int, port: int) -> None:
        trained(configure(config, out=str(out), steps=options.quiet), mesh, rank, port)

    endings(RANKS, still, folder / "quiet.log", 3000)
    alarms = records.read(out / records.EVENTS)
    taken = len(run_folder.records(out))
    return [
        f"{options.slow} slow ranks: {len(named)} named with what is slow, after {named} steps; "
        f"{taken} quiet steps: {len(alarms)} false alarms",
        *map(str, [*wrong[:5], *alarms[:5]]),
    ], not (wrong or alarms) and max(named, default=0) <= 20 and taken == options.quiet


def overhead(folder: Path, options: argparse.Namespace) -> Found:
    """The time of a step that is recorded, watched and compared, beside that of one that is not."""
    mesh = Mesh(dp=1, tp=2)
    sizes = ["--gpt.embed-dim", "256", "--gpt.mlp-dim", "1024", "--gpt.num-layers", "4"]
    given = [*TINY, *sizes, "--seq", "128", "--mesh", "dp=1,tp=2", "--steps", "12"]
    config = command.parse_train(given)

    def program(rank: int) -> list[list[float]]:
        recorder = FlightRecorder()
        plain, watched = prepare(config, mesh.bind()), prepare(config, mesh.bind(recorder=recorder))
        bound, job = watched.mesh, Job.of(watched)
        assert isinstance(bound, BoundMesh)
        folder.mkdir(exist_ok=True)
        dog = Watchdog.of(
            bound, folder, 0.0, hang_after=100.0, timeout=300.0, fresh=lambda step: False,
            end=lambda text, first: None,
        )  # fmt: skip
        watch = Stopwatch(recorder, axes_of(bound))

        def gather(mine: torch.Tensor) -> torch.Tensor:
            found = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(found, mine)
            return torch.stack(found)

        every = value_at(config, "stragglers.every")
        compared = Comparison(bound, ["a"] * 2, every, watch, gather, saver.nowhere, print, None)
        states, batch = [plain.state, watched.state], plain.batch(0)
        took: list[list[float]] = [[], [], [], []]
        with dog.watching():
            for index in range(options.rounds):
                for which in (0, 1) if index % 2 else (1, 0):
                    wall, used = time.perf_counter(), time.process_time()
                    if which:
                        recorder.begin(index)
                        for tell in (dog.phase, watch.phase):
                            tell("data", index)
                            tell("step", index)
                    run = (plain, watched)[which]
                    states[which], metrics = run.step(states[which], batch)
                    float(metrics["loss"])
                    if which:
                        for tell in (dog.phase, watch.phase):
                            tell("agree", index)
                        compared.gathered(index)
                    took[which].append(time.perf_counter() - wall)
                    took[2 + which].append(time.process_time() - used)
        del job
        return [*took, [len(recorder.sequence)]]

    off, on, cpu_off, cpu_on, (count,) = ranks(2, program, folder.with_name("overhead.log"))[0]
    wall = statistics.median(b / a for a, b in zip(off, on, strict=True)) - 1
    used = statistics.median(b / a for a, b in zip(cpu_off, cpu_on, strict=True)) - 1
    recorder, rows = FlightRecorder(), torch.zeros(4)
    recorder.ranks["tp"] = (0, 1)
    began, times = time.perf_counter(), 20_000
    for _ in range(times):
        recorder.wait(recorder.enter("psum", "tp", rows))
        recorder.leave()
    each = (time.perf_counter() - began) / times
    return [
        f"a step of {1e3 * statistics.median(off):.1f} ms with {count} collectives, recorded, "
        f"watched and compared: {wall:+.2%} of its time, {used:+.2%} of the processor's (medians "
        f"of {len(off)} pairs); a record takes {1e6 * each:.1f} us, so "
        f"{each * count / statistics.median(off):.2%} of the step"
    ], each * count / statistics.median(off) < 0.01


SECTIONS: Mapping[str, Callable[[Path, argparse.Namespace], Found]] = {
    "flips": flips,
    "files": files,
    "numbers": numbers,
    "rollback": rollback,
    "checks": checks,
    "kills": kills,
    "elastic": elastic,
    "full-disk": full_disk,
    "memory": memory,
    "hangs": hangs,
    "slow": slow,
    "overhead": overhead,
}


if __name__ == "__main__":
    sys.exit(main())
