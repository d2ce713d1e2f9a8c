"""Megatron's checkpoints in and out, against what megatron-core 0.16.1 computed with them.

The fixtures are its own (tests/apps/megatron/make_megatron.py); the legacy layout is our writing of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

import functron as ft
from functron import checkpoint, gpt
from functron.apps.megatron import make_format, tensors
from functron.apps.megatron.checkpoint_files import (
    METADATA,
    ChunkedTensors,
    OpenedCheckpoint,
    TensorChunk,
    open_checkpoint,
    read_pickle,
)
from functron.apps.megatron.runs import read_architecture, write_architecture, write_arguments
from functron.cli.main import main
from functron.core import random
from functron.core.settings import value_at
from functron.data import IndexedFile, IndexedWriter
from functron.models.config import GPTConfig
from functron.nn.moe import MoEConfig
from functron.training import config, run_folder
from functron.training.convert import FORMATS
from functron.training.convert import convert as convert_files
from functron.training.data import open_samples
from functron.training.resume import restore_state
from functron.training.setup import make_setup

FIXTURES = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in FIXTURES.glob("*.tar.xz"))
MESHES = ("", "tp=2", "pp=2")
LAYOUTS = ("torch_dist", "torch")
ROWS, SEQ, REAL = 4, 12, 29
DEFAULT = {
    ("llama-tp2", "torch", "pp=2"),
    ("gpt2-pp2", "torch", "tp=2"),
    ("moe-ep2", "torch_dist", ""),
    ("mla-pp2", "torch_dist", ""),
    ("mtp-tp2", "torch", ""),
    ("bf16-tp2dp2", "torch_dist", "tp=2"),
    ("latent-tp2", "torch", ""),
    ("aheads-ep2", "torch_dist", ""),
    ("moes-ep2dp2", "torch_dist", ""),
}
ALL = [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.full, id="-".join(case))
    for case in ((n, layout, mesh) for n in NAMES for layout in LAYOUTS for mesh in MESHES)
]

convert = functools.partial(convert_files, formats={**FORMATS, "megatron": make_format()})


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A function from the name of a fixture to its folder."""
    root = tmp_path_factory.mktemp("megatron")

    @functools.cache
    def unpack(name: str) -> Path:
        with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
            archive.extractall(root / name, filter="data")
        return root / name

    return unpack


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """As tests/apps/megatron/make_megatron.py draws it."""
    drawn = np.random.default_rng(step).integers(0, REAL, (ROWS, SEQ + 1))
    drawn[:, 1::2] = (drawn[:, 0::2][:, : drawn[:, 1::2].shape[1]] * 3 + 1) % REAL
    tokens = torch.from_numpy(drawn)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(ROWS)}


def main_loss(metrics: dict) -> float:
    """The loss that Megatron prints: without what is added to it."""
    aux = metrics.get("aux")
    return float(aux["next_token"] / aux["targets"]) if aux else float(metrics["loss"])


def rounding_of(model: GPTConfig) -> float:
    """By how much logits of two computations in bfloat16 differ, as a part of their size; 0: float32.

    Both round to 8 bits, by 2^-9 at most, what each layer computes one after another: its norms (2),
    projections (7: query or key, rotation, scores, values, output, up, down), gate and residual sums
    (3), and the embedding's norm and product at the end (2). Errors that are independent add up as
    their squares do; those of two computations are twice as many.
    """
    if model.dtype != "bfloat16":
        return 0.0
    return (2 * (12 * model.num_layers + 2)) ** 0.5 * 2**-9


