"""Methods on trainers of Transformers and of users, and how the config of any trainer is found."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer, TbttTrainer, combine
from tests.trainers import toys

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings(
    # TRL's configs still use the name that Transformers replaced by activation_checkpointing.
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning",
)


def test_a_trainer_of_ones_own_goes_with_a_method(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    trainer_class, config_class = combine(Weighted, StatePassingTrainer)
    assert config_class is StatePassingConfig
    settings = toys.QUIET | {"max_steps": 2, "save_strategy": "no", "logging_steps": 1}
    trainer = trainer_class(
        toys.tiny_model(), config_class(str(tmp_path), **settings), train_dataset=toys.sequences(16)
    )
    trainer.train()
    assert 2 * 2.5 < trainer.state.log_history[0]["loss"] < 2 * 3.5  # ln 17 = 2.8


def test_generation_at_evaluation_goes_with_a_method(tmp_path: Path) -> None:
    trainer_class, config_class = combine(Seq2SeqTrainer, StatePassingTrainer)
    assert issubclass(config_class, Seq2SeqTrainingArguments)
    settings = toys.QUIET | {"max_steps": 2, "save_strategy": "no", "predict_with_generate": True}
    arguments = config_class(str(tmp_path), **settings, generation_max_length=14)
    rows = toys.sequences(16)
    trainer = trainer_class(toys.tiny_model(), arguments, train_dataset=rows, eval_dataset=rows[:3])
    trainer.train()
    expected = trainer.model.generate(torch.stack([row["input_ids"] for row in rows[:3]]), max_length=14)
    found = trainer.predict(rows[:3]).predictions[:, : expected.shape[1]]
    assert found.tolist() == expected.tolist()


class OnOwnTexts(trl.SFTTrainer):  # type: ignore[misc]
    pass


class WeighingTrainer(Trainer):
    pass


@dataclass
class WeighingConfig(TrainingArguments):
    own: int = 3


@pytest.mark.parametrize(
    ("other", "config"),
    [
        (OnOwnTexts, trl.SFTConfig),
        (WeighingTrainer, WeighingConfig),
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
    ],
)
def test_the_config_of_any_trainer_is_found(other: Any, config: Any) -> None:
    trainer_class, config_class = combine(other, StatePassingTrainer)
    assert trainer_class.config_class is config_class
    assert issubclass(config_class, config)
    assert issubclass(config_class, trl.SFTConfig) == (config is trl.SFTConfig)


def test_the_config_has_the_fields_of_both_and_the_defaults_of_trl(tmp_path: Path) -> None:
    trainer, config = combine(StatePassingTrainer, trl.SFTTrainer)
    assert combine(trl.SFTTrainer, StatePassingTrainer) == (trainer, config)
    arguments = config(str(tmp_path), use_cpu=True, state_drop_probability=0.3)
    assert (arguments.learning_rate, arguments.max_length) == (2e-5, 1024)
    assert (
        arguments.method_settings()
        == StatePassingConfig(str(tmp_path), use_cpu=True, state_drop_probability=0.3).method_settings()
    )
    for same in (copy.deepcopy(arguments), pickle.loads(pickle.dumps(arguments))):
        assert isinstance(same, config)
        assert same.to_dict() == arguments.to_dict()
    with pytest.raises(ValueError, match="state_drop_probability must be between 0 and 1"):
        config(str(tmp_path), use_cpu=True, state_drop_probability=3)


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        (lambda: (StatePassingTrainer, trl.DPOTrainer), "DPOTrainer does not train on single texts"),
        (lambda: (trl.GRPOTrainer, StatePassingTrainer), "GRPOTrainer does not train on single texts"),
        (
            lambda: (StatePassingTrainer, TbttTrainer),
            "the trainer of one method of this package and one other trainer",
        ),
        (lambda: (trl.SFTTrainer, Trainer), "the trainer of one method of this package and one other trainer"),
        (lambda: (StatePassingTrainer, Trainer), "is a Trainer already"),
    ],
)
def test_other_pairs_are_refused(pair: Callable[[], tuple[Any, Any]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        combine(*pair())
