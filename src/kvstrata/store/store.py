"""The entries of one layer: an exact tier and coded ones, read as one, and plans applied to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstrata.core import POSITION, Column, Plan, Tier
from kvstrata.kernels import dispatch
from kvstrata.kernels.codec import CODECS, Codec
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.kernels.dispatch import Implementation, KernelName
from kvstrata.kernels.pages import PAGE, Format, Pages
from kvstrata.store.account import Account, Bytes
from kvstrata.store.arena import Arenas
from kvstrata.store.blocks import Block, key_loss, rectangles
from kvstrata.store.coded import CodedTier, PageTier, Restored
from kvstrata.store.columns import Columns
from kvstrata.store.exact import NONE_GIVEN, ExactTier, Given, Unwritten
from kvstrata.store.merging import merge
from kvstrata.store.sizes import sizes_of
from kvstrata.store.units import UnitTier, dormant_entries

DEFAULT_CODECS: Mapping[Tier, Codec] = {Tier[name.upper()]: codec for name, codec in CODECS.items()}


class LayerStore:
    """Entries of one layer: keys, values and columns, per row or (`per_head`) per row and head.

    Keys and values lie in pages of arenas that all layers share; each row and kv head is a segment with pages of its
    own, shared between copies of a row until one of them is written to. Appending writes in place. A plan that drops
    few entries lets the last ones take their places, so slots of a segment stand in no particular order and the
    position column tells. Dense forms have the slots of the exact tier first, then those of each coded tier. Where
    torch alone attends, the exact pages of a segment stand together, so that it works on views. Views and blocks taken
    before a call that changes the store are invalid after it.
    """

    _exact_tier, _page_tier, _unit_tier = ExactTier, PageTier, UnitTier

    def __init__(
        self,
        layer: int,
        columns: Sequence[Column],
        per_head: bool,
        account: Account,
        arenas: Arenas | None = None,
        kernels: KernelName = "auto",
        codecs: Mapping[Tier, Codec] = DEFAULT_CODECS,
        rotary: Rotary | None = None,
    ) -> None:
        self._codecs, self.rotary = codecs, rotary
        self.layer, self.per_head = layer, per_head
        self.columns = (POSITION, *(c for c in columns if c != POSITION))
        self._account = account
        self._kernels: KernelName = kernels
        self._arenas = arenas or Arenas(account)
        self.kernels: Implementation = "reference"  # resolved when keys come
        self.exact: ExactTier | None = None
        self.reset()

    def reset(self) -> None:
        """Free everything, as if nothing had been stored."""
        if self.exact is not None:
            self.exact.table.free()
            for tier in self.coded.values():
                tier.free()
        self.exact = None
        self.coded: dict[Tier, CodedTier] = {}
        self.batch_size = self.num_kv_heads = 0
        self._account.set(self.layer, Bytes())

    def __del__(self) -> None:
        """Give pages back and leave, since other caches may live in the same arenas."""
        if getattr(self, "exact", None) is not None and self._arenas.shared:
            self.reset()
            if not any(size.held for part, size in self._account.parts.items() if isinstance(part, int)):  # the last
                self._arenas.leave(self._account)

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been appended since the last reset."""
        return self.batch_size == 0

    @property
    def device(self) -> torch.device:
        """Where columns and masks live: with the keys."""
        return self._exact.columns.device

    @property
    def segment_heads(self) -> int:
        """Segments per row that may differ: H where heads hold different tokens, else 1."""
        return self.num_kv_heads if self.per_head else 1

    @property
    def width(self) -> int:
        """N: slots of the dense forms."""
        return sum(self.widths)

    @property
    def widths(self) -> list[int]:
        """Slots of each tier in the dense forms."""
        return [] if self.exact is None else [self.exact.width, *(tier.width for tier in self.coded.values())]

    @property
    def longest(self) -> int:
        """Entries of the longest segment."""
        return max((n for row in self.lengths() for n in row), default=0)

    @property
    def uniform(self) -> bool:
        """Whether all segments hold as many entries, all of them exact."""
        return self.exact is not None and self.exact.table.uniform and not self.coded

    def lengths(self) -> list[list[int]]:
        """Entries stored [B][1|H]."""
        if self.is_empty:
            return []
        found, heads = self._exact.lengths(), self.num_kv_heads
        for tier in self.coded.values():
            flat, step = tier.lengths(), heads // self.segment_heads
            more = [flat[row * heads : (row + 1) * heads : step] for row in range(self.batch_size)]
            found = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(found, more, strict=True)]
        return found

    def exact_lengths(self) -> list[list[int]]:
        """Entries stored exactly [B][1|H]."""
        return self._exact.lengths()

    def exact_positions(self) -> Tensor:
        """Positions [B, 1|H, n] of the exact entries, -1 where none is."""
        position = self._exact.columns.data["position"][:, :, : self._exact.width]
        return position if self._exact.table.uniform else position.masked_fill(~self._exact.valid(), -1)

    def tiers(self) -> dict[str, int]:
        """Entries by tier, over rows and the segments of each."""
        if self.exact is None:
            return {"exact": 0}
        served = self.num_kv_heads // self.segment_heads
        counts = {tier.name.lower(): sum(coded.lengths()) // served for tier, coded in self.coded.items()}
        return {"exact": sum(map(sum, self.exact_lengths())), **counts}

    @property
    def payload_itemsize(self) -> int:
        """Bytes of one number of a key."""
        return self._exact.table.arena.format.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value over all heads of the layer, as an uncompressed cache stores them."""
        return 0 if self.is_empty else self.num_kv_heads * self._exact.table.arena.page_bytes // PAGE

    def sizes_of(self, k: Tensor, v: Tensor) -> dict[str, int]:
        """The sizes of a `LayerShape` once k and v [B, H, Q, D] are stored, over all heads of the layer."""
        return sizes_of(k, v, self._column_bytes, self.per_head, self._codecs.values())

    def none_of(self) -> tuple[Tensor, Tensor]:
        """k [B, H, 0, D] and v like those stored, without memory."""
        f, shape = self._exact.table.arena.format, (self.batch_size, self.num_kv_heads, 0)
        k, v = (torch.empty(*shape, dim, dtype=f.dtype, device="meta") for dim in (f.k_dim, f.v_dim))
        return k, v

    @property
    def _exact(self) -> ExactTier:
        assert self.exact is not None
        return self.exact

    @property
    def _column_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def settle_account(self) -> None:
        """Tell the books what is held now."""
        if self.exact is None or self.is_empty:
            self._account.set(self.layer, Bytes())
            return
        tiers = (self.exact, *self.coded.values())
        entries_stored = sum(map(sum, self.lengths()))
        live = sum(tier.live_bytes() for tier in tiers) + entries_stored * self._column_bytes
        held, columns = sum(tier.held_bytes() for tier in tiers), sum(tier.beside_bytes for tier in tiers)
        self._account.set(self.layer, Bytes(live, held, columns))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def paged(self) -> bool:
        """Whether compiled kernels can read every tier."""
        codecs = (tier.arena.format.codec for tier in self.coded.values())
        return self.kernels in ("native", "triton") and all(codec is None or codec.plain for codec in codecs)

    def pages(self) -> list[Pages]:
        """Every tier as kernels see it."""
        return [self._exact.table.view(), *(tier.view() for tier in self.coded.values())]

    def blocks(self, split_rows: bool = False) -> Iterator[Block]:
        """Yield rectangles that cover every segment once, exact entries last and in slot order.

        One rectangle where all lengths agree and none is coded, unless `split_rows` asks for rows apart. Views where
        pages stand together, else copies.
        """
        return rectangles(self._exact, list(self.coded.values()), self.batch_size, split_rows, self._account)

    def dense(self, part: Literal["k", "v"]) -> Tensor:
        """All keys or values as [B, H, N, D] in dense order; zeros where no entry is. A view where lengths agree."""
        if self.uniform:
            return getattr(next(self.blocks()), part)
        arena = self._exact.table.arena
        shape = self.batch_size, self.num_kv_heads, self.width, getattr(arena.format, f"{part}_dim")
        dense = torch.zeros(shape, dtype=arena.format.dtype, device=arena.device)
        for block in self.blocks():
            dense[block.rows, block.heads, block.places(block.k.shape[2])] = getattr(block, part)
        return dense

    def column(self, name: str) -> Tensor:
        """One column as [B, 1|H, N] in dense order; zeros where no entry is. Not to be written to."""
        dense = self._exact.columns.data[name][:, :, : self._exact.width]
        if self.coded:
            coded = (tier.columns.data[name][:, :, : tier.width] for tier in self.coded.values())
            dense = torch.cat([dense, *coded], dim=-1)
        return dense if self.uniform else dense.masked_fill(~self.valid(), 0)

    def set_column(self, name: str, value: Tensor) -> None:
        """Replace a column by value [B, 1|H, N]; what stands where no entry is does not matter."""
        exact, *coded = value.split(self.widths, dim=-1)
        self._exact.columns.data[name][:, :, : self._exact.width] = exact
        for tier, part in zip(self.coded.values(), coded, strict=True):
            tier.columns.data[name][:, :, : tier.width] = part

    def valid(self) -> Tensor:
        """[B, 1|H, N] bool: which slots of the dense forms hold an entry."""
        valid = self._exact.valid()
        return torch.cat([valid, *(tier.valid() for tier in self.coded.values())], dim=-1) if self.coded else valid

    def tier(self) -> Tensor | None:
        """[B, 1|H, N] uint8: the tier of every slot, or None where all are exact."""
        if not self.coded:
            return None
        names = [Tier.EXACT, *self.coded]
        parts = [torch.full((width,), int(tier)) for tier, width in zip(names, self.widths, strict=True)]
        shape = (self.batch_size, self.segment_heads, self.width)
        return torch.cat(parts).to(device=self.device, dtype=torch.uint8).expand(shape)

    # -- appending ----------------------------------------------------------------------------------------------

    def append(
        self, k: Tensor, v: Tensor, tokens: Sequence[int], first: Sequence[int], step: int, more: Given = NONE_GIVEN
    ) -> None:
        """Store the last `tokens[b]` entries of each row of k and v [B, H, Q, D], in place where there is room."""
        self.stage(k, v, tokens, first, step, more)
        self.flush()

    def stage(
        self, k: Tensor, v: Tensor, tokens: Sequence[int], first: Sequence[int], step: int, more: Given = NONE_GIVEN
    ) -> None:
        """Do all of `append` but writing keys and values; first[b] is a position, step the number of this forward.

        `more` has columns [B, 1|H, Q] of the new entries, which are 0 else.
        """
        if self.is_empty:
            self._lay_out(k, v, k.shape[0], k.shape[1])
        self._exact.stage(k, v, tokens, first, step, more)
        self.settle_account()

    def _lay_out(self, k: Tensor, v: Tensor, rows: int, heads: int) -> None:
        """Make an exact tier for keys [..., D] and values like these."""
        self.kernels, self.batch_size, self.num_kv_heads = self.kernels_for(k, v), rows, heads
        arena = self._arenas.get(Format(None, k.dtype, k.shape[-1], v.shape[-1]), k.device, self.kernels)
        together = self.kernels in ("reference", "exact")
        self.exact = self._exact_tier(arena, self._new_columns(k.device), heads, together, self._account)

    def refill(
        self, k: Tensor, v: Tensor, columns: Mapping[str, Tensor], counts: Sequence[Sequence[int]], heads: int
    ) -> None:
        """Fill an empty store with exact entries, counts [B][1|H]: k [n, D] and v of all segments, and columns."""
        self._lay_out(k, v, len(counts), heads)
        self._exact.restore(counts, k, v, columns)
        self.settle_account()

    def share(self) -> None:
        """Count another user for every page: a copy of this store, in the same arenas."""
        if self.exact is not None:
            self.exact.table.share()
            for tier in self.coded.values():
                tier.share()

    def take_unwritten(self) -> Unwritten | None:
        """What is staged and not written; the caller writes it."""
        if self.exact is None:
            return None
        staged, self.exact.unwritten = self.exact.unwritten, None
        return staged

    def write(self, k: Tensor, v: Tensor, tokens: Sequence[int]) -> None:
        """Write what was staged."""
        self._exact.write(k, v, tokens)

    def flush(self) -> None:
        """Write what is staged, if it is not written yet."""
        if staged := self.take_unwritten():
            self.write(*staged)

    def kernels_for(self, k: Tensor, v: Tensor) -> Implementation:
        """The kernels that serve keys and values like these.

        Raises `ValueError` where those asked for cannot.
        """
        return dispatch.choose(self._kernels, Format(None, k.dtype, k.shape[-1], v.shape[-1]), k.device)

    def _new_columns(self, device: torch.device) -> Columns:
        return Columns(self.columns, self.batch_size, self.segment_heads, device)

    # -- plans --------------------------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> int:
        """Move every entry to its tier, free those whose tier is DROP, and return how many slots of payload those were.

        What the plan merges, and then its columns, come first. The plan's heads axis must be the store's. Exact entries
        are coded in whole units of a tier's codec in every segment; coded entries stay, are dropped, or become exact as
        their codes give them. A plan that changes nothing copies nothing.
        """
        if plan.merges is not None:
            self.flush()
            merge(self._exact, list(self.coded.values()), plan.merges, self._account)
        for name, value in plan.columns.items():
            self.set_column(name, value)
        before, exact = sum(map(sum, self.lengths())), self._exact
        mine, *others = plan.tier.expand(self.batch_size, self.segment_heads, -1).split(self.widths, dim=-1)
        fates = dict(zip(self.coded, others, strict=True))
        coded = (mine != Tier.DROP) & (mine != Tier.EXACT)
        if bool(coded.any()):
            coded &= exact.valid()
            for name in sorted({Tier(value) for value in mine[coded].unique().tolist()} - set(self.coded)):
                self.open_tier(name)
                fates[name] = mine[..., :0]
        restored: list[Restored] = []
        for name, tier in list(self.coded.items()):
            left = tier.change(fates[name], exact, coded & (mine == name), mine == Tier.EXACT, self._account)
            restored += [left] if left is not None else []
            if tier.is_empty:
                del self.coded[name]
        exact.drop((mine != Tier.DROP) & ~coded)
        for entries_back in restored:
            exact.restore(*entries_back)
        self.settle_account()
        return before - sum(map(sum, self.lengths()))

    def open_tier(self, name: Tier) -> CodedTier:
        """Open a coded tier, without entries. Raises `ValueError` where kernels cannot serve it."""
        exact = self._exact.table.arena
        codec, form = self._codecs[name], replace(exact.format, codec=self._codecs[name])
        if self.kernels == "native" and codec.plain and not dispatch.native_serves(form, exact.device):
            raise ValueError(f"native kernels need a head_dim that 16 divides for coded entries, not {form.k_dim}")
        arena = self._arenas.get(form, exact.device, self.kernels)
        columns = self._new_columns(self.device)
        if codec.by_page:
            self.coded[name] = self._page_tier(name, arena, columns, self.num_kv_heads)
        else:
            self.coded[name] = self._unit_tier(name, arena, columns, self.num_kv_heads, self.rotary)
        return self.coded[name]

    def key_loss(self, name: Tier) -> float:
        """Squared error of codes in this tier, over the variance of the exact keys of the head that loses most."""
        return key_loss(self._exact, self._codecs[name], self.rotary)

    def dormant(self) -> Tensor | None:
        """[B, 1|H, N] bool: which exact entries have codes that sleep, or None where none has."""
        found = dormant_entries(self._exact, self.coded.values())
        return None if found is None else pad(found, (0, self.width - found.shape[2])) & self.valid()

    def sort(self) -> None:
        """Put the exact entries of every segment into ascending order of position."""
        if not self.is_empty:
            self._exact.sort()
            self.settle_account()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now; rows may repeat or be left out. Copies share their pages."""
        if not rows:
            self.reset()
            return
        heads, picked = self.num_kv_heads, torch.tensor(rows, dtype=torch.long, device=self.device)
        self._exact.select_rows(rows, picked)
        for tier in self.coded.values():
            tier.select([row * heads + head for row in rows for head in range(heads)], picked)
        self.batch_size = len(rows)
        self.settle_account()

    def unshare(self) -> None:
        """Give every row pages of its own, as if it had been fed alone."""
        self._exact.unshare()
        for tier in self.coded.values():
            tier.unshare()
        self.settle_account()
