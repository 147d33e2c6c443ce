"""Layouts of checkpoints: how each is recognized, and how its config and names become ours and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any, ClassVar, Literal, get_origin

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from hf_recurrent_lengthgen.conversion.key_maps import Rename
from hf_recurrent_lengthgen.conversion.tensor_files import Meta
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.configuration_reference import ReferenceLayersConfigMixin
from hf_recurrent_lengthgen.models.configuration_stateful import StatefulConfigMixin

SOURCE_CONFIG = "source_config"
"""Entry of our config.json: the format and the config that a checkpoint was converted from, for the way back."""

Settings = dict[str, Any]

OUR_FIELDS = {
    *(name for name, kind in get_annotations(StatefulConfigMixin).items() if get_origin(kind) is not ClassVar),
    *(name for name, kind in get_annotations(ReferenceLayersConfigMixin).items() if get_origin(kind) is not ClassVar),
    *("_name_or_path", "auto_map", "layer_num_heads", "layer_state_sizes", SOURCE_CONFIG),
}
"""Fields of our config that no other layout has; the way there and back checks that they are neutral."""

GENERIC_SETTINGS = {
    *PreTrainedConfig().to_dict(),
    *GenerationConfig().to_dict(),  # up to version 4
    *("add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "prefix", "pruned_heads"),
    *("sep_token_id", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class"),
    *("torchscript", "use_bfloat16"),
    *("_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "model_type"),
    *("pad_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"),
}
"""Entries of any config.json of Transformers."""


@contextmanager
def config_errors(where: str = "config.json") -> Iterator[None]:
    """Make a `ValueError` of what config classes and sizes of models say to values of a wrong type or size."""
    try:
        yield
    except (StrictDataclassError, TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{where} holds a value that no model can have ({told[-1].strip()}): correct it.") from error


@dataclass(frozen=True)
class Format:
    """One layout.

    Args:
        name: For `--format`: "mamba-ssm".
        title: For people.
        container: The kind of files that its own library reads.
        recognizes: From its config.json (None without one) and the names, shapes and dtypes of the weights.
        to_config: From the same, our config. ValueError for what we cannot represent, by name. `config_of` is to be
            called instead.
        from_config: From our config, its config.json; None for layouts without one. ValueError for what it cannot
            represent. `exported_config` is to be called instead.
        renames: From our config, the map of all our tensors; "{layer}" for each layer is allowed.
        tied_head: Name of its output head, which with tied embeddings may be missing.
        writes_tied_head: Whether its library wants the head in the file all the same.
        keeps_config: Whether our config.json keeps its config, as our config cannot express all entries of it.
        weights_file: Name in an exported folder, for `container` "torch".
        tokenizer: The tokenizer of its official checkpoints, where those carry none; empty otherwise.
        older: For layouts that earlier versions of a library wrote otherwise: the map for the tensors that are there,
            by their names; None where they are as `renames` says.
        code: Repositories with the Python files that its checkpoints need, where no library has their class.
        from_shapes: Fields of our config that this layout leaves to the shapes of the weights.
        fixed: Fields of our config, of families that have them, that its code fixes.
    """

    name: str
    title: str
    container: Literal["safetensors", "torch"]
    recognizes: Callable[[Settings | None, Mapping[str, Meta]], bool]
    to_config: Callable[[Settings | None, Mapping[str, Meta]], PreTrainedConfig]
    from_config: Callable[[Any], Settings | None]
    renames: Callable[[Any], Sequence[Rename]]
    tied_head: str = "lm_head.weight"
    writes_tied_head: bool = False
    keeps_config: bool = True
    weights_file: str = "pytorch_model.bin"
    tokenizer: str = ""
    older: Callable[[Any, Mapping[str, Meta]], Sequence[Rename] | None] = lambda config, metas: None
    code: str = ""
    from_shapes: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def families(self) -> tuple[str, ...]:
        """Our model types that name this format in their `layouts`."""
        return tuple(name for name, model in FAMILIES.items() if self.name in model.config_class.layouts)

    def config_of(self, settings: Settings | None, metas: Mapping[str, Meta]) -> Any:
        """Our config of theirs; a `ValueError` for what we cannot represent."""
        with config_errors():
            config = self.to_config(settings, metas)
            layers: Any = getattr(config, "num_hidden_layers", None)
            if metas and layers > len(metas):
                raise ValueError(
                    f"config.json says that there are {layers} layers, but the weights are only {len(metas)} tensors: "
                    "correct it, or give the weights that belong to it."
                )
        return config

    def renames_of(self, config: Any, metas: Mapping[str, Meta]) -> Sequence[Rename]:
        """The map for a checkpoint that holds these tensors; "{layer}" is allowed."""
        older = self.older(config, metas)
        return self.renames(config) if older is None else older


def blank_model(config: PreTrainedConfig) -> Any:
    """Our model of a config on the meta device, without values."""
    with config_errors(), torch.device("meta"), no_init_weights():
        return FAMILIES[config.model_type](config)


def plain(value: Any) -> Any:
    """A tuple as the list that JSON makes of it; others as they are."""
    return list(value) if isinstance(value, tuple) else value


def is_tied(config: Any) -> bool:
    """Whether the head is the embeddings."""
    return bool(config.tie_word_embeddings)


def expected_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a checkpoint of ours by name, in order; a tied head is not in there."""
    model = blank_model(config)
    tied = model._tied_weights_keys if is_tied(config) else {}
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def tied_names(config: PreTrainedConfig) -> tuple[str, str] | None:
    """Our names of head and embeddings if they are one; None if not."""
    tied: dict[str, str] = FAMILIES[config.model_type]._tied_weights_keys or {}
    return next(iter(tied.items())) if is_tied(config) and tied else None


def same_names(config: PreTrainedConfig, others: Mapping[str, str] | None = None) -> list[Rename]:
    """A map of all our tensors to equal names, but for `others`, from ours to theirs."""
    return [Rename((others or {}).get(name, name), name) for name in expected_shapes(config)]


def check_settings(settings: Settings | None, known: Iterable[str], where: str) -> Settings:
    """The settings, all of them known. Raises a `ValueError` naming those that are not."""
    if settings is None:
        raise ValueError(f"{where} needs a config.json beside the weights.")
    if unknown := sorted(settings.keys() - set(known)):
        told = ", ".join(f"{name} ({settings[name]!r})" for name in unknown)
        raise ValueError(f"{where} has the settings {told}, which this version cannot convert.")
    return settings
