"""Types of values: simulated, traced and on processes, by every collective, and in annotations."""

from __future__ import annotations

from typing import Annotated

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import PartitionSpec

import functron as ft
from functron import Mesh, P, lax, random
from functron.core.typing import Float, Int, Partial, Shaped, Tensor, Varying, match_dims
from functron.program.types import AxisType, ValueType
from functron.spmd.spec import DimCut, join, take
from tests.transforms.flow_programs import loop, switch

MESH = Mesh(dp=2, tp=2)
AXES = ("dp", "tp")
BOTH, ROWS = P("dp", "tp"), P("dp")
X = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)
TALL = torch.cat([X, X])


def told(type_: ValueType) -> str:
    return str(type_).partition("{")[2].rstrip("}")


def types_of(program, *args, in_specs=BOTH, mesh=MESH, traced=True):
    """The types of the values that `program` notes, by `note(name, value)`, traced or simulated."""
    seen: dict[str, str] = {}

    def note(name, value):
        seen[name] = told(ft.typeof(value))
        return value

    def run(*args):
        program(note, *args)
        return lax.psum(lax.axis_index(mesh.axis_names), mesh.axis_names)

    f = ft.shard_map(run, mesh, in_specs, P(), check=False)
    (ft.trace(f) if traced else f)(*args)
    return seen


# --- by collectives


def collectives(note, x):
    note("x", x)
    note("psum", lax.psum(x, "tp"))
    note("psum of both", lax.psum(x, AXES))
    note("pmean", lax.pmean(x, "dp"))
    note("pmax", lax.pmax(x, "tp"))
    note("pmin", lax.pmin(x, "dp"))
    note("pbroadcast", lax.pbroadcast(x, "tp", 1))
    note("all_gather", lax.all_gather(x, "tp", axis=1, tiled=True))
    note("all_gather of the other dim", lax.all_gather(x, "dp", axis=0, tiled=True))
    note("all_gather of both", lax.all_gather(x, AXES))
    note("psum_scatter", lax.psum_scatter(x, "tp", tiled=True))
    note("psum_scatter, dim 1", lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True))
    note("psum_scatter over both", lax.psum_scatter(x, AXES, tiled=True))
    note("psum_scatter, stacked", lax.psum_scatter(x[:2], "tp"))
    note("all_to_all", lax.all_to_all(x, "tp", 0, 1, tiled=True))
    note("all_to_all, stacked", lax.all_to_all(x[:2], "tp", 0, 1))
    note("ppermute", lax.ppermute(x, "tp", [(0, 1), (1, 0)]))
    note("axis_index", lax.axis_index("tp"))
    note("assume_replicated", lax.assume_replicated(x, "tp"))
    note("constant", torch.ones(3))


# derived by hand from what each rank holds: X is cut in rows by dp and in columns by tp
BY_HAND = {
    "x": "dp: split dim 0, tp: split dim 1",
    "psum": "dp: split dim 0, tp: replicated",
    "psum of both": "dp: replicated, tp: replicated",
    "pmean": "dp: replicated, tp: split dim 1",
    "pmax": "dp: split dim 0, tp: replicated",
    "pmin": "dp: replicated, tp: split dim 1",
    "pbroadcast": "dp: split dim 0, tp: replicated",
    "all_gather": "dp: split dim 0, tp: replicated",
    "all_gather of the other dim": "dp: replicated, tp: split dim 1",
    "all_gather of both": "dp: replicated, tp: replicated",
    "psum_scatter": "dp: split dim 0, tp: split dim 0 inside dp",
    "psum_scatter, dim 1": "dp: split dim 0, tp: split dim 1",
    "psum_scatter over both": "dp: split dim 0, tp: split dim 0 inside dp",
    "psum_scatter, stacked": "dp: varying, tp: varying",
    "all_to_all": "dp: split dim 0, tp: split dim 0 inside dp",
    "all_to_all, stacked": "dp: varying, tp: varying",
    "ppermute": "dp: split dim 0, tp: varying",
    "axis_index": "dp: replicated, tp: varying",
    "assume_replicated": "dp: split dim 0, tp: replicated",
    "constant": "dp: replicated, tp: replicated",
}


def test_every_collective_changes_types():
    assert types_of(collectives, TALL) == BY_HAND


def test_simulation_knows_what_varies_and_how_arguments_are_split():
    seen = types_of(collectives, TALL, traced=False)
    assert seen.pop("x") == BY_HAND["x"]
    for name, text in seen.items():
        rows = [row.split(": ") for row in BY_HAND[name].split(", ")]
        blurred = [f"{a}: {at if at == 'replicated' else 'varying'}" for a, at in rows]
        assert text == ", ".join(blurred), name


JAX_MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)


