"""KVzap's surrogate: a linear map or a small MLP per layer, from a token's hidden state to what its entries are worth.

Files are those of the published checkpoints: a folder with `config.json` and safetensors, in which layer l has
`layers.l.weight` [H, hidden] and `.bias`, or `layers.l.0.weight`, `.0.bias`, `.2.weight`, `.2.bias` around a GELU.
Ours add to `config.json` what they were trained on and which thresholds drop which shares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from kvstrata.core import SpecError
from kvstrata.files import whole

SHIPPED = ("linear", "mlp")  # for the demo model
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class SurrogateModel:
    """Weights of each layer, (W [H, hidden], b [H]) or (W1 [m, hidden], b1 [m], W2 [H, m], b2 [H]); and its config."""

    layers: tuple[tuple[Tensor, ...], ...]
    config: dict[str, Any]
    _ready: dict[tuple[int, torch.device], list[Tensor]] = field(init=False, repr=False, default_factory=dict[Any, Any])

    def __call__(self, layer: int, hidden: Tensor) -> Tensor:
        """hidden [B, Q, hidden] of a layer's attention -> scores [B, H, Q] fp32."""
        weights = self._ready.get((layer, hidden.device))
        if weights is None:  # as computed with, where this layer runs
            weights = [w.to(hidden.device, torch.float32) for w in self.layers[layer]]
            self._ready[layer, hidden.device] = weights
        return predicted(weights, hidden.float()).transpose(1, 2)

    @property
    def num_heads(self) -> int:
        """Key-value heads that it scores."""
        return self.layers[0][-1].shape[0]

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.layers[0][0].shape[1]

    def threshold(self, removed: float) -> float:
        """The score under which `removed` of the entries fell in training. Raises `SpecError` if it was not noted."""
        found: dict[str, float] = self.config.get("thresholds", {})
        if f"{removed:g}" not in found:
            there = ", ".join(found) or "none"
            raise SpecError(f"this surrogate has no threshold for {removed:g} removed (there are: {there}): give tau=")
        return float(found[f"{removed:g}"])


def predicted(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Scores [..., H] of hidden states [..., hidden] by the weights of one layer."""
    y = linear(x, weights[0], weights[1])
    return y if len(weights) == 2 else linear(gelu(y), weights[2], weights[3])


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution up to x; for one token torch's operator takes four times as long on a CPU."""
    return (x * 0.5) * (torch.erf(x * 0.5**0.5) + 1.0)


def shipped(name: str) -> Path:
    """The folder of a surrogate that comes with the package."""
    return Path(str(files("kvstrata.policy").joinpath("assets", f"kvzap-{name}-smollm2-135m-instruct")))


def folder_of(file: str) -> Path:
    """The folder that `file` names: that of a shipped surrogate, or one of the user's, which need not be there."""
    return shipped(file) if file in SHIPPED else Path(file)


def read_surrogate(folder: Path) -> SurrogateModel:
    """Read a folder. Raises `SpecError` for one that is not there, or is damaged."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        if config.get("model_type") != "kvzap":
            raise SpecError(f"{folder} holds a {config.get('model_type')!r}, not a surrogate of KVzap")
        names = ("weight", "bias") if config["hidden_dim"] is None else ("0.weight", "0.bias", "2.weight", "2.bias")
        every = [tuple(tensors[f"layers.{layer}.{name}"] for name in names) for layer in range(config["n_modules"])]
        found = SurrogateModel(tuple(every), config)
        _check(found, folder)
    except FileNotFoundError as error:
        raise SpecError(f"no surrogate at {folder}: make one with kvstrata calibrate kvzap") from error
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{folder} holds no surrogate that can be read ({error!r})") from error
    return found


def _check(model: SurrogateModel, folder: Path) -> None:
    config, inner = model.config, model.config["hidden_dim"]
    outer, width = config["output_dim"], config["input_dim"]
    shapes = [(outer, width), (outer,)] if inner is None else [(inner, width), (inner,), (outer, inner), (outer,)]
    for number, layer in enumerate(model.layers):
        if [tuple(w.shape) for w in layer] != shapes:
            raise SpecError(f"{folder}: layer {number} has shapes {[tuple(w.shape) for w in layer]}, not {shapes}")
        if not all(bool(w.isfinite().all()) for w in layer):
            raise SpecError(f"{folder}: layer {number} has weights that are no numbers: train it anew")


def write_surrogate(folder: Path, layers: Sequence[Sequence[Tensor]], more: dict[str, Any]) -> None:
    """Write a folder in the published format, weights first; `more` goes into the config.

    What described the weights before goes first of all, so that a kill leaves none that describes others.
    """
    mlp = len(layers[0]) == 4
    names = ("0.weight", "0.bias", "2.weight", "2.bias") if mlp else ("weight", "bias")
    tensors = {f"layers.{i}.{n}": t.contiguous() for i, w in enumerate(layers) for n, t in zip(names, w, strict=True)}
    first, last = layers[0][0], layers[0][-1]
    config = {
        "model_type": "kvzap",
        "input_dim": first.shape[1],
        "output_dim": last.shape[0],
        "hidden_dim": first.shape[0] if mlp else None,
        "n_modules": len(layers),
        **more,
    }
    (folder / CONFIG).unlink(missing_ok=True)
    with whole(folder / WEIGHTS) as scratch:
        save_file(tensors, scratch)
    with whole(folder / CONFIG) as scratch:
        scratch.write_text(json.dumps(config, indent=1))
