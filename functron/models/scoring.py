"""Scoring: the likelihood of given texts, as evaluation harnesses ask for it.

`log_likelihoods`, `rolling_log_likelihoods` and `generate_rows` work on tokens and any mesh that
`generate` works on, whose processes each call them with all requests and have all results.
`LanguageModel` is an ``LM`` of lm-evaluation-harness, on text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from functron.core import random, tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.models import gpt
from functron.models.generation import Draw, cache_problems, generate, placed
from functron.models.options import ModelOptions
from functron.spmd import DATA_AXES, BoundMesh, Mesh, P, gather, shard, shard_map
from functron.spmd import collectives as lax


class TextScore(NamedTuple):
    """The score of a continuation.

    Attributes:
        log_likelihood: sum over its tokens of log p(token | all before), natural logarithm.
        is_greedy: whether each token is the likeliest one.
    """

    log_likelihood: float
    is_greedy: bool


ContextPair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, at least one, and of a continuation."""


_LOSSES = "evaluate losses: functron evaluate RUN --data NAME=TEXT"


@torch.no_grad()
def log_likelihoods(
    params: tree.Tree,
    config: gpt.GPTConfig,
    requests: Sequence[ContextPair],
    *,
    batch_size: int = 8,
    mesh: Mesh | BoundMesh | None = None,
    options: ModelOptions | None = None,
) -> list[TextScore]:
    """log p(continuation | context) of each request, and whether greedy decoding gives it.

    The first tokens of a request longer than ``max_seq + 1`` are left out, as harnesses do.
    Requests of similar length share a batch, which is padded at the end: causal attention does not
    see it.

    Args:
        params: the parameters of `gpt.defs(config)`, as `mesh` splits them.
        requests: an empty continuation has likelihood 1.
        batch_size: how many are scored together, over all ranks; on a mesh it is rounded up to a
            multiple of its data ranks.
        mesh: simulated or bound; None: one rank.
        options: gather, expert_axes, kernels and hooks; as in `generate`.

    Collectives: those of `gpt.forward`, one all-gather of the logits over tp, and of two numbers a
    request over the data axes.

    Raises:
        ValueError: an empty context, a token outside the vocabulary, a continuation that is
            longer than `max_seq`, axes that split sequences or layers, or experts for which tokens
            compete: a score would depend on the other requests.
    """
    alone = [replace(one, fix=_LOSSES) for one in cache_problems(config, mesh, options)]
    raise_problems("cannot score this", [*alone, *_problems(config, requests)])
    mesh = Mesh() if mesh is None else mesh
    batch_size = _round_up(batch_size, mesh)
    device = tree.leaves(params)[0].device
    score = _make_scorer(config, mesh, options)
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    found: dict[int, TextScore] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows = [_row(requests[i], config.max_seq) for i in chosen]
        tokens, targets = (x.to(device) for x in _pad_rows(rows, batch_size))
        logs, greedy = score(params, tokens, targets)
        for index, log, best in zip(chosen, logs.tolist(), greedy.tolist(), strict=False):
            found[index] = TextScore(log, bool(best))
    return [found[i] for i in range(len(requests))]


@torch.no_grad()
def rolling_log_likelihoods(
    params: tree.Tree,
    config: gpt.GPTConfig,
    texts: Sequence[Sequence[int]],
    start: int,
    **options: Any,
) -> list[float]:
    """log p of whole texts, for perplexities: every token is scored once.

    A text longer than `max_seq` is read in windows of as many tokens, of which the last begins
    earlier, so that it is full, and scores only the tokens after the window before. This is what
    lm-evaluation-harness does with a context of one token.

    Args:
        start: the token before each text, such as the end-of-text token.
        options: of `log_likelihoods`.
    """
    requests: list[ContextPair] = []
    owners: list[int] = []
    for index, text in enumerate(texts):
        for at in range(0, len(text), config.max_seq):
            end = min(at + config.max_seq, len(text))
            before = [start] if at == 0 else text[end - config.max_seq - 1 : at]
            requests.append((before, text[at:end]))
            owners.append(index)
    totals = [0.0] * len(texts)
    scores = log_likelihoods(params, config, requests, **options)
    for owner, score in zip(owners, scores, strict=True):
        totals[owner] += score.log_likelihood
    return totals


_GREEDY = Draw(temperature=0)


@dataclass(frozen=True)
class Continue:
    """How `generate_rows` continues prompts.

    Attributes:
        num_tokens: the most to add.
        draw: how each is drawn; by default the likeliest.
        stop: tokens that end a row; they are left out.
    """

    num_tokens: int
    draw: Draw = _GREEDY
    stop: Collection[int] = ()


