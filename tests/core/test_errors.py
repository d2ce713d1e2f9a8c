"""functron.core.errors: what a message says, word for word."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import traceback
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import functron as ft
from functron import P, gpt, lax, optim
from functron.cli.main import main
from functron.core.errors import Problem, in_library, made_public, nearest, public, raise_problems
from functron.models.options import require


def test_a_problem_in_words():
    problem = Problem("params/up", "shape (3,)", "a size that tp=2 divides", "pad it to 4")
    assert str(problem) == (
        "params/up: got shape (3,); wanted a size that tp=2 divides; fix: pad it to 4"
    )
    assert str(Problem("seed", "-1", "an int >= 0")) == "seed: got -1; wanted an int >= 0"


def test_nothing_wrong_raises_nothing():
    raise_problems("title", [])
    raise_problems("title", iter(()))


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_all_problems_in_order(error):
    problems = (Problem(name, "1", "2", "add 1") for name in ("b", "a"))
    with pytest.raises(error) as caught:
        raise_problems("cannot shard", problems, error)
    assert type(caught.value) is error
    assert caught.value.args == (
        "cannot shard\n  - b: got 1; wanted 2; fix: add 1\n  - a: got 1; wanted 2; fix: add 1",
    )


def test_value_error_is_the_default():
    with pytest.raises(ValueError, match=r"^title\n  - x: got 1; wanted 2$"):
        raise_problems("title", [Problem("x", "1", "2")])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("emebd", "did you mean 'embed'? (known: embed, heads, mlp)"),
        ("head", "did you mean 'heads'? (known: embed, heads, mlp)"),
        ("zzz", "use one of: embed, heads, mlp"),
    ],
)
def test_nearest(name, expected):
    assert nearest(name, ["mlp", "heads", "embed"]) == expected


def test_nearest_of_nothing():
    assert nearest("x", []) == "use one of: none"


# --- tracebacks


MESH = ft.Mesh(dp=2)
X = torch.ones(4, 3)


class MineError(Exception):
    pass


def mine(x):
    raise MineError("as it was")


def odd(x):
    return x @ x


def branch(x):
    return x if x.sum() > 0 else -x


def mapped(f):
    return ft.shard_map(f, MESH, P("dp"), P("dp"))


def trained():
    config = gpt.PRESETS["tiny"]
    defs, optimizer = gpt.defs(config), optim.adamw(1e-3)
    specs = ft.param_specs(defs, gpt.rules(config, MESH))
    state = ft.init_state(ft.random.key(0), defs, specs, optimizer, MESH)

    def loss(params, batch, key):
        return gpt.loss(config, params, batch) + odd(X)[0, 0]

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, MESH, specs)
    step(state, {"tokens": tokens, "targets": tokens})


CALLS = {
    "shard_map": (lambda: mapped(odd)(X), RuntimeError, "odd"),
    "its check": (lambda: ft.shard_map(odd, MESH, "dp", P()), ValueError, "<lambda>"),
    "simulated": (lambda: mapped(branch)(X), ValueError, "branch"),
    "traced": (lambda: ft.trace(mapped(branch))(X), ValueError, "branch"),
    "jit": (lambda: ft.jit(mapped(branch))(X), ValueError, "branch"),
    "grad": (lambda: ft.grad(mapped(mine))(X), MineError, "mine"),
    "accumulate": (lambda: ft.accumulate(lambda p, b: odd(b), 2)(X, X), RuntimeError, "odd"),
    "scan": (lambda: ft.scan(lambda c, x: (odd(X), x), X, X), RuntimeError, "odd"),
    "remat": (lambda: ft.remat(odd)(X), RuntimeError, "odd"),
    "psum": (lambda: lax.psum(X, "rows"), ValueError, "<lambda>"),
    "a mesh": (lambda: ft.Mesh(dp=0), ValueError, "<lambda>"),
    "a step": (trained, RuntimeError, "odd"),
}


@pytest.mark.parametrize("name", CALLS)
def test_tracebacks_have_the_users_frames_down_to_the_line_at_fault(name):
    call, kind, last = CALLS[name]
    with ft.debug.full_tracebacks(False), pytest.raises(kind) as caught:
        call()
    error = caught.value
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert type(error) is kind
    assert not any(map(in_library, frames))
    assert frames[-1].f_code.co_name == last
    shown = "".join(traceback.format_exception(error))
    assert shown.count('File "') == len(frames)  # of no other error that it came from
    with pytest.raises(kind) as full:  # as the test suite has them
        call()
    assert any(in_library(frame) for frame, _ in traceback.walk_tb(full.value.__traceback__))


def test_a_users_own_error_comes_through_as_it_is():
    error = MineError("own")

    def program(x):
        try:
            raise KeyError("first")
        except KeyError as before:
            raise error from before

    with ft.debug.full_tracebacks(False), pytest.raises(MineError) as caught:
        mapped(program)(X)
    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert not hasattr(error, "__notes__")


def test_what_functron_has_no_words_for_says_how_to_see_more():
    with ft.debug.full_tracebacks(False), pytest.raises(AttributeError) as caught:
        ft.num_params({"w": 3})
    assert "full_tracebacks" in caught.value.__notes__[0]
    with pytest.raises(AttributeError) as caught:
        ft.num_params({"w": 3})
    assert not hasattr(caught.value, "__notes__")


def test_a_script_shows_its_own_lines(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch, functron as ft\n"
        "def half(x):\n"
        "    return x[x > 0]\n"
        "x = torch.ones(4)\n"
        "ft.shard_map(half, ft.Mesh(dp=2), ft.P('dp'), ft.P('dp'))(x)\n"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=root, timeout=120,
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert [line.split(",")[1].strip() for line in lines] == ["line 5", "line 3"]


@pytest.mark.parametrize("module", [ft, lax], ids=["functron", "lax"])
def test_every_public_function_leaves_out_the_librarys_frames(module):
    """Of `functron` all but what only passes a value on (`named_scope`)."""
    functions = {
        name: value
        for name in module.__all__
        if isinstance(value := getattr(module, name), types.FunctionType)
    }
    assert len(functions) > 10
    bare = {name for name, value in functions.items() if made_public(value) is value}
    assert bare <= {"named_scope"}


def test_the_command_line_shows_all_where_the_environment_asks(monkeypatch, capsys):
    arguments = ["params", "--mesh", "tp=3"]
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("FUNCTRON_FULL_TRACEBACKS", "1")
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown[shown.rindex("functron: ") :].startswith("functron: this model cannot run")


# --- arguments of another kind

CONFIG = gpt.PRESETS["tiny"]
DEFS = {"w": ft.ParamDef((4, 4), ("embed", "mlp"), ft.params.ones)}
ADAMW = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
TOKENS = torch.zeros(2, 8, dtype=torch.int64)
KEY = ft.random.key(0)


def made(**others):
    given = {"gradients": ft.mean_gradients(mine, mine), "optimizer": optim.sgd(1.0), "mesh": MESH}
    return ft.make_step(**given | {"specs": {"w": P()}} | others)


MISTAKES = {
    "a dict as rules": (lambda: ft.param_specs(DEFS, {"mlp": "tp"}), "rules", r"ft.Rules\("),
    "a str as rules": (lambda: ft.Rules("tp"), "rules", "by logical axis"),
    "a dict as mesh": (lambda: ft.init_params(KEY, DEFS, P(), {"dp": 2}), "mesh", r"ft.Mesh\(\*\*"),
    "a str as mesh": (lambda: made(mesh="dp=2"), "mesh", "ft.Mesh.parse"),
    "a mesh of a dict": (lambda: ft.Mesh({"dp": 2}), "Mesh", r"fix: Mesh\(\*\*\{'dp': 2\}\)"),
    "rules of a mesh as dict": (lambda: gpt.rules(CONFIG, {"dp": 2}), "mesh", "functron.Mesh"),
    "tensors as defs": (lambda: ft.param_specs({"w": X}, ft.Rules({})), "defs/w", "a ParamDef"),
    "shapes as defs": (lambda: ft.init_params(KEY, {"w": (4, 4)}), "defs/w/0", "a ParamDef"),
    "a preset's name": (lambda: gpt.defs("tiny"), "config", r"PRESETS\['tiny'\]"),
    "a dict as config": (lambda: gpt.forward({}, {}, TOKENS), "config", "GPTConfig"),
    "torch's optimizer": (lambda: made(optimizer=ADAMW), "optimizer", "functron.optim"),
    "its class": (lambda: ft.state_specs(P(), torch.optim.AdamW), "optimizer", "functron.optim"),
    "a factory": (lambda: made(optimizer=optim.adamw), "optimizer", "call it"),
    "one in a chain": (lambda: optim.chain(optim.clip(1.0), ADAMW), "transformations", "own"),
    "no function": (lambda: ft.mean_gradients(CONFIG, mine), "loss", "a function"),
    "a count as text": (
        lambda: ft.accumulated(ft.mean_gradients(mine, mine), "2"),
        "num_microbatches",
        "without quotes",
    ),
    "a batch that is none": (
        lambda: inspect.unwrap(require)((X, X), "tokens"),
        "batch",
        "a dict with",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_another_kind_of_argument_is_named_with_the_fix(name):
    call, where, said = MISTAKES[name]
    with pytest.raises(TypeError, match=rf"(?s)- {where}: got .*{said}"):
        call()


@pytest.mark.parametrize("spec", ["dp", 2])
def test_what_is_no_spec_is_named(spec):
    for call in (
        lambda: ft.shard({"w": X}, {"w": spec}, MESH),
        lambda: ft.init_params(KEY, DEFS, {"w": spec}, MESH),
        lambda: ft.sync_gradients({"w": X}, {"w": spec}),
        lambda: made(specs={"w": spec}),
    ):
        with pytest.raises(ValueError, match=rf"/w: got {spec!r}; wanted a P") as caught:
            call()
        assert (f"write P({spec!r})" in str(caught.value)) == isinstance(spec, str)


NUMERIC = [
    name
    for name in optim.__all__
    if isinstance(getattr(optim, name), types.FunctionType)
    and (parameters := inspect.signature(getattr(optim, name)).parameters.values())
    and str(next(iter(parameters)).annotation).startswith(("float", "int", "LearningRate"))
]


@pytest.mark.parametrize("name", NUMERIC)
def test_every_factory_and_schedule_wants_numbers(name):
    """All of `optim` whose first argument is one."""
    assert {"adamw", "sgd", "lion", "constant", "cosine_decay", "wsd", "clip"} <= set(NUMERIC)
    factory = getattr(optim, name)
    for wrong in ("1e-3", [1e-3], {"lr": 1e-3}):
        given = [wrong]
        rest = list(inspect.signature(factory).parameters.values())[1:]
        given += [2 for p in rest if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        with pytest.raises(TypeError, match=r"wanted a number") as caught:
            factory(*given)
        assert ("write 1e-3, without quotes" in str(caught.value)) == isinstance(wrong, str)


def test_numbers_of_all_kinds_are_taken():
    for rate in (1, 1e-3, np.float32(1e-3), torch.tensor(1e-3), optim.constant(1e-3)):
        optim.adamw(rate).init({"w": X})


def test_a_batch_without_what_the_model_reads_is_told():
    others = {"input_ids": TOKENS, "labels": TOKENS, "pixel_values": X}
    with pytest.raises(ValueError, match="the batch cannot be used") as caught:
        inspect.unwrap(gpt.loss)(gpt.PRESETS["tiny"], {}, others)
    for name in ("tokens", "targets"):
        wanted = f"- {name}: got a batch with input_ids, labels, pixel_values"
        assert wanted in str(caught.value)
    with pytest.raises(ValueError, match=r"targets: got .*labels\[:, 1:\] of tokens"):
        inspect.unwrap(gpt.num_targets)(others)


# --- names in messages


def _messages():
    """Every string of functron that is no docstring and has several words, with where it is."""
    root = Path(ft.__file__).parent
    for file in sorted(root.rglob("*.py")):
        parsed = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}
        for node in ast.walk(parsed):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and " " in text and id(node) not in docstrings:
                yield f"{file.relative_to(root)}:{node.lineno}", text


def _found(module, names):
    value = module
    for name in names:
        value = getattr(value, name, None)
    return value is not None


def private_names(text, modules):
    """The dotted names in `text` that mean something in functron, but not to who imports it."""
    for dotted in re.findall(r"(?<![\w.-])(?<!-m )[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", text):
        first, *names = dotted.split(".")
        if names[-1] == "json":
            continue
        if first in ("ft", "functron"):
            first, *names = names
            exported = getattr(getattr(ft, first, None), "__all__", None)
            if exported is not None and hasattr(getattr(ft, first), "__path__"):  # a room
                if names and names[0] not in exported:
                    yield dotted
                continue
            elif first not in ft.__all__ and first != "optim":
                yield dotted
                continue
        if first in ft.__all__:
            continue
        if any(_found(module, names) for module in modules.get(first, ())):
            yield dotted


def _modules():
    found = {}
    for info in pkgutil.walk_packages(ft.__path__, "functron."):
        if not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            found.setdefault(info.name.rpartition(".")[2], []).append(module)
    return found


def test_messages_name_what_functron_exports():
    modules = _modules()
    bad = [f"{at}: {name}" for at, text in _messages() for name in private_names(text, modules)]
    assert bad == []


def test_private_names_are_found():
    modules = _modules()
    text = "pass spec.take(specs), launch.join, functron.spmd.axes.lookup, axes.lookup or foo.bar"
    assert list(private_names(text, modules)) == [
        "spec.take", "launch.join", "functron.spmd.axes.lookup", "axes.lookup",
    ]  # fmt: skip
    good = "ft.Gather(specs), optim.adamw, functron.ops.use, functron.data.merge, gpt.loss, e.g. x"
    assert list(private_names(good, modules)) == []


def test_what_an_interrupt_breaks_on_its_way_is_no_error_of_its_own():
    """functorch's stack of levels fails then, in the words of a tensor that was kept."""

    @public
    def step():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("INTERNAL ASSERT FAILED at functorch/DynamicLayer.cpp")

    with pytest.raises(RuntimeError, match="INTERNAL ASSERT") as raised:
        step()
    assert isinstance(raised.value.__context__, KeyboardInterrupt)
