"""Tasks against lm-evaluation-harness through its own backend, and CORE against a derivation."""

from __future__ import annotations

import json
import random
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from functron.cli.main import main
from functron.data.tokenizer import Tokenizer
from functron.training import tasks
from functron.training.convert import convert
from tests.data.chats import make_tokenizer
from tests.hub import tiny

HARNESS = pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install lm-eval accelerate")
BEGIN = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
WORDS = ("the quick brown fox", "jumps over", "lazy dogs", "user said", "a system", "of words")
NAMES = "local_choices,local_texts,local_answers,local_last"
YAML = {
    "local_choices": """
output_type: multiple_choice
doc_to_text: "Q: {{question}} A:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
num_fewshot: 2
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "local_answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["x", " the"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
""",
    "local_last": """
output_type: loglikelihood
doc_to_text: "{{text[:20]}}"
doc_to_target: "{{text[20:30]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
}


def make_questions(seed: int, count: int = 9) -> list[dict]:
    draw = random.Random(seed)

    def text(most):
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))

    return [
        {
            "question": text(4),
            "choices": [f" {text(3)}" for _ in range(4)],
            "gold": draw.randrange(4),
            "text": f"{text(6)} {text(30)}",
            "answer": "e",
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module", params=["plain", "begins"])
def model(request, tmp_path_factory) -> tuple[Path, Path]:
    """A run and its export, of a tokenizer that begins texts with nothing, or with a token."""
    folder = tmp_path_factory.mktemp(request.param)
    table = {**tiny.LLAMA, "vocab_size": 300, "max_position_embeddings": 160}
    torch.manual_seed(0)
    made = tiny.transformers.LlamaForCausalLM(tiny.transformers.LlamaConfig(**table))
    begins = {"bos_token": "<|im_start|>"} if request.param == "begins" else {}
    (often,) = Tokenizer(make_tokenizer(folder / "tokenizer")).encode("e")
    with torch.no_grad():
        made.lm_head.weight.mul_(20)  # so that tokens differ in their likelihood
        made.lm_head.weight[often].mul_(10)  # and one is often the likeliest
    path = make_tokenizer(tiny.store(made, folder / "model"), **begins)
    if begins:
        file = path / "tokenizer.json"
        stored = json.loads(file.read_text())
        index = {x["content"]: x["id"] for x in stored["added_tokens"]}["<|im_start|>"]
        begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
        text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
        known = {"<|im_start|>": {"id": "<|im_start|>", "ids": [index], "tokens": ["<|im_start|>"]}}
        stored["post_processor"] = {
            **BEGIN, "single": [begin, text[0]], "pair": [begin, *text], "special_tokens": known
        }  # fmt: skip
        file.write_text(json.dumps(stored))
    convert(f"hf:{path}", f"run:{folder / 'run'}")
    convert(f"run:{folder / 'run'}", f"hf:{folder / 'out'}")
    return folder / "run", folder / "out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four tasks of the harness, on one local file."""
    made = tmp_path_factory.mktemp("yaml")
    file = made / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in make_questions(0)))
    for name, text in YAML.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
        (made / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{data}{text}")
    return made


@pytest.fixture(scope="module")
def expected(model, folder) -> dict:
    """The numbers of the harness's own backend for the exported model."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model[1]), device="cpu", dtype="float32", batch_size=3),
        tasks=NAMES.split(","),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return {
        name: {k.removesuffix(",none"): v for k, v in own.items() if "," in k and v != "N/A"}
        for name, own in results["results"].items()
    }


@HARNESS
@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_the_harness_gives_the_numbers_of_its_own_backend(model, folder, expected, mesh, capsys):
    options = ["--tasks", NAMES, "--task-folder", str(folder), "--batch", "3", "--json"]
    capsys.readouterr()
    assert main(["evaluate", str(model[0]), "--mesh", mesh, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == expected.keys()
    for name, numbers in found.items():
        assert numbers == pytest.approx(expected[name], rel=1e-4), name
    assert 0 < found["local_choices"]["acc"] < 1
    assert found["local_texts"]["bits_per_byte"] > 1


CORE = {
    "choices": ("multiple_choice", 2, 25, {}),
    "schemas": ("schema", 0, 50, {"continuation_delimiter": "\n"}),
    "words": ("language_modeling", 1, 0, {"continuation_delimiter": ""}),
}


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A bundle of three tasks; of the last one the model knows some answers."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "eval_data").mkdir()
    baselines, listed = ["Eval Task,Task Category,Random baseline"], []
    for seed, (label, (kind, shots, baseline, more)) in enumerate(CORE.items()):
        rows = make_questions(seed + 1, 8)
        fields = {
            "multiple_choice": lambda x: {
                "query": x["question"], "choices": x["choices"], "gold": x["gold"]
            },
            "schema": lambda x: {
                "context_options": x["choices"][:2], "continuation": x["text"][:25],
                "gold": x["gold"] % 2,
            },
            "language_modeling": lambda x: {"context": x["question"], "continuation": x["answer"]},
        }[kind]  # fmt: skip
        path = folder / "eval_data" / f"{label}.jsonl"
        path.write_text("".join(json.dumps(fields(row)) + "\n" for row in rows))
        baselines.append(f"{label},other,{baseline}")
        task = {"label": label, "icl_task_type": kind, "num_fewshot": [shots], **more}
        listed.append({**task, "dataset_uri": path.name})
    (folder / "eval_meta_data.csv").write_text("\n".join(baselines))
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": listed}))  # JSON is YAML
    return folder


def by_hand(exported: Path, core: Path) -> dict[str, float]:
    """Accuracies by whole texts, as the metric is defined, with transformers in float64."""
    made = tiny.transformers.AutoModelForCausalLM.from_pretrained(exported).double()
    tokenizer = Tokenizer(exported)
    begin = tokenizer.id_of("bos_token") or tokenizer.end_of_text

    def logs(text: str) -> tuple[list[int], torch.Tensor]:
        ids = [begin, *tokenizer.encode(text, special=False)]
        with torch.no_grad():
            return ids, made(torch.tensor([ids])).logits[0].log_softmax(-1)

    def mean(text: str, first: int, last: int) -> float:
        ids, found = logs(text)
        span = range(first, len(ids) - last)
        return sum(found[at - 1, ids[at]].item() for at in span) / len(span)

    found = {}
    for label, (kind, shots, _, more) in CORE.items():
        lines = (core / "eval_data" / f"{label}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(rows)
        between, right = more.get("continuation_delimiter", " "), 0
        for index, row in enumerate(rows):
            others = [i for i in range(len(rows)) if i != index]
            shown = ""
            for i in random.Random(1234 + index).sample(others, shots):
                if kind == "multiple_choice":
                    shown += f"{rows[i]['query']} {rows[i]['choices'][rows[i]['gold']]}\n\n"
                else:
                    shown += f"{rows[i]['context']}{rows[i]['continuation']}\n\n"
            if kind == "multiple_choice":
                texts = [f"{shown}{row['query']} {choice}" for choice in row["choices"]]
                rests = [logs(text)[0] for text in texts]
                same = next(
                    i for i, column in enumerate(zip(*rests, strict=False)) if len(set(column)) > 1
                )
                values = [mean(text, same, 0) for text in texts]
                right += values.index(max(values)) == row["gold"]
            elif kind == "schema":
                texts = [f"{c}{between}{row['continuation']}" for c in row["context_options"]]
                rests = [logs(text)[0][::-1] for text in texts]
                same = next(
                    i for i, column in enumerate(zip(*rests, strict=False)) if len(set(column)) > 1
                )
                values = [
                    mean(text, len(ids) - same, 0) for text, ids in zip(texts, rests, strict=True)
                ]
                right += values.index(max(values)) == row["gold"]
            else:
                before = len(logs(f"{shown}{row['context']}")[0])
                ids, found_ = logs(f"{shown}{row['context']}{row['continuation']}")
                right += found_.argmax(-1).tolist()[before - 1 : -1] == ids[before:]
        found[label] = right / len(rows)
    return found


def test_core_is_the_mean_of_centered_accuracies(model, core, capsys, torchrun):
    want = by_hand(model[1], core)
    assert 0 < want["choices"] < 1
    assert 0 < want["schemas"] < 1
    assert 0 < want["words"] < 1
    centered = [(want[x] - low / 100) / (1 - low / 100) for x, (_, _, low, _) in CORE.items()]
    options = ["evaluate", str(model[0]), "--core", str(core), "--json", "--batch", "5"]
    for mesh in ("", "dp=2,tp=2"):
        capsys.readouterr()
        assert main([*options, "--mesh", mesh]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {x: found[f"core/{x}"]["accuracy"] for x in CORE} == pytest.approx(want)
        assert found["core"]["core"] == pytest.approx(sum(centered) / 3)
    program = f"from functron.cli.main import main\nmain({[*options, '--mesh', 'dp=2']!r})"
    assert json.loads(torchrun(program, 2).stdout) == found


def test_a_run_records_tasks(core, folder, tmp_path, capsys):
    """Local ones always; those of the harness where it is installed, with its numbers."""
    out = tmp_path / "run"
    train = ["train", "--out", str(out), "--steps", "3", "--seq", "16", "--global-batch", "4"]
    train += ["--lora-rank", "2", "--mesh", "fsdp=2,tp=2", "--sequence-parallel"]
    train += ["--data", __file__, "--gpt.max-seq", "400", "--eval-core", str(core)]
    harness = ["--eval-tasks", "local_last,local_texts", "--tasks.folder", str(folder)]
    train += harness if find_spec("lm_eval") else []
    assert main([*train, "--tasks.every", "2", "--tasks.limit", "4"]) == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert ["tasks" in record for record in records] == [False, True, True]
    asked = ["evaluate", str(out), "--core", str(core), "--limit", "4", "--json"]
    asked += ["--tasks", harness[1], "--task-folder", str(folder)] if find_spec("lm_eval") else []
    capsys.readouterr()
    assert main(asked) == 0
    for name, numbers in json.loads(capsys.readouterr().out).items():
        assert records[-1]["tasks"][name] == pytest.approx(numbers, rel=1e-4), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--core", "nowhere"], r"nowhere/core.yaml: got no such file"),
        (["--limit", "3"], "limit: got 3, which has no effect; wanted tasks"),
        (["--core", "x", "--seq", "3"], "seq: got 3, which has no effect; wanted texts"),
        (["--core", "x", "--mesh", "pp=2"], "mesh: got pp=2; wanted data, expert and tensor"),
        (["--tasks", "x"], "lm_eval: got no such package; wanted lm-evaluation-harness; fix: pip"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(model, options, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(model[0]), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"icl_task_type": "guess"}, r"core.yaml, words: got 'guess'; wanted multiple_choice or"),
        ({"label": "other"}, r"eval_meta_data.csv: got no 'other'"),
        ({"dataset_uri": "other"}, r"other: got no such file; wanted the questions of words"),
        ({"num_fewshot": [8]}, r"words.jsonl: got 8 questions; wanted .* more than num_fewshot=8"),
        ({"dataset_uri": "choices.jsonl"}, r"choices.jsonl: got question 0 without one of them"),
    ],
)
def test_damaged_bundles(core, tmp_path, damage, message):
    folder = shutil.copytree(core, tmp_path / "core")
    listed = json.loads((core / "core.yaml").read_text())["icl_tasks"]
    damaged = [*listed[:2], {**listed[2], **damage}]
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": damaged}))
    with pytest.raises(ValueError, match=message):
        tasks.read_core(folder)
