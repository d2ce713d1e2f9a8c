"""Policies of mixed precision: which dtypes parameters, sums, masters and moments have, by name.

| name      | parameters, activations | masters             | gradients' sum | moments  | products |
|-----------|-------------------------|---------------------|----------------|----------|----------|
| float32   | float32                 | themselves          | float32        | float32  | float32  |
| bf16      | bfloat16                | float32             | float32        | float32  | bfloat16 |
| bf16-pure | bfloat16                | stochastic rounding | bfloat16       | bfloat16 | bfloat16 |
| fp16      | float16                 | float32             | float32        | float32  | float16  |
| fp8-tensor, ... | bfloat16          | float32             | float32        | float32  | a recipe |

The last are those of `functron.precision.RECIPES`, of the projections of attention, feed-forward
layers and experts; nvfp4 leaves the last 15% of layers high. Embedding, unembedding, norms,
softmax, losses and routers are not quantised, and compute in float32 inside in all of them, or as
parameters are stored. Under fp16 the loss is scaled, by a number that follows overflows
(Micikevicius et al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from functron.precision.recipe import RECIPES, Recipe

Low = Literal["", "float32", "bfloat16"]
Masters = Literal["", "float32", "remainder", "stochastic"]


@dataclass(frozen=True)
class Policy:
    """The dtypes of a training step; prints as a line.

    Attributes:
        params: of parameters and activations.
        masters: "float32": copies in float32 that the optimizer updates, of parameters in low
            precision; "remainder": of these the 16 bits that bfloat16 parameters lack;
            "stochastic": none, updates are rounded stochastically; empty: none, and what
            is smaller than a parameter's last bit is lost.
        grads: in which gradients of microbatches are added up; empty: the parameters'.
        reduce: in which they are summed over ranks; empty: that in which they were added up.
        mu: of the optimizer's mean of gradients; empty: that of the masters, or of parameters.
        nu: of the mean of their squares, likewise.
        loss_scale: the first factor of the loss, which then follows overflows; 0: none.
        products: the `Recipe` of quantised products, as text; empty: none are quantised.
        gather_as: as what fully sharded parameters are sent: empty: as they are; "bfloat16": in
            that dtype, in which is computed, of those in float32; "quantised": the weights of
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


POLICIES: Mapping[str, Policy] = MappingProxyType({
    "float32": Policy(),
    "bf16": Policy("bfloat16", "float32", grads="float32", reduce="float32"),
    "bf16-pure": Policy("bfloat16", "stochastic", mu="bfloat16", nu="bfloat16"),
    "fp16": Policy("float16", "float32", "float32", "float32", loss_scale=2.0**16),
    **{
        name: Policy("bfloat16", "float32", "float32", "float32", products=name)
        for name in RECIPES
    },
})  # fmt: skip
"""By name."""
