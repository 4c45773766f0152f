"""`kvstrata run`: generate under a policy, or compare policies with the full cache on one prompt."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import MofNCompleteColumn
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from kvstrata.bench.compare import run_policy, run_reference, warm_up
from kvstrata.bench.measure import process_peak, provenance, restart_process_peak
from kvstrata.cache.report import human_bytes
from kvstrata.cli.tables import comparison, progress_bar
from kvstrata.core import InputError
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.models import load_model
from kvstrata.policy import Policy, parse_policy
from kvstrata.policy.shares import ByHead
from kvstrata.policy.spec import names_budget, split_specs

TAIL = 2000  # characters of the text that the live view shows


def run(
    policy: Annotated[str, typer.Option(help="Preset such as h2o:budget=25%, or a YAML file.")] = "full",
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself; - reads standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file that holds the prompt.")] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 160,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    compare: Annotated[str | None, typer.Option(help="Policies to compare with the full cache, by commas.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Generate under a policy with a live line of memory and speed; with --compare, a table beside the full cache."""
    main_policy = parse_policy(policy)
    others = _compared(policy, compare) if compare is not None else []
    text = _prompt(prompt, prompt_file)
    console = Console(stderr=as_json)
    lm, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    ids = _encode(tokenizer, text, chat).to(device)
    if compare is None:
        figures = _generate(lm, tokenizer, ids, main_policy, max_new_tokens, temperature, seed, console, as_json)
    else:
        figures = _compare(lm, ids, [(policy, main_policy), *others], max_new_tokens, console)
    if as_json:
        about = {"model": model or "demo", "dtype": str(lm.dtype), "prompt_tokens": ids.shape[1], **provenance()}
        print(json.dumps({**about, **figures}, indent=2))


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise InputError("give --prompt or --prompt-file, not both")
    if prompt_file is not None:
        try:
            text = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read --prompt-file {prompt_file}: {error}") from error
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    else:
        text = prompt or ""
    if not text.strip():
        raise InputError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> Tensor:
    """Token ids [1, T] of the prompt, without special tokens of our own making."""
    if not chat:
        return cast(Tensor, tokenizer(text, return_tensors="pt", add_special_tokens=True, verbose=False)["input_ids"])
    if tokenizer.chat_template is None:
        raise InputError("this model's tokenizer has no chat template: leave out --chat")
    messages = [{"role": "user", "content": text}]
    filled = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, verbose=False
    )
    return cast(Tensor, cast(Any, filled)["input_ids"])


def _compared(policy: str, compare: str) -> list[tuple[str, Policy]]:
    """Policies to compare; one that names no budget takes that of --policy."""
    first = parse_policy(policy)
    rules = [rule for entry in first.table for rule in (entry.prefill, entry.decode) if rule]
    budgets = [rule.budget.base if isinstance(rule.budget, ByHead) else rule.budget for rule in rules]
    budgets = [budget for budget in budgets if budget.threshold is None]  # a score says nothing of others
    found: list[tuple[str, Policy]] = []
    for spec in split_specs(compare):
        other = parse_policy(spec)
        inherits = bool(budgets) and spec != "full" and not spec.endswith((".yaml", ".yml")) and not names_budget(spec)
        found.append((spec, other.with_budget(budgets[0]) if inherits else other))
    if not found:
        raise InputError("--compare names no policy: write --compare full,streaming")
    return found


def _compare(
    model: PreTrainedModel, ids: Tensor, policies: list[tuple[str, Policy]], steps: int, console: Console
) -> dict[str, Any]:
    runs = [(label, policy) for label, policy in policies if label != "full"]
    with progress_bar(MofNCompleteColumn()) as progress:
        task = progress.add_task("full", total=steps * (len(runs) + 1))
        warm_up(model, ids)
        reference = run_reference(model, ids, steps, lambda: progress.advance(task))
        traces = [reference.trace]
        for label, policy in runs:
            progress.update(task, description=label)
            traces.append(run_policy(model, ids, policy, reference, label, lambda: progress.advance(task)))
    rows = [trace.summary(reference.trace) for trace in traces]
    title = f"{ids.shape[1]} prompt tokens, then {steps} teacher-forced steps; whole prompt visible when compressing"
    console.print(comparison(rows, title))
    return {"steps": steps, "scope": "prompt", "rows": rows}


class _Meter(BaseStreamer):
    """Receives generated tokens and keeps what the live line shows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cache: StrataCache, plain: bool) -> None:
        self._tokenizer, self._cache, self._plain = tokenizer, cache, plain
        self.tokens: list[int] = []
        self.text = ""
        self._times = [time.perf_counter()]
        self.live: Live | None = None
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take the prompt once, then one token at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()
        self._show(final=False)
        if self.live:
            self.live.update(Group(Text(self.text[-TAIL:]), Text(self.line(), style="dim")))

    def _show(self, final: bool) -> None:
        """Take the text so far, but for a character of which only a part is there."""
        text = cast(str, self._tokenizer.decode(self.tokens, skip_special_tokens=True))
        if final or not text.endswith("\ufffd"):
            if self._plain:
                print(text[len(self.text) :], end="", flush=True)
            self.text = text

    def end(self) -> None:
        """Show what is left and close the line."""
        self._show(final=True)
        if self._plain:
            print()

    @property
    def ms_per_token(self) -> float | None:
        """Median over the decode steps, if there were any."""
        gaps = sorted(b - a for a, b in zip(self._times[1:], self._times[2:], strict=False))
        return gaps[len(gaps) // 2] * 1e3 if gaps else None

    @property
    def prefill_s(self) -> float:
        """Time to the first token."""
        return self._times[1] - self._times[0] if len(self._times) > 1 else float("nan")

    def line(self) -> str:
        """Memory and speed now."""
        account, full = self._cache.account, self._cache.engine.full_bytes
        live, held, peak = (human_bytes(n) for n in (account.now.live, account.now.held, account.peak.held))
        speed = "" if self.ms_per_token is None else f" · {self.ms_per_token:.0f} ms/token"
        return (
            f"{len(self.tokens)} tokens · KV {live} live, {account.now.live / max(1, full):.0%} of full "
            f"({held} held, peak {peak}) · prefill {self.prefill_s:.1f} s{speed}"
        )


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    policy: Policy,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    console: Console,
    as_json: bool,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    restart_process_peak()
    with compress(model, policy, tokenizer=tokenizer) as cache:
        meter = _Meter(tokenizer, cache, plain=not console.is_terminal and not as_json)
        options: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": max_new_tokens,
            "streamer": meter,
            CACHE_KEYWORD: cache,
            **sampling,
        }
        if console.is_terminal:
            with Live(console=console, transient=True) as meter.live:
                cast(Any, model).generate(ids, **options)
            console.print(Text(meter.text))
        else:
            cast(Any, model).generate(ids, **options)
        Console(stderr=True).print(Text(meter.line(), style="dim"))
    report = cache.report()
    return {
        "policy": policy.name,
        "text": meter.text,
        "new_tokens": len(meter.tokens),
        "prefill_s": meter.prefill_s,
        "ms_per_token": meter.ms_per_token,
        "live_bytes": report.now.live,
        "held_bytes": report.now.held,
        "peak_held_bytes": report.peak.held,
        "share_of_full": report.share,
        "process_peak_bytes": process_peak(ids.device),
    }
