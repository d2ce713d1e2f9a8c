"""Every architecture beside the decoder, on meshes and with options: the dense numbers in float64.

Dense is one rank without a mesh, differentiated by torch.func; that the dense model is the right
one is what test_hugging_face_architectures.py shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import functron as ft
from functron import Mesh, P, bert, gpt, llava, mamba, random, t5, tree, vit
from functron.apps.zoo.denoising import mask_tokens
from functron.transforms import Gather

TOLERANCE = 1e-10
BATCH, SEQ, VOCAB = 8, 16, 50
STREAMS = {
    "": gpt.STREAM,
    "sequence-parallel": gpt.SEQUENCE_PARALLEL_STREAM,
    "uneven": P(ft.DATA_AXES, ft.Uneven("tp", 16)),
}


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


def text() -> dict:
    tokens = integers(0, VOCAB, BATCH, SEQ + 1)
    targets = tokens[:, 1:].clone()
    targets[0, :12] = ft.nn.IGNORE_INDEX  # so that ranks and microbatches hold different counts
    targets[5] = ft.nn.IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


@dataclass(frozen=True)
class Model:
    """An architecture, of a module with `defs`, `rules`, `loss` and `num_targets`, and its data."""

    module: Any
    config: Any
    batch: Callable[[], dict]

    def num_targets(self, batch: dict) -> torch.Tensor:
        """Over all ranks; some modules need the config for that."""
        if self.module is llava:
            return llava.num_targets(self.config, batch)
        return self.module.num_targets(batch)


HYBRID = mamba.MambaConfig(
    pattern="MM-*M", vocab_size=VOCAB, embed_dim=24, num_heads=8, head_dim=4, num_groups=4,
    state_dim=6, chunk=5, attention_heads=8, attention_kv_heads=4, attention_head_dim=4,
    mlp_dim=48, init_stddev=0.3, dtype="float64", dropout=0.2, tied=False, dt_min=0.05,
)  # fmt: skip
BERT = bert.BertConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=24, num_heads=8, mlp_dim=48, max_seq=SEQ,
    init_stddev=0.3, dtype="float64", dropout=0.2,
)  # fmt: skip


def masked_text() -> dict:
    lengths = torch.tensor([16, 3, 9, 16, 1, 16, 12, 5])
    mask = torch.arange(SEQ) < lengths[:, None]
    tokens = integers(0, VOCAB, BATCH, SEQ)
    batch = {"tokens": tokens, "mask": mask, "types": tokens % 2, "rows": torch.arange(BATCH)}
    return mask_tokens(batch, 0, 0, mask_id=VOCAB - 1, vocab_size=VOCAB, rate=0.5)


T5 = t5.T5Config(
    vocab_size=VOCAB, num_layers=2, decoder_layers=1, embed_dim=24, num_heads=8, head_dim=4,
    mlp_dim=48, num_buckets=8, max_distance=10, tied=True, dtype="float64", dropout=0.2,
)  # fmt: skip


def pairs() -> dict:
    batch = masked_text()
    targets = text()["targets"][:, :8]
    targets[0, 3] = 1  # a whole microbatch without targets would have no loss
    return {name: batch[name] for name in ("tokens", "mask", "rows")} | {"targets": targets}


VIT = vit.ViTConfig(
    image_size=6, patch_size=2, num_layers=2, embed_dim=24, num_heads=8, mlp_dim=48, num_classes=5,
    init_stddev=0.3, class_multiple=8, dtype="float64",
)  # fmt: skip
CLIP = replace(VIT, activation="quick_gelu", patch_bias=False, pre_norm=True, final_norm=False)
LLAVA = llava.LlavaConfig(
    replace(CLIP, num_classes=0),
    gpt.GPTConfig(
        vocab_size=VOCAB, num_layers=2, embed_dim=24, num_heads=8, num_kv_heads=2, head_dim=4,
        mlp_dim=48, max_seq=SEQ, init_stddev=0.3, dtype="float64", dropout=0.2, embed_scale=2.0,
        positions="learned",
    ),
    image_token=3,
)  # fmt: skip


def pictures(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, 3, 6, 6, generator=generator, dtype=torch.float64)


def labelled_pictures() -> dict:
    targets = integers(0, 5, BATCH)
    targets[2] = ft.nn.IGNORE_INDEX
    return {"images": pictures(BATCH), "targets": targets}


def illustrated_text() -> dict:
    batch = text()
    tokens = torch.where(batch["tokens"] == 3, 4, batch["tokens"])
    tokens[:, 2:11] = 3  # one image of nine patches each, and none
    tokens[4] = 9
    targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    return {
        "tokens": tokens,
        "targets": targets,
        "images": pictures(BATCH, 2),
        "rows": batch["rows"],
    }


MODELS = {
    "mamba": Model(mamba, replace(HYBRID, pattern="MM", num_groups=1, tied=True), text),
    "hybrid": Model(mamba, HYBRID, text),
    "bert": Model(bert, BERT, masked_text),
    "t5": Model(t5, T5, pairs),
    "vit": Model(vit, VIT, labelled_pictures),
    "llava": Model(llava, LLAVA, illustrated_text),
}

LARGEST = ("hybrid", "bert", "t5", "llava")  # which have all that the others have


@functools.cache
def dense(name: str):
    """Parameters, batch, key, and the dense loss and gradients."""
    model = MODELS[name]
    weights = ft.init_params(random.key(0), model.module.defs(model.config))
    key, data = random.key(7), model.batch()
    total = model.num_targets(data)
    loss = functools.partial(model.module.loss, model.config, batch=data, key=key)
    grads, value = torch.func.grad_and_value(lambda w: loss(w) / total)(weights)
    return weights, data, key, value, grads


def sharded(name, mesh, stream="", remat="none", num_microbatches=1, fsdp=("fsdp",), uneven=()):
    """The per-rank gradient program on `mesh`, as a function of global values."""
    module, config = MODELS[name].module, MODELS[name].config
    rules = module.rules(config, mesh, fsdp=fsdp, uneven=uneven)
    specs = ft.param_specs(module.defs(config), rules)
    options = ft.ModelOptions(STREAMS[stream], remat, ft.Gather(specs))

    def program(weights, data, key):
        total = MODELS[name].num_targets(data)

        def loss(weights, data):
            return module.loss(config, weights, data, options, key=key) / total

        both = ft.accumulate(ft.value_and_grad(loss), num_microbatches)
        value, grads = both(weights, data)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), (P(), specs))


def assert_equal(value, grads, want_value, want_grads):
    assert abs(value - want_value) <= TOLERANCE * abs(want_value)
    rows = zip(tree.paths(grads), tree.leaves(grads), tree.leaves(want_grads), strict=True)
    for path, got, want in rows:
        # softmax does not see a shift of its scores: biases of keys have no gradient
        assert want.abs().max() > 0 or path.endswith("k/b"), path
        error = (got - want).abs().max() / want.abs().max().clamp(min=1e-3)
        assert error <= TOLERANCE, f"{path}: {error}"


def factors(name, mesh, stream, remat, num_microbatches):
    """Each architecture split by tensor parallelism and not, and each mesh."""
    return [{"name": name, "tp": mesh["tp"] > 1}, {"mesh": mesh}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(
    ("mesh", "stream", "remat", "num_microbatches"),
    [
        (Mesh(dp=4), "", "selective", 2),
        (Mesh(tp=2), "", "none", 1),
        (Mesh(tp=8), "sequence-parallel", "dots", 1),
        (Mesh(dp=2, fsdp=2, tp=2), "sequence-parallel", "full", 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_composition(name, mesh, stream, remat, num_microbatches):
    weights, data, key, value, grads = dense(name)
    f = sharded(name, mesh, stream, remat, num_microbatches)
    assert_equal(*f(weights, data, key), value, grads)


@pytest.mark.parametrize("name", MODELS)
def test_without_dropout_a_key_costs_nothing(name, no_random_numbers):
    model = MODELS[name]
    config = model.config
    if model.module is llava:
        config = replace(config, text=replace(config.text, dropout=0.0))
    elif model.module is not vit:
        config = replace(config, dropout=0.0)
    weights, data, key, *_ = dense(name)
    with no_random_numbers():
        value = model.module.loss(config, weights, data, key=key)
    assert value == model.module.loss(config, weights, data)


@pytest.mark.parametrize("name", MODELS)
def test_split_over_all_data_ranks(name):
    """ZeRO-3 over dp and fsdp together."""
    weights, data, key, value, grads = dense(name)
    f = sharded(name, Mesh(dp=2, fsdp=2), fsdp=("dp", "fsdp"))
    assert_equal(*f(weights, data, key), value, grads)


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "llava"])
def test_uneven_splits(name):
    """5 ranks of tp divide neither vocabularies, nor 8 heads, nor 48 features."""
    weights, data, key, value, grads = dense(name)
    f = sharded(name, Mesh(tp=5), uneven=("vocab", "heads", "mlp", "embed"))
    assert_equal(*f(weights, data, key), value, grads)


@pytest.mark.parametrize("name", ["bert", "vit", "llava", "t5"])
def test_uneven_sequences(name):
    """16 tokens over 5 ranks; T5's decoder has another length, which no such stream has."""
    weights, data, key, value, grads = dense(name)
    f = sharded(name, Mesh(tp=5), "uneven", uneven=("vocab", "heads", "mlp", "embed"))
    if name == "t5":
        with pytest.raises(ValueError, match="got 8 tokens per sample; wanted 16"):
            f(weights, data, key)
    else:
        assert_equal(*f(weights, data, key), value, grads)


