"""Measure on tiny random models which recurrent model types of Transformers keep the state contract.

    python -m tests.hybrids.support            print the tables, this one and that of uses.py
    python -m tests.hybrids.support --write    put them into docs/hybrids_support.md

Every number compares with the stock model reading 65 tokens at once, except where it says otherwise, and is relative
to the largest entry of what it is compared with.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.hybrids.calls import cache_argument
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED
from hf_recurrent_lengthgen.hybrids.wrapping import stateful
from hf_recurrent_lengthgen.models.state_value import map_state
from tests.hybrids.measures import (
    by_calls,
    gradients,
    pair,
    parts,
    random_state,
    random_tokens,
    read_in_pieces,
    relative_error,
    state_of_stock_cache,
    weighted_sum,
    with_checkpointing,
)
from tests.hybrids.padded_rows import measure_rows
from tests.hybrids.tiny_models import tiny_model
from tests.hybrids.uses import measure_uses, table_of_uses

PAGE = Path(__file__).parents[2] / "docs" / "hybrids_support.md"
BORDERS = "<!-- begin of the generated table -->", "<!-- end of the generated table -->"
BORDERS_OF_USES = "<!-- begin of the generated table of uses -->", "<!-- end of the generated table of uses -->"
PIECES = (3, 1, 59, 2)
TOLERANCE = 1e-3
TOLERANCE_OF_ROWS = 1e-4  # of float32 in the stock scans, whose gradients of A are off by up to 4e-5


class Errors(NamedTuple):
    """Largest relative errors of a model type.

    Attributes:
        outputs: Logits read in pieces, keys and values carried.
        states: The state after them, against the stock cache.
        gradients: Of the inputs and all parameters, through the states, in training mode.
        initial: Gradients of a given initial state and of what follows it, in pieces against at once.
        checkpointed: Outputs, states and gradients of the public call with activation checkpointing against without.
    """

    outputs: float
    states: float
    gradients: float
    initial: float
    checkpointed: float


class Row(NamedTuple):
    """A model type in the table; `errors` is None and `reason` is given if it is refused.

    Attributes:
        rows: The largest errors of rows with padding, and of packed rows, against their sequences alone: logits,
            final states, and gradients of embeddings, initial states and parameters; None if they are refused.
    """

    model_type: str
    layout: str
    errors: Errors | None
    rows: tuple[float, float] | None
    generates: bool
    saves: bool
    reason: str

    @property
    def supported(self) -> bool:
        """Whether everything holds."""
        if self.errors is None or max(self.errors) > TOLERANCE or max(self.rows or (0.0,)) > TOLERANCE_OF_ROWS:
            return False
        return self.generates and self.saves


def measure_errors(model_type: str, pieces: tuple[int, ...] = PIECES, **changes: Any) -> Errors:
    """Largest errors of a tiny model of this type."""
    stock, model = pair(model_type, **changes)
    tokens = random_tokens(2, sum(pieces))
    with torch.no_grad():
        cache = getattr(stock(input_ids=tokens, use_cache=True), cache_argument(model))
    expected_state = state_of_stock_cache(model, cache)

    def run(read: Callable[[Tensor], tuple[Tensor, list[Tensor]]], owner: Any, leaves: list[Tensor]) -> list[Tensor]:
        embeds = owner.get_input_embeddings()(tokens).detach().requires_grad_()
        logits, final = read(embeds)
        return [logits, *final, *gradients(weighted_sum([logits, *final]), [embeds, *leaves, *owner.parameters()])]

    stock.train(), model.train()
    whole = run(lambda x: (stock(inputs_embeds=x, use_cache=False).logits, []), stock, [])
    split = run(lambda x: (read_in_pieces(model, x, pieces)[0], []), model, [])
    state = parts(read_in_pieces(model, tokens, pieces)[1])

    initial = random_state(model, 2)

    def from_initial(lengths: tuple[int, ...]) -> Callable[[Tensor], tuple[Tensor, list[Tensor]]]:
        def read(embeds: Tensor) -> tuple[Tensor, list[Tensor]]:
            logits, final = read_in_pieces(model, embeds, lengths, initial)
            return logits, parts(final)

        return read

    def public(embeds: Tensor) -> tuple[Tensor, list[Tensor]]:
        output = model(inputs_embeds=embeds, initial_state=initial, output_final_state=True)
        return output.logits, parts(output.final_state)

    started_split, started_whole = (
        run(from_initial(lengths), model, parts(initial)) for lengths in (pieces, (sum(pieces),))
    )
    plain = run(public, model, parts(initial))
    checkpointed = run(public, with_checkpointing(model), parts(initial))
    return Errors(
        outputs=relative_error(split[:1], whole[:1]),
        states=relative_error(state, expected_state),
        gradients=relative_error(split[1:], whole[1:]),
        initial=relative_error(started_split, started_whole),
        checkpointed=relative_error(checkpointed, plain),
    )


def generates(model_type: str) -> bool:
    """Whether greedy `generate` from a state picks the tokens that repeated calls from that state pick."""
    model = stateful(tiny_model(model_type))
    state = map_state(Tensor.detach, random_state(model, 1))
    prompt = random_tokens(1, 4, seed=4)
    generated = model.generate(prompt, initial_state=state, max_new_tokens=5, do_sample=False, eos_token_id=None)
    return torch.equal(generated[:, 4:], by_calls(model, prompt, 5, initial_state=state))


def saves_stock(model_type: str) -> bool:
    """Whether the saved checkpoint is the stock one, which the stock class reads."""
    stock: Any = tiny_model(model_type)
    with tempfile.TemporaryDirectory() as folder:
        stateful(copy.deepcopy(stock)).save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    same_weights = stock.state_dict().keys() == loaded.state_dict().keys() and all(
        torch.equal(value, loaded.state_dict()[key]) for key, value in stock.state_dict().items()
    )
    return same_weights and type(loaded) is type(stock)


def measure(model_type: str) -> Row:
    """The row of a model type."""
    if model_type in REFUSED:
        return Row(model_type, "", None, None, False, False, REFUSED[model_type])
    layout = SUPPORTED[model_type].state
    errors = measure_errors(model_type)
    rows = measure_rows(model_type)
    return Row(model_type, layout, errors, rows, generates(model_type), saves_stock(model_type), "")


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    lines = [
        "| `model_type` | works | recurrent part | outputs | states | gradients | initial state | checkpointed "
        "| padding | packing | shares rows |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.errors is None:
            lines.append(f"| `{row.model_type}` | no: {row.reason} | | | | | | | | | |")
        else:
            works = "yes" if row.supported else "**no**"
            padded = ["no", "no"] if row.rows is None else [f"{error:.0e}" for error in row.rows]
            numbers = " | ".join([*(f"{error:.0e}" for error in row.errors), *padded])
            shares = "yes" if SUPPORTED[row.model_type].shares else "no"
            lines.append(f"| `{row.model_type}` | {works} | {row.layout} | {numbers} | {shares} |")
    return "\n".join(lines)


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
