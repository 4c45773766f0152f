"""Caches in folders: `cache-….safetensors`, and `cache.json`, which names it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvstrata.cache import PolicyCache, saved
from kvstrata.core import InputError
from kvstrata.files import whole

TENSORS, NEW, NUMBERS = "cache-{}.safetensors", "cache.new", "cache.json"
ENDS = 64  # numbers at both ends of a parameter that tell it from another


def fingerprint(model: PreTrainedModel) -> str:
    """Tells a model from others by the names, shapes and first and last numbers of its parameters."""
    digest = hashlib.sha256(f"{type(model).__name__} {model.dtype}".encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        ends = torch.cat([flat[:ENDS], flat[-ENDS:]]).float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + ends.numpy().tobytes())
    return digest.hexdigest()


def identity(model: PreTrainedModel) -> str:
    """Tells a model from others whatever its dtype: by names, shapes and signs of its parameters' first numbers."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        signs = "".join("+" if x > 0 else "-" for x in parameter.detach().flatten()[:ENDS].tolist())
        digest.update(f"{name} {tuple(parameter.shape)} {signs}".encode())
    return digest.hexdigest()


def save(cache: PolicyCache, folder: Path, model: str) -> Path:
    """Write a cache. The JSON file comes last and names the other, so what was saved before is there until then."""
    tensors, about = saved.take(cache)
    with whole(folder / NEW) as scratch:
        save_file({key: value.contiguous() for key, value in tensors.items()}, scratch)
    digest = _digest(folder / NEW)
    name = TENSORS.format(digest[:16])
    (folder / NEW).replace(folder / name)
    with whole(folder / NUMBERS) as scratch:
        scratch.write_text(json.dumps({**about, "model": model, "file": name, "tensors": digest}))
    for old in folder.glob(TENSORS.format("*")):
        if old.name != name:
            old.unlink()
    return folder


def load(cache: PolicyCache, folder: Path, model: PreTrainedModel) -> None:
    """Fill an empty cache. Raises `InputError`, and then nothing was loaded."""
    try:
        about: dict[str, Any] = json.loads((folder / NUMBERS).read_text())
        path = folder / Path(about["file"]).name
        if about["tensors"] != _digest(path):
            raise InputError(f"{path} is not the file that {NUMBERS} was written with: save it again")
        tensors = load_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder} holds no saved cache that can be read: {error}") from error
    if about.get("model") != fingerprint(model):
        raise InputError(f"{folder} was saved with another model, or in another dtype: load it with that one")
    try:
        saved.put(cache, tensors, about, _devices(model))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        cache.reset()
        raise InputError(f"{folder / NUMBERS} is damaged ({error!r}): save it again") from error


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer's attention is."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    found = {cast(int, module.layer_idx): next(module.parameters(), None) for module in modules}
    return {layer: parameter.device for layer, parameter in found.items() if parameter is not None}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
