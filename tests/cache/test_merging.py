"""CAM, D2O and CAKE next to plain loops in float64: what stays, what it holds, and what attention makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from kvstrata.cache import PolicyCache
from kvstrata.kernels.attention import DENSE, Softmax
from kvstrata.policy import parse_policy
from kvstrata.policy.chance import uniform

LAYERS, ROWS, HEADS, GROUP, DIM, SCALE, BUDGET = 3, 2, 2, 2, 8, 0.5, 24
PROMPTS = [[(60, 47)], [(40, 40), (30, 22)]]  # tokens of each row: at once with pads, and in two parts
STEPS = 30

kernels = pytest.mark.parametrize("kernels", DENSE)
prompts = pytest.mark.parametrize("parts", PROMPTS, ids=["once", "parts"])


def inputs(queries, seed):
    """(q, k, v) of every layer: layers differ in how sharp their attention is, and keys resemble one another."""
    draw, made = torch.Generator().manual_seed(seed), []
    for layer in range(LAYERS):
        q = torch.randn(ROWS, HEADS * GROUP, queries, DIM, generator=draw) * (1 + layer)
        shared = torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(7))
        k, v = (torch.randn(ROWS, HEADS, queries, DIM, generator=draw) for _ in range(2))
        made.append((q, k + shared, v))
    return made


class Head:
    """What one row and key-value head holds, in order of position."""

    def __init__(self, layer, head):
        self.layer, self.head, self.step, self.tau, self.share = layer, head, 0, None, 1.0
        self.position, self.acc = [], torch.zeros(0, dtype=torch.float64)
        self.k = self.v = torch.zeros(0, DIM, dtype=torch.float64)
        self.seen = 0

    def attend(self, q, k, v):
        """Take new entries k, v [Q, D]; -> out [G, Q, D] of q [G, Q, D], and p [G, Q, N] kept for the rule."""
        new = k.shape[0]
        self.position += range(self.seen, self.seen + new)
        self.seen += new
        self.k, self.v = torch.cat([self.k, k.double()]), torch.cat([self.v, v.double()])
        self.acc = torch.cat([self.acc, torch.zeros(new, dtype=torch.float64)])
        n = len(self.position)
        visible = torch.ones(new, n, dtype=torch.bool).tril(n - new)
        self.p = (q.double() @ self.k.T * SCALE).masked_fill(~visible, -math.inf).softmax(-1)
        return self.p @ self.v

    def protected(self, sinks, recent):
        return [p < sinks or p >= self.seen - recent for p in self.position]

    def chosen(self, z, cap, protected):
        """Slots that stay: the protected, and the best others."""
        order = sorted(range(len(z)), key=lambda i: (not protected[i], -z[i], -self.position[i]))
        return sorted(order[: max(cap, sum(protected))])

    def keep(self, stays):
        self.position = [self.position[i] for i in stays]
        self.k, self.v, self.acc = self.k[stays], self.v[stays], self.acc[stays]


def cam_rule(head, prompt, against):
    head.acc = head.acc + head.p[:, -32:].sum(1).mean(0)
    z = (head.p[:, -6:].sum(1).mean(0) if prompt else head.acc).tolist()
    if len(z) > BUDGET:
        safe = head.protected(4, 12)
        stays = head.chosen(z, BUDGET, safe)
        reference = [z[i] for i, one in enumerate(safe) if one]
        reference = max(reference) if against == "max" else sum(reference) / len(reference)
        added = torch.zeros_like(head.v)
        for i in set(range(len(z))) - set(stays):
            place = torch.tensor(head.position[i])
            if float(uniform(place, 3, head.layer, head.step, torch.tensor(head.head))) < z[i] / reference:
                head.merged += 1
                into = [j for j in stays if j > i][:6]
                for j in into:
                    added[j] += head.v[i] / len(into)
        head.v = head.v + added
        head.keep(stays)
    head.step += 1


def d2o_rule(head, cap):
    n = len(head.position)
    if n > cap:
        stays = head.chosen(head.acc.tolist(), cap, head.protected(min(4, cap // 4), cap // 4))
        gone = [i for i in range(n) if i not in stays]
        unit = head.k / head.k.norm(dim=1, keepdim=True)
        alike = unit[gone] @ unit[stays].T
        best, near = alike.max(dim=1)
        head.tau = best.mean() if head.tau is None else 0.7 * best.max() + 0.3 * head.tau
        k, v = head.k.clone(), head.v.clone()
        for place, j in enumerate(stays):
            of = [e for e in range(len(gone)) if near[e] == place and best[e] >= head.tau - 1e-12]
            total = math.e + sum(math.exp(best[e]) for e in of)
            k[j], v[j] = head.k[j] * math.e / total, head.v[j] * math.e / total
            for e in of:
                head.merged += 1
                k[j] += head.k[gone[e]] * math.exp(best[e]) / total
                v[j] += head.v[gone[e]] * math.exp(best[e]) / total
        head.k, head.v = k, v
        head.keep(stays)


def cake_rule(head, cap, prompt):
    p = head.p[:, -32:]
    z = (p.mean(1) + 200 * p.var(1)).mean(0) if prompt else p.sum(1).mean(0)
    if len(z) > cap:
        safe = head.protected(0, 12)
        open_ = [0.0 if one else float(x) for one, x in zip(safe, z, strict=True)]
        padded = [0.0, 0.0, *open_, 0.0, 0.0]
        head.keep(head.chosen([sum(padded[i : i + 5]) / 5 for i in range(len(open_))], cap, safe))


def even(counts, more, most):
    free = [i for i, n in enumerate(counts) if n < most]
    for place, i in enumerate(free):
        counts[i] += more // len(free) + (place < more % len(free))
    return counts


def published_budgets(weights, total, most):
    """CAKE's `adjust_budgets`: rounded down, cut at the length, the rest given out evenly."""
    counts = [int(w / sum(weights) * total) for w in weights]
    over = sum(max(0, n - most) for n in counts)
    counts = even([min(n, most) for n in counts], over, most)
    return even(counts, total - sum(counts), most)


