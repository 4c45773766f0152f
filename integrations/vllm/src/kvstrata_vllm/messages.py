"""What scheduler and workers tell each other with every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class Ask:
    """Measurements that the scheduler wants after the step: of a request's `blocks` blocks, as one scorer sees them."""

    group: int
    request: str
    scorer: int
    blocks: int


@dataclass(slots=True)
class Step(KVConnectorMetadata):
    """From the scheduler to every worker, the same for all ranks."""

    tails: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    """For each group: request -> the physical block that its last token of this step goes to, which nobody shares."""
    drops: list[tuple[int, str, list[int]]] = field(default_factory=list[tuple[int, str, list[int]]])
    """(group, request, logical blocks) announced with this step."""
    fresh: list[str] = field(default_factory=list[str])  # requests that start, or start again, with this step
    finished: list[str] = field(default_factory=list[str])
    asks: list[Ask] = field(default_factory=list[Ask])
    width: list[int] = field(default_factory=list[int])
    """For each group: the most blocks of a request of this step that are there."""


@dataclass(slots=True)
class Report(KVConnectorWorkerMetadata):
    """From a worker to the scheduler: answers to the step's asks, and how sure the model was a step ago."""

    measured: dict[tuple[int, str, int], list[float]] = field(default_factory=dict[tuple[int, str, int], list[float]])
    """(group, request, scorer) -> a number for every block, over the heads of this rank."""
    confidence: dict[str, float] = field(default_factory=dict[str, float])  # every rank sees the same logits
    ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Sum measurements over ranks, each of which has its own heads."""
        assert isinstance(other, Report)
        for key, values in other.measured.items():
            mine = self.measured.setdefault(key, [0.0] * len(values))
            self.measured[key] = [a + b for a, b in zip(mine, values, strict=True)]
        self.confidence |= other.confidence
        self.ranks += other.ranks
        return self
