"""Every family against transformers: logits, gradients, a step of training, and the way back.

Transformers keeps norms, rotary tables and softmax in float32 even in a float64 model, so no closer
agreement than 1e-5 can be asked for; what comes back is equal to the last bit.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

import functron as ft
from functron import DATA_AXES, P, gpt, hub, optim, tree
from functron.hub.entries import ACTIVATIONS
from functron.hub.reader import differences
from tests.hub import tiny

ALL = list(tiny.CASES)


FUSED = ("llama-biases", "phi3", "qwen3")
"""Families of which gradients are compared in the other layout of parameters."""

IN_MEMORY = {"embed_out.weight": "lm_head.weight"}
"""Transformers' names of tensors that files have under another (GPT-NeoX)."""


@pytest.fixture(params=ALL)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each model that was asked for: none is written to."""
    return functools.cache(
        lambda name: tiny.store(tiny.make(name), tmp_path_factory.mktemp("hub") / name, files=3)
    )


@pytest.fixture
def stored(name, folders):
    """A model of transformers and the folder that it is stored in."""
    return tiny.make(name), folders(name)


def config_of(path, **changes) -> gpt.GPTConfig:
    return replace(hub.read_config(path), vocab_multiple=tiny.VOCAB_MULTIPLE, **changes)


def batch(tokens) -> dict:
    targets = F.pad(tokens[:, 1:], (0, 1), value=ft.nn.IGNORE_INDEX)
    return {"tokens": tokens, "targets": targets, "rows": torch.arange(len(tokens))}


def mean_loss(config, weights, data):
    return gpt.loss(config, weights, data) / gpt.num_targets(data)


def gradients(model, tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Transformers' loss and its gradients by name."""
    loss = model(tokens, labels=tokens).loss
    names, leaves = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


def assert_close(actual: dict, expected: dict, tolerance: float) -> None:
    """Every leaf within `tolerance` of its largest entry.

    Gradients of biases on keys are next to nothing, exactly nothing without rope, so entries below
    a thousandth of the whole tree's largest count as that.
    """
    assert tree.paths(actual) == tree.paths(expected)
    floor = 1e-3 * max(leaf.abs().max().item() for leaf in tree.leaves(expected))
    rows = zip(tree.paths(actual), tree.leaves(actual), tree.leaves(expected), strict=True)
    for path, got, want in rows:
        assert got.shape == want.shape, path
        error = ((got - want).abs().max() / want.abs().max().clamp(min=floor)).item()
        assert error < tolerance, (path, error)


@pytest.mark.pairwise(of=lambda name, dtype: [{"name": name}, {"dtype": dtype}])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits(stored, dtype):
    model, path = stored
    config = config_of(path, dtype=dtype)
    tokens = tiny.tokens()
    ours = gpt.forward(config, hub.load(path, config), tokens)[..., : tiny.VOCAB]
    theirs = model.to(config.torch_dtype)(tokens).logits.detach()
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_padding_of_the_vocabulary_is_zeros(stored):
    _, path = stored
    weights = hub.load(path, config_of(path))
    assert weights["embed"].shape == (64, tiny.EMBED)
    assert weights["embed"][tiny.VOCAB :].eq(0).all()
    assert weights["embed"][: tiny.VOCAB].ne(0).all()
    if "unembed" in weights:
        assert weights["unembed"][:, tiny.VOCAB :].eq(0).all()


@pytest.mark.full  # the gradients of a step on one device, and all of them on a mesh, are below
def test_loss_and_gradients(stored):
    model, path = stored
    config = config_of(path, dtype="float64")
    tokens = tiny.tokens()
    expected, named = gradients(model.double(), tokens)
    value, grads = ft.value_and_grad(partial(mean_loss, config))(
        hub.load(path, config), batch(tokens)
    )
    torch.testing.assert_close(value, expected.double(), rtol=1e-6, atol=0)
    assert_close(grads, hub.from_tensors(model.config.model_type, config, named), 1e-5)


