"""The plugin for axolotl: with the real package where it is installed, else with a stub of what the plugin meets.

The stub is that of axolotl 0.19.0: its trainer takes further arguments and switches off the count of targets of a step
(axolotl/core/trainers/base.py, AxolotlTrainer.__init__); its arguments inherit from the config that the plugin names,
before `TrainingArguments` (axolotl/integrations/config.py, merge_training_args; axolotl/core/training_args.py); and
some of them are None against their annotation (axolotl/core/builders/causal.py, build).
"""

import re
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError
from transformers import Trainer, TrainingArguments

from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.axolotl_plugin import InitialStateArgs, InitialStatePlugin
from tests.hybrids.tiny_models import tiny_model
from tests.trainers import toys

PAGE = Path(__file__).parents[2] / "docs" / "with_trl.md"


@dataclass
class StubMixins:
    sample_packing: bool = False
    include_tkps: bool = True
    max_seq_length: int = 2048


class StubTrainer(Trainer):
    def __init__(self, *args: Any, bench_data_collator: Any = None, dataset_tags: Any = None, **kwargs: Any) -> None:
        self._signature_columns = None
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> InitialStatePlugin:
    """A plugin of the page's file, in a process where axolotl made its arguments with it."""
    made = InitialStatePlugin()
    made.register(file_of_page())
    if find_spec("axolotl") is not None:
        manager = import_module("axolotl.integrations.base").PluginManager.get_instance()
        manager.plugins["ours"] = made
        return made
    path, name = made.get_training_args_mixin().rsplit(".", 1)
    config = getattr(import_module(path), name)
    mixins = type("AxolotlTrainingMixins", (StubMixins, config), {})
    arguments = dataclass(type("AxolotlTrainingArguments", (mixins, TrainingArguments), {}))
    for module, names in {
        "axolotl.core.trainers": {"AxolotlTrainer": StubTrainer},
        "axolotl.core.training_args": {"AxolotlTrainingArguments": arguments},
    }.items():
        stub = ModuleType(module)
        vars(stub).update(names)
        monkeypatch.setitem(sys.modules, module, stub)
    return made


def file_of_page(**changes: Any) -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    keys: dict[str, Any] = yaml.safe_load(block)
    return {key: value for key, value in (keys | changes).items() if value is not None}


def test_the_file_of_the_page_names_the_plugin_and_its_keys() -> None:
    keys = file_of_page()
    path, name = keys["plugins"][0].rsplit(".", 1)
    assert getattr(import_module(path), name) is InitialStatePlugin
    path, name = InitialStatePlugin().get_input_args().rsplit(".", 1)
    model: type[BaseModel] = getattr(import_module(path), name)
    assert model(**keys).model_dump(exclude_none=True) == {
        "intervention": "state_passing",
        "state_drop_probability": 0.1,
    }
    with pytest.raises(ValidationError, match="state_drop_probability"):
        model(state_drop_probability="often")


def test_axolotl_s_trainer_trains_as_ours(plugin: InitialStatePlugin, tmp_path: Path) -> None:
    settings = toys.QUIET | {"max_steps": 3, "save_strategy": "no", "per_device_train_batch_size": 2}
    settings["gradient_accumulation_steps"] = 2  # of batches with other numbers of targets
    rows: Any = toys.sequences(16)
    expected, given = toys.tiny_model(), toys.tiny_model()
    StatePassingTrainer(expected, StatePassingConfig(str(tmp_path / "a"), **settings), train_dataset=rows).train()
    cfg = file_of_page(output_dir=None)
    trainer_class = plugin.get_trainer_cls(cfg)
    arguments = import_module("axolotl.core.training_args").AxolotlTrainingArguments(
        **settings | plugin.get_training_args(cfg),
        output_dir=str(tmp_path / "b"),
        max_seq_length=9,
        include_tkps=None,
    )
    if find_spec("axolotl") is not None:
        from datasets import Dataset

        rows = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows])
    plugin.post_model_build(cfg, given)
    trainer = trainer_class(model=given, args=arguments, train_dataset=rows, bench_data_collator=None)
    plugin.post_trainer_create(cfg, trainer)
    trainer.train()
    assert trainer.initial_states.drop_probability == 0.1
    toys.assert_same_weights(toys.weights(given), toys.weights(expected))
    assert not torch.equal(given.lm_head.weight, toys.tiny_model().lm_head.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intervention": None, "state_drop_probability": None}, "nothing to do: set intervention to one of"),
        ({"intervention": "passing"}, "intervention must be one of .*got 'passing'"),
        ({"intervention": "fitted_noise"}, "'state_drop_probability'.* nothing with intervention 'fitted_noise'"),
        ({"state_drop_probability": 1.5}, "state_drop_probability must be between 0 and 1, got 1.5"),
        ({"alignment_length": 8}, "no effect without alignment_alpha"),
        ({"sample_packing": True}, "sample_packing does not go with InitialStatePlugin"),
        ({"rl": "dpo"}, "rl does not go with"),
        ({"context_parallel_size": 2}, "context_parallel_size of axolotl"),
    ],
)
def test_what_does_nothing_is_refused_before_a_model_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InitialStatePlugin().register(file_of_page(**changes))


@pytest.mark.parametrize(
    ("changes", "trainer"),
    [
        ({"intervention": "tbtt", "bptt_chunk_length": 32}, "TbttTrainer"),
        ({"intervention": "fitted_noise", "state_drop_probability": None}, "FittedNoiseTrainer"),
        ({"intervention": None, "state_drop_probability": None, "alignment_alpha": 0.1}, "AlignmentTrainer"),
    ],
)
def test_every_method_has_its_trainer_and_settings(changes: dict[str, Any], trainer: str) -> None:
    plugin, cfg = InitialStatePlugin(), file_of_page(**changes)
    plugin.register(cfg)
    assert plugin.trainer.__name__ == trainer
    path, name = plugin.get_training_args_mixin().rsplit(".", 1)
    assert issubclass(getattr(import_module(path), name), plugin.trainer.config_class)
    given = {
        key: value for key, value in cfg.items() if key in InitialStateArgs.model_fields and key != "intervention"
    }
    assert plugin.get_training_args(cfg) == given | {"average_tokens_across_devices": True}


def test_models_of_transformers_are_wrapped() -> None:
    plugin, model = InitialStatePlugin(), tiny_model("bamba")
    plugin.register(file_of_page())
    assert not hasattr(model, "zero_state")
    plugin.post_model_build({}, model)
    assert hasattr(model, "zero_state")
