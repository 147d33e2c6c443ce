"""The page of diagnoses made by hand: what it says, that it stands alone, and what it leaves out."""

import dataclasses
import re
from html import escape
from html.parser import HTMLParser

import pytest

from hf_recurrent_lengthgen.evaluation.results import DataSource
from hf_recurrent_lengthgen.metrics.diagnosis.page import LENGTH, diagnosis_figures, diagnosis_page, diagnosis_summary
from hf_recurrent_lengthgen.metrics.diagnosis.result import Diagnosis
from hf_recurrent_lengthgen.metrics.parts import PARTS
from tests.metrics.diagnoses import diagnosed, expected, hybrid, states, with_part, without_parts

VOID = {"meta", "br", "img", "link"}
STATE_FIGURES = {"state_distance", "state_patching", "state_std", "state_retention"}
EVALUATED = {"context_harm", "position_wise", "in_window"}


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
def page() -> str:
    return diagnosis_page(expected())


@pytest.fixture(scope="module")
def llama() -> Diagnosis:
    """A model without states, and of which nothing else was requested."""
    return Diagnosis("t", (without_parts(diagnosed("other", "llama", 1.4), "It has no state."),))


FIGURES = STATE_FIGURES | EVALUATED | {"remembrance", "constant_prompt"}


def drawn(page: str) -> set[str]:
    """Names of the figures of a page, from the ids inside them."""
    return {name for name in FIGURES if f'id="{name}-figure_1"' in page}


def test_the_page_loads_nothing(page: str) -> None:
    reader = Reader(page)
    loading = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}
    loads = [value for _, name, value in reader.attributes if name in loading and not value.startswith("#")]
    assert all(value.startswith("data:image/png;base64,") for value in loads)
    assert not {tag for tag, _, _ in reader.attributes} & {"script", "link", "iframe", "object", "embed", "base"}
    without_images = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=\s]*", "", page)
    assert "//" not in without_images
    assert "@import" not in page
    assert "<script" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_the_first_words_are_the_verdict(page: str) -> None:
    text = Reader(page).text
    assert diagnosis_summary(expected()) in text
    top, rest = page.split("<section>", 1)
    for words in ("✕ fails", "3 of 8, layer 1, head 2 the furthest", "✓ generalizes"):
        assert words in re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", top))
    headings = re.findall("<h2>(.*?)</h2>", rest)
    assert headings[0] == LENGTH
    assert {part.section for part in PARTS.values()} < {*headings}
    assert all(escape(sentence) in rest for sentence in said_of(expected()))


def said_of(diagnosis: Diagnosis) -> list[str]:
    """All sentences of the parts, and their definitions."""
    pairs = [(part, model.parts[name]) for model in diagnosis.models for name, part in PARTS.items()]
    return [text for part, found in pairs for text in (*part.texts(found, "byte"), *part.definitions([found])[:1])]


def test_every_number_is_in_the_table(page: str) -> None:
    table = Reader(page[page.index("<table") : page.index("</table>") + len("</table>")]).text
    for numbers in (
        "+1.400 +1.390 to +1.410 +0.020 +0.010 to +0.030",
        "Heads that drift 3 of 8, layer 1, head 2 the furthest none of 8",
        "Share of the excess loss from heads that drift 97% no excess loss shown",
        "Effective Remembrance 0.200 (0.190 to 0.210) 0.030 (0.020 to 0.040)",
        "Constant prompt fails at 32 tokens passes",
    ):
        assert numbers in table, numbers


def test_how_it_was_made_names_both_models(page: str) -> None:
    text = Reader(page).text
    for expected_words in (
        "lengthgen demo --seed 0",
        "made-up bytes; 32 sequences of 1,024 tokens",
        "ab" * 32,
        "torch 2.13",
        "SHA-256 of the weights 9f",
        "24 s for 2 models",
    ):
        assert expected_words in text, expected_words


def test_element_ids_are_unique(page: str) -> None:
    identifiers = [value for _, name, value in Reader(page).attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers)) > 100


def test_all_figures_are_drawn_and_described(page: str) -> None:
    assert drawn(page) == FIGURES
    images = re.findall(r'<svg role="img" aria-label="([^"]*)"', page)
    assert len(images) == len(FIGURES)
    assert all("layer 1, head 2 the furthest" in label for label in images)


def test_colors_follow_the_scheme_of_the_reader(page: str) -> None:
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = page.split("@media(prefers-color-scheme:dark)", 1)
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark.split("}}", 1)[0]


