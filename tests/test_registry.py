from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstrata import registry
from kvstrata.core import SpecError
from kvstrata.registry import Registry


@pytest.fixture
def plugins(monkeypatch):
    """A list of (value, callable) that stands for the installed entry points of this test."""
    installed = []

    def entry_points(group):
        assert group == "kvstrata.plugins"
        return [SimpleNamespace(value=value, load=lambda call=call: call) for value, call in installed]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_loaded", set())
    return installed


def words(*names):
    found = Registry("word")
    for name in names:
        found[name] = name.upper()
    return found


def test_what_is_added_is_found_and_left_as_it_was():
    found = Registry("word")

    @found.add("one")
    def one():
        return 1

    assert one() == 1
    assert found["one"] is one
    assert list(found) == ["one"]


def test_a_name_is_given_once(plugins):
    found = words("one")
    with pytest.raises(SpecError, match="a word named 'one' exists already"):
        found.add("one")("other")
    assert found["one"] == "ONE"


def test_an_unknown_name_gets_the_nearest_and_all_choices_in_order(plugins):
    with pytest.raises(SpecError) as caught:
        words("recency", "random", "keynorm")["recent"]
    assert str(caught.value) == ("no word named 'recent'. Did you mean 'recency'? There are: keynorm, random, recency")


def test_a_name_like_no_other_gets_the_choices_alone(plugins):
    with pytest.raises(SpecError) as caught:
        words("recency")["zzz"]
    assert str(caught.value) == "no word named 'zzz'. There are: recency"
    with pytest.raises(SpecError, match="There are: none"):
        Registry("word")["zzz"]


def test_plugins_load_on_the_first_unknown_name_and_once(plugins):
    found, calls = words("one"), []

    def register():
        calls.append("mine")
        found.add("two")("TWO")

    plugins.append(("my_lab:register", register))
    assert found["one"] == "ONE"
    assert calls == []
    assert found["two"] == "TWO"
    with pytest.raises(SpecError, match="There are: one, two"):
        found["three"]
    assert calls == ["mine"]


def test_every_plugin_is_called(plugins):
    found = words()
    plugins += [("a:register", lambda: found.add("a")(1)), ("b:register", lambda: found.add("b")(2))]
    registry.load_plugins()
    assert found == {"a": 1, "b": 2}


def test_asking_whether_a_name_exists_loads_nothing(plugins):
    plugins.append(("my_lab:register", lambda: pytest.fail("loaded")))
    found = words("one")
    assert "two" not in found
    assert found.get("two") is None
