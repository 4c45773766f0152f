"""Continuations of a novel: `ppl` and `faithful` read different figures off one pass over their tokens, one by one, and
`continue` feeds them all at once."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from kvstrata.evaluate.task import NLL, TASKS, Example, Metric, Settings, Source, Task
from kvstrata.evaluate.texts import haystack, stretches

FOLLOWS = 4  # a continuation has a fourth of the prompt's tokens


def documents(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """Stretches of the text, one from the beginning of each of as many equal parts, or elsewhere in it by the seed."""
    text, seed = haystack(settings.haystack), settings.seed
    fix = f"a context has {length} and what follows; give a smaller --length or --contexts, or another --haystack"
    parts = stretches(tokenizer, text, contexts, length + length // FOLLOWS, fix, seed)
    return [Example(f"{seed}-{i}", part[:length], continuation=part[length:]) for i, part in enumerate(parts)]


SOURCE = Source("documents", 2, "steps", documents, length=1024, batch=8)
FAITHFUL = (
    Metric("kl", "nats", "lower"),
    Metric("agreement", "share", "higher"),
    Metric("attention_error", "relative", "lower"),
)

TASKS["ppl"] = Task(
    "likelihood of known tokens after a prompt four times as long, the policy active at every step",
    SOURCE,
    (NLL,),
)
TASKS["faithful"] = Task("how far the next-token distribution is from the full cache's at every step", SOURCE, FAITHFUL)
TASKS["continue"] = Task(
    "likelihood of known tokens after a compressed prompt four times as long, read in one forward",
    Source("continuations", 2, "block", documents, length=1024, contexts=16, batch=4),
    (NLL, *FAITHFUL),
)
