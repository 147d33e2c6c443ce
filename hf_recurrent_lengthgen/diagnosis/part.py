"""A part of a diagnosis: one metric, with everything that the command, the page and the card show of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from matplotlib.figure import Figure

from hf_recurrent_lengthgen.evaluation.evaluate import EvaluationSettings, Measurement, option
from hf_recurrent_lengthgen.evaluation.results import PartResult, Role
from hf_recurrent_lengthgen.evaluation.state_diagnosis import PATCHED_HEADS
from hf_recurrent_lengthgen.plotting.findings import Status

Result = TypeVar("Result", bound=PartResult)


@dataclass(frozen=True)
class DiagnosisSettings(EvaluationSettings):
    """How a model is diagnosed; fields with a help are options of `lengthgen diagnose`.

    Attributes:
        parts: Names of the parts to take beside the evaluation; None for all.
        patched_heads: So many heads are exchanged one by one, see `with_patching`; 0 for no patching.
        repeated_token: The token of the constant prompt, such as that of a line break; None for no such prompt.
    """

    parts: tuple[str, ...] | None = option(
        None, "which of the above to take beside the evaluation, with commas between (default: all)"
    )
    patched_heads: int = option(
        PATCHED_HEADS,
        "exchange the states of so many heads one by one, and of all that drift together; 0 exchanges nothing "
        "(default: %(default)s)",
    )
    seed: int = option(0, "of random draws (default: %(default)s)")
    repeated_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patched_heads < 0:
            raise ValueError(f"patched_heads must be at least 0, got {self.patched_heads}.")


DEFAULTS = DiagnosisSettings()


@dataclass(frozen=True)
class Picture(Generic[Result]):
    """A figure of a page.

    Attributes:
        draw: From the results by the name of the model, at least one, the models' roles, and what a token is.
        shows: Whether there is something to draw of a result.
        bands: Whether it has bands of the intervals over sequences.
        further: Whether it is among those that a page shows on demand.
    """

    draw: Callable[[Mapping[str, Result], Sequence[Role], str], Figure]
    caption: str
    shows: Callable[[Result], bool] = lambda _: True
    bands: bool = False
    further: bool = False


class PartRow(NamedTuple):
    """A row of the table of numbers: name, remark ("{unit}" is what a token is), and the HTML for a result, empty
    where it has no such number.
    """

    name: str
    note: str
    html: Callable[[Any], str]


class Fact(NamedTuple):
    """A number to see first: name, value, a remark that follows it, and a sentence (Markdown) for model cards."""

    name: str
    value: str
    note: str = ""
    sentence: str = ""


@dataclass(frozen=True)
class Part(Generic[Result]):
    """One metric of a diagnosis: what it finds, and everything that is shown of it.

    Attributes:
        name, title, summary: In files and options, in lists, and in a line of the command's help.
        compute: How `result` is found; a `ValueError` says why it cannot be measured.
        section: Heading under which the page shows it.
        texts: What the page says of a result in sentences; the second argument is what a token is.
        facts: What is seen first, on the page, in the terminal and in model cards.
        rows: Of the table of numbers.
        pictures: By the name of their files.
        definitions: What the words mean, from all results of a page.
        reason: What a result tells about the model's verdict ("breaks", "holds", "unclear"), in one clause or nothing.
    """

    name: str
    title: str
    summary: str
    result: type[Result]
    compute: Callable[[Measurement], Result]
    section: str
    texts: Callable[[Result, str], Sequence[str]]
    facts: Callable[[Result], Sequence[Fact]]
    rows: Sequence[PartRow] = ()
    pictures: Mapping[str, Picture[Result]] = field(default_factory=dict)
    definitions: Callable[[Sequence[Result]], Sequence[str]] = lambda _: ()
    reason: Callable[[Result, Status], str] = lambda *_: ""
