"""Texts as a tree of prefixes, and reading it: what is shared is read once, and nothing else changes."""

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_recurrent_lengthgen.evaluation import shared_prefixes
from hf_recurrent_lengthgen.evaluation.readers import Reader, reader_of
from hf_recurrent_lengthgen.evaluation.shared_prefixes import (
    Branch,
    Node,
    greedy_hits,
    prefix_tree,
    read_tree,
    tokens_to_read,
    walk,
)
from tests.llamas import tiny_llama
from tests.models.families import MAMBA2, build

VOCABULARY = 40
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8)


def texts_of(node: Node, before: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    assert node.start == len(before)
    here = (*before, *node.tokens)
    found = dict.fromkeys(node.ends, here)
    for child in node.children:
        assert len(child.tokens)
        found |= texts_of(child, here)
    return found


@given(TEXTS, st.sampled_from([1, 3, 10**9]))
def test_the_tree_holds_every_text_once(texts: list[list[int]], worth: int) -> None:
    assert texts_of(prefix_tree(texts, worth)) == dict(enumerate(map(tuple, texts)))


@given(TEXTS)
def test_a_tree_that_splits_wherever_it_saves_has_each_prefix_once(texts: list[list[int]]) -> None:
    prefixes = {tuple(text[:length]) for text in texts for length in range(1, len(text) + 1)}
    assert sum(len(node.tokens) for node in walk(prefix_tree(texts, worth=1))) == len(prefixes)


def stateful_model() -> Any:
    return build(MAMBA2, torch.float64, vocab_size=VOCABULARY).eval()


def llama() -> nn.Module:
    return tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.5).double().eval()


class Whole(nn.Module):
    """Takes nothing but tokens, and reads them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=torch.manual_seed(0)).double())
        self.config = SimpleNamespace(vocab_size=VOCABULARY)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.weight[input_ids].cumsum(1))


@pytest.fixture(scope="module")
def reader() -> Reader:
    return reader_of(stateful_model())


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


@pytest.mark.thinned(7)
@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("chunk_length", [None, 1, 7])
def test_scores_and_states_are_those_of_each_text_alone(
    reader: Reader, batch_size: int, chunk_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [60, 1, 64, 120, 64, 1, 1, 69, 30, *[100] * 6]
    tree = prefix_tree(CASES)
    read = fed(reader, monkeypatch) if chunk_length == 1 else []
    branches = read_tree(reader, tree, batch_size=batch_size, chunk_length=chunk_length, scored_from=starts)
    found = {index: branch.scores(starts[index]) for index, branch in branches}
    assert found.keys() == set(range(len(CASES)))
    for index, (text, start) in enumerate(zip(CASES, starts, strict=True)):
        with torch.no_grad():
            logits = reader.model(input_ids=torch.tensor([text])).logits[0].double()
        places = range(start, len(text))
        expected = [logits[place - 1].log_softmax(-1)[text[place]].item() for place in places]
        assert found[index][0] == pytest.approx(expected, abs=1e-9)
        assert found[index][1].tolist() == [int(logits[place - 1].argmax()) == text[place] for place in places]
    # the last token of a text is not read, but where others continue it
    total = 60 + 0 + 2 + 63 + 0 + 1 + 1 + 69 + 2 * (40 + 3 * 2)
    assert tokens_to_read(tree, states=False) == total < sum(map(len, CASES)) / 2
    assert sum(read) == (total if chunk_length == 1 else 0)
    kept = dict(read_tree(reader, tree, batch_size=batch_size, chunk_length=chunk_length))
    for index, text in enumerate(CASES):
        with torch.no_grad():
            state = reader.model(input_ids=torch.tensor([text])).final_state
        torch.testing.assert_close(reader.state(kept[index].carry), state, rtol=1e-9, atol=1e-9)


def fed(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call reads from now on; one token at a time, none is padding."""
    counts, read = [], reader.read

    def counting(ids: Tensor, *arguments: Any) -> Any:
        counts.append(ids.numel())
        return read(ids, *arguments)

    monkeypatch.setattr(reader, "read", counting)
    return counts


