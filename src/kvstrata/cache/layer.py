"""One layer of the cache: its clock, its rules and its store.

A forward is settled when attention ends: the new entries are appended, attention runs over what is stored, scorers
observe, and where a rule is due its plan is applied. Nothing is left for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import InputError, LayerShape, Phase, Plan, Signals, SpecError, Tier
from kvstrata.kernels.attention import KernelName, attend
from kvstrata.policy.policy import Policy, Rule
from kvstrata.store import Account, LayerStore

PREFILL_ABOVE = 16  # more queries than this at once are a prompt, not drafts


@dataclass(slots=True)
class Events:
    """What happened in a layer that a user should know of."""

    evicted: int = 0  # entries freed, per head where heads differ
    overruns: int = 0  # plans whose protected tokens exceeded the budget
    nan_scores: Tensor | int = 0  # a tensor on the layer's device until the report reads it
    plans: int = 0


class Layer:
    """Keys and values of one layer under a policy. Rows of a batch may have different lengths."""

    def __init__(self, index: int, policy: Policy, num_layers: int, account: Account, kernels: KernelName) -> None:
        self.index, self._num_layers = index, num_layers
        self._kernels: KernelName = kernels
        self.rules = policy.rules(index)
        self.store = LayerStore(index, policy.columns(index), policy.per_head(index), account)
        self._restart()

    def _restart(self) -> None:
        self.columns_fed = 0  # per row, pads included: what transformers calls the sequence length
        self.step = 0  # forwards so far
        self.seen: list[int] = []  # real tokens of each row so far
        self._gone: Tensor | None = None  # [B, columns fed by then] bool: real tokens that a later mask hid
        self._fed: list[tuple[int, list[int]]] = []  # (columns, real tokens per row) of every run of forwards
        self.events = Events()

    def reset(self) -> None:
        """Free everything and start the clock anew."""
        self.store.reset()
        self._restart()

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Sequence[int] | None,
        scale: float,
        past: Tensor | None = None,
    ) -> Tensor:
        """Store k and v [B, H, Q, D], return the attention of q [B, H*G, Q, D], then let the policy act.

        `tokens[b]` counts the real tokens of each row, which stand last; None means all Q. Queries of pads give zeros.
        `past` [B, columns fed] bool is given when it hides past tokens that were stored (pads that a finished row
        got, say): they are dropped first.
        Raises `InputError` when the forward does not fit what is stored; nothing has changed then.
        """
        batch, queries = k.shape[0], k.shape[2]
        if queries == 0:
            raise InputError("no tokens to attend to: the prompt is empty")
        if not self.store.is_empty and batch != self.store.batch_size:
            raise InputError(f"{batch} rows given to a cache that holds {self.store.batch_size}: reset() it first")
        tokens = [queries] * batch if tokens is None else list(tokens)
        if past is not None:
            self._hide(past)
        seen = self.seen or [0] * batch
        phase: Phase = "prefill" if not any(seen) or queries > PREFILL_ABOVE else "decode"
        self.store.append(k, v, tokens, seen, self.step)
        if self._kernels == "exact":  # which sums in order of position, as an uncompressed cache does
            self.store.sort()
        self.seen = [old + new for old, new in zip(seen, tokens, strict=True)]
        self.columns_fed += queries
        self._remember(queries, tokens)
        rule = self.rules[phase]
        try:
            limits = self._due(rule)
        except SpecError:  # a budget that this model cannot meet: known at the first forward, which leaves nothing
            self.reset()
            raise
        mass_rows = rule.scorer.mass_rows if rule and (limits or rule.scorer.columns) else 0
        out, mass = self._attention(q, tokens, scale, mass_rows)
        if rule and (limits or rule.scorer.columns):
            self._settle(rule, limits, mass)
        self.step += 1
        return out

    def _due(self, rule: Rule | None) -> list[tuple[int, ...]] | None:
        """Limits per row if something is over them after this forward, else None."""
        if rule is None:
            return None
        limits = rule.limits(self.seen, self.index, self.shape)
        heads = self.store.segment_heads
        over = any(
            sum(lengths) > sum(caps) * heads // len(caps)
            if rule.granularity.heads == "pooled"
            else any(n > caps[head % len(caps)] for head, n in enumerate(lengths))
            for lengths, caps in zip(self.store.lengths(), limits, strict=True)
        )
        return limits if over else None

    @property
    def shape(self) -> LayerShape:
        """What budgets in bytes are resolved with."""
        store = self.store
        return LayerShape(self._num_layers, store.num_kv_heads, store.entry_bytes, store.batch_size)

    def _attention(self, q: Tensor, tokens: list[int], scale: float, mass_rows: int) -> tuple[Tensor, Tensor | None]:
        store = self.store
        split = len(set(tokens)) > 1 or tokens[0] < q.shape[2]
        group = q.shape[1] // store.num_kv_heads
        blocks = list(store.blocks(split_rows=split))
        if len(blocks) == 1 and not split:
            done = attend(q, blocks[0].k, blocks[0].v, scale=scale, mass_rows=mass_rows, kernels=self._kernels)
            return done.out, done.mass
        out = torch.zeros_like(q)
        mass = q.new_zeros(q.shape[0], store.num_kv_heads, store.longest, dtype=torch.float32) if mass_rows else None
        for block in blocks:
            new = tokens[block.rows.start]
            if new == 0:
                continue
            heads = slice(block.heads.start * group, block.heads.stop * group)
            part = q[block.rows, heads, -new:]
            done = attend(part, block.k, block.v, scale=scale, mass_rows=mass_rows, kernels=self._kernels)
            out[block.rows, heads, -new:] = done.out
            if mass is not None and done.mass is not None:
                mass[block.rows, block.heads, : block.k.shape[2]] = done.mass
        return out, mass

    def _settle(self, rule: Rule, limits: list[tuple[int, ...]] | None, mass: Tensor | None) -> None:
        store = self.store
        position, valid = store.column("position"), store.valid()
        columns = {column.name: store.column(column.name) for column in rule.scorer.columns}
        protected = rule.protected(position, valid, self.seen, limits) if limits else ~valid
        keys = store.keys() if limits and "keys" in rule.scorer.needs else None
        signals = Signals(self.index, self.step, position, valid, protected, columns, mass, keys)
        for name, value in rule.scorer.observe(signals).items():
            store.set_column(name, value)
            columns[name] = store.column(name)
        if limits is None:
            return
        plan = rule.plan(signals, limits)
        self.events.plans += 1
        self.events.overruns += rule.overruns(limits)
        self.events.nan_scores = self.events.nan_scores + plan.nan_scores
        self.events.evicted += store.apply(plan)

    # -- tokens that a later mask hides --------------------------------------------------------------------------

    def _remember(self, queries: int, tokens: list[int]) -> None:
        whole = all(n == queries for n in tokens)
        if whole and self._fed and all(n == self._fed[-1][0] for n in self._fed[-1][1]):
            columns = self._fed[-1][0] + queries
            self._fed[-1] = (columns, [columns] * len(tokens))
        else:
            self._fed.append((queries, tokens))

    @property
    def hidden(self) -> list[int]:
        """How many of each row's real tokens a later mask hid."""
        return [0] * len(self.seen) if self._gone is None else self._gone.sum(dim=1).tolist()

    def _hide(self, past: Tensor) -> None:
        runs = [torch.arange(columns) >= columns - torch.tensor(tokens)[:, None] for columns, tokens in self._fed]
        real, past = torch.cat(runs, dim=1), past.cpu()
        hidden = real & ~past
        shown = past & ~real
        if self._gone is not None:
            shown[:, : self._gone.shape[1]] |= past[:, : self._gone.shape[1]] & self._gone
        if bool(shown.any()):
            raise InputError("attention_mask shows past tokens that it hid before: they are not stored any more")
        self._gone = hidden
        by_position = torch.zeros(len(hidden), max(self.seen), dtype=torch.bool)
        row, column = hidden.nonzero(as_tuple=True)
        by_position[row, (real.cumsum(dim=1) - 1)[row, column]] = True
        position = self.store.column("position").long()
        found = by_position.to(position.device)[:, None].expand(-1, position.shape[1], -1).gather(2, position)
        self.events.evicted += self.store.apply(Plan(torch.where(found, int(Tier.DROP), int(Tier.EXACT))))

    # -- rows and rollback --------------------------------------------------------------------------------------

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now (beams, repeats, selections)."""
        if self.store.is_empty:
            return
        self.store.select_rows(rows)
        self.seen = [self.seen[row] for row in rows]
        self._gone = None if self._gone is None else self._gone[list(rows)]
        self._fed = [(columns, [tokens[row] for row in rows]) for columns, tokens in self._fed]

    def crop(self, count: int) -> None:
        """Forget the newest `count` tokens of every row. What a plan dropped earlier stays dropped."""
        if count <= 0 or self.store.is_empty:
            return
        self.columns_fed = max(0, self.columns_fed - count)
        self._fed = _without_last(self._fed, count)
        self.seen = [sum(tokens[row] for _, tokens in self._fed) for row in range(self.store.batch_size)]
        self._gone = None if self._gone is None else self._gone[:, : self.columns_fed]
        position, valid = self.store.column("position"), self.store.valid()
        end = torch.tensor(self.seen, device=position.device)[:, None, None]
        self.store.apply(Plan(torch.where(valid & (position < end), int(Tier.EXACT), int(Tier.DROP))))


def _without_last(fed: list[tuple[int, list[int]]], count: int) -> list[tuple[int, list[int]]]:
    """The runs of columns without the newest `count` columns."""
    kept = list(fed)
    while kept and count > 0:
        columns, tokens = kept.pop()
        if columns > count:
            kept.append((columns - count, [max(0, n - count) for n in tokens]))
        count -= columns
    return kept