class Oracle:
    """All heads [L][B][H] under one method."""

    def __init__(self, method):
        self.method = method
        every = [[[Head(i, h) for h in range(HEADS)] for _ in range(ROWS)] for i in range(LAYERS)]
        self.heads = every
        for layer in every:
            for row in layer:
                for head in row:
                    head.merged = 0

    def forward(self, made, tokens, prompt):
        """-> out of every layer [L][B][H], and then let the rules act."""
        out = []
        for layer, (q, k, v) in zip(self.heads, made, strict=True):
            out.append([])
            for b, row in enumerate(layer):
                new, grouped = slice(q.shape[2] - tokens[b], None), q[b].unflatten(0, (HEADS, GROUP))
                out[-1].append(
                    [head.attend(grouped[h][:, new], k[b, h, new], v[b, h, new]) for h, head in enumerate(row)]
                )
        for b in range(ROWS):
            self.act([layer[b] for layer in self.heads], prompt)
        return out

    def act(self, layers, prompt):
        """One row: heads [L][H]."""
        every = [head for row in layers for head in row]
        if self.method in ("max", "mean"):
            for head in every:
                cam_rule(head, prompt, self.method)
            return
        seen = every[0].seen
        if self.method == "d2o":
            for head in every:
                head.acc = head.acc + head.p.sum(1).mean(0)
            if prompt and seen > BUDGET:
                density = [sum(float((h.acc / h.acc.sum()).var(unbiased=False)) for h in row) / HEADS for row in layers]
                weights = [math.exp(-x / (sum(density) / LAYERS)) for x in density]
                self.give(layers, published_budgets(weights, BUDGET * LAYERS, seen), 0)
            for head in every:
                d2o_rule(head, int(head.share * BUDGET + 1e-3))
            return
        own = 12
        if prompt and seen > BUDGET:
            weights = []
            for row in layers:
                entropy = variance = 0.0
                for head in row:
                    p = head.p[:, -32:]
                    before = [i for i, position in enumerate(head.position) if position < seen - 32]
                    entropy += float(torch.special.entr(p[..., before]).sum())
                    variance += float(p[..., before].var(1).sum())
                weights.append(entropy ** (1 / 1.6) * variance ** (1 / 0.6))
            self.give(layers, published_budgets(weights, (BUDGET - own) * LAYERS, seen - own), own)
        for head in every:
            cake_rule(head, own + int(head.share * (BUDGET - own) + 1e-3), prompt)

    @staticmethod
    def give(layers, counts, own):
        for row, count in zip(layers, counts, strict=True):
            for head in row:
                head.share = count / (BUDGET - own)


METHODS = {
    "max": f"cam:budget={BUDGET},window=6,seed=3,sinks=4,recent=12",
    "mean": f"cam:budget={BUDGET},window=6,seed=3,against=mean,sinks=4,recent=12",
    "d2o": f"d2o:budget={BUDGET}",
    "cake": f"cake:budget={BUDGET}",
}
methods = pytest.mark.parametrize("method", METHODS)


def held(layer, row, head):
    """Positions, keys and values of one segment in order of position."""
    store = layer.store
    for block in store.blocks(split_rows=True):
        if block.rows.start == row and head in range(*block.heads.indices(HEADS)):
            position = store.column("position")[row, head][block.places(block.k.shape[2])]
            order = position.argsort()
            at = head - block.heads.start
            return position[order].tolist(), block.k[0, at][order], block.v[0, at][order]
    return [], torch.zeros(0, DIM), torch.zeros(0, DIM)


def compare(cache, oracle):
    for layer, heads in zip(cache.layers.values(), oracle.heads, strict=True):
        for row in range(ROWS):
            for h, head in enumerate(heads[row]):
                position, k, v = held(layer, row, h)
                assert position == head.position
                assert torch.allclose(k.double(), head.k, rtol=0, atol=1e-5)
                assert torch.allclose(v.double(), head.v, rtol=0, atol=1e-5)


