"""Writes torchao_quantised.json: what torchao makes of a matrix in each format.

Run by hand where torchao (0.18) is installed beside torch, from the repository's root:
``python tests/ops/torchao_quantised.py``. Tests read the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def hexed(x: torch.Tensor) -> str:
    """The bytes of a tensor."""
    return x.contiguous().view(torch.uint8).numpy().tobytes().hex()


def matrix() -> torch.Tensor:
    """Magnitudes over some orders, zeros, and a block of zeros: bfloat16 [16, 64]."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 64, generator=generator) * torch.randn(16, 64, generator=generator).exp()
    x[0, :32] = 0
    x[3, :16] *= 1e-6
    return x.to(torch.bfloat16)


def main() -> None:
    x = matrix()
    made: dict[str, dict[str, str]] = {"x": {"values": hexed(x)}}
    for name, dtype in FP8.items():
        for blocks, along in (("tensor", None), ("row", -1)):
            amax = tensor_to_amax(x) if along is None else x.abs().amax(along, keepdim=True)
            scale = amax_to_scale(amax, dtype)
            values = to_fp8_saturated(x.float() * scale, dtype)
            made[f"{name}@{blocks}"] = {
                "values": hexed(values),
                "inverse": hexed(scale.reshape(-1)),
            }
    for name, dtype in {**FP8, "e2m1": torch.float4_e2m1fn_x2}.items():
        scales, values = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
        made[f"{name}@1x32"] = {"values": hexed(values), "scales": hexed(scales)}
    whole = per_tensor_amax_to_scale(x.abs().amax().float())
    scales, values = nvfp4_quantize(x, 16, whole)
    nvfp4 = {"values": hexed(values), "scales": hexed(scales), "whole": hexed(whole.reshape(1))}
    made["e2m1@1x16"] = nvfp4
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