def test_groups_of_states_are_not_split_unevenly():
    with pytest.raises(ValueError, match="uneven: got 'heads'; wanted logical"):
        mamba.rules(HYBRID, Mesh(tp=3), uneven=("heads",))


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=8)], ids=str)
def test_the_197_tokens_of_an_image(mesh):
    """Of 224 x 224 in patches of 16; split over ranks that divide them with padding alone."""
    config = replace(VIT, image_size=224, patch_size=16, num_layers=1)
    weights = ft.init_params(random.key(0), vit.defs(config))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, 224, 224, generator=generator, dtype=torch.float64)
    data = {"images": images, "targets": torch.tensor([3])}
    grads, value = torch.func.grad_and_value(lambda w: vit.loss(config, w, data))(weights)
    specs = ft.param_specs(vit.defs(config), vit.rules(config, mesh))
    options = ft.ModelOptions(STREAMS["sequence-parallel"])

    def program(weights, data):
        loss = lambda weights: vit.loss(config, weights, data, options)
        value, grads = ft.value_and_grad(loss)(weights)
        return value, ft.sync_gradients(grads, specs)

    f = ft.shard_map(program, mesh, (specs, P()), (P(), specs))
    assert_equal(*f(weights, data), value, grads)


@pytest.mark.parametrize(
    "name", [pytest.param("bert", marks=pytest.mark.full), "hybrid", "t5", "llava"]
)
def test_traced_programs_are_right_and_replicated(name):
    weights, data, key, value, grads = dense(name)
    f = sharded(name, Mesh(dp=2, tp=2), "sequence-parallel")
    program = ft.trace(f)(weights, data, key)
    program.check()
    assert_equal(*program(weights, data, key), value, grads)


