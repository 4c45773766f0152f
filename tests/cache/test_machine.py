"""A cache without a model next to plain Python: any order of operations keeps the engine's laws.

The model knows every row's columns, keys and values, and which positions each head must still hold. Which entries a
plan chose is read from the cache; how many, from which, and which never to drop is known beforehand. A forward that
waits is settled by the next operation: a deep copy, settled on the spot, tells what that operation must find.
"""

from __future__ import annotations

import gc
import sys
import weakref
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstrata.cache import PolicyCache
from kvstrata.cache.report import build_report
from kvstrata.kernels.attention import KERNELS, Softmax
from kvstrata.policy.budget import Tokens
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import LayerRange, Policy, Rule
from kvstrata.policy.presets import EACH, SHARED
from kvstrata.policy.protect import Protect
from kvstrata.policy.scorers.attention import AccumulatedMass, WindowMass
from kvstrata.policy.scorers.keys import KeyNorm
from kvstrata.policy.spec import parse_policy
from kvstrata.policy.trigger import OnOverflow
from kvstrata.store import Bytes
from kvstrata.store.segments import PAGE

LAYERS, DIM, VOCAB = (2, 5), 4, 5
SCALE = Softmax(DIM**-0.5)
SURE = torch.tensor([50.0, 0, 0, 0, 0])  # its confidence is 1; that of equal logits is 0.21


def tables(b):
    """Rules that differ by layer and phase; heads that differ are planned by a shared rule too."""
    pooled = Rule(KeyNorm(), Tokens(b), Token("pooled"), trigger=OnOverflow(2), protect=Protect(recent=min(2, b)))
    window = Rule(WindowMass(4, 3), Tokens(b), EACH)
    return Policy("table", (LayerRange(pooled, pooled, 0, 3), LayerRange(window, Rule(WindowMass(1), Tokens(b)), 4)))


def late(b):
    """Nothing is dropped of a prompt; heads share their tokens and add up what they attend to."""
    return Policy.everywhere("late", None, Rule(AccumulatedMass(), Tokens(b), SHARED, protect=Protect(sinks=1)))


POLICIES = {
    **{name: f"{name}:budget={{0}}" for name in ("window", "streaming", "random", "keynorm", "h2o", "tova", "snapkv")},
    **{name: f"{name}:budget={{0}}" for name in ("pyramidkv", "scissorhands")},
    "confkv": "confkv:high={0},low={1},tau=0.5",
    "room": "h2o:budget={0},room=4",
    "share": "tova:budget=25%",
    "protect": "keydiff:budget={1},sinks=2,recent=3",
    "overrun": "scissorhands:budget=30%,sinks=2,recent=3",
    "table": tables,
    "late": late,
}


def policy(name, budget):
    made = POLICIES[name]
    return parse_policy(made.format(budget, budget + 4)) if isinstance(made, str) else made(budget)


