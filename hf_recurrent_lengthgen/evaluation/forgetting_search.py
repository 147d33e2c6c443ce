"""Search for the forgetting at inference under which a model predicts long texts best.

"Stuffed Mamba" (Chen et al. 2024, arXiv:2410.07145), section 3.2.2, chooses the multipliers of retention and insertion
(RRI) "by validation using average loss on pre-training data with 32K context length". Here any setting of `Forgetting`
is a candidate, and no forgetting always is one of them.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from hf_recurrent_lengthgen.evaluation.evaluate import estimate
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.evaluation.provenance import token_digest, weights_digest
from hf_recurrent_lengthgen.evaluation.readers import vocabulary_size
from hf_recurrent_lengthgen.evaluation.results import (
    DataRecord,
    DataSource,
    Estimate,
    ForgettingSearch,
    ForgettingTrial,
)
from hf_recurrent_lengthgen.evaluation.statistics import CONFIDENCE
from hf_recurrent_lengthgen.evaluation.streaming import (
    Tokens,
    check_tokens,
    progress_bar,
    stream_nll,
)
from hf_recurrent_lengthgen.models.forgetting import Forgetting, forgetting

SEARCH_LENGTH = 32 * 1024
"""Tokens of context of the paper's search."""
RETENTIONS = (1.0, 0.9999, 0.999, 0.99)
"""Halve what is in the state within 6,931, 693 and 69 tokens, beyond what the model has learned to forget."""
INSERTIONS = (1.0, 0.9, 0.75, 0.5)
PAPER = Forgetting(retention=0.9999, insertion=0.75)
"""What the paper's search gave for its Mamba-2 of 370M parameters, trained on 8k tokens."""


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


def in_words(rule: Forgetting) -> str:
    """What differs from no forgetting: "retention 0.9999, insertion 0.75", "window 4,096"."""
    changed = [(name, value) for name, value in rule._asdict().items() if value != Forgetting._field_defaults[name]]
    words = [f"{name.replace('_', ' ')} {value:{',' if name == 'window' else ''}}" for name, value in changed]
    return ", ".join(words) or "no forgetting"


def search_forgetting(
    model: nn.Module,
    tokens: Tokens,
    settings: Sequence[Forgetting] | None = None,
    *,
    label: str,
    data_description: DataSource | str,
    token_unit: str = "token",
    file: str | os.PathLike[str] | None = None,
    confidence: float = CONFIDENCE,
    batch_size: int | None = None,
    chunk_length: int | None = None,
    progress: bool = True,
) -> ForgettingSearch:
    """Measure the mean loss of texts under each setting, one forward pass per token and setting.

    Args:
        model: A model of this package, or one that `stateful` wrapped. What its own config says about forgetting
            counts for no setting; it is left as it was.
        tokens: Token ids (S, L + 1): S texts of L positions each, other ones than those that a result is reported on.
        settings: Candidates; by default those of `forgetting_grid`. No forgetting is added at the front.
        label: Name of the model in the result.
        data_description: What the tokens are.
        token_unit: What one token is, in the singular.
        file: JSON file that is written after each setting, and continued if it is there and of the same model and
            tokens. None for no file.
        confidence: Two-sided, of the intervals over texts.
        batch_size: Texts per forward pass; by default as many as memory limits allow.
        chunk_length: Tokens per text and forward pass; by default as many as memory limits allow.
        progress: Show a progress bar.

    Raises:
        ValueError: as `stream_nll`, with the setting; for settings out of range or that the model cannot honor, before
            anything is measured; and for a `file` of another search.
    """
    array = check_tokens(tokens, vocabulary_size(model))
    candidates = list(dict.fromkeys([Forgetting(), *(forgetting_grid() if settings is None else settings)]))
    for rule in candidates:
        with forgetting(model, **rule._asdict()):
            pass
    measured = {"weights": weights_digest(model), "length": array.shape[1] - 1, "sequences": len(array)}
    data = DataRecord(DataSource.of(data_description), token_digest(array), token_unit)
    losses = {} if file is None or not Path(file).exists() else _known(file, measured, data)

    def result(rules: Iterable[Forgetting]) -> ForgettingSearch:
        trials = [_trial(rule, losses[rule], losses[Forgetting()], confidence) for rule in rules]
        return ForgettingSearch(model=label, **measured, confidence=confidence, data=data, trials=tuple(trials))

    with progress_bar(len(candidates) * array[:, 1:].size, "search", progress) as bar:
        for rule in candidates:
            bar.set_postfix_str(in_words(rule))
            if rule not in losses:
                losses[rule] = _losses(model, array, rule, batch_size, chunk_length)
                if file is not None:
                    write_result(file, result(losses))  # with what an earlier search of other settings found
            bar.update(array[:, 1:].size)
    return result(candidates)


