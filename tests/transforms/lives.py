"""The ways in which a program runs in one process: as it is, traced, and compiled."""

from __future__ import annotations

import functools

import functron as ft
from functron.program.interpreter import run_in_lockstep


def in_lockstep(fn):
    return lambda *args: run_in_lockstep(ft.trace(fn)(*args), *args)


LIVES = {
    "simulated": lambda fn: fn,
    "traced": in_lockstep,
    "jitted": functools.partial(ft.jit, backend="eager"),
}
