"""What echo costs at a prompt: time spent asking and choosing, as a share of the rest of the same prefill.

python benchmarks/echo_cost.py [--tokens 2000] [--rounds 5] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

import kvstrata
from kvstrata.cache import cache as engine
from kvstrata.cache.asking import Asking
from kvstrata.evaluate.texts import novel
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.models import load_model


def timed(owner: object, name: str, spent: list[float]) -> None:
    """Add the time of every call of owner.name to `spent`."""
    call = getattr(owner, name)

    def measured(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - start)

    setattr(owner, name, measured)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model")
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, None, "cpu")
    ids = tokenizer(novel(), return_tensors="pt").input_ids[:, : options.tokens]
    asking: list[float] = []
    choosing: list[float] = []
    timed(Asking, "note", asking)
    timed(engine, "settle_together", choosing)
    shares: list[tuple[float, float, float]] = []
    for _ in range(options.rounds):
        asking.clear(), choosing.clear()
        start = time.perf_counter()
        with kvstrata.compress(model, "echo:budget=25%") as cache:
            model(ids, logits_to_keep=1, **{CACHE_KEYWORD: cache})
        whole = time.perf_counter() - start
        rest = whole - sum(asking) - sum(choosing)
        shares.append((rest, sum(asking) / rest, sum(choosing) / rest))
    rest, asked, chosen = (median(column) for column in zip(*shares, strict=True))
    print(
        f"prefill of {options.tokens} tokens {rest:.2f} s; asking {asked:.1%} of it, choosing and freeing {chosen:.1%}"
    )


if __name__ == "__main__":
    main()
