"""Continued chunks: nothing is lost or read twice between chunks, rows continue, and resets are where they belong."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_recurrent_lengthgen.data import ChunkKey, ContinuedChunks, StreamRowSampler, keep_long_documents
from hf_recurrent_lengthgen.data.packing import sampled_digest

EOS = 1
Item = dict[str, Tensor]


def lists(item: Item) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in item.items()}


@given(
    stream=st.lists(st.integers(1, 4), min_size=2, max_size=60),
    length=st.integers(1, 9),
    chunks_before_reset=st.none() | st.integers(1, 4),
    reset=st.booleans(),
    lookahead=st.integers(0, 5),
)
@settings(max_examples=200)
def test_chunks_are_the_stream_read_token_by_token(
    stream: list[int], length: int, chunks_before_reset: int | None, reset: bool, lookahead: int
) -> None:
    stream[0] = EOS
    arguments: Any = (torch.tensor(stream), length, chunks_before_reset, reset, EOS, lookahead)
    if len(stream) < length + lookahead + 1:
        with pytest.raises(ValueError, match=f"needs {length + lookahead + 1}; give more data"):
            ContinuedChunks(*arguments)
        return
    chunks = ContinuedChunks(*arguments)
    for number in range(len(chunks)):
        item = lists(chunks[number])
        for t in range(length + lookahead):
            place = number * length + t
            assert item["input_ids"][t] == item["labels"][t] == stream[place]
            document_starts = place == 0 or stream[place - 1] == EOS
            begins = t == 0 and (number % chunks_before_reset == 0 if chunks_before_reset else number == 0)
            assert item["state_resets"][t] == (begins or (reset and document_starts))
            target_starts_document = stream[place] == EOS
            assert item["shift_labels"][t] == (-100 if reset and target_starts_document else stream[place + 1])
        assert {len(values) for values in item.values()} == {length + lookahead}
    read = torch.cat([chunks[number]["input_ids"][:length] for number in range(len(chunks))]).tolist()
    assert read == stream[: len(read)]
    assert len(stream) - len(read) <= length + lookahead


def test_the_key_says_whether_a_chunk_begins_a_sequence() -> None:
    chunks = ContinuedChunks(torch.arange(9), 2, 2)
    for chunk, begins in itertools.product(range(4), (True, False)):
        item = chunks[ChunkKey(chunk, begins)]
        assert item["state_resets"].tolist() == [begins, False]
        assert item["input_ids"].tolist() == [2 * chunk, 2 * chunk + 1]
    assert lists(chunks[-1]) == lists(chunks[3])
    # a document starts at the stream's first token, whatever the key says
    at_documents = ContinuedChunks(torch.tensor([5, EOS, 6]), 2, reset_at_document=True, separator_id=EOS)
    assert at_documents[ChunkKey(0, False)]["state_resets"].tolist() == [True, False]
    for key in (4, -5, ChunkKey(4, True)):
        with pytest.raises(IndexError):
            chunks[key]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream": torch.zeros(9)}, "float32, but must be one-dimensional and of integers"),
        ({"stream": torch.zeros(3, 3, dtype=torch.int64)}, r"\(3, 3\)"),
        ({"length": 9}, "has 9 tokens, but one chunk of length 9 with lookahead 0 .* needs 10"),
        ({"lookahead": 7}, "needs 10"),
        ({"reset_at_document": True}, "separator_id is None, which does not occur in the stream"),
        ({"reset_at_document": True, "separator_id": 77}, "separator_id is 77, which does not occur in the stream"),
    ],
)
def test_unusable_chunks_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContinuedChunks(**({"stream": torch.arange(9), "length": 2} | arguments))


@given(
    chunks=st.integers(1, 60),
    stream_rows=st.integers(1, 7),
    chunks_before_reset=st.none() | st.integers(1, 5),
    epoch=st.integers(0, 3),
)
@settings(max_examples=200)
def test_lanes_continue_until_a_sequence_ends(
    chunks: int, stream_rows: int, chunks_before_reset: int | None, epoch: int
) -> None:
    dataset = ContinuedChunks(torch.arange(chunks + 1), 1, chunks_before_reset)
    if chunks < stream_rows:
        with pytest.raises(
            ValueError,
            match=f"has {chunks} chunks .* but {stream_rows} stream rows .* {chunks} stream rows, a smaller",
        ):
            StreamRowSampler(dataset, stream_rows, seed=3)
        return
    sampler = StreamRowSampler(dataset, stream_rows, seed=3)
    sampler.set_epoch(epoch)
    keys = list(sampler)
    assert len(keys) == len(sampler) == sampler.steps * stream_rows == chunks - chunks % stream_rows
    assert len({key.chunk for key in keys}) == len(keys)
    for stream_row in range(stream_rows):
        carried = 0
        for before, key in itertools.pairwise([None, *keys[stream_row::stream_rows]]):
            if key.begins:
                carried = 0
            else:
                assert before is not None
                assert key.chunk == before.chunk + 1
            carried += 1
            assert carried <= (chunks_before_reset or chunks)
            is_first = chunks_before_reset is not None and key.chunk % chunks_before_reset == 0
            assert key.begins == (before is None or is_first)


def test_order_is_that_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[ChunkKey]:
        sampler = StreamRowSampler(ContinuedChunks(torch.arange(101), 2, 4), stream_rows=3, seed=seed)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(sampler)
        return list(sampler)

    assert order(0, 1) == order(0, 1)
    orders = [order(seed, epoch) for seed, epoch in itertools.product(range(3), range(3))]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    dropped = [{*range(50)} - {key.chunk for key in keys} for keys in orders]
    assert len(set(map(frozenset, dropped))) > 1
    stretches = [
        [key.chunk for key in StreamRowSampler(ContinuedChunks(torch.arange(101), 2, None), 3, s)] for s in (0, 5)
    ]
    assert stretches[0] != stretches[1]


PROCESSES, BATCH, MICRO_BATCHES = 2, 3, 2
STREAM_ROWS = PROCESSES * BATCH * MICRO_BATCHES


def process_loader(
    process: int, workers: int = 0, chunks_before_reset: int | None = 3
) -> tuple[Any, StreamRowSampler]:
    """What accelerate gives to one process, and the sampler in it."""
    dataset = ContinuedChunks(torch.arange(4 * 10 * STREAM_ROWS + 17), 4, chunks_before_reset, lookahead=1)
    sampler = StreamRowSampler(dataset, STREAM_ROWS, seed=1)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=sampler,
        drop_last=True,
        num_workers=workers,
        collate_fn=default_data_collator,
    )
    return prepare_data_loader(loader, num_processes=PROCESSES, process_index=process, put_on_device=False), sampler


@pytest.mark.parametrize("chunks_before_reset", [3, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_process_continue_in_every_epoch(workers: int, chunks_before_reset: int | None) -> None:
    for process in range(PROCESSES if workers == 0 else 1):
        loader, _ = process_loader(process, workers, chunks_before_reset)
        for _epoch in range(2):
            last: list[Any] = [None] * MICRO_BATCHES
            for number, batch in enumerate(loader):
                begins = batch["state_resets"][:, 0]
                assert not batch["state_resets"][:, 1:].any()
                previous, last[number % MICRO_BATCHES] = last[number % MICRO_BATCHES], batch
                if previous is None:
                    assert begins.all()
                    continue
                goes_on = batch["input_ids"][:, 0] == previous["input_ids"][:, 3] + 1
                assert goes_on[~begins].all()
                # targets and lookahead come from the same text, whether the state is carried or not
                assert torch.equal(previous["shift_labels"][:, 3], previous["input_ids"][:, 4])


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
    with pytest.raises(ValueError, match="one-dimensional and of integers"):
        keep_long_documents(whole.float(), EOS, 1)


def test_a_stream_may_lie_in_a_file(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(file := tmp_path / "tokens.bin")
    how: dict[str, Any] = {"length": 2, "chunks_before_reset": 2, "reset_at_document": True, "separator_id": 4}
    expected = ContinuedChunks(torch.arange(9), **how)
    for stream in (np.memmap(file, np.uint16, "r"), torch.from_file(str(file), size=9, dtype=torch.uint16)):
        chunks = ContinuedChunks(stream, **how)
        assert [lists(chunks[i]) for i in range(4)] == [lists(expected[i]) for i in range(4)]
        assert {chunks[1][name].dtype for name in ("input_ids", "labels", "shift_labels")} == {torch.int64}
        assert keep_long_documents(stream, 4, 4).tolist() == [*range(9)]
        assert sampled_digest(chunks.stream) == sampled_digest(expected.stream)
