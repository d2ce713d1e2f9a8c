"""The cases of side_by_side.py: what is run, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

MODEL = (
    "--gpt.num-layers 2 --gpt.embed-dim 32 --gpt.num-heads 4 --gpt.num-kv-heads 2 --gpt.mlp-dim 64 "
    "--gpt.max-seq 64"
)
SAMPLES = "--seq 32 --global-batch 8"
CLIP = "--optimizer.clip-norm 0.3"  # norms are about 0.5
DATA = "../../chat"
"""Conversations and their tokenizer, from where the commands run."""


@dataclass(frozen=True)
class Case:
    """One line of the output.

    Attributes:
        kind: what is compared; see side_by_side.py.
        options: of functron, beside those that all cases have.
        then: the options with which a run goes on.
        ranks: processes; 0: one that simulates the mesh.
        cross: whether both checkouts go on with the run of the first.
        wanted: the exit code that both should have.
        fast: whether it is run under --fast.
    """

    kind: Literal["train", "launch", "resume", "trace", "calls", "start"]
    options: str = ""
    then: str = ""
    ranks: int = 0
    cross: bool = False
    wanted: int = 0
    fast: bool = True


def table(text: str) -> Mapping[str, str]:
    """The options of each line, by its first word."""
    rows = (line.split(maxsplit=1) for line in text.strip().splitlines())
    return {name: "".join(rest) for name, *rest in rows}


LAYOUTS = table("""
plain
dp-tp            --mesh dp=2,tp=2
pp               --mesh pp=2 --microbatches 2
pp-tp            --mesh pp=2,tp=2 --schedule zb-h1 --microbatches 4
fsdp             --mesh fsdp=2
cp               --mesh cp=2
ep               --model mixtral-tiny --mesh ep=2
fp16             --precision fp16 --mesh dp=2
fp8              --precision fp8-tensor --mesh tp=2
bf16             --precision bf16 --mesh dp=2 --zero 1 --microbatches 2
bf16-fsdp        --precision bf16 --mesh fsdp=2
zero-1           --mesh dp=2 --zero 1
zero-2           --mesh dp=2 --zero 2 --microbatches 2
lora             --lora-rank 4 --mesh dp=2
gather-step      --mesh fsdp=2 --gather step --microbatches 2
accumulate       --microbatches 4
sgd              --optimizer.name sgd --mesh fsdp=2
muon             --optimizer.name muon --mesh fsdp=2
adafactor        --optimizer.name adafactor --mesh fsdp=2
lion             --optimizer.name lion --mesh fsdp=2
average          --optimizer.ema-decay 0.9 --mesh dp=2 --zero 1
chat             --format chat --microbatches 2 --global-batch 4
chat-dp          --format chat --mesh dp=2 --microbatches 2 --global-batch 4
""")
"""Run simulated and on processes."""
OTHERS = table("""
layers           --log-layers-every 2 --mesh dp=2
layers-pp        --log-layers-every 2 --mesh pp=2 --microbatches 2
chat-pp          --format chat --mesh pp=2 --microbatches 2 --global-batch 4
no-targets       --model bert-tiny --mask-rate 0.02 --global-batch 1
few-targets      --model bert-tiny --mask-rate 0.02 --mesh dp=2 --microbatches 2
overflow         --precision fp16 --optimizer.loss-scale.initial 4194304 --steps 8 \
--optimizer.loss-scale.hysteresis 1 --optimizer.loss-scale.growth-interval 1
overflow-pp      --precision fp16 --optimizer.loss-scale.initial 4194304 --steps 8 \
--optimizer.loss-scale.hysteresis 1 --mesh pp=2 --microbatches 2
bf16-pure        --precision bf16-pure --mesh dp=2 --zero 2
fp8-delayed      --precision fp8-delayed --mesh tp=2 --microbatches 2
fp8-codes        --precision fp8-tensor --mesh fsdp=2 --gather-as quantised
half-masters     --precision bf16 --optimizer.master-bits 16
moments-int8     --optimizer.mu-dtype int8 --optimizer.nu-dtype fp8 --mesh fsdp=2
reduce-bf16      --optimizer.reduce-dtype bfloat16 --mesh dp=2 --microbatches 2
unclipped        --optimizer.clip-norm 0 --mesh dp=2
zero-3           --mesh dp=2 --zero 3
sequence         --mesh tp=2 --sequence-parallel --remat full
ulysses          --mesh ulysses=2
vocab-over-pp    --mesh pp=2 --microbatches 2 --vocab-over-pp
interleaved      --mesh pp=2 --microbatches 2 --schedule interleaved --gpt.num-layers 4
pp-fsdp          --mesh pp=2,fsdp=2 --microbatches 2
pp-bf16          --mesh pp=2,dp=2 --microbatches 2 --precision bf16 --zero 1
dropout          --gpt.dropout 0.1 --mesh dp=2 --microbatches 2
loss-chunks      --loss-chunk-tokens 16 --gpt.z-loss 0.001
groups           --optimizer.groups "embed lr=0.1" --optimizer.skip-nonfinite 2
offload          --optimizer.offload --mesh dp=2
soap             --optimizer.name soap --optimizer.soap.frequency 2 --mesh fsdp=2
adam-mini        --optimizer.name adam_mini --mesh tp=2
muon-distributed --optimizer.name muon --optimizer.muon.distributed --mesh fsdp=2
mup              --gpt.mup-base-dim 16 --gpt.mup-base-head-dim 4
gpt2             --model gpt2-tiny --mesh tp=2
deepseek         --model deepseek-v3-tiny --mesh ep=2
mamba            --model mamba2-tiny --mesh dp=2
t5               --model t5-tiny --end-token 1
evaluate         --split 99,1 --eval-every 2 --eval-batches 1 --optimizer.ema-decay 0.9 \
--eval-averaged
ramp-up          --ramp-up "4 4 8" --rate-unit samples --learning-rate.warmup-steps 8
rollback         --anomalies.on-spike rollback --anomalies.minimum 2 --anomalies.threshold 0.2 \
--anomalies.most 99 --steps 8
lower-rate       --anomalies.on-spike lower-rate --anomalies.minimum 2 --anomalies.threshold 0.2 \
--anomalies.most 99 --steps 8
skip             --anomalies.on-spike skip --anomalies.minimum 2 --anomalies.threshold 0.2 --steps 8
not-finite       --learning-rate.peak 1e30 --learning-rate.name constant --steps 8
""")
"""Run simulated alone, and those of `OTHER_PROCESSES` as processes too."""
OTHER_PROCESSES = ("layers", "layers-pp", "overflow-pp", "muon-distributed", "dropout")
ON_PROCESSES = table("""
memory           --mesh dp=2 --zero 1 --memory-save-every 1
replicas         --mesh dp=2 --check-replicas-every 2
""")
"""Run as processes alone."""
RESUMED = table("""
plain            ; --mesh fsdp=2
to-pp            --mesh dp=2 ; --mesh pp=2 --microbatches 2
from-pp          --mesh pp=2 --microbatches 2 ; --mesh tp=2 --microbatches 1
bf16             --precision bf16 --mesh fsdp=2 ; --mesh dp=2 --zero 1
fp16             --precision fp16 ; --mesh tp=2
muon             --optimizer.name muon --mesh fsdp=2 ; --mesh tp=2
adafactor        --optimizer.name adafactor ; --mesh fsdp=2
lion             --optimizer.name lion --mesh dp=2 --zero 1 ; --mesh tp=2 --zero 0
sgd              --optimizer.name sgd ; --mesh dp=2 --zero 2
average          --optimizer.ema-decay 0.9 ; --mesh fsdp=2
lora             --lora-rank 4 ; --mesh dp=2
ep               --model mixtral-tiny --mesh ep=2 ; --mesh dp=2
fp8-delayed      --precision fp8-delayed ; --mesh tp=2
""")
"""Options with which a run begins; and with which it goes on."""
TRACED = ("plain", "dp-tp", "fsdp", "zero-1", "zero-2", "bf16", "fp16", "ep", "cp", "lora",
          "gather-step", "muon", "average")  # fmt: skip
COUNTED = ("plain", "dp-tp", "pp")
COMPILED = ("dp-tp", "pp", "plain", "fsdp", "bf16", "zero-2", "gather-step", "ep")
COMPILED_PROCESSES = ("pp",)
FAST = ("plain", "dp-tp", "pp", "fsdp", "zero-2", "chat-dp", "to-pp", "bf16", "muon", "average")
"""Layouts that --fast takes on processes, and runs that it resumes."""


def num_ranks(options: str) -> int:
    """The ranks of the mesh of these options."""
    sizes = re.search(r"--mesh (\S+)", options)
    return math.prod(map(int, re.findall(r"=(\d+)", sizes[1]))) if sizes else 1


def cases() -> Iterator[tuple[str, Case]]:
    """Names and cases, in order."""
    for name, options in LAYOUTS.items():
        fast, ranks = name in FAST, num_ranks(options)
        yield f"train {name} simulated", Case("train", options)
        yield f"train {name} processes", Case("train", options, ranks=ranks, fast=fast)
    for name, options in OTHERS.items():
        wanted = int(name == "not-finite")
        yield f"train {name} simulated", Case("train", options, wanted=wanted)
        if name in OTHER_PROCESSES:
            yield f"train {name} processes", Case("train", options, ranks=2, fast=False)
    for name, options in ON_PROCESSES.items():
        yield f"train {name} processes", Case("train", options, ranks=2, fast=False)
    yield "train launched", Case("launch", "--mesh dp=2 --nproc 2 --max-restarts 1")
    for name, options in RESUMED.items():
        first, _, then = options.partition(";")
        yield f"cross {name}", Case("resume", first, then, cross=True, fast=name in FAST)
        if name in FAST:
            yield f"resume {name}", Case("resume", first, then, fast=name == "to-pp")
    then = "--mesh fsdp=2 --zero 0"
    yield "cross processes", Case("resume", LAYOUTS["zero-1"], then, ranks=2, cross=True)
    for name in TRACED:
        yield f"trace {name}", Case("trace", LAYOUTS[name])
    yield "trace remat", Case("trace", "--remat full")
    for name in COUNTED:
        yield f"calls {name}", Case("calls", LAYOUTS[name])
    yield "start", Case("start")
    for name in COMPILED:
        fast = name in ("dp-tp", "pp")
        yield (
            f"train {name} simulated compiled",
            Case("train", f"{LAYOUTS[name]} --compile", fast=fast),
        )
    for name in COMPILED_PROCESSES:
        options = f"{LAYOUTS[name]} --compile"
        yield f"train {name} processes compiled", Case("train", options, ranks=2, fast=False)
