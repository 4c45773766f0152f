"""Random pages as tensors of any device, and what they hold; nothing native is needed.

Pages lie in two blocks in any order, what is no entry is NaN, and pages that nothing is in are numbered out of all.
"""

from __future__ import annotations

import math

import torch

from kvstrata.kernels.codec import ref
from kvstrata.kernels.pages import PAGE, Block, Format, Pages

CPU = torch.device("cpu")


def make_pages(codec, dtype, lengths, dim, v_dim=None, room=0, fills=None, k=None, device=CPU):
    """Pages of segments with `lengths` entries and room for more; keys k [pages, 64, D] if given."""
    format = Format(codec, dtype, dim, v_dim or dim)
    used = [-(-(n + room) // PAGE) for n in lengths]
    total, columns = max(2, sum(used)), max(1, *used)
    k = (torch.randn(total, PAGE, dim) if k is None else k).to(dtype)
    v = torch.randn(total, PAGE, format.v_dim).to(dtype)
    grid = torch.empty(total, 0, dtype=dtype)
    if codec is not None:
        k, v, grid, _ = ref.pack(format, k, v)
    table = torch.full((len(lengths), columns + 2), 123_456_789, dtype=torch.int32)[:, :columns]
    numbers = torch.randperm(sum(used))
    for row, own in zip(table, numbers.split(used), strict=True):
        row[: len(own)] = own
    entries = {}
    for s, n in enumerate(lengths):
        for i in range(-(-n // PAGE)):
            entries[int(table[s, i])] = min(PAGE, n - i * PAGE) if fills is None else fills[s][i]
    for page in range(total):
        poison(codec, k[page], v[page], grid[page], entries.get(page, 0))
    table[table < total] += (table[table < total] >= total // 2).int() * 5 + 3  # a gap between the blocks
    half = total // 2
    blocks = [Block(half + 8, k[half:], v[half:], grid[half:]), Block(3, k[:half], v[:half], grid[:half])]
    blocks = [Block(block.first, *(part.clone().to(device) for part in block[1:])) for block in blocks]
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    short = None if fills is None else torch.tensor(fills, dtype=torch.int32, device=device)
    return Pages(format, blocks, table.to(device), counts, fills=short)


def poison(codec, k, v, grid, n):
    if codec is None:
        k[n:], v[n:] = math.nan, math.nan
    elif n == 0:
        grid[:] = math.nan
    elif not codec.symmetric:
        grid[-2 * PAGE :].view(2, PAGE)[:, n:] = math.nan
        grid[: -2 * PAGE].view(2, PAGE // codec.window, -1)[:, -(-n // codec.window) :] = math.nan


def read(pages, s):
    """Entries of one segment, k [n, D], v [n, Dv] in float64 and their slots."""
    ks, vs, slots, device = [], [], [], pages.table.device
    for i in range(-(-int(pages.lengths[s]) // PAGE)):
        n = min(PAGE, int(pages.lengths[s]) - i * PAGE) if pages.fills is None else int(pages.fills[s, i])
        number = int(pages.table[s, i])
        block = next(b for b in pages.blocks if b.first <= number < b.first + len(b.k))
        parts = [part[number - block.first][None] for part in block[1:]]
        k, v = parts[:2] if pages.format.codec is None else ref.unpack(pages.format, *parts)
        ks.append(k[0, :n].double())
        vs.append(v[0, :n].double())
        slots += range(i * PAGE, i * PAGE + n)
    empty = [torch.zeros(0, d, dtype=torch.float64, device=device) for d in (pages.format.k_dim, pages.format.v_dim)]
    return torch.cat([*ks, empty[0]]), torch.cat([*vs, empty[1]]), torch.tensor(slots, dtype=torch.long, device=device)
