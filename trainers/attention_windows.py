"""A window of attention drawn for each step: recurrent layers learn to remember what attention does not see.

SWAX (Cabannes et al., 2025, arXiv:2509.24552) changes the window stochastically during training; scheduled
sliding-window dropout (Benfeghoul et al., 2025, arXiv:2510.05901) suppresses the window's attention, as a window of 1
nearly does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_recurrent_lengthgen.models.modeling_protocols import base_of
from hf_recurrent_lengthgen.trainers.initial_states import keyed_generator


@contextmanager
def drawn_window(trainer: Any) -> Iterator[None]:
    """Within the block, a forward and backward pass of a trainer's model, attention has the window of the step.

    It is drawn uniformly from `attention_windows` with (seed, step) as the key: the same for all processes, all
    micro-batches of a step, and a resumed run.
    """
    from hf_recurrent_lengthgen.hybrids.windows import attending_to

    windows = trainer.args.attention_windows
    generator = keyed_generator(trainer.args.seed, trainer.state.global_step, "attention_window")
    with attending_to(base_of(trainer.model), windows[int(torch.randint(len(windows), (), generator=generator))]):
        yield
