"""PolyKV's signals: what each pattern does to each layer's attention, and to the model, when that layer alone has it.

Cosine needs no runs beside one with the full cache. Below a layer nothing is perturbed, so what reaches it is known;
its attention over the continuation is computed again from what the pattern left of the prompt (section 3, equation 2,
with activations of the continuation, since those of the prompt cannot change).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvstrata.cache import Layer
from kvstrata.cache.fed import Fed
from kvstrata.core import InputError, Phase
from kvstrata.files import whole
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.cache import StrataLayer
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.parts import projections_of
from kvstrata.hf.together import read_together
from kvstrata.kernels.attention import Softmax, attend
from kvstrata.kernels.mass.ref import block_scores
from kvstrata.policy.policy import LayerRange, Policy, Rule
from kvstrata.policy.strategy import FULL, pattern_rule
from kvstrata.store import Account

AT_ONCE = 30  # caches that read one prompt together


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure: patterns at a mean budget, in these phases."""

    patterns: tuple[str, ...]
    budget: int
    phases: tuple[Phase, ...] = ("prefill",)


Table = dict[str, dict[str, list[float]]]  # by phase and pattern: a number for each layer


class _Probe:
    """One layer in the place of a `Layer`: the full cache, and beside it what each pattern would have left."""

    def __init__(self, layer: Layer, depth: int, layers: int, cache: StrataCache, asked: Asked, weight: Tensor) -> None:
        self.fed, self.index, self.hidden = Fed(), layer.index, None
        self._at, self._engine, self._asked, self._weight = (layer.index, depth, layers), cache.engine, asked, weight
        self._prompt: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # q, k, v and what attention made of them
        self.cosine = {phase: dict.fromkeys(asked.patterns, 0.0) for phase in asked.phases}
        self.entropy, self.entropies = 0.0, 0.0

    @property
    def columns_fed(self) -> int:
        """Tokens fed."""
        return self.fed.columns

    @property
    def seen(self) -> list[int]:
        """Tokens fed, by row."""
        return self.fed.seen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: object, softmax: Softmax, *_: object) -> Tensor:
        """The prompt, and then its continuation, after which the probe has its figures."""
        self.fed.add(q.shape[2], [q.shape[2]])
        if self._prompt is None:
            out = attend(q, k, v, softmax=softmax).out
            self._prompt = (q, k, v, out)
            return out
        pk, pv = self._prompt[1:3]
        every = torch.cat([pk, k], dim=2)
        out = attend(q, every, torch.cat([pv, v], dim=2), softmax=softmax).out
        self._look(q, every, softmax)
        for phase in self._asked.phases:
            for name in self._asked.patterns:
                rule = pattern_rule(name, self._asked.budget, phase)
                other = self._perturbed(rule, phase, q, k, v, softmax)
                self.cosine[phase][name] = self._alike(out, other)
        self._prompt = None
        return out

    def _perturbed(self, rule: Rule, phase: Phase, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attention of the continuation where this layer alone has the rule, in one phase."""
        assert self._prompt is not None
        policy = Policy.everywhere("probe", rule if phase == "prefill" else None, rule if phase == "decode" else None)
        index, depth, layers = self._at
        layer = Layer(index, depth, layers, policy, Account(), model=self._engine.model)
        pq, pk, pv, out = self._prompt
        layer.attend(pq, pk, pv, None, softmax, out=out)
        if phase == "prefill":
            layer.settle()
            return layer.attend(q, k, v, None, softmax)
        steps = [slice(i, i + 1) for i in range(q.shape[2])]
        parts = [layer.attend(q[:, :, at], k[:, :, at], v[:, :, at], None, softmax) for at in steps]
        return torch.cat(parts, dim=2)

    def _alike(self, a: Tensor, b: Tensor) -> float:
        """Mean cosine, over tokens, of what the output projection makes of attention [1, H*G, C, D]."""
        a, b = (t[0].transpose(0, 1).flatten(1).float() @ self._weight.T for t in (a, b))
        return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())

    def _look(self, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Entropy of the mean attention of the continuation, and the mean of its queries' entropies (equation 4)."""
        first = k.shape[2] - q.shape[2]
        scores = block_scores(q, k, first, softmax.scale, softmax.softcap)[0]  # [H, G, C, N]
        p = scores.softmax(dim=-1)
        self.entropy = float(torch.special.entr(p.mean(dim=(0, 1, 2))).sum())
        self.entropies = float(torch.special.entr(p).sum(dim=-1).mean())


@torch.no_grad()
def local_signals(model: PreTrainedModel, prompt: Sequence[int], more: Sequence[int], asked: Asked) -> dict[str, Any]:
    """Of one document: cosine by phase, pattern and layer, and both entropies by layer; one run of the full cache."""
    policy = Policy("probes", tuple(_ranges(asked)))
    with compress(model, policy) as cache:
        weights = projections_of(model, list(cache.strata))
        probes = [
            _Probe(layer, depth, len(cache.strata), cache, asked, weights[i])
            for depth, (i, layer) in enumerate(cache.strata.items())
        ]
        beside = dict(zip(cache.strata, probes, strict=True))
        shared = Cache(
            layers=[
                StrataLayer(cast(Layer, beside[i]), cache.engine, cache.kin) if i in beside else layer
                for i, layer in enumerate(cache.layers)
            ]
        )
        for ids in (prompt, more):
            cast(Any, model)(torch.tensor([ids], device=model.device), logits_to_keep=1, **{CACHE_KEYWORD: shared})
    cosine = {
        phase: {name: [probe.cosine[phase][name] for probe in probes] for name in asked.patterns}
        for phase in asked.phases
    }
    return {"cosine": cosine, "entropy": [p.entropy for p in probes], "entropies": [p.entropies for p in probes]}


def _ranges(asked: Asked) -> list[LayerRange]:
    """A policy that never acts, but asks of the model whatever some pattern needs."""
    size = asked.budget
    every = [
        LayerRange(pattern_rule(name, size), pattern_rule(name, size, "decode"), i, i)
        for i, name in enumerate(asked.patterns)
    ]
    return [*every, LayerRange(None, None, len(every))]


@torch.no_grad()
def loss_signals(model: PreTrainedModel, prompt: Sequence[int], more: Sequence[int], asked: Asked) -> Table:
    """Of one document: nats per token of the continuation above the full cache's, layer by layer (equation 3)."""
    target = torch.tensor(more[1:], device=model.device)
    ids = torch.tensor([prompt], device=model.device)

    def nats(caches: Sequence[StrataCache]) -> list[float]:
        read_together(model, caches, ids)
        found: list[float] = []
        for cache in caches:
            logits = cast(Any, model)(torch.tensor([more], device=model.device), **{CACHE_KEYWORD: cache}).logits[
                0, :-1
            ]
            found.append(float(torch.nn.functional.cross_entropy(logits.float(), target)))
        return found

    with compress(model, FULL) as cache:
        full, layers, count = nats([cache])[0], list(cache.strata), len(cache.strata)
    table: Table = {"prefill": {}}
    for name in asked.patterns:
        rule, values = pattern_rule(name, asked.budget), list[float]()
        for start in range(0, count, AT_ONCE):
            with ExitStack() as stack:
                alone = [_alone(rule, layer) for layer in layers[start : start + AT_ONCE]]
                values += [x - full for x in nats([stack.enter_context(compress(model, p)) for p in alone])]
        table["prefill"][name] = values
    return table


def _alone(rule: Rule, layer: int) -> Policy:
    """The rule for the prompt in one layer, and everything kept elsewhere."""
    before = [LayerRange(None, None, 0, layer - 1)] if layer else []
    return Policy("alone", (*before, LayerRange(rule, None, layer, layer), LayerRange(None, None, layer + 1)))


def collect(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    continuation: int,
    asked: Asked,
    signals: Sequence[str],
    folder: Path,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Means over documents. Each document's figures are written as they come, so a run that was stopped goes on."""
    found: list[dict[str, Any]] = []
    for number, ids in enumerate(documents):
        prompt, more = ids[:-continuation], ids[-continuation:]
        measures = {"cosine": local_signals, "ppl": loss_signals}
        one: dict[str, Any] = {}
        for name in signals:
            file = folder / f"{name}-{number:04d}.json"
            if file.is_file():
                one[name] = json.loads(file.read_text())
            else:
                one[name] = measures[name](model, prompt, more, asked)
                with whole(file) as scratch:
                    scratch.write_text(json.dumps(one[name]))
            tick()
        found.append(one)
    if not found:
        raise InputError("no documents to calibrate on")
    return cast("dict[str, Any]", _mean(found))


def _mean(values: Sequence[Any]) -> Any:
    """Means of numbers in tables and lists of the same form."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values]) for key in cast("Mapping[str, Any]", first)}
    if isinstance(first, list):
        return [_mean(column) for column in zip(*values, strict=True)]
    return sum(values) / len(values)
