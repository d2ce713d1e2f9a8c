"""Values that users look at show themselves: short in a console, as a table in a notebook."""

from __future__ import annotations

import doctest
import html
import inspect
import operator
import types
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import functron as ft
from functron import P, gpt, optim, training
from functron.core.tables import MAX_LINES
from functron.training.config import configure

MESH = ft.Mesh(dp=2, tp=2)
CONFIG = gpt.PRESETS["tiny"]
DEFS = gpt.defs(CONFIG)
RULES = gpt.rules(CONFIG, MESH)
SPECS = ft.param_specs(DEFS, RULES)
ADAMW = optim.adamw(1e-3)
TOTAL = 3 * ft.num_params(DEFS)


def meta_state(optimizer: optim.GradientTransformation = ADAMW) -> ft.State:
    return ft.init_state(ft.random.key(0).to("meta"), DEFS, SPECS, optimizer, MESH)


def mapped():
    return ft.shard_map(lambda w, x: x, MESH, (SPECS, P("dp")), P("dp"))


def program():
    batch = {n: torch.zeros(4, 8, dtype=torch.int64, device="meta") for n in ("tokens", "targets")}
    batch["rows"] = batch["tokens"][:, 0]

    def loss(params, batch, key):
        return gpt.loss(CONFIG, params, batch, key=key)

    step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), ADAMW, MESH, SPECS)
    return ft.trace(step, donate=0)(meta_state(), batch)


def jitted():
    made = ft.jit(ft.shard_map(lambda x: 2 * x, MESH, P("dp"), P("dp")), backend="eager")
    made(torch.zeros(4, 2))
    return made


SHOWN = {
    "mesh": (lambda: ft.Mesh(dp=2, tp=4), ["Mesh(dp=2, tp=4)"], ["dp=1", "tp=3", ">7<"]),
    "large mesh": (lambda: ft.Mesh(dp=512, tp=64), ["tp=64"], ["dp=511", "tp=63", ">32767<"]),
    "rules": (lambda: RULES, ["'mlp': 'tp'"], ["mlp", "tp"]),
    "state": (meta_state, [f"{TOTAL + 4:,} numbers", "params/blocks/*"], ["opt_state/0/mu/embed"]),
    "trees": (lambda: ft.show(DEFS, RULES, MESH), ["per rank", "vocab embed"], ["blocks/mlp/up/w"]),
    "mapped": (mapped, ["shard_map(<lambda> (test_shown.py:", "12 specs: "], ["P('dp')"]),
    "jitted": (jitted, ["jit(shard_map(", "compiled for 1 leaf"], ["0: float32[4, 2]"]),
    "training": (
        lambda: configure(seq=64, mesh="tp=2"),
        ["TrainConfig(data=DataConfig(seq=64), parallelism=ParallelismConfig(mesh='tp=2'))"],
        ["data.seq", "parallelism.mesh", "128"],
    ),
    "model": (lambda: gpt.GPTConfig(num_layers=2), ["GPTConfig(num_layers=2)"], ["num_layers"]),
    "memory": (lambda: program().memory(), ["peak ", "parameters"], ["at the peak"]),
    "cost": (lambda: program().cost(), ["model FLOPs", "psum"], ["sent per rank"]),
}
"""By name: what makes it, what its repr says, and what its page says."""


@pytest.mark.parametrize("name", SHOWN)
def test_shows_itself(name):
    make, texts, more = SHOWN[name]
    value = make()
    text, page = repr(value), value._repr_html_()
    assert len(text.splitlines()) <= MAX_LINES
    assert max(map(len, text.splitlines())) < 200
    assert [piece for piece in texts if piece not in text] == []
    assert [piece for piece in more if piece not in html.unescape(page)] == []
    if "<svg" not in page:
        ElementTree.fromstring(page)  # well formed
    assert len(page) < (90_000 if "<svg" in page else 30_000)


def test_a_program_and_a_preset_are_a_line():
    assert repr(program()).startswith("<program step on Mesh(dp=2, tp=2): ")
    assert repr(gpt.PRESETS["llama3-8b"]).count("\n") == 0
    assert repr(gpt.PRESETS).startswith(f"<{len(gpt.PRESETS)} configs: tiny, ")