@pytest.mark.parametrize(("name", "layout", "mesh"), ALL)
def test_goes_on_as_megatron_would_have(name, layout, mesh, unpacked, tmp_path):
    folder = unpacked(name)
    golden = json.loads((folder / "golden.json").read_text())
    convert(f"megatron:{folder / layout}", f"run:{tmp_path / 'run'}")
    run = config.load(tmp_path / "run" / "config.toml")
    made = make_setup(run, ft.Mesh.parse(mesh) if mesh else ft.Mesh())
    stored = checkpoint.latest(tmp_path / "run" / "checkpoints")
    state, _ = restore_state(stored, made, random.key(run.seed), torch.device("cpu"))
    assert int(state.step) == 5
    logits = gpt.forward(run.gpt, state.params, batch_of(1000)["tokens"]).float()
    wanted = torch.from_numpy(np.load(folder / "golden.npz")["logits"])
    rounding = rounding_of(run.gpt)
    # five standard deviations
    of_logits = 1e-5 if not rounding else 5 * rounding * float(wanted.square().mean().sqrt())
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=of_logits)
    # a loss is the mean over so many tokens of differences of logits
    of_loss = of_logits / (ROWS * SEQ) ** 0.5
    for step, (loss, norm) in enumerate(golden["next"], 5):
        state, metrics = made.step(state, batch_of(step))
        assert abs(main_loss(metrics) - loss) <= (of_loss if rounding else 1e-5 * loss)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=2 * rounding or 1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("moes-ep2dp2", "bf16-tp2dp2") else pytest.mark.full)
        for name in NAMES
    ],
)
def test_both_layouts_have_the_same_numbers(name, unpacked):
    """Whatever divided them: tp, pp, virtual stages, ep, and the distributed optimizer's buffers."""
    one, other = (open_checkpoint(unpacked(name) / layout) for layout in LAYOUTS)
    assert (one.step, other.step) == (5, 5)
    states = [tensors.read_state(each) for each in (one, other)]
    assert states[0].keys() == states[1].keys() >= {"exp_avg", "exp_avg_sq"}
    pairs = [(one.weights, other.weights), *((states[0][k], states[1][k]) for k in states[0])]
    for ours, theirs in pairs:
        assert theirs.sizes.keys() - ours.sizes.keys() <= {
            "output_layer.weight"
        }  # where it is tied
        for key, shape in ours.sizes.items():
            whole = [slice(0, size) for size in shape]
            assert torch.equal(ours.read(key, whole), theirs.read(key, whole)), key


def whole(**named: torch.Tensor) -> ChunkedTensors:
    """Tensors of one shard each, by their names."""
    made = ChunkedTensors()
    for name, value in named.items():
        start = (0,) * value.dim()
        chunk = TensorChunk(start, tuple(value.shape), lambda value=value: value, Path("shard"))
        made.add(name.replace("__", "."), value.dtype, chunk)
    assert not made.close()
    return made


def in_buckets(**changes: torch.Tensor) -> OpenedCheckpoint:
    """Two equal norms and a matrix of three numbers a row, the last first, each at a multiple of 64."""
    ones, w = torch.ones(8, dtype=torch.bfloat16), torch.arange(6.0).view(2, 3).bfloat16()
    flat = torch.full((64 * 2 + 8,), 7.0)
    for start, value in ((0, w.flatten()), (64, ones), (128, ones)):
        flat[start : start + value.numel()] = value.float() * (1 + 2**-10)  # rounded to it
    moments = {"exp_avg": torch.arange(136.0), "exp_avg_sq": torch.arange(136.0) ** 2}
    moments = {key: m.index_fill(0, torch.arange(64, 136), 1.0) for key, m in moments.items()}
    buckets = {f"b__{key}": value for key, value in {"param": flat, **moments, **changes}.items()}
    common = {"args": {"tensor_model_parallel_size": 1}}
    weights = whole(a__weight=ones, c__weight=ones, z__weight=w)
    return OpenedCheckpoint(Path("folder"), common, weights, {}, 1, whole(**buckets))


