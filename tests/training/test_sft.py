"""Fine-tuning on conversations: the loss by hand and on every mesh, and a run from end to end."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from functron import checkpoint, tree
from functron.cli.main import main
from functron.data import Chat, TextWindows, Tokenizer
from functron.models import gpt
from functron.nn import IGNORE_INDEX
from functron.spmd import Mesh
from functron.training import run_folder
from functron.training.checks import validate
from functron.training.config import TrainConfig, configure
from functron.training.data import open_samples
from functron.training.run import prepare
from tests.data.chats import WORDS, corpus, make_tokenizer, messages, write_lines

ANSWER = "I am here to help"
MODEL = gpt.GPTConfig(
    vocab_size=300,
    num_layers=2,
    embed_dim=16,
    num_heads=2,
    mlp_dim=24,
    max_seq=96,
    dtype="float64",
    tied=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def config(folder, tmp_path_factory):
    file = write_lines(tmp_path_factory.mktemp("data") / "chat.jsonl", corpus(9))
    return configure(
        gpt=MODEL, data=str(file), tokenizer=str(folder), seq=96, global_batch=8, steps=2
    )


def by_hand(params: tree.Tree, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The mean loss of the targets that count, one by one, and the norm of its gradient."""
    leaves = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
    logits = gpt.forward(MODEL, leaves, batch["tokens"])[..., :300]
    losses = [
        F.cross_entropy(logits[row, place], target)
        for row, targets in enumerate(batch["targets"])
        for place, target in enumerate(targets)
        if target != IGNORE_INDEX
    ]
    loss = sum(losses) / len(losses)
    grads = torch.autograd.grad(loss, tree.leaves(leaves))
    return float(loss), math.sqrt(sum(float(grad.square().sum()) for grad in grads))


MESHES = [("", 1), ("dp=2", 1), ("dp=2,tp=2", 1), ("", 2), ("dp=2", 2), ("pp=2,dp=2", 2)]


@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("bare", [False, True], ids=["uneven", "a rank without targets"])
def test_the_loss_is_the_mean_over_what_the_assistant_says(config, mesh, microbatches, bare):
    run = prepare(configure(config, mesh=mesh, microbatches=microbatches), Mesh.parse(mesh))
    batch = run.batch(0)
    counts = (batch["targets"] != IGNORE_INDEX).sum(1)
    assert counts.min() > 0
    assert counts[:4].sum() != counts[4:].sum()  # of the two data-parallel ranks
    if bare:
        batch["targets"][:4] = IGNORE_INDEX
    loss, norm = by_hand(run.state.params, batch)
    _, metrics = run.step(run.state, batch)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)


def test_samples_follow_from_the_configuration(config, folder, tmp_path):
    assert isinstance(open_samples(config), Chat)
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    plain = open_samples(configure(config, data=str(text), seq=32))
    assert isinstance(plain, TextWindows)
    as_text = open_samples(configure(config, format="text"))
    assert isinstance(as_text, TextWindows)
    renamed = tmp_path / "chat.txt"
    shutil.copyfile(config.data.path, renamed)
    chat = open_samples(configure(config, data=str(renamed), format="chat"))
    assert torch.equal(chat.batch(0, 4)["targets"], open_samples(config).batch(0, 4)["targets"])
    validate(config)


