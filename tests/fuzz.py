"""Configurations by seed, each run on a mesh and on none, and every number of their records.

    python -m tests.fuzz 0 100        # seeds 0 to 99
    python -m tests.fuzz 17           # one seed, and the command lines that it stands for

A configuration is options of ``functron train``: some that say what is computed, which both runs
have, and some that say how it is divided, which the run on a mesh alone has. Both take a few steps
in this process; records may differ by rounding alone. What is refused before the first step, with a
message that says what was wanted, is as good; any other exception is a failure.

A new option belongs into `draw`; a failure that was mended into `CASES`.
"""

from __future__ import annotations

import io
import math
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from functron.cli.train import parse_train
from functron.spmd import Mesh
from functron.training.checks import validate
from functron.training.config import TrainConfig
from functron.training.run import prepare
from functron.training.train import train

STEPS = 3
CLOCK = {"step_seconds", "tokens_per_second", "mfu", "peak_memory_bytes"}
ROOM = {"expert_room", "reruns", "router_fullest"}  # of ranks that divide experts
# Sums of rounding errors after some steps, with room: sharded sums are in another order, which Adam
# divides by second moments and clipping by the norm. float64 has no excuse; in float32 errors of
# 6e-8 grow by the depth of the sums and by steps; bfloat16 rounds every activation to 8 bits.
TOLERANCES = {"float64": 1e-8, "float32": 2e-3, "bfloat16": 5e-2}


class Case(NamedTuple):
    """A configuration.

    Attributes:
        both: options that say what is computed.
        mesh: those that say how it is divided.
    """

    both: tuple[str, ...]
    mesh: tuple[str, ...]

    def __str__(self) -> str:
        lines = [("train", self.both), ("train", (*self.both, *self.mesh))]
        return "\n".join(" ".join(["functron", verb, *map(_quoted, x)]) for verb, x in lines)


def _quoted(word: str) -> str:
    return f'"{word}"' if set(word) & set(" ;|") else word


SMALL = (
    "--format mock --gpt.embed-dim 32 --gpt.num-heads 4 --gpt.vocab-multiple 16 "
    f"--steps {STEPS} --prefetch 0 --learning-rate.name constant"
).split()

_MODELS = {
    "gpt2-tiny": "--gpt.mlp-dim 48",
    "llama3-tiny": "--gpt.num-kv-heads 2 --gpt.mlp-dim 48",
    "mixtral-tiny": "--gpt.num-kv-heads 2 --gpt.moe.num-experts 4 --gpt.moe.expert-dim 24",
    "qwen3-moe-tiny": "--gpt.num-kv-heads 2 --gpt.moe.num-experts 4 --gpt.moe.expert-dim 16",
    "gpt-oss-tiny": "--gpt.moe.num-experts 4 --gpt.moe.expert-dim 16 --gpt.window 6",
    "deepseek-v3-tiny": "--gpt.mlp-dim 48 --gpt.moe.expert-dim 16 --gpt.moe.shared-dim 16",
}

_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev")


def draw(seed: int) -> Case:
    """The configuration of a seed."""
    rng = random.Random(seed)

    def maybe(chance: float, *options: str) -> list[str]:
        return list(rng.choice(options).split()) if rng.random() < chance else []

    model = rng.choice(list(_MODELS))
    experts = "moe" in _MODELS[model]
    dtype = rng.choices(list(TOLERANCES), [8, 3, 1])[0]
    layers = rng.choice([2, 4])
    microbatches = rng.choice([1, 2, 2, 4])
    both = [*SMALL, "--model", model, *_MODELS[model].split(), "--gpt.dtype", dtype]
    both += ["--gpt.num-layers", str(layers), "--seed", str(rng.randrange(100))]
    both += ["--seq", str(rng.choice([16, 16, 32])), "--microbatches", str(microbatches)]
    both += ["--global-batch", str(rng.choice([8, 16]))]
    if rng.random() < 0.15:
        both += ["--ramp-up", "8 8 16", "--global-batch", "16"]
        both += maybe(0.5, "--rate-unit samples --learning-rate.name linear")
        both += maybe(0.3, "--earlier-batches 1x8")
    both += maybe(0.2, "--mask-documents", "--pack best-fit")
    both += maybe(0.2, "--gpt.dropout 0.1")
    both += maybe(0.15, "--gpt.z-loss 1e-3")
    both += maybe(0.2, "--gpt.tied", "--gpt.qk-norm", "--gpt.bias", "--gpt.window 5")
    both += maybe(
        0.2,
        "--gpt.mtp-depth 1",
        "--gpt.mtp-depth 1 --gpt.mtp-detached",
        "--gpt.mtp-depth 2 --gpt.mtp-repeated",
    )
    both += maybe(0.2, "--gpt.parallel-residual", "--gpt.residual-scale 0.5 --gpt.logit-scale 2.0")
    both += maybe(0.2, "--log-layers-every 2")
    both += maybe(0.2, "--split 90,10 --eval-every 2 --eval-batches 1")
    both += maybe(0.15, "--lora-rank 2 --lora-targets blocks/attention/q,blocks/attention/out")
    if experts:
        both += maybe(0.1, "--lora-rank 2 --lora-targets */moe/experts/*")
        both += maybe(0.3, "--gpt.moe.balance-bias", "--gpt.moe.balance-bias --gpt.moe.score sigmoid"
                           " --gpt.moe.normalise before --gpt.moe.renormalise")  # fmt: skip
        if "--gpt.moe.balance-bias" in both and model in ("mixtral-tiny", "qwen3-moe-tiny"):
            both += maybe(0.5, "--gpt.moe.balance-by quantile")
        kinds = ["batch", "sequence"]
        if "--gpt.moe.balance-bias" not in both and model != "deepseek-v3-tiny":
            kinds.append("global")
        both += maybe(0.5, *(f"--gpt.moe.aux {kind}" for kind in kinds))
        both += maybe(0.3, "--gpt.moe.capacity-factor 1.25", "--gpt.moe.jitter 0.01",
                      "--gpt.moe.capacity-factor 1.25 --gpt.moe.capacity-over batch")  # fmt: skip
        both += maybe(0.2, "--gpt.moe.routing expert_choice --gpt.moe.aux-loss 0 "
                           "--gpt.moe.capacity-factor 1 --gpt.moe.no-balance-bias "
                           "--gpt.moe.no-renormalise --gpt.moe.normalise before")  # fmt: skip
        both += maybe(0.2, "--gpt.moe.z-loss 1e-3", "--gpt.moe.drop probability")
        both = _effective(both)
    both += _optimizer(rng, dtype)
    packed = bool({"--pack", "--mask-documents"} & {*both})
    division = tuple(_division(rng, experts, layers, packed))
    both += maybe(0.2, "--anomalies.on-spike skip")  # with a limit that no step reaches
    return Case(tuple(both), division)


