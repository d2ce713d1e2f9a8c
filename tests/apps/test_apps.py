"""Applications and the library: which knows none of them, and finds them by the names of settings."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from functron import apps
from functron.core.errors import list_plugins
from functron.data import IndexedWriter
from functron.models.family import families
from functron.training.config import configure, dump, load
from functron.training.data import open_samples

ROOT = Path(__file__).parents[2] / "functron"
NAMES = sorted(path.name for path in (ROOT / "apps").iterdir() if (path / "__init__.py").is_file())

MEGATRON = pytest.mark.applications("megatron")


@pytest.fixture
def data(tmp_path) -> str:
    with IndexedWriter(tmp_path / "x", np.uint16) as writer:
        for n in range(9):
            writer.add([n * k % 250 for k in range(30)])
    return str(tmp_path / "x")


def make_config(data: str, order: str):
    return configure(data=data, order=order, seq=8, global_batch=4, steps=5, seed=3)


@MEGATRON
def test_an_order_has_a_name_or_is_a_function(data, tmp_path, monkeypatch):
    """Of functron's table, of another distribution, or of one's own; files keep what was given."""
    target = apps.PLUGINS["functron.sample_orders"]["megatron"]
    entry = EntryPoint("mine", target, "functron.sample_orders")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    drawn = []
    for order in ("megatron", target, "mine"):
        (tmp_path / "config.toml").write_text(dump(make_config(data, order)))
        config = load(tmp_path / "config.toml")
        assert config.data.order == order
        drawn.append(open_samples(config).draw(np.arange(20))["tokens"])
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] == drawn[2]).all()
    plain = open_samples(make_config(data, "arithmetic")).draw(np.arange(20))["tokens"]
    assert not (drawn[0] == plain).all()
    with pytest.raises(ValueError, match=r"order: got 'megatro'; wanted a known one.*'megatron'"):
        make_config(data, "megatro")
    with pytest.raises(ValueError, match=r"log_names: got 'megatro'; wanted .*'megatron'"):
        configure(log_names="megatro")


@MEGATRON
def test_others_are_read_where_the_table_lacks_a_name(monkeypatch):
    target = apps.PLUGINS["functron.formats"]["megatron"]
    entry = EntryPoint("mine", target, "functron.formats")
    asked = []

    def entry_points(group):
        asked.append(group)
        return [entry] if group == "functron.formats" else []

    own = apps.load_plugins("functron.formats").keys()  # what they import looks for others
    assert "megatron" in own
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert apps.load_plugins("functron.formats", "megatron").keys() == own
    assert asked == []
    assert apps.load_plugins("functron.formats", "mine", "none").keys() == own | {"mine"}


@pytest.mark.applications("zoo")
def test_what_was_left_out_is_not_listed(monkeypatch):
    group = "functron.families"
    assert list_plugins(group) == apps.PLUGINS[group]
    assert list(families()) == ["gpt", *apps.PLUGINS[group]]
    missing = {"bert": "functron.apps.nowhere.bert:make_family", "t5": apps.PLUGINS[group]["t5"]}
    monkeypatch.setattr(apps, "PLUGINS", {group: missing})
    assert [*list_plugins(group)] == ["t5"]
    assert list_plugins("functron.no_such_group") == {}


@pytest.mark.parametrize("name", NAMES)
def test_the_library_goes_on_without_an_application(name, data, monkeypatch):
    """Its names are refused, and all else stays."""
    for module in [m for m in sys.modules if f"{m}.".startswith(f"functron.apps.{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(apps, name, raising=False)
    monkeypatch.setitem(sys.modules, f"functron.apps.{name}", None)
    for group, names in apps.PLUGINS.items():
        if name in names and group == "functron.sample_orders":
            with pytest.raises(ValueError, match=f"order: got '{name}', of functron/apps/{name}"):
                open_samples(make_config(data, name))
    assert open_samples(make_config(data, "arithmetic")).draw(np.arange(2))
