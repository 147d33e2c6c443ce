"""Every training argument applies from a resumed step on, has no part in the training, or is refused if it changes."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_recurrent_lengthgen.trainers import InitialStateConfig, StatePassingConfig, ZeroStateTrainer
from hf_recurrent_lengthgen.trainers.run.checkpoints import load_initial_states, save_initial_states, saved_run
from hf_recurrent_lengthgen.trainers.run.records import settings
from hf_recurrent_lengthgen.trainers.run.resumed_settings import (
    APPLIED,
    COMPUTING,
    MAY_CHANGE,
    WATCHING,
    fixed_arguments,
)
from tests.trainers import toys

FIXED = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "train_sampling_strategy"),
    *("length_column_name", "accelerator_config", "parallelism_config", "remove_unused_columns", "label_names"),
    *("average_tokens_across_devices", "label_smoothing_factor", "optim", "optim_args", "optim_target_modules"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("auto_find_batch_size", "ignore_data_skip", "dataloader_in_order", "fsdp", "fsdp_config", "deepspeed"),
}
CHANGED: dict[str, Any] = {
    "logging_steps": 3,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "include_num_input_tokens_seen": "all",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_on_start": True,
    "per_device_eval_batch_size": 3,
    "save_steps": 2,
    "save_total_limit": 1,
    "dataloader_pin_memory": False,
    "dataloader_drop_last": True,
    "torch_empty_cache_steps": 1,
    "ddp_timeout": 60,
    "full_determinism": False,
    "do_train": True,
    "run_name": "another",
}


def test_the_lists_are_disjoint_and_all_other_arguments_are_refused() -> None:
    assert len(APPLIED) + len(WATCHING) + len(COMPUTING) == len(MAY_CHANGE)
    unknown = {item.name for item in fields(TrainingArguments)} - MAY_CHANGE - FIXED
    assert not unknown, f"Does {unknown} change what is trained? Add it to MAY_CHANGE, or to FIXED here."


@pytest.mark.parametrize("name", sorted(FIXED & {item.name for item in fields(TrainingArguments)}))
def test_what_decides_the_training_is_refused(tmp_path: Path, name: str) -> None:
    args = StatePassingConfig(str(tmp_path), use_cpu=True, report_to="none")
    path = tmp_path / "states.safetensors"
    save_initial_states(path, {}, {"arguments": fixed_arguments(args)})
    load_initial_states(path, {"arguments": fixed_arguments(args)})
    setattr(args, name, "another")
    with pytest.raises(ValueError, match=f"Cannot resume exactly from .*: {name} was .* and is 'another'. Restore"):
        load_initial_states(path, {"arguments": fixed_arguments(args)})


def test_an_argument_that_a_checkpoint_does_not_know_had_its_default(tmp_path: Path) -> None:
    """It is from before the argument, of this package or of Transformers."""

    def read(**given: Any) -> None:
        args = StatePassingConfig(str(tmp_path), use_cpu=True, report_to="none", **given)
        run, defaults = {"arguments": fixed_arguments(args)}, fixed_arguments(args, defaults=True)
        load_initial_states(path, run, defaults)

    path = tmp_path / "states.safetensors"
    known = fixed_arguments(StatePassingConfig(str(tmp_path), use_cpu=True, report_to="none"))
    before = {name: value for name, value in known.items() if name not in ("attention_windows", "seed")}
    save_initial_states(path, {}, {"arguments": before})
    read(seed=42)
    with pytest.raises(
        ValueError, match=r": attention_windows was None and is \[2, 4\], seed was 42 and is 1\. Restore"
    ):
        read(attention_windows=[2, 4], seed=1)
    save_initial_states(path, {}, {})  # from before arguments were recorded
    read(attention_windows=[2, 4])


def test_a_run_from_before_an_argument_goes_on_with_its_default_alone(tmp_path: Path) -> None:
    run(tmp_path, max_steps=3)
    path = tmp_path / "checkpoint-3" / "initial_states_0.safetensors"
    saved = saved_run(path)
    del saved["arguments"]["bptt_chunk_length"]
    save_initial_states(path, load_initial_states(path, {}), saved)
    with pytest.raises(ValueError, match=r"checkpoint-3: bptt_chunk_length was None and is 4"):
        run(tmp_path, True, bptt_chunk_length=4)
    run(tmp_path, True)


def run(folder: Path, resume: Any = None, **changes: Any) -> Any:
    base = {"per_device_train_batch_size": 2, "max_steps": 6, "save_steps": 3, "learning_rate": 0.05}
    args = InitialStateConfig(str(folder), **toys.QUIET | base | changes)
    trainer = ZeroStateTrainer(
        toys.tiny_model(), args, train_dataset=toys.sequences(8), eval_dataset=toys.sequences(4, seed=1)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_what_has_no_part_in_the_training_may_change(tmp_path: Path) -> None:
    assert CHANGED.keys() <= WATCHING | COMPUTING
    whole = run(tmp_path / "whole")
    on = run(tmp_path / "on", str(tmp_path / "whole" / "checkpoint-3"), **CHANGED)
    toys.assert_same_weights(toys.weights(on.model), toys.weights(whole.model))


def test_noise_on_embeddings_may_change_and_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, max_steps=3)
    on = run(tmp_path, True, neftune_noise_alpha=5.0)
    told = [(part.from_step, part.neftune_noise_alpha) for part in on.run_record.settings(on)]
    assert told == [(0, None), (3, 5.0)]


def test_each_applied_argument_is_recorded(tmp_path: Path) -> None:
    """All but those that a number of steps stands for."""
    args = InitialStateConfig(str(tmp_path), **toys.QUIET)
    trainer = ZeroStateTrainer(toys.tiny_model(), args, train_dataset=toys.sequences(8))
    before = settings(trainer)
    for item in fields(TrainingArguments):
        if item.name not in APPLIED - {"max_steps", "num_train_epochs", "warmup_ratio"} or item.default is MISSING:
            continue
        given = getattr(trainer.args, item.name)
        setattr(trainer.args, item.name, True if given is False else 0.25)
        assert settings(trainer) != before, item.name
        setattr(trainer.args, item.name, given)
