"""A fixture of the tests of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from functron.core import random


@pytest.fixture
def no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager]:
    """A with block in which random numbers, and so keys made of a key, are refused."""

    def refused(*args):
        raise AssertionError("a random number was drawn")

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as here:
            here.setattr(random, "threefry", refused)
            yield

    return block
