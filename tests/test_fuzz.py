"""Configurations by seed, and those that once failed: a mesh changes no number of a run's records.

``pytest --full`` takes a hundred of them, ``--seeds N`` as many; ``python -m tests.fuzz`` any.
"""

from __future__ import annotations

import pytest

from functron.cli.process import InputError
from tests import fuzz


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        seeds, full = map(metafunc.config.getoption, ("--seeds", "--full"))
        default = 100 if full else 5
        metafunc.parametrize("seed", range(default if seeds is None else seeds))


def test_seeds(seed):
    case = fuzz.draw(seed)
    assert case == fuzz.draw(seed)
    lines = fuzz.check(case)
    assert not lines or lines[0].startswith("refused"), "\n".join([*lines, str(case)])


@pytest.mark.parametrize("name", fuzz.CASES)
def test_what_once_failed(name):
    lines = fuzz.check(fuzz.CASES[name])
    assert not lines, "\n".join([*lines, str(fuzz.CASES[name])])


def test_a_difference_is_found_and_a_mistake_is_refused():
    both = (*fuzz.SMALL, "--model", "gpt2-tiny", "--seq", "16", "--gpt.dtype", "float64")
    other = fuzz.Case(both, ("--mesh", "dp=2", "--gpt.norm-eps", "1.1e-5"))
    lines = fuzz.check(other)
    assert {line.split(":")[1] for line in lines} == {" loss", " grad_norm"}
    assert all(line.startswith("step 1: ") for line in lines)
    (refused,) = fuzz.check(fuzz.Case(both, ("--mesh", "dp=3")))
    assert refused.startswith("refused: ")
    assert "set it to 9" in refused
    with pytest.raises(AssertionError, match="without saying what was wanted"):
        fuzz.check(fuzz.Case((*both, "--steps", "many"), ()))
    with pytest.raises(InputError, match="--no-such-option"):
        fuzz.check(fuzz.Case((*both, "--no-such-option"), ()))
