"""How often a step waits for the device: each number that Python reads from a tensor is such a wait on a GPU."""

import math
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from hf_recurrent_lengthgen.trainers.row_layout import lay_out
from tests.trainers import toys
from tests.trainers.toys import METHODS, VOCABULARY

OPS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}
METHODS_OF_TENSORS = {"tolist", "numpy", "cpu"}
"""These do not reach the dispatcher on a CPU."""
NOT_FROM_THE_DEVICE = {
    "scan_backends.py": "reads on a CPU only",
    "continued.py": "the indices of a sampler, on the CPU",
    "sampler.py": "the same, of torch",
    "dataloader.py": "its seed, on the CPU",
    "data_place.py": "random states and rows as they are collated, on the CPU",
    "alignment_loss.py": "l_extra, drawn on the CPU",
}
CUTS = {"rows.py", "rows_moved.py", "segments.py", "chunks.py"}
"""Where documents begin decides how many rows there are, and masks are read."""


def reading_file() -> str:
    """The innermost file among the callers that is of this package, Transformers' Trainer or torch's data loader."""
    files = [Path(frame.filename) for frame in traceback.extract_stack()]
    ours = [path for path in files if "hf_recurrent_lengthgen" in path.parts or path.parts[-2:-1] == ("trainers",)]
    theirs = [("transformers", "trainer.py"), ("data", "sampler.py"), ("data", "dataloader.py")]
    known = [path for path in files if path in ours or path.parts[-2:] in theirs]
    return [path.name for path in known if path.name != Path(__file__).name][-1]


class _Ops(TorchDispatchMode):
    def __init__(self, files: Counter[str]) -> None:
        super().__init__()
        self.files = files

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in OPS:
            self.files[reading_file()] += 1
        return func(*args, **kwargs or {})


class _Methods(TorchFunctionMode):
    def __init__(self, files: Counter[str]) -> None:
        super().__init__()
        self.files = files

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in METHODS_OF_TENSORS:
            self.files[reading_file()] += 1
        return func(*args, **kwargs or {})


class Steps(TrainerCallback):
    """Reads of each step by file, without what is logged and saved."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(Counter({name: n for name, n in self.files.items() if name not in NOT_FROM_THE_DEVICE}))
        self.files.clear()


def reads_of_steps(folder: Path, method: str, **changes: Any) -> list[Counter[str]]:
    quiet = {"save_strategy": "no", "logging_strategy": "no"}
    trainer = toys.resumable_trainer(folder, method=method, rows=16, **{**quiet, **changes})
    steps = Steps()
    trainer.add_callback(steps)
    with _Ops(steps.files), _Methods(steps.files):
        trainer.train()
    return steps.steps[1:]  # fitted noise reads after the first step whether it has statistics


@pytest.mark.thinned(11)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_waits_once_for_the_device(tmp_path: Path, method: str) -> None:
    """Whatever the number of micro-batches: here two."""
    found = reads_of_steps(tmp_path, method)
    assert found
    for step in found:
        if method in ("tbtt by document", "tbtt on examples"):
            step = Counter({name: reads for name, reads in step.items() if name not in CUTS})
        reads = {"step_checks.py": 1}
        if toys.METHODS[method].settings.get("bptt_chunk_length"):
            reads["windows.py"] = 1  # which windows have targets
        assert step == reads


@pytest.mark.thinned(5)
@pytest.mark.parametrize("wrong", ["loss", "id", "label"])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_what_is_wrong_in_a_micro_batch_stops_the_step_before_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, micro_batch: int
) -> None:
    trainer = toys.resumable_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    loss_of = type(trainer)._loss

    def with_wrong_ids(self: Any, batch: dict[str, Any], number: int) -> Any:
        if wrong != "loss" and self.state.global_step == 1 and number == micro_batch:
            name = "input_ids" if wrong == "id" else "labels"
            batch = {**batch, name: batch[name].clone()}
            batch[name][1, 3] = VOCABULARY
        return lay_out(self, batch, number)

    calls = []

    def with_wrong_loss(self: Any, *arguments: Any) -> Any:
        calls.append(None)
        loss = loss_of(self, *arguments)
        return loss * math.nan if wrong == "loss" and len(calls) == 3 + micro_batch else loss

    monkeypatch.setattr("hf_recurrent_lengthgen.trainers.base.lay_out", with_wrong_ids)
    monkeypatch.setattr(type(trainer), "_loss", with_wrong_loss)
    seen = []
    trainer.add_callback(toys.OnStep(1, lambda: seen.append(toys.weights(trainer.model))))
    message = {
        "loss": rf"The loss of step 1, micro-batch {micro_batch} is nan",
        "id": rf"input_ids must be from 0 to {VOCABULARY - 1}, got {VOCABULARY} in row 1, position 3",
        "label": rf"labels must be from .*, or -100 for none, got {VOCABULARY} in row 1, position 3",
    }[wrong]
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert len(calls) == 4
    toys.assert_same_weights(toys.weights(trainer.model), seen[0])
