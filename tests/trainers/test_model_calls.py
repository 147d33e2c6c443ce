"""A method that does not reach the model ends the run; none is recorded that took no part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_recurrent_lengthgen.trainers import AlignmentTrainer, FittedNoiseTrainer, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.run.step_checks import ModelCalls
from tests.trainers import toys


class Alone(Trainer):
    """Computes the loss without asking anyone."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"])["loss"]


class Dropping(Trainer):
    """Leaves something out of the inputs."""

    dropped: str

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != self.dropped}
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("method", ["state passing", "alignment", "zero state", "fitted noise"])
def test_a_loss_that_goes_past_the_method_stops_before_the_first_update(
    tmp_path: Path, method: str, accumulation: int
) -> None:
    chosen = toys.METHODS[method]

    class Past(Alone, chosen.trainer):
        pass

    settings = toys.QUIET | {"save_strategy": "no", "gradient_accumulation_steps": accumulation}
    model = toys.tiny_model()
    args = chosen.config(str(tmp_path), **settings | chosen.settings)
    trainer = Past(model, args, train_dataset=chosen.data(16))
    before = toys.weights(model)
    with pytest.raises(ValueError, match=r"\(Past\) had no effect in step 0: .* of Past does not call .*combine"):
        trainer.train()
    toys.assert_same_weights(toys.weights(model), before)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("base", "alpha", "message"),
    [
        (type("NoState", (Dropping,), {"dropped": "initial_state"}), 0.0, "step 1: the model got no initial_state"),
        (type("NoFinal", (Dropping,), {"dropped": "output_final_state"}), 0.0, None),  # the model's default is True
        (Alone, 0.0, "step 1: the model got no initial_state"),
        (Alone, 0.2, "step 0: the alignment loss was not computed"),
    ],
    ids=["initial state", "final state", "both", "alignment"],
)
def test_a_loss_beneath_that_loses_its_arguments_stops_the_run(
    tmp_path: Path, base: Any, alpha: float, message: str | None
) -> None:
    class Losing(StatePassingTrainer, base):  # type: ignore[misc]
        pass

    settings = toys.QUIET | {"save_strategy": "no", "max_steps": 3, "alignment_alpha": alpha}
    args = Losing.config_class(str(tmp_path), **settings, state_drop_probability=0.0)
    trainer = Losing(toys.tiny_model(), args, train_dataset=toys.sequences(32))
    if message is None:
        trainer.train()
        return
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_model_without_final_states_stops_the_run(tmp_path: Path) -> None:
    class Silent(toys.SumModel):  # type: ignore[name-defined, misc]
        def forward(
            self, input_ids: Any, labels: Any = None, initial_state: Any = None, output_final_state: bool = True
        ) -> Any:
            return super().forward(input_ids, labels, None, initial_state, output_final_state=False)

    settings = toys.QUIET | {"save_strategy": "no", "max_steps": 3}
    args = StatePassingTrainer.config_class(str(tmp_path), **settings)
    trainer = StatePassingTrainer(Silent(), args, train_dataset=toys.sequences(32))
    with pytest.raises(ValueError, match="step 0: the model returned no final_state"):
        trainer.train()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", [StatePassingTrainer, FittedNoiseTrainer, AlignmentTrainer])
def test_nothing_is_left_on_the_model(tmp_path: Path, method: Any) -> None:
    model = toys.tiny_model()
    settings = toys.QUIET | {"save_strategy": "no", "max_steps": 2}
    trainer = method(model, method.config_class(str(tmp_path), **settings), train_dataset=toys.sequences(32))
    trainer.train()
    trainer.compute_loss(model.train(), {"input_ids": torch.ones(2, 9).long(), "labels": torch.ones(2, 9).long()})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_only_calls_in_training_count() -> None:
    model, calls = toys.tiny_model(), ModelCalls()
    calls.watch(model)
    ids = torch.ones(2, 5).long()
    model.eval()(input_ids=ids, initial_state=model.zero_state(2))
    assert (calls.got_state, calls.final_state) == (False, None)
    model.train()
    expected = model.backbone(input_ids=ids, initial_state=model.zero_state(2)).final_state
    assert calls.got_state
    assert calls.final_state is not None
    torch.testing.assert_close(calls.final_state[1].recurrent, expected[1].recurrent, rtol=0, atol=0)
    assert not calls.final_state[0].recurrent.requires_grad
    calls.watch(model)
    assert not calls.got_state
    calls.watch(nn.Linear(1, 1))
    assert not model._forward_hooks
