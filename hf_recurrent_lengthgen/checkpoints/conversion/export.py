"""Export a checkpoint of this package to another layout with the same architecture, tensor by tensor."""

import shutil
from pathlib import Path
from typing import Any

from hf_recurrent_lengthgen.checkpoints.conversion.convert import read_settings
from hf_recurrent_lengthgen.checkpoints.conversion.exported_configs import check_exportable, exported_config
from hf_recurrent_lengthgen.checkpoints.conversion.formats import Settings, config_errors, expected_shapes, tied_names
from hf_recurrent_lengthgen.checkpoints.conversion.key_maps import expand, to_theirs
from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, new_folder
from hf_recurrent_lengthgen.checkpoints.conversion.registry import named_format
from hf_recurrent_lengthgen.checkpoints.conversion.tensor_writing import write_safetensors, write_torch
from hf_recurrent_lengthgen.checkpoints.conversion.tokenizer_files import copy_tokenizer
from hf_recurrent_lengthgen.checkpoints.records import write_settings_file
from hf_recurrent_lengthgen.checkpoints.sources import locate
from hf_recurrent_lengthgen.checkpoints.tensor_files import Meta, TensorFiles
from hf_recurrent_lengthgen.models import FAMILIES, STATEFUL_CLASSES


def export_checkpoint(
    checkpoint: str, output: Path, format: str, *, revision: str | None = None, max_shard_size: str | int = "5GB"
) -> Path:
    """Write a checkpoint of this package in another layout, completely or not at all, with equal values and dtypes.

    Args:
        checkpoint: Folder or Hub name of a checkpoint of this package, also one that a Trainer saved during training.
        output: Folder for the result, new or empty.
        format: Name of the layout.
        revision: Branch, tag or commit on the Hub.
        max_shard_size: As in Transformers' `save_pretrained`; ignored for layouts of one file.

    Raises:
        ValueError: for a folder that is no checkpoint of this package, an architecture that the layout cannot hold
            (each difference is named), and weights that do not fit their config.
    """
    output = Path(output)
    check_new(output)
    layout = named_format(format)
    place = locate(checkpoint, revision)
    config = our_config(read_settings(place), checkpoint)
    check_exportable(layout, config)
    files = TensorFiles(place.path)
    renames = expand(layout.renames(config), config.num_hidden_layers)
    tied, shared = tied_names(config), {}
    entries = to_theirs(renames, files, expected_shapes(config), checkpoint)
    if tied is not None and layout.writes_tied_head:
        shared[layout.tied_head] = next(x.their_names[0] for x in renames if x.our_names == (tied[1],))
    metas = {entry.name: Meta(entry.shape, entry.dtype) for entry in entries}
    settings = exported_config(layout, config, metas | {name: metas[other] for name, other in shared.items()})
    if settings is not None:
        settings.pop("auto_map", None)  # of code that does not come along
    with new_folder(output) as folder:
        if layout.container == "safetensors":
            write_safetensors(folder, entries, max_shard_size)
        else:
            write_torch(folder / layout.weights_file, entries, shared)
        if settings is not None:
            write_settings_file(folder / "config.json", settings)
        generation = place.folder / "generation_config.json"
        if "model_type" in (settings or {}) and generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        copy_tokenizer(place.folder, folder)
    return output


def our_config(settings: Settings | None, where: str) -> Any:
    """The config of a checkpoint of this package, without its code."""
    model_type = (settings or {}).get("model_type")
    if settings is None or model_type not in FAMILIES:
        stock = model_type is not None and model_type not in STATEFUL_CLASSES
        has = "no config.json" if settings is None else f"the model type {model_type!r}"
        nothing = "in the layout of Transformers already, which ignores attention_window: there is nothing to export"
        to_convert = "no checkpoint of this package: convert it with `lengthgen convert` first"
        raise ValueError(f"{where} has {has}, so it is {nothing if stock else to_convert}.")
    fields = {name: value for name, value in settings.items() if name not in ("architectures", "auto_map")}
    with config_errors(f"The config.json of {where}"):
        return FAMILIES[model_type].config_class.from_dict(fields)
