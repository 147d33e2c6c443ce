"""StateX: the states of some layers are enlarged, then the model is trained, from any source (Shen et al., 2025)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import STATEX
from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.surgery import expand_state
from hf_recurrent_lengthgen.surgery.expansion_plan import layers_of
from hf_recurrent_lengthgen.surgery.state_expansion import expanded_parameters, recorded_expansions
from hf_recurrent_lengthgen.trainers.checks import check_model
from hf_recurrent_lengthgen.trainers.mixed_states import MixedStatesConfig, MixedStatesTrainer


@dataclass
class StateXConfig(MixedStatesConfig):
    """`TrainingArguments`, the expansion of the states (Shen et al., 2025), and the mixture of initial states.

    Raises:
        ValueError: for values out of range, and as in `MixedStatesConfig`.
    """

    # Parameters that control the expansion
    expand_layers: list[str] | None = option(
        None,
        'Layers to expand, counted from 0, or "all". Default: expand_count evenly spaced layers from the '
        "first (Shen et al., 2025, section 4.4).",
    )
    expand_count: int | None = option(None, "Number of layers to expand. Default 4.")
    expand_factor: float | None = option(
        None,
        "Factor by which the states of these layers grow. Default: 4 in Mamba; in other families, all "
        "heads of a layer are merged into one.",
    )
    expand_state_size: int | None = option(None, "State size N of these layers in Mamba. Default: see expand_factor.")
    expand_num_heads: int | None = option(
        None, "Number of heads of these layers in families other than Mamba. Default: see expand_factor."
    )
    expand_initialization: Literal["reinit", "inherit", "inherit-zero", "released", "merge-copy"] | None = option(
        None,
        "reinit (the paper's, section 4.3): new random recurrence in these layers, in Mamba as mamba-ssm initializes "
        "it. inherit (ours): trained weights stay, new weights can learn. inherit-zero (the paper's baseline, 5.5): "
        "as inherit, but new weights cannot learn. released, merge-copy (Mamba-2 and GLA only): what the authors' "
        "code does for reinit and for its baseline. Default: reinit.",
    )
    new_weights_lr_multiplier: float = option(
        1.0,
        "Multiplier of the learning rate for parameters that hold new values. It applies to whole "
        "parameters: to all of in_proj in an expanded Mamba-2 layer. Default 1.",
    )

    def check(self) -> None:
        """See `MixedStatesConfig.check`; without a mixture, all initial states are zero."""
        if self.mixture is None:
            self.mixture = {"zero": 1.0}
        self.expand_layers = layers_of(self.expand_layers, "expand_layers")
        super().check()

    def expansion(self) -> dict[str, Any]:
        return {
            "layers": self.expand_layers,
            "count": self.expand_count,
            "factor": self.expand_factor,
            "state_size": self.expand_state_size,
            "num_heads": self.expand_num_heads,
            "initialization": "reinit" if self.expand_initialization is None else self.expand_initialization,
        }


class StateXTrainer(MixedStatesTrainer):
    """`Trainer` that expands the states of some layers and then trains, from any source (Shen et al., 2025).

        trainer = StateXTrainer(model, StateXConfig("out", expand_count=4), train_dataset=blocks)
        trainer.train()
        trainer.model  # the expanded model; `model` stays as it is

    A model whose config records an expansion (`lengthgen expand`, `expand_state`) is trained as it is. To resume, give
    the model of the first run and the same settings: it is expanded again and gets the weights of the checkpoint.

    Raises:
        ValueError: with `model_init` or an optimizer, with settings of an expansion for a model that is expanded
            already, and as in `expand_state` and `InitialStateTrainer`.
    """

    config_class = StateXConfig
    about = Method(
        "statex",
        "state expansion and training",
        "Some layers got larger states, and the model was trained on",
        "statex",
        STATEX,
    )
    gives_states = False
    args: StateXConfig

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        if self.optimizer is not None:
            raise ValueError(
                "The optimizer holds the weights of the model before its expansion: leave optimizers out, or "
                "expand the model with expand_state and train it with another trainer."
            )

    def prepared(self, model: Any, args: StateXConfig) -> Any:
        """The model, expanded unless its config records an expansion."""
        if model is None:
            raise ValueError("StateXTrainer expands a model: give model, not model_init.")
        check_model(model)
        recorded, expansion = recorded_expansions(base_of(model).config), args.expansion()
        if not recorded:
            return expand_state(model, **expansion, seed=args.seed)
        requested = {name for name, value in expansion.items() if value is not None and name != "initialization"}
        if args.expand_initialization is not None and {*recorded.values()} != {args.expand_initialization}:
            requested.add("initialization")
        if requested:
            raise ValueError(
                f"The model was expanded already ({'; '.join(base_of(model).config.interventions)}), so the settings "
                f"{sorted(requested)} would have no effect: leave them out. To resume a run, give the model that it "
                "started from; to expand further, call expand_state."
            )
        return model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Trainer's, with separate groups for parameters that hold new values, at `new_weights_lr_multiplier`."""
        made = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if made and self.args.new_weights_lr_multiplier != 1.0:
            new = {id(parameter) for parameter in expanded_parameters(base_of(self.model)).values()}
            for group in list(optimizer.param_groups):
                apart = [parameter for parameter in group["params"] if id(parameter) in new]
                if apart:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in new]
                    rate = group["lr"] * self.args.new_weights_lr_multiplier
                    optimizer.add_param_group({**group, "params": apart, "lr": rate})
        return optimizer
