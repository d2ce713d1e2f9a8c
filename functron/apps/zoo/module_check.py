"""Gradients of a module before its first step: those of the mesh compared with the module's own.

A copy that is cut in depth and width takes seconds on one process, whatever the run's size. It has
the run's rules of tp, ZeRO, fsdp, remat and split sequences. Axes are cut to their smallest prime
factor, and pipelines to two stages, each with the parameters that it uses alone.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from functron.core import random, tree
from functron.core.errors import Problem, raise_problems
from functron.models.family import Family, family_of
from functron.models.options import ModelOptions, Remat
from functron.nn import IGNORE_INDEX
from functron.partitioning.comparison import advise, find_differences
from functron.spmd import DATA_AXES, Mesh, P
from functron.spmd.params import init_params, num_params, param_specs
from functron.spmd.shard_map import shard_map
from functron.transforms.gradient import sync_gradients, value_and_grad
from functron.transforms.parameter_gather import Gather

MOST_PARAMETERS = 20_000_000
"""Of a module that is compared."""
_FEW = 1_000_000  # modules with fewer parameters are not cut

DenseLoss = Callable[[Any, Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]
"""``(config, params, tokens, targets)`` to the sum of losses, of the module as it is."""


class CheckSettings(NamedTuple):
    """The parts of a run that its gradients depend on, beside its family.

    Attributes:
        model: the config of the module.
        mesh: of the run.
        fsdp: the axes that split parameters until they are used.
        remat: of layers.
        stream: the spec of what passes between layers.
    """

    model: Any
    mesh: Mesh
    fsdp: tuple[str, ...]
    remat: Remat
    stream: P


class CheckResult(NamedTuple):
    """The result of a comparison.

    Attributes:
        text: a phrase for the beginning of the run.
        compared: whether there was one.
        problems: gradients that differ.
        title: of an error about them.
    """

    text: str
    compared: bool
    problems: tuple[Problem, ...] = ()
    title: str = ""


def find_check(run: Any, dense_loss: DenseLoss) -> CheckResult | None:
    """The result of the comparison of a `functron.training.run.Run`; None: nothing is split.

    It takes seconds the first time.
    """
    setup, config = run.setup, run.config
    mesh = _cut_mesh(run.mesh.mesh)
    if mesh.size == 1:
        return None
    fsdp = ("dp", "fsdp") if config.parallelism.zero == 3 else ("fsdp",)
    given = CheckSettings(
        config.architecture, run.mesh.mesh, fsdp, config.compute.remat, setup.stream
    )
    return _check_once(given, dense_loss)


def check_first(session: Any, dense_loss: DenseLoss) -> None:
    """Compare before a run's first step, and write an event ``check``. Collective: rank 0 does it.

    Raises:
        ValueError: gradients differ; all are listed.
    """
    found = session.job.broadcast(lambda: find_check(session.run, dense_loss))
    if found is not None:
        names = [problem.path for problem in found.problems]
        about = {"text": found.text, "compared": found.compared, "differ": names}
        session.write("check", session.run.start, **about)
        raise_problems(found.title, found.problems)


@functools.lru_cache(8)
def _check_once(given: CheckSettings, dense_loss: DenseLoss) -> CheckResult:
    began, mesh, family = time.monotonic(), _cut_mesh(given.mesh), family_of(given.model)
    unchecked = "unchecked: gradients of this module were not compared: "
    with tempfile.TemporaryDirectory() as folder:
        try:
            config, how = _cut_module(family, given, Path(folder))
            count = num_params(family.defs(config))
            got, wanted = _compute_both(family, given, config, mesh, dense_loss)
        except Exception as error:  # whatever a module does once it is cut
            why = " ".join(str(error).split())
            return CheckResult(f"{unchecked}{why[:300]} (off: --module.check off)", False)
    found = find_differences(got, wanted)
    took = f"{time.monotonic() - began:.1f} s"
    what = f"{found.num_leaves - 1} gradients and the loss of {how}, {count:,} parameters"
    text = f"on {mesh}, simulated, {what}: the module's to {found.largest:.0e}, in {took}"
    title = f"on {mesh}, simulated, gradients of {how} are not the module's; {advise(mesh)}"
    return CheckResult(f"gradients {text}", True, found.problems, title)


def _cut_mesh(mesh: Mesh) -> Mesh:
    def factor(size: int) -> int:
        return next((n for n in range(2, size) if size % n == 0), size)

    cut = {name: factor(size) for name, size in mesh.axes}
    return Mesh(**cut | ({"pp": 2} if cut.get("pp", 1) > 1 else {}))


# --- the module


def _cut_module(family: Family, given: CheckSettings, folder: Path) -> tuple[Any, str]:
    """The config of the module to compare, with the run's specs as its rules, and what it is.

    Raises:
        ValueError: it has too many parameters, and cannot be cut.
    """
    config = given.model
    count, why = num_params(family.defs(config)), ""
    own = replace(
        config, dropouts="off", dtype="float64" if config.dtype == "float64" else "float32"
    )
    kind, _, path = config.origin.partition(":")
    if count > _FEW and kind == "hf-module":
        try:
            cut_settings(Path(path), folder)
            vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
            least = {"vocab_size": vocab, "max_seq": min(config.max_seq, _LENGTH)}
            cut = replace(own, origin=f"{kind}:{folder}", rules="", **least)
            size = num_params(family.defs(cut))
            if size <= MOST_PARAMETERS:
                return _with_rules(family, given, cut), f"a copy cut from {count:,} parameters"
            why = f"a copy that is cut has {size:,} parameters"
        except Exception as error:  # of transformers, whose configurations check themselves
            why = " ".join(str(error).split())
    if count > MOST_PARAMETERS:
        why = why or "a function makes it, so that no configuration can be cut"
        raise ValueError(f"it has {count:,} parameters, more than {MOST_PARAMETERS:,}, and {why}")
    return _with_rules(family, given, own), "the module"


def _with_rules(family: Family, given: CheckSettings, config: Any) -> Any:
    """The config with rules by which tp splits each parameter as it does the run's."""
    if given.mesh["tp"] == 1:
        return config
    defs = family.defs(given.model)
    rules = family.rules(given.model, given.mesh, fsdp=())
    entries = []
    chosen = dict(tree.items(param_specs(defs, rules), is_leaf=lambda x: isinstance(x, P)))
    for path, each in tree.items(family.defs(config)):
        spec = [*chosen[path], *[None] * len(each.shape)][: len(each.shape)]
        name = path.replace("/", ".").replace(".", r"\.")
        entries.append(f"^{name}$ = {','.join('-' if x is None else 'tp' for x in spec)}")
    return replace(config, rules="\n".join(line for line in entries if line[-2:] != "= "))


