"""``functron preprocess``: text to tokens on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from functron.cli import launch
from functron.cli.options import parse
from functron.data.preprocess import Dtype, Empty, Format, Progress, Settings, preprocess

_INPUTS = tyro.conf.arg(metavar="INPUT [INPUT ...]")


@dataclass(frozen=True)
class PreprocessOptions:
    """Make tokens on disk of text, on all processors; started again, it goes on where it stopped.

    Attributes:
        inputs: files and folders: JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet, or plain text, of
            which every file is a document.
        tokenizer: a tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder with one of
            these, or bytes.
        out: where to, without endings: OUT.bin and OUT.idx, as Megatron-LM reads them.
        key: of the text in JSONL objects; the column of Parquet files.
        append_eod: end every document with the token that ends a text.
        end_of_text: the name of that token, such as '<|endoftext|>'; empty: the tokenizer's own.
        pattern: how a .tiktoken file's tokenizer splits text: gpt2, cl100k, o200k, llama3 or a
            regular expression; empty: by the file's name.
        format: indexed: OUT.bin and OUT.idx; npy: OUT.npy and OUT.documents.npy.
        dtype: of the tokens; auto: uint16 for less than 65,500 ids, else int32.
        empty: what becomes of documents without tokens.
        workers: processes; 0: as many as there are processors.
    """

    inputs: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT [INPUT ...]")]
    ]
    tokenizer: str
    out: Path
    key: str = "text"
    append_eod: bool = True
    end_of_text: str = ""
    pattern: str = ""
    format: Format = "indexed"
    dtype: Dtype = "auto"
    empty: Empty = "refuse"
    workers: int = 0


def run(arguments: Sequence[str]) -> int:
    """Make it, and print what was made."""
    options = parse(PreprocessOptions, arguments, "preprocess")
    settings = Settings(**{**vars(options), "out": str(options.out)})
    with launch.mistakes(), _bar() as report:
        summary = preprocess(settings, report)
    print(summary)
    return 0


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A bar over the bytes of the text, with tokens per second."""
    bars: list[tqdm] = []

    def report(progress: Progress) -> None:
        if not bars:
            options = {"unit": "B", "unit_scale": True, "dynamic_ncols": True}
            bars.append(tqdm(total=progress.total, initial=progress.done, **options))
        bar = bars[0]
        said = f"{tqdm.format_sizeof(progress.tokens)} tokens"
        if progress.seconds:
            said += f", {tqdm.format_sizeof(progress.tokens_per_second)} tokens/s"
        bar.set_postfix_str(said, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield report
    finally:
        for bar in bars:
            bar.close()
