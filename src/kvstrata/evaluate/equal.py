"""Budgets so that policies are compared at the same bytes held, whatever they keep and however they store it."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from statistics import mean

from kvstrata.bench.counting import Bill, KvShape, count_bytes
from kvstrata.core import InputError, SpecError
from kvstrata.policy import Policy, parse_policy
from kvstrata.policy.allocation import RATE
from kvstrata.policy.budget import Share, parse_budget

POINTS = 4  # between the prompt's end and the last token, at which bytes are counted


def resolve(spec: str, budget: str | None, shape: KvShape | None, context: int, new_tokens: int) -> Policy:
    """The policy of a spec under a budget. `25%` is that share of the bytes which the full cache holds on average.

    Other forms of a budget are given to the policy as they are. Raises `SpecError` for what cannot be, `InputError`
    for a share where the shape of the model's keys is not known.
    """
    policy = parse_policy(spec)
    if budget is None or not any(rule for entry in policy.table for rule in (entry.prefill, entry.decode)):
        return policy
    asked = parse_budget(budget)
    if not isinstance(asked, Share):
        return policy.with_budget(asked)
    if shape is None:
        raise InputError(
            f"{budget} of the bytes: this model's layers differ in shape; give a budget in tokens or bytes"
        )
    return policy.with_budget(_share(policy, asked.fraction, shape, context, new_tokens))


@lru_cache(maxsize=1024)
def _share(policy: Policy, asked: Fraction, shape: KvShape, context: int, new_tokens: int) -> Share:
    """The share of tokens at which `asked` of the full cache's bytes are held, found by halving."""
    target = asked * held(parse_policy("full"), shape, context, new_tokens)
    low, high = 1, context
    while low < high:
        middle = (low + high + 1) // 2
        if _held_at(policy, Fraction(middle, context), shape, context, new_tokens) <= target:
            low = middle
        else:
            high = middle - 1
    return Share(Fraction(low, context))


def _held_at(policy: Policy, share: Fraction, shape: KvShape, context: int, new_tokens: int) -> float:
    try:
        return held(policy.with_budget(Share(share)), shape, context, new_tokens)
    except SpecError:  # too little for what must be protected
        return 0.0


@lru_cache(maxsize=4096)
def held(policy: Policy, shape: KvShape, context: int, new_tokens: int) -> float:
    """Bytes held on average from the prompt's end to the last token's, for one row."""

    def bill(tokens: int, more: int, sure: float = 1.0) -> Bill:
        return count_bytes(policy, shape, context=tokens, new_tokens=more, confidence=sure)

    if not new_tokens and "logits" in policy.needs:  # a prompt ends as often sure as published
        return float(RATE * bill(context, 1).after_prompt.held + (1 - RATE) * bill(context, 1, 0.0).after_prompt.held)
    # later, a layer that grows by one entry a step while the model is unsure is cut at the next sure step, so never far
    # from what it may have then
    if any(entry.prefill is None for entry in policy.table):  # what the prompt leaves is none of the budget's
        return mean(bill(context, 1 + new_tokens * i // POINTS).at_end.held for i in range(POINTS + 1))
    if any(entry.decode is None for entry in policy.table):  # grows evenly
        both = bill(context, new_tokens + 1)
        return (both.after_prompt.held + both.at_end.held) / 2
    # the same share of what was seen at every step, but for pages that fill up
    seen = {context + new_tokens * i // POINTS for i in range(POINTS + 1)}
    return mean(bill(tokens, 1).after_prompt.held for tokens in seen)
