"""Numbers for the server's `/metrics` and its log: what was evicted, and what part of the requests' blocks is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

EVICTED, LIVE, LOGICAL = "evicted", "live", "logical"  # since the last report; now; now, evicted ones included
REQUEST_EVICTED, REQUEST_LIVE = "request_evicted", "request_live"  # of each request that ended since the last report
SHARES = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
BLOCKS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]


@dataclass
class StrataStats(KVConnectorStats):
    """What happened since the last report."""

    @classmethod
    def of(cls, evicted: int, live: int, logical: int, ended: list[tuple[int, float]]) -> StrataStats:
        """ended: (blocks evicted, share of blocks that were there) of requests that ended."""
        blocks, shares = [n for n, _ in ended], [share for _, share in ended]
        return cls({EVICTED: evicted, LIVE: live, LOGICAL: logical, REQUEST_EVICTED: blocks, REQUEST_LIVE: shares})

    def reset(self) -> None:
        """Nothing happened."""
        self.data = StrataStats.of(0, 0, 0, []).data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what came later."""
        mine, later = self.data, other.data
        for key in (EVICTED, REQUEST_EVICTED, REQUEST_LIVE):
            mine[key] = mine[key] + later[key]
        mine |= {LIVE: later[LIVE], LOGICAL: later[LOGICAL]}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        share = self.data[LIVE] / self.data[LOGICAL] if self.data[LOGICAL] else 1.0
        return {"Evicted blocks": self.data[EVICTED], "Live share": round(share, 3)}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.data[EVICTED] or self.data[LOGICAL] or self.data[REQUEST_EVICTED])


class StrataMetrics(KVConnectorPromMetrics):
    """Prometheus metrics, each with the labels of vLLM's own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._evicted = self._per_engine(
            self._counter_cls, "evicted_blocks", "Blocks given back to the pool while their request ran."
        )
        self._live = self._per_engine(
            self._gauge_cls, "live_share", "Part of the running requests' blocks that is in the pool."
        )
        self._request_evicted = self._per_engine(
            self._histogram_cls, "request_evicted_blocks", "Blocks a request had lost when it ended.", buckets=BLOCKS
        )
        self._request_live = self._per_engine(
            self._histogram_cls,
            "request_live_share",
            "Part of a request's blocks it had when it ended.",
            buckets=SHARES,
        )

    def _per_engine(self, kind: Any, name: str, text: str, **options: Any) -> dict[int, Any]:
        made = kind(name=f"kvstrata:{name}", documentation=text, labelnames=self._labelnames, **options)
        return create_metric_per_engine(made, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one report."""
        data = transfer_stats_data
        self._evicted[engine_idx].inc(data[EVICTED])
        self._live[engine_idx].set(data[LIVE] / data[LOGICAL] if data[LOGICAL] else 1.0)
        for blocks in data[REQUEST_EVICTED]:
            self._request_evicted[engine_idx].observe(blocks)
        for share in data[REQUEST_LIVE]:
            self._request_live[engine_idx].observe(share)
