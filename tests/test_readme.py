"""The README keeps its promises: its tour runs, its commands are CI's, its files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_tour_runs_in_fifteen_lines():
    tour, _ = blocks("python")
    assert len([line for line in tour.splitlines() if line.strip()]) <= 15
    torch.manual_seed(0)
    exec(compile(tour, "README.md", "exec"), {})


def test_tour_without_its_psum_is_refused():
    tour, _ = blocks("python")
    forgot = tour.replace("lax.psum(", "(").replace('["down"], "tp")', '["down"])')
    assert "psum(" not in forgot
    with pytest.raises(ValueError, match=r"varies over 'tp'.*lax\.psum"):
        exec(compile(forgot, "README.md", "exec"), {})


@pytest.mark.applications("notebook")
def test_the_tour_goes_on_with_real_ranks():
    tour, notebook = blocks("python")
    exec(compile(f"{tour}\n{notebook}", "README.md", "exec"), {})


def test_is_short():
    assert len(README.splitlines()) < 150


def test_commands_are_one_line_each():
    commands = blocks("bash")
    assert [len(command.splitlines()) for command in commands] == [1, 1]
    assert "functron train" in commands[0]
    assert "functron sample" in commands[0]


def test_ci_runs_the_second_command():
    """CI types the commands of the README."""
    ci = (ROOT / ".ci" / "run").read_text()
    for part in blocks("bash")[1].strip().split(" && "):
        assert part in ci


def test_links_and_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    named = re.findall(r"`((?:functron|notebooks|examples|benchmarks|tests)/[^`]*)`", README)
    assert links
    assert named
    assert [path for path in links + named if not (ROOT / path).exists()] == []
