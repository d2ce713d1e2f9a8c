"""A layer of experts against a loop over tokens and their experts, on every kind of mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import functron as ft
from functron import DATA_AXES, Mesh, P, lax, tree
from functron.nn.moe import MoEConfig, RouterInput, RouterOutput, moe, moe_defs
from functron.spmd.mesh import CONTEXT_AXES
from functron.spmd.params import Normal, ParamDef

BATCH, SEQ, EMBED, HIDDEN, EXPERTS = 4, 8, 4, 6, 8
WHOLE = P(DATA_AXES, CONTEXT_AXES)
SPLIT = P(DATA_AXES, (*CONTEXT_AXES, "tp"))
DATA = P(DATA_AXES)


@dataclass(frozen=True)
class Layout:
    """A mesh, the axes of the experts, and the spec of the stream."""

    mesh: str
    axes: tuple[str, ...] = ("ep",)
    stream: P = WHOLE

    def changes(self) -> dict:
        """The rules of experts."""
        axes = tuple(name for name in self.axes if Mesh.parse(self.mesh)[name] > 1)
        return {"expert": axes or None, "expert_mlp": None if "tp" in self.axes else "tp"}


LAYOUTS = {
    "one rank": Layout(""),
    "ep": Layout("ep=2"),
    "dp and ep": Layout("dp=2,ep=2", ("dp", "ep")),
    "ep beside dp": Layout("dp=2,ep=2"),
    "cp and ep": Layout("cp=2,ep=2", ("cp", "ep")),
    "ulysses and ep": Layout("ep=2,ulysses=2", ("ep", "ulysses")),
    "tp": Layout("tp=2"),
    "etp": Layout("ep=2,tp=2"),
    "etp, sequence parallel": Layout("ep=2,tp=2", stream=SPLIT),
    "folded": Layout("ep=2,tp=2", ("ep", "tp"), SPLIT),
    "folded over all": Layout("dp=2,ep=2,tp=2", ("dp", "ep", "tp"), SPLIT),
}
PLAIN = MoEConfig(num_experts=EXPERTS, top_k=2, expert_dim=HIDDEN, renormalise=True)
CONFIGS = {
    "dropless": replace(PLAIN, router_bias=True, z_loss=0.1),
    "capacity": replace(PLAIN, capacity_factor=0.8),
    "everything": replace(
        PLAIN, shared_dim=4, shared_gate=True, latent_dim=3, expert_bias=True, scale=2.5
    ),
    "expert choice": replace(
        PLAIN, renormalise=False, routing="expert_choice", capacity_factor=1.0
    ),
    "all experts": replace(PLAIN, top_k=EXPERTS, shared_dim=4),
}


def silu(x):
    return x / (1 + (-x).exp())


def feed_forward(params, x, expert=None):
    """Tokens through one expert, or through the shared one."""

    def project(layer, v):
        pick = lambda value: value if expert is None else value[expert]
        y = v @ pick(layer["w"])
        return y + pick(layer["b"]) if "b" in layer else y

    return project(params["down"], silu(project(params["gate"], x)) * project(params["up"], x))


def dense_layer(oracle, config: MoEConfig, counted: Tensor):
    """The oracle: x [B, T, D] in the original order, token by token."""

    def dense(params, x):
        routed = oracle(params["router"], x, config)
        out = []
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                token = x[b, t]
                narrow = token @ params["latent"]["down"]["w"] if config.latent_dim else token
                y = torch.zeros_like(narrow)
                for expert in range(config.num_experts):
                    if (t, expert) in routed.kept[b]:
                        weight = routed.weights[b, t, expert]
                        y = y + weight * feed_forward(params["experts"], narrow, expert)
                if config.latent_dim:
                    y = y @ params["latent"]["up"]["w"]
                if config.shared_dim:
                    shared = feed_forward(params["shared"], token)
                    if config.shared_gate:
                        shared = shared / (1 + (-token @ params["shared_gate"]["w"]).exp())
                    y = y + shared
                out.append(y)
        lse = torch.logsumexp(routed.logits, -1)
        return torch.stack(out).view(x.shape) + config.z_loss * (lse.square() * counted).sum()

    return dense


@pytest.fixture
def problem(draw, randn, specs):
    """``(layer, args, in_specs, others, other_specs)`` of a config on a layout."""

    def make(config: MoEConfig, layout: Layout, router=None, router_defs=None):
        defs = moe_defs(
            config, EMBED, gated=True, stddev=1.0, out_stddev=1.0, dtype=torch.float64,
            router=router_defs,
        )  # fmt: skip
        args = draw(defs), randn(BATCH, SEQ, EMBED)
        counted = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 5 > 0
        others = torch.arange(BATCH), torch.arange(SEQ).expand(BATCH, SEQ), counted

        def layer(params, x, rows, positions, counted):
            y, share, _ = moe(
                params, x, config, activation="silu", stream=layout.stream, axes=layout.axes,
                rows=rows, positions=positions, counted=counted, router=router,
            )  # fmt: skip
            return y + lax.psum(share, (*DATA_AXES, *CONTEXT_AXES))

        in_specs = specs(defs, **layout.changes()), layout.stream
        return layer, args, in_specs, others, (DATA, layout.stream, layout.stream)

    return make


def skipped(layout, name, kind):
    return kind == "gather" and (layout.mesh in ("", "tp=2") or name == "all experts")


def factors(where, name, kind):
    """Each layout with each dispatch, and with each kind of routing; each config on each axis."""
    layout, config = LAYOUTS[where], CONFIGS[name]
    if skipped(layout, name, kind):
        return []
    routing = config.routing, config.capacity_factor > 0
    axes = {axis: Mesh.parse(layout.mesh)[axis] > 1 for axis in ("dp", "ep", "tp", "cp")}
    folded = "tp" in layout.axes
    return [
        {"where": where, "kind": kind}, {"where": where, "routing": routing},
        *({"name": name, "kind": kind, axis: size} for axis, size in axes.items()),
        {"name": name, "folded": folded, "stream": layout.stream},
    ]  # fmt: skip


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("kind", ["alltoall", "gather"])
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("where", list(LAYOUTS))
def test_layer(agrees, problem, oracle, where, name, kind):
    layout = LAYOUTS[where]
    if skipped(layout, name, kind):
        pytest.skip("nothing to gather, or the same as alltoall")
    config = replace(CONFIGS[name], dispatch=kind)
    layer, args, in_specs, others, other_specs = problem(config, layout)
    dense = dense_layer(oracle, config, others[-1])
    oracle_args = lambda params, x, *_: dense(params, x)
    mesh = Mesh.parse(layout.mesh)
    agrees(layer, oracle_args, args, mesh, in_specs, layout.stream, others, other_specs)


def test_router_gradient_where_experts_are_apart(problem, oracle):
    """The router learns from all of its token's experts, wherever they are.

    Of two rows, the second would be lost if weights were applied by an expert's rank, and not
    brought back (Megatron-LM issue 7452, transformers issue 48687).
    """
    layout, config = LAYOUTS["ep"], replace(PLAIN, renormalise=False)
    layer, (params, x), in_specs, others, other_specs = problem(config, layout)
    dense = dense_layer(oracle, config, others[-1])

    def by_hand(router):
        return dense({**params, "router": router}, x).sin().sum()

    def inside(params, x, *others):
        def loss(params):
            axes = (*DATA_AXES, *CONTEXT_AXES)
            return lax.psum(layer(params, x, *others).sin().sum(), axes)

        return ft.sync_gradients(ft.grad(loss)(params), in_specs[0])["router"]["w"]

    expected = torch.func.grad(by_hand)(params["router"])["w"]
    assert expected.abs().min() > 1e-6
    specs = (*in_specs, *other_specs)
    mapped = ft.shard_map(inside, Mesh(ep=2), specs, P())
    torch.testing.assert_close(mapped(params, x, *others), expected, rtol=1e-10, atol=1e-10)


def test_auxiliary_share_and_sums(problem):
    layout = LAYOUTS["folded over all"]
    config = replace(PLAIN, aux_loss=0.1, balance_bias=True, score="sigmoid")
    _, (params, x), in_specs, others, other_specs = problem(config, layout)

    def layer(params, x, rows, positions, counted):
        _, share, sums = moe(
            params, x, config, activation="silu", stream=layout.stream, axes=layout.axes,
            rows=rows, positions=positions, counted=counted,
        )  # fmt: skip
        return lax.psum((share, sums.load), (*DATA_AXES, *CONTEXT_AXES))

    results = []
    for mesh in (Mesh(), Mesh.parse(layout.mesh)):
        mapped = ft.shard_map(layer, mesh, (*in_specs, *other_specs), P())
        results.append(mapped(params, x, *others))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
    assert results[0][1].sum() == others[-1].sum() * config.top_k


OWN_DEFS = {
    "hidden": ParamDef((EMBED, 3), ("embed", None), Normal(1.0), torch.float64),
    "out": ParamDef((3, EXPERTS), (None, None), Normal(1.0), torch.float64),
}


def own_router(params, inputs: RouterInput) -> RouterOutput:
    """Three experts by a small network, Switch's balance loss over the batch, and a z term."""
    logits = (inputs.x @ params["hidden"]).tanh() @ params["out"]
    scores = logits.softmax(-1)
    weights, chosen = scores.topk(3)
    counted = inputs.counted.unsqueeze(-1)
    load = (torch.zeros_like(scores).scatter(-1, chosen, 1.0) * counted).sum((0, 1))
    load, tokens = lax.psum((lax.stop_gradient(load), counted.sum()), inputs.axes)
    balance = EXPERTS * (load / (3 * tokens) * scores * counted).sum()
    z = torch.where(inputs.counted, logits.logsumexp(-1).square(), 0.0).sum()
    return RouterOutput(chosen, weights, auxiliary=0.3 * balance + 0.1 * z)


