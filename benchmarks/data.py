"""Data: making tokens of text against Hugging Face datasets, opening a large index, and batches.

``python benchmarks/data.py [preprocess] [open] [load]``; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from measure import resident

from functron import Mesh, gpt
from functron.data import (
    Blend,
    FillInTheMiddle,
    IndexedFile,
    IndexedWriter,
    PackedTokens,
    Samples,
    TokenWindows,
)
from functron.data.indexed import IndexLayout
from functron.data.mapped_files import python_text
from functron.data.preprocess import PreprocessSettings, preprocess
from functron.training.config import configure
from functron.training.run import prepare

SEED_BYTES = 4 << 20
BLOCK = 1 << 22


@dataclass(frozen=True)
class Timed:
    """The cost of a program.

    Attributes:
        cpu: processor seconds of this process, in all its threads.
        wall: seconds.
        tokens: that it made.
    """

    cpu: float
    wall: float
    tokens: int


def timed(program: Callable[[], int]) -> Timed:
    """Run a program, which gives the number of its tokens."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = program()
    return Timed(time.process_time() - cpu, time.perf_counter() - wall, tokens)


def write_text(file: Path) -> None:
    """The text that every Python installation has, as JSONL."""
    with file.open("w", encoding="utf-8") as stream:
        for part in python_text():
            data = part if isinstance(part, bytes) else part.read_bytes()
            stream.write(json.dumps({"text": data.decode()}) + "\n")


def train_tokenizer(text: Path, folder: Path, vocab_size: int) -> Path:
    """A byte-level BPE tokenizer of some of the text, with GPT-2's way of splitting it."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with text.open(encoding="utf-8") as stream:
        some = [json.loads(line)["text"] for line in stream.readlines(SEED_BYTES)]
    made.train_from_iterator(some, trainer)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def functron_program(text: Path, tokenizer: Path, folder: Path) -> Callable[[], int]:
    """From the text's file to the finished files of tokens."""
    rounds = iter(range(10**6))

    def run() -> int:
        settings = PreprocessSettings(
            (str(text),), str(tokenizer), str(folder / f"x{next(rounds)}"), workers=1
        )
        return preprocess(settings).tokens

    return run


def datasets_programs(text: Path, tokenizer: Path, folder: Path) -> Mapping[str, Callable[[], int]]:
    """`datasets.map` over a table that is loaded before, so that its time is the map's alone.

    It is given the fewest columns, no attention masks, and the end of every document.
    """
    import tokenizers
    import transformers

    datasets: Any = import_module("datasets")  # which functron's own tests do without
    datasets.disable_caching()
    datasets.disable_progress_bars()
    read: Any = datasets.Dataset.from_json(str(text), cache_dir=str(folder))
    table = read.select_columns(["text"])
    file = str(tokenizer / "tokenizer.json")
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    plain = tokenizers.Tokenizer.from_file(file)
    end = plain.token_to_id("<|endoftext|>")

    def by_transformers(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        options = {"add_special_tokens": False, "return_attention_mask": False}
        options |= {"return_token_type_ids": False, "verbose": False}
        found = fast(batch["text"], **options)["input_ids"]
        return {"ids": [[*ids, end] for ids in found]}

    def by_tokenizers(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        found = plain.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, end] for encoding in found]}

    def program(function: Callable[[Any], Any]) -> Callable[[], int]:
        def run() -> int:
            kept = datasets.Features({"ids": datasets.Sequence(datasets.Value("int32"))})
            options = {"batched": True, "remove_columns": ["text"], "features": kept}
            mapped = table.map(function, batch_size=100, **options)
            return sum(len(column) for column in _lists(mapped))

        return run

    return {
        "map, transformers": program(by_transformers),
        "map, tokenizers": program(by_tokenizers),
    }


def _lists(mapped: Any) -> list[Any]:
    """The values of a table's lists, without making Python objects of them."""
    return [chunk.flatten() for chunk in mapped.data.column("ids").chunks]


