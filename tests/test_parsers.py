"""Readers of files from outside read them, or say what is wrong; see `tests.parsers`.

``pytest --full`` changes 2,000 inputs for each; ``python -m tests.parsers`` as many as one likes.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests import parsers

TARGETS, FOUND = parsers.find_tables()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_are_read_or_refused(name, request):
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    count = 2000 if request.config.getoption("--full") else 60
    lines = [f"{data[:200]!r}\n{text}" for data, text in parsers.failures(TARGETS[name], count)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("name", FOUND)
def test_what_once_failed(name, tmp_path):
    target = TARGETS[name]
    target.seeds(tmp_path)
    for data in FOUND[name]:
        with pytest.raises(ValueError, match="wanted"):
            target.read(tmp_path, data)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("no")])
def test_a_reader_that_fails_is_found(error, tmp_path):
    def read(folder, data):
        raise error

    text = parsers.failure(parsers.Target(lambda folder: [b""], read), tmp_path, b"")
    assert type(error).__name__ in text
