"""Cards of checkpoints that were really trained and measured; numbers are read again from the JSON of the results."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load

from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, build_card, write_card
from hf_recurrent_lengthgen.checkpoints.records import Lineage, Source, Step, read_lineage, write_lineage
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.evaluation.files import write_result
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison
from tests.checkpoints.cards.conftest import Work
from tests.checkpoints.cards.reading import blocks, changed, evaluations, metadata_of, retrieval, written
from tests.hybrids.tiny_models import tiny_model
from tests.without_package import clean_process


def test_the_metadata_is_what_the_hubs_own_loader_reads(intervention: Path, work: Work) -> None:
    data: Any = metadata_load(intervention / "README.md")
    assert {key: data[key] for key in data if key not in ("model-index", "tags")} == {
        "license": "apache-2.0",
        "language": "en",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["owner/times"],
        "metrics": ["perplexity"],
    }
    assert {"recurrent", "state-space-model", "mamba2", "state-passing"} <= {*data["tags"]}
    assert {"custom_code", "hf_recurrent_lengthgen"} <= {*data["tags"]}
    loaded = ModelCard.load(intervention / "README.md").data
    assert loaded.to_dict() == data
    found = evaluations(work)["intervention"]
    results = {result.metric_name: result for result in loaded.eval_results}
    inside = results["Perplexity per byte inside the training length of 8"]
    assert inside.metric_type == "perplexity"
    assert inside.metric_value == pytest.approx(math.exp(found["in_window"]["loss"]["mean"]))
    harm = results["Excess loss from context beyond 8 bytes at positions 32 to 64 (nats per byte)"]
    assert harm.metric_value == pytest.approx(found["harm"]["last"]["mean"])
    assert (harm.dataset_name, harm.dataset_type, harm.dataset_split) == ("text.txt", "text.txt", "train")
    curve = found["position_wise"]["fine"]
    bins = zip(curve["edges"], curve["edges"][1:], curve["mean"], strict=False)
    total = sum((stop - start) * mean for start, stop, mean in bins if start >= 32)
    beyond = results["Perplexity per byte at positions 32 to 64"]
    assert beyond.metric_value == pytest.approx(math.exp(total / 32))


def test_the_tables_show_the_numbers_of_the_result_file(intervention: Path, work: Work) -> None:
    text = (intervention / "README.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    roles = evaluations(work)

    def cells(estimate: Callable[[Any], dict[str, float]], form: str) -> str:
        found = [estimate(roles[role]) for role in ("intervention", "base")]
        return " | ".join(
            f"{written(value['mean'], form)}<br>[{written(value['low'], form)}, {written(value['high'], form)}]"
            for value in found
        )

    assert "|  | **this model** | base |" in text
    assert rows["Loss inside it"].endswith(f"| {cells(lambda found: found['in_window']['loss'], '.3f')} |")
    harm = rows["Excess loss from context beyond it, at 32 to 64"]
    assert harm.endswith(f"| {cells(lambda found: found['harm']['last'], '+.3f')} |")
    assert (
        json.loads((intervention / "results" / "comparison.json").read_text())["models"][1]["evaluation"]["weights"]
        == (roles["intervention"]["weights"])
    )
    lineage: Any = read_lineage(intervention)
    training: Any = lineage.steps[0].training
    assert rows["Steps"] == "| Steps | 3 |"
    assert rows["Tokens"] == "| Tokens | 48 |"
    assert rows["Mean loss, nats per token"] == f"| Mean loss, nats per token | {training.loss:.3f} |"
    assert rows["learning_rate"] == "| learning_rate | 5e-05 |"
    assert "state passing (3 steps, 48 tokens)" in text
    assert blocks(text, "bash")[-1].startswith("lengthgen train --model base --output intervention --data text.txt")


@pytest.mark.slow
def test_its_code_runs_without_our_package(intervention: Path, tmp_path: Path) -> None:
    code = blocks((intervention / "README.md").read_text(encoding="utf-8"), "python")
    assert len(code) == 2
    proof = "\nassert type(model).__module__.startswith('transformers_modules.')\nassert state[0].recurrent.any()"
    (tmp_path / intervention.name).symlink_to(intervention)
    done = clean_process(tmp_path, "\n".join(code) + proof)
    assert "Do you wish to run" not in done.stdout
    assert code[0].count("trust_remote_code=True") == 2
    assert len(done.stdout) > 20


def test_its_commands_are_understood(intervention: Path) -> None:
    commands = [
        line for block in blocks((intervention / "README.md").read_text(), "bash") for line in block.splitlines()
    ]
    further, measured, made = (shlex.split(command) for command in commands)
    for command in (further, made):
        assert command[:2] == ["lengthgen", "train"]
        run, _, _ = read_options(command[2:])
        assert run.training_length == 8
    assert measured[:2] == ["lengthgen", "evaluate"]
    assert measured[2:6] == ["base", "intervention", "--roles", "base,intervention"]


def run_python(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks(text, "python"):
        exec(block, names)
    return names


def test_a_hybrid_goes_on_from_its_state_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("falcon_h1").save_pretrained(tmp_path / "hybrid")
    text = str(build_card(tmp_path / "hybrid"))
    assert "custom_code" not in metadata_of(text)["tags"]
    assert "load_model" in text
    assert "attention_cache=cache" in text
    monkeypatch.chdir(tmp_path)
    names = run_python(text)
    assert names["tokens"].shape[1] > 3
    assert names["state"] is not None


def test_a_checkpoint_without_tokenizer_or_training_length(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = work.copy("base", tmp_path / "bare")
    for path in folder.iterdir():
        if "token" in path.name:
            path.unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["training_length"]
    (folder / "config.json").write_text(json.dumps(config))
    text = write_card(folder).read_text()
    assert "model-index" not in text
    assert "How it was made is not recorded." in text
    assert "license" not in metadata_of(text)
    assert "- The license is unknown." in text
    assert "--training-length" not in text
    assert not (folder / "figures").exists()
    monkeypatch.chdir(tmp_path)
    assert run_python(text)["tokens"].shape[1] > 3


def test_without_a_lineage_the_config_is_the_source(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    (folder / "lineage.json").unlink()
    text = str(build_card(folder))
    assert text.count("How it was made is recorded only in its config.json: state_passing, 3 steps.") == 2
    assert "- Its training data and the length of its training are not recorded." in text


def test_a_source_on_the_hub_is_the_base_model_and_gives_its_licence(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    lineage: Any = read_lineage(folder)
    source = Source("state-spaces/mamba2-130m", True, "ab" * 20, "mamba-ssm", "mit", {"pytorch_model.bin": "0"})
    convert = Step("convert", "converted from mamba-ssm", "lengthgen convert state-spaces/mamba2-130m base", {})
    write_lineage(folder, Lineage(source, (convert, *lineage.steps)))
    text = str(build_card(folder, settings=CardSettings("me/mamba2-130m-state-passing")))
    data = metadata_of(text)
    assert (data["base_model"], data["base_model_relation"]) == ("state-spaces/mamba2-130m", "finetune")
    assert data["license"] == "mit"
    assert "made from [state-spaces/mamba2-130m](https://huggingface.co/state-spaces/mamba2-130m)" in text
    assert f"revision {'ab' * 20}" in text
    assert text.partition("\n---\n\n")[2].startswith("# mamba2-130m-state-passing\n")
    assert 'from_pretrained("me/mamba2-130m-state-passing", trust_remote_code=True)' in text
    assert "@article{buitragoruiz2025understanding," in text
    assert metadata_of(str(build_card(folder, settings=CardSettings(license="other"))))["license"] == "other"
    write_lineage(folder, Lineage(source, (convert,)))
    assert "base_model_relation" not in metadata_of(str(build_card(folder)))  # as it was, in another layout


def test_results_of_other_weights_are_refused(work: Work, tmp_path: Path) -> None:
    def other(evaluation: dict[str, Any]) -> None:
        evaluation["weights"] = "0" * 64

    file = changed(work, tmp_path / "other.json", other)
    with pytest.raises(
        ValueError, match=r"other\.json holds results of other weights \(base, intervention\), but intervention"
    ):
        build_card(work.intervention, [file])
    assert build_card(work.base, [file])


def test_results_against_another_training_length_are_refused(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"training_length": 4096}))
    with pytest.raises(
        ValueError, match=r"with a training length of 8, but .* needs results with 4096, as its config\.json"
    ):
        build_card(folder, [work.results])
    unknown = replace(retrieval(work), training_length=None)
    write_result(tmp_path / "unknown.json", RetrievalComparison((unknown,)))
    assert build_card(folder, [tmp_path / "unknown.json"])


@pytest.mark.slow
def test_results_in_bfloat16_are_of_these_weights(work: Work, tmp_path: Path) -> None:
    measured = ("--data", work.text, "--split", "train", "--length", 32, "--sequences", 2, "--no-cache")
    arguments = ("evaluate", work.intervention, *measured, "--dtype", "bfloat16", "--output", tmp_path / "out")
    assert main([str(argument) for argument in arguments]) == 0
    assert "sequences of 32 bytes" in str(build_card(work.intervention, [tmp_path / "out" / "result.json"]))


def test_a_copy_that_forgets_has_its_own_results(work: Work, tmp_path: Path) -> None:
    forgets = tmp_path / "forgets"
    assert main(["forget", str(work.intervention), "--output", str(forgets), "--window", "4"]) == 0
    with pytest.raises(ValueError, match=r"as intervention, but forgets needs results with window 4"):
        build_card(forgets, [work.results])

    def label(evaluation: dict[str, Any]) -> None:
        evaluation["forgetting"]["window"] = 4

    own = changed(work, tmp_path / "own.json", label)
    text = str(build_card(forgets, [own]))
    assert "It is made to forget at inference (window 4)" in text
    assert "It cannot be trained as it is" in text
    assert "@article{chen2024stuffed," in text
    assert "forgetting" in metadata_of(text)["tags"]
    with pytest.raises(ValueError, match=r"as intervention, but intervention needs results with no forgetting"):
        build_card(work.intervention, [own])


@pytest.mark.parametrize(
    ("initialization", "said"),
    [
        ("inherit-zero", '"inherit-zero") get no gradient, except some from initial states of noise'),
        ("merge-copy", 'are copies ("merge-copy") with equal gradients'),
    ],
)
def test_states_that_no_training_can_use_are_said(work: Work, tmp_path: Path, initialization: str, said: str) -> None:
    larger = tmp_path / "larger"
    how = ("--layers", "0", "--factor", "2", "--initialization", initialization, "--output", str(larger))
    assert main(["expand", str(work.intervention), *how]) == 0
    assert said in str(build_card(larger))


def result_file(content: str) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        (folder / "retrieval.json").write_text(content)
        return [folder / "retrieval.json"]

    return write


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter .*lengthgen merge"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.*safetensors"),
        (result_file("{"), "cannot be read as a result file"),
        (result_file('{"kind": "lineage"}'), "kind 'comparison', got 'lineage'.*retrieval.json of retrieve"),
        (result_file('{"kind": "comparison", "schema_version": 9}'), "schema version 9"),
        (
            lambda folder: [result_file("{}")(folder)[0].parent],
            r"cannot be read as a result file: .*directory.* Give .*/folder/retrieval\.json\.$",
        ),
    ],
    ids=["no-config", "adapter", "no-weights", "no-json", "other-kind", "newer", "folder"],
)
def test_what_is_no_whole_checkpoint_or_result_file_is_refused(
    work: Work, tmp_path: Path, spoil: Callable[[Path], Any], complaint: str
) -> None:
    folder = work.copy("intervention", tmp_path / "folder")
    results = spoil(folder)
    with pytest.raises((ValueError, OSError), match=complaint):
        build_card(folder, results if isinstance(results, list) else [])
