"""Functions by seed that write in place, through views, and their gradients on meshes and in traces.

    python -m tests.partitioning.in_place 0 1000     # seeds 0 to 999
    python -m tests.partitioning.in_place 17         # one seed, and the function that it stands for

A function is an operation, and a few steps that take a view of its result, write to that in place,
and read it again. Its gradients by torch's tape, in float64, are those of `functron.partition` on
each mesh, of traces, and of the equations of a trace, differentiated one by one. Where torch
refuses the function it is drawn again.

A new form belongs into `FORMS`, a new view into `VIEWS`, a failure that was mended into `CASES`.
"""

from __future__ import annotations

import random
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import functron as ft
from functron import P, lax

DTYPE = torch.float64
BATCH, SEQ, IN, WIDTH = 4, 6, 6, 8


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


PARAMS = {
    "b": _draw(WIDTH, seed=1),
    "e": _draw(10, WIDTH, seed=2),
    "w": _draw(IN, WIDTH, seed=3),
    "y": _draw(BATCH * SEQ * WIDTH, seed=4),
}
X = _draw(BATCH, SEQ, IN, seed=5)
IDS = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 10

OPERATIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    "product": lambda p, x, ids: x @ p["w"],
    "linear": lambda p, x, ids: F.linear(x, p["w"].T, p["b"]),
    "embedding": lambda p, x, ids: F.embedding(ids, p["e"]),
    "softmax": lambda p, x, ids: (x @ p["w"]).softmax(-1) * 2,
    "norm": lambda p, x, ids: F.layer_norm(x @ p["w"], (WIDTH,), p["b"]) + 0,
    "heads": lambda p, x, ids: (x @ p["w"]).view(*x.shape[:2], 2, 4).transpose(1, 2),
    "turned": lambda p, x, ids: (x @ p["w"]).transpose(0, 2) * 3,
    "flat": lambda p, x, ids: (x.reshape(-1, IN) @ p["w"]).reshape(*x.shape[:2], WIDTH),
    "packed": lambda p, x, ids: torch.cat([x @ p["w"], x @ p["w"] + p["b"]], -1),
    "zeros": lambda p, x, ids: torch.zeros_like(x @ p["w"]),
    "filled": lambda p, x, ids: torch.empty_like(x @ p["w"]).copy_(x @ p["w"]),
    "constant": lambda p, x, ids: x.new_zeros(*x.shape[:2], WIDTH),
}


class View(NamedTuple):
    """A view of a tensor.

    Attributes:
        text: an expression of ``h``, where it applies.
        twin: of the same view, for torch's tape, which lets no part of several be written to.
        owned: whether it shows memory by strides, of which that tape must know the owner: of what
            lies outside of a view by which it is taken, its gradient is zero.
    """

    text: str
    twin: str = ""
    owned: bool = False


VIEWS = [
    View("h"),
    View("h[..., 0]"),
    View("h[..., -1]"),
    View("h[1]"),
    View("h[:, 1:3]"),
    View("h[:, 2]"),
    View("h[1:, :2]"),
    View("h[..., ::2]"),
    View("h[..., 1::3]"),
    View("h[::2, 1:]"),
    View("h.transpose(0, 1)"),
    View("h.transpose(-1, -2)"),
    View("h.movedim(0, -1)"),
    View("h.view(-1)"),
    View("h.flatten(0, 1)"),
    View("h.unflatten(-1, (2, -1))"),
    View("h.unflatten(0, (2, -1))[:, 1]"),
    View("h.unsqueeze(1)"),
    View("h.unsqueeze(1).squeeze(1)"),
    View("h[:, None, 1:2].squeeze(1)"),
    View("h.select(1, 2)"),
    View("h.narrow(-1, 1, 2)"),
    View("h.diagonal(0, 0, 1)"),
    View("h.unfold(-1, 2, 2)"),
    View("h.unbind(1)[2]", "h.select(1, 2)"),
    View("h.chunk(2, -1)[1]", "h[..., (h.shape[-1] + 1) // 2:]"),
    View("h.split(3, 1)[0]", "h[:, :3]"),
    View("h.view_as(h)[..., 2:]"),
    View("h.as_strided((2, 3), (1, 7), 3)", owned=True),
    View("h.as_strided((2, 2), (2, 1), h.storage_offset())", owned=True),
]