def test_what_varies_is_what_varies_in_jax():
    """But for all_gather, whose result JAX leaves varying; `all_gather_invariant` is as ours."""
    theirs: dict[str, frozenset] = {}

    def note(name, value):
        theirs[name] = frozenset(jax.typeof(value).mat.varying)
        return value

    def program(x):
        note("x", x)
        note("psum", jax.lax.psum(x, "tp"))
        note("psum of both", jax.lax.psum(x, AXES))
        note("pmean", jax.lax.pmean(x, "dp"))
        note("pmax", jax.lax.pmax(x, "tp"))
        note("pmin", jax.lax.pmin(x, "dp"))
        note("psum_scatter", jax.lax.psum_scatter(x, "tp", tiled=True))
        note("psum_scatter, stacked", jax.lax.psum_scatter(x[:2], "tp"))
        note("all_to_all", jax.lax.all_to_all(x, "tp", 0, 1, tiled=True))
        note("ppermute", jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)]))
        note("axis_index", jax.lax.axis_index("tp"))
        note("constant", jnp.ones(3))
        return jax.lax.psum(x.sum(), AXES)

    spec = PartitionSpec(*AXES)
    f = jax.shard_map(program, mesh=JAX_MESH, in_specs=spec, out_specs=PartitionSpec())
    jax.eval_shape(f, jnp.ones((8, 8)))
    for traced in (True, False):
        seen: dict[str, frozenset] = {}

        def run(x, seen=seen):
            collectives(lambda k, v, seen=seen: seen.update({k: ft.typeof(v).varying}), x)
            return lax.psum(x.sum(), AXES)

        f = ft.shard_map(run, MESH, P(*AXES), P())
        (ft.trace(f) if traced else f)(X)
        assert {name: seen[name] for name in theirs} == theirs


# --- by operations, and in transforms


def layers(note, w, v, bias, x):
    y = note("column parallel", torch.relu(x @ w))
    z = note("row parallel", y @ v)
    note("bias before the sum", z + bias)
    note("activation before the sum", torch.relu(z))
    note("bias in linear", torch.nn.functional.linear(y, v.mT, bias))
    note("product of partials", z * z)
    note("scaled", 2 * z / 3 - z)
    note("sum of partials", z + y @ (2 * v))
    z = note("summed", lax.psum(z, "tp"))
    note("softmax of whole rows", torch.softmax(z, -1))
    note("softmax along the split", torch.softmax(y, -1))
    note("mean of parts", z.mean(0))
    note("positions", z + torch.arange(4)[:, None])
    note("ones", z + torch.ones(4, 1))
    note("loss", (z * z).sum())
    note("heads", y.unflatten(-1, (2, -1)).transpose(0, 1))
    note("tokens", z.unflatten(0, (2, 2)).flatten(0, 1))
    return z


LAYERS = {
    "column parallel": "dp: split dim 0, tp: split dim 1",
    "row parallel": "dp: split dim 0, tp: partial",
    "bias before the sum": "dp: split dim 0, tp: varying",
    "activation before the sum": "dp: split dim 0, tp: varying",
    "bias in linear": "dp: split dim 0, tp: varying",
    "product of partials": "dp: split dim 0, tp: varying",
    "scaled": "dp: split dim 0, tp: partial",
    "sum of partials": "dp: split dim 0, tp: partial",
    "summed": "dp: split dim 0, tp: replicated",
    "softmax of whole rows": "dp: split dim 0, tp: replicated",
    "softmax along the split": "dp: split dim 0, tp: varying",
    "mean of parts": "dp: varying, tp: replicated",
    "positions": "dp: varying, tp: replicated",
    "ones": "dp: split dim 0, tp: replicated",
    "loss": "dp: partial, tp: replicated",
    "heads": "dp: split dim 1, tp: split dim 0",
    "tokens": "dp: split dim 0, tp: replicated",
}
SPECS = (P(None, "tp"), P("tp"), P(), P("dp"))
ARGS = (X, X.mT.contiguous(), torch.ones(8, dtype=torch.float64), X)


def test_products_and_what_follows_them():
    assert types_of(layers, *ARGS, in_specs=SPECS) == LAYERS


def test_sequence_parallel_layers():
    """all_gather, a column parallel and a row parallel product, psum_scatter: the block's cycle."""

    def block(note, w, v, x):
        whole = note("gathered", lax.all_gather(x, "tp", axis=1, tiled=True))
        hidden = note("hidden", whole @ w)
        note("partial", hidden @ v)
        note("again", lax.psum_scatter(hidden @ v, "tp", scatter_dimension=1, tiled=True))

    x = torch.ones(4, 8, 6)
    specs = (P(None, "tp"), P("tp"), P("dp", "tp"))
    seen = types_of(block, torch.ones(6, 8), torch.ones(8, 6), x, in_specs=specs)
    assert seen == {
        "gathered": "dp: split dim 0, tp: replicated",
        "hidden": "dp: split dim 0, tp: split dim 2",
        "partial": "dp: split dim 0, tp: partial",
        "again": "dp: split dim 0, tp: split dim 1",
    }


def test_parts_that_a_rank_takes():
    def program(note, x):
        for dim in (-1, -2):
            cuts = (DimCut(dim, ("tp",)),)
            part = note(f"part of {dim}", take(x, cuts))
            note(f"whole along {dim}", join(part, cuts))
        note("my row", x.index_select(0, lax.axis_index("tp").reshape(1)))
        note("first", torch.where(lax.axis_index("tp") == 0, x, 0.0))

    assert types_of(program, TALL, in_specs=P("dp")) == {
        "part of -1": "dp: split dim 0, tp: split dim 1",
        "whole along -1": "dp: split dim 0, tp: replicated",
        "part of -2": "dp: split dim 0, tp: split dim 0 inside dp",
        "whole along -2": "dp: split dim 0, tp: replicated",
        "my row": "dp: varying, tp: varying",
        "first": "dp: split dim 0, tp: varying",
    }


