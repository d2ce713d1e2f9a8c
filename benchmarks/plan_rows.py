"""Published runs of several libraries, as rows that a plan's estimate is compared with.

Which rows may be fitted was decided before any was: of each group in alphabetical order, by name,
the first and every third after it (`FIT_EVERY`). All others are held out: nothing is fitted to
them. Of those that may be, rows whose configuration is guessed are left out of the fit: that was
decided later, since one (405B of torchtitan) moved its software's pace by 15% away from the others
that may be fitted. Paces are fitted to dense models on machines that runs of Megatron-LM have
calibrated (`plan.py`), and Blackwell's efficiency to the two of its rows that may be fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from functron.apps.planner import Hardware, Software, hardware
from functron.apps.planner import software as library
from functron.models.config import GPTConfig
from functron.spmd import DATA_AXES, Mesh
from functron.training.config import configure, with_precision
from functron.training.rooms import MARGIN
from functron.training.setup import RunSetup, make_setup

FIT_EVERY = 3


@dataclass(frozen=True)
class Published:
    """A published run, as a configuration of functron.

    Attributes:
        name: of the model and the run, unique in its group.
        group: of runs that are compared together.
        source: where it was published.
        software: that ran it.
        machine: the hardware's name.
        model: a preset, or an architecture.
        mesh: axes and sizes.
        precision: the policy that is closest.
        seq, batch, rows: tokens of a sample, samples of a step and of a microbatch.
        seconds: of a step, as published, or from published tokens or FLOP/s.
        chunks: stages of each rank under the interleaved schedule; 0: 1F1B.
        remat: what is computed again.
        more: further settings.
        guessed: what the source does not say.
    """

    name: str
    group: str
    source: str
    software: Software
    machine: str
    model: str | GPTConfig
    mesh: str
    precision: str
    seq: int
    batch: int
    rows: int
    seconds: float
    chunks: int = 0
    remat: str = "none"
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    guessed: str = ""

    @property
    def hardware(self) -> Hardware:
        """The machine, with what its source says of it."""
        return MACHINES[self.machine]()

    @property
    def run(self) -> RunSetup:
        """The run as functron configures it."""
        mesh = Mesh.parse(self.mesh)
        data = math.prod(mesh[axis] for axis in DATA_AXES)
        model = {"model": self.model} if isinstance(self.model, str) else {"gpt": self.model}
        divided = mesh["dp"] * mesh["ep_node"] * mesh["ep"] * mesh["cp"] > 1 and mesh["fsdp"] == 1
        given = {
            "mesh": self.mesh, "seq": self.seq, "global_batch": self.batch, "remat": self.remat,
            "microbatches": self.batch // (data * self.rows), "chunks": self.chunks,
            "schedule": "interleaved" if self.chunks else "1f1b", "zero": int(divided),
            "sequence_parallel": mesh["tp"] > 1, "compile": True,
        }  # fmt: skip
        config = configure(**model)
        if self.seq > config.gpt.max_seq:
            given["gpt__max_seq"] = self.seq
        if config.gpt.moe is not None:
            given["expert_room"] = 1.25
        config = configure(config, **{**given, **self.more})
        return make_setup(with_precision(config, self.precision), mesh)


def _titan_h100() -> Hardware:
    """torchtitan's H100s: 500 W and 2.4 TB/s (benchmarks/llama3_h100_202412_torchtitan.md)."""
    found = change(hardware("h100"), "memory.bytes_per_second", 2.4e12)
    clock = (500 / 700) ** (1 / 3)  # power grows with its third power
    found = change(found, "matmul.efficiency", found.matmul.efficiency * clock)
    rates = {k: x * clock if k.endswith("ward") else x for k, x in found.attention.items()}
    return replace(found, attention=rates)


def _jean_zay() -> Hardware:
    """Jean Zay's nodes: four adapters of 100 Gb/s (Omni-Path) for eight A100."""
    return change(hardware("a100"), "network.bytes_per_second", 6.25e9)


def _h800() -> Hardware:
    """DeepSeek's H800s: NVLink of 400 GB/s in both directions, or 160 GB/s reached (DeepEP)."""
    return change(hardware("h100"), "domain.bytes_per_second", 2e11)