_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim",
                     "n_inner", "dff", "mlp_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads",
                     "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_nope_head_dim", "v_head_dim", "index_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts",
                     "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk",
                     "index_n_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size",
                     "shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    "qk_rope_head_dim": 4, "rotary_dim": 4, "index_topk": 32, "sliding_window": 8,
    "window_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 64,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_chunk_size": 4, "state_size": 8,
    "time_step_rank": 4, "vocab_size": 64,
}  # fmt: skip
"""By names of fields of transformers' configurations; other fields keep their values."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_MOST = {
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group",
                     "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), 64),
}  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LENGTH = 16  # of the samples, in tokens


def cut_settings(path: Path, folder: Path) -> None:
    """Write config.json of a model of transformers that is cut in depth and width, into `folder`.

    It has as many layers as it takes to see one of each kind, two at least; 4 heads; 4 experts.
    """
    auto = importlib.import_module("transformers").AutoConfig
    settings = auto.from_pretrained(path, local_files_only=True).to_dict()
    (folder / "config.json").write_text(json.dumps(_cut_fields(settings)))


def _cut_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    found = {
        k: _cut_fields(v) if isinstance(v, dict) and all(isinstance(x, str) for x in v) else v
        for k, v in settings.items()
    }
    counts = {name: value for name, value in settings.items() if is_count(value)}
    cut = {name: size for name, size in _SIZES.items() if name in counts}
    cut |= {name: min(size, counts[name]) for name, size in _MOST.items() if name in counts}
    heads = max((counts[x] for x in settings if x in counts and _SIZES.get(x) == 4), default=0)
    latent = "qk_rope_head_dim" in counts
    for name in _KV_HEADS:
        if name in counts:
            several = 4 if latent or counts[name] == heads else 2
            cut[name] = min(counts[name], several)
    if latent and "head_dim" in counts:
        cut["head_dim"] = _SIZES["qk_rope_head_dim"]
    for name in _LAYERS:
        if name in counts:
            cut[name] = min(counts[name], _count_layers(settings, counts[name]))
    depth = max((counts[name] for name in _LAYERS if name in counts), default=0)
    layers = max((cut[name] for name in _LAYERS if name in cut), default=0)
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == depth > 1:
            cut[name] = value[:layers]
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            cut[name] = value[: _SIZES["head_dim"] // 2]
        elif name.endswith("_token_id"):
            largest = max(value) if isinstance(value, list) and value else counts.get(name, 0)
            if largest >= _SIZES["vocab_size"]:
                cut[name] = 0
    return {**found, **cut}


def _count_layers(settings: Mapping[str, Any], depth: int) -> int:
    """How many layers have one of each kind among them."""
    lists = [x for x in settings.values() if isinstance(x, list) and len(x) == depth]
    first = [each.index(kind) for each in lists for kind in each]
    return max([2, *(number + 1 for number in first)])


# --- what is compared


def _compute_both(
    family: Family, given: CheckSettings, config: Any, mesh: Mesh, dense_loss: DenseLoss
) -> tuple[dict, dict]:
    """The loss and gradients on a simulated mesh, as a step computes them, and the module's own."""
    defs = family.defs(config)
    params = _draw_parameters(init_params(random.key(0), defs))
    batch = _draw_batch(config, 2 * math.prod(mesh[axis] for axis in DATA_AXES))
    specs = param_specs(defs, family.rules(config, mesh, fsdp=given.fsdp))
    options = ModelOptions(given.stream, given.remat, Gather(specs))
    differentiate = _cut_stages if mesh["pp"] > 1 else _leave_whole
    compute = differentiate(family, config, options)

    def step(params, batch):
        value, grads = compute(params, batch)
        return {"loss": value, "gradients": sync_gradients(grads, specs)}

    made = {"loss": P(), "gradients": specs}
    stages = "pp" if mesh["pp"] > 1 else None
    mapped = shard_map(step, mesh, (specs, P(DATA_AXES)), made, check=False, stages=stages)
    got = mapped(params, batch)
    names = [path.replace("/", ".") for path in tree.paths(params)]
    structure = tree.structure(params)

    def own_loss(params):
        flat = dict(zip(names, tree.leaves(params), strict=True))
        return dense_loss(config, flat, batch["tokens"], batch["targets"])

    leaves = [x.detach().requires_grad_() for x in tree.leaves(params)]
    value = own_loss(tree.unflatten(structure, leaves))
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return got, {"loss": value, "gradients": tree.unflatten(structure, grads)}


