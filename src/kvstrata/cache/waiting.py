"""Forwards that are put off: parts of a prompt, and drafts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvstrata.cache.step import MOST_DRAFTS, Mode, Pending, joined_queries, newest_queries
from kvstrata.cache.stored import mass_of
from kvstrata.core import Phase
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.mass import ALL_ROWS, Future, Moments, Reduction
from kvstrata.policy.policy import Rule
from kvstrata.store import LayerStore

SEED = 32  # newest queries of a prompt with which a decode rule's sums begin


def put_off(rule: Rule, mode: Mode) -> bool:
    """Whether mass is summed only when the rule acts, from queries that are kept: it is no sum over parts, or large."""
    if rule.scorer.columns:
        return False
    return mode.prefilling or (rule.at_step_end and isinstance(rule.scorer.mass, Moments))


def with_queries(this: Pending, q: Tensor, rule: Rule) -> Pending:
    """Keep of q [B, H*G, Q, D] what the rule's scorer reads."""
    if rule.scorer.mass:
        this.queries = newest_queries(q, this.tokens, rule.scorer.mass.rows)
    return this


def joined(before: Pending | None, this: Pending, q: Tensor, rule: Rule) -> Pending:
    """A part of a prompt with the parts before; what its queries q [B, H*G, Q, D] gave is summed at the end.

    Scorers with columns have observed this part already.
    """
    if rule.scorer.columns:
        this.mass, this.observed = None, True
    else:
        this = with_queries(this, q, rule)
    if before:
        this.columns += before.columns
        this.tokens = [a + b for a, b in zip(before.tokens, this.tokens, strict=True)]
        if rule.scorer.mass and this.queries:
            rows = rule.scorer.mass.rows
            this.queries = [joined_queries(*pair, rows) for pair in zip(before.queries, this.queries, strict=True)]
    return this


def seeded(rules: Mapping[Phase, Rule | None], acted: Rule | None) -> Rule | None:
    """The decode rule whose sums begin with the newest queries of a prompt, since another rule was the prompt's.

    PolyKV, where the pattern of a layer changes between phases; None where nothing is to be begun.
    """
    later = rules["decode"]
    if later is None or not later.observes or acted is not rules["prefill"]:
        return None
    return None if acted is not None and acted.scorer == later.scorer else later


def first_sums(
    before: Pending | None, later: Rule, step: int, q: Tensor, tokens: list[int], softmax: Softmax
) -> Pending:
    """The newest queries of a prompt, whose last part is q [B, H*G, Q, D], for a rule's scorer to observe."""
    newest = newest_queries(q, tokens, SEED)
    if before:
        newest = [joined_queries(*pair, SEED) for pair in zip(before.queries, newest, strict=True)]
        tokens = [a + b for a, b in zip(before.tokens, tokens, strict=True)]
    return Pending(later, step, q.shape[2], tokens, softmax=softmax, queries=newest)


def begun(judged: Pending | None, rules: Mapping[Phase, Rule | None]) -> Pending | None:
    """The newest queries that a verdict left of a prompt that came with drafts, as `first_sums`."""
    if judged is None or judged.begins is None or not judged.queries or judged.rule is not rules["prefill"]:
        return None
    newest = [q[:, max(0, q.shape[1] - SEED) :].clone() for q in judged.queries]
    tokens, softmax = list(judged.tokens), judged.softmax
    return Pending(judged.begins, judged.step, judged.columns, tokens, softmax=softmax, queries=newest)


def sum_late(store: LayerStore, forward: Pending, rule: Rule) -> None:
    """Sum what the queries that were kept gave, where that was put off."""
    queries, forward.queries = forward.queries, []
    if not (queries and rule.scorer.mass):
        return
    assert forward.softmax is not None
    late = mass_of(store, queries, forward.softmax, rule.scorer.mass)
    if forward.mass is not None:
        exact = store.widths[0]  # of which a verdict took the end; coded entries stand behind them
        coded = forward.mass[:, :, forward.mass.shape[2] - (late.shape[2] - exact) :]
        newer = torch.tensor([q.shape[1] for q in queries], device=late.device)[:, None, None]
        assert isinstance(rule.scorer.mass, Reduction)  # the others are no sums over parts
        late += torch.cat([forward.mass[:, :, :exact], coded], dim=2) * rule.scorer.mass.decay**newer
    forward.mass = late


def drafted(store: LayerStore, this: Pending, q: Tensor, asks: bool) -> Pending:
    """Keep of q [B, H*G, Q, D] what the verdict will leave: mass is made of the queries that remain then.

    All of them where the layer `asks`, and those that may begin sums.
    """
    rules = [rule for rule in (this.rule, this.unjudged) if rule]
    reductions = {rule.scorer.mass for rule in rules if rule.scorer.mass}
    every = any(reduction.rows == ALL_ROWS for reduction in reductions)
    summed = (
        every and not asks and not this.begins and not any(isinstance(reduction, Future) for reduction in reductions)
    )
    queries = q.shape[2]
    if len(reductions) == 1 and summed and queries > MOST_DRAFTS:  # no verdict reaches back further
        assert this.softmax is not None
        old = [q[row, :, queries - n : max(queries - n, queries - MOST_DRAFTS)] for row, n in enumerate(this.tokens)]
        this.mass = mass_of(store, old, this.softmax, *reductions, newer=MOST_DRAFTS)
        this.queries = newest_queries(q, this.tokens, MOST_DRAFTS)
    elif reductions or asks or this.begins:
        most = max([reduction.rows for reduction in reductions] + [SEED] * (this.begins is not None), default=0)
        rows = ALL_ROWS if every or asks else MOST_DRAFTS + most
        this.queries = newest_queries(q, this.tokens, rows)
    return this
