"""Samples in Megatron-LM's order, token for token what Megatron-Core 0.16.1 draws.

Expected values are those of its own code, by tests/data/make_megatron.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from functron import Mesh, optim
from functron.apps.megatron import sample_order
from functron.apps.megatron.sample_order import MegatronWindows, count_samples, make_samples
from functron.cli.main import main
from functron.cli.train import parse_train
from functron.data import Blend, IndexedWriter
from functron.data.indexed import IndexedFile
from functron.data.shards import verify
from functron.models.family import list_presets
from functron.training import data
from functron.training.checks import validate
from functron.training.config import configure
from functron.training.data import open_texts
from functron.training.evaluation import open_sets
from functron.training.run import prepare
from functron.training.setup import make_setup

MADE = Path(__file__).parents[2] / "data" / "megatron"
SETTINGS = json.loads((MADE / "cases.json").read_text())
CASES = {case["name"]: case for case in SETTINGS["cases"]}


@pytest.fixture(scope="module")
def arrays():
    with np.load(MADE / "samples.npz") as found:
        return {name: found[name] for name in found.files}


@pytest.fixture(scope="module")
def files():
    return {name: IndexedFile(MADE / name) for name in "abc"}


def opened(case: dict, part: str, files: dict, **options):
    return make_samples(
        [files[name] for name in case["data"]],
        case["seq"],
        case["sizes"][sample_order.PARTS.index(part)],
        weights=case.get("weights"),
        names=case["data"],
        split=case.get("split") or "",
        part=part,
        surplus=case.get("surplus", 0.005),
        seed=case["seed"],
        extra_token=case.get("extra_token", True),
        drop_last=part != "validation" or case.get("drop_last", True),
        mask_documents=case.get("reset", False),
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_its_datasets(name, files, arrays):
    case = CASES[name]
    for part in set(case["arrays"]) & set(sample_order.PARTS):
        tokens, targets = arrays[f"{name}/{part}"]
        samples = opened(case, part, files)
        assert count_samples(samples) == len(tokens)
        drawn = samples.draw(np.arange(len(tokens)))
        np.testing.assert_array_equal(drawn["tokens"], tokens)
        np.testing.assert_array_equal(drawn["targets"], targets)
        if case["sizes"][sample_order.PARTS.index(part)] is not None:
            with pytest.raises(ValueError, match=f"wanted below {len(tokens)}"):
                samples.draw(np.array([len(tokens)]))


def test_the_cases_have_a_last_epoch_apart_and_not(files):
    kinds = {
        (x.num_epochs > 1, x._num_first < x.num_ordered)
        for case in CASES.values() if case.get("split") is None and len(case["data"]) == 1
        for x in [opened(case, "train", files)]
    }  # fmt: skip
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("reset")])
def test_documents_are_apart_as_by_its_three_flags(name, files, arrays):
    """--reset-position-ids --reset-attention-mask --eod-mask-loss."""
    positions = arrays[f"{name}/positions"]
    drawn = opened(CASES[name], "train", files).draw(np.arange(len(positions)))
    np.testing.assert_array_equal(drawn["positions"], positions)
    seq = positions.shape[1]
    hidden = np.unpackbits(arrays[f"{name}/hidden"])[: len(positions) * seq * seq]
    segments = drawn["segments"].numpy()
    ours = (segments[:, :, None] != segments[:, None]) | ~np.tri(seq, dtype=bool)
    np.testing.assert_array_equal(ours, hidden.reshape(-1, seq, seq))


@pytest.mark.parametrize(("stretch", "passes"), [(64, 6), (64, 0), (1 << 11, 6)])
def test_blends_are_those_of_its_compiled_helpers(stretch, passes, arrays, monkeypatch):
    monkeypatch.setattr(sample_order, "_STRETCH", stretch)
    monkeypatch.setattr(sample_order, "_PASSES", passes)
    for index, weights in enumerate(SETTINGS["weights"]):
        wanted = arrays[f"weights{index}"][: 30_000 if passes else 6_000]
        mixture = sample_order.MegatronMixture(weights, len(wanted), [10**6] * len(weights))
        numbers = np.arange(len(wanted))
        sources, own = mixture.at(numbers)
        np.testing.assert_array_equal(sources, wanted)
        for source in range(len(weights)):
            np.testing.assert_array_equal(
                own[wanted == source], np.arange((wanted == source).sum())
            )
        for count in (0, 1, 4096, 4097, len(wanted)):
            counted = np.bincount(wanted[:count], minlength=len(weights))
            np.testing.assert_array_equal(mixture.positions(count), counted)
    for index, sizes in enumerate(SETTINGS["sizes"]):
        mixture = sample_order.MegatronMixture(sizes, None, sizes)
        found, _ = mixture.at(np.arange(mixture.size))
        np.testing.assert_array_equal(found, arrays[f"sizes{index}"])


def test_tables_are_kept_and_found_and_made_again(files, tmp_path, monkeypatch):
    case = CASES["case34"]  # a blend of three
    wanted = opened(case, "train", files).draw(np.arange(100))
    opened(case, "train", files, cache=tmp_path / "kept")
    kept = sorted((tmp_path / "kept").iterdir())
    assert len(kept) == 3 * 3 + 2
    with monkeypatch.context() as patched:
        patched.setattr(MegatronWindows, "_shuffle", None)
        patched.setattr(sample_order, "_choose_by_deficit", None)
        found = opened(case, "train", files, cache=tmp_path / "kept").draw(np.arange(100))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    kept[0].write_bytes(kept[0].read_bytes()[:-8])  # cut off
    opened(case, "train", files, cache=tmp_path / "kept")
    assert sorted((tmp_path / "kept").iterdir()) == kept
    opened({**case, "seed": 5}, "train", files, cache=tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == len(kept) + 9  # the blend has no seed
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"order_cache .*wanted a place to write"):
        opened(case, "train", files, cache=tmp_path / "file")


def test_only_what_is_needed_is_built(files):
    samples = opened(CASES["case34"], "train", files, build=False)
    assert isinstance(samples, Blend)
    assert not any("_tables" in vars(x) for x in (samples.mixture, *samples._sources))


# --- as a command

TINY = [
    "--gpt.num-layers", "1", "--gpt.embed-dim", "16", "--gpt.num-heads", "2", "--gpt.num-kv-heads",
    "2", "--gpt.mlp-dim", "16", "--gpt.vocab-size", "2048", "--gpt.vocab-multiple", "8",
    "--learning-rate.total-steps", "9", "--prefetch", "0",
]  # fmt: skip


def options(case: dict, *more) -> list[str]:
    paths, weights = [str(MADE / name) for name in case["data"]], case.get("weights")
    blend = [f"{weight} {path}" for weight, path in zip(weights or [], paths, strict=False)]
    found = ["--data", " ".join(blend or paths), "--seed", case["seed"], "--seq", case["seq"]]
    found += ["--split", case["split"]] if case.get("split") else []
    return [*TINY, "--order", "megatron", *map(str, (*found, *more))]


def sampled(consumed: int, total: int, micro: int, ranks: int, rank: int):
    """MegatronPretrainingSampler: a rank's microbatches of the samples that are left."""
    batch = []
    for index in range(consumed, total):
        batch.append(index)
        if len(batch) == micro * ranks:
            yield batch[rank * micro : (rank + 1) * micro]
            batch = []


