"""Loss and gradients are means over the targets that are scored, however texts stand in rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ByT5Tokenizer, DataCollatorForLanguageModeling

from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.run.scored_targets import with_scored_labels
from tests.trainers import toys

MakeConfig = Callable[..., StatePassingConfig]
TEXTS = [[1, 3, 3, 7, 4, 2, 9, 9, 12, 5, 6, 8], [4, 4, 10], [5, 1, 16, 2], [11, 6, 14, 3, 13]]
TARGETS = 20  # each text but its first token


def padded_left() -> list[dict[str, Tensor]]:
    collator = DataCollatorForLanguageModeling(ByT5Tokenizer(padding_side="left"), mlm=False)
    batch = collator([{"input_ids": text} for text in TEXTS])
    return [{name: values[i] for name, values in batch.items()} for i in range(4)]


def padded_left_and_shifted() -> list[dict[str, Tensor]]:
    rows = padded_left()
    for row in rows:
        row["shift_labels"] = F.pad(row["labels"][1:], (0, 1), value=-100)
    return rows


def packed(name: str) -> list[dict[str, Tensor]]:
    """A row of the first text and one of the three others, and both again."""
    rows = []
    for texts in 2 * [TEXTS[:1], TEXTS[1:]]:
        ids = torch.tensor([token for text in texts for token in text])
        marks = {
            "position_ids": [place for text in texts for place in range(len(text))],
            "seq_idx": [number for number, text in enumerate(texts) for _ in text],
        }
        rows.append({"input_ids": ids, "labels": ids.clone(), name: torch.tensor(marks[name])})
    return rows


LAYOUTS: dict[str, Callable[[], list[dict[str, Tensor]]]] = {
    "padding on the left": padded_left,
    "shift_labels behind padding": padded_left_and_shifted,
    "position_ids": lambda: packed("position_ids"),
    "seq_idx": lambda: packed("seq_idx"),
}


def by_hand(model: Any) -> Tensor:
    """Each text alone."""
    losses = []
    for text in map(torch.tensor, TEXTS):
        losses.append(F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum"))
    return torch.stack(losses).sum() / TARGETS


@pytest.mark.thinned(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [4, 2, 1])
def test_loss_and_gradients_are_means_over_what_is_scored(make_config: MakeConfig, layout: str, rows: int) -> None:
    model, data = toys.tiny_model(), LAYOUTS[layout]()
    expected = by_hand(model)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    before = toys.weights(model)
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 4 // rows, "max_steps": 1}
    plain = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    config = make_config(
        **sizes,
        **plain,
        logging_steps=1,
        per_device_eval_batch_size=4,
        remove_unused_columns=False,
        state_drop_probability=1.0,
    )
    trainer = StatePassingTrainer(model, config, train_dataset=data, eval_dataset=data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [pytest.approx(expected.item(), rel=1e-4)]
    for (name, old), gradient in zip(before.items(), gradients, strict=True):
        torch.testing.assert_close(old - dict(model.named_parameters())[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_loss_of_ones_own_gets_the_labels_that_are_counted(make_config: MakeConfig) -> None:
    seen = []

    def own(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        seen.append((int(labels[:, 1:].ne(-100).sum()), int(num_items_in_batch)))
        return outputs.logits.sum() / num_items_in_batch

    config = make_config(per_device_train_batch_size=4, max_steps=1)
    StatePassingTrainer(toys.tiny_model(), config, train_dataset=padded_left(), compute_loss_func=own).train()
    assert seen == [(TARGETS, TARGETS)]


def test_labels_of_another_head_stay_as_they_are() -> None:
    """A model that classifies tokens scores the first one, too."""
    batch = {"input_ids": torch.tensor([[0, 5, 6]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    batch["labels"] = torch.tensor([[-100, 1, 0]])
    head: Any = SimpleNamespace(get_output_embeddings=lambda: None)
    assert with_scored_labels(head, batch)["labels"].tolist() == [[-100, 1, 0]]
    head.get_output_embeddings = lambda: torch.nn.Linear(1, 1)
    assert with_scored_labels(head, batch)["labels"].tolist() == [[-100, -100, 0]]
