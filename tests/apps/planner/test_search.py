"""The search of plans: its space counted by hand, its best found by trying everything."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest

from functron.apps import planner
from functron.apps.planner.estimates import Estimate
from functron.apps.planner.machines import hardware
from functron.apps.planner.measurements import estimate_run
from functron.apps.planner.search import (
    Choices,
    _CandidateOrder,
    compare,
    count_state_bytes,
    explain_misfit,
    search,
    why,
)
from functron.apps.planner.software import FUNCTRON
from functron.apps.planner.space import (
    AXES,
    Space,
    count_data_ranks,
    count_rows,
    lighten_ends,
    mesh_of,
    parse_settings,
)
from functron.models.config import GPTConfig, MoEConfig
from functron.spmd import Mesh
from functron.training.config import TrainConfig, configure, with_precision
from functron.training.setup import make_setup

A100 = hardware("a100")


def estimated(seconds: float, memory: dict[str, int], **parts: float) -> Estimate:
    parts = parts or {"products": seconds}
    return Estimate(
        "step", A100, FUNCTRON, 8, 1024, seconds, parts, {}, 0.0, 1e12, 1e12, 1e12,
        MappingProxyType(memory),
    )  # fmt: skip


@dataclass(frozen=True)
class Invented:
    """A model whose times and bytes are formulas, and which remembers what was asked of it."""

    capacity_bytes: int = 1000
    received: int = 0  # bytes for every rank of the pipeline
    timed: list[TrainConfig] = field(default_factory=list)

    def problems(self, candidate):
        return ["num_heads: 4 on tp=8"] if mesh_of(candidate)["tp"] > 4 else []

    def state_bytes(self, candidate):
        return 1600 / (mesh_of(candidate)["pp"] * mesh_of(candidate)["tp"])

    def least_seconds(self, candidate):
        again = 4 / 3 if candidate.compute.remat == "full" else 1
        return again * (1 + (mesh_of(candidate)["pp"] - 1) / candidate.parallelism.microbatches)

    def guess(self, candidate):
        return self.least_seconds(candidate)

    def memory(self, candidate):
        held = {"none": 60, "dots": 40, "full": 10}[candidate.compute.remat]
        mesh = mesh_of(candidate)
        live = min(candidate.parallelism.microbatches, mesh["pp"])
        activations = held * count_rows(candidate) * live * 16 / (mesh["pp"] * mesh["tp"])
        found = {"parameters": self.state_bytes(candidate), "activations": activations}
        found["workspace"] = self.received * mesh["pp"]
        return {name: round(size) for name, size in found.items()}

    def guess_activations(self, candidate):
        return self.memory(candidate)["activations"]

    def estimate(self, candidate, *, exact=False):
        if not exact:
            self.timed.append(candidate)
        sent = 0.1 * math.log2(mesh_of(candidate)["tp"]) + 0.01 * mesh_of(candidate)["dp"]
        slower = 1.15 if candidate.compute.remat == "dots" else 1
        seconds = self.least_seconds(candidate) * slower + sent
        return estimated(seconds, self.memory(candidate), products=seconds - sent, tp=sent)

    def traced(self, candidate):
        return True


WHOLE = with_precision(configure(gpt={"num_layers": 8}, seq=128, global_batch=32), "bf16")


def space(config: TrainConfig = WHOLE, **given: Any) -> Space:
    return Space(config, **{"gpus": 8, "schedules": ("1f1b",), "lighter_ends": False, **given})


def way(config: TrainConfig, sizes: dict[str, int], **given: Any) -> TrainConfig:
    """A run on a mesh of these sizes, in the order of `AXES`."""
    mesh = ",".join(f"{a}={sizes[a]}" for a in AXES if sizes.get(a, 1) > 1)
    return configure(config, mesh=mesh, compile=True, **given)


def everything() -> list[TrainConfig]:
    """All meshes of 8 GPUs with tp, pp and dp or fsdp, written down another way."""
    found = []
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if tp * pp > 8:
            continue
        data = 8 // (tp * pp)
        for fsdp in {1, data, *([8] if data % 8 == 0 else [])}:
            kept = ("use", "keep") if fsdp > 1 else ("use",)
            tried = itertools.product((1, 2, 4, 8), ("none", "dots", "full"), kept)
            for rows, remat, gather in tried:
                if 32 % (data * rows) == 0:
                    dp = data // fsdp
                    zeros = [0] if dp == 1 else [1, 2] if fsdp == 1 else [1]
                    sizes = {"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp}
                    common = {"sequence_parallel": tp > 1, "remat": remat, "gather": gather}
                    common["microbatches"] = 32 // (data * rows)
                    found += [way(WHOLE, sizes, zero=z, **common) for z in zeros]
    return found


def test_the_space_has_every_mesh_once():
    found = list(space().candidates())
    assert len(found) == len({*found})
    assert {*found} == {*everything()}
    for c in found:
        assert mesh_of(c).size == 8
        assert count_data_ranks(c) * count_rows(c) * c.parallelism.microbatches == 32


def test_pipelines_have_schedules_and_chunks_and_others_none():
    tried = ("1f1b", "interleaved", "zbv")
    found = list(space(schedules=tried, fixed={"tp": 1, "rows": 1, "remat": "full"}).candidates())
    ranks = [(mesh_of(c)["pp"], c.parallelism) for c in found]
    kinds = {(pp, own.schedule, own.chunks) for pp, own in ranks}
    # 8 layers: of 2 ranks 2 or 4 stages each, of 4 ranks 2, of 8 ranks one
    assert kinds == {
        (1, "1f1b", 0),
        *((pp, name, 0) for pp in (2, 4, 8) for name in ("1f1b", "zbv")),
        (2, "interleaved", 2), (2, "interleaved", 4), (4, "interleaved", 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # 126 layers on 128 stages (Grattafiori et al. 2024, section 3.3.2), and on 127
        ((126, 0.65, "interleaved", 16, 8), "first=0,last=0"),
        ((8, 0.0, "1f1b", 9, 0), "last=0"),
        ((8, 0.0, "1f1b", 11, 0), ""),
        # 32 on 8: the last has 4 + 2.2; with 2, the others have 30 / 7: 4 or 5
        ((32, 2.2, "1f1b", 8, 0), "last=2"),
        ((32, 0.9, "1f1b", 8, 0), ""),  # 4.9, and 5 of another if it had fewer
        # 16 on 4 ranks of 2: the last has 2 + 2 + 1.5; with 1 in the last stage one more is in the
        # fourth, of the same rank; with 0 also one in the fifth: 3 + 0 + 1.5, and the first 2 + 3
        ((16, 1.5, "interleaved", 4, 2), "last=0"),
        # 16 on 4 folded ranks of 2: the first has 2 + 2 + 3; with 1 in the last stage 6, as with 0
        # the fourth rank, whose stages in the middle get both
        ((16, 3.0, "zbv", 4, 0), "last=1"),
    ],
)
def test_the_last_stage_has_fewer_layers_where_its_head_takes_long(given, wanted):
    assert lighten_ends(*given) == wanted


def test_layouts_are_tried_beside_the_even_one():
    """A head of 8,192 x 64 products is 14.6 layers of 12 x 64^2, with 6 x 64 x 64 of attention."""
    config = configure(WHOLE, gpt=GPTConfig(
        vocab_size=8192, num_layers=8, embed_dim=64, num_heads=4, mlp_dim=256, gated=False,
        norm="layer", bias=False, max_seq=128, positions="none", vocab_multiple=64,
    ), seq=128)  # fmt: skip
    fixed = {"tp": 1, "rows": 1, "remat": "full", "fsdp": 1, "zero": 1}
    tried = space(config, fixed=fixed, lighter_ends=True)
    found = {(mesh_of(c)["pp"], c.parallelism.layout) for c in tried.candidates()}
    # of 2, 4 and 8 stages; one has 2 layers at most where the last has none
    assert found == {(1, ""), *itertools.product((2, 4, 8), ("", "last=0"))}


def test_experts_and_long_samples_have_axes():
    config = configure(WHOLE, seq=16384, gpt__moe=MoEConfig(num_experts=6))
    found = space(config, fixed={"pp": 1, "tp": 1, "rows": 1, "remat": "full"})
    sizes = {(mesh_of(c)["ep"], mesh_of(c)["cp"]) for c in found.candidates()}
    assert sizes == set(itertools.product((1, 2), (1, 2, 4)))  # of 6 experts; of 4096 tokens


def test_experts_in_two_hops_are_over_whole_nodes():
    config = configure(WHOLE, gpt__moe=MoEConfig(num_experts=8, dispatch="two-hop"))
    fixed = {"pp": 1, "cp": 1, "rows": 1, "remat": "full"}
    found = list(space(config, domain=4, fixed=fixed).candidates())
    axes = ("ep_node", "ep", "tp")
    sizes = {tuple(mesh_of(c)[axis] for axis in axes) for c in found}
    # one hop over all, or nodes of 4 GPUs
    whole = {(1, ep, tp) for ep in (1, 2, 4, 8) for tp in (1, 2, 4) if ep * tp <= 8}
    assert sizes == whole | {(2, 4, 1), (2, 2, 2), (2, 1, 4)}
    assert {c.parallelism.expert_axes for c in found} == {"ep_node,ep"}
    fixed |= {"ep_node": 4, "ep": 2, "tp": 1}
    assert {str(mesh_of(c)) for c in space(config, fixed=fixed).candidates()} == {"ep_node=4,ep=2"}


def test_the_best_is_that_of_trying_everything():
    model = Invented()
    found = search(space(), model, top=5)
    fitting = [
        c for c in everything()
        if mesh_of(c)["tp"] <= 4 and sum(model.memory(c).values()) <= 1000
    ]  # fmt: skip
    times = sorted(Invented().estimate(c).step_seconds for c in fitting)
    assert [one.estimate.step_seconds for one in found.best] == times[:5]
    assert found.complete
    best = planner.describe_estimate(found.best[0].estimate)
    assert best.startswith(f"{times[0]:.3g} s a step (")
    assert found.counts["cannot run"] == sum(mesh_of(c)["tp"] == 8 for c in everything())
    assert found.counts["slower at best"] > 0
    assert len(model.timed) < len(fitting)  # bounds have saved some
    assert sum(found.counts.values()) == 2 * found.counts["candidates"]


def test_every_split_comes_up_before_one_that_is_slower_than_guessed_is_refined():
    """Guesses of tp=8 are half of what it takes; those of others are right."""
    tps = [
        replace(WHOLE, parallelism=replace(WHOLE.parallelism, mesh=f"tp={n}")) for n in (8, 4, 2)
    ]
    given = [(1.0 + n / 10, c) for c, n in itertools.product(tps[:1], range(5))]
    given += [(1.6, tps[1]), (1.7, tps[2]), (2.3, tps[1])]
    order = _CandidateOrder([(guess, guess, c) for guess, c in given])
    found = []
    for guess, _, candidate in order:
        order.learn(candidate, 2.0 if candidate is tps[0] else 1.0)
        found.append((guess, tps.index(candidate)))
    assert found[:4] == [(1.0, 0), (1.6, 1), (1.7, 2), (1.1, 0)]
    assert [at for at, n in found if n == 0] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    assert found.index((2.3, 1)) == 4  # after 1.1 that takes 2.2, and before 1.2 that takes 2.4


def test_the_front_has_no_candidate_that_another_beats():
    model = Invented()
    found = search(space(), model, top=3, slack=math.inf)
    every = [model.estimate(c) for c in {*model.timed}]
    for one in found.front:
        better = [
            e for e in every
            if e.step_seconds < one.estimate.step_seconds
            and e.memory_bytes <= one.estimate.memory_bytes
        ]  # fmt: skip
        assert not better
    assert "GiB of the fullest rank" in found.svg()


def test_what_is_fixed_is_fixed_and_what_is_bounded_is_bounded():
    inside = space(fixed={"tp": 2, "remat": "full"}, least={"microbatches": 8, "pp": 2})
    found = list(inside.candidates())
    assert found
    assert all(c.compute.compile is True for c in found)
    offloading = space(fixed={"tp": 2, "offload": True})  # which compiled steps refuse
    assert all(c.compute.compile is False for c in offloading.candidates())
    for c in found:
        assert (mesh_of(c)["tp"], c.compute.remat) == (2, "full")
        assert c.parallelism.microbatches >= 8
        assert mesh_of(c)["pp"] >= 2


def test_settings_are_read_as_they_are_written():
    text = "tp=8, pp=16 remat=full,sequence-parallel=true,microbatch=2"
    assert parse_settings(text, "fix") == {
        "tp": 8, "pp": 16, "remat": "full", "sequence_parallel": True, "rows": 2,
    }  # fmt: skip
    assert parse_settings("", "fix") == {}
    ends = parse_settings("layout=first=0,last=2,pp=4", "fix")
    assert ends == {"layout": "first=0,last=2", "pp": 4}
    assert parse_settings("pp=4,layout=last=0", "fix") == {"pp": 4, "layout": "last=0"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=8,ppp=2", "did you mean 'pp'?"),
        ("tp=eight", "a whole number, such as tp=8"),
        ("tp=2,tp=4", "tp twice"),
        ("offload=maybe", "offload=true or offload=false"),
    ],
)
def test_settings_that_are_none_are_refused(text, said):
    with pytest.raises(ValueError, match="cannot read fix") as error:
        parse_settings(text, "fix")
    assert said in str(error.value)


def test_gpus_that_no_mesh_divides():
    with pytest.raises(ValueError, match="a multiple of 6") as error:
        space(fixed={"tp": 2, "pp": 3})
    assert "take 6 GPUs" in str(error.value)
    with pytest.raises(ValueError, match="pp: got 2; wanted at least 4"):
        space(fixed={"pp": 2}, least={"pp": 4})
    with pytest.raises(ValueError, match="num_heads: 4 on tp=8"):
        search(space(fixed={"tp": 8}), Invented())


def test_a_model_that_fits_nowhere_says_by_how_much():
    found = search(space(), Invented(capacity_bytes=100))
    assert not found.best
    assert found.smallest is not None
    # the least state: pp x tp = 8 with tp at most 4, 200 bytes; and 8 ranks hold all activations
    candidate, memory = found.smallest
    assert mesh_of(candidate)["pp"] * mesh_of(candidate)["tp"] == 8
    fitting = [c for c in everything() if mesh_of(c)["tp"] <= 4]
    least = min(sum(Invented().memory(c).values()) for c in fitting)
    assert sum(memory.values()) == least
    text = explain_misfit(found)
    assert f"{least - 100} B too much" in text
    assert "offload=true" in text
    assert "about 2 times as many GPUs" in text


def test_what_needs_the_least_is_the_least_of_all_or_said_to_be_of_those_tried():
    """Here more stages need less state, but more memory: the least state is not the least."""
    model = Invented(capacity_bytes=100, received=300)
    sizes = [sum(model.memory(c).values()) for c in everything() if mesh_of(c)["tp"] <= 4]
    found = search(space(), model)
    assert found.smallest is not None
    candidate, memory = found.smallest
    assert sum(memory.values()) == min(sizes)
    assert mesh_of(candidate)["pp"] == 1
    assert found.smallest_of_all
    assert "needs the least, " in explain_misfit(found)
    few = search(space(), Invented(capacity_bytes=400, received=300), cpu_seconds=0.0)
    assert not few.smallest_of_all
    assert "needs the least of those tried, " in explain_misfit(few)


def test_why_another_is_not_the_best():
    model = Invented()
    found = search(space(), model)
    best = found.best[0]
    said = functools.partial(why, found, space=space(), model=model)
    text = said({"pp": 8})
    assert "pp=8" in text
    assert "it        pp=8" in text
    assert f"the best  {best.candidate.parallelism.mesh}" in text
    assert "num_heads" in said({"tp": 8})
    assert "nothing fits" in said({"pp": 1, "tp": 1})
    same = {axis: mesh_of(best.candidate)[axis] for axis in AXES}
    assert "it is the best" in said(same)


def test_two_are_compared_by_their_parts():
    rows = search(space(), Invented()).best
    text = compare(rows[1], rows[0])
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    a, b = (row.estimate.parts["tp"] for row in (rows[1], rows[0]))
    assert [float(x) for x in lines["tp"]] == pytest.approx([a, b, a - b], abs=6e-4)
    a, b = (row.estimate.step_seconds for row in (rows[1], rows[0]))
    assert [float(x) for x in lines["total"]] == pytest.approx([a, b, a - b], abs=6e-4)


# --- of real models

SMALL = GPTConfig(
    vocab_size=512, num_layers=4, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=192,
    max_seq=256, vocab_multiple=64,
)  # fmt: skip
RUN = configure(gpt=SMALL, seq=256, global_batch=16)


def small(global_batch: int = 16, **given: Any) -> TrainConfig:
    """A run of the small model in bf16: sizes of axes, and settings."""
    sizes = {axis: given.pop(axis) for axis in AXES if axis in given}
    return way(with_precision(RUN, "bf16"), sizes, global_batch=global_batch, **given)


def test_state_is_as_its_dtypes():
    """Adam's two moments, and masters where parameters have 16 bits, in float32."""
    each = {"float32": (4, 8), "bf16": (4, 12), "bf16-pure": (2, 4)}
    for name, wanted in each.items():
        found = count_state_bytes(with_precision(RUN, name))
        assert (found.grad, found.optimizer) == wanted


