"""The state of a run from a checkpoint: of its own precision or of another, or of parameters alone.

| leaf                     | where the checkpoint lacks it, or has it in another dtype             |
|--------------------------|-----------------------------------------------------------------------|
| parameter                | its master, or else the parameter, rounded to nearest                 |
| master                   | the parameter, in float32                                             |
| moments, averages, sums  | converted to their dtype                                              |
| loss scale, its counts   | as a run begins                                                       |
| key of stochastic rounds | as a run begins                                                       |
| history of a product     | empty, as a run begins; nobody need say so                            |

What only the checkpoint has of these is left out. So a run in float32 that goes on as bf16 has its
parameters for masters, and comes back to float32 without a change. But for histories of delayed
scaling a quantised product keeps nothing between steps: fp8-block has the state of bf16.

The levels that masters, stochastic rounding, a loss scale and `optim.apply_if_finite` add to paths
are found by what these states have beside what they wrap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from functron import checkpoint, optim
from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.models import lora
from functron.models.config import GPTConfig
from functron.models.family import TrainedConfig
from functron.params import history_mask, init_params
from functron.precision import Recipe
from functron.training.plan import Plan
from functron.training.step import State

_SAYING = "--precision NAME (or --products) beside --resume says so; in Python recast=True"


def restored(
    path: Path, plan: Plan, key: torch.Tensor, device: torch.device, *, recast: bool = False
) -> tuple[State, tuple[str, ...]]:
    """The state in a checkpoint, for the next step of `plan`, and what was converted, in words.

    No collectives; every process of a bound mesh reads its own boxes, in the memory of its state.

    Args:
        path: of this run, made on any mesh, or of parameters alone.
        plan: of the run.
        key: of the run's seed.
        device: of the state.
        recast: whether the checkpoint may be of another precision.

    Raises:
        ValueError: the checkpoint is damaged, another model's or optimizer's, has moments in 8 bits
            that are to be in another dtype (or the other way), or is of another precision and
            `recast` is not set; or weights do not fit into float16.
    """
    stored = checkpoint.Checkpoint(path)
    names = list(stored)
    _check_layout(names, plan.config.architecture)
    adapted = lora.has_adapters(leaf.path for leaf in plan.placement.leaves)
    new = adapted and not lora.has_adapters(names)
    if new or not any(name.startswith("opt_state/") for name in names):
        return _of_params(path, plan, key, device, new=new, recast=recast)
    like = plan.init(key.to("meta"))
    wanted = dict(zip(tree.paths(like), tree.leaves(like), strict=True))
    stored.open(names)
    histories = _new_histories(plan, stored)
    sources = _sources(wanted, stored) | dict.fromkeys(histories)
    _check_moments(wanted, stored)
    _check_halves(wanted, sources, stored)
    done = [*_products(stored, plan), *_words(wanted, sources, stored)]
    _check_said(done, stored, recast)
    kept = {name: leaf for name, leaf in wanted.items() if sources[name] is not None}
    found = checkpoint.restore(
        path,
        kept,
        placement=plan.placement,
        cast=bool(done),
        sources={name: source for name, source in sources.items() if source is not None},
        device=device,
    )
    fresh = {name: _first(name, leaf, plan) for name, leaf in wanted.items() if name not in kept}
    found |= {name: leaf.to(device) for name, leaf in fresh.items()}
    state = tree.unflatten(tree.structure(like), [found[name] for name in wanted])
    if done:
        _check_range(state.params)
    return state, (*done, *_empty(histories))


def _of_params(
    path: Path, plan: Plan, key: torch.Tensor, device: torch.device, *, new: bool, recast: bool
) -> tuple[State, tuple[str, ...]]:
    """The state that begins with a checkpoint's parameters; `new` adapters are added to them."""
    where, params = plan.placement, plan.init(key.to("meta")).params
    if plan.config.optimizer.fp32_masters:  # which begin with what is stored in float32
        params = _as_stored(params, path)
        dtypes = {f"params/{name}": leaf.dtype for name, leaf in _named(params)}
        leaves = [
            dataclasses.replace(leaf, dtype=dtypes.get(leaf.path, leaf.dtype))
            for leaf in where.leaves
        ]
        where = dataclasses.replace(where, leaves=tuple(leaves))
    stored = checkpoint.Checkpoint(path)
    histories = _new_histories(plan, stored)
    chosen = {"params": lora.split(params)[0] if new else params}
    empty: tree.Tree = {}
    if histories:
        mask = history_mask(plan.defs)
        empty, chosen["params"] = tree.partition(chosen["params"], mask)
    own = {f"params/{name}": leaf for name, leaf in _named(chosen["params"])}
    done = _words(own, {name: name for name in own}, stored)
    _check_said(done, stored, recast)
    read = checkpoint.restore(path, chosen, placement=where, cast=recast, device=device)
    params = read["params"]
    if new:  # the model's own parameters are there, and nothing was added to them yet
        init_key, _ = random.split(key.to(device)).unbind(0)
        defs = lora.split(plan.defs)[1]
        adapters = init_params(init_key, defs, plan.stored_specs, plan.mesh)
        params = tree.join(params, adapters)
    if histories:
        zeros = tree.map(lambda leaf: torch.zeros_like(leaf, device=device), empty)
        params = tree.join(params, zeros)
    state = plan.init(key.to(device), params)
    if done:
        _check_range(state.params)
    return state, (*done, *_empty(histories))


