"""What is dropped is as if it had been masked: outputs equal a full cache in which the dropped entries are hidden."""

import pytest
import torch
import yaml
from transformers import AttentionInterface, AttentionMaskInterface

import kvstrata

from .runs import MERGING, POOLED, PRESETS, kv, prompt, spec, stock, tiny

CHUNKS = [40, 20, *[1] * 20]


class MaskedReplay:
    """Plain softmax attention in float64 over everything ever seen, hiding what the policy had dropped by then."""

    def __init__(self, schedule):
        self.schedule, self.step = schedule, 0  # schedule[step][layer][row][head]: positions kept before that step

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        group, queries, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        visible = torch.zeros(*key.shape[:2], queries, keys, dtype=torch.bool)
        for row, heads in enumerate(self.schedule[self.step][module.layer_idx]):
            for head, kept in enumerate(heads):
                visible[row, head, :, kept] = True
        visible[..., keys - queries :] = torch.ones(queries, queries, dtype=torch.bool).tril()
        k, v = (t.double().repeat_interleave(group, 1) for t in (key, value))
        scores = query.double() @ k.transpose(-1, -2) * scaling
        scores = scores.masked_fill(~visible.repeat_interleave(group, 1), float("-inf"))
        return (scores.softmax(-1) @ v).to(query.dtype).transpose(1, 2), None


def replay(model, ids, schedule):
    attention = MaskedReplay(schedule)
    AttentionInterface.register("masked-replay", attention)
    AttentionMaskInterface.register("masked-replay", lambda **_: None)
    cache, parts, start = stock(model), [], 0
    model.set_attn_implementation("masked-replay")
    try:
        for length in CHUNKS:
            parts.append(model(ids[:, start : start + length], **kv(cache)).logits)
            start, attention.step = start + length, attention.step + 1
    finally:
        model.set_attn_implementation("sdpa")
    return torch.cat(parts, 1)


def compressed(model, ids, policy):
    """Logits, and before every forward the positions kept in each layer, row and head."""
    parts, schedule, start = [], [], 0
    with kvstrata.compress(model, policy) as cache:
        for length in CHUNKS:
            schedule.append(
                [[[cache.entries(i, row, head) for head in range(2)] for row in range(len(ids))] for i in range(3)]
            )
            parts.append(model(ids[:, start : start + length], **kv(cache)).logits)
            start += length
    return torch.cat(parts, 1), schedule


@torch.no_grad()
@pytest.mark.parametrize("budget", [12, "25%"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in MERGING])
@pytest.mark.thin(2)
def test_compaction_equals_masking(name, budget):
    model, ids = tiny(), prompt(sum(CHUNKS), 2)
    logits, schedule = compressed(model, ids, spec(name, budget))
    assert (logits - replay(model, ids, schedule)).abs().max() <= 1e-5 * logits.abs().max()


@torch.no_grad()
def test_compaction_equals_masking_where_heads_have_different_lengths(tmp_path):
    path = tmp_path / "pooled.yaml"
    path.write_text(yaml.safe_dump(POOLED))
    model, ids = tiny(), prompt(sum(CHUNKS), 2)
    logits, schedule = compressed(model, ids, path)
    lengths = {len(kept) for layer in schedule[-1] for row in layer for kept in row}
    assert len(lengths) > 1
    assert (logits - replay(model, ids, schedule)).abs().max() <= 1e-5 * logits.abs().max()
