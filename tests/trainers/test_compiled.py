"""`torch_compile=True`: every method trains the same weights, in one graph of a model or one of its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.trainers import TbttConfig, TbttTrainer
from tests.trainers import toys

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler, about its own internals
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def trained(folder: Path, method: str, **options: Any) -> dict[str, torch.Tensor]:
    """Weights after four steps in float64, the last of one micro-batch."""
    trainer = toys.resumable_trainer(folder, method=method, double=True, max_steps=4, save_strategy="no", **options)
    trainer.train()
    return toys.weights(trainer.model)


def graphs_of(folder: Path, method: str) -> int:
    """How many graphs a compiled run makes, after a comparison of its weights with those of an eager one."""
    expected = trained(folder / "eager", method)
    torch._dynamo.reset()
    counters.clear()
    toys.assert_same_weights(trained(folder / "compiled", method, **COMPILED), expected, atol=1e-9)
    return counters["stats"]["unique_graphs"]


# Chunks of compiled models are refused; chunks of examples have several lengths, and some are read without gradients.
SEVERAL = {"tbtt by document", "tbtt on examples"}


@pytest.mark.parametrize("method", sorted(toys.METHODS.keys() - SEVERAL - {"state passing in chunks"})[::3])
def test_a_step_of_a_method_is_one_graph(method: str, tmp_path: Path) -> None:
    """The first step, which most start from zero, has that of all others; the second counted is an empty frame.

    Every third method.
    """
    assert graphs_of(tmp_path, method) <= 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("method", sorted(SEVERAL))
def test_several_graphs_train_the_same_weights(method: str, tmp_path: Path) -> None:
    """Where sequences begin inside rows, layers run uncompiled: each layout would be a graph of its own."""
    assert graphs_of(tmp_path, method) <= 8


@pytest.mark.parametrize("method", ["alignment", "mixture", "tbtt"])
def test_layers_share_a_graph(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's regional compilation: embedding, layer, norm and head are a graph each."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    assert graphs_of(tmp_path, method) == 4


def test_a_learned_state_is_outside_of_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    trained(tmp_path / "eager", "learned state")  # nothing is compiled
    with pytest.raises(ValueError, match="compile the whole model"):
        trained(tmp_path / "compiled", "learned state", **COMPILED)


def test_a_compiled_model_evaluates_whole_rows_of_which_others_read_chunks(tmp_path: Path) -> None:
    rows = toys.examples(6)
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": PaddingCollator()}
    losses = []
    for compiled in (COMPILED, {}):
        args = TbttConfig(str(tmp_path), bptt_chunk_length=4, **toys.QUIET, **compiled)
        losses.append(TbttTrainer(toys.tiny_model(), args, **data).evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
