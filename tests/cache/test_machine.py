"""A cache without a model next to plain Python: any order of operations keeps the engine's laws.

The Python knows every row's columns, keys and values, and what each head must still hold. Which entries a plan chose is
read from the cache; how many, out of which, and which never to drop is known beforehand. What waits is settled by the
next operation: a deep copy, settled on the spot, tells what that one must find.
"""

from __future__ import annotations

import random
import sys
import weakref
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine as StateMachine
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from kvstrata.cache import PolicyCache
from kvstrata.cache.layer import PREFILL_ABOVE
from kvstrata.cache.report import build_report
from kvstrata.cache.step import MOST_DRAFTS
from kvstrata.core import InputError
from kvstrata.kernels.attention import DENSE, Softmax
from kvstrata.policy import LayerRange, Policy, Rule, parse_policy
from kvstrata.policy.budget import Tokens
from kvstrata.policy.granularity import Token
from kvstrata.policy.protect import Protect
from kvstrata.policy.scorers.attention import AccumulatedMass, WindowMass
from kvstrata.policy.trigger import OnOverflow
from kvstrata.store import Bytes

LAYERS, DIM, ITEMSIZE, SOFTMAX = (2, 5), 8, 4, Softmax(0.5)  # numbers of the layers in a model
SURE = torch.tensor([50.0, 0, 0, 0, 0])  # logits of confidence 1; all alike have 0.21
LENGTHS, SEEDS = st.integers(1, 6) | st.integers(1, 20) | st.just(70), st.integers(0, 999)


def table(budget):
    """Rules by layer and phase: the prompt stays until a pooled plan; a shared plan for heads that differ."""
    count, safe = Tokens(budget), Protect(recent=min(2, budget))
    pooled = Rule(AccumulatedMass(), count, Token("pooled"), trigger=OnOverflow(2), protect=safe)
    window, newest = Rule(WindowMass(4, 3), count, Token("each")), Rule(WindowMass(1), count)
    return Policy("table", (LayerRange(None, pooled, 0, 3), LayerRange(window, newest, 4)))


PRESETS = ("window", "streaming", "random", "keynorm", "h2o", "tova", "snapkv", "pyramidkv", "scissorhands")
POLICIES = {name: f"{name}:budget={{0}}" for name in PRESETS} | {
    "confkv": "confkv:high={0},low={1},tau=0.5,window=99999",  # all exact
    "cake": "cake:budget={0},tau1=inf,tau2=inf",  # the same for both layers
    "room": "h2o:budget={0},room=4",
    "share": "tova:budget=25%",
    "protect": "keydiff:budget={1},sinks=2,recent=3",
    "overrun": "scissorhands:budget=30%,sinks=2,recent=3",
    "table": "",
}
KIND = st.sampled_from(["forward", "forward", "end_step", "crop", "select_rows", "activate_past_recording", "reset"])


def policy(name, budget):
    return table(budget) if name == "table" else parse_policy(POLICIES[name].format(budget, budget + 4))


def inputs(seed, rows, heads, group, queries):
    """(q, k, v) for every layer; random, so that the numbers of an entry tell which one it is."""
    draw, sizes = torch.Generator().manual_seed(seed), (heads * group, heads, heads)
    return [[torch.randn(rows, h, queries, DIM, generator=draw) for h in sizes] for _ in LAYERS]


def slots_of(layer):
    """Positions [B][1|H] in slot order."""
    rows = zip(layer.store.column("position").tolist(), layer.store.lengths(), strict=True)
    return [[slots[:n] for slots, n in zip(*row, strict=True)] for row in rows]


def state(cache):
    """Per layer: clocks, and the columns of every entry by (row, head, position)."""
    found = []
    for layer in cache.layers.values():
        if layer.store.is_empty:
            continue
        columns = [layer.store.column(column.name).tolist() for column in layer.store.columns]
        segments = [(b, h, slots) for b, heads in enumerate(slots_of(layer)) for h, slots in enumerate(heads)]
        places = {(b, h, position): slot for b, h, slots in segments for slot, position in enumerate(slots)}
        entries = {place: [x[place[0]][place[1]][slot] for x in columns] for place, slot in places.items()}
        step = layer.step
        found.append((layer.columns_fed, step, layer.seen, entries))
    return found


