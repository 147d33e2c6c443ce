"""A number as the output of a backbone, trained with the mean squared error."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from hf_recurrent_lengthgen.references.transformer import check_right_padding


@dataclass
class ScalarOutput(ModelOutput):
    """Output of `ScalarRegression`.

    Attributes:
        loss: Mean squared error, if labels were given.
        logits: Predictions (B,).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None


class ScalarRegression(nn.Module):
    """A feed-forward network on the hidden state of the last token ("Output Alignment", appendix A). Trainer takes it.

    Args:
        backbone: takes `input_ids` (B, T) and `attention_mask` (B, T) and returns `last_hidden_state` (B, T, D): a
            `DecoderTransformer`, the backbone of a stateful family, such as `StatefulMamba2Model`, or one of
            Transformers.
        hidden_size: D.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, 1))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> ScalarOutput:
        """Predict one number for each row.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 at real tokens and 0 at padding, which stands on the right; None for no padding.
            labels: (B,), the numbers.

        Raises:
            ValueError: for padding that is not on the right.
        """
        if attention_mask is not None:
            check_right_padding(attention_mask)
        padded: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        hidden_states = self.backbone(input_ids=input_ids, **padded).last_hidden_state
        rows = torch.arange(len(input_ids), device=input_ids.device)
        last = -1 if attention_mask is None else attention_mask.sum(1) - 1
        predictions = self.head(hidden_states[rows, last]).squeeze(-1)
        loss = None if labels is None else nn.functional.mse_loss(predictions, labels.to(predictions.dtype))
        return ScalarOutput(loss=loss, logits=predictions)