@pytest.mark.parametrize("name", MODELS)
def test_differentiated_from_outside(name):
    weights, data, key, value, grads = dense(name)
    module, config, mesh = MODELS[name].module, MODELS[name].config, Mesh(dp=2, tp=2)
    specs = ft.param_specs(module.defs(config), module.rules(config, mesh))

    def program(weights, data, key):
        return module.loss(config, weights, data, key=key) / MODELS[name].num_targets(data)

    mapped = ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), P())
    got, got_value = torch.func.grad_and_value(mapped)(weights, data, key)
    assert_equal(got_value, got, value, grads)


@pytest.mark.parametrize("name", LARGEST)
def test_steps_reduce_the_loss_and_scatter_gradients(name):
    """`make_step` with ZeRO-2's scattered gradients takes the same steps as one rank."""
    module, config = MODELS[name].module, MODELS[name].config
    data, losses = MODELS[name].batch(), []
    for mesh, scatter in ((Mesh(), False), (Mesh(dp=2, tp=2), True)):
        defs = module.defs(config)
        specs = ft.param_specs(defs, module.rules(config, mesh))
        optimizer = ft.optim.adamw(3e-3)
        if scatter:
            shards = ft.optim.shard_specs(defs, specs, mesh)
            optimizer = ft.optim.zero(optimizer, specs, shards)
        state = ft.init_state(random.key(0), defs, specs, optimizer, mesh)

        def loss(params, batch, key):
            return module.loss(config, params, batch)  # without dropout, whose noise is larger

        gradients = ft.mean_gradients(loss, MODELS[name].num_targets)
        gradients = ft.scattered(gradients) if scatter else gradients
        step = ft.make_step(gradients, optimizer, mesh, specs)
        values = []
        for _ in range(2):
            state, metrics = step(state, data)
            values.append(metrics["loss"].item())
        losses.append(values)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(("axis", "fix"), [("pp", "dp, fsdp or tp"), ("cp", "tp"), ("ep", "tp")])
