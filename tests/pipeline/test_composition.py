"""The central table of pipelines: every schedule x mesh x option gives the dense numbers in float64.

Dense is one rank without a mesh and without stages, differentiated by torch.func (not by our own
transforms). Pipelines are simulated here; test_processes.py compares processes with the simulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.nn import IGNORE_INDEX
from functron.pipeline import NAMES, Partition, Pipeline, Schedule, make, pipelined, whole
from functron.pipeline.partition import Layout, layout_of
from functron.pipeline.stage_backward import CutStages, Pullbacks
from functron.training.step import make_step

TOLERANCE = 1e-10
SEQ, VOCAB = 8, 20

CONFIG = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=1, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=SEQ,
    init_stddev=0.3, dropout=0.3, dtype="float64",
)  # fmt: skip
STREAMS = {"": gpt.STREAM, "sp": gpt.SEQUENCE_PARALLEL_STREAM}


# --- what the decoder computes, dense and in stages; test_processes.py uses it as well


def batch(num_rows: int) -> dict:
    """Samples of which every one, and so every microbatch, has another number of targets."""
    tokens = torch.randint(
        0, VOCAB, (num_rows, SEQ + 1), generator=torch.Generator().manual_seed(0)
    )
    targets = tokens[:, 1:].clone()
    for row in range(num_rows):
        targets[row, : 3 * row % SEQ] = IGNORE_INDEX
    targets[4::5] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(num_rows)}


@functools.cache
def dense(config: gpt.GPTConfig, num_rows: int) -> tuple:
    """Parameters, batch, key, and the dense loss and gradients."""
    weights = ft.init_params(random.key(0), gpt.defs(config))
    key, data = random.key(7), batch(num_rows)
    total = (data["targets"] != IGNORE_INDEX).sum()

    def mean_loss(weights):
        return gpt.loss(config, weights, data, key=key) / total

    grads, value = torch.func.grad_and_value(mean_loss)(weights)
    return weights, data, key, value, grads


@functools.cache
def stage_function(config: gpt.GPTConfig, stream: str, remat: gpt.Remat) -> Callable:
    """A stage of the decoder, as `pipelined` wants it."""

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(
            config,
            part,
            params,
            x,
            batch,
            ft.ModelOptions(stream=STREAMS[stream], remat=remat),
            key=key,
        )
        return y / total if part.loss else y

    return stage


def decoder(
    config: gpt.GPTConfig,
    schedule: Schedule,
    layout: Layout,
    *,
    stream: str = "",
    remat: gpt.Remat = "none",
    uses: dict | None = None,
    **options: Any,
) -> Pipeline:
    """The stages of the decoder; `options` are those of `pipelined`."""

    stage = stage_function(config, stream, remat)
    partition = Partition(layout, schedule.pipes, uses or gpt.uses(config))
    return pipelined(stage, partition, schedule, **options)


def sharded(pipeline: Pipeline, mesh, specs) -> Callable:
    """The per-rank program of loss and gradients on `mesh`."""

    def program(weights, data, key):
        value, grads = pipeline.value_and_grad(weights, data, key, gpt.num_targets(data))
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), (P(), specs), stages="pp")


def assert_equal(got, want, tolerance=TOLERANCE):
    """Losses and gradients, relative to the largest gradient of each leaf."""
    (value, grads), (want_value, want_grads) = got, want
    assert abs(value - want_value) <= tolerance * abs(want_value)
    assert tree.structure(grads) == tree.structure(want_grads)
    rows = zip(tree.paths(grads), tree.leaves(grads), tree.leaves(want_grads), strict=True)
    for path, leaf, wanted in rows:
        assert leaf.dtype == wanted.dtype, path
        assert leaf.shape == wanted.shape, path
        assert wanted.abs().max() > 0, path
        error = (leaf - wanted).abs().max() / wanted.abs().max()
        assert error <= tolerance, f"{path}: {error}"


# --- the table


class Row(NamedTuple):
    """One composition."""

    name: str
    num_chunks: int
    num_microbatches: int
    mesh: Mesh
    stream: str
    remat: gpt.Remat
    tied: bool
    layers: tuple[int, ...]
    work: str

    def __str__(self) -> str:
        layout = "layers" + "".join(map(str, self.layers)) if set(self.layers) != {1} else ""
        words = [
            self.name, f"chunks{self.num_chunks}", f"m{self.num_microbatches}", str(self.mesh),
            self.stream, "remat" * (self.remat == "full"), "tied" * self.tied, layout, self.work,
        ]  # fmt: skip
        return "-".join(filter(None, words))


SINGLE = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"]
VEES = ["zbv", "v-min", "v-half", "dualpipev"]
SPLIT = ["zb-h1", "zb-h2", *VEES, "dualpipe"]  # backward in two parts
CHUNKS = {
    **dict.fromkeys(SINGLE, (1,)),
    **dict.fromkeys(VEES, (2,)),
    "dualpipe": (2,),
    "interleaved": (2, 3),
    "breadth-first": (2, 3),
    "combined-1f1b": (1, 2, 3),
}
AXES = [{}, {"dp": 2}, {"tp": 2}, {"tp": 2, "stream": "sp"}, {"dp": 2, "tp": 2}]


def smallest(name: str, pp: int, num_chunks: int) -> int:
    """The fewest microbatches that a schedule admits, by its documentation."""
    if name in ("dualpipe", "dualpipev"):
        return 2 * pp
    if name == "interleaved" or (name == "combined-1f1b" and num_chunks > 1):
        return pp
    return 1


def larger(name: str, pp: int, num_chunks: int) -> int:
    """More microbatches, no multiple of the ranks where the schedule admits that."""
    if name == "dualpipe":
        return 2 * pp + 2
    if name == "dualpipev":
        return 2 * pp + 1
    return 2 * pp if smallest(name, pp, num_chunks) > 1 else 2 * pp + 1


def layer_counts(num_stages: int, kind: int) -> tuple[int, ...]:
    """A layer per stage; or none at an end and two at the other."""
    middle = [1] * (num_stages - 2)
    return tuple([[1, *middle, 1], [0, *middle, 2], [2, *middle, 0]][kind])


def table() -> list[Row]:
    """Each schedule, size and chunk count on each mesh of at most 8 ranks, options in turn.

    Stages whose backward is split are computed by pieces of their traced programs, which takes
    time; by their pullbacks (as in a program that is being traced itself) on some larger meshes.
    """
    rows = []
    cases = [
        (name, pp, chunks)
        for name, choices in CHUNKS.items()
        for chunks in choices
        for pp in (2, 3, 4)
        if not (name == "dualpipe" and pp % 2)
    ]
    for case, (name, pp, chunks) in enumerate(cases):
        for number, axes in enumerate(AXES):
            sizes = {axis: size for axis, size in axes.items() if axis != "stream"}
            mesh = Mesh(pp=pp, **sizes)
            if mesh.size > 8:
                continue
            # schedules with pieces have the same options on a mesh, and so the same pieces
            index = number + (pp if name in SPLIT else case)
            count = (larger if number == 0 else smallest)(name, pp, chunks)
            stages = pp if name == "dualpipe" else pp * chunks
            if stages >= 8 and number not in (0, 1 + case % 3):
                continue  # long ones on one other mesh
            traced = name not in SPLIT or pp == 2 or (pp, number) == (3, 1)
            work = "" if traced else "pullbacks"
            rows.append(
                Row(
                    name, chunks, count, mesh, axes.get("stream", ""),
                    ("none", "full")[index % 2], bool(index // 2 % 2),
                    layer_counts(stages, index % 3), work,
                )
            )  # fmt: skip
    return rows


TABLE = table()


VARIANTS = {
    "cohere": replace(
        CONFIG, num_layers=3, norm="scaled_layer", parallel_residual=True, sublayer_norms="shared",
        tied=True, unembed_bias=True, qk_norm=True, qk_norm_last=True,
    ),
    "apertus": replace(
        CONFIG, num_layers=3, activation="xielu", gated=False, temperature=0.6, temperature_seq=3,
        unembed_bias=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_options_of_the_decoder(name):
    config, mesh, schedule = VARIANTS[name], Mesh(pp=2, tp=2), make("1f1b", 2, 4)
    weights, data, key, value, grads = dense(config, 4)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    pipeline = decoder(config, schedule, layout_of((2, 1)), stream="sp")
    assert_equal(sharded(pipeline, mesh, specs)(weights, data, key), (value, grads))


def test_the_table_has_every_schedule():
    """With every size that it admits, and all options together with one another."""
    assert {row.name for row in TABLE} == set(NAMES) - {"forward", "dualpipe-half"}  # in STEPS
    for name in CHUNKS:
        rows = [row for row in TABLE if row.name == name]
        assert {row.mesh["pp"] for row in rows} == ({2, 4} if name == "dualpipe" else {2, 3, 4})
        assert {(row.mesh["dp"], row.mesh["tp"], row.stream) for row in rows} == {
            (1, 1, ""), (2, 1, ""), (1, 2, ""), (1, 2, "sp"), (2, 2, ""),
        }  # fmt: skip
        assert {(row.remat, row.tied) for row in rows} == {
            ("none", False), ("none", True), ("full", False), ("full", True),
        }  # fmt: skip
        assert {row.work for row in rows} == ({"", "pullbacks"} if name in SPLIT else {""})


@functools.cache
def pieces(*key: Any) -> CutStages:
    """The traced programs of stages, which the rows of one model, layout and mesh share."""
    return CutStages(key[0], True, None, None)


KINDS = {**dict.fromkeys(VEES, "V"), **dict.fromkeys(("zb-h1", "zb-h2"), "split")}
KINDS |= {"interleaved": "chunks", "breadth-first": "chunks", "combined-1f1b": "combined"}


def factors(row: Row) -> list[dict[str, Any]]:
    """The free choices of a row: those of a schedule meet, and others meet each kind of schedule.

    What a schedule does is the same on every mesh: the order of its actions. Kinds differ in what
    is computed by an action, and in what is sent.
    """
    kind = KINDS.get(row.name, row.name if row.name == "dualpipe" else "plain")
    axes = row.mesh["dp"], row.mesh["tp"], row.stream
    options = {"remat": row.remat, "tied": row.tied, "work": row.work}
    of_name = [
        {"kind": kind, "pp": row.mesh["pp"]},
        {"name": row.name, "chunks": row.num_chunks},
        {"name": row.name, "tied": row.tied},
    ]
    return [
        {"kind": kind, "axes": axes},
        {"kind": kind, **options},
        {"axes": axes, **options},
        *of_name,
    ]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_composition(row):
    mesh, layout = row.mesh, layout_of(row.layers)
    config = replace(CONFIG, num_layers=sum(row.layers), tied=row.tied)
    schedule = make(row.name, mesh["pp"], row.num_microbatches, row.num_chunks)
    weights, data, key, value, grads = dense(config, row.num_microbatches * mesh["dp"])
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    pipeline = decoder(config, schedule, layout, stream=row.stream, remat=row.remat)
    assert pipeline.split == (row.name in SPLIT)
    pipeline.evaluated = pieces(pipeline.stage, layout)
    if row.work == "pullbacks":
        pipeline.work = lambda stages: Pullbacks(pipeline.stage)
    got = sharded(pipeline, mesh, specs)(weights, data, key)
    assert_equal(got, (value, grads))


# --- a training step, evaluation


def trained(config, mesh, name="", num_microbatches=1, *, layers=(), stream="", remat="none"):
    """Metrics and states of 3 steps with AdamW and clipping; dense where no schedule is named."""
    defs = gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    adamw = optim.adamw(1e-2, weight_decay=0.1, mask=ft.params.decay_mask(defs))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5, specs), adamw)
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    if name:
        schedule = make(name, mesh["pp"], num_microbatches)
        stages = decoder(config, schedule, layout_of(layers), stream=stream, remat=remat)
        step = make_step(ft.pipeline.gradients(stages, gpt.num_targets), optimizer, mesh, specs)
    else:

        def loss(params, data, key):
            return gpt.loss(config, params, data, key=key)

        step = ft.make_step(ft.mean_gradients(loss, gpt.num_targets), optimizer, mesh, specs)
    history = []
    for index in range(3):
        data = batch(8)
        data["tokens"] = (data["tokens"] + 7 * index) % VOCAB
        state, metrics = step(state, data)
        history.append(metrics)
    return history, state


@functools.cache
def trained_dense(config):
    return trained(config, Mesh())


def assert_trained(got, want, tolerance):
    assert all(metrics["grad_norm"] > 0.5 for metrics in want[0])  # so that clipping matters
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if not a.is_floating_point():
            assert torch.equal(a, b), path
        elif b.abs().max() > 0:
            assert (a - b).abs().max() <= tolerance * b.abs().max(), path


STEPS = [
    pytest.param(*(Mesh(pp=2), "1f1b", 4, (2, 1), "", "none", True), marks=pytest.mark.full),
    pytest.param(*(Mesh(pp=3), "gpipe", 8, (1, 1, 1), "", "full", False), marks=pytest.mark.full),
    (Mesh(pp=2, dp=2), "dualpipe", 4, (1, 2), "", "none", True),
    (Mesh(pp=4), "dualpipe-half", 8, (1, 1, 1, 0), "", "none", False),
    pytest.param(*(Mesh(dp=2, pp=2), "zb-h2", 2, (1, 2), "", "none", True), marks=pytest.mark.full),
    pytest.param(
        *(Mesh(pp=2, tp=2), "zbv", 4, (1, 1, 1, 0), "sp", "none", False), marks=pytest.mark.full
    ),
    (Mesh(tp=2, pp=2, dp=2), "interleaved", 2, (0, 1, 1, 1), "sp", "full", True),
]


@pytest.mark.parametrize(
    ("mesh", "name", "num_microbatches", "layers", "stream", "remat", "tied"),
    STEPS,
    ids=lambda value: str(value) if isinstance(value, (str, Mesh)) else None,
)
def test_training_steps(mesh, name, num_microbatches, layers, stream, remat, tied):
    config = replace(CONFIG, num_layers=3, tied=tied, fused_projections=mesh["tp"] > 1)
    got = trained(config, mesh, name, num_microbatches, layers=layers, stream=stream, remat=remat)
    assert_trained(got, trained_dense(config), 1e-9)


FORWARDS = [
    pytest.param(*(Mesh(pp=2), "1f1b", 4, None, ""), marks=pytest.mark.full),
    pytest.param(*(Mesh(pp=3), "forward", 8, 1, ""), marks=pytest.mark.full),
    (Mesh(pp=2, dp=2), "forward", 2, 3, ""),
    (Mesh(pp=2, tp=2), "zbv", 4, None, "sp"),
    (Mesh(pp=2, dp=2, tp=2), "dualpipe", 4, None, ""),
]


@pytest.mark.parametrize(
    ("mesh", "name", "num_microbatches", "chunks", "stream"), FORWARDS, ids=str
)
def test_logits_and_losses_without_gradients(mesh, name, num_microbatches, chunks, stream):
    """Also with the tables of training, of which only the forwards run."""
    schedule = make(name, mesh["pp"], num_microbatches, chunks)
    config = replace(CONFIG, num_layers=schedule.num_stages)
    weights, data, _, _, _ = dense(config, 8)
    weights = tree.map(lambda leaf: leaf.clone().requires_grad_(), weights)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    partition = Partition(layout_of([1] * schedule.num_stages), schedule.pipes, gpt.uses(config))

    def logits(part, params, x, batch):
        return gpt.stage(config, part, params, x, batch, ft.ModelOptions(stream=STREAMS[stream]))

    def losses(part, params, x, batch):
        return gpt.stage_loss(
            config, part, params, x, batch, ft.ModelOptions(stream=STREAMS[stream])
        )

    def run(stage, out):
        pipeline = pipelined(stage, partition, schedule)
        in_specs = (specs, P(ft.DATA_AXES))
        return ft.shard_map(pipeline.forward, mesh, in_specs, out, stages="pp")(weights, data)

    with torch.no_grad():
        want = gpt.forward(config, weights, data["tokens"])
        want_loss = gpt.loss(config, weights, data)
    got = run(logits, P(ft.DATA_AXES, None, "tp"))
    assert len(got) == num_microbatches
    # each data rank cuts its own rows
    rows = torch.arange(8).view(-1, num_microbatches)
    for m, part in enumerate(got):
        assert not part.requires_grad
        torch.testing.assert_close(part, want[rows[:, m].flatten()], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(run(losses, P())), want_loss, rtol=1e-12, atol=0)


# --- a model of one's own: its boundary has a float and an integer leaf, and its loss comes with aux


def layers_of_mlp(num_layers: int, dtype: torch.dtype = torch.float64) -> dict:
    """Its parameters."""
    generator = torch.Generator().manual_seed(num_layers)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    layers = {"w": randn(num_layers, 6, 6), "b": randn(num_layers, 6)}
    return {"start": randn(5, 6), "layers": layers, "end": randn(6)}


MLP_USES = {"start": "E", "layers": "t", "end": "L"}


def mlp_batch(num_rows: int, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(num_rows, 5, generator=generator, dtype=torch.float64)
    return {"x": x.to(dtype), "y": x.to(dtype)[:, 0]}


def mlp(part, params, x, batch, scale):
    """One stage: h through its layers, and how many features were positive on the way.

    That number matters: layers scale h by it. Results are sums over the data axes.
    """
    if part.embed:
        h = batch["x"] @ params["start"]
        x = {"h": h, "seen": torch.zeros_like(h[:, 0], dtype=torch.int64)}
    h, seen = x["h"], x["seen"]
    for row in range(len(part.layers)):
        w, b = params["layers"]["w"][row], params["layers"]["b"][row]
        h = torch.tanh(h @ w + b) * (1 + seen % 3).unsqueeze(-1)
        seen = seen + (h > 0).sum(-1)
    if not part.loss:
        return {"h": h, "seen": seen}
    loss = scale * (h @ params["end"] - batch["y"]).square().sum()
    aux = {"seen": seen.sum(), "size": h.abs().sum()}
    return lax.psum(loss, ft.DATA_AXES), lax.psum(aux, ft.DATA_AXES)


def mlp_dense(params, data, num_microbatches, scale):
    """Loss and aux, summed over microbatches, and gradients; no stages."""
    num_layers = len(params["layers"]["b"])

    def loss(params):
        parts = zip(*(leaf.chunk(num_microbatches) for leaf in tree.leaves(data)), strict=True)
        outs = [mlp(whole(num_layers), params, None, {"x": x, "y": y}, scale) for x, y in parts]
        return tree.map(lambda *leaves: sum(leaves), *outs)

    grads, (value, aux) = torch.func.grad_and_value(loss, has_aux=True)(params)
    return (value, aux), grads


def mlp_pipeline(schedule: Schedule, layers: tuple[int, ...], **options: Any) -> Pipeline:
    return pipelined(
        mlp, Partition(layout_of(layers), schedule.pipes, MLP_USES), schedule, **options
    )


def assert_same(got, want, tolerance=TOLERANCE):
    (value, aux), grads = got
    (want_value, want_aux), want_grads = want
    assert torch.equal(aux["seen"], want_aux["seen"])
    assert aux["seen"].dtype == torch.int64
    assert abs(aux["size"] - want_aux["size"]) <= tolerance * want_aux["size"]
    assert_equal((value, grads), (want_value, want_grads), tolerance)


OWN = [
    ("gpipe", 2, 4, (2, 1)),
    ("1f1b", 3, 4, (0, 1, 2)),
    ("interleaved", 2, 2, (1, 1, 0, 1)),
    ("zb-h1", 2, 4, (0, 3)),
    ("zbv", 2, 4, (1, 1, 1, 0)),
    ("dualpipe", 2, 4, (2, 1)),
    ("dualpipev", 2, 4, (0, 1, 1, 1)),
]


@pytest.mark.pairwise(of=lambda name, where, **_: [{"name": name}, {"where": where}])
@pytest.mark.parametrize("where", [None, {}, {"dp": 2}], ids=["no mesh", "pp", "dp"])
@pytest.mark.parametrize(("name", "pp", "num_microbatches", "layers"), OWN)
def test_models_of_ones_own(name, pp, num_microbatches, layers, where):
    params, data, scale = layers_of_mlp(3), mlp_batch(8), torch.tensor(0.1, dtype=torch.float64)
    pipeline = mlp_pipeline(make(name, pp, num_microbatches), layers)
    if where is None:
        got = pipeline.value_and_grad(params, data, scale)
    else:

        def program(params, data, scale):
            value, grads = pipeline.value_and_grad(params, data, scale)
            return value, ft.sync_gradients(grads, P())

        mesh = Mesh(pp=pp, **where)
        mapped = ft.shard_map(program, mesh, (P(), P(ft.DATA_AXES), P()), P(), stages="pp")
        got = mapped(params, data, scale)
    assert_same(got, mlp_dense(params, data, num_microbatches, 0.1))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_unused_parameters_have_gradients_of_zero(name):
    params = {**layers_of_mlp(3), "idle": torch.ones(3, dtype=torch.float64)}
    data, schedule = mlp_batch(8), make(name, 2, 4)
    uses = {**MLP_USES, "idle": "E"}
    pipeline = pipelined(mlp, Partition(layout_of((1, 2)), schedule.pipes, uses), schedule)

    def program(params, data):
        value, grads = pipeline.value_and_grad(params, data, 0.1)
        return value, ft.sync_gradients(grads, P())

    for mesh in (Mesh(pp=2), Mesh(pp=2, dp=2)):
        value, grads = ft.shard_map(program, mesh, (P(), P(ft.DATA_AXES)), P(), stages="pp")(
            params, data
        )
        assert torch.equal(grads.pop("idle"), torch.zeros(3, dtype=torch.float64))
        assert_same((value, grads), mlp_dense(layers_of_mlp(3), data, 4, 0.1))


# Written by hand. Three ranks that are fed from both ends: both pipes meet on the one in the middle,
# which has one copy of its stage. And two that split some backwards, and combine one with a forward.
MEETING = """
name: meeting
microbatches: 2
pipe: 0 1 2
pipe: 2.1 1.1 0.1

