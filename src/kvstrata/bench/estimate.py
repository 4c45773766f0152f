"""What a policy will cost and save on a model, before running it: bytes by counting, time by measuring a few layers.

Weights are never loaded. Bytes come from `counting`. Time comes from models of the same shape with fewer layers and
random weights: what one layer adds, times the number of layers, plus what does not grow with them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvstrata.bench.compare import forward
from kvstrata.bench.counting import Bill, KvShape, count_bytes
from kvstrata.core import UnsupportedModelError
from kvstrata.hf import compress
from kvstrata.hf.compat import check_model, kv_shape, not_compressed, option, query_group, stock_layers
from kvstrata.policy import Policy

STEPS = 9  # decode steps measured, of which the median counts
PROMPTS = (256, 1024)  # prompts measured, whose times give what grows with the tokens and what with their square
MOST_STORED = 16384  # entries per layer measured at; more are extrapolated from half as many


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be run."""

    context: int
    new_tokens: int
    batch: int
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """One policy's costs. Bytes are keys and values of the compressed layers, for the whole batch."""

    policy: str
    bytes: Bill
    least: Bill  # where every step is confident; the same for a policy that does not look
    prefill_s: float | None
    ms_per_token: float | None


class Shell:
    """A model known by its config alone."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: str) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        with torch.device("meta"):
            whole = self._build(config)
        check_model(whole)
        text = config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        self.passed_through = not_compressed(text, stock_layers(text))
        ours = tuple(i for i in range(self.num_layers) if i not in self.passed_through)
        heads = kv_shape(text)
        if heads is None or not ours:
            raise UnsupportedModelError(
                f"{config.model_type}: its layers' keys differ or none is ordinary attention, so bytes cannot be told"
            )
        self.shape = KvShape(ours, *heads, dtype, query_group(text, heads[0]))
        self.weight_bytes = sum(p.numel() for p in whole.parameters()) * dtype.itemsize

    def _build(self, config: PretrainedConfig) -> PreTrainedModel:
        return cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_config(config, dtype=self.dtype))

    def layers(self, count: int) -> PreTrainedModel:
        """The first `count` layers with random weights."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = count
        if kinds := option(text, "layer_types"):
            text.layer_types = kinds[:count]
        torch.manual_seed(0)
        return self._build(config).to(cast(Any, self.device)).eval()


def estimate_bytes(shell: Shell, policy: Policy, work: Workload) -> tuple[Bill, Bill]:
    """Bytes if no step is confident, and if every step is."""
    size: dict[str, Any] = {"context": work.context, "new_tokens": work.new_tokens, "batch": work.batch}
    most = count_bytes(policy, shell.shape, **size, chunk=work.chunk)
    if not policy.at_step_end:
        return most, most
    return most, count_bytes(policy, shell.shape, **size, chunk=work.chunk, confidence=1.0)


@torch.no_grad()
def measure_times(
    shell: Shell, policies: list[Policy], bills: list[Bill], work: Workload, tick: Callable[[], object]
) -> list[tuple[float, float]]:
    """(prefill seconds, milliseconds a step) of each policy, extrapolated from two small models."""
    period = _period(shell.config.get_text_config(decoder=True))
    small, large = min(period, shell.num_layers), min(2 * period, shell.num_layers)
    costs: dict[int, list[tuple[float, float]]] = {}
    for count in sorted({small, large}):
        model = shell.layers(count)
        costs[count] = []
        for policy, bill in zip(policies, bills, strict=True):
            stored = _stored(shell, bill, work)
            costs[count].append((_prefill(model, policy, work), _step(model, policy, stored, work)))
            tick()
    if small == large:
        return costs[large]
    share = (shell.num_layers - small) / (large - small)
    pairs = zip(costs[small], costs[large], strict=True)
    return [(a + (c - a) * share, b + (d - b) * share) for (a, b), (c, d) in pairs]


