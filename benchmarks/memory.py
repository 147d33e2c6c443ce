"""Peak memory of loading, evaluating and training a checkpoint, in sizes of the checkpoint."""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import in_own_process
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer

# Mamba-2 1.3b
BIG: dict[str, Any] = {
    "hidden_size": 2048,
    "num_heads": 64,
    "head_dim": 64,
    "state_size": 128,
    "num_hidden_layers": 48,
}
TINY: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 16, "num_hidden_layers": 2}
WHAT = ("load_model", "load_in_float32", "from_pretrained", "evaluate", "train")
# many narrow layers, so that states are most of the memory
DEEP: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_heads": 8,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "num_hidden_layers": 48,
}


class Watch(threading.Thread):
    """The most memory of this process that no file stands behind (RssAnon), and all that was resident (VmHWM)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = 0.0
        self.go_on = True

    def run(self) -> None:
        while self.go_on:
            self.anonymous = max(self.anonymous, status_mib("RssAnon"))
            time.sleep(0.002)


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def make_checkpoint(folder: str) -> dict[str, float]:
    """A random Mamba-2 in bfloat16; the name of its folder is its size."""
    torch.set_default_dtype(torch.bfloat16)
    sizes = BIG if Path(folder).name == "big" else TINY
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "n_groups": 1}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=50_288, **special, **sizes))
    model.save_pretrained(folder)
    files = Path(folder).glob("*.safetensors")
    return {"mib": sum(file.stat().st_size for file in files) / 2**20, "parameters": model.num_parameters()}


def peak_of_use(argument: str) -> dict[str, float]:
    """Peaks while a checkpoint is loaded and used; `argument` is what is done, and the folder."""
    what, folder = argument.split(":")
    watch = Watch()
    watch.start()
    if what == "from_pretrained":
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        model: Any = load_model(folder, dtype=torch.float32 if what == "load_in_float32" else torch.bfloat16)
    if what == "evaluate":
        tokens = np.random.default_rng(0).integers(0, 50_288, (1, 129))
        evaluate_model(model, tokens, 32, settings=EvaluationSettings(progress=False))
    if what == "train":
        train_one_step(model)
    watch.go_on = False
    return {"anonymous_mib": watch.anonymous, "resident_mib": status_mib("VmHWM")}


def train_one_step(model: Any) -> None:
    """A step of state passing in bfloat16 with activation checkpointing and SGD, on a row of 64 tokens."""
    data: Dataset[Any] = PackedBlocks(torch.arange(2 * 65) % 251, 64)
    with tempfile.TemporaryDirectory() as folder:
        arguments = StatePassingConfig(
            folder,
            max_steps=1,
            per_device_train_batch_size=1,
            bf16=True,
            gradient_checkpointing=True,
            optim="sgd",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        StatePassingTrainer(model, arguments, train_dataset=data).train()


def peak_of_deep(argument: str) -> dict[str, float]:
    """Growth of memory in a training pass of `DEEP`, 8 rows of 64 tokens, bfloat16, activation checkpointing.

    The argument says whether final states are asked for ("1", "0").
    """
    torch.manual_seed(0)
    model: Any = StatefulMamba2ForCausalLM(StatefulMamba2Config(**DEEP)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    state = sum(part.nbytes for layer in model.zero_state(8) for part in layer)
    ids = torch.arange(8 * 64).view(8, 64)

    def step(rows: slice) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ids[rows], labels=ids[rows], output_final_state=argument == "1")
        output.loss.backward()

    step(slice(1))  # makes the gradients
    watch, before = Watch(), status_mib("RssAnon")
    watch.start()
    step(slice(8))
    watch.go_on = False
    return {"mib": watch.anonymous - before, "states_mib": state / 2**20}


def bench_memory(rounds: int) -> dict[str, float]:
    """Peaks with 1.3 billion parameters above those with a tiny checkpoint, in sizes of it, once; and of `DEEP`."""
    result: dict[str, float] = {}
    for asked in ("0", "1"):
        peak = in_own_process("peak_of_deep", asked)
        result[f"deep_{'with' if asked == '1' else 'without'}_final_states_mib"] = peak["mib"]
        result["deep_states_mib"] = peak["states_mib"]
    with tempfile.TemporaryDirectory() as folder:
        made = {size: in_own_process("make_checkpoint", f"{folder}/{size}") for size in ("tiny", "big")}
        size = made["big"]["mib"] - made["tiny"]["mib"]
        result["parameters_million"] = made["big"]["parameters"] / 1e6
        result["checkpoint_mib"] = made["big"]["mib"]
        for what in WHAT:
            tiny, big = (in_own_process("peak_of_use", f"{what}:{folder}/{name}") for name in ("tiny", "big"))
            for kind in ("anonymous", "resident"):
                result[f"{what}_{kind}_in_sizes"] = (big[f"{kind}_mib"] - tiny[f"{kind}_mib"]) / size
    return result
