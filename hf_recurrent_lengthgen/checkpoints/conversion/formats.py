"""Layouts of checkpoints: how to recognize each, and how to convert its config and names to ours and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any, ClassVar, Literal, get_origin

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import Rename
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.configuration_mamba import ReferenceLayersConfigMixin
from hf_recurrent_lengthgen.models.configuration_stateful import StatefulConfigMixin

SOURCE_CONFIG = "source_config"
"""Entry of our config.json with the format and config of the source, for the way back."""

Settings = dict[str, Any]

OUR_FIELDS = {
    *(name for name, kind in get_annotations(StatefulConfigMixin).items() if get_origin(kind) is not ClassVar),
    *(name for name, kind in get_annotations(ReferenceLayersConfigMixin).items() if get_origin(kind) is not ClassVar),
    *("_name_or_path", "auto_map", "layer_num_heads", "layer_state_sizes", SOURCE_CONFIG),
}
"""Fields of our config that no other layout has; `exported_config` checks that they have no effect."""

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
    """Turn errors of config classes about values of a wrong type or size into a `ValueError`."""
    try:
        yield
    except (StrictDataclassError, TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{where} holds a value that no model can have ({lines[-1].strip()}): correct it.") from error


@dataclass(frozen=True)
class Format:
    """One layout.

    Args:
        name: Value of `--format`, such as "mamba-ssm".
        title: Name in texts.
        container: The kind of files that its own library reads.
        recognizes: Whether a checkpoint has this layout, from its config.json (None without one) and the names, shapes
            and dtypes of its weights.
        to_config: Our config, from the same; a `ValueError` names what we cannot represent. Call `config_of` instead.
        from_config: Its config.json from our config; None for layouts without one. A `ValueError` names what it cannot
            represent. Call `exported_config` instead. None if the layout is only read.
        renames: The map of all our tensors, from our config; "{layer}" stands for each layer.
        tied_head: Name of its output head, which may be missing with tied embeddings.
        unused: Names of tensors that its files may hold and its code never reads; they are left out.
        writes_tied_head: Whether its library needs the head in the file nevertheless.
        keeps_config: Whether our config.json keeps its config, because ours cannot express all entries.
        weights_file: Name of the weights in an exported folder, for `container` "torch".
        tokenizer: The tokenizer of its official checkpoints, if these have none; else empty.
        tokenizer_ids: The `vocab_size` of models with that tokenizer; None for any.
        assumed: Settings of our config that its files lack, with their assumed values; `--set` overrides them.
        older: For layouts that libraries wrote in several ways: the map for these tensors, from their names; None if
            `renames` fits.
        from_shapes: Fields of our config that follow from the shapes of the weights.
        fixed: Fields of our config with a fixed value in its code, for families that have them.
    """

    name: str
    title: str
    container: Literal["safetensors", "torch"]
    recognizes: Callable[[Settings | None, Mapping[str, Meta]], bool]
    to_config: Callable[[Settings | None, Mapping[str, Meta]], PreTrainedConfig]
    from_config: Callable[[Any], Settings | None] | None
    renames: Callable[[Any], Sequence[Rename]]
    tied_head: str = "lm_head.weight"
    unused: tuple[str, ...] = ()
    writes_tied_head: bool = False
    keeps_config: bool = True
    weights_file: str = "pytorch_model.bin"
    tokenizer: str = ""
    tokenizer_ids: int | None = None
    assumed: Callable[[Any], Settings] = lambda config: {}
    older: Callable[[Any, Mapping[str, Meta]], Sequence[Rename] | None] = lambda config, metas: None
    from_shapes: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def families(self) -> tuple[str, ...]:
        """Our model types that name this format in their `layouts`, and that it can be written from."""
        if self.from_config is None:
            return ()
        return tuple(name for name, model in FAMILIES.items() if self.name in model.config_class.layouts)

    def config_of(self, settings: Settings | None, metas: Mapping[str, Meta]) -> Any:
        with config_errors():
            return self.to_config(settings, metas)


def with_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Our config with other values, which its `SOURCE_CONFIG` records, because the source does not have them.

    Raises:
        ValueError: for names that the config lacks, and values that no model can have.
    """
    if not overrides:
        return config
    fields = config.to_dict()
    possible = fields.keys() - {*OUR_FIELDS, "architectures", "model_type", "transformers_version", "dtype"}
    if unknown := sorted(set(overrides) - possible):
        raise ValueError(
            f"{', '.join(unknown)} is no setting of {config.display_name} that can be given: choose from "
            f"{', '.join(sorted(possible))}."
        )
    with config_errors(f"What was set ({', '.join(f'{name}={value!r}' for name, value in overrides.items())})"):
        changed = type(config).from_dict(fields | dict(overrides))
        source = getattr(config, SOURCE_CONFIG, None) or {}
        setattr(changed, SOURCE_CONFIG, source | {"set": dict(overrides)})
    return changed


def user_overrides(config: Any) -> Settings:
    """The `overrides` of a conversion, as `with_overrides` recorded them."""
    return dict((getattr(config, SOURCE_CONFIG, None) or {}).get("set") or {})


def blank_model(config: PreTrainedConfig) -> Any:
    """Our model of a config on the meta device, without values."""
    with config_errors(), torch.device("meta"), no_init_weights():
        return FAMILIES[config.model_type](config)


def plain(value: Any) -> Any:
    """A tuple as a list, as in JSON; other values unchanged."""
    return list(value) if isinstance(value, tuple) else value


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a checkpoint of this package by name, in order, without a tied head."""
    model = blank_model(config)
    tied = model._tied_weights_keys if config.tie_word_embeddings else {}
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def tied_names(config: Any) -> tuple[str, str] | None:
    """Our names of head and embeddings if they are tied; else None."""
    tied: dict[str, str] = FAMILIES[config.model_type]._tied_weights_keys or {}
    return next(iter(tied.items())) if config.tie_word_embeddings and tied else None


def same_names(config: PreTrainedConfig, exceptions: Mapping[str, str] | None = None) -> list[Rename]:
    """A map of all our tensors to equal names, except for `exceptions`, from our names to theirs."""
    return [Rename((exceptions or {}).get(name, name), name) for name in expected_shapes(config)]


def check_settings(
    settings: Settings | None, known: Iterable[str], where: str, needed: Mapping[str, Sequence[Any]] | None = None
) -> Settings:
    """The settings of a config.json; raises a `ValueError` that names unknown ones, and those not as `needed`."""
    assert settings is not None  # `Format.recognizes` has seen them
    wrong = {name: "unknown" for name in sorted(settings.keys() - set(known))}
    for name, possible in (needed or {}).items():
        if name in settings and settings[name] not in possible:
            wrong[name] = f"must be {' or '.join(map(repr, possible))}"
    if wrong:
        values = ", ".join(f"{name} {settings[name]!r} ({why})" for name, why in wrong.items())
        raise ValueError(f"{where} has settings that cannot be converted: {values}.")
    return settings
