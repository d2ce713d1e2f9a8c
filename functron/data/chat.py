"""Conversations to fine-tune on: batches of tokens whose targets are the assistant's turns.

They are read from JSONL files, one JSON object a line, in the shapes that are in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from functron.core.errors import Problem, nearest, raise_problems, refuse
from functron.data.mapped_files import find, fitting_dtype, raise_listed
from functron.data.sampling import IGNORED, Samples, check_index, shuffled, stack_leaves
from functron.data.templates import Conversation
from functron.data.text_files import describe_surrogate, json_kind, parse_json_line
from functron.data.token_datasets import check_vocabulary
from functron.data.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""The names of the roles in ShareGPT's files."""


@dataclass(frozen=True)
class ChatLine:
    """A line of a file, read; it has messages or problems.

    Attributes:
        where: the file and the line's number, from 1.
        messages: in order.
        tools: those offered to the assistant, for templates that describe them; None: none.
        problems: mistakes in it.
    """

    where: str
    messages: tuple[Mapping[str, Any], ...]
    tools: Any = None
    problems: tuple[Problem, ...] = ()


def chat_files(path: str | Path) -> list[Path]:
    """The file `path`, or the ``.jsonl`` files of the folder, at any depth and in order.

    Raises:
        ValueError: nothing is there, it cannot be read, or it is empty.
    """
    return find(path, [lambda file: file.suffix == ".jsonl"], ".jsonl file")[0]


def read_conversations(files: Sequence[Path]) -> Iterator[ChatLine]:
    """The conversations of files, line after line, right or wrong; blank lines are passed over.

    A line is an object with

    - ``messages``: a list of ``{"role": ..., "content": ...}``, roles being `ROLES`;
    - ``conversations``: a list of ``{"from": ..., "value": ...}``, as ShareGPT has them; or
    - ``prompt`` and ``completion``: text of the user and of the assistant, or lists of messages,

    and optionally ``tools``. Other keys are ignored.
    """
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _read_line(f"{file}:{number}", line)


def _read_line(where: str, line: bytes) -> ChatLine:
    found, problem = parse_json_line(line)
    problems = [] if problem is None else [Problem(where, *problem)]
    messages = [] if problems else _read_messages(where, found, problems)
    if problems:
        return ChatLine(where, (), problems=tuple(problems))
    return ChatLine(where, tuple(messages), found.get("tools"))


