"""What is refused or set right before training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model

from hf_recurrent_lengthgen import forgetting
from hf_recurrent_lengthgen.trainers import (
    InitialStateConfig,
    LearnedStateConfig,
    LearnedStateTrainer,
    ZeroStateTrainer,
)
from hf_recurrent_lengthgen.trainers.checks import (
    check_adapters,
    check_trainable,
    keep_states_in_full_precision,
)
from hf_recurrent_lengthgen.trainers.combinations import refuse, tables_of
from tests.trainers import toys

TRAINERS: dict[str, Any] = {
    "zero_state": (ZeroStateTrainer, InitialStateConfig),
    "learned_state": (LearnedStateTrainer, LearnedStateConfig),
}
FORGETTING: list[dict[str, Any]] = [{"retention": 0.9999, "insertion": 0.75}, {"window": 8}, {"delta_scale": 0.5}]


def state_with(version: int) -> SimpleNamespace:
    reshard = True if version == 2 else "FULL_SHARD"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, reshard_after_forward=reshard)
    plugin.set_mixed_precision("bf16")
    return SimpleNamespace(fsdp_plugin=plugin)


def test_fsdp_casts_weights_but_not_the_states_that_go_in() -> None:
    state = state_with(2)
    assert state.fsdp_plugin.mixed_precision_policy.cast_forward_inputs
    keep_states_in_full_precision(state)
    policy = state.fsdp_plugin.mixed_precision_policy
    assert not policy.cast_forward_inputs
    assert policy.param_dtype == torch.bfloat16


@pytest.mark.thinned(5)
@pytest.mark.parametrize("settings", FORGETTING, ids=str)
@pytest.mark.parametrize("method", ["zero_state", "learned_state"])
def test_a_model_that_is_made_to_forget_is_not_trained(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    trainer_class, config_class = TRAINERS[method]
    arguments = config_class(str(tmp_path / "run"), max_steps=1, save_strategy="no", **toys.QUIET)
    forgets, rows = toys.tiny_model(forgetting=settings), toys.sequences(8)
    with pytest.raises(ValueError, match=r"made to forget at inference .* set it afterwards"):
        trainer_class(forgets, arguments, train_dataset=rows)
    trainer = trainer_class(toys.tiny_model(), arguments, train_dataset=rows)
    with forgetting(trainer.model, **settings), pytest.raises(ValueError, match="made to forget at inference"):
        trainer.train()
    assert trainer.train().global_step == 1


def test_fewer_rows_than_a_batch_are_an_error(tmp_path: Path) -> None:
    arguments = InitialStateConfig(str(tmp_path / "run"), per_device_train_batch_size=4, **toys.QUIET)
    with pytest.raises(ValueError, match=r"have 3 sequences, fewer than one batch of 4 \(4 on each of 1 processes\)"):
        ZeroStateTrainer(toys.tiny_model(), arguments, train_dataset=toys.sequences(3)).train()


SEVERAL: list[tuple[dict[str, Any], str]] = [
    ({"average_tokens_across_devices": False}, "would make the weight of a token depend on the other tokens"),
    ({"accelerator_config": SimpleNamespace(even_batches=False)}, "even_batches=False"),
    (
        {"train_sampling_strategy": "group_by_length"},
        "'group_by_length' orders sequences by the batches of one process",
    ),
]


def refused(folder: Path, fields: dict[str, Any], world_size: int, started: int = 1) -> str:
    """What the trainer of these arguments, in one of `started` processes, is refused with, or nothing."""
    trainer = ZeroStateTrainer(
        toys.tiny_model(), InitialStateConfig(str(folder), **toys.QUIET), train_dataset=toys.sequences(4)
    )
    own = {"n_gpu": 1, "device": trainer.args.device, "world_size": world_size, "context_parallel_size": 1}
    trainer.args = SimpleNamespace(**vars(trainer.args) | own | fields)  # type: ignore[assignment]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(started))
            refuse(trainer, tables_of(trainer))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("fields", "why"), SEVERAL, ids=[next(iter(fields)) for fields, _ in SEVERAL])
def test_what_depends_on_the_number_of_processes_is_refused(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert not refused(tmp_path, fields, 1)
    assert why in refused(tmp_path, fields, 2)


def test_processes_that_do_not_see_each_other_are_refused(tmp_path: Path) -> None:
    assert not refused(tmp_path, {}, 2, started=2)
    assert "2 processes were started, but each one runs by itself" in refused(tmp_path, {}, 1, started=2)


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", 10**6, r"input_ids must be from 0 to \d+, got 1000000 in row 1, position 2"),
        ("input_ids", -100, r"input_ids must be from 0 to \d+, got -100 in row 1, position 2"),
        ("labels", 10**6, r"labels must be from 0 to \d+, or -100 for none, got 1000000 in row 1, position 2"),
        ("labels", -1, r"labels must be .*, got -1 in row 1, position 2"),
        ("input_ids", torch.float32, r"must be int64 or int32, got torch.float32 .*4, 4.*PaddingCollator"),
        ("input_ids", torch.bool, r"must be int64 or int32, got torch.bool .*4, 4.*PaddingCollator"),
        ("input_ids", torch.uint16, r"must be int64 or int32, got torch.uint16 .*4, 4.*PaddingCollator"),
    ],
)
@pytest.mark.parametrize("step", ["train", "evaluate"])
def test_ids_that_embeddings_do_not_take_are_refused(
    name: str, value: Any, message: str, step: str, tmp_path: Path
) -> None:
    rows = [{"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor([1, 2, -100, 4])} for _ in range(4)]
    if isinstance(value, torch.dtype):
        rows = [row | {name: row[name].to(value)} for row in rows]
    else:
        rows[1][name][2] = value
    settings = {"per_device_train_batch_size": 4, "save_strategy": "no", "train_sampling_strategy": "sequential"}
    args = InitialStateConfig(str(tmp_path), **toys.QUIET, **settings, max_steps=1)
    trainer = ZeroStateTrainer(toys.tiny_model(), args, train_dataset=rows, eval_dataset=rows)
    with pytest.raises(ValueError, match=message):
        getattr(trainer, step)()


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_empty_data_are_refused(name: str, tmp_path: Path) -> None:
    args = InitialStateConfig(str(tmp_path), report_to="none", use_cpu=True)
    for empty in ([], {"one": toys.sequences(2), "two": []}) if name == "eval_dataset" else ([],):
        with pytest.raises(ValueError, match=f"{name} has no sequences"):
            ZeroStateTrainer(toys.tiny_model(), args, **{name: empty})


def test_a_method_does_not_take_the_name_of_another() -> None:
    with pytest.raises(ValueError, match="method name 'none' of Mine belongs to ZeroStateTrainer already"):

        class Mine(ZeroStateTrainer):
            about = ZeroStateTrainer.about


def test_an_adapter_that_was_loaded_frozen_is_refused_with_what_to_do(tmp_path: Path) -> None:
    get_peft_model(toys.tiny_model(), LoraConfig(r=2, target_modules=["in_proj"])).save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(toys.tiny_model(), str(tmp_path))
    with pytest.raises(ValueError, match=r"PeftModel\.from_pretrained\(model, FOLDER, is_trainable=True\)"):
        check_trainable(frozen, learns_state=False)
    check_trainable(PeftModel.from_pretrained(toys.tiny_model(), str(tmp_path), is_trainable=True), learns_state=False)


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(r=2, target_modules="all-linear", bias="lora_only", modules_to_save=["embeddings", "lm_head"]),
        LoraConfig(r=2, target_modules=["in_proj"], trainable_token_indices=[3, 4]),
        IA3Config(target_modules=["in_proj"], feedforward_modules=[]),
        VeraConfig(r=2, target_modules=["in_proj"]),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=lambda settings: settings.peft_type,
)
def test_all_that_peft_saves_may_train(settings: Any) -> None:
    check_adapters(get_peft_model(toys.tiny_model(), settings))


def test_weights_that_train_beside_an_adapter_are_refused_since_nothing_would_save_them(tmp_path: Path) -> None:
    model = get_peft_model(toys.tiny_model(), LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["norm_f"]))
    args = InitialStateConfig(str(tmp_path), report_to="none", use_cpu=True)
    ZeroStateTrainer(model, args, train_dataset=toys.sequences(4))
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad or "A_log" in name)
    with pytest.raises(
        ValueError, match=r"2 trainable weights are in no adapter.*layers\.0\.mixer\.A_log: .*modules_to"
    ):
        ZeroStateTrainer(model, args, train_dataset=toys.sequences(4))
