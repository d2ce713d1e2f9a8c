"""Tasks: a model's answers against known ones, of lm-evaluation-harness and of local files.

`score_tasks` gives the numbers of both by the name of the task, on any mesh of `LanguageModel`;
runs record them as ``tasks``.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import importlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from functron.core import tree
from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.core.settings import Need, setting
from functron.core.tables import shows_differences
from functron.data.mapped_files import require_package
from functron.models import generation, gpt, lora
from functron.models.scoring import ContextPair, LanguageModel, ScoredText, TextScore
from functron.spmd import BoundMesh, Mesh
from functron.spmd.params import param_specs

TASKS = "tasks"
"""The numbers of tasks in records of runs."""

Scores = dict[str, dict[str, float]]
"""By task, its metrics by their names."""

_ASKED = Need(lambda tasks: tasks.is_asked, "tasks", "set eval_tasks, or eval_core")
_NAMED = Need(lambda tasks: bool(tasks.names), "tasks of the harness", "set eval_tasks")


@shows_differences
@dataclass(frozen=True)
class TasksConfig:
    """Tasks that a model is evaluated on while it trains.

    Attributes:
        names: tasks of lm-evaluation-harness, separated by commas (`pip install lm-eval`).
        core: a folder of local tasks: core.yaml, eval_meta_data.csv and eval_data/, as the bundles
            of DCLM's CORE metric; see `functron.training.tasks.read_core`.
        folder: a folder of YAML files, whose tasks are known besides the harness's own.
        every: after every N steps, and after the last; 0: after the last.
        shots: solved examples before each question of the harness's tasks; -1: as each task has it.
        limit: questions of each task; 0: all.
        batch: texts that are scored together, over all ranks.
    """

    names: str = setting("", short="eval_tasks")
    core: str = setting("", "path", short="eval_core")
    folder: str = setting("", "path", need=_NAMED)
    every: int = setting(0, least=0, need=_ASKED)
    shots: int = setting(-1, least=-1, need=_NAMED)
    limit: int = setting(0, least=0, need=_ASKED)
    batch: int = setting(8, least=1, need=_ASKED)

    @property
    def is_asked(self) -> bool:
        """Whether there are tasks."""
        return bool(self.names or self.core)

    @property
    def split_names(self) -> list[str]:
        """The names of tasks."""
        return [name for name in map(str.strip, self.names.split(",")) if name]

    def run_problems(self, config: Any, mesh: Mesh, *processes: Any) -> Iterator[Problem]:
        """Why this run cannot be evaluated on tasks; tasks that are missing raise ValueError."""
        if not self.is_asked:
            return
        yield from language_problems(config, mesh)
        own = config.parallelism
        fix = "leave the tasks out, and evaluate the run: functron evaluate RUN --tasks NAMES"
        for name, got, held in (
            ("zero", "3 over dp", own.zero == 3 and mesh["dp"] > 1),
            ("uneven", repr(own.uneven), bool(own.uneven)),
            ("expert_axes", repr(own.expert_axes), own.expert_axes != type(own).expert_axes),
        ):
            if held:
                yield Problem(name, got, "parameters as generation has them, with tasks", fix)
        check_tasks(self)


def language_problems(config: Any, mesh: Mesh | BoundMesh) -> Iterator[Problem]:
    """Why the model of a run's configuration cannot answer tasks on this mesh."""
    fix = "evaluate losses: functron evaluate RUN --data NAME=TEXT"
    if not isinstance(config.architecture, gpt.GPTConfig):
        yield Problem("eval_tasks", f"a run of {config.family.title}", "a GPT's", fix)
        return
    for problem in generation.cache_problems(config.architecture, mesh):
        yield dataclasses.replace(problem, fix=fix)


def check_tasks(config: TasksConfig) -> None:
    """Refuse tasks that there are not, before anything is computed.

    Raises:
        ValueError: a name that neither the harness nor the folder knows, files of CORE that are
            missing or broken, or no package lm_eval.
    """
    if config.names:
        known = _find_tasks(config).all_tasks
        title, wanted = "cannot evaluate on these tasks", "a task of lm-evaluation-harness"
        missing = [name for name in config.split_names if name not in known]
        raise_problems(
            title, [Problem("tasks", repr(x), wanted, nearest(x, known)) for x in missing]
        )
    if config.core:
        read_core(Path(config.core))


