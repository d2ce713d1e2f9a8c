"""The data of a run: text, tokens on disk, conversations or random tokens, as samples of a model.

The objective of a family says what its model learns from text (`functron.models.family.Objective`).
`prefetch` makes batches in a background thread, a few steps ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from functron.core.errors import Problem, raise_problems, refuse
from functron.core.settings import Need, Needs, names_with_tag, unused_problems, value_at
from functron.data import (
    Blend,
    Chat,
    FillInTheMiddle,
    MockTokens,
    PackedChat,
    PackedTokens,
    Samples,
    TextWindows,
    Tokenizer,
    TokenWindows,
    open_tokens,
    split,
)
from functron.data.blend import ALL, PARTS, DocumentRange, parse_blend
from functron.data.chat import Conversations, chat_files
from functron.data.indexed import IndexedFile
from functron.data.mapped_files import TextTokenizer, TokenFile, find
from functron.data.sampling import ARITHMETIC, SampleMaker, SampleOrder
from functron.data.shards import is_tokens, provenance, read_provenance, rules_of
from functron.data.token_datasets import Documents, StoredTokens, Texts, check_vocabulary
from functron.data.tokenizer import BYTES, ByteTokenizer, open_tokenizer
from functron.models.family import Objective
from functron.spmd import Mesh
from functron.training import run_folder
from functron.training.config import TrainConfig, configure

_MOCK_TOKENS = 1 << 50
_ANY_LENGTH = 1 << 40


def objective_of(config: TrainConfig) -> Objective:
    """The objective of the model of a run."""
    found = config.family.objective
    assert found is not None, config.family
    return found


def target_length(config: TrainConfig) -> int:
    """The number of targets of a sample: `seq`, or the length of the decoder's output for it."""
    count = objective_of(config).count_targets
    return config.data.seq if count is None else count(config)


def flops_per_token(config: TrainConfig) -> int:
    """Model FLOPs of a step per token of `seq`, forward and backward."""
    count = objective_of(config).count_targets
    sizes = (config.data.seq,) if count is None else (config.data.seq, count(config))
    return config.family.flops_per_token(config.architecture, *sizes)


def useless_of(config: TrainConfig) -> tuple[str, ...]:
    """The settings of the data that the objective of this model does not read."""
    read, names = objective_of(config).settings, names_with_tag(TrainConfig, "objective")
    return tuple(name for name in names if name not in read)


def objective_problems(config: TrainConfig, mesh: Mesh | None) -> Iterator[Problem]:
    """Settings that do not fit the objective; no file is read."""
    family, default, objective = config.family, TrainConfig(), objective_of(config)
    for name in useless_of(config):
        if (value := value_at(config, name)) != value_at(default, name):
            yield Problem(name, str(value), f"nothing with {family.title}", "leave it out")
    if config.data.fim_rate and not objective.predicts_next:
        got, fix = f"{config.data.fim_rate} with {family.title}", "leave it out"
        yield Problem("fim_rate", got, "a model that predicts the next token", fix)
    if config.parallelism.microbatches > 1 and objective.compares_rows(config):
        wanted = "1: each would compare its own samples alone, not all of a batch"
        got, fix = str(config.parallelism.microbatches), "leave it out, and add --mesh dp=N"
        yield Problem("microbatches", got, wanted, fix)
    yield from objective.find_problems(config, mesh)


def is_chat(config: TrainConfig) -> bool:
    """Whether `data` is read as conversations: by `format`, or by the ending ``.jsonl``."""
    return config.data.format == "chat" or (
        config.data.format == "auto" and config.data.path.endswith(".jsonl")
    )


def is_on_disk(config: TrainConfig) -> bool:
    """Whether `data` is tokens on disk, by `format` or by the names of files; blends always are.

    Raises:
        ValueError: it is a blend with a syntax error.
    """
    if config.data.format != "auto":
        return config.data.format in ("tokens", "mock")
    if not config.data.path or is_chat(config):
        return False
    return _is_one(config.data.path) or parse_blend(config.data.path) is not None


_ORDERED = Need(
    lambda c: c.data.order != ARITHMETIC, "the order of an application", "name one: order=NAME"
)
_TOKENS = Need(is_on_disk, "tokens on disk", "make them with functron preprocess")

