"""A whole cache as tensors and plain numbers, for files, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvstrata.cache.cache import PolicyCache
from kvstrata.cache.layer import Layer
from kvstrata.cache.step import Events
from kvstrata.core import InputError
from kvstrata.policy.confidence import Mood
from kvstrata.store import snapshot

FORMAT = 1  # of the files; a reader refuses others


def take(cache: PolicyCache) -> snapshot.Saved:
    """Everything that a cache holds. Raises `InputError` while a forward waits to be settled."""
    if cache.waits or cache.mode.prefilling:
        raise InputError("a forward of this cache waits: end prefilling(), or crop() drafts, then save")
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for number, layer in cache.layers.items():
        found, about = snapshot.take(layer.store)
        tensors |= {f"{number}.{key}": value for key, value in found.items()}
        hidden = layer.fed.hidden_columns
        if hidden is not None:
            tensors[f"{number}.hidden"] = hidden
        if layer.asking:
            tensors |= {f"{number}.asking.{key}": value for key, value in layer.asking.tensors().items()}
        events = {**asdict(layer.events), "nan_scores": int(layer.events.nan_scores)}
        layers[str(number)] = {
            **{"store": about, "step": layer.step, "acted": layer.acted, "events": events, "trusted": layer.trusted},
            "runs": layer.fed.runs,
        }
    mode = cache.mode
    moods = [mood and list(mood) for mood in mode.moods]
    about = {"format": FORMAT, "policy": repr(cache.policy), "layers": layers, "nan_logits": cache.nan_logits}
    return tensors, {**about, "fed": mode.fed, "confidence": mode.confidence, "moods": moods}


def put(
    cache: PolicyCache, tensors: dict[str, Tensor], about: dict[str, Any], devices: dict[int, torch.device]
) -> None:
    """Fill an empty cache under the same policy, each layer on its device. Raises `InputError` where it is another."""
    if about.get("format") != FORMAT:
        raise InputError(f"the file is of format {about.get('format')}, not {FORMAT}: save it again with this version")
    if about["policy"] != repr(cache.policy):
        raise InputError("the file was saved under another policy: open the cache under that one, then load")
    if {*map(int, about["layers"])} != {*cache.layers}:
        raise InputError("the file was saved with other layers compressed: load it with the model that it is of")
    if any(not layer.store.is_empty for layer in cache.layers.values()):
        raise InputError("only an empty cache can be loaded into: reset() it first")
    for number, layer in cache.layers.items():
        prefix = f"{number}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        _layer(layer, own, about["layers"][str(number)], devices.get(number, torch.device("cpu")))
    mode = cache.mode
    mode.fed, mode.confidence, cache.nan_logits = about["fed"], about["confidence"], about["nan_logits"]
    mode.moods = [mood and Mood(*mood) for mood in about["moods"]]


def _layer(layer: Layer, tensors: dict[str, Tensor], about: dict[str, Any], device: torch.device) -> None:
    hidden = tensors.pop("hidden", None)
    asking = {key.removeprefix("asking."): tensors.pop(key) for key in [*tensors] if key.startswith("asking.")}
    if layer.asking:
        layer.asking.restore(asking, device)
    for columns, tokens in about["runs"]:
        layer.fed.add(columns, list(tokens))
    layer.fed.hidden_columns = hidden
    snapshot.put(layer.store, tensors, about["store"], device)
    layer.step, layer.acted, layer.trusted = about["step"], about["acted"], about["trusted"]
    layer.events = Events(**about["events"])
