"""A policy beside a full cache, step by step over a known text: what was attended to, and what was still there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.core import Column, InputError, Signals, Tier
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.kernels.mass import ALL_ROWS, Reduction
from kvstrata.policy import Policy, Rule, parse_policy
from kvstrata.policy.budget import Everything
from kvstrata.policy.granularity import Token
from kvstrata.policy.scorers import Stateless


@dataclass(frozen=True, slots=True)
class _Newest(Stateless):
    """Keeps the attention of the newest forward beside every entry, and drops nothing."""

    @property
    def mass(self) -> Reduction:
        """All queries of a forward: of a prompt all its tokens, later one."""
        return Reduction(ALL_ROWS)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What it gave."""
        return (Column("newest", torch.float32),)

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """As it comes, head by head."""
        assert signals.mass is not None
        return {"newest": signals.mass}

    def score(self, signals: Signals) -> Tensor:
        """All alike."""
        return signals.position.float()


_RULE = Rule(_Newest(), Everything(), granularity=Token("each"))
REFERENCE = Policy.everywhere("full", _RULE, _RULE)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One document and layer under one policy. Steps and positions count from the document's first token.

    before [T] fp32 is what the prompt's own tokens gave each position in a full cache, a mean over heads; mass
    [S, H, T] what the queries of each kv head give at every step; tier [R, T] uint8 is the best `Tier` that any head
    keeps a position in after each event, DROP also where there is none yet; kept [R, H, T] bool says which heads keep
    it; events [R] counts the steps that came before each; prompt is the number of tokens before the first step.
    """

    before: Tensor
    mass: Tensor
    tier: Tensor
    kept: Tensor
    events: Tensor
    prompt: int

    @property
    def born(self) -> Tensor:
        """[T] the step at which a position is there: 0 for the prompt."""
        return (torch.arange(self.mass.shape[-1]) - self.prompt + 1).clamp_min(0)


@torch.no_grad()
def trace(
    model: PreTrainedModel,
    policies: Sequence[str],
    ids: Sequence[int],
    prompt: int,
    every: int = 8,
    tick: Callable[[], object] = lambda: None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, list[Trace]]:
    """Feed a document to a full cache and to policies; by policy a trace for each compressed layer.

    Events are the end of the prompt and every `every` steps after it, the same for all policies. Raises `InputError`
    where the document has no step after the prompt.
    """
    if not 0 < prompt < len(ids):
        raise InputError(f"a document of {len(ids)} tokens has no steps after a prompt of {prompt}: give a longer text")
    run = cast(Any, model)
    given = torch.tensor(ids, device=model.device)[None]
    masses: dict[int, list[Tensor]] = {}
    tiers: dict[str, dict[int, list[tuple[Tensor, Tensor]]]] = {policy: {} for policy in policies}
    for label, policy in {"": REFERENCE, **{name: parse_policy(name) for name in policies}}.items():
        with compress(model, policy, tokenizer=tokenizer) as cache:
            run(given[:, :prompt], **{CACHE_KEYWORD: cache})
            if label:
                _note_tiers(cache, tiers[label], len(ids))
            else:
                _note_mass(cache, masses, len(ids))
            for step in range(len(ids) - prompt):
                run(given[:, prompt + step : prompt + step + 1], **{CACHE_KEYWORD: cache})
                if not label:
                    _note_mass(cache, masses, len(ids))
                elif (step + 1) % every == 0:
                    _note_tiers(cache, tiers[label], len(ids))
                tick()
    at = torch.tensor([step for step in range(len(ids) - prompt + 1) if step % every == 0])

    def made(layer: int, found: list[tuple[Tensor, Tensor]]) -> Trace:
        tier, kept = (torch.stack(part) for part in zip(*found, strict=True))
        return Trace(masses[layer][0].mean(dim=0), torch.stack(masses[layer][1:]), tier, kept, at, prompt)

    return {label: [made(layer, found) for layer, found in of.items()] for label, of in tiers.items()}


def _note_mass(cache: StrataCache, masses: dict[int, list[Tensor]], length: int) -> None:
    for number, layer in cache.strata.items():
        position, mass = (layer.store.column(name)[0].cpu() for name in ("position", "newest"))  # [H, N]
        masses.setdefault(number, []).append(torch.zeros(len(mass), length).scatter_(1, position.long(), mass))


def _note_tiers(cache: StrataCache, tiers: dict[int, list[tuple[Tensor, Tensor]]], length: int) -> None:
    for number, layer in cache.strata.items():
        position, valid = layer.store.column("position").long(), layer.store.valid()
        now = layer.store.tier()
        names = torch.full(position.shape, int(Tier.EXACT), dtype=torch.uint8) if now is None else now.cpu()
        at = torch.where(valid, position, length)[0].cpu()  # [1|H, N]
        flat = at.flatten()
        best = torch.zeros(length + 1, dtype=torch.uint8).scatter_reduce_(0, flat, names.flatten(), "amax")
        kept = torch.zeros(len(at), length + 1, dtype=torch.bool).scatter_(1, at, torch.ones_like(at, dtype=torch.bool))
        heads = kept[:, :length].expand(layer.store.num_kv_heads, -1)
        tiers.setdefault(number, []).append((best[:length], heads))