def _effective(options: list[str]) -> list[str]:
    """Without those of experts that have no effect among the others, and would be refused."""
    useless = set()
    if "--gpt.moe.capacity-factor" not in options or "expert_choice" in options:
        useless.add("--gpt.moe.drop")
    if "expert_choice" in options:
        useless.add("--gpt.moe.balance-by")
    if "--gpt.moe.aux-loss" in options:  # 0
        useless.add("--gpt.moe.aux")
    before = [None, *options]
    return [x for x, last in zip(options, before, strict=False) if not {x, last} & useless]


def _optimizer(rng: random.Random, dtype: str) -> list[str]:
    name = rng.choice(["adamw", "adamw", "adam", "sgd", "adafactor", "adam_mini", "muon", "soap"])
    found = ["--optimizer.name", name, "--learning-rate.peak", "0.1" if name == "sgd" else "3e-3"]
    if name == "muon":  # bfloat16 would round differently what is sharded differently
        found += ["--optimizer.muon.dtype", "float32"]
    if rng.random() < 0.3:
        found += ["--optimizer.clip-norm", rng.choice(["0", "0.1"])]
    if rng.random() < 0.2:
        found += ["--optimizer.ema-decay", "0.9"]
    if dtype == "bfloat16" and rng.random() < 0.5:
        found += [rng.choice(["--optimizer.fp32-masters", "--optimizer.grad-dtype=float32"])]
    return found


def _division(rng: random.Random, experts: bool, layers: int, packed: bool) -> list[str]:
    """A mesh of up to 8 ranks, and what may be said of it."""
    sizes: dict[str, int] = {}
    room = rng.choice([2, 4, 4, 8])
    names = ["dp", "fsdp", "tp", "cp", "ulysses", "pp", *(["ep"] * experts)]
    while room > 1:
        name, size = rng.choice(names), rng.choice([2, 2, 4])
        if name not in sizes and size <= room:
            sizes[name], room = size, room // size
    order = [name for name in ("pp", "dp", "fsdp", "ep", "cp", "ulysses", "tp") if name in sizes]
    found = ["--mesh", ",".join(f"{name}={sizes[name]}" for name in order)]

    def maybe(chance: float, *options: str) -> None:
        if rng.random() < chance:
            found.extend(rng.choice(options).split())

    if "pp" in sizes:
        maybe(0.7, *(f"--schedule {name}" for name in _SCHEDULES))
        maybe(0.3, "--layout cost", "--layout first=1" if layers > sizes["pp"] else "--layout even")
        maybe(0.2, "--vocab-over-pp")
    data = sizes.keys() & {"dp", "fsdp", "ep", "cp", "ulysses"}
    if data:
        maybe(0.5, "--zero 1", "--zero 2", *(["--zero 3"] if data & {"dp", "fsdp"} else []))
    if "fsdp" in sizes or "3" in found:
        maybe(0.5, "--gather step", "--gather keep")
    if "tp" in sizes:
        maybe(0.5, "--sequence-parallel")
        if "ep" in sizes and "--sequence-parallel" in found:
            maybe(0.5, "--expert-axes ep,tp")
    if "cp" in sizes:
        maybe(0.4, "--context gather", "--no-zigzag")
    maybe(0.4, "--remat full", "--remat selective", "--remat dots")
    maybe(0.2, "--loss-chunk-tokens 5")
    maybe(0.03, "--compile")
    if experts:  # steps are taken again where some rank has more than balanced rows
        maybe(0.6, "--expert-room 1", "--expert-room 1.25")
    if packed and "cp" in sizes:
        maybe(0.5, "--context dynamic")
    return found


