"""Texts that the demo model says itself, for `kvstrata evaluate --haystack`.

    python benchmarks/own_words.py FOLDER DATA     DATA: see docs/data.md

Writes FOLDER/chat.txt (MT-Bench's first questions with the model's answers) and FOLDER/own.txt (long answers, each of
1,400 tokens), sampled with set seeds; some minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from texts import write
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.hf.models import load_model

ROWS = 16  # questions answered together


def removed(text: str, end: str) -> str:
    """A text without what it ends in, however often."""
    while text.endswith(end):
        text = text.removesuffix(end)
    return text


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], tokens: int, at_least: int = 0
) -> list[str]:
    """Sampled answers of up to `tokens` tokens, each behind its question in the model's chat template."""
    found: list[str] = []
    for start in range(0, len(questions), ROWS):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + ROWS]]
        asked = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        torch.manual_seed(start)
        said = model.generate(
            **asked, max_new_tokens=tokens, min_new_tokens=at_least, do_sample=True, temperature=0.8, top_p=0.95
        )
        if at_least:
            found += tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        else:  # with the marks of the template, without what fills rows up
            begins = asked["attention_mask"].argmax(dim=1)
            texts = (tokenizer.decode(row[begin:]) for row, begin in zip(said, begins, strict=True))
            found += [removed(text, tokenizer.pad_token) + tokenizer.eos_token for text in texts]
        print(f"{len(found)} of {len(questions)}", flush=True)
    return found


def main() -> None:
    folder, data = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(None, None, "cpu")
    tokenizer.padding_side = "left"
    lines = (data / "chat" / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines]
    write(folder / "chat.txt", "\n".join(answers(model, tokenizer, questions[:48], 256)))
    write(folder / "own.txt", "\n\n".join(answers(model, tokenizer, questions[:ROWS], 1400, at_least=1400)))


if __name__ == "__main__":
    main()
