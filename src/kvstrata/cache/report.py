"""What a cache holds and why, as text and as a dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvstrata.cache.layer import Layer
from kvstrata.store import Account, Bytes


def human_bytes(count: float) -> str:
    """Bytes with a binary unit, three significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return (
                f"{count:.0f} {unit}"
                if unit == "B"
                else f"{count:.3g} {unit}"
                if count < 100
                else f"{count:.0f} {unit}"
            )
        count /= 1024
    return f"{count:.2f} GiB"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One compressed layer. Entries are counted over rows and heads, as key-value pairs of one head."""

    layer: int
    seen: list[int]  # real tokens of each row
    stored: list[list[int]]  # entries [B][1|H]
    bytes: Bytes
    plans: int
    evicted: int
    overruns: int
    nan_scores: int
    note: str  # why nothing was dropped, or empty


@dataclass(frozen=True, slots=True)
class Report:
    """A cache at one moment. `full` is what the same tokens take in an uncompressed cache of the model's own dtype."""

    policy: str
    now: Bytes
    peak: Bytes
    full: int
    itemsize: int
    layers: list[LayerReport]
    passed_through: dict[int, str]  # layer -> kind of stock cache layer that serves it

    @property
    def share(self) -> float:
        """Bytes held over bytes of the full cache."""
        return self.now.held / self.full if self.full else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "share": self.share, "share_of_16_bit": self.share * self.itemsize / 2}

    def __str__(self) -> str:
        shares = f"{self.share:.1%} of the full cache"
        if self.itemsize > 2:
            shares += f", {self.share * self.itemsize / 2:.1%} of one in 16 bit"
        lines = [
            f"policy {self.policy}: {human_bytes(self.now.held)} held ({shares}), {human_bytes(self.now.live)} live, "
            f"peak {human_bytes(self.peak.held)} held, {human_bytes(self.peak.reserved)} reserved"
        ]
        for kind in sorted(set(self.passed_through.values())):
            which = [layer for layer, name in self.passed_through.items() if name == kind]
            lines.append(f"{len(which)} layers passed through uncompressed ({kind}): {_ranges(which)}")
        lines += [f"layers {_ranges(which)}: {text}" for text, which in _grouped(self.layers).items()]
        return "\n".join(lines)


def build_report(policy: str, layers: Sequence[Layer], account: Account, passed_through: dict[int, str]) -> Report:
    """Read the state of a cache; reading changes nothing."""
    itemsize = next((layer.store.payload_itemsize for layer in layers if not layer.store.is_empty), 2)
    full = sum(layer.store.token_bytes * sum(layer.seen) for layer in layers)
    return Report(
        policy,
        account.now,
        account.peak,
        full,
        itemsize,
        [_layer(layer, account) for layer in layers],
        passed_through,
    )


def _layer(layer: Layer, account: Account) -> LayerReport:
    events = layer.events
    note = ""
    if not any(layer.rules.values()):
        note = "the policy keeps everything"
    elif not layer.store.is_empty and events.plans == 0:
        note = f"not compressed: {max(layer.seen)} tokens seen are within the budget"
    return LayerReport(
        layer.index,
        list(layer.seen),
        [] if layer.store.is_empty else layer.store.lengths(),
        account.layers[layer.index],
        events.plans,
        events.evicted,
        events.overruns,
        int(events.nan_scores),
        note,
    )


def _grouped(layers: list[LayerReport]) -> dict[str, list[int]]:
    """Layers that say the same, under one line."""
    found: dict[str, list[int]] = {}
    for layer in layers:
        counts = [n for row in layer.stored for n in row]
        stored = (
            "nothing" if not counts else str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
        )
        text = f"{stored} of {max(layer.seen, default=0)} tokens kept per row and head"
        extras = {"over budget": layer.overruns, "NaN scores": layer.nan_scores}
        text += "".join(f", {count} {name}" for name, count in extras.items() if count)
        text += f"; {layer.note}" if layer.note else ""
        found.setdefault(text, []).append(layer.layer)
    return found


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
