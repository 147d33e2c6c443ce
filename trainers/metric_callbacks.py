"""Length metrics during training: in the log and in the trackers of `report_to`.

    metrics = [context_harm(tokens, 2048), effective_remembrance_at(tokens, 2048)]
    MetricCallback(metrics, every_steps=50).attach(trainer)

A metric is any function from a model to a number, to several numbers by name, or to a result of `evaluation`. Some are
ready-made, see `ready_metrics.py`.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.trainers.run.attributes import replaced
from hf_recurrent_lengthgen.trainers.run.callback import AttachedCallback

MetricFunction = Callable[[Any], Any]


class Metric(NamedTuple):
    """A name, and a function from a model to a number, a mapping from names to numbers, or a typed result.

    `greater_is_better` is for `metric_for_best_model`; of several numbers, by their names; None for unknown.
    """

    name: str
    function: MetricFunction
    greater_is_better: bool | Mapping[str, bool] | None = None

    def best_is_highest(self, key: str) -> bool | None:
        """`greater_is_better` of a number with this key in the log, which may be the bound of one."""
        better = self.greater_is_better
        if isinstance(better, Mapping):
            parts = (
                is_highest for part, is_highest in better.items() if f"{key}_".startswith(f"eval_{self.name}_{part}_")
            )
            return next(parts, None)
        return better if f"{key}_".startswith(f"eval_{self.name}_") else None


class MetricCallback(AttachedCallback):
    """Measures the model during training, and logs the values as Trainer logs its own evaluation.

    Each evaluation measures, too, and its result holds the values, so that `metric_for_best_model` can name one. The
    trainers of this package take it in `callbacks=[...]`. A stock Trainer needs `attach`, because it does not pass
    itself to its callbacks, which log through it.

    Metrics run on the model without its wrappers (DDP, torch.compile; a PEFT model stays one), in evaluation mode,
    without gradients and autocast, in the dtype of the weights. Modes and random states are restored: a run trains
    bit for bit as it would without this callback.

    With several processes the main one measures and the others wait for its results, so a measurement must take less
    than `ddp_timeout`. All processes log the same values, and all end if a metric fails.

    Args:
        metrics: Metrics, or functions by name.
        every_steps: Optimizer steps between measurements; None to measure with each evaluation only.
        at_start: Also measure before the first step, so that a failing metric fails at once, not after hours.
        at_end: Also measure after the last step, whatever its number.

    Raises:
        ValueError: for no metrics, and empty or duplicate names.
    """

    def __init__(
        self,
        metrics: Sequence[Metric] | Mapping[str, MetricFunction],
        every_steps: int | None = None,
        at_start: bool = True,
        at_end: bool = True,
    ) -> None:
        self.metrics = [Metric(*one) for one in (metrics.items() if isinstance(metrics, Mapping) else metrics)]
        names = [metric.name for metric in self.metrics]
        if not names or not all(names) or len(set(names)) < len(names):
            raise ValueError(f"metrics must hold at least one metric, with different names, got {names}.")
        self.every_steps, self.at_start, self.at_end = every_steps, at_start, at_end
        self._trainer: Trainer | None = None
        self._measured_at: int | None = None
        self._training = False
        self._measured: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> "MetricCallback":
        """Add this callback, unless it is there already, to the trainer that logs the values.

        Raises:
            ValueError: if it is attached already; under FSDP and DeepSpeed, where no process can run the model alone;
                and if `metric_for_best_model` names a metric whose worst value the trainer would keep.
        """
        if self._trainer is not None:
            raise ValueError("This MetricCallback is attached to a trainer already: make another one.")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "MetricCallback runs the whole model in the main process, which under FSDP or DeepSpeed holds only a "
                "part of it. Evaluate the checkpoints afterwards (`lengthgen evaluate`)."
            )
        self._check_direction(trainer.args)
        self._trainer = trainer
        others: list[Any] = [callback for callback in trainer.callback_handler.callbacks if callback is not self]
        # early stopping reads the values of the evaluation, so it must come after this callback
        stops = (i for i, callback in enumerate(others) if isinstance(callback, EarlyStoppingCallback))
        others.insert(next(stops, len(others)), self)
        trainer.callback_handler.callbacks = others
        return self

    def _check_direction(self, args: TrainingArguments) -> None:
        best = args.metric_for_best_model or ""
        for metric in self.metrics:
            highest = metric.best_is_highest(best if best.startswith("eval_") else f"eval_{best}")
            if highest not in (None, args.greater_is_better):
                raise ValueError(
                    f"greater_is_better is {args.greater_is_better}, but the best value of metric_for_best_model="
                    f"{best!r} is the {'highest' if highest else 'lowest'} (without a value, Transformers takes True "
                    f"for every metric but a loss): set greater_is_better={highest}."
                )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._measured_at, self._training = None, True
        if self._trainer is None:
            raise ValueError(
                "MetricCallback is not attached to a trainer, and a stock Trainer does not pass itself to its "
                "callbacks: call MetricCallback(...).attach(trainer) instead of giving it in callbacks=[...]."
            )
        if self.at_start:
            self._measure(state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # At the end of training, some trackers have closed their files already.
        due = self.every_steps is not None and state.global_step % self.every_steps == 0
        if due or (self.at_end and control.should_training_stop):
            self._measure(state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None  # of another step, maybe
        if self.at_end and not loaded and self._measured_at != state.global_step:
            self._measure(state, control)
        self._training = False

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self._trainer is None or metrics is None:
            return
        if not self._training or self._measured_at != state.global_step:
            self._measure(state, control)
        metrics.update(self._measured)  # `evaluate` returns this mapping

    def _measure(self, state: TrainerState, control: TrainerControl) -> None:
        assert self._trainer is not None
        measured: list[Any] = [None]
        if self._trainer.is_world_process_zero():
            model = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
            measured = [self._values(model, state.global_step)]
        if self._trainer.args.world_size > 1:
            broadcast_object_list(measured)
        if isinstance(measured[0], Exception):
            raise measured[0]
        self._measured = measured[0]
        should_log = control.should_log  # logging resets it, but the loss of this step is not logged yet
        model = self._trainer.model
        assert model is not None
        with replaced(model, training=False):  # in training mode, TRL would add its training metrics
            self._trainer.log(dict(self._measured))
        control.should_log = should_log
        self._measured_at = state.global_step

    def _values(self, model: nn.Module, step: int) -> dict[str, float] | Exception:
        """The values to log, or the error of the first metric that fails."""
        assert self._trainer is not None
        values: dict[str, float] = {}
        for name, function, _ in self.metrics:
            try:
                with undisturbed(model):
                    numbers = numbers_of(f"eval_{name}", function(model))
                if not numbers or numbers.keys() & values.keys():
                    raise ValueError(f"it returned {'names of another metric' if numbers else 'no number'}")
            except Exception as error:
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                failure = kind(f"The metric {name!r} failed at step {step}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                return failure
            values |= numbers
        return values


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and autocast; afterwards modes and random states are restored."""
    training = [(module, module.training) for module in model.modules()]
    forward = vars(model).get("forward")  # accelerate's, with mixed precision; it keeps the original, too
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            model.eval()
            if "_original_forward" in vars(model):
                vars(model)["forward"] = model._original_forward
            yield
    finally:
        if forward is not None:
            vars(model)["forward"] = forward
        for module, mode in training:
            module.training = mode
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def numbers_of(name: str, value: Any) -> dict[str, float]:
    """The numbers in a metric's value, by name.

    An `Estimate` gives its mean under the name itself, and its bounds with "_low" and "_high" appended. Entries of a
    mapping and fields of a dataclass are appended by name after an underscore. Fields of a typed result
    that are not numbers (lists, text, None) are left out.

    Raises:
        ValueError: for a value of another type.
    """
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, Real):
        return {name: float(value)}
    if isinstance(value, Estimate):
        bounds = {f"{name}_low": value.low, f"{name}_high": value.high}
        return {name: value.mean} | {key: bound for key, bound in bounds.items() if bound is not None}
    if isinstance(value, Mapping):
        return {key: x for part, item in value.items() for key, x in numbers_of(f"{name}_{part}", item).items()}
    if not is_dataclass(value):
        raise ValueError(
            f"a metric must return a number, a mapping from names to numbers or a result, got {type(value).__name__}"
        )
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    numbers = {part: item for part, item in parts.items() if isinstance(item, Real | Estimate) or is_dataclass(item)}
    return numbers_of(name, numbers)
