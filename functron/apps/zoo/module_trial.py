"""A few tokens in a module, to find out what it computes: before it is traced, with its weights.

Trials say whether logits see later tokens, how many positions there are parameters for, whether
training draws other numbers than dropout, and how a module is told where packed documents begin.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn as torch_nn
from torch.utils._python_dispatch import TorchDispatchMode

from functron import partitioning
from functron.core import random
from functron.core.errors import Problem
from functron.core.typing import Tensor

Packing = Literal["", "positions", "mask", "bias", "masks", "biases"]
"""How a module is told which tokens are of one document: not at all; by ``position_ids`` alone,
which begin anew; by an ``attention_mask`` ``[batch, 1, seq, seq]`` besides, True where a token is
seen; by one that is added to scores; or by a dict of such, for layers with and without windows."""
_FULL, _SLIDING = "full_attention", "sliding_attention"  # transformers' names of these layers


class ModuleTrial(NamedTuple):
    """Findings of a few tokens in a module.

    Attributes:
        width: of its logits.
        positions: for how many tokens it has parameters; None: it has none.
        differs: whether it makes other logits in training.
        undrawn: why its training cannot be drawn from a key; empty: it can.
        packing: how it is told of packed documents.
        problems: why it cannot be trained at all.
    """

    width: int = 0
    positions: int | None = None
    differs: bool = False
    undrawn: str = ""
    packing: Packing = ""
    problems: tuple[Problem, ...] = ()


NUM_TOKENS = 8
"""Of the samples that modules are tried with."""
_SAMPLES = 5  # a prime, which no other dim is likely to be a multiple of


class _Positions(TorchDispatchMode):
    """Finds rows of parameters that are read in order, one for each position."""

    def __init__(self, module: torch_nn.Module):
        super().__init__()
        self.tables = {x.data_ptr() for x in module.parameters()}
        self.most: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.embedding, torch.ops.aten.index):
            table, ids = args[:2]
            ids = ids[0] if isinstance(ids, list | tuple) else ids
            ids = ids if table.data_ptr() in self.tables else None
            if (
                ids is not None
                and [*ids.shape[-1:]] == [NUM_TOKENS]
                and bool((ids.diff() == 1).all())
            ):
                self.most.append(table.shape[0] - int(ids.min()))
        return func(*args, **(kwargs or {}))


def try_module(module: torch_nn.Module, call: Callable) -> ModuleTrial:
    """Run a module on tokens; among its problems is that it sees those after theirs.

    The last tokens of all samples change, as a mean over samples sees those of all.

    Args:
        call: ``(fn, params, tokens, *, router, **more)`` to logits and a loss of routers, where
            `more` are further arguments of `fn`.
    """
    tokens = (torch.arange(2 * NUM_TOKENS) * 5 % 7 + 1).view(2, NUM_TOKENS)
    changed = tokens.clone()
    changed[:, -1] = tokens[:, -1] % 7 + 1  # 0 is often that of padding

    def run(tokens: Tensor, **more: Any) -> Any:
        return call(lambda _, *x, **y: module(*x, **y), {}, tokens, router=False, **more)[0]

    wanted = "logits [batch, seq, vocab] of tokens [batch, seq], or an output that has .logits"
    positions = _Positions(module)
    try:
        with torch.no_grad():
            with positions:
                out = run(tokens)
            after = run(changed)
    except Exception as error:  # of code that is not ours
        got = f"a forward that fails: {type(error).__name__}: {error}"
        return ModuleTrial(problems=(Problem("model", got, wanted),))
    if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != tokens.shape:
        got = f"{list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        found = Problem("model", f"an output {got}", wanted, "return them from forward")
        return ModuleTrial(problems=(found,))
    if not _is_close(out[:, :-1], after[:, :-1]):
        wanted = "of the tokens before alone: those after are what is learnt"
        got = "logits that see tokens after theirs"
        return ModuleTrial(problems=(Problem("model", got, wanted, "a causal decoder"),))
    most, packing = min(positions.most, default=None), _find_packing(module, run, tokens)
    return ModuleTrial(out.shape[-1], most, *try_training(module, call, run), packing)


def try_training(module: torch_nn.Module, call: Callable, run: Callable) -> tuple[bool, str]:
    """Whether logits are others in training, and why not all of that is drawn from a key.

    Args:
        call: as of `try_module`.
        run: ``(tokens)`` to the module's logits in evaluation.
    """
    tokens = (torch.arange(_SAMPLES * NUM_TOKENS) * 5 % 7 + 1).view(_SAMPLES, NUM_TOKENS)
    fn, params = partitioning.from_module(module, train=True)
    given = {"key": random.key(0), "rows": torch.arange(_SAMPLES)}

    def train(seed: int) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return call(fn, params, tokens, router=False, **given)[0]

    try:
        one, other = train(0), train(1)
    except Exception as error:
        return True, f"a forward that fails in training: {error}"
    same = torch.equal(one, other)
    undrawn = "" if same else "a forward that draws other random numbers in training than dropout's"
    with torch.no_grad():
        return not same or not _is_close(one, run(tokens)), undrawn


def _find_packing(module: torch_nn.Module, run: Callable, tokens: Tensor) -> Packing:
    """The first way in which documents of a sample have the logits that they have alone."""
    length = 3
    positions = torch.cat([torch.arange(length), torch.arange(NUM_TOKENS - length)])
    positions = positions.expand(len(tokens), NUM_TOKENS)
    segments = (torch.arange(NUM_TOKENS) >= length).long().expand(len(tokens), NUM_TOKENS)
    changed = tokens.clone()
    changed[:, :length] = tokens[:, :length] % 7 + 1
    for packing in _list_packings(module):
        short = 2 if packing in ("masks", "biases") else None
        try:
            with torch.no_grad(), _shorten_window(module, short):
                parts = [run(tokens[:, :length]), run(tokens[:, length:])]
                alone = torch.cat(parts, 1)
                given = pack_inputs(packing, module, positions, segments, alone.dtype)
                out, after = run(tokens, **given), run(changed, **given)
        except Exception:  # it takes no such argument
            continue
        least = 8 * torch.finfo(out.dtype).eps * float(out.abs().max())
        apart = float((out - after)[:, length:].abs().max()) <= least
        if apart and _is_close(out, alone):
            return packing
    return ""


@contextlib.contextmanager
def _shorten_window(module: torch_nn.Module, size: int | None) -> Iterator[None]:
    """Have windows of this size, so that they show in the few tokens that are tried."""
    if size is None:
        yield
        return
    config: Any = module.config
    own, config.sliding_window = config.sliding_window, size
    try:
        yield
    finally:
        config.sliding_window = own


def _list_packings(module: torch_nn.Module) -> Iterator[Packing]:
    """The ways that a module's arguments allow.

    A mask for all layers has no place for windows, which are wider than what is tried.
    """
    names = inspect.signature(module.forward).parameters
    config = getattr(module, "config", None)
    fields = ("sliding_window", "window_size", "attention_chunk_size", "local_attention")
    windows = any(getattr(config, name, None) for name in fields)
    if "position_ids" in names:
        yield "positions"
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if "attention_mask" in names and not windows:
        yield from ("mask", "bias")
    elif "attention_mask" in names and _SLIDING in kinds <= {_FULL, _SLIDING}:
        yield from ("masks", "biases")


def pack_inputs(
    packing: Packing,
    module: torch_nn.Module,
    positions: Tensor,
    segments: Tensor,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The arguments of a module besides tokens by which documents of a sample stay apart.

    Args:
        positions, segments: int64 ``[batch, seq]``, the places of tokens in their documents, and
            the numbers of these.
        dtype: of a mask that is added.
    """
    names = inspect.signature(module.forward).parameters
    found = {"position_ids": positions} if "position_ids" in names else {}
    if packing == "positions":
        return found
    places = torch.arange(segments.shape[1], device=segments.device)
    seen = segments[:, :, None] == segments[:, None, :]
    seen = (seen & (places[:, None] >= places)).unsqueeze(1)

    def show(seen: Tensor) -> Tensor:
        least = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).min
        added = packing in ("bias", "biases")
        return torch.where(seen, 0.0, least).to(dtype) if added else seen  # scores may be float32

    if packing in ("mask", "bias"):
        return {**found, "attention_mask": show(seen)}
    config: Any = module.config
    near = seen & (places[:, None] - places < config.sliding_window)
    kinds = {_FULL: seen, _SLIDING: near}
    masks: Any = {kind: show(kinds[kind]) for kind in sorted({*config.layer_types})}
    return {**found, "attention_mask": masks}


def drops_out(inner: torch_nn.Module) -> bool:
    """Whether a module has a rate of dropout, by the usual names."""
    rate = getattr(inner, "p", 0) if "Dropout" in type(inner).__name__ else 0
    own = (getattr(inner, name, 0) for name in ("attention_dropout", "dropout_p", "layerdrop"))
    rates = (rate, *own, getattr(inner, "dropout", 0))
    return any(isinstance(x, float) and x > 0 for x in rates)


def _is_close(one: Tensor, other: Tensor) -> bool:
    one, other = one.float(), other.float()
    return torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
