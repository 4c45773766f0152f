"""The five kinds of runs against plain forwards of the same model, written out."""

import math
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

import kvstrata
from kvstrata.bench.counting import KvShape
from kvstrata.evaluate.answers import run_answers, share_found
from kvstrata.evaluate.equal import resolve
from kvstrata.evaluate.probes import run_probes
from kvstrata.evaluate.steps import run_block, run_steps
from kvstrata.evaluate.task import Example, Probe, Turn
from kvstrata.evaluate.turns import run_turns

from ..contract.runs import kv, prompt

WORDS = prompt(120, rows=3).tolist()
POLICIES = {
    "full": "full",
    "h2o": "h2o:budget=16",
    "snapkv": "snapkv:budget=16",
    "confkv": "confkv:high=8,low=16,recent=4",
}


def caches(stack, model, policies=POLICIES):
    return {label: stack.enter_context(kvstrata.compress(model, policy)) for label, policy in policies.items()}


@torch.no_grad()
def nats(model, cache, before, ids):
    """Of `ids` after `before`, which was read already, in one forward."""
    logits = model(torch.tensor([before[-1:] + ids[:-1]]), **kv(cache)).logits[0]
    return -logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def example(row, lengths=(40, 33), name="one"):
    context = WORDS[row][: lengths[row % 2]]
    probes = [Probe(WORDS[row][50:58], WORDS[row][60:66], {"depth": 0.1}), Probe(WORDS[row][70:73], WORDS[row][80:90])]
    return Example(name, context, probes)


@pytest.mark.parametrize("policy", POLICIES.values())
@pytest.mark.parametrize("scope", ["context", "prompt"])
def test_probes_are_asked_of_the_compressed_context_each_by_itself(model, policy, scope):
    examples = [example(0), example(1, name="two")]
    with ExitStack() as stack:
        opened = caches(stack, model, {"full": "full", "it": policy})
        found = run_probes(model, opened, examples, scope)
    for one, outcome in zip(examples, found["it"], strict=True):
        assert outcome.example == one.name
        for probe, item in zip(one.probes, outcome.items, strict=True):
            asked = one.context + probe.question
            visible = len(asked) if scope == "prompt" else len(one.context)
            with kvstrata.compress(model, policy) as cache, torch.no_grad():
                read = model(torch.tensor([asked[:visible]]), **kv(cache)).logits[:, -1:]
                rest = asked[visible:] + probe.answer[:-1]
                logits = torch.cat([read, model(torch.tensor([rest]), **kv(cache)).logits], dim=1)[0]
            expected = -logits[-len(probe.answer) :].log_softmax(-1).gather(1, torch.tensor(probe.answer)[:, None])
            torch.testing.assert_close(torch.tensor(item["tokens"]), expected[:, 0], rtol=0, atol=1e-4)
            assert item["exact"] == all(item["right"])


def test_bytes_of_probes_are_those_of_the_compressed_context(model):
    with ExitStack() as stack:
        opened = caches(stack, model)
        found = run_probes(model, opened, [example(0)], "context")
    with kvstrata.compress(model, POLICIES["h2o"]) as cache, torch.no_grad():
        model(torch.tensor([example(0).context]), **kv(cache))
    assert (found["h2o"][0].held, found["h2o"][0].live) == (cache.nbytes.held, cache.nbytes.live)
    assert found["h2o"][0].full == found["full"][0].held


def test_steps_compare_every_step_with_the_full_cache(model):
    examples = [Example(str(row), WORDS[row][:40], continuation=WORDS[row][40:60]) for row in range(3)]
    with ExitStack() as stack:
        found = run_steps(model, caches(stack, model), examples)
    assert [outcome.example for outcome in found["h2o"]] == ["0", "1", "2"]
    for row, outcome in enumerate(found["full"]):
        expected = nats(model, DynamicCache(), WORDS[row][:1], WORDS[row][1:60])[-19:]
        assert outcome.values["nll"] == pytest.approx(float(expected.mean()), abs=1e-5)
        assert outcome.values["kl"] == 0.0
        assert outcome.values["agreement"] == 1.0
        assert outcome.values["attention_error"] == 0.0
        assert outcome.full == outcome.held
    for label in ("h2o", "snapkv", "confkv"):
        for outcome in found[label]:
            assert outcome.values["kl"] > 1e-4
            assert outcome.values["attention_error"] > 1e-3
            assert outcome.live < outcome.full  # so few tokens share pages of 64
            assert outcome.ms_per_token > 0


def test_steps_of_a_policy_are_those_of_its_own_loop(model):
    row = WORDS[1]
    with ExitStack() as stack:
        found = run_steps(model, caches(stack, model), [Example("a", row[:40], continuation=row[40:52])])
    expected, held = [], []
    with kvstrata.compress(model, POLICIES["h2o"]) as cache, torch.no_grad():
        model(torch.tensor([row[:40]]), **kv(cache))
        for now, after in pairwise(row[40:52]):
            logits = model(torch.tensor([[now]]), **kv(cache)).logits[0, -1]
            expected.append(-float(logits.log_softmax(-1)[after]))
            held.append(cache.nbytes.held)
    assert found["h2o"][0].items[0]["nll"] == pytest.approx(expected, abs=1e-4)
    assert found["h2o"][0].held == round(sum(held) / len(held))


