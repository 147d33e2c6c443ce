"""How models are measured: settings of evaluations and diagnoses, which are also options of the commands."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
"""Default two-sided confidence of intervals."""
HARM_THRESHOLD = 0.05
"""Excess loss in nats per token above which a model fails."""
TOLERANCE = 0.01
"""Perplexity may exceed p* by this fraction."""
PATCHED_HEADS = 8
"""Default number of heads that are exchanged one by one."""
BY_MEMORY = "(default: 4,096 tokens in all, 2,048 on a CPU, fewer with many logits)"


def option(default: Any, help: str) -> Any:
    """A field of settings that is also a command-line option."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is measured; fields with a help text are options of `lengthgen evaluate`.

    Attributes:
        batch_size, chunk_length: Texts, and tokens of each, per forward pass; None for what memory limits allow.
        harm_threshold: Nats per token; a model fails from the first bin whose excess loss is shown to be above it.
        tolerance: Tolerance of the verdict, as a fraction of perplexity.
        confidence: Two-sided confidence of each interval, and of all bins together where the first one is named.
        seed: Seed of random draws; recorded.
        command: Recorded command of the evaluation; None for the command line of this process.
        progress: Show progress bars.
    """

    batch_size: int | None = option(None, f"texts or windows per forward pass {BY_MEMORY}")
    chunk_length: int | None = option(None, f"tokens of each text per forward pass {BY_MEMORY}")
    harm_threshold: float = HARM_THRESHOLD
    tolerance: float = TOLERANCE
    confidence: float = CONFIDENCE
    seed: int = 0
    command: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {self.confidence}.")

    @property
    def recorded_command(self) -> str:
        return " ".join(sys.argv) if self.command is None else self.command

    @property
    def reading(self) -> dict[str, Any]:
        """Batch size, chunk length and progress, as most metrics take them."""
        return {name: getattr(self, name) for name in ("batch_size", "chunk_length", "progress")}


@dataclass(frozen=True)
class DiagnosisSettings(EvaluationSettings):
    """How a model is diagnosed; fields with a help text are options of `lengthgen diagnose`.

    Attributes:
        parts: Names of the parts to measure in addition to the evaluation; None for all.
        patched_heads: Number of heads that are exchanged one by one, see `patch_heads`; 0 for no patching.
        remembrance_distances: Distances for Effective Remembrance in addition to total variation, see `DISTANCES`.
        repeated_text: The text that the constant prompt repeats; None for a line break.
        repeated_token: The token of this text; None for no such prompt.
        attention_windows: Windows of hybrids in addition to those of `attention_window_harm`.
    """

    parts: tuple[str, ...] | None = option(
        None, "which of the above to measure in addition to the evaluation, separated by commas (default: all)"
    )
    patched_heads: int = option(
        PATCHED_HEADS,
        "number of heads whose states are exchanged one by one, in addition to all drifting heads together; 0 "
        "exchanges none (default: %(default)s)",
    )
    remembrance_distances: tuple[str, ...] = option(
        (),
        "distances of predictions for Effective Remembrance in addition to total variation: jensen_shannon, "
        "cosine, separated by commas (default: none)",
    )
    seed: int = option(0, "seed of random draws (default: %(default)s)")
    repeated_text: str | None = option(
        None, "text of one token, which the constant prompt repeats (default: a line break)"
    )
    repeated_token: int | None = None
    attention_windows: tuple[int, ...] = ()


DEFAULTS = EvaluationSettings()
