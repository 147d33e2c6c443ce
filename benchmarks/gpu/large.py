"""A Mamba-2 of 1.3 billion random weights: steps of every trainer on one GPU, and the memory that they take.

bf16 autocast over float32 weights, AdamW, 4 rows of 2,048 tokens. What does not fit is tried with half the rows.
"""

from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.speed import TINY_SIZES, Timer
from benchmarks.gpu.stage import DEVICE, Part, Stage, free_memory, in_short, parameters_of, peak_gib, scan_of
from benchmarks.trainer_steps import SETTINGS
from hf_recurrent_lengthgen.data import ContinuedChunks, PackedBlocks
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.trainers import INTERVENTIONS, AlignmentTrainer

CONFIG = Path(__file__).resolve().parents[2] / "hf_recurrent_lengthgen/recipes/models/mamba2-1.3b.json"
ROWS, LENGTH, STEPS = 4, 2048, 3
OPTIONS: dict[str, dict[str, Any]] = SETTINGS | {"learned": {"train_model": True}, "statex": {"expand_count": 1}}
TRAINERS = INTERVENTIONS | {"alignment": AlignmentTrainer}
SECONDS = 40.0


@cache
def random_model(tiny: bool) -> Any:
    """On the CPU, float32; the trainers get copies."""
    torch.manual_seed(0)
    model_class = FAMILIES["stateful_mamba2"]
    if tiny:
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
        return model_class(model_class.config_class(vocab_size=256, **special, **TINY_SIZES["mamba2"]))
    return model_class(model_class.config_class.from_json_file(str(CONFIG)))


def steps_of(method: str, tiny: bool, work: str) -> dict[str, Any]:
    """Rows that fit, seconds of the last step, and peak memory."""
    rows = 2 if tiny else ROWS
    while True:
        try:
            return taken(method, tiny, work, rows)
        except torch.OutOfMemoryError as error:
            if rows == 1:
                return {"missing": f"memory for one row: {in_short(error)}"}
        rows //= 2
        free_memory()


def taken(method: str, tiny: bool, work: str, rows: int) -> dict[str, Any]:
    """Steps with this number of rows."""
    length = 16 if tiny else LENGTH
    stream = torch.arange((STEPS + 1) * rows * (length + 1)) % 251
    trainer_class = TRAINERS[method]
    arguments = trainer_class.config_class(
        work,
        max_steps=STEPS,
        per_device_train_batch_size=rows,
        bf16=True,
        use_cpu=DEVICE == "cpu",
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **OPTIONS.get(method, {}),
    )
    timer = Timer()
    model = deepcopy(random_model(tiny))
    data: Any = ContinuedChunks(stream, length, 2) if method == "tbtt" else PackedBlocks(stream, length)
    trainer = trainer_class(model, arguments, train_dataset=data, callbacks=[timer])
    peak = peak_gib(trainer.train)
    result = {"rows": rows, "step_seconds": round(timer.seconds[-1], 3), "peak_gib": peak}
    return result | {"parameters": parameters_of(trainer.model), "scan": scan_of(trainer.model)}


def run(stage: Stage) -> None:
    """A part for each trainer."""
    stage.work.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Part] = {name: partial(steps_of, name, stage.tiny, str(stage.work)) for name in TRAINERS}
    stage.run(parts, 0 if stage.tiny else SECONDS)
    random_model.cache_clear()


def row(parts: dict[str, Any]) -> str:
    """Memory and time of each trainer."""
    scans = ", ".join(sorted({part["scan"] for part in parts.values() if "rows" in part}))
    return f"scan by {scans or 'nothing yet'}; " + "; ".join(
        f"{name}: {part['rows']} rows, {part['step_seconds']} s a step, {part['peak_gib']} GiB"
        if "rows" in part
        else f"{name}: {part.get('missing') or part.get('error')}"
        for name, part in parts.items()
    )
