"""Places that are not on this machine, such as s3://bucket: refused at once, wherever they stand."""

from __future__ import annotations

import pickle
import time
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from functron import checkpoint, data, hub
from functron.checkpoint import Placement
from functron.cli import compare, doctor, plan, store
from functron.cli import train as train_command
from functron.cli.main import _PLACED, main
from functron.core.errors import local_path, remote_problem
from functron.data.preprocess import PreprocessSettings, preprocess
from functron.models.gpt import GPTConfig
from functron.spmd import Mesh
from functron.training.config import TrainConfig, configure, load
from functron.training.convert import convert
from functron.training.run import prepare
from functron.training.train import train

GUARD, MEGATRON, PLANNER = map(pytest.mark.applications, ("guard", "megatron", "planner"))
COMMANDS = [
    "train --out s3://b/run --steps 1",
    "train --out=gs://b/run --dry-run",
    "train --out S3://b/run --resume",
    "train --out s3:/b/run",
    "train --out file:///tmp/run",
    "train --config hdfs://b/run.toml",
    "train --data https://b/text.txt --dry-run",
    "train --data 0.3_s3://b/x_0.7_y",
    "train --eval-every 1 --eval-data wiki=abfss://c@a.net/x",
    "train --tokenizer az://b/t",
    "train --order megatron --order-cache s3://b/t",
    "train --schedule s3://b/table",
    "train --memory-folder s3://b",
    "train --elastic dp=1:2 --slots s3://b",
    "convert hf:s3://b/m run:r",
    "convert run:r hf:gs://b/m",
    "convert run:r megatron:gs://b/m",
    "evaluate s3://b/run",
    "sample s3://b/run --prompt x",
    "sample r --prompt x --tokenizer s3://b",
    "sample --prompt hi s3://b/run",
    "sample --prompt=hi s3://b/run",
    pytest.param("plan --out s3://b/plan.toml", marks=PLANNER),
    pytest.param("plan hf:s3://b/m", marks=PLANNER),
    pytest.param("plan --picture s3://b/p.svg", marks=PLANNER),
    pytest.param("plan --try 1 --refit s3://b/m.toml", marks=PLANNER),
    pytest.param("plan --timeline s3://b/p.json", marks=PLANNER),
    "trace s3://b/run",
    "params s3://b/run",
    "compare s3://b/r r --svg gs://b/c.svg",
    pytest.param("rerun s3://b/run --step 1", marks=GUARD),
    "checkpoint ls s3://b/run",
    pytest.param("migrate s3://b/run.sh --out gs://b/c.toml", marks=MEGATRON),
    "upcycle s3://b/r run",
    "preprocess s3://b/x --tokenizer bytes --out gs://b/x",
    "schedule s3://b/table --pp 2 --microbatches 2",
    "doctor --mesh dp=1 --nproc 1 --out s3://b/h.json",
]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """The working directory, in which nothing is made."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_takes_such_a_place(line, empty, capsys):
    begun = time.monotonic()
    assert main([word.replace("_", " ") for word in line.split()]) == 2
    assert time.monotonic() - begun < 1
    said = capsys.readouterr().err
    assert "wanted a path of this machine" in said
    assert "fix: " in said


@MEGATRON
def test_variables_of_a_launch_line_may_name_any_place(empty, capsys):
    env = ["--env", "A=1", "DATA=s3://b/x", "LOG=gs://b", "--with", "bf16", "save=s3://b"]
    assert main(["migrate", "gone.sh", *env]) == 2
    assert "a path of this machine" not in capsys.readouterr().err
    assert main(["migrate", *env, "s3://b/run.sh"]) == 2
    assert "argument: got 's3://b/run.sh'" in capsys.readouterr().err


def test_text_may_speak_of_any_place(empty, capsys):
    for words in (["--prompt", "read s3://b/x"], ["--prompt=read s3://b/x"]):
        assert main(["sample", "r", *words]) == 2
        assert "a path of this machine" not in capsys.readouterr().err


NAMED = {
    "sample --no-chat s3://b": "argument",
    "sample --chat s3://b": "argument",
    "sample --prompt hi s3://b": "argument",
    "sample --prompt hi --tokenizer s3://b": "--tokenizer",
    "train --out r --resume s3://b": "argument",
    "train --out_dir=s3://b": "--out-dir",
    "train --order_cache s3://b": "--order-cache",
    "compare --svg c.svg s3://b": "argument",
}


@pytest.mark.parametrize("line", NAMED)
def test_what_names_the_place_is_named(line, empty, capsys):
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert f"- {NAMED[line]}: got 's3://b'" in said, said


def test_the_options_whose_values_are_places_are_known():
    """All that the commands have: fields that are paths, or that configurations say are."""
    kinds = [plan.PlanOptions, store.MigrateOptions, train_command.TrainOptions]
    kinds += [compare.CompareOptions, doctor.DoctorOptions, store.UpcycleOptions]
    found = {f"--{name.replace('_', '-')}" for name in (*PLACES, "memory_folder", "slots")}
    for kind in kinds:
        for name, hint in typing.get_type_hints(kind).items():
            if hint in (Path, Path | None):
                found.add(f"--{name.replace('_', '-')}")
    assert found - {"--source", "--run", "--path", "--options"} <= set(_PLACED)


PLACES = ("data", "tokenizer", "eval_data", "order_cache", "schedule", "out")


@pytest.mark.parametrize("name", [*PLACES, "memory_folder", pytest.param("slots", marks=GUARD)])
def test_no_configuration_has_such_a_place(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: got 's3://b/x'; wanted a path of this machine"):
        configure(**{name: "s3://b/x"})
    with pytest.raises(ValueError, match=name):
        configure(TrainConfig(), **{name: "gs://b/x"})
    file = tmp_path / "run.toml"
    file.write_text(f'{name} = "s3://b/x"\n')
    with pytest.raises(ValueError, match=name):
        load(file)


def _train(path):
    return train(prepare(configure(steps=1, seq=8, global_batch=1), Mesh()), path)


STATE = {"w": torch.ones(2)}
CALLS = {
    "train": _train,
    "save": lambda path: checkpoint.save(path, STATE),
    "saver": lambda path: checkpoint.Saver(path, Placement.of(STATE)),
    "read": checkpoint.Checkpoint,
    "steps": checkpoint.steps,
    "hub.save": lambda path: hub.save(path, GPTConfig(), {}),
    "hub.load": hub.load_model,
    "tokens": data.open_tokens,
    "writer": lambda path: data.IndexedWriter(path, np.dtype("int32")),
    "text": lambda path: data.TextWindows(path, 8),
    "tokenizer": data.open_tokenizer,
    "preprocess": lambda path: preprocess(PreprocessSettings(("x",), "bytes", str(path).replace(":/", "://"))),
    "convert": lambda path: convert("run:r", f"hf:{str(path).replace(':/', '://')}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_no_function_takes_such_a_place(name, empty):
    """A path of pathlib has one slash where the name of the place has two."""
    with pytest.raises(ValueError, match="wanted a path of this machine"):
        CALLS[name](Path("s3://bucket/run"))


@pytest.mark.parametrize("fine", ["run", "/a/b", "C:/run", "a:b", "hf:/a/b", "x=/y", "1:2", "~/r"])
def test_paths_of_this_machine_are_taken(fine):
    assert remote_problem("out", fine) is None
    assert local_path(fine) == Path(fine)
    assert pickle.loads(pickle.dumps(configure(out=fine))).out == fine
