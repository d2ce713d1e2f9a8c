"""Two checkouts side by side: where do their numbers differ, be it by a bit?

    python benchmarks/side_by_side.py BEFORE AFTER [--only PATTERN] [--fast]

A change that only moves code must leave every number as it is. Each case of side_by_side_cases.py
runs `functron` of both checkouts with the same options, on the CPU, and compares what they leave:

* **train**: exit codes, the records of metrics.jsonl but for times and memory, the kinds and steps
  of events, and the bits of every leaf of every checkpoint.
* **resume**: the same of a run whose last two steps are taken again on another mesh; **cross**: of
  both checkouts as they go on with the run folder that BEFORE has made.
* **trace**: what `functron trace --program` prints, but for lines of the source; names of values
  are numbered anew.
* **calls**: how many functions of Python an eager step calls; **start**: seconds until the first
  step is recorded, and modules. Both are printed as ratios, and may differ.

The exit code is 1 where anything else differs. A process per checkout imports it once and forks for
every command; where ranks are processes they are forks with the environment that torchrun gives,
and the checkouts take turns. Both share one folder of compiled code, which goes by the graph: equal
graphs are compiled once, so that this proves nothing of a change to what compiles them.
"""

from __future__ import annotations

import argparse
import cProfile
import difflib
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import tokenizers
from side_by_side_cases import CLIP, DATA, MODEL, SAMPLES, Case, cases

MEASURED = frozenset(("tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes", "ranks"))
"""Keys of a record that no two runs share."""
SECONDS = 600
"""After which a command is ended."""
FEW, MANY = 3, 9
"""Steps of the runs whose calls are counted."""
SHOWN = 24
"""Lines of a difference of programs."""
STARTED = """
import sys
from functron.cli.main import main
code = main(sys.argv[1:])
print(len(sys.modules), sum(name.partition(".")[0] == "functron" for name in sys.modules))
sys.exit(code)
"""


# --- of one checkout, in a process of its own