FORMS = [
    "t += y",
    "t -= y",
    "t *= y",
    "t /= 3 + y * y",
    "t.add_(y, alpha=2)",
    "t.mul_(2)",
    "t.mul_(p['b'].sum())",
    "t.sub_(1.5)",
    "t.copy_(y)",
    "t[...] = y",
    "t[:1] = 0.5",
    "t[..., -1:] = y[..., -1:]",
    "t.fill_(0.25)",
    "t.fill_(p['b'].sum())",
    "t.zero_()",
    "t.masked_fill_(y > 0, 0.3)",
    "t[y > 0] = 0.5",
    "t[torch.arange(1)] = y[:1]",
    "t.index_add_(-1, torch.arange(1), y[..., :1])",
    "t.clamp_(-0.5, 0.5)",
    "t.clamp_min_(0.1)",
    "t.relu_()",
    "t.sigmoid_()",
    "t.tanh_()",
    "t.neg_()",
    "t.addcmul_(y, y, value=0.5)",
    "t.lerp_(y, 0.25)",
    "t.unsqueeze_(0).mul_(y)",
    "torch.nn.functional.relu(t, inplace=True)",
    "t.copy_(h.detach().reshape(-1)[: t.numel()].view(t.shape) * y)",
    "with torch.no_grad(): t.mul_(2)",
    "with torch.no_grad(): t[:1] = 0.5",
    "t.detach().mul_(3)",
]

READS = [
    "(h * h.cos()).sum()",
    "(t * t).sum()",
    "h.softmax(-1).square().sum()",
    "(h.flatten(1) @ h.flatten(1).T).sum()",
    "h.sum(-1).square().sum()",
    "(h.reshape(-1)[:24].view(2, 3, 4) ** 2).sum()",
]

MESHES: Mapping[str, tuple[dict[str, int], P, P]] = {
    "one": ({}, P(), P()),
    "dp": ({"dp": 2}, P("dp"), P()),
    "tp": ({"tp": 2}, P(), P(None, "tp")),
    "sp": ({"tp": 2}, P(None, "tp"), P()),
    "dp+tp": ({"dp": 2, "tp": 2}, P("dp"), P(None, "tp")),
}
"""Sizes of axes, and the specs of activations and of weights."""


class Case(NamedTuple):
    """A function.

    Attributes:
        operation: what is written to.
        steps: a view of ``h`` or of the view before, a form of writing to it, and what is read.
        remat: whether it is computed again in backward.
    """

    operation: str
    steps: tuple[tuple[View, bool, str, str], ...]
    remat: bool = False

    def text(self, *, twin: bool = False, owned: bool = False) -> str:
        """The function's code; `owned`: with strides taken of what owns the memory."""
        lines = ["def f(p, x, ids):", f"    h = t = operations[{self.operation!r}](p, x, ids)"]
        lines.append("    total = 0.0")
        for view, nested, form, read in self.steps:
            shown = view.twin if twin and view.twin else view.text
            shown = shown.replace("h", "t") if nested else shown
            shown = f"owner(h, t){shown[1:]}" if owned and view.owned else shown
            lines += [f"    t = {shown}"]
            lines += ["    y = p['y'][: t.numel()].view(t.shape)", f"    {form}"]
            lines += [f"    total = total + {read}"] * (read != "")
        return "\n".join([*lines, "    return total"])

    def function(self, *, twin: bool = False, owned: bool = False) -> Callable[..., torch.Tensor]:
        """The function itself."""
        names: dict[str, Any] = {"torch": torch, "operations": OPERATIONS, "owner": _owner}
        exec(compile(self.text(twin=twin, owned=owned), "<in place>", "exec"), names)
        return names["f"]


def drawn(seed: int) -> Case:
    """A case, which torch may refuse."""
    rng = random.Random(seed)
    steps, count = [], rng.choice((1, 1, 2, 3))
    for number in range(count):
        read = rng.choice(READS) if number == count - 1 or rng.random() < 0.4 else ""
        view = rng.choice(VIEWS)
        nested = number > 0 and rng.random() < 0.3
        steps.append((view, nested, rng.choice(FORMS), read))
    return Case(rng.choice([*OPERATIONS]), tuple(steps), rng.random() < 0.15)


def draw(seed: int) -> Case:
    """A case that torch takes: of this seed, or of one that follows of it."""
    for number in range(1000):
        case = drawn(1000 * seed + number)
        try:
            expected(case)
            expected(case, slice(0, 2))
        except (RuntimeError, IndexError, AttributeError):
            continue
        return case
    raise ValueError(f"torch takes no function of seed {seed}")


