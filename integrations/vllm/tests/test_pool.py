"""Random lives of requests over vLLM's own pool: nothing is freed twice, nothing leaks, nothing wrong is published."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstrata_vllm.ledger import Ledger

from .pool import BLOCK, CHUNK, Pool

pytestmark = pytest.mark.smoke

POLICIES = ("streaming:budget=64", "h2o:budget=25%", "snapkv:budget=48", "tova:budget=32", "confkv:high=32,low=64")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 300)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(4, 24)),
        st.tuples(st.just("preempt"), st.integers(0, 9)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("skip"), st.integers(0, 9)),
    ),
    min_size=6,
    max_size=30,
)


def live(pool, events, random):
    """Let requests come, compute, be preempted and end; check after everything that happens."""
    pool.measure = lambda request, blocks: [random.random() for _ in range(blocks)]
    for number, (what, value) in enumerate(events):
        if what == "add":
            pool.add(f"r{number}", [number % 3 * 100 + i % 50 for i in range(value)])
        elif what == "step":
            for _ in range(value):
                scheduled = pool.step()
                pool.check()
                for name in scheduled:
                    pool.ledger.note_confidence(name, random.random(), None)
        elif what == "preempt" and pool.running:
            pool.preempt(pool.running[value % len(pool.running)])
        elif what == "finish" and pool.requests:
            pool.finish(list(pool.requests)[value % len(pool.requests)])
        elif what == "skip" and pool.running:  # a request that is looked at but not scheduled
            request = pool.running[value % len(pool.running)]
            pool.kv.remove_skipped_blocks(request.request_id, request.num_computed_tokens, request.num_prompt_tokens)
        pool.check()
    for name in list(pool.requests):
        pool.finish(name)
    pool.check()
    assert pool.blocks.get_num_free_blocks() == pool.blocks.num_gpu_blocks - 1


@settings(max_examples=150)
@given(
    EVENTS,
    st.sampled_from(POLICIES),
    st.integers(8, 60),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_life_leaves_the_pool_whole(events, policy, blocks, lag, classes, caching, random):
    live(Pool(policy, blocks * classes, lag, classes, caching), events, random)


def test_a_preempted_request_starts_with_nothing_lost():
    pool = Pool("streaming:budget=48", 40)
    pool.add("r", list(range(3 * CHUNK)))
    for _ in range(10):
        pool.step()
    assert pool.ledger.evicted("r") > 0
    pool.preempt(pool.running[0])
    assert pool.ledger.evicted("r") == 0
    for _ in range(10):
        pool.step()
        pool.check()
    assert pool.ledger.evicted("r") > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_block_is_freed_so_many_steps_after_it_is_announced(lag, monkeypatch):
    gone, told = [], []
    announce = Ledger.announce

    def listen(self, group, request):
        told.append(announce(self, group, request))
        return told[-1]

    monkeypatch.setattr(Ledger, "announce", listen)
    pool = Pool("streaming:budget=48", 40, lag)
    pool.add("r", list(range(3 * CHUNK)))
    for _ in range(8):
        pool.step()
        table = pool.managers[0].req_to_blocks["r"]
        gone.append([i for i, block in enumerate(table) if block.is_null])
    announced = [sorted(block for blocks in told[: step + 1 - lag] for block in blocks) for step in range(8)]
    assert gone == announced
    assert gone[-1] == [1, 2, 3, 4, 5, 6]


def test_what_is_not_scheduled_is_not_freed():
    pool = Pool("streaming:budget=48", 40)
    pool.add("r", list(range(3 * CHUNK)))
    for _ in range(2):
        pool.step()
    request = pool.running[0]
    look = request.request_id, request.num_computed_tokens, request.num_prompt_tokens
    for _ in range(5):  # chosen, but the workers were not told
        pool.kv.remove_skipped_blocks(*look)
        assert not any(block.is_null for block in pool.managers[0].req_to_blocks["r"])


def test_without_measurements_nothing_is_chosen(monkeypatch):
    monkeypatch.setattr(Ledger, "note", lambda *given: None)
    pool = Pool("h2o:budget=48", 40)
    pool.add("r", list(range(3 * CHUNK)))
    for _ in range(8):
        pool.step()
    assert pool.ledger.totals.evicted == 0


def test_blocks_computed_after_an_eviction_are_not_published():
    pool = Pool("streaming:budget=48", 60, caching=True)
    pool.add("first", list(range(3 * CHUNK)))
    for _ in range(60):
        pool.step()
    table = pool.managers[0].req_to_blocks["first"]
    hashed = [i for i, block in enumerate(table) if block.block_hash is not None]
    assert pool.ledger.evicted("first") > 0
    assert len(table) > 3 * CHUNK // BLOCK  # it went on long after
    assert all(i < 2 * CHUNK // BLOCK for i in hashed)  # the first chunk, and that of the step that announced
    pool.add("second", list(range(3 * CHUNK)))
    hits, known, _ = pool.kv.get_computed_blocks(pool.requests["second"])
    assert known <= CHUNK * 2
    assert all(not block.is_null for block in hits.blocks[0])


def test_an_eviction_in_one_group_keeps_all_groups_from_publishing(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "polykv: 1\nmodel: {name: m, layers: 4, kv_heads: 2}\npolicy:\n  plan:\n"
        "    L0-L1: {prefill: {pattern: streaming, budget: 48}, decode: {pattern: streaming, budget: 48}}\n"
        "    L2-L3: {prefill: full, decode: full}\n"
    )
    pool = Pool(f"polykv:{path}", 80, caching=True)
    pool.add("r", list(range(3 * CHUNK)))
    for _ in range(40):
        pool.step()
    whole = pool.managers[1].req_to_blocks["r"]
    assert not any(block.is_null for block in whole)
    assert sum(block.block_hash is not None for block in whole) <= 2 * CHUNK // BLOCK


def test_admission_counts_what_a_request_may_hold_and_not_its_length():
    stock = Pool("streaming:budget=4096", 60)  # never acts
    small = Pool("streaming:budget=48", 60)
    for pool in (stock, small):
        for number in range(8):
            pool.add(f"r{number}", list(range(20 * BLOCK)))
        for _ in range(20):
            pool.step()
    assert len(stock.running) == 2
    assert len(small.running) == 8


@pytest.mark.parametrize("policy", ["streaming:budget=48", "h2o:budget=25%", "tova:budget=32", "snapkv:budget=48"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_never_holds_more_than_its_peak(policy, lag):
    pool = Pool(policy, 400, lag)
    pool.add("r", list(range(20 * BLOCK)))
    layer_class = pool.managers[0].layer_class
    for _ in range(200):
        pool.step()
        table = pool.managers[0].req_to_blocks["r"]
        tokens = pool.requests["r"].num_tokens
        most = layer_class.peak(20 * BLOCK, tokens - 20 * BLOCK, CHUNK, lag)
        assert sum(not block.is_null for block in table) <= most
