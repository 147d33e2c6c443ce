"""Verification of a checkpoint by itself: in a clean process, in chunks, its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.checkpoints.records import (
    Check,
    Verification,
    read_verification,
    verified_files,
    write_verification,
)
from hf_recurrent_lengthgen.checkpoints.verification import verify_checkpoint
from hf_recurrent_lengthgen.checkpoints.verification.verify import difference
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.models import StatefulMambaConfig, StatefulMambaForCausalLM
from tests.hybrids.tiny_models import tiny_model

from .conftest import SIZES, add_to_code, change_config, change_weight

STALE = Verification({}, (Check("logits", "nothing", 1, 0.0, 0.0),), {})
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "expected", "apart"),
    [
        ([0.0, 0.5], [0.0, 0.25], 0.25),
        ([-40.0, 8.0], [-40.0, 0.0], 0.2),  # relative to 40
        ([1.0, NAN], [1.0, NAN], INF),
        ([1.0, 1.0], [1.0, INF], INF),
        ([1.0], [1.0, 1.0], INF),
        ([], [], 0.0),
    ],
)
def test_a_difference_is_absolute_up_to_values_of_one_and_relative_above(
    actual: list[float], expected: list[float], apart: float
) -> None:
    assert difference(torch.tensor(actual), torch.tensor(expected)) == pytest.approx(apart)


@pytest.mark.slow
@pytest.mark.usefixtures("new_process")
def test_a_sound_checkpoint_passes_gets_code_and_says_so(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {path.name: path.read_bytes() for path in checkpoint.glob("*.py")}
    for name in code:
        (checkpoint / name).unlink()
    assert main(["verify", str(checkpoint), "--length", "520"]) == 0
    verification: Any = read_verification(checkpoint)
    assert verification.files == verified_files(checkpoint)
    assert [check.what for check in verification.checks] == ["logits", "final states", "gradients"]
    assert {path.name: path.read_bytes() for path in checkpoint.glob("*.py")} == code != {}
    shown = " ".join(capsys.readouterr().out.split())
    assert "logits the folder without this package 520 " in shown
    assert "All 3 checks passed" in shown


@pytest.mark.slow
def test_code_that_computes_something_else_is_caught(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_verification(checkpoint, STALE)
    normed = "rms_norm(x, x.shape[-1:], self.weight, "
    add_to_code(checkpoint, "layers_mixer.py", f"return {normed}", f"return 1.001 * {normed}")
    with pytest.raises(ValueError, match=r"code that differs from the installed package \(layers_mixer.py\)"):
        verify_checkpoint(checkpoint)
    assert read_verification(checkpoint) == STALE  # nothing was found out
    assert main(["verify", str(checkpoint), "--trust-remote-code", "--length", "9"]) == 1
    shown = capsys.readouterr().out
    assert "not verified: logits, final states, gradients failed. It has no verification.json now" in shown
    assert read_verification(checkpoint) is None


@pytest.mark.slow
def test_code_that_drops_the_state_is_caught(checkpoint: Path) -> None:
    old = "if initial_state is not None:\n            initial_state = check_state("
    add_to_code(checkpoint, "modeling_stateful.py", old, old.replace("initial_state is not None", "False"))
    checks = verify_checkpoint(checkpoint, length=9, trust_remote_code=True).checks
    assert [check.what for check in checks if not check.passed] == ["logits", "final states"]


@pytest.mark.slow
@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize(
    ("name", "message"),
    [("tokenizer_config.json", "does not work where"), ("layers_mixer.py", "does not work where .*layers_mixer")],
)
def test_a_missing_file_is_caught(checkpoint: Path, name: str, message: str) -> None:
    (checkpoint / name).unlink()
    write_verification(checkpoint, STALE)
    with pytest.raises(ValueError, match=message):
        verify_checkpoint(checkpoint, length=9)
    assert read_verification(checkpoint) is None


def test_damaged_weights_are_named_and_leave_no_verification(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    write_verification(checkpoint, STALE)
    with pytest.raises(ValueError, match="are damaged, copy or download them again"):
        verify_checkpoint(checkpoint, length=9)
    assert read_verification(checkpoint) is None


@pytest.mark.slow
def test_a_vocabulary_below_the_tokenizer_is_caught(checkpoint: Path) -> None:
    change_config(checkpoint, vocab_size=300)
    for name in ("backbone.embeddings.weight", "lm_head.weight"):
        change_weight(checkpoint, name, lambda weight: weight[:300].clone())
    with pytest.raises(ValueError, match="ids up to 383, and the model only 300 embeddings"):
        verify_checkpoint(checkpoint, length=9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_any_dtype_are_computed_with_in_full_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    StatefulMambaForCausalLM(StatefulMambaConfig(**SIZES)).to(dtype).save_pretrained(tmp_path)
    verification = verify_checkpoint(tmp_path, dtype="float64")
    assert verification.passed
    assert max(check.difference for check in verification.checks) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: MambaForCausalLM(MambaConfig(**SIZES)),
        lambda: tiny_model("falcon_h1"),
        lambda: tiny_model("qwen3_next"),
    ],
    ids=["mamba", "falcon_h1", "qwen3_next"],
)
def test_a_model_of_transformers_is_loaded_by_its_own_class(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    verification = verify_checkpoint(tmp_path)
    assert verification.passed, verification.checks
    assert [check.what for check in verification.checks] == ["logits", "gradients"]


@pytest.mark.parametrize("window", [1, 3, 16])
def test_a_model_with_a_window_is_compared_inside_it(window: int, tmp_path: Path) -> None:
    """Transformers alone attends to all keys."""
    torch.manual_seed(0)
    stateful(tiny_model("bamba"), attention_window=window).save_pretrained(tmp_path)
    verification = verify_checkpoint(tmp_path)
    assert verification.passed, verification.checks
    against = "the folder without this package, inside its attention_window"
    assert {(check.against, check.tokens) for check in verification.checks} == {(against, window)}


def test_what_cannot_be_verified_is_refused_with_the_reason(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"user/name holds no config\.json here.*hf download"):
        verify_checkpoint("user/name")
    (tmp_path / "config.json").write_text(json.dumps({"d_model": 8, "n_layer": 1}))  # of mamba-ssm
    with pytest.raises(ValueError, match="convert it to a checkpoint of this package, `lengthgen convert"):
        verify_checkpoint(tmp_path)
    assert [verify_checkpoint(checkpoint, length=length).passed for length in (1, 2)] == [True, True]
