"""`lengthgen forget`: checkpoints that forget by themselves."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_recurrent_lengthgen import Forgetting, forgetting, load_model
from hf_recurrent_lengthgen.cli import forget as forget_module
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.evaluation.results import Comparison, ForgettingSearch
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.recipes import RECIPES
from tests.hybrids.tiny_models import tiny_model
from tests.versions import needs_hybrids
from tests.without_package import clean_process

TOKENS = torch.arange(3, 63)[None]


def forget(*arguments: Any) -> int:
    return main(["forget", *map(str, arguments)])


@pytest.fixture
def search(text_file: Path) -> list[Any]:
    """Options of a search on 3 texts of 64 bytes."""
    return ["--search", "--data", text_file, "--split", "train", "--sequences", 3, "--length", 64]


@pytest.fixture(scope="module")
def harmed_by_the_past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer that predicts the byte of its state's largest component, and never decays.

    It has read what it predicts: after the text "aaaabbbb", a state of the last bytes only predicts b, a state of all
    bytes is undecided. (Both convolutions pass their input on; B and C are the byte, x is constant.)
    """
    size = 384
    config = StatefulMamba2Config(
        vocab_size=size, hidden_size=size, num_heads=1, head_dim=size, state_size=1, n_groups=1, num_hidden_layers=1,
        expand=1, conv_kernel=2, pad_token_id=0, bos_token_id=1, eos_token_id=1, tie_word_embeddings=False,
        residual_in_fp32=True, training_length=8, use_conv_bias=True, time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    model = StatefulMamba2ForCausalLM(config)
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.backbone.embeddings.weight.copy_(torch.eye(size))
        model.backbone.layers[0].norm.weight.fill_(size**-0.5)  # norm of a one-hot is sqrt(size)
        model.backbone.norm_f.weight.fill_(1.0)
        mixer.in_proj.weight[:size] = 1.0  # z: constant
        mixer.in_proj.weight[size : 2 * size] = torch.eye(size)  # x: the byte
        mixer.conv1d.weight[:, 0, -1] = 1.0
        mixer.conv1d.bias[size:] = 1.0  # B and C are constant
        mixer.A_log.fill_(-30.0)
        mixer.dt_bias.fill_(0.5413)  # steps of 1
        mixer.norm.weight.fill_(1.0)
        mixer.out_proj.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(torch.eye(size))
    folder = tmp_path_factory.mktemp("harmed") / "checkpoint"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


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


def test_settings_of_a_search_are_refused_without_one(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert forget(checkpoint, "--output", out, "--window", 4, "--data", "stdlib", "--seq", 4) == 1
    assert "--data, --sequences does nothing without --search" in capsys.readouterr().err
    assert not out.exists()


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
    options = [
        "--data",
        text_file,
        "--split",
        "train",
        "--sequences",
        2,
        "--length",
        32,
        "--output",
        tmp_path / "report",
    ]
    assert main(["evaluate", *map(str, [checkpoint, out, *options])]) == 0
    names = [checkpoint.name, f"{out.name} (retention 0.9999, insertion 0.75)"]
    assert [m.evaluation.model for m in read_result(tmp_path / "report" / "result.json", Comparison).models] == names
    assert names[1] in capsys.readouterr().out
    assert names[1] in (tmp_path / "report" / "index.html").read_text()


def test_a_search_saves_the_best_setting_with_its_results(
    harmed_by_the_past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of 12 equal bytes: with the last byte alone as state, only changes are wrong, by sqrt(384) nats each."""
    text = tmp_path / "runs.txt"
    text.write_text("".join(letter * 12 for letter in "abcdefgh" * 8))
    options = ["--data", text, "--split", "train", "--sequences", 3, "--length", 200, "--window", 4, 1, 10_000]
    results = tmp_path / "search.json"
    out = tmp_path / "out"
    arguments = [harmed_by_the_past, "--output", out, "--search", *options, "--trials", results]
    assert forget(*arguments) == 0
    shown = capsys.readouterr().out
    assert "Trying 4 settings on 3 texts of 200 bytes" in shown
    losses = [trial.loss.mean for trial in read_result(results, ForgettingSearch).trials]
    assert all(f"{loss:.4f}" in shown for loss in losses)
    assert losses[2] == pytest.approx(16.5 / 200 * 384**0.5, rel=0.05)  # 16 or 17 changes in 200 bytes
    assert losses[2] < losses[1] < losses[0] == pytest.approx(losses[3])
    assert "Best is window 1: loss" in shown
    assert json.loads((out / "config.json").read_text())["forgetting"] == {"window": 1}
    assert read_result(out / "forgetting_search.json", ForgettingSearch) == read_result(results, ForgettingSearch)
    shutil.rmtree(out)
    assert forget(*arguments) == 0  # from the results, nothing is measured
    assert capsys.readouterr().out == shown


def test_a_search_may_find_that_no_forgetting_is_best(
    harmed_by_the_past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "same.txt"
    text.write_text("ab" * 500)  # every byte is among the last two, and the more of them are known, the better
    options = ["--search", "--data", text, "--split", "train", "--sequences", 2, "--length", 200, "--window", 1]
    assert forget(harmed_by_the_past, "--output", tmp_path / "out", *options) == 0
    shown = capsys.readouterr().out
    assert "Not to forget is best" in shown
    assert shown.endswith("No copy is written.\n")
    assert not (tmp_path / "out").exists()


def test_a_search_alone_tries_the_defaults(
    checkpoint: Path, search: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forget(checkpoint, *search) == 0
    shown = capsys.readouterr().out
    assert "Trying 21 settings" in shown  # 4 x 4 pairs, 4 windows, 1 scale of the steps
    for setting in ("retention 0.99, insertion 0.5", "window 4 ", "window 32", "delta scale 0.5"):
        assert f"\n{setting}" in shown
    assert list(tmp_path.iterdir()) == []


@needs_hybrids
def test_a_hybrid_forgets_where_our_package_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("bamba").save_pretrained(tmp_path / "bamba")
    assert forget(tmp_path / "bamba", "--output", tmp_path / "out", "--insertion", 0.5) == 0
    assert "but not as bamba of Transformers" in capsys.readouterr().out
    copy, base = load_model(str(tmp_path / "out")), load_model(str(tmp_path / "bamba"))
    tokens = TOKENS % base.config.vocab_size
    assert not torch.allclose(copy(tokens).logits, base(tokens).logits)
    with forgetting(base, insertion=0.5):
        assert torch.equal(copy(tokens).logits, base(tokens).logits)


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
        (["--window", "4"], "Give --output"),
        (["--output", "{full}", "--window", "4"], "exists already and is not an empty folder"),
        (["--output", "{out}"], "Nothing would be forgotten"),
        (["--output", "{out}", "--retention", "1"], "Nothing would be forgotten"),
        (["--output", "{out}", "--window", "4", "8"], "--window has several values: give one value, or --search"),
        (["--output", "{out}", "--window", "4", "--data", "x"], "--data does nothing without --search"),
        (["--output", "{out}", "--retention", "1.5"], "retention must be above 0 and at most 1, got 1.5"),
        (["--output", "{out}", "--search", "--length", "100000000"], "would fit"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert forget(checkpoint, *(text.format(full=checkpoint, out=tmp_path / "out") for text in arguments)) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_forgets_is_not_made_to_forget_again(
    checkpoint: Path, tmp_path: Path, search: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert forget(checkpoint, "--output", tmp_path / "one", "--window", 4) == 0
    for arguments in (["--output", tmp_path / "two", "--window", 8], search):
        assert forget(tmp_path / "one", *arguments) == 1
        assert "forgets already (window 4): give the checkpoint that it was made from" in capsys.readouterr().err


def test_the_commands_of_the_recipes_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done: list[Any] = []

    def searched(options: Any, given: dict[str, list[Any]]) -> Any:
        done.append(given)
        raise ValueError("enough")

    monkeypatch.setattr(forget_module, "_search", searched)
    monkeypatch.setattr(forget_module, "_save", lambda options, rule, output, found, line: done.append(rule))
    for command in re.findall(r"`lengthgen (forget .*)`", (RECIPES / "README.md").read_text()):
        main(shlex.split(command))
    assert done == [
        Forgetting(0.9999, 0.75),
        {"retention": [1.0, 0.99999, 0.9999, 0.999], "insertion": [1.0, 0.9, 0.75, 0.5]},
        Forgetting(window=8192),
        Forgetting(delta_scale=0.5),
    ]


def test_a_failed_save_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert forget(checkpoint, "--output", tmp_path / "out", "--window", 4) == 1
    assert list(tmp_path.iterdir()) == []
