"""Vocabularies by seed through every conversion: each row of a token comes back to the bit.

``pytest --full`` takes fifty, by default it is one, ``--seeds N`` as many. What is written is read by
torch.distributed.checkpoint and safetensors; the legacy layout is our writing of it, from that.
"""

from __future__ import annotations

import argparse
import functools
import random as chance
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import functron as ft
from functron import checkpoint, tree
from functron.apps.megatron import make_format
from functron.apps.megatron.checkpoint_files import read_pickle
from functron.apps.megatron.runs import MASKED_VOCABULARY, read_architecture, write_arguments
from functron.cli.main import main
from functron.core import random
from functron.models.config import GPTConfig
from functron.optim import OptimizerConfig
from functron.training import config, run_folder
from functron.training.convert import FORMATS
from functron.training.convert import convert as convert_files
from functron.training.setup import make_setup

LAYERS, EMBED = 2, 8
convert = functools.partial(convert_files, formats={**FORMATS, "megatron": make_format()})
LAST = "iter_0000003"
JOINED = re.compile(r"/(qkv|gate_up)/")
"""In paths of leaves of `GPTConfig.fused_projections`, a layout that Megatron's have not."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        seeds, full = map(metafunc.config.getoption, ("--seeds", "--full"))
        default = 50 if full else 1
        metafunc.parametrize("seed", range(default if seeds is None else seeds))


@dataclass(frozen=True)
class Case:
    """A vocabulary, the model around it, and how a legacy checkpoint of it is divided."""

    model: GPTConfig
    trained: bool
    tp: int
    pp: int


def draw(seed: int) -> Case:
    drawn = chance.Random(seed)
    tp, pp = drawn.choice(((1, 1), (2, 1), (1, 2), (2, 2))), None
    tp, pp = tp
    size, multiple = drawn.randint(1, 70), tp * drawn.choice((1, 2, 3, 5, 8, 16, 50, 384))
    if seed < 3:  # whatever is drawn later: some padding, tied and not, with 16 bits
        size, multiple = 3 * multiple - 1 - seed % multiple, multiple
    model = GPTConfig(
        vocab_size=size, vocab_multiple=multiple, num_layers=LAYERS, embed_dim=EMBED, num_heads=4,
        num_kv_heads=2, mlp_dim=12, max_seq=16, tied=bool(seed % 2),
        dtype="bfloat16" if seed % 3 == 1 else "float32", fused_projections=drawn.random() < 0.3,
    )  # fmt: skip
    return Case(model, seed % 5 != 3, tp, pp)


def make(case: Case, out: Path) -> config.TrainConfig:
    """A run folder whose every number is random, those of padding too."""
    masters = case.model.dtype == "bfloat16"
    run = config.configure(
        gpt=case.model, seq=8, global_batch=2, steps=9,
        optimizer=OptimizerConfig(fp32_masters=masters),
    )  # fmt: skip
    made = make_setup(run, ft.Mesh())
    state = made.init(random.key(0))
    key = torch.Generator().manual_seed(case.model.vocab_size)
    step = 3 if case.trained else 0

    def fill(path: str, leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return leaf if path == "key" else torch.full_like(leaf, step)
        return torch.rand(leaf.shape, generator=key).to(leaf.dtype)

    state = tree.map_with_path(fill, state)
    if masters:  # parameters are masters, rounded
        (kept,) = {p.partition("/masters/")[0] for p in tree.paths(state) if "/masters/" in p}
        flat = dict(zip(tree.paths(state), tree.leaves(state), strict=True))
        state = state._replace(
            params=tree.map_with_path(
                lambda path, leaf: flat[f"{kept}/masters/{path}"].to(leaf.dtype), state.params
            )
        )
    kept = state if case.trained else {"params": state.params}

    def write(folder: Path) -> None:
        (folder / run_folder.CONFIG).write_text(config.dump(run), encoding="utf-8")
        checkpoint.save(folder / run_folder.CHECKPOINTS / str(step), kept, {"step": step})

    run_folder.make(out, write)
    return run


def stored(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's checkpoint."""
    found = checkpoint.Checkpoint(checkpoint.latest(run / run_folder.CHECKPOINTS))
    return {path: torch.as_tensor(found[path][...]) for path in found}


def real(values: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The rows of tokens."""
    dims = {"embed": 0, "unembed": 1}
    cut = {}
    for path, value in values.items():
        dim = dims.get(path.rpartition("/")[2]) if value.dim() == 2 else None
        cut[path] = value if dim is None else value.narrow(dim, 0, size)
    return cut


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for path, value in wanted.items():
        assert torch.equal(got[path], value), path


def by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a `torch_dist` checkpoint, as torch.distributed.checkpoint reads them."""
    reader = dcp.FileSystemReader(str(folder))
    table = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(table, storage_reader=reader, no_dist=True)
    return table


# --- the legacy layout

COLUMNS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_fc1.weight",
)
ROWS = ("linear_proj.weight", "linear_fc2.weight")


