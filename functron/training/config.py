"""The configuration of a training run: frozen, complete, checked at once, and TOML on disk.

Files that people write may be YAML as well.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from functron.core.errors import (
    Problem,
    nearest,
    on_hub,
    raise_problems,
    refuse,
    remote_problem,
)
from functron.data.blend import NEWEST, Order, is_blend
from functron.data.documents import SpecialTokens, TextRules
from functron.data.megatron import SURPLUS
from functron.data.order import RampUp, parse_ramp_up
from functron.models import gpt
from functron.models.bert import BertConfig
from functron.models.family import PRESETS, TRAINED, Family, TrainedConfig, dtype_of, family_of
from functron.models.gpt import GPTConfig
from functron.models.lora import LoRA, drop_routed
from functron.models.mamba import MambaConfig
from functron.models.t5 import T5Config
from functron.ops.define import Choice
from functron.optim import (
    OptimizerConfig,
    Schedule,
    ScheduleConfig,
    by_samples,
    make_schedule,
    weight_decay_increase,
)
from functron.optim.config import SCHEDULE_NEEDS, moments_of
from functron.precision import POLICIES, Policy, Recipe
from functron.training.anomalies import AnomalyConfig, with_factors
from functron.training.records import CONFIG, METRICS

_PLACES = (
    "data", "tokenizer", "eval_data", "order_cache", "schedule", "out", "slots", "memory_folder",
)  # fmt: skip
"""Fields with paths."""

_LAUNCH_LINES = (
    ".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".txt", ".args", ".json", ".yaml", ".yml",
)  # fmt: skip
"""The endings of files with launch lines, by which old runs tell them from checkpoints."""

Precision = Literal[
    "auto", "float32", "bf16", "bf16-pure", "fp16",
    "fp8-tensor", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4",
]  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a training run.

    Paths are those of this machine: one such as s3://bucket/run is a ValueError.

    Attributes:
        model: name of a preset; it fills the table of its architecture. Where there is a source it
            is what this calls the architecture.
        source: where the model came from, such as hf:PATH, if it is no preset: what functron
            convert recorded, and no option. launch:FILE: a launch line that describes it, not its
            parameters.
        gpt: the architecture, unless another is given.
        mamba: that of a Mamba-2 model or a hybrid of it.
        bert: that of a BERT.
        t5: that of a T5.
        data: a text file or a folder of them, tokens on disk, or conversations (see `format`);
            empty: the English and code of this Python. Several files of tokens in proportions, as
            Megatron-LM writes them: "0.3 PREFIX1 0.7 PREFIX2"; or all of each, every sample once an
            epoch: "all PREFIX1 all PREFIX2".
        tokenizer: what makes tokens of text: tokenizer.json, a SentencePiece .model, a .tiktoken
            file or a folder with one of these, which the run folder then keeps a copy of; bytes:
            nothing, text is read as bytes; empty: what the run folder `out` has from the model that
            it was converted from, what functron preprocess made the tokens with, or else bytes.
        tokenizer_pattern: how the tokenizer splits text, where it is a .tiktoken file that has not
            one of the usual names: gpt2, cl100k, o200k, llama3 or a regular expression.
        special_tokens: what names of special tokens in text and messages are, such as
            <|endoftext|> on a page about it: text; parse: the tokens of that name, as in what a
            template of conversations writes. Tokens on disk have it as they were made.
        prepend_bos: documents, prompts and texts to evaluate begin with what the tokenizer puts
            before a text (BOS), if anything; see functron.data.documents.TextRules.
        text_rules: by which version of these rules text becomes tokens. 1 is for runs that began
            before there was a 2, which keep it: documents without BOS, names of special tokens as
            the kind of tokenizer has it, and targets of conversations by tokens' first characters.
        format: how `data` is read: text; chat: JSONL files of conversations, of which the model
            learns the tokens of the assistant; tokens: files of functron preprocess or Megatron-LM,
            a prefix of .bin and .idx, or shards; mock: random tokens, without any file; auto: chat
            where it ends in .jsonl, and tokens where there is such a file.
        overlong: what becomes of conversations that do not fit into seq tokens: refuse (it is an
            error), cut (off their end) or drop.
        split: which documents of tokens on disk are for training, validation and test, such as
            969,30,1: training has the first of these parts; empty: all of them.
        order: arithmetic: every epoch shuffled by itself, without tables; megatron: the very order
            in which Megatron-LM draws from its .bin and .idx with this seed, seq and number of
            samples (functron.data.megatron), for a run that goes on from one of its. `split` then
            rounds as it does, and `data` without `split` is its --train-data-path. Held-out sets
            come as under its --full-validation.
        order_samples: of how many samples Megatron-LM made its order: its --train-samples, or
            --train-iters times the batch; 0: those of `steps`.
        order_cache: a folder for the tables of that order, which all processes of a machine map;
            empty: each process makes them, and keeps them in memory.
        blend_surplus: how many more samples than a blend takes its sources have in that order: its
            --mid-level-dataset-surplus.
        blend_order: the version of the order in which the sources of a blend take turns, which a
            run keeps as it began: 2: of the first samples, however many, each has its share to
            within 2; 1: that of runs before it, blocks of 2^16 samples that repeat, whose shares
            are multiples of 2^-16.
        extra_token: samples of tokens on disk have a target for their last token, which is read
            beyond them; otherwise it predicts nothing, as with Megatron-LM's
            add_extra_token_to_sequence=False.
        mask_documents: tokens on disk attend to those of their own document only, and positions
            count from 0 in each.
        fim_rate: the share of documents of tokens on disk that are rearranged, so that the model
            learns to fill in the middle; 0: none.
        fim_spm_rate: the share of these whose suffix comes first.
        fim_tokens: the ids of the tokens before prefix, middle and suffix, and of the one that ends
            a document, if there is one: such as 50257,50258,50259,50256.
        pack: best-fit: documents of tokens on disk are put together so that few are cut, and see
            none but themselves, as with mask_documents; conversations share samples, whole and
            without seeing one another; empty: documents as they follow one another, and one
            conversation a sample.
        mask_rate: the share of tokens that a BERT is to find, or a T5 to restore.
        mask_token: the id that hides them, or the first of a T5's sentinels, from which others go
            down; -1: the tokenizer's [MASK], <mask> or <extra_id_0>, or else the last of the
            vocabulary.
        mean_span: how many tokens a T5 is to restore at a place, in the mean.
        end_token: the id that ends what a T5 reads and writes; -1: the tokenizer's end of text.
        eval_every: report the loss and perplexity of held-out data after every so many steps, and
            after the last; 0: never.
        eval_batches: how many batches of each set, of global_batch samples; 0: all of it.
        eval_data: held-out sets by name, such as "wiki=PREFIX1 code=PREFIX2", each read as `data`
            is; empty: the validation part of `split`, of every source of a blend by itself.
        eval_averaged: of the average of the parameters that optimizer.ema_decay keeps, rather than
            of the parameters.
        prefetch: batches that a thread makes ahead of the steps that need them; 0: none.
        mesh: axes and sizes, such as dp=2,tp=2; empty: one rank.
        nproc: processes to start, one per rank of the mesh; 0: simulate the mesh in this process.
        timeout_seconds: after which processes give up on one that has stopped: in collectives, and
            in saves where it shows no sign of life. A fifth of it where nobody else comes at all,
            as far as a process can tell.
        hang_after: seconds in which nothing of a step moves after which the processes find out
            which rank never came to which collective, and end: see hangs/ in the run folder. At
            most half of timeout_seconds; steps may take three times as long as the longest one
            did, and the first one, saves and evaluations almost timeout_seconds. 0: never.
        stragglers_every: compare after every so many steps how long ranks were at work, and name
            one that the others wait for, which takes three such windows; 0: never.
        check_programs: compare before every collective what its ranks are about to enter, by the
            job's store, and end with what differs, before they wait for one another. Slow: for a
            step that hangs.
        sequence_parallel: split the residual stream's sequence over tp.
        context: what the ranks of cp do, each of which has a part of every sequence: ring: keys and
            values go round; gather: every rank gathers them. Ranks of ulysses, which have parts of
            sequences too, exchange heads for sequence.
        zigzag: ranks of cp each take an early and a late part of every sequence, so that causal
            attention costs all the same.
        expert_axes: the axes that experts are divided over: ep; ep,tp with sequence_parallel, where
            experts are whole (Megatron's folding with expert tensor parallelism 1); cp and ulysses
            may be among them too.
        steps: optimization steps.
        seq: tokens per sample.
        global_batch: samples per step, over all ranks and microbatches.
        ramp_up: begin with fewer samples per step: "START INCREMENT SAMPLES", as Megatron-LM has
            it: from START to global_batch in steps of INCREMENT, each for the same number of
            samples, SAMPLES for all of them together. Empty: global_batch from the first step on.
        earlier_batches: batches of other sizes that the run began with, before those of
            global_batch and ramp_up: "6x4 10x8" are 6 steps of 4 samples and 10 of 8. A run that
            changes its batches notes them here.
        microbatches: parts of each rank's batch, one after another, to save activation memory and
            to keep all ranks of a pipeline at work.
        schedule: who computes which microbatch when, where the mesh has pp: 1f1b, gpipe,
            interleaved, zb-h1, zb-h2, zbv, dualpipe, dualpipev and others, or the path of a table.
        chunks: stages per pipeline rank; 0: what the schedule is made for.
        layout: which stage has which layers: empty or even; cost: by the cost of the traced
            program; first=N,last=N; or written out, such as "Et|tt|tL" (E embedding, t layer, L
            loss, | between stages, (tt|)*3 repeats).
        vocab_over_pp: divide embedding and unembedding among all ranks of the pipeline, which each
            update a part; the first and last stage gather them for a step.
        zero: what data-parallel ranks divide instead of each holding all of it: 1: the optimizer's
            state; 2: the gradients as well; 3: the parameters as well, as the mesh axis fsdp does
            without being asked.
        gather: when parameters that are so divided are gathered: use: by every block, and again in
            backward; keep: by every block, until backward; step: all at once, before the
            microbatches.
        gather_as: as what they are sent: empty: in their own dtype; bfloat16: rounded to it, and
            computed in it, where shards are in float32; quantised: as the codes of quantised
            products, made once per step, which microbatches and backward read again: of 8 bits half
            of bfloat16's bytes, and the same numbers. Of fp8-row and mxfp8 a weight has two codes:
            gather=keep and step, which send both, save nothing.
        lora_rank: of low-rank additions to frozen matrices (LoRA), which alone are trained then; 0:
            train all parameters.
        lora_alpha: they are multiplied by lora_alpha / lora_rank.
        lora_targets: the linear layers that have them: patterns of paths, separated by commas.
        precision: which dtypes compute, sum and keep, by name: float32, bf16 (float32 masters and
            sums), bf16-pure (neither; updates are rounded stochastically), fp16 (float32 masters
            and sums, and a loss scale that follows overflows), or as bf16 with quantised products:
            fp8-tensor, fp8-delayed, fp8-row, fp8-block, mxfp8, nvfp4. It fills the options beside
            it, which change it where they are given. auto: bf16 on a GPU, where nothing else names
            a dtype; otherwise these options as they are.
        products: how products of attention's projections, feed-forward layers and experts are
            quantised, as functron.precision.Recipe: a name such as fp8-block, or a line such as
            "fprop=e4m3@row*e4m3@row dgrad=high wgrad=high", and which of a GPT's layers stay high,
            such as "nvfp4 first=1 last=4" (nvfp4 alone: last=0.15 of them), or logits=low; empty:
            they are not.
        remat: what backward computes again: none, full (all of a block but its input), selective
            (the core of attention) or dots (all but matrix products and attention).
        kernels: auto: functron's CUDA kernels compute what they can on a GPU; reference: torch's
            operations do; kernel: as auto, but what no kernel can compute is an error.
        loss_chunk_tokens: make logits of so many of a rank's tokens at a time, and again in
            backward, so that they take little memory; 0: of all at once.
        compile: compile the step with Inductor before the first one, which then takes longer.
        cuda_graph: launch a compiled step as one CUDA graph, from the third step on.
        deterministic: a GPU makes the same bits in every run on the same mesh, as CPUs do anyway:
            by torch's deterministic algorithms, some of which are slower (backward of attention, of
            embeddings, and what scatters); an operation that has none is an error.
        seed: of initial parameters, order of the data, and dropout.
        out: run folder, new or empty; empty: the next free runs/MODEL-1, runs/MODEL-2, ...
        resume: go on from the newest complete step of the run in the folder `out`, or begin with it
            where none is complete, on the mesh asked for now, and in another precision where
            --precision is given as well; auto: begin a run where there is none as well, such as in
            a job that is started again until it is done.
        change_batch: with resume: go on with another global_batch or ramp_up than the run had, from
            its newest checkpoint and the next sample on. What counts samples goes on: rates of
            rate_unit=samples and an order of order=megatron stay as they were planned, and the
            samples of ramp_up are those of the whole run.
        save_every: save after every so many steps as well; 0: only at the end.
        keep_last: how many of the newest checkpoints stay; 0: all.
        keep_every: checkpoints of multiples of this step stay in any case; 0: none do.
        max_restarts: how often processes that `nproc` started are started again after one died,
            from the newest complete checkpoint: so often without progress, which is a step or a
            checkpoint beyond all before; progress sets the count back. Mistakes and numbers that
            are not finite end the run at once.
        restart_pause_seconds: how long to wait before that; twice as long after each start
            without progress, up to a minute.
        elastic: the sizes that an axis of the mesh may have, such as dp=2:8, or dp=2,4,8: a restart
            goes on with as many ranks as there are `slots` for, and with the same batches, of which
            each rank then has more microbatches; at a checkpoint the run grows again. Sizes that do
            not divide the batches are passed over.
        slots: a file with the number of processes that can be had now, which a scheduler or a
            person may change at any time; empty: as many as there are GPUs.
        memory_save_every: keep the state after every so many steps in memory as well, each rank's
            own and that of a neighbour on dp or fsdp, on another machine where there is one: a
            restart on the same mesh goes on from there, without reading a disk, whichever one
            machine is lost; 0: never.
        memory_folder: a folder of main memory, where they lie until the run leaves, four times the
            bytes of a rank's state for each rank of the machine.
        exit_after: save and leave after so long, such as 3h50m, with the exit code 138, which says
            to start the job again, as after SIGUSR1; empty: never.
        device: cpu, cuda, or auto: cuda where there is one.
        log_layers_every: at the first step and at multiples of this one, records also have by layer
            the norms of the parameters that train and of their gradients, and, of a GPT, the root
            mean square of the residual stream after the layer; 0: never.
        tensorboard: write TensorBoard events into the run folder.
        wandb: log to Weights & Biases.
        log_names: what TensorBoard and Weights & Biases call the numbers of a record: empty: as
            metrics.jsonl does; megatron: as Megatron-LM does ("lm loss", "learning-rate"), so that
            pictures of its runs show these as well.
        anomalies: which losses and gradient norms are not as they should be, and what is done.
        check_replicas_every: see after every so many steps, and before every save, that ranks which
            hold the same part of the state have the same bits, by 64-bit hashes; 0: never. What
            fsdp and ZeRO divide no other rank has, unless another axis replicates it, and on a
            simulated mesh there is one of each.
        on_corruption: repair: ranks that differ from most get the bits of the others; stop. Where
            there is no majority the run stops.
        optimizer: the optimizer.
        learning_rate: its schedule; total_steps 0 stands for steps.
        rate_unit: what the counts of learning_rate are (warmup_steps, decay_steps, total_steps),
            and what a weight decay that changes goes by: steps; or the samples that came before a
            step, as Megatron-LM's --lr-warmup-samples and --lr-decay-samples have it, which differs
            where batches grow.
    """

    model: str = "tiny"
    source: str = ""
    gpt: GPTConfig = field(default_factory=lambda: gpt.PRESETS["tiny"])
    mamba: MambaConfig | None = None
    bert: BertConfig | None = None
    t5: T5Config | None = None
    data: str = ""
    tokenizer: str = ""
    tokenizer_pattern: str = ""
    special_tokens: SpecialTokens = "text"
    prepend_bos: bool = True
    text_rules: Literal[1, 2] = 2
    format: Literal["auto", "text", "chat", "tokens", "mock"] = "auto"
    overlong: Literal["refuse", "cut", "drop"] = "refuse"
    split: str = ""
    order: Literal["arithmetic", "megatron"] = "arithmetic"
    order_samples: int = 0
    order_cache: str = ""
    blend_surplus: float = SURPLUS
    blend_order: Order = NEWEST
    extra_token: bool = True
    mask_documents: bool = False
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5
    fim_tokens: str = ""
    pack: Literal["", "best-fit"] = ""
    mask_rate: float = 0.15
    mask_token: int = -1
    mean_span: float = 3.0
    end_token: int = -1
    eval_every: int = 0
    eval_batches: int = 0
    eval_data: str = ""
    eval_averaged: bool = False
    prefetch: int = 2
    mesh: str = ""
    nproc: int = 0
    timeout_seconds: float = 300.0
    hang_after: float = 150.0
    stragglers_every: int = 5
    check_programs: bool = False
    sequence_parallel: bool = False
    context: Literal["ring", "gather"] = "ring"
    zigzag: bool = True
    expert_axes: str = "ep"
    steps: int = 200
    seq: int = 128
    global_batch: int = 8
    ramp_up: str = ""
    earlier_batches: str = ""
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    layout: str = ""
    vocab_over_pp: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    gather: Literal["use", "keep", "step"] = "use"
    gather_as: Literal["", "bfloat16", "quantised"] = ""
    lora_rank: int = 0
    lora_alpha: float = LoRA.alpha
    lora_targets: str = ",".join(LoRA.targets)
    precision: Precision = "auto"
    products: str = ""
    remat: gpt.Remat = "none"
    kernels: Choice = "auto"
    loss_chunk_tokens: int = 0
    compile: bool = False
    cuda_graph: bool = False
    deterministic: bool = False
    seed: int = 0
    out: str = ""
    resume: bool | Literal["auto"] = False
    change_batch: bool = False
    save_every: int = 0
    keep_last: int = 0
    keep_every: int = 0
    max_restarts: int = 0
    restart_pause_seconds: float = 1.0
    elastic: str = ""
    slots: str = ""
    memory_save_every: int = 0
    memory_folder: str = "/dev/shm"
    exit_after: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_layers_every: int = 0
    tensorboard: bool = False
    wandb: bool = False
    log_names: Literal["", "megatron"] = ""
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    check_replicas_every: int = 200
    on_corruption: Literal["repair", "stop"] = "repair"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
            name="cosine", peak=2e-3, total_steps=0, end_fraction=0.05
        )
    )
    rate_unit: Literal["steps", "samples"] = "steps"

    def __post_init__(self):
        found = (remote_problem(name, getattr(self, name)) for name in _PLACES)
        raise_problems("there are no such places on this machine", filter(None, found))

    @property
    def batches(self) -> RampUp:
        """How many samples each step has, and which one is its first.

        Raises:
            ValueError: `ramp_up` or `earlier_batches` describes no such sizes.
        """
        return parse_ramp_up(self.ramp_up, self.global_batch, self.earlier_batches)

    @property
    def rules(self) -> TextRules:
        """The rules by which text becomes tokens."""
        return TextRules(self.special_tokens, self.prepend_bos, self.text_rules)

    @property
    def packed(self) -> bool:
        """Whether batches say which tokens are of the same document, which alone they attend to."""
        return self.mask_documents or bool(self.pack)

    @property
    def architecture(self) -> TrainedConfig:
        """The model to train: `mamba`, `bert` or `t5` where one is given, and `gpt` otherwise."""
        return self.mamba or self.bert or self.t5 or self.gpt

    @property
    def has_origin(self) -> bool:
        """Whether its parameters came from elsewhere, so that no run begins with random ones.

        A launch line has none; functron migrate called it megatron:FILE.sh before launch:FILE.sh,
        where checkpoints, such as of llama-3.1-8b, may have a point in their names as well.
        """
        kind, _, path = self.source.partition(":")
        line = "/" not in path and Path(path).suffix in _LAUNCH_LINES
        return bool(self.source) and not (kind == "launch" or (kind == "megatron" and line))

    @property
    def title(self) -> str:
        """The name of the model for the user: the preset, or the architecture and its source."""
        if self.source:
            return f"{self.model} of {self.source}"
        same = self.model in PRESETS and PRESETS[self.model] == self.architecture
        return self.model if same else f"{self.model} with changes"

    @property
    def family(self) -> Family:
        """The family of `architecture`."""
        return family_of(self.architecture)

    @property
    def lora(self) -> LoRA | None:
        """The low-rank additions; None where all parameters are trained."""
        if not self.lora_rank:
            return None
        targets = (target.strip() for target in self.lora_targets.split(","))
        return LoRA(self.lora_rank, self.lora_alpha, tuple(filter(None, targets)))

    @property
    def policy(self) -> Policy:
        """The dtypes in force."""
        own = self.optimizer
        moments = {name: getattr(own, name) for name in moments_of(own.name)}
        halved = own.master_bits < OptimizerConfig.master_bits
        masters = "remainder" if halved else "float32" if own.fp32_masters else ""
        return Policy(
            dtype_of(self.architecture),
            "stochastic" if own.stochastic_rounding else masters,
            own.grad_dtype,
            own.reduce_dtype,
            moments.get("mu_dtype", ""),
            moments.get("nu_dtype", ""),
            own.loss_scale.initial,
            self.products,
            self.gather_as,
        )

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of `products`; None where none are quantised.

        Raises:
            ValueError: `products` is neither a name nor a recipe as text.
        """
        return Recipe.parse(self.products) if self.products else None

    @property
    def experts(self) -> tuple[str, ...]:
        """`expert_axes`, one by one."""
        return tuple(filter(None, (axis.strip() for axis in self.expert_axes.split(","))))

    @property
    def rate_schedule(self) -> ScheduleConfig:
        """`learning_rate` with its total_steps filled in, in `rate_unit`.

        Raises:
            ValueError: it counts samples, and `ramp_up` describes no sizes of batches.
        """
        counted = self.rate_unit == "samples"
        total = self.learning_rate.total_steps
        total = total or (self.batches.first_sample(self.steps) if counted else self.steps)
        return dataclasses.replace(self.learning_rate, total_steps=total)

    @property
    def counted(self) -> Callable[[Schedule], Schedule] | None:
        """Makes a schedule of `rate_unit` one of the steps; None where these are the same."""
        if self.rate_unit == "steps":
            return None
        given = self.batches.first_steps, self.batches.sizes
        return lambda schedule: by_samples(schedule, *given)

    @property
    def reads_rate(self) -> bool:
        """Whether the optimizer takes its rate from `learning_rate`, and has none of its own."""
        own = self.optimizer
        return not (own.name == "adafactor" and own.adafactor.relative_step)

    @property
    def reads_total_steps(self) -> bool:
        """Whether anything goes by the total of `learning_rate`: its rates, or a weight decay."""
        scheduled = self.reads_rate and SCHEDULE_NEEDS["total_steps"].holds(self.learning_rate)
        return scheduled or self.optimizer.weight_decay_incr_style != "constant"

    @property
    def rate(self) -> Callable[[Any], Any]:
        """The learning rate of each step, from 0."""
        schedule = make_schedule(self.rate_schedule)
        schedule = schedule if self.counted is None else self.counted(schedule)
        return with_factors(schedule, self.anomalies.factors)

    @property
    def weight_decay(self) -> Callable[[Any], Any]:
        """The weight decay of each step, from 0."""
        own = self.optimizer
        if own.weight_decay_incr_style == "constant":
            return lambda count: own.weight_decay
        ends = own.start_weight_decay, own.end_weight_decay
        total, style = self.rate_schedule.total_steps, own.weight_decay_incr_style
        made = weight_decay_increase(*ends, total, style)
        return made if self.counted is None else self.counted(made)

    @property
    def ordered_samples(self) -> int:
        """Of how many samples ``order="megatron"`` is made.

        Raises:
            ValueError: `ramp_up` describes no sizes of batches.
        """
        return self.order_samples or self.batches.first_sample(self.steps)


RECORDED: Mapping[str, str] = MappingProxyType({
    "source": "functron convert hf:PATH run:RUN loads a model (also megatron:PATH), and functron "
    "train --resume --out RUN trains it",
})  # fmt: skip
"""Fields that a run records and that are no options, and what to do in place of setting them."""

BOXES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "data": (
        "data", "tokenizer", "tokenizer_pattern", "special_tokens", "prepend_bos", "text_rules",
        "format", "seq", "global_batch", "ramp_up", "earlier_batches", "overlong", "split", "order",
        "order_samples", "order_cache", "blend_surplus", "blend_order", "extra_token",
        "mask_documents", "pack", "fim_rate", "fim_spm_rate", "fim_tokens", "mask_rate",
        "mask_token", "mean_span", "end_token", "prefetch",
    ),
    "model": (
        "model", "source", "gpt", "mamba", "bert", "t5", "lora_rank", "lora_alpha", "lora_targets",
    ),
    "parallelism": (
        "mesh", "nproc", "timeout_seconds", "hang_after", "stragglers_every", "check_programs",
        "sequence_parallel", "context", "zigzag", "expert_axes", "microbatches", "schedule",
        "chunks", "layout", "vocab_over_pp", "zero", "gather",
    ),
    "precision": (
        "precision", "products", "gather_as", *(f"{family}.dtype" for family in TRAINED),
        "optimizer.fp32_masters", "optimizer.master_bits",
        "optimizer.stochastic_rounding", "optimizer.mu_dtype", "optimizer.nu_dtype",
        "optimizer.grad_dtype", "optimizer.reduce_dtype", "optimizer.loss_scale",
        "optimizer.muon.dtype", "remat",
        "loss_chunk_tokens", "kernels", "compile", "cuda_graph", "deterministic",
        "device",
    ),
    "optimizer": ("steps", "seed", "optimizer", "learning_rate", "rate_unit"),
    "checkpoint": ("out", "resume", "change_batch", "save_every", "keep_last", "keep_every"),
    "evaluation": ("eval_every", "eval_batches", "eval_data", "eval_averaged"),
    "resilience": (
        "max_restarts", "restart_pause_seconds", "elastic", "slots", "memory_save_every",
        "memory_folder", "exit_after", "anomalies", "check_replicas_every", "on_corruption",
    ),
    "logging": ("log_layers_every", "tensorboard", "wandb", "log_names"),
})  # fmt: skip
"""The options by subject, for the help: paths of fields, which stand for all that is under them.

