"""One budget over layers and heads: the choice, shares per head from files, and rules that differ between phases."""

import gc
import json
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstrata
from kvstrata.core import Signals, SpecError, UnsupportedModelError
from kvstrata.policy.across import select_across
from kvstrata.policy.shares import Shares, shared_out

from .families import FAMILIES, build, frozen
from .runs import feed, kv, prompt, tiny
from .test_echo import ALL_STAY, held, scores


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), layers=st.integers(1, 3), cap=st.integers(1, 9))
def test_the_choice_over_layers_is_that_of_a_plain_sort(data, rows, layers, cap):
    heads, signals, scores, lengths = 2, [], [], []
    for layer in range(layers):
        n = data.draw(st.integers(1, 8), label="entries")
        draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
        z = torch.randint(0, 5, (rows, heads, n), generator=draw).float()  # ties are common
        position = torch.stack([torch.randperm(20, generator=draw)[:n] for _ in range(rows * heads)])
        valid = torch.rand(rows, heads, n, generator=draw) < 0.8
        valid[..., 0] = True
        protected = valid & (torch.rand(rows, heads, n, generator=draw) < 0.2)
        signals.append(Signals(layer, 0, position.view(rows, heads, n).int(), valid, protected, {}, (1,) * rows))
        scores.append(z)
        lengths.append([(cap,)] * rows)
    keeps = select_across(scores, signals, lengths)
    for row in range(rows):
        ranked, forced = [], set()
        for i, (z, s) in enumerate(zip(scores, signals, strict=True)):
            for h in range(heads):
                own = [n for n in range(z.shape[2]) if s.valid[row, h, n]]
                held = {(i, h, n) for n in own if s.protected[row, h, n]}
                best = max(own, key=lambda n: (float(z[row, h, n]), int(s.position[row, h, n])))
                forced |= held or {(i, h, best)}
                ranked += [(float(z[row, h, n]), int(s.position[row, h, n]), (i, h, n)) for n in own]
        got = {(i, h, n) for i, keep in enumerate(keeps) for h, n in keep[row].nonzero().tolist()}
        total = max(cap * heads * layers, len(forced))
        assert forced <= got
        assert len(got) == min(total, len(ranked))
        chosen = sorted((r[:2] for r in ranked if r[2] in got - forced), reverse=True)
        left = sorted((r[:2] for r in ranked if r[2] not in got), reverse=True)
        assert not chosen or not left or chosen[-1] >= left[0]


@given(
    table=st.lists(st.lists(st.floats(0.001, 1), min_size=2, max_size=2), min_size=1, max_size=5),
    seen=st.integers(1, 3000),
    share=st.floats(0.001, 1),
)
@settings(max_examples=100)
def test_shares_of_heads_add_up_to_the_budget(table, seen, share):
    mean = max(1, int(share * seen))
    found = shared_out(Shares("", ((0.5, tuple(map(tuple, table))),)), mean, seen)
    flat = [n for layer in found for n in layer]
    assert sum(flat) == mean * len(flat)
    assert min(flat) >= 1
    assert max(flat) <= seen
    kept = [x for layer in table for x in layer]
    for (a, n), (b, m) in zip(zip(kept, flat, strict=True), zip(kept[1:], flat[1:], strict=True), strict=False):
        assert n <= m + 1 if a <= b else m <= n + 1, "who kept more gets more"


def test_shares_between_two_levels_lie_between():
    shares = Shares("", ((0.1, ((0.1, 0.2),)), (0.5, ((0.5, 1.0),))))
    assert shares.at(0.05) == ((0.1, 0.2),)
    assert shares.at(0.3) == ((pytest.approx(0.3), pytest.approx(0.6)),)
    assert shares.at(0.9) == ((0.5, 1.0),)