def test_several_axes_of_one_dim():
    def program(note, x):
        note("x", x)
        note("without the minor", lax.all_gather(x, "tp", tiled=True))
        note("without the major", lax.all_gather(x, "dp", tiled=True))

    assert types_of(program, X, in_specs=P(AXES)) == {
        "x": "dp: split dim 0, tp: split dim 0 inside dp",
        "without the minor": "dp: split dim 0, tp: replicated",
        "without the major": "dp: replicated, tp: split dim 0 in 2 blocks",
    }


def transforms(note, w, x):
    def loss(w, x):
        note("in grad", x @ note("w in grad", w))
        return lax.psum(((x @ w) ** 2).sum(), AXES)

    shares = ft.grad(loss)(w, x)
    note("gradient", shares)
    note("synchronised", ft.sync_gradients(shares, P(None, "tp")))
    note("in remat", ft.grad(ft.remat(loss))(w, x))
    torch.func.vmap(lambda row: note("in vmap", row @ w))(x)
    torch.func.jvp(lambda x: note("in jvp", x @ w), (x,), (x,))
    carry, rows = ft.scan(lambda c, row: (c + row, note("in scan", row * c)), x.sum(0), x)
    note("carry", carry)
    note("rows", rows)
    note("product", ft.scan(lambda c, _: (c, c @ w), x, None, length=3)[1])


def test_types_in_transforms():
    args, specs = (X, X[:4]), (P(None, "tp"), P("dp"))
    common = {
        "in scan": "dp: varying, tp: replicated",
        "carry": "dp: varying, tp: replicated",
        "rows": "dp: varying, tp: replicated",
        "synchronised": "dp: replicated, tp: varying",
        "w in grad": "dp: replicated, tp: split dim 1",
    }
    seen = types_of(transforms, *args, in_specs=specs, traced=False)
    assert seen == common | dict.fromkeys(
        ("in grad", "gradient", "in remat", "in vmap", "in jvp", "product"),
        "dp: varying, tp: varying",
    )
    assert types_of(transforms, *args, in_specs=specs) == common | {
        "in scan": "dp: unknown, tp: unknown",  # the body may run on other types than its first
        "synchronised": "dp: replicated, tp: split dim 1",
        "in grad": "dp: split dim 0, tp: split dim 1",
        "gradient": "dp: partial, tp: split dim 1",
        "in remat": "dp: partial, tp: split dim 1",
        "in vmap": "dp: varying, tp: split dim 0",
        "in jvp": "dp: split dim 0, tp: split dim 1",
        "product": "dp: split dim 1, tp: split dim 2",
    }


# --- programs


def test_types_of_the_values_of_a_program():
    def program(w, x):
        carry, rows = ft.scan(lambda c, row: (c + 1, (row * c).sum()), x.sum(1).sum(0), x @ w)
        return lax.psum(carry, "dp"), lax.psum(rows.sum(), AXES)

    f = ft.shard_map(program, MESH, (P(None, "tp"), P("dp")), P())
    found = ft.trace(f)(X, X)
    assert repr(found.typeof("%mm")) == ("float64[4, 4] {dp: split dim 0, tp: split dim 1}")
    assert found.typeof("mm") == found.typeof("%mm")
    body = next(e.op.body for e in found.block.equations if e.name == "scan")
    (times,) = [v.name for e in body.equations for v in e.results if e.name == "mul"]
    # dp splits the rows that are scanned over, and the features of a row are split by tp
    assert told(found.typeof(times)) == "dp: varying, tp: split dim 0"
    again = ft.trace(f)(X, X)
    assert str(again.typeof("%mm")) == str(found.typeof("%mm"))


def test_a_program_says_the_same_of_a_value_in_the_trace_and_afterwards():
    seen: dict[str, str] = {}

    def program(w, v, bias, x):
        layers(lambda name, value: seen.update({name: str(ft.typeof(value))}) or value,
               w, v, bias, x)  # fmt: skip
        return torch.relu(x @ w) @ v

    found = ft.trace(ft.shard_map(program, MESH, SPECS, P("dp"), check=False))(*ARGS)
    (out,) = found.outputs
    assert str(found.typeof(out.value.name)) == seen["row parallel"]


