"""Tiers whose units come and go: a ledger written once, running grids, rotated codecs, and attention over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.cache.stored import MOST_OFF, attend_stored, lse_of, mass_of
from kvstrata.core import Column, Plan, Tier
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.codec import INT2, INT4, INT8_RUNNING, K2V2, K4V2
from kvstrata.kernels.codec.ref import pack, unpack
from kvstrata.kernels.codec.rotation import Rotary, hadamard
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.pages import PAGE, Format
from kvstrata.store import Account, LayerStore

DIM, HEADS, GROUP = 16, 2, 2
KERNELS = ["reference", "native"]
MASS = Column("mass", torch.float32)
ROTARY = Rotary(1.0 / 10 ** (torch.arange(8) / 4))
CODECS = {
    "int2-8": (Tier.INT2, replace(INT2, window=8)),
    "int4-4-pre": (Tier.INT4, replace(INT4, window=4, key_space="pre")),
    "int4-64-pre": (Tier.INT4, replace(INT4, key_space="pre")),
    "k4v2": (Tier.INT4, K4V2),
    "k2v2-pre": (Tier.INT2, replace(K2V2, key_space="pre")),
    "running": (Tier.INT8, INT8_RUNNING),
}


class Segment:
    """One row and kv head in plain Python: {position: (k, v)} as exact or as coded, and the units that sleep."""

    def __init__(self, codec):
        self.codec, self.unit = codec, codec.unit
        self.exact, self.units, self.asleep = {}, {}, {}  # units: {positions: (k [u, D], v [u, D])}
        self.mean = self.frame = None
        self.codes = {}  # of a running grid

    def coded(self, positions):
        """What the codec makes of these exact entries."""
        k, v = (torch.stack([self.exact[p][i] for p in positions]) for i in (0, 1))
        if self.codec.key_space == "pre":
            k = ROTARY.off(k, torch.tensor(positions))
        if self.codec.rotated:
            k, v = hadamard(k - self.mean), hadamard(v)
        page = [torch.cat([x, x[-1:].expand(PAGE - len(x), -1)])[None] for x in (k, v)]
        form = Format(self.codec, torch.float32, DIM, DIM)
        k, v = (x[0, : len(positions)] for x in unpack(form, *pack(form, *page)[:3]))
        if self.codec.rotated:
            k, v = hadamard(k) + self.mean, hadamard(v)
        return (ROTARY.on(k, torch.tensor(positions)) if self.codec.key_space == "pre" else k), v

    def run(self, positions):
        """Code single entries under the running grid."""
        numbers = torch.stack([torch.cat(self.exact[p]) for p in positions])
        need = numbers.abs().amax(dim=0) / torch.tensor(127.0)
        if self.frame is None:
            self.frame = torch.where(need > 0, need, 1.0)
        elif bool((need > self.frame).any()):
            new = torch.where(need > self.frame, need * 1.1, self.frame)
            self.codes = {p: (q * self.frame / new).round().clamp(-127, 127) for p, q in self.codes.items()}
            self.frame = new
        for p, x in zip(positions, numbers, strict=True):
            self.codes[p] = (x / self.frame).round().clamp(-127, 127)

    def apply(self, fate, tier):
        """fate {position: Tier}."""
        chosen = sorted(p for p in self.exact if fate[p] == tier)
        stays = {p for p in self.exact if fate[p] == Tier.EXACT}
        back = {}
        for positions, values in list(self.units.items()):
            kept = [fate[p] for p in positions]
            if all(f == tier for f in kept):
                continue
            del self.units[positions]
            if all(f == Tier.EXACT for f in kept):
                self.asleep[positions] = values
            back.update({p: (values[0][i], values[1][i]) for i, p in enumerate(positions) if fate[p] != Tier.DROP})
        for positions in list(self.asleep):
            if set(positions) <= set(chosen):
                self.units[positions] = self.asleep.pop(positions)
                chosen = [p for p in chosen if p not in positions]
            elif not set(positions) <= stays and not set(positions) <= back.keys():
                del self.asleep[positions]
        if self.codec.rotated and chosen and self.mean is None:
            k = torch.stack([self.exact[p][0] for p in chosen])
            self.mean = (ROTARY.off(k, torch.tensor(chosen)) if self.codec.key_space == "pre" else k).mean(dim=0)
        if self.codec.running and chosen:
            self.run(chosen)
        for at in range(0, len(chosen), self.unit):
            positions = tuple(chosen[at : at + self.unit])
            if not self.codec.running:
                self.units[positions] = self.coded(positions)
            else:
                self.units[positions] = None
        if self.codec.running:
            for positions in (*self.units, *self.asleep):
                value = (self.codes[positions[0]] * self.frame)[None]
                of = self.units if positions in self.units else self.asleep
                of[positions] = (value[:, :DIM], value[:, DIM:])
        self.exact = {p: x for p, x in self.exact.items() if p in stays} | back
        if not self.units and not self.asleep:
            self.mean = self.frame = None  # the tier is given up with its last unit, where no other row has any

    def entries(self):
        found = dict(self.exact)
        for positions, (k, v) in self.units.items():
            found.update({p: (k[i], v[i]) for i, p in enumerate(positions)})
        return found


class Model(RuleBasedStateMachine):
    per_head = False

    @initialize(
        rows=st.integers(1, 2), name=st.sampled_from(list(CODECS)), kernels=st.sampled_from(["reference", "native"])
    )
    def open(self, rows, name, kernels):
        self.account = Account()
        self.tier, self.codec = CODECS[name]
        codecs = {self.tier: self.codec}
        self.store = LayerStore(0, [MASS], self.per_head, self.account, None, kernels, codecs, ROTARY)
        self.rows, self.fed = [[Segment(self.codec) for _ in range(HEADS)] for _ in range(rows)], 0

    @rule(count=st.sampled_from([1, 5, 20, 70]), seed=st.integers(0, 99))
    def append(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        k, v = (torch.randn(len(self.rows), HEADS, count, DIM, generator=draw) for _ in range(2))
        self.store.append(k, v, [count] * len(self.rows), [self.fed] * len(self.rows), 0)
        self._took(k, v)

    def _took(self, k, v):
        for b, heads in enumerate(self.rows):
            for h, held in enumerate(heads):
                held.exact.update({self.fed + i: (k[b, h, i], v[b, h, i]) for i in range(k.shape[2])})
        self.fed += k.shape[2]
        self.store.set_column("mass", self.store.column("position").float() / 2)

    @precondition(lambda self: self.fed)
    @rule(drop=st.sampled_from([0.0, 0.2, 0.9]), code=st.sampled_from([0.0, 0.5, 1.0]),
          promote=st.sampled_from([0.0, 0.5]), apart=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
    def plan(self, drop, code, promote, apart, seed):
        """Random fates: units whole, or (`apart`) entry by entry; some exact entries coded; some codes woken."""
        draw = torch.Generator().manual_seed(seed)
        rand = lambda: torch.rand((), generator=draw).item()  # noqa: E731
        promote = 0.0 if self.codec.running else promote
        store = self.store
        tier = torch.zeros(store.valid().shape, dtype=torch.uint8)
        position, valid = store.column("position").tolist(), store.valid()
        for b, row in enumerate(self.rows):
            for group in [[h] for h in range(HEADS)] if self.per_head else [range(HEADS)]:
                held = row[group[0]]
                fate = {p: Tier.DROP if rand() < drop else Tier.EXACT for p in held.exact}
                for positions in held.asleep:
                    if rand() < 0.5 and all(fate[p] == Tier.EXACT for p in positions):
                        fate.update(dict.fromkeys(positions, self.tier))
                sleepers = {p for positions in held.asleep for p in positions}
                free = sorted(p for p, to in fate.items() if to == Tier.EXACT and p not in sleepers)
                count = int(len(free) * code) // held.unit * held.unit
                fate.update(dict.fromkeys(free[:count], self.tier))
                for positions in held.units:
                    to = Tier.DROP if rand() < drop / 2 else Tier.EXACT if rand() < promote else self.tier
                    fate.update(dict.fromkeys(positions, to))
                    if apart and rand() < 0.3:
                        fate[positions[0]] = Tier.DROP
                for i, p in enumerate(position[b][group[0] if self.per_head else 0]):
                    if valid[b, group[0] if self.per_head else 0, i]:
                        tier[b, group[0] if self.per_head else 0, i] = int(fate[p])
                for h in group:
                    row[h].apply(fate, self.tier)
        any_left = any(held.units or held.asleep for row in self.rows for held in row)
        store.apply(Plan(tier))
        assert bool(store.coded) == any_left
        if any_left:  # frames live as long as the tier
            for row in self.rows:
                for held in row:
                    self._adopt_frame(held, row)

    def _adopt_frame(self, held, row):
        if held.units or held.asleep:
            return
        tier = self.store.coded[self.tier]
        s = self.rows.index(row) * HEADS + row.index(held)
        frame = tier.codes.frames[s]
        if frame.numel() and not frame.isnan().any():
            held.mean, held.frame = (frame.clone(), None) if self.codec.rotated else (None, frame.clone())

    @precondition(lambda self: self.fed)
    @rule(rows=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def select_rows(self, rows):
        rows = [row % len(self.rows) for row in rows]
        self.store.select_rows(rows)
        self.rows = [[self._copy(held) for held in self.rows[row]] for row in rows]

    def _copy(self, held):
        new = Segment(self.codec)
        new.exact, new.units, new.asleep = dict(held.exact), dict(held.units), dict(held.asleep)
        new.mean, new.frame, new.codes = held.mean, held.frame, dict(held.codes)
        return new

    @invariant()
    def holds_what_it_should(self):
        if not self.fed:
            return
        store, valid, keys = self.store, self.store.valid(), self.store.dense("k")
        position, mass, tier, asleep = store.column("position"), store.column("mass"), store.tier(), store.dormant()
        assert torch.equal(mass, position / 2)
        for b, row in enumerate(self.rows):
            for h, held in enumerate(row):
                segment = h if self.per_head else 0
                slots = {int(position[b, segment, i]): i for i in valid[b, segment].nonzero().flatten().tolist()}
                entries = held.entries()
                assert slots.keys() == entries.keys()
                for p, (k, _) in entries.items():
                    where = Tier.EXACT if p in held.exact else self.tier
                    assert where == (Tier.EXACT if tier is None else tier[b, segment, slots[p]])
                    assert torch.allclose(keys[b, h, slots[p]], k, atol=1e-5)
                sleeping = {p for positions in held.asleep for p in positions}
                found = set() if asleep is None else {p for p, i in slots.items() if asleep[b, segment, i]}
                assert found == sleeping

    @invariant()
    def the_books_are_right(self):
        if not self.fed:
            return
        blocks = sum(t.untyped_storage().nbytes() for arena in self.store._arenas for b in arena.blocks for t in b[1:])
        tiers = (self.store.exact, *self.store.coded.values())
        assert self.account.now.reserved == blocks + sum(tier.beside_bytes for tier in tiers)
        assert self.account.now.live <= self.account.now.held <= self.account.now.reserved

    @precondition(lambda self: self.fed and all(held.entries() for row in self.rows for held in row))
    @rule(queries=st.integers(1, 3), seed=st.integers(0, 99))
    def attend(self, queries, seed):
        draw = torch.Generator().manual_seed(seed)
        q = torch.randn(len(self.rows), HEADS * GROUP, queries, DIM, generator=draw)
        k, v = (torch.randn(len(self.rows), HEADS, queries, DIM, generator=draw) for _ in range(2))
        tokens = [queries] * len(self.rows)
        self.store.stage(k, v, tokens, [self.fed] * len(self.rows), 0)
        done = attend_stored(self.store, q, tokens, Softmax(0.25), Reduction(2), None)
        out, mass = done.out, done.mass
        self._took(k, v)
        position, valid = self.store.column("position"), self.store.valid()
        for b, row in enumerate(self.rows):
            for h, held in enumerate(row):
                segment, entries = h if self.per_head else 0, held.entries()
                order = sorted(entries)
                keys, values = (torch.stack([entries[p][i] for p in order]).double() for i in (0, 1))
                slots = {int(position[b, segment, i]): i for i in valid[b, segment].nonzero().flatten().tolist()}
                total = torch.zeros(len(order)).double()
                for g in range(GROUP):
                    scores = q[b, h * GROUP + g].double() @ keys.T * 0.25
                    for i in range(queries):
                        scores[i, len(order) - queries + 1 + i :] = -torch.inf
                    p = scores.softmax(dim=-1)
                    assert torch.allclose(out[b, h * GROUP + g].double(), p @ values, atol=2e-3)
                    total += p[-2:].sum(dim=0) / GROUP
                assert torch.allclose(mass[b, h, [slots[at] for at in order]].double(), total, atol=2e-3)


class PerHeadModel(Model):
    per_head = True


for machine in (Model, PerHeadModel):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=10)
TestShared = Model.TestCase
TestPerHead = PerHeadModel.TestCase


def test_units_are_coded_whole():
    store = LayerStore(0, [], False, Account(), codecs={Tier.INT2: replace(INT2, window=8)})
    k = torch.randn(1, 1, 12, DIM)
    store.append(k, k, [12], [0], 0)
    with pytest.raises(ValueError, match="8 at a time"):
        store.apply(Plan(torch.full((1, 1, 12), int(Tier.INT2), dtype=torch.uint8)))


@pytest.mark.parametrize("name", ["int2-8", "int4-4-pre", "k4v2"])
def test_a_hundred_ways_there_and_back_change_no_code(name):
    """Write once: a window that moves between exact and coded keeps its codes bit for bit."""
    tier, codec = CODECS[name]
    store = LayerStore(0, [], False, Account(), codecs={tier: codec}, rotary=ROTARY)
    k, v = torch.randn(2, 1, 2, 96, DIM)
    store.append(k, v, [96], [0], 0)
    draw = torch.Generator().manual_seed(0)

    def route(coded):
        """Code the windows whose number is in `coded`."""
        window = store.column("position") // 8
        to = torch.isin(window, torch.tensor(sorted(coded)))
        store.apply(Plan(torch.where(to & store.valid(), int(tier), int(Tier.EXACT)).to(torch.uint8)))

    def keys():
        valid = store.valid()[0, 0]
        order = store.column("position")[0, 0][valid].argsort()
        return store.dense("k")[0][:, valid][:, order].clone()

    route(range(12))
    first = keys()
    for _ in range(100):
        route(torch.randperm(12, generator=draw)[: int(torch.randint(13, (), generator=draw))].tolist())
        assert torch.equal(keys(), first)
    route(range(12))
    assert store.tiers()["exact"] == 0


def test_a_running_grid_never_clips_and_errors_stay_small():
    """Section 2.5: half a step, and at most 5.5 after all rescales."""
    store = LayerStore(0, [], False, Account(), codecs={Tier.INT8: INT8_RUNNING})
    kept = {}
    for i in range(150):
        k = torch.randn(1, 2, 1, DIM) * (1 + i / 10)
        kept[i] = k[0, :, 0]
        store.append(k, k, [1], [i], 0)
        old = store.column("position") <= i - 4
        store.apply(Plan(torch.where(old & store.valid(), int(Tier.INT8), int(Tier.EXACT)).to(torch.uint8)))
    tier = store.coded[Tier.INT8]
    assert tier.rescales > 5
    step = tier.codes.frames[:, :DIM]
    for p, i in zip(store.column("position")[0, 0].tolist(), range(store.width), strict=True):
        if store.valid()[0, 0, i]:
            assert bool(((store.dense("k")[0, :, i] - kept[p]).abs() <= 5.5 * step + 1e-6).all())


class Corrected:
    """Keys of one row and two heads, the oldest 256 of 320 coded in 2 bits, and two queries per head that see all."""

    dim, count, scale = 64, 256, 0.125

    def __init__(self, gain, kernels="reference", corrected=True):
        codec = replace(K2V2, corrected=corrected)
        self.store = LayerStore(0, [], False, Account(), kernels=kernels, codecs={Tier.INT2: codec})
        self.k, v = torch.randn(2, 1, HEADS, 320, self.dim)
        self.q = gain * torch.randn(1, HEADS * GROUP, 1, self.dim)
        self.store.append(self.k, v, [320], [0], 0)
        coded = (torch.arange(320) < self.count).expand(1, 1, -1)
        self.store.apply(Plan(torch.where(coded, int(Tier.INT2), int(Tier.EXACT)).to(torch.uint8)))

    def attend(self):
        return attend_stored(self.store, self.q, [1], Softmax(self.scale), Reduction(1), None)

    def log_mass(self, k, less=0.0):
        """Log of what the coded keys get [H*G] beside the exact ones, where scores of k [H, N, D] lose `less`."""
        scores = self.scale * self.q[0].unflatten(0, (HEADS, GROUP)).squeeze(2) @ k[0].transpose(1, 2)
        scores[..., : self.count] -= less
        return (scores[..., : self.count].logsumexp(-1) - scores.logsumexp(-1)).flatten()

    def measured(self):
        position, mass = self.store.column("position")[0, 0], self.attend().mass[0]
        return mass[:, self.store.valid()[0, 0] & (position < self.count)].sum(dim=-1)


def steps(k):
    """Steps [H, N] of the 2-bit grids of turned keys [H, N, D] without their mean, in plain torch."""
    turned = hadamard(k - k.mean(dim=1, keepdim=True))
    return (turned.amax(dim=-1) - turned.amin(dim=-1)) / 3


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("gain", [1.0, 8.0])  # the second beyond what may be taken off
def test_what_rounded_keys_gain_is_taken_off(kernels, gain):
    made = Corrected(gain, kernels)
    coded = made.store.dense("k")
    order = made.store.column("position")[0, 0].masked_fill(~made.store.valid()[0, 0], 999).argsort()[:320]
    less = made.scale**2 * made.q[0].square().sum(-1).view(HEADS, GROUP, 1) * steps(made.k[0, :, :256])[:, None] ** 2
    less /= 24
    assert (less.max() > MOST_OFF) == (gain == 8)
    less *= (MOST_OFF / less.amax(dim=-1, keepdim=True)).clamp(max=1)
    found = made.measured()
    expected = made.log_mass(coded[:, :, order], less).exp().view(HEADS, GROUP).mean(dim=1)
    assert torch.allclose(found, expected, atol=1e-4)
    queries = [made.q[0]]
    softmax = Softmax(made.scale)
    again = mass_of(made.store, queries, softmax, Reduction(1))
    assert torch.allclose(again, made.attend().mass, atol=1e-5)
    assert torch.allclose(lse_of(made.store, queries, softmax)[0], made.attend().lse[0], atol=1e-4)


def test_a_correction_leaves_less_of_the_error_in_mass():
    """On Gaussian keys, which is what turned ones are like, scores of standard deviation 2."""
    errors = {True: [], False: []}
    for seed in range(20):
        for corrected in errors:
            torch.manual_seed(seed)
            made = Corrected(2.0, corrected=corrected)
            true = made.log_mass(made.k).exp().view(HEADS, GROUP).mean(dim=1)
            errors[corrected].append(float((made.measured() - true).mean()))
    bias = {corrected: abs(sum(found) / len(found)) for corrected, found in errors.items()}
    assert bias[True] < 0.3 * bias[False]
