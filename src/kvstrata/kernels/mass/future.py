"""Attention that queries which are yet to come can be expected to give, from those that came."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.kernels.mass.ref import ALL_ROWS

TOGETHER = 64  # positions whose rotations are made at once


@dataclass(frozen=True, slots=True)
class Future:
    """The share of attention that a key gets from the next `positions` queries (arXiv:2510.00636, section 3).

    Queries before rotary positions are taken as normal, with the mean and covariance of those that came, and turned by
    the mean rotation of the positions to come. The first `sinks` tokens neither ask nor compete.
    """

    positions: int = 512
    sinks: int = 4
    rows: int = ALL_ROWS  # which queries it reads: all of them


def expected_mass(
    q: Tensor, k: Tensor, q_position: Tensor, k_position: Tensor, *, scale: float, rotary: Rotary, future: Future
) -> Tensor:
    """Mean over a group's query heads of the expected softmax, before it is normalised over what may be dropped.

    q [H*G, R, D] at q_position [R], k [h, N, D] at k_position [h, N], h = H, of one row -> [h, N] fp32.
    """
    asks = q_position >= future.sinks
    asks = asks if bool(asks.any()) else slice(None)
    turn = _mean_turn(rotary, int(q_position[-1]) + 1, future.positions, q.shape[-1], q.device)
    group, found = q.shape[0] // k.shape[0], torch.empty(k.shape[:2], device=q.device)
    for head, keys in enumerate(k):  # one by one, since each holds its queries and keys anew in fp32
        mean, covariance = moments(rotary.off(q[head * group : (head + 1) * group].float(), q_position)[:, asks])
        mean, covariance, keys = mean @ turn, turn.T @ covariance @ turn, keys.float()
        logits = mean @ keys.T * scale  # [G, N]
        logits += (keys @ covariance * keys).sum(dim=-1) * (scale * scale / 2)  # of a log-normal's mean
        logits = logits.masked_fill(k_position[head] < future.sinks, -torch.inf)
        found[head] = logits.softmax(dim=-1).mean(dim=0).nan_to_num_(0.0)  # no key but sinks
    return found


def moments(q: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, D] and covariance [H, D, D] of q [H, R, D] over R."""
    mean = q.mean(dim=1)
    centred = q - mean[:, None]
    return mean, centred.transpose(1, 2) @ centred / q.shape[1]


def _mean_turn(rotary: Rotary, first: int, positions: int, dim: int, device: torch.device) -> Tensor:
    """[D, D] such that x @ it is the mean of x [D] at positions first .. first + positions - 1."""
    total = torch.zeros(dim, dim, device=device)
    for start in range(0, positions, TOGETHER):
        at = torch.arange(first + start, first + min(start + TOGETHER, positions), device=device)
        units = torch.eye(dim, device=device).expand(len(at), dim, dim)
        total += rotary.on(units, at[:, None].expand(-1, dim)).sum(dim=0)
    return total / positions