def make_language_model(
    params: tree.Tree,
    model: gpt.GPTConfig,
    tokenizer: ScoredText,
    mesh: Mesh | BoundMesh,
    *,
    batch_size: int = 8,
    specs: tree.Tree = None,
) -> LanguageModel:
    """The `LanguageModel` of a run's parameters, with low-rank additions merged.

    Args:
        params: as `mesh` splits them; state of quantised products among them is left out.
        batch_size: of `LanguageModel`.
        specs: how they are split; None: as `gpt.rules` has it.

    Raises:
        ValueError: they are split otherwise, or are shards with DoRA.
    """
    wanted = param_specs(gpt.defs(model), gpt.rules(model, mesh))
    if specs is not None and (found := _select(lora.plain(specs), wanted)) != wanted:
        rows = zip(tree.paths(wanted), tree.leaves(found), tree.leaves(wanted), strict=True)
        raise_problems(
            "cannot evaluate on tasks",
            [Problem(path, str(a), str(b), "leave tasks out") for path, a, b in rows if a != b],
        )
    split = isinstance(mesh, BoundMesh)
    plain = _select(lora.merge(params, split=split), wanted)
    return LanguageModel(plain, model, tokenizer, batch_size, mesh=mesh)


def _select(value: tree.Tree, like: tree.Tree) -> tree.Tree:
    """The entries of a tree of dicts that another one has."""
    if not isinstance(like, Mapping):
        return value
    return {name: _select(value[name], inner) for name, inner in like.items()}


def score_tasks(model: LanguageModel, config: TasksConfig) -> Scores:
    """The numbers of all tasks, by name and metric.

    On a bound mesh every process calls it; those that print nothing may have no numbers of the
    harness. Those of local tasks are ``core`` and ``core/LABEL``.
    """
    found: Scores = {}
    if config.names:
        found |= run_harness(model, config)
    if config.core:
        found |= score_core(model, read_core(Path(config.core)), config.limit)
    return found


# --- lm-evaluation-harness


def run_harness(model: LanguageModel, config: TasksConfig) -> Scores:
    """The numbers of ``lm_eval.simple_evaluate``, such as ``acc``, without standard errors.

    (It forks processes to estimate those, which a process that trains cannot have.) A filter that
    is not ``none`` is part of the name: ``exact_match,strict``.
    Random numbers of Python, numpy and torch go on afterwards as if it had not been called.
    """
    manager = _find_tasks(config)
    with _keep_random_numbers():
        results = _import_harness().simple_evaluate(
            model=model,
            tasks=config.split_names,
            num_fewshot=None if config.shots < 0 else config.shots,
            limit=config.limit or None,
            batch_size=model.batch_size,
            log_samples=False,
            bootstrap_iters=0,
            task_manager=manager,
        )
    rows = {} if results is None else results["results"]
    return {
        name: {
            metric.removesuffix(",none"): float(value)
            for metric, value in numbers.items()
            if "," in metric and isinstance(value, int | float)
        }
        for name, numbers in rows.items()
    }


def _import_harness() -> Any:
    title, wanted = "cannot evaluate on tasks", "lm-evaluation-harness"
    require_package("lm_eval", "lm-eval", title, wanted)
    return importlib.import_module("lm_eval")


def _find_tasks(config: TasksConfig) -> Any:
    """The harness's ``TaskManager``, of the folder alone where that has all tasks that are asked.

    To list the harness's own means to read its thousands of files.
    """
    _import_harness()
    if config.folder:
        if not Path(config.folder).is_dir():
            refuse("cannot read tasks", "tasks.folder", config.folder, "a folder of YAML files")
        own = _list_tasks(config.folder, False)
        if {*config.split_names} <= {*own.all_tasks}:
            return own
    return _list_tasks(config.folder, True)


