"""Time and memory of one training step with the alignment loss, against the model's own loss on the same 2B rows."""

import torch
from measure import in_own_process, peak_mib, saved_bytes, take_turns
from torch import Tensor

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers.alignment_loss import aligned_cross_entropy, shifted_targets, two_crops

LENGTH, VOCABULARY = 512, 50_000
EXTRA = 1  # the largest overlap, so the most work


def four_layers() -> StatefulMamba2ForCausalLM:
    """The dimensions of Mamba-2 130m in four layers, with gradients, which Trainer has from the second step on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = StatefulMamba2Config(**sizes, **special, num_hidden_layers=4, vocab_size=VOCABULARY)
    model = StatefulMamba2ForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def step_loss(model: StatefulMamba2ForCausalLM, name: str) -> Tensor:
    """The loss of two crops of one row, "plain" or "aligned"."""
    ids = torch.arange(LENGTH + EXTRA)[None] * 7919 % VOCABULARY
    batch = two_crops({"input_ids": ids, "labels": ids}, LENGTH, EXTRA)
    if name == "plain":
        loss: Tensor = model(**batch).loss
        return loss
    logits = model(input_ids=batch["input_ids"]).logits
    return aligned_cross_entropy(logits, shifted_targets(batch), EXTRA, alpha=0.1).loss


def bench_alignment(rounds: int) -> dict[str, float]:
    """A step with the alignment loss against one without, D 768, 4 layers, vocabulary 50,000, 2 rows of 512 tokens."""
    model = four_layers()
    names = {"ours": "aligned", "theirs": "plain"}
    seconds, speed_ratio = take_turns(
        rounds, {key: lambda name=name: step_loss(model, name).backward() for key, name in names.items()}
    )
    saved = {
        name: saved_bytes(lambda name=name: step_loss(model, name), model.parameters()) for name in names.values()
    }
    peak = {name: in_own_process("peak_of_alignment", name)["peak_mib"] for name in ("none", *names.values())}
    growth = {name: value - peak["none"] for name, value in peak.items()}
    return (
        {f"{name}_seconds": seconds[key] for key, name in names.items()}
        | {"time_ratio": 1 / speed_ratio}
        | {f"{name}_saved_mib": value / 2**20 for name, value in saved.items()}
        | {f"{name}_peak_mib": value for name, value in peak.items()}
        | {"peak_ratio": peak["aligned"] / peak["plain"], "peak_growth_ratio": growth["aligned"] / growth["plain"]}
    )


def peak_of_alignment(name: str) -> dict[str, float]:
    """Peak memory of a process that makes the model and, unless `name` is "none", takes one step."""
    model = four_layers()
    if name != "none":
        step_loss(model, name).backward()
    return {"peak_mib": peak_mib()}