def test_values_outside_of_programs():
    assert repr(ft.typeof(torch.zeros(2, 3))) == "float32[2, 3]"
    assert ft.typeof(torch.zeros(2, device="meta")) == ft.typeof(torch.ones(2))
    assert str(ft.typeof(3)) == "int64[]"
    assert str(ft.typeof(True)) == "bool[]"
    spec = P(None, AXES)
    found = ft.typeof(torch.zeros(3, 8), spec, MESH)
    assert str(found) == "float32[3, 2] {dp: split dim 1, tp: split dim 1 inside dp}"
    assert found.spec == spec
    assert found["tp"] == AxisType("split", 1, ("dp",))
    assert found["ep"] == AxisType("replicated")
    definition = ft.ParamDef((8, 4), ("embed", "mlp"), None, torch.bfloat16)
    assert str(ft.typeof(definition, P("tp"), MESH)) == (
        "bfloat16[4, 4] {dp: replicated, tp: split dim 0}"
    )
    shapes = ft.eval_shape(lambda x: x @ x)(torch.zeros(2, 2))
    assert ft.typeof(shapes).shape == (2, 2)

    def program(x):
        seen.append(ft.typeof(lax.psum(x, "tp")))
        return x

    seen: list[ValueType] = []
    ft.trace(ft.shard_map(program, MESH, P("tp"), P("tp"), check=False))(torch.zeros(4))
    assert (seen[0].varying, seen[0].partial, seen[0].spec) == (frozenset(), frozenset(), P())
    assert hash(seen[0]) == hash(ft.typeof(torch.zeros(2), P(), MESH))


def test_trees_of_shapes_are_typed_leaf_by_leaf():
    types = ft.tree.map(ft.typeof, {"w": torch.zeros(2), "b": 1.0})
    assert {name: str(each) for name, each in types.items()} == {
        "w": "float32[2]",
        "b": "float32[]",
    }


