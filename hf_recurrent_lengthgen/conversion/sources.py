"""Where a checkpoint is: a folder or file here, or a model on the Hub, of which what is needed is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, metadata_load, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from hf_recurrent_lengthgen.conversion.tensor_files import WEIGHT_FILES
from hf_recurrent_lengthgen.loading import check_name

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "*.tiktoken", "rwkv_vocab*.txt", "chat_template.*", "chat_templates/*"),
)
SMALL_FILES = ("config.json", "generation_config.json", "README.md", "*.py", *TOKENIZER_FILES)


@dataclass(frozen=True)
class Source:
    """A checkpoint that is here now.

    Args:
        path: Folder, or one weight file.
        name: Name on the Hub; of a local one, the last part of its path.
        on_hub: Whether `name` is a name on the Hub.
        revision: Commit on the Hub; None if it is not from there.
    """

    path: Path
    name: str
    on_hub: bool
    revision: str | None

    @property
    def folder(self) -> Path:
        """Where config and tokenizer are."""
        return self.path.parent if self.path.is_file() else self.path

    @property
    def license(self) -> str | None:
        """As the model card says."""
        card = self.folder / "README.md"
        try:
            told = (metadata_load(card) or {}) if card.is_file() else {}
        except ValueError:  # no YAML
            return None
        license = told.get("license")
        if license == "other":
            license = told.get("license_name") or license
        return license if isinstance(license, str) else None


def locate(name: str, revision: str | None = None, weights: bool = True) -> Source:
    """Find a checkpoint, and download what is needed of one on the Hub: weights in one container, config, tokenizer.

    Args:
        name: Folder, weight file, owner/name on the Hub, or owner/name/file.pth for one file of several there.
        revision: Branch, tag or commit on the Hub; None for its main branch.
        weights: Whether weights are needed.

    Raises:
        ValueError: for what is not there, or cannot be downloaded, and a `revision` of local files.
    """
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise ValueError(f"{name} is here, not on the Hub, so it has no revision: leave out {revision!r}.")
        return _local(path.resolve())
    parts = name.split("/")
    file = parts[2] if len(parts) == 3 and name.endswith((".pth", ".pt")) and not path.parent.is_dir() else None
    repo_id = name if file is None else "/".join(parts[:2])
    check_name(repo_id)
    try:
        folder, commit = _downloaded(repo_id, revision, file, weights)
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{name} is not here, and the Hub cannot be reached: {error}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        told = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name} is no checkpoint here, and cannot be had from the Hub: {told}") from error
    return Source(folder if file is None else folder / file, repo_id, True, commit)


def _local(path: Path) -> Source:
    """A folder of the Hub's cache, models--owner--name/snapshots/commit, tells its name."""
    folder = path.parent if path.is_file() else path
    cache = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cache.startswith("models--"):
        return Source(path, cache.removeprefix("models--").replace("--", "/"), True, folder.name)
    return Source(path, path.name, False, None)


def _downloaded(repo_id: str, revision: str | None, file: str | None, weights: bool) -> tuple[Path, str]:
    try:
        info = HfApi().model_info(repo_id, revision=revision)
    except OfflineModeIsEnabled:
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        return folder, folder.name
    assert info.sha is not None
    names = [sibling.rfilename for sibling in info.siblings or ()]
    wanted = [name for name in names if any(fnmatch(name, pattern) for pattern in SMALL_FILES)]
    wanted = [name for name in wanted if "/" not in name or name.startswith("chat_templates/")]
    if file is not None and file not in names:
        raise ValueError(f"{repo_id} holds no {file}, but {', '.join(sorted(names))}.")
    if weights:
        wanted += [file] if file is not None else _weights(names, repo_id)
    return Path(snapshot_download(repo_id, revision=info.sha, allow_patterns=wanted)), info.sha


def _weights(names: Sequence[str], repo_id: str) -> list[str]:
    """Of the files of a model, the weights in the container that comes first in `WEIGHT_FILES`."""
    first = next((name for name in WEIGHT_FILES if name in names), None)
    if first is not None:
        stem, _, suffix = first.removesuffix(".index.json").rpartition(".")
        shards = [name for name in names if fnmatch(name, f"{stem}-*-of-*.{suffix}")]
        return [first, *(shards if first.endswith(".index.json") else ())]
    single = [name for name in names if name.endswith(".pth") and "/" not in name]
    if len(single) != 1:
        told = f"several .pth files: give one of {', '.join(f'{repo_id}/{name}' for name in single)}"
        raise ValueError(f"{repo_id} holds {told if single else f'no weights, but {chr(44).join(sorted(names))}'}.")
    return single
