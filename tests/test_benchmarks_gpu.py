"""The stages for a large GPU run in miniature on a CPU, keep what is done, and go on where they stopped."""

import json
import math
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import failure, kernels, large, report, speed
from benchmarks.gpu.stage import RESERVE, Stage
from hf_recurrent_lengthgen.trainers import INTERVENTIONS
from tests.models.test_kernels_gpu import CASES

RUN = Path(__file__).parents[1] / "benchmarks/gpu/run.py"


@pytest.fixture(autouse=True)
def _forget_the_corpus() -> Any:
    failure.streams.cache_clear()
    yield
    failure.streams.cache_clear()


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(RUN), run_name="__main__")


def stage(folder: Path, minutes: float = 8, **options: Any) -> Stage:
    return Stage("speed", folder, minutes, tiny=True, **options)


def kept(folder: Path, name: str = "speed") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["parts"]
    return found


def test_parts_with_a_result_are_kept_and_failed_ones_come_last(tmp_path: Path) -> None:
    calls: list[str] = []

    def part(name: str, result: Any) -> Any:
        calls.append(name)
        if isinstance(result, Exception):
            raise result
        return result

    def parts(**results: Any) -> dict[str, Any]:
        return {name: partial(part, name, result) for name, result in results.items()}

    first = parts(a={"x": 1}, b=RuntimeError("broken"), c=None, d={"missing": "fla"})
    assert not stage(tmp_path).run(first)
    assert calls == ["a", "b", "c", "d"]
    expected = {"a": {"x": 1}, "b": {"error": "RuntimeError: broken"}, "d": {"missing": "fla"}}
    assert kept(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]
    calls.clear()
    assert stage(tmp_path).run(parts(a={"x": 2}, b={"x": 3}, c={"x": 4}, d={"x": 5}))
    assert calls == ["c", "b"]
    assert kept(tmp_path) == expected | {"b": {"x": 3}, "c": {"x": 4}}


def test_no_part_starts_without_the_time_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def part() -> dict[str, int]:
        ran.append("a")
        return {"x": 1}

    late = stage(tmp_path, began=time.monotonic() - 8 * 60 + RESERVE + 30)
    assert not late.run({"a": part, "b": part}, seconds=31)
    assert not ran
    assert "the same command tries what is left: a, b" in capsys.readouterr().out
    assert late.run({"a": part}, seconds=29)
    assert ran == ["a"]


def test_parts_are_chosen_by_their_names(tmp_path: Path) -> None:
    chosen = stage(tmp_path, only="^(a|b), x")
    assert chosen.run({name: lambda: {"y": 1} for name in ("a, x", "b, z", "c, a, x")})
    assert list(kept(tmp_path)) == ["a, x"]


def test_an_error_is_relative_to_its_tensor_and_nan_shows() -> None:
    expected = {"logits": torch.tensor([4.0, 1.0]), "final recurrent 0": torch.ones(2), "gradient of x": torch.ones(2)}
    wrong = {**expected, "logits": torch.tensor([4.0, 1.4]), "gradient of x": torch.tensor([1.0, torch.nan])}
    wrong["gradient of y"] = expected["gradient of y"] = torch.full((2,), 3.0)
    found = kernels.errors(wrong, expected)
    assert found["outputs"] == pytest.approx(0.1, abs=1e-6)
    assert found["states"] == 0
    assert found["gradients"] == math.inf


@pytest.mark.parametrize(
    ("family", "field", "size"),
    [
        ("mamba2", "d_model", 768),
        ("mamba", "d_model", 768),
        ("gla", "hidden_size", 1024),
        ("rwkv6", "hidden_size", 1024),
    ],
)
def test_the_models_compared_have_the_same_sizes(family: str, field: str, size: int) -> None:
    small = {**speed.SIZES[family], "num_hidden_layers": 1}
    assert speed.their_settings(family, speed.made(family, small).config)[field] == size


