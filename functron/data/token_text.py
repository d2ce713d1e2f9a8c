"""Text through a tokenizer: batches of tokens as a pure function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from functron.data.documents import find, python_text
from functron.data.text_tokenizer import TextTokenizer
from functron.data.windows import Windows
from functron.errors import Problem, raise_problems

MAX_LISTED = 20


class TokenText(Windows):
    """Text as a tokenizer's tokens, cut into windows of `seq` and shuffled anew in every epoch.

    Documents stand one after another, each with the end-of-text token after it.

    All of the text is tokenised when this is made, and its tokens stay in memory, 2 or 4 bytes
    each: some seconds and as many bytes as the text has for 10 MB of it. That is for corpora of up
    to some hundred MB; larger ones should be tokenised once, to disk.

    Args:
        path: a file or a folder of text files in UTF-8; None is the text that every Python
            installation carries.
        tokenizer: what makes tokens of it.
        seq: tokens per sample.
        seed: selects the order of the samples.
        vocab_size: how many ids the model has; None: as many as there are.

    Attributes:
        num_tokens: tokens in the whole text.
        num_documents: files it is made of.
        num_skipped: files of the folder that were left out.
        vocab_size: one more than the largest id in the text.

    Raises:
        ValueError: what `ByteText` raises; a file is not UTF-8, the tokenizer has no end-of-text
            token, or an id is not among the model's.
    """

    def __init__(
        self,
        path: str | Path | None,
        tokenizer: TextTokenizer,
        seq: int,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
    ):
        files, self.num_skipped = (python_text(), 0) if path is None else find(path)
        end, kind = _end_of(tokenizer), token_dtype(tokenizer)
        pieces: list[np.ndarray] = []
        self.vocab_size = 0
        for text in texts_of(files):
            piece = np.array([*tokenizer.encode(text, special=False), end], kind)
            self.vocab_size = max(self.vocab_size, int(piece.max()) + 1)
            check_vocabulary(self.vocab_size, vocab_size)
            pieces.append(piece)
        self._tokens = np.concatenate(pieces)
        self.num_documents = len(pieces)
        what = f"data {path}" if path is not None else "data"
        super().__init__(len(self._tokens), seq, seed, what=what, unit="tokens")

    def read(self, start: int, length: int) -> np.ndarray:
        """The tokens from `start` on, uint16 or uint32 ``[length]``."""
        return self._tokens[start : start + length]

    def summary(self) -> str:
        """What there is, in a few words for the user."""
        skipped = f", {self.num_skipped} files skipped (not text)" if self.num_skipped else ""
        return f"{self.num_tokens:,} tokens in {self.num_documents} documents{skipped}"


def token_dtype(tokenizer: TextTokenizer) -> type:
    """The smallest of numpy's dtypes that holds the tokenizer's ids: uint16 or uint32."""
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def check_vocabulary(needed: int, vocab_size: int | None) -> None:
    """Check that a model with `vocab_size` ids (None: any) has the `needed` ones.

    Raises:
        ValueError: it has not.
    """
    if vocab_size is not None and needed > vocab_size:
        got = f"token ids up to {needed - 1}"
        fix = f"set gpt.vocab_size to {needed} or more, or use the model's own tokenizer"
        problem = Problem("tokenizer", got, f"ids below gpt.vocab_size={vocab_size}", fix)
        raise_problems("tokens outside the vocabulary", [problem])


def _end_of(tokenizer: TextTokenizer) -> int:
    end = tokenizer.end_of_text
    if end is None:
        fix = "name it in tokenizer_config.json (eos_token), or take a tokenizer that has one"
        problem = Problem(str(tokenizer.file), "no eos_token", "a token that ends a text", fix)
        raise_problems("cannot separate documents", [problem])
        raise AssertionError("unreachable")
    return end


def texts_of(files: list) -> Iterator[str]:
    """The texts of files, one at a time; those that are not UTF-8 are all refused at the end."""
    problems = []
    for file in files:
        try:
            yield (file if isinstance(file, bytes) else file.read_bytes()).decode("utf-8")
        except UnicodeDecodeError as error:
            got = f"byte {error.object[error.start]:#04x} at offset {error.start}"
            fix = "convert it, leave it out, or train on bytes: --tokenizer bytes"
            problems.append(Problem(f"data {file}", got, "UTF-8", fix))
        except OSError as error:
            problems.append(
                Problem(f"data {file}", error.strerror or str(error), "a readable file")
            )
    more = f" ({len(problems)}, of which the first {MAX_LISTED})"
    title = "cannot read the training text" + (more if len(problems) > MAX_LISTED else "")
    raise_problems(title, problems[:MAX_LISTED])
