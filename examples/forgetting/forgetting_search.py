"""Search for the forgetting at inference with which a model predicts long texts best.

Chen et al., 2024 (arXiv:2410.07145), section 3.2.2, choose the multipliers of retention and insertion (RRI) "by
validation using average loss on pre-training data with 32K context length". Here any setting of `Forgetting` can be a
candidate, and no forgetting always is one.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.json_schema import document
from hf_recurrent_lengthgen.evaluation.provenance import token_digest, weights_digest
from hf_recurrent_lengthgen.evaluation.results import NOT_SAID, DataRecord, Estimate
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import estimate
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, progress_bar, stream_nll
from hf_recurrent_lengthgen.evaluation.text_configs import vocabulary_size
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, forgetting, in_words

RETENTIONS = (1.0, 0.9999, 0.999, 0.99)
"""Those below 1 halve the state within 6,931, 693 and 69 tokens, in addition to learned forgetting."""
INSERTIONS = (1.0, 0.9, 0.75, 0.5)
PAPER = Forgetting(retention=0.9999, insertion=0.75)
"""The result of the paper's search for its Mamba-2 with 370M parameters, trained on 8k tokens."""


@dataclass(frozen=True)
class ForgettingTrial:
    """One setting of forgetting at inference (`models.scan_forgetting.Forgetting`) and the mean loss with it.

    `losses` holds the loss of each text. `gain` is the loss without forgetting minus this one, paired by text.
    """

    retention: float
    insertion: float
    window: int | None
    delta_scale: float
    losses: tuple[float, ...]
    loss: Estimate
    gain: Estimate
    decay_scale: float = 1.0


@document("forgetting_search", version=3)
@dataclass(frozen=True)
class ForgettingSearch:
    """Mean loss of whole texts of `length` positions with each setting; the first setting is no forgetting.

    `weights` is the SHA-256 of the model's parameters.
    """

    model: str
    weights: str
    length: int
    sequences: int
    confidence: float
    data: DataRecord
    trials: tuple[ForgettingTrial, ...]

    def __post_init__(self) -> None:
        if not self.trials:
            raise ValueError("A search needs at least one setting, got none.")
        first = self.trials[0]
        if rule_of(first) != Forgetting():
            raise ValueError(f"The first setting of a search must be no forgetting, got {first}.")
        if any(len(trial.losses) != self.sequences for trial in self.trials):
            raise ValueError(f"Each setting of a search needs the losses of all {self.sequences} texts.")

    @property
    def best(self) -> ForgettingTrial:
        """The setting with the lowest mean loss; of equal ones the first, so none rather than an ineffective one."""
        return min(self.trials, key=lambda trial: trial.loss.mean)


def forgetting_grid(
    retentions: Iterable[float] = RETENTIONS,
    insertions: Iterable[float] = INSERTIONS,
    windows: Iterable[int] = (),
    delta_scales: Iterable[float] = (),
) -> list[Forgetting]:
    """No forgetting, every pair of a retention and an insertion, then each window and each step scale alone."""
    settings = [Forgetting(), *(Forgetting(*pair) for pair in product(retentions, insertions))]
    settings += [Forgetting(window=window) for window in windows]
    settings += [Forgetting(delta_scale=scale) for scale in delta_scales]
    return list(dict.fromkeys(settings))


def search_forgetting(
    model: nn.Module,
    tokens: Tokens,
    rules: Sequence[Forgetting] | None = None,
    label: str = "model",
    data: DataRecord = NOT_SAID,
    settings: EvaluationSettings = DEFAULTS,
    *,
    file: str | os.PathLike[str] | None = None,
) -> ForgettingSearch:
    """Measure the mean loss of texts under each rule, one forward pass per token and rule.

    Args:
        model: A model of a family of this package. The forgetting in its own config is replaced
            during the search.
        tokens: Token ids (S, L + 1): S texts of L positions each. Use other texts for results that are reported.
        rules: Candidates; by default those of `forgetting_grid`. No forgetting is added at the front.
        label: Name of the model in the result.
        data: Description of the tokens; the digest is always computed from `tokens`.
        settings: Confidence, rows and tokens per forward pass, progress.
        file: JSON file that is written after each rule. An existing file of the same model and tokens is continued.
            None for no file.

    Raises:
        ValueError: as in `stream_nll`, with the rule; before any measurement, for rules that are out of range or that
            the model cannot apply; and for a `file` of another search.
    """
    array = check_tokens(tokens, vocabulary_size(model))
    candidates = list(dict.fromkeys([Forgetting(), *(forgetting_grid() if rules is None else rules)]))
    for rule in candidates:
        with forgetting(model, **rule._asdict()):
            pass
    measured = {"weights": weights_digest(model), "length": array.shape[1] - 1, "sequences": len(array)}
    data = replace(data, digest=token_digest(array))
    losses = {} if file is None or not Path(file).exists() else _known(file, measured, data)

    def result(rules: Iterable[Forgetting]) -> ForgettingSearch:
        trials = [_trial(rule, losses[rule], losses[Forgetting()], settings.confidence) for rule in rules]
        return ForgettingSearch(
            model=label, **measured, confidence=settings.confidence, data=data, trials=tuple(trials)
        )

    with progress_bar(len(candidates) * array[:, 1:].size, "search", settings.progress) as bar:
        for rule in candidates:
            bar.set_postfix_str(in_words(rule))
            if rule not in losses:
                losses[rule] = _losses(model, array, rule, settings)
                if file is not None:
                    write_result(file, result(losses))  # includes the rules of an earlier search
            bar.update(array[:, 1:].size)
    return result(candidates)


def rule_of(trial: ForgettingTrial) -> Forgetting:
    return Forgetting(**{name: getattr(trial, name) for name in Forgetting._fields})


def _losses(model: nn.Module, tokens: np.ndarray, rule: Forgetting, settings: EvaluationSettings) -> np.ndarray:
    """Mean loss of each text, (S,) float64."""
    try:
        with forgetting(model, **rule._asdict()):
            stream = stream_nll(model, tokens, **settings.reading | {"progress": False})
    except ValueError as error:
        raise ValueError(f"With {in_words(rule)}: {error}") from error
    return stream.nll.mean(1, dtype=np.float64)


def _trial(rule: Forgetting, losses: np.ndarray, nothing: np.ndarray, confidence: float) -> ForgettingTrial:
    loss, gain = (estimate(values[:, None], confidence) for values in (losses, nothing - losses))
    return ForgettingTrial(**rule._asdict(), losses=tuple(map(float, losses)), loss=loss, gain=gain)


def _known(file: str | os.PathLike[str], measured: dict[str, Any], data: DataRecord) -> dict[Forgetting, np.ndarray]:
    kept = read_result(file, ForgettingSearch)
    if kept.data.digest != data.digest or any(getattr(kept, name) != value for name, value in measured.items()):
        raise ValueError(
            f"{os.fspath(file)} holds a search of another model or on other texts ({kept.model}, {kept.sequences} "
            f"texts of {kept.length} tokens from {kept.data.description}): give another file, or remove it."
        )
    return {rule_of(trial): np.asarray(trial.losses) for trial in kept.trials}