def _owner(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The tensor that owns the memory of t: h, unless t is a copy."""
    return h if h.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() else t


Gradients = dict[str, torch.Tensor]


def expected(case: Case, rows: slice = slice(None)) -> Gradients:
    """The gradients, by torch's tape, of some samples."""
    leaves = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    value = case.function(twin=True, owned=True)(leaves, X[rows].clone(), IDS[rows])
    if not value.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    found = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return {name: torch.zeros_like(PARAMS[name]) if g is None else g for name, g in pairs}


def by_equations(f: Callable[..., torch.Tensor]) -> Gradients:
    """The gradients of the equations of a trace, each differentiated as torch does."""
    program = ft.trace(f)(PARAMS, X, IDS)
    leaves = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    given = [*(leaves[name] for name in sorted(leaves)), X, IDS]
    values: dict[Any, Any] = dict(zip([i.var for i in program.inputs], given, strict=False))
    values.update({i.var: i.value for i in program.inputs if i.value is not None})

    def filled(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [filled(item) for item in value]
        return values.get(value, value) if type(value).__name__ == "Var" else value

    for equation in program.block.equations:
        op: Any = equation.op
        out = op(*map(filled, equation.args), **{k: filled(v) for k, v in equation.kwargs.items()})
        values.update(zip(equation.outputs, out if isinstance(out, (list, tuple)) else [out],
                          strict=False))  # fmt: skip
    (total,) = map(filled, program.block.outputs)
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    found = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
    rows = zip(leaves, found, strict=True)
    return {name: torch.zeros_like(PARAMS[name]) if g is None else g for name, g in rows}


def ways(case: Case, names: Any) -> dict[str, Callable[[], Gradients]]:
    """The ways in which the gradients are computed here, on meshes of these names."""
    f = case.function()
    grad = ft.grad(ft.remat(f) if case.remat else f)

    def partitioned(name: str) -> Gradients:
        sizes, rows, columns = MESHES[name]
        specs = {"b": P(*columns[1:]), "e": columns, "w": columns, "y": P()}
        mapped = ft.partition(grad, ft.Mesh(**sizes), (specs, rows, rows), specs, pick="cheapest")
        return mapped(PARAMS, X, IDS)

    found: dict[str, Callable[[], Gradients]] = {
        "trace": lambda: ft.trace(ft.grad(case.function(twin=True)))(PARAMS, X, IDS)(
            PARAMS, X, IDS
        ),
        "equations": lambda: by_equations(f),
    }
    if any("no_grad" in form or "detach" in form for *_, form, _ in case.steps):
        del found["equations"]  # which do not say where gradients stop
    return found | {name: lambda name=name: partitioned(name) for name in names}


def check_mapped(case: Case) -> list[str]:
    """What is wrong with a case of a rank's own samples, simulated: vmap takes it or refuses."""

    if any(view.owned and nested for view, nested, *_ in case.steps):
        return []  # no trace, so that the derivative is torch's own: of the view alone

    def rank(params, x, ids):
        loss = case.function(twin=True)
        grads = ft.grad(lambda p: lax.psum(loss(p, x, ids), "dp"))(params)
        return ft.sync_gradients(grads, specs)

    specs = dict.fromkeys(PARAMS, P())
    mapped = ft.shard_map(rank, ft.Mesh(dp=2), (specs, P("dp"), P("dp")), specs)
    halves = [expected(case, rows) for rows in (slice(0, 2), slice(2, 4))]
    try:
        got = mapped(PARAMS, X, IDS)
    except (RuntimeError, ValueError) as error:
        return [] if "vmap" in str(error) else [f"mapped: {error}"]
    wanted = {name: halves[0][name] + halves[1][name] for name in PARAMS}
    return _compared("mapped", got, wanted)


def _compared(way: str, got: Gradients, wanted: Gradients) -> list[str]:
    lines = []
    for name, value in wanted.items():
        off = (got[name] - value).abs().max()
        if not off <= 1e-10 * (1 + value.abs().max()):
            lines.append(f"{way}: the gradient of {name} is off by {off}")
    return lines


def check(case: Case, names: Any = tuple(MESHES)) -> list[str]:
    """What is wrong with a case, a line each."""
    wanted, lines = expected(case), []
    for way, run in ways(case, names).items():
        try:
            got = run()
        except Exception as error:  # refusing what torch takes is a failure too
            refusal = re.search("tape forgets|the tape drops the gradient", str(error))
            if refusal and way == "trace":  # which that differentiates
                continue
            lines.append(f"{way}: {type(error).__name__}: {error}")
            if "-v" in sys.argv:
                traceback.print_exc()
            continue
        lines += _compared(way, got, wanted)
    return lines


if __name__ == "__main__":
    ends = [int(word) for word in sys.argv[1:] if word.isdigit()]
    for seed in range(ends[0], ends[-1] if len(ends) > 1 else ends[0] + 1):
        case = draw(seed)
        lines = [*check(case), *check_mapped(case)]
        if lines or len(ends) == 1:
            print(f"seed {seed}\n{case.text()}\n" + "\n".join(line[:300] for line in lines))