PROCESSES = """
import torch
import torch.distributed as dist
import functron as ft
from functron import P, lax
from functron.core.typing import Float, Tensor

dist.init_process_group("gloo")
mesh = ft.Mesh(dp=1, tp=2).bind()
seen = []

@ft.debug.typed
def product(x: Float[Tensor, "rows k"] @ P(None, "tp"), w: Float[Tensor, "k n"] @ P("tp")):
    return x @ w

def program(x, w):
    seen[:] = [ft.typeof(x), ft.typeof(product(x, w)), ft.typeof(lax.axis_index("tp"))]
    return lax.psum(product(x, w), "tp")

f = ft.shard_map(program, mesh, (P(None, "tp"), P("tp")), P())
with ft.debug.check_types():
    f(torch.ones(4, 3), torch.ones(3, 5))
    print(*seen, ft.typeof(torch.ones(4, 3), P(None, "tp"), mesh), sep="|")
    try:
        ft.shard_map(program, mesh, (P(None, "tp"), P()), P())(torch.ones(4, 3), torch.ones(3, 5))
    except ValueError as error:
        print(str(error).count("w: got"), "tp: split dim 0" in str(error))
    try:
        f(torch.ones(4, 3), torch.ones(3))
    except ValueError as error:
        print("give it 2 dims" in str(error))
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_types_on_processes(torchrun):
    """Arguments by their specs; of what is computed a rank knows its own value alone."""
    lines = torchrun(PROCESSES, 2).stdout.splitlines()
    assert (
        lines.count(
            "float32[4, 3] {tp: split dim 1}|float32[4, 5] {tp: unknown}|int64[] {tp: unknown}|"
            "float32[4, 3] {tp: split dim 1}"
        )
        == 2
    )
    assert lines.count("1 True") == 2
    assert lines.count("True") == 2


# --- annotations


@ft.debug.typed
def down(
    x: Float[Tensor, "batch mlp"] @ P("dp", "tp"),
    w: Float[Tensor, "mlp embed"] @ P("tp"),
    bias: Float[Tensor, " embed"] @ P() | None = None,
) -> Float[Tensor, "batch embed"] @ P("dp") @ Partial("tp"):
    y = x @ w
    return y if bias is None else y + bias


@ft.debug.typed
def either(x: Annotated[Float[Tensor, "a a"], P("dp")] | Int[Tensor, "..."], scale: float = 1.0):
    return x * scale


@ft.debug.typed
def mixed(
    xs: list[Shaped[Tensor, "n _"]], rows: dict[str, Float[Tensor, "#n n*2"]]
) -> tuple[Float[Tensor, "*all"], Shaped[Tensor, ""]]:
    return rows["a"], xs[0].sum()


@ft.debug.typed
def routed(x: Float[Tensor, "tokens embed"] @ Varying("tp") @ P("dp")):
    return x


def mapped(f, specs, out=ROWS, mesh=MESH):
    return ft.shard_map(f, mesh, specs, out, check=False)


def refusal(call) -> str:
    with ft.debug.check_types(), pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    return str(caught.value)


GOOD = (P("dp", "tp"), P("tp"))


@pytest.mark.parametrize("traced", [False, True])
def test_right_calls_pass(traced):
    f = mapped(lambda x, w: lax.psum(down(x, w), "tp"), GOOD)
    with ft.debug.check_types():
        got = (ft.trace(f) if traced else f)(X, X)
        either(torch.ones(2, 2)), either(torch.ones(5, dtype=torch.int64)), routed(X)
        mixed([torch.ones(3, 1)], {"a": torch.ones(1, 6)})
    if not traced:
        torch.testing.assert_close(got, X @ X)


@pytest.mark.parametrize("traced", [False, True])
def test_right_calls_pass_in_transforms(traced):
    """Derivatives, recomputation, maps and scans: what they cannot tell passes."""

    def program(x, w):
        def loss(w):
            y = lax.psum(ft.remat(down)(x, w), "tp")
            return lax.pmean((y * y).sum(), "dp")

        def body(carry, _):
            return carry + lax.psum(down(x, w), "tp").sum(), None

        total, _ = ft.scan(body, x.new_zeros(()), None, length=2)
        rows = torch.func.vmap(lambda row: down(row[None], w)[0])(x)
        return ft.grad(loss)(w).sum() + total + lax.psum(rows, "tp").sum()

    @ft.debug.typed
    def whole(x, w) -> Float[Tensor, ""] @ Varying("dp", "tp"):
        return program(x, w)

    f = mapped(lambda x, w: lax.psum(whole(x, w), AXES), GOOD, P())
    with ft.debug.check_types():
        (ft.trace(f) if traced else f)(X, X)


def test_nothing_is_checked_unless_asked():
    either(torch.ones(2, 3))
    assert down.__name__ == "down"
    assert down.__wrapped__


def test_wrong_arguments_are_all_listed():
    message = refusal(lambda: ft.trace(mapped(down, (P("dp"), P())))(X[:, :4].float(), X))
    lines = message.splitlines()
    assert lines[0].startswith("down, called at")
    assert "test_types.py" in lines[0]
    assert "its annotations say" in lines[0]
    assert lines[1:] == [
        "  - x: got float32[4, 4] {dp: split dim 0, tp: replicated}; wanted "
        "tp: split dim 1; fix: split it in in_specs, or leave 'tp' out of the annotation",
        "  - w: got float64[8, 8] {dp: replicated, tp: replicated}; wanted "
        "float[mlp embed] {tp: split dim 0}; fix: 'mlp' is 4 elsewhere in this call, and 8 here",
        "  - w: got float64[8, 8] {dp: replicated, tp: replicated}; wanted "
        "tp: split dim 0; fix: split it in in_specs, or leave 'tp' out of the annotation",
    ]


WRONG = {
    "another dtype": (
        lambda: either(torch.ones(2, 2, dtype=torch.complex64)),
        "x: got complex64[2, 2]; wanted float", "cast it",
    ),
    "another rank": (lambda: either(torch.ones(2)), "give it 2 dims, or annotate 1"),
    "sizes that differ": (lambda: either(torch.ones(2, 3)), "'a' is 2 elsewhere", "and 3 here"),
    "no tensor": (lambda: down([1.0], X), "x: got list; wanted a tensor, float[batch mlp]"),
    "in a list": (
        lambda: mixed([torch.ones(3, 1), torch.ones(2, 1)], {"a": torch.ones(1, 6)}),
        "xs/1: got", "'n' is 3 elsewhere",
    ),
    "in a dict, by arithmetic": (
        lambda: mixed([torch.ones(3, 1)], {"a": torch.ones(1, 5)}),
        "rows/a: got", "a dim of 6 (n*2), not 5",
    ),
    "split along another dim": (
        lambda: ft.trace(mapped(down, (P("dp", "tp"), P(None, "tp"))))(X, X[:4]),
        "w: got", "split dim 1}; wanted tp: split dim 0",
        "lax.all_to_all(x, 'tp', 0, 1, tiled=True)",
    ),
    "partial where it is replicated": (
        lambda: ft.trace(mapped(lambda x, w: down(x, w, (x @ w)[0]), GOOD))(X, X),
        "bias: got float64[8] {dp: varying, tp: partial}", "lax.psum(x, 'tp')",
    ),
    "varying where it is replicated, simulated": (
        lambda: mapped(lambda x, w: down(x, w, x.sum() + w[0]), GOOD)(X, X),
        "bias: got", "tp: varying}; wanted tp: replicated", "reduce it with lax.psum(x, 'tp')",
    ),
    "split where it is replicated": (
        lambda: ft.trace(mapped(lambda x, w: down(x, x.T), (P("dp", "tp"), P())))(X[:, :8], X),
        "w: got", "dp: split dim 1", "lax.all_gather(x, 'dp', axis=1, tiled=True)",
    ),
    "a result": (
        lambda: ft.trace(mapped(lambda x, w, b: down(x, w, b), (*GOOD, P())))(X, X, X[0, :8] * 0),
        "what it returns is not what its annotation says", "result: got",
    ),
    "replicated where it varies": (
        lambda: ft.trace(mapped(routed, P("dp")))(X), "x: got", "wanted tp: varying",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [name for name in WRONG if name != "a result"])
def test_wrong_calls_are_refused(case):
    call, *words = WRONG[case]
    message = refusal(call)
    assert all(word in message for word in words), message


def test_a_partial_result_of_which_a_bias_was_added_cannot_be_told():
    """Its type is varying, which may be partial: only certain contradictions are refused."""
    told = r"test_types.*cannot be told here whether result is tp: partial: got .*tp: varying.; it"
    with ft.debug.check_types(), pytest.warns(UserWarning, match=told):
        ft.trace(mapped(lambda x, w, b: down(x, w, b), (*GOOD, P())))(X, X, X[0])


@ft.debug.typed
def summand(x: Float[Tensor, "..."] @ P("dp") @ Partial("tp")):
    return x


def chosen(f):
    """A program with `f` in a branch, of a partial value."""
    meet = lambda y: lax.psum(f(y), "tp")
    whole = lambda x: lax.psum(x.sum(), AXES) > 0
    other = lambda y: lax.psum(y, "tp")
    return mapped(lambda x, w: lax.cond(whole(x), meet, other, x @ w), GOOD)


@pytest.mark.parametrize("traced", [False, True])
def test_what_cannot_be_told_is_said(traced, recwarn):
    run = lambda f: (ft.trace(f) if traced else f)(X, X)
    relu = mapped(lambda x, w: lax.psum(summand(torch.relu(x @ w)), "tp"), GOOD)
    why = "an operation that is not linear" if traced else "a simulation knows what varies"
    axes = "tp: partial" if traced else "dp: split dim 0, tp: partial"
    with ft.debug.check_types():
        with pytest.warns(UserWarning, match=rf"whether x is {axes}: got .*{why}"):
            run(relu)
        recwarn.clear()
        run(chosen(summand))
    assert bool(recwarn) != traced  # a trace knows arguments of branches


def test_arguments_of_branches_are_judged():
    @ft.debug.typed
    def split(x: Float[Tensor, "..."] @ P("dp", "tp")):
        return x

    for f, got in ((lambda y: split(y), "partial"), (lambda y: summand(y.T), "split dim 1")):
        assert got in refusal(
            lambda f=f: ft.trace(chosen(lambda y: f(y).sum()[None, None] + y))(X, X)
        )
    seen = {}
    ft.trace(chosen(lambda y: (seen.update(inside=told(ft.typeof(y))), y)[1]))(X, X)
    assert seen == {"inside": "dp: split dim 0, tp: partial"}


def test_a_wrong_result_is_refused():
    @ft.debug.typed
    def forgets(x, w) -> Float[Tensor, "batch embed"] @ P("dp"):
        return x @ w

    message = refusal(lambda: ft.trace(mapped(forgets, GOOD))(X, X))
    assert "what it returns is not what its annotation says" in message
    assert "result: got float64[4, 8] {dp: split dim 0, tp: partial}" in message
    assert "wanted tp: replicated; fix: add it up: lax.psum(x, 'tp')" in message
    message = refusal(lambda: mapped(forgets, GOOD)(X, X))
    assert "tp: varying}; wanted tp: replicated" in message


def annotated(hint):
    def f(x):
        return x

    f.__annotations__["x"] = hint
    return ft.debug.typed(f)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Float[Tensor, "a"] @ P("tp") @ Partial("tp"), "got P('tp') @ Partial('tp'); wanted every"),
        (Float[Tensor, "a"] @ P("tp") @ P("dp"), "wanted one P"),
        ("Float[Tensor, 'a'] @ Q('tp')", "NameError: name 'Q' is not defined"),
        (Float[Tensor, "n+1"], "got 'n+1'; wanted a dim (name 'n' is not defined)"),
    ],
)
def test_annotations_that_say_nothing_are_refused(hint, words):
    assert words in refusal(lambda: annotated(hint)(torch.ones(4)))


def test_an_axis_that_is_not_there():
    f = annotated(Float[Tensor, "a b"] @ P("dpp"))
    message = refusal(lambda: mapped(f, P())(X))
    assert "axis 'dpp'; wanted axes of the mesh; fix: did you mean 'dp'?" in message
    with ft.debug.check_types():  # a standard axis that the mesh lacks has one rank
        mapped(annotated(Float[Tensor, "a b"] @ P("ep")), P())(X)


def test_functions_without_annotations_are_refused():
    with pytest.raises(TypeError, match="a function without annotations; wanted some to check"):
        ft.debug.typed(lambda x: x)


def test_words_for_dims():
    sizes: dict = {}
    assert match_dims("x", "*batch seq 3", (2, 5, 4, 3), sizes) == ""
    assert sizes == {"*batch": (2, 5), "seq": 4}
    assert match_dims("x", "*batch seq-1", (2, 5, 3), sizes) == ""
    assert match_dims("x", "... #seq", (7, 1), sizes) == ""
    assert "(2, 5) elsewhere" in match_dims("x", "*batch", (2, 6), sizes)
    assert "a dim of 3 (3), not 4" in match_dims("x", "_ 3", (1, 4), sizes)
    assert "give it 2 dims" in match_dims("x", "*batch a b", (1,), sizes)
    with pytest.raises(ValueError, match=r"one '\*' or '...' at most"):
        match_dims("x", "*a *b", (1, 2), {})


# --- wrong uses of typeof


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (
            ({"w": X},),
            TypeError,
            "x: got dict; wanted a tensor, or a shape with a dtype; fix: ft.tr",
        ),
        (("w",), TypeError, "x: got str"),
        ((X, P("tp")), ValueError, "got P('tp') without a mesh; wanted both"),
        ((X, None, MESH), ValueError, "got a mesh without a spec"),
        ((X, P("tpp"), MESH), ValueError, "did you mean 'tp'?"),
        ((X[:3], P("tp"), MESH), ValueError, "wanted a multiple of 2; fix: pad dim 0 to 4"),
        ((X, P(None, None, "tp"), MESH), ValueError, "wanted at most 2 entries"),
    ],
)
def test_wrong_uses_of_typeof_are_refused(args, error, words):
    with pytest.raises(error) as caught:
        ft.typeof(*args)
    assert words in str(caught.value)


def test_values_of_programs_that_have_ended_are_refused():
    kept = []
    mapped(lambda x: (kept.append(x + 1), x)[1], P("dp"))(X)
    with pytest.raises(ValueError, match="a tensor of a simulated rank whose shard_map has return"):
        ft.typeof(kept[0])
    traced: list = []
    ft.trace(mapped(lambda x: (traced.append(x + 1), x)[1], P("dp")))(X)
    with pytest.raises(ValueError, match="never made and was not passed"):
        ft.trace(mapped(lambda x: (ft.typeof(traced[0]), x)[1], P("dp")))(X)


def test_names_that_a_program_lacks_are_refused():
    found = ft.trace(mapped(torch.relu, P("dp")))(X)
    with pytest.raises(ValueError, match=r"got '%rely'; wanted one that its text shows; fix: did "):
        found.typeof("%rely")


def flow_program(w, v, x):
    """A switch of equal readings, one of several, one by ranks' own index, and three loops."""
    y = torch.relu(x @ w)
    index = lax.pmax(y.sum(), AXES).long()
    alike = switch(index, [torch.sin, torch.cos], y)
    several = switch(index, [lambda y: y @ v, lambda y: y.sum(1)[:, None] + torch.ones(1, 8)], y)
    own = switch(lax.axis_index("tp"), [torch.sin, torch.cos], y)
    carried = loop(lambda c: lax.pmax(c.sum(), AXES) < 9.0, lambda c: 2 * c, y)
    changes = loop(lambda c: lax.pmax(c.sum(), AXES) < 9.0, lambda c: torch.softmax(c, -1), y)
    ended = loop(lambda c: c.sum() < 9.0, lambda c: 2 * c, y)
    return alike, several, own, carried, changes, ended


