"""``functron preprocess``: text to tokens on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import tyro
from tqdm import tqdm

from functron.cli.options import parse
from functron.cli.process import mistakes
from functron.data.preprocess import Progress, Settings, preprocess


@dataclass(frozen=True)
class PreprocessOptions(Settings):
    """Make tokens on disk of text, on all processors; started again, it goes on where it stopped.

    Attributes:
        inputs: files and folders: JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet, or plain text, of
            which every file is a document.
        tokenizer: a tokenizer.json, a SentencePiece .model, a .tiktoken file, a folder with one of
            these, or bytes.
        out: where to, without endings: OUT.bin and OUT.idx, as Megatron-LM reads them.
        pattern: how a .tiktoken file's tokenizer splits text: gpt2, cl100k, o200k, llama3 or a
            regular expression; empty: by the file's name.
    """

    inputs: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT [INPUT ...]")]
    ]


def run(arguments: Sequence[str]) -> int:
    """Make the tokens, and print a summary."""
    settings = parse(PreprocessOptions, arguments, "preprocess")
    with mistakes(), _bar() as report:
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
        shown = f"{tqdm.format_sizeof(progress.tokens)} tokens"
        if progress.seconds:
            shown += f", {tqdm.format_sizeof(progress.tokens_per_second)} tokens/s"
        bar.set_postfix_str(shown, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield report
    finally:
        for bar in bars:
            bar.close()
