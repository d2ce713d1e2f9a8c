"""`RunSetup`: everything that a configuration and a mesh determine, derived once.

It allocates nothing and reads no data; its properties are computed at first use and cached.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from functron import checkpoint, nn, optim
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import Need
from functron.data.context_schedule import SLACK
from functron.models import gpt
from functron.models.config import TextConfig
from functron.models.decoder import tell_load, with_histories
from functron.models.family import Family, StageFunctions
from functron.models.lora import lora_defs, pack, trainable
from functron.models.options import ModelOptions
from functron.nn.moe import MoEConfig
from functron.nn.moe.room import room_at_least
from functron.ops import use
from functron.ops.nvrtc import Defines, KernelSource, names, read, variants_of
from functron.ops.operations import TYPES
from functron.ops.quantise import remember
from functron.optim import torch_dtype
from functron.optim.low_precision import quantisable
from functron.pipeline.execute import gradients as stage_gradients
from functron.pipeline.execute import pipelined
from functron.pipeline.partition import (
    Layout,
    Part,
    Partition,
    balanced_layout,
    parse_layout,
)
from functron.pipeline.registry import make
from functron.pipeline.schedule import Schedule
from functron.pipeline.stage_backward import stage_flops
from functron.precision import encoder, quantised
from functron.precision.weights import problems_of
from functron.program.trace import Program, trace
from functron.spmd import FSDP_AXES, BoundMesh, Mesh, P, Rules, shard_map
from functron.spmd.params import (
    ParamDef,
    abstract_params,
    decay_mask,
    history_mask,
    joined_params,
    param_specs,
    pieces_of,
    weight_mask,
)
from functron.spmd.spec import dim_axes, validate, without_axes
from functron.training.config import TrainConfig
from functron.training.data import target_length
from functron.training.dealing import Dealer, by_signature, make_dealer, split_degree, take_degree
from functron.training.rooms import is_too_full
from functron.training.step import (
    State,
    Watch,
    grad_norm_of,
    init_state,
    layer_norms,
    make_step,
    state_specs,
)
from functron.transforms import (
    Gather,
    GradientFunction,
    accumulated,
    encoded,
    frozen,
    gathered_once,
    informed,
    mean_gradients,
    retaken,
    scattered,
    with_targets,
    without_targets,
)


@dataclass(frozen=True, eq=False)
class RunSetup:
    """Everything that a configuration and a mesh determine; made by `make_setup`.

    ``dataclasses.replace(setup, mesh=...)``, or ``config=...``, is the set-up of the same model on
    another mesh, or with other settings. Names with "whole" are about the whole model; others are
    about what this process holds: on a bound mesh with pp its rank's stages, else everything.

    Attributes:
        config: of the run.
        mesh: simulated, or bound to processes.
        whole_defs: the definitions of the model's parameters, with those of LoRA where it has any.
        learned_room: what steps have for rows of experts, of `functron.nn.moe.room.ROOMS`, in place
            of compute.expert_room; None: that.
        degree: steps are for batches whose documents were dealt, each to at most so many ranks; 0:
            for samples as they are drawn; None: for both, as batches say.
    """

    config: TrainConfig
    mesh: Mesh | BoundMesh
    whole_defs: dict
    learned_room: float | None = None
    degree: int | None = None

    # --- the model

    @property
    def family(self) -> Family:
        """The functions of the architecture."""
        return self.config.family

    @property
    def model(self) -> TextConfig:
        """The architecture."""
        return self.config.architecture

    @property
    def plain_mesh(self) -> Mesh:
        """The mesh without processes."""
        return self.mesh.mesh if isinstance(self.mesh, BoundMesh) else self.mesh

    @cached_property
    def rules(self) -> Rules:
        """`rules_of` the configuration."""
        return rules_of(self.config, self.mesh)

    @cached_property
    def whole_specs(self) -> dict:
        """The specs of the whole model's parameters."""
        return param_specs(self.whole_defs, self.rules)

    @property
    def stream(self) -> P:
        """The spec of the residual stream."""
        divided = self.config.parallelism.sequence_parallel
        return gpt.SEQUENCE_PARALLEL_STREAM if divided else gpt.STREAM

    @cached_property
    def options(self) -> ModelOptions:
        """The options that the family's functions take."""
        config, ranks = self.config, self.config.parallelism
        gather, kernels = gpt.WHOLE, use(config.compute.kernels)  # the step has gathered them
        if ranks.gather != "step":
            gather = Gather(
                self.whole_specs,
                regather=ranks.gather == "use",
                compute_dtype=torch.bfloat16 if config.precision.gather_as == "bfloat16" else None,
                reduce_dtype=torch_dtype(config.optimizer.reduce_dtype),
            )
        settings = {
            "adapters": config.lora.adapters,
            "context": self.context,
            "expert_axes": ranks.expert_axis_names,
            "kernels": kernels,
            "loss_chunk_tokens": config.compute.loss_chunk_tokens,
            "matmul": nn.MATMUL,
        }
        recipe = config.precision.recipe
        if recipe is not None:
            made = quantised(recipe, kernels=kernels)
            ends = recipe.high(config.gpt.num_layers)
            kind = (recipe.draws, recipe.scaling == "delayed", *ends, recipe.logits == "low")
            settings["matmul"] = nn.Matmul(*made, *kind)
        own: dict[str, Any] = {k: v for k, v in settings.items() if k in self.family.settings}
        return ModelOptions(self.stream, config.compute.remat, gather, **own)

    @property
    def room(self) -> float | None:
        """The room for rows of experts in steps, as of `ModelOptions.expert_room`.

        Processes that do not compile have room for the rows that came; there it is only measured.
        """
        first = self.config.compute.expert_room
        if not first or not has_experts(self.config):
            return None
        if isinstance(self.mesh, BoundMesh) and not self.is_compiled:
            return 0.0
        return room_at_least(first) if self.learned_room is None else self.learned_room

    @property
    def context(self) -> gpt.Context:
        """How attention reaches across the ranks that split sequences."""
        ranks = self.config.parallelism
        kind = "gather" if ranks.context.endswith("gather") else "ring"
        if self.degree:
            ring, exchange = split_degree(self.degree, self.mesh)
            return gpt.Context(kind, "balanced", ring, exchange)
        return gpt.Context(kind, "zigzag" if ranks.zigzag else "contiguous")

    @cached_property
    def dealer(self) -> Dealer | None:
        """Deals the documents of batches to ranks; None where samples stay as they are drawn."""
        return make_dealer(self.config, self.mesh)

    @cached_property
    def encode(self) -> Callable | None:
        """Quantises the weights once a step; None: each matrix product quantises its operands.

        Raises:
            ValueError: the recipe, or how weights are split, does not allow it.
        """
        config, recipe = self.config, self.config.precision.recipe
        title = "parameters cannot be gathered like this"
        if config.precision.gather_as == "bfloat16":
            raise_problems(title, _bfloat16_problems(config))
        if config.precision.gather_as != "quantised":
            return None
        if recipe is None:
            fix = "add --precision fp8-tensor, or leave it out"
            refuse(title, "gather_as", "quantised", "it with a recipe of products", fix)
        wrong = problems_of(recipe, self.whole_defs, self.whole_specs, self.mesh)
        found = [replace(one, path=f"gather_as=quantised, {one.path}") for one in wrong]
        if config.parallelism.gather == "step" and any(recipe.high(config.gpt.num_layers)):
            got = "step, with gather_as=quantised and layers that stay high"
            wanted = "weights of these gathered where they are read"
            found.append(Problem("gather", got, wanted, "take --gather use or keep"))
        raise_problems(title, found)
        return encoder(recipe, self.defs, kernels=use(config.compute.kernels))

    @property
    def batch_specs(self) -> dict[str, P]:
        """The specs of a batch."""
        dealt = bool(self.degree) and self.dealer is not None and self.dealer.draws
        return gpt.batch_specs(packed=self.config.data.packed, dealt=dealt)

    # --- the pipeline

    @property
    def is_pipelined(self) -> bool:
        """Whether the mesh has pipeline stages."""
        return self.mesh["pp"] > 1

    @property
    def rank(self) -> int | None:
        """This process's pipeline rank; None where this process has all stages."""
        if not self.is_pipelined or not isinstance(self.mesh, BoundMesh):
            return None
        return self.mesh.coordinate["pp"]

    @property
    def cut(self) -> StageFunctions:
        """The functions of the stages that the model is cut into.

        Raises:
            ValueError: the family has none.
        """
        if self.family.stages is None:
            title, fix = "this model is not cut into stages", "put those ranks on another axis"
            refuse(title, "mesh", f"pp={self.mesh['pp']}", f"pp=1 for {self.family.title}", fix)
        return self.family.stages

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the pipeline.

        Raises:
            ValueError: there is no such schedule, or not for this number of stages or microbatches.
        """
        own = self.config.parallelism
        found = make(own.schedule, self.mesh["pp"], own.microbatches, own.chunks or None)
        if not found.has_backward:
            title, got = "cannot train with this schedule", f"{own.schedule}, forwards only"
            refuse(title, "schedule", got, "one that trains")
        return found

    @cached_property
    def partition(self) -> Partition:
        """The stages of the pipeline, and the parameters that each rank holds.

        Raises:
            ValueError: the layout does not fit, the vocabulary does not divide, or a process would
                have none of the parameters that train.
        """
        config, defs = self.config, self.whole_defs
        spread = {
            name: entry.axes.index("vocab")
            for name, entry in defs.items()
            if config.parallelism.vocab_over_pp
            and isinstance(entry, ParamDef)
            and "vocab" in entry.axes
        }
        layout = self._layout(self.schedule.num_stages)
        found = Partition(layout, self.schedule.pipes, self.cut.uses(self.model), spread)
        stored = found.storage_specs(self.whole_specs)
        validate(abstract_params(defs), stored, self.mesh, what="params")
        on_processes = config.parallelism.nproc or isinstance(self.mesh, BoundMesh)
        if config.lora.adapters is not None and on_processes:
            _check_trained(found, defs)
        return found

    def _layout(self, num_stages: int) -> Layout:
        layout = self.config.parallelism.layout
        if layout != "cost":
            return parse_layout(layout or "even", self.cut.num_layers(self.model), num_stages)
        if self.family.name != "gpt":
            fix = "--layout even, or written out: 'Ett|ttL'"
            wanted = "even, or stages: this is no GPT"
            refuse("cannot lay stages out", "layout", layout, wanted, fix)
        ends = (Part(range(0), embed=True), Part(range(0), loss=True))
        embed, loss = map(self.stage_flops, ends)
        return balanced_layout(num_stages, self.layer_flops(), embed=embed, loss=loss)

    def stage(
        self, part: Part, params: tree.Tree, x: Any, batch: Any, key: Any, total: Any, watch=False
    ) -> Any:
        """The output of a pipeline stage; of the last one, its loss divided by `total`."""
        options = replace(self.options, watch=watch, expert_room=self.room)
        y = self.cut.loss(self.model, part, params, x, batch, options, key=key)
        if not part.loss:
            return y
        return (y[0] / total, y[1]) if isinstance(y, tuple) else y / total

    def stage_flops(self, part: Part) -> float:
        """FLOPs of one rank for a microbatch of a stage, forward and backward."""
        setup, config, model = self.without_pipeline, self.config, self.config.gpt
        alone = Partition((part,), (((0, 0),),), gpt.uses(model))
        names = alone.names(0)
        weights = abstract_params({name: self.whole_defs[name] for name in names})
        rows = config.data.global_batch // config.parallelism.microbatches
        tokens = torch.empty(rows, config.data.seq, dtype=torch.int64, device="meta")
        shape = (rows, config.data.seq, model.embed_dim)
        used = setup.used({name: setup.specs[name] for name in names})
        return stage_flops(
            lambda weights, x, batch, key: setup.stage(part, weights, x, batch, key, 1),
            alone.stage_params(weights, 0, None),
            torch.empty(shape, dtype=model.stream_dtype, device="meta"),
            {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]},
            torch.empty(2, dtype=torch.int64, device="meta"),
            (used, self.stream, gpt.batch_specs(), P()),
            setup.plain_mesh,
            loss=part.loss,
        )

    def layer_flops(self) -> list[float]:
        """`stage_flops` of every layer; layers of the same kind are traced once."""
        known: dict[tuple, float] = {}
        out = []
        for layer in range(self.config.gpt.num_layers):
            part = Part(range(layer, layer + 1))
            rows = Partition((part,), (((0, 0),),), gpt.uses(self.config.gpt)).kind(0)
            kind = (rows, self.high(part))
            if kind not in known:
                known[kind] = self.stage_flops(part)
            out.append(known[kind])
        return out

    def high(self, part: Part) -> tuple[bool, ...]:
        """For each layer of a stage, whether its products stay in high precision."""
        made, count = self.options.matmul, self.config.gpt.num_layers
        return tuple(made.of_layer(at, count) is nn.MATMUL for at in part.layers)

    @cached_property
    def without_pipeline(self) -> RunSetup:
        """The set-up of the same model on simulated ranks that each have all layers."""
        return replace(self, mesh=self.plain_mesh.without("pp"))

    # --- the parameters

    @cached_property
    def defs(self) -> dict:
        """The definitions of this process's parameters."""
        whole = self.whole_defs
        return self.partition.local_defs(whole, self.rank) if self.is_pipelined else whole

    @cached_property
    def specs(self) -> dict:
        """The specs of this process's parameters."""
        return param_specs(self.defs, self.rules)

    def used(self, specs: tree.Tree) -> tree.Tree:
        """The specs of parameters within a step: without fsdp where the step has gathered them."""
        return without_axes(specs, FSDP_AXES) if self.config.parallelism.gather == "step" else specs

    @cached_property
    def stored_specs(self) -> dict:
        """The specs of this process's parameters between steps."""
        return self.specs if self.rank is None else self.partition.storage_specs(self.specs)

    def trained(self, defs: tree.Tree) -> tree.Tree:
        """Which parameters are trained: True for all, or a tree of bools."""
        return True if self.config.lora.adapters is None else trainable(defs)

    @property
    def packs(self) -> bool:
        """Whether matrices with adapters are kept in 4 bits."""
        return self.config.lora.adapters is not None and self.config.lora.base != "plain"

    @cached_property
    def without_packing(self) -> RunSetup:
        """The set-up of the same run with these matrices as they are."""
        config = replace(self.config, lora=replace(self.config.lora, base="plain"))
        whole = with_additions(config, config.family.defs(config.architecture))
        return replace(self, config=config, whole_defs=whole)

    # --- the optimizer and its state

    @property
    def learning_rate(self) -> Callable:
        """The learning rate of each step, from 0."""
        return self.config.rate

    @cached_property
    def zero_specs(self) -> tree.Tree:
        """The specs of this process's optimizer state under ZeRO; None without ZeRO."""
        return self._zero_specs(self.defs, self.stored_specs)

    def _zero_specs(self, defs: dict, stored: dict) -> tree.Tree:
        if self.config.parallelism.zero not in (1, 2):
            return None
        return without_axes(optim.shard_specs(defs, stored, self.mesh), ("pp",))

    @cached_property
    def optimizer(self) -> optim.GradientTransformation:
        """The optimizer of this process's parameters."""
        copies = self.partition.copies(self.rank) if self.is_pipelined else 1
        return self._optimizer(self.defs, self.specs, self.zero_specs, copies)

    def _optimizer(
        self, defs: dict, specs: dict, zero_specs: tree.Tree, copies: tree.Tree = 1
    ) -> optim.GradientTransformation:
        config, weights = self.config, weight_mask(defs)
        mask = trainable(defs) if config.lora.adapters is not None else weights
        chosen, _ = tree.partition(defs, mask)
        made = optim.make_optimizer(
            config.optimizer,
            self.learning_rate,
            specs=specs,
            copies=copies,
            mask=decay_mask(chosen),
            defs=chosen,
            whole=self.whole_defs,
            shards=zero_specs,
            mesh=self.mesh,
            total_steps=config.rate_schedule.total_steps,
            counted=config.counted,
            kernels=use(config.compute.kernels),
        )
        kept, moe = tree.map(lambda flag: not flag, history_mask(defs)), config.gpt.moe
        if config.lora.adapters is not None:
            made = optim.only(made, mask)
        else:
            if moe is not None and moe.balance_bias:
                some = tree.partition(weights, kept)[0]
                made = optim.where(some, made, _balance_rule(moe))
            made = made if all(tree.leaves(kept)) else optim.only(made, kept, remember)
        return optim.with_limit(made, of=weights) if config.limits_updates else made

    @cached_property
    def state_specs(self) -> State:
        """The specs of the state between steps."""
        return state_specs(self.stored_specs, self.optimizer)

    def init(
        self,
        key: torch.Tensor,
        params: tree.Tree = None,
        *,
        mesh: Mesh | BoundMesh | None = None,
    ) -> State:
        """The state before the first step, with given or random parameters.

        Where the optimizer keeps float32 masters, float32 parameters become the masters, and the
        parameters are their rounded values.

        Args:
            key: a key of `functron.random`; the state lives on its device.
            params: this process's; None: random ones.
            mesh: another one with the same ranks; None: its own.
        """
        where = self.mesh if mesh is None else mesh
        if self.packs and params is None and key.device.type != "meta":
            params = pack(self.without_packing.init(key, mesh=mesh).params)
        make = functools.partial(
            init_state, key, self.defs, self.stored_specs, self.optimizer, where
        )
        if not self.config.optimizer.fp32_masters:
            return make(params)
        if params is None:
            return make(masters=True)
        rows = zip(tree.leaves(params), tree.leaves(self.defs), strict=True)
        rounded = all(leaf.dtype == d.dtype for leaf, d in rows)
        return make(params) if rounded else make(masters=params)

    @cached_property
    def placement(self) -> checkpoint.Placement:
        """The ranks that hold each part of the whole state between steps.

        Each process of a pipeline has an optimizer of its own parameters only; the layout of the
        whole state is that of an optimizer of all parameters. Joined parameters, and what is like
        them, are leaves of their own, so that checkpoints do not depend on how a run computes.

        Raises:
            ValueError: the optimizer has state of a joined parameter that is not of its pieces.
        """
        if self.rank is None:
            like = self.init(random.key(0).to("meta"), mesh=Mesh())  # whole, and not padded
            joined = joined_params(self.whole_defs)
            return checkpoint.Placement.of(like, self.state_specs, self.mesh, joined=joined)
        return self.pipeline_placement

    @cached_property
    def pipeline_placement(self) -> checkpoint.Placement:
        """`placement`, with every pipeline rank in a process of its own."""
        partition = self.partition
        specs, zero_specs = {}, {}
        for rank in range(self.mesh["pp"]):  # ZeRO goes by the shapes that a rank has
            defs = partition.local_defs(self.whole_defs, rank)
            local = param_specs(defs, self.rules)
            specs |= partition.entries(local)
            split = self._zero_specs(defs, partition.storage_specs(local)) or {}
            zero_specs |= partition.entries(split)
        specs, zero_specs = partition.nest(specs), partition.nest(zero_specs)
        optimizer = self._optimizer(self.whole_defs, specs, zero_specs or None)
        meta, stored = random.key(0).to("meta"), partition.storage_specs(specs)
        like = init_state(meta, self.whole_defs, stored, optimizer, Mesh())
        split, joined = state_specs(stored, optimizer), joined_params(self.whole_defs)
        found = checkpoint.Placement.of(like, split, self.mesh, partition, joined=joined)
        return replace(found, rank=found.here)

    # --- the step

    @property
    def jit_settings(self) -> dict[str, Any]:
        """Settings of `functron.jit` for the step."""
        sizes, graph = len(self.config.data.batches.sizes), self.config.compute.cuda_graph
        lengths = 1 if self.dealer is None else 1 + len(SLACK)
        return {"num_signatures": sizes * lengths, "graph": graph}

    @property
    def is_compiled(self) -> bool:
        """Whether steps are compiled."""
        return self.choose_compiled()[0]

    def choose_compiled(self, on_gpus: bool | None = None) -> tuple[bool, str]:
        """Whether steps are compiled, and a phrase that says so, and why.

        Args:
            on_gpus: whether each rank has a GPU and a process; None: as those of the mesh have.
        """
        chosen = self.config.compute.compile
        if chosen != "auto":
            how, said = ("compiled", "true") if chosen else ("not compiled", "false")
            return chosen, f"{how}, as compile={said} says (--compile auto: over NCCL alone)"
        needs = _COMPILED
        if on_gpus is None:
            on_gpus = isinstance(self.mesh, BoundMesh) and self.mesh.device_type == "cuda"
            needs += (_COMPILERS,)
        if not on_gpus or self.mesh.size == 1:
            return False, "not compiled: ranks send nothing over NCCL (on: --compile)"
        for need in needs:
            if not need.holds(self):
                why = f"nothing hides what ranks send; compile=auto wanted {need.wanted}"
                return False, f"not compiled: {why}; fix: {need.fix}"
        why = "to hide what ranks send over NCCL; the first one takes longer (off: --no-compile)"
        return True, f"compiled, {why}"

    def choose_fused(self, device: str) -> tuple[bool, str]:
        """Whether projections of a GPT are fused, and a phrase that says so, and why.

        Args:
            device: that ranks compute on: cpu or cuda.
        """
        if self.family.name != "gpt":
            return False, "no projections: this is no GPT"
        chosen = self.config.gpt.fused_projections
        if chosen != "auto":
            said = f"as gpt.fused_projections={str(chosen).lower()} says (auto: on GPUs alone)"
            return chosen, f"{_FUSED if chosen else 'no projections'}, {said}"
        reasons = (reason for applies, reason in _APART if applies(self))
        reason = "this is no GPU" if device != "cuda" else next(reasons, None)
        if reason is not None:
            return False, f"no projections: {reason}"
        why = "for fewer launches on a GPU (off: --gpt.no-fused-projections)"
        return True, f"{_FUSED}, {why}"

    @cached_property
    def step(self) -> Callable:
        """The training step ``(state, batch) -> (state, metrics)`` for batches with targets.

        With a bounded `room` it leaves the state as it is where that was not enough: it is for
        `functron.training.rooms.with_rooms`, as of `functron.training.run.programs`.

        Raises:
            ValueError: the model cannot run on the mesh.
        """
        return self._step(None)

    @property
    def reads_targets(self) -> bool:
        """Whether the step itself counts the targets of its batch.

        It does in processes on CPUs, where reading a number is free. Otherwise the caller counts
        them in host memory beforehand, since reading a number would wait for the GPU.
        """
        bound = isinstance(self.mesh, BoundMesh) and self.mesh.device_type == "cpu"
        return bound and not self.is_compiled

    @cached_property
    def watch(self) -> Watch | None:
        """`step` with measurements of layers, where the configuration asks for them."""
        every = self.config.logging.layers_every
        return self._make_watch(every) if every else None

    @cached_property
    def idle_step(self) -> Callable:
        """`step` for batches without targets; it is not compiled."""
        return self._step(None, idle=True)

    @cached_property
    def idle_watch(self) -> Callable:
        """The step of `watch` for batches without targets."""
        return self._step(self._layers(), idle=True)

    def overflowing(self, state: State, batch: Any) -> list[str]:
        """The layers whose gradients are not finite; takes a step, which consumes the state."""
        watch = self.watching()
        _, metrics = watch.step(state, batch)
        norms = watch.layers(metrics).items()
        return [name for name, row in norms if not math.isfinite(row.get("grad_norm", 0.0))]

    def watching(self) -> Watch:
        """`step` with measurements of layers, to be taken alone: with room for the worst case."""
        return replace(self, learned_room=0.0)._make_watch(1)

    def _make_watch(self, every: int) -> Watch:
        layers = self._layers()
        names = gpt.watched_names(self.config.gpt) if self.family.name == "gpt" else ()
        return Watch(self._step(layers), every, layers.names, names)

    def _layers(self) -> optim.Layers:
        """The layers whose norms are measured."""
        rows = None
        if self.is_pipelined:
            stacked = (n for n in self.whole_defs if self.partition.stack(n) is not None)
            rows = {name: self.partition.rows(name, self.rank) for name in stacked}
        chosen, _ = tree.partition(self.whole_defs, self.trained(self.whole_defs))
        return optim.layers_of(tree.partition(chosen, weight_mask(self.whole_defs))[0], rows)

    def _step(
        self, layers: optim.Layers | None, *, idle: bool = False, whole: bool = False
    ) -> Callable:
        """The step, of one program if it is to be `whole`, which then has room enough."""
        if self.dealer is not None and self.degree is None:
            return by_signature(
                lambda degree: replace(self, degree=degree)._step(layers, idle=idle, whole=whole),
                take_degree,
            )
        watch = layers is not None
        compiled = self.is_compiled and not idle
        of = self._stages(watch, compiled=compiled) if self.is_pipelined else self._loss(watch)
        gradients = self._wrap_gradients(of)
        several = self.config.parallelism.microbatches > 1
        moe = self.config.gpt.moe if self.family.name == "gpt" else None
        if moe is not None and moe.aux_loss and moe.aux == "global" and several:
            gradients = informed(gradients, tell_load)
        if idle:
            gradients = without_targets(gradients)
        elif not self.reads_targets:
            gradients = with_targets(gradients)
        if self.room and not (idle or whole):
            settings = self.jit_settings if compiled and self.rank is None else None
            useless = functools.partial(is_too_full, self.room)
            gradients = retaken(gradients, useless, settings=settings)
        counted = weight_mask(self.defs)
        kernels = use(self.config.compute.kernels)
        metrics = [grad_norm_of(counted, kernels), *self.config.logging.own_metrics]
        metrics += [] if layers is None else [layer_norms(layers, counted)]
        given = gradients, self.optimizer, self.mesh, self.specs
        return make_step(*given, batch_specs=self.batch_specs, metrics=metrics)

    def _wrap_gradients(self, g: GradientFunction) -> GradientFunction:
        """A gradient function in the wrappers that the configuration asks for."""
        trained = self.trained(self.defs)
        g = scattered(g) if self.config.parallelism.zero == 2 else g
        g = g if trained is True else frozen(g, trained)
        g = gathered_once(g) if self.config.parallelism.gather == "step" else g
        return g if self.encode is None else encoded(g, self.encode)

    def _loss(self, watch: bool) -> GradientFunction:
        watch = watch and self.family.name == "gpt"  # others do not measure the residual stream
        details = watch or self.family.has_details(self.model)
        options = replace(self.options, watch=watch, expert_room=self.room)
        summed: Callable = gpt.loss_and_details if details else self.family.loss

        def loss(params, batch, key):
            return summed(self.model, params, batch, options, key=key)

        own = self.config.optimizer
        g = mean_gradients(
            loss,
            self.family.num_targets,
            has_aux=details,
            reduce_dtype=torch_dtype(own.reduce_dtype),
            checks_sum=False,  # the losses of families are sums
            draws=self.family.draws(self.model, options),
        )
        return accumulated(
            g, self.config.parallelism.microbatches, dtype=torch_dtype(own.grad_dtype)
        )

    def _stages(self, watch: bool, *, compiled: bool) -> GradientFunction:
        own = self.config.optimizer
        stages = pipelined(
            functools.partial(self.stage, watch=watch),
            self.partition,
            self.schedule,
            dtype=torch_dtype(own.grad_dtype),
            compile={} if compiled else None,
        )
        return stage_gradients(
            stages,
            self.family.num_targets,
            reduce_dtype=torch_dtype(own.reduce_dtype),
            checks_sum=False,
            draws=self.family.draws(self.model, self.options),
        )

    @cached_property
    def averaged(self) -> Callable | None:
        """``state -> params``, the moving averages in the optimizer state; None without them."""
        if not self.config.optimizer.ema_decay:
            return None

        def read(state: State) -> tree.Tree:
            return optim.averaged(state.opt_state, state.params, self.specs, self.zero_specs)

        layout = state_specs(self.specs, self.optimizer)
        stages = "pp" if self.is_pipelined else None
        return shard_map(read, self.mesh, (layout,), self.specs, stages=stages)

    @cached_property
    def kernel_variants(self) -> list[tuple[KernelSource, Defines]]:
        """The variants of our kernels that the step may launch on a GPU.

        Of an operation it is not asked whether the model has it, only of those that few have.
        """
        config, own = self.config, self.config.optimizer
        rare = {
            "lse_merge": self.mesh["cp"] > 1,
            "quantise": config.precision.recipe is not None,
            **dict.fromkeys(("moe_permute", "moe_router", "moe_sort"), config.gpt.moe is not None),
        }
        sources = [read(name) for name in names() if rare.get(name, True)]
        model, half = self.model.dtype, config.precision.gather_as == "bfloat16"
        dtypes = {
            "ELEMENT": {"float32", model, "bfloat16" if half else model},
            "PARAM": {model},
            "GRAD": {"float32", model},
            "MU": {own.mu_dtype} if own.mu_dtype else {"float32", model},
            "NU": {own.nu_dtype} if own.nu_dtype else {"float32", model},
        }
        types = {str(dtype).removeprefix("torch."): name for dtype, name in TYPES.items()}
        values = {k: {types[d] for d in found if d in types} for k, found in dtypes.items()}
        return variants_of(sources, {**values, "MASTER": {str(int(own.fp32_masters))}})

    def program(self) -> Program:
        """One rank's program of the step, traced without memory, data or processes.

        Where documents are dealt, it is that of samples as they are drawn.

        Raises:
            ValueError: the model cannot run on the mesh, or the batch does not divide.
        """
        config = self.config
        rows = torch.empty(config.data.global_batch, dtype=torch.int64, device="meta")
        tokens = rows.new_empty(config.data.global_batch, config.data.seq)
        targets = rows.new_empty(config.data.global_batch, target_length(config))
        batch = {"tokens": tokens, "targets": targets, "rows": rows}
        if config.data.packed:
            batch |= {"positions": tokens, "segments": tokens}
        state = self.init(random.key(config.seed).to("meta"))
        drawn = self if self.dealer is None else replace(self, degree=0)
        return trace(drawn._step(None, whole=True), donate=0)(state, batch)