@torch.no_grad()
def generate_rows(
    params: tree.Tree,
    config: gpt.GPTConfig,
    prompts: Sequence[Sequence[int]],
    how: Continue,
    *,
    batch_size: int = 8,
    seed: int = 0,
    ends: Callable[[list[int]], bool] = lambda tokens: False,
    mesh: Mesh | BoundMesh | None = None,
    options: ModelOptions | None = None,
) -> list[list[int]]:
    """The new tokens after each prompt, generated in batches of prompts of similar length.

    Tokens come in rounds of 16, 32, 64 and so on, after each of which `ends` is asked; rows that
    go on are read again.

    Args:
        params: the parameters of `gpt.defs(config)`, as `mesh` splits them.
        prompts: tokens, at least one each; of longer ones than ``max_seq - num_tokens`` the first
            are left out, as harnesses do.
        batch_size, mesh, options: as in `log_likelihoods`.
        seed: of the draws.
        ends: whether a row with these new tokens needs no more.

    Collectives: those of `generate`, and an all-gather of the tokens over the data axes.

    Raises:
        ValueError: what `generate` raises, or `num_tokens` leaves no room for a prompt.
    """
    if not 0 < how.num_tokens < config.max_seq:
        got, wanted = str(how.num_tokens), f"from 1 to max_seq - 1 = {config.max_seq - 1}"
        refuse("cannot generate", "num_tokens", got, wanted, "the prompt needs room too")
    mesh = Mesh() if mesh is None else mesh
    batch_size = _round_up(batch_size, mesh)
    room = config.max_seq - how.num_tokens
    given = {"mesh": mesh, "options": options, "key": random.key(seed)}
    found: list[list[int]] = [[] for _ in prompts]
    waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    made, size = 0, 16
    while waiting and made < how.num_tokens:
        size = min(size, how.num_tokens - made)
        for start in range(0, len(waiting), batch_size):
            chosen = waiting[start : start + batch_size]
            rows = [[*prompts[i][-room:], *found[i]] for i in chosen]
            given["key"] = random.fold_in(random.fold_in(random.key(seed), made), start)
            now = replace(how, num_tokens=size)
            continued = _continue(params, config, rows, now, batch_size, given)
            for i, new in zip(chosen, continued, strict=True):
                found[i] += new
        made, size = made + size, 2 * size
        # a row that is shorter has met a stop
        waiting = [i for i in waiting if len(found[i]) == made and not ends(found[i])]
    return found


def _continue(
    params: tree.Tree,
    config: gpt.GPTConfig,
    rows: list[list[int]],
    how: Continue,
    batch_size: int,
    given: dict,
) -> Iterator[list[int]]:
    """The new tokens of each row, without the stop that ends it."""
    device, mesh = tree.leaves(params)[0].device, given["mesh"]
    whole = [*rows, *([rows[-1]] * (batch_size - len(rows)))]
    lengths = torch.tensor([len(row) for row in whole])
    tokens = torch.zeros(batch_size, int(lengths.max()), dtype=torch.int64)
    for i, row in enumerate(whole):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    own, owned = (x.to(device) for x in shard((tokens, lengths), P(DATA_AXES), mesh))
    draw = how.draw
    new = generate(
        params,
        config,
        own,
        how.num_tokens,
        lengths=owned,
        temperature=draw.temperature,
        top_k=draw.top_k,
        top_p=draw.top_p,
        stop=how.stop,
        **{**given, "key": given["key"].to(device)},
    )
    out = gather(new, P(DATA_AXES), mesh).tolist()
    for row, length in zip(out, lengths.tolist()[: len(rows)], strict=False):
        added = row[length : length + how.num_tokens]
        ends = (at for at, token in enumerate(added) if token in how.stop)
        yield added[: next(ends, len(added))]


