"""Scoring: the likelihood of given texts, as evaluation harnesses ask for it.

`log_likelihoods` and `rolling_log_likelihoods` work on tokens and any mesh that `generate` works
on. `LanguageModel` is an ``LM`` of lm-evaluation-harness, on text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from functron.core import tree
from functron.core.errors import Problem, raise_problems, refuse
from functron.models import gpt
from functron.models.generation import generate, placed
from functron.models.options import ModelOptions
from functron.spmd import DATA_AXES, Mesh, P, shard_map
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


@torch.no_grad()
def log_likelihoods(
    params: tree.Tree,
    config: gpt.GPTConfig,
    requests: Sequence[ContextPair],
    *,
    batch_size: int = 8,
    mesh: Mesh | None = None,
    options: ModelOptions | None = None,
) -> list[TextScore]:
    """log p(continuation | context) of each request, and whether greedy decoding gives it.

    The first tokens of a request longer than ``max_seq + 1`` are left out, as harnesses do.
    Requests of similar length share a batch, which is padded at the end: causal attention does not
    see it.

    Args:
        params: the parameters of `gpt.defs(config)`, as `mesh` splits them.
        requests: an empty continuation has likelihood 1.
        batch_size: how many are scored together; on a mesh a multiple of its data ranks.
        mesh: simulated; None: one rank.
        options: gather, expert_axes, kernels and hooks; as in `generate`.

    Raises:
        ValueError: an empty context, a token outside the vocabulary, or a continuation that is
            longer than `max_seq`.
    """
    raise_problems("cannot score this", _problems(config, requests))
    mesh = Mesh() if mesh is None else mesh
    device = tree.leaves(params)[0].device
    score = _scorer(config, mesh, options)
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


def _scorer(config: gpt.GPTConfig, mesh: Mesh, options: ModelOptions | None) -> Callable:
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
    return shard_map(score, mesh, (specs, rows, rows), (rows, rows))


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
    """The methods of a tokenizer that `LanguageModel` calls, as `functron.data.Tokenizer` has."""

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
    of the harness's ``LM``. It is one process, and has no chat template.

    A request is anything with ``args``, or that tuple itself: ``(context, continuation)``,
    ``(text,)``, or ``(context, {"until": [...], "max_gen_toks": N})``.

    Attributes:
        params: of `gpt.defs(config)`.
        config: the architecture.
        batch_size: requests that are scored together.
        max_new_tokens: for requests to generate without a number.
    """

    params: tree.Tree
    config: gpt.GPTConfig
    tokenizer: ScoredText
    batch_size: int = 8
    max_new_tokens: int = 256

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Its class, which the harness asks for before it asks whether that is an ``LM``."""
        _register(type(self))
        return type(self)

    @property
    def rank(self) -> int:
        """The number of this process, of one."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes share the requests."""
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
        pairs = [self._pair(*_args(request)) for request in requests]
        scores = log_likelihoods(self.params, self.config, pairs, batch_size=self.batch_size)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of each ``(text,)``."""
        texts = [self.tokenizer.encode(_args(request)[0], special=False) for request in requests]
        return rolling_log_likelihoods(
            self.params, self.config, texts, self._start(), batch_size=self.batch_size
        )

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy continuation of each ``(context, settings)``, up to one of its "until"."""
        return [self._generate_text(*_args(request)) for request in requests]

    def _generate_text(self, context: str, settings: Mapping[str, Any]) -> str:
        until = settings.get("until", ())
        until = [until] if isinstance(until, str) else [text for text in until if text]
        count = min(settings.get("max_gen_toks", self.max_new_tokens), self.config.max_seq - 1)
        prompt = self.tokenizer.encode(context, special=False) or [self._start()]
        prompt = prompt[-(self.config.max_seq - count) :]
        end = self.tokenizer.end_of_text
        tokens = generate(
            self.params,
            self.config,
            torch.tensor([prompt], device=self.device),
            count,
            temperature=0,
            stop=() if end is None else (end,),
        )[0, len(prompt) :].tolist()
        tokens = tokens[: tokens.index(end)] if end in tokens else tokens
        said = self.tokenizer.decode(tokens)
        ends = [said.index(text) for text in until if text in said]
        return said[: min(ends)] if ends else said

    def _start(self) -> int:
        end = self.tokenizer.end_of_text
        if end is None:
            fix = "name it in tokenizer_config.json: eos_token"
            got, wanted = "no end-of-text token", "one to begin texts with"
            refuse("cannot score texts", "tokenizer", got, wanted, fix)
        return end

    def _pair(self, context: str, continuation: str) -> ContextPair:
        # blanks at its end belong to the first token of what follows, in every known tokenizer
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        whole = self.tokenizer.encode(kept + continuation, special=False)
        before = self.tokenizer.encode(kept, special=False)
        return before or [self._start()], whole[len(before) :]


def _register(model: type) -> None:
    """Register a class as an ``LM`` of lm-evaluation-harness, if that is loaded."""
    harness = sys.modules.get("lm_eval.api.model")
    if harness is not None:
        harness.LM.register(model)


def _args(request: Any) -> tuple:
    return tuple(getattr(request, "args", request))
