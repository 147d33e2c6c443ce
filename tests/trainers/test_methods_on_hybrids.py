"""Every method of `toys.METHODS` on every model type of Transformers that `stateful` takes: it works, or says why not.

A run has three steps of two rows. It works if all that it logs is finite and a run that resumes from the second step
ends with the same weights and log.
"""

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from hf_recurrent_lengthgen.surgery import expand_state
from hf_recurrent_lengthgen.trainers import (
    LearnedStateConfig,
    LearnedStateTrainer,
    StatePassingConfig,
    StatePassingTrainer,
)
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.trainers import toys

CONVOLUTIONS = ("lfm2", "lfm2_moe", "lfm3")
EXPANDABLE = tuple(name for name in SUPPORTED_TYPES if SUPPORTED[name].state_field)
FROM_ZERO = ("zero state", "alignment", "statex", "tbtt on examples")
NOISE = ("random noise", "fitted noise", "mixture")
# A class of model each: experts, attention without states; the delta rule; feed-forward layers, other names in the
# file; Mamba-1; convolutions only; a state that is no memory alone; no attention.
QUICK = {
    "granitemoehybrid": ("mixture", "statex", "state passing in chunks"),
    "qwen3_next": ("fitted noise",),
    "nemotron_h": ("tbtt, alignment",),
    "jamba": ("random noise", "tbtt by document"),
    "lfm2": ("state passing",),
    "xlstm": ("state passing in chunks", "tbtt on examples"),
    "mamba2": ("learned state",),
}
SELECTED = [
    pytest.param(name, methods, id=f"{name}-{speed}", marks=[pytest.mark.slow] if speed == "tenth" else [])
    for speed, types in (("quick", QUICK), ("tenth", {name: i for i, name in enumerate(SUPPORTED_TYPES)}))
    for name, methods in types.items()
]
"""Methods by name, or the remainder of their number by 10: a type meets each tenth method, and the reverse."""


@cache
def wrapped(model_type: str) -> Any:
    return stateful(tiny_model(model_type))


def refusal(model_type: str, method: str) -> str | None:
    """What the trainer says when it is made; None if it trains."""
    if method in NOISE and model_type in CONVOLUTIONS:
        return "cannot start from noise: its only states are those of short convolutions"
    if method in NOISE and model_type == "xlstm":
        return "cannot start from noise: memory, normalizer and stabilizer"
    if method.startswith("statex") and model_type not in EXPANDABLE:
        return "cannot be expanded"
    return None


def make(folder: Path, model_type: str, method: str) -> Any:
    chosen = toys.METHODS[method]
    settings = {"per_device_train_batch_size": 2, "learning_rate": 0.01, "save_steps": 2, "logging_steps": 1}
    if method.startswith("statex"):
        settings["expand_layers"] = "all"
    args = chosen.config(str(folder), **toys.QUIET | settings | chosen.settings | {"max_steps": 3})
    return chosen.trainer(copy.deepcopy(wrapped(model_type)), args, train_dataset=chosen.data(6))


