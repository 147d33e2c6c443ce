"""Each paper is cited under one number and one title."""

import re
import subprocess
from pathlib import Path

import pytest

from hf_recurrent_lengthgen.checkpoints.papers import ALIGNMENT, PAPERS, UNEXPLORED_STATES, Paper

ROOT = Path(__file__).parents[2]
SOURCES = ("*.py", "*.md", "*.yaml")


def cited() -> dict[str, set[str]]:
    """Files by the numbers they cite."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    found: dict[str, set[str]] = {}
    for name in listed.stdout.split():
        text = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else ""
        for number in re.findall(r"(?:arXiv:|arxiv\.org/abs/|arxiv: \"?)(\d{4}\.\d{5})", text):
            found.setdefault(number, set()).add(name)
    return found


def test_every_cited_number_is_a_known_paper() -> None:
    unknown = {number: files for number, files in cited().items() if number not in PAPERS}
    assert not unknown


def test_a_paper_has_one_title() -> None:
    listed = subprocess.run(
        ["git", "grep", "-liE", "top-down approach to length", "--", *SOURCES],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    allowed = {"hf_recurrent_lengthgen/checkpoints/papers.py", "tests/checkpoints/test_papers.py"}
    assert set(listed.stdout.split()) <= allowed


def test_papers_are_named_as_texts_cite_them() -> None:
    assert UNEXPLORED_STATES.name == "Buitrago Ruiz and Gu, 2025"
    assert ALIGNMENT.name == "Du et al., 2025"
    assert Paper("1", "Weston, Jason and others", 2015, "T").name == "Weston et al., 2015"
    assert ALIGNMENT.bibtex.startswith("@article{du2025longshort,")
    assert UNEXPLORED_STATES.bibtex.startswith("@article{buitragoruiz2025understanding,\n  title = {Understanding")
