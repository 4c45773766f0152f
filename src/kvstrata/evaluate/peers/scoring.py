"""What a peer's script does with a job; it runs in an environment of its own, so it knows nothing of kvstrata.

A script gives `prefill(ids) -> cache` and `held(cache) -> bytes`; this file asks the questions and feeds the steps.
"""

import copy
import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any


class Scorer:
    """A model of the job, and what is common to the peers."""

    def __init__(self) -> None:
        with open(sys.argv[1], encoding="utf-8") as file:
            self.job: dict[str, Any] = json.load(file)
        self.torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self.torch.set_num_threads(self.job["threads"])
        dtype = getattr(self.torch, self.job["dtype"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.job["model"], dtype=dtype).eval()
        self.transformers = transformers
        names = (*self.job["packages"], "transformers", "torch")
        self.where = ", ".join([*(f"{n} {version(n)}" for n in names), f"{self.job['threads']} threads"])
        self.answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever a library prints

    def prefill(self, ids: list[int]) -> Any:
        """Read a context and compress it."""
        raise NotImplementedError

    def copy(self, cache: Any) -> Any:
        """A compressed cache of its own for every question."""
        return copy.deepcopy(cache)

    def held(self, cache: Any) -> int:
        """Bytes of keys and values in a cache."""
        return sum(storages(layer.keys, layer.values) for layer in cache.layers)

    def feed(self, ids: list[int], cache: Any, start: int) -> Any:
        """Feed tokens at positions from `start`. -> logits [Q, V]"""
        positions = self.torch.arange(start, start + len(ids))
        with self.torch.no_grad():  # without cache_position: a mask made of it would show a shortened cache the future
            output = self.model(
                self.torch.tensor([ids]), position_ids=positions[None], past_key_values=cache, use_cache=True
            )
        return output.logits[0]

    def scored(self, logits: Any, answer: list[int]) -> tuple[list[float], list[bool]]:
        """Nats and hits of the tokens of an answer under logits [A, V]."""
        log_probs = logits.float().log_softmax(dim=-1)
        target = self.torch.tensor(answer)
        return (-log_probs.gather(1, target[:, None])[:, 0]).tolist(), (log_probs.argmax(-1) == target).tolist()

    def token_bytes(self) -> int:
        """Bytes of one token in an uncompressed cache."""
        cache = self.transformers.DynamicCache()
        self.feed([1], cache, 0)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def run(self) -> None:
        """Answer every example of the job."""
        token = self.token_bytes()
        for example in self.job["examples"]:
            start = time.perf_counter()
            cache = self.prefill(example["context"])
            took, length = time.perf_counter() - start, len(example["context"])
            compressed = self.copy(cache)
            held, ms = self.held(compressed), None
            if self.job["kind"] == "probes":
                answers = [self.ask(self.copy(cache), probe, length) for probe in example["probes"]]
                full = token * length
            else:
                answers, held, ms = self.steps(compressed, example["continuation"], length)
                full = token * (length + len(example["continuation"]) // 2)
            line = {"answers": answers, "held": held, "full": full, "prefill_s": took, "ms_per_token": ms}
            line = {**line, "where": self.where}
            self.answers.write(json.dumps(line) + "\n")
            self.answers.flush()

    def ask(self, cache: Any, probe: dict[str, list[int]], length: int) -> tuple[list[float], list[bool]]:
        """Question and answer in one forward."""
        logits = self.feed(probe["question"] + probe["answer"][:-1], cache, length)
        return self.scored(logits[-len(probe["answer"]) :], probe["answer"])

    def steps(self, cache: Any, ids: list[int], length: int) -> tuple[list[Any], int, float]:
        """A continuation token by token. -> one answer, mean bytes held, median ms"""
        logits, held, ms = [], [], []
        for i, token in enumerate(ids[:-1]):
            start = time.perf_counter()
            logits.append(self.feed([token], cache, length + i)[-1])
            ms.append((time.perf_counter() - start) * 1e3)
            held.append(self.held(cache))
        answer = self.scored(self.torch.stack(logits), ids[1:])
        return [answer], round(sum(held) / len(held)), sorted(ms)[len(ms) // 2]


def storages(*tensors: Any) -> int:
    """Bytes of the storages under tensors, each once: a view keeps all that it was cut from."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())