def losses(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.thinned(7)
@pytest.mark.parametrize(("model_type", "methods"), SELECTED)
def test_a_method_trains_and_resumes_or_says_why_it_cannot(
    tmp_path: Path, model_type: str, methods: tuple[str, ...] | int
) -> None:
    for number, method in enumerate(toys.METHODS):
        message = refusal(model_type, method)
        folder = tmp_path / method
        if message is not None:
            with pytest.raises(ValueError, match=message):
                make(folder, model_type, method)
        elif (number - methods) % 10 == 0 if isinstance(methods, int) else method in methods:
            trainer, resumed = make(folder, model_type, method), make(folder, model_type, method)
            trainer.train()
            logged = losses(trainer)
            assert len(logged) == 3
            assert all(math.isfinite(value) for line in trainer.state.log_history for value in line.values()), method
            assert ("state_rms" in logged[0]) == (model_type not in CONVOLUTIONS), method
            assert (logged[2].get("zero_states", 1) < 1) == (method not in FROM_ZERO), method
            resumed.train(str(folder / "checkpoint-2"))
            assert losses(resumed) == logged, method
            after, again = (dict(each.model.named_parameters()) for each in (trainer, resumed))
            torch.testing.assert_close(again, after, rtol=0, atol=0, msg=lambda text: f"{method}: {text}")  # noqa: B023


@pytest.mark.parametrize("model_type", ["nemotron_h", "granitemoehybrid"])
def test_the_best_weights_are_taken_back_whatever_their_names_in_the_file(tmp_path: Path, model_type: str) -> None:
    """Transformers' Trainer would keep the last ones, with a warning."""
    settings = {"learning_rate": 10.0, "save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "max_steps": 2}
    config = StatePassingConfig(str(tmp_path), **toys.QUIET | settings, load_best_model_at_end=True)
    data = toys.sequences(24)
    model = copy.deepcopy(wrapped(model_type))
    trainer = StatePassingTrainer(model, config, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    measured = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert measured[0] != measured[1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(measured), rel=1e-6)


def test_weights_of_another_model_are_not_taken(tmp_path: Path) -> None:
    settings = toys.QUIET | {"max_steps": 2, "save_steps": 1}
    trainer = StatePassingTrainer(
        copy.deepcopy(wrapped("nemotron_h")),
        StatePassingConfig(str(tmp_path), **settings),
        train_dataset=toys.sequences(8),
    )
    trainer.train()
    other = stateful(tiny_model("nemotron_h", intermediate_size=32))
    tiny_model("nemotron_h", intermediate_size=80).save_pretrained(tmp_path / "checkpoint-1")
    trainer.model = other
    with pytest.raises(ValueError, match="checkpoint-1 do not fit this NemotronHForCausalLM"):
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))


@pytest.mark.slow
def test_adapters_on_a_model_with_other_names_in_its_file_resume(tmp_path: Path) -> None:
    trained = []
    for resume in (False, True):
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=["in_proj", "q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(copy.deepcopy(wrapped("nemotron_h")), lora)
        config = StatePassingConfig(str(tmp_path), **toys.QUIET | {"max_steps": 3, "save_steps": 2, "seed": 3})
        trainer = StatePassingTrainer(model, config, train_dataset=toys.sequences(24))
        trainer.train(str(tmp_path / "checkpoint-2") if resume else None)
        trained.append({name: value for name, value in model.named_parameters() if "lora_" in name})
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    assert any(bool(value.any()) for name, value in trained[0].items() if "lora_B" in name)


def test_the_types_are_those_that_are_supported() -> None:
    assert {*EXPANDABLE, *QUICK} <= set(SUPPORTED_TYPES)
    assert SUPPORTED.keys() & CONFIG_MAPPING.keys() == set(SUPPORTED_TYPES)  # each known type has a tiny model
    assert {name for name, family in SUPPORTED.items() if "convolution only" in family.state} == set(CONVOLUTIONS)


@pytest.mark.parametrize("learned", [False, True])
def test_layers_of_different_sizes_resume_whatever_their_names_in_the_file(tmp_path: Path, learned: bool) -> None:
    """With a learned state, too, which the stock class that reads the file does not support either."""
    model = expand_state(copy.deepcopy(wrapped("nemotron_h")), [1], factor=2, initialization="inherit")
    settings = {"per_device_train_batch_size": 2, "learning_rate": 0.01, "save_steps": 2, "max_steps": 3}
    settings |= {"train_model": True} if learned else {}
    config, trainer = (
        (LearnedStateConfig, LearnedStateTrainer) if learned else (StatePassingConfig, StatePassingTrainer)
    )
    args = config(str(tmp_path), **toys.QUIET | settings)
    whole, resumed = (trainer(copy.deepcopy(model), args, train_dataset=toys.sequences(6)) for _ in range(2))
    whole.train()
    resumed.train(str(tmp_path / "checkpoint-2"))
    toys.assert_same_weights(toys.weights(resumed.model), toys.weights(whole.model))
