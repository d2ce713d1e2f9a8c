"""Tokenizers: text to token ids and back, and conversations to text.

Of Hugging Face's models, of bytes, of tiktoken's rank files and of SentencePiece: one protocol, and
`open_tokenizer`, which finds the kind.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from functron.core.errors import Problem, local_path, nearest, on_hub, raise_problems, refuse
from functron.data.mapped_files import (
    RULES,
    SpecialNames,
    TextRules,
    TextTokenizer,
    require_package,
)
from functron.data.templates import (
    SPECIAL,
    ChatTemplate,
    Conversation,
    Message,
    Rendered,
    count_names,
    find_by_first,
    find_targets,
)

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
CANNOT = "cannot read a tokenizer"

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer:
    """Text to token ids and back, by a tokenizer.json; a `TextTokenizer`.

    Args:
        path: a folder with tokenizer.json and, for special tokens and conversations,
            tokenizer_config.json and perhaps chat_template.jinja; or a file like tokenizer.json,
            beside which these are.
        rules: by which text becomes tokens.

    Attributes:
        path: the folder.
        num_ordinary: how many ids there are without tokens added for special purposes, which some
            models that read text alone have no embeddings for.
        special: special tokens by what they are for: ``{"bos_token": "<s>", ...}``.
        template: Jinja source that writes conversations; None where the model has none.

    Raises:
        ValueError: the package tokenizers is missing, or the files are missing or broken.
    """

    def __init__(self, path: str | Path, *, rules: TextRules = RULES):
        path = Path(path)
        file = path if path.is_file() else path / TOKENIZER
        self.file, self.path, self.rules = file, file.parent, rules
        self._tokenizer = _read_tokenizer(file)
        settings = _read_settings(self.path / SETTINGS)
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.num_ordinary: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        tokens = {name: _token_text(settings.get(name)) for name in SPECIAL}
        self.special = {name: token for name, token in tokens.items() if token is not None}
        self.template = _find_template(self.path, settings)
        added = self._tokenizer.get_added_tokens_decoder().items()
        known = {token.content: index for index, token in added if token.special}
        named = (*self.special.values(), *self._end_names[:1])
        ids = {name: self._tokenizer.token_to_id(name) for name in named}
        known |= {name: index for name, index in ids.items() if index is not None}
        self.names = SpecialNames(known)
        if rules.version > 1:
            _make_special(self._tokenizer, known)
        self._parses = rules.special_tokens == "parse" or rules.version == 1
        if not self._parses:
            _read_names(self._tokenizer, self.names)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of `text`; `special`: with what the model expects around one, such as BOS.

        In what `render` made, the names of special tokens that the template wrote stand for these,
        and those in messages are what they are in any text.
        """
        if isinstance(text, Rendered):
            ids, _ = self._encode_rendered(text)
            return [*self._surrounding_ids[0], *ids, *self._surrounding_ids[1]] if special else ids
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts, with nothing around them; faster than one by one."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(self, tokens: Sequence[int] | torch.Tensor, *, special: bool = False) -> str:
        """The text of token ids; those that no token has give nothing."""
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def id_of(self, name: str) -> int | None:
        """The id of the special token that is for `name` (``"eos_token"``); None without one."""
        token = self.special.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def begin(self) -> tuple[int, ...]:
        return self._surrounding_ids[0]

    @functools.cached_property
    def _surrounding_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the tokenizer puts before a text, and after it."""
        for text in ("a", "1", "."):
            ids, plain = (_try_encode(self._tokenizer, text, special) for special in (True, False))
            size = len(plain)
            for start in range(len(ids) - size + 1) if plain else ():
                if ids[start : start + size] == plain:
                    return tuple(ids[:start]), tuple(ids[start + size :])
        return (), ()

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that were added to those of text, by their names."""
        found = self._tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in found.items()}

    @property
    def end_of_text(self) -> int | None:
        """Of eos_token, or of what it is usually called."""
        return self._tokenizer.token_to_id(self._end_names[0]) if self._end_names else None

    @property
    def _end_names(self) -> list[str]:
        """The tokens that may end a text, as far as there are such."""
        found = (self.special.get("eos_token"), *_ENDS)
        return [x for x in found if x and self._tokenizer.token_to_id(x) is not None]

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

        Templates come with models and are not trusted: see `functron.data.templates`.

        Args:
            messages: in order.
            add_generation_prompt: end with what makes the model answer.
            more: other variables of the template, such as ``tools``.

        Raises:
            ValueError: the model has no template, or it refuses these messages.
        """
        return self._writer.render(messages, add_generation_prompt, more)[0]

    def conversation(self, messages: Sequence[Message], **more: Any) -> Conversation:
        """A conversation as tokens, and which of them are the assistant's.

        These are those that lie in what ``{% generation %}`` marks in the template; where it marks
        nothing, in the text that each assistant message adds after the prompt for it, to the end of
        its turn, without whitespace after that. See `find_targets`.

        Arguments and errors are those of `render`; it is a ValueError, too, where the template
        writes a message differently depending on those after it, and marks nothing.
        """
        text, spans = self._writer.render_answers(messages, more)
        ids, offsets = self._encode_rendered(text)
        find = find_targets if self.rules.version > 1 else find_by_first
        assistant, silent = find(text, offsets, spans)
        tokens = torch.tensor(ids, dtype=torch.int64)
        names = count_names(self.names, messages, more)
        return Conversation(text, tokens, assistant, tuple(spans), silent, names)

    def encode_prompt(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """The tokens of a conversation up to the assistant's next answer.

        They are those that such a conversation has before its answer: spaces at the end of the
        prompt are left out where they are a part of the answer's first token (``" Paris"``), which
        the model has learnt to say. Arguments and errors are those of `render`.
        """
        text = self._writer.render(messages, True, more)[0]
        longer = Rendered(text + "a")
        longer.literal = text.literal
        plain, ends = self._encode_rendered(text)
        answered, offsets = self._encode_rendered(longer)
        said, _ = find_targets(longer, offsets, [(len(text), len(longer))])
        before = answered[: int(said.int().argmax())]
        if not before or plain[: len(before)] != before:
            return plain
        return plain if text[ends[len(before) - 1][1] :].strip() else before

    def _encode_rendered(self, text: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text that a template wrote, without anything around it, and their offsets.

        The template's own names of special tokens stand for these; `literal` ones are text.
        """
        if not text.literal:
            found = self._parser.encode(text, add_special_tokens=False)
            return found.ids, found.offsets
        # as no setting parses one name and not another, the template's get names of their own
        tokenizer, aliases, ids = self._alias_tokenizer
        pieces, origin = [], []
        end = 0
        for start, stop in self._own_names(text):
            pieces += [text[end:start], aliases[text[start:stop]]]
            origin += [*range(end, start), *([start] * len(pieces[-1]))]
            end = stop
        origin += range(end, len(text) + 1)
        found = tokenizer.encode("".join([*pieces, text[end:]]), add_special_tokens=False)
        offsets = [(origin[start], origin[stop]) for start, stop in found.offsets]
        own: list[int] = found.ids
        return [ids.get(index, index) for index in own], offsets

    @functools.cached_property
    def _parser(self) -> Any:
        """Parses names of special tokens, as those are which a template writes."""
        if self._parses:
            return self._tokenizer
        made = _read_tokenizer(self.file)
        _make_special(made, self.names.ids)
        return made

    def _own_names(self, text: Rendered) -> Iterator[tuple[int, int]]:
        """From where to where there are names of special tokens that the template wrote."""
        literal, at, pattern = dict(text.literal), 0, self.names.pattern
        within = {index for span in text.literal for index in range(*span)}
        while pattern is not None and (match := pattern.search(text, at)) is not None:
            start, at = match.span()
            if within.isdisjoint(range(start, at)):
                yield start, at
            else:
                at = literal.get(start, start + 1)

    @functools.cached_property
    def _alias_tokenizer(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """A tokenizer that takes names of special tokens for text, and parses aliases of them.

        With the aliases by the names, and the ids of special tokens by those of their aliases.
        """
        from tokenizers import AddedToken

        made = _read_tokenizer(self.file)
        _make_special(made, self.names.ids)
        added = {x.content: x for x in made.get_added_tokens_decoder().values()}
        _read_names(made, self.names)
        mark = uuid.uuid4().hex  # which no message can have in it
        aliases = {name: f"<{mark}:{index}>" for name, index in self.names.ids.items()}
        for name, alias in aliases.items():
            strips = {"lstrip": added[name].lstrip, "rstrip": added[name].rstrip}
            made.add_tokens([AddedToken(alias, normalized=False, **strips)])
        ids = {made.token_to_id(alias): self.names.ids[name] for name, alias in aliases.items()}
        return made, aliases, ids

    @functools.cached_property
    def _writer(self) -> ChatTemplate:
        self.require_template()
        kept = SpecialNames({}) if self._parses else self.names
        return ChatTemplate(self.template or "", self.path, self.special, kept)

    def require_template(self) -> None:
        """Raise ValueError unless the model has a template, and the package jinja2 is installed."""
        if self.template is None:
            got = f"no chat_template in {SETTINGS} and no {TEMPLATE}"
            fix = f"write one: {self.path / TEMPLATE}"
            refuse("no template", str(self.path), got, "a template", fix)
        require_package("jinja2", "hub", "cannot write conversations", "the package installed")


def _make_special(tokenizer: Any, names: Iterable[str]) -> None:
    """Have a tokenizer know that tokens are special, as transformers does for those of settings."""
    from tokenizers import AddedToken

    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for name in names:
        if not name or tokenizer.token_to_id(name) is None:
            continue
        kept = ("normalized", "lstrip", "rstrip") if name in added else ()
        how = {"normalized": False, **{x: getattr(added[name], x) for x in kept}}
        tokenizer.add_special_tokens([AddedToken(name, special=True, **how)])


def _try_encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The ids of a text; none where the model has no token for some of it, not even an unknown."""
    try:
        return tokenizer.encode(text, add_special_tokens=special).ids
    except Exception:  # the package raises no other class
        return []


def _read_names(tokenizer: Any, names: SpecialNames) -> None:
    """Have a tokenizer take names of special tokens for text.

    The package leaves these names to the model, of which some have them among their pieces, as
    Unigram models have: text is then split after the first character of such a name.
    """
    import tokenizers

    tokenizer.encode_special_tokens = True
    pieces = [
        name
        for name, index in names.ids.items()
        if len(name) > 1 and index in _try_encode(tokenizer, name)
    ]
    if pieces:
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in pieces)
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        own = tokenizer.pre_tokenizer
        splits = [split] if own is None else [own, split]
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(splits)


def _read_tokenizer(file: Path) -> Any:
    require_package("tokenizers", "hub", CANNOT, "the package installed")
    import tokenizers

    text = _read_text(
        file, "a model with a fast tokenizer; transformers' save_pretrained writes one"
    )
    try:
        made = tokenizers.Tokenizer.from_str(text or "")
    except Exception as error:  # the package raises no other class
        refuse(
            CANNOT,
            str(file),
            error,
            "a tokenizer.json",
            "copy or download it again",
        )
    made.no_truncation()  # which the file may ask for, such as the 128 tokens of an encoder
    made.no_padding()
    return made


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read_text(file, "check the path"))
    except (json.JSONDecodeError, RecursionError) as error:
        refuse(CANNOT, str(file), error, "JSON", "copy or download it again")
    if not isinstance(found, dict):
        return {}
    wrong = [
        Problem(f"{file}: {name}", f"{token!r:.100}", "a token's text")
        for name in SPECIAL
        if not isinstance(token := _token_text(found.get(name)), str | None)
    ]
    raise_problems(CANNOT, wrong)
    return found


def _read_text(file: Path, fix: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(CANNOT, str(file), reason, "a file", fix)


def _token_text(token: Any) -> str | None:
    """The text of a special token, which stands as it is or in an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE).is_file():
        return _read_text(folder / TEMPLATE, "check the path")
    found = settings.get("chat_template")
    if isinstance(found, str | None):
        return found
    try:
        templates = {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError):
        where = f"{folder / SETTINGS}: chat_template"
        refuse(CANNOT, where, f"{found!r:.100}", "a template, or a list of names and templates")
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