@functools.lru_cache(maxsize=2)
def _list_tasks(folder: str, defaults: bool) -> Any:
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    return manager(include_path=folder or None, include_defaults=defaults)


@contextlib.contextmanager
def _keep_random_numbers() -> Iterator[None]:
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


# --- local tasks, as DCLM's CORE has them

CoreKind = Literal["multiple_choice", "schema", "language_modeling"]
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
_FIRST_SHUFFLE, _FIRST_EXAMPLES = 1337, 1234  # seeds of nanochat, whose numbers can be compared


class CoreTask(NamedTuple):
    """A task of a folder.

    Attributes:
        label: its name.
        kind: ``multiple_choice``: the query goes on with the likeliest choice, per token;
            ``schema``: of several contexts the likeliest one before the continuation;
            ``language_modeling``: greedy decoding gives the continuation.
        shots: solved examples before each question.
        between: what stands between a question and its answer.
        baseline: the accuracy of guessing, from 0 to 1.
        rows: the questions.
    """

    label: str
    kind: CoreKind
    shots: int
    between: str
    baseline: float
    rows: list[dict[str, Any]]


def read_core(folder: Path) -> list[CoreTask]:
    """The tasks of a folder like the evaluation bundle of DCLM (Li et al. 2024) and nanochat.

    ``core.yaml`` lists ``icl_tasks``, each with ``label``, ``dataset_uri`` (JSON lines below
    ``eval_data/``), ``icl_task_type``, ``num_fewshot: [n]`` and perhaps
    ``continuation_delimiter``; ``eval_meta_data.csv`` has ``Eval Task`` and ``Random baseline``,
    in percent.

    Raises:
        ValueError: files are missing or broken; all such are listed.
    """
    title, listing, meta = "cannot read tasks", folder / "core.yaml", folder / "eval_meta_data.csv"
    missing = [path for path in (listing, meta) if not path.is_file()]
    fix = "unpack a bundle of DCLM's CORE there"
    raise_problems(title, [Problem(str(path), "no such file", "it", fix) for path in missing])
    require_package("yaml", "yaml", title, "pyyaml, which reads core.yaml")
    yaml = importlib.import_module("yaml")
    try:
        listed = yaml.safe_load(listing.read_text(encoding="utf-8"))["icl_tasks"]
        with meta.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        refuse(title, str(folder), f"{type(error).__name__}: {error}", "a list of tasks", fix)
    problems: list[Problem] = []
    found = [_read_core_task(folder, each, baselines, problems) for each in listed]
    raise_problems(title, problems)
    return [task for task in found if task is not None]


def _read_core_task(
    folder: Path, entry: Any, baselines: Mapping[str, float], problems: list[Problem]
) -> CoreTask | None:
    try:
        label, kind = entry["label"], entry["icl_task_type"]
        shots, file = entry["num_fewshot"][0], folder / "eval_data" / entry["dataset_uri"]
    except (KeyError, TypeError, IndexError) as error:
        got = f"an entry without {error}"
        problems.append(Problem("core.yaml", got, "a label, a type, a file and num_fewshot: [n]"))
        return None
    if kind not in get_args(CoreKind):
        problems.append(Problem(f"core.yaml, {label}", repr(kind), " or ".join(get_args(CoreKind))))
        return None
    if label not in baselines:
        problems.append(Problem("eval_meta_data.csv", f"no {label!r}", "its random baseline"))
        return None
    if not file.is_file():
        problems.append(Problem(str(file), "no such file", f"the questions of {label}"))
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        wrong = [i for i, row in enumerate(rows) if any(name not in row for name in _FIELDS[kind])]
    except (json.JSONDecodeError, TypeError) as error:
        problems.append(Problem(str(file), str(error), "an object of JSON a line"))
        return None
    if wrong or len(rows) <= shots:
        got = f"question {wrong[0]} without one of them" if wrong else f"{len(rows)} questions"
        wanted = f"{', '.join(_FIELDS[kind])} in more than num_fewshot={shots} of them"
        problems.append(Problem(str(file), got, wanted))
        return None
    between = entry.get("continuation_delimiter", " ")
    return CoreTask(label, kind, shots, between, baselines[label], rows)


