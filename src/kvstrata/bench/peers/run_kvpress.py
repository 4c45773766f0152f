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
        self._torch, self._job = torch, job
        dtype = getattr(torch, job["dtype"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        self._cache = transformers.DynamicCache()
        press = getattr(kvpress, job["press"])(compression_ratio=1 - job["share"])
        self._columns = len(job["ids"])
        with torch.no_grad(), press(self._model):
            self._feed(torch.tensor([job["ids"]]), 0)
        self._cache.batch_repeat_interleave(job["batch"])
        self.tokens = self.tokens[:1]

    def _feed(self, ids: Any, start: int) -> None:
        """Positions are those of the text, not of what is left of it."""
        positions = self._torch.arange(start, start + ids.shape[1])
        options = {"position_ids": positions[None], "cache_position": positions, "logits_to_keep": 1}
        output = self._model(ids, past_key_values=self._cache, use_cache=True, **options)
        self.tokens = [*getattr(self, "tokens", []), int(output.logits[0, -1].argmax())]

    def step(self) -> None:
        """Feed the newest token in every row."""
        with self._torch.no_grad():
            self._feed(self._torch.tensor([[self.tokens[-1]]] * self._job["batch"]), self._columns)
        self._columns += 1

    def about(self) -> dict[str, Any]:
        """Bytes of keys and values as they are now."""
        taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        return {"cache_bytes": taken, "settings": {name: self._job[name] for name in ("press", "share")}}


if __name__ == "__main__":
    serve(KvPress, read_job(), ["kvpress", "transformers", "torch"])
