"""A policy of the library read in blocks: how many a request keeps, and which of them go.

A block of the paged cache is one entry to the library's scorers and to its selector: what it is worth is the sum over
its tokens, all heads and all layers that share it. The block that is being filled always stays and is not counted.
Nothing here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvstrata.core import PHASES, LayerShape, Phase, Signals, SpecError
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.scorers import Scorer
from kvstrata.policy.select import select
from kvstrata.policy.spec import YAML, parse_policy, read_options
from kvstrata.policy.strategy import STRATEGY, Strategy, read_strategy, strategy_file
from kvstrata_vllm.refusals import PATTERNS, refuse_options, refuse_rules
from kvstrata_vllm.settings import MOST_CLASSES, Settings

SURE, UNSURE = 1.0, 0.0


@dataclass(frozen=True, slots=True)
class BlockRule:
    """What one layer class does in one phase, in blocks of `block_size` tokens."""

    rule: Rule
    block_size: int
    shape: LayerShape

    @property
    def scorer(self) -> Scorer:
        """What ranks blocks."""
        return self.rule.scorer

    @property
    def measured(self) -> bool:
        """Whether workers must measure something before blocks can be ranked: attention, keys or a surrogate's word."""
        return self.scorer.mass is not None or bool(self.scorer.needs)

    @property
    def confident(self) -> bool:
        """Whether the budget follows the model's confidence."""
        return bool(self.rule.budget.needs)

    def tokens(self, seen: int, confidence: float = UNSURE) -> int:
        """Tokens that a request may keep of `seen`."""
        return self.rule.budget.limits(seen, confidence, self.shape)[0]

    def blocks(self, seen: int, confidence: float = UNSURE) -> int:
        """Whole blocks that it may keep of `seen` tokens, at least one."""
        return max(1, self.tokens(seen, confidence) // self.block_size)

    def least(self, seen: int) -> int:
        """Blocks that it may keep whatever the confidence."""
        return min(self.blocks(seen, SURE), self.blocks(seen, UNSURE))

    def peak(self, seen: int) -> int:
        """The most whole blocks that stay of `seen` tokens: the budget, or what is protected where that is more."""
        if self.rule.budget.threshold is not None:
            return seen // self.block_size
        most = 0
        for confidence in (SURE, UNSURE):
            sinks, recent = self.rule.protect.resolve(self.tokens(seen, confidence))
            protected = -(-sinks // self.block_size) + -(-recent // self.block_size)
            most = max(most, self.blocks(seen, confidence), protected)
        return min(most, seen // self.block_size)

    def victims(self, live: Sequence[int], seen: int, confidence: float, measured: Sequence[float] | None) -> list[int]:
        """Numbers of the blocks that go of those in `live`, which are whole and in order; the worst one first.

        seen: tokens of the request so far, in all blocks. measured: what the workers found for every block of the
        request, dropped ones included; None where the scorer needs nothing.
        """
        cap = self.blocks(seen, confidence)
        threshold = self.rule.budget.threshold
        if threshold is None and len(live) <= cap:
            return []
        signals = self._signals(live, seen, confidence, measured)
        z = signals.mass if self.measured and not self.scorer.columns else self.rule.score(signals)
        assert z is not None
        if threshold is not None:
            keep = (z >= threshold) | z.isnan() | signals.protected
        else:
            target = max(1, self.rule.trigger.target(self.tokens(seen, confidence)) // self.block_size)
            limit = torch.tensor([[min(cap, target)]])
            keep = select(z, signals.position, limit, signals.protected, signals.valid)
        worst = z[0, 0].nan_to_num(nan=-torch.inf).argsort(stable=True).tolist()
        dropped = (~keep[0, 0]).tolist()
        return [live[i] for i in worst if dropped[i]]

    def _signals(self, live: Sequence[int], seen: int, confidence: float, measured: Sequence[float] | None) -> Signals:
        """Blocks as entries [1, 1, N]: the position of a block is that of its first token."""
        size = self.block_size
        position = torch.tensor(live, dtype=torch.int32)[None, None] * size
        sinks, recent = self.rule.protect.resolve(self.tokens(seen, confidence))
        protected = (position < sinks) | (position + size > seen - recent)
        found = torch.zeros(position.shape)
        if measured is not None:
            found = torch.tensor([measured[i] for i in live], dtype=torch.float32)[None, None]
        if self.scorer.surrogate:  # the mean over a block's tokens; that of the first block would hide its sink
            found, protected = found / size, protected | (position == 0)
        columns = {column.name: found for column in self.scorer.columns}
        return Signals(
            layer=self.shape.layer,
            step=seen,
            position=position,
            valid=torch.ones_like(position, dtype=torch.bool),
            protected=protected,
            columns=columns,
            queries=(1,),
            mass=found,
            keys=None,
        )


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers that share their blocks, and what they do. A phase without a rule keeps everything that comes in it."""

    layers: tuple[int, ...]
    block_size: int
    prefill: BlockRule | None
    decode: BlockRule | None

    def rule(self, phase: Phase) -> BlockRule | None:
        """What it does in a phase."""
        return self.prefill if phase == "prefill" else self.decode

    @property
    def rules(self) -> tuple[BlockRule, ...]:
        """Of both phases, each once."""
        return tuple(dict.fromkeys(rule for rule in map(self.rule, PHASES) if rule))

    @property
    def measured(self) -> tuple[BlockRule, ...]:
        """Rules that workers must measure something for, one for each scorer."""
        return tuple({rule.scorer: rule for rule in reversed(self.rules) if rule.measured}.values())

    def number(self, rule: BlockRule) -> int:
        """The place among `measured` of the rule that measures for this one."""
        return [other.scorer for other in self.measured].index(rule.scorer)

    def peak(self, prompt: int, generated: int, chunk: int, lag: int) -> int:
        """The most blocks that a request of these tokens ever holds when it is fed up to `chunk` tokens a step.

        What a step fills is there before something is dropped for it, and that is freed `lag` steps later.
        """
        size, total = self.block_size, prompt + generated
        filled = (-(-min(chunk, total) // size) + 1) * (1 + lag)
        prefilled = self.prefill.peak(prompt) if self.prefill else -(-prompt // size)
        decoded = self.decode.peak(total) if self.decode else prefilled + -(-generated // size)
        return min(max(prefilled, decoded) + filled, -(-total // size))

    def longest(self, tokens: int, chunk: int, lag: int) -> int:
        """`peak` of any request of so many tokens, whatever part of them is its prompt."""
        return max(self.peak(tokens, 0, chunk, lag), self.peak(0, tokens, chunk, lag))


def read_policy(settings: Settings, block_size: int | None = None) -> tuple[str, Policy]:
    """The name and the policy of a configuration. Raises `SpecError` for what cannot be had in blocks."""
    text = settings.policy.strip()
    if text.endswith(YAML) and not text.startswith(STRATEGY):
        raise SpecError(f"{text}: vLLM takes a policy's text, as in h2o:budget=25%, or polykv:FILE, not a policy file")
    if text.startswith(STRATEGY):
        _refuse_patterns(text)
        if settings.classes != 1:
            raise SpecError(
                f"classes={settings.classes}: the file of {text} says itself which layers differ; leave it out"
            )
        name = STRATEGY.removesuffix(":")
    else:
        name, options = read_options(text)
        refuse_options(name, options)
    policy = parse_policy(text)
    if block_size is not None:
        refuse_rules(policy, block_size)
    return name, policy


def _refuse_patterns(text: str) -> None:
    strategy = _strategy(text)
    for choice in (*strategy.prefill, *strategy.decode):
        if choice.pattern in PATTERNS:
            raise SpecError(f"{text}: the pattern {choice.pattern} cannot run in vLLM: it {PATTERNS[choice.pattern]}")


@lru_cache
def layer_classes(settings: Settings, num_layers: int, block_size: int, token_bytes: int) -> tuple[LayerClass, ...]:
    """Layers of a model of `num_layers` by what they do, in order of their first one; uniform policies by depth.

    token_bytes: key and value of one token in one layer, over all its heads on all ranks. Raises `SpecError`.
    """
    _, policy = read_policy(settings, block_size)
    if settings.policy.strip().startswith(STRATEGY):
        given = len(_strategy(settings.policy).prefill)
        if given != num_layers:
            raise SpecError(f"{settings.policy} is for a model of {given} layers, and this one has {num_layers}")
    groups: dict[object, list[int]] = {}
    for layer in range(num_layers):
        part = layer * settings.classes // num_layers
        groups.setdefault((part, policy.rule(layer, "prefill"), policy.rule(layer, "decode")), []).append(layer)
    if len(groups) > MOST_CLASSES:
        raise SpecError(
            f"{settings.policy} treats layers in {len(groups)} ways, and vLLM can hold {MOST_CLASSES} tables of "
            "blocks: calibrate a file with fewer patterns and budgets"
        )
    found: list[LayerClass] = []
    for layers in groups.values():
        shape = LayerShape(layers[0], layers[0], num_layers, 1, token_bytes, 1, token_bytes)
        rules = [policy.rule(layers[0], phase) for phase in PHASES]
        prefill, decode = (BlockRule(rule, block_size, shape) if rule else None for rule in rules)
        found.append(LayerClass(tuple(layers), block_size, prefill, decode))
    return tuple(found)


def _strategy(text: str) -> Strategy:
    return read_strategy(strategy_file(text))