_FUSED = "queries with keys and values, gates with what they multiply"


def _balance_rule(moe: MoEConfig) -> optim.GradientTransformation:
    """The rule of biases that balance the load of experts; see `functron.nn.moe.auxiliary`."""
    if moe.balance_by == "sign":
        return optim.sign_sgd(moe.balance_rate)
    new = 1 - moe.balance_decay
    return optim.stateless(
        lambda updates, params: tree.map(lambda beta, bias: -new * (beta + bias), updates, params),
        elementwise=True,
    )


def _shares_key_heads(made: RunSetup) -> bool:
    own, tp = made.config.gpt, made.mesh["tp"]
    several = own.kv_heads < own.num_heads and own.kv_heads % tp > 0  # split unevenly
    return (own.kv_heads < tp or several) and not own.kv_rank


def _treats_pieces_alike(made: RunSetup) -> bool:
    """Whether the optimizer does with a joined parameter what it does with its pieces."""
    own = made.config.optimizer
    if own.name not in ("adamw", "adam", "lion", "sgd", "muon"):
        return False
    groups, _ = optim.parse_groups(own.groups)
    in_8_bits = bool({own.mu_dtype, own.nu_dtype} & {"int8", "fp8"})
    joined, apart = (
        made.family.defs(replace(made.model, fused_projections=fused)) for fused in (True, False)
    )

    def treatment(defs: dict) -> dict[str, tuple]:
        labels, coded = optim.group_labels(defs, groups), quantisable(defs)
        rows = zip(tree.leaves(labels), tree.leaves(coded), strict=True)
        return dict(zip(tree.paths(defs), ((x, in_8_bits and y) for x, y in rows), strict=True))

    one, each = treatment(joined), treatment(apart)
    rows = joined_params(joined).items()
    return all(one[path] == each[part.path] for path, d in rows for part in pieces_of(path, d))


