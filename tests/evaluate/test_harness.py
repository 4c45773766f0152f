"""lm-evaluation-harness under our caches. Needs the extra `eval`."""

import gzip
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstrata.core import InputError

from ..cli.conftest import kvstrata

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("default"),  # of libraries that are not ours
]
pytest.importorskip("lm_eval", reason="needs kvstrata[eval]")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(8)]
    (path / "gsm8k").mkdir()
    for name in ("test", "train_first200"):
        with gzip.open(path / "gsm8k" / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def lm(folder, **options):
    from kvstrata.evaluate.harness import StrataLM

    return StrataLM(str(folder), dtype="float32", **options)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def test_likelihoods_under_the_full_cache_are_those_of_the_harness(folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [("the prompt is this", " and that"), ("short", " x"), ("a prompt that is longer than others are", " end")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    expected = HFLM(AutoModelForCausalLM.from_pretrained(folder), tokenizer=str(folder), batch_size=1, device="cpu")
    for batch in (1, 3):
        found = lm(folder, batch_size=batch).loglikelihood(requests, disable_tqdm=True)
        for (nats, greedy), (other, also) in zip(
            found, expected.loglikelihood(requests, disable_tqdm=True), strict=True
        ):
            assert nats == pytest.approx(other, abs=1e-3)
            assert greedy == also


def test_answers_of_a_padded_batch_are_those_of_rows_alone(folder):
    from lm_eval.api.instance import Instance

    options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    texts = ["the prompt is this", "short", "a prompt that is longer than all the others are"]
    requests = [Instance("generate_until", {}, (text, options), 0) for text in texts]
    for policy in ("full", "h2o:budget=8;recent=2", "window:budget=50%"):
        alone = lm(folder, policy=policy, batch_size=1).generate_until(requests, disable_tqdm=True)
        made = lm(folder, policy=policy, batch_size=3)
        assert made.generate_until(requests, disable_tqdm=True) == alone
        assert made.share_held > 0


def test_a_policy_changes_what_a_continuation_is_worth(folder):
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, ("one two three four five six seven eight", " nine"), 0)]
    full, less = (lm(folder, policy=p).loglikelihood(requests, disable_tqdm=True) for p in ("full", "window:budget=4"))
    assert full[0][0] != pytest.approx(less[0][0], abs=1e-3)


def test_gsm8k_runs_on_files_at_hand(folder, local):
    options = ["--model", folder, "--policy", "h2o", "--budget", "50%", "--contexts", 2, "--data", local, "--json"]
    done = kvstrata("evaluate", "--lm-eval", "gsm8k", *options)
    assert done.exit_code == 0, done.exception
    rows = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert {row["policy"] for row in rows} == {"full", "h2o", "random"}
    assert {row["metric"] for row in rows} == {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert all(row["n"] == 2 for row in rows)


@pytest.mark.parametrize("length", [300, 10**6])
def test_a_length_cuts_prompts_and_never_exceeds_the_model(folder, local, monkeypatch, tmp_path, length):
    from kvstrata.evaluate.harness import StrataLM

    found, generate = [], StrataLM._model_generate

    def recorded(self, context, max_length, *args, **kwargs):
        found.append((context.shape[1], self.max_length))
        return generate(self, context, max_length, *args, **kwargs)

    monkeypatch.setattr(StrataLM, "_model_generate", recorded)
    options = ["--model", folder, "--policy", "full", "--contexts", 1, "--data", local, "--no-controls"]
    done = kvstrata("evaluate", "--lm-eval", "gsm8k", *options, "--length", length, "--out", tmp_path)
    assert done.exit_code == 0, done.exception
    limit = min(length, lm(folder).max_length)
    assert [most for _, most in found] == [limit]
    assert found[0][0] <= limit - 256  # tokens of the answer
    assert length != 300 or found[0][0] == 44


def test_a_length_without_room_for_an_answer_is_refused(folder, local, tmp_path):
    options = ["--model", folder, "--policy", "full", "--contexts", 1, "--data", local, "--no-controls"]
    done = kvstrata("evaluate", "--lm-eval", "gsm8k", *options, "--length", 64, "--out", tmp_path)
    assert isinstance(done.exception, InputError)
    assert "256" in str(done.exception)


def test_an_answer_longer_than_the_length_leaves_one_token_of_the_context(folder, monkeypatch):
    read = []

    def noted(*args, **kwargs):
        read.extend(len(context) for context in args[2])
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstrata.evaluate.harness.read", noted)
    model = lm(folder, length=64)
    for answer in (63, 64, 70):
        with pytest.raises(KeyboardInterrupt):
            model._loglikelihood_tokens([(None, list(range(500)), list(range(answer)))])
    assert read == [1, 1, 1]


def test_the_harness_s_own_command_knows_our_model(folder, local):
    command = [sys.executable, "-m", "kvstrata.evaluate.harness", "run", "--model", "kvstrata"]
    command += ["--model_args", f"pretrained={folder},policy=streaming:budget=32;sinks=2", "--tasks", "gsm8k_local"]
    from kvstrata.evaluate.harness import TASKS

    command += ["--include_path", str(TASKS), "--limit", "1", "--batch_size", "1", "--num_fewshot", "1"]
    done = subprocess.run(command, env={**os.environ, "KVSTRATA_DATA": str(local)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gsm8k_local" in done.stdout


def test_unknown_tasks_and_windows_are_refused(folder):
    done = kvstrata("evaluate", "--lm-eval", "gsm9k", "--model", folder)
    assert "has no task gsm9k" in str(done.exception)
    with pytest.raises(Exception, match="--task ppl"):
        lm(folder).loglikelihood_rolling([])


def test_nothing_is_left_on_the_model(folder):
    made = lm(folder, policy="h2o:budget=8")
    before = made.model.config._attn_implementation
    with torch.no_grad():
        made._score([(("a", "b"), [1, 2, 3], [4, 5])])
    assert made.model.config._attn_implementation == before
