"""Putting texts into a model's chat template piece by piece, so that a question can follow a compressed context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

MARK = "<<<what the user says>>>"


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before a user's words and between them and the answer."""

    before: str
    after: str


def frame_of(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """The chat template's frame, or for a model without one a line break before the answer."""
    if not tokenizer.chat_template:
        return Frame("", "\n")
    messages = [{"role": "user", "content": MARK}]
    text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    before, _, after = text.partition(MARK)
    return Frame(before, after)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a piece of text, with nothing added."""
    return cast("list[int]", tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer itself puts before any text, if it does: a model that saw it always needs it."""
    first = cast("list[int]", tokenizer("", verbose=False)["input_ids"])[:1]
    return first if first == [cast(Any, tokenizer.bos_token_id)] else []


def opening(tokenizer: PreTrainedTokenizerBase, frame: Frame) -> list[int]:
    """Token ids before a user's words; what the tokenizer puts before any text, where there is no template."""
    if frame.before:
        return encode(tokenizer, frame.before)
    return [] if tokenizer.bos_token_id is None else [int(cast(Any, tokenizer.bos_token_id))]


def pieces(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    """For every message what stands before its content, and the content with what closes it.

    Uses the chat template where every message only adds to what the messages before it gave, else plain names.
    """
    done, found = "", list[tuple[str, str]]()
    for count, message in enumerate(messages, start=1):
        text = _rendered(tokenizer, messages[:count])
        new = text[len(done) :]
        place = new.find(message["content"])
        if not text.startswith(done) or place < 0:
            return [(f"{m['role']}: ", f"{m['content']}\n\n") for m in messages]
        found.append((new[:place], new[place:]))
        done = text
    return found


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    if not tokenizer.chat_template:
        return "".join(f"{m['role']}: {m['content']}\n\n" for m in messages)
    return cast(str, tokenizer.apply_chat_template(messages, tokenize=False))
