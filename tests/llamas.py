"""Models of Transformers without states."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(**fields: Any) -> LlamaForCausalLM:
    """A Llama over bytes with one layer, unless fields of its configuration say otherwise."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes | {"num_attention_heads": 2} | fields))
