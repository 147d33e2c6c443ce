"""Measure on tiny random models which recurrent model types of Transformers keep the state contract.

    python -m tests.hybrids.support            print the tables, that of the law and that of uses
    python -m tests.hybrids.support --write    put them into docs/hybrids_support.md

Every number is relative to the largest entry of what it is compared with.
"""

import argparse
import copy
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.loading import load_model, quiet_transformers
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED
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
    read_in_chunks,
    relative_error,
    weighted_sum,
)
from tests.hybrids.test_law import WORDS, both, largest_error

PAGE = Path(__file__).parents[2] / "docs" / "hybrids_support.md"
BORDERS = "<!-- begin of the generated table -->", "<!-- end of the generated table -->"
BORDERS_OF_USES = "<!-- begin of the generated table of uses -->", "<!-- end of the generated table of uses -->"
TOLERANCE = 1e-3  # of float32, in which gradients of the stock delta rule are off by up to 1e-4


class Row(NamedTuple):
    """A model type in the table; `reason` is given if it is refused.

    Attributes:
        errors: The largest relative errors of the law (test_law.py) in float32 for each form of rows.
    """

    model_type: str
    layout: str
    errors: list[float]
    reason: str

    @property
    def supported(self) -> bool:
        """Whether everything holds."""
        return bool(self.errors) and max(self.errors) < TOLERANCE


def measure_errors(model_type: str) -> list[float]:
    """Of a tiny model, in a few chunks, from nothing and from random states, keys and values."""
    models = both(model_type, False, None, torch.float32)
    return [max(largest_error(*models, form, "17", kind, (True,)) for kind in ("nothing", "random")) for form in WORDS]


def measure(model_type: str) -> Row:
    """The row of a model type."""
    if model_type in REFUSED:
        return Row(model_type, "", [], REFUSED[model_type])
    return Row(model_type, SUPPORTED[model_type].state, measure_errors(model_type), "")


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    lines = [
        "| `model_type` | works | recurrent part | " + " | ".join(WORDS) + " |",
        "|---" * (len(WORDS) + 3) + "|",
    ]
    for row in rows:
        if row.reason:
            lines.append(f"| `{row.model_type}` | no: {row.reason} |" + " |" * (len(WORDS) + 1))
        else:
            works = "yes" if row.supported else "**no**"
            numbers = " | ".join(f"{error:.0e}" for error in row.errors)
            lines.append(f"| `{row.model_type}` | {works} | {row.layout} | {numbers} |")
    return "\n".join(lines)


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
    """StateX: the same logits before training, in chunks, and loaded from a checkpoint."""
    stock, model = pair(model_type)
    new: Any = expand_state(model, layers=layers, initialization="inherit")
    tokens = random_tokens(2, 33, seed=6)
    with tempfile.TemporaryDirectory() as folder:
        new.save_pretrained(folder)
        loaded: Any = load_model(folder).eval()
    logits = [
        new(input_ids=tokens).logits,
        read_in_chunks(new, tokens, (3, 1, 29))[0],
        loaded(input_ids=tokens).logits,
    ]
    return relative_error(logits, [stock(input_ids=tokens).logits] * 3)


def learned_state(model_type: str) -> float:
    """Logits and gradients from an active learned state against a passed one, also loaded from its folder and from a
    checkpoint, and logits without it."""
    stock, model = pair(model_type)
    tokens, values = random_tokens(2, 21, seed=6), map_state(Tensor.detach, random_state(model, 1))
    initial = map_state(lambda part: part.clone().requires_grad_(), values)
    rows: RecurrentState = map_state(lambda part: part.expand(2, *part.shape[1:]), initial)
    expected = model(input_ids=tokens, initial_state=rows).logits
    learned = model.add_learned_state("tried")["tried"]
    learned.set(values)
    logits = model(input_ids=tokens).logits
    of_learned = gradients(weighted_sum([logits]), parts(learned()))
    learned.set(map_state(lambda part: 2 * part, values))
    model.learned_states.set_scale("tried", 0.5)
    other = stateful(copy.deepcopy(stock))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_learned_state(f"{folder}/state")
        other.load_learned_state(f"{folder}/state")
        model.save_pretrained(f"{folder}/both")
        loaded = [each(input_ids=tokens).logits for each in (other, load_model(f"{folder}/both").eval())]
        with model.learned_states.disable_adapter():
            without = model(input_ids=tokens).logits
    return relative_error(
        [logits, *loaded, without, *of_learned],
        [*[expected] * 3, stock(input_ids=tokens).logits, *gradients(weighted_sum([expected]), parts(initial))],
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
    state = read_in_chunks(model, tokens, (65,))[1]
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


def verdicts(text: str) -> dict[str, str]:
    """Model type and its first three columns, without the measured numbers, of the table in a text."""
    lines = between(text, BORDERS).splitlines()
    rows = [line.split("|")[1:4] for line in lines if line.startswith("| `") and "model_type" not in line]
    return {cells[0].strip(): " ".join(cell.strip() for cell in cells[1:]) for cells in rows}


def between(text: str, borders: tuple[str, str]) -> str:
    """What stands between two borders; the whole text without them."""
    return text.partition(borders[0])[2].partition(borders[1])[0] or text


def main() -> None:
    """Print the tables or write them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hybrids.support",
        description="Test the state contract on a tiny random model of every recurrent model type of Transformers.",
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/hybrids_support.md")
    options = parser.parse_args()
    with quiet_transformers():
        tables = {
            BORDERS: table([measure(model_type) for model_type in sorted({*SUPPORTED, *REFUSED})]),
            BORDERS_OF_USES: table_of_uses({model_type: measure_uses(model_type) for model_type in sorted(SUPPORTED)}),
        }
    if not options.write:
        found = (f"{begin}\n{text}\n{end}" for (begin, end), text in tables.items())
        print("\n\n".join([f"Transformers {transformers.__version__}", *found]))
        return
    page = PAGE.read_text(encoding="utf-8")
    for borders, text in tables.items():
        page = page.replace(f"{borders[0]}{between(page, borders)}{borders[1]}", f"{borders[0]}\n{text}\n{borders[1]}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
