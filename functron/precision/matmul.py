"""Linear layers with quantised products, whose numbers do not depend on the mesh.

`product` makes a plain function ``(x, w) -> y`` of a `Recipe`, for layers to call in place of
``x @ w``. Forward quantises x and w; backward quantises dy and w for the gradient of x, and x and
dy for that of w, each in its format. Saved for backward are x, w and the magnitudes found.

**On a mesh** scales are those of the whole tensor, however it is sharded:

* Of "tensor" formats it comes from the largest magnitude over all ranks: those of x and w travel in
  one `pmax` of 8 bytes, that of dy in another. Ranks that hold the same part change no maximum, so
  it is taken over all axes in force, unless ``rows`` says which ones split tokens.
* Of "row" formats it comes from the maximum along what is summed, over the axes that split that:
  ``inner`` in forward, ``outer`` for the gradient of x, those of tokens for that of w.
* Blocks lie within a shard: sizes of shards that they do not divide are refused. Those of 128 may
  be incomplete at the ends of a dim of inputs or outputs that no axis splits; other sizes that
  blocks do not divide are refused on one device as well.
* Random numbers belong to global positions, so ``rows`` must say how tokens are split, and
  ``index`` where they are, if not in order.

A magnitude is of the tokens that a layer is given at once. So with current scaling of tensors the
numbers depend on how many microbatches a batch is cut into, on one device as on any mesh; by rows
and blocks, and with delayed scaling, they do not.

**Partial sums must not be quantised.** The cotangents of column- and row-parallel products are
complete on every rank. Where x and w are both replicated over an axis, the cotangent of y is a
partial sum over it: name such axes in ``partial``, which sums it first. Programs that do not are
refused where they are simulated.

With ``scaling=local`` magnitudes are this rank's: no communication, and numbers depend on the mesh.
With ``scaling=delayed`` they are those of earlier steps: the function takes a third operand, the
float32 ``[3, 256]`` histories of x, w and dy (`history_def`; ``[experts, 3, 256]`` for experts),
and returns the magnitudes of this step as that operand's cotangent: histograms, whose sum over
ranks, microbatches and layers updates the histories (`functron.ops.quantise.remember`).

Where w is an `Encoded`, as `functron.precision.encoder` makes it once per step, forward and
backward read its codes instead of quantising it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functron.core import random
from functron.core.errors import public, refuse
from functron.core.random import Index
from functron.core.typing import Tensor
from functron.ops.grouped_matmul import grouped_matmul, grouped_matmul_weight
from functron.ops.operations import AUTO, Kernels
from functron.ops.quantise import (
    HISTORY,
    Quantised,
    QuantisedFormat,
    RoundingDraw,
    hadamard,
    histogram,
    magnitude,
    quantise,
    remembered,
)
from functron.ops.scaled_matmul import (
    scaled_grouped_matmul,
    scaled_grouped_weight,
    scaled_matmul,
)
from functron.precision.recipe import Contraction, Recipe, Scaling, check_sizes
from functron.precision.weights import Codes, agreed
from functron.spmd import collectives as lax
from functron.spmd.axes import SimulatedAxis, scope
from functron.spmd.params import ParamDef, zeros
from functron.spmd.spec import P, dim_axes, spec_axes
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.parameter_gather import Encoded

Axes = str | tuple[str, ...]
QuantisedMatmul = Callable[..., Tensor]
"""``(x [..., inputs], w [inputs, outputs])`` to ``[..., outputs]``; with ``scaling=delayed`` also
of a history."""


@public
def product(
    recipe: Recipe,
    *,
    inner: Axes = (),
    outer: Axes = (),
    rows: P | None = None,
    partial: Axes = (),
    key: Tensor | None = None,
    index: Index = None,
    runs: int = 1,
    path: str = "product",
    kernels: Kernels = AUTO,
) -> QuantisedMatmul:
    """The function ``(x, w) -> x w`` whose three products are quantised by `recipe`.

    Its x is ``[..., tokens, inputs]`` and w ``[inputs, outputs]`` of one dtype, this rank's parts;
    its result has that dtype, and is summed in float32 (of float64, in float64). w may be an
    `Encoded` whose ``like`` is that matrix, or has its shape. Collectives: see
    the module; none with ``scaling=local`` and no `partial`.

    Args:
        recipe: the formats of the three products.
        inner: the mesh axes that split inputs; results are then partial sums, as in any
            row-parallel layer.
        outer: the mesh axes that split outputs.
        rows: the spec of x's leading dims, which tells the axes that split tokens; needed for
            random numbers. None: all axes in force but `inner`, `outer` and `partial`.
        partial: the axes over which x and w are replicated and cotangents of the result are partial
            sums; one psum of a cotangent's bytes each.
        key: the random key of this layer and step; None where nothing random is needed, such as
            without gradients if fprop rounds to nearest.
        index: the global positions along each leading dim of x, or None where `rows` tells them.
        runs: number of runs of consecutive tokens in this rank's part of a sequence: 2 in the
            zigzag order of context parallelism. No block along tokens may lie in two.
        path: the layer's name in messages.
        kernels: of ``"scaled_matmul"``: "reference" computes exactly on GPUs too, slowly.

    Raises:
        ValueError: fprop is random and there is no key or no `rows`; when called: another product
            is random without them, blocks do not divide the sizes, the GPU has no such product, or
            an axis is missing from `partial`.
    """
    if recipe.fprop is not None and recipe.fprop.draws:
        _check_draws(recipe, key, rows, path)
    split = _MatmulSplit(_as_axes(inner), _as_axes(outer), rows, _as_axes(partial))
    emulate = kernels.wants_reference("scaled_matmul")
    layer = _QuantisedLayer(recipe, split, runs, path, emulate)

    def value(
        x: Tensor, w: Tensor, codes: Codes | None, history: Tensor | None, places: tuple
    ) -> Tensor:
        return layer.forward(x, w, codes, _read_history(history), places)[0]

    def forward(
        x: Tensor, w: Tensor, codes: Codes | None, history: Tensor | None, places: tuple
    ) -> tuple[Tensor, tuple]:
        _check_draws(recipe, key, rows, path)  # forward alone may draw nothing
        layer.check(x, w, codes)
        y, known = layer.forward(x, w, codes, _read_history(history), places)
        return y, (x, w, codes, places, known)

    def backward(residuals: tuple, dy: Tensor) -> tuple:
        x, w, codes, places, known = residuals
        dx, dw, seen = layer.backward(x, w, codes, places, known, dy)
        return dx, dw, None, seen, None

    call = custom_vjp(value, forward, backward)

    def multiply(x: Tensor, w: Tensor | Encoded, history: Tensor | None = None) -> Tensor:
        sizes, shards = (w.shape[0], w.shape[1]), split.shards()
        check_sizes(recipe, tuple(x.shape), sizes, path=path, split=shards, backward=False)
        _check_history(recipe, history, path)
        like, codes = _split_codes(w)
        return call(x, like, codes, history, (key, None if index is None else tuple(index)))

    return multiply


def history_def(layers: int | None = None, *, experts: int | None = None) -> ParamDef:
    """The histories of a layer with ``scaling=delayed``: magnitudes of x, w and dy in 256 steps.

    A leaf of the state beside the layer's weight, replicated, in float32 on every device. It is no
    weight (`functron.spmd.params.weight_mask`): its cotangent is a histogram, it has no part in the
    gradients' norm, and the optimizer replaces it by `functron.ops.quantise.remember`.

    Args:
        layers: number of stacked layers; None: one layer.
        experts: number of experts of the layer; None: a linear layer.
    """
    lead = () if layers is None else ((layers, "layers"),)
    lead += () if experts is None else ((experts, "expert"),)
    dims = (*lead, (len(_REMEMBERED), None), (HISTORY, None))
    sizes, axes = zip(*dims, strict=True)
    return ParamDef(sizes, axes, zeros, torch.float32, decay=False, history=True)


_REMEMBERED = ("x", "w", "dy")
_BY_TENSOR = QuantisedFormat("e4m3", "tensor")


def _check_draws(recipe: Recipe, key: Tensor | None, rows: P | None, path: str) -> None:
    if recipe.draws and (key is None or rows is None):
        missing = "key" if key is None else "rows"
        fix = "pass key=random.fold_in(step_key, layer) and rows=P(...), the spec of the tokens"
        wanted = "one: this recipe rounds stochastically, or mixes by random signs"
        refuse(f"a quantised product of {path}", missing, "None", wanted, fix)


def _check_history(
    recipe: Recipe, history: Tensor | None, path: str, experts: tuple[int, ...] = ()
) -> None:
    delayed = recipe.scaling == "delayed"
    wanted = (*experts, len(_REMEMBERED), HISTORY) if delayed else None
    fits = history is None or history.dtype == torch.float32
    got = None if history is None else tuple(history.shape)
    if got != wanted or not fits:
        what = "None" if history is None else f"{history.dtype} of shape {got}"
        known = "None" if wanted is None else f"float32 of shape {wanted}"
        fix = "give one more operand, as history_def says, to recipes with scaling=delayed alone"
        refuse(f"a quantised product of {path}", "history", what, known, fix)


def _split_codes(w: Tensor | Encoded) -> tuple[Tensor, Codes | None]:
    """The weight that the gradient is of, and codes."""
    return (w.like, Codes(w.codes, w.split)) if isinstance(w, Encoded) else (w, None)


def _as_axes(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


class _MatmulSplit(NamedTuple):
    """Which mesh axes split what; as `product` is given them."""

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    rows: P | None
    partial: tuple[str, ...]

    def tokens(self) -> tuple[str, ...]:
        """The axes that split tokens."""
        if self.rows is not None:
            return spec_axes(self.rows)
        here = scope()
        stages = () if here.stages is None else (here.stages.name,)
        known = {*self.inner, *self.outer, *self.partial, *stages}
        return tuple(
            name for name, axis in here.axes.items() if axis is not None and name not in known
        )

    def shards(self) -> tuple[bool, bool]:
        """Whether ranks have parts of the inputs, and of the outputs."""
        return lax.axis_size(self.inner) > 1, lax.axis_size(self.outer) > 1

    def everywhere(self) -> tuple[str, ...]:
        """The axes over which any operand is split."""
        return tuple(dict.fromkeys((*self.tokens(), *self.inner, *self.outer)))


class _Operand(NamedTuple):
    """A matrix with what is summed last, and how it is to be quantised.

    Attributes:
        number: of the product.
        name: "x", "w" or "dy".
        matrix: ``[rows, summed]``.
        format: of it.
        mixed: whether it has been multiplied by a Hadamard matrix.
        summed: the mesh axes that split the summed dim.
        draw: the random bits of stochastic rounding.
        made: the quantised operand, if it exists already.
    """

    number: int
    name: str
    matrix: Tensor
    format: QuantisedFormat
    mixed: bool
    summed: tuple[str, ...]
    draw: RoundingDraw | None
    made: Quantised | None = None

    @property
    def key(self) -> str:
        """The name of its magnitude, which for tensors is the same in all products."""
        state = "mixed " * self.mixed
        if self.format.shared == "tensor":
            return f"{state}{self.name}"
        return f"{state}{self.name} of product {self.number}"


def _read_history(history: Tensor | None) -> dict[str, Tensor]:
    """The magnitudes of x, w and dy that histories give; {} without."""
    if history is None:
        return {}
    return dict(zip(_REMEMBERED, remembered(history).unbind(-1), strict=True))


def _find_magnitudes(
    operands: Sequence[_Operand],
    known: Mapping[str, Tensor],
    everywhere: tuple[str, ...],
    scaling: Scaling,
) -> dict[str, Tensor]:
    """The magnitudes that operands need: those known already, and the others over ranks.

    Those of tensors over the axes `everywhere`; those of rows over the axes of the summed dim.
    """
    found: dict[str, Tensor] = {}
    parts: list[tuple[Tensor, tuple[str, ...]]] = []
    for operand in operands:
        if operand.made is not None or operand.key in known or operand.key in found:
            continue
        most = magnitude(operand.matrix, operand.format)
        if most is not None:
            found[operand.key] = most
            whole = operand.format.shared == "tensor"
            parts.append((most, everywhere if whole else operand.summed))
    return {**known, **dict(zip(found, agreed(parts, scaling), strict=True))}


class _QuantisedLayer(NamedTuple):
    """The three products of one linear layer."""

    recipe: Recipe
    split: _MatmulSplit
    runs: int
    path: str
    emulate: bool

    def check(self, x: Tensor, w: Tensor, codes: Codes | None) -> None:
        """Refuse what cannot be differentiated: sizes, and cotangents that are partial sums."""
        sizes = (w.shape[0], w.shape[1])
        given: Any = {"path": self.path, "split": self.split.shards(), "runs": self.runs}
        check_sizes(self.recipe, tuple(x.shape), sizes, **given)
        if self.recipe.dgrad is None and self.recipe.wgrad is None:
            return
        numbers = w if codes is None else codes.made[0].both[0]
        for name, axis in scope().axes.items():
            varies = not isinstance(axis, SimulatedAxis) or axis.varies(x) or axis.varies(numbers)
            if not varies and name not in self.split.partial:
                refuse(
                    f"a quantised product of {self.path}",
                    f"axis {name!r}",
                    "x and w that are the same on all its ranks",
                    "the axis in partial=, as cotangents of the result are partial sums over it, "
                    "which must be added up before they are quantised",
                    f"name it in partial=({name!r},), or split x or w by it",
                )

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        codes: Codes | None,
        known: dict[str, Tensor],
        places: tuple,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The result, and the magnitudes of tensors, which backward reads."""
        part = self.recipe.fprop
        if part is None:
            return x @ w, known
        where = _DrawPlaces(self.split, x.shape, w.shape, places, x.device)
        sides = ("x", x.flatten(0, -2)), ("w", w.mT)
        pair = self._make_operands(0, part, *sides, self.split.inner, where, codes)
        known = _find_magnitudes(pair, known, self.split.everywhere(), self.recipe.scaling)
        y = self._multiply(pair, known, x.dtype)
        kept = {name: value for name, value in known.items() if name in _REMEMBERED}
        return y.unflatten(0, x.shape[:-1]), kept

    def backward(
        self,
        x: Tensor,
        w: Tensor,
        codes: Codes | None,
        places: tuple,
        known: dict[str, Tensor],
        dy: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's cotangents of x and w, and the histograms of this step's magnitudes."""
        split, recipe = self.split, self.recipe
        if split.partial:
            dy = lax.psum(dy, split.partial)
        flat, d = x.flatten(0, -2), dy.flatten(0, -2)
        where = _DrawPlaces(split, x.shape, w.shape, places, x.device)
        for_x, for_w = (), ()
        if recipe.dgrad is not None:
            for_x = self._make_operands(
                1, recipe.dgrad, ("dy", d), ("w", w), split.outer, where, codes
            )
        if recipe.wgrad is not None:
            tokens = split.tokens()
            for_w = self._make_operands(
                2, recipe.wgrad, ("x", flat.mT), ("dy", d.mT), tokens, where
            )
        known = _find_magnitudes((*for_x, *for_w), known, split.everywhere(), recipe.scaling)
        dx = self._multiply(for_x, known, x.dtype) if for_x else d @ w.mT
        dw = self._multiply(for_w, known, w.dtype) if for_w else flat.mT @ d
        dx = dx.unflatten(0, x.shape[:-1])
        if split.partial:  # replicas share the cotangent equally
            size = lax.axis_size(split.partial)
            dx, dw = dx / size, dw / size
        if recipe.scaling != "delayed":
            return dx, dw, None
        seen = [magnitude(m.flatten(0, -2), _BY_TENSOR) for m in (x, w, dy)]
        return dx, dw, histogram(torch.stack([most for most in seen if most is not None]))

    def _multiply(
        self, pair: Sequence[_Operand], known: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Tensor:
        def made(one: _Operand) -> Quantised:
            if one.made is not None:
                return one.made
            most = known[one.key] if one.format.shared else None
            return quantise(one.matrix, one.format, most, one.draw, emulate=self.emulate)

        a, b = map(made, pair)
        return scaled_matmul(a, b, dtype, emulate=self.emulate)

    def _make_operands(
        self,
        number: int,
        part: Contraction,
        left: tuple[str, Tensor],
        right: tuple[str, Tensor],
        summed: tuple[str, ...],
        where: _DrawPlaces,
        codes: Codes | None = None,
    ) -> tuple[_Operand, _Operand]:
        """The operands of a product, mixed where it says so."""
        sides = zip((left, right), (part.left, part.right), strict=True)
        made = []
        for side, ((name, matrix), form) in enumerate(sides):
            if part.hadamard:
                matrix = hadamard(matrix, *where.summed(number))
            draw = where.draw(number, side, name) if form.stochastic else None
            made.append(_Operand(number, name, matrix, form, part.hadamard, summed, draw))
        if codes is not None:
            made[1] = made[1]._replace(made=codes.read(self.recipe, number))
        return made[0], made[1]


class _DrawPlaces:
    """The global positions of a layer's tokens, inputs and outputs, and their random numbers."""

    def __init__(
        self,
        split: _MatmulSplit,
        x: Sequence[int],
        w: Sequence[int],
        places: tuple,
        device: torch.device,
    ):
        self._split, self._lead, self._device = split, tuple(x[:-1]), device
        self._key, self._index = places
        self._sizes = (w[0] * lax.axis_size(split.inner), w[1] * lax.axis_size(split.outer))
        self._local = w

    @functools.cached_property
    def _tokens(self) -> Tensor:
        lead, rows = self._lead, self._split.rows
        assert rows is not None
        given = self._index or [None] * len(lead)
        place = torch.zeros(1, dtype=torch.int64, device=self._device)
        for size, axes, at in zip(lead, dim_axes(rows, len(lead)), given, strict=True):
            own = lax.global_index(size, axes, device=self._device) if at is None else at
            place = (place.unsqueeze(-1) * (size * lax.axis_size(axes)) + own).reshape(-1)
        return place

    @functools.cached_property
    def _inputs(self) -> Tensor:
        return lax.global_index(self._local[0], self._split.inner, device=self._device)

    @functools.cached_property
    def _outputs(self) -> Tensor:
        return lax.global_index(self._local[1], self._split.outer, device=self._device)

    def summed(self, number: int) -> tuple[Tensor, Tensor, int]:
        """The key, positions and salt of product `number`'s signs, along what both operands sum."""
        return self._key, (self._inputs, self._outputs, self._tokens)[number], 8 + number

    def draw(self, number: int, side: int, name: str) -> RoundingDraw:
        """The random bits of an operand whose last dim is the one that product `number` sums."""
        salt = 2 * number + side
        if name == "w":
            by, along = self._inputs * self._sizes[1], self._outputs
        else:
            width = self._sizes[0] if name == "x" else self._sizes[1]
            by, along = self._tokens * width, self._inputs if name == "x" else self._outputs
        # matrices have tokens, or inputs of w, first; only dgrad sums over the second dim
        straight = {"x": number == 0, "w": number == 1, "dy": number == 1}[name]
        return RoundingDraw(self._key, *((by, along) if straight else (along, by)), salt)


def quantised(
    recipe: Recipe, *, kernels: Kernels = AUTO
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The functions ``linear`` and ``grouped`` of `functron.nn.Matmul`, by a recipe.

    ``nn.Matmul(*quantised(recipe), draws=recipe.draws)`` serves all layers of a model. With
    ``scaling=delayed`` pass ``remembers=True`` and add the leaves of
    `functron.models.decoder.with_histories` to the parameters: both functions then take
    ``histories`` by name.

    Args:
        recipe: the formats of the three products of each layer.
        kernels: as in `product`.
    """

    def linear(
        x: Tensor,
        w: Tensor | Encoded,
        *,
        name: str,
        key: Tensor | None = None,
        histories: Mapping[str, Tensor] = MappingProxyType({}),
        **where: Any,
    ) -> Tensor:
        own = None if key is None else random.fold_in(key, zlib.crc32(name.encode()))
        made = product(recipe, key=own, path=name, kernels=kernels, **where)
        return made(x, w, histories.get(name))

    def grouped(
        x: Tensor,
        w: Tensor | Encoded,
        sizes: Tensor,
        *zeros: bool,
        name: str,
        histories: Mapping[str, Tensor] = MappingProxyType({}),
        **where: Any,
    ) -> Tensor:
        made = grouped_product(recipe, path=name, kernels=kernels, **where)
        return made(x, w, sizes, *zeros, history=histories.get(name))

    return linear, grouped


# --- experts


@public
def grouped_product(
    recipe: Recipe,
    *,
    experts: Axes = ("ep",),
    inner: Axes = (),
    outer: Axes = (),
    path: str = "experts",
    kernels: Kernels = AUTO,
) -> Callable[..., Tensor]:
    """The function in place of `functron.ops.grouped_matmul` whose three products are quantised.

    ``(x [rows, inputs], w [experts, inputs, outputs], sizes, zeros, zeros_back)`` to ``[rows,
    outputs]``; see there. With ``scaling=delayed`` it takes ``history`` too. Every expert has
    scales of its own: of "tensor" formats, and the scales over those of FP4's blocks, from the
    largest magnitude of its rows over all ranks that hold it. The recipe is ``recipe.grouped()``,
    whose wgrad has one scale for each expert and feature instead of blocks along rows. Collectives,
    with ``scaling=global``: one pmax of what experts share for x and w and one for dy, of 4 bytes
    per expert (wgrad by rows: and feature).

    Args:
        recipe: the formats of the three products.
        experts, inner, outer: the mesh axes that split experts, their inputs and their outputs.
        path, kernels: as in `product`.

    Raises:
        ValueError: where the function is called: sizes that blocks do not divide, or a GPU without
            such products.
    """
    recipe = recipe.grouped()
    emulate = kernels.wants_reference("scaled_matmul")
    split = _MatmulSplit(_as_axes(inner), _as_axes(outer), None, _as_axes(experts))
    layer = _QuantisedExperts(recipe, split, emulate)

    def multiply(
        x: Tensor,
        w: Tensor | Encoded,
        sizes: Tensor,
        zeros: bool = True,
        zeros_back: bool = True,
        history: Tensor | None = None,
    ) -> Tensor:
        row = (1, x.shape[1])  # each is a matrix
        check_sizes(recipe, row, (w.shape[1], w.shape[2]), path=path, split=split.shards())
        _check_history(recipe, history, path, (len(w),))

        def forward(
            x: Tensor, w: Tensor, codes: Codes | None, sizes: Tensor, history: Tensor | None
        ) -> tuple[Tensor, tuple]:
            known = _read_history(history)
            y = layer.forward(x, w, codes, sizes, zeros, known)
            return y, (x, w, codes, sizes, known)

        def backward(residuals: tuple, dy: Tensor) -> tuple:
            x, w, codes, sizes, known = residuals
            dx, dw, seen = layer.backward(x, w, codes, sizes, dy, zeros_back, known)
            return dx, dw, None, None, seen

        like, codes = _split_codes(w)
        value = lambda *args: forward(*args)[0]  # noqa: E731
        return custom_vjp(value, forward, backward)(x, like, codes, sizes, history)

    return multiply


class _QuantisedExperts(NamedTuple):
    """The three products of experts.

    Attributes:
        recipe: as `Recipe.grouped` returns it.
        split: the axes of one expert; ``partial`` has those that split experts.
        emulate: whether GPUs compute the reference.
    """

    recipe: Recipe
    split: _MatmulSplit
    emulate: bool

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        codes: Codes | None,
        sizes: Tensor,
        zeros: bool,
        known: Mapping[str, Tensor],
    ) -> Tensor:
        """Rows times their expert's w; `known` has the magnitudes that histories give."""
        if self.recipe.fprop is None:
            return grouped_matmul(x, w, sizes, zeros)
        made = None if codes is None else codes.read(self.recipe, 0)
        most = known.get("x"), known.get("w")
        return self._multiply_rows(
            x, w.mT, made, sizes, self.recipe.fprop, self.split.inner, zeros, most
        )

    def backward(
        self,
        x: Tensor,
        w: Tensor,
        codes: Codes | None,
        sizes: Tensor,
        dy: Tensor,
        zeros_back: bool,
        known: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The cotangents of x and w, and the histograms of this step's magnitudes."""
        recipe = self.recipe
        if recipe.dgrad is None:
            dx = grouped_matmul(dy, w.mT, sizes, zeros_back)
        else:
            made = None if codes is None else codes.read(recipe, 1)
            most = known.get("dy"), known.get("w")
            outer = self.split.outer
            dx = self._multiply_rows(dy, w, made, sizes, recipe.dgrad, outer, zeros_back, most)
        groups = _find_groups(x, sizes)
        dw = self._weight_cotangent(x, w, sizes, dy, groups, known)
        if recipe.scaling != "delayed":
            return dx, dw, None
        of_x, of_dy = (_group_magnitudes(m, _BY_TENSOR, groups, len(w)) for m in (x, dy))
        of_w = magnitude(w, _BY_TENSOR)
        assert of_x is not None
        assert of_w is not None
        assert of_dy is not None
        return dx, dw, histogram(torch.stack([of_x[:-1, 0], of_w, of_dy[:-1, 0]], -1))

    def _weight_cotangent(
        self,
        x: Tensor,
        w: Tensor,
        sizes: Tensor,
        dy: Tensor,
        groups: Tensor,
        known: Mapping[str, Tensor],
    ) -> Tensor:
        """The cotangent of w."""
        recipe = self.recipe
        if recipe.wgrad is None:
            return grouped_matmul_weight(x, dy, sizes, len(w))
        forms = recipe.wgrad.left, recipe.wgrad.right
        sides = tuple(zip(("x", "dy"), (x, dy), forms, strict=True))
        most = [_pad_magnitudes(known.get(name)) for name, _, _ in sides]
        if not known:
            rows = [(_group_magnitudes(m, f, groups, len(w), along=True), f) for _, m, f in sides]
            most = self._share_magnitudes(rows, self.split.tokens())
        flat: list[tuple[Tensor, Tensor]] = []
        for (_, matrix, form), amax in zip(sides, most, strict=True):
            assert amax is not None, form
            each = amax.index_select(0, groups).expand(matrix.shape)  # of every element
            column = form if form.blocks == "row" else replace(form, blocks="row")
            made = quantise(matrix.reshape(-1, 1), column, each.reshape(-1), emulate=self.emulate)
            flat.append((made.values.reshape(matrix.shape), made.scales.reshape(matrix.shape)))
        left, right = flat
        return scaled_grouped_weight(*left, *right, sizes, w.dtype, emulate=self.emulate)

    def _multiply_rows(
        self,
        rows: Tensor,
        w: Tensor,
        made: Quantised | None,
        sizes: Tensor,
        part: Contraction,
        summed: tuple[str, ...],
        zeros: bool,
        known: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Rows times their expert's w, ``[experts, outputs, summed]``, or times its codes."""
        groups = _find_groups(rows, sizes)
        amax, of_w = _pad_magnitudes(known[0]), known[1]
        if of_w is None:
            left = _group_magnitudes(rows, part.left, groups, len(w))
            right = magnitude(w, part.right) if made is None else None
            amax, of_w = self._share_magnitudes([(left, part.left), (right, part.right)], summed)
        if amax is not None and part.left.shared == "tensor":
            amax = amax.index_select(0, groups).reshape(-1)
        elif amax is not None:
            amax = amax.unsqueeze(1)
        a = quantise(rows.unsqueeze(1), part.left, amax, emulate=self.emulate)
        b = made or quantise(w, part.right, of_w, emulate=self.emulate)
        return scaled_grouped_matmul(a, b, sizes, rows.dtype, zeros=zeros, emulate=self.emulate)

    def _share_magnitudes(
        self, found: Sequence[tuple[Tensor | None, QuantisedFormat]], summed: tuple[str, ...]
    ) -> list[Tensor | None]:
        """Magnitudes over the ranks that have parts of the same experts."""
        axes = {"tensor": self.split.everywhere(), "row": summed}
        parts = [(most, axes[form.shared]) for most, form in found if most is not None]
        whole = iter(agreed(parts, self.recipe.scaling))
        return [None if most is None else next(whole) for most, _ in found]


def _pad_magnitudes(known: Tensor | None) -> Tensor | None:
    """Magnitudes of experts as `_group_magnitudes` has them: [E + 1, 1] of [E]."""
    if known is None:
        return None
    return torch.cat([known, torch.ones_like(known[:1])]).unsqueeze(1)


def _find_groups(rows: Tensor, sizes: Tensor) -> Tensor:
    """The group of each row, int64 [R]; of rows that belong to none, how many groups there are."""
    at = torch.arange(rows.shape[0], device=rows.device)
    return (at.unsqueeze(1) >= sizes.cumsum(0)).sum(1)


def _group_magnitudes(
    x: Tensor, form: QuantisedFormat, groups: Tensor, num: int, *, along: bool = False
) -> Tensor | None:
    """The magnitudes that a format needs: [num + 1, 1] by group, [R] by row, or None.

    Args:
        x: ``[R, D]``; rows of no group may be anything, and count in the last of the results.
        form: the format.
        groups: the group of each row.
        num: number of groups.
        along: whether rows are summed: "row" then is each column of a group, [num + 1, D].
    """
    if form.shared == "row" and not along:
        return magnitude(x, form)
    if not form.shared:
        return None
    size = x.detach().abs().float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if form.shared == "tensor":
        size = size.amax(1, keepdim=True)
    at = groups.unsqueeze(1).expand(size.shape)
    start = torch.zeros_like(size[:1]).expand(num + 1, -1)
    most = start.scatter_reduce(0, at, size, "amax")
    # rows of no group have undefined contents
    own = torch.arange(num + 1, device=x.device).unsqueeze(1) < num
    return torch.where(own, most, torch.ones_like(most))
