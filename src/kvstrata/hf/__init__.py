"""The seam to transformers: a cache for plain `generate` and for hand-written loops."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.core import SpecError
from kvstrata.hf import compat
from kvstrata.hf.attention import attached
from kvstrata.hf.cache import SignalLogits, StrataCache
from kvstrata.hf.repeat import request_of
from kvstrata.hf.signals import forwards_of, hidden_to
from kvstrata.hf.together import read_together
from kvstrata.kernels.attention import KERNELS, KernelName
from kvstrata.policy import Policy, parse_policy

__all__ = ["SignalLogits", "StrataCache", "compress", "prefill"]


@contextmanager
def compress(
    model: PreTrainedModel,
    policy: Policy | str | Path,
    *,
    kernels: KernelName = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Generator[StrataCache]:
    """Open a cache that holds the keys and values of `model` under `policy`.

    Give it to `model.generate(**inputs, past_key_values=cache)` or to a loop of your own, inside the block. Several
    blocks may be open on one model. Leaving a block, also by an exception, restores the model; the cache can still be
    read. `policy`: the text of a preset ("h2o:budget=25%"), a Policy, or the path of a YAML file. `kernels`: "auto"
    takes "native" ones on a CPU where they were built and "reference", torch alone, elsewhere; "triton" asks for those
    on a GPU; "exact" runs torch's sdpa exactly as transformers would, to prove that a full budget changes nothing.
    `tokenizer` is needed by policies that have the model repeat its prompt (kvzip), and read by no other.

    Raises `SpecError` for a policy that cannot work and `UnsupportedModelError` for a model that cannot.
    """
    if kernels not in KERNELS:
        raise SpecError(f"kernels={kernels!r}: choose one of {', '.join(KERNELS)}")
    compat.check_version()
    compat.check_model(model)
    parsed, request = parse_policy(policy), None
    if "repetition" in parsed.needs:
        if tokenizer is None:
            raise SpecError(f"policy {parsed.name!r} has the model repeat its prompt: pass compress(tokenizer=...)")
        request = request_of(tokenizer)
    cache = StrataCache(model, parsed, kernels, request)
    with attached(model), hidden_to(cache, model), forwards_of(cache, model):
        try:
            yield cache
        finally:
            cache.close()


@contextmanager
def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    policy: Policy | str | Path,
    *,
    attention_mask: Tensor | None = None,
    kernels: KernelName = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Generator[StrataCache]:
    """Open a cache that has read the prompts ids [B, T] already, pads first, and holds what the policy left of them.

    Go on with `model.generate(ids and more, past_key_values=cache)` inside the block: at least one token must follow.
    Everything else as `compress`.
    """
    with compress(model, policy, kernels=kernels, tokenizer=tokenizer) as cache:
        read_together(model, [cache], ids, attention_mask)
        yield cache
