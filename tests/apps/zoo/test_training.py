"""`functron train` and `functron sample` with architectures beside the GPT."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import functron as ft
from functron import bert, checkpoint, mamba, random, t5, tree
from functron.apps.zoo.bert import BertConfig
from functron.apps.zoo.denoising import Sentinels, spans_of
from functron.apps.zoo.t5 import respond
from functron.cli.main import main
from functron.data import Blend, IndexedWriter, Tokenizer
from functron.data.sampling import Transformed
from functron.data.tokenizer import ByteTokenizer
from functron.models.family import family_of, list_presets, trained_families
from functron.models.generation import Draw
from functron.spmd import Mesh
from functron.training import data as corpus
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure, dump, load, with_model
from functron.training.run import prepare
from functron.training.setup import make_setup
from tests.data.chats import corpus as chats
from tests.data.chats import make_tokenizer, write_lines

TEXT = argparse.__file__
HYBRID = [
    "--model", "mamba2-hybrid-tiny", "--data", TEXT, "--seq", 12, "--global-batch", 4,
    "--mamba.embed-dim", 16, "--mamba.head-dim", 4, "--mamba.state-dim", 4, "--mamba.chunk", 5,
    "--mamba.mlp-dim", 24, "--mamba.attention-heads", 4, "--mamba.attention-kv-heads", 2,
    "--mamba.pattern", "M-*", "--mamba.dtype", "float64", "--mamba.dropout", 0.1,
    "--learning-rate.total-steps", 4, "--eval-every", 2, "--eval-data", f"text={TEXT}",
    "--eval-batches", 1,
]  # fmt: skip
BERT = [
    "--model", "bert-tiny", "--data", TEXT, "--seq", 16, "--global-batch", 4,
    "--bert.embed-dim", 16, "--bert.num-heads", 2, "--bert.mlp-dim", 24, "--bert.dtype", "float64",
    "--bert.dropout", 0.1, "--learning-rate.total-steps", 4, "--eval-every", 2,
    "--eval-data", f"text={TEXT}", "--eval-batches", 1,
]  # fmt: skip
T5 = [
    "--model", "t5-tiny", "--data", TEXT, "--seq", 24, "--global-batch", 4, "--t5.embed-dim", 16,
    "--t5.num-heads", 2, "--t5.mlp-dim", 24, "--t5.num-layers", 1, "--t5.dtype", "float64",
    "--t5.dropout", 0.1, "--learning-rate.total-steps", 4, "--eval-every", 2,
    "--eval-data", f"text={TEXT}", "--eval-batches", 1,
]  # fmt: skip
MAMBA = mamba.MambaConfig(
    pattern="M*", vocab_size=11, embed_dim=12, num_heads=4, head_dim=3, state_dim=2, chunk=3,
    attention_heads=2, vocab_multiple=16, init_stddev=0.5, dtype="float64",
)  # fmt: skip


def train(*arguments) -> int:
    return main(["train", *map(str, arguments)])


def losses(run) -> list[float]:
    return [record["loss"] for record in run_folder.records(run)]


def problems(config: TrainConfig) -> str:
    with pytest.raises(ValueError, match="cannot train with this configuration") as caught:
        validate(config)
    return str(caught.value)


# configurations


@pytest.mark.parametrize("model", ["mamba2-tiny", "nemotron-h-8b", "bert-base", "t5-small"])
def test_toml_there_and_back(tmp_path, model):
    config = with_model(configure(steps=3), model)
    assert config.architecture is list_presets()[model]
    file = tmp_path / "config.toml"
    file.write_text(dump(config))
    assert load(file) == config
    assert "[gpt]" not in file.read_text()
    again = load(file, model="gpt2")  # another preset, and the rest of the file
    assert again == with_model(configure(steps=3), "gpt2")
    assert again.mamba is None


def test_a_config_without_a_preset_comes_back(tmp_path):
    file = tmp_path / "config.toml"
    for config in (configure(mamba=MAMBA), with_model(configure(mamba=MAMBA), "gpt2")):
        file.write_text(dump(config))
        assert load(file) == config
    file.write_text('model = "mamba2-tiny"\n[mamba]\npattern = "M"\n')
    assert load(file).mamba == dataclasses.replace(list_presets()["mamba2-tiny"], pattern="M")
    file.write_text('model = "mamba-tiny"\n[mamba]\npatern = "M"\n')
    with pytest.raises(ValueError, match="did you mean 'mamba2-tiny'") as caught:
        load(file)
    assert "mamba.patern: got an unknown key" in str(caught.value)


def test_names_of_presets_are_unique():
    assert len(list_presets()) == sum(len(family.presets) for family in trained_families().values())
    for name, config in list_presets().items():
        assert name in family_of(config).presets
    with pytest.raises(TypeError, match="family_of: got int"):
        family_of(3)


def test_what_a_mamba_cannot_be_trained_with(tmp_path):
    config = with_model(configure(mesh="pp=2", lora_rank=2, loss_chunk_tokens=8), "mamba2-tiny")
    said = problems(configure(config, gpt=list_presets()["gpt2"], mask_documents=True))
    for line in (
        "mesh: got pp=2; wanted pp=1 for this model; fix: put those ranks on dp, fsdp or tp",
        "gpt: got settings of a GPT; wanted nothing beside [mamba]",
        "lora_rank: got 2 with a Mamba-2 model; wanted a GPT; fix: train all parameters",
        "loss_chunk_tokens: got 8 with a Mamba-2 model; wanted 0",
        "mask_documents: got True with a Mamba-2 model; wanted a GPT",
    ):
        assert line in said
    for mesh in ("cp=2", "ulysses=2", "ep=2"):
        assert f"got {mesh}; wanted {mesh[:-1]}1 for" in problems(configure(config, mesh=mesh))
    small = configure(TrainConfig(), mamba=MAMBA)
    assert "mamba.vocab_size: got 11 token ids; wanted at least 256" in problems(small)


def test_upcycling_needs_a_gpt(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(dump(configure(mamba=MAMBA)))
    assert main(["upcycle", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "got a Mamba-2 model; wanted a run of a dense GPT" in capsys.readouterr().err


def test_commands_that_show_models(capsys):
    assert main(["params", "--model", "mamba2-tiny", "--mesh", "tp=2"]) == 0
    assert "80,944 parameters" in capsys.readouterr().out


# training


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A run of 4 steps on one rank, saved after every second one."""
    run = tmp_path_factory.mktemp("hybrid") / "run"
    assert train(*HYBRID, "--steps", 4, "--save-every", 2, "--out", run) == 0
    return run


