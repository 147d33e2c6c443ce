"""State passing: states by hand, rows traced with a model that sums, and weights of hand-written loops."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer
from hf_recurrent_lengthgen.trainers.initial_states import BatchPlace
from hf_recurrent_lengthgen.trainers.state_passing import PassedStates
from tests.trainers import toys

MakeConfig = Callable[..., StatePassingConfig]


def numbers(count: int) -> list[dict[str, Tensor]]:
    """Item i holds two ids that sum to 101 (i + 1), so that every sum of items is telling."""
    return [{"input_ids": torch.tensor([i + 1, 100 * (i + 1)])} for i in range(count)]


def trace(
    model: Any, groups: list[int], seed: int, probability: float, conv: bool = True
) -> list[tuple[list[float], list[float]]]:
    """What a model must have seen if micro-batches come in `groups` per step: rows of (recurrent, conv) starts."""
    carried: dict[int, list[list[float]]] = {}
    passes = iter([rows for training, rows, _, _ in model.seen if training])
    expected = []
    for step, group in enumerate(groups):
        for micro_batch in range(group):
            ids = next(passes)
            rows = carried.setdefault(micro_batch, [])
            rows += [[0.0, 0.0] for _ in range(len(ids) - len(rows))]
            starts = []
            for row, row_ids in enumerate(ids):
                start = rows[row]
                if toys.is_dropped(seed, step, micro_batch, row, probability):
                    start = [0.0, 0.0]
                starts.append(start)
                rows[row] = [start[0] + sum(row_ids), start[1] + len(row_ids) if conv else 0.0]
            expected.append(([start[0] for start in starts], [start[1] for start in starts]))
    assert next(passes, None) is None
    return expected


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("items", "batch", "accumulation", "groups"),
    [
        pytest.param(8, 2, 1, [1] * 12, id="plain"),
        pytest.param(8, 3, 1, [1] * 6, id="rows left out"),
        pytest.param(8, 1, 4, [4] * 6, id="accumulation"),
        pytest.param(11, 2, 2, [2, 2, 1] * 3, id="a row left out and last group smaller"),
        pytest.param(6, 2, 4, [3] * 3, id="only smaller groups"),
    ],
)
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_every_row_starts_where_the_same_row_and_slot_ended(
    make_config: MakeConfig, items: int, batch: int, accumulation: int, groups: list[int], probability: float
) -> None:
    model = toys.SumModel()
    config = make_config(
        num_train_epochs=3,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        state_drop_probability=probability,
        learning_rate=0.0,
        seed=11,
    )
    trainer = StatePassingTrainer(model, config, train_dataset=numbers(items))
    trainer.train()
    seen = [(recurrent, conv) for _, _, recurrent, conv in model.seen]
    assert seen == trace(model, groups, 11, probability)
    assert trainer.state.global_step == len(groups)
    last_rows = [rows for _, rows, _, _ in model.seen][-1]
    final = trainer.initial_states.state_dict()[f"micro_batches.{groups[-1] - 1}.layers.0.recurrent"]
    last_final = [start + sum(ids) for start, ids in zip(seen[-1][0], last_rows, strict=True)]
    assert final[: len(last_rows), 0].tolist() == last_final


def test_the_convolution_part_starts_from_zero_if_not_carried(make_config: MakeConfig) -> None:
    model = toys.SumModel()
    config = make_config(carry_conv_state=False, state_drop_probability=0.0, learning_rate=0.0, num_train_epochs=2)
    StatePassingTrainer(model, config, train_dataset=numbers(8)).train()
    seen = [(recurrent, conv) for _, _, recurrent, conv in model.seen]
    assert seen == trace(model, [1] * 8, 42, 0.0, conv=False)
    assert all(conv == [0.0, 0.0] for _, conv in seen)
    assert any(sum(recurrent) > 0 for recurrent, _ in seen)


class _Token:
    pass


class _Remember(torch.autograd.Function):
    """Identity; its node in the graph owns a token."""

    tokens: list[weakref.ref] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = _Token()
        _Remember.tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.slow
def test_carried_states_lie_in_memory_as_a_checkpoint_gives_them_back() -> None:
    """Sums over a state in another order are rounded otherwise, and a resumed run would differ in the last digit."""
    source, place = PassedStates(0.0), BatchPlace(0, 0, 0, 0, 2)
    state = (LayerState(torch.randn(2, 3, 5).mT, torch.randn(2, 4)),)
    assert not state[0].recurrent.is_contiguous()
    source.observe(place, state)
    again = PassedStates(0.0)
    again.load_state_dict(source.state_dict(), torch.device("cpu"))
    for carried, loaded in zip(source.initial_state(place)[0], again.initial_state(place)[0], strict=True):  # type: ignore[index]
        assert carried.stride() == loaded.stride()
        assert torch.equal(carried, loaded)
    torch.testing.assert_close(source.initial_state(place)[0].recurrent, state[0].recurrent)  # type: ignore[index]


def test_no_graph_of_an_earlier_step_is_kept(make_config: MakeConfig) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(
            self, input_ids: Tensor, initial_state: RecurrentState | None = None, output_final_state: bool = True
        ) -> dict[str, Any]:
            start = torch.zeros(2, 1) if initial_state is None else initial_state[0].recurrent
            state = _Remember.apply(start + self.weight * input_ids.sum(1, keepdim=True))
            alive.append(sum(token() is not None for token in _Remember.tokens))
            return {"loss": (1e-6 * state).mean(), "final_state": (LayerState(state, torch.zeros(2, 0)),)}

    alive: list[int] = []
    _Remember.tokens.clear()
    StatePassingTrainer(Graph(), make_config(num_train_epochs=2), train_dataset=numbers(16)).train()
    gc.collect()
    assert len(alive) == 16
    assert max(alive) <= 2  # its own, and at most the step before while variables still name it
    assert all(token() is None for token in _Remember.tokens)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("accumulation", "groups"),
    [pytest.param(1, [1] * 10, id="plain"), pytest.param(2, [2, 2, 1] * 2, id="accumulation")],
)
@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_weights_are_those_of_a_hand_written_loop(
    make_config: MakeConfig, accumulation: int, groups: list[int], probability: float
) -> None:
    model = toys.tiny_model().double()  # rounding errors grow a thousandfold in ten such steps
    by_hand = copy.deepcopy(model)
    batches: list[dict[str, Tensor]] = []
    config = make_config(
        num_train_epochs=2,
        gradient_accumulation_steps=accumulation,
        state_drop_probability=probability,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        seed=7,
        logging_steps=1,
    )
    items = toys.sequences(11)  # five batches, and a row that is left out
    trainer = StatePassingTrainer(model, config, train_dataset=items, data_collator=toys.recording(batches))
    trainer.train()

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    carried: dict[int, Any] = {}
    remaining = iter(batches)
    losses = []
    for step, group in enumerate(groups):
        micro_batches = [next(remaining) for _ in range(group)]
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        step_loss = torch.zeros(())
        for micro_batch, batch in enumerate(micro_batches):
            rows = len(batch["labels"])
            state = [[part.clone() for part in layer] for layer in carried.get(micro_batch, by_hand.zero_state(rows))]
            for row in range(rows):
                if toys.is_dropped(7, step, micro_batch, row, probability):
                    for layer in state:
                        for part in layer:
                            part[row] = 0
            start = tuple(LayerState(*(part[:rows] for part in layer)) for layer in state)
            out = by_hand(batch["input_ids"], initial_state=start)
            logits = out.logits.float()  # as Transformers' loss functions do
            nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="sum")
            (nll / targets).backward()
            step_loss += nll.detach() / targets
            for old, new in zip(state, out.final_state, strict=True):
                for old_part, new_part in zip(old, new, strict=True):
                    old_part[:rows] = new_part.detach()
            carried[micro_batch] = state
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(step_loss))
    assert next(remaining, None) is None
    toys.assert_same_weights(toys.weights(model), toys.weights(by_hand), atol=1e-6)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=2e-4)  # Trainer rounds the losses it logs


def test_a_model_that_returns_a_mean_loss_gets_the_mean_over_micro_batches(make_config: MakeConfig) -> None:
    model = toys.SumModel()
    config = make_config(
        max_steps=1, gradient_accumulation_steps=4, optim="sgd", learning_rate=0.001, max_grad_norm=0.0
    )
    StatePassingTrainer(model, config, train_dataset=numbers(8)).train()
    # The loss of a micro-batch is weight * mean(ids), the mean over all 8 items of 101 (i + 1) / 2 is 227.25.
    assert model.weight.item() == pytest.approx(1 - 0.001 * 227.25, abs=1e-5)


# --- the source alone ---


def state(*values: float) -> RecurrentState:
    """Two layers; row i is `values[i]` everywhere, the second layer ten times that; the first has no conv part."""
    rows = torch.tensor(values)[:, None]
    return LayerState(rows.repeat(1, 3), rows[:, :0]), LayerState(10 * rows.repeat(1, 2), 10 * rows)


def place(step: int = 0, micro_batch: int = 0, rows: int = 2, first_row: int = 0, seed: int = 0) -> BatchPlace:
    return BatchPlace(seed, step, micro_batch, first_row, rows)


def starts(source: PassedStates, at: BatchPlace) -> list[float]:
    first_state = source.initial_state(at)
    assert first_state is not None
    return first_state[0].recurrent[:, 0].tolist()


def test_a_smaller_batch_uses_and_replaces_its_first_rows_only() -> None:
    source = PassedStates(drop_probability=0.0)
    source.observe(place(rows=3), state(1.0, 2.0, 3.0))
    assert starts(source, place(1, rows=1)) == [1.0]
    source.observe(place(1, rows=1), state(9.0))
    assert starts(source, place(2, rows=3)) == [9.0, 2.0, 3.0]


def test_rows_without_a_state_start_from_zero() -> None:
    source = PassedStates(drop_probability=0.0)
    source.observe(place(rows=1), state(5.0))
    torch.testing.assert_close(source.initial_state(place(1, rows=3)), state(5.0, 0.0, 0.0), rtol=0, atol=0)


def test_choices_do_not_depend_on_how_rows_are_spread_over_processes() -> None:
    together = place(4, rows=4).uniform("drop")
    apart = torch.cat([place(4, rows=2, first_row=first).uniform("drop") for first in (0, 2)])
    assert torch.equal(together, apart)


def test_carried_states_take_no_memory_but_their_own() -> None:
    """A state in its own memory is kept as it is, without its graph; a slice of something larger is copied."""
    whole = torch.ones(2, 3, requires_grad=True) * 2
    inputs = torch.ones(2, 50)
    source = PassedStates(drop_probability=0.0)
    source.observe(place(), (LayerState(whole, inputs[:, -4:]),))
    layer = next(iter(source._carried.values()))[0]
    assert not layer.recurrent.requires_grad
    assert layer.recurrent.data_ptr() == whole.data_ptr()
    assert layer.conv.untyped_storage().nbytes() == 2 * 4 * 4
    first_state = source.initial_state(place(1))
    assert first_state is not None
    first_state[0].recurrent.fill_(8.0)
    assert starts(source, place(1)) == [2.0, 2.0]
