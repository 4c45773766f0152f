"""A second device that is none: tensors that live on the CPU, say they do not, and refuse to meet those that do."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
# a CUDA tensor may meet a CPU one where it is copied, and where the CPU one is an index
ALLOWED = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor}


class Second(torch.Tensor):
    """A tensor on the second device; `inner` holds its numbers."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE, storage_offset=0
        )

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.inner.tolist()

    def item(self):
        return self.inner.item()

    def __bool__(self):
        return bool(self.inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    kwargs = dict(kwargs)
    flat = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    second = [leaf for leaf in flat if isinstance(leaf, Second)]
    first = [leaf for leaf in flat if not isinstance(leaf, Second) and leaf.dim() > 0]
    if second and first and func not in ALLOWED:
        raise RuntimeError(f"{func}: tensors on two devices")
    asked = kwargs.get("device")
    here = bool(second) if asked is None else torch.device(asked).type == DEVICE.type
    if asked is not None:
        kwargs["device"] = "cpu"
    if func is aten._to_copy.default and asked is not None and not second and not here:
        return func(*args, **kwargs)
    inner = func(*unwrapped(args), **unwrapped(kwargs))
    if func._schema.is_mutable and func is not aten.set_.source_Tensor and isinstance(args[0], torch.Tensor):
        return args[0]
    return tree_map(lambda t: Second(t) if here and isinstance(t, torch.Tensor) else t, inner)


def unwrapped(tree):
    return tree_map(lambda leaf: leaf.inner if isinstance(leaf, Second) else leaf, tree)


class Factories(TorchDispatchMode):
    """Lets `torch.zeros(..., device=DEVICE)` and its like make tensors of the second device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __enter__(self):
        self.tensor = torch.tensor  # which no mode sees
        torch.tensor = lambda data, *, device=None, **options: self.tensor(data, **options).to(device or "cpu")
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor = self.tensor
        return super().__exit__(*error)
