"""Theorem 2 of arXiv:2506.11769 beside numbers: its closed forms, the exact minimum of its loss, and trained models.

    python examples/output_representations/theorem.py        # seconds; fills the table of README.md

The model is the linear attention of its appendix B.1 (Eq. 7), which on bits has four numbers, q and kappa of a one and
of a zero. Its loss (Eq. 8) is a finite sum, which is minimized here without sampling.
"""

import json
import sys
from math import comb, sqrt
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_pages import fill, markdown

HERE = Path(__file__).resolve().parent
TRAINED, TESTED = 10, (12, 20, 30, 50)
TARGETS = {"mean": lambda ones, length: ones / length, "length": lambda _, length: length, "sum": lambda ones, _: ones}


def residuals(numbers: np.ndarray, quantity: str, length: int) -> np.ndarray:
    """Errors of Eq. 7 for strings of a length, times the root of their probability: one for each last bit and count.

    `numbers` are q', q'', kappa', kappa''; the squares of the result add up to the expected error (Eq. 12).
    """
    found = []
    for ones in range(length + 1):
        attended = (ones * numbers[2] + (length - ones) * numbers[3]) / length
        for query, ways in (
            (numbers[0], comb(length - 1, ones - 1) if ones else 0),
            (numbers[1], comb(length - 1, ones)),
        ):
            found.append(sqrt(ways / 2**length) * (query * attended - TARGETS[quantity](ones, length)))
    return np.array(found)


def least(quantity: str, trained: int) -> np.ndarray:
    """The four numbers of least loss on strings of 1 to `trained` bits (Eq. 8), the best of 20 random starts."""

    def loss(numbers: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(numbers, quantity, length) for length in range(1, trained + 1)])

    starts = np.random.default_rng(0).normal(0, 3, (20, 4))
    return min(
        (least_squares(loss, start, xtol=1e-12, ftol=1e-12) for start in starts), key=lambda found: found.cost
    ).x


def closed_form(quantity: str, trained: int, tested: int) -> float:
    """Eq. 15 for lengths, Eq. 20 for sums, Eq. 22 for means."""
    harmonic = sum(1 / n for n in range(1, trained + 1))
    return {
        "mean": 0.0,
        "length": (tested - (trained + 1) / 2) ** 2,
        "sum": (tested + 1) / (2 * tested) * (trained * (trained + 3) / (2 * (trained + harmonic)) - tested) ** 2,
    }[quantity]


def main() -> None:
    stages = json.loads((HERE / "output_representations.json").read_text())["stages"]
    rows = []
    for quantity in TARGETS:
        numbers = least(quantity, TRAINED)
        exact = [float((residuals(numbers, quantity, length) ** 2).sum()) for length in TESTED]
        trained = stages[f"{quantity}_none_identity"].values()
        nope = [sum(seed["errors"][str(length)] for seed in trained) / len(trained) for length in TESTED]
        forms = [closed_form(quantity, TRAINED, length) for length in TESTED]
        for what, values in (("closed form", forms), ("least loss, exactly", exact), ("NoPE, trained", nope)):
            rows.append([quantity, what, *(f"{value:.3g}" for value in values)])
    table = markdown(["predicted", "error", *(f"{length} bits" for length in TESTED)], rows)
    fill(HERE / "README.md", {"theorem": table})
    print(table)


if __name__ == "__main__":
    main()
