"""transformers' QuantizedCache, which codes with quanto or hqq and decodes everything at every step."""

from importlib import import_module
from typing import Any

from protocol import read_job, serve  # pyright: ignore[reportMissingImports]

AXIS = {"quanto": 0, "hqq": 1}  # of groups, as transformers' documentation sets it for each


class Quantized:
    """One row is read into transformers' own cache; all rows are coded from it."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        torch.set_num_threads(job["threads"])
        self._torch, self._transformers, self._job = torch, transformers, job
        dtype = getattr(torch, job["dtype"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self._cache, token = self._prefilled(job["batch"])
        self.tokens = [token]
        first = self._cache.layers[0]
        first._dequantize(first._quantized_keys)  # quanto compiles what it needs when it is first asked

    def read(self) -> tuple[Any, int]:
        """Read and code the prompt in one row. -> its cache, and the first token"""
        return self._prefilled(1)

    def _prefilled(self, rows: int) -> tuple[Any, int]:
        backend, config = self._job["backend"], self._model.config
        plain = self._transformers.DynamicCache(config=config)
        token = self._feed(self._torch.tensor([self._job["ids"]]), plain)
        options = {"nbits": int(self._job["bits"]), "axis_key": AXIS[backend], "axis_value": AXIS[backend]}
        cache = self._transformers.QuantizedCache(backend, config, **options)
        for index, layer in enumerate(plain.layers):
            keys, values = (x.repeat(rows, 1, 1, 1) for x in (layer.keys, layer.values))
            cache.update(keys, values, index)
        return cache, token

    def _feed(self, ids: Any, cache: Any) -> int:
        """-> row 0's likeliest token"""
        with self._torch.no_grad():
            output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def step(self) -> None:
        """Feed the newest token in every row."""
        ids = self._torch.tensor([[self.tokens[-1]]] * self._job["batch"])
        self.tokens.append(self._feed(ids, self._cache))

    def about(self) -> dict[str, Any]:
        """Bytes of codes, grids and the newest entries, which stay as they are."""
        taken = sum(_bytes(vars(layer), self._torch) for layer in self._cache.layers)
        return {"cache_bytes": taken, "settings": {name: self._job[name] for name in ("backend", "bits")}}


def _bytes(thing: Any, torch: Any) -> int:
    """Of all tensors in nested containers, quantized ones by their parts."""
    if isinstance(thing, torch.Tensor):
        parts = getattr(thing, "__tensor_flatten__", None)
        return sum(_bytes(getattr(thing, name), torch) for name in parts()[0]) if parts else thing.nbytes
    if isinstance(thing, dict):
        thing = list(thing.values())
    return sum(_bytes(value, torch) for value in thing) if isinstance(thing, list | tuple) else 0


if __name__ == "__main__":
    serve(Quantized, read_job(), ["transformers", "optimum-quanto", "hqq", "torch"])