def check(case: Case) -> list[str]:
    """Run both; the numbers that differ by more than rounding, or why it was refused.

    Returns:
        Nothing where all agree; else a line for each number of the first record that does not; or
        one that begins with "refused".

    Raises:
        Exception: a run failed in any other way.
    """
    configs = []
    for options in (case.both, (*case.both, *case.mesh)):
        said = io.StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                configs.append(parse_train(options))
            validate(configs[-1])
        except (ValueError, SystemExit) as error:
            why = said.getvalue() if isinstance(error, SystemExit) else str(error)
            if "wanted" not in why:
                raise AssertionError(f"refused without saying what was wanted: {why}") from error
            return [f"refused: {why}"]
    runs = [records(config) for config in configs]
    config = configs[0]
    tolerance = TOLERANCES[config.gpt.dtype]
    for alone, divided in zip(*runs, strict=True):
        found = list(differences(alone, divided, tolerance))
        if found:
            return [f"step {alone['step']}: {line}" for line in found]
    return []


def records(config: TrainConfig) -> list[dict[str, Any]]:
    """The records that the run of `config` would write, but for times and memory."""
    with redirect_stderr(io.StringIO()):  # the progress bar
        history = train(prepare(config, Mesh.parse(config.parallelism.mesh)), None).history
    beside = {*CLOCK, *ROOM, "context"}  # how documents were dealt, of which one alone has none
    return [{k: v for k, v in record.items() if k not in beside} for record in history]


def differences(want: Any, got: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """A line for each number that differs by more than `tolerance` of its size."""
    if isinstance(want, Mapping):
        if want.keys() != got.keys():
            yield f"{path}: keys {sorted(want)} and {sorted(got)}"
            return
        for key in want:
            yield from differences(want[key], got[key], tolerance, f"{path}/{key}".strip("/"))
    elif isinstance(want, list | tuple):
        for index, (a, b) in enumerate(zip(want, got, strict=True)):
            yield from differences(a, b, tolerance, f"{path}/{index}")
    elif isinstance(want, float) and isinstance(got, float):
        if not math.isclose(want, got, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{path}: {want!r} without a mesh and {got!r} on it"
    elif want != got:
        yield f"{path}: {want!r} without a mesh and {got!r} on it"


def _case(both: str, mesh: str) -> Case:
    return Case((*SMALL, *both.split()), tuple(mesh.split()))


_COUPLED = (
    "--model mixtral-tiny --gpt.num-kv-heads 0 --gpt.moe.expert-dim 24 --seq 32 --global-batch 8 "
    "--gpt.dtype float64 --microbatches 2 --gpt.num-layers 2"
)

CASES = {
    "microbatches-dp": _case(_COUPLED, "--mesh dp=2"),
    "microbatches-pp": _case(_COUPLED, "--mesh pp=2,dp=2"),
    "microbatches-packed": _case(f"{_COUPLED} --mask-documents", "--mesh ep=2"),
    "dealt": _case(
        "--model llama3-tiny --gpt.num-kv-heads 2 --gpt.mlp-dim 48 --gpt.num-layers 2 --seq 32 "
        "--gpt.dtype float64 --microbatches 2 --gpt.mtp-depth 1 --pack best-fit --global-batch 8 "
        "--split 90,10 --eval-every 2 --eval-batches 1 --log-layers-every 2",
        "--mesh dp=2,cp=2,tp=2 --sequence-parallel --context dynamic",
    ),
}
"""Cases that failed once, by their subject."""


def main(arguments: list[str]) -> int:
    """Check seeds FIRST to FIRST + COUNT - 1; 1 if any failed."""
    first, count = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 1
    warnings.simplefilter("ignore")
    failed = refused = 0
    for seed in range(first, first + count):
        case, began = draw(seed), time.perf_counter()
        try:
            lines = check(case)
        except Exception:
            lines = traceback.format_exc().splitlines()
        bad = bool(lines) and not lines[0].startswith("refused")
        refused += bool(lines) and not bad
        failed += bad
        word = "FAILED" if bad else "refused" if lines else "equal"
        print(f"{seed} {word} {time.perf_counter() - began:.1f} s", flush=True)
        if lines and (bad or count == 1 or "-v" in arguments):
            print("\n".join(lines))
        if bad or count == 1:
            print(f"python -m tests.fuzz {seed}\n{case}", flush=True)
    print(f"{count} configurations: {failed} failed, {refused} refused")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
