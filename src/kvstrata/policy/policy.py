"""A policy is a table: layer range x phase -> rule. A rule is a record of small frozen values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvstrata.core import PHASES, PROMPT, Column, LayerShape, Phase, Plan, Signals, SpecError, Tier
from kvstrata.kernels.echo import Band
from kvstrata.policy.budget import Budget, Everything, HeadTokens
from kvstrata.policy.confidence import Steady
from kvstrata.policy.granularity import Token
from kvstrata.policy.merging import Merging
from kvstrata.policy.preference import SHARE, ByPreference, carried
from kvstrata.policy.protect import Protect
from kvstrata.policy.scorers import Scorer
from kvstrata.policy.scorers.recency import Recency
from kvstrata.policy.select import select
from kvstrata.policy.shares import ByHead, Shares
from kvstrata.policy.tiering import ByAge, Coding, Native, Room, Tiering
from kvstrata.policy.trigger import Every, OnOverflow


@dataclass(frozen=True, slots=True)
class Rule:
    """What one layer does in one phase. Refuses at construction what can never work."""

    scorer: Scorer
    budget: Budget
    granularity: Token = Token()
    tiers: Tiering = Native()
    trigger: OnOverflow | Every = OnOverflow()
    protect: Protect = Protect()
    sampled: bool = False  # whether its scorer looks only at forwards after which the rule acts
    merge: Merging | None = None  # what becomes of values that are dropped; None: nothing

    def __post_init__(self) -> None:
        if isinstance(self.budget, HeadTokens) and not self.granularity.per_head:
            raise SpecError("a budget per head needs heads=each or heads=pooled, since shared heads keep one set")
        for cap in self.budget.counts:
            sinks, recent = self.protect.resolve(cap)
            if sinks + recent > cap:
                raise SpecError(
                    f"sinks={sinks} and recent={recent} protect {sinks + recent} tokens, more than budget={cap}: "
                    "raise the budget or protect fewer"
                )
        coding = self.tiers.coding
        if self.merge and self.tiers.ranks:
            raise SpecError("values cannot be merged where windows become exact again as their codes gave them")
        if self.merge and self.merge.of_attention and self.scorer.mass is None:
            raise SpecError("what is merged by its attention needs a scorer that reads attention, as accumulated-mass")
        if self.divided:
            self.divided.check(self.scorer.mass, self.scorer.columns)
        codec = coding and coding.record
        apart = codec and not self.tiers.ranks and codec.unit > 1 and not codec.by_page
        if coding and apart and not isinstance(self.budget, Everything):
            raise SpecError(
                f"group={coding.group} and key_space={coding.key_space} code entries that are only dropped together: "
                "use them with a policy that keeps everything or routes windows, or leave them out"
            )

    def around(self, budget: Budget) -> Rule:
        """The same rule with `budget` on average."""
        return replace(self, budget=self.budget.around(budget))

    @property
    def needs(self) -> frozenset[str]:
        """Every optional signal read: "mass", "keys", "logits", "processed-logits"; "rotary" to code keys before it."""
        coding = self.tiers.coding
        own = {"mass"} if self.scorer.mass else set[str]()
        own |= {"rotary"} if coding and coding.key_space == "pre" else set[str]()
        return self.signals | self.budget.needs | own

    @property
    def signals(self) -> frozenset[str]:
        """Optional fields of `Signals` that it reads, and what its scorer needs of the model."""
        return self.scorer.needs | self.merge.needs if self.merge else self.scorer.needs

    @property
    def columns(self) -> tuple[Column, ...]:
        """State per entry: the scorer's, what merging remembers, the layer's share of a budget, what was a prompt."""
        own = ((SHARE,) if self.divided else ()) + ((PROMPT,) if self.protect.prompt else ())
        return tuple(dict.fromkeys((*self.scorer.columns, *(self.merge.columns if self.merge else ()), *own)))

    @property
    def divided(self) -> ByPreference | None:
        """Its budget, if the layers of a cache divide it by their attention."""
        return self.budget if isinstance(self.budget, ByPreference) else None

    @property
    def observes(self) -> bool:
        """Whether its scorer sums something up over forwards; other columns are written from elsewhere."""
        elsewhere = self.scorer.asks or self.scorer.surrogate or "repetition" in self.scorer.needs
        return bool(self.scorer.columns) and (self.scorer.mass is not None or not elsewhere)

    @property
    def across(self) -> bool:
        """Whether it chooses over all layers at once."""
        return self.granularity.heads == "global"

    @property
    def at_step_end(self) -> bool:
        """Whether it can act only when the forward has ended: with the step's logits, or over all layers."""
        return bool(self.budget.needs) or self.ends

    @property
    def together(self) -> bool:
        """Whether layers settle together: they compete with one another, or divide a budget now."""
        return self.across or (self.divided is not None and self.divided.preference is not None)

    @property
    def ends(self) -> bool:
        """Whether it waits for the end of the forward and not for logits: for other layers, or for a repetition."""
        return self.together or "repetition" in self.scorer.needs

    def limits(self, seen: list[int], confidence: list[float] | None, shape: LayerShape) -> list[tuple[int, ...]]:
        """Entries each row may keep: one number per row, or one per head. Confidence counts as 0 where unknown."""
        sure = confidence or [0.0] * len(seen)
        return [self.budget.limits(tokens, c, shape) for tokens, c in zip(seen, sure, strict=True)]

    def plan(self, signals: Signals, limits: list[tuple[int, ...]], shape: LayerShape) -> Plan:
        """Score, select and assign tiers. Pure; `signals.protected` must come from `protected`."""
        z = self.score(signals)
        if self.tiers.ranks:
            return Plan(self.tiers.route(z, signals, self._room(limits, shape, z.device)), _nans(z, signals))
        return self.plan_of(z, self._keep(z, signals, limits), signals)

    def score(self, signals: Signals) -> Tensor:
        """The worth of every entry, [B, 1, N] where heads must agree, else [B, H, N]."""
        z = self.scorer.score(signals)
        heads = signals.position.shape[1]
        if z.shape[1] > heads or (heads > 1 and self._heads_agree(signals.position)):
            z = z.mean(dim=1, keepdim=True)
        return z

    def plan_of(self, z: Tensor, keep: Tensor, signals: Signals) -> Plan:
        """The plan that keeps these entries [B, 1|H, N] bool of scores z."""
        tier = self.tiers.assign(keep, signals)
        columns = carried(signals) if self.divided else {}
        if self.merge is None:
            return Plan(tier, _nans(z, signals), columns=columns)
        merges, changed = self.merge.merges(z, (tier != Tier.DROP) & signals.valid, signals)
        return Plan(tier, _nans(z, signals), merges, {**columns, **changed})

    def _keep(self, z: Tensor, signals: Signals, limits: list[tuple[int, ...]]) -> Tensor:
        """Which entries [B, 1|H, N] stay."""
        shape = signals.position.shape
        protected, valid = signals.protected.expand(shape), signals.valid.expand(shape)
        if self.budget.threshold is not None:  # NaN stays
            one = torch.ones(shape[0], 1, dtype=torch.long, device=z.device)
            best = select(z.expand(shape), signals.position, one, protected, valid)
            return ((z >= self.budget.threshold) | z.isnan() | best) & valid
        pooled = self.granularity.sums
        cap = torch.tensor(limits, device=z.device)
        if self.trigger.room > 1:  # only where more is stored than allowed: a row must not pay for its neighbour
            target = torch.tensor([[self.trigger.target(n) for n in caps] for caps in limits], device=z.device)
            stored, full = valid.sum(dim=-1), cap.expand(shape[:2])
            if pooled:
                stored, full = stored.sum(dim=1, keepdim=True), full.sum(dim=1, keepdim=True)
            cap = torch.where(stored > full, target, cap)
        if pooled and self.granularity.safe:
            safe = (cap.double() * float(self.granularity.safe)).long()
            protected = protected | select(z.expand(shape), signals.position, safe, protected, valid)
        return select(z.expand(shape), signals.position, cap, protected, valid, pooled)

    def _room(self, limits: list[tuple[int, ...]], shape: LayerShape, device: torch.device) -> Room:
        """The bytes that `limits` tokens take in an uncompressed cache."""
        bounds = torch.tensor([[self.protect.resolve(cap) for cap in caps] for caps in limits], device=device)
        total = torch.tensor(limits, dtype=torch.float64, device=device) * shape.token_bytes - shape.frame_bytes
        sizes = shape.entry_bytes, shape.unit_bytes, self.protect.most_sinks
        return Room(total, *sizes, bounds[..., 0], bounds[..., 1])

    def _heads_agree(self, position: Tensor) -> bool:
        """Whether heads that may differ hold the same tokens, of which a shared rule then makes one choice."""
        return not self.granularity.per_head and bool((position == position[:, :1]).all())

    def overruns(self, limits: list[tuple[int, ...]]) -> int:
        """How many rows and heads have more tokens that stay whatever their score than they may keep."""
        return sum(sum(self.protect.resolve(cap)) + self.tiers.reserve > cap for caps in limits for cap in caps)

    def protected(self, position: Tensor, valid: Tensor, seen: list[int], limits: list[tuple[int, ...]]) -> Tensor:
        """[B, 1|H, N] bool: sinks and recent tokens of every row, and of every head where budgets differ."""
        if self.protect == Protect():
            return torch.zeros((), dtype=torch.bool, device=position.device).expand(position.shape)
        bounds = [[self.protect.resolve(cap) for cap in caps] for caps in limits]  # [B][1|H] (sinks, recent)
        if len(set(seen)) == len({pair for row in bounds for pair in row}) == 1:
            first, last = bounds[0][0]
            return ((position < first) | (position >= seen[0] - last)) & valid
        sinks = torch.tensor([[s for s, _ in row] for row in bounds], device=position.device)[..., None]
        oldest = [[tokens - r for _, r in row] for tokens, row in zip(seen, bounds, strict=True)]
        recent = torch.tensor(oldest, device=position.device)[..., None]
        return ((position < sinks) | (position >= recent)) & valid