def run(cache, made, tokens):
    outs = [
        layer.attend(*qkv, list(tokens), Softmax(SCALE)) for layer, qkv in zip(cache.layers.values(), made, strict=True)
    ]
    cache.end_forward()
    return outs


@methods
@kernels
@prompts
@pytest.mark.thin(3)
def test_a_run_is_that_of_plain_loops(method, kernels, parts):
    cache, oracle = PolicyCache(parse_policy(METHODS[method]), range(LAYERS), kernels), Oracle(method)
    forwards = [*parts, *[(1, 1)] * STEPS]
    for number, tokens in enumerate(forwards):
        made = inputs(max(tokens), seed=number)
        outs = run(cache, made, tokens)
        for out, wanted in zip(outs, oracle.forward(made, tokens, number < len(parts)), strict=True):
            for b in range(ROWS):
                mine = out[b, :, out.shape[2] - tokens[b] :].double()
                assert torch.allclose(mine, torch.cat(wanted[b]), rtol=0, atol=1e-4)
        compare(cache, oracle)
    lengths = [sum(len(row[0].position) for row in pair) for pair in zip(*oracle.heads, strict=True)]
    assert max(lengths) <= LAYERS * BUDGET
    if method == "cake":
        assert len({len(heads[0][0].position) for heads in oracle.heads}) > 1, "layers differ"
    else:
        every = [head for layer in oracle.heads for row in layer for head in row]
        assert min(head.merged for head in every) > 0, "every head merged something"


@methods
@kernels
def test_a_copy_of_a_row_keeps_its_values_when_the_other_merges(method, kernels):
    """Rows that share pages go on with different tokens; each must be what it is alone."""
    spec, start = parse_policy(METHODS[method]), inputs(60, 0)
    steps = [inputs(1, seed) for seed in range(1, 12)]
    both = PolicyCache(spec, range(LAYERS), kernels)
    run(both, [tuple(t[:1] for t in qkv) for qkv in start], (60,))
    both.select_rows([0, 0])
    for made in steps:
        run(both, made, (1, 1))
    for row in range(ROWS):
        alone = PolicyCache(spec, range(LAYERS), kernels)
        run(alone, [tuple(t[:1] for t in qkv) for qkv in start], (60,))
        for made in steps:
            run(alone, [tuple(t[row : row + 1] for t in qkv) for qkv in made], (1,))
        for one, other in zip(both.layers.values(), alone.layers.values(), strict=True):
            for h in range(HEADS):
                (at, *mine), (wanted, *its) = held(one, row, h), held(other, 0, h)
                assert at == wanted
                assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(mine, its, strict=True))


@methods
def test_a_fork_goes_its_own_way(method):
    cache = PolicyCache(parse_policy(METHODS[method]), range(LAYERS))
    run(cache, inputs(60, 0), (60, 60))
    before = [held(layer, row, h) for layer in cache.layers.values() for row in range(ROWS) for h in range(HEADS)]
    twin = cache.fork()
    for seed in range(1, 9):
        run(twin, inputs(1, seed), (1, 1))
    after = [held(layer, row, h) for layer in cache.layers.values() for row in range(ROWS) for h in range(HEADS)]
    for (one, *old), (other, *now) in zip(before, after, strict=True):
        assert one == other
        assert all(torch.equal(a, b) for a, b in zip(old, now, strict=True))


@pytest.mark.parametrize("method", ["mean", "d2o"])
def test_drafts_merge_nothing_until_they_are_accepted_and_a_merged_value_survives_a_crop(method):
    cache = PolicyCache(parse_policy(METHODS[method]), range(LAYERS))
    run(cache, inputs(60, 0), (60, 60))
    for seed in range(1, 5):
        run(cache, inputs(1, seed), (1, 1))

    def values():
        every = [held(layer, row, h) for layer in cache.layers.values() for row in range(ROWS) for h in range(HEADS)]
        return [dict(zip(position, v, strict=True)) for position, _, v in every]

    before = values()
    cache.activate_past_recording()
    run(cache, inputs(3, 9), (3, 3))
    assert all(torch.equal(new[p], v) for old, new in zip(before, values(), strict=True) for p, v in old.items())
    cache.crop(3)
    assert all(old.keys() == new.keys() for old, new in zip(before, values(), strict=True))
    assert all(torch.equal(new[p], v) for old, new in zip(before, values(), strict=True) for p, v in old.items())
    run(cache, inputs(3, 9), (3, 3))
    cache.crop(0)
    changed = values()
    moved = [
        p
        for old, new in zip(before, changed, strict=True)
        for p in old.keys() & new.keys()
        if not torch.equal(old[p], new[p])
    ]
    assert moved, "accepted drafts merge"
    cache.stop_past_recording()
    cache.crop(2)
    assert all(torch.equal(changed[i][p], v) for i, new in enumerate(values()) for p, v in new.items())