def test_a_run_reads_the_batches_of_its_sampler(arrays, tmp_path):
    """Batches grow: each step has the samples that its ranks' next microbatches have together."""
    name = "case38"  # a, b and c in equal parts, past an epoch
    case, tokens = CASES[name], arrays[f"{name}/train"][0]
    more = ["--order-samples", case["sizes"][0], "--steps", 9, "--global-batch", 24]
    more += ["--ramp-up", "8 8 64"]
    config = parse_train(options(case, *more))
    validate(config)
    run, micro, ranks = prepare(config, Mesh.parse("dp=2")), 2, 2
    streams = [sampled(0, len(tokens), micro, ranks, rank) for rank in range(ranks)]
    for step in range(config.steps):
        size = config.data.batches.batch_size(step)
        numbers = [n for _ in range(size // (micro * ranks)) for x in streams for n in next(x)]
        np.testing.assert_array_equal(run.batch(step)["tokens"], tokens[numbers])
    consumed = config.data.batches.first_sample(5)  # as after resuming
    streams = [sampled(consumed, len(tokens), micro, ranks, rank) for rank in range(ranks)]
    numbers = [
        n for _ in range(config.data.batches.batch_size(5) // 4) for x in streams for n in next(x)
    ]
    np.testing.assert_array_equal(run.batch(5)["tokens"], tokens[numbers])


def test_a_run_goes_on_with_the_next_samples(arrays, tmp_path, capsys):
    case, run = CASES["case4"], tmp_path / "run"
    more = ["--global-batch", 10, "--out", run, "--order-cache", tmp_path / "kept"]
    assert main(["train", *options(case, *more, "--steps", 2, "--order-samples", 300)]) == 0
    config = parse_train(["--out", str(run), "--resume", "--steps", "30"])
    validate(config)
    wanted = arrays["case4/train"][0]
    np.testing.assert_array_equal(prepare(config, Mesh()).batch(2)["tokens"], wanted[20:30])
    capsys.readouterr()
    for word, said in [
        (["--order-samples", "0", "--steps", "4"], "order_samples: got 40; wanted 300, as in the run; fix: add --order-samples 300"),
        (["--order", "arithmetic", "--order-samples", "0"], "order: got 'arithmetic'; wanted 'megatron', as in the run"),
        (["--steps", "34"], "steps: got 34, up to sample 340; wanted at most 336, which the order has"),
    ]:  # fmt: skip
        assert main(["train", "--out", str(run), "--resume", *word]) == 2
        assert said in capsys.readouterr().err


def test_held_out_samples_are_those_of_full_validation(arrays):
    case = CASES["case17"]
    more = ["--steps", 7, "--global-batch", 10, "--eval-every", 1]
    config = parse_train(options(case, *more))
    (held_out,) = open_sets(config)
    wanted = arrays["case17/validation"]
    batch = held_out.batch(0)
    assert held_out.num_batches == 1
    np.testing.assert_array_equal(batch["targets"][: len(wanted[1])], wanted[1])
    assert (batch["targets"][len(wanted[1]) :] == -100).all()
    train = data.open_samples(config)
    np.testing.assert_array_equal(
        train.draw(np.arange(70))["tokens"], arrays["case17/train"][0][:70]
    )
    texts = open_texts(config, "validation")  # documents 58 and 59 of 60: 0.969 and 0.999 of them
    lengths = IndexedFile(MADE / "a").lengths[58:60]
    assert texts.lengths.tolist() == [lengths.sum() - 1]


def test_what_cannot_be_ordered_so(tmp_path):
    config = parse_train(options(CASES["case4"], "--steps", 2, "--global-batch", 2))
    shards = tmp_path / "tokens.npy"
    np.save(shards, np.arange(500, dtype=np.uint16))
    both = f"all {MADE / 'a'} all {MADE / 'c'}"
    for changes, said in [
        ({"pack": "best-fit"}, "order: got megatron with pack=best-fit; wanted documents as they follow"),
        ({"fim_rate": 0.5, "fim_tokens": "1,2,3"}, "order: got megatron with fim_rate=0.5"),
        ({"format": "mock", "data": ""}, "order: got megatron with data=mock; wanted Megatron-LM's .bin and .idx"),
        ({"format": "text"}, "order: got megatron with data="),
        ({"bert": list_presets()["bert-tiny"]}, "order: got megatron with a BERT; wanted a model that predicts the next token"),
        ({"seed": -1}, "seed: got -1; wanted 0 to 2^32 - 1 with order=megatron"),
        ({"order_samples": -1}, "order_samples: got -1; wanted at least 0"),
        ({"blend_surplus": -1.0}, "blend_surplus: got -1.0; wanted at least 0"),
        ({"order": "arithmetic", "order_samples": 9}, "order_samples: got 9, which has no effect; wanted the order of an application"),
        ({"order": "arithmetic", "order_cache": "x"}, "order_cache: got 'x', which has no effect; wanted the order of an application"),
        ({"split": "1,x"}, "split: got '1,x'; wanted one to three numbers"),
        ({"split": "0,1"}, "none of 60 sequences of"),
        ({"order_samples": 9, "steps": 90}, "steps: got 90, up to sample 180; wanted at most 168, which the order has"),
        ({"data": both, "steps": 200}, "take fewer steps; or give weights in place of all"),
        ({"data": str(shards)}, "shards with order=megatron; wanted its .bin and .idx; fix: write them again"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="cannot") as caught:
            validate(configure(config, **changes))
        assert said in str(caught.value), changes
    validate(config)


def test_damage_and_sizes_that_cannot_be(files, tmp_path):
    with pytest.raises(ValueError, match="seq: got 1; wanted at least 2"):
        MegatronWindows(files["a"], 1, 5)
    with pytest.raises(ValueError, match="got 1345 tokens; wanted at least 2001"):
        MegatronWindows(files["a"], 2000)
    with pytest.raises(ValueError, match=r"id .* wanted ids from 0 to 99"):
        MegatronWindows(files["a"], 16, 80, vocab_size=100).draw(np.arange(80))
    with pytest.raises(ValueError, match="num_samples: got None with weights"):
        make_samples([files["a"]] * 2, 8, None, weights=[1, 1])
    with pytest.raises(ValueError, match=r"weights\[1\]: got 0; wanted a finite number above 0"):
        make_samples([files["a"]] * 2, 8, 9, weights=[1, 0])
    with pytest.raises(
        ValueError, match=r"takes more of its sources .*\n.*fix: raise blend_surplus"
    ):
        sample_order.MegatronMixture([1, 1], 10, [5, 4]).build()
    with IndexedWriter(tmp_path / "empty", np.uint16, allow_empty=True) as writer:
        writer.add([])
    with pytest.raises(ValueError, match="no tokens in 0 sequences"):
        MegatronWindows(IndexedFile(tmp_path / "empty"), 8, 1)
    for suffix in (".bin", ".idx"):
        shutil.copy(MADE / f"a{suffix}", tmp_path / f"a{suffix}")
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[34 + 4 * 3 : 34 + 4 * 4] = (-7).to_bytes(4, "little", signed=True)
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(ValueError, match="length -7 of sequence 3"):
        MegatronWindows(IndexedFile(tmp_path / "a"), 8, 1)


# --- rates that count samples, and files of every kind

STYLES = {"inverse-square-root": "inverse_square_root", "WSD": "wsd"}


@pytest.mark.parametrize("index", range(len(SETTINGS["rates"])))
def test_rates_of_growing_batches_are_those_of_its_scheduler(index, arrays):
    style, decay = SETTINGS["rates"][index]
    start, increment, samples, final = SETTINGS["ramp"]
    rates = optim.ScheduleConfig(
        STYLES.get(style, style), 1e-3, 24, 200, end=1e-4, init=1e-5, decay_steps=90,
        decay={"minus_sqrt": "sqrt", None: "linear"}.get(decay, decay),
    )  # fmt: skip
    config = parse_train([*TINY, "--steps", "30", "--global-batch", str(final)])
    config = configure(
        config, ramp_up=f"{start} {increment} {samples}", learning_rate=rates, rate_unit="samples"
    )
    made = make_setup(config, Mesh())
    wanted, steps = arrays[f"rates{index}"], range(30)
    for count in (lambda step: step, torch.tensor):
        found = [float(made.learning_rate(count(step))) for step in steps]
        np.testing.assert_allclose(found, wanted[:, 0], rtol=2e-6)
    increase = optim.weight_decay_increase(0.01, 0.1, 200)
    assert config.counted is not None
    found = [float(config.counted(increase)(step)) for step in steps]
    np.testing.assert_allclose(found, wanted[:, 1], rtol=2e-6)


@pytest.mark.parametrize(
    "name", ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16", "modes"]
)
def test_files_of_its_builder_of_every_kind(name, tmp_path):
    file = IndexedFile(MADE / name)
    assert file.dtype.name == (name if name != "modes" else "uint16")
    assert [file.sequence(i).tolist() for i in range(3)] == [[1, 2], [3, 4, 5], [100]]
    assert [file.document(i).tolist() for i in range(2)] == [[1, 2, 3, 4, 5], [100]]
    assert (None if file.modes is None else file.modes.tolist()) == (
        [0, 1, 1] if name == "modes" else None
    )
    verify(file)
    with IndexedWriter(tmp_path / "ours", file.dtype, modes=name == "modes") as writer:
        writer.add([1, 2, 3, 4, 5], [2, 3], [0, 1] if name == "modes" else None)
        writer.add([100], [1], [1] if name == "modes" else None)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (MADE / f"{name}{suffix}").read_bytes()
