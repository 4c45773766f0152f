"""kvpress: a press compresses the prompt, then transformers decodes over what is left with sdpa."""

from importlib import import_module
from typing import Any

from protocol import read_job, serve  # pyright: ignore[reportMissingImports]


class KvPress:
    """transformers' own loop over a DynamicCache that a press has shortened."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        kvpress: Any = import_module("kvpress")
        torch.set_num_threads(job["threads"])
        self._torch, self._job, self._new_cache = torch, job, transformers.DynamicCache
        dtype = getattr(torch, job["dtype"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self._press = getattr(kvpress, job["press"])(compression_ratio=1 - job["share"])
        self._columns = len(job["ids"])
        self._cache, first = self.read()
        self._cache.batch_repeat_interleave(job["batch"])
        self.tokens = [first]

    def read(self) -> tuple[Any, int]:
        """Read and compress the prompt in one row. -> its cache, and the first token"""
        cache = self._new_cache()
        with self._press(self._model):
            return cache, self._feed(self._torch.tensor([self._job["ids"]]), cache, 0)

    def _feed(self, ids: Any, cache: Any, start: int) -> int:
        """Positions are those of the text, not of what is left of it. -> row 0's likeliest token"""
        positions = self._torch.arange(start, start + ids.shape[1])
        options = {"position_ids": positions[None], "cache_position": positions, "logits_to_keep": 1}
        with self._torch.no_grad():
            output = self._model(ids, past_key_values=cache, use_cache=True, **options)
        return int(output.logits[0, -1].argmax())

    def step(self) -> None:
        """Feed the newest token in every row."""
        ids = self._torch.tensor([[self.tokens[-1]]] * self._job["batch"])
        self.tokens.append(self._feed(ids, self._cache, self._columns))
        self._columns += 1

    def about(self) -> dict[str, Any]:
        """Bytes of keys and values as they are now."""
        taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        return {"cache_bytes": taken, "settings": {name: self._job[name] for name in ("press", "share")}}


if __name__ == "__main__":
    serve(KvPress, read_job(), ["kvpress", "transformers", "torch"])
