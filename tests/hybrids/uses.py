"""What wrapped models of each type can be used for: an error against the stock model, or the reason of a refusal.

`python -m tests.hybrids.support` puts the table beside that of the state contract.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.loading import load_model
from hf_recurrent_lengthgen.hybrids.wrapping import stateful
from hf_recurrent_lengthgen.metrics import patch_heads
from hf_recurrent_lengthgen.models.state_value import RecurrentState, map_state
from hf_recurrent_lengthgen.state_files import load_text_state, read_text, save_text_state, start_of
from hf_recurrent_lengthgen.surgery import expand_state
from tests.harness.support import error_of
from tests.hybrids.measures import (
    gradients,
    pair,
    parts,
    random_state,
    random_tokens,
    read_in_pieces,
    relative_error,
    weighted_sum,
)

TRAINING_LENGTH = 20


@torch.no_grad()
def diagnosis(model_type: str) -> float:
    """NLL after a long and after a short context, as `lengthgen diagnose` reads them to exchange states."""
    stock, model = pair(model_type)
    tokens = random_tokens(2, 3 * TRAINING_LENGTH + 1, seed=6)
    layer = next((i for i, shape in enumerate(model.state_shapes()) if shape.recurrent != (0,)), 0)
    found = patch_heads(
        model, tokens, TRAINING_LENGTH, [["attention"] if model.attends else [(layer, 0)]], progress=False
    )

    def nll(ids: Tensor) -> Tensor:
        logits = stock(input_ids=ids[:, :-1]).logits[:, -found.width :]
        return torch.nn.functional.cross_entropy(logits.mT, ids[:, -found.width :], reduction="none").mean(1)

    expected = [nll(tokens), nll(tokens[:, -TRAINING_LENGTH - 1 :])]
    return relative_error([torch.from_numpy(found.full), torch.from_numpy(found.short)], expected)


@torch.no_grad()
def larger_states(model_type: str, layers: Any) -> float:
    """StateX: the same logits before training, in pieces, and loaded from a checkpoint."""
    stock, model = pair(model_type)
    new: Any = expand_state(model, layers=layers, initialization="inherit")
    tokens = random_tokens(2, 33, seed=6)
    with tempfile.TemporaryDirectory() as folder:
        new.save_pretrained(folder)
        loaded: Any = load_model(folder).eval()
    logits = [
        new(input_ids=tokens).logits,
        read_in_pieces(new, tokens, (3, 1, 29))[0],
        loaded(input_ids=tokens).logits,
    ]
    return relative_error(logits, [stock(input_ids=tokens).logits] * 3)


def learned_state(model_type: str) -> float:
    """Logits and gradients from an active learned state against a given one, also loaded from its folder and from a
    checkpoint, and logits without it."""
    stock, model = pair(model_type)
    tokens, values = random_tokens(2, 21, seed=6), map_state(Tensor.detach, random_state(model, 1))
    given = map_state(lambda part: part.clone().requires_grad_(), values)
    rows: RecurrentState = map_state(lambda part: part.expand(2, *part.shape[1:]), given)
    expected = model(input_ids=tokens, initial_state=rows).logits
    learned = model.add_learned_state("tried")["tried"]
    learned.set(values)
    logits = model(input_ids=tokens).logits
    other = stateful(copy.deepcopy(stock))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_learned_state(f"{folder}/state")
        other.load_learned_state(f"{folder}/state")
        model.save_pretrained(f"{folder}/both")
        loaded = [each(input_ids=tokens).logits for each in (other, load_model(f"{folder}/both").eval())]
        with model.learned_states.disable_adapter():
            without = model(input_ids=tokens).logits
    return relative_error(
        [logits, *loaded, without, *gradients(weighted_sum([logits]), parts(learned()))],
        [*[expected] * 3, stock(input_ids=tokens).logits, *gradients(weighted_sum([expected]), parts(given))],
    )


@torch.no_grad()
def state_file(model_type: str) -> float:
    """The last logits and the state after a text whose beginning comes from a file."""
    stock, model = pair(model_type)
    tokens = random_tokens(1, 65, seed=6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "read.safetensors"
        save_text_state(path, read_text(model, tokens[:, :40]))
        text_state = read_text(model, tokens[:, 40:64], load_text_state(path, model))
    actual = model(input_ids=tokens[:, 64:], **start_of(model, text_state), output_final_state=True)
    state = read_in_pieces(model, tokens, (65,))[1]
    return relative_error(
        [actual.logits[:, -1], *parts(actual.final_state)], [stock(input_ids=tokens).logits[:, -1], *parts(state)]
    )


USES: dict[str, Callable[[str], float]] = {
    "diagnosis": diagnosis,
    "harness": error_of,  # with shared prefixes, in nats
    "StateX, one layer": lambda model_type: larger_states(model_type, [0]),
    "StateX, all layers": lambda model_type: larger_states(model_type, "all"),
    "learned state": learned_state,
    "state file": state_file,
}


def measure_uses(model_type: str) -> list[float | str]:
    """For each use the error, or the reason of its refusal."""
    found: list[float | str] = []
    for use in USES.values():
        try:
            found.append(use(model_type))
        except ValueError as refusal:
            reason = str(refusal).split(". ")[0].removesuffix(".")
            found.append(re.sub(rf"'?\b{model_type}\b'?", "this type", reason))
    return found


def table_of_uses(rows: dict[str, Sequence[float | str]]) -> str:
    """The Markdown table of measured uses, and the reasons below it."""
    reasons = {cell: 0 for cells in rows.values() for cell in cells if isinstance(cell, str)}
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}

    def lines() -> Iterator[str]:
        yield "| `model_type` | " + " | ".join(USES) + " |"
        yield "|---" * (1 + len(USES)) + "|"
        for model_type, cells in rows.items():
            texts = (f"no ({numbers[cell]})" if isinstance(cell, str) else f"{cell:.0e}" for cell in cells)
            yield f"| `{model_type}` | {' | '.join(texts)} |"
        if numbers:
            yield ""
        yield from (f"{number}. {reason}." for reason, number in numbers.items())

    return "\n".join(lines())
