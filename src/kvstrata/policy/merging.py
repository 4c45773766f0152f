"""What becomes of values that are dropped: rules that add them to entries that stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvstrata.core import Column, Merges, Signals, SpecError, Tier
from kvstrata.policy.chance import uniform
from kvstrata.registry import Registry

MERGES: Registry[type] = Registry("merge")
AT_ONCE = 1 << 22  # similarities held at once


class Merging(Protocol):
    """Adds entries that a plan drops to others. A frozen value without state; what it must remember is in columns."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional signals that it reads."""
        ...

    @property
    def columns(self) -> tuple[Column, ...]:
        """State per entry."""
        ...

    @property
    def of_attention(self) -> bool:
        """Whether scores must be attention."""
        ...

    def merges(self, z: Tensor, stays: Tensor, signals: Signals) -> tuple[Merges | None, Mapping[str, Tensor]]:
        """What is added to what where scores are z [B, 1|H, N] and `stays` [B, 1|H, N] bool stay, and new columns."""
        ...


@MERGES.add("cam")
@dataclass(frozen=True, slots=True)
class IntoNext:
    """A dropped value is added to the next `window` entries that stay, in equal parts, or to none (CaM, ICML 2024).

    The chance is its score over the largest of those that are protected, or over their mean, at most 1: so scores must
    be attention. Keys stay as they are. Draws are seeded by (seed, layer, step, head, position).
    """

    window: int = 32
    against: Literal["max", "mean"] = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise SpecError(f"window={self.window}: merge into at least one entry")

    needs = frozenset[str]()
    columns = ()
    of_attention = True

    def merges(self, z: Tensor, stays: Tensor, signals: Signals) -> tuple[Merges | None, Mapping[str, Tensor]]:
        """See `Merging`."""
        position = signals.position.expand(stays.shape).contiguous()
        into = stays & _exact(signals)
        head = torch.arange(stays.shape[1], device=z.device)[:, None]
        draw = uniform(position, self.seed, signals.layer, signals.step, head)
        chosen = signals.valid & ~stays & (draw < self._chance(z.expand(stays.shape), stays, signals))
        last = torch.iinfo(position.dtype).max
        ranked, order = position.masked_fill(~into, last).sort(dim=-1)
        row, head, source = chosen.nonzero().unbind(1)
        first = torch.searchsorted(ranked, position)[row, head, source]
        count = (into.sum(dim=-1)[row, head] - first).clamp_(0, self.window)
        pair = torch.arange(self.window, device=z.device) < count[:, None]
        each, step = pair.nonzero().unbind(1)
        row, head = row[each], head[each]
        target = order[row, head, first[each] + step]
        return Merges(row, head, source[each], target, count[each].float().reciprocal()), {}

    def _chance(self, z: Tensor, stays: Tensor, signals: Signals) -> Tensor:
        """How likely each entry [B, 1|H, N] is merged. Everything that stays counts where nothing is protected."""
        protected = (signals.protected & signals.valid).expand(z.shape)
        counted = torch.where(protected.any(dim=-1, keepdim=True), protected, stays)
        if self.against == "max":
            reference = z.masked_fill(~counted, -math.inf).amax(dim=-1, keepdim=True)
        else:
            total = z.masked_fill(~counted, 0.0).sum(dim=-1, keepdim=True)
            reference = total / counted.sum(dim=-1, keepdim=True).clamp_min(1)
        return (z / reference).nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp_(0.0, 1.0)


THRESHOLD = Column("threshold", torch.float32)  # 2 + tau, the same in all of a row and head; 0 while there is none


@MERGES.add("d2o")
@dataclass(frozen=True, slots=True)
class IntoNearest:
    """A dropped entry is merged into the one that stays with the most similar key, if it is similar enough (D2O).

    Similar enough is a cosine of tau or more. At the first drop tau is the mean over what is dropped, then at each
    step beta of the largest cosine and 1 - beta of what tau was (arXiv:2406.13035, section 4.2). Keys and values become
    means with weights e for what stays and e^cosine for what is merged into it. Heads that share their tokens take the
    mean of their cosines.
    """

    beta: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise SpecError(f"beta={self.beta}: give the weight of the newest cosine, 0 to 1")

    needs = frozenset({"keys"})
    columns = (THRESHOLD,)
    of_attention = False

    def merges(self, z: Tensor, stays: Tensor, signals: Signals) -> tuple[Merges | None, Mapping[str, Tensor]]:
        """See `Merging`."""
        gone = signals.valid & ~stays
        count = gone.sum(dim=-1)
        sources = gone.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : int(count.max())]
        real = torch.arange(sources.shape[-1], device=z.device) < count[..., None]
        cosine, target = _nearest(signals, sources, stays & _exact(signals))
        real &= cosine >= -1.0  # there is something to merge into
        old = signals.columns[THRESHOLD.name].masked_fill(~signals.valid, 0.0).amax(dim=-1)
        tau = self._threshold(cosine, real, old - 2.0, old > 0)
        merged = real & (cosine >= tau[..., None])
        part = cosine.exp() * merged
        total = torch.full(stays.shape, math.e, device=z.device).scatter_add_(-1, target, part)
        row, head, place = merged.nonzero().unbind(1)
        at = target[row, head, place]
        weight = part[row, head, place] / total[row, head, at]
        pairs = Merges(row, head, sources[row, head, place], at, weight, mean=True, keys=True)
        new = torch.where(real.any(dim=-1), tau + 2.0, old)
        return pairs, {THRESHOLD.name: new[..., None].expand(stays.shape)}

    def _threshold(self, cosine: Tensor, real: Tensor, old: Tensor, known: Tensor) -> Tensor:
        """tau [B, 1|H] from the cosines [B, 1|H, E] of what is dropped, and from the old one where it is known."""
        mean = cosine.masked_fill(~real, 0.0).sum(dim=-1) / real.sum(dim=-1).clamp_min(1)
        best = cosine.masked_fill(~real, -1.0).amax(dim=-1) if cosine.shape[-1] else mean
        return torch.where(known, self.beta * best + (1 - self.beta) * old, mean)


def _nearest(signals: Signals, sources: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine of each source [B, 1|H, E] with the nearest of `into` [B, 1|H, N], -inf where none is; and its slot."""
    assert signals.keys is not None
    unit = normalize(signals.keys.float(), dim=-1)
    if unit.shape[1] > into.shape[1]:  # heads that share their tokens
        unit = unit.transpose(1, 2).flatten(2)[:, None] * unit.shape[1] ** -0.5
    cosine, slot = torch.empty(sources.shape, device=unit.device), torch.zeros_like(sources)
    size = max(1, AT_ONCE // max(1, into.numel()))
    for start in range(0, sources.shape[-1], size):
        part = sources[..., start : start + size]
        keys = unit.gather(2, part[..., None].expand(*part.shape, unit.shape[-1]))
        alike = (keys @ unit.transpose(-1, -2)).nan_to_num_(nan=-1.0).clamp_(-1.0, 1.0)
        alike = alike.masked_fill_(~into[:, :, None], -math.inf)
        cosine[..., start : start + size], slot[..., start : start + size] = alike.max(dim=-1)
    return cosine, slot


def _exact(signals: Signals) -> Tensor:
    """[B, 1|H, N] bool: entries that can be merged into."""
    return signals.valid if signals.tier is None else signals.valid & (signals.tier == Tier.EXACT)
