"""Pull a checkpoint from the Hub: one commit of it, checked, into a new folder that is there as a whole or not."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile

from hf_recurrent_lengthgen.conversion.json_files import read_json_object
from hf_recurrent_lengthgen.conversion.new_folders import check_new, new_folder
from hf_recurrent_lengthgen.hub.contents import PICKLES, PUSHED, TRAINER_FILES, matches
from hf_recurrent_lengthgen.hub.names import unsafe_names
from hf_recurrent_lengthgen.hub.push import check_name
from hf_recurrent_lengthgen.hub.remote import again, git_name, hub_api, list_files
from hf_recurrent_lengthgen.records import file_digest

COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_commit(repo_id: str, revision: str | None = None, token: str | None = None) -> str:
    """The commit of a branch, tag or beginning of a commit on the Hub (default: main); 40 hex digits.

    Without a connection (HF_HUB_OFFLINE) it is what the branch was when it was last asked for.

    Raises:
        ValueError: if there is no such repository or revision, or the Hub cannot be asked.
    """
    check_name(repo_id)
    revision = revision or "main"
    if COMMIT.fullmatch(revision):
        return revision
    if constants.HF_HUB_OFFLINE:
        return _cached(repo_id, revision).name
    token, doing = token or get_token(), f"Looking for revision {revision} of {repo_id}"
    info = again(lambda: hub_api(token).model_info(repo_id, revision=revision), doing)
    # the client's cache remembers the revision with it, for use without a connection

    def remember() -> None:
        # without it there is no checkpoint, which is told when its files are chosen
        with suppress(RemoteEntryNotFoundError), _as_lost():
            hf_hub_download(repo_id, "config.json", revision=revision, token=token or False)

    again(remember, doing)
    return str(info.sha)


def _cached(repo_id: str, revision: str) -> Path:
    """The folder of the client's cache that holds all checkpoint files of a revision."""
    options: dict[str, Any] = {"revision": revision, "local_files_only": True}
    nested = [pattern for pattern in PUSHED if "/" in pattern]
    try:
        snapshot_download(repo_id, allow_patterns=nested, **options)
        flat = [pattern for pattern in PUSHED if "/" not in pattern]
        return Path(
            snapshot_download(repo_id, allow_patterns=flat, ignore_patterns=["*/*", *TRAINER_FILES], **options)
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"HF_HUB_OFFLINE is set, and {repo_id} at {revision} has not been downloaded completely: unset it."
        ) from error


def pull_checkpoint(
    repo_id: str, revision: str | None, output: str | os.PathLike[str], *, token: str | None = None
) -> Path:
    """Download a checkpoint into a new folder, and check that all files are those of the commit.

    Only the files of a checkpoint are taken (`contents.PUSHED`): no pickles, nothing of a trainer. Files that were
    downloaded before are taken from the client's cache; one that turns out to be damaged is downloaded once more.

    Args:
        repo_id: owner/name.
        revision: Branch, tag or commit (default: main). What it is now is `resolve_commit`.
        output: Folder, new or empty.
        token: Of the Hub (default: HF_TOKEN, or that of `hf auth login`).

    Raises:
        ValueError: as `resolve_commit`; if the repository holds no checkpoint, only pickles, or files whose names are
            unsafe (`names.unsafe_names`), if files stay damaged, or if `output` is not new.
    """
    output, token = Path(output), token or get_token()
    check_new(output)
    commit = resolve_commit(repo_id, revision, token)
    if constants.HF_HUB_OFFLINE:
        cache = _cached(repo_id, commit)
        names = sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
        chosen = _checkpoint_files(repo_id, names)
        damaged = _damaged_in_cache(cache, chosen)
    else:
        there = list_files(hub_api(token), repo_id, commit)
        chosen = _checkpoint_files(repo_id, sorted(there))
        cache = _download(repo_id, commit, chosen, token)
        damaged = [name for name in chosen if not _is_file(cache / name, there[name])]
        if damaged:
            for name in damaged:
                (cache / name).resolve().unlink(missing_ok=True)
                (cache / name).unlink(missing_ok=True)
            _download(repo_id, commit, damaged, token)
            damaged = [name for name in chosen if not _is_file(cache / name, there[name])]
    if damaged:
        raise ValueError(
            f"{', '.join(damaged)} of {repo_id} came with other content than its hash says, nothing was written. "
            "Delete it from the cache (hf cache) and try again later."
        )
    read_json_object(cache / "config.json")
    with new_folder(output) as folder:
        for name in chosen:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cache / name, folder / name)
    return output


def _checkpoint_files(repo_id: str, names: Sequence[str]) -> list[str]:
    chosen = [name for name in names if matches(name, PUSHED) and not matches(name, TRAINER_FILES)]
    if unsafe := unsafe_names(chosen):
        raise ValueError(f"Nothing is pulled of {repo_id}, for names of its files: {'; '.join(unsafe)}.")
    if "config.json" not in chosen:
        raise ValueError(f"{repo_id} holds no config.json, so it is no checkpoint.")
    if not any(name.endswith(".safetensors") and "/" not in name for name in chosen):
        pickles = [name for name in names if name.endswith(PICKLES)]
        advice = f", only {', '.join(pickles)}: lengthgen convert {repo_id} reads such files" if pickles else ""
        raise ValueError(f"{repo_id} holds no weights as safetensors{advice}.")
    return chosen


def _download(repo_id: str, commit: str, names: Sequence[str], token: str | None) -> Path:
    escaped = [re.sub(r"([*?[])", r"[\1]", name) for name in names]

    def call() -> str:
        with _as_lost():
            return snapshot_download(repo_id, revision=commit, allow_patterns=escaped, token=token or False)

    return Path(again(call, f"Downloading {repo_id} (files that are complete are kept)"))


@contextmanager
def _as_lost() -> Iterator[None]:
    """What the client tells as a file that its cache lacks is a Hub that it did not reach; the cause says why."""
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise ConnectionError(str(error)) from error


def _is_file(path: Path, entry: RepoFile) -> bool:
    """Whether a downloaded file is what the Hub lists."""
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    return file_digest(path) == entry.lfs.sha256 if entry.lfs is not None else git_name(path) == entry.blob_id


def _damaged_in_cache(cache: Path, names: Sequence[str]) -> list[str]:
    """Files of the client's cache that are not what their names there say: the hash of the content."""
    damaged = []
    for name in names:
        known = (cache / name).resolve().name
        digest = {64: file_digest, 40: git_name}.get(len(known))
        if (cache / name).is_symlink() and digest is not None and digest(cache / name) != known:
            damaged.append(name)
    return damaged