@pytest.mark.pairwise(of=lambda name, mesh: [{"name": name}, {"mesh": mesh}])
@pytest.mark.parametrize("mesh", [ft.Mesh(tp=2), ft.Mesh(dp=2, tp=2)], ids=str)
def test_loss_and_gradients_on_a_mesh(stored, mesh, name):
    model, path = stored
    fused = name in FUSED
    config = config_of(path, dtype="float64", fused_projections=fused)
    assert not fused or config.kv_heads % mesh["tp"] == 0
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    weights = hub.load(path, config, specs=specs, mesh=mesh)

    def step(weights, data):
        value, grads = ft.value_and_grad(partial(mean_loss, config))(weights, data)
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(step, mesh, (specs, P(DATA_AXES)), (P(), specs))
    tokens = tiny.tokens()
    value, grads = mapped(weights, batch(tokens))
    expected, named = gradients(model.double(), tokens)
    torch.testing.assert_close(value, expected.double(), rtol=1e-6, atol=0)
    assert_close(grads, hub.from_tensors(model.config.model_type, config, named), 1e-5)


def assert_same_weights(model, other) -> None:
    theirs, found = model.state_dict(), other.state_dict()
    assert theirs.keys() == found.keys()
    for name, value in theirs.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype


def test_what_is_exported_is_what_was_imported(stored, tmp_path):
    model, path = stored
    config = config_of(path)
    out = tmp_path / "out"
    hub.save(out, config, hub.load(path, config), like=path, max_shard_bytes=30_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_same_weights(model, tiny.read_back(out))
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (path / "config.json").read_text()
    )
    again = hub.load(out, config)
    assert all(map(torch.equal, tree.leaves(again), tree.leaves(hub.load(path, config))))


@pytest.mark.parametrize("name", [*FUSED, "gemma2", "gpt2", "glm"])
def test_joined_projections_are_of_the_same_tensors(stored):
    model, path = stored
    config = config_of(path, fused_projections=True)
    weights = hub.load(path, config)
    attention = weights["blocks"]["attention"]
    assert "qkv" in attention
    assert not {"q", "k", "v"} & attention.keys()
    named = hub.to_tensors(config, weights, model.config.model_type)
    theirs = dict(model.named_parameters())
    assert named.keys() == theirs.keys()
    assert all(torch.equal(named[name], value) for name, value in theirs.items())


def test_an_export_without_the_original_is_the_same_model(stored, tmp_path):
    model, path = stored
    config = config_of(path)
    hub.save(tmp_path / "out", config, hub.load(path, config), model_type=model.config.model_type)
    tokens = tiny.tokens()
    back = tiny.read_back(tmp_path / "out")
    assert torch.equal(back(tokens).logits, model(tokens).logits)
    assert not differences(hub.read_config(tmp_path / "out"), hub.read_config(path))


def test_a_step_of_training_comes_back(name, stored, tmp_path):
    """One step of SGD here, exported, is one step of SGD there."""
    model, path = stored
    config = config_of(path)
    weights, tokens = hub.load(path, config), tiny.tokens()
    step = ft.make_step(
        ft.mean_gradients(
            lambda params, data, key: gpt.loss(config, params, data),
            gpt.num_targets,
            checks_sum=False,
        ),
        optim.sgd(0.5),
        ft.Mesh(),
        P(),
    )
    start = ft.State(
        torch.zeros((), dtype=torch.int64), weights, optim.sgd(0.5).init(weights), ft.random.key(0)
    )
    state, _ = step(start, batch(tokens))
    hub.save(tmp_path / "out", config, state.params, like=path)
    back = tiny.read_back(tmp_path / "out")
    named = hub.to_tensors(config, state.params, model.config.model_type)
    named = {IN_MEMORY.get(key, key): value for key, value in named.items()}
    for key, value in back.state_dict().items():
        if key in named:
            assert torch.equal(value, named[key]), key
    assert named.keys() == {key for key, _ in model.named_parameters()}

    model(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    moved = 0.0
    before = tiny.make(name).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], value, rtol=1e-5, atol=1e-6)
        moved = max(moved, (value - before[key]).abs().max().item())
    assert moved > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(name, dtype, tmp_path):
    """Weights are stored in the dtype asked for, and read into the config's."""
    model = tiny.make(name).to(getattr(torch, dtype))
    path = tiny.store(model, tmp_path / "model")
    config = hub.read_config(path)
    assert config.dtype == ("bfloat16" if dtype == "bfloat16" else "float32")
    weights = hub.load(path, config)
    assert {leaf.dtype for leaf in tree.leaves(weights)} == {config.torch_dtype}
    hub.save(tmp_path / "out", config, weights, like=path, dtype=dtype)
    back = tiny.read_back(tmp_path / "out")
    assert back.dtype == getattr(torch, dtype)
    assert_same_weights(model, back)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_logits_in_bfloat16(name, tmp_path):
    """As near to the exact logits as transformers' own bfloat16, up to a factor of 2."""
    model = tiny.make(name).bfloat16()
    path = tiny.store(model, tmp_path / "model")
    tokens = tiny.tokens()
    config = config_of(path)
    ours = gpt.forward(config, hub.load(path, config), tokens)[..., : tiny.VOCAB].double()
    theirs = model(tokens).logits.detach().double()
    exact = model.double()(tokens).logits.detach()
    assert (ours - exact).norm() < 2 * (theirs - exact).norm()


