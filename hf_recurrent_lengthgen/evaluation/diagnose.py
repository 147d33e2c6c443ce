"""All diagnoses of one model in one go: how far it holds, and what goes wrong where it does not."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_recurrent_lengthgen.evaluation.constant_prompt import constant_prompt
from hf_recurrent_lengthgen.evaluation.diagnosis_results import ConstantPrompt, DiagnosedModel, Remembrance
from hf_recurrent_lengthgen.evaluation.effective_remembrance import LENGTHS_OF_TRAINING, effective_remembrance
from hf_recurrent_lengthgen.evaluation.evaluate import evaluate_model
from hf_recurrent_lengthgen.evaluation.misalignment import long_short_misalignment
from hf_recurrent_lengthgen.evaluation.provenance import model_record, token_digest
from hf_recurrent_lengthgen.evaluation.readers import Reader, StateReader, reader_of
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import DataRecord, Estimate, EvaluationResult, Role
from hf_recurrent_lengthgen.evaluation.state_diagnosis import PATCHED_HEADS, describe_states, with_patching
from hf_recurrent_lengthgen.evaluation.state_results import StateDiagnosis
from hf_recurrent_lengthgen.evaluation.state_trajectory import StateObserver, sample_positions
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens

PARTS = ("states", "remembrance", "misalignment", "constant prompt")
"""What a diagnosis has beside the evaluation."""


def diagnose_model(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    *,
    label: str,
    data_description: str,
    token_unit: str = "token",
    role: Role = "other",
    parts: Sequence[str] = PARTS,
    repeated_token: int | None = None,
    patched_heads: int = PATCHED_HEADS,
    confidence: float = CONFIDENCE,
    command: str | None = None,
    seed: int = 0,
    cache: ResultCache | None = None,
    progress: bool = True,
) -> DiagnosedModel:
    """Evaluate a model, look at its states on the way, and take the further metrics.

    Args:
        model: Any causal language model; what it cannot be measured on is in `refused` of the result, with the reason.
        tokens: Token ids (S, L + 1): S >= 2 texts of L > training_length positions.
        training_length: Tokens per training sequence, T.
        label: Name of the model.
        data_description: What the tokens are, for people.
        token_unit: What one token is, in the singular.
        role: What the model is to the others of a comparison.
        parts: Which of `PARTS` to take.
        repeated_token: The token of the constant prompt, such as that of a line break; None for no such prompt.
        patched_heads: So many heads are exchanged one by one, see `with_patching`; 0 for no patching.
        confidence: Two-sided, of all intervals.
        command: How the diagnosis was started; by default this process' command line.
        seed: Of random draws; recorded.
        cache: Where results are kept by their content.
        progress: Show progress bars.

    Raises:
        ValueError: as `evaluate_model`, and for unknown parts. What a part raises is in `refused` instead.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"parts must be among {', '.join(PARTS)}, got {', '.join(unknown)}.")
    reader = reader_of(model)
    array = check_tokens(tokens, reader.vocabulary, training_length + 1)
    data = DataRecord(data_description, token_digest(array), token_unit)
    key = {
        "model": model_record(model),
        "tokens": data.digest,
        "training_length": training_length,
        "confidence": confidence,
    }

    def kept(part: str, kind: type, compute: Callable[[], Any], **settings: Any) -> Any:
        """The result of a part, from the cache or computed."""
        own = {"result": part, **key, **settings}
        if cache is None:
            return compute()
        plain = kind is dict
        if (found := cache.get(own) if plain else cache.get_document(own, kind)) is None:
            found = compute()
            (cache.put if plain else cache.put_document)(own, found)
        return found

    def mean_misalignment() -> dict[str, float | None]:
        found = long_short_misalignment(
            model, array, training_length, seed=seed, confidence=confidence, progress=progress
        )
        return {"mean": found.mean, "low": found.low, "high": found.high}

    refused: dict[str, str] = {}

    def attempt(part: str, find: Callable[[], Any]) -> Any:
        """The result of a part that was asked for; None, and the reason kept, where it cannot be measured."""
        if part not in parts:
            return None
        try:
            return find()
        except ValueError as error:
            refused[part] = str(error)
            return None

    evaluating: Any = {
        "label": label,
        "data_description": data_description,
        "token_unit": token_unit,
        "confidence": confidence,
        "command": " ".join(sys.argv) if command is None else command,
        "seed": seed,
        "cache": cache,
        "progress": progress,
    }
    evaluations: list[EvaluationResult] = []

    def find_states() -> StateDiagnosis:
        if reason := _no_states(reader, len(array)):
            raise ValueError(reason)
        positions = sample_positions(array.shape[1] - 1, training_length)
        observer = StateObserver(model, len(array), positions)

        def observe() -> StateDiagnosis:
            seen: Any = {"stops": positions, "observer": observer}
            evaluations.append(evaluate_model(model, array, training_length, **seen, **evaluating))
            trajectory = observer.trajectory()
            return describe_states(
                model, array, trajectory, training_length, label=label, data=data, confidence=confidence
            )

        found = kept("states", StateDiagnosis, observe)
        if patched_heads:
            patch = functools.partial(with_patching, model, array, found, patched_heads, progress=progress)
            found = kept("patched states", StateDiagnosis, patch, patched_heads=patched_heads)
        return dataclasses.replace(found, model=label, data=data)

    def find_constant_prompt() -> ConstantPrompt:
        if repeated_token is None:
            raise ValueError("The tokenizer has no single token for a line break.")
        length = array.shape[1] - 1
        find = functools.partial(constant_prompt, model, repeated_token, training_length, length, progress=progress)
        return kept("constant prompt", ConstantPrompt, find, token=repeated_token, length=length)

    read = min(LENGTHS_OF_TRAINING * training_length, array.shape[1])
    remember = functools.partial(
        effective_remembrance, model, array, training_length, length=read, confidence=confidence, progress=progress
    )
    states = attempt("states", find_states)
    [evaluation] = evaluations or [evaluate_model(model, array, training_length, **evaluating)]
    remembrance = attempt("remembrance", lambda: kept("remembrance", Remembrance, remember))
    misalignment = attempt(
        "misalignment", lambda: Estimate(**kept("misalignment", dict, mean_misalignment, seed=seed))
    )
    repeated = attempt("constant prompt", find_constant_prompt)
    return DiagnosedModel(role, evaluation, states, remembrance, misalignment, repeated, refused)


def _no_states(reader: Reader, sequences: int) -> str:
    """Why states cannot be diagnosed; empty if they can."""
    if not isinstance(reader, StateReader):
        return reader.refusal("a diagnosis of states")
    if sequences < 2:
        return "A diagnosis of states needs at least two texts, to tell a drift from another text."
    if not any(layer.recurrent.numel() for layer in reader.model.zero_state(1)):
        return f"{reader.name} carries inputs of convolutions only, so that there is no state that could drift."
    return ""
