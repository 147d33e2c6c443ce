"""The comment of a card by which it is known which files it tells of."""

import pytest

from hf_recurrent_lengthgen.records import card_files, card_record, carded, read_card_record


def test_a_record_is_read_back_from_a_card() -> None:
    files, wrote = {"config.json": "ab", "a --> <b>.safetensors": "cd"}, {"figures/a.png": "ef"}
    comment = card_record(files, wrote)
    assert comment.count("-->") == comment.count("<") == 1
    text = f"# Name\n\nText.\n\n{comment}\n\n<!-- other -->\n"
    assert card_files(text) == files
    assert read_card_record(text) == {"files": files, "wrote": wrote}


@pytest.mark.parametrize(
    "text",
    [
        "# Name\n",
        "<!-- lengthgen card of {broken} -->\n",
        '<!-- lengthgen card of {"files": {"a": 1}, "wrote": {}} -->\n',
        '<!-- lengthgen card of {"files": {}} -->\n',
    ],
)
def test_a_card_without_a_sound_record_has_none(text: str) -> None:
    assert card_files(text) is None


def test_code_is_not_what_numbers_are_of() -> None:
    files = {"config.json": "a", "model.safetensors": "b", "model.safetensors.index.json": "c", "norms.py": "d"}
    assert [*carded(files)] == ["config.json", "model.safetensors", "model.safetensors.index.json"]
