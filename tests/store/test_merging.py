"""Merging and then dropping is what it is on dense tensors, on every kernel, and touches no page that others use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core import Column, Merges, Plan, Tier
from kvstrata.kernels.attention import DENSE
from kvstrata.kernels.codec import INT4, INT8, INT8_RUNNING
from kvstrata.store import Account, Arenas, LayerStore

MASS, HEADS, DIM = Column("mass", torch.float32), 2, 16
CODECS = {"pages": {Tier.INT8: INT8}, "running": {Tier.INT8: INT8_RUNNING}, "int4": {Tier.INT4: INT4}}


def filled(tokens, kernels="reference", per_head=True, dtype=torch.float32, codecs=None, arenas=None):
    given = {} if codecs is None else {"codecs": codecs}
    store = LayerStore(0, [MASS], per_head, Account(), arenas, kernels, **given)
    k, v = (torch.randn(len(tokens), HEADS, max(tokens), DIM).to(dtype) for _ in range(2))
    store.append(k, v, tokens, [0] * len(tokens), 0)
    return store


def contents(store):
    """{(row, head, position): (k, v)}"""
    found = {}
    for block in store.blocks(split_rows=True):
        for j, head in enumerate(range(HEADS)[block.heads]):
            position = store.column("position")[block.rows.start, head if store.per_head else 0]
            for at, p in enumerate(position[block.places(block.k.shape[2])].tolist()):
                found[block.rows.start, head, p] = (block.k[0, j, at].clone(), block.v[0, j, at].clone())
    return found


def random_plan(store, seed, mean, keys, share=0.5):
    """Some entries go, and some of those are merged into exact ones that stay."""
    draw = torch.Generator().manual_seed(seed)
    valid, tier = store.valid(), store.tier()
    stays = valid & (torch.rand(valid.shape, generator=draw) < share)
    exact = stays.clone()
    exact[..., store.widths[0] :] = False
    pairs = []
    for b, h, source in (valid & ~stays).nonzero().tolist():
        into = exact[b, h].nonzero().flatten()
        for _ in range(int(torch.randint(0, 3, (1,), generator=draw)) if len(into) else 0):
            pairs.append((b, h, source, int(into[torch.randint(len(into), (1,), generator=draw)])))
    pairs = sorted(set(pairs))
    columns = [torch.tensor([pair[i] for pair in pairs], dtype=torch.long) for i in range(4)]
    weight = torch.rand(len(pairs), generator=draw) / (len(pairs) + 1)
    tier = torch.full(valid.shape, int(Tier.EXACT), dtype=torch.uint8) if tier is None else tier
    return Plan(tier.masked_fill(~stays, int(Tier.DROP)), merges=Merges(*columns, weight, mean, keys))


def expected(store, plan):
    """The same on dense numbers in float64."""
    before, merges, position = contents(store), plan.merges, store.column("position")
    after = {place: [t.double() for t in pair] for place, pair in before.items()}
    served = [[h] for h in range(HEADS)] if store.per_head else [list(range(HEADS))]
    left = {}
    pairs = zip(
        *(t.tolist() for t in (merges.row, merges.head, merges.source, merges.target, merges.weight)), strict=True
    )
    added = []
    for b, h, source, target, weight in pairs:
        for head in served[h]:
            into = (b, head, int(position[b, h, target]))
            left[into] = left.get(into, 1.0) - weight
            added.append((into, (b, head, int(position[b, h, source])), weight))
    for into, keep in left.items():
        if merges.mean:
            after[into] = [t * keep if merges.keys or i else t for i, t in enumerate(after[into])]
    for into, source, weight in added:
        for i in range(0 if merges.keys else 1, 2):
            after[into][i] = after[into][i] + weight * before[source][i].double()
    gone = ((plan.tier == Tier.DROP) & store.valid()).nonzero().tolist()
    for b, h, slot in gone:
        for head in served[h]:
            del after[b, head, int(position[b, h, slot])]
    return after


def check(store, plan, atol=1e-6):
    wanted, n = expected(store, plan), sum(map(sum, store.lengths()))
    into = torch.stack([plan.merges.row, plan.merges.head, plan.merges.target])
    atol *= 1 + max(into.unique(dim=1, return_counts=True)[1].tolist(), default=0)  # fp32 rounds at every term
    dropped = store.apply(plan)
    assert dropped == n - sum(map(sum, store.lengths()))
    found = contents(store)
    assert found.keys() == wanted.keys()
    for place, pair in wanted.items():
        assert all(torch.allclose(a.double(), b, rtol=0, atol=atol) for a, b in zip(found[place], pair, strict=True))


@pytest.mark.parametrize("kernels", DENSE)
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])
@settings(max_examples=25)
@given(
    tokens=st.lists(st.sampled_from([1, 5, 63, 64, 130]), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    mean=st.booleans(),
    keys=st.booleans(),
    share=st.sampled_from([0.1, 0.5, 0.95]),
)
def test_merging_and_dropping_is_that_of_dense_tensors(kernels, per_head, tokens, seed, mean, keys, share):
    torch.manual_seed(seed)
    store = filled(tokens, kernels, per_head)
    check(store, random_plan(store, seed, mean, keys, share))
    check(store, random_plan(store, seed + 1, mean, keys, share))  # slots stand in no order now


@pytest.mark.parametrize("kernels", DENSE)
def test_half_precision_is_rounded_once(kernels):
    store = filled([40], kernels, dtype=torch.bfloat16)
    n = torch.arange(1, 40)
    zeros = torch.zeros(39, dtype=torch.long)
    merges = Merges(zeros, zeros, n, zeros, torch.full((39,), 0.5))
    _, v = store.blocks().__next__().k, store.blocks().__next__().v[0, 0].float()
    store.apply(Plan(torch.full((1, 2, 40), int(Tier.EXACT), dtype=torch.uint8), merges=merges))
    wanted = (v[0] + 0.5 * v[1:].sum(0)).bfloat16()
    assert torch.allclose(contents(store)[0, 0, 0][1].float(), wanted.float(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kernels", DENSE)
@pytest.mark.parametrize("codec", CODECS)
def test_coded_sources_are_merged_as_their_codes_give_them(codec, kernels):
    tier = next(iter(CODECS[codec]))
    store = filled([150, 150], kernels, codecs=CODECS[codec])
    names = torch.full((2, 2, 150), int(Tier.EXACT), dtype=torch.uint8)
    names[..., :128] = int(tier)
    store.apply(Plan(names))
    plan = random_plan(store, 3, mean=True, keys=True)
    if codec != "running":  # whose pages and units are dropped whole, or opened
        plan = Plan(
            torch.where(store.tier() == tier, int(Tier.DROP), plan.tier.int()).to(torch.uint8), merges=plan.merges
        )
    sources = plan.merges.source
    assert (sources >= store.widths[0]).any()
    check(store, plan, atol=1e-5)


def test_a_coded_target_is_refused():
    store = filled([150], codecs=CODECS["pages"])
    names = torch.full((1, 2, 150), int(Tier.EXACT), dtype=torch.uint8)
    names[..., :128] = int(Tier.INT8)
    store.apply(Plan(names))
    zero = torch.zeros(1, dtype=torch.long)
    coded = Merges(zero, zero, zero, zero + store.widths[0], torch.ones(1))
    with pytest.raises(ValueError, match="exact ones only"):
        store.apply(Plan(store.tier(), merges=coded))


@pytest.mark.parametrize("kernels", DENSE)
def test_a_merge_into_a_shared_page_copies_it_first(kernels):
    store = filled([200, 90], kernels)
    store.select_rows([0, 0, 1])
    before, held = contents(store), store.exact.table.held_pages()
    one = torch.ones(1, dtype=torch.long)
    merges = Merges(one, 0 * one, 150 * one, 3 * one, torch.ones(1))
    store.apply(Plan(torch.full(store.valid().shape, int(Tier.EXACT), dtype=torch.uint8), merges=merges))
    after = contents(store)
    changed = {place for place in before if not torch.equal(before[place][1], after[place][1])}
    assert changed == {(1, 0, 3)}
    assert torch.allclose(after[1, 0, 3][1], before[1, 0, 3][1] + before[1, 0, 150][1])
    assert all(torch.equal(before[place][0], after[place][0]) for place in before)
    assert store.exact.table.held_pages() > held
    if kernels == "native":
        assert store.exact.table.held_pages() == held + 1, "one page"


def test_a_plan_without_pairs_copies_nothing():
    store = filled([100, 100], "native")
    store.select_rows([0, 0])
    none = torch.zeros(0, dtype=torch.long)
    pages = [list(pages) for pages in store.exact.table.pages]
    stays = torch.full(store.valid().shape, int(Tier.EXACT), dtype=torch.uint8)
    store.apply(Plan(stays, merges=Merges(none, none, none, none, torch.zeros(0))))
    assert store.exact.table.pages == pages


def test_a_store_in_the_same_arena_keeps_its_values():
    arenas = Arenas(Account())
    one, other = filled([70], arenas=arenas), filled([70], arenas=arenas)
    before = contents(other)
    check(one, random_plan(one, 1, mean=False, keys=True))
    assert all(torch.equal(a, b) for p, pair in contents(other).items() for a, b in zip(pair, before[p], strict=True))


def test_columns_of_a_plan_are_set_before_anything_is_dropped():
    store = filled([4, 2])
    tier = torch.full((2, 2, 4), int(Tier.EXACT), dtype=torch.uint8)
    tier[..., 0] = int(Tier.DROP)
    store.apply(Plan(tier, columns={"mass": torch.arange(16.0).view(2, 2, 4)}))
    position, mass = store.column("position"), store.column("mass")
    assert store.lengths() == [[3, 3], [1, 1]]
    assert mass[0, 1].tolist() == [4.0 + p for p in position[0, 1].tolist()]
    assert mass[1, 0, 0].item() == 9.0
