"""The table of uses says what wrapped models can be used for."""

import re

import pytest

from hf_recurrent_lengthgen.checkpoints.loading import quiet_transformers
from hf_recurrent_lengthgen.hybrids.registry import SUPPORTED
from tests.hybrids import support
from tests.hybrids.uses import USES, measure_uses

QUICK = {"bamba", "lfm2_moe"}
TYPES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(SUPPORTED)]


def committed() -> dict[str, list[str]]:
    """Cells by model type; "yes" for a measured error, the reason for a refusal."""
    text = support.between(support.PAGE.read_text(encoding="utf-8"), support.BORDERS_OF_USES)
    reasons = dict(re.findall(r"^(\d+)\. (.*)\.$", text, flags=re.MULTILINE))
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, flags=re.MULTILINE)
    return {
        name: [reasons[cell.strip()[4:-1]] if "no" in cell else "yes" for cell in cells.split("|")]
        for name, cells in rows
        if name != "model_type"
    }


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_is_of_the_uses_in_the_table(model_type: str) -> None:
    with quiet_transformers():
        found = dict(zip(USES, measure_uses(model_type), strict=True))
    assert {use: cell if isinstance(cell, str) else "yes" for use, cell in found.items()} == dict(
        zip(USES, committed()[model_type], strict=True)
    )
    wrong = {use: cell for use, cell in found.items() if not isinstance(cell, str) and not cell < support.TOLERANCE}
    assert not wrong


def test_all_types_are_in_the_table() -> None:
    assert committed().keys() == SUPPORTED.keys()
