"""Recipes: which products of a linear layer are quantised, and how, as a value.

A linear layer y = x w has three products, and each sums over another dim:

| product | is         | sums over     | operands |
|---------|------------|---------------|----------|
| fprop   | y = x w    | the inputs    | x, w     |
| dgrad   | dx = dy w' | the outputs   | dy, w    |
| wgrad   | dw = x' dy | tokens        | x, dy    |

A `Recipe` names the formats of all six, and is one line of text:

    fprop=e4m3@tensor*e4m3@tensor dgrad=e5m2@tensor*e4m3@tensor wgrad=... scaling=global

`RECIPES` has the published ones by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.ops.quantise import WIDTH, Format, undivided
from functron.ops.scaled_matmul import why_not

Scaling = Literal["global", "local", "delayed"]
"""Whose magnitude scales are of: the whole tensor's, over all ranks that have a part of it; this
rank's part's; or the whole tensor's in the steps before. "global" and "delayed" numbers are those
of one device; "local" ones depend on the mesh. "local" and "delayed" send nothing."""

HIGH = "high"
_MIXED = "hadamard"


@dataclass(frozen=True)
class Contraction:
    """How one of the three products is computed: ``e4m3@1x128*e4m3@128x128``.

    Attributes:
        left: of the first operand in the module's table.
        right: of the second one.
        hadamard: both are first multiplied by a random Hadamard matrix along what is summed, which
            leaves the product as it is and spreads large elements (`functron.ops.quantise`); as
            text ``hadamard(...)``.
    """

    left: Format
    right: Format
    hadamard: bool = False

    def __str__(self) -> str:
        text = f"{self.left}*{self.right}"
        return f"{_MIXED}({text})" if self.hadamard else text

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers."""
        return self.hadamard or self.left.stochastic or self.right.stochastic

    @property
    def depth(self) -> int:
        """The number that the size that is summed must be a multiple of."""
        sizes = [self.left.block[1], self.right.block[1], WIDTH if self.hadamard else 1]
        return max(sizes)

    @classmethod
    def parse(cls, text: str) -> Contraction | None:
        """Of its text; None of "high".

        Raises:
            ValueError: it is none.
        """
        if text == HIGH:
            return None
        mixed = text.startswith(f"{_MIXED}(") and text.endswith(")")
        inner = text[len(_MIXED) + 1 : -1] if mixed else text
        left, times, right = inner.partition("*")
        if not times:
            refuse("a recipe", "product", repr(text), "FORMAT*FORMAT, hadamard(...) or high")
        return cls(Format.parse(left), Format.parse(right), mixed)


