"""Time and memory of a step on long examples that are read in pieces, by their length, against rows of one piece."""

import statistics
import tempfile

import torch
from measure import in_own_process, peak_mib
from trainer_steps import SMALL, StepTimer

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import TbttConfig, TbttTrainer

PIECE, ROWS, STEPS = 128, 16, 4
PIECES = (1, 4, 16, 64)


def step_seconds(pieces: int, labels_everywhere: bool = False) -> float:
    """Of 16 rows of so many pieces, each with four targets at its end, or everywhere."""
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (ROWS, pieces * PIECE))
    labels = ids if labels_everywhere else ids.masked_fill(torch.arange(ids.shape[1]) < ids.shape[1] - 4, -100)
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    timer = StepTimer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TbttConfig(
            folder,
            bptt_chunk_length=PIECE,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**SMALL))
        TbttTrainer(model, arguments, train_dataset=data, callbacks=[timer]).train()
    return statistics.median(timer.seconds[1:])


def bench_long_examples(rounds: int) -> dict[str, float]:
    """A step of TBTT on examples of 1 to 64 pieces of 128 tokens with an answer at the end: time and peak memory."""
    runs = {str(pieces): (pieces, False) for pieces in PIECES} | {"16_all_labels": (16, True)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(min(rounds, 5)):
        for name, run in runs.items():
            seconds[name].append(step_seconds(*run))
    ratios = {
        name: statistics.median(own / one for own, one in zip(seconds[name], seconds["1"], strict=True))
        for name in runs
    }
    peaks = {name: in_own_process("peak_of_examples", name)["peak_mib"] for name in ("0", *map(str, PIECES))}
    return (
        {f"seconds_{name}": statistics.median(values) for name, values in seconds.items()}
        | {f"over_one_piece_{name}": ratio for name, ratio in ratios.items()}
        | {f"peak_mib_{name}": peak for name, peak in peaks.items()}
    )


def peak_of_examples(pieces: str) -> dict[str, float]:
    """Peak memory of a process that trains on examples of so many pieces; for 0, of one that only imports."""
    if int(pieces):
        step_seconds(int(pieces))
    return {"peak_mib": peak_mib()}
