"""The study of output alignment runs in miniature, arm by arm, and continues where it was stopped."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parents[1] / "examples/alignment"
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


@pytest.fixture
def llama(example: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return partial(example, "alignment/llama.py")


def test_the_loss_after_a_context_is_that_of_the_last_bytes(llama: Any) -> None:
    study = llama()
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
