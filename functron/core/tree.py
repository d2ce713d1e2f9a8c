"""Trees: nested dicts, lists, tuples, named tuples and None, with tensors (or anything) as leaves.

A thin layer over optree that adds slash-separated paths, prefix broadcasting with taught errors,
and sizes in parameters and bytes. Dict keys are visited in sorted order, as in JAX. `None` holds
no leaf.

Names and arguments are those of `jax.tree` and `jax.tree_util`. A path is a string such as
``"layers/0/w"``, also where JAX has a tuple of keys. What JAX has functions of a structure for,
`Structure` has methods for: ``treedef_children(s)`` is ``s.children()``, ``treedef_is_leaf(s)``
``s.is_leaf()``.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from functron.core.errors import Problem, dataclass_fix, of_orphan, raise_problems

try:
    import optree
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "functron: got no optree; wanted it beside torch and numpy, which is all that a "
        "training step needs; fix: pip install optree",
        name="optree",
    ) from error

Tree = Any
Structure = optree.PyTreeSpec


flatten: Callable[..., tuple[list, Structure]] = optree.tree_flatten
"""``flatten(tree, is_leaf=None)``: the leaves, in order, and the structure of the tree."""
unflatten: Callable[[Structure, Iterable], Tree] = optree.tree_unflatten
"""``unflatten(structure, leaves)``: the tree of this structure with these leaves."""
leaves: Callable[..., list] = optree.tree_leaves
"""``leaves(tree, is_leaf=None)``: the leaves, in order."""
structure: Callable[..., Structure] = optree.tree_structure
"""``structure(tree, is_leaf=None)``: the structure, without leaves."""
is_leaf: Callable[[Any], bool] = optree.tree_is_leaf
"""``is_leaf(value)``: whether it is no container (None is an empty container)."""
all_leaves: Callable[..., bool] = optree.all_leaves
"""``all_leaves(iterable, is_leaf=None)``: whether none of its items is a container."""
Partial = optree.functools.partial
"""``Partial(fn, *args, **kwargs)``: `functools.partial`, a tree of the arguments that it binds."""


def register_pytree_node(
    nodetype: type,
    flatten_func: Callable[[Any], tuple],
    unflatten_func: Callable[[Any, tuple], Any],
) -> None:
    """Let instances of a class be nodes of trees, for this process; `jax.tree_util`'s.

    Args:
        nodetype: the class, not one of its subclasses.
        flatten_func: ``value -> (children, rest)``, or ``(children, rest, names)`` with each
            child's part of a path, by default its position. The rest belongs to the structure: it
            is compared with ``==``.
        unflatten_func: ``(rest, children) -> value``.

    Raises:
        ValueError: it is registered already.
    """
    library: Any = optree
    everywhere = library.registry.__GLOBAL_NAMESPACE
    library.register_pytree_node(nodetype, flatten_func, unflatten_func, namespace=everywhere)


def register_pytree_node_class(cls: type) -> type:
    """Let instances of a class be nodes of trees by its methods, which JAX's decorator asks for.

    `register_pytree_node` with ``tree_flatten(self)`` and the class method
    ``tree_unflatten(cls, rest, children)``.
    """
    made: Any = cls
    register_pytree_node(cls, lambda value: value.tree_flatten(), made.tree_unflatten)
    return cls


def register_static(cls: type) -> type:
    """Let instances of a class be nodes without leaves: parts of structures, compared by ``==``.

    As `jax.tree_util.register_static`; a decorator.
    """
    register_pytree_node(cls, lambda value: ((), value), lambda value, _: value)
    return cls


def static(**settings: Any) -> Any:
    """``dataclasses.field(**settings)`` of a field that belongs to the structure of a tree.

    As `jax.tree.static`, for `register_dataclass`.
    """
    metadata = {"static": True, **settings.pop("metadata", {})}
    return dataclasses.field(**settings, metadata=metadata)


def register_dataclass(
    cls: type, data_fields: Sequence[str] | None = None, meta_fields: Sequence[str] | None = None
) -> type:
    """Let instances of a dataclass be nodes of trees, with its fields as children.

    As `jax.tree_util.register_dataclass`; also a decorator. A field's name is its part of a path.
    It is known to this process from then on, as classes are: call it where the class is defined.

    Args:
        data_fields: those that are children; None: all but `meta_fields`.
        meta_fields: those that belong to the structure, compared by ``==``; None: those made by
            `static`.

    Raises:
        TypeError: it is not a dataclass, or a field is not an argument of it, or is in neither
            list or in both.
        ValueError: it is registered already.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"register_dataclass: got {cls!r}; wanted a class made by @dataclass")
    fields = dataclasses.fields(cls)
    if bad := [field.name for field in fields if not field.init]:
        raise TypeError(
            f"register_dataclass: got {cls.__name__} with fields {bad} that its instances are not "
            "made of; wanted fields that are arguments; fix: make those properties"
        )
    if meta_fields is None:
        meta_fields = [field.name for field in fields if field.metadata.get("static")]
    rest = tuple(meta_fields)
    others = [field.name for field in fields if field.name not in rest]
    names = tuple(others if data_fields is None else data_fields)
    if sorted((*names, *rest)) != sorted(field.name for field in fields):
        raise TypeError(
            f"register_dataclass: got data_fields={[*names]}, meta_fields={[*rest]}; wanted each "
            f"field of {cls.__name__} once: {[field.name for field in fields]}"
        )

    def divide(value: Any) -> tuple:
        children = tuple(getattr(value, name) for name in names)
        return children, tuple(getattr(value, name) for name in rest), names

    def build(meta: tuple, children: tuple) -> Any:
        pairs = zip((*names, *rest), (*children, *meta), strict=True)
        return cls(**dict(pairs))

    register_pytree_node(cls, divide, build)
    return cls


def paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The path of every leaf, in leaf order. The path of a lone leaf is ``""``.

    Dict keys, positions in lists and tuples, and the field names of named tuples.
    """
    shape = structure(tree, is_leaf)
    try:
        return list(_paths(shape))
    except TypeError:  # no hash, of a node of the user's
        return list(_paths.__wrapped__(shape))


@functools.lru_cache(1024)
def _paths(shape: Structure) -> tuple[str, ...]:
    accessors = optree.treespec_accessors(shape)
    return tuple(
        "/".join(str(getattr(step, "field", step.entry)) for step in accessor)
        for accessor in accessors
    )


def items(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The path of every leaf, as of `paths`, and the leaf itself, in leaf order."""
    return list(zip(paths(tree, is_leaf), leaves(tree, is_leaf), strict=True))


leaves_with_path = items
"""``leaves_with_path(tree, is_leaf=None)``: `items`, by JAX's name."""


def flatten_with_path(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Structure]:
    """The path and the leaf of every leaf, in leaf order, and the structure of the tree.

    >>> tree.flatten_with_path({"a": [1, 2]})
    ([('a/0', 1), ('a/1', 2)], PyTreeSpec({'a': [*, *]}))
    """
    return items(tree, is_leaf), structure(tree, is_leaf)


def all(tree: Tree, *, is_leaf: Callable[[Any], bool] | None = None) -> bool:  # noqa: A001
    """Whether all leaves are true, each by itself; True of a tree without leaves.

    >>> tree.all(tree.map(torch.equal, {"a": torch.ones(2)}, {"a": torch.ones(2)}))
    True
    """
    return builtins.all(leaves(tree, is_leaf))