_APART: tuple[tuple[Callable[[RunSetup], bool], str], ...] = (
    (
        lambda made: bool(made.config.gpt.kv_rank) and not made.config.gpt.gated,
        "latent attention and layers without a gate join nothing",
    ),
    (_shares_key_heads, "ranks of tp share key heads"),
    (
        lambda made: made.config.precision.recipe is not None,
        "quantised products scale each by itself",
    ),
    (lambda made: made.config.lora.adapters is not None, "low-rank additions are to each"),
    (
        lambda made: not _treats_pieces_alike(made),
        "the optimizer does not treat one of several as it treats each",
    ),
)
"""Why a run on GPUs leaves projections apart by itself."""


def has_experts(config: TrainConfig) -> bool:
    """Whether the model is a GPT with experts."""
    return config.family.name == "gpt" and config.gpt.moe is not None


def _divides_experts(made: RunSetup) -> bool:
    moe = made.config.gpt.moe if made.family.name == "gpt" else None
    axes = made.config.parallelism.expert_axis_names
    sent = moe is not None and moe.dispatch != "gather" and not moe.capacity_factor
    sent = sent and not made.config.compute.expert_room
    return sent and math.prod(made.mesh[axis] for axis in axes) > 1


_COMPILED = (
    Need(
        lambda made: not made.config.optimizer.offload,
        "the optimizer's state on the GPU",
        "leave optimizer.offload out",
    ),
    Need(
        lambda made: made.config.optimizer.name != "soap",
        "another optimizer: compiled steps compute SOAP's eigenvectors in every update",
        "choose one, or add --compile",
    ),
    Need(
        lambda made: not _divides_experts(made),
        "experts with a bounded room: compiled ones have it for all ranks' tokens on each",
        "set expert_room or gpt.moe.capacity_factor, or add --compile",
    ),
)
"""The needs of a `RunSetup` for its steps to be compiled by themselves."""


