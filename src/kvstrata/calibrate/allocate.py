"""Dividing one budget over layers (PolyKV, Algorithm 1, with the parts that the paper leaves open)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.core import SpecError


def allocate(signal: Sequence[float], total: int, least: int, most: int | None = None) -> list[int]:
    """Whole numbers that sum to `total`, each at least `least` and at most `most`; what is above follows the signal.

    Negative signals count as 0. Rounding gives what is missing to the largest remainders, ties to the first. Raises
    `SpecError` where the bounds cannot be met.
    """
    count = len(signal)
    if not count:
        raise SpecError("no layers to divide a budget over")
    if total < count * least:
        raise SpecError(f"a budget of {total} cannot give {count} layers {least} each: raise the budget, or lower min")
    if most is not None and (most < least or total > count * most):
        raise SpecError(f"a budget of {total} over {count} layers does not fit between {least} and {most} each")
    largest = max(0.0, *map(float, signal))
    weights = [max(0.0, float(s)) / largest if largest else 1.0 for s in signal]
    shift = 1e-6 * sum(weights) / count  # no layer weighs nothing
    ideal = _bounded([w + shift for w in weights], total - count * least, None if most is None else most - least)
    return [least + n for n in round_to_sum(ideal, total - count * least)]


def _bounded(weights: Sequence[float], total: float, most: float | None) -> list[float]:
    """`total` in proportion to positive weights, none above `most`: the surplus goes to the others in proportion."""
    found, free = [0.0] * len(weights), list(range(len(weights)))
    left = float(total)
    while free:
        scale = left / sum(weights[i] for i in free)
        over = [i for i in free if most is not None and weights[i] * scale > most]
        if not over:
            for i in free:
                found[i] = weights[i] * scale
            break
        for i in over:
            assert most is not None
            found[i] = most
            left -= most
            free.remove(i)
    return found


def round_to_sum(ideal: Sequence[float], total: int) -> list[int]:
    """Numbers rounded down, and the largest remainders up, so that they sum to `total`; ties go to the first."""
    counts = [int(x + 1e-9) for x in ideal]
    order = sorted(range(len(ideal)), key=lambda i: (counts[i] - ideal[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def inverse(budgets: Sequence[int], signal: Sequence[float]) -> list[int]:
    """The same budgets the wrong way round: the largest where the signal is smallest (the control of table 3)."""
    order = sorted(range(len(budgets)), key=lambda i: (float(signal[i]), i))
    found = [0] * len(budgets)
    for place, budget in zip(order, sorted(budgets, reverse=True), strict=True):
        found[place] = budget
    return found


def best_patterns(cosine: Mapping[str, Sequence[float]], margin: float = 0.0) -> list[str]:
    """Of each layer the pattern with the largest value, the first of equals.

    With a margin a layer keeps the pattern that is best on average unless another is better by more than that.
    """
    names = list(cosine)
    layers = range(len(cosine[names[0]]))
    single = best_single(cosine)
    best = [max(names, key=lambda name: cosine[name][layer]) for layer in layers]
    clear = [cosine[name][layer] - cosine[single][layer] > margin for layer, name in enumerate(best)]
    return [name if better else single for name, better in zip(best, clear, strict=True)]


def best_single(cosine: Mapping[str, Sequence[float]]) -> str:
    """The pattern that is best on average over layers."""
    return max(cosine, key=lambda name: sum(cosine[name]))


def worst_patterns(cosine: Mapping[str, Sequence[float]]) -> list[str]:
    """Of each layer the pattern with the smallest value: the inverse control."""
    names = list(cosine)
    return [min(names, key=lambda name: cosine[name][layer]) for layer in range(len(cosine[names[0]]))]