def reduce(
    function: Callable[[Any, Any], Any],
    tree: Tree,
    initializer: Any = ...,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """``function(... function(function(initializer, leaf_0), leaf_1) ...)``, in leaf order.

    >>> tree.reduce(lambda total, x: total + x.numel(), [torch.ones(2, 3), torch.ones(1)], 0)
    7

    Raises:
        ValueError: there are no leaves and no `initializer`.
    """
    flat = leaves(tree, is_leaf)
    start = [] if initializer is ... else [initializer]
    _check_not_empty("reduce", "initializer", [*start, *flat])
    return functools.reduce(function, flat, *start)


def reduce_associative(
    operation: Callable[[Any, Any], Any],
    tree: Tree,
    *,
    identity: Any = ...,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """All leaves combined in order by an associative function, halves of them by themselves first.

    >>> tree.reduce_associative(lambda a, b: f"({a}{b})", list("abcde"))
    '((ab)(c(de)))'

    Args:
        identity: the result of a tree without leaves.

    Raises:
        ValueError: there are no leaves and no `identity`.
    """

    def combine(part: list) -> Any:
        half = len(part) // 2
        return operation(combine(part[:half]), combine(part[half:])) if half else part[0]

    flat = leaves(tree, is_leaf)
    if not flat and identity is not ...:
        return identity
    _check_not_empty("reduce_associative", "identity", flat)
    return combine(flat)


def _check_not_empty(name: str, argument: str, values: list) -> None:
    if not values:
        wanted = f"at least one, or what to return without: {argument}="
        raise ValueError(f"tree.{name}: got a tree without leaves; wanted {wanted}")


def transpose(outer: Structure, inner: Structure | None, tree: Tree) -> Tree:
    """A tree of structure `inner` of trees of structure `outer`, from one of `outer` of `inner`.

    >>> rows = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    >>> tree.transpose(tree.structure([0, 0]), None, rows)
    {'a': [1, 3], 'b': [2, 4]}

    Args:
        inner: None: that of the first subtree.

    Raises:
        ValueError: `tree` is not of these structures; every path that differs is named.
    """
    names = "the outer structure", "the tree"
    like = unflatten(outer, range(outer.num_leaves))
    rows = same_structure(like, tree, names=names)
    if inner is None:
        if not rows:
            raise ValueError("tree.transpose: got no subtree; wanted the inner structure; pass it")
        inner = structure(rows[0])
    small = unflatten(inner, range(inner.num_leaves))
    parts = [
        same_structure(small, row, names=("the inner structure", f"the subtree {path}"))
        for path, row in zip(paths(like), rows, strict=True)
    ]
    columns = zip(*parts, strict=True) if parts else [()] * inner.num_leaves
    return unflatten(inner, [unflatten(outer, column) for column in columns])


def broadcast(
    prefix_tree: Tree, full_tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """`full_tree` with the leaf of `prefix_tree` above each leaf in the place of it.

    >>> tree.broadcast({"a": 0.1, "b": 1.0}, {"a": [1, 2], "b": 3})
    {'a': [0.1, 0.1], 'b': 1.0}

    Args:
        is_leaf: ends `prefix_tree` where it holds.

    Raises:
        ValueError: it is no prefix; every path that differs is named.
    """
    names = "the prefix", "the full tree"
    parts = same_structure(prefix_tree, full_tree, is_leaf=is_leaf, names=names)
    rows = zip(leaves(prefix_tree, is_leaf), parts, strict=True)
    filled = [map(lambda _: entry, part) for entry, part in rows]
    return unflatten(structure(prefix_tree, is_leaf), filled)


def map(  # noqa: A001  (read as tree.map, like jax.tree.map)
    fn: Callable, tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """`fn` applied to each leaf of `tree` and the matching leaves of `rest`.

    Raises:
        ValueError: a tree in `rest` has another structure; every path that differs is named.
        TypeError: `fn` failed of a dataclass with tensors in it, which is no node of trees yet.
    """
    if not rest and isinstance(tree, torch.Tensor):  # the operand of most collectives
        return _apply(fn, [(tree,)], [tree], is_leaf)[0]
    flat, shape = flatten(tree, is_leaf)
    columns = [same_structure(tree, other, is_leaf=is_leaf) for other in rest]
    return unflatten(shape, _apply(fn, zip(flat, *columns, strict=True), flat, is_leaf))


def _apply(fn: Callable, rows: Iterable[tuple], leaves: list, is_leaf: Callable | None) -> list:
    """``fn(*row)`` for all rows; errors of a leaf that should be a node say so."""
    try:
        return [fn(*row) for row in rows]
    except RuntimeError as error:
        if (told := of_orphan("tree.map", error)) is None:
            raise
        raise told from None
    except (AttributeError, TypeError) as error:
        fixes = [] if is_leaf else list(filter(None, builtins.map(dataclass_fix, leaves)))
        if not fixes:
            raise
        raise TypeError(f"got {error}; wanted a tree of tensors; fix: {fixes[0]}") from error


def map_with_path(
    fn: Callable, tree: Tree, *rest: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """`fn(path, leaf, *rest_leaves)` applied to each leaf; `path` is a string like ``"a/0/b"``."""
    flat, shape = flatten(tree, is_leaf)
    columns = [same_structure(tree, other, is_leaf=is_leaf) for other in rest]
    rows = zip(paths(tree, is_leaf), flat, *columns, strict=True)
    return unflatten(shape, _apply(fn, rows, flat, is_leaf))


def map_columns(
    fn: Callable, tree: Tree, *columns: Iterable, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """``fn(leaf, *entries)`` of each leaf and of columns that have an entry for each, in order."""
    flat, shape = flatten(tree, is_leaf)
    return unflatten(shape, [fn(*row) for row in zip(flat, *columns, strict=True)])


def put_leaf(into: dict, path: str, leaf: Any) -> None:
    """Put a leaf into nested dicts at its path, such as ``"a/b"``; those on the way are made."""
    *above, name = path.split("/")
    for key in above:
        into = into.setdefault(key, {})
    into[name] = leaf


def same_structure(
    tree: Tree,
    other: Tree,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    names: tuple[str, str] = ("the first tree", "the second tree"),
) -> list:
    """The parts of `other` that stand where `tree` has leaves.

    Raises:
        ValueError: the structures differ; every missing and every extra path is named.
    """
    shape = structure(tree, is_leaf)
    try:
        return shape.flatten_up_to(other)
    except (ValueError, TypeError) as error:
        mine, theirs = set(paths(tree, is_leaf)), set(paths(other, is_leaf))
        # A whole subtree may stand for a leaf; a leaf for a subtree is reported as what it lacks.
        missing = [
            Problem(path or "(root)", f"nothing in {names[1]}", f"a leaf, as in {names[0]}")
            for path in sorted(mine - theirs)
            if not any(_is_under(other, path) for other in theirs)
        ]
        extra = [
            Problem(path or "(root)", f"a leaf in {names[1]}", f"nothing, as in {names[0]}")
            for path in sorted(theirs - mine)
            if not any(_is_under(path, other) or _is_under(other, path) for other in mine)
        ]
        found = missing + extra or [Problem("(root)", str(error), "the same structure")]
        raise_problems(f"{names[1]} does not match the structure of {names[0]}", found)
        raise AssertionError("unreachable") from error


def _is_under(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}/"))


def broadcast_prefix(
    prefix: Tree,
    tree: Tree,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    what: str = "prefix",
    wanted: str = "the same containers as the value",
) -> list:
    """One entry of `prefix` for each leaf of `tree`, repeating it over whole subtrees.

    ``{"a": x, "b": y}`` over ``{"a": [1, 2], "b": 3}`` gives ``[x, x, y]``.

    Args:
        prefix: a tree that ends no later than `tree` does.
        tree: the tree whose leaves are to be covered.
        is_leaf: what a leaf of `prefix` must be, of which None may be one; containers are none.
        what: the name of the prefix in error messages.
        wanted: what the message asks for when the prefix does not fit.

    Raises:
        ValueError: `prefix` is not a prefix of `tree`; each place that differs is named.
    """
    entries, shape = optree.tree_flatten(prefix, none_is_leaf=is_leaf is not None)
    if is_leaf is None or builtins.all(builtins.map(is_leaf, entries)):
        try:
            parts = shape.flatten_up_to(tree)
            rows = zip(entries, parts, strict=True)
            return [entry for entry, part in rows for _ in leaves(part)]
        except (ValueError, TypeError):  # each place that differs is found below
            pass
    out: list = []
    problems: list[Problem] = []
    _broadcast(prefix, tree, is_leaf, what, out, problems, wanted)
    raise_problems(f"{what} is not a prefix of the value it describes", problems)
    return out


def _broadcast(prefix, tree, is_leaf, path, out, problems, wanted) -> None:
    if is_leaf is not None and optree.tree_is_leaf(prefix) and not is_leaf(prefix):
        fix = f"write P({prefix!r})" if isinstance(prefix, str) else ""
        problems.append(Problem(path, repr(prefix), wanted, fix))
        return
    if (is_leaf is not None and is_leaf(prefix)) or optree.tree_is_leaf(prefix):
        out.extend([prefix] * len(leaves(tree)))
        return
    if optree.tree_is_leaf(tree) or type(prefix) is not type(tree):
        problems.append(Problem(path, type(prefix).__name__, f"{wanted} ({type(tree).__name__})"))
        return
    mine, theirs = _children(prefix), _children(tree)
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        where = f"{path}/{key}"
        if key not in theirs:
            problems.append(Problem(where, "an entry", f"nothing: the value has no {key!r}"))
        elif key not in mine:
            problems.append(Problem(where, "nothing", f"an entry: the value has {key!r}"))
        else:
            _broadcast(mine[key], theirs[key], is_leaf, where, out, problems, wanted)


def _children(tree: Tree) -> dict[Any, Tree]:
    children, _, entries, _ = optree.tree_flatten_one_level(tree)
    entries = tree._fields if optree.is_namedtuple(tree) else entries
    return dict(zip(entries, children, strict=True))


def partition(tree: Tree, mask: Tree) -> tuple[Tree, Tree]:
    """The leaves that `mask` picks, and the others: two trees with None where the other has a leaf.

    `join` is the inverse. ``partition({"a": 1, "b": 2}, {"a": True, "b": False})`` is
    ``({"a": 1, "b": None}, {"a": None, "b": 2})``.

    Args:
        tree: any tree.
        mask: a tree or prefix tree of bools.

    Raises:
        ValueError: `mask` is not a prefix of `tree`.
    """
    flat, shape = flatten(tree)
    flags = broadcast_prefix(mask, tree, what="mask", wanted="a bool, or containers")
    rows = list(zip(flat, flags, strict=True))
    first = unflatten(shape, [leaf if flag else None for leaf, flag in rows])
    return first, unflatten(shape, [None if flag else leaf for leaf, flag in rows])


def join(first: Tree, second: Tree) -> Tree:
    """The tree that `partition` divided: the leaves of both, each where the other has None."""
    return optree.tree_map(
        lambda one, other: other if one is None else one, first, second, none_is_leaf=True
    )


def size(tree: Tree) -> int:
    """The number of elements in all tensor leaves: a model's parameter count."""
    return sum(leaf.numel() for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def nbytes(tree: Tree) -> int:
    """The bytes of all tensor leaves, views counted at their own size."""
    return sum(leaf.nbytes for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def json_checksum(content: Any) -> int:
    """The CRC-32 of a tree as JSON, keys in order: the same however a file lays it out."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def is_inexact(leaf: Any) -> bool:
    """Whether `leaf` is a floating-point or complex tensor, through which derivatives pass."""
    return is_float(leaf) or (isinstance(leaf, torch.Tensor) and leaf.is_complex())


def is_float(leaf: Any) -> bool:
    """Whether `leaf` is a floating-point tensor, which has a derivative."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
