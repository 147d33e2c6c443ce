"""A mixer whose state advances by a scan, and what goes around that scan.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .forgetting import Forgetting
from .forgetting_scans import scan_with_forgetting
from .recurrent_state import LayerShape, LayerState


class ScanMixer(nn.Module):
    """Base of mixers with one recurrence.

    A subclass sets `config` and `scan`, gives `state_shape`, and runs its recurrence by `advance`. What depends on
    the recurrence alone (how it forgets, what it retains, its attention map) goes by the scan's name.

    Attributes:
        config: The configuration of the model.
        scan: The function of a file `scan_*.py`, as a static method: it takes the inputs of the recurrence and the
            recurrent part of a state, and gives outputs and the recurrent part after the last token.
        grows: What makes its state larger (StateX, arXiv:2509.22630): "state_size", N of each head or channel, or
            "num_heads", fewer and larger heads; None where no one has said.
    """

    config: Any
    scan: Callable[..., Any]
    grows: ClassVar[str | None] = None

    @property
    def state_shape(self) -> LayerShape:
        """Shapes of the state of its layer, without the batch dimension."""
        raise NotImplementedError

    @property
    def conv_parts(self) -> dict[str, int]:
        """Names of the parts of the convolution state, in its order, and the channels of each."""
        channels = self.state_shape.conv[0]
        return {"x": channels} if channels else {}

    def advance(
        self, *inputs: Tensor, state: LayerState, lengths: Tensor | None, **options: Any
    ) -> tuple[Tensor, LayerState]:
        """Outputs, and the state with the recurrent part after T tokens.

        Args:
            inputs: Of `scan`, before the state; nothing is written past the end of a row.
            state: Before the first token.
            lengths: Number of real tokens of each row, (B,), None for all.
            options: Keywords of `scan`.
        """
        rule = Forgetting.of(self.config)
        if rule != Forgetting():
            return scan_with_forgetting(rule, self.scan, inputs, state, lengths, **options)
        y, recurrent = self.scan(*inputs, state.recurrent, **options)
        return y, state._replace(recurrent=recurrent)


class MixerLayer(GradientCheckpointingLayer):
    """Base of layers with one mixer, in the attribute that `mixer_name` names."""

    mixer_name: ClassVar[str] = "mixer"

    @property
    def scan_mixer(self) -> ScanMixer:
        """The mixer; `state_shape` and `conv_parts` are those of the layer."""
        mixer: ScanMixer = getattr(self, self.mixer_name)
        return mixer
