"""Numbers of bit strings as outputs: strings, representations, the Transformer against loops, and the study."""

import itertools
import json
import math
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2Model

sys.path.append(str(Path(__file__).parents[1] / "examples" / "output_representations"))
from baselines import POSITIONS, DecoderTransformer, Positions, ScalarRegression
from bit_strings import REPRESENTATIONS, BitStrings, errors_by_length

FOLDER = Path(__file__).parents[1] / "examples" / "output_representations"
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}


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


def transformer(positions: Positions) -> DecoderTransformer:
    torch.manual_seed(0)
    model = DecoderTransformer(7, positions, max_length=12, **SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def norm(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    centered = x - x.mean()
    scaled: Tensor = centered / (centered.square().mean() + 1e-5).sqrt() * layer.weight + layer.bias
    return scaled


def turned(vector: Tensor, place: int) -> Tensor:
    """RoPE one pair after the other."""
    out = torch.empty_like(vector)
    half = len(vector) // 2
    for i in range(half):
        angle = place * 10000 ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


def by_hand(model: DecoderTransformer, tokens: list[int]) -> Tensor:
    """One token, one head and one earlier token after the other."""
    x = [model.embeddings.weight[token] for token in tokens]
    if model.positions == "learned":
        x = [vector + model.position_embeddings.weight[place] for place, vector in enumerate(x)]
    for block in model.layers:
        normed = [norm(vector, block.attention_norm) for vector in x]
        parts = [(block.in_proj.weight @ vector + block.in_proj.bias).view(3, 2, 8) for vector in normed]
        for t in range(len(x)):
            heads = []
            for h in range(2):
                scores = []
                for s in range(t + 1):
                    query, key = parts[t][0, h], parts[s][1, h]
                    if model.positions == "rope":
                        query, key = turned(query, t), turned(key, s)
                    score = query @ key / math.sqrt(8)
                    if model.positions == "alibi":
                        score = score - (t - s) * (1 / 16, 1 / 256)[h]  # 2^-4 and 2^-8 for two heads
                    scores.append(score)
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(weight * parts[s][2, h] for s, weight in enumerate(weights)))
            x[t] = x[t] + block.out_proj.weight @ torch.cat(heads) + block.out_proj.bias
            inner = block.mlp[0].weight @ norm(x[t], block.mlp_norm) + block.mlp[0].bias
            x[t] = x[t] + block.mlp[2].weight @ (inner * (1 + torch.erf(inner / 2**0.5)) / 2) + block.mlp[2].bias
    return torch.stack([norm(vector, model.norm) for vector in x])


@pytest.mark.parametrize("positions", POSITIONS)
@torch.no_grad()
def test_hidden_states_are_those_of_a_loop(positions: Positions) -> None:
    model = transformer(positions)
    tokens = [3, 1, 4, 1, 5, 6]
    found = model(torch.tensor([tokens, [0] * 6])).last_hidden_state[0]
    torch.testing.assert_close(found, by_hand(model, tokens), rtol=1e-4, atol=1e-5)


def mamba2() -> StatefulMamba2Model:
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 1}
    return StatefulMamba2Model(StatefulMamba2Config(vocab_size=5, **sizes))