Precision is also what is computed again, or by other kernels, to save memory or time.
"""

COMMON = frozenset({
    "data", "tokenizer", "format", "seq", "global_batch", "model", "mesh", "nproc",
    "sequence_parallel", "microbatches", "schedule", "zero", "remat", "compile", "device", "steps",
    "seed", "optimizer.name", "optimizer.weight_decay", "learning_rate.peak",
    "learning_rate.warmup_steps", "out", "resume", "save_every", "eval_every", "eval_data",
    "tensorboard", "wandb", "precision", "anomalies.on_spike", "max_restarts",
})  # fmt: skip
"""The options that most runs use."""


def with_model(config: TrainConfig, name: str) -> TrainConfig:
    """`config` with the architecture of the preset `name`.

    Raises:
        ValueError: there is no such preset; the nearest is suggested.
    """
    return dataclasses.replace(config, model=name, source="", **_tables(PRESETS[name]))


def with_precision(config: TrainConfig, name: str) -> TrainConfig:
    """`config` with the dtypes of the policy `name`, of `functron.precision.POLICIES`.

    Raises:
        ValueError: there is no such policy; the nearest is suggested.
    """
    if name not in POLICIES:
        refuse("no such precision", "precision", repr(name), "a policy", nearest(name, POLICIES))
    policy, before = POLICIES[name], config.optimizer
    moments = {"mu_dtype": policy.mu, "nu_dtype": policy.nu}
    has = moments_of(before.name)
    optimizer = dataclasses.replace(
        before,
        fp32_masters=policy.masters == "float32",
        master_bits=OptimizerConfig.master_bits,
        stochastic_rounding=policy.masters == "stochastic",
        grad_dtype=policy.grads,
        reduce_dtype=policy.reduce,
        loss_scale=dataclasses.replace(before.loss_scale, initial=policy.loss_scale),
        **{name: value for name, value in moments.items() if name in has},
    )
    model = dataclasses.replace(config.architecture, dtype=policy.params)
    own: dict[str, Any] = {config.family.name: model, "products": policy.products}
    own["gather_as"] = policy.gather_as
    return dataclasses.replace(config, precision=name, optimizer=optimizer, **own)


def _tables(architecture: TrainedConfig) -> dict[str, Any]:
    """The values of all families' fields where this is what is trained."""
    tables = {name: getattr(TrainConfig(), name) for name in TRAINED}
    return tables | {family_of(architecture).name: architecture}


