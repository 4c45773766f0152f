"""How much a layer may keep, in tokens, as a share of what was seen, or in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal, Protocol

from kvstrata.core import LayerShape, SpecError
from kvstrata.policy.confidence import Steady


class Budget(Protocol):
    """A limit per row and, where heads differ, per head."""

    @property
    def needs(self) -> frozenset[str]:
        """Signals of a step that it reads: "logits" as the model gives them, or "processed-logits"."""
        ...

    @property
    def steadied(self) -> tuple[float, Steady] | None:
        """tau, and how confidence is steadied before it is compared with that; None where it is not."""
        ...

    @property
    def counts(self) -> tuple[int, ...]:
        """Limits that are known before any model is; whatever is protected must fit into each."""
        ...

    @property
    def even(self) -> bool:
        """Whether it gives all layers and heads the same."""
        ...

    @property
    def threshold(self) -> float | None:
        """The score from which on an entry stays, in place of a limit; None where limits hold."""
        ...

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """Entries that a layer may keep of a row that has seen `seen` real tokens: one number, or one per head."""
        ...

    def around(self, mean: Budget) -> Budget:
        """The same kind of budget, `mean` on average."""
        ...

    def scaled(self, factor: Fraction) -> Budget:
        """`factor` times as much, rounded down, at least one."""
        ...


class _Flat:
    """A budget that is the same at every step and depth."""

    __slots__ = ()
    even = True

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    @property
    def steadied(self) -> tuple[float, Steady] | None:
        """Confidence is not read."""
        return None

    @property
    def counts(self) -> tuple[int, ...]:
        """None known yet."""
        return ()

    @property
    def threshold(self) -> float | None:
        """None."""
        return None

    def around(self, mean: Budget) -> Budget:
        """The mean itself."""
        return mean


class Shaped:
    """A budget that gives layers or heads parts of what `base` gives; what is not about amounts is the base's."""

    __slots__ = ()
    base: Budget
    even = False
    threshold = None

    @property
    def needs(self) -> frozenset[str]:
        """What the base needs."""
        return self.base.needs

    @property
    def steadied(self) -> tuple[float, Steady] | None:
        """What the base says."""
        return self.base.steadied

    @property
    def counts(self) -> tuple[int, ...]:
        """None known yet: a part depends on the model, the prompt or a file."""
        return ()


@dataclass(frozen=True, slots=True)
class Tokens(_Flat):
    """The same number of tokens in every layer and head."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SpecError(f"budget={self.count}: keep at least one token")

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """The number itself."""
        return (self.count,)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number itself."""
        return (self.count,)

    def scaled(self, factor: Fraction) -> Tokens:
        """`factor` times as many."""
        return Tokens(max(1, int(self.count * factor)))

    def __str__(self) -> str:
        return str(self.count)


@dataclass(frozen=True, slots=True)
class HeadTokens(_Flat):
    """A number of tokens for every head, the same in each layer it is used in (one rule per layer for more)."""

    even = False
    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.heads or min(self.heads) < 1:
            raise SpecError(f"budget={self.heads}: give at least one token for every head")

    @property
    def counts(self) -> tuple[int, ...]:
        """One number per head."""
        return self.heads

    def scaled(self, factor: Fraction) -> HeadTokens:
        """`factor` times as many for every head."""
        return HeadTokens(tuple(max(1, int(n * factor)) for n in self.heads))

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """One number per head; refuses a model with another number of heads."""
        if len(self.heads) != shape.num_kv_heads:
            given, heads = len(self.heads), shape.num_kv_heads
            raise SpecError(f"budget for {given} heads, but layer {shape.layer} has {heads} key-value heads")
        return self.heads

    def __str__(self) -> str:
        return "/".join(map(str, self.heads))


@dataclass(frozen=True, slots=True)
class Share(_Flat):
    """A share of the tokens a row has seen so far, resolved anew whenever the rule acts."""

    fraction: Fraction

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise SpecError(f"budget={float(self.fraction):%}: give a share above 0% and up to 100%")

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """Rounded down, at least one."""
        return (max(1, int(seen * self.fraction)),)

    def scaled(self, factor: Fraction) -> Share:
        """`factor` times the share, at most all."""
        return Share(min(Fraction(1), self.fraction * factor))

    def __str__(self) -> str:
        return f"{Decimal(str(float(self.fraction * 100))):f}".removesuffix(".0") + "%"


