"""Tokenizers of Hugging Face models: text to token ids and back, and conversations to text."""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

from functron.core.errors import Problem, nearest, raise_problems, refuse

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
CANNOT = "cannot read a tokenizer"

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and what else the template reads."""

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


@dataclass(frozen=True)
class Conversation:
    """A conversation as a model reads it.

    Attributes:
        text: what the template made of the messages.
        tokens: int64 ``[seq]``.
        assistant: bool ``[seq]``: the tokens of the assistant, for the mask of a loss.
        spans: from where to where in `text` the assistant speaks.
    """

    text: str
    tokens: torch.Tensor
    assistant: torch.Tensor
    spans: tuple[tuple[int, int], ...]


class Tokenizer:
    """Text to token ids and back, by a tokenizer.json.

    Args:
        path: a folder with tokenizer.json and, for special tokens and conversations,
            tokenizer_config.json and perhaps chat_template.jinja; or a file like tokenizer.json,
            beside which these are.

    Attributes:
        file: tokenizer.json.
        path: the folder.
        vocab_size: ids are below it.
        num_ordinary: how many ids there are without tokens added for special purposes, which some
            models that read text alone have no embeddings for.
        special: special tokens by what they are for: ``{"bos_token": "<s>", ...}``.
        template: Jinja source that writes conversations; None where the model has none.

    Raises:
        ValueError: the package tokenizers is missing, or the files are missing or broken.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        file = path if path.is_file() else path / TOKENIZER
        self.file, self.path = file, file.parent
        self._tokenizer = _read_tokenizer(file)
        settings = _read_settings(self.path / SETTINGS)
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.num_ordinary: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        named = {name: _content(settings.get(name)) for name in _SPECIAL}
        self.special = {name: token for name, token in named.items() if token is not None}
        self.template = _find_template(self.path, settings)
        self._mark = uuid.uuid4().hex  # which no message can have in it

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of `text`.

        Args:
            text: any.
            special: add what the model expects around a text, such as a token for its beginning.
        """
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts, with nothing around them; faster than one by one."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, tokens: Sequence[int] | torch.Tensor, *, special: bool = False) -> str:
        """The text of token ids.

        Args:
            tokens: ids; those that no token has give nothing.
            special: write special tokens too.
        """
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def id_of(self, name: str) -> int | None:
        """The id of the special token that is for `name` (``"eos_token"``); None without one."""
        token = self.special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that were added to those of text, by their names."""
        found = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in found.items()}

    @property
    def end_of_text(self) -> int | None:
        """The id that stands between documents: of eos_token, or of what it is usually called."""
        for token in (self.special.get("eos_token"), *_ENDS):
            found = None if token is None else self._tokenizer.token_to_id(token)
            if found is not None:
                return found
        return None

    @property
    def stops(self) -> frozenset[int]:
        """The ids after which a model has finished: of a text, and of its turn to speak."""
        end = self.end_of_text
        found = set() if end is None else {end}
        try:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            last = self.conversation(messages)
        except ValueError:  # no template, or none that takes such messages
            return frozenset(found)
        turn = last.tokens[last.assistant]
        if len(turn) > 1 and not self.decode(turn[-1:]):  # a special token, not a part of "b"
            found.add(int(turn[-1]))
        return frozenset(found)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **more: Any
    ) -> str:
        """The text of a conversation, as the model's template writes it.

        Templates come with models and are not trusted: they run in Jinja's sandbox.

        Args:
            messages: in order.
            add_generation_prompt: end with what makes the model answer.
            more: other variables of the template, such as ``tools``.

        Raises:
            ValueError: the model has no template, or it refuses these messages.
        """
        return self._render(messages, add_generation_prompt, more)[0]

    def conversation(self, messages: Sequence[Message], **more: Any) -> Conversation:
        """A conversation as tokens, and which of them are the assistant's.

        These are those that ``{% generation %}`` marks in the template; where it marks nothing, the
        text that each assistant message adds after the prompt for it, to the end of its turn,
        without whitespace after that.

        Args:
            messages: in order.
            more: other variables of the template.

        Raises:
            ValueError: as `render`; or the template writes a message differently depending on
                those after it, and marks nothing.
        """
        text, spans = self._render(messages, False, more)
        if not spans and not self._marks():
            spans = self._spans(messages, text, more)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = torch.tensor(encoding.ids, dtype=torch.int64)
        assistant = torch.zeros(len(encoding.ids), dtype=torch.bool)
        end = 0
        for index, (start, stop) in enumerate(encoding.offsets):
            # some tokenizers leave spaces out of offsets: they belong to the token that has them
            start = min(start, end) if not text[end:start].strip() else start
            assistant[index] = any(a <= start < max(b, a) for a, b in spans)
            end = max(end, stop)
        return Conversation(text, tokens, assistant, tuple(spans))

    def _marks(self) -> bool:
        return re.search(r"{%-?\s*generation\s*-?%}", self.template or "") is not None

    def _spans(
        self, messages: Sequence[Message], text: str, more: Mapping[str, Any]
    ) -> list[tuple[int, int]]:
        spans, problems = [], []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._render(messages[:index], True, more)[0]
            upto = self._render(messages[: index + 1], False, more)[0]
            if not (upto.startswith(prompt) and text.startswith(upto)):
                got = "text that changes with what stands around it"
                wanted = "a template that writes message after message"
                fix = "mark what the assistant says in it: {% generation %} ... {% endgeneration %}"
                problems.append(Problem(f"messages[{index}]", got, wanted, fix))
                continue
            spans.append((len(prompt), len(upto.rstrip())))
        raise_problems("cannot tell what the assistant says", problems)
        return spans

    def _render(
        self, messages: Sequence[Message], prompt: bool, more: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans of it that the template marks."""
        self.require_template()
        from jinja2 import TemplateError

        variables = {"messages": list(messages), "add_generation_prompt": prompt, "tools": None}
        variables |= {"documents": None, **self.special, **more}
        try:
            marked = self._compiled.render(**variables)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            refuse(
                "the template refuses this conversation",
                "messages",
                error,
                "messages that the model's template takes",
            )
        return _unmark(marked, self._mark)

    @functools.cached_property
    def _compiled(self) -> Any:
        return _environment(self._mark).from_string(self.template or "")

    def require_template(self) -> None:
        """Check that conversations can be written at all.

        Raises:
            ValueError: the model has no template, or the package jinja2 is missing.
        """
        if self.template is None:
            got = f"no chat_template in {SETTINGS} and no {TEMPLATE}"
            fix = f"write one: {self.path / TEMPLATE}"
            refuse("no template", str(self.path), got, "a template", fix)
        _require("jinja2", "cannot write conversations")


def _unmark(marked: str, mark: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and the spans that stood between them."""
    text, spans = "", []
    for number, piece in enumerate(marked.split(mark)):
        if number % 2:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return text, spans


def _environment(mark: str) -> Any:
    """Jinja as chat templates expect it, in a sandbox: no attribute of Python's can be reached.

    What a template marks as the assistant's comes out with `mark` before and after it.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %} ... {% endgeneration %}`` around the assistant's text."""

        tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first, last = (nodes.Output([nodes.TemplateData(mark)]) for _ in range(2))
            return [first.set_lineno(line), *body, last.set_lineno(line)]

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _require(package: str, title: str) -> None:
    if find_spec(package) is None:
        fix = f"pip install {package}, or functron[hub]"
        refuse(title, package, "no such package", "the package installed", fix)


def _read_tokenizer(file: Path) -> Any:
    _require("tokenizers", CANNOT)
    import tokenizers

    text = _read(file, "a model with a fast tokenizer; transformers' save_pretrained writes one")
    try:
        return tokenizers.Tokenizer.from_str(text or "")
    except Exception as error:  # the package raises no other class
        refuse(
            CANNOT,
            str(file),
            error,
            "a tokenizer.json",
            "copy or download it again",
        )


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read(file, "check the path"))
    except json.JSONDecodeError as error:
        refuse(CANNOT, str(file), error, "JSON", "copy or download it again")
    return found if isinstance(found, dict) else {}


def _read(file: Path, fix: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(CANNOT, str(file), reason, "a file", fix)


def _content(token: Any) -> str | None:
    """The text of a special token, which stands as it is or in an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE).is_file():
        return _read(folder / TEMPLATE, "check the path")
    found = settings.get("chat_template")
    if not isinstance(found, list):
        return found
    templates = {entry["name"]: entry["template"] for entry in found}
    if "default" not in templates:
        fix = nearest("default", templates)
        refuse(
            f"cannot use {folder / SETTINGS}",
            "chat_template",
            "several, none the default",
            "one named default",
            fix,
        )
    return templates["default"]
