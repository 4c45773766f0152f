"""What a policy needs to know of a model, taken from its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvstrata.cache.model import Model
from kvstrata.core import UnsupportedModelError
from kvstrata.hf import compat
from kvstrata.hf.rotary import rotary_of, turn_of
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.policy.policy import Policy

OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of the projection behind attention


def parts_for(policy: Policy, model: PreTrainedModel, layers: Sequence[int]) -> Model:
    """The parts of a model that a policy needs in these layers.

    Raises `UnsupportedModelError` where the model has none of a kind that the policy cannot do without.
    """
    needs = policy.needs
    return Model(
        _rotary(policy, model),
        turn_of(model) if "turn" in needs else None,
        outputs_of(model, layers) if "outputs" in needs else {},
    )


def _rotary(policy: Policy, model: PreTrainedModel) -> Rotary | None:
    """To code keys before rotary positions, and to judge what codes lose."""
    if not policy.codes:
        return None
    try:
        return rotary_of(model)
    except UnsupportedModelError:
        if "rotary" in policy.needs:
            raise
        return None


def outputs_of(model: PreTrainedModel, layers: Sequence[int]) -> Mapping[int, Tensor]:
    """[H*G, Dv, Dv] fp32 of each layer, such that |outputs[g] @ v| is the norm of what the model adds for v of head g.

    Raises `UnsupportedModelError` where the projection behind attention is not found.
    """
    heads = compat.option(compat.text_config(model), "num_attention_heads")
    modules = {cast(Any, m).layer_idx: m for m in model.modules() if _projection(m) is not None}
    found: dict[int, Tensor] = {}
    for layer in layers:
        projection = _projection(modules[layer]) if layer in modules else None
        if projection is None or not heads:
            raise UnsupportedModelError(
                f"{type(model).__name__}: the projection behind attention of layer {layer} is not found: "
                "take weight=u, which does without"
            )
        found[layer] = _triangular(_weight(projection), heads)
    return found


def _projection(module: nn.Module) -> nn.Module | None:
    if not isinstance(getattr(module, "layer_idx", None), int) or "Attention" not in type(module).__name__:
        return None
    return next((child for name in OUTPUT if isinstance(child := getattr(module, name, None), nn.Module)), None)


@torch.no_grad()
def _weight(projection: nn.Module) -> Tensor:
    """Its matrix [out, in] in fp32, whatever kind of linear module it is: what it makes of each unit vector."""
    weight = getattr(projection, "weight", None)
    if isinstance(projection, nn.Linear) and isinstance(weight, Tensor) and weight.is_floating_point():
        return weight.detach().float()
    width = cast(int, getattr(projection, "in_features", None) or cast(Tensor, weight).shape[0])
    like = next(projection.parameters())
    dtype = like.dtype if like.is_floating_point() else torch.float32
    units = torch.eye(width, dtype=dtype, device=like.device)
    return (projection(units) - projection(torch.zeros_like(units[:1]))).T.float()


def _triangular(weight: Tensor, heads: int) -> Tensor:
    """Of the columns [out, D] of each head a square matrix [heads, D, D] under which vectors have the same norm."""
    columns = weight.unflatten(1, (heads, -1)).movedim(1, 0)  # [heads, out, D]
    square = torch.zeros(heads, columns.shape[2], columns.shape[2], device=weight.device)
    upper = torch.linalg.qr(columns, mode="r").R
    square[:, : upper.shape[1]] = upper
    return square