@dataclass
class Row:
    """What one row was fed, and what must be stored of it."""

    kv: list[list[torch.Tensor]]  # per layer k and v [H, tokens, D]
    kept: list[list[set[int]]]  # per layer and head, or for all heads: positions
    real: tuple[bool, ...] = ()  # every column fed
    hidden: frozenset[int] = frozenset()  # positions
    seen = property(lambda self: sum(self.real))

    def append(self, new, queries, kv):
        first = self.seen
        self.real += (False,) * (queries - new) + (True,) * new
        both = zip(self.kv, kv, strict=True)
        self.kv = [[torch.cat([a, b[:, queries - new :]], 1) for a, b in zip(*x, strict=True)] for x in both]
        self.kept = [[positions | set(range(first, self.seen)) for positions in heads] for heads in self.kept]

    def crop(self, count):
        self.real = self.real[: max(0, len(self.real) - count)]
        self.hidden = frozenset(p for p in self.hidden if p < self.seen)
        self.kv = [[t[:, : self.seen] for t in pair] for pair in self.kv]
        self.kept = [[{p for p in positions if p < self.seen} for positions in heads] for heads in self.kept]

    def attention(self, i, q):
        """Softmax in float64 of the newest tokens' q [H*G, new, D] over what was kept and, causally, themselves."""
        (k, v), new = self.kv[i], q.shape[1]
        heads, old = k.shape[0], self.seen - new
        mask = torch.zeros(heads, 1, new, self.seen, dtype=torch.bool)
        for head in range(heads):
            mask[head, ..., [p for p in self.kept[i][head % len(self.kept[i])] if p < old]] = True
        mask[..., old:] = torch.ones(new, new, dtype=torch.bool).tril()
        grouped = q.double().view(heads, q.shape[0] // heads, new, DIM)
        scores = torch.einsum("hgqd,hnd->hgqn", grouped, k.double()) * SOFTMAX.scale
        p = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        return torch.einsum("hgqn,hnd->hgqd", p, v.double()).flatten(0, 1)


class Engine(StateMachine):
    @initialize(sizes=st.tuples(*(st.integers(1, most) for most in (12, 3, 2, 2))), kernels=st.sampled_from([*DENSE]))
    def open(self, sizes, kernels):
        budget, rows, self.heads, self.group = sizes
        self.cache = PolicyCache(policy(self.name, budget), LAYERS, kernels)
        self.layers, self.block = list(self.cache.layers.values()), None
        self.clear(rows)

    def clear(self, rows):
        kept = [[set()] * (self.heads if layer.store.per_head else 1) for layer in self.layers]
        self.rows = [Row([[torch.zeros(self.heads, 0, DIM)] * 2] * len(LAYERS), list(kept)) for _ in range(rows)]
        self.drafting, self.draft = False, None  # with what it was before the draft that was made just now, and that
        self.waiting = [None] * len(LAYERS)  # (rule, the one if it proves to be a prompt) of a forward not settled
        self.columns = 0  # of that forward
        self.sure = {}  # column -> [B] bool
        self.evicted = [0] * len(LAYERS)

    fed = property(lambda self: len(self.rows[0].real))

    def keep(self, i, row, kept):
        self.evicted[i] += sum(map(len, row.kept[i])) - sum(map(len, kept))
        row.kept[i] = kept

    def check_plan(self, i, rule, cache):
        """`rule` acted on what the rows hold: check what it left, and take it over."""
        layer = cache.layers[LAYERS[i]]
        sure = self.sure.get(self.fed, [False] * len(self.rows))
        for row, confident, after in zip(self.rows, sure, slots_of(layer), strict=True):
            before, after = row.kept[i], [set(slots) for slots in after]
            caps = rule.budget.limits(row.seen - len(row.hidden), float(confident), layer.shape)
            caps = [caps[head % len(caps)] for head in range(len(before))]
            protected = []
            for cap, was, now in zip(caps, before, after, strict=True):
                sinks, recent = rule.protect.resolve(cap)
                protected.append({p for p in was if p < sinks or p >= row.seen - recent})
                assert protected[-1] <= now <= was, "protected tokens stay, nothing comes back"
                assert bool(now) == bool(was), "no head ends empty"
            counts = [list(map(len, before)), list(map(len, after)), caps, list(map(rule.trigger.target, caps))]
            counts.append([max(len(safe), bool(was)) for safe, was in zip(protected, before, strict=True)])
            if rule.granularity.heads == "pooled":
                counts = [[sum(count)] for count in counts]
            for full, left, cap, target, least in zip(*counts, strict=True):
                assert left == min(full, max(cap if full <= cap else target, least)), "as many as the budget says"
            self.keep(i, row, after)

    def settled(self, cache):
        """What waited was settled in `cache`."""
        for i, rules in enumerate(self.waiting):
            if rules and rules[0]:
                self.check_plan(i, rules[0], cache)
        self.waiting, self.columns = [None] * len(LAYERS), 0

    def settles(self, by_forward=False):
        """The coming operation settles what waits before anything else; a forward takes a long draft for a prompt."""
        if self.block or not any(self.waiting):
            return
        if by_forward and self.drafting and self.columns > PREFILL_ABOVE:
            self.waiting, self.drafting = [rules and rules[1:] for rules in self.waiting], False
        twin = deepcopy(self.cache)
        twin.accept() if by_forward else twin.settle()
        self.settled(twin)

    @rule(data=st.data(), queries=LENGTHS, padded=st.booleans(), seed=SEEDS, share=st.sampled_from([0, 0, 0.2, 1]))
    def forward(self, data, queries, padded, seed, share):
        """Attend; `share` of the past tokens are hidden from now on."""
        self.settles(by_forward=True)
        rows, drafted = len(self.rows), self.drafting and not self.block
        tokens = [data.draw(st.integers(0, queries)) if padded else queries for _ in range(rows)]
        seen = any(row.seen for row in self.rows)
        decode = seen and not self.block and (self.drafting or queries <= PREFILL_ABOVE)
        if self.block and self.layers[0].columns_fed > self.cache.mode.prompt_start:
            share = 0  # refused: scores of what is hidden were taken already
        past = self.hide(share, seed) if share and seen else None
        made = inputs(seed, rows, self.heads, self.group, queries)
        self.draft = (deepcopy(self.cache), made, tokens, None) if drafted and past is None else None
        for b, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
            row.append(new, queries, [(k[b], v[b]) for _, k, v in made])
        for i, (layer, qkv) in enumerate(zip(self.layers, made, strict=True)):
            out = layer.attend(*qkv, tokens if padded else None, SOFTMAX, past)
            for b, (row, new) in enumerate(zip(self.rows, tokens, strict=True)):
                pads, real = out[b].split([queries - new, new], dim=1)
                assert not pads.any(), "pads give zeros"
                wanted = row.attention(i, qkv[0][b, :, queries - new :])
                assert torch.allclose(real.double(), wanted, rtol=0, atol=1e-4)
            acts = layer.rules["decode" if decode else "prefill"]
            prompt = layer.rules["prefill"] if drafted and queries > PREFILL_ABOVE else None
            if drafted or (acts and (self.block or acts.at_step_end)):
                self.waiting[i] = acts, prompt
            elif acts:
                self.check_plan(i, acts, self.cache)
        self.columns = self.columns + queries if any(self.waiting) else 0

    @rule(queries=st.sampled_from([1, 4, 20, 70]), seed=SEEDS)
    def forward_and_verdict(self, queries, seed):
        if not self.drafting and seed % 3:
            self.turn_past_recording()
        self.forward(None, queries, False, seed, 0)
        if seed % 2:
            self.end_step(min(queries, 20), seed)
        self.crop([0, queries // 2, queries][seed // 7 % 3])

    def hide(self, share, seed):
        """-> past [B, columns]"""
        draw = random.Random(seed)
        for row in self.rows:
            row.hidden |= {p for p in range(row.seen) if draw.random() < share}
            for i, kept in enumerate(row.kept):
                self.keep(i, row, [positions - row.hidden for positions in kept])
        counted = [zip(row.real, accumulate(row.real), [row] * self.fed, strict=True) for row in self.rows]
        return torch.tensor([[real and n - 1 not in row.hidden for real, n, row in columns] for columns in counted])

    @precondition(lambda self: self.fed)
    @rule(count=st.integers(1, 20), seed=SEEDS)
    def end_step(self, count, seed):
        draw = random.Random(seed)
        sure = [[draw.random() < 0.5 for _ in range(min(count, self.fed))] for _ in self.rows]
        self.cache.end_step(torch.tensor(sure)[..., None] * SURE)
        known = len(sure[0]) if self.drafting else 1
        self.sure = {self.fed - back: [row[-1 - back] for row in sure] for back in range(known)}
        self.draft = self.draft and (*self.draft[:3], sure)
        if not (self.drafting or self.block):
            self.settled(self.cache)

    @rule(count=st.integers(0, 6) | st.sampled_from([0, 1, 17, 60, 66, 10**6]))
    def crop(self, count):
        if self.block:
            with pytest.raises(InputError):
                self.cache.crop(count)
            return
        if count and (not self.drafting or MOST_DRAFTS < count < self.columns):
            self.settles()
        draft, self.draft = self.draft, None
        self.cache.crop(count)
        for row in self.rows:
            row.crop(count)
        self.sure = {column: rows for column, rows in self.sure.items() if column <= self.fed}
        if 0 < self.columns <= count:
            self.waiting = [None] * len(LAYERS)
        self.settled(self.cache)
        if draft and self.fed and count <= min(MOST_DRAFTS, draft[1][0][0].shape[2]):
            self.same_as_never_drafted(count, *draft)

    def same_as_never_drafted(self, count, twin, made, tokens, sure):
        """A draft whose last `count` columns were rejected leaves what a shorter one, or none, leaves."""
        if queries := made[0][0].shape[2] - count:
            for layer, qkv in zip(twin.layers.values(), made, strict=True):
                layer.attend(*(t[:, :, :queries] for t in qkv), [max(0, n - count) for n in tokens], SOFTMAX)
        if sure and len(sure[0]) > count:
            twin.end_step(torch.tensor(sure)[:, : len(sure[0]) - count, None] * SURE)
        twin.crop(0)
        for (*one, left), (*other, right) in zip(state(self.cache), state(twin), strict=True):
            assert (one, left.keys()) == (other, right.keys())
            assert all(left[entry] == pytest.approx(right[entry], abs=1e-4) for entry in left)

    @precondition(lambda self: self.fed)
    @rule(data=st.data())
    def select_rows(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3))
        self.settles()
        self.draft = None
        self.cache.select_rows(rows)
        self.rows = [replace(self.rows[row], kept=list(self.rows[row].kept)) for row in rows]
        self.sure = {column: [sure[row] for row in rows] for column, sure in self.sure.items()}

    @precondition(lambda self: self.fed > 20)
    @rule()
    def reset(self):
        self.cache.reset()
        assert self.cache.account.now == Bytes()
        self.clear(len(self.rows))

    @rule()
    def turn_past_recording(self):
        self.settles()
        self.cache.stop_past_recording() if self.drafting else self.cache.activate_past_recording()
        self.drafting, self.draft = not self.drafting, None

    @rule()
    def turn_prefilling(self):
        if self.block:
            block, self.block = self.block, None
            block.__exit__(None, None, None)
            self.settled(self.cache)
        else:
            self.settles()
            self.draft, self.block = None, self.cache.prefilling()
            self.block.__enter__()

    def teardown(self):
        if hasattr(self, "cache"):
            _ = self.block and self.turn_prefilling()
            assert not any(layer.nan_scores for layer in build_report(self.cache, {}).layers)

    @invariant()
    def entries_are_those_that_were_fed(self):
        for i, layer in enumerate(self.layers):
            assert (layer.columns_fed, layer.events.evicted) == (self.fed, self.evicted[i])
            assert layer.waits == (self.waiting[i] is not None)
            if not self.fed and layer.store.is_empty:
                continue
            assert layer.seen == [row.seen for row in self.rows]
            assert layer.fed.hidden == [len(row.hidden) for row in self.rows]
            slots = slots_of(layer)
            assert [list(map(set, heads)) for heads in slots] == [row.kept[i] for row in self.rows]
            for block in layer.store.blocks(split_rows=True):
                b = block.rows.start
                for j, head in enumerate(range(self.heads)[block.heads]):
                    at = slots[b][head % len(slots[b])]
                    for stored, fed in zip((block.k, block.v), self.rows[b].kv[i], strict=True):
                        assert torch.equal(stored[0, j], fed[head, at])

    @invariant()
    def bytes_are_those_of_the_tensors(self):
        account = self.cache.account
        for i, layer in enumerate(self.layers):
            store, kept = layer.store, sum(len(positions) for row in self.rows for positions in row.kept[i])
            if store.exact and not store.exact.table.arena.has_shared:
                numbers = kept * (2 * DIM * (1 if store.per_head else self.heads) + len(store.columns))
                assert account.parts[LAYERS[i]].live == numbers * ITEMSIZE
        assert astuple(account.now) == tuple(map(sum, zip(*map(astuple, account.parts.values()), strict=True)))
        tensors = [t for arena in self.cache.arenas for b in arena.blocks for t in b[1:]]
        tensors += [t for layer in self.layers if layer.store.exact for t in layer.store.exact.columns.data.values()]
        assert account.now.reserved == sum(t.untyped_storage().nbytes() for t in tensors)
        assert all(now <= peak for now, peak in zip(astuple(account.now), astuple(account.peak), strict=True))
        seen = sum(row.seen - len(row.hidden) for row in self.rows)
        assert self.cache.full_bytes == len(LAYERS) * seen * self.heads * 2 * DIM * ITEMSIZE


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.thin(3)
def test_any_order_of_operations_keeps_the_laws(name):
    machine = type(name, (Engine,), {"name": name})  # whose name the examples are drawn from
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=15))


