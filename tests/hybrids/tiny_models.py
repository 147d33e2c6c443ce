"""A tiny configuration of every recurrent model type of Transformers, for the support table and the tests."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED

VOCABULARY = 29

LAYERS = ["linear_attention", "full_attention", "linear_attention"]
CONV_LAYERS = ["conv", "full_attention", "conv"]
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": LAYERS,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "layer_types": LAYERS,
}
TINY: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LATENT | EXPERTS | {"head_dim": 8, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 6, "time_step_rank": 4},
    "granitemoehybrid": MAMBA | EXPERTS | {"layer_types": LAYERS, "shared_intermediate_size": 24},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": LATENT | EXPERTS | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lara_mini": DELTA
    | QWEN_EXPERTS
    | {
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
    },
    "lfm2": {"layer_types": CONV_LAYERS, "conv_L_cache": 3},
    "lfm2_moe": QWEN_EXPERTS | {"layer_types": CONV_LAYERS, "conv_L_cache": 3, "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "conv_L_cache": 3,
        "head_dim": 8,
        "sliding_window": 8,
    },
    "mamba": {"state_size": 6, "time_step_rank": 4},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 16,
        "conv_kernel": 4,
    },
    "minimax": EXPERTS | {"layer_types": LAYERS, "head_dim": 8, "block_size": 8},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "expand": 2,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layers_block_type": [*LAYERS, "mlp"],
    },
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4},
    "qwen3_5_moe_text": DELTA | QWEN_EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA | {"head_dim": 8},
    "qwen3_next": DELTA | QWEN_EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 16},
    "rwkv": {"context_length": 512, "num_hidden_layers": 2},
    "xlstm": {"hidden_size": 64, "num_heads": 8, "qk_dim_factor": 1.0, "v_dim_factor": 1.0, "num_hidden_layers": 2},
    "zamba": {
        "mamba_d_state": 6,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 6,
        "mamba_ngroups": 2,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
}
TINY = {name: config for name, config in TINY.items() if name in CONFIG_MAPPING}  # else newer than Transformers
SUPPORTED_TYPES = sorted(SUPPORTED.keys() & TINY.keys())


COMPOSITE = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types of models of images and text that AutoModelForCausalLM loads as their language models, of these types."""


def tiny_composite(model_type: str, **changes: Any) -> PreTrainedModel:
    """A stock model of images and text, as it is published; `changes` are of the configuration of its text."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model(
        model_type, text_config=COMMON | TINY[COMPOSITE[model_type]] | changes, vision_config=vision
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def tiny_model(model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A stock language model of a type in `TINY`, with every parameter away from its neutral initial value.

    Args:
        model_type: Key of `TINY`.
        seed: Seed of the weights; the global random state is left alone.
        dtype: Of the weights.
        changes: Fields of the configuration to change.
    """
    config = AutoConfig.for_model(model_type, **COMMON | TINY[model_type] | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if dtype == torch.float64:
            model.set_experts_implementation("eager")  # the default takes no float64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()
