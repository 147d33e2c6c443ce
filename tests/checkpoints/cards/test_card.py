"""Cards of checkpoints that were really trained and measured; numbers are read again from the JSON of the results."""

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load
from markdown_it import MarkdownIt
from transformers import AutoTokenizer

from hf_recurrent_lengthgen.checkpoints.card_mark import cards_digest, read_card_mark
from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, build_card, card, write_card, write_card_of_run
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape
from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push
from hf_recurrent_lengthgen.checkpoints.records import (
    Check,
    Lineage,
    Source,
    Step,
    Verification,
    read_lineage,
    verified_files,
    write_lineage,
    write_verification,
)
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.results import DataRecord, DataSource, Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.misalignment import Misalignment
from hf_recurrent_lengthgen.metrics.remembrance.result import Remembrance
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalComparison, RetrievalResult
from tests.checkpoints.cards.conftest import Work
from tests.hybrids.tiny_models import tiny_model
from tests.versions import needs_hybrids
from tests.without_package import clean_process

MINUS = "\N{MINUS SIGN}"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def written(value: float, form: str = ".3f") -> str:
    return format(value, form).replace("-", MINUS)


def shown(text: str) -> str:
    """What a reader sees of a Markdown line."""
    html = MarkdownIt("commonmark").enable("table").render(text)
    return (
        re.sub(r"<[^>]+>", "", html)
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", '"')
        .replace("&amp;", "&")
        .strip()
    )


def evaluations(work: Work) -> dict[str, Any]:
    """The evaluations of the result file by role, as plain JSON."""
    return {model["role"]: model["evaluation"] for model in json.loads(work.results.read_text())["models"]}


def changed(work: Work, to: Path, change: Callable[[dict[str, Any]], None], role: str = "cured") -> Path:
    """The result file with another evaluation of the model of a role."""
    plain = json.loads(work.results.read_text())
    change(next(model["evaluation"] for model in plain["models"] if model["role"] == role))
    to.write_text(json.dumps(plain))
    return to


