"""One modeling shell for every recurrent family: state in, state out.

A family supplies its blocks (each takes and returns a `LayerState`), its initialization and its names;
this file supplies the contract:

- `initial_state` in, `final_state` out; no state given is the zero state, exactly.
- Gradients flow into the first and out of the second; who wants truncation detaches.
- Padding anywhere in a row: real tokens are moved to the front, padding never touches the state, and
  the output at a padding position is that of the last real token before it.
- Several sequences in a row, as positions tell them: each from a state of its own.
- `generate(initial_state=...)` continues from a state, with sampling, beams and several sequences.

Shape legend: B batch, T tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .forgetting import Forgetting
from .packed_rows import Packing
from .padding import Padding
from .recurrent_cache import RecurrentCache
from .recurrent_generation import RecurrentGenerationMixin
from .recurrent_state import (
    LayerShape,
    RecurrentState,
    WindowedLayerShape,
    check_finite_state,
    check_state,
    state_dtype,
    zero_state,
)
from .token_inputs import (
    check_cache,
    check_token_types,
    mask_of_new_tokens,
    real_tokens,
    refuse_unsupported,
    scored_labels,
    starts_inside_rows,
    token_shape,
)


@dataclass
class StatefulModelOutput(ModelOutput):
    """Output of the backbone.

    Attributes:
        last_hidden_state: (B, T, D), after the final norm.
        final_state: State after the last real token of each row.
        past_key_values: The generation cache, if asked for.
        hidden_states: Embeddings and the output of every block, the last one after the final norm; (B, T, D) each, on
            the way of gradients. So do most models of Transformers; its Mamba classes leave the embeddings out and
            have the output of the last block both before and after the norm.
    """

    last_hidden_state: Tensor | None = None
    final_state: RecurrentState | None = None
    past_key_values: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class StatefulCausalLMOutput(ModelOutput):
    """Output of the language model: `loss` (scalar), `logits` (B, T, V) in float32, others as in the backbone's."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    final_state: RecurrentState | None = None
    past_key_values: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class StatefulPreTrainedModel(PreTrainedModel):
    """What the backbone and the language model of every family share."""

    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _is_stateful = True

    def __init__(self, config: Any) -> None:
        if not hasattr(config, "check"):
            needed = getattr(self.config_class, "__name__", "stateful config")
            raise ValueError(
                f"{type(self).__name__} needs a {needed}, got {type(config).__name__}: make one with "
                f"{needed}(**config.to_dict())."
            )
        config.check()
        super().__init__(config)

    @property
    def _backbone(self) -> Any:
        return self.base_model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in Transformers; a layer with an initialization of its own has a method `init_weights`."""
        super()._init_weights(module)
        if not isinstance(module, PreTrainedModel) and hasattr(module, "init_weights"):
            module.init_weights()  # type: ignore[operator]

    def state_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the state of every layer, without the batch dimension."""
        layers, window = self._backbone.layers, Forgetting.of(self.config).window
        if window is None:
            return tuple(layer.state_shape for layer in layers)
        windowed: Any = WindowedLayerShape
        return tuple(windowed(*layer.state_shape, (1 + window, layer.token_features)) for layer in layers)

    @property
    def stateless_layers(self) -> list[int]:
        """Layers of softmax attention: they have no state of fixed size that could be given, carried or cached."""
        return [layer for layer, shape in enumerate(self.state_shapes()) if 0 in shape.recurrent]

    def check_has_states(self) -> None:
        """Raise a `ValueError` if there are `stateless_layers`."""
        if self.stateless_layers:
            raise ValueError(
                f"The layers {self.stateless_layers} of this model are softmax attention, which has no state of fixed "
                "size, so the model runs whole texts only: give no initial_state and no past_key_values, generate "
                "with use_cache=False, and train without carried or random states."
            )

    def zero_state(self, batch_size: int) -> RecurrentState:
        """The state before any token, on the device of the model."""
        return zero_state(self.state_shapes(), batch_size, self.device, state_dtype(self.dtype))

    def _wants_tuple(self, return_dict: bool | None) -> bool:
        return not (self.config.return_dict if return_dict is None else return_dict)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, *args: Any, **kwargs: Any
    ) -> None:
        keywords = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and keywords.get("use_reentrant", True):  # torch takes a missing value as True
            raise ValueError(
                "Reentrant activation checkpointing loses the gradients through recurrent states: "
                'use gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers; the folder also carries the code for every Auto class of this family."""
        self.config.auto_map = self.code_map()
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def code_map(cls) -> dict[str, str]:
        """`auto_map` of a checkpoint: from Auto class to `file.Class`."""
        config_class: Any = cls.config_class
        file, family = config_class.model_type, config_class.__name__.removesuffix("Config")
        return {
            "AutoConfig": f"configuration_{file}.{family}Config",
            "AutoModel": f"modeling_{file}.{family}Model",
            "AutoModelForCausalLM": f"modeling_{file}.{family}ForCausalLM",
            "AutoModelForSequenceClassification": f"modeling_{file}.{family}ForSequenceClassification",
        }


class StatefulBackbone(StatefulPreTrainedModel):
    """Embeddings, layers and final norm. A family sets `embeddings`, `layers` and `final_norm`.

    Each of `layers` has a `state_shape`, a `LayerShape`, and runs T tokens from a state. It takes

        hidden_states: (B, T, D).
        state: `LayerState` before the first token.
        lengths: Number of real tokens in each row, (B,), the rest is padding on the right; None if there is none.
        and what `layer_inputs` gives it,

    and returns outputs (B, T, D) and the `LayerState` after the last real token of each row.
    """

    embeddings: nn.Module
    layers: nn.ModuleList

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The norm after the last block."""
        raise NotImplementedError

    def layer_inputs(self) -> list[tuple[Tensor, ...]]:
        """What a layer takes beside hidden states, state and lengths; nothing for most families."""
        return [()] * len(self.layers)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> StatefulModelOutput | tuple:
        """Run T tokens from a state.

        Args:
            input_ids: (B, T). Exactly one of `input_ids` and `inputs_embeds` is given.
            attention_mask: (B, T), 1 at real tokens and 0 at padding, anywhere in a row; with a cache also
                (B, `past_key_values.tokens_seen` + T).
            initial_state: State before the first token; None is the zero state.
            output_final_state: Whether to return `final_state`.
            inputs_embeds: (B, T, D).
            past_key_values: Generation cache; it holds a state, so it excludes `initial_state`. The first token goes
                on from that state, also at position 0.
            use_cache: Whether to return a cache; None is the configuration's `use_cache` in evaluation and False in
                training, in models that have a layer without state, and without `output_final_state`.
            output_hidden_states: Whether to return `hidden_states`.
            return_dict: False for a plain tuple of what is not None.
            position_ids: (B, T) or (1, T). Positions that count up say nothing to a recurrent model. Where they start
                anew, at 0 or at the first position of the row, a new sequence begins from the zero state, so that
                packed rows are exactly what their sequences are alone. The first sequence of a row takes the initial
                state, and `final_state` is that of the last one. Under torch.compile the graph breaks where positions
                are read.
            token_type_ids: (B, T), 0 at all tokens, as tokenizers give them.
            others: Other forms of `position_ids`, from collators for packed rows: `seq_idx` (B, T), numbers of
                sequences that go up, and for a single row `cu_seq_lens_q` or `cu_seq_lens_k` (N + 1,), the bounds of
                sequences, beside which `max_length_q` and `max_length_k` are passed over; `cache_position` (T,),
                which counts up. Nothing else is taken.

        Raises:
            ValueError: for arguments that contradict each other, do not fit, or that no recurrent model has.
        """
        refuse_unsupported(others)
        shape = batch_size, length = token_shape(input_ids, inputs_embeds)
        if initial_state is not None and past_key_values is not None:
            raise ValueError(
                "Give initial_state or past_key_values, not both: each of them is the state to start from."
            )
        check_cache(past_key_values)
        if use_cache is None:
            use_cache = self.config.use_cache and output_final_state and not (self.training or self.stateless_layers)
        if initial_state is not None or past_key_values is not None or use_cache:
            self.check_has_states()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        attention_mask = mask_of_new_tokens(attention_mask, past_key_values, shape)
        real = real_tokens(attention_mask)
        check_token_types(token_type_ids, real)
        starts = starts_inside_rows(position_ids, others, shape, attention_mask)
        state = self._starting_state(initial_state, past_key_values, batch_size, hidden_states.device)

        layout: Padding | Packing | None = None
        if starts is not None:
            layout = Packing.from_starts(starts, torch.ones_like(starts) if real is None else real)
        elif real is not None:
            layout = Padding.from_mask(real)
        all_hidden_states, states = [], []
        rows: Any = hidden_states if layout is None else layout.to_front(hidden_states)
        for block, layer_state, inputs in zip(self.layers, state, self.layer_inputs(), strict=True):
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
            if isinstance(layout, Packing):
                rows, after = block(rows, layout.starting_states(layer_state), layout.lengths, *inputs)
                states.append(layout.final_states(after))
            else:
                rows, after = block(rows, layer_state, None if layout is None else layout.lengths, *inputs)
                states.append(after)
            if output_hidden_states and layout is not None:
                # what is returned is what the next layer reads, so that gradients reach it
                hidden_states = layout.back(rows)
                rows = layout.to_front(hidden_states)
            else:
                hidden_states = rows
        if layout is not None and not output_hidden_states:
            hidden_states = layout.back(rows)
        hidden_states = self.final_norm(hidden_states)
        all_hidden_states.append(hidden_states)

        final_state = tuple(states)
        if use_cache or past_key_values is not None:
            past_key_values = RecurrentCache() if past_key_values is None else past_key_values
            past_key_values.advance(final_state, length)
        output = StatefulModelOutput(
            last_hidden_state=hidden_states,
            final_state=final_state if output_final_state else None,
            past_key_values=past_key_values,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
        )
        return output.to_tuple() if self._wants_tuple(return_dict) else output

    def _starting_state(
        self,
        initial_state: RecurrentState | None,
        cache: RecurrentCache | None,
        batch_size: int,
        device: torch.device,
    ) -> RecurrentState:
        shapes, dtype = self.state_shapes(), state_dtype(self.dtype)
        if initial_state is not None:
            initial_state = check_state(initial_state, shapes, batch_size, device, dtype)
            if not torch.compiler.is_compiling():
                check_finite_state(initial_state)
            return initial_state
        if cache is not None and (state := cache.state_for(batch_size)) is not None:
            return check_state(state, shapes, batch_size, device, dtype, "past_key_values.state")
        return zero_state(shapes, batch_size, device, dtype)


class StatefulModelWithHead(StatefulPreTrainedModel):
    """A `StatefulBackbone` named `base_model_prefix`, on which a subclass puts a head."""

    backbone_class: type[StatefulBackbone]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone_class(config))

    def get_input_embeddings(self) -> nn.Module:
        return self._backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self._backbone.set_input_embeddings(value)


class StatefulForCausalLM(StatefulModelWithHead, RecurrentGenerationMixin):
    """Language model. A family sets `backbone_class`."""

    accepts_loss_kwargs = True
    head_name = "lm_head"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.head_name, nn.Linear(config.hidden_size, config.vocab_size, bias=False))
        self.post_init()

    def get_output_embeddings(self) -> Any:
        return getattr(self, self.head_name)

    def set_output_embeddings(self, value: nn.Module) -> None:
        setattr(self, self.head_name, value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **others: Any,
    ) -> StatefulCausalLMOutput | tuple:
        """Run T tokens from a state; arguments as in `StatefulBackbone.forward`, and:

        Args:
            labels: (B, T), shifted inside as in Transformers; -100 is ignored. With padding on the left, the
                first real token of a row has nothing before it and is not scored, nor is the first token of a
                sequence in a packed row.
            logits_to_keep: Compute only the last so many logits, or those at the given positions; 0 for all.
            num_items_in_batch: Tokens to divide the summed loss by, as Trainer passes it. Transformers' own Trainer
                also counts labels that are not scored, which makes loss and gradients too small: for it, set them to
                -100 in the data. The trainers of hf_recurrent_lengthgen count what is scored.
            others: `shift_labels` (B, T), labels that are shifted already, as Transformers' losses know them: the
                target of output t stands at t, so that a piece of a text can be scored on the token after it. `labels`
                are not used then. Outputs before the first real token of a row are not scored. (By a name in the
                signature, Trainer would take them for labels that every batch has.) And those of the backbone.

        Raises:
            ValueError: for labels of either kind together with `logits_to_keep`, and as in `StatefulBackbone.forward`.
        """
        shift_labels: Tensor | None = others.pop("shift_labels", None)
        refuse_unsupported(others)
        keep_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be 0 (all), a positive number or positions, got {logits_to_keep}.")
        if not (labels is None and shift_labels is None) and not keep_all:
            raise ValueError("labels need all logits: drop logits_to_keep.")
        check_cache(past_key_values)
        shape = token_shape(input_ids, inputs_embeds)
        attention_mask = mask_of_new_tokens(attention_mask, past_key_values, shape)
        starts = starts_inside_rows(position_ids, others, shape, attention_mask)
        output = self._backbone(
            input_ids,
            attention_mask=attention_mask,
            initial_state=initial_state,
            output_final_state=output_final_state,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            token_type_ids=token_type_ids,
            seq_idx=None if starts is None else starts.cumsum(1),
        )
        hidden_states = output.last_hidden_state
        if not keep_all:
            hidden_states = hidden_states[
                :, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            ]
        head = self.get_output_embeddings()
        logits = head(hidden_states.to(head.weight.dtype))
        logits = logits.to(state_dtype(logits.dtype))

        loss = None
        if not (labels is None and shift_labels is None):
            for name, given in (("labels", labels), ("shift_labels", shift_labels)):
                if given is not None and given.shape != logits.shape[:2]:
                    raise ValueError(f"{name} must have shape {tuple(logits.shape[:2])}, got {tuple(given.shape)}.")
            if shift_labels is not None:
                shift_labels = scored_labels(shift_labels, attention_mask, starts, shifted=True)
            elif labels is not None:
                labels = scored_labels(labels, attention_mask, starts)
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=logits.shape[-1],
                num_items_in_batch=num_items_in_batch,
                **({} if shift_labels is None else {"shift_labels": shift_labels.contiguous()}),
            )
        result = StatefulCausalLMOutput(
            loss=loss,
            logits=logits,
            final_state=output.final_state,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        return result.to_tuple() if self._wants_tuple(return_dict) else result
