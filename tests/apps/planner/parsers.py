"""Damaged files of machines and of their measurements, for `tests.parsers`."""

from __future__ import annotations

from pathlib import Path

from functron.apps.planner import hardware
from functron.apps.planner.measurements import LinkTimes, Measurement, RankRates
from tests.parsers import Target, given, put


def _hardware_seeds(folder: Path) -> list[bytes]:
    ranks = tuple(RankRates(i, "h", "cpu", {"memory": 1e9}) for i in range(2))
    links = (LinkTimes("dp", "psum", ((0, 1),), (1024, 4096), ((1e-5, 1e-4),)),)
    Measurement("dp=2", ranks, links, {"torch": "2.13"}, 1.0).save(folder / "seed.json")
    return [(folder / "seed.json").read_bytes()]


def _read_hardware(folder: Path, data: bytes) -> None:
    found = Measurement.load(put(folder, "hardware.json", data))
    found.slow()


def _read_machine(folder: Path, data: bytes) -> None:
    found = hardware(put(folder, "machine.toml", data))
    found.matmul_seconds(128, 128, 128)


TARGETS: dict[str, Target] = {
    "machine": Target(given(hardware("h100").to_toml().encode()), _read_machine),
    "hardware": Target(_hardware_seeds, _read_hardware),
}

FOUND: dict[str, list[bytes]] = {}
