"""Continuations of a novel, fed token by token: `ppl` and `faithful` read different figures off one pass."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.evaluate.framing import encode
from kvstrata.evaluate.task import NLL, TASKS, Example, Metric, Settings, Source, Task
from kvstrata.evaluate.texts import generator, haystack

STEPS = 256  # tokens of the continuation


def documents(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """Stretches of the text that begin evenly spread over it, moved by the seed."""
    ids = encode(tokenizer, haystack(settings.haystack))
    need, apart = length + STEPS, len(ids) // contexts
    if len(ids) < need:
        raise InputError(f"the text has {len(ids)} tokens, but --length {length} and {STEPS} steps need {need}")
    found: list[Example] = []
    for i in range(contexts):
        moved = generator("documents", settings.seed, i).randrange(apart) if settings.seed else 0
        start = min(i * apart + moved, len(ids) - need)
        part = ids[start : start + need]
        found.append(Example(f"{settings.seed}-{i}", part[:length], continuation=part[length:]))
    return found


SOURCE = Source("documents", 1, "steps", documents, length=1024, batch=8)

TASKS["ppl"] = Task(
    f"likelihood of {STEPS} known tokens after a prompt, the policy active at every step",
    SOURCE,
    (NLL,),
)
TASKS["faithful"] = Task(
    "how far the next-token distribution is from the full cache's at every step",
    SOURCE,
    (
        Metric("kl", "nats", "lower"),
        Metric("agreement", "share", "higher"),
        Metric("attention_error", "relative", "lower"),
    ),
)
