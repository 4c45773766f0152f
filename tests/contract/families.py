"""Tiny random models of many families, by name: config class, model class, and what differs from the common sizes."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from packaging.version import Version

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "initializer_range": 0.2}
HALF_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
GEMMA3N = {
    **{"num_hidden_layers": 6, "sliding_window": 8, "head_dim": 16, "num_kv_shared_layers": 2},
    "layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 2, *HALF_SLIDING["layer_types"][:2]],
    **{"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2},
    **{"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6},
}
SLIDING, STATE = "sliding window", "recurrent state"

# name: (config class, model class, options, layers passed through)
FAMILIES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT, {}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "rotary_dim": 8}, {}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}, {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}, {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}, {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}, {}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0},
        {0: SLIDING, 2: SLIDING},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", HALF_SLIDING, {0: SLIDING, 2: SLIDING}),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        GEMMA3N,
        {1: SLIDING, 3: "shared with later layers", 4: "no cache", 5: "no cache"},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {0: SLIDING, 2: SLIDING},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 0]}, {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}, {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}, {}),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": 8},
        {0: SLIDING, 1: SLIDING, 2: SLIDING},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}, {}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **{"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 8},
            "no_rope_layers": [1, 1, 1, 0],
        },
        {0: SLIDING, 1: SLIDING, 2: SLIDING},
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            **{"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
            "mamba_d_state": 8,
        },
        {0: STATE, 2: STATE},
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {"attn_layer_indices": [1, 3], **MAMBA}, {0: STATE, 2: STATE}),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
            "shared_expert_intermediate_size": 32,
        },
        {0: STATE, 2: STATE},
    ),
}
# name: (config class, model class, options, what the refusal says)
REFUSED = {
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT, "only latent attention"),
    "mistral with windows": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}, "only sliding window"),
    "falcon-h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**MAMBA, "mamba_d_ssm": 128},
        "only recurrent state and attention",
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"n_layer": 2, "n_head": 4},
        "does not call attention through transformers' AttentionInterface",
    ),
}


@cache
def build(config: str, model: str, options: tuple):
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **thawed(options)})).eval()
    for name, parameter in made.named_parameters():
        if name.endswith(("k_proj.bias", "sinks")):  # which start at zero, where an error would not show
            parameter.data.normal_()
    if config in ("Gemma2Config", "GptOssConfig"):  # whose soft-capping and sinks sdpa would leave out
        made.set_attn_implementation("eager")
    return made


OLD = Version(transformers.__version__) < Version("5.20")
if OLD:
    del FAMILIES["gptj"]  # called attention by itself
    FAMILIES["gemma3n"][3].pop(4), FAMILIES["gemma3n"][3].pop(5)  # layers without a cache were not in the list


def family(name: str):
    config, model, options, _ = {**FAMILIES, **REFUSED}[name]
    return build(config, model, frozen(options))


def frozen(options):
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in options.items())


def thawed(options):
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options}


TEXT = {**SIZES, "num_hidden_layers": 3}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
IMAGE, IMAGE_TOKENS = 100, 16  # the placeholder's id, and how many of them an image takes


def llava():
    tf = transformers
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION),
        text_config=tf.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    return tf.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


def smolvlm():
    tf = transformers
    text = tf.LlamaConfig(**TEXT)
    config = tf.SmolVLMConfig(text_config=text, vision_config=VISION, image_token_id=IMAGE, scale_factor=1)
    return tf.SmolVLMForConditionalGeneration(config), {"pixel_values": torch.randn(1, 1, 3, 16, 16)}


def qwen2_vl():
    tf = transformers
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    config = tf.Qwen2VLConfig(
        text_config={**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=101,
        vision_start_token_id=102,
        vision_end_token_id=103,
    )
    image = {"pixel_values": torch.randn(64, 3 * 2 * 16), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    return tf.Qwen2VLForConditionalGeneration(config), image


def gemma3():
    """Whose image tokens see each other both ways."""
    tf = transformers
    text = tf.Gemma3TextConfig(
        **TEXT, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention", "full_attention"]
    )
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**VISION),
        text_config=text,
        image_token_id=IMAGE,
        mm_tokens_per_image=IMAGE_TOKENS,
    )
    return tf.Gemma3ForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


MULTIMODAL = {"llava": llava, "smolvlm": smolvlm, "qwen2-vl": qwen2_vl, "gemma3": gemma3}