def inputs(seed, rows, heads, group, queries):
    """q, k and v of every layer; random floats, so that each entry's payload tells which one it is."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads * group, heads, heads)
    return [[torch.randn(rows, h, queries, DIM, generator=generator) for h in sizes] for _ in LAYERS]


def logits_of(sure):
    """[B][K] bool -> logits [B, K, V] of a model that is sure where told."""
    return torch.tensor(sure)[..., None] * SURE


def stored(layer):
    """Positions [B][1|H] in slot order."""
    if layer.store.is_empty:
        return []
    dense, lengths = layer.store.column("position").tolist(), layer.store.lengths()
    return [[slots[:n] for slots, n in zip(*row, strict=True)] for row in zip(dense, lengths, strict=True)]


def state(cache):
    """Clocks and, by position, all columns of every segment, exact."""
    found = []
    for layer in cache.layers.values():
        columns = {c.name: layer.store.column(c.name) for c in layer.store.columns if not layer.store.is_empty}
        by_position = [
            [
                {
                    position: tuple(c[row, head, slot].item() for c in columns.values())
                    for slot, position in enumerate(s)
                }
                for head, s in enumerate(segments)
            ]
            for row, segments in enumerate(stored(layer))
        ]
        found.append((layer.columns_fed, layer.seen, layer.fed.hidden, by_position))
    return found


def tensors(store):
    values = [value for value in vars(store).values() if not hasattr(value, "layers")]
    flat = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    return [t for t in flat if isinstance(t, torch.Tensor)]


@dataclass
class Row:
    """What one row was fed, and what must be stored of it."""

    k: list[torch.Tensor]  # per layer [H, tokens, D]
    v: list[torch.Tensor]
    kept: list[list[set[int]]]  # per layer [1|H]
    real: tuple[bool, ...] = ()  # every column fed
    hidden: frozenset[int] = frozenset()  # positions

    @property
    def seen(self):
        return sum(self.real)

    def copy(self):
        kept = [[set(positions) for positions in segments] for segments in self.kept]
        return replace(self, k=list(self.k), v=list(self.v), kept=kept)

    def hide(self, past):
        """Take the columns that are visible now."""
        position = [sum(self.real[:i]) for i in range(len(self.real))]
        self.hidden = frozenset(
            p for p, real, shown in zip(position, self.real, past, strict=True) if real and not shown
        )
        for segments in self.kept:
            for positions in segments:
                positions -= self.hidden

    def append(self, new, queries, kv):
        first = self.seen
        self.real += (False,) * (queries - new) + (True,) * new
        for i, (k, v) in enumerate(kv):
            self.k[i] = torch.cat([self.k[i], k[:, queries - new :]], dim=1)
            self.v[i] = torch.cat([self.v[i], v[:, queries - new :]], dim=1)
            for positions in self.kept[i]:
                positions |= set(range(first, self.seen))

    def crop(self, count):
        self.real = self.real[: max(0, len(self.real) - count)]
        self.hidden = frozenset(p for p in self.hidden if p < self.seen)
        self.k, self.v = ([t[:, : self.seen] for t in part] for part in (self.k, self.v))
        self.kept = [[{p for p in positions if p < self.seen} for positions in segments] for segments in self.kept]

    def attention(self, i, q, new):
        """Softmax in float64 of q [H*G, new, D] over what was kept before and, causally, its own tokens."""
        k, v = self.k[i].double(), self.v[i].double()
        heads, first = k.shape[0], self.seen - new
        mask = torch.zeros(heads, 1, new, self.seen, dtype=torch.bool)
        for head in range(heads):
            mask[head, ..., [p for p in self.kept[i][head % len(self.kept[i])] if p < first]] = True
        mask[..., first:] = torch.ones(new, new, dtype=torch.bool).tril()
        scores = torch.einsum("hgqd,hnd->hgqn", q.double().view(heads, q.shape[0] // heads, new, DIM), k) * SCALE.scale
        p = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        return torch.einsum("hgqn,hnd->hgqd", p, v).flatten(0, 1)


class Engine(RuleBasedStateMachine):
    def __init__(self, name):
        super().__init__()
        self.name = name

    @initialize(
        budget=st.integers(1, 12),
        rows=st.integers(1, 3),
        heads=st.integers(1, 2),
        group=st.integers(1, 2),
        kernels=st.sampled_from(KERNELS),
    )
    def open(self, budget, rows, heads, group, kernels):
        self.cache = PolicyCache(policy(self.name, budget), LAYERS, kernels)
        self.layers = list(self.cache.layers.values())
        self.heads, self.group, self.block = heads, group, None
        self.clear(rows)

    def clear(self, rows):
        width = [self.heads if layer.store.per_head else 1 for layer in self.layers]
        nothing = [torch.zeros(self.heads, 0, DIM)] * len(LAYERS)
        empty = Row(nothing, nothing, [[set() for _ in range(n)] for n in width])
        self.rows = [empty.copy() for _ in range(rows)]
        self.drafting = False
        self.waits = [None] * len(LAYERS)  # rules of the forward that is not settled
        self.columns = 0  # of that forward
        self.sure = {}  # number of a column -> [B] bool
        self.evicted = [0] * len(LAYERS)
        self.draft = None  # the cache before the draft that was made just now, and the draft

    # -- what a plan may do ----------------------------------------------------------------------------------------

    def check_plan(self, i, rule, cache):
        """A rule acted on what the model holds; take over what it left."""
        layer = cache.layers[LAYERS[i]]
        sure = self.sure.get(len(self.rows[0].real), [False] * len(self.rows))
        for row, sure_here, after in zip(self.rows, sure, stored(layer), strict=True):
            before, after = row.kept[i], [set(positions) for positions in after]
            caps = rule.budget.limits(row.seen - len(row.hidden), float(sure_here), layer.shape)
            caps = [caps[head % len(caps)] for head in range(len(before))]
            bounds = [rule.protect.resolve(cap) for cap in caps]
            protected = [
                {p for p in positions if p < sinks or p >= row.seen - recent}
                for positions, (sinks, recent) in zip(before, bounds, strict=True)
            ]
            for was, now, safe in zip(before, after, protected, strict=True):
                assert now <= was, "nothing comes back"
                assert safe <= now, "protected tokens stay"
                assert bool(now) == bool(was), "no head ends empty"
            every = range(len(before))
            for group in [every] if rule.granularity.heads == "pooled" else [[head] for head in every]:
                full = sum(len(before[head]) for head in group)
                least = sum(max(len(protected[head]), bool(before[head])) for head in group)
                room = rule.trigger.target if full > sum(caps[head] for head in group) else int
                allowed = max(sum(room(caps[head]) for head in group), least)
                assert sum(len(after[head]) for head in group) == min(full, allowed), "as many as the budget allows"
            self.evicted[i] += sum(map(len, before)) - sum(map(len, after))
            row.kept[i] = after

    def settled(self, cache):
        """What waited was settled in `cache`."""
        for i, rule in enumerate(self.waits):
            if rule is not None:
                self.check_plan(i, rule, cache)
        self.waits, self.columns = [None] * len(LAYERS), 0

    def settles(self):
        """The coming operation settles what waits, before anything else."""
        if any(self.waits):
            twin = deepcopy(self.cache)
            twin.settle()
            self.settled(twin)

    # -- operations ------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        queries=st.integers(1, 6) | st.integers(1, 20),
        padded=st.booleans(),
        seed=st.integers(0, 999),
        hide=st.sampled_from([0, 0, 0, 0.1, 0.5, 1]),
    )
    def forward(self, data, queries, padded, seed, hide):
        batch, count = len(self.rows), st.integers(0, queries)
        tokens = [data.draw(count) if padded else queries for _ in range(batch)]
        hide = hide and any(row.seen for row in self.rows)
        hide = 0 if self.block and any(layer._pending and layer._pending.queries for layer in self.layers) else hide
        prefill = self.block or not any(row.seen for row in self.rows)
        decode = not prefill and (self.drafting or queries <= 16)
        if not self.block:
            self.settles()
        past = self.hide(hide, seed) if hide else None
        made = inputs(seed, batch, self.heads, self.group, queries)
        self.draft = None
        if self.drafting and not self.block and not hide:
            self.draft = deepcopy(self.cache), made, tokens, None
        for row, (real, new) in enumerate(zip(self.rows, tokens, strict=True)):
            real.append(new, queries, [(k[row], v[row]) for _, k, v in made])
        for i, (layer, (q, k, v)) in enumerate(zip(self.layers, made, strict=True)):
            given = None if tokens == [queries] * batch and seed % 2 else tokens
            out = layer.attend(q, k, v, given, SCALE, past)
            assert out.isfinite().all()
            for row, (real, new) in enumerate(zip(self.rows, tokens, strict=True)):
                assert not out[row, :, : queries - new].any(), "pads give zeros"
                wanted = real.attention(i, q[row, :, queries - new :], new)
                assert torch.allclose(out[row, :, queries - new :].double(), wanted, atol=1e-4)
            acts = layer.rules["decode" if decode else "prefill"]
            if acts and (self.drafting or self.block or acts.at_step_end):
                self.waits[i] = acts
            elif acts:
                self.check_plan(i, acts, self.cache)
        self.columns = self.columns + queries if any(self.waits) else 0

    @rule(queries=st.sampled_from([1, 1, 4, 20]), times=st.integers(1, 3), seed=st.integers(0, 999))
    def forwards(self, queries, times, seed):
        """Several plain ones: room for what needs a history."""
        for turn in range(times):
            self.forward(None, queries, False, seed + turn, 0)

    def hide(self, share, seed):
        """Hide a share of the visible columns from now on; -> past [B, columns]"""
        shown = (
            torch.rand(len(self.rows), len(self.rows[0].real), generator=torch.Generator().manual_seed(seed)) >= share
        )
        for row, past in zip(self.rows, shown, strict=True):
            position = torch.tensor(row.real).cumsum(0) - 1
            past &= torch.tensor(
                [real and int(p) not in row.hidden for real, p in zip(row.real, position, strict=True)]
            )
        before = [[sum(map(len, row.kept[i])) for row in self.rows] for i in range(len(LAYERS))]
        for row, past in zip(self.rows, shown.tolist(), strict=True):
            row.hide(past)
        for i, counts in enumerate(before):
            self.evicted[i] += sum(counts) - sum(sum(map(len, row.kept[i])) for row in self.rows)
        return shown

    @precondition(lambda self: self.rows[0].real)
    @rule(data=st.data(), count=st.integers(1, 20))
    def end_step(self, data, count):
        fed = len(self.rows[0].real)
        count = min(count, fed)
        seed = data.draw(st.integers(0, 99))
        sure = (torch.rand(len(self.rows), count, generator=torch.Generator().manual_seed(seed)) < 0.5).tolist()
        self.cache.end_step(logits_of(sure))
        kept = count if self.drafting else 1
        self.sure = {fed - back: [row[-1 - back] for row in sure] for back in range(kept)}
        if self.draft:
            self.draft = *self.draft[:3], sure
        if not (self.drafting or self.block):
            self.settled(self.cache)

    @rule(count=st.integers(0, 6) | st.sampled_from([0, 1, 17, 10**6]))
    def crop(self, count):
        if count and not (self.drafting or self.block):
            self.settles()
        draft, self.draft = self.draft, None
        fed = len(self.rows[0].real)
        self.cache.crop(count)
        for row in self.rows:
            row.crop(count)
        self.sure = {column: rows for column, rows in self.sure.items() if column <= fed - count}
        self.columns = max(0, self.columns - count)
        if count and not self.columns:
            self.waits = [None] * len(LAYERS)
        if not self.block:
            self.settled(self.cache)
        if draft and count <= draft[1][0][0].shape[2]:
            self.same_as_never_drafted(count, *draft)

    def same_as_never_drafted(self, count, twin, made, tokens, sure):
        """What a draft leaves of which the last `count` columns were rejected is what a shorter draft leaves."""
        queries = made[0][0].shape[2] - count
        if queries:
            for layer, (q, k, v) in zip(twin.layers.values(), made, strict=True):
                left = [max(0, n - count) for n in tokens]
                layer.attend(q[:, :, :queries], k[:, :, :queries], v[:, :, :queries], left, SCALE)
        if sure and len(sure[0]) > count:
            twin.end_step(logits_of([row[: len(row) - count] for row in sure]))
        twin.crop(0)
        for (*one, left), (*other, right) in zip(state(self.cache), state(twin), strict=True):
            assert one == other
            for a, b in zip(sum(left, []), sum(right, []), strict=True):
                assert a.keys() == b.keys()
                assert all(a[position] == pytest.approx(b[position], abs=1e-4) for position in a)

    @precondition(lambda self: self.rows[0].real)
    @rule(data=st.data())
    def select_rows(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        if not self.block:
            self.settles()
        self.draft = None
        self.cache.select_rows(rows)
        self.rows = [self.rows[row].copy() for row in rows]
        self.sure = {column: [sure[row] for row in rows] for column, sure in self.sure.items()}

    @precondition(lambda self: len(self.rows[0].real) > 20)
    @rule()
    def reset(self):
        self.cache.reset()
        self.clear(len(self.rows))
        assert self.cache.account.now == Bytes()

    @precondition(lambda self: not self.drafting)
    @rule()
    def activate_past_recording(self):
        self.cache.activate_past_recording()
        self.drafting = True

    @precondition(lambda self: not self.block)
    @rule()
    def begin_prompt(self):
        self.settles()
        self.draft, self.block = None, self.cache.prefilling()
        self.block.__enter__()

    @precondition(lambda self: self.block)
    @rule()
    def end_prompt(self):
        self.block.__exit__(None, None, None)
        self.block = None
        self.settled(self.cache)

    def teardown(self):
        if hasattr(self, "cache"):
            if self.block:
                self.end_prompt()
            report = build_report(self.cache, {})
            assert str(report)
            assert all(layer.nan_scores == 0 for layer in report.layers)

    # -- laws of every state ---------------------------------------------------------------------------------------

    @invariant()
    def positions_and_payload_are_those_of_the_model(self):
        for i, layer in enumerate(self.layers):
            assert layer.columns_fed == len(self.rows[0].real)
            assert layer.waits == (self.waits[i] is not None)
            assert layer.events.evicted == self.evicted[i]
            if layer.store.is_empty:
                assert not self.rows[0].real
                continue
            assert layer.seen == [row.seen for row in self.rows]
            slots = stored(layer)
            assert [[sorted(s) for s in row] for row in slots] == [
                [sorted(s) for s in row.kept[i]] for row in self.rows
            ]
            for block in layer.store.blocks(split_rows=True):
                row, heads = self.rows[block.rows.start], block.heads
                at = slots[block.rows.start][heads.start % len(row.kept[i])]
                assert torch.equal(block.k[0], row.k[i][heads, at])
                assert torch.equal(block.v[0], row.v[i][heads, at])

    @invariant()
    def bytes_are_those_of_the_tensors(self):
        account, full = self.cache.account, 0
        for i, layer in enumerate(self.layers):
            store, entries = layer.store, sum(len(s) for row in self.rows for s in row.kept[i])
            numbers = 2 * DIM * (1 if store.per_head else self.heads) + len(store.columns)
            held = sum(t.untyped_storage().nbytes() for t in tensors(store))
            assert account.layers[LAYERS[i]] == Bytes(4 * numbers * entries, held, held)
            segments = store.segments
            assert all(0 <= cap - n <= PAGE for cap, n in zip(segments.capacities, segments.lengths, strict=True))
            full += sum(row.seen - len(row.hidden) for row in self.rows) * self.heads * 2 * DIM * 4
        sizes = [(size.live, size.held, size.reserved) for size in account.layers.values()]
        now = (account.now.live, account.now.held, account.now.reserved)
        assert now == tuple(map(sum, zip(*sizes, strict=True)))
        assert all(
            a <= b for a, b in zip(now, (account.peak.live, account.peak.held, account.peak.reserved), strict=True)
        )
        assert self.cache.full_bytes == full


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_operations_keeps_the_laws(name):
    def machine():
        return Engine(name)

    machine.__name__ = name  # from which the examples are drawn
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=15))


# -- no state elsewhere --------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["forward", "forward", "forward", "end_step", "crop", "select_rows", "draft", "reset"]),
        st.integers(0, 999),
    ),
    min_size=2,
    max_size=12,
)


def play(cache, operations):
    """Run the operations and yield the state after each."""
    rows = 2
    for name, seed in operations:
        fed = next(iter(cache.layers.values())).columns_fed
        if name == "forward":
            for layer, qkv in zip(cache.layers.values(), inputs(seed, rows, 2, 2, 1 + seed % 20), strict=True):
                layer.attend(*qkv, [1 + seed % 20] * (rows - 1) + [seed % 2], SCALE)
        elif name == "end_step" and fed:
            cache.end_step(logits_of([[seed % 2 == 0] * min(fed, 3)] * rows))
        elif name == "crop":
            cache.crop(seed % 5)
        elif name == "select_rows" and fed:
            picked = [seed % rows, (seed + 1) % rows, seed % rows][: 1 + seed % 3]
            cache.select_rows(picked)
            rows = len(picked)
        elif name == "draft":
            cache.activate_past_recording()
        elif name == "reset":
            cache.reset()
        yield state(cache), cache.account.now, cache.account.peak


def containers():
    """How much every module of the package holds."""
    modules = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "kvstrata"]
    return {
        (module, name): len(value) if isinstance(value, dict | list | set) else value.cache_info().currsize
        for module, holder in modules
        for name, value in vars(holder).items()
        if not name.startswith("__") and (isinstance(value, dict | list | set) or hasattr(value, "cache_info"))
    }


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(POLICIES)), budget=st.integers(1, 12), operations=OPERATIONS)
def test_nothing_is_kept_outside_the_cache(name, budget, operations):
    """Two caches fed by turns do as one alone, and nothing is left of a cache that was dropped."""
    before = containers()
    caches = [PolicyCache(policy(name, budget), LAYERS) for _ in range(3)]
    alone = list(play(caches[0], operations))
    for expected, *found in zip(alone, *(play(cache, operations) for cache in caches[1:]), strict=True):
        assert found == [expected, expected]
    gone = [weakref.ref(layer.store) for cache in caches for layer in cache.layers.values()]
    del caches
    gc.collect()
    assert all(store() is None for store in gone)
    assert containers() == before
