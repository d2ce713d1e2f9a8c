"""Two checkouts side by side: where do their numbers differ, by as little as a bit?

    python benchmarks/side_by_side.py BEFORE AFTER [--only PATTERN] [--fast]

A change that only moves code must leave every number as it is. Each case runs `functron` of both
checkouts with the same options, on the CPU, and compares what they leave behind:

* **train**: the exit code, the records of metrics.jsonl but for times and memory, the kinds of
  events, and every leaf of every checkpoint. A case's name says the layout, whether ranks are
  simulated or processes, and whether the step is compiled.
* **resume**: the same of a run of which the last two steps are taken again, on another mesh;
  **cross** resumes the run folder that BEFORE has made, in both checkouts.
* **trace**: what `functron trace --program` prints, but for lines of source and numbers in names.
* **calls**: functions of Python that one eager step calls, from the difference of two lengths.
* **start**: seconds until the first step is recorded, and modules by the end (medians of three).

The last two are printed as ratios and differ without harm; anything else that differs gives the
exit code 1. A process per checkout imports it once and forks for every command, where ranks are
forks with torchrun's environment. Both checkouts share the folder of compiled code, which goes by
the graph: equal graphs are compiled once, so this proves nothing about code that compiles them.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

MODEL = (
    "--gpt.num-layers 2 --gpt.embed-dim 32 --gpt.num-heads 4 --gpt.num-kv-heads 2 --gpt.mlp-dim 64 "
    "--gpt.max-seq 64 "
)
SAMPLES = "--seq 32 --global-batch 8 "
MOCK = "--format mock "
EXPERTS = "--model mixtral-tiny --gpt.embed-dim 32 --gpt.num-layers 2 "
DATA = "../../chat"
CHAT = f"--data {DATA}/chat.jsonl --tokenizer {DATA} --overlong cut --gpt.vocab-size 300 "

LAYOUTS: Mapping[str, tuple[str, int]] = {
    "plain": ("", 1),
    "dp-tp": ("--mesh dp=2,tp=2", 4),
    "pp": ("--mesh pp=2 --microbatches 2", 2),
    "pp-tp": ("--mesh pp=2,tp=2 --schedule zb-h1 --microbatches 4", 4),
    "fsdp": ("--mesh fsdp=2", 2),
    "cp": ("--mesh cp=2", 2),
    "ep": (f"{EXPERTS} --mesh ep=2", 2),
    "fp16": ("--precision fp16 --mesh dp=2", 2),
    "fp8": ("--precision fp8-tensor --mesh tp=2", 2),
    "bf16": ("--precision bf16 --mesh dp=2 --zero 1 --microbatches 2", 2),
    "bf16-fsdp": ("--precision bf16 --mesh fsdp=2", 2),
    "zero-1": ("--mesh dp=2 --zero 1", 2),
    "zero-2": ("--mesh dp=2 --zero 2 --microbatches 2", 2),
    "lora": ("--lora-rank 4 --mesh dp=2", 2),
    "gather-step": ("--mesh fsdp=2 --gather step --microbatches 2", 2),
    "accumulate": ("--microbatches 4", 1),
    "sgd": ("--optimizer.name sgd --mesh fsdp=2", 2),
    "muon": ("--optimizer.name muon --mesh fsdp=2", 2),
    "adafactor": ("--optimizer.name adafactor --mesh fsdp=2", 2),
    "lion": ("--optimizer.name lion --mesh fsdp=2", 2),
    "average": ("--optimizer.ema-decay 0.9 --mesh dp=2 --zero 1", 2),
    "chat": (f"{CHAT} --microbatches 2 --global-batch 4", 1),
    "chat-dp": (f"{CHAT} --mesh dp=2 --microbatches 2 --global-batch 4", 2),
}
"""Options, and the number of ranks."""

ALONE: Mapping[str, str] = {
    "layers": "--log-layers-every 2 --mesh dp=2",
    "layers-pp": "--log-layers-every 2 --mesh pp=2 --microbatches 2",
    "chat-no-target": f"{CHAT} --global-batch 1",
    "chat-pp": f"{CHAT} --mesh pp=2 --microbatches 2 --global-batch 4",
    "overflow": "--precision fp16 --optimizer.loss-scale.initial 1099511627776 "
    "--optimizer.loss-scale.hysteresis 1 --optimizer.loss-scale.growth-interval 1 --steps 8",
    "overflow-pp": "--precision fp16 --optimizer.loss-scale.initial 1099511627776 "
    "--optimizer.loss-scale.hysteresis 1 --mesh pp=2 --microbatches 2",
    "bf16-pure": "--precision bf16-pure --mesh dp=2 --zero 2",
    "fp8-delayed": "--precision fp8-delayed --mesh tp=2 --microbatches 2",
    "fp8-codes": "--precision fp8-tensor --mesh fsdp=2 --gather-as quantised",
    "half-masters": "--precision bf16 --optimizer.master-bits 16",
    "moments-int8": "--optimizer.mu-dtype int8 --optimizer.nu-dtype fp8 --mesh fsdp=2",
    "reduce-bf16": "--optimizer.reduce-dtype bfloat16 --mesh dp=2 --microbatches 2",
    "unclipped": "--optimizer.clip-norm 0 --mesh dp=2",
    "zero-3": "--mesh dp=2 --zero 3",
    "sequence": "--mesh tp=2 --sequence-parallel --remat full",
    "ulysses": "--mesh ulysses=2",
    "vocab-over-pp": "--mesh pp=2 --microbatches 2 --vocab-over-pp",
    "interleaved": "--mesh pp=2 --microbatches 2 --schedule interleaved --gpt.num-layers 4",
    "pp-fsdp": "--mesh pp=2,fsdp=2 --microbatches 2",
    "pp-bf16": "--mesh pp=2,dp=2 --microbatches 2 --precision bf16 --zero 1",
    "dropout": "--gpt.dropout 0.1 --mesh dp=2 --microbatches 2",
    "loss-chunks": "--loss-chunk-tokens 16 --gpt.z-loss 0.001",
    "groups": '--optimizer.groups "embed lr=0.1" --optimizer.skip-nonfinite 2',
    "offload": "--optimizer.offload --mesh dp=2",
    "soap": "--optimizer.name soap --optimizer.soap.frequency 2 --mesh fsdp=2",
    "adam-mini": "--optimizer.name adam_mini --mesh tp=2",
    "muon-distributed": "--optimizer.name muon --optimizer.muon.distributed --mesh fsdp=2",
    "mup": "--gpt.mup-base-dim 16",
    "gpt2": "--model gpt2-tiny --mesh tp=2",
    "deepseek": "--model deepseek-v3-tiny --mesh ep=2",
    "mamba": "--model mamba-tiny",
    "bert": "--model bert-tiny --mesh dp=2",
    "t5": "--model t5-tiny",
    "evaluate": "--eval-data t=mock --eval-every 2 --eval-batches 1 --optimizer.ema-decay 0.9 "
    "--eval-averaged",
    "ramp-up": '--ramp-up "4 4 8" --rate-unit samples --learning-rate.warmup-steps 8',
    "rollback": "--anomalies.on-spike rollback --anomalies.minimum 2 --anomalies.threshold 0.01 "
    "--anomalies.most 99 --steps 8",
    "lower-rate": "--anomalies.on-spike lower-rate --anomalies.minimum 2 "
    "--anomalies.threshold 0.01 --anomalies.most 99 --steps 8",
    "skip": "--anomalies.on-spike skip --anomalies.minimum 2 --anomalies.threshold 0.01 --steps 8",
    "not-finite": "--learning-rate.peak 1e30 --learning-rate.name constant --steps 8",
}
"""What is run simulated and eager alone."""
ALONE_PROCESSES: Mapping[str, tuple[str, int]] = {
    "memory": ("--mesh dp=2 --zero 1 --memory-save-every 1", 2),
    "replicas": ("--mesh dp=2 --check-replicas-every 2", 2),
    "layers": (ALONE["layers"], 2),
    "layers-pp": (ALONE["layers-pp"], 2),
    "overflow-pp": (ALONE["overflow-pp"], 2),
    "muon-distributed": (ALONE["muon-distributed"], 2),
    "dropout": (ALONE["dropout"], 2),
}
ENDS = {"not-finite": 1}
"""Exit codes of runs that should fail."""

COMPILED = ("plain", "dp-tp", "pp", "fsdp", "cp", "ep", "fp16", "fp8", "bf16", "zero-2", "lora",
            "gather-step", "accumulate", "muon", "average")  # fmt: skip
COMPILED_PROCESSES = ("pp", "fsdp", "zero-2")
RESUMED: Mapping[str, tuple[str, str]] = {
    "plain": ("", "--mesh fsdp=2"),
    "to-pp": ("--mesh dp=2", "--mesh pp=2 --microbatches 2"),
    "from-pp": ("--mesh pp=2 --microbatches 2", "--mesh tp=2 --microbatches 1"),
    "bf16": ("--precision bf16 --mesh fsdp=2", "--mesh dp=2 --zero 1"),
    "fp16": ("--precision fp16", "--mesh tp=2"),
    "muon": ("--optimizer.name muon --mesh fsdp=2", "--mesh tp=2"),
    "adafactor": ("--optimizer.name adafactor", "--mesh fsdp=2"),
    "lion": ("--optimizer.name lion --mesh dp=2 --zero 1", "--mesh tp=2"),
    "sgd": ("--optimizer.name sgd", "--mesh dp=2 --zero 2"),
    "average": ("--optimizer.ema-decay 0.9", "--mesh fsdp=2"),
    "lora": ("--lora-rank 4", "--mesh dp=2"),
    "ep": (f"{EXPERTS} --mesh ep=2", "--mesh dp=2"),
    "fp8-delayed": ("--precision fp8-delayed", "--mesh tp=2"),
}
"""Options with which a run begins, and with which it goes on."""
TRACED: Mapping[str, str] = {
    "plain": "", "dp-tp": "--mesh dp=2,tp=2", "fsdp": "--mesh fsdp=2",
    "zero-1": "--mesh dp=2 --zero 1", "bf16": "--precision bf16", "fp16": "--precision fp16",
    "ep": f"{EXPERTS} --mesh ep=2", "cp": "--mesh cp=2", "remat": "--remat full",
    "zero-2": "--mesh dp=2 --zero 2 --microbatches 2", "lora": "--lora-rank 4",
    "gather-step": "--mesh fsdp=2 --gather step --microbatches 2",
    "muon": "--optimizer.name muon --mesh fsdp=2", "average": "--optimizer.ema-decay 0.9",
}  # fmt: skip
COUNTED = {"plain": "", "dp-tp": "--mesh dp=2,tp=2", "pp": "--mesh pp=2 --microbatches 2"}
FAST_PROCESSES = ("plain", "dp-tp", "pp", "fsdp", "zero-2", "chat-dp")
FAST_COMPILED = ("dp-tp", "pp")
FAST_RESUMED = ("to-pp", "bf16", "muon", "adafactor", "average")

MEASURED = frozenset(("tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes"))
"""Keys of a record that no two runs share."""
SECONDS = 300
"""After which a command is ended."""
FEW, MANY = 3, 9
SHOWN = 24
"""Steps of the runs whose calls are counted, and lines of a difference of programs."""
STARTED = """
import sys
from functron.cli.main import main
code = main(sys.argv[1:])
print(len(sys.modules), sum(name.partition(".")[0] == "functron" for name in sys.modules))
sys.exit(code)
"""


# --- of one checkout, in its own process


def serve() -> None:
    """Answer jobs, a line of JSON each, by forks of this process, which has imported functron."""
    for name in ("functron.cli.main", "functron.cli.train", "functron.cli.plan",
                 "functron.checkpoint", "torch._inductor.compile_fx"):  # fmt: skip
        importlib.import_module(name)
    where = str(sys.modules["functron"].__file__)
    assert Path(where).is_relative_to(os.environ["PYTHONPATH"]), where
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        kind, ranks, log = job.pop("kind"), job.pop("ranks", 0), job.pop("log")
        print(json.dumps(forked(lambda: JOBS[kind](**job), ranks, log)), file=answers, flush=True)  # noqa: B023


def forked(compute: Callable[[], Any], ranks: int, log: str) -> list[Any]:
    """What `compute()` gives in forks, one per rank (0: one of no job); None of those that died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(max(1, ranks)):
        reading, writing = os.pipe()
        children.append((pid := os.fork(), reading))
        if pid == 0:
            signal.alarm(SECONDS)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            if ranks:
                os.environ.update({k: str(v) for k, v in place.items()}, MASTER_ADDR="127.0.0.1")
            file = os.open(f"{log}.{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                told = json.dumps(compute())
                with os.fdopen(writing, "w") as stream:
                    stream.write(told)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.close(writing)
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


def leaves(folder: str) -> dict[str, str]:
    """Dtype, shape and a hash of the bits of every leaf of every checkpoint of a run."""
    import torch

    from functron import checkpoint, tree

    found = {}
    for step in checkpoint.steps(Path(folder) / "checkpoints"):
        state = checkpoint.restore(Path(folder) / "checkpoints" / str(step))
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            leaf = torch.as_tensor(leaf)
            bits = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = hashlib.sha256(bits.tobytes()).hexdigest()[:12]
            found[f"leaf {path} after step {step}"] = f"{leaf.dtype} {[*leaf.shape]} {digest}"
    return found


def calls(arguments: list[str]) -> int:
    """How many functions of Python ``functron *arguments`` calls in its own thread."""
    profile = cProfile.Profile()
    if code := profile.runcall(command, arguments):
        raise RuntimeError(f"exit code {code}")
    rows = profile.getstats()
    return sum(row.callcount for row in rows if isinstance(row.code, types.CodeType))


JOBS: Mapping[str, Callable[..., Any]] = {"command": command, "leaves": leaves, "calls": calls}


# --- of both


@dataclass
class Checkout:
    """A checkout, and the process that runs its commands.

    Attributes:
        path: its folder.
        runs: the folder for its run folders and logs.
        environment: of its processes.
    """

    path: Path
    runs: Path
    environment: dict[str, str]

    def __post_init__(self) -> None:
        self.runs.mkdir(parents=True)
        self.server = subprocess.Popen(
            [sys.executable, __file__, "--serve"], env=self.environment, cwd=self.runs, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, kind: str, log: str, ranks: int = 0, **job: Any) -> None:
        """Begin a job."""
        assert self.server.stdin is not None
        line = json.dumps({"kind": kind, "ranks": ranks, "log": str(self.runs / log), **job})
        self.server.stdin.write(line + "\n")
        self.server.stdin.flush()

    def answer(self) -> list[Any]:
        """What the job gave, of every rank."""
        assert self.server.stdout is not None
        if not (line := self.server.stdout.readline()):
            raise SystemExit(f"the process of {self.path} ended")
        return json.loads(line)


Pair = tuple[Checkout, Checkout]


def both(pair: Pair, kind: str, log: str, jobs: Sequence[dict[str, Any]], ranks: int = 0) -> list:
    """What both give: at the same time, or one after the other where ranks are processes."""
    if ranks > 1:
        found = []
        for checkout, job in zip(pair, jobs, strict=True):
            checkout.ask(kind, log, ranks, **job)
            found.append(checkout.answer())
        return found
    for checkout, job in zip(pair, jobs, strict=True):
        checkout.ask(kind, log, ranks, **job)
    return [checkout.answer() for checkout in pair]


def train(pair: Pair, name: str, options: str, ranks: int = 0, *, resume: bool = False) -> list:
    """Exit codes of ``functron train`` into the folder `name` of both."""
    given = shlex.split(f"--resume {options}") if resume else begun(options)
    jobs = [{"arguments": ["train", "--out", str(c.runs / name), *given]} for c in pair]
    return both(pair, "command", f"{name}.log", jobs, ranks)


def begun(options: str) -> list[str]:
    """The words of `options` after those of all runs."""
    data = "" if DATA in options else MOCK
    return shlex.split(f"{MODEL}{SAMPLES}{data}--device cpu --steps 4 --save-every 2 {options}")


def left(pair: Pair, name: str, codes: list) -> list[dict[str, str]]:
    """All that is compared of the runs `name` of both, by what it is."""
    jobs = [{"folder": str(checkout.runs / name)} for checkout in pair]
    found = both(pair, "leaves", f"{name}.log", jobs)
    everything = []
    for checkout, code, (hashes,) in zip(pair, codes, found, strict=True):
        told = {f"exit code of rank {rank}": str(value) for rank, value in enumerate(code)}
        for record in lines(checkout.runs / name / "metrics.jsonl"):
            for key, value in flat(record):
                if key not in MEASURED:
                    told[f"{key} of step {record['step']}"] = repr(value)
        events = lines(checkout.runs / name / "events.jsonl")
        told["events"] = ", ".join(f"{event['kind']} at {event['step']}" for event in events)
        everything.append(told | (hashes or {"leaves": f"unreadable, see {name}.log"}))
    return everything


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line; none where it is missing."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a record, also of those within others."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The first thing that differs, and how many do; empty: none."""
    keys = [*before, *(key for key in after if key not in before)]
    found = [key for key in keys if before.get(key) != after.get(key)]
    if not found:
        return ""
    one, other = (told.get(found[0], "nothing") for told in (before, after))
    return f"{found[0]}: {one}, then {other} (1 of {len(found)} in {len(keys)})"


# --- cases

Verdict = tuple[bool, str]
"""Whether all is the same, and what there is to say."""
Run = Callable[[Pair, str], Verdict]
"""``(pair, folder)`` runs a case."""


def judge(pair: Pair, folder: str, codes: list, wanted: int = 0) -> Verdict:
    """Compare two runs, which both must have come to their ends."""
    before, after = left(pair, folder, codes)
    if found := difference(before, after):
        return False, found
    if set(codes[0]) != {wanted}:
        return False, f"exit codes {codes}: nothing is proven; see {folder}.log.0"
    return True, f"{len(before)} values"


def training(options: str, ranks: int = 0, wanted: int = 0) -> Run:
    """A run, and the exit code that it should have."""

    def run(pair: Pair, folder: str) -> Verdict:
        return judge(pair, folder, train(pair, folder, options, ranks), wanted)

    return run


def launched(options: str) -> Run:
    """A run in new processes that functron itself starts."""

    def run(pair: Pair, folder: str) -> Verdict:
        codes = []
        for checkout in pair:
            given = ["train", "--out", folder, *begun(options)]
            with open(checkout.runs / f"{folder}.log.0", "w") as log:
                words = [sys.executable, "-m", "functron", *given]
                done = subprocess.run(words, env=checkout.environment, cwd=checkout.runs,
                                      stdout=log, stderr=log, timeout=SECONDS)  # fmt: skip
            codes.append([done.returncode])
        return judge(pair, folder, codes)

    return run


def resuming(options: str, then: str, *, cross: bool, ranks: int = 0) -> Run:
    """The last steps of a run once more; with `cross` of that of BEFORE in both checkouts."""

    def run(pair: Pair, folder: str) -> Verdict:
        codes = train(pair, folder, options)
        if codes != [[0], [0]]:
            return False, f"exit codes {codes} before resuming; see {folder}.log.0"
        one, other = (checkout.runs / folder for checkout in pair)
        if cross:
            shutil.rmtree(other)
            shutil.copytree(one, other)
        for run in (one, other):
            shutil.rmtree(run / "checkpoints" / "4")
        return judge(pair, folder, train(pair, folder, then, ranks, resume=True))

    return run


def tracing(options: str) -> Run:
    """The text of a step's program."""

    def run(pair: Pair, folder: str) -> Verdict:
        given = ["trace", "--program", *shlex.split(MODEL + SAMPLES + options)]
        codes = both(pair, "command", f"{folder}.log", [{"arguments": given}] * 2)
        texts = [(checkout.runs / f"{folder}.log.0").read_text() for checkout in pair]
        if codes != [[0], [0]]:
            return False, f"exit codes {codes}: {texts[0][-300:]}"
        before, after = map(renumbered, texts)
        if before == after:
            return True, f"{len(before)} lines"
        bare = [[re.sub(r"%(\w+?)_\d+\b", r"%\1", line) for line in t] for t in (before, after)]
        diff = [d for d in difflib.unified_diff(*bare, "before", "after", n=0, lineterm="") if d]
        changed = sum(line[0] in "+-" for line in diff[2:])
        shown = "".join(f"\n    {line[:160]}" for line in diff[:SHOWN])
        return False, f"{changed} lines, but for numbers in names" + shown

    return run


def renumbered(text: str) -> list[str]:
    """The lines of a program without places in the source, names numbered as they appear."""
    text = re.sub(r"[\w.]+\.py:\d+", "", text)
    numbers: dict[str, str] = {}
    names = re.sub(r"%\w+", lambda m: number(m[0], numbers), text)
    return [" ".join(line.split()) for line in names.splitlines()]


def number(name: str, numbers: dict[str, str]) -> str:
    """`name` with the number of its first use in place of its own, where it has one."""
    base = re.sub(r"_\d+$", "", name)
    return numbers.setdefault(name, f"{base}_{len(numbers)}")


def counting(options: str) -> Run:
    """How many functions an eager step calls: runs of more and fewer steps apart."""

    def run(pair: Pair, folder: str) -> Verdict:
        counts = []
        for steps in (FEW, MANY):
            name = f"{folder}-{steps}"
            given = shlex.split(f"{MODEL}{SAMPLES}{MOCK}{options} --device cpu --prefetch 0")
            words = ["train", "--steps", str(steps), *given]
            jobs = [{"arguments": [*words, "--out", str(c.runs / name)]} for c in pair]
            counts.append([found for (found,) in both(pair, "calls", f"{name}.log", jobs)])
        if None in (*counts[0], *counts[1]):
            return False, f"it failed; see {folder}-{FEW}.log.0"
        one, other = ((b - a) / (MANY - FEW) for a, b in zip(*counts, strict=True))
        return True, f"{one:,.0f} calls a step, then {other:,.0f}: x {other / one:.3f}"

    return run


def starting(pair: Pair, folder: str) -> Verdict:
    """Seconds until the first step is recorded and until the end, and modules by then."""
    told: list[list[tuple[float, ...]]] = [[], []]
    for turn in range(3):
        for checkout, found in zip(pair, told, strict=True):
            out = checkout.runs / f"{folder}-{turn}"
            given = shlex.split(f"{MODEL}{SAMPLES}{MOCK} --device cpu --steps 1")
            began = time.time()
            words = [sys.executable, "-c", STARTED, "train", "--out", str(out), *given]
            done = subprocess.run(words, env=checkout.environment, cwd=checkout.runs, check=True,
                                  capture_output=True, text=True, timeout=SECONDS)  # fmt: skip
            seconds = time.time() - began
            first = (out / "metrics.jsonl").stat().st_mtime - began
            modules = map(int, done.stdout.split()[-2:])
            found.append((first, seconds, *modules))
    one, other = ([statistics.median(c) for c in zip(*rows, strict=True)] for rows in told)
    names = ("seconds to the first step", "seconds", "modules", "modules of functron")
    rows = zip(names, one, other, strict=True)
    return True, "; ".join(f"{name} {a:.4g}, then {b:.4g}: x {b / a:.3f}" for name, a, b in rows)


def write_chat(folder: Path) -> None:
    """A tokenizer of bytes, and conversations: half of them are cut off before any answer."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    ends = ["<|endoftext|>", "<|end|>"]
    made.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(initial_alphabet=letters, special_tokens=ends)
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] + '\\n' + m['content'] + '<|end|>' }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    table = {"eos_token": ends[0], "pad_token": ends[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    with (folder / "chat.jsonl").open("w") as file:
        for index in range(16):
            asked = {"role": "user", "content": "who?" * (1 + 20 * (index % 2))}
            answered = {"role": "assistant", "content": "I am " + "here " * (index % 5)}
            file.write(json.dumps({"messages": [asked, answered]}) + "\n")


def cases() -> dict[str, tuple[Run, bool]]:
    """By name: how to run a case, and whether it is one of the fast ones."""
    found: dict[str, tuple[Run, bool]] = {}
    for name, (options, ranks) in LAYOUTS.items():
        found[f"train {name} simulated"] = training(options), True
        found[f"train {name} processes"] = training(options, ranks), name in FAST_PROCESSES
        if name in COMPILED:
            run = training(f"{options} --compile")
            found[f"train {name} simulated compiled"] = run, name in FAST_COMPILED
        if name in COMPILED_PROCESSES:
            run = training(f"{options} --compile", ranks)
            found[f"train {name} processes compiled"] = run, name in FAST_COMPILED
    for name, options in ALONE.items():
        found[f"train {name} simulated"] = training(options, wanted=ENDS.get(name, 0)), True
    for name, (options, ranks) in ALONE_PROCESSES.items():
        found[f"train {name} processes"] = training(options, ranks), False
    found["train launched"] = launched("--mesh dp=2 --nproc 2 --max-restarts 1"), True
    for name, (options, then) in RESUMED.items():
        fast = name in FAST_RESUMED
        found[f"cross {name}"] = resuming(options, then, cross=True), fast
    for name in FAST_RESUMED[:3]:
        found[f"resume {name}"] = resuming(*RESUMED[name], cross=False), True
    run = resuming("--mesh dp=2 --zero 1", "--mesh fsdp=2 --zero 0", cross=True, ranks=2)
    found["cross processes"] = run, True
    found |= {f"trace {name}": (tracing(options), True) for name, options in TRACED.items()}
    found |= {f"calls {name}": (counting(options), True) for name, options in COUNTED.items()}
    found["start"] = starting, True
    return found


def main() -> int:
    """Run the cases asked for; the exit code is 1 where something differs."""
    if "--serve" in sys.argv:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--only", default="", help="a regular expression that names must have")
    parser.add_argument("--fast", action="store_true", help="fewer cases: two layouts compiled")
    parser.add_argument("--list", action="store_true", help="names of cases alone")
    parser.add_argument("--folder", type=Path, help="where runs, logs and compiled code stay")
    args = parser.parse_args()
    chosen = {
        name: run
        for name, (run, fast) in cases().items()
        if re.search(args.only, name) and (fast or not args.fast)
    }
    if args.list or not chosen:
        print("\n".join(chosen) or f"--only: no case has {args.only!r} in its name")
        return 0 if args.list else 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return compare(chosen, (args.before.resolve(), args.after.resolve()), folder)


def compare(chosen: Mapping[str, Run], paths: tuple[Path, Path], folder: Path) -> int:
    """Run cases one after the other, print what each gave, and give the exit code."""
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=folder))
    write_chat(runs / "chat")
    pair = (
        Checkout(paths[0], runs / "before" / "runs", environment(paths[0], folder)),
        Checkout(paths[1], runs / "after" / "runs", environment(paths[1], folder)),
    )
    began, differ, width = time.perf_counter(), [], max(map(len, chosen))
    for name, run in chosen.items():
        started = time.perf_counter()
        try:
            same, told = run(pair, name.replace(" ", "-"))
        except (OSError, subprocess.SubprocessError) as error:
            same, told = False, f"{type(error).__name__}: {error}"
        differ += [] if same else [name]
        verdict, seconds = "same" if same else "DIFFERS", time.perf_counter() - started
        print(f"{name:{width}}  {verdict:7}  {seconds:5.1f} s  {told}", flush=True)
    for checkout in pair:
        checkout.server.terminate()
    seconds = time.perf_counter() - began
    print(f"{len(chosen)} cases in {seconds:.0f} s, {len(differ)} differ: {', '.join(differ)}")
    return 1 if differ else 0


def environment(checkout: Path, folder: Path) -> dict[str, str]:
    """Variables of the processes of a checkout: one thread, compilers in the process itself."""
    return {
        **os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