def offload_problems(config: TrainConfig, device: str) -> Iterator[Problem]:
    """Optimizer state in host memory, which a compiled step of a GPU does not reach."""
    if config.compute.compile is True and config.optimizer.offload and device == "cuda":
        got, fix = "true with optimizer.offload on a GPU", "--compile auto, or no optimizer.offload"
        yield Problem("compile", got, "all of a compiled step's tensors on one device", fix)


def _has_compilers(made: RunSetup) -> bool:
    triton = importlib.util.find_spec("triton")
    return triton is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


_COMPILERS = Need(_has_compilers, "Triton and a C compiler on this machine", "install them")


def _bfloat16_problems(config: TrainConfig) -> Iterator[Problem]:
    """Problems of gathering float32 parameters in bfloat16."""
    path, got, moe = "gather_as", "bfloat16", config.gpt.moe
    if config.family.name != "gpt":
        fix = "leave it out, or store them in bfloat16: --precision bf16"
        yield Problem(path, f"{got} with {config.family.title}", "a GPT", fix)
        return
    if config.gpt.dtype != "float32":
        fix = "leave it out: they are sent, and computed with, as they are"
        yield Problem(path, f"{got} of {config.gpt.dtype}", "parameters in float32", fix)
    if config.parallelism.gather == "step":
        fix = "take --gather use or keep"
        yield Problem(path, f"{got} with gather=step", "parameters gathered where used", fix)
    if config.precision.recipe is not None and config.precision.recipe.scaling == "delayed":
        wanted = "histories in float32"
        yield Problem(path, f"{got} with {config.precision.products}", wanted, "choose fp8-tensor")
    if config.lora.rank:
        yield Problem(path, f"{got} with lora_rank", "all parameters to train", "leave it out")
    if moe is not None and moe.balance_bias:
        wanted = "nothing that counts tokens, as gpt.moe.balance_bias does: it stops at 256"
        yield Problem(path, got, wanted, "store parameters in bfloat16: --precision bf16")


