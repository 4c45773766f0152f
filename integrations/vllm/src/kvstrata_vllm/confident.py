"""Measures how sure the model is of its next tokens, on logits that vLLM's own processors leave; changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from kvstrata_vllm.connector import this_worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class ConfidenceProcessor(LogitsProcessor):
    """Rows of the logits are rows of attention's batch, so the worker knows whose they are."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """vLLM's signature; nothing of it is needed."""

    def is_argmax_invariant(self) -> bool:
        """It is, but greedy requests would skip it if it said so."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps no state per request."""

    def apply(self, logits: Tensor) -> Tensor:
        """Look at logits [R, V] and give them back as they are."""
        connector = this_worker()
        if connector is not None and connector.worker is not None:
            connector.worker.note_logits(logits)
        return logits
