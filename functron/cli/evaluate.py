"""``functron evaluate | sample``: a trained model's losses on held-out texts, and its own texts."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from functron import checkpoint
from functron.checkpoint.restore import read_params
from functron.cli.launch import RunOptions, choose_device, join, launch, leave
from functron.cli.options import parse
from functron.cli.process import Process, current, grow_segments, mistakes
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import Need, Needs, number_problems, setting
from functron.core.tables import bytes_text
from functron.data import Tokenizer
from functron.data.mapped_files import TextTokenizer, encode_prompt
from functron.data.token_datasets import Sliding
from functron.data.tokenizer import ByteTokenizer, open_tokenizer
from functron.models import generation, gpt, lora
from functron.models.generation import Draw, generate
from functron.models.options import ModelOptions
from functron.program.cost import free_memory_bytes
from functron.spmd import DATA_AXES, BoundMesh, Mesh
from functron.spmd.params import history_mask, param_specs
from functron.training import data, run_folder
from functron.training.checks import sequence_parts
from functron.training.config import ParallelismConfig, TrainConfig, configure, load
from functron.training.convert import newest_params
from functron.training.evaluation import (
    HeldOut,
    check,
    evaluate,
    loss_memory_bytes,
    loss_program,
    measure_programs,
    open_sets,
    open_texts,
    problems_of,
    slide,
)
from functron.training.records import finite
from functron.training.run import own_part
from functron.training.setup import make_setup, rules_of
from functron.training.tasks import (
    TasksConfig,
    check_tasks,
    language_problems,
    make_language_model,
    score_tasks,
)
from functron.transforms import Gather

TextProgram = Callable[[dict, Mesh | BoundMesh, torch.device], str]
"""``(params, mesh, device)`` to the text."""
_ANY_SEQ = 2048  # default for models without a longest sequence
_LEAST_SEQ = 256  # the shortest that is tried where memory does not suffice
_LOSS_CHUNK_TOKENS = 1024  # limits the memory of logits


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RunOptions):
    """Evaluate a trained model on held-out texts, or on tasks: loss, perplexity, and bits per byte.

    Every token of a text but the first is predicted once, from up to seq tokens before it. A file
    of text is one text; a file of tokens is one text too, or one per document where the run masks
    documents. In conversations only the assistant's tokens count.

    Attributes:
        data: sets by name, such as "wiki=PREFIX1 code=PREFIX2", each read as the run reads its
            data; empty: the run's own evaluation sets, or the validation part of its split.
        seq: tokens that the model reads at a time; 0: its longest sequence (2048 where it has
            none), or shorter where memory does not suffice. BERT and T5 read samples as long as in
            the run; incomplete ones are left out.
        stride: tokens between the starts of two windows of seq tokens; only the last stride tokens
            of a window count. A small stride gives each more context and takes longer; 0: seq.
        batches: batches of each set; 0: the whole set once.
        batch: windows per batch, over all ranks; 0: as many tokens per rank as in the run.
        compile: compile what computes the loss, for long sets: all windows are then padded to the
            length of the longest. Experts have the room that --expert-room of the run bounds.
        tasks: tasks of lm-evaluation-harness in place of texts, by names separated by commas
            (pip install lm-eval).
        task_folder: YAML files of more tasks.
        core: folder of local tasks, core.yaml, eval_meta_data.csv and eval_data/, as the bundles of
            DCLM's CORE metric.
        shots: solved examples before each question of tasks; -1: as each task has it.
        limit: questions of each task; 0: all.
        json: print a JSON object instead of lines.
    """

    data: str = ""
    seq: int = setting(0, least=0)
    stride: int = setting(0, least=0)
    batches: int = setting(0, least=0)
    batch: int = setting(0, least=0)
    compile: bool = False
    tasks: str = ""
    task_folder: str = ""
    core: str = ""
    shots: int = setting(-1, least=-1)
    limit: int = setting(0, least=0)
    json: bool = False

    @property
    def asked(self) -> TasksConfig:
        """The tasks to evaluate on."""
        size = self.batch or TasksConfig.batch
        return TasksConfig(self.tasks, self.core, self.task_folder, 0, self.shots, self.limit, size)


_TEXTS = Need(lambda c: not c.asked.is_asked, "texts", "leave it out with --tasks and --core")
_TASKS = Need(lambda c: c.asked.is_asked, "tasks", "set --tasks, or --core")
_HARNESS = Need(lambda c: bool(c.tasks), "tasks of lm-evaluation-harness", "set --tasks")

EVALUATE_NEEDS: Needs = MappingProxyType(
    {
        **dict.fromkeys(("data", "seq", "stride", "batches", "compile", "uneven"), _TEXTS),
        **dict.fromkeys(("task_folder", "shots"), _HARNESS),
        "limit": _TASKS,
    }
)
"""Conditions under which options have an effect."""


def run(arguments: Sequence[str]) -> int:
    """Print the numbers of every set, or task."""
    options = parse(EvaluateOptions, arguments, "evaluate", needs=EVALUATE_NEEDS)
    here = current()
    if options.asked.is_asked:
        return _run_tasks(options, arguments, here)
    with mistakes():
        mesh = Mesh.parse(options.mesh)
        config = _configure(options, mesh)
        _check(config, options, mesh, here)
        path = checkpoint.latest(options.run / run_folder.CHECKPOINTS)
        kind = choose_device(options.device, options.nproc)
        grow_segments(kind)
    if here is None and options.nproc:
        return launch(options.nproc, ["-m", "functron", "evaluate", *arguments])
    with mistakes():
        bound, device = join(mesh, here, kind)
        config, sets, notes = _make_sets(config, options, bound, device)
        score = _make_scorer(config, bound, device, path)
    found = score(sets)
    leave()
    if here is None or here.rank == 0:
        named = {one.name: one for one in sets}
        found = {name: _add_bits(found[name], one) for name, one in named.items()}
        print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr, flush=True)
        lines = [json.dumps(finite(found))] if options.json else _format_scores(found)
        print("\n".join(lines), flush=True)
    return 0


def _run_tasks(options: EvaluateOptions, arguments: Sequence[str], here: Process | None) -> int:
    """Print the numbers of every task."""
    with mistakes():
        mesh = Mesh.parse(options.mesh)
        config = load(options.run / run_folder.CONFIG, known_only=True)
        config = _on_mesh(config, ParallelismConfig(options.mesh))
        found = [*number_problems(options), *options.problems(mesh, here)]
        raise_problems("cannot evaluate", [*found, *language_problems(config, mesh)])
        check_tasks(options.asked)
        kind = choose_device(options.device, options.nproc)
        grow_segments(kind)
        tokenizer = _open_tokenizer("", options.run, config)
    if here is None and options.nproc:
        return launch(options.nproc, ["-m", "functron", "evaluate", *arguments])
    with mistakes():
        bound, device = join(mesh, here, kind)
        params, size = _read_params(options, config, bound, device), options.asked.batch
        model = make_language_model(params, config.gpt, tokenizer, bound, batch_size=size)
        scores = score_tasks(model, options.asked)
    leave()
    if here is None or here.rank == 0:
        named = scores.items()
        lines = [f"{task}: {name} {x:.4f}" for task, own in named for name, x in own.items()]
        print(json.dumps(finite(scores)) if options.json else "\n".join(lines), flush=True)
    return 0


def _configure(options: EvaluateOptions, mesh: Mesh) -> TrainConfig:
    """The run's configuration on this mesh and with these sets; global_batch is the run's per rank,
    or the run's where samples of a batch are compared.

    Other settings of parallelism have their defaults: those of the run may not fit this mesh.
    """
    config = load(options.run / run_folder.CONFIG, known_only=True)
    ranks = config.parallelism
    rows = config.data.global_batch
    if not data.objective_of(config).compares_rows(config):
        rows //= _count_parts(Mesh.parse(ranks.mesh), ranks.microbatches)
    uneven = options.uneven or ranks.uneven
    own = ParallelismConfig(options.mesh, ranks.nproc, microbatches=mesh["pp"], uneven=uneven)
    return configure(
        _on_mesh(config, own),
        compile=options.compile,
        log_layers_every=0,
        out=str(options.run),
        global_batch=max(rows, 1),
        eval_every=1,
        eval_data=options.data or config.evaluation.data,
        eval_batches=options.batches,
        eval_averaged=options.averaged,
    )


def _on_mesh(config: TrainConfig, ranks: ParallelismConfig) -> TrainConfig:
    """A run's configuration on these ranks; experts, which are over ep here, are one hop away."""
    moe = config.gpt.moe
    if moe is not None and moe.dispatch == "two-hop":
        config = configure(config, gpt__moe=replace(moe, dispatch="alltoall"))
    return configure(config, parallelism=ranks)


