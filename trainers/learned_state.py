"""A learned initial state: all sequences start from one state, which is trained ("state tuning" among users of RWKV).

    h_{-1} = theta, a parameter with the gradient of the loss summed over rows

S0 tuning (Young, 2026, arXiv:2604.01168) adds two things, both off by default:

    training loss = cross-entropy(theta) + state_l2 sum_layers ||theta||^2        (3.1; sums in the release, too)
    at use        h_{-1} = state_scale theta                                      (alpha in the paper)

Section 3.1 and Algorithm 1 train through alpha; the release that made the numbers (`train_state_parameters`) trains
from theta, and multiplies it by alpha afterwards, as here. Algorithm 1 is the same training of alpha theta: scale 1,
learning rate alpha lr, state_l2 / alpha^2, gradients clipped at 1 / alpha, and epsilon of Adam / alpha.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn

from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.papers import LEARNED_STATE
from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.state_learned import LearnedState
from hf_recurrent_lengthgen.models.state_learned_files import STATE_FILE, read_folder
from hf_recurrent_lengthgen.models.state_value import RecurrentState, clone_state, detach_state, map_state
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import check_model, check_no_forgetting
from hf_recurrent_lengthgen.trainers.initial_state_config import InitialStateConfig
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource

NAME = "default"
"""Of the state in `model.learned_states`; one that is there is trained further."""


class LearnedStateSource(InitialStateSource):
    """Every sequence starts from the same learned state, also in evaluation.

    Args:
        learned: The parameters.
    """

    def __init__(self, learned: LearnedState) -> None:
        self._learned = learned

    def initial_state(self, place: BatchPlace) -> RecurrentState:
        """The learned state for every row; gradients flow into it."""
        return map_state(lambda part: part.expand(place.rows, *part.shape[1:]), self._learned())

    def evaluation_state(self, place: BatchPlace) -> RecurrentState:
        return self.initial_state(place)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._learned.state_dict().items()}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._learned.load_state_dict(tensors)


@dataclass
class LearnedStateConfig(InitialStateConfig):
    """`TrainingArguments` and the settings of a learned initial state (state tuning)."""

    train_model: bool = option(False, "Whether to train the weights of the model, too. Default: only the state.")
    learn_conv_state: bool = option(
        True, "Whether to learn the short-convolution part of the state, too; otherwise it stays zero. Default: true."
    )
    state_l2: float = option(
        0.0,
        "Weight of the sum of squares of the learned state in the training loss (Young, 2026, section 3.1: 5e-4); "
        "evaluation has no such term. Default 0: off.",
    )
    state_scale: float | None = option(
        None,
        "Factor of the learned state in generation and evaluation, but not in training steps (alpha of Young, 2026: "
        "0.07 for Gated DeltaNet, 0.65 for Mamba-2). Default: the saved one if a state is trained further, else 1.",
    )

    def check(self) -> None:
        super().check()
        if self.state_l2 and self.alignment_alpha:
            raise ValueError("alignment_alpha has a loss of its own, without the term of state_l2: set one of them.")


class LearnedStateTrainer(InitialStateTrainer):
    """`Trainer` that learns one initial state for all sequences, by default with the model's weights frozen.

    The state is a part of the model, `model.learned_states["default"]`: one of this name is trained further, otherwise
    a new one of zeros. It is the active one, also afterwards. `save_model` writes a folder that loads onto the same
    base:

        model.load_learned_state("out")  # or load_model("out"), which loads the base, too
        model.generate(**prompt)

    With `train_model`, the state is a part of the checkpoint, or lies next to an adapter of PEFT.

    With `state_l2`, the logged loss contains the penalty, which is also logged apart, as `state_penalty`. With
    `state_scale`, sequences start from the parameters in training steps, and from the scale times them elsewhere: in
    evaluations, in what callbacks measure, and in what is saved.

    Raises:
        ValueError: with `model_init` or under FSDP, and as in `InitialStateTrainer`.
    """

    config_class = LearnedStateConfig
    about = Method(
        "learned",
        "a learned initial state",
        "All texts start from one state that is trained, too",
        "learned-state",
        LEARNED_STATE,
    )
    learns_state = True
    is_mixable = False
    gives_states = False  # it also trains the state, which is zero at first
    args: LearnedStateConfig

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        super().__init__(*positional, **keyword)
        if self.is_fsdp_enabled:
            raise ValueError(
                "LearnedStateTrainer does not work with FSDP, because the learned state is used outside the layers "
                "that FSDP gathers: use DDP."
            )
        plugin = self.accelerator.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO and plugin.use_regional_compilation:
            raise ValueError(
                "LearnedStateTrainer cannot compile layer by layer (accelerate's use_regional_compilation), because "
                "the learned state is outside of layers: compile the whole model."
            )

    def prepared(self, model: Any, args: LearnedStateConfig) -> Any:
        """The model with the state as a submodule for optimizer, DDP and clipping; it is saved in its own file."""
        if model is None:
            raise ValueError("LearnedStateTrainer attaches the state to a model: give model, not model_init.")
        check_model(model)
        if not args.train_model:
            model.requires_grad_(False)
            if os.path.exists(os.path.join(str(args.output_dir), "config.json")):
                raise ValueError(
                    f"{args.output_dir} holds a checkpoint, which the learned state would be confused with: give "
                    "another output_dir."
                )
        base = base_of(model)
        check_no_forgetting(base)
        states = base.learned_states
        if states is None or NAME not in states.names:
            states = base.add_learned_state(NAME)
        states.set_adapter(NAME)
        states.requires_grad_(False)
        if args.state_scale is not None:
            states.set_scale(NAME, args.state_scale)
        self._learned = states[NAME]
        self._learned.learn(args.learn_conv_state)
        return model

    @staticmethod
    def initial_state_source(args: LearnedStateConfig, trainer: Any) -> LearnedStateSource:
        return LearnedStateSource(trainer._learned)

    def learned_state(self) -> RecurrentState:
        """What sequences start from at use, the scale times the parameters; one row, without gradients."""
        return clone_state(detach_state(self._learned()))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in `InitialStateTrainer`, from the parameters themselves; the backward pass may run layers again."""
        with self._learned.unscaled():
            return super().training_step(*args, **kwargs)

    def _loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items: Any) -> Any:
        """The training loss with the penalty, once in a step: `Trainer` adds up the losses of its micro-batches or
        takes their mean, and gradients of processes are averaged."""
        result = super()._loss(model, inputs, return_outputs, num_items)
        if not self.args.state_l2:
            return result
        trained = [parameter for parameter in self._learned.parameters() if parameter.requires_grad]
        penalty = self.args.state_l2 * torch.stack([parameter.square().sum() for parameter in trained]).sum()
        self.logs.add(state_penalty=penalty)
        added = self.loss_is_scaled_for_ga
        if added is None:  # the rule of Trainer's `training_step`
            added = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        share = penalty / (self.current_gradient_accumulation_steps if self.is_in_train and added else 1)
        return (result[0] + share, *result[1:]) if return_outputs else result + share

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = str(self.args.output_dir) if output_dir is None else output_dir
        if self.args.train_model:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "PEFT saves adapters without the learned state")  # written below
                super()._save(output_dir, state_dict)
        if not self.args.train_model or hasattr(self.model, "peft_config"):
            base_of(self.model).save_learned_state(folder)
        if not self.args.train_model and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def load_weights(self, checkpoint: str) -> bool:
        if os.path.isfile(os.path.join(checkpoint, STATE_FILE)):
            about, state = read_folder(checkpoint)
            self._learned.set(state)
            base_of(self.model).learned_states.set_scale(NAME, about.get("scale", 1.0))
        return not self.args.train_model or super().load_weights(checkpoint)
