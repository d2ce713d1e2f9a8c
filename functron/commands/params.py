"""``functron params``: what a model's parameters are, and how a mesh splits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from functron import launch, staging, tree
from functron.commands.run_options import parse_run
from functron.config import TrainConfig
from functron.params import num_params, param_specs
from functron.spmd import Mesh
from functron.spmd.spec import local_shape


@dataclass(frozen=True)
class ParamsOptions:
    """Show the parameters of a model, and how a mesh splits them. No memory is needed for them.

    Attributes:
        run: a run folder, or a file like its config.toml, whose options the others override; none:
            a preset, by --model.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[RUN]")]] = ""
    options: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def run(arguments: Sequence[str]) -> int:
    """Print the table."""
    with launch.mistakes():
        config: TrainConfig = parse_run(ParamsOptions, arguments, "params").options
        print(parameter_table(config, Mesh.parse(config.mesh)))
    return 0


def parameter_table(config: TrainConfig, mesh: Mesh) -> str:
    """The parameters of a run, with those of LoRA, and their shards on `mesh`, as text.

    Raises:
        ValueError: it cannot run on the mesh.
    """
    defs = staging.defs_of(config)
    specs = param_specs(defs, staging.rules_of(config, mesh))
    rows = [("path", "shape", "logical axes", "spec", "local shape", "parameters", "bytes")]
    total_bytes = local_bytes = 0
    for path, d, spec in zip(tree.paths(defs), tree.leaves(defs), tree.leaves(specs), strict=True):
        count, local = math.prod(d.shape), local_shape(d.shape, spec, mesh)
        total_bytes += count * d.dtype.itemsize
        local_bytes += math.prod(local) * d.dtype.itemsize
        axes = " ".join(name or "-" for name in d.axes)
        size = f"{count * d.dtype.itemsize:,}"
        rows.append((path, str(d.shape), axes, str(spec), str(local), f"{count:,}", size))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:5], widths[:5], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(row[5:], widths[5:], strict=True)]
        lines.append("  ".join(cells))
    total = f"{num_params(defs):,} parameters, {total_bytes:,} bytes"
    return "\n".join([*lines, "", f"{total}; {local_bytes:,} bytes per rank"])