MACHINES: Mapping[str, Any] = {
    **{
        name: lambda name=name: hardware(name) for name in ("a100", "h100", "h200", "b200", "gb200")
    },
    "h100 of torchtitan": _titan_h100,
    "h800": _h800,
    "a100 of Jean Zay": _jean_zay,
}


def change(machine: Hardware, path: str, value: float) -> Hardware:
    """The machine with another value of an entry."""
    name, _, rest = path.partition(".")
    made = change(getattr(machine, name), rest, value) if rest else value
    return replace(machine, **{name: made})


def _mpt(layers: int, hidden: int, heads: int, seq: int) -> GPTConfig:
    """llm-foundry's MPT: no biases, GELU, tied embeddings of 50,368, learned positions."""
    return GPTConfig(
        vocab_size=50368, num_layers=layers, embed_dim=hidden, num_heads=heads, mlp_dim=4 * hidden,
        max_seq=seq, norm="layer", activation="gelu", gated=False, bias=False, positions="learned",
        tied=True, vocab_multiple=128, fused_projections=True,
    )  # fmt: skip


_MPT = {
    "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40),
    "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip


def _llm_foundry() -> list[Published]:
    """llm-foundry, scripts/train/benchmarking/README.md: FSDP, FlashAttention-2."""
    # size, seq, GPUs, machine, batch, rows, remat, seconds
    found = [
        ("30b", 2048, 8, "h100", 504, 3, "full", 64.4476),
        ("1b", 2048, 8, "h100", 112, 14, "none", 0.6308),
        ("7b", 2048, 8, "h100", 48, 6, "none", 1.1546),
        ("70b", 2048, 64, "h100", 2048, 8, "full", 63.076),
        ("13b", 2048, 8, "h100", 16, 2, "none", 0.8548),
        ("30b", 2048, 32, "h100", 1344, 14, "full", 37.2686),
        ("3b", 2048, 64, "h100", 1152, 6, "none", 1.6366),
        ("13b", 2048, 8, "a100", 48, 2, "none", 5.4324),
        ("7b", 8192, 8, "a100", 128, 8, "full", 40.8833),
        ("30b", 2048, 8, "a100", 504, 3, "full", 140.8559),
        ("3b", 2048, 8, "a100", 160, 10, "none", 3.7887),
        ("1b", 2048, 8, "a100", 448, 14, "none", 5.591),
    ]
    return [
        Published(
            f"MPT-{size} {seq} {gpus} {machine}", "FSDP of llm-foundry",
            "llm-foundry, scripts/train/benchmarking/README.md", library.LLM_FOUNDRY, machine,
            _mpt(*_MPT[size], seq), f"fsdp={gpus}", "bf16", seq, batch, rows, seconds, remat=remat,
        )
        for size, seq, gpus, machine, batch, rows, remat, seconds in found
    ]  # fmt: skip


def _torchtitan() -> list[Published]:
    """torchtitan, benchmarks/llama3_h100_202412 and llama3-8b_h200_202506."""
    # name, model, mesh, machine, precision, seq, batch, rows, remat, seconds
    titan, long = "h100 of torchtitan", "long context"
    found = [
        ("8B 128", "llama3-8b", "fsdp=128", titan, "bf16", 8192, 256, 2, "dots", 2.5152),
        ("8B 128 FP8", "llama3-8b", "fsdp=128", titan, "fp8-tensor", 8192, 256, 2, "dots", 1.9551),
        ("8B 8 FP8", "llama3-8b", "fsdp=8", titan, "fp8-tensor", 8192, 16, 2, "dots", 1.9203),
        ("8B 32 H200 FP8", "llama3-8b", "fsdp=32", "h200", "fp8-tensor", 8192, 64, 2, "dots",
         1.4979),
        ("70B 256 FP8", "llama3-70b", "fsdp=32,tp=8", titan, "fp8-tensor", 8192, 512, 16, "full",
         19.7636),
        ("405B 512 FP8", "llama3-405b", "pp=8,fsdp=8,tp=8", titan, "fp8-tensor", 8192, 256, 1,
         "full", 40.96),
        ("8B 32k FP8", "llama3-8b", "fsdp=8", titan, "fp8-tensor", 32768, 8, 1, "full", 8.4237),
        ("8B 64k FP8", "llama3-8b", "fsdp=4,cp=2", titan, "fp8-tensor", 65536, 4, 1, "full",
         12.9008),
        ("8B 128k FP8", "llama3-8b", "fsdp=2,cp=4", titan, "fp8-tensor", 131072, 2, 1, "full",
         30.5957),
    ]  # fmt: skip
    return [
        Published(
            name, long if seq > 16384 else "torchtitan",
            "torchtitan, benchmarks", library.TORCHTITAN, machine, model, mesh, precision,
            seq, batch, rows, seconds, remat=remat,
            guessed="microbatches of the pipeline" if "pp" in mesh else "",
            more={"gather": "step"} if "pp" in mesh else {},  # torchtitan's default for pipelines
        )
        for name, model, mesh, machine, precision, seq, batch, rows, remat, seconds in found
    ]  # fmt: skip


_NEW_NEMO = "NeMo 25.02, performance summary"
_BRIDGE = "Megatron-Bridge 25.11, performance summary"


def _llama2(layers: int, hidden: int, heads: int, mlp: int, kv: int = 0) -> GPTConfig:
    return GPTConfig(
        vocab_size=32000, num_layers=layers, embed_dim=hidden, num_heads=heads,
        num_kv_heads=kv or heads, mlp_dim=mlp, max_seq=4096, vocab_multiple=128,
    )  # fmt: skip


def _squared(layers: int, hidden: int, heads: int, mlp: int, kv: int, vocab: int) -> GPTConfig:
    """Nemotron-4: squared ReLU, no biases, untied."""
    return GPTConfig(
        vocab_size=vocab, num_layers=layers, embed_dim=hidden, num_heads=heads, num_kv_heads=kv,
        mlp_dim=mlp, max_seq=4096, norm="layer", activation="relu2", gated=False,
        vocab_multiple=1024,
    )  # fmt: skip


_NEMOTRON = _squared(96, 18432, 96, 73728, 8, 256000)


def _nemo() -> list[Published]:
    """NeMo's performance summaries of 24.07 (H100) and 25.02 (B200, GB200), and Bridge's 25.11."""
    old, new, bridge = "NeMo 24.07, performance summary", _NEW_NEMO, _BRIDGE
    gpt5 = GPTConfig(
        vocab_size=51200, num_layers=24, embed_dim=4096, num_heads=32, mlp_dim=16384, max_seq=2048,
        norm="layer", activation="gelu", gated=False, bias=True, positions="learned", tied=True,
    )  # fmt: skip
    small = _squared(32, 6144, 48, 24576, 8, 256000)
    # name, source, machine, model, mesh, seq, batch, rows, chunks, seconds, guessed
    found = [
        ("Llama2-7B 8", old, "h100", _llama2(32, 4096, 32, 11008), "dp=8", 4096, 128, 1, 0,
         3.8901, ""),
        ("Llama2-13B 16", old, "h100", _llama2(40, 5120, 40, 13824), "pp=4,dp=4", 4096, 128, 1, 10,
         3.79, ""),
        ("Llama2-70B 64", old, "h100", _llama2(80, 8192, 64, 28672, 8), "pp=4,dp=4,tp=4", 4096,
         128, 1, 20, 4.7991, ""),
        ("Llama3-8B 8", old, "h100", "llama3-8b", "dp=4,cp=2", 8192, 128, 1, 0, 10.89, ""),
        ("Nemotron-340B 128", old, "h100", _NEMOTRON, "pp=8,dp=2,tp=8", 4096, 32, 1, 12, 3.1801,
         ""),
        ("GPT3-5B 64", old, "h100", gpt5, "dp=64", 2048, 2048, 4, 0, 2.91, "the architecture"),
        ("Llama3-8B 8 FSDP", bridge, "h100", "llama3-8b", "fsdp=8", 8192, 128, 1, 0, 9.0701, ""),
        ("Llama3-70B 64 B200", new, "b200", "llama3-70b", "pp=4,dp=4,cp=2,tp=2", 8192, 128, 1, 5,
         5.3508, ""),
        ("Llama3-70B 64 GB200", new, "gb200", "llama3-70b", "fsdp=64", 8192, 128, 1, 0, 4.0605,
         ""),
        ("Nemotron-15B 64 B200", new, "b200", small, "dp=64", 4096, 256, 2, 0, 1.11, ""),
        ("Nemotron-340B 128 GB200", new, "gb200", _NEMOTRON, "pp=4,dp=4,tp=8", 4096, 32, 1, 12,
         1.3894, ""),
        ("Llama3-8B 8 B200", new, "b200", "llama3-8b", "dp=8", 8192, 128, 2, 0, 5.0401, ""),
    ]  # fmt: skip
    return [
        Published(
            name, "NeMo FP8, H100" if machine == "h100" else "NeMo FP8, Blackwell", source,
            library.NEMO, machine, model, mesh, "fp8-tensor", seq, batch, rows, seconds,
            chunks=chunks, guessed=guessed,
        )
        for name, source, machine, model, mesh, seq, batch, rows, chunks, seconds, guessed in found
    ]  # fmt: skip


_LIGHT_ENDS = "E|(t|)*126L"
"""Llama 3, section 3.3.2: the first stage has the embedding alone, and the last one the loss."""


def _megatron() -> list[Published]:
    """Megatron-LM in bf16: Nemotron-4 340B's report, Llama 3's, and Megatron-Bridge's Qwen3."""
    nemotron, group = "Nemotron-4 340B report, table 2", "Megatron-like bf16"
    # name, source, model, mesh, seq, batch, chunks, seconds
    found = [
        ("340B 1536", nemotron, _NEMOTRON, "pp=12,dp=16,tp=8", 4096, 768, 8, 10.3),
        ("340B 3072", nemotron, _NEMOTRON, "pp=12,dp=32,tp=8", 4096, 1536, 8, 10.3),
        ("405B 16384", "Llama 3, table 4", "llama3-405b", "pp=16,dp=128,tp=8", 8192, 2048, 8,
         6.4614),
        ("Qwen3-8B 16", _BRIDGE, "qwen3-8b", "dp=16", 4096, 1024, 0, 25.0712),
    ]  # fmt: skip
    return [
        Published(
            name, group, source, library.NEMO if source == _BRIDGE else library.MEGATRON_2024,
            "h100", model, mesh, "bf16", seq, batch, 1,
            seconds, chunks=chunks, more={"layout": _LIGHT_ENDS} if "405B" in name else {},
        )
        for name, source, model, mesh, seq, batch, chunks, seconds in found
    ]  # fmt: skip


def _old() -> list[Published]:
    """Runs on A100 of 2021 to 2023."""
    group, gpt3 = "A100 of 2021 to 2023", "gpt3-175b"
    bloom = GPTConfig(
        vocab_size=250880, num_layers=70, embed_dim=14336, num_heads=112, mlp_dim=57344,
        max_seq=2048, norm="layer", activation="gelu", gated=False, bias=True, positions="learned",
        tied=True, vocab_multiple=512,
    )  # fmt: skip
    turing = GPTConfig(
        vocab_size=51200, num_layers=105, embed_dim=20480, num_heads=128, mlp_dim=81920,
        max_seq=2048, norm="layer", activation="gelu", gated=False, bias=True, positions="learned",
        tied=True, vocab_multiple=1024,
    )  # fmt: skip
    llama = _llama2(80, 8192, 64, 22016)
    deepspeed, guess = library.DEEPSPEED, "the mesh"
    metaseq = replace(library.LLM_FOUNDRY, name="metaseq", spread=0.0)  # FSDP without a compiler
    # name, source, software, machine, model, mesh, batch, rows, remat, seconds, guessed
    found = [
        ("BLOOM-176B 384", "BLOOM, Scao et al. 2022", deepspeed, "a100 of Jean Zay", bloom,
         "pp=12,dp=8,tp=4", 2048, 2, "full", 105.0, ""),
        ("MT-NLG-530B 2800", "Smith et al. 2022, section 2.3", deepspeed, "a100", turing,
         "pp=35,dp=10,tp=8", 1920, 1, "full", 50.2, ""),
        ("MT-NLG-530B 3360", "Smith et al. 2022, section 2.3", deepspeed, "a100", turing,
         "pp=35,dp=12,tp=8", 1920, 1, "full", 44.4, ""),
        ("OPT-175B 992", "Zhang et al. 2022", metaseq, "a100", gpt3, "dp=31,fsdp=4,tp=8", 992, 8,
         "full", 19.9775, "fsdp: 124 ranks, of which 4 are taken here"),
        ("LLaMA-65B 2048", "Touvron et al. 2023", library.MEGATRON_2024, "a100", llama,
         "dp=256,tp=8", 2048, 2, "none", 5.3895, guess),
    ]  # fmt: skip
    return [
        Published(
            name, group, source, software, machine, model, mesh, "bf16", 2048, batch, rows,
            seconds, remat=remat, guessed=guessed,
        )
        for name, source, software, machine, model, mesh, batch, rows, remat, seconds, guessed
        in found
    ]  # fmt: skip


def _experts() -> list[Published]:
    """Mixtures of experts. Benchmarks of NeMo, Bridge and Megatron-LM force routing to be even."""
    nemo, qwen = library.NEMO, "qwen3-30b-a3b"
    source, even = _BRIDGE, {"expert_room": MARGIN}  # the fullest rank has the balanced rows
    deep = {"schedule": "dualpipe-half", "expert_axes": "ep_node,ep"}  # to four nodes at most
    deep |= {"gpt__moe__dispatch": "two-hop"}
    # name, source, software, machine, model, mesh, precision, batch, rows, chunks, seconds, more
    found = [
        ("Qwen3-30B 16 FP8", source, nemo, "h100", qwen, "pp=2,ep=8", "fp8-tensor", 512, 2, 24,
         24.8478, even, ""),
        ("GPT-OSS-120B 64", source, nemo, "h100", "gpt-oss-120b", "pp=4,dp=2,ep=8", "bf16", 512,
         4, 0, 5.8202, even, ""),
        ("Qwen3-30B 16", source, nemo, "h100", qwen, "dp=2,ep=8", "bf16", 512, 1, 0, 10.0739, even,
         "the mesh"),
        ("Mixtral-8x22B 128", "arXiv 2504.14960", nemo, "h100", "mixtral-8x22b",
         "pp=8,dp=2,ep=4,tp=2", "bf16", 256, 1, 7, 4.2113, even | {"expert_axes": "ep,tp"},
         "MFU counts whole attention"),
        ("Mixtral-8x7B 64 GB200", _NEW_NEMO, nemo, "gb200", "mixtral-8x7b",
         "dp=8,ep=8", "fp8-tensor", 256, 2, 0, 0.85, even, ""),
        ("DeepSeek-V3 2048", "DeepSeek-V3 report", library.DEEPSEEK, "h800", "deepseek-v3",
         "pp=16,dp=2,ep_node=8,ep=8", "fp8-block", 15360, 1, 0, 19.9066, deep, ""),
    ]  # fmt: skip
    return [
        Published(
            name, "mixtures of experts", source, software, machine, model, mesh, precision, 4096,
            batch, rows, seconds, chunks=chunks, more=more, guessed=guessed,
        )
        for (name, source, software, machine, model, mesh, precision, batch, rows, chunks, seconds,
             more, guessed) in found
    ]  # fmt: skip


PUBLISHED: tuple[Published, ...] = tuple(
    sorted(
        (*_llm_foundry(), *_torchtitan(), *_nemo(), *_megatron(), *_old(), *_experts()),
        key=lambda row: (row.group, row.name),
    )
)
"""All rows, by group and name."""


def is_fitted(row: Published) -> bool:
    """Whether the row may be fitted to: the first of its group and every third after it."""
    same = [one for one in PUBLISHED if one.group == row.group]
    return same.index(row) % FIT_EVERY == 0