@pytest.fixture(scope="module")
def choices():
    return Choices(RUN, hardware("h100"))


def test_state_is_that_of_the_parameters(choices):
    """Each of 4 layers: norms, queries and output, keys and values, and a gated MLP."""
    layer = 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192
    ends = 2 * 512 * 64 + 64
    alone = choices.state_bytes(small())
    assert alone == (4 * layer + ends) * (2 + 4 + 12)
    assert choices.state_bytes(small(pp=2, dp=2, zero=1)) == 2 * layer * (2 + 4 + 12 / 2)
    moved = choices.state_bytes(small(pp=2, dp=2, zero=1, optimizer__offload=True))
    assert moved == 2 * layer * (2 + 4)


def test_fsdp_that_does_not_divide_is_padded(choices):
    """Of 64 embedded dims 6 ranks have 11 each, 66 with padding, in each of the matrices."""
    run = Choices(configure(RUN, global_batch=12), choices.machine)
    tried = replace(run.space(12, fixed={"tp": 1, "pp": 1}), domain=6).candidates()
    padded = {mesh_of(c)["fsdp"]: c.parallelism.uneven for c in tried}
    assert padded == {1: "", 6: "embed", 12: "embed"}
    layer = 2 * 11 + 2 * 11 * 64 + 2 * 11 * 32 + 3 * 11 * 192
    whole = small(12, fsdp=6, dp=2, uneven="embed")
    assert run.problems(whole) == []
    assert run.state_bytes(whole) == (4 * layer + 2 * 512 * 11 + 11) * (2 + 4 + 12)
    assert run.memory(whole)["parameters"] == 2 * (4 * layer + 2 * 512 * 11 + 11)
    assert "embed_dim: got 64" in "; ".join(run.problems(small(12, fsdp=6, dp=2)))
    both = small(12, fsdp=2, dp=6, zero=3)
    fixed = {"zero": 3, "fsdp": 2, "tp": 1, "pp": 1, "remat": "none", "rows": 1}
    assert {c.parallelism.uneven for c in run.space(12, fixed=fixed).candidates()} == {"embed"}
    assert "dp=6" in "; ".join(run.problems(both))