@pytest.mark.parametrize("backbone", ["none", "learned", "rope", "alibi", "mamba2"])
def test_padding_changes_no_prediction(backbone: str) -> None:
    torch.manual_seed(0)
    rows = BitStrings("length", (1, 6), 9)
    model = (
        ScalarRegression(mamba2(), 8) if backbone == "mamba2" else ScalarRegression(transformer(backbone), 16)  # type: ignore[arg-type]
    )
    batch = rows.batch(range(9))
    assert len(set(batch["attention_mask"].sum(1).tolist())) > 2
    found = model(**batch)
    alone = torch.cat([model(input_ids=rows[row]["input_ids"][None]).logits for row in range(9)])
    torch.testing.assert_close(found.logits, alone, rtol=1e-4, atol=1e-5)
    by_hand = sum((alone[row] - rows[row]["labels"]) ** 2 for row in range(9)) / 9
    torch.testing.assert_close(found.loss, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backbone", ["alibi", "mamba2"])
def test_trainer_trains_and_evaluates_it(backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (
        ScalarRegression(mamba2(), 8)
        if backbone == "mamba2"
        else ScalarRegression(DecoderTransformer(5, "alibi", **SIZES), 16)
    )
    before = {name: value.clone() for name, value in model.named_parameters()}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, learning_rate=3e-2, per_device_train_batch_size=32, report_to="none", use_cpu=True
    )
    data = BitStrings("length", (1, 5), 2000)
    trainer = Trainer(
        model, arguments, PaddingCollator(), train_dataset=data, eval_dataset=data.resized((1, 5), 64, 2**40)
    )
    untrained = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < untrained / 2
    assert [name for name, value in model.named_parameters() if torch.equal(before[name], value)] == []
    assert errors_by_length(model, data, [3], 16)[3] < untrained
    trainer.save_model()
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_other_training_lengths(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[int, set[int]] = {}
    original = BitStrings._rows

    def spy(self: BitStrings, rows: Any, lengths: Any) -> Any:
        if self.seed == 4:  # not those of the test
            read.setdefault(self.longest, set()).update(lengths.tolist())
        return original(self, rows, lengths)

    monkeypatch.setattr(BitStrings, "_rows", spy)
    example("output_representations/run.py", "--tiny", "--output", tmp_path, "--seeds", 4, "--longest", 3, 20)
    assert max(read[3]) <= 3
    assert 10 < max(read[20]) <= 20
    stages = json.loads((tmp_path / "training_lengths.json").read_text())["stages"]
    assert list(stages) == [f"{q}_none_identity_to{n}" for q in ("sum", "length") for n in (3, 20)]
    inside = statistics.fmean(stages["sum_none_identity_to3"]["4"]["errors"][length] for length in ("1", "2"))
    assert f"| sum, 1 to 3 bits | NoPE | y | 4 | {inside:.2g} " in (tmp_path / "training_lengths.md").read_text()
    assert (tmp_path / "training_lengths.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        example("output_representations/run.py", "--tiny", "--output", tmp_path, "--longest", 20, 50)


def test_the_table_holds_the_numbers_of_the_result_file() -> None:
    page = (FOLDER / "README.md").read_text()
    table = page.partition("<!-- table -->\n")[2].partition("<!-- end -->")[0].splitlines()[2:]
    stages = json.loads((FOLDER / "output_representations.json").read_text())["stages"]
    assert len(table) == len(stages) == 19
    for line, (name, seeds) in zip(table, stages.items(), strict=True):
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        assert cells[0].startswith(name.partition("_")[0])
        assert cells[3] == ", ".join(seeds) == "0, 1, 2"
        for cell, length in zip(cells[5:], (12, 20, 30, 50), strict=True):
            errors = [found["errors"][str(length)] for found in seeds.values()]
            numbers = [float(number) for number in re.findall(r"[\d.]+(?:e[+-]\d+)?", cell)]
            assert numbers == [float(f"{x:.2g}") for x in (statistics.fmean(errors), min(errors), max(errors))]


@pytest.mark.parametrize("quantity", ["mean", "length", "sum"])
def test_the_loss_of_theorem_2_is_that_of_linear_attention_on_all_strings(quantity: str, example: Any) -> None:
    study = example("output_representations/theorem.py")
    one, zero, length = (0.7, 1.3), (-0.4, 2.1), 5  # q and kappa of a one, and of a zero
    errors = []
    for bits in itertools.product((0, 1), repeat=length):
        query = (one if bits[-1] else zero)[0]
        attended = sum(query * (one if bit else zero)[1] for bit in bits) / length  # Eq. 7 of arXiv:2506.11769
        truth = {"mean": sum(bits) / length, "length": length, "sum": sum(bits)}[quantity]
        errors.append((attended - truth) ** 2)
    found = study["residuals"](np.array([one[0], zero[0], one[1], zero[1]]), quantity, length)
    assert (found**2).sum() == pytest.approx(sum(errors) / 2**length)


def test_lengths_have_the_closed_form_and_sums_half_of_the_printed_one(example: Any) -> None:
    study = example("output_representations/theorem.py")
    assert study["closed_form"]("length", 10, 30) == 24.5**2
    best = study["least"]("length", 10)
    assert (study["residuals"](best, "length", 30) ** 2).sum() == pytest.approx(24.5**2, rel=1e-3)
    harmonic = 7381 / 2520
    gamma = 130 / (2 * (10 + harmonic))
    ones = study["residuals"](np.array([gamma, gamma, 1.0, 0.0]), "sum", 30)  # kappa of a zero is 0, as in Eq. 16
    assert (ones**2).sum() == pytest.approx(study["closed_form"]("sum", 10, 30) / 2)


def test_the_table_of_theorem_2_has_the_closed_forms() -> None:
    [part] = re.findall(r"<!-- theorem -->\n(.*?)<!-- end -->", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    assert "| length | closed form | 42.2 | 210 | 600 | 1.98e+03 |" in part  # 6.5, 14.5, 24.5 and 44.5 squared
