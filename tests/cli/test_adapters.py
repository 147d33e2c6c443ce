"""Adapters from the command line: trained, trained on, measured, merged, and refused where they do not fit."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model, load_model
from hf_recurrent_lengthgen.checkpoints.records import Adapter, read_lineage
from hf_recurrent_lengthgen.checkpoints.sources import lineage_of
from hf_recurrent_lengthgen.evaluation.files import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.models import StatefulGLAConfig, StatefulGLAForCausalLM, StatefulMamba2ForCausalLM
from tests.cli.training import run, train_briefly
from tests.without_package import clean_process

RANK, ALPHA = 2, 6
TOKENS = torch.arange(3, 40)[None]


def train(model: Path, output: Path, text_file: Path, *options: Any) -> int:
    few = ("--max-steps", 2, "--training-length", 16, "--learning-rate", 0.1)
    return train_briefly(model, output, text_file, *few, *options)


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the checkpoint, with the default targets."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    assert train(checkpoint, folder, text_file, "--lora-r", RANK, "--lora-alpha", ALPHA) == 0
    return folder


@pytest.fixture
def copied(adapter: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> Tensor:
    values: Tensor = model(input_ids=TOKENS).logits
    return values


def merged_by_hand(base: Path, adapter: Path) -> Any:
    """W + alpha / r * B A in float64, for each layer that the adapter names."""
    model = StatefulMamba2ForCausalLM.from_pretrained(base).double().eval()
    added = load_file(adapter / "adapter_model.safetensors")
    names = sorted(name for name in added if name.endswith("lora_A.weight"))
    assert {name.split(".")[-3] for name in names} == {"in_proj", "out_proj"}
    for name in names:
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        down, up = added[name].double(), added[name.replace("lora_A", "lora_B")].double()
        assert up.abs().max() > 0
        module.weight.data += ALPHA / RANK * up @ down
    return model


def test_an_adapter_loads_as_base_and_its_product_added(adapter: Path, checkpoint: Path) -> None:
    expected = logits(merged_by_hand(checkpoint, adapter))
    apart, merged = load_model(str(adapter)), load_language_model(str(adapter))
    assert isinstance(apart, PeftModel)
    assert type(merged) is type(load_model(str(adapter), merge=True)) is StatefulMamba2ForCausalLM
    for model in (apart, merged):
        assert not model.training
        torch.testing.assert_close(logits(model).double(), expected, rtol=0, atol=1e-5)
        assert (model.config.training_length, len(model.config.interventions)) == (16, 1)
    assert {name for name, value in apart.named_parameters() if value.requires_grad} == {
        name for name, _ in apart.named_parameters() if "lora_" in name
    }
    assert (logits(load_model(str(checkpoint))) - expected).abs().max() > 1e-3
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(checkpoint)


@pytest.mark.slow
def test_peft_loads_it_where_this_package_is_not_and_where_it_is(
    adapter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    code = (
        "from peft import AutoPeftModelForCausalLM\nfrom safetensors.torch import save_file\n"
        f"model = AutoPeftModelForCausalLM.from_pretrained({str(adapter)!r}, trust_remote_code=True)\n"
        "assert type(model.get_base_model()).__module__.startswith('transformers_modules')\n"
        f"save_file({{'logits': model(input_ids=torch.arange(3, 40)[None]).logits.detach()}}, sys.argv[1])\n"
    )
    clean_process(tmp_path, code, tmp_path / "there")
    expected = logits(merged_by_hand(checkpoint, adapter))
    torch.testing.assert_close(load_file(tmp_path / "there")["logits"].double(), expected, rtol=0, atol=1e-5)
    here = AutoPeftModelForCausalLM.from_pretrained(str(adapter), trust_remote_code=True)
    assert type(here.get_base_model()) is StatefulMamba2ForCausalLM
    torch.testing.assert_close(logits(here.eval()).double(), expected, rtol=0, atol=1e-5)


def test_a_merged_checkpoint_has_weights_code_tokenizer_and_the_whole_lineage(
    adapter: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert run("merge", adapter, "--output", out) == 0
    assert f"lengthgen verify {out}" in capsys.readouterr().out
    model = load_model(str(out))
    assert type(model) is StatefulMamba2ForCausalLM
    torch.testing.assert_close(logits(model).double(), logits(merged_by_hand(checkpoint, adapter)), rtol=0, atol=1e-5)
    assert {"tokenizer_config.json", "modeling_stateful_mamba2.py"} <= {path.name for path in out.iterdir()}
    assert not [path for path in out.iterdir() if "adapter" in path.name]
    lineage: Any = read_lineage(out)
    assert lineage.source == lineage_of(str(checkpoint)).source
    assert [step.kind for step in lineage.steps] == ["train", "merge"]
    assert lineage.steps[0].training.adapter == Adapter("LORA", 2, 6.0, ("in_proj", "out_proj"))
    assert lineage.steps[1].command == "lengthgen merge adapter --output merged"
    assert (model.config.training_length, len(model.config.interventions)) == (16, 1)
    assert run("card", out) == 0
    assert "merged an adapter (LoRA of rank 2" in (out / "README.md").read_text()


def test_an_adapter_is_trained_on(adapter: Path, text_file: Path, tmp_path: Path, capsys: Any) -> None:
    assert train(adapter, tmp_path / "more", text_file) == 0
    before, after = (load_file(each / "adapter_model.safetensors") for each in (adapter, tmp_path / "more"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    lineage: Any = read_lineage(tmp_path / "more")
    trainings = [step.training for step in lineage.steps if step.training is not None]
    assert [(run.methods[0].name, run.adapter is None, run.steps) for run in trainings] == [
        ("state_passing", False, 2)
    ] * 2
    assert f"lengthgen merge {tmp_path / 'more'}" in capsys.readouterr().out
    assert train(adapter, tmp_path / "other", text_file, "--lora-r", 3) == 1
    assert "is an adapter already" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_is_measured_as_its_merged_checkpoint(adapter: Path, text_file: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*token*"):  # the tokenizer is then the base's
        path.unlink()
    assert run("merge", adapter, "--output", tmp_path / "merged") == 0
    options = ("--data", text_file, "--split", "train", "--length", 64, "--sequences", 2, "--no-cache")
    assert run("evaluate", tmp_path / "bare", tmp_path / "merged", *options, "--output", tmp_path / "out") == 0
    [ours, theirs] = read_result(tmp_path / "out" / "result.json", Comparison).models
    assert ours.training == theirs.training
    assert ours.training is not None
    curves = [torch.tensor(each.evaluation.position_wise.coarse.mean) for each in (ours, theirs)]
    torch.testing.assert_close(*curves, rtol=0, atol=1e-5)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def of_gla(folder: Path) -> None:
    """The base becomes another architecture, without a record of what it was."""
    config = StatefulGLAConfig(vocab_size=384, hidden_size=8, num_heads=2, num_hidden_layers=2)
    StatefulGLAForCausalLM(config).save_pretrained(folder.parent / "gla")
    (folder / "adapter_base.json").unlink()
    edit(folder, base_model_name_or_path=str(folder.parent / "gla"))


def change_base(folder: Path) -> None:
    base = folder.parent / "base"
    shutil.copytree(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"], base)
    edit(folder, base_model_name_or_path=str(base))
    load_model(str(folder))  # a copy will do
    weights = load_file(base / "model.safetensors")
    weights["backbone.embeddings.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})


def lose_a_layer(folder: Path) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if "layers.1" not in name},
        folder / "adapter_model.safetensors",
    )


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "base gone": (lambda folder: edit(folder, base_model_name_or_path="/gone/base"), "not exist any more: /gone/base"),
    "base changed": (change_base, r"these files have changed since: model\.safetensors"),
    "other architecture": (of_gla, "does not fit .*gla, a StatefulGLAForCausalLM: Target modules"),
    "targets of nothing": (lambda folder: edit(folder, target_modules=["nothing"]), "does not fit .*not found"),
    "weights missing": (lose_a_layer, r"missing .*layers\.1.* left over \[\] \(of 4\)"),
    "pickle": (make_pickle, r"holds no adapter_model\.safetensors: .* pickles are not read"),
    "prompt tuning": (lambda folder: edit(folder, peft_type="PROMPT_TUNING"), "kind 'PROMPT_TUNING': only LORA"),
    "adapter of an adapter": (lambda folder: edit(folder, base_model_name_or_path=str(folder)), "merge first"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED.keys())
def test_an_adapter_that_does_not_fit_is_refused(copied: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(copied)
    with pytest.raises(ValueError, match=message):
        load_model(str(copied))


def test_a_base_that_was_moved_is_passed(copied: Path, checkpoint: Path, tmp_path: Path) -> None:
    edit(copied, base_model_name_or_path=str(tmp_path / "gone"))
    assert run("merge", copied, "--base", checkpoint, "--output", tmp_path / "merged") == 0
    with pytest.raises(ValueError, match="holds no adapter, so it has no base"):
        load_model(str(checkpoint), base=str(checkpoint))


def test_whole_models_are_not_merged_and_folders_not_overwritten(
    adapter: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", checkpoint, "--output", "somewhere") == 1
    assert "nothing to merge" in capsys.readouterr().err
    assert run("merge", adapter, "--output", checkpoint) == 1
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "card", "convert", "expand", "forget"])
def test_commands_for_whole_models_say_to_merge_first(
    adapter: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ("--output", tmp_path / "out") if command in ("convert", "expand", "forget") else ()
    retention = ("--retention", 0.9) if command == "forget" else ()
    assert run(command, adapter, *output, *retention) == 1
    assert "merge first, `lengthgen merge" in capsys.readouterr().err


REFUSED = {
    "rank": (("--lora-r", 0), "lora_r must be at least 1, got 0"),
    "statex": (("--lora-r", 2, "--intervention", "statex"), "run lengthgen expand first"),
    "learned": (("--lora-r", 2, "--intervention", "learned"), "trains only the state"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_an_adapter_that_would_do_nothing_is_refused(
    checkpoint: Path, text_file: Path, tmp_path: Path, options: tuple[Any, ...], message: str, capsys: Any
) -> None:
    assert train(checkpoint, tmp_path / "out", text_file, *options) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_base_that_peft_would_load_otherwise_is_to_be_converted(
    stock_checkpoint: Path, config_file: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bytes_ = ("--tokenizer", "bytes", "--lora-r", 2)
    assert train(stock_checkpoint, tmp_path / "out", text_file, *bytes_) == 1
    assert "is of type 'mamba2', so PEFT would load the adapter onto that class" in (error := capsys.readouterr().err)
    assert "lengthgen convert" in error
    assert train(config_file, tmp_path / "out", text_file, "--lora-r", 2) == 1
    assert "give a checkpoint as model" in capsys.readouterr().err
