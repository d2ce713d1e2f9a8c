"""Loading onto meshes: each rank gets its shards, and reads nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import BoundMesh, Mesh, P, Rules, checkpoint, gpt, hub, tree
from functron.hub import files, reader
from functron.hub.mixtures import DECODERS
from functron.nn.moe import MoEConfig
from functron.pipeline.partition import Partition, layout_of
from functron.spmd.params import abstract_params
from functron.spmd.spec import shard

LLAMA = gpt.GPTConfig(
    vocab_size=45, num_layers=4, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=6, mlp_dim=24,
    max_seq=8, vocab_multiple=16, init_stddev=0.3, qkv_bias=True,
)  # fmt: skip
GPT2 = replace(
    LLAMA, num_kv_heads=0, head_dim=0, norm="layer", activation="gelu_tanh", gated=False,
    bias=True, qkv_bias=False, positions="learned", tied=True,
)  # fmt: skip
MIXTRAL = replace(LLAMA, qkv_bias=False, moe=MoEConfig(4, 2, 12, renormalise=True))
GPT_OSS = replace(
    LLAMA,
    qkv_bias=False,
    bias=True,
    sinks=True,
    activation="clamped_swiglu",
    moe=MoEConfig(4, 2, 12, normalise="after", router_bias=True, expert_bias=True),
)
DEEPSEEK = replace(
    LLAMA,
    qkv_bias=False,
    num_kv_heads=0,
    norm_eps=1e-6,
    kv_rank=12,
    q_rank=8,
    rope_head_dim=4,
    v_head_dim=5,
    dense_layers=2,
    mtp_depth=2,
    moe=MoEConfig(4, 2, 12, score="sigmoid", renormalise=True, balance_bias=True, shared_dim=24),
)
CONFIGS = {
    "qwen2": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "gpt_oss": GPT_OSS, "deepseek_v3": DEEPSEEK,
    "gpt_oss fused": replace(GPT_OSS, fused_projections=True),
}  # fmt: skip

MEGATRON = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp"}
STACKS = {"dense", "blocks", "mtp"}
LAYOUTS = {
    "tp": (Mesh(tp=4), MEGATRON),
    "dp,tp": (Mesh(dp=2, tp=2), MEGATRON),
    "fsdp": (Mesh(fsdp=4), {"embed": "fsdp"}),
    "fsdp,tp": (Mesh(fsdp=2, tp=2), {**MEGATRON, "embed": "fsdp"}),
    "ep": (Mesh(ep=4), {"expert": "ep"}),
    "dp,ep,tp": (Mesh(dp=2, ep=2, tp=2), {**MEGATRON, "expert": "ep"}),
    "experts over all": (
        Mesh(ep=2, tp=2),
        {**MEGATRON, "expert": ("ep", "tp"), "expert_mlp": None},
    ),
    "pp,tp": (Mesh(pp=2, tp=2), {**MEGATRON, "layers": "pp"}),
    "one dim by two axes": (Mesh(fsdp=2, tp=2), {"vocab": ("tp", "fsdp"), "mlp": ("fsdp", "tp")}),
}


def bound(mesh: Mesh, rank: int) -> BoundMesh:
    """A rank of the mesh without its process groups: loading issues no collectives."""
    return BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")


class Counting:
    """A source that keeps count of what is read from it."""

    def __init__(self, source):
        self.source, self.sizes = source, []

    def shapes(self):
        return self.source.shapes()

    def read(self, name, slices):
        piece = self.source.read(name, slices)
        self.sizes.append(piece.nbytes)
        return piece


@pytest.fixture(params=list(CONFIGS), scope="module")
def stored(request, tmp_path_factory):
    """The family, config, parameters with padding of zeros, and folder of a model."""
    config, path = CONFIGS[request.param], tmp_path_factory.mktemp("hub") / "model"
    kind = request.param.split()[0]
    params = ft.init_params(ft.random.key(0), gpt.defs(config))
    hub.save(path, config, params, model_type=kind, max_shard_bytes=9_000)
    return DECODERS[kind], config, hub.load(path, config), path


def factors(stored, layout):
    """Each family with each axis, and each layout."""
    mesh, _ = LAYOUTS[layout]
    split = [axis for axis in ("dp", "fsdp", "ep", "tp", "pp") if mesh[axis] > 1]
    return [*({"family": stored, "axis": axis} for axis in split), {"layout": layout}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_each_rank_loads_its_shards(stored, layout):
    _, config, whole, path = stored
    mesh, rules = LAYOUTS[layout]
    specs = ft.param_specs(gpt.defs(config), Rules(rules))
    assert not all(leaf.eq(0).all() for leaf in tree.leaves(whole))
    for rank in range(mesh.size):
        params = hub.load(path, config, specs=specs, mesh=bound(mesh, rank))
        rows = zip(
            tree.paths(whole),
            tree.leaves(params),
            tree.leaves(whole),
            tree.leaves(specs),
            strict=True,
        )
        for leaf, got, want, spec in rows:
            expected = shard(want, spec, mesh, mesh.coordinate(rank))
            assert torch.equal(got, expected), (rank, leaf)
            assert got.is_contiguous()


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_rank_reads_what_it_keeps_piece_by_piece(stored, layout):
    family, config, whole, path = stored
    mesh, rules = LAYOUTS[layout]
    specs = ft.param_specs(gpt.defs(config), Rules(rules))
    padding = 0
    for rank in range(mesh.size):
        source = Counting(files.open_folder(path))
        held = reader.local_on_mesh(config, specs, bound(mesh, rank))
        params = reader.read_params(family, config, source, held)
        # all but the zeros of the vocabulary's padding come from the files, and no byte besides
        ones = tree.map(torch.ones_like, whole)
        ones["embed"][config.vocab_size :] = 0
        if "unembed" in ones:
            ones["unembed"][:, config.vocab_size :] = 0
        kept = [
            shard(leaf, spec, mesh, mesh.coordinate(rank))
            for leaf, spec in zip(tree.leaves(ones), tree.leaves(specs), strict=True)
        ]
        read = sum(source.sizes)
        assert read == 4 * sum(int(leaf.sum()) for leaf in kept)
        padding += tree.nbytes(params) - read
        stacks = [leaf for name in STACKS & params.keys() for leaf in tree.leaves(params[name])]
        stacked = [leaf[0].nbytes for leaf in stacks]
        flat = [leaf.nbytes for name, leaf in params.items() if name not in {*STACKS, "norm"}]
        assert max(source.sizes) <= max(*stacked, *flat)  # one row of one leaf
    assert padding > 0


class Lazy:
    """A leaf of which rows are read when they are asked for, and counted."""

    def __init__(self, value, sizes):
        self.value, self.sizes = value, sizes
        self.shape, self.dtype = tuple(value.shape), value.dtype

    def __getitem__(self, where):
        piece = self.value[where]
        self.sizes.append(piece.nbytes)
        return piece


def test_an_export_reads_every_row_once(stored, tmp_path):
    family, config, whole, path = stored
    sizes = []
    lazy = tree.map(lambda leaf: Lazy(leaf, sizes), whole)
    hub.save(tmp_path / "out", config, lazy, model_type=family.model_type, max_shard_bytes=9_000)
    assert sum(sizes) == tree.nbytes(whole)
    stacks = [leaf for name in STACKS & whole.keys() for leaf in tree.leaves(whole[name])]
    assert max(sizes) <= max(whole["embed"].nbytes, *(leaf[0].nbytes for leaf in stacks))
    for file in path.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_simulated_meshes_load_global_values(stored):
    _, config, whole, path = stored
    mesh = Mesh(dp=2, tp=2)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    params = hub.load(path, config, specs=specs, mesh=mesh)
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(whole)))


PIPES = (((0, 0), (1, 0), (0, 1), (1, 1)),)  # four stages, two to each of two ranks


@pytest.mark.parametrize("spread", [False, True], ids=["plain", "vocabulary over pp"])
def test_ranks_of_a_pipeline_load_their_layers(stored, spread):
    """Also layers that do not follow each other, and entries that only one rank uses."""
    _, config, whole, path = stored
    config = replace(config, vocab_multiple=32)  # divides by pp and tp
    whole = hub.load(path, config)
    defs, mesh = gpt.defs(config), Mesh(pp=2, tp=2)
    names = {"embed": 0, "unembed": 1} if "unembed" in whole and spread else {}
    partition = Partition(layout_of([1, 1, 1, 1]), PIPES, gpt.uses(config), names)
    specs = partition.storage_specs(ft.param_specs(defs, Rules(MEGATRON)))
    state = {"params": abstract_params(defs), "step": torch.empty((), device="meta")}
    for rank in range(mesh.size):
        place = checkpoint.Placement.of(
            state, {"params": specs, "step": P()}, bound(mesh, rank), partition
        )
        params = hub.load(path, config, placement=place)
        stage = mesh.coordinate(rank)["pp"]
        assert tree.paths(params) == tree.paths(partition.local_defs(defs, stage))
        for name, leaf in params.items():
            value = whole[name]
            if partition.stack(name) is not None:
                assert list(partition.layers(stage)) == [stage, stage + 2]
                rows = torch.tensor(partition.rows(name, stage))
                assert len(rows) == len(partition.stack(name)) // 2
                value = tree.map(lambda x, rows=rows: x[rows], value)
            pairs = zip(
                tree.leaves(leaf), tree.leaves(value), tree.leaves(specs[name]), strict=True
            )
            for got, want, spec in pairs:
                assert torch.equal(got, shard(want, spec, mesh, mesh.coordinate(rank))), name


def test_a_placement_of_the_parameters_alone(stored):
    _, config, whole, path = stored
    for mesh in (None, Mesh(tp=2)):
        specs = ft.param_specs(gpt.defs(config), Rules(MEGATRON))
        place = checkpoint.Placement.of(abstract_params(gpt.defs(config)), specs, mesh)
        params = hub.load(path, config, placement=place, at="")
        assert all(map(torch.equal, tree.leaves(params), tree.leaves(whole)))
    uneven = Mesh(fsdp=3)  # parts of 6, 6 and 4 of 16, as ZeRO cuts: the last with padding
    place = checkpoint.Placement.of(
        abstract_params(gpt.defs(config)), {**dict.fromkeys(whole, P()), "norm": P("fsdp")},
        bound(uneven, 2),
    )  # fmt: skip
    scale = hub.load(path, config, placement=place, at="")["norm"]["scale"]
    assert torch.equal(scale, torch.cat([whole["norm"]["scale"][12:], torch.zeros(2)]))


def test_specs_that_do_not_fit(stored):
    _, config, _, path = stored
    with pytest.raises(ValueError, match=r"specs: got None; wanted the parameters' specs"):
        hub.load(path, config, mesh=bound(Mesh(tp=2), 0))
    uneven = replace(config, vocab_multiple=1)
    with pytest.raises(ValueError, match="params/embed: got dim 0 of shape"):
        hub.load(
            path,
            uneven,
            specs={**dict.fromkeys(gpt.defs(uneven), P()), "embed": P("tp")},
            mesh=bound(Mesh(tp=2), 0),
        )
