"""Samples in Megatron-LM's order, token for token what Megatron-Core 0.16.1 draws.

Expected values are those of its own code, by tests/data/make_megatron.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from functron.data import Blend, megatron
from functron.data.indexed import IndexedFile
from functron.data.megatron import MegatronMixture, MegatronWindows, megatron_samples, sequence_parts

MADE = Path(__file__).parent / "megatron"
SETTINGS = json.loads((MADE / "cases.json").read_text())
CASES = {case["name"]: case for case in SETTINGS["cases"]}


@pytest.fixture(scope="module")
def arrays():
    with np.load(MADE / "samples.npz") as found:
        return {name: found[name] for name in found.files}


@pytest.fixture(scope="module")
def files():
    return {name: IndexedFile(MADE / name) for name in "abc"}


def opened(case: dict, part: str, files: dict, **options):
    count = case["sizes"][megatron.PARTS.index(part)]
    return megatron_samples(
        [files[name] for name in case["data"]],
        case["seq"],
        count,
        weights=case.get("weights"),
        names=case["data"],
        split=case.get("split") or "",
        part=part,
        surplus=case.get("surplus", 0.005),
        seed=case["seed"],
        extra_token=case.get("extra_token", True),
        drop_last=part != "validation" or case.get("drop_last", True),
        mask_documents=case.get("reset", False),
        **options,
    )


def count_of(samples) -> int:
    return samples.mixture.size if isinstance(samples, Blend) else samples.num_ordered


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_its_datasets(name, files, arrays):
    case = CASES[name]
    for part in set(case["arrays"]) & set(megatron.PARTS):
        tokens, targets = arrays[f"{name}/{part}"]
        samples = opened(case, part, files)
        assert count_of(samples) == len(tokens)
        drawn = samples.draw(np.arange(len(tokens)))
        np.testing.assert_array_equal(drawn["tokens"], tokens)
        np.testing.assert_array_equal(drawn["targets"], targets)


