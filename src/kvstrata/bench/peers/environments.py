"""Environments of peers that cannot share ours: made with venv and pip when first needed, kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from kvstrata.core import KvstrataError
from kvstrata.hf.demo import WHEEL, cache_folder

INSTALLED = "installed.txt"  # what an environment was made of; missing where that was interrupted


@dataclass(frozen=True, slots=True)
class Needs:
    """What pip installs, what then without dependencies, what it removes again, and how much that is to wait for."""

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    size: str = ""


NEEDS = {
    "openvino": Needs(
        ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "optimum-intel==2.2.0", "torch"),
        unwanted=("torchvision",),  # built for another torch, and then importing transformers fails
        size="1.6 GB",
    ),
    "kvpress": Needs(("kvpress==0.5.5", "transformers==5.2.0", "torch"), size="1.4 GB"),
    "quantized": Needs(("optimum-quanto==0.2.7", "hqq==0.2.8.post1", "torch", "transformers"), size="1.2 GB"),
    "llamacpp": Needs(("xllamacpp==2026.10.11549", "gguf"), alone=(WHEEL,), size="0.3 GB"),
}


class PeerError(KvstrataError):
    """A peer could not be installed or stopped working; the message says why."""


def peers_folder() -> Path:
    """Where environments and converted models of peers are kept."""
    return cache_folder() / "peers"


def environment(name: str, console: Console | None = None) -> Path:
    """The Python of a peer's environment, which is made the first time. Raises `PeerError`."""
    needs, folder = NEEDS[name], peers_folder() / name
    python, wanted = folder / ("Scripts" if os.name == "nt" else "bin") / "python", repr(needs)
    marker = folder / INSTALLED
    if marker.is_file() and marker.read_text() == wanted:
        return python
    (console or Console(stderr=True)).print(f"Making an environment for {name} ({needs.size}, once) ...")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    # the very build of torch that runs here: the largest package, and often one without a GPU's libraries
    here = {"torch": torch.__version__, "transformers": version("transformers")}
    packages = [f"{package}=={here[package]}" if package in here else package for package in needs.packages]
    _pip(name, python, "install", *packages)
    if needs.alone:
        _pip(name, python, "install", "--no-deps", *needs.alone)
    if needs.unwanted:
        _pip(name, python, "uninstall", "--yes", *needs.unwanted)
    marker.write_text(wanted)
    return python


def _pip(name: str, python: Path, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", *arguments],
        check=False,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise PeerError(f"could not install {name}: {errors[-1] if errors else 'pip gave no reason'}")
