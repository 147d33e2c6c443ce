"""Load a checkpoint and run it where this package cannot be imported: `python -P clean_process.py FOLDER`.

FOLDER holds request.json and tokens.safetensors, and gets outputs.safetensors. The process imports torch, Transformers
and safetensors only, and what the code of the checkpoint imports.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN = ("hf_recurrent_lengthgen", "trainers")
GRADIENT_TOKENS = 64


class Hidden:
    """The first finder of modules, which refuses this package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ImportError(f"a process without this package must not import {name}")


def gradient(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Gradient (1, T, D) of the sum of all squared logits with respect to the embeddings of the first tokens."""
    embedded = model.get_input_embeddings()(tokens[:1, :GRADIENT_TOKENS]).detach().requires_grad_()
    with torch.enable_grad():
        loss = model(inputs_embeds=embedded, use_cache=False).logits.square().sum()
        return torch.autograd.grad(loss, embedded)[0]


def read(model: Any, tokens: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Logits (B, T, V), the parts of the final state, if the model has one, and a gradient, by name.

    The tokens (B, T) are read in chunks of these lengths if the model carries states.
    """
    carries = "initial_state" in inspect.signature(model.forward).parameters
    in_chunks = carries and not getattr(model, "stateless_layers", [])
    state, logits = None, []
    for chunk in tokens.split(lengths if in_chunks else tokens.shape[1], dim=1):
        output = model(input_ids=chunk, initial_state=state) if carries else model(input_ids=chunk)
        logits.append(output.logits)
        state = output.final_state if carries else None
    parts = {f"state.{i}.{j}": part for i, layer in enumerate(state or ()) for j, part in enumerate(layer)}
    return {"logits": torch.cat(logits, dim=1), **parts, "gradient": gradient(model, tokens)}


def check_tokenizer(tokenizer: Any, embeddings: int) -> None:
    """Raise a `ValueError` for a tokenizer that lacks its vocabulary, or has more ids than embeddings."""
    vocabulary = tokenizer.get_vocab()
    if set(vocabulary) <= set(tokenizer.all_special_tokens):
        raise ValueError("the tokenizer has no tokens, so one of its files is missing")
    if (largest := max(vocabulary.values())) >= embeddings:
        raise ValueError(f"the tokenizer has ids up to {largest}, and the model only {embeddings} embeddings")


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Hidden())
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    # TF32 rounds the factors of float32 convolutions and matrix products on a GPU
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    checkpoint, trust = request["checkpoint"], {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(checkpoint, **trust)
    if hasattr(config, "scan_backend"):
        config.scan_backend = "torch"
    dtype = getattr(torch, request["dtype"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=dtype, **trust)
    model = loaded.eval().to(request["device"])
    if request["tokenizer"]:
        check_tokenizer(
            AutoTokenizer.from_pretrained(checkpoint, **trust), model.get_input_embeddings().weight.shape[0]
        )
    tokens = load_file(folder / "tokens.safetensors")["tokens"].to(model.device)
    with torch.no_grad():
        tensors = read(model, tokens, request["lengths"])
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
