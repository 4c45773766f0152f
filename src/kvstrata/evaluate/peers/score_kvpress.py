"""kvpress: a press compresses the context, then transformers reads on."""

from importlib import import_module
from typing import Any

from scoring import Scorer  # pyright: ignore[reportMissingImports]


class KvPress(Scorer):  # pyright: ignore[reportUntypedBaseClass]
    """transformers' DynamicCache, shortened by a press; without one for the option `full`."""

    def prefill(self, ids: list[int]) -> Any:
        """Read a context under the press."""
        cache = self.transformers.DynamicCache()
        if self.job.get("full"):
            self.feed(ids, cache, 0)
            return cache
        press = getattr(import_module("kvpress"), self.job["press"])(compression_ratio=1 - self.job["share"])
        with press(self.model):
            self.feed(ids, cache, 0)
        return cache


if __name__ == "__main__":
    KvPress().run()
