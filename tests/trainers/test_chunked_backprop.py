"""A sequence in chunks has the loss, final state and gradients of the whole one."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state
from hf_recurrent_lengthgen.trainers.chunked_backprop import chunked_forward, forward_in_chunks
from tests.hybrids.measures import parts
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import FAMILIES, MAMBA2, VOCABULARY, Family, build, random_state, random_tokens, variant_id
from tests.trainers.chunks_in_processes import gradients, loop

LENGTH, CHUNK_LENGTH = 23, 5
ROTARY_BY_LENGTH: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
ONE_SEQUENCE: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": torch.arange(LENGTH)[None]},
    "positions from 7": {"position_ids": torch.arange(7, LENGTH + 7).expand(2, -1)},
    "numbers": {"seq_idx": torch.ones(2, LENGTH, dtype=torch.long)},
    "borders": {"cu_seq_lens_q": torch.tensor([0, LENGTH, 2 * LENGTH]), "max_length_q": LENGTH},
}
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-3, "atol": 1e-4},
}


def text(labels_after: int = 7) -> dict[str, Any]:
    """Two rows, the first tokens of which are not scored."""
    ids = random_tokens(2, LENGTH)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < labels_after, -100)}


def leaves(state: RecurrentState) -> RecurrentState:
    return map_state(lambda part: part.detach().clone().requires_grad_(), state)


def backward(model: Any, output: Any, state: RecurrentState) -> dict[str, Tensor]:
    return gradients(model, output["loss"], output["final_state"], state)


def close(actual: Any, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
def test_chunks_are_the_whole_sequence(family: Family, dtype: torch.dtype) -> None:
    model, inputs = build(family, dtype).train(), text()
    state = leaves(random_state(model, 2))
    whole = model(**inputs, initial_state=state)
    expected = backward(model, whole, state)
    with forward_in_chunks(model, CHUNK_LENGTH):
        chunks = model(**inputs, initial_state=state)
    assert chunks.logits is None
    torch.testing.assert_close(chunks.loss, whole.loss, rtol=1e-6, atol=0.0)
    close(chunks.final_state, whole.final_state, dtype)
    found = backward(model, chunks, state)
    assert {name for name in found if not name.startswith("state")} == {name for name, _ in model.named_parameters()}
    close(found, expected, dtype)


def test_shifted_targets_and_no_state_at_the_start() -> None:
    model, inputs = build(MAMBA2).train(), text()
    del inputs["labels"]
    inputs["shift_labels"] = random_tokens(2, LENGTH, seed=5)
    chunks = chunked_forward(model.forward, inputs, CHUNK_LENGTH)
    logits = model(inputs["input_ids"]).logits
    torch.testing.assert_close(chunks.loss, F.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten()))
    without = chunked_forward(model.forward, {**inputs, "output_final_state": False}, CHUNK_LENGTH)
    assert without.final_state is None


@pytest.mark.parametrize(
    ("padding", "packed"),
    # twelve tokens are two whole chunks and a part of one
    [*product([(0, 12), (14, LENGTH)], [False, True]), ((0, 0), True), ((9, 13), True)],
)
def test_padding_and_labels_of_packed_rows_are_those_of_the_whole(padding: tuple[int, int], packed: bool) -> None:
    model, inputs = build(MAMBA2, torch.float64).train(), text(0)
    mask, numbers = torch.ones_like(inputs["input_ids"]), torch.zeros_like(inputs["input_ids"])
    numbers[0, [3, CHUNK_LENGTH, 11]] = numbers[1, 2 * CHUNK_LENGTH] = 1
    mask[0, slice(*padding)] = 0
    labels = inputs["labels"].masked_fill(mask == 0, -100)
    state = leaves(random_state(model, 2))
    inputs |= {"labels": labels, "attention_mask": mask, "initial_state": state}
    inputs |= {"seq_idx": numbers.cumsum(1)} if packed else {}
    whole, chunks = model(**inputs), chunked_forward(model.forward, inputs, CHUNK_LENGTH)
    torch.testing.assert_close(chunks.loss, whole.loss, rtol=1e-6, atol=0.0)
    close(backward(model, chunks, state), backward(model, whole, state))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
@pytest.mark.parametrize("form", ONE_SEQUENCE)
def test_forms_that_say_that_rows_are_one_sequence_each_change_nothing(family: Family, form: str) -> None:
    model, inputs = build(family, torch.float64).train(), text()
    state = leaves(random_state(model, 2))
    expected = backward(model, model(**inputs, initial_state=state), state)
    chunks = chunked_forward(model.forward, {**inputs, **ONE_SEQUENCE[form], "initial_state": state}, CHUNK_LENGTH)
    close(backward(model, chunks, state), expected)


def test_padding_in_a_row_is_refused_only_where_it_is_scored_at_the_beginning_of_a_chunk() -> None:
    model, inputs = build(MAMBA2).train(), text(0)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 3:7] = 0
    with pytest.raises(ValueError, match=r"Row 1 has padding inside, at position 4, .* pad rows at their ends"):
        chunked_forward(model.forward, inputs, 5)
    whole, chunks = model(**inputs), chunked_forward(model.forward, inputs, 8)
    torch.testing.assert_close(chunks.loss, whole.loss)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """An accelerator for bfloat16 on the CPU; its settings are global."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("adapter", [False, True], ids=["model", "adapter"])