@pytest.mark.parametrize("name", MODELS)
def test_axes_that_nothing_splits_are_refused(name, axis, fix):
    with pytest.raises(ValueError, match=f"{axis}=2(.|\n)*{fix}"):
        MODELS[name].module.rules(MODELS[name].config, Mesh(**{axis: 2}))


@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_do_not_divide_are_refused_together(name):
    with pytest.raises(ValueError, match=r"tp=5(.|\n)*fsdp"):
        MODELS[name].module.rules(MODELS[name].config, Mesh(tp=5, fsdp=7))
    with pytest.raises(ValueError, match="model"):
        MODELS[name].module.PRESETS["no such model"]


# --- Mamba-2


def test_steps_give_the_logits_of_whole_sequences():
    weights, data, *_ = dense("hybrid")
    want = mamba.forward(HYBRID, weights, data["tokens"])
    mesh = Mesh(dp=2, tp=8)
    specs = ft.param_specs(mamba.defs(HYBRID), mamba.rules(HYBRID, mesh))

    def generate(weights, tokens):
        cache, rows = mamba.empty_cache(HYBRID, weights, len(tokens)), []
        for now in tokens.unbind(1):
            logits, cache = mamba.step(HYBRID, weights, now, cache)
            rows.append(logits)
        return torch.stack(rows, 1)

    mapped = ft.shard_map(
        generate, mesh, (specs, P(ft.DATA_AXES)), P(ft.DATA_AXES, None, "tp")
    )  # fmt: skip
    torch.testing.assert_close(mapped(weights, data["tokens"]), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pattern": "MX"}, "M .mamba"),
        ({"num_groups": 3}, "divisor of num_heads"),
        ({"chunk": 0}, "chunk"),
        ({"dropout": 1.0}, "below 1"),
    ],
    ids=str,
)
def test_what_is_no_mamba_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        replace(HYBRID, **changes)


def test_packed_documents_are_refused():
    weights, data, *_ = dense("mamba")
    with pytest.raises(ValueError, match="do not pack"):
        mamba.loss(HYBRID, weights, data | {"segments": data["tokens"]})


def test_sizes_of_presets_are_the_published_ones():
    """Counted by hand: 130m's 24 layers of width 768, inner 1536, 24 heads, state 128; and 8.1e9."""
    layer = 768 * (2 * 1536 + 2 * 128 + 24) + (1536 + 256) * 5 + 3 * 24 + 1536 + 1536 * 768 + 768
    config = mamba.PRESETS["mamba2-130m"]
    assert ft.num_params(mamba.defs(config)) == 50288 * 768 + 24 * layer + 768
    assert 8.0e9 < ft.num_params(mamba.defs(mamba.PRESETS["nemotron-h-8b"])) < 8.2e9


# --- images


def test_images_that_are_not_fit_are_said():
    weights, data, *_ = dense("llava")
    llava.check_batch(LLAVA, data)
    tokens = data["tokens"].clone()
    tokens[2, 12] = 3
    with pytest.raises(ValueError, match=r"tokens\[2\](.|\n)*10 image tokens(.|\n)*9 patches"):
        llava.check_batch(LLAVA, data | {"tokens": tokens})
    with pytest.raises(ValueError, match=r"wanted \(3, 6, 6\)"):
        llava.loss(LLAVA, weights, data | {"images": data["images"][..., :4]})
    with pytest.raises(ValueError, match=r"vit\.features"):
        vit.forward(LLAVA.vision, weights["vision"], data["images"][:, 0])
    with pytest.raises(ValueError, match="leave out moe"):
        replace(LLAVA, text=replace(LLAVA.text, mtp_depth=1))


def test_image_tokens_are_no_targets():
    _, data, *_ = dense("llava")
    assert llava.num_targets(LLAVA, data) == (data["targets"] != 3).sum()


