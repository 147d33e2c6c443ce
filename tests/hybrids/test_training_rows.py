"""The trainers of this package, and evaluation, on wrapped hybrids with rows of unequal length and packed rows."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening

from hf_recurrent_lengthgen.data import ContinuedChunks
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import concatenate_rows, map_state, take_rows
from hf_recurrent_lengthgen.trainers import (
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.checks import check_train_data
from tests.hybrids.padded_rows import tokens_of
from tests.hybrids.tiny_models import tiny_model

STEPS, ROWS, LEARNING_RATE = 3, 2, 0.05
SETTINGS: dict[str, Any] = {
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
LENGTHS = [9, 4, 12, 12, 1, 7]
TEXTS = [tokens_of(["a" * length], seed=length)[0] for length in LENGTHS]


def pad_rows(items: list[dict[str, Tensor]], left: bool = False) -> dict[str, Tensor]:
    side = "left" if left else "right"

    def padded(values: list[Tensor], fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, True, fill, padding_side=side)

    rows = [item["input_ids"] for item in items]
    mask = padded([torch.ones_like(row) for row in rows], 0)
    return {"input_ids": padded(rows, 0), "attention_mask": mask, "labels": padded(rows, -100)}


def trained_by_hand(model: Any, steps: list[list[Tensor]], carry: bool = True) -> Any:
    """The model after one step for each group of texts, each text read alone from the state of its place."""
    learner, state = copy.deepcopy(model).train(), None
    for texts in steps:
        losses, finals = [], []
        for row, text in enumerate(texts):
            start = None if state is None else take_rows(state, slice(row, row + 1))
            output = learner(input_ids=text[None], initial_state=start, output_final_state=True)
            losses.append(cross_entropy(output.logits[0, :-1], text[1:], reduction="none"))
            finals.append(map_state(Tensor.detach, output.final_state))
        gradients = torch.autograd.grad(torch.cat(losses).mean(), list(learner.parameters()), allow_unused=True)
        state = concatenate_rows(finals) if carry else None
        with torch.no_grad():
            for parameter, gradient in zip(learner.parameters(), gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(LEARNING_RATE * gradient)
    return learner


def difference(one: Any, other: Any) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_next"])
def test_rows_of_unequal_length_train_as_each_alone(model_type: str, checkpointing: bool, tmp_path: Path) -> None:
    model, seen = stateful(tiny_model(model_type)), list[dict[str, Tensor]]()
    start = copy.deepcopy(model)

    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        seen.append(pad_rows(items, left=len(seen) % 2 == 1))
        return seen[-1]

    rows = [{"input_ids": text} for text in TEXTS]
    names = StatePassingConfig.__dataclass_fields__
    field = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    config = StatePassingConfig(str(tmp_path), **SETTINGS | {field: checkpointing})
    trainer = StatePassingTrainer(model, config, train_dataset=rows, data_collator=collate)
    trainer.train()
    steps = [
        [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        for batch in seen[:STEPS]
    ]
    assert {len(text) for texts in steps for text in texts} == set(LENGTHS)
    assert difference(model, trained_by_hand(start, steps)) < 1e-5
    assert difference(model, trained_by_hand(start, steps, carry=False)) > 1e-4


def test_packed_texts_train_as_each_alone(tmp_path: Path) -> None:
    model, seen = stateful(tiny_model("falcon_h1")), list[list[Tensor]]()
    start = copy.deepcopy(model)
    collator = DataCollatorWithFlattening(return_position_ids=True)

    def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        seen.append([item["input_ids"] for item in items])
        batch: dict[str, Tensor] = collator([{"input_ids": item["input_ids"].tolist()} for item in items])
        return batch

    rows = [{"input_ids": text} for text in TEXTS]
    settings = {name: value for name, value in SETTINGS.items() if name != "state_drop_probability"}
    config = ZeroStateTrainer.config_class(str(tmp_path), **settings)
    trainer = ZeroStateTrainer(model, config, train_dataset=rows, data_collator=collate)
    trainer.train()
    assert difference(model, trained_by_hand(start, seen[:STEPS], carry=False)) < 1e-5
    assert difference(model, start) > 1e-3


def test_processes_cannot_share_rows_with_documents_that_begin_inside(tmp_path: Path) -> None:
    stream = torch.tensor([5, 6, 2] * 9)
    data = ContinuedChunks(stream, 8, None, reset_at_document=True, separator_id=2)
    settings = {name: value for name, value in SETTINGS.items() if name != "state_drop_probability"}
    trainer = TbttTrainer(stateful(tiny_model("mamba2")), TbttConfig(str(tmp_path), **settings), train_dataset=data)
    trainer.args.context_parallel_size = 2
    with pytest.raises(ValueError, match="which processes cannot share with Mamba2ForCausalLM"):
        check_train_data(trainer)


@pytest.mark.parametrize("left", [False, True])
def test_evaluation_of_rows_of_unequal_length_is_that_of_each_alone(left: bool, tmp_path: Path) -> None:
    model = stateful(tiny_model("qwen3_next"))
    rows = [{"input_ids": text} for text in TEXTS]
    trainer = StatePassingTrainer(
        model,
        StatePassingConfig(str(tmp_path), **SETTINGS, per_device_eval_batch_size=len(TEXTS)),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=lambda items: pad_rows(items, left),
    )
    with torch.no_grad():
        losses = [
            cross_entropy(model(input_ids=text[None]).logits[0, :-1], text[1:], reduction="none") for text in TEXTS
        ]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
