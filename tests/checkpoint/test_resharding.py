"""Training states saved on one mesh and restored on every other: equal to the last bit.

The ranks are threads; what each holds is cut out of the whole state by the parts of functron that
cut it in training: `shard`, `pad`, and the rows of a `Partition`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch

from functron import Mesh, P, checkpoint, gpt, optim, random, tree
from functron.models.config import GPTConfig
from functron.pipeline.partition import Partition, layout_of
from functron.spmd import BoundMesh, Rules
from functron.spmd.params import param_specs
from functron.spmd.spec import pad, shard
from functron.training.step import State, init_state, state_specs

MODEL = GPTConfig(
    vocab_size=40, num_layers=5, embed_dim=12, num_heads=2, mlp_dim=20, max_seq=8, dtype="bfloat16"
)
DEFS = gpt.defs(MODEL)
# 5 layers in 4 stages, two to a rank
PARTITION = Partition(layout_of([1, 2, 1, 1]), (((0, 0), (1, 0), (0, 1), (1, 1)),), gpt.uses(MODEL))
SPREAD = Partition(PARTITION.layout, PARTITION.pipes, PARTITION.uses, {"embed": 0, "unembed": 1})


def optimizer() -> optim.GradientTransformation:
    return optim.with_fp32_masters(optim.adamw(1e-3))


@dataclass(frozen=True)
class Layout:
    """A way to hold a state: mesh, rules beside the model's own, pipeline, ZeRO."""

    mesh: Mesh
    rules: Rules | None = None
    partition: Partition | None = None
    zero: bool = False
    simulated: bool = False
    uneven: tuple[str, ...] = ()

    @cached_property
    def specs(self) -> State:
        rules = self.rules or gpt.rules(MODEL, self.mesh, uneven=self.uneven)
        specs = param_specs(DEFS, rules)
        transformation = optimizer()
        if self.zero:
            shards = optim.shard_specs(DEFS, specs, self.mesh)
            transformation = optim.zero(transformation, specs, shards)
        if self.partition is not None:
            specs = self.partition.storage_specs(specs)
        return state_specs(specs, transformation)

    def ranks(self) -> list[BoundMesh | Mesh]:
        mesh = self.mesh
        if self.simulated:
            return [mesh]
        return [BoundMesh(mesh, r, mesh.coordinate(r), {}, "cpu") for r in range(mesh.size)]

    def placement(self, mesh: BoundMesh | Mesh) -> checkpoint.Placement:
        like = tree.map(lambda leaf: leaf.to("meta"), whole())
        return checkpoint.Placement.of(like, self.specs, mesh, self.partition)

    def held(self, mesh: BoundMesh | Mesh) -> State:
        """A rank's part of the whole state."""
        specs = self.specs
        flat = dict(
            zip(tree.paths(specs, lambda s: isinstance(s, P)), _spec_leaves(specs), strict=True)
        )

        def one(path: str, leaf: torch.Tensor) -> torch.Tensor:
            spec = flat[path]
            if not isinstance(mesh, BoundMesh):
                return pad(leaf, spec, mesh)
            if self.partition is not None and "blocks" in path.split("/"):
                leaf = leaf[self.partition.layers(mesh.coordinate["pp"])]
            return shard(pad(leaf, spec, mesh), spec, mesh, mesh.coordinate).clone()

        state = tree.map_with_path(one, whole())
        if self.partition is None or not isinstance(mesh, BoundMesh):
            return state
        return _pruned(state, set(self.partition.held(mesh.coordinate["pp"])))


def _spec_leaves(specs: State) -> list[P]:
    return tree.leaves(specs, lambda s: isinstance(s, P))


