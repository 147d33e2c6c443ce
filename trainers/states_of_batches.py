"""The states of a micro-batch: initial states from the source, and final states from the model."""

from functools import partial
from typing import Any

from transformers import DataCollatorWithFlattening

from hf_recurrent_lengthgen.data.segments import unpacked
from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.models.rows import read_rows
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace, InitialStateSource, MicroBatch
from hf_recurrent_lengthgen.trainers.run.scored_targets import token_shape_of
from hf_recurrent_lengthgen.trainers.run.step_checks import raise_ignored


def with_training_states(trainer: Any, micro_batch: MicroBatch, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model, which is watched from now on, gets for a micro-batch or window."""
    inputs = dict(inputs)
    place, state = micro_batch.place, micro_batch.carried
    if trainer.takes_states:
        if state is None:
            state = trainer.initial_states.initial_state(place)
            source = type(trainer.initial_states).__name__
            from_zero = trainer.checks.ask_initial_state(state, micro_batch.where, source)
            trainer.run_record.nonzero_starts = trainer.run_record.nonzero_starts + place.rows * (
                1 - from_zero.double()
            )
            sequences = micro_batch.sequences
            share = from_zero if sequences is None else 1 - (1 - from_zero) * place.rows / sequences
            trainer.logs.add(zero_states=share)
            if state is None and trainer.args.torch_compile and not trainer.initial_states.always_zero:
                state = base_of(trainer.model).zero_state(place.rows)  # or a second graph is compiled for None
        inputs |= {"initial_state": micro_batch.layout.scatter(state), "output_final_state": True}
    if micro_batch.keys is not None:
        inputs["attention_cache"] = micro_batch.keys
    if trainer.shared.group is not None:
        inputs["sequence_group"] = trainer.shared.group
        inputs.pop("labels")  # the target of a chunk's last token is in the next; `shift_labels` have it
    if micro_batch.crop_loss is not None:
        inputs.pop("shift_labels")  # Trainer counted them
    unwrap = partial(trainer.accelerator.unwrap_model, keep_torch_compile=False)
    trainer.calls.watch(trainer.model, lambda wrapped: base_of(unwrap(wrapped)))
    return inputs


def observe(trainer: Any, micro_batch: MicroBatch, inputs: dict[str, Any]) -> None:
    """Show the source the final states that the model returned, or keep them for the next window. Before weights
    change, answer the questions of the step."""
    if trainer.takes_states:
        if inputs["initial_state"] is not None and not trainer.calls.got_state:
            raise_ignored(trainer, "the model got no initial_state", "the initial_state of the inputs")
        final_state = trainer.calls.take_final_state()
        if final_state is None:
            raise_ignored(trainer, "the model returned no final_state", "the output_final_state of the inputs")
        state = micro_batch.layout.gather(final_state)
        trainer.checks.ask_final_state(state, micro_batch.where, trainer.logs)
        if micro_batch.ends:
            trainer.initial_states.observe(micro_batch.place, state)
        else:
            micro_batch.carried = state
    if micro_batch.is_last:
        trainer.checks.read()


def with_evaluation_states(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of an evaluation, from the source's state for it, without final states, which would count as
    predictions."""
    resets = inputs.pop("state_resets", None)
    if resets is not None and bool(resets[:, 1:].any()):
        raise ValueError(
            "The evaluation data reset states inside sequences (reset_at_document), which only training supports: "
            "evaluate on PackedBlocks."
        )
    if trainer.takes_states:
        from_zero = type(trainer.initial_states).evaluation_state is InitialStateSource.evaluation_state
        # each process gets rows of one sequence each
        unpacks = trainer.args.world_size > 1 and isinstance(trainer.data_collator, DataCollatorWithFlattening)
        if (unpacks or not from_zero) and (packed := read_rows(inputs)).starts is not None:
            inputs = unpacked(inputs, packed)
        rows = token_shape_of(inputs)[0]
        first_row = trainer.args.row_process_index * rows
        place = BatchPlace(trainer.args.seed, trainer.state.global_step, trainer.evaluation_batches, first_row, rows)
        state = trainer.initial_states.evaluation_state(place)
        plain = None if state is None else tuple(tuple(layer) for layer in state)  # Trainer moves no others
        inputs |= {"initial_state": plain, "output_final_state": False}
        trainer.evaluation_batches += 1
    return inputs
