"""Convert a checkpoint of another layout into one of this package, tensor by tensor."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from hf_recurrent_lengthgen.checkpoints.adapters import refuse_adapter
from hf_recurrent_lengthgen.checkpoints.conversion.formats import (
    SOURCE_CONFIG,
    Format,
    Settings,
    blank_model,
    expected_shapes,
    tied_names,
    with_overrides,
)
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import Rename, expand, to_ours
from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, new_folder
from hf_recurrent_lengthgen.checkpoints.conversion.registry import detect, named_format
from hf_recurrent_lengthgen.checkpoints.conversion.tensor_writing import Entry, write_safetensors
from hf_recurrent_lengthgen.checkpoints.conversion.tokenizer_files import checked_tokenizer, copy_tokenizer
from hf_recurrent_lengthgen.checkpoints.private_text import portable
from hf_recurrent_lengthgen.checkpoints.records import Lineage, Step, file_digest, read_json_object, write_lineage
from hf_recurrent_lengthgen.checkpoints.records import Source as Origin
from hf_recurrent_lengthgen.checkpoints.sources import Source, license_of, locate
from hf_recurrent_lengthgen.checkpoints.tensor_files import FLOATS, TensorFiles, same_bits
from hf_recurrent_lengthgen.models import family_config
from hf_recurrent_lengthgen.versions import installed_versions

TRAINING_LENGTHS = {
    # the official Mamba and Mamba-2 models on the Pile (arXiv:2507.02782, Figure 1)
    **{f"state-spaces/mamba-{size}": 2048 for size in ("130m", "370m", "790m", "1.4b", "2.8b")},
    **{f"state-spaces/mamba-{size}-hf": 2048 for size in ("130m", "370m", "790m", "1.4b", "2.8b")},
    **{f"state-spaces/mamba2-{size}": 2048 for size in ("130m", "370m", "780m", "1.3b", "2.7b")},
    **{f"AntonV/mamba2-{size}-hf": 2048 for size in ("130m", "370m", "780m", "1.3b", "2.7b")},
}
"""Training lengths of official checkpoints, in tokens, as far as papers state them."""


def convert_checkpoint(
    source: str,
    output: Path,
    *,
    revision: str | None = None,
    format: str | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    training_length: int | None = None,
    max_shard_size: str | int = "5GB",
    overrides: Mapping[str, Any] | None = None,
    command: str = "",
) -> Path:
    """Write a checkpoint of this package from one of another layout, completely or not at all.

    Args:
        source: Checkpoint folder, one .pth file, or owner/name (or owner/name/file.pth) on the Hub.
        output: Folder for the result, new or empty.
        revision: Branch, tag or commit on the Hub; the commit is recorded.
        format: Name of the layout; None to detect it.
        dtype: Dtype of all weights, such as "bfloat16"; None keeps that of each tensor.
        tokenizer: A tokenizer, or the folder or Hub name to copy it from; None for that of the source, if any.
        training_length: Tokens per training sequence; None for that of the source, if known.
        max_shard_size: As in Transformers' `save_pretrained`.
        overrides: Settings of our config that the source lacks or has wrong, such as `head_size_divisor` of a .pth
            file of RWKV-5.
        command: Shell command, for the lineage file.

    Raises:
        ValueError: for a source that does not exist, is damaged, or has an unknown layout or architecture; weights
            that do not fit their config (all are listed); a tokenizer of another model; overrides of settings that the
            family lacks.
    """
    check_new(output := Path(output))
    place = locate(source, revision)
    settings = read_settings(place)
    files = TensorFiles(place.path)
    layout = detect(settings, files.metas, source) if format is None else named_format(format)
    if not layout.recognizes(settings, files.metas):
        raise ValueError(f"{source} is no checkpoint of {layout.title}: leave out the format, so that it is detected.")
    config = layout.config_of(settings, files.metas)
    if layout.keeps_config:
        setattr(config, SOURCE_CONFIG, {"format": layout.name, "config": settings})
    config = with_overrides(config, overrides or {})
    known_length = TRAINING_LENGTHS.get(place.name if place.on_hub else "")
    config.training_length = training_length or known_length or config.training_length
    wanted = FLOATS[dtype] if isinstance(dtype, str) else dtype
    entries = _in_dtype(our_entries(layout, config, files, source), config, wanted)
    digests = {path.name: file_digest(path) for path in files.paths}
    origin = Origin(
        place.name, place.on_hub, place.revision, format=layout.name, license=license_of(place.folder), files=digests
    )
    named = None if tokenizer is None else type(tokenizer).__name__
    if isinstance(tokenizer, str):
        named = portable(tokenizer)
    step = Step("convert", f"convert from {layout.title}", command, installed_versions(), tokenizer=named)
    lineage = Lineage(origin).then(step)
    with new_folder(output) as folder:
        write_safetensors(folder, entries, max_shard_size)
        files.close()
        write_code(folder, config)
        _add_tokenizer(folder, place, tokenizer, config)
        write_config(folder, config)
        if (generation := place.folder / "generation_config.json").is_file():
            GenerationConfig.from_dict(read_json_object(generation)).save_pretrained(folder)
        write_lineage(folder, lineage)
    return output


def read_settings(source: Source) -> Settings | None:
    """config.json of a checkpoint; None if it has none."""
    refuse_adapter(source.folder)
    if not (source.folder / "config.json").is_file():
        return None
    settings: Settings = PreTrainedConfig.get_config_dict(source.folder)[0]
    quantized = settings.get("quantization_config")
    if quantized or not isinstance(settings.get("model_type", ""), str | None):
        wrong = "quantized weights" if quantized else f"the model_type {settings['model_type']!r}, not a name"
        raise ValueError(f"{source.folder} holds {wrong}: give a checkpoint in full precision, with a sound config.")
    return settings


def write_code(folder: Path, config: Any) -> None:
    """Write the code of a checkpoint of this package, as `save_pretrained` does."""
    custom_object_save(blank_model(config), folder)


def add_code(folder: Path) -> None:
    """Write the code of a checkpoint of this package that lacks it, such as those of `model_cards/`."""
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    config_class = family_config(str(settings.get("model_type")))
    if config_class is not None and settings.get("auto_map") and not any(folder.glob("*.py")):
        write_code(folder, config_class.from_pretrained(folder))


def write_config(folder: Path, config: Any) -> None:
    """Write config.json and generation_config.json, as `save_pretrained` does."""
    model = blank_model(config)
    model.config.architectures = [type(model).__name__]
    model.config.auto_map = model.code_map()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def our_entries(layout: Format, config: Any, files: TensorFiles, where: str) -> list[Entry]:
    """Our tensors, in the order of the source's files, so that each file is opened about once."""
    renames = expand(layout.older(config, files.metas) or layout.renames(config), config.num_hidden_layers)
    tied = tied_names(config)
    if tied is not None and layout.tied_head in files.metas:
        _check_tied(files, layout.tied_head, renames, tied[1], where)
    order = {name: number for number, name in enumerate(files.metas)}
    ignored = layout.unused if tied is None else (*layout.unused, layout.tied_head)
    entries = to_ours(renames, files, expected_shapes(config), where, ignored)
    first = {name: order[rename.their_names[0]] for rename in renames for name in rename.our_names}
    return sorted(entries, key=lambda entry: first[entry.name])


