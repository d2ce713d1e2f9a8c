"""Multiples of learning rates by the widths of matrices, under muP: for each optimizer its own.

What `ParamDef.width` says of a matrix decides: it sums over i times as many inputs, and has o times
as many outputs, as where the learning rate was tuned. What moves by the same share of itself at
every width keeps the rate (1); see `functron.models.mup` for why, and for what has no width here.

| optimizer                     | entries of an update            | multiple                       |
|-------------------------------|---------------------------------|--------------------------------|
| adam, adamw, lion, adam_mini  | about 1, at any width           | 1 / i                          |
| muon, matrices of layers      | of spectral norm s(in, out)     | sqrt(o / i) s(base) / s(here)  |
| muon, all others              | those of AdamW                  | 1 / i                          |

The first is the Adam column of tables 3 and 8 of Yang et al. 2022 (https://arxiv.org/abs/2203.03466);
the signs of Lion are of size 1 as Adam's updates are, and so are Adam-mini's, whose blocks have one
second moment. Muon's is the spectral condition (Yang, Simon and Bernstein 2023,
https://arxiv.org/abs/2310.17813): changes of a matrix whose spectral norm is of order
sqrt(outputs / inputs) change what it makes by as much at every width. With the scale "spectral" an
update of a matrix that grows on both sides has that already (1), and is not scaled again; with
"adamw" it grows as the root of the width (1 / sqrt(i)). SGD, Adafactor and SOAP have no rule here.

Decays, which are times the learning rate, are divided by the same number: lr * decay stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from functron import tree
from functron.errors import Problem
from functron.optim.muon import SCALES, matrices
from functron.optim.settings import OptimizerConfig
from functron.params import Width

RULED = ("adamw", "adam", "lion", "adam_mini", "muon")
"""The optimizers for which there is a rule."""


def width_multiples(config: OptimizerConfig, defs: tree.Tree) -> Mapping[str, float]:
    """By path, what learning rates of parameters are multiplied by, where it is not 1.

    Args:
        config: the optimizer.
        defs: the `ParamDef`s of a whole model: sizes are global.
    """
    whole = matrices(defs) if config.name == "muon" else tree.map(lambda d: False, defs)
    rows = zip(tree.paths(defs), tree.leaves(defs), tree.leaves(whole), strict=True)
    found = {path: _multiple(config, d, matrix) for path, d, matrix in rows}
    return {path: multiple for path, multiple in found.items() if multiple != 1}


def has_widths(defs: tree.Tree) -> bool:
    """Whether some of these parameters are wider than where learning rates were tuned."""
    return any(_width(d) != Width() for d in tree.leaves(defs))


def _width(d: Any) -> Width:
    """Of a `ParamDef`; what is none has no width."""
    return getattr(d, "width", Width())


def _multiple(config: OptimizerConfig, d: Any, matrix: Any) -> float:
    inputs, outputs = _width(d)
    if matrix is False or inputs == 1:
        return 1 / inputs
    scale = SCALES[config.muon.scale]
    here = scale(matrix.outputs, matrix.inputs)
    base = scale(matrix.outputs / outputs, matrix.inputs / inputs)
    return math.sqrt(outputs / inputs) * base / here


def width_problems(config: OptimizerConfig, path: str = "optimizer") -> list[Problem]:
    """Why this optimizer cannot train at another width than it was tuned at; empty where it can."""
    if config.name in RULED:
        return []
    wanted = f"one with a rule for widths, where there is a base width: {', '.join(RULED)}"
    fix = "choose adamw, or leave gpt.mup_base_dim out"
    return [Problem(f"{path}.name", repr(config.name), wanted, fix)]