OPTIMIZERS = {
    "adamw": (
        lambda: optim.adamw(1e-3, b2=0.95),
        "chain(\n    scale_by_adam(b2=0.95),\n    add_decayed_weights(weight_decay=0.0001),\n"
        "    scale(step_size=-0.001),\n)",
    ),
    "a rate that changes": (
        lambda: optim.scale_by_learning_rate(optim.linear(0.5, 10)),
        "scale_by_learning_rate(schedule(init=0.0, peak=0.5, warmup_steps=0))",
    ),
    "wrapped": (
        lambda: optim.with_limit(optim.sgd(0.5)),
        "with_limit(\n    chain(\n        identity(),\n        scale(step_size=-0.5),\n    ),\n)",
    ),
    "of one's own": (lambda: halved(), "halved(factor=0.5)"),
}


def halved(factor: float = 1.0):
    factor /= 2
    return optim.stateless(lambda updates, params: ft.tree.map(lambda u: factor * u, updates))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_shown_as_the_chain_that_it_is(name):
    make, text = OPTIMIZERS[name]
    assert repr(make()) == text


def test_bound_and_unbound_optimizers_look_alike():
    chained = optim.chain(
        optim.clip_by_global_norm(1.0), optim.muon(0.02, matrices=optim.matrices(DEFS))
    )
    assert repr(chained.bind(SPECS)) == repr(chained)
    assert "scale_by_muon" in repr(chained)
    assert "scale_by_adam" in repr(chained)


