"""`lengthgen forget`: checkpoints that forget by themselves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_recurrent_lengthgen import forgetting, load_model
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import evaluation_sequences
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.surgery import calibrate
from tests.hybrids.tiny_models import tiny_model
from tests.without_package import clean_process

TOKENS = torch.arange(3, 63)[None]


def forget(*arguments: Any) -> int:
    return main(["forget", *map(str, arguments)])


def test_a_copy_forgets_by_itself_and_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "forgets"
    assert forget(checkpoint, "--output", out, "--window", 4) == 0
    shown = capsys.readouterr().out
    # of two layers: 16 x 4 state and 24 x 3 convolution; the window keeps B, x, Delta and one more of 4 tokens, + 1
    assert f"State of a sequence: {2 * (64 + 72)} -> {2 * (64 + 72 + 5 * 23)} numbers." in shown
    assert f"Saved to {out}: window 4. Next: lengthgen evaluate {checkpoint} {out}" in shown
    values = json.loads((out / "config.json").read_text())
    assert values["forgetting"] == {"window": 4}
    assert values["interventions"] == ["forgetting at inference: window 4"]
    assert load_file(out / "model.safetensors").keys() == load_file(checkpoint / "model.safetensors").keys()
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    assert [path.name for path in out.parent.iterdir()] == ["forgets"]
    copy, base = load_model(str(out)), load_model(str(checkpoint))
    with forgetting(base, window=4):
        expected = base(TOKENS).logits
    assert torch.equal(copy(TOKENS).logits, expected)
    assert not torch.allclose(copy(TOKENS).logits, base(TOKENS).logits, atol=1e-4)
    assert forget(out, "--output", tmp_path / "two", "--window", 8) == 1
    assert "forgets already (window 4): give the checkpoint that it was made from" in capsys.readouterr().err


def test_a_process_without_our_package_forgets_too(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--retention", 0.9, "--insertion", 0.5, "--window", 7, "--delta-scale", 0.5]
    assert forget(checkpoint, "--output", tmp_path / "out", *options) == 0
    torch.save(TOKENS, tmp_path / "in.pt")
    code = """
model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
forgetful = model(torch.load(data)).logits
generated = model.generate(torch.load(data), max_new_tokens=5, do_sample=False, eos_token_id=None)
model.config.forgetting = None
torch.save({"logits": forgetful, "generated": generated, "plain": model(torch.load(data)).logits}, sys.argv[3])
"""
    clean_process(tmp_path / "cwd", code, tmp_path / "out", tmp_path / "in.pt", tmp_path / "answer.pt")
    answer = torch.load(tmp_path / "answer.pt")
    base = load_model(str(checkpoint))
    assert torch.equal(answer["plain"], base(TOKENS).logits)
    with forgetting(base, retention=0.9, insertion=0.5, window=7, delta_scale=0.5):
        assert torch.equal(answer["logits"], base(TOKENS).logits)
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        assert torch.equal(answer["generated"], base.generate(TOKENS, **options))
    assert not torch.allclose(answer["logits"], answer["plain"], atol=1e-4)


def test_a_report_names_how_a_model_forgets(
    checkpoint: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "forgets"
    assert forget(checkpoint, "--output", out, "--insertion", 0.75, "--retention", 0.9999) == 0
    options = ["--data", text_file, "--split", "train", "--sequences", 2, "--length", 32]
    options += ["--output", tmp_path / "report"]
    assert main(["evaluate", *map(str, [checkpoint, out, *options])]) == 0
    names = [checkpoint.name, f"{out.name} (retention 0.9999, insertion 0.75)"]
    assert [m.evaluation.model for m in read_result(tmp_path / "report" / "result.json", Comparison).models] == names
    assert names[1] in capsys.readouterr().out
    assert names[1] in (tmp_path / "report" / "index.html").read_text()


def test_scales_are_found_on_a_text_and_named(
    checkpoint: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    common = ["--data", text_file, "--length", 24, "--sequences", 8, "--device", "cpu", "--seed", 1]
    assert forget(checkpoint, "--output", out, "--calibrate", "decay_scale", *common) == 0
    shown = capsys.readouterr().out
    model, base = load_model(str(out)), load_model(str(checkpoint))
    scales = model.config.forgetting["decay_scale"]
    assert len(scales) == 2
    words = f"decay scale {min(scales):.3g} to {max(scales):.3g} by layer"
    assert f"Saved to {out}: {words}. Next" in shown
    (done,) = model.config.interventions
    assert done.startswith(f"forgetting at inference: {words}, calibrated on 8 x 24 tokens of {text_file.name}")
    stream = load_stream(str(text_file), "train", load_tokenizer(str(checkpoint)))
    found = calibrate(base, evaluation_sequences(stream.tokens, 8, 25), seed=1, progress=False)
    assert found.scales == scales
    assert f"Loss of 8 x 24 tokens: {found.before:.3f} -> {found.after:.3f} nats per token." in shown
    assert found.after < found.before
    many = [*common, "--sequences", 999]
    assert forget(checkpoint, "--output", tmp_path / "many", "--calibrate", "decay_scale", *many) == 1
    assert re.search(r"999 sequences of 24 tokens take 24,975, .*: give --sequences \d+\.", capsys.readouterr().err)
    assert forget(checkpoint, "--output", tmp_path / "by hand", "--decay-scale", ",".join(map(str, scales))) == 0
    assert load_model(str(tmp_path / "by hand")).config.forgetting == {"decay_scale": scales}


def test_a_hybrid_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("bamba")
    model.save_pretrained(tmp_path / "bamba")
    assert forget(tmp_path / "bamba", "--output", tmp_path / "out", "--insertion", 0.5) == 1
    assert "BambaForCausalLM cannot be made to forget: give a model of a family" in capsys.readouterr().err
    model.config.forgetting = {"insertion": 0.5}
    model.save_pretrained(tmp_path / "bamba")
    with pytest.raises(ValueError, match="BambaForCausalLM does not take forgetting"):
        load_model(str(tmp_path / "bamba"))


def test_weights_keep_their_dtype_and_a_stock_checkpoint_becomes_ours(
    stock_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    load_model(str(stock_checkpoint), dtype=torch.bfloat16).save_pretrained(half)
    assert forget(half, "--output", tmp_path / "out", "--window", 3) == 0
    assert "holds no tokenizer, so none is saved" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()
    assert forget(stock_checkpoint, "--output", tmp_path / "ours", "--window", 3) == 0
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "stateful_mamba2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "{full}", "--window", "4"], "exists already and is not an empty folder"),
        (["--output", "{out}"], "Nothing would be forgotten"),
        (["--output", "{out}", "--calibrate", "decay_scale", "--window", "4"], "--calibrate finds what is forgotten"),
        (["--output", "{out}", "--decay-scale", "0.5,0.6,0.7"], "one for each of the 2 layers, got 3 numbers"),
        (["--output", "{out}", "--retention", "1"], "Nothing would be forgotten"),
        (["--output", "{out}", "--decay-scale", "1,1.0"], "Nothing would be forgotten"),
        (["--output", "{out}", "--window", "4", "--length", "64", "--seed", "3"], "leave --seed, --length out"),
        (["--output", "{out}", "--retention", "1.5"], "retention must be above 0 and at most 1, got 1.5"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert forget(checkpoint, *(text.format(full=checkpoint, out=tmp_path / "out") for text in arguments)) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