def test_a_connector_alone_is_trained():
    weights, data, *_ = dense("llava")
    chosen = {"vision": False, "connector": True, "text": False}
    optimizer = ft.optim.only(ft.optim.sgd(0.1), chosen)
    mesh, defs = Mesh(dp=2), llava.defs(LLAVA)
    specs = ft.param_specs(defs, llava.rules(LLAVA, mesh))
    copies = tree.map(torch.clone, weights)
    state = ft.init_state(random.key(0), defs, specs, optimizer, mesh, copies)
    step = ft.make_step(
        ft.frozen(
            ft.mean_gradients(
                lambda params, batch, key: llava.loss(LLAVA, params, batch),
                MODELS["llava"].num_targets,
            ),
            chosen,
        ),
        optimizer,
        mesh,
        specs,
    )
    state, _ = step(state, data)
    moved = tree.map(lambda new, old: bool((new != old).any()), state.params, weights)
    assert all(tree.leaves(moved["connector"]))
    assert not any(tree.leaves([moved["vision"], moved["text"]]))


@pytest.mark.pairwise(of=lambda mesh, tied: [{"mesh": mesh}, {"tied": tied}])
@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2", "fsdp=2,tp=4"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_t5_says_with_a_cache_what_it_decodes(tied, mesh):
    config = t5.T5Config(
        vocab_size=37, num_layers=1, decoder_layers=3, embed_dim=16, num_heads=4, head_dim=5,
        mlp_dim=24, num_buckets=4, max_distance=6, tied=tied, gated=not tied, init_factor=2.0,
        vocab_multiple=8, dtype="float64",
    )  # fmt: skip
    mesh = Mesh.parse(mesh)
    weights = ft.init_params(random.key(0), t5.defs(config))
    drawn = torch.Generator().manual_seed(1)
    tokens, given = (torch.randint(0, 37, (2, size), generator=drawn) for size in (7, 12))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    wanted = t5.forward(config, weights, tokens, given, mask=mask)[..., :37]
    specs = ft.param_specs(t5.defs(config), t5.rules(config, mesh))
    gather, rows = Gather(specs), P(ft.DATA_AXES)

    def logits(weights, tokens, mask, given):
        cache = t5.prefill(
            config, weights, tokens, ft.ModelOptions(gather=gather), room=14, mask=mask
        )
        found = []
        for index, said in enumerate(given.unbind(1)):
            place = torch.tensor(index)
            now, cache = t5.extend(
                config, weights, cache, said, place, ft.ModelOptions(gather=gather), mask=mask
            )
            found.append(now)
        return torch.stack(found, 1), cache

    out = (rows, t5.cache_specs(config))
    mapped = ft.shard_map(logits, mesh, (specs, rows, rows, rows), out)
    got, cache = mapped(weights, tokens, mask, given)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert cache.own.k.shape == (3, 2, 14, 4, 5)
    assert cache.memory.v.shape == (3, 2, 7, 4, 5)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_models_that_continue_no_text_are_refused(name):
    config = {"bert": BERT, "t5": t5.PRESETS["t5-tiny"]}[name]
    with pytest.raises(
        TypeError, match=f"config: got a {name.upper()}; wanted the config of a mod"
    ):
        ft.generate({}, config, integers(0, VOCAB, 1, 4), 2, temperature=0)


def test_options_without_a_place_are_refused():
    hook = ft.Hook(lambda q, k, v: v)
    options = ft.ModelOptions(context=gpt.Context("gather"), expert_axes=(), attention=hook)
    with pytest.raises(ValueError, match=r"bert cannot be run with these options") as error:
        bert.forward(bert.PRESETS["bert-tiny"], {}, text()["tokens"], options)
    for name in ("context", "expert_axes", "attention"):
        assert f"options.{name}" in str(error.value)


def test_a_batch_without_what_the_model_reads_is_told():
    families = {
        bert: ("tokens", "targets"),
        t5: ("tokens", "targets"),
        mamba: ("tokens", "targets"),
        vit: ("images", "targets"),
        llava: ("tokens", "targets", "images"),
    }
    tokens = integers(0, VOCAB, 2, 4)
    others = {"input_ids": tokens, "labels": tokens, "pixel_values": tokens.double()}
    for family, names in families.items():
        own = next(iter(family.PRESETS.values()))
        with pytest.raises(ValueError, match="the batch cannot be used") as caught:
            family.loss(own, {}, others)
        for name in names:
            wanted = f"- {name}: got a batch with input_ids, labels, pixel_values"
            assert wanted in str(caught.value)
        with pytest.raises(ValueError, match=r"targets: got .*labels\[:, 1:\] of tokens"):
            family.num_targets(*([own] if family is llava else []), others)
