"""An oracle for what a run with evictions computed: the same forwards on a full cache, with masks."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

import kvstrata
from kvstrata.cache import Layer

from .runs import kv

LOG = []


@contextmanager
def recorded(monkeypatch, model):
    """Note for every forward its ids, what each layer and head held before it, and the logits it gave."""
    LOG.clear()
    attend = Layer.attend

    def note(self, q, k, *args):
        self.settle()
        LOG[-1]["held"][self.index] = [self.entries(0, head) for head in range(k.shape[1])]
        LOG[-1]["fed"] = self.columns_fed
        return attend(self, q, k, *args)

    def before(_, args, kwargs):
        if any(isinstance(value, kvstrata.hf.StrataCache) for value in kwargs.values()):
            LOG.append({"ids": kwargs.get("input_ids", args[0] if args else None), "held": {}, "logits": None})

    def after(_, args, kwargs, output):
        if any(isinstance(value, kvstrata.hf.StrataCache) for value in kwargs.values()):
            LOG[-1]["logits"] = output.logits

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Layer, "attend", note)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def replayed_attention(module, query, key, value, attention_mask, **kwargs):
    """The family's own eager attention over a full cache, where each head sees only what the log says it held."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    held, queries, keys = LOG[0]["held"].get(module.layer_idx), query.shape[2], key.shape[2]
    if held is not None:
        visible = torch.zeros(key.shape[1], queries, keys, dtype=torch.bool)
        for head, positions in enumerate(held):
            visible[head, :, positions] = True
        visible[:, :, keys - queries :] = torch.ones(queries, queries, dtype=torch.bool).tril()
        every = visible.repeat_interleave(query.shape[1] // key.shape[1], 0)[None]
        attention_mask = torch.zeros(every.shape).masked_fill(~every, torch.finfo(torch.float32).min)
    return eager(module, query, key, value, attention_mask, **kwargs)


@torch.no_grad()
def check_against_a_masked_replay(model):
    """Run the log's forwards again; every logit must come out, in fp32 within 1e-5 of the largest. -> forwards"""
    AttentionInterface.register("replay", replayed_attention)
    AttentionMaskInterface.register("replay", eager_mask)
    full, forwards = DynamicCache(config=model.config), len(LOG)
    config = model.config.get_text_config(decoder=True)
    before, config._attn_implementation_internal = config._attn_implementation_internal, "replay"
    try:
        while LOG:
            entry = LOG[0]
            if back := full.get_seq_length() - entry["fed"]:
                full.crop(-back)
            logits = model(entry["ids"], **kv(full)).logits
            count = entry["logits"].shape[1]
            assert (logits[:, -count:] - entry["logits"]).abs().max() <= 1e-5 * logits.abs().max()
            LOG.pop(0)
    finally:
        config._attn_implementation_internal = before
    return forwards
