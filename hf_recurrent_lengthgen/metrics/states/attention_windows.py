"""Excess loss from context in a hybrid, by window of attention.

The whole text is read once for each window of W tokens. Excess loss is the NLL of a token in it minus the NLL of the
same token given at most T tokens of context with full attention (`context_harm/windows.py`), so that what a small
window loses counts, too.
"""

from collections.abc import Sequence

from torch import nn

from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.settings import DEFAULTS, EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import check_training_length, estimate, last_doubling
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, stream_nll
from hf_recurrent_lengthgen.evaluation.text_configs import attention_window
from hf_recurrent_lengthgen.hybrids.windows import attending_to, check_window
from hf_recurrent_lengthgen.metrics.context_harm.windows import window_nll
from hf_recurrent_lengthgen.metrics.states.result import WindowHarm

FRACTIONS = (0.25, 0.5, 1, 2, 4)
"""Windows that are measured by default, in training lengths."""


def windows_to_read(model: nn.Module, training_length: int, length: int, further: Sequence[int] = ()) -> list[int]:
    """T/4, T/2, T, 2T, 4T, the window of the model and further ones, of those that are shorter than texts."""
    chosen = {int(share * training_length) for share in FRACTIONS} | {attention_window(model), *further}
    return sorted(window for window in chosen if window and window < length)


def attention_window_harm(
    model: nn.Module,
    tokens: Tokens,
    training_length: int,
    windows: Sequence[int | None] | None = None,
    settings: EvaluationSettings = DEFAULTS,
) -> WindowHarm:
    """Measure excess loss from context by window of attention; one forward pass per token and window.

    Args:
        model: A hybrid: `stateful(model)` with attention layers. The window in its config stays as it was.
        tokens: Token ids (S, L + 1), with L > T.
        training_length: T in tokens.
        windows: Numbers of tokens, by default T/4, T/2, T, 2T and 4T; None, full attention, is always measured.
        settings: Confidence, progress, and texts and tokens per forward pass.

    Raises:
        ValueError: for models without attention layers or with positions that allow no window, and as in `stream_nll`.
    """
    check_training_length(training_length)
    reader, reading = reader_of(model), settings.reading
    array = check_tokens(tokens, reader.vocabulary, training_length + 1)
    start, stop = last_doubling(array.shape[1] - 1, training_length)
    half, long = training_length // 2, start - training_length
    first = long // half * half  # where a window of the whole text begins
    if windows is None:
        windows = windows_to_read(reader.model, training_length, stop)
    read: list[int | None] = [*sorted({window for window in windows if window is not None}), None]
    for window in read[:-1] or [training_length]:
        check_window(reader.model, window)
    losses = {}
    for window in read:
        with attending_to(reader.model, window):
            losses[window] = stream_nll(model, array, **reading).nll
    with attending_to(reader.model, None):
        short = window_nll(model, array[:, first:], training_length, **reading).truncated[:, long - first :]
    inside = losses[None][:, :training_length]
    return WindowHarm(
        last_range=(start, stop),
        windows=tuple(read),
        harm=tuple(estimate(losses[window][:, start:] - short, settings.confidence) for window in read),
        inside=tuple(estimate(losses[window][:, :training_length] - inside, settings.confidence) for window in read),
    )
