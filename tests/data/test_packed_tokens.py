"""Best-fit packing: every token once, no document seen by another, few of them cut, any part."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functron import random
from functron.cli import main
from functron.data import (
    Blend,
    IndexedWriter,
    MockTokens,
    PackedTokens,
    TokenWindows,
    open_tokens,
    split,
    verify,
)
from functron.data.chat import IGNORED
from functron.data.mapped_files import TokenFile, last_not_after
from functron.data.packing import TOGETHER, best_fit, fill
from functron.data.sampling import shuffled_blocks
from functron.models import gpt
from functron.spmd.params import init_params
from functron.training import run_folder


class Row(TokenFile):
    """Documents in memory, with tokens that are all different."""

    path, dtype = "row", np.dtype(np.int64)

    def __init__(self, lengths):
        self._ends = np.cumsum([0, *lengths])

    @property
    def num_tokens(self):
        return int(self._ends[-1])

    @property
    def num_documents(self):
        return len(self._ends) - 1

    def read(self, start, length):
        assert 0 <= start <= start + length <= self.num_tokens
        return np.arange(start, start + length)

    def starts(self, documents):
        return self._ends[documents]

    def documents_of(self, offsets):
        return last_not_after(self.starts, self.num_documents, offsets)


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def epoch(packed, number=0) -> dict[str, np.ndarray]:
    first = number * packed.num_samples
    found = packed.draw(np.arange(first, first + packed.num_samples))
    return {name: leaf.numpy() for name, leaf in found.items()}


def check_epoch(packed, row) -> None:
    """Against the row of tokens, which are their own places in it; by definition, not by pieces."""
    seq, kept = packed.seq, packed.num_samples * packed.seq
    owners = row.documents_of(np.arange(row.num_tokens))
    batch = epoch(packed)
    assert sorted(batch["tokens"].ravel()) == list(range(kept))
    rows = zip(*(batch[x] for x in ("tokens", "targets", "positions", "segments")), strict=True)
    for tokens, targets, positions, segments in rows:
        for token, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            inside = token + 1 < row.num_tokens and owners[token + 1] == owners[token]
            assert target == (token + 1 if inside else IGNORED)
        # a segment is a run of one document's tokens, and two of them are of two documents
        steps = np.diff(segments)
        assert set(steps) <= {0, 1}
        assert (np.diff(tokens)[steps == 0] == 1).all()
        assert segments[0] == 0
        begins = np.flatnonzero(np.diff(segments, prepend=-1))
        assert len(set(owners[tokens[begins]])) == len(begins)
        assert (owners[tokens] == owners[tokens[begins]][segments]).all()
        assert (positions == np.arange(seq) - begins[segments]).all()


def windows_cuts(row, seq, samples) -> int:
    borders = np.arange(1, samples) * seq
    return int((~np.isin(borders, row.starts(np.arange(row.num_documents)))).sum())


def cuts(packed) -> int:
    """Places where a document goes on elsewhere, but for the end of the last sample."""
    found = [packed.pieces(i) for i in range(packed.num_samples)]
    end = packed.num_samples * packed.seq
    return sum(int((more & (begins + lengths < end)).sum()) for begins, lengths, more in found)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 24), st.integers(1, 9), st.integers(0, 2**31))
def test_an_epoch_has_every_token_once(lengths, seq, block, seed):
    row = Row(lengths)
    if row.num_tokens < seq:
        with pytest.raises(ValueError, match="data row: got"):
            PackedTokens(row, seq)
        return
    packed = PackedTokens(row, seq, seed=seed, block=block)
    assert packed.num_samples == row.num_tokens // seq
    check_epoch(packed, row)
    assert cuts(packed) <= windows_cuts(row, seq, packed.num_samples)
    for part in split(row, [1, row.num_documents]).values() if row.num_documents > 3 else ():
        if part.num_tokens >= seq:  # documents that begin within the row
            found = epoch(PackedTokens(part, seq, block=block))["tokens"]
            low = int(row.starts(np.array(part.documents.start)))
            assert sorted(found.ravel()) == list(range(low, low + found.size))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 12), st.integers(1, 6), st.integers(0, 100), st.data())
def test_batches_follow_from_the_step_alone(lengths, seq, block, seed, data):
    row = Row([*lengths, seq])
    packed = PackedTokens(row, seq, seed=seed, block=block)
    step, size = data.draw(st.integers(0, 50)), data.draw(st.sampled_from([1, 2, 4, 12]))
    whole = packed.batch(step, size)
    assert whole["rows"].tolist() == list(range(size))
    count = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0]))
    fresh = [PackedTokens(row, seq, seed=seed, block=block) for _ in range(count)]  # as if resumed
    parts = [x.batch(step, size, (index, count)) for index, x in enumerate(fresh)]
    for name, leaf in whole.items():
        assert leaf.dtype == torch.int64
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 99),
    st.integers(0, 3),
)
def test_the_order_has_every_sample_in_every_epoch(size, block, together, seed, number):
    places = np.arange(size * number, size * (number + 1))
    found = shuffled_blocks(places, size, block, together, seed)
    assert sorted(found.tolist()) == list(range(size))
    blocks = found // block
    # of few blocks at a time: each is done before those after the next ones begin
    turns = [
        set(blocks[i : i + block * together].tolist()) for i in range(0, size, block * together)
    ]
    assert all(len(turn) <= 2 * together for turn in turns)
    one = [int(shuffled_blocks(np.array([n]), size, block, together, seed)[0]) for n in places[:20]]
    assert one == found[:20].tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    row = Row(np.random.default_rng(0).integers(1, 30, 400))
    orders = [
        epoch(PackedTokens(row, 16, seed=seed, block=32), number)["tokens"][:, 0].tolist()
        for seed, number in itertools.product((0, 1), (0, 1))
    ]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    # groups of blocks are shuffled each in its own way
    inside = shuffled_blocks(np.arange(4 * 32), 4 * 32, 16, 2, 0) % 16
    assert (inside[:32] != inside[32:64]).any()
    # samples of an epoch are spread: neighbours are of the same block no more than by chance
    blocks = shuffled_blocks(np.arange(4096), 4096, 64, TOGETHER, 0) // 64
    assert np.mean(np.diff(blocks) == 0) < 2 / TOGETHER


def test_each_block_is_packed_once_in_an_epoch(monkeypatch):
    packed = PackedTokens(Row([7] * 400), 8, block=8)
    made, pack = [], packed._pack_block
    monkeypatch.setattr(packed, "_pack_block", lambda block: made.append(block) or pack(block))
    for step in range(packed.num_samples // 2):
        packed.batch(step, 2)
    assert sorted(made) == list(range(350 // 8 + 1))


@pytest.mark.parametrize(("mean", "spread", "share"), [
    (6.0, 1.0, 0.1), (5.0, 1.5, 0.1), (4.0, 0.2, 0.25), (6.6, 0.2, 0.5),
])  # fmt: skip
def test_few_documents_are_cut(mean, spread, share):
    seq = 1024
    lengths = np.random.default_rng(0).lognormal(mean, spread, 4000).astype(int) % 4000 + 1
    row = Row(lengths)
    packed = PackedTokens(row, seq)
    found = [packed.pieces(i) for i in range(packed.num_samples)]
    cut = np.concatenate([begins[more] for begins, _, more in found])
    short = lengths <= seq
    packed_cuts = short[np.unique(row.documents_of(cut))].sum()
    borders = np.arange(1, packed.num_samples) * seq
    inside = borders[~np.isin(borders, row.starts(np.arange(4000)))]
    windows = short[np.unique(row.documents_of(inside))].sum()
    assert windows > 200
    # of the last, two hardly ever fit into a sample
    assert packed_cuts < share * windows
    assert cuts(packed) < windows_cuts(row, seq, packed.num_samples)


def test_by_hand():
    # documents a to f of 5, 4, 4, 3, 2 and 6 tokens, in samples of 8: a + d, f + e, b + c
    filled = fill(np.array([0, 5, 9, 13, 16, 18]), 3, 8)
    samples = [
        list(zip(filled.begins[a:b].tolist(), filled.lengths[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(filled.first.tolist())
    ]
    assert sorted(samples) == [[(0, 5), (13, 3)], [(5, 4), (9, 4)], [(16, 2), (18, 6)]]
    # 6, 6 and 4 tokens: nothing is left whole but two of them, and the third fills both rooms
    filled = fill(np.array([0, 6, 12]), 2, 8)
    assert filled.lengths.tolist() == [6, 2, 6, 2]
    # the largest room is filled first: of 6, 5 and 5 tokens the last fits nowhere, and 3 go with 5
    filled = fill(np.array([0, 6, 11]), 2, 8)
    assert filled.begins.tolist() == [0, 14, 6, 11]
    # two in a row fill two samples without a cut, which best fit does not see: 5 + 3 + 3, 4 + 4 + 3
    filled = fill(np.array([0, 5, 8, 11, 15, 19]), 2, 11)
    assert (filled.begins.tolist(), filled.lengths.tolist()) == (
        [0, 5, 8, 11, 15, 19],
        [5, 3, 3, 4, 4, 3],
    )
    assert best_fit([3, 8, 5, 4, 4], 8) == [[1], [2, 0], [3, 4]]
    assert best_fit([], 8) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_best_fit_leaves_little_room(lengths, seq):
    samples = best_fit(lengths, seq)
    assert sorted(itertools.chain(*samples)) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in sample) for sample in samples]
    assert max(sums) <= seq
    # whatever opened a sample fitted into none before it
    for number, sample in enumerate(samples):
        opened = lengths[sample[0]]
        assert all(
            sum(lengths[i] for i in other if lengths[i] >= opened) + opened > seq
            for other in samples[:number]
        )


def test_what_cannot_be_packed():
    for arguments, message in [
        ((Row([3, 4]), 8), "data row: got 7 tokens; wanted at least seq=8; fix: use at most seq=7"),
        ((Row([0]), 8), "got 0 tokens; wanted at least seq=8; fix: more text"),
        ((Row([3]), 0), "seq: got 0; wanted at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            PackedTokens(*arguments)
    with pytest.raises(ValueError, match="block: got 0; wanted at least 1"):
        PackedTokens(Row([9]), 3, block=0)
    with pytest.raises(IndexError, match="sample 3: wanted 0 to 2"):
        PackedTokens(Row([9]), 3).pieces(3)


def test_ids_that_the_model_lacks_are_named():
    packed = PackedTokens(Row([5, 9, 10]), 8, vocab_size=20)
    message = "data row: got id 20 at token 20; wanted ids from 0 to 19; fix: choose a model"
    with pytest.raises(ValueError, match=message):
        packed.draw(np.arange(3))
    # also where it is a target alone: token 16 is the last of a sample
    packed = PackedTokens(Row([16, 16]), 16, vocab_size=16)
    with pytest.raises(ValueError, match="got id 16 at token 16"):
        packed.draw(np.arange(2))
    last = PackedTokens(Row([17]), 16, vocab_size=16)
    with pytest.raises(ValueError, match="got id 16 at token 16"):
        last.draw(np.arange(1))


def test_1e9_documents():
    tracemalloc.start()
    file = MockTokens(10**12, 50, document=1000)
    part = split(file, "969,30,1")["validation"]
    packed = PackedTokens(part, 64, vocab_size=50)
    assert packed.num_samples == 30_000_000_000 // 64
    blend = Blend([packed, PackedTokens(file, 64, seed=1)], [1, 3])
    whole = blend.batch(10**9, 8)
    parts = [blend.batch(10**9, 8, (index, 4)) for index in range(4)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(torch.equal(torch.cat([x[name] for x in parts]), whole[name]) for name in whole)
    assert most < 2**23


def test_documents_do_not_see_one_another():
    packed = PackedTokens(Row([9, 4, 30, 2, 6, 1, 8, 20]), 16)
    model = gpt.GPTConfig(
        vocab_size=80, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, max_seq=16,
        init_stddev=0.3, dtype="float64",
    )  # fmt: skip
    weights = init_params(random.key(0), gpt.defs(model))
    batch = packed.batch(0, packed.num_samples)
    assert batch["segments"].max() > 1
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets, segments in zip(
        *(batch[x] for x in ("tokens", "targets", "segments")), strict=True
    ):
        for number in segments.unique():
            mine = segments == number
            alone = {"tokens": tokens[mine][None], "targets": targets[mine][None]}
            total += gpt.loss(model, weights, alone)
    assert abs(gpt.loss(model, weights, batch) - total) <= 1e-10 * total


# --- in training


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder, drawn = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for size in drawn.integers(1, 40, 60):
                writer.add(drawn.integers(0, 200, size))
    return str(folder / "a"), str(folder / "b")


def train(out, *options) -> int:
    run = ["train", "--seq", "16", "--global-batch", "4", "--out", str(out)]
    small = ["--gpt.num-layers", "2", "--gpt.embed-dim", "32", "--gpt.num-heads", "4"]
    return main.main([*run, *small, "--pack", "best-fit", *options])


def losses(out) -> list[float]:
    records = run_folder.records(out)
    held_out = records[-1]["eval"]["validation/a"]["loss"]
    return [*(record["loss"] for record in records), held_out]


@pytest.fixture(scope="module")
def one(prefixes, tmp_path_factory):
    """How to train on a blend of packed parts, and the losses of one rank."""
    data = ("--data", f"0.75 {prefixes[0]} 0.25 {prefixes[1]}", "--split", "90,10")
    options = (*data, "--eval-every", "3", "--steps", "3")
    out = tmp_path_factory.mktemp("runs") / "one"
    assert train(out, *options) == 0
    return options, losses(out)


@pytest.mark.parametrize("mesh", [
    ("dp=2,cp=2",), ("dp=2,tp=2", "--sequence-parallel"), ("pp=2", "--microbatches", "2"),
], ids=lambda x: x[0])  # fmt: skip
def test_training_is_the_same_on_every_mesh(one, tmp_path, mesh):
    options, wanted = one
    assert train(tmp_path / "run", *options, "--mesh", *mesh) == 0
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)


def test_a_run_goes_on_and_remembers_how_it_packs(one, tmp_path, capsys):
    options, wanted = one
    # the schedule of rates is that of all steps
    first = (*options[:-1], "2", "--learning-rate.total-steps", "3")
    assert train(tmp_path / "run", *first) == 0
    more = ["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "3"]
    assert main.main([*more, "--pack", ""]) == 2
    assert "pack: got ''; wanted 'best-fit', as in the run" in capsys.readouterr().err
    assert main.main(more) == 0
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-6)


def test_what_does_not_go_with_packing(prefixes, tmp_path, capsys):
    fill_in = ("--fim-rate", "0.5", "--fim-tokens", "250,251,252")
    assert train(tmp_path / "x", "--data", prefixes[0], *fill_in) == 2
    said = "fim_rate: got 0.5 with pack=best-fit; wanted documents as long as they were packed"
    assert said in capsys.readouterr().err
    assert train(tmp_path / "x") == 2
    said = (
        "pack: got 'best-fit', which has no effect; wanted tokens on disk, or conversations; fix: "
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("pointer", [0, 2 * 399, 2 * 204, -16, 1 << 40])
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_index_is_told(tmp_path, packed, pointer):
    with IndexedWriter(tmp_path / "text", np.uint16) as writer:
        for _ in range(40):
            writer.add(np.arange(10))
    index = tmp_path / "text.idx"
    table = bytearray(index.read_bytes())
    at = 34 + 4 * 40 + 8 * 20  # the pointer of document 20, after lengths of 4 bytes
    assert int.from_bytes(table[at : at + 8], "little") == 2 * 200
    table[at : at + 8] = pointer.to_bytes(8, "little", signed=True)
    index.write_bytes(table)
    file = open_tokens(tmp_path / "text")
    samples = PackedTokens(file, 16) if packed else TokenWindows(file, 16, mask_documents=True)
    with pytest.raises(ValueError, match=r"damaged index") as caught:
        samples.draw(np.arange(samples.num_samples))
    assert f"{tmp_path / 'text'}" in str(caught.value)
    with pytest.raises(ValueError, match=f"offset {at}: got pointer {pointer} of sequence 20"):
        verify(file)
