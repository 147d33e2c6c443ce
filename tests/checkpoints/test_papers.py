"""Papers are named as texts cite them."""

from hf_recurrent_lengthgen.checkpoints.papers import ALIGNMENT, UNEXPLORED_STATES, Paper


def test_papers_are_named_as_texts_cite_them() -> None:
    assert UNEXPLORED_STATES.name == "Buitrago Ruiz and Gu, 2025"
    assert ALIGNMENT.name == "Du et al., 2025"
    assert Paper("1", "Weston, Jason and others", 2015, "T").name == "Weston et al., 2015"
    assert ALIGNMENT.bibtex.startswith("@article{du2025longshort,")
    assert UNEXPLORED_STATES.bibtex.startswith("@article{buitragoruiz2025understanding,\n  title = {Understanding")
