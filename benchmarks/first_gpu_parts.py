"""The parts of `first_gpu.py`: each yields rows, or ends with SystemExit: why it is skipped."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernel_case import ODD, TINY, Given, difference
from kernel_cases import CASES
from measure import Row, row, tried
from traces import kernels_of, trace_steps

from functron import Mesh, checkpoint, tree
from functron.core.settings import with_sections
from functron.ops import nvrtc
from functron.ops.attention import attention
from functron.ops.cross_entropy import linear_log_sum_exp_and_target
from functron.ops.launch import arch_of, usable
from functron.program.cost import peak_flops
from functron.training.config import TrainConfig, configure, starting_config
from functron.training.data import flops_per_token
from functron.training.loop import At, LoopHook
from functron.training.run import Session, prepare
from functron.training.train import train as train_run

ROOT = Path(__file__).resolve().parents[1]
WITHIN = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}
"""Of norms, relative, by which a kernel may be off its reference."""
TESTS = (
    "ops/test_flash.py", "test_gpu_kernels.py", "ops/test_scaled_matmul.py",
    "ops/test_grouped_matmul.py", "ops/test_flex_attention.py", "ops/test_ids.py",
    "nn/moe/test_router.py", "optim/test_offload.py", "test_gpu.py", "compiler/test_graph.py",
    "core/test_random.py", "core/test_compat.py", "program/test_interpreter.py",
    "spmd/test_streams.py",
)  # fmt: skip
"""All files with tests marked ``gpu``, the most important first."""
WARM_UP = 3
"""Steps after the first one and before those that are timed: the third records a graph."""
OURS, PEER = "functron jit", "torch.compile"
TRAIN_STEPS, SAVED_STEP = 8, 6
GRACE = 12.0
"""Seconds before its own end at which a part begins nothing more."""


def conformance(args: argparse.Namespace) -> Iterator[Row]:
    """By how much kernels are off their references, at sizes that fit and that fit nothing."""
    if args.device == "cuda":
        yield tried("compiled kernels", prepare_kernels, args.cache)
    for name in CASES:
        yield tried(name, compare, args.device)
    for name in ("attention", "attention, grouped", "linear + cross_entropy"):
        yield tried(name, compare_with_float64, args.device)


def prepare_kernels(name: str, cache: Path | None) -> Row:
    """Compile what is not in the cache, on all processors; of adamw that is done at first use."""
    if reason := usable(torch.device("cuda", 0)):
        raise SystemExit(f"skip: {reason}")
    folder, arch = nvrtc.default_folder(), arch_of(torch.device("cuda", 0))
    had = len([*folder.glob(f"*-{arch}-*")]) if folder else 0
    begun = time.perf_counter()
    # adamw has more variants than all others together, of which a run uses one
    sources = [nvrtc.read(name) for name in nvrtc.names() if name != "adamw"]
    jobs = [(source, defines, arch) for source in sources for defines in source.variants]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = [*pool.map(nvrtc.cubin, *zip(*jobs, strict=True))]
    took = time.perf_counter() - begun
    share_kernels(cache)
    return row(name, arch=arch, kept_before=had, wanted=len(done), seconds=took)


def share_kernels(cache: Path | None) -> None:
    """Put what either lacks of compiled kernels into the cache, and into the folder of the user."""
    own, kept = nvrtc.default_folder(), None if cache is None else cache / "cubins"
    if own is None or kept is None:
        return
    for source, into in ((kept, own), (own, kept)):
        into.mkdir(parents=True, exist_ok=True)
        for file in source.glob(f"*{nvrtc.SUFFIX}"):
            if not (into / file.name).exists():
                shutil.copyfile(file, into / file.name)


def compare(name: str, device: str) -> Row:
    """The largest difference of one kernel from its reference, by dtype."""
    off = {
        dtype: [
            difference(CASES[name](Given(sizes, getattr(torch, dtype), torch.device(device))))
            for sizes in (TINY, ODD)
        ]
        for dtype in WITHIN
    }
    ok = all(each <= WITHIN[dtype] for dtype, both in off.items() for each in both)
    why = "" if ok else f"wanted at most {WITHIN}"
    return row(name, ok=ok, why=why, **{dtype: max(both) for dtype, both in off.items()})


def compare_with_float64(name: str, device: str) -> Row:
    """Attention, or a loss over chunks of logits, in bfloat16, with its gradients."""
    draw = torch.Generator().manual_seed(0)
    if name.startswith("attention"):
        shapes = [(2, 256, 8, 64), *2 * [(2, 256, 2 if "grouped" in name else 8, 64)]]
    else:
        shapes = [(96, 64), (64, 512)]
    whole = [torch.randn(shape, generator=draw).bfloat16().double() * 0.5 for shape in shapes]
    ids = torch.randint(512, (96,), generator=draw)

    def ours(*x: torch.Tensor) -> torch.Tensor:
        if name.startswith("attention"):
            return attention(x[0], x[1], x[2], causal=True)
        given = ids.to(device), None
        lse, target = linear_log_sum_exp_and_target(x[0], x[1], *given, chunk_tokens=32)
        return lse - target

    def wanted(*x: torch.Tensor) -> torch.Tensor:
        if not name.startswith("attention"):
            return torch.nn.functional.cross_entropy(x[0] @ x[1], ids, reduction="none")
        q, k, v = (y.repeat_interleave(8 // y.shape[2], 2).transpose(1, 2) for y in x)
        hidden = torch.ones(256, 256, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / 8).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    def run(function: Callable, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in operands]
        out = function(*leaves)
        return [y.detach().cpu().double() for y in (out, *torch.autograd.grad(out.sum(), leaves))]

    got = run(ours, [x.to(device, torch.bfloat16) for x in whole])
    pairs = zip(got, run(wanted, whole), strict=True)
    off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return row(name, ok=off <= 2e-2, why="" if off <= 2e-2 else "wanted at most 2e-2", bfloat16=off)


class Results:
    """The results of a session of pytest by test; it ends when their time is over."""

    def __init__(self, ends: float):
        self.ends = ends
        self.rows: list[Row] = []
        self.counts: dict[str, dict[str, int]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test, and keep why it fails."""
        if report.when != "call" and report.outcome == "passed":
            return
        self.count(report, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        """Keep why a file has no tests, such as a package that it imports."""
        if report.outcome == "failed":
            lacks = "ModuleNotFoundError" in report.longreprtext
            self.count(report, "skipped" if lacks else "failed", tell=True)

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        """Tell wrong numbers, of the test that was counted just now, from what breaks."""
        if self.rows and call.excinfo is not None and call.excinfo.errisinstance(AssertionError):
            self.rows[-1]["state"] = "wrong"

    def pytest_runtestloop(self, session: Any) -> None:
        """Remember the session."""
        self.session = session

    def pytest_runtest_logfinish(self) -> None:
        """End it when the time is over."""
        if time.monotonic() > self.ends:
            self.session.shouldstop = "out of time"

    def count(self, report: Any, outcome: str, *, tell: bool = False) -> None:
        """Add to the numbers of its file."""
        of = self.counts.setdefault(report.nodeid.partition("::")[0], {})
        of[outcome] = of.get(outcome, 0) + 1
        if outcome == "failed" or tell:
            self.rows.append({"row": report.nodeid, "state": outcome, "why": report.longreprtext})


def tests(args: argparse.Namespace) -> Iterator[Row]:
    """The tests marked ``gpu`` of kernels, attention and steps, as far as there is time."""
    if args.device == "cpu":
        raise SystemExit("skip: they need a GPU")
    if importlib.util.find_spec("pytest") is None:
        raise SystemExit("skip: it needs pytest")
    import pytest

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    found = Results(args.ends - GRACE)
    # of the project's options those that need no plugin
    options = ["-o", "addopts=", "--import-mode=importlib", "-m", "gpu", "-q", "--tb=short"]
    options += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    needs = ("hypothesis", "jaxtyping", "beartype")
    if any(importlib.util.find_spec(name) is None for name in needs):
        options.append("--noconftest")  # which holds shapes against their annotations
    if args.tiny:  # operands are not shown: on the stand-in (tests/fake_gpu) they are garbage
        options += [
            "--assert=plain",
            "-k",
            "(tiny and bfloat16) or test_cuda_kernels or TestLaunches",
        ]
    files = [f"tests/{name}" for name in (TESTS[:2] if args.tiny else TESTS)]
    code = pytest.main([*options, *files], plugins=[found])
    for name, counts in found.counts.items():
        yield {"row": name, **counts}
    yield from found.rows
    late = time.monotonic() > found.ends
    yield {"row": "all of them", "exit": int(code), **({"stopped": "out of time"} if late else {})}


# --- training


def configured(args: argparse.Namespace, kind: Any = None, **changes: Any) -> Any:
    """The configuration of ``functron train`` on a GPU by default, with a shape of `gpu.py`.

    It is made without the command line, whose packages are not at hand everywhere.
    """
    import gpu

    shape = list(gpu.shapes(args.tiny, args.batch).values())[-1]
    precision = changes.pop("precision", None)
    named = {"default_precision": "bf16", "precision": precision, "kind": kind or TrainConfig}
    base = starting_config(None, **named)
    own = replace(shape.config, fused_projections=changes.pop("fused", "auto"))
    given = {"format": "mock", "global_batch": shape.batch, "seq": own.max_seq}
    return configure(base, gpt=own, device=args.device, **{"steps": 100, **given, **changes})


def prepared(args: argparse.Namespace, **changes: Any) -> Any:
    """The run of `configured`."""
    return prepare(configured(args, **changes), Mesh(), args.device)


@contextmanager
def not_waiting(args: argparse.Namespace, strict: bool = True) -> Iterator[None]:
    """An operation in here that makes the host wait for the device is an error."""
    if args.device == "cuda":
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
    try:
        yield
    finally:
        if args.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def memory_of(args: argparse.Namespace, setup: Any) -> Row:
    """The most memory of the device since its statistics were reset, against what is promised."""
    promised = setup.program().memory().peak_bytes
    found: Row = {"promised_gib": promised / 2**30}
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        found |= {"peak_gib": peak / 2**30, "peak_of_promised": peak / promised}
    return found


def train(args: argparse.Namespace) -> Iterator[Row]:
    """`functron.training.train` by default: nothing waits for the device; a save meanwhile."""
    name = "steps that wait for nothing, and a save"
    found = tried(name, train_once, args, strict=True, compile=False)
    yield found
    if found.get("state") == "failed":
        yield tried(
            "steps that may wait, and a save", train_once, args, strict=False, compile=False
        )


def offload(args: argparse.Namespace) -> Iterator[Row]:
    """The same with the optimizer's state in host memory."""
    yield tried("steps, and a save", train_once, args, strict=False, optimizer={"offload": True})


def train_once(name: str, args: argparse.Namespace, *, strict: bool, **changes: Any) -> Row:
    """A short training that saves while it goes on, and at its end; the last save is read back."""
    if "tqdm" not in sys.modules and importlib.util.find_spec("tqdm") is None:  # draws a bar
        sys.modules["tqdm"] = mock.MagicMock(__spec__=ModuleSpec("tqdm", None))
    saves = all(importlib.util.find_spec(name) for name in ("tensorstore", "orbax"))
    with tempfile.TemporaryDirectory() as folder, not_waiting(args, strict=False):
        trial = make_trial(args, Path(folder) if saves else None, strict)
        kind = with_sections(TrainConfig, {"trial": trial})
        run = prepare(configured(args, kind, steps=TRAIN_STEPS, **changes), Mesh(), args.device)
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        outcome = train_run(run, None)
        records = outcome.history
        found = row(name, policy=str(run.config.policy), clip=run.config.optimizer.clip_norm)
        found |= memory_of(args, run.setup)
        found["ms"] = 1e3 * statistics.median(one["step_seconds"] for one in records[2:])
        for key in ("loss", "grad_norm"):
            found[key] = [one[key] for one in records]
        if not saves:
            return found | {"save": "skipped: it needs tensorstore and orbax-checkpoint"}
        begun = time.perf_counter()
        saved, placement = Path(folder) / str(TRAIN_STEPS), run.setup.placement
        read = checkpoint.restore(saved, outcome.state, placement=placement)
        found["read_seconds"] = time.perf_counter() - begun
        pairs = zip(tree.leaves(read), tree.leaves(outcome.state), strict=True)
        equal = all(torch.equal(bits(a), bits(b.cpu())) for a, b in pairs)
        return found | ({} if equal else {"state": "wrong", "why": "the save has other numbers"})


def bits(x: Any) -> Any:
    """The bytes of a tensor, which are equal where numbers are NaN as well."""
    return x.contiguous().reshape(-1).view(importlib.import_module("torch").uint8)


def make_trial(args: argparse.Namespace, folder: Path | None, strict: bool) -> type:
    """A section of the configuration whose hook saves, and has no step before that wait."""

    class Trial(LoopHook):
        def __init__(self, session: Session):
            given = session.run.setup.placement, session.run.device
            self.saver = checkpoint.Saver(folder, given[0], device=given[1]) if folder else None
            self.stack = ExitStack()

        def before(self, at: At) -> None:
            if at.step == 2:
                self.stack.enter_context(not_waiting(args, strict))

        def due(self, step: int) -> bool:
            return step in (SAVED_STEP, TRAIN_STEPS)

        def after(self, at: At) -> None:
            if self.due(at.step):
                self.stack.close()
            if self.due(at.step) and self.saver is not None:
                self.saver.save(at.step, at.state)

        def end(self, at: At) -> None:
            self.stack.close()
            if self.saver is not None:
                self.saver.close()

    @dataclass(frozen=True)
    class TrialConfig:
        """A section whose hook is the trial."""

        def hook(self, session: Session) -> Trial:
            return Trial(session)

    return TrialConfig


def profile(args: argparse.Namespace) -> Iterator[Row]:
    """Compiled steps by default: their time, memory and kernels."""
    yield from take_steps("compiled", args)


def graph(args: argparse.Namespace) -> Iterator[Row]:
    """The same launched as one CUDA graph."""
    if args.device == "cpu":
        raise SystemExit("skip: it needs a GPU")
    yield from take_steps("one graph", args, cuda_graph=True)


def fused(args: argparse.Namespace) -> Iterator[Row]:
    """The same with a matrix for each projection, which are fused by default."""
    yield from take_steps("projections apart", args, fused=False)


def fp8(args: argparse.Namespace) -> Iterator[Row]:
    """The same with products in 8 bits."""
    yield from take_steps("fp8-tensor", args, precision="fp8-tensor")


def take_steps(name: str, args: argparse.Namespace, **changes: Any) -> Iterator[Row]:
    """Time steps that wait for nothing, then look at the kernels of some."""
    import gpu

    cuda = args.device == "cuda"
    run = prepared(args, compile=cuda, **changes)
    state, batch, step = run.state, run.batch(0), run.step
    warm, timed = (WARM_UP, 3 if args.tiny else 10) if cuda else (0, 1)
    begun, losses = time.perf_counter(), []
    state, metrics = step(state, batch)
    losses.append(metrics["loss"].item())
    first = time.perf_counter() - begun
    for _ in range(warm):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun, later = time.perf_counter(), []
    with not_waiting(args):
        for _ in range(timed):
            state, metrics = step(state, batch)
            later.append(metrics["loss"].clone())
    gpu.synchronize(args.device)
    seconds = (time.perf_counter() - begun) / timed
    tokens = batch["tokens"].numel()
    found = row(name, ms=1e3 * seconds, tokens_per_s=tokens / seconds, first_s=first)
    flops = tokens * flops_per_token(run.config) / seconds
    found |= {"mfu": flops / peak_flops(args.device, torch.bfloat16)}
    losses += [loss.item() for loss in later]
    yield found | memory_of(args, run.setup) | {"loss": losses}
    events = trace_steps(lambda state: step(state, batch)[0], state, args.device)
    yield from rows_of_kernels(kernels_of(events, cuda))


def rows_of_kernels(found: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of what `kernels_of` finds."""
    if not found:
        yield {"row": "kernels", "state": "skipped", "why": "the profiler saw none"}
        return
    yield row("kernels", **{key: value for key, value in found.items() if key != "top"})
    yield from (row(f"kernel {one.pop('name')}", **one) for one in found["top"])


def peer(args: argparse.Namespace) -> Iterator[Row]:
    """Steps without masters, clipping and norms against torch.compile: `gpu.py`."""
    import gpu

    shape = list(gpu.shapes(args.tiny, args.batch).values())[-1]
    names = (PEER, OURS) if args.device == "cuda" else ("functron eager",)
    left = args.ends - time.monotonic() - GRACE
    given = {"steps": 2 if args.tiny else 8, "budget": left, "limit": left, "warm": True}
    results = gpu.run([shape], names, argparse.Namespace(**vars(args) | given))
    done = {result.name: result for result in results if not result.failure}
    for result in results:
        if result.failure:
            yield {"row": result.name, "state": "failed", "why": result.failure}
            continue
        found = row(result.name, ms=1e3 * result.seconds, tokens_per_s=result.rate)
        found |= {"first_s": result.first, "peak_gib": result.memory / 2**30}
        found |= {"mfu": result.rate * shape.flops_per_token() / result.device_flops}
        found |= {"of_peer": result.rate / done[PEER].rate} if PEER in done else {}
        yield found | {"loss": result.losses}
    losses = {name: result.losses for name, result in done.items()}
    if wrong := gpu.measure.disagreement(losses, gpu.WARM_UP, gpu.AGREE_WITHIN):
        yield row("the same losses", ok=False, why="\n".join(wrong))