def dense_own_router(config: MoEConfig, counted: Tensor):
    """The layer with `own_router` of the whole batch: every expert of every token, masked."""

    def dense(params, x, *_):
        logits = (x @ params["router"]["hidden"]).tanh() @ params["router"]["out"]
        scores = logits.exp() / logits.exp().sum(-1, keepdim=True)
        ranks = (scores.unsqueeze(-1) < scores.unsqueeze(-2)).sum(-1)  # 0 of the best
        chosen = ranks < 3
        kept = chosen
        if config.capacity_factor:
            limit = math.ceil(config.capacity_factor * SEQ * config.top_k / EXPERTS)
            kept = torch.zeros_like(chosen)
            for b in range(BATCH):
                for e in range(EXPERTS):
                    queue = [(int(ranks[b, t, e]), t) for t in range(SEQ) if chosen[b, t, e]]
                    for _, t in sorted(queue)[:limit]:
                        kept[b, t, e] = True
            assert (kept != chosen).any()
        of_expert = lambda e: feed_forward(params["experts"], x, e)
        y = sum((scores * kept)[..., e : e + 1] * of_expert(e) for e in range(EXPERTS))
        fraction = chosen[counted].double().mean(0) / 3
        balance = EXPERTS * (fraction * scores[counted].mean(0)).sum() * counted.sum()
        z = logits.exp().sum(-1).log().square()[counted].sum()
        return y + 0.3 * balance + 0.1 * z

    return dense


