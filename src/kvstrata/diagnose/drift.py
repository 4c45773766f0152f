"""What a policy will miss, what comes back to life, and how restless its choice is.

Definitions of QEvict's metric code: sinks and tokens that are not there yet do not count. Units are windows of
`window` tokens after the sinks; a unit is kept where at least half of it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstrata.core import Tier
from kvstrata.diagnose.traces import Trace


@dataclass(frozen=True, slots=True)
class Band:
    """Which units compete: complete windows after `sinks` tokens and before the newest `local` ones."""

    sinks: int = 5
    local: int = 32
    window: int = 8

    def numbers(self, trace: Trace, event: int, tail: bool) -> range:
        """Numbers of the windows that are complete at an event, with the newest tokens' or without."""
        seen = trace.prompt + int(trace.events[event])
        end = seen - self.sinks - (0 if tail else self.local)
        return range(max(0, end) // self.window)

    def by_window(self, x: Tensor, windows: int) -> Tensor:
        """x [..., T] -> [..., windows, window]."""
        return x[..., self.sinks : self.sinks + windows * self.window].unflatten(-1, (windows, self.window))


def future_missed_mass(trace: Trace, horizon: int = 32, sinks: int = 5) -> float:
    """FMM: of the attention that a full cache gives in the next `horizon` steps to what is there at an event, the
    share that the policy can no longer read: a head's own queries ask what that head keeps, so a token that others
    keep is missed. The mean over events with as many steps after them; NaN without any.
    """
    shares: list[Tensor] = []
    for kept, event in zip(trace.kept, trace.events.tolist(), strict=True):
        if event + horizon > len(trace.mass):
            continue
        there = trace.born <= event
        there[:sinks] = False
        coming = trace.mass[event : event + horizon].sum(dim=0)
        shares.append((coming * (there & ~kept)).sum() / (coming * there).sum())
    return float(torch.stack(shares).nanmean()) if shares else float("nan")


def churn(trace: Trace, band: Band, tail: bool = False, exact: bool = False) -> float:
    """1 - |S and S'| / |S or S'| over consecutive events, S the kept (or exact) windows; the mean over pairs."""
    found: list[float] = []
    for event in range(len(trace.events) - 1):
        before, after = (_selected(trace, band, e, tail, exact) for e in (event, event + 1))
        union = len(before | after)
        found.append(1 - len(before & after) / union if union else 0.0)
    return sum(found) / len(found) if found else float("nan")


def _selected(trace: Trace, band: Band, event: int, tail: bool, exact: bool) -> set[int]:
    count = len(band.numbers(trace, event, tail))
    kept = trace.tier[event] >= (Tier.EXACT if exact else Tier.INT2)
    half = band.by_window(kept, count).float().mean(dim=-1) >= 0.5
    return set(half.nonzero().flatten().tolist())


class Episodes(NamedTuple):
    """How many runs of being left out were long enough to count, and how many of them ended in coming back."""

    eligible: int
    rescued: int

    @property
    def rate(self) -> float:
        """Their ratio; NaN where none counts."""
        return self.rescued / self.eligible if self.eligible else float("nan")


def reactivation(chosen: Tensor, least: int = 4, horizon: int | None = 8) -> Episodes:
    """Global LIR of chosen [R, W] int8: 1 selected, 0 left out, -1 not competing, at every event.

    An episode is a longest run of 0; it counts once it is `least` events long, if `horizon` more events are there, and
    is rescued if a 1 comes within them (`horizon` None: ever).
    """
    events, eligible, rescued = len(chosen), 0, 0
    for line in chosen.T.tolist():
        start = None
        for at, state in enumerate([*line, -1]):
            if state == 0 and start is None:
                start = at
            elif state != 0 and start is not None:
                reached = start + least - 1  # the event at which it is long enough
                if at - start >= least and (horizon is None or reached + horizon < events):
                    eligible += 1
                    rescued += state == 1 and (horizon is None or at <= reached + horizon)
                start = None
    return Episodes(eligible, rescued)


def chosen_exact(trace: Trace, band: Band) -> Tensor:
    """[R, W] what the policy keeps exact."""
    return _chosen(trace, band, lambda event, count: _selected(trace, band, event, False, True))


def chosen_oracle(trace: Trace, band: Band) -> Tensor:
    """[R, W] the windows with most attention of a full cache so far, as many as the policy keeps exact."""
    before = torch.cat([trace.before[None], trace.before + trace.mass.mean(dim=1).cumsum(dim=0)])

    def best(event: int, count: int) -> set[int]:
        wanted = len(_selected(trace, band, event, False, True))
        score = band.by_window(before[int(trace.events[event])], count).sum(dim=-1)
        return set(score.topk(min(wanted, count)).indices.tolist())

    return _chosen(trace, band, best)


def _chosen(trace: Trace, band: Band, choose: Callable[[int, int], set[int]]) -> Tensor:
    most = len(band.numbers(trace, len(trace.events) - 1, False))
    table = torch.full((len(trace.events), most), -1, dtype=torch.int8)
    for event in range(len(trace.events)):
        count = len(band.numbers(trace, event, False))
        table[event, :count] = 0
        table[event, sorted(choose(event, count))] = 1
    return table
