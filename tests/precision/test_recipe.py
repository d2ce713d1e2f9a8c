"""Recipes as values: their text, what is wrong with one, and which GPU has it."""

from __future__ import annotations

import pytest
import torch

from functron.ops.quantise import QuantisedFormat
from functron.precision import RECIPES, Contraction, Recipe
from functron.precision.recipe import check_gpu, problems_on

PLAIN = "e4m3@row*e4m3@row"


def test_text():
    """One line that reads back; names are texts as well."""
    for name, recipe in RECIPES.items():
        assert Recipe.parse(str(recipe)) == Recipe.parse(name) == recipe
        assert hash(Recipe.parse(str(recipe))) == hash(recipe)
    assert str(RECIPES["fp8-block"]) == (
        "fprop=e4m3@1x128*e4m3@128x128 dgrad=e4m3@1x128*e4m3@128x128 "
        "wgrad=e4m3@1x128*e4m3@1x128 scaling=global"
    )
    ends = Recipe.parse("fp8-block first=1 last=0.15 logits=low")
    assert str(ends) == f"{RECIPES['fp8-block']} first=1 last=0.15 logits=low"
    assert Recipe.parse(str(ends)) == ends
    assert [ends.high(n) for n in (2, 4, 62)] == [(1, 0), (1, 1), (1, 9)]
    some = Recipe.parse(f"wgrad=high scaling=local fprop={PLAIN} dgrad=high")
    row = QuantisedFormat("e4m3", "row")
    assert some == Recipe(Contraction(row, row), None, None, "local")
    assert [name for name, _ in some.products()] == ["fprop"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("fp8-tensors", "did you mean 'fp8-tensor'"),
        (f"fprop={PLAIN}", r"(?s)dgrad: got nothing.*dgrad=high.*wgrad: got nothing"),
        (f"fprop={PLAIN} dgrad=high wgrad=high fprop=high", "fprop: got fprop=high; wanted .*once each"),
        (f"fprop={PLAIN} dgrad=high wgrad=high scaling=here", "scaling: got 'here'; wanted a known name; fix: .*global"),
        ("nvfp4 last=1.5 logits=off", r"(?s)logits: got 'off'; wanted a known name.*last: got 1\.5; wanted a number"),
        ("nvfp4 first=one", "first: got one; wanted a number of layers"),
        ("fprop=e4m3@row dgrad=high wgrad=high", r"product: got 'e4m3@row'; wanted FORMAT\*FORMAT"),
        ("fprop=e4m3@1x128*e4m3@1x32 dgrad=high wgrad=high", "fprop: got .*wanted blocks of one length"),
    ],
)  # fmt: skip
def test_what_is_no_recipe(text, match):
    with pytest.raises(ValueError, match=match):
        Recipe.parse(text)


HAS = {
    (8, 0): set(),
    (8, 9): {"fp8-tensor", "fp8-delayed", "fp8-row"},
    (9, 0): {"fp8-tensor", "fp8-delayed", "fp8-row", "fp8-block"},
    (10, 0): {"fp8-tensor", "fp8-delayed", "fp8-row", "mxfp8", "nvfp4"},
}


@pytest.mark.parametrize("capability", HAS)
def test_which_gpu_has_which(capability):
    for name, recipe in RECIPES.items():
        found = problems_on(recipe, torch.bfloat16, capability)
        assert (not found) == (name in HAS[capability]), name
        assert len(found) in (0, 3)  # one for each product
        assert all("compute capability" in str(problem) for problem in found)


def test_a_gpu_without_the_products_is_refused():
    """With all of them, and those of experts."""
    check_gpu(RECIPES["fp8-row"], torch.bfloat16, (9, 0))
    with pytest.raises(
        ValueError, match=r"(?s)fprop: got .*10\.0 \(NVIDIA B200.*this GPU has 9\.0.*wgrad: got"
    ):
        check_gpu(RECIPES["mxfp8"], torch.bfloat16, (9, 0))
    with pytest.raises(
        ValueError, match=r"experts, wgrad: got e4m3@row\*e4m3@row: no GPU.*fix: write wgrad=high"
    ):
        check_gpu(RECIPES["fp8-row"], torch.bfloat16, (9, 0), experts=True)


def test_of_experts():
    """No block lies along rows that are sorted by expert; nothing is drawn by their positions."""
    for recipe in RECIPES.values():
        grouped = recipe.grouped()
        assert not grouped.draws
        assert grouped.wgrad.left.block[1] == grouped.wgrad.right.block[1] == 1
        assert grouped.grouped() == grouped
        assert grouped.fprop == recipe.fprop
    assert str(RECIPES["nvfp4"].grouped().wgrad) == PLAIN
    assert RECIPES["fp8-tensor"].grouped() == RECIPES["fp8-tensor"]
    assert str(RECIPES["fp8-block"].grouped().wgrad) == PLAIN
