"""Counted bytes are the bytes of a run, without a model."""

import pytest
import torch

import kvstrata
from kvstrata.bench.counting import KvShape, count_bytes
from kvstrata.core import SpecError
from kvstrata.policy import parse_policy
from tests.contract.runs import ALL, kv, prompt, spec, tiny

SHAPE = KvShape((0, 1, 2), 2, 16, torch.float32, group=2)
EXTRA = ["keynorm:budget=30%,room=5", "streaming:budget=40KiB", "window:budget=20KiB/layer", "pyramidkv:budget=20"]
EXTRA += ["echo-head:budget=30%,window=4,weight=u+"]
CODED = ["full:codec=int8,exact=4", "window:budget=90,codec=int8,exact=10", "snapkv:budget=70,codec=int4,exact=0"]


@pytest.mark.parametrize(("batch", "chunk"), [(1, None), (3, 20)])
@pytest.mark.parametrize("name", [*ALL, *EXTRA, *CODED])
@pytest.mark.thin(8)
def test_counted_bytes_are_those_of_a_run(name, batch, chunk):
    text = spec(name, 20)
    bill = count_bytes(parse_policy(text), SHAPE, context=70, new_tokens=40, batch=batch, chunk=chunk)
    ids, fed = prompt(110, batch), 0
    with torch.no_grad(), kvstrata.compress(tiny(), text) as cache:
        for length in [70] if chunk is None else [20, 20, 20, 10]:
            tiny()(ids[:, fed : fed + length], **kv(cache))
            fed += length
        after_prompt = cache.nbytes
        for step in range(70, 109):
            tiny()(ids[:, step : step + 1], **kv(cache))
        at_end, peak = cache.nbytes, cache.account.peak
    assert (bill.after_prompt.live, bill.after_prompt.held) == (after_prompt.live, after_prompt.held)
    assert (bill.at_end.live, bill.at_end.held) == (at_end.live, at_end.held)
    assert (bill.peak.live, bill.peak.held) == (peak.live, peak.held)


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_confidence_bounds_what_confkv_holds(confidence):
    policy = parse_policy("confkv:high=20,low=40,recent=4,tau=0.5")
    bill = count_bytes(policy, SHAPE, context=70, new_tokens=100, confidence=confidence)
    entry = 3 * (2 * 2 * 16 * 4 + 8)
    assert bill.at_end.live == (20 if confidence else 40) * entry


def test_a_budget_that_cannot_be_met_is_refused():
    with pytest.raises(SpecError, match="give more"):
        count_bytes(parse_policy("h2o:budget=10B"), SHAPE, context=70, new_tokens=2)
