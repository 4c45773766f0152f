"""One layer of the cache: its clock, its rules and its store.

A forward is settled when attention ends: new entries are appended, attention runs over what is stored, scorers observe,
and where a rule is due its plan is applied. It waits where something is still missing: the step's logits, other layers,
the verdict on drafts, or the end of a prompt in parts; at the latest it settles before the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvstrata.cache.asking import Asking
from kvstrata.cache.fed import Fed
from kvstrata.cache.limits import exceeds, guarding, limits_of
from kvstrata.cache.model import NOTHING, Model
from kvstrata.cache.shown import marked, shown
from kvstrata.cache.step import INTERRUPTED, MOST_DRAFTS, Events, Mode, Pending, check_own
from kvstrata.cache.stored import attend_stored
from kvstrata.cache.waiting import begun, drafted, first_sums, joined, put_off, seeded, sum_late, with_queries
from kvstrata.core import InputError, LayerShape, Phase, Plan, Signals, SpecError, Tier
from kvstrata.kernels.attention import KernelName, Softmax
from kvstrata.policy.policy import Policy, Rule
from kvstrata.store import Account, Arenas, LayerStore

TOO_MUCH = 1.0  # squared error of coded keys over what tells keys apart, from which on they say nothing
PREFILL_ABOVE = 16  # more queries than this at once are a prompt, not drafts


class Layer:
    """Keys and values of one layer under a policy. Rows of a batch may have different lengths."""

    _attention = staticmethod(attend_stored)
    _asking = Asking

    def __init__(
        self,
        index: int,
        depth: int,
        num_layers: int,
        policy: Policy,
        account: Account,
        kernels: KernelName = "auto",
        mode: Mode | None = None,
        arenas: Arenas | None = None,
        model: Model = NOTHING,
    ) -> None:
        self.index, self._at = index, (index, depth, num_layers)
        self._mode, self._model = mode or Mode(), model
        self.fed = Fed()
        self._mode.clocks.append(self.fed)
        self.rules = policy.rules(index)
        codings = policy.codings(index)
        self._codecs = {tier: coding.record for tier, coding in codings.items()}
        columns, per_head = policy.columns(index), policy.per_head(index)
        self.store = LayerStore(index, columns, per_head, account, arenas, kernels, self._codecs, model.rotary)
        band = policy.asks(index)
        self.asking = None if band is None else self._asking(band, model, index, account)
        self._restart()

    def _restart(self) -> None:
        self.step = 0  # forwards so far
        self.fed.reset()
        self.events = Events()
        self._pending: Pending | None = None
        self._first: Pending | None = None  # newest queries of a prompt in parts, for the sums of the decode rule
        self.acted: int | None = None  # columns fed when a rule last acted
        self._like: LayerShape | None = None  # of the keys stored
        self.hidden: Tensor | None = None  # [B, Q, hidden] of the forward that begins, where the policy reads it
        self.trusted: bool | None = None  # whether codes are good enough here; None: not looked yet

    def reset(self) -> None:
        """Free everything and start the clock anew."""
        self.store.reset()
        if self.asking:
            self.asking.reset()
        self._restart()

    @property
    def columns_fed(self) -> int:
        """Per row, pads included: what transformers calls the sequence length."""
        return self.fed.columns

    @property
    def seen(self) -> list[int]:
        """Real tokens of each row so far, those included that a later mask hid: the next token's position."""
        return self.fed.seen

    @property
    def waits(self) -> bool:
        """Whether a forward is not settled yet: drafts, a prompt in parts, or a step whose logits are to come."""
        return self._pending is not None

    def entries(self, row: int = 0, head: int = 0) -> list[int]:
        """Positions stored for one row and key-value head, ascending, among the row's real tokens."""
        store = self.store
        if store.is_empty:
            return []
        head = head if store.per_head else 0
        return store.column("position")[row, head][store.valid()[row, head]].sort().values.tolist()

    # -- a forward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Sequence[int] | None,
        softmax: Softmax,
        past: Tensor | None = None,
        own: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Store k and v [B, H, Q, D], return the attention of q [B, H*G, Q, D], then let the policy act.

        `tokens[b]` counts the real tokens of each row, which stand last; None means all Q. Queries of pads give zeros.
        `past` [B, columns fed] bool is given when it hides past tokens that were stored (pads that a finished row
        got, say): they are dropped first. `own` [B, Q, Q] bool replaces causality among the tokens of this forward.
        `out` is the result where another layer that holds the same has made it already. Raises `InputError` when the
        forward does not fit what is stored, `SpecError` when a budget cannot be met; nothing is stored then.
        """
        batch, queries = k.shape[0], k.shape[2]
        tokens = [queries] * batch if tokens is None else list(tokens)
        self.check(k, v)
        if not self._mode.prefilling:
            self.accept()
            self.settle()
        rule = self.rules[phase := self._phase(queries)]
        if own is not None:
            check_own(self._mode, rule, self.rules.values(), seeded(self.rules, rule) is not None)
        if past is not None:
            self._hide(past)
        said = self._model.said(self.rules.values(), self.index, self.hidden, k, self.store.per_head)
        marks = marked(self.rules.values(), phase, k, self.store.per_head)
        self.store.stage(k, v, tokens, self.seen or [0] * batch, self.step, {**said, **marks})
        self.hidden = None
        if self.asking:
            self.asking.fresh = None if self.columns_fed or min(tokens) < queries else (k, v)
        if self.store.kernels == "exact":  # which sums in order of position, as an uncompressed cache does
            self.store.flush()
            self.store.sort()
        self.fed.add(queries, tokens)
        out = self._forward(q, tokens, softmax, own, rule, out)
        if not self._mode.prefilling:
            self.step += 1
        return out

    def fill(self, k: Tensor, v: Tensor, seen: int) -> None:
        """Store k and v [B, H, N, D] as the newest N of `seen` tokens without attending, as a restored cache has them.

        Raises `InputError` if something is stored already.
        """
        batch, stored = k.shape[0], k.shape[2]
        if not self.store.is_empty:
            raise InputError("only an empty layer can be filled: reset() it first")
        self.check(k, v)
        marks = marked(self.rules.values(), "prefill", k, self.store.per_head)
        self.store.append(k, v, [stored] * batch, [max(0, seen - stored)] * batch, self.step, marks)
        self.fed.add(max(seen, stored), [max(seen, stored)] * batch)
        self.step += 1

    def _forward(
        self,
        q: Tensor,
        tokens: list[int],
        softmax: Softmax,
        own: Tensor | None,
        rule: Rule | None,
        known: Tensor | None,
    ) -> Tensor:
        """Attend over what is stored, and settle or leave that for later."""
        mode, queries = self._mode, q.shape[2]
        if mode.drafting and not mode.prefilling:
            unjudged = self.rules["prefill"] if queries > PREFILL_ABOVE else None
            draft = Pending(rule, self.step, queries, tokens, softmax=softmax, draft=True, unjudged=unjudged)
            draft.begins = seeded(self.rules, unjudged if self.step else rule)
            out = self._attention(self.store, q, tokens, softmax, None, own, known).out
            self._pending = drafted(self.store, draft, q, self.asking is not None)
            return out
        waits = mode.prefilling or (rule is not None and rule.at_step_end)
        limits = None if waits or rule is None else self._due(rule, None)
        reads = waits or limits is not None or (rule is not None and rule.observes and not rule.sampled)
        late = rule is None or put_off(rule, mode)
        reduction = None if rule is None or late or not reads else rule.scorer.mass
        done = self._attention(self.store, q, tokens, softmax, reduction, own, known)
        if self.asking and self.asking.take(q, tokens, done.lse):
            self.asking.note(self.store, self.seen, softmax)
        if not mode.drafting and (later := seeded(self.rules, rule)):
            self._first = first_sums(self._first, later, self.step, q, tokens, softmax)
            if not mode.prefilling:
                self._begin_sums()
        if rule is None:
            return done.out
        this = Pending(rule, self.step, queries, tokens, done.mass, softmax)
        if mode.prefilling:
            self.observe(this, rule)
            self._pending = joined(self._pending, this, q, rule)
        elif waits:
            self._pending = with_queries(this, q, rule) if late else this
        elif reads:
            self._settle(this, rule, limits)
        return done.out

    def check(self, k: Tensor, v: Tensor) -> None:
        """Refuse what cannot be stored and budgets that cannot be met; k and v may be on the meta device."""
        batch, queries = k.shape[0], k.shape[2]
        if queries == 0:
            raise InputError("no tokens to attend to: the prompt is empty")
        if self._at[1] == 0 and len({clock.columns for clock in self._mode.clocks}) > 1:
            raise InputError(INTERRUPTED)
        if self.store.is_empty:
            if k.device.type != "meta":
                try:
                    self.store.kernels_for(k, v)
                except ValueError as error:
                    raise SpecError(str(error)) from error
            shape = self.shape_of(k, v)
            for rule in self.rules.values():
                for sure in (0.0, 1.0):
                    _ = rule and rule.budget.limits(1, sure, shape)
        elif batch != self.store.batch_size:
            raise InputError(f"{batch} rows given to a cache that holds {self.store.batch_size}: reset() it first")

    def shape_of(self, k: Tensor, v: Tensor) -> LayerShape:
        """What budgets are resolved with once k and v [B, H, Q, D] are stored."""
        return LayerShape(*self._at, k.shape[1], batch_size=k.shape[0], **self.store.sizes_of(k, v))

    def _phase(self, queries: int) -> Phase:
        if self._mode.prefilling or not any(self.seen):
            return "prefill"
        return "decode" if self._mode.drafting or queries <= PREFILL_ABOVE else "prefill"

    # -- settling -----------------------------------------------------------------------------------------------

    def accept(self) -> None:
        """Take what waits for granted, since the next forward is here. More tokens than drafts have were a prompt."""
        pending = self._pending
        if pending is not None and pending.draft and pending.columns > PREFILL_ABOVE:
            pending.rule, self._mode.drafting = pending.unjudged, False

    @property
    def waits_for_others(self) -> bool:
        """Whether what waits is decided with other layers."""
        return self._pending is not None and self._pending.rule is not None and self._pending.rule.together

    @torch.no_grad()
    def settle(self) -> None:
        """Let the rule of the forward that waits act, with the confidence that its logits gave, if they came."""
        if claim := self.claim():
            self.events.no_logits += claim[1].together  # else all layers would settle together
            self.conclude(*claim)

    def conclude(self, forward: Pending, rule: Rule, sure: list[float] | None) -> None:
        """Let a rule act after its forward, if it is due."""
        self._settle(forward, rule, self._due(rule, sure))

    def claim(self) -> tuple[Pending, Rule, list[float] | None] | None:
        """Hand over the forward that waits, its rule and how sure the model was; None where nothing is to decide."""
        pending, self._pending = self._pending, None
        self._first = begun(pending, self.rules) or self._first
        self._begin_sums()
        if pending and pending.draft and self.asking and self.asking.add(pending.queries) and pending.softmax:
            self.asking.note(self.store, self.seen, pending.softmax)
        if pending is None or pending.rule is None:
            return None
        rule = pending.rule
        sure = self._mode.confidence_at(self.columns_fed) if rule.budget.needs else None
        if sure is None and rule.budget.needs:
            self.events.no_logits += 1
        return pending, rule, sure

    def _begin_sums(self) -> None:
        """Let the decode rule's scorer observe the newest queries of a prompt."""
        first, self._first = self._first, None
        if first and first.rule:
            self.observe(first, first.rule)

    def _due(self, rule: Rule, confidence: list[float] | None) -> list[tuple[int, ...]] | None:
        """Limits per row if something is over them after this forward, or would change tiers, else None."""
        limits = self.limits(rule, confidence)
        return limits if self.due(rule, exceeds(self.store, rule, limits)) else None

    def limits(self, rule: Rule, confidence: list[float] | None) -> list[tuple[int, ...]]:
        """Entries each row may keep now."""
        return limits_of(self.store, rule, self.fed.real, confidence, self.shape)

    def due(self, rule: Rule, over: bool) -> bool:
        """Whether the rule is to act: over says that more is stored than allowed."""
        if rule.trigger.due(over, None if self.acted is None else self.columns_fed - self.acted):
            return True
        tiers = rule.tiers if self.trusted is not False else rule.tiers.uncoded()
        return tiers.due(self.store.exact_lengths(), self.store.exact_positions())

    @property
    def shape(self) -> LayerShape:
        """What budgets are resolved with."""
        self._like = self._like or self.shape_of(*self.store.none_of())
        return replace(self._like, batch_size=self.store.batch_size)

    def _settle(self, forward: Pending, rule: Rule, limits: list[tuple[int, ...]] | None) -> None:
        """Let the scorer observe a forward, and where something is over its limit, plan."""
        if limits is not None or not rule.sampled:
            self.observe(forward, rule)
        if limits is not None:
            signals, rule = self.view(forward, rule, limits), self.guarded(rule)
            self.act(rule, rule.plan(signals, limits, self.shape), limits)

    def observe(self, forward: Pending, rule: Rule) -> None:
        """Let the scorer keep something of a forward, once."""
        if rule.observes and not forward.observed:
            sum_late(self.store, forward, rule)
            for name, value in rule.scorer.observe(self.signals(forward, rule, None)).items():
                self.store.set_column(name, value)
            forward.observed = True

    def view(self, forward: Pending, rule: Rule, limits: list[tuple[int, ...]] | None) -> Signals:
        """What the rule sees when it acts after a forward, or before its limits are known."""
        sum_late(self.store, forward, rule)
        if self.asking and forward.softmax:
            self.asking.note(self.store, self.seen, forward.softmax)
        return self.signals(forward, rule, limits)

    def act(self, rule: Rule, plan: Plan, limits: list[tuple[int, ...]]) -> None:
        """Apply what was decided."""
        self.acted = self.columns_fed
        self.events.plans += 1
        self.events.overruns += rule.overruns(guarding(self.store, rule, limits, self.fed.real, self.shape))
        self.events.nan_scores = self.events.nan_scores + plan.nan_scores
        self.events.evicted += self.store.apply(plan)

    def guarded(self, rule: Rule) -> Rule:
        """The rule, without its codes where those would lose what keys say; found out once, before any are made."""
        if self.trusted is None and rule.tiers.coding:
            found = max(map(self.store.key_loss, self._codecs))
            if found == found:  # not NaN: there were enough keys to tell
                self.events.lost, self.trusted = found, found < TOO_MUCH
        return rule if self.trusted is not False else replace(rule, tiers=rule.tiers.uncoded())

    def signals(self, forward: Pending, rule: Rule, limits: list[tuple[int, ...]] | None) -> Signals:
        """What is stored, with what a forward gave, as the rule sees it."""
        guards = limits and guarding(self.store, rule, limits, self.fed.real, self.shape)
        return shown(self.store, self._model, self.index, self.seen, forward, rule, limits, guards)

    # -- rows, masks and rollback -------------------------------------------------------------------------------

    def _hide(self, past: Tensor) -> None:
        if self._mode.prefilling and self.columns_fed > self._mode.prompt_start:
            raise InputError("attention_mask hides tokens of a prompt that is being fed in parts: leave them out")
        hidden = self.fed.hide(past)
        if hidden is None:
            return
        position = self.store.column("position").long()
        found = hidden.to(position.device)[:, None].expand(-1, position.shape[1], -1).gather(2, position)
        self.events.evicted += self._drop(found)

    def _drop(self, gone: Tensor) -> int:
        """Drop these entries [B, 1|H, N], count the slots that freed; the others stay where they are."""
        tier = self.store.tier()
        stays = torch.full_like(gone, int(Tier.EXACT), dtype=torch.uint8) if tier is None else tier
        return self.store.apply(Plan(stays.masked_fill(gone, int(Tier.DROP))))

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now (beams, repeats, selections)."""
        if self.store.is_empty:
            return
        for pending in filter(None, (self._pending, self._first)):  # parts of a prompt: all else was settled before
            pending.select_rows(rows)
        self.store.select_rows(rows)
        self.fed.select_rows(rows)
        if self.asking:
            self.asking.select_rows(rows)

    def judges(self, count: int) -> bool:
        """Whether a crop of `count` tokens leaves the forward that waits as it is, or judges what were no drafts."""
        pending = self._pending
        return count > 0 and pending is not None and (not pending.draft or MOST_DRAFTS < count < pending.columns)

    def forget(self, count: int) -> None:
        """Forget the newest `count` tokens of every row. What a plan dropped earlier stays dropped."""
        if self.store.is_empty or count <= 0:
            return
        pending = self._pending
        drafts = pending.tokens if pending else [0] * len(self.seen)  # whose queries nobody has taken yet
        taken = [n - more for n, more in zip(self.seen, drafts, strict=True)]
        if pending and count >= pending.columns:
            self._pending, self.step = None, pending.step
        elif pending:
            pending.shorten(count)
        self.fed.crop(count)
        if self.asking:
            self.asking.crop([max(0, n - left) for n, left in zip(taken, self.seen, strict=True)])
        self.acted = None if self.acted is None else min(self.acted, self.columns_fed)
        position, valid = self.store.column("position"), self.store.valid()
        end = torch.tensor(self.seen, device=position.device)[:, None, None]
        self._drop(~(valid & (position < end)))
