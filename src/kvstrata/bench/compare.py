"""Policies beside the full cache on one prompt, teacher-forced: bytes, time and agreement in one pass each.

The full cache generates first, greedily; its tokens are then fed to every policy, so that all see the same text and
step i of one can be compared with step i of another. The question of what a policy would have written by itself does
not arise. The first logits, those of the prompt, are the same for all (plans act after attention) and not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.bench.measure import process_peak, restart_process_peak
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.policy import Policy, parse_policy
from kvstrata.policy.confidence import confidence
from kvstrata.store import Bytes

Tick = Callable[[], object]


@dataclass(slots=True)
class Trace:
    """One policy's run. Lists have one item per step; bytes are those after the step."""

    policy: str
    prefill_s: float = 0.0
    step_ms: list[float] = field(default_factory=list[float])
    live: list[int] = field(default_factory=list[int])
    held: list[int] = field(default_factory=list[int])
    kl: list[float] = field(default_factory=list[float])  # KL(full || policy), nats
    top1: list[bool] = field(default_factory=list[bool])  # whether both would take the same token
    confidence: list[float] = field(default_factory=list[float])  # of each step, where the policy reads logits
    peak: Bytes = Bytes()
    process_peak: int = 0

    def summary(self, full: Trace) -> dict[str, Any]:
        """One row of the comparison table; shares are of the full cache's mean held bytes."""
        held, full_held = statistics.mean(self.held), statistics.mean(full.held)
        return {
            "policy": self.policy,
            "live_bytes": round(statistics.mean(self.live)),
            "held_bytes": round(held),
            "peak_held_bytes": self.peak.held,
            "share_of_full": held / full_held,
            "process_peak_bytes": self.process_peak,
            "prefill_s": self.prefill_s,
            "ms_per_token": statistics.median(self.step_ms),
            "top1_agreement": statistics.mean(self.top1) if self.top1 else 1.0,
            "mean_kl": statistics.mean(self.kl) if self.kl else 0.0,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The full cache's run: tokens [steps] that every policy is fed, and log-probabilities [steps, V] after each."""

    tokens: Tensor
    log_probs: Tensor
    confidence: list[float]  # after the prompt and after each step
    trace: Trace


def run_reference(model: PreTrainedModel, ids: Tensor, steps: int, tick: Tick = lambda: None) -> Reference:
    """Generate `steps` tokens greedily after ids [1, T] with the full cache, under kvstrata."""
    tokens: list[int] = []
    log_probs: list[Tensor] = []
    sure: list[float] = []

    def choose(step: int, logits: Tensor) -> int:
        sure.append(float(confidence(logits)))
        if step:
            log_probs.append(logits.float().log_softmax(dim=-1))
        tokens.append(int(logits.argmax()))
        return tokens[-1]

    trace = _run(model, ids, parse_policy("full"), steps, choose, tick)
    return Reference(torch.tensor(tokens[:steps]), torch.stack(log_probs), sure, trace)


def run_policy(
    model: PreTrainedModel,
    ids: Tensor,
    policy: Policy,
    reference: Reference,
    label: str = "",
    tick: Tick = lambda: None,
) -> Trace:
    """Feed the reference's tokens to a cache under `policy` and compare every step."""
    kl: list[float] = []
    top1: list[bool] = []

    def choose(step: int, logits: Tensor) -> int:
        if step:
            full, own = reference.log_probs[step - 1], logits.float().log_softmax(dim=-1)
            kl.append(float((full.exp() * (full - own)).nansum()))
            top1.append(bool(full.argmax() == own.argmax()))
        return int(reference.tokens[min(step, len(reference.tokens) - 1)])

    trace = _run(model, ids, policy, len(reference.tokens), choose, tick)
    trace.kl, trace.top1 = kl, top1
    trace.policy = label or policy.name
    return trace


def warm_up(model: PreTrainedModel, ids: Tensor) -> None:
    """Run a few steps so that the first measured run does not pay for page faults and lazy initialisation."""
    run_reference(model, ids[:, :256], 2)


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    ids: Tensor,
    policy: Policy,
    steps: int,
    choose: Callable[[int, Tensor], int],
    tick: Tick,
) -> Trace:
    trace = Trace(policy.name)
    restart_process_peak()
    with compress(model, policy) as cache:
        start = time.perf_counter()
        logits = forward(model, ids, cache)
        trace.prefill_s = time.perf_counter() - start
        for step in range(steps):
            token = torch.tensor([[choose(step, logits)]], device=ids.device)
            start = time.perf_counter()
            logits = forward(model, token, cache)
            trace.step_ms.append((time.perf_counter() - start) * 1e3)
            trace.live.append(cache.nbytes.live)
            trace.held.append(cache.nbytes.held)
            if sure := cache.confidence:
                trace.confidence.append(sure[0])
            tick()
        choose(steps, logits)
        trace.peak = cache.account.peak
    trace.process_peak = process_peak(ids.device)
    return trace


def forward(model: PreTrainedModel, ids: Tensor, cache: StrataCache) -> Tensor:
    """Logits [V] of the last token, on the CPU so that the clock stops when they are there."""
    output = cast(Any, model)(ids, logits_to_keep=1, **{CACHE_KEYWORD: cache})
    return cast(Tensor, output.logits)[0, -1].cpu()
