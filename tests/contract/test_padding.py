"""Left-padded batches: every row as if it were alone, and no pad is ever stored."""

import pytest
import torch

import kvstrata

from .runs import ALL, TWO_LEVELS, feed, kv, prompt, spec, tiny

LENGTHS = (12, 40, 31)


def padded_batch(new: int):
    """ids and mask [3, 40 + new]: prompts of 12, 40 and 31 tokens, then `new` tokens each."""
    rows = [prompt(length + new, seed=length)[0] for length in LENGTHS]
    width = max(LENGTHS) + new
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return ids, mask, rows


@pytest.mark.parametrize("budget", [8, "25%"])
@pytest.mark.parametrize("name", [*ALL, TWO_LEVELS])
@pytest.mark.thin(2)
def test_a_padded_row_equals_the_row_alone(name, budget):
    model = tiny()
    ids, mask, rows = padded_batch(new=10)
    with kvstrata.compress(model, spec(name, budget)) as together:
        batch = feed(model, ids, together, (40,), mask)
    for index, row in enumerate(rows):
        with kvstrata.compress(model, spec(name, budget)) as alone:
            solo = feed(model, row[None], alone, (LENGTHS[index],))
        difference = batch[index, -len(row) :] - solo[0]
        assert difference.abs().max() <= 1e-5 * solo.abs().max()
        for layer in together.strata:
            for head in range(2):
                assert together.entries(layer, index, head) == alone.entries(layer, 0, head)


@pytest.mark.parametrize("name", ALL)
def test_generate_on_a_padded_batch(name):
    model = tiny()
    ids, mask, rows = padded_batch(new=0)
    with kvstrata.compress(model, spec(name, 10)) as cache:
        batch = model.generate(ids, attention_mask=mask, **kv(cache), max_new_tokens=8, do_sample=False)
    for index, row in enumerate(rows):
        with kvstrata.compress(model, spec(name, 10)) as cache:
            solo = model.generate(row[None], **kv(cache), max_new_tokens=8, do_sample=False)
        assert torch.equal(batch[index, -8:], solo[0, -8:])


def test_a_short_row_keeps_all_its_tokens_and_no_pad():
    ids, mask, _ = padded_batch(new=0)
    with kvstrata.compress(tiny(), "streaming:budget=20") as cache:
        feed(tiny(), ids, cache, (40,), mask)
    assert cache.entries(0, row=0) == list(range(12))
    assert cache.entries(0, row=1) == [0, 1, 2, 3, *range(24, 40)]
    assert cache.report().layers[0].stored == [[12], [20], [20]]


def test_chunks_that_are_all_padding_for_some_rows():
    model = tiny()
    ids, mask, rows = padded_batch(new=3)
    with kvstrata.compress(model, "h2o:budget=8") as cache:
        batch = feed(model, ids, cache, (18, 22), mask)
    with kvstrata.compress(model, "h2o:budget=8") as alone:
        solo = feed(model, rows[0][None], alone, (12,))
    assert (batch[0, -3:] - solo[0, -3:]).abs().max() <= 1e-5 * solo.abs().max()


@pytest.mark.parametrize("name", ["h2o", "scissorhands", "tova"])
def test_a_first_chunk_of_pads_alone_stores_nothing(name):
    model, ids, mask = tiny(), prompt(30), torch.ones(1, 30, dtype=torch.long)
    mask[0, :4] = 0
    with kvstrata.compress(model, spec(name, 8)) as cache:
        logits = feed(model, ids, cache, [4, 26], mask)
    with kvstrata.compress(model, spec(name, 8)) as cache:
        expected = feed(model, ids[:, 4:], cache, [26])
    torch.testing.assert_close(logits[:, 4:], expected, rtol=0, atol=1e-4)


def test_pads_in_the_middle_of_a_conversation():
    """A second turn whose rows differ in length is padded between the turns."""
    model = tiny()
    first, second = prompt(20, 2), prompt(9, 2, seed=5)
    mask = torch.ones(2, 29, dtype=torch.long)
    mask[0, 20:24] = 0
    row = torch.cat([first[0], second[0, 4:]])[None]
    with kvstrata.compress(model, "full") as cache:
        feed(model, torch.cat([first, second], 1), cache, (20, 9), mask)
        assert cache.entries(0, 0) == list(range(25))
        assert cache.entries(0, 1) == list(range(29))
    with kvstrata.compress(model, "full") as alone:
        feed(model, row, alone, (20, 5))
    assert alone.entries(0, 0) == list(range(25))


