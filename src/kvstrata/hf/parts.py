"""What a policy needs to know of a model, taken from its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvstrata.cache.model import Model
from kvstrata.core import SpecError, UnsupportedModelError
from kvstrata.hf import compat
from kvstrata.hf.files import identity
from kvstrata.hf.rotary import rotary_of, turn_of
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.policy.policy import Policy
from kvstrata.policy.surrogate import SHIPPED, SurrogateModel, folder_of, read_surrogate

OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of the projection behind attention


def parts_for(policy: Policy, model: PreTrainedModel, layers: Sequence[int]) -> Model:
    """The parts of a model that a policy needs in these layers.

    Raises `UnsupportedModelError` where the model has none of a kind that the policy cannot do without.
    """
    needs = policy.needs
    return Model(
        _rotary(policy, model),
        turn_of(model) if "turn" in needs else None,
        outputs_of(model, layers) if needs & {"outputs", "added"} else {},
        {file: surrogate_of(file, model) for file in policy.surrogates},
    )


def surrogate_of(file: str, model: PreTrainedModel) -> SurrogateModel:
    """A surrogate by a shipped one's name, a folder or a hub id. Raises `SpecError` where it does not fit a model."""
    folder = folder_of(file)
    folder = folder if folder.is_dir() else _fetched(file)
    found, config = read_surrogate(folder), compat.text_config(model)
    shape = compat.kv_shape(config)
    has = (found.width, found.num_heads, len(found.layers))
    needs = (config.hidden_size, shape and shape[0], config.num_hidden_layers)
    if has != needs:
        raise SpecError(
            f"surrogate {file!r} is for hidden states of {has[0]}, {has[1]} key-value heads and {has[2]} layers, but "
            f"{type(model).__name__} has {needs[0]}, {needs[1]} and {needs[2]}: take one made for this model"
        )
    known = found.config.get("model")
    if known is not None and known != identity(model):
        raise SpecError(f"surrogate {file!r} was trained on another model of this shape: train one on this model")
    on = [tuple(w.to(model.device, torch.float32) for w in layer) for layer in found.layers]  # once
    return SurrogateModel(tuple(on), found.config)


def _fetched(name: str) -> Path:
    """The local copy of a hub repository."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"no surrogate {name!r}: give a folder of kvstrata calibrate kvzap, a hub id, or {' or '.join(SHIPPED)}"
        ) from error


def _rotary(policy: Policy, model: PreTrainedModel) -> Rotary | None:
    """To code keys before rotary positions and judge what codes lose, or for queries that are yet to come."""
    if not policy.codes and "rotary" not in policy.needs:
        return None
    try:
        return rotary_of(model)
    except UnsupportedModelError:
        if "rotary" in policy.needs:
            raise
        return None


def outputs_of(model: PreTrainedModel, layers: Sequence[int]) -> Mapping[int, Tensor]:
    """[H*G, Dv, Dv] fp32 of each layer, such that |v @ outputs[g]| is the norm of what the model adds for v of head g.

    Raises `UnsupportedModelError` where the projection behind attention is not found.
    """
    heads = compat.option(compat.text_config(model), "num_attention_heads")
    if not heads:
        raise UnsupportedModelError(f"{type(model).__name__} does not say how many query heads it has")
    return {layer: _triangular(weight, heads) for layer, weight in projections_of(model, layers).items()}


def projections_of(model: PreTrainedModel, layers: Sequence[int]) -> Mapping[int, Tensor]:
    """The matrix [out, H*G*Dv] fp32 behind attention of each layer. Raises `UnsupportedModelError` if not found."""
    modules = {cast(Any, m).layer_idx: m for m in attention_modules(model)}
    found: dict[int, Tensor] = {}
    for layer in layers:
        projection = _projection(modules[layer]) if layer in modules else None
        if projection is None:
            raise UnsupportedModelError(
                f"{type(model).__name__}: the projection behind attention of layer {layer} is not found: "
                "take a policy that does not weigh by it (echo:weight=u, expected:weight=v)"
            )
        found[layer] = _weight(projection)
    return found


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that call attention, one for each layer that has any."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
    ]


def _projection(module: nn.Module) -> nn.Module | None:
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
    """Of the columns [out, D] of each head a square matrix [heads, D, D] with which v @ it has the same norm."""
    columns = weight.unflatten(1, (heads, -1)).movedim(1, 0)  # [heads, out, D]
    square = torch.zeros(heads, columns.shape[2], columns.shape[2], device=weight.device)
    upper = torch.linalg.qr(columns, mode="r").R
    square[:, :, : upper.shape[1]] = upper.mT
    return square