def test_buckets_by_hand():
    """Parameters are known by the numbers that masters are rounded to, in whatever order."""
    state = tensors.read_state(in_buckets())
    assert state.keys() == {"exp_avg", "exp_avg_sq", "master"}
    for name, values in {
        "z.weight": torch.arange(6.0).view(2, 3), "a.weight": torch.ones(8),
    }.items():  # fmt: skip
        box = [slice(0, n) for n in values.shape]
        assert torch.equal(state["exp_avg"].read(name, box), values)
        assert torch.equal(state["exp_avg_sq"].read(name, box), values**2)
        master = state["master"].read(name, box)
        assert torch.equal(master.bfloat16(), values.bfloat16())
        assert not torch.equal(master, values)


def test_buckets_that_fit_no_parameters():
    unknown = torch.zeros(136)
    with pytest.raises(
        ValueError, match=r"b: got no masters of a parameter from 0 on; .*reshardable"
    ):
        tensors.read_state(in_buckets(param=unknown))
    # two norms of the same numbers, of which one was updated otherwise
    with pytest.raises(ValueError, match=r"b: got other moments from 128 on than elsewhere of"):
        tensors.read_state(in_buckets(exp_avg=torch.arange(136.0)))


def read_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a `torch_dist` checkpoint, as torch.distributed.checkpoint reads them."""
    reader = dcp.FileSystemReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    table = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(table, storage_reader=reader, no_dist=True)
    return table


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("moe-ep2", "mla-pp2") else pytest.mark.full)
        for name in NAMES
    ],
)
def test_comes_back_as_it_was(name, unpacked, tmp_path, monkeypatch):
    """The run says where it came from, wherever whoever made it stood."""
    source = unpacked(name) / "torch_dist" / "iter_0000005"
    monkeypatch.chdir(source.parent)
    convert(f"megatron:{source.name}", f"run:{tmp_path / 'run'}")
    assert config.load(tmp_path / "run" / "config.toml").source == f"megatron:{source}"
    ranks = 2 if "-ep2" in name else 1
    convert(f"run:{tmp_path / 'run'}", f"megatron:{tmp_path / 'back'}", expert_parallel=ranks)
    back = tmp_path / "back" / "iter_0000005"
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "5"
    before, after = read_by_torch(source), read_by_torch(back)
    before = {key: value for key, value in before.items() if "optimizer.distributed." not in key}
    assert before.keys() <= after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    # of buckets each parameter's part
    states = [tensors.read_state(open_checkpoint(folder)) for folder in (source, back)]
    assert states[0].keys() <= states[1].keys()  # masters are written in any case
    for one, other in ((state, states[1][kind]) for kind, state in states[0].items()):
        assert one.sizes.keys() == other.sizes.keys()
        for key, shape in one.sizes.items():
            box = [slice(0, size) for size in shape]
            assert torch.equal(one.read(key, box), other.read(key, box)), key
    # the objects without which Megatron-Core refuses to load
    kinds = (
        dcp.FileSystemReader(str(f)).read_metadata().state_dict_metadata for f in (source, back)
    )
    wanted, got = ({key for key in kind if "_extra_state" in key} for kind in kinds)
    assert wanted <= got
    theirs, ours = (read_pickle(f / "common.pt") for f in (source, back))
    for key in ("iteration", "opt_param_scheduler", "checkpoint_version"):
        assert ours[key] == theirs[key]
    if name.startswith("bf16") and "dp" not in name:  # a plain optimizer around torch's
        steps = [each["optimizer"]["optimizer"]["state"]["common_step"] for each in (theirs, ours)]
        assert steps == [5, 5]
    same, args = open_checkpoint(back).args, open_checkpoint(source).args
    assert same is not None
    assert args is not None
    assert read_architecture(same) == read_architecture(args)
    assert same["consumed_train_samples"] == args["consumed_train_samples"] == 20


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_megatron_goes_on_with_ours(name, unpacked, tmp_path):
    """There and back, loaded by megatron-core with the optimizer that the fixture had.

    It prints the five losses that it printed before, to the last bit. Without Transformer Engine
    its distributed optimizer of 0.16.1 goes on otherwise from its own checkpoints too, for a defect
    that the script shows (``shared-step``) and repairs.
    """
    pytest.importorskip("megatron.core", reason="an environment as in make_megatron.py")
    folder, out = unpacked(name), tmp_path / "out"
    ranks = 2 if "-ep2" in name else 1
    convert(f"megatron:{folder / 'torch_dist'}", f"run:{tmp_path / 'run'}")
    convert(f"run:{tmp_path / 'run'}", f"megatron:{tmp_path / 'back'}", expert_parallel=ranks)
    script = Path(__file__).parent / "make_megatron.py"
    back = tmp_path / "back" / "iter_0000005"
    subprocess.run([sys.executable, script, "go-on", name, back, out], check=True)
    got, wanted = (json.loads((f / "golden.json").read_text())["next"] for f in (out, folder))
    assert got == wanted


def test_names_of_what_is_missing_and_unknown(unpacked, tmp_path):
    folder = _copy(unpacked, tmp_path)
    with (folder / METADATA).open("rb") as stream:
        metadata = pickle.load(stream)
    entries = metadata.state_dict_metadata
    entries["decoder.layers.self_attention.new.weight"] = entries.pop("output_layer.weight")
    places = metadata.storage_data
    for index in [i for i in places if i.fqn == "output_layer.weight"]:
        new = replace_fqn(index, "decoder.layers.self_attention.new.weight")
        places[new] = places.pop(index)
    _write(folder, metadata)
    with pytest.raises(
        ValueError, match="these are not the weights of this Megatron model"
    ) as found:
        convert(f"megatron:{folder}", f"run:{tmp_path / 'run'}")
    text = str(found.value)
    assert "output_layer.weight: got no such tensor" in text
    assert "self_attention.new.weight: got a tensor" in text
    assert not (tmp_path / "run").exists()


def replace_fqn(index, name):
    return dcp.metadata.MetadataIndex(name, index.offset, index.index)


def _copy(unpacked, tmp_path, layout: str = "torch_dist") -> Path:
    source = unpacked("llama-tp2") / layout / "iter_0000005"
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


def _plain(file: Path) -> dict:
    """The contents of a ``.pt`` without objects of classes that are megatron-core's."""
    table = read_pickle(file, 0, file.stat().st_size)  # not mapped: it is written anew
    vars(table["args"]).pop("attention_backend")
    return {key: value for key, value in table.items() if key != "rng_state"}


