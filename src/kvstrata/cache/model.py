"""What a cache has to know of the model whose keys and values it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kvstrata.kernels.codec.rotation import Rotary


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Parts of a model that some policies need; each is there only where the policy asks for it.

    rotary: positions that do not depend on the length of the text. turn: x [..., D] and how many positions later it
    stands -> x turned, by whatever positions the model has now. outputs: of every layer [H*G, Dv, Dv] fp32, such that
    the norm of outputs[g] @ v is that of what head g's part of the output projection makes of v.
    """

    rotary: Rotary | None = None
    turn: Callable[[Tensor, int], Tensor] | None = None
    outputs: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])


NOTHING = Model()