def test_a_model_without_parts_gets_no_empty_figures_or_sections(llama: Diagnosis) -> None:
    page = diagnosis_page(llama)
    text = Reader(page).text
    assert drawn(page) == EVALUATED
    assert set(diagnosis_figures(llama)) == EVALUATED
    for absent in ("Why: the states", "What it remembers", "One token repeated", "Wasserstein", "drift"):
        assert absent not in text
    assert "<dl></dl>" not in page
    assert "Not measured llama, states: It has no state. Effective Remembrance: not requested." in text


@pytest.mark.slow
def test_models_with_and_without_states_stand_side_by_side(llama: Diagnosis) -> None:
    base = expected().models[0]
    unpatched = diagnosed("other", "hybrid", 0.0, dataclasses.replace(states({}, known=False), patching=None))
    for name in ("remembrance", "constant prompt"):
        unpatched = with_part(unpatched, name, None)
    page = diagnosis_page(Diagnosis("t", (base, unpatched, *llama.models)))
    text = Reader(page).text
    assert drawn(page) == FIGURES
    assert text.count("Heads that drift 3 of 8") == 2  # in the card of the model, and in the table
    assert text.count("not measured") == 8  # all 5 rows of the bare model, 3 of the hybrid's


@pytest.mark.slow
def test_a_hybrid_has_attention_apart_and_other_models_no_empty_rows(page: str) -> None:
    assert "long states" not in Reader(page).text
    assert "attention_harm" not in diagnosis_figures(expected())
    model = diagnosed("base", "bamba", 1.4, hybrid())
    text = Reader(diagnosis_page(Diagnosis("t", (model, expected().models[1])))).text
    for words in (
        "bamba fails beyond 64 tokens. The states of layer 1",
        "Excess loss from long states alone +1.200 nats",
    ):
        assert words in text, words


def test_all_input_is_escaped() -> None:
    evil = '"><script>alert(1)</script>&'
    found = states({(0, 1): 3.0})
    heads = tuple(dataclasses.replace(head, unit=evil) for head in found.heads)
    model = diagnosed("base", evil, 1.0, dataclasses.replace(found, left_out=(evil,), heads=heads))
    data = dataclasses.replace(model.evaluation.data, source=DataSource(evil), digest=evil, token_unit=evil)
    model = dataclasses.replace(
        model,
        evaluation=dataclasses.replace(
            model.evaluation, data=data, command=evil, device=evil, versions={evil: evil}, weights=evil
        ),
        refused={evil: evil},
    )
    page = diagnosis_page(Diagnosis(evil, (model,)))
    assert "<script" not in page
    assert Reader(page).text.count("alert(1)") >= 20


def test_a_page_of_evaluations_alone() -> None:
    base, intervention = (without_parts(diagnosed(role, role, 1.0)) for role in ("base", "intervention"))
    seeded = dataclasses.replace(intervention, evaluation=dataclasses.replace(intervention.evaluation, seed=7))
    page = diagnosis_page(Diagnosis("t", (base, seeded)), 'model = load("<intervention>")')
    text = Reader(page).text
    assert "base: 0; intervention: 7" in text
    assert text.strip().endswith('Load the checkpoint model = load("<intervention>")')
    assert "Not measured" not in text
    assert drawn(page) == EVALUATED


def test_one_sequence_gives_a_page_without_intervals() -> None:
    model = diagnosed("base", "base", 1.0, width=None)
    text = Reader(diagnosis_page(Diagnosis("t", (with_part(model, "remembrance", None),)))).text
    assert "? inconclusive" in text
    assert "Bands:" not in text
    assert "one sequence gives no interval" in text


@pytest.mark.slow
def test_the_page_of_a_large_model_stays_small() -> None:
    drifting = {(layer, number): 50.0 - layer for layer in range(12) for number in range(64)}
    large = diagnosed("base", "base", 1.4, states(drifting, layers=24, heads=64))
    page = diagnosis_page(Diagnosis("t", (large,)))
    assert "768 of 1,536 heads drift" in page
    assert len(page) < 1_000_000


def test_paths_are_written_once_and_named_by_their_ends() -> None:
    models = diagnosed("base", "/data/run 7/base", 1.0), diagnosed("intervention", "/data/run 7/intervention", 0.0)
    page = diagnosis_page(Diagnosis("t", models))
    assert "base fails beyond 64 tokens. intervention restores length generalization" in Reader(page).text.replace(
        "  ", " "
    )
    assert "Models base: /data/run 7/base; intervention: /data/run 7/intervention Command" in Reader(page).text
    assert page.count("/data/run 7/base") == 1
