"""Makes the recipes of functron by the planner: ``python benchmarks/recipes.py [NAME ...]``.

Each is a model, so many GPUs, and the batch and optimizer of its report where there is one; the
planner finds the rest. ``functron recipe show NAME`` prints what it wrote.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import functron.apps.planner
from functron.apps.planner.machines import hardware
from functron.apps.planner.measurements import describe_estimate
from functron.apps.planner.search import Choices, Ranked, explain_misfit, search
from functron.apps.planner.space import describe_way
from functron.optim import ScheduleConfig
from functron.training.config import TrainConfig, configure, dump, with_model

FOLDER = Path(functron.apps.planner.__file__).parent / "recipe_files"


@dataclass(frozen=True)
class Recipe:
    """The settings that a recipe is made from.

    Attributes:
        model: the preset.
        gpus: how many.
        batch: samples per step.
        seq: tokens of a sample.
        peak: learning rate.
        source: of batch and learning rate.
        machine: the GPUs.
        tokens: to train on, which gives the steps.
        fixed: settings that are not searched.
        warmup: steps.
        resembles: the published run that is closest, with what it took.
    """

    model: str
    gpus: int
    batch: int
    seq: int
    peak: float
    source: str
    machine: str = "h100"
    tokens: float = 1e12
    fixed: dict = field(default_factory=dict)
    warmup: int = 2000
    resembles: str = "no published run that we know of"


LLAMA3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.4"
RECIPES = {
    "llama3-8b-8": Recipe("llama3-8b", 8, 128, 8192, 3e-4, f"{LLAMA3}, with a smaller batch",
        resembles="Megatron-Bridge 25.11: fsdp=8 on 8 H100, FP8: 9.07 s of 128 samples",
    ),
    "llama3-8b-cp2-8": Recipe(
        "llama3-8b", 8, 128, 8192, 3e-4, f"{LLAMA3}, with a smaller batch",
        fixed={"tp": 1, "pp": 1, "cp": 2},
        resembles="NeMo 24.07: dp=4,cp=2 on 8 H100, FP8: 10.89 s of 128 samples",
    ),
    "llama3-70b-64": Recipe(
        "llama3-70b", 64, 128, 8192, 1.5e-4, f"{LLAMA3}, with a smaller batch",
        fixed={"tp": 4, "pp": 4, "cp": 2},
        resembles="NeMo's recipe of 64 H100: tp=4, pp=4, cp=2, FP8, 128 samples",
    ),
    "llama3-70b-1024": Recipe(
        "llama3-70b", 1024, 1024, 8192, 1.5e-4, LLAMA3,
        resembles="torchtitan: fsdp=32,tp=8 on 256 H100, FP8: 19.8 s of 512 samples",
    ),
    "llama3-405b-1024": Recipe(
        "llama3-405b", 1024, 512, 8192, 8e-5, f"{LLAMA3}, with a smaller batch", tokens=15.6e12,
        warmup=8000, fixed={"tp": 8, "pp": 8, "cp": 2},
        resembles="NeMo's recipe: tp=8, pp=8, cp=2",
    ),
    "llama3-405b-16384": Recipe(
        "llama3-405b", 16384, 2048, 8192, 8e-5, LLAMA3, tokens=15.6e12, warmup=8000,
        resembles="Llama 3, table 4: tp=8,pp=16,dp=128, 128 stages of 126 layers with none in the "
        "first and last, on 16,384 H100: 6.46 s of 2,048 samples (400 TFLOP/s)",
    ),
    "gpt3-175b-1024": Recipe(
        "gpt3-175b", 1024, 1536, 2048, 0.6e-4, "Brown et al. 2020, table 2.1", "a100", 300e9,
        resembles="Narayanan et al. 2021, section 5: tp=8, pp=8 or 16, full recomputation, on "
        "1,024 A100: 31.9 s of 1,536 samples (140 TFLOP/s)",
    ),
    "gpt3-175b-128": Recipe(
        "gpt3-175b", 128, 256, 2048, 0.6e-4, "Brown et al. 2020, table 2.1, with a smaller batch",
        tokens=300e9, fixed={"tp": 4, "pp": 8}, resembles="NeMo's recipe: tp=4, pp=8, FP8",
    ),
    "gpt3-175b-512": Recipe(
        "gpt3-175b", 512, 2048, 2048, 0.6e-4, "Brown et al. 2020, table 2.1, with a larger batch",
        tokens=300e9, fixed={"tp": 4, "pp": 8}, resembles="NeMo's recipe: tp=4, pp=8, FP8",
    ),
    "gpt-1t-3072": Recipe(
        "gpt-1t", 3072, 3072, 2048, 0.5e-4,
        "Narayanan et al. 2021, table 1; the learning rate is a guess", "a100", 450e9,
        resembles="Narayanan et al. 2021, table 1: tp=8,pp=64,dp=6, full recomputation, on 3,072 "
        "A100: 163 TFLOP/s each",
    ),
    "mixtral-8x7b-64": Recipe(
        "mixtral-8x7b", 64, 512, 4096, 3e-4, "no report says: as dense models of its active size",
        resembles="NeMo 25.04: dp=8,ep=8 on 64 GB200, FP8: 0.85 s of 256 samples",
    ),
    "mixtral-8x22b-256": Recipe(
        "mixtral-8x22b", 256, 1024, 4096, 2e-4,
        "no report says: as dense models of its active size",
        resembles="arXiv 2504.14960: pp=8,ep=8,tp=2 on 128 H100: 4.21 s of 256 samples",
    ),
    "qwen3-30b-a3b-64": Recipe(
        "qwen3-30b-a3b", 64, 1024, 4096, 3e-4, "no report says: as dense models of its active size",
        resembles="Megatron-Bridge: dp=2,ep=8 on 16 H100: 10.1 s of 512 samples",
    ),
    "qwen3-235b-a22b-512": Recipe(
        "qwen3-235b-a22b", 512, 2048, 4096, 2e-4,
        "no report says: as dense models of its active size",
    ),
    "deepseek-v3-2048": Recipe(
        "deepseek-v3", 2048, 15360, 4096, 2.2e-4,
        "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 4.2", tokens=14.8e12,
        fixed={"pp": 16, "ep": 8, "tp": 1, "remat": "full", "rows": 1},
        resembles="section 3: pp=16, ep=64, DualPipe on 2,048 H800, FP8: 19.9 s of 15,360 samples",
    ),
    "nemotron-4-340b-6144": Recipe(
        "nemotron-4-340b", 6144, 2304, 4096, 1e-4,
        "NVIDIA 2024, Nemotron-4 340B Technical Report, section 2.2; the learning rate is a guess",
        tokens=8e12,
        resembles="table 2 there: tp=8,pp=12,dp=32, 8 stages of a rank, on 3,072 H100: 10.3 s of "
        "1,536 samples",
    ),
}  # fmt: skip


def configure_run(one: Recipe) -> TrainConfig:
    """The run that is planned."""
    steps = round(one.tokens / (one.batch * one.seq))
    return configure(
        with_model(TrainConfig(), one.model),
        seq=one.seq,
        global_batch=one.batch,
        steps=steps,
        learning_rate=ScheduleConfig(
            name="cosine",
            peak=one.peak,
            total_steps=0,
            end_fraction=0.1,
            warmup_steps=min(one.warmup, steps // 2),
        ),
    )


def made(name: str, cpu_seconds: float = 30.0) -> str:
    """The file of a recipe."""
    one = RECIPES[name]
    choices = Choices(configure_run(one), hardware(one.machine))
    space = choices.space(one.gpus, fixed=one.fixed)
    found = search(space, choices, cpu_seconds=cpu_seconds)
    if not found.best:
        raise SystemExit(f"{name}: {explain_misfit(found)}")
    print(f"{name}\n{found}\n", flush=True)
    command = (
        f"functron plan --model {one.model} --gpus {one.gpus} --hardware {one.machine} "
        f"--global-batch {one.batch} --seq {one.seq}"
    )
    best = found.best[0]
    lines = [f"{choices.machine.name}: {describe_estimate(best.estimate)}"]
    lines += [f"resembles: {one.resembles}"]
    if one.fixed:
        command += f" --fix {','.join(f'{name}={value}' for name, value in one.fixed.items())}"
        free = search(choices.space(one.gpus), choices, cpu_seconds=cpu_seconds)
        rather = min((best, *free.best), key=lambda one: one.estimate.step_seconds)
        lines += [f"the planner would rather: {describe_choice(rather)}"]
    else:
        lines += [f"the planner's choice: {describe_choice(best)}"]
    lines += [f"batch and learning rate: {one.source}"]
    return "".join(f"# {line}\n" for line in (command, *lines)) + dump(best.candidate)


def describe_choice(one: Ranked) -> str:
    """A candidate and what it is expected to take."""
    return f"{describe_way(one.candidate)}: {describe_estimate(one.estimate)}"


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RECIPES:
        (FOLDER / f"{chosen}.toml").write_text(made(chosen), encoding="utf-8")
