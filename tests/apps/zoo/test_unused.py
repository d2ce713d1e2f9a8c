"""Options that have no effect: a BERT and a T5 have none, by what a change does to numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from functron import random, tree
from functron.apps.zoo.bert import BertConfig
from functron.apps.zoo.t5 import T5Config
from functron.models.family import family_of
from functron.spmd.params import init_params


def outcome(family, config):
    """The shapes and dtypes of a model's parameters, and its loss on tokens with dropout's key."""
    weights = init_params(random.key(0), family.defs(config))
    tokens = torch.arange(64, dtype=torch.int64).reshape(2, 32) % 7
    batch = {"tokens": tokens, "targets": tokens, "rows": torch.arange(2)}
    shapes = [(leaf.shape, leaf.dtype) for leaf in tree.leaves(weights)]
    return shapes, family.loss(config, weights, batch, key=random.key(1)).item()


OTHERS = {
    "dtype": "float64", "activation": "relu", "norm_eps": 0.5, "dropout": 0.5, "head_dim": 6,
    "decoder_layers": 2, "start_id": 1, "gated": False, "tied": True, "init_factor": 0.5,
    "init_stddev": 0.2,
}  # fmt: skip
"""Other values of fields that twice as much does not suit."""

SMALL_BERT = BertConfig(
    vocab_size=8, num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, max_seq=32, vocab_multiple=8,
    init_stddev=0.5,
)  # fmt: skip
SMALL_T5 = T5Config(
    vocab_size=8, num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_multiple=8,
    num_buckets=8, max_distance=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field"),
    [(c, f.name) for c in (SMALL_BERT, SMALL_T5) for f in dataclasses.fields(c)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_field_of_a_bert_and_a_t5_changes_parameters_or_the_loss(config, field):
    """So that none of them needs anything."""
    value, family = getattr(config, field), family_of(config)
    new = OTHERS.get(field, 2 * value if isinstance(value, int) else None)
    assert new != value
    assert outcome(family, replace(config, **{field: new})) != outcome(family, config)
