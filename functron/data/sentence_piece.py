"""SentencePiece models: text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from functron.errors import Problem, raise_problems


class SentencePiece:
    """Text to token ids and back, as a ``.model`` file says (Kudo and Richardson 2018).

    Args:
        path: the file.

    Attributes:
        file: likewise.
        path: the folder it lies in.
        vocab_size: ids are below it.
        num_ordinary: all of them, as those of control symbols are among those of text.
        special_tokens: the ids of control symbols and of the unknown token, by their names.

    Raises:
        ValueError: the package sentencepiece is missing, or the file is none of its models.
    """

    def __init__(self, path: str | Path):
        self.file = Path(path)
        self.path = self.file.parent
        if find_spec("sentencepiece") is None:
            fix = "pip install sentencepiece, or functron[sentencepiece]"
            problem = Problem("sentencepiece", "no such package", f"it, to read {path}", fix)
            raise_problems("cannot read a tokenizer", [problem])
        import sentencepiece

        try:
            data = self.file.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            got = getattr(error, "strerror", None) or str(error) or "something else"
            wanted = "a model of SentencePiece"
            problem = Problem(str(path), got, wanted, "copy or download it again")
            raise_problems("cannot read a tokenizer", [problem])
        model, size = self._model, self._model.get_piece_size()
        self.vocab_size: int = size
        self.num_ordinary: int = size
        ids = (i for i in range(size) if model.is_control(i) or model.is_unknown(i))
        self.special_tokens: Mapping[str, int] = {model.id_to_piece(i): i for i in ids}

    @property
    def end_of_text(self) -> int | None:
        """The id of the model's ``</s>``; None where it has none."""
        found = self._model.eos_id()
        return found if found >= 0 else None

    @property
    def stops(self) -> frozenset[int]:
        """The ids after which a model has finished."""
        return frozenset() if self.end_of_text is None else frozenset({self.end_of_text})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            text: any.
            special: begin with the model's ``<s>``, if it has one.
        """
        ids = self._model.encode(text, out_type=int)
        begin = self._model.bos_id()
        return [begin, *ids] if special and begin >= 0 else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts, with nothing around them."""
        return self._model.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; those that no token has give nothing.

        Args:
            tokens: ids.
            special: write the names of control symbols too.
        """
        ids = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        if not special:
            return self._model.decode(ids)
        return "".join(self._pieces(ids))

    def _pieces(self, ids: Sequence[int]) -> Iterator[str]:
        for control, run in groupby(ids, self._model.is_control):
            if control:
                yield from map(self._model.id_to_piece, run)
            else:
                yield self._model.decode(list(run))
