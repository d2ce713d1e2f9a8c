"""The promise of types: ranks' parts, put together as they say, are the operation of whole values."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import functron as ft
from functron import Mesh, P, lax
from functron.program.types import ValueType
from functron.spmd.spec import DimCut, local_shape, take

MESH = Mesh(a=2, b=3)
RANKS = list(itertools.product(range(2), range(3)))


def put_together(parts, kind: ValueType, axes):
    """The value whose parts the ranks of these axes hold; parts are by coordinate, {(a, b): x}."""
    names = [name for name, _ in kind.axes]
    # the innermost of the axes that split a dim are joined first
    order = sorted(axes, key=lambda name: (len(kind[name].inside), kind[name].blocks), reverse=True)
    for name in order:
        at, place = kind[name], names.index(name)
        groups: dict = {}
        for coordinate, x in sorted(parts.items()):
            key = tuple(0 if i == place else c for i, c in enumerate(coordinate))
            groups.setdefault(key, []).append(x)
        joined = {}
        for key, rows in groups.items():
            if len(rows) == 1:
                joined[key] = rows[0]
            elif at.kind == "replicated":
                for row in rows[1:]:
                    torch.testing.assert_close(row, rows[0])
                joined[key] = rows[0]
            elif at.kind == "partial":
                joined[key] = sum(rows[1:], rows[0])
            else:
                dim, blocks = at.dim, at.blocks
                # axes inside were joined before, so that a block is as long as they made it
                pieces = [row.unflatten(dim, (blocks, -1)) for row in rows]
                joined[key] = torch.cat(pieces, dim + 1).flatten(dim, dim + 1)
        parts = joined
    return parts


UNARY = {
    "relu": torch.relu,
    "scale": lambda x: 3 * x,
    "transpose": lambda x: x.transpose(0, -1),
    "sum first": lambda x: x.sum(0),
    "sum last": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(0, keepdim=True),
    "max": lambda x: x.amax(-1, keepdim=True),
    "softmax": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "first": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "triangle": torch.tril,
}
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "mm": lambda x, y: x @ y,
    "mmt": lambda x, y: x @ y.transpose(-2, -1),
    "cat": lambda x, y: torch.cat([x, y], 0),
    "stack": lambda x, y: torch.stack([x, y], 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "square": lambda x, y: (x * y) @ (x * y).transpose(-2, -1),
    "product of sums": lambda x, y: x.sum(-1) * y.sum(-1),
    "linear": lambda x, y: torch.nn.functional.linear(x, y, y.sum(-1)),
    "added bias": lambda x, y: torch.nn.functional.linear(x, y, torch.ones_like(y[:, 0])),
}
VIEWS = {
    "flatten": lambda x: x.flatten(0, 1),
    "flatten last": lambda x: x.flatten(-2, -1),
    "halve": lambda x: x.unflatten(0, (-1, 2)),
    "halve major": lambda x: x.unflatten(0, (2, -1)),
    "halve last": lambda x: x.unflatten(-1, (-1, 2)),
}


OPERATIONS = {**UNARY, **BINARY, **VIEWS}


def draw_steps(seed, shapes):
    """A random program of values of these shapes: operations that fit, with operands' places."""
    generator = random.Random(seed)
    names = [*UNARY, *BINARY, *BINARY, *VIEWS, *VIEWS]
    values, steps = [torch.zeros(shape) for shape in shapes], []
    for _ in range(24):
        name = generator.choice(names)
        operands = [generator.randrange(len(values)) for _ in range(1 + (name in BINARY))]
        try:
            value = OPERATIONS[name](*(values[i] for i in operands))
        except (RuntimeError, IndexError):
            continue
        if 0 < value.dim() <= 4:
            values.append(value)
            steps.append((name, operands))
    return steps


def run(steps, args):
    values = list(args)
    for name, operands in steps:
        values.append(OPERATIONS[name](*(values[i] for i in operands)))
    return values


SPECS = [P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P(("b", "a")), P("b", "a"), P()]


def check_promises(seed):
    """Trace and simulate one program; how many promises of which kinds were compared."""
    generator = random.Random(seed)
    specs = tuple(generator.choice(SPECS) for _ in range(3))
    torch.manual_seed(seed)
    args = [torch.randn(12, 12, dtype=torch.float64) for _ in range(3)]
    steps = draw_steps(seed, [local_shape((12, 12), spec, MESH) for spec in specs])
    types: list[ValueType] = []

    def traced(*args):
        types.extend(map(ft.typeof, run(steps, args)))
        return lax.psum(lax.axis_index(("a", "b")), ("a", "b"))

    ft.trace(ft.shard_map(traced, MESH, specs, P()))(*args)

    def program(*args):
        return [lax.all_gather(lax.all_gather(v, "b"), "a") for v in run(steps, args)]

    every = ft.shard_map(program, MESH, specs, P(), check=False)(*args)
    count: dict[str, int] = {}
    for place, (name, operands) in enumerate(steps, 3):
        told = [n for n, at in types[place].axes if at.kind != "varying"]
        wholes = [put_together({c: every[i][c] for c in RANKS}, types[i], told) for i in operands]
        result = put_together({c: every[place][c] for c in RANKS}, types[place], told)
        for coordinate, got in result.items():
            given = [whole[coordinate] for whole in wholes]
            if name in VIEWS:
                want = given[0].reshape(got.shape)
            else:
                want = OPERATIONS[name](*given)
            words = f"{name} of {[types[i] for i in operands]} to {types[place]}"
            assert torch.allclose(got, want, rtol=1e-10, atol=1e-10), words
        for _, at in types[place].axes:
            count[at.kind] = count.get(at.kind, 0) + 1
    return count


