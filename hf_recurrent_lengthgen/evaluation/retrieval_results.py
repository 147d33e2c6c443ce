"""How often models find what stands far back in a text, by where it stands and how long the text is."""

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import NO_FORGETTING, DataRecord, ForgettingRule

RECALL_ACCURACY = 0.95
"""Accuracy up to which a model recalls ("Stuffed Mamba", arXiv:2410.07145, section 4.3)."""


@dataclass(frozen=True)
class Share:
    """Right answers among `samples`."""

    right: int
    samples: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.samples:
            raise ValueError(f"{self.right} of {self.samples} answers cannot be right.")

    @property
    def accuracy(self) -> float | None:
        """From 0 to 1; None without samples."""
        return self.right / self.samples if self.samples else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's score interval (1927), which is inside [0, 1]; all of it without samples."""
        if not self.samples:
            return 0.0, 1.0
        found = binomtest(self.right, self.samples).proportion_ci(confidence, method="wilson")
        return float(found.low), float(found.high)


@dataclass(frozen=True)
class RetrievalCell:
    """The right answers of greedy decoding at one depth (or to one bAbI task) and length.

    `samples` are fewer, or none, in BABILong where facts do not fit. `distance` is the number of tokens between the
    last one of the needle (or of the first fact that is needed) and the answer, the most among the samples.
    """

    right: int
    samples: int
    distance: int | None

    def __post_init__(self) -> None:
        Share(self.right, self.samples)


@document("retrieval", version=2)
@dataclass(frozen=True)
class RetrievalResult:
    """One model on one task.

    Attributes:
        weights: SHA-256 of its parameters.
        training_length: Tokens; None where it is not known.
        task: "passkey", "niah" or "babilong", with the prompt's `style`, and `shots` solved examples before it.
        rows: Names of the rows: depths in percent, or bAbI tasks.
        depths: Share of the text before the needle, for each row; None in BABILong.
        lengths: Tokens of prompt and answer, ascending.
        cells: For each row the cell of each length.
        data: What the prompts were made of; the digest is that of all prompts.
    """

    model: str
    weights: str
    training_length: int | None
    task: str
    style: str
    shots: int
    rows: tuple[str, ...]
    depths: tuple[float, ...] | None
    lengths: tuple[int, ...]
    cells: tuple[tuple[RetrievalCell, ...], ...]
    confidence: float
    data: DataRecord
    device: str
    versions: dict[str, str]
    command: str
    seed: int
    wall_seconds: float
    forgetting: ForgettingRule = NO_FORGETTING

    def __post_init__(self) -> None:
        if not self.rows or len(self.cells) != len(self.rows):
            raise ValueError(f"There are {len(self.rows)} rows, but {len(self.cells)} rows of cells.")
        if self.depths is not None and len(self.depths) != len(self.rows):
            raise ValueError(f"There are {len(self.rows)} rows, but {len(self.depths)} depths.")
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"Lengths must ascend, and be at least one, got {self.lengths}.")
        if any(len(row) != len(self.lengths) for row in self.cells):
            raise ValueError(f"Each row of cells must have {len(self.lengths)}, one for each length.")

    @property
    def by_length(self) -> tuple[Share, ...]:
        """All rows together, for each length."""
        return tuple(map(_together, zip(*self.cells, strict=True)))

    def within(self, distance: int) -> tuple[Share, ...]:
        """For each length, the cells whose needles all stand within the last `distance` tokens of the prompt.

        "Stuffed Mamba" (arXiv:2410.07145), Figures 13 and 14. The tokens are those after the needle's last one: those
        of the question count, the answer's do not.
        """
        near = [
            [cell for cell in column if cell.distance is not None and cell.distance <= distance]
            for column in zip(*self.cells, strict=True)
        ]
        return tuple(map(_together, near))

    def recall_length(self, accuracy: float = RECALL_ACCURACY) -> int | None:
        """T_recall: the longest length up to which the accuracy over all rows is at least `accuracy`.

        "Stuffed Mamba" (arXiv:2410.07145), section 4.3. None if it is lower at the shortest length. A model that
        recalls at the longest length measured has that one, which is then a lower bound.
        """
        longest = None
        for length, share in zip(self.lengths, self.by_length, strict=True):
            if share.accuracy is not None:
                if share.accuracy < accuracy:
                    break
                longest = length
        return longest


@document("retrieval_comparison", version=2)
@dataclass(frozen=True)
class RetrievalComparison:
    """Several models on the same prompts, in the order they are shown."""

    models: tuple[RetrievalResult, ...]

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("A comparison needs at least one model, got none.")
        if len({result.model for result in self.models}) < len(self.models):
            raise ValueError(f"The models need different names, got {[result.model for result in self.models]}.")
        for name in ("task", "style", "shots", "rows", "lengths", "data"):
            if any(getattr(result, name) != getattr(self.models[0], name) for result in self.models):
                raise ValueError(f"The models of a comparison must have the same {name}.")


def _together(cells: Sequence[RetrievalCell]) -> Share:
    return Share(sum(cell.right for cell in cells), sum(cell.samples for cell in cells))