def test_stages_have_the_parameters_of_their_layout(choices):
    """As above: 2 of 4 layers and the head; or 3 and the embedding; or 2 on ranks in the middle."""
    layer = 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192
    ends = 512 * 64, 512 * 64 + 64
    for layout, count in {"": 2 * layer + ends[0], "last=1": 3 * layer + ends[0]}.items():
        memory = choices.memory(small(pp=2, microbatches=16, layout=layout))
        assert memory["parameters"] == 2 * count
    folded = small(pp=2, microbatches=16, schedule="interleaved", chunks=3, layout="first=0,last=0")
    assert choices.problems(folded) == []
    assert choices.memory(folded)["parameters"] in (2 * (2 * layer + n) for n in ends)
    deep = small(pp=4, microbatches=16, layout="Et|t|tt|L")
    assert choices.memory(deep)["parameters"] == 2 * 2 * layer  # neither end, nor the second
    (found,) = choices.problems(small(pp=2, microbatches=16, layout="last=9"))
    assert "from 0 to 4" in found


def test_the_time_of_lighter_ends_is_that_of_their_busiest_rank(choices):
    """By the formula and by simulating it; the layout by cost has the least busy one."""
    times = {}
    for layout in ("", "last=1", "last=3", "cost"):
        one = small(64, pp=2, microbatches=64, layout=layout, remat="full")
        exact, formula = (choices.estimate(one, exact=way).step_seconds for way in (True, False))
        assert formula == pytest.approx(exact, rel=0.02)
        times[layout] = exact
    assert times["cost"] == min(times.values())
    assert len({times[name] for name in ("", "last=1", "last=3")}) == 3


