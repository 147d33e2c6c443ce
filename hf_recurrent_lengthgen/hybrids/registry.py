"""Which recurrent models of Transformers `stateful` takes, and why it refuses the others.

Models are known by the `model_type` of their text configuration. A model type of neither table is taken if
`verify_stateful` finds that its states can be carried.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """What is special about a supported model type.

    Attributes:
        state: What the recurrent part of a layer holds, in the model's own layout; B is left out.
        model_dtype: Whether its mixers want the recurrent state in the dtype of the model: a bfloat16 model then
            rounds it between calls, as it does without us.
        mamba1: Whether its mixers drop a given state and need our scan (`mixers.py`).
        no_adapters: Ends of names of linear layers that adapters of PEFT do not go on: PEFT refuses them by the model
            type, or the mixers read the weight past the adapter.
        no_noise: Why noise cannot take the place of its recurrent part.
    """

    state: str
    model_dtype: bool = False
    mamba1: bool = False
    no_adapters: tuple[str, ...] = ()
    no_noise: str | None = None


SSD = "(H, P, N)"
SELECTIVE = "(D, N)"
DELTA = "(H, N, P)"
NONE = "none, convolution only"

SUPPORTED = {
    "bailing_hybrid": Family(DELTA),
    "bamba": Family(SSD),
    "falcon_h1": Family(SSD, no_adapters=("out_proj",)),
    "falcon_mamba": Family(SELECTIVE, mamba1=True, no_adapters=("out_proj", "dt_proj")),
    "granitemoehybrid": Family(SSD),
    "jamba": Family(SELECTIVE, mamba1=True, no_adapters=("dt_proj",)),
    "kimi_linear": Family(DELTA),
    "lfm2": Family(NONE),
    "lfm2_moe": Family(NONE),
    "lfm3": Family(NONE),
    "mamba": Family(SELECTIVE, mamba1=True, no_adapters=("out_proj", "dt_proj")),
    "mamba2": Family(SSD, no_adapters=("out_proj",)),
    "minimax": Family(DELTA, model_dtype=True),
    "nemotron_h": Family(SSD, no_adapters=("out_proj",)),
    "olmo_hybrid": Family(DELTA),
    "qwen3_5_moe_text": Family(DELTA),
    "qwen3_5_text": Family(DELTA),
    "qwen3_next": Family(DELTA),
    "rwkv": Family("(3, D): numerator, denominator, exponent", no_noise="a denominator from a Gaussian can be zero"),
    "xlstm": Family(
        "(H, N P + N + 1): memory, normalizer, stabilizer",
        no_noise="memory, normalizer and stabilizer are of different kinds, which no one Gaussian describes",
    ),
    "zamba": Family(SSD, mamba1=True),
    "zamba2": Family(SSD),
    "zaya": Family("(D,): delayed value of the last token", model_dtype=True),
}

_DROPS = "its Mamba-1 mixers ignore the given recurrent state when they read more than one token"
REFUSED = {
    "glm5_next_text": "its attention selects keys with an index that is kept in a cache of its own kind",
    "inkling_text": "it has no recurrent layers, only attention with four short convolutions around each",
    "inkling2_text": "it has no recurrent layers, only attention with short convolutions around each",
    "qwen4_exp_text": "its state holds token ids, which are no value that a gradient or noise could change",
    "recurrent_gemma": "it keeps its states as attributes of its modules, where one call overwrites another's",
}