@pytest.fixture(scope="session")
def cured(work: Work, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cured checkpoint with its card."""
    folder = work.copy("cured", tmp_path_factory.mktemp("carded") / "cured")
    said = CardSettings(license="apache-2.0", language=("en",), datasets=("owner/times",))
    write_card(folder, [work.results], said)
    return folder


def test_the_metadata_is_what_the_hubs_own_loader_reads(cured: Path, work: Work) -> None:
    data = metadata_load(cured / "README.md")
    assert data is not None
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
    loaded = ModelCard.load(cured / "README.md").data
    assert loaded.to_dict() == data
    found = evaluations(work)["cured"]
    results = {result.metric_name: result for result in loaded.eval_results}
    inside = results["Perplexity per byte inside the training length of 8"]
    assert inside.metric_type == "perplexity"
    assert inside.metric_value == pytest.approx(math.exp(found["in_window"]["loss"]["mean"]))
    assert inside.metric_args["high"] == pytest.approx(math.exp(found["in_window"]["loss"]["high"]))
    harm = results["Harm of the context beyond 8 bytes at positions 32 to 64 (nats per byte)"]
    assert harm.metric_value == pytest.approx(found["harm"]["last"]["mean"])
    assert (harm.metric_args["first_position"], harm.metric_args["end_position"]) == (32, 64)
    assert (harm.metric_args["low"], harm.metric_args["sequences"]) == (found["harm"]["last"]["low"], 3)
    assert (harm.dataset_name, harm.dataset_type, harm.dataset_split) == ("text.txt", "text.txt", "train")
    assert harm.dataset_args["sha256_of_token_ids"] == found["data"]["digest"]
    curve = found["position_wise"]["fine"]
    bins = zip(curve["edges"], curve["edges"][1:], curve["mean"], strict=False)
    total = sum((stop - start) * mean for start, stop, mean in bins if start >= 32)
    beyond = results["Perplexity per byte at positions 32 to 64"]
    assert beyond.metric_value == pytest.approx(math.exp(total / 32))


def test_the_tables_show_the_numbers_of_the_result_file(cured: Path, work: Work) -> None:
    text = (cured / "README.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    roles = evaluations(work)

    def cells(estimate: Callable[[Any], dict[str, float]], form: str) -> str:
        found = [estimate(roles[role]) for role in ("cured", "base")]
        return " | ".join(
            f"{written(value['mean'], form)}<br>[{written(value['low'], form)}, {written(value['high'], form)}]"
            for value in found
        )

    assert "|  | **this model** | base |" in text
    assert rows["Loss inside 8 bytes"].endswith(f"| {cells(lambda found: found['in_window']['loss'], '.3f')} |")
    harm = rows["Harm of the context beyond 8, at 32 to 64"]
    assert harm.endswith(f"| {cells(lambda found: found['harm']['last'], '+.3f')} |")
    assert (
        json.loads((cured / "results" / "comparison.json").read_text())["models"][1]["evaluation"]["weights"]
        == (roles["cured"]["weights"])
    )
    lineage = read_lineage(cured)
    assert lineage is not None
    training = lineage.steps[0].training
    assert training is not None
    assert rows["Steps"] == "| Steps | 3 |"
    assert rows["Tokens"] == "| Tokens | 48 |"
    assert rows["Mean loss, nats per token"] == f"| Mean loss, nats per token | {training.loss:.3f} |"
    assert rows["Learning rate"] == "| Learning rate | 5e-05 |"
    assert "state passing (3 steps, 48 tokens)" in text
    assert blocks(text, "bash")[-1].startswith("lengthgen train --model base --output cured --data text.txt")


def test_pictures_are_files_beside_the_card(cured: Path) -> None:
    text = (cured / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\((.*?)\)", text)
    assert shown == ["figures/position_wise.png", "figures/context_harm.png"]
    assert all((cured / name).read_bytes().startswith(b"\x89PNG") for name in shown)
    linked = re.findall(r"\]\(((?!https:)[^)]*)\)", text)
    assert all((cured / name).is_file() for name in linked)
    assert {path.name for path in (cured / "figures").iterdir()} == {"position_wise.png", "context_harm.png"}


def test_its_code_runs_without_our_package(cured: Path, tmp_path: Path) -> None:
    code = blocks((cured / "README.md").read_text(encoding="utf-8"), "python")
    assert len(code) == 2
    proof = "\nassert type(model).__module__.startswith('transformers_modules.')\nassert state[0].recurrent.any()"
    (tmp_path / cured.name).symlink_to(cured)
    done = clean_process(tmp_path, "\n".join(code) + proof)
    assert "Do you wish to run" not in done.stdout
    assert code[0].count("trust_remote_code=True") == 2
    assert len(done.stdout) > 20


def test_its_commands_are_understood(cured: Path) -> None:
    commands = [line for block in blocks((cured / "README.md").read_text(), "bash") for line in block.splitlines()]
    further, measured, made = (shlex.split(command) for command in commands)
    for command in (further, made):
        assert command[:2] == ["lengthgen", "train"]
        run, _, _ = read_options(command[2:])
        assert run.training_length == 8
    assert measured[:2] == ["lengthgen", "evaluate"]
    assert measured[2:6] == ["base", "cured", "--roles", "base,cured"]


def run_python(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks(text, "python"):
        exec(block, names)
    return names


@needs_hybrids
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
    made = write_card(folder)
    assert {"a tokenizer", "a training length (config.json)", "its lineage (lineage.json)"} <= {*made.missing}
    text = made.path.read_text()
    assert "model-index" not in text
    assert "How it was made is not recorded." in text
    assert "--training-length" not in text
    assert not (folder / "figures").exists()
    monkeypatch.chdir(tmp_path)
    assert run_python(text)["tokens"].shape[1] > 3


def metadata_of(text: str) -> dict[str, Any]:
    return ModelCard(text).data.to_dict()


def test_without_a_lineage_the_config_tells_what_it_can(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    (folder / "lineage.json").unlink()
    text = str(build_card(folder))
    assert text.count("How it was made is recorded only in its config.json: state_passing, 3 steps.") == 2
    assert "- Its training data and the length of its training are not recorded." in text


def test_a_source_on_the_hub_is_the_base_model_and_gives_its_licence(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    lineage = read_lineage(folder)
    assert lineage is not None
    source = Source("state-spaces/mamba2-130m", True, "ab" * 20, "mamba-ssm", "mit", {"pytorch_model.bin": "0"})
    convert = Step("convert", "converted from mamba-ssm", "lengthgen convert state-spaces/mamba2-130m base", {})
    write_lineage(folder, Lineage(source, (convert, *lineage.steps)))
    text = str(build_card(folder, settings=CardSettings("me/mamba2-130m-cured")))
    data = metadata_of(text)
    assert (data["base_model"], data["base_model_relation"]) == ("state-spaces/mamba2-130m", "finetune")
    assert data["license"] == "mit"
    assert "made from [state-spaces/mamba2-130m](https://huggingface.co/state-spaces/mamba2-130m)" in text
    assert f"revision `{'ab' * 20}`" in text
    assert text.partition("\n---\n\n")[2].startswith("# mamba2-130m-cured\n")
    assert 'from_pretrained("me/mamba2-130m-cured", trust_remote_code=True)' in text
    assert "@article{buitragoruiz2025understanding," in text
    assert metadata_of(str(build_card(folder, settings=CardSettings(license="other"))))["license"] == "other"
    write_lineage(folder, Lineage(source, (convert,)))
    assert "base_model_relation" not in metadata_of(str(build_card(folder)))  # as it was, in another layout


def test_an_unknown_licence_is_said_and_left_out(work: Work) -> None:
    text = str(build_card(work.cured))
    assert "license" not in metadata_of(text)
    assert "- The license is unknown." in text


def test_results_of_other_weights_are_refused(work: Work, tmp_path: Path) -> None:
    def other(evaluation: dict[str, Any]) -> None:
        evaluation["weights"] = "0" * 64

    file = changed(work, tmp_path / "other.json", other)
    with pytest.raises(ValueError, match=r"other\.json holds results of other weights \(base, cured\) than .* cured"):
        build_card(work.cured, [file])
    assert build_card(work.base, [file])


def test_results_against_another_training_length_are_refused(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"training_length": 4096}))
    with pytest.raises(ValueError, match=r"with a training length of 8, but its config\.json has 4096"):
        build_card(folder, [work.results])
    unknown = replace(retrieval(work), training_length=None)
    write_result(tmp_path / "unknown.json", RetrievalComparison((unknown,)))
    assert build_card(folder, [tmp_path / "unknown.json"])


def test_what_a_stranger_needs_to_know_of_data_and_commands(work: Work, tmp_path: Path) -> None:
    def describe(evaluation: dict[str, Any]) -> None:
        evaluation["data"]["source"] = {"name": "Texts", "split": "validation", "sizes": "664 files, 11181892 bytes"}

    text = str(build_card(work.cured, [changed(work, tmp_path / "r.json", describe)]))
    body = text.partition("\n---\n\n")[2]
    assert "(Texts, split validation), in nats" in body
    assert "11181892" not in body
    assert body.count("Folder names are those of the original run") == 2
    assert "but not certainly of this config" in body


@pytest.mark.slow
def test_results_in_bfloat16_are_of_these_weights(work: Work, tmp_path: Path) -> None:
    measured = ("--data", work.text, "--split", "train", "--length", 32, "--sequences", 2, "--no-cache")
    arguments = ("evaluate", work.cured, *measured, "--dtype", "bfloat16", "--output", tmp_path / "out")
    assert main([str(argument) for argument in arguments]) == 0
    assert "texts of 32 bytes" in str(build_card(work.cured, [tmp_path / "out" / "result.json"]))


def test_a_copy_that_forgets_has_its_own_results(work: Work, tmp_path: Path) -> None:
    forgets = tmp_path / "forgets"
    assert main(["forget", str(work.cured), "--output", str(forgets), "--window", "4"]) == 0
    with pytest.raises(ValueError, match=r"as cured, but forgets needs results with window 4"):
        build_card(forgets, [work.results])

    def label(evaluation: dict[str, Any]) -> None:
        evaluation["forgetting"]["window"] = 4

    own = changed(work, tmp_path / "own.json", label)
    text = str(build_card(forgets, [own]))
    assert "It is made to forget at inference (window 4)" in text
    assert "It cannot be trained as it is" in text
    assert "@article{chen2024stuffed," in text
    assert "forgetting" in metadata_of(text)["tags"]
    with pytest.raises(ValueError, match=r"as cured, but cured needs results with no forgetting"):
        build_card(work.cured, [own])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter .*lengthgen merge"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.*safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), "model.safetensors is damaged"),
        (lambda folder: (folder / "lineage.json").write_text("{}"), "lineage.json: Expected a document"),
    ],
    ids=["no-config", "cut-config", "adapter", "no-weights", "cut-weights", "lineage"],
)
def test_what_is_no_whole_checkpoint_is_refused(
    work: Work, tmp_path: Path, spoil: Callable[[Path], object], complaint: str
) -> None:
    folder = work.copy("cured", tmp_path / "folder")
    spoil(folder)
    with pytest.raises(ValueError, match=complaint):
        build_card(folder)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as a result file"),
        ("[]", "has the kind None"),
        ('{"kind": "lineage"}', "has the kind 'lineage', but must have one of comparison, .*retrieval"),
        ('{"kind": "comparison", "schema_version": 9}', "schema version 9"),
    ],
)
def test_what_is_no_result_file_is_refused(work: Work, tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        build_card(work.cured, [tmp_path / "file.json"])


def test_a_readme_of_a_person_is_kept(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    readme = folder / "README.md"
    readme.write_text("mine")
    with pytest.raises(ValueError, match=r"was not written by lengthgen card.*--overwrite"):
        write_card(folder)
    assert readme.read_text() == "mine"
    written = write_card(folder, overwrite=True)
    assert written.kept is not None
    assert written.kept.read_text() == "mine"
    card_of_it = readme.read_text()
    readme.write_text(card_of_it.replace("## Use", "## My use"))
    assert write_card(folder).kept is None
    assert readme.read_text() == card_of_it  # it says where own words stay


WORDS = "Trained by A. Person for `fun`.\n\n## Use\n\n- *not* for harm --- of anybody\n<!-- mine -->"


def written_into(readme: Path, words: str = WORDS) -> None:
    """As a person does it, in an editor."""
    begin, end = card.OWN_WORDS
    text = readme.read_text()
    assert text.count(f"{begin}\n\n{end}") == 1
    readme.write_text(text.replace(f"{begin}\n\n{end}", f"{begin}\n{words}\n\n\n{end}"))


@pytest.mark.slow
def test_own_words_outlive_all_that_writes_the_card(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    readme = write_card(folder, [work.results], CardSettings(license="mit")).path
    fresh = readme.read_text()
    written_into(readme)
    apache = {"settings": CardSettings(license="apache-2.0")}
    for options in ({}, {"results": []}, apache, {"overwrite": True}, {"results": [work.results]}):
        assert write_card(folder, **options).kept is None
        assert card.own_words(readme.read_text()) == WORDS
    assert write_card_of_run(str(folder), "me/mine", overwrite=False)
    text = readme.read_text()
    assert card.own_words(text) == WORDS
    assert "me/mine" in text
    assert read_card_mark(text).made_of == read_card_mark(fresh).made_of
    (folder / "model.safetensors").write_bytes((work.base / "model.safetensors").read_bytes())
    assert any("card is of other weights or another config" in line for line in plan_push(folder).refusals)
    readme.write_text(text.replace(card.OWN_WORDS[1], ""))
    with pytest.raises(ValueError, match=r"must have its own words between .* each mark once"):
        write_card(folder, overwrite=True)


@pytest.mark.slow
def test_what_was_said_once_is_said_again(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    said = CardSettings("me/mine", "mit", ("en", "de"), ("owner/texts",), ("A. Person",))
    first = write_card(folder, [work.results], said).path.read_text()
    assert write_card(folder).path.read_text() == first
    other = write_card(folder, None, CardSettings(license="apache-2.0", authors=("B. Person",))).path.read_text()
    assert ModelCard(other).data.license == "apache-2.0"
    assert ModelCard(other).data.language == ["en", "de"]
    assert "By B. Person." in other


TRAINERS = """---
library_name: transformers
license: mit
language: en
datasets:
- owner/texts
tags:
- generated_from_trainer
- sft
---

# My run

Trained with TRL, on my own data.
"""


def test_a_card_of_another_tool_is_replaced_and_kept(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    readme = folder / "README.md"
    readme.write_text(TRAINERS)
    for number in ("", "2"):
        written = write_card(folder, [], overwrite=True)
        assert written.kept == folder / f"README.old{number}.md"
        assert written.kept.read_text() == TRAINERS
        text = readme.read_text()
        assert card.own_words(text) == ""
        assert "generated_from_trainer" not in ModelCard(text).data.tags
        assert write_card(folder).path.read_text() == text
        readme.write_text(TRAINERS)


def test_a_card_is_written_again_from_its_own_results(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    first = write_card(folder, [work.results]).path.read_text()
    assert write_card(folder).path.read_text() == first
    assert write_card(folder, []).path.read_text() != first
    assert not (folder / "figures").exists()
    assert not (folder / "results").exists()


def test_a_card_tells_which_files_it_is_of(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    text = write_card(folder, [work.results]).path.read_text()
    mark = read_card_mark(text)
    assert mark is not None
    assert mark.made_of == cards_digest(verified_files(folder))
    for name in ("config.json", "model.safetensors"):
        other = work.copy("cured", tmp_path / name)
        with open(other / name, "ab") as file:
            file.write(b" ")
        assert cards_digest(verified_files(other)) != mark.made_of


@pytest.mark.slow
def test_files_of_the_user_are_kept(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    mine = {folder / "results" / "retrieval.json": "{}", folder / "figures" / "position_wise-2.png": "mine"}
    for file, text in mine.items():
        file.parent.mkdir()
        file.write_text(text)
    write_card(folder, [work.results])
    write_card(folder)  # not of the result that nobody quoted
    write_card(folder, [])
    assert {file: file.read_text() for file in mine} == mine
    assert not (folder / "results" / "comparison.json").exists()
    assert not (folder / "figures" / "position_wise.png").exists()
    (folder / "results" / "comparison.json").write_text("mine, too")
    old = (folder / "README.md").read_text()
    with pytest.raises(
        ValueError, match=r"These files were not written by .*results/comparison\.json\. Move .* --overwrite"
    ):
        write_card(folder, [work.results])
    assert (folder / "README.md").read_text() == old
    assert (folder / "results" / "comparison.json").read_text() == "mine, too"
    write_card(folder, [work.results], overwrite=True)
    assert {file: file.read_text() for file in mine} == mine


def test_a_card_of_a_stranger_deletes_nothing_outside(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    (tmp_path / "diagnosis.json").write_text("mine")
    names = ("../diagnosis.json", "results/../../diagnosis.json", str(tmp_path / "diagnosis.json"))
    (folder / "README.md").write_text(card.marked("# Card\n", {}, names))
    write_card(folder)
    assert (tmp_path / "diagnosis.json").read_text() == "mine"


def test_an_interrupt_leaves_the_old_card(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    old = write_card(folder, []).path.read_text()
    before = sorted(path.name for path in folder.iterdir())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for place in ("save_png", "write_result"):
        with monkeypatch.context() as patch:
            patch.setattr(card, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                write_card(folder, [work.results])
    assert (folder / "README.md").read_text() == old
    assert sorted(path.name for path in folder.iterdir()) == before

    moved: list[str] = []

    def move_once(source: Path, target: Path) -> None:
        if ".card." not in str(target):  # out of the temporary folder
            if moved:
                raise KeyboardInterrupt
            moved.append(target.name)
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(card.os, "replace", move_once)
        with pytest.raises(KeyboardInterrupt):
            write_card(folder, [work.results])
    assert len(moved) == 1
    assert (folder / "README.md").read_text() == old
    assert not list(folder.glob(".card.*"))


def test_nothing_of_the_machine_is_written(cured: Path, work: Work) -> None:
    for file in ("README.md", "results/comparison.json", "lineage.json"):
        text = (cured / file).read_text()
        assert not re.search(r"(?<![\w.:/])/(tmp|home|root|work|usr)\b", text), file
    found = json.loads((cured / "results" / "comparison.json").read_text())["models"][0]["evaluation"]
    assert str(work.folder) in evaluations(work)["base"]["command"]
    assert found["command"].startswith("lengthgen evaluate base cured --roles base,cured --data text.txt")


NAMES = [
    "a_b*c*",
    "x|y",
    "<b>no</b>",
    "[a](b)",
    "`tick`",
    "1. one",
    "# head",
    "&amp;",
    "$x$",
    "a\\b",
    "__x__",
    "~~s~~",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(name: str, work: Work, tmp_path: Path) -> None:
    assert shown(escape(name)) == name
    assert shown(f"# {escape(name)}") == name
    assert shown(f"| {escape(name)} | b |\n| --- | --- |\n| c | d |").splitlines()[0] == name


def test_a_card_with_special_names(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "we_ird* [x] |y|")

    def label(evaluation: dict[str, Any]) -> None:
        evaluation["model"] = "ba|se_*x*"
        evaluation["data"]["source"] = {"name": "some | <data>", "split": "a"}

    plain = json.loads(changed(work, tmp_path / "r.json", label, "base").read_text())
    text = str(build_card(folder, [tmp_path / "r.json"], CardSettings(authors=("A *star*",))))
    html = MarkdownIt("commonmark").enable("table").render(text.partition("\n---\n\n")[2])
    assert "<h1>we_ird* [x] |y|</h1>" in html
    assert '<th style="text-align:right">ba|se_*x*</th>' in html
    assert "By A *star*." in html
    assert metadata_of(text)["model-index"][0]["name"] == "we_ird* [x] |y|"
    assert plain["models"][0]["evaluation"]["model"] == "ba|se_*x*"
    [train] = [line for line in blocks(text, "bash")[0].splitlines()]
    assert shlex.split(train)[3] == "we_ird* [x] |y|"


def test_a_known_failure_is_told(work: Work, tmp_path: Path) -> None:
    def fail(evaluation: dict[str, Any]) -> None:
        evaluation["harm"]["last"] = {"mean": 1.0, "low": 0.9, "high": 1.1}
        evaluation["harm"]["harmful_from"] = 16
        evaluation["verdict"] |= {"holds_to": 8, "violated_from": 16}
        evaluation["in_window"]["context_use"] = {"mean": 0.1, "low": -0.1, "high": 0.3}

    text = str(build_card(work.cured, [changed(work, tmp_path / "fails.json", fail)]))
    assert "**It fails beyond its training length of 8 bytes.**" in text
    assert "length-generalization" not in metadata_of(text)["tags"]
    limits = text.partition("## Limits")[2]
    assert "longer texts it predicts worse than with only the last 8 bytes, from position 16 on" in limits
    assert "from position 16 on, its perplexity is more than 1% above the best one" in limits
    assert "not shown to use the context inside its training length" in limits

    text = str(build_card(work.cured, [changed(work, tmp_path / "holds.json", holds)]))
    assert "no harm by earlier text is shown at any position up to the 64 that were tested" not in text
    assert "but so does the base model: there was nothing to cure.**" in text
    text = str(build_card(work.cured, [against_a_broken_base(work, tmp_path, holds)]))
    assert "**It works beyond its training length of 8 bytes: no harm by earlier text is shown at any position" in text
    assert f"is {MINUS}0.200 [{MINUS}0.300, {MINUS}0.100] nats per byte" in text
    assert "; for the base model, before post-training, it is +1.000 [+0.900, +1.100]." in text
    assert "| Perplexity more than 1% above its best (Definition 3.2) | nowhere |" in text
    limits = text.partition("## Limits")[2]
    assert "Known failure" not in limits
    assert "Definition 3.2" not in limits
    assert "Retrieval from far back in a text (passkeys, needles) was not measured" in limits
    assert "length-generalization" in metadata_of(text)["tags"]


def holds(evaluation: dict[str, Any]) -> None:
    evaluation["harm"] |= {"last": {"mean": -0.2, "low": -0.3, "high": -0.1}, "harmful_from": None}
    evaluation["verdict"] |= {"holds_to": 64, "violated_from": None}
    evaluation["in_window"]["context_use"] = {"mean": 0.1, "low": 0.05, "high": 0.3}
    evaluation["in_window"]["loss"] = {"mean": 2.0, "low": 1.9, "high": 2.1}


def against_a_broken_base(work: Work, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    plain = json.loads(changed(work, folder / "changed.json", change).read_text())
    base = next(model["evaluation"] for model in plain["models"] if model["role"] == "base")
    base["harm"]["last"] = {"mean": 1.0, "low": 0.9, "high": 1.1}
    (folder / "broken.json").write_text(json.dumps(plain))
    return folder / "broken.json"


@pytest.mark.parametrize(
    ("place", "value", "headline", "limit"),
    [
        (
            ("harm", "harmful_from"),
            16,
            "It holds at positions 32 to 64, beyond its training length of 8 bytes, but earlier text harms it at some "
            "positions from 16 on.",
            "Known failure: at some positions from 16 on, earlier text increases its loss.",
        ),
        (
            ("verdict", "violated_from"),
            16,
            "but from 16 on its perplexity is more than 1% above the best one inside.",
            "Known failure: from position 16 on, its perplexity is more than 1% above",
        ),
        (
            ("in_window", "context_use"),
            {"mean": 0.1, "low": -0.1, "high": 0.3},
            "but it is not shown to use its context at all.",
            "It is not shown to use the context",
        ),
        (
            ("in_window", "loss"),
            {"mean": 6.0, "low": 5.9, "high": 6.1},
            "It predicts no better than a uniform guess (loss 5.951)",  # log(384)
            "Known failure: its loss is not below 5.951",
        ),
    ],
    ids=["harm", "rise", "no-context", "guess"],
)
def test_it_is_not_said_to_work_above_a_failure(
    work: Work, tmp_path: Path, place: tuple[str, str], value: Any, headline: str, limit: str
) -> None:
    def change(evaluation: dict[str, Any]) -> None:
        holds(evaluation)
        evaluation[place[0]][place[1]] = value

    text = str(build_card(work.cured, [against_a_broken_base(work, tmp_path, change)]))
    assert "It works" not in text
    assert "length-generalization" not in metadata_of(text)["tags"]
    assert re.search(rf"^\*\*.*{re.escape(headline)}.*\*\*", text, flags=re.MULTILINE)
    assert limit in text.partition("## Limits")[2]


@pytest.mark.parametrize(
    ("holds_to", "violated_from", "cell"),
    [
        (16, None, "not shown<br>(mean: from 16)"),
        (16, 32, "from 32<br>(mean: from 16)"),
        (16, 16, "from 16"),
    ],
)
def test_how_far_perplexity_stays_is_one_row(
    work: Work, tmp_path: Path, holds_to: int, violated_from: int | None, cell: str
) -> None:
    def change(evaluation: dict[str, Any]) -> None:
        evaluation["verdict"] |= {"holds_to": holds_to, "violated_from": violated_from}

    text = str(build_card(work.cured, [changed(work, tmp_path / "r.json", change)]))
    assert f"| Perplexity more than 1% above its best (Definition 3.2) | {cell} |" in text


@pytest.mark.slow
def test_one_text_has_no_intervals(work: Work, tmp_path: Path) -> None:
    measured = ("--data", work.text, "--split", "train", "--length", 32, "--sequences", 1, "--no-cache")
    arguments = ("evaluate", work.cured, *measured, "--output", tmp_path / "out")
    assert main([str(argument) for argument in arguments]) == 0
    plain = json.loads((tmp_path / "out" / "result.json").read_text())
    plain["models"][0]["evaluation"]["in_window"]["loss"]["mean"] = 2.0
    (tmp_path / "trained.json").write_text(json.dumps(plain))
    text = str(build_card(work.cured, [tmp_path / "trained.json"]))
    assert "**It is unclear whether it holds beyond its training length of 8 bytes.**" in text
    assert "None" not in text


def test_a_verification_is_quoted_while_it_is_of_these_files(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    check = Check("logits", "the reference scan", 64, 3e-7, 1e-5)
    write_verification(folder, Verification(verified_files(folder), (check,), {"torch": "2"}))
    text = str(build_card(folder))
    assert "| logits | the reference scan | 64 | 3e-07 | 1e-05 |" in text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": True}))
    text = str(build_card(folder))
    assert "the reference scan" not in text
    assert "These files were not verified" in text


def retrieval(work: Work, model: str = "cured", weights: str | None = None) -> RetrievalResult:
    return RetrievalResult(
        model=model,
        weights=weights or evaluations(work)["cured"]["weights"],
        training_length=8,
        task="passkey",
        style="pass key",
        shots=0,
        rows=("0 %", "100 %"),
        depths=(0.0, 1.0),
        lengths=(64, 128),
        cells=(
            (RetrievalCell(9, 10, 50), RetrievalCell(1, 10, 100)),
            (RetrievalCell(10, 10, 5), RetrievalCell(4, 10, 5)),
        ),
        confidence=0.95,
        data=DataRecord(DataSource("repeated sentences"), "ab" * 32, "byte"),
        device="cpu",
        versions={"torch": "2"},
        command=f"lengthgen retrieve {work.folder}/cured",
        seed=0,
        wall_seconds=1.0,
    )


def test_retrieval_is_shown_by_length(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    both = RetrievalComparison((retrieval(work, "base", "0" * 64), retrieval(work)))
    write_result(tmp_path / "retrieval.json", both)
    write_result(tmp_path / "one.json", RetrievalComparison((retrieval(work),)))
    files = [work.results, tmp_path / "retrieval.json", tmp_path / "one.json"]
    text = write_card(folder, files).path.read_text()
    # Wilson's interval of 19 of 20 and 5 of 20, by hand
    row = "| **this model** | 95<br>[76, 99] | 25<br>[11, 47] |"
    assert text.count(row) == 2
    assert "At least 95% are right up to 64 bytes." in text
    assert "Retrieval from far back" not in text
    assert "- Known failure: at 128 bytes, 25% of its answers are right (passkey)." in text
    for name in ("figures/retrieval.png", "figures/retrieval-2.png", "results/retrieval.json"):
        assert f"({name})" in text
        assert (folder / name).is_file()
    assert "lengthgen retrieve cured" in blocks(text, "bash")[1]
    found = [result for result in ModelCard(text).data.eval_results if result.metric_type == "accuracy"]
    assert [result.metric_value for result in found[:2]] == [0.95, 0.25]
    assert metadata_of(text)["metrics"] == ["perplexity", "accuracy"]


def test_a_diagnosis_is_shown_as_an_evaluation_and_more(work: Work, tmp_path: Path) -> None:
    models = read_result(work.results, Comparison).models
    near = Estimate(0.25, 0.2, 0.3)
    remembrance = Remembrance(8, 64, 3, 0.95, (0, 56), *(((near, near),) * 3))
    diagnosed = tuple(
        DiagnosedModel(model.role, model.evaluation, {"remembrance": remembrance}, {"states": "no_states"})
        for model in models
    )
    write_result(tmp_path / "result.json", Diagnosis("Diagnosis", diagnosed))
    text = str(build_card(work.cured, [tmp_path / "result.json"]))
    assert "change predictions by 0.250 [0.200, 0.300]" in text
    assert "Not measured: states (no_states)." in text
    plain = str(build_card(work.cured, [work.results]))
    row = re.search(r"^\| Harm of the context.*$", plain, flags=re.MULTILINE)
    assert row is not None
    assert row[0] in text
    assert "(results/diagnosis.json)" in text


@pytest.mark.parametrize("order", [1, -1])
def test_an_evaluation_that_is_also_in_a_diagnosis_is_shown_once(work: Work, tmp_path: Path, order: int) -> None:
    near = Misalignment(0.25, 0.2, 0.3, (0.2, 0.3))
    found = [model.evaluation for model in read_result(work.results, Comparison).models]

    def written_with(*evaluations: Any) -> str:
        roles = ("base", "cured")
        models = tuple(
            DiagnosedModel(role, replace(evaluation, command="lengthgen diagnose a"), {"misalignment": near}, {})
            for role, evaluation in zip(roles, evaluations, strict=True)
        )
        write_result(tmp_path / "diagnosis.json", Diagnosis("Diagnosis", models))
        return str(build_card(work.cured, [work.results, tmp_path / "diagnosis.json"][::order]))

    text = written_with(*found)
    assert (text.count("| Loss inside 8 bytes |"), text.count("- Measured on 3 texts")) == (1, 1)
    assert "-2.png" not in text
    assert len(ModelCard(text).data.eval_results) == 3
    assert "- Long-short misalignment: 0.250 [0.200, 0.300] nats." in text.partition("### Diagnosis")[2]
    assert "(results/diagnosis.json)" in text
    assert "lengthgen diagnose a" in text
    other = written_with(
        *(replace(evaluation, data=replace(evaluation.data, digest="0" * 64)) for evaluation in found)
    )
    assert other.count("| Loss inside 8 bytes |") == 2


def test_the_tokenizer_of_the_code_is_there(cured: Path) -> None:
    assert AutoTokenizer.from_pretrained(cured)("ab", add_special_tokens=False)["input_ids"] == [100, 101]
