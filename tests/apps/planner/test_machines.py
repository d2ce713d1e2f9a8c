"""Machines: rates by hand, files, and where ranks are."""

from dataclasses import replace

import pytest
import torch

from functron.apps import planner
from functron.apps.planner import MACHINES, Hardware, RankPlacement, hardware
from functron.apps.planner.machines import (
    Domain,
    GroupReach,
    MatmulRate,
    MemoryRates,
    Network,
    divide_nodes,
)
from functron.spmd import Mesh

ROUND = replace(
    hardware("a100"),
    peak_flops={"float32": 1e12, "bfloat16": 2e12},
    matmul=MatmulRate(1.0, 4, ((128, 128, 1.0),), 1024.0),
    memory=MemoryRates(10**11, 1e12, 1.0),
    domain=Domain(100e9, 1.0, 1e-6, 8),
    network=Network(10e9, 1.0, 1e-5, 32, 2.0),
)
"""Round numbers: four processors, tiles of 128 x 128 that take as long as 1,024 of k to start."""


@pytest.mark.parametrize(
    ("op", "reach", "seconds"),
    [
        # a ring of 8 sends 2 * 7 / 8 of 8 GB at 100 GB/s; a tree has 2 * log2(8) steps
        ("psum", GroupReach(8, 8, 8), 14e9 / 100e9 + 6e-6),
        ("all_gather", GroupReach(8, 8, 8), 7e9 / 100e9 + 7e-6),
        # of two domains the ring leaves by 8 adapters of 10 GB/s
        ("psum", GroupReach(16, 8, 16), 15e9 / 80e9 + 6e-6 + 2e-5),
        # one rank in each of 4 domains: one adapter
        ("psum_scatter", GroupReach(4, 1, 25), 6e9 / 10e9 + 3e-5),
        # beyond a pod of 32 the network has half
        ("psum_scatter", GroupReach(4, 1, 97), 6e9 / 5e9 + 3e-5),
        # each rank keeps 1/16, sends 7/16 inside and 8/16 outside, which takes longer
        ("all_to_all", GroupReach(16, 8, 16), 4e9 / 10e9 + 1.1e-5),
        ("ppermute", GroupReach(2, 2, 2), 8e9 / 100e9 + 1e-6),
        ("ppermute", GroupReach(2, 1, 9), 8e9 / 10e9 + 1e-5),
        ("psum", GroupReach(1, 1, 1), 0.0),
    ],
)
def test_a_collective_of_eight_gigabytes(op, reach, seconds):
    assert ROUND.collective_seconds(op, 8e9, reach) == pytest.approx(seconds)


def test_collectives_that_were_measured_by_themselves(tmp_path):
    """By hand: of 8 GB one of two ranks scatters 4 GB at 2 GB/s, gathers them at the link's own."""
    own = {"psum_scatter": {"bytes_per_second": 2e9, "latency_seconds": 0.5}}
    slow = replace(ROUND, domain=replace(ROUND.domain, measured=own))
    pair = GroupReach(2, 2, 2)
    assert slow.collective_seconds("psum_scatter", 8e9, pair) == pytest.approx(2.0 + 0.5)
    gather = ROUND.collective_seconds("all_gather", 8e9, pair)
    assert slow.collective_seconds("all_gather", 8e9, pair) == gather
    (tmp_path / "slow.toml").write_text(slow.to_toml())
    assert hardware(tmp_path / "slow.toml") == slow
    (tmp_path / "slow.toml").write_text(slow.to_toml().replace("latency_seconds = 0.5", ""))
    with pytest.raises(
        ValueError, match=r"domain\.measured\.psum_scatter: .*bytes_per_second and lat"
    ):
        hardware(tmp_path / "slow.toml")


def test_tiles_and_waves():
    """A wave of four tiles over k = 1024 takes 2 * 128^2 * (1024 + 1024) * 4 / 1e12 seconds."""
    wave = 2 * 128 * 128 * 2048 * 4 / 1e12
    seconds = lambda m, n, k=1024: ROUND.matmul_seconds(m, n, k, torch.float32)
    assert seconds(128, 512) == pytest.approx(wave)
    assert seconds(128, 513) == pytest.approx(2 * wave)  # one tile more than a wave
    assert seconds(128, 1024) == pytest.approx(2 * wave)
    assert seconds(100, 500) == pytest.approx(wave)  # tiles that are filled in part
    # one tile alone is cut along k in four, each of 256 + 1024
    assert seconds(128, 128) == pytest.approx(wave * 1280 / 2048)
    assert ROUND.matmul_seconds(128, 512, 1024, torch.bfloat16) == pytest.approx(wave / 2)
    assert ROUND.matmul.utilisation(128, 512, 1024) == pytest.approx(0.5)


def test_memory_bounds_thin_products():
    """A vector times a matrix reads the matrix: 2 bytes of each of its 10^8 elements."""
    a100 = hardware("a100")
    rate = a100.memory.bytes_per_second * a100.memory.efficiency
    assert a100.matmul_seconds(1, 10000, 10000) == pytest.approx(2 * (10**8 + 2e4) / rate)


def test_where_ranks_are():
    placed = RankPlacement(Mesh(pp=4, dp=4, tp=4), 8)
    assert placed.reach("tp") == GroupReach(4, 4, 4)
    assert placed.reach("dp") == GroupReach(4, 2, 13)
    assert placed.reach("pp") == GroupReach(4, 1, 49)
    assert placed.reach(("dp", "tp")) == GroupReach(16, 8, 16)
    assert placed.reach("dp").num_domains == 2


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (8, GroupReach(4, 4, 4, 1)),
        (6, GroupReach(4, 2, 4, 2)),  # 0-3, 4 5|6 7, 8-11 of three
        (5, GroupReach(4, 1, 4, 2)),  # 4|5 6 7
    ],
)
def test_the_worst_group_counts(gpus, wanted):
    assert RankPlacement(Mesh(dp=6, tp=4), gpus).reach("tp") == wanted
    worst = hardware("h100").collective_seconds("psum", 1e9, wanted)
    assert worst >= hardware("h100").collective_seconds("psum", 1e9, GroupReach(4, 4, 4))