# 0     1     2
  F0    .     F1.1
  .     F0    .
  .     F1.1  F0
  F1.1  .     B0
  B1.1  B0    .
  B0    B1.1  .
  .     .     B1.1
"""
MIXED = """
microbatches: 3
# 0   1
  F0  .
  F1  F0
  F2  F1+I0
  I0  W0
  .   B1
  B1  F2
  W0  B2
  B2  .
"""


@pytest.mark.parametrize(("text", "layers"), [(MEETING, (1, 2, 0)), (MIXED, (1, 2))])
@pytest.mark.parametrize("work", ["", "pullbacks"])
def test_tables_of_ones_own(text, layers, work):
    schedule = Schedule.parse(text)
    params, data = layers_of_mlp(3), mlp_batch(6)
    pipeline = mlp_pipeline(schedule, layers)
    if work:
        pipeline.work = lambda stages: Pullbacks(mlp)
    got = pipeline.value_and_grad(params, data, 0.1)
    assert_same(got, mlp_dense(params, data, schedule.num_microbatches, 0.1))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe"])
def test_sums_in_float32(name):
    """Gradients of bfloat16 parameters: their sum over microbatches is rounded to float32 only."""
    params, data = layers_of_mlp(2, torch.bfloat16), mlp_batch(16, torch.bfloat16)
    want = None
    for first in range(8):  # bfloat16 within a microbatch, exact over them
        part = tree.map(lambda leaf, first=first: leaf[first::8], data)
        grads = tree.map(torch.Tensor.double, mlp_dense(params, part, 1, 0.1)[1])
        want = grads if want is None else tree.map(torch.add, want, grads)
    schedule = make(name, 2, 8)
    _, got = mlp_pipeline(schedule, (1, 1), dtype=torch.float32).value_and_grad(params, data, 0.1)
    _, coarse = mlp_pipeline(schedule, (1, 1)).value_and_grad(params, data, 0.1)
    double = tree.map(torch.Tensor.double, params)
    _, exact = mlp_dense(double, tree.map(torch.Tensor.double, data), 8, 0.1)
    for path, a, b, c, d in zip(
        tree.paths(want), *map(tree.leaves, (got, want, coarse, exact)), strict=True
    ):
        assert (a.dtype, c.dtype) == (torch.float32, torch.bfloat16)
        assert (a - b).abs().max() <= 1e-6 * b.abs().max(), path
        assert (c - b).abs().max() > 1e-4 * b.abs().max(), path
        assert (a - d).abs().max() <= 5e-2 * d.abs().max(), path


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_every_action_is_observed_once(name):
    seen = []
    schedule = make(name, 2, 4)
    layers = (1,) * schedule.num_stages
    pipeline = mlp_pipeline(schedule, layers, observe=lambda *row: seen.append(row))
    pipeline.value_and_grad(layers_of_mlp(len(layers)), mlp_batch(4), 0.1)
    assert [(rank, action) for rank, action, _, _ in seen] == [
        (rank, action) for row in schedule.table for rank, cell in enumerate(row) for action in cell
    ]
    times = [time for _, _, began, ended in seen for time in (began, ended)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[0] < times[-1]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_step(backend):
    """As one program, in which backwards that are split are traced as well."""
    mesh, optimizer = Mesh(pp=2), optim.sgd(0.1)

    def stage(part, params, x, batch, key, total):
        y = mlp(part, params, x, batch, 0.1)
        return y[0] / total if part.loss else y

    def count(batch):
        return lax.psum((batch["y"] > 0).sum(), ft.DATA_AXES)

    def train(compiled: bool):
        schedule = make("zb-h1", 2, 2)
        stages = pipelined(stage, Partition(layout_of((1, 1)), schedule.pipes, MLP_USES), schedule)
        step = make_step(ft.pipeline.gradients(stages, count), optimizer, mesh, P())
        step = ft.jit(step, donate=0, backend=backend) if compiled else step
        params = layers_of_mlp(2)
        zero = torch.zeros((), dtype=torch.int64)
        state = ft.State(zero, params, optimizer.init(params), random.key(0))
        history = []
        for _ in range(3):
            state, metrics = step(state, mlp_batch(4))
            history.append(metrics)
        return history, state

    assert_trained(train(True), train(False), 1e-9)


def test_a_step_reports_what_the_last_stage_returns_besides_its_loss():
    def stage(part, params, x, batch, key, total):
        return mlp(part, params, x, batch, 0.1)

    schedule, params, data = make("1f1b", 2, 2), layers_of_mlp(2), mlp_batch(4)
    (loss, aux), _ = mlp_dense(params, data, 2, 0.1)
    stages = pipelined(stage, Partition(layout_of((1, 1)), schedule.pipes, MLP_USES), schedule)
    optimizer = optim.sgd(0.1)
    step = make_step(
        ft.pipeline.gradients(stages, lambda batch: torch.ones(())), optimizer, Mesh(pp=2), P()
    )
    zero = torch.zeros((), dtype=torch.int64)
    _, metrics = step(ft.State(zero, params, optimizer.init(params), random.key(0)), data)
    torch.testing.assert_close(metrics["loss"], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["aux"], aux, rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", [("1f1b", 2), ("dualpipe", 4)], ids=str)
def test_a_step_refuses_a_mean(schedule):
    name, count = schedule
    schedule = make(name, 2, count)

    def take(scale):
        def stage(part, params, x, batch, key, total):
            y = mlp(part, params, x, batch, 0.1)
            return y[0] / scale(batch) / total if part.loss else y

        layers = layout_of((1,) * schedule.num_stages)
        partition = Partition(layers, schedule.pipes, MLP_USES)
        stages = pipelined(stage, partition, schedule)
        count, optimizer = lambda batch: torch.tensor(len(batch["y"])), optim.sgd(0.1)
        step = make_step(ft.pipeline.gradients(stages, count), optimizer, Mesh(pp=2), P())
        params, zero = layers_of_mlp(schedule.num_stages), torch.zeros((), dtype=torch.int64)
        step(ft.State(zero, params, optimizer.init(params), random.key(0)), mlp_batch(8))

    take(lambda batch: 1)
    with refused(ValueError, "loss: got .* for each sample twice: a mean; wanted the sum"):
        take(lambda batch: len(batch["y"]))


# --- what is refused


def refused(error: type[Exception], match: str):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
class TestRefused:
    """In simulation; the same on processes is in test_processes.py."""

    def test_a_partition_of_another_schedule(self, name):
        other = Partition(layout_of((1, 1)), make("dualpipe", 2, 4).pipes, MLP_USES)
        with refused(ValueError, f"the partition is not for the schedule '{name}'"):
            pipelined(mlp, other, make(name, 2, 4))

    def test_a_mesh_with_another_number_of_ranks(self, name):
        pipeline = mlp_pipeline(make(name, 2, 4), (1, 1))
        mapped = ft.shard_map(pipeline.value_and_grad, Mesh(pp=3), P(), P(), stages="pp")
        with refused(ValueError, "schedule for 2 ranks on pp=3.*make the schedule for 3 ranks"):
            mapped(layers_of_mlp(2), mlp_batch(4), torch.tensor(0.1))

    def test_a_batch_that_does_not_divide(self, name):
        pipeline = mlp_pipeline(make(name, 2, 4), (1, 1))
        with refused(
            ValueError, r"batch/x: got shape \(6, 5\); wanted a leading dim.*multiple of 4"
        ):
            pipeline.value_and_grad(layers_of_mlp(2), mlp_batch(6), 0.1)

    def test_what_cannot_be_sent(self, name):
        def notes(part, params, x, batch, scale):
            y = mlp(part, params, x and x[0], batch, scale)
            return y if part.loss else (y, "note")

        def numbers(part, params, x, batch, scale):
            y = mlp(part, params, x, batch, scale)
            return (y[0], {**y[1], "rows": 4}) if part.loss else y

        schedule = make(name, 2, 4)
        partition = Partition(layout_of((1, 1)), schedule.pipes, MLP_USES)
        for stage, lines in (
            (notes, ["stage 0 (Et) returned what cannot be sent", "output 1: got str; wanted a tensor"]),
            (numbers, ["stage 1 (tL) returned what cannot", "output 1/rows: got int; wanted a tensor"]),
        ):  # fmt: skip
            for method in ("value_and_grad", "forward"):
                run = getattr(pipelined(stage, partition, schedule), method)
                with pytest.raises(TypeError) as caught:
                    run(layers_of_mlp(2), mlp_batch(4), 0.1)
                assert all(line in str(caught.value) for line in lines)

    @pytest.mark.parametrize(
        "loss", [lambda y: y[0].expand(2), lambda y: y[1]["seen"], lambda y: 1.0]
    )
    def test_a_loss_that_is_no_scalar(self, name, loss):
        def stage(part, params, x, batch, scale):
            y = mlp(part, params, x, batch, scale)
            return loss(y) if part.loss else y

        schedule = make(name, 2, 4)
        pipeline = pipelined(
            stage, Partition(layout_of((1, 1)), schedule.pipes, MLP_USES), schedule
        )
        with refused(ValueError, "wanted a floating-point scalar"):
            pipeline.value_and_grad(layers_of_mlp(2), mlp_batch(4), 0.1)

    def test_a_loss_that_is_not_summed_over_ranks(self, name):
        def stage(part, params, x, batch, scale):
            y = mlp(part, params, x, batch, scale)
            return y[0] + batch["y"].sum() if part.loss else y

        schedule = make(name, 2, 4)
        pipeline = pipelined(
            stage, Partition(layout_of((1, 1)), schedule.pipes, MLP_USES), schedule
        )

        def program(params, data, scale):
            value, grads = pipeline.value_and_grad(params, data, scale)
            return value, ft.sync_gradients(grads, P())

        specs = (P(), P(ft.DATA_AXES), P())
        mapped = ft.shard_map(program, Mesh(pp=2, dp=2), specs, P(), stages="pp")
        with refused(ValueError, "varies over 'dp'"):
            mapped(layers_of_mlp(2), mlp_batch(8), torch.tensor(0.1))

    def test_gradients_that_are_not_synchronised(self, name):
        pipeline = mlp_pipeline(make(name, 2, 4), (1, 1))
        specs = (P(), P(ft.DATA_AXES), P())
        mesh = Mesh(pp=2, dp=2)
        mapped = ft.shard_map(pipeline.value_and_grad, mesh, specs, P(), stages="pp")
        with refused(ValueError, "varies over 'dp'"):
            mapped(layers_of_mlp(2), mlp_batch(8), torch.tensor(0.1))


def test_microbatches_of_other_shapes_are_refused():
    lengths = iter([2, 2, 1])

    def stage(part, params, x, batch, scale):
        if not part.embed:
            return x.sum() + params["end"].sum()
        return (batch["x"] @ params["start"])[: next(lengths)]

    schedule = make("gpipe", 2, 3)
    pipeline = pipelined(stage, Partition(layout_of((0, 0)), schedule.pipes, MLP_USES), schedule)
    with pytest.raises(ValueError, match="microbatches must have one shape") as caught:
        pipeline.value_and_grad(layers_of_mlp(0), mlp_batch(6), 0.1)
    assert "stage 0, microbatch 2: got (1, 6) torch.float64; wanted (2, 6)" in str(caught.value)


def test_gradients_of_a_table_without_backward_are_refused():
    pipeline = mlp_pipeline(make("forward", 2, 2), (1, 1))
    with pytest.raises(ValueError, match=r"'forward', which has no backward.*call forward"):
        pipeline.value_and_grad(layers_of_mlp(2), mlp_batch(2), 0.1)


def test_a_graph_of_one_stage_is_refused():
    with pytest.raises(
        ValueError, match=r"compile\['graph'\]: got True.*a CUDA graph holds a whole"
    ):
        mlp_pipeline(make("gpipe", 2, 2), (1, 1), compile={"graph": True})


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_differentiated_from_outside(name):
    """The loss had no derivative, in silence; gradients' are products with the Hessian."""
    config = replace(CONFIG, num_layers=2, dropout=0.0)
    weights, data, key, _, grads = dense(config, 8)
    total, v = ft.gpt.num_targets(data), tree.map(lambda x: torch.cos(3 * x + 1), weights)
    slope = torch.func.grad_and_value(lambda w: gpt.loss(config, w, data, key=key) / total)
    want_grads, want = torch.func.jvp(slope, (weights,), (v,))[1]
    mesh = Mesh(pp=2, tp=2)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    pipeline = decoder(config, make(name, 2, 4), layout_of([1, 1]))
    run = lambda w: sharded(pipeline, mesh, specs)(w, data, key)
    assert_equal(ft.jvp(run, (weights,), (v,))[1], (want, want_grads))
    made = torch.func.grad(lambda w: run(w)[0])(weights)
    assert_equal((want, made), (want, grads))
