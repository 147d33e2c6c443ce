"""One modeling shell for every recurrent family: state in, state out.

A family supplies its blocks, initialization and names, this file the contract:

- `initial_state` in, `final_state` out, gradients through both; by default from the zero state, exactly, or the
  active learned state, if there is one.
- Padding never touches the state; the output at a padding position is that of the last real token before it.
- Packed rows: each sequence of a row, told apart by positions, runs from its own state.

Shapes: B batch, T tokens, D hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import can_return_tuple

from .configuration_stateful import OLD_CACHE_NAMES, optional_module
from .layers_mixer import MixerLayer
from .modeling_generation import OutputWithCache, RecurrentCache, checked_cache
from .rows import Rows, read_inputs
from .rows_moved import MovedRows
from .state_value import (
    LayerShape,
    LearnedStatesMixin,
    RecurrentState,
    check_initial_state,
    check_state,
    learned_row,
    mutable_state,
    state_dtype,
    state_to,
    zero_state,
)


@dataclass
class StatefulModelOutput(OutputWithCache):
    """Output of the backbone.

    Attributes:
        last_hidden_state: (B, T, D), after the final norm.
        final_state: State after the last real token of each row.
        cache: The generation cache, with `use_cache`.
        hidden_states: Embeddings and the output of every block, the last one after the final norm; (B, T, D) each.
            Gradients flow. Those of Transformers' Mamba classes lack embeddings, and add the last one before the norm.
    """

    last_hidden_state: Tensor | None = None
    final_state: RecurrentState | None = None
    cache: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


def refuse_reentrant(settings: dict[str, Any] | None) -> None:
    """Raise a `ValueError` for reentrant activation checkpointing, torch's default if there are settings."""
    if settings is not None and settings.get("use_reentrant", True):
        raise ValueError(
            "Reentrant activation checkpointing loses the gradients through recurrent states: "
            'use gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )


class StatefulPreTrainedModel(LearnedStatesMixin, PreTrainedModel):
    """What the backbone and the language model of every family share."""

    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _input_embed_layer = "embeddings"

    def __init__(self, config: Any) -> None:
        if not hasattr(config, "check"):
            needed = getattr(self.config_class, "__name__", "stateful config")
            raise ValueError(
                f"{type(self).__name__} needs a {needed}, got {type(config).__name__}: make one with "
                f"{needed}(**config.to_dict())."
            )
        config.check()
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in Transformers; a module with its own initialization has a method `init_weights`."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and getattr(self.config, "initialization", None) == "mamba-ssm":
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))  # as torch does
        if not isinstance(module, PreTrainedModel) and hasattr(module, "init_weights"):
            module.init_weights()  # type: ignore[operator]

    def state_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the state of every layer, without the batch dimension."""
        layers: Any = self.base_model.layers
        shapes = tuple(layer.scan_mixer.state_shape for layer in layers)
        if (window := (self.config.forgetting or {}).get("window")) is None:
            return shapes
        return tuple(optional_module("scan_window").window_shape(window, shape) for shape in shapes)

    @property
    def stateless_layers(self) -> list[int]:
        """Layers of softmax attention, which have no state of fixed size to give, carry or cache."""
        return [layer for layer, shape in enumerate(self.state_shapes()) if 0 in shape.recurrent]

    def check_has_states(self) -> None:
        """Raise a `ValueError` if there are `stateless_layers`."""
        if self.stateless_layers:
            raise ValueError(
                f"The layers {self.stateless_layers} of this model are softmax attention, which has no state of fixed "
                "size, so the model reads whole sequences only: give no initial_state or cache, generate "
                "with use_cache=False, and train without carried or random states."
            )

    if hasattr(PreTrainedModel, "activation_checkpointing_enable"):

        def activation_checkpointing_enable(
            self, activation_checkpointing_kwargs: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            """As in Transformers; reentrant checkpointing is refused."""
            refuse_reentrant(activation_checkpointing_kwargs)
            super().activation_checkpointing_enable(activation_checkpointing_kwargs, *args, **kwargs)

    else:  # its name before Transformers 5.24

        def gradient_checkpointing_enable(
            self, gradient_checkpointing_kwargs: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            """As in Transformers; reentrant checkpointing is refused."""
            refuse_reentrant(gradient_checkpointing_kwargs)
            super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, with the code for every Auto class; older weights there go."""
        self.config.auto_map = self.code_map()
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", not args or args[0]):
            single = not any(Path(save_directory).glob("model-?????-of-?????.safetensors"))
            Path(save_directory, "model.safetensors" + ".index.json" * single).unlink(True)

    @classmethod
    def code_map(cls) -> dict[str, str]:
        """`auto_map` of a checkpoint: from Auto class to `file.Class`."""
        config_class: Any = cls.config_class
        family, file = config_class.__name__.removesuffix("Config"), config_class.__module__.rpartition(".")[2]
        models = file.replace("configuration_", "modeling_")
        names = {"AutoModel": f"{family}Model", "AutoModelForCausalLM": f"{family}ForCausalLM"}
        return {"AutoConfig": f"{file}.{family}Config", **{auto: f"{models}.{name}" for auto, name in names.items()}}


