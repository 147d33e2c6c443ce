"""The documentation as it is built: no warning, no broken link, every public name and command."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml

from hf_recurrent_lengthgen.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = {
    "hf_recurrent_lengthgen": "top",
    "hf_recurrent_lengthgen.checkpoints": "top",
    "hf_recurrent_lengthgen.checkpoints.cards": "top",
    "hf_recurrent_lengthgen.data": "data",
    "hf_recurrent_lengthgen.data.tasks": "data",
    "hf_recurrent_lengthgen.metrics": "metrics",
    "hf_recurrent_lengthgen.harness": "top",
    "hf_recurrent_lengthgen.hybrids": "top",
    "hf_recurrent_lengthgen.models": "models",
    "hf_recurrent_lengthgen.state_files": "state_files",
    "hf_recurrent_lengthgen.surgery": "surgery",
    "hf_recurrent_lengthgen.trainers": "trainers",
    "hf_recurrent_lengthgen.checkpoints.verification": "top",
}


class Page(HTMLParser):
    """The links, places and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.places |= {place for place in (values.get("id"), values.get("name")) if place}
        self.links += [link for link in (values.get("href"), values.get("src")) if link]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def pages_of(entry: object) -> list[str]:
    """The files that a part of the navigation names."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]  # type: ignore[attr-defined]


def test_every_page_of_the_navigation_exists_and_no_other() -> None:
    named = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(named) == len({*named})
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_package_with_public_names_has_a_page() -> None:
    listing = (path for path in (ROOT / "hf_recurrent_lengthgen").rglob("__init__.py"))
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in listing if "__all__ = " in path.read_text("utf-8")
    }
    assert packages | {"hf_recurrent_lengthgen.trainers"} == {*REFERENCE}  # a link, which rglob does not follow


@pytest.mark.slow
@pytest.mark.parametrize("package", REFERENCE)
def test_every_public_name_is_in_the_reference(package: str, site: Path, pages: dict[Path, Page]) -> None:
    page = pages[site / "reference" / REFERENCE[package] / "index.html"]
    for name in importlib.import_module(package).__all__:
        place = f"{package}.{name}"
        (found,) = {place, f"{place}.{name}"} & page.places or {None}
        assert found, f"{place} has no section"
        assert f"#{found}" in page.links, f"{place} is not in the table"


@pytest.mark.slow
def test_every_command_is_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    page = pages[site / "reference" / "command_line" / "index.html"]
    for name in COMMANDS:
        assert f"lengthgen-{name}" in page.places
        # that of lm_eval goes on below ours
        start = "Run lm-evaluation-harness" if name == "harness" else f"usage: lengthgen {name} "
        assert start in page.words
    assert "usage: lengthgen recipe show " in page.words
    assert "~/.cache" in page.words
    assert str(Path.home()) not in page.words


@pytest.mark.slow
def test_links_inside_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address, place = urldefrag(link)
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            start = site if address.startswith("/") else path.parent
            target = Path(os.path.normpath(start / unquote(address).lstrip("/"))) if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (place and target in pages and unquote(place) not in pages[target].places):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 25
    assert broken == []


def test_links_between_files_lead_somewhere() -> None:
    links = [path for path in (ROOT / "docs").rglob("*") if path.is_symlink()]
    assert links
    assert [str(link) for link in links if not link.exists()] == []


def test_the_drawing_of_the_folders_shows_who_imports_whom() -> None:
    """A folder imports from those below it only, whatever their row."""
    rules = importlib.import_module("tests.test_architecture").MAY_IMPORT
    drawing = (DOCS / "figures" / "folders.svg").read_text(encoding="utf-8")
    height = {name: int(y) for y, name in re.findall(r'class="name" x="\d+" y="(\d+)">([^<]+)<', drawing)}
    folders = {path.parent.name for path in (ROOT / "hf_recurrent_lengthgen").glob("*/__init__.py")}
    assert height.keys() == folders
    for upper, uses in rules.items():
        for lower in uses:
            here, there = upper.partition(".")[0], lower.partition(".")[0]
            if here != there and here in height and there in height:
                assert height[here] < height[there], f"{here} is not drawn above {there}"
