"""Rows of one length and a tokenizer without a pad token."""

from pathlib import Path

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.trainers import InitialStateConfig, ZeroStateTrainer
from tests.trainers import toys


def test_rows_of_one_length_need_no_pad_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    arguments = InitialStateConfig(str(tmp_path / "run"), max_steps=2, save_strategy="no", **toys.QUIET)
    trained = []
    for keyword in ({}, {"processing_class": tokenizer}):
        trainer = ZeroStateTrainer(toys.tiny_model(), arguments, train_dataset=toys.sequences(16), **keyword)
        trainer.train()
        trained.append(toys.weights(trainer.model))
    toys.assert_same_weights(*trained)