@dataclass(frozen=True, slots=True)
class OfTotal(_Flat):
    """A share of the tokens that prompt and answer are to have together, or of those seen once they are more."""

    share: Share
    total: int

    def __post_init__(self) -> None:
        if self.total < 1:
            raise SpecError(f"total={self.total}: give the tokens that prompt and answer will have")

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """The share of the larger number."""
        return self.share.limits(max(seen, self.total), confidence, shape)

    def around(self, mean: Budget) -> Budget:
        """The same of another share; any other mean is itself, since it does not depend on a total."""
        return OfTotal(mean, self.total) if isinstance(mean, Share) else mean

    def scaled(self, factor: Fraction) -> OfTotal:
        """`factor` times the share."""
        return OfTotal(self.share.scaled(factor), self.total)

    def __str__(self) -> str:
        return f"{self.share} of {self.total}"


@dataclass(frozen=True, slots=True)
class Everything(_Flat):
    """All tokens, whatever budget is asked for: of policies that only code."""

    even = False

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """All that were seen."""
        return (max(1, seen),)

    def around(self, mean: Budget) -> Everything:
        """Itself."""
        return self

    def scaled(self, factor: Fraction) -> Everything:
        """Itself."""
        return self

    def __str__(self) -> str:
        return "all"


@dataclass(frozen=True, slots=True)
class Above(_Flat):
    """Every entry whose score is `tau` or more, however many they are; each layer decides for itself."""

    even = False
    tau: float

    @property
    def threshold(self) -> float | None:
        """tau."""
        return self.tau

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """All that were seen: nothing but the score limits."""
        return (max(1, seen),)

    def around(self, mean: Budget) -> Above:
        """Itself: a score has no mean."""
        return self

    def scaled(self, factor: Fraction) -> Above:
        """Itself: a score has no size."""
        return self

    def __str__(self) -> str:
        return f"score >= {self.tau:g}"


@dataclass(frozen=True, slots=True)
class ByteBudget(_Flat):
    """Live bytes, columns included: per sequence over all compressed layers, per sequence and layer, or per cache."""

    count: int
    per: Literal["sequence", "layer", "cache"] = "sequence"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SpecError(f"budget={self.count} bytes: give a positive size")

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """As many entries as the bytes hold; refuses a size that does not hold a single one."""
        layers = 1 if self.per == "layer" else shape.num_layers
        rows = shape.batch_size if self.per == "cache" else 1
        entries = self.count // (shape.entry_bytes * layers * rows)
        if entries < 1:
            need = shape.entry_bytes * layers * rows
            raise SpecError(f"budget={self} does not hold one token, which takes {need} bytes here: give more")
        return (entries,)

    def scaled(self, factor: Fraction) -> ByteBudget:
        """`factor` times the bytes."""
        return ByteBudget(max(1, int(self.count * factor)), self.per)

    def __str__(self) -> str:
        size = self.count
        for unit in ("B", "KiB", "MiB", "GiB"):
            if size % 1024 or unit == "GiB":
                return f"{size}{unit}" + ("" if self.per == "sequence" else f"/{self.per}")
            size //= 1024
        raise AssertionError


_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_FORM = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|[A-Za-z]+)?(?:/(?P<per>\w+))?")
FORMS = "256 (tokens), 25%, 64MiB, 64MiB/layer or 64MiB/cache; several numbers as 64/32/16 (one per head)"


def parse_budget(text: str | int) -> Budget:
    """Read a budget as written in a policy; raises `SpecError` naming the accepted forms."""
    text = str(text).strip()
    if re.fullmatch(r"\d+(/\d+)+", text):
        return HeadTokens(tuple(int(part) for part in text.split("/")))
    found = _FORM.fullmatch(text)
    if found is None:
        raise SpecError(f"cannot read budget={text!r}: write {FORMS}")
    number, unit, per = Fraction(found["number"]), found["unit"], found["per"]
    if unit in _SIZES and per in (None, "layer", "cache"):
        return ByteBudget(int(number * _SIZES[unit]), per or "sequence")
    if per is None and unit == "%":
        return Share(number / 100)
    if per is None and unit is None and number.denominator == 1:
        return Tokens(int(number))
    raise SpecError(f"cannot read budget={text!r}: write {FORMS}; sizes are {', '.join(_SIZES)}")
