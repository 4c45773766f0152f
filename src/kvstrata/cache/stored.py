"""Attention of a forward over what a store holds, segment by segment where lengths differ."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels.attention import KernelName, Softmax, attend
from kvstrata.kernels.mass import Reduction, column_lse, column_mass
from kvstrata.store import LayerStore


def attend_stored(
    store: LayerStore,
    q: Tensor,
    tokens: list[int],
    softmax: Softmax,
    reduction: Reduction | None,
    own: Tensor | None,
    kernels: KernelName,
) -> tuple[Tensor, Tensor | None]:
    """Return out [B, H*G, Q, Dv] and mass [B, H, N] of q [B, H*G, Q, D], whose own entries are the newest.

    The last tokens[b] queries of each row are real; out is zero for the others. Mass is None without a reduction.
    `own` [B, Q, Q] bool replaces causality among the queries' own entries.
    """
    split = len(set(tokens)) > 1 or tokens[0] < q.shape[2]
    group = q.shape[1] // store.num_kv_heads
    blocks = list(store.blocks(split_rows=split))
    if len(blocks) == 1 and not split:
        done = attend(q, blocks[0].k, blocks[0].v, softmax=softmax, reduction=reduction, own=own, kernels=kernels)
        return done.out, done.mass
    out = q.new_zeros(*q.shape[:3], blocks[0].v.shape[-1])
    mass = _no_mass(store, q.device) if reduction else None
    for block in blocks:
        new = tokens[block.rows.start]
        if new == 0:
            continue
        heads = slice(block.heads.start * group, block.heads.stop * group)
        part, of = q[block.rows, heads, -new:], _of_heads(softmax, heads)
        mine = None if own is None else own[block.rows, -new:, -new:]
        done = attend(part, block.k, block.v, softmax=of, reduction=reduction, own=mine, kernels=kernels)
        out[block.rows, heads, -new:] = done.out
        if mass is not None and done.mass is not None:
            mass[block.rows, block.heads, : block.k.shape[2]] = done.mass
    return out, mass


def mass_of(store: LayerStore, queries: list[Tensor], softmax: Softmax, reduction: Reduction, newer: int = 0) -> Tensor:
    """Mass [B, H, N] of the given queries alone, per row [H*G, R, D].

    Their entries stand last, but for the `newer` ones behind them that they do not see.
    """
    mass = _no_mass(store, queries[0].device)
    group = queries[0].shape[0] // store.num_kv_heads
    for block in store.blocks(split_rows=True):
        heads = slice(block.heads.start * group, block.heads.stop * group)
        of, q = _of_heads(softmax, heads), queries[block.rows.start][None, heads]
        q = q[:, :, q.shape[2] - reduction.last(q.shape[2]) :]
        if q.shape[2] == 0:
            continue
        k = block.k[:, :, : block.k.shape[2] - newer]
        lse = column_lse(q, k, scale=of.scale, softcap=of.softcap, sinks=of.sinks)
        part = column_mass(q, k, lse, scale=of.scale, softcap=of.softcap, reduction=reduction)
        mass[block.rows, block.heads, : k.shape[2]] = part
    return mass


def _no_mass(store: LayerStore, device: torch.device) -> Tensor:
    return torch.zeros(store.batch_size, store.num_kv_heads, store.longest, device=device)


def _of_heads(softmax: Softmax, heads: slice) -> Softmax:
    """The same for some query heads only."""
    return softmax if softmax.sinks is None else Softmax(softmax.scale, softmax.softcap, softmax.sinks[heads])
