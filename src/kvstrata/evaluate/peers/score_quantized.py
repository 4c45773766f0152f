"""transformers' QuantizedCache: the context is coded when it has been read."""

from typing import Any

from scoring import Scorer, storages  # pyright: ignore[reportMissingImports]

AXIS = {"quanto": 0, "hqq": 1}  # of groups, as transformers' documentation sets it for each


class Quantized(Scorer):  # pyright: ignore[reportUntypedBaseClass]
    """transformers' own caches."""

    def prefill(self, ids: list[int]) -> Any:
        """Read a context into an uncompressed cache."""
        cache = self.transformers.DynamicCache(config=self.model.config)
        self.feed(ids, cache, 0)
        return cache

    def copy(self, cache: Any) -> Any:
        """A cache that codes what was read: a coded one cannot be copied."""
        if self.job.get("full"):
            return super().copy(cache)
        axis = AXIS[self.job["backend"]]
        options = {"nbits": int(self.job["bits"]), "axis_key": axis, "axis_value": axis}
        coded = self.transformers.QuantizedCache(self.job["backend"], self.model.config, **options)
        for index, layer in enumerate(cache.layers):
            coded.update(layer.keys, layer.values, index)
        return coded

    def held(self, cache: Any) -> int:
        """Bytes of codes, grids and the newest entries, which stay as they are."""
        return sum(self._bytes(vars(layer)) for layer in cache.layers)

    def _bytes(self, thing: Any) -> int:
        if isinstance(thing, self.torch.Tensor):
            parts = getattr(thing, "__tensor_flatten__", None)
            return sum(self._bytes(getattr(thing, name)) for name in parts()[0]) if parts else storages(thing)
        if isinstance(thing, dict):
            thing = list(thing.values())
        return sum(self._bytes(value) for value in thing) if isinstance(thing, list | tuple) else 0


if __name__ == "__main__":
    Quantized().run()
