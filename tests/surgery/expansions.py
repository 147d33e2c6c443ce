"""The expansions that tests make of tiny models."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.families import DECAYING, GROWING, Family, variant_id

RECIPES = Path(__file__).parents[2] / "hf_recurrent_lengthgen" / "recipes" / "models"
INITIALIZATIONS = ("reinit", "inherit")
every_family = pytest.mark.parametrize("family", GROWING, ids=variant_id)
every_initialization = pytest.mark.parametrize("initialization", INITIALIZATIONS)
# the delta rule cannot inherit
every_expansion = pytest.mark.parametrize(
    ("family", "initialization"),
    [(f, how) for f in GROWING for how in INITIALIZATIONS if how == "reinit" or f in DECAYING],
    ids=variant_id,
)


def grown(family: Family) -> dict[str, Any]:
    return {"state_size": 12} if "mamba" in family.name else {"num_heads": 1}