BYTES = "bytes"
SNIFFED = 256


class ByteTokenizer:
    """Text as its bytes in UTF-8, ids 0 to 255; 256 ends a text."""

    file = None
    vocab_size = 257
    num_ordinary = 256
    end_of_text = 256
    begin: tuple[int, ...] = ()
    stops = frozenset({256})
    special_tokens: Mapping[str, int] = MappingProxyType({"<|endoftext|>": 256})
    names = SpecialNames(special_tokens)

    def __init__(self, rules: TextRules = RULES):
        self.rules = rules

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if not _parses(self.rules):
            return list(text.encode())
        return self.names.parse(text, lambda piece: list(piece.encode()))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of bytes; invalid UTF-8 gives the replacement character.

        Other ids give nothing, but where `special` 256 its name, as often as it stands there.
        """
        pieces, size = [], self.num_ordinary
        for ends, run in groupby(map(int, tokens), lambda token: token == self.end_of_text):
            if ends:
                pieces += [END for _ in run] if special else []
            else:
                # characters do not go on behind the end of a text
                known = bytes(token for token in run if 0 <= token < size)
                pieces.append(known.decode(errors="replace"))
        return "".join(pieces)


def _parses(rules: TextRules) -> bool:
    """Whether kinds other than tokenizer.json parse names of special tokens."""
    return rules.special_tokens == "parse" and rules.version > 1


END = "<|endoftext|>"


_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_LLAMA3 = ("begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4)))
_LLAMA3 += ("start_header_id", "end_header_id", "reserved_special_token_4", "eot_id")
_LLAMA3 += tuple(f"reserved_special_token_{i}" for i in range(5, 251))

SCHEMES: Mapping[str, tuple[str, Mapping[str, int]]] = MappingProxyType(
    {
        "gpt2": (
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+" + rf"|{_MARKS}|\s+(?!\S)|\s+",
            {END: 50256},
        ),
        "cl100k": (
            rf"{_SHORT}|{_LETTER}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}",
            {
                END: 100257,
                "<|fim_prefix|>": 100258,
                "<|fim_middle|>": 100259,
                "<|fim_suffix|>": 100260,
                "<|endofprompt|>": 100276,
            },
        ),
        "o200k": (
            rf"{_LETTER}[{_UPPER}]*[{_LOWER}]+{_SHORT}?|{_LETTER}[{_UPPER}]+[{_LOWER}]*{_SHORT}?"
            rf"|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}",
            {END: 199999, "<|endofprompt|>": 200018},
        ),
        "llama3": (
            rf"{_SHORT}|{_LETTER}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_SPACES}",
            {f"<|{name}|>": 128000 + index for index, name in enumerate(_LLAMA3)},
        ),
    }
)
"""Published encodings: the regular expression whose matches are merged each by itself, and the ids
of special tokens. Sources: tiktoken's ``openai_public``, and llama3's ``tokenizer.py``."""

STEMS = MappingProxyType(
    {"r50k_base": "gpt2", "p50k_base": "gpt2", "cl100k_base": "cl100k", "o200k_base": "o200k"}
)
"""The encodings of files that are called what OpenAI calls them."""


class RankFile:
    """A `TextTokenizer` that merges pairs of bytes by the ranks of a ``.tiktoken`` file.

    Every line has a token's bytes in base64 and its rank, which is its id. How text is split
    before, and which ids are special, is not in the file.

    Args:
        path: the file.
        pattern: one of `SCHEMES`, or a regular expression, with which ``<|endoftext|>`` follows the
            last rank; empty: by the file's name (`STEMS`).
        rules: by which text becomes tokens.

    Attributes:
        path: the folder it lies in.

    Raises:
        ValueError: the package tiktoken is missing, the file has another format (with the lines at
            fault), or the pattern is none, or not known.
    """

    def __init__(self, path: str | Path, pattern: str = "", *, rules: TextRules = RULES):
        self.rules, self.file = rules, Path(path)
        self.path = self.file.parent
        require_package("tiktoken", "tiktoken", CANNOT, f"it, to read {path}")
        import tiktoken

        split, special = _find_scheme(self.file, pattern)
        ranks = _read_ranks(self.file)
        last = max(ranks.values())
        fits = special and last >= min(special.values()) - 2
        self.special_tokens = dict(special) if fits else {END: last + 1}
        try:
            self._encoding = tiktoken.Encoding(
                self.file.stem,
                pat_str=split,
                mergeable_ranks=ranks,
                special_tokens=self.special_tokens,
            )
        except (ValueError, AssertionError) as error:
            got = f"{pattern or split!r} ({error})"
            refuse(CANNOT, "pattern", got, "a regular expression", "check it")
        self.names = SpecialNames(self.special_tokens)
        begin = self.special_tokens.get("<|begin_of_text|>")
        self.begin: tuple[int, ...] = () if begin is None else (begin,)
        self._known = {*ranks.values(), *self.special_tokens.values()}
        self.vocab_size: int = max(self._known) + 1
        self.num_ordinary: int = last + 1

    @property
    def end_of_text(self) -> int | None:
        return self.special_tokens.get(END, self.special_tokens.get("<|end_of_text|>"))

    @property
    def stops(self) -> frozenset[int]:
        found = (self.end_of_text, self.special_tokens.get("<|eot_id|>"))
        return frozenset(token for token in found if token is not None)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; `special`: begin with ``<|begin_of_text|>``, if there is one."""
        allowed = "all" if _parses(self.rules) else set()
        ids = self._encoding.encode(text, allowed_special=allowed, disallowed_special=())
        return [*self.begin, *ids] if special else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text, special=False) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; those that no token has give nothing."""
        left_out = set() if special else set(self.special_tokens.values())
        ids = [int(t) for t in tokens]
        return self._encoding.decode([t for t in ids if t in self._known and t not in left_out])


def _find_scheme(file: Path, pattern: str) -> tuple[str, Mapping[str, int]]:
    name = pattern or STEMS.get(file.stem, "")
    if name in SCHEMES:
        return SCHEMES[name]
    known = ", ".join(SCHEMES)
    if not name:
        wanted = f"how it splits text: {known}, or a regular expression"
        fix = "add --pattern (functron train: --tokenizer-pattern)"
        refuse(CANNOT, "pattern", f"none for {file.name}", wanted, fix)
    if name.replace("_", "").replace("-", "").isalnum():
        wanted = f"one of {known}, or a regular expression"
        refuse(CANNOT, "pattern", repr(name), wanted, nearest(name, SCHEMES))
    return name, {}


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Ranks by the bytes of their tokens."""
    found: dict[bytes, int] = {}
    problems: list[Problem] = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        refuse(CANNOT, str(file), error.strerror or str(error), "a rank file")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            shown = line[:40].decode(errors="replace")
            wanted = "a token in base64, and its rank"
            problems.append(Problem(f"{file}:{number}", repr(shown), wanted))
    if not found and not problems:
        problems.append(Problem(str(file), "no ranks", "a token in base64, and its rank, a line"))
    missing = [byte for byte in range(256) if bytes([byte]) not in found]
    if missing and not problems:
        got = f"no rank for {len(missing)} bytes, such as {missing[0]:#04x}"
        problems.append(Problem(str(file), got, "one for each", "copy or download it again"))
    raise_problems(CANNOT, problems[:20])
    return found