def test_autocast_of_accelerate_holds_in_chunks_and_when_they_are_computed_again(
    accelerator: Accelerator, adapter: bool
) -> None:
    base = build(MAMBA2).train()
    model: Any = base
    if adapter:  # the context of autocast is then around all chunks, not around each
        lora = LoraConfig(target_modules=["in_proj", "out_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
        model.requires_grad_(True)
    model = accelerator.prepare_model(model)
    dtypes: list[torch.dtype] = []
    first = base.backbone.layers[0].mixer.in_proj
    first.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    inputs = text(0) | {"num_items_in_batch": 44}
    inputs["initial_state"] = state = leaves(random_state(base, 2))
    expected = gradients(model, *loop(model, inputs, CHUNK_LENGTH), state)
    replaced = vars(base).get("forward")
    dtypes.clear()
    with forward_in_chunks(model, CHUNK_LENGTH):
        output = model(**inputs)
    assert vars(base).get("forward") is replaced
    found = backward(model, output, state)
    assert dtypes == [torch.bfloat16] * 9  # five chunks, four of them once more
    # Each chunk casts the weights itself in both, so their gradients are summed in float32 alike.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_model_is_as_before_after_the_block_and_after_an_error_in_it() -> None:
    model, inputs = build(MAMBA2), text()
    with forward_in_chunks(model, CHUNK_LENGTH):
        assert model(**inputs).logits is None
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="NaN"), forward_in_chunks(model, CHUNK_LENGTH):
        model(**inputs, initial_state=map_state(lambda part: part * torch.nan, model.zero_state(2)))
    assert "forward" not in vars(model)
    assert model(**inputs).logits.shape == (2, LENGTH, VOCABULARY)


# torch.compile runs into deprecation warnings of torch itself, and looks at gradients
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:torch", "ignore:The .grad attribute")
def test_layers_may_be_compiled_but_not_the_model() -> None:
    model, inputs = build(MAMBA2, torch.float64).train(), text()
    state = leaves(random_state(model, 2))
    expected = backward(model, model(**inputs, initial_state=state), state)
    with pytest.raises(ValueError, match="compiled as a whole"):
        forward_in_chunks(torch.compile(model, backend="eager"), CHUNK_LENGTH).__enter__()
    for layer in model.backbone.layers:
        layer.compile(backend="eager")
    with forward_in_chunks(model, CHUNK_LENGTH):
        output = model(**inputs, initial_state=state)
    close(backward(model, output, state), expected)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled as a whole"):
        forward_in_chunks(model, CHUNK_LENGTH).__enter__()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | fields}, "change with the length of the text")
        for kind, fields in ROTARY_BY_LENGTH.items()
    ]
    + [({"output_router_logits": True}, r"adds a loss of the experts, .* set it to False")],
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_hybrids_whose_chunks_are_not_the_row_are_refused(changes: dict[str, Any], message: str) -> None:
    model = stateful(tiny_model("granitemoehybrid", position_embedding_type="rope", **changes))
    with pytest.raises(ValueError, match=message):
        forward_in_chunks(model, CHUNK_LENGTH).__enter__()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "give labels or shift_labels"),
        ({"inputs_embeds": torch.ones(2, LENGTH, 16)}, r"does not take \['inputs_embeds'\]: leave it out"),
        ({"use_cache": True}, r"does not take \['use_cache'\]: leave it out"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_go_in_chunks_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    model = build(MAMBA2)
    inputs = {**text(), "use_cache": False, "output_hidden_states": None, **changes}
    with pytest.raises(ValueError, match=message), forward_in_chunks(model, CHUNK_LENGTH):
        model(**inputs)


@pytest.mark.parametrize("wrapper", [lambda model: nn.Linear(2, 2), nn.DataParallel], ids=["no model", "wrapper"])
def test_models_without_the_state_contract_and_other_wrappers_are_refused(wrapper: Any) -> None:
    with pytest.raises(ValueError, match=r"(Linear|DataParallel) does not take \['initial_state'.*other wrappers"):
        forward_in_chunks(wrapper(build(MAMBA2)), CHUNK_LENGTH).__enter__()


@pytest.mark.thinned(11)
@pytest.mark.parametrize("family", FAMILIES, ids=variant_id)
@pytest.mark.parametrize("chunk_length", [1, 4, 5])
def test_sequences_begin_with_a_chunk_and_inside_one(family: Family, chunk_length: int) -> None:
    numbers = torch.zeros(3, 16, dtype=torch.long)
    numbers[0, [4, 5, 11]] = numbers[2, 9] = 1
    numbers = numbers.cumsum(1)
    model = build(family, torch.float64).train()
    tokens = torch.randint(3, model.config.vocab_size, (3, 16), generator=torch.Generator().manual_seed(2))
    state = map_state(lambda part: part.detach().clone().requires_grad_(), random_state(model, 3))
    inputs = {"input_ids": tokens, "shift_labels": tokens.roll(-1, 1), "seq_idx": numbers, "initial_state": state}
    gradients = []
    for output in (model(**inputs), chunked_forward(model.forward, inputs, chunk_length)):
        functional = output.loss + torch.stack([part.square().sum() for part in parts(output.final_state)]).sum()
        leaves = [*parts(state), *model.parameters()]
        gradients.append([functional, *torch.autograd.grad(functional, leaves, allow_unused=True)])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or not one.numel() or (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1e-9)