def load(
    path: str | Path,
    *,
    model: str | None = None,
    precision: str | None = None,
    begun: TrainConfig | None = None,
) -> TrainConfig:
    """The configuration in a file: what it leaves out has the preset's or default value.

    The file of a run folder is complete. What it leaves out came after the run: a blend there has
    the first order, and text became tokens by the first rules. Where its lora_targets name routed
    experts, which new runs may not, they are here those of what was adapted.

    Args:
        path: a TOML file; YAML where its name ends in .yaml or .yml, of which true, false, null and
            numbers are what YAML 1.2 calls so (``off`` and ``12:30`` are text, ``1e-3`` a number).
        model: a preset that replaces the file's model and its table, such as [gpt].
        precision: a policy for a file that names none, and for the dtypes that it leaves out.
        begun: the run that goes on with it, which has `KEPT` where the file leaves them out.

    Raises:
        ValueError: the file cannot be read, is no TOML or YAML, has unknown keys, values of the
            wrong kind, or describes an impossible model. All unknown keys and wrong kinds are
            listed. Or it is YAML, and the package that reads it is not installed.
    """
    table = _table(Path(path))
    if begun is not None:
        table = {name: getattr(begun, name) for name in KEPT} | table
    elif _is_of_run(Path(path)):
        table = _first_versions(table) | table
        made = read_settings(table, str(path), model=model, precision=precision)
        return _drop_routed_targets(made)
    return read_settings(table, str(path), model=model, precision=precision)


