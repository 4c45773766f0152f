"""What is counted, and how it reaches Prometheus."""

import json

import pytest
from kvstrata_vllm.droplog import DropLog
from kvstrata_vllm.ledger import Ledger
from kvstrata_vllm.metrics import StrataMetrics, StrataStats
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvstrata.policy.confidence import Steady


def test_reports_add_up():
    first = StrataStats.of(3, 10, 40, [(3, 0.25)])
    found = first.aggregate(StrataStats.of(2, 8, 32, []))
    assert found.reduce() == {"Evicted blocks": 5, "Live share": 0.25}
    assert found.data["request_live"] == [0.25]
    found.reset()
    assert found.is_empty()


def test_prometheus_gets_totals_shares_and_requests():
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}

    class Config:
        kv_transfer_config = None

    metrics = StrataMetrics(Config(), kinds, ["engine"], {0: ["0"]})
    metrics.observe(StrataStats.of(3, 10, 40, [(3, 0.25), (0, 1.0)]).data)
    metrics.observe(StrataStats.of(2, 8, 16, []).data)
    labels = {"engine": "0"}
    assert REGISTRY.get_sample_value("kvstrata:evicted_blocks_total", labels) == 5
    assert REGISTRY.get_sample_value("kvstrata:live_share", labels) == 0.5
    assert REGISTRY.get_sample_value("kvstrata:request_evicted_blocks_sum", labels) == 3
    assert REGISTRY.get_sample_value("kvstrata:request_live_share_bucket", {**labels, "le": "0.25"}) == 1
    assert REGISTRY.get_sample_value("kvstrata:request_live_share_count", labels) == 2


def test_a_ledger_counts_requests_that_lost_blocks():
    ledger = Ledger()
    ledger.freed(ledger.eviction(0, "a"), 2)
    ledger.freed(ledger.eviction(1, "a"), 1)
    ledger.eviction(0, "b")
    assert ledger.evicted("a") == 3
    for name in "ab":
        ledger.finish(name)
    assert (ledger.totals.evicted, ledger.totals.requests, ledger.totals.requests_evicted) == (3, 2, 1)


def test_a_prompt_is_remembered_until_its_request_ends():
    ledger = Ledger()
    assert ledger.prompt("a", 90) == 90, "a request that has not run is all prompt"
    ledger.eviction(0, "a")
    ledger.note_prompt("a", 60)
    ledger.forget(0, "a")  # preempted
    assert not ledger.knows("a")
    assert (ledger.prompt("a", 90), ledger.prompt("a", 40)) == (60, 40)
    ledger.finish("a")
    assert ledger.prompt("a", 90) == 90


def test_confidence_is_steadied_request_by_request():
    ledger, steadied = Ledger(), (0.7, Steady(dwell=2))
    assert ledger.confidence("a") == 0.0
    for c, sure in ((0.9, 1.0), (0.1, 1.0), (0.1, 0.0)):
        ledger.note_confidence("a", c, steadied)
        assert ledger.confidence("a") == sure
    ledger.note_confidence("b", 0.4, None)
    assert ledger.confidence("b") == 0.4
    ledger.note_confidence("b", float("nan"), None)
    assert ledger.confidence("b") == 0.0


def test_a_drop_log_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "drops.jsonl"
    log = DropLog(path)
    log.write({"step": 0})
    assert not path.exists()
    log.close()
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 0}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("lag", [0, 1])
def test_blocks_are_announced_once(lag):
    ledger = Ledger(lag)
    state = ledger.eviction(0, "a")
    state.chosen = [3, 4]
    assert ledger.announce(0, "a") == [3, 4]
    assert ledger.announce(0, "a") == []
    assert ledger.announce(0, "unknown") == []
    assert not ledger.may_free(state)
    ledger.step += 1
    assert ledger.may_free(state) is bool(lag)
