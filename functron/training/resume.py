"""Resuming: the state of a run from a checkpoint of its own or another precision, or of parameters.

It also describes how the learning rate changes where a run resumes under another schedule.

| leaf                       | where the checkpoint lacks it, or has it in another dtype           |
|----------------------------|---------------------------------------------------------------------|
| parameter                  | its master, or else the parameter, rounded to nearest               |
| master                     | the parameter in float32, or the lower half of that                 |
| moments, averages, sums    | converted to their dtype, also from and to 8 bits                   |
| loss scale, its counts     | initial value                                                       |
| key of stochastic rounding | initial value                                                       |
| history of delayed scaling | empty, also without `recast`                                        |

Leaves that only the checkpoint has are left out. So a float32 run that resumes as bf16 takes its
parameters as masters, and can return to float32 unchanged. Quantised products have no state except
for histories of delayed scaling: fp8-block has the state of bf16.

Masters, stochastic rounding, a loss scale, `optim.apply_if_finite` and `optim.with_limit` wrap the
optimizer's state, which adds levels to paths; they are recognised by their own leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron import checkpoint, optim
from functron.checkpoint.restore import Computed, separate
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems
from functron.core.settings import nest_table
from functron.models import lora
from functron.ops.adamw import halves, joined
from functron.optim.low_precision import (
    BLOCK,
    CODES,
    QuantisedMoment,
    coding_of,
    dequantise,
    quantise,
)
from functron.precision import Recipe
from functron.spmd.params import history_mask, init_params
from functron.training import run_folder
from functron.training.config import TrainConfig, load, read_settings
from functron.training.setup import RunSetup
from functron.training.step import State

_SAYING = "--precision NAME (or --products) beside --resume says so; in Python recast=True"


def restore_state(
    path: Path, setup: RunSetup, key: torch.Tensor, device: torch.device, *, recast: bool = False
) -> tuple[State, tuple[str, ...]]:
    """The state in a checkpoint for the next step of `setup`, and the conversions in words.

    No collectives; every process of a bound mesh reads its own shards.

    Args:
        path: of a checkpoint of this run, from any mesh, or of parameters alone.
        setup: of the run.
        key: of the run's seed.
        device: of the state.
        recast: whether to convert a checkpoint of another precision.

    Raises:
        ValueError: the checkpoint is damaged, another model's or optimizer's, or of another
            precision and `recast` is not set; or weights do not fit into float16.
    """
    stored = checkpoint.Checkpoint(path)
    paths = [leaf.path for leaf in setup.placement.leaves]
    separate(stored, [path.removeprefix("params/") for path in paths])
    names = list(stored)
    adapted = lora.has_adapters(paths)
    new = adapted and not lora.has_adapters(names)
    if new or not any(name.startswith("opt_state/") for name in names):
        return _restore_params(stored, setup, key, device, new=new, recast=recast)
    like = setup.init(key.to("meta"))
    held = dict(tree.items(like))
    wanted = setup.placement.separate(like)
    stored.open(names)
    histories = _new_histories(setup, stored)
    sources = _find_sources(wanted, stored) | dict.fromkeys(histories)
    done = [*_describe_recipes(stored, setup), *_describe_conversions(wanted, stored)]
    _require_recast(done, stored, recast)
    # nothing that is joined begins anew
    kept = {name: leaf for name, leaf in held.items() if sources.get(name, "") is not None}
    found = checkpoint.restore(
        path,
        kept,
        placement=setup.placement,
        cast=bool(done),
        sources={name: source for name, source in sources.items() if source is not None},
        device=device,
    )
    fresh = {
        name: _make_initial(name, leaf, setup) for name, leaf in held.items() if name not in kept
    }
    found |= {name: leaf.to(device) for name, leaf in fresh.items()}
    state = tree.unflatten(tree.structure(like), [found[name] for name in held])
    if done:
        _check_range(state.params)
    return state, (*done, *_describe_empty(histories))


def _restore_params(
    stored: checkpoint.Checkpoint,
    setup: RunSetup,
    key: torch.Tensor,
    device: torch.device,
    *,
    new: bool,
    recast: bool,
) -> tuple[State, tuple[str, ...]]:
    """An initial state with a checkpoint's parameters, to which `new` adapters are added.

    Where the run keeps matrices in 4 bits and the checkpoint does not, they are packed.
    """
    if setup.packs and not lora.has_packed(stored):
        plain = setup.without_packing
        state, done = _restore_params(stored, plain, key, device, new=new, recast=recast)
        return setup.init(key.to(device), lora.pack(state.params)), done
    where, params = setup.placement, setup.init(key.to("meta")).params
    if setup.config.optimizer.fp32_masters:  # masters take what is stored in float32
        low = (leaf for leaf in where.leaves if leaf.dtype in optim.LOW_PRECISION)
        low = (leaf for leaf in low if leaf.path.startswith("params/") and leaf.path in stored)
        wide = {leaf.held.path for leaf in low if stored[leaf.path].dtype == torch.float32}
        params = tree.map_with_path(
            lambda name, leaf: leaf.float() if f"params/{name}" in wide else leaf, params
        )
        leaves = [
            dataclasses.replace(leaf, dtype=torch.float32) if leaf.held.path in wide else leaf
            for leaf in where.leaves
        ]
        where = dataclasses.replace(where, leaves=tuple(leaves))
    histories = _new_histories(setup, stored)
    chosen = {"params": lora.split(params)[0] if new else params}
    empty: tree.Tree = {}
    if histories:
        mask = history_mask(setup.defs)
        empty, chosen["params"] = tree.partition(chosen["params"], mask)
    done = _describe_conversions(where.separate(chosen), stored)
    _require_recast(done, stored, recast)
    read = checkpoint.restore(stored.path, chosen, placement=where, cast=recast, device=device)
    params = read["params"]
    if new:  # the checkpoint has the model's own parameters only
        init_key, _ = random.split(key.to(device)).unbind(0)
        defs = lora.split(setup.defs)[1]
        adapters = init_params(init_key, defs, setup.stored_specs, setup.mesh)
        params = tree.join(params, adapters)
    if histories:
        zeros = tree.map(lambda leaf: torch.zeros_like(leaf, device=device), empty)
        params = tree.join(params, zeros)
    state = setup.init(key.to(device), params)
    if done:
        _check_range(state.params)
    return state, (*done, *_describe_empty(histories))


def _new_histories(setup: RunSetup, stored: checkpoint.Checkpoint) -> list[str]:
    """The histories of delayed scaling, where the checkpoint has none."""
    found = tree.paths(tree.partition(setup.defs, history_mask(setup.defs))[0])
    names = [f"params/{name}" for name in found]
    return [] if any(name in stored for name in names) else names


def _describe_empty(histories: Sequence[str]) -> list[str]:
    text = "histories of quantised products begin empty: the checkpoint has none"
    return [text] if histories else []


def _require_recast(done: Sequence[str], stored: checkpoint.Checkpoint, recast: bool) -> None:
    """Refuse conversions unless `recast` is set."""
    title, wanted = f"the checkpoint {stored.path} is of another precision", "nothing to convert"
    found = [Problem("precision", text, wanted, _SAYING) for text in done]
    raise_problems(title, [] if recast else found)


def _name_leaves(params: tree.Tree) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(tree.paths(params), tree.leaves(params), strict=True)


def _check_range(params: tree.Tree) -> None:
    found = [
        Problem(f"params/{name}", "values too large for float16", "at most 65504", "choose bf16")
        for name, leaf in _name_leaves(params)
        if leaf.dtype == torch.float16 and not bool(leaf.isfinite().all())
    ]
    raise_problems("the checkpoint cannot go on in float16", found)


# --- leaves of one state and of another


class _Wrapper(NamedTuple):
    """A state that wraps another one.

    Attributes:
        own: its leaves or subtrees beside the wrapped state.
        inner: the field of the wrapped state.
        title: in words; empty: its coming and going is not reported.
    """

    own: tuple[str, ...]
    inner: str
    title: str


_WRAPPERS: tuple[_Wrapper, ...] = (
    _Wrapper(("masters",), "inner", "masters"),
    _Wrapper(("key", "count"), "inner", "the key of stochastic rounding"),
    _Wrapper(("scale", "good_steps", "hysteresis", "stuck"), "inner_state", "the loss scale"),
    _Wrapper(("notfinite_count", "last_finite", "total_notfinite"), "inner_state", "skipped steps"),
    _Wrapper(("limit", "left_out"), "inner_state", ""),
)


class _Role(NamedTuple):
    """The role of a leaf, independent of the wrappers around it.

    Attributes:
        path: without the levels that wrappers add.
        wrapper: that it belongs to; None: it belongs to the wrapped state.
        field: its name in the wrapper's state.
    """

    path: str
    wrapper: _Wrapper | None = None
    field: str = ""


def _find_roles(names: Collection[str]) -> dict[str, _Role]:
    """The role of each leaf of a state."""
    known = set(names)
    levels = {name[: at + 1] for name in names for at, letter in enumerate(name) if letter == "/"}
    heads = {
        head: wrapper
        for head in levels
        for wrapper in _WRAPPERS
        if f"{head}{wrapper.inner}/" in levels
        and all(f"{head}{own}" in known or f"{head}{own}/" in levels for own in wrapper.own)
    }

    def bare(path: str) -> str:
        for head in sorted(heads, key=len, reverse=True):
            inner = f"{head}{heads[head].inner}/"
            path = head + path.removeprefix(inner) if path.startswith(inner) else path
        return path

    def role(name: str) -> _Role:
        for head, wrapper in heads.items():
            field, _, rest = name.removeprefix(head).partition("/")
            if name.startswith(head) and field in wrapper.own:
                return _Role(rest or bare(head), wrapper, field)
        return _Role(bare(name))

    return {name: role(name) for name in names}


_Source = str | Computed | None
"""Of a leaf: a stored leaf, or a computation of stored leaves; None: its initial value."""

_NOWHERE = ""
"""A path that no leaf has, so that restoring reports it as missing."""


def _find_sources(
    wanted: Mapping[str, torch.Tensor], stored: checkpoint.Checkpoint
) -> dict[str, _Source]:
    """The source of each leaf of the wanted state."""
    held = {role: name for name, role in _find_roles(list(stored)).items()}
    masters, after = _find_masters(stored, held), _find_roles(wanted)
    before, now = (
        _find_codings(held, stored),
        _find_codings({r: name for name, r in after.items()}, wanted),
    )
    halved = {
        role.path
        for name, role in after.items()
        if role.field == _MASTERS and wanted[name].dtype == torch.int16
    }

    def own(path: str, name: str) -> _Source:
        """The source of a parameter or of its master."""
        param, master = f"params/{path}", masters.get(path)
        if param not in stored:
            return _NOWHERE
        is_param = name == param
        half = master is not None and stored[master].dtype == torch.int16
        if path in halved:
            wide = stored[master or param]
            return (param if is_param else master) if half else _take_half(wide, upper=is_param)
        if is_param and stored[param].dtype == wanted[name].dtype:
            return param
        return _join_halves(stored[param], stored[master]) if half and master else master or param

    found: dict[str, _Source] = {}
    for name, role in after.items():
        if role.field == _MASTERS or name.startswith("params/"):
            found[name] = own(role.path.removeprefix("params/"), name)
        elif role in held and before.get(_find_moment(role)) == now.get(_find_moment(role)):
            found[name] = held[role]
        else:
            coding = now.get(_find_moment(role))
            made = None if role.wrapper else _convert_moment(role, coding, held, stored)
            found[name] = None if role.wrapper else made or _NOWHERE
    return found


_MASTERS = "masters"


def _find_masters(stored: checkpoint.Checkpoint, held: Mapping[_Role, str]) -> dict[str, str]:
    """The stored masters, by the paths of their parameters."""
    return {role.path: name for role, name in held.items() if role.field == _MASTERS}


def _join_halves(high: Any, low: Any) -> Computed:
    """Masters in float32 from their upper halves (the parameters) and lower halves."""
    return Computed(high.shape, torch.float32, lambda where: joined(high[where], low[where]))


def _take_half(wide: Any, *, upper: bool) -> Computed:
    """The upper halves of masters (parameters in bfloat16), or the lower ones."""
    dtype = torch.bfloat16 if upper else torch.int16
    return Computed(wide.shape, dtype, lambda where: halves(wide[where].float())[not upper])


_CODES, _SCALES = QuantisedMoment._fields


def _find_moment(role: _Role) -> str:
    """The path of the moment that a leaf is, or is the codes or scales of."""
    whole, _, last = role.path.rpartition("/")
    return whole if last in QuantisedMoment._fields else role.path


def _find_codings(names: Mapping[_Role, str], leaves: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The dtype of the codes of each 8-bit moment, by its path."""
    rows = ((role, name) for role, name in names.items() if role.path.endswith(f"/{_CODES}"))
    return {_find_moment(role): leaves[name].dtype for role, name in rows}


