"""Attention of a forward over what a store holds, segment by segment where lengths differ."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvstrata.cache.step import newest_queries
from kvstrata.core import UnsupportedModelError
from kvstrata.kernels.attention import Attended, Softmax, attend, attend_pages
from kvstrata.kernels.mass import (
    NUMBERS,
    Future,
    Moments,
    Reduction,
    Summing,
    column_moments,
    expected_mass,
    native,
    ref,
)
from kvstrata.store import Block, LayerStore

MOST_ROWS = 16  # queries of one forward up to which paged kernels serve; more are a prompt, which torch does better
MOST_OFF = 1.0  # nats that a correction takes off a score: sharp heads see a few keys, not their average


def attend_stored(
    store: LayerStore,
    q: Tensor,
    tokens: list[int],
    softmax: Softmax,
    reduction: Summing | None,
    own: Tensor | None,
    known: Tensor | None = None,
) -> Attended:
    """Return out [B, H*G, Q, Dv] and mass [B, H, N] of q [B, H*G, Q, D], whose own entries are the newest.

    Entries that the store has not written yet are written on the way. The last tokens[b] queries of each row are real;
    out is zero for the others. Mass is None without a reduction. `own` [B, Q, Q] bool replaces causality among the
    queries' own entries. `known` is out where it was made already, so that mass alone is left to make. lse [B, H*G, Q]
    is there where it costs nothing, as it does for prompts.
    """
    if known is not None and (own is None or reduction is None):
        store.flush()
        queries = newest_queries(q, tokens, reduction.rows) if reduction else []
        return Attended(known, None, mass_of(store, queries, softmax, reduction) if reduction else None)
    if isinstance(reduction, (Moments, Future)):  # which no kernel makes on its way
        done = attend_stored(store, q, tokens, softmax, None, own)
        queries = newest_queries(q, tokens, reduction.rows)
        return replace(done, mass=mass_of(store, queries, softmax, reduction))
    split = len(set(tokens)) > 1 or tokens[0] < q.shape[2]
    fresh = store.take_unwritten()
    if store.paged and q.shape[2] <= MOST_ROWS and own is None:
        out, mass = attend_pages(
            q,
            store.pages(),
            softmax=softmax,
            reduction=reduction,
            tokens=tokens if split else None,
            new=fresh and fresh[:2],
            widths=store.widths,
            kernels=store.kernels,
        )
        return Attended(out, None, mass)
    if fresh:
        store.write(*fresh)
    if fresh and not split and store.uniform and store.width == q.shape[2]:  # a prompt: no need to read it back
        blocks = [Block(slice(0, store.batch_size), slice(0, store.num_kv_heads), *fresh[:2])]
    else:
        blocks = list(store.blocks(split_rows=split))
    if len(blocks) == 1 and not split and blocks[0].slots is None:
        k, v = blocks[0].k, blocks[0].v
        return attend(q, k, v, softmax=softmax, reduction=reduction, own=own, kernels=store.kernels)
    return _attend_blocks(store, blocks, q, tokens, softmax, reduction, own)


def _attend_blocks(
    store: LayerStore,
    blocks: list[Block],
    q: Tensor,
    tokens: list[int],
    softmax: Softmax,
    reduction: Reduction | None,
    own: Tensor | None,
) -> Attended:
    """The same, one rectangle after the other."""
    group = q.shape[1] // store.num_kv_heads
    out = q.new_zeros(*q.shape[:3], blocks[0].v.shape[-1])
    lse: Tensor | None = torch.zeros(q.shape[:3], device=q.device)
    mass = _no_mass(store, q.device) if reduction else None
    for block in blocks:
        new = tokens[block.rows.start or 0]
        if new == 0:
            continue
        heads = slice(block.heads.start * group, block.heads.stop * group)
        of = _of_heads(softmax, heads)
        part, k = _corrected(q[block.rows, heads, -new:], block, of)
        mine = None if own is None else own[block.rows, -new:, -new:]
        done = attend(part, k, block.v, softmax=of, reduction=reduction, own=mine, kernels=store.kernels)
        out[block.rows, heads, -new:] = done.out
        if lse is None or done.lse is None:
            lse = None
        else:
            lse[block.rows, heads, -new:] = done.lse
        if mass is not None and done.mass is not None:
            mass[block.rows, block.heads, block.places(block.k.shape[2])] = done.mass
    return Attended(out, lse, mass)


def mass_of(store: LayerStore, queries: list[Tensor], softmax: Softmax, reduction: Summing, newer: int = 0) -> Tensor:
    """Mass [B, H, N], or moments of it [B, H, N, 4], of the given queries alone, per row [H*G, R, D].

    Their entries stand last, but for the `newer` ones behind them that they do not see.
    """
    mass = _no_mass(store, queries[0].device)
    if isinstance(reduction, Future):
        return _expected(store, queries, softmax, reduction, mass)
    if isinstance(reduction, Moments):
        mass = mass[..., None].repeat(1, 1, 1, NUMBERS)
    group = queries[0].shape[0] // store.num_kv_heads
    for block in store.blocks(split_rows=True):
        heads = slice(block.heads.start * group, block.heads.stop * group)
        of, q = _of_heads(softmax, heads), queries[block.rows.start][None, heads]
        q = q[:, :, q.shape[2] - reduction.last(q.shape[2]) :]
        if q.shape[2] == 0:
            continue
        q, k = _corrected(q, block, of)
        k = k[:, :, : k.shape[2] - newer]
        sums = native if store.kernels == "native" else ref
        lse = sums.column_lse(q, k, scale=of.scale, softcap=of.softcap, sinks=of.sinks)
        if isinstance(reduction, Moments):
            part = column_moments(q, k, lse, scale=of.scale, softcap=of.softcap)
        else:
            part = sums.column_mass(q, k, lse, scale=of.scale, softcap=of.softcap, reduction=reduction)
        mass[block.rows, block.heads, block.places(k.shape[2])] = part
    return mass


def _expected(store: LayerStore, queries: list[Tensor], softmax: Softmax, future: Future, mass: Tensor) -> Tensor:
    """Write what queries to come may be expected to give into mass [B, H, N]."""
    if softmax.softcap is not None:
        raise UnsupportedModelError("this model caps its scores, which expected attention has no formula for")
    assert store.rotary is not None
    group, position = queries[0].shape[0] // store.num_kv_heads, store.column("position")
    newest = position.amax(dim=(1, 2)).tolist()
    for block in store.blocks(split_rows=True):
        row, width = block.rows.start, block.k.shape[2]
        q = queries[row][block.heads.start * group : block.heads.stop * group]
        if q.shape[1] == 0:
            continue
        at = torch.arange(newest[row] + 1 - q.shape[1], newest[row] + 1, device=q.device)
        keys = position[row].expand(store.num_kv_heads, -1)[block.heads, block.places(width)]
        found = expected_mass(q, block.k[0], at, keys, scale=softmax.scale, rotary=store.rotary, future=future)
        mass[row, block.heads, block.places(width)] = found
    return mass


def lse_of(store: LayerStore, queries: list[Tensor], softmax: Softmax) -> list[Tensor]:
    """Log-sum-exp of the given queries, per row [H*G, R, D] -> [H*G, R], over what is stored; they are the newest."""
    group = queries[0].shape[0] // store.num_kv_heads
    lse = [torch.empty(q.shape[:2], device=q.device) for q in queries]
    for block in store.blocks(split_rows=True):
        row, heads = block.rows.start, slice(block.heads.start * group, block.heads.stop * group)
        of, q = _of_heads(softmax, heads), queries[row][None, heads]
        sums = native if store.kernels == "native" else ref
        seen = min(q.shape[2], block.k.shape[2])  # a row may hold fewer entries than it has queries
        q, k = _corrected(q[:, :, q.shape[2] - seen :], block, of)
        part = sums.column_lse(q, k, scale=of.scale, softcap=of.softcap, sinks=of.sinks)
        lse[row][heads, : lse[row].shape[1] - seen] = -torch.inf
        lse[row][heads, lse[row].shape[1] - seen :] = part[0]
    return lse


def _corrected(q: Tensor, block: Block, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Queries [b, h*G, R, D] and keys of a block, with a channel more where scores of coded keys are corrected.

    Rounding with variance s in each channel of a key multiplies exp(scale * q . k) by exp(scale^2 |q|^2 s / 2) on
    average. That much is taken off, but no more than MOST_OFF.
    """
    if block.noise is None:
        return q, block.k
    most = 2 * MOST_OFF / softmax.scale**2 / block.noise.amax(dim=-1).clamp_min(1e-30)  # of |q|^2, [b, h]
    most = most.repeat_interleave(q.shape[1] // block.k.shape[1], dim=1)[..., None, None]
    norm = q.float().square().sum(dim=-1, keepdim=True).minimum(most)
    less = block.noise[..., None] / -2
    return torch.cat([q, (softmax.scale * norm).to(q.dtype)], dim=-1), torch.cat([block.k, less.to(block.k.dtype)], -1)


def _no_mass(store: LayerStore, device: torch.device) -> Tensor:
    return torch.zeros(store.batch_size, store.num_kv_heads, store.width, device=device)


def _of_heads(softmax: Softmax, heads: slice) -> Softmax:
    """The same for some query heads only."""
    return softmax if softmax.sinks is None else Softmax(softmax.scale, softmax.softcap, softmax.sinks[heads])
