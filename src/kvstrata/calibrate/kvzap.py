"""Training KVzap's surrogate: pairs of hidden states and an oracle's scores from texts, then a ridge or small MLPs.

Collection writes one file per document and goes on where it stopped. Targets are ln of the score (KVzap, section 3): of
KVzip+ as published, or of another scorer; echo needs no repetition, so a document takes a third of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.core import Column, InputError
from kvstrata.files import whole
from kvstrata.hf import compress
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.parts import attention_modules
from kvstrata.policy.scorers.learned import REPEATED, REPEATED_PLUS
from kvstrata.policy.scorers.repeat import ASKED
from kvstrata.policy.surrogate import predicted

Kind = Literal["linear", "mlp"]
Target = Literal["kvzip+", "kvzip", "echo"]
COLUMNS: dict[Target, Column] = {"kvzip+": REPEATED_PLUS, "kvzip": REPEATED, "echo": ASKED}
Weights = list[Tensor]
REMOVED = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95)  # shares whose thresholds go into the file
HELD_OUT = 0.1  # of the documents
RIDGE = 1.0  # alpha of the published recipe
EPOCHS, BATCH, RATE, CLIP, DECAY = 15, 512, 5e-3, 1.0, 0.01  # of the published recipe
LEAST_OUT = 4  # tokens at the beginning that everything attends to, which are left out
UNASKED = 8  # the newest tokens of a document, of which an echo does not say everything


@dataclass(frozen=True, slots=True)
class Fit:
    """How well predictions follow the oracle on documents that were not trained on."""

    r2: list[list[float]]  # [L][H] squared correlation
    auc: float  # how often an entry of the oracle's upper half is ranked above one of the lower
    thresholds: dict[str, float]  # by share removed


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Sequence[int]],
    folder: Path,
    per_document: int,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
    target: Target = "kvzip+",
) -> list[Path]:
    """Write hidden states [L, n, hidden] fp16 and scores [L, H, n] of n tokens drawn from each document."""
    found: list[Path] = []
    for number, ids in enumerate(documents):
        file = folder / f"document-{number:04d}.safetensors"
        if not file.is_file():
            draw = torch.Generator().manual_seed(seed * 100003 + number)
            count = len(ids) - LEAST_OUT - (UNASKED if target == "echo" else 0)
            places = torch.randperm(count, generator=draw)[:per_document].sort().values + LEAST_OUT
            hidden, scores = pairs(model, tokenizer, ids, places, target)
            with whole(file) as scratch:
                save_file({"hidden": hidden.half().contiguous(), "scores": scores.contiguous()}, scratch)
        found.append(file)
        tick()
    return found


def pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    places: Tensor,
    target: Target = "kvzip+",
) -> tuple[Tensor, Tensor]:
    """Hidden states [L, n, hidden] at some places of a document, and ln of their scores [L, H, n]."""
    hidden: dict[int, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = cast(Tensor, kwargs.get("hidden_states", args[0] if args else None))
        if states.shape[1] == len(ids):  # not of the repetition, which is longer
            hidden.setdefault(cast(int, module.layer_idx), states[0, places].float().cpu())

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in attention_modules(model)]
    try:
        with compress(model, f"{target}:budget=100%", tokenizer=tokenizer) as cache:
            cast(Any, model)(torch.tensor([ids], device=model.device), logits_to_keep=1, **{CACHE_KEYWORD: cache})
            columns = [layer.store.column(COLUMNS[target].name)[0][:, places] for layer in cache.strata.values()]
            layers = list(cache.strata)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([hidden[layer] for layer in layers]), torch.stack(columns).log().cpu()


def read_pairs(files: Sequence[Path], layer: int) -> tuple[Tensor, Tensor]:
    """Hidden states [n, hidden] and scores [n, H] of one layer in all files."""
    parts = [load_file(file) for file in files]
    return (
        torch.cat([part["hidden"][layer].float() for part in parts]),
        torch.cat([part["scores"][layer].T for part in parts]),
    )


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Documents to train on, and to judge by, taken evenly from all texts. Raises `InputError` for too few."""
    if len(files) < 2:
        raise InputError("one document to train on and one to judge by are the least: give more --documents")
    every = max(2, round(1 / HELD_OUT))
    judged = [file for i, file in enumerate(files) if i % every == every - 1] or [files[-1]]
    return [file for file in files if file not in judged], judged


def train(
    files: Sequence[Path], kind: Kind, seed: int = 0, tick: Callable[[], object] = lambda: None
) -> tuple[list[Weights], Fit]:
    """Fit every layer and judge by documents that were held out."""
    trained, judged = split(files)
    layers = load_file(files[0])["hidden"].shape[0]
    weights: list[Weights] = []
    r2: list[list[float]] = []
    said: list[Tensor] = []
    true: list[Tensor] = []
    for layer in range(layers):
        x, y = read_pairs(trained, layer)
        made = ridge(x, y) if kind == "linear" else mlp(x, y, seed + layer)
        weights.append(made)
        x, y = read_pairs(judged, layer)
        guess = predicted(made, x)
        r2.append([round(float(correlation(guess[:, h], y[:, h]) ** 2), 4) for h in range(y.shape[1])])
        said.append(guess.flatten())
        true.append(y.flatten())
        tick()
    every = torch.cat(said)
    thresholds = {f"{share:g}": round(_quantile(every, share), 4) for share in REMOVED}
    return weights, Fit(r2, round(auc(every, torch.cat(true)), 4), thresholds)


def ridge(x: Tensor, y: Tensor) -> Weights:
    """W [H, hidden], b [H] of a ridge regression with an unpunished intercept, in closed form."""
    mean_x, mean_y = x.mean(dim=0), y.mean(dim=0)
    x, y = (x - mean_x).double(), (y - mean_y).double()
    gram = x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
    w = torch.linalg.solve(gram, x.T @ y).T.float()
    return [w, mean_y - w @ mean_x]


def mlp(x: Tensor, y: Tensor, seed: int) -> Weights:
    """Weights of an MLP with hidden / 8 units; targets are standardised in training, and W2, b2 take that back."""
    torch.manual_seed(seed)
    mean, std = y.mean(dim=0), y.std(dim=0).clamp_min(1e-6)
    target, scale = (y - mean) / std, x.pow(2).mean().sqrt().clamp_min(1e-6)
    net = nn.Sequential(nn.Linear(x.shape[1], x.shape[1] // 8), nn.GELU(), nn.Linear(x.shape[1] // 8, y.shape[1]))
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(x)).split(BATCH):
            loss = nn.functional.mse_loss(net(x[part] / scale), target[part])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimiser.step()
            schedule.step()
    first, last = cast(nn.Linear, net[0]), cast(nn.Linear, net[2])
    parts = (first.weight / scale, first.bias, last.weight * std[:, None], last.bias * std + mean)
    return [part.detach() for part in parts]


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's, 0 where one of both does not vary."""
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-12)


def auc(said: Tensor, true: Tensor) -> float:
    """How often an entry of the upper half of `true` is ranked above one of the lower half."""
    upper = true > true.median()
    rank = said.argsort().argsort().double() + 1
    n, m = int(upper.sum()), int((~upper).sum())
    return float((rank[upper].sum() - n * (n + 1) / 2) / max(1, n * m))


def _quantile(x: Tensor, q: float) -> float:
    return float(x.sort().values[min(len(x) - 1, int(q * len(x)))])
