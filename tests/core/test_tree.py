"""functron.tree against jax.tree."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functron as ft
from functron import tree


class Moments(NamedTuple):
    mu: Any
    nu: Any


def containers(children: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(
        st.dictionaries(st.sampled_from("abcd"), children, max_size=3),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Moments, children, children),
    )


TREES = st.recursive(st.integers() | st.none(), containers, max_leaves=12)


@st.composite
def prefixes(draw) -> tuple[Any, Any]:
    """A tree, and a prefix of it: some of its subtrees are replaced by one leaf each."""

    def prune(node):
        if not isinstance(node, dict | list | tuple) or draw(st.integers(0, 3)) == 0:
            return None if node is None else draw(st.integers(100, 999))
        if isinstance(node, dict):
            return {key: prune(child) for key, child in node.items()}
        children = [prune(child) for child in node]
        return Moments(*children) if isinstance(node, Moments) else type(node)(children)

    full = draw(TREES)
    return prune(full), full


def jax_paths(value) -> list[str]:
    def name(step) -> str:
        return str(next(getattr(step, at) for at in ("key", "idx", "name") if hasattr(step, at)))

    found = jax.tree_util.tree_leaves_with_path(value)
    return ["/".join(name(step) for step in path) for path, _ in found]


@given(TREES)
def test_leaves_paths_and_round_trip(value):
    flat, structure = tree.flatten(value)
    assert flat == jax.tree.leaves(value) == tree.leaves(value)
    assert structure == tree.structure(value)
    assert tree.unflatten(structure, flat) == value
    assert tree.paths(value) == jax_paths(value)


@given(TREES)
def test_map(value):
    assert tree.map(lambda x: x + 1, value) == jax.tree.map(lambda x: x + 1, value)
    doubled = tree.map(lambda x: 2 * x, value)
    got = tree.map(lambda x, y, z: (x, y - z), value, doubled, value)
    assert got == jax.tree.map(lambda x: (x, x), value)
    named = tree.map_with_path(lambda path, x, y: f"{path}={x + y}", value, doubled)
    expected = [
        f"{p}={3 * x}" for p, x in zip(jax_paths(value), jax.tree.leaves(value), strict=True)
    ]
    assert tree.leaves(named) == expected


@given(prefixes())
def test_broadcast_prefix(pair):
    prefix, full = pair
    assert tree.broadcast_prefix(prefix, full) == jax.tree.leaves(jax.tree.broadcast(prefix, full))


@given(TREES, TREES)
def test_what_is_a_prefix_is_what_jax_says(prefix, full):
    try:
        expected = jax.tree.leaves(jax.tree.broadcast(prefix, full))
    except ValueError:
        with pytest.raises(ValueError, match="is not a prefix of the value"):
            tree.broadcast_prefix(prefix, full)
    else:
        assert tree.broadcast_prefix(prefix, full) == expected


def test_docstring_example():
    assert tree.broadcast_prefix({"a": "x", "b": "y"}, {"a": [1, 2], "b": 3}) == ["x", "x", "y"]


@pytest.mark.parametrize(
    "name", ["all", "reduce", "reduce_associative", "transpose", "broadcast", "flatten_with_path"]
)
def test_examples_run(name):
    text = inspect.getdoc(getattr(tree, name)) or ""
    example = doctest.DocTestParser().get_doctest(
        text, {"torch": torch, "tree": tree}, name, None, None
    )
    assert example.examples
    report: list[str] = []
    doctest.DocTestRunner().run(example, out=report.append)
    assert "".join(report) == ""


def test_has_all_that_jaxs_has():
    """Paths are strings here, and structures have methods: what is about either is left out."""
    names = {name for name in dir(jax.tree) if not name.startswith("_")}
    assert names <= {*dir(tree)}
    of_keys = {"keystr", "register_pytree_with_keys", "register_pytree_with_keys_class"}
    of_keys |= {"flatten_one_level_with_keys", "flatten_one_level", "default_registry"}
    util = {
        name.removeprefix("tree_")
        for name in dir(jax.tree_util)
        if name[0].islower() or name == "Partial"
    }
    assert {n for n in util if n not in dir(tree)} == {
        *of_keys, "treedef_children", "treedef_is_leaf", "treedef_tuple", "is_tree_node",
    }  # fmt: skip


@given(TREES)
def test_reductions(value):
    join = lambda a, b: f"({a} {b})"
    assert tree.reduce(join, value, "start") == jax.tree.reduce(join, value, "start")
    got = tree.reduce_associative(join, value, identity="none")
    assert got == jax.tree.reduce_associative(join, value, identity="none")
    assert tree.all(value) is jax.tree.all(value)
    if jax.tree.leaves(value):
        assert tree.reduce(join, value) == jax.tree.reduce(join, value)
    else:
        for reduce in (tree.reduce, tree.reduce_associative):
            with pytest.raises(ValueError, match="got a tree without leaves; wanted at least one"):
                reduce(join, value)


@given(TREES)
def test_leaves_with_paths(value):
    rows = list(zip(jax_paths(value), jax.tree.leaves(value), strict=True))
    assert tree.leaves_with_path(value) == rows
    assert tree.flatten_with_path(value) == (rows, tree.structure(value))
    assert tree.all_leaves(jax.tree.leaves(value))
    assert not tree.all_leaves([1, {"a": 2}])
    assert tree.all_leaves([1, {"a": 2}], lambda x: isinstance(x, dict))


@given(TREES, TREES)
def test_transpose(outer, inner):
    value = tree.map(lambda a: tree.map(lambda b: f"{a} {b}", inner), outer)
    shapes = tree.structure(outer), tree.structure(inner)
    if tree.leaves(outer):
        want = jax.tree.transpose(jax.tree.structure(outer), jax.tree.structure(inner), value)
        assert tree.transpose(*shapes, value) == tree.transpose(shapes[0], None, value) == want
    else:
        assert tree.transpose(*shapes, value) == tree.map(lambda _: outer, inner)


@given(prefixes())
def test_broadcast(pair):
    assert tree.broadcast(*pair) == jax.tree.broadcast(*pair)
    pruned = lambda x: isinstance(x, dict)
    assert tree.broadcast(*pair, pruned) == jax.tree.broadcast(*pair, pruned)


def test_wrong_transposes_and_broadcasts_name_every_place():
    outer = tree.structure([0, 0])
    calls = {
        r"\(root\): got .*list": lambda: tree.transpose(outer, None, (1, 2)),
        r"the subtree 1 .*(?s:.)*a: got nothing.*(?s:.)*b: got a leaf": lambda: tree.transpose(
            outer, None, [{"a": 1}, {"b": 2}]
        ),
        "got no subtree; wanted the inner": lambda: tree.transpose(tree.structure([]), None, []),
        r"(?s)the prefix.*b: got nothing in the full tree.*c: got a leaf": lambda: tree.broadcast(
            {"a": 1, "b": 2}, {"a": [1], "c": 3}
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_is_leaf_ends_the_prefix():
    def pair(node):
        return isinstance(node, tuple)

    value = {"a": [1, 2], "b": (3, 4)}
    got = tree.broadcast_prefix({"a": ("dp", None), "b": ()}, value, is_leaf=pair)
    assert got == [("dp", None), ("dp", None), (), ()]
    assert tree.leaves(value, is_leaf=pair) == [1, 2, (3, 4)]
    assert tree.paths(value, is_leaf=pair) == ["a/0", "a/1", "b"]
    assert tree.map(len, {"b": (3, 4)}, is_leaf=pair) == {"b": 2}


def problems(call) -> list[str]:
    with pytest.raises(ValueError, match=r"\n  - ") as caught:
        call()
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_broadcast_names_every_place():
    prefix = {"w": {"up": 1, "gone": 2}, "m": Moments(1, {"x": 1}), "t": (1, 2)}
    value = {"w": {"up": 1, "down": 2}, "m": Moments(1, [1]), "t": [1, 2]}
    found = problems(lambda: tree.broadcast_prefix(prefix, value, what="specs", wanted="a P"))
    assert [line.split(": got")[0] for line in found] == [
        "specs/m/nu",
        "specs/t",
        "specs/w/gone",
        "specs/w/down",
    ]
    assert "got dict; wanted a P (list)" in found[0]
    assert "has no 'gone'" in found[2]
    assert "has 'down'" in found[3]


def test_a_leaf_is_no_prefix_of_none():
    assert tree.broadcast_prefix({"a": 1}, {"a": None}) == []
    assert problems(lambda: tree.broadcast_prefix({"a": None}, {"a": 1}))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, ["b: got nothing in other"]),
        ({"a": 1}, {"a": 1, "b": [2]}, ["b/0: got a leaf in other"]),
        ([1, 2], [1], ["1: got nothing in other"]),
        # a subtree stands for a leaf: only what is wrong is named
        ({"a": 1, "b": 2}, {"a": [1, 2]}, ["b: got nothing in other"]),
        (
            {"a": {"x": 1}, "b": 2},
            {"a": 3, "c": 4},
            ["a/x: got nothing", "b: got nothing", "c: got a leaf"],
        ),
        (Moments(1, {"x": 2}), Moments(1, {"y": 2}), ["nu/x: got nothing", "nu/y: got a leaf"]),
        ({"a": None}, {"a": 1}, ["a: got a leaf in other"]),
        ([1, 2], (1, 2), ["(root): got Expected an instance of list"]),
        ({"a": 1, "b": {}}, {"a": 1}, ["(root): got dictionary key mismatch"]),
    ],
)
def test_same_structure_names_every_place(first, second, expected):
    found = problems(lambda: tree.same_structure(first, second, names=("one", "other")))
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)
    assert problems(lambda: tree.map(lambda *_: 0, first, second))


def test_same_structure_gives_the_parts():
    assert tree.same_structure({"a": 1, "b": 2}, {"a": [1, 2], "b": None}) == [[1, 2], None]


def test_order_and_paths():
    assert tree.paths({"b": 1, "a": [2, {"c": 3}]}) == ["a/0", "a/1/c", "b"]
    assert tree.paths(OrderedDict(b=1, a=2)) == ["b", "a"]
    assert tree.paths(Moments({"w": 1}, (2, None))) == ["mu/w", "nu/0"]
    assert tree.paths(7) == [""]
    assert tree.paths({"blocks": [{"up": 1}]}) == ["blocks/0/up"]


def test_items_and_columns():
    value = {"b": [1, None], "a": Moments(2, 3)}
    assert tree.items(value) == [("a/mu", 2), ("a/nu", 3), ("b/0", 1)]
    assert tree.items(value, lambda x: x is None)[-1] == ("b/1", None)
    added = tree.map_columns(lambda x, y, z: x + y + z, value, [10, 20, 30], iter([1, 2, 3]))
    assert added == {"b": [34, None], "a": Moments(13, 25)}
    with pytest.raises(ValueError, match="shorter"):
        tree.map_columns(lambda x, y: x, value, [1])


def test_size_and_nbytes():
    value = {
        "w": torch.zeros(3, 4, dtype=torch.float64),
        "b": [torch.zeros((), dtype=torch.bfloat16), None, 5],
        "m": torch.empty(10**6, 10**6, device="meta"),
        "view": torch.zeros(8)[::2],
    }
    assert tree.size(value) == 12 + 1 + 10**12 + 4
    assert tree.nbytes(value) == 96 + 2 + 4 * 10**12 + 16
    assert tree.size({}) == tree.nbytes(None) == 0


@dataclasses.dataclass
class Unregistered:
    w: torch.Tensor


def test_a_dataclass_of_tensors_is_refused_with_how_to_register_it():
    value = Unregistered(torch.ones(3))

    def loss(p):
        return (p.w**2).sum()

    f = ft.shard_map(loss, ft.Mesh(dp=3), ft.P(), ft.P())
    calls = (
        lambda: ft.grad(loss)(value),
        lambda: ft.trace(loss)(value),
        lambda: ft.jit(loss, backend="eager")(value),
        lambda: f(value),
        lambda: ft.params.num_params(value),
        lambda: ft.optim.adamw(1e-3).init(value),
        lambda: ft.optim.sgd(1e-3).init({"a": value}),
        lambda: tree.map(lambda leaf: leaf + 1, {"a": value}),
        lambda: tree.map_with_path(lambda path, leaf: leaf.shape, [value]),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"tree\.register_dataclass\(Unregistered\)"):
            call()


def test_errors_of_mapped_functions_are_their_own_where_a_dataclass_is_meant_as_a_leaf():
    value = Unregistered(torch.ones(3))
    with pytest.raises(AttributeError, match="'missing'"):
        tree.map(lambda leaf: leaf.missing, [value], is_leaf=lambda x: isinstance(x, Unregistered))
    assert tree.map(lambda leaf: leaf.w.sum(), [value]) == [torch.tensor(3.0)]


def test_registered_dataclasses_are_trees():
    @tree.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Weights:
        w: torch.Tensor
        b: dict

    value = Weights(torch.arange(3.0), {"x": torch.ones(())})
    assert tree.paths(value) == ["w", "b/x"]
    grads = ft.grad(lambda p: (p.w**2 * p.b["x"]).sum())(value)
    assert isinstance(grads, Weights)
    torch.testing.assert_close((grads.w, grads.b["x"]), (2 * value.w, torch.tensor(5.0)))
    f = ft.shard_map(lambda p: p.w * 2, ft.Mesh(dp=3), (Weights(ft.P("dp"), ft.P()),), ft.P("dp"))
    assert torch.equal(f(value), 2 * value.w)
    with pytest.raises(TypeError, match="made by @dataclass"):
        tree.register_dataclass(dict)


def test_fields_may_belong_to_the_structure():
    @tree.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: torch.Tensor
        kind: str = tree.static(default="relu", metadata={"doc": "a function"})

    @dataclasses.dataclass
    class Named:
        name: str
        b: int
        a: int

    assert tree.register_dataclass(Named, ["a", "b"], ["name"]) is Named
    assert tree.items(Named("n", 1, 2)) == [("a", 2), ("b", 1)]
    assert tree.map(lambda x: x + 1, Named("n", 1, 2)) == Named("n", 2, 3)
    assert tree.structure(Named("n", 1, 2)) != tree.structure(Named("m", 1, 2))

    apply = {"relu": torch.relu, "sin": torch.sin}
    loss = lambda layer: apply[layer.kind](layer.w).sum()
    w = torch.tensor([-1.0, 1.0])
    for kind, fn in apply.items():
        got = ft.jit(ft.grad(loss), backend="eager")(Layer(w, kind))
        assert got.kind == kind
        torch.testing.assert_close(got.w, torch.func.grad(lambda w, fn=fn: fn(w).sum())(w))
    with pytest.raises(TypeError, match=r"data_fields=\['w'\], .*wanted each field of Other once"):
        tree.register_dataclass(dataclasses.make_dataclass("Other", ["w", "v"]), ["w"], [])


def test_registered_classes_are_trees():
    class Pair:
        def __init__(self, first, second):
            self.first, self.second = first, second

    tree.register_pytree_node(
        Pair,
        lambda p: ((p.first, p.second), None, ("first", "second")),
        lambda _, children: Pair(*children),
    )
    assert tree.items({"p": Pair(1, [2])}) == [("p/first", 1), ("p/second/0", 2)]

    @tree.register_pytree_node_class
    class Scaled(Pair):
        def tree_flatten(self):
            return (self.first,), self.second

        @classmethod
        def tree_unflatten(cls, second, children):
            return cls(*children, second)

    moved = ft.grad(lambda p: (p.first * p.second).sum())(Scaled(torch.ones(2), 3.0))
    assert (moved.first.tolist(), moved.second) == ([3.0, 3.0], 3.0)

    @tree.register_static
    @dataclasses.dataclass(frozen=True)
    class Options:
        power: int

    program = ft.shard_map(
        lambda x, options: x**options.power, ft.Mesh(dp=2), (ft.P("dp"), ft.P()), ft.P("dp")
    )
    assert program(torch.tensor([2.0, 3.0]), Options(3)).tolist() == [8.0, 27.0]
    assert tree.leaves([Options(3)]) == []


def test_partial_is_a_tree_of_what_it_binds():
    layer = tree.Partial(torch.mul, torch.tensor(3.0))
    assert tree.leaves(layer) == [torch.tensor(3.0)]
    slope = ft.grad(lambda f: f(torch.tensor(2.0)))(layer)
    assert tree.leaves(slope) == [torch.tensor(2.0)]
