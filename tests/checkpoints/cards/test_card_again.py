"""What stays when a card is written again, and the comment by which a card is known."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_recurrent_lengthgen.checkpoints.card_mark import card_mark, read_card_mark
from hf_recurrent_lengthgen.checkpoints.cards import CardSettings, card, write_card, write_card_of_run
from hf_recurrent_lengthgen.checkpoints.hub.push import plan_push
from hf_recurrent_lengthgen.checkpoints.records import carded
from tests.checkpoints.cards.conftest import Work
from tests.checkpoints.cards.reading import WORDS, written_into


@pytest.mark.slow
def test_a_readme_of_a_person_is_replaced_only_on_request(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    readme = folder / "README.md"
    readme.write_text("---\ntags:\n- sft\n---\nmine")
    with pytest.raises(ValueError, match=r"was not written by lengthgen card.*--overwrite"):
        write_card(folder)
    assert write_card(folder, overwrite=True) == readme
    assert "sft" not in ModelCard(readme.read_text()).data.tags
    card_of_it = readme.read_text()
    readme.write_text(card_of_it.replace("## Use", "## My use"))
    write_card(folder)
    assert readme.read_text() == card_of_it  # it has the marks of the manual section


@pytest.mark.slow
def test_the_manual_section_stays_whatever_writes_the_card(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    readme = write_card(folder, [work.results], CardSettings(license="mit"))
    fresh = readme.read_text()
    written_into(readme)
    apache = {"settings": CardSettings(license="apache-2.0")}
    for options in ({}, {"results": []}, apache, {"overwrite": True}, {"results": [work.results]}):
        write_card(folder, **options)
        assert card.own_words(readme.read_text()) == WORDS
    assert write_card_of_run(str(folder), "me/mine", overwrite=False)
    text = readme.read_text()
    assert card.own_words(text) == WORDS
    assert "me/mine" in text
    assert read_card_mark(text) == read_card_mark(fresh) is not None
    (folder / "model.safetensors").write_bytes((work.base / "model.safetensors").read_bytes())
    assert any("card is of other weights or another config" in line for line in plan_push(folder).refusals)
    readme.write_text(text.replace(card.OWN_WORDS[1], ""))
    with pytest.raises(ValueError, match=r"must have its manual section between .* each once"):
        write_card(folder, overwrite=True)


@pytest.mark.slow
def test_the_metadata_of_a_card_stay(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    said = CardSettings(license="mit", language=("en", "de"), datasets=("owner/texts",))
    first = write_card(folder, [work.results], said).read_text()
    assert write_card(folder).read_text() == first
    other = write_card(folder, None, CardSettings(license="apache-2.0", authors=("B. Person",))).read_text()
    assert ModelCard(other).data.license == "apache-2.0"
    assert ModelCard(other).data.language == ["en", "de"]
    assert "By B. Person." in other


def test_a_card_is_written_again_from_its_own_results(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    first = write_card(folder, [work.results]).read_text()
    assert write_card(folder).read_text() == first
    assert write_card(folder, []).read_text() != first
    assert not [*(folder / "figures").iterdir(), *(folder / "results").iterdir()]


def test_files_of_a_person_beside_those_of_a_card_stay(work: Work, tmp_path: Path) -> None:
    folder = work.copy("intervention", tmp_path / "intervention")
    write_card(folder, [work.results])
    (folder / "results" / "mine.json").write_text("mine")
    write_card(folder, [])
    assert [path.name for path in (folder / "results").iterdir()] == ["mine.json"]


def test_code_is_not_what_numbers_are_of() -> None:
    files = {"config.json": "a", "model.safetensors": "b", "model.safetensors.index.json": "c", "norms.py": "d"}
    assert [*carded(files)] == ["config.json", "model.safetensors", "model.safetensors.index.json"]
    assert card_mark(files) == card_mark(carded(files)) != card_mark(files | {"config.json": "b"})
    assert read_card_mark(f"# Name\n\n{card_mark(files)}\n\n<!-- other -->\n") == card_mark(files)
    assert read_card_mark("# Name\n") is None
