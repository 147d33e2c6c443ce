"""What stays when a card is written again, and the comment by which a card is known."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_recurrent_lengthgen.checkpoints.card_mark import CardMark, cards_digest, read_card_mark
from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, card, write_card, write_card_of_run
from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push
from hf_recurrent_lengthgen.checkpoints.records import carded
from tests.checkpoints.cards.conftest import Work
from tests.checkpoints.cards.reading import WORDS, written_into


def test_a_readme_of_a_person_is_kept(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    readme = folder / "README.md"
    for number in ("", "2"):
        readme.write_text("---\ntags:\n- sft\n---\nmine")
        with pytest.raises(ValueError, match=r"was not written by lengthgen card.*--overwrite"):
            write_card(folder)
        written = write_card(folder, overwrite=True)
        assert written.kept == folder / f"README.old{number}.md"
        assert written.kept.read_text().endswith("mine")
        assert "sft" not in ModelCard(readme.read_text()).data.tags
    card_of_it = readme.read_text()
    readme.write_text(card_of_it.replace("## Use", "## My use"))
    assert write_card(folder).kept is None
    assert readme.read_text() == card_of_it  # it says where own words stay


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


def test_a_card_is_written_again_from_its_own_results(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    first = write_card(folder, [work.results]).path.read_text()
    assert write_card(folder).path.read_text() == first
    assert write_card(folder, []).path.read_text() != first
    assert not [*(folder / "figures").iterdir(), *(folder / "results").iterdir()]


def test_a_card_of_a_stranger_deletes_nothing_outside(work: Work, tmp_path: Path) -> None:
    folder = work.copy("cured", tmp_path / "cured")
    (tmp_path / "diagnosis.json").write_text("mine")
    names = ("../diagnosis.json", "results/../../diagnosis.json", str(tmp_path / "diagnosis.json"))
    (folder / "README.md").write_text(card.marked("# Card\n", {}, names))
    write_card(folder)
    assert (tmp_path / "diagnosis.json").read_text() == "mine"


def test_a_mark_is_read_back_from_a_card() -> None:
    mark = CardMark("ab", ("figures/a --> <b>.png",), {"language": ("en", "de"), "license": "mit"})
    comment = mark.comment()
    assert comment.count("-->") == comment.count("<") == 1
    assert read_card_mark(f"# Name\n\nText.\n\n{comment}\n\n<!-- other -->\n") == mark


@pytest.mark.parametrize(
    "comment",
    [
        "<!-- made by lengthgen card: {broken} -->",
        '<!-- made by lengthgen card: {"kind": "card", "schema_version": 1, "made_of": 1} -->',
        '<!-- made by lengthgen card: {"kind": "card", "schema_version": 1} -->',
        '<!-- made by lengthgen card: {"kind": "card", "schema_version": 999} -->',
    ],
)
def test_a_mark_that_is_not_sound_is_refused(comment: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|made_of|999"):
        read_card_mark(f"# Name\n{comment}\n")


def test_a_card_without_a_mark_has_none() -> None:
    assert read_card_mark("# Name\n") is None


def test_code_is_not_what_numbers_are_of() -> None:
    files = {"config.json": "a", "model.safetensors": "b", "model.safetensors.index.json": "c", "norms.py": "d"}
    assert [*carded(files)] == ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert cards_digest(files) == cards_digest(carded(files)) != cards_digest(files | {"config.json": "b"})