DATA_NEEDS: Needs = MappingProxyType({
    **dict.fromkeys(("order_samples", "order_cache", "blend_surplus"), _ORDERED),
    **dict.fromkeys(("split", "extra_token", "mask_documents", "fim_rate"), _TOKENS),
    "pack": Need(
        lambda c: is_on_disk(c) or is_chat(c), "tokens on disk, or conversations", _TOKENS.fix
    ),
})  # fmt: skip
"""Conditions for settings of the data to have an effect."""


def sources_of(config: TrainConfig) -> list[str]:
    """The files of tokens that `data` names: several of a blend.

    Raises:
        ValueError: it is a blend with a syntax error.
    """
    blend = _blend_of(config)
    return [config.data.path] if blend is None else [path for _, path in blend]


def _blend_of(config: TrainConfig) -> list[tuple[str, str]] | None:
    return None if _is_one(config.data.path) else parse_blend(config.data.path)


def _is_one(data: str) -> bool:
    """Whether `data` is the path of one file or folder of tokens, rather than a blend."""
    try:
        return is_tokens(data)
    except OSError:  # longer than names of files can be
        return False


def tokenizer_of(config: TrainConfig) -> TextTokenizer | None:
    """The run's tokenizer; None: text is read as bytes, or the tokenizer of the tokens is unknown.

    Raises:
        ValueError: it cannot be read.
    """
    path = run_folder.tokenizer_path(config)
    if path is None and config.data.tokenizer == BYTES and is_on_disk(config):
        path = BYTES
    how = {"pattern": config.data.tokenizer_pattern, "rules": config.data.rules}
    return None if path is None else open_tokenizer(path, **how)


def with_tokenizer(config: TrainConfig, given: Collection[str] = ()) -> TrainConfig:
    """`config` with the tokenizer and the text rules by which its tokens on disk were made.

    A tokenizer that it names, or that its run folder has, stays. It is unchanged where the tokens
    have no record of their tokenizer, or the tokenizer's file has changed since.

    Args:
        config: of the run.
        given: the fields that the user set; rules that differ from the defaults count as set.

    Raises:
        ValueError: `data` is a blend with a syntax error, or of several tokenizers or rules; or
            the tokens were made by other rules than were set.
    """
    if not config.data.path or not is_on_disk(config) or config.data.format == "mock":
        return config
    config = _with_rules(config, given)
    if config.data.tokenizer or run_folder.tokenizer_path(config) is not None:
        return config
    made = provenance(sources_of(config))
    if made is None or not made.is_there:
        return config
    pattern = config.data.tokenizer_pattern or made.pattern
    return configure(config, tokenizer=made.tokenizer, tokenizer_pattern=pattern)


