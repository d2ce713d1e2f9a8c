"""How programs are run: fusion, overlap and kernels, of functron and of other libraries.

Calibrations of other libraries say what a plan would take in them. `Software.pace` and
`Software.spread` are fitted to the published runs that `benchmarks/plan_rows.py` marks for it; the
other fields are what their documentation says that they do. Where one run is all that there is, the
spread is a guess of 10%.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from functron.apps.planner.machines import Hardware
from functron.core.tables import shows_differences


@shows_differences
@dataclass(frozen=True)
class Software:
    """How programs are run: fusion, overlap and kernels.

    Attributes:
        name: of the software, with its version.
        fusion: ``"compiler"``: as of `functron.apps.planner.rates`; ``"pointwise"``: reductions,
            norms and their gradients are separate kernels, but softmax is fused with its input;
            ``"none"``: every equation is a kernel.
        sums_in_products: products of weight gradients accumulate into their sums.
        overlap: a layer's collectives overlap with independent computation.
        sequence_parts: as of `functron.jit`.
        overlap_grads: reductions of gradients overlap with the last backward.
        overlap_params: gathers of updated parameters overlap with the next forward.
        async_sends: pipeline stages compute while they send.
        scatter_sends: stages send each tensor-parallel rank's part, which is then gathered.
        copies: gathers and scatters of sequences copy into the right layout, and recomputation
            begins with a copy, as in functron; False: the sequence is the first dim in memory, as
            in Megatron-LM.
        graphs: kernels are launched by CUDA graphs.
        attention: kernels of fused attention that the machine has rates of, such as ``"fa2"``;
            empty: its own.
        fused_casts: kernels write quantised values themselves, scaled by the magnitudes of the
            steps before (Transformer Engine's delayed scaling).
        sent_part: of a program in 8 bits what exchanges of experts send, times the program's bytes.
        exchange_part: of the network's bandwidth what exchanges of experts reach; 0: as other
            collectives of the machine.
        pace: the rate of matrix products and attention, times that of the machine's calibration.
        spread: standard deviation of log(measured / predicted) over published runs of it; 0: it is
            the software of the machine's calibration, or none is known.
    """

    name: str = "functron"
    fusion: Literal["compiler", "pointwise", "none"] = "compiler"
    sums_in_products: bool = True
    overlap: bool = True
    sequence_parts: int = 1
    overlap_grads: bool = True
    overlap_params: bool = True
    async_sends: bool = True
    scatter_sends: bool = False
    copies: bool = True
    graphs: bool = False
    attention: str = ""
    fused_casts: bool = False
    sent_part: float = 1.0
    exchange_part: float = 0.0
    pace: float = 1.0
    spread: float = 0.0

    def on(self, hardware: Hardware) -> Software:
        """As it runs on a machine: without overlap on CPUs."""
        if not hardware.host.computes:
            return self
        return replace(self, overlap=False, overlap_grads=False, overlap_params=False)

    def adjust(self, hardware: Hardware) -> Hardware:
        """The machine with the rates that the software's kernels reach."""
        network = hardware.network
        if self.exchange_part:
            rate = {"bytes_per_second": network.bytes_per_second * self.exchange_part}
            rate["latency_seconds"] = network.latency_seconds
            known = MappingProxyType({**network.measured, "all_to_all": rate})
            hardware = replace(hardware, network=replace(network, measured=known))
        if self.pace == 1 and not self.attention:
            return hardware
        matmul, rates, prefix = hardware.matmul, dict(hardware.attention), f"{self.attention}_"
        if self.attention:
            own = {name: rate for name, rate in rates.items() if name.startswith(prefix)}
            rates |= {name.removeprefix(prefix): rate for name, rate in own.items()}
        for phase in ("forward", "backward"):
            rates[phase] = min(1.0, rates[phase] * self.pace)
        matmul = replace(matmul, efficiency=min(1.0, matmul.efficiency * self.pace))
        return replace(hardware, matmul=matmul, attention=MappingProxyType(rates))


FUNCTRON = Software()
"""Functron with compiled steps."""
UNCOMPILED = replace(
    FUNCTRON, name="functron uncompiled", fusion="none", sums_in_products=False,
    overlap=False, overlap_grads=False, overlap_params=False,
)  # fmt: skip
"""Functron where steps are not compiled: nothing is fused, and what is sent is waited for."""

MEGATRON_2021 = Software(
    "Megatron-LM of 2021", fusion="pointwise", sums_in_products=False, overlap=False,
    overlap_grads=False, overlap_params=False, async_sends=False, scatter_sends=True, copies=False,
)  # fmt: skip
"""Narayanan et al. 2021: collectives and sends are waited for; stages send parts (section 4.1)."""
MEGATRON_2022 = replace(
    MEGATRON_2021, name="Megatron-LM of 2022", sums_in_products=True, overlap=True
)
"""Korthikanti et al. 2022: backward computes while it communicates over tp (section 4.2.2)."""
MEGATRON_2024 = Software("Megatron-LM of 2024", fusion="pointwise", sequence_parts=4, copies=False)
"""Megatron-LM's README of 2024: all overlaps, distributed optimizer, Transformer Engine."""
NEMO = replace(
    MEGATRON_2024, name="NeMo and Megatron-Bridge", fusion="compiler", fused_casts=True,
    pace=1.03, spread=0.079,
)  # fmt: skip
"""Megatron-LM with Transformer Engine: norms, SwiGLU and rotations are fused, with casts to FP8."""
TORCHTITAN = Software("torchtitan", sums_in_products=False, attention="fa2", pace=0.908, spread=0.1)
"""FSDP2 with torch.compile by layer, and torch's attention, which is FlashAttention-2."""
LLM_FOUNDRY = replace(TORCHTITAN, name="llm-foundry", fusion="pointwise", pace=0.918, spread=0.055)
"""FSDP without a compiler, and FlashAttention-2."""
DEEPSEEK = Software("DeepSeek's", sent_part=0.758, exchange_part=0.8, spread=0.1)
"""Software that trained DeepSeek-V3: tokens are sent to experts in 8 bits with a float32 for 128
values, 0.516 of bf16's bytes, and come back in bf16 (report, section 3.3.3). Exchanges over 64
ranks reach 46 and 45 GB/s of 50 (DeepEP's README of February 2025), of which one in 8 stays in the
node.
"""
DEEPSPEED = replace(MEGATRON_2021, name="Megatron-DeepSpeed", pace=0.72, spread=0.095)
"""Megatron-LM of 2021 with ZeRO: MT-NLG and BLOOM."""

OTHERS: Mapping[str, Software] = MappingProxyType(
    {each.name: each for each in (MEGATRON_2024, NEMO, TORCHTITAN, LLM_FOUNDRY, DEEPSPEED)}
)
"""Other libraries, by name, that a plan can be estimated for."""