def _write(folder: Path, metadata) -> None:
    with (folder / METADATA).open("wb") as stream:
        pickle.dump(metadata, stream)


class _Code:
    """A pickle that runs a command where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _poison_common(folder: Path, mark: Path) -> str:
    torch.save({"args": _Code(mark)}, folder / "common.pt")
    return r"common.pt: got a pickle that calls posix.system"


def _poison_metadata(folder: Path, mark: Path) -> str:
    _write(folder, _Code(mark))
    return r"\.metadata: got a pickle that calls posix.system"


def _poison_shard(folder: Path, mark: Path) -> str:
    torch.save(_Code(mark), folder / "__0_0.distcp")
    data = (folder / "__0_0.distcp").read_bytes()
    metadata = _loaded(folder)
    metadata.storage_data = {
        i: p if p.relative_path != "__0_0.distcp" else replace(p, offset=0, length=len(data))
        for i, p in metadata.storage_data.items()
    }
    _write(folder, metadata)
    return r"__0_0.distcp: got a pickle that calls posix.system"


def _loaded(folder: Path):
    with (folder / METADATA).open("rb") as stream:
        return pickle.load(stream)


def _leave_the_folder(folder: Path, mark: Path) -> str:
    del mark
    metadata = _loaded(folder)
    index = next(iter(metadata.storage_data))
    place = metadata.storage_data[index]
    metadata.storage_data[index] = replace(place, relative_path="../../etc/passwd")
    _write(folder, metadata)
    return r"a shard in '../../etc/passwd'; wanted files of this folder alone"


def _link_away(folder: Path, mark: Path) -> str:
    del mark
    (folder / "__0_1.distcp").rename(folder.parent / "elsewhere")
    (folder / "__0_1.distcp").symlink_to(folder.parent / "elsewhere")
    return r"__0_1.distcp: got a link to .*elsewhere"


def _cut(folder: Path, mark: Path) -> str:
    del mark
    os.truncate(folder / "__0_1.distcp", 1000)
    return r"__0_1.distcp: got 1000 bytes, of which one shard ends at"


def _cut_common(folder: Path, mark: Path) -> str:
    del mark
    os.truncate(folder / "common.pt", 1000)
    return r"common.pt: got"


def _claim(folder: Path, mark: Path) -> str:
    del mark
    metadata = _loaded(folder)
    entry = metadata.state_dict_metadata["output_layer.weight"]
    entry.size = torch.Size([1 << 40, 16])
    entry.chunks[0].sizes = torch.Size([1 << 40, 16])
    _write(folder, metadata)
    return r"output_layer.weight claims a shard of shape \[1099511627776, 16\] in \d+ bytes"


def _leave_a_gap(folder: Path, mark: Path) -> str:
    del mark
    metadata = _loaded(folder)
    metadata.state_dict_metadata["output_layer.weight"].chunks.pop()
    _write(folder, metadata)
    return r"output_layer.weight has shards of 256 numbers, and is \[32, 16\]"


HOSTILE = (
    _poison_common, _poison_metadata, _poison_shard, _leave_the_folder, _link_away, _cut,
    _cut_common, _claim, _leave_a_gap,
)  # fmt: skip


@pytest.mark.parametrize("harm", HOSTILE, ids=lambda f: f.__name__.strip("_"))
def test_hostile_checkpoints_are_refused(harm, unpacked, tmp_path):
    folder, mark = _copy(unpacked, tmp_path), tmp_path / "mark"
    wanted = harm(folder, mark)
    with pytest.raises(ValueError, match=wanted):
        convert(f"megatron:{folder}", f"run:{tmp_path / 'run'}")
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


def test_hostile_ranks_are_refused(unpacked, tmp_path):
    folder, mark = _copy(unpacked, tmp_path, "torch"), tmp_path / "mark"
    file = folder / "mp_rank_01" / "model_optim_rng.pt"
    table = _plain(file)

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            convert(f"megatron:{folder}", f"run:{tmp_path / 'run'}")

    vast = torch.ones(1).as_strided((1 << 40, 16), (0, 0))
    torch.save({**table, "model": {**table["model"], "output_layer.weight": vast}}, file)
    refused(r"model_optim_rng.pt: got a tensor of shape \[1099511627776, 16\] with less data")
    norm = {**table["model"], "decoder.final_layernorm.weight": torch.zeros(16)}
    torch.save({**table, "model": norm}, file)
    refused(r"mp_rank_01: decoder.final_layernorm.weight: got other numbers than in mp_rank_00")
    torch.save({**table, "optimizer": _Code(mark)}, file)
    refused(r"mp_rank_01/model_optim_rng.pt: got a pickle that calls posix.system")
    shutil.rmtree(folder / "mp_rank_01")
    refused(r"mp_rank_01/model_optim_rng.pt: got no such file; wanted tp=2, pp=1, ep=1")
    assert not mark.exists()


def test_says_what_it_cannot_take(unpacked, tmp_path, capsys):
    folder = _copy(unpacked, tmp_path)
    common = _plain(folder / "common.pt")
    args = common["args"]

    def refused(match: str, **changes) -> None:
        made = argparse.Namespace(**{**vars(args), **changes})
        torch.save({**common, "args": made}, folder / "common.pt")
        with pytest.raises(ValueError, match=match):
            convert(f"megatron:{folder}", f"run:{tmp_path / 'run'}")

    refused(r"consumed_train_samples: got 24; wanted 20: 5 steps of 4", consumed_train_samples=24)
    refused(r"train_iters: got '2.5'; wanted a whole number", train_iters="2.5")
    refused(r"seed: got 'x'; wanted a whole number", seed="x")
    refused(
        r"one of --data-path, --train-data-path and --mock-data", data_path=["a"], mock_data=True
    )
    refused(r"window_size: got \[4, 4\]; wanted keys before a query", window_size=(4, 4))
    refused(r"optimizer: got 'muon'; wanted 'adam'", optimizer="muon")
    refused(r"attention_dropout: got 0.1; wanted 0", attention_dropout=0.1)
    refused(r"softmax_type: got 'learnable'; wanted 'vanilla'", softmax_type="learnable")
    refused(r"qk_l2_norm: got true; wanted an RMSNorm with scales", qk_l2_norm=True)
    torch.save({k: v for k, v in common.items() if k != "args"}, folder / "common.pt")
    with pytest.raises(ValueError, match=r"args: got none in it; .* pass --model"):
        convert(f"megatron:{folder}", f"run:{tmp_path / 'run'}")
    assert main(["convert", f"megatron:{folder}", f"run:{tmp_path / 'run'}", "--averaged"]) == 2
    assert "averaged: got True; wanted nothing" in capsys.readouterr().err


ORDERED = Path(__file__).parents[2] / "data" / "megatron"


def test_goes_on_with_the_next_sample(unpacked, tmp_path, capsys):
    """Sample 20 of the 40 that Megatron-Core's datasets drew (tests/data/make_megatron.py)."""
    folder = _copy(unpacked, tmp_path)
    common, blend = _plain(folder / "common.pt"), []
    for name in "abc":  # of the ids that the fixture's model has
        blend += ["1", str(tmp_path / name)]
        shutil.copy(ORDERED / f"{name}.idx", tmp_path)
        ids = np.memmap(ORDERED / f"{name}.bin", IndexedFile(ORDERED / name).dtype, "r")
        (ids % REAL).astype(ids.dtype).tofile(tmp_path / f"{name}.bin")
    more = {"data_path": blend, "split": "4,1,1", "train_iters": 10, "train_samples": None}
    args = argparse.Namespace(**{**vars(common["args"]), **more})
    torch.save({**common, "args": args}, folder / "common.pt")
    out = tmp_path / "run"
    assert main(["convert", f"megatron:{folder}", f"run:{out}"]) == 0
    assert "sample 20 of the 40 in Megatron-LM's order" in capsys.readouterr().out
    run = config.load(out / "config.toml")
    assert (run.data.order, run.data.order_samples, run.data.split, run.seed) == (
        "megatron",
        40,
        "4,1,1",
        1234,
    )
    with np.load(ORDERED / "samples.npz") as arrays:
        tokens, _ = arrays["case39/train"]
    drawn = open_samples(run).draw(np.arange(20, 24))["tokens"]
    np.testing.assert_array_equal(drawn, tokens[20:24] % REAL)
    assert main(["train", "--resume", "--out", str(out), "--steps", "6"]) == 0
    (record,) = run_folder.records(out)
    assert record["step"] == 6
    convert(f"run:{out}", f"megatron:{tmp_path / 'back'}")
    back = open_checkpoint(tmp_path / "back").args
    assert back is not None
    wanted = {**more, "train_samples": 40, "seed": 1234, "seq_length": SEQ, "iteration": 6}
    wanted |= {"train_iters": 6, "consumed_train_samples": 24, "mock_data": False}
    assert {name: back[name] for name in wanted} == wanted
    convert(f"megatron:{tmp_path / 'back'}", f"run:{tmp_path / 'again'}")
    names = ("data", "split", "order", "ordered_samples", "order_cache", "extra_token", "seq")
    for name in names:
        again = config.load(tmp_path / "again" / "config.toml")
        assert value_at(again, name) == value_at(config.load(out / "config.toml"), name), name
    other = ["train", "--resume", "--out", str(out), "--steps", "7", "--split", "5,1"]
    assert main(other) == 2  # of which there are steps now
    assert "split: got '5,1'; wanted '4,1,1', as in the run" in capsys.readouterr().err


