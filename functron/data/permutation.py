"""Keyed pseudorandom permutations of 0 ... size-1 in O(1) memory: shuffles that need no table."""

from __future__ import annotations

import math

import numpy as np

ROUNDS = 8


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where the permutation of ``range(size)`` that `key` selects sends each of `indices`.

    A Feistel network on pairs (a, b) of digits in base ``ceil(sqrt(size))``: every round maps
    ``(a, b)`` to ``(b, a + f(b))``, which can be undone whatever f is, so the network is a
    permutation of the square. What lands outside ``range(size)`` is sent through again until it
    does not (cycle walking), which keeps it a permutation; less than two passes on average.
    Statistically good, not cryptographic.

    Args:
        indices: integers in ``range(size)``, any shape.
        size: at least 1, at most 2^62.
        key: any integer; its low 64 bits select the permutation.

    Returns:
        int64, the shape of `indices`.

    Raises:
        ValueError: an index outside ``range(size)``.
    """
    values = np.asarray(indices, dtype=np.int64)
    if values.size and not (values.min() >= 0 and values.max() < size <= 2**62):
        raise ValueError(
            f"permute: got indices from {values.min()} to {values.max()}; wanted 0 to {size - 1}"
        )
    base = math.isqrt(max(size - 1, 0)) + 1
    flat = _pass(values.reshape(-1), base, key)
    outside = np.flatnonzero(flat >= size)
    while outside.size:
        flat[outside] = _pass(flat[outside], base, key)
        outside = outside[flat[outside] >= size]
    return flat.reshape(values.shape)


def _pass(values: np.ndarray, base: int, key: int) -> np.ndarray:
    a, b = np.divmod(values.astype(np.uint64), np.uint64(base))
    for index in range(ROUNDS):
        a, b = b, (a + mix(b, key, index) % np.uint64(base)) % np.uint64(base)
    return (a * np.uint64(base) + b).astype(np.int64)


def mix(values: np.ndarray, key: int, index: int) -> np.ndarray:
    """SplitMix64's finaliser of (value, key, round), twice. Steele, Lea and Flood 2014."""
    for salt in (key, index + 1):
        values = values + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values = values ^ (values >> np.uint64(31))
    return values
