"""What a worker keeps of every request: which blocks are gone, and what its blocks are worth so far.

Everything that a step touches is a tensor on the device, found by slot, so nothing waits for the device before the step
has been launched. Slot 0 stands for rows nobody announced, of which nothing is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstrata.policy.confidence import confidence
from kvstrata_vllm.blocks import LayerClass
from kvstrata_vllm.compact import Rows, compact, find_slots
from kvstrata_vllm.hidden import add_tokens
from kvstrata_vllm.keys import KeyReader
from kvstrata_vllm.measure import Softmax, accumulate, block_worth
from kvstrata_vllm.messages import Report, Step

FIRST_SLOTS = 64


@dataclass(slots=True)
class Group:
    """One table of blocks: M of them for every slot."""

    layer_class: LayerClass
    block_size: int
    slot_of_block: Tensor  # [blocks of the pool] int64
    keep: Tensor  # [S, M] bool
    columns: list[Tensor]  # for each measured rule [S, M] fp32
    rows: Rows | None = None  # of this step
    ends: Tensor | None = None  # [R] tokens of each row after this step, those in blocks that are gone included
    queries: list[int] = field(default_factory=list[int])  # [R] tokens that each row computes in this step
    worth: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # measured rule -> [R, n], summed over layers
    asked: frozenset[int] = frozenset()  # measured rules that the scheduler asks for after this step

    def grow(self, slots: int) -> None:
        """Make room for so many."""
        more = slots - self.keep.shape[0]
        if more > 0:
            self.keep = torch.cat([self.keep, self.keep.new_ones(more, self.keep.shape[1])])
            self.columns = [torch.cat([c, c.new_zeros(more, c.shape[1])]) for c in self.columns]

    def widen(self, blocks: int) -> None:
        """Make room for tables of so many blocks: vLLM rounds theirs up."""
        more = blocks - self.keep.shape[1]
        if more > 0:
            self.keep = torch.nn.functional.pad(self.keep, (0, more), value=True)
            self.columns = [torch.nn.functional.pad(column, (0, more)) for column in self.columns]

    def clear(self, slots: Sequence[int]) -> None:
        """Forget what is known of these."""
        at = torch.tensor(slots, dtype=torch.long, device=self.keep.device)
        self.keep[at] = True
        for column in self.columns:
            column[at] = 0.0

    def due(self) -> list[int]:
        """Measured rules for which this step's forward must be looked at: sums always, the others when asked for."""
        rules = enumerate(self.layer_class.measured)
        return [i for i, rule in rules if (rule.scorer.mass if rule.scorer.columns else i in self.asked)]


