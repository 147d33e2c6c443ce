"""Verification of a checkpoint by itself: in a clean process, in pieces, its files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.checkpoints.records import (
    Check,
    Verification,
    read_verification,
    verified_files,
    write_verification,
)
from hf_recurrent_lengthgen.checkpoints.verification import verify_checkpoint
from hf_recurrent_lengthgen.checkpoints.verification.verify import pieces_of
from hf_recurrent_lengthgen.cli import verify as command
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.models import StatefulMambaConfig, StatefulMambaForCausalLM

from .conftest import SIZES, add_to_code, change_config, change_weight

STALE = Verification({}, (Check("logits", "nothing", 1, 0.0, 0.0),), {})


@pytest.mark.slow
@pytest.mark.usefixtures("new_process")
def test_a_sound_checkpoint_passes_and_says_so(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint), "--length", "520"]) == 0
    found = read_verification(checkpoint)
    assert found is not None
    assert found.passed
    assert found.files == verified_files(checkpoint)
    assert {check.what for check in found.checks} == {
        *("logits", "final states", "state parts of a wrong shape", "logits in pieces", "final states in pieces"),
        *("NaN or infinite values", "token ids beyond the vocabulary"),
    }
    assert "StatefulMamba2ForCausalLM without this package" in found.checks[0].against
    shown = capsys.readouterr().out
    assert re.search(r"^logits +Stateful\S+ without this package +520 +\S+ +1e-05 +ok$", shown, re.MULTILINE)
    assert "All 7 checks passed" in shown


@pytest.mark.slow
def test_a_checkpoint_that_is_kept_without_code_gets_it(checkpoint: Path) -> None:
    code = {path.name: path.read_bytes() for path in checkpoint.glob("*.py")}
    for name in code:
        (checkpoint / name).unlink()
    assert code
    assert verify_checkpoint(checkpoint).passed
    assert {path.name: path.read_bytes() for path in checkpoint.glob("*.py")} == code


def test_code_that_computes_something_else_is_caught(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_verification(checkpoint, STALE)
    add_to_code(checkpoint, "layers_mixer.py", "return rms_norm(x,", "return 1.001 * rms_norm(x,")
    with pytest.raises(ValueError, match=r"code that differs from the installed package \(layers_mixer.py\)"):
        verify_checkpoint(checkpoint)
    assert read_verification(checkpoint) == STALE  # nothing was found out
    assert main(["verify", str(checkpoint), "--trust-remote-code", "--length", "9"]) == 1
    shown = capsys.readouterr().out
    assert "not verified: logits, final states failed. It has no verification.json now" in shown
    assert read_verification(checkpoint) is None


@pytest.mark.slow
@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("name", ["tokenizer_config.json", "layers_mixer.py"])
def test_a_missing_file_is_caught(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    write_verification(checkpoint, STALE)
    message = (
        "has no tokens|does not work where|does not load"
        if "tokenizer" in name
        else "does not work where .*layers_mixer"
    )
    with pytest.raises(ValueError, match=message):
        verify_checkpoint(checkpoint, length=9)
    assert read_verification(checkpoint) is None


def test_damaged_weights_are_named_and_leave_no_verification(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    write_verification(checkpoint, STALE)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged .*: copy or download it again"):
        verify_checkpoint(checkpoint, length=9)
    assert read_verification(checkpoint) is None


@pytest.mark.slow
def test_weights_that_do_not_fit_are_named(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"do not fit its config.json, missing: .*layers\.2"):
        verify_checkpoint(checkpoint, length=9)


@pytest.mark.slow
def test_a_vocabulary_below_the_tokenizer_is_caught(checkpoint: Path) -> None:
    change_config(checkpoint, vocab_size=300)
    for name in ("backbone.embeddings.weight", "lm_head.weight"):
        change_weight(checkpoint, name, lambda weight: weight[:300].clone())
    found = verify_checkpoint(checkpoint, length=9)
    assert [(c.what, c.difference) for c in found.checks if not c.passed] == [("token ids beyond the vocabulary", 84)]


@pytest.mark.slow
def test_weights_that_overflow_are_caught(checkpoint: Path) -> None:
    change_weight(checkpoint, "backbone.norm_f.weight", lambda weight: weight * float("nan"))
    found = verify_checkpoint(checkpoint, length=9)
    assert "NaN or infinite values" in [check.what for check in found.checks if not check.passed]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_any_dtype_are_computed_with_in_full_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)).to(dtype).save_pretrained(tmp_path)
    found = verify_checkpoint(tmp_path, dtype="float64")
    assert found.passed
    assert max(check.difference for check in found.checks) < 1e-12
    assert not any("token ids" in check.what for check in found.checks)


@pytest.mark.slow
def test_a_model_of_transformers_is_loaded_by_its_own_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**SIZES)).save_pretrained(tmp_path)
    found = verify_checkpoint(tmp_path)
    assert found.passed
    assert found.checks[0].against == "MambaForCausalLM without this package"
    assert [check.what for check in found.checks][1:] == [
        *("logits in pieces", "final states in pieces", "NaN or infinite values"),
    ]


@pytest.mark.parametrize("length", [2, 3, 4, 9, 66, 67, 130, 131, 195, 196, 600])
def test_pieces_begin_with_one_token_and_add_up(length: int) -> None:
    pieces = pieces_of(length)
    assert sum(pieces) == length
    assert min(pieces) == pieces[0] == 1
    assert len(pieces) >= 2


def test_what_cannot_be_verified_is_refused_with_the_reason(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no folder here.*hf download"):
        verify_checkpoint("user/name")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        verify_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="Give a length of 2 tokens or more, got 1"):
        verify_checkpoint(checkpoint, length=1)
    with pytest.raises(ValueError, match='dtype must be "float32" or "float64"'):
        verify_checkpoint(checkpoint, dtype="bfloat16")  # type: ignore[arg-type]
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="lengthgen merge"):
        verify_checkpoint(checkpoint)
    for config in ({"d_model": 8, "n_layer": 1}, {"model_type": "gated_deltanet"}):  # of mamba-ssm and of fla
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="convert it with lengthgen convert"):
            verify_checkpoint(tmp_path)


def test_the_command_tells_of_the_code_that_it_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def adding(checkpoint: str, **_: Any) -> Verification:
        (Path(checkpoint) / "modeling.py").touch()
        return Verification({}, (), {})

    monkeypatch.setattr(command, "verify_checkpoint", adding)
    for told in (1, 0):
        command.run([str(tmp_path)])
        assert capsys.readouterr().out.count("Added the code of its model class, 1 files") == told