@pytest.mark.parametrize(
    "value",
    [
        ft.Mesh(dp=2, tp=4),
        ft.Mesh(),
        P("dp", None, ("fsdp", "tp")),
        gpt.GPTConfig(num_layers=2, norm="layer"),
        gpt.PRESETS["deepseek-v3"],
        configure(seq=64, mesh="tp=2", save_every=5),
        DEFS["embed"],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repr_makes_it_again(value):
    from functron import checkpoint, nn  # noqa: F401
    from functron.checkpoint.saver import CheckpointConfig
    from functron.nn.moe.config import MoEConfig
    from functron.spmd.params import Normal
    from functron.training import config

    names = {**vars(config), **vars(ft), "P": P, "Mesh": ft.Mesh, "Normal": Normal}
    names |= {"GPTConfig": gpt.GPTConfig, "MoEConfig": MoEConfig, "ParamDef": ft.ParamDef}
    names |= {"CheckpointConfig": CheckpointConfig, "RopeScaling": nn.RopeScaling}
    assert eval(repr(value), names) == value


# --- tables of trees


def test_bytes_per_rank_are_those_of_shards():
    """By hand: of w [8, 4] a half in float32, of b [8] all in bfloat16."""
    table = ft.show(
        {"w": torch.zeros(8, 4), "b": torch.zeros(8, dtype=torch.bfloat16)},
        {"w": P("tp"), "b": P()},
        ft.Mesh(tp=2, dp=3),
    )
    head, *rows = table.rows
    assert head[-3:] == ["numbers", "bytes", "per rank"]
    assert rows == [
        ["b", "(8,)", "bfloat16", "P()", "(8,)", "8", "16", "16"],
        ["w", "(8, 4)", "float32", "P('tp')", "(4, 4)", "32", "128", "64"],
    ]
    assert table.notes == ("2 tensors, 40 numbers, 144 bytes; 80 bytes per rank",)


def test_layers_that_are_alike_are_a_row():
    layers = [{"w": torch.zeros(2, 3), "b": torch.zeros(2)} for _ in range(12)]
    table = ft.show({"layers": layers, "head": torch.zeros(5)})
    assert [row[0] for row in table.rows[1:]] == ["head", "layers/{0..11}/b", "layers/{0..11}/w"]
    assert [row[-1] for row in table.rows[1:]] == ["20", "96", "288"]
    layers[3]["w"] = torch.zeros(4, 4)  # other shapes are rows of their own
    assert "layers/3/w" in str(ft.show({"layers": layers}))


def test_a_long_tree_is_folded_in_short_and_whole_in_print():
    values = {f"part{k}": {f"w{j}": torch.zeros(2, j + 1) for j in range(9)} for k in range(9)}
    table = ft.show(values)
    assert len(repr(table).splitlines()) <= MAX_LINES
    assert "part8/*" in repr(table)
    assert "9 leaves" in repr(table)
    assert len(str(table).splitlines()) == 1 + 1 + 81
    assert "all 81 rows" in table._repr_html_()
    wide = ft.show({f"w{k}": torch.zeros(k + 1, 2) for k in range(99)})
    assert len(repr(wide).splitlines()) <= MAX_LINES


def test_what_was_consumed_says_so():
    step = ft.shard_map(lambda x: x.mul_(2), ft.Mesh(), P(), P(), donate=0)
    state = ft.State(torch.ones(3), {}, (), torch.ones(3))
    step(state.step)
    assert "consumed" in repr(state)


def test_handles_show_their_own_specs():
    handle = types.SimpleNamespace(shape=(8, 2), dtype=torch.float32, spec=P("dp"), mesh=MESH)
    assert ft.show({"h": handle}).rows[1] == [
        "h", "(8, 2)", "float32", "P('dp')", "(4, 2)", "16", "64", "32",
    ]  # fmt: skip


class Started:
    """Has the axes of a mesh, and is none."""

    mesh, axis_names = MESH, MESH.axis_names

    def __getitem__(self, name):
        return MESH[name]


def test_any_mesh_with_axes_will_do():
    value = torch.zeros(8, 2)
    assert ft.show(value, P("dp"), Started()).rows == ft.show(value, P("dp"), MESH).rows
    drawn = ft.visualize_sharding(value, P("dp"), Started())
    assert str(drawn) == str(ft.visualize_sharding(value, P("dp"), MESH))


def test_specs_that_do_not_fit_are_all_named():
    values = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"(?s)a: got dim 0 .* b: got dim 0") as error:
        ft.show(values, P("tp"), MESH)
    assert "multiple of 2" in str(error.value)


def test_rules_by_path_and_trees_of_specs():
    table = ft.show({"q": torch.zeros(4, 4)}, ft.Rules({"q": P(None, "tp")}), MESH)
    assert table.rows[1][-4] == "(4, 2)"
    assert ft.show({"q": P("tp"), "n": 3}).rows[1:] == [
        ["n", "3", "int", ""],
        ["q", "", "", "P('tp')"],
    ]


# --- names and signatures


ROOMS = [n for n in dir(ft) if isinstance(getattr(ft, n), types.ModuleType)]


def test_dir_has_public_names_only():
    assert "show" in dir(ft)
    assert {"gpt", "nn", "lax", "tree"} <= {*ROOMS}
    for name in ROOMS:
        module = getattr(ft, name)
        found = dir(module)
        assert found == sorted({*found})
        assert [n for n in found if n.startswith("_")] == []
        assert [n for n in found if not hasattr(module, n)] == []
        own = {"annotations", "TYPE_CHECKING", "torch", "Any", "import_lazily"}
        assert own.isdisjoint(found), name
    assert "dot" not in dir(ft.lax)
    assert "map" in dir(ft.tree)
    assert [n for n in dir(ft) if n.startswith("_")] == []


def test_defaults_in_signatures_are_short():
    long = {}
    for path, value in public_callables():
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            continue
        for p in parameters:
            if p.default is not p.empty and len(repr(p.default)) > 70:
                long[f"{path}({p.name})"] = repr(p.default)
    assert long == {}
    assert str(inspect.signature(gpt.loss)).count("ModelOptions()") == 1


def public_callables():
    yield from ((n, getattr(ft, n)) for n in dir(ft) if n not in ROOMS)
    for room in ROOMS:
        module = getattr(ft, room)
        found = ((n, getattr(module, n)) for n in dir(module))
        yield from ((f"{room}.{n}", x) for n, x in found if not isinstance(x, types.ModuleType))


WITHOUT_EXAMPLE = {"BoundMesh", "named_scope"}
"""One needs processes; the other is shown in the notebook of programs."""


EXAMPLES = [n for n in dir(ft) if callable(getattr(ft, n)) and n not in WITHOUT_EXAMPLE]
EXAMPLES += [f"debug.{n}" for n in ("callback", "check", "check_key_reuse", "nans", "no_checks")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    """Those of all functions and classes of the package, with the names that its readers have."""
    names = {"ft": ft, "torch": torch, "P": P, "gpt": gpt, "lax": ft.lax, "optim": optim}
    text = inspect.getdoc(operator.attrgetter(name)(ft)) or ""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples, "no example"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=report.append)
    assert "".join(report) == ""


def test_replaced_settings_show_through():
    """The classes that are made for sections of applications show all fields."""
    changed = replace(training.TrainConfig(), steps=7)
    assert repr(changed) == "TrainConfig(steps=7)"
