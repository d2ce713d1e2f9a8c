"""What the schema of an ATen operation says about it."""

from __future__ import annotations

from typing import Any

import torch


def functional_form(func) -> Any:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``; None where there is none of the same shape."""
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = func._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    found = getattr(packet, overload)
    changed = [argument for argument in func._schema.arguments if _writes(argument)]
    same = changed == list(func._schema.arguments[:1])
    return found if same and len(found._schema.returns) == 1 else None


def draws(func, args, kwargs) -> bool:
    """Whether a call of a seeded operation draws: attention kernels do only with dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given))
    return True


def _writes(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
