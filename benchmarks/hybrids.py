"""Speed and memory of a mixer with the delta rule in a wrapped model of Transformers, with and without our scan."""

from collections.abc import Callable

import torch
from measure import saved_bytes, take_turns
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from hf_recurrent_lengthgen import stateful

LENGTH = 2048
SIZES = {"hidden_size": 1024, "num_hidden_layers": 1, "vocab_size": 256, "head_dim": 128}
HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDTHS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 1024}
LAYERS = {"layer_types": ["linear_attention"], "mlp_only_layers": [0]}


def delta_layer(scan: str) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The loss of the mixer of one row, and its parameters."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(**SIZES, **HEADS, **WIDTHS, **LAYERS)
    mixer = stateful(Qwen3NextForCausalLM(config), scan=scan).model.layers[0].linear_attn.train()
    hidden = torch.randn(1, LENGTH, config.hidden_size, requires_grad=True)
    return lambda: mixer(hidden).sum(), list(mixer.parameters())


def bench_hybrid(rounds: int) -> dict[str, float]:
    """A wrapped Qwen3-Next mixer, forward and backward, B 1, D 1024, 16 value heads of 128 (8 of keys), float32."""
    losses = {"ours": delta_layer("auto"), "theirs": delta_layer("stock")}
    passes = {name: lambda loss=loss: loss().backward() for name, (loss, _) in losses.items()}
    seconds, ratio = take_turns(rounds, passes)
    saved = {name: saved_bytes(*layer) / 2**20 for name, layer in losses.items()}
    return {f"{name}_tokens_per_second": LENGTH / value for name, value in seconds.items()} | {
        "speed_ratio": ratio,
        "ours_saved_mib": saved["ours"],
        "theirs_saved_mib": saved["theirs"],
        "saved_ratio": saved["ours"] / saved["theirs"],
    }
