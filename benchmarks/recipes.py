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
from functron.apps.planner.search import Choices, explain_misfit, search
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


LLAMA3 = "Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.4"
RECIPES = {
    "llama3-8b-8": Recipe("llama3-8b", 8, 128, 8192, 3e-4, f"{LLAMA3}, with a smaller batch"),
    "llama3-70b-1024": Recipe("llama3-70b", 1024, 1024, 8192, 1.5e-4, LLAMA3),
    "llama3-405b-16384": Recipe(
        "llama3-405b", 16384, 2048, 8192, 8e-5, LLAMA3, tokens=15.6e12, warmup=8000
    ),
    "gpt3-175b-1024": Recipe(
        "gpt3-175b", 1024, 1536, 2048, 0.6e-4, "Brown et al. 2020, table 2.1", "a100", 300e9
    ),
    "gpt-1t-3072": Recipe(
        "gpt-1t", 3072, 3072, 2048, 0.5e-4,
        "Narayanan et al. 2021, table 1; the learning rate is a guess", "a100", 450e9,
    ),
    "mixtral-8x7b-64": Recipe(
        "mixtral-8x7b", 64, 512, 4096, 3e-4, "no report says: as dense models of its active size"
    ),
    "mixtral-8x22b-256": Recipe(
        "mixtral-8x22b", 256, 1024, 4096, 2e-4,
        "no report says: as dense models of its active size",
    ),
    "qwen3-30b-a3b-64": Recipe(
        "qwen3-30b-a3b", 64, 1024, 4096, 3e-4, "no report says: as dense models of its active size"
    ),
    "qwen3-235b-a22b-512": Recipe(
        "qwen3-235b-a22b", 512, 2048, 4096, 2e-4,
        "no report says: as dense models of its active size",
    ),
    "deepseek-v3-2048": Recipe(
        "deepseek-v3", 2048, 15360, 4096, 2.2e-4,
        "DeepSeek-AI 2024, DeepSeek-V3 Technical Report, section 4.2", tokens=14.8e12,
        fixed={"pp": 16, "ep": 8, "tp": 1, "remat": "full", "rows": 1},
    ),
    "nemotron-4-340b-6144": Recipe(
        "nemotron-4-340b", 6144, 2304, 4096, 1e-4,
        "NVIDIA 2024, Nemotron-4 340B Technical Report, section 2.2; the learning rate is a guess",
        tokens=8e12,
    ),
}  # fmt: skip


def made(name: str, cpu_seconds: float = 30.0) -> str:
    """The file of a recipe."""
    one = RECIPES[name]
    steps = round(one.tokens / (one.batch * one.seq))
    config = configure(
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
    choices = Choices(config, hardware(one.machine))
    space = choices.space(one.gpus, fixed=one.fixed)
    found = search(space, choices, cpu_seconds=cpu_seconds)
    if not found.best:
        raise SystemExit(f"{name}: {explain_misfit(found)}")
    print(f"{name}\n{found}\n", flush=True)
    command = (
        f"functron plan --model {one.model} --gpus {one.gpus} --hardware {one.machine} "
        f"--global-batch {one.batch} --seq {one.seq}"
    )
    if one.fixed:
        command += f" --fix {','.join(f'{name}={value}' for name, value in one.fixed.items())}"
    best = f"{choices.machine.name}: {describe_estimate(found.best[0].estimate)}"
    about = f"# {command}\n# {best}\n# batch and learning rate: {one.source}\n"
    return about + dump(found.best[0].candidate)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RECIPES:
        (FOLDER / f"{chosen}.toml").write_text(made(chosen), encoding="utf-8")
