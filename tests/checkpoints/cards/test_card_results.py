"""What a card says of results: failures, intervals, retrieval, diagnoses; and names as they are."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, build_card, write_card
from hf_recurrent_lengthgen.checkpoints.cards.markdown import escape
from hf_recurrent_lengthgen.checkpoints.cards.results import verdict
from hf_recurrent_lengthgen.checkpoints.records import Check, Verification, verified_files, write_verification
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.diagnosis.result import DiagnosedModel, Diagnosis
from hf_recurrent_lengthgen.metrics.remembrance.measure import Remembrance
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalComparison
from tests.checkpoints.cards.conftest import Work
from tests.checkpoints.cards.reading import MINUS, blocks, changed, evaluations, metadata_of, retrieval, shown
from tests.metrics.conftest import compared


def test_nothing_of_the_machine_is_written(intervention: Path, work: Work) -> None:
    for file in ("README.md", "results/comparison.json", "lineage.json"):
        text = (intervention / file).read_text()
        assert not re.search(r"(?<![\w.:/])/(tmp|home|root|work|usr)\b", text), file
    found = json.loads((intervention / "results" / "comparison.json").read_text())["models"][0]["evaluation"]
    assert str(work.folder) in evaluations(work)["base"]["command"]
    assert found["command"].startswith(
        "lengthgen evaluate base intervention --roles base,intervention --data text.txt"
    )


NAMES = ("a_b*c*", "x|y", "<b>no</b>", "[a](b)", "`tick`", "1. one", "# head", "&amp;", "$x$", "a\\b", "~~s~~")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(name: str) -> None:
    assert shown(escape(name)) == name
    assert shown(f"# {escape(name)}") == name
    assert shown(f"| {escape(name)} | b |\n| --- | --- |\n| c | d |").splitlines()[0] == name


def test_a_card_with_special_names(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "we_ird* [x] |y|")

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


def test_of_several_windows_the_base_with_that_of_the_checkpoint_is_compared() -> None:
    def model(role: Any, weights: str, window: int | None, harm: float) -> Any:
        one = compared(role, "m", harm)
        return replace(one, evaluation=replace(one.evaluation, weights=weights, attention_window=window))

    base, windowed = model("base", "1f", None, 1.4), model("base", "1f", 8, 0.0)
    intervention, same = model("intervention", "2f", None, 0.01), model("intervention", "2f", 8, 0.01)
    text = verdict([intervention, base, windowed, same], [], None)
    assert text.startswith("**It generalizes beyond its training length")
    assert text.count("for the base model, before post-training, it is +1.400") == text.count("base model") == 1
    assert "so does the base model: there was nothing to restore" in verdict(
        [same, base, windowed, intervention], [], None
    )
    assert "for the base model, before post-training, it is +1.400" in verdict([same, base], [], None)
    assert "base model" not in verdict([base, windowed], [], None)
    assert "base model" not in verdict([windowed, base], [], None)


def test_a_known_failure_is_reported(work: Work, tmp_path: Path) -> None:
    def fail(evaluation: dict[str, Any]) -> None:
        evaluation["harm"]["last"] = {"mean": 1.0, "low": 0.9, "high": 1.1}
        evaluation["harm"]["harmful_from"] = 16
        evaluation["verdict"] |= {"holds_to": 8, "violated_from": 16}
        evaluation["in_window"]["context_use"] = {"mean": 0.1, "low": -0.1, "high": 0.3}

    text = str(build_card(work.intervention, [changed(work, tmp_path / "fails.json", fail)]))
    assert "**It fails beyond its training length of 8 bytes.**" in text
    assert "length-generalization" not in metadata_of(text)["tags"]
    limits = text.partition("## Limits")[2]
    assert "longer texts it predicts worse than with at most the last 8 bytes, from position 16 on" in limits
    assert "from position 16 on, its perplexity is more than 1% above the best one" in limits
    assert "not shown to use the context inside its training length" in limits

    text = str(build_card(work.intervention, [changed(work, tmp_path / "holds.json", holds)]))
    assert "no excess loss above 0.05 is shown at any position up to the 64 that were tested" not in text
    assert "but so does the base model: there was nothing to restore.**" in text
    text = str(build_card(work.intervention, [against_a_broken_base(work, tmp_path, holds)]))
    assert (
        "**It generalizes beyond its training length of 8 bytes: no excess loss above 0.05 is shown at any position"
        in text
    )
    assert f"is {MINUS}0.200 [{MINUS}0.300, {MINUS}0.100] nats per byte" in text
    assert "; for the base model, before post-training, it is +1.000 [+0.900, +1.100]." in text
    assert "| Perplexity shown to be 1% above its best from (Definition 3.2) | nowhere |" in text
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
    ("place", "value", "failure"),
    [
        (("harm", "harmful_from"), 16, "at some positions from 16 on, earlier text increases its loss"),
        (("verdict", "violated_from"), 16, "from position 16 on, its perplexity is more than 1% above the best one"),
        (
            ("in_window", "context_use"),
            {"mean": 0.1, "low": -0.1, "high": 0.3},
            "it is not shown to use the context inside its training length",
        ),
        (
            ("in_window", "loss"),
            {"mean": 6.0, "low": 5.9, "high": 6.1},
            "its loss is not below 5.951, the loss of a uniform guess",  # log(384)
        ),
    ],
    ids=["harm", "rise", "no-context", "guess"],
)
def test_it_is_not_said_to_work_above_a_failure(
    work: Work, tmp_path: Path, place: tuple[str, str], value: Any, failure: str
) -> None:
    def change(evaluation: dict[str, Any]) -> None:
        holds(evaluation)
        evaluation[place[0]][place[1]] = value

    text = str(build_card(work.intervention, [against_a_broken_base(work, tmp_path, change)]))
    assert "It generalizes" not in text
    assert "length-generalization" not in metadata_of(text)["tags"]
    assert f"**It is not shown to generalize beyond its training length of 8 bytes: {failure}" in text
    assert f"- Known failure: {failure}" in text.partition("## Limits")[2]


def test_one_text_has_no_intervals(work: Work, tmp_path: Path) -> None:
    def shorten(evaluation: dict[str, Any]) -> None:
        alone = {"mean": 2.0, "low": None, "high": None}
        evaluation["harm"]["last"] = evaluation["in_window"]["loss"] = evaluation["in_window"]["context_use"] = alone

    text = str(build_card(work.intervention, [changed(work, tmp_path / "one.json", shorten)]))
    assert "**Whether it generalizes beyond its training length of 8 bytes is inconclusive.**" in text
    assert "None" not in text


def test_a_verification_is_quoted_while_it_is_of_these_files(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    check = Check("logits", "the reference scan", 64, 3e-7, 1e-5)
    write_verification(folder, Verification(verified_files(folder), (check,), {"torch": "2"}))
    text = str(build_card(folder))
    assert "passed the 1 checks of `lengthgen verify`" in text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": True}))
    text = str(build_card(folder))
    assert "passed the" not in text
    assert "These files were not verified" in text


def test_retrieval_is_shown_by_length(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    both = RetrievalComparison((retrieval(work, "base", "0" * 64), retrieval(work)))
    write_result(tmp_path / "retrieval.json", both)
    write_result(tmp_path / "one.json", RetrievalComparison((retrieval(work),)))
    files = [work.results, tmp_path / "retrieval.json", tmp_path / "one.json"]
    text = write_card(folder, files).read_text()
    # Wilson's interval of 19 of 20 and 5 of 20, by hand
    row = "| **this model** | 95<br>[76, 99] | 25<br>[11, 47] |"
    assert text.count(row) == 2
    assert "At least 95% are right up to 64 bytes." in text
    assert "Retrieval from far back" not in text
    assert "- Known failure: at 128 bytes, 25% of its answers are right (passkey)." in text
    for name in ("results/retrieval.json", "results/retrieval-2.json"):
        assert f"({name})" in text
        assert (folder / name).is_file()
    assert "lengthgen retrieve intervention" in blocks(text, "bash")[1]
    found = [result for result in ModelCard(text).data.eval_results if result.metric_type == "accuracy"]
    assert [result.metric_value for result in found[:2]] == [0.95, 0.25]
    assert metadata_of(text)["metrics"] == ["perplexity", "accuracy"]


def test_a_diagnosis_is_shown_as_an_evaluation_and_more(work: Work, tmp_path: Path) -> None:
    models = read_result(work.results, Comparison).models
    near = Estimate(0.25, 0.2, 0.3)
    remembrance = Remembrance(8, 64, 3, 0.95, (0, 56), (near, near))
    diagnosed = tuple(
        DiagnosedModel(model.role, model.evaluation, {"remembrance": remembrance}, {"states": "no_states"})
        for model in models
    )
    write_result(tmp_path / "result.json", Diagnosis("Diagnosis", diagnosed))
    text = str(build_card(work.intervention, [tmp_path / "result.json"]))
    assert "- Effective Remembrance: 0.250 (0.200 to 0.300)." in text
    assert "Not measured: states (no_states)." in text
    plain = str(build_card(work.intervention, [work.results]))
    row: Any = re.search(r"^\| Excess loss from context.*$", plain, flags=re.MULTILINE)
    assert row[0] in text
    assert "(results/diagnosis.json)" in text
    both = str(build_card(work.intervention, [tmp_path / "result.json", work.results]))
    assert (both.count(row[0]), both.count("- Measured on 3 sequences")) == (1, 1)
    assert "Effective Remembrance: 0.250" in both.partition("### Diagnosis")[2]
    assert len(ModelCard(both).data.eval_results) == 3