def part_of(name: str, value: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """The part of a rank of tensor parallelism, as Megatron divides a model with gates."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)]).clone()
    if name.endswith(COLUMNS):
        return value.chunk(tp)[rank].clone()
    return value.chunk(tp, 1)[rank].clone() if name.endswith(ROWS) else value.clone()


def stage_of(whole: dict[str, torch.Tensor], tied: bool, pp: int, rank: int) -> dict:
    """A pipeline stage's tensors of stacked ones, its layers counted from 0."""
    per = LAYERS // pp
    found = {}
    if rank == 0:
        found["embedding.word_embeddings.weight"] = whole["embedding.word_embeddings.weight"]
    for layer in range(per):
        for key, value in whole.items():
            if key.startswith("decoder.layers."):
                name = key.replace("layers.", f"layers.{layer}.", 1)
                found[name] = value[rank * per + layer]
    if rank == pp - 1:
        found["decoder.final_layernorm.weight"] = whole["decoder.final_layernorm.weight"]
        own = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
        if not tied or pp > 1:
            found["output_layer.weight"] = whole[own]
    return found


def write_ranks(source: Path, out: Path, case: Case) -> None:
    """The files of ``--ckpt-format torch`` with the numbers of a `torch_dist` checkpoint."""
    table, values = read_pickle(source / "common.pt"), by_torch(source)
    args = argparse.Namespace(
        **{**vars(table["args"]), "tensor_model_parallel_size": case.tp,
           "pipeline_model_parallel_size": case.pp, "use_distributed_optimizer": False,
           "ckpt_format": "torch"}
    )  # fmt: skip
    kinds = {"": "weights", "optimizer.state.exp_avg.": "exp_avg",
             "optimizer.state.exp_avg_sq.": "exp_avg_sq", "optimizer.state.fp32_param.": "master"}  # fmt: skip
    whole: dict[str, dict] = {kind: {} for kind in kinds.values()}
    for key, value in values.items():
        prefix = next(p for p in sorted(kinds, key=len, reverse=True) if key.startswith(p))
        if not key.startswith("optimizer.state.param.") and ".layer_norm_" not in key:
            whole[kinds[prefix]][key.removeprefix(prefix)] = value
    for tp in range(case.tp):
        for pp in range(case.pp):
            name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if case.pp > 1 else "")
            (out / name).mkdir(parents=True)
            cut = {
                kind: {n: part_of(n, v, case.tp, tp)
                       for n, v in stage_of(own, case.model.tied, case.pp, pp).items()}
                for kind, own in whole.items() if own
            }  # fmt: skip
            made = {**table, "args": args, "model": cut["weights"], "iteration": table["iteration"]}
            if case.trained:
                made["optimizer"] = plain_optimizer(cut, case.model.dtype == "bfloat16")
            torch.save(made, out / name / "model_optim_rng.pt")


def plain_optimizer(cut: dict[str, dict], masters: bool) -> dict:
    """The state of an optimizer that is not distributed, around torch's where there are masters."""
    groups, state, kept, number = [], {}, [], 0
    for plain in (False, True):
        names = [name for name, value in cut["weights"].items() if (value.dim() == 1) == plain]
        ids = list(range(number, number + len(names)))
        number += len(names)
        groups.append({"params": ids, "wd_mult": float(not plain), "step": 3})
        kept.append([cut["master"][name] for name in names])
        state |= {n: {key: cut[key][name] for key in ("exp_avg", "exp_avg_sq")}
                  for n, name in zip(ids, names, strict=True)}  # fmt: skip
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": kept} if masters else inner


# --- the conversions