@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        ("", {"microbatches": 4}),
        pytest.param("dp=2,tp=2", {"zero": 1, "sequence_parallel": True, "microbatches": 4},
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_whole_step(mesh, given):
    """Layers traced one by one against the peak of the one program that has all of them."""
    config = configure(with_precision(RUN, "bf16"), mesh=mesh, **given)
    made = make_setup(config, Mesh.parse(mesh))
    whole = made.program().memory()
    found = estimate_run(made, hardware("h100"))
    assert found.memory_bytes == pytest.approx(whole.peak_bytes, rel=0.03)
    assert found.memory["parameters"] == pytest.approx(whole.at_peak["parameters"], rel=0.01)
    assert found.memory["optimizer"] == pytest.approx(whole.at_peak["optimizer"], rel=0.01)


def test_no_step_is_faster_than_its_bound(choices):
    rows = [
        small(dp=2, zero=1, microbatches=8),
        small(pp=2, microbatches=16),
        small(pp=2, microbatches=16, schedule="zbv"),
    ]
    for candidate in rows:
        assert choices.problems(candidate) == []
        assert choices.estimate(candidate).step_seconds > choices.least_seconds(candidate)
        assert choices.traced(candidate)


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (small(tp=8), "num_heads: got 4; wanted a multiple of tp=8"),
        (small(pp=8, microbatches=16), "4 layers for 8 stages"),
        (small(pp=4, schedule="zbv", microbatches=16), "4 layers for 8 stages"),
        (small(pp=2, schedule="interleaved", chunks=2, microbatches=3), "a multiple of pp=2"),
        (small(zero=1), "without data-parallel ranks"),
        (small(gather="step"), "without fsdp"),
        (small(pp=2, schedule="dualpipe", microbatches=3), "num_microbatches"),
    ],
)
def test_what_cannot_be_run_says_why(choices, candidate, said):
    assert said in "; ".join(choices.problems(candidate))
