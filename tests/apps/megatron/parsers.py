"""Damaged files of Megatron-LM for `tests.parsers`: checkpoints, launch lines and logs."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp

from functron.apps.megatron import migrate, tensors
from functron.apps.megatron.checkpoint_files import COMMON, METADATA, open_checkpoint, read_pickle
from functron.apps.megatron.launches import read_log
from tests.parsers import Target, given, put

_LAUNCH = b"""#!/bin/bash
#SBATCH --nodes=2
NODES=${SLURM_NNODES:-"2"}; W=$(( $NODES*8 ))
A=(--num-layers 2 --hidden-size 64 # c
  --num-attention-heads 4 "--seq-length 16" --max-position-embeddings 16)
export A+=(--bf16) B="--moe-layer-freq ([0]*1+[1]*1) --num-experts 4"
C="--lr ${RATE:-3e-4} --min-lr 1e-5"
cd "$PWD" && torchrun --nproc_per_node=8 --nnodes $NODES pretrain_gpt.py ${A[@]} $B $C \\
  --micro-batch-size 1 --global-batch-size 16 --train-iters 9 --vocab-size 99 --mock-data 2>&1 | tee x
"""
_BRIDGE = b"""model: {_target_: a.GPTModelProvider, num_layers: 2, hidden_size: 64, num_attention_heads: 4,
  activation_func: {_target_: torch.nn.functional.silu}, gated_linear_unit: true, vocab_size: 99,
  seq_length: 16, max_position_embeddings: 16, normalization: RMSNorm, window_size: [7, 0]}
train: {train_iters: 9, global_batch_size: 16, micro_batch_size: 1, rampup_batch_size: [4, 4, 16]}
optimizer: {lr: 3.0e-4, min_lr: 1e-5, betas: [0.9, 0.95]}
mixed_precision: bf16_mixed
"""


def _migrate(name: str) -> Callable[[Path, bytes], object]:
    return lambda folder, data: str(migrate(put(folder, name, data)))


_MEGATRON_LOG = b"""  seq_length ...................................... 16
 iteration       10/      40 | consumed samples: 40 | elapsed time per iteration (ms): 500.0 | \
learning rate: 1.0E-03 | global batch size:     4 | lm loss: 5.5E+00 | grad norm: 1.250 |
 validation loss at iteration 10 | lm loss value: 4.25E+00 | lm loss PPL: 7.0E+01 |
"""


def _read_log(folder: Path, data: bytes) -> object:
    return read_log(put(folder, "x.log", data))


def _megatron_seeds(folder: Path) -> list[bytes]:
    """The metadata of a `torch_dist` checkpoint that torch.distributed.checkpoint has written."""
    out, x = torch.arange(8.0).view(4, 2), torch.arange(10.0, 16.0).view(2, 3)
    tensors = {"output_layer.weight": out, "decoder.layers.mlp.x": x}
    bucket = torch.zeros(195)  # two ranks' rows, and two layers
    for at, part in enumerate((*out.flatten().split(4), *x)):
        bucket[64 * at : 64 * at + len(part)] = part
    tensors |= {
        f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.{key}": bucket
        for key in ("param", "exp_avg", "exp_avg_sq")
    }
    made = folder / "megatron"
    dcp.save(tensors, checkpoint_id=str(made), no_dist=True)
    args = {"tensor_model_parallel_size": 2, "swiglu": True}
    torch.save({"iteration": 1, "args": args}, made / COMMON)
    return [(made / METADATA).read_bytes()]


def _read_megatron(folder: Path, data: bytes) -> None:
    put(folder / "megatron", METADATA, data)
    opened = open_checkpoint(folder / "megatron")
    for name, (shape, _) in opened.weights.shapes().items():
        opened.weights.read(name, [slice(0, size) for size in shape])
    tensors.read_state(opened)


def _pickle_seeds(folder: Path) -> list[bytes]:
    del folder
    made = io.BytesIO()
    torch.save({"args": argparse.Namespace(lr=0.1), "w": torch.ones(3, 2)}, made)
    return [made.getvalue()]


def _read_pickle(folder: Path, data: bytes) -> None:
    read_pickle(put(folder, "x.pt", data), 0, len(data))


TARGETS: dict[str, Target] = {
    "megatron metadata": Target(_megatron_seeds, _read_megatron),
    "megatron pickle": Target(_pickle_seeds, _read_pickle),
    "launch line": Target(given(_LAUNCH), _migrate("x.sh")),
    "launch yaml": Target(given(_BRIDGE), _migrate("x.yaml")),
    "megatron log": Target(given(_MEGATRON_LOG), _read_log),
}

FOUND: dict[str, list[bytes]] = {
    "launch line": [
        b"A=(x y)\n" + b'A+=("${A[@]}" "${A[@]}")\n' * 60 + b"python a.py --bf16 ${A[@]}",
        b"A=xxxxx\n" + b"A=$A$A\n" * 60 + b"python a.py --bf16 $A",
        b"f() { f; f; f; f; f; f; f; f; }\nf\npython a.py --bf16",
        b"A=$(( " + b"9**" * 5000 + b"9 ))\npython a.py --num-layers $A",
    ],
    "launch yaml": [
        b"a: &a [x,x,x,x,x,x]\n"
        + b"".join(
            b"%c: &%c [%s*%c]\n" % (c, c, b"*%c, " % (c - 1) * 9, c - 1) for c in range(98, 110)
        ),
        b"a: &a [*a]\n",
    ],
}
