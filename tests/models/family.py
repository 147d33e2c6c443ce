"""Facts on a family of models; each family's own entry stands in `family_<name>.py` or families.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from hf_recurrent_lengthgen.models.state_value import RecurrentState

VOCABULARY = 29
# what every tiny configuration has
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Family(NamedTuple):
    """What the tests require of a family."""

    name: str
    causal_lm_class: Any
    fields: dict[str, Any]  # of a tiny configuration, besides TINY
    variants: dict[str, dict[str, Any]]  # changes of the configuration worth a run of their own
    loop: Callable[[Any, Tensor, RecurrentState], tuple[Tensor, RecurrentState]]
    linear_modules: set[str]  # every module of a layer an adapter may sit on, by the end of its name
    kernel: tuple[str, str]  # file and name of what is falsy where the GPU kernels are missing
    autocast_error: float = 0.05  # of bfloat16 autocast, relative
    conv_module: str = ""  # a convolution that an adapter must not sit on

    @property
    def config_class(self) -> Any:
        return self.causal_lm_class.config_class

    def config(self, **changes: Any) -> Any:
        """A tiny configuration."""
        return self.config_class(**TINY | self.fields | changes)
