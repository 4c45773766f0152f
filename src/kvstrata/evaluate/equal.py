"""Budgets so that policies are compared at the same bytes held, whatever they keep and however they store it."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from kvstrata.bench.counting import KvShape, count_bytes
from kvstrata.core import InputError, SpecError
from kvstrata.policy import Policy, parse_policy
from kvstrata.policy.allocation import RATE
from kvstrata.policy.budget import Share, parse_budget


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
    grows = any(entry.decode is None for entry in policy.table)
    if not grows:  # the same share of what was seen at every step: on average what it is half-way
        context, new_tokens = context + new_tokens // 2, 0

    def mean_at(confidence: float) -> float:
        bill = count_bytes(policy, shape, context=context, new_tokens=new_tokens + 1, confidence=confidence)
        return (bill.after_prompt.held + bill.at_end.held) / 2

    if not policy.at_step_end:
        return mean_at(0.0)
    return float(RATE) * mean_at(1.0) + (1 - float(RATE)) * mean_at(0.0)