FLOW = [
    "dp: split dim 0, tp: split dim 1",
    "dp: split dim 0, tp: varying",  # partial in one branch, and not in the other
    "dp: split dim 0, tp: varying",  # another function on every rank
    "dp: split dim 0, tp: split dim 1",
    "dp: split dim 0, tp: varying",
    "dp: varying, tp: varying",
]


def test_switches_and_loops():
    f = ft.shard_map(flow_program, MESH, (P(None, "tp"), P("tp"), P("dp")), ROWS, check=False)
    found = ft.trace(f)(X, X, X)
    assert [told(found.typeof(each.value.name)) for each in found.outputs] == FLOW
    inner = [v for block in found.block.walk_blocks() for e in block.equations for v in e.results]
    assert {at.kind for v in inner for _, at in found.typeof(v.name).axes} == {
        "replicated", "split", "partial", "varying",
    }  # fmt: skip


@pytest.mark.parametrize("traced", [False, True])
def test_a_scan_of_no_steps(traced):
    """Its ys have no rows that could differ, and the carry is the first; its body has types too."""

    def program(note, x):
        last, ys = ft.scan(lambda c, _: (c, lax.psum(c, "tp")), x[0], None, length=0)
        note("last", last)
        note("ys", ys)

    replicated = "dp: replicated, tp: replicated"
    last = "dp: varying, tp: split dim 0" if traced else "dp: varying, tp: varying"
    assert types_of(program, X, traced=traced) == {"last": last, "ys": replicated}

    def scanned(x):
        return ft.scan(lambda c, x: (c * x, lax.psum(x, "tp")), x.sum(0), x)

    f = ft.shard_map(scanned, MESH, P("tp"), (P("tp"), P()))
    found = ft.trace(f)(X[:0])
    (equation,) = (e for e in found.block.equations if e.name == "scan")
    (inner,) = (e for e in equation.op.body.equations if e.name == "psum")
    assert told(found.typeof(inner.outputs[0].name)) == replicated


