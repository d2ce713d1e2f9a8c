"""The layers of a module as it is: stages of pipelines, gathers and compiled regions one by one.

The partitioned loss of a module is cut at the layers of its list, by
`functron.partitioning.cut_layers`. A stage of a pipeline runs some of the sections; what crosses to
the next is whatever later layers read of earlier ones, so that layers may differ, and hand on more
than one value. Parameters that data axes split are gathered for each section as it runs. In a
program that is traced, each layer is a scan of one iteration: compilers see it by itself, and
compile those that are alike once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from functron.core import tree
from functron.core.typing import Tensor
from functron.pipeline import Part
from functron.program.recorder import active, aside
from functron.spmd.spec import is_spec
from functron.transforms import Gather, scan

if TYPE_CHECKING:  # whoever lists the families needs no tracer
    from functron.partitioning import LocalSections

Uses = Mapping[str, frozenset[str | int]]
"""Which stages use each entry of parameters, by its path; see `functron.pipeline.Partition`."""


def describe_values(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Values of these shapes that take no memory."""
    with aside():
        one = torch.zeros((), dtype=dtype, device=device)
        return {name: one.expand(tuple(shape)) for name, shape in shapes.items()}


def describe_inputs(
    inputs: Sequence[tuple[str, torch.dtype, int]], sizes: tuple[int, int], device: str
) -> dict[str, Tensor]:
    """Inputs of a batch that take no memory.

    Args:
        inputs: of each the name, dtype and number of dims: a key has two numbers, others begin with
            the dims of the batch.
        sizes: rows and tokens of the batch.
    """
    with aside():
        return {
            name: torch.zeros((), dtype=dtype, device=device).expand(
                (2,) if name == "key" else sizes[:ndim]
            )
            for name, dtype, ndim in inputs
        }


def find_uses(cut: LocalSections, names: Collection[str]) -> Uses:
    """Which stages use each entry of the parameters of these names, as few entries as will do.

    Parameters that nothing reads are the first stage's.
    """
    last = cut.num_layers + 1
    found: dict[str, set[str | int]] = {name: set() for name in names}
    for at, paths in enumerate(cut.params):
        for path in paths:
            use = "E" if at == 0 else "L" if at == last else at - 1
            found[path.partition("/")[2]].add(use)
    nested: dict[str, Any] = {}
    for name, use in found.items():
        tree.put_leaf(nested, name.replace(".", "/"), frozenset(use or {"E"}))
    return dict(_join_entries(nested, ""))


def _join_entries(nested: Mapping[str, Any], above: str) -> list[tuple[str, frozenset]]:
    rows: list[tuple[str, frozenset]] = []
    for key, part in nested.items():
        path = f"{above}{key}"
        if isinstance(part, frozenset):
            rows.append((path, part))
            continue
        inner = _join_entries(part, f"{path}/")
        uses = {use for _, use in inner}
        rows += [(path, uses.pop())] if len(uses) == 1 else inner
    return rows


def find_sections(part: Part, num_layers: int) -> range:
    """The sections that a stage runs."""
    start = 0 if part.embed else part.layers.start + 1
    return range(start, num_layers + 2 if part.loss else part.layers.stop + 1)


def run_sections(
    cut: LocalSections,
    sections: range,
    params: tree.Tree,
    data: Mapping[str, Tensor],
    entering: Sequence[Tensor],
    gather: Gather,
) -> list[Tensor]:
    """The values that some sections pass on; after the last one, the results.

    Args:
        params: of these sections, or more, as nested dicts.
        data: the arguments that are data, by path.
        entering: what the section before passed on.
        gather: with the specs of all parameters.

    Collectives: of `gather`, for each section, and those of the sections.

    Raises:
        ValueError: a section reads a parameter that is not given.
    """
    values, x = cut.prepare(sections, data), [*entering]
    specs = gather.specs if is_spec(gather.specs) else dict(tree.items(gather.specs, is_spec))
    given = {path.replace("/", "."): (path, value) for path, value in tree.items(params)}
    for at in sections:
        names = [path.partition("/")[2] for path in cut.params[at]]
        missing = [name for name in names if name not in given]
        if missing:
            raise ValueError(
                f"a stage of a pipeline: got no {', '.join(missing)}, which it reads in this "
                "batch; wanted the parameters that a short batch reads in it; fix: run the module "
                "without pp"
            )
        rows = {f"0/{name}": given[name][1] for name in names}
        own = specs if is_spec(specs) else {f"0/{name}": specs[given[name][0]] for name in names}

        def section(rows, x, at=at, own=own):
            block = replace(gather, specs=own).around(lambda rows, x: cut.run(at, rows, values, x))
            return block(rows, x)

        layer = 0 < at <= cut.num_layers
        x = (_run_alone if layer and active() is not None else _run_here)(section, rows, x)
    return x


def _run_here(section, rows, x):
    return section(rows, x)


def _run_alone(section, rows: Mapping[str, Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """A section as a scan of one iteration."""

    def layer(carry, row):
        return carry, section(*row)

    leading = tree.map(lambda leaf: leaf.unsqueeze(0), (dict(rows), [*x]))
    _, results = scan(layer, (), leading, 1)
    return [each.squeeze(0) for each in results]
