"""Processes that read texts together measure what one process measures."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.metrics import Comparison, EvaluationSettings, evaluate_model, reading_together, stream_nll
from tests.evaluation.reading_in_processes import PROCESSES, measured
from tests.hybrids.tiny_models import tiny_model
from tests.models.families import MAMBA2, build, random_tokens
from tests.versions import needs_hybrids

CARD = Path(__file__).parents[2] / "model_cards" / "mamba2-base"


@pytest.mark.slow
def test_all_processes_measure_what_one_measures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.evaluation.reading_in_processes", str(tmp_path / "found")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = measured()
    for rank in range(PROCESSES):
        found = torch.load(tmp_path / f"found.{rank}")
        assert found.keys() == expected.keys()
        for name, parts in expected.items():
            for one, other in zip(found[name], parts, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_the_command_starts_the_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_recurrent_lengthgen.cli.main", "evaluate", str(CARD)]
    settings = ["--sequences", "2", "--length", "512"]
    for name, further in {"one": ["--no-cache"], "two": ["--context-parallel", "2"]}.items():
        arguments = [*settings, *further, "--output", str(tmp_path / name)]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("Report: ") == 1, done.stdout
    harms = [
        read_result(tmp_path / name / "result.json", Comparison).models[0].evaluation.harm for name in ("one", "two")
    ]
    torch.testing.assert_close(*(torch.tensor(harm.last.mean) for harm in harms), rtol=0, atol=1e-4)


def test_a_cache_of_results_is_refused(group: Any, tmp_path: Path) -> None:
    """Processes that find a result in it would leave the others waiting."""
    model, tokens, cache = build(MAMBA2), random_tokens(2, 33).numpy(), ResultCache(tmp_path)
    with reading_together(group), pytest.raises(ValueError, match="keep no results: leave the cache out"):
        evaluate_model(model, tokens, 8, settings=EvaluationSettings(progress=False), cache=cache)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(
            lambda: stateful(tiny_model("qwen3_next")), "keeps a cache of keys", marks=needs_hybrids, id="hybrid"
        ),
        pytest.param(
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=29, n_embd=8, n_layer=1, n_head=1)),
            "carries no state",
            id="attention",
        ),
    ],
)
def test_models_that_keep_keys_are_refused(group: Any, model: Any, message: str) -> None:
    with reading_together(group), pytest.raises(ValueError, match=message):
        stream_nll(model(), torch.ones(1, 9).long(), progress=False)
