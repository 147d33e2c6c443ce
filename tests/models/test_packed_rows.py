"""Packed rows: what several sequences in one row give is what each of them gives alone."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_recurrent_lengthgen.models.rows import read_rows
from hf_recurrent_lengthgen.models.rows_moved import MovedRows
from hf_recurrent_lengthgen.models.state_value import LayerState, RecurrentState, map_state
from tests.hybrids import padded_rows
from tests.hybrids.padded_rows import places_of, positions_and_mask

from .families import FAMILIES, MAMBA2, SHELL_FAMILIES, Family, build, random_state, random_tokens, variant_id
from .law import assert_equal_up_to, weights_like

every_family = pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
shell_families = pytest.mark.parametrize("family", SHELL_FAMILIES, ids=variant_id)

# Bounds of the sequences of each row, and its padding: none, between, inside and around sequences.
WORDS = ["aaaabcccccccddddd", "aaaaaaaaaaaaaaaaa", "..aaa.bb.b..ccccc", "a................", "................."]


def results(
    model: Any, embeds: Tensor, state: RecurrentState, logits: Tensor, final: RecurrentState
) -> dict[str, Tensor]:
    """Outputs, final state, and the gradients of a random functional of both."""
    objective = (logits * weights_like(logits, 0)).sum()
    named = {"logits": logits}
    for index, layer in enumerate(final):
        for name, part in zip(layer._fields, layer, strict=True):
            part = part[:, 1:] if name == "window" else part  # before the tokens stands what was summed up when
            objective = objective + (part * weights_like(part, 10 + index)).sum()
            named[f"final {name} {index}"] = part
    leaves = {"inputs": embeds} | dict(model.named_parameters())
    for index, layer in enumerate(state):
        leaves |= {f"initial {name} {index}": part for name, part in zip(layer._fields, layer, strict=True)}
    gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    named |= {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}
    return {name: value.detach() for name, value in named.items()}


def alone(model: Any, embeds: Tensor, state: RecurrentState, words: list[str]) -> dict[str, Tensor]:
    """Each sequence by itself; the first of a row from the state of the row."""
    return results(model, embeds, state, *padded_rows.alone(model, embeds, state, words))


def packed(model: Any, embeds: Tensor, state: RecurrentState, words: list[str], **options: Any) -> dict[str, Tensor]:
    positions, mask = positions_and_mask(words)
    output = model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, initial_state=state, **options)
    return results(model, embeds, state, output.logits * mask[..., None], output.final_state)


def leaves_of(model: Any, words: list[str]) -> tuple[Tensor, RecurrentState]:
    tokens = random_tokens(len(words), len(words[0]))
    embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
    return embeds, map_state(lambda part: part.requires_grad_(), random_state(model, len(words)))


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("how", ["evaluation", "activation checkpointing", "hidden states"])
def test_packed_sequences_are_what_they_are_alone(family: Family, how: str) -> None:
    model = build(family, torch.float64)
    embeds, state = leaves_of(model, WORDS)
    expected = alone(model, embeds, state, WORDS)
    if how == "activation checkpointing":
        model.train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    actual = packed(model, embeds, state, WORDS, output_hidden_states=how == "hidden states")
    assert_equal_up_to(1e-9, actual, expected)


def test_a_window_of_forgetting_begins_with_each_sequence() -> None:
    model = build(MAMBA2, torch.float64, forgetting={"window": 3, "retention": 0.9})
    tokens = random_tokens(len(WORDS), 17)
    embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
    state = map_state(lambda x: x.detach().requires_grad_(), model(tokens[:, :6]).final_state)
    assert_equal_up_to(1e-9, packed(model, embeds, state, WORDS), alone(model, embeds, state, WORDS))


@shell_families
@torch.no_grad()
def test_bfloat16_is_as_exact_as_its_rounding(family: Family) -> None:
    model = build(family, torch.bfloat16)
    tokens, (positions, mask) = random_tokens(len(WORDS), 17), positions_and_mask(WORDS)
    together = model(tokens, attention_mask=mask, position_ids=positions)
    for row, word in enumerate(WORDS):
        for places in places_of(word):
            one = model(tokens[row : row + 1, places]).logits[0]
            torch.testing.assert_close(
                together.logits[row, places], one, rtol=0.05, atol=0.05 * float(one.abs().max())
            )


@shell_families
def test_hidden_states_stand_at_their_tokens(family: Family) -> None:
    model, tokens = build(family, torch.float64), random_tokens(len(WORDS), 17)
    positions, mask = positions_and_mask(WORDS)
    together = model(tokens, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states
    for row, word in enumerate(WORDS):
        for places in places_of(word):
            one = model(tokens[row : row + 1, places], output_hidden_states=True).hidden_states
            for actual, expected in zip(together, one, strict=True):
                torch.testing.assert_close(actual[row, places], expected[0])


@pytest.mark.thinned(5)
@every_family
@pytest.mark.parametrize("keys", ["position_ids", "seq_idx", "all"])
def test_the_flattening_collator_gives_the_loss_of_its_texts(family: Family, keys: str) -> None:
    """The mean over the targets inside the texts; none is across a border, whatever stands in the labels there."""
    model, lengths = build(family, torch.float64), [4, 1, 9, 2]
    texts = [random_tokens(1, length, seed=length)[0] for length in lengths]
    collator = DataCollatorWithFlattening(
        return_position_ids=keys in ("position_ids", "all"),
        return_seq_idx=keys in ("seq_idx", "all"),
    )
    batch = collator([{"input_ids": text} for text in texts])
    scored = [cross_entropy(model(x[None]).logits[0, :-1], x[1:], reduction="sum") for x in texts if len(x) > 1]
    expected = (sum(scored) / (sum(lengths) - len(lengths))).float()
    torch.testing.assert_close(model(**batch).loss, expected)
    torch.testing.assert_close(model(**batch | {"labels": batch["input_ids"]}).loss, expected)
    last = model(texts[-1][None]).final_state
    final = model(**batch).final_state
    for layer, truth in zip(final, last, strict=True):
        for part, true_part in zip(layer, truth, strict=True):
            torch.testing.assert_close(part, true_part)


def test_trainer_measures_flattened_batches(tmp_path: Path) -> None:
    model = build(FAMILIES[0])
    texts = [random_tokens(1, length, seed=length)[0] for length in (4, 9, 2, 7)]
    settings: dict[str, Any] = {"per_device_eval_batch_size": 2, "report_to": [], "use_cpu": True}
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), **settings),
        data_collator=DataCollatorWithFlattening(return_seq_idx=True),
    )
    metrics = trainer.evaluate([{"input_ids": text} for text in texts])  # type: ignore[arg-type]
    losses = [cross_entropy(model(x[None]).logits[0, :-1], x[1:], reduction="sum").item() for x in texts]
    batches = [(losses[0] + losses[1]) / 11, (losses[2] + losses[3]) / 7]
    assert metrics["eval_loss"] == pytest.approx(sum(batches) / 2, rel=1e-5)


@shell_families
def test_positions_that_say_nothing_change_nothing(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])
    plain, padded = model(tokens).logits, model(tokens, attention_mask=mask).logits
    counted = torch.arange(6)[None]
    for given in (
        {"position_ids": counted},
        {"position_ids": counted.expand(2, 6) + 7},
        {"token_type_ids": torch.zeros_like(tokens), "seq_idx": torch.ones_like(tokens), "position_ids": counted},
    ):
        assert torch.equal(model(tokens, **given).logits, plain)
    for positions in (
        counted,
        mask.cumsum(1) - 1,
        (mask.cumsum(1) - 1).masked_fill(mask == 0, 0),
        (mask.cumsum(1) - 1).masked_fill(mask == 0, 1),
        (mask.cumsum(1) * mask),
    ):
        given = {"position_ids": positions, "token_type_ids": 1 - mask}
        assert torch.equal(model(tokens, attention_mask=mask, **given).logits, padded)


@shell_families
def test_positions_go_on_from_a_cache(family: Family) -> None:
    model, tokens = build(family), random_tokens(2, 6)
    first = model(tokens[:, :4], use_cache=True, position_ids=torch.arange(4)[None])
    expected = model(tokens).logits[:, 4:]
    second = model(
        tokens[:, 4:],
        past_key_values=first.past_key_values,
        position_ids=torch.tensor([[4, 5]]),
    )
    torch.testing.assert_close(second.logits, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 1, 2]]}, "position_ids goes from 2 to 1 at token 3 of row 1"),
        ({"position_ids": [[0, 1, 2, 3]]}, "position_ids must have the shape of the tokens, (2, 5), got (1, 4)"),
        ({"position_ids": [[[0, 1, 2, 3, 4]]] * 2}, "got (2, 1, 5)"),
        (
            {"position_ids": [[0.0, 1.0, 2.0, 3.0, 4.0]]},
            "position_ids must be a tensor of integers, got torch.float32",
        ),
        ({"token_type_ids": [[0, 0, 1, 1, 1]] * 2}, "token_type_ids must be 0 at all tokens"),
        ({"sequence_ids": [[0, 0, 0, 1, 1]]}, "does not take the arguments ['sequence_ids']"),
    ],
)
def test_positions_that_no_recurrent_model_has_are_refused(given: dict[str, Any], message: str) -> None:
    model, tokens = build(FAMILIES[0]), random_tokens(2, 5)
    given = {name: torch.tensor(value) for name, value in given.items()}
    for run in (model, model.base_model):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(tokens, **given)


def test_sequences_by_hand() -> None:
    positions, mask = positions_and_mask(["..aaa.bb", "aaaabbbb"])
    rows = read_rows({"input_ids": positions, "position_ids": positions, "attention_mask": mask})
    assert rows.starts is not None
    assert rows.starts.nonzero().tolist() == [[0, 6], [1, 4]]
    packing = MovedRows.of_sequences(rows)
    front = packing.to_front(torch.arange(1.0, 17).reshape(2, 8, 1))
    assert [x[..., 0].tolist() for x in front] == [[[3, 4, 5, 0], [9, 10, 11, 12], [13, 14, 15, 16]], [[7, 8]]]
    assert [x if x is None else x.lengths.tolist() for x in packing.groups] == [[3, 4, 4], None]  # type: ignore[union-attr]
    assert packing.back(front)[..., 0].tolist() == [[3, 3, 3, 4, 5, 5, 7, 8], list(range(9, 17))]
    state = LayerState(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]))
    states = packing.starting_states(state)
    assert [x.recurrent[:, 0].tolist() for x in states] == [[1, 2, 0], [0]]
    final = packing.final_states(
        (LayerState(*[torch.tensor([[5.0], [6.0], [7.0]])] * 2), LayerState(*[-state.conv[:1]] * 2))
    )
    assert final.recurrent[:, 0].tolist() == [-3, 7]


def test_padding_stays_below_the_number_of_tokens() -> None:
    """However unequal sequences are: one of 1000 tokens and a thousand of one to three."""
    lengths = [1, 2, 3] * 333 + [1000]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packing = MovedRows.of_sequences(read_rows({"input_ids": numbers, "seq_idx": numbers}))
    assert sum(order.numel() for order in packing.orders) < 2 * bounds[-1]
    assert len(packing.orders) == 4
    text = torch.arange(1.0, 1 + int(bounds[-1]))[None, :, None]
    front = packing.to_front(text)
    assert torch.equal(packing.back(front), text)
    rows = {tuple(row[row > 0].tolist()) for group in front for row in group[..., 0]}
    assert rows == {tuple(text[0, a:b, 0].tolist()) for a, b in pairwise(bounds.tolist())}


# torch itself, where the graph breaks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_takes_packed_rows() -> None:
    model, tokens = build(FAMILIES[0], torch.float64), random_tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(
        compiled(tokens, position_ids=positions).logits, model(tokens, position_ids=positions).logits
    )
