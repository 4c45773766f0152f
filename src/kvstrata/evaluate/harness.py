"""lm-evaluation-harness under any policy: its tasks, prompts and scores, our cache.

`python -m kvstrata.evaluate.harness ...` is the harness's own command line with the model `kvstrata` added to it:

    python -m kvstrata.evaluate.harness run --model kvstrata --model_args policy=h2o:budget=25% --tasks gsm8k

A comma inside a policy's text is written as a semicolon there, since the harness splits at commas.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from kvstrata.bench.measure import provenance
from kvstrata.core import InputError, KvstrataError
from kvstrata.evaluate.content import check_unread, content
from kvstrata.evaluate.grid import Asked, Job
from kvstrata.evaluate.lm_eval_tasks.local import VARIABLE
from kvstrata.evaluate.runs import continued, read
from kvstrata.evaluate.task import Settings
from kvstrata.evaluate.texts import digest, read_text
from kvstrata.evaluate.worker import weights_digest
from kvstrata.files import whole
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.demo import demo_model
from kvstrata.hf.models import load_model
from kvstrata.policy import parse_policy
from kvstrata.policy.budget import parse_budget

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise KvstrataError("the standard benchmarks need lm-evaluation-harness: pip install 'kvstrata[eval]'") from error

DEMO = "demo"
HOW = {"scope": "prompt", "budget_of": "tokens"}  # the question is visible when compressing; what a budget in % is of
TASKS = Path(str(files("kvstrata.evaluate").joinpath("lm_eval_tasks")))  # of data that is at hand


@register_model("kvstrata")
class StrataLM(HFLM):
    """transformers' model as the harness loads it, with every request in a cache of its own under the policy."""

    def __init__(
        self,
        pretrained: str | PreTrainedModel = DEMO,
        policy: str = "full",
        budget: str | None = None,
        kernels: str = "auto",
        length: int | None = None,
        **options: Any,
    ) -> None:
        self._policy = parse_policy(policy.replace(";", ","))
        if budget is not None:
            self._policy = self._policy.with_budget(parse_budget(budget))
        self._held, self._full = 0, 0
        source = str(demo_model()) if isinstance(pretrained, str) and pretrained == DEMO else pretrained
        super().__init__(pretrained=source, **{"device": "cpu", **options, "logits_cache": False})
        if length is not None:  # longer prompts lose their beginning
            self._max_length = min(length, self.max_length)
        self._options: dict[str, Any] = {"kernels": kernels, "tokenizer": self.tokenizer}

    @property
    def share_held(self) -> float | None:
        """Bytes held over those of the same tokens uncompressed, when an answer ends or a continuation begins."""
        return self._held / self._full if self._full else None

    def _note(self, cache: StrataCache) -> None:
        self._held += cache.nbytes.held
        self._full += cache.engine.full_bytes

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        """Generate as the harness does, in a cache under the policy."""
        with compress(self.model, self._policy, **self._options) as cache:
            options = {CACHE_KEYWORD: cache, **generation_kwargs}
            made = super()._model_generate(context, max_length, stop, **options)
            self._note(cache)
        return made

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Read every context, let the policy act, then score the continuation in one forward."""
        size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else 1)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        found: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), size):
            part = order[start : start + size]
            for i, answer in zip(part, self._score([requests[i] for i in part]), strict=True):
                found[i] = answer
                self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return [found[i] for i in range(len(requests))]

    def _score(self, requests: list[Any]) -> list[tuple[float, bool]]:
        answers = [list(request[2]) for request in requests]
        contexts = [list(r[1])[-max(1, self.max_length - len(r[2])) :] for r in requests]
        with compress(self.model, self._policy, **self._options) as cache:
            last, mask = read(self.model, {self._policy.name: cache}, contexts)
            self._note(cache)
            marked = continued(self.model, cache, last, mask, answers)
        return [(-sum(nats), all(right)) for nats, right in marked]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused: the harness scores windows with nothing before them, so no policy would have acted."""
        raise InputError("perplexity over windows compresses nothing: use `kvstrata evaluate --task ppl` instead")


