"""Output alignment: rank correlations against the paper's table, scipy and counting, and the study in miniature."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment
from tests.metrics.diagnoses import diagnosed, with_part

sys.path.append(str(Path(__file__).parents[1] / "examples" / "alignment"))
from rank_correlation import late_loss, misalignment_and_loss, rank_correlation

# "Output Alignment", Table 1: training loss, misalignment, log perplexity at 16k, LongBench-E score.
TABLE = {
    "GPT-J-6B": (2.1, 3.4, 9.5, 7.8),
    "GPT-NeoX-20B": (2.3, 3.2, 9.4, 9.7),
    "Llama2-7B": (1.9, 3.4, 9.4, 8.9),
    "RandomPos": (2.2, 3.3, 8.2, 9.2),
    "Yarn-Llama-2-7B-8k": (2.0, 2.6, 3.8, 21.2),
    "Qwen-7B-8k": (1.7, 2.8, 3.2, 24.2),
    "CLEX-LLaMA-4K": (1.7, 2.4, 1.8, 32.7),
}


def column(index: int) -> dict[str, float]:
    return {name: row[index] for name, row in TABLE.items()}


def named(values: list[float]) -> dict[str, float]:
    return {f"m{index}": value for index, value in enumerate(values)}


@pytest.mark.parametrize(
    ("metric", "score", "printed"),
    [(0, 2, 0.67), (1, 2, 0.88), (1, 3, -0.95), (0, 3, -0.56)],  # the paper prints -0.59 for the last
)
def test_coefficients_are_those_of_the_paper_s_table(metric: int, score: int, printed: float) -> None:
    found = rank_correlation(column(metric), column(score))
    assert round(found.coefficient, 2) == printed
    assert found.coefficient == pytest.approx(
        stats.spearmanr(list(column(metric).values()), list(column(score).values()))[0]
    )
    assert found.models == tuple(TABLE)


def test_four_models_by_counting() -> None:
    # Ranks 1234 and 2134: 1 - 6 * 2 / (4 * 15) = 0.8. Of the 24 orders, 1 has 1.0, 3 have 0.8 (one swap of
    # neighbours), and their reverses have the negatives.
    found = rank_correlation(named([1, 2, 3, 4]), named([20, 10, 30, 40]), "loss", "score")
    assert found.coefficient == pytest.approx(0.8)
    assert found.p_value == 8 / 24
    assert (found.pairings, found.exact, found.least_p_value) == (24, True, 2 / 24)
    perfect = rank_correlation(named([1, 2, 3, 4]), named([-1, -2, -3, -9]))
    assert perfect.coefficient == pytest.approx(-1)
    assert perfect.p_value == perfect.least_p_value


def test_equal_values_share_their_rank() -> None:
    # Ranks 1.5 1.5 3 and 1 2 3; of the six orders those with the last one at an end of the second column count.
    found = rank_correlation(named([5, 5, 7]), named([1, 2, 3]))
    assert found.coefficient == pytest.approx(3**0.5 / 2)
    assert found.p_value == pytest.approx(4 / 6)


def test_many_models_are_paired_at_random_and_agree_with_the_t_test() -> None:
    generator = np.random.default_rng(0)
    one = generator.normal(size=30)
    other = one + generator.normal(size=30)
    found = rank_correlation(named(one.tolist()), named(other.tolist()))
    expected = stats.spearmanr(one, other)
    assert found.coefficient == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue, abs=3e-3)
    assert 0.001 < found.p_value < 0.1
    assert not found.exact
    assert found == rank_correlation(named(one.tolist()), named(other.tolist()))
    strongest = rank_correlation(named(one.tolist()), named(one.tolist()))
    assert strongest.p_value == strongest.least_p_value == 1 / 100_000


def test_a_diagnosis_gives_both_numbers() -> None:
    models = [
        with_part(diagnosed("other", name, harm), "misalignment", Misalignment(value, None, None, (value,)))
        for name, harm, value in (("a", 1.4, 3.0), ("b", 0.02, 2.0), ("c", 0.7, 2.5))
    ]
    with pytest.raises(ValueError, match="at least 3 models, got 2"):
        misalignment_and_loss(Diagnosis("t", (*models[:2], with_part(models[2], "misalignment", None))))
    found = misalignment_and_loss(Diagnosis("t", tuple(models)))
    assert (found.models, found.coefficient) == (("a", "b", "c"), pytest.approx(1))
    evaluation = models[0].evaluation
    curve, (start, stop) = evaluation.position_wise.coarse, evaluation.harm.last_range
    late = [(b - a, mean) for a, b, mean in zip(curve.edges, curve.edges[1:], curve.mean, strict=False) if a >= start]
    assert curve.edges[-1] == stop
    assert late_loss(evaluation) == pytest.approx(sum(w * x for w, x in late) / sum(w for w, _ in late))


ARMS = ("passed/jeffreys_1", "tbtt_zero/sce")


@pytest.mark.usefixtures("small_corpus")
@pytest.mark.slow
def test_arms_are_studied_and_the_missing_one_is_made_again(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, results = tmp_path / "out", tmp_path / "results"
    arguments = ["--tiny", "--arms", *ARMS, "--seeds", "3", "--output", output, "--results", results]
    example("alignment/run.py", *arguments)
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines() if line.startswith("seed")] == [
        f"seed 3 {name}" for name in ("base", *ARMS)
    ]
    found = [
        json.loads((results / "running" / name / "seed3.json").read_text())["measured"] for name in ("base", *ARMS)
    ]
    assert len({arm["harm_last"]["mean"] for arm in found}) == 3
    assert (results / "alignment.png").read_bytes().startswith(b"\x89PNG")

    table = printed[printed.index("| crops start") :]
    (results / "running" / ARMS[0] / "seed3.json").unlink()
    example("alignment/run.py", *arguments)
    printed = capsys.readouterr().out
    again = [line.partition(":")[0] for line in printed.splitlines() if line.startswith("seed")]
    assert again == [f"seed 3 {ARMS[0]}"]
    assert printed.endswith(table)


def test_divergences_are_those_of_the_formulas(example: Any) -> None:
    a, b = torch.randn(2, 5, 7, dtype=torch.float64)
    p, q = a.softmax(-1), b.softmax(-1)
    sce = [-(p[i] @ q[i].log() + q[i] @ p[i].log()) for i in range(5)]
    jeffreys = [(p[i] - q[i]) @ (p[i] / q[i]).log() for i in range(5)]
    assert example("alignment/run.py")["divergences"]("at", a, b) == pytest.approx(
        {"at_sce": float(sum(sce)) / 5, "at_jeffreys": float(sum(jeffreys)) / 5}
    )


def test_the_loss_after_a_context_is_that_of_the_last_bytes(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples/alignment"))
    study = example("alignment/llama.py")
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.5)).eval()
    texts, nll = torch.randint(11, (3, 17)), []
    with torch.inference_mode():
        for text, t in itertools.product(texts, range(13, 17)):  # four targets, of which the first has 5 tokens before
            halved = torch.arange(t - 8)[None] / 2
            nll.append(-model(text[None, 8:t], position_ids=halved).logits[0, -1].log_softmax(-1)[text[t]])
        found = [study["late_loss"](study["interpolated"](model, factor), texts, 8, 4) for factor in (2.0, 1.0)]
    assert found[0] == pytest.approx(torch.stack(nll).mean().item(), abs=2e-4)
    assert abs(found[0] - found[1]) > 1e-3
