"""Modules in training: any `torch.nn.Module` that makes logits of tokens, as a family of models.

A decoder of transformers as its folder describes it, or what a function of the user's returns, is
traced as it is and partitioned (`functron.partition`). Its parameters keep their names, and begin
as the module's own. Tensor parallelism follows from a few rules by name, or from none: then specs
are found (`functron.partitioning.search`). Fully sharded parameters need no rules.

The loss is the sum of cross-entropies of the module's logits, over a vocabulary that may stay
split, so that labels are not given to it. A run's other settings are those of all families.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn as torch_nn
from torch.nn import functional as F

from functron import nn, partitioning
from functron.apps.zoo import module_layers
from functron.apps.zoo.module_adapters import (
    attach_adapters,
    find_linears,
    list_adapted,
    shape_adapters,
    split_adapters,
)
from functron.apps.zoo.module_check import check_first, introduce_check
from functron.apps.zoo.module_trial import NUM_TOKENS, Packing, drops_out, pack_inputs, try_module
from functron.core import tree
from functron.core.errors import Problem, load_function, on_hub, raise_problems, refuse
from functron.core.settings import choice_problems, setting
from functron.core.tables import shows_differences
from functron.core.typing import Tensor
from functron.models import lora
from functron.models.config import TextConfig
from functron.models.family import Family, Objective, StageFunctions
from functron.models.options import DEFAULTS, Batch, ModelOptions, num_targets, require
from functron.pipeline import Part, whole
from functron.program.recorder import aside
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, Rules
from functron.spmd import collectives as lax
from functron.spmd.axes import Scope, enter, scope
from functron.spmd.params import ParamDef
from functron.transforms import policies

if TYPE_CHECKING:  # it reads the families
    from functron.training.config import TrainConfig

HUB, FACTORY = "hf-module", "module"
"""The schemes of origins: a folder of transformers, and a function that returns a module."""

_EXPERTS = "batched_mm"
"""The implementation of experts of transformers that has rules on meshes."""


@shows_differences
@dataclass(frozen=True, kw_only=True)
class ModuleConfig(TextConfig):
    """A module, and how it is trained.

    Attributes:
        origin: hf-module:PATH, a folder with config.json, and weights unless it is to begin with
            random ones; or module:PACKAGE.FUNCTION, which returns the module. It is read whenever
            the run begins or goes on.
        rules: how tp splits parameters: lines (or parts, between semicolons) of a regular
            expression of their names, = and tp or - for each dim, of which the first that is found
            in a name counts: (q|k|v|gate|up)_proj = tp; (o|down)_proj = -,tp. Others are whole on
            every rank of tp. Empty: they are found, which needs scipy.
        max_seq: the longest sequence that it takes, in tokens.
        dropouts: on: in training the module runs in training mode, and its dropout draws from the
            step's key, the same numbers on every mesh; off: it runs as in evaluation, without.
        router_losses: add the auxiliary losses of routers, where its config.json asks for them by
            output_router_logits. They balance a microbatch over all ranks, and so depend on the
            number of microbatches.
        check: gradients: before the first step, gradients on the mesh, simulated, are compared with
            the module's own, of a copy cut to at most 20M parameters; what cannot be cut is said to
            be unchecked; off: they are not.
    """

    vocab_multiple: int = 1
    origin: str = setting("", instead="name it as the model: --model hf-module:PATH")
    rules: str = ""
    max_seq: int = 2**31 - 1
    dropouts: Literal["on", "off"] = "on"
    router_losses: bool = True
    check: Literal["gradients", "off"] = "gradients"

    def __post_init__(self):
        found = [*fixed_problems(self, "module"), *choice_problems(self)]
        raise_problems("invalid ModuleConfig", [*found, *rule_problems(self.rules)])

    def introduce(self, run: Any) -> Iterator[str]:
        """Whether gradients were compared, among the first lines of a run."""
        return introduce_check(run, _sum_own_losses) if self.check == "gradients" else iter(())

    def hook(self, session: Any) -> None:
        """Compares gradients before the first step; nothing is done in others."""
        if self.check == "gradients":
            check_first(session, _sum_own_losses)


def fixed_problems(config: TextConfig, table: str, owner: str = "module") -> Iterator[Problem]:
    """Settings of all models of text that a model has by itself; `table` is that of its config."""
    for name, wanted in (("vocab_multiple", 1), ("dropout", 0.0)):
        if (got := getattr(config, name)) != wanted:
            told = f"{wanted}: it is the {owner}'s own"
            yield Problem(f"{table}.{name}", str(got), told, "leave it out")


# --- the module


@dataclass(frozen=True, eq=False)
class OpenedModule:
    """A module for training, whose parameters are abstract here.

    Attributes:
        module: itself.
        call: ``(params, tokens, *, router, **more)`` to its logits, and the loss of its routers if
            asked for, by the function of `functron.from_module`, which is given `more`.
        train: the same in training mode, with ``key`` and ``rows``.
        params: abstract, by name; weights that are tied come once.
        vocab_size: the width of its logits.
        max_seq: of its config.json, at most `positions`; None: it has none.
        positions: for how many it has parameters; None: it has none.
        layers: a pattern of the scopes of its layers, of a list in it; None: it has none.
        router_coefficient: of the auxiliary loss of its routers; 0: it has none.
        dropouts: what in it draws numbers in training.
        undrawn: why its training cannot be drawn from a key; empty: it can.
        packing: how it is told of packed documents.
        linears: its layers that can have low-rank additions, by name, with the dim of inputs of
            their matrices.
        problems: why it cannot be trained.
    """

    module: torch_nn.Module
    call: Callable[..., tuple[Tensor, Any]]
    train: Callable[..., tuple[Tensor, Any]]
    params: Mapping[str, Tensor]
    vocab_size: int
    max_seq: int | None
    positions: int | None
    layers: str | None
    router_coefficient: float
    dropouts: tuple[str, ...]
    undrawn: str
    packing: Packing
    linears: Mapping[str, int]
    problems: tuple[Problem, ...]


def build_module(origin: str, seed: int = 0) -> torch_nn.Module:
    """The module of an origin, with its weights, or as it initialises itself with this seed.

    Raises:
        ValueError: there is no such folder or function, or it makes no module.
    """
    kind, _, rest = origin.partition(":")
    if kind not in (HUB, FACTORY) or not rest:
        fix = f"--model {HUB}:PATH, or --model {FACTORY}:PACKAGE.FUNCTION"
        refuse("no module to train", "model", repr(origin), "a module", fix)
    make = _open_folder(Path(rest)) if kind == HUB else _open_factory(rest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make()
    if not isinstance(made, torch_nn.Module):
        got = type(made).__name__
        refuse("no module to train", "model", f"{origin}, which returns {got}", "a torch.nn.Module")
    return made.eval()


def _open_factory(name: str) -> Callable[[], Any]:
    module, _, function = name.rpartition(".")
    return load_function(f"{module}:{function}", "model")


def _open_folder(path: Path) -> Callable[[], Any]:
    if (path / "adapter_config.json").is_file():  # transformers would put layers of PEFT into it
        got, wanted = f"{HUB}:{path}, with an adapter in it", "a module alone"
        fix = f"train it by functron convert {HUB}:ADAPTER run:RUN, its two files in a folder alone"
        refuse("no module to train", "model", got, wanted, f"{fix}; or merge_and_unload() of peft")
    if not (path / "config.json").is_file():
        wanted = "a folder with config.json, as transformers' save_pretrained writes it"
        refuse("no module to train", "model", f"{HUB}:{path}", wanted, on_hub(path))
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{HUB}:{path} needs transformers; fix: pip install "functron[transformers]", or '
            "train a family of functron's own"
        ) from error
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    options: dict[str, Any] = {"experts_implementation": _EXPERTS}
    weights = [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]

    def make() -> Any:
        kind, logging = transformers.AutoModelForCausalLM, transformers.utils.logging
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            if weights:
                given = {"config": config, "dtype": "auto", "local_files_only": True}
                given["output_loading_info"] = True
                made, read = kind.from_pretrained(path, **given, **options)
                _refuse_missing(path, read)
                return made
            return kind.from_config(config, **options)
        except ValueError as error:
            raise ValueError(f"no module to train\n  - model: {HUB}:{path}: {error}") from error
        finally:
            if shown:
                logging.enable_progress_bar()

    return make


def _refuse_missing(path: Path, read: Mapping[str, Any]) -> None:
    names = sorted(
        {*read.get("missing_keys", ()), *(x[0] for x in read.get("mismatched_keys", ()))}
    )
    if names:
        got = f"no weights of this name and shape for {_list_some(names)}"
        wanted = "all of the module's: the others would be random"
        fix = "complete the files, or remove them all to begin with a random module"
        refuse("no module to train", f"{HUB}:{path}", got, wanted, fix)


def open_module(
    config: ModuleConfig, device: str = "cpu", adapted: tuple[str, ...] = ()
) -> OpenedModule:
    """The module of a config, with abstract parameters, and buffers on a device.

    It is built once in a process, with its weights, which are then let go.

    Args:
        adapted: the names of layers that have low-rank additions.

    Raises:
        ValueError: its logits do not follow from the tokens before alone, or its training draws
            numbers in other ways than by dropout, or it has running statistics; all are listed.
    """
    opened = _open_on(config.origin, config.torch_dtype, device, adapted)
    found = [*opened.problems]
    if opened.undrawn and opened.dropouts and config.dropouts == "on":
        wanted = "dropout of samples alone, which draws from the step's key"
        fix = "set its rates to 0, or run it as in evaluation: --module.dropouts off"
        found.append(Problem("model", opened.undrawn, wanted, fix))
    raise_problems(f"cannot train {config.origin}", found)
    return opened if config.router_losses else replace(opened, router_coefficient=0.0)


@functools.lru_cache(8)
def _open_once(origin: str) -> OpenedModule:
    with aside(), enter(Scope()), torch.enable_grad():
        module = build_module(origin)
        call, coefficient = _call_options(module)
        tried = try_module(module, call)
        problems = (*_module_problems(module), *tried.problems)
        tokens = torch.ones(1, 4, dtype=torch.int64)
        linears = find_linears(
            module, lambda: call(lambda _, *x, **y: module(*x, **y), {}, tokens, router=False)
        )
        drop_weights(module)
        _, params = partitioning.from_module(module)
        linears = {name: dim for name, dim in linears.items() if f"{name}.weight" in params}
        limits = (getattr(getattr(module, "config", None), "max_position_embeddings", None),
                  tried.positions)  # fmt: skip
        dropouts = tuple(name for name, inner in module.named_modules() if drops_out(inner))
        if tried.differs and not dropouts:
            dropouts = ("forward, which makes other logits in training",)
        return OpenedModule(
            module, call, call, params, tried.width, min(filter(None, limits), default=None),
            tried.positions, _find_layers(module), coefficient, dropouts, tried.undrawn,
            tried.packing, linears, problems,
        )  # fmt: skip


@functools.lru_cache(32)
def _open_on(
    origin: str, dtype: torch.dtype, device: str, adapted: tuple[str, ...] = ()
) -> OpenedModule:
    opened = _open_once(origin)
    with aside(), enter(Scope()):
        module = copy.deepcopy(opened.module)
        place_buffers(module, dtype, device)
        attach_adapters(module, {name: opened.linears[name] for name in adapted})
        fn, params = partitioning.from_module(module)
        train, _ = partitioning.from_module(module, train=True)
        one, other = (functools.partial(opened.call, each) for each in (fn, train))
        return replace(opened, module=module, call=one, train=other, params=params)


def place_buffers(module: torch_nn.Module, dtype: torch.dtype, device: str) -> None:
    """Put what a module holds besides parameters on a device, for parameters of a dtype.

    With float64 it is wide, too: sums in float32 would not be as exact as what is summed.
    """
    wide = dtype == torch.float64
    for inner in module.modules():
        held = {name: x for name, x in vars(inner).items() if isinstance(x, Tensor)}
        for values in (inner._buffers, held):
            for name, x in values.items():
                if x is not None:
                    kind = torch.float64 if wide and x.is_floating_point() else x.dtype
                    values[name] = x.to(device, kind)
        vars(inner).update(held)


def drop_weights(module: torch_nn.Module) -> None:
    """Leave abstract parameters in place of real ones, tied as they were.

    Those that require no gradient become buffers: the module keeps them as they are.
    """
    made: dict[torch_nn.Parameter, torch_nn.Parameter] = {}
    for inner in module.modules():
        for name, weight in [*inner._parameters.items()]:
            if weight is None:
                continue
            if not weight.requires_grad:
                del inner._parameters[name]
                inner.register_buffer(name, weight.detach())
                continue
            if weight not in made:
                made[weight] = torch_nn.Parameter(torch.empty_like(weight, device="meta"))
            inner._parameters[name] = made[weight]


def trained_weights(module: torch_nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that a run trains, by name: those that require gradients."""
    return {name: x for name, x in module.named_parameters() if x.requires_grad}


