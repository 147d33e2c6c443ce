"""`Trainer` sees neither the calls of its model nor a state, and goes on from a loss that is not finite.

A trainer puts a state into the inputs, but any `compute_loss` between it and the model may drop it, call another part
of the model, or return outputs of its own. So the model itself is watched. Each number that is read from the device
waits for all that it has to do. So a step collects its questions (are ids in the vocabulary, are losses and states
finite) and reads the answers together; logged values are read when they are logged.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, detach_state


def describe_broken(norms: Tensor) -> str:
    """The first broken layer and part, and its rows, in words, from the `part_norms` of a state."""
    layer, part = (~norms.isfinite()).any(-1).nonzero()[0].tolist()
    rows = (~norms[layer, part].isfinite()).nonzero().flatten().tolist()
    return f"layer {layer}, part '{LayerState._fields[part]}' has NaN or infinite values in rows {rows}"


def part_norms(state: RecurrentState) -> Tensor:
    """Euclidean norms of the parts of a state, (layers, 2, B); not finite where a value is not."""
    return torch.stack(
        [torch.stack([torch.linalg.vector_norm(part.flatten(1), dim=1) for part in layer]) for layer in state]
    )


def recurrent_layers(state: RecurrentState) -> list[int]:
    """Indices of the layers with a recurrent part; attention, feed-forward and convolution-only layers have none."""
    return [index for index, layer in enumerate(state) if layer.recurrent.shape[1:].numel()]


def recurrent_rms(state: RecurrentState, norms: Tensor) -> Tensor:
    """Root mean square per row of the L layers with a recurrent part, (L, B), from the `part_norms` of the state."""
    layers = recurrent_layers(state)
    sizes = [state[index].recurrent.shape[1:].numel() for index in layers]
    return norms[layers, 0] / norms.new_tensor(sizes).sqrt()[:, None]


class StepLogs:
    """Collects scalars and reads them from the device only when they are logged.

    A name that ends in "_max" is logged as a maximum, other names as means.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[Tensor, int]] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            value = value.detach().float()
            total, count = self._values.get(name, (value, 0))
            if count:
                total = torch.maximum(total, value) if _is_max(name) else total + value
            self._values[name] = total, count + 1

    def take(self, gather: Callable[[list[dict[str, float]]], list[dict[str, float]]]) -> dict[str, float]:
        """Values over all processes, whose lists `gather` joins."""
        own = {name: float(total if _is_max(name) else total / count) for name, (total, count) in self._values.items()}
        self._values = {}
        everyone = gather([own])
        by_name = {name: [values[name] for values in everyone] for name in sorted(own)}
        return {name: max(values) if _is_max(name) else sum(values) / len(values) for name, values in by_name.items()}


def _is_max(name: str) -> bool:
    return name.endswith("_max")


def zero_rows(state: RecurrentState | None) -> tuple[Tensor, Tensor]:
    """Share of the rows of a batch that start from zero, and whether any of them has NaN or infinite values."""
    if state is None:
        return torch.ones(()), torch.zeros((), dtype=torch.bool)
    largest = torch.stack(
        [
            torch.linalg.vector_norm(part.detach().flatten(1), torch.inf, 1)
            for layer in state
            for part in layer
            if part[0].numel()
        ]
    )
    return (largest == 0).all(0).double().mean(), ~largest.isfinite().all()


class StepChecks:
    """The questions about the micro-batches of a step, each with the error for the answer yes.

    Args:
        hint: Says how to continue a run that stops now.
    """

    def __init__(self, hint: Callable[[], str]) -> None:
        self._hint = hint
        self._waiting: list[tuple[Tensor, Callable[[], str]]] = []

    def ask(self, question: Tensor, error: Callable[[], str]) -> None:
        """Ask whether a tensor with one boolean is true."""
        self._waiting.append((question, error))

    def read(self) -> None:
        """Raise a `ValueError` for the first question whose answer is yes."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        device = waiting[0][0].device
        answers: list[bool] = torch.stack([question.to(device) for question, _ in waiting]).tolist()
        for answer, (_, error) in zip(answers, waiting, strict=True):
            if answer:
                raise ValueError(error())

    def ask_initial_state(self, state: RecurrentState | None, where: str, source: str) -> Tensor:
        """Stop at initial states with NaN or infinite values; the share of the rows that start from zero."""
        from_zero, is_broken = zero_rows(state)
        self.ask(
            is_broken,
            lambda: (
                f"The initial_state of {where} has NaN or infinite values: {source} must give finite ones. "
                f"{self._hint()}"
            ),
        )
        return from_zero

    def ask_loss(self, loss: Tensor, where: str) -> None:
        """Stop at a loss that is not finite."""
        loss = loss.detach()
        self.ask(
            ~loss.isfinite(),
            lambda: (
                f"The loss of {where} is {loss.item()}. {self._hint()} Lower the learning rate, clip gradients "
                "(max_grad_norm), and look for batches without labels."
            ),
        )

    def ask_final_state(self, state: RecurrentState, where: str, logs: StepLogs) -> None:
        """Log the sizes of final states; stop at states with NaN or infinite values."""
        norms = part_norms(state)
        rms = recurrent_rms(state, norms)
        if rms.numel():
            logs.add(state_rms=rms.mean(), state_rms_max=rms.max())
        self.ask(
            ~norms.isfinite().all(),
            lambda: f"final_state of {where}: {describe_broken(norms)}. {self._hint()} Lower the learning rate.",
        )


class ModelCalls:
    """Watches the training-mode calls of a model, and of its backbone, which some losses call alone.

    Attributes:
        got_state: Whether a call got an `initial_state`.
        final_state: Final state of the last call that returned one, without gradients.
    """

    def __init__(self) -> None:
        self.got_state = False
        self.final_state: RecurrentState | None = None
        self._model: Any = None
        self._hooks: list[Any] = []

    def watch(self, model: Any, unwrapped: Callable[[Any], nn.Module] = lambda model: model) -> None:
        """Reset the attributes, and watch a model, as it is when `unwrapped`."""
        if model is not self._model:
            self.stop()
            self._model, inner = model, unwrapped(model)
            backbone = getattr(inner, "base_model", None)
            for module in [inner, *([backbone] if isinstance(backbone, nn.Module) and backbone is not inner else [])]:
                self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._after))
        self.got_state, self.final_state = False, None

    def take_final_state(self) -> RecurrentState | None:
        """`final_state`, to which no reference stays here, so that the caller decides how long it lives."""
        taken, self.final_state = self.final_state, None
        return taken

    def stop(self) -> None:
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


def raise_ignored(trainer: Any, what: str, needed: str) -> NoReturn:
    """Raise a `ValueError`: the loss ignored what the method puts into the inputs."""
    name = type(trainer).__name__
    _raise_no_effect(trainer, f"{what}. The compute_loss of {name}, or one that it calls, must use {needed}.")


def raise_bypassed(trainer: Any) -> NoReturn:
    """Raise a `ValueError`: the loss was computed without the method."""
    _raise_no_effect(
        trainer,
        f"the compute_loss of {type(trainer).__name__} does not call that of InitialStateTrainer. Call "
        "super().compute_loss(...) in it, or, if it belongs to another trainer, join the two with "
        "hf_recurrent_lengthgen.trainers.combine(method, trainer), which returns a trainer and a config class.",
    )


def _raise_no_effect(trainer: Any, why: str) -> NoReturn:
    method = trainer.about.title + (" with output alignment" if trainer.alignment is not None else "")
    raise ValueError(f"{method} ({type(trainer).__name__}) had no effect in step {trainer.state.global_step}: {why}")