def _new_histories(plan: Plan, stored: checkpoint.Checkpoint) -> list[str]:
    """The leaves that quantised products remember steps in, where the checkpoint has none."""
    found = tree.paths(tree.partition(plan.defs, history_mask(plan.defs))[0])
    names = [f"params/{name}" for name in found]
    return [] if any(name in stored for name in names) else names


def _empty(histories: Sequence[str]) -> list[str]:
    text = "histories of quantised products begin empty: the checkpoint has none"
    return [text] if histories else []


def _check_said(done: Sequence[str], stored: checkpoint.Checkpoint, recast: bool) -> None:
    """Refuse to convert what nobody said was to be converted."""
    title, wanted = f"the checkpoint {stored.path} is of another precision", "nothing to convert"
    found = [Problem("precision", text, wanted, _SAYING) for text in done]
    raise_problems(title, [] if recast else found)


def _check_layout(names: Sequence[str], model: TrainedConfig) -> None:
    """Refuse parameters that are joined where the model's are not, or the other way."""
    stored = any({"qkv", "gate_up"} & {*name.split("/")} for name in names)
    if isinstance(model, GPTConfig) and stored != model.fused_projections:
        way = "" if stored else " --fused-projections"
        fix = (
            f"leave it {stored}, or convert the parameters: functron convert run:RUN hf:MODEL, "
            f"then functron convert hf:MODEL run:NEW{way}"
        )
        title, got = "the checkpoint has another layout", str(model.fused_projections)
        refuse(title, "gpt.fused_projections", got, f"{stored}, as in the checkpoint", fix)


def _named(params: tree.Tree) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(tree.paths(params), tree.leaves(params), strict=True)


def _as_stored(params: tree.Tree, path: Path) -> tree.Tree:
    """`params`, in float32 where the checkpoint is and they are in less."""
    stored = checkpoint.Checkpoint(path)

    def one(name: str, leaf: torch.Tensor) -> torch.Tensor:
        held = stored[f"params/{name}"].dtype if f"params/{name}" in stored else None
        wide = held == torch.float32 and leaf.dtype in optim.LOW_PRECISION
        return leaf.float() if wide else leaf

    return tree.map_with_path(one, params)


def _check_range(params: tree.Tree) -> None:
    found = [
        Problem(f"params/{name}", "values that float16 has not", "at most 65504", "choose bf16")
        for name, leaf in _named(params)
        if leaf.dtype == torch.float16 and not bool(leaf.isfinite().all())
    ]
    raise_problems("the checkpoint cannot go on in float16", found)


# --- leaves of one state and of another


class _Wrapper(NamedTuple):
    """A state around another one.

    Attributes:
        own: its leaves, or subtrees, beside the state that it wraps.
        inner: where that is.
        title: in words.
    """

    own: tuple[str, ...]
    inner: str
    title: str


_WRAPPERS: tuple[_Wrapper, ...] = (
    _Wrapper(("masters",), "inner", "masters"),
    _Wrapper(("key", "count"), "inner", "the key of stochastic rounding"),
    _Wrapper(("scale", "good_steps", "hysteresis", "stuck"), "inner_state", "the loss scale"),
    _Wrapper(("notfinite_count", "last_finite", "total_notfinite"), "inner_state", "skipped steps"),
)


class _Role(NamedTuple):
    """What a leaf is, whatever surrounds it.

    Attributes:
        path: without the levels that wrappers add.
        wrapper: the one that it is of; None: it is of what is wrapped.
        field: its name in that state.
    """

    path: str
    wrapper: _Wrapper | None = None
    field: str = ""


def _roles(names: Collection[str]) -> dict[str, _Role]:
    """What each leaf of a state is."""
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


_NOWHERE = ""
"""The path of no leaf: restoring says that it is missing."""


