"""Sequence classification, from the output at the last real token.

Shapes: B batch, T tokens, D hidden size, L labels.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .causal_lm import StatefulCausalLMOutput
from .modeling_stateful import StatefulModelWithHead
from .recurrent_cache import RecurrentCache
from .recurrent_state import RecurrentState, state_dtype
from .token_inputs import given_cache, read_inputs


@dataclass
class StatefulSequenceClassifierOutput(StatefulCausalLMOutput):
    """`loss` (scalar), `logits` (B, L) in float32, others as in the backbone's."""


class StatefulForSequenceClassification(StatefulModelWithHead):
    """Linear head `score` on the last real token of each row. A family sets `backbone_class`."""

    _auto_class = "AutoModelForSequenceClassification"  # type: ignore[assignment]
    accepts_loss_kwargs = False  # the loss is a mean over rows, not over tokens

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
        inputs_embeds: Tensor | None = None,
        cache: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> StatefulSequenceClassifierOutput | tuple:
        """Run T tokens from a state; arguments as in `StatefulBackbone`, and:

        Args:
            attention_mask: (B, T), marks the last real token of each row. Without a mask all tokens are real,
                whatever their ids, since the padding token is often also the end-of-sequence token.
            labels: (B,) class indices; (B,) or (B, L) floats for regression; (B, L) floats 0 and 1 for multi-label
                classification. `config.problem_type` chooses; None infers it as Transformers does.

        Raises:
            ValueError: for packed rows, and as in `StatefulBackbone.forward`.
        """
        cache = given_cache(cache, others)
        rows = read_inputs(input_ids, inputs_embeds, attention_mask, cache, position_ids, others)
        if rows.starts is not None:
            raise ValueError(
                "Sequence classification takes one sequence per row, and positions begin several: unpack rows."
            )
        output = self._backbone(
            input_ids,
            rows=rows,
            initial_state=initial_state,
            output_final_state=output_final_state,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            token_type_ids=token_type_ids,
        )
        # what stands at padding after the last real token repeats it
        logits = self.score(output.last_hidden_state[:, -1].to(self.score.weight.dtype))
        logits = logits.to(state_dtype(logits.dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        result = StatefulSequenceClassifierOutput(
            loss=loss,
            logits=logits,
            final_state=output.final_state,
            cache=output.cache,
            hidden_states=output.hidden_states,
        )
        return result.to_tuple() if self._wants_tuple(return_dict) else result