def test_data_may_be_named_when_it_goes_on(unpacked, tmp_path, capsys):
    """By a checkpoint whose arguments name none; sizes of batches stay."""
    folder, out = unpacked("llama-tp2") / "torch_dist", tmp_path / "run"
    assert main(["convert", f"megatron:{folder}", f"run:{out}"]) == 0
    assert "--order megatron --order-samples 80" in capsys.readouterr().out  # 20 steps of 4
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        for n in range(9):
            writer.add([(n * k) % REAL for k in range(30)])
    given = ["train", "--resume", "--out", str(out), "--steps", "6", "--order", "megatron"]
    given += ["--data", str(tmp_path / "x"), "--order-samples", "80"]
    assert main([*given, "--global-batch", "8"]) == 2
    assert "global_batch: got 8; wanted 4, as in the run" in capsys.readouterr().err
    assert main(given) == 0
    assert config.load(out / "config.toml").data.order == "megatron"


def test_schedules_that_count_samples(unpacked, tmp_path):
    """Megatron-LM's state has samples, which here are not those of whole steps."""
    folder = _copy(unpacked, tmp_path)
    common = _plain(folder / "common.pt")
    common["opt_param_scheduler"] |= {"lr_warmup_steps": 10, "lr_decay_steps": 70}
    torch.save(common, folder / "common.pt")
    convert(f"megatron:{folder}", f"run:{tmp_path / 'run'}")
    run = config.load(tmp_path / "run" / "config.toml")
    rate = run.learning_rate
    assert (run.rate_unit, rate.warmup_steps, rate.total_steps) == ("samples", 10, 70)
    found = [float(make_setup(run, ft.Mesh()).learning_rate(step)) for step in range(3)]
    assert found == pytest.approx([0.0, 0.01 * 4 / 10, 0.01 * 8 / 10])
    convert(f"run:{tmp_path / 'run'}", f"megatron:{tmp_path / 'back'}")
    back = read_pickle(tmp_path / "back" / "iter_0000005" / "common.pt")["opt_param_scheduler"]
    assert back == {**common["opt_param_scheduler"], "wd_incr_steps": 80}