def score_core(model: LanguageModel, tasks: Sequence[CoreTask], limit: int = 0) -> Scores:
    """Accuracies ``core/LABEL``, with those centered on guessing, and their mean, ``core``.

    centered = (accuracy - baseline) / (1 - baseline), CORE their mean (Li et al. 2024, "DataComp-
    LM", section 3.5). Which examples are shown, and which questions a limit keeps, is as in
    nanochat.

    Args:
        limit: questions of each task; 0: all.
    """
    found: Scores = {}
    for task in tasks:
        right = _answers_right(model, task, limit)
        accuracy = sum(right) / len(right)
        centered = (accuracy - task.baseline) / (1 - task.baseline)
        found[f"core/{task.label}"] = {"accuracy": accuracy, "centered": centered}
    centered = [numbers["centered"] for numbers in found.values()]
    return {"core": {"core": sum(centered) / len(centered)}, **found}


def _answers_right(model: LanguageModel, task: CoreTask, limit: int) -> list[bool]:
    """Whether the model answers each question right."""
    rows = list(task.rows)
    random.Random(_FIRST_SHUFFLE).shuffle(rows)
    rows = rows[: limit or None]
    shots = min(task.shots, len(rows) - 1)
    asked: list[list[ContextPair]] = []
    for index, row in enumerate(rows):
        others = [i for i in range(len(rows)) if i != index]
        chosen = random.Random(_FIRST_EXAMPLES + index).sample(others, shots)
        asked.append(_make_pairs(model, task, [rows[i] for i in chosen], row))
    scores = iter(model.score([pair for pairs in asked for pair in pairs]))
    return [
        _is_right(task, row, pairs, list(itertools.islice(scores, len(pairs))))
        for row, pairs in zip(rows, asked, strict=True)
    ]


def _is_right(
    task: CoreTask, row: dict[str, Any], pairs: list[ContextPair], scores: list[TextScore]
) -> bool:
    if task.kind == "language_modeling":
        return scores[0].is_greedy
    means = [s.log_likelihood / len(p[1]) for s, p in zip(scores, pairs, strict=True)]
    return max(range(len(means)), key=means.__getitem__) == row["gold"]


def _make_pairs(
    model: LanguageModel, task: CoreTask, examples: list[dict[str, Any]], row: dict[str, Any]
) -> list[ContextPair]:
    """Contexts and continuations to be scored; each text begins with the token before texts."""
    shown = "".join(f"{_solve(task, each)}\n\n" for each in examples)

    def encode(text: str) -> list[int]:
        return [model.start, *model.tokenizer.encode(shown + text, special=False)]

    if task.kind == "multiple_choice":
        texts = [encode(f"{row['query']}{task.between}{choice}") for choice in row["choices"]]
        cuts = [_common_length(texts)] * len(texts)
    elif task.kind == "schema":
        texts = [
            encode(f"{context}{task.between}{row['continuation']}")
            for context in row["context_options"]
        ]
        shared = _common_length([text[::-1] for text in texts])
        cuts = [len(text) - shared for text in texts]
    else:
        question = f"{row['context'].strip()}{task.between}"
        texts = [encode(question + row["continuation"])]
        # the token of the blank between them is the answer's
        cuts = [_common_length([texts[0], encode(question.strip())])]
    # at least a token before, and one after
    cuts = [max(1, min(cut, len(text) - 1)) for cut, text in zip(cuts, texts, strict=True)]
    return [(text[:cut], text[cut:]) for cut, text in zip(cuts, texts, strict=True)]


def _solve(task: CoreTask, row: dict[str, Any]) -> str:
    """A question with its answer."""
    if task.kind == "multiple_choice":
        return f"{row['query']}{task.between}{row['choices'][row['gold']]}"
    if task.kind == "schema":
        return f"{row['context_options'][row['gold']]}{task.between}{row['continuation']}"
    return f"{row['context'].strip()}{task.between}{row['continuation']}"


def _common_length(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens at the beginning are the same in all rows."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, columns))
