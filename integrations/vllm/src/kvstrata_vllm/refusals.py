"""Which policies and options of the library cannot be had at block granularity, each with the reason and the way out.

vLLM frees a block of tokens for all heads of a group of layers at once, and all blocks hold the same dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.core import SpecError
from kvstrata.policy.budget import Above, ByteBudget, HeadTokens
from kvstrata.policy.policy import Policy, Rule

ONE_DTYPE = "all blocks of a pool have one dtype; for fewer bits everywhere use --kv-cache-dtype fp8"
ONE_SET = "all heads share the blocks of their layer"
BY_DEPTH = "gives every layer another budget, but layers share blocks; calibrate a file for polykv: instead"
MERGES = "adds what is dropped to what stays, but here blocks go as they are; use h2o"
READS = "reads values, or what projections make of them, which is not measured here; use snapkv or keydiff"
REPEATS = "needs queries of a repeated context, which vLLM does not run; use snapkv or h2o"

PRESETS: Mapping[str, str] = {
    "full": "compresses nothing: leave kvstrata out of the configuration",
    "adakv": f"shares a budget out over heads, but {ONE_SET}; use snapkv",
    "pyramidkv": BY_DEPTH,
    "cake": "divides a budget over layers by their attention, but layers share blocks; use snapkv",
    **dict.fromkeys(("cam", "d2o"), MERGES),
    **dict.fromkeys(("criticalkv", "defensivekv", "defensivekv-layer", "expected", "expected-ada", "lagkv"), READS),
    "duo": f"is for budgets per head, but {ONE_SET}; use streaming",
    "confkv-l": f"{BY_DEPTH}, or use confkv",
    "kvzap-layer": f"shares a budget out over heads, but {ONE_SET}; use kvzap:tau=",
    "kvzap-head": f"has a budget per head, but {ONE_SET}; use kvzap:tau=",
    **dict.fromkeys(("echo", "echo-layer", "echo-head", "kvzip", "kvzip+"), REPEATS),
    **dict.fromkeys(("int8", "int4", "int2", "kivi", "rot4", "k4v2", "k2v2"), f"codes what is older, but {ONE_DTYPE}"),
    "qevict-w32": "is qevict with coded windows; use qevict, whose windows are vLLM's blocks here",
}
CODED = dict.fromkeys(("codec", "exact", "group", "key_space"), f"is about codes, but {ONE_DTYPE}")
CODES = f"is about entries in INT8, but {ONE_DTYPE}"
BLOCK_FILLS = "does not apply: vLLM's blocks are dropped when one more has filled"
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "confkv": {
        **dict.fromkeys(("window", "window_by", "scale_mode", "demote"), CODES),
        "debias": "does not apply: the moving average is that of a whole block",
        "signal_logits": "does not apply: confidence is measured on the logits that vLLM's own processors leave",
    },
    "confkv+": {"window": CODES},
    "qevict": {
        **dict.fromkeys(("split", "code", "keys", "admit", "margin"), f"is about coded windows, but {ONE_DTYPE}"),
        "window": "does not apply: a window is a block here; choose its size with --block-size",
        "every": BLOCK_FILLS,
        "score": "does not apply: attention of every step counts",
        "heads": f"does not apply: {ONE_SET}",
    },
    "kvzap": {
        "budget": f"is shared out over all heads of all layers, but {ONE_SET}; use tau=",
        "room": BLOCK_FILLS,
    },
}
PATTERNS: Mapping[str, str] = {"echo-head": REPEATS, **dict.fromkeys(("cam", "d2o"), MERGES)}


def refuse_options(name: str, options: Mapping[str, object]) -> None:
    """Raise `SpecError` for a preset, or an option given to it, that cannot be honoured."""
    if name in PRESETS:
        raise SpecError(f"{name} cannot run in vLLM: it {PRESETS[name]}")
    known = {**CODED, "prompt": "is not built for blocks yet", **OPTIONS.get(name, {})}
    if name != "kvzap":
        known["heads"] = f"does not apply: {ONE_SET}"
    for option in options:
        if option in known:
            raise SpecError(f"{name} cannot have {option}= in vLLM: it {known[option]}")
    if name == "kvzap" and "tau" not in options:
        raise SpecError(
            "kvzap needs tau= in vLLM: without it all heads of all layers share a budget, which blocks cannot"
        )


def refuse_rules(policy: Policy, block_size: int) -> None:
    """Raise `SpecError` for a budget that no block can meet."""
    for entry in policy.table:
        for rule in (entry.prefill, entry.decode):
            if rule is not None:
                _refuse_budget(rule, block_size)


def _refuse_budget(rule: Rule, block_size: int) -> None:
    budget = rule.budget
    if rule.merge is not None:
        raise SpecError(f"{type(rule.merge).__name__} cannot be had in vLLM: it {MERGES}")
    if isinstance(budget, HeadTokens):
        raise SpecError(f"budget={budget} is per head, but {ONE_SET}: give one number")
    if isinstance(budget, ByteBudget) and budget.per == "cache":
        raise SpecError(f"budget={budget}: a server's pool is its cache; give bytes per sequence, as in 64MiB")
    if isinstance(budget, Above):
        return
    if any(count < block_size for count in budget.counts):
        raise SpecError(
            f"budget={budget} is less than a block of {block_size} tokens: give {block_size} or more, "
            "or smaller blocks with --block-size"
        )
