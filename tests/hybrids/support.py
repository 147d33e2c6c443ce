"""Measure on tiny random models which recurrent model types of Transformers keep the state contract.

    python -m tests.hybrids.support            print the tables, this one and that of uses.py
    python -m tests.hybrids.support --write    put them into docs/hybrids_support.md

Every number is relative to the largest entry of what it is compared with.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPPORTED
from hf_recurrent_lengthgen.hybrids.wrapping import stateful
from hf_recurrent_lengthgen.models.state_value import map_state
from tests.hybrids.measures import by_calls, random_state, random_tokens
from tests.hybrids.test_law import WORDS, both, largest_error
from tests.hybrids.tiny_models import tiny_model
from tests.hybrids.uses import measure_uses, table_of_uses

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
    generates: bool
    saves: bool
    reason: str

    @property
    def supported(self) -> bool:
        """Whether everything holds."""
        return bool(self.errors) and max(self.errors) < TOLERANCE and self.generates and self.saves


def measure_errors(model_type: str) -> list[float]:
    """Of a tiny model, in a few pieces, from nothing and from random states, keys and values."""
    models = both(model_type, False, None, torch.float32)
    return [max(largest_error(*models, form, "17", kind) for kind in ("nothing", "random")) for form in WORDS]


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
        return Row(model_type, "", [], False, False, REFUSED[model_type])
    works = generates(model_type), saves_stock(model_type)
    return Row(model_type, SUPPORTED[model_type].state, measure_errors(model_type), *works, "")


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    lines = [
        "| `model_type` | works | recurrent part | " + " | ".join(WORDS) + " | shares rows |",
        "|---" * (len(WORDS) + 4) + "|",
    ]
    for row in rows:
        if row.reason:
            lines.append(f"| `{row.model_type}` | no: {row.reason} |" + " |" * (len(WORDS) + 2))
        else:
            works = "yes" if row.supported else "**no**"
            numbers = " | ".join(f"{error:.0e}" for error in row.errors)
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
