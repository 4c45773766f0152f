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
    """The books of one cache: stores and arenas report each change, so the peak between two steps is seen too.

    A layer reports what is live and held in it, and reserves its columns and copies in the making; an arena reserves
    the pages of all layers.
    """

    now: Bytes = Bytes()
    peak: Bytes = Bytes()
    parts: dict[object, Bytes] = field(default_factory=dict[object, Bytes])  # by number of layer, or by arena

    def set(self, part: object, size: Bytes) -> None:
        """Replace the figures of one layer or arena."""
        now = self.now = self.now.swapped(self.parts.get(part, NOTHING), size)
        peak = self.peak
        self.parts[part] = size
        if now.live > peak.live or now.held > peak.held or now.reserved > peak.reserved:
            self.peak = peak.most(now)

    def note_copies(self, nbytes: int) -> None:
        """Let the peak know of bytes that exist for a moment beside all that is reserved."""
        self.peak = self.peak.most(Bytes(reserved=self.now.reserved + nbytes))

    def restart_peak(self) -> None:
        """Forget the peak so far, to measure a later stretch alone."""
        self.peak = self.now
