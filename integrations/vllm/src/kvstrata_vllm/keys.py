"""Reading keys back out of a cache whose layout belongs to the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvstrata.core import UnsupportedModelError

DIGIT = 16  # in every dtype of a cache, 8-bit floats too, the numbers 0 .. 16 are exact


class KeyReader(Protocol):
    """Gives keys in token order. Letters as in `measure.py`; B blocks of the cache, T tokens of a block."""

    def read(self, kv_cache: Tensor, blocks: Tensor) -> Tensor:
        """kv_cache as the backend gets it · blocks [R, n] int64 -> keys [R, H, n*T, D] fp32."""
        ...


def in_rows(keys: Tensor) -> Tensor:
    """[R, n, H, T, D] -> [R, H, n*T, D]."""
    rows, blocks, heads, tokens, width = keys.shape
    return keys.transpose(1, 2).reshape(rows, heads, blocks * tokens, width)


@dataclass(frozen=True, slots=True, eq=False)
class SplitKeys:
    """The layout of the GPU kernels: kv_cache [B, H, T, 2*D], the first half of each row is the key."""

    dtype: torch.dtype | None = None  # as in `PackedKeys`
    scale: float = 1.0

    def read(self, kv_cache: Tensor, blocks: Tensor) -> Tensor:
        """Gather and cut."""
        found = kv_cache[blocks]
        keys = found[..., : found.shape[-1] // 2]
        keys = keys if self.dtype is None else keys.contiguous().view(self.dtype)
        return in_rows(keys).float() * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class PackedKeys:
    """A CPU kernel's: kv_cache [B, H, T, 2*D], whose first T*D numbers of a block are the keys, permuted by `place`.

    The permutation depends on the processor's instructions and on the dtype, so it is found by writing known keys.
    """

    place: Tensor  # [T, D] int64: where in the block's numbers that of token t and channel d stands
    dtype: torch.dtype | None  # 8-bit floats lie in a cache of bytes; None: as they are
    scale: float = 1.0  # what stored numbers are multiplied by
    transposed: bool = field(init=False)  # whether keys lie channel by channel, as most processors' kernels have them

    def __post_init__(self) -> None:
        tokens, width = self.place.shape
        by_channel = torch.arange(tokens * width).view(width, tokens)
        object.__setattr__(self, "transposed", torch.equal(self.place.T, by_channel))

    def read(self, kv_cache: Tensor, blocks: Tensor) -> Tensor:
        """Gather and put in order."""
        tokens, width = self.place.shape
        packed = kv_cache.flatten(-2)[..., : tokens * width][blocks]  # [R, n, H, T*D]
        packed = packed if self.dtype is None else packed.view(self.dtype)
        if self.transposed:  # only the order of axes differs
            channels = packed.unflatten(-1, (width, tokens)).permute(0, 2, 3, 1, 4)
            keys = channels.reshape(*channels.shape[:3], -1).transpose(-1, -2).float()
        else:
            keys = in_rows(packed[..., self.place]).float()
        return keys if self.scale == 1.0 else keys * self.scale


def find_packing(isa: str, dtype: torch.dtype, kv_cache_dtype: str, block_size: int, head_size: int) -> PackedKeys:
    """Learn how vLLM's CPU kernel packs keys. Raises `UnsupportedModelError` where they cannot be read back."""
    from vllm import _custom_ops as ops

    stored = _stored_dtype(kv_cache_dtype)
    number = torch.arange(block_size * head_size).view(block_size, 1, head_size)
    found = torch.zeros(block_size * head_size, dtype=torch.long)
    weight = 1
    while weight < number.numel():
        digit = (number // weight % DIGIT).to(dtype)
        cache = torch.zeros(1, 1, block_size * 2, head_size, dtype=torch.uint8 if stored else dtype)
        keys, values = cache.chunk(2, dim=2)
        slots = torch.arange(block_size)
        ops.cpu_attn_reshape_and_cache(digit, digit, keys, values, slots, isa, 1.0, 1.0, kv_cache_dtype)
        raw = cache.flatten()[: found.numel()]
        found += (raw.view(stored) if stored else raw).float().round().long() * weight
        weight *= DIGIT
    if not torch.equal(found.sort().values, torch.arange(found.numel())):
        raise UnsupportedModelError(
            f"cannot read keys back from vLLM's CPU cache ({isa}, {dtype}, kv_cache_dtype {kv_cache_dtype}): "
            "use a policy that measures nothing, as streaming:budget=25%"
        )
    return PackedKeys(found.argsort().view(block_size, head_size), stored)


def _stored_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return torch.float8_e4m3fn
    return torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else None
