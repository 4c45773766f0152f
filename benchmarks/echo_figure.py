"""A picture of echo: what it scores along a context with facts in it, and how much each head keeps.

python benchmarks/echo_figure.py OUT.png [--tokens 1900] [--budget 25%]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import kvstrata
from kvstrata.evaluate.figures import figure
from kvstrata.evaluate.task import Settings
from kvstrata.evaluate.tasks.needles import needle
from kvstrata.files import whole
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.models import load_model
from kvstrata.policy.scorers.repeat import ASKED


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--budget", default="25%")
    options = parser.parse_args()
    model, tokenizer = load_model(None, None, "cpu")
    example = needle(tokenizer, 1, options.tokens, Settings())[0]
    ids = torch.tensor([example.context])
    with kvstrata.compress(model, "echo:budget=100%") as cache:
        model(ids, logits_to_keep=1, **{CACHE_KEYWORD: cache})
        scores = torch.stack([layer.store.column(ASKED.name)[0] for layer in cache.strata.values()])  # [L, H, T]
    with kvstrata.compress(model, f"echo:budget={options.budget}") as cache:
        model(ids, logits_to_keep=1, **{CACHE_KEYWORD: cache})
        kept = torch.tensor([layer.store.lengths()[0] for layer in cache.strata.values()]) / ids.shape[1]
    fig = figure(figsize=(11, 6))
    top, bottom = fig.subplots(2, 1)
    rank = scores.flatten(0, 1).argsort(dim=-1).argsort(dim=-1).float().mean(dim=0) / ids.shape[1]
    top.plot(rank.tolist(), linewidth=0.6)
    for probe in example.probes:
        answer = probe.answer[:6]
        places = [i for i in range(len(example.context)) if example.context[i : i + len(answer)] == answer]
        for place in places:
            top.axvspan(place - 2, place + len(probe.answer) + 2, color="tab:orange", alpha=0.4)
    top.set(
        xlabel="position", ylabel="mean rank over heads", title="echo's score; facts in orange", xlim=(0, ids.shape[1])
    )
    image = bottom.imshow(kept.T.tolist(), aspect="auto", vmin=0, vmax=1)
    bottom.set(xlabel="layer", ylabel="key-value head", title=f"share kept at {options.budget} over all heads")
    fig.colorbar(image)
    with whole(options.out) as scratch:
        fig.savefig(scratch, dpi=110, format="png")


if __name__ == "__main__":
    main()