def _sources(
    wanted: Mapping[str, torch.Tensor], stored: checkpoint.Checkpoint
) -> dict[str, str | None]:
    """Of each leaf that is wanted the stored one that it comes from; None: it begins anew."""
    by_role = {role: name for name, role in _roles(list(stored)).items()}
    masters = {r.path: name for r, name in by_role.items() if r.field == "masters"}
    found: dict[str, str | None] = {}
    for name, role in _roles(wanted).items():
        same = by_role.get(role)
        if same is None and role.field == "masters":
            same = f"params/{role.path}"
        elif same is None and role.wrapper is not None:
            found[name] = None
            continue
        elif name.startswith("params/") and same is not None:
            master = masters.get(name.removeprefix("params/"), same)
            same = same if stored[same].dtype == wanted[name].dtype else master
        found[name] = same or _NOWHERE
    return found


_BYTES = "codes"
"""Of a moment in 8 bits the leaf that has its values."""


def _check_moments(wanted: Mapping[str, torch.Tensor], stored: checkpoint.Checkpoint) -> None:
    """Refuse moments that would have to be converted from 8 bits, or to them."""
    fix = "keep their dtype (--optimizer.mu-dtype, --optimizer.nu-dtype), or begin a new run with "
    fix += "the parameters: functron convert run:RUN hf:MODEL, then hf:MODEL run:NEW"
    found = []
    held = {role.path: name for name, role in _roles(list(stored)).items() if not role.wrapper}
    for name, role in _roles(wanted).items():
        whole, _, last = role.path.rpartition("/")
        if f"{role.path}/{_BYTES}" in held:
            found.append(Problem(name, "moments in 8 bits", _short(wanted[name].dtype), fix))
        elif last == _BYTES and whole in held:
            got = stored[held[whole]].dtype_name
            found.append(Problem(name.rpartition("/")[0], got, "moments in 8 bits", fix))
    raise_problems("moments in 8 bits stay as they are", found)


def _check_halves(
    wanted: Mapping[str, torch.Tensor],
    sources: Mapping[str, str | None],
    stored: checkpoint.Checkpoint,
) -> None:
    """Refuse masters of 16 bits for anything else, and anything else for them."""
    fix = "keep --optimizer.master-bits as it was, or begin a new run with the parameters: "
    fix += "functron convert run:RUN hf:MODEL, then hf:MODEL run:NEW"
    found = []
    for name, leaf in wanted.items():
        source = sources[name]
        got = stored[source].dtype if source is not None and source in stored else leaf.dtype
        if (got == torch.int16) != (leaf.dtype == torch.int16):
            found.append(Problem(name, f"{_short(got)} of {source}", _short(leaf.dtype), fix))
    raise_problems("masters of 16 bits stay as they are", found)


def _words(
    wanted: Mapping[str, torch.Tensor],
    sources: Mapping[str, str | None],
    stored: checkpoint.Checkpoint,
) -> list[str]:
    """What is converted; no words where the checkpoint has each leaf as it is wanted."""
    before, after = _roles(list(stored)), _roles(list(wanted))
    changed: dict[str, None] = {}
    for name, leaf in wanted.items():
        top, _, rest = name.partition("/")
        source = sources[name]
        if source is None or source not in stored:
            continue
        held = stored[name].dtype if top == "params" and name in stored else stored[source].dtype
        is_master = before[source].field == "masters"
        if after[name].field == "masters" and not is_master:
            changed["float32 masters made of the parameters"] = None
        elif held != leaf.dtype and held is not None and rest:
            kind = {"params": "parameters"}.get(top, "the optimizer's state")
            whose = " by their masters" if top == "params" and is_master else ""
            changed[f"{kind} from {_short(held)} to {_short(leaf.dtype)}{whose}"] = None
    has = [{r.wrapper.title: None for r in x.values() if r.wrapper} for x in (before, after)]
    changed |= {f"without {title}": None for title in has[0] if title not in has[1]}
    new = [title for title in has[1] if title not in has[0] and title != "masters"]
    return [*changed, *(f"{title} as a run begins" for title in new)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products(stored: checkpoint.Checkpoint, plan: Plan) -> Iterator[str]:
    """A change of the recipe of quantised products, which no state tells."""
    settings = stored.metadata.get("config")
    if not isinstance(settings, Mapping):
        return
    before, now = settings.get("products", ""), plan.config.products
    if recipe_text(before) != recipe_text(now):
        yield f"products from {before or 'plain'} to {now or 'plain'}"


def recipe_text(products: str) -> str:
    """A recipe by name or as text, as text; an unknown one as it is."""
    try:
        return str(Recipe.parse(products)) if products else ""
    except ValueError:
        return products


def _first(name: str, leaf: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The value that a leaf of a wrapper begins with."""
    field, rules = name.rpartition("/")[2], plan.config.optimizer.loss_scale
    if field == "key":
        return random.key(0)  # as optim.with_stochastic_rounding begins
    value = {"scale": rules.initial, "hysteresis": rules.hysteresis, "last_finite": True}
    return torch.full(leaf.shape, value.get(field, 0), dtype=leaf.dtype)
