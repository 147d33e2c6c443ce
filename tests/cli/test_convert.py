"""`lengthgen convert` and `lengthgen export`, as a person types them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.cli.main import main
from tests.checkpoints.conversion.rwkv_reference import Sizes, draw, rwkv5_shapes


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_tiny_random_model("mamba-ssm", "mamba2", tmp_path / "theirs")
    return "theirs"


def test_there_and_back(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", source, "--output", "ours", "--tokenizer", "bytes", "--training-length", "64"]
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "Converted theirs (mamba-ssm, licence not stated):" in said
    assert "training length" not in said
    assert "Saved to ours. Next: lengthgen verify ours" in said
    lineage: Any = read_lineage("ours")
    assert lineage.steps[0].command.startswith("lengthgen convert theirs --output ours --tokenizer bytes")
    config = json.loads(Path("ours/config.json").read_text())
    assert (config["training_length"], config["dtype"]) == (64, "bfloat16")
    assert main(["export", "ours", "--format", "mamba-ssm", "--output", "back"]) == 0
    assert "Exported to back, for mamba-ssm" in capsys.readouterr().out
    weights = torch.load("back/pytorch_model.bin", weights_only=True)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert main(["export", "ours", "--format", "transformers", "--output", "stock"]) == 0
    assert load_file("stock/model.safetensors").keys() == load_file("ours/model.safetensors").keys()


def test_no_tokenizer_is_reported_with_the_official_one(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", source, "--output", "ours"]) == 0
    said = capsys.readouterr().out
    assert "--tokenizer EleutherAI/gpt-neox-20b" in said
    assert "The training length of theirs is not known" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "theirs", "--output", "theirs"], "exists already and is not an empty folder"),
        (["convert", "nothing/here/at-all", "--output", "ours"], "is no folder here"),
        (["convert", "missing.pth", "--output", "ours"], "There is no file missing.pth"),
        (["export", "theirs", "--format", "mamba-ssm", "--output", "back"], "no checkpoint of this package"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["theirs"]


def test_what_a_file_does_not_say_is_reported_and_can_be_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epsilon of the heads."""
    monkeypatch.chdir(tmp_path)
    torch.save(draw(rwkv5_shapes(Sizes(16, 2, 8, 1, 0, 0, 32, 256))), "rwkv-5-ctx4096.pth")
    assert main(["convert", "rwkv-5-ctx4096.pth", "--output", "ours"]) == 0
    said = capsys.readouterr().out
    assert "assumed head_size_divisor 8. If that is wrong, give --set head_size_divisor=VALUE." in said
    assert "holds no tokenizer" in said
    assert "rwkv-6-world" not in said
    assert main(["convert", "rwkv-5-ctx4096.pth", "--output", "out", "--set", "head_size_divisor=1"]) == 0
    assert "assumed" not in capsys.readouterr().out
    assert json.loads(Path("out/config.json").read_text())["head_size_divisor"] == 1
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["convert", "rwkv-5-ctx4096.pth", "--output", "not", "--set", "head_size_divisor"])
    assert "must be NAME=VALUE" in capsys.readouterr().err