class SentencePiece:
    """A `TextTokenizer` of a ``.model`` file (Kudo and Richardson 2018).

    Args:
        path: the file.
        rules: by which text becomes tokens; what stands between names that are parsed is encoded by
            itself.

    Attributes:
        path: the folder it lies in.
        num_ordinary: all ids, as those of control symbols are among those of text.
        special_tokens: the ids of control symbols and of the unknown token, by their names.

    Raises:
        ValueError: the package sentencepiece is missing, or the file is none of its models.
    """

    def __init__(self, path: str | Path, *, rules: TextRules = RULES):
        self.rules, self.file = rules, Path(path)
        self.path = self.file.parent
        require_package("sentencepiece", "sentencepiece", CANNOT, f"it, to read {path}")
        import sentencepiece

        try:
            data = self.file.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            got = getattr(error, "strerror", None) or str(error) or "something else"
            wanted = "a model of SentencePiece"
            refuse(CANNOT, str(path), got, wanted, "copy or download it again")
        model, size = self._model, self._model.get_piece_size()
        self.vocab_size: int = size
        self.num_ordinary: int = size
        ids = (i for i in range(size) if model.is_control(i) or model.is_unknown(i))
        self.special_tokens: Mapping[str, int] = {model.id_to_piece(i): i for i in ids}
        self.names = SpecialNames(self.special_tokens)
        self.begin: tuple[int, ...] = tuple(i for i in (model.bos_id(),) if i >= 0)

    @property
    def end_of_text(self) -> int | None:
        found = self._model.eos_id()
        return found if found >= 0 else None

    @property
    def stops(self) -> frozenset[int]:
        return frozenset() if self.end_of_text is None else frozenset({self.end_of_text})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; `special`: begin with the model's ``<s>``, if it has one."""
        (ids,) = self.encode_batch([text])
        return [*self.begin, *ids] if special else ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encode = partial(self._model.encode, out_type=int, num_threads=1)
        if not _parses(self.rules):
            return encode(list(texts))
        return [self.names.parse(text, encode) for text in texts]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; those that no token has give nothing."""
        ids = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        if not special:
            return self._model.decode(ids)
        return "".join(self._decode_pieces(ids))

    def _decode_pieces(self, ids: Sequence[int]) -> Iterator[str]:
        for control, run in groupby(ids, self._model.is_control):
            if control:
                yield from map(self._model.id_to_piece, run)
            else:
                yield self._model.decode(list(run))


def open_tokenizer(
    path: str | Path, *, pattern: str = "", rules: TextRules = RULES
) -> TextTokenizer:
    """Open a tokenizer of whatever kind.

    Args:
        path: ``bytes``; a file: Hugging Face's tokenizer.json, a SentencePiece ``.model``, or a
            rank file of tiktoken (``.tiktoken``; Llama 3's is called tokenizer.model); or a folder
            with one of these.
        pattern: how a rank file's tokenizer splits text (see `RankFile`).
        rules: by which text becomes tokens.

    Raises:
        ValueError: there is none, its package is missing, or it cannot be read.
    """
    if str(path) == BYTES:
        return ByteTokenizer(rules)
    file = _find_file(local_path(path))
    kind = kind_of(file)
    if pattern and kind is not RankFile:
        refuse(
            CANNOT,
            "pattern",
            repr(pattern),
            f"none: {file} splits text by itself",
        )
    return RankFile(file, pattern, rules=rules) if kind is RankFile else kind(file, rules=rules)


def end_of_text(tokenizer: TextTokenizer, name: str = "") -> int:
    """The id that ends a document: of the special token `name`, or else the tokenizer's own.

    ValueError where there is no such token.
    """
    known = tokenizer.special_tokens
    found = known.get(name) if name else tokenizer.end_of_text
    if found is None:
        got = f"{name!r}, no special token of it" if name else "no token that ends a text"
        fix = f"name one in tokenizer_config.json (eos_token), of {', '.join(known) or 'none'}, "
        fix += "or take a tokenizer that has one"
        fix = nearest(name, known) if name else fix
        refuse("unknown special token", str(tokenizer.file or BYTES), got, "one", fix)
    return found


def tokenizers_in(folder: Path) -> list[Path]:
    """The files in a folder that may be a tokenizer: tokenizer.json, or else all of other kinds."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    return sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])


def _find_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = tokenizers_in(path)
    if len(found) != 1:
        got = ", ".join(file.name for file in found) or "a folder with none"
        wanted = "one of tokenizer.json, a .model or a .tiktoken"
        fix = "name the file" if found else "check the path"
        refuse(CANNOT, str(path), got, wanted, fix)
    return found[0]


def kind_of(file: Path) -> type[Tokenizer] | type[SentencePiece] | type[RankFile]:
    """The class that reads a file, by its beginning: SentencePiece is binary, a rank file base64.

    ValueError where it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            head = stream.read(SNIFFED)
    except OSError as error:
        fix = on_hub(file) or "check the path; bytes needs no file: --tokenizer bytes"
        refuse(CANNOT, str(file), error.strerror or str(error), "a tokenizer", fix)
    if file.suffix == ".json" or head.lstrip()[:1] == b"{":
        return Tokenizer
    words = head.split(b"\n")[0].split()
    ranks = len(words) == 2 and words[1].isdigit() and words[0].isascii()
    return RankFile if file.suffix == ".tiktoken" or ranks else SentencePiece
