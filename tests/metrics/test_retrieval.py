"""Accuracy by depth and length of models that remember by construction, and what is kept when a run is stopped."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_recurrent_lengthgen.data import byte_tokenizer, token_stream
from hf_recurrent_lengthgen.data.tasks import (
    BabilongGrid,
    BabiQuestion,
    KeyGrid,
    NeedleGrid,
    PasskeyGrid,
    RetrievalGrid,
    Task,
)
from hf_recurrent_lengthgen.data.tasks.keys_in_text import ANOTHER_KEY, EARLIER_VALUE
from hf_recurrent_lengthgen.evaluation import shared_prefixes
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.metrics.retrieval import measure as retrieval
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalComparison, RetrievalResult, Share
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from tests.metrics.test_retrieval_figures import RESULT

RECENT, KEY = 40, 7
NEEDLE = re.compile(rb"(\d{5,7})(?: is the pass ?key)?\.$")
ASKED = re.compile(
    rb"(?:\? The pass ?key is|mentioned in the provided text is|\nAnswer:|The code of [a-z-]+ is)( ?\d*)$"
)
BACKGROUND = [" ".join(f"The {number} birds of day {number} sang." for number in range(10, 99))]


class Recaller(nn.Module):
    """Reads bytes, and keeps the last 40 of them, the last number that a needle gave, and the bytes read since then.

    For a question, it says the number if at most `reach` bytes stand between the needle and the answer. With `first`
    it keeps the first number of the text.
    """

    def __init__(self, reach: float, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.scale = nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(vocab_size=384, reach=reach)
        self.reach = reach
        self.read = 0

    def forward(
        self,
        input_ids: Tensor,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        rows, length = input_ids.shape
        self.read += rows * length
        state = torch.zeros(rows, RECENT + KEY + 1) if initial_state is None else initial_state[0].recurrent.clone()
        logits = torch.zeros(rows, length, 384)
        for row in range(rows):
            recent = bytes(state[row, :RECENT].byte().tolist()).lstrip(b"\0")
            key = bytes(state[row, RECENT:-1].byte().tolist()).lstrip(b"\0")
            since = int(state[row, -1])
            for place, byte in enumerate((input_ids[row] - 3).clamp(min=0).tolist()):  # padding counts as 0
                recent, since = (recent + bytes([byte]))[-RECENT:], since + 1
                if byte == ord(".") and not (self.first and key) and (found := NEEDLE.search(recent)):
                    key, since = found[1], 0
                said = ASKED.search(recent)
                if said and key and since - len(said[1]) <= self.reach:
                    logits[row, place, (b" " + key + b".")[len(said[1])] + 3] = 1
            kept = recent.rjust(RECENT, b"\0") + key.rjust(KEY, b"\0")
            state[row] = torch.tensor([*kept, since])
        kept_logits = logits[:, -logits_to_keep:] * self.scale
        return SimpleNamespace(logits=kept_logits, final_state=(LayerState(state, torch.zeros(rows, 0)),))


def measured(
    model: Any, grid: RetrievalGrid, lengths: list[int], cache: ResultCache | None = None, **options: Any
) -> RetrievalResult:
    return retrieval_accuracy(
        model, grid, lengths, settings=EvaluationSettings(progress=False, **options), cache=cache
    )


def grids() -> list[RetrievalGrid]:
    tokenizer, depths = byte_tokenizer(), [0, 0.31, 0.8, 1]
    return [
        PasskeyGrid(tokenizer, depths, 3),
        PasskeyGrid(tokenizer, depths, 2, seed=1, style="infinity-bench"),
        PasskeyGrid(tokenizer, depths, 2, style="passkey"),
        NeedleGrid(tokenizer, BACKGROUND, depths, 2),
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("reach", [60, 200, 640, float("inf")])
def test_a_model_that_recalls_the_last_bytes_is_right_where_the_needle_is_near(number: int, reach: float) -> None:
    grid, model = grids()[number], Recaller(reach).train()
    result = measured(model, grid, [777, 1203])
    assert model.training
    assert result.rows == ("0 %", "31 %", "80 %", "100 %")
    assert result.depths == (0, 0.31, 0.8, 1)
    for row in range(4):
        for place, length in enumerate((777, 1203)):
            cell = result.cells[row][place]
            # the distance, from the texts
            distances = []
            for task in grid.tasks(row, length):
                text = bytes((task.prompt - 3).tolist())
                needles = [m.end() for m in re.finditer(rb"is the pass ?key\.|is: \d{7}\.", text)]
                distances.append(len(text) - needles[-1])
            assert cell.distance == max(distances)
            assert cell.right == sum(distance <= reach for distance in distances)
    assert measured(Recaller(10), grid, [777]).by_length[0].right == 0


def decoded(task: Task) -> bool:
    """Whether greedy decoding of a Recaller(300) gives the answer, one token after the other."""
    model, ids = Recaller(300), task.prompt[None]
    for _ in range(task.scored):
        ids = torch.cat([ids, model(ids, logits_to_keep=1).logits[:, -1:].argmax(-1)], 1)
    return torch.equal(ids[0, -task.scored :], task.answer[: task.scored])


@pytest.mark.parametrize(("worth", "batch_size", "chunk_length"), [(1, 3, 17), (64, None, None), (10**6, 2, 1000)])
def test_sharing_what_prompts_begin_with_changes_nothing(
    worth: int, batch_size: int | None, chunk_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefixes, "WORTH_A_CALL", worth)
    grid, lengths = PasskeyGrid(byte_tokenizer(), [0, 0.4, 0.9], 3), [431, 600, 843]
    model = Recaller(300)
    result = measured(model, grid, lengths, batch_size=batch_size, chunk_length=chunk_length)
    expected = [[sum(map(decoded, grid.tasks(row, n))) for n in lengths] for row in range(3)]
    assert [[cell.right for cell in row] for row in result.cells] == expected
    assert 0 < sum(map(sum, expected)) < 27
    plain = sum(9 * (length - 2) for length in lengths)  # all but the last digit and the period
    assert plain <= model.read < 1.1 * plain if worth == 10**6 else model.read < 0.8 * plain


ANSWERS = {  # what models say that remember one number, or none
    "last": Recaller(float("inf")),
    "first": Recaller(float("inf"), first=True),
    "none": Recaller(-1),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("said", ANSWERS)
def test_wrong_answers_are_counted_by_what_they_say(said: str, tmp_path: Path) -> None:
    stream = token_stream([f"{text} " for text in BACKGROUND])
    grid, lengths = KeyGrid(byte_tokenizer(), stream, [0, 0.4, 0.9], 8, keys=3, values=2), (700, 1400)
    result = measured(ANSWERS[said], grid, [*lengths], ResultCache(tmp_path))
    everywhere = Counter[str]()
    for row, cells in enumerate(result.cells):
        for length, cell in zip(lengths, cells, strict=True):
            kinds = Counter[str]()
            for task in grid.tasks(row, length):
                prompt = bytes((task.prompt - 3).clamp(min=0).tolist()).decode()
                *facts, queried = re.findall(r"The code of ([a-z-]+) is(?: (\d+)\.)?", prompt)
                name, code = facts[0 if said == "first" else -1]
                right = [code for name, code in facts if name == queried[0]][-1]
                kind = "right" if code == right else EARLIER_VALUE if name == queried[0] else ANOTHER_KEY
                kinds["other" if said == "none" else kind] += 1
            assert cell.right == kinds["right"]
            assert cell.mistakes == {EARLIER_VALUE: kinds[EARLIER_VALUE], ANOTHER_KEY: kinds[ANOTHER_KEY]}
            everywhere += kinds
    expected = {"last": {"right", ANOTHER_KEY}, "first": {EARLIER_VALUE, ANOTHER_KEY}, "none": {"other"}}
    assert everywhere.keys() == expected[said]
    by_length = {kind: sum(counts) for kind, counts in result.mistakes_by_length.items()}
    assert by_length == {kind: everywhere[kind] for kind in (EARLIER_VALUE, ANOTHER_KEY, "other")}
    before = ANSWERS[said].read
    again = measured(ANSWERS[said], grid, [*lengths], ResultCache(tmp_path))
    assert (again.cells, ANSWERS[said].read, again.style) == (result.cells, before, "3 keys of 2 values")


def test_a_prompt_counts_once_where_predictions_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_hit(_: Any, texts: Any, starts: Any, **options: Any) -> Any:
        yield from reversed([(number, torch.ones(1)) for number in range(len(texts))])

    monkeypatch.setattr(retrieval, "greedy_hits", all_hit)
    grid = KeyGrid(byte_tokenizer(), token_stream(BACKGROUND), [0.5], 4, keys=2, values=2)
    [[cell]] = measured(Recaller(0), grid, [500]).cells
    assert (cell.right, cell.mistakes) == (4, {EARLIER_VALUE: 0, ANOTHER_KEY: 0})


def test_babilong_by_task_and_length() -> None:
    stories = [
        BabiQuestion((f"Mary is {10000 + number}.", "John went home."), "Where is Mary?", str(10000 + number), (0,))
        for number in range(5)
    ]
    long = [BabiQuestion(tuple(["John went home."] * 60 + ["Mary is 12345."]), "Where is Mary?", "12345", (60,))]

    grid = BabilongGrid(byte_tokenizer(), {"qa1": stories, "qa2": long}, BACKGROUND, samples=5, seed=2)
    result = measured(Recaller(900), grid, [300, 1500])
    assert result.rows == ("qa1", "qa2")
    assert result.depths is None
    assert [[cell.samples for cell in row] for row in result.cells] == [[5, 5], [0, 1]]
    assert result.cells[1][0] == RetrievalCell(0, 0, None)
    for row in range(2):
        for place, length in enumerate((300, 1500)):
            distances = []
            for task in grid.tasks(row, length):
                text = bytes((task.prompt - 3).tolist())
                found: Any = re.search(rb"Mary is \d{5}\.", text)
                distances.append(len(text) - found.end())
                assert task.distance == distances[-1]
            cell = result.cells[row][place]
            assert (cell.right, cell.distance) == (sum(d <= 900 for d in distances), max(distances, default=None))
    assert 0 < result.cells[0][1].right < 5
    with pytest.raises(ValueError, match="No question fits into 60 tokens"):
        measured(Recaller(0), grid, [40, 60])
    shot = BabilongGrid(byte_tokenizer(), {"qa1": stories}, BACKGROUND, 2, shots=2, examples={"qa1": stories})
    prompt = bytes((shot.tasks(0, 500)[0].prompt - 3).tolist())
    assert prompt.count(b"Question: Where is Mary?") == 3
    with pytest.raises(ValueError, match="shots is 6, but must be from 0 to the 5 example questions of qa1"):
        BabilongGrid(byte_tokenizer(), {"qa1": stories}, BACKGROUND, 2, shots=6, examples={"qa1": stories})


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, cache = PasskeyGrid(byte_tokenizer(), [0.2, 0.9], 2), ResultCache(tmp_path)
    whole = Recaller(300)
    expected = measured(whole, grid, [400, 600, 800])
    put = ResultCache.put

    def stopping(self: ResultCache, key: Any, value: Any) -> None:
        put(self, key, value)
        if len(list(tmp_path.glob("*.json"))) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResultCache, "put", stopping)
    with pytest.raises(KeyboardInterrupt):
        measured(Recaller(300), grid, [400, 600, 800], cache=cache)
    monkeypatch.setattr(ResultCache, "put", put)
    rest = Recaller(300)
    result = measured(rest, grid, [400, 600, 800], cache=cache)
    assert 0 < rest.read < whole.read
    assert replace(result, wall_seconds=0) == replace(expected, wall_seconds=0)
    again, others = Recaller(300), Recaller(200)
    measured(again, grid, [400, 600], cache=cache)
    assert again.read == 0
    measured(others, grid, [400, 600], cache=cache)  # another config
    assert others.read > 0
    with torch.no_grad():
        again.scale.add_(1)  # other weights
    measured(again, PasskeyGrid(byte_tokenizer(), [0.2, 0.9], 2, seed=1), [400], cache=cache)
    assert again.read > 0


def test_prompts_of_many_tokens_are_read_in_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "TOKENS_AT_ONCE", 2000)
    grid = PasskeyGrid(byte_tokenizer(), [0, 1], 2)
    result = measured(Recaller(100), grid, [500, 700, 900])
    assert [[cell.right for cell in row] for row in result.cells] == [[0] * 3, [2] * 3]


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    grid, model = PasskeyGrid(byte_tokenizer(), [0.5], 1), Recaller(0)
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, got 95"):
        EvaluationSettings(confidence=95)
    with pytest.raises(ValueError, match="length is 200, but a passkey prompt without filler has 2"):
        measured(model, grid, [900, 200])
    assert model.read == 0  # before any reading
    broken = Recaller(0)
    torch.nn.init.constant_(broken.scale, float("nan"))
    with pytest.raises(ValueError, match="predictions for passkey, depth 50 %, 500 tokens are NaN or infinite"):
        measured(broken, grid, [500])
    model.config.vocab_size = 100
    with pytest.raises(ValueError, match="Token ids must be from 0 to 99"):
        measured(model, grid, [500])


def result_of(cells: Sequence[Sequence[tuple[int, int, int | None]]]) -> RetrievalResult:
    return replace(
        RESULT,
        rows=tuple(map(str, range(len(cells)))),
        depths=None,
        lengths=(10, 20, 40),
        cells=tuple(tuple(RetrievalCell(*cell) for cell in row) for row in cells),
    )


def test_recall_length() -> None:
    cells = [[(10, 10, 8), (9, 10, 18), (4, 10, 38)], [(10, 10, 2), (10, 10, 3), (10, 10, 4)]]
    result = result_of(cells)
    assert [share.accuracy for share in result.by_length] == [1, 0.95, 0.7]
    assert (result.recall_length(), result.recall_length(0.96), result.recall_length(0.5)) == (20, 10, 40)
    assert result_of([[(0, 1, 1)] * 3]).recall_length() is None
    assert result_of([[(0, 1, 1), (1, 1, 1), (1, 1, 1)]]).recall_length() is None  # right again, but too late
    assert result_of([[(0, 0, None), (1, 1, 1), (0, 1, 1)]]).recall_length() == 20


@pytest.mark.parametrize(("right", "samples"), [(0, 1), (1, 1), (0, 10), (7, 10), (50, 256), (256, 256)])
def test_intervals_are_those_of_wilson(right: int, samples: int) -> None:
    z, share = NormalDist().inv_cdf(0.95), right / samples
    low, high = Share(right, samples).interval(0.9)
    for bound in (low, high):  # where the score test turns: the roots of (share - p)^2 = z^2 p (1 - p) / n
        assert (share - bound) ** 2 == pytest.approx(z**2 * bound * (1 - bound) / samples, abs=1e-9)
    assert 0 <= low < high <= 1


def test_files_keep_results(tmp_path: Path) -> None:
    result = result_of([[(1, 2, 5), (0, 2, 9), (0, 0, None)]])
    comparison = RetrievalComparison((result, replace(result, model="other", weights="x")))
    write_result(tmp_path / "r.json", comparison)
    assert read_result(tmp_path / "r.json", RetrievalComparison) == comparison
    with pytest.raises(ValueError, match=r"and the same data\."):
        RetrievalComparison((result, replace(result, model="o", data=DataRecord(DataSource("text"), "1", "token"))))
    old = (tmp_path / "r.json").read_text().replace('"schema_version": 4', '"schema_version": 3')
    (tmp_path / "old.json").write_text(re.sub(r',\s*"mistakes": \{\}', "", old))
    assert read_result(tmp_path / "old.json", RetrievalComparison) == comparison
    assert result.mistakes_by_length == {}