def _call_options(module: torch_nn.Module) -> tuple[Callable[..., tuple], float]:
    """``(fn, params, tokens, *, router, **more) -> (logits, router loss)``, and its coefficient."""
    takes = inspect.signature(module.forward).parameters
    config = getattr(module, "config", None)
    named = "input_ids" in takes
    fixed = {"use_cache": False} if "use_cache" in takes else {}
    routed = bool(getattr(config, "output_router_logits", False))
    coefficient = float(getattr(config, "router_aux_loss_coef", 0.0)) if routed else 0.0

    def call(fn, params, tokens, *, router: bool, **more: Any) -> tuple[Tensor, Any]:
        options = {**fixed, **more}
        if routed:
            options["output_router_logits"] = router
        if named:
            out = fn(params, input_ids=tokens, **options)
        else:
            out = fn(params, tokens, **options)
        logits = getattr(out, "logits", out)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return logits, getattr(out, "aux_loss", None) if router else None

    return call, coefficient


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _module_problems(module: torch_nn.Module) -> Iterator[Problem]:
    """Properties of a module that would make it train something else than it seems to."""
    names = dict(module.named_modules())
    if any("lora" in name.split(".") for name, _ in module.named_parameters()):
        wanted = "other names: those are of low-rank additions (lora_rank)"
        yield Problem("model", "a module or parameter that is named lora", wanted, "rename it")
    running = [x for x, inner in names.items() if getattr(inner, "running_mean", None) is not None]
    if running:
        wanted = "none: a step's loss is a sum over its targets"
        fix = "track_running_stats=False, or another norm"
        yield Problem("model", f"running statistics in {_list_some(running)}", wanted, fix)
    if not trained_weights(module):
        yield Problem("model", "no parameters that require gradients", "some to train")
    config = getattr(module, "config", None)
    routed = getattr(config, "output_router_logits", False)
    if routed and not hasattr(config, "router_aux_loss_coef"):
        got, wanted = "output_router_logits in config.json", "router_aux_loss_coef beside it"
        yield Problem("model", got, wanted, "leave it out, for training without that loss")


