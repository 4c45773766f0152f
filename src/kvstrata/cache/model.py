"""What a cache has to know of the model whose keys and values it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstrata.core import UnsupportedModelError
from kvstrata.kernels.codec.rotation import Rotary, Turn
from kvstrata.policy.policy import Rule
from kvstrata.policy.scorers.learned import WORTH
from kvstrata.policy.scorers.repeat import LOUDNESS
from kvstrata.policy.surrogate import SurrogateModel


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Parts of a model that some policies need; each is there only where the policy asks for it.

    rotary: positions that do not depend on the length of the text. turn: what takes keys so many positions later,
    by whatever positions the model has now. outputs: of every layer [H*G, Dv, Dv] fp32, as `kernels.norms` names them.
    surrogates: by file.
    """

    rotary: Rotary | None = None
    turn: Callable[[int], Turn] | None = None
    outputs: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    surrogates: Mapping[str, SurrogateModel] = field(default_factory=dict[str, SurrogateModel])

    def said(
        self, rules: Iterable[Rule | None], layer: int, hidden: Tensor | None, k: Tensor, per_head: bool
    ) -> Mapping[str, Tensor]:
        """What the hidden states [B, Q, hidden] of a forward say of its entries k [B, H, Q, D], if a rule asks.

        As columns: a surrogate's [B, H, Q], norms [B, 1|H, Q]. Raises `UnsupportedModelError` where they did not come.
        """
        scorers = [rule.scorer for rule in rules if rule]
        file = next((scorer.surrogate for scorer in scorers if scorer.surrogate), None)
        # columns alone do not ask: where only bytes are counted there are no hidden states
        loud = any(LOUDNESS in scorer.columns and "hidden" in scorer.needs for scorer in scorers)
        if file is None and not loud:
            return {}
        if hidden is None or hidden.shape[1] != k.shape[2]:
            raise UnsupportedModelError(
                "this model calls attention without its hidden states, which kvzap and echo:weight=u+ read"
            )
        found = {} if file is None else {WORTH.name: self.surrogates[file](layer, hidden)}
        if loud:
            found[LOUDNESS.name] = loudness(hidden)[:, None].expand(-1, k.shape[1] if per_head else 1, -1)
        return found


def loudness(hidden: Tensor) -> Tensor:
    """ln of the norms [...] of hidden states [..., hidden]; +inf for those that are nothing, as a pad's may be."""
    norm = torch.linalg.vector_norm(hidden.float(), dim=-1).log()
    return norm.masked_fill(norm.isinf(), torch.inf)


NOTHING = Model()