def test_parts_put_together_are_the_operation_of_whole_values():
    total: dict[str, int] = {}
    for seed in range(40):
        for kind, number in check_promises(seed).items():
            total[kind] = total.get(kind, 0) + number
    assert min(total[k] for k in ("split", "partial", "varying", "replicated")) > 25, total


def decoder_loss(params, tokens, heads, reduce):
    """The summed loss of a decoder of one layer: of a rank's tokens, heads and hidden features."""
    x = torch.nn.functional.embedding(tokens, params["embed"])
    h = torch.nn.functional.layer_norm(x, x.shape[-1:])
    q, k, v = ((h @ params[name]).unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv")
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + reduce(y.transpose(1, 2).flatten(2) @ params["o"])
    x = x + reduce(torch.nn.functional.silu(x @ params["up"]) @ params["down"])
    logits = (x @ params["embed"].mT).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, tokens.flatten(), reduction="sum")


def test_shares_of_gradients_put_together_are_the_gradient_of_one_device():
    mesh = Mesh(a=2, b=2)
    torch.manual_seed(0)
    columns, rows = P(None, "b"), P("b")
    specs = {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows}
    specs["embed"] = P()
    params = {name: torch.randn(8, 8, dtype=torch.float64) for name in specs}
    tokens = torch.randint(8, (4, 5))
    types: dict[str, ValueType] = {}

    def shares(params, tokens):
        def loss(params):
            own = decoder_loss(params, tokens, 2, lambda x: lax.psum(x, "b"))
            return lax.psum(own, "a")

        return ft.grad(loss)(params)

    def traced(params, tokens):
        found = shares(params, tokens)
        types.update(ft.tree.map(ft.typeof, found))
        return ft.sync_gradients(found, specs)

    def gathered(params, tokens):
        found = shares(params, tokens)
        return ft.tree.map(lambda x: lax.all_gather(lax.all_gather(x, "b"), "a"), found)

    ft.trace(ft.shard_map(traced, mesh, (specs, P("a")), specs))(params, tokens)
    every = ft.shard_map(gathered, mesh, (specs, P("a")), P(), check=False)(params, tokens)
    want = torch.func.grad(lambda p: decoder_loss(p, tokens, 4, lambda x: x))(params)
    for name, spec in specs.items():
        kinds = [at.kind for _, at in types[name].axes]
        assert kinds == ["partial", "split" if spec else "varying"], (name, types[name])
        if not spec:  # the same on all ranks of b, as shares of a loss that each has whole
            continue
        parts = {c: every[name][c] for c in itertools.product(range(2), range(2))}
        (got,) = put_together(parts, types[name], ["a", "b"]).values()
        torch.testing.assert_close(got, want[name], rtol=1e-10, atol=1e-10)


SAME_VALUE = {
    "gather": (lambda x: lax.all_gather(x, "b", tiled=True), P("b")),
    "gather the minor": (lambda x: lax.all_gather(x, "b", tiled=True), P(("a", "b"))),
    "gather the major": (lambda x: lax.all_gather(x, "a", tiled=True), P(("a", "b"))),
    "gather both": (lambda x: lax.all_gather(x, ("a", "b"), tiled=True), P(("a", "b"))),
    "gather columns": (lambda x: lax.all_gather(x, "b", axis=1, tiled=True), P("a", "b")),
    "exchange": (lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True), P("b")),
    "exchange the minor": (lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True), P(("a", "b"))),
    "exchange the major": (lambda x: lax.all_to_all(x, "a", 1, 0, tiled=True), P(("a", "b"))),
    "exchange beside another": (lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True), P("b", "a")),
    "exchange both": (lambda x: lax.all_to_all(x, ("a", "b"), 1, 0, tiled=True), P(("a", "b"))),
    "take": (lambda x: take(x, (DimCut(-1, ("b",)),)), P("a")),
    "take of what is split": (lambda x: take(x, (DimCut(-2, ("b",)),)), P("a")),
    "sum": (lambda x: lax.psum(x.unflatten(1, (2, -1)).sum(1), "b"), P("a", "b")),
    "scatter rows": (
        lambda x: lax.psum_scatter(x.unflatten(1, (2, -1)).sum(1), "b", tiled=True), P("a", "b"),
    ),
    "scatter rows of two": (
        lambda x: lax.psum_scatter(x.sum(2), "b", tiled=True), P(None, "a", "b"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME_VALUE)
def test_collectives_keep_the_value_that_parts_are_of(case):
    run, spec = SAME_VALUE[case]
    x = torch.arange(12.0 * 12 * 6, dtype=torch.float64).reshape(12, 12, 6)
    types: list[ValueType] = []

    def traced(x):
        types.append(ft.typeof(run(x)))
        return lax.psum(lax.axis_index(("a", "b")), ("a", "b"))

    ft.trace(ft.shard_map(traced, MESH, spec, P(), check=False))(x)
    f = ft.shard_map(
        lambda x: lax.all_gather(lax.all_gather(run(x), "b"), "a"), MESH, spec, P(), check=False
    )
    every = f(x)
    assert "varying" not in str(types[0])
    (got,) = put_together({c: every[c] for c in RANKS}, types[0], ["a", "b"]).values()
    halves = x.unflatten(1, (3, 2, -1)).sum((1, 2))  # of the columns of each rank of b
    want = {"sum": halves, "scatter rows": halves, "scatter rows of two": x.sum(2)}
    torch.testing.assert_close(got, want.get(case, x))
