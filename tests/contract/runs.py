"""Tiny random models and the few ways a test runs them."""

from __future__ import annotations

from functools import cache

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvstrata.hf.compat import CACHE_KEYWORD

PRESETS = (
    *("window", "streaming", "random", "keynorm", "keydiff", "h2o", "tova", "snapkv"),
    *("pyramidkv", "scissorhands", "confkv", "confkv-l", "echo-head", "cake", "cam", "d2o"),
)
ALL = ("full", *PRESETS)
GROW = ("snapkv", "pyramidkv")  # compress the prompt only
MERGING = ("cam", "d2o")  # write values, so that no mask on a full cache gives what they give
TWO_LEVELS = "confkv:high=7,low=14,recent=3,tau=0.31"  # both are reached: the tiny models are as often sure as not
POOLED = {  # heads of a layer share the budget, so they end with different lengths
    "name": "pooled",
    "layers": {
        "0-": {
            phase: {"scorer": "keynorm", "budget": 12, "heads": "pooled", "sinks": 2, "recent": 2}
            for phase in ("prefill", "decode")
        }
    },
}
VOCAB, EXACT = 128, 99999  # the latter: positions behind which nothing is coded in any test


@cache
def tiny(kind: str = "llama", dtype: torch.dtype = torch.float32):
    """A random model: 3 layers, 4 query heads on 2 key-value heads, head_dim 16."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "initializer_range": 0.2,  # large enough that attention is far from uniform
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).to(dtype).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()


def prompt(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Random ids without repeats within a row while they last.

    In the first layer a repeated token has a key of the same norm up to rounding, and a tie of scores may then fall
    either way between two runs that differ in rounding only.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-length // (VOCAB - 1))
    row = [torch.cat([torch.randperm(VOCAB - 1, generator=generator) for _ in range(rounds)]) for _ in range(rows)]
    return torch.stack(row)[:, :length] + 1


def stock(model) -> DynamicCache:
    return DynamicCache(config=model.config)


@torch.no_grad()
def feed(model, ids, cache, chunks, mask=None):
    """Feed ids in chunks of these lengths, then one by one. -> logits [B, T, V]"""
    parts, start = [], 0
    lengths = list(chunks) + [1] * (ids.shape[1] - sum(chunks))
    for length in lengths:
        stop = start + length
        extra = {}
        if mask is not None:
            seen = mask[:, :stop]
            positions = (seen.cumsum(1) - 1).clamp_min(0)[:, start:stop]
            extra = {"attention_mask": seen, "position_ids": positions}
        parts.append(model(ids[:, start:stop], **kv(cache), **extra).logits)
        start = stop
    return torch.cat(parts, dim=1)


def kv(cache):
    """The cache as the keyword that the installed transformers calls it by."""
    return {CACHE_KEYWORD: cache}


def spec(name: str, budget: str | int) -> str:
    """A preset with the same budget in every layer and at every step, all exact: a test knows how much must be kept."""
    if ":" in name:
        return name
    amount, _, rest = str(budget).partition(",")
    options = {
        "echo-head": f":budget={amount},window=4" + (",room=1" if "room=" not in rest else ""),
        "full": "",
        "pyramidkv": f":budget={amount},beta=1",
        "cake": f":budget={amount},tau1=inf,tau2=inf",
        "d2o": f":budget={amount},alpha=0",
        "confkv": f":high={amount},low={amount},window={EXACT}",
        "confkv-l": f":high={amount},low={amount},beta=1,at_least=1,window={EXACT}",
    }.get(name, f":budget={amount}")
    return name + options + (f",{rest}" if rest else "")


class Tokenizer:
    """As much of one as requests need: a character is a token."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % 120 + 1 for c in text[-12:]]}
