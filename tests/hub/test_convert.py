"""Run folders of Hugging Face folders, and back."""

from __future__ import annotations

import json
import math
import os
import shlex
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import apps, checkpoint, gpt, hub, tree
from functron.cli.main import main
from functron.hub.files import open_folder
from functron.optim import make_optimizer, make_schedule
from functron.spmd import Mesh
from functron.spmd.params import abstract_params, decay_mask
from functron.training import config
from functron.training.config import configure
from functron.training.convert import FORMATS, convert, fine_tuning
from functron.training.setup import make_setup
from tests.data.chats import WORDS, make_tokenizer
from tests.hub import tiny


@pytest.fixture
def model(tmp_path):
    made = tiny.make("qwen3")
    path = tiny.store(made, tmp_path / "model", files=3)
    (path / "tokenizer.json").write_text("{}")
    return made, path


def test_there_and_back(model, tmp_path):
    made, path = model
    run, out = tmp_path / "run", tmp_path / "out"
    done = convert(f"hf:{path}", f"run:{run}")
    assert done.config == hub.read_config(path) == config.load(run / "config.toml").gpt
    assert done.files == ("config.json", "generation_config.json", "tokenizer.json")
    assert str(done).endswith(f"in {run}; with config.json, generation_config.json, tokenizer.json")
    assert sorted(os.listdir(run)) == ["checkpoints", "config.toml", "hub"]
    assert (run / "hub" / "config.json").read_bytes() == (path / "config.json").read_bytes()

    like = {"params": abstract_params(gpt.defs(done.config))}
    params = checkpoint.restore(checkpoint.latest(run / "checkpoints"), like)["params"]
    assert checkpoint.steps(run / "checkpoints") == [0]
    tokens = tiny.tokens()
    logits = gpt.forward(done.config, params, tokens)[..., : tiny.VOCAB]
    torch.testing.assert_close(logits, made(tokens).logits.detach(), rtol=1e-5, atol=1e-4)

    convert(f"run:{run}", f"hf:{out}", max_shard_bytes=20_000)
    back = tiny.read_back(out).state_dict()
    assert all(torch.equal(back[name], value) for name, value in made.state_dict().items())
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (path / "config.json").read_text()
    )
    assert (out / "tokenizer.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "run"]


@pytest.mark.full  # test_families.py has the tensors
def test_a_run_with_fused_projections_there_and_back(model, tmp_path):
    made, path = model
    convert(f"hf:{path}", f"run:{tmp_path / 'run'}")
    file = tmp_path / "run" / "config.toml"
    settings = config.load(file)
    file.write_text(config.dump(config.configure(settings, gpt__fused_projections=True)))
    stored = checkpoint.Checkpoint(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    assert "params/blocks/attention/q/w" in stored
    convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}")
    back = tiny.read_back(tmp_path / "out").state_dict()
    assert all(torch.equal(back[name], value) for name, value in made.state_dict().items())


def test_is_evaluated_as_transformers_does(tmp_path, capsys):
    """A text whose length is no multiple of anything, in one window and in windows that slide."""
    table = {**tiny.LLAMA, "vocab_size": 300, "max_position_embeddings": 512}
    torch.manual_seed(0)
    made = tiny.transformers.LlamaForCausalLM(tiny.transformers.LlamaConfig(**table)).double()
    with torch.no_grad():
        made.lm_head.weight.mul_(30)  # so that tokens differ in their likelihood
    path = tiny.store(made.float(), tmp_path / "model")
    tokenizer = tiny.transformers.AutoTokenizer.from_pretrained(make_tokenizer(path))
    text = (WORDS * 3 + "\u00e9\u4f60 ends here").lstrip()
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids
    convert(f"hf:{path}", f"run:{tmp_path / 'run'}")
    reference = made.double()

    def guide(max_length: int, stride: int) -> tuple[float, int]:
        """Hugging Face's guide to perplexity."""
        total, count, previous = 0.0, 0, 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + max_length, ids.shape[1])
            labels = ids[:, begin:end].clone()
            labels[:, : previous - end] = -100
            counted = int((labels[:, 1:] != -100).sum())
            loss = reference(ids[:, begin:end], labels=labels).loss
            total, count, previous = total + float(loss) * counted, count + counted, end
            if end == ids.shape[1]:
                return total / count, count
        raise AssertionError

    for options, (length, stride) in (
        ([], (513, 512)),
        (["--seq", "32", "--stride", "12"], (33, 12)),
        (["--seq", "32"], (33, 32)),
    ):
        want, count = guide(length, stride)
        assert (count, count % 12 > 0, count % 32 > 0) == (ids.shape[1] - 1, True, True)
        data = ["--data", f"x={tmp_path / 'text.txt'}", "--json"]
        assert main(["evaluate", str(tmp_path / "run"), *data, *options]) == 0
        found = json.loads(capsys.readouterr().out)["x"]
        assert found["tokens"] == count
        assert found["loss"] == pytest.approx(want, rel=1e-5)
        first = len(tokenizer.decode(ids[0, :1]).encode())
        bits = want * count / math.log(2) / (len(text.encode()) - first)
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_is_set_to_fine_tune(model, tmp_path, capsys):
    """A small learning rate, no decay of norms; named after what it is in all that is said."""
    _, path = model
    make_tokenizer(path)
    table = json.loads((path / "config.json").read_text())
    run = tmp_path / "run"
    assert main(["convert", f"hf:{path}", f"run:{run}", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert (
        "learning rate up to 2e-05 after a warm-up over 5% of the steps, weight decay 0.01" in said
    )
    assert f"steps of 8 samples of seq {tiny.MAX_SEQ}: " in said
    assert f"functron train --resume --out {run} --data TEXT" in said
    made = config.load(run / "config.toml")
    assert (
        (made.model, made.source) == (table["model_type"], f"hf:{path}") == ("qwen3", f"hf:{path}")
    )
    # its parameters are in its checkpoint: another folder would begin with random ones
    capsys.readouterr()
    new = [
        "train",
        "--config",
        str(run / "config.toml"),
        "--steps",
        "1",
        "--out",
        str(tmp_path / "n"),
    ]
    assert main(new) == 2
    assert (
        f"source: got 'hf:{path}'; wanted no source for a run that begins"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "n").exists()
    assert made.optimizer.fp32_masters  # updates of 2e-5 would round to nothing
    # 40 steps: two of warm-up, then half a cosine to 0
    rate = make_schedule(configure(made, steps=40).rate_schedule)
    assert [float(rate(t)) for t in (0, 1, 2, 21, 40)] == pytest.approx([0, 1e-5, 2e-5, 1e-5, 0])
    # without gradients decay alone acts: p -> p - rate * 0.01 * p on matrices, nothing elsewhere
    defs = gpt.defs(replace(made.gpt, dtype="float64", bias=True))
    params = tree.map(lambda d: torch.full(d.shape, 2.0, dtype=torch.float64), defs)
    settings = replace(made.optimizer, fp32_masters=False)
    step = make_optimizer(settings, 2e-5, mask=decay_mask(defs), defs=defs)
    updates, _ = step.update(tree.map(torch.zeros_like, params), step.init(params), params)
    for leaf, x in zip(tree.paths(updates), tree.leaves(updates), strict=True):
        kept = "norm" in leaf or leaf.endswith("/b")
        wanted = 0.0 if kept else -2e-5 * 0.01 * 2
        torch.testing.assert_close(x, torch.full_like(x, wanted), rtol=1e-12, atol=1e-20, msg=leaf)


def test_steps_of_fine_tuning_fit_into_memory():
    """The first of: all at once, microbatches, chunks of logits, recomputation, shorter samples."""
    model = replace(
        gpt.PRESETS["llama-tiny"], num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2,
        mlp_dim=16, vocab_size=4096,
    )  # fmt: skip
    generous, whole, _ = fine_tuning(model, 1 << 40)
    assert (generous.data.seq, generous.data.global_batch, generous.parallelism.microbatches) == (
        2048,
        8,
        1,
    )
    assert whole == make_setup(generous, Mesh()).program().memory().peak_bytes
    # four fifths of the memory are used: it does not fit, and half as much does
    run, needed, _ = fine_tuning(model, whole)
    assert (run.data.seq, run.parallelism.microbatches) == (2048, 2)
    assert needed <= 0.8 * whole
    least, needed, _ = fine_tuning(model, 1 << 20)
    assert needed > 1 << 20
    assert (least.data.seq, least.parallelism.microbatches, least.compute.remat) == (128, 8, "full")


def test_is_called_what_it_is(tmp_path, capsys):
    """In the log and in config.toml; a prompt to try is of the data."""
    table = {**tiny.LLAMA, "vocab_size": 300, "num_hidden_layers": 1}
    made = tiny.transformers.LlamaForCausalLM(tiny.transformers.LlamaConfig(**table))
    path = tiny.store(made, tmp_path / "model")
    make_tokenizer(path)
    run, text = tmp_path / "run", tmp_path / "text.txt"
    convert(f"hf:{path}", f"run:{run}")
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    options = ["--data", str(text), "--steps", "1", "--global-batch", "2"]
    assert main(["train", "--resume", "--out", str(run), *options]) == 0
    said = capsys.readouterr().out
    assert f"model  llama of hf:{path}: " in said
    hint = said.splitlines()[-1]
    prompt = shlex.split(hint.partition("--prompt")[2])
    assert len(prompt) == 1
    assert prompt[0] in text.read_text().replace("\n", " ")
    kept = config.load(run / "config.toml")
    assert (kept.title, kept.model) == (f"llama of hf:{path}", "llama")
    assert kept.learning_rate.peak == 2e-5
    assert config.load(run / "config.toml", model="llama3-tiny").title == "llama3-tiny"
    assert config.TrainConfig().title == "tiny"
    changed = replace(gpt.PRESETS["tiny"], num_layers=1)
    assert config.configure(gpt=changed).title == "tiny with changes"


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "gpt-oss"])
def test_mixtures_there_and_back(name, tmp_path):
    made = tiny.make(name)
    path = tiny.store(made, tmp_path / "model", files=2)
    done = convert(f"hf:{path}", f"run:{tmp_path / 'run'}")
    assert done.config == config.load(tmp_path / "run" / "config.toml").gpt
    convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}", max_shard_bytes=20_000)
    back = tiny.read_back(tmp_path / "out").state_dict()
    assert all(torch.equal(back[name], value) for name, value in made.state_dict().items())


