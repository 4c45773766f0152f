"""A worker on plain tensors: what it hears, hides and answers."""

import pytest
import torch
from kvstrata_vllm.blocks import layer_classes
from kvstrata_vllm.keys import SplitKeys
from kvstrata_vllm.measure import Softmax
from kvstrata_vllm.messages import Ask, Report, Step
from kvstrata_vllm.settings import Settings
from kvstrata_vllm.worker import FIRST_SLOTS, Worker, alike

BLOCK, POOL, WIDTH, HEADS, DIM = 4, 32, 6, 2, 8


def worker(policy="h2o:budget=8", lag=1):
    classes = dict(enumerate(layer_classes(Settings(policy), 1, BLOCK, 64)))
    return Worker(classes, WIDTH, POOL, lag, torch.device("cpu"))


def step(tables, lengths, **more):
    """A message about requests whose tables and lengths after the step these are."""
    tails = {name: tables[name][(lengths[name] - 1) // BLOCK] for name in tables}
    return Step(tails=[tails], width=[max(map(len, tables.values()), default=0)], **more)


def rows(made, tables, lengths, queries):
    """Let the worker see the batch, as attention's metadata describes it."""
    names = list(tables)
    table = torch.zeros(len(names), WIDTH + 2, dtype=torch.int32)  # vLLM's tables may be wider than the longest request
    for row, name in enumerate(names):
        table[row, : len(tables[name])] = torch.tensor(tables[name], dtype=torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    slots = [
        tables[n][p // BLOCK] * BLOCK + p % BLOCK
        for n, q in zip(names, queries, strict=True)
        for p in range(lengths[n] - q, lengths[n])
    ]
    at = torch.tensor([lengths[name] for name in names], dtype=torch.int32)
    return made.compact(0, table, at, torch.tensor(slots), starts, starts)


TABLES = {"a": [5, 9, 2], "b": [7, 3, 8]}


@pytest.mark.parametrize("lag", [0, 1])
def test_announced_blocks_are_hidden_a_step_later(lag):
    made, lengths = worker(lag=lag), {"a": 10, "b": 9}
    made.begin(step(TABLES, lengths, fresh=["a", "b"]))
    rows(made, TABLES, lengths, [10, 9])
    lengths = {"a": 11, "b": 10}
    made.begin(step(TABLES, lengths, drops=[(0, "b", [1])]))
    seen = rows(made, TABLES, lengths, [1, 1])
    assert seen.lengths.tolist() == ([11, 6] if lag == 0 else [11, 10])
    lengths = {"a": 12, "b": 11}
    made.begin(step(TABLES, lengths))
    seen = rows(made, TABLES, lengths, [1, 1])
    assert seen.lengths.tolist() == [12, 7]
    assert seen.table[1, :2].tolist() == [7, 8]


def test_a_request_that_starts_again_has_lost_nothing():
    made, lengths = worker(), {"a": 10, "b": 9}
    made.begin(step(TABLES, lengths, fresh=["a", "b"], drops=[(0, "a", [0]), (0, "b", [0])]))
    made.begin(step(TABLES, lengths, fresh=["a"]))  # announced a step ago, for blocks that are no longer its own
    assert rows(made, TABLES, lengths, [1, 1]).lengths.tolist() == [10, 5]


def test_the_slot_of_a_request_that_ended_is_clean_for_the_next():
    made, lengths = worker(), {"a": 10}
    made.begin(step({"a": TABLES["a"]}, lengths, fresh=["a"], drops=[(0, "a", [0])]))
    made.begin(step({"a": TABLES["a"]}, lengths))
    made.begin(step({"b": TABLES["b"]}, {"b": 9}, fresh=["b"], finished=["a"]))
    assert rows(made, {"b": TABLES["b"]}, {"b": 9}, [9]).lengths.tolist() == [9]
    assert len(made._slots) == 1


def test_rows_that_nobody_announced_are_left_alone():
    made = worker()
    made.begin(Step(tails=[{}], width=[0]))
    assert rows(made, TABLES, {"a": 10, "b": 9}, [1, 1]).lengths.tolist() == [10, 9]


def test_more_requests_than_slots_make_more():
    made = worker()
    many = {f"r{i}": [i % 30 + 1] for i in range(FIRST_SLOTS + 10)}
    made.begin(step(many, dict.fromkeys(many, 1), fresh=list(many)))
    assert len(set(made._slots.values())) == len(many)
    assert 0 not in made._slots.values()
    assert made.groups[0].keep.shape[0] == 2 * FIRST_SLOTS


def test_attention_is_summed_by_logical_block_over_steps_and_layers():
    made, lengths = worker("h2o:budget=8"), {"a": 12, "b": 9}
    cache = torch.randn(POOL, HEADS, BLOCK, 2 * DIM)
    made.begin(step(TABLES, lengths, fresh=["a", "b"]))
    rows(made, TABLES, lengths, [12, 9])
    for _ in range(3):  # layers
        made.measure(0, torch.randn(21, HEADS, DIM), cache, SplitKeys(), Softmax(1.0))
    assert made.end() is None
    made.begin(step(TABLES, lengths, drops=[(0, "a", [1])]))
    rows(made, TABLES, lengths, [1, 1])
    made.measure(0, torch.randn(2, HEADS, DIM), cache, SplitKeys(), Softmax(1.0))
    made.end()
    made.begin(step(TABLES, lengths, asks=[Ask(0, "a", 0, 3), Ask(0, "b", 0, 3)]))
    rows(made, TABLES, lengths, [1, 1])
    before = made.groups[0].columns[0][made._slots["a"]].clone()
    made.measure(0, torch.randn(2, HEADS, DIM), cache, SplitKeys(), Softmax(1.0))
    report = made.end()
    a, b = report.measured[0, "a", 0], report.measured[0, "b", 0]
    assert sum(a) == pytest.approx(HEADS * (3 * 12 + 1 + 1), rel=1e-5)  # every query gives 1 to each head
    assert sum(b) == pytest.approx(HEADS * (3 * 9 + 1 + 1), rel=1e-5)
    assert a[1] == pytest.approx(float(before[1]))  # it is gone and gets no more
    assert a[0] > float(before[0])


def test_scores_of_the_moment_are_looked_at_only_when_asked_for():
    made, lengths = worker("keynorm:budget=8"), {"a": 12, "b": 9}
    cache = torch.randn(POOL, HEADS, BLOCK, 2 * DIM)
    made.begin(step(TABLES, lengths, fresh=["a", "b"]))
    rows(made, TABLES, lengths, [12, 9])
    made.measure(0, torch.randn(21, HEADS, DIM), cache, SplitKeys(), Softmax(1.0))
    assert not made.groups[0].worth
    made.begin(step(TABLES, lengths, asks=[Ask(0, "a", 0, 3)]))
    rows(made, TABLES, lengths, [1, 1])
    made.measure(0, torch.randn(2, HEADS, DIM), cache, SplitKeys(), Softmax(1.0))
    found = made.end().measured[0, "a", 0]
    expected = -cache[TABLES["a"], ..., :DIM].norm(dim=-1).sum(dim=(1, 2))
    torch.testing.assert_close(torch.tensor(found), expected)


def test_confidence_goes_with_the_next_answer():
    made, lengths = worker("confkv:high=8,low=16"), {"a": 12, "b": 9}
    made.begin(step(TABLES, lengths, fresh=["a", "b"]))
    rows(made, TABLES, lengths, [12, 9])
    made.note_logits(torch.tensor([[9.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    made.begin(step(TABLES, lengths))
    rows(made, TABLES, lengths, [1, 1])
    report = made.end()
    assert report.confidence["a"] > 0.9
    assert report.confidence["b"] < 0.4
    made.begin(step(TABLES, lengths))
    assert made.end() is None


def test_answers_of_ranks_add_up():
    one = Report(measured={(0, "a", 0): [1.0, 2.0]}, confidence={"a": 0.5})
    other = Report(measured={(0, "a", 0): [3.0, 4.0], (0, "b", 0): [1.0]}, confidence={"a": 0.5})
    both = one.aggregate(other)
    assert both.measured == {(0, "a", 0): [4.0, 6.0], (0, "b", 0): [1.0]}
    assert both.confidence == {"a": 0.5}
    assert both.ranks == 2


@pytest.mark.parametrize(
    ("queries", "runs"),
    [([1, 1, 1], [(0, 3)]), ([5, 1, 1, 7, 7], [(0, 1), (1, 3), (3, 5)]), ([2, 0, 0], [(0, 1)]), ([], [])],
)
def test_rows_alike_are_taken_together(queries, runs):
    assert alike(queries) == runs
