"""Decode speed end to end: kvstrata beside transformers' caches and other engines, taking turns on one prompt.

Every cache in this process is fed the same tokens, those that the reference kernels choose greedily, and its logits
are compared with the reference's. Only a cache that agrees gets ratios. Other engines run in processes of their own,
choose their own tokens, and take turns all the same.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.bench.contenders import Contender, Prompt, ours, read_for, read_prompt, repaired_stock, stock
from kvstrata.bench.glue import share_of_glue
from kvstrata.bench.peers import Peer, PeerSpec, start_peer
from kvstrata.core import InputError
from kvstrata.hf import StrataCache
from kvstrata.kernels.attention import KernelName

FULL = "full"
IN_PROCESS = ("hf", "repaired")
# what rounding in another order may change, of the largest logit
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
OF_NOISE = 3.0  # of what transformers and the reference differ by here, if that is more
MOST_NOISE = 2.0  # times ROUNDING: beyond that one of them is wrong
OF_POLICY = 0.25  # of what a policy itself changes: rounding may turn a tie between two entries the other way


@dataclass(frozen=True, slots=True)
class Turns:
    """How long to measure: rounds of so many steps each, no new round after `limit` seconds.

    Every prompt is read `prefill` times for its time.
    """

    rounds: int
    steps: int
    limit: float
    prefill: int = 0

    @property
    def most_steps(self) -> int:
        """Steps of every contender, one to warm up included."""
        return 1 + self.rounds * self.steps


@dataclass(slots=True)
class Row:
    """One contender on one prompt and batch. Ratios are of tokens per second, None where the check failed."""

    name: str
    cache_bytes: int
    ms: list[float]
    batch: int
    check: Verdict | None = None
    tokens_alike: int | None = None  # of an engine that chooses its own: leading tokens equal to the reference's
    over_hf: float | None = None
    over_repaired: float | None = None
    prefill_s: float | None = None  # one row's prompt, where it was timed
    glue_share: float | None = None  # of a step: ours, outside attention and the model's own layers
    settings: dict[str, object] = field(default_factory=dict[str, object])

    @property
    def ms_per_step(self) -> float:
        """Median."""
        return statistics.median(self.ms)

    @property
    def tokens_per_s(self) -> float:
        """Over all rows of the batch."""
        return self.batch * 1e3 / self.ms_per_step

    @property
    def passed(self) -> bool:
        """Whether it may be compared."""
        return self.check is None or self.check.passed


@dataclass(frozen=True, slots=True)
class Verdict:
    """Logits against those of the reference over the same tokens."""

    difference: float  # largest, over steps, rows and words
    allowed: float
    same_tokens: bool  # wherever the reference's two best are further apart than the allowed difference

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.difference <= self.allowed and self.same_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What the reference kernels say of one row: tokens fed, and logits [steps, V] after each, by policy."""

    prompt: Prompt
    tokens: list[int]
    logits: dict[str, Tensor]
    allowed: float  # difference that rounding explains, over caches that hold the same entries
    read: dict[tuple[str, int], StrataCache | None]  # by policy and batch: caches that have read the prompt, in one row


def run_reference(
    model: PreTrainedModel,
    ids: Tensor,
    policies: Sequence[str],
    steps: int,
    tell: Callable[[str], object] = lambda _: None,
    *,
    stack: ExitStack,
    batches: Sequence[int] = (),
) -> Reference:
    """Read ids [1, T] and decode one row with the reference kernels, greedily under the full cache.

    The full cache is always among the policies, and the first. The prompt is read once for all policies in all of
    `batches`; their caches stay open as long as `stack` is.
    """
    tell("reading the prompt")
    prompt = read_prompt(model, ids)
    names = [FULL, *(policy for policy in policies if policy != FULL)]
    cases = [(name, batch) for name in names for batch in batches]
    tokens, logits = [prompt.first], dict[str, Tensor]()
    with ExitStack() as own:
        if batches or len(names) > 1:
            tell("policies read the prompt")
        wanted: list[tuple[str, KernelName, ExitStack]] = [(name, "reference", own) for name in names]
        found = read_for(model, ids, wanted + [(name, "auto", stack) for name, _ in cases])
        for policy, cache in zip(names, found, strict=False):
            tell(f"the reference of {policy}")
            contender, made = ours(model, prompt, 1, policy, own, "reference", cache), list[Tensor]()
            for step in range(steps):
                made.append(contender.step(tokens[step], 1)[0])
                if len(tokens) < steps:
                    tokens.append(int(made[-1].argmax()))
            logits[policy] = torch.stack(made)
    read = dict(zip(cases, found[len(names) :], strict=True))
    other, full = stock(model, prompt, 1), logits[FULL]
    difference = max(float((other.step(t, 1)[0] - full[i]).abs().max()) for i, t in enumerate(tokens))
    rounding = ROUNDING[model.dtype] * float(full.abs().max())
    return Reference(prompt, tokens, logits, max(rounding, min(OF_NOISE * difference, MOST_NOISE * rounding)), read)