ARCHITECTURES = {
    "gelu": GPTConfig(norm="layer", positions="learned", bias=True, gated=False, activation="gelu"),
    "relu2": GPTConfig(activation="relu2", gated=False, rope_fraction=0.5, zero_centered_norm=True),
    "qwen3": GPTConfig(num_kv_heads=2, head_dim=16, qk_norm=True, rope_theta=1e6, tied=True),
    "llama3.1": GPTConfig(num_kv_heads=2, rope_scaling=ft.nn.RopeScaling(factor=8.0)),
    "mistral": GPTConfig(num_kv_heads=2, window=8, global_every=2, rope_pairs="neighbours"),
    "mixtral": GPTConfig(
        num_kv_heads=2,
        moe=MoEConfig(expert_dim=64, normalise="after", aux_loss=1e-2, aux="batch",
                      capacity_factor=1.25, drop="probability"),
    ),
    "ahead": GPTConfig(mtp_depth=3, mtp_repeated=True, mtp_detached=True),
    "global": GPTConfig(moe=MoEConfig(normalise="after", aux_loss=1e-2, aux="global")),
    "quantile": GPTConfig(
        moe=MoEConfig(normalise="after", balance_bias=True, balance_by="quantile", balance_decay=0.5)
    ),
    "deepseek": GPTConfig(
        kv_rank=8, q_rank=8, head_dim=16, rope_head_dim=8, v_head_dim=16, dense_layers=1, mtp_depth=1,
        rope_scaling=ft.nn.RopeScaling(
            40.0, original_max_seq=4096, kind="yarn", mscale=1.0, mscale_all_dim=1.0
        ),
        moe=MoEConfig(top_k=4, expert_dim=64, score="sigmoid", renormalise=True, balance_bias=True,
                      num_groups=4, top_groups=2, shared_dim=64, scale=2.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_there_and_back(name):
    made = ARCHITECTURES[name]
    back = read_architecture(write_architecture(made, seq=128))
    assert back.mtp_weight == pytest.approx(made.mtp_weight)
    same = replace(made, vocab_size=made.padded_vocab, vocab_multiple=made.padded_vocab)
    canonical = ft.hub.family_of(made).canonical
    assert canonical(replace(back, mtp_weight=same.mtp_weight)) == canonical(same)
    if made.moe is not None:  # of training alone
        names = ("capacity_factor", "capacity_over", "drop", "aux", "aux_loss")
        names += ("balance_by", "balance_decay")
        assert [getattr(back.moe, n) for n in names] == [getattr(made.moe, n) for n in names]


def test_capacity_of_a_microbatch_there_and_back():
    """Megatron's is that of a rank's samples: of all of a microbatch, on one data-parallel rank."""
    moe = MoEConfig(8, 2, 64, normalise="after", capacity_factor=1.5, capacity_over="batch")
    run = config.configure(gpt=GPTConfig(moe=moe), global_batch=8, microbatches=2)
    args = vars(write_arguments(run, 3))
    assert (args["micro_batch_size"], args["moe_expert_capacity_factor"]) == (4, 1.5)
    assert read_architecture(args).moe == moe


def test_architectures_that_megatron_has_not():
    for change in ({"nope_every": 2}, {"sublayer_norms": "both"}, {"logit_cap": 30.0}):
        with pytest.raises(
            ValueError, match=f"Megatron has no such model\n  - {next(iter(change))}.*; fix: keep"
        ):
            write_architecture(replace(GPTConfig(), **change))


def test_refusals_say_the_field_of_a_part():
    """Not two whole configurations, in which one has to look for it."""
    plain = MoEConfig(expert_dim=64, normalise="after")
    for part, change, wanted in (
        ("moe", replace(plain, latent_dim=8), r"moe.latent_dim: got 8; wanted 0, in Megatron"),
        (
            "moe",
            replace(plain, top_k=1),
            r"moe.top_k: got 1, whose weight is 1; wanted 2 at least.*; fix: ",
        ),
        (
            "moe",
            replace(plain, num_groups=4, top_groups=1),
            r"moe.group_score: got 'top2', of probabilities; wanted 'max'.*; fix: ",
        ),
        (
            "rope_scaling",
            ft.nn.RopeScaling(factor=8.0, original_max_seq=128),
            r"rope_scaling.original_max_seq: got 128; wanted 8192, in Megatron",
        ),
    ):
        with pytest.raises(ValueError, match=wanted) as caught:
            write_architecture(replace(GPTConfig(), **{part: change}))
        assert "Config(" not in str(caught.value)
        assert len(str(caught.value).splitlines()) == 2


def test_groups_that_logits_rank_are_refused():
    """Megatron sums two logits of a group where the softmax comes after the choice."""
    moe = MoEConfig(
        8, 4, 64, num_groups=4, top_groups=2, score="softmax", normalise="before", scale=2.0
    )
    args = write_architecture(GPTConfig(moe=moe))
    assert read_architecture(args).moe == replace(moe, aux="sequence")
    with pytest.raises(ValueError, match=r"moe_router_group_topk: got 2; wanted --moe-router-pre"):
        read_architecture({**args, "moe_router_pre_softmax": False})
