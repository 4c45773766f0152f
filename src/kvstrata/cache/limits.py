"""How much a layer may keep: what its rule's budget says, and the layer's share of that where layers divide it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstrata.core import PROMPT, LayerShape
from kvstrata.policy.policy import Rule
from kvstrata.policy.preference import SHARE
from kvstrata.store import LayerStore

Limits = list[tuple[int, ...]]  # per row, one or one per head


def limits_of(
    store: LayerStore, rule: Rule, real: list[int], confidence: list[float] | None, shape: LayerShape
) -> Limits:
    """Entries that each row may keep of the `real` tokens it has seen, those of its prompts if they stay anyway."""
    if rule.protect.prompt:
        prompts = _prompts(store)
        generated = [n - prompt for n, prompt in zip(real, prompts, strict=True)]
        pairs = zip(rule.limits(generated, confidence, shape), prompts, strict=True)
        return [tuple(n + prompt for n in caps) for caps, prompt in pairs]
    found, divided = rule.limits(real, confidence, shape), rule.divided
    if divided is None or not store.width:
        return found
    noted: list[float] = store.column(SHARE.name).flatten(1).amax(dim=1).tolist()
    pairs = zip(found, (one - 1 if one else 1.0 for one in noted), strict=True)
    return [tuple(divided.shared(mean, share) for mean in caps) for caps, share in pairs]


def guarding(store: LayerStore, rule: Rule, limits: Limits, real: list[int], shape: LayerShape) -> Limits:
    """What protected tokens scale with: the limits, or their mean over layers where each has as many of its own.

    Where prompts stay anyway, what is left for other tokens.
    """
    if rule.protect.prompt:
        return [tuple(n - prompt for n in caps) for caps, prompt in zip(limits, _prompts(store), strict=True)]
    return rule.limits(real, None, shape) if rule.divided and rule.divided.own else limits


def _prompts(store: LayerStore) -> list[int]:
    """Entries of each row that came in a prompt."""
    return (store.column(PROMPT.name)[:, 0] > 0).sum(dim=-1).tolist()


def note_shares(store: LayerStore, shares: Sequence[float], known: Sequence[bool]) -> None:
    """Keep the layer's share of a budget, one number per row, beside its entries; of other rows what was noted."""
    column = store.column(SHARE.name)
    each = torch.tensor(shares, dtype=column.dtype, device=column.device) + 1
    old = column.masked_fill(~store.valid(), 0.0).amax(dim=(1, 2)) if column.shape[2] else torch.zeros_like(each)
    each = each.where(torch.tensor(known, device=column.device), old)
    store.set_column(SHARE.name, each[:, None, None].expand(column.shape))


def exceeds(store: LayerStore, rule: Rule, limits: Limits) -> bool:
    """Whether some row or head holds more than it may."""
    heads = store.segment_heads
    return any(
        sum(lengths) > sum(caps) * heads // len(caps)
        if rule.granularity.sums
        else any(n > caps[head % len(caps)] for head, n in enumerate(lengths))
        for lengths, caps in zip(store.lengths(), limits, strict=True)
    )
