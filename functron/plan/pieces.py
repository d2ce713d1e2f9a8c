"""The pieces that every step of a decoder is made of, each traced once.

A layer of each kind, the embedding, and the head with the loss, as one rank computes them for one
microbatch, forward and backward. Tracing takes tenths of a second and no memory; plans of any
number of layers, pipelines, replicas and microbatches are made of the same few pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from functron.core import random, tree
from functron.models import gpt
from functron.models.config import GPTConfig
from functron.models.options import DEFAULTS, ModelOptions
from functron.pipeline.partition import Part, Partition
from functron.pipeline.work import Call, Stage, trace_stage
from functron.plan.rates import empty_flops
from functron.program.program import Program
from functron.spmd import CONTEXT_AXES, FSDP_AXES, Mesh
from functron.spmd.params import param_specs
from functron.spmd.spec import is_spec, local_shape, spec_axes, whole_over
from functron.transforms import Gather


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a model on one rank, for one microbatch.

    Attributes:
        part: what it computes, of a model that has nothing else.
        joint: forward and backward as one program.
        programs: the same in pieces: F and B, or F, I and W.
        held_bytes: of activations after each of them but the last, its input included.
        sent_bytes: of what it hands on.
        num_params: that this rank holds of it, over the axes of the trace.
        num_expert_params: of these, of experts that data axes divide.
        param_bytes: of all of them.
    """

    part: Part
    joint: Program
    programs: tuple[Program, ...]
    held_bytes: tuple[int, ...]
    sent_bytes: int
    num_params: int
    num_expert_params: int
    param_bytes: int

    @cached_property
    def hardware_flops(self) -> float:
        """Of this rank and one microbatch: what is computed, by torch's formulas, also again.

        Products of experts count by the rows that they get on average, not by those there is room
        for.
        """
        return sum(
            program.cost().hardware_flops - empty_flops(program) for program in self.programs
        )

    @cached_property
    def working_bytes(self) -> int:
        """The most that one microbatch takes besides what is held: what it computes again, too.

        Of the program before it is cut, in which forward keeps for backward no more than it holds.
        """
        found = self.joint.memory()
        return max(0, found.peak_bytes - sum(found.at_rest.values()) - self.held_bytes[0])


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a model; made by `pieces`.

    Attributes:
        config: the architecture.
        options: how it is run.
        mesh: of the trace; only the axes that pieces communicate over, or are split by, matter.
        rows: samples of one rank in one microbatch.
        seq: tokens of a whole sample.
        layers: by kind, which is the name of their stack, ``"blocks"`` or ``"dense"``, and the
            window where those of a stack differ: the piece, and the layers that are like it.
        embed: the embedding.
        head: the final norm, the logits and the loss.
        gather: whether parameters are gathered in the pieces, ``"use"`` or ``"keep"``, or by the
            step.
        split: whether backward is two programs.
    """

    config: GPTConfig
    options: ModelOptions
    mesh: Mesh
    rows: int
    seq: int
    layers: Mapping[str, tuple[Piece, tuple[int, ...]]]
    embed: Piece
    head: Piece
    gather: str
    split: bool

    def of(self, part: Part) -> list[tuple[Piece, int]]:
        """The pieces of a stage, and how often it has each."""
        found = [(self.embed, 1)] if part.embed else []
        for piece, same in self.layers.values():
            count = len({*same} & {*part.layers})
            found += [(piece, count)] if count else []
        return [*found, (self.head, 1)] if part.loss else found


def pieces(
    config: GPTConfig,
    mesh: Mesh,
    options: ModelOptions = DEFAULTS,
    *,
    rows: int,
    seq: int,
    gather: Literal["step", "use", "keep"] = "step",
    fsdp: tuple[str, ...] = ("fsdp",),
    experts: tuple[str, ...] = ("ep",),
    split: bool = False,
    grad_dtype: torch.dtype | None = None,
    ends: Pieces | None = None,
) -> Pieces:
    """Trace the pieces of a model on one rank of `mesh`. Computes nothing.

    Args:
        config: the architecture.
        mesh: the ranks; those of ``pp`` are left out.
        options: how the model is run; its `gather` is made here.
        rows: samples of one rank in one microbatch.
        seq: tokens of a whole sample.
        gather: where parameters that `fsdp` splits are gathered: once per step, before its first
            microbatch; where they are used, again in backward; or there, and kept until then.
        fsdp: the axes that parameters are split over.
        experts: the axes that experts are divided over.
        split: backward as two programs, I and W, for schedules that have these.
        grad_dtype: of the sums of gradients; None: that of the parameters.
        ends: pieces whose embedding and head are taken: those of the same arguments but for what
            backward computes again, which concerns layers alone.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    whole = mesh.without("pp")
    rules = gpt.rules(config, whole, fsdp=fsdp, experts=experts)
    specs = param_specs(gpt.defs(config, options), rules)
    made = Gather() if gather == "step" else Gather(specs, regather=gather == "use")
    tracer = _Tracer(
        config, whole, replace(options, gather=made, experts=experts), rows, seq, rules,
        gather == "step", split, grad_dtype,
    )  # fmt: skip
    layers = {
        name: (tracer.trace(Part(range(1)), one), same)
        for name, (one, same) in _layer_configs(config).items()
    }
    if ends is not None:
        embed, head = ends.embed, ends.head
    else:
        bare = replace(config, num_layers=1, dense_layers=0)
        embed = tracer.trace(Part(range(0), embed=True), bare)
        head = tracer.trace(Part(range(0), loss=True), bare)
    return Pieces(config, tracer.options, whole, rows, seq, layers, embed, head, gather, split)


