"""TBTT: rows traced with a model that sums, and weights of one long forward pass with stopped gradients."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F

from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import clone_state, detach_state
from hf_recurrent_lengthgen.trainers import InitialStateConfig, TbttConfig, TbttTrainer, ZeroStateTrainer
from hf_recurrent_lengthgen.trainers.run.dataloaders import train_sampler
from tests.hybrids.tiny_models import tiny_model
from tests.trainers import toys

SEPARATOR = 2


@pytest.fixture
def tbtt(tmp_path: Path) -> Callable[..., TbttTrainer]:
    """A trainer with plain SGD and batches of two rows."""

    def make(model: Any, data: Any, **fields: Any) -> TbttTrainer:
        settings = {
            "save_strategy": "no",
            "per_device_train_batch_size": 2,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
        }
        evaluation = fields.pop("eval_dataset", None)
        config = TbttConfig(str(tmp_path), **toys.QUIET | settings | fields)
        return TbttTrainer(model, config, train_dataset=data, eval_dataset=evaluation)

    return make


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_token_of_a_lane_is_read_once_and_added_to_its_state(
    tbtt: Callable[..., TbttTrainer], accumulation: int
) -> None:
    length, size, chunks = 5, 3, 24
    ids = torch.arange(1, chunks * length + 2)  # every token is unique
    trainer = tbtt(
        toys.SumModel(),
        ContinuedChunks(ids, length, chunks_before_reset=size),
        num_train_epochs=2,
        learning_rate=0.0,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    stream_rows = 2 * accumulation
    steps = chunks // stream_rows
    seen = trainer.model.seen
    assert len(seen) == 2 * steps * accumulation
    orders = []
    for epoch in range(2):
        read: list[int] = []
        for micro_batch in range(accumulation):
            for row in range(2):
                total = tokens = 0
                before: list[int] = []
                for step in range(steps):
                    _, rows, recurrent, conv = seen[(epoch * steps + step) * accumulation + micro_batch]
                    start = rows[row][0]
                    if (start - 1) % (size * length) == 0 or step == 0:
                        total = tokens = 0
                    else:
                        assert start == before[-1] + 1
                    assert (recurrent[row], conv[row]) == (total, tokens)
                    before = rows[row]
                    total, tokens = total + sum(before), tokens + length
                    read += before
        assert sorted(read) == list(range(1, chunks * length + 1))
        orders.append(read)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
def test_rows_that_continue_start_from_zero_with_the_probability(
    tbtt: Callable[..., TbttTrainer], probability: float
) -> None:
    data = ContinuedChunks(torch.arange(1, 24 * 5 + 2), 5, chunks_before_reset=3)
    trainer = tbtt(
        toys.SumModel(), data, num_train_epochs=1, learning_rate=0.0, state_drop_probability=probability, seed=3
    )
    trainer.train()
    ends, dropped = [0, 0], 0
    for step, (_, rows, starts, _) in enumerate(trainer.model.seen):
        for row, ids in enumerate(rows):
            continues = step > 0 and (ids[0] - 1) % 15 != 0
            keeps = continues and not toys.is_dropped(3, step, 0, row, probability)
            dropped += continues and not keeps
            assert starts[row] == (ends[row] if keeps else 0)
            ends[row] = starts[row] + sum(ids)
    assert (dropped > 0, dropped < 16) == (probability > 0, probability < 1)


def tokens_of(count: int, documents: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 17, (count,), generator=generator)
    return ids.masked_fill(torch.rand(count, generator=generator) < 0.2, SEPARATOR) if documents else ids


@pytest.mark.thinned(2)
@pytest.mark.parametrize("size", [None, 3, 1])
def test_chunks_train_as_one_long_pass_with_the_gradient_stopped_at_the_borders(
    tbtt: Callable[..., TbttTrainer], size: int | None
) -> None:
    length, steps = 7, 6
    ids = tokens_of(2 * steps * length + 1)
    model = toys.tiny_model().double()
    expected = copy.deepcopy(model).train()
    trainer = tbtt(model, ContinuedChunks(ids, length, chunks_before_reset=size), num_train_epochs=1)
    trainer.train()

    # The stream rows, from the order of the sampler; their targets are the next tokens, over the borders of chunks,
    # too.
    keys = list(train_sampler(trainer))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    state, losses = None, []
    for step in range(steps):
        pair = [key.chunk for key in keys[2 * step : 2 * step + 2]]
        rows = torch.stack([ids[chunk * length : (chunk + 1) * length + 1] for chunk in pair])
        if size is not None and state is not None:
            for row, chunk in enumerate(pair):
                for part in (part for layer in state for part in layer):
                    part[row] *= chunk % size != 0
        output = expected(rows[:, :-1], initial_state=state)
        loss = F.cross_entropy(output.logits.float().transpose(1, 2), rows[:, 1:])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        state = clone_state(detach_state(output.final_state))
    toys.assert_same_weights(toys.weights(model), toys.weights(expected), atol=1e-6)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=2e-4)


@pytest.mark.parametrize("hybrid", [None, "falcon_h1", "kimi_linear"])
def test_reset_at_document_trains_on_every_document_alone(
    tbtt: Callable[..., TbttTrainer], hybrid: str | None
) -> None:
    length, steps = 8, 3
    ids = tokens_of(2 * steps * length + 1, documents=True)
    model = toys.tiny_model().double() if hybrid is None else stateful(tiny_model(hybrid, vocab_size=384))
    expected = copy.deepcopy(model).train()
    data = ContinuedChunks(ids, length, chunks_before_reset=None, reset_at_document=True, separator_id=SEPARATOR)
    tbtt(model, data, num_train_epochs=1, learning_rate=0.3).train()

    # The state of a stream row and its position; a document is run alone, from the border of the last step on.
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3)
    stream_rows = ids[:-1].view(2, -1)
    states: list[Any] = [None, None]
    inside = 0
    for step in range(steps):
        losses: list[Tensor] = []
        for stream_row in range(2):
            at = step * length
            while at < (step + 1) * length:
                row = stream_rows[stream_row]
                if at == 0 or row[at - 1] == SEPARATOR:
                    states[stream_row] = None
                    inside += at % length > 0
                stop = at + 1
                while stop < (step + 1) * length and row[stop - 1] != SEPARATOR:
                    stop += 1
                output = expected(row[None, at:stop], initial_state=states[stream_row], output_final_state=True)
                following = ids[
                    stream_row * stream_rows.shape[1] + at + 1 : stream_row * stream_rows.shape[1] + stop + 1
                ]
                scored = [i for i in range(stop - at) if row[at + i] != SEPARATOR]  # nothing predicts across a border
                losses += [F.cross_entropy(output.logits[0, i], following[i]) for i in scored]
                states[stream_row] = detach_state(output.final_state)
                at = stop
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert inside > 5
    toys.assert_same_weights(toys.weights(model), toys.weights(expected), atol=1e-6 if hybrid is None else 1e-4)


@pytest.mark.slow
def test_rows_may_be_columns_of_a_dataset(tmp_path: Path) -> None:
    # Targets that are shifted already are kept although no model names them, other columns are not.
    chunks = toys.chunks(8)
    rows = [{name: chunks[i][name].tolist() for name in ("input_ids", "shift_labels")} for i in range(8)]
    logs = []
    for data in (Dataset.from_list([row | {"text": "x"} for row in rows]), [chunks[i] for i in range(8)]):
        plain = InitialStateConfig(str(tmp_path), **toys.QUIET, save_strategy="no", max_steps=1, logging_steps=1)
        other = ZeroStateTrainer(toys.tiny_model(), plain, train_dataset=data)
        other.train()
        logs.append(other.state.log_history[0]["loss"])
    with torch.no_grad():
        logits = toys.tiny_model()(torch.stack([chunks[i]["input_ids"] for i in range(8)])).logits
    targets = torch.stack([chunks[i]["shift_labels"] for i in range(8)])
    expected = F.cross_entropy(logits.transpose(1, 2), targets).item()
    assert logs == pytest.approx([expected] * 2, rel=1e-3)


def test_evaluation_reads_blocks_from_zero_or_refuses_resets(tbtt: Callable[..., TbttTrainer]) -> None:
    model = toys.SumModel()
    blocks = PackedBlocks(torch.arange(3, 33) % 17, 5)
    trainer = tbtt(model, toys.chunks(8), max_steps=2, eval_dataset=blocks)
    trainer.train()
    model.seen.clear()
    trainer.evaluate()
    assert {start for _, _, recurrent, _ in model.seen for start in recurrent} == {0.0}
    by_document = toys.chunks(8, reset_at_document=True, separator_id=SEPARATOR)
    with pytest.raises(ValueError, match=r"reset states inside sequences .*evaluate on PackedBlocks"):
        trainer.evaluate(by_document)


# --- refusals ---

ALIGNED = {"alignment_alpha": 0.1, "alignment_length": 9}
BY_DOCUMENT = {"reset_at_document": True, "separator_id": SEPARATOR, "lookahead": 4}


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (toys.sequences(4), {}, r"TbttTrainer needs sequences that continue .*ContinuedChunks.*got list"),
        (toys.chunks(8), {"train_sampling_strategy": "sequential"}, "would separate sequences that continue"),
        (toys.chunks(8), {"alignment_alpha": 0.1}, "alignment_length must be the length of the chunks, 9"),
        (toys.chunks(8), ALIGNED, r"lookahead=0, but this run needs 4 \(alignment_max_extra\)"),
        (toys.chunks(8, lookahead=3), {}, r"lookahead=3, .* needs 0 .*: only the alignment loss reads ahead"),
        (toys.chunks(8, **BY_DOCUMENT), ALIGNED, "leave reset_at_document out"),
    ],
    ids=["rows", "order", "length", "no lookahead", "lookahead", "resets"],
)
def test_data_and_settings_that_part_rows_are_refused(
    tbtt: Callable[..., TbttTrainer], data: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tbtt(toys.tiny_model(), data, **fields)