def test_right_padding_is_refused_and_stores_nothing():
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with (
        kvstrata.compress(tiny(), "h2o") as cache,
        pytest.raises(kvstrata.InputError, match="padding_side = 'left'"),
    ):
        tiny()(prompt(6, 2), attention_mask=mask, **kv(cache))
    assert cache.nbytes.live == 0
    assert cache.get_seq_length() == 0


def test_a_mask_that_forgets_the_past_is_refused():
    model, ids = tiny(), prompt(20)
    with kvstrata.compress(model, "h2o") as cache:
        model(ids, **kv(cache))
        with pytest.raises(kvstrata.InputError, match="mask of all tokens"):
            model(ids[:, :1], **kv(cache), attention_mask=torch.ones(1, 7))
        assert cache.get_seq_length() == 20


@pytest.mark.parametrize("name", ALL)
def test_tokens_hidden_by_a_later_mask_are_dropped(name):
    """A finished row is fed pads until the others end; the next turn's mask hides them."""
    model, ids, mask = tiny(), prompt(30, 2), torch.ones(2, 36, dtype=torch.long)
    mask[0, 20:30] = 0
    with kvstrata.compress(model, spec(name, 24)) as cache:
        feed(model, ids[:, :20], cache, (20,))
        feed(model, ids[:, 20:], cache, ())
        model(prompt(6, 2, seed=7), **kv(cache), attention_mask=mask)
        kept = cache.entries(1, 0)
        assert not set(kept) & set(range(20, 30))
        model(prompt(1, 2), **kv(cache), attention_mask=torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1))
        assert cache.strata[1].seen == [37, 37]
        with pytest.raises(kvstrata.InputError, match="hid before"):
            model(prompt(1, 2), **kv(cache), attention_mask=torch.ones(2, 38, dtype=torch.long))


def test_hidden_tokens_are_not_attended_to():
    model = tiny()
    mask = torch.ones(1, 26, dtype=torch.long)
    mask[0, 15:20] = 0
    ids, junk = prompt(26), prompt(26, seed=3)
    junk[:, :15], junk[:, 20:] = ids[:, :15], ids[:, 20:]
    outputs = []
    for row in (ids, junk):
        with kvstrata.compress(model, "full") as cache:
            feed(model, row[:, :20], cache, (20,))
            outputs.append(model(row[:, 20:], **kv(cache), attention_mask=mask).logits)
    assert torch.equal(*outputs)


def test_a_custom_4d_mask_is_refused():
    model, ids = tiny(), prompt(6)
    with (
        kvstrata.compress(model, "h2o") as cache,
        pytest.raises(kvstrata.InputError, match="4-D"),
    ):
        model(ids, **kv(cache), attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


def test_crop_counts_real_tokens_of_every_row_after_padding_and_hiding():
    model = tiny()
    ids, mask = prompt(30, 2), torch.ones(2, 30, dtype=torch.long)
    mask[0, 20:26] = 0  # the second turn of row 0 is shorter
    with kvstrata.compress(model, "full") as cache:
        feed(model, ids, cache, (20, 10), mask)
        cache.crop(-8)
        assert cache.get_seq_length() == 22
        assert cache.strata[0].seen == [20, 22]
        assert cache.entries(0, 0) == list(range(20))
        assert cache.entries(0, 1) == list(range(22))
        later = mask[:, :23].clone()
        later[1, 5] = 0  # hides a stored token of row 1
        later[0, 22] = 1
        model(prompt(1, 2), **kv(cache), attention_mask=later)
        assert cache.entries(0, 1) == [p for p in range(23) if p != 5]
        cache.crop(-1)
        model(prompt(1, 2), **kv(cache), attention_mask=later)
        assert cache.entries(0, 1) == [p for p in range(23) if p != 5]
        cache.batch_select_indices(torch.tensor([1]))
        model(prompt(1), **kv(cache), attention_mask=torch.cat([later[1:], torch.ones(1, 1, dtype=torch.long)], 1))
        assert cache.entries(0)[-1] == 23


def test_a_row_within_its_budget_makes_no_room_for_a_neighbour_over_its():
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :3] = 0
    with kvstrata.compress(tiny(), "window:budget=20,room=6") as cache:
        tiny()(prompt(21, 2), **kv(cache), attention_mask=mask)
        assert cache.report().layers[0].stored == [[18], [20]]
        longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        tiny()(prompt(1, 2, seed=3), **kv(cache), attention_mask=longer)
    assert cache.report().layers[0].stored == [[19], [15]]
