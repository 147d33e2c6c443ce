"""Complete and incomplete checkpoint folders, made by hand."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_callback import TrainerState

from hf_recurrent_lengthgen.trainers.run.checkpoints import (
    begin_save,
    initial_states_file,
    load_initial_states,
    newest_complete_checkpoint,
    save_initial_states,
    what_is_missing,
)

RUN: dict[str, str | int] = {"source": "PassedStates", "num_processes": 1, "per_device_train_batch_size": 2}
TENSORS = {"micro_batches.0.layers.0.recurrent": torch.tensor([[1.5, -2.0]])}


def make_checkpoint(output_dir: Path, step: int, processes: int = 1) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for index in range(processes):
        save_initial_states(initial_states_file(folder, index), TENSORS, RUN | {"num_processes": processes})
        torch.save({}, folder / ("rng_state.pth" if processes == 1 else f"rng_state_{index}.pth"))
    torch.save({}, folder / "optimizer.pt")
    torch.save({}, folder / "scheduler.pt")
    save_file(TENSORS, folder / "model.safetensors")
    TrainerState(global_step=step).save_to_json(str(folder / "trainer_state.json"))
    return folder


def test_initial_states_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    save_initial_states(path, TENSORS, RUN)
    loaded = load_initial_states(path, RUN)
    assert loaded.keys() == TENSORS.keys()
    assert torch.equal(loaded["micro_batches.0.layers.0.recurrent"], TENSORS["micro_batches.0.layers.0.recurrent"])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_states_of_another_run_are_refused_with_what_changed(tmp_path: Path) -> None:
    save_initial_states(tmp_path / "states.safetensors", TENSORS, RUN)
    with pytest.raises(ValueError, match=r"num_processes was 1 and is 2\. Restore the old value, or load the weights"):
        load_initial_states(tmp_path / "states.safetensors", RUN | {"num_processes": 2})


def test_a_missing_file_of_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is missing, so this run cannot be resumed exactly"):
        load_initial_states(tmp_path / "states.safetensors", RUN)


def test_a_truncated_file_of_states_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    save_initial_states(path, TENSORS, RUN)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"is damaged .*resume from an earlier checkpoint"):
        load_initial_states(path, RUN)


@pytest.mark.parametrize(
    "header", [{}, {"format": "initial_states", "format_version": "2"}, {"format": "other", "format_version": "1"}]
)
def test_unknown_formats_are_refused(tmp_path: Path, header: dict[str, str]) -> None:
    save_file(TENSORS, tmp_path / "states.safetensors", header)
    with pytest.raises(ValueError, match=r"has format .* version .*, this code reads 'initial_states' up to"):
        load_initial_states(tmp_path / "states.safetensors", RUN)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_whole_checkpoint_lacks_nothing(tmp_path: Path, processes: int) -> None:
    assert what_is_missing(make_checkpoint(tmp_path, 5, processes)) is None


@pytest.mark.parametrize(
    ("processes", "name"),
    [
        (1, "trainer_state.json"),
        (1, "initial_states_0.safetensors"),
        (1, "rng_state.pth"),
        (1, "optimizer.pt"),
        (1, "scheduler.pt"),
        (2, "initial_states_1.safetensors"),
        (2, "rng_state_1.pth"),
    ],
)
def test_every_missing_file_is_named(tmp_path: Path, processes: int, name: str) -> None:
    folder = make_checkpoint(tmp_path, 5, processes)
    (folder / name).unlink()
    assert name in str(what_is_missing(folder))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert what_is_missing(tmp_path / "checkpoint-1") == "there is no such folder"


@pytest.mark.parametrize("text", ["", '{"epoch": 1.0,', "[]", '{"unknown_field": 1}', "\x00\x00"])
def test_an_unreadable_trainer_state_is_an_interrupted_save(tmp_path: Path, text: str) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (folder / "trainer_state.json").write_text(text)
    assert "trainer_state.json cannot be read" in str(what_is_missing(folder))


def test_the_newest_complete_checkpoint_counts_steps_not_letters_or_times(tmp_path: Path) -> None:
    for step in (10, 9, 11, 2):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-11" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-13").touch()
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_without_a_complete_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest_complete_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "checkpoint-1").mkdir()
    assert newest_complete_checkpoint(tmp_path) is None


def test_a_folder_that_is_written_over_is_incomplete_from_the_start(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    (folder / ".initial_states_0.safetensors.x1.tmp").touch()
    begin_save(folder)
    assert "trainer_state.json is missing" in str(what_is_missing(folder))
    assert not list(folder.glob(".*"))
    begin_save(tmp_path / "checkpoint-6")
    assert not (tmp_path / "checkpoint-6").exists()


def test_the_run_is_readable_without_this_package(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    save_initial_states(path, TENSORS, RUN)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert json.loads(header["__metadata__"]["run"]) == RUN


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, name: str, share: float) -> None:
    older, newer = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 6)
    path = newer / name
    os.truncate(path, int(path.stat().st_size * share))
    assert what_is_missing(newer) == f"damaged or cut off: {name}"
    assert newest_complete_checkpoint(tmp_path) == older
