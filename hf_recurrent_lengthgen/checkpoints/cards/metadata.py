"""The metadata of a card, which the Hub uses to list, filter and compare models."""

import math
import re
from collections.abc import Sequence

from huggingface_hub import EvalResult, ModelCardData

from hf_recurrent_lengthgen.checkpoints.cards.facts import CardSettings, Checkpoint, Evidence
from hf_recurrent_lengthgen.checkpoints.cards.results import generalizes, mean_over, own_evaluations, own_retrievals
from hf_recurrent_lengthgen.metrics.context_harm.result import EvaluationResult
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalResult
from hf_recurrent_lengthgen.models import family_config

PACKAGE = "hf_recurrent_lengthgen"
_TASK = "text-generation"
_ON_HUB = ("perplexity", "accuracy")


def card_data(
    checkpoint: Checkpoint, evidence: Sequence[Evidence], settings: CardSettings, model_name: str
) -> ModelCardData:
    """The metadata; `model_name` is the name in `model-index`."""
    source = None if checkpoint.lineage is None else checkpoint.lineage.source
    base = source.name if source is not None and source.on_hub else None
    changed = any(step.kind in ("train", "expand") for step in checkpoint.steps)
    results = [result for evaluation in own_evaluations(evidence) for result in _of_evaluation(evaluation)]
    results += [result for retrieval in own_retrievals(evidence) for result in _of_retrieval(retrieval)]
    return ModelCardData(
        license=settings.license,
        language=(list(settings.language) or None) if len(settings.language) != 1 else settings.language[0],
        library_name="transformers",
        pipeline_tag=_TASK,
        tags=_tags(checkpoint, evidence),
        base_model=base,
        datasets=list(settings.datasets) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results if result.metric_type in _ON_HUB)) or None,
        model_name=model_name if results else None,
        eval_results=results or None,
        base_model_relation="finetune" if base and changed else None,
    )


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
    name, length, unit = evaluation.data.source.name, evaluation.training_length, evaluation.data.token_unit
    start, stop = evaluation.harm.last_range
    beyond = mean_over(evaluation, start, stop)
    perplexity, place = f"Perplexity per {unit}", f"at positions {start:,} to {stop:,}"
    measured = {
        f"{perplexity} inside the training length of {length:,}": _perplexity(evaluation.in_window.loss.mean),
        f"{perplexity} {place}": None if beyond is None else _perplexity(beyond),
        f"Excess loss from context beyond {length:,} {unit}s {place} (nats per {unit})": evaluation.harm.last.mean,
    }
    return [
        EvalResult(
            task_type=_TASK,
            dataset_name=name,
            dataset_type=re.sub(r"[^\w./-]+", "-", name).strip("-").lower() or "text",
            dataset_split=evaluation.data.source.split,
            metric_type="perplexity" if title.startswith(perplexity) else "context_harm",
            metric_name=title,
            metric_value=value,
        )
        for title, value in measured.items()
        if value is not None
    ]


def _of_retrieval(retrieval: RetrievalResult) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=_TASK,
            dataset_type=retrieval.task,
            dataset_name=f"{retrieval.task} ({retrieval.style}) in {retrieval.data.source.name}",
            metric_type="accuracy",
            metric_name=f"Right answers at {length:,} {retrieval.data.token_unit}s",
            metric_value=share.accuracy,
        )
        for length, share in zip(retrieval.lengths, retrieval.by_length, strict=True)
        if share.accuracy is not None
    ]


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700.0))
