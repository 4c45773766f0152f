"""Which heads look things up: those that, where a passkey comes again, attend to where it stood (DuoAttention's idea).

DuoAttention (arXiv:2410.10819) trains a gate for each head on synthetic passkeys. Here nothing is trained: random
tokens stand in a text and come again at its end, and a head is worth the attention that it then gives to the first
place. Heads that look back are kept whole, the others stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.hf import StrataCache, compress
from kvstrata.hf.compat import CACHE_KEYWORD, text_config
from kvstrata.policy import parse_policy

KEY = 12  # tokens of a passkey: with what comes before, few enough to be decoded in one forward
DEPTHS = (0.2, 0.5, 0.8)  # where it stands
REST = Fraction(1, 4)  # of the share kept over all heads, that a streaming head keeps


@torch.no_grad()
def looking_back(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> Tensor:
    """Attention [L, H] that each head gives, on average, to a passkey's first place where it comes again."""
    draw = torch.Generator().manual_seed(seed)
    vocabulary, policy = text_config(model).vocab_size, parse_policy("h2o:budget=100%")
    found: list[Tensor] = []
    for ids in documents:
        for depth in DEPTHS:
            key = torch.randint(vocabulary, (KEY,), generator=draw)
            place = int(depth * len(ids))
            text = torch.cat([torch.tensor(ids[:place]), key, torch.tensor(ids[place:])]).to(model.device)
            with compress(model, policy) as cache:
                _read(model, text, cache)
                before = [layer.store.column("mass").clone() for layer in cache.strata.values()]
                _read(model, key.to(model.device), cache)
                here = slice(place + 1, place + KEY + 1)  # a head that looks back reads what came next
                after = [layer.store.column("mass") for layer in cache.strata.values()]
                gained = [new[0, :, here].cpu() - old[0, :, here].cpu() for new, old in zip(after, before, strict=True)]
                found.append(torch.stack([of_layer.sum(dim=-1) for of_layer in gained]) / KEY)
        tick()
    return torch.stack(found).mean(dim=0)


def _read(model: PreTrainedModel, ids: Tensor, cache: StrataCache) -> None:
    cast(Any, model)(ids[None], logits_to_keep=1, **{CACHE_KEYWORD: cache})


def shares_of(worth: Tensor, share: Fraction) -> list[list[float]]:
    """What each head [L, H] keeps where all keep `share`: the best everything, the others an equal rest."""
    heads = worth.numel()
    whole = int(heads * share * (1 - REST) / (1 - share * REST))
    rest = (heads * share - whole) / (heads - whole) if whole < heads else Fraction(1)
    kept = torch.full((heads,), float(rest))
    kept[worth.flatten().argsort(descending=True, stable=True)[:whole]] = 1.0
    return kept.view(worth.shape).tolist()
