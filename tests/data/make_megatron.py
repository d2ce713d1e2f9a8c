"""Makes tests/data/megatron with Megatron-Core's own code, where that is installed.

    pip install torch numpy packaging && pip install --no-deps megatron-core==0.16.1
    python tests/data/make_megatron.py tests/data/megatron

Corpora a, b and c are written by its IndexedDatasetBuilder: a has documents of one sequence, b of up
to four, c is small. A token is its place in the corpus, from 1, and 0 ends a document, so that a
sample says where it was read. ``cases.json`` lists what was built, and ``samples.npz`` has what came
of it: the samples of GPTDataset and BlendedDataset as their builder makes them, the indices of
blends, a batch's masks, and learning rates.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

EOD = 0
PARTS = ("train", "validation", "test")


class Tokens:
    """As much of a tokenizer as datasets ask for: it has no token for padding."""

    eod, vocab_size = EOD, 5000
    unique_identifiers = property(lambda self: {"class": "Tokens"})


def corpus(folder: Path, name: str, dtype: type, documents: list[list[int]]) -> None:
    """Documents whose sequences have so many tokens."""
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
    place = 1
    for lengths in documents:
        tokens = np.arange(place, place + sum(lengths))
        tokens[-1] = EOD
        builder.add_document(torch.from_numpy(tokens), lengths)
        place += len(tokens)
    builder.finalize(str(folder / f"{name}.idx"))


def corpora(folder: Path) -> None:
    rng = np.random.default_rng(7)
    corpus(folder, "a", np.uint16, [[int(n)] for n in rng.integers(1, 41, 60)])
    many = [rng.integers(2, 20, int(n)).tolist() for n in rng.integers(1, 5, 20)]
    corpus(folder, "b", np.int32, many)
    corpus(folder, "c", np.uint16, [[int(n)] for n in rng.integers(14, 40, 8)])


def built(folder: Path, case: dict) -> list:
    """The datasets of the three parts."""
    prefixes = [str(folder / name) for name in case["data"]]
    blend, split = (prefixes, case.get("weights")), case.get("split")
    which = {"blend": blend, "split": split}
    if split is None:
        which = {"blend_per_split": [blend, None, None]}
    config = GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq"],
        tokenizer=Tokens(),
        reset_position_ids=case.get("reset", False),
        reset_attention_mask=case.get("reset", False),
        eod_mask_loss=case.get("reset", False),
        create_attention_mask=case.get("reset", False),
        add_extra_token_to_sequence=case.get("extra_token", True),
        drop_last_partial_validation_sequence=case.get("drop_last", True),
        mid_level_dataset_surplus=case.get("surplus", 0.005),
        path_to_cache=None,
        **which,
    )
    sizes = case["sizes"]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def cases() -> list[dict]:
    found = []
    for seed, seq, count in [
        (0, 16, 5), (1234, 16, 60), (1234, 8, 300), (42, 16, 85), (42, 16, 130), (1, 16, 150),
        (2**32 - 1, 7, 700),
    ]:  # fmt: skip
        for extra in (True, False):
            sizes = [count, 0, 0]
            found.append(
                {"data": ["a"], "seed": seed, "seq": seq, "sizes": sizes, "extra_token": extra}
            )
    for name, seq, count in [("b", 16, 90), ("c", 64, 20), ("c", 5, 3)]:
        found.append({"data": [name], "seed": 3, "seq": seq, "sizes": [count, 0, 0]})
    for split in ("969, 30, 1", "8,1,1", "0.7,0.2,0.1", "1,1,1", "90,10"):
        for name in ("a", "b"):
            sizes = [70, None, None]
            found.append({"data": [name], "seed": 11, "seq": 8, "sizes": sizes, "split": split})
    for extra in (True, False):
        case = {"data": ["a"], "seed": 5, "seq": 16, "sizes": [10, None, 0], "split": "1,1,0"}
        found.append({**case, "extra_token": extra, "drop_last": False})
    for data, weights in [
        ("ab", [30, 70]), ("abc", [0.2, 0.2, 0.5]), ("abc", [1, 1, 1]), ("a", [1.0]), ("abc", None),
        ("ca", [0.9, 0.1]),
    ]:  # fmt: skip
        for split in (None, "4,1,1"):
            for count in (40, 333):
                case = {"data": list(data), "weights": weights, "seed": 1234, "seq": 12}
                found.append({**case, "split": split, "sizes": [count, 0, 0]})
    found.append(
        {
            "data": ["a", "c"],
            "weights": [1, 3],
            "seed": 1,
            "seq": 12,
            "sizes": [50, 0, 0],
            "surplus": 0.5,
        }
    )
    found.append(
        {"data": list("abc"), "weights": None, "seed": 9, "seq": 12, "sizes": [None, 0, 0]}
    )
    for name in ("a", "b"):
        case = {"data": [name], "seed": 6, "seq": 24, "sizes": [40, 0, 0], "reset": True}
        found.append(case)
    return [{"name": f"case{index}", **case} for index, case in enumerate(found)]


def samples(folder: Path, case: dict) -> dict[str, np.ndarray]:
    """The samples of a case: inputs, and targets where the loss counts them, else -100."""
    found = {}
    for name in "abc":  # its cache does not know add_extra_token_to_sequence from its opposite
        shutil.rmtree(folder / name / "cache", ignore_errors=True)
    for part, dataset in zip(PARTS, built(folder, case), strict=True):
        if dataset is None or (case["sizes"][PARTS.index(part)] == 0):
            continue
        rows = [dataset[index] for index in range(len(dataset))]
        if not rows:
            continue
        tokens = torch.stack([row["tokens"] for row in rows])
        labels = torch.stack([row["labels"] for row in rows])
        kept = torch.stack([row["loss_mask"] for row in rows]) > 0
        targets = torch.where(kept, labels, -100)
        found[part] = torch.stack([tokens, targets]).numpy().astype(np.int16)
        if case.get("reset"):
            found["positions"] = torch.stack([row["position_ids"] for row in rows]).numpy()
            found["positions"] = found["positions"].astype(np.int16)
            masks = torch.cat([row["attention_mask"] for row in rows]).numpy()
            found["hidden"] = np.packbits(masks)
    return found


WEIGHTS = (
    [1.0], [0.5, 0.5], [0.3, 0.7], [0.1, 0.2, 0.7], [1 / 3] * 3, [0.2] * 5, [0.001, 0.999],
    [0.9, 0.05, 0.03, 0.02], [0.25, 0.125, 0.125, 0.5], [0.17, 0.23, 0.05, 0.31, 0.08, 0.16],
)  # fmt: skip
SIZES = ([5, 3, 2], [100, 1], [7, 7, 7, 7], [1, 999], [64, 32, 16, 8, 4], [13])
LONG = 30_000


def blends() -> dict[str, np.ndarray]:
    """The sources of samples by the compiled helpers."""
    found = {}
    for index, weights in enumerate(WEIGHTS):
        which, own = np.zeros(LONG, np.int16), np.zeros(LONG, np.int64)
        exact = np.array(weights, np.float64)
        helpers_cpp.build_blending_indices(which, own, exact, len(weights), LONG, False)
        found[f"weights{index}"] = which.astype(np.int8)
    for index, sizes in enumerate(SIZES):
        total = sum(sizes)
        which, own = np.zeros(total, np.int16), np.zeros(total, np.int64)
        helpers_cpp.build_exhaustive_blending_indices(which, own, np.array(sizes), len(sizes))
        found[f"sizes{index}"] = which.astype(np.int8)
    return found


RAMP = (4, 4, 16, 12)
RATES = (
    ("constant", None), ("linear", None), ("cosine", None), ("inverse-square-root", None),
    ("WSD", "linear"), ("WSD", "cosine"), ("WSD", "minus_sqrt"),
)  # fmt: skip


def rates() -> dict[str, np.ndarray]:
    """The learning rate and weight decay of each step of a run whose batches grow by `RAMP`."""
    start, increment, ramp, final = RAMP
    found = {}
    for index, (style, decay) in enumerate(RATES):
        group: dict = {"params": [], "lr": 0.0, "weight_decay": 0.0}
        optimizer = types.SimpleNamespace(param_groups=[group])
        scheduler = OptimizerParamScheduler(
            optimizer, 1e-5, 1e-3, 1e-4, 24, 200, style, 0.01, 0.1, 200, "linear",
            wsd_decay_steps=90, lr_wsd_decay_style=decay,
        )  # fmt: skip
        consumed, rows = 0, []
        for _ in range(30):
            rows.append((group["lr"], group["weight_decay"]))
            increments = (final - start) // increment
            size = final
            if consumed < ramp:
                size = start + int(consumed / (ramp / increments)) * increment
            consumed += size
            scheduler.step(increment=size)
        found[f"rates{index}"] = np.array(rows)
    return found


def files(folder: Path) -> None:
    """A file of every dtype, and one of several modalities, as its builder writes and reads them."""
    for dtype in (*DType, None):
        name = "modes" if dtype is None else dtype.name
        kind = np.uint16 if dtype is None else getattr(np, dtype.name)
        builder = IndexedDatasetBuilder(
            str(folder / f"{name}.bin"), dtype=kind, multimodal=dtype is None
        )
        builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 3], [0, 1])
        builder.add_item(torch.tensor([100]), 1)
        builder.end_document()
        builder.finalize(str(folder / f"{name}.idx"))
        read = IndexedDataset(str(folder / name), multimodal=dtype is None)
        assert len(read) == 3, name


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        corpora(work)
        listed, arrays = [], {**blends(), **rates()}
        for case in cases():
            try:
                with contextlib.redirect_stdout(open(os.devnull, "w")):
                    made = samples(work, case)
            except IndexError as error:
                case["error"] = type(error).__name__
                made = {}
            listed.append({**case, "arrays": sorted(made)})
            arrays |= {f"{case['name']}/{name}": value for name, value in made.items()}
        for name in ("a", "b", "c"):
            for suffix in (".bin", ".idx"):
                shutil.copy(work / f"{name}{suffix}", target / f"{name}{suffix}")
    files(target)
    settings = {"weights": WEIGHTS, "sizes": SIZES, "ramp": RAMP, "rates": RATES, "cases": listed}
    (target / "cases.json").write_text(json.dumps(settings, indent=1) + "\n")
    np.savez_compressed(target / "samples.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
