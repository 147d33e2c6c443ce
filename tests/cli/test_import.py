"""`--import`: a metric of a user's file is measured, cached until the file changes, and read by other commands."""

import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen import hub_access
from hf_recurrent_lengthgen.checkpoints import loading
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.metrics.parts import PARTS, register_metric
from tests.cli.conftest import measured

METRIC = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
METRIC = METRIC.partition("```python\n")[2].partition("```")[0]
DIAGNOSE = "from hf_recurrent_lengthgen.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_the_metric_of_the_page_is_measured_from_the_command_line_and_read_by_the_card(
    checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "my_metric.py", tmp_path / "out"

    def run(*arguments: Any) -> str:
        words = [sys.executable, "-c", DIAGNOSE, *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    texts = ("--data", text_file, "--split", "train", "--sequences", 3, "--length", 64)
    line = ("diagnose", checkpoint, *texts, "--import", file, "--parts", "entropy", "--output", out)
    file.write_text(METRIC)
    assert "Entropy" in run(*line)
    [model] = json.loads((out / "result.json").read_text())["models"]
    assert model["parts"]["entropy"]["kind"] == "entropy"
    assert "Results taken from the cache" in run(*line)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    run("card", copy, "--results", out / "result.json", "--import", file)
    assert "Entropy" in (copy / "README.md").read_text()
    file.write_text(METRIC.replace(".item())", ".item() + 100)"))
    run(*line)
    [changed] = json.loads((out / "result.json").read_text())["models"]
    was, now = (one["parts"]["entropy"]["nats"] for one in (model, changed))
    assert now == pytest.approx(was + 100, abs=1e-4)  # not the value in the cache


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "no_such_module",
            "no_such_module: there is no module of this name: give a Python file, such as my_metric.py",
        ),
        ("{folder}/none.py", "give a Python file that exists"),
        ("{folder}/json.py", "not called as another module"),
        ("{folder}/needs.py", "No module named 'something_else'"),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "diagnose", "retrieve", "accuracy"])
def test_what_cannot_be_imported_is_refused_with_what_is_allowed(
    command: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").touch()
    (tmp_path / "needs.py").write_text("import something_else")
    if "needs" in value:
        with pytest.raises(ModuleNotFoundError, match=message):  # a fault of the user's file has its traceback
            main([command, "m", "--import", value.format(folder=tmp_path)])
        sys.modules.pop("needs")
        return
    assert main([command, "m", "--import", value.format(folder=tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_a_metric_does_not_replace_another_one_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_recurrent_lengthgen.metrics.parts"], "PARTS", dict(PARTS))
    register_metric(PARTS["states"])  # a cell that runs again
    with pytest.raises(ValueError, match="a metric 'states' already"):
        register_metric(replace(PARTS["states"], compute=lambda _: None))


@pytest.mark.parametrize("name", ["./nowhere", "nowhere/", "owner/nowhere", "nowhere"])
def test_a_folder_that_does_not_exist_fails_at_once_without_network(
    name: str, monkeypatch: pytest.MonkeyPatch, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: Any) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(hub_access, "getproxies", dict)
    monkeypatch.setattr(hub_access.socket, "getaddrinfo", unknown)
    assert measured("evaluate", text_file, tmp_path / "out", name) == 1
    said = capsys.readouterr().err
    assert f"{name} is no folder here" in said
    assert ("cannot be reached" in said) == (name in ("owner/nowhere", "nowhere"))


def test_a_refused_type_lists_each_supported_one_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(ValueError, match="RWKV-4 is superseded") as refused:
        loading.load_language_model(str(tmp_path))
    assert str(refused.value).count(" mamba2,") == 1


def test_a_checkpoint_without_tokenizer_is_referred_to_bytes(stock_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer bytes"):
        loading.load_tokenizer(str(stock_checkpoint))
