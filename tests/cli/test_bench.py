import json

import pytest

from kvstrata.cache import stored
from kvstrata.kernels.attention import ref

from .conftest import kvstrata

QUICK = ("--rounds", 1, "--steps", 2, "--threads", 1)
KERNELS = ("--kernels-only", "--mib", 1, "--dtype", "float32", *QUICK)


def decode_only(folder):
    return ("--decode-only", "--model", folder, "--context", "60", *QUICK)


def test_a_model_is_measured_beside_transformers_caches(folder):
    options = ("--policy", "h2o:budget=25%,window:budget=12", "--batch", "1,2", "--json")
    done = kvstrata("bench", *decode_only(folder), *options)
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert {"model", "dtype", "device", "threads", "processor", "torch", "rounds", "steps"} <= record.keys()
    assert "kernels" not in record
    assert [(case["context"], case["batch"]) for case in record["decode"]] == [(60, 1), (60, 2)]
    for case in record["decode"]:
        names = [row["name"] for row in case["rows"]]
        assert names == ["hf", "repaired", "full", "h2o:budget=25%", "window:budget=12"]
        assert all(row["passed"] and row["over_hf"] > 0 and row["over_repaired"] > 0 for row in case["rows"])
        assert all(len(row["ms"]) == 2 and row["tokens_per_s"] > 0 for row in case["rows"])
        assert case["rows"][2]["glue_share"] > 0


def test_the_table_fits_and_says_what_is_compared(folder):
    done = kvstrata("bench", *decode_only(folder), "--peers", "hf")
    assert done.exit_code == 0, done.output
    assert "1 x 60 tokens" in done.stdout
    assert "of a step is kvstrata's outside attention" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_prompts_are_timed_where_asked(folder):
    options = ("--peers", "hf,repaired", "--policy", "h2o:budget=25%", "--prefill", 2)
    done = kvstrata("bench", *decode_only(folder), *options, "--json")
    assert done.exit_code == 0, done.output
    times = {row["name"]: row["prefill_s"] for row in json.loads(done.stdout)["decode"][0]["rows"]}
    assert times.pop("repaired") is None, "its prompt is copied from transformers' cache"
    assert set(times) == {"hf", "full", "h2o:budget=25%"}
    assert all(seconds > 0 for seconds in times.values())
    table = kvstrata("bench", *decode_only(folder), *options)
    assert "prompt" in table.stdout
    assert all(len(line) <= 80 for line in table.stdout.splitlines())


def test_kernels_are_measured_against_memory(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "figures.json", tmp_path / "roof.png"
    done = kvstrata("bench", *KERNELS, "--out", out, "--picture", picture)
    assert done.exit_code == 0, done.output
    assert "memory gives" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    record = json.loads(out.read_text())
    assert "decode" not in record
    assert set(record["kernels"]["bandwidth"]) == {"1"}
    exact = [f for f in record["kernels"]["figures"] if f["format"] == "float32"]
    assert {f["shape"] for f in exact} == {"B1 H3 G3 D64", "B1 H8 G4 D128"}
    assert all(f["gb_s"] > 0 and f["share"] > 0 and f["errors"]["out"] < 1e-5 for f in exact)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_is_wrong_is_an_error_and_has_no_share(monkeypatch):
    decode = ref._decode
    monkeypatch.setattr(ref, "_decode", lambda q, k, v, *rest: decode(q, k, v * 1.02, *rest))
    done = kvstrata("bench", *KERNELS)
    assert done.exit_code == 1
    wrong = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert wrong
    assert all(line.split()[0] == "reference" and "%" not in line for line in wrong)
    assert all(len(line.split()) <= 8 for line in wrong)  # no speeds


def test_attention_that_is_wrong_is_an_error_and_has_no_ratio(folder, monkeypatch):
    pytest.importorskip("kvstrata._native")
    attend = stored.attend_pages
    monkeypatch.setattr(stored, "attend_pages", lambda q, *rest, **options: attend(q * 1.1, *rest, **options))
    done = kvstrata("bench", *decode_only(folder))
    assert done.exit_code == 1
    assert "so no ratio is given" in " ".join(done.stdout.split())
    row = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["full"])
    assert "NO" in row
    assert "x" not in row


BAD = {
    "both": (("--kernels-only", "--decode-only"), "not both"),
    "picture": (("--decode-only", "--picture", "a.png"), "leave out --decode-only"),
    "context": (("--context", "2k,many"), "32k"),
    "batch": (("--batch", "0"), "number of tokens"),
    "peer": (("--peers", "vllm"), "no peer named"),
    "policy": (("--policy", "h20"), "Did you mean 'h2o'"),
    "dtype": (("--dtype", "float7"), "float32, bfloat16"),
    "device": (("--peers", "llamacpp", "--device", "cuda"), "runs on a CPU"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_is_measured(options, message):
    done = kvstrata("bench", *options)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_a_text_that_is_too_short_is_an_error_that_says_so(folder, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("it is a truth")
    done = kvstrata("bench", *decode_only(folder), "--prompt-file", text)
    assert "the text has 4 tokens of 60" in str(done.exception)