@pytest.mark.parametrize(
    "options",
    [
        "--mesh dp=2,tp=2 --sequence-parallel",
        "--mesh dp=2,fsdp=2 --remat full --zero 2",
    ],
)
def test_meshes_train_what_one_rank_does(options, hybrid, tmp_path):
    watched = ["--log-layers-every", 2]
    assert train(*HYBRID, *watched, "--steps", 3, "--out", tmp_path / "run", *options.split()) == 0
    torch.testing.assert_close(losses(tmp_path / "run"), losses(hybrid)[:3], rtol=1e-10, atol=0)
    first, second, _ = run_folder.records(tmp_path / "run")
    held_out = [
        record["eval"]["text"]["loss"] for record in (second, run_folder.records(hybrid)[1])
    ]
    torch.testing.assert_close(*held_out, rtol=1e-10, atol=0)
    norms = [layer["grad_norm"] ** 2 for layer in first["layers"].values()]
    torch.testing.assert_close(sum(norms) ** 0.5, first["grad_norm"], rtol=1e-10, atol=0)


def test_the_first_loss_is_that_of_the_forward_pass():
    config = configure(mamba=MAMBA, format="mock", seq=6, global_batch=3)
    run = prepare(config, Mesh())
    batch, weights = run.batch(0), tree.map(torch.clone, run.state.params)
    logits = mamba.forward(MAMBA, weights, batch["tokens"])[..., :11]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    _, metrics = run.step(run.state, batch)
    torch.testing.assert_close(metrics["loss"], expected, rtol=1e-12, atol=0)


def test_goes_on_to_the_bit(hybrid, tmp_path, capsys):
    cut = tmp_path / "cut"
    shutil.copytree(hybrid, cut)
    shutil.rmtree(cut / "checkpoints" / "4")
    assert train("--out", cut, "--resume") == 0
    assert losses(cut) == losses(hybrid)
    ends = [checkpoint.restore(run / "checkpoints" / "4") for run in (hybrid, cut)]
    for path, a, b in zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True):
        assert torch.equal(a, b), path
    assert train("--out", cut, "--resume", "--mamba.pattern", "MM") == 2
    assert "mamba.pattern: got 'MM'; wanted 'M-*', as in the run" in capsys.readouterr().err
    assert train("--out", cut, "--resume", "--model", "tiny") == 2
    assert "model: got a GPT; wanted a Mamba-2 model, as in the run" in capsys.readouterr().err