def test_a_block_is_what_one_forward_gives_after_the_prompt_was_compressed(model):
    examples = [Example(str(row), WORDS[row][:40], continuation=WORDS[row][40:60]) for row in range(2)]
    with ExitStack() as stack:
        opened = caches(stack, model)
        found = run_block(model, opened, examples)
    for row, example in enumerate(examples):
        logits, held = {}, {}
        for label in ("full", "h2o", "snapkv"):
            with kvstrata.compress(model, POLICIES.get(label, "full")) as cache, torch.no_grad():
                model(torch.tensor([example.context]), **kv(cache))
                held[label] = cache.nbytes.held
                cache.engine.activate_past_recording()
                logits[label] = model(torch.tensor([example.continuation[:-1]]), **kv(cache)).logits[0].log_softmax(-1)
        targets = torch.tensor(example.continuation[1:])[:, None]
        for label, own in logits.items():
            outcome = found[label][row]
            assert outcome.values["nll"] == pytest.approx(float(-own.gather(1, targets).mean()), abs=1e-4)
            kl = (logits["full"].exp() * (logits["full"] - own)).sum(-1).mean()
            assert outcome.values["kl"] == pytest.approx(float(kl), abs=1e-4)
            assert (outcome.held, outcome.full) == (held[label], held["full"])
            assert len(outcome.items[0]["nll"]) == 19
            assert outcome.ms_per_token is None
        assert found["full"][row].values["attention_error"] == 0.0
        assert found["h2o"][row].values["attention_error"] > 1e-3


def test_turns_score_the_assistant_and_what_it_repeats(model):
    row = WORDS[2]
    turns = [
        Turn(row[40:60], False),
        Turn(row[60:70], True, [True, True] + [False] * 8),
        Turn(row[70:75], True, [False] * 5),
    ]
    with ExitStack() as stack:
        found = run_turns(model, caches(stack, model), Example("a", row[:40], turns=turns))
    expected = nats(model, DynamicCache(), row[:1], row[1:75])[59:]
    values = found["full"][0].values
    assert values["nll"] == pytest.approx(float(expected.mean()), abs=1e-4)
    assert values["late_nll"] == pytest.approx(float(expected[:2].mean()), abs=1e-4)
    assert found["h2o"][0].values["nll"] != pytest.approx(values["nll"], abs=1e-3)


@pytest.mark.parametrize("scope", ["context", "prompt"])
def test_answers_are_what_generate_gives(model, tokenizer, scope):
    one = Example("a", WORDS[0][:40], [Probe(WORDS[0][40:44], [], references=("x",))])
    with ExitStack() as stack:
        found = run_answers(model, tokenizer, caches(stack, model), one, scope, 12)
    ids = torch.tensor([WORDS[0][:44]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert found["full"][0].items[0]["answer"] == tokenizer.decode(made[0, 44:], skip_special_tokens=True)


def test_a_question_chooses_nothing_of_the_context(model, tokenizer):
    one = Example("a", WORDS[0][:40], [Probe(WORDS[1][:50], [], references=("x",))])
    with ExitStack() as stack:
        mine = caches(stack, model, {"full": "full", "snapkv": "snapkv:budget=16"})
        run_answers(model, tokenizer, mine, one, "context", 1)
        after = [entry for entry in mine["snapkv"].entries(0, row=0, head=0) if entry < 40]
        alone = stack.enter_context(kvstrata.compress(model, "snapkv:budget=16"))
        model(torch.tensor([one.context]), **kv(alone))
        assert after == alone.entries(0, row=0, head=0)


SCORES = [
    ("it is 123 and 456", ("123", "456", "789"), False, 2 / 3),
    ("ALPHA", ("alpha",), False, 1.0),
    ("in Rome", ("paris", "rome"), True, 1.0),
    ("12\x0034", ("1234",), False, 0.0),
    ("", ("a",), True, 0.0),
]


@pytest.mark.parametrize(("text", "references", "any_of", "score"), SCORES)
def test_the_score_is_the_share_of_references_in_the_answer(text, references, any_of, score):
    assert share_found(text, Probe([], [], {}, references, any_of)) == pytest.approx(score)


SHARES = ["h2o", "snapkv", "streaming", "tova", "window", "pyramidkv", "h2o:codec=int8"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["75%", "50%"])
def test_a_share_asked_for_is_the_share_held_over_the_steps(model, asked):
    """Of a continuation as long as the prompt, which a policy for prompts alone keeps whole."""
    shape = KvShape((0, 1, 2), 2, 16, torch.float32)
    ids = prompt(1200, rows=1, seed=7).tolist()[0]
    example = Example("a", ids[:600], continuation=ids[600:900])
    policies = {name: resolve(name, asked, shape, 600, 300) for name in SHARES}
    with ExitStack() as stack:
        found = run_steps(model, caches(stack, model, {"full": "full", **policies}), [example])
    for name in SHARES:
        if ":" in name and asked == "75%":  # codes of all tokens take less
            continue
        share = found[name][0].held / found[name][0].full
        assert share == pytest.approx(float(asked[:-1]) / 100, abs=0.09 if ":" in name else 0.05), name


def test_logits_that_are_no_numbers_do_not_look_perfect(model):
    with ExitStack() as stack:
        opened = caches(stack, model, {"full": "full", "h2o": "h2o:budget=16"})
        broken = model.lm_head.weight[5].clone()
        example = Example("a", WORDS[1][:40], continuation=WORDS[1][40:44])

        def nan_under_h2o(module, args, kwargs, output):
            if any(value is opened["h2o"] for value in kwargs.values()):
                output.logits[..., 5] = float("nan")
            return output

        handle = model.register_forward_hook(nan_under_h2o, with_kwargs=True)
        stack.callback(handle.remove)
        found = run_steps(model, opened, [example])
    assert torch.equal(model.lm_head.weight[5], broken)
    assert math.isnan(found["h2o"][0].values["kl"])
    assert found["full"][0].values["kl"] == 0.0
