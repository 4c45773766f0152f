"""The coded tiers of a store: what is coded stays as coded, what is dropped is really gone, and attention sees both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.cache.stored import attend_stored
from kvstrata.core import Column, Plan, Tier
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.codec import CODECS
from kvstrata.kernels.codec.ref import pack, unpack
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.pages import PAGE, Format
from kvstrata.store import Account, LayerStore

DIM, HEADS, GROUP = 16, 2, 2
MASS = Column("mass", torch.float32)
TIERS = [Tier.INT8, Tier.INT4, Tier.INT2]


def as_coded(tier, k, v):
    """k and v [64, D] as the reference codec gives them back."""
    form = Format(CODECS[tier.name.lower()], k.dtype, DIM, DIM)
    packed = pack(form, k[None], v[None])
    return [x[0] for x in unpack(form, *packed[:3])]


class Model(RuleBasedStateMachine):
    """A store next to dicts {position: (tier, k, v)}, one per row (or per row and head) and kv head."""

    per_head = False

    @initialize(rows=st.integers(1, 2), tier=st.sampled_from(TIERS), kernels=st.sampled_from(["reference", "native"]))
    def open(self, rows, tier, kernels):
        self.account = Account()
        self.store = LayerStore(0, [MASS], self.per_head, self.account, kernels=kernels)
        self.rows, self.name, self.fed = [[{} for _ in range(HEADS)] for _ in range(rows)], tier, 0

    @rule(count=st.sampled_from([1, 5, PAGE, 130]), seed=st.integers(0, 99))
    def append(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(len(self.rows), HEADS, count, DIM, generator=draw) for _ in range(2))
        self.store.append(k, v, [count] * len(self.rows), [self.fed] * len(self.rows), 0)
        for b, heads in enumerate(self.rows):
            for h, held in enumerate(heads):
                held.update({self.fed + i: (Tier.EXACT, k[b, h, i], v[b, h, i]) for i in range(count)})
        self.fed += count
        position = self.store.column("position")
        self.store.set_column("mass", position.float() / 2)

    @precondition(lambda self: self.fed)
    @rule(share=st.sampled_from([0.0, 0.3, 0.9, 1.0]), code=st.booleans(), seed=st.integers(0, 99))
    def plan(self, share, code, seed):
        """Drop at random, and code the oldest exact entries that are whole pages."""
        store, position = self.store, self.store.column("position").tolist()
        draw = torch.Generator().manual_seed(seed)
        valid, now = store.valid(), store.tier()
        tier = torch.full(valid.shape, int(Tier.EXACT), dtype=torch.uint8) if now is None else now.clone()
        tier[torch.rand(valid.shape, generator=draw) >= share] = int(Tier.DROP)
        for b, heads in enumerate(position):
            for h, slots in enumerate(heads):
                exact = sorted((p, i) for i, p in enumerate(slots) if valid[b, h, i] and tier[b, h, i] == Tier.EXACT)
                for _, i in exact[: len(exact) // PAGE * PAGE] if code else ():
                    tier[b, h, i] = int(self.name)
        for b, row in enumerate(self.rows):
            for h, held in enumerate(row):
                segment = h if self.per_head else 0
                went = {p: int(tier[b, segment, i]) for i, p in enumerate(position[b][segment]) if valid[b, segment, i]}
                newly = sorted(p for p, to in went.items() if to == self.name and held[p][0] == Tier.EXACT)
                for at in range(0, len(newly), PAGE):
                    page = newly[at : at + PAGE]
                    k, v = as_coded(self.name, *(torch.stack([held[p][i] for p in page]) for i in (1, 2)))
                    held.update({p: (self.name, k[i], v[i]) for i, p in enumerate(page)})
                row[h] = {p: entry for p, entry in held.items() if went[p] != Tier.DROP}
        store.apply(Plan(tier))

    @precondition(lambda self: self.fed)
    @rule(rows=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def select_rows(self, rows):
        rows = [row % len(self.rows) for row in rows]
        self.store.select_rows(rows)
        self.rows = [[dict(held) for held in self.rows[row]] for row in rows]

    @invariant()
    def holds_what_it_should(self):
        if not self.fed:
            return
        store, valid, keys = self.store, self.store.valid(), self.store.dense("k")
        position, mass, tier = store.column("position"), store.column("mass"), store.tier()
        assert torch.equal(mass, position / 2)
        assert not keys[~valid.expand(keys.shape[:3])].any()
        for b, row in enumerate(self.rows):
            for h, held in enumerate(row):
                segment = h if self.per_head else 0
                slots = {int(position[b, segment, i]): i for i in valid[b, segment].nonzero().flatten().tolist()}
                assert slots.keys() == held.keys()
                for p, (name, k, _) in held.items():
                    assert name == (Tier.EXACT if tier is None else tier[b, segment, slots[p]])
                    assert torch.equal(keys[b, h, slots[p]], k)
        assert store.lengths() == [[len(held) for held in (row if self.per_head else row[:1])] for row in self.rows]

    @invariant()
    def the_books_are_right(self):
        if not self.fed:
            return
        arenas = list(self.store._arenas)
        blocks = sum(t.untyped_storage().nbytes() for arena in arenas for b in arena.blocks for t in b[1:])
        tiers = (self.store.exact, *self.store.coded.values())
        assert self.account.now.reserved == blocks + sum(tier.beside_bytes for tier in tiers)
        assert self.account.now.live <= self.account.now.held <= self.account.now.reserved

    @precondition(lambda self: self.fed and all(held for row in self.rows for held in row))
    @rule(queries=st.integers(1, 3), seed=st.integers(0, 99))
    def attend(self, queries, seed):
        """Over everything stored, new entries included, with mass in the dense order."""
        draw = torch.Generator().manual_seed(seed)
        q = torch.randn(len(self.rows), HEADS * GROUP, queries, DIM, generator=draw)
        k, v = (torch.randn(len(self.rows), HEADS, queries, DIM, generator=draw) for _ in range(2))
        tokens, first = [queries] * len(self.rows), [self.fed] * len(self.rows)
        self.store.stage(k, v, tokens, first, 0)
        done = attend_stored(self.store, q, tokens, Softmax(0.25), Reduction(2), None)
        out, mass = done.out, done.mass
        for b, row in enumerate(self.rows):
            for h, held in enumerate(row):
                held.update({self.fed + i: (Tier.EXACT, k[b, h, i], v[b, h, i]) for i in range(queries)})
        self.fed += queries
        self.store.set_column("mass", self.store.column("position").float() / 2)
        expected, expected_mass = self.oracle(q)
        assert torch.allclose(out.double(), expected, atol=2e-3)
        assert torch.allclose(mass.double(), expected_mass, atol=2e-3)

    def oracle(self, q):
        queries = q.shape[2]
        out, mass = (
            torch.zeros(q.shape, dtype=torch.double),
            torch.zeros(len(self.rows), HEADS, self.store.width).double(),
        )
        position = self.store.column("position")
        valid = self.store.valid()
        for b, row in enumerate(self.rows):
            for h, held in enumerate(row):
                segment = h if self.per_head else 0
                order = sorted(held)
                k, v = (torch.stack([held[p][i] for p in order]).double() for i in (1, 2))
                slots = {int(position[b, segment, i]): i for i in valid[b, segment].nonzero().flatten().tolist()}
                for g in range(GROUP):
                    scores = q[b, h * GROUP + g].double() @ k.T * 0.25
                    for i in range(queries):
                        scores[i, len(order) - queries + 1 + i :] = -torch.inf
                    p = scores.softmax(dim=-1)
                    out[b, h * GROUP + g] = p @ v
                    mass[b, h, [slots[at] for at in order]] += p[-2:].sum(dim=0) / GROUP
        return out, mass


class PerHeadModel(Model):
    per_head = True


for machine in (Model, PerHeadModel):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=10)
TestShared = Model.TestCase
TestPerHead = PerHeadModel.TestCase


def test_entries_are_coded_by_whole_pages():
    store = LayerStore(0, [], False, Account())
    k = torch.randn(1, 1, 70, DIM)
    store.append(k, k, [70], [0], 0)
    with pytest.raises(ValueError, match="64 at a time"):
        store.apply(Plan(torch.full((1, 1, 70), int(Tier.INT8), dtype=torch.uint8)))
