"""The alignment loss in training, against two forward passes and the formula in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.models.state_value import clone_state, detach_state
from hf_recurrent_lengthgen.trainers import (
    AlignmentConfig,
    AlignmentTrainer,
    BatchPlace,
    InitialStateConfig,
    StatePassingConfig,
    StatePassingTrainer,
    TbttConfig,
    TbttTrainer,
)
from hf_recurrent_lengthgen.trainers.alignment_loss import AlignmentSettings
from hf_recurrent_lengthgen.trainers.run.dataloaders import train_sampler
from tests.trainers import toys

ALPHA, SEED = 0.3, 4
PLAIN: dict[str, Any] = {
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "alignment_alpha": ALPHA,
    "seed": SEED,
}


def extra_by_hand(step: int, low: int, high: int) -> int:
    """l_extra from a generator keyed by the step, the same for all rows and micro-batches."""
    return int(torch.randint(low, high + 1, (), generator=toys.keyed_generator("extra", SEED, step, 0)))


def losses(
    model: Any,
    batch: dict[str, Tensor],
    length: int,
    extra: int,
    state: Any = None,
    second: str = "same",
    divergence: str = "sce",
    least: int | None = None,
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Cross-entropy of every target of both crops, divergence of every pair of outputs, final state of the first."""
    entropies, distances, probabilities, final = [], [], [], None
    for start in (0, extra):
        ids = batch["input_ids"][:, start : start + length]
        output = model(ids) if state is None or (start and second == "zero") else model(ids, initial_state=state)
        final = getattr(output, "final_state", None) if start == 0 else final
        probabilities.append(output.logits.softmax(-1))
        if "shift_labels" in batch:
            targets = batch["shift_labels"][:, start : start + length]
        else:
            targets = F.pad(batch["labels"][:, start + 1 : start + length], (0, 1), value=-100)
        entropies += [
            -probabilities[-1][row, t, targets[row, t]].log()
            for row in range(len(ids))
            for t in range(length)
            if targets[row, t] != -100
        ]
    for row in range(len(batch["input_ids"])):
        # both crops have read half a crop, or `least` tokens, before this token
        for token in range((length // 2 if least is None else least) + extra, length):
            p, q = probabilities[0][row, token], probabilities[1][row, token - extra]
            distances.append(-(p @ q.log() + q @ p.log()) if divergence == "sce" else (p - q) @ (p / q).log())
    return entropies, distances, final


def step(optimizer: torch.optim.Optimizer, entropies: list[Tensor], distances: list[Tensor]) -> float:
    """One step of gradient descent on L* (Eq. 4), which is returned."""
    loss = torch.stack(entropies).mean() + ALPHA * torch.stack(distances).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("accumulation", "passing", "second", "divergence", "least"),
    [
        (1, False, "same", "sce", None),
        (2, False, "same", "sce", None),
        (1, True, "same", "sce", None),
        (2, True, "same", "sce", 0),
        (1, True, "zero", "sce", None),
        (2, True, "same", "jeffreys", None),
        (1, True, "zero", "jeffreys", 2),
    ],
)
def test_training_is_the_formula_over_two_forward_passes(
    tmp_path: Path, accumulation: int, passing: bool, second: str, divergence: str, least: int | None
) -> None:
    length, largest, steps = 8, 3, 3  # rows of 11 tokens
    model = toys.tiny_model(initializer_range=0.5).double()
    expected = copy.deepcopy(model).train()
    batches: list[dict[str, Tensor]] = []
    fields = toys.QUIET | PLAIN | {"gradient_accumulation_steps": accumulation, "max_steps": steps}
    fields |= {"alignment_second_state": second, "alignment_divergence": divergence}
    fields |= {} if least is None else {"alignment_min_context": least, "alignment_max_extra": largest}
    kind: Any = StatePassingTrainer if passing else AlignmentTrainer
    config = (
        StatePassingConfig(str(tmp_path), **fields, state_drop_probability=0.0)
        if passing
        else AlignmentConfig(str(tmp_path), **fields)
    )
    data = toys.sequences(12, length=length + largest)
    trainer = kind(model, config, train_dataset=data, data_collator=toys.recording(batches))
    trainer.train()

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    carried: dict[int, Any] = {}
    extras, logged = [], [entry for entry in trainer.state.log_history if "loss" in entry]
    for number in range(steps):
        entropies, distances, means = [], [], []
        for micro_batch in range(accumulation):
            extras.append(extra_by_hand(number, 1, largest))
            batch, state = batches[number * accumulation + micro_batch], carried.get(micro_batch)
            some, pairs, final = losses(expected, batch, length, extras[-1], state, second, divergence, least)
            if passing:
                carried[micro_batch] = detach_state(final)
            means.append(torch.stack(pairs).mean().item())
            entropies, distances = entropies + some, distances + pairs
        loss = step(optimizer, entropies, distances)
        assert logged[number]["misalignment"] == pytest.approx(sum(means) / len(means), rel=1e-4)
        assert logged[number]["loss"] == pytest.approx(loss, rel=1e-3)
    assert len(set(extras)) > 1
    toys.assert_same_weights(toys.weights(model), toys.weights(expected), atol=1e-7)


def test_tbtt_carries_the_state_of_the_first_crop(tmp_path: Path) -> None:
    length, largest, steps = 9, 4, 4
    model = toys.tiny_model(initializer_range=0.5).double()
    expected = copy.deepcopy(model).train()
    data = toys.chunks(2 * steps, length, lookahead=largest)
    config = TbttConfig(str(tmp_path), **toys.QUIET, **PLAIN, alignment_length=length, num_train_epochs=1)
    trainer = TbttTrainer(model, config, train_dataset=data)
    trainer.train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    keys = list(train_sampler(trainer))
    state = expected.zero_state(2)
    for number in range(steps):
        items = [data[key] for key in keys[2 * number : 2 * number + 2]]
        batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        for row, resets in enumerate(batch["state_resets"]):
            for part in (part for layer in state for part in layer):
                part[row] *= not resets[0]
        entropies, distances, state = losses(expected, batch, length, extra_by_hand(number, 1, largest), state)
        step(optimizer, entropies, distances)
        state = clone_state(detach_state(state))
    toys.assert_same_weights(toys.weights(model), toys.weights(expected), atol=1e-7)


def llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=17, **sizes, max_position_embeddings=8, initializer_range=0.3, bos_token_id=1, **fields
    )
    return LlamaForCausalLM(config)


