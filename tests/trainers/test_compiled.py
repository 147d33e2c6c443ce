"""`torch_compile=True`: every trainer trains the same weights, in one graph of a model or one of a layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from hf_recurrent_lengthgen.trainers import (
    FittedNoiseConfig,
    FittedNoiseTrainer,
    InitialStateConfig,
    LearnedStateConfig,
    LearnedStateTrainer,
    MixedStatesConfig,
    MixedStatesTrainer,
    RandomNoiseConfig,
    RandomNoiseTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
)
from tests.trainers import toys

TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "zero": (ZeroStateTrainer, InitialStateConfig, {}),
    "alignment": (ZeroStateTrainer, InitialStateConfig, {"alignment_alpha": 0.1}),
    "random noise": (RandomNoiseTrainer, RandomNoiseConfig, {"noise_sigma": 1.0}),
    "fitted noise": (FittedNoiseTrainer, FittedNoiseConfig, {}),
    "state passing": (StatePassingTrainer, StatePassingConfig, {}),
    "learned state": (LearnedStateTrainer, LearnedStateConfig, {}),
    "mixture": (MixedStatesTrainer, MixedStatesConfig, {"mixture": {"zero": 0.5, "state_passing": 0.5}}),
    "tbtt": (TbttTrainer, TbttConfig, {}),
}


def trained(folder: Path, name: str, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after three steps in float64, two accumulated micro-batches each."""
    trainer, config, fields = TRAINERS[name]
    few = {"max_steps": 3, "learning_rate": 0.01, "save_strategy": "no", "gradient_accumulation_steps": 2}
    given = config(str(folder), **toys.QUIET | few | {"per_device_train_batch_size": 2} | fields | options)
    data = toys.chunks(64) if name == "tbtt" else toys.sequences(16)
    made = trainer(toys.tiny_model(num_hidden_layers=3).double(), given, train_dataset=data)
    made.train()
    return toys.weights(made.model)


def graphs_of(folder: Path, name: str) -> int:
    """How many graphs a compiled run makes, after a comparison of its weights with those of an eager one."""
    expected = trained(folder / "eager", name)
    torch._dynamo.reset()
    counters.clear()
    found = trained(folder / "compiled", name, torch_compile=True, torch_compile_backend="aot_eager")
    toys.assert_same_weights(found, expected, atol=1e-9)
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler, about its own internals


@pytest.mark.parametrize("name", TRAINERS)
def test_a_step_of_any_trainer_is_one_graph(name: str, tmp_path: Path) -> None:
    """The first step, which most start from zero, has that of all others; the second counted is an empty frame."""
    assert graphs_of(tmp_path, name) <= 2


@pytest.mark.parametrize("name", ["alignment", "mixture", "tbtt"])
def test_layers_share_a_graph(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's regional compilation: embedding, layer, norm and head are a graph each."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    assert graphs_of(tmp_path, name) == 4


def test_a_learned_state_is_outside_of_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    with pytest.raises(ValueError, match="compile the whole model"):
        trained(tmp_path, "learned state", torch_compile=True)
