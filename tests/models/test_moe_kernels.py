"""Models with experts by registered operations: loss and gradients are those of torch's."""

from __future__ import annotations

import functools

import pytest
import torch

import functron as ft
from functron import Mesh, P
from functron.models import gpt
from functron.ops import use
from tests.models.test_moe_composition import MODELS, assert_equal, dense


@pytest.mark.parametrize("mesh", [None, Mesh(ep=2, tp=2)], ids=str)
@pytest.mark.parametrize("model", ["mixtral", "deepseek", "capacity", "gpt-oss"])
def test_loss_and_gradients(model, mesh):
    config = MODELS[model]
    weights, data, key, (want, details), want_grads = dense(config)
    total_loss = functools.partial(
        gpt.loss, config, options=ft.ModelOptions(kernels=use("kernel")), key=key
    )
    if mesh is None:
        total = (data["targets"] != ft.nn.IGNORE_INDEX).sum()
        grads, value = torch.func.grad_and_value(lambda w: total_loss(w, data) / total)(weights)
    else:
        specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

        def program(weights, data):
            total = gpt.num_targets(data)
            value, grads = ft.value_and_grad(lambda w: total_loss(w, data) / total)(weights)
            return value, ft.sync_gradients(grads, specs)

        mapped = ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES)), (P(), specs))
        value, grads = mapped(weights, data)
    assert_equal((value, details), grads, (want, details), want_grads)
