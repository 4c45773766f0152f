"""Named things (scorers, presets, tasks): a dict that knows its kind and whose errors name the choices."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import TypeVar, cast

from kvstrata.core import SpecError

T = TypeVar("T")
S = TypeVar("S")
PLUGIN_GROUP = "kvstrata.plugins"


def unknown(kind: str, name: str, choices: Iterable[str]) -> SpecError:
    """Build the error for a name that does not exist: the nearest one first, then all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return SpecError(f"no {kind} named {name!r}.{hint} There are: {', '.join(names) or 'none'}")


class Registry(dict[str, T]):
    """A dict from name to thing. An unknown name first loads the plug-ins, then raises `SpecError`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, name: str) -> Callable[[S], S]:
        """Register what is decorated under `name`; it keeps its own type."""

        def register(thing: S) -> S:
            if name in self:
                raise SpecError(f"a {self.kind} named {name!r} exists already")
            self[name] = cast(T, thing)
            return thing

        return register

    def __missing__(self, name: str) -> T:
        load_plugins()
        if name in self:
            return self[name]
        raise unknown(self.kind, name, self)


_loaded: set[str] = set()


def load_plugins() -> None:
    """Call every installed `kvstrata.plugins` entry point once; each adds its own names to the registries."""
    for point in entry_points(group=PLUGIN_GROUP):
        if point.value not in _loaded:
            _loaded.add(point.value)
            point.load()()