def serve() -> None:
    """Answer jobs, a line of JSON each, in forks of this process, which has imported functron."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        kind, ranks, log = (job.pop(key) for key in ("kind", "ranks", "log"))
        found = forked(JOBS[kind], job, ranks, log)
        if kind == "warm":  # all that commands import while they run
            for name in found[0] or ():
                with suppress(Exception):
                    importlib.import_module(name)
        print(json.dumps(found), file=answers, flush=True)


def forked(compute: Callable[..., Any], job: dict[str, Any], ranks: int, log: str) -> list[Any]:
    """The results of forks, one per rank (or one without a job); None of those that died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": ranks, "MASTER_PORT": probe.getsockname()[1]}
    children = []
    for rank in range(max(1, ranks)):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS)
            if ranks:
                own = {**place, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
                os.environ.update({name: str(value) for name, value in own.items()})
            file = os.open(f"{log}.{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                with os.fdopen(writing, "w") as stream:
                    stream.write(json.dumps(compute(**job)))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.close(writing)
        children.append((pid, reading))
    found = []
    for pid, reading in children:
        with os.fdopen(reading) as stream:
            told = stream.read()
        os.waitpid(pid, 0)
        found.append(json.loads(told) if told else None)
    return found


def command(arguments: list[str]) -> int:
    """The exit code of ``functron *arguments``."""
    return importlib.import_module("functron.cli.main").main(arguments)


def leaves(run: str) -> dict[str, str]:
    """Dtype, shape and a hash of the bits of every leaf of every checkpoint of a run."""
    import torch

    from functron import checkpoint, tree

    found = {}
    folder = Path(run) / "checkpoints"
    for step in checkpoint.steps(folder):
        state = checkpoint.restore(folder / str(step))
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            value = torch.as_tensor(leaf).contiguous()
            digest = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            shown = f"{value.dtype} {[*value.shape]} {digest[:16]}"
            found[f"leaf {path} after step {step}"] = shown
    return found


def calls(arguments: list[str]) -> int:
    """How many functions of Python ``functron *arguments`` calls in its own thread."""
    profile = cProfile.Profile()
    if code := profile.runcall(command, arguments):
        raise RuntimeError(f"exit code {code}")
    rows = profile.getstats()
    return sum(row.callcount for row in rows if isinstance(row.code, types.CodeType))


def warm(checkout: str, run: str) -> list[str]:
    """The modules that a run imports, a compiled one too."""
    command(["train", "--out", run, *words("")])
    leaves(run)
    command(["trace", *shlex.split(f"{MODEL} {SAMPLES}")])
    importlib.import_module("torch._inductor.compile_fx")
    where = str(sys.modules["functron"].__file__)
    assert Path(where).is_relative_to(checkout), f"{where} is not in {checkout}"
    return list(sys.modules)


JOBS: Mapping[str, Callable[..., Any]] = {
    "command": command, "leaves": leaves, "calls": calls, "warm": warm
}  # fmt: skip


# --- of both


class Checkout:
    """A checkout, with the folder of its runs and logs, and the process that runs its commands."""

    def __init__(self, path: Path, runs: Path, compiled: Path) -> None:
        self.runs = runs
        self.environment = {
            **os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(compiled), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        runs.mkdir(parents=True)
        self.server = subprocess.Popen(
            [sys.executable, __file__, "--serve"], env=self.environment, cwd=runs, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.ask("warm", "warm.log", checkout=str(path), run="warm")

    def ask(self, kind: str, log: str, ranks: int = 0, **job: Any) -> None:
        """Begin a job."""
        assert self.server.stdin is not None
        job |= {"kind": kind, "ranks": ranks, "log": str(self.runs / log)}
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()

    def answer(self) -> list[Any]:
        """The results of the job, by rank."""
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        return json.loads(line) if line else [None]

    def close(self) -> None:
        """End the process, and forks of it that are left."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()


Pair = Sequence[Checkout]
"""BEFORE and AFTER."""
Verdict = tuple[bool, str]
"""Whether all is the same, and what there is to say."""


def both(pair: Pair, kind: str, log: str, jobs: Sequence[dict[str, Any]], ranks: int = 0) -> list:
    """The results of both: at the same time, or one after the other where ranks are processes."""
    found = []
    for checkout, job in zip(pair, jobs, strict=True):
        checkout.ask(kind, log, ranks, **job)
        if ranks > 1:
            found.append(checkout.answer())
    return found or [checkout.answer() for checkout in pair]


def words(options: str) -> list[str]:
    """The words of options of ``functron train``, after those that all runs have."""
    model = "" if "--model" in options else MODEL
    chat = f"--data {DATA}/chat.jsonl --tokenizer {DATA} --overlong cut --gpt.vocab-size 300"
    data = chat if "--format chat" in options else "--format mock"
    run = f"{SAMPLES} {CLIP} --device cpu --steps 4 --save-every 2"
    return shlex.split(f"{model} {data} {run} {options}")


def train(pair: Pair, name: str, given: list[str], ranks: int = 0) -> list:
    """Exit codes of ``functron train`` into the folder `name` of both."""
    jobs = [{"arguments": ["train", "--out", str(c.runs / name), *given]} for c in pair]
    return both(pair, "command", f"{name}.log", jobs, ranks)


def judge(pair: Pair, name: str, codes: list, wanted: int = 0) -> Verdict:
    """Compare the runs `name` of both."""
    jobs = [{"run": str(checkout.runs / name)} for checkout in pair]
    hashes = both(pair, "leaves", f"{name}.log", jobs)
    told = []
    for checkout, code, (found,) in zip(pair, codes, hashes, strict=True):
        values = {f"exit code of rank {rank}": str(value) for rank, value in enumerate(code)}
        for record in lines(checkout.runs / name / "metrics.jsonl"):
            for key, value in flat(record):
                if key.partition("/")[0] not in MEASURED:
                    values[f"{key} of step {record['step']}"] = repr(value)
        events = lines(checkout.runs / name / "events.jsonl")
        happened = [f"{e['kind']} at {e['step']}" for e in events if e["kind"] != "straggler"]
        values["events"] = ", ".join(happened)
        told.append(values | ({"leaves": "unreadable"} if found is None else found))
    before, after = told
    keys = [*before, *(key for key in after if key not in before)]
    if differ := [key for key in keys if before.get(key) != after.get(key)]:
        one, other = (values.get(differ[0], "nothing") for values in told)
        return False, f"{len(differ)} of {len(keys)} values: {differ[0]}: {one}, then {other}"
    if set(codes[0]) != {wanted} or "leaves" in before:
        return False, f"both failed, with {codes[0]}; {last_words(pair, name)}"
    return True, f"{len(keys)} values"


def last_words(pair: Pair, name: str) -> str:
    """The end of the log of a case, which two failures may have in common."""
    return (pair[0].runs / f"{name}.log.0").read_text()[-400:]


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line; none where it is missing."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a record, also of those within others."""
    for key, value in record.items():
        inner = (
            flat(value, f"{prefix}{key}/") if isinstance(value, dict) else [(prefix + key, value)]
        )
        yield from inner


# --- kinds of cases


def trained(pair: Pair, case: Case, name: str) -> Verdict:
    """A run from its begin to its end."""
    return judge(pair, name, train(pair, name, words(case.options), case.ranks), case.wanted)


def launched(pair: Pair, case: Case, name: str) -> Verdict:
    """A run in new processes, which functron itself starts."""
    codes = []
    for checkout in pair:
        given = [sys.executable, "-m", "functron", "train", "--out", name, *words(case.options)]
        with (checkout.runs / f"{name}.log.0").open("w") as log:
            done = subprocess.run(given, env=checkout.environment, cwd=checkout.runs, stdout=log,
                                  stderr=log, timeout=SECONDS)  # fmt: skip
        codes.append([done.returncode])
    return judge(pair, name, codes)


def resumed(pair: Pair, case: Case, name: str) -> Verdict:
    """The last steps of a run once more."""
    codes = train(pair, name, words(case.options))
    if codes != [[0], [0]]:
        return False, f"failed before, with {codes}; {last_words(pair, name)}"
    one, other = (checkout.runs / name for checkout in pair)
    if case.cross:
        shutil.rmtree(other)
        shutil.copytree(one, other)
    for run in (one, other):
        shutil.rmtree(run / "checkpoints" / "4")
    codes = train(pair, name, ["--resume", *shlex.split(case.then)], case.ranks)
    return judge(pair, name, codes)


def traced(pair: Pair, case: Case, name: str) -> Verdict:
    """The text of a step's program."""
    model = "" if "--model" in case.options else MODEL
    given = shlex.split(f"trace --program {model} {SAMPLES} {CLIP} {case.options}")
    codes = both(pair, "command", f"{name}.log", [{"arguments": given}] * 2)
    texts = [(checkout.runs / f"{name}.log.0").read_text() for checkout in pair]
    if codes != [[0], [0]]:
        return False, f"failed, with {codes}; {last_words(pair, name)}"
    before, after = (renumbered(text) for text in texts)
    if before == after:
        return True, f"{len(before)} lines"
    old, new = [
        [re.sub(r"(%[a-z_]+)\w*", r"\1", line) for line in text] for text in (before, after)
    ]
    diff = list(difflib.unified_diff(old, new, "before", "after", n=0, lineterm=""))
    changed = sum(line[0] in "+-" for line in diff[2:])
    shown = "".join(f"\n    {line[:160]}" for line in diff[:SHOWN])
    return False, f"{changed} lines differ by more than numbers in names{shown}"


def renumbered(text: str) -> list[str]:
    """The lines of a program, its names numbered in the order in which they appear."""
    numbers: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        base = re.sub(r"_\d+$", "", found[0])
        return numbers.setdefault(found[0], f"{base}_{len(numbers)}")

    text = re.sub(r"%\w+", name, re.sub(r"[\w.]+\.py:\d+", "", text))
    return [" ".join(line.split()) for line in text.splitlines()]


def counted(pair: Pair, case: Case, name: str) -> Verdict:
    """How many functions a step calls: runs of more and of fewer steps apart."""
    counts = []
    for steps in (FEW, MANY):
        given = [*words(case.options), *shlex.split(f"--steps {steps} --save-every 0 --prefetch 0")]
        out = f"{name}-{steps}"
        jobs = [{"arguments": ["train", "--out", str(c.runs / out), *given]} for c in pair]
        counts.append([found for (found,) in both(pair, "calls", f"{name}.log", jobs)])
    if None in (*counts[0], *counts[1]):
        return False, f"failed; {last_words(pair, name)}"
    one, other = ((many - few) / (MANY - FEW) for few, many in zip(*counts, strict=True))
    return True, f"{one:,.0f} calls a step, then {other:,.0f}: x {other / one:.3f}"


def started(pair: Pair, case: Case, name: str) -> Verdict:
    """Medians of seconds until the first step is recorded, and of all; and modules at the end."""
    told: list[list[tuple[float, ...]]] = [[], []]
    for turn in range(3):
        for checkout, found in zip(pair, told, strict=True):
            out = checkout.runs / f"{name}-{turn}"
            given = ["train", "--out", str(out), *words("--steps 1")]
            began = time.time()
            done = subprocess.run([sys.executable, "-c", STARTED, *given], cwd=checkout.runs,
                                  env=checkout.environment, capture_output=True, text=True,
                                  check=True, timeout=SECONDS)  # fmt: skip
            seconds = time.time() - began
            first = (out / "metrics.jsonl").stat().st_mtime - began
            found.append((first, seconds, *map(int, done.stdout.split()[-2:])))
    one, other = ([statistics.median(c) for c in zip(*rows, strict=True)] for rows in told)
    names = ("s to the first step", "s", "modules", "modules of functron")
    rows = zip(names, one, other, strict=True)
    return True, "; ".join(f"{a:.4g} {name}, then {b:.4g}: x {b / a:.3f}" for name, a, b in rows)


KINDS: Mapping[str, Callable[[Pair, Case, str], Verdict]] = {
    "train": trained, "launch": launched, "resume": resumed, "trace": traced, "calls": counted,
    "start": started,
}  # fmt: skip


# --- all


def write_chat(folder: Path) -> None:
    """A tokenizer of bytes, and conversations, some of which are cut off in their answer."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    ends = ["<|endoftext|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=letters, special_tokens=ends)
    made.train_from_iterator([], trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    settings = {"eos_token": ends[0], "pad_token": ends[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with (folder / "chat.jsonl").open("w") as file:
        for index in range(16):
            asked = {"role": "user", "content": "who?"[: index % 4]}
            answer = {"role": "assistant", "content": "I am " + "here " * (index % 5)}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")


def compare(chosen: Mapping[str, Case], paths: Sequence[Path], folder: Path) -> int:
    """Run cases one after the other, print what each gave, and return the exit code."""
    began, differ, width = time.perf_counter(), [], max(map(len, chosen))
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=folder))
    write_chat(runs / "chat")
    with ExitStack() as stack:
        pair = []
        for path, name in zip(paths, ("before", "after"), strict=True):
            pair.append(Checkout(path, runs / name / "runs", folder / "compiled"))
            stack.callback(pair[-1].close)
        for checkout in pair:
            if None in checkout.answer():
                print((checkout.runs / "warm.log.0").read_text()[-2000:], file=sys.stderr)
                return 2
        for name, case in chosen.items():
            since = time.perf_counter()
            try:
                same, told = KINDS[case.kind](pair, case, name.replace(" ", "-"))
            except (OSError, subprocess.SubprocessError) as error:
                same, told = False, f"{type(error).__name__}: {error}"
            differ += [] if same else [name]
            verdict, seconds = "same" if same else "DIFFERS", time.perf_counter() - since
            print(f"{name:{width}}  {verdict:7}  {seconds:5.1f} s  {told}", flush=True)
    seconds = time.perf_counter() - began
    which = "".join(f"\n  {name}" for name in differ)
    print(f"{len(chosen)} cases in {seconds:.0f} s, {len(differ)} differ{which}")
    return 1 if differ else 0


def main() -> int:
    """Run the cases asked for; the exit code is 1 where something differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--only", default="", help="a regular expression that names have")
    parser.add_argument("--fast", action="store_true", help="two layouts compiled, few processes")
    parser.add_argument("--list", action="store_true", help="print the names of the cases alone")
    parser.add_argument("--folder", type=Path, help="where runs, logs and compiled code stay")
    args = parser.parse_args()
    chosen = {
        name: case
        for name, case in cases()
        if re.search(args.only, name) and (case.fast or not args.fast)
    }
    for path in () if args.list else (args.before, args.after):
        if not (path / "functron" / "__init__.py").is_file():
            parser.error(f"{path}: got no functron there; wanted a folder that has functron/")
    if not chosen:
        parser.error(f"--only: got {args.only!r}; wanted what some name has: see --list")
    if args.list:
        print("\n".join(chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # closing all
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return compare(chosen, (args.before.resolve(), args.after.resolve()), folder)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        raise SystemExit(main())
