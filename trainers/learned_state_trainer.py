"""Training an initial state."""

import os
from typing import Any

from torch import nn

from hf_recurrent_lengthgen.methods import Method
from hf_recurrent_lengthgen.models.recurrent_state import (
    RecurrentState,
    clone_state,
    detach_state,
    load_state,
    save_state,
    state_dtype,
)
from hf_recurrent_lengthgen.trainers.base import InitialStateTrainer
from hf_recurrent_lengthgen.trainers.checks import base_of, check_model
from hf_recurrent_lengthgen.trainers.learned_state_config import LearnedStateConfig
from hf_recurrent_lengthgen.trainers.learned_states import LearnedState, LearnedStates

LEARNED_STATE_FILE = "learned_state.safetensors"


class LearnedStateTrainer(InitialStateTrainer):
    """`Trainer` that learns one initial state for all sequences, by default with the model's weights frozen.

    `save_model` writes `learned_state.safetensors`, a state with one row for `load_state`:

        state, _ = load_state("out/learned_state.safetensors")
        model.generate(**prompt, initial_state=state)

    Raises:
        ValueError: with `model_init` or under FSDP, and as in `InitialStateTrainer`.
    """

    config_class = LearnedStateConfig
    about = Method(
        "learned",
        "a learned initial state",
        "All texts start from one state that is trained, too",
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

    def prepared(self, model: Any, args: LearnedStateConfig) -> Any:
        """The model with the state as a submodule for optimizer, DDP and clipping; it is saved in its own file."""
        if model is None:
            raise ValueError("LearnedStateTrainer attaches the state to a given model: give model, not model_init.")
        check_model(model)
        if not args.train_model:
            model.requires_grad_(False)
        base = base_of(model)
        learned = LearnedState(base.state_shapes(), state_dtype(base.dtype), args.learn_conv_state).to(base.device)
        self._learned = model.learned_state = learned
        names = {f"learned_state.{name}" for name in learned.state_dict()}
        base._keys_to_ignore_on_save = set(getattr(base, "_keys_to_ignore_on_save", None) or ()) | names
        return model

    @staticmethod
    def initial_state_source(args: LearnedStateConfig, trainer: Any) -> LearnedStates:
        return LearnedStates(trainer._learned)

    def learned_state(self) -> RecurrentState:
        """The current state, one row without gradients."""
        return clone_state(detach_state(self._learned()))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = str(self.args.output_dir) if output_dir is None else output_dir
        if self.args.train_model:
            super()._save(output_dir, state_dict)
        os.makedirs(folder, exist_ok=True)
        model = str(getattr(getattr(self.model, "config", None), "name_or_path", ""))
        save_state(os.path.join(folder, LEARNED_STATE_FILE), self.learned_state(), {"model": model})
        if not self.args.train_model and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best, _ = load_state(os.path.join(str(self.state.best_model_checkpoint), LEARNED_STATE_FILE))
        self._learned.set(best)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.args.train_model:  # the learned state comes back with the initial states
            super()._load_from_checkpoint(resume_from_checkpoint, model)
