"""Accuracy of models that are right and wrong at known places."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.data.tasks import AssociativeRecall, CopyingStrings, TaskStrings
from hf_recurrent_lengthgen.metrics.accuracy.figure import accuracy_figure, accuracy_over_steps_figure
from hf_recurrent_lengthgen.metrics.accuracy.measure import count_right, measure_accuracy
from hf_recurrent_lengthgen.metrics.retrieval.result import Share
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState


class Oracle(nn.Module):
    """Knows the rows of a task, and says 0 where `wrong` (row, place of the label) says so; everywhere else 0, too.

    Its state is what it has read, each id plus one.
    """

    def __init__(self, task: TaskStrings, wrong: list[tuple[int, int]]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(vocab_size=task.vocab_size)
        batch = task.batch(range(len(task)))
        self.rows, self.said = batch["input_ids"].tolist(), batch["labels"].clamp(min=0)
        for row, place in wrong:
            self.said[row, place] = 0
        self.batches: list[int] = []

    def forward(
        self, input_ids: Tensor, initial_state: RecurrentState | None = None, output_final_state: bool = True
    ) -> SimpleNamespace:
        assert not self.training
        self.batches.append(len(input_ids))
        width = len(self.rows[0])
        before = torch.zeros(len(input_ids), width) if initial_state is None else initial_state[0].recurrent
        said = torch.zeros_like(input_ids)
        state = before.clone()
        for number, row in enumerate(input_ids):
            count = int((before[number] > 0).sum())
            state[number, count : count + len(row)] = row + 1
            for place in range(len(row)):
                read = (state[number, : count + place + 1] - 1).tolist()
                known = [self.said[n, len(read)] for n, ids in enumerate(self.rows) if ids[: len(read)] == read]
                said[number, place] = known[0] if known and len(read) < width else 0
        logits = nn.functional.one_hot(said, self.config.vocab_size) * self.scale
        return SimpleNamespace(logits=logits, final_state=(LayerState(state, torch.zeros(len(state), 0)),))


# copying 4 symbols: the answer's labels stand at 5 to 8, the end's at 9
@pytest.mark.parametrize(
    ("wrong", "character", "sequence"),
    [
        ([], 1.0, 1.0),
        ([(0, 5)], 11 / 12, 2 / 3),
        ([(0, 8), (0, 5), (2, 6)], 9 / 12, 1 / 3),
        ([(0, 9), (1, 9)], 1.0, 1.0),  # the end is not scored
        ([(1, 4), (1, 1)], 1.0, 1.0),  # nor is the prompt
        ([(row, place) for row in range(3) for place in range(5, 9)], 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_characters_and_sequences_are_counted(
    wrong: list[tuple[int, int]], character: float, sequence: float, batch_size: int
) -> None:
    task = CopyingStrings(4, 5, 3)
    model = Oracle(task, wrong).train()
    symbols, answers, _ = count_right(model, task, batch_size)
    assert (symbols.accuracy, answers.accuracy) == (pytest.approx(character), pytest.approx(sequence))
    assert model.training
    assert max(model.batches) == min(batch_size, 3)


def test_recall_counts_values_only() -> None:
    task = AssociativeRecall(2, 6, 4)  # pairs at 0 to 3, delimiter 4, queries at 5 to 8: values at 6 and 8
    assert count_right(Oracle(task, [(0, 6), (1, 5), (1, 7), (3, 9)]), task)[:2] == (Share(7, 8), Share(3, 4))


def test_characters_of_rows_of_several_lengths_count_alike() -> None:
    task = CopyingStrings((1, 5), 500, 12)  # all rows differ
    lengths = [(len(task[row]["input_ids"]) - 2) // 2 for row in range(12)]
    assert len(set(lengths)) > 2
    wrong = [(row, lengths[row] + 1) for row in (2, 3, 7)]  # the first symbol of the answer
    found = count_right(Oracle(task, wrong), task, batch_size=12)
    assert found[:2] == (Share(sum(lengths) - 3, sum(lengths)), Share(9, 12))


def test_lengths_are_1_2_and_4_times_that_of_training() -> None:
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=7, **sizes))
    task = CopyingStrings((2, 3), 4, 10)
    found = measure_accuracy(model, task, samples=20).lengths
    assert [each.length for each in found] == [3, 6, 12]
    for length, symbols, answers in ((each.length, each.symbols, each.answers) for each in found):
        rows = CopyingStrings(length, 4, 20, seed=2**40).batch(range(20))
        right = model(rows["input_ids"]).logits[:, length:-2].argmax(-1) == rows["input_ids"][:, length + 1 : -1]
        assert (symbols, answers) == (Share(int(right.sum()), right.numel()), Share(int(right.all(1).sum()), 20))
    assert 0 < found[2].symbols.right < 240
    with pytest.raises(ValueError, match="vocab_size 7 is too small: copying with vocabulary 5 has 8 tokens"):
        count_right(model, CopyingStrings(3, 5))
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        count_right(model, task, 0)
    with pytest.raises(ValueError, match="from 1 to 3"):
        measure_accuracy(model, AssociativeRecall(3, 6, 5), [6])
    recall = AssociativeRecall(1, 4, 5)  # 2 pairs at most
    assert [each.length for each in measure_accuracy(model, recall, samples=5).lengths] == [1, 2]


def test_solid_lines_are_symbols_and_dashed_ones_whole_answers() -> None:
    curves = {"one": {50: (1.0, 0.9), 100: (0.8, 0.2)}, "two": {100: (0.3, 0.0), 50: (0.5, 0.1)}}
    axes = accuracy_figure(curves, "symbols", 50).axes[0]
    lines = axes.get_lines()[:4]
    assert [list(line.get_ydata()) for line in lines] == [[1.0, 0.8], [0.9, 0.2], [0.5, 0.3], [0.1, 0.0]]
    assert all(list(line.get_xdata()) == [50, 100] for line in lines)
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    assert list(axes.get_xticks()) == [50, 100]
    assert axes.get_xlabel() == "Length (symbols)"
    texts = [text.get_text() for text in axes.texts]
    assert {"one", "two", "trained on 50"} <= set(texts)


def test_each_run_and_length_has_a_line_over_steps() -> None:
    one, two = {20: {50: 0.9, 100: 0.4}, 10: {50: 0.5, 100: 0.1}}, {10: {50: 0.3, 100: 0.2}}
    axes = accuracy_over_steps_figure({"one": one, "two": two}, "symbols").axes[0]
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert lines == [([10, 20], [0.5, 0.9]), ([10, 20], [0.1, 0.4]), ([10], [0.3]), ([10], [0.2])]
    assert {text.get_text() for text in axes.texts} == {"one 50", "one 100", "two 50", "two 100"}
    alone = accuracy_over_steps_figure({"one": one}, "pairs").axes[0]
    assert {text.get_text() for text in alone.texts} == {"50 pairs", "100 pairs"}
    assert len({line.get_color() for line in alone.get_lines()}) == 2
