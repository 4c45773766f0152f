from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.core import LayerShape, SpecError
from kvstrata.policy.budget import ByteBudget, HeadTokens, OfTotal, Share, Tokens, parse_budget

SHAPE = LayerShape(layer=4, depth=3, num_layers=10, num_kv_heads=3, entry_bytes=100, batch_size=4)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

FORMS = {
    "256": Tokens(256),
    " 7 ": Tokens(7),
    "25%": Share(Fraction(1, 4)),
    "0.5%": Share(Fraction(1, 200)),
    "33.3%": Share(Fraction(333, 1000)),
    "100%": Share(Fraction(1)),
    "64/32/16": HeadTokens((64, 32, 16)),
    "5/5": HeadTokens((5, 5)),
    "100B": ByteBudget(100),
    "64MiB": ByteBudget(64 * MIB),
    "1.5GiB": ByteBudget(3 * GIB // 2),
    "2 KiB": ByteBudget(2 * KIB),
    "3KB": ByteBudget(3000),
    "3MB": ByteBudget(3_000_000),
    "3GB": ByteBudget(3_000_000_000),
    "64MiB/layer": ByteBudget(64 * MIB, "layer"),
    "64MiB/cache": ByteBudget(64 * MIB, "cache"),
}
UNREADABLE = [
    *("", "many", "-5", "2.5", "%", "25 percent", "64MiB/head", "64mib", "64XiB", "25%/layer", "256/layer"),
    *("64/", "/64", "1e3", "1,000", "None", "True", "64MiB/", "12%%", "3.B"),
]
IMPOSSIBLE = ["0", "0%", "100.1%", "250%", "0B", "0.5B", "0/5", "5/0"]


@pytest.mark.parametrize("text", FORMS, ids=str.strip)
def test_reads_every_form(text):
    assert parse_budget(text) == FORMS[text]


def test_reads_a_number_as_a_file_gives_it():
    assert parse_budget(256) == Tokens(256)


@pytest.mark.parametrize("text", UNREADABLE, ids=[text or "nothing" for text in UNREADABLE])
def test_what_cannot_be_read_is_an_error_that_shows_the_forms(text):
    with pytest.raises(SpecError, match="64MiB/layer") as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_what_can_never_work_is_an_error(text):
    with pytest.raises(SpecError, match="budget="):
        parse_budget(text)


@pytest.mark.parametrize("text", FORMS, ids=str.strip)
def test_the_text_of_a_budget_reads_back(text):
    assert parse_budget(str(FORMS[text])) == FORMS[text]


@given(count=st.integers(1, 1 << 50), per=st.sampled_from(["sequence", "layer", "cache"]))
def test_the_text_of_any_size_reads_back(count, per):
    assert parse_budget(str(ByteBudget(count, per))) == ByteBudget(count, per)


@given(parts=st.integers(1, 1_000_000_000))
@example(parts=333_333_333)
def test_the_text_of_any_share_that_can_be_written_reads_back(parts):
    text = f"{parts // 10**7}.{parts % 10**7:07d}%"
    assert parse_budget(str(parse_budget(text))) == parse_budget(text)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Tokens(256), "256"),
        (HeadTokens((3, 4)), "3/4"),
        (Share(Fraction(1, 4)), "25%"),
        (Share(Fraction(1, 200)), "0.5%"),
        (ByteBudget(64 * MIB), "64MiB"),
        (ByteBudget(1536, "layer"), "1536B/layer"),
        (ByteBudget(3 * KIB, "cache"), "3KiB/cache"),
        (ByteBudget(4096 * GIB), "4096GiB"),
    ],
    ids=str,
)
def test_writes_the_shortest_usual_form(budget, text):
    assert str(budget) == text


@pytest.mark.parametrize("seen", [0, 1, 1000])
def test_tokens_are_the_same_whatever_was_seen(seen):
    assert Tokens(5).limits(seen, 0.0, SHAPE) == (5,)


def test_one_number_for_each_head():
    assert HeadTokens((5, 6, 7)).limits(1000, 0.0, SHAPE) == (5, 6, 7)


def test_numbers_for_other_heads_than_the_models_are_refused():
    with pytest.raises(SpecError, match=r"2 heads.*layer 4 has 3"):
        HeadTokens((5, 6)).limits(1000, 0.0, SHAPE)
    with pytest.raises(SpecError, match="every head"):
        HeadTokens(())


@pytest.mark.parametrize(("seen", "limit"), [(0, 1), (1, 1), (3, 1), (4, 1), (7, 1), (8, 2), (1000, 250)])
def test_a_share_rounds_down_but_keeps_one(seen, limit):
    assert Share(Fraction(1, 4)).limits(seen, 0.0, SHAPE) == (limit,)


def test_a_share_of_a_total_is_that_of_what_was_seen_once_it_is_more():
    budget = OfTotal(Share(Fraction(1, 4)), 1000)
    assert [budget.limits(seen, 0.0, SHAPE) for seen in (1, 1000, 1200)] == [(250,), (250,), (300,)]
    assert budget.around(Share(Fraction(1, 2))) == OfTotal(Share(Fraction(1, 2)), 1000)
    assert budget.around(Tokens(9)) == Tokens(9)
    assert budget.scaled(Fraction(1, 5)).limits(10, 0.0, SHAPE) == (50,)
    with pytest.raises(SpecError, match="total=0"):
        OfTotal(Share(Fraction(1, 4)), 0)


def test_a_share_is_exact_where_floats_are_not():
    assert parse_budget("29%").limits(100, 0.0, SHAPE) == (29,)  # int(100 * 0.29) is 28
    assert parse_budget("100%").limits(12345, 0.0, SHAPE) == (12345,)


@pytest.mark.parametrize(
    ("per", "one"),
    [("sequence", 100 * 10), ("layer", 100), ("cache", 100 * 10 * 4)],
    ids=["sequence", "layer", "cache"],
)
def test_bytes_are_divided_over_what_they_are_for(per, one):
    assert ByteBudget(7 * one, per).limits(1000, 0.0, SHAPE) == (7,)
    assert ByteBudget(8 * one - 1, per).limits(1000, 0.0, SHAPE) == (7,)
    assert ByteBudget(one, per).limits(1000, 0.0, SHAPE) == (1,)
    with pytest.raises(SpecError, match=f"takes {one} bytes"):
        ByteBudget(one - 1, per).limits(1000, 0.0, SHAPE)