def _read_messages(where: str, found: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    """The messages of a line's object, in one shape; mistakes go to `problems`."""
    shapes = '"messages", "conversations", or "prompt" and "completion"'
    if not isinstance(found, dict):
        problems.append(Problem(where, json_kind(found), f"an object with {shapes}"))
        return []
    if "messages" in found:
        return _check_turns(where, "messages", found["messages"], problems)
    if "conversations" in found:
        return _convert_sharegpt(where, found["conversations"], problems)
    if "prompt" in found and "completion" in found:
        both = []
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            value = found[name]
            turns = [{"role": role, "content": value}] if isinstance(value, str) else value
            both += _check_turns(where, name, turns, problems)
        return both
    keys = ", ".join(map(repr, found)) or "no keys"
    fix = "to train on the file as it is: --format text" if "text" in found else ""
    problems.append(Problem(where, f"an object with {keys}", shapes, fix))
    return []


def _convert_sharegpt(where: str, turns: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    """ShareGPT's turns as messages; those that are none are left for `_check_turns` to refuse."""
    if not isinstance(turns, list):
        return _check_turns(where, "conversations", turns, problems)
    found = []
    for turn in turns:
        if isinstance(turn, dict) and {"from", "value"} & turn.keys():
            role = turn.get("from")
            known = SHAREGPT.get(role, role) if isinstance(role, str) else role
            turn = {"role": known, "content": turn.get("value")}
        found.append(turn)
    return _check_turns(where, "conversations", found, problems)


def _check_turns(
    where: str, name: str, turns: Any, problems: list[Problem]
) -> list[dict[str, Any]]:
    """`turns`, if each is a message; mistakes go to `problems`."""
    if not isinstance(turns, list) or not turns:
        got = "an empty list" if turns == [] else json_kind(turns)
        problems.append(Problem(f"{where}: {name}", got, "at least one message"))
        return []
    before = len(problems)
    for index, turn in enumerate(turns):
        place = f"{where}: {name}[{index}]"
        if not isinstance(turn, dict):
            problems.append(Problem(place, json_kind(turn), "an object with role and content"))
            continue
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or role not in ROLES:
            got = repr(role) if "role" in turn else "no role"
            fix = nearest(role, ROLES) if isinstance(role, str) else ""
            problems.append(Problem(f"{place}.role", got, f"one of {', '.join(ROLES)}", fix))
        calls = role == "assistant" and turn.get("tool_calls") and content is None
        wrong = describe_surrogate(content) if isinstance(content, str) else json_kind(content)
        if not calls and wrong:
            got = "no content" if content is None else wrong
            problems.append(Problem(f"{place}.content", got, "text"))
    return turns if len(problems) == before else []


Overlong = Literal["refuse", "cut", "drop"]


class Chat(Samples):
    """Conversations as a tokenizer's template writes them, one a sample, shuffled in every epoch.

    Targets are the tokens of the assistant, to the end of each of its turns (see
    `Tokenizer.conversation`); all others are `IGNORED`. Shorter conversations are padded at the
    end to `seq` tokens, which causal attention does not see. Conversations in which the assistant
    has no tokens are left out, so that no batch is without targets.

    All conversations are tokenised when this is made, and stay in memory, 3 or 5 bytes a token: at
    some 200,000 tokens a second, which is for up to some tens of thousands of them.

    Args:
        path: a JSONL file or a folder of them (see `functron.data.chat`).
        tokenizer: a model's, with its template.
        seq: tokens per sample.
        seed: selects the order of the samples.
        overlong: what becomes of conversations of more than ``seq + 1`` tokens: ``refuse`` them
            all, ``cut`` off their ends, or ``drop`` them.
        vocab_size: how many ids the model has; None: as many as there are.

    Attributes:
        seq: tokens per sample.
        num_samples: samples in an epoch.
        num_skipped: conversations left out because they are too long, or the assistant has
            no token in the part that fits.
        num_silent: conversations, left out or not, in which an answer of the assistant has no token
            that is a target: an empty one, or one that the template or the tokenizer leaves out.
        num_names: names of special tokens in the messages of all conversations.
        num_cut: conversations whose end was cut off.
        num_tokens: in all samples, without padding.
        num_targets: how many of them are targets.
        pad: the token id of padding.
        vocab_size: one more than the largest id that occurs.

    Raises:
        ValueError: the file cannot be read, lines are not conversations or the template refuses
            them, they are too long, or the assistant has no token in any. The first 20 lines at
            fault are listed. Or the tokenizer has no template, or an id is not among the model's.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        seq: int,
        *,
        seed: int = 0,
        overlong: Overlong = "refuse",
        vocab_size: int | None = None,
    ):
        raise_problems("cannot make samples", _argument_problems(seq, overlong))
        tokenizer.require_template()
        self.seq, self.seed = seq, seed
        self.num_skipped = self.num_cut = self.num_silent = self.num_names = 0
        self._rules = tokenizer.rules
        pad = tokenizer.id_of("pad_token")
        # any id does where there is none: no target is predicted from it
        self.pad = 0 if pad is None or pad >= (vocab_size or pad + 1) else pad
        kind = fitting_dtype(tokenizer.vocab_size)
        tokens, assistant = [np.zeros(0, kind)], [np.zeros(0, bool)]
        for conversation in self._usable_conversations(path, tokenizer, overlong):
            tokens.append(conversation.tokens[: seq + 1].numpy().astype(kind))
            assistant.append(conversation.assistant[: seq + 1].numpy())
        self._ends = np.cumsum([len(piece) for piece in tokens])
        self._tokens, self._assistant = np.concatenate(tokens), np.concatenate(assistant)
        self.num_samples = len(tokens) - 1
        self.num_tokens = len(self._tokens)
        self.num_targets = int(self._assistant.sum()) - sum(
            bool(piece[0]) for piece in assistant[1:]
        )
        if not self.num_samples:
            got = f"{self.num_skipped} conversations, none with a word of the assistant"
            got += f" in what fits into {seq + 1} tokens"
            fix = "check its roles and the template, or raise seq"
            wanted = "something to learn from"
            refuse("cannot fine-tune", f"data {path}", got, wanted, fix)
        self.vocab_size = int(self._tokens.max()) + 1
        check_vocabulary(self.vocab_size, vocab_size)

    def _usable_conversations(
        self, path: str | Path, tokenizer: Tokenizer, overlong: str
    ) -> Iterator[Conversation]:
        """The conversations that become samples; at the end, an error for all that cannot."""
        problems: list[Problem] = []
        fits = self.seq + 1
        for line in read_conversations(chat_files(path)):
            found = _render_line(line, tokenizer, problems)
            if found is None:
                continue
            size = len(found.tokens)
            if size > fits and overlong == "refuse":
                fix = f"set seq to {size - 1} or more, or --overlong cut or drop"
                wanted = f"at most seq + 1 = {fits}"
                problems.append(Problem(line.where, f"{size} tokens", wanted, fix))
                continue
            self.num_names += found.names
            speaks = any(message["role"] == "assistant" for message in line.messages)
            self.num_silent += bool(found.silent) or (speaks and not found.spans)
            learns = bool(found.assistant[1:fits].any())
            if not learns or (size > fits and overlong == "drop"):
                self.num_skipped += 1
                continue
            self.num_cut += size > fits
            yield found
        raise_listed(f"cannot use {path}", problems)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every conversation in its sample, without padding: int64 ``[num_samples]``."""
        return np.diff(self._ends) - 1

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of conversation `index` without padding: int64 ``[lengths[index]]``
        each.
        """
        check_index(index, self.num_samples)
        part = slice(int(self._ends[index]), int(self._ends[index + 1]))
        ids = self._tokens[part].astype(np.int64)
        return ids[:-1], np.where(self._assistant[part][1:], ids[1:], IGNORED)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of conversation `index` with padding: int64 ``[seq]`` each."""
        ids, wanted = self.conversation(index)
        tokens = np.full(self.seq, self.pad, np.int64)
        targets = np.full(self.seq, IGNORED, np.int64)
        tokens[: len(ids)], targets[: len(ids)] = ids, wanted
        return tokens, targets

    def draw(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """``tokens`` and ``targets`` int64 ``[rows, seq]``."""
        order = shuffled(np.asarray(numbers, np.int64), self.num_samples, self.seed)
        return stack_leaves(("tokens", "targets"), map(self.sample, order.tolist()))

    def summary(self, more: str = "") -> str:
        """As of any `Samples`; `more` is added about the conversations."""
        cut = f", {self.num_cut} cut off" if self.num_cut else ""
        skipped = f", {self.num_skipped} left out" if self.num_skipped else ""
        silent = f", {self.num_silent} with an answer that has no target" if self.num_silent else ""
        counts = f"{self.num_tokens:,} tokens, {self.num_targets:,} of them targets"
        names = f"; {self._rules.describe_names(self.num_names)}"
        return f"{counts}, in {self.num_samples:,} conversations{cut}{skipped}{silent}{more}{names}"


def _argument_problems(seq: int, overlong: str) -> Iterator[Problem]:
    if seq < 1:
        yield Problem("seq", str(seq), "at least 1")
    if overlong not in ("refuse", "cut", "drop"):
        yield Problem("overlong", repr(overlong), "refuse, cut or drop")


def _render_line(
    line: ChatLine, tokenizer: Tokenizer, problems: list[Problem]
) -> Conversation | None:
    """The conversation of a line; None, and the mistakes in `problems`, where there is none."""
    if line.problems:
        problems.extend(line.problems)
        return None
    try:
        return tokenizer.conversation(line.messages, tools=line.tools)
    except ValueError as error:
        form = r"^  - (.*?): got (.*?); wanted ([^\n]*?)(?:; fix: ([^\n]*))?$"
        found = re.findall(form, str(error), re.M | re.S)
        problems += [Problem(f"{line.where}: {where}", *rest) for where, *rest in found]
        if not found:  # such as text that is no Unicode
            problems.append(Problem(line.where, str(error), "a conversation"))
        return None


class Conversations:
    """The conversations of a `Chat` as texts to score, whose targets are the assistant's tokens."""

    num_bytes = None

    def __init__(self, chat: Chat):
        self._chat, self.lengths = chat, chat.lengths

    def piece(self, text: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, targets = self._chat.conversation(text)
        return tokens[start : start + length], targets[start : start + length]

    def summary(self) -> str:
        return self._chat.summary()
