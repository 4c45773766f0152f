"""A tiny model on disk, and the command line without a process of its own."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvstrata.cli import app

from ..contract.runs import tiny

WORDS = [
    "it",
    "is",
    "a",
    "truth",
    "universally",
    "acknowledged",
    "that",
    "a",
    "single",
    "man",
    "in",
    "possession",
    "of",
    "good",
    "fortune",
    "must",
    "want",
    "wife",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk with a tokenizer of a few words."""
    path = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(path)
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["[UNK]", *WORDS]))}
    backend = Tokenizer(models.WordLevel(vocabulary | {f"w{i}": i for i in range(len(vocabulary), 128)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(path)
    return path


def kvstrata(*arguments, text=None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=text)