def test_the_table_has_a_row_for_each_stage_with_results(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    results.mkdir()
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert "No stage has a result yet" in report.written_table(results, readme)
    estimate = {"mean": 0.25, "low": 0.2, "high": 0.3}
    base: dict[str, Any] = {
        "tokens": 4000,
        "parameters": 100,
        "scan": "kernel",
        "harm_last": estimate,
        "harm_range": [32, 64],
    }
    base["in_window"] = {"mean": 1.5}
    environment = {
        "device": "GPU",
        "torch": "2",
        "mamba_ssm": "2",
        "causal_conv1d": "1",
        "fla": "missing: not installed",
    }
    found: dict[str, Any] = {
        "key": {"tiny": False, "environment": environment},
        "parts": {"mamba2, base, 2 times optimal": base},
    }
    (results / "failure.json").write_text(json.dumps(found))
    report.written_table(results, readme)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "after 4,000 bytes (2 times optimal) +0.250 (+0.200 to +0.300), loss inside 1.500; it fails |" in text
    assert "fla missing: not installed |" in text


@pytest.mark.slow
def test_kernels_without_a_gpu_are_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels may be there")
    chosen = kernels.configs(32, 16, 16)
    monkeypatch.setattr(kernels, "configs", lambda *_: {name: chosen[name] for name in ("mamba2", "gla")})
    command(monkeypatch, "kernels", "--tiny", "--output", tmp_path)
    parts = kept(tmp_path, "kernels")
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 0.1)):
        for family in ("mamba2", "gla"):
            found = parts[f"{family}, {dtype}"]
            assert "scan_backend" in found["kernel"]["missing"]
            assert list(found["torch"]) == ["outputs", "states", "gradients"]
            assert all(0 < error < limit for error in found["torch"].values())
    command(monkeypatch, "tests", "--tiny", "--output", tmp_path)
    tests = kept(tmp_path, "tests")
    assert len(tests) == len(CASES)
    outcomes = {(part["outcome"], part["message"]) for part in tests.values()}
    assert outcomes == {("skipped", "Skipped: needs a CUDA device")}


@pytest.mark.slow
def test_speeds_are_measured_and_missing_competitors_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "THEIRS", {"gla": "fla", "mamba": "mamba_ssm"})
    monkeypatch.setattr(speed, "LARGE", {"mamba2": speed.LARGE["mamba2"]})
    monkeypatch.setattr(speed, "METHODS", ("tbtt",))
    command(monkeypatch, "speed", "--tiny", "--output", tmp_path)
    parts = kept(tmp_path)
    assert parts["states, gla"]["speed_ratio"] > 0
    assert parts["states, gla"]["scan"] == "torch"
    assert set(parts["StateX, mamba2"]) == {"scan", "training", "prefill", "decode", "decode_mean_ratio"}
    assert set(parts["trainer steps"]["step_ms"]) == {"plain", "tbtt"}
    assert "flash-linear-attention" in parts["fla, gla"]["missing"]


@pytest.mark.slow
def test_every_trainer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: trainer for name, trainer in INTERVENTIONS.items() if "hf_recurrent" in trainer.__module__}
    monkeypatch.setattr(large, "TRAINERS", ours | {"alignment": large.TRAINERS["alignment"]})
    command(monkeypatch, "large", "--tiny", "--output", tmp_path)
    parts = kept(tmp_path, "large")
    assert {"none", "state_passing", "tbtt", "fitted_noise", "statex", "learned", "mixed", "alignment"} <= set(parts)
    assert not {name: part for name, part in parts.items() if "rows" not in part}
    assert parts["statex"]["parameters"] > parts["none"]["parameters"]


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
def test_a_failure_study_that_is_stopped_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    command(monkeypatch, "failure", "--tiny", "--output", whole)
    limits = iter([3, 10**6])
    steps = {"left": 0}

    def left(self: Stage) -> float:  # the time is over after three steps of the base
        steps["left"] -= 1
        return float(steps["left"])

    def train(self: Any, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        steps["left"] = -1 if state.global_step == steps["limit"] else 10**6

    monkeypatch.setattr(Stage, "left", left)
    monkeypatch.setattr(failure.Stops, "on_step_begin", train, raising=False)
    for limit in limits:
        steps |= {"limit": limit, "left": 10**6}
        command(monkeypatch, "failure", "--tiny", "--output", halves)
        if limit == 3:
            assert kept(halves, "failure") == {}
            first = halves / "work/failure" / next(iter(failure.TINY)) / "base"
            assert [path.name for path in first.glob("checkpoint-*")] == ["checkpoint-4"]
    expected = kept(whole, "failure")
    assert kept(halves, "failure") == expected
    names = ("base, 0.002 times optimal", "base, 0.004 times optimal", "state_passing", "control")
    assert list(expected) == [f"{family}, {name}" for family in failure.TINY for name in names]
    for family in failure.TINY:
        arms = [halves / f"work/failure/{family}/{arm}/checkpoint-3/model.safetensors" for arm in failure.ARMS]
        assert arms[0].read_bytes() != arms[1].read_bytes()
