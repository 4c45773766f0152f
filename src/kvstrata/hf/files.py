"""Caches in folders: `cache.safetensors` and `cache.json`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvstrata.cache import PolicyCache, saved
from kvstrata.core import InputError
from kvstrata.files import whole

TENSORS, NUMBERS = "cache.safetensors", "cache.json"
ENDS = 64  # numbers at both ends of a parameter that tell it from another


def fingerprint(model: PreTrainedModel) -> str:
    """Tells a model from others by the names, shapes and first and last numbers of its parameters."""
    digest = hashlib.sha256(f"{type(model).__name__} {model.dtype}".encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        ends = torch.cat([flat[:ENDS], flat[-ENDS:]]).float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + ends.numpy().tobytes())
    return digest.hexdigest()


def save(cache: PolicyCache, folder: Path, model: str) -> Path:
    """Write a cache; the JSON file comes last, with the digest of the other."""
    tensors, about = saved.take(cache)
    with whole(folder / TENSORS) as scratch:
        save_file({key: value.contiguous() for key, value in tensors.items()}, scratch)
    about |= {"model": model, "tensors": _digest(folder / TENSORS)}
    with whole(folder / NUMBERS) as scratch:
        scratch.write_text(json.dumps(about))
    return folder


def load(cache: PolicyCache, folder: Path, model: PreTrainedModel) -> None:
    """Fill an empty cache. Raises `InputError`, and then nothing was loaded."""
    try:
        about: dict[str, Any] = json.loads((folder / NUMBERS).read_text())
        if about.get("tensors") != _digest(folder / TENSORS):
            raise InputError(f"{folder / TENSORS} is not the file that {NUMBERS} was written with: save it again")
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder} holds no saved cache that can be read: {error}") from error
    if about.get("model") != fingerprint(model):
        raise InputError(f"{folder} was saved with another model, or in another dtype: load it with that one")
    saved.put(cache, tensors, about, model.device)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