def preprocess_table(args: argparse.Namespace, folder: Path) -> int:
    """Print what making tokens of the same text costs."""
    text, tokenizer = args.text, args.tokenizer
    if text is None:
        text = folder / "text.jsonl"
        write_text(text)
    if tokenizer is None:
        tokenizer = train_tokenizer(text, folder / "tokenizer", args.vocab)
    programs = {"functron preprocess": functron_program(text, tokenizer, folder)}
    try:
        programs |= datasets_programs(text, tokenizer, folder)
    except ImportError as error:
        print(f"without datasets: {error}; pip install datasets to compare with it")
    size = text.stat().st_size
    print(f"{size / 1e6:.1f} MB of JSONL, one process, {args.rounds} rounds in turn")
    rows: dict[str, list[Timed]] = {name: [] for name in programs}
    for _ in range(args.rounds + 1):  # the first to warm up
        for name, program in programs.items():
            rows[name].append(timed(program))
    heads = f"{'CPU s':>8}{'wall s':>8}{'MB/CPU s':>10}{'tokens/CPU s':>14}{'x functron':>12}"
    print(f"{'program':<22}{heads}")
    (ours, *_) = rows.values()
    for name, row in rows.items():
        cpu = statistics.median(x.cpu for x in row[1:])
        wall = statistics.median(x.wall for x in row[1:])
        pairs = zip(ours[1:], row[1:], strict=True)
        ratio = statistics.median(a.cpu / b.cpu for a, b in pairs)
        speed = f"{size / 1e6 / cpu:>10.2f}{row[0].tokens / cpu:>14,.0f}"
        print(f"{name:<22}{cpu:>8.2f}{wall:>8.2f}{speed}{ratio:>12.2f}")
    counts = {name: row[0].tokens for name, row in rows.items()}
    if len(set(counts.values())) > 1:
        print(f"the programs made different tokens: {counts}", file=sys.stderr)
        return 1
    return 0


def write_index(prefix: Path, documents: int, tokens: int) -> None:
    """An index of documents of `tokens` each, and a .bin that is a hole of as many bytes."""
    layout = IndexLayout(np.dtype(np.uint16), documents, documents)
    with Path(f"{prefix}.idx").open("wb") as stream:
        stream.write(layout.header())
        for begin in range(0, documents, BLOCK):
            count = min(BLOCK, documents - begin)
            stream.write(np.full(count, tokens, "<i4").tobytes())
        for begin in range(0, documents, BLOCK):
            rows = np.arange(begin, min(begin + BLOCK, documents))
            stream.write((rows * 2 * tokens).astype("<i8").tobytes())
        for begin in range(0, documents, BLOCK):
            stream.write(np.arange(begin, min(begin + BLOCK, documents)).astype("<i8").tobytes())
        stream.write(struct.pack("<q", documents))
    with Path(f"{prefix}.bin").open("wb") as stream:
        stream.truncate(2 * tokens * documents)


