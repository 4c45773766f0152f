"""Hidden states that a surrogate judges, on CPU tensors."""

import pytest
import torch
from kvstrata_vllm.blocks import layer_classes
from kvstrata_vllm.hidden import add_tokens, load_surrogate, watch_parents, worth_of_tokens
from kvstrata_vllm.settings import Settings
from torch import nn

from kvstrata.core import UnsupportedModelError

BLOCK = 4


def test_tokens_go_to_the_blocks_that_they_stand_in():
    column = torch.zeros(3, 5)
    slots, ends, queries = torch.tensor([2, 1]), torch.tensor([10, 5], dtype=torch.int32), [6, 1]
    add_tokens(column, slots, ends, queries, torch.arange(1.0, 9.0), BLOCK)  # one more: a padding token
    assert column[2].tolist() == [0, 1 + 2 + 3 + 4, 5 + 6, 0, 0]
    assert column[1].tolist() == [0, 7, 0, 0, 0]
    assert not column[0].any()


def test_a_threshold_is_met_by_the_mean_of_a_block():
    (found,) = layer_classes(Settings("kvzap:tau=-2,window=4"), 1, BLOCK, 64)
    measured = [-12.0, -12.0, -4.0, -9.0, -100.0, -100.0]
    assert found.decode.victims(range(5), 5 * BLOCK + 1, 0.0, measured) == [1, 3]  # the first and the newest stay
    assert found.decode.victims([0, 2, 4], 5 * BLOCK + 1, 0.0, measured) == []


def test_a_shipped_surrogate_fits_its_model_and_no_other():
    made = load_surrogate("linear", 30, 3, 576)
    hidden = torch.randn(7, 576)
    torch.testing.assert_close(worth_of_tokens(made, 4, hidden), made(4, hidden[None])[0].mean(dim=0))
    with pytest.raises(UnsupportedModelError, match=r"is for .*\(30, 3, 576\), and this model has \(30, 3, 960\)"):
        load_surrogate("linear", 30, 3, 960)


class Attention(nn.Module):
    def forward(self, x):
        return x


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.other = Attention(), nn.Linear(2, 2)

    def forward(self, positions, hidden_states):
        return self.attn(hidden_states)


@pytest.mark.parametrize("named", [True, False])
def test_hidden_states_are_seen_on_their_way_to_attention(named):
    seen = []
    handle = watch_parents(lambda part: isinstance(part, Attention), lambda part, hidden: seen.append((part, hidden)))
    try:
        made = Around()
    finally:
        handle.remove()
    unwatched, hidden = Around(), torch.randn(3, 2)
    for module in (made, unwatched):
        module(torch.arange(3), **{"hidden_states": hidden}) if named else module(torch.arange(3), hidden)
    assert len(seen) == 1
    assert seen[0][0] is made.attn
    assert seen[0][1] is hidden
