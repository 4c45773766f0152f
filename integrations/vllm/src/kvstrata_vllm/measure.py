"""What a block is worth to a scorer: the sum over its tokens and the heads of this rank, of one layer.

Letters: R rows · H key-value heads of this rank · G query heads per key-value head · Q queries of a row · D head_dim
n blocks of a row · N = n * block size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import Signals
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.mass.ref import block_scores, query_blocks
from kvstrata.policy.policy import Rule
from kvstrata.policy.scorers import Scorer

EVERYTHING = 1 << 30  # a budget under which protected parts have their full size


@dataclass(frozen=True, slots=True)
class Softmax:
    """How attention weighs keys."""

    scale: float
    softcap: float | None = None


def token_mass(q: Tensor, k: Tensor, lengths: Tensor, reduction: Reduction, softmax: Softmax) -> Tensor:
    """The attention that tokens get from the newest queries of their row, as the reduction sums it, [R, H, N] fp32.

    q [R, H*G, Q, D] are the last Q of each row's `lengths` [R] tokens, whose keys are the first of k [R, H, N, D].
    """
    q = q[:, :, q.shape[2] - reduction.last(q.shape[2]) :]
    rows, queries = q.shape[0], q.shape[2]
    mass = torch.zeros(k.shape[:3], dtype=torch.float32, device=k.device)
    number = torch.arange(k.shape[2], device=k.device)
    age = torch.arange(queries - 1, -1, -1, device=k.device)
    first = (lengths - queries + 1)[:, None]
    k = k.float()
    for start, stop in query_blocks(queries, rows * q.shape[1] * k.shape[2]):
        seen = first + torch.arange(start, stop, device=k.device)  # [R, q]
        visible = number < seen[..., None]
        scores = block_scores(q[:, :, start:stop], k, 0, softmax.scale, softmax.softcap, visible)
        mass += reduction(scores.softmax(dim=-1), seen[:, None], age[start:stop])
    return mass


def block_worth(rule: Rule, q: Tensor, k: Tensor, lengths: Tensor, block_size: int, softmax: Softmax) -> Tensor:
    """What a forward adds to the worth of the blocks, [R, n] fp32. A scorer with a column gets attention's sum.

    q and k as in `token_mass`; the caller gathered k from whole blocks, so N is a multiple of the block size.
    """
    scorer = rule.scorer
    mass = token_mass(q, k, lengths, scorer.mass, softmax) if scorer.mass else None
    found = mass if scorer.columns and mass is not None else _score(rule, mass, k, lengths)
    valid = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    found = found.sum(dim=1).masked_fill(~valid, 0.0)
    return found.view(found.shape[0], -1, block_size).sum(dim=-1)


def _score(rule: Rule, mass: Tensor | None, k: Tensor, lengths: Tensor) -> Tensor:
    """The scores [R, H, N] of a scorer that keeps nothing, head by head so that ranks add up."""
    number = torch.arange(k.shape[2], device=k.device)
    position = number.expand(k.shape[:3])
    valid = position < lengths[:, None, None]
    sinks, recent = rule.protect.resolve(EVERYTHING)
    signals = Signals(
        layer=0,
        step=0,
        position=position.int(),
        valid=valid,
        protected=(position < sinks) | (position >= lengths[:, None, None] - recent),
        columns={},
        queries=(0,) * k.shape[0],
        mass=mass,
        keys=k.masked_fill(~valid[..., None], 0.0),
    )
    return rule.scorer.score(signals)


def accumulate(scorer: Scorer, column: Tensor, worth: Tensor, queries: Sequence[int]) -> Tensor:
    """The column [R, M] of a scorer that keeps one, after a forward of queries[R] that was worth [R, M]."""
    (kept,) = scorer.columns
    position = torch.zeros_like(column, dtype=torch.int32)[:, None]
    signals = Signals(
        layer=0,
        step=0,
        position=position,
        valid=torch.ones_like(position, dtype=torch.bool),
        protected=torch.zeros_like(position, dtype=torch.bool),
        columns={kept.name: column[:, None]},
        queries=tuple(queries),
        mass=worth[:, None],
    )
    return scorer.observe(signals)[kept.name][:, 0]