class StatefulBackbone(StatefulPreTrainedModel):
    """Embeddings, layers and final norm. A family sets `config_class`, and gives `make_layer` and `make_norm`.

    A layer is a `MixerLayer` and runs T tokens from a state. It takes

        hidden_states: (B, T, D).
        state: `LayerState` before the first token.
        rows: Its rows, each one sequence with padding at its end only; None if all tokens are real and no other
            process has a chunk of them.
        and what `layer_inputs` gives it,

    and returns outputs (B, T, D) and the `LayerState` after the last real token of each row. What it returns beyond
    that, (B, T, ...) each, all later layers take as their last inputs.

    Args of `forward`:
        input_ids: (B, T). Exactly one of `input_ids` and `inputs_embeds`.
        attention_mask: (B, T), 1 at real tokens and 0 at padding, anywhere in a row; with a cache also
            (B, `cache.tokens_seen` + T).
        initial_state: State before the first token; None is the active learned state (state_learned.py), or zero.
        output_final_state: Whether to return `final_state`.
        inputs_embeds: (B, T, D).
        cache: Generation cache. It holds a state, so it excludes `initial_state`. The first token
            continues from that state, even at position 0.
        use_cache: Whether to return a cache. None means `config.use_cache`, but False in training, in models with
            a stateless layer, without `output_final_state`, and under torch.export.
        output_hidden_states: Whether to return `hidden_states`.
        position_ids: (B, T) or (1, T). A recurrent model ignores positions that count up. Where they restart, at 0
            or at the first position of the row, a new sequence begins from zero, or from the active learned state,
            so that packed sequences give exactly what each gives alone. The first sequence of a row starts from the
            initial state, and `final_state` is that of the last one. Under torch.compile, reading positions breaks
            the graph.
        token_type_ids: (B, T), as tokenizers return them; ignored, since there are no token types.
        sequence_group: Processes that share the rows, each with a chunk of them, in the order of time
            (rows_shared.py). All give the same `initial_state`, that before the whole rows, and get the same
            `final_state`, that after them. Packed rows need `seq_idx`, counted over the chunks.
        rows: The rows, where they have been read already, in place of what describes them.
        others: Other forms of packed rows that collators give (rows.py): `seq_idx` (B, T), the number of each token's
            sequence, and `cu_seq_lens_q`, their borders. Other arguments are refused.
    """

    _auto_class = "AutoModel"  # type: ignore[assignment]
    embeddings: nn.Module
    layers: nn.ModuleList
    layers_name: ClassVar[str] = "layers"
    norm_name: ClassVar[str] = "norm"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = self.make_layers(config)
        for number, layer in enumerate(layers):
            layer.scan_mixer.layer = number  # type: ignore[union-attr]
        setattr(self, self.layers_name, layers)
        setattr(self, self.norm_name, self.make_norm(config))
        states = None if config.learned_states is None else optional_module("state_learned")
        if states is not None and states.recorded(config)["names"]:
            self.learned_states = states.LearnedStates(config)  # type: ignore[misc]
            self._keep_in_fp32_modules_strict = {"learned_states"}
        self.gradient_checkpointing = False
        self.post_init()

    def make_layers(self, config: Any) -> nn.ModuleList:
        """All layers, and parameters that they share."""
        return nn.ModuleList(self.make_layer(config, layer) for layer in range(config.num_hidden_layers))

    def make_layer(self, config: Any, layer: int) -> MixerLayer:
        raise NotImplementedError

    def make_norm(self, config: Any) -> nn.Module:
        """The norm after the last layer."""
        raise NotImplementedError

    def layer_inputs(self) -> list[tuple[Tensor, ...]]:
        """Further inputs of each layer, after hidden states, state and rows; none in most families."""
        return [()] * len(self.layers)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        initial_state: RecurrentState | None = None,
        output_final_state: bool = True,
        inputs_embeds: Tensor | None = None,
        cache: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sequence_group: ProcessGroup | None = None,
        rows: Rows | None = None,
        **others: Any,
    ) -> StatefulModelOutput:
        """Run T tokens from a state; arguments as in the class.

        Raises:
            ValueError: for arguments that contradict each other, do not fit, or do not apply to recurrent models.
        """
        names = {name: others.pop(name, None) for name in OLD_CACHE_NAMES}
        cache = checked_cache(initial_state, cache=cache, **names)
        if rows is None:
            rows = read_inputs(input_ids, inputs_embeds, attention_mask, cache, position_ids, others, sequence_group)
        batch_size, length = rows.shape
        if use_cache is None:
            use_cache = self.config.use_cache and output_final_state and rows.group is None
            use_cache = use_cache and not (self.training or self.stateless_layers or torch.compiler.is_exporting())
        own = cache is not None and cache.may_overwrite  # so this model has made its state
        stateless = initial_state is None and cache is None and rows.group is None and not use_cache
        if not (own or stateless):
            self.check_has_states()
        keep_all = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        hidden_states = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        state = self._starting_state(initial_state, cache, batch_size, hidden_states.device)
        moved = MovedRows.of(rows)
        if own and moved is None:
            state = mutable_state(state)
        caches = use_cache or cache is not None
        through = self._through_layers if rows.starts is None else self._through_sequences
        keep_states = caches or output_final_state
        all_hidden_states, final_state = through(hidden_states, state, rows, moved, keep_all, keep_states)
        if caches:
            cache = RecurrentCache() if cache is None else cache
            cache.advance(final_state, length)
        return StatefulModelOutput(
            last_hidden_state=all_hidden_states[-1],
            final_state=final_state if output_final_state else None,
            cache=cache,
            hidden_states=tuple(all_hidden_states) if keep_all else None,
        )

    def _through_layers(
        self, x: Tensor, state: RecurrentState, rows: Rows, moved: MovedRows | None, keep_all: bool, keep_states: bool
    ) -> tuple[list[Tensor], RecurrentState]:
        """Hidden states before each layer, with `keep_all`, and after the final norm; and the state after, or ()."""
        hidden_states, states = [], []
        shared: tuple[Any, ...] = ()
        first: Any = (None if rows.starts is None else learned_row(self)) or [None] * len(state)
        for_layers: Any = rows if rows.group is not None else None
        inside: Any = x
        if moved is not None:
            for_layers, inside = moved.groups, moved.to_front(x)
        for block, before, new, inputs in zip(self.layers, state, first, self.layer_inputs(), strict=True):
            if keep_all:
                hidden_states.append(x)
            starting = before if moved is None else moved.starting_states(before, new)
            inside, after, *further = block(inside, starting, for_layers, *inputs, *shared)
            if keep_states:
                states.append(after if moved is None else moved.final_states(after))
            del starting, after  # else they would be there while the next layer runs
            shared = (*shared, *further)
            if keep_all and moved is not None:
                # what is returned is what the next layer reads, so that gradients reach it
                x = moved.back(inside)
                inside = moved.to_front(x)
            elif moved is None:
                x = inside
        if moved is not None and not keep_all:
            x = moved.back(inside)
        return [*hidden_states, getattr(self, self.norm_name)(x)], tuple(states)

    @torch.compiler.disable
    def _through_sequences(self, *arguments: Any) -> Any:
        """For rows where sequences begin: torch.compile makes a graph of each layout."""
        return self._through_layers(*arguments)

    def _starting_state(
        self, initial_state: RecurrentState | None, cache: RecurrentCache | None, batch_size: int, device: torch.device
    ) -> RecurrentState:
        if cache is not None and cache.may_overwrite and (state := cache.state_for(batch_size)) is not None:
            return state
        shapes, dtype = self.state_shapes(), state_dtype(self.dtype)
        if initial_state is not None:
            initial_state = check_state(initial_state, shapes, batch_size, device, dtype)
            check_initial_state(initial_state)
            return initial_state
        if cache is not None and (state := cache.state_for(batch_size)) is not None:
            return check_state(state, shapes, batch_size, device, dtype, "cache.state")
        if learned_row(self) is not None:
            return state_to(self.first_state(batch_size), device)
        # layers of one shape share their zeros, which activation checkpointing keeps for each of them
        zeros = {shape: zero_state((shape,), batch_size, device, dtype)[0] for shape in set(shapes)}
        return tuple(zeros[shape] for shape in shapes)