# --- a second opinion: spmd_types 0.3.1, by Meta
#
# Its own examples: README.md (all_reduce and mul), the diagrams of `all_reduce`, `all_gather`,
# `reduce_scatter`, `all_to_all` and `convert` in _collectives.py and _local.py, "Comms by state
# transition" and the rules of operations in docs/design.md; types of the axis tp as its checker
# gave them: R (replicated), P (partial), V (varying), S(i) (split along dim i), E (an error).

OPINIONS = {
    "README: all_reduce(P, R)": (lambda m: lax.psum(m("P"), "tp"), "R"),
    "README: mul(R, R)": (lambda m: m("R") * m("R"), "R"),
    "all_reduce(V, R)": (lambda m: lax.psum(m("V"), "tp"), "R"),
    "all_gather(V, R)": (lambda m: lax.all_gather(m("V"), "tp"), "R"),
    "all_gather(S(0), R)": (lambda m: lax.all_gather(m("S0"), "tp", tiled=True), "R"),
    "reduce_scatter(P, V)": (lambda m: lax.psum_scatter(m("P")[:2], "tp"), "V"),
    "reduce_scatter(P, S(0))": (lambda m: lax.psum_scatter(m("P"), "tp", tiled=True), "S0"),
    "reduce_scatter(P, S(1))": (
        lambda m: lax.psum_scatter(m("P"), "tp", scatter_dimension=1, tiled=True), "S1",
    ),
    "all_to_all(V, V)": (lambda m: lax.all_to_all(m("V")[:2], "tp", 0, 0), "V"),
    "all_to_all(S(0), S(1))": (lambda m: lax.all_to_all(m("S0"), "tp", 1, 0, tiled=True), "S1"),
    "mul(R, V)": (lambda m: m("R") * m("V"), "V"),
    "mul(P, R)": (lambda m: m("P") * m("R"), "P"),
    "mul(P, P)": (lambda m: m("P") * m("P"), "E"),
    "add(P, P)": (lambda m: m("P") + m("P"), "P"),
    "add(P, R)": (lambda m: m("P") + m("R"), "E"),
    "add(V, P)": (lambda m: m("V") + m("P"), "E"),
    "relu(P)": (lambda m: torch.relu(m("P")), "E"),
    "relu(V)": (lambda m: torch.relu(m("V")), "V"),
    "neg(P)": (lambda m: -m("P"), "P"),
    "sum(P)": (lambda m: m("P").sum(0), "P"),
    "mm(R, V)": (lambda m: m("R") @ m("V"), "V"),
    "mm(V, V)": (lambda m: m("V") @ m("V"), "V"),
    "mm(P, R)": (lambda m: m("P") @ m("R"), "P"),
    "cat(P, P)": (lambda m: torch.cat([m("P"), m("P")]), "P"),
    "where(R, P, P)": (lambda m: torch.where(m("R") > 0, m("P"), m("P")), "E"),
    "linear(P, R, R)": (
        lambda m: torch.nn.functional.linear(m("P"), m("R"), m("R")[0]), "E",
    ),
    "global mm(S(0), R)": (lambda m: m("S0") @ m("R"), "S0"),
    "global mm(R, S(1))": (lambda m: m("R") @ m("S1"), "S1"),
    "global mm(S(1), S(0))": (lambda m: m("S1", 4) @ m("S0"), "P"),
    "global softmax along S(1)": (lambda m: torch.softmax(m("S1"), 1), "E"),
    "global softmax beside S(0)": (lambda m: torch.softmax(m("S0"), 1), "S0"),
    "global add(S(0), S(0))": (lambda m: m("S0") + m("S0"), "S0"),
    "global add(S(0), S(1))": (lambda m: m("S0") + m("S1"), "E"),
    "global add(S(0), R)": (lambda m: m("S0") + m("R"), "E"),
    "global transpose(S(0))": (lambda m: m("S0").T, "S1"),
    "global sum of S(0) over dim 0": (lambda m: m("S0").sum(0), "P"),
    "global sum of S(0) over dim 1": (lambda m: m("S0").sum(1), "S0"),
    "global view of S(0)": (lambda m: m("S0").view(-1), "S0"),
}  # fmt: skip