def test_the_newest_checkpoint_is_exported(model, tmp_path):
    _, path = model
    done = convert(f"hf:{path}", f"run:{tmp_path / 'run'}", max_seq=16)
    assert done.config.max_seq == 16
    params = tree.map(lambda leaf: leaf + 1, hub.load(path, done.config))
    checkpoint.save(
        tmp_path / "run" / "checkpoints" / "7", {"params": params, "step": torch.ones(1)}
    )
    convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}", dtype="bfloat16")
    found = hub.load(tmp_path / "out", replace(done.config, dtype="float32"))
    assert torch.equal(found["norm"]["scale"], params["norm"]["scale"].bfloat16().float())
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table["dtype"] == "bfloat16"
    assert table["max_position_embeddings"] == tiny.MAX_SEQ  # it can still take as much


def test_a_run_that_began_here(tmp_path):
    model = replace(gpt.PRESETS["llama3-tiny"], num_layers=1)
    params = ft.init_params(ft.random.key(0), gpt.defs(model))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config.dump(config.configure(gpt=model)))
    checkpoint.save(run / "checkpoints" / "3", {"params": params})
    done = convert(f"run:{run}", f"hf:{tmp_path / 'out'}")
    assert done.files == ()
    back, tokens = tiny.read_back(tmp_path / "out"), tiny.tokens()
    expected = gpt.forward(model, params, tokens)[..., : model.vocab_size]
    torch.testing.assert_close(back(tokens).logits.detach(), expected, rtol=1e-4, atol=1e-5)
    again = convert(f"hf:{tmp_path / 'out'}", f"run:{tmp_path / 'again'}", dtype="bfloat16")
    assert again.config.dtype == "bfloat16"


