"""Metrics for `MetricCallback`, of texts longer than training and of retrieval; see `metric_callbacks.py`."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_recurrent_lengthgen.data.tasks import RetrievalGrid
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE, check_training_length, estimate, last_doubling
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, stream_nll
from hf_recurrent_lengthgen.metrics.context_harm.measure import evaluate_model
from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll
from hf_recurrent_lengthgen.metrics.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.metrics.remembrance.measure import LENGTHS_OF_TRAINING, effective_remembrance
from hf_recurrent_lengthgen.metrics.retrieval.measure import retrieval_accuracy
from hf_recurrent_lengthgen.trainers.metric_callbacks import Metric

SILENT = EvaluationSettings(progress=False)


def length_evaluation(tokens: Tokens, training_length: int, name: str = "length") -> Metric:
    """What `lengthgen evaluate` shows: excess loss, loss within the training length, and the generalization length.

    Logged as `eval_length_harm`, `eval_length_loss` and `eval_length_holds_to`. Tokens (S, L + 1). Costs three forward
    passes per token.
    """
    check_training_length(training_length)

    def measure(model: nn.Module) -> dict[str, Any]:
        _check_reach(tokens, training_length)
        result = evaluate_model(model, tokens, training_length, settings=SILENT)
        return {"harm": result.harm.last, "loss": result.in_window.loss, "holds_to": result.verdict.holds_to}

    return Metric(name, measure, {"harm": False, "loss": False, "holds_to": True})


def context_harm(tokens: Tokens, training_length: int, name: str = "context_harm") -> Metric:
    """Excess loss from context, mean over the last doubling of the position; tokens (S, L + 1).

    The value of `EvaluationResult.harm.last`. Costs three forward passes per token.
    """
    check_training_length(training_length)

    def measure(model: nn.Module) -> Estimate:
        _check_reach(tokens, training_length)
        nll = stream_nll(model, tokens, progress=False).nll
        excess = nll[:, training_length:] - window_nll(model, tokens, training_length, progress=False).truncated
        start, stop = last_doubling(nll.shape[1], training_length)
        return estimate(excess[:, start - training_length : stop - training_length], CONFIDENCE)

    return Metric(name, measure, greater_is_better=False)


def effective_remembrance_at(
    tokens: Tokens, training_length: int, length: int | None = None, name: str = "remembrance"
) -> Metric:
    """Effective Remembrance in total variation one training length before the end: earlier tokens should not matter.

    Args:
        tokens: Token ids, (S, at least `length`).
        training_length: Tokens per training sequence.
        length: T; by default 4 training lengths.
        name: Name of the metric; the number of the start point t is appended.
    """
    end = LENGTHS_OF_TRAINING * training_length if length is None else length
    start = end - training_length

    def measure(model: nn.Module) -> dict[str, Estimate]:
        remembrance = effective_remembrance(model, tokens, training_length, SILENT, length=end, starts=[start])
        return {str(start): remembrance.at(start)}

    return Metric(name, measure, greater_is_better=False)


def misalignment(
    tokens: Tokens, training_length: int, samples: int = 8, seed: int = 0, name: str = "misalignment"
) -> Metric:
    """Long-short misalignment over the same context pairs each time; tokens (S, at least `training_length`)."""

    def measure(model: nn.Module) -> Estimate:
        return long_short_misalignment(model, tokens, training_length, samples=samples, seed=seed, progress=False)

    return Metric(name, measure, greater_is_better=False)


def retrieval(grid: RetrievalGrid, lengths: Sequence[int], name: str = "retrieval") -> Metric:
    """Share of right greedy answers at each length, over all depths of the grid, with Wilson's intervals.

    The `accuracy` of `RetrievalResult.by_length`, which `lengthgen retrieve` prints, from 0 to 1. Checkpoints and
    learning rates are chosen by it in Chen et al., 2024 (arXiv:2410.07145), F.1.

    Args:
        grid: The same prompts each time, such as `PasskeyGrid(tokenizer, depths, samples)`; use another seed than in
            the final evaluation.
        lengths: Tokens of prompt and answer.
        name: Name of the metric; the length is appended: "retrieval_2048".
    """

    def measure(model: nn.Module) -> dict[str, Any]:
        result = retrieval_accuracy(model, grid, lengths, settings=SILENT)
        shares = {length: n for length, n in zip(sorted(lengths), result.by_length, strict=True) if n.samples}
        if without := sorted(set(lengths) - shares.keys()):
            raise ValueError(f"no question fits into {without[0]} tokens together with its facts: leave it out")
        return {str(n): Estimate(share.right / share.samples, *share.interval()) for n, share in shares.items()}

    return Metric(name, measure, greater_is_better=True)


def _check_reach(tokens: Tokens, training_length: int) -> None:
    if tokens.ndim != 2 or tokens.shape[1] - 1 <= training_length:
        raise ValueError(
            f"tokens must be (sequences, length + 1) with a length above the training length {training_length}, got "
            f"shape {tuple(tokens.shape)}."
        )
