"""Does kvstrata run this model rightly? The model itself answers, both ways, before anything is compressed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvstrata.hf import compress
from kvstrata.hf.compat import CACHE_KEYWORD, attention_name, text_config
from kvstrata.kernels.attention import KernelName

FULL = "h2o:budget=100%"  # keeps everything, and has the attention mass computed beside
OF_LARGEST = 1e-5  # fp32: difference allowed, of the largest logit
OF_STOCK = 1.5  # 16 bit: error allowed, of stock attention's own
STEPS = 8  # tokens fed one by one, the last ones
PROMPT, SINGLE = slice(None, -STEPS), slice(-STEPS, None)
MOST_DOUBLED = 1 << 31  # parameters up to which a float64 copy is made to measure errors against


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of logits with those of transformers' own cache."""

    name: str
    largest_difference: float  # max |dlogit| against transformers
    error: float  # what is judged: the same, or against the float64 model the root mean square
    allowed: float
    same_tokens: bool  # greedy tokens equal wherever the two best differ by more than is allowed

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.error <= self.allowed and self.same_tokens


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one model, and why some layers are not compressed."""

    checks: list[Check]
    passed_through: dict[int, str]
    num_layers: int
    baseline: str  # what the errors of a 16-bit model are measured against

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)


@torch.no_grad()
def diagnose(model: PreTrainedModel, ids: Tensor, tick: Callable[[], object] = lambda: None) -> Diagnosis:
    """Run ids [1, T] through transformers' cache and through ours with a full budget, in several ways.

    The last `STEPS` tokens are fed one by one. Raises `UnsupportedModelError` where the model cannot be compressed.
    """
    prompt = ids.shape[1] - STEPS
    ways = {"one prompt": [prompt], "in chunks": [prompt // 2, prompt - prompt // 2]}
    noise, truth, baseline = _noise(model, ids, ways)
    checks: list[Check] = []
    with compress(model, "full") as cache:
        passed_through, layers = cache.passed_through, len(cache.layers)
    for way, chunks in ways.items():
        stock = _feed(model, ids, DynamicCache(config=model.config), chunks)
        for kernels in cast("tuple[KernelName, ...]", ("exact", "auto")):
            with compress(model, FULL, kernels=kernels) as cache:
                ours = _feed(model, ids, cache, chunks)
            exact = kernels == "exact" and attention_name(text_config(model)) == "sdpa"
            checks.append(_compared(f"{way}, {kernels} kernels", stock, ours, truth, noise, bits=exact))
            tick()
    padded = _feed(model, ids, DynamicCache(config=model.config), [prompt], pads=5)
    with compress(model, FULL) as cache:
        ours = _feed(model, ids, cache, [prompt], pads=5)
    checks.append(_compared("left padding", padded, ours, truth, noise))
    tick()
    return Diagnosis(checks, passed_through, layers, baseline)


def _noise(model: PreTrainedModel, ids: Tensor, ways: dict[str, list[int]]) -> tuple[float, Tensor | None, str]:
    """What a 16-bit model's errors are measured by: (largest difference of its own, float64 logits if any, words)."""
    if model.dtype == torch.float32:
        return 0.0, None, "the largest logit"
    if sum(p.numel() for p in model.parameters()) <= MOST_DOUBLED:
        double = copy.deepcopy(model).double()
        truth = _feed(double, ids, DynamicCache(config=double.config), ways["one prompt"])
        return 0.0, truth, "the model in float64"
    whole, chunks = (_feed(model, ids, DynamicCache(config=model.config), way) for way in ways.values())
    return float((whole - chunks).abs().max()), None, "what chunks change without kvstrata"


def _feed(model: PreTrainedModel, ids: Tensor, cache: Cache, chunks: list[int], pads: int = 0) -> Tensor:
    """Logits [T, V] of the real tokens in float64."""
    width = ids.shape[1] + pads
    mask = torch.ones(1, width, dtype=torch.long, device=ids.device)
    mask[:, :pads] = 0
    ids = torch.cat([ids[:, :1].expand(1, pads), ids], dim=1)
    parts: list[Tensor] = []
    start = 0
    for length in [chunks[0] + pads, *chunks[1:], *[1] * (width - pads - sum(chunks))]:
        stop = start + length
        extra: dict[str, Any] = {"attention_mask": mask[:, :stop]} if pads else {}
        if pads:
            extra["position_ids"] = (mask[:, :stop].cumsum(1) - 1).clamp_min(0)[:, start:stop]
        output = cast(Any, model)(ids[:, start:stop], **{CACHE_KEYWORD: cache}, **extra)
        parts.append(output.logits[0].double())
        start = stop
    return torch.cat(parts)[pads:]


def _compared(name: str, stock: Tensor, ours: Tensor, truth: Tensor | None, noise: float, bits: bool = False) -> Check:
    largest = float((ours - stock).abs().max())
    same = ours.argmax(-1) == stock.argmax(-1)
    if bits:
        return Check(name, largest, largest, 0.0, bool(same.all()))
    error, allowed = largest, OF_STOCK * noise or OF_LARGEST * float(stock.abs().max())
    if truth is not None:  # the prompt and the single steps apart, and the worse of them
        parts = [(_rms(ours - truth, part), OF_STOCK * _rms(stock - truth, part)) for part in (PROMPT, SINGLE)]
        error, allowed = max(parts, key=lambda part: part[0] / part[1] if part[1] else part[0])
    best = stock.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * largest
    return Check(name, largest, error, allowed, bool(same[clear].all()))


def _rms(error: Tensor, part: slice) -> float:
    return float(error[part].square().mean().sqrt())