def play(cache, operations):
    """Run the operations and yield the state after each."""
    rows = 2
    for seed, kind in enumerate(operations, start=len(operations)):
        queries, picked = 1 + seed % 20, [seed % rows, (seed + 1) % rows, seed % rows][: 1 + seed % 3]
        given = {"end_step": [(seed % 2 * SURE).expand(rows, 1, -1)], "crop": [seed % 5], "select_rows": [picked]}
        if kind == "forward":
            for layer, qkv in zip(cache.layers.values(), inputs(seed, rows, 2, 2, queries), strict=True):
                layer.attend(*qkv, [queries] * (rows - 1) + [seed % 2], SOFTMAX)
        else:
            getattr(cache, kind)(*given.get(kind, []))
        rows = next(iter(cache.layers.values())).store.batch_size or rows
        yield state(cache), cache.account.now, cache.account.peak


def containers():
    """Sizes of what the package's modules hold; memos of pure functions may grow."""
    modules = [vars(module) for name, module in sys.modules.items() if name.partition(".")[0] == "kvstrata"]
    return [len(value) for names in modules for value in names.values() if isinstance(value, dict | list | set)]


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(POLICIES)), budget=st.integers(1, 12), operations=st.lists(KIND, max_size=12))
def test_nothing_is_kept_outside_the_cache(name, budget, operations):
    """Two caches fed by turns do as one alone; a cache that is dropped is gone at once."""
    before = containers()
    caches = [PolicyCache(policy(name, budget), LAYERS) for _ in range(3)]
    alone = list(play(caches[0], operations))
    for expected, *found in zip(alone, *(play(cache, operations) for cache in caches[1:]), strict=True):
        assert found == [expected, expected]
    stores = [weakref.ref(layer.store) for cache in caches for layer in cache.layers.values()]
    del caches
    assert not any(store() for store in stores)
    assert containers() == before
