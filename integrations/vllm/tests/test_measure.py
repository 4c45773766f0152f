"""What blocks are worth, beside the library's own sums over tokens."""

import pytest
import torch
from kvstrata_vllm.measure import Softmax, accumulate, block_worth, token_mass

from kvstrata.core import Signals
from kvstrata.kernels.mass.ref import Reduction, column_lse, column_mass
from kvstrata.policy import parse_policy

HEADS, GROUP, DIM, BLOCK = 2, 3, 8, 4
SOFTMAX = Softmax(DIM**-0.5)


def case(lengths, queries):
    blocks = -(-max(lengths) // BLOCK)
    q = torch.randn(len(lengths), HEADS * GROUP, queries, DIM)
    k = torch.randn(len(lengths), HEADS, blocks * BLOCK, DIM)
    for row, length in enumerate(lengths):
        k[row, :, length:] = torch.nan  # slots that nobody has written
    return q, k, torch.tensor(lengths)


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "reduction", [Reduction(-1), Reduction(3), Reduction(-1, decay=0.9), Reduction(4, counts=True)], ids=str
)
def test_rows_of_different_lengths_get_what_each_gets_alone(queries, softcap, reduction):
    lengths = [9, 14, 20]
    q, k, at = case(lengths, queries)
    found = token_mass(q, k, at, reduction, Softmax(DIM**-0.5, softcap))
    for row, length in enumerate(lengths):
        own, keys = q[row : row + 1], k[row : row + 1, :, :length]
        lse = column_lse(own, keys, scale=DIM**-0.5, softcap=softcap)
        rows = reduction.last(queries)
        expected = column_mass(
            own[:, :, -rows:], keys, lse[:, :, -rows:], scale=DIM**-0.5, reduction=reduction, softcap=softcap
        )
        torch.testing.assert_close(found[row : row + 1, :, :length], expected)
        assert not found[row, :, length:].any()


def rule(text):
    return parse_policy(text).rule(0, "prefill")


def test_attention_that_is_summed_up_is_the_sum_over_a_block():
    q, k, lengths = case([9, 14], 2)
    mass = token_mass(q, k, lengths, Reduction(-1), SOFTMAX)
    found = block_worth(rule("h2o"), q, k, lengths, BLOCK, SOFTMAX)
    torch.testing.assert_close(found, mass.view(2, HEADS, -1, BLOCK).sum(dim=(1, 3)))
    torch.testing.assert_close(found.sum(dim=1), torch.full((2,), 2.0 * HEADS))  # every query gives 1 to each head


@pytest.mark.parametrize("text", ["snapkv:window=4", "keynorm", "keydiff", "tova"])
def test_a_score_of_the_moment_is_the_library_s_token_by_token(text):
    q, k, lengths = case([13], 6)
    made, found = rule(text), block_worth(rule(text), q, k, lengths, BLOCK, SOFTMAX)
    position = torch.arange(13, dtype=torch.int32).expand(1, HEADS, 13)
    mass = token_mass(q, k, lengths, made.scorer.mass, SOFTMAX)[..., :13] if made.scorer.mass else None
    sinks, recent = made.protect.resolve(10**6)
    protected = (position < sinks) | (position >= 13 - recent)
    valid = torch.ones_like(position, dtype=torch.bool)
    signals = Signals(0, 0, position, valid, protected, {}, (6,), mass, k[:, :, :13])
    tokens = torch.nn.functional.pad(made.scorer.score(signals).sum(dim=1), (0, 3))
    torch.testing.assert_close(found, tokens.view(1, -1, BLOCK).sum(dim=-1))


@pytest.mark.parametrize("text", ["h2o", "snapkv", "keynorm", "keydiff", "scissorhands", "pyramidkv"])
def test_the_heads_of_two_ranks_add_up(text):
    q, k, lengths = case([13, 16], 6)
    both = block_worth(rule(text), q, k, lengths, BLOCK, SOFTMAX)
    parts = [
        block_worth(rule(text), q[:, h * GROUP : (h + 1) * GROUP], k[:, h : h + 1], lengths, BLOCK, SOFTMAX)
        for h in range(HEADS)
    ]
    torch.testing.assert_close(both, sum(parts))


def test_a_column_fades_by_the_queries_of_its_row():
    scorer = rule("confkv").scorer
    column, worth = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = accumulate(scorer, column, worth, [1, 3])
    expected = torch.tensor([[0.9 + 0.1, 1.8], [3 * 0.9**3, 4 * 0.9**3 + 0.1]])
    torch.testing.assert_close(found, expected)
