"""Training with torch.compile."""

from pathlib import Path

import pytest

from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from tests.trainers import toys


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own internals
def test_a_compiled_model_trains_the_same_weights(tmp_path: Path) -> None:
    results = []
    for compiled in (False, True):
        compiler = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled else {}
        config = StatePassingConfig(
            str(tmp_path / str(compiled)),
            **toys.QUIET,
            **compiler,
            max_steps=3,
            learning_rate=0.01,
            save_strategy="no",
            per_device_train_batch_size=2,
            alignment_alpha=0.1,
        )
        trainer = StatePassingTrainer(toys.tiny_model(num_hidden_layers=1), config, train_dataset=toys.sequences(8))
        trainer.train()
        results.append(toys.weights(trainer.model))
    toys.assert_same_weights(*results, atol=1e-4)
