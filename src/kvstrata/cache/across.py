"""Layers that settle a forward together, since their entries compete with one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvstrata.cache.layer import Layer
from kvstrata.cache.limits import Limits, note_shares
from kvstrata.cache.step import Pending
from kvstrata.policy.across import select_across
from kvstrata.policy.policy import Rule
from kvstrata.policy.preference import ByPreference

Claim = tuple[Pending, Rule, list[float] | None]  # a forward, its rule, and how sure the model was


@torch.no_grad()
def settle_together(layers: Sequence[Layer]) -> None:
    """Let layers act whose forward waits for one another: those that compete, and those that divide a budget."""
    claims = {layer: claim for layer in layers if (claim := layer.claim())}
    if compete := {layer: claim for layer, claim in claims.items() if claim[1].across}:
        settle_across(compete)
    for budget in dict.fromkeys(rule.divided for _, rule, _ in claims.values() if not rule.across):
        if budget is not None:
            settle_divided(budget, {layer: claim for layer, claim in claims.items() if claim[1].divided == budget})


def settle_divided(budget: ByPreference, claims: Mapping[Layer, Claim]) -> None:
    """Measure what each layer's share of a budget depends on, give it out, and let them act by it."""
    assert budget.preference is not None
    measures: list[list[float]] = []
    for layer, (forward, rule, _) in claims.items():
        layer.observe(forward, rule)
        measures.append(budget.preference.measure(layer.view(forward, rule, None)).tolist())
    layer, (_, rule, sure) = next(iter(claims.items()))
    means = rule.limits(layer.fed.real, sure, layer.shape)
    each = zip(zip(*measures, strict=True), means, layer.fed.real, strict=True)
    rows = [budget.shares(of_layers, min(mean), seen) for of_layers, mean, seen in each]
    for (layer, claim), shares in zip(claims.items(), zip(*rows, strict=True), strict=True):
        note_shares(layer.store, shares, [n > 1 for n in claim[0].tokens])  # one query has no variance
        layer.conclude(*claim)


def settle_across(found: Mapping[Layer, Claim]) -> None:
    """Let layers that compete act, all of them if one row is over what all may hold."""
    layers, claims = list(found), list(found.values())
    rules = [rule for _, rule, _ in claims]
    limits = [layer.limits(rule, sure) for layer, (_, rule, sure) in zip(layers, claims, strict=True)]
    over = _over(layers, limits)
    due = any(layer.due(rule, any(over)) for layer, rule in zip(layers, rules, strict=True))
    for layer, (forward, rule, _) in zip(layers, claims, strict=True):
        layer.observe(forward, rule)
    if not due:
        return
    signals = [layer.view(claim[0], claim[1], caps) for layer, claim, caps in zip(layers, claims, limits, strict=True)]
    rules = [layer.guarded(rule) for layer, rule in zip(layers, rules, strict=True)]
    scores = [rule.score(view) for rule, view in zip(rules, signals, strict=True)]
    targets = [_with_room(*pair, over) for pair in zip(rules, limits, strict=True)]
    keeps = select_across(scores, signals, targets)
    for layer, rule, z, keep, view, caps in zip(layers, rules, scores, keeps, signals, limits, strict=True):
        layer.act(rule, rule.plan_of(z, keep, view), caps)


def _over(layers: Sequence[Layer], limits: Sequence[Limits]) -> list[bool]:
    """Which rows hold more in these layers than all of them together may."""
    lengths = [layer.store.lengths() for layer in layers]
    found: list[bool] = []
    for row in range(len(limits[0])):
        stored = sum(sum(of_layer[row]) for of_layer in lengths)
        shares = [(caps[row], layer.store.segment_heads) for layer, caps in zip(layers, limits, strict=True)]
        found.append(stored > sum(sum(caps) * heads // len(caps) for caps, heads in shares))
    return found


def _with_room(rule: Rule, limits: Limits, over: list[bool]) -> Limits:
    """Limits that leave room, in rows that are over theirs: a row must not pay for its neighbour."""
    return [tuple(map(rule.trigger.target, caps)) if full else caps for caps, full in zip(limits, over, strict=True)]