def test_learns_from_conversations(tmp_path):
    folder = make_tokenizer(tmp_path / "tokenizer")
    data = write_lines(tmp_path / "chats.jsonl", chats(6))
    size = Tokenizer(folder).vocab_size
    config = configure(
        mamba=dataclasses.replace(MAMBA, vocab_size=size), data=str(data), tokenizer=str(folder),
        seq=96, global_batch=2, steps=1,
    )  # fmt: skip
    validate(config)
    run = prepare(config, Mesh())
    _, metrics = run.step(run.state, run.batch(0))
    assert metrics["loss"].isfinite()


def test_programs_of_presets_need_no_memory():
    config = with_model(configure(seq=2048, mesh="dp=2,tp=2"), "mamba2-2.7b")
    assert (
        make_setup(config, Mesh.parse(config.parallelism.mesh)).program().cost().hardware_flops
        > 1e12
    )


# masks


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A run of a BERT on one rank, of 4 steps, saved after every second one."""
    run = tmp_path_factory.mktemp("bert") / "run"
    assert train(*BERT, "--steps", 4, "--save-every", 2, "--out", run) == 0
    return run


def test_a_bert_trains_on_a_mesh_and_goes_on(masked, tmp_path, capsys):
    run, mesh = tmp_path / "run", ["--mesh", "dp=2,tp=2", "--sequence-parallel", "--zero", 2]
    assert train(*BERT, *mesh, "--microbatches", 2, "--steps", 2, "--out", run) == 0
    assert "functron sample" not in capsys.readouterr().out
    back = ["--mesh", "fsdp=2", "--zero", 0, "--no-sequence-parallel", "--steps", 4]
    assert train("--out", run, "--resume", *back) == 0
    torch.testing.assert_close(losses(run), losses(masked), rtol=1e-10, atol=0)
    held_out = [run_folder.records(each)[1]["eval"]["text"] for each in (run, masked)]
    torch.testing.assert_close(held_out[0]["loss"], held_out[1]["loss"], rtol=1e-10, atol=0)
    assert 0 < held_out[0]["tokens"] < 4 * 16
    assert train("--out", run, "--resume", "--mask-rate", 0.2) == 2
    assert "mask_rate: got 0.2; wanted 0.15, as in the run" in capsys.readouterr().err
    assert main(["sample", str(run), "--prompt", "def "]) == 2
    assert "got a run of a BERT; wanted one that continues text" in capsys.readouterr().err


def test_masked_samples_are_the_text(tmp_path):
    config = configure(with_model(configure(data=TEXT, seq=64), "bert-tiny"), seed=3)
    plain = corpus.open_samples(configure(data=TEXT, seq=64, seed=3))
    samples = corpus.open_samples(config)
    assert isinstance(samples, Transformed)
    whole, text = samples.batch(5, 64), plain.batch(5, 64)
    chosen = whole["targets"] != ft.nn.IGNORE_INDEX
    assert abs(float(chosen.double().mean()) - 0.15) < 4 * (0.15 * 0.85 / 4096) ** 0.5
    assert torch.equal(whole["targets"][chosen], text["tokens"][chosen])
    assert torch.equal(whole["tokens"][~chosen], text["tokens"][~chosen])
    hidden = (whole["tokens"][chosen] == 257).double().mean()
    assert abs(float(hidden) - 0.8 - 0.1 / 258) < 4 * (0.16 / int(chosen.sum())) ** 0.5
    # a sample has the same masks in every part, and in batches of any size
    halves = [samples.batch(5, 64, (index, 2))["tokens"] for index in (0, 1)]
    assert torch.equal(torch.cat(halves), whole["tokens"])
    smaller = torch.cat([samples.batch(step, 16)["tokens"] for step in range(20, 24)])
    assert torch.equal(smaller, whole["tokens"])
    # and others when it comes again
    again = samples.draw(np.array([7, 7 + samples.num_samples]))
    assert not torch.equal(*(again["targets"] != ft.nn.IGNORE_INDEX).unbind(0))


def test_masks_of_tokens_on_disk_and_tokenizers(tmp_path):
    blend = {name: _tokens(tmp_path / name, low) for name, low in (("a", 0), ("b", 40))}
    config = with_model(configure(seq=8, global_batch=16, mask_token=90), "bert-tiny")
    config = configure(config, data=f"0.5 {blend['a']} 0.5 {blend['b']}")
    samples = corpus.open_samples(config)
    assert isinstance(samples, Blend)
    batch = samples.batch(0, 16)
    assert ((batch["tokens"] == 90) & (batch["targets"] >= 0)).any()
    assert set(samples.progress(16)) == set(map(str, blend.values()))
    validate(config)
    # nothing says which id is free: the last one is, and text that has it is refused
    model = dataclasses.replace(list_presets()["bert-tiny"], vocab_size=80)
    config = configure(config, mask_token=-1, bert=model)
    samples = corpus.open_samples(config)
    with pytest.raises(ValueError, match="id 79 at token"):
        samples.batch(0, 48)  # an epoch
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    ids = Tokenizer(tokenizer).special_tokens
    file = tokenizer / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "[MASK]"))
    config = configure(tokenizer=str(tokenizer), bert=BertConfig(vocab_size=310), data=TEXT)
    config = configure(config, seq=32)
    batch = corpus.open_samples(config).batch(0, 8)
    assert (batch["tokens"] == ids["<|im_start|>"]).any()


def _tokens(place, low: int):
    """40 ids in turn, on disk."""
    with IndexedWriter(place, np.uint16) as writer:
        for _ in range(5):
            writer.add(np.arange(low, low + 40))
    return place


def test_what_a_bert_cannot_be_trained_with():
    config = with_model(configure(mask_rate=1.5, seq=1000, pack="best-fit"), "bert-tiny")
    small = dataclasses.replace(list_presets()["bert-tiny"], vocab_size=257)
    said = problems(configure(config, bert=small, data="chats.jsonl"))
    for line in (
        "mask_rate: got 1.5; wanted above 0 and below 1",
        "seq: got 1000; wanted at most bert.max_seq=512",
        "pack: got best-fit with a BERT; wanted a GPT",
        "data: got conversations for a BERT; wanted text or tokens; fix: read them as text",
        "bert.vocab_size: got 257 token ids; wanted at least 258: 257 of text, and 1 that hide",
    ):
        assert line in said
    said = problems(configure(mask_token=3))
    assert "mask_token: got 3; wanted nothing with a GPT" in said
    said = problems(with_model(configure(mask_token=300), "bert-tiny"))
    assert "mask_token: got 300; wanted an id below bert.vocab_size=258" in said


# spans


@pytest.fixture(scope="module")
def restoring(tmp_path_factory):
    """A run of a T5 on one rank, of 4 steps, saved after every second one."""
    run = tmp_path_factory.mktemp("t5") / "run"
    assert train(*T5, "--steps", 4, "--save-every", 2, "--out", run) == 0
    return run


@pytest.mark.distributed
def test_a_t5_trains_on_a_mesh_and_goes_on_in_processes(restoring, tmp_path, capsys, in_processes):
    run, mesh = tmp_path / "run", ["--mesh", "dp=2,tp=2", "--zero", 1, "--microbatches", 2]
    assert train(*T5, *mesh, "--steps", 2, "--out", run) == 0
    (prompt,) = re.findall(r"--prompt (.*)$", capsys.readouterr().out, re.M)
    *words, hidden = shlex.split(prompt)[0].split()
    assert hidden == "<extra_id_0>"
    assert words
    assert all(word in Path(TEXT).read_text() for word in words)
    back = ["--mesh", "tp=2", "--zero", 0, "--microbatches", 1, "--sequence-parallel"]
    in_processes(2, "train", "--out", run, "--resume", *back, "--steps", 4)
    torch.testing.assert_close(losses(run), losses(restoring), rtol=1e-10, atol=0)
    held_out = [run_folder.records(each)[1]["eval"]["text"] for each in (run, restoring)]
    assert held_out[0]["tokens"] == 4 * 6
    torch.testing.assert_close(held_out[0]["loss"], held_out[1]["loss"], rtol=1e-10, atol=0)
    assert train("--out", run, "--resume", "--mean-span", 2) == 2
    assert "mean_span: got 2.0; wanted 3.0, as in the run" in capsys.readouterr().err


def test_samples_with_spans_are_the_text():
    config = with_model(configure(data=TEXT, seq=64, seed=3), "t5-tiny")
    spans = spans_of(64)
    plain = corpus.open_samples(configure(data=TEXT, seq=spans.length, seed=3))
    text = plain.batch(2, 8)["tokens"].tolist()
    batch = corpus.open_samples(config).batch(2, 8)
    for row, read, said in zip(
        text, *(batch[x].tolist() for x in ("tokens", "targets")), strict=True
    ):
        assert read[-1] == said[-1] == 256
        for number in range(spans.count):  # put each back in its place
            sentinel = 383 - number
            start = said.index(sentinel) + 1
            stop = next(i for i in range(start, len(said)) if said[i] >= 256)
            at = read.index(sentinel)
            read[at : at + 1] = said[start:stop]
        assert read[:-1] == row


def test_what_a_t5_cannot_be_trained_with(tmp_path):
    config = with_model(configure(mean_span=0.5, format="chat", fim_rate=0.5), "t5-tiny")
    said = problems(config)
    for line in (
        "seq: got 128; wanted mean: got 0.5; wanted at least 1",
        "data: got conversations for a T5",
        "fim_rate: got 0.5 with a T5; wanted a model that predicts the next token",
    ):
        assert line in said
    config = with_model(TrainConfig(), "t5-tiny")
    small = dataclasses.replace(list_presets()["t5-tiny"], vocab_size=260)
    assert "t5.vocab_size: got 260 token ids; wanted at least 264: 257 of text, and 7" in problems(
        configure(config, t5=small)
    )
    assert "mask_token: got 3; wanted an id below t5.vocab_size=384, and above 5: sentinels" in (
        problems(configure(config, mask_token=3))
    )
    split = configure(config, mesh="tp=2", sequence_parallel=True, seq=36)
    said = problems(split)
    assert (
        "seq: got 36, for which the decoder has 9 targets; wanted a multiple of tp=2 of them"
        in said
    )
    found = re.search(r"set it to (\d+), or leave sequence_parallel out", said)
    assert found is not None
    validate(configure(split, seq=int(found[1])))
    disk = configure(config, data=str(_tokens(tmp_path / "a", 0)), seq=8)
    assert "end_token: got -1 for a tokenizer without one" in problems(disk)
    samples = corpus.open_samples(configure(disk, end_token=300))
    assert (samples.batch(0, 3)["tokens"][:, -1] == 300).all()
    said = problems(with_model(configure(mean_span=2.0, end_token=3), "bert-tiny"))
    assert "mean_span: got 2.0; wanted nothing with a BERT" in said
    assert "end_token: got 3; wanted nothing with a BERT" in said


def test_a_t5_says_what_its_forward_pass_does():
    model = t5.T5Config(
        vocab_size=11, embed_dim=8, num_heads=2, mlp_dim=8, num_layers=1, vocab_multiple=16,
        init_factor=3.0, dtype="float64",
    )  # fmt: skip
    weights = ft.init_params(random.key(0), t5.defs(model))
    read = torch.tensor([[1, 2, 10, 3, 4], [5, 6, 10, 7, 4]])
    said = respond(weights, model, read, 4, draw=Draw(0.0))
    given = torch.cat([torch.zeros(2, 1, dtype=torch.int64), said[:, :-1]], 1)
    logits = t5.forward(model, weights, read, given)[..., :11]
    assert torch.equal(said, logits.argmax(-1))
    with pytest.raises(ValueError, match="key: got None; wanted a key"):
        respond(weights, model, read, 4, draw=Draw(1.0))
    # neither 8 numbers nor 2 heads divide, of which ranks have parts with padding
    mesh, uneven = Mesh(fsdp=3, tp=3), ("embed", "vocab", "heads", "mlp")
    specs = ft.param_specs(t5.defs(model), t5.rules(model, mesh, uneven=uneven))
    options, several = ft.ModelOptions(gather=ft.Gather(specs)), torch.cat([read, read[:1]])
    split = respond(weights, model, several, 4, draw=Draw(0.0), mesh=mesh, options=options)
    assert torch.equal(split, torch.cat([said, said[:1]]))
    names = Sentinels(10, 3, 4)
    letters = ByteTokenizer()
    assert names.encode("a<extra_id_0>b<extra_id_2>", letters) == [97, 10, 98, 8, 4]
    assert names.decode([10, 97, 98, 9, 4], letters) == "<extra_id_0>ab<extra_id_1>\x04"


def test_the_command_restores(restoring, capsys):
    sample = ["sample", str(restoring), "--tokens", "5", "--prompt"]
    assert main([*sample, "def <extra_id_0>"]) == 0
    assert main([*sample, "<extra_id_7>"]) == 2
    assert (
        "prompt: got <extra_id_7>; wanted <extra_id_0> to <extra_id_0>" in capsys.readouterr().err
    )
    assert main([*sample, "def", "--chat"]) == 2


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of a GPT with adapters, on one rank."""
    run = tmp_path_factory.mktemp("gpt") / "run"
    options = ["--model", "llama3-tiny", "--data", TEXT, "--seq", 16, "--global-batch", 4]
    options += ["--gpt.num-layers", 1, "--gpt.max-seq", 16, "--gpt.embed-dim", 32]
    options += ["--gpt.num-heads", 4, "--gpt.num-kv-heads", 2, "--gpt.mlp-dim", 48]
    options += ["--gpt.dtype", "float64", "--lora-rank", 2, "--learning-rate.peak", 0.03]
    assert train(*options, "--steps", 2, "--out", run) == 0
    return run