def open_table(args: argparse.Namespace, folder: Path) -> int:
    """Print what opening an index costs, and finding the documents of random tokens."""
    heads = f"{'open ms':>9}{'first ms':>9}{'find us':>9}{'memory MiB':>12}"
    print(f"{'documents':>12}{'idx MB':>9}{heads}")
    for documents in (10**4, 10**6, args.documents):
        prefix = folder / f"index{documents}"
        write_index(prefix, documents, 1000)
        before = resident("VmRSS")
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            file = IndexedFile(prefix)
            times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        middle = file.num_tokens // 2
        assert file.documents_of(np.array(middle)) == middle // 1000
        file.read(middle, 4096)
        first = time.perf_counter() - begun
        # later, random tokens page in random parts of the index, which count as memory too
        grown = resident("VmRSS") - before
        offsets = np.random.default_rng(0).integers(0, file.num_tokens, 10_000)
        begun = time.perf_counter()
        found = file.documents_of(offsets)
        find = (time.perf_counter() - begun) / len(offsets)
        assert (found == offsets // 1000).all()
        size = file.idx_path.stat().st_size / 1e6
        opened = statistics.median(times)
        row = f"{documents:>12,}{size:>9,.0f}{1e3 * opened:>9.2f}{1e3 * first:>9.2f}"
        print(f"{row}{1e6 * find:>9.2f}{grown / 2**20:>12.1f}")
        file.idx_path.unlink()
        file.bin_path.unlink()
    return 0


def loaders(prefix: Path, tokens: int, seq: int) -> Mapping[str, Samples]:
    """Ways to draw samples of a real file of random tokens, in documents of 500 on average."""
    drawn = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        while tokens > 0:
            size = min(int(drawn.integers(1, 1000)), tokens)
            writer.add(drawn.integers(0, 50_000, size, dtype=np.uint16))
            tokens -= size
    file = IndexedFile(prefix)
    fill = FillInTheMiddle(50_000, 50_001, 50_002)
    masked = [TokenWindows(file, seq, seed=seed, mask_documents=True) for seed in range(4)]
    return {
        "windows": TokenWindows(file, seq),
        "windows, ids checked": TokenWindows(file, seq, vocab_size=50_257),
        "documents masked": masked[0],
        "masked, blend of 4": Blend(masked, [0.4, 0.3, 0.2, 0.1]),
        "masked, middles filled": TokenWindows(file, seq, mask_documents=True, middle=fill),
        "packed": PackedTokens(file, seq),
        "packed, ids checked": PackedTokens(file, seq, vocab_size=50_257),
    }


def batch_time(source: Samples, rows: int, rounds: int) -> float:
    """Processor seconds of a batch: the median, or of packed ones the mean of a whole epoch.

    Documents are packed in few of the batches, of which a median would know nothing.
    """
    packed = isinstance(source, PackedTokens)
    times = []
    for step in range(source.num_samples // rows if packed else 4 * rounds):
        begun = time.process_time()
        source.batch(step, rows)
        times.append(time.process_time() - begun)
    return statistics.mean(times) if packed else statistics.median(times[rounds:])


def step_rate(prefix: Path) -> float:
    """Tokens per second of training steps of the preset tiny, on this machine's processors."""
    config = configure(data=str(prefix), seq=128, global_batch=16)
    config = configure(config, gpt=replace(config.gpt, vocab_size=50_003))
    run = prepare(config, Mesh())
    state, times = run.state, []
    for step in range(6):
        batch = run.batch(step)
        begun = time.perf_counter()
        state, metrics = run.step(state, batch)
        float(metrics["loss"])
        times.append(time.perf_counter() - begun)
    return config.data.seq * config.data.global_batch / statistics.median(times[1:])


def load_table(args: argparse.Namespace, folder: Path) -> int:
    """Print what making batches costs, and how many times faster that is than training on them."""
    prefix, seq, rows = folder / "tokens", 2048, 64
    samples = loaders(prefix, args.tokens, seq)
    rates = {"tiny here": step_rate(prefix)}
    for name in ("gpt2", "llama3-8b"):
        # more than steps reach: what a GPU of 989 TFLOP/s would take if it did nothing else
        rates[name] = 989e12 / gpt.flops_per_token(gpt.PRESETS[name], 1024)
    needs = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    print(f"{args.tokens:,} tokens on disk; tokens/s that training needs: {needs}")
    heads = "".join(f"{'x ' + name:>14}" for name in rates)
    print(f"{'program':<24}{'CPU ms':>8}{'Mtokens/CPU s':>15}{heads}")
    for name, source in samples.items():
        seconds = batch_time(source, rows, args.rounds)
        rate = rows * seq / seconds
        ratios = "".join(f"{rate / need:>14,.0f}" for need in rates.values())
        print(f"{name:<24}{1e3 * seconds:>8.2f}{rate / 1e6:>15.1f}{ratios}")
    return 0


TABLES: Mapping[str, Callable[[argparse.Namespace, Path], int]] = {
    "preprocess": preprocess_table,
    "open": open_table,
    "load": load_table,
}


def main() -> int:
    """Print the tables asked for; 1 where programs disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; all without")
    parser.add_argument("--text", type=Path, help="JSONL; Python's own text without")
    parser.add_argument("--tokenizer", type=Path, help="a folder; one is trained without")
    parser.add_argument("--vocab", type=int, default=16000, help="of the one that is trained")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=10**8, help="of the largest index")
    parser.add_argument("--tokens", type=int, default=10**8, help="on disk, to load")
    parser.add_argument("--folder", type=Path, help="for files of some GB; a temporary one without")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of all programs: processor time is a core's
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        codes = [TABLES[name](args, Path(folder)) for name in args.tables or TABLES]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
