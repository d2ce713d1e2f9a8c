"""Modules: any `torch.nn.Module` as a pure function of its parameters.

A module has parameters, buffers, a mode and torch's random state. In a function of `from_module`
parameters are an argument, buffers another where the module changes them, the mode is fixed, and
dropout draws from a key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from functron.core import random
from functron.core.errors import public
from functron.core.scopes import named_scope

Values = Mapping[str, torch.Tensor]
"""Parameters or buffers by their names."""


@public
def from_module(
    module: torch.nn.Module, *, train: bool = False, buffers: bool = False
) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    r"""``(fn, params)``: the module as ``fn(params, *args, **kwargs)``, and its parameters by name.

    Names are those of ``module.named_parameters()``, in its order; weights that are tied come once,
    under their first name, and are tied in `fn`. Tensors are the module's own, detached; the module
    itself stays as it is, and `fn` leaves it so.

    ``fn(params, input_ids=tokens).logits`` runs what the module's forward runs, on one device.
    With `functron.partition` it becomes the program of any mesh::

        fn, params = ft.from_module(model)
        specs = ft.Rules({r"(q|k|v|gate|up)_proj": P("tp"), r"(o|down)_proj": P(None, "tp")})
        logits = ft.partition(lambda p, t: fn(p, t).logits, mesh, (specs.specs(params), P("dp")))

    Each module inside runs in a named scope, ``model/layers.0/mlp``, by which programs show it and
    `functron.partition` may constrain what it returns: with
    ``constraints={r"layers.\d+$": P("dp", "tp")}`` the residual stream is split along the sequence.

    >>> f, params = ft.from_module(torch.nn.Linear(3, 2))
    >>> [*params], f(params, torch.zeros(5, 3)).shape
    (['weight', 'bias'], torch.Size([5, 2]))

    Args:
        train: run it in training mode: dropout is on, and draws from ``fn(..., key=key)``. With
            ``rows=`` int64 ``[batch]``, the samples' numbers in the global batch, numbers are those
            of the samples: the same in any number of microbatches.
        buffers: `fn` takes the module's buffers by name after the parameters, and returns
            ``(result, buffers)`` with changed ones, such as running means. They are
            ``dict(module.named_buffers())`` at first. False: they are constants.

    Raises:
        ValueError: (when `fn` is called) a parameter is missing, or one too many; the module
            changed a buffer, without `buffers`; it used dropout without a key, or, with rows, of
            what is not of each sample; or it drew torch's own random numbers.
    """
    params = {name: value.detach() for name, value in module.named_parameters()}
    held = {name: value.detach() for name, value in module.named_buffers()}
    function = _ModuleFunction(module, train, buffers, params, held)
    return function, dict(params)


class _ModuleFunction:
    """A module as a function; a class, so that it has no closure to be searched for tensors."""

    def __init__(self, module, train: bool, buffers: bool, params: Values, held: Values):
        self._module, self._train, self._buffers = module, train, buffers
        self._names, self._held = tuple(params), held
        self.__name__ = type(module).__name__

    def __call__(
        self, params: Values, *args: Any, key: Any = None, rows: Any = None, **kwargs: Any
    ) -> Any:
        missing, more = set(self._names) - set(params), set(params) - set(self._names)
        if missing or more:
            raise ValueError(
                f"{self.__name__}: got parameters "
                + ("without " + ", ".join(sorted(missing)[:5]) if missing else "")
                + (" and " if missing and more else "")
                + ("with " + ", ".join(sorted(more)[:5]) if more else "")
                + "; wanted those that from_module returned, by name"
            )
        held: Values = self._held
        if self._buffers:
            held, args = args[0], args[1:]
        # a buffer that forward changes must be neither the caller's nor the module's
        own = self._buffers or self._train
        copies = {name: value.clone() for name, value in held.items()} if own else held
        before = {name: value._version for name, value in copies.items()}
        mode, scopes = _set_mode(self._module, self._train), _name_scopes(self._module)
        with mode, scopes, _KeyedDropout(key, rows, self.__name__):
            out = torch.func.functional_call(self._module, {**params, **copies}, args, kwargs)
        if self._buffers:
            return out, copies
        changed = [name for name, value in copies.items() if value._version != before[name]]
        if changed:
            raise ValueError(
                f"{self.__name__}: its forward changed the buffers {', '.join(changed)}; wanted a "
                "pure function; fix: from_module(module, buffers=True), which takes and returns "
                "them, or train=False"
            )
        return out


@contextlib.contextmanager
def _name_scopes(module: torch.nn.Module) -> Iterator[None]:
    """Run a with block with every module's forward in a named scope of its name in its caller."""
    names = {inner: name for name, inner in module.named_modules() if name}
    open_scopes: list[tuple[str, contextlib.AbstractContextManager]] = []

    def enter(inner: torch.nn.Module, args: object) -> None:
        name, outer = names[inner], open_scopes[-1][0] if open_scopes else ""
        inside = name.startswith(f"{outer}.")
        scope = named_scope(name[len(outer) + 1 :] if inside else name)
        scope.__enter__()
        open_scopes.append((name, scope))

    def leave(inner: torch.nn.Module, args: object, out: object) -> None:
        open_scopes.pop()[1].__exit__(None, None, None)

    hooks = []
    for inner in names:
        hooks.append(inner.register_forward_pre_hook(enter, prepend=True))
        hooks.append(inner.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _set_mode(module: torch.nn.Module, train: bool) -> Iterator[None]:
    """Training or evaluation mode of all modules inside, in a with block."""
    before = [(inner, inner.training) for inner in module.modules()]
    try:
        for inner, _ in before:
            inner.training = train
        yield
    finally:
        for inner, training in before:
            inner.training = training


_DROPOUTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


class _KeyedDropout(TorchFunctionMode):
    """Dropout of a with block, drawn from a key, each call from one of its own."""

    def __init__(self, key: Any, rows: Any, name: str):
        super().__init__()
        self._key, self._rows, self._name, self._count = key, rows, name, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func in _DROPOUTS and kwargs.get("training", True) and kwargs.get("p", 0.5):
            self._refuse(f"{func.__name__}, whose masks are of whole channels")
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or any(args[4:5])):
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{self._name}: its forward runs {what}; wanted dropout of elements, or none; fix: "
            "from_module(module, train=False), or a probability of 0 in its configuration"
        )

    def _dropout(self, input, p=0.5, training=True, train=None, inplace=False):  # noqa: A002
        on = training if train is None else train
        if not on or not p:
            return input
        keep = self._draw_mask(input.shape, p, input.device)
        return torch.where(
            keep, input / (1 - p), torch.zeros((), dtype=input.dtype, device=input.device)
        )

    def _draw_mask(self, shape, p: float, device) -> torch.Tensor:
        if self._key is None:
            raise ValueError(
                f"{self._name}: its forward drops out without a key; wanted randomness as an "
                "argument; fix: fn(params, ..., key=functron.random.key(0)), another in every step"
            )
        self._count += 1
        key = random.fold_in(self._key, self._count)
        if self._rows is None:
            return random.bernoulli(key, 1 - p, tuple(shape))
        each, rest = divmod(shape[0] if len(shape) else 1, len(self._rows))
        if rest:
            self._refuse(
                f"dropout of {list(shape)}, whose first dim is not of {len(self._rows)} samples"
            )
        # the size of the first dim does not enter the numbers: it is the slowest of the counter
        places = self._rows
        if each > 1:  # heads or tokens of each sample
            places = (places[:, None] * each + torch.arange(each, device=places.device)).flatten()
        index = (places, *[None] * (len(shape) - 1))
        return random.bernoulli(key, 1 - p, tuple(shape), index=index)

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                   scale=None, enable_gqa=False):  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value
