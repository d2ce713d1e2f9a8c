"""Run by test_families_processes.py under torchrun with 4 processes: trainings, each one rank's."""

from __future__ import annotations

import sys

import test_configured as cases
import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, random
from functron.training.setup import make_setup
from tests.ranks import on_the_first

torch.set_num_threads(1)


def training(name, text, zero):
    """The training on a mesh of processes, its parameters and its state, against one rank's."""
    mesh = Mesh.parse(text).bind()
    made = make_setup(cases.config_of(name, text, zero), mesh)
    state = made.init(random.key(1))
    part, parts = mesh.coordinate.get("dp", 0), mesh["dp"]
    losses = []
    for step in range(cases.STEPS):
        data = {key: x.chunk(parts)[part] for key, x in cases.batch(step).items()}
        state, metrics = made.step(state, data)
        losses.append(metrics["loss"].item())
    want, found = on_the_first(lambda: cases.dense(name)[:2])
    assert all(abs(a - b) < 1e-8 for a, b in zip(losses, found, strict=True)), (losses, found)
    if mesh["pp"] == 1:
        specs = made.state_specs
        cases.compare(ft.gather(state, specs, mesh), want, specs, mesh.mesh)


CHECKS = {"adafactor": ("dp=2,tp=2", 2), "soap": ("dp=2,tp=2", 1), "groups": ("pp=2,dp=2", 1)}


def main():
    dist.init_process_group("gloo")
    for name, (text, zero) in CHECKS.items():
        training(name, text, zero)
        if dist.get_rank() == 0:
            print(f"{name}: ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