@pytest.mark.parametrize("capacity", [0.0, 0.8])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("dp=2"),
        LAYOUTS["ep"],
        LAYOUTS["tp"],
        LAYOUTS["etp, sequence parallel"],
        LAYOUTS["folded over all"],
        Layout("cp=2,tp=2"),
    ],
    ids=str,
)
def test_own_router(agrees, problem, layout, capacity):
    """Values and gradients of a user's router are the dense ones, its own loss included."""
    config = replace(PLAIN, capacity_factor=capacity)
    layer, args, in_specs, others, other_specs = problem(config, layout, own_router, OWN_DEFS)
    dense = dense_own_router(config, others[-1])
    mesh = Mesh.parse(layout.mesh)
    agrees(layer, dense, args, mesh, in_specs, layout.stream, others, other_specs)


def test_own_router_statistics(problem):
    _, (params, x), _, others, _ = problem(PLAIN, LAYOUTS["one rank"], own_router, OWN_DEFS)
    settings = {"activation": "silu", "stream": WHOLE, "router": own_router}
    rows, positions, counted = others
    settings |= {"rows": rows, "positions": positions, "counted": counted}
    _, _, sums = moe(params, x, PLAIN, **settings)
    scores = ((x @ params["router"]["hidden"]).tanh() @ params["router"]["out"]).softmax(-1)
    best = scores.topk(3)
    chosen = best.indices[counted]
    assert sums.load.tolist() == [int((chosen == e).sum()) for e in range(EXPERTS)]
    assert sums.assignments == 3 * counted.sum()
    assert sums.dropped == 0
    share = best.values / best.values.sum(-1, keepdim=True)
    torch.testing.assert_close(sums.entropy, -(share * share.log()).sum(-1)[counted].sum())


