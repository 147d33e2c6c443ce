"""The recurrent model types of Transformers: what `stateful` must know of each, and why it refuses some.

Models are known by the `model_type` of their text configuration.
"""

from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from hf_recurrent_lengthgen.models.modeling_protocols import StatefulModel


class StockType(NamedTuple):
    """What is special about a model type."""

    state: str  # layout of the recurrent part in the model, without B
    # Ends of names of linear layers that take no adapter: PEFT refuses them by the model type, or the mixers
    # bypass the adapter.
    no_adapters: tuple[str, ...] = ()
    no_noise: str | None = None  # why noise cannot take the place of its recurrent part
    state_field: str = ""  # the field of its configuration with N of all recurrent layers, if N can grow (StateX)
    no_expansion: str = ""  # if not, why
    shares: bool = True  # whether processes can share its rows
    drops_state: bool = False  # whether stock mixers drop the state of a stock cache before several tokens


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
    "falcon_mamba": StockType(
        SELECTIVE, drops_state=True, no_adapters=("out_proj", "dt_proj"), state_field="state_size"
    ),
    "granitemoehybrid": StockType(SSD, state_field=_MAMBA_N),
    "jamba": StockType(
        SELECTIVE,
        drops_state=True,
        no_adapters=("dt_proj",),
        no_expansion="learned norms of B and C over N would have to grow, too, in a way no one has studied",
    ),
    "kimi_linear": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "lara_mini": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "lfm2": StockType(NONE, no_expansion=_NO_STATE),
    "lfm2_moe": StockType(NONE, no_expansion=_NO_STATE),
    "lfm3": StockType(NONE, no_expansion=_NO_STATE),
    "mamba": StockType(SELECTIVE, drops_state=True, no_adapters=("out_proj", "dt_proj"), state_field="state_size"),
    "mamba2": StockType(SSD, no_adapters=("out_proj",), state_field="state_size"),
    "minimax": StockType(
        DELTA,
        no_expansion="its decays are fixed numbers of each head, which merged heads cannot share",
    ),
    "nemotron_h": StockType(SSD, no_adapters=("out_proj",), state_field="ssm_state_size"),
    "olmo_hybrid": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "qwen3_5_moe_text": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "qwen3_5_text": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "qwen3_next": StockType(DELTA, no_expansion=_UNIT_KEYS),
    "xlstm": StockType(
        "(H, N P + N + 1): memory, normalizer, stabilizer",
        shares=False,
        no_noise="memory, normalizer and stabilizer are of different kinds, which no one Gaussian describes",
        no_expansion="its normalizer and stabilizer belong to heads and their gates, which merged heads cannot share",
    ),
    "zamba": StockType(SSD, drops_state=True, no_expansion="its Mamba-1 mixers have heads of their own layout"),
    "zamba2": StockType(SSD, state_field=_MAMBA_N),
    "zaya": StockType(
        "(D,): delayed value of the last token",
        shares=False,
        no_expansion="its state is one delayed value, nothing that could grow",
    ),
}

REFUSED = {
    "glm5_next_text": "its attention selects keys with an index that is kept in a cache of its own kind",
    "inkling_text": "it has no recurrent layers, only attention with four short convolutions around each",
    "inkling2_text": "it has no recurrent layers, only attention with short convolutions around each",
    "inkling2_loop_text": "it has no recurrent layers, only attention with short convolutions around each",
    "qwen4_exp_text": "its state holds token ids, which are no value that a gradient or noise could change",
    "recurrent_gemma": "it keeps its states as attributes of its modules, where one call overwrites another's",
    "rwkv": "RWKV-4 is superseded, and Transformers' class divides its weights in place when it evaluates, which "
    "checkpoints and adapters then hold: take RWKV-5, 6 or 7, which are families of this package",
}
SUPERSEDED = {"rwkv"}  # not evaluated without states either


def stock_type_of(model: StatefulModel) -> StockType:
    """What is special about the type of a model."""
    return SUPPORTED[model.config.get_text_config(decoder=True).model_type]


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
