"""Texts as a tree of prefixes, and reading it."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Mamba2ForCausalLM

from hf_recurrent_lengthgen import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.harness.shared_prefixes import Branch, Node, prefix_tree, read_tree, walk

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)
SCORED_TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=12), min_size=1, max_size=10)


def texts_of(node: Node, before: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    assert node.start == len(before)
    here = (*before, *node.tokens)
    found = dict.fromkeys(node.ends, here)
    for child in node.children:
        assert child.tokens
        found |= texts_of(child, here)
    return found


@given(TEXTS, st.sampled_from([1, 3, 10**9]))
def test_the_tree_holds_every_text_once(texts: list[list[int]], worth: int) -> None:
    assert texts_of(prefix_tree(texts, worth)) == dict(enumerate(map(tuple, texts)))


@given(TEXTS)
def test_a_tree_that_splits_wherever_it_saves_has_each_prefix_once(texts: list[list[int]]) -> None:
    prefixes = {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}
    assert sum(len(node.tokens) for node in walk(prefix_tree(texts, worth=1))) == len(prefixes)


def test_a_prefix_is_read_apart_only_if_that_saves_enough() -> None:
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3]]  # read apart, [1, 2, 3] saves two times three tokens
    assert sum(len(node.tokens) for node in walk(prefix_tree(texts, worth=6))) == 5
    assert sum(len(node.tokens) for node in walk(prefix_tree(texts, worth=7))) == 11


@pytest.fixture(scope="module")
def reader(stock: Mamba2ForCausalLM) -> Reader:
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(**stock.config.to_dict()))
    model.load_state_dict(stock.state_dict())
    return reader_of(model.double().eval())


SHARED = [7, 8, 9] * 20
CASES = [
    [*SHARED, 1],
    [*SHARED, 1, 2, 3],
    [*SHARED, 1, 2, 3, *SHARED, 4],
    [*SHARED, 1, 2, 3, *SHARED, 5, 6],
    [*SHARED, 1, 2, 3, *SHARED],
    [3, 4],
    [3, 4],
    [5] * 70,
    SHARED,
    *([*SHARED, *[question] * 40, choice, 9, 8] for question in (11, 12) for choice in (3, 4, 5)),
]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("chunk_length", [None, 1, 7])
def test_scores_are_those_of_each_text_alone(reader: Reader, batch_size: int, chunk_length: int | None) -> None:
    starts = [60, 1, 64, 120, 64, 1, 1, 69, 30, *[100] * 6]
    read: list[int] = []
    tree = prefix_tree(CASES)
    branches = read_tree(
        reader, tree, batch_size=batch_size, chunk_length=chunk_length, scored_from=starts, progress=read.append
    )
    found = {index: branch.score(starts[index]) for index, branch in branches}
    assert found.keys() == set(range(len(CASES)))
    for index, (text, start) in enumerate(zip(CASES, starts, strict=True)):
        with torch.no_grad():
            logits = reader.model(input_ids=torch.tensor([text])).logits[0].double()
        expected = sum(logits[place - 1].log_softmax(-1)[text[place]].item() for place in range(start, len(text)))
        greedy = all(int(logits[place - 1].argmax()) == text[place] for place in range(start, len(text)))
        assert found[index] == (pytest.approx(expected, abs=1e-9), greedy)
    # the last token of a text is not read, but where others continue it
    assert sum(read) == 60 + 0 + 2 + 63 + 0 + 1 + 1 + 69 + 2 * (40 + 3 * 2)
    assert sum(read) < sum(map(len, CASES)) / 2


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("chunk_length", [None, 7])
def test_states_are_those_after_each_text_alone(reader: Reader, batch_size: int, chunk_length: int | None) -> None:
    branches = read_tree(reader, prefix_tree(CASES), batch_size=batch_size, chunk_length=chunk_length)
    found = {index: reader.state(branch.carry) for index, branch in branches}
    assert found.keys() == set(range(len(CASES)))
    for index, text in enumerate(CASES):
        with torch.no_grad():
            expected = reader.model(input_ids=torch.tensor([text])).final_state
        for layer, expected_layer in zip(found[index], expected, strict=True):
            for part, expected_part in zip(layer, expected_layer, strict=True):
                torch.testing.assert_close(part, expected_part, rtol=1e-9, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=12), min_size=1, max_size=10),
    worth=st.integers(1, 9),
)
def test_any_texts_are_scored_right(reader: Reader, texts: list[list[int]], worth: int) -> None:
    starts = [1 + index % (len(text) - 1) for index, text in enumerate(texts)]
    branches = read_tree(reader, prefix_tree(texts, worth), batch_size=3, chunk_length=5, scored_from=starts)
    for index, branch in branches:
        text, start = texts[index], starts[index]
        with torch.no_grad():
            logits = reader.model(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)
        expected = sum(float(logits[place - 1, text[place]]) for place in range(start, len(text)))
        assert branch.score(start)[0] == pytest.approx(expected, abs=1e-9)


def test_states_are_kept_for_one_way_down_the_tree_only(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[*SHARED, question, *range(20, 60), choice] for question in range(20) for choice in (1, 2, 3, 4)]
    alive: weakref.WeakSet[Branch] = weakref.WeakSet()
    begin, held = Branch.__post_init__, []

    def noted(branch: Branch) -> None:
        begin(branch)
        alive.add(branch)

    def count(tokens: int) -> None:
        held.append(sum(branch.carry is not None for branch in alive))

    monkeypatch.setattr(Branch, "__post_init__", noted)
    for _ in read_tree(reader, prefix_tree(texts), batch_size=2, scored_from=[100] * 80, progress=count):
        pass
    assert len(held) == 1 + 10 + 40
    assert max(held) <= 1 + 2 + 2  # the header, two questions, and two that are about to be given up
