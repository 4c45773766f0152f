"""Loading a model and its tokenizer: the demo model, a local folder or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from kvstrata.core import InputError
from kvstrata.hf.demo import demo_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name, None for none. Raises `InputError` that shows the choice."""
    if name is not None and name not in DTYPES:
        raise InputError(f"dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name] if name else None


def load_config(name: str | None, console: Console | None = None) -> PretrainedConfig:
    """The config alone of a model; `name` as in `load_model`. Raises `InputError` when there is none."""
    source = str(demo_model(console) if name is None else name)
    try:
        return cast(PretrainedConfig, AutoConfig.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise _not_found(source, error) from error


def load_model(
    name: str | None, dtype: str | None, device: str, console: Console | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference; `name` None is the demo model, `dtype` None float32 on a CPU, else the model's own.

    Raises `InputError` naming the fix when there is no such model or dtype, `DemoModelError` when fetching fails.
    """
    given = parse_dtype(dtype)
    source = str(demo_model(console) if name is None else name)
    kind = given or (torch.float32 if device == "cpu" else "auto")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a local file loads in a second
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=kind)
    except (OSError, ValueError) as error:
        raise _not_found(source, error) from error
    finally:
        if shown:
            logging.enable_progress_bar()
    return cast(Any, model).to(device).eval(), cast(PreTrainedTokenizerBase, tokenizer)


def _not_found(source: str, error: Exception) -> InputError:
    what = "is a folder without a model" if Path(source).is_dir() else "is neither a local folder nor a hub id found"
    return InputError(f"cannot load {source!r}: it {what} ({str(error).splitlines()[0]})")
