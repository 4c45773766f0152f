"""What a rule is shown of a layer when it observes a forward or acts after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvstrata.cache.model import Model
from kvstrata.cache.step import Pending
from kvstrata.core import PROMPT, Phase, Signals
from kvstrata.kernels.norms import output_norms
from kvstrata.policy.policy import Rule
from kvstrata.store import LayerStore


def marked(rules: Iterable[Rule | None], phase: Phase, k: Tensor, per_head: bool) -> Mapping[str, Tensor]:
    """The column [B, 1|H, Q] that tells a prompt's entries, if some rule keeps these apart and k [B, H, Q, D] are."""
    if phase != "prefill" or not any(rule and rule.protect.prompt for rule in rules):
        return {}
    return {PROMPT.name: torch.ones(k.shape[0], k.shape[1] if per_head else 1, k.shape[2], dtype=PROMPT.dtype)}


def shown(
    store: LayerStore,
    model: Model,
    layer: int,
    seen: Sequence[int],
    forward: Pending,
    rule: Rule,
    limits: list[tuple[int, ...]] | None,
    guards: list[tuple[int, ...]] | None,
) -> Signals:
    """What is stored, with what a forward gave; `guards` are what protected tokens scale with.

    Without `limits` the rule only observes, and gets no more than mass.
    """
    position, valid = store.column("position"), store.valid()
    columns = {column.name: store.column(column.name) for column in rule.columns}
    protected = rule.protected(position, valid, list(seen), guards) if guards else ~valid
    if rule.protect.prompt:
        protected = protected | (columns[PROMPT.name] > 0) & valid
    here = (layer, forward.step, position, valid, protected, columns, tuple(forward.tokens), forward.mass)
    if not limits:
        return Signals(*here, tier=store.tier())
    needs = rule.signals
    return Signals(
        *here,
        keys=store.dense("k") if "keys" in needs else None,
        values=store.dense("v") if "values" in needs else None,
        added=_added(store, model.outputs[layer]) if "added" in needs else None,
        caps=torch.tensor(limits, device=position.device) if "caps" in needs else None,
        tier=store.tier(),
        dormant=store.dormant(),
    )


def _added(store: LayerStore, outputs: Tensor) -> Tensor:
    """Norms [B, H, N] of what the output projection makes of every value, on average over a group's query heads."""
    return output_norms(outputs, store.dense("v"), store.kernels).mean(dim=2)