_Differentiated = Callable[[Any, Any], tuple[torch.Tensor, Any]]


def _leave_whole(family: Family, config: Any, options: ModelOptions) -> _Differentiated:
    """``(params, batch)`` to the loss and gradients of the whole."""

    def compute(params, batch):
        return value_and_grad(lambda params: family.loss(config, params, batch, options))(params)

    return compute


def _cut_stages(family: Family, config: Any, options: ModelOptions) -> _Differentiated:
    """The same, of two stages of a pipeline and one microbatch, of which routers' losses are."""
    cut = family.stages
    assert cut is not None  # a mesh has pp for families with stages alone
    # whoever lists the families, such as the hub, needs no schedules and no compiler
    pipeline = importlib.import_module("functron.pipeline")
    layout, schedule = pipeline.even_layout(2, cut.num_layers(config)), pipeline.make("1f1b", 2, 1)

    def stage(part, params, x, batch):
        return cut.loss(config, part, params, x, batch, options)

    partition = pipeline.Partition(layout, schedule.pipes, cut.uses(config))
    return pipeline.pipelined(stage, partition, schedule).value_and_grad


def _draw_parameters(params: tree.Tree) -> tree.Tree:
    """Parameters with noise, so that no gradient is 0 for weights that begin with it, or small."""
    generator = torch.Generator().manual_seed(0)

    def add(x: torch.Tensor) -> torch.Tensor:
        scale = x.shape[-1] ** -0.5 if x.dim() > 1 else 0.1
        return x + scale * torch.randn(x.shape, generator=generator).to(x.dtype)

    return tree.map(add, params)


def _draw_batch(config: Any, rows: int) -> dict[str, torch.Tensor]:
    """Tokens and targets, some of which do not count, with more in some samples than in others."""
    length = min(_LENGTH, config.max_seq)
    generator = torch.Generator().manual_seed(0)
    shape = rows, length + 1
    tokens = torch.randint(min(1, config.vocab_size - 1), config.vocab_size, shape,
                           generator=generator)  # fmt: skip
    targets = tokens[:, 1:].clone()
    targets[0, : length // 2] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def introduce_check(run: Any, dense_loss: DenseLoss) -> Iterator[str]:
    """A line for the beginning of a run."""
    if (found := find_check(run, dense_loss)) is not None:
        yield f"check  {found.text}"
