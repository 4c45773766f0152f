"""What is stored as rectangles of rows and heads, for kernels that know no pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.kernels import entries
from kvstrata.kernels.codec import Codec, packing
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.kernels.pages import Format
from kvstrata.store.account import Account
from kvstrata.store.coded import CodedTier
from kvstrata.store.exact import ExactTier

SAMPLE = 256  # entries of a head that tell whether codes serve


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A rectangle of rows and heads that hold as many entries: k and v [b, h, n, D].

    `slots` [n] are the places of the entries in the dense forms, None where these are 0 .. n-1. `noise` [b, h, n] fp32
    is the variance of rounding in a channel of each key, where attention is to take off what that adds; else None.
    """

    rows: slice
    heads: slice
    k: Tensor
    v: Tensor
    slots: Tensor | None = None
    noise: Tensor | None = None

    def places(self, n: int) -> slice | Tensor:
        """Where the first n entries stand in the dense forms."""
        return slice(n) if self.slots is None else self.slots[:n]


def rectangles(
    exact: ExactTier, coded: Sequence[CodedTier], rows: int, split_rows: bool, account: Account
) -> Iterator[Block]:
    """Yield rectangles that cover every segment once; see `LayerStore.blocks`."""
    table, heads = exact.table, exact.heads
    if table.uniform and not coded and not split_rows:
        k, v = table.regular() or _gathered(exact, range(rows * heads), table.longest, account)
        yield Block(slice(0, rows), slice(0, heads), *(t.unflatten(0, (rows, heads)) for t in (k, v)))
        return
    regular = table.regular()
    for row in range(rows):
        lengths = table.lengths[row * heads : (row + 1) * heads]
        width = heads if len(set(lengths)) == 1 and not coded else 1  # heads that one rectangle has
        for head in range(0, heads, width):
            first, n = row * heads + head, lengths[head]
            if regular is not None:
                k, v = (t[first : first + width, :n] for t in regular)
            else:
                which = range(first, first + width)
                k, v = (width == 1 and table.segment(first)) or _gathered(exact, which, n, account)
            rectangle = slice(row, row + 1), slice(head, head + width)
            yield _with_coded(first, exact, coded, Block(*rectangle, k[None], v[None]))


def _gathered(exact: ExactTier, segments: Sequence[int], n: int, account: Account) -> tuple[Tensor, Tensor]:
    """k [segments, n, D] and v of the first n exact entries of each."""
    table = exact.table
    if len(segments) == 1:
        k, v, _ = table.arena.read(table.pages[segments[0]])
        return k.flatten(0, 1)[None, :n], v.flatten(0, 1)[None, :n]
    pages = table.view()
    which = torch.tensor(segments, device=pages.table.device).repeat_interleave(n)
    slot = torch.arange(n, device=which.device).repeat(len(segments))
    k, v = entries.gather(pages, which, slot)
    account.note_copies(k.nbytes + v.nbytes)
    return k.unflatten(0, (len(segments), n)), v.unflatten(0, (len(segments), n))


def _with_coded(segment: int, exact: ExactTier, coded: Sequence[CodedTier], block: Block) -> Block:
    """The block of one segment with its coded entries, decoded, before the exact ones."""
    if not coded:
        return block
    k, v = block.k[0, 0], block.v[0, 0]
    at = torch.arange(len(k), device=k.device)
    parts, offset = [(k, v, at, at.new_zeros(len(at), dtype=torch.float32))], exact.width
    for tier in coded:
        k, v, at = tier.decoded(segment)
        parts.insert(-1, (k, v, at + offset, tier.noise(segment, at)))
        offset += tier.width
    k, v, slots, noise = (torch.cat(part) for part in zip(*parts, strict=True))
    corrected = any(tier.corrected for tier in coded)
    return Block(block.rows, block.heads, k[None, None], v[None, None], slots, noise[None, None] if corrected else None)


def key_loss(exact: ExactTier, codec: Codec, rotary: Rotary | None) -> float:
    """`packing.key_loss` of the longest row's newest exact entries, in the head that loses most; NaN if too few."""
    f, account, found = exact.table.arena.format, Account(), list[float]()
    form = Format(codec, f.dtype, f.k_dim, f.v_dim)
    lengths = exact.table.lengths
    row = max(range(len(lengths) // exact.heads), key=lambda b: lengths[b * exact.heads])
    for head in range(exact.heads):
        n = lengths[row * exact.heads + head]
        k = _gathered(exact, [row * exact.heads + head], n, account)[0][0, -SAMPLE:]
        position = exact.columns.data["position"][row, head % exact.columns.shape[1], :n][-SAMPLE:]
        before = k.float() if rotary is None else rotary.off(k.float(), position)
        found.append(packing.key_loss(form, k, before))
    return max(found) if all(x == x for x in found) else float("nan")