def search_table(found: ForgettingSearch) -> str:
    """One row per setting, and what came out, for the terminal."""
    rows = [("setting", f"loss to {found.length:,}", "gain")]
    for trial in found.trials:
        rows.append((in_words(rule_of(trial)), _text(trial.loss), _text(trial.gain, "+")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = (
        f"nats per {found.data.token_unit} with {found.confidence:.0%} intervals over {found.sequences} texts; gain: "
        "less loss than without forgetting, on the same texts."
    )
    return "\n".join([*lines, note, conclusion(found)])


def conclusion(found: ForgettingSearch) -> str:
    """What came out, in a sentence."""
    best, nothing = found.best, found.trials[0]
    if best is nothing:
        return f"No forgetting at all is best: loss {nothing.loss.mean:.4f}. No setting that was tried is better."
    text = (
        f"Best is {in_words(rule_of(best))}: loss {best.loss.mean:.4f}, against {nothing.loss.mean:.4f} with no "
        "forgetting."
    )
    if best.gain.low is None or best.gain.low <= 0:
        text += " But so small a difference may be chance: it is within its interval, or there is one text only."
    return text


def rule_of(trial: ForgettingTrial) -> Forgetting:
    return Forgetting(**{name: getattr(trial, name) for name in Forgetting._fields})


def _losses(
    model: nn.Module, tokens: np.ndarray, rule: Forgetting, batch_size: int | None, chunk_length: int | None
) -> np.ndarray:
    """Mean loss of each text, (S,) float64."""
    try:
        with forgetting(model, **rule._asdict()):
            found = stream_nll(model, tokens, batch_size=batch_size, chunk_length=chunk_length, progress=False)
    except ValueError as error:
        raise ValueError(f"With {in_words(rule)}: {error}") from error
    return found.nll.mean(1, dtype=np.float64)


def _trial(rule: Forgetting, losses: np.ndarray, nothing: np.ndarray, confidence: float) -> ForgettingTrial:
    loss, gain = (estimate(values[:, None], confidence) for values in (losses, nothing - losses))
    return ForgettingTrial(**rule._asdict(), losses=tuple(map(float, losses)), loss=loss, gain=gain)


def _known(file: str | os.PathLike[str], measured: dict[str, Any], data: DataRecord) -> dict[Forgetting, np.ndarray]:
    """What a file holds of the same search."""
    kept = read_result(file, ForgettingSearch)
    if kept.data.digest != data.digest or any(getattr(kept, name) != value for name, value in measured.items()):
        raise ValueError(
            f"{os.fspath(file)} holds a search of another model or on other texts ({kept.model}, {kept.sequences} "
            f"texts of {kept.length} tokens of {kept.data.description}): give another file, or remove it."
        )
    return {rule_of(trial): np.asarray(trial.losses) for trial in kept.trials}


def _text(value: Estimate, sign: str = "-") -> str:
    mean = f"{value.mean:{sign}.4f}"
    return mean if value.low is None else f"{mean} [{value.low:{sign}.4f}, {value.high:{sign}.4f}]"
