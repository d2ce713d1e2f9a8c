"""Precision: the dtypes that a run computes, sums and keeps in, and the products it quantises.

A `PrecisionPolicy` has the dtypes of a training step, by name. A `Recipe` says which products of a
linear layer are quantised and how; `product` makes of it the function ``(x, w) -> y`` that a layer
takes in place of ``x @ w``, and `grouped_product` that of a layer's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.precision.matmul import grouped_product, history_def, product, quantised
    from functron.precision.recipe import POLICIES, RECIPES, Contraction, PrecisionPolicy, Recipe
    from functron.precision.weights import encoder

import_lazily(__name__)