def _with_rules(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """`config` with the recorded text rules of its tokens on disk, if there are any."""
    found = rules_of(sources_of(config))
    if found is None or config.data.text_rules != found.version:
        return config
    default, fix = TrainConfig(), "leave it out, or preprocess again"
    raise_problems("tokens of other rules", [
        Problem(name, repr(value), f"{made!r}, by which {config.data.path} was made", fix)
        for name in ("special_tokens", "prepend_bos")
        if (value := value_at(config, name)) != (made := getattr(found, name))
        and (name in given or value != value_at(default, name))
    ])  # fmt: skip
    own = {"special_tokens": found.special_tokens, "prepend_bos": found.prepend_bos}
    return configure(config, **own)


def describe_rules(config: TrainConfig, tokenizer: TextTokenizer | None) -> str:
    """The rules that make tokens of a run's text and prompts, in words; empty for random tokens.

    Args:
        config: the run.
        tokenizer: as `reader_of` returns it.
    """
    if config.data.format == "mock":
        return ""
    rules, on_disk = config.data.rules, is_on_disk(config)
    if not on_disk and (tokenizer is None or isinstance(tokenizer, ByteTokenizer)):
        return rules.describe(None, None)
    if not on_disk and tokenizer is not None:
        own = rules.describe(tokenizer, tokenizer.end_of_text)
        return f"{own} (text-rules 1, by which this run began)" if rules.version == 1 else own
    recorded = [read_provenance(path) for path in sources_of(config)]
    made = recorded[0] if len({one and (one.rules, one.end) for one in recorded}) == 1 else None
    if made is not None and tokenizer is not None:
        own = made.rules.describe(tokenizer, made.end)
        if made.rules.version == 1:
            return f"{own}; made before rules were recorded: a tokenizer.json parsed special tokens"
        return f"{own}; {made.rules.describe_names(sum(one.names for one in recorded if one))}"
    by = "by several rules" if any(recorded) else "by rules that they do not record"
    prompts = "" if tokenizer is None else f"; {rules.describe_prompts(tokenizer)}"
    return f"documents: as they were made, {by}{prompts}"


def reader_of(config: TrainConfig) -> TextTokenizer | None:
    """The run's tokenizer, or that of bytes; None: tokens on disk of an unknown tokenizer.

    Raises:
        ValueError: it cannot be read.
    """
    found = tokenizer_of(config)
    return found if found is not None or is_on_disk(config) else ByteTokenizer()


Reader = Callable[[TrainConfig], TextTokenizer | None]
"""Opens the tokenizer of a run: `reader_of`, or a function that returns an open one."""


def open_samples(
    config: TrainConfig, part: str = PARTS[0], *, reader: Reader = reader_of
) -> Samples:
    """The samples that the run draws its batches from; text with a tokenizer is read whole.

    Args:
        config: the run.
        part: of the tokens that `split` divides: train, validation or test.
        reader: opens the tokenizer.

    Raises:
        ValueError: the data cannot be read, does not fit the model, or has no such part.
    """
    raise_problems("cannot train on this", problems_of(config))
    seed, tokenizer = config.seed, reader(config)
    learnt = objective_of(config).plan_samples(config, tokenizer)
    if learnt.open is not None:
        return learnt.open(part)
    if is_on_disk(config):
        return _token_samples(config, learnt, part)
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return learnt.over(TextWindows(config.data.path or None, learnt.length, seed=seed), seed)
    settings = {"seed": seed, "vocab_size": learnt.vocab_size}
    if is_chat(config):
        written, overlong = _with_template(tokenizer), config.data.overlong
        chat = Chat(config.data.path, written, config.data.seq, overlong=overlong, **settings)
        return PackedChat(chat) if config.data.pack else chat
    text = TextWindows(config.data.path or None, learnt.length, tokenizer, **settings)
    return learnt.over(text, seed)


def open_texts(config: TrainConfig, part: str = PARTS[0], *, reader: Reader = reader_of) -> Texts:
    """The data of `open_samples` as texts to be scored: see `functron.data.token_datasets`.

    A file of text is one text, and so is a conversation. Tokens on disk are one text, or one per
    document where the run separates documents (`mask_documents`, `pack`). Nothing is cut off.

    Args:
        config: the run, on one source of data.
        part: of the tokens that `split` divides: train, validation or test.
        reader: opens the tokenizer.

    Raises:
        ValueError: the data cannot be read, does not fit the model, or has no such part.
    """
    raise_problems("cannot evaluate on this", problems_of(config))
    size = config.architecture.vocab_size
    if config.data.format == "mock":
        mock = MockTokens(_MOCK_TOKENS, size, seed=config.seed)
        return StoredTokens(_part_of(config, mock, part), size)
    if is_on_disk(config):
        file = _part_of(config, open_tokens(config.data.path), part)
        return StoredTokens(file, size, by_document=config.data.packed)
    tokenizer = reader(config)
    if isinstance(tokenizer, ByteTokenizer):
        return Documents(config.data.path, None, size)
    if tokenizer is not None and is_chat(config):
        written = _with_template(tokenizer)
        return Conversations(Chat(config.data.path, written, _ANY_LENGTH, vocab_size=size))
    return Documents(config.data.path, tokenizer, size)


def _token_samples(
    config: TrainConfig, learnt: SampleMaker, part: str, *, build: bool = True
) -> Samples:
    """Samples of tokens on disk or of a blend; `build`: also make the tables of their order."""
    if (order := config.data.sample_order) is not None:
        return _ordered_samples(config, order, part, build)
    if config.data.format == "mock":
        file = MockTokens(_MOCK_TOKENS, learnt.vocab_size, seed=config.seed)
        return _samples(config, learnt, file, part)
    blend = _blend_of(config)
    if blend is None:
        return _samples(config, learnt, open_tokens(config.data.path), part)
    weights, paths = zip(*blend, strict=True)
    sources: list[Any] = [
        _samples(config, learnt, open_tokens(x), part, index) for index, x in enumerate(paths)
    ]
    given = None if weights[0] == ALL else weights
    return Blend(sources, given, paths, config.data.blend_order)


def _ordered_samples(config: TrainConfig, order: SampleOrder, part: str, build: bool) -> Samples:
    """Samples of tokens on disk in the order of an application.

    Raises:
        ValueError: files are not indexed, or the order has fewer samples than the run takes.
    """
    blend = _blend_of(config) or [(ALL, config.data.path)]
    weights = None if blend[0][0] == ALL else [float(weight) for weight, _ in blend]
    made = order.draw(
        [_open_indexed(config, path) for _, path in blend],
        config.data.seq,
        config.ordered_samples if part == PARTS[0] else None,
        weights=weights,
        names=[path for _, path in blend],
        split=config.data.split,
        part=part,
        surplus=config.data.blend_surplus,
        cache=Path(config.data.order_cache) if config.data.order_cache else None,
        build=build,
        seed=config.seed,
        vocab_size=config.architecture.vocab_size,
        extra_token=config.data.extra_token,
        mask_documents=config.data.mask_documents,
    )
    if part == PARTS[0]:
        last = config.data.batches.first_sample(config.steps) - 1
        needed = int(config.gaps.number(last)) + 1
        if needed > (count := order.count(made)):
            fix = "take fewer steps" + ("; or give weights in place of all" if blend[1:] else "")
            wanted = f"at most {count}, which the order has"
            got = f"{config.steps}, up to sample {needed}"
            refuse("the order has no more samples", "steps", got, wanted, fix)
    return made


def _open_indexed(config: TrainConfig, path: str) -> IndexedFile:
    file = open_tokens(path)
    if not isinstance(file, IndexedFile):
        fix = "write them again: functron preprocess --format indexed; or leave --order out"
        got = f"shards with order={config.data.order}"
        refuse("cannot order samples so", f"data {path}", got, "its .bin and .idx", fix)
    return file


def _samples(
    config: TrainConfig, learnt: SampleMaker, file: TokenFile, part: str, index: int = 0
) -> Samples:
    """Samples of a part of one file, the blend's source `index`."""
    path = file.path  # its record says how documents begin; a part has no record
    file = _part_of(config, file, part)
    seed = config.seed + (index << 32)  # sources of equal size get different orders
    if config.data.pack:
        return PackedTokens(file, config.data.seq, seed=seed, vocab_size=learnt.vocab_size)
    windows = TokenWindows(
        file,
        learnt.length,
        seed=seed,
        vocab_size=learnt.vocab_size,
        mask_documents=config.data.mask_documents,
        middle=_middle(config, path),
        extra_token=config.data.extra_token,
    )
    return learnt.over(windows, seed)


def _part_of(config: TrainConfig, file: TokenFile, part: str) -> TokenFile:
    """The documents of a file that are `part` of `split`; all of them without `split`."""
    if not config.data.split:
        return file
    if (order := config.data.sample_order) is not None:
        return _divide_by(order, config, _open_indexed(config, config.data.path), part)
    parts = split(file, config.data.split)
    if part not in parts:
        _refuse_empty(config, part, f"give it a weight in --split, such as {config.data.split},1")
    return parts[part]


def _refuse_empty(config: TrainConfig, part: str, fix: str) -> NoReturn:
    got = f"{config.data.split}: nothing for {part}"
    refuse("cannot split", "split", got, "a part of it", fix)


def _divide_by(order: SampleOrder, config: TrainConfig, file: IndexedFile, part: str) -> TokenFile:
    """The documents of a file that are `part` of `split`, as the order divides them."""
    found = order.divide(config.data.split, file.num_sequences).get(part)
    if file.num_sequences != file.num_documents:
        fix = "give the texts a file of their own: --eval-data NAME=PREFIX"
        got = f"{config.data.split} of documents of several sequences, which this order divides"
        refuse("cannot split", "split", got, "documents that are whole", fix)
    if not found:
        _refuse_empty(config, part, f"give it a larger weight in --split than {config.data.split}")
    return DocumentRange(file, found, part)


def _middle(config: TrainConfig, path: Path) -> FillInTheMiddle | None:
    if not config.data.fim_rate:
        return None
    try:
        ids = [int(word) for word in config.data.fim_tokens.split(",")]
    except ValueError:
        ids = []
    if len(ids) not in (3, 4):
        fix = "name them: --fim-tokens PREFIX,MIDDLE,SUFFIX or PREFIX,MIDDLE,SUFFIX,END"
        got = repr(config.data.fim_tokens)
        refuse("cannot fill in the middle", "fim_tokens", got, "three or four ids", fix)
    prefix, middle, suffix, *end = ids
    made = read_provenance(path)
    return FillInTheMiddle(
        prefix,
        middle,
        suffix,
        config.data.fim_rate,
        config.data.fim_spm_rate,
        end[0] if end else None,
        seed=config.seed,
        begin=() if made is None else made.begin,
    )


def problems_of(config: TrainConfig) -> Iterator[Problem]:
    """Settings of data, tokenizer and model that do not fit together; no data is read.

    Raises:
        ValueError: the run folder's configuration cannot be read.
    """
    path = run_folder.tokenizer_path(config)
    yield from unused_problems(config, DATA_NEEDS)
    if is_on_disk(config) and config.data.pack and config.data.fim_rate:
        fix = "leave it out, or --mask-documents in place of --pack"
        wanted = "documents as long as they were packed"
        yield Problem(
            "fim_rate", f"{config.data.fim_rate} with pack={config.data.pack}", wanted, fix
        )
    yield from _order_problems(config)
    yield from _rule_problems(config, path)
    if not config.data.extra_token and is_on_disk(config):
        others = {"pack": config.data.pack, "fim_rate": config.data.fim_rate}
        others |= {"a model that restores tokens": not objective_of(config).predicts_next}
        for name in filter(others.get, others):
            yield Problem("extra_token", f"False with {name}", "True", "leave one of them out")
    if config.data.format == "mock":
        if config.data.path:
            fix = "leave out --data or --format mock"
            yield Problem("data", repr(config.data.path), "nothing with random tokens", fix)
    elif is_on_disk(config):
        if not config.data.path:
            fix = "add --data PREFIX, of functron preprocess"
            yield Problem("data", "nothing", "tokens on disk", fix)
    elif is_chat(config):
        if not config.data.path:
            yield Problem("data", "nothing", "a JSONL file of conversations", "add --data FILE")
        if path is None:
            got = f"{config.data.tokenizer or 'none'} for conversations"
            fix = "name the model's: --tokenizer FOLDER; to train on the file as it is: "
            fix += "--format text"
            yield Problem("tokenizer", got, "a folder with tokenizer.json and a template", fix)
    elif path is None and config.architecture.vocab_size < ByteTokenizer.num_ordinary:
        got = f"{config.architecture.vocab_size} token ids"
        wanted = f"at least {ByteTokenizer.num_ordinary}: the text is read as bytes"
        yield Problem(
            f"{config.family.name}.vocab_size", got, wanted, "set it to 256 or choose a model"
        )


def _rule_problems(config: TrainConfig, tokenizer: Path | None) -> Iterator[Problem]:
    """Settings of text rules that have no effect."""
    default, fix = TrainConfig(), "leave it out"
    bare = config.data.format == "mock" or (tokenizer is None and not is_on_disk(config))
    for name in ("special_tokens", "prepend_bos"):
        if (value := value_at(config, name)) == value_at(default, name):
            continue
        if bare:
            yield Problem(name, str(value), "nothing without a tokenizer", fix)
        elif config.data.text_rules == 1:
            yield Problem(name, str(value), "nothing with text_rules=1", fix)


def _order_problems(config: TrainConfig) -> Iterator[Problem]:
    """Settings that cannot be combined with the order of samples."""
    order, name_of_order = config.data.sample_order, config.data.order
    if order is None:
        return
    wanted, fix = "Megatron-LM's .bin and .idx", "name their prefix: --data PREFIX, or leave it out"
    if not is_on_disk(config) or config.data.format == "mock" or not config.data.path:
        got = "mock" if config.data.format == "mock" else repr(config.data.path)
        yield Problem("order", f"{name_of_order} with data={got}", wanted, fix)
    wanted, fix = "documents as they follow one another", "leave one of them out"
    for name in ("pack", "fim_rate"):
        if value := value_at(config, name):
            yield Problem("order", f"{name_of_order} with {name}={value}", wanted, fix)
    if not objective_of(config).predicts_next:
        got = f"{name_of_order} with {config.family.title}"
        wanted, fix = "a model that predicts the next token", "leave it out"
        yield Problem("order", got, wanted, fix)
    if config.data.order_samples < 0:
        yield Problem("order_samples", str(config.data.order_samples), "at least 0", "leave it out")
    if not 0 <= config.data.blend_surplus < 100:
        yield Problem(
            "blend_surplus", str(config.data.blend_surplus), "at least 0", "such as 0.005"
        )
    if not 0 <= config.seed < order.num_seeds:
        most = f"2^{order.num_seeds.bit_length() - 1} - 1"
        wanted = f"0 to {most} with order={name_of_order}"
        yield Problem("seed", str(config.seed), wanted, "such as 1234")


def check(config: TrainConfig, part: str = PARTS[0], *, reader: Reader = reader_of) -> None:
    """Check the data as far as is cheap, such as that its files exist.

    Args:
        config: the run.
        part: of the tokens that `split` divides.
        reader: opens the tokenizer.

    Raises:
        ValueError: the data is not there, or does not fit the model.
    """
    plan = objective_of(config).plan_samples
    if is_on_disk(config):
        if config.data.path or config.data.format == "mock":
            _token_samples(config, plan(config, reader(config)), part, build=False)
    elif is_chat(config):
        if config.data.path:
            chat_files(config.data.path)
    elif run_folder.tokenizer_path(config) is None:
        TextWindows(config.data.path or None, plan(config, reader(config)).length)
    elif config.data.path:
        find(config.data.path)


def check_tokenizer(config: TrainConfig, tokenizer: TextTokenizer | None) -> None:
    """Check that a tokenizer fits the model, and has a chat template where one is needed.

    Raises:
        ValueError: it does not.
    """
    objective_of(config).plan_samples(config, tokenizer)
    if tokenizer is None or (isinstance(tokenizer, ByteTokenizer) and not is_on_disk(config)):
        return
    # tokens that were added, as for images, may lie beyond the vocabulary of a text model
    needed = min(tokenizer.num_ordinary, tokenizer.vocab_size)
    check_vocabulary(needed, config.architecture.vocab_size)
    if is_chat(config):
        _with_template(tokenizer).require_template()


def _with_template(tokenizer: TextTokenizer) -> Tokenizer:
    """The tokenizer, which must be of the kind that has chat templates.

    Raises:
        ValueError: it is of another kind.
    """
    if not isinstance(tokenizer, Tokenizer):
        got = f"{tokenizer.file}, which has no template of conversations"
        fix = "name a folder with tokenizer.json and a template; transformers' save_pretrained "
        fix += "writes one"
        wanted = "one that writes conversations"
        refuse("cannot read conversations", "tokenizer", got, wanted, fix)
    return tokenizer


T = TypeVar("T")


@contextmanager
def prefetch(
    batch: Callable[[int], T], start: int, stop: int, depth: int = 2
) -> Iterator[Callable[[int], T]]:
    """`batch`, with the values of steps `start` to ``stop - 1`` made ahead by a background thread.

    A batch is a pure function of its step, so no value changes; any other step is made when it is
    asked for. The thread ends with the block, after the batch that it is making.

    Args:
        batch: makes the batch of a step; the thread calls it in the order of the steps.
        start: the first step.
        stop: one more than the last.
        depth: how many finished batches may wait; 0: no thread, `batch` itself is yielded.

    Yields:
        A function of the step. An exception of `batch` is raised for the step that it belongs to.
    """
    if depth < 1 or stop <= start:
        yield batch
        return
    with ThreadPoolExecutor(1, "prefetch") as pool:
        steps = iter(range(start, stop))
        made = deque((step, pool.submit(batch, step)) for step in islice(steps, depth + 1))

        def take(step: int) -> T:
            if not made or made[0][0] != step:
                return batch(step)
            _, found = made.popleft()
            made.extend((later, pool.submit(batch, later)) for later in islice(steps, 1))
            return found.result()

        try:
            yield take
        finally:
            made.clear()
            pool.shutdown(cancel_futures=True)