def test_a_checkpoint_of_another_model(tmp_path):
    model = replace(gpt.PRESETS["llama3-tiny"], num_layers=1)
    params = ft.init_params(ft.random.key(0), gpt.defs(replace(model, tied=True)))
    params["norm"]["scale"] = torch.ones(3)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config.dump(config.configure(gpt=model)))
    checkpoint.save(run / "checkpoints" / "3", {"params": params})
    with pytest.raises(ValueError, match="params/unembed: got no such leaf; wanted a parameter"):
        convert(f"run:{run}", f"hf:{tmp_path / 'out'}")
    (run / "config.toml").write_text(config.dump(config.configure(gpt=replace(model, tied=True))))
    with pytest.raises(ValueError, match=r"norm/scale: got \[3\]; wanted \[64\], as in the config"):
        convert(f"run:{run}", f"hf:{tmp_path / 'out'}")
    assert os.listdir(tmp_path) == ["run"]


def test_a_damaged_checkpoint_leaves_nothing(model, tmp_path):
    _, path = model
    convert(f"hf:{path}", f"run:{tmp_path / 'run'}")
    data = [file for file in (tmp_path / "run" / "checkpoints").rglob("*") if file.is_file()]
    largest = max(data, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}")
    assert sorted(os.listdir(tmp_path)) == ["model", "run"]