@dataclass(frozen=True, eq=False)
class _Tracer:
    """Traces parts of a model on one rank."""

    config: GPTConfig
    mesh: Mesh
    options: ModelOptions
    rows: int
    seq: int
    rules: Any
    whole: bool
    split: bool
    grad_dtype: torch.dtype | None

    def trace(self, part: Part, config: GPTConfig) -> Piece:
        """A part of a model of this config, which has no other layers."""
        options = self.options
        uses = gpt.uses(config, options)
        stacks = config.stacks if not part.layers else {}
        uses = {name: use for name, use in uses.items() if name not in stacks}
        defs = {k: v for k, v in gpt.defs(config, options).items() if k in uses}
        alone = Partition((part,), (((0, 0),),), uses)
        defs = {name: defs[name] for name in alone.names(0)}
        specs = param_specs(defs, self.rules)
        specs = whole_over(specs, FSDP_AXES) if self.whole else specs

        def local(d: Any, spec: Any) -> torch.Tensor:
            return torch.empty(local_shape(d.shape, spec, self.mesh), dtype=d.dtype, device="meta")

        weights = tree.map(local, defs, specs)
        stage, x = self._stage(part, config, alone.stage_params(weights, 0, None))
        reads = [{*piece.block.inputs} for piece in stage.pieces[1:]]
        given = [
            sum(var.nbytes for var in stage.arguments[1] if any(var in r for r in reads[i:]))
            for i in range(len(reads))
        ]
        leaves = tree.leaves(weights)
        divided = [{*spec_axes(s)} & {*options.experts} for s in tree.leaves(specs, is_spec)]
        return Piece(
            part,
            _donating_sums(stage.program),
            tuple(stage.piece_program(index) for index in range(len(stage.pieces))),
            tuple(held + more for held, more in zip(stage.held_bytes, given, strict=False)),
            0 if part.loss else x.nbytes,
            sum(leaf.numel() for leaf in leaves),
            sum(leaf.numel() for leaf, own in zip(leaves, divided, strict=True) if own),
            sum(leaf.nbytes for leaf in leaves),
        )

    def _stage(self, part: Part, config: GPTConfig, params: tree.Tree) -> tuple[Stage, Any]:
        options = self.options
        seq = self.seq // math.prod(self.mesh[axis] for axis in CONTEXT_AXES)
        tokens = torch.empty(self.rows, seq, dtype=torch.int64, device="meta")
        split = self.mesh["tp"] if "tp" in _axes_of(options) else 1
        shape = (self.rows, seq // split, config.embed_dim)
        x = torch.empty(shape, dtype=config.stream_dtype, device="meta")
        batch = {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]}
        shared = (random.key(0).to("meta"),)

        def function(part, params, x, batch, key):
            key = key if config.dropout else None
            return gpt.stage_loss(config, part, params, x, batch, options, key=key)

        call = Call(0, part, part.loss, params, None if part.embed else x, batch, shared, {})
        made = trace_stage(function, call, self.mesh, split=self.split, dtype=self.grad_dtype)
        return made, x


def _donating_sums(program: Program) -> Program:
    """A stage's program that overwrites the sums of gradients, as its pieces do."""
    inputs = tuple(replace(i, donated=i.path.startswith("4/")) for i in program.inputs)
    return replace(program, inputs=inputs)


def _axes_of(options: ModelOptions) -> tuple[str, ...]:
    entry = options.stream[1]
    return entry if isinstance(entry, tuple) else (entry,)


def _layer_configs(config: GPTConfig) -> dict[str, tuple[GPTConfig, tuple[int, ...]]]:
    """By kind of layer: a model of one of them, and which layers of the model are of that kind.

    Kinds differ by their stack and by their window.
    """
    found: dict[str, tuple[GPTConfig, tuple[int, ...]]] = {}
    for stack, layers in config.stacks.items():
        for window in dict.fromkeys(config.windows[i] for i in layers):
            same = tuple(i for i in layers if config.windows[i] == window)
            several = len({config.windows[i] for i in layers}) > 1
            name = f"{stack}, window {window}" if several else stack
            one = replace(
                config, num_layers=1, dense_layers=int(stack == "dense"), window=window,
                global_every=0, nope_every=0,
                local_rope_theta=config.local_rope_theta if window else 0.0,
            )  # fmt: skip
            found[name] = (one, same)
    return found
