"""Hyperparameters as state: schedules for any of them, and changes between steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from functron import tree
from functron.errors import Problem, nearest, public, raise_problems
from functron.optim.host import readable
from functron.optim.learning_rate import new_count
from functron.optim.transformation import GradientTransformation, transformation
from functron.spmd.spec import P


class InjectHyperparamsState(NamedTuple):
    """The state of `inject_hyperparams`, as Optax's.

    Attributes:
        count: number of updates so far; int64, 0-dim.
        hyperparams: the numbers by name, of the last update where they are scheduled; float64,
            0-dim, in host memory. Others may be replaced between steps, by numbers too.
        inner_state: of the transformation that has them.
    """

    count: Any
    hyperparams: dict[str, Any]
    inner_state: tree.Tree


@public
def inject_hyperparams(
    factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """`factory`, whose numbers may be schedules, and are state that can be read and changed.

    Optax's `inject_hyperparams`. ``inject_hyperparams(adamw)(learning_rate=1e-3, b2=schedule)``
    has ``state.hyperparams["learning_rate"]``, which a checkpoint keeps. Every argument that is a
    number becomes such state, and every function a schedule of the count of updates. Eager updates
    are given plain numbers, so that they run as fused as ever; what is traced, compiled, vmapped
    or differentiated is given 0-dim tensors.

    Args:
        factory: makes a transformation of arguments that may be 0-dim tensors.
        static_args: names of arguments that are left alone: functions that are no schedules, such
            as masks, and numbers that decide what is computed.

    Raises:
        ValueError: `factory` has no such argument.
    """
    fixed = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(factory)
    names = list(signature.parameters)
    raise_problems(
        "inject_hyperparams",
        [
            Problem(f"static_args/{name}", repr(name), "an argument", nearest(name, names))
            for name in sorted(fixed)
            if name not in names
        ],
    )

    @functools.wraps(factory)
    def make(*args, **kwargs) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        schedules, numbers = {}, {}
        for name, value in bound.arguments.items():
            if name in fixed or isinstance(value, bool):
                continue
            if callable(value):
                schedules[name] = value
            elif isinstance(value, (int, float)) or _is_number(value):
                numbers[name] = value

        def build(hyperparams: Mapping[str, Any]) -> GradientTransformation:
            given = inspect.BoundArguments(signature, bound.arguments | dict(hyperparams))
            return factory(*given.args, **given.kwargs)

        return _injected(build, schedules, numbers)

    return make


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _injected(build: Callable, schedules: Mapping, numbers: Mapping) -> GradientTransformation:
    def now(count, others: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The hyperparameters of the update with this count."""
        found = {name: others[name] for name in numbers}
        found |= {name: schedule(count) for name, schedule in schedules.items()}
        return {name: _kept(value) for name, value in found.items()}

    def init(params):
        count = new_count(params)
        hyperparams = now(count, numbers)
        return InjectHyperparamsState(count, hyperparams, build(_given(hyperparams)).init(params))

    def run(name: str, updates, state, params):
        hyperparams = now(state.count, state.hyperparams)
        method = getattr(build(_given(hyperparams)), name)
        out, kept = method(updates, state.inner_state, params)
        return out, InjectHyperparamsState(state.count + 1, hyperparams, kept)

    def anything() -> GradientTransformation:
        return build(_given(now(torch.zeros((), dtype=torch.int64), numbers)))

    def specs(param_specs):
        hyperparams = {name: P() for name in (*numbers, *schedules)}
        return InjectHyperparamsState(P(), hyperparams, anything().specs(param_specs))

    return transformation(
        init,
        lambda updates, state, params=None: run("update", updates, state, params),
        specs,
        update_=lambda updates, state, params=None: run("update_", updates, state, params),
        step_=lambda grads, state, params: run("step_", grads, state, params),
        grad_specs=lambda param_specs: anything().grad_specs(param_specs),
    )


def _kept(value: Any) -> torch.Tensor:
    value = torch.as_tensor(value, dtype=torch.float64)
    return value.cpu() if readable(value) else value


def _given(hyperparams: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the factory is given: numbers, where they are known and nobody differentiates them."""
    return {name: x.item() if readable(x) else x for name, x in hyperparams.items()}
