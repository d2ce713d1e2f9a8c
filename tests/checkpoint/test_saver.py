"""Saving in the background: what is copied when, what goes wrong when, and what stays."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

from functron import Mesh, P, checkpoint
from functron.checkpoint import folder as folders
from functron.checkpoint import memory
from functron.checkpoint import saver as together
from functron.checkpoint.database import Window
from functron.checkpoint.folder import Keep
from functron.checkpoint.placement import Division
from functron.checkpoint.saver import Snapshot
from tests.streams import RecordedStreams


def saver(path: Path, **settings) -> checkpoint.Saver:
    return checkpoint.Saver(path, checkpoint.Placement.of({"x": torch.ones(1000)}), **settings)


@pytest.fixture
def held_up(monkeypatch):
    """Saves that begin, but write nothing before the event is set."""
    event, real = threading.Event(), together.save_together

    def late(*arguments):
        assert event.wait(30)
        real(*arguments)

    monkeypatch.setattr(together, "save_together", late)
    return event


def test_the_disk_takes_files_of_values_while_later_ones_are_written(tmp_path, monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(folders, "_drop_pages", lambda path: given.append(path.name))
    with folders.WriteBehind(tmp_path / "d") as behind:
        for name, size in (("a", 2 << 20), ("manifest", 10), ("b", 2 << 20), ("c", 2 << 20)):
            (tmp_path / "d").mkdir(exist_ok=True)
            (tmp_path / "d" / name).write_bytes(bytes(size))
            behind.go_on()
            behind._thread.submit(int).result()
    assert given == ["a", "b", "c", "a"]


def test_the_state_may_change_while_it_is_written(tmp_path, held_up):
    with saver(tmp_path) as one:
        x = torch.full((1000,), 7.0)
        one.save(1, {"x": x}, {"loss": 0.5})
        x.zero_()
        assert checkpoint.steps(tmp_path) == []
        held_up.set()
        one.wait()
        assert checkpoint.restore(tmp_path / "1")["x"].eq(7).all()
        assert checkpoint.metadata(tmp_path / "1") == {"loss": 0.5}


def test_one_save_at_a_time(tmp_path, held_up):
    with saver(tmp_path) as one:
        one.save(1, {"x": torch.ones(1000)})
        timer = threading.Timer(0.2, held_up.set)
        timer.start()
        one.save(2, {"x": torch.ones(1000)})  # waits for the first
        assert checkpoint.steps(tmp_path)[0] == 1
    assert checkpoint.steps(tmp_path) == [1, 2]  # and the end of the block for the second


def test_a_signal_that_another_thread_receives_is_handled_while_a_save_is_waited_for(
    tmp_path, held_up
):
    """As a rank must, that waits for the part of a dead one and is told to end."""
    before = signal.signal(signal.SIGTERM, lambda *_: held_up.set())
    try:
        with saver(tmp_path) as one:
            one.save(1, {"x": torch.ones(1000)})
            tell = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            timer = threading.Timer(0.3, tell)
            timer.start()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert checkpoint.steps(tmp_path) == [1]


def test_what_is_read_late_is_what_was_saved(tmp_path, monkeypatch):
    """Of a save under way neither a step in place nor the next save changes what is not read yet."""
    reading, goes_on, real = threading.Event(), threading.Event(), Snapshot.source

    def late(self, index, piece):
        values = real(self, index, piece)
        if reading.is_set():
            assert goes_on.wait(30)
        reading.set()
        return values

    monkeypatch.setattr(Snapshot, "source", late)
    x = torch.arange(2000.0)
    state = {"x": x.view(2, 1000).t(), "half": x.bfloat16(), "count": torch.tensor(1)}
    saved = {}
    with checkpoint.Saver(tmp_path, checkpoint.Placement.of(state), chunk_bytes=512) as one:
        for step in (1, 2, 3):
            saved[step] = {name: leaf.clone() for name, leaf in state.items()}
            threading.Timer(0.2, goes_on.set).start()
            one.save(step, state)
            if step == 1:
                assert reading.wait(30)
                assert checkpoint.steps(tmp_path) == []
            else:
                assert goes_on.is_set()  # the save before is complete
            for leaf in state.values():  # a step that takes the memory of the state before
                leaf.mul_(-3).add_(step)
    for step, wanted in saved.items():
        got = checkpoint.restore(tmp_path / str(step))
        for name, leaf in wanted.items():
            assert torch.equal(got[name], leaf), (step, name)


def test_an_error_of_the_thread_comes_with_the_next_call(tmp_path):
    with saver(tmp_path) as one:
        one.save(1, {"x": torch.ones(1000)}, wait=True)
        one.save(1, {"x": torch.ones(1000)})
        with pytest.raises(ValueError, match="got an existing path; wanted a new one"):
            one.save(2, {"x": torch.ones(1000)})
        one.save(2, {"x": torch.ones(1000)}, wait=True)  # once
        with pytest.raises(ValueError, match="an existing path"):
            one.save(2, {"x": torch.ones(1000)}, wait=True)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_another_state_than_announced_is_refused(tmp_path):
    with saver(tmp_path) as one:
        with pytest.raises(ValueError, match=r"x: got torch.float32 \(2,\)"):
            one.save(1, {"x": torch.ones(2)})
        with pytest.raises(ValueError, match=r"metadata: got .* not JSON serializable"):
            one.save(1, {"x": torch.ones(1000)}, {"t": torch.ones(1)})
        one.save(1, {"x": torch.ones(1000)})
    assert checkpoint.steps(tmp_path) == [1]


def test_a_snapshot_uses_its_memory_again():
    tensor = torch.arange(6.0).view(2, 3).t()  # not contiguous
    division = Division(checkpoint.Placement.of({"x": tensor}))
    snapshot = Snapshot(division)
    (piece,) = division.pieces[0]
    snapshot.take([tensor])
    first = snapshot.source(0, piece)
    assert first.tolist() == tensor.tolist()
    snapshot.take([tensor + 1])
    second = snapshot.source(0, piece)
    assert second.ctypes.data == first.ctypes.data
    assert second.tolist() == (tensor + 1).tolist()


def test_copies_from_a_device_are_ordered_with_what_comes_before_and_after(tmp_path, monkeypatch):
    """Steps in place before and after a save, and the thread that writes, whose memory is locked."""
    streams, main, real = RecordedStreams(), threading.get_ident(), together.save_together
    monkeypatch.setattr(together, "CUDA", streams)
    monkeypatch.setattr(memory, "_LOCKED_BYTES", 4096)
    begun = threading.Event()

    def pinned(nbytes: int, device: int) -> torch.Tensor:
        assert threading.get_ident() != main
        assert device == 3  # of the thread that saves: the other one would begin on GPU 0
        begun.set()
        return RecordedStreams.pinned(streams, nbytes, device)

    def saved(order, source, ranks):
        def read(index, piece):
            values = source(index, piece)
            streams.read_by_host(torch.from_numpy(values.view("uint8")))
            return values

        real(order, read, ranks)

    monkeypatch.setattr(streams, "pinned", pinned)
    monkeypatch.setattr(together, "save_together", saved)
    x = streams.empty(8000, torch.device("cpu")).view(torch.float32)  # known to the streams
    state = {"half": x[:1000], "t": x[1000:].view(10, 100).t()}
    placement = checkpoint.Placement.of(state)
    with checkpoint.Saver(tmp_path, placement, chunk_bytes=1024, device="cuda") as one:
        assert begun.wait(30)  # before there is anything to save
        for step in (1, 2):
            with streams.watching():
                x.fill_(step)
            one.save(step, state)
            with streams.watching():
                x.fill_(7.0)
            one.wait()
    sizes = [memory.nbytes for memory in streams.far]
    assert sum(sizes) == 8 * 1024  # pieces of 1000 bytes, aligned
    assert max(sizes) <= 4096
    for step in (1, 2):
        for leaf in checkpoint.restore(tmp_path / str(step)).values():
            assert leaf.eq(step).all()
    copies = {op.stream for op in streams.log if op.name == "copy"}
    assert copies == {"1"}


def test_ranks_copy_only_what_they_write():
    from functron.spmd import BoundMesh

    mesh = Mesh(dp=4)
    like = {"x": torch.empty(1024, 1024, device="meta")}
    sizes = []
    for rank in range(4):
        bound = BoundMesh(mesh, rank, mesh.coordinate(rank), {}, "cpu")
        sizes.append(Snapshot(Division(checkpoint.Placement.of(like, P(), bound))).nbytes)
    assert sizes == [1 << 20] * 4


def test_bytes_in_flight_are_bounded():
    running, most = [0], [0]

    def begin(nbytes: int):
        running[0] += nbytes
        most[0] = max(most[0], running[0])

        def wait():
            running[0] -= nbytes

        return wait

    window = Window(100)
    for nbytes in (40, 40, 40, 10, 250, 1):
        window.add(nbytes, lambda nbytes=nbytes: begin(nbytes))
        assert running[0] <= max(100, nbytes)
    window.drain()
    assert (running[0], most[0]) == (0, 250)


# --- which stay


def test_keep_by_hand():
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 4.0, 6: 5.0}
    found = {step: {"loss": loss} for step, loss in losses.items()} | {7: {}}
    assert Keep().choose(found) == {1, 2, 3, 4, 5, 6, 7}
    assert Keep(last=2).choose(found) == {6, 7}
    assert Keep(last=1, every=3).choose(found) == {3, 6, 7}
    assert Keep(last=1, best=2).choose(found) == {2, 3, 7}
    assert Keep(last=1, best=2, largest=True).choose(found) == {5, 6, 7}
    assert Keep(last=1, best=1, metric="accuracy").choose(found) == {7}


def test_a_bad_choice_is_refused():
    with pytest.raises(ValueError, match="no such choice") as caught:
        Keep(last=0, every=-1, best=-2)
    assert "Keep.last: got 0; wanted at least 1, or None" in str(caught.value)
    assert "Keep.every: got -1; wanted at least 0" in str(caught.value)
    assert "Keep.best: got -2; wanted at least 0" in str(caught.value)


def test_a_saver_keeps_what_it_should(tmp_path):
    losses = [5.0, 1.0, 4.0, 3.0, 2.0]
    with saver(tmp_path, keep=Keep(last=2, best=1)) as one:
        for step, loss in enumerate(losses, 1):
            one.save(step, {"x": torch.full((1000,), loss)}, {"loss": loss})
    assert checkpoint.steps(tmp_path) == [2, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    for name in ("7.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-removed", "9", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("")
    with saver(tmp_path) as one:
        one.save(1, {"x": torch.ones(1000)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "9", "notes"]


def test_a_checkpoint_is_invisible_before_its_files_are_removed(tmp_path, monkeypatch):
    with saver(tmp_path) as one:
        for step in (1, 2):
            one.save(step, {"x": torch.ones(1000)})
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)  # killed here
    folders.prune(tmp_path, Keep(last=1))
    assert checkpoint.steps(tmp_path) == [2]