def test_jobs_leave_few_gpus_of_a_domain_idle():
    """64 of 72, so that no group straddles; of 125 x 8 ranks whole domains, and uneven shares."""
    gb200 = hardware("gb200")
    placed = RankPlacement.on(Mesh(pp=16, dp=8, tp=8), gb200)
    assert placed.gpus_per_domain == 64
    assert placed.reach("dp") == GroupReach(8, 8, 57, 1)
    assert RankPlacement.on(Mesh(dp=9, tp=8), gb200).gpus_per_domain == 72
    placed = RankPlacement.on(Mesh(dp=125, tp=8), gb200)
    assert placed.reach("dp") == GroupReach(125, 8, 993, 14)  # 13 domains of 9, one of 8
    assert RankPlacement.on(Mesh(dp=8, tp=4), hardware("h100")).gpus_per_domain == 8


def test_every_machine_is_read_and_written(tmp_path):
    for name in MACHINES:
        found = hardware(name)
        path = tmp_path / f"{name}.toml"
        path.write_text(found.to_toml())
        assert hardware(path) == found
        assert hash(hardware(path)) == hash(found)
    assert {"a100", "h100", "h200", "b200", "gb200", "cpu"} <= {*MACHINES}
    assert hardware("gb200").domain.gpus == 72


def test_data_sheets():
    """Dense rates of the vendor's data sheets, in FLOP/s and bytes/s."""
    sheets = {"a100": (312e12, 2.039e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12)}
    for name, (flops, rate) in sheets.items():
        found = hardware(name)
        assert (found.peak(torch.bfloat16), found.memory.bytes_per_second) == (flops, rate)
    assert hardware("h100").peak(torch.float8_e4m3fn) == 1979e12


def test_gpus_are_known_by_the_names_that_drivers_give():
    assert planner.is_known("NVIDIA H100 80GB HBM3")
    assert not planner.is_known("NVIDIA H100 PCIe")  # another one, with less power
    assert not planner.is_known("Tesla T4")
    found = planner.find_this_machine("cpu")
    assert all(rate > 0 for rate in found.peak_flops.values())


def test_unknown_machines():
    with pytest.raises(ValueError, match="did you mean 'h100'") as error:
        hardware("h10")
    assert "Hardware.to_toml()" in str(error.value)
    assert "functron doctor" in str(error.value)


def test_files_that_describe_no_machine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("name = 1")
    with pytest.raises(ValueError, match=r"name: got 1; wanted a text") as error:
        hardware(path)
    assert "memory: got nothing" in str(error.value)
    text = hardware("h100").to_toml()
    path.write_text(text.replace("gpus = 8", "gpu = 8").replace("units = 132", "units = -1"))
    with pytest.raises(ValueError, match=r"domain\.gpu: .*did you mean 'gpus'") as error:
        hardware(path)
    assert "matmul.units: got -1" in str(error.value)
    path.write_text(text.replace("units = 132", "units = 0"))
    with pytest.raises(ValueError, match=r"matmul\.units: got 0; wanted above 0"):
        hardware(path)
    path.write_text("[")
    with pytest.raises(ValueError, match="a file of TOML"):
        hardware(path)


def test_a_machine_is_a_value():
    assert isinstance(ROUND, Hardware)
    assert {hardware("a100"): 1}[hardware("a100")] == 1
    assert hardware("a100") != hardware("h100")


def test_nodes_are_domains():
    """4 GPUs of 8 go round over NVLink: 3/4 of the bytes; of nodes of 2 over two adapters."""
    whole = hardware("h100")
    gpus, halves = divide_nodes("4x2", whole)
    assert (gpus, halves.domain.gpus) == (8, 2)
    assert divide_nodes(" 1X8 ", whole) == (8, whole)
    mesh, size = Mesh(dp=2, tp=4), 2**33
    seconds = []
    for machine in (whole, halves):
        reach = RankPlacement.on(mesh, machine).reach("tp")
        seconds.append(machine.collective_seconds("all_gather", size, reach))
    near = 3 / 4 * size / (whole.domain.bytes_per_second * whole.domain.efficiency)
    far = 3 / 4 * size / (2 * whole.network.bytes_per_second * whole.network.efficiency)
    assert seconds == pytest.approx([near, far], rel=0.01)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("8", "wanted nodes x GPUs of each, such as 8x8"),
        ("0x8", "such as 8x8"),
        ("8x8x8", "such as 8x8"),
        ("ax8", "such as 8x8"),
        ("4x8,2x4", "nodes of one size; fix: plan for groups that fit into each: 10x4"),
        ("4x12", "at most the 8 GPUs that NVLink connects; fix: 12x4, or write one"),
    ],
)
def test_nodes_that_are_none_are_refused(nodes, said):
    with pytest.raises(ValueError, match="cannot plan for these nodes") as error:
        divide_nodes(nodes, hardware("h100"))
    assert said in str(error.value)


def test_several_kinds_of_gpus_are_refused():
    with pytest.raises(ValueError, match="one kind of GPU") as error:
        hardware("h100,a100")
    assert "plan for the slowest kind alone" in str(error.value)