class Worker:
    """State of one rank, one `Group` for each table of blocks that is ours."""

    def __init__(
        self, classes: dict[int, LayerClass], table_width: int, pool_blocks: int, lag: int, device: torch.device
    ) -> None:
        """classes: group -> what it does. table_width: blocks that the longest request's table has."""
        self.lag = lag
        self.groups = {
            number: Group(
                layer_class,
                layer_class.block_size,
                torch.zeros(pool_blocks, dtype=torch.long, device=device),
                torch.ones(FIRST_SLOTS, table_width, dtype=torch.bool, device=device),
                [torch.zeros(FIRST_SLOTS, table_width, device=device) for _ in layer_class.measured],
            )
            for number, layer_class in classes.items()
        }
        self._slots: dict[str, int] = {}
        self._free = list(range(FIRST_SLOTS - 1, 0, -1))
        self._late: list[tuple[int, str, list[int]]] = []
        self._step = Step()
        self._sure = torch.zeros(FIRST_SLOTS, device=device)
        self._heard: frozenset[str] = frozenset()  # requests whose confidence the last step brought

    def begin(self, step: Step) -> None:
        """Take the scheduler's message, before the step's metadata is built."""
        for request in step.finished:
            if (slot := self._slots.pop(request, None)) is not None:
                self._free.append(slot)
        present = {request for tails in step.tails for request in tails}
        slots = {request: self._slot(request) for request in present}
        gone = {*step.fresh, *step.finished}
        fresh = [slots[request] for request in step.fresh]
        late, self._late = (self._late, step.drops) if self.lag else (step.drops, [])
        for number, group in self.groups.items():
            if fresh:
                group.clear(fresh)
            for owner, request, blocks in late:
                if owner == number and request not in gone and request in self._slots:
                    group.keep[self._slots[request], blocks] = False
            tails = step.tails[number]
            where = torch.tensor(list(tails.values()), dtype=torch.long, device=group.keep.device)
            group.slot_of_block[where] = torch.tensor(
                [slots[request] for request in tails], dtype=torch.long, device=group.keep.device
            )
            group.rows, group.worth = None, {}
            group.asked = frozenset(ask.scorer for ask in step.asks if ask.group == number)
        self._step = step

    def _slot(self, request: str) -> int:
        if request not in self._slots:
            if not self._free:
                size = self._sure.shape[0]
                self._free = list(range(2 * size - 1, size - 1, -1))
                self._sure = torch.cat([self._sure, torch.zeros_like(self._sure)])
                for group in self.groups.values():
                    group.grow(2 * size)
            self._slots[request] = self._free.pop()
        return self._slots[request]

    def compact(
        self, number: int, table: Tensor, lengths: Tensor, slot_mapping: Tensor, starts: Tensor, starts_cpu: Tensor
    ) -> Rows:
        """The group's rows of this step without what is gone; shapes as in `compact.py`."""
        group = self.groups[number]
        group.widen(table.shape[1])
        slots = find_slots(slot_mapping, starts, group.slot_of_block, group.block_size)[: table.shape[0]]
        rows = compact(table, lengths, slots, group.keep[:, : table.shape[1]], group.block_size)
        group.rows, group.ends, group.queries = rows, lengths, starts_cpu.diff().tolist()
        return rows

    def measure(self, number: int, query: Tensor, kv_cache: Tensor, keys: KeyReader, softmax: Softmax) -> None:
        """Look at one layer's forward: query [tokens, H*G, D] of all rows, one after the other."""
        group = self.groups[number]
        due = group.due()
        if not due or group.rows is None or not self._step.tails:
            return
        width = self._step.width[number]
        start = 0
        for first, last in alike(group.queries):
            count, each = last - first, group.queries[first]
            stop = start + count * each
            q = query[start:stop].view(count, each, *query.shape[1:]).transpose(1, 2)
            k = keys.read(kv_cache, group.rows.table[first:last, :width].long())
            for i in due:
                rule = group.layer_class.measured[i].rule
                found = block_worth(rule, q, k, group.rows.lengths[first:last], group.block_size, softmax)
                worth = group.worth.setdefault(i, found.new_zeros(len(group.queries), width))
                worth[first:last] += found
            start = stop

    def add_worth(self, number: int, worth: Tensor) -> None:
        """Add what a surrogate says of the step's tokens [tokens], in one layer and on one rank, to their blocks."""
        group = self.groups[number]
        if group.rows is None or group.ends is None or not self._step.tails:
            return
        for column, rule in zip(group.columns, group.layer_class.measured, strict=True):
            if rule.scorer.surrogate:
                add_tokens(column, group.rows.slots, group.ends, group.queries, worth, group.block_size)

    def end(self) -> Report | None:
        """Settle the step's measurements; what the scheduler asked for, if it did."""
        for group in self.groups.values():
            if group.rows is not None:
                for i, worth in group.worth.items():
                    self._settle(group, group.rows, i, worth)
        report = Report()
        for ask in self._step.asks:
            column = self.groups[ask.group].columns[ask.scorer]
            found = column[self._slots[ask.request], : ask.blocks]
            report.measured[ask.group, ask.request, ask.scorer] = found.tolist()
        if self._heard:
            here = [request for request in self._heard if request in self._slots]
            at = torch.tensor([self._slots[request] for request in here], device=self._sure.device)
            report.confidence = dict(zip(here, self._sure[at].tolist(), strict=True)) if here else {}
            self._heard = frozenset()
        return report if report.measured or report.confidence else None

    def _settle(self, group: Group, rows: Rows, i: int, worth: Tensor) -> None:
        """Bring worth [R, n] of kept blocks to their logical numbers, and into the column."""
        column = group.columns[i][rows.slots]
        spread = torch.zeros_like(column).scatter_(1, rows.order[:, : worth.shape[1]], worth)
        scorer = group.layer_class.measured[i].scorer
        if scorer.columns:
            spread = accumulate(scorer, column, spread, group.queries)
        group.columns[i][rows.slots] = spread

    def note_logits(self, logits: Tensor) -> None:
        """Note how sure the model is of each row's next token; logits [R, V] as the sampler gets them."""
        rows = next((group.rows for group in self.groups.values()), None)
        if rows is not None and rows.slots.shape[0] == logits.shape[0]:
            self._sure[rows.slots] = confidence(logits)
            self._heard = frozenset(request for tails in self._step.tails for request in tails)


def alike(queries: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of rows that compute equally many tokens; rows that compute none are left out."""
    runs: list[tuple[int, int]] = []
    start = 0
    for stop in range(1, len(queries) + 1):
        if stop == len(queries) or queries[stop] != queries[start]:
            if queries[start]:
                runs.append((start, stop))
            start = stop
    return runs
