"""Ids that index a table or columns: refused outside of their range, wherever they are used.

Vocabulary-parallel lookups take an id that no rank holds for one that another rank has, so that one
outside of the vocabulary would count as zeros, on a single device too.
"""

from __future__ import annotations

import torch

from functron.core import compat
from functron.core.errors import refuse
from functron.core.scopes import phase
from functron.program.recorder import active

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("check_ids(Tensor ids, str name, int size, int? ignored) -> ()")


def check_ids(ids: torch.Tensor, name: str, size: int, ignored: int | None = None) -> None:
    """Check that ids are 0 to ``size - 1``, on every rank; where a program is traced, when it runs.

    On CPUs, also in compiled programs, the numbers are looked at. On other devices, and where
    something else than `trace` records, a device-side assertion says the same: nothing waits.

    Args:
        ids: integers of any shape.
        name: what they are, for messages.
        size: of the vocabulary.
        ignored: one more that is allowed; None: none.

    Raises:
        ValueError: an id is outside.
    """
    if phase() == "recompute":
        return
    if torch.compiler.is_compiling():
        _assert(ids, name, size, ignored)
        return
    with compat.no_transforms(), torch.no_grad():
        plain, recorder = compat.plain(ids), active()
        if recorder is not None:
            recorder.effect(torch.ops.functron.check_ids.default, plain, name, size, ignored)
        elif plain.device.type != "cpu" or compat.dispatch_modes_active():
            _assert(plain, name, size, ignored)
        else:
            _check(plain, name, size, ignored)


def _inside(ids: torch.Tensor, size: int, ignored: int | None) -> torch.Tensor:
    inside = (ids >= 0) & (ids < size)
    return inside if ignored is None else inside | (ids == ignored)


def _wanted(size: int, ignored: int | None) -> str:
    return f"0 to {size - 1}" + ("" if ignored is None else f", or {ignored}, which is ignored")


def _assert(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> None:
    message = f"{name} outside of the vocabulary; wanted {_wanted(size, ignored)}"
    torch._assert_async(_inside(ids, size, ignored).all(), message)


def _check(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> None:
    if not ids.numel():
        return
    low, high = ids.aminmax()
    if low >= 0 and high < size:
        return
    bad = ids[~_inside(ids, size, ignored)]
    if not bad.numel():
        return
    count = f"{bad.numel()} ids" if bad.numel() > 1 else "one id"
    got = f"{count} outside, from {int(bad.min())} to {int(bad.max())}"
    fix = f"use a model with vocab_size > {int(bad.max())}, or another tokenizer"
    if int(bad.min()) < 0:
        fix = "give no ids below 0"
        if ignored is not None:
            fix += f"; targets that shall not count are {ignored}"
    refuse(f"{name} outside of the vocabulary", name, got, _wanted(size, ignored), fix)


def _run(ids: torch.Tensor, name: str, size: int, ignored: int | None) -> None:
    check = _check if ids.device.type == "cpu" else _assert
    check(ids, name, size, ignored)


_LIBRARY.impl("check_ids", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("check_ids", lambda *args: None, "Meta")