def run_case(
    model: PreTrainedModel,
    reference: Reference,
    batch: int,
    peers: Sequence[PeerSpec],
    turns: Turns,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Row]:
    """Let peers and the policies of `reference` decode after its prompt in `batch` rows.

    Raises `PeerError` for a peer that cannot run, `UnsupportedModelError` for one that this model does not suit.
    """
    prompt, most = reference.prompt, turns.most_steps
    with ExitStack() as stack:
        contenders = [_baseline(spec, model, prompt, batch, most) for spec in peers if spec.name in IN_PROCESS]
        for policy in reference.logits:
            cache = reference.read.pop((policy, batch), None)
            contenders.append(ours(model, prompt, batch, policy, stack, read=cache))
            if cache is not None:  # it is open longer than it is needed
                stack.callback(cache.reset)
        others: list[Peer] = []
        for spec in peers:
            if spec.name not in IN_PROCESS:
                tell(f"{spec.text} reads the prompt")
                others.append(stack.enter_context(start_peer(spec, model, prompt.ids, batch, most, turns.prefill)))
        sizes = [contender.nbytes() for contender in contenders]
        times, found = _race(contenders, others, reference.tokens, batch, turns, tell)
        rows = [
            Row(c.name, size, times[c.name], batch, _verdict(c.name, logits, reference))
            for c, size, logits in zip(contenders, sizes, found, strict=True)
        ]
        full = [contender.name for contender in contenders].index(FULL)
        again = reference.tokens[0]
        rows[full].glue_share = share_of_glue(lambda: contenders[full].step(again, batch), steps=turns.steps + 1)
        rows += [_peer_row(peer, times[peer.text], batch, reference) for peer in others]
    _compare(rows)
    return rows


def _baseline(spec: PeerSpec, model: PreTrainedModel, prompt: Prompt, batch: int, steps: int) -> Contender:
    if spec.name == "hf":
        return stock(model, prompt, batch)
    return repaired_stock(model, prompt, batch, steps + steps)


def _race(
    contenders: Sequence[Contender],
    peers: Sequence[Peer],
    tokens: Sequence[int],
    batch: int,
    turns: Turns,
    tell: Callable[[str], object],
) -> tuple[dict[str, list[float]], list[list[Tensor]]]:
    """Take turns. -> milliseconds by name, and the logits [batch, V] of every contender after every step."""
    times: dict[str, list[float]] = {name: [] for name in [c.name for c in contenders] + [p.text for p in peers]}
    logits: list[list[Tensor]] = [[] for _ in contenders]
    start = time.perf_counter()

    def turn(steps: int) -> None:
        for contender, kept in zip(contenders, logits, strict=True):
            for _ in range(steps):
                began = time.perf_counter()
                kept.append(contender.step(tokens[len(kept)], batch))
                times[contender.name].append((time.perf_counter() - began) * 1e3)
        for peer in peers:
            times[peer.text] += peer.steps(steps)

    turn(1)
    left = (time.perf_counter() - start) * turns.rounds * turns.steps
    tell(f"measuring for {left:.0f} s at most" if left < turns.limit else f"measuring for about {turns.limit:.0f} s")
    start = time.perf_counter()
    for done in range(turns.rounds):
        if done and (time.perf_counter() - start) * (done + 1) / done > turns.limit:
            break
        turn(turns.steps)
    return {name: found[1:] for name, found in times.items()}, logits


def _verdict(name: str, logits: list[Tensor], reference: Reference) -> Verdict:
    """Compare a contender's steps with the reference under the same policy, or under the full cache."""
    own = torch.stack(logits, dim=1)  # [batch, steps, V]
    full = reference.logits[FULL][: own.shape[1]]
    truth = reference.logits.get(name, reference.logits[FULL])[: own.shape[1]]
    difference = float((own - truth).abs().nan_to_num(nan=math.inf).max())
    allowed = max(reference.allowed, OF_POLICY * float((truth - full).abs().max()))
    best = truth.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * min(allowed, max(difference, reference.allowed))
    return Verdict(difference, allowed, bool((own.argmax(-1) == truth.argmax(-1))[:, clear].all()))


def _peer_row(peer: Peer, ms: list[float], batch: int, reference: Reference) -> Row:
    pairs = zip(peer.tokens, reference.tokens, strict=False)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(peer.tokens), len(reference.tokens)))
    return Row(
        *(peer.text, peer.cache_bytes, ms, batch),
        tokens_alike=alike,
        prefill_s=peer.prefill_s,
        settings=peer.settings,
    )


def _compare(rows: list[Row]) -> None:
    """Fill in ratios, where both sides passed."""
    for name, attribute in (("hf", "over_hf"), ("repaired", "over_repaired")):
        baseline = next((row for row in rows if row.name == name and row.passed), None)
        for row in rows:
            if baseline and row.passed:
                setattr(row, attribute, row.tokens_per_s / baseline.tokens_per_s)


def check_peers(peers: Sequence[PeerSpec], model: str | None, device: str) -> None:
    """Refuse peers that cannot run before anything is loaded; raises `InputError`."""
    for spec in peers:
        if spec.name not in IN_PROCESS and device != "cpu":
            raise InputError(f"{spec.name} runs on a CPU here: leave it out of --peers with --device {device}")
        if spec.name == "llamacpp" and model is not None:
            raise InputError("llamacpp has the demo model's weights only: leave out --model, or llamacpp")
