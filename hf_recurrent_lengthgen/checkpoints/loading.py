"""Load models of all families and their tokenizers, from folders and names on the Hub."""

import inspect
import os
import pickle
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_recurrent_lengthgen.checkpoints.adapters import (
    Unmergeable,
    base_of_adapter,
    base_of_learned_state,
    base_of_part,
    holds_adapter,
    holds_learned_state,
    merged,
    refuse_adapter,
    with_adapter,
)
from hf_recurrent_lengthgen.checkpoints.tensor_files import stored_tensors
from hf_recurrent_lengthgen.hub_access import is_out_of_reach
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.hybrids.layer_sizes import described_class, says_more
from hf_recurrent_lengthgen.hybrids.registry import REFUSED, SUPERSEDED, SUPPORTED
from hf_recurrent_lengthgen.hybrids.windows import set_window
from hf_recurrent_lengthgen.models import FAMILIES, STATEFUL_CLASSES, register_family
from hf_recurrent_lengthgen.models.configuration_stateful import CODE_FORMAT_VERSION
from hf_recurrent_lengthgen.models.modeling_protocols import base_of

logger = logging.get_logger(__name__)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class NoInitialState(ValueError):
    """A checkpoint of a type that accepts no initial state."""


def check_name(name: str) -> None:
    """Raise a `ValueError` for a name that is no checkpoint folder and cannot be a name on the Hub."""
    path = Path(name)
    if path.is_dir():
        return
    local = path.exists() or re.match(r"[./~]|.*/$", str(name)) or len(path.parts) > 2
    if local or (path.parent != Path() and path.parent.is_dir()):
        raise ValueError(f"{name} is no folder here: give a checkpoint folder, or a name on the Hub (owner/name).")
    if is_out_of_reach("models", str(name)):
        raise ValueError(
            f"{name} is no folder here and not in the cache of the Hub, and {constants.ENDPOINT} cannot be reached: "
            "give a checkpoint folder, or connect to the network."
        )


def _check_weights(name: str, model: Any) -> None:
    """Raise a `ValueError` for what Transformers changes silently: integers that become weights, an untied head."""
    parameters = dict(model.named_parameters())  # buffers may be masks
    metas = {key: meta for path in Path(name).glob("model*.safetensors") for key, meta in stored_tensors(path).items()}
    integers = {key: meta.dtype for key, meta in metas.items() if not meta.dtype.is_floating_point}
    if cast := sorted(parameters.keys() & integers.keys()):
        raise ValueError(f"{name} holds {cast[0]} as {integers[cast[0]]}, but weights must be floating-point numbers.")
    ties = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    head = model.get_output_embeddings() if ties and getattr(model, "_tied_weights_keys", None) else None
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"The config of {name} ties head and embeddings, but its files hold another head: set tie_word_embeddings "
            "in config.json to false to use the head, or leave the head out of the files."
        )


