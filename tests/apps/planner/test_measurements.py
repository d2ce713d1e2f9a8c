"""Rates of machines: kept, compared, and refused where a file is not what was written."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET

import pytest
import torch

from functron.apps.planner import hardware
from functron.apps.planner.measurements import LinkTimes, Measurement, RankRates
from functron.program.cost import peak_flops

RATES = {"float32 matmul": 1e12, "memory": 1e11, "disk write": 1e9}


def ranks(count, hosts=2, **changes):
    found = [RankRates(i, f"h{i * hosts // count}", "cpu", dict(RATES)) for i in range(count)]
    return tuple(
        dataclasses.replace(one, rates={**one.rates, **changes.get(f"rank{one.rank}", {})})
        for one in found
    )


def link(op="psum", seconds=((1e-5, 1e-3),) * 4):
    groups = ((0, 1), (2, 3), (4, 5), (6, 7))
    return LinkTimes("tp", op, groups[: len(seconds)], (1024, 1 << 20), tuple(seconds))


def test_a_file_holds_what_was_measured(tmp_path):
    made = Measurement("dp=4,tp=2", ranks(8), (link(), link("ppermute")), {"torch": "2.13"}, 5.0)
    made.save(tmp_path / "hardware.json")
    assert Measurement.load(tmp_path / "hardware.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]


def test_a_machine_of_what_was_measured():
    """By hand: pairs within a host for its domain, pairs across hosts for the network."""
    far = LinkTimes(
        "dp", "psum", ((0, 4), (1, 5), (2, 6), (3, 7)), (1024, 1 << 20), ((4e-5, 4e-3),) * 4
    )
    found = Measurement("dp=2,tp=4", ranks(8), (link(), far)).machine()
    base = hardware("cpu")
    assert (found.domain.gpus, found.domain.efficiency) == (4, 1.0)
    assert found.domain.bytes_per_second == pytest.approx((1 << 20) / 1e-3)
    assert found.domain.latency_seconds == pytest.approx(1e-5 / 2)  # there and back
    assert found.network.bytes_per_second == pytest.approx((1 << 20) / 4e-3)
    assert found.network.latency_seconds == pytest.approx(4e-5 / 2)
    assert found.domain.measured["psum"]["bytes_per_second"] == found.domain.bytes_per_second
    assert found.memory_seconds(1e11) == pytest.approx(1.0)
    # large products reach what was measured: the tiles of a CPU are small
    seconds = found.matmul_seconds(4096, 4096, 4096, torch.float32)
    assert 2 * 4096**3 / seconds == pytest.approx(1e12, rel=0.02)
    assert found.calibration.spread == base.calibration.spread
    assert found.kernel_seconds == base.kernel_seconds
    busy = {f"rank{i}": {"operations": 2e4 * (1 + i)} for i in range(3)}  # the median: 40,000
    assert Measurement("dp=3", ranks(3, **busy), ()).machine().kernel_seconds == 1 / 4e4
    gpus = tuple(dataclasses.replace(one, device="NVIDIA H100 80GB HBM3") for one in ranks(2))
    assert Measurement("dp=2", gpus, ()).machine().peak(torch.bfloat16) == 989e12
    for device in ("NVIDIA GeForce GTX 1080", "NVIDIA H100 PCIe"):
        unknown = (dataclasses.replace(gpus[0], device=device),)
        with pytest.raises(ValueError, match="a known GPU"):
            Measurement("dp=1", unknown, ()).machine()


@pytest.mark.parametrize(
    ("op", "share"),
    [("psum", 1.0), ("all_gather", 0.5), ("psum_scatter", 0.5), ("all_to_all", 0.5),
     ("ppermute", 1.0)],
)  # fmt: skip
def test_rates_of_links_are_those_of_a_ring(op, share):
    """By hand: of two ranks each sends half of a message, twice for psum; all of it to the next."""
    found = link(op, seconds=((1e-5, 1e-3), (2e-5, 2e-3), (9e-5, 4e-3)))
    assert found.latency_seconds == 2e-5
    assert found.bytes_per_second == pytest.approx(share * (1 << 20) / 2e-3)


def test_four_ranks_of_a_ring_send_three_quarters():
    found = LinkTimes("dp", "all_gather", ((0, 1, 2, 3),), (4096,), ((1e-3,),))
    assert found.bytes_per_second == pytest.approx(0.75 * 4096 / 1e-3)


def test_what_is_slow_is_named():
    slow = {"rank5": {"float32 matmul": 0.7e12}, "rank2": {"memory": 0.85e11}}
    slowest = ((1e-5, 1e-3), (1e-5, 1.1e-3), (1e-5, 1e-3), (1e-5, 2e-3))
    made = Measurement("dp=4,tp=2", ranks(8, **slow), (link(seconds=slowest), link("ppermute")))
    assert made.slow() == [
        "rank 5 on h1: float32 matmul 0.70 of the median of 8",
        "ranks 6, 7 on h1: psum over tp 0.53 of the median of 4 groups",
    ]
    assert "slow: rank 5 on h1" in str(made)


def test_disks_are_those_of_hosts():
    """Two ranks of a host share its disk: one that waits for the other is not slow."""
    shared = {"rank0": {"disk write": 0.4e9}, "rank1": {"disk write": 1.6e9}}
    assert Measurement("dp=6", ranks(6, hosts=3, **shared), ()).slow() == []
    slow = {"rank4": {"disk write": 0.5e9}, "rank5": {"disk write": 0.5e9}}
    (text,) = Measurement("dp=6", ranks(6, hosts=3, **slow), ()).slow()
    assert text == "h2: disk write 0.50 of the median of 3"


def test_of_two_none_can_be_told():
    slow = {"rank1": {"float32 matmul": 1e11}}
    assert (
        Measurement("dp=2", ranks(2, **slow), (link(seconds=((1.0, 1.0), (1.0, 9.0))),)).slow()
        == []
    )


def test_the_picture_has_a_curve_for_each_link():
    picture = Measurement("dp=4,tp=2", ranks(8), (link(), link("ppermute"))).picture()
    texts = [node.text for node in ET.fromstring(picture).iter() if node.text]
    assert any("ppermute over tp" in text for text in texts)
    ET.fromstring(Measurement("dp=1", ranks(1, hosts=1), ()).picture())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "format 2"),
        (
            {"ranks": [{"rank": -1, "host": "h", "device": "cpu", "rates": {}}]},
            "ranks[0].rank: got -1; wanted a whole number",
        ),
        ({"ranks": 3}, "ranks: got 3; wanted a list"),
        ({"links": [{"axis": "dp"}]}, "links[0].groups: got nothing"),
        ({"versions": {"torch": 2}}, "versions.torch: got 2; wanted a text"),
        ({"time": "now"}, "time: got 'now'; wanted a number"),
    ],
)
def test_another_file_is_refused(tmp_path, change, reason):
    path = tmp_path / "hardware.json"
    Measurement("dp=8", ranks(8), (link(),)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="cannot read the rates of machines") as caught:
        Measurement.load(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "gb200"])
def test_a_machine_has_the_peaks_that_mfu_counts_by(name, monkeypatch):
    """Two tables of the same data sheets: the library's has no machines."""
    machine = hardware(name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: machine.name)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert peak_flops("cuda", dtype) == machine.peak(dtype)
