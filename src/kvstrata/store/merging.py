"""Entries added to others that stay, before they go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.core import Merges
from kvstrata.kernels import entries
from kvstrata.kernels.pages import PAGE
from kvstrata.store.account import Account
from kvstrata.store.coded import CodedTier
from kvstrata.store.exact import ExactTier

AT_ONCE = 1 << 14  # pairs whose sources are gathered together


def merge(exact: ExactTier, coded: Sequence[CodedTier], merges: Merges, account: Account) -> None:
    """Add sources, exact or coded, to exact targets, all by what they held before; sums are fp32.

    Pages that other users have are copied first. Raises `ValueError` where a target is not exact.
    """
    if not len(merges.target):
        return
    if bool((merges.target >= exact.width).any()):
        raise ValueError("entries are merged into exact ones only")
    places = torch.stack([merges.row, merges.head, merges.target], dim=1)
    segment, source, target = exact.by_segment(places, merges.source)
    weight = merges.weight.repeat_interleave(len(segment) // len(merges.weight))
    at, of = (segment * exact.width + target).unique(return_inverse=True)
    segments, slots = at // exact.width, at % exact.width
    _own(exact, segments, slots)
    k, v = (t.float() for t in entries.gather(exact.table.view(), segments, slots))
    account.note_copies(k.nbytes + v.nbytes)
    if merges.mean:
        left = torch.ones(len(at), device=weight.device).index_add_(0, of, -weight)[:, None]
        k, v = k * left, v * left
    for start in range(0, len(segment), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        of_k, of_v = _gathered(exact, coded, segment[part], source[part])
        v.index_add_(0, of[part], of_v.float() * weight[part, None])
        if merges.keys:
            k.index_add_(0, of[part], of_k.float() * weight[part, None])
    dtype = exact.table.arena.format.dtype
    entries.put(exact.table.view(), segments, slots, k.to(dtype) if merges.keys else None, v.to(dtype))


def _own(exact: ExactTier, segment: Tensor, slot: Tensor) -> None:
    """Let no page of these entries have other users."""
    table, arena = exact.table, exact.table.arena
    if not arena.has_shared:
        return
    written = sorted({*zip(segment.tolist(), (slot // PAGE).tolist(), strict=True)})
    if not any(arena.is_shared(table.pages[s][place]) for s, place in written):
        return
    if table.together:  # a page of its own would stand apart
        exact.unshare()
        return
    for s, place in written:
        table.own(s, [place])


def _gathered(exact: ExactTier, coded: Sequence[CodedTier], segment: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, D] and values of entries, exact or coded, each named by its kv segment and slot in the dense forms."""
    if not coded:
        return entries.gather(exact.table.view(), segment, slot)
    f = exact.table.arena.format
    k, v = (torch.empty(len(slot), dim, dtype=f.dtype, device=slot.device) for dim in (f.k_dim, f.v_dim))
    mine, offset = slot < exact.width, exact.width
    k[mine], v[mine] = entries.gather(exact.table.view(), segment[mine], slot[mine])
    for tier in coded:
        inside = (slot >= offset) & (slot < offset + tier.width)
        for s in segment[inside].unique().tolist():
            wanted = inside & (segment == s)
            at, place = (slot[wanted] - offset).unique(return_inverse=True)
            of_k, of_v = tier.at(s, at)
            k[wanted], v[wanted] = of_k[place], of_v[place]
        offset += tier.width
    return k, v
