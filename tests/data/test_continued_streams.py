"""Streams whose rows continue: by hand, token by token, on several processes, and what is refused."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_recurrent_lengthgen.data import (
    ContinuedStream,
    keep_long_documents,
)
from tests.data.test_continued import BATCH, EOS, MICRO_BATCHES, Item, lists


def documents(sizes: list[int]) -> list[list[int]]:
    """Documents of ids that occur once, from 10 on."""
    ids = itertools.count(10)
    return [[next(ids) for _ in range(size)] for size in sizes]


def stream_of(source: Any, **changes: Any) -> ContinuedStream:
    arguments: dict[str, Any] = {"length": 3, "rows": 2, "separator_id": EOS, "chunks_before_reset": 2}
    return ContinuedStream(source, **(arguments | changes))


def take(stream: ContinuedStream, number: int) -> list[Item]:
    return list(itertools.islice(stream, number))


def test_stream_by_hand() -> None:
    # stream row 0 takes 10 11, 12 and then 17; stream row 1 takes 13 14 15 16 and then 10 11 again
    stream = stream_of([[10, 11], [12], [13, 14, 15, 16], [17]], reset_at_document=True)
    assert [lists(item) for item in take(stream, 4)] == [
        {"input_ids": [10, 11, 1], "labels": [10, 11, 1], "shift_labels": [11, 1, -100], "state_resets": [1, 0, 0]},
        {"input_ids": [13, 14, 15], "labels": [13, 14, 15], "shift_labels": [14, 15, 16], "state_resets": [1, 0, 0]},
        {"input_ids": [12, 1, 17], "labels": [12, 1, 17], "shift_labels": [1, -100, 1], "state_resets": [1, 0, 1]},
        {"input_ids": [16, 1, 10], "labels": [16, 1, 10], "shift_labels": [1, -100, 11], "state_resets": [0, 0, 1]},
    ]
    assert [lists(item)["state_resets"] for item in take(stream_of([[10] * 50]), 8)] == [
        [begins, False, False] for begins in (True, True, False, False) * 2
    ]
    endless = take(stream_of([[10] * 50], chunks_before_reset=None), 40)
    assert [bool(item["state_resets"].any()) for item in endless] == [True] * 2 + [False] * 38


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    length=st.integers(1, 7),
    rows=st.integers(1, 3),
    reset=st.booleans(),
    lookahead=st.integers(0, 4),
)
@settings(max_examples=150)
def test_each_lane_of_a_stream_is_whole_documents_read_token_by_token(
    sizes: list[int], length: int, rows: int, reset: bool, lookahead: int
) -> None:
    source = documents(sizes)
    stream = stream_of(source, length=length, rows=rows, reset_at_document=reset, lookahead=lookahead)
    if not any(source):
        with pytest.raises(ValueError, match="the documents hold no token"):
            take(stream, 1000)
        return
    steps = 12
    items = take(stream, steps * rows)
    assert {tensor.shape for item in items for tensor in item.values()} == {(length + lookahead,)}
    for stream_row in range(rows):
        chunks = items[stream_row::rows]
        ids = [token for item in chunks for token in item["input_ids"][:length].tolist()]
        # every document begins at its first token and is read to its separator
        for before, token in itertools.pairwise([EOS, *ids]):
            following = {document[0] if document else EOS for document in source}
            if before != EOS:
                document = next(document for document in source if before in document)
                following = {[*document, EOS][document.index(before) + 1]}
            assert token in following
        for step, (item, after) in enumerate(itertools.pairwise(chunks)):
            text = torch.cat([item["input_ids"], item["shift_labels"][-1:]])
            known = item["shift_labels"] != -100
            assert torch.equal(item["shift_labels"][known], text[1:][known])
            assert torch.equal(~known, (item["input_ids"] == EOS) & reset)
            overlap = min(lookahead, length)
            assert torch.equal(item["input_ids"][length : length + overlap], after["input_ids"][:overlap])
            if not lookahead and known[-1]:
                assert item["shift_labels"][-1] == after["input_ids"][0]
            before = ids[step * length - 1] if step else EOS
            follows_separator = [token == EOS for token in [before, *item["input_ids"].tolist()[:-1]]]
            assert item["state_resets"].tolist() == [
                (reset and follows) or (t == 0 and step % 2 == 0) for t, follows in enumerate(follows_separator)
            ]


def test_all_documents_are_read_in_order_and_again_without_end() -> None:
    source = documents([4, 7, 0, 5, 6, 1])
    items = take(stream_of(source, length=2, rows=1), 60)
    once = [token for document in source for token in [*document, EOS]]
    assert [token for item in items for token in item["input_ids"].tolist()] == (5 * once)[:120]


SOURCES = {
    "lists": lambda rows: rows,
    "tensors": lambda rows: [torch.tensor(row) for row in rows],
    "map-style": lambda rows: datasets.Dataset.from_dict({"input_ids": rows, "text": ["x"] * len(rows)}),
    "map-style in torch format": lambda rows: datasets.Dataset.from_dict({"input_ids": rows}).with_format("torch"),
    "streaming": lambda rows: datasets.Dataset.from_dict({"input_ids": rows}).to_iterable_dataset(),
    "streaming in 2 shards": lambda rows: datasets.Dataset.from_dict({"input_ids": rows}).to_iterable_dataset(2),
    "from a generator": lambda rows: datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"rows": rows}),
}


def rows_of(rows: list[list[int]]) -> Iterator[dict[str, list[int]]]:
    for row in rows:
        yield {"input_ids": row, "length": [len(row)]}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_is_read_in_its_order(kind: str) -> None:
    rows = documents([5] * 8)
    items = take(stream_of(SOURCES[kind](rows), rows=1), 16)
    read = [token for item in items for token in item["input_ids"].tolist()]
    assert read == [token for row in rows for token in [*row, EOS]]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_see_the_rows_of_one(kind: str, micro_batches: int, processes: int) -> None:
    source, batch, steps = SOURCES[kind](documents([5, 14, 3, 8, 0, 21, 4])), 6 // processes, 9
    one = take(stream_of(source, rows=6 * micro_batches, reset_at_document=True), 6 * micro_batches * steps)
    several = [
        take(
            stream_of(
                source,
                rows=batch * micro_batches,
                reset_at_document=True,
                process=(process, processes),
            ).in_micro_batches(micro_batches),
            batch * micro_batches * steps,
        )
        for process in range(processes)
    ]
    joined = [
        lists(item)
        for start in range(0, batch * micro_batches * steps, batch)
        for items in several
        for item in items[start : start + batch]
    ]
    assert joined == [lists(item) for item in one]


def test_epochs_of_a_shuffled_stream_differ_and_every_iteration_is_the_same() -> None:
    source = datasets.Dataset.from_dict({"input_ids": documents([3] * 16)}).to_iterable_dataset()
    stream = stream_of(source.shuffle(seed=0, buffer_size=16), length=4, rows=1)
    tokens = torch.stack([item["input_ids"] for item in take(stream, 3 * 16)])[:, 0].view(3, 16)
    assert (tokens.sort().values == tokens[0].sort().values).all()
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[1], tokens[2])
    again = torch.stack([item["input_ids"] for item in take(stream, 3 * 16)])[:, 0].view(3, 16)
    assert torch.equal(again, tokens)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_of_a_stream_gives_slots_and_continues_after_skipping(workers: int) -> None:
    stream = stream_of(documents([5, 14, 3, 8]), rows=BATCH * MICRO_BATCHES, process=(1, 2))
    loader = DataLoader(stream, batch_size=BATCH, num_workers=workers, collate_fn=default_data_collator)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
    batches = list(itertools.islice(prepared, 20))
    items = take(stream, 20 * BATCH)
    for number, batch in enumerate(batches):
        rows = items[number * BATCH : (number + 1) * BATCH]
        for name, tensor in batch.items():
            assert torch.equal(tensor, torch.stack([row[name] for row in rows]))
    for micro_batch, row in itertools.product(range(MICRO_BATCHES), range(BATCH)):
        for before, after in itertools.pairwise(batches[micro_batch::MICRO_BATCHES]):
            assert before["shift_labels"][row, -1] == after["input_ids"][row, 0]
    rest = itertools.islice(skip_first_batches(prepared, 7), 13)
    assert [batch["input_ids"].tolist() for batch in rest] == [batch["input_ids"].tolist() for batch in batches[7:]]


def test_more_than_one_data_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # in a real worker torch takes 5 seconds to end each worker after its error
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", SimpleNamespace(id=0, num_workers=2))
    with pytest.raises(ValueError, match=r"2 data workers would each read all documents; use .* 0 or 1"):
        next(iter(stream_of(documents([9]))))


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (iter([[1]]), {}, "list_iterator, which can be read only once"),
        ([[1]], {"length": 0}, "length is 0"),
        ([[1]], {"chunks_before_reset": 0}, "chunks_before_reset is 0"),
    ],
)
def test_unusable_stream_is_refused(source: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_of(source, **changes)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([[5, 6], torch.zeros(3)], r"document 1 is \(3,\) torch.float32, but must be one row of int64"),
        ([[5, 6], torch.zeros(3, dtype=torch.int32)], r"document 1 is \(3,\) torch.int32"),
        ([[5, 6], [[7]]], r"document 1 is \(1, 1\)"),
        ([[5, 6], [True]], "torch.bool"),
        ([[5, 6], "text"], "document 1 is a str, but must be one row of ids"),
        ([[5, 6], None], "document 1 is a NoneType, but must be one row of ids .* the column 'input_ids'"),
        (datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset().map(lambda row: row), "'input_ids'"),
        (datasets.Dataset.from_dict({"text": ["a"]}), "'input_ids'"),
        ([], "the documents hold no token"),
        ([[], []], "the documents hold no token"),
        (torch.zeros(0, 3, dtype=torch.int64), "the documents hold no token"),
    ],
)
def test_documents_that_are_no_ids_are_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(stream_of(source, rows=1), 3)


def test_long_documents_are_kept() -> None:
    short, empty, longer, last = [3, 4], [], [5, 6, 7, 8], [9, 3, 4]

    def stream(*documents: list[int]) -> Tensor:
        return torch.tensor([token for document in documents for token in [*document, EOS]])

    whole = stream(short, empty, longer, last)
    assert keep_long_documents(whole, EOS, 3).tolist() == stream(longer, last).tolist()
    assert keep_long_documents(whole, EOS, 1).tolist() == stream(short, longer, last).tolist()
    assert keep_long_documents(whole, EOS, 0).tolist() == whole.tolist()
    # the last document may have no separator
    assert keep_long_documents(torch.tensor([5, EOS, 6, 7]), EOS, 2).tolist() == [6, 7]
    assert keep_long_documents(torch.tensor([5, 8, EOS, 6]), EOS, 2).tolist() == [5, 8, EOS]
    with pytest.raises(ValueError, match="has 5 tokens, the longest has 4"):
        keep_long_documents(whole, EOS, 5)
    with pytest.raises(ValueError, match="one row of int64"):
        keep_long_documents(whole.float(), EOS, 1)
