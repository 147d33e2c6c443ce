"""`Trainer` lets any `compute_loss` stand between it and the model, so the model itself is watched.

A trainer puts a state into the inputs, but a `compute_loss` may drop it, call another part of the model, or return
outputs of its own. Only the calls of the model tell whether a sequence started from a state.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from hf_recurrent_lengthgen.models.state_value import RecurrentState, detach_state


class ModelCalls:
    """Watches the training-mode calls of a model, and of its backbone, which some losses call alone.

    Attributes:
        got_state: Whether a call got an `initial_state`.
        final_state: Final state of the last call that returned one, without gradients.
    """

    def __init__(self) -> None:
        self.got_state = False
        self.final_state: RecurrentState | None = None
        self._model: nn.Module | None = None
        self._hooks: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Reset the attributes, and watch a model without wrappers."""
        if model is not self._model:
            self.stop()
            self._model = model
            backbone = getattr(model, "base_model", None)
            for module in [model, *([backbone] if isinstance(backbone, nn.Module) and backbone is not model else [])]:
                self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._after))
        self.got_state, self.final_state = False, None

    def take_final_state(self) -> RecurrentState | None:
        """`final_state`, which is not kept, so that whoever takes it decides how long it lives."""
        taken, self.final_state = self.final_state, None
        return taken

    def stop(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._model, self._hooks, self.final_state = None, [], None

    # The hooks set values and never read them: torch.compile would recompile for each value.
    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and kwargs.get("initial_state") is not None:
            self.got_state = True

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            return
        state = output.get("final_state") if isinstance(output, Mapping) else getattr(output, "final_state", None)
        if state is not None:
            self.final_state = detach_state(state)


def say_lost(trainer: Any, what: str, needed: str) -> NoReturn:
    """Raise a `ValueError`: the loss dropped what the method puts into the inputs."""
    raise ValueError(
        f"{trainer.describe_method()} had no effect in step {trainer.state.global_step}: {what}. "
        f"{_first_with(type(trainer), 'compute_loss')}, or a compute_loss that it calls, must use {needed}."
    )


def say_passed_by(trainer: Any, error: Exception | None = None) -> NoReturn:
    """Raise a `ValueError`: the loss was computed without the method."""
    raise ValueError(
        f"{trainer.describe_method()} had no effect in step {trainer.state.global_step}: the training loss came from "
        f"{_first_with(type(trainer), 'compute_loss')}, which does not call the compute_loss of InitialStateTrainer. "
        "Call super().compute_loss(...) in it, or, if it belongs to another trainer, join the two with "
        "hf_recurrent_lengthgen.trainers.combine(method, trainer)."
    ) from error


def _first_with(cls: type[Any], name: str) -> str:
    """The method that a class resolves a name to, as "Class.name"."""
    return next(f"{base.__name__}.{name}" for base in cls.__mro__ if name in vars(base))
