"""How often models retrieve what was far back in a text, by depth and length, as typed values."""

from dataclasses import dataclass, field
from itertools import takewhile

from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.results import ModelResult, check_comparison

FIGURE = "retrieval.figure.retrieval_accuracy_figure"
RECALL_ACCURACY = 0.95
"""Least accuracy that counts as recall (Chen et al., 2024, section 4.3)."""


@dataclass(frozen=True)
class Share:
    """Number of right answers among `samples`."""

    right: int
    samples: int

    @property
    def accuracy(self) -> float | None:
        """From 0 to 1; None without samples."""
        return self.right / self.samples if self.samples else None

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Wilson's score interval (1927), inside [0, 1]; without samples (0, 1)."""
        if not self.samples:
            return 0.0, 1.0
        from scipy.stats import binomtest  # takes long

        bounds = binomtest(self.right, self.samples).proportion_ci(confidence, method="wilson")
        return float(bounds.low), float(bounds.high)


@dataclass(frozen=True)
class RetrievalCell:
    """The right answers of greedy decoding at one depth (or for one bAbI task) and length.

    BABILong has fewer `samples`, or none, where facts do not fit. `distance` is the number of tokens from the last
    token of the needle (or of the first required fact) to the answer, the maximum over the samples. `mistakes` are the
    wrong answers of each kind that the task names ("another key", "earlier value").
    """

    right: int
    samples: int
    distance: int | None
    mistakes: dict[str, int] = field(default_factory=dict)


@document("retrieval", version=4, figure=FIGURE)
@dataclass(frozen=True, kw_only=True)
class RetrievalResult(ModelResult):
    """One model on one task.

    Attributes:
        training_length: In tokens; None if unknown.
        task: "passkey", "niah", "keys" or "babilong", with the `style` of the prompt ("4 keys of 2 values") and
            `shots` solved examples before it.
        rows: Names of the rows: depths in percent, bAbI tasks, or both.
        depths: Share of the text before the needle (in BABILong before the first required fact), per row; None for
            facts at random places.
        lengths: Tokens of prompt and answer, ascending.
        cells: One row of cells per row, one cell per length.
        data: The source of the prompts; the digest is that of all prompts.
    """

    training_length: int | None
    task: str
    style: str
    shots: int
    rows: tuple[str, ...]
    depths: tuple[float, ...] | None
    lengths: tuple[int, ...]
    cells: tuple[tuple[RetrievalCell, ...], ...]
    confidence: float

    @property
    def models(self) -> tuple["RetrievalResult"]:
        """Itself, as a comparison of one model."""
        return (self,)

    @property
    def by_length(self) -> tuple[Share, ...]:
        """All rows together, per length."""
        return tuple(
            Share(sum(cell.right for cell in cells), sum(cell.samples for cell in cells))
            for cells in zip(*self.cells, strict=True)
        )

    @property
    def mistakes_by_length(self) -> dict[str, tuple[int, ...]]:
        """Wrong answers of each kind, and all "other" ones, per length; empty for tasks without kinds."""
        kinds = dict.fromkeys(kind for cells in self.cells for cell in cells for kind in cell.mistakes)
        if not kinds:
            return {}
        columns = [*zip(*self.cells, strict=True)]
        counts = {k: tuple(sum(cell.mistakes.get(k, 0) for cell in cells) for cells in columns) for k in kinds}
        wrong = (share.samples - share.right for share in self.by_length)
        counts["other"] = tuple(n - sum(named) for n, *named in zip(wrong, *counts.values(), strict=True))
        return counts

    def recall_length(self, accuracy: float = RECALL_ACCURACY) -> int | None:
        """T_recall: the longest length up to which the accuracy over all rows is at least `accuracy`.

        As in Chen et al., 2024, section 4.3. None if the accuracy is lower at the shortest length. For a model that
        recalls at the longest length measured, that length is a lower bound.
        """
        asked = [(length, share) for length, share in zip(self.lengths, self.by_length, strict=True) if share.samples]
        recalled = takewhile(lambda pair: pair[1].right / pair[1].samples >= accuracy, asked)
        return max((length for length, _ in recalled), default=None)


@document("retrieval_comparison", version=4, figure=FIGURE)
@dataclass(frozen=True)
class RetrievalComparison:
    """Several models on the same prompts, in the order in which they are shown."""

    models: tuple[RetrievalResult, ...]

    def __post_init__(self) -> None:
        check_comparison(self.models, "task", "style", "shots", "rows", "lengths", "data")