def make_setup(config: TrainConfig, mesh: Mesh | BoundMesh, device: str = "") -> RunSetup:
    """The `RunSetup` of a run on a mesh.

    Args:
        config: of the run.
        mesh: simulated, or bound to processes.
        device: that ranks compute on, cpu or cuda; empty: that of a bound mesh, or else the CPU.

    Raises:
        ValueError: the model cannot run on the mesh, or a LoRA target is no layer of it.
    """
    if not device and isinstance(mesh, BoundMesh):
        device = mesh.device_type
    model = config.architecture
    if RunSetup(config, mesh, {}).choose_fused(device)[0]:
        model = replace(model, fused_projections=True)
    made = RunSetup(config, mesh, with_additions(config, config.family.defs(model)))
    _ = made.rules  # raises where the model cannot run on the mesh
    if made.packs:
        raise_problems("cannot split a base in 4 bits", list(_find_split_blocks(made)))
    return made


def _find_split_blocks(made: RunSetup) -> Iterator[Problem]:
    """Packed matrices of which ranks would have parts of blocks."""
    specs = made.whole_specs
    rows = zip(tree.paths(specs), tree.leaves(made.whole_defs), tree.leaves(specs), strict=True)
    for path, d, spec in rows:
        last = dim_axes(spec, len(d.shape))[-1:] if path.endswith("/w/scales") else ()
        for axes in last:
            ranks = math.prod(made.plain_mesh[axis] for axis in axes)
            if d.shape[-1] % ranks:
                got = f"{d.shape[-1]} blocks of 32 on {' x '.join(axes)} = {ranks} ranks"
                fix = "leave it out of lora_targets, or use fewer ranks"
                yield Problem(path.removesuffix("/scales"), got, "whole blocks on each", fix)


