"""The trainers of this package on wrapped hybrids."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import default_data_collator

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.recurrent_state import detach_state
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from tests.hybrids.measures import parts
from tests.hybrids.tiny_models import VOCABULARY, tiny_model

STEPS, ROWS, LENGTH, LEARNING_RATE = 3, 2, 12, 0.05
SETTINGS = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": STEPS,
    "learning_rate": LEARNING_RATE,
    "per_device_train_batch_size": ROWS,
    "state_drop_probability": 0.0,
}


def blocks() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCABULARY, (STEPS * ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_next"])
def test_state_passing_trains_as_a_loop_written_by_hand(model_type: str, checkpointing: bool, tmp_path: Path) -> None:
    model = stateful(tiny_model(model_type))
    by_hand = copy.deepcopy(model).train()
    without_states = copy.deepcopy(model).train()
    names = StatePassingConfig.__dataclass_fields__
    field = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    settings: dict[str, Any] = SETTINGS | {field: checkpointing}
    seen: list[dict[str, Tensor]] = []

    def collate(items: list[Any]) -> dict[str, Tensor]:
        seen.append(default_data_collator(items))
        return seen[-1]

    trainer = StatePassingTrainer(
        model, StatePassingConfig(str(tmp_path), **settings), train_dataset=blocks(), data_collator=collate
    )
    trainer.train()

    def train_by_hand(learner: Any, carry: bool) -> None:
        state = None
        for batch in seen[:STEPS]:
            output = learner(**batch, initial_state=state, output_final_state=True)
            gradients = torch.autograd.grad(output.loss, list(learner.parameters()), allow_unused=True)
            state = detach_state(output.final_state) if carry else None
            with torch.no_grad():
                for parameter, gradient in zip(learner.parameters(), gradients, strict=True):
                    if gradient is not None:
                        parameter.sub_(LEARNING_RATE * gradient)

    train_by_hand(by_hand, carry=True)
    train_by_hand(without_states, carry=False)

    def difference(other: Any) -> float:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    assert difference(by_hand) < 1e-5
    assert difference(without_states) > 1e-4


def test_states_are_saved_and_taken_up_on_resume(tmp_path: Path) -> None:
    trained = []
    for resume in (False, True):
        model = stateful(tiny_model("falcon_h1"))
        config = StatePassingConfig(str(tmp_path), **SETTINGS | {"save_steps": 2, "max_steps": STEPS})
        trainer = StatePassingTrainer(model, config, train_dataset=blocks(), data_collator=default_data_collator)
        trainer.train(str(tmp_path / "checkpoint-2") if resume else None)
        trained.append(model)
    assert all(map(torch.equal, *(model.parameters() for model in trained)))
    assert parts(trained[0].zero_state(1))[0].dtype == torch.float32