MEGATRON = pytest.mark.applications("megatron")


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        pytest.param("hf:{0}", "hf:x", "from and to: got hf: and hf:; wanted one run: and one hf: or megatron:", marks=MEGATRON),
        pytest.param("{0}", "run:x", r"from: got '.*'; wanted hf:PATH, megatron:PATH, hf-module:PATH, hf-classifier:PATH, hf-embedder:PATH or run:PATH; fix: hf:", marks=MEGATRON),
        pytest.param("hf:{0}", "runs:x", "to: got 'runs:x'; wanted hf:PATH, megatron:PATH, hf-module:PATH, hf-classifier:PATH, hf-embedder:PATH or run:PATH; fix: did you mean 'run'", marks=MEGATRON),
        ("hf:", "run:x", "from: got 'hf:'"),
        ("hf:{0}", "run:{0}", "got an existing path; wanted a new one"),
        ("hf:{0}/none", "run:x", r"config\.json: got No such file"),
        ("run:{0}", "hf:x", r"config\.toml: got No such file"),
        ("hf:{0}", "run:{0}/config.json/x", "got Not a directory; wanted a new folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted(model, tmp_path, monkeypatch, source, target, reason):
    _, path = model
    monkeypatch.chdir(tmp_path)
    formats = {**FORMATS, **apps.load_plugins("functron.formats")}
    with pytest.raises(ValueError, match=reason):
        convert(source.format(path), target.format(path), formats=formats)
    assert os.listdir(tmp_path) == ["model"]


def test_published_entries_and_factors_of_long_ropes_there_and_back(tmp_path, capsys):
    model = tiny.make("phi3", **tiny.LONG_ROPE)
    path = tiny.store(model, tmp_path / "model")
    table = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**table, "unsloth_fixed": True, "made_by": 3}))
    arguments = [f"hf:{path}", f"run:{tmp_path / 'run'}", "--max-seq", "8"]
    assert main(["convert", *arguments]) == 2
    assert "made_by: got 3; wanted an entry that is known" in capsys.readouterr().err
    assert main(["convert", *arguments, "--ignore", "made_by"]) == 0
    assert main(["convert", f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}"]) == 0
    back = tiny.read_back(tmp_path / "out")
    assert all(map(torch.equal, model.state_dict().values(), back.state_dict().values()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["made_by"] == 3


def test_options(model, tmp_path):
    _, path = model
    with pytest.raises(ValueError, match=r"dtype: got 'float16'; wanted a dtype to train in"):
        convert(f"hf:{path}", f"run:{tmp_path / 'run'}", dtype="float16")
    convert(f"hf:{path}", f"run:{tmp_path / 'run'}")
    with pytest.raises(ValueError, match="max_seq: got 3; wanted nothing"):
        convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}", max_seq=3)
    with pytest.raises(ValueError, match="dtype: got 'bf16'"):
        convert(f"run:{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}", dtype="bf16")
    with pytest.raises(ValueError, match=r"functron train --precision fp8-row quantises products"):
        convert(f"hf:{path}", f"run:{tmp_path / 'more'}", quantise="fp8-row")
    assert sorted(os.listdir(tmp_path)) == ["model", "run"]
    out = tmp_path / "out"
    assert main(["convert", f"run:{tmp_path / 'run'}", f"hf:{out}", "--quantise", "fp8-row"]) == 0
    found = open_folder(out).shapes()
    scales = {name for name in found if name.endswith("weight_scale")}
    assert len(scales) == 7 * tiny.LAYERS
    assert all(found[s.removesuffix("_scale")][1] == torch.float8_e4m3fn for s in scales)
