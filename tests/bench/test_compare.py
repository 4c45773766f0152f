import torch

from kvstrata.bench.compare import run_policy, run_reference
from kvstrata.bench.measure import process_peak, provenance, restart_process_peak
from kvstrata.policy import parse_policy

from ..contract.runs import feed, prompt, stock, tiny


def test_the_reference_is_what_generate_would_write():
    model, ids = tiny(), prompt(40)
    reference = run_reference(model, ids, 8)
    assert reference.tokens.tolist() == model.generate(ids, max_new_tokens=8, do_sample=False)[0, -8:].tolist()


def test_log_probs_and_kl_are_those_of_a_plain_loop():
    model, ids = tiny(), prompt(40)
    reference = run_reference(model, ids, 6)
    whole = torch.cat([ids, reference.tokens[None]], dim=1)
    expected = feed(model, whole, stock(model), (40,))[0, 40:].log_softmax(-1)
    assert torch.allclose(reference.log_probs, expected, atol=1e-5)
    trace = run_policy(model, ids, parse_policy("window:budget=10"), reference)
    assert len(trace.kl) == len(trace.top1) == len(trace.step_ms) == len(trace.live) == 6
    assert min(trace.kl) > 0
    assert trace.live == [3 * 10 * (2 * 2 * 16 * 4 + 4)] * 6
    assert trace.peak.live > trace.live[0]


def test_full_budget_agrees_with_itself():
    model, ids = tiny(), prompt(40)
    reference = run_reference(model, ids, 6)
    trace = run_policy(model, ids, parse_policy("h2o:budget=1000"), reference)
    assert all(trace.top1)
    assert max(trace.kl) < 1e-6


def test_the_process_peak_restarts_where_the_system_can():
    device = torch.device("cpu")
    block = torch.ones(1 << 26)
    high = process_peak(device)
    del block
    restart_process_peak()
    assert 0 < process_peak(device) < high


def test_provenance_names_versions_and_machine():
    assert {"kvstrata", "torch", "transformers", "python", "processor", "threads"} == provenance().keys()
