"""Made-up results with chosen harm, so that pages and figures have known content."""

import math
from collections.abc import Callable, Sequence

import pytest

from hf_recurrent_lengthgen.evaluation.results import Curve, DataRecord, DataSource, Estimate, Role, TrainingRecord
from hf_recurrent_lengthgen.metrics.context_harm.result import (
    ComparedModel,
    Comparison,
    ContextHarm,
    EvaluationResult,
    InWindow,
    LengthVerdict,
    TwoResolutions,
)
from tests.evaluation.conftest import counter_model, expected_nll, random_tokens

__all__ = ["counter_model", "expected_nll", "random_tokens"]
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def curve(edges: Sequence[int], mean: Sequence[float], width: float | None) -> Curve:
    low, high = (None, None) if width is None else ([m - width for m in mean], [m + width for m in mean])
    return Curve(tuple(edges), tuple(mean), low and tuple(low), high and tuple(high))


def estimate(mean: float, width: float | None) -> Estimate:
    return Estimate(mean, None if width is None else mean - width, None if width is None else mean + width)


def compared(
    role: Role, label: str, harm: float, width: float | None = 0.01, loss: float = 2.0, context_use: float = 0.25
) -> ComparedModel:
    """A model trained on 16 tokens with `harm` nats per byte from position 64 on, read to 1,024 tokens."""
    nll = curve(EDGES, [4 - 0.4 * min(i, 5) + (harm if i > 5 else 0) for i in range(11)], width)
    exps = curve(EDGES, [2 * math.exp(mean) for mean in nll.mean], width)
    harms = curve(EDGES[5:], [0, 0, harm, harm, harm, harm], width)
    harmful = None if width is None or harm - width <= 0.05 else 64
    evaluation = EvaluationResult(
        model=label,
        weights="9f",
        training_length=16,
        evaluated_length=1024,
        sequences=1 if width is None else 32,
        confidence=0.95,
        data=DataRecord(DataSource("made-up bytes"), "ab" * 32, "byte"),
        position_wise=TwoResolutions(nll, nll),
        harm=ContextHarm(TwoResolutions(harms, harms), (512, 1024), estimate(harm, width), 0.05, harmful),
        in_window=InWindow(
            curve(EDGES[:6], [4, 3.6, 3.2, 2.8, 2.4], width),
            estimate(loss, width),
            estimate(context_use, width),
            (3, 5),
            (14, 16),
            127,
        ),
        verdict=LengthVerdict((8, 16), 2.4, nll, 0.01, 64 if harmful else 1024, harmful),
        device="cpu",
        versions={"torch": "2.13"},
        command="lengthgen demo --seed 0",
        seed=0,
        wall_seconds=12.0,
        mean_perplexity=TwoResolutions(exps, exps),
    )
    return ComparedModel(role, evaluation, TrainingRecord((f"training of {label}",), 600, 41.0, 1.5))


@pytest.fixture(scope="session")
def model_of() -> Callable[..., ComparedModel]:
    return compared


@pytest.fixture(scope="session")
def demo() -> Comparison:
    """The demo as it should come out: the base fails, the intervention generalizes, the control fails."""
    return Comparison(
        "Beyond the training length",
        (
            compared("base", "base", 1.4),
            compared("intervention", "state passing", 0.02, loss=2.03),
            compared("control", "control", 1.2),
        ),
    )
