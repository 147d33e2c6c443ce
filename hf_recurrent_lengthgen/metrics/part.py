"""A part of a diagnosis: one metric, with everything that the command, the page and the card show about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from hf_recurrent_lengthgen.evaluation.measurement import Measurement
from hf_recurrent_lengthgen.evaluation.results import PartResult, Role
from hf_recurrent_lengthgen.metrics.context_harm.summary import Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # drawn on demand only

Result = TypeVar("Result", bound=PartResult)

INSIDE = "Inside the training length"
"""Heading of a section of pages."""


@dataclass(frozen=True)
class Picture(Generic[Result]):
    """A figure of a page.

    Attributes:
        draw: Draws it from results by model name (at least one), the roles of the models, and the name of a token.
        shows: Whether a result has something to draw.
        bands: Whether it has bands for the intervals over sequences.
    """

    draw: Callable[[Mapping[str, Result], Sequence[Role], str], "Figure"]
    caption: str
    shows: Callable[[Result], bool] = lambda _: True
    bands: bool = False


@dataclass(frozen=True)
class Part(Generic[Result]):
    """One metric of a diagnosis: how it is measured, and everything that is shown about its result.

    Attributes:
        name, title, summary: Name in files and options, title in lists, and line in the command's help.
        compute: Measures the result; raises a `ValueError` with the reason if it cannot be measured.
        section: Heading under which the page shows it.
        texts: Sentences of the page about a result; the second argument is the name of a token.
        facts: Key numbers for the page, the terminal and model cards: name -> value.
        pictures: Figures by file name.
        definitions: Definitions of terms, from all results of a page.
        reason: A clause that explains the model's verdict, or "".
    """

    name: str
    title: str
    summary: str
    compute: Callable[[Measurement], Result]
    section: str
    texts: Callable[[Result, str], Sequence[str]]
    facts: Callable[[Result], Mapping[str, str]]
    pictures: Mapping[str, Picture[Result]] = field(default_factory=dict)
    definitions: Callable[[Sequence[Result]], Sequence[str]] = lambda _: ()
    reason: Callable[[Result, Status], str] = lambda *_: ""