def rules_of(config: TrainConfig, mesh: Mesh | BoundMesh) -> Rules:
    """The mesh axes of each logical axis of a run's parameters, on this mesh.

    Raises:
        ValueError: the model cannot run on the mesh.
    """
    own, family, chosen = config.parallelism, config.family, {}
    axes = ("dp", "fsdp") if own.zero == 3 else ("fsdp",)
    if "expert_axes" in family.rules_settings:
        chosen = {"expert_axes": own.expert_axis_names}
    if own.uneven:
        if "uneven" not in family.rules_settings:
            title, fix = f"{family.title} has no uneven splits", "leave it out"
            refuse(title, "uneven", own.uneven, "rules that take it", fix)
        chosen["uneven"] = own.uneven_names
    return family.rules(config.architecture, mesh, fsdp=axes, **chosen)


def with_additions(config: TrainConfig, defs: dict) -> dict:
    """The definitions of a model's parameters, with LoRA's and delayed scaling's where used.

    Raises:
        ValueError: a LoRA target is no layer of the model.
    """
    if config.lora.adapters is not None:
        return lora_defs(defs, config.lora.adapters)
    recipe = config.precision.recipe
    delayed = recipe is not None and recipe.scaling == "delayed"
    return with_histories(config.gpt, defs) if delayed else defs


def _check_trained(partition: Partition, defs: dict) -> None:
    """Raise ValueError for processes without adapters, which could not take part in norms."""
    local = {rank: partition.local(defs, rank) for rank in range(partition.num_ranks)}
    wanted = "some in every process of the pipeline"
    fix = "give one of its stages a layer that has adapters, or simulate: --nproc 0"
    idle = [
        Problem("layout", f"no parameters that train on rank {rank}", wanted, fix)
        for rank, part in local.items()
        if not tree.leaves(tree.partition(part, trainable(part))[0])
    ]
    raise_problems("cannot train adapters on this pipeline", idle)
