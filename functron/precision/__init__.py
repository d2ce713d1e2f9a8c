"""Precision: what products are computed in, as values that steps and layers are given.

`Recipe` says which products of a linear layer are quantised and how; `product` makes of it the
function ``(x, w) -> y`` that a layer takes in place of ``x @ w``, and `grouped_product` that of a
layer's experts.
"""

from functron.precision.product import grouped_product, history_def, product
from functron.precision.recipe import RECIPES, Contraction, Recipe

__all__ = ["RECIPES", "Contraction", "Recipe", "grouped_product", "history_def", "product"]
