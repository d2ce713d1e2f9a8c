"""Damage to files, as disks do it."""

from pathlib import Path


def flip_bit(path: Path, byte: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)