def _check_tied(files: TensorFiles, head: str, renames: Sequence[Rename], embeddings: str, where: str) -> None:
    """Raise a `ValueError` if the head differs from the embeddings to which it is tied."""
    (theirs,) = next(rename.their_names for rename in renames if rename.our_names == (embeddings,))
    if theirs not in files.metas:
        return  # reported as missing
    if files.metas[head] != files.metas[theirs] or not same_bits(files.tensor(head), files.tensor(theirs)):
        raise ValueError(
            f"{where} declares tied head and embeddings, but {head} and {theirs} in its weights differ: set "
            "tie_embeddings (or tie_word_embeddings) in its config.json to false to use the head."
        )


def _in_dtype(entries: list[Entry], config: Any, wanted: torch.dtype | None) -> list[Entry]:
    """The tensors, in the wanted dtype if any; the config gets this dtype, or that of most bytes if it has none."""
    if wanted is not None:
        entries = [entry.cast(wanted) if entry.dtype.is_floating_point else entry for entry in entries]
    if wanted is not None or getattr(config, "dtype", None) is None:
        sizes: Counter[torch.dtype] = Counter()
        for entry in entries:
            sizes[entry.dtype] += entry.bytes
        config.dtype = sizes.most_common(1)[0][0]
    return entries


def _add_tokenizer(folder: Path, source: Source, chosen: str | PreTrainedTokenizerBase | None, config: Any) -> None:
    """Copy the tokenizer, and set the ids of special tokens that the config lacks."""
    if isinstance(chosen, PreTrainedTokenizerBase):
        chosen.save_pretrained(folder)
    elif chosen is None:
        if not copy_tokenizer(source.folder, folder):
            return
    elif not copy_tokenizer(locate(chosen, weights=False).folder, folder):
        raise ValueError(f"{chosen} holds no tokenizer files: give another folder or name on the Hub.")
    tokenizer = checked_tokenizer(folder, config.vocab_size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if tokenizer is not None and getattr(config, name, None) is None:
            setattr(config, name, getattr(tokenizer, name))
