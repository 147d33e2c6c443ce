"""Models, tokenizers and streams from names."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Lfm2Config,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RecurrentGemmaConfig,
)

from hf_recurrent_lengthgen.checkpoints.loading import load_model, load_tokenizer
from hf_recurrent_lengthgen.cli.inputs import (
    Stream,
    chosen_split,
    load_documents,
    load_stream,
    sequences_of,
    token_unit,
)
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.models import StatefulGLAConfig, StatefulGLAForCausalLM, StatefulMambaForCausalLM


@pytest.mark.parametrize(
    ("config", "stock"),
    [
        (MambaConfig, MambaForCausalLM),
        (FalconMambaConfig, FalconMambaForCausalLM),
        (partial(Mamba2Config, num_heads=2, head_dim=8, n_groups=1), Mamba2ForCausalLM),
    ],
)
def test_stock_mamba_checkpoints_give_the_same_logits(config: Any, stock: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = stock(config(vocab_size=19, hidden_size=8, state_size=4, num_hidden_layers=2)).eval()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings.pop("mixer_rms_eps", None)  # files may lack it: its default holds
    file.write_text(json.dumps(settings))
    ids = torch.arange(14).view(2, 7)
    model = load_model(str(tmp_path)).eval()
    assert type(model).__name__ in ("StatefulMambaForCausalLM", "StatefulMamba2ForCausalLM")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_a_hybrid_is_wrapped_and_other_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    sizes = {"vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hybrid")
    model = load_model(str(tmp_path / "hybrid"))
    assert len(model.zero_state(2)) == len(model.state_shapes())
    RecurrentGemmaConfig(**sizes, **heads).save_pretrained(tmp_path / "gemma")
    with pytest.raises(
        ValueError, match=r"'recurrent_gemma', which accepts no initial state \(it keeps its states as"
    ):
        load_model(str(tmp_path / "gemma"))


def test_weights_of_another_family_are_refused_with_the_way_to_load_them(tmp_path: Path) -> None:
    StatefulGLAForCausalLM(
        StatefulGLAConfig(vocab_size=9, hidden_size=8, num_heads=2, num_hidden_layers=1, intermediate_size=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"StatefulMambaConfig takes .* 'mamba'.*, got 'stateful_gla': .*load_model"):
        StatefulMambaForCausalLM.from_pretrained(tmp_path)
    assert isinstance(load_model(str(tmp_path)), StatefulGLAForCausalLM)


def damage_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def damage_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut_off(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


NAME = "backbone.layers.1.mixer.dt_bias"


class RunsCode:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def pickled(folder: Path, change: Callable[[Path], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    change(folder / "pytorch_model.bin")


WRONG_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
    "cut weights": (cut_off, "weights in .* are damaged"),
    "other type": (lambda f: damage_config(f, model_type="gpt2"), "is of type 'gpt2'"),
    "newer": (lambda f: damage_config(f, code_format_version=99), "version 99"),
    "shape": (lambda f: damage_config(f, state_size=8), "do not fit its config.json, mismatched: .*conv1d"),
    "extra": (lambda f: damage_config(f, num_hidden_layers=1), "unexpected: backbone.layers.1"),
    "missing": (lambda f: damage_weights(f, lambda tensors: tensors.pop(NAME)), f"missing: {NAME}"),
    "code": (lambda f: pickled(f, lambda b: torch.save({"a": RunsCode()}, b)), "would run code"),
    "cut pickle": (lambda f: pickled(f, lambda b: b.write_bytes(b.read_bytes()[:999])), "pickles that are damaged"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_whatever_a_checkpoint_holds_is_loaded_or_refused_by_its_file(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    damage, message = WRONG_FILES[name]
    shutil.copytree(checkpoint, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / "damaged"))
    assert not Path("ran").exists()
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_weights_in_pickles_are_loaded(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "pickled")
    pickled(tmp_path / "pickled", lambda file: None)
    expected = load_model(str(checkpoint)).state_dict()
    assert all(torch.equal(w, expected[key]) for key, w in load_model(str(tmp_path / "pickled")).state_dict().items())


def test_a_name_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no-such/model is no (checkpoint )?folder"):
        load_model("no-such/model")


def test_a_folder_without_tokenizer_asks_for_one(stock_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer.*--tokenizer"):
        load_tokenizer(str(stock_checkpoint))


def test_tokenizers_by_folder_and_by_name(checkpoint: Path) -> None:
    text = "a </s>\n"
    expected = [byte + 3 for byte in text.encode()]
    for name in ("bytes", str(checkpoint)):
        tokenizer = load_tokenizer(name)
        assert tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == expected
        assert token_unit(tokenizer) == "byte"
    assert token_unit(object()) == "token"


def test_streams_say_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"body": "ab"}\n{"body": "c"}\n')
    stream = load_stream(str(path), "train", byte_tokenizer(), "body")
    assert stream.tokens.tolist() == [100, 101, 1, 102, 1]
    assert stream.source.description == "two.jsonl, split train"
    with pytest.raises(ValueError, match="no column 'text'"):
        load_stream(str(path), "train", byte_tokenizer())


def test_a_text_that_is_too_short_names_options_that_fit() -> None:
    stream = Stream(torch.arange(100), DataSource("a.txt", "train"))
    assert sequences_of(stream, 3, 32).shape == (3, 33)
    for count, length, trained, advice in (
        (4, 32, 16, "--sequences 3 or --length 24."),
        (4, 32, 24, "--sequences 3."),
        (2, 100, 32, "--length 49."),
        (4, 200, 24, "--sequences 1 --length 99."),
        (4, 200, 99, "text of more than 100 tokens."),
    ):
        with pytest.raises(ValueError, match=rf"{count} sequences .* a.txt, split train has 100: give {advice}"):
            sequences_of(stream, count, length, trained)
        if advice.startswith("--"):
            words = advice.rstrip(".").partition(" or ")[0].split()
            fits = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            sequences_of(stream, fits.get("--sequences", count), fits.get("--length", length))


def test_the_only_split_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["ab"]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(test=rows).save_to_disk(tmp_path / "named")
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "two")
    for name in ("val.jsonl", "folder/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "ab"}\n')
    expected = {"val.jsonl": "train", "one": "train", "named": "test", "folder": "test", "two": "validation"}
    for name, split in expected.items():
        data = str(tmp_path / name)
        assert chosen_split(data, None, "validation") == split
        assert load_documents(data, split) == ["ab"]
        assert chosen_split(data, "other", "validation") == "other"
    for unreadable in ("stdlib", str(tmp_path / "nowhere.jsonl")):
        assert chosen_split(unreadable, None, "validation") == "validation"


def test_half_precision_weights_are_loaded_in_float32(checkpoint: Path, tmp_path: Path) -> None:
    load_model(str(checkpoint)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_model(str(tmp_path)).parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["here/config.json", "here/missing", "a/b/c"])
def test_what_stands_for_a_folder_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=f"{name} is no folder here"):
            load(name)
