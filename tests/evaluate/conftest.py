"""A tiny model that reads bytes, on disk, and agent traces in tau-bench's form."""

import gzip
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvstrata.evaluate.grid import Job
from kvstrata.evaluate.task import Settings
from kvstrata.evaluate.worker import Worker

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(chat=CHAT):
    """One token per byte, and the marks of a chat."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    tokenizer.chat_template = chat
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("byte-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder for --data with traces of two tasks of the evaluation side and one of the other."""
    path = tmp_path_factory.mktemp("data")
    (path / "agent").mkdir()
    traces = [{"task_id": task, "trial": 0, "traj": _trace(task)} for task in (3, 30, 31)]
    with gzip.open(path / "agent" / "taubench_gpt-4o-airline.json.gz", "wt") as file:
        json.dump(traces, file)
    return path


def _trace(task):
    call = {"function": {"name": "get_user", "arguments": f'{{"id": "mia_{task}77"}}'}}
    return [
        {"role": "system", "content": "You help with flights."},
        {"role": "user", "content": f"My id is mia_{task}77."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "gold member " + "x" * 1100},
        {"role": "assistant", "content": f"Thank you, mia_{task}77. Your flight HAT{task} leaves at 10."},
        {"role": "user", "content": "Good."},
    ]


def worker(folder, **options):
    job = {"dtype": None, "device": "cpu", "kernels": "auto", "batch": None, "settings": Settings(contexts=2)}
    return Worker(Job(str(folder), **{**job, **options}))