def sampled(run, *options) -> list[str]:
    """The prompt and 20 tokens, which go beyond the context of `adapted`."""
    prompt = "def <extra_id_0>" if "t5" in str(run) else "def "
    return ["sample", str(run), "--prompt", prompt, "--tokens", "20", *options]


@pytest.mark.pairwise(of=lambda name, mesh: [{"name": name}, {"mesh": mesh}])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2,tp=2"])
@pytest.mark.parametrize("name", ["adapted", "restoring"])
def test_the_text_is_the_same_on_every_mesh(name, mesh, request, capsys):
    run = request.getfixturevalue(name)
    capsys.readouterr()
    for options in ([], ["--temperature", "0"]):
        assert main(sampled(run, *options)) == 0
        wanted = capsys.readouterr()
        assert main(sampled(run, *options, "--mesh", mesh)) == 0
        got = capsys.readouterr()
        assert got.out == wanted.out
        assert not wanted.err
        assert "ranks simulated in this process (--nproc" in got.err


IN_PROCESSES = """
import torch
import torch.distributed as dist
import functron as ft
from functron import Mesh, gpt, random, t5
from functron.apps.zoo.t5 import respond
from functron.models.generation import Draw

dist.init_process_group("gloo")
small = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 24, "num_layers": 1, "vocab_size": 11}
small |= {"vocab_multiple": 16, "dtype": "float64"}

# rows that end at different times, on ranks that gather parameters from each other
mesh = Mesh(fsdp=2).bind()
config = gpt.GPTConfig(**small, max_seq=32, init_stddev=0.5)
weights = ft.init_params(random.key(0), gpt.defs(config))
tokens = torch.tensor([[1], [2]])
free = ft.generate(weights, config, tokens, 8, key=random.key(1))
options = {"key": random.key(1), "stop": {int(free[0, 1])}}
assert free[0, 1] not in free[1, 1:4]
wanted = ft.generate(weights, config, tokens, 8, **options)
own = ft.shard(weights, ft.param_specs(gpt.defs(config), gpt.rules(config, mesh)), mesh)
got = ft.generate(own, config, tokens[mesh.rank :][:1], 8, mesh=mesh, **options)
assert torch.equal(got, wanted[mesh.rank :][:1])

mesh = Mesh(tp=2).bind()
config = t5.T5Config(**small, init_factor=2.0)
weights = ft.init_params(random.key(0), t5.defs(config))
options = {"draw": Draw(1.0), "key": random.key(1)}
wanted = respond(weights, config, tokens, 8, **options)
own = ft.shard(weights, ft.param_specs(t5.defs(config), t5.rules(config, mesh)), mesh)
assert torch.equal(respond(own, config, tokens, 8, mesh=mesh, **options), wanted)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_processes_sample_the_same_text(adapted, torchrun, in_processes, capsys):
    torchrun(IN_PROCESSES, 2, timeout=300)
    capsys.readouterr()
    assert main(sampled(adapted)) == 0
    done = in_processes(2, *sampled(adapted, "--mesh", "fsdp=2"))
    assert done.stdout == capsys.readouterr().out


def test_where_sampling_is_refused(adapted, hybrid, restoring, capsys):
    for run, options, said in (
        (adapted, ("--mesh", "pp=2"), "mesh: got pp=2; wanted data, expert and tensor-parallel"),
        (adapted, ("--mesh", "tp=3"), "num_heads: got 4; wanted a multiple of tp=3"),
        (adapted, ("--mesh", "tp=2", "--nproc", "4"), "nproc: got 4 for a mesh of 2; wanted one"),
        (restoring, ("--mesh", "cp=2"), "got cp=2; wanted cp=1 for this model; fix: put those"),
        (hybrid, ("--mesh", "tp=2"), "mesh: got tp=2; wanted one rank with a Mamba-2 model; fix:"),
    ):
        assert main(sampled(run, *options)) == 2
        assert said in capsys.readouterr().err


# FLOPs


def test_flops_per_token():
    """By hand, of a layer of each kind; norms and the like count as matrices do."""
    config = dataclasses.replace(MAMBA, pattern="M*-", mlp_dim=7, tied=False)
    weights = ft.num_params(mamba.defs(config)) - 16 * 12  # but for the embedding
    states, attention = 4 * 3 * 2, 12 * 12 * 5
    assert mamba.flops_per_token(config, 5, whole=True) == 6 * weights + 15 * states + attention
    assert mamba.flops_per_token(config, 5) == 6 * weights + 15 * states + attention // 2
    small = BertConfig(vocab_size=11, num_layers=2, embed_dim=6, num_heads=2, mlp_dim=7, max_seq=5)
    small = dataclasses.replace(small, vocab_multiple=4)
    block = 4 * (6 * 6 + 6) + 2 * 6 * 7 + 6 + 7 + 4 * 6
    head = 12 * 6 + 12 + 6 * 6 + 6 + 2 * (6 + 6)  # with the norms of embedding and head
    pair = t5.T5Config(
        vocab_size=11, num_layers=2, decoder_layers=1, embed_dim=6, num_heads=2, mlp_dim=7,
        vocab_multiple=4, num_buckets=4, gated=False,
    )  # fmt: skip
    layer = 4 * 36 + 2 * 42 + 2 * 6
    read = 2 * layer + 6 + 2 * 36  # with the keys and values of the memory
    said = layer + 2 * 36 + 6 + 6 + 12 * 6  # with the queries and outputs that look at it
    attention = 12 * 6 * (2 * 10 * 10 + 5 * 5 + 5 * 10)
    every = 6 * (10 * read + 5 * said) + attention
    assert t5.flops_per_token(pair, 10, 5, whole=True) == every // 10
    assert t5.flops_per_token(pair, 10, 5) == (every - 12 * 6 * 5 * 5 // 2) // 10
    assert bert.flops_per_token(small, 4) == 6 * (2 * block + head) + 12 * 2 * 6 * 4


# sampling


def test_sampling_is_the_forward_pass():
    weights = ft.init_params(random.key(0), mamba.defs(MAMBA))
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    out = ft.generate(weights, MAMBA, prompt, 4, temperature=0)
    for end in range(3, 7):
        logits = mamba.forward(MAMBA, weights, out[:, :end])[:, -1, :11]
        assert torch.equal(out[:, end], logits.argmax(-1))
    key = random.key(1)
    drawn = ft.generate(weights, MAMBA, prompt, 3, temperature=0.7, top_k=3, top_p=0.9, key=key)
    for end in range(3, 6):
        logits = mamba.forward(MAMBA, weights, drawn[:, :end])[:, -1, :11]
        likely = logits.topk(3).indices
        assert (drawn[:, end : end + 1] == likely).any(-1).all()
    with pytest.raises(ValueError, match="mesh: got a value; wanted None with a Mamba-2 model"):
        ft.generate(weights, MAMBA, prompt, 1, key=key, mesh=Mesh.parse("dp=2"))


def test_the_command_samples(hybrid, capsys):
    assert main(["sample", str(hybrid), "--prompt", "def ", "--tokens", "3", "--top-k", "4"]) == 0
    assert capsys.readouterr().out.startswith("def ")
