"""Models of Transformers with settings that stock classes do not read, and the classes that load them.

Sizes of single layers stand where Transformers keeps settings of single layers, in `per_layer_config` of the
configuration: `{"0": {"mamba_d_state": 64}}`. Stock classes of hybrids do not read them for their mixers and refuse
such a configuration (`AmbiguousGlobalPerLayerAttributeError`), so no checkpoint is loaded wrong without this package.

Learned states are further weights, which stock classes leave out with a warning; `stateful` then refuses the model.
"""

import functools
from typing import Any

from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.models.state_learned import LearnedStates, recorded


def sizes_of_layers(config: Any) -> dict[int, dict[str, Any]]:
    """The settings of single layers in a configuration, by layer; none in Transformers that have no such field."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {int(layer): settings for layer, settings in config.to_dict()["per_layer_config"].items()}


def with_size(config: Any, field: str, sizes: dict[int, int]) -> None:
    """Set a field of some layers of a configuration, in place.

    Raises:
        ValueError: if the installed Transformers has no settings of single layers.
    """
    if not hasattr(PreTrainedConfig, "per_layer_config"):
        raise ValueError(
            "States of different sizes need a Transformers whose configurations have per_layer_config: install a "
            'newer one, or give layers="all".'
        )
    known = sizes_of_layers(config)
    config.per_layer_config = known | {layer: known.get(layer, {}) | {field: size} for layer, size in sizes.items()}


def says_more(config: Any) -> bool:
    """Whether a configuration has sizes of single layers or learned states."""
    return bool(sizes_of_layers(config) or recorded(config)["names"])


@functools.cache
def described_class(stock: Any) -> Any:
    """A class that makes models of a stock class with all settings of their configuration."""

    def __init__(self: Any, config: Any, *positional: Any, **keyword: Any) -> None:
        sizes = sizes_of_layers(config)
        if sizes:
            config.per_layer_config = None  # for all that is the same in all layers
        stock.__init__(self, config, *positional, **keyword)
        if sizes:
            config.per_layer_config = sizes
        for name, mixer in list(self.named_modules()):
            layer = getattr(mixer, "layer_idx", None)
            if layer in sizes and hasattr(mixer, "A_log"):
                self.set_submodule(name, type(mixer)(config.per_layer_config[layer], layer_idx=layer))
        if recorded(config)["names"]:
            self.base_model.learned_states = LearnedStates(config)
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "learned_states"}
        self.__class__ = stock

    names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (stock,), names | {"__init__": __init__})


def new_model(stock: Any, config: Any) -> Any:
    """A model of a stock class, with all settings of its configuration."""
    return described_class(stock)(config) if says_more(config) else stock(config)


def stock_class(model: Any) -> Any:
    """The class of a model without what `stateful` adds to it."""
    return getattr(model, "stock_class", type(model))


def loading_class(model: Any) -> Any:
    """The class with which a checkpoint of the model is loaded."""
    special = hasattr(model, "stock_class") and says_more(model.config)
    return described_class(stock_class(model)) if special else type(model)
