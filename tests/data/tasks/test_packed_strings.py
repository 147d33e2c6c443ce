"""Rows of several strings: their tokens and labels, their randomness, and that one state runs through them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.data.tasks import CopyingStrings, PackedStrings, TaskStrings, string_task
from hf_recurrent_lengthgen.trainers import StatePassingTrainer, TbttTrainer, ZeroStateTrainer
from tests.trainers import toys

NONE = -100
TASKS = [
    pytest.param(*case, id=f"{case[0]}{' with a begin token' * case[3]}")
    for case in (
        ("copying", (2, 5), 7, True),
        ("copying", (3, 3), 7, False),
        ("stack_copying", (1, 4), 7, True),
        ("sorting", (2, 4), 9, False),
        ("recall", (1, 2), 9, True),
    )
]


def packed(row_length: int, samples: int = 40, seed: int = 0) -> PackedStrings:
    return PackedStrings(string_task("copying", (2, 5), 7, 1, seed, begin=True), row_length, samples)


def test_a_row_token_by_token() -> None:
    strings = CopyingStrings(2, vocabulary=1)  # one symbol, so all strings are "aa|aa."
    row = PackedStrings(strings, 15, 1)[0]
    assert row["input_ids"].tolist() == [3, 3, 1, 3, 3, 2, 3, 3, 1, 3, 3, 2, 3, 3, 1]
    assert row["labels"].tolist() == [NONE, NONE, NONE, 3, 3, 2] * 2 + [NONE] * 3
    strings.begin = True
    row = PackedStrings(strings, 20, 1)[0]  # the third string lacks only its end, and has no labels
    assert row["input_ids"].tolist() == [2, 3, 3, 1, 3, 3, 2] * 2 + [2, 3, 3, 1, 3, 3]
    assert row["labels"].tolist() == [NONE, NONE, NONE, NONE, 3, 3, 2] * 2 + [NONE] * 6
    assert row.keys() == {"input_ids", "labels"}


@pytest.mark.parametrize(("name", "length", "vocabulary", "begin"), TASKS)
@pytest.mark.parametrize("spare", [0, 1, 30])
def test_rows_hold_whole_strings_with_all_labels_and_the_beginning_of_one_more(
    name: str, length: tuple[int, int], vocabulary: int, begin: bool, spare: int
) -> None:
    task = string_task(name, length, vocabulary, 10**6, 5, begin)
    row_length = task.row_length + spare
    shortest = string_task(name, length[0], vocabulary, begin=begin).row_length
    each = next(number for number in range(1, 100) if number * shortest >= row_length)  # strings of a row
    cut = 0
    for index, row in enumerate(PackedStrings(task, row_length, 40)):
        tokens: list[int] = []
        labels: list[int] = []
        for number in range(index * each, index * each + each):
            string = task[number]
            fits = len(tokens) + len(string["input_ids"]) <= row_length
            tokens += string["input_ids"].tolist()
            labels += string["labels"].tolist() if fits else [NONE] * len(string["labels"])
            cut += not fits
        assert row["input_ids"].tolist() == tokens[:row_length]
        assert row["labels"].tolist() == labels[:row_length]
        assert (row["labels"] != NONE).any()
    assert cut or length[0] == length[1]


def test_rows_depend_on_seed_and_index_alone() -> None:
    rows = packed(31)
    one_by_one = [rows[index]["input_ids"].tolist() for index in range(40)]
    together = rows.__getitems__([*range(39, -1, -1)])
    assert [item["input_ids"].tolist() for item in reversed(together)] == one_by_one
    assert packed(31, 10**12)[7]["input_ids"].tolist() == one_by_one[7]
    assert pickle.loads(pickle.dumps(rows))[7]["input_ids"].tolist() == one_by_one[7]
    assert len({tuple(row) for row in one_by_one}) == 40
    assert not any(row == packed(31, seed=1)[index]["input_ids"].tolist() for index, row in enumerate(one_by_one))
    with pytest.raises(IndexError, match="of 40"):
        rows[40]


def test_workers_and_processes_read_the_same_rows() -> None:
    rows = packed(31, 11)
    alone, shared = (
        [batch["input_ids"] for batch in DataLoader(rows, 3, num_workers=workers, collate_fn=PaddingCollator())]
        for workers in (0, 2)
    )
    assert [len(batch) for batch in alone] == [3, 3, 3, 2]
    assert all(torch.equal(*pair) for pair in zip(alone, shared, strict=True))
    shards = [rows.batch(range(process, 11, 2))["input_ids"] for process in range(2)]
    everything = torch.empty_like(rows.batch(range(11))["input_ids"])
    everything[0::2], everything[1::2] = shards
    assert torch.equal(everything, torch.cat(alone))
    assert "attention_mask" not in rows.batch(range(11))


def test_a_resumed_run_must_have_the_same_rows() -> None:
    records = [
        packed(31).resume_record,
        packed(32).resume_record,
        packed(31, seed=1).resume_record,
        packed(31).strings.resume_record,
        PackedStrings(string_task("copying", (2, 5), 6, begin=True), 31, 40).resume_record,
    ]
    assert all(one != other for place, one in enumerate(records) for other in records[:place])


@pytest.mark.parametrize("begin", [False, True])
def test_rows_that_do_not_hold_the_longest_string_are_refused(begin: bool) -> None:
    task: TaskStrings = string_task("copying", (2, 5), 7, begin=begin)
    least = 12 + begin  # five symbols, twice, delimiter and end
    assert PackedStrings(task, least, 1).row_length == least
    with pytest.raises(ValueError, match=f"sequences of {least - 1} tokens do not hold .* has {least}: give longer"):
        PackedStrings(task, least - 1, 1)
    with pytest.raises(ValueError, match="samples at least 1"):
        PackedStrings(task, least, 0)


def test_rows_of_another_seed_have_other_strings_in_rows_that_hold_them() -> None:
    rows = PackedStrings(string_task("copying", (3, 9), 26, 5, 0, begin=True), 40, 10)
    others = rows.resized(50, 6, 2**40)
    new = PackedStrings(string_task("copying", (3, 9), 26, 5, 2**40, begin=True), 50, 6)
    assert len(others) == 6
    assert others.resume_record == new.resume_record
    assert torch.equal(others[5]["input_ids"], new[5]["input_ids"])
    assert not torch.equal(others[0]["input_ids"][:40], rows[0]["input_ids"])
    with pytest.raises(ValueError, match="do not hold the longest string"):
        rows.resized(5, 10, 0)
    with pytest.raises(TypeError, match="integer"):
        PackedStrings(rows.strings, (30, 60), 10)  # type: ignore[arg-type]


def losses(model: Any, batches: list[dict[str, Tensor]], passed: bool) -> list[float]:
    """Of steps without learning, each string read from the state of the one before, also in another row if passed."""
    found, state = [], None
    for batch in batches:
        assert len(batch["input_ids"]) == 1
        tokens, labels, state = batch["input_ids"][0], batch["labels"][0], state if passed else None
        starts = [0, *(place + 1 for place in range(len(tokens)) if tokens[place] == 2 and labels[place] == 2)]
        logits = []
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            output = model(input_ids=tokens[None, start:end], initial_state=state, output_final_state=True)
            logits.append(output.logits[0])
            state = output.final_state
        found.append(float(F.cross_entropy(torch.cat(logits)[:-1], labels[1:], ignore_index=NONE)))
    return found


@pytest.mark.parametrize(
    ("method", "options"),
    [(ZeroStateTrainer, {}), (StatePassingTrainer, {"state_drop_probability": 0.0}), (TbttTrainer, {})],
    ids=["zero state", "state passing", "tbtt"],
)
def test_one_state_runs_through_the_strings_of_a_row(method: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model = toys.tiny_model()
    batches: list[dict[str, Tensor]] = []
    if method is TbttTrainer:
        options = {"bptt_chunk_length": 7}  # 31 tokens in 5 windows
    config = method.config_class(
        str(tmp_path),
        **{**toys.QUIET, "save_strategy": "no", "max_steps": 4, "learning_rate": 0.0, "logging_steps": 1},
        per_device_train_batch_size=1,
        **options,
    )
    trainer = method(model, config, train_dataset=packed(31), data_collator=toys.recording(batches))
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with torch.no_grad():
        expected = losses(model.eval(), batches[:4], passed=method is StatePassingTrainer)
        others = losses(model, batches[:4], passed=method is not StatePassingTrainer)
    assert logged == pytest.approx(expected, rel=1e-4)
    assert logged[1:] != pytest.approx(others[1:], rel=1e-4)
