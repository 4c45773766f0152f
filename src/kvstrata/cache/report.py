"""What a cache holds and why, as text, as a dict and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstrata.cache.cache import PolicyCache
from kvstrata.cache.layer import TOO_MUCH, Layer
from kvstrata.core import KvstrataError
from kvstrata.files import whole
from kvstrata.store import Account, Bytes
from kvstrata.store.units import UnitTier


def human_bytes(count: float) -> str:
    """Bytes with a binary unit, three significant digits."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
    return f"{count / 1024:.2f} GiB"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One compressed layer. The heads axis is 1 where all heads hold the same tokens."""

    layer: int
    seen: list[int]  # real tokens of each row
    stored: list[list[int]]  # entries [B][1|H]
    shares: list[list[float]]  # stored / seen [B][1|H]
    tiers: dict[str, int]  # entries by tier, over rows and heads
    positions: list[list[list[int]]]  # of the stored entries, ascending [B][1|H][n]
    bytes: Bytes
    plans: int
    evicted: int  # entries freed by plans and masks, over rows and heads, however often rows were copied since
    overruns: int  # plans whose protected tokens exceeded the budget
    nan_scores: int
    no_logits: int  # forwards whose logits, or whose end, a rule waited for in vain
    asleep: int  # entries in the ledger of codes that attention does not read
    rescales: int  # times that a running grid grew, and its codes were rounded anew
    nonfinite: int  # numbers that were infinite or NaN when they were coded
    key_loss: float  # squared error of coded keys over the variance of keys, as far as it was looked at
    note: str  # why nothing was dropped or coded, or empty


@dataclass(frozen=True, slots=True)
class Report:
    """A cache at one moment. `full` is what the same tokens take in an uncompressed cache of the model's own dtype."""

    policy: str
    now: Bytes
    peak: Bytes
    full: int
    itemsize: int
    nan_logits: int  # rows of logits with a NaN, which counted as unsure
    layers: list[LayerReport]
    passed_through: dict[int, str]  # layer -> why transformers' own cache serves it

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
            f"peak {human_bytes(self.peak.held)} held, {human_bytes(self.peak.reserved)} reserved",
            *passed_through_lines(self.passed_through),
        ]
        if self.nan_logits:
            lines.append(f"{self.nan_logits} rows of logits with NaN counted as unsure")
        lines += [f"layers {ranges(which)}: {text}" for text, which in _grouped(self.layers).items()]
        return "\n".join(lines)

    def figure(self, path: str | Path, row: int = 0) -> Path:
        """Draw layers x positions of one row, darker where more heads keep the token; PNG or SVG by the suffix.

        Raises `KvstrataError` when matplotlib is missing or nothing is stored.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise KvstrataError("a figure needs matplotlib: pip install 'kvstrata[demo]'") from error
        if not self.layers or not self.layers[0].stored:
            raise KvstrataError("nothing is stored, so there is nothing to draw")
        if not 0 <= row < len(self.layers[0].seen):
            raise KvstrataError(f"row {row} of {len(self.layers[0].seen)}: rows count from 0")
        image = [_kept(layer, row) for layer in self.layers]
        fig = Figure(figsize=(10, 1.5 + 0.14 * len(image)), layout="constrained")
        axes = fig.subplots()
        drawn = axes.imshow(image, aspect="auto", interpolation="nearest", cmap="Greys", vmin=0, vmax=1)
        axes.set(xlabel="position", ylabel="layer", title=f"{self.policy}: tokens kept, row {row}")
        shown = range(0, len(image), max(1, len(image) // 12))
        axes.set_yticks(list(shown), [str(self.layers[i].layer) for i in shown])
        fig.colorbar(drawn, label="share of heads that keep it")
        path = Path(path)
        with whole(path) as scratch:
            fig.savefig(scratch, dpi=130, format=path.suffix.lstrip(".") or "png")
        return path


def build_report(cache: PolicyCache, passed_through: dict[int, str]) -> Report:
    """Read the state of a cache; reading changes nothing."""
    layers = list(cache.layers.values())
    itemsize = next((layer.store.payload_itemsize for layer in layers if not layer.store.is_empty), 2)
    return Report(
        cache.policy.name,
        cache.account.now,
        cache.account.peak,
        cache.full_bytes,
        itemsize,
        cache.nan_logits,
        [_layer(layer, cache.account) for layer in layers],
        passed_through,
    )


def _layer(layer: Layer, account: Account) -> LayerReport:
    events, seen = layer.events, layer.fed.real
    stored = [] if layer.store.is_empty else layer.store.lengths()
    return LayerReport(
        layer.index,
        list(seen),
        stored,
        [[n / max(1, tokens) for n in row] for row, tokens in zip(stored, seen, strict=True)],
        layer.store.tiers(),
        [[layer.entries(row, head) for head in range(len(heads))] for row, heads in enumerate(stored)],
        account.parts[layer.index],
        events.plans,
        events.evicted,
        events.overruns,
        int(events.nan_scores),
        events.no_logits,
        sum(sum(tier.dormant) * tier.unit for tier in layer.store.coded.values() if isinstance(tier, UnitTier)),
        sum(tier.rescales for tier in layer.store.coded.values() if isinstance(tier, UnitTier)),
        sum(tier.others for tier in layer.store.coded.values()),
        events.lost,
        _note(layer),
    )


def _note(layer: Layer) -> str:
    if layer.events.lost >= TOO_MUCH:
        return f"not coded: the error would be {layer.events.lost:.2g} of what tells its keys apart"
    if not any(layer.rules.values()):
        return "the policy keeps everything"
    if layer.store.is_empty or layer.events.plans:
        return ""
    if layer.waits:
        return "not compressed yet: the last forward waits to be settled"
    return f"not compressed: {max(layer.fed.real)} tokens seen are within the budget"


def _kept(layer: LayerReport, row: int) -> list[float]:
    """Share of the layer's heads that keep each position of a row."""
    heads = layer.positions[row]
    kept = [0.0] * max(layer.seen[row], 1 + max((p[-1] for p in heads if p), default=0))
    for positions in heads:
        for position in positions:
            kept[position] += 1 / len(heads)
    return kept


def passed_through_lines(passed_through: dict[int, str]) -> list[str]:
    """One line for every reason why layers are not compressed."""
    lines: list[str] = []
    for kind in sorted(set(passed_through.values())):
        which = [layer for layer, name in passed_through.items() if name == kind]
        lines.append(f"{len(which)} layers passed through uncompressed ({kind}): {ranges(which)}")
    return lines


def _grouped(layers: list[LayerReport]) -> dict[str, list[int]]:
    """Layers that say the same, under one line."""
    found: dict[str, list[int]] = {}
    for layer in layers:
        counts = [n for row in layer.stored for n in row]
        stored = (
            "nothing" if not counts else str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
        )
        text = f"{stored} of {max(layer.seen, default=0)} tokens kept per row and head"
        extras = {
            "over budget": layer.overruns,
            "NaN scores": layer.nan_scores,
            "forwards without logits": layer.no_logits,
            "numbers not finite when coded": layer.nonfinite,
        }
        text += "".join(f", {count} {name}" for name, count in extras.items() if count)
        text += f"; {layer.note}" if layer.note else ""
        found.setdefault(text, []).append(layer.layer)
    return found


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
