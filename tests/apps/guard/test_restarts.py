"""The decisions of restarts: durations, sizes of an axis, pauses, and what does not fit."""

from __future__ import annotations

import pytest

from functron.apps.guard import restarts
from functron.apps.guard.restarts import Elastic, fitting, resize, seconds_of, usable_sizes
from functron.training.checks import validate
from functron.training.config import configure

DP = configure(
    mesh="dp=4", nproc=4, global_batch=12, device="cpu", max_restarts=3, elastic="dp=2:6"
)


@pytest.fixture
def slots(tmp_path):
    file = tmp_path / "slots"
    file.write_text("4\n")
    return file


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("45m", 2700),
        ("3h50m", 13800),
        ("1d12h", 129600),
        ("2.5s", 2.5),
        ("1h1s", 3601),
    ],
)
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "10", "3h 50m", "50m3h", "h", "-5m", "1w", "1.5h"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="such as 90s, 45m, 3h50m"):
        seconds_of(text)


def test_sizes_of_an_axis():
    assert Elastic.parse("dp=2:4") == Elastic("dp", (2, 3, 4))
    assert str(Elastic.parse("fsdp=8,2,4")) == "fsdp=2,4,8"
    for text in ("dp", "dp=", "tp=2:4", "dp=4:2", "dp=0:2", "2:4", "dp=a", "dp=2:3:4"):
        with pytest.raises(ValueError, match="dp or fsdp and its sizes"):
            Elastic.parse(text)


def test_a_smaller_mesh_takes_more_microbatches_and_the_same_batch():
    def shape(config, size):
        found = resize(config, "dp", size)
        return found and (
            found.parallelism.mesh,
            found.parallelism.nproc,
            found.parallelism.microbatches,
        )

    assert shape(DP, 4) == ("dp=4", 4, 1)
    assert shape(DP, 3) == ("dp=3", 3, 2)  # 4 samples a rank, of which 3 fit: 2 and 2
    assert shape(DP, 2) == ("dp=2", 2, 2)  # 6: 3 and 3
    assert shape(DP, 1) == ("dp=1", 1, 4)
    assert shape(DP, 6) == ("dp=6", 6, 1)
    assert shape(DP, 5) is None
    both = configure(DP, mesh="dp=2,tp=2", nproc=4, microbatches=2)
    assert shape(both, 1) == ("dp=1,tp=2", 2, 4)
    assert shape(both, 3) == ("dp=3,tp=2", 6, 2)  # 4 samples: no more than 3 at a time
    pipeline = configure(DP, mesh="pp=2,dp=2", nproc=4, microbatches=2)
    assert shape(pipeline, 1) == ("pp=2,dp=1", 2, 4)
    assert shape(pipeline, 3) == ("pp=2,dp=3", 6, 2)
    growing = configure(DP, ramp_up="4 4 100")
    assert shape(growing, 2) == ("dp=2", 2, 2)  # batches of 4, 8 and 12
    assert shape(growing, 3) is None  # which 4 is no multiple of


def test_the_largest_mesh_that_fits():
    assert usable_sizes(DP) == (2, 3, 4, 6)
    for slots, mesh in ((9, "dp=6"), (5, "dp=4"), (4, "dp=4"), (3, "dp=3"), (2, "dp=2")):
        found = fitting(DP, slots)
        assert found is not None
        assert found.parallelism.mesh == mesh
    assert fitting(DP, 1) is None
    assert fitting(DP, None) is DP
    assert fitting(configure(DP, elastic=""), 1) == configure(DP, elastic="")


def test_growing(slots):
    small = configure(DP, mesh="dp=3,tp=2", elastic="dp=2,3,4,6", slots=str(slots))
    for number, grows in (("6", False), ("7", False), ("8", True), ("", False), ("x", False)):
        slots.write_text(number)
        assert restarts.can_grow(small) is grows
    slots.unlink()
    assert not restarts.can_grow(small)
    assert not restarts.can_grow(configure(small, elastic=""))


def test_pauses():
    assert [restarts.pause_seconds(1.0, n) for n in (0, 1, 2, 6, 400)] == [1, 2, 4, 60, 60]
    assert restarts.pause_seconds(100.0, 3) == 100
    assert restarts.pause_seconds(0.0, 3) == 0


def test_states_in_memory_need_a_neighbour_and_processes(tmp_path):
    good = configure(
        DP, elastic="", format="mock", memory_save_every=2, memory_folder=str(tmp_path)
    )
    validate(good)
    validate(configure(good, mesh="fsdp=2,tp=2"))
    said = refused(configure(good, mesh="tp=4", memory_folder="/no/such"))
    assert "memory_save_every: got 2 on tp=4; wanted several dp or fsdp ranks" in said
    assert "memory_folder: got /no/such, where none is; wanted a folder of main memory" in said
    said = refused(configure(good, nproc=0, max_restarts=0))
    assert (
        "memory_save_every: got 2 without processes; wanted processes; fix: add --nproc 4" in said
    )
    assert "memory_save_every: got -1" in refused(configure(good, memory_save_every=-1))


def refused(config, **given):
    with pytest.raises(ValueError, match="cannot train with this configuration") as caught:
        validate(configure(config, format="mock"), **given)
    return str(caught.value)


def test_what_does_not_fit(slots):
    good = configure(DP, format="mock", elastic="dp=2:4", slots=str(slots))
    validate(good)
    validate(configure(good, elastic="dp=2,3,4,6"))
    wrong = configure(DP, elastic="dp=2:8", exit_after="soon", max_restarts=0, slots="")
    said = refused(wrong)
    for line in (
        "elastic: got dp=2:8: 8 cannot divide the batch; wanted sizes that divide it, of which "
        "there are 2, 3, 4, 6 (global_batch=12)",
        "exit_after: got 'soon'; wanted a duration",
        "elastic: got dp=2:8; wanted max_restarts of at least 1",
        "slots: got none; wanted a file with the number of processes",
    ):
        assert line in said
    assert "elastic: got dp=2,3,5: 5 cannot divide" in refused(configure(good, elastic="dp=2,3,5"))
    assert "for dp=4; wanted sizes with that" in refused(configure(good, elastic="dp=2:3"))
    assert "elastic: got 'tp=2'" in refused(configure(good, elastic="tp=2"))
    slots.write_text("many")
    assert f"slots: got {slots}, which has none" in refused(good)
    said = refused(configure(DP, elastic="", nproc=0, slots="file"))
    assert "max_restarts: got 3; wanted processes to restart; fix: add --nproc 4" in said
    assert "slots: got file; wanted nothing without elastic" in said
    said = refused(DP, processes=4)
    assert "max_restarts: got 3 under torchrun; wanted 0; fix: leave it out; start" in said
    assert "elastic: got dp=2:6 under torchrun; wanted nothing: only functron train" in said
    validate(configure(good, slots="gone"), processes=4, launched_here=True)
    said = refused(configure(good, max_restarts=-1, restart_pause_seconds=-1.0))
    assert "max_restarts: got -1; wanted at least 0" in said
    assert "restart_pause_seconds: got -1; wanted at least 0" in said
