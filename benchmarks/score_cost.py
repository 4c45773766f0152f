"""What scoring costs: time in echo, or in KVzap's surrogate, as a share of the rest of a prefill and of a decode step.

python benchmarks/score_cost.py [--tokens 2000] [--rounds 5] [--steps 8] [--model FOLDER] [POLICY ...]
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
from kvstrata.policy.surrogate import SurrogateModel

POLICIES = ["echo:budget=25%", "kvzap:file=linear,budget=25%", "kvzap:file=mlp,budget=25%"]


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
    parser.add_argument("--steps", type=int, default=8, help="of decoding, in each round")
    parser.add_argument("--model")
    parser.add_argument("policy", nargs="*", default=POLICIES)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, None, "cpu")
    ids = tokenizer(novel(), return_tensors="pt").input_ids[:, : options.tokens + options.steps]
    scoring: list[float] = []
    choosing: list[float] = []
    timed(Asking, "note", scoring)
    timed(SurrogateModel, "__call__", scoring)
    timed(engine, "settle_together", choosing)

    def share(cache: object, part: torch.Tensor) -> tuple[float, float, float]:
        """Of one forward: seconds without scoring and choosing, and the shares of these two of that."""
        scoring.clear(), choosing.clear()
        start = time.perf_counter()
        model(part, logits_to_keep=1, **{CACHE_KEYWORD: cache})
        rest = time.perf_counter() - start - sum(scoring) - sum(choosing)
        return rest, sum(scoring) / rest, sum(choosing) / rest

    shares: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for _ in range(options.rounds):
        for policy in options.policy:
            with kvstrata.compress(model, policy) as cache:
                found = share(cache, ids[:, : options.tokens])
                shares.setdefault((policy, "prefill"), []).append(found)
                steps = [share(cache, ids[:, i : i + 1]) for i in range(options.tokens, ids.shape[1])]
                shares.setdefault((policy, "step"), []).append(tuple(map(median, zip(*steps, strict=True))))
    for (policy, phase), rows in shares.items():
        rest, scored, chosen = (median(column) for column in zip(*rows, strict=True))
        print(f"{policy}: {phase} {rest * 1e3:.1f} ms; scoring {scored:.2%} of it, choosing and freeing {chosen:.2%}")


if __name__ == "__main__":
    main()
