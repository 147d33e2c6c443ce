"""The language model of every family, and the targets that it scores.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from .configuration_stateful import optional_module
from .modeling_generation import OutputWithCache, RecurrentCache, RecurrentGenerationMixin, checked_cache
from .modeling_stateful import StatefulBackbone, StatefulPreTrainedModel
from .rows import Rows, read_inputs
from .state_value import RecurrentState, state_dtype

IGNORED_LABEL = -100
"""What cross-entropy does not score, in torch and Transformers."""


@dataclass
class StatefulCausalLMOutput(OutputWithCache):
    """Output of the language model: `loss` (scalar), `logits` (B, T, V) in float32, others as of the backbone."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    final_state: RecurrentState | None = None
    cache: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class StatefulForCausalLM(StatefulPreTrainedModel, RecurrentGenerationMixin):
    """A `StatefulBackbone` and a head. A family sets `backbone_class`.

    Args of `forward`, in addition to those of `StatefulBackbone`:
        labels: (B, T), shifted inside as in Transformers; -100 is ignored. With padding on the left, the first real
            token of a row has nothing before it and is not scored, nor is the first token of a sequence in a packed
            row.
        logits_to_keep: Compute only the last so many logits, or those at these positions; 0 for all.
        past_key_values: `cache` under its name before Transformers 5.24.
        num_items_in_batch: Number of tokens that the summed loss is divided by, as Trainer passes it. Transformers'
            own Trainer also counts labels that are not scored, which makes loss and gradients too small: set those
            labels to -100 in the data. The trainers of hf_recurrent_lengthgen count scored labels only.
        sequence_group: As in `StatefulBackbone`. Targets then come as `shift_labels`, since that of the last token is
            in the next chunk. With `num_items_in_batch`, the targets of all chunks, the losses of the processes sum
            up to that of the whole rows; without it each is a mean over its own targets.
        skip_logits: Return the loss without logits, as Liger Kernel's models do. Where all of them would be many, they
            are computed in chunks of tokens (modeling_loss.py).
        others: `shift_labels` (B, T), labels that the caller has shifted, as in the losses of Transformers: the
            target of output t is at t, so that a chunk of a sequence is also scored on the token after it. They
            replace `labels`. Outputs before the first real token of a row are not scored. (In the signature,
            Trainer would expect them in every batch.) Also those of the backbone.
    """

    _auto_class = "AutoModelForCausalLM"  # type: ignore[assignment]
    accepts_loss_kwargs = True
    head_name = "lm_head"
    backbone_class: type[StatefulBackbone]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if (backbone := cls.__dict__.get("backbone_class")) is not None:
            cls.config_class, cls.base_model_prefix = backbone.config_class, backbone.base_model_prefix
            cls._no_split_modules = backbone._no_split_modules
            cls._tied_weights_keys = {f"{cls.head_name}.weight": f"{cls.base_model_prefix}.embeddings.weight"}
        super().__init_subclass__(**kwargs)
        # Trainer shifts labels for label_smoothing_factor only if the class is named here.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))
        setattr(self, self.head_name, nn.Linear(config.hidden_size, config.vocab_size, bias=False))
        self.post_init()

    @property
    def can_skip_logits(self) -> bool:
        """Whether `skip_logits` is taken: not with a loss function of your own, nor by the code of a checkpoint."""
        in_package = find_spec(".modeling_loss", __package__) is not None
        return in_package and self.loss_function is ForCausalLMLoss

    def get_output_embeddings(self) -> Any:
        return getattr(self, self.head_name)

    def set_output_embeddings(self, value: nn.Module) -> None:
        setattr(self, self.head_name, value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
        inputs_embeds: Tensor | None = None,
        cache: RecurrentCache | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sequence_group: ProcessGroup | None = None,
        skip_logits: bool = False,
        **others: Any,
    ) -> StatefulCausalLMOutput:
        """Run T tokens from a state; arguments as in the class.

        Raises:
            ValueError: for labels that are not one for each logit, `skip_logits` without labels or where
                `can_skip_logits` is false, and as in `StatefulBackbone.forward`.
        """
        shift_labels: Tensor | None = others.pop("shift_labels", None)
        names = {"past_key_values": past_key_values, "cache_params": others.pop("cache_params", None)}
        cache = checked_cache(initial_state, cache=cache, **names)
        rows = read_inputs(input_ids, inputs_embeds, attention_mask, cache, position_ids, others, sequence_group)
        if sequence_group is not None:
            optional_module("rows_shared").check_targets(labels, shift_labels, rows.real, sequence_group)
        output = self.base_model(
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
        hidden_states = output.last_hidden_state
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            chosen = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states = hidden_states[:, chosen]
        targets = labels, shift_labels, rows, num_items_in_batch
        if skip_logits and not torch.compiler.is_compiling():
            loss, logits = optional_module("modeling_loss").loss_without_logits(self, hidden_states, *targets), None
        else:
            logits = self.logits_of(hidden_states)
            loss = self._loss_of(logits, *targets)
        return StatefulCausalLMOutput(
            loss=loss,
            logits=None if skip_logits else logits,
            final_state=output.final_state,
            cache=output.cache,
            hidden_states=output.hidden_states,
        )

    def logits_of(self, hidden_states: Tensor) -> Tensor:
        """The logits (B, T, V) of hidden states (B, T, D) after the last norm."""
        head = self.get_output_embeddings()
        logits = head(hidden_states.to(head.weight.dtype))
        return logits.to(state_dtype(logits.dtype))

    def _loss_of(
        self,
        logits: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        rows: Rows,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor | None:
        """The loss of labels, or of shifted ones; None without any."""
        for name, value in (("labels", labels), ("shift_labels", shift_labels)):
            if value is not None and value.shape != logits.shape[:2]:
                raise ValueError(f"{name} must have shape {tuple(logits.shape[:2])}, got {tuple(value.shape)}.")
        further = {}
        if shift_labels is not None:
            further["shift_labels"] = scored_labels(shift_labels, rows, shifted=True).contiguous()
        elif labels is None:
            return None
        else:
            labels = scored_labels(labels, rows)
        return self.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch, **further
        )


def scored_labels(labels: Tensor, rows: Rows, shifted: bool = False) -> Tensor:
    """Labels (B, T) with -100 where a language model has nothing to predict them from.

    That is the first real token of a row behind padding, and the first token of a sequence inside a packed row. The
    label of the first column, which a shift leaves out, stays as it is. If `shifted`, the target of output t is at t,
    as in `shift_labels`: borders are up to the caller, and only outputs before the first real token are not scored.
    """
    if rows.real is not None:
        unread = rows.real.long().cumsum(1) == 0
        labels = labels.masked_fill(unread if shifted else pad(unread[:, :-1], (1, 0)), IGNORED_LABEL)
    if rows.starts is not None and not shifted:
        labels = labels.masked_fill(rows.starts, IGNORED_LABEL)
    return labels
