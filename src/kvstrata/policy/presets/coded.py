"""Methods that drop nothing and code what is older."""

from __future__ import annotations

from kvstrata.policy.budget import Everything
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import PRESETS
from kvstrata.policy.scorers.recency import Recency
from kvstrata.policy.tiering import ByAge, CodecName, Coding


def _coded(coding: Coding, label: str, exact: int, at_once: int = 1) -> Policy:
    rule = Rule(Recency(), Everything(), tiers=ByAge(coding, exact, at_once))
    return Policy.everywhere(label, rule, rule)


def _turned(name: CodecName, exact: int, corrected: bool) -> Policy:
    return _coded(Coding(name, corrected=corrected), name, exact, at_once=16)


@PRESETS.add("int8")
def int8(exact: int = 128) -> Policy:
    """Keep everything; what is older than `exact` tokens in INT8, a page of 64 at a time."""
    return _coded(Coding("int8"), "int8", exact)


@PRESETS.add("int4")
def int4(exact: int = 128) -> Policy:
    """Keep everything; what is older in INT4: keys by channel over 64 tokens, values by token."""
    return _coded(Coding("int4"), "int4", exact)


@PRESETS.add("int2")
def int2(exact: int = 128) -> Policy:
    """Keep everything; what is older in INT2: keys by channel over 64 tokens, values by token."""
    return _coded(Coding("int2"), "int2", exact)


@PRESETS.add("kivi")
def kivi(exact: int = 128) -> Policy:
    """Keep everything; what is older in INT2, keys by channel over 32 tokens (KIVI, arXiv:2402.02750, section 3).

    Values are grouped over all channels of a head, not over 32 of them.
    """
    return _coded(Coding("int2", group=32), "kivi", exact)


@PRESETS.add("rot4")
def rot4(exact: int = 128, corrected: bool = False) -> Policy:
    """Keep everything; what is older in 4 bits, turned by a Hadamard matrix, with a grid for every token."""
    return _turned("rot4", exact, corrected)


@PRESETS.add("k4v2")
def k4v2(exact: int = 128, corrected: bool = False) -> Policy:
    """Keep everything; what is older turned by a Hadamard matrix, keys in 4 bits and values in 2."""
    return _turned("k4v2", exact, corrected)


@PRESETS.add("k2v2")
def k2v2(exact: int = 128, corrected: bool = False) -> Policy:
    """Keep everything; what is older turned by a Hadamard matrix, keys and values in 2 bits."""
    return _turned("k2v2", exact, corrected)
