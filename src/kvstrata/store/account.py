"""The only place where bytes are counted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one layer or of a whole cache.

    live: payload and columns of the entries stored. held: slots taken for this cache, free tails included.
    reserved: storages allocated, transient copies included while they exist.
    """

    live: int = 0
    held: int = 0
    reserved: int = 0

    def swapped(self, old: Bytes, new: Bytes) -> Bytes:
        """This sum with `new` in place of `old`."""
        return Bytes(
            self.live - old.live + new.live,
            self.held - old.held + new.held,
            self.reserved - old.reserved + new.reserved,
        )

    def most(self, other: Bytes) -> Bytes:
        """The larger of each."""
        return Bytes(max(self.live, other.live), max(self.held, other.held), max(self.reserved, other.reserved))


NOTHING = Bytes()


@dataclass(slots=True)
class Account:
    """The books of one cache: every store reports each change, so the peak between two steps is seen too."""

    now: Bytes = Bytes()
    peak: Bytes = Bytes()
    layers: dict[int, Bytes] = field(default_factory=dict[int, Bytes])

    def set(self, layer: int, size: Bytes) -> None:
        """Replace the figures of one layer."""
        now = self.now = self.now.swapped(self.layers.get(layer, NOTHING), size)
        peak = self.peak
        self.layers[layer] = size
        if now.live > peak.live or now.held > peak.held or now.reserved > peak.reserved:
            self.peak = peak.most(now)

    def restart_peak(self) -> None:
        """Forget the peak so far, to measure a later stretch alone."""
        self.peak = self.now
