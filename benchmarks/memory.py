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

from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.evaluation.evaluate import EvaluationSettings, evaluate_model
from hf_recurrent_lengthgen.loading import load_model
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer

# half a billion parameters, so that it fits beside other work
BIG: dict[str, Any] = {
    "hidden_size": 1536,
    "num_heads": 48,
    "head_dim": 64,
    "state_size": 128,
    "num_hidden_layers": 24,
}
TINY: dict[str, Any] = {"hidden_size": 64, "num_heads": 2, "head_dim": 64, "state_size": 16, "num_hidden_layers": 2}
WHAT = ("load_model", "from_pretrained", "evaluate", "train")


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
        model: Any = load_model(folder, dtype=torch.bfloat16)
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


def bench_memory(rounds: int) -> dict[str, float]:
    """Peaks with a checkpoint of half a billion parameters above those with a tiny one, in its sizes, once."""
    result: dict[str, float] = {}
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
