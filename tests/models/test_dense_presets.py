"""Presets against what is published of them: parameter counts, and the families that store them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import functron as ft
from functron import gpt, hub
from functron.hub.reader import differences, parse
from functron.models.config import DENSE_PRESETS

# of the published files (tied matrices once)
COUNTS = {
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "glm4-9b": 9_399_951_360,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "phi3-mini": 3_821_079_552,
}
# in billions, as the reports say: embedding + others (Nemotron-4; Gemma 3, table 1)
BILLIONS = {
    "gemma3-4b": 0.675 + 3.209,
    "gemma3-12b": 1.012 + 10.759,
    "gemma3-27b": 1.416 + 25.600,
    "nemotron-4-15b": 3.2 + 12.5,
    "nemotron-4-340b": 9.4 + 331.6,
}
KINDS = {
    "mistral": "mistral", "qwen2.5": "qwen2", "qwen3": "qwen3", "gemma-": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo-": "olmo", "olmo2": "olmo2", "phi3": "phi3", "glm": "glm",
    "nemotron": "nemotron",
}  # fmt: skip


def count(name: str) -> int:
    return ft.num_params(gpt.defs(replace(gpt.PRESETS[name], vocab_multiple=1)))


def test_parameters_are_those_of_the_files():
    assert {name: count(name) for name in COUNTS} == COUNTS


def test_parameters_are_about_those_of_the_reports():
    for name, billions in BILLIONS.items():
        assert count(name) / 1e9 == pytest.approx(billions, rel=5e-3), name


@pytest.mark.parametrize("name", list(DENSE_PRESETS))
def test_what_is_written_of_a_preset_is_read_as_it(name):
    config = gpt.PRESETS[name]
    kind = next(kind for start, kind in KINDS.items() if name.startswith(start))
    table = hub.write_config(config, hub.FORMATS[kind])
    assert table["model_type"] == kind
    assert differences(parse(table), config) == []