def _pruned(node: Any, held: set[str]) -> Any:
    """A tree without the top-level entries of the parameters that are not held."""
    if isinstance(node, dict):
        kept = {k: v for k, v in node.items() if k in held or k not in DEFS}
        return {k: v if k in DEFS else _pruned(v, held) for k, v in kept.items()}
    if isinstance(node, tuple):
        children = [_pruned(child, held) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return node


@cache
def whole() -> State:
    """The state, with numbers in all of its leaves that are its own."""
    state = init_state(random.key(0), DEFS, P(), optimizer(), Mesh())
    generator = torch.Generator().manual_seed(1)

    def fill(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        return torch.randint(0, 2**40, leaf.shape, generator=generator)

    return tree.map(fill, state)


LAYOUTS = {
    "single": Layout(Mesh(), simulated=True),
    "dp2tp2pp1": Layout(Mesh(pp=1, dp=2, tp=2)),
    "pp2tp2": Layout(Mesh(pp=2, tp=2), partition=PARTITION),
    "pp2 spread zero": Layout(Mesh(pp=2, dp=2), partition=SPREAD, zero=True),
    "fsdp4": Layout(Mesh(fsdp=4), rules=Rules({"embed": "fsdp"})),
    "fsdp2 ep2": Layout(Mesh(ep=2, fsdp=2), rules=Rules({"embed": ("ep", "fsdp")})),
    "zero padded": Layout(Mesh(dp=5), zero=True),
    "tp2 zero padded": Layout(Mesh(tp=2, dp=4), zero=True),
    "simulated zero": Layout(Mesh(dp=5, tp=2), zero=True, simulated=True),
    "uneven fsdp5": Layout(Mesh(fsdp=5), uneven=("embed",)),
    "uneven tp3 zero": Layout(Mesh(tp=3, dp=2), zero=True, uneven=("heads", "mlp", "vocab")),
    "simulated uneven": Layout(
        Mesh(tp=3, fsdp=5), simulated=True, uneven=("heads", "mlp", "embed")
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state saved by every layout, once each, by its name."""
    found: dict[str, Any] = {}

    def get(name: str, on_ranks) -> Any:
        if name not in found:
            found[name] = tmp_path_factory.mktemp("saved") / "1"
            layout = LAYOUTS[name]

            def save(mesh, store):
                placement = layout.placement(mesh)
                checkpoint.save(found[name], layout.held(mesh), placement=placement, store=store)

            if layout.simulated:
                save(layout.mesh, None)
            else:
                on_ranks(layout.mesh, save)
        return found[name]

    return get


def bits(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.contiguous().view(-1).view(torch.uint8)


def assert_same(got: Any, want: Any) -> None:
    assert tree.structure(got) == tree.structure(want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert torch.equal(bits(a), bits(b)), path


MATRIX = ["single", "dp2tp2pp1", "pp2tp2", "fsdp4", "zero padded", "uneven fsdp5"]
AROUND = [*LAYOUTS, next(iter(LAYOUTS))]  # the others as well, once from and once to
PAIRS = list(dict.fromkeys([*itertools.product(MATRIX, MATRIX), *itertools.pairwise(AROUND)]))


def factors(frm, to):
    """Each layout from one device and from several, and to one and to several."""
    return [{"frm": frm, "one": to == "single"}, {"to": to, "one": frm == "single"}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("frm", "to"), PAIRS)
def test_one_layout_restores_another(saved, on_ranks, frm, to):
    path = saved(frm, on_ranks)
    layout = LAYOUTS[to]
    for mesh in layout.ranks():
        want = layout.held(mesh)
        state = tree.map(torch.zeros_like, want)
        restored = checkpoint.restore_(path, state, placement=layout.placement(mesh))
        assert restored is state
        assert_same(state, want)


def test_the_layouts_differ_where_they_should():
    """That the cases test what their names say."""
    leaf = "opt_state/inner/0/mu/blocks/attention_norm/scale"
    by_path = lambda state: dict(zip(tree.paths(state), tree.leaves(state), strict=True))
    assert leaf in by_path(whole()), [p for p in by_path(whole()) if "norm" in p]
    shapes = {
        name: [tuple(by_path(layout.held(mesh))[leaf].shape) for mesh in layout.ranks()]
        for name, layout in LAYOUTS.items()
    }
    assert shapes["single"] == [(5, 12)]
    assert shapes["pp2tp2"] == [(2, 12), (2, 12), (3, 12), (3, 12)]
    assert shapes["fsdp4"] == [(5, 3)] * 4
    assert shapes["zero padded"] == [(5, 3)] * 5  # 12 are 3, 3, 3, 3 and none
    assert shapes["simulated zero"] == [(5, 15)]
    assert shapes["uneven fsdp5"] == [(5, 3)] * 5
    assert shapes["simulated uneven"] == [(5, 12)]  # a global value has no padding
