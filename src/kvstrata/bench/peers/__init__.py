"""Other engines and caches to measure beside kvstrata: how they are named, installed, started and asked.

A peer is written NAME or NAME:option=value,option=value. `hf` and `repaired` are caches in this process. The others are
scripts beside this file, each run in an environment of its own, which is made when it is first needed.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.bench.peers.environments import PeerError, environment, peers_folder
from kvstrata.core import InputError
from kvstrata.policy.spec import split_specs

DEFAULTS: dict[str, dict[str, str]] = {
    "hf": {},
    "repaired": {},
    "quantized": {"backend": "quanto", "bits": "4"},
    "openvino": {"cache": "u8", "evict": "0%"},
    "kvpress": {"press": "SnapKVPress", "share": "25%"},
    "llamacpp": {"cache": "f16", "weights": "bf16"},
}
CHOICES = {
    ("quantized", "backend"): ("quanto", "hqq"),
    ("openvino", "cache"): ("u8", "u4", "f16", "f32"),
    ("llamacpp", "cache"): ("f16", "q8_0", "q4_0"),
    ("llamacpp", "weights"): ("bf16", "f16", "own"),
}
SHARES = ("evict", "share")  # options in per cent of the prompt that stay
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """What was asked for, with defaults filled in."""

    name: str
    text: str
    options: dict[str, str]


def parse_peers(text: str) -> list[PeerSpec]:
    """Peers by commas, as policies are written: `hf,openvino:cache=u4,evict=25%`. Raises `InputError`."""
    specs = [_parse(spec) for spec in split_specs(text)]
    names = [spec.text for spec in specs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"--peers names {', '.join(sorted(twice))} twice")
    return specs


def _parse(text: str) -> PeerSpec:
    name, _, rest = text.partition(":")
    if name not in DEFAULTS:
        raise InputError(f"no peer named {name!r}; there are: {', '.join(DEFAULTS)}")
    options = dict(DEFAULTS[name])
    for part in filter(None, rest.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in options or not equals:
            known = ", ".join(options) or "none"
            raise InputError(f"peer {text!r}: {part!r} is not an option of {name}; its options: {known}")
        options[key] = value
        if value not in CHOICES.get((name, key), (value,)):
            raise InputError(f"peer {text!r}: choose {key} from {', '.join(CHOICES[name, key])}")
        if key in SHARES:
            _share(text, value)
    return PeerSpec(name, text, options)


def _share(text: str, value: str) -> float:
    try:
        share = float(value.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1 or not value.endswith("%"):
        raise InputError(f"peer {text!r}: {value!r} is no share of the prompt such as 25%")
    return share


@dataclass(slots=True)
class Peer:
    """A running peer that has read the prompt."""

    text: str
    cache_bytes: int
    prefill_s: float | None  # of one row, where it was asked for and can be told
    settings: dict[str, object]
    process: subprocess.Popen[str]
    log: IO[str]
    tokens: list[int] = field(default_factory=list[int])

    def steps(self, count: int) -> list[float]:
        """Let it make `count` tokens in every row. -> milliseconds of each."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        answer = _answer(self.text, self.process, self.log)
        self.tokens, self.cache_bytes = answer["tokens"], answer["cache_bytes"]
        return cast("list[float]", answer["ms"])


@contextmanager
def start_peer(
    spec: PeerSpec, model: PreTrainedModel, ids: Tensor, batch: int, steps: int, prefill: int = 0
) -> Generator[Peer]:
    """Start a peer on ids [1, T] in `batch` rows and wait until it has read them; end it with the block.

    It reads them `prefill` times more, in one row, for the time that takes.
    """
    python = environment(spec.name)
    job: dict[str, Any] = {
        "model": model.config._name_or_path,  # pyright: ignore
        "ids": ids[0].tolist(),
        "batch": batch,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "steps": steps,
        "prefill": prefill,
        "folder": str(peers_folder() / "models"),
        **{key: _share(spec.text, value) if key in SHARES else value for key, value in spec.options.items()},
    }
    with tempfile.TemporaryDirectory(prefix="kvstrata-peer-") as scratch:
        file = Path(scratch) / "job.json"
        file.write_text(json.dumps(job))
        with (Path(scratch) / "log").open("w+") as log:
            process = subprocess.Popen(
                [python, HERE / f"run_{spec.name}.py", file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            try:
                ready = _answer(spec.text, process, log)
                settings = {**ready["settings"], "versions": ready["versions"]}
                yield Peer(spec.text, ready["cache_bytes"], ready["prefill_s"], settings, process, log)
            finally:
                process.kill()
                process.communicate()  # closes the pipes


def _answer(text: str, process: subprocess.Popen[str], log: IO[str]) -> dict[str, Any]:
    """The next line of a peer, or `PeerError` with the end of what it complained of."""
    line = process.stdout.readline() if process.stdout else ""
    if line:
        return json.loads(line)
    process.wait()
    log.seek(0)
    last = [part for part in log.read().splitlines() if part.strip()][-3:]
    raise PeerError(f"peer {text} stopped (exit code {process.returncode}): {' / '.join(last) or 'it said nothing'}")
