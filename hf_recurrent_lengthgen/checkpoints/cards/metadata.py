"""The metadata of a card, which the Hub uses to list, filter and compare models."""

import math
import re
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, Evidence
from hf_recurrent_lengthgen.checkpoints.cards.results import generalizes, mean_over, own_evaluations, own_retrievals
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import EvaluationResult
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalResult
from hf_recurrent_lengthgen.models import family_config

PACKAGE = "hf_recurrent_lengthgen"
_TASK = "text-generation"
_ON_HUB = ("perplexity", "accuracy")


def card_data(
    checkpoint: Checkpoint,
    evidence: Sequence[Evidence],
    model_name: str,
    license: str | None,
    language: Sequence[str],
    datasets: Sequence[str],
) -> ModelCardData:
    """The metadata; `model_name` is the name in `model-index`, the other arguments are as in `CardSettings`."""
    learned = checkpoint.learned is not None
    base = base_on_hub(checkpoint)
    changed = learned or any(step.kind in ("train", "expand") for step in checkpoint.steps)
    results = [result for evaluation in own_evaluations(evidence) for result in _of_evaluation(evaluation)]
    results += [result for retrieval in own_retrievals(evidence) for result in _of_retrieval(retrieval)]
    further: dict[str, Any] = {"base_model_relation": "adapter" if learned else "finetune"} if base and changed else {}
    return ModelCardData(
        license=license,
        language=(list(language) or None) if len(language) != 1 else language[0],
        library_name=PACKAGE if learned else "transformers",
        pipeline_tag=_TASK,
        tags=["recurrent", "learned-state", PACKAGE] if learned else _tags(checkpoint, evidence),
        base_model=base,
        datasets=list(datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results if result.metric_type in _ON_HUB)) or None,
        model_name=model_name if results else None,
        eval_results=results or None,
        **further,
    )


def base_on_hub(checkpoint: Checkpoint) -> str | None:
    """Name on the Hub of what a checkpoint was made from, or a learned state belongs to."""
    if checkpoint.learned is not None:
        base = str(checkpoint.learned["base_model_name_or_path"])
        return base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) else None
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    return source.name if source is not None and source.on_hub else None


def _tags(checkpoint: Checkpoint, evidence: Sequence[Evidence]) -> list[str]:
    """Tags to filter by; "length-generalization" only if all evaluations show it."""
    family = checkpoint.model_type.removeprefix("stateful_")
    config_class = family_config(checkpoint.model_type)
    kinds = () if config_class is None else config_class.hub_tags
    done = [method.tag for method in checkpoint.methods if method.tag]
    measured = [generalizes(result, checkpoint.vocab_size) for result in own_evaluations(evidence)]
    shown = ["length-generalization"] if measured and all(measured) else []
    tags = ["recurrent", *kinds, family.replace("_", "-"), *shown, *done]
    return list(dict.fromkeys([*tags, *(["custom_code"] if checkpoint.carries_code else []), PACKAGE]))


def _of_evaluation(evaluation: EvaluationResult) -> list[EvalResult]:
    data, length = evaluation.data, evaluation.training_length
    start, stop = evaluation.harm.last_range
    inside, beyond, unit = evaluation.in_window.loss, mean_over(evaluation, start, stop), data.token_unit

    def result(kind: str, name: str, value: float, positions: tuple[int, int], bounds: dict[str, Any]) -> EvalResult:
        return EvalResult(
            task_type=_TASK,
            dataset_name=data.source.name,
            dataset_type=re.sub(r"[^\w./-]+", "-", data.source.name).strip("-").lower() or "text",
            dataset_split=data.source.split,
            dataset_args={"description": data.description, "sha256_of_token_ids": data.digest},
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            metric_args={
                "first_position": positions[0],
                "end_position": positions[1],
                "token_unit": unit,
                "sequences": evaluation.sequences,
                "confidence": evaluation.confidence,
                **bounds,
            },
        )

    perplexity = f"Perplexity per {unit} inside the training length of {length:,}"
    bounds = {name: _perplexity(bound) for name, bound in _bounds(inside).items()}
    results = [result("perplexity", perplexity, _perplexity(inside.mean), (0, length), bounds)]
    if beyond is not None:
        name = f"Perplexity per {unit} at positions {start:,} to {stop:,}"
        results.append(result("perplexity", name, _perplexity(beyond), (start, stop), {}))
    harm = f"Harm of the context beyond {length:,} {unit}s at positions {start:,} to {stop:,} (nats per {unit})"
    last = evaluation.harm.last
    return [*results, result("context_harm", harm, last.mean, (start, stop), _bounds(last))]


def _bounds(estimate: Estimate) -> dict[str, float]:
    if estimate.low is None or estimate.high is None:
        return {}
    return {"low": estimate.low, "high": estimate.high}


def _of_retrieval(retrieval: RetrievalResult) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=_TASK,
            dataset_type=retrieval.task,
            dataset_name=f"{retrieval.task} ({retrieval.style}) in {retrieval.data.source.name}",
            metric_type="accuracy",
            metric_name=f"Right answers at {length:,} {retrieval.data.token_unit}s",
            metric_value=share.accuracy,
            metric_args={
                "length": length,
                "samples": share.samples,
                "shots": retrieval.shots,
                "low": share.interval(retrieval.confidence)[0],
                "high": share.interval(retrieval.confidence)[1],
            },
        )
        for length, share in zip(retrieval.lengths, retrieval.by_length, strict=True)
        if share.accuracy is not None
    ]


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))