def test_own_router_that_chooses_wrongly_gives_no_numbers(problem):
    """An expert that is not there, or a token's twice, would be another token's row."""
    for index in ([0, 0, 1], [0, 1, EXPERTS], [-1, 0, 1]):

        def router(params, inputs, index=index):
            out = own_router(params, inputs)
            wrong = torch.tensor(index).expand_as(out.experts)
            at_first = inputs.positions.unsqueeze(-1) == 0
            return out._replace(experts=torch.where(at_first, wrong, out.experts))

        layer, args, in_specs, others, other_specs = problem(PLAIN, LAYOUTS["ep"], router, OWN_DEFS)
        mapped = ft.shard_map(layer, Mesh(ep=2), (*in_specs, *other_specs), WHOLE)
        y = mapped(*args, *others)
        assert y[:, 0].isnan().all()
        assert y[:, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": torch.zeros(4, 8, 3)}, "experts: got torch.float32 \\[4, 8, 3\\]"),
        ({"weights": torch.zeros(4, 8, 2)}, "weights: got \\[4, 8, 2\\]; wanted \\[4, 8, 3\\]"),
        ({"auxiliary": torch.zeros(4, 8)}, "auxiliary: got \\[4, 8\\]; wanted \\[\\]"),
        ({"kept": torch.ones(4, 8, 3)}, "kept: got torch.float32; wanted torch.bool"),
    ],
)
def test_refuses_what_a_router_returns(problem, change, message):
    router = lambda params, inputs: own_router(params, inputs)._replace(**change)
    layer, args, in_specs, others, other_specs = problem(
        PLAIN, LAYOUTS["one rank"], router, OWN_DEFS
    )
    mapped = ft.shard_map(layer, Mesh(), (*in_specs, *other_specs), WHOLE)
    with pytest.raises(ValueError, match=message):
        mapped(*args, *others)


def test_refuses_own_router_beside_what_it_decides(problem):
    config = CONFIGS["expert choice"]
    layer, args, in_specs, others, other_specs = problem(
        config, LAYOUTS["one rank"], own_router, OWN_DEFS
    )
    mapped = ft.shard_map(layer, Mesh(), (*in_specs, *other_specs), WHOLE)
    with pytest.raises(ValueError, match="routing: got 'expert_choice' beside router="):
        mapped(*args, *others)


