"""The report: what is kept, where, and why not where nothing was dropped; as text, dict and picture."""

import json

import pytest
import torch

import kvstrata

from ..contract.families import family
from ..contract.runs import feed, kv, prompt, tiny


def reported(policy, length=60, rows=1):
    with kvstrata.compress(tiny(), policy) as cache:
        feed(tiny(), prompt(length, rows), cache, (length - 5,))
    return cache, cache.report()


def test_positions_shares_and_tiers_are_those_of_the_entries():
    cache, report = reported("h2o:budget=12", rows=2)
    for layer in report.layers:
        for row in range(2):
            for head in range(2):
                assert layer.positions[row][head] == cache.entries(layer.layer, row, head)
        assert layer.stored == [[12, 12]] * 2
        assert layer.shares == [[0.2, 0.2]] * 2
        assert layer.tiers == {"exact": 48}
        assert layer.evicted == 4 * 48
        assert layer.note == ""


def test_heads_that_hold_the_same_tokens_are_listed_once():
    _, report = reported("tova:budget=12")
    assert report.layers[0].stored == [[12]]
    assert len(report.layers[0].positions[0]) == 1


NOTES = {
    "full": "the policy keeps everything",
    "h2o:budget=100": "not compressed: 60 tokens seen are within the budget",
}


@pytest.mark.parametrize(("policy", "note"), NOTES.items(), ids=NOTES.keys())
def test_it_says_why_nothing_was_dropped(policy, note):
    _, report = reported(policy)
    assert {layer.note for layer in report.layers} == {note}
    assert note in str(report)


def test_a_forward_that_waits_is_named():
    with torch.no_grad(), kvstrata.compress(tiny(), "confkv:high=7,low=14,recent=3") as cache:
        tiny().model(prompt(40), **kv(cache))
        assert "waits to be settled" in str(cache.report())


def test_it_can_be_written_as_json_and_read_back():
    _, report = reported("snapkv:budget=12")
    record = json.loads(json.dumps(report.to_dict()))
    assert record["policy"] == "snapkv"
    assert record["share"] == report.now.held / report.full
    assert record["layers"][1]["positions"] == report.layers[1].positions
    assert record["share_of_16_bit"] == 2 * record["share"]  # the model is fp32


def test_an_empty_cache_has_a_report_too():
    with kvstrata.compress(family("gemma3"), "h2o") as cache:
        report = cache.report()
    assert "2 layers passed through uncompressed (sliding window): 0, 2" in str(report)
    assert report.share == 0
    with pytest.raises(kvstrata.KvstrataError, match="nothing is stored"):
        report.figure("nowhere.png")


@pytest.mark.parametrize("name", ["kept.png", "kept.svg"])
def test_the_picture_shows_layers_by_positions(name, tmp_path):
    _, report = reported("h2o:budget=12", rows=2)
    path = report.figure(tmp_path / name, row=1)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert [file.name for file in tmp_path.iterdir()] == [name], "nothing half-written stays"
    with pytest.raises(kvstrata.KvstrataError, match="row 2 of 2"):
        report.figure(tmp_path / name, row=2)
