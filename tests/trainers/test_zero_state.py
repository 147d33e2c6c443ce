"""Plain training, as a trainer of this package."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import Trainer

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.trainers import StatePassingConfig, ZeroStateTrainer
from tests.trainers import toys


def trained(trainer_class: type[Trainer], config: StatePassingConfig, **given: Any) -> dict[str, Any]:
    model = toys.tiny_model()
    trainer_class(model, config, train_dataset=toys.sequences(16), **given).train()
    return toys.weights(model)


def test_the_zero_state_trainer_trains_as_trainer_does(make_config: Callable[..., StatePassingConfig]) -> None:
    config = make_config(max_steps=3, learning_rate=1e-2)
    ours, theirs = trained(ZeroStateTrainer, config), trained(Trainer, config)
    toys.assert_same_weights(ours, theirs)
    without_pad_token = byte_tokenizer()  # which rows of one length do not need
    without_pad_token.pad_token = None
    toys.assert_same_weights(trained(ZeroStateTrainer, config, processing_class=without_pad_token), theirs)
    with pytest.raises(AssertionError):
        toys.assert_same_weights(trained(Trainer, make_config(max_steps=1, learning_rate=0.0)), theirs)


def test_a_batch_size_that_finds_itself_is_refused(make_config: Callable[..., StatePassingConfig]) -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size is not supported"):
        trained(ZeroStateTrainer, make_config(max_steps=1, auto_find_batch_size=True))