CHANGES = {
    "gemma2-gelu": ("gemma2", {"hidden_activation": "gelu"}),
    "gemma2-global": ("gemma2", {"layer_types": ["full_attention"] * tiny.LAYERS}),
    "gemma3-gelu": ("gemma3", {"hidden_activation": "gelu"}),
    "gemma3-cap": ("gemma3", {"attn_logit_softcapping": 0.5}),  # which transformers does not apply
    "gemma3-global": ("gemma3", {"layer_types": ["full_attention"] * tiny.LAYERS}),
}
"""Entries that mean something else than they seem to."""


@pytest.mark.parametrize("name", CHANGES)
def test_entries_mean_what_transformers_makes_of_them(name, tmp_path):
    family, changes = CHANGES[name]
    model = tiny.make(family, **changes)
    config, params = hub.load_model(tiny.store(model, tmp_path / "model"))
    expected = model(tiny.tokens()).logits.detach()
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    close(gpt.forward(config, params, tiny.tokens())[..., : tiny.VOCAB], expected)
    assert expected.abs().max() > 0.5
    hub.save(tmp_path / "out", config, params)
    close(tiny.read_back(tmp_path / "out")(tiny.tokens()).logits.detach(), expected)


@pytest.mark.parametrize("max_seq", [8, tiny.MAX_SEQ])
def test_longrope_of_short_and_of_long_sequences(max_seq, tmp_path):
    """transformers takes the short factors for up to 8 tokens, and else the long ones."""
    model = tiny.make("phi3", **tiny.LONG_ROPE)
    path = tiny.store(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"pass max_seq=8 \(--max-seq 8\) for the first, or 24"):
        hub.read_config(path)
    config, params = hub.load_model(path, max_seq=max_seq)
    tokens = tiny.tokens()[:, : min(max_seq, 12)]
    expected = model(tokens).logits.detach()
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    close(gpt.forward(config, params, tokens)[..., : tiny.VOCAB], expected)
    hub.save(tmp_path / "out", config, params)
    close(tiny.read_back(tmp_path / "out")(tokens).logits.detach(), expected)


def test_older_entries_of_ropes_go_before_newer_ones(tmp_path):
    """Gemma 3's `rope_scaling`, beside the `rope_parameters` of transformers 5."""
    model = tiny.make("gemma3")
    path = tiny.store(model, tmp_path / "model")
    table = json.loads((path / "config.json").read_text())
    table["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (path / "config.json").write_text(json.dumps(table))
    expected = tiny.read_back(path)(tiny.tokens()).logits.detach()
    assert (expected - model(tiny.tokens()).logits).abs().max() > 0.01
    config, params = hub.load_model(path)
    got = gpt.forward(config, params, tiny.tokens())[..., : tiny.VOCAB]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_activations_are_those_of_transformers():
    ours = {**ft.nn.layers.ACTIVATIONS, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for theirs, name in ACTIVATIONS.items():
        made = ACT2FN[theirs]
        torch.testing.assert_close(ours[name](x), made(x), rtol=1e-6, atol=1e-9)


def test_constants_of_xielu_are_those_of_our_code(tmp_path):
    """They stand in files, where others would be another function."""
    model = tiny.make("apertus")
    model.model.layers[1].mlp.act_fn.beta.fill_(0.25)
    path = tiny.store(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"layers.1.mlp.act_fn.beta: got 0.25; wanted 0.5, as in"):
        hub.load_model(path)


def test_dynamic_rope_of_hunyuan_without_alpha(tmp_path):
    """Plain up to the longest sequence, as transformers has it."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny.make("hunyuan", rope_parameters=rope)
    config, params = hub.load_model(tiny.store(model, tmp_path / "model"))
    assert config.rope_theta == 1e4
    expected = model(tiny.tokens()).logits.detach()
    got = gpt.forward(config, params, tiny.tokens())[..., : tiny.VOCAB]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
