"""From where checkpoints come: folders, files and models on the Hub, and the lineage that a new one continues."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, metadata_load, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from hf_recurrent_lengthgen.checkpoints.adapters import base_of_part, holds_adapter, holds_learned_state
from hf_recurrent_lengthgen.checkpoints.loading import check_name, read_settings
from hf_recurrent_lengthgen.checkpoints.records import (
    LINEAGE_FILE,
    TOKENIZER_FILES,
    Lineage,
    file_digest,
    read_lineage,
)
from hf_recurrent_lengthgen.checkpoints.records import Source as Origin
from hf_recurrent_lengthgen.checkpoints.tensor_files import WEIGHT_FILES
from hf_recurrent_lengthgen.models import family_config

CONTAINERS = (
    ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"],
    ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"],
)
SMALL_FILES = ["config.json", "generation_config.json", "README.md", "*.py", *TOKENIZER_FILES]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pth")


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine.

    Args:
        path: Folder, or one weight file.
        name: Name on the Hub; for a local checkpoint, the last part of its path.
        on_hub: Whether `name` is a name on the Hub.
        revision: Commit on the Hub; None for a local checkpoint.
    """

    path: Path
    name: str
    on_hub: bool
    revision: str | None

    @property
    def folder(self) -> Path:
        """The folder with config and tokenizer."""
        return self.path.parent if self.path.is_file() else self.path


def license_of(folder: Path) -> str | None:
    """The license in the card of a checkpoint folder; None without a card or license."""
    card = folder / "README.md"
    license = (metadata_load(card) or {}).get("license") if card.is_file() else None
    return license if isinstance(license, str) else None


def locate(name: str, revision: str | None = None, weights: bool = True) -> Source:
    """Find a checkpoint; from the Hub, download weights in one container, config and tokenizer.

    Args:
        name: Folder, weight file, owner/name on the Hub, or owner/name/file.pth for one of several files there.
        revision: Branch, tag or commit on the Hub; None for its main branch.
        weights: Whether weights are needed.

    Raises:
        ValueError: if the checkpoint does not exist or cannot be downloaded, and for a `revision` of local files.
    """
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise ValueError(f"{name} is a local path, not on the Hub, so it has no revision: leave out {revision!r}.")
        # a file in the Hub's cache is a link to a blob, which has another name and other neighbours
        return _local(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)
    parts = name.split("/")
    file = parts[2] if len(parts) == 3 and name.endswith((".pth", ".pt")) and not path.parent.is_dir() else None
    if file is None and name.endswith((".pth", ".pt", ".bin", ".safetensors")):
        raise ValueError(f"There is no file {name}: give the path of a file, or owner/name/file.pth on the Hub.")
    repo_id = name if file is None else "/".join(parts[:2])
    check_name(repo_id)
    try:
        folder, commit = _downloaded(repo_id, revision, file, weights)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{name} is no local checkpoint, and cannot be downloaded from the Hub ({reason}). Downloaded files stay "
            "in its cache."
        ) from error
    return Source(folder if file is None else folder / file, repo_id, True, commit)


def _local(path: Path) -> Source:
    """A local source; a folder of the Hub's cache, models--owner--name/snapshots/commit, gives name and commit."""
    folder = path.parent if path.is_file() else path
    cache = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cache.startswith("models--"):
        return Source(path, cache.removeprefix("models--").replace("--", "/"), True, folder.name)
    return Source(path, path.name, False, None)


def _downloaded(repo_id: str, revision: str | None, file: str | None, weights: bool) -> tuple[Path, str]:
    """Folder in the cache, and commit. Without a network, the cached files are used."""
    folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=SMALL_FILES))
    commit = folder.name
    if not weights:
        return folder, commit
    if file is not None:
        hf_hub_download(repo_id, file, revision=commit)
        return folder, commit
    for patterns in CONTAINERS:
        snapshot_download(repo_id, revision=commit, allow_patterns=patterns)
        if any((folder / name).is_file() for name in WEIGHT_FILES):
            return folder, commit
    raise ValueError(
        f"{repo_id} holds none of {', '.join(WEIGHT_FILES)}: if it holds .pth files, give one, as {repo_id}/FILE.pth."
    )


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
    values = read_settings(model)
    folder = _loaded_commit(model) if on_hub else Path(model)
    revision = folder.name if on_hub else None
    if (known := read_lineage(folder)) is not None:
        return known
    model_type = str(values.get("model_type"))
    config_class = family_config(model_type)
    layout = "transformers" if config_class is None else config_class.layouts[0]
    if model_type.startswith("stateful_"):
        layout = "lengthgen"
    files = {path.name: file_digest(path) for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))}
    name = model if on_hub else folder.resolve().name
    return Lineage(Origin(name, on_hub, revision, layout, license_of(folder), files))


def _loaded_commit(name: str) -> Path:
    """The cached files of a model on the Hub, with its lineage and card, if any; the name of the folder is the commit.

    It is the commit in the cache, which was loaded, even if the Hub has a newer one.
    """
    try:
        folder = Path(hf_hub_download(name, "config.json", local_files_only=True)).parent
    except LocalEntryNotFoundError:
        folder = Path(hf_hub_download(name, "config.json")).parent
    for file in (LINEAGE_FILE, "README.md"):
        with suppress(HfHubHTTPError, LocalEntryNotFoundError):  # no such file, or offline and not in the cache
            hf_hub_download(name, file, revision=folder.name)
    return folder
