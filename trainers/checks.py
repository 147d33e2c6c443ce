"""What a trainer refuses before training starts, with the reason."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting
from hf_recurrent_lengthgen.models.state_value import RecurrentState
from hf_recurrent_lengthgen.trainers.chunked_backprop import check_chunkable, innermost_model
from hf_recurrent_lengthgen.trainers.combinations import refuse, tables_of
from hf_recurrent_lengthgen.trainers.run.step_checks import recurrent_layers

STATE_ARGUMENTS = {"initial_state", "output_final_state"}


def takes_states(model: nn.Module) -> bool:
    """Whether a model takes `initial_state` and returns a `final_state` that holds all of its state."""
    base = base_of(model)
    stateless = getattr(base, "stateless_layers", [])
    return set(inspect.signature(base.forward).parameters) >= STATE_ARGUMENTS and not stateless


def check_model(model: nn.Module) -> None:
    """Raise a `ValueError` for a model that accepts no initial state."""
    base = base_of(model)
    missing = STATE_ARGUMENTS - set(inspect.signature(base.forward).parameters)
    if missing:
        raise ValueError(
            f"{type(base).__name__} does not take {sorted(missing)}, so it cannot be given states. Give the trainer "
            "the folder or Hub name of the checkpoint in its place, load_model(folder), or stateful(model), all of "
            "hf_recurrent_lengthgen."
        )
    if getattr(base, "stateless_layers", []):
        base.check_has_states()


def check_trainer(trainer: Any) -> None:
    """Raise a `ValueError` for a model, settings or data with which a method would have another effect."""
    model, args = trainer.model, trainer.args
    if trainer.needs_states:
        check_model(model)
    check_trainable(model, trainer.learns_state)
    check_adapters(model)
    check_no_forgetting(model)
    refuse(trainer, tables_of(trainer))
    if args.attention_windows is not None:
        from hf_recurrent_lengthgen.hybrids.windows import check_window  # reaches all hybrids

        for window in args.attention_windows:
            check_window(base_of(model), window)
    if args.bptt_chunk_length is not None:
        check_chunkable(innermost_model(model))
    keep_states_in_full_precision(trainer.accelerator.state)


def check_windows(trainer: Any, micro_batch: Any, num_items: Tensor | int | None) -> None:
    """Raise a `ValueError` for a loss computed by hand where windows would have to be trained on one by one, and for
    the loss of a window without the number of targets of the step, by which the losses of windows add up."""
    if micro_batch is None:
        raise ValueError(
            "With bptt_window each window has a backward pass of its own, in training_step of a run: call train(), or "
            "leave bptt_window out."
        )
    if num_items is None:
        raise ValueError(
            f"The compute_loss of {type(trainer).__name__} does not pass num_items_in_batch on, so each window would "
            "count as much as the whole step: take it as an argument, and give it to super().compute_loss(...)."
        )


def keep_states_in_full_precision(accelerator_state: Any) -> None:
    """Make FSDP cast weights but not states, which its default policy would cast at every module."""
    plugin: Any = getattr(accelerator_state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if policy is not None and getattr(policy, "cast_forward_inputs", False):
        plugin.mixed_precision_policy = dataclasses.replace(policy, cast_forward_inputs=False)


def check_trainable(model: nn.Module, learns_state: bool) -> None:
    """Raise a `ValueError` for a model without trainable parameters, and for one with an active learned state."""
    states = getattr(base_of(model), "learned_states", None)
    if states is not None and states.active_adapter is not None and not learns_state:
        raise ValueError(
            f"The learned state {states.active_adapter!r} is active, which only LearnedStateTrainer trains with: call "
            "model.learned_states.set_adapter(None) to start from zero."
        )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not [name for name in trained if learns_state or "learned_states." not in name]:
        hint = "Perhaps LearnedStateTrainer did that. Call model.requires_grad_(True)."
        if hasattr(model, "peft_config"):
            hint = "PEFT loads adapters frozen: give PeftModel.from_pretrained(model, FOLDER, is_trainable=True)."
        raise ValueError(f"The model has no trainable parameters: all of them are frozen. {hint}")


def check_adapters(model: Any) -> None:
    """Raise a `ValueError` for trainable weights that a checkpoint of adapters would not have: PEFT saves adapters."""
    if not hasattr(model, "get_base_model"):
        return
    from peft import get_peft_model_state_dict

    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    saved = {
        value.data_ptr()
        for name in model.peft_config
        for value in get_peft_model_state_dict(model, weights, name, save_embedding_layers=False).values()
    }
    lost = [
        name
        for name, weight in model.get_base_model().named_parameters()
        if weight.requires_grad and weight.data_ptr() not in saved and "learned_states." not in name
    ]
    if lost:
        raise ValueError(
            f"{len(lost)} trainable weights are in no adapter, so they would be trained and not saved, the first is "
            f"{lost[0]}: name their modules in modules_to_save of the LoraConfig, or freeze them "
            "(requires_grad_(False))."
        )


def check_no_forgetting(model: nn.Module | None) -> None:
    """Raise a `ValueError` for a model that is made to forget, by its config or by `forgetting`."""
    config: Any = getattr(base_of(model), "config", None)
    if Forgetting.of(config) != Forgetting():
        raise ValueError(
            f"The model is made to forget at inference ({config.forgetting}). Training would compensate for that, and "
            "random or learned states cannot fill a window. Train without it (model.config.forgetting = None, or "
            "the checkpoint before it) and set it afterwards."
        )


def zero_state_of(trainer: Any) -> Callable[[int], RecurrentState]:
    """A function that makes the zero state of a trainer's model for a batch size.

    Raises:
        ValueError: for a model that cannot start from noise.
    """
    base = base_of(trainer.model)
    reason = getattr(base, "no_noise", None)
    if not recurrent_layers(base.zero_state(1)):
        reason = "its only states are those of short convolutions, which get no noise"
    if reason is not None:
        raise ValueError(f"{type(base).__name__} cannot start from noise: {reason}. Use passed or learned states.")
    return lambda rows: base_of(trainer.model).zero_state(rows)
