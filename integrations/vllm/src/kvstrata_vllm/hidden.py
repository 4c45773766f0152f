"""What a surrogate (KVzap) says of tokens, from the hidden states that attention gets.

vLLM gives a backend queries and keys, not hidden states. They are seen by a hook on the module around each attention
layer, which runs only where Python does: in eager mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from kvstrata.core import UnsupportedModelError
from kvstrata.policy.surrogate import SHIPPED, SurrogateModel, read_surrogate, shipped

if TYPE_CHECKING:
    from collections.abc import Callable


def load_surrogate(file: str, layers: int, heads: int, width: int) -> SurrogateModel:
    """Read a surrogate for a model. Raises `SpecError`, or `UnsupportedModelError` if it is for another one."""
    found = read_surrogate(shipped(file) if file in SHIPPED else Path(file))
    own, asked = (len(found.layers), found.num_heads, found.width), (layers, heads, width)
    if own != asked:
        raise UnsupportedModelError(
            f"the surrogate {file!r} is for (layers, key-value heads, hidden size) {own}, and this model has {asked}: "
            "train one with kvstrata calibrate kvzap"
        )
    return found


def worth_of_tokens(surrogate: SurrogateModel, layer: int, hidden: Tensor) -> Tensor:
    """What the surrogate says (ln of KVzip+'s score), mean over heads. hidden [tokens, width] -> [tokens]."""
    return surrogate(layer, hidden[None])[0].mean(dim=0)


def watch_parents(is_attention: Callable[[nn.Module], bool], saw: Callable[[nn.Module, Tensor], None]) -> Any:
    """From now on, call `saw(attention, hidden)` before every module that gets an attention layer as its part runs.

    Returns the handle that ends it for modules made later.
    """

    def registered(parent: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is not None and is_attention(part):

            def before(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
                saw(part, _hidden(given, options))

            parent.register_forward_pre_hook(before, with_kwargs=True)

    return register_module_module_registration_hook(registered)


def _hidden(given: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    if isinstance(found := options.get("hidden_states"), Tensor):
        return found
    floats = [value for value in given if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2]
    if len(floats) != 1:
        raise UnsupportedModelError(
            "cannot tell which argument of this model's attention is the hidden state: use another policy than kvzap"
        )
    return floats[0]


def add_tokens(column: Tensor, slots: Tensor, ends: Tensor, queries: list[int], worth: Tensor, block_size: int) -> None:
    """Add the worth of a step's tokens to their blocks in column [S, M], in place.

    slots, ends [R]: each row's slot, and its tokens after the step · worth [tokens]: sum(queries), row after row
    """
    counts = torch.tensor(queries, device=column.device)
    row = torch.repeat_interleave(torch.arange(len(queries), device=column.device), counts, output_size=sum(queries))
    start = counts.cumsum(0) - counts
    position = ends[row] - counts[row] + torch.arange(len(row), device=column.device) - start[row]
    column.index_put_((slots[row], position.long() // block_size), worth[: len(row)], accumulate=True)