def differing_code(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the Python files in a checkpoint folder that differ from the installed package, sorted."""
    installed = Path(inspect.getfile(register_family)).parent

    def differs(path: Path) -> bool:
        if path.name == "extras.py":  # it says which further modules a checkpoint needs
            return re.fullmatch(r"(from \.\w+ import \*\n)*", path.read_text(errors="replace")) is None
        source = installed / path.name
        return not source.is_file() or source.read_bytes() != path.read_bytes()

    return sorted(path.name for path in Path(folder).glob("*.py") if differs(path))


def _warn_of_differing_code(name: str, settings: dict[str, Any]) -> None:
    brings_code = settings.get("model_type") in FAMILIES and settings.get("auto_map")
    if brings_code and (names := differing_code(name)):
        version = settings.get("code_format_version", CODE_FORMAT_VERSION)
        logger.warning(
            f"{name} brings code that differs from the installed hf_recurrent_lengthgen: {', '.join(names)} (code "
            f"format version {version}, installed {CODE_FORMAT_VERSION}). The installed code is used; lengthgen "
            "verify checks whether both give the same results."
        )


def load_model(
    name: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    *,
    merge: bool = False,
    base: str | None = None,
    needs_states: bool = True,
    attention_window: int | str | None = None,
) -> Any:
    """Load a language model of any family that accepts an initial state and returns the final state.

    Checkpoints of this package load with their class, those of Transformers and fla into our class with the same
    parameter names. Hybrids and other recurrent models of Transformers are wrapped by `stateful`. The folder of an
    adapter (LoRA of PEFT) loads as a `PeftModel` on its base, in evaluation mode; a trainer continues to train it. The
    folder of a learned state loads as its base, with the state active.

    On the CPU, weights in the dtype of their file are views of it, as Transformers loads them, which costs no memory.
    Replace such a file as `save_pretrained` does; do not write into it while the model is in use.

    Args:
        name: Checkpoint folder, adapter folder, or a name on the Hub.
        trust_remote_code: Whether code of the checkpoint may run, if this package does not support its model type.
        dtype: Dtype of the weights. The small steps of post-training vanish in bfloat16 weights; use autocast instead
            (`bf16=True` of the trainers).
        merge: Merge an adapter into its base, and return the model without PEFT; an adapter on a weight that layers
            share is not merged, with a warning.
        base: The base of an adapter or learned state, if it is not the one that its config names.
        needs_states: Whether an architecture that accepts no initial state (Llama, GPT-NeoX, code of a checkpoint) is
            refused; if not, it loads as in Transformers.
        attention_window: For hybrids, as in `stateful`.

    Raises:
        ValueError: for a folder without a checkpoint, an architecture that accepts no initial state, damaged weights,
            and weights that are missing, left over or do not have the shapes of the config; for an adapter that is a
            pickle, does not fit its base, or whose base is missing or has changed.
    """
    if holds_adapter(name):
        base = base_of_adapter(name) if base is None else base
        refuse_adapter(base)
        model = with_adapter(load_model(base, trust_remote_code, dtype, needs_states=needs_states), name, base)
        if holds_learned_state(name):  # trained beside the adapter
            model.get_base_model().load_learned_state(name)
        if merge:
            try:
                model = merged(model)
            except Unmergeable as error:
                logger.warning(f"{error} {name} is evaluated with its adapter unmerged, which gives the same results.")
    elif holds_learned_state(name):
        if (Path(name) / "config.json").exists():
            raise ValueError(f"{name} holds a checkpoint and a learned state: move the files of one of them.")
        base = base_of_learned_state(name) if base is None else base
        model = load_model(base, trust_remote_code, dtype, merge=merge, needs_states=needs_states)
        base_model = base_of(model)
        if not hasattr(base_model, "load_learned_state"):
            name_of_class = type(base_model).__name__
            raise ValueError(f"{base} is a {name_of_class}, which accepts no initial state: give another base.")
        base_model.load_learned_state(name)
    elif base is not None:
        raise ValueError(f"{name} holds no adapter, so it has no base: leave {base} out.")
    else:
        model = _load_checkpoint(name, trust_remote_code, dtype, needs_states)
    return with_window(model, attention_window)


def with_window(model: Any, attention_window: int | str | None) -> Any:
    """A model with this window of attention, as in `stateful`; None for its own."""
    if attention_window is not None:
        set_window(base_of(model), attention_window)
    return model


def load_language_model(
    name: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    attention_window: int | str | None = None,
) -> Any:
    """Load any causal language model for evaluation, as `load_model` with `needs_states=False` and `merge=True`."""
    return with_window(load_model(name, trust_remote_code, dtype, merge=True, needs_states=False), attention_window)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint or of an adapter's base; "bytes" is that of ByT5, which needs no files.

    Raises:
        ValueError: if there is no tokenizer.
    """
    if name == "bytes":
        return ByT5Tokenizer()
    check_name(name)
    patterns = ("*token*", "*vocab*", "*.model", "merges.txt")
    empty = Path(name).is_dir() and not any(file for pattern in patterns for file in Path(name).glob(pattern))
    if empty and (base := base_of_part(name)) is not None:
        return load_tokenizer(base, trust_remote_code)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        # without files, Transformers guesses a class from the model type, which then has special tokens only
        reason = "" if {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens} else " (special tokens alone)"
    except (OSError, ValueError, ImportError) as error:
        reason = "" if empty else f" ({error})"  # of Transformers, which is long for a folder without tokenizer
    if reason or empty:
        advice = "give --tokenizer FOLDER, or --tokenizer bytes if it reads bytes (lengthgen harness: tokenizer=...)"
        raise ValueError(f"{name} holds no tokenizer{reason}: {advice}.")
    return tokenizer


def _convert_advice(name: str) -> str:
    command = shlex.join(["lengthgen", "convert", name, "--output", "FOLDER"])
    return f"convert it to a checkpoint of this package, `{command}`."


def _load_checkpoint(name: str, trust_remote_code: bool, dtype: torch.dtype, needs_states: bool) -> Any:
    _check_place(name)
    settings, config = read_config(name, trust_remote_code)
    model_type = settings.get("model_type")
    if model_type not in STATEFUL_CLASSES:  # a model of images and text is read as its language model
        config = config.get_text_config(decoder=True)
        model_type = config.model_type
    loading: dict[str, Any] = {"dtype": dtype}
    loader: Any = AutoModelForCausalLM
    if model_type in STATEFUL_CLASSES:
        loader, loading["config"] = STATEFUL_CLASSES[model_type], config
    elif str(model_type).startswith("stateful_"):
        loading["trust_remote_code"] = trust_remote_code
        _warn_of_differing_code(name, settings)
    elif model_type not in SUPPORTED:
        if needs_states or model_type in SUPERSEDED:
            reason = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
            raise NoInitialState(
                f"{name} is of type {model_type!r}, which accepts no initial state{reason}. Types that do: those of "
                f"this package, {', '.join(sorted({*STATEFUL_CLASSES, *SUPPORTED}))}."
            )
        loading["trust_remote_code"] = trust_remote_code
    elif says_more(config):
        loader = described_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model, report = _read_weights(name, loader, loading)
    problems = {what: sorted(map(str, report[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}
    if any(problems.values()):
        words = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        foreign = model_type in STATEFUL_CLASSES
        advice = f" If they have the names of another library, {_convert_advice(name)}" if foreign else ""
        raise ValueError(f"The weights in {name} do not fit its config.json, {words}.{advice}")
    if "quantization_config" not in settings:
        _check_weights(name, model)
    return stateful(model) if model_type in SUPPORTED and model_type not in STATEFUL_CLASSES else model


def _check_place(name: str) -> None:
    """Raise a `ValueError` unless `name` is a checkpoint folder or a name on the Hub."""
    check_name(name)
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        below = ", ".join(sorted(str(file.parent) for file in Path(name).glob("*/adapter_config.json")))
        weights = [file for kind in ("safetensors", "bin", "pth", "pt") for file in Path(name).glob(f"*.{kind}")]
        advice = f"so {_convert_advice(name)}" if weights else "and no weights: give the folder of a checkpoint."
        advice = f"but folders of adapters: give one of them, {below}." if below else advice
        raise ValueError(f"{name} holds no config.json, {advice}")


def read_settings(name: str) -> dict[str, Any]:
    """The content of config.json of a folder or a name on the Hub; a `ValueError` if there is none."""
    try:
        return PreTrainedConfig.get_config_dict(name)[0]
    except OSError as error:
        raise ValueError(f"{name} is no checkpoint folder here, and no model on the Hub: {error}") from error


def read_config(name: str, trust_remote_code: bool) -> tuple[dict[str, Any], PreTrainedConfig]:
    """The settings of config.json, and the config of the class that `load_model` would use."""
    settings = read_settings(name)
    model_type = settings.get("model_type")
    if model_type is None and {"d_model", "n_layer"} <= settings.keys():
        raise ValueError(f"{name} has the names of mamba-ssm in config and weights: {_convert_advice(name)}")
    if model_type in STATEFUL_CLASSES:
        return settings, STATEFUL_CLASSES[model_type].config_class.from_dict(settings)
    return settings, AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def _read_weights(name: str, loader: Any, loading: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and the weights that are missing, left over or of other shapes."""
    try:
        with quiet_transformers():  # its warning about weights is an error here
            return loader.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **loading)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, TypeError, OSError) as error:
        pickled = any(Path(name).glob("pytorch_model*.bin"))
        if isinstance(error, RuntimeError | TypeError) and not pickled:
            raise
        why = "pickles that are damaged or would run code; if you trust them, convert them to safetensors"
        raise ValueError(
            f"The weights in {name} cannot be read ({str(error).partition(chr(10))[0]}): they are "
            f"{why if pickled else 'missing or are damaged, copy or download them again'}."
        ) from error
