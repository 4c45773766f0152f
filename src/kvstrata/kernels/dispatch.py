"""Which implementation of the kernels serves, and what native ones need to know of memory."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch

from kvstrata.kernels.pages import Format, Pages

KernelName = Literal["auto", "native", "triton", "reference", "exact"]
Implementation = Literal["native", "triton", "reference", "exact"]
KERNELS: tuple[KernelName, ...] = ("auto", "native", "triton", "reference", "exact")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@cache
def native_module() -> Any:
    """The compiled module, or None, said once, where it was not built."""
    try:
        from kvstrata import _native
    except ImportError as error:
        warnings.warn(
            f"kvstrata runs on torch alone, since its native kernels are not built ({error}): "
            "for speed install a C++ compiler, then kvstrata again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return _native


def native_threads() -> int:
    """Threads of torch's, as many as native kernels can use."""
    return min(torch.get_num_threads(), native_module().MAX_THREADS)


def native_serves(format: Format, device: torch.device) -> bool:
    """Whether native kernels can work on such pages."""
    if format.codec is not None and not format.codec.plain:
        return False
    step = 8 if format.codec is None else 16
    fits = format.k_dim % step == 0 and format.v_dim % step == 0 and format.dtype in _DTYPES
    return fits and device.type == "cpu" and native_module() is not None


def choose(name: KernelName, format: Format, device: torch.device) -> Implementation:
    """The implementation for exact pages of this format; "auto" takes native kernels where they serve.

    Raises `ValueError` if the one asked for cannot.
    """
    if name in ("reference", "exact"):
        return name
    if name in ("auto", "native") and native_serves(format, device):
        return "native"
    if name == "triton" and device.type == "cuda" and format.dtype in _DTYPES and has_triton():
        return "triton"
    if name != "auto":
        raise ValueError(
            f"kernels={name!r} cannot serve {format.dtype} on {device.type} with head_dim {format.k_dim}: "
            "take kernels='auto'"
        )
    return "reference"


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    from importlib.util import find_spec

    return find_spec("triton") is not None


def native_arena(kernels: Implementation, format: Format) -> Any:
    """The native twin of an arena of such pages, or None where other kernels serve."""
    codec = format.codec
    if kernels != "native" or (codec is not None and not codec.plain):
        return None
    record = codec and (codec.k_bits, codec.v_bits, codec.symmetric, codec.v_axis == "token", codec.window)
    return native_module().Arena(_DTYPES[format.dtype], record, format.k_dim, format.v_dim)


def with_twin(kernels: Implementation, arena: Any, pages: Pages) -> Pages:
    """Pages with what compiled kernels know them by; `arena` is the native twin of theirs."""
    if kernels == "native" and arena is not None:
        fills = {} if pages.fills is None else {"fills": pages.fills}
        return replace(pages, twin=native_module().Pages(arena, pages.table, pages.lengths, **fills))
    if kernels == "triton" and (pages.format.codec is None or pages.format.codec.plain):
        from kvstrata.kernels.attention import triton

        return replace(pages, twin=triton.addresses(pages))
    return pages
