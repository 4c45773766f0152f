"""Replays a drop log in transformers: what was gone is hidden by a mask, and the same tokens must come out.

A block announced with a step is hidden from the step after it (lag 1), or from that step on (lag 0). `shift` hides
everything so many steps of the request too late: the control, which must come out different.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Stretch:
    """What a request computed since it started, or started again: who saw whom, and which rows gave a token."""

    visible: list[torch.Tensor]  # for each group [T, T] bool
    rows: list[int] = field(default_factory=list)


@dataclass
class Compared:
    """A request's tokens beside the reference's."""

    equal: int
    tokens: int
    worst: float  # the largest difference of two log-probabilities
    hidden: float  # part of the earlier tokens that the last row did not see, averaged over groups


def read_log(path):
    """(head, steps)."""
    head, *steps = map(json.loads, path.read_text().splitlines())
    return head, steps


def stretches(head, steps, request, prompt, total, shift=0):
    """The stretches of one request; `total` tokens, `prompt` of them given."""
    found, generated, gone, late = [], 0, [], []
    for step in steps:
        if request not in step["requests"]:
            continue
        if request in step["fresh"]:
            gone = [set() for _ in head["groups"]]
            late = [[] for _ in range(head["lag"] + shift)]
            found.append(Stretch([torch.ones(total, total, dtype=torch.bool).tril() for _ in head["groups"]]))
        late.append([(group, block) for group, owner, blocks in step["drops"] if owner == request for block in blocks])
        for group, block in late.pop(0):
            gone[head["groups"].index(group)].add(block)
        computed, scheduled = step["requests"][request]
        rows = slice(computed, computed + scheduled)
        for number, size in enumerate(head["block_size"]):
            for block in gone[number]:
                found[-1].visible[number][rows, block * size : (block + 1) * size] = False
        if computed + scheduled == prompt + generated:
            generated += 1
            found[-1].rows.append(computed + scheduled - 1)
    return found


class Reference:
    """A model in float32 with a mask of its own in every layer."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._masks = {}
        for number, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_pre_hook(self._mask(number), with_kwargs=True)

    def _mask(self, number):
        def hook(module, given, options):
            return given, {**options, "attention_mask": self._masks[number]}

        return hook

    @torch.no_grad()
    def logprobs(self, ids, visible, layers):
        """[T, V]; visible[g] [T, T] holds in layers[g]."""
        for seen, numbers in zip(visible, layers, strict=True):
            mask = torch.zeros(1, 1, *seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
            self._masks |= dict.fromkeys(numbers, mask)
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    @torch.no_grad()
    def attention(self, ids):
        """Attention [L, H*G, T, T] of a prompt from which nothing is gone."""
        mask = torch.full((1, 1, len(ids), len(ids)), torch.finfo(torch.float32).min).triu_(1)
        self._masks |= dict.fromkeys(range(len(self.model.model.layers)), mask)
        return torch.cat(self.model(torch.tensor([ids]), output_attentions=True).attentions)

    @torch.no_grad()
    def hidden(self, ids):
        """What attention gets in every layer, [L][T, width], of a prompt from which nothing is gone."""
        found = []
        layers = self.model.model.layers
        handles = [layer.input_layernorm.register_forward_hook(lambda m, i, o: found.append(o[0])) for layer in layers]
        self.attention(ids)
        for handle in handles:
            handle.remove()
        return found

    def compare(self, log, result, shift=0, masked=True):
        """Replay one request of an engine's result."""
        head, steps = log
        (name,) = {r for step in steps for r in step["requests"] if r.rpartition("-")[0] == result["id"]}
        ids, prompt = result["prompt"] + result["out"], len(result["prompt"])
        equal, worst, last = 0, 0.0, None
        for part in stretches(head, steps, name, prompt, len(ids) - 1, shift):
            visible = part.visible if masked else [torch.ones_like(v).tril() for v in part.visible]
            logprobs = self.logprobs(ids[:-1], visible, head["layers"])
            for row in part.rows:
                token = ids[row + 1]
                equal += int(logprobs[row].argmax()) == token
                worst = max(worst, abs(float(logprobs[row, token]) - result["logprobs"][row + 1 - prompt]))
            last = torch.stack([v[-1].float().mean() for v in part.visible])
        return Compared(equal, len(result["out"]), worst, 1 - float(last.mean()))