def test_every_conversion(seed, tmp_path):
    case = draw(seed)
    model, size = case.model, case.model.vocab_size
    run = make(case, tmp_path / "run")
    wanted = stored(tmp_path / "run")

    # Megatron, and back: padding too
    convert(f"run:{tmp_path / 'run'}", f"megatron:{tmp_path / 'megatron'}")
    folder = tmp_path / "megatron" / (LAST if case.trained else "iter_0000000")
    args, table = read_pickle(folder / "common.pt")["args"], by_torch(folder)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    assert args.padded_vocab_size == -(-size // multiple) * multiple  # as Megatron-LM pads
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert (name in table) == (name.startswith("embedding") or not model.tied)
        for key in [key for key in table if key.endswith(name)]:
            assert table[key].shape == (args.padded_vocab_size, EMBED), key
    assert torch.equal(table["embedding.word_embeddings.weight"], wanted["params/embed"])
    convert(f"megatron:{tmp_path / 'megatron'}", f"run:{tmp_path / 'back'}")
    back = config.load(tmp_path / "back" / "config.toml")
    assert back.gpt == replace(model, fused_projections="auto")
    plain = stored(tmp_path / "back")
    assert_same({p: v for p, v in plain.items() if p in wanted},
                {p: v for p, v in wanted.items() if not JOINED.search(p)})  # fmt: skip

    # in files of ranks
    write_ranks(folder, tmp_path / "ranks", case)
    convert(f"megatron:{tmp_path / 'ranks'}", f"run:{tmp_path / 'of-ranks'}")
    assert config.load(tmp_path / "of-ranks" / "config.toml").gpt == back.gpt
    assert_same(stored(tmp_path / "of-ranks"), plain)

    # Hugging Face, and back: without padding
    convert(f"run:{tmp_path / 'back'}", f"hf:{tmp_path / 'hf'}")
    named = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(named["model.embed_tokens.weight"], wanted["params/embed"][:size])
    assert ("lm_head.weight" in named) == (not model.tied)
    convert(f"hf:{tmp_path / 'hf'}", f"run:{tmp_path / 'of-hf'}")
    params = {path: value for path, value in plain.items() if path.startswith("params/")}
    assert_same(real(stored(tmp_path / "of-hf"), size), real(params, size))
    convert(f"run:{tmp_path / 'of-hf'}", f"megatron:{tmp_path / 'again'}")
    convert(f"megatron:{tmp_path / 'again'}", f"run:{tmp_path / 'last'}")
    assert_same(stored(tmp_path / "last"), stored(tmp_path / "of-hf"))
    assert run.gpt.vocab_size == config.load(tmp_path / "last" / "config.toml").gpt.vocab_size


def test_the_next_loss_is_that_of_the_run(tmp_path, capsys):
    """As README's first run, whose vocabulary of 256 has 384 rows; smaller and on two ranks."""
    (tmp_path / "text.txt").write_text("a few words, and a few more of them\n" * 40)
    data = ["--data", str(tmp_path / "text.txt")]
    small = ["--gpt.num-layers", "2", "--gpt.embed-dim", "16", "--gpt.num-heads", "2",
             "--gpt.mlp-dim", "32", "--seq", "8"]  # fmt: skip
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    halted = ["--steps", "3", "--learning-rate.total-steps", "5", "--mesh", "tp=2"]
    assert main(["train", "--out", run, *small, *data, *halted]) == 0
    assert main(["convert", f"run:{run}", f"megatron:{tmp_path / 'm'}"]) == 0
    assert "128 rows of padding" in capsys.readouterr().out
    assert main(["convert", f"megatron:{tmp_path / 'm'}", f"run:{back}"]) == 0
    for folder in (run, back):
        more = ["--resume", "--steps", "5", "--mesh", "tp=2"]
        assert main(["train", "--out", folder, *more, *data]) == 0
    kept = [run_folder.records(Path(folder))[-2:] for folder in (run, back)]
    for one, other in zip(*kept, strict=True):
        assert one["step"] == other["step"]
        # samples are summed up one by one there
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_what_megatron_has_trained_since_counts_all_rows():
    """Its own arguments lack ours; and one that fits no padded vocabulary is refused."""
    model = GPTConfig(vocab_size=29, vocab_multiple=8)
    args = vars(write_arguments(config.configure(gpt=model), 0))
    assert read_architecture(args) == model
    own = {name: value for name, value in args.items() if name != MASKED_VOCABULARY}
    assert (read_architecture(own).vocab_size, read_architecture(own).padded_vocab) == (32, 32)
    for wrong in (0, 33, "29"):
        with pytest.raises(ValueError, match=r"vocab_size: got .*; wanted 1 to padded.*; fix: "):
            read_architecture({**args, MASKED_VOCABULARY: wrong})


def test_what_was_once_written_without_padding(tmp_path):
    """Its arguments count rows that its tensors have not."""
    sizes = {"vocab_size": 29, "num_layers": 2, "embed_dim": EMBED, "num_heads": 2}
    case = Case(GPTConfig(**sizes, mlp_dim=12, max_seq=16, vocab_multiple=1), True, 1, 1)
    make(case, tmp_path / "run")
    convert(f"run:{tmp_path / 'run'}", f"megatron:{tmp_path / 'old'}")
    file = tmp_path / "old" / LAST / "common.pt"
    table = read_pickle(file, 0, file.stat().st_size)
    table["args"].padded_vocab_size, table["args"].make_vocab_size_divisible_by = 32, 8
    delattr(table["args"], MASKED_VOCABULARY)
    torch.save(table, file)
    convert(f"megatron:{tmp_path / 'old'}", f"run:{tmp_path / 'back'}")
    assert config.load(tmp_path / "back" / "config.toml").gpt == replace(
        case.model, vocab_multiple=8
    )
    back = stored(tmp_path / "back")
    assert_same(real(back, 29), stored(tmp_path / "run"))
    assert back["params/embed"].shape == (32, EMBED)
    assert not back["params/embed"][29:].any()