def test_a_transformer_with_rope_scaling_trains_its_adapters(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
    base = llama(rope_parameters=scaling)
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, settings).double()
    by_hand = copy.deepcopy(model).train()
    config = AlignmentConfig(str(tmp_path), **toys.QUIET, **PLAIN, max_steps=2)
    batches: list[dict[str, Tensor]] = []
    data = toys.sequences(8, length=11)
    before = toys.weights(model)
    AlignmentTrainer(model, config, train_dataset=data, data_collator=toys.recording(batches)).train()
    after = toys.weights(model)
    moved = {name for name in before if not torch.equal(after[name], before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(moved) == 12

    adapters = [parameter for parameter in by_hand.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.5)
    for number in range(2):
        entropies, distances, _ = losses(by_hand, batches[number], 8, extra_by_hand(number, 1, 3))
        step(optimizer, entropies, distances)
    toys.assert_same_weights(after, toys.weights(by_hand), atol=1e-6)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("fields", "tokens", "length", "low", "high"),
    [
        ({}, 12, 8, 1, 3),  # 9 tokens would need 13
        ({}, 4, 3, 1, 1),
        ({"alignment_max_extra": 2}, 12, 10, 1, 2),
        ({"alignment_length": 9, "alignment_min_extra": 2, "alignment_max_extra": 3}, 12, 9, 2, 3),
        ({"alignment_min_context": 0}, 12, 8, 1, 4),
        ({"alignment_min_context": 0, "alignment_max_extra": 6, "alignment_length": 7}, 13, 7, 1, 6),  # up to T - 1
    ],
)
def test_crops_and_shifts_are_as_long_as_requested(
    tmp_path: Path, fields: dict[str, int], tokens: int, length: int, low: int, high: int
) -> None:
    model = toys.tiny_model()
    shapes: list[tuple[int, ...]] = []
    shifts: list[int] = []

    def look(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        ids = inputs["input_ids"]
        shapes.append(tuple(ids.shape))
        first, second = ids[0].tolist(), ids[2].tolist()
        shifts.extend(by for by in range(1, length) if first[by:] == second[: length - by])

    model.register_forward_pre_hook(look, with_kwargs=True)
    items = [{"input_ids": torch.arange(tokens) + i % 2, "labels": torch.arange(tokens)} for i in range(24)]
    config = AlignmentConfig(str(tmp_path), **toys.QUIET | PLAIN | {"learning_rate": 0.0} | fields, max_steps=12)
    AlignmentTrainer(model, config, train_dataset=items).train()
    assert set(shapes) == {(4, length)}
    assert shifts == [extra_by_hand(step, low, high) for step in range(12)]
    assert {low, high} <= set(shifts) <= set(range(low, high + 1))


def test_evaluation_is_plain_cross_entropy_on_whole_rows(tmp_path: Path) -> None:
    model, data = toys.tiny_model(), toys.sequences(6, length=11)
    config = AlignmentConfig(str(tmp_path), **toys.QUIET, **PLAIN, max_steps=1, per_device_eval_batch_size=6)
    trainer = AlignmentTrainer(model, config, train_dataset=data, eval_dataset=data)
    trainer.train()
    ids, labels = (torch.stack([item[name] for item in data]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), labels[:, 1:])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    entry = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert "misalignment" not in entry


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment_alpha": -0.1}, "alignment_alpha must be a finite number of at least 0"),
        ({"alignment_alpha": float("nan")}, "alignment_alpha must be a finite number of at least 0"),
        ({"alignment_length": 0}, "alignment_length must be at least 1"),
        ({"alignment_min_context": -1}, "alignment_min_context must be at least 0"),
        ({"alignment_min_extra": 0}, "alignment_min_extra must be at least 1"),
        ({"bptt_chunk_length": 4}, "bptt_chunk_length keeps no logits"),
        ({"alignment_divergence": "kl"}, "alignment_divergence must be 'sce' or 'jeffreys', got 'kl'"),
        ({"alignment_second_state": "own"}, "alignment_second_state must be 'same' or 'zero', got 'own'"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlignmentConfig(str(tmp_path), **fields)


def of_experts() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=17, **sizes, **experts))


EIGHT = {"alignment_length": 8}


@pytest.mark.parametrize(
    ("kind", "fields", "arguments", "message"),
    [
        (AlignmentTrainer, EIGHT | {"alignment_max_extra": 4}, {}, r"l_extra must lie .* 1 and 3.*got 1 to 4"),
        (
            AlignmentTrainer,
            EIGHT | {"alignment_min_context": 7},
            {},
            r"1 and 0, .* 7 tokens of context",
        ),
        (AlignmentTrainer, {}, {"compute_loss_func": lambda *_, **__: None}, "compute_loss_func cannot be combined"),
        (AlignmentTrainer, {}, {"model": of_experts()}, "set output_router_logits=False"),
    ],
    ids=["no overlap", "no context", "a loss", "experts"],
)
def test_what_cannot_be_aligned_is_refused(
    tmp_path: Path, kind: Any, fields: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    config = kind.config_class(str(tmp_path), **toys.QUIET, **fields)
    with pytest.raises(ValueError, match=message):
        kind(**{"model": toys.tiny_model(), "args": config, "train_dataset": toys.sequences(4)} | arguments)


PADDED = (torch.arange(12) < 7).long()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("fields", "rows", "message"),
    [
        (
            {"alignment_length": 9},
            toys.sequences(8, length=12),
            "Sequences have 12 tokens, but crops of 9 that start up to 4 tokens apart need 13",
        ),
        ({}, toys.sequences(8, length=3), "l_extra must lie between 1 and 0"),
        ({"alignment_max_extra": 12}, toys.sequences(8, length=12), "l_extra must lie between 1 and"),
        ({}, [{"input_ids": torch.ones(12).long()}] * 8, "neither labels nor shift_labels"),
        (
            {},
            [item | {"attention_mask": PADDED} for item in toys.sequences(8, length=12)],
            "pack the text into sequences without padding",
        ),
    ],
    ids=["crops", "short", "shifts", "no labels", "padding"],
)
def test_unsuitable_rows_are_refused(tmp_path: Path, fields: dict[str, int], rows: list[Any], message: str) -> None:
    trainer = AlignmentTrainer(
        toys.tiny_model(), AlignmentConfig(str(tmp_path), **toys.QUIET, **fields), train_dataset=rows
    )
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_without_alpha_nothing_is_aligned(tmp_path: Path) -> None:
    assert InitialStateConfig(str(tmp_path)).alignment_alpha == 0.0
    config = AlignmentConfig(str(tmp_path), **toys.QUIET | PLAIN | {"alignment_alpha": 0.0}, max_steps=1)
    trainer = AlignmentTrainer(toys.tiny_model(), config, train_dataset=toys.sequences(4))
    trainer.train()
    assert "misalignment" not in trainer.state.log_history[0]


def test_blocks_of_three_halves_are_read_as_crops_of_an_even_length() -> None:
    args = AlignmentConfig.alone()
    settings = AlignmentSettings(args, toys.tiny_model(), None)
    block = next(iter(PackedBlocks(torch.arange(400) % toys.VOCABULARY, 192)))
    rows = {name: ids[None] for name, ids in block.items()}
    assert rows["input_ids"].shape == (1, 193)
    crops, _ = settings.crop(rows, BatchPlace(0, 0, 0, 0, 1))
    assert crops["input_ids"].shape == (2, 128)
