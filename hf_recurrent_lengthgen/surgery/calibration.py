"""One scale for each layer, of its steps or its decays, calibrated on texts; the weights stay.

MambaExtend (Azizi et al. 2025, ICLR, Algorithm 1) scales the steps, "Mamba Modulation" (Lu et al. 2025,
arXiv:2509.19633) A. Both find the scales by gradients (Algorithm 2, CF_BP) or without (Algorithm 3, CF_ZO). This is
the second, which reads texts of any length in constant memory: with random signs d, and the loss L of one text,

    g = d (L(s + c d) - L(s - c d)) / (2 c)

estimates the gradient at s. Different here: s are logarithms of scales, which start from 1, not from U(0, 1); Adam
takes the steps, whose size need not fit the loss; each step reads the next text, not all.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens, progress_bar, stream_nll
from hf_recurrent_lengthgen.evaluation.text_configs import vocabulary_size
from hf_recurrent_lengthgen.models.scan_forgetting import forgetting


class Calibration(NamedTuple):
    """A scale for each layer, and the mean loss of all texts without and with them, in nats per token."""

    scales: list[float]
    before: float
    after: float


def calibrate(
    model: Any,
    tokens: Tokens,
    setting: str = "decay_scale",
    learning_rate: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> Calibration:
    """Find a scale for each layer with which a model predicts texts beyond its training length best, or scales of 1.

    Each text is read in one step, twice, and all of them without and with the result.

    Args:
        model: A model of a family of this package; the forgetting in its own config is off meanwhile.
        tokens: Token ids (S, L + 1): S texts of L positions. Report results on other texts.
        setting: "decay_scale" (of A) or "delta_scale" (of Delta), see `Forgetting`.
        learning_rate: Of Adam, in units of log scales; it falls to 0 by a cosine.
        seed, progress: Of the signs, and whether to show a progress bar.

    Raises:
        ValueError: for a model that does not take the setting, and as `stream_nll`.
    """
    texts = check_tokens(tokens, vocabulary_size(model))
    random, logs = np.random.default_rng(seed), torch.zeros(model.config.num_hidden_layers, dtype=torch.float64)
    optimizer = torch.optim.Adam([logs], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(texts))

    def loss(read: np.ndarray, change: Any) -> float:
        with forgetting(model, **{setting: (logs + change).exp().tolist()}):
            nll = stream_nll(model, read, progress=False).nll
        bar.update(nll.size)
        return float(nll.mean(dtype=np.float64))

    with progress_bar(4 * texts[:, 1:].size, f"calibrate {setting}", progress) as bar:
        before = loss(texts, 0)
        for step in range(len(texts)):
            change = torch.from_numpy(random.choice([-1.0, 1.0], len(logs))) * 0.1 / (step + 1) ** 0.1
            up, down = (loss(texts[step : step + 1], sign * change) for sign in (1, -1))
            logs.grad = (up - down) / (2 * change)
            optimizer.step()
            schedule.step()
        after = loss(texts, 0)
    if after >= before:
        logs, after = torch.zeros_like(logs), before
    return Calibration(logs.exp().tolist(), before, after)
