"""A small random Llama without a tokenizer: 4 query heads on 2 key-value heads, so that two ranks can share it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def make(folder):
    """Write it. Weights are large enough that tokens attend to some and not to others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.save_pretrained(folder)


def prompts(count, length, seed=0):
    """`count` prompts of about `length` random tokens, of lengths that no block divides alike."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length - 7 * i,), generator=generator).tolist() for i in range(count)]