def _round_up(batch_size: int, mesh: Mesh | BoundMesh) -> int:
    """So many rows that the data ranks have equally many."""
    ranks = math.prod(mesh[axis] for axis in DATA_AXES)
    return -(-batch_size // ranks) * ranks


def _make_scorer(
    config: gpt.GPTConfig, mesh: Mesh | BoundMesh, options: ModelOptions | None
) -> Callable:
    """``(params, tokens, targets)``, whole batches, to the sums and whether all are greedy."""
    _, specs, given = placed(config, mesh, options)

    def score(params, tokens, targets):
        logits = gpt.forward(config, params, tokens, given)
        logits = lax.all_gather(logits, "tp", axis=-1, tiled=True)[..., : config.vocab_size]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        counted = targets >= 0
        at = targets.clamp(min=0).unsqueeze(-1)
        chosen = logits.gather(-1, at).squeeze(-1) - logits.logsumexp(-1)
        right = (logits.argmax(-1) == targets) | ~counted
        return torch.where(counted, chosen, torch.zeros_like(chosen)).sum(-1), right.all(-1)

    rows = P(DATA_AXES)
    mapped = shard_map(score, mesh, (specs, rows, rows), (rows, rows))

    def over_rows(params, tokens, targets):
        own = shard((tokens, targets), rows, mesh)
        return gather(mapped(params, *own), rows, mesh)

    return over_rows


def _row(request: ContextPair, max_seq: int) -> tuple[list[int], list[int]]:
    context, continuation = request
    whole = [*context, *continuation][-(max_seq + 1) :]
    tokens, targets = whole[:-1], whole[1:]
    ignored = len(targets) - len(continuation)
    return tokens, [-1] * ignored + targets[ignored:]


def _pad_rows(rows: list[tuple[list[int], list[int]]], batch_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[batch_size, seq]``, padded by tokens 0 with targets -1."""
    seq = max(1, *(len(tokens) for tokens, _ in rows))
    tokens = torch.zeros(batch_size, seq, dtype=torch.int64)
    targets = torch.full((batch_size, seq), -1)
    for i, (row, wanted) in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        targets[i, : len(wanted)] = torch.tensor(wanted, dtype=torch.int64)
    return tokens, targets


def _problems(config: gpt.GPTConfig, requests: Sequence[ContextPair]) -> Iterable[Problem]:
    for index, (context, continuation) in enumerate(requests):
        where = f"requests/{index}"
        if not context:
            fix = "begin it with the end-of-text token"
            yield Problem(f"{where}/0", "an empty context", "at least one token", fix)
        if len(continuation) > config.max_seq:
            got = f"a continuation of {len(continuation)} tokens"
            yield Problem(f"{where}/1", got, f"at most max_seq={config.max_seq}", "cut it")
        outside = [t for t in (*context, *continuation) if not 0 <= t < config.vocab_size]
        if outside:
            yield Problem(where, f"token {outside[0]}", f"ids from 0 to {config.vocab_size - 1}")


@runtime_checkable
class ScoredText(Protocol):
    """The methods of a tokenizer that `LanguageModel` calls, as `functron.data.Tokenizer` has.

    Attributes:
        begin: the tokens that a text begins with, such as the BOS; may be missing.
    """

    @property
    def end_of_text(self) -> int | None:
        """The token between texts."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ...


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model as an ``LM`` of lm-evaluation-harness: three methods over lists of requests.

    Pass it to ``lm_eval.simple_evaluate(model=LanguageModel(...), tasks=[...])``: it is an instance
    of the harness's ``LM``, and gives the numbers of its backend ``hf``. On a bound mesh every
    process calls the harness with the same tasks; it has no chat template.

    A request is anything with ``args``, or that tuple itself: ``(context, continuation)``,
    ``(text,)``, or ``(context, {"until": [...], "max_gen_toks": N})``, where there may also be
    ``do_sample``, ``temperature``, ``top_k`` and ``top_p``.

    Attributes:
        params: of `gpt.defs(config)`, as `mesh` splits them.
        config: the architecture.
        batch_size: requests that are scored together, over all ranks.
        max_new_tokens: for requests to generate without a number.
        mesh: simulated or bound; None: one rank.
        options: as in `log_likelihoods`.
        seed: of what is sampled.
    """

    params: tree.Tree
    config: gpt.GPTConfig
    tokenizer: ScoredText
    batch_size: int = 8
    max_new_tokens: int = 256
    mesh: Mesh | BoundMesh | None = None
    options: ModelOptions | None = None
    seed: int = 0

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Its class, which the harness asks for before it asks whether that is an ``LM``."""
        _register(type(self))
        return type(self)

    @property
    def rank(self) -> int:
        """0 on every process: each is given all requests, and the mesh shares them."""
        return 0

    @property
    def world_size(self) -> int:
        """1: the harness is to leave the requests together."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return tree.leaves(self.params)[0].device

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness keeps requests that depend on the tokenizer."""
        return f"{type(self.tokenizer).__name__}-{self.config.vocab_size}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template of chats: none; see `apply_chat_template`."""
        return ""

    def apply_chat_template(self, chat_history: Sequence[Any], **settings: Any) -> str:
        """Refuse chats with a ValueError: texts are scored as they are."""
        got, fix = f"{len(chat_history)} messages", "leave apply_chat_template out"
        refuse("cannot score chats", "apply_chat_template", got, "texts", fix)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Do nothing: results come at once, and the harness caches whole calls (``use_cache``)."""

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """``(log p(continuation | context), is greedy)`` of each ``(context, continuation)``."""
        pairs = [self._encode_pair(*_args(request)) for request in requests]
        return [(score.log_likelihood, score.is_greedy) for score in self.score(pairs)]

    def score(self, pairs: Sequence[ContextPair]) -> list[TextScore]:
        """The `log_likelihoods` of tokens."""
        return log_likelihoods(self.params, self.config, pairs, **self._how)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of each ``(text,)``."""
        texts = [self.encode(_args(request)[0]) for request in requests]
        return rolling_log_likelihoods(self.params, self.config, texts, self.start, **self._how)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each ``(context, settings)``, up to one of its "until".

        Raises:
            ValueError: settings that it does not have, such as beams.
        """
        found = [""] * len(requests)
        grouped: dict[str, tuple[list[int], dict[str, Any]]] = {}
        for index, request in enumerate(requests):
            settings = dict(_args(request)[1])
            grouped.setdefault(repr(settings), ([], settings))[0].append(index)
        for chosen, settings in grouped.values():
            contexts = [_args(requests[i])[0] for i in chosen]
            for i, text in zip(chosen, self._generate_texts(contexts, settings), strict=True):
                found[i] = text
        return found

    def _generate_texts(self, contexts: list[str], settings: dict[str, Any]) -> Iterator[str]:
        until, draw, count = _read_settings(settings, self.max_new_tokens)
        prompts = [self.encode(context) or [self.start] for context in contexts]
        end = self.tokenizer.end_of_text
        how = Continue(count, draw, () if end is None else (end,))

        def ends(tokens: list[int]) -> bool:
            return any(text in self.tokenizer.decode(tokens) for text in until)

        rows = generate_rows(
            self.params, self.config, prompts, how, seed=self.seed, ends=ends, **self._how
        )
        for row in rows:
            said = self.tokenizer.decode(row)
            found = [said.index(text) for text in until if text in said]
            yield said[: min(found)] if found else said

    @property
    def _how(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "mesh": self.mesh, "options": self.options}

    @property
    def _begin(self) -> tuple[int, ...]:
        rules = getattr(self.tokenizer, "rules", None)
        return rules.begin_prompt(self.tokenizer) if rules is not None else ()

    @property
    def start(self) -> int:
        """The token before texts: the BOS where there is one, or else the end-of-text token.

        A model of bytes alone has neither: a new line stands for it.

        Raises:
            ValueError: the tokenizer has neither.
        """
        name = getattr(self.tokenizer, "id_of", None)
        start = next(iter(self._begin), None) if name is None else name("bos_token")
        start = self.tokenizer.end_of_text if start is None else start
        if start is None:
            fix = "name it in tokenizer_config.json: eos_token"
            got, wanted = "no end-of-text token", "one to begin texts with"
            refuse("cannot score texts", "tokenizer", got, wanted, fix)
        if start >= self.config.vocab_size:
            (start,) = self.tokenizer.encode("\n", special=False)
        return start

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer has before any."""
        return [*self._begin, *self.tokenizer.encode(text, special=False)]

    def _encode_pair(self, context: str, continuation: str) -> ContextPair:
        if not context:
            tokens = self.tokenizer.encode(continuation, special=False)
            return (
                (tokens[:1], tokens[1:]) if tokens[:1] == [self.start] else ([self.start], tokens)
            )
        # blanks at its end belong to the first token of what follows, in every known tokenizer
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        whole, before = self.encode(kept + continuation), self.encode(kept)
        return before or [self.start], whole[len(before) :]


_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _read_settings(settings: dict[str, Any], most: int) -> tuple[list[str], Draw, int]:
    """Texts that end a request's, how its tokens are drawn, and how many at most.

    Raises:
        ValueError: settings that would change its text and that there are not here.
    """
    left = dict(settings)
    until = left.pop("until", None) or []
    until = [until] if isinstance(until, str) else [text for text in until if text]
    counts = [count for count in (left.pop(name, None) for name in _COUNTS) if count is not None]
    temperature = float(left.pop("temperature", None) or 0.0)
    samples = left.pop("do_sample", None)
    filters = {"top_k": int(left.pop("top_k", None) or 0), "top_p": left.pop("top_p", None) or 1.0}
    wanted = f"until, do_sample, temperature, top_k, top_p, {', '.join(_COUNTS)}"
    fix = "leave it out of the task's generation_kwargs"
    raise_problems(
        "cannot generate like this",
        [Problem(name, repr(value), wanted, fix) for name, value in left.items()],
    )
    if samples is False or (samples is None and not temperature):
        return until, _GREEDY, int(next(iter(counts), most))
    return until, Draw(temperature or 1.0, **filters), int(next(iter(counts), most))


def _register(model: type) -> None:
    """Register a class as an ``LM`` of lm-evaluation-harness, if that is loaded."""
    harness = sys.modules.get("lm_eval.api.model")
    if harness is not None:
        harness.LM.register(model)


def _args(request: Any) -> tuple:
    return tuple(getattr(request, "args", request))