def read_settings(
    table: Mapping[str, Any],
    name: str,
    *,
    model: str | None = None,
    precision: str | None = None,
) -> TrainConfig:
    """The configuration in nested dicts, as `load` reads it out of the file of this name."""
    if model is not None:
        table = {k: value for k, value in table.items() if k not in (*TRAINED, "source")}
        table["model"] = model
    problems: list[Problem] = []
    preset = table.get("model", "tiny")
    if table.get("source"):
        base = TrainConfig()
    elif preset in PRESETS:
        base = with_model(TrainConfig(), preset)
    else:
        base = TrainConfig()
        problems.append(Problem("model", repr(preset), "a preset", nearest(str(preset), PRESETS)))
    values = _read(table, base, "", problems)
    raise_problems(f"cannot use the configuration {name}", problems)
    made = _rebuild(base, values)
    named = made.precision if made.precision != "auto" else precision
    # the policy fills what the file leaves out, of the model that the file has
    return made if named is None else _rebuild(with_precision(made, named), values)


KEPT = ("blend_order", "earlier_batches", "special_tokens", "prepend_bos", "text_rules")
"""Settings that a run goes on with as it began, where its new configuration leaves them out."""


def _first_versions(table: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of a run that began before they had versions."""
    blends = table.get("order", "arithmetic") == "arithmetic" and is_blend(table.get("data", ""))
    return {"text_rules": 1} | ({"blend_order": 1} if blends else {})


def _drop_routed_targets(config: TrainConfig) -> TrainConfig:
    """A run from before targets that name routed experts were refused, with those that it meant."""
    lora, family = config.lora, config.family
    if lora is None or not family.adapters:
        return config
    targets = drop_routed(lora.targets, family.defs(config.architecture))
    if targets == list(lora.targets):
        return config
    return dataclasses.replace(config, lora_targets=",".join(targets))


def _is_of_run(path: Path) -> bool:
    """Whether this is the configuration of a run that took steps, or saved what it began with."""
    beside = (path.parent / name for name in ("checkpoints", METRICS))
    return path.name == CONFIG and any(found.exists() for found in beside)


def starting_config(
    file: Path | None,
    *,
    model: str | None = None,
    precision: str | None = None,
    default_precision: str | None = None,
    begun: Path | None = None,
    **fields: Any,
) -> TrainConfig:
    """The configuration that a command's options override: of a file, or of a preset.

    Args:
        file: as of `load`; None: there is none.
        model: a preset that the options name.
        precision: a policy that they name, which fills what a file says too; None or "auto": none.
        default_precision: the policy where neither they nor the file name one.
        begun: the configuration of the run that goes on with it; None: it begins.
        fields: of the `TrainConfig`, where there is no file.

    Raises:
        ValueError: an unknown preset or policy, or what `load` raises.
    """
    if file is not None:
        kept = None if begun is None or begun == file else load(begun)
        base = load(file, model=model, precision=default_precision, begun=kept)
    else:
        base = dataclasses.replace(TrainConfig(), **fields)
        base = base if model is None else with_model(base, model)
        if default_precision is not None:
            filled = with_precision(base, default_precision)
            base = dataclasses.replace(filled, precision=base.precision)
    return base if precision in (None, "auto") else with_precision(base, precision)


def _table(path: Path) -> dict[str, Any]:
    """The keys and values in a file."""
    is_yaml = path.suffix in _YAML
    title, kind = "cannot read the configuration", "YAML" if is_yaml else "TOML"
    if is_yaml and path.is_file() and importlib.util.find_spec("yaml") is None:
        fix = "pip install 'functron[yaml]', or write it as TOML"
        refuse(title, "pyyaml", "no such package", f"it, to read {path}", fix)
    try:
        text = path.read_text(encoding="utf-8")
        return _from_yaml(text) if is_yaml else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(title, str(path), reason, f"a readable {kind} file", _another(path, error))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file of YAML, or of JSON, which is YAML too.

    Raises:
        ValueError: it cannot be read, or the package that reads it is not installed.
    """
    if importlib.util.find_spec("yaml") is None:
        fix = "pip install 'functron[yaml]'"
        refuse("cannot read YAML", "pyyaml", "no such package", f"it, to read {path}", fix)
    try:
        return _from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse("cannot read YAML", str(path), reason, "a readable file")


def _from_yaml(text: str) -> dict[str, Any]:
    """The mapping in a YAML document, whose plain words are those of YAML 1.2.

    Raises:
        ValueError: it is no YAML, has a key twice, or is something else than a mapping.
    """
    yaml = importlib.import_module("yaml")

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            keys = [key.value for key, _ in node.value if key.tag != _YAML_MERGE]
            if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
                line = node.start_mark.line + 1
                raise ValueError(f"{', '.join(twice)} twice in the mapping of line {line}")
            return {str(key): value for key, value in super().construct_mapping(node, deep).items()}

    for kind, pattern, first in _YAML_WORDS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(first))
    try:
        table = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(table, dict | None):
        raise ValueError(f"a {type(table).__name__}, where keys and values should be")
    return table or {}


