"""Numbers of bit strings, their representations, and the error in the numbers themselves."""

import math
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_recurrent_lengthgen.data import PaddingCollator

sys.path.append(str(Path(__file__).parents[1] / "examples" / "output_representations"))
from bit_strings import REPRESENTATIONS, BitStrings, errors_by_length


def bits_of(item: dict[str, Tensor]) -> list[int]:
    tokens = item["input_ids"].tolist()
    assert (tokens[0], tokens[-1]) == (1, 2)
    assert set(tokens[1:-1]) <= {3, 4}
    return [token - 3 for token in tokens[1:-1]]


@pytest.mark.parametrize("uniform_mean", [False, True])
@pytest.mark.parametrize("quantity", ["mean", "sum", "length"])
def test_labels_are_the_numbers(quantity: Any, uniform_mean: bool) -> None:
    rows = BitStrings(quantity, (1, 6), 300, uniform_mean=uniform_mean)
    lengths = set()
    for index in range(300):
        item = rows[index]
        bits = bits_of(item)
        lengths.add(len(bits))
        expected = {"mean": sum(bits) / len(bits), "sum": sum(bits), "length": len(bits)}[quantity]
        assert item["labels"].item() == pytest.approx(expected)
        assert item["labels"].dtype == torch.float32
        assert item["labels"].shape == ()
        assert item["attention_mask"].tolist() == [1] * (len(bits) + 2)
        assert quantity != "sum" or sum(bits) > 0
    assert lengths == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("name", "number", "represented"),
    [
        ("identity", 7.0, 7.0),
        ("sqrt", 9.0, 3.0),
        ("sqrt", 0.0, 0.0),
        ("log", math.e, 1.0),
        ("log", 1.0, 0.0),
        ("inverse_sqrt", 16.0, 0.25),
        ("inverse_sqrt", 1.0, 1.0),
    ],
)
def test_representations_and_their_inverses(name: str, number: float, represented: float) -> None:
    found = REPRESENTATIONS[name].represent(torch.tensor(number, dtype=torch.float64))
    assert found.item() == pytest.approx(represented)
    recovered = REPRESENTATIONS[name].recover(torch.tensor(represented, dtype=torch.float64))
    assert recovered.item() == pytest.approx(number)


def likely(counts: Any) -> bool:
    return bool(chisquare(list(counts)).pvalue > 1e-3)


def test_strings_are_uniform_and_sums_are_those_of_strings_with_a_one() -> None:
    every = Counter(map(tuple, BitStrings("length", 3, 8000).batch(range(8000))["input_ids"].tolist()))
    assert len(every) == 8
    assert likely(every.values())
    nonzero = Counter(map(tuple, BitStrings("sum", 3, 7000).batch(range(7000))["input_ids"].tolist()))
    assert len(nonzero) == 7
    assert likely(nonzero.values())
    lengths = BitStrings("length", (1, 10), 5000).batch(range(5000))["labels"]
    assert likely(lengths.long().bincount(minlength=11)[1:].tolist())


def test_the_data_of_appendix_f_have_uniform_numbers_of_ones_in_uniform_places() -> None:
    for quantity, least in (("mean", 0), ("sum", 1)):
        rows = BitStrings(quantity, 4, 6000, uniform_mean=True).batch(range(6000))["input_ids"][:, 1:-1] - 3
        assert likely(rows.sum(1).bincount(minlength=5)[least:].tolist())
        pairs = Counter(tuple(row.tolist()) for row in rows if row.sum() == 2)
        assert len(pairs) == 6
        assert likely(pairs.values())


@pytest.mark.parametrize("uniform_mean", [False, True])
def test_rows_depend_on_seed_and_index_alone(uniform_mean: bool) -> None:
    rows = BitStrings("sum", (1, 9), 40, 3, "log", uniform_mean)
    together: Any = DataLoader(rows, batch_size=20, collate_fn=PaddingCollator())
    for number, batch in enumerate(together):
        expected = rows.batch(range(20 * number, 20 * number + 20))
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
        for place, size in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = rows[20 * number + place]
            assert torch.equal(batch["input_ids"][place, :size], alone["input_ids"])
            assert batch["input_ids"][place, size:].eq(0).all()
            assert batch["labels"][place] == alone["labels"]
    assert not torch.equal(rows.batch(range(40))["labels"], rows.resized((1, 9), 40, 4).batch(range(40))["labels"])


def test_errors_of_sums_and_means() -> None:
    class Nine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Parameter(torch.tensor(3.0))

        def forward(self, input_ids: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.output.expand(len(input_ids)))

    for quantity, representation, said in (
        ("sum", "sqrt", 9),
        ("mean", "identity", 3),
        ("sum", "inverse_sqrt", 1 / 9),
        ("sum", "log", math.exp(3)),
    ):
        task = BitStrings(quantity, representation=representation)  # type: ignore[arg-type]
        numbers = [bits_of(task.resized(5, 20, 2**40)[row]) for row in range(20)]
        values = [sum(bits) / (5 if quantity == "mean" else 1) for bits in numbers]
        expected = sum((value - said) ** 2 for value in values) / 20
        assert errors_by_length(Nine(), task, [5], 20) == {5: pytest.approx(expected, rel=1e-6)}