def _find_layers(module: torch_nn.Module) -> str | None:
    """The pattern of the scopes of its layers: of the list with most of the parameters."""
    lists = {
        name: sum(p.numel() for p in inner.parameters())
        for name, inner in module.named_modules()
        if isinstance(inner, torch_nn.ModuleList)
    }
    if not lists:
        return None
    name = max(lists, key=lambda name: lists[name]).rpartition(".")[2]
    return rf"(?:^|[/.]){re.escape(name)}\.\d+$"


# --- the parameters


@dataclass(frozen=True)
class OwnWeights:
    """The initial values of a module's parameter: its own.

    All parameters are made together, of one key; each is handed out once, so that they take memory
    only until they are.

    Attributes:
        build: ``(*given, seed)`` to the module.
        given: its first arguments.
        inputs: of the matrix of a linear layer, the dim of its inputs (`functron.lora`).
    """

    build: Callable[..., torch_nn.Module]
    given: tuple[str, ...]
    name: str
    inputs: int | None = None
    joint: bool = field(default=True, init=False)

    def __call__(self, key, shape, dtype, index=None) -> Tensor:
        seed = int(key[0]) << 32 | int(key[1])
        values = _own_weights(self.build, self.given, seed)
        if self.name not in values:  # it was handed out before
            _own_weights.cache_clear()
            values = _own_weights(self.build, self.given, seed)
        value = values.pop(self.name)
        for dim, rows in enumerate(index or ()):
            value = value if rows is None else value.index_select(dim, rows.to(value.device))
        return value.to(key.device, dtype, copy=True)


