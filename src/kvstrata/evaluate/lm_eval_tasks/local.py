"""Data of the task files beside this one, read from the folder that the variable KVSTRATA_DATA names."""

from __future__ import annotations

import ast
import gzip
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "KVSTRATA_DATA"


def gsm8k(**_: Any) -> dict[str, Any]:
    """GSM8K: the whole test set, and the first of the training set for examples in the prompt."""
    return {"train": _rows("gsm8k/train_first200.jsonl.gz"), "test": _rows("gsm8k/test.jsonl.gz")}


def longbench(subset: str = "", **_: Any) -> dict[str, Any]:
    """A subset of LongBench; its lists are written as text in some published copies."""
    rows = _rows(f"longbench/{subset}.jsonl.gz").to_list()
    for row in rows:
        for name in ("answers", "all_classes"):
            if isinstance(row.get(name), str):
                row[name] = ast.literal_eval(row[name]) or []
        row["question"] = row.get("input", "")
    return {"test": _dataset().from_list(rows)}


def scorer(name: str) -> Any:
    """A scoring function of the harness's own LongBench tasks."""
    return getattr(import_module("lm_eval.tasks.longbench.metrics"), name)


def rouge(doc: dict[str, Any], results: list[str]) -> Any:
    """ROUGE-L, for summaries."""
    return scorer("get_rouge_with_score")(doc, results)


def qa_f1_zh(doc: dict[str, Any], results: list[str]) -> Any:
    """F1 over Chinese words."""
    return scorer("get_qa_f1_zh_with_score")(doc, results)


def retrieval_zh(doc: dict[str, Any], results: list[str]) -> Any:
    """Whether the right paragraph is named."""
    return scorer("get_retrieval_zh_with_score")(doc, results)


def _dataset() -> Any:
    return import_module("datasets").Dataset


def _rows(name: str) -> Any:
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise ValueError(f"set {VARIABLE} to the folder that holds {name}, or use `kvstrata evaluate --data`")
    path = Path(folder) / name
    if not path.is_file():
        raise ValueError(f"{path} is not there; docs/data.md says where to get it")
    return _dataset().from_list([json.loads(line) for line in gzip.open(path, "rt", encoding="utf-8")])