def _period(config: PretrainedConfig) -> int:
    """Layers after which their kinds repeat, at least two."""
    kinds: list[str] = option(config, "layer_types") or ["all"]
    for period in range(1, len(kinds)):
        if all(kinds[i] == kinds[i % period] for i in range(len(kinds))):
            return max(2, period)
    return max(2, len(kinds)) if len(set(kinds)) > 1 else 2


def _stored(shell: Shell, bill: Bill, work: Workload) -> int:
    """Entries per layer and head half-way through the continuation, on average over layers."""
    live = (bill.after_prompt.live + bill.at_end.live) / 2
    return max(1, round(live / (shell.shape.token_bytes * work.batch)))


def _prefill(model: PreTrainedModel, policy: Policy, work: Workload) -> float:
    """Seconds of the prompt, from two shorter ones: a T + b T^2."""
    short, long = (min(n, work.context) for n in PROMPTS)
    once = {n: _time_prompt(model, policy, n, work.batch) for n in {short, long}}
    if short == long:
        return once[long]
    b = max(0.0, (once[long] / long - once[short] / short) / (long - short))
    a = once[long] / long - b * long
    return a * work.context + b * work.context**2


def _time_prompt(model: PreTrainedModel, policy: Policy, tokens: int, batch: int) -> float:
    ids = _ids(model, batch, tokens)
    times: list[float] = []
    for _ in range(3):
        with compress(model, policy) as cache:
            start = time.perf_counter()
            forward(model, ids, cache)
            times.append(time.perf_counter() - start)
    return min(times[1:])


def _step(model: PreTrainedModel, policy: Policy, stored: int, work: Workload) -> float:
    """Milliseconds of a decode step over `stored` entries per layer."""
    here = min(stored, MOST_STORED)
    full = _time_steps(model, policy, here, work)
    if here == stored:
        return full
    half = _time_steps(model, policy, here // 2, work)
    return full + max(0.0, full - half) * (stored - here) / (here - here // 2)


def _time_steps(model: PreTrainedModel, policy: Policy, stored: int, work: Workload) -> float:
    with compress(model, policy) as cache:
        for layer in cache.strata.values():
            layer.fill(*_entries(model, stored, work.batch), seen=work.context)
        ids, times = _ids(model, work.batch, 1), list[float]()
        for _ in range(2 + STEPS):
            start = time.perf_counter()
            forward(model, ids, cache)
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def _entries(model: PreTrainedModel, stored: int, batch: int) -> tuple[Tensor, Tensor]:
    heads, dim = cast("tuple[int, int]", kv_shape(model.config.get_text_config(decoder=True)))
    k = torch.randn(batch, heads, stored, dim, dtype=model.dtype, device=model.device)
    return k, torch.randn_like(k)


def _ids(model: PreTrainedModel, batch: int, tokens: int) -> Tensor:
    return torch.randint(0, model.config.get_text_config(decoder=True).vocab_size, (batch, tokens), device=model.device)


def verdict(shell: Shell, full: Estimate, other: Estimate, work: Workload) -> list[str]:
    """In words: whether the policy pays in memory, and in time."""
    weights = shell.weight_bytes
    saved, total = full.bytes.at_end.held - other.bytes.at_end.held, weights + full.bytes.at_end.held
    lines = [
        f"memory: frees {saved / total:.0%} of weights and cache together"
        + (": weights dominate, so it hardly pays" if saved < 0.05 * total else "")
    ]
    if full.ms_per_token and other.ms_per_token:
        ratio = full.ms_per_token / other.ms_per_token
        read = full.bytes.at_end.live / (weights + full.bytes.at_end.live)
        why = f"keys and values are {read:.0%} of what a step reads"
        if ratio < 1.05:
            lines.append(f"time: will not pay, {ratio:.2f} times the full cache's speed ({why})")
        else:
            lines.append(f"time: {ratio:.2f} times the full cache's speed ({why})")
    return lines