def _uses_windows(config: TrainConfig) -> bool:
    """Whether windows slide over texts; models of other objectives read whole samples."""
    return data.objective_of(config).predicts_next


def _make_sets(
    config: TrainConfig,
    options: EvaluateOptions,
    mesh: Mesh | BoundMesh,
    device: torch.device,
) -> tuple[TrainConfig, list[HeldOut], list[str]]:
    """The configuration with sizes of batches, the sets cut into them, and notes for the user.

    Collective on a bound mesh: rank 0 chooses sizes that fit into memory.
    """
    share = _count_parts(mesh, config.parallelism.microbatches)
    if not _uses_windows(config):
        config = configure(config, seq=options.seq or config.data.seq)
        joined = data.objective_of(config).compares_rows(config)
        usual = config.data.global_batch * (1 if joined else share)
        config = configure(config, global_batch=options.batch or usual)
        note = f"in samples of {config.data.seq} tokens; incomplete last ones are left out"
        return (
            config,
            open_sets(config),
            [] if config.family.measures(config.architecture) else [note],
        )
    texts = open_texts(config)
    longest = max(int(one.lengths.max(initial=0)) for one in texts.values())
    first = not isinstance(mesh, BoundMesh) or mesh.rank == 0
    chosen = [_choose_sizes(config, options, mesh, device, longest) if first else None]
    if isinstance(mesh, BoundMesh):
        dist.broadcast_object_list(chosen, device=device)
    assert chosen[0] is not None
    config, notes = chosen[0]
    stride, multiple = options.stride or config.data.seq, sequence_parts(config, mesh)[0]
    if options.compile:  # one program for windows of all lengths
        multiple *= -(-min(config.data.seq, max(longest, 1)) // multiple)
    windows = {"multiple": multiple, "exact": bool(_find_capacity(config))}
    sets = [slide(name, one, config, stride, **windows) for name, one in texts.items()]
    # each window is of one document: there is nothing to mask
    return configure(config, mask_documents=False, pack=""), sets, notes


def _choose_sizes(
    config: TrainConfig,
    options: EvaluateOptions,
    mesh: Mesh | BoundMesh,
    device: torch.device,
    longest: int,
) -> tuple[TrainConfig, list[str]]:
    """The configuration with seq and global_batch that fit into memory, and notes for the user.

    Args:
        config: of the run, with its seq, and its global_batch per rank and microbatch.
        longest: number of targets of the longest text.
    """
    share = _count_parts(mesh, config.parallelism.microbatches)
    model, on_a_rank = config.architecture, config.data.global_batch * config.data.seq
    parts = sequence_parts(config, mesh)[0]
    most = options.seq or getattr(model, "max_seq", _ANY_SEQ) // parts * parts
    chunked = "loss_chunk_tokens" in config.family.settings and not config.gpt.logit_cap
    chunk = config.compute.loss_chunk_tokens or _LOSS_CHUNK_TOKENS * chunked
    free, base = free_memory_bytes(device), make_setup(config, mesh)
    if isinstance(mesh, BoundMesh) and device.type == "cpu":
        free //= mesh.size  # assuming that all ranks are on this machine

    def sized(seq: int) -> tuple[TrainConfig, int]:
        tokens = -(-min(seq, max(longest, 1)) // parts) * parts
        batch = options.batch or max(on_a_rank // tokens, 1) * share
        rows = batch // config.parallelism.microbatches
        made = configure(config, seq=seq, global_batch=batch)
        made = configure(made, loss_chunk_tokens=chunk if rows * tokens > chunk else 0)
        return made, loss_memory_bytes(replace(base, config=made), rows, tokens)

    seq, (made, needed) = most, sized(most)
    first = needed
    while not options.seq and needed > free and seq >= 2 * max(parts, _LEAST_SEQ):
        # below the longest text no window becomes shorter
        seq = min(seq, -(-longest // parts) * parts) // 2 // parts * parts
        made, needed = sized(seq)
    if seq == most:
        return made, []
    sizes = f"{bytes_text(first)} of {bytes_text(free)} free"
    return made, [f"seq {seq}, of {most} that the model reads: {sizes}; --seq sets another"]


def _find_capacity(config: TrainConfig) -> str:
    """``capacity_over`` of experts with limited capacity; empty: there are none."""
    moe = config.gpt.moe if config.architecture is config.gpt else None
    return moe.capacity_over if moe is not None and moe.capacity_factor else ""


def _count_parts(mesh: Mesh | BoundMesh, microbatches: int) -> int:
    """Parts of a batch: microbatches of all data-parallel ranks."""
    return microbatches * math.prod(mesh[axis] for axis in DATA_AXES)


def _check(config: TrainConfig, options: EvaluateOptions, mesh: Mesh, here: Process | None) -> None:
    found = [*number_problems(options)]
    share = _count_parts(mesh, config.parallelism.microbatches)
    if options.batch > 0 and options.batch % share:
        fix = f"set it to {-(-options.batch // share) * share}"
        found.append(Problem("batch", str(options.batch), f"a multiple of {share}", fix))
    found += _check_windows(config, options, mesh)
    if options.compile and mesh["pp"] > 1 and (options.nproc or here is not None):
        wanted = "nothing with stages on processes, which are not compiled here"
        found.append(Problem("compile", "true", wanted, "leave it out, or pp"))
    found += [*options.problems(mesh, here), *problems_of(config)]
    raise_problems("cannot evaluate", found)
    # with seq=1, as texts may be shorter than windows
    check(configure(config, seq=1) if _uses_windows(config) else config)


def _check_windows(config: TrainConfig, options: EvaluateOptions, mesh: Mesh) -> Iterator[Problem]:
    """Problems of seq and stride with this model."""
    model, family = config.architecture, config.family
    most = getattr(model, "max_seq", None)
    seq = options.seq or most or _ANY_SEQ
    if most is not None and options.seq > most:
        yield Problem("seq", str(options.seq), f"at most {family.name}.max_seq={most}")
    parts, why = sequence_parts(config, mesh)
    if options.seq % parts:
        fix = f"set it to {-(-options.seq // parts) * parts}"
        yield Problem("seq", str(options.seq), f"a multiple of {parts}: {why}", fix)
    if parts > 1 and _uses_windows(config) and _find_capacity(config):
        wanted = f"whole sequences per rank, not {why}: padding at the ends of texts would take "
        wanted += "part of the experts' limited capacity"
        yield Problem("mesh", repr(options.mesh), wanted, "leave cp and ulysses out")
    if _uses_windows(config) and _find_capacity(config) == "batch":
        wanted = "'sequence': otherwise a text's loss depends on the others in its batch"
        fix = "set it so in the run's config.toml"
        yield Problem("gpt.moe.capacity_over", "'batch'", wanted, fix)
    if options.compile and _uses_windows(config) and _find_capacity(config):
        wanted = "false: windows of one length would be padded, and take part of the experts' "
        wanted += "limited capacity"
        yield Problem("compile", "true", wanted, "leave it out")
    if options.stride and not _uses_windows(config):
        wanted = f"nothing with {family.title}, which reads whole samples"
        yield Problem("stride", str(options.stride), wanted, "leave it out")
    elif options.stride > seq:
        yield Problem("stride", str(options.stride), f"at most seq={seq}", "leave it out")


def _make_scorer(
    config: TrainConfig, mesh: Mesh | BoundMesh, device: torch.device, path: Path
) -> Callable[[Sequence[HeldOut]], dict]:
    """A function that evaluates sets with a checkpoint's parameters, which alone are read."""
    names = list(checkpoint.Checkpoint(path))
    if not lora.has_adapters(names):
        config = configure(config, lora_rank=0)  # the run's first checkpoint has none yet
    made = make_setup(config, mesh)
    histories = tree.paths(tree.partition(made.defs, history_mask(made.defs))[0])
    if histories and set(names).isdisjoint(f"params/{name}" for name in histories):
        made = make_setup(configure(config, products=""), mesh)  # nor magnitudes
    like, where = made.init(random.key(0).to("meta")), made.placement
    if config.evaluation.averaged:
        assert made.averaged is not None
        state = checkpoint.restore(path, like, placement=where, device=device)
        params = made.averaged(state)
    else:
        only = {"params": like.params}
        params = checkpoint.restore(path, only, placement=where, device=device)["params"]
    program, measures = loss_program(made), measure_programs(made)

    def batch(held_out: HeldOut, index: int) -> dict[str, torch.Tensor]:
        host = own_part(mesh, lambda part: held_out.batch(index, part))
        return tree.map(lambda leaf: leaf.to(device), host)

    return lambda sets: evaluate(program, params, sets, batch, measures)


def _add_bits(numbers: dict[str, float], held_out: HeldOut) -> dict[str, float | None]:
    """The numbers with ``bits_per_byte`` of the text; None: unknown, or not all of it counts."""
    samples, bits = held_out.samples, None
    whole = held_out.num_batches * held_out.global_batch >= samples.num_samples
    num_bytes = samples.num_bytes if whole and isinstance(samples, Sliding) else None
    if num_bytes and math.isfinite(numbers["loss"]):
        bits = numbers["loss"] * numbers["tokens"] / math.log(2) / num_bytes
    return {**numbers, "bits_per_byte": bits}


def _format_scores(found: dict) -> list[str]:
    lines = []
    for name, numbers in found.items():
        bits = numbers["bits_per_byte"]
        more = "" if bits is None else f", {bits:.4f} bits per byte"
        usual = ("loss", "perplexity", "tokens", "bits_per_byte")
        more += "".join(f", {own} {x:.4f}" for own, x in numbers.items() if own not in usual)
        counts = f"loss {numbers['loss']:.4f}, perplexity {numbers['perplexity']:.2f}{more}"
        lines.append(f"{name}: {counts}, {numbers['tokens']:,} tokens")
    return lines


# --- text


@dataclass(frozen=True, kw_only=True)
class SampleOptions(RunOptions):
    """Continue a prompt with a trained model.

    Attributes:
        prompt: the text to continue; for a T5 with <extra_id_0>, <extra_id_1>, ... in place of
            missing spans.
        tokens: the most tokens to add (bytes, where the run has no tokenizer).
        tokenizer: tokenizer file or folder, or bytes; empty: the run's own.
        chat: treat the prompt as a user's message, and print the answer only.
        temperature: of the softmax: 1: the model's distribution; below 1: sharper; 0: greedy.
        top_k: sample among the k likeliest tokens; 0: all.
        top_p: sample among the fewest tokens with this total probability; 1: all.
        seed: random seed.
        mesh: axes and sizes, such as tp=4 or fsdp=2,tp=2, that shard a model too large for one
            rank; the text is the same. Data-parallel ranks read copies of the prompt. Empty: one
            rank.
    """

    prompt: str
    tokens: int = 200
    tokenizer: str = ""
    chat: bool = False
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


_DRAWN = Need(
    lambda c: c.tokens > 0 and c.temperature > 0,
    "tokens that are sampled",
    "set --temperature above 0, and --tokens",
)

SAMPLE_NEEDS: Needs = MappingProxyType(
    {
        "temperature": Need(lambda c: c.tokens > 0, "tokens to add", "set --tokens above 0"),
        "top_k": _DRAWN,
        "top_p": Need(lambda c: c.top_p == 1 or _DRAWN.holds(c), _DRAWN.wanted, _DRAWN.fix),
        "seed": _DRAWN,
    }
)
"""Conditions under which options have an effect; top_p=1 may always be given."""


def sample(arguments: Sequence[str]) -> int:
    """Print the continued prompt, or the answer to it."""
    options = parse(SampleOptions, arguments, "sample", needs=SAMPLE_NEEDS)
    here = current()
    with mistakes():
        mesh = Mesh.parse(options.mesh)
        config = load(options.run / run_folder.CONFIG, known_only=True)
        uneven = options.uneven or config.parallelism.uneven
        ranks = ParallelismConfig(options.mesh, uneven=uneven)
        config = _on_mesh(config, ranks)
        _check_prompt(options, config, mesh, here)
        kind = choose_device(options.device, options.nproc)
        grow_segments(kind)
        tokenizer = _open_tokenizer(options.tokenizer, options.run, config)
        complete = _continue_prompt if config.family.respond is None else _answer_prompt
        program = complete(options, config, tokenizer)
    if here is None and options.nproc:
        return launch(options.nproc, ["-m", "functron", "sample", *arguments])
    if here is None and mesh.size > 1:
        note = f"mesh   {options.mesh}: {mesh.size} ranks simulated in this process"
        print(f"{note} (--nproc {mesh.size} starts processes)", file=sys.stderr)
    with mistakes():
        bound, device = join(mesh, here, kind)
        text = program(_read_params(options, config, bound, device), bound, device)
    leave()
    if here is None or here.rank == 0:
        print(text, flush=True)
    return 0


def _check_prompt(
    options: SampleOptions, config: TrainConfig, mesh: Mesh, here: Process | None
) -> None:
    """Refuse models that cannot be sampled from, or not on this mesh."""
    model, family, found = config.architecture, config.family, []
    got = f"a run of {family.title}"
    if data.objective_of(config).prompt is None:
        fix = (
            f"fill in what is masked with {family.name}.forward, as examples/pretrain_bert.py does"
        )
        found.append(Problem(str(options.run), got, "one that continues text", fix))
    if family.iterate_logits is not None and mesh.size > 1:
        wanted = f"one rank with {family.title}"
        found.append(Problem("mesh", options.mesh, wanted, "leave it out"))
    if family.respond is not None and options.chat:
        found.append(Problem("chat", got, "a model that converses", "leave it out"))
    raise_problems("cannot sample", [*found, *options.problems(mesh, here)])
    if isinstance(model, gpt.GPTConfig) and mesh.size > 1:
        generation.check(model, mesh)
    rules_of(config, mesh)


def _read_params(
    options: RunOptions,
    config: TrainConfig,
    mesh: Mesh | BoundMesh,
    device: torch.device,
) -> dict:
    """The parameters of the newest checkpoint, sharded over the mesh."""
    read = functools.partial(read_params, rules=rules_of(config, mesh), mesh=mesh)
    found = newest_params(options.run, config, averaged=options.averaged, read=read)
    return tree.map(lambda leaf: leaf.to(device), found)


def _gather_at_use(config: TrainConfig, mesh: Mesh | BoundMesh) -> ModelOptions:
    """Options of a model whose parameters lie on the mesh as `_read_params` has them."""
    defs = config.family.defs(config.architecture)
    return ModelOptions(gather=Gather(param_specs(defs, rules_of(config, mesh))))


def _continue_prompt(
    options: SampleOptions, config: TrainConfig, tokenizer: TextTokenizer
) -> TextProgram:
    """Continues the prompt, or answers it."""
    ids, model = _encode_prompt(options, tokenizer), config.architecture

    def program(params: dict, mesh: Mesh | BoundMesh, device: torch.device) -> str:
        tokens = generate(
            params,
            model,
            _repeat_prompt(ids, mesh, device),
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=random.key(options.seed).to(device),
            stop=tokenizer.stops,
            mesh=mesh if mesh.size > 1 else None,
            options=_gather_at_use(config, mesh) if mesh.size > 1 else None,
        )
        new = _cut_at_stop(tokens[0, len(ids) :].tolist(), tokenizer.stops)
        if not isinstance(tokenizer, Tokenizer) or not options.chat:
            return tokenizer.decode(ids + new)
        prompt = tokenizer.render(_begin_conversation(options), add_generation_prompt=True)
        return tokenizer.decode(new).removeprefix(" " * prompt.endswith(" "))

    return program


def _answer_prompt(
    options: SampleOptions, config: TrainConfig, tokenizer: TextTokenizer
) -> TextProgram:
    """Answers the prompt, such as the spans that are missing in a T5's."""
    model, respond = config.architecture, config.family.respond
    open_prompts = data.objective_of(config).open_prompts
    assert respond
    assert open_prompts
    prompts = open_prompts(config, data.reader_of(configure(config, out=str(options.run))))
    ids = prompts.encode(options.prompt, tokenizer)

    def program(params: dict, mesh: Mesh | BoundMesh, device: torch.device) -> str:
        tokens = respond(
            params,
            model,
            _repeat_prompt(ids, mesh, device),
            options.tokens,
            draw=Draw(options.temperature, options.top_k, options.top_p),
            key=random.key(options.seed).to(device),
            stop={prompts.end},
            mesh=mesh,
            options=_gather_at_use(config, mesh),
        )
        return prompts.decode(_cut_at_stop(tokens[0].tolist(), {prompts.end}), tokenizer)

    return program


def _repeat_prompt(ids: list[int], mesh: Mesh | BoundMesh, device: torch.device) -> torch.Tensor:
    """This process's rows: the prompt, once for every data-parallel rank."""
    simulated = () if isinstance(mesh, BoundMesh) else DATA_AXES
    copies = math.prod(mesh[axis] for axis in simulated)
    return torch.tensor([ids] * copies, dtype=torch.int64, device=device)


def _cut_at_stop(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Tokens up to the first stop, which a row repeats while others go on."""
    ends = (index for index, token in enumerate(tokens) if token in stops)
    return tokens[: next(ends, len(tokens)) + 1]


def _open_tokenizer(given: str, run: Path, config: TrainConfig) -> TextTokenizer:
    """The tokenizer that is given, or else the run's own."""
    if given:
        how = {"pattern": config.data.tokenizer_pattern, "rules": config.data.rules}
        return open_tokenizer(given, **how)
    found = data.tokenizer_of(configure(config, out=str(run)))
    if found is None and data.is_on_disk(config):
        got = "a run on tokens without a tokenizer"
        fix = "name it: --tokenizer FILE, or --tokenizer bytes"
        refuse("cannot read", "tokenizer", got, "their tokenizer", fix)
    return found or ByteTokenizer()


def _encode_prompt(options: SampleOptions, tokenizer: TextTokenizer) -> list[int]:
    if options.chat:
        if not isinstance(tokenizer, Tokenizer):
            got = "a run on bytes" if tokenizer.file is None else str(tokenizer.file)
            fix = "leave it out, or train with --tokenizer"
            wanted = "one with a tokenizer's template"
            refuse("cannot write a conversation", "chat", got, wanted, fix)
        return tokenizer.encode_prompt(_begin_conversation(options))
    return encode_prompt(tokenizer, options.prompt)


def _begin_conversation(options: SampleOptions) -> list[dict[str, str]]:
    return [{"role": "user", "content": options.prompt}]
