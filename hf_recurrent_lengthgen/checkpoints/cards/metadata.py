"""The metadata of a card, which the Hub uses to list, filter and compare models."""

import math
import re
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, Evidence
from hf_recurrent_lengthgen.checkpoints.cards.results_section import (
    generalizes,
    mean_over,
    own_evaluations,
    retrieval_results,
)
from hf_recurrent_lengthgen.evaluation.results import Estimate
from hf_recurrent_lengthgen.metrics.context_harm.result import EvaluationResult
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalResult
from hf_recurrent_lengthgen.models import family_config

LIBRARY = "transformers"
PIPELINE = "text-generation"
PACKAGE = "hf_recurrent_lengthgen"


def card_data(
    checkpoint: Checkpoint,
    evidence: Sequence[Evidence],
    model_name: str,
    license: str | None,
    language: Sequence[str],
    datasets: Sequence[str],
) -> ModelCardData:
    """The metadata; `model_name` is the name in `model-index`, the other arguments are as in `CardSettings`."""
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    base = source.name if source is not None and source.on_hub else None
    changed = any(step.kind in ("train", "expand") for step in checkpoint.steps)
    results = [result for found in own_evaluations(evidence) for result in _of_evaluation(found)]
    results += [result for found in retrieval_results(evidence) for result in _of_retrieval(found)]
    further: dict[str, Any] = {"base_model_relation": "finetune"} if base and changed else {}
    return ModelCardData(
        license=license,
        language=(list(language) or None) if len(language) != 1 else language[0],
        library_name=LIBRARY,
        pipeline_tag=PIPELINE,
        tags=_tags(checkpoint, evidence),
        base_model=base,
        datasets=list(datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results if result.metric_type in _ON_HUB)) or None,
        model_name=model_name if results else None,
        eval_results=results or None,
        **further,
    )


_ON_HUB = ("perplexity", "accuracy")


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
    unit, length, data = evaluation.data.token_unit, evaluation.training_length, evaluation.data
    start, stop = evaluation.harm.last_range
    inside, beyond = evaluation.in_window.loss, mean_over(evaluation, start, stop)
    common = {"token_unit": unit, "sequences": evaluation.sequences, "confidence": evaluation.confidence}

    def result(kind: str, name: str, value: float, positions: tuple[int, int], bounds: Estimate | None) -> EvalResult:
        interval = {} if bounds is None or bounds.low is None else {"low": bounds.low, "high": bounds.high}
        args = {"first_position": positions[0], "end_position": positions[1], **common, **interval}
        return EvalResult(
            task_type=PIPELINE,
            dataset_name=data.source.name,
            dataset_type=re.sub(r"[^\w./-]+", "-", data.source.name).strip("-").lower() or "text",
            dataset_split=data.source.split,
            dataset_args={"description": data.description, "sha256_of_token_ids": data.digest},
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            metric_args=args,
        )

    results = [
        result(
            "perplexity",
            f"Perplexity per {unit} inside the training length of {length:,}",
            _perplexity(inside.mean),
            (0, length),
            Estimate(0.0, None, None)
            if inside.low is None or inside.high is None
            else Estimate(0.0, _perplexity(inside.low), _perplexity(inside.high)),
        ),
        result(
            "context_harm",
            f"Harm of the context beyond {length:,} {unit}s at positions {start:,} to {stop:,} (nats per {unit})",
            evaluation.harm.last.mean,
            (start, stop),
            evaluation.harm.last,
        ),
    ]
    if beyond is not None:
        name = f"Perplexity per {unit} at positions {start:,} to {stop:,}"
        results.insert(1, result("perplexity", name, _perplexity(beyond), (start, stop), None))
    return results


def _of_retrieval(retrieval: RetrievalResult) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=PIPELINE,
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