def _nans(z: Tensor, signals: Signals) -> Tensor:
    return (z.isnan() & signals.valid).sum()


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers first .. last (both included, counted over the model's layers) and their rule for each phase.

    A phase without a rule keeps everything that arrives in it.
    """

    prefill: Rule | None
    decode: Rule | None
    first: int = 0
    last: int | None = None  # None: the last layer of the model

    def covers(self, layer: int) -> bool:
        """Whether the range holds this layer."""
        return self.first <= layer and (self.last is None or layer <= self.last)


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept, layer by layer and phase by phase. Hashable, immutable, without any state of a run."""

    name: str
    table: tuple[LayerRange, ...] = field(default=())
    made_for: frozenset[str] = frozenset()  # identities of the models that it was calibrated on, if it was
    layers: int | None = None  # of the models that it is for, where it has a line for each

    def __post_init__(self) -> None:
        ranges = sorted(self.table, key=lambda entry: entry.first)
        for before, after in pairwise(ranges):
            if before.last is None or before.last >= after.first:
                raise SpecError(
                    f"policy {self.name!r}: two ranges hold layer {after.first}; let them end before each other"
                )

    @classmethod
    def everywhere(cls, name: str, prefill: Rule | None, decode: Rule | None) -> Policy:
        """The same rules in every layer."""
        return cls(name, (LayerRange(prefill, decode),))

    def rule(self, layer: int, phase: Phase) -> Rule | None:
        """The rule of a layer in a phase; None keeps everything. Raises `SpecError` for a layer no range covers."""
        for entry in self.table:
            if entry.covers(layer):
                return entry.prefill if phase == "prefill" else entry.decode
        raise SpecError(f"policy {self.name!r} says nothing of layer {layer}: add a range that covers it")

    def rules(self, layer: int) -> dict[Phase, Rule | None]:
        """Both rules of a layer."""
        return {phase: self.rule(layer, phase) for phase in PHASES}

    def columns(self, layer: int) -> tuple[Column, ...]:
        """State per entry that the layer's rules keep."""
        found = [column for rule in self.rules(layer).values() if rule for column in rule.columns]
        return tuple(dict.fromkeys(found))

    def codings(self, layer: int) -> dict[Tier, Coding]:
        """How entries of each coded tier of a layer are coded. Raises `SpecError` where two rules disagree."""
        found: dict[Tier, Coding] = {}
        for rule in self.rules(layer).values():
            coding = rule.tiers.coding if rule else None
            if coding and found.setdefault(coding.tier, coding) != coding:
                raise SpecError(
                    f"layer {layer}: prefill and decode code {coding.tier.name} in two ways: make them agree"
                )
        return found

    def asks(self, layer: int) -> Band | None:
        """Who asks for entries of a layer. Raises `SpecError` where two rules differ in it."""
        found = {rule.scorer.asks for rule in self.rules(layer).values() if rule and rule.scorer.asks}
        if len(found) > 1:
            raise SpecError(f"layer {layer}: prefill and decode ask in two ways: give both the same echo")
        return found.pop() if found else None

    @property
    def surrogates(self) -> frozenset[str]:
        """Files of the surrogates whose word some rule takes."""
        return frozenset(rule.scorer.surrogate for rule in self._every_rule() if rule.scorer.surrogate)

    def per_head(self, layer: int) -> bool:
        """Whether heads of the layer may hold different tokens."""
        return any(rule.granularity.per_head for rule in self.rules(layer).values() if rule)

    @property
    def needs(self) -> frozenset[str]:
        """Every optional signal that some rule of the policy reads; "end" where one waits for a forward's end."""
        end = {"end"} if any(rule.ends for rule in self._every_rule()) else set[str]()
        return frozenset(end).union(*(rule.needs for rule in self._every_rule()))

    @property
    def across(self) -> bool:
        """Whether some rule chooses over all layers at once."""
        return any(rule.across for rule in self._every_rule())

    @property
    def at_step_end(self) -> bool:
        """Whether some rule can act only when the forward has ended."""
        return any(rule.at_step_end for rule in self._every_rule())

    @property
    def only_codes(self) -> bool:
        """Whether it drops nothing whatever the budget, and codes."""
        return self.codes and all(isinstance(rule.budget, Everything) for rule in self._every_rule())

    @property
    def routes(self) -> bool:
        """Whether some rule decides by rank what is coded."""
        return any(rule.tiers.ranks for rule in self._every_rule())

    @property
    def codes(self) -> bool:
        """Whether some rule codes entries."""
        return any(rule.tiers.coding for rule in self._every_rule())

    @property
    def steadied(self) -> tuple[float, Steady] | None:
        """How confidence is steadied, and for which tau. Raises `SpecError` where rules disagree."""
        found = {rule.budget.steadied for rule in self._every_rule() if rule.budget.needs}
        if len(found) > 1:
            raise SpecError(f"policy {self.name!r} steadies confidence in several ways: give one for all layers")
        return found.pop() if found else None

    def _every_rule(self) -> list[Rule]:
        return [rule for entry in self.table for rule in (entry.prefill, entry.decode) if rule]

    def with_budget(self, budget: Budget) -> Policy:
        """The same policy with `budget` on average, in every layer and phase that has a rule.

        A budget that depends on confidence or depth keeps its form and takes `budget` as its mean.
        """
        return self.map_rules(lambda rule: rule.around(budget))

    def with_protect(self, sinks: int | None = None, recent: int | None = None) -> Policy:
        """The same policy with explicit protected tokens in place of the preset's; None leaves a part as it is."""

        def change(rule: Rule) -> Rule:
            given = {name: n for name, n in (("sinks", sinks), ("recent", recent)) if n is not None}
            return replace(rule, protect=replace(rule.protect, **given))

        return self if sinks is None and recent is None else self.map_rules(change)

    def with_room(self, room: int) -> Policy:
        """The same policy making room for `room` tokens whenever it acts in decoding."""
        if room == 1:
            return self
        changed = (e.decode and replace(e.decode, trigger=OnOverflow(room)) for e in self.table)
        return replace(self, table=tuple(replace(e, decode=rule) for e, rule in zip(self.table, changed, strict=True)))

    def with_prompt(self) -> Policy:
        """The same policy for what is generated, prompts kept whole. Raises `SpecError` where it drops nothing then."""
        if any(rule.tiers.ranks or rule.across or rule.divided for rule in self._every_rule()):
            raise SpecError(
                f"policy {self.name!r} cannot have prompt=keep: its budget is not one of each layer's tokens"
            )
        if not any(entry.decode for entry in self.table):
            raise SpecError(f"policy {self.name!r} acts on prompts only, so with prompt=keep it would keep everything")

        def change(rule: Rule) -> Rule:
            return replace(rule, protect=replace(rule.protect, prompt=True))

        return replace(
            self,
            table=tuple(replace(e, prefill=None, decode=e.decode and change(e.decode)) for e in self.table),
        )

    def with_heads(self, shares: Shares) -> Policy:
        """The same policy with its budget shared out over heads, each of which keeps its own tokens.

        Raises `SpecError` where it has a budget of its own for every layer or head, or none that could be shared out.
        """

        def change(rule: Rule) -> Rule:
            if not rule.budget.even or rule.tiers.ranks:
                raise SpecError(
                    f"policy {self.name!r} cannot have heads=FILE: its budget is not one number for all heads"
                )
            return replace(rule, budget=ByHead(rule.budget, shares), granularity=Token("each"))

        return self.map_rules(change)

    @property
    def models(self) -> frozenset[str]:
        """Identities of the models that it, or its budgets, were calibrated on."""
        shared = (r.budget.shares.model for r in self._every_rule() if isinstance(r.budget, ByHead))
        return self.made_for.union(shared)

    def with_tiers(self, tiers: ByAge) -> Policy:
        """The same policy with entries in coded tiers; a phase that keeps everything does so in them."""
        keep_all = Rule(Recency(), Everything(), tiers=tiers)
        table = tuple(replace(e, prefill=e.prefill or keep_all, decode=e.decode or keep_all) for e in self.table)
        return replace(self, table=table).map_rules(lambda rule: replace(rule, tiers=tiers))

    def map_rules(self, change: Callable[[Rule], Rule]) -> Policy:
        """The same policy with every rule changed."""
        table = tuple(
            replace(e, prefill=e.prefill and change(e.prefill), decode=e.decode and change(e.decode))
            for e in self.table
        )
        return replace(self, table=table)