@functools.lru_cache(1)
def _own_weights(build: Callable, given: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    module = build(*given, seed % 2**63)
    return {name: value.detach() for name, value in trained_weights(module).items()}


def defs(config: ModuleConfig) -> dict:
    """The parameters by the module's own names, whose parts are levels: ``model/layers/0/...``.

    A logical axis is a dim of the parameters of all layers, such as
    ``model.layers.*.mlp.up_proj.weight:0``; of each, where rules or sizes of them differ. Weight
    decay applies to those of two dims or more.
    """
    found, alike, opened = {}, _share_names(config), open_module(config)
    inputs = {f"{name}.weight": dim for name, dim in opened.linears.items()}
    for name, value in opened.params.items():
        axes = tuple(f"{alike[name]}:{dim}" for dim in range(value.dim()))
        decay = value.dim() > 1
        init = OwnWeights(build_module, (config.origin,), name, inputs.get(name))
        found[name] = ParamDef(tuple(value.shape), axes, init, config.torch_dtype, decay)
    return nest(found)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names with dots as a tree with a level for each part of a name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        tree.put_leaf(found, name.replace(".", "/"), value)
    return found


def flatten(values: tree.Tree) -> dict[str, Any]:
    """The leaves of such a tree by the module's names."""
    return {path.replace("/", "."): leaf for path, leaf in tree.items(values)}


@functools.lru_cache(32)
def _share_names(config: ModuleConfig) -> Mapping[str, str]:
    """By parameter, the name of those that a mesh splits alike: with * for the layer's number."""
    opened = open_module(config)
    given, stems = _given_specs(config), {}
    for name, value in opened.params.items():
        path, at = name.split("."), _find_layer(opened, name)
        if at is not None:
            path[at] = "*"
        stems.setdefault(".".join(path), {})[name] = (*value.shape, str(given.get(name)))
    return {
        name: stem if len({*rows.values()}) == 1 else name
        for stem, rows in stems.items()
        for name in rows
    }


def rules(
    config: ModuleConfig, mesh: Mesh | BoundMesh, *, fsdp: tuple[str, ...] = ("fsdp",)
) -> Rules:
    """How a mesh splits the parameters: by `ModuleConfig.rules` over tp, and over the axes `fsdp`.

    These split, of each parameter, the largest dim that they divide and tp does not split; or the
    one that it does; or none.

    Raises:
        ValueError: the mesh has ranks on other axes than pp, dp, fsdp and tp; a rule is found in no
            name; or tp does not divide a dim; all offenders are listed.
    """
    known = ("pp", "dp", "fsdp", "tp")
    others = [f"{name}={mesh[name]}" for name in mesh.axis_names if name not in known]
    others = [each for each in others if not each.endswith("=1")]
    fix = "put those ranks on pp, dp, fsdp or tp"
    wanted = "ranks on pp, dp, fsdp and tp for a module as it is"
    raise_problems(
        "this mesh cannot run the model",
        [Problem("mesh", each, wanted, fix) for each in others],
    )
    opened = open_module(config)
    specs = _tensor_specs(config, mesh["tp"]) if mesh["tp"] > 1 else {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, stem in _share_names(config).items():
        shapes.setdefault(stem, []).append(tuple(opened.params[name].shape))
    fully = tuple(axis for axis in fsdp if mesh[axis] > 1)
    count = math.prod(mesh[axis] for axis in fully)
    found: dict[str, str | tuple[str, ...]] = {}
    for name, alike in shapes.items():
        split = specs.get(name, ())
        parts = [
            mesh["tp"] if dim < len(split) and split[dim] else 1 for dim in range(len(alike[0]))
        ]
        own: dict[int, tuple[str, ...]] = {
            dim: ("tp",) for dim, part in enumerate(parts) if part > 1
        }
        free = [
            (part == 1, min(shape[dim] for shape in alike), dim)
            for dim, part in enumerate(parts)
            if all(shape[dim] % (part * count) == 0 for shape in alike)
        ]
        if free and count > 1:
            dim = max(free)[-1]
            own[dim] = (*own.get(dim, ()), *fully)
        found |= {f"{name}:{d}": axes if axes[1:] else axes[0] for d, axes in own.items()}
    return Rules(found)


def read_rules(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """The lines of rules: each, its pattern, and its entries."""
    for line in filter(None, map(str.strip, re.split(r"[;\n]", text))):
        pattern, _, entries = line.rpartition("=")
        yield line, pattern.strip(), [entry.strip() for entry in entries.split(",")]


def rule_problems(text: str, name: str = "module.rules") -> Iterator[Problem]:
    """The lines of rules that are none; `name` is that of the setting."""
    for line, pattern, entries in read_rules(text):
        wanted = "PATTERN = tp or - for each dim, such as (o|down)_proj = -,tp"
        if not pattern or not {*entries} <= {"tp", "-"} or entries.count("tp") > 1:
            yield Problem(name, repr(line), wanted)
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(name, f"{pattern!r}: {error}", "a regular expression")


def _tensor_specs(config: ModuleConfig, ranks: int) -> dict[str, P]:
    """The specs over tp, by names that parameters share.

    Raises:
        ValueError: tp does not divide a dim.
    """
    params, specs = open_module(config).params, _given_specs(config)
    if not specs:
        return _find_specs(config, ranks)
    problems = [
        Problem(name, f"{size} entries in dim {dim} on tp={ranks}", f"a multiple of {ranks}",
                "leave it out of the rules, or take fewer ranks")
        for name, value in params.items()
        for dim, (entry, size) in enumerate(zip(specs[name], value.shape, strict=False))
        if entry and size % ranks
    ]  # fmt: skip
    raise_problems("tp cannot split these parameters", problems)
    return {_share_names(config)[name]: spec for name, spec in specs.items()}


def _given_specs(config: ModuleConfig) -> dict[str, P]:
    """The specs over tp of `ModuleConfig.rules`, by name; empty where there are none.

    Raises:
        ValueError: a rule is found in no name.
    """
    if not config.rules.strip():
        return {}
    given = {
        pattern: P(*(None if entry == "-" else "tp" for entry in entries))
        for _, pattern, entries in read_rules(config.rules)
    }
    return Rules(given).specs(dict(open_module(config).params))


_SEARCHED_LAYERS, _SEARCHED_TOKENS = 3, (256, 16)
"""A module is searched with so many layers, on a batch of so many samples and tokens; these are
few, for modules that run over them one by one."""


@functools.lru_cache(32)
def _find_specs(config: ModuleConfig, ranks: int) -> dict[str, P]:
    """The specs over tp that send least, of a module with few layers.

    A rank may hold a fifth more than its part of what can be split.
    """
    opened = open_module(replace(config, rules="", router_losses=False))
    every = {name: value.to(config.torch_dtype) for name, value in opened.params.items()}
    chosen = {name for name in every if _layer_number(opened, name) < _SEARCHED_LAYERS}
    params = {name: value for name, value in every.items() if name in chosen}
    rest = {name: value for name, value in every.items() if name not in chosen}
    rows, seq = _SEARCHED_TOKENS
    tokens = torch.zeros(rows, min(seq, config.max_seq), dtype=torch.int64, device="meta")

    def loss(params, rest, tokens):
        return _sum_losses(opened, {**rest, **params}, tokens, tokens, {})

    least = sum(
        value.nbytes // (ranks if any(size % ranks == 0 for size in value.shape) else 1)
        for value in params.values()
    )
    mesh = Mesh(tp=ranks)
    given = dict(params), rest, tokens
    found = partitioning.search(
        loss, mesh, (P(), P(), P()), *given, axes=("tp",), memory_bytes=int(1.2 * least)
    )
    return {_share_names(config)[name]: spec for name, spec in found.specs.items()}


def _find_layer(opened: OpenedModule, name: str) -> int | None:
    """Which part of a parameter's name is the number of the layer that it is of, if it is."""
    path = name.split(".")
    for end in range(2, len(path) + 1 if opened.layers else 0):
        if re.search(opened.layers or "", ".".join(path[:end])):
            return end - 1
    return None


def _layer_number(opened: OpenedModule, name: str) -> int:
    """The number of the layer that a parameter is of; 0 where it is of none."""
    at = _find_layer(opened, name)
    return 0 if at is None else int(name.split(".")[at])


# --- the loss


def _sum_losses(
    opened: OpenedModule, params, tokens: Tensor, targets: Tensor, more: Mapping[str, Tensor]
) -> Tensor:
    """The sum of the losses of whole values; routers' loss counts as that of every target.

    Args:
        more: ``key`` and ``rows``, in training with dropout; ``positions`` and ``segments``, of
            packed documents.
    """
    given = {name: more[name] for name in ("key", "rows") if name in more}
    call = opened.train if given else opened.call
    if "segments" in more:
        packed = more["positions"], more["segments"]
        dtype = next(iter(params.values())).dtype
        given |= pack_inputs(opened.packing, opened.module, *packed, dtype)
    logits, routers = call(params, tokens, router=bool(opened.router_coefficient), **given)
    kind = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.flatten(0, 1).to(kind), targets.flatten(), ignore_index=nn.IGNORE_INDEX,
        reduction="sum",
    )  # fmt: skip
    if routers is None:
        return total
    count = (targets != nn.IGNORE_INDEX).sum()
    return total + opened.router_coefficient * routers * count


def _sum_own_losses(
    config: ModuleConfig, params: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> Tensor:
    """The sum of the losses of the module as it is, without dropout."""
    return _sum_losses(open_module(config), params, tokens, targets, {})


def loss(
    config: ModuleConfig,
    params: tree.Tree,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Tensor | None = None,
) -> Tensor:
    """The sum of the losses of the batch of all ranks, replicated; see `functron.gpt.loss`.

    Parameters that data axes split are gathered before; the rest follows from the rules.

    Documents of a packed batch (``positions`` and ``segments``) have the losses that they have
    alone. With a `key`, a module that drops out runs in training mode.

    Collectives: of `ModelOptions.gather`, and those that `functron.partition` derives.

    Raises:
        ValueError: an operation of the module has no rule (`functron.partition`), or it has no
            place for packed documents.
    """
    require(batch, "tokens", "targets")
    if is_cut(config):
        every = whole(num_layers(config))
        return stage_loss(config, every, params, None, batch, options, key=key)
    more, adapted = _find_more_inputs(config, batch, key), list_adapted(flatten(params))
    mapped = _partition_loss(config, *_place(batch, options), tuple(more), adapted)

    def run(whole: tree.Tree) -> Tensor:
        return mapped.local(flatten(whole), batch["tokens"], batch["targets"], more)

    return options.gather.around(run)(params)


def _place(batch: Batch, options: ModelOptions) -> tuple[Mesh, str, str, bool]:
    """The mesh around, without pipelines, and what else the partitioned loss depends on."""
    sizes = {name: axis.size for name, axis in scope().axes.items() if axis is not None}
    split = "tp" in entry if isinstance(entry := options.stream[1], tuple) else False
    return Mesh(**sizes), batch["tokens"].device.type, options.remat, split


def _find_more_inputs(config: ModuleConfig, batch: Batch, key: Tensor | None) -> dict[str, Tensor]:
    """Inputs of the loss besides tokens and targets: of packed documents, and for dropout."""
    more = {name: batch[name] for name in ("positions", "segments") if name in batch}
    raise_problems("this module cannot be packed", [*_packing_problems(config)] if more else [])
    return more | (dropout_inputs(batch, key) if draws(config) else {})


def dropout_inputs(batch: Batch, key: Tensor | None) -> dict[str, Tensor]:
    """The inputs by which dropout of a batch is drawn; none without a key."""
    if key is None:
        return {}
    tokens, rows = batch["tokens"], batch.get("rows")
    if rows is None:
        rows = lax.global_index(len(tokens), DATA_AXES, device=tokens.device)
    return {"key": key, "rows": rows}


@functools.lru_cache(64)
def _partition_loss(
    config: ModuleConfig,
    mesh: Mesh,
    device: str,
    remat: str,
    split_stream: bool,
    more: tuple[str, ...],
    adapted: tuple[str, ...],
) -> partitioning.Partitioned:
    """The loss on a mesh, of parameters that are split over tp alone, and of `more` inputs.

    Args:
        adapted: as of `open_module`.
    """
    opened, own = open_module(config, device, adapted), flatten(defs(config))
    split = rules(config, mesh, fsdp=())
    specs = {name: split.spec(d.axes) for name, d in own.items()}
    specs |= split_adapters(adapted, own, split)
    data = tuple(axis for axis in DATA_AXES if mesh[axis] > 1)
    rows = P(data or None)
    again = {"full": policies.nothing, "dots": policies.dots}
    layers = opened.layers
    given = {layers: again[remat]} if layers and remat in again else {}
    line = {layers: P(data or None, "tp")} if layers and split_stream and mesh["tp"] > 1 else {}

    def module_loss(params, tokens, targets, more):
        return _sum_losses(opened, params, tokens, targets, more)

    given_specs = specs, rows, rows, {name: P() if name == "key" else rows for name in more}
    return partitioning.partition(
        module_loss, mesh, given_specs, P(), constraints=line, remat=given, pick="cheapest"
    )


def draws(config: ModuleConfig, options: ModelOptions = DEFAULTS) -> bool:
    """Whether its loss draws random numbers, of dropout."""
    return config.dropouts == "on" and bool(open_module(config).dropouts)


def _packing_problems(config: ModuleConfig) -> Iterator[Problem]:
    if not open_module(config).packing:
        wanted = "position_ids, or an attention_mask [batch, 1, seq, seq], that keeps them apart"
        got = "a module whose forward has no place for packed documents"
        yield Problem("model", got, wanted, "leave --pack and --mask-documents out")


# --- layers


@functools.lru_cache(64)
def _cut_loss(
    config: ModuleConfig,
    sizes: tuple[int, int],
    mesh: Mesh,
    device: str,
    remat: str,
    split_stream: bool,
    more: tuple[tuple[str, torch.dtype, int], ...],
    adapted: tuple[str, ...],
    rank: int,
) -> partitioning.LocalSections:
    """The loss of a batch of all ranks, cut at the module's layers.

    Args:
        sizes: rows and tokens of the batch.
        more: names, dtypes and numbers of dims of the other inputs.
        adapted: as of `open_module`.
        rank: of their additions.
    """
    opened, names = open_module(config, device, adapted), tuple(name for name, *_ in more)
    if opened.layers is None:
        wanted = "a torch.nn.ModuleList of layers that forward calls one by one"
        refuse("this module is not cut into layers", "model", "no list of layers", wanted)
    mapped = _partition_loss(config, mesh, device, remat, split_stream, names, adapted)
    shapes = {name: tuple(value.shape) for name, value in opened.params.items()}
    shapes |= shape_adapters(adapted, shapes, rank)
    params = module_layers.describe_values(shapes, config.torch_dtype, device)
    inputs = (("tokens", torch.int64, 2), *more)
    described = module_layers.describe_inputs(inputs, sizes, device)
    tokens = described.pop("tokens")
    numbered = opened.layers.replace(r"\d+$", r"(\d+)(?=$|[/.])")
    with aside(), enter(Scope()):
        return partitioning.cut_layers(
            mapped, numbered, (1, 2, 3), params, tokens, tokens, described
        )


def _cut_short(config: ModuleConfig) -> partitioning.LocalSections:
    """The loss of a short batch on one rank, cut at layers; what stages use follows from it."""
    sizes = 2, min(NUM_TOKENS, config.max_seq)
    return _cut_loss(config, sizes, Mesh(), "cpu", "none", False, (), (), 0)


@functools.lru_cache(32)
def is_cut(config: ModuleConfig) -> bool:
    """Whether the module has layers that its forward calls one by one."""
    if open_module(config).layers is None:
        return False
    try:
        return num_layers(config) > 0
    except ValueError:  # as a whole, it is partitioned or says why it is not
        return False


def num_layers(config: ModuleConfig) -> int:
    """The number of the module's layers.

    Raises:
        ValueError: it has none that its forward calls one by one.
    """
    return _cut_short(config).num_layers


@functools.lru_cache(32)
def uses(config: ModuleConfig) -> module_layers.Uses:
    """Which stages of a pipeline use each entry of `defs`, for `functron.pipeline.Partition`."""
    return module_layers.find_uses(_cut_short(config), [*open_module(config).params])


def stage_loss(
    config: ModuleConfig,
    part: Part,
    params: tree.Tree,
    x: Sequence[Tensor] | None,
    batch: Batch,
    options: ModelOptions = DEFAULTS,
    *,
    key: Tensor | None = None,
) -> Any:
    """The values that a stage of a pipeline passes on; the last one's result is that of `loss`."""
    require(batch, "tokens", "targets")
    mesh, *place = _place(batch, options)
    rows, seq = batch["tokens"].shape
    sizes = rows * math.prod(mesh[axis] for axis in DATA_AXES), seq
    more = _find_more_inputs(config, batch, key)
    described = tuple((name, x.dtype, x.dim()) for name, x in more.items())
    adapted, rank = _find_adapted(config, part, params, mesh, options)
    cut = _cut_loss(config, sizes, mesh, *place, described, adapted, rank)
    data = {"1": batch["tokens"], "2": batch["targets"]}
    data |= {f"3/{name}": x for name, x in more.items()}
    sections = module_layers.find_sections(part, cut.num_layers)
    made = module_layers.run_sections(cut, sections, params, data, x or (), options.gather)
    return made[0] if part.loss else made


def _find_adapted(
    config: ModuleConfig, part: Part, params: tree.Tree, mesh: Mesh, options: ModelOptions
) -> tuple[tuple[str, ...], int]:
    """The layers of all stages that have additions, and the rank of these.

    What crosses between stages lies as the plan of the whole loss has it, so that all of them have
    to make the same plan, each with the additions of all others.
    """
    held = flatten(params)
    adapted = list_adapted(held)
    if options.adapters is not None:
        return _list_targets(config, options.adapters), options.adapters.rank
    if not adapted:
        return (), 0
    if mesh["tp"] > 1 and not (part.embed and part.loss):
        got, wanted = "None, for parameters with low-rank additions", "those of the whole model"
        fix = "ModelOptions(adapters=LoRA(...)), as lora_defs was given"
        refuse("a module in stages over tp", "options.adapters", got, wanted, fix)
    return adapted, held[f"{adapted[0]}.{lora.LORA}.a"].shape[1]


@functools.lru_cache(32)
def _list_targets(config: ModuleConfig, adapters: lora.LoRA) -> tuple[str, ...]:
    return list_adapted(flatten(lora.lora_defs(defs(config), adapters)))


@functools.lru_cache(32)
def flops_per_token(config: ModuleConfig, seq: int) -> int:
    """FLOPs of the products of a token, forward and backward, of the traced module."""
    opened = open_module(config)
    tokens = torch.zeros(1, seq, dtype=torch.int64, device="meta")
    # whoever lists the families, such as the hub, needs no tracer
    trace = importlib.import_module("functron.program.trace").trace
    made = trace(lambda p, t: opened.call(p, t, router=False)[0])(dict(opened.params), tokens)
    return 3 * made.cost().model_flops // seq


def iterate_logits(
    params: tree.Tree, config: ModuleConfig, tokens: Tensor, num_tokens: int
) -> Iterator[Tensor]:
    """The logits of each next token, for `functron.generate`: all tokens are read for each."""
    opened, params = open_module(config, tokens.device.type), flatten(lora.merge(params))
    for _ in range(num_tokens):
        logits, _ = opened.call(params, tokens[:, -config.max_seq :], router=False)
        last = yield logits[:, -1].float()
        tokens = torch.cat([tokens, last.unsqueeze(1)], 1)


# --- the family


def _open_config(origin: str) -> ModuleConfig:
    """The config of ``hf-module:PATH`` or ``module:PACKAGE.FUNCTION``."""
    opened = open_module(ModuleConfig(origin=origin, dropouts="off"))
    most: dict[str, Any] = {} if opened.max_seq is None else {"max_seq": opened.max_seq}
    return ModuleConfig(origin=origin, vocab_size=opened.vocab_size, **most)


def _find_problems(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """Settings that a module as it is does not have."""
    model: Any = config.architecture
    opened = open_module(model)
    if config.data.packed:
        yield from _packing_problems(model)
    if model.vocab_size != opened.vocab_size:
        wanted = f"{opened.vocab_size}, the width of the module's logits"
        yield Problem("module.vocab_size", str(model.vocab_size), wanted, "leave it out")
    if opened.positions and model.max_seq > opened.positions:
        wanted = f"at most {opened.positions}, the positions that it has parameters for"
        yield Problem("module.max_seq", str(model.max_seq), wanted, "leave it out")
    if config.optimizer.name == "muon":
        fix = "--optimizer adamw"
        yield Problem("optimizer", "muon", "one that does not ask which matrices project", fix)
    if mesh is not None and mesh["pp"] > 1:
        yield from _pipeline_problems(config, model)
    if config.compute.remat == "selective":
        fix = "take --remat dots or full"
        yield Problem(
            "remat", "selective", "whole layers: a module names no core of attention", fix
        )
    needs = {"remat": config.compute.remat != "none"}
    needs["sequence_parallel"] = config.parallelism.sequence_parallel
    for name, used in needs.items():
        if used and opened.layers is None:
            yield Problem(name, "true", "a module with a torch.nn.ModuleList of layers")
    folder = Path(model.origin.partition(":")[2])
    text = config.data.format in ("auto", "text", "chat") and not config.data.tokenizer
    if text and model.origin.startswith(f"{HUB}:") and (folder / "tokenizer.json").is_file():
        got = "bytes, for a module with a tokenizer of its own"
        yield Problem("tokenizer", got, str(folder), f"--tokenizer {folder}")


def _pipeline_problems(config: TrainConfig, model: ModuleConfig) -> Iterator[Problem]:
    if not is_cut(model):
        wanted = "layers in a torch.nn.ModuleList, that forward calls one by one, to cut stages at"
        fix = "put those ranks on dp, fsdp or tp"
        yield Problem("mesh", f"pp of {model.origin}", wanted, fix)
    if config.parallelism.vocab_over_pp:
        wanted = "embeddings that the stages with them hold, of a module as it is"
        yield Problem("vocab_over_pp", "true", wanted, "leave it out")


def make_family() -> Family:
    """The family of modules as they are."""
    schemes = MappingProxyType({HUB: _open_config, FACTORY: _open_config})
    given = (ModuleConfig, {}, defs, rules, loss, num_targets, flops_per_token)
    return Family(
        "module", "a module as it is", *given,
        objective=Objective(find_problems=_find_problems), iterate_logits=iterate_logits,
        free=("dtype", "rules", "dropouts", "router_losses", "check"), draws=draws, adapters=True,
        settings=frozenset({"adapters"}), packs=True, schemes=schemes,
        stages=StageFunctions(num_layers, uses, stage_loss),
        without_extras=lambda config: replace(config, router_losses=False),
    )  # fmt: skip