def _convert_moment(
    role: _Role,
    coding: torch.dtype | None,
    held: Mapping[_Role, str],
    stored: checkpoint.Checkpoint,
) -> Computed | None:
    """Converts a moment between 8 bits and other dtypes, or between kinds of 8 bits.

    Args:
        role: of the wanted moment, or of its codes or scales.
        coding: the wanted dtype of the codes; None: the moment is not in 8 bits.
        held: the leaves of the checkpoint.
        stored: the checkpoint.

    Returns:
        The computation; None where the checkpoint has no such moment.
    """
    whole = _find_moment(role)
    signed = "/nu/" not in whole  # squares are unsigned

    def blocks(where: tuple[slice, ...], size: int) -> tuple[tuple, tuple, slice]:
        """The blocks that cover `where`, all elements of these blocks, and `where` in these."""
        *lead, part = where
        first, end = part.start // size, -(-part.stop // size)
        inside = slice(part.start - first * size, part.stop - first * size)
        return (*lead, slice(first, end)), (*lead, slice(first * size, end * size)), inside

    if (codes := held.get(_Role(f"{whole}/{_CODES}"))) is not None:
        values, scales = stored[codes], stored[held[_Role(f"{whole}/{_SCALES}")]]

        def read(where: tuple[slice, ...]) -> torch.Tensor:
            few, many, inside = blocks(where, values.shape[-1] // scales.shape[-1])
            return dequantise(QuantisedMoment(values[many], scales[few]), signed=signed)[
                ..., inside
            ]

        shape = values.shape
        if coding is None:
            return Computed(shape, torch.float32, read)
    elif coding is None or (name := held.get(_Role(whole))) is None:
        return None
    else:
        kept = stored[name]
        read, shape = lambda where: kept[where].float(), kept.shape
    scaled = role.path.endswith(f"/{_SCALES}")

    def make(where: tuple[slice, ...]) -> torch.Tensor:
        if scaled:
            *lead, part = where
            where = (*lead, slice(part.start * BLOCK, part.stop * BLOCK))
        _, many, inside = blocks(where, BLOCK)
        made = quantise(read(many), signed=signed, coding=coding_of(coding))
        return made.scales if scaled else made.codes[..., inside]

    if not scaled:
        return Computed(shape, coding, make)
    return Computed((*shape[:-1], shape[-1] // BLOCK), torch.float32, make)


def _describe_conversions(
    wanted: Mapping[str, torch.Tensor], stored: checkpoint.Checkpoint
) -> list[str]:
    """The conversions in words; none where the checkpoint has every leaf in the wanted dtype."""
    before, after = _find_roles(list(stored)), _find_roles(wanted)
    held = {role: name for name, role in before.items()}
    masters = _find_masters(stored, held)
    coded = _find_codings({role: name for name, role in after.items()}, wanted)
    changed: dict[str, None] = {}
    for name, leaf in wanted.items():
        role, was, now = after[name], None, _name_dtype(leaf.dtype)
        source = held.get(role)
        if source is not None:
            was = _name_dtype(stored[source].dtype)
        elif (dense := held.get(_Role(role.path.rpartition("/")[0]))) is not None:
            was, now = _name_dtype(stored[dense].dtype), _name_dtype(coded[_find_moment(role)])
        elif (codes := held.get(_Role(f"{role.path}/{_CODES}"))) is not None:
            was = _name_dtype(stored[codes].dtype)
        if role.field == _MASTERS and source is None:
            changed["masters made of the parameters"] = None
        elif was not in (None, now) and role.wrapper in (None, _WRAPPERS[0]):
            what = "masters" if role.field else "the optimizer's state"
            by = ""
            if name.startswith("params/"):
                path = name.removeprefix("params/")
                what, by = "parameters", " by their masters" if path in masters else ""
            changed[f"{what} from {was} to {now}{by}"] = None
    has = [
        {r.wrapper.title: None for r in x.values() if r.wrapper and r.wrapper.title}
        for x in (before, after)
    ]
    changed |= {f"without {title}": None for title in has[0] if title not in has[1]}
    new = [title for title in has[1] if title not in has[0] and title != _MASTERS]
    return [*changed, *(f"{title} as a run begins" for title in new)]


_BITS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.int16: "16 bits beside bfloat16", CODES["int8"]: "8 bits", CODES["fp8"]: "fp8"}
)


def _name_dtype(dtype: torch.dtype | None) -> str:
    """A dtype in words."""
    return _BITS.get(dtype, str(dtype).removeprefix("torch.")) if dtype else "another dtype"


def _describe_recipes(stored: checkpoint.Checkpoint, setup: RunSetup) -> Iterator[str]:
    """A change of the recipe of quantised products, which leaves no trace in the state."""
    settings = stored.metadata.get("config")
    if not isinstance(settings, Mapping):
        return
    table = nest_table(settings, type(setup.config)).get("precision", {})
    before, now = table.get("products", ""), setup.config.precision.products
    if recipe_text(before) != recipe_text(now):
        yield f"products from {before or 'plain'} to {now or 'plain'}"


def recipe_text(products: str) -> str:
    """The text of a recipe that is given by name or as text; an unknown one unchanged."""
    try:
        return str(Recipe.parse(products)) if products else ""
    except ValueError:
        return products


def _make_initial(name: str, leaf: torch.Tensor, setup: RunSetup) -> torch.Tensor:
    """The initial value of a leaf of a wrapper."""
    field, rules = name.rpartition("/")[2], setup.config.optimizer.loss_scale
    if field == "key":
        return random.key(0)  # as optim.with_stochastic_rounding begins
    value = {"scale": rules.initial, "hysteresis": rules.hysteresis, "last_finite": True}
    value["limit"] = float("inf")
    return torch.full(leaf.shape, value.get(field, 0), dtype=leaf.dtype)


# --- the learning rate of a run that goes on


def begun_with(out: Path, step: int, kind: type[TrainConfig] = TrainConfig) -> TrainConfig | None:
    """The configuration under which a run took its steps up to `step`; None: unknown.

    It is that of the checkpoint of this step, or else of the folder.
    """
    saved = out / run_folder.CHECKPOINTS / str(step)
    try:
        settings = checkpoint.metadata(saved).get("config") if saved.is_dir() else None
        if settings is not None:
            return read_settings(settings, str(saved), kind=kind)
        return load(out / run_folder.CONFIG, kind=kind)
    except ValueError:
        return None


_ENOUGH = 1e-6  # of the peak: rounding of float32
_JUMP = 0.01  # of the peak
_LOOKS = 16


def rate_notes(before: TrainConfig, now: TrainConfig, start: int) -> list[str]:
    """How the learning rates of a run that resumes after `start` steps differ from its old ones.

    Lines with the rates of both schedules and, where the rate jumps, the options that keep the old
    schedule or change to the new one gradually. Empty where nothing changes. For an optimizer with
    a rate of its own only the weight decay is compared.
    """
    if not start or now.steps <= start:
        return []
    lines = _describe_rates(before, now, start) if before.reads_rate and now.reads_rate else []
    decays = [float(decay(start)) for decay in (before.weight_decay, now.weight_decay)]
    if decays[0] != decays[1]:
        told = f"step {start + 1} decays weights by {decays[1]:g}, not {decays[0]:g}"
        lines.insert(1, told)
    return lines


def _describe_rates(before: TrainConfig, now: TrainConfig, start: int) -> list[str]:
    """The lines about the learning rate; the first has the rates of both schedules."""
    old, new = before.rate, now.rate
    peak = max(before.learning_rate.peak, now.learning_rate.peak)
    looks = {start, *(start + (now.steps - 1 - start) * i // _LOOKS for i in range(_LOOKS + 1))}
    apart = max(abs(float(old(at)) - float(new(at))) for at in looks if at >= start)
    if apart <= _ENOUGH * peak:
        return []
    last, kept, comes = float(old(start - 1)), float(old(start)), float(new(start))

    def shown(rate: float) -> str:
        return f"{rate:.4g} ({rate / peak:.1%} of the peak)"

    lines = [
        f"step {start} had {shown(last)}; step {start + 1} takes {shown(comes)}, and under the old "
        f"schedule {shown(kept)}; the last step, {now.steps}, takes "
        f"{shown(float(new(now.steps - 1)))}, and under the old schedule, whose last step was "
        f"{before.steps}, {shown(float(old(now.steps - 1)))}"
    ]
    if abs(comes - last) > _JUMP * peak:
        lines.append(
            f"it jumps: to keep the old schedule, add {' '.join(_keep_schedule(before, now))}"
        )
        options = " ".join(_transition_options(now, start, last))
        lines.append(f"or to go over to the new one, {options}")
        lines.append("or leave it so, and the new one decides from here")
    return lines


def _keep_schedule(before: TrainConfig, now: TrainConfig) -> Iterator[str]:
    """The options that keep the schedule that the run had."""
    if before.rate_unit != now.rate_unit:
        yield f"--rate-unit {before.rate_unit}"
    for field in dataclasses.fields(before.rate_schedule):
        old, new = (getattr(c.rate_schedule, field.name) for c in (before, now))
        if old != new:
            yield f"--learning-rate.{field.name.replace('_', '-')} {old}"


_BETWEEN = 0.1  # of the steps that are left


def _transition_options(now: TrainConfig, start: int, rate: float) -> Iterator[str]:
    """The options that move gradually from this rate to that of the new schedule."""
    more = max(round(_BETWEEN * (now.steps - start)), 1)
    count = now.data.batches.first_sample if now.rate_unit == "samples" else int
    yield f"--learning-rate.rewarm-at {count(start)}"
    yield f"--learning-rate.rewarm-steps {count(start + more) - count(start)}"
    yield f"--learning-rate.rewarm-init {rate:.6g}"
