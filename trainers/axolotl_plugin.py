"""Methods of this package in axolotl, whose YAML file then has their settings as keys.

    plugins:
      - hf_recurrent_lengthgen.trainers.axolotl_plugin.InitialStatePlugin
    intervention: state_passing
    state_drop_probability: 0.1

Written for axolotl 0.19.0: `BasePlugin` (axolotl/integrations/base.py), what adds the settings of plugins to its own
(axolotl/integrations/config.py), and the order of calls (axolotl/cli/config.py, axolotl/core/builders/causal.py).
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from pydantic import Field, create_model

from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.alignment import AlignmentTrainer
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import takes_states
from hf_recurrent_lengthgen.trainers.combining import combine
from hf_recurrent_lengthgen.trainers.fitted_noise import FittedNoiseTrainer
from hf_recurrent_lengthgen.trainers.random_noise import RandomNoiseTrainer
from hf_recurrent_lengthgen.trainers.state_passing import StatePassingTrainer
from hf_recurrent_lengthgen.trainers.tbtt import TbttTrainer

try:
    from axolotl.integrations.base import BasePlugin
except ImportError:  # read without axolotl
    BasePlugin = object

METHODS: dict[str, type[InitialStateTrainer]] = {
    trainer.about.name: trainer
    for trainer in (StatePassingTrainer, TbttTrainer, FittedNoiseTrainer, RandomNoiseTrainer)
}
TRAINERS: list[type[InitialStateTrainer]] = [AlignmentTrainer, *METHODS.values()]
REFUSED = {
    "sample_packing": "it changes the number of texts in a batch: leave it out, rows are padded",
    "rl": "it does not train on single texts",
    "reward_model": "it does not train on single texts",
    "process_reward_model": "it does not train on single texts",
    "pretraining_dataset": "a stream may not be shuffled: give datasets, of type completion for raw text",
}
"""Keys of axolotl that have to be false, with the reason."""
SETTINGS: dict[str, Any] = {
    item.name: item
    for trainer in TRAINERS
    for item in fields(trainer.config_class)
    if item.name in trainer.config_class.method_fields() - {"context_parallel_size"}  # axolotl has its own
}


@dataclass
class _Given:
    """None is the default: axolotl's builder gives it for keys that are left out, also where no annotation has it."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is None and item.default is not MISSING:
                setattr(self, item.name, item.default)
        super().__post_init__()  # type: ignore[misc]


for config in {trainer.config_class for trainer in TRAINERS}:
    name = f"Axolotl{config.__name__}"  # axolotl imports it by its name
    globals()[name] = dataclass(type(name, (_Given, config), {"__module__": __name__, "__doc__": config.__doc__}))

keys: dict[str, Any] = {
    item.name: (item.type | None, Field(None, description=item.metadata["help"])) for item in SETTINGS.values()
}
InitialStateArgs = create_model(
    "InitialStateArgs",
    __module__=__name__,
    __doc__="The keys that the plugin adds to the YAML file; those that are left out have the default of the method.",
    intervention=(str | None, Field(None, description=f"The method: {', '.join(METHODS)}.")),
    **keys,
)


def method_of(cfg: Mapping[str, Any]) -> tuple[type[InitialStateTrainer], dict[str, Any]]:
    """The trainer of the method that a file asks for, and the settings that it gives.

    Raises:
        ValueError: for a file without a method, settings of another method or out of range, and keys of axolotl that
            do not go with states.
    """
    name = cfg.get("intervention")
    given = {key: cfg[key] for key in SETTINGS if cfg.get(key) is not None}
    if name is None and not given.get("alignment_alpha"):
        raise ValueError(
            f"{InitialStatePlugin.__name__} has nothing to do: set intervention to one of {sorted(METHODS)}, "
            "alignment_alpha to a weight such as 0.1, or both."
        )
    if name is not None and name not in METHODS:
        raise ValueError(f"intervention must be one of {sorted(METHODS)}, or left out; got {name!r}.")
    trainer = AlignmentTrainer if name is None else METHODS[name]
    if unused := sorted(given.keys() - trainer.config_class.method_fields()):
        raise ValueError(f"{unused} do nothing with intervention {name!r}: leave them out.")
    if (cfg.get("context_parallel_size") or 1) > 1:
        raise ValueError("context_parallel_size of axolotl shares attention, not recurrent states: leave it out.")
    for key, reason in REFUSED.items():
        if cfg.get(key):
            raise ValueError(f"{key} does not go with {InitialStatePlugin.__name__}: {reason}.")
    trainer.config_class.alone(**given)
    return trainer, given


class InitialStatePlugin(BasePlugin):
    """Trains with the method of the key `intervention`, with `alignment_alpha`, or both, on axolotl's own trainer.

    A process has one method, since axolotl makes the class of its arguments once.
    """

    trainer: type[InitialStateTrainer]

    def register(self, cfg: Any) -> None:
        """Called with the file before axolotl checks it.

        Raises:
            ValueError: as `method_of`.
        """
        self.trainer, _ = method_of(cfg)

    def get_input_args(self) -> str:
        """Import path of the keys."""
        return f"{__name__}.{InitialStateArgs.__name__}"

    def get_training_args_mixin(self) -> str:
        """Import path of the config that axolotl's arguments inherit from: that of the method."""
        return f"{__name__}.Axolotl{self.trainer.config_class.__name__}"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The settings; and the mean over the tokens of all processes, which axolotl switches off."""
        return method_of(cfg)[1] | {"average_tokens_across_devices": True}

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Give a recurrent or hybrid model of Transformers the state contract, in place."""
        if self.trainer.needs_states and not takes_states(model):
            from hf_recurrent_lengthgen.hybrids import stateful  # reaches all hybrids

            stateful(model)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Divide losses by the number of targets of a whole step, which AxolotlTrainer switches off for models whose
        backbone does not name `num_items_in_batch`: windows and micro-batches would weigh their tokens unequally."""
        own = trainer.model_accepts_loss_kwargs
        trainer.model_accepts_loss_kwargs = getattr(base_of(trainer.model), "accepts_loss_kwargs", own)

    def get_trainer_cls(self, cfg: Any) -> Any:
        """The method on axolotl's trainer."""
        from axolotl.core.trainers import AxolotlTrainer
        from axolotl.core.training_args import AxolotlTrainingArguments

        return combine(self.trainer, AxolotlTrainer, AxolotlTrainingArguments)[0]
