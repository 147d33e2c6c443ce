"""The recurrent model types of Transformers, what each can do, and what does not go together in a call.

Models are known by the `model_type` of their text configuration.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from hf_recurrent_lengthgen.models.modeling_generation import NO_KEYS, NOT_OBEYED


class StockType(NamedTuple):
    """What is special about a model type."""

    state: str  # layout of the recurrent part in the model, without B
    # Ends of names of linear layers that take no adapter: PEFT refuses them by the model type, or the mixers
    # bypass the adapter.
    no_adapters: tuple[str, ...] = ()
    no_noise: str | None = None  # why noise cannot take the place of its recurrent part
    state_field: str = ""  # the field of its configuration with N of all recurrent layers, if N can grow (StateX)
    no_expansion: str = ""  # if not, why


SSD = "(H, P, N)"
SELECTIVE = "(D, N)"
DELTA = "(H, N, P)"
NONE = "none, convolution only"

_MAMBA_N = "mamba_d_state"
_UNIT_KEYS = (
    "its delta rule erases along keys of unit length, which wider keys or merged heads would change for every old "
    "association, and its configuration has one size for all layers"
)
_NO_STATE = "it has short convolutions only, no state that could grow"

SUPPORTED = {
    "bailing_hybrid": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "bamba": StockType(SSD, state_field=_MAMBA_N),
    "falcon_h1": StockType(SSD, no_adapters=("out_proj",), state_field=_MAMBA_N),
    "falcon_mamba": StockType(SELECTIVE, no_adapters=("out_proj", "dt_proj"), state_field="state_size"),
    "granitemoehybrid": StockType(SSD, state_field=_MAMBA_N),
    "jamba": StockType(
        SELECTIVE,
        no_adapters=("dt_proj",),
        no_expansion="learned norms of B and C over N would have to grow, too, in a way no one has studied",
    ),
    "kimi_linear": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "lara_mini": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "lfm2": StockType(NONE, no_expansion=_NO_STATE),
    "lfm2_moe": StockType(NONE, no_expansion=_NO_STATE),
    "lfm3": StockType(NONE, no_expansion=_NO_STATE),
    "mamba": StockType(SELECTIVE, no_adapters=("out_proj", "dt_proj"), state_field="state_size"),
    "mamba2": StockType(SSD, no_adapters=("out_proj",), state_field="state_size"),
    "minimax": StockType(
        DELTA, no_expansion="its decays are fixed numbers of each head, which merged heads cannot share"
    ),
    "nemotron_h": StockType(SSD, no_adapters=("out_proj",), state_field="ssm_state_size"),
    "olmo_hybrid": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "qwen3_5_moe_text": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "qwen3_5_text": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "qwen3_next": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "xlstm": StockType(
        "(H, N P + N + 1): memory, normalizer, stabilizer",
        no_noise="memory, normalizer and stabilizer are of different kinds, which no one Gaussian describes",
        no_expansion="its normalizer and stabilizer belong to heads and their gates, which merged heads cannot share",
    ),
    "zamba": StockType(SSD, no_expansion="its Mamba-1 mixers have heads of their own layout"),
    "zamba2": StockType(SSD, state_field=_MAMBA_N),
}

REFUSED = {
    "glm5_next_text": "its attention selects keys with an index that is kept in a cache of its own kind",
    "inkling_text": "it has no recurrent layers, only attention with four short convolutions around each",
    "inkling2_text": "it has no recurrent layers, only attention with short convolutions around each",
    "inkling2_loop_text": "it has no recurrent layers, only attention with short convolutions around each",
    "qwen4_exp_text": "its state holds token ids, which are no value that a gradient or noise could change",
    "recurrent_gemma": "it keeps its states as attributes of its modules, where one call overwrites another's",
    "zaya": "it has no recurrent layers, only attention with short convolutions and one delayed value",
    "rwkv": "RWKV-4 is superseded, and Transformers' class divides its weights in place when it evaluates, which "
    "checkpoints and adapters then hold: take RWKV-5, 6 or 7, which are families of this package",
}
SUPERSEDED = {"rwkv"}  # not evaluated without states either

_EXPERTS = "the loss of experts is one of all tokens: set output_router_logits to False"
ROPE = "rotary embeddings that change with the length of the text"
SEVERAL = "several sequences in a row"
REFUSED_USES: dict[tuple[str, ...], str] = {
    ("forgetting",): "families of this package can forget: set forgetting in the config to None",
    ("layer_replication of PEFT",): "repeated layers have one state: leave it out",
    ("stock mixers that read over padding",): "give rows of equal length without padding",
    ("attention_window", "no attention layers"): "a window limits the attention of hybrids: leave it out",
    ("attention_window", ROPE): "a window of keys would not be exact: set another rope_type in the config",
    ("attention_window", "this attn_implementation"): 'choose "sdpa", "eager", "flex_attention" or flash',
    ("chunks", ROPE): "set another rope_type in the config, or read rows at once",
    ("states", "use_cache"): "give attention_cache to let attention layers see what came before, or a cache of both, "
    "cache_from_state(initial_state, attention_cache)",
    ("states", "reentrant activation checkpointing"): "it loses the gradients through states: use "
    'gradient_checkpointing_kwargs={"use_reentrant": False}',
    ("attention_cache with tokens", "no initial_state"): "give the final state after them, or a new attention cache",
    ("two names of a cache",): "give one of them",
    ("a cache of keys without a state",): "give it as attention_cache, with initial_state",
    ("use_cache", SEVERAL): "give one sequence per row, or leave the cache (use_cache, generate) out",
    ("a row without a new token",): "attention_mask is 0 all over: give each row a token",
    ("a row without a real token", "output_router_logits"): _EXPERTS,
    ("a cache of rows of unequal length", "output_router_logits"): _EXPERTS,
    ("logits_to_keep", "labels"): "labels need all logits: leave logits_to_keep out",
    ("classification of rows", SEVERAL): "one output stands for a row: give one sequence per row",
    ("another head", "padding"): "give rows of equal length to a model that is not a language model",
    ("another head", SEVERAL): "give rows of one sequence to a model that is not a language model",
    ("sequence_group",): "processes share rows of families of this package only: leave it out",
    ("a stock cache",): "give one that a call with use_cache=True or cache_from_state returned. If PEFT gave it: "
    + NO_KEYS,
    **{(name,): f"{why}: leave it out" for name, why in NOT_OBEYED.items()},
    ("assistant_model or prompt_lookup_num_tokens",): "states cannot be cropped to an earlier token: leave them out",
    ("no prompt",): "give a prompt of at least one token",
    ("a state to generate from", "use_cache=False"): "generate carries it in the cache: leave use_cache on",
    ("virtual tokens of PEFT", "generate with a cache"): "PEFT reads them again before each new token: generate with "
    "use_cache=False, or convert the checkpoint to a family of this package",
}
"""What a call of a wrapped model cannot have, alone or together, and what to do."""


def stock_type_of(model: Any) -> StockType:
    """What is special about the type of a model."""
    return SUPPORTED[model.config.get_text_config(decoder=True).model_type]


def check_uses(model: Any, uses: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for what a model cannot do; `uses` that are None or false do not count."""
    requested = {name for name, value in uses.items() if value is not None and value is not False}
    for names, why in REFUSED_USES.items():
        if requested.issuperset(names):
            raise ValueError(f"{type(model).__name__} does not take {' with '.join(names)}: {why}.")


def adapter_targets(model: Any) -> tuple[str, ...]:
    """Ends of the names of the linear layers that an adapter may target.

    That is all but routers, the head, and layers that share a weight, into which adapters could not be merged.
    """
    left_out = {"gate", "router", "shared_expert_gate", *stock_type_of(model).no_adapters}
    head = model.get_output_embeddings()
    layers = [
        (name.rpartition(".")[2], layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    ]
    owners = Counter(id(layer.weight) for _, layer in layers)
    left_out |= {end for end, layer in layers if owners[id(layer.weight)] > 1}
    ends = {end for end, layer in layers if layer is not head} - left_out
    return tuple(sorted(end for end in ends if not end.isdecimal()))  # a number alone would match layers, too
