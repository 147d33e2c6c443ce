"""Small checkpoint folders that may be pushed."""

from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen.checkpoints.hub.push import do_push, plan_push
from hf_recurrent_lengthgen.checkpoints.records import Check, Verification, verified_files, write_verification
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

CARD = "---\nlibrary_name: transformers\nlicense: apache-2.0\n---\n\n# A model\n"
SIZES = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 2}


def verify(folder: Path, difference: float = 0.0) -> None:
    """Write that the folder has been verified, with one difference between logits."""
    check = Check("logits", "itself", tokens=9, difference=difference, tolerance=1e-5)
    write_verification(folder, Verification(verified_files(folder), (check,), {"torch": "2"}))


def write_checkpoint(folder: Path) -> Path:
    """A verified Mamba-2 with card, figure, result and a state file; and what Trainer leaves beside it."""
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=50, **SIZES))
    model.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    for name in ("figures/harm.png", "results/comparison.json", "states/document.safetensors"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b'{"file": "%s"}' % name.encode())
    for name in ("training_args.bin", "optimizer.pt", "initial_states_0.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"of the trainer")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "model.safetensors").write_bytes(b"older")
    verify(folder)
    return folder


NEVER_PUSHED = {"training_args.bin", "optimizer.pt", "initial_states_0.safetensors", "notes.txt"}


def push(folder: Path, name: str, **options: Any) -> str:
    """What `lengthgen push` does; options of `do_push`."""
    return do_push(plan_push(folder), name, **options)


def pushed_files(folder: Path) -> dict[str, bytes]:
    """What of the folder should be on the Hub, by name."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "checkpoint-10" not in path.parts)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: content for name, content in files.items() if name not in NEVER_PUSHED}
