"""What a layer stores as plain tensors and numbers, for files, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvstrata.core import InputError, Tier
from kvstrata.kernels import entries
from kvstrata.store.coded import CodedTier, PageTier
from kvstrata.store.store import LayerStore
from kvstrata.store.units import UnitTier

Saved = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and what JSON can hold


def take(store: LayerStore) -> Saved:
    """Everything that a store holds; entries in the order of their slots."""
    if store.exact is None:
        return {}, {"rows": 0}
    exact = store.exact
    counts = exact.lengths()
    segment = torch.tensor([s for s, n in enumerate(exact.table.lengths) for _ in range(n)], dtype=torch.long)
    slot = torch.tensor([i for n in exact.table.lengths for i in range(n)], dtype=torch.long)
    device = exact.columns.device
    k, v = entries.gather(exact.table.view(), segment.to(device), slot.to(device))
    valid = exact.valid()
    tensors = {"exact.k": k, "exact.v": v}
    tensors |= {f"exact.{name}": data[:, :, : exact.width][valid] for name, data in exact.columns.data.items()}
    tiers: dict[str, Any] = {}
    for name, tier in store.coded.items():
        found, about = _coded(tier)
        tensors |= {f"{name.name}.{key}": value for key, value in found.items()}
        tiers[name.name] = about
    about = {"rows": store.batch_size, "heads": store.num_kv_heads, "counts": counts, "tiers": tiers}
    return {key: value.contiguous().cpu() for key, value in tensors.items()}, about


def _coded(tier: CodedTier) -> Saved:
    pages = [page for pages in tier.pages for page in pages]
    k, v, grid = tier.arena.read(pages)
    tensors = {"k": k, "v": v, "grid": grid, **tier.columns.data}
    about: dict[str, Any] = {"pages": [len(pages) for pages in tier.pages]}
    if isinstance(tier, UnitTier):
        tensors["frames"] = tier.codes.frames
        return tensors, {**about, "active": tier.active, "dormant": tier.dormant}
    return tensors, {**about, "fills": tier.fills()}


def put(store: LayerStore, tensors: dict[str, Tensor], about: dict[str, Any], device: torch.device) -> None:
    """Fill an empty store. Raises `InputError` where it holds something, or codes in another way."""
    if not store.is_empty:
        raise InputError("only an empty cache can be loaded into: reset() it first")
    if about["rows"] == 0:
        return
    own = {key.removeprefix("exact."): value.to(device) for key, value in tensors.items() if key.startswith("exact.")}
    store.refill(own.pop("k"), own.pop("v"), own, about["counts"], about["heads"])
    for name, numbers in about["tiers"].items():
        tier = store.open_tier(Tier[name])
        found = {
            key.partition(".")[2]: value.to(device) for key, value in tensors.items() if key.startswith(name + ".")
        }
        _fill(tier, found, numbers)
    store.settle_account()


def _fill(tier: CodedTier, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    f = tier.arena.format
    parts = [tensors.pop(key) for key in ("k", "v", "grid")]
    if [tuple(part.shape[1:]) for part in parts] != [f.k_shape, f.v_shape, (f.grid_numbers,)]:
        raise InputError(f"the file's {tier.tier.name} entries are of another codec: load it under the policy it had")
    counts: list[int] = about["pages"]
    taken = tier.arena.take(sum(counts), together=False)
    tier.arena.write(taken, *parts)
    source = iter(taken)
    tier.pages = [[next(source) for _ in range(n)] for n in counts]
    if isinstance(tier, UnitTier):
        tier.codes.frames = tensors.pop("frames").reshape(tier.codes.frames.shape)
        tier.active, tier.dormant = list(about["active"]), list(about["dormant"])
    elif isinstance(tier, PageTier):
        tier.refill(about["fills"])
    tier.columns.data = tensors
