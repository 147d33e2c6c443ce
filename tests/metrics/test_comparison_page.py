import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.metrics.context_harm.page import comparison_page
from hf_recurrent_lengthgen.metrics.context_harm.result import ComparedModel, Comparison
from hf_recurrent_lengthgen.metrics.context_harm.words import summary

ModelOf = Callable[..., ComparedModel]
VOID = {"meta", "br", "img", "link"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def page(demo: Comparison) -> str:
    return comparison_page(demo, 'model = load("demo/cured")')


def test_the_page_loads_nothing(page: str) -> None:
    reader = Reader(page)
    loading = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}
    loads = [value for _, name, value in reader.attributes if name in loading and not value.startswith("#")]
    assert loads == []
    assert not {tag for tag, _, _ in reader.attributes} & {"script", "link", "iframe", "object", "embed", "base"}
    assert "@import" not in page
    assert "<script" not in page
    assert "//" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_the_page_tells_the_finding_first_and_every_number(demo: Comparison, page: str) -> None:
    text = Reader(page).text
    assert text.index(summary(demo)) < text.index("Numbers")
    for expected in (
        "Beyond the training length",
        "✕ breaks",
        "✓ holds",
        "+1.400 +1.390 to +1.410",
        "+0.020 +0.010 to +0.030",
        "+1.200 +1.190 to +1.210",
        "2.030 2.020 to 2.040",
        "training of state passing 600 steps, 41 s, loss 1.500",
        "lengthgen demo --seed 0",
        "made-up bytes; 32 sequences of 1,024 tokens",
        "ab" * 32,
        "torch 2.13",
        "36 s for 3 models",
        "positions 512 to 1,024",
        'model = load("demo/cured")',
    ):
        assert expected in text, expected
    assert page.count("<svg") == 3


def test_element_ids_are_unique(page: str) -> None:
    identifiers = [value for _, name, value in Reader(page).attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers)) > 30


def test_colors_follow_the_scheme_of_the_reader(page: str) -> None:
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = page.split("@media(prefers-color-scheme:dark)", 1)
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark.split("}}", 1)[0]
    assert 'name="viewport"' in page


def test_everything_given_is_escaped(model_of: ModelOf) -> None:
    evil = '"><script>alert(1)</script>&'
    model = model_of("base", evil, 1.0)
    assert model.training is not None
    data = dataclasses.replace(model.evaluation.data, source=DataSource(evil), digest=evil, token_unit=evil)
    evaluation = dataclasses.replace(model.evaluation, data=data, command=evil, device=evil, versions={evil: evil})
    training = dataclasses.replace(model.training, methods=(evil,))
    text = comparison_page(Comparison(evil, (ComparedModel("base", evaluation, training),)), evil)
    assert "<script" not in text
    assert Reader(text).text.count("alert(1)") >= 10


def test_values_that_differ_between_models_are_shown_for_each(demo: Comparison) -> None:
    base, cured, _ = demo.models
    seeded = dataclasses.replace(cured, evaluation=dataclasses.replace(cured.evaluation, seed=7), training=None)
    text = Reader(comparison_page(Comparison("t", (base, seeded)))).text
    assert "base: 0; state passing: 7" in text
    assert "not recorded" in text
    assert "Load the checkpoint" not in text


def test_one_sequence_gives_a_page_without_intervals(model_of: ModelOf) -> None:
    text = Reader(comparison_page(Comparison("t", (model_of("base", "base", 1.0, width=None),)))).text
    assert "? unclear" in text
    assert "Bands:" not in text
    assert "one sequence cannot tell" in text
