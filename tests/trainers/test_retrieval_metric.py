"""Retrieval during training, with a model whose answers are known at each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.data.tasks import PasskeyGrid, Task
from hf_recurrent_lengthgen.trainers import MetricCallback, retrieval

REACH = [0, 115, 500, 1000, 0, 0, 0]
"""How many tokens back the model finds a key after 0, 1, ... steps."""
FOUND = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.5), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
"""Shares at 300 and 800 bytes, where a key at the start is 129 and 629 bytes back, one in the middle 105 and 355."""


class Finder(nn.Module):
    """Says what followed the last 8 tokens where they stood before, if that is not too far back; learns to count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(()))
        self.config = type("Config", (), {"vocab_size": 384, "to_json_string": lambda _: "{}"})()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        said = torch.zeros_like(input_ids)
        for row, ids in enumerate(input_ids.tolist()):
            seen: dict[tuple[int, ...], int] = {}
            for place in range(7, len(ids)):
                last = tuple(ids[place - 7 : place + 1])
                if place - seen.get(last, -(10**6)) <= REACH[round(self.steps.item())]:
                    said[row, place] = ids[seen[last] + 1]
                seen[last] = place
        return CausalLMOutput(loss=-self.steps, logits=nn.functional.one_hot(said, 384) * (1 + 0 * self.steps))


def finding(folder: Path, steps: int = 5, best: str = "retrieval_800", greater: bool = True, patience: int = 9) -> Any:
    """A trainer whose model has counted its steps at each evaluation."""
    best_of = {"metric_for_best_model": best, "load_best_model_at_end": True, "greater_is_better": greater}
    each = {"max_steps": steps, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "logging_steps": 1}
    plain = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", **best_of, **each, **plain)
    rows = [{"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([5, 6])}] * 64
    trainer = Trainer(Finder(), arguments, None, rows, rows[:2], callbacks=[EarlyStoppingCallback(patience)])
    MetricCallback([retrieval(PasskeyGrid(byte_tokenizer(), [0, 0.5], 2), [800, 300])]).attach(trainer)
    return trainer


def shares(trainer: Trainer) -> dict[int, tuple[float, float]]:
    entries = [entry for entry in trainer.state.log_history if "eval_retrieval_300" in entry]
    return {entry["step"]: (entry["eval_retrieval_300"], entry["eval_retrieval_800"]) for entry in entries}


@pytest.mark.parametrize(("best", "step"), [("retrieval_800", 3), ("eval_retrieval_300", 2)])
def test_the_checkpoint_that_retrieves_best_is_kept(tmp_path: Path, best: str, step: int) -> None:
    trainer = finding(tmp_path, best=best)
    trainer.train()
    assert shares(trainer) == dict(enumerate(FOUND))
    assert (trainer.state.best_global_step, trainer.state.best_metric, trainer.model.steps.item()) == (step, 1.0, step)
    found = trainer.evaluate()
    assert (found["eval_retrieval_300"], found["eval_retrieval_800"]) == FOUND[step]
    # Wilson (1927) for 4 right of 4: from n / (n + z^2) to 1
    assert found["eval_retrieval_300_low"] == pytest.approx(4 / (4 + 1.959964**2), abs=1e-6)


def test_a_resumed_run_goes_on_and_stops_early_with_the_same_values(tmp_path: Path) -> None:
    finding(tmp_path, steps=2, patience=1).train()
    trainer = finding(tmp_path, steps=6, patience=1)
    trainer.train(resume_from_checkpoint=True)
    assert shares(trainer) == dict(enumerate(FOUND[:5]))  # the first worse one is the last
    assert (trainer.state.best_global_step, trainer.model.steps.item()) == (3, 3.0)


def test_what_cannot_choose_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"best value of .* is the highest .*: set greater_is_better=True"):
        finding(tmp_path, greater=False)

    class Short(PasskeyGrid):
        def tasks(self, row: int, length: int) -> list[Task]:
            return [Task(torch.ones(8, dtype=torch.int64), torch.tensor([1]), 1)] if length > 8 else []

    with pytest.raises(ValueError, match="no question fits into 7 tokens"):
        retrieval(Short(byte_tokenizer(), [0], 1), [9, 7]).function(Finder())