_YAML = (".yaml", ".yml")
_YAML_MERGE = "tag:yaml.org,2002:merge"
_YAML_WORDS = (
    ("bool", r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("merge", r"<<$", "<"),
)
"""The kinds of plain words of YAML 1.2 that configurations have, and how they begin."""


def _another(path: Path, error: Exception) -> str:
    """The fix for what is no TOML: YAML, JSON, a Hugging Face model's file, or no file at all."""
    if isinstance(error, OSError):
        return on_hub(path.parent)
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if isinstance(table, dict) and "model_type" in table:
        return f"this describes a Hugging Face model: functron convert hf:{path.parent} run:RUN"
    if path.suffix in _YAML:
        return ""
    write = "write it as TOML, with steps = 10 for a value and [gpt] above those of a table; "
    write += "functron train leaves a complete config.toml in its run folder to begin from"
    if table is not None or path.suffix == ".json":
        return f"this is JSON: {write}"
    like = re.search(r"^\s*[\w.-]+:(\s|$)", text, re.MULTILINE)
    return f"this is YAML: give it a name that ends in .yaml, or {write}" if like else ""


def dump(config: TrainConfig) -> str:
    """`config` as TOML text that `load` reads back: complete, down to every default.

    Only an architecture that is not in force, and nobody changed, is left out.
    """
    import tomli_w

    table = dataclasses.asdict(config)
    if config.architecture is not config.gpt and config.gpt == TrainConfig().gpt:
        del table["gpt"]
    return tomli_w.dumps(_plain(table))


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    # TOML has no null; single values stand before tables so that they belong to this one
    rows = {key: "none" if value is None else value for key, value in table.items()}
    values = {key: value for key, value in rows.items() if not isinstance(value, Mapping)}
    tables = {key: _plain(value) for key, value in rows.items() if isinstance(value, Mapping)}
    return values | tables


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass, whose text is compiled to find them."""
    return typing.get_type_hints(kind)


def _read(table: Mapping[str, Any], base: Any, prefix: str, problems: list[Problem]) -> dict:
    """`table`, checked against the fields of the dataclass instance `base`."""
    hints = _hints(type(base))
    names = [f.name for f in dataclasses.fields(base)]
    out = {}
    for key, value in table.items():
        where = f"{prefix}{key}"
        if key not in names:
            problems.append(Problem(where, "an unknown key", "a known one", nearest(key, names)))
            continue
        nested, optional = _dataclass_in(hints[key])
        if nested is not None and isinstance(value, Mapping):
            inner = getattr(base, key)
            out[key] = _read(value, inner if inner is not None else nested(), f"{where}.", problems)
        elif optional and value in ("none", None):
            out[key] = None
        elif nested is None and (kind := _kind(hints[key], value)) is None:
            out[key] = _converted(hints[key], value)
        else:
            kind = "a table" if nested is not None else _kind(hints[key], value)
            problems.append(Problem(where, repr(value), str(kind)))
    return out


def _converted(hint: Any, value: Any) -> Any:
    """A value of the annotated kind from what TOML has for it."""
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return float(value) if hint is float else value


def _dataclass_in(hint: Any) -> tuple[Any, bool]:
    """The dataclass of an annotation ``X`` or ``X | None``, and whether None is allowed."""
    options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return (found[0] if found else None), types.NoneType in options


_UNIONS = (typing.Union, types.UnionType)


def _kind(hint: Any, value: Any) -> str | None:
    """The kind that is wanted where `value` is not of it, else None."""
    if typing.get_origin(hint) is Literal:
        options = typing.get_args(hint)
        return None if value in options else f"one of {', '.join(map(repr, options))}"
    if typing.get_origin(hint) in _UNIONS:
        kinds = [_kind(option, value) for option in typing.get_args(hint)]
        return None if None in kinds else " or ".join(map(str, kinds))
    if typing.get_origin(hint) is tuple:  # of any number of whole numbers
        ok = isinstance(value, list | tuple) and all(_kind(int, each) is None for each in value)
        return None if ok else "a list of whole numbers"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    fits = (int, float) if hint is float else (hint,)
    ok = isinstance(value, fits) and (hint is bool or not isinstance(value, bool))
    return None if ok else words.get(hint, str(hint))


def _rebuild(base: Any, values: Mapping[str, Any]) -> Any:
    """`base` with `values` replaced, at any depth."""
    hints = _hints(type(base))
    new = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = getattr(base, key)
            value = _rebuild(_dataclass_in(hints[key])[0]() if inner is None else inner, value)
        new[key] = value
    return dataclasses.replace(base, **new)