@torch.no_grad()
def test_a_file_of_shares_serves_any_policy_and_no_other_model(tmp_path):
    from kvstrata.calibrate.heads import calibrate_heads, write_heads

    model, file = tiny(), tmp_path / "heads.json"
    documents = [prompt(200, seed=seed)[0].tolist() for seed in range(2)]
    found = calibrate_heads(model, "echo:window=8", documents, [Fraction(1, 4), Fraction(1, 2)])
    write_heads(file, model, "echo", {"a.txt": "text"}, found)
    assert json.loads(file.read_text())["levels"]["0.25"]["tau"] == found[Fraction(1, 4)].tau
    for level, result in found.items():
        flat = [share for layer in result.kept for share in layer]
        assert sum(flat) / len(flat) == pytest.approx(float(level), abs=0.01)
    for policy in ("echo-head", "snapkv", "h2o", "random", "keydiff"):
        with kvstrata.compress(model, f"{policy}:budget=25%,heads={file}") as cache:
            model(prompt(200, 2), **kv(cache))
            assert sum(held(cache)) == 50 * 3 * 2 * 2
            lengths = cache.strata[0].store.lengths()
            assert lengths[0] == lengths[1]
            assert len({n for layer in cache.strata.values() for n in layer.store.lengths()[0]}) > 2
    with pytest.raises(SpecError, match="another model"), kvstrata.compress(tiny("qwen2"), f"h2o:heads={file}"):
        pass
    for policy in ("pyramidkv", "qevict", "int8"):
        with pytest.raises(SpecError, match="heads"):
            kvstrata.policy.parse_policy(f"{policy}:heads={file}")
    file.write_text(file.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(SpecError, match="format 7"):
        kvstrata.policy.parse_policy(f"h2o:heads={file}")


# -- rules of both phases, and what must not leak -------------------------------------------------------------------


def table(prefill, decode):
    return {"name": "two", "layers": {"0-": {"prefill": prefill, "decode": decode}}}


def opened(tmp_path, prefill, decode):
    (tmp_path / "two.yaml").write_text(json.dumps(table(prefill, decode)))
    return kvstrata.compress(tiny(), tmp_path / "two.yaml")


@torch.no_grad()
def test_a_phase_without_echo_asks_for_the_other(tmp_path):
    """Generated tokens are worth something when the next prompt comes; a prompt is when decoding must choose."""
    ids = prompt(150)
    with kvstrata.compress(tiny(), ALL_STAY) as cache:
        feed(tiny(), ids, cache, [60])
        expected = scores(cache, 0)
    with opened(tmp_path, "echo-head:budget=100%", None) as cache:
        feed(tiny(), ids, cache, [60])
        feed(tiny(), prompt(30, seed=3), cache, [30])
        assert (scores(cache, 0)[:, :130] - expected[:, :130]).abs().max() <= 1e-4 * expected.max()
    with opened(tmp_path, "snapkv:budget=60%", "echo-head:budget=30%,window=8") as cache:
        feed(tiny(), ids, cache, [120])
        kept = [i for i in cache.entries(0) if 4 <= i < 100]
        assert len(kept) > 10, "what the prompt was asked for decides, and not its age"


@torch.no_grad()
def test_a_small_prompt_budget_does_not_break_the_first_sums(tmp_path):
    with opened(tmp_path, "snapkv:budget=20", "h2o:budget=20") as cache:
        feed(tiny(), prompt(110), cache, [100])
        assert len(cache.entries(0)) == 20


@torch.no_grad()
def test_rows_that_begin_with_pads_alone_fit_budgets_of_heads(tmp_path):
    levels = {"0.25": {"kept": [[0.1, 0.4], [0.3, 0.2], [0.25, 0.25]], "tau": 0.0}}
    (tmp_path / "heads.json").write_text(json.dumps({"format": 1, "model": "", "levels": levels}))
    ids, mask = prompt(60, 2), torch.ones(2, 60, dtype=torch.long)
    mask[0, :30] = 0
    with kvstrata.compress(tiny(), f"h2o:budget=50%,heads={tmp_path / 'heads.json'}") as cache:
        feed(tiny(), ids, cache, [20, 40], mask)
        assert sum(sum(layer.store.lengths()[0]) for layer in cache.strata.values()) == 15 * 6


@torch.no_grad()
def test_copies_of_a_row_can_be_saved_and_dead_forks_leave_no_books(tmp_path):
    with kvstrata.compress(tiny(), "echo:budget=40,window=8") as cache:
        tiny()(prompt(90), **kv(cache))
        books = len(cache.engine.arenas._accounts)
        for _ in range(3):
            twin = cache.fork()
            tiny()(prompt(1), **kv(twin))
            del twin
        gc.collect()
        assert len(cache.engine.arenas._accounts) == books
        cache.batch_repeat_interleave(2)
        cache.save(tmp_path)


@torch.no_grad()
def test_drafts_that_are_taken_do_not_pile_up():
    with kvstrata.compress(tiny(), "echo:budget=100%") as cache:
        tiny()(prompt(60), **kv(cache))
        cache.activate_past_recording()
        for i in range(40):
            tiny()(prompt(5, seed=i), **kv(cache))
            cache.crop(-1)
        assert max(q.shape[1] for q in cache.strata[0].asking.queries) < 40


@torch.no_grad()
@pytest.mark.parametrize("band", [{"low": 0, "high": 0}, {"low": 1, "high": 1}, {"low": -3, "high": -1}, {"sinks": 0}])
def test_narrow_bands(band, tmp_path):
    rule = {"scorer": {"echo": band}, "budget": "30%", "heads": "each", "sinks": 4, "recent": 8}
    with opened(tmp_path, rule, rule) as cache:
        feed(tiny(), prompt(90), cache, [70])
        assert len(cache.entries(1)) == 27


@torch.no_grad()
def test_a_mix_with_unasked_entries_still_ranks_by_both(tmp_path):
    parts = [{"weight": 0.9, "scorer": "echo"}, {"weight": 0.1, "scorer": "recency"}]
    rule = {"scorer": {"mix": {"parts": parts}}, "budget": 30, "heads": "each", "recent": 4}
    with opened(tmp_path, rule, None) as cache:
        tiny()(prompt(90), **kv(cache))
        assert min(cache.entries(0)) < 40, "not the newest alone"


def test_mixes_that_cannot_work_are_refused(tmp_path):
    parts = [{"weight": 0.5, "scorer": "echo"}, {"weight": 0.5, "scorer": "window-mass"}]
    with (
        pytest.raises(SpecError, match="cannot be mixed"),
        opened(tmp_path, {"scorer": {"mix": {"parts": parts}}, "budget": 30, "heads": "each"}, None),
    ):
        pass


@torch.no_grad()
def test_a_base_model_s_forwards_are_counted_since_layers_chose_alone():
    with kvstrata.compress(tiny(), "echo:budget=30,window=8") as cache:
        tiny().model(prompt(90), **kv(cache))
        tiny().model(prompt(1), **kv(cache))
        assert cache.report().layers[0].no_logits
        assert sum(held(cache)) <= 31 * 3 * 2


@pytest.mark.parametrize("family", ["cohere2", "smollm3"])
def test_families_with_layers_that_are_not_turned_are_refused(family):
    config, model, sizes, _ = FAMILIES[family]
    with (
        pytest.raises(UnsupportedModelError, match="some of its layers have none"),
        kvstrata.compress(build(config, model, frozen(sizes)), "echo"),
    ):
        pass
