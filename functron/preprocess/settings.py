"""What is asked of preprocessing, and what became of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Empty = Literal["refuse", "drop", "keep"]
Format = Literal["indexed", "npy"]
Dtype = Literal["auto", "uint8", "uint16", "int32"]


@dataclass(frozen=True)
class Settings:
    """What to make tokens of, and how.

    Attributes:
        inputs: files and folders (see `functron.data.sources.find_files`). A document is encoded
            in one call, for which Hugging Face's tokenizers take some 130 bytes of memory per byte:
            cut files of plain text that have hundreds of MB.
        tokenizer: a path, or ``bytes`` (see `functron.data.text_tokenizer.open_tokenizer`).
        out: where to, without the endings that the format has.
        key: of the text in JSONL objects; the column of Parquet files.
        append_eod: end every document with the token that ends a text.
        end_of_text: the name of that special token; empty: the tokenizer's own.
        pattern: how a tiktoken file's tokenizer splits text.
        format: ``indexed``: OUT.bin and OUT.idx, as Megatron-LM has them; ``npy``: OUT.npy, and
            OUT.documents.npy with where documents begin.
        dtype: of the tokens; ``auto``: uint16 below 65,500 ids, or int32, as in Megatron-LM.
        empty: what becomes of documents without tokens: ``refuse`` them all, ``drop`` them, or
            ``keep`` them as documents that begin where they end, as Megatron-LM does.
        workers: processes; 0: as many as this one may use processors.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    out: str
    key: str = "text"
    append_eod: bool = True
    end_of_text: str = ""
    pattern: str = ""
    format: Format = "indexed"
    dtype: Dtype = "auto"
    empty: Empty = "refuse"
    workers: int = 0

    @property
    def num_workers(self) -> int:
        """How many processes that is."""
        if self.workers:
            return self.workers
        # not on macOS
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )

    @property
    def targets(self) -> tuple[Path, Path]:
        """The files to make; without the second, the first is of no use."""
        endings = (".bin", ".idx") if self.format == "indexed" else (".documents.npy", ".npy")
        return Path(self.out + endings[0]), Path(self.out + endings[1])

    @property
    def record(self) -> Path:
        """What says how they were made; it is written when they are complete."""
        return Path(self.out + ".json")

    @property
    def parts(self) -> Path:
        """The folder of finished parts, until then."""
        return Path(self.out + ".parts")


@dataclass(frozen=True)
class Progress:
    """How far it is.

    Attributes:
        done: bytes of the text that are tokens by now.
        total: bytes of the text.
        tokens: how many they are.
        earlier: how many of them were there when this process began.
        seconds: since then.
    """

    done: int
    total: int
    tokens: int
    earlier: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The speed of this process and its workers."""
        return (self.tokens - self.earlier) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Summary:
    """What there is in the end.

    Attributes:
        settings: what was asked for.
        files: how many the text was in.
        size: their bytes.
        documents: how many were written.
        tokens: in all documents together.
        empty: documents without tokens, left out or kept.
        dtype: of the tokens.
        progress: of the process that finished; None: it was complete before.
    """

    settings: Settings
    files: int
    size: int
    documents: int
    tokens: int
    empty: int
    dtype: str
    progress: Progress | None

    def __str__(self) -> str:
        kept = "kept" if self.settings.empty == "keep" else "left out"
        empty = f" ({self.empty:,} without tokens {kept})" if self.empty else ""
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        names = ", ".join(str(path) for path in self.settings.targets)
        lines = [
            f"text    {files}, {self.size / 1e6:,.1f} MB",
            f"tokens  {self.tokens:,} in {documents}{empty}, {self.dtype}",
            f"written {names}",
        ]
        if self.progress is None:
            return "\n".join([*lines, "nothing to do: this was complete"])
        earlier = self.progress.earlier
        if earlier:
            lines.append(f"resumed {earlier:,} of the tokens were there before")
        if earlier == self.progress.tokens:
            return "\n".join(lines)
        count = self.settings.num_workers
        workers = "1 process" if count == 1 else f"{count} processes"
        speed = f"{self.progress.tokens_per_second:,.0f} tokens/s on {workers}"
        return "\n".join([*lines, f"speed   {speed}, {self.progress.seconds:,.1f} s"])
