"""The real model: fetched, converted, and run under policies. `make model` runs these."""

import pytest
import torch
from transformers import AutoTokenizer

import kvstrata
from kvstrata.hf.demo import demo_model
from kvstrata.hf.models import load_model

from ..contract.runs import kv

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded():
    return load_model(None, "float32", "cpu")


def test_the_tokenizer_splits_digits_and_adds_nothing(loaded):
    _, tokenizer = loaded
    ids = tokenizer("Hello 1234")["input_ids"]
    assert tokenizer.decode(ids) == "Hello 1234"
    assert len(ids) == 6
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token is None
    assert type(AutoTokenizer.from_pretrained(demo_model())) is type(tokenizer)


def test_it_answers_under_a_budget(loaded):
    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with kvstrata.compress(model, "snapkv:budget=75%") as cache:
        output = model.generate(**inputs, **kv(cache), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_exact_kernels_are_bit_identical_on_the_real_model(loaded):
    model, tokenizer = loaded
    ids = tokenizer("It is a truth universally acknowledged, that a single man in possession", return_tensors="pt")
    ids = ids["input_ids"]
    plain = model.generate(ids, max_new_tokens=16, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with kvstrata.compress(model, "h2o:budget=1000", kernels="exact") as cache:
        ours = model.generate(
            ids, **kv(cache), max_new_tokens=16, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, ours.logits, strict=True))
