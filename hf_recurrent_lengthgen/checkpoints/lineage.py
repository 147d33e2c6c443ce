"""The lineage of checkpoints: how it is read, and written when one checkpoint is made from another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import PreTrainedConfig

from hf_recurrent_lengthgen.checkpoints.adapters import base_of_part, holds_adapter, holds_learned_state
from hf_recurrent_lengthgen.checkpoints.conversion.sources import license_of
from hf_recurrent_lengthgen.checkpoints.private_text import portable_command
from hf_recurrent_lengthgen.checkpoints.records import (
    LINEAGE_FILE,
    Lineage,
    Source,
    Step,
    TrainingRun,
    file_digest,
    read_lineage,
    write_lineage,
)
from hf_recurrent_lengthgen.evaluation.results import TrainingRecord
from hf_recurrent_lengthgen.models import family_config
from hf_recurrent_lengthgen.versions import installed_versions

_WEIGHTS = ("*.safetensors", "*.bin", "*.pth")


def lineage_of(model: str) -> Lineage:
    """The lineage of a checkpoint or adapter folder, a Hub name, or a config.json that a command starts from.

    A checkpoint without a lineage is itself the source of a new one. A config.json stands for random weights, so it
    has no source. An adapter or learned state without a lineage has that of its base.

    Raises:
        ValueError: for a damaged lineage, and a name that does not exist.
    """
    if model.endswith(".json"):
        return Lineage()
    if holds_adapter(model) or holds_learned_state(model):
        own = read_lineage(model)
        return lineage_of(str(base_of_part(model))) if own is None else own
    on_hub = not Path(model).is_dir()
    try:
        values, _ = PreTrainedConfig.get_config_dict(model)
    except OSError as error:
        raise ValueError(f"{model} is no checkpoint folder here, and no model on the Hub: {error}") from error
    folder = _snapshot(model) if on_hub else Path(model)
    revision = folder.name if on_hub else None
    known = read_lineage(folder)
    return known if known is not None else Lineage(_source(model, folder, on_hub, revision, values))


def last_training(lineage: Lineage | None) -> TrainingRecord | None:
    """The last step of a lineage if it is a training (merging afterwards is allowed), for tables; else None."""
    steps = [] if lineage is None else [step for step in lineage.steps if step.kind != "merge"]
    run = steps[-1].training if steps else None
    if run is None:
        return None
    last = run.settings[-1]
    drop = last.method.get("state_drop_probability")
    return TrainingRecord(
        tuple(method.title for method in run.methods),
        run.steps,
        run.seconds,
        run.loss,
        last.learning_rate,
        float(drop) if isinstance(drop, int | float) else None,
    )


def record_step(
    folder: Path,
    start: Lineage,
    kind: Literal["train", "expand", "forget", "merge"],
    description: str,
    command: Sequence[str],
    training: TrainingRun | None = None,
) -> Lineage:
    """Write the lineage of a checkpoint that a command made, and return it; arguments as in `Step`.

    Absolute paths in the command are shortened, so that they reveal nothing about the machine.
    """
    lineage = start.then(Step(kind, description, portable_command(command), installed_versions(), training))
    write_lineage(folder, lineage)
    return lineage


def _snapshot(name: str) -> Path:
    """The cached files of a model on the Hub, with its lineage and card, if any; the name of the folder is the commit.

    It is the commit in the cache, which was loaded, even if the Hub has a newer one.
    """
    config = _download(name, "config.json", local_files_only=True) or _download(name, "config.json")
    if config is None:
        raise ValueError(f"{name} has no config.json on the Hub, so it is no checkpoint.")
    for file in (LINEAGE_FILE, "README.md"):
        _download(name, file, revision=config.parent.name)
    return config.parent


def _download(name: str, file: str, **options: Any) -> Path | None:
    """Path of a file in the cache; None if there is no such file."""
    try:
        return Path(hf_hub_download(name, file, **options))
    except (HfHubHTTPError, LocalEntryNotFoundError):  # no such file, or offline and not in the cache
        return None


def _source(model: str, folder: Path, on_hub: bool, revision: str | None, values: dict[str, Any]) -> Source:
    model_type = str(values.get("model_type"))
    config_class = family_config(model_type)
    layout = "transformers" if config_class is None else config_class.layouts[0]
    if model_type.startswith("stateful_"):
        layout = "lengthgen"
    files = {path.name: file_digest(path) for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))}
    return Source(model if on_hub else folder.resolve().name, on_hub, revision, layout, license_of(folder), files)
