"""Queries of a layer that ask, as if they stood in a repetition of the context, what they would want of it.

A query can ask once the keys of its whole band are there. Until then, and until somebody wants to know, it waits here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.cache.model import Model
from kvstrata.cache.stored import lse_of
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.echo import Band, echo
from kvstrata.kernels.norms import output_norms
from kvstrata.policy.scorers.repeat import ASKED, LOUDNESS
from kvstrata.store import Account, Bytes, LayerStore

MANY = 16  # queries that wait before they ask together


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Tokens in a row, the newest of some heads: k and v [b, h, S, D], and the sinks' keys [b, h, s, D].

    `places` [b, h, S] says where they stand in the dense forms; None: at the end. `origin` is the first one's position.
    `less` [b, 1|h, S] is taken off what their queries give, if anything is.
    """

    rows: slice
    heads: slice
    k: Tensor
    v: Tensor
    sinks: Tensor
    origin: int
    less: Tensor | None
    places: Tensor | None = None


class Asking:
    """Of one layer: per row the newest queries [H*G, R, D] and what they summed over, lse [H*G, R], NaN if unknown."""

    def __init__(self, band: Band, model: Model, layer: int, account: Account) -> None:
        self.band, self._model, self._layer, self._account = band, model, layer, account
        self.queries: list[Tensor] = []
        self.lse: list[Tensor] = []
        self.fresh: tuple[Tensor, Tensor] | None = None  # k and v of a forward before which nothing was stored
        self._more = False  # whether some have not been looked at yet

    def hold(self, queries: list[Tensor], lse: list[Tensor]) -> None:
        """Let these wait and no others."""
        self.queries, self.lse = queries, lse
        size = sum(t.nbytes for t in (*queries, *lse))
        self._account.set(("asking", self._layer), Bytes(0, size, size))

    def take(self, q: Tensor, tokens: Sequence[int], lse: Tensor | None) -> bool:
        """Add the last tokens[b] queries of each row of q [B, H*G, Q, D], and of lse [B, H*G, Q] where it is known.

        -> whether so many wait that they should ask.
        """
        rows = [slice(q.shape[2] - n, None) for n in tokens]
        known = None if lse is None else [lse[row, :, new] for row, new in enumerate(rows)]
        return self.add([q[row, :, new] for row, new in enumerate(rows)], known)

    def add(self, queries: Sequence[Tensor], lse: Sequence[Tensor] | None = None) -> bool:
        """Add each row's newest queries [H*G, R, D], and their lse [H*G, R] where it is known; -> as `take`."""
        self._more = True
        unknown = [q.new_full(q.shape[:2], torch.nan, dtype=torch.float32) for q in queries] if lse is None else lse
        if self.queries:
            queries = [torch.cat(pair, dim=1) for pair in zip(self.queries, queries, strict=True)]
            unknown = [torch.cat(pair, dim=1) for pair in zip(self.lse, unknown, strict=True)]
        self.hold(list(queries), list(unknown))
        return any(waiting.shape[1] >= MANY for waiting in self.queries)

    def note(self, store: LayerStore, seen: Sequence[int], softmax: Softmax) -> None:
        """Ask, and write what comes of it into the column; nothing where no query has come since."""
        if not self._more:
            return
        asked, column = self.ask(store, seen, softmax), store.column(ASKED.name)
        if column.shape[1] == 1:
            asked = asked.amax(dim=1, keepdim=True)
        store.set_column(ASKED.name, torch.maximum(column, asked))

    def ask(self, store: LayerStore, seen: Sequence[int], softmax: Softmax) -> Tensor:
        """Let all ask that can. -> what each entry [B, H, N] of the store is worth to them, 0 where none asked for it.

        `seen` [B] counts the tokens of each row, of which the newest have the queries.
        """
        known, unknown = self.lse, [_from_first_nan(lse[0]) for lse in self.lse]
        if any(unknown):
            newest = [q[:, q.shape[1] - n :] for q, n in zip(self.queries, unknown, strict=True)]
            parts = zip(known, unknown, lse_of(store, newest, softmax), strict=True)
            known = [torch.cat([old[:, : old.shape[1] - n], new], dim=1) for old, n, new in parts]
        asked = torch.zeros(store.batch_size, store.num_kv_heads, store.width, device=self.queries[0].device)
        for stretch in self._stretches(store, seen):
            group = self.queries[0].shape[0] // store.num_kv_heads
            heads = slice(stretch.heads.start * group, stretch.heads.stop * group)
            rows = range(stretch.rows.start, stretch.rows.stop)
            q, lse = (_rows([part[row][heads] for row in rows]) for part in (self.queries, known))
            worth = self._worth(q, lse, stretch, softmax, store)
            if stretch.places is None:
                asked[stretch.rows, stretch.heads, -worth.shape[2] :] = worth
            else:
                asked[stretch.rows, stretch.heads].scatter_(2, stretch.places, worth)
        self.keep_newest(known)
        return asked

    def keep_newest(self, lse: Sequence[Tensor]) -> None:
        """Of the queries, whose lse is known now, let those wait whose band is not complete."""
        self.fresh, self._more, newest = None, False, max(0, self.band.high)
        self.hold(*([t[:, max(0, t.shape[1] - newest) :].clone() for t in part] for part in (self.queries, lse)))

    def _stretches(self, store: LayerStore, seen: Sequence[int]) -> Iterator[Stretch]:
        """Keys and values that the queries' bands reach, as far back as they are stored without gaps."""
        counts = {q.shape[1] for q in self.queries}
        before, sinks = max(0, -self.band.low), self.band.sinks
        loudness = store.column(LOUDNESS.name) if self.band.weight == "u+" else None
        if store.uniform and {store.width} == set(seen) and len(counts) == 1:  # nothing was dropped yet
            k, v = self.fresh or next((block.k, block.v) for block in store.blocks())
            first = max(0, store.width - counts.pop() - before)
            everywhere = slice(0, store.batch_size), slice(0, store.num_kv_heads)
            less = None if loudness is None else loudness[:, :, first:]
            yield Stretch(*everywhere, k[:, :, first:], v[:, :, first:], k[:, :, :sinks], first, less)
            return
        position = store.column("position")
        for block in store.blocks(split_rows=True):
            row, places = block.rows.start, block.places(block.k.shape[2])
            reach = self.queries[row].shape[1] + before
            for head in range(block.heads.start, block.heads.stop):
                at = position[row, head % position.shape[1], places]
                order = at.argsort()
                at, (k, v) = at[order], (t[0, head - block.heads.start] for t in (block.k, block.v))
                row_up = torch.arange(seen[row] - len(at), seen[row], device=at.device)
                together = int((at == row_up).flip(0).cumprod(0).sum())  # the newest without gaps
                newest = order[len(at) - min(together, reach) :]
                if not len(newest):
                    continue
                slots = newest if block.slots is None else block.slots[newest]
                first = k[order[: int((at < sinks).sum())]]
                parts = [t[None, None] for t in (k[newest], v[newest], first)]
                here, origin = slice(head, head + 1), seen[row] - len(newest)
                less = None if loudness is None else loudness[row, head % position.shape[1], places][newest][None, None]
                yield Stretch(block.rows, here, parts[0], parts[1], parts[2], origin, less, slots[None, None])

    def _worth(self, q: Tensor, lse: Tensor, stretch: Stretch, softmax: Softmax, store: LayerStore) -> Tensor:
        """What q [b, h*G, R, D] give the entries of a stretch, [b, h, S]."""
        assert self._model.turn is not None
        count = min(q.shape[2], stretch.k.shape[2])  # those whose own keys are there
        q, lse = q[:, :, q.shape[2] - count :], lse[:, :, lse.shape[2] - count :]
        before, done = stretch.k.shape[2] - count, count - max(0, self.band.high)  # those whose whole band is
        if done <= 0:
            return torch.zeros(stretch.k.shape[:3], device=q.device)
        q, lse = q[:, :, :done], lse[:, :, :done]
        skip = min(max(0, self.band.sinks - stretch.origin), stretch.k.shape[2])
        less = stretch.less
        if less is not None:
            less = less[:, :, before : before + done].expand(-1, stretch.k.shape[1], -1)
        found = echo(
            *(q, stretch.k, stretch.sinks, lse),
            turn=self._model.turn(-self.band.shift),
            first=stretch.origin + before,
            before=before,
            band=self.band,
            softmax=softmax,
            skip=skip,
            less=less,
            kernels=store.kernels,
        )
        found = found.exp_().unflatten(1, (stretch.k.shape[1], -1))
        if self.band.weight != "u":
            outputs = self._model.outputs[self._layer]
            heads = slice(stretch.heads.start * found.shape[2], stretch.heads.stop * found.shape[2])
            found *= output_norms(outputs[heads], stretch.v, store.kernels)
        return found.amax(dim=2)

    # -- rows and rollback --------------------------------------------------------------------------------------

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now."""
        self.fresh = None
        if self.queries:
            self.hold([self.queries[row] for row in rows], [self.lse[row] for row in rows])

    def crop(self, counts: Sequence[int]) -> None:
        """Forget the newest counts[b] queries of each row, which may be tokens that have not been added."""
        self.fresh = None
        if self.queries:
            parts = (zip(part, counts, strict=True) for part in (self.queries, self.lse))
            self.hold(*([t[:, : max(0, t.shape[1] - n)] for t, n in part] for part in parts))

    def reset(self) -> None:
        """Forget all."""
        self.fresh, self._more = None, False
        self.hold([], [])

    def tensors(self) -> dict[str, Tensor]:
        """What waits, by name, for files."""
        parts = {"queries": self.queries, "lse": self.lse}
        return {f"{name}.{row}": t.clone() for name, rows in parts.items() for row, t in enumerate(rows)}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Let those wait again that `tensors` gave."""
        rows, self._more = range(len(tensors) // 2), True
        self.hold(*([tensors[f"{name}.{row}"].to(device) for row in rows] for name in ("queries", "lse")))


def _rows(parts: list[Tensor]) -> Tensor:
    """One tensor of equal rows; a single one is not copied."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _from_first_nan(lse: Tensor) -> int:
    """How many of lse [R] there are from the first NaN on."""
    unknown = lse.isnan()
    return len(lse) - int(unknown.int().argmax()) if bool(unknown.any()) else 0
