"""Shared prefixes with models that keep keys and values: each branch is what its text alone is."""

from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.evaluation import shared_prefixes
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.shared_prefixes import prefix_tree, read_tree, rows_with_room, tokens_to_read
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model


def made(name: str) -> Any:
    return reader_of(stateful(tiny_model(name)))


SHARED = [7, 8, 9, 4, 2] * 14
TEXTS = [
    [*SHARED, 1],
    [*SHARED, 1, 2, 3],
    [*SHARED, 1, 2, 3, *SHARED, 5, 6],
    [*SHARED, 1, 2, 3, *SHARED],
    [3, 4],
    [5] * 70,
    *(
        [*SHARED, *[question] * length, *choice]
        for question, length in ((11, 40), (12, 33))
        for choice in ([3, 9], [4])
    ),
]
STARTS = [70, 1, 120, 64, 1, 69, 71, 100, 71, 103]


@pytest.mark.thinned(11)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_branches_are_what_their_texts_are(name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = made(name)
    assert reader.branches
    tree = prefix_tree(TEXTS)
    scored = {
        index: branch.scores(STARTS[index])
        for index, branch in read_tree(reader, tree, batch_size=batch_size, scored_from=STARTS)
    }
    kept = {index: branch.carry for index, branch in read_tree(reader, tree, batch_size=batch_size, chunk_length=11)}
    assert scored.keys() == kept.keys() == set(range(len(TEXTS)))
    assert tokens_to_read(tree, states=False) < sum(map(len, TEXTS)) * 0.6
    after = torch.tensor([[13, 2]])
    for index, (text, start) in enumerate(zip(TEXTS, STARTS, strict=True)):
        with torch.no_grad():
            logits, _ = reader.read(torch.cat([torch.tensor([text]), after], dim=1))
            continued, _ = reader.read(after, kept[index])  # changes the keys of this branch only
        places = torch.arange(start, len(text))
        expected = logits[0].log_softmax(-1)[places - 1, torch.tensor(text)[places]]
        assert scored[index][0] == pytest.approx(expected.numpy(), abs=2e-4)
        torch.testing.assert_close(continued, logits[:, -2:], atol=2e-4, rtol=1e-4)


def test_long_keys_leave_room_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = made("bamba")
    monkeypatch.setattr(shared_prefixes, "STATES_PER_FORWARD", reader.elements_per_token * 200)
    assert [rows_with_room(reader, 5, tokens) for tokens in (10, 40, 70, 1000)] == [5, 5, 2, 1]
    rows, read = [], reader.read

    def counted(ids: Any, *arguments: Any) -> Any:
        rows.append(len(ids))
        return read(ids, *arguments)

    monkeypatch.setattr(reader, "read", counted)
    texts = [[token] * 70 for token in range(5)]
    assert len(list(read_tree(reader, prefix_tree(texts), batch_size=5))) == 5
    assert rows == [1, 2, 2]


def test_keys_of_a_parent_are_given_up_before_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = made("bamba")
    # room for one row; a group of leaves is smaller than a batch, and would wait for more
    monkeypatch.setattr(shared_prefixes, "STATES_PER_FORWARD", reader.elements_per_token * 90)
    read, order = reader.read, []

    def noted(ids: Any, cache: Any = None, *arguments: Any) -> Any:
        order.append(0 if cache is None else cache[1].get_seq_length())
        return read(ids, cache, *arguments)

    monkeypatch.setattr(reader, "read", noted)
    texts = [[*[question] * (80 + question), *choice] for question in (1, 2) for choice in ([5, 6, 7], [8, 9])]
    for _ in read_tree(reader, prefix_tree(texts), batch_size=3, scored_from=[81] * 4):
        pass
    assert order == [0, 81, 81, 0, 82, 82]


def test_a_stock_hybrid_does_not_branch() -> None:
    with pytest.raises(ValueError, match="its cache changes as it reads"):
        reader_of(tiny_model("falcon_h1")).join_rows([])
