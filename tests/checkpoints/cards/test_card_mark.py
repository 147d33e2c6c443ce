"""The comment of a card by which it is known, and what it tells of."""

import pytest

from hf_recurrent_lengthgen.checkpoints.card_mark import CardMark, cards_digest, read_card_mark
from hf_recurrent_lengthgen.checkpoints.records import carded


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
