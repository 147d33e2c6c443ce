"""StateX as a trainer: expansion once, learning rates of new weights, every source of initial states."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.surgery import expand_state
from hf_recurrent_lengthgen.trainers import StateXConfig, StateXTrainer
from tests.models.families import GLA, MAMBA, build
from tests.trainers import toys


def make(folder: Path, model: Any = None, **fields: Any) -> StateXTrainer:
    rows = fields.pop("rows", toys.sequences(16))
    settings = toys.QUIET | {"per_device_train_batch_size": 2, "max_steps": 4, "save_strategy": "no"} | fields
    return StateXTrainer(
        toys.tiny_model() if model is None else model, StateXConfig(str(folder), **settings), train_dataset=rows
    )


def test_the_model_stays_and_the_expanded_one_is_trained(tmp_path: Path) -> None:
    model = toys.tiny_model()
    before = toys.weights(model)
    trainer = make(tmp_path, model, expand_layers=[1], expand_factor=3.0, seed=5)
    expected = expand_state(model, [1], factor=3, seed=5)
    toys.assert_same_weights(toys.weights(trainer.model), toys.weights(expected))
    trainer.train()
    toys.assert_same_weights(toys.weights(model), before)
    assert model.config.layer_state_sizes is None
    after = toys.weights(trainer.model)
    assert [name for name, value in toys.weights(expected).items() if torch.equal(after[name], value)] == []
    trainer.save_model()
    loaded = load_model(str(tmp_path))
    assert loaded.config.layer_state_sizes == [4, 12]
    assert loaded.config.interventions == ["state expansion, state_size 4 -> 12 in layer 1, reinit"]
    toys.assert_same_weights(toys.weights(loaded), after)


def test_it_trains_on_rows_that_continue(tmp_path: Path) -> None:
    trainer = make(tmp_path, mixture={"tbtt": 1.0}, logging_steps=1, rows=toys.chunks(16))
    trainer.train()
    zeros = [entry["zero_states"] for entry in trainer.state.log_history if "zero_states" in entry]
    assert zeros[1:] == [0.0] * 3
    assert trainer.model.config.layer_state_sizes == [16, 16]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("family", ["mamba2", "mamba", "gla"])
def test_new_weights_have_a_learning_rate_of_their_own(tmp_path: Path, family: str) -> None:
    model = {"mamba2": toys.tiny_model(), "mamba": build(MAMBA), "gla": build(GLA)}[family]
    new = {
        "mamba2": ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "dt_bias"),
        "mamba": ("x_proj.weight", "A_log", "dt_proj.bias"),
        "gla": (
            *(f"{name}_proj.weight" for name in "qkvgo"),
            *("gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias", "g_norm_swish_gate.weight"),
        ),
    }[family]
    trainer = make(
        tmp_path,
        model,
        expand_layers=["1"],
        new_weights_lr_multiplier=5.0,
        learning_rate=0.01,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
    )
    trainer.train()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [
        ({names[id(p)] for p in group["params"]}, group["initial_lr"], group["weight_decay"])
        for group in trainer.optimizer.optimizer.param_groups
    ]
    assert [rate for _, rate, _ in groups] == [0.01, 0.01, 0.05, 0.05]
    mixer = {"mamba2": "backbone.layers.1.mixer.", "mamba": "backbone.layers.1.mixer.", "gla": "model.layers.1.attn."}
    assert groups[2][0] | groups[3][0] == {mixer[family] + name for name in new}
    assert sorted(name for members, *_ in groups for name in members) == sorted(names.values())  # each once
    decayed = {name for members, _, decay in groups if decay for name in members}
    assert not any(name.endswith(("A_log", "bias", "norm_swish_gate.weight")) for name in decayed)
    assert any(name.endswith(f"1.{'attn.q_proj' if family == 'gla' else 'mixer.in_proj'}.weight") for name in decayed)


def test_a_model_that_was_expanded_is_not_expanded_again(tmp_path: Path) -> None:
    expanded = expand_state(toys.tiny_model(), [0])
    trainer = make(tmp_path, expanded, new_weights_lr_multiplier=2.0)
    assert trainer.model is expanded
    assert expanded.config.layer_state_sizes == [16, 4]
    assert len(trainer.create_optimizer().param_groups) == 4
    with pytest.raises(ValueError, match=r"expanded already \(state expansion, .*\['factor'\] would have no effect"):
        make(tmp_path, expanded, expand_factor=2.0)
    with pytest.raises(ValueError, match=r"\['initialization'\] would have no effect"):
        make(tmp_path, expanded, expand_initialization="inherit")
    assert make(tmp_path, expanded, expand_initialization="reinit").model is expanded
    inherits = expand_state(toys.tiny_model(), [0], initialization="inherit")
    with pytest.raises(ValueError, match=r"\['initialization'\] would have no effect"):
        make(tmp_path, inherits, expand_initialization="reinit")
    for same in (None, "inherit"):
        assert make(tmp_path, inherits, expand_initialization=same).model is inherits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new_weights_lr_multiplier": 0.0}, r"new_weights_lr_multiplier must be a finite number above 0, got 0\.0"),
        ({"expand_layers": ["first"]}, "expand_layers must be \"all\" or layer numbers, got \\['first'\\]"),
        ({"expand_layers": [1.5]}, 'expand_layers must be "all" or layer numbers, got \\[1\\.5\\]'),
        ({"expand_layers": True}, 'expand_layers must be "all" or layer numbers, got True'),
        ({"expand_layers": 7}, "layers must be some of the recurrent layers, 0, 1, got \\[7\\]"),
        ({"expand_initialization": ""}, "initialization must be"),
        ({"expand_num_heads": 1}, "num_heads does not apply to stateful_mamba2"),
        ({"expand_factor": 1.0}, "factor must be a finite number above 1"),
        ({"mixture": {"learned": 1.0}}, r", got \['learned'\]"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **fields)


def test_model_init_and_optimizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give model, not model_init"):
        StateXTrainer(args=StateXConfig(str(tmp_path), **toys.QUIET), model_init=toys.tiny_model)
    model = toys.tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="holds the weights of the model before its expansion"):
        StateXTrainer(model, StateXConfig(str(tmp_path), **toys.QUIET), optimizers=(optimizer, None))
