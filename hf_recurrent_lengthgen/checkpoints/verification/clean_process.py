"""Load a checkpoint and run it where this package cannot be imported: `python -P clean_process.py FOLDER`.

FOLDER holds request.json and tokens.safetensors, and gets answer.json and outputs.safetensors. The process imports
torch, Transformers and safetensors only, and what the code of the checkpoint imports.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

HIDDEN = ("hf_recurrent_lengthgen", "trainers")


class Hidden:
    """The first finder of modules, which refuses this package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ImportError(f"a process without this package must not import {name}")


def read(model: nn.Module, tokens: torch.Tensor, lengths: list[int], carry: bool) -> dict[str, torch.Tensor]:
    """Logits (B, T, V) and the parts of the final state, by name, for tokens (B, T) read in pieces of these lengths.

    Args:
        carry: Whether the model takes and returns states; if not, there is one piece, and no state in the answer.
    """
    state, logits = None, []
    for piece in tokens.to(next(model.parameters()).device).split(lengths, dim=1):
        output = model(input_ids=piece, initial_state=state) if carry else model(input_ids=piece)
        logits.append(output.logits.cpu())
        state = output.final_state if carry else None
    parts = {f"state.{i}.{j}": part.cpu() for i, layer in enumerate(state or ()) for j, part in enumerate(layer)}
    return {"logits": torch.cat(logits, dim=1), **parts}


def exact_arithmetic() -> None:
    """Turn off TF32, which rounds the factors of float32 convolutions and matrix products on a GPU."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def tokenizer_answer(checkpoint: str, probe: str) -> dict[str, Any]:
    """Number of tokens of the tokenizer, and the ids of the probe text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    vocabulary = tokenizer.get_vocab()
    return {
        "real": not set(vocabulary) <= set(tokenizer.all_special_tokens),
        "largest_id": max(vocabulary.values(), default=-1),
        "ids": tokenizer(probe, add_special_tokens=False)["input_ids"],
    }


def answer(request: dict[str, Any], tokens: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Facts on the checkpoint as JSON, and the tensors of its outputs by name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = request["checkpoint"]
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
    if hasattr(config, "scan_backend"):
        config.scan_backend = "torch"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        config=config,
        dtype=getattr(torch, request["dtype"]),
        trust_remote_code=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, found = loaded
    model = model.eval().to(request["device"])
    carry = "initial_state" in inspect.signature(model.forward).parameters
    in_pieces = carry and not getattr(model, "stateless_layers", [])
    facts = {
        "class": type(model).__name__,
        "module": type(model).__module__,
        "carries": carry,
        "in_pieces": in_pieces,
        **{name: sorted(map(str, found[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")},
    }
    pieces = {"at once": [tokens.shape[1]], **({"in pieces": request["pieces"]} if in_pieces else {})}
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, lengths in pieces.items():
            tensors |= {f"{name}/{key}": value for key, value in read(model, tokens, lengths, carry).items()}
    return facts, tensors


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Hidden())
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    exact_arithmetic()
    facts, tensors = answer(request, load_file(folder / "tokens.safetensors")["tokens"])
    if request["tokenizer"]:
        facts["tokenizer"] = tokenizer_answer(request["checkpoint"], request["probe"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "outputs.safetensors")
    (folder / "answer.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
