"""Give one head of a tiny hybrid a decay of 1, and let `lengthgen diagnose` find it.

A hybrid of Transformers is trained from scratch on the Python standard library. In a copy, one head of one layer gets
a decay of 1, so that it forgets nothing. Both models are diagnosed: the page names that layer, that head and the
position from which its states are outside the training distribution.
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, standard_library_corpus, token_stream

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
TYPES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},  # Mamba-2
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},  # Mamba-2 and attention in each layer
    "qwen3_next": DELTA  # delta rule
    | {"linear_value_head_dim": 32, "head_dim": 16, "mlp_only_layers": [0, 1, 2], "layer_types": LAYERS},
    "zamba": {  # Mamba-1
        **{"hidden_size": 32, "mamba_d_state": 8, "n_mamba_heads": 2},
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
}
LAYER, HEAD = 0, 1
"""Of the head that gets a decay of 1."""


def new_hybrid(model_type: str, length: int) -> Any:
    """A tiny random hybrid for sequences of `length` bytes."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    settings = {"vocab_size": len(tokenizer), "num_hidden_layers": 3, **SIZES, **special, **TYPES[model_type]}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    model.config.training_length = length
    return model


def train(model: Any, steps: int, batch: int = 16) -> Any:
    """Train a model in place on the Python standard library."""
    stream = token_stream(standard_library_corpus().texts("train"), byte_tokenizer())
    rows = PackedBlocks(stream, model.config.training_length)
    loader = DataLoader(rows, batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for step, ids in zip(range(steps), (batch["input_ids"] for batch in loader), strict=False):
        loss = cross_entropy(model(ids[:, :-1]).logits.mT, ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: {loss:.3f} nats per byte")
    return model.eval()


@torch.no_grad()
def planted(model: Any, layer: int = LAYER, head: int = HEAD) -> Any:
    """A copy of a stock model of which one head forgets nothing: its decay rate, exp(A_log), is nearly 0."""
    broken = copy.deepcopy(model)
    (mixer,) = (module for module in broken.model.layers[layer].modules() if hasattr(module, "A_log"))
    mixer.A_log[head] = -12.0
    return broken


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=TYPES, default="falcon_h1")
    parser.add_argument("--training-length", type=int, default=64, help="bytes per training sequence")
    parser.add_argument("--length", type=int, default=2048, help="bytes per text of the diagnosis")
    parser.add_argument("--sequences", type=int, default=16, help="texts of the diagnosis")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("example-output"))
    options = parser.parse_args()
    sound = train(new_hybrid(options.type, options.training_length), options.steps)
    for name, model in (("trained", sound), ("one-head-without-decay", planted(sound))):
        model.save_pretrained(options.output / name)
        byte_tokenizer().save_pretrained(options.output / name)
    folders = [str(options.output / name) for name in ("one-head-without-decay", "trained")]
    sizes = ["--length", str(options.length), "--sequences", str(options.sequences)]
    return main(["diagnose", *folders, "--roles", "base,other", *sizes, "--output", str(options.output / "diagnosis")])


if __name__ == "__main__":
    sys.exit(run())