def run_lm_eval(names: Sequence[str], asked: Sequence[Asked], job: Job, folder: Path) -> list[dict[str, Any]]:
    """Run the harness's tasks under every policy, `--contexts` examples of each. -> a row per task, policy and metric

    Every policy's rows are kept in `folder` when they are there, and not run again. Where --data is given, a task whose
    data has a file of ours is read from there. Raises `InputError`.
    """
    from lm_eval.tasks import TaskManager

    manager: Any = TaskManager(include_path=str(TASKS))
    settings, tasks = job.settings, list(names)
    if settings.data:
        os.environ[VARIABLE] = str(settings.data)
        tasks = [f"{name}_local" if f"{name}_local" in manager.all_tasks else name for name in names]
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise InputError(f"lm-evaluation-harness has no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    model, tokenizer = load_model(job.model, job.dtype, job.device)
    about = {"tasks": tasks, "model": weights_digest(model, job.model or DEMO), "dtype": str(model.dtype)}
    about |= {"contexts": settings.contexts, "seed": settings.seed, "kernels": job.kernels, "device": job.device}
    about |= {"length": settings.length} if settings.length else {}
    about |= {"lm_eval": version("lm_eval"), "data": _hashes(settings.data)}
    texts = {digest(read_text(file)) for file in _files(settings.data)}
    rows: list[dict[str, Any]] = []
    for one in asked:
        check_unread(one.policy, texts)
        key = {**about, "policy": one.policy, "content": content(one.policy), "budget": one.budget}
        path = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
        if not path.is_file():
            options: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": job.batch or 1}
            lm = StrataLM(model, one.policy, one.budget, job.kernels, settings.length, **options)
            found = _evaluated(lm, tasks, settings, manager)
            _write(path, {**key, **HOW, "share_held": lm.share_held, "rows": found, **provenance()})
        rows += _rows(path, one)
    return rows


def _hashes(data: Path | None) -> dict[str, str]:
    """Of the files under --data that tasks of ours may read."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in _files(data)}


def _files(data: Path | None) -> list[Path]:
    return [file for folder in ("gsm8k", "longbench") if data for file in sorted((data / folder).glob("*.jsonl.gz"))]


def _evaluated(lm: StrataLM, tasks: list[str], settings: Settings, manager: Any) -> list[dict[str, Any]]:
    """What the harness found, a row per task and metric; what it prints goes to standard error."""
    from lm_eval import simple_evaluate

    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    options: dict[str, Any] = {
        "limit": settings.contexts,
        "task_manager": manager,
        **dict.fromkeys(kinds, settings.seed),
    }
    try:
        with contextlib.redirect_stdout(sys.stderr):
            results: Any = simple_evaluate(cast(Any, lm), tasks=cast(Any, tasks), **options)
    except (ValueError, AssertionError) as error:  # a length without room for an answer is the latter
        raise InputError(f"lm-evaluation-harness: {error}") from error
    rows: list[dict[str, Any]] = []
    for task, values in results["results"].items():
        n = results["n-samples"].get(task, {}).get("effective")
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                rows.append({"task": task, "n": n, "metric": key, "value": value, "stderr": error})
    return rows


def _write(path: Path, record: dict[str, Any]) -> None:
    with whole(path) as scratch:
        scratch.write_text(json.dumps(record, indent=2, default=str) + "\n")


def _rows(path: Path, one: Asked) -> list[dict[str, Any]]:
    try:
        record = json.loads(path.read_text())
        about = {"policy": one.policy, "budget": one.budget, "share_held": record["share_held"], **HOW}
        return [{**about, **row} for row in record["rows"]]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no sound record ({error!r}): move it away to measure it again") from error


def main() -> None:
    """The harness's command line, which now knows the model `kvstrata`."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv[0] = "lm_eval"
    cli_evaluate()


if __name__ == "__main__":
    main()