# test_dispatch.py compiles for good what is the layer's own
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_traced_and_compiled(problem, backend):
    layout = LAYOUTS["ep"]
    config = PLAIN if backend == "inductor" else CONFIGS["everything"]  # compiling takes long
    layer, args, in_specs, others, other_specs = problem(config, layout)

    def step(params, x, *others):
        def loss(params, x):
            return lax.psum(layer(params, x, *others).sin().sum(), (*DATA_AXES, *CONTEXT_AXES))

        value, grads = ft.value_and_grad(loss, (0, 1))(params, x)
        return value, ft.sync_gradients(grads, in_specs)

    specs = (*in_specs, *other_specs)
    f = ft.shard_map(step, Mesh.parse(layout.mesh), specs, (P(), in_specs))
    expected = f(*args, *others)
    if backend == "eager":
        program = ft.trace(f)(*args, *others)
        program.check()
        names = [equation.name for equation in program.block.equations]
        assert names.count("ragged_all_to_all") == 4
        # the shared expert's gate is computed while rows are on their way
        sent, used = names.index("ragged_all_to_all"), names.index("grouped_matmul")
        assert sent < names.index("sigmoid") < used
        close(program(*args, *others), expected)
        rows = BATCH * SEQ * config.top_k  # the worst case: all assignments of both ranks
        grouped = {k: v for k, v in program.cost().flops_by_op.items() if "grouped" in k}
        inner = 3 * config.latent_dim * HIDDEN
        bias = 8 * (2 * HIDDEN + config.latent_dim)
        # each product once forward, and backward for rows and for weights; of biases for these
        assert sum(grouped.values()) == 2 * rows * (3 * inner + 2 * bias)
    close(ft.jit(f, backend=backend)(*args, *others), expected)


def close(actual, expected):
    pairs = zip(tree.leaves(actual), tree.leaves(expected), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_refuses_experts_over_ranks_with_the_same_tokens(problem):
    layout = Layout("ep=2,tp=2", ("ep", "tp"), WHOLE)
    layer, args, in_specs, others, other_specs = problem(PLAIN, layout)
    mapped = ft.shard_map(layer, Mesh.parse(layout.mesh), (*in_specs, *other_specs), WHOLE)
    with pytest.raises(ValueError, match="sequence parallelism") as caught:
        mapped(*args, *others)
    assert "axes: got 'tp'" in str(caught.value)


def test_refuses_parameters_that_are_split_otherwise(problem, specs):
    layout = LAYOUTS["etp"]
    layer, args, in_specs, others, other_specs = problem(PLAIN, layout)
    defs = moe_defs(PLAIN, EMBED, gated=True, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    whole = specs(defs, expert="ep"), in_specs[1]
    mapped = ft.shard_map(layer, Mesh.parse(layout.mesh), (*whole, *other_specs), WHOLE)
    with pytest.raises(ValueError, match="4 experts of width 6 on this rank; wanted 4 and 3"):
        mapped(*args, *others)


def test_defs():
    config = replace(CONFIGS["everything"], balance_bias=True, router_bias=True)
    defs = moe_defs(config, EMBED, gated=True, stddev=0.1, out_stddev=0.05, dtype=torch.bfloat16)
    assert set(defs) == {"router", "experts", "shared", "shared_gate", "latent"}
    assert set(defs["router"]) == {"w", "b", "balance"}
    assert defs["experts"]["up"]["w"].shape == (EXPERTS, 3, HIDDEN)
    assert defs["latent"]["down"]["w"].shape == (EMBED, 3)
    assert defs["latent"]["up"]["w"].shape == (3, EMBED)
    assert defs["shared_gate"]["w"].shape == (EMBED, 1)
    assert defs["shared"]["up"]["w"].axes == ("embed", "mlp")


@pytest.mark.distributed
def test_processes(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_moe.py"), 4, timeout=240)
    for name in ("etp", "folded", "two-hop", "gather"):
        assert f"{name}: ok" in done.stdout