@dataclass(frozen=True)
class Recipe:
    """The formats of a linear layer's three products; None where one is not quantised.

    ``str(recipe)`` is one line, which `Recipe.parse` reads back.

    Attributes:
        fprop: of x and w.
        dgrad: of dy and w.
        wgrad: of x and dy.
        scaling: whose magnitudes; see `Scaling`.

    Raises:
        ValueError: blocks of the two operands of a product differ in how many elements that are
            summed share a scale; or magnitudes are to be remembered that are not of tensors.
    """

    fprop: Contraction | None
    dgrad: Contraction | None
    wgrad: Contraction | None
    scaling: Scaling = "global"

    def __post_init__(self) -> None:
        found = []
        for name, part in self.products():
            depths = (part.left.block[1], part.right.block[1])
            if depths[0] != depths[1]:
                wanted = "blocks of one length along what is summed"
                found.append(Problem(name, str(part), wanted, "take the same blocks for both"))
        if self.scaling not in get_args(Scaling):
            found.append(Problem("scaling", repr(self.scaling), "global, local or delayed"))
        if self.scaling == "delayed":
            for name, part in self.products():
                if part.hadamard or {part.left.blocks, part.right.blocks} != {"tensor"}:
                    fix = "write e4m3@tensor or e5m2@tensor, or scaling=global"
                    wanted = "formats by tensors, whose magnitudes are remembered"
                    found.append(Problem(name, str(part), wanted, fix))
        raise_problems("a recipe", found)

    def products(self) -> Iterator[tuple[str, Contraction]]:
        """The names and contractions of those that are quantised."""
        for name in ("fprop", "dgrad", "wgrad"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers, and so a key."""
        return any(part.draws for _, part in self.products())

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={HIGH if value is None else value}" for name, value in values)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe of its text, or of a name of `RECIPES`.

        Raises:
            ValueError: it is none; all that is wrong with its fields is listed.
        """
        if text in RECIPES:
            return RECIPES[text]
        if "=" not in text:
            refuse("a recipe", "name", repr(text), "a known one", nearest(text, RECIPES))
        given: dict[str, str] = {}
        found = []
        for word in text.split():
            name, _, value = word.partition("=")
            if name not in ("fprop", "dgrad", "wgrad", "scaling") or name in given:
                wanted = "fprop, dgrad, wgrad and scaling, once each"
                found.append(Problem(name, word, wanted))
            given[name] = value
        for name in ("fprop", "dgrad", "wgrad"):
            if name not in given:
                fix = f"write {name}={HIGH} where it is not quantised"
                found.append(Problem(name, "nothing", "a contraction", fix))
        raise_problems("a recipe", found)
        scaling = cast(Scaling, given.pop("scaling", "global"))
        return cls(
            **{name: Contraction.parse(value) for name, value in given.items()}, scaling=scaling
        )

    def grouped(self) -> Recipe:
        """The recipe for the experts of a layer, whose rows are sorted by expert.

        How many rows an expert has is data, and which ranks they come from depends on the mesh. So
        no block of wgrad may lie along rows: there its operands have one scale for each expert and
        feature, in the e4m3 (or e5m2) of theirs, instead of "1x128", "1x32" and "1x16"; rows are
        padded nowhere. What goes by the global positions of tokens is left out, as rows do not
        know theirs: Hadamard matrices along rows, and stochastic rounding, which is to nearest.
        """

        def along_rows(f: Format) -> Format:
            if f.block == (1, 1):
                return replace(f, stochastic=False)
            return Format("e4m3" if f.element == "e2m1" else f.element, "row")

        def nearest_only(part: Contraction | None) -> Contraction | None:
            if part is None:
                return None
            left, right = (replace(f, stochastic=False) for f in (part.left, part.right))
            return replace(part, left=left, right=right)

        wgrad = self.wgrad
        if wgrad is not None:
            wgrad = Contraction(along_rows(wgrad.left), along_rows(wgrad.right))
        return replace(
            self, fprop=nearest_only(self.fprop), dgrad=nearest_only(self.dgrad), wgrad=wgrad
        )


def problems_on(
    recipe: Recipe, dtype: torch.dtype, capability: tuple[int, int], *, grouped: bool = False
) -> list[Problem]:
    """The products of a recipe that a GPU of this compute capability cannot compute.

    Args:
        recipe: which.
        dtype: of activations.
        capability: of the GPU.
        grouped: of experts.
    """
    found = []
    for name, part in recipe.products():
        reason = why_not(part.left, part.right, dtype, capability, grouped=grouped)
        fix = "choose another recipe, or a GPU that has it"
        if grouped and name == "wgrad":
            reason = "no GPU has such a product for gradients of experts' weights"
            fix = f"write wgrad={HIGH} in a recipe of your own"
        if reason is not None:
            found.append(Problem(name, f"{part}: {reason}", "products that this GPU has", fix))
    return found


def check_gpu(
    recipe: Recipe, dtype: torch.dtype, capability: tuple[int, int], *, experts: bool = False
) -> None:
    """Refuse a recipe that a GPU of this compute capability cannot compute, before anything starts.

    Args:
        recipe: of the model's layers.
        dtype: of activations.
        capability: of the GPU.
        experts: whether the model has layers of experts.

    Raises:
        ValueError: with every product that is missing, and which GPUs have it.
    """
    found = problems_on(recipe, dtype, capability)
    if experts:
        own = problems_on(recipe.grouped(), dtype, capability, grouped=True)
        found += [replace(problem, path=f"experts, {problem.path}") for problem in own]
    raise_problems("this GPU cannot compute with these products", found)


def check_sizes(
    recipe: Recipe,
    x: tuple[int, ...],
    w: tuple[int, int],
    *,
    path: str,
    backward: bool = True,
    runs: int = 1,
) -> None:
    """Refuse sizes of a linear layer on one rank that a recipe's blocks do not divide.

    Args:
        recipe: which.
        x: the shape of this rank's activations, [..., tokens, inputs].
        w: the shape of this rank's weight, [inputs, outputs].
        path: of the layer, for the message.
        backward: whether gradients are taken.
        runs: of consecutive tokens, of one length, that x's are.

    Raises:
        ValueError: with every dim, the nearest sizes that fit, and for which product.
    """
    sizes = {"fprop": ("inputs", w[0]), "dgrad": ("outputs", w[1]), "wgrad": ("tokens", x[-2])}
    across = {"fprop": ("outputs", w[1]), "dgrad": ("inputs", w[0])}
    found: dict[tuple, Problem] = {}
    for name, part in recipe.products():
        if name != "fprop" and not backward:
            continue
        rows = [(*sizes[name], part.depth * (runs if name == "wgrad" and part.depth > 1 else 1))]
        if name in across:
            rows.append((*across[name], part.right.block[0]))
        for dim, size, block in rows:
            if size % block:
                got, wanted, fix = undivided(
                    size, block, f"{part.left.blocks} and {part.right.blocks}"
                )
                fix += " on every rank: split it over fewer ranks, or change the model's or batch's"
                fix += ", or leave out the zigzag order" if name == "wgrad" and runs > 1 else ""
                found[dim, block] = Problem(f"{path}, {dim} ({name})", got, wanted, fix)
    raise_problems("blocks of a quantised product do not divide its dims", found.values())


def _same(fprop: str, dgrad: str, wgrad: str) -> Recipe:
    return Recipe.parse(f"fprop={fprop} dgrad={dgrad} wgrad={wgrad}")


_T4, _T5, _R, _A, _W, _M = (
    "e4m3@tensor", "e5m2@tensor", "e4m3@row", "e4m3@1x128", "e4m3@128x128", "e4m3@1x32",
)  # fmt: skip
_F, _S, _D = "e2m1@1x16", "e2m1@16x16", "e2m1@1x16+stochastic"

RECIPES: Mapping[str, Recipe] = MappingProxyType({})
RECIPES = MappingProxyType(
    {
        "fp8-tensor": _same(f"{_T4}*{_T4}", f"{_T5}*{_T4}", f"{_T4}*{_T5}"),
        "fp8-delayed": replace(
            _same(f"{_T4}*{_T4}", f"{_T5}*{_T4}", f"{_T4}*{_T5}"), scaling="delayed"
        ),
        "fp8-row": _same(f"{_R}*{_R}", f"{_R}*{_R}", f"{_R}*{_R}"),
        "fp8-block": _same(f"{_A}*{_W}", f"{_A}*{_W}", f"{_A}*{_A}"),
        "mxfp8": _same(f"{_M}*{_M}", f"{_M}*{_M}", f"{_M}*{_M}"),
        "nvfp4": _same(f"{_F}*{_S}", f"{_D}*{_S}", f"{_MIXED}({_F}*{_D})"),
    }
)
"""By name: current scaling per tensor, with e5m2 for gradients (Transformer Engine's HYBRID); the
same with scales of the steps before; one scale per row (torchao); DeepSeek-V3's blocks; MXFP8; and
NVFP4 with squares of weights, stochastic rounding of gradients and a random Hadamard transform
before wgrad."""
