"""Mixtures of experts of transformers, through runs to Megatron's checkpoints, and back."""

from __future__ import annotations

import functools

import pytest
import torch

from functron.apps.megatron import make_format
from functron.apps.megatron.checkpoint_files import open_checkpoint
from functron.hub.reader import differences
from functron.training import config as run_config
from functron.training.convert import FORMATS
from functron.training.convert import convert as convert_files
from tests.hub import tiny
from tests.hub.test_mixtures import assert_same_weights

pytest.importorskip("transformers.modeling_layers")
convert = functools.partial(convert_files, formats={**FORMATS, "megatron": make_format()})


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-dense"])
def test_to_megatron_and_back(name, tmp_path):
    """Weights that are divided by their sum are Megatron's softmax after the choice: its default."""
    model = tiny.make(name)
    places = ("hf", "run", "megatron", "again", "out")
    hf, run, there, again, out = (tmp_path / place for place in places)
    tiny.store(model, hf)
    convert(f"hf:{hf}", f"run:{run}")
    convert(f"run:{run}", f"megatron:{there}")
    args = open_checkpoint(there).args
    assert args is not None
    assert args["moe_router_pre_softmax"] == (not getattr(model.config, "norm_topk_prob", True))
    convert(f"megatron:{there}", f"run:{again}")
    configs = [run_config.load(folder / "config.toml").gpt for folder in (run, again)]
    assert not differences(*configs)
    convert(f"run:{again}", f"hf:{out}")
    back = tiny.read_back(out)
    assert_same_weights(model, back)
    assert torch.equal(model(tiny.tokens()).logits, back(tiny.tokens()).logits)
