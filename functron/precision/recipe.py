"""Recipes (which matrix products are quantised) and policies (the dtypes of a step), as values.

A linear layer y = x w has three products, and each sums over another dim:

| product | is         | sums over     | operands |
|---------|------------|---------------|----------|
| fprop   | y = x w    | the inputs    | x, w     |
| dgrad   | dx = dy w' | the outputs   | dy, w    |
| wgrad   | dw = x' dy | tokens        | x, dy    |

A `Recipe` names the formats of all six, and is one line of text:

    fprop=e4m3@tensor*e4m3@tensor dgrad=e5m2@tensor*e4m3@tensor wgrad=... scaling=global

`RECIPES` has the published ones by name. A recipe also says which layers stay in high precision,
and whether logits are quantised: ``nvfp4 first=1 last=4`` is the recipe of that name with these
changes.

A `PrecisionPolicy` has the dtypes of parameters, sums, masters and moments; `POLICIES` by name:

| name      | parameters, activations | masters             | gradients' sum | moments  | products |
|-----------|-------------------------|---------------------|----------------|----------|----------|
| float32   | float32                 | themselves          | float32        | float32  | float32  |
| bf16      | bfloat16                | float32             | float32        | float32  | bfloat16 |
| bf16-pure | bfloat16                | stochastic rounding | bfloat16       | bfloat16 | bfloat16 |
| fp16      | float16                 | float32             | float32        | float32  | float16  |
| fp8-tensor, ... | bfloat16          | float32             | float32        | float32  | a recipe |

The last are those of `RECIPES`, for the projections of attention, feed-forward layers and experts;
nvfp4 keeps the last 15% of layers in high precision. Embedding, unembedding, norms, softmax, losses
and routers are never quantised: they compute in float32, or in the parameters' dtype. fp16 scales
the loss by a factor that follows overflows (Micikevicius et al. 2018, "Mixed Precision Training",
https://arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.settings import choice_problems, setting
from functron.core.tables import shows_differences
from functron.ops.quantise import WIDTH, QuantisedFormat, undivided
from functron.ops.scaled_matmul import why_not

Scaling = Literal["global", "local", "delayed"]
"""The magnitude that scales are made of: that of the whole tensor over all its shards; that of this
rank's shard; or that of the whole tensor in earlier steps. "global" and "delayed" give the numbers
of one device, "local" depends on the mesh. "local" and "delayed" need no communication."""

HIGH = "high"
_PRODUCTS = ("fprop", "dgrad", "wgrad")
_ENDS = ("first", "last")
_MIXED = "hadamard"


@dataclass(frozen=True)
class Contraction:
    """How one of the three products is computed: ``e4m3@1x128*e4m3@128x128``.

    Attributes:
        left, right: the formats of the first and second operand in the module's table.
        hadamard: whether both are first multiplied by a random Hadamard matrix along the summed
            dim, which keeps the product and spreads outliers (`functron.ops.quantise`); as text
            ``hadamard(...)``.
    """

    left: QuantisedFormat
    right: QuantisedFormat
    hadamard: bool = False

    def __str__(self) -> str:
        text = f"{self.left}*{self.right}"
        return f"{_MIXED}({text})" if self.hadamard else text

    @property
    def draws(self) -> bool:
        """Whether it needs random numbers."""
        return self.hadamard or self.left.stochastic or self.right.stochastic

    @property
    def depth(self) -> int:
        """The number that the size of the summed dim must be a multiple of, if it is split."""
        return max(self.left.block[1], self.least_depth)

    @property
    def least_depth(self) -> int:
        """The same where it is whole, and blocks may be incomplete."""
        block = self.left.block[1] if self.left.complete else 1  # both operands' have one length
        return max(block, WIDTH if self.hadamard else 1)

    @classmethod
    def parse(cls, text: str) -> Contraction | None:
        """The contraction that the text describes; None of "high".

        Raises:
            ValueError: it describes none.
        """
        if text == HIGH:
            return None
        mixed = text.startswith(f"{_MIXED}(") and text.endswith(")")
        inner = text[len(_MIXED) + 1 : -1] if mixed else text
        left, times, right = inner.partition("*")
        if not times:
            refuse("a recipe", "product", repr(text), "FORMAT*FORMAT, hadamard(...) or high")
        return cls(QuantisedFormat.parse(left), QuantisedFormat.parse(right), mixed)


@dataclass(frozen=True)
class Recipe:
    """The formats of a linear layer's three products; None where one is not quantised.

    ``str(recipe)`` is one line, which `Recipe.parse` reads back.

    Attributes:
        fprop, dgrad, wgrad: the product of x and w, of dy and w, and of x and dy.
        scaling: see `Scaling`.
        first: number of leading layers kept in high precision, the parameters' dtype; below 1 a
            share of all layers, rounded to the nearest number.
        last: number of trailing layers kept in high precision likewise; with any, also the modules
            of multi-token prediction after them.
        logits: "low": the product that makes logits is quantised as layers' are; else "high".

    Raises:
        ValueError: the two operands of a product have blocks of different length along the summed
            dim; delayed scaling of formats other than "tensor"; or numbers of layers that are
            negative or not whole.
    """

    fprop: Contraction | None
    dgrad: Contraction | None
    wgrad: Contraction | None
    scaling: Scaling = "global"
    first: float = 0
    last: float = 0
    logits: Literal["high", "low"] = HIGH

    def __post_init__(self) -> None:
        found = []
        for name, part in self.products():
            depths = (part.left.block[1], part.right.block[1])
            if depths[0] != depths[1]:
                wanted = "blocks of one length along what is summed"
                found.append(Problem(name, str(part), wanted, "take the same blocks for both"))
        found += choice_problems(self)
        for name in ("first", "last"):
            value = getattr(self, name)
            if not (0 <= value < 1 or value % 1 == 0 <= value):
                wanted = "a number of layers, or a share of them below 1"
                found.append(Problem(name, f"{value:g}", wanted))
        if self.scaling == "delayed":
            for name, part in self.products():
                if part.hadamard or {part.left.blocks, part.right.blocks} != {"tensor"}:
                    fix = "write e4m3@tensor or e5m2@tensor, or scaling=global"
                    wanted = "formats by tensors, whose magnitudes are remembered"
                    found.append(Problem(name, str(part), wanted, fix))
        raise_problems("a recipe", found)

    def products(self) -> Iterator[tuple[str, Contraction]]:
        """The products that are quantised, with their names."""
        for name in _PRODUCTS:
            part = getattr(self, name)
            if part is not None:
                yield name, part

    @property
    def draws(self) -> bool:
        """Whether it needs random numbers, and so a key."""
        return any(part.draws for _, part in self.products())

    def high(self, num_layers: int) -> tuple[int, int]:
        """How many of a model's first and of its last layers stay in high precision."""

        def count(share: float) -> int:
            return int(share * num_layers + 0.5) if share < 1 else int(share)

        return count(self.first), count(self.last)

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {"first": 0, "last": 0, "logits": HIGH}  # nothing of a linear layer
        return " ".join(
            f"{name}={HIGH if value is None else f'{value:g}' if name in _ENDS else value}"
            for name, value in values.items()
            if name not in plain or value != plain[name]
        )

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe that the text describes: fields, or a name of `RECIPES` and changed fields.

        Raises:
            ValueError: it describes none; all problems of its fields are listed.
        """
        name, *words = text.split() or [text]
        base = None if "=" in name else RECIPES.get(name)
        if base is None and "=" not in name:
            refuse("a recipe", "name", repr(name), "a known one", nearest(name, RECIPES))
        known = [f.name for f in fields(cls)]
        given: dict[str, Any] = {}
        found = []
        for word in words if base is not None else (name, *words):
            name, _, value = word.partition("=")
            if name not in known or name in given:
                wanted = f"{', '.join(known[:-1])} and {known[-1]}, once each"
                found.append(Problem(name, word, wanted))
            given[name] = value
        for name in given.keys() & {*_ENDS}:
            try:
                given[name] = float(given[name])
            except ValueError:
                found.append(Problem(name, given[name], "a number of layers"))
        for name in _PRODUCTS if base is None else ():
            if name not in given:
                fix = f"write {name}={HIGH} where it is not quantised"
                found.append(Problem(name, "nothing", "a contraction", fix))
        raise_problems("a recipe", found)
        given |= {n: Contraction.parse(given[n]) for n in _PRODUCTS if n in given}
        return cls(**given) if base is None else replace(base, **given)

    def grouped(self) -> Recipe:
        """The recipe for the experts of a layer, whose rows are sorted by expert.

        The number of rows of an expert is data, and depends on the mesh. So blocks of wgrad cannot
        lie along rows: instead of "1x128", "1x32" and "1x16" its operands have one scale for each
        expert and feature, in e4m3 (or e5m2). Rows do not know their tokens' global positions, so
        there are no Hadamard matrices along rows, and no stochastic rounding (but to nearest).
        """

        def along_rows(f: QuantisedFormat) -> QuantisedFormat:
            if f.block == (1, 1):
                return replace(f, stochastic=False)
            return QuantisedFormat("e4m3" if f.element == "e2m1" else f.element, "row")

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
        recipe: of a model's layers.
        dtype: of activations.
        capability: the compute capability of the GPU.
        grouped: whether the products are those of experts.
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
        recipe, dtype, capability: as in `problems_on`.
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
    split: tuple[bool, bool] = (True, True),
    backward: bool = True,
    runs: int = 1,
) -> None:
    """Refuse sizes of a linear layer on one rank that a recipe's blocks do not divide.

    Blocks of 128 may be incomplete at the ends of a weight, but not at those of a shard: the next
    shard would begin within a block, and have other scales than the weight has. Nor along tokens,
    where blocks would have tokens of several sequences.

    Args:
        recipe: of the layer.
        x: the shape of this rank's activations, [..., tokens, inputs].
        w: the shape of this rank's weight, [inputs, outputs].
        path: the layer's name in messages.
        split: whether ranks have parts of the inputs, and of the outputs.
        backward: whether gradients are taken.
        runs: number of runs of consecutive tokens, all of one length, in x.

    Raises:
        ValueError: with every dim, the nearest sizes that fit, and for which product.
    """
    inputs, outputs = ("inputs", w[0], split[0]), ("outputs", w[1], split[1])
    tokens = ("tokens", math.prod(x[:-1]), True)
    summed = {"fprop": inputs, "dgrad": outputs, "wgrad": ("tokens", x[-2], True)}
    across = {"fprop": (tokens, outputs), "dgrad": (tokens, inputs), "wgrad": (inputs, outputs)}
    found: dict[tuple, Problem] = {}
    for name, part in recipe.products():
        if name != "fprop" and not backward:
            continue
        dim, size, cut = summed[name]
        depth = part.depth if cut else part.least_depth
        rows = [(dim, size, depth * (runs if name == "wgrad" and depth > 1 else 1))]
        for (dim, size, cut), form in zip(across[name], (part.left, part.right), strict=True):
            rows.append((dim, size, form.block[0] if cut or form.complete else 1))
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

_TENSOR = _same(f"{_T4}*{_T4}", f"{_T5}*{_T4}", f"{_T4}*{_T5}")

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "fp8-tensor": _TENSOR,
        "fp8-delayed": replace(_TENSOR, scaling="delayed"),
        "fp8-row": _same(f"{_R}*{_R}", f"{_R}*{_R}", f"{_R}*{_R}"),
        "fp8-block": _same(f"{_A}*{_W}", f"{_A}*{_W}", f"{_A}*{_A}"),
        "mxfp8": _same(f"{_M}*{_M}", f"{_M}*{_M}", f"{_M}*{_M}"),
        "nvfp4": replace(_same(f"{_F}*{_S}", f"{_D}*{_S}", f"{_MIXED}({_F}*{_D})"), last=0.15),
    }
)
"""By name: current scaling per tensor, with e5m2 for gradients (Transformer Engine's HYBRID); the
same with scales of the steps before; one scale per row (torchao); DeepSeek-V3's blocks; MXFP8; and
NVFP4 with squares of weights, stochastic rounding of gradients, a random Hadamard transform before
wgrad, and about 15% of a model's layers, the last ones, high (NVIDIA 2025, "Pretraining Large
Language Models with NVFP4", https://arxiv.org/abs/2509.25149)."""


Low = Literal["", "float32", "bfloat16"]
Masters = Literal["", "float32", "remainder", "stochastic"]


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of a training step; prints as a line.

    Attributes:
        params: of parameters and activations.
        masters: "float32": the optimizer updates float32 copies of parameters in low precision;
            "remainder": only the 16 bits of these that bfloat16 parameters lack are kept;
            "stochastic": none, parameters are rounded stochastically; empty: none, and updates
            below a parameter's last bit are lost.
        grads: in which gradients of microbatches are accumulated; empty: the parameters'.
        reduce: in which they are summed over ranks; empty: as they were accumulated.
        mu: of Adam's first moment; empty: that of the masters, or of parameters.
        nu: of Adam's second moment, likewise.
        loss_scale: the initial loss scale, which then follows overflows; 0: none.
        products: the `Recipe` of quantised products, as text; empty: none are quantised.
        gather_as: how fully sharded parameters are gathered: empty: in their dtype; "bfloat16":
            float32 parameters rounded to it, and computed with in it; "quantised": the weights of
            quantised products as codes, made once per step (`functron.precision.encoder`).
    """

    params: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    masters: Masters = ""
    grads: Low = ""
    reduce: Low = ""
    mu: Literal["", "float32", "bfloat16", "int8", "fp8"] = ""
    nu: Literal["", "float32", "bfloat16", "int8", "fp8"] = ""
    loss_scale: float = 0.0
    products: str = ""
    gather_as: Literal["", "bfloat16", "quantised"] = ""

    def __str__(self) -> str:
        low = self.params in ("bfloat16", "float16")
        own = "float32" if low and self.masters else self.params
        kept = {
            "float32": ", masters float32",
            "remainder": ", masters float32 of 16 bits more",
            "stochastic": ", updates rounded stochastically",
            "": ", no masters",
        }
        summed = self.grads or self.params
        moments = tuple(dict.fromkeys((self.mu or own, self.nu or own)))
        parts = [
            f"parameters and activations {self.params}{kept[self.masters] if low else ''}",
            f"gradients summed in {summed}, over ranks in {self.reduce or summed}",
            f"moments {' and '.join(moments)}",
        ]
        if self.loss_scale:
            parts.append(f"loss times {self.loss_scale:g} at first")
        if self.products:
            parts.append(f"products {Recipe.parse(self.products)}")
        if self.gather_as == "bfloat16":
            parts.append("parameters gathered, and computed with, as bfloat16")
        if self.gather_as == "quantised":
            parts.append("weights quantised once per step, and gathered so")
        return "; ".join(parts)


POLICIES: Mapping[str, PrecisionPolicy] = MappingProxyType({
    "float32": PrecisionPolicy(),
    "bf16": PrecisionPolicy("bfloat16", "float32", grads="float32", reduce="float32"),
    "bf16-pure": PrecisionPolicy("bfloat16", "stochastic", mu="bfloat16", nu="bfloat16"),
    "fp16": PrecisionPolicy("float16", "float32", "float32", "float32", loss_scale=2.0**16),
    **{
        name: PrecisionPolicy("bfloat16", "float32", "float32", "float32", products=name)
        for name in RECIPES
    },
})  # fmt: skip
"""By name."""


Precision = Literal[
    "auto", "float32", "bf16", "bf16-pure", "fp16",
    "fp8-tensor", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4",
]  # fmt: skip


@shows_differences
@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of computation, sums and storage.

    Attributes:
        name: the precision policy: float32, bf16 (float32 masters and sums), bf16-pure (neither;
            parameters are rounded stochastically), fp16 (float32 masters and sums, and a loss scale
            that follows overflows), or bf16 with quantised matrix products: fp8-tensor,
            fp8-delayed, fp8-row, fp8-block, mxfp8, nvfp4. It sets the other dtype options, which
            override it where they are given. auto: bf16 on a GPU if no option names a dtype;
            otherwise the other options as they are.
        products: how the matrix products of attention's projections, feed-forward layers and
            experts are quantised (functron.precision.Recipe): a name such as fp8-block, or a line
            such as "fprop=e4m3@row*e4m3@row dgrad=high wgrad=high"; and which layers of a GPT stay
            in high precision, such as "nvfp4 first=1 last=4" (nvfp4 alone: last=0.15 of them), or
            logits=low; empty: not quantised.
        gather_as: how fully sharded parameters are gathered: empty: in their own dtype; bfloat16:
            float32 shards are rounded to it, and computed with in it; quantised: as codes of
            quantised products, made once per step and read by all microbatches: in 8 bits half of
            bfloat16's bytes, and the same numbers. Weights of fp8-row and mxfp8 have two codes, so
            that gather=keep and step, which send both, save nothing.
        float32_matmul: how products of float32 are computed, as torch names it: highest: in
            float32; high: as TF32 on GPUs that have it (A100 and later), whose factors have 10
            bits of mantissa: 7 times as fast on an H100. It changes results, also of routers and
            optimizers in float32 beside a model in bfloat16.
    """

    name: Precision = setting("auto", "common shapes step", short="precision")
    products: str = setting("", "shapes step")
    gather_as: Literal["", "bfloat16", "quantised"] = setting("", "step")
    float32_matmul: Literal["highest", "high"] = setting("highest")

    def introduce(self, run: Any) -> list[str]:
        """How a GPU computes products of float32, where a run has them or asks for another way."""
        fast = self.float32_matmul == "high"
        if run.device.type != "cuda" or not (fast or run.config.policy.params == "float32"):
            return []
        how = "as TF32" if fast else "in float32, not as TF32 (--float32-matmul high: faster)"
        return [f"matmul products of float32 are computed {how}"]

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of `products`; None where none are quantised.

        Raises:
            ValueError: `products` is neither a name nor a recipe as text.
        """
        return Recipe.parse(self.products) if self.products else None