WIDER = {"where(R, P, P)"}
"""Operations that it takes for nonlinear, and that are linear in what is partial."""


def make_value(kind, size=4):
    """A [4, 4] value of a rank, of that kind over tp; the arguments of the program make them."""
    values = {
        "R": (P(), (4, 4), lambda x: x),
        "V": (P(), (4, 4), lambda x: x + lax.axis_index("tp")),
        "P": (P("tp"), (2, 4, 4), lambda x: x.sum(0)),
        "S0": (P("tp"), (8, 4), lambda x: x),
        "S1": (P(None, "tp"), (4, 8), lambda x: x),
    }
    return values[kind]


@pytest.mark.parametrize("case", OPINIONS)
def test_types_are_those_of_spmd_types(case):
    """Where it raises, a value is varying: nothing can be said of it, and its sum may be meant."""
    run, wanted = OPINIONS[case]
    kinds = ["R", "V", "P", "S0", "S1"]
    specs, shapes, makers = zip(*map(make_value, kinds), strict=True)
    found = []

    def program(*args):
        values = {k: make(x) for k, make, x in zip(kinds, makers, args, strict=True)}
        at = ft.typeof(run(lambda kind, size=4: values[kind]))["tp"]
        found.append({"replicated": "R", "partial": "P", "varying": "V"}.get(at.kind, f"S{at.dim}"))
        return args[0]

    f = ft.shard_map(program, Mesh(tp=2), tuple(specs), P(), check=False)
    ft.trace(f)(*map(torch.ones, shapes))
    expected = "P" if case in WIDER else "V" if wanted == "E" else wanted
    assert found == [expected]


def test_keys_and_draws():
    """Numbers drawn from a key are the same on all ranks, unless the key is their own."""

    def program(note, x):
        key = random.key(0)
        note("alike", random.normal(key, (3,)))
        note("own", random.normal(random.fold_in(key, lax.axis_index("dp")), (3,)))

    for traced in (True, False):
        assert types_of(program, X, traced=traced) == {
            "alike": "dp: replicated, tp: replicated",
            "own": "dp: varying, tp: replicated",
        }