def test_states_are_kept_for_one_way_down_the_tree_only(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[*SHARED, question, *[30] * 40, choice] for question in range(20) for choice in (1, 2, 3, 4)]
    alive: weakref.WeakSet[Branch] = weakref.WeakSet()
    begin, held, read = Branch.__init__, [], reader.read

    def noted(branch: Branch, *arguments: Any) -> None:
        begin(branch, *arguments)
        alive.add(branch)

    def count(*arguments: Any) -> Any:
        held.append(sum(branch.carry is not None for branch in alive))
        return read(*arguments)

    monkeypatch.setattr(Branch, "__init__", noted)
    monkeypatch.setattr(reader, "read", count)
    for _ in read_tree(reader, prefix_tree(texts), batch_size=2, scored_from=[100] * 80):
        pass
    assert len(held) == 1 + 10  # the last tokens of the texts are not read
    assert max(held) <= 1 + 2 + 2  # the header, two questions, and two that are about to be given up


@pytest.fixture
def family() -> tuple[list[np.ndarray], list[int]]:
    """Texts that part at many places, two of them alike, one a beginning of another, and their tails."""
    draw = np.random.default_rng(3)
    stem = draw.integers(0, VOCABULARY, 90)
    texts = [stem, stem[:50], stem[:50].copy(), draw.integers(0, VOCABULARY, 3)]
    for start, length in ((0, 7), (1, 30), (20, 5), (20, 41), (50, 3), (77, 20), (89, 12)):
        branch = np.concatenate([stem[:start], draw.integers(0, VOCABULARY, length)])
        texts += [branch, np.concatenate([branch, draw.integers(0, VOCABULARY, 9)])]
    return [text.astype(np.int32) for text in texts], [1 + number % 3 for number in range(len(texts))]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("make", "worth", "batch_size", "chunk_length"),
    [
        (stateful_model, 1, None, None),
        (stateful_model, 1, 1, 7),
        (stateful_model, 1, 3, 1),
        (stateful_model, 5, 4, 13),
        (stateful_model, 10**6, 5, 64),
        (llama, 1, 2, 7),
        (llama, 5, None, None),
        (Whole, 1, None, None),
        (Whole, 1, 2, None),
    ],
)
def test_hits_are_those_of_whole_texts(
    family: tuple[list[np.ndarray], list[int]],
    make: Any,
    worth: int,
    batch_size: int | None,
    chunk_length: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, tails = family
    monkeypatch.setattr(shared_prefixes, "WORTH_A_CALL", worth)
    model = make()
    starts = [len(text) - tail for text, tail in zip(texts, tails, strict=True)]
    for text in texts:
        with torch.no_grad():
            best = model(input_ids=torch.tensor(text[None], dtype=torch.int64)).logits[0].argmax(-1)
        if len(text) % 2:  # the continuation is what the model says, in some texts
            text[-1] = best[-2]
    reader = reader_of(model)
    read = fed(reader, monkeypatch)
    options: dict[str, Any] = {"batch_size": batch_size, "chunk_length": chunk_length}
    found = {index: hits.tolist() for index, hits in greedy_hits(reader, texts, starts, **options)}
    for index, (text, start) in enumerate(zip(texts, starts, strict=True)):
        with torch.no_grad():
            best = model(input_ids=torch.tensor(text[None], dtype=torch.int64)).logits[0].argmax(-1)
        assert found[index] == [int(best[place - 1]) == text[place] for place in range(start, len(text))]
    assert {hit for hits in found.values() for hit in hits} == {True, False}
    everything = sum(map(len, texts)) - len(texts)
    assert sum(read) < 0.75 * everything if make is stateful_model and worth < 10**6 else sum(read) > 0.9 * everything


def test_wrong_use_is_refused(family: tuple[list[np.ndarray], list[int]]) -> None:
    texts, tails = family
    model = stateful_model()

    def refused(complaint: str, model: Any = model, texts: Any = texts, **options: Any) -> None:
        starts = [len(text) - tail for text, tail in zip(texts, tails, strict=True)]
        with pytest.raises(ValueError, match=complaint):
            list(greedy_hits(reader_of(model), texts, starts, **options))

    refused("batch_size must be at least 1", batch_size=0)
    refused("chunk_length must be at least 1", chunk_length=0)
    refused("Token ids must be from 0 to 39", texts=[text + 9 for text in texts])
    refused("leave chunk_length out", model=Whole(), chunk_length=8)
    torch.nn.init.constant_(model.backbone.norm_f.weight, float("nan"))  # type: ignore[union-attr, arg-type]
    refused("The predictions for text [0-9]+ are NaN or infinite")


def test_a_prefix_is_read_apart_only_if_that_saves_enough() -> None:
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3]]  # read apart, [1, 2, 3] saves two times three tokens
    assert sum(len(node.tokens) for node in walk(prefix_tree(texts, worth=6))) == 5
    assert sum(len(node.tokens) for node in walk(prefix_tree(texts, worth=7))) == 11