def test_what_does_not_fit_is_said_before_the_run(config, tmp_path):
    small = configure(config, gpt=replace(MODEL, vocab_size=280), overlong="drop")
    for wrong, message in [
        (
            configure(config, tokenizer=""),
            r"tokenizer: got none for conversations; wanted a folder",
        ),
        (configure(config, tokenizer="bytes"), r"tokenizer: got bytes for conversations"),
        (
            configure(config, tokenizer=str(tmp_path / "x")),
            r"/x: got No such file.*wanted a tokenizer",
        ),
        (configure(config, data="", format="chat"), r"data: got nothing; wanted a JSONL file"),
        (configure(config, data=str(tmp_path / "y.jsonl")), r"y\.jsonl: got nothing there"),
        (small, r"got token ids up to 299; wanted ids below gpt.vocab_size=280"),
    ]:
        with pytest.raises(ValueError, match=message):
            validate(wrong)
    bare = configure(config, tokenizer=str(make_tokenizer(tmp_path / "bare", None)))
    with pytest.raises(ValueError, match="got no chat_template"):
        validate(bare)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run that learns to give one answer, and which then loses the tokenizer it began with."""
    place = tmp_path_factory.mktemp("sft")
    lines = [{"messages": messages(word, ANSWER)} for word in sorted(set(WORDS.split()))]
    data = write_lines(place / "chat.jsonl", lines)
    shutil.copytree(folder, place / "tokenizer")
    assert train(
        "--data", data, "--tokenizer", place / "tokenizer", "--mesh", "dp=2",
        "--seq", 32, "--global-batch", 8, "--steps", 32, "--save-every", 28,
        "--gpt.vocab-size", 300, "--gpt.num-layers", 1, "--gpt.embed-dim", 64, "--gpt.num-heads", 2,
        "--gpt.num-kv-heads", 2, "--gpt.mlp-dim", 64, "--gpt.tied", "--learning-rate.peak", 0.02,
        "--learning-rate.warmup-steps", 2, "--out", place / "run",
    ) == 0  # fmt: skip
    shutil.rmtree(place / "tokenizer")
    return place / "run"


def train(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in run_folder.records(run)]


def test_a_run_learns_and_answers(whole, capsys):
    found = losses(whole)
    assert found[0] > 5  # about log 300
    assert found[-1] < 0.1
    capsys.readouterr()
    for prompt in ("fox", "who"):
        ask = ["--chat", "--prompt", prompt, "--temperature", "0", "--tokens", "30"]
        assert main(["sample", str(whole), *ask]) == 0
        # and stops there, though it may say more
        assert capsys.readouterr().out == ANSWER + "\n"


def test_a_template_that_ends_its_prompt_with_a_space(tmp_path, capsys):
    """The first word of every answer is learnt with that space, and said after a prompt without."""
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    plain += "{{ eos_token if m['role'] == 'assistant' else '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    folder = make_tokenizer(tmp_path / "plain", plain)
    said = {"who": "I", "fox": "a", "dog": "help"}
    first = {Tokenizer(folder).encode(f" {word}")[0] for word in said.values()}
    assert len(first) == 3  # letters with the space before them
    lines = [{"messages": messages(*pair)} for pair in said.items()]
    data = write_lines(tmp_path / "chat.jsonl", lines)
    assert train(
        "--data", data, "--tokenizer", folder, "--seq", 32, "--global-batch", 3, "--steps", 40,
        "--gpt.vocab-size", 300, "--gpt.num-layers", 1, "--gpt.embed-dim", 32, "--gpt.num-heads", 2,
        "--gpt.num-kv-heads", 2, "--gpt.mlp-dim", 64, "--learning-rate.peak", 0.02,
        "--out", tmp_path / "run",
    ) == 0  # fmt: skip
    capsys.readouterr()
    for prompt, answer in said.items():
        ask = ["--chat", "--prompt", prompt, "--temperature", "0", "--tokens", "8"]
        assert main(["sample", str(tmp_path / "run"), *ask]) == 0
        assert capsys.readouterr().out == answer + "\n"


def test_a_run_goes_on_with_its_own_copy_of_the_tokenizer(whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "32")
    assert train("--out", run, "--resume") == 0
    said = capsys.readouterr().out
    assert f"tokens {run / 'hub'}" in said
    assert "of them targets, in 20 conversations" in said
    assert losses(run) == losses(whole)
    (run / "extra.jsonl").write_text("{}\n")
    assert train("--out", run, "--resume", "--data", run / "extra.jsonl", "--overlong", "cut") == 2
    problems = capsys.readouterr().err
    assert "data: got" in problems
    assert "overlong: got 'cut'; wanted 'refuse', as in the run" in problems


def test_a_tokenizer_goes_with_the_model_and_comes_back(whole, folder, tmp_path, capsys):
    exported, back = tmp_path / "exported", tmp_path / "back"
    assert main(["convert", f"run:{whole}", f"hf:{exported}"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()
    assert main(["convert", f"hf:{exported}", f"run:{back}"]) == 0
    # nobody says which tokenizer: it is the model's
    more = ["--seq", 32, "--global-batch", 2, "--steps", 1, "--data", whole.parent / "chat.jsonl"]
    assert train("--out", back, "--resume", *more) == 0
    assert losses(back)[0] < 0.2  # it knows the answer
    capsys.readouterr()
    assert main(["sample", str(back), "--prompt", "Grüße", "--tokens", "0"]) == 0
    assert capsys.readouterr().out == "Grüße\n"
    assert checkpoint.steps(back / "checkpoints") == [0, 1]


def test_bad_lines_are_taught(folder, tmp_path, capsys):
    data = write_lines(tmp_path / "bad.jsonl", ["{", {"messages": []}, *corpus(2)])
    options = ["--data", data, "--tokenizer", folder, "--gpt.vocab-size", 300]
    assert train(*options, "--out", tmp_path / "run") == 2
    problems = capsys.readouterr().err
    assert "bad.jsonl:1: got Expecting property name" in problems
    assert "bad.jsonl:2: messages: got an empty list; wanted at least one message" in problems


def test_bytes_have_no_conversations(config, tmp_path, capsys):
    run_folder.write_config(tmp_path, TrainConfig())
    assert main(["sample", str(tmp_path), "--chat", "--prompt", "a"]) == 2
    assert "chat: got a run on bytes; wanted one with a tokenizer" in capsys.readouterr().err
    with pytest.raises(ValueError, match="got none for conversations"):
        open_samples(configure(config, tokenizer=""))


def test_which_tokenizer_a_run_has(config, folder, tmp_path):
    def path(**changes):
        return run_folder.tokenizer_path(configure(config, **changes))

    run, other = tmp_path / "run", make_tokenizer(tmp_path / "other", None)
    assert path() == folder
    assert path(tokenizer="") is path(tokenizer="bytes") is None
    assert path(out=str(run)) == folder  # which has not begun
    run.mkdir()
    run_folder.keep_tokenizer(run, config)
    assert (run / "hub" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    run_folder.write_config(run, config)
    kept = run / "hub"
    assert path(out=str(run)) == path(out=str(run), tokenizer="") == kept
    assert path(out=str(run), tokenizer="bytes") is None
    # a run that begins from a converted model may bring another one, which takes its place
    changed = configure(config, tokenizer=str(other / "tokenizer.json"), out=str(run))
    assert run_folder.tokenizer_path(changed) == other / "tokenizer.json"
    (kept / "merges.txt").touch()
    (kept / "config.json").touch()
    run_folder.keep_tokenizer(run, changed)
    names = {file.name for file in kept.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (kept / name).read_bytes() == (other / name).read_bytes()
